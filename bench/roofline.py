"""Predicts throughput over batch size from memory bandwidth and arithmetic alone, like Figure 2 of
the Clover paper (arXiv 2405.00263)."""

import numpy as np

from bench import ROOT, Table, size_config
from clover import DEFAULT_BEAMS
from common.files import read_json

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


def print_table(bandwidth=NOMINAL[0], rate=NOMINAL[1]):
    print(f"\nPredicted tokens per second at {bandwidth / 1e12:.2f} TB/s, "
          f"{rate / 1e12:.0f} TFLOP/s")
    table = Table()
    for name, (tokens, rates, last) in predict(bandwidth, rate).items():
        cells = {f"B = {B}": f"{rates[B - 1]:,.0f}" for B in (1, 4, 16, 32, 64, 128, 256)}
        table.add(dict(drafted=name, tokens_per_step=f"{tokens:.2f}", **cells,
                       pays_up_to_B=last or None))
