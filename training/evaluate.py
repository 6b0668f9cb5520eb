"""How good draft heads are: how often they guess right, and how far decoding gets with them. train_heads.py ends with
it.

head accuracy        the share of held-out positions where the model's own greedy token is among a head's n likeliest
                     of its draft vocabulary
tokens per step      of decoding held-out prompts, with an interval for other prompts of the kind
acceptance           how often each node of a drafted tree is accepted, from which tools/tune.py picks the tree
"""

import contextlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from generate import generate
from tools.tune import acceptance
from training.data import window_batch
from training.loss import guess_masks, teacher_forced, top_hits

DECODED = 64  # new tokens per prompt
TOPS = (1, 2, 4, 8)  # head accuracy is measured for these n


@torch.no_grad()
def head_accuracy(heads, heldout, batch_size, block_size, autocast=contextlib.nullcontext(), batches=16):
    """{n: a list of K shares} for n of TOPS, on fixed windows of the held-out Tokens. autocast: for heads that are not
    in the model's dtype."""
    hits = guesses = 0
    length = block_size + heads.config.n_draft + 1
    for seed in range(batches):
        ids, loss_mask, documents = window_batch([(heldout, batch_size)], length, seed, heads.model.device)
        with autocast:
            hidden, outputs = teacher_forced(heads, ids, documents)
            guess_mask = guess_masks(ids, len(outputs), loss_mask, documents)
            hits = hits + top_hits(heads.model, outputs, hidden, guess_mask, TOPS, vocabulary=heads.vocabulary)
        guesses = guesses + guess_mask.sum(dim=(1, 2))
    return dict(zip(TOPS, (hits / guesses.clamp(min=1)).tolist()))


def measure(heads, heldout, prompts, batch_size, block_size):
    """The measurements that go into heads.json, as a dict. The heads must be in the model's dtype. The interval is that
    of 95% of draws of such prompts (bootstrap)."""
    top, steps = head_accuracy(heads, heldout, batch_size, block_size), Counter()
    out = generate(heads.model, prompts, DECODED, heads, tree_size=17, on_tokens=lambda i, tokens: steps.update([i]))
    counts = np.array([(len(tokens), steps[i]) for i, tokens in enumerate(out.tokens)])
    draws = counts[np.random.default_rng(0).integers(len(counts), size=(10_000, len(counts)))].sum(axis=1)
    interval = np.percentile(draws[:, 0] / draws[:, 1], (2.5, 97.5)).tolist()
    tables = {f"{t:g}": acceptance(heads.model, heads, prompts, t, DECODED) for t in (0.0, 1.0)}  # by temperature
    tables = {t: [[round(share, 4) for share in row] for row in table] for t, table in tables.items()}
    return dict(accuracy=top[1], top_accuracy=top, prompts=len(prompts), tokens_per_step=out.tokens_per_step,
                tokens_per_step_interval=interval, acceptance=tables)


def table(top_accuracy, prompts=None, tokens_per_step=None, tokens_per_step_interval=None, **_):
    """The lines that show what `measure`, or `head_accuracy` alone, found."""
    lines = ["held-out accuracy" + "".join(f"{f'top {n}':>9}" for n in TOPS)]
    for i, row in enumerate(zip(*top_accuracy.values()), start=1):
        lines.append(f"head {i:<12}" + "".join(f"{share:>9.1%}" for share in row))
    if tokens_per_step is not None:
        low, high = tokens_per_step_interval
        lines.append(f"{tokens_per_step:.2f} tokens per step (95% interval {low:.2f} to {high:.2f}) over {prompts} "
                     "held-out prompts, greedy, tree size 17")
    return "\n".join(lines)


def plot(folder):
    """Draws a run's log.jsonl as training.png, where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    lines = [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]
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
        figure.savefig(Path(folder) / "training.png")
