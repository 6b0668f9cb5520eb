"""Predicts throughput over batch size from memory bandwidth and arithmetic alone, like Figure 2 of
the Clover paper (arXiv 2405.00263)."""

from dataclasses import replace

import numpy as np

from bench import ROOT, Table, size_config
from clover import DEFAULT_BEAMS
from common.files import read_json

NOMINAL = 3.35e12, 989e12  # H100 SXM datasheet: bytes/s, dense bfloat16 FLOP/s
RECORD = ROOT / "bench" / "results" / "heads-smollm2-trained-cpu.json"
# tokens per step of Qwen 3 8B on MT-Bench with chains of 7 tokens (arXiv 2607.05147)
PUBLISHED = {"plain": 1.0, "EAGLE-3": 2.66, "DFlash": 3.11, "DSpark": 3.72}


def predict(bandwidth, rate, prefix=256):
    """{name: (tokens per step, tokens per second for B = 1 to 1024, largest B with a speed-up)} for
    a model of 32 B parameters in bfloat16 with `prefix` cached tokens per sequence. The trees and
    their tokens per step are those of RECORD, and the paper's chain of 5. Each part of a step takes
    max(bytes / bandwidth, FLOPs / rate). Leaves out activations, sampling and launches."""
    steps = {}  # T, K, W, tokens per step
    for row in read_json(RECORD)["decoding"]:
        T = row["tree_size"]
        name = row["drafted_by"].replace("smollm2", "heads")
        if row["kind"] == "all" and row["temperature"] == 0 and T != "auto" and name != "lookup":
            K = min(T - 1, 4) if "heads" in name else 0
            steps[f"{name}, T = {T}"] = T, K, DEFAULT_BEAMS, row["tokens_per_step"]
    steps["chain of 5 at 0.4"] = 6, 5, 1, sum(0.4 ** i for i in range(6))
    c = size_config("32b")
    C = c.n_embd
    head = 4 * C * C + 9216 * C  # Wq, Wk, Wv, the ResBlock; the LM head's draft vocabulary
    for name, (T, K, W, tokens) in steps.items():
        products = [(head, 1), ((K - 1) * head, W), (block_weights(c), min(T, 16))] if K else []
        steps[name] = tokens, T, K > 0, products
    return predicted(c, steps, bandwidth, rate, prefix)


def predict_published(bandwidth, rate, prefix=256):
    """`predict` for Qwen 3 8B with heads that draft chains of 7 tokens: EAGLE-3 with 32,000 draft
    tokens, DFlash and DSpark with 5 layers, which read 5 states."""
    c = replace(size_config("8b"), vocab_size=151936, n_layer=36, n_inner=12288)
    C = c.n_embd
    qkv = C * (c.n_head + 2 * c.n_kv_head) * c.head_size
    layer = block_weights(c) + qkv  # of EAGLE-3
    block = [(5 * block_weights(c) + c.vocab_size * C, 8), (5 * (C * C + qkv), 8)]  # draft, commit
    steps = {
        "plain": (1, 0, []),
        "EAGLE-3": (8, 1, [(6 * layer + 7 * 32000 * C, 1), (layer + 3 * C * C, 8)]),
        "DFlash": (8, 5, block), "DSpark": (8, 5, [*block, (7 * 256 * c.vocab_size, 1)])}
    return predicted(c, {name: (PUBLISHED[name], *step) for name, step in steps.items()},
                     bandwidth, rate, prefix)


def block_weights(c):
    return 2 * c.n_embd * (c.n_head + c.n_kv_head) * c.head_size + 3 * c.n_embd * c.n_inner


def predicted(c, steps, bandwidth, rate, prefix):
    """`predict` of steps: {name: (tokens per step, T, cached layers of the heads, (weights, rows of
    a sequence) of the products that draft and commit)}, plain decoding first."""
    B = np.arange(1, 1025)
    found = {}
    for name, (tokens, T, layers, products) in steps.items():
        verify = c.n_layer * block_weights(c) + c.vocab_size * c.n_embd, T
        cached = 4 * (c.n_layer + layers) * B * prefix * c.head_size  # bytes of one KV head
        parts = [(cached * c.n_kv_head, cached * c.n_head * T)]  # (bytes, FLOPs): attention
        parts += [(2 * weights, 2 * weights * B * rows) for weights, rows in (verify, *products)]
        seconds = sum(np.maximum(size / bandwidth, flops / rate) for size, flops in parts)
        rates = B * tokens / seconds
        plain = next(iter(found.values()))[1] if found else rates
        found[name] = tokens, rates, int(B[rates > plain].max(initial=0))
    return found


def print_table(bandwidth=NOMINAL[0], rate=NOMINAL[1], predict=predict,
                sizes=(1, 4, 16, 32, 64, 128, 256)):
    print(f"\nPredicted tokens per second at {bandwidth / 1e12:.2f} TB/s, "
          f"{rate / 1e12:.0f} TFLOP/s")
    table = Table()
    for name, (tokens, rates, last) in predict(bandwidth, rate).items():
        cells = {f"B = {B}": f"{rates[B - 1]:,.0f}" for B in sizes}
        table.add(dict(drafted=name, tokens_per_step=f"{tokens:.2f}", **cells,
                       pays_up_to_B=last or None))
