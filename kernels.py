"""The four operations that make a speculative step quick: Triton kernels and their torch twins.

    tree_attention   attention of a token tree over the committed cache and the tree's own ancestors
    project_topk     LM head + log-softmax + top-k, for drafting
    project_sample   LM head + argmax or Gumbel-argmax, for verifying
    commit_path      moves the accepted nodes' cache rows to the front

For each: formula and cost, kernel, host function (`*_triton`), torch reference (`*_reference`), dispatching function.
The three functions share one signature. The dispatching one runs Triton on CUDA tensors and, if TRITON_INTERPRET=1 was
set before the import, on CPU tensors too; elsewhere the reference. The file needs torch and, where it exists, triton.
Everything here is for inference: the kernels have no gradient.

Letters: B sequences, T tree nodes, L layers, S cache rows, Hq and Hkv query and key/value heads, G = Hq / Hkv, D head
size, C hidden size, V vocabulary, M = B * T rows of hidden states, N cache rows looked at, P nodes of a path.
"""

import math
import os
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
    HAS_TRITON = True
except ImportError:  # macOS and Windows: @triton.jit below leaves plain functions that nobody calls
    from types import SimpleNamespace
    triton = SimpleNamespace(jit=lambda kernel=None, **_: kernel or (lambda kernel: kernel))
    tl = SimpleNamespace(constexpr=lambda value: value)
    HAS_TRITON = False

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64)
LOG2_E = tl.constexpr(math.log2(math.e))
INTERPRETED = tl.constexpr(HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1")
NOWHERE = tl.constexpr(2**31 - 1)  # no place in the vocabulary
PIVOT = tl.constexpr(-3.0e38)  # stands for the maximum of no scores: -inf - -inf would be NaN, -inf - PIVOT is not


def _check(holds, expected, *came):
    """ValueError unless it holds. expected: a text, or a function that gives it, as a step makes hundreds of these calls."""
    if not holds:
        expected = expected if isinstance(expected, str) else expected()
        came = [f"{tuple(x.shape)} {x.dtype}" if isinstance(x, torch.Tensor) else repr(x) for x in came]
        raise ValueError(f"expected {expected}, got {', '.join(came)}")


def _check_device(first, **others):
    for name, x in others.items():
        _check(x.device == first.device, lambda: f"{name} on {first.device}, as the first argument is", x.device)


def runs_triton(tensor):
    return HAS_TRITON and (tensor.is_cuda or bool(INTERPRETED))


@triton.jit
def _dot(a, b, acc):
    if INTERPRETED:  # which would multiply the bit patterns of bfloat16 as integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


# ---------------------------------------------------------------------------------------------------------------------
# tree_attention
#
#   out[b, i, h] = sum_n softmax_n(scale * q[b, i, h] . k[b, h // G, n]) v[b, h // G, n]
#   over n < lengths[b] (committed) and n = lengths[b] + j for each set bit j of ancestors[b, i]
#
# ALiBi (arXiv 2108.12409), where slopes are given: each score less slopes[h] * (position(i) - position(n)). The position of
# tree node j is lengths[b] + its depth, the number of its ancestors. What is the same for all n cancels, so the kernel adds
# slopes[h] * (position(n) - lengths[b]): one multiply-add per score and no bytes to speak of.
#
# Bytes: 2 * B * Hkv * (length + T) * D elements of K and V, read once: the floor. Each of them meets T * G rows, so
# 2 * T * G FLOPs: at T = 16, G = 4, bf16 that is 64 FLOPs a byte, under the 200 to 300 at which a data-centre GPU stops
# being bound by memory. Hence: pack all T * G rows that share a kv head into one tile, and cut the cache into splits so
# that B * Hkv * splits programs fill the GPU (flash-decoding). A split of n cache rows writes and reads back its rows'
# partial sums in float32: for bf16 that adds 2 * rows / n to the bytes, so many rows want long splits.
#
# The number of splits follows the shapes, as a captured CUDA graph needs a fixed grid. Where they cut follows the
# sequence's own length, so that a short text in a large cache is cut as in a small one, and a row's sum is cut at the
# same places whatever else is in the batch. Programs beyond their sequence's end leave at once.


@triton.jit
def _attend(q, keys, values, visible, places, slopes, scale, best, total, acc):
    """One online-softmax step, base 2: folds a tile of keys and values into (best, total, acc). places: where the keys
    stand, counted from the root."""
    # [BLOCK_ROWS, BLOCK_N] = [BLOCK_ROWS, BLOCK_D] @ [BLOCK_D, BLOCK_N]
    scores = _dot(q, tl.trans(keys), tl.zeros([q.shape[0], keys.shape[0]], tl.float32)) * scale
    if slopes is not None:
        scores += slopes[:, None] * places.to(tl.float32)[None, :]
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    shrink = tl.exp2(best - new_best)
    weights = tl.exp2(scores - new_best[:, None])
    # [BLOCK_ROWS, BLOCK_D] = [BLOCK_ROWS, BLOCK_N] @ [BLOCK_N, BLOCK_D]
    acc = _dot(weights.to(values.dtype), values, acc * shrink[:, None])
    return new_best, total * shrink + tl.sum(weights, 1), acc


@triton.jit
def _ones(word):
    """How many bits of an int32 are set, in steps that know no sign."""
    word = (word & 0x55555555) + ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word & 0x0F0F0F0F) + ((word >> 4) & 0x0F0F0F0F)
    word = (word & 0x00FF00FF) + ((word >> 8) & 0x00FF00FF)
    return (word & 0x0000FFFF) + (word >> 16)


@triton.jit
def _rows_per_split(end, splits, least_rows):
    """A multiple of 128, and so of every BLOCK_N."""
    return tl.maximum(tl.cdiv(tl.cdiv(end, splits), 128) * 128, least_rows)


@triton.jit(do_not_specialize=["T", "G", "S", "Hkv", "splits"])
def _tree_attention_kernel(
    q_ptr, k_ptr, v_ptr, lengths_ptr, ancestors_ptr, slopes_ptr, partial_ptr, lse_ptr,
    stride_qb, stride_qt, stride_qh, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    scale, T, G, S, Hkv, splits, least_rows,
    D: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Program (row tile, split, sequence and kv head): its rows over its share of the cache."""
    split = tl.program_id(1)
    kv_head = (tl.program_id(2) % Hkv).to(tl.int64)
    b = (tl.program_id(2) // Hkv).to(tl.int64)
    length = tl.load(lengths_ptr + b)
    end = tl.minimum(length + T, S)
    split_rows = _rows_per_split(end, splits, least_rows)
    begin = split * split_rows
    end = tl.minimum(begin + split_rows, end)
    if begin >= end:
        return

    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # row = node * G + member, a query head of the group
    real = rows < T * G
    nodes, members = rows // G, rows % G
    dims = tl.arange(0, BLOCK_D).to(tl.int64)
    columns = tl.arange(0, BLOCK_N)
    dim_mask = (dims < D)[None, :]  # all true where D is a power of two, and compiled away

    # [BLOCK_ROWS, BLOCK_D]
    q_ptr += b * stride_qb + kv_head * G * stride_qh
    q_rows = nodes.to(tl.int64) * stride_qt + members.to(tl.int64) * stride_qh
    q = tl.load(q_ptr + q_rows[:, None] + dims[None, :] * stride_qd, mask=real[:, None] & dim_mask, other=0.0)
    k_ptr += b * stride_kb + kv_head * stride_kh
    v_ptr += b * stride_kb + kv_head * stride_kh
    slopes = None
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + kv_head * G + members, mask=real, other=0.0) * LOG2_E
    best = tl.full([BLOCK_ROWS], PIVOT, tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)

    # Whole tiles of committed rows: every node sees them, so nothing is masked.
    prefix_end = begin + tl.maximum(tl.minimum(length, end) - begin, 0) // BLOCK_N * BLOCK_N
    for start in range(begin, prefix_end, BLOCK_N):
        offsets = (start + columns).to(tl.int64)[:, None] * stride_kn + dims[None, :] * stride_kd
        # [BLOCK_N, BLOCK_D]
        keys = tl.load(k_ptr + offsets, mask=dim_mask, other=0.0)
        values = tl.load(v_ptr + offsets, mask=dim_mask, other=0.0)
        best, total, acc = _attend(q, keys, values, None, start + columns - length, slopes, scale, best, total, acc)

    # The last committed rows and the tree. Rows that nobody here sees are not loaded: 0 * NaN would reach the output.
    bits = tl.load(ancestors_ptr + b * T + nodes, mask=real, other=0)
    low, high = bits.to(tl.int32), (bits >> 32).to(tl.int32)
    for start in range(prefix_end, end, BLOCK_N):
        cache_rows = start + columns
        node = cache_rows - length
        word = tl.where((node < 32)[None, :], low[:, None], high[:, None])
        ancestor = (word >> (node & 31)[None, :]) & 1
        visible = (node < 0)[None, :] | (ancestor != 0)
        visible = visible & (cache_rows < end)[None, :]
        seen = (tl.max(visible.to(tl.int32), 0) > 0)[:, None] & dim_mask
        offsets = cache_rows.to(tl.int64)[:, None] * stride_kn + dims[None, :] * stride_kd
        places = node
        if slopes_ptr is not None:
            key_bits = tl.load(ancestors_ptr + b * T + node, mask=(node >= 0) & (node < T), other=0)
            depth = _ones(key_bits.to(tl.int32)) + _ones((key_bits >> 32).to(tl.int32)) - 1
            places = tl.where(node < 0, node, depth)
        # [BLOCK_N, BLOCK_D]
        keys = tl.load(k_ptr + offsets, mask=seen, other=0.0)
        values = tl.load(v_ptr + offsets, mask=seen, other=0.0)
        best, total, acc = _attend(q, keys, values, visible, places, slopes, scale, best, total, acc)

    blind = total == 0.0
    acc = acc / tl.where(blind, 1.0, total)[:, None]
    out_rows = (b * T * Hkv + kv_head) * G + nodes * Hkv * G + members  # of out [B, T, Hq, D]
    out_rows = out_rows * splits + split
    tl.store(partial_ptr + out_rows[:, None] * D + dims[None, :], acc.to(partial_ptr.dtype.element_ty),
             mask=real[:, None] & dim_mask)
    if lse_ptr is not None:
        lse = tl.where(blind, PIVOT, best + tl.log2(tl.where(blind, 1.0, total)))
        tl.store(lse_ptr + out_rows, lse, mask=real)


@triton.jit(do_not_specialize=["T", "Hq", "S", "splits"])
def _combine_splits_kernel(
    partial_ptr, lse_ptr, lengths_ptr, out_ptr, T, Hq, S, splits, least_rows,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):
    """Program (node and head, sequence): weighs the partial results of the splits that had rows to look at."""
    b = tl.program_id(1).to(tl.int64)
    row = b * T * Hq + tl.program_id(0)
    dims = tl.arange(0, BLOCK_D).to(tl.int64)
    end = tl.minimum(tl.load(lengths_ptr + b) + T, S)
    live = tl.cdiv(end, _rows_per_split(end, splits, least_rows))  # the other programs left and wrote nothing
    best = PIVOT
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, live, BLOCK_SPLITS):
        split = start + tl.arange(0, BLOCK_SPLITS)
        places = row * splits + split
        # [BLOCK_SPLITS]
        lse = tl.load(lse_ptr + places, mask=split < live, other=float("-inf"))
        # [BLOCK_SPLITS, BLOCK_D]
        partial = tl.load(partial_ptr + places[:, None] * D + dims[None, :],
                          mask=(split < live)[:, None] & (dims < D)[None, :], other=0.0)
        new_best = tl.maximum(best, tl.max(lse, 0))
        weights = tl.exp2(lse - new_best)
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(partial * weights[:, None], 0)
        best = new_best
    tl.store(out_ptr + row * D + dims, (acc / total).to(out_ptr.dtype.element_ty), mask=dims < D)


@lru_cache
def _multiprocessors(device):
    """Of a GPU. A CPU, where the interpreter runs programs one by one, gets a few, so that tests meet every case."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _strides(x):
    """Strides, 0 in dimensions of size 1: what a view says there does not matter and must not choose a kernel."""
    return tuple(stride if n > 1 else 0 for n, stride in zip(x.shape, x.stride()))


def _wide(*tensors):
    """Whether rows can be loaded 16 bytes at a time: the last stride is 1 and the rest are multiples of 16 elements."""
    return all(_strides(x)[-1] == 1 and x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in _strides(x)[:-1])
               for x in tensors)


def _registers(most):
    """The launch option that lets a thread have up to `most` registers. Left alone, ptxas spills a few of them where that
    fits one more program on a multiprocessor. AMD's compiler has no such option."""
    return {} if torch.version.hip else dict(maxnreg=most)


def _attention_blocks(rows, D, dtype, wide, alibi=False):
    """Tile sizes and launch options by shape class. The tests compile every class: nothing spills, and the shared
    memory of small GPUs suffices.

    From D = 64 on a tile of keys is 8 kB, and as much of values; two or three such pairs are in flight per program, and
    up to 64 rows of D = 128 leave room for two programs per multiprocessor: enough to hide the latency of the memory.
    Exact float32 has no tensor cores, and its unrolled multiply-adds want small tiles; so do loads of single elements.
    128 rows fit only with the commonest head sizes. The ALiBi bias takes registers of its own: where a tile has many scores
    it gets half the keys, and one more such tile in flight.
    """
    BLOCK_D = max(16, triton.next_power_of_2(D))
    if dtype == torch.float32 or not wide:
        return dict(BLOCK_ROWS=16, BLOCK_N=16, BLOCK_D=BLOCK_D, num_warps=4 if BLOCK_D <= 128 else 8, num_stages=2)
    BLOCK_ROWS = min(max(16, triton.next_power_of_2(rows)), 128 if D in (64, 128) else 64)
    BLOCK_N = min(64, 4096 // BLOCK_D)
    halved = alibi and BLOCK_ROWS * BLOCK_N > 1024
    return dict(BLOCK_ROWS=BLOCK_ROWS, BLOCK_N=BLOCK_N // 2 if halved else BLOCK_N, BLOCK_D=BLOCK_D,
                num_warps=4 if BLOCK_ROWS <= 64 and BLOCK_ROWS * BLOCK_D <= 8192 else 8,
                num_stages=4 if BLOCK_ROWS <= 32 or halved else 3, **_registers(168 if BLOCK_ROWS == 16 else 255))


def _splits(S, least_rows, groups, multiprocessors):
    """Programs per group of rows: four for each multiprocessor in all, unless that leaves one less than `least_rows`."""
    return min(triton.cdiv(S, least_rows), triton.cdiv(4 * multiprocessors, groups))


def _check_attention(q, k_cache, v_cache, lengths, ancestors, slopes):
    _check(q.dim() == 4 and q.numel() > 0, "q of shape [B, T, Hq, D], not empty", q)
    _check(q.dtype in FLOATS, "q of float32, float16 or bfloat16", q)
    B, T, Hq, D = q.shape
    _check(T <= 64, "q of 1 to 64 nodes", q)
    _check(16 <= D <= 256, "q of a head size of 16 to 256", q)
    for name, cache in dict(k_cache=k_cache, v_cache=v_cache).items():
        _check(cache.dim() == 4 and cache.shape[0] == B and cache.shape[2] >= T and cache.shape[3] == D,
               lambda: f"{name} of shape [{B}, Hkv, S >= {T}, {D}], to fit q", cache)
        _check(cache.shape[1] > 0 and Hq % cache.shape[1] == 0, lambda: f"{name} of a number of heads that divides q's {Hq}", cache)
        _check(cache.dtype == q.dtype, lambda: f"{name} of {q.dtype}, as q has it", cache)
    _check(k_cache.shape == v_cache.shape, "k_cache and v_cache of one shape", k_cache, v_cache)
    _check(lengths.shape == (B,) and lengths.dtype == torch.int32, lambda: f"lengths of shape [{B}], int32", lengths)
    _check(ancestors.shape == (B, T) and ancestors.dtype == torch.int64, lambda: f"ancestors of shape [{B}, {T}], int64", ancestors)
    _check_device(q, k_cache=k_cache, v_cache=v_cache, lengths=lengths, ancestors=ancestors)
    if slopes is not None:
        _check(slopes.shape == (Hq,) and slopes.dtype == torch.float32, lambda: f"slopes of shape [{Hq}], float32", slopes)
        _check_device(q, slopes=slopes)


def _check_lengths(lengths, T, rows):
    """Only on a CPU: reading lengths back would stall a GPU. The kernels stay in the cache whatever the lengths."""
    if lengths.device.type == "cpu":
        low, high = lengths.aminmax()
        _check(0 <= low and high + T <= rows, lambda: f"lengths of 0 to {rows - T}: {T} nodes in {rows} rows", lengths.tolist())


def tree_attention_triton(q, k_cache, v_cache, lengths, ancestors, scale=None, mask=None, slopes=None):
    """`tree_attention` by the Triton kernels. `mask` is not read: the kernel reads the ancestor bits themselves."""
    _check_attention(q, k_cache, v_cache, lengths, ancestors, slopes)
    B, T, Hq, D = q.shape
    Hkv, S = k_cache.shape[1:3]
    _check_lengths(lengths, T, S)
    if _strides(k_cache) != _strides(v_cache):  # one set of addresses serves both
        k_cache, v_cache = k_cache.contiguous(), v_cache.contiguous()
    G = Hq // Hkv
    blocks = _attention_blocks(T * G, D, q.dtype, _wide(q, k_cache, v_cache), slopes is not None)
    BLOCK_ROWS = blocks["BLOCK_ROWS"]
    row_tiles = triton.cdiv(T * G, BLOCK_ROWS)
    least_rows = max(128, 4 * BLOCK_ROWS)
    splits = _splits(S, least_rows, B * Hkv * row_tiles, _multiprocessors(q.device))
    lengths, ancestors = lengths.contiguous(), ancestors.contiguous()
    slopes = None if slopes is None else slopes.contiguous()
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    partial, lse = out, None  # a single split is the result; 128 rows spill on the way to half precision
    if splits > 1 or BLOCK_ROWS > 64:
        partial = q.new_empty((B, T, Hq, splits, D), dtype=torch.float32)
        lse = q.new_empty((B, T, Hq, splits), dtype=torch.float32)
    scale = math.log2(math.e) * (D ** -0.5 if scale is None else scale)  # the kernel's exponentials are base 2
    with torch.cuda.device_of(q):
        _tree_attention_kernel[(row_tiles, splits, B * Hkv)](
            q, k_cache, v_cache, lengths, ancestors, slopes, partial, lse, *_strides(q), *_strides(k_cache),
            scale, T, G, S, Hkv, splits, least_rows, D=D, **blocks)
        if lse is not None:
            _combine_splits_kernel[(T * Hq, B)](
                partial, lse, lengths, out, T, Hq, S, splits, least_rows,
                D=D, BLOCK_D=blocks["BLOCK_D"], BLOCK_SPLITS=16, num_warps=2)
    return out


class TreeMask(NamedTuple):
    """visible bool [B, T, N]: which cache rows a node sees. unseen bool [B, N]: the rows that no node sees, None if none.
    bias float32, to be added to the scores: [B, 1, T, N] of 0 and -inf, None if every node sees every row; with slopes
    [B, Hq, T, N] of the ALiBi bias and -inf, never None."""
    visible: torch.Tensor
    unseen: torch.Tensor | None
    bias: torch.Tensor | None


def tree_mask(lengths, ancestors, rows, slopes=None):
    """What each node sees of the first `rows` cache rows, as a `TreeMask`. Made once a step, shared by all layers.

    lengths int32 [B], ancestors int64 [B, T]; `rows` is at least max(lengths) + T, else ValueError (on a CPU).
    slopes float32 [Hq]: those of `tree_attention`, else ValueError.
    """
    B, T = ancestors.shape
    _check_lengths(lengths, T, rows)
    if slopes is not None:
        _check(slopes.dim() == 1 and slopes.dtype == torch.float32, "slopes of shape [Hq], float32", slopes)
        _check_device(lengths, slopes=slopes)
    node = torch.arange(rows, device=lengths.device) - lengths[:, None]  # (B, N), negative: committed
    ancestor = (ancestors[:, :, None] >> node.clamp(0, 63)[:, None]) & 1  # (B, T, N)
    visible = (ancestor.bool() & (node < T)[:, None]) | (node < 0)[:, None]
    if slopes is None and visible.all():
        return TreeMask(visible, None, None)
    unseen = ~visible.any(1)
    if slopes is None:
        bias = torch.zeros_like(visible, dtype=torch.float32)[:, None]
    else:
        depth = (ancestors[:, :, None] >> torch.arange(64, device=lengths.device) & 1).sum(-1) - 1  # (B, T)
        places = torch.where(node < 0, node, depth.gather(1, node.clamp(0, T - 1)))  # (B, N), counted from the root
        bias = slopes[:, None, None] * (places[:, None] - depth[:, :, None])[:, None]  # (B, Hq, T, N)
    bias.masked_fill_(~visible[:, None], -math.inf)
    return TreeMask(visible, unseen if unseen.any() else None, bias)


def tree_attention_reference(q, k_cache, v_cache, lengths, ancestors, scale=None, mask=None, slopes=None):
    """`tree_attention` by torch's own attention. With a `mask` at hand it costs little more than that one call."""
    _check_attention(q, k_cache, v_cache, lengths, ancestors, slopes)
    B, T, Hq, D = q.shape
    S = k_cache.shape[2]
    if mask is None:
        _check_lengths(lengths, T, S)
        mask = tree_mask(lengths, ancestors, int(lengths.max()) + T, slopes)
    visible, unseen, bias = mask
    N = visible.shape[-1]
    _check(visible.shape == (B, T, N) and visible.dtype == torch.bool and N <= S, "the tree_mask of these arguments", visible)
    _check(slopes is None or bias is not None and bias.shape[1] == Hq, "a mask whose tree_mask had the slopes", bias)
    k, v = k_cache[:, :, :N], v_cache[:, :, :N]  # (B, Hkv, N, D)
    if unseen is not None:
        # A masked score is -inf, yet 0 * NaN is NaN. Committed rows always count, so only the rows behind the shortest
        # sequence can hold NaN or inf that must not: one look at them costs far less than cleaning all of V in each layer.
        first = int(lengths.min())
        tail = k[:, :, first:].sum() + v[:, :, first:].sum()
        if not math.isfinite(tail):
            k, v = (x.masked_fill(unseen[:, None, :, None], 0) for x in (k, v))
    bias = bias if bias is None else bias.to(q.dtype)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, bias, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)  # (B, T, Hq, D)


def tree_attention(q, k_cache, v_cache, lengths, ancestors, scale=None, mask=None, slopes=None):
    """Attention of a token tree over the committed cache and each node's own ancestors.

    q [B, T, Hq, D], caches [B, Hkv, S, D], one dtype (float32, float16, bfloat16), any strides; T 1..64, D 16..256;
    lengths int32 [B], 0..S - T; ancestors int64 [B, T], bit j of node i set: node j is i or an ancestor of i. Node j's
    keys and values already stand at cache row lengths[b] + j. Cache rows that no node sees may hold anything.
    scale: default D ** -0.5. slopes float32 [Hq]: ALiBi (arXiv 2108.12409), one per query head: a score is less its slope
    times how many positions lie between node and key; tree nodes stand at lengths[b] + depth, wherever their rows are.
    mask: `tree_mask(lengths, ancestors, N, slopes)`, read by the reference alone, which then reads no slopes.
    Returns [B, T, Hq, D]; a node that sees nothing gives zeros. ValueError for shapes, dtypes and, on a CPU, lengths.
    """
    attend = tree_attention_triton if runs_triton(q) else tree_attention_reference
    return attend(q, k_cache, v_cache, lengths, ancestors, scale, mask, slopes)


# ---------------------------------------------------------------------------------------------------------------------
# project_topk and project_sample: one pass over the LM head
#
#   project_topk     logits = hidden @ weight.T; the k largest of logits - logsumexp(logits), of equals the lowest id
#   project_sample   argmax_t(logits_t / temperature + gumbel(seed, sequence, position, t)), at temperature 0
#                    argmax_t(logits_t): a sample of softmax(logits / temperature) (the Gumbel-max trick)
#
# Bytes: V * C elements of weight, read once: the floor (V = 128256, C = 4096, bf16: 1.05 GB, 0.22 ms at 4.8 TB/s).
# FLOPs: 2 * M * V * C, so M a byte in bf16: bound by memory up to M = 64 and beyond. Storing M * V logits would write
# them once and read them twice: at M = 64 another 10%, and two launches. Here two programs for each multiprocessor
# walk the vocabulary in tiles, each with a running log-sum-exp and a running list of its k best, and a second, small
# kernel merges the lists. The noise is a pure function of its arguments, made where it is needed: about 15 integer
# operations and two logarithms per logit, beside the C elements of weight that each logit reads.
#
# A tile's logits stay in registers. Its best are taken out one at a time, the maximum over the tile against the worst
# of the list, until no row has one that enters: k rounds in a program's first tile, and with many rows and few tiles
# per program not many fewer in the next. So the search costs in proportion to k, of which drafting asks for 4 to 8.
#
# The noise: a 64-bit key per row from (seed, sequence, position) by the splitmix64 finalizer, then per token the 32-bit
# finalizer lowbias32 with the key's halves put in before and between its multiplications. With one half only, two rows
# could share a shuffled copy of the same noise; with both that takes all 64 bits to match.


@triton.jit
def _mix64_kernel(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _gumbel_kernel(low, high, tokens):
    """Noise [BLOCK_M, BLOCK_V] of row keys (low, high) for tokens, all uint32. The same integers as `gumbel`."""
    x = tokens[None, :] ^ low[:, None]
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = x ^ high[:, None]
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    uniform = ((x >> 8) | 1).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
    return -tl.log(-tl.log(uniform))


@triton.jit
def _take_best(scores, first, values, places, BLOCK_V: tl.constexpr):
    """Moves the scores of a tile that beat the worst of their row's list (values, places) into that list.

    A tile's places are higher than the list's, so an equal never enters, and of equal worst entries the last one goes.
    """
    columns = tl.arange(0, BLOCK_V)[None, :]
    best = tl.max(scores, 1)
    worst = tl.min(values, 1)
    while tl.max((best > worst).to(tl.int32), 0) > 0:
        enters = (best > worst)[:, None]
        column = tl.min(tl.where(scores == best[:, None], columns, BLOCK_V), 1)
        leaver = tl.max(tl.where(values == worst[:, None], places, -NOWHERE), 1)
        slot = (places == leaver[:, None]) & enters
        values = tl.where(slot, best[:, None], values)
        places = tl.where(slot, (first + column)[:, None], places)
        scores = tl.where((columns == column[:, None]) & enters, float("-inf"), scores)
        best = tl.max(scores, 1)
        worst = tl.min(values, 1)
    return values, places


@triton.jit(do_not_specialize=["seed_key", "M", "V", "programs", "k"])
def _project_kernel(
    hidden_ptr, weight_ptr, rows_ptr, sequence_ptr, position_ptr, values_ptr, places_ptr, lse_ptr,
    stride_hm, stride_hc, stride_wv, stride_wc, temperature, seed_key, M, V, programs, k,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """Program (row tile, p): the k best of vocabulary tiles p, p + programs, ... and, if asked for, their log-sum-exp.

    One loop over (tile, channels), so that the next tile's weights are on their way while this one's best are taken.
    """
    program = tl.program_id(1)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = m < M
    hidden_ptrs = hidden_ptr + tl.minimum(m, M - 1).to(tl.int64)[:, None] * stride_hm
    slots = tl.arange(0, BLOCK_K)[None, :]
    # Slots beyond k hold infinity, which nothing beats. Places below 0: nothing there yet.
    values = tl.zeros([BLOCK_M, BLOCK_K], tl.float32) + tl.where(slots < k, float("-inf"), float("inf"))
    places = tl.zeros([BLOCK_M, BLOCK_K], tl.int32) - 1 - slots
    best = tl.full([BLOCK_M], PIVOT, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sequence_ptr is not None:
        sequence = tl.load(sequence_ptr + m, mask=real, other=0).to(tl.int64)
        position = tl.load(position_ptr + m, mask=real, other=0).to(tl.int64)
        key = _mix64_kernel(_mix64_kernel((sequence + seed_key).to(tl.uint64)) + position.to(tl.uint64))
        low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)

    # Hopper's wide tensor-core instructions want 64 rows or more on the first side: few rows of hidden states go second.
    # 32 of them stay first all the same: the other way the search for a tile's best spills registers on Blackwell.
    VOCABULARY_FIRST: tl.constexpr = BLOCK_M < 32
    CHUNKS: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    acc = tl.zeros([BLOCK_V, BLOCK_M] if VOCABULARY_FIRST else [BLOCK_M, BLOCK_V], tl.float32)
    tiles = tl.cdiv(tl.cdiv(V, BLOCK_V) - program, programs)
    for step in range(0, tiles * CHUNKS):
        first = (program + step // CHUNKS * programs) * BLOCK_V
        place = first + tl.arange(0, BLOCK_V)
        token = tl.minimum(place, V - 1)
        if rows_ptr is not None:
            token = tl.load(rows_ptr + token)
        channels = (step % CHUNKS * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)[None, :]
        inside = (channels < C) | (C % BLOCK_C == 0)
        # [BLOCK_V, BLOCK_C]
        weight_ptrs = weight_ptr + token.to(tl.int64)[:, None] * stride_wv + channels * stride_wc
        weight = tl.load(weight_ptrs, mask=inside, other=0.0)
        # [BLOCK_M, BLOCK_C]
        hidden = tl.load(hidden_ptrs + channels * stride_hc, mask=inside, other=0.0)
        if VOCABULARY_FIRST:  # [BLOCK_V, BLOCK_M] += [BLOCK_V, BLOCK_C] @ [BLOCK_C, BLOCK_M]
            acc = _dot(weight, tl.trans(hidden), acc)
        else:  # [BLOCK_M, BLOCK_V] += [BLOCK_M, BLOCK_C] @ [BLOCK_C, BLOCK_V]
            acc = _dot(hidden, tl.trans(weight), acc)
        if step % CHUNKS == CHUNKS - 1:
            # [BLOCK_M, BLOCK_V]
            scores = tl.where((place < V)[None, :], tl.trans(acc) if VOCABULARY_FIRST else acc, float("-inf"))
            acc = tl.zeros(acc.shape, tl.float32)
            if sequence_ptr is not None:
                scores = scores / temperature + _gumbel_kernel(low, high, token.to(tl.uint32))
            if lse_ptr is not None:
                new_best = tl.maximum(best, tl.max(scores, 1))
                total = total * tl.exp(best - new_best) + tl.sum(tl.exp(scores - new_best[:, None]), 1)
                best = new_best
            values, places = _take_best(scores, first, values, places, BLOCK_V)

    lists = m * programs + program
    entries = lists[:, None] * k + slots
    tl.store(values_ptr + entries, values, mask=real[:, None] & (slots < k))
    tl.store(places_ptr + entries, places, mask=real[:, None] & (slots < k))
    if lse_ptr is not None:
        tl.store(lse_ptr + lists, best + tl.log(total), mask=real)


@triton.jit(do_not_specialize=["V", "programs", "k"])
def _merge_lists_kernel(
    values_ptr, places_ptr, lse_ptr, rows_ptr, logprobs_ptr, tokens_ptr, V, programs, k, BLOCK_ENTRIES: tl.constexpr,
):
    """Program m: the k best of all lists for row m, of equals the lowest place."""
    row = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, BLOCK_ENTRIES)
    # [BLOCK_ENTRIES]
    values = tl.load(values_ptr + row * programs * k + entry, mask=entry < programs * k, other=float("-inf"))
    places = tl.load(places_ptr + row * programs * k + entry, mask=entry < programs * k, other=NOWHERE)
    if lse_ptr is not None:
        # [BLOCK_ENTRIES], one for each program
        lse = tl.load(lse_ptr + row * programs + entry, mask=entry < programs, other=float("-inf"))
        most = tl.max(lse, 0)
        lse = most + tl.log(tl.sum(tl.exp(lse - most), 0))
    for slot in range(0, k):
        value = tl.max(values, 0)
        place = tl.min(tl.where(values == value, places, NOWHERE), 0)
        values = tl.where(places == place, float("-inf"), values)
        token = tl.minimum(tl.maximum(place, 0), V - 1)  # where all is NaN no list has a place: still name a token
        if rows_ptr is not None:
            token = tl.load(rows_ptr + token)
        tl.store(tokens_ptr + row * k + slot, token.to(tl.int64))
        if lse_ptr is not None:
            tl.store(logprobs_ptr + row * k + slot, value - lse)


def _project_blocks(M, dtype, wide, gathered):
    """Tile sizes and launch options by shape class, all compiled in the tests: nothing spills, and the shared memory of
    small GPUs suffices.

    A tile of weights is 16 kB, and two or three are in flight per program. The loads of gathered rows wait for their
    indices: one stage more. Exact float32 and loads of single elements want smaller tiles.
    """
    BLOCK_M = min(max(16, triton.next_power_of_2(M)), 64)
    num_warps = 8 if BLOCK_M == 64 else 4
    if dtype == torch.float32 or not wide:
        return dict(BLOCK_M=BLOCK_M, BLOCK_V=64, BLOCK_C=32, num_warps=num_warps,
                    num_stages=3 if dtype == torch.float32 else 2, **_registers(168))
    return dict(BLOCK_M=BLOCK_M, BLOCK_V=128, BLOCK_C=64, num_warps=num_warps,
                num_stages=(3 if BLOCK_M == 64 else 4) + gathered, **(_registers(255) if BLOCK_M < 64 else {}))


def _project_triton(hidden, weight, rows, k, noise=None):
    """Both kernels. noise: None, or (temperature, seed_key, sequence, position) for samples, which need k = 1 and no
    log-probabilities. Returns (logprobs float32 [M, k] or None, tokens int64 [M, k])."""
    M, C = hidden.shape
    rows = None if rows is None else rows.contiguous()
    V = len(weight if rows is None else rows)
    blocks = _project_blocks(M, hidden.dtype, _wide(hidden, weight), rows is not None)
    row_tiles = triton.cdiv(M, blocks["BLOCK_M"])
    # two programs per multiprocessor, and no more lists than one program of the second kernel can merge
    programs = min(triton.cdiv(V, blocks["BLOCK_V"]), max(1, 2 * _multiprocessors(hidden.device) // row_tiles), 512)
    values = hidden.new_empty((M, programs, k), dtype=torch.float32)
    places = hidden.new_empty((M, programs, k), dtype=torch.int32)
    tokens = hidden.new_empty((M, k), dtype=torch.int64)
    lse = logprobs = sequence = position = None
    temperature, seed_key = 0.0, 0
    if noise is None:
        lse = hidden.new_empty((M, programs), dtype=torch.float32)
        logprobs = hidden.new_empty((M, k), dtype=torch.float32)
    elif noise[0] > 0:
        temperature, seed_key, sequence, position = noise
        sequence, position = sequence.contiguous(), position.contiguous()
    BLOCK_K = 1 if k == 1 else 8 if k <= 8 else 32
    BLOCK_ENTRIES = triton.next_power_of_2(programs * k)
    with torch.cuda.device_of(hidden):
        _project_kernel[(row_tiles, programs)](
            hidden, weight, rows, sequence, position, values, places, lse, *_strides(hidden), *_strides(weight),
            float(temperature), seed_key, M, V, programs, k, C=C, BLOCK_K=BLOCK_K, **blocks)
        _merge_lists_kernel[(M,)](
            values, places, lse, rows, logprobs, tokens, V, programs, k,
            BLOCK_ENTRIES=BLOCK_ENTRIES, num_warps=min(max(BLOCK_ENTRIES // 512, 1), 16))
    return logprobs, tokens


def _check_project(hidden, weight, rows):
    _check(hidden.dim() == 2 and len(hidden) > 0, "hidden of shape [M >= 1, C]", hidden)
    _check(weight.dim() == 2 and len(weight) > 0 and hidden.shape[1] == weight.shape[1] > 0,
           lambda: f"weight of shape [V >= 1, {hidden.shape[1]}], as hidden has it", weight)
    _check(hidden.dtype in FLOATS, "hidden of float32, float16 or bfloat16", hidden)
    _check(weight.dtype == hidden.dtype, lambda: f"weight of {hidden.dtype}, as hidden has it", weight)
    _check_device(hidden, weight=weight)
    if rows is not None:
        _check(rows.dim() == 1 and len(rows) > 0 and rows.dtype == torch.int32, "rows of shape [n >= 1], int32", rows)
        _check_device(hidden, rows=rows)
        if rows.device.type == "cpu":  # reading them back would stall a GPU
            low, high = rows.aminmax()
            _check(0 <= low and high < len(weight), lambda: f"rows of 0 to {len(weight) - 1}", int(low), int(high))


def _check_topk(hidden, weight, k, rows):
    _check_project(hidden, weight, rows)
    most = min(32, len(weight if rows is None else rows))
    _check(isinstance(k, int) and 1 <= k <= most, lambda: f"k of 1 to {most}", k)


def project_topk_triton(hidden, weight, k, rows=None):
    """`project_topk` by the Triton kernels: one pass over the weight, no logits stored."""
    _check_topk(hidden, weight, k, rows)
    return _project_triton(hidden, weight, rows, k)


def float_logits(hidden, weight, rows=None):
    """hidden [M, C], weight [V, C] -> [M, V] in float32: half precision would make ties. On a CPU few rows take half the
    time with the weight first."""
    weight = weight if rows is None else weight[rows]
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return (weight.float() @ hidden.float().T).T.contiguous()


def topk_logits(logits, k):
    """What `project_topk` makes of logits float32 [M, V] that are there already: (logprobs [M, k], columns int64 [M, k])."""
    values, columns = logits.topk(min(k + 1, logits.shape[1]))
    # topk promises no order among equals, and the (k + 1)st shows whether the k-th has an equal left outside
    if (values[:, 1:] == values[:, :-1]).any():
        columns = logits.sort(dim=-1, descending=True, stable=True).indices
    columns = columns[:, :k]
    return logits.log_softmax(-1).gather(1, columns), columns  # a quarter of the time of logsumexp


def project_topk_reference(hidden, weight, k, rows=None):
    """`project_topk` by torch, through the [M, V] logits."""
    _check_topk(hidden, weight, k, rows)
    logprobs, tokens = topk_logits(float_logits(hidden, weight, rows), k)
    return logprobs, tokens if rows is None else rows[tokens].long()


def project_topk(hidden, weight, k, rows=None):
    """The k most likely tokens of each row and their log-probabilities, best first, of equals the lowest id first.

    hidden [M, C] and weight [V, C] in one dtype (float32, float16, bfloat16), any strides, k 1..min(32, V);
    above 64 rows the weight is read once per 64. rows int32 [n]: only these rows of the weight take part, in the
    normalisation too, and k is at most n; of equals the one that stands first in `rows` (FR-Spec, arXiv 2502.14856).
    Returns (logprobs float32 [M, k], tokens int64 [M, k]). ValueError for shapes, dtypes, devices, k and, on a CPU,
    rows that the weight does not have.
    """
    project = project_topk_triton if runs_triton(hidden) else project_topk_reference
    return project(hidden, weight, k, rows)


def _check_noise(M, temperature, sequence, position, device):
    _check(0 <= temperature < math.inf, "a finite temperature of at least 0", temperature)
    for name, x in dict(sequence=sequence, position=position).items():
        _check(x.shape == (M,) and x.dtype in INTEGERS, lambda: f"{name} of shape [{M}], int32 or int64", x)
        _check(x.device == device, lambda: f"{name} on {device}", x.device)


def project_sample_triton(hidden, weight, temperature, seed, sequence, position, rows=None):
    """`project_sample` by the Triton kernels: one pass over the weight, neither logits nor noise stored."""
    _check_project(hidden, weight, rows)
    _check_noise(len(hidden), temperature, sequence, position, hidden.device)
    return _project_triton(hidden, weight, rows, 1, (temperature, _seed_key(seed), sequence, position))[1][:, 0]


def _mix64(x):
    """The splitmix64 finalizer on an int64 tensor. torch's >> keeps the sign, so the copied bits are masked off."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@lru_cache
def _seed_key(seed):
    """A 64-bit seed, mixed so that seed 1 of sequence 0 is not seed 0 of sequence 1; a signed 64-bit int."""
    _check(isinstance(seed, int) and -2**63 <= seed < 2**64, "a seed of at most 64 bits", seed)
    seed = (seed + 0x9E3779B97F4A7C15 + 2**63) % 2**64 - 2**63
    return int(_mix64(torch.tensor(seed, device="cpu")))


def gumbel(seed, sequence, position, tokens):
    """Gumbel noise float32 [M, n] as a pure function of its arguments, the same on every machine up to the logarithm.

    seed int of at most 64 bits; sequence and position int tensors [M]; tokens int [n] or [M, n].
    """
    key = _mix64(_mix64(sequence.long() + _seed_key(seed)) + position.long())[:, None]  # (M, 1)
    x = tokens.int() ^ key.int()  # (M, n) int32: twice as quick as int64, and its products wrap just the same
    x = _xor_shift(x, 16).mul_(0x7FEB352D).bitwise_xor_((key >> 32).int())
    x = _xor_shift(x, 15).mul_(-0x7B935975)
    x = _xor_shift(x, 16).bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).bitwise_or_(1)
    return x.float().mul_(2.0 ** -24).log_().neg_().log_().neg_()  # odd / 2^24: never 0 and never 1


def _xor_shift(x, bits):
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << 32 - bits) - 1))


def gumbel_argmax(logits, temperature, seed, sequence, position, tokens=None):
    """A sample of softmax(logits / temperature) per row: its column, int64 [M]. Temperature 0: argmax, the first of equals.

    logits [M, V], -inf for tokens ruled out; sequence and position int [M]; tokens int [V]: the columns' token ids, where
    they are not 0..V - 1. ValueError for shapes and temperature.
    """
    M, V = logits.shape
    _check_noise(M, temperature, sequence, position, logits.device)
    if temperature == 0:
        return logits.argmax(-1)
    noise = gumbel(seed, sequence, position, torch.arange(V, device=logits.device) if tokens is None else tokens)
    return noise.add_(logits.float() / temperature).argmax(-1)


def project_sample_reference(hidden, weight, temperature, seed, sequence, position, rows=None):
    """`project_sample` by torch, through the [M, V] logits."""
    _check_project(hidden, weight, rows)
    _seed_key(seed)
    tokens = gumbel_argmax(float_logits(hidden, weight, rows), temperature, seed, sequence, position, rows)
    return tokens if rows is None else rows[tokens].long()


def project_sample(hidden, weight, temperature, seed, sequence, position, rows=None):
    """The model's own next token of each row: argmax at temperature 0, else a sample that depends on nothing drafted.

    hidden [M, C] and weight [V, C] in one dtype (float32, float16, bfloat16), any strides; temperature float;
    seed int of at most 64 bits; sequence and position int tensors [M]: whose token, and at which place of its text.
    rows int32 [n]: only these rows of the weight take part; a token's noise is the same with and without.
    Returns int64 [M]. Equal logits: the lowest token id, or the first of `rows`. ValueError for shapes, dtypes, devices,
    temperature, seed and, on a CPU, rows that the weight does not have.
    """
    project = project_sample_triton if runs_triton(hidden) else project_sample_reference
    return project(hidden, weight, temperature, seed, sequence, position, rows)


# ---------------------------------------------------------------------------------------------------------------------
# commit_path
#
#   kv[:, :, b, :, lengths[b] + j] = old kv[:, :, b, :, lengths[b] + path[b, j]]  for j < count[b]
#
# Bytes: 2 * L * Hkv * D elements read and written per moved row: 131 kB each way for 32 layers of 8 heads of 128 in bf16.
# For a few sequences what costs is the launch, so one serves all layers. Nodes in place (path[j] == j) are not touched.


@triton.jit(do_not_specialize=["P", "S", "Hkv"])
def _commit_path_kernel(
    kv_ptr, lengths_ptr, path_ptr, count_ptr,
    stride_kvl, stride_kvside, stride_kvb, stride_kvh, stride_kvn, stride_kvd, P, S, Hkv,
    D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Program (layer, keys or values, and head; sequence): moves the path's rows of one [S, D] slice."""
    b = tl.program_id(1).to(tl.int64)
    head = (tl.program_id(0) % Hkv).to(tl.int64)
    side = (tl.program_id(0) // Hkv % 2).to(tl.int64)
    layer = (tl.program_id(0) // Hkv // 2).to(tl.int64)
    places = tl.arange(0, BLOCK_P)
    dims = tl.arange(0, BLOCK_D).to(tl.int64)
    live = (places < P) & (places < tl.load(count_ptr + b))
    # [BLOCK_P]
    nodes = tl.load(path_ptr + b * P + places, mask=live, other=0).to(tl.int64)
    target = tl.load(lengths_ptr + b).to(tl.int64) + places
    source = target - places + nodes
    moved = live & (nodes != places) & (target >= 0) & (target < S) & (source >= 0) & (source < S)
    moved = moved[:, None] & (dims < D)[None, :]
    slice_ptr = kv_ptr + layer * stride_kvl + side * stride_kvside + b * stride_kvb + head * stride_kvh
    slice_ptrs = slice_ptr + dims[None, :] * stride_kvd
    # [BLOCK_P, BLOCK_D]
    tile = tl.load(slice_ptrs + source[:, None] * stride_kvn, mask=moved)
    tl.debug_barrier()  # a row may be another's source: all warps have read before one writes
    tl.store(slice_ptrs + target[:, None] * stride_kvn, tile, mask=moved)


def _check_commit(kv, lengths, path, count):
    _check(kv.dim() == 6 and kv.shape[1] == 2, "kv of shape [L, 2, B, Hkv, S, D]", kv)
    _check(kv.dtype in FLOATS, "kv of float32, float16 or bfloat16", kv)
    B = kv.shape[2]
    _check(lengths.shape == (B,) and lengths.dtype == torch.int32, lambda: f"lengths of shape [{B}], int32", lengths)
    _check(path.dim() == 2 and len(path) == B and 1 <= path.shape[1] <= 64 and path.dtype in INTEGERS,
           lambda: f"path of shape [{B}, 1 to 64], int32 or int64", path)
    _check(count.shape == (B,) and count.dtype in INTEGERS, lambda: f"count of shape [{B}], int32 or int64", count)
    _check_device(kv, lengths=lengths, path=path, count=count)


def commit_path_triton(kv, lengths, path, count):
    """`commit_path` by the Triton kernel: one launch for all layers."""
    _check_commit(kv, lengths, path, count)
    L, _, B, Hkv, S, D = kv.shape
    P = path.shape[1]
    BLOCK_P, BLOCK_D = triton.next_power_of_2(P), triton.next_power_of_2(D)
    with torch.cuda.device_of(kv):
        _commit_path_kernel[(L * 2 * Hkv, B)](
            kv, lengths.contiguous(), path.contiguous(), count.contiguous(), *kv.stride(), P, S, Hkv,
            D=D, BLOCK_P=BLOCK_P, BLOCK_D=BLOCK_D, num_warps=min(max(BLOCK_P * BLOCK_D // 1024, 1), 16))


def commit_path_reference(kv, lengths, path, count):
    """`commit_path` by torch: one gather of the rows that move, then one scatter."""
    _check_commit(kv, lengths, path, count)
    S, P = kv.shape[4], path.shape[1]
    place = torch.arange(P, device=kv.device)
    moved = (path != place) & (place < count[:, None])  # (B, P)
    b, place = moved.nonzero(as_tuple=True)
    if len(b) == 0:
        return
    target = lengths[b] + place
    source = lengths[b] + path[b, place]
    _check(int(target.min()) >= 0 and int(source.max()) < S and bool((source > target).all()),
           lambda: f"paths that rise from the root within the {S} rows of the cache", path.tolist(), lengths.tolist())
    kv[:, :, b, :, target] = kv[:, :, b, :, source]  # (moved rows, L, 2, Hkv, D)


def commit_path(kv, lengths, path, count):
    """Moves the accepted nodes' keys and values to the front of their tree, in place, for all layers at once.

    kv [L, 2, B, Hkv, S, D] (float32, float16, bfloat16), any strides; lengths int32 [B]; path [B, P] node ids, root (0)
    first and rising, entries from count on ignored; count [B]; both int32 or int64. For j < count[b], cache row
    lengths[b] + j becomes what row lengths[b] + path[b, j] was; no other row changes, nor do the lengths.
    ValueError for shapes and dtypes and, in the reference, for paths that leave the cache.
    """
    commit = commit_path_triton if runs_triton(kv) else commit_path_reference
    commit(kv, lengths, path, count)
