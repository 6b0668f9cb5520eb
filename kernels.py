"""The operations of a speculative step that have kernels of their own, in Triton and in torch.

    tree_attention             attention of a token tree over the committed cache and the tree's own ancestors
    project_topk               LM head + log-softmax + top-k, for drafting
    project_sample             LM head + argmax or Gumbel-argmax, for verifying
    commit_path                moves the accepted nodes' cache rows to the front
    add_norm                   residual add + RMSNorm or LayerNorm
    rope_cache                 norm and rotation of queries and keys, write of keys and values to the cache
    glu, cosine_mix            SiLU(gate) * up; the Attention Decoder's cosine and sum
    best_guesses, best_tree    choose the best proposals of a depth; of all depths, as a tree
    lookup, merge_chain        what followed when the text stood here before; that, merged with a tree
    accept_path, nucleus       the walk down the tree; where top-p sampling cuts

The first four move the bytes of a step, the others save launches between them. For each: formula and bytes, kernel,
torch reference (`*_reference`), and a function of the same signature that launches the kernel for CUDA tensors, and for
CPU tensors if TRITON_INTERPRET=1 was set before the import; elsewhere, and where a gradient is wanted, it calls the
reference. In bfloat16 a CPU also runs `cached_attention` and `rescored_argmax`. `unchecked` skips the checks of
arguments. This file needs torch and, where it exists, triton.

Letters: B sequences, T tree nodes, L layers, S cache capacity, Hq and Hkv query and key/value heads, G = Hq / Hkv,
D head size, C hidden size, V vocabulary, M rows (hidden states), P nodes of a path, K depths and W beams of a draft.
"""

import contextlib
import math
import os
import threading
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
    HAS_TRITON = True
except ImportError:  # macOS and Windows: @triton.jit leaves plain functions, which are never called
    from types import SimpleNamespace
    triton = SimpleNamespace(jit=lambda kernel=None, **_: kernel or (lambda kernel: kernel))
    tl = SimpleNamespace(constexpr=lambda value: SimpleNamespace(value=value))
    HAS_TRITON = False

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64)
LOG2_E = tl.constexpr(math.log2(math.e))
INTERPRETED = tl.constexpr(HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1")
NO_COLUMN = tl.constexpr(2**31 - 1)  # larger than every column of the logits
NO_TOKEN = tl.constexpr(2**31)  # larger than every token id
PIVOT = tl.constexpr(-3.0e38)  # a finite maximum for rows without scores: -inf - -inf is NaN, -inf - PIVOT is -inf


class _Checks(threading.local):
    on = True


_checks = _Checks()


@contextlib.contextmanager
def unchecked(enabled=True):
    """Within it, and in this thread, the functions of this file do not check their arguments, which on a CPU is a tenth
    of a small model's step: for a loop whose shapes are fixed, once its first turn has been checked."""
    before, _checks.on = _checks.on, _checks.on and not enabled
    try:
        yield
    finally:
        _checks.on = before


def _skippable(check):
    """A check of arguments, done except within `unchecked`."""
    def checked(*args):
        if _checks.on:
            check(*args)
    return checked


def _check(condition, expected, *got):
    """Raises ValueError unless the condition holds. expected: a text, or a function that makes it only when needed."""
    if not condition:
        expected = expected if isinstance(expected, str) else expected()
        got = [f"{tuple(x.shape)} {x.dtype}" if isinstance(x, torch.Tensor) else repr(x) for x in got]
        raise ValueError(f"expected {expected}, got {', '.join(got)}")


def _check_tensors(device, **named):
    """named: (tensor or None, shape, the dtypes it may have)."""
    for name, (x, shape, *dtypes) in named.items():
        if x is not None and not (x.shape == shape and x.dtype in dtypes and x.device == device):
            kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            _check(False, f"{name} of shape {list(shape)}, {kinds}, on {device}", x, x.device)


def _check_float(x, most=None):
    _check(x.dim() > 0 and x.numel() > 0 and x.is_floating_point() and (most is None or x.shape[-1] <= most),
           lambda: f"the first tensor of shape [..., {f'1 to {most}' if most else 'C'}] and a float dtype", x)


@lru_cache
def _constant(value, device):
    with torch.inference_mode(False):  # so that it may be used in any mode
        return torch.tensor(value, device=device)


@lru_cache
def _column(n, device):
    """0..n - 1, int64 [n, 1]."""
    with torch.inference_mode(False):
        return torch.arange(n, device=device)[:, None]


def runs_triton(*tensors):
    """Whether the dispatching functions run their Triton kernels for these tensors: not in float64, and not where a
    gradient is wanted."""
    x = tensors[0]
    if not (HAS_TRITON and (x.is_cuda or INTERPRETED.value) and x.dtype != torch.float64):
        return False
    return not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors))


@triton.jit
def _dot(a, b, acc):
    if INTERPRETED:  # the interpreter would multiply the bit patterns of bfloat16 as integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


# ---------------------------------------------------------------------------------------------------------------------
# tree_attention
#
#   out[b, i, h] = sum_s softmax_s(scale * q[b, i, h] . k[b, h // G, s]) v[b, h // G, s]
#   over cache rows s < lengths[b] (committed) and s = lengths[b] + j for each set bit j of ancestors[b, i]
#
# ALiBi (arXiv 2108.12409) subtracts slopes[h] * (position(i) - position(s)) from each score. Tree node j has the
# position lengths[b] + its depth, which is the number of its ancestors. Terms that are the same for all s cancel in the
# softmax, so the kernel adds slopes[h] * (position(s) - lengths[b]): one multiply-add per score and almost no bytes.
#
# Bytes: 2 * B * Hkv * (length + T) * D elements of K and V, read once: the floor. Each element meets T * G query rows,
# so 2 * T * G FLOPs: at T = 16, G = 4, bf16 that is 64 FLOPs a byte, below the 200 to 300 at which a data-centre GPU
# stops being memory-bound. Hence all T * G query rows that share a kv head form one tile, and the cache is cut into
# splits so that B * Hkv * splits programs fill the GPU (flash-decoding). A split of n cache rows writes and reads back
# float32 partial sums, which in bf16 are as many bytes as 2 * T * G of its rows, so many query rows want long splits.
#
# The number of splits depends on shapes alone, because a captured CUDA graph needs a fixed grid. `_splits` takes the
# number with the least waves * rows for a full cache. rows: the rows of a split, 2 * BLOCK_Q for its partial sums, and
# min_split for the program's start. waves: how often the programs fill the GPU. Latency counts a part of a wave as a
# whole one, bandwidth as a part: the mean of both counts.
#
# The split size depends on the sequence's own length: a short text in a large cache is cut as in a small cache, and the
# cuts do not depend on the rest of the batch. Programs beyond the end of their sequence return at once.


@triton.jit
def _attend(q, keys, values, visible, positions, slopes, scale, row_max, row_sum, acc):
    """One online-softmax step, base 2: folds a tile of keys and values into (row_max, row_sum, acc). positions: the
    keys' positions relative to the root."""
    # [BLOCK_Q, BLOCK_S] = [BLOCK_Q, BLOCK_D] @ [BLOCK_D, BLOCK_S]
    scores = _dot(q, tl.trans(keys), tl.zeros([q.shape[0], keys.shape[0]], tl.float32)) * scale
    if slopes is not None:
        scores += slopes[:, None] * positions.to(tl.float32)[None, :]
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    rescale = tl.exp2(row_max - new_max)
    weights = tl.exp2(scores - new_max[:, None])
    # [BLOCK_Q, BLOCK_D] = [BLOCK_Q, BLOCK_S] @ [BLOCK_S, BLOCK_D]
    acc = _dot(weights.to(values.dtype), values, acc * rescale[:, None])
    return new_max, row_sum * rescale + tl.sum(weights, 1), acc


@triton.jit
def _popcount(word):
    """The number of set bits of an int32. The masks make the sign bit harmless."""
    word = (word & 0x55555555) + ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word & 0x0F0F0F0F) + ((word >> 4) & 0x0F0F0F0F)
    word = (word & 0x00FF00FF) + ((word >> 8) & 0x00FF00FF)
    return (word & 0x0000FFFF) + (word >> 16)


@triton.jit
def _split_size(end, splits, tile, min_split):
    """Cache rows per split: whole tiles of BLOCK_S rows, and at least min_split."""
    return tl.maximum(tl.cdiv(tl.cdiv(end, splits), tile) * tile, min_split)


@triton.jit(do_not_specialize=["T", "G", "S", "Hkv", "splits"])
def _tree_attention_kernel(
    q_ptr, k_ptr, v_ptr, lengths_ptr, ancestors_ptr, slopes_ptr, partial_ptr, lse_ptr,
    stride_qb, stride_qt, stride_qh, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    scale, T, G, S, Hkv, splits, min_split,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Program (sequence, kv head and tile of query rows; split): attention of the tile over one split of the cache."""
    row_tiles = tl.cdiv(T * G, BLOCK_Q)
    group = tl.program_id(0) // row_tiles  # tiles of the same keys and values are neighbours, so that the L2 has them
    kv_head = (group % Hkv).to(tl.int64)
    b = (group // Hkv).to(tl.int64)
    split = tl.program_id(1)
    length = tl.load(lengths_ptr + b)
    end = tl.minimum(length + T, S)
    split_size = _split_size(end, splits, BLOCK_S, min_split)
    begin = split * split_size
    end = tl.minimum(begin + split_size, end)
    if begin >= end:
        return

    # query row = node * G + query head within the group
    rows = tl.program_id(0) % row_tiles * BLOCK_Q + tl.arange(0, BLOCK_Q)
    row_mask = rows < T * G
    nodes, heads = rows // G, rows % G
    dims = tl.arange(0, BLOCK_D).to(tl.int64)
    tile_rows = tl.arange(0, BLOCK_S)
    dim_mask = (dims < D)[None, :]  # compiled away where D is a power of two

    # [BLOCK_Q, BLOCK_D]
    q_ptr += b * stride_qb + kv_head * G * stride_qh
    q_offsets = nodes.to(tl.int64) * stride_qt + heads.to(tl.int64) * stride_qh
    q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :] * stride_qd, mask=row_mask[:, None] & dim_mask, other=0.0)
    k_ptr += b * stride_kb + kv_head * stride_kh
    v_ptr += b * stride_kb + kv_head * stride_kh
    slopes = None
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + kv_head * G + heads, mask=row_mask, other=0.0) * LOG2_E
    row_max = tl.full([BLOCK_Q], PIVOT, tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)

    # Full tiles of committed rows: every node sees all of them, so no mask is needed.
    masked_begin = begin + tl.maximum(tl.minimum(length, end) - begin, 0) // BLOCK_S * BLOCK_S
    for start in range(begin, masked_begin, BLOCK_S):
        offsets = (start + tile_rows).to(tl.int64)[:, None] * stride_ks + dims[None, :] * stride_kd
        # [BLOCK_S, BLOCK_D]
        keys = tl.load(k_ptr + offsets, mask=dim_mask, other=0.0)
        values = tl.load(v_ptr + offsets, mask=dim_mask, other=0.0)
        positions = start + tile_rows - length
        row_max, row_sum, acc = _attend(q, keys, values, None, positions, slopes, scale, row_max, row_sum, acc)

    # The last committed rows and the tree. Rows that no node sees are not loaded: 0 * NaN would reach the output.
    bits = tl.load(ancestors_ptr + b * T + nodes, mask=row_mask, other=0)
    low, high = bits.to(tl.int32), (bits >> 32).to(tl.int32)
    if slopes_ptr is not None:
        key_bits = tl.load(ancestors_ptr + b * T + tl.arange(0, 64), mask=tl.arange(0, 64) < T, other=0)
        depths = _popcount(key_bits.to(tl.int32)) + _popcount((key_bits >> 32).to(tl.int32)) - 1
    for start in range(masked_begin, end, BLOCK_S):
        cache_rows = start + tile_rows
        node = cache_rows - length
        word = tl.where((node < 32)[None, :], low[:, None], high[:, None])
        ancestor = (word >> (node & 31)[None, :]) & 1
        visible = (node < 0)[None, :] | (ancestor != 0)
        visible = visible & (cache_rows < end)[None, :]
        load_mask = (tl.max(visible.to(tl.int32), 0) > 0)[:, None] & dim_mask
        offsets = cache_rows.to(tl.int64)[:, None] * stride_ks + dims[None, :] * stride_kd
        positions = node
        if slopes_ptr is not None:
            positions = tl.where(node < 0, node, tl.gather(depths, node & 63, 0))
        # [BLOCK_S, BLOCK_D]
        keys = tl.load(k_ptr + offsets, mask=load_mask, other=0.0)
        values = tl.load(v_ptr + offsets, mask=load_mask, other=0.0)
        row_max, row_sum, acc = _attend(q, keys, values, visible, positions, slopes, scale, row_max, row_sum, acc)

    empty = row_sum == 0.0
    acc = acc / tl.where(empty, 1.0, row_sum)[:, None]
    out_rows = (b * T * Hkv + kv_head) * G + nodes * Hkv * G + heads  # of out [B, T, Hq, D]
    out_rows = out_rows * splits + split
    tl.store(partial_ptr + out_rows[:, None] * D + dims[None, :], acc.to(partial_ptr.dtype.element_ty),
             mask=row_mask[:, None] & dim_mask)
    if lse_ptr is not None:
        lse = tl.where(empty, PIVOT, row_max + tl.log2(tl.where(empty, 1.0, row_sum)))
        tl.store(lse_ptr + out_rows, lse, mask=row_mask)


@triton.jit(do_not_specialize=["T", "Hq", "S", "splits"])
def _combine_splits_kernel(
    partial_ptr, lse_ptr, lengths_ptr, out_ptr, T, Hq, S, splits, tile, min_split,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):
    """Program (sequence, node and head): combines the partial results of the splits that the sequence reaches."""
    row = tl.program_id(0).to(tl.int64)
    b = row // (T * Hq)
    dims = tl.arange(0, BLOCK_D).to(tl.int64)
    end = tl.minimum(tl.load(lengths_ptr + b) + T, S)
    n_splits = tl.cdiv(end, _split_size(end, splits, tile, min_split))  # the other programs wrote nothing
    row_max = PIVOT
    row_sum = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, n_splits, BLOCK_SPLITS):
        split = start + tl.arange(0, BLOCK_SPLITS)
        offsets = row * splits + split
        # [BLOCK_SPLITS]
        lse = tl.load(lse_ptr + offsets, mask=split < n_splits, other=float("-inf"))
        # [BLOCK_SPLITS, BLOCK_D]
        partial = tl.load(partial_ptr + offsets[:, None] * D + dims[None, :],
                          mask=(split < n_splits)[:, None] & (dims < D)[None, :], other=0.0)
        new_max = tl.maximum(row_max, tl.max(lse, 0))
        weights = tl.exp2(lse - new_max)
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, 0)
        acc = acc * rescale + tl.sum(partial * weights[:, None], 0)
        row_max = new_max
    tl.store(out_ptr + row * D + dims, (acc / row_sum).to(out_ptr.dtype.element_ty), mask=dims < D)


@lru_cache
def _multiprocessors(device):
    """The number of a GPU's multiprocessors. For the interpreter on a CPU: a few, so that tests meet several splits."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _strides(x):
    """Strides, with 0 in dimensions of size 1, where the stride has no effect and must not select another kernel."""
    return tuple(stride if n > 1 else 0 for n, stride in zip(x.shape, x.stride()))


def _aligned(*tensors):
    """Whether rows can be loaded 16 bytes at a time: the last stride is 1, the others are multiples of 16 elements."""
    return all(_strides(x)[-1] == 1 and x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in _strides(x)[:-1])
               for x in tensors)


def _max_registers(limit):
    """The launch option that allows a thread `limit` registers. Without it ptxas spills a few where that fits one more
    program on a multiprocessor. AMD's compiler has no such option."""
    return {} if torch.version.hip else dict(maxnreg=limit)


def _attention_blocks(rows, D, dtype, aligned, alibi=False):
    """Tile sizes and launch options by shape class. `pytest -m static` compiles every class and checks that nothing
    spills and that the shared memory of small GPUs suffices.

    From D = 64 on a tile of keys is 8 kB, a tile of values as much. Each program keeps two or three such pairs in
    flight, and up to 64 query rows of D = 128 leave room for two programs per multiprocessor: enough to hide memory
    latency. Exact float32 has no tensor cores, and its unrolled multiply-adds need small tiles; so do loads of single
    elements. 128 query rows fit only with the commonest head sizes; with D = 128 triton 3.6, not 3.7, has ptxas
    serialise their products (C7515), so `python -m bench kernels` times 64 rows beside them. The ALiBi bias takes
    registers: a tile of many scores gets half the keys, and one more such tile in flight, or half the query rows.
    """
    BLOCK_D = max(16, triton.next_power_of_2(D))
    if dtype == torch.float32 or not aligned:
        return dict(BLOCK_Q=16, BLOCK_S=16, BLOCK_D=BLOCK_D, num_warps=4 if BLOCK_D <= 128 else 8, num_stages=2,
                    **(_max_registers(224) if aligned or BLOCK_D <= 64 else {}))
    largest = 128 if D in (64, 128) else 32 if alibi and BLOCK_D == 256 else 64
    BLOCK_Q = min(max(16, triton.next_power_of_2(rows)), largest)
    BLOCK_S = min(64, 4096 // BLOCK_D)
    halved = alibi and BLOCK_Q * BLOCK_S > 1024
    return dict(BLOCK_Q=BLOCK_Q, BLOCK_S=BLOCK_S // 2 if halved else BLOCK_S, BLOCK_D=BLOCK_D,
                num_warps=4 if BLOCK_Q <= 64 and BLOCK_Q * BLOCK_D <= 8192 else 8,
                num_stages=4 if BLOCK_Q <= 32 or halved else 3, **_max_registers(168 if BLOCK_Q == 16 else 255))


def _programs_at_once(blocks, multiprocessors):
    """How many programs of these launch options run at once. A multiprocessor has 65536 registers: room for 3 programs
    of 4 warps and 16 query rows, 2 of 4 warps and more rows, 1 of 8 warps. Shared memory has room for as many on
    data-centre GPUs."""
    return multiprocessors * (65536 // (32 * blocks["num_warps"] * blocks.get("maxnreg", 255)))


@lru_cache
def _splits(S, min_split, BLOCK_Q, row_tiles, at_once):
    """Splits per tile of query rows, none under min_split cache rows, where `at_once` programs run at a time."""
    def time(splits):
        waves = row_tiles * splits / at_once
        return (math.ceil(waves) + waves) * (S / splits + 2 * BLOCK_Q + min_split)
    return min(range(1, triton.cdiv(S, min_split) + 1), key=time)


@_skippable
def _check_attention(q, k_cache, v_cache, lengths, ancestors, slopes):
    _check(q.dim() == 4 and q.numel() > 0, "q of shape [B, T, Hq, D], not empty", q)
    _check(q.dtype in FLOATS, "q of float32, float16 or bfloat16", q)
    B, T, Hq, D = q.shape
    _check(T <= 64, "q of 1 to 64 nodes", q)
    _check(16 <= D <= 256, "q of a head size of 16 to 256", q)
    _check(k_cache.dim() == 4 and k_cache.shape[2] >= T, lambda: f"k_cache of shape [{B}, Hkv, S >= {T}, {D}]", k_cache)
    Hkv, S = k_cache.shape[1:3]
    _check(Hkv > 0 and Hq % Hkv == 0, lambda: f"k_cache of heads that divide q's {Hq}", k_cache)
    cache = (B, Hkv, S, D), q.dtype, torch.float64
    _check_tensors(q.device, k_cache=(k_cache, *cache), v_cache=(v_cache, *cache), lengths=(lengths, (B,), torch.int32),
                   ancestors=(ancestors, (B, T), torch.int64), slopes=(slopes, (Hq,), torch.float32))


@_skippable
def _check_lengths(lengths, T, capacity):
    """Checks values on a CPU only: reading them back would stall a GPU. The kernels never leave the cache."""
    if lengths.device.type == "cpu":
        low, high = lengths.aminmax()
        _check(0 <= low and high + T <= capacity,
               lambda: f"lengths of 0 to {capacity - T}, to fit {T} nodes into {capacity} rows", lengths.tolist())


class TreeMask(NamedTuple):
    """visible bool [B, T, max_len]: which cache rows a node sees. unseen bool [B, max_len]: rows that no node sees,
    None if there are none. bias, to be added to the scores, of `tree_mask`'s dtype: [B, 1, T, max_len] of 0 and -inf,
    None if every node sees every row; with slopes [B, Hq, T, max_len] of the ALiBi bias and -inf, never None."""
    visible: torch.Tensor
    unseen: torch.Tensor | None
    bias: torch.Tensor | None


def tree_mask(lengths, ancestors, max_len, slopes=None, dtype=torch.float32):
    """What each node sees of the first `max_len` cache rows, as a `TreeMask`. Made once per step, shared by all layers.

    lengths int32 [B], ancestors int64 [B, T]; max_len >= max(lengths) + T. slopes float32 [Hq], as in `tree_attention`.
    dtype: of the bias, best that of the attention. ValueError for slopes and, on a CPU, for lengths.
    """
    B, T = ancestors.shape
    _check_lengths(lengths, T, max_len)
    if slopes is not None:
        _check_tensors(lengths.device, slopes=(slopes, (slopes.numel(),), torch.float32))
    node = torch.arange(max_len, device=lengths.device) - lengths[:, None]  # (B, max_len), negative: committed
    ancestor = (ancestors[:, :, None] >> node.clamp(0, 63)[:, None]) & 1  # (B, T, max_len)
    visible = (ancestor.bool() & (node < T)[:, None]) | (node < 0)[:, None]
    if slopes is None and visible.all():
        return TreeMask(visible, None, None)
    unseen = ~visible.any(1)
    if slopes is None:
        bias = torch.zeros_like(visible, dtype=dtype)[:, None]
    else:
        depth = (ancestors[:, :, None] >> torch.arange(64, device=lengths.device) & 1).sum(-1) - 1  # (B, T)
        positions = torch.where(node < 0, node, depth.gather(1, node.clamp(0, T - 1)))  # (B, max_len), root at 0
        distance = positions[:, None] - depth[:, :, None]  # (B, T, max_len)
        bias = slopes.to(dtype)[:, None, None] * distance[:, None]  # (B, Hq, T, max_len)
    bias.masked_fill_(~visible[:, None], -math.inf)
    return TreeMask(visible, unseen if unseen.any() else None, bias)


def cached_attention(q, k, v, bias=None, scale=None, is_causal=False):
    """torch's own attention of q [B, T, Hq, D] over k and v [B, Hkv, S, D] -> [B, T, Hq, D] in q's dtype.

    k and v may be float64 where q is not. With q in half precision on a CPU the sums are always in float64, so that
    rounding hides in which order they were taken: the same tokens stand elsewhere in the cache of another tree, and one
    flipped bit in one layer is enough to change a text. Caches in half precision are then cast a head at a time.
    """
    (B, T, Hq, D), Hkv = q.shape, k.shape[1]
    dtype, G = torch.float64 if q.device.type == "cpu" and q.dtype.itemsize == 2 else k.dtype, Hq // Hkv
    bias = bias if bias is None or bias.dtype == torch.bool else bias.to(dtype)
    shared = bias is None or bias.shape[1] == 1  # by all query heads
    if k.dtype != dtype:
        groups = [(slice(h * G, h * G + G), slice(h, h + 1)) for h in range(Hkv)]
        return torch.cat([cached_attention(q[:, :, mine], k[:, h].to(dtype), v[:, h].to(dtype),
                                           bias if shared else bias[:, mine], scale, is_causal)
                          for mine, h in groups], dim=2)
    if dtype == torch.float64 and shared and G > 1 and 1 < T <= 64 and not is_causal:
        # query heads that share keys become rows of one product, which in float64 is quicker than one for each
        q64 = q.view(B, T, Hkv, G, D).transpose(1, 2).to(dtype).reshape(B, Hkv, T * G, D)
        bias = bias if bias is None else bias.repeat_interleave(G, dim=2)
        out = F.scaled_dot_product_attention(q64, k, v, bias, scale=scale).view(B, Hkv, T, G, D)
        return out.transpose(1, 2).to(q.dtype).reshape(B, T, Hq, D)
    out = F.scaled_dot_product_attention(q.to(dtype).transpose(1, 2), k, v, bias, is_causal=is_causal, scale=scale,
                                         enable_gqa=G > 1)
    return out.transpose(1, 2).to(q.dtype)  # (B, T, Hq, D)


def tree_attention_reference(q, k_cache, v_cache, lengths, ancestors, scale=None, mask=None, slopes=None):
    """`tree_attention` by torch's own attention. Given a `mask`, it costs little more than that one call."""
    _check_attention(q, k_cache, v_cache, lengths, ancestors, slopes)
    B, T, Hq, D = q.shape
    S = k_cache.shape[2]
    if mask is None:
        mask = tree_mask(lengths, ancestors, min(int(lengths.max()) + T, S), slopes)
    visible, unseen, bias = mask
    max_len = visible.shape[-1]
    _check(visible.shape == (B, T, max_len) and visible.dtype == torch.bool and max_len <= S,
           "the tree_mask of these arguments", visible)
    _check(slopes is None or bias is not None and bias.shape[1] == Hq, "a mask whose tree_mask had the slopes", bias)
    k, v = k_cache[:, :, :max_len], v_cache[:, :, :max_len]  # (B, Hkv, max_len, D)
    if unseen is not None:
        # A masked score is -inf, yet 0 * NaN is NaN. Committed rows always count, so only rows behind the shortest
        # sequence can hold a NaN or inf that must not reach the output. Testing their sum costs far less than cleaning
        # V in each layer.
        first = int(lengths.min())
        tail = k[:, :, first:].sum() + v[:, :, first:].sum()
        if not math.isfinite(tail):
            k, v = (x.masked_fill(unseen[:, None, :, None], 0) for x in (k, v))
    return cached_attention(q, k, v, bias, scale)


def tree_attention(q, k_cache, v_cache, lengths, ancestors, scale=None, mask=None, slopes=None):
    """Attention of a token tree over the committed cache and each node's own ancestors.

    q [B, T, Hq, D], caches [B, Hkv, S, D], one dtype (float32, float16, bfloat16), any strides; T 1..64, D 16..256; the
    reference takes caches of float64 too, see `cached_attention`.
    lengths int32 [B], 0..S - T; ancestors int64 [B, T]: bit j of node i is set when j is i or an ancestor of i. The
    keys and values of node j already stand at cache row lengths[b] + j. Cache rows that no node sees may hold anything.
    scale: default D ** -0.5. slopes float32 [Hq]: ALiBi (arXiv 2108.12409): subtracts from each score the query head's
    slope times the distance in positions; a tree node's position is lengths[b] + depth, whatever its cache row.
    mask: `tree_mask(lengths, ancestors, max_len, slopes)`. Only the reference reads it, slopes included.
    Returns [B, T, Hq, D]; a node that sees nothing gives zeros. ValueError for shapes, dtypes and, on a CPU, lengths.
    """
    if not runs_triton(k_cache, v_cache, q):
        return tree_attention_reference(q, k_cache, v_cache, lengths, ancestors, scale, mask, slopes)
    _check_attention(q, k_cache, v_cache, lengths, ancestors, slopes)
    B, T, Hq, D = q.shape
    Hkv, S = k_cache.shape[1:3]
    _check_lengths(lengths, T, S)
    if _strides(k_cache) != _strides(v_cache):  # the kernel uses one set of strides for both
        k_cache, v_cache = k_cache.contiguous(), v_cache.contiguous()
    G = Hq // Hkv
    blocks = _attention_blocks(T * G, D, q.dtype, _aligned(q, k_cache, v_cache), slopes is not None)
    BLOCK_Q = blocks["BLOCK_Q"]
    row_tiles = B * Hkv * triton.cdiv(T * G, BLOCK_Q)
    min_split = max(BLOCK_Q, 2 * blocks["BLOCK_S"])
    splits = _splits(S, min_split, BLOCK_Q, row_tiles, _programs_at_once(blocks, _multiprocessors(q.device)))
    lengths, ancestors = lengths.contiguous(), ancestors.contiguous()
    slopes = None if slopes is None else slopes.contiguous()
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    partial, lse = out, None  # a single split writes the result itself; 128 rows would spill when rounding it
    if splits > 1 or BLOCK_Q > 64:
        partial = q.new_empty((B, T, Hq, splits, D), dtype=torch.float32)
        lse = q.new_empty((B, T, Hq, splits), dtype=torch.float32)
    scale = math.log2(math.e) * (D ** -0.5 if scale is None else scale)  # the kernel uses base-2 exponentials
    with torch.cuda.device_of(q):
        _tree_attention_kernel[(row_tiles, splits)](
            q, k_cache, v_cache, lengths, ancestors, slopes, partial, lse, *_strides(q), *_strides(k_cache),
            scale, T, G, S, Hkv, splits, min_split, D=D, **blocks)
        if lse is not None:
            _combine_splits_kernel[(B * T * Hq,)](
                partial, lse, lengths, out, T, Hq, S, splits, blocks["BLOCK_S"], min_split,
                D=D, BLOCK_D=blocks["BLOCK_D"], BLOCK_SPLITS=16, num_warps=2)
    return out


# ---------------------------------------------------------------------------------------------------------------------
# project_topk and project_sample: one pass over the LM head
#
#   project_topk     logits = hidden @ weight.T; the k largest of logits - logsumexp(logits), of equals the lowest id
#   project_sample   argmax_t(logits_t / temperature + gumbel(seed, sequence, position, t)), at temperature 0
#                    argmax_t(logits_t): a sample of softmax(logits / temperature) (the Gumbel-max trick)
#
# Bytes: V * C elements of weight, read once: the floor (V = 128256, C = 4096, bf16: 1.05 GB, 0.22 ms at 4.8 TB/s).
# FLOPs: 2 * M * V * C, so M per byte in bf16: memory-bound up to M = 64 and beyond. Storing the M * V logits would
# write them once and read them twice: at M = 64 another 10%, and two launches. Here two programs per multiprocessor
# walk the vocabulary in tiles, each with a running log-sum-exp and a running list of its k best, and a second, small
# kernel merges the lists. The noise is a pure function of its arguments and is computed where it is added: about 15
# integer operations and two logarithms per logit, beside the C elements of weight that each logit reads.
#
# A tile's logits stay in registers. While a row's largest logit beats the worst entry of its list, it replaces that
# entry: k rounds in a program's first tile, and with many rows and few tiles per program not many fewer in the next. So
# the search costs in proportion to k, of which drafting asks for 4 to 8.
#
# The noise: a 64-bit key per row from (seed, sequence, position) by the splitmix64 finalizer, then per token the 32-bit
# finalizer lowbias32, with one half of the key mixed in before its multiplications and the other between them. With one
# half only, two rows could share a shuffled copy of the same noise; with both that takes all 64 bits to match.


@triton.jit
def _mix64_kernel(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _gumbel_kernel(low, high, tokens):
    """Noise [BLOCK_M, BLOCK_V] for row keys (low, high) and tokens, all uint32. The same integers as `gumbel`."""
    x = tokens[None, :] ^ low[:, None]
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = x ^ high[:, None]
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    uniform = ((x >> 8) | 1).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
    return -tl.log(-tl.log(uniform))


@triton.jit
def _take_best(scores, tile_start, values, columns, BLOCK_V: tl.constexpr):
    """Moves the scores of a tile that beat the worst of their row's list (values, columns) into that list.

    A tile's columns are higher than the list's, so an equal score never enters. Of equal worst entries the last leaves.
    """
    tile_offsets = tl.arange(0, BLOCK_V)[None, :]
    best = tl.max(scores, 1)
    worst = tl.min(values, 1)
    while tl.max((best > worst).to(tl.int32), 0) > 0:
        enters = (best > worst)[:, None]
        column = tl.min(tl.where(scores == best[:, None], tile_offsets, BLOCK_V), 1)
        leaver = tl.max(tl.where(values == worst[:, None], columns, -NO_COLUMN), 1)
        slot = (columns == leaver[:, None]) & enters
        values = tl.where(slot, best[:, None], values)
        columns = tl.where(slot, (tile_start + column)[:, None], columns)
        scores = tl.where((tile_offsets == column[:, None]) & enters, float("-inf"), scores)
        best = tl.max(scores, 1)
        worst = tl.min(values, 1)
    return values, columns


@triton.jit(do_not_specialize=["seed_key", "first", "M", "V", "programs", "k"])
def _project_kernel(
    hidden_ptr, weight_ptr, vocab_ids_ptr, sequence_ptr, position_ptr, values_ptr, columns_ptr, lse_ptr,
    stride_hm, stride_hc, stride_wv, stride_wc, temperature, seed_key, first, M, V, programs, k,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """Program (row tile, p): the k best of vocabulary tiles p, p + programs, ... and, if asked for, their log-sum-exp.

    One loop over (tile, channels), so that the next tile's weights are loaded while this tile's best are taken.
    """
    program = tl.program_id(1)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = m < M
    hidden_ptrs = hidden_ptr + tl.minimum(m, M - 1).to(tl.int64)[:, None] * stride_hm
    slots = tl.arange(0, BLOCK_K)[None, :]
    # Slots beyond k hold infinity, so no score enters them. Negative columns mark empty slots.
    values = tl.zeros([BLOCK_M, BLOCK_K], tl.float32) + tl.where(slots < k, float("-inf"), float("inf"))
    columns = tl.zeros([BLOCK_M, BLOCK_K], tl.int32) - 1 - slots
    row_max = tl.full([BLOCK_M], PIVOT, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if sequence_ptr is not None:
        sequence = tl.load(sequence_ptr + m, mask=row_mask, other=0).to(tl.int64)
        position = tl.load(position_ptr + m, mask=row_mask, other=0).to(tl.int64)
        key = _mix64_kernel(_mix64_kernel((sequence + seed_key).to(tl.uint64)) + position.to(tl.uint64))
        low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)

    # Hopper's wide tensor-core instructions need at least 64 rows in the first operand, so few hidden states go second.
    # Tiles of 32 stay first: as second operand the search for a tile's best would spill registers on Blackwell.
    VOCABULARY_FIRST: tl.constexpr = BLOCK_M < 32
    CHUNKS: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    acc = tl.zeros([BLOCK_V, BLOCK_M] if VOCABULARY_FIRST else [BLOCK_M, BLOCK_V], tl.float32)
    tiles = tl.cdiv(tl.cdiv(V, BLOCK_V) - program, programs)
    for step in range(0, tiles * CHUNKS):
        tile_start = (program + step // CHUNKS * programs) * BLOCK_V
        column = tile_start + tl.arange(0, BLOCK_V)
        token = tl.minimum(column, V - 1)
        if vocab_ids_ptr is not None:
            token = tl.load(vocab_ids_ptr + token)
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
            scores = tl.where((column < V)[None, :], tl.trans(acc) if VOCABULARY_FIRST else acc, float("-inf"))
            acc = tl.zeros(acc.shape, tl.float32)
            if sequence_ptr is not None:
                scores = scores / temperature + _gumbel_kernel(low, high, (first + token).to(tl.uint32))
            if lse_ptr is not None:
                new_max = tl.maximum(row_max, tl.max(scores, 1))
                row_sum = row_sum * tl.exp(row_max - new_max) + tl.sum(tl.exp(scores - new_max[:, None]), 1)
                row_max = new_max
            values, columns = _take_best(scores, tile_start, values, columns, BLOCK_V)

    lists = m * programs + program
    entries = lists[:, None] * k + slots
    tl.store(values_ptr + entries, values, mask=row_mask[:, None] & (slots < k))
    tl.store(columns_ptr + entries, columns, mask=row_mask[:, None] & (slots < k))
    if lse_ptr is not None:
        tl.store(lse_ptr + lists, row_max + tl.log(row_sum), mask=row_mask)


@triton.jit(do_not_specialize=["V", "programs", "k"])
def _merge_lists_kernel(
    values_ptr, columns_ptr, lse_ptr, vocab_ids_ptr, logprobs_ptr, tokens_ptr, V, programs, k,
    BLOCK_ENTRIES: tl.constexpr,
):
    """Program m: the k best of all lists of row m, of equals the lowest column."""
    row = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, BLOCK_ENTRIES)
    # [BLOCK_ENTRIES]
    values = tl.load(values_ptr + row * programs * k + entry, mask=entry < programs * k, other=float("-inf"))
    columns = tl.load(columns_ptr + row * programs * k + entry, mask=entry < programs * k, other=NO_COLUMN)
    if lse_ptr is not None:
        # [BLOCK_ENTRIES], one per program
        lse = tl.load(lse_ptr + row * programs + entry, mask=entry < programs, other=float("-inf"))
        max_lse = tl.max(lse, 0)
        lse = max_lse + tl.log(tl.sum(tl.exp(lse - max_lse), 0))
    for slot in range(0, k):
        value = tl.max(values, 0)
        column = tl.min(tl.where(values == value, columns, NO_COLUMN), 0)
        values = tl.where(columns == column, float("-inf"), values)
        token = tl.minimum(tl.maximum(column, 0), V - 1)  # if all are NaN no list has a column: still a valid token
        if vocab_ids_ptr is not None:
            token = tl.load(vocab_ids_ptr + token)
        tl.store(tokens_ptr + row * k + slot, token.to(tl.int64))
        if lse_ptr is not None:
            tl.store(logprobs_ptr + row * k + slot, value - lse)


def _project_blocks(M, dtype, aligned, gathered):
    """Tile sizes and launch options by shape class, checked as those of `_attention_blocks` are.

    A tile of weights is 16 kB, and each program keeps two or three in flight. Loads of gathered rows wait for their
    indices, so they get one stage more. Exact float32 and loads of single elements need smaller tiles.
    """
    BLOCK_M = min(max(16, triton.next_power_of_2(M)), 64)
    num_warps = 8 if BLOCK_M == 64 else 4
    if dtype == torch.float32 or not aligned:
        return dict(BLOCK_M=BLOCK_M, BLOCK_V=64, BLOCK_C=32, num_warps=num_warps,
                    num_stages=3 if dtype == torch.float32 else 2, **_max_registers(168))
    return dict(BLOCK_M=BLOCK_M, BLOCK_V=128, BLOCK_C=64, num_warps=num_warps,
                num_stages=(3 if BLOCK_M == 64 else 4) + gathered, **(_max_registers(255) if BLOCK_M < 64 else {}))


def _project_triton(hidden, weight, vocab_ids, k, noise=None):
    """Launches both kernels. noise: None for log-probabilities, or (temperature, seed_key, sequence, position, first)
    for samples, which need k = 1. Returns (logprobs float32 [M, k] or None, tokens int64 [M, k])."""
    M, C = hidden.shape
    vocab_ids = None if vocab_ids is None else vocab_ids.contiguous()
    V = len(weight if vocab_ids is None else vocab_ids)
    blocks = _project_blocks(M, hidden.dtype, _aligned(hidden, weight), vocab_ids is not None)
    row_tiles = triton.cdiv(M, blocks["BLOCK_M"])
    # two programs per multiprocessor, and no more lists than one program of the merging kernel can hold
    programs = min(triton.cdiv(V, blocks["BLOCK_V"]), max(1, 2 * _multiprocessors(hidden.device) // row_tiles), 512)
    values = hidden.new_empty((M, programs, k), dtype=torch.float32)
    columns = hidden.new_empty((M, programs, k), dtype=torch.int32)
    tokens = hidden.new_empty((M, k), dtype=torch.int64)
    lse = logprobs = sequence = position = None
    temperature, seed_key, first = 0.0, 0, 0
    if noise is None:
        lse = hidden.new_empty((M, programs), dtype=torch.float32)
        logprobs = hidden.new_empty((M, k), dtype=torch.float32)
    elif noise[0] > 0:
        temperature, seed_key, sequence, position, first = noise
        sequence, position = sequence.contiguous(), position.contiguous()
    BLOCK_K = 1 if k == 1 else 8 if k <= 8 else 32
    BLOCK_ENTRIES = triton.next_power_of_2(programs * k)
    with torch.cuda.device_of(hidden):
        _project_kernel[(row_tiles, programs)](
            hidden, weight, vocab_ids, sequence, position, values, columns, lse, *_strides(hidden), *_strides(weight),
            float(temperature), seed_key, first, M, V, programs, k, C=C, BLOCK_K=BLOCK_K, **blocks)
        _merge_lists_kernel[(M,)](
            values, columns, lse, vocab_ids, logprobs, tokens, V, programs, k,
            BLOCK_ENTRIES=BLOCK_ENTRIES, num_warps=min(max(BLOCK_ENTRIES // 512, 1), 16))
    return logprobs, tokens


@_skippable
def _check_project(hidden, weight, vocab_ids):
    _check(hidden.dim() == 2 and len(hidden) > 0, "hidden of shape [M >= 1, C]", hidden)
    _check(hidden.dtype in FLOATS, "hidden of float32, float16 or bfloat16", hidden)
    _check(weight.dim() == 2 and weight.numel() > 0, lambda: f"weight of shape [V >= 1, {hidden.shape[1]}]", weight)
    _check_tensors(hidden.device, weight=(weight, (len(weight), hidden.shape[1]), hidden.dtype))
    if vocab_ids is not None:
        _check(vocab_ids.numel() > 0, "vocab_ids of shape [n >= 1]", vocab_ids)
        _check_tensors(hidden.device, vocab_ids=(vocab_ids, (vocab_ids.numel(),), torch.int32))
        if vocab_ids.device.type == "cpu":  # reading values back would stall a GPU
            low, high = vocab_ids.aminmax()
            _check(0 <= low and high < len(weight), lambda: f"vocab_ids of 0 to {len(weight) - 1}", int(low), int(high))


@_skippable
def _check_topk(hidden, weight, k, vocab_ids):
    _check_project(hidden, weight, vocab_ids)
    max_k = min(32, len(weight if vocab_ids is None else vocab_ids))
    _check(isinstance(k, int) and 1 <= k <= max_k, lambda: f"k of 1 to {max_k}", k)


def float_logits(hidden, weight, vocab_ids=None):
    """Logits of hidden [M, C] and weight [V, C], or its rows vocab_ids: float32 [M, V]. Rounding would make ties."""
    weight = weight if vocab_ids is None else weight[vocab_ids]
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return (weight.float() @ hidden.float().T).T.contiguous()  # on a CPU twice as fast for small M as hidden first


def topk_logits(logits, k):
    """`project_topk` of given logits [M, V]: (logprobs float32 [M, k], columns int64 [M, k]). In half precision, where
    equals are many, they come in any order."""
    values, columns = logits.topk(min(k + 1, logits.shape[1]))
    # topk promises no order among equals; the (k + 1)st value shows whether one equal to the k-th was left out
    if logits.dtype == torch.float32 and (values[:, 1:] == values[:, :-1]).any():
        columns = logits.sort(dim=-1, descending=True, stable=True).indices
    columns = columns[:, :k]
    return logits.float().log_softmax(-1).gather(1, columns), columns  # takes a quarter of the time of logsumexp


def project_topk_reference(hidden, weight, k, vocab_ids=None):
    """`project_topk` by torch, through the [M, V] logits."""
    _check_topk(hidden, weight, k, vocab_ids)
    logprobs, tokens = topk_logits(float_logits(hidden, weight, vocab_ids), k)
    return logprobs, tokens if vocab_ids is None else vocab_ids[tokens].long()


def project_topk(hidden, weight, k, vocab_ids=None):
    """The k most likely tokens of each row and their log-probabilities, best first, of equals the lowest id first.

    hidden [M, C] and weight [V, C] in one dtype (float32, float16, bfloat16), any strides; k 1..min(32, V). The weight
    is read once per 64 hidden states. vocab_ids int32 [n]: only these rows of the weight take part, in the
    normalisation too; k is at most n, and of equals the one listed first wins (FR-Spec, arXiv 2502.14856).
    Returns (logprobs float32 [M, k], tokens int64 [M, k]). ValueError for shapes, dtypes, devices, k and, on a CPU,
    vocab_ids outside the weight.
    """
    if not runs_triton(hidden):
        return project_topk_reference(hidden, weight, k, vocab_ids)
    _check_topk(hidden, weight, k, vocab_ids)
    return _project_triton(hidden, weight, vocab_ids, k)


@_skippable
def _check_noise(M, temperature, seed, sequence, position, device):
    _check(0 <= temperature < math.inf, "a finite temperature of at least 0", temperature)
    _seed_key(seed)  # checks it
    _check_tensors(device, sequence=(sequence, (M,), *INTEGERS), position=(position, (M,), *INTEGERS))


def _mix64(x):
    """The splitmix64 finalizer on an int64 tensor. torch's >> copies the sign bit, so the copies are masked off."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@lru_cache
def _seed_key(seed):
    """The seed as a mixed, signed 64-bit int, so that seed 1 with sequence 0 differs from seed 0 with sequence 1."""
    _check(isinstance(seed, int) and -2**63 <= seed < 2**64, "a seed of at most 64 bits", seed)
    seed = (seed + 0x9E3779B97F4A7C15 + 2**63) % 2**64 - 2**63
    return int(_mix64(torch.tensor(seed, device="cpu")))


def gumbel(seed, sequence, position, tokens):
    """Gumbel noise float32 [M, n]: a pure function of its arguments, the same on every machine up to the logarithm.

    seed int of at most 64 bits; sequence and position int tensors [M]; tokens int [n] or [M, n].
    """
    key = _mix64(_mix64(sequence.long() + _seed_key(seed)) + position.long())[:, None]  # (M, 1)
    x = tokens.int() ^ key.int()  # (M, n) int32: twice as fast as int64, and its products wrap the same way
    x = _xor_shift(x, 16).mul_(0x7FEB352D).bitwise_xor_((key >> 32).int())
    x = _xor_shift(x, 15).mul_(-0x7B935975)
    x = _xor_shift(x, 16).bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).bitwise_or_(1)
    return x.float().mul_(2.0 ** -24).log_().neg_().log_().neg_()  # odd / 2^24: never 0 and never 1


def _xor_shift(x, bits):
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << 32 - bits) - 1))


def gumbel_argmax(logits, temperature, seed, sequence, position, tokens=None, first=0):
    """Samples softmax(logits / temperature) of each row: columns int64 [M]. Temperature 0: argmax, the first of equals.

    logits [M, V], -inf for excluded tokens; sequence and position int [M]; tokens int [V]: the token ids of the
    columns, default first..first + V - 1. ValueError for shapes, temperature and seed.
    """
    M, V = logits.shape
    _check_noise(M, temperature, seed, sequence, position, logits.device)
    if temperature == 0:
        return logits.argmax(-1)
    tokens = torch.arange(first, first + V, device=logits.device) if tokens is None else tokens
    return gumbel(seed, sequence, position, tokens).add_(logits.float() / temperature).argmax(-1)


def rescored_argmax(logits, hidden, weight, temperature, seed, sequence, position, first=0):
    """`gumbel_argmax` for hidden [M, C] and weight [V, C] in bfloat16 whose product was rounded to bfloat16 on the way:
    logits float32 [M, V]. Each token that may be the best but for the rounding is scored again, in float64, so that a
    row's result neither ties nor depends on the other rows. Other arguments, results and errors as there."""
    M, V = logits.shape
    _check_noise(M, temperature, seed, sequence, position, logits.device)
    largest = torch.maximum(logits.amax(1), -logits.amin(1))
    plain = (largest == 0) | ~largest.isfinite()  # rows where there is nothing to score again, or no way to
    if plain.any():
        tokens, rest = gumbel_argmax(logits, temperature, seed, sequence, position, first=first), ~plain
        if rest.any():
            tokens[rest] = rescored_argmax(logits[rest], hidden[rest], weight, temperature, seed, sequence[rest],
                                           position[rest], first)
        return tokens
    scores, scale = logits, temperature or 1.0
    if temperature:
        noise = gumbel(seed, sequence, position, torch.arange(first, first + V, device=logits.device))
        scores = logits / temperature + noise
    error = 1.1 / 2**8 * largest / scale  # rounding moves a logit by 2^-8 of itself at most, a float32 sum by far less
    near = (scores >= (scores.amax(1) - 2 * error)[:, None]).nonzero()
    rows, tokens = near.unbind(1)
    if len(near) == M:
        return tokens
    exact = torch.cat([(hidden[r].double() * weight[t].double()).sum(1)
                       for r, t in zip(rows.split(4096), tokens.split(4096))])  # a few at a time: all may be near
    exact = exact / scale + noise[rows, tokens] if temperature else exact
    best = exact.new_full((M,), -math.inf).scatter_reduce_(0, rows, exact, "amax")
    rows, tokens = near[exact == best[rows]].unbind(1)
    return tokens.new_full((M,), V).scatter_reduce_(0, rows, tokens, "amin")  # of equals the lowest id


def project_sample_reference(hidden, weight, temperature, seed, sequence, position, vocab_ids=None, first=0):
    """`project_sample` by torch, through the [M, V] logits."""
    _check_project(hidden, weight, vocab_ids)
    ids = None if vocab_ids is None else first + vocab_ids
    tokens = gumbel_argmax(float_logits(hidden, weight, vocab_ids), temperature, seed, sequence, position, ids, first)
    return tokens if vocab_ids is None else vocab_ids[tokens].long()


def project_sample(hidden, weight, temperature, seed, sequence, position, vocab_ids=None, first=0):
    """The model's own next token of each row: argmax at temperature 0, else a sample that depends on nothing drafted.

    hidden [M, C] and weight [V, C] in one dtype (float32, float16, bfloat16), any strides; temperature float;
    seed int of at most 64 bits; sequence and position int tensors [M]: the token's sequence and its position there.
    first: the token id of the weight's first row, where it is a part of a larger one; the noise depends on it.
    vocab_ids int32 [n]: only these rows of the weight take part; a token's noise is the same with and without.
    Returns int64 [M]. Of equal logits the lowest token id wins, or the first in vocab_ids. ValueError for shapes,
    dtypes, devices, temperature, seed and, on a CPU, vocab_ids outside the weight.
    """
    if not runs_triton(hidden):
        return project_sample_reference(hidden, weight, temperature, seed, sequence, position, vocab_ids, first)
    _check_project(hidden, weight, vocab_ids)
    _check_noise(len(hidden), temperature, seed, sequence, position, hidden.device)
    noise = temperature, _seed_key(seed), sequence, position, first
    return _project_triton(hidden, weight, vocab_ids, 1, noise)[1][:, 0]


# ---------------------------------------------------------------------------------------------------------------------
# commit_path
#
#   kv[:, :, b, :, lengths[b] + j] = old kv[:, :, b, :, lengths[b] + path[b, j]]  for j < count[b]
#
# Bytes: 2 * L * Hkv * D elements read and written per moved row: 131 kB each way for 32 layers, 8 heads of 128, bf16.
# With few sequences the launch dominates, so one launch serves all layers. Rows with path[j] == j are not touched.


@triton.jit(do_not_specialize=["P", "S", "Hkv"])
def _commit_path_kernel(
    kv_ptr, lengths_ptr, path_ptr, count_ptr,
    stride_kvl, stride_kvside, stride_kvb, stride_kvh, stride_kvs, stride_kvd, P, S, Hkv,
    D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Program (sequence and kv head; layer, keys or values): moves the path's rows of one [S, D] slice."""
    b = (tl.program_id(0) // Hkv).to(tl.int64)
    head = (tl.program_id(0) % Hkv).to(tl.int64)
    layer = (tl.program_id(1) // 2).to(tl.int64)
    side = (tl.program_id(1) % 2).to(tl.int64)
    index = tl.arange(0, BLOCK_P)
    dims = tl.arange(0, BLOCK_D).to(tl.int64)
    valid = (index < P) & (index < tl.load(count_ptr + b))
    # [BLOCK_P]
    nodes = tl.load(path_ptr + b * P + index, mask=valid, other=0).to(tl.int64)
    target = tl.load(lengths_ptr + b).to(tl.int64) + index
    source = target - index + nodes
    moved = valid & (nodes != index) & (target >= 0) & (target < S) & (source >= 0) & (source < S)
    moved = moved[:, None] & (dims < D)[None, :]
    slice_ptr = kv_ptr + layer * stride_kvl + side * stride_kvside + b * stride_kvb + head * stride_kvh
    slice_ptrs = slice_ptr + dims[None, :] * stride_kvd
    # [BLOCK_P, BLOCK_D]
    tile = tl.load(slice_ptrs + source[:, None] * stride_kvs, mask=moved)
    tl.debug_barrier()  # a target row may be another's source: all warps must have read before any writes
    tl.store(slice_ptrs + target[:, None] * stride_kvs, tile, mask=moved)


@_skippable
def _check_commit(kv, lengths, path, count):
    _check(kv.dim() == 6 and kv.shape[1] == 2, "kv of shape [L, 2, B, Hkv, S, D]", kv)
    _check(kv.dtype in (*FLOATS, torch.float64), "kv of float32, float16, bfloat16 or float64", kv)
    B = kv.shape[2]
    _check(path.dim() == 2 and 1 <= path.shape[1] <= 64, lambda: f"path of shape [{B}, 1 to 64]", path)
    _check_tensors(kv.device, lengths=(lengths, (B,), torch.int32), path=(path, (B, path.shape[1]), *INTEGERS),
                   count=(count, (B,), *INTEGERS))


def commit_path_reference(kv, lengths, path, count):
    """`commit_path` by torch: one gather of the moved rows, then one scatter."""
    _check_commit(kv, lengths, path, count)
    S, P = kv.shape[4], path.shape[1]
    index = torch.arange(P, device=kv.device)
    moved = (path != index) & (index < count[:, None])  # (B, P)
    b, index = moved.nonzero(as_tuple=True)
    if len(b) == 0:
        return
    target = lengths[b] + index
    source = lengths[b] + path[b, index]
    _check(int(target.min()) >= 0 and int(source.max()) < S and bool((source > target).all()),
           lambda: f"paths of rising node ids within the {S} rows of the cache", path.tolist(), lengths.tolist())
    kv[:, :, b, :, target] = kv[:, :, b, :, source]  # (moved rows, L, 2, Hkv, D)


def commit_path(kv, lengths, path, count):
    """Moves the accepted nodes' keys and values to the front of their tree, in place, for all layers at once.

    kv [L, 2, B, Hkv, S, D] (float32, float16, bfloat16, float64), any strides; lengths int32 [B]; path [B, P] node ids
    in rising order, the root (0) first, entries from count on ignored; count [B]; both int32 or int64. For j <
    count[b], cache row lengths[b] + j becomes what row lengths[b] + path[b, j] was; other rows and the lengths do not
    change.
    ValueError for shapes and dtypes and, in the reference, for paths that leave the cache.
    """
    if not runs_triton(kv):
        return commit_path_reference(kv, lengths, path, count)
    _check_commit(kv, lengths, path, count)
    L, _, B, Hkv, S, D = kv.shape
    P = path.shape[1]
    BLOCK_P, BLOCK_D = triton.next_power_of_2(P), triton.next_power_of_2(D)
    with torch.cuda.device_of(kv):
        _commit_path_kernel[(B * Hkv, L * 2)](
            kv, lengths.contiguous(), path.contiguous(), count.contiguous(), *kv.stride(), P, S, Hkv,
            D=D, BLOCK_P=BLOCK_P, BLOCK_D=BLOCK_D, num_warps=min(max(BLOCK_P * BLOCK_D // 1024, 1), 16))


# ---------------------------------------------------------------------------------------------------------------------
# add_norm
#
#   sum = x + delta
#   RMSNorm (arXiv 1910.07467)    normed = sum * rsqrt(mean(sum^2) + eps) * weight
#   LayerNorm (arXiv 1607.06450)  normed = (sum - mean(sum)) * rsqrt(variance(sum) + eps) * weight + bias
#
# Bytes: 4 * M * C elements: x and delta read, sum and normed written. Here and in all operations below it is the launch
# that costs: 16 rows of C = 4096 in bf16 are 0.5 MB, 0.1 us.


@triton.jit
def _add_norm_kernel(
    x_ptr, delta_ptr, weight_ptr, bias_ptr, sum_ptr, normed_ptr, eps, C: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """Program m: row m."""
    columns = tl.arange(0, BLOCK_C)
    mask = columns < C
    offsets = tl.program_id(0).to(tl.int64) * C + columns
    # [BLOCK_C]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if delta_ptr is not None:
        x += tl.load(delta_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + offsets, rounded, mask=mask)
        x = rounded.to(tl.float32)
    if bias_ptr is not None:
        x = tl.where(mask, x - tl.sum(x, 0) / C, 0.0)
    x *= tl.rsqrt(tl.sum(x * x, 0) / C + eps)
    if weight_ptr is not None:
        x *= tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed_ptr + offsets, x.to(normed_ptr.dtype.element_ty), mask=mask)


@_skippable
def _check_add_norm(x, delta, weight, bias):
    _check_float(x, 16384)
    parameter = x.shape[-1:], x.dtype, torch.float32
    _check_tensors(x.device, delta=(delta, x.shape, x.dtype), weight=(weight, *parameter), bias=(bias, *parameter))


def add_norm_reference(x, delta, weight, bias=None, eps=1e-5):
    """`add_norm` by torch; it has gradients."""
    _check_add_norm(x, delta, weight, bias)
    x = x if delta is None else x + delta
    if bias is not None:
        return x, F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    if x.dtype.itemsize <= 4 and not torch.is_grad_enabled():  # rms_norm is twice as many operations
        exact = x.float()
        length = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
        normed = exact * torch.addcmul(_constant(eps, x.device), length, length, value=1 / x.shape[-1]).rsqrt_()
        return x, (normed if weight is None else normed.mul_(weight)).to(x.dtype)
    return x, F.rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps)


def add_norm(x, delta, weight, bias=None, eps=1e-5):
    """A residual connection and the norm behind it: (x + delta, its norm), each [..., C].

    x [..., C], C up to 16384; delta like x, or None for x alone; weight [C], or None for ones; bias [C] for LayerNorm,
    None for RMSNorm. One float dtype (weight and bias may be float32), any strides. ValueError for shapes, dtypes and
    devices.
    """
    if not runs_triton(x, delta, weight, bias):
        return add_norm_reference(x, delta, weight, bias, eps)
    _check_add_norm(x, delta, weight, bias)
    x, delta, weight, bias = (y if y is None else y.contiguous() for y in (x, delta, weight, bias))
    total, normed = x if delta is None else torch.empty_like(x), torch.empty_like(x)
    C, BLOCK_C = x.shape[-1], triton.next_power_of_2(x.shape[-1])
    with torch.cuda.device_of(x):
        _add_norm_kernel[(x.numel() // C,)](x, delta, weight, bias, total, normed, eps, C=C, BLOCK_C=BLOCK_C,
                                            num_warps=min(max(BLOCK_C // 512, 1), 16))
    return total, normed


# ---------------------------------------------------------------------------------------------------------------------
# rope_cache
#
#   RMSNorm of each query and key head, times q_weight and k_weight, where the model has it
#   (x, y) -> (x cos - y sin, y cos + x sin) for the halves x and y of each query and key head (RoPE, arXiv 2104.09864)
#   keys and values of token t of sequence b -> cache row rows[b, t]
#
# Bytes: B * T * (Hq + 2 * Hkv) * D elements, read and written. Queries stay where they are.


def rotate(x, rope):
    """Rotates each head of x [B, T, H, D] by its token's angles (RoPE, arXiv 2104.09864), with a gradient.
    rope: (cos, sin), each [B, T, 1, D] of x's dtype, sin with a minus in the first half."""
    cos, sin = rope
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


@triton.jit(do_not_specialize=["T", "S", "Hq", "Hkv"])
def _rope_cache_kernel(
    qkv_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, kv_ptr, rows_ptr,
    stride_qb, stride_qt, stride_qh, stride_qd, stride_kvside, stride_kvb, stride_kvh, stride_kvs, stride_kvd,
    eps, T, S, Hq, Hkv, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Program (token, block of heads), as two tiles: the heads' first and second halves."""
    HALF: tl.constexpr = (D + 1) // 2  # without a rotation D may be odd
    token = tl.program_id(0).to(tl.int64)
    b, t = token // T, token % T
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
    is_query, is_value = head < Hq, head >= Hq + Hkv
    dims = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    low_mask = (head < Hq + 2 * Hkv) & (dims < HALF)
    high_mask = low_mask & (dims + HALF < D)
    # [BLOCK_H, BLOCK_D]
    head_ptrs = qkv_ptr + b * stride_qb + t * stride_qt + head * stride_qh
    low = tl.load(head_ptrs + dims * stride_qd, mask=low_mask, other=0.0)
    high = tl.load(head_ptrs + (dims + HALF) * stride_qd, mask=high_mask, other=0.0)
    x, y = low.to(tl.float32), high.to(tl.float32)
    if q_weight_ptr is not None:
        scale = tl.rsqrt(tl.sum(x * x + y * y, 1) / D + eps)[:, None]
        weight_ptrs = tl.where(is_query, q_weight_ptr + dims, k_weight_ptr + dims)
        x *= scale * tl.load(weight_ptrs, mask=low_mask, other=0.0).to(tl.float32)
        y *= scale * tl.load(weight_ptrs + HALF, mask=high_mask, other=0.0).to(tl.float32)
    if cos_ptr is not None:
        cos = tl.load(cos_ptr + token * D + dims, mask=dims < HALF, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + token * D + HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)
        x, y = x * cos - y * sin, y * cos + x * sin
    low = tl.where(is_value, low, x.to(low.dtype))
    high = tl.where(is_value, high, y.to(low.dtype))

    tl.store(head_ptrs + dims * stride_qd, low, mask=low_mask & is_query)
    tl.store(head_ptrs + (dims + HALF) * stride_qd, high, mask=high_mask & is_query)
    row = tl.load(rows_ptr + token)
    cached = (head >= Hq) & (row >= 0) & (row < S)
    kv_head = tl.where(is_value, head - Hkv, head) - Hq
    row_ptrs = kv_ptr + is_value.to(tl.int64) * stride_kvside + b * stride_kvb + kv_head * stride_kvh + row * stride_kvs
    tl.store(row_ptrs + dims * stride_kvd, low, mask=low_mask & cached)
    tl.store(row_ptrs + (dims + HALF) * stride_kvd, high, mask=high_mask & cached)


@_skippable
def _check_rope_cache(qkv, rope, kv, rows, q_weight, k_weight):
    _check(kv.dim() == 5 and len(kv) == 2 and kv.is_floating_point(), "kv [2, B, Hkv, S, D] of a float dtype", kv)
    (_, B, Hkv, _, D), (cos, sin) = kv.shape, rope or (None, None)
    _check(qkv.dim() == 4 and qkv.shape[1] > 0 and qkv.shape[2] > 2 * Hkv,
           lambda: f"qkv of shape [{B}, T >= 1, Hq + {2 * Hkv}, {D}]", qkv)
    _check(rope is None or D % 2 == 0, "an even head size, to rotate it", D)
    _check((q_weight is None) == (k_weight is None), "both of q_weight and k_weight, or none", q_weight, k_weight)
    if rows.is_cpu:  # reading values back would stall a GPU
        _check(rows.dim() == 2 and bool((rows == rows[:, :1] + torch.arange(rows.shape[1])).all()),
               "rows of consecutive numbers, [B, T]", rows)
    table, weight = ((B, qkv.shape[1], 1, D), qkv.dtype), ((D,), qkv.dtype)
    kinds = (*FLOATS, torch.float64) if kv.dtype == torch.float64 else (kv.dtype,)
    _check_tensors(kv.device, qkv=(qkv, (B, *qkv.shape[1:3], D), *kinds), rows=(rows, qkv.shape[:2], torch.int64),
                   cos=(cos, *table), sin=(sin, *table), q_weight=(q_weight, *weight), k_weight=(k_weight, *weight))


def rope_cache_reference(qkv, rope, kv, rows, q_weight=None, k_weight=None, eps=1e-5):
    """`rope_cache` by torch."""
    _check_rope_cache(qkv, rope, kv, rows, q_weight, k_weight)
    (B, T, H, D), Hkv = qkv.shape, kv.shape[2]
    q, qk, new = qkv[:, :, :H - 2 * Hkv], qkv[:, :, :H - Hkv], qkv[:, :, H - 2 * Hkv:].view(B, T, 2, Hkv, D)
    if q_weight is not None:
        q.copy_(F.rms_norm(q, (D,), q_weight, eps))
        new[:, :, 0] = F.rms_norm(new[:, :, 0], (D,), k_weight, eps)
    if rope is not None:
        cos, sin = rope
        swapped = qk.roll(D // 2, -1)
        qk.mul_(cos).addcmul_(swapped, sin)
    if B == 1 and kv.is_cpu:  # a copy of a block takes half the time of index_put, and casts
        kv[:, 0].narrow(2, int(rows[0, 0]), T).copy_(new[0].permute(1, 2, 0, 3))
    else:
        kv.permute(1, 3, 0, 2, 4)[_column(B, kv.device), rows] = new.to(kv.dtype)
    return q


def rope_cache(qkv, rope, kv, rows, q_weight=None, k_weight=None, eps=1e-5):
    """Rotates queries and keys by position, writes keys and values to the cache, and returns the queries.

    qkv [B, T, Hq + 2 Hkv, D]: query, key and value heads in this order; its queries are overwritten. kv [2, B, Hkv, S,
    D]: one layer of a cache; rows int64 [B, T], 0..S - 1: the tokens' rows in it, one after the other. One float dtype,
    any strides; the reference takes a cache of float64 too. rope: (cos, sin) as `rotate` takes them, None for no
    rotation. q_weight, k_weight [D]: RMSNorm of each query and key head before that, with `eps`. Returns q [B, T, Hq,
    D], a view of qkv. ValueError for shapes, dtypes and devices.
    """
    if not runs_triton(kv, qkv):
        return rope_cache_reference(qkv, rope, kv, rows, q_weight, k_weight, eps)
    _check_rope_cache(qkv, rope, kv, rows, q_weight, k_weight)
    (B, T, H, D), (Hkv, S) = qkv.shape, kv.shape[2:4]
    tables = (x if x is None else x.contiguous() for x in (*(rope or (None, None)), q_weight, k_weight))
    BLOCK_D = triton.next_power_of_2((D + 1) // 2)
    BLOCK_H = min(triton.next_power_of_2(H), 16, 1024 // BLOCK_D)
    with torch.cuda.device_of(qkv):
        _rope_cache_kernel[(B * T, triton.cdiv(H, BLOCK_H))](
            qkv, *tables, kv, rows.contiguous(), *_strides(qkv), *_strides(kv),
            eps, T, S, H - 2 * Hkv, Hkv, D=D, BLOCK_H=BLOCK_H, BLOCK_D=BLOCK_D, num_warps=4)
    return qkv[:, :, :H - 2 * Hkv]


# ---------------------------------------------------------------------------------------------------------------------
# glu
#
#   out = act(gate) * up for x = [gate, up]  (GLU variants, arXiv 2002.05202)
#   act(z) = z * sigmoid(z) (SiLU), or z * sigmoid(2 sqrt(2 / pi) (z + 0.044715 z^3)): GELU's tanh approximation
#
# Bytes: 3 * M * N elements.


@triton.jit(do_not_specialize=["N"])
def _glu_kernel(x_ptr, out_ptr, N, GELU: tl.constexpr, BLOCK_N: tl.constexpr):
    """Program (block of columns, row m)."""
    m = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # [BLOCK_N]
    gate = tl.load(x_ptr + m * 2 * N + columns, mask=columns < N, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + m * 2 * N + N + columns, mask=columns < N, other=0.0).to(tl.float32)
    z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    tl.store(out_ptr + m * N + columns, (gate * tl.sigmoid(z) * up).to(out_ptr.dtype.element_ty), mask=columns < N)


@_skippable
def _check_glu(x, activation):
    _check_float(x)
    _check(x.shape[-1] % 2 == 0, "x of shape [..., 2 N]", x)
    _check(activation in ("silu", "gelu"), "silu or gelu", activation)


def glu_reference(x, activation="silu"):
    """`glu` by torch; it has a gradient."""
    _check_glu(x, activation)
    gate, up = x.chunk(2, dim=-1)
    gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return gate * up if gate.requires_grad else gate.mul_(up)  # a gradient needs both factors


def glu(x, activation="silu"):
    """act(gate) * up of x [..., 2 N] = [gate, up], of a float dtype and any strides -> [..., N].

    activation: "silu" or "gelu", in its tanh approximation. ValueError for shapes, dtypes and other activations.
    """
    if not runs_triton(x):
        return glu_reference(x, activation)
    _check_glu(x, activation)
    x, N = x.contiguous(), x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], N)
    with torch.cuda.device_of(x):
        _glu_kernel[(out.numel() // N, triton.cdiv(N, 1024))](
            x, out, N, GELU=activation == "gelu", BLOCK_N=1024, num_warps=4)
    return out


# ---------------------------------------------------------------------------------------------------------------------
# cosine_mix: the Attention Decoder of Clover (arXiv 2405.00263)
#
#   out = z + cos(q, k) * v in each attention head, cos(q, k) = q . k / (|q| |k|)
#
# Bytes: 5 * M * C elements.


@triton.jit(do_not_specialize=["C"])
def _cosine_mix_kernel(z_ptr, q_ptr, kv_ptr, out_ptr, C, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Program (row m, head)."""
    m = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * D + tl.arange(0, BLOCK_D)
    mask = tl.arange(0, BLOCK_D) < D
    # [BLOCK_D]
    z = tl.load(z_ptr + m * C + columns, mask=mask, other=0.0).to(tl.float32)
    q = tl.load(q_ptr + m * C + columns, mask=mask, other=0.0).to(tl.float32)
    k = tl.load(kv_ptr + m * 2 * C + columns, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(kv_ptr + m * 2 * C + C + columns, mask=mask, other=0.0).to(tl.float32)
    norms = tl.maximum(tl.sqrt(tl.sum(q * q, 0)), 1e-8) * tl.maximum(tl.sqrt(tl.sum(k * k, 0)), 1e-8)
    tl.store(out_ptr + m * C + columns, (z + tl.sum(q * k, 0) / norms * v).to(out_ptr.dtype.element_ty), mask=mask)


@_skippable
def _check_cosine_mix(z, q, kv, n_head):
    _check_float(z)
    C = z.shape[-1]
    _check(isinstance(n_head, int) and n_head > 0 and C % n_head == 0 and C // n_head <= 16384,
           lambda: f"a number of heads that divides {C}, each of at most 16384", n_head)
    _check_tensors(z.device, q=(q, z.shape, z.dtype), kv=(kv, (*z.shape[:-1], 2 * C), z.dtype))


def cosine_mix_reference(z, q, kv, n_head):
    """`cosine_mix` by torch; it has gradients."""
    _check_cosine_mix(z, q, kv, n_head)
    q = q.unflatten(-1, (n_head, -1))                       # (..., n_head, C / n_head)
    k, v = kv.unflatten(-1, (2, n_head, -1)).unbind(-3)     # likewise
    return z + (F.cosine_similarity(q, k, dim=-1).unsqueeze(-1) * v).flatten(-2)


def cosine_mix(z, q, kv, n_head):
    """Mixes a token into a state: z + cos(q, k) * v, in each of n_head parts of the C channels.

    z and q [..., C], kv [..., 2 C] = [k, v], of one float dtype and any strides; n_head divides C.
    Returns [..., C]. ValueError for shapes, dtypes, devices and n_head.
    """
    if not runs_triton(z, q, kv):
        return cosine_mix_reference(z, q, kv, n_head)
    _check_cosine_mix(z, q, kv, n_head)
    z, C, D = z.contiguous(), z.shape[-1], z.shape[-1] // n_head
    out, BLOCK_D = torch.empty_like(z), triton.next_power_of_2(D)
    with torch.cuda.device_of(z):
        _cosine_mix_kernel[(z.numel() // C, n_head)](
            z, q.contiguous(), kv.contiguous(), out, C, D=D, BLOCK_D=BLOCK_D, num_warps=min(max(BLOCK_D // 256, 1), 16))
    return out


# ---------------------------------------------------------------------------------------------------------------------
# best_guesses and best_tree: drafting a tree (after EAGLE-2, arXiv 2406.16858, section 4)
#
#   best_guesses   of the proposals of a depth, the n of highest joint log-probability, best first
#   best_tree      of the proposals of all K depths, the T - 1 of highest joint log-probability, as a tree
#
# Of equals comes first the shallower, then the lower token, then the child of the better beam. A child's joint
# log-probability is never above its parent's, so what is kept is closed under ancestors, and parents stand first. A
# proposal that is not among the best T - 1 of its depth is in no tree, nor are its children: lists of n <= T - 1 do.
#
# An entry's place is the number of entries before it. All pairs are compared at once, N^2 of them (4,096 at T = 16 and
# K = 4); a search for one after the other would wait n times.


@triton.jit
def _comes_before(score, key, other_score, other_key):
    """int32 [BLOCK_N, BLOCK_J]: whether others [BLOCK_J] come before entries [BLOCK_N]."""
    ahead = (other_score[None, :] == score[:, None]) & (other_key[None, :] < key[:, None])
    return (ahead | (other_score[None, :] > score[:, None])).to(tl.int32)


@triton.jit
def _guess(beams_ptr, logprobs_ptr, guesses_ptr, stride_w, column, count, W, depth):
    """(joint log-probabilities, tokens) of proposals; behind the last come entries that stand for none."""
    offsets, mask = (column // W).to(tl.int64) * stride_w + column % W, column < count
    logprob = tl.load(logprobs_ptr + offsets, mask=mask, other=float("-inf"))
    joint = tl.where(logprob > 0, 0.0, tl.where(logprob <= 0, logprob, float("-inf")))  # NaN, of broken heads: -inf
    joint += tl.load(beams_ptr + column // W, mask=mask & (depth > 0), other=0.0)  # the root has 0
    return joint, tl.load(guesses_ptr + offsets, mask=mask, other=NO_TOKEN)


@triton.jit(do_not_specialize=["stride_b", "stride_w", "count", "n", "W", "K", "depth"])
def _best_guesses_kernel(
    logprobs_ptr, guesses_ptr, joint_ptr, tokens_ptr, parents_ptr, stride_b, stride_w, count, n, W, K, depth,
    BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr,
):
    """Program b: the proposals of one sequence."""
    b = tl.program_id(0).to(tl.int64)
    logprobs_ptr += b * stride_b
    guesses_ptr += b * stride_b
    out = (b * K + depth) * n
    beams_ptr = joint_ptr + out - n
    column, place = tl.arange(0, BLOCK_N), tl.zeros([BLOCK_N], tl.int32)
    joint, token = _guess(beams_ptr, logprobs_ptr, guesses_ptr, stride_w, column, count, W, depth)
    for start in range(0, BLOCK_N, BLOCK_J):
        other = start + tl.arange(0, BLOCK_J)
        joints, tokens = _guess(beams_ptr, logprobs_ptr, guesses_ptr, stride_w, other, count, W, depth)
        place += tl.sum(_comes_before(joint, token * BLOCK_N + column, joints, tokens * BLOCK_N + other), 1)
    tl.store(joint_ptr + out + place, joint, mask=place < n)
    tl.store(tokens_ptr + out + place, tl.where(column < count, token, 0), mask=place < n)
    tl.store(parents_ptr + out + place, tl.where(column < count, column // W, -1).to(tl.int64), mask=place < n)


@triton.jit
def _listed(joint_ptr, parents_ptr, column, count):
    """(joint log-probabilities, parents) of the lists' entries; -inf and -1 for those that stand for none."""
    parent = tl.load(parents_ptr + column, mask=column < count, other=-1)
    joint = tl.load(joint_ptr + column, mask=parent >= 0, other=float("-inf"))
    return tl.where(parent >= 0, tl.maximum(joint, PIVOT), joint), parent


@triton.jit(do_not_specialize=["B", "K", "n", "T"])
def _best_tree_kernel(
    root_ptr, joint_ptr, tokens_ptr, parents_ptr, node_ptr, tree_ptr, B, K, n, T,
    BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr,
):
    """Program b: the tree of one sequence. The lists are in order, so of equals the lower column comes first."""
    b = tl.program_id(0).to(tl.int64)
    joint_ptr += b * K * n
    parents_ptr += b * K * n
    node_ptr += b * BLOCK_N
    column, node = tl.arange(0, BLOCK_N), tl.full([BLOCK_N], 1, tl.int32)
    joint, parent = _listed(joint_ptr, parents_ptr, column, K * n)
    for start in range(0, BLOCK_N, BLOCK_J):
        other = start + tl.arange(0, BLOCK_J)
        joints, _ = _listed(joint_ptr, parents_ptr, other, K * n)
        node += tl.sum(_comes_before(joint, column, joints, other), 1)
    kept = (parent >= 0) & (node < T)
    tl.store(node_ptr + column, tl.where(kept, node, 0))
    tl.debug_barrier()  # an entry's parent may be another thread's

    bit = tl.full([BLOCK_N], 1, tl.int64)
    ancestors = bit << tl.where(kept, node, 0).to(tl.int64)
    above, parent_node = column, tl.zeros([BLOCK_N], tl.int32)
    for level in range(0, K):  # up to the root, where those of less depth wait
        deep = kept & (above >= n)
        beam = tl.load(parents_ptr + above, mask=deep, other=0).to(tl.int32)
        above = tl.where(deep, (above // n - 1) * n + beam, 0)
        ancestor = tl.load(node_ptr + above, mask=deep, other=0)
        parent_node = tl.where(level == 0, ancestor, parent_node)
        ancestors |= bit << ancestor.to(tl.int64)
    token = tl.load(tokens_ptr + b * K * n + column, mask=kept, other=0)
    tree_ptr += b * T
    plane = B.to(tl.int64) * T
    tl.store(tree_ptr + node, token, mask=node < T)
    tl.store(tree_ptr + plane + node, parent_node.to(tl.int64), mask=node < T)
    tl.store(tree_ptr + 2 * plane + node, tl.where(kept, column // n + 1, 0).to(tl.int64), mask=node < T)
    tl.store(tree_ptr + 3 * plane + node, tl.where(kept, ancestors, 0), mask=node < T)
    is_root = tl.arange(0, 4)  # its token, parent, depth and ancestors
    tl.store(tree_ptr + is_root * plane, tl.where(is_root == 0, tl.load(root_ptr + b), is_root // 3))


def _pair_blocks(n):
    """Tile sizes and launch options to compare n entries with one another: 8 to 16 pairs per thread."""
    BLOCK_N = max(64, triton.next_power_of_2(n))
    return dict(BLOCK_N=BLOCK_N, BLOCK_J=min(16, 8192 // BLOCK_N), num_warps=min(max(BLOCK_N // 32, 4), 16))


def _best_of(scores, keys, n):
    """Columns [B, n] of the n highest scores [B, N], best first. Equal scores: lower key first, then lower column."""
    order = keys.argsort(dim=1, stable=True)
    return order.gather(1, scores.gather(1, order).argsort(dim=1, descending=True, stable=True)[:, :n])


@_skippable
def _check_lists(joint, tokens, parents):
    _check(joint.dim() == 3 and joint.numel() > 0 and joint[0].numel() < 2048,
           "joint of shape [B, K, n], not empty, K * n under 2048", joint)
    _check_tensors(joint.device, joint=(joint, joint.shape, torch.float32), tokens=(tokens, joint.shape, torch.int64),
                   parents=(parents, joint.shape, torch.int64))
    _check(all(x.is_contiguous() for x in (joint, tokens, parents)), "contiguous joint, tokens and parents",
           joint.stride(), tokens.stride(), parents.stride())


@_skippable
def _check_best_guesses(logprobs, guesses, joint, tokens, parents, depth):
    _check_lists(joint, tokens, parents)
    _check(logprobs.dim() == 3, "logprobs of shape [B, w, W]", logprobs)
    (B, K, n), (w, W) = joint.shape, logprobs.shape[1:]
    _check(isinstance(depth, int) and 0 <= depth < K, lambda: f"a depth of 0 to {K - 1}", depth)
    _check(1 <= W <= min(n, 32), lambda: f"1 to {min(n, 32)} proposals per beam", W)
    shape = B, W if depth > 0 and w > 1 else 1, W
    _check_tensors(joint.device, logprobs=(logprobs, shape, torch.float32), guesses=(guesses, shape, torch.int64))


def best_guesses_reference(logprobs, guesses, joint, tokens, parents, depth):
    """`best_guesses` by torch."""
    _check_best_guesses(logprobs, guesses, joint, tokens, parents, depth)
    W, found = logprobs.shape[2], logprobs.clamp(max=0).nan_to_num_(nan=-math.inf, neginf=-math.inf)
    if depth:
        found = joint[:, depth - 1, :W, None] + found  # (B, W, W)
    guesses, found = guesses.expand_as(found).flatten(1), found.flatten(1)
    best = _best_of(found, guesses, joint.shape[2])
    results = (found.gather(1, best), -math.inf), (guesses.gather(1, best), 0), (best // W, -1)
    for x, (values, none) in zip((joint, tokens, parents), results):
        x[:, depth, :best.shape[1]] = values
        x[:, depth, best.shape[1]:].fill_(none)


def best_guesses(logprobs, guesses, joint, tokens, parents, depth):
    """The best proposals of one depth of a token tree, from those of the depth before.

    logprobs float32 and guesses int64 [B, w, W]: the W best next tokens of each beam, any strides. The beams are the
    root alone at depth 0, then the first W entries of the depth before; w is their number, or 1 where all propose the
    same. W up to 32; log-probabilities above 0 count as 0, NaN as -inf.
    Fills [:, depth] of joint float32, tokens and parents int64, each [B, K, n], contiguous, n >= W, K * n under 2048,
    with the n best: joint log-probability, token, and the beam that proposed it; where there are fewer, with -inf, 0
    and -1. ValueError for shapes, dtypes, strides and devices.
    """
    if not runs_triton(logprobs):
        return best_guesses_reference(logprobs, guesses, joint, tokens, parents, depth)
    _check_best_guesses(logprobs, guesses, joint, tokens, parents, depth)
    (B, w, W), (_, K, n) = logprobs.shape, joint.shape
    count = W * W if depth else W
    with torch.cuda.device_of(joint):
        _best_guesses_kernel[(B,)](logprobs.contiguous(), guesses.contiguous(), joint, tokens, parents, w * W,
                                   W if w > 1 else 0, count, n, W, K, depth, **_pair_blocks(max(count, n)))


@_skippable
def _check_best_tree(root, joint, tokens, parents, tree_size):
    _check_lists(joint, tokens, parents)
    _check_tensors(joint.device, root=(root, joint.shape[:1], torch.int64))
    _check(isinstance(tree_size, int) and 2 <= tree_size <= 64, "a tree size of 2 to 64", tree_size)


def best_tree_reference(root, joint, tokens, parents, tree_size):
    """`best_tree` by torch."""
    _check_best_tree(root, joint, tokens, parents, tree_size)
    K, n = joint.shape[1:]
    joint, tokens, parents = (x.flatten(1) for x in (joint, tokens, parents))  # (B, K * n)
    joint = joint.clamp(min=PIVOT.value).masked_fill_(parents < 0, -math.inf)
    kept = joint.argsort(dim=1, descending=True, stable=True)[:, :tree_size - 1]
    nodes, parents = torch.arange(1, kept.shape[1] + 1, device=root.device), parents.gather(1, kept)
    valid = parents >= 0
    depths = (kept // n + 1) * valid
    node_of = torch.zeros_like(tokens).scatter_(1, kept, nodes * valid)
    parents = node_of.gather(1, ((depths - 2) * n + parents).clamp_(min=0)) * (depths > 1)
    columns = tokens.gather(1, kept) * valid, parents, depths, valid.long() << nodes
    tokens, parents, depths, bits = (F.pad(x, (1, tree_size - 1 - len(nodes))) for x in columns)  # (B, T)
    tokens[:, 0] = root
    bits[:, 0].fill_(1)
    ancestors = bits
    for _ in range(K):
        ancestors = bits | ancestors.gather(1, parents)
    return tokens, parents, depths, torch.where(bits != 0, ancestors, 0)


def best_tree(root, joint, tokens, parents, tree_size):
    """The likeliest token tree of T = tree_size nodes.

    root int64 [B]; joint, tokens, parents [B, K, n]: as `best_guesses` filled them, for every depth; T 2..64.
    Returns (tokens, parents, depths, ancestors), int64 [B, T]: node 0 is the root, then the likeliest first, parents
    before children; ancestors are bitmasks as in `tree_attention`. Spare nodes, for which there is no proposal, are 0
    in all four. ValueError for shapes, dtypes, strides, devices and the tree size.
    """
    if not runs_triton(joint):
        return best_tree_reference(root, joint, tokens, parents, tree_size)
    _check_best_tree(root, joint, tokens, parents, tree_size)
    (B, K, n), blocks = joint.shape, _pair_blocks(max(joint[0].numel() + 1, tree_size))
    node, tree = root.new_empty(B, blocks["BLOCK_N"], dtype=torch.int32), root.new_empty(4, B, tree_size)
    with torch.cuda.device_of(joint):
        _best_tree_kernel[(B,)](root.contiguous(), joint, tokens, parents, node, tree, B, K, n, tree_size, **blocks)
    return tree.unbind()


# ---------------------------------------------------------------------------------------------------------------------
# lookup and merge_chain: drafting from the text itself
#
#   lookup        what followed the most recent earlier occurrence of the text's longest suffix, of 4 tokens down to 1
#   merge_chain   a token tree and such a chain as one tree: from where they part, the chain is appended
#
# A match may overlap the suffix. Where the text ends before the chain does, the chain goes on as a copy of itself, so
# that a run of one token proposes more of it.
#
# Bytes: 4 * length of history per sequence, read once: the floor. One program reads them, since few programs hold a
# short text's tokens and a second launch to merge their finds would take longer than that.


@triton.jit(do_not_specialize=["S", "n"])
def _lookup_kernel(history_ptr, lengths_ptr, chain_ptr, S, n, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr):
    """Program b: the chain of one sequence."""
    b = tl.program_id(0).to(tl.int64)
    history_ptr += b * S
    last = tl.load(lengths_ptr + b)  # the newest token's index
    best = tl.zeros([BLOCK_S], tl.int32)  # the length of a match, then its last index
    for start in range(0, last, BLOCK_S):
        # [BLOCK_S]
        index = start + tl.arange(0, BLOCK_S)
        matched, length = index < last, tl.zeros([BLOCK_S], tl.int32)
        for i in tl.static_range(4):  # the suffix, from its newest token back
            token = tl.load(history_ptr + last - i, mask=last >= i, other=-1)
            matched &= tl.load(history_ptr + index - i, mask=matched & (index >= i), other=-2) == token
            length += matched.to(tl.int32)
        best = tl.maximum(best, tl.where(length > 0, (length << 28) + index, 0))
    found = tl.max(best, 0)
    match = found & 0xFFFFFFF
    # [BLOCK_N]
    step = tl.arange(0, BLOCK_N)
    source = match + 1 + step % tl.maximum(last - match, 1)
    token = tl.load(history_ptr + source, mask=(step < n) & (found > 0), other=-1)
    tl.store(chain_ptr + b * n + step, token.to(tl.int64), mask=step < n)


@_skippable
def _check_lookup(history, lengths, n):
    _check(history.dim() == 2 and history.dtype == torch.int32 and history.numel() > 0 and history.shape[1] < 2**28,
           "history int32 [B, S], not empty, S under 2^28", history)
    _check(history.is_contiguous(), "contiguous history", history.stride())
    _check_tensors(history.device, lengths=(lengths, history.shape[:1], torch.int32))
    _check(isinstance(n, int) and 1 <= n <= 63, "a chain of 1 to 63 tokens", n)


def lookup_reference(history, lengths, n):
    """`lookup` by torch."""
    _check_lookup(history, lengths, n)
    S, last = int(lengths.max()) + 1, lengths.long()[:, None]  # (B, 1)
    index, before = torch.arange(S, device=history.device)[None], last - _column(4, history.device).mT
    history = history[:, :S]
    suffix = torch.where(before >= 0, history.gather(1, before.clamp(min=0)), -1)  # (B, 4), the newest token first
    matched = (history == suffix[:, :1]) & (index < last)  # (B, S)
    length = matched.long()
    for i in range(1, min(4, S)):
        matched[:, i:] &= history[:, :-i] == suffix[:, i:i + 1]
        matched[:, i - 1].fill_(False)
        length += matched
    best = (length * S + index).mul_(length > 0).amax(dim=1, keepdim=True)  # (B, 1)
    match = best % S
    source = match + 1 + _column(n, history.device).mT % (last - match).clamp_(min=1)  # (B, n)
    return torch.where(best > 0, history.gather(1, source.clamp_(max=S - 1)), -1).long()


def lookup(history, lengths, n):
    """The n tokens that the text itself suggests next: those that followed the most recent earlier occurrence of its
    longest suffix, of 4 tokens down to 1 (prompt lookup decoding, as transformers has it).

    history int32 [B, S], contiguous: token ids; lengths int32 [B]: the index of each sequence's newest token, 0..S - 1;
    what stands behind it does not count. n 1..63.
    Returns int64 [B, n]; -1 for all n where the newest token did not occur before. ValueError for shapes, dtypes,
    strides, devices and n.
    """
    if not runs_triton(history):
        return lookup_reference(history, lengths, n)
    _check_lookup(history, lengths, n)
    (B, S), chain = history.shape, history.new_empty(len(history), n, dtype=torch.int64)
    with torch.cuda.device_of(history):
        _lookup_kernel[(B,)](history, lengths.contiguous(), chain, S, n, BLOCK_S=4096, num_warps=8,
                             BLOCK_N=triton.next_power_of_2(n))
    return chain


@triton.jit(do_not_specialize=["B", "T", "n"])
def _merge_chain_kernel(
    tokens_ptr, parents_ptr, depths_ptr, ancestors_ptr, chain_ptr, tree_ptr, B, T, n,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Program b: the tree of one sequence."""
    b = tl.program_id(0).to(tl.int64)
    plane = B.to(tl.int64) * (T + n)
    tree_ptr += b * (T + n)
    chain_ptr += b * n
    node = tl.arange(0, BLOCK_T)
    mask, offsets = node < T, b * T + node
    # [BLOCK_T]
    token = tl.load(tokens_ptr + offsets, mask=mask, other=0)
    parent = tl.load(parents_ptr + offsets, mask=mask, other=0)
    depth = tl.load(depths_ptr + offsets, mask=mask, other=0)
    ancestors = tl.load(ancestors_ptr + offsets, mask=mask, other=0)
    wanted = tl.load(chain_ptr + depth - 1, mask=(depth > 0) & (depth <= n), other=-1)
    wrong = mask & (depth > 0) & (token != wanted)
    refused = tl.sum(wrong.to(tl.int64) << node.to(tl.int64), 0)  # a set of nodes, one bit each
    shared = (ancestors != 0) & ((ancestors & refused) == 0)  # the root, and what the chain has in common with the tree
    parting = tl.max(tl.where(shared, depth * BLOCK_T + node, 0), 0)
    common, parting = parting // BLOCK_T, parting % BLOCK_T
    above = tl.sum(tl.where(node == parting, ancestors, 0), 0)
    tl.store(tree_ptr + node, token, mask=mask)
    tl.store(tree_ptr + plane + node, parent, mask=mask)
    tl.store(tree_ptr + 2 * plane + node, depth, mask=mask)
    tl.store(tree_ptr + 3 * plane + node, ancestors, mask=mask)

    # [BLOCK_N]
    row = tl.arange(0, BLOCK_N)
    step = (common + row).to(tl.int32)
    token = tl.load(chain_ptr + step, mask=step < n, other=-1)
    used = token >= 0
    parent = tl.where(row == 0, parting, T + row - 1)
    bits = ((tl.full([BLOCK_N], 2, tl.int64) << row.to(tl.int64)) - 1) << T.to(tl.int64)
    tree_ptr += T + row
    tl.store(tree_ptr, tl.where(used, token, 0), mask=row < n)
    tl.store(tree_ptr + plane, tl.where(used, parent, 0).to(tl.int64), mask=row < n)
    tl.store(tree_ptr + 2 * plane, tl.where(used, step + 1, 0).to(tl.int64), mask=row < n)
    tl.store(tree_ptr + 3 * plane, tl.where(used, bits | above, 0), mask=row < n)


@_skippable
def _check_merge(tokens, parents, depths, ancestors, chain):
    _check(chain.dim() == 2 and 1 <= chain.shape[1] <= 63, "chain of shape [B, 1 to 63]", chain)
    _check(tokens.dim() == 2 and 1 <= tokens.shape[1] <= 64 - chain.shape[1],
           lambda: f"tokens of shape [B, 1 to {64 - chain.shape[1]}]", tokens)
    named = dict(tokens=tokens, parents=parents, depths=depths, ancestors=ancestors)
    _check_tensors(tokens.device, chain=(chain, (len(tokens), chain.shape[1]), torch.int64),
                   **{name: (x, tokens.shape, torch.int64) for name, x in named.items()})


def merge_chain_reference(tokens, parents, depths, ancestors, chain):
    """`merge_chain` by torch."""
    _check_merge(tokens, parents, depths, ancestors, chain)
    T, n = tokens.shape[1], chain.shape[1]
    row, node = _column(n, tokens.device).mT, _column(T, tokens.device).mT
    wanted = F.pad(chain, (1, 1), value=-1).gather(1, depths.clamp(max=n + 1))
    wrong = (tokens != wanted) & (depths > 0)
    refused = (wrong.long() << node).sum(dim=1, keepdim=True)  # a set of nodes, one bit each
    shared = (ancestors != 0) & (ancestors & refused == 0)  # the root, and what the chain has in common with the tree
    deepest = ((depths * 64 + node) * shared).amax(dim=1, keepdim=True)
    common, parting = deepest >> 6, deepest & 63
    step = common + row
    token = F.pad(chain, (0, T), value=-1).gather(1, step)
    parent = torch.where(row == 0, parting, T + row - 1)
    bits = (((2 << row) - 1) << T) | ancestors.gather(1, parting)
    rest = [torch.where(token >= 0, x, 0) for x in (token, parent, step + 1, bits)]
    return tuple(torch.cat(pair, dim=1) for pair in zip((tokens, parents, depths, ancestors), rest))


def merge_chain(tokens, parents, depths, ancestors, chain):
    """A token tree with a chain below its root, merged where they begin alike.

    tokens, parents, depths, ancestors int64 [B, T]: trees as `best_tree` makes them, or roots alone, T 1..63; chain
    int64 [B, n]: the tokens after the root, or -1 in all n columns for none; T + n up to 64.
    Returns (tokens, parents, depths, ancestors), int64 [B, T + n]: the tree's nodes first and as they were, then the
    chain's that are not among them; spare nodes are 0 in all four. ValueError for shapes, dtypes and devices.
    """
    if not runs_triton(tokens):
        return merge_chain_reference(tokens, parents, depths, ancestors, chain)
    _check_merge(tokens, parents, depths, ancestors, chain)
    (B, T), n = tokens.shape, chain.shape[1]
    tree, inputs = tokens.new_empty(4, B, T + n), (tokens, parents, depths, ancestors, chain)
    with torch.cuda.device_of(tokens):
        _merge_chain_kernel[(B,)](*(x.contiguous() for x in inputs), tree, B, T, n, num_warps=1,
                                  BLOCK_T=triton.next_power_of_2(T), BLOCK_N=triton.next_power_of_2(n))
    return tree.unbind()


# ---------------------------------------------------------------------------------------------------------------------
# accept_path
#
#   A node is accepted when its parent is and its token is its parent's target token. The root always is.
#
# No token stands twice under one parent, so one node per depth at most is accepted: they form a path.


@triton.jit(do_not_specialize=["T", "P"])
def _accept_path_kernel(
    tokens_ptr, parents_ptr, depths_ptr, ancestors_ptr, target_ptr, active_ptr, out_ptr, T, P, BLOCK_T: tl.constexpr,
):
    """Program b: the path of one sequence."""
    b = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK_T)
    mask, offsets = node < T, b * T + node
    # [BLOCK_T]
    token = tl.load(tokens_ptr + offsets, mask=mask, other=0)
    parent = tl.load(parents_ptr + offsets, mask=mask, other=0)
    depth = tl.load(depths_ptr + offsets, mask=mask, other=0)
    ancestors = tl.load(ancestors_ptr + offsets, mask=mask, other=0)
    target = tl.load(target_ptr + offsets, mask=mask, other=0)
    wrong = mask & (depth > 0) & (token != tl.load(target_ptr + b * T + parent, mask=mask, other=0))
    refused = tl.sum(wrong.to(tl.int64) << node.to(tl.int64), 0)  # a set of nodes, one bit each
    accepted = (ancestors != 0) & ((ancestors & refused) == 0) & (depth < P)
    active = tl.load(active_ptr + b)
    last = tl.max(tl.where(accepted, depth, 0), 0)

    out_ptr += b * (2 * P + 2)
    rest = (node > last) & (node < P)
    tl.store(out_ptr + depth, target, mask=accepted)
    tl.store(out_ptr + P + depth, node.to(tl.int64), mask=accepted)
    tl.store(out_ptr + node, tl.zeros([BLOCK_T], tl.int64) + tl.load(target_ptr + b * T), mask=rest)
    tl.store(out_ptr + P + node, tl.zeros([BLOCK_T], tl.int64), mask=rest)
    tl.store(out_ptr + 2 * P, (last + 1) * active)
    tl.store(out_ptr + 2 * P + 1, last * active)


@_skippable
def _check_accept(tokens, parents, depths, ancestors, target, active, max_path):
    _check(tokens.dim() == 2 and 1 <= tokens.shape[1] <= 64, "tokens of shape [B, 1 to 64]", tokens)
    named = dict(tokens=tokens, parents=parents, depths=depths, ancestors=ancestors, target=target)
    _check_tensors(tokens.device, active=(active, tokens.shape[:1], torch.int32),
                   **{name: (x, tokens.shape, torch.int64) for name, x in named.items()})
    _check(isinstance(max_path, int) and 1 <= max_path <= 64, "a longest path of 1 to 64 nodes", max_path)


def accept_path_reference(tokens, parents, depths, ancestors, target, active, max_path):
    """`accept_path` by torch."""
    _check_accept(tokens, parents, depths, ancestors, target, active, max_path)
    (B, T), P = tokens.shape, max_path
    nodes = torch.arange(T, device=tokens.device)
    wrong = (tokens != target.gather(1, parents)) & (depths > 0)
    refused = (wrong.long() << nodes).sum(dim=1, keepdim=True)  # a set of nodes, one bit each
    accepted = (ancestors != 0) & (ancestors & refused == 0) & (depths < P)
    column = torch.where(accepted, depths, P)  # all other nodes go to a spare last column
    path = tokens.new_zeros(B, P + 1).scatter_(1, column, nodes.expand(B, T))[:, :P]
    active = active[:, None]
    last = (depths * accepted).amax(dim=1, keepdim=True) * active
    return torch.cat((target.gather(1, path), path, last + active, last), dim=1)


def accept_path(tokens, parents, depths, ancestors, target, active, max_path):
    """The accepted nodes of token trees, and the tokens that they emit.

    tokens, parents, depths, ancestors int64 [B, T]: trees as `best_tree` makes them, T 1..64; target int64 [B, T]: the
    model's own next token at each node; active int32 [B]: 1, or 0 for an idle sequence; P = max_path, 1..64: nodes of
    the longest path, beyond which a path is cut.
    Returns int64 [B, 2 P + 2]: the targets of the accepted nodes (P), the accepted nodes, root first (P), how many
    there are, and the index of the last; the latter two are 0 for an idle sequence. Behind the accepted nodes stand 0,
    behind their targets the root's. ValueError for shapes, dtypes and devices.
    """
    if not runs_triton(tokens):
        return accept_path_reference(tokens, parents, depths, ancestors, target, active, max_path)
    _check_accept(tokens, parents, depths, ancestors, target, active, max_path)
    (B, T), P = tokens.shape, max_path
    out, inputs = tokens.new_empty(B, 2 * P + 2), (tokens, parents, depths, ancestors, target, active)
    with torch.cuda.device_of(tokens):
        _accept_path_kernel[(B,)](*(x.contiguous() for x in inputs), out, T, P,
                                  BLOCK_T=triton.next_power_of_2(max(T, P)), num_warps=1)
    return out


# ---------------------------------------------------------------------------------------------------------------------
# nucleus: where top-p sampling cuts (arXiv 1904.09751)
#
#   the least logit x of a row with sum of exp(x') over x' > x under top_p * sum of exp(x')
#
# Bytes: nine passes over M * V float32 logits; a sort moves them about as often, with indices. The cut is found as an
# integer that orders as the logits do, four bits a pass: the highest of 16 candidates with enough mass above it. Each
# row is one program, so that its cut depends on no other row.


@triton.jit
def _order(bits):
    """int32 that order as the float32 numbers of these bits do; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["V"])
def _nucleus_kernel(logits_ptr, cut_ptr, top_p, V, BLOCK_V: tl.constexpr):
    """Program m: row m."""
    m = tl.program_id(0).to(tl.int64)
    logits_ptr += m * V
    columns = tl.arange(0, BLOCK_V)
    # [BLOCK_V]
    best, total = tl.full([BLOCK_V], PIVOT, tl.float32), tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, V, BLOCK_V):
        x = tl.load(logits_ptr + start + columns, mask=start + columns < V, other=float("-inf"))
        new_best = tl.maximum(best, x)
        total = total * tl.exp(best - new_best) + tl.exp(x - new_best)
        best = new_best
    row_max = tl.max(best, 0)
    wanted = top_p * tl.sum(total * tl.exp(best - row_max), 0)
    cut = tl.full([], -2147483648, tl.int32)
    for digit in range(0, 8):
        # [16], [BLOCK_V, 16]
        candidates = cut + (tl.arange(0, 16) << (28 - 4 * digit))
        mass = tl.zeros([BLOCK_V, 16], tl.float32)
        for start in range(0, V, BLOCK_V):
            x = tl.load(logits_ptr + start + columns, mask=start + columns < V, other=float("-inf"))
            above = _order(x.to(tl.int32, bitcast=True))[:, None] > candidates[None, :]
            mass += tl.where(above, tl.exp(x - row_max)[:, None], 0.0)
        cut = tl.max(tl.where(tl.sum(mass, 0) >= wanted, candidates, cut), 0)
    tl.store(cut_ptr + m, _order(cut + 1).to(tl.float32, bitcast=True))


@_skippable
def _check_nucleus(logits, top_p):
    _check(logits.dim() == 2 and logits.numel() > 0 and logits.dtype in (torch.float32, torch.float64),
           "logits of shape [M, V], float32 or float64", logits)
    _check(0 < top_p < 1, "top_p between 0 and 1", top_p)


def nucleus_reference(logits, top_p):
    """`nucleus` by torch: of the 1,024 likeliest, and of all where some row needs more."""
    _check_nucleus(logits, top_p)
    total = logits.logsumexp(dim=-1, keepdim=True)
    for n in (min(1024, logits.shape[1]), logits.shape[1]):
        ranked = logits.topk(n).values
        probs = (ranked - total).exp()
        before = probs.cumsum(dim=-1) - probs
        if n == logits.shape[1] or (before[:, -1] >= top_p).all():
            break
    kept = (before < top_p).sum(dim=-1, keepdim=True)
    return ranked.gather(1, (kept - 1).clamp(min=0))[:, 0]  # where all is NaN, none is kept


def nucleus(logits, top_p):
    """The cut of top-p sampling: tokens of at least this logit are the likeliest of mass top_p, and those that tie with
    the last of them.

    logits float32 or float64 [M, V], any strides, -inf for excluded tokens; 0 < top_p < 1. Returns [M], like them.
    ValueError for shapes, dtypes and top_p.
    """
    if not runs_triton(logits):
        return nucleus_reference(logits, top_p)
    _check_nucleus(logits, top_p)
    logits, cut = logits.contiguous(), logits.new_empty(len(logits))
    with torch.cuda.device_of(logits):
        _nucleus_kernel[(len(logits),)](logits, cut, top_p, logits.shape[1], BLOCK_V=1024, num_warps=16)
    return cut
