"""`python -m bench roofline`: predicts from a GPU's datasheet a step's time and speculation's gain.

    seconds = sum of max(bytes / bandwidth, FLOPs / peak) + launches * launch, over its operations

Counted are: a product's weights once, for any number of rows, and 2 FLOPs for each weight and row;
the cached keys and values; K passes of drafting over the heads and the LM head or its draft
vocabulary. Free are activations, norms, sampling, choosing a tree and unpacking weights. All are
bfloat16, on one GPU; with --quantize those of the model are packed. This is about the least that a
step can take: real kernels reach 80 to 90% of the bandwidth and 60 to 80% of the peak.
"""

from itertools import product
from math import isqrt
from pathlib import Path
from typing import NamedTuple

import torch

from bench import Table
from bench.decoding import GB
from bench.steps import SIZED, SIZES, size_config
from clover import PRESETS, Head, preset, read_record
from hf.families import read_config
from model import GPT, Block, InputError, read_json
from tools.timing import PREFIX
from tools.tune import expected_tokens


class GPU(NamedTuple):
    bandwidth: float     # TB/s
    peak: float          # TFLOP/s, dense bfloat16 products with float32 sums
    memory: float        # GB
    launch: float = 2.0  # us of a small operation in a CUDA graph: an assumption, in no datasheet


GPUS = {  # by the vendors' datasheets and architecture whitepapers; SXM where nothing else is said
    "b200": GPU(8.0, 2250, 180), "h200": GPU(4.8, 989, 141), "h100": GPU(3.35, 989, 80),
    "h100-pcie": GPU(2.0, 756, 80), "a100": GPU(2.039, 312, 80), "a100-40gb": GPU(1.555, 312, 40),
    "l40s": GPU(0.864, 362, 48), "l4": GPU(0.3, 121, 24), "a10": GPU(0.6, 125, 24),
    "3090": GPU(0.936, 71, 24), "4090": GPU(1.008, 165, 24), "5090": GPU(1.792, 209, 32),
    "mi300x": GPU(5.3, 1307, 192),
}
PER_LAYER, PER_STEP = 10, 10  # launches, by tests/static.py: of a layer, of the rest of a step,
PER_HEAD, PER_TREE = 14, 6    # of drafting with a head, of the rest that a tree takes
BYTES = 2        # of a weight that is not packed, and of a number in the cache
# of a weight of the blocks and of the LM head; 128 of 4 bits have a scale and a zero of 3 bytes
PACKED = {None: (BYTES, BYTES), "int8": (1, 1), "int4": (0.5 + 3 / 128, 1)}
MOST = 1024      # the largest batch size that is tried
COLUMNS = {**SIZED, "tokens per step": "tokens_per_step {:.2f}", "ms per step": "step_ms {:.2f}",
           "tokens per second": "tokens_per_second {:.0f}", "plain, ms per step": "plain_ms {:.2f}",
           "plain, tokens per second": "plain_tokens_per_second {:.0f}",
           "over plain": "speed_up {:.2f}x"}
CHECKED = {"model": "model {}", **SIZED, "predicted, ms": "predicted_ms {:.2f}",
           "measured, ms": "step_ms {:.2f}", "measured over predicted": "ratio {:.2f}"}


class Prediction:
    """Steps of a model (GPTConfig) with draft heads (CloverConfig) on a GPU; `prefix` tokens in the
    cache of each sequence. chain: draft a chain, with a head for each guess, instead of a tree.
    quantize: a key of PACKED, for the model's weights; the heads' own are bfloat16."""

    def __init__(self, gpu, config, heads, prefix=PREFIX, chain=False, quantize=None):
        self.gpu = gpu
        self.config = config
        self.heads = heads
        self.prefix = prefix
        self.chain = chain
        self.block_bytes, self.lm_head_bytes = PACKED[quantize]
        with torch.device("meta"):
            self.model, self.block, self.head = (
                sum(p.numel() for p in module.parameters())
                for module in (GPT(config), Block(config), Head(heads, config)))
        self.lm_head = config.vocab_size * config.n_embd
        self.draft_lm_head = (heads.vocabulary or config.vocab_size) * config.n_embd

    def n_heads(self, tree_size):
        """How many heads draft a tree."""
        return tree_size - 1 if self.chain else min(self.heads.n_draft, tree_size - 1)

    def seconds(self, size, work, launches=0):
        """Seconds for this many bytes and FLOPs."""
        longest = max(size / self.gpu.bandwidth, work / self.gpu.peak)
        return longest / 1e12 + launches * self.gpu.launch / 1e6

    def product(self, weights, rows, launches, size=BYTES):
        """Seconds of a product; size: bytes of a weight."""
        return self.seconds(size * weights, 2 * weights * rows, launches)

    def layers(self, n, batch_size, rows, size=BYTES):
        """Seconds of n blocks on this many rows of each sequence."""
        keys = n * batch_size * (self.prefix + rows) * self.config.head_size
        return (self.product(n * self.block, batch_size * rows, n * PER_LAYER, size)
                + self.seconds(2 * BYTES * keys * self.config.n_kv_head,
                               4 * rows * keys * self.config.n_head))

    def step(self, B, T):
        """Seconds of a step, B sequences of T nodes: verify, then draft and commit if T > 1."""
        seconds = self.layers(self.config.n_layer, B, T, self.block_bytes)
        seconds += self.product(self.lm_head, B * T, PER_STEP, self.lm_head_bytes)
        if T == 1:
            return seconds
        heads = self.heads
        K = self.n_heads(T)
        W = 1 if self.chain else isqrt(T - 1) + 1  # beams
        reads_tokens = heads.mix != "none" or heads.projector == "linear"
        for depth in range(K):
            rows = B * W if depth and reads_tokens else B  # one state at the root, then one a beam
            seconds += self.product(self.head, rows, PER_HEAD)
            seconds += self.product(self.draft_lm_head, rows, 0, self.lm_head_bytes)
        return seconds + self.layers(heads.augment_layers, B, K + 1) + self.seconds(0, 0, PER_TREE)

    def memory(self, batch_size, tree_size):
        """GB of the weights and the cache."""
        c = self.config
        weights = self.model + self.n_heads(tree_size) * self.head
        weights += self.heads.augment_layers * self.block if tree_size > 1 else 0
        weights -= c.n_layer * self.block * (1 - self.block_bytes / BYTES)
        lm_head = self.lm_head * self.lm_head_bytes / BYTES
        # a packed LM head that is tied stands beside the embeddings
        weights += lm_head * (self.lm_head_bytes < BYTES) if c.tied else lm_head - self.lm_head
        rows = batch_size * (self.prefix + tree_size) * 2 * c.n_layer * c.n_kv_head * c.head_size
        return BYTES * (weights + rows) / GB

    def row(self, batch_size, tree_size, tokens):
        """What is predicted where a step finds this many tokens; None where memory has no room."""
        if self.memory(batch_size, tree_size) > self.gpu.memory:
            return None
        plain = self.step(batch_size, 1)
        own = self.step(batch_size, tree_size)
        return dict(batch_size=batch_size, tree_size=tree_size, tokens_per_step=tokens,
                    step_ms=1e3 * own, tokens_per_second=batch_size * tokens / own,
                    plain_ms=1e3 * plain, plain_tokens_per_second=batch_size / plain,
                    speed_up=tokens * plain / own)

    def pays_up_to(self, tree_size, tokens):
        """In words: up to which batch size a step finds its tokens faster than plain decoding."""
        for last in range(MOST):
            row = self.row(last + 1, tree_size, tokens)
            if row is None:
                return f"pays for all {last} sequences that the memory holds"
            if row["speed_up"] <= 1:
                return f"pays up to batch size {last}" if last else "does not pay"
        return f"pays up to batch size {MOST} and more"


def sizes(model):
    """The GPTConfig of a checkpoint folder or of a name in SIZES."""
    return size_config(model) if model in SIZES else read_config(model)


def acceptance(heads, temperature, chance=None):
    """(the CloverConfig of a folder of heads, a function from the tree size to the tokens that a
    step finds). chance: that each guess of a chain is accepted; then no folder is read."""
    if chance is not None:
        return PRESETS["clover"], lambda size: sum(chance ** i for i in range(size))
    config, record = read_record(Path(heads) / "heads.json")
    if not record.get("acceptance"):
        raise InputError(f"{heads}: these heads carry no acceptance table; make one with "
                         "train_heads.py --evaluate, or give --acceptance X")
    return config, lambda size: expected_tokens(record["acceptance"], size, temperature)


def bench(args):
    """`python -m bench roofline`: prints the table -> what goes into the JSON line."""
    if args.check:
        return check(args)
    heads, tokens = acceptance(args.heads, args.temperature, args.acceptance)
    prediction = Prediction(GPUS[args.gpu], sizes(args.model), heads, args.prefix,
                            chain=args.acceptance is not None, quantize=args.quantize)
    title = f"{Path(args.model).name} on {args.gpu}, {args.prefix} tokens in each cache"
    title += f", {args.quantize}" if args.quantize else ""
    rows = [prediction.row(B, T, tokens(T)) for T, B in product(args.tree_sizes, args.batch_sizes)]
    if not any(rows):
        raise InputError(f"{title}: takes {prediction.memory(1, 1):.0f} GB or more, and there are "
                         f"{prediction.gpu.memory}; take another --gpu, or smaller sizes")
    print(f"A prediction from datasheets, not a measurement: {title}. Left out: rows that the "
          "memory has no room for")
    rows = Table(COLUMNS, filter(None, rows))
    pays = {T: prediction.pays_up_to(T, tokens(T)) for T in args.tree_sizes}
    print("", *(f"T = {T}: {words}" for T, words in pays.items()), sep="\n")
    return dict(bench="roofline", predicted=True, model=args.model, on=args.gpu, prefix=args.prefix,
                quantize=args.quantize, rows=rows, pays=pays)


def check(args):
    """With --check: prints the predicted beside the measured steps of a folder's records."""
    records = [record for record in map(read_json, sorted(Path(args.check).glob("*.json")))
               if record.get("bench") == "decode-random" and record["machine"]["gpu"]]
    if not records:
        raise InputError(f"{args.check}: holds no steps measured on a GPU; python -m bench decode "
                         "--random-weights 8b --out FILE measures them")
    print(f"A prediction for {args.gpu}, held against",
          ", ".join({record["machine"]["gpu"] for record in records}))
    table = Table(CHECKED)
    for record in records:
        heads = preset("clover", vocabulary=record["draft_vocabulary"])
        prediction = Prediction(GPUS[args.gpu], sizes(record["model"]), heads, record["prefix"])
        for row in record["steps"]:
            ms = 1e3 * prediction.step(row["batch_size"], row["tree_size"])
            table.add(row | dict(model=record["model"], predicted_ms=ms, ratio=row["step_ms"] / ms))
    return dict(bench="roofline-check", on=args.gpu, rows=table)
