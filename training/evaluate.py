"""Measures draft heads: head accuracy, tokens per step, how often nodes of trees are accepted."""

import math
import time

import torch

from backends import cpu
from generate import prepare
from kernels import BINS
from training.common import saving
from training.data import prompts, window_batch
from training.loss import guess_masks, run_heads, run_model, top_hits

PROMPTS = 32       # held-out prompts that are decoded
DECODED = 64       # new tokens per prompt
TREE_SIZE = 17
TOPS = (1, 2, 4, 8)  # head accuracy is measured for these n
SECONDS = 120.0    # for all measurements, unless a caller gives more


def until(seconds, items):
    """Yields the first item, and more until the time is over."""
    end = time.monotonic() + seconds
    for item in items:
        yield item
        if time.monotonic() > end:
            return


@torch.no_grad()
def head_accuracy(heads, heldout, batch_size, block_size, seconds=math.inf):
    """{n of TOPS: [K] shares of held-out positions whose greedy token is in a head's top n}."""
    hits = guesses = 0
    length = block_size + heads.config.n_draft + 1
    for seed in until(seconds, range(16)):
        ids, loss_mask, documents, _ = window_batch(heldout, batch_size, length, seed,
                                                    heads.model.device)
        teacher = run_model(heads.model, ids, documents)
        outputs = run_heads(heads, teacher, ids, documents)
        guess_mask = guess_masks(ids, len(outputs), loss_mask, documents)
        hits = hits + top_hits(heads, outputs, teacher, guess_mask, TOPS)
        guesses = guesses + guess_mask.sum(dim=(1, 2))
    return dict(zip(TOPS, (hits / guesses.clamp(min=1)).tolist()))


@torch.inference_mode()
def acceptance(heads, prompts, temperature, size=TREE_SIZE, seconds=math.inf):
    """([[accepted, proposed]] nodes by bin of their joint log-probability; number of prompts;
    tokens per step)"""
    n = min(8, len(prompts))  # decoded together
    engine = prepare(heads.model, prompts, DECODED, heads, batch_size=n, graph=False,
                     tree_size=size, temperature=temperature)
    outputs = [engine.generate(prompts[start:start + n], DECODED)
               for start in until(seconds, range(0, len(prompts), n))]
    counts = engine.policy.counts[int(temperature > 0), :BINS].long().tolist()
    done = sum(len(output.sequences) for output in outputs)
    steps = sum(output.steps for output in outputs)
    emitted = sum(output.emitted for output in outputs)
    return counts, done, emitted / steps


def measure(heads, heldout, batch_size, block_size, seconds=SECONDS, log=print):
    """The measurements for heads.json, a dict, made in about `seconds` or less."""
    log(f"measuring 1 of 3: head accuracy; all three take about {seconds:.0f} seconds, or less")
    top = head_accuracy(heads, heldout, batch_size, block_size, seconds / 6)
    cpu.apply(heads.model, heads)  # from here on they decode
    room = heads.model.config.block_size - DECODED  # for a prompt of up to 4 * length tokens
    starts = prompts(heldout, PROMPTS, max(min(64, room // 4), 1))
    tables = {}
    for part, (name, temperature) in enumerate(dict(sampled=0.8, greedy=0.0).items(), start=2):
        log(f"measuring {part} of 3: {name}, tree size {TREE_SIZE}")
        tables[name], done, tokens_per_step = acceptance(heads, starts, temperature,
                                                         seconds=seconds / 3)
    return dict(accuracy=top[1], top_accuracy=top, prompts=done, tokens_per_step=tokens_per_step,
                acceptance=tables)


def record(heads, out, tokenizer, measured):
    """Prints the measurements and adds them to heads.json."""
    print("held-out accuracy" + "".join(f"{f'top {n}':>9}" for n in TOPS))
    for i, row in enumerate(zip(*measured["top_accuracy"].values()), start=1):
        print(f"head {i:<12}" + "".join(f"{share:>9.1%}" for share in row))
    print(f"{measured['tokens_per_step']:.2f} tokens per step over {measured['prompts']} held-out "
          f"prompts, greedy, tree size {TREE_SIZE}")
    info = dict(training=heads.info.get("training", {})) | measured
    with saving(f"{out}: the measurements cannot be written", "make room and --evaluate"):
        heads.save_record(out, tokenizer, **info)
