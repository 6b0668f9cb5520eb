"""What is timed against the memory's bandwidth: by `python -m bench kernels` the kernels on a GPU,
against what torch has for each, too; by `decode --random-weights SIZE` steps at the sizes of real
models. A kernel's case is (bytes that must be moved, what makes inputs, our function, torch's)."""

import math
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F

import kernels
from backends import cpu
from backends.quantized import INT8_ROWS, Layout, round_weight
from bench import SIZES, Table, size_config
from clover import CloverHeads, preset
from generate import DraftPlan, Sampling, capture
from model import GPT, Block, check_memory, free_memory, pick_device
from tools.timing import PREFIX, copy_bandwidth, seconds, stage_times, step_time, timing_decoder

BYTES = 100e6  # of inputs that take turns: no cache holds one until its next turn
DRAFT_VOCABULARY = 8192  # of heads with random weights
random = partial(torch.randn, dtype=torch.bfloat16)


def attention_case(device, model, batch, prefix, T, make_other):
    c = size_config(model)
    S = math.ceil((prefix + T) / 64) * 64
    size = 4 * batch * c.head_size * (c.n_kv_head * (prefix + T) + c.n_head * T)
    lengths = torch.full((batch,), prefix, device=device, dtype=torch.int32)
    ancestors = ((2 << torch.arange(T, device=device)) - 1).repeat(batch, 1)  # of a chain
    make = lambda: (random(batch, T, c.n_head, c.head_size, device=device),
                    *random(2, batch, c.n_kv_head, S, c.head_size, device=device),
                    lengths, ancestors)
    return size, make, kernels.tree_attention, make_other(*make())


def visible(lengths, ancestors, b, head, node, row):
    """Whether a node of sequence b sees a row of the cache."""
    own = (row - lengths[b]).clamp(0, 63)
    return (row < lengths[b]) | ((ancestors[b, node] >> own) & 1 == 1)


def sdpa(q, k, v, lengths, ancestors):
    """tree_attention by torch's attention, with a group's query heads as rows. The mask, made
    beforehand, needs no conversion: added to the scores, rows of a multiple of 16 bytes."""
    B, T, Hq, _ = q.shape
    S = int(lengths.max()) + T
    group = Hq // k.shape[1]
    b, node, row = (torch.arange(n, device=q.device) for n in (B, T, math.ceil(S / 8) * 8))
    seen = visible(lengths, ancestors, b[:, None, None], None, node[:, None], row)  # (B, T, S..)
    mask = torch.where(seen[:, None], 0.0, -math.inf).to(q.dtype).repeat_interleave(group, 2)

    def attend(q, k, v, *_):
        rows = q.unflatten(2, (-1, group)).permute(0, 2, 1, 3, 4).flatten(2, 3)
        out = F.scaled_dot_product_attention(rows, k[:, :, :S], v[:, :, :S], mask[..., :S])
        return out.unflatten(2, (T, group)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    return attend


def flex(q, k, v, lengths, ancestors):
    """As sdpa, by FlexAttention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    torch._dynamo.reset()  # otherwise it falls back to its slow form after a few shapes
    compiled = torch.compile(flex_attention, dynamic=False)
    B, T, *_ = q.shape
    S = int(lengths.max()) + T
    mask = create_block_mask(partial(visible, lengths, ancestors), B, None, T, S, device=q.device)
    return lambda q, k, v, *_: compiled(q.transpose(1, 2), k[:, :, :S], v[:, :, :S],
                                        block_mask=mask, enable_gqa=True).transpose(1, 2)


def topk(hidden, weight, k):
    logits = hidden @ weight.T
    values, tokens = logits.topk(k)
    return values.float() - logits.float().logsumexp(-1, keepdim=True), tokens


def topk_case(device, model, k, M):
    c = size_config(model)
    C, V = c.n_embd, c.vocab_size
    make = lambda: (random(M, C, device=device), random(V, C, device=device) / C ** 0.5)
    return 2 * C * (V + M), make, partial(kernels.project_topk, k=k), partial(topk, k=k)


def quantized_case(device, model, layer, kind, M):
    with torch.device("meta"):
        N, C = Block(size_config(model)).get_submodule(layer).weight.shape
    layout = INT8_ROWS if kind == "int8" else Layout("int4", 128, torch.bfloat16, True)

    def make():
        weight = random(N, C, device=device) / C ** 0.5
        return random(M, C, device=device), weight, *round_weight(weight, layout).pack()
    size = sum(x.nbytes for x in make()[2:5] if x is not None) + 2 * M * (C + N)
    return (size, make, lambda x, _, *weight: kernels.linear_quantized(x, *weight),
            lambda x, weight, *_: x @ weight.T)


def call_us(function, inputs):
    """Microseconds of a call. All are replayed in one CUDA graph, without launch gaps."""
    device = torch.device("cuda")
    body = lambda: [function(*x) for x in inputs]
    body()  # compiles
    return 1e6 * seconds(capture(body, device), device) / len(inputs)


def measure(name, args, device, bandwidth):
    """Times an operation at all shapes, printed -> the rows."""
    attention = dict(batch=args.batch_sizes, prefix=args.prefixes, T=args.tree_sizes)
    layers = "attn.qkv", "attn.proj", "mlp.up", "mlp.down"
    rows = 1, 8, 16, 64
    case, shapes = dict(
        attention=(partial(attention_case, make_other=sdpa), attention),
        flex=(partial(attention_case, make_other=flex), attention),
        topk=(topk_case, dict(k=(8, 32), M=rows)),
        quantized=(quantized_case, dict(layer=layers, kind=("int4", "int8"), M=rows)))[name]
    print(f"\n{name}")
    table = Table()
    for shape in product(args.models, *shapes.values()):
        label = dict(zip(("model", *shapes), shape))
        try:
            size, make, ours, other = case(device, **label)
            inputs = [make() for _ in range(min(max(2, math.ceil(BYTES / size)), 64))]
            us = call_us(ours, inputs)
            torch_us = call_us(other, inputs)
        except Exception as error:  # out of memory, or what a compiler raises
            print(f"{label}: {type(error).__name__}: {str(error)[:200]}")
            continue
        table.add(label | dict(us=us, share_of_copy=size / bandwidth * 1e6 / us, torch_us=torch_us,
                               speed_up=torch_us / us))
    return table


def bench_kernels(args):
    """`bench kernels`: prints the tables -> the result."""
    bandwidth = copy_bandwidth(torch.device("cuda"))
    tables = {name: measure(name, args, "cuda", bandwidth) for name in args.operations}
    return dict(copy_gb_per_s=bandwidth / 1e9) | tables


# --------------------------------------------------------------------------------------------------
# Steps

def random_model(name, device, dtype):
    """A GPT of a real model's sizes, and Clover heads that draft among DRAFT_VOCABULARY token ids,
    with random weights. InputError where memory has no room."""
    with torch.device("meta"):
        model = GPT(size_config(name)).to(dtype)
    check_memory(f"random weights of {name} in {str(dtype).removeprefix('torch.')} take",
                 model.weight_bytes(), free_memory(device), device,
                 "take another size or --dtype bfloat16")
    model = model.to_empty(device=device).requires_grad_(False).eval()
    for parameter_name, p in model.named_parameters():
        p.fill_(1) if parameter_name.endswith("norm.weight") else p.normal_(0, 0.02)
    with model.device:
        heads = CloverHeads(preset("clover"), model).to(dtype).requires_grad_(False).eval()
    heads.set_vocabulary(torch.arange(min(DRAFT_VOCABULARY, model.config.vocab_size)))
    return model, heads


def bench_steps(args):
    """`bench decode --random-weights`: prints the time of a step of each shape -> the result. It
    must read the weights, the embedding table only where that is the LM head, and the cache."""
    device = pick_device(args.device)
    dtype = getattr(torch, args.dtype) if args.dtype else cpu.default_dtype(device, torch.bfloat16)
    bandwidth = copy_bandwidth(device)
    model, heads = random_model(args.random_weights, device, dtype)
    print(f"{SIZES[args.random_weights][0]} with random weights; {PREFIX} tokens in each cache")
    c = model.config
    cache = PREFIX * 2 * c.n_layer * c.n_kv_head * c.head_size * dtype.itemsize
    weights = sum(p.nbytes for p in model.parameters())
    weights -= 0 if c.tied else model.embed.weight.nbytes
    table = Table()
    for B, T in product(args.batch_sizes, args.tree_sizes):
        decoder = timing_decoder(model, heads if T > 1 else None, DraftPlan(T - 1), batch_size=B,
                                 sampling=Sampling(args.temperature))
        ms = 1e3 * step_time(decoder)
        floor = 1e3 * (weights + B * cache) / bandwidth
        row = dict(batch_size=B, tree_size=T, step_ms=ms, floor_ms=floor, share=floor / ms)
        table.add(row | {f"{name}_ms": 1e3 * time for name, time in stage_times(decoder).items()})
    return dict(model=args.random_weights, heads="clover", device=str(device), dtype=str(dtype),
                prefix=PREFIX, draft_vocabulary=heads.config.vocabulary,
                copy_gb_per_s=bandwidth / 1e9, steps=table)
