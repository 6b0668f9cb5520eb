"""--compare: decodes the same prompts plainly, and compares output and speed."""

import torch

from backends import cpu, cpu_library
from backends.capture import warm_up
from kernels import filter_logits, gumbel, mask_logits
from tools.statistics import Statistics


def against_plain(loaded, engine, prompts, grammars, limit, output, printer):
    """Decodes plainly, with another engine, what gave an `Output`, and prints the comparison.
    Returns a part of the --json object."""
    compile_all(engine, prompts, grammars)
    counted = Statistics()
    plain = engine.generate(prompts, limit, loaded.stop, counted.count, loaded.encoding,
                            grammars=grammars)
    say = printer.say
    say(f"plain decoding: {plain.tokens_per_second:.1f} tokens per second; speed-up "
        f"{output.tokens_per_second / plain.tokens_per_second:.2f}x; C kernels: "
        f"{cpu_library.instructions(loaded.model.device)}")
    sampling = [sequence.sampling for sequence in output.sequences]
    difference = first_difference(loaded.model, prompts, output.tokens, plain.tokens, sampling,
                                  grammars)
    if difference is None:
        say(f"output is identical ({plain.emitted} tokens)")
    else:
        prompt, position, gap, kind = difference
        detail = "one output ends there" if gap is None else f"the two scores differ by {gap:.2g}"
        say(f"outputs first differ at new token {position} of prompt {prompt}: a {kind}, {detail}")
    return dict(plain=printer.as_json(plain, counted), difference=difference)


def compile_all(engine, prompts, grammars):
    """Compiles and loads everything that a timed run of these prompts needs."""
    room = engine.decoder.capacity - len(prompts[0])
    engine.generate(prompts[:1], min(4, room), grammars=grammars[:1])
    engine.clear()
    warm_up(engine, guided=any(grammars))


@torch.inference_mode()
def first_difference(model, prompts, ours, plain, sampling, grammars=None):
    """The first token where two outputs differ: None, or (prompt, position, gap, kind). sampling,
    grammars: one for each prompt.

    gap: the best score at this position minus the lower score of the two tokens (logits, or
    logits / temperature + noise); None if one output merely ends earlier. kind: "tie" if the gap is
    within rounding of the model's dtype, else "bug". Where decoding is bit-exact, always "bug"."""
    index = next((i for i, (a, b) in enumerate(zip(ours, plain)) if a != b), None)
    if index is None:
        return None
    a, b = ours[index], plain[index]
    shorter = min(len(a), len(b))
    first = next((j for j in range(shorter) if a[j] != b[j]), shorter)
    if first == shorter:
        return index, first, None, "bug"
    s = sampling[index]
    context = torch.tensor([[*prompts[index], *a[:first]]], device=model.device)
    scores = model.lm_head(model(context)[:, -1]).float()  # (1, V)
    scale = s.temperature or 1.0
    roundings = 32 if model.dtype == torch.float32 else 4  # of the largest logit
    rounding = roundings * torch.finfo(model.dtype).eps * scores.abs().max().item() / scale
    if grammars and grammars[index]:
        matcher = grammars[index].start()
        matcher.take(a[:first])
        scores = mask_logits(scores, torch.from_numpy(matcher.mask).to(model.device)[None])
    if s.temperature > 0:
        ids = torch.arange(scores.shape[-1], device=model.device)
        number = lambda n: torch.tensor([n], device=model.device)
        noise = gumbel(s.seed, number(index), number(context.shape[1]), ids)
        scores = filter_logits(scores / scale, s.top_k, s.top_p, s.min_p) + noise
    gap = (scores.max() - scores[0, [a[first], b[first]]].min()).item()
    return index, first, gap, "tie" if gap <= rounding and not cpu.is_exact(model) else "bug"
