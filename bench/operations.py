"""The kernels on a GPU: each one's time, against the memory's bandwidth and against what else a
user would run."""

import math
import statistics
from functools import partial
from itertools import product
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F

import kernels
from bench import Record
from bench.steps import size_config
from generate import capture
from model import InputError
from tools.tune import copy_bandwidth

BF16 = torch.bfloat16
MODELS = "7b", "8b", "70b"  # whose attention heads are taken
PROJECTIONS = {"7b": (4096, 32000), "8b": (4096, 128256), "qwen-7b": (3584, 151936),
               "70b": (8192, 128256)}  # C, V
CHAIN = 10  # tokens that lookup proposes


# -------------------------------------------------------------------------------------------------
# Inputs, and other implementations

def each(call, inputs, **named):
    """A function without arguments for each of the inputs."""
    return [partial(call, *x, **named) for x in inputs]


def random_trees(B, T):
    """Ancestor bitmasks int64 [B, T] of trees in which a node's parent is any earlier node."""
    generator = torch.Generator().manual_seed(0)
    masks = torch.ones(B, 1, dtype=torch.int64) << torch.arange(T)
    for node in range(1, T):
        parent = torch.randint(0, node, (B, 1), generator=generator)
        masks[:, node] |= masks.gather(1, parent)[:, 0]
    return masks


def attention_inputs(heads, B, prefix, T, device, dtype=BF16, count=1, capacity=0):
    """`count` times (q, k_cache, v_cache, lengths, ancestors) of one verify step, all with the same
    lengths and trees. heads: (Hq, Hkv, D). The caches have room for `capacity` tokens, or for
    prefix and tree where that is more."""
    (Hq, Hkv, D), options = heads, dict(device=device, dtype=dtype)
    S = max(capacity, math.ceil((prefix + T) / 64) * 64)
    lengths = torch.full((B,), prefix, device=device, dtype=torch.int32)
    ancestors = random_trees(B, T).to(device)
    return [(torch.randn(B, T, Hq, D, **options), *torch.randn(2, B, Hkv, S, D, **options), lengths,
             ancestors) for _ in range(count)]


def attention_rivals(inputs, flex=None):
    """{name: [call for each input]} of the same attention by other means; results [B, T, Hq, D].

    sdpa: the dense mask and enable_gqa. sdpa packed: a group's query heads as rows, so that the
    kernel needs no groups. flex: FlexAttention, if the function is given, compiled or not. Masks
    are made beforehand, in the form that needs no conversion in the call: added to the scores, with
    rows of a multiple of 16 bytes; a block mask for FlexAttention."""
    from torch.nn.attention.flex_attention import create_block_mask
    q, k, _, lengths, ancestors = inputs[0]
    B, T, Hq, D = q.shape
    Hkv, max_len = k.shape[1], int(lengths.max()) + T

    def visible(b, head, node, row):
        below = (row - lengths[b]).clamp(0, 63)
        return (row < lengths[b]) | ((ancestors[b, node] >> below) & 1 == 1)

    def added(seen):
        mask = q.new_full((*seen.shape[:3], math.ceil(max_len / 8) * 8), -math.inf)[..., :max_len]
        return mask.masked_fill_(seen, 0)

    def sdpa(q, k, v):
        q = q.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)

    def packed(q, k, v):
        rows = q.view(B, T, Hkv, -1, D).permute(0, 2, 1, 3, 4).reshape(B, Hkv, -1, D)
        out = F.scaled_dot_product_attention(rows, k, v, packed_mask).view(B, Hkv, T, -1, D)
        return out.permute(0, 2, 1, 3, 4).reshape(B, T, Hq, D)

    def flexible(q, k, v):
        q = q.transpose(1, 2)
        return flex(q, k, v, block_mask=block_mask, enable_gqa=True).transpose(1, 2)

    index = lambda n, *shape: torch.arange(n, device=q.device).view(shape)
    seen = visible(index(B, -1, 1, 1, 1), None, index(T, -1, 1), index(max_len, -1))  # (B, 1, T, S)
    mask, packed_mask = added(seen), added(seen.repeat_interleave(Hq // Hkv, 2))
    rivals = {"sdpa": sdpa, "sdpa packed": packed} | ({"flex": flexible} if flex else {})
    block_mask = flex and create_block_mask(visible, B, None, T, max_len, device=q.device)
    given = [(q, k[:, :, :max_len], v[:, :, :max_len]) for q, k, v, *_ in inputs]
    return {name: each(call, given) for name, call in rivals.items()}


def narrow_tiles(*inputs):
    """`kernels.tree_attention` with tiles of at most 64 query rows."""
    def blocks(rows, *shape, widest=kernels._attention_blocks):
        return widest(min(rows, 64), *shape)
    with patch.object(kernels, "_attention_blocks", blocks):
        return kernels.tree_attention(*inputs)


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
    noise = -torch.empty_like(logits).exponential_().log_()
    return (logits + noise).argmax(-1)


def windows(history, lengths, n, last):
    """`kernels.ngram_lookup` by windows of four tokens, without asking for a length, for texts
    whose newest token is at index `last`."""
    window = F.pad(history[:, :last + 1], (3, 0), value=-1).unfold(1, 4, 1).flip(2)  # newest first
    length = (window[:, :-1] == window[:, -1:]).cumprod(2).sum(2)  # (B, last)
    index = torch.arange(last, device=history.device)
    best = ((length * last + index) * (length > 0)).amax(1, keepdim=True)  # (B, 1)
    match = best % last
    source = match + 1 + torch.arange(n, device=history.device) % (last - match)
    return torch.where(best > 0, history.gather(1, source), -1).long()


# -------------------------------------------------------------------------------------------------
# Timing

def median_us(calls):
    """Median microseconds of one call. All calls are replayed in one CUDA graph: no launch gaps,
    and no data in the L2 where together they move more than it holds."""
    from triton.testing import do_bench
    replay = capture(lambda: [call() for call in calls], torch.device("cuda"))
    return do_bench(replay, warmup=20, rep=100, return_mode="median") * 1000 / len(calls)


def copies(size):
    """How many inputs of `size` bytes are twice what the L2 holds."""
    cache = torch.cuda.get_device_properties().L2_cache_size
    return min(max(2, math.ceil(2 * cache / size)), 64)


def difference(out, want):
    """The largest. Tokens are not compared: other noise, other ties where torch rounds the
    logits."""
    out, want = (x if isinstance(x, torch.Tensor) else x[0] for x in (out, want))
    return (out - want).abs().max().item() if want.is_floating_point() else 0.0


def timed_row(label, size, ours, rivals, bandwidth):
    """A row: our time, its share of the bandwidth, the rivals' times, and the speed-up over the
    fastest of them. A rival that cannot run, or whose result differs, gives the reason instead."""
    us, found = median_us(ours), {}
    for name, calls in rivals.items():
        try:
            apart = difference(calls[0](), ours[0]())  # bfloat16, and torch rounds even the logits
            found[name] = median_us(calls) if apart < 0.1 else f"the result differs by {apart}"
        except Exception as error:  # out of memory, or what a compiler raises
            found[name] = f"{type(error).__name__}: {error}"[:300]
    best = min((time for time in found.values() if not isinstance(time, str)), default=None)
    return label | dict(us=us, bytes=size, share_of_copy=size / bandwidth * 1e6 / us,
                        speed_up=best and best / us) | found


# -------------------------------------------------------------------------------------------------
# What is timed: (bytes that must be moved, our calls, {rival: calls})

def head_sizes(model):
    c = size_config(model)
    return c.n_head, c.n_kv_head, c.head_size


def attention_case(args, device, heads, batch, prefix, T):
    from torch.nn.attention.flex_attention import flex_attention
    torch._dynamo.reset()  # otherwise flex falls back to its slow form after a few shapes
    Hq, Hkv, D = head_sizes(heads)
    size = 2 * (2 * batch * Hkv * (prefix + T) * D + 2 * batch * T * Hq * D)
    inputs = attention_inputs((Hq, Hkv, D), batch, prefix, T, device, count=copies(size),
                              capacity=args.capacity)
    flex = None if args.no_flex else torch.compile(flex_attention, dynamic=False)
    rivals = attention_rivals(inputs, flex)
    if T * Hq // Hkv > 64 and D in (64, 128):  # kernels.py takes tiles of 128 query rows
        rivals["64 rows"] = each(narrow_tiles, inputs)
    return size, each(kernels.tree_attention, inputs), rivals


def projection_case(args, device, model, C, V, M, operation):
    name, k = (operation + " 1").split()[:2]  # as in "top 8"
    place = torch.arange(M, device=device)
    sample = lambda t: lambda *x, k: kernels.project_sample(*x, t, 0, place, place)
    ours, rivals = dict(top=(kernels.project_topk, (log_softmax, logsumexp)),
                        argmax=(sample(0.0), (argmax,)), sample=(sample(0.8), (gumbel,)))[name]
    random = partial(torch.randn, device=device, dtype=BF16)
    inputs = [(random(M, C), random(V, C) / C ** 0.5) for _ in range(copies(2 * V * C))]
    return (2 * C * (V + M), each(ours, inputs, k=int(k)),
            {rival.__name__: each(rival, inputs, k=int(k)) for rival in rivals})


def commit_case(args, device, heads, batch):
    (_, Hkv, D), L = head_sizes(heads), size_config(heads).n_layer
    lengths = torch.full((batch,), 100, device=device, dtype=torch.int32)
    path = torch.tensor([[0, 2, 5, 9, 14]], device=device).repeat(batch, 1)
    count = torch.full((batch,), 5, device=device)
    caches = [torch.randn(L, 2, batch, Hkv, 128, D, device=device, dtype=BF16) for _ in range(8)]
    inputs = [(kv, lengths, path, count) for kv in caches]
    size = 2 * L * 2 * batch * Hkv * 4 * D * 2  # four rows read and written, in keys and values
    return size, each(kernels.commit_path, inputs), {}


def lookup_case(args, device, batch, prefix):
    S, size = max(prefix + 1, args.capacity), 4 * batch * (prefix + 1)  # the newest is not cached
    lengths = torch.full((batch,), prefix, device=device, dtype=torch.int32)
    draw = partial(torch.randint, 0, 32000, (batch, S), device=device, dtype=torch.int32)
    inputs = [(draw(), lengths) for _ in range(copies(size))]
    rival = each(windows, inputs, n=CHAIN, last=prefix)
    return size, each(kernels.ngram_lookup, inputs, n=CHAIN), dict(torch=rival)


def merge_case(args, device, batch, T):
    ancestors, nodes = random_trees(batch, T), torch.arange(T)
    above = nodes * (ancestors[..., None] >> nodes & 1)  # (B, T, T)
    parents = above.masked_fill(nodes[:, None] == nodes, 0).amax(2)
    chain = torch.arange(1, CHAIN + 1).expand(batch, CHAIN)  # a tree's first node is 1
    tree = nodes.repeat(batch, 1), parents, (above > 0).sum(2), ancestors, chain
    inputs = [[x.to(device, copy=True) for x in tree] for _ in range(8)]
    size = 8 * batch * (4 * T + CHAIN + 4 * (T + CHAIN))
    rival = each(kernels.merge_chain_reference, inputs)
    return size, each(kernels.merge_chain, inputs), dict(torch=rival)


class Operation(NamedTuple):
    keys: tuple       # what tells its rows apart
    rivals: tuple     # what it is held against
    labels: callable  # args -> the values of the keys, for each row
    case: callable    # (args, device, **label) -> what is timed

    @property
    def columns(self):
        return ({key: f"{key} {{}}" for key in self.keys}
                | {"us": "us {:.1f}", "of copy": "share_of_copy {:.0%}"}
                | {name: f"{name} {{:.1f}}" for name in self.rivals}
                | {"against the best": "speed_up {:.2f}x"})


OPERATIONS = dict(
    attention=Operation(
        ("heads", "batch", "prefix", "T"), ("sdpa", "sdpa packed", "flex", "64 rows"),
        lambda args: product(args.heads, args.batch_sizes, args.prefixes, args.tree_sizes),
        attention_case),
    projections=Operation(
        ("operation", "model", "C", "V", "M"), ("log_softmax", "logsumexp", "argmax", "gumbel"),
        lambda args: ((operation, model, *PROJECTIONS[model], M) for operation, model, M in product(
            ("top 8", "top 32", "argmax", "sample"), PROJECTIONS, args.rows)), projection_case),
    commit=Operation(("heads", "batch"), (),
                     lambda args: product(args.heads, args.batch_sizes), commit_case),
    lookup=Operation(("batch", "prefix"), ("torch",),
                     lambda args: product(args.batch_sizes, args.prefixes), lookup_case),
    merge=Operation(("batch", "T"), ("torch",), lambda args: product(  # T: nodes before the chain's
        args.batch_sizes, [min(T, 64 - CHAIN) for T in args.tree_sizes]), merge_case))


def measure(operation, args, device, bandwidth, table):
    """Adds the rows of an Operation that are missing."""
    for values in operation.labels(args):
        label = dict(zip(operation.keys, values))
        try:
            if not table.has(**label):
                table.add(timed_row(label, *operation.case(args, device, **label), bandwidth))
        except torch.OutOfMemoryError:
            table.show(label | dict(us="does not fit the memory"))


def bench(args):
    """`python -m bench kernels`: prints the tables, returns the Record. Needs CUDA."""
    if not torch.cuda.is_available():
        raise InputError("timing kernels needs a CUDA device, and there is none; --static only "
                         "compiles them")
    torch.manual_seed(0)
    record = Record(args.out, bench="kernels")
    copy = record.once("copy_gb_per_s", lambda: copy_bandwidth(torch.device("cuda")) / 1e9)
    print(f"copy bandwidth: {copy:.0f} GB/s (bytes read and written)")
    for name in args.operations:
        table = record.table(name, OPERATIONS[name].columns)
        measure(OPERATIONS[name], args, "cuda", 1e9 * copy, table)
        gains = [row["speed_up"] for row in table if row["speed_up"]]
        if gains:
            median = statistics.median(gains)
            print(f"{name}: {min(gains):.2f}x at least, {median:.2f}x in the median")
    return record.done()
