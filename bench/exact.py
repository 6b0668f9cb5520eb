"""`python -m bench exact`: what it costs on a CPU that a token's hidden state is the same bits wherever it stands.

A bfloat16 model of a real size with random weights verifies chains of T tokens with attention computed in three ways:
in float64 over a cache of float64, as where memory allows; in float64 over a cache of bfloat16, cast in each step, as
where not; and as torch does it in bfloat16, where the order of the sums decides the last bits.
"""

import statistics
from unittest.mock import patch

import torch
import torch.nn.functional as F

import kernels
from bench import Record
from bench.decoding import in_turns, random_model
from model import InputError, KVCache, pack, packs

COLUMNS = {"tokens in the cache": "prefix {}", "T": "tree_size {}", "float64, ms": "float64_ms {:.1f}",
           "cast, ms": "cast_ms {:.1f}", "bfloat16, ms": "bfloat16_ms {:.1f}",
           "float64 over bfloat16": "float64_ratio {:.2f}x", "cast over bfloat16": "cast_ratio {:.2f}x"}


def rounded_attention(q, k, v, bias=None, scale=None, is_causal=False):
    """`kernels.cached_attention` in the cache's own dtype."""
    bias = bias if bias is None else bias.to(k.dtype)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, bias, is_causal=is_causal, scale=scale,
                                         enable_gqa=q.shape[2] != k.shape[1])
    return out.transpose(1, 2)


def chain(model, dtype, prefix, tree_size):
    """A function that verifies a chain of tokens behind `prefix` rows of a cache of this dtype."""
    c, nodes = model.config, torch.arange(tree_size)[None]
    cache = KVCache(c.n_layer, 1, c.n_kv_head, prefix + tree_size, c.head_size, dtype)
    cache.lengths.fill_(prefix)
    return lambda: model(nodes, prefix + nodes, cache, (2 << nodes) - 1)


def with_attention(attention, verify):
    """verify() with another function in the place of `kernels.cached_attention`."""
    def body():
        with patch.object(kernels, "cached_attention", attention), kernels.unchecked():
            verify()
    return body


@torch.inference_mode()
def measure(model, prefix, tree_size, runs):
    """A row: medians of the three ways over alternating rounds, and of the ratios of a round."""
    wide, narrow = (chain(model, dtype, prefix, tree_size) for dtype in (torch.float64, torch.bfloat16))
    ours = kernels.cached_attention
    times = in_turns(dict(float64=with_attention(ours, wide), cast=with_attention(ours, narrow),
                          bfloat16=with_attention(rounded_attention, narrow)), runs, model.device)
    ratio = lambda name: statistics.median(a / b for a, b in zip(times[name], times["bfloat16"]))
    medians = {f"{name}_ms": 1e3 * statistics.median(found) for name, found in times.items()}
    return dict(prefix=prefix, tree_size=tree_size, **medians, float64_ratio=ratio("float64"), cast_ratio=ratio("cast"))


def bench(args):
    """Prints the table, returns the Record. Raises InputError for a CPU without instructions for bfloat16."""
    if not packs(torch.bfloat16):
        raise InputError("this CPU has no instructions for bfloat16, so there is nothing to compare; expected one with "
                         "AVX512-BF16")
    record = Record(args.out, bench="exact", model=args.random_weights, device="cpu", dtype="torch.bfloat16",
                    runs=args.runs)
    model = random_model(args.random_weights, torch.device("cpu"), torch.bfloat16)
    pack(model)
    table = record.table("verify", COLUMNS)
    for prefix in args.prefixes:
        for tree_size in args.tree_sizes:
            if not table.has(prefix=prefix, tree_size=tree_size):
                table.add(measure(model, prefix, tree_size, args.runs))
    return record.done()
