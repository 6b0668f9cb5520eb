"""Times kernels and the same work in torch, for `python -m bench gpu`; and decoding steps at the
sizes of real models, also for `decode --random-weights`. Compares both with memory bandwidth."""

import math
from dataclasses import replace
from functools import partial
from itertools import product
from operator import itemgetter

import torch
import torch.nn.functional as F

import kernels
from backends import cpu, cpu_library, gpu, quantized
from backends.linear import Quantized, linear_rows
from bench import Table, size_config
from bench.timing import PREFIX, copy_bandwidth, seconds, stage_times, timing_decoder
from clover import CloverHeads, preset
from common.machine import check_memory, pick_device, weight_bytes
from drafters.base import Eagle3Config
from drafters.mtp import DEPTH, MTPHeads
from generate import Sampling, capture
from model import GPT, expect

COPIES = 64  # of a kernel's inputs, at most
DRAFT_VOCABULARY = 8192  # token ids, for Clover heads with random weights
random = partial(torch.randn, dtype=torch.bfloat16)


# --------------------------------------------------------------------------------------------------
# Kernels. A case is (name, shape, bytes to move, function that makes inputs, our function, torch's
# function or None). c: the GPTConfig that gives the sizes.

def attention_cases(c, device, sizes):
    for prefix, T, B in product(sizes.prefixes, sizes.trees, sizes.sequences):
        S = math.ceil((prefix + T) / 64) * 64
        size = 4 * B * c.head_size * (c.n_kv_head * (prefix + T) + c.n_head * T)
        lengths = torch.full((B,), prefix, device=device, dtype=torch.int32)
        chain = ((2 << torch.arange(T, device=device)) - 1).repeat(B, 1)
        make = lambda: (random(B, T, c.n_head, c.head_size, device=device),
                        *random(2, B, c.n_kv_head, S, c.head_size, device=device), lengths, chain)
        group = c.n_head // c.n_kv_head
        mask = torch.full((T, S), -math.inf, dtype=torch.bfloat16, device=device).triu(prefix + 1)
        masks = mask.repeat_interleave(group, 0).repeat(B, 1, 1, 1)[..., :prefix + T]
        yield ("tree_attention", dict(batch=B, prefix=prefix, T=T), size, make,
               kernels.tree_attention, partial(sdpa, masks))


def sdpa(mask, q, k, v, *_):
    """tree_attention with torch's SDPA, where query heads of a group are rows. mask: added to the
    scores (B, 1, group x T, rows of the cache)."""
    T = q.shape[1]
    S = mask.shape[-1]
    rows = q.unflatten(2, (k.shape[1], -1)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    out = F.scaled_dot_product_attention(rows, k[:, :, :S], v[:, :, :S], mask)
    return out.unflatten(2, (T, -1)).permute(0, 2, 1, 3, 4).flatten(2, 3)


def lm_head_cases(c, device, sizes):
    """The LM head's products."""
    C, V = c.n_embd, c.vocab_size
    for M in sizes.rows:
        make = lambda: (random(M, C, device=device), random(V, C, device=device) / C ** 0.5)
        size = 2 * C * (V + M)
        row = torch.arange(M, device=device)
        greedy = dict(temperature=0.0, seed=row, sequence=row, position=row)
        yield ("project_topk", dict(M=M, k=8), size, make, partial(kernels.project_topk, k=8),
               partial(topk, k=8))
        yield ("project_sample", dict(M=M), size, make,
               partial(kernels.project_sample, **greedy), argmax)


def linear_cases(c, device, sizes):
    """The four products of a layer, with weights in 16, 8 and 4 bits; torch multiplies in 16."""
    heads = (c.n_head + 2 * c.n_kv_head) * c.head_size
    layers = dict(qkv=(heads, c.n_embd, None), proj=(c.n_embd, c.n_head * c.head_size, None),
                  up=(2 * c.n_inner, c.n_embd, "silu"), down=(c.n_embd, c.n_inner, None))
    for (layer, (N, K, activation)), M, bits in product(layers.items(), sizes.products, (16, 8, 4)):
        make = lambda: (random(M, K, device=device), random_weight(N, K, bits, device))
        plain = partial(by_torch, activation=activation) if bits == 16 else None
        yield ("linear_rows", dict(layer=layer, M=M, bits=bits), N * K * bits // 8, make,
               partial(linear_rows, activation=activation), plain)


def random_weight(N, K, bits, device):
    """A weight [N, K] of a standard deviation near K ** -0.5, as in an 8- or 4-bit GGUF file."""
    if bits == 16:
        return random(N, K, device=device) / K ** 0.5
    q = torch.randint(0, 256, (N, K * bits // 8), device=device, dtype=torch.uint8)
    ones = torch.ones(K // 32, N, device=device, dtype=torch.float16)
    if bits == 8:
        return Quantized(q.view(torch.int8), ones / (74 * K ** 0.5))
    scale = ones / (4.6 * K ** 0.5)
    return Quantized(q, scale, -7.5 * scale)


def by_torch(x, weight, activation):
    out = x @ weight.T
    return out if activation is None else kernels.glu(out, activation)


def topk(hidden, weight, k):
    logits = hidden @ weight.T
    values, tokens = logits.topk(k)
    return values.float() - logits.float().logsumexp(-1, keepdim=True), tokens


def argmax(hidden, weight):
    return (hidden @ weight.T).argmax(-1)


def kernel_row(case, device, bandwidth):
    """Times a case. Cycles through about 100 MB of copies of its inputs, so that none is cached."""
    name, shape, size, make, ours, other = case
    inputs = [make() for _ in range(min(math.ceil(1e8 / size) + 1, COPIES))]

    def microseconds(function):
        body = in_graph(lambda: [function(*x) for x in inputs], device)
        return 1e6 * seconds(body) / len(inputs)
    us = microseconds(ours)
    row = dict(kernel=name) | shape | dict(us=us, share_of_copy=size / bandwidth * 1e6 / us)
    if other:
        torch_us = microseconds(other)
        row |= dict(torch_us=torch_us, speed_up=torch_us / us)
    return row


def in_graph(body, device):
    """A function that runs body(). On CUDA it replays a graph, so there are no launch gaps."""
    with torch.inference_mode():  # the mode of `capture`: torch.compile compiles once per mode
        body()
    return capture(body, device) if device.type == "cuda" else body


# --------------------------------------------------------------------------------------------------
# Steps

def random_model(name, device, dtype, quantize=None):
    """A GPT with a real model's sizes and random weights, and Clover heads with a draft vocabulary
    of DRAFT_VOCABULARY. quantize: as in `checkpoint.load`. Raises InputError if memory is short."""
    config = size_config(name)
    config.tied &= not quantize  # a rounded LM head has a table of its own
    with torch.device("meta"):
        model = GPT(config).to(dtype)
    check_memory(f"random weights of {name} in {str(dtype).removeprefix('torch.')} take",
                 weight_bytes(model), device, "use another size or --dtype bfloat16")
    model = model.to_empty(device=device).requires_grad_(False).eval()
    for parameter_name, p in model.named_parameters():
        p.fill_(1) if parameter_name.endswith("norm.weight") else p.normal_(0, 0.02)
        if parameter_name.endswith(".A"):
            p.fill_(-1)  # states decay
    # logits with a standard deviation of 4 leave top-p some hundred tokens, like trained models'
    model.head.weight.normal_(0, 4 / config.n_embd ** 0.5)
    if model.device.type == "cuda":
        model.decoder = gpu.GraphDecoder
    with model.device:
        heads = CloverHeads(preset("clover"), model).to(dtype).requires_grad_(False).eval()
    heads.set_vocabulary(torch.arange(min(DRAFT_VOCABULARY, config.vocab_size)))
    rounding = quantized.rounding(model, quantize) if quantize else {}
    for weight, how in rounding.items():
        cpu.put(model, weight.removesuffix(".weight"),
                [quantized.pack(quantized.round_weight(model.get_parameter(weight), *how))])
    return model, heads


def quantize_randomly(model, bits):
    """Replaces a model's linear layers by random ones of 8 or 4 bits, on a GPU."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, torch.nn.Linear):
            weight = random_weight(layer.out_features, layer.in_features, bits, model.device)
            gpu.put(model, name, [weight])


def step_rows(model, heads, shapes, bandwidth):
    """Times a step and its stages for each shape (drafters, batch size, tree size, sampling).
    floor_ms: the time to read the cache and the weights, embeddings only if tied."""
    c = model.config
    per_token = 2 * c.n_layer * c.n_kv_head * c.head_size * model.dtype.itemsize
    weights = weight_bytes(model) - sum(x.nbytes for x in model.tables if x is not None)
    weights -= 0 if c.tied else c.vocab_size * c.n_embd * model.dtype.itemsize
    for name, B, T, sampling in shapes:
        decoder = timing_decoder(model, heads if name == "heads" else None, T, name == "lookup",
                                 batch_size=B, sampling=sampling)
        floor = 1e3 * (weights + B * PREFIX * per_token) / bandwidth
        times = {f"{part}_ms": 1e3 * time for part, time in stage_times(decoder).items()}
        yield dict(drafted_by=name, batch_size=B, tree_size=T, prefix=PREFIX,
                   temperature=sampling.temperature, top_p=sampling.top_p,
                   floor_ms=floor, share=floor / times["step_ms"]) | times


def over_plain(rows):
    """Adds over_plain to rows of steps: the time relative to a plain step with the same batch size
    and sampling, which comes first. A step pays if it yields more tokens than this."""
    plain = {}
    for row in rows:
        ms = plain.setdefault((row["batch_size"], row["temperature"]), row["step_ms"])
        yield row | dict(over_plain=row["step_ms"] / ms)


def bench(args):
    """`bench decode --random-weights`: prints the time of each step and returns the result."""
    device = pick_device(args.device)
    expect(not args.quantize or cpu_library.is_usable(device), "--quantize needs a CPU with a C "
           "compiler; leave it out")
    dtype = getattr(torch, args.dtype) if args.dtype else cpu.default_dtype(
        device, torch.bfloat16, packed=cpu_library.is_usable(device))
    bandwidth = copy_bandwidth(device)
    sizes = [T for T in args.tree_sizes if T not in (1, None)]  # auto needs accepted tokens
    methods = [("plain", 1), *product(("lookup", "heads"), sizes)]
    table = Table()
    for size in args.random_weights:
        model, heads = random_model(size, device, dtype, args.quantize)
        cpu.apply(model, heads)
        if model.config.mixers:  # files of such models have MTP heads
            layers = replace(model.config, n_layer=1, mixers=())
            heads = MTPHeads(Eagle3Config(layers, DEPTH, (), norm_output=True), model).place()
        shapes = [(name, B, T, Sampling(t)) for t, B, (name, T) in product(
            args.temperatures, args.batch_sizes, methods)]
        # in rounds, so that other work on the machine slows all steps alike
        rounds = [[*step_rows(model, heads, shapes, bandwidth)] for _ in range(args.runs)]
        for row in over_plain(min(runs, key=itemgetter("step_ms")) for runs in zip(*rounds)):
            table.add(dict(model=size) | row)
    return dict(model=args.random_weights, drafters=["lookup", "heads"], device=str(device),
                dtype=str(dtype), draft_vocabulary=DRAFT_VOCABULARY,
                copy_gb_per_s=bandwidth / 1e9, steps=table)
