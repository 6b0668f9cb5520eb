"""The kernels on a GPU: the time of each against the memory's bandwidth and against what else a user would run."""

import math
import statistics
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F

import kernels
from bench import Table
from generate import capture
from model import InputError
from tools.tune import copy_bandwidth

BF16 = torch.bfloat16
HEADS = {"7b": (32, 32, 128), "8b": (32, 8, 128), "70b": (64, 8, 128)}  # query heads, key/value heads, head size
PROJECTIONS = {"7b": (4096, 32000), "8b": (4096, 128256), "qwen-7b": (3584, 151936), "70b": (8192, 128256)}  # C, V
LAYERS = {"7b": 32, "8b": 32, "70b": 80}


# ---------------------------------------------------------------------------------------------------------------------
# Inputs, and other implementations

def each(call, inputs):
    """A function without arguments for each of the inputs."""
    return [partial(call, *x) for x in inputs]


def random_trees(B, T):
    """Ancestor bitmasks int64 [B, T] of trees in which a node's parent is any earlier node."""
    generator = torch.Generator().manual_seed(0)
    masks = torch.ones(B, 1, dtype=torch.int64) << torch.arange(T)
    for node in range(1, T):
        parent = torch.randint(0, node, (B, 1), generator=generator)
        masks[:, node] |= masks.gather(1, parent)[:, 0]
    return masks


def attention_inputs(heads, B, prefix, T, device, dtype=BF16, count=1, capacity=0):
    """`count` times (q, k_cache, v_cache, lengths, ancestors) of one verify step, all with the same lengths and trees.
    The caches have room for `capacity` tokens, or for prefix and tree where that is more."""
    (Hq, Hkv, D), options = heads, dict(device=device, dtype=dtype)
    S = max(capacity, math.ceil((prefix + T) / 64) * 64)
    lengths = torch.full((B,), prefix, device=device, dtype=torch.int32)
    ancestors = random_trees(B, T).to(device)
    return [(torch.randn(B, T, Hq, D, **options), *torch.randn(2, B, Hkv, S, D, **options), lengths, ancestors)
            for _ in range(count)]


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

    seen = [(q, k[:, :, :max_len], v[:, :, :max_len]) for q, k, v, *_ in inputs]
    return {name: each(call, seen) for name, call in {"sdpa": sdpa, "sdpa packed": packed, "flex": flexible}.items()}


def log_softmax(hidden, weight, k):
    return torch.log_softmax((hidden @ weight.T).float(), -1).topk(k)


def logsumexp(hidden, weight, k):
    """As log_softmax, in fewer passes over the logits."""
    logits = hidden @ weight.T
    values, tokens = logits.topk(k)
    return values.float() - logits.float().logsumexp(-1, keepdim=True), tokens


def argmax(hidden, weight, k):
    return (hidden @ weight.T).argmax(-1)


def gumbel(hidden, weight, k, temperature=0.8):
    logits = (hidden @ weight.T).float() / temperature
    return (logits - torch.empty_like(logits).exponential_().log_()).argmax(-1)  # -log of an exponential is Gumbel


# ---------------------------------------------------------------------------------------------------------------------
# Timing

def median_us(calls):
    """Median microseconds of one call. All calls are replayed in one CUDA graph: no launch gaps, and no data in the L2
    where together they move more than it holds."""
    from triton.testing import do_bench
    replay = capture(lambda: [call() for call in calls], torch.device("cuda"))[1]
    return do_bench(replay, warmup=20, rep=100, return_mode="median") * 1000 / len(calls)


def copies(size):
    """How many inputs of `size` bytes are twice what the L2 holds."""
    return min(max(2, math.ceil(2 * torch.cuda.get_device_properties().L2_cache_size / size)), 64)


def difference(out, want):
    """The largest. Tokens are not compared: other noise, and other ties where torch rounds the logits."""
    out, want = (x if isinstance(x, torch.Tensor) else x[0] for x in (out, want))
    return (out - want).abs().max().item() if want.is_floating_point() else 0.0


def timed_row(label, size, bandwidth, ours, rivals):
    """A row: our time, its share of the bandwidth, the rivals' times, and the speed-up over the fastest of them. A
    rival that cannot run, or whose result differs, gives the reason instead of a time."""
    us, found = median_us(ours), {}
    for name, calls in rivals.items():
        try:
            apart = difference(calls[0](), ours[0]())  # bfloat16, and torch rounds even the logits
            found[name] = median_us(calls) if apart < 0.1 else f"the result differs by {apart}"
        except Exception as error:  # out of memory, or whatever a compiler raises: the other times still count
            found[name] = f"{type(error).__name__}: {error}"[:300]
    best = min((time for time in found.values() if not isinstance(time, str)), default=None)
    share = size / bandwidth * 1e6 / us
    return label | dict(us=us, bytes=size, share_of_copy=share, speed_up=best and best / us) | found


def timed_rows(cases, bandwidth):
    """Times (label, bytes, our calls, rivals) and prints the rows, in a new table where the columns change."""
    rows, columns = [], None
    for label, size, ours, rivals in cases:
        found = {name: f"{name} {{}}" for name in label} | {"us": "us {:.1f}", "of copy": "share_of_copy {:.0%}"}
        found |= {name: f"{name} {{:.1f}}" for name in rivals} | {"against the best": "speed_up {:.2f}x"}
        if columns != found:
            columns, table = found, Table(found)
        row = timed_row(label, size, bandwidth, ours, rivals)
        rows.append(row)
        table.show(row | {name: row[name].split(":")[0] for name in rivals if isinstance(row[name], str)})
        del ours, rivals  # frees the inputs before the next are made
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# What is timed: (label, bytes that must be moved, our calls, {rival: calls})

def attention_cases(args, device):
    from torch.nn.attention.flex_attention import flex_attention
    for name, B, prefix, T in product(args.heads, args.batch_sizes, args.prefixes, args.tree_sizes):
        torch._dynamo.reset()  # otherwise flex falls back to its slow form after a few shapes
        Hq, Hkv, D = HEADS[name]
        size = 2 * (2 * B * Hkv * (prefix + T) * D + 2 * B * T * Hq * D)
        inputs = attention_inputs(HEADS[name], B, prefix, T, device, count=copies(size), capacity=args.capacity)
        rivals = attention_rivals(inputs, torch.compile(flex_attention, dynamic=False))
        yield dict(heads=name, batch=B, prefix=prefix, T=T), size, each(kernels.tree_attention, inputs), rivals
        del inputs, rivals  # before the next are made


def projection_cases(args, device):
    sample = lambda temperature: lambda *x, k, place: kernels.project_sample(*x, temperature, 0, place, place)
    operations = (("top", (8, 32), lambda *x, k, place: kernels.project_topk(*x, k), (log_softmax, logsumexp)),
                  ("argmax", (1,), sample(0.0), (argmax,)), ("sample", (1,), sample(0.8), (gumbel,)))
    for (operation, ks, ours, rivals), (name, (C, V)) in product(operations, PROJECTIONS.items()):
        weights = [torch.randn(V, C, device=device, dtype=BF16) / C ** 0.5 for _ in range(copies(2 * V * C))]
        for M, k in product(args.rows, ks):
            inputs = [(torch.randn(M, C, device=device, dtype=BF16), weight) for weight in weights]
            yield (dict(model=name, C=C, V=V, M=M, operation=f"{operation} {k}"), 2 * C * (V + M),
                   each(partial(ours, k=k, place=torch.arange(M, device=device)), inputs),
                   {rival.__name__: each(partial(rival, k=k), inputs) for rival in rivals})


def commit_cases(args, device):
    for name, B in product(args.heads, args.batch_sizes):
        Hq, Hkv, D = HEADS[name]
        lengths = torch.full((B,), 100, device=device, dtype=torch.int32)
        path = torch.tensor([[0, 2, 5, 9, 14]], device=device).repeat(B, 1)
        count = torch.full((B,), 5, device=device)
        caches = [torch.randn(LAYERS[name], 2, B, Hkv, 128, D, device=device, dtype=BF16) for _ in range(8)]
        size = 2 * LAYERS[name] * 2 * B * Hkv * 4 * D * 2  # four rows read and written, in keys and values
        calls = each(kernels.commit_path, [(kv, lengths, path, count) for kv in caches])
        yield dict(heads=name, batch=B, moved=4 * B), size, calls, {}


OPERATIONS = dict(attention=attention_cases, projections=projection_cases, commit=commit_cases)


def bench(args):
    """`python -m bench kernels`: prints the tables, returns what goes into the JSON line. Needs CUDA."""
    if not torch.cuda.is_available():
        raise InputError("timing kernels needs a CUDA device, and there is none; --static only compiles them")
    torch.manual_seed(0)
    bandwidth = copy_bandwidth(torch.device("cuda"))
    print(f"copy bandwidth: {bandwidth / 1e9:.0f} GB/s (bytes read and written)")
    result = dict(bench="kernels", copy_gb_per_s=bandwidth / 1e9)
    for name in args.operations:
        result[name] = timed_rows(OPERATIONS[name](args, "cuda"), bandwidth)
        gains = [row["speed_up"] for row in result[name] if row["speed_up"]]
        if gains:
            print(f"{name}: {min(gains):.2f}x at least, {statistics.median(gains):.2f}x in the median")
    return result
