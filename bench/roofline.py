"""Predicts throughput over batch size from memory bandwidth and arithmetic alone, like Figure 2 of
the Clover paper (arXiv 2405.00263)."""

import numpy as np

from bench import ROOT, Table, size_config
from clover import DEFAULT_BEAMS
from model import read_json

NOMINAL = 3.35e12, 989e12  # H100 SXM datasheet: bytes/s, dense bfloat16 FLOP/s
RECORD = ROOT / "bench" / "results" / "heads-smollm2-trained-cpu.json"


def predict(bandwidth, rate, prefix=256):
    """{name: (tokens per step, tokens per second for B = 1 to 1024, largest B with a speed-up)} for
    a model of 32 B parameters in bfloat16 with `prefix` cached tokens per sequence. The trees and
    their tokens per step are those of RECORD, and the paper's chain of 5. Each part of a step takes
    max(bytes / bandwidth, FLOPs / rate). Leaves out activations, sampling and launches."""
    steps = {}  # T, K, W, tokens per step
    for row in read_json(RECORD)["decoding"]:
        T = row["tree_size"]
        if row["kind"] == "all" and row["temperature"] == 0 and T != "auto":
            name = row["drafted_by"].replace("smollm2", "heads")
            K = min(T - 1, 4) if "heads" in name else 0
            steps[f"{name}, T = {T}"] = T, K, DEFAULT_BEAMS, row["tokens_per_step"]
    steps["chain of 5 at 0.4"] = 6, 5, 1, sum(0.4 ** i for i in range(6))
    c = size_config("32b")
    C = c.n_embd
    block = 2 * C * (c.n_head + c.n_kv_head) * c.head_size + 3 * C * c.n_inner
    head = 4 * C * C + 9216 * C  # Wq, Wk, Wv, the ResBlock; the LM head's draft vocabulary
    B = np.arange(1, 1025)
    predicted = {}
    for name, (T, K, W, tokens) in steps.items():
        products = [(c.n_layer * block + c.vocab_size * C, B * T)]  # (weights, rows): verify
        if K:  # draft, commit
            products += [(head, B), ((K - 1) * head, B * W), (block, B * min(T, 16))]
        cached = 4 * (c.n_layer + (K > 0)) * B * prefix * c.head_size  # bytes of one KV head
        parts = [(cached * c.n_kv_head, cached * c.n_head * T)]  # (bytes, FLOPs): attention
        parts += [(2 * weights, 2 * weights * rows) for weights, rows in products]
        seconds = sum(np.maximum(size / bandwidth, flops / rate) for size, flops in parts)
        rates = B * tokens / seconds
        plain = next(iter(predicted.values()))[1] if predicted else rates
        predicted[name] = tokens, rates, int(B[rates > plain].max(initial=0))
    return predicted


CARDS = {"H100": NOMINAL[0], "RTX 4070": 504e9}  # bytes/s, datasheets
LAUNCH = 1.3e-6  # seconds of an empty launch in a CUDA graph, measured on an H100
BITS = {  # bits per number of the layers and of the LM head, with their scales
    "bfloat16": (16, 16), "FP8 (blocks of 128)": (8.25, 16), "Q8_0": (8.5, 8.5),
    "Q4_K, LM head Q6_K": (5, 9)}


def step_times(launches=232):
    """{format: (bytes of weights, {card: seconds})} of a step of one sequence of an 8B model with
    kernels.linear_rows. Up to 16 nodes cost the same weights and launches, and few FLOPs."""
    c = size_config("8b")
    heads = 2 * (c.n_head + c.n_kv_head) * c.head_size
    layers = c.n_layer * c.n_embd * (heads + 3 * c.n_inner)
    times = {}
    for name, (bits, head_bits) in BITS.items():
        size = (layers * bits + c.vocab_size * c.n_embd * head_bits) / 8
        times[name] = size, {card: size / bandwidth + launches * LAUNCH
                             for card, bandwidth in CARDS.items()}
    return times


def print_steps():
    print("\nPredicted ms of a step, 8B, one sequence, 1 to 16 nodes")
    table = Table()
    for name, (size, seconds) in step_times().items():
        table.add({"weights": name, "GB": f"{size / 1e9:.1f}"} | {
            card: f"{1e3 * x:.2f}" for card, x in seconds.items()})


def print_table(bandwidth=NOMINAL[0], rate=NOMINAL[1]):
    print(f"\nPredicted tokens per second at {bandwidth / 1e12:.2f} TB/s, "
          f"{rate / 1e12:.0f} TFLOP/s")
    table = Table()
    for name, (tokens, rates, last) in predict(bandwidth, rate).items():
        cells = {f"B = {B}": f"{rates[B - 1]:,.0f}" for B in (1, 4, 16, 32, 64, 128, 256)}
        table.add(dict(drafted=name, tokens_per_step=f"{tokens:.2f}", **cells,
                       pays_up_to_B=last or None))
