"""How good draft heads are.

head accuracy        the share of held-out positions where the model's own greedy token is among a
                     head's n likeliest of its draft vocabulary
tokens per step      of decoding held-out prompts, with an interval for other prompts of the kind
acceptance           how often each node of a tree is accepted, for tools/tune.py
"""

import contextlib
import json
from collections import Counter

import numpy as np
import torch

from generate import generate
from tools.tune import acceptance
from training.common import saving
from training.data import prompts, window_batch
from training.loss import guess_masks, teacher_forced, top_hits

PROMPTS = 32  # held-out ones, decoded to measure the heads
DECODED = 64  # new tokens per prompt
TREE_SIZE = 17
TOPS = (1, 2, 4, 8)  # head accuracy is measured for these n


def heldout_prompts(heldout, model):
    """PROMPTS of the held-out Tokens; the context has room for DECODED tokens after each."""
    room = model.config.block_size - DECODED
    return prompts(heldout, PROMPTS, max(min(64, room // 2), 1), max_len=max(min(256, room), 1))


@torch.no_grad()
def head_accuracy(heads, heldout, batch_size, block_size, autocast=contextlib.nullcontext(),
                  batches=16):
    """{n: a list of K shares} for n of TOPS, on fixed windows of the held-out Tokens. autocast: for
    heads that are not in the model's dtype."""
    model = heads.model
    hits = guesses = 0
    length = block_size + heads.config.n_draft + 1
    for seed in range(batches):
        ids, loss_mask, documents = window_batch([(heldout, batch_size)], length, seed,
                                                 model.device)
        with autocast:
            hidden, outputs = teacher_forced(heads, ids, documents)
            guess_mask = guess_masks(ids, len(outputs), loss_mask, documents)
            hits = hits + top_hits(model, outputs, hidden, guess_mask, TOPS,
                                   vocabulary=heads.vocabulary)
        guesses = guesses + guess_mask.sum(dim=(1, 2))
    return dict(zip(TOPS, (hits / guesses.clamp(min=1)).tolist()))


def measure(heads, heldout, batch_size, block_size, log=print):
    """The measurements that go into heads.json, as a dict. The heads must be in the model's dtype.
    The interval is that of 95% of draws of such prompts (bootstrap). log: called with a line before
    each part."""
    log("measuring 1 of 4: head accuracy")
    top = head_accuracy(heads, heldout, batch_size, block_size)
    given = heldout_prompts(heldout, heads.model)
    log(f"measuring 2 of 4: {len(given)} prompts, greedy, tree size {TREE_SIZE}")
    steps = Counter()
    out = generate(heads.model, given, DECODED, heads, tree_size=TREE_SIZE,
                   on_tokens=lambda i, tokens: steps.update([i]))
    counts = np.array([(len(tokens), steps[i]) for i, tokens in enumerate(out.tokens)])
    draws = np.random.default_rng(0).integers(len(counts), size=(10_000, len(counts)))
    tokens, steps = counts[draws].sum(axis=1).T
    interval = np.percentile(tokens / steps, (2.5, 97.5)).tolist()
    tables = {}
    for part, temperature in enumerate((0.0, 1.0), start=3):
        log(f"measuring {part} of 4: acceptance at temperature {temperature:g}")
        rows = acceptance(heads.model, heads, given, temperature, DECODED)
        tables[f"{temperature:g}"] = [[round(share, 4) for share in row] for row in rows]
    return dict(accuracy=top[1], top_accuracy=top, prompts=len(given),
                tokens_per_step=out.tokens_per_step, tokens_per_step_interval=interval,
                acceptance=tables)


def table(top_accuracy, prompts=None, tokens_per_step=None, tokens_per_step_interval=None, **_):
    """The lines that show what `measure`, or `head_accuracy` alone, found."""
    lines = ["held-out accuracy" + "".join(f"{f'top {n}':>9}" for n in TOPS)]
    for i, row in enumerate(zip(*top_accuracy.values()), start=1):
        lines.append(f"head {i:<12}" + "".join(f"{share:>9.1%}" for share in row))
    if tokens_per_step is not None:
        low, high = tokens_per_step_interval
        lines.append(f"{tokens_per_step:.2f} tokens per step (95% interval {low:.2f} to "
                     f"{high:.2f}) over {prompts} held-out prompts, greedy, tree size {TREE_SIZE}")
    return "\n".join(lines)


def record(heads, out, tokenizer, found, weights=False):
    """Prints what `measure` found, and adds it to the heads.json of heads that are saved; weights:
    writes them too."""
    print(table(**found))
    kept = {name: value for name, value in heads.info.items() if name not in ("config", "base")}
    with saving(f"{out}: what was measured cannot be written", "make room and --evaluate"):
        if weights:
            heads.save_pretrained(out, tokenizer, torch.bfloat16, **kept | found)
        else:
            heads.save_record(out, tokenizer, **kept | found)


def plot(folder):
    """Draws a run's log.jsonl as training.png, where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    figure = Figure((11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(steps, [line["loss"] for line in lines])
    left.set(xlabel="step", ylabel="loss, nats")
    for i, shares in enumerate(zip(*(line["accuracy"] for line in lines))):
        right.plot(steps, shares, label=f"head {i + 1}")
    right.set(xlabel="step", ylabel="head accuracy")
    right.legend()
    with contextlib.suppress(OSError):  # a full disk: log.jsonl still has the numbers
        figure.savefig(folder / "training.png")
