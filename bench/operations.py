"""The kernels on a GPU: the time of each against the memory's bandwidth and against what else a user would run."""

import math
import statistics
from itertools import product

import torch
import torch.nn.functional as F

import kernels
from bench import print_head, print_row
from tools.tune import copy_bandwidth

BF16 = torch.bfloat16
HEADS = {"7b": (32, 32, 128), "8b": (32, 8, 128), "70b": (64, 8, 128)}  # query heads, key/value heads, head size
PROJECTIONS = {"7b": (4096, 32000), "8b": (4096, 128256), "qwen-7b": (3584, 151936), "70b": (8192, 128256)}  # C, V
LAYERS = {"7b": 32, "8b": 32, "70b": 80}


# ---------------------------------------------------------------------------------------------------------------------
# Inputs, and other implementations

def random_trees(B, T, generator):
    """Ancestor bitmasks int64 [B, T] of trees in which a node's parent is any earlier node."""
    masks = [[1] for _ in range(B)]
    for row in masks:
        for node in range(1, T):
            parent = int(torch.randint(0, node, (), generator=generator))
            row.append(row[parent] | 1 << node)
    return torch.tensor([[mask - (mask >> 63 << 64) for mask in row] for row in masks])


def attention_inputs(heads, B, prefix, T, device, dtype=BF16, count=1, capacity=0):
    """`count` times (q, k_cache, v_cache, lengths, ancestors) of one verify step, all with the same lengths and trees.
    The caches have room for `capacity` tokens, or for prefix and tree where that is more."""
    Hq, Hkv, D = heads
    S = max(capacity, math.ceil((prefix + T) / 64) * 64)
    lengths = torch.full((B,), prefix, device=device, dtype=torch.int32)
    ancestors = random_trees(B, T, torch.Generator().manual_seed(0)).to(device)
    inputs = []
    for _ in range(count):
        k, v = torch.randn(2, B, Hkv, S, D, device=device, dtype=dtype)
        inputs.append((torch.randn(B, T, Hq, D, device=device, dtype=dtype), k, v, lengths, ancestors))
    return inputs


def attention_rivals(inputs, flex):
    """{name: [call for each input]} of the same attention by other means; results [B, T, Hq, D].

    sdpa: the dense mask and enable_gqa. sdpa packed: a group's query heads as rows, so that the kernel needs no groups.
    flex: FlexAttention (the function, compiled or not). Masks are made beforehand, in the form that needs no conversion
    in the call: added to the scores, with rows of a multiple of 16 bytes; a block mask for FlexAttention.
    """
    from torch.nn.attention.flex_attention import create_block_mask
    q, k, v, lengths, ancestors = inputs[0]
    B, T, Hq, D = q.shape
    Hkv = k.shape[1]
    max_len = int(lengths.max()) + T
    mask = torch.full((B, 1, T, math.ceil(max_len / 8) * 8), -math.inf, device=q.device, dtype=q.dtype)[..., :max_len]
    mask.masked_fill_(kernels.tree_mask(lengths, ancestors, max_len).visible[:, None], 0)
    rows = torch.arange(T, device=q.device).repeat_interleave(Hq // Hkv)
    packed_mask = torch.empty(B, 1, len(rows), mask.stride(2), device=q.device, dtype=q.dtype)[..., :max_len]
    packed_mask.copy_(mask[:, :, rows])

    def visible(b, head, node, row):
        below = (row - lengths[b]).clamp(0, 63)
        return (row < lengths[b]) | ((ancestors[b, node] >> below) & 1 == 1)

    block_mask = create_block_mask(visible, B, None, T, max_len, device=q.device)

    def sdpa(q, k, v):
        return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask, enable_gqa=True).transpose(1, 2)

    def packed(q, k, v):
        rows = q.view(B, T, Hkv, -1, D).permute(0, 2, 1, 3, 4).reshape(B, Hkv, -1, D)
        out = F.scaled_dot_product_attention(rows, k, v, packed_mask).view(B, Hkv, T, -1, D)
        return out.permute(0, 2, 1, 3, 4).reshape(B, T, Hq, D)

    def flexible(q, k, v):
        return flex(q.transpose(1, 2), k, v, block_mask=block_mask, enable_gqa=True).transpose(1, 2)

    return {name: [lambda x=x, call=call: call(x[0], x[1][:, :, :max_len], x[2][:, :, :max_len]) for x in inputs]
            for name, call in {"sdpa": sdpa, "sdpa packed": packed, "flex": flexible}.items()}


def project_rivals(inputs, k, temperature):
    """{name: [call for each (hidden, weight)]}: two forms of what project_topk replaces, and what project_sample
    replaces, with torch's own noise and without."""
    def log_softmax(hidden, weight):
        return torch.log_softmax((hidden @ weight.T).float(), -1).topk(k)

    def logsumexp(hidden, weight):  # fewer passes over the logits
        logits = hidden @ weight.T
        values, tokens = logits.topk(k)
        return values.float() - logits.float().logsumexp(-1, keepdim=True), tokens

    def gumbel(hidden, weight):
        logits = (hidden @ weight.T).float() / temperature
        return (logits - torch.empty_like(logits).exponential_().log_()).argmax(-1)  # -log of an exponential is Gumbel

    def argmax(hidden, weight):
        return (hidden @ weight.T).argmax(-1)

    return {name: [lambda x=x, call=call: call(*x) for x in inputs] for name, call in
            dict(log_softmax=log_softmax, logsumexp=logsumexp, gumbel=gumbel, argmax=argmax).items()}


# ---------------------------------------------------------------------------------------------------------------------
# Timing

def median_us(calls):
    """Median microseconds of one call. All calls are replayed in one CUDA graph: no launch gaps, and no data in the L2
    where together they move more than it holds."""
    from triton.testing import do_bench
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return do_bench(graph.replay, warmup=20, rep=100, return_mode="median") * 1000 / len(calls)


def copies(size):
    """How many inputs of `size` bytes are twice what the L2 holds."""
    return min(max(2, math.ceil(2 * torch.cuda.get_device_properties().L2_cache_size / size)), 64)


def timed_row(label, size, bandwidth, ours, rivals, difference):
    """One row of a table, printed: our time, its share of the bandwidth, the rivals' times, and the speed-up over the
    fastest of them. A rival that cannot run, or whose result differs, gives the reason instead of a time."""
    row = label | dict(us=median_us(ours), bytes=size)
    row["share_of_copy"] = size / bandwidth * 1e6 / row["us"]
    want = ours[0]()
    for name, calls in rivals.items():
        try:
            found = difference(calls[0](), want)
            close = found < 0.1  # bfloat16, and torch rounds even the logits
            row[name] = median_us(calls) if close else f"the result differs by {found}"
        except Exception as error:  # out of memory, or whatever a compiler raises: the other times still count
            row[name] = f"{type(error).__name__}: {error}"[:300]
    times = [row[name] for name in rivals if not isinstance(row[name], str)]
    row["speed_up"] = min(times) / row["us"] if times else None
    cells = [*label.values(), f"{row['us']:.1f}", f"{row['share_of_copy']:.0%}"]
    cells += [row[name].split(":")[0] if isinstance(row[name], str) else f"{row[name]:.1f}" for name in rivals]
    print_row(*cells, *[f"{row['speed_up']:.2f}x"] if times else ["-"] if rivals else [])
    return row


def bench_attention(args, bandwidth, device):
    from torch.nn.attention.flex_attention import flex_attention
    print_head("heads", "batch", "prefix", "T", "us", "of copy", "sdpa", "sdpa packed", "flex", "against the best")
    rows = []
    for name, B, prefix, T in product(args.heads, args.batch_sizes, args.prefixes, args.tree_sizes):
        torch._dynamo.reset()  # otherwise flex falls back to its slow form after a few shapes
        Hq, Hkv, D = HEADS[name]
        size = 2 * (2 * B * Hkv * (prefix + T) * D + 2 * B * T * Hq * D)
        inputs = rivals = None  # frees the last row's before this row's are made
        inputs = attention_inputs(HEADS[name], B, prefix, T, device, count=copies(size), capacity=args.capacity)
        rivals = attention_rivals(inputs, torch.compile(flex_attention, dynamic=False))
        label = dict(heads=name, batch=B, prefix=prefix, T=T)
        rows.append(timed_row(label, size, bandwidth, [lambda x=x: kernels.tree_attention(*x) for x in inputs], rivals,
                              lambda out, want: (out - want).abs().max().item()))
    return rows


def bench_projections(args, bandwidth, device):
    def difference(out, want):  # samples are not compared: other noise, and other ties where torch rounds the logits
        return (out[0] - want[0]).abs().max().item() if table == "top" else 0.0

    rows = []
    for table, rivals in (("top", ("log_softmax", "logsumexp")), ("argmax", ("argmax",)), ("sample", ("gumbel",))):
        print_head("model", "C", "V", "M", "operation", "us", "of copy", *rivals, "against the best")
        for name, (C, V) in PROJECTIONS.items():
            weights = [torch.randn(V, C, device=device, dtype=BF16) / C ** 0.5 for _ in range(copies(2 * V * C))]
            for M, k in product(args.rows, (8, 32) if table == "top" else (1,)):
                inputs = [(torch.randn(M, C, device=device, dtype=BF16), weight) for weight in weights]
                position, temperature = torch.arange(M, device=device), 0.8 if table == "sample" else 0.0
                found = project_rivals(inputs, k, temperature or 1.0)
                if table == "top":
                    calls = [lambda x=x: kernels.project_topk(*x, k) for x in inputs]
                else:
                    calls = [lambda x=x: kernels.project_sample(*x, temperature, 0, position, position) for x in inputs]
                label = dict(model=name, C=C, V=V, M=M, operation=f"{table} {k}")
                rows.append(timed_row(label, 2 * C * (V + M), bandwidth, calls,
                                      {rival: found[rival] for rival in rivals}, difference))
    return rows


def bench_commit(args, bandwidth, device):
    print_head("heads", "batch", "moved rows", "us", "of copy")
    rows = []
    for name, B in product(args.heads, args.batch_sizes):
        Hq, Hkv, D = HEADS[name]
        caches = [torch.randn(LAYERS[name], 2, B, Hkv, 128, D, device=device, dtype=BF16) for _ in range(8)]
        lengths = torch.full((B,), 100, device=device, dtype=torch.int32)
        path = torch.tensor([[0, 2, 5, 9, 14]], device=device).repeat(B, 1)
        count = torch.full((B,), 5, device=device)
        size = 2 * LAYERS[name] * 2 * B * Hkv * 4 * D * 2  # four rows read and written, in keys and values
        calls = [lambda kv=kv: kernels.commit_path(kv, lengths, path, count) for kv in caches]
        rows.append(timed_row(dict(heads=name, batch=B, moved=4 * B), size, bandwidth, calls, {}, None))
    return rows


def bench(args):
    """Prints the tables; returns what goes into the JSON line. Needs CUDA."""
    torch.manual_seed(0)
    bandwidth = copy_bandwidth(torch.device("cuda"))
    print(f"copy bandwidth: {bandwidth / 1e9:.0f} GB/s (bytes read and written)")
    result = dict(copy_gb_per_s=bandwidth / 1e9)
    for name, run in dict(attention=bench_attention, projections=bench_projections, commit=bench_commit).items():
        if name in args.operations:
            result[name] = rows = run(args, bandwidth, "cuda")
            gains = [row["speed_up"] for row in rows if row["speed_up"] is not None]
            if gains:
                print(f"{name}: {min(gains):.2f}x at least, {statistics.median(gains):.2f}x in the median")
    return result
