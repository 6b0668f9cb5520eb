"""--compare: the same prompts by plain decoding, which must give the same text; and how fast that
is."""

import sys

import torch

from backends import cpu
from backends.tensor_parallel import group_of
from generate import Sampling, filter_logits
from kernels import gumbel

# what two orders of summing may differ by, in units of the dtype's eps times the largest logit
ROUNDINGS = {torch.float32: 32, torch.bfloat16: 4, torch.float16: 4}


def against_plain(session, prompts, output, say):
    """Decodes the prompts plainly and says how `output` compares -> what --json adds, nothing after
    Ctrl-C."""
    new = session.args.max_new_tokens
    try:
        engine = session.engine(prompts, heads=None, lookup=False, tree_size=1)
        engine.generate(prompts[:1], min(4, new))  # whatever is compiled or loaded, before it is timed
        plain = engine.generate(prompts, new, session.stop, encoding=session.encoding)
    except KeyboardInterrupt:
        print("interrupted: no comparison", file=sys.stderr)
        return {}
    difference = first_difference(session.model, prompts, output.tokens, plain.tokens, **session.sampling)
    speed_up = output.tokens_per_second / plain.tokens_per_second
    say(f"plain decoding: {plain.tokens_per_second:.1f} tokens per second; speed-up {speed_up:.2f}x")
    if difference is None:
        say(f"the text is identical, all {plain.emitted} tokens")
    else:
        prompt, position, gap, kind = difference
        apart = "one of them ends there" if gap is None else f"the two scores are {gap:.2g} apart"
        say(f"the text differs first at new token {position} of prompt {prompt}: a {kind}, {apart}")
    return dict(plain=session.report(plain), difference=difference)


@torch.inference_mode()
def first_difference(model, prompts, ours, plain, **sampling):
    """The first token where two outputs differ: None, or (prompt, position, gap, kind).

    gap: how far the worse of the two tokens is below the best score there (logit, or logit /
    temperature + noise). kind is "tie" when the gap is within rounding of the model's dtype, so
    that the order of summation may decide, else "bug"; in bfloat16 from packed weights, where the
    order decides nothing, always "bug". Where one text just ends earlier, gap is None and kind is
    "bug"."""
    s = Sampling(**sampling)
    for i, (a, b) in enumerate(zip(ours, plain)):
        first = next((j for j in range(max(len(a), len(b))) if a[j:j + 1] != b[j:j + 1]), None)
        if first is None:
            continue
        if first >= min(len(a), len(b)):
            return i, first, None, "bug"
        context = torch.tensor([list(prompts[i]) + a[:first]], device=model.device)
        scores = model.lm_head(model(context)[:, -1]).float()  # (1, V)
        scale = s.temperature or 1.0
        rounding = ROUNDINGS[model.dtype] * torch.finfo(model.dtype).eps * scores.abs().max().item() / scale
        if s.temperature > 0:
            tokens = torch.arange(scores.shape[-1], device=model.device)
            sequence, position = (torch.tensor([x], device=model.device) for x in (i, context.shape[1]))
            noise = gumbel(s.seed, sequence, position, tokens)
            scores = filter_logits(scores / scale, s.top_k, s.top_p, s.min_p) + noise
        gap = (scores.max() - scores[0, [a[first], b[first]]].min()).item()
        exact = cpu.is_exact(model) and group_of(model).size == 1
        return i, first, gap, "tie" if gap <= rounding and not exact else "bug"
    return None
