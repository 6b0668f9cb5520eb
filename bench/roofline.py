"""Predicts throughput over batch size from bandwidth and arithmetic alone, after Figure 2 of the
paper (arXiv 2405.00263)."""

from math import isqrt

import numpy as np

from bench import ROOT, Table, size_config
from model import read_json
from tools.policy import expected_tokens

NOMINAL = 3.35e12, 989e12  # H100 SXM, by its datasheet: bytes/s, dense bfloat16 FLOP/s


def predict(bandwidth, rate, prefix=256):
    """{drafted: (tokens per step, tokens per second at B = 1 to 1024, the last B that pays)} for a
    model of 32 B parameters in bfloat16 with `prefix` cached tokens per sequence: the paper's chain
    of 5, and trees of 4 Clover heads with the acceptance of demo/smollm2. Each part of a step takes
    max(bytes / bandwidth, FLOPs / rate). Left out: activations, sampling, launches."""
    tables = read_json(ROOT / "demo" / "smollm2" / "heads.json")["acceptance"]
    plans = {"plain": (1, 0, 0, 1.0),  # T, K, W, tokens per step
             "chain of 5 at 0.4": (6, 5, 1, sum(0.4 ** i for i in range(6)))}
    for T in (2, 4, 8, 16, 64):
        tokens = expected_tokens(tables, T, 0)
        plans[f"tree of {T}"] = T, min(T - 1, 4), isqrt(T - 1) + 1, tokens
    c = size_config("32b")
    C = c.n_embd
    block = 2 * C * (c.n_head + c.n_kv_head) * c.head_size + 3 * C * c.n_inner
    head = 4 * C * C + 9216 * C  # Wq, Wk, Wv, the ResBlock; the LM head's draft vocabulary
    B = np.arange(1, 1025)
    predicted = {}
    for name, (T, K, W, tokens) in plans.items():
        products = [(c.n_layer * block + c.vocab_size * C, B * T)]  # (weights, rows): verify
        if K:  # draft, commit
            products += [(head, B), ((K - 1) * head, B * W), (block, B * (K + 1))]
        cached = 4 * (c.n_layer + (K > 0)) * B * prefix * c.head_size  # bytes of one KV head
        parts = [(cached * c.n_kv_head, cached * c.n_head * T),
                 *((2 * weights, 2 * weights * rows) for weights, rows in products)]
        seconds = sum(np.maximum(size / bandwidth, flops / rate) for size, flops in parts)
        plain = predicted["plain"][1] if predicted else B / seconds
        rates = B * tokens / seconds
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
