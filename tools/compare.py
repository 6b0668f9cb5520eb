"""Comparing with plain decoding."""

import torch

from generate import Sampling, keep_likely
from kernels import gumbel

# what two orders of summing may differ by, in units of the dtype's eps times the largest logit
ROUNDINGS = {torch.float32: 32, torch.bfloat16: 4, torch.float16: 4}


# ---------------------------------------------------------------------------------------------------------------------
# Comparing with plain decoding

@torch.inference_mode()
def first_difference(model, prompts, ours, plain, **sampling):
    """The first token where two outputs differ: None, or (prompt, place, gap, kind).

    gap: how far the worse of the two tokens is below the best score there (logit, or logit / temperature + noise). kind is
    "tie" when that is within rounding of the model's dtype, so that the order of summation may decide, else "bug". Where
    one text just ends earlier there is no gap (None), and no excuse.
    """
    s = Sampling(**sampling)
    for i, (a, b) in enumerate(zip(ours, plain)):
        at = next((j for j in range(max(len(a), len(b))) if a[j:j + 1] != b[j:j + 1]), None)
        if at is None:
            continue
        if at >= min(len(a), len(b)):
            return i, at, None, "bug"
        context = torch.tensor([list(prompts[i]) + a[:at]], device=model.device)
        scores = model.lm_head(model(context)[:, -1]).float()
        scale = s.temperature or 1.0
        rounding = ROUNDINGS[model.dtype] * torch.finfo(model.dtype).eps * scores.abs().max().item() / scale
        if s.temperature > 0:
            tokens = torch.arange(scores.shape[-1], device=model.device)
            place = (torch.tensor([x], device=model.device) for x in (i, context.shape[1]))
            scores = keep_likely(scores / scale, s.top_k, s.top_p, s.min_p) + gumbel(s.seed, *place, tokens)
        gap = (scores.max() - scores[0, [a[at], b[at]]].min()).item()
        return i, at, gap, "tie" if gap <= rounding else "bug"
    return None


