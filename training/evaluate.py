"""How good draft heads are: how often they guess right, and what decoding makes of it. train_heads.py ends with it.

head accuracy        of held-out positions, the share where the model's own greedy token is among a head's n likeliest
tokens per step      of decoding held-out prompts, with an interval for other prompts of the kind
acceptance           how often each node of a drafted tree is accepted, from which fit.py picks the tree
"""

import contextlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from training.data import windows
from tools.tune import acceptance
from generate import generate
from training.loss import guessed_places, top_hits

DECODED = 64  # new tokens of each
TOPS = (1, 2, 4, 8)  # of a head's guesses, how many count


def window_batch(heads, tokens, batch_size, block_size, seed):
    """Random windows of a split: (tokens int64 [B, block_size + K + 1], which tokens count, bool, their documents' numbers, int64,
    or None where all is one document), on the model's device. Every position has a token for the last head to guess."""
    length, device = block_size + heads.config.n_draft + 1, heads.model.device
    ids, counts, documents = windows(tokens, batch_size, length, torch.Generator().manual_seed(seed))
    return ids.to(device), counts.to(device), documents.to(device) if documents.any() else None


def teacher_forced(heads, ids, documents=None, wrapped=None):
    """ids [B, T + K + 1] -> (the model's hidden states [B, T + K, C], the heads' K outputs [B, T, C]). wrapped: what to call in the
    heads' place, DDP around them."""
    K = heads.config.n_draft
    with torch.no_grad():
        hidden = heads.model(ids[:, :-1], documents=None if documents is None else documents[:, :-1])
    return hidden, (wrapped or heads)(hidden[:, :-K], ids[:, 1:], None if documents is None else documents[:, :-K - 1])


@torch.no_grad()
def head_accuracy(heads, heldout, batch_size, block_size, autocast=contextlib.nullcontext(), batches=16):
    """{n: a list of K shares} for n of TOPS, on fixed held-out windows. autocast: for heads that are not in the model's dtype."""
    hits = counted = 0
    for seed in range(batches):
        ids, counts, documents = window_batch(heads, heldout, batch_size, block_size, seed)
        with autocast:
            hidden, outputs = teacher_forced(heads, ids, documents)
            places = guessed_places(ids, len(outputs), counts, documents)
            hits, counted = hits + top_hits(heads.model, outputs, hidden, places, TOPS), counted + places.sum(dim=(1, 2))
    return dict(zip(TOPS, (hits / counted.clamp(min=1)).tolist()))


def decoded(heads, prompts):
    """Tokens per step of greedy decoding with a tree of 17, and its 95% interval over draws of such prompts (bootstrap)."""
    steps = Counter()
    out = generate(heads.model, prompts, DECODED, heads, tree_size=17, on_tokens=lambda index, tokens: steps.update([index]))
    counts = np.array([(len(tokens), steps[i]) for i, tokens in enumerate(out.tokens)])
    draws = counts[np.random.default_rng(0).integers(len(counts), size=(10_000, len(counts)))].sum(axis=1)
    low, high = np.percentile(draws[:, 0] / draws[:, 1], (2.5, 97.5)).tolist()
    return dict(prompts=len(prompts), tokens_per_step=out.tokens_per_step, tokens_per_step_interval=[low, high])


def accepted(heads, prompts):
    """{temperature: `fit.acceptance`} of greedy decoding and at temperature 1."""
    tables = {f"{t:g}": acceptance(heads.model, heads, prompts, t, DECODED) for t in (0.0, 1.0)}
    return {t: [[round(share, 4) for share in row] for row in table] for t, table in tables.items()}


def measure(heads, heldout, prompts, batch_size, block_size):
    """What a heads folder says of its heads, which are in the model's dtype."""
    top = head_accuracy(heads, heldout, batch_size, block_size)
    return dict(accuracy=top[1], top_accuracy=top, **decoded(heads, prompts), acceptance=accepted(heads, prompts))


def table(top_accuracy, prompts=None, tokens_per_step=None, tokens_per_step_interval=None, **_):
    """The table that ends a run."""
    lines = ["held-out accuracy" + "".join(f"{f'top {n}':>9}" for n in TOPS)]
    lines += [f"head {i + 1:<12}" + "".join(f"{share:>9.1%}" for share in row) for i, row in enumerate(zip(*top_accuracy.values()))]
    if tokens_per_step is None:
        return "\n".join(lines)
    low, high = tokens_per_step_interval
    return "\n".join(lines + [f"{tokens_per_step:.2f} tokens per step (95% interval {low:.2f} to {high:.2f}) over {prompts} held-out prompts, "
                              "greedy, tree size 17"])


def plot(folder):
    """Draws a run's log.jsonl as training.png: the loss and each head's accuracy in training. Needs matplotlib; without, nothing."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return
    lines = [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    left.plot(steps, [line["loss"] for line in lines])
    left.set(xlabel="step", ylabel="loss, nats")
    for i, shares in enumerate(zip(*(line["accuracy"] for line in lines))):
        right.plot(steps, shares, label=f"head {i + 1}")
    right.set(xlabel="step", ylabel="head accuracy")
    right.legend()
    with contextlib.suppress(OSError):  # a full disk: the numbers are safe
        figure.savefig(Path(folder) / "training.png")
    plt.close(figure)
