"""Measures draft heads: head accuracy, tokens per step, acceptance rate of tree nodes."""

import contextlib
from pathlib import Path

import torch

from clover import BINS
from engine.batching import Engine
from engine.policy import Policy
from generate import DEFAULT_BATCH, Sampling
from hf.heads import load_heads
from model import InputError, expect
from train_heads import window_losses
from training import data
from training.flags import SELF
from training.runs import STANDARD_LIBRARY, data_record, load_frozen, pick_block_size, saving

PROMPTS = 32       # held-out prompts to decode
DECODED = 64       # new tokens per prompt
TREE_SIZE = 17
BATCHES = 8        # batches of held-out windows for head accuracy


@torch.no_grad()
def head_accuracy(heads, heldout, batch_size, block_size):
    """For each head, the share of held-out guesses that are hits of `train_heads.head_losses`."""
    ahead = heads.config.n_draft + 1
    hits = guesses = 0
    for step in range(BATCHES):
        batch = data.window_batch(heldout, batch_size, block_size, ahead, 0, step,
                                  heads.model.device)
        _, batch_hits, batch_guesses = window_losses(heads, *batch)
        hits = hits + batch_hits
        guesses = guesses + batch_guesses
    return (hits / guesses.clamp(min=1)).tolist()


@torch.inference_mode()
def acceptance(model, heads, prompts, temperature=0.0):
    """Decodes -> ([accepted, proposed] nodes by bin of joint log-probability, tokens per step)"""
    capacity = min(max(map(len, prompts)) + DECODED, model.config.block_size)
    policy = Policy(model, heads, tree_size=TREE_SIZE)
    engine = Engine(model, policy=policy, capacity=capacity, batch_size=DEFAULT_BATCH,
                    sampling=Sampling(temperature), graph=False)
    output = engine.generate(prompts, DECODED)
    counts = engine.policy.counts[int(temperature > 0), :BINS].long().tolist()
    return counts, output.tokens_per_step


def measure(heads, plain, heldout, batch_size, block_size):
    """Measures heads -> the dict to add to heads.json. plain: the same, not packed."""
    model = heads.model
    print("measuring 1 of 3: head accuracy", flush=True)
    accuracy = head_accuracy(plain, heldout, batch_size, block_size)
    room = model.config.block_size - DECODED  # prompts have up to 4 * length tokens
    starts = data.prompts(heldout, PROMPTS, max(min(64, room // 4), 1))
    print(f"measuring 2 of 3: sampled, tree size {TREE_SIZE}", flush=True)
    sampled, _ = acceptance(model, heads, starts, temperature=0.8)
    print(f"measuring 3 of 3: greedy, tree size {TREE_SIZE}", flush=True)
    greedy, tokens_per_step = acceptance(model, heads, starts)
    return dict(accuracy=accuracy, prompts=PROMPTS, tokens_per_step=tokens_per_step,
                acceptance=dict(sampled=sampled, greedy=greedy))


def evaluate(config, out):
    """Measures the heads in `out`, prints the results, adds them to heads.json, and says how to use
    the heads."""
    model, encoding = load_frozen(config)
    heads = load_heads(out, model, encoding.hash)
    plain = load_heads(out, model, encoding.hash, packed=False)
    if model.blocks.is_packed:
        plain.float()  # as they were trained: such a model decodes in float32
    size = pick_block_size(config, heads)
    heldout, measured_on = heldout_tokens(config, out, heads, encoding)
    results = measure(heads, plain, heldout, config.batch_size, size)
    shares = "  ".join(f"head {i}: {share:.1%}" for i, share in enumerate(results["accuracy"], 1))
    print(f"held-out accuracy: {shares}")
    print(f"{results['tokens_per_step']:.2f} tokens per step over {results['prompts']} held-out "
          f"prompts, greedy, tree size {TREE_SIZE}")
    training = heads.info.get("training", {})
    with saving(f"{out}: the measurements cannot be written", "make room and --evaluate"):
        heads.save_record(out, encoding.hash, training=training, **results, measured_on=measured_on)
    chat = " --chat" if encoding.template else ""
    print(f"\nto use them:  python generate.py --model {config.model} --heads {out}{chat}")


def heldout_tokens(config, out, heads, encoding):
    """Held-out Tokens of --data, by default of the training data -> (Tokens, `data_record`)."""
    about = heads.info.get("training", {})
    key = about.get("key")
    if config.data:
        key = data.tokens_key(config.data, encoding)
        about = data_record(config.data, key)
    for folder in (out, out / SELF, *map(Path, config.data or ())):
        with contextlib.suppress(InputError):
            stored = data.open_tokens(folder / data.FILE)
            if stored["key"] == key:
                return stored["heldout"], dict(data=about["data"], key=key)
    expect(config.data or about.get("data") == STANDARD_LIBRARY, f"{out}: the tokens of the "
           f"training data ({about.get('data')}) are gone; give --data")
    about = data_record(config.data, data.tokens_key(config.data, encoding))
    return data.load_tokens(config.data, encoding, "heldout"), about
