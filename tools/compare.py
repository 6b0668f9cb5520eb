"""--compare: the same prompts by plain decoding, which must give the same text, and its speed."""

import sys

import torch

from backends import cpu
from generate import Sampling
from kernels import filter_logits, gumbel

# what two orders of summation may differ by, in units of the dtype's eps times the largest logit
ROUNDINGS = {torch.float32: 32, torch.bfloat16: 4, torch.float16: 4}


def against_plain(session, output, say):
    """Decodes the prompts of an Output plainly and says how it compares -> (the plain Output, the
    `first_difference`); (None, None) after Ctrl-C."""
    new = session.args.max_new_tokens
    prompts = [sequence.prompt for sequence in output.sequences]
    try:
        engine = session.engine(prompts, heads=None, lookup=False, tree_size=1)
        engine.generate(prompts[:1], min(4, new))  # what is compiled or loaded is not timed
        engine.clear()
        plain = engine.generate(prompts, new, session.stop, encoding=session.encoding)
    except KeyboardInterrupt:
        print("interrupted: no comparison", file=sys.stderr)
        return None, None
    speed_up = output.tokens_per_second / plain.tokens_per_second
    say(f"plain decoding: {plain.tokens_per_second:.1f} tokens per second; speed-up "
        f"{speed_up:.2f}x")
    difference = first_difference(session.model, prompts, output.tokens, plain.tokens,
                                  **session.sampling)
    if difference is None:
        say(f"the text is identical, all {plain.emitted} tokens")
    else:
        prompt, position, gap, kind = difference
        apart = "one of them ends there" if gap is None else f"the two scores are {gap:.2g} apart"
        say(f"the text differs first at new token {position} of prompt {prompt}: a {kind}, {apart}")
    return plain, difference


def first_difference(model, prompts, ours, plain, **sampling):
    """The first token where two outputs differ: None, or (prompt, position, gap, kind).

    gap: how far the worse of the two tokens is below the best score there (logit, or logit /
    temperature + noise), None where one text just ends earlier. kind: "tie" when the gap is within
    rounding of the model's dtype, else "bug"; always that where decoding is exact."""
    for i, (prompt, a, b) in enumerate(zip(prompts, ours, plain)):
        shorter = min(len(a), len(b))
        first = next((j for j in range(shorter) if a[j] != b[j]), shorter)
        if first < shorter:
            context = [*prompt, *a[:first]]
            return i, first, *gap_and_kind(model, i, context, (a[first], b[first]), **sampling)
        if len(a) != len(b):
            return i, first, None, "bug"
    return None


@torch.inference_mode()
def gap_and_kind(model, index, context, tokens, **sampling):
    """The last two of `first_difference`, for two tokens that follow a context of text `index`."""
    s = Sampling(**sampling)
    device = model.device
    hidden = model(torch.tensor([context], device=device))
    scores = model.lm_head(hidden[:, -1]).float()  # (1, V)
    scale = s.temperature or 1.0
    eps = torch.finfo(model.dtype).eps
    rounding = ROUNDINGS[model.dtype] * eps * scores.abs().max().item() / scale
    if s.temperature > 0:
        ids = torch.arange(scores.shape[-1], device=device)
        number = lambda n: torch.tensor([n], device=device)
        noise = gumbel(s.seed, number(index), number(len(context)), ids)
        scores = filter_logits(scores / scale, s.top_k, s.top_p, s.min_p) + noise
    gap = (scores.max() - scores[0, list(tokens)].min()).item()
    return gap, "tie" if gap <= rounding and not cpu.is_exact(model) else "bug"
