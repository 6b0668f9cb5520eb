"""The kernels on a GPU: each one's time, against the memory's bandwidth and against what else a
user would run."""

import math
import statistics
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

import kernels
from bench import Record
from bench.decoding import measure_bandwidth
from bench.steps import size_config
from generate import capture
from model import InputError

BF16 = torch.bfloat16
MODELS = "7b", "8b", "70b"  # whose attention heads are taken
PROJECTIONS = {"7b": (4096, 32000), "8b": (4096, 128256), "qwen-7b": (3584, 151936),
               "70b": (8192, 128256)}  # C, V
CHAIN = 10  # tokens that lookup proposes


# -------------------------------------------------------------------------------------------------
# Inputs, and other implementations, which take the same arguments

def random_trees(B, T):
    """Ancestor bitmasks int64 [B, T] of trees in which a node's parent is any earlier node."""
    generator = torch.Generator().manual_seed(0)
    masks = torch.ones(B, 1, dtype=torch.int64) << torch.arange(T)
    for node in range(1, T):
        parent = torch.randint(0, node, (B, 1), generator=generator)
        masks[:, node] |= masks.gather(1, parent)[:, 0]
    return masks


def attention_inputs(heads, B, prefix, T, device, dtype=BF16, count=1):
    """`count` inputs of tree_attention, of the same lengths and trees. heads: (Hq, Hkv, D)."""
    Hq, Hkv, D = heads
    S = math.ceil((prefix + T) / 64) * 64
    random = partial(torch.randn, device=device, dtype=dtype)
    tree = torch.full((B,), prefix, device=device, dtype=torch.int32), random_trees(B, T).to(device)
    return [(random(B, T, Hq, D), *random(2, B, Hkv, S, D), *tree) for _ in range(count)]


def attention_rivals(q, k, v, lengths, ancestors, flex=None):
    """{name: the same attention by other means}, for inputs of these shapes and trees.

    sdpa: with enable_gqa; its `backend` is the one that torch takes. sdpa packed: a group's query
    heads as rows. flex: FlexAttention, if the function is given. Masks are made beforehand, in the
    form that needs no conversion in the call: added to the scores, with rows of a multiple of 16
    bytes; a block mask for FlexAttention."""
    B, T, Hq, D = q.shape
    Hkv = k.shape[1]
    S = int(lengths.max()) + T

    def visible(b, head, node, row):
        below = (row - lengths[b]).clamp(0, 63)
        return (row < lengths[b]) | ((ancestors[b, node] >> below) & 1 == 1)

    sequence, node, row = (torch.arange(n, device=q.device) for n in (B, T, math.ceil(S / 8) * 8))
    seen = visible(sequence[:, None, None], None, node[:, None], row)  # (B, T, S or a few more)
    mask = torch.where(seen[:, None], 0.0, -math.inf).to(q.dtype)  # (B, 1, T, S or a few more)
    packed_mask = mask.repeat_interleave(Hq // Hkv, 2)[..., :S]
    mask = mask[..., :S]

    def sdpa(q, k, v, *_):
        return F.scaled_dot_product_attention(q.transpose(1, 2), k[:, :, :S], v[:, :, :S], mask,
                                              enable_gqa=True).transpose(1, 2)

    def packed(q, k, v, *_):
        rows = q.view(B, T, Hkv, -1, D).permute(0, 2, 1, 3, 4).reshape(B, Hkv, -1, D)
        out = F.scaled_dot_product_attention(rows, k[:, :, :S], v[:, :, :S], packed_mask)
        return out.view(B, Hkv, T, -1, D).permute(0, 2, 1, 3, 4).reshape(B, T, Hq, D)

    def flexible(q, k, v, *_):
        return flex(q.transpose(1, 2), k[:, :, :S], v[:, :, :S], block_mask=block_mask,
                    enable_gqa=True).transpose(1, 2)

    chosen = torch._fused_sdp_choice(q.transpose(1, 2), k[:, :, :S], v[:, :, :S], mask,
                                     enable_gqa=True)
    sdpa.backend = SDPBackend(chosen).name
    if not flex:
        return {"sdpa": sdpa, "sdpa packed": packed}
    from torch.nn.attention.flex_attention import create_block_mask
    block_mask = create_block_mask(visible, B, None, T, S, device=q.device)
    return {"sdpa": sdpa, "sdpa packed": packed, "flex": flexible}


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


def median_us(calls):
    """Median microseconds of a call. All are replayed in one CUDA graph, without launch gaps."""
    from triton.testing import do_bench
    body = lambda: [call() for call in calls]
    body()  # compiles
    replay = capture(body, torch.device("cuda"))
    return do_bench(replay, warmup=20, rep=100, return_mode="median") * 1000 / len(calls)


def copies(size):
    """How many inputs of `size` bytes are twice what the L2 holds."""
    cache = torch.cuda.get_device_properties().L2_cache_size
    return min(max(2, math.ceil(2 * cache / size)), 64)


def difference(out, want):
    """The largest. Tokens are not compared: noise and ties differ."""
    out, want = (x if isinstance(x, torch.Tensor) else x[0] for x in (out, want))
    return (out - want).abs().max().item() if want.is_floating_point() else 0.0


def timed_row(label, bandwidth, size, inputs, ours, rivals):
    """A row: our time, its share of the bandwidth, the rivals' times, and the speed-up over their
    fastest. A rival that cannot run, or whose result differs, gives the reason instead."""
    timed = lambda function: median_us([partial(function, *x) for x in inputs])
    us = timed(ours)
    found = {f"{name} backend": rival.backend for name, rival in rivals.items()
             if hasattr(rival, "backend")}
    for name, rival in rivals.items():
        try:
            apart = difference(rival(*inputs[0]), ours(*inputs[0]))  # bfloat16: even logits round
            found[name] = timed(rival) if apart < 0.1 else f"the result differs by {apart}"
        except Exception as error:  # out of memory, or what a compiler raises
            found[name] = f"{type(error).__name__}: {error}"[:300]
    best = min((time for time in found.values() if not isinstance(time, str)), default=None)
    return label | dict(us=us, bytes=size, share_of_copy=size / bandwidth * 1e6 / us,
                        speed_up=best and best / us) | found


# -------------------------------------------------------------------------------------------------
# What is timed: (bytes that must be moved, inputs, ours, {name: rival})

def attention_case(args, device, heads, batch, prefix, T):
    from torch.nn.attention.flex_attention import flex_attention
    torch._dynamo.reset()  # otherwise flex falls back to its slow form after a few shapes
    c = size_config(heads)
    Hq, Hkv, D = c.n_head, c.n_kv_head, c.head_size
    size = 2 * (2 * batch * Hkv * (prefix + T) * D + 2 * batch * T * Hq * D)
    inputs = attention_inputs((Hq, Hkv, D), batch, prefix, T, device, count=copies(size))
    flex = None if args.no_flex else torch.compile(flex_attention, dynamic=False)
    return size, inputs, kernels.tree_attention, attention_rivals(*inputs[0], flex)


def projection_case(args, device, model, C, V, M, operation):
    name, k = (operation + " 1").split()[:2]  # as in "top 8"
    place = torch.arange(M, device=device)
    sample = lambda t: lambda *x: kernels.project_sample(*x[:2], t, 0, place, place)
    ours, rivals = dict(top=(kernels.project_topk, (log_softmax, logsumexp)),
                        argmax=(sample(0.0), (argmax,)), sample=(sample(0.8), (gumbel,)))[name]
    random = partial(torch.randn, device=device, dtype=BF16)
    inputs = [(random(M, C), random(V, C) / C ** 0.5, int(k)) for _ in range(copies(2 * V * C))]
    return 2 * C * (V + M), inputs, ours, {rival.__name__: rival for rival in rivals}


def layer_products(model):
    """{name: (C, N)} of the products of a layer."""
    c = size_config(model)
    heads = c.n_head + 2 * c.n_kv_head
    return dict(qkv=(c.n_embd, heads * c.head_size), proj=(c.n_head * c.head_size, c.n_embd),
                up=(c.n_embd, 2 * c.n_inner), down=(c.n_inner, c.n_embd))


def quantized_inputs(C, N, kind, M, device):
    """Arguments of linear_quantized: random bits, scaled to weights of about C ** -0.5."""
    words = math.ceil(C / 128) * (16 if kind == "int4" else 32)
    packed = torch.randint(-2**31, 2**31, (N, words), device=device, dtype=torch.int32)
    G = max(C // 128, 1) if kind == "int4" else 1
    scale = C ** -0.5 / (4 if kind == "int4" else 64)
    scales = torch.full((G, N), scale, device=device, dtype=BF16)
    return torch.randn(M, C, device=device, dtype=BF16), packed, scales, None, kind


def quantized_rivals(C, kind, inputs):
    """{name: the same product by torch}: of the dequantised weight in bfloat16, and of torch's own
    layouts, made beforehand. Its product of 4 bits is CUDA's."""
    dense = {}
    own = {}
    for x, packed, scales, *_ in inputs:
        dense[packed] = kernels.dequantize(packed, scales, None, kind, C, BF16)
        codes = kernels.dequantize(packed, torch.ones_like(scales), None, kind, C, BF16)
        if kind == "int8":
            own[packed] = codes.to(torch.int8)
        elif x.is_cuda:
            codes = (codes + 8).to(torch.uint8)
            own[packed] = torch._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
    scales_and_zeros = torch.stack((scales, torch.zeros_like(scales)), -1)  # (G, N, 2)

    def torch_int8(x, packed, scales, *_):
        return torch._weight_int8pack_mm(x, own[packed], scales[0])

    def torch_int4(x, packed, *_):
        return torch._weight_int4pack_mm(x, own[packed], C // len(scales), scales_and_zeros)

    return {"matmul": lambda x, packed, *_: x @ dense[packed].T,
            "torch": torch_int8 if kind == "int8" else torch_int4}


def quantized_case(args, device, model, layer, kind, M):
    C, N = layer_products(model)[layer]
    _, packed, scales, *_ = quantized_inputs(C, N, kind, 1, device)
    size = packed.nbytes + scales.nbytes + 2 * M * (C + N)
    inputs = [quantized_inputs(C, N, kind, M, device) for _ in range(copies(size))]
    return size, inputs, kernels.linear_quantized, quantized_rivals(C, kind, inputs)


def commit_case(args, device, heads, batch):
    c = size_config(heads)
    L, Hkv, D = c.n_layer, c.n_kv_head, c.head_size
    lengths = torch.full((batch,), 100, device=device, dtype=torch.int32)
    path = torch.tensor([[0, 2, 5, 9, 14]], device=device).repeat(batch, 1)
    count = torch.full((batch,), 5, device=device)
    caches = [torch.randn(L, 2, batch, Hkv, 128, D, device=device, dtype=BF16) for _ in range(8)]
    size = 2 * L * 2 * batch * Hkv * 4 * D * 2  # four rows read and written, in keys and values
    return size, [(kv, lengths, path, count) for kv in caches], kernels.commit_path, {}


def lookup_case(args, device, batch, prefix):
    size = 4 * batch * (prefix + 1)  # the newest is not cached
    lengths = torch.full((batch,), prefix, device=device, dtype=torch.int32)
    draw = partial(torch.randint, 0, 32000, device=device, dtype=torch.int32)
    inputs = [(draw((batch, prefix + 1)), lengths, CHAIN) for _ in range(copies(size))]
    return size, inputs, kernels.ngram_lookup, {}


def merge_case(args, device, batch, T):
    ancestors = random_trees(batch, T)
    nodes = torch.arange(T)
    above = nodes * (ancestors[..., None] >> nodes & 1)  # (B, T, T)
    parents = above.masked_fill(nodes[:, None] == nodes, 0).amax(2)
    chain = torch.arange(1, CHAIN + 1).expand(batch, CHAIN)  # a tree's first node is 1
    tree = nodes.repeat(batch, 1), parents, (above > 0).sum(2), ancestors, chain
    inputs = [[x.to(device, copy=True) for x in tree] for _ in range(8)]
    size = 8 * batch * (4 * T + CHAIN + 4 * (T + CHAIN))
    return size, inputs, kernels.merge_chain, dict(torch=kernels.merge_chain_reference)


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
        ("heads", "batch", "prefix", "T"), ("sdpa", "sdpa packed", "flex"),
        lambda args: product(args.heads, args.batch_sizes, args.prefixes, args.tree_sizes),
        attention_case),
    projections=Operation(
        ("operation", "model", "C", "V", "M"), ("log_softmax", "logsumexp", "argmax", "gumbel"),
        lambda args: ((operation, model, *PROJECTIONS[model], M) for operation, model, M in product(
            ("top 8", "top 32", "argmax", "sample"), PROJECTIONS, args.rows)), projection_case),
    quantized=Operation(
        ("model", "layer", "kind", "M"), ("matmul", "torch"),
        lambda args: product(args.heads, layer_products(args.heads[0]), ("int4", "int8"),
                             [M for M in args.rows if M <= 128]), quantized_case),
    commit=Operation(("heads", "batch"), (),
                     lambda args: product(args.heads, args.batch_sizes), commit_case),
    lookup=Operation(("batch", "prefix"), (),
                     lambda args: product(args.batch_sizes, args.prefixes), lookup_case),
    merge=Operation(("batch", "T"), ("torch",), lambda args: product(  # T: nodes before the chain's
        args.batch_sizes, [min(T, 64 - CHAIN) for T in args.tree_sizes]), merge_case))


def measure(operation, args, device, bandwidth, table):
    """Adds the rows of an Operation that are missing."""
    for values in operation.labels(args):
        label = dict(zip(operation.keys, values))
        try:
            if not table.has(**label):
                table.add(timed_row(label, bandwidth, *operation.case(args, device, **label)))
        except torch.OutOfMemoryError:
            table.show(label | dict(us="does not fit the memory"))


def bench(args):
    """`python -m bench kernels`: prints the tables, returns the Record. Needs CUDA."""
    if not torch.cuda.is_available():
        raise InputError("timing kernels needs a CUDA device; pytest -m static only compiles them")
    torch.manual_seed(0)
    record = Record(args.out, bench="kernels")
    bandwidth = measure_bandwidth(record, torch.device("cuda"))
    for name in args.operations:
        table = record.table(name, OPERATIONS[name].columns)
        measure(OPERATIONS[name], args, "cuda", bandwidth, table)
        gains = sorted(row["speed_up"] for row in table if row["speed_up"])
        if gains:
            print(f"{name}: from {gains[0]:.2f}x, in the median {statistics.median(gains):.2f}x")
    return record.done()
