"""The four operations that make a speculative step quick: Triton kernels and their torch twins.

    tree_attention   attention of a token tree over the committed cache and the tree's own ancestors
    project_topk     LM head + log-softmax + top-k, for drafting
    project_sample   LM head + argmax or Gumbel-argmax, for verifying
    commit_path      moves the accepted nodes' cache rows to the front

For each: formula and cost, kernel, host function (`*_triton`), torch reference (`*_reference`), dispatching function.
The three functions share one signature. The dispatching one runs Triton on CUDA tensors and, if TRITON_INTERPRET=1 was
set before the import, on CPU tensors too; elsewhere the reference. The file needs torch and, where it exists, triton.

Letters: B sequences, T tree nodes, L layers, S cache rows, Hq and Hkv query and key/value heads, G = Hq / Hkv, D head
size, C hidden size, V vocabulary, M = B * T rows of hidden states, N cache rows looked at, P nodes of a path.
"""

import math
import os
from functools import lru_cache

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
LOG2_E = 1.4426950408889634
INTERPRETED = tl.constexpr(HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1")
PIVOT = tl.constexpr(-3.0e38)  # stands for the maximum of no scores: -inf - -inf would be NaN, -inf - PIVOT is not


def _check(holds, expected, *came):
    if not holds:
        came = [f"{tuple(x.shape)} {x.dtype}" if isinstance(x, torch.Tensor) else repr(x) for x in came]
        raise ValueError(f"expected {expected}, got {', '.join(came)}")


def _runs_triton(tensor):
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
# Bytes: 2 * B * Hkv * (length + T) * D elements of K and V, read once: the floor. Each of them meets T * G rows, so
# 2 * T * G FLOPs: at T = 17, G = 4, bf16 that is 68 FLOPs a byte, under the 150 to 300 at which a data-centre GPU stops
# being bound by memory. Hence: pack all T * G rows that share a kv head into one tile, and cut the cache into splits so
# that B * Hkv * splits programs fill the GPU (flash-decoding). The partial results add splits * B * T * Hq * D floats,
# written and read once.
#
# Splits follow S and never the lengths: a captured CUDA graph needs a fixed grid, and a row's sum is cut at the same
# places whatever else is in the batch. Programs beyond their sequence's end leave at once.


@triton.jit
def _attend(q, keys, values, visible, scale, best, total, acc):
    """One online-softmax step, base 2: folds a tile of keys and values into (best, total, acc)."""
    # [BLOCK_ROWS, BLOCK_N] = [BLOCK_ROWS, BLOCK_D] @ [BLOCK_D, BLOCK_N]
    scores = _dot(q, tl.trans(keys), tl.zeros([q.shape[0], keys.shape[0]], tl.float32)) * scale
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    shrink = tl.exp2(best - new_best)
    weights = tl.exp2(scores - new_best[:, None])
    # [BLOCK_ROWS, BLOCK_D] = [BLOCK_ROWS, BLOCK_N] @ [BLOCK_N, BLOCK_D]
    acc = _dot(weights.to(values.dtype), values, acc * shrink[:, None])
    return new_best, total * shrink + tl.sum(weights, 1), acc


@triton.jit
def _tree_attention_kernel(
    q_ptr, k_ptr, v_ptr, lengths_ptr, ancestors_ptr, partial_ptr, lse_ptr,
    stride_qb, stride_qt, stride_qh, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    scale, T, G, S, Hq, row_tiles, splits,
    D: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr,
):
    """Program (split, kv head and row tile, sequence): its rows over its share of the cache."""
    split = tl.program_id(0)
    kv_head = tl.program_id(1) // row_tiles
    b = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_ptr + b).to(tl.int32)
    begin = split * SPLIT
    end = tl.minimum(tl.minimum(begin + SPLIT, length + T), S)
    if begin >= end:
        return

    rows = tl.program_id(1) % row_tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # row = node * G + head within group
    real = rows < T * G
    nodes = (rows // G).to(tl.int64)
    heads = (kv_head * G + rows % G).to(tl.int64)
    dims = tl.arange(0, BLOCK_D).to(tl.int64)
    columns = tl.arange(0, BLOCK_N)
    dim_mask = (dims < D)[None, :]

    # [BLOCK_ROWS, BLOCK_D]
    q_ptrs = q_ptr + b * stride_qb + (nodes * stride_qt + heads * stride_qh)[:, None] + dims[None, :] * stride_qd
    q = tl.load(q_ptrs, mask=real[:, None] & dim_mask, other=0.0)
    k_ptrs = k_ptr + b * stride_kb + kv_head.to(tl.int64) * stride_kh + dims[None, :] * stride_kd
    v_ptrs = v_ptr + b * stride_vb + kv_head.to(tl.int64) * stride_vh + dims[None, :] * stride_vd
    best = tl.full([BLOCK_ROWS], PIVOT, tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)

    # Whole tiles of committed rows: every row sees them, so nothing is masked.
    prefix_end = begin + tl.maximum(tl.minimum(length, end) - begin, 0) // BLOCK_N * BLOCK_N
    for start in range(begin, prefix_end, BLOCK_N):
        cache_rows = (start + columns).to(tl.int64)[:, None]
        # [BLOCK_N, BLOCK_D]
        keys = tl.load(k_ptrs + cache_rows * stride_kn, mask=dim_mask, other=0.0)
        values = tl.load(v_ptrs + cache_rows * stride_vn, mask=dim_mask, other=0.0)
        best, total, acc = _attend(q, keys, values, None, scale, best, total, acc)

    # The last committed rows and the tree. Rows that nobody here sees are not loaded: 0 * NaN would reach the output.
    bits = tl.load(ancestors_ptr + b * T + nodes, mask=real, other=0)
    for start in range(prefix_end, end, BLOCK_N):
        cache_rows = start + columns
        node = cache_rows - length
        ancestor = (bits[:, None] >> tl.minimum(tl.maximum(node, 0), 63).to(tl.int64)[None, :]) & 1
        visible = (node < 0)[None, :] | (ancestor != 0)
        visible = visible & (cache_rows < end)[None, :] & real[:, None]
        seen = (tl.max(visible.to(tl.int32), 0) > 0)[:, None] & dim_mask
        cache_rows = cache_rows.to(tl.int64)[:, None]
        # [BLOCK_N, BLOCK_D]
        keys = tl.load(k_ptrs + cache_rows * stride_kn, mask=seen, other=0.0)
        values = tl.load(v_ptrs + cache_rows * stride_vn, mask=seen, other=0.0)
        best, total, acc = _attend(q, keys, values, visible, scale, best, total, acc)

    blind = total == 0.0
    acc = acc / tl.where(blind, 1.0, total)[:, None]
    lse = tl.where(blind, PIVOT, best + tl.log2(tl.where(blind, 1.0, total)))
    out_rows = ((b * T + nodes) * Hq + heads) * splits + split
    tl.store(lse_ptr + out_rows, lse, mask=real)
    tl.store(partial_ptr + out_rows[:, None] * D + dims[None, :], acc, mask=real[:, None] & dim_mask)


@triton.jit
def _combine_splits_kernel(
    partial_ptr, lse_ptr, lengths_ptr, out_ptr, T, Hq, S, splits,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SPLITS: tl.constexpr, SPLIT: tl.constexpr,
):
    """Program (node and head, sequence): weighs the partial results of the splits that had rows to look at."""
    b = tl.program_id(1).to(tl.int64)
    row = b * T * Hq + tl.program_id(0)
    end = tl.minimum(tl.load(lengths_ptr + b).to(tl.int32) + T, S)
    split = tl.arange(0, BLOCK_SPLITS)
    dims = tl.arange(0, BLOCK_D).to(tl.int64)
    live = split * SPLIT < end  # the others left early and wrote nothing
    # [BLOCK_SPLITS]
    lse = tl.load(lse_ptr + row * splits + split, mask=live, other=PIVOT)
    weights = tl.where(live, tl.exp2(lse - tl.max(lse, 0)), 0.0)
    # [BLOCK_SPLITS, BLOCK_D]
    partial_ptrs = partial_ptr + (row * splits + split)[:, None] * D + dims[None, :]
    partial = tl.load(partial_ptrs, mask=live[:, None] & (dims < D)[None, :], other=0.0)
    total = tl.maximum(tl.sum(weights, 0), 1.0)  # the largest weight is 1; 0 only where no split is live
    out = tl.sum(partial * weights[:, None], 0) / total
    tl.store(out_ptr + row * D + dims, out.to(out_ptr.dtype.element_ty), mask=dims < D)


def _attention_blocks(rows, D, S, dtype):
    """(blocks, warps): no spilled registers, and two stages fit the shared memory of small GPUs.

    Exact float32 has no tensor cores, and its unrolled multiply-adds want small tiles.
    """
    BLOCK_D = max(16, triton.next_power_of_2(D))
    if dtype == torch.float32:
        BLOCK_ROWS, BLOCK_N, num_warps = 16, min(32, 4096 // BLOCK_D), 8
    else:
        BLOCK_ROWS = min(max(16, triton.next_power_of_2(rows)), 8192 // BLOCK_D, 64)
        BLOCK_N = min(8192 // BLOCK_D, 4096 // BLOCK_ROWS, 128)
        num_warps = 8 if BLOCK_ROWS * BLOCK_D == 8192 else 4
    SPLIT = 256
    while SPLIT * 64 < S:  # the combine kernel holds all splits of a row at once
        SPLIT *= 2
    return dict(BLOCK_ROWS=BLOCK_ROWS, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D, SPLIT=SPLIT), num_warps


def _check_attention(q, k_cache, v_cache, lengths, ancestors):
    _check(q.dim() == 4, "q of shape [B, T, Hq, D]", q)
    _check(k_cache.dim() == 4, "k_cache of shape [B, Hkv, S, D]", k_cache)
    B, T, Hq, D = q.shape
    Hkv, S = k_cache.shape[1:3]
    _check(k_cache.shape == v_cache.shape == (B, Hkv, S, D), "caches [B, Hkv, S, D] that fit q", q, k_cache, v_cache)
    _check(Hkv > 0 and Hq > 0 and Hq % Hkv == 0, "Hq a multiple of Hkv", Hq, Hkv)
    _check(B > 0 and 1 <= T <= 64 and T <= S, "at least one sequence and 1 to 64 nodes that fit the cache", q, k_cache)
    _check(16 <= D <= 256, "a head size of 16 to 256", D)
    _check(q.dtype in FLOATS and q.dtype == k_cache.dtype == v_cache.dtype,
           "q and caches of one dtype: float32, float16 or bfloat16", q, k_cache, v_cache)
    _check(lengths.shape == (B,) and lengths.dtype == torch.int32, f"lengths [{B}] int32", lengths)
    _check(ancestors.shape == (B, T) and ancestors.dtype == torch.int64, f"ancestors [{B}, {T}] int64", ancestors)


def _check_lengths(lengths, T, rows):
    """Only on a CPU: reading lengths back would stall a GPU. The kernels stay in the cache whatever the lengths."""
    if lengths.device.type == "cpu":
        low, high = lengths.aminmax()
        _check(0 <= low and high + T <= rows, f"lengths of 0 to {rows - T}: {T} nodes in {rows} rows", lengths.tolist())


def tree_attention_triton(q, k_cache, v_cache, lengths, ancestors, scale=None, mask=None):
    """`tree_attention` by the Triton kernels. `mask` is not read: the kernel reads the ancestor bits themselves."""
    _check_attention(q, k_cache, v_cache, lengths, ancestors)
    B, T, Hq, D = q.shape
    Hkv, S = k_cache.shape[1:3]
    _check_lengths(lengths, T, S)
    G = Hq // Hkv
    blocks, num_warps = _attention_blocks(T * G, D, S, q.dtype)
    splits = triton.cdiv(S, blocks["SPLIT"])
    row_tiles = triton.cdiv(T * G, blocks["BLOCK_ROWS"])
    lengths, ancestors = lengths.contiguous(), ancestors.contiguous()
    partial = q.new_empty((B, T, Hq, splits, D), dtype=torch.float32)
    lse = q.new_empty((B, T, Hq, splits), dtype=torch.float32)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    scale = LOG2_E * (D ** -0.5 if scale is None else scale)  # the kernel's exponentials are base 2
    _tree_attention_kernel[(splits, Hkv * row_tiles, B)](
        q, k_cache, v_cache, lengths, ancestors, partial, lse, *q.stride(), *k_cache.stride(), *v_cache.stride(),
        scale, T, G, S, Hq, row_tiles, splits, D=D, **blocks, num_warps=num_warps, num_stages=2)
    _combine_splits_kernel[(T * Hq, B)](
        partial, lse, lengths, out, T, Hq, S, splits, D=D, BLOCK_D=blocks["BLOCK_D"],
        BLOCK_SPLITS=triton.next_power_of_2(splits), SPLIT=blocks["SPLIT"], num_warps=4)
    return out


def tree_mask(lengths, ancestors, rows):
    """Which of the first `rows` cache rows each node sees: bool [B, T, rows]. Made once a step, shared by all layers.

    lengths int32 [B], ancestors int64 [B, T]; `rows` is at least max(lengths) + T, else ValueError (on a CPU).
    """
    B, T = ancestors.shape
    _check_lengths(lengths, T, rows)
    node = torch.arange(rows, device=lengths.device) - lengths[:, None]  # (B, N), negative: committed
    ancestor = (ancestors[:, :, None] >> node.clamp(0, 63)[:, None]) & 1  # (B, T, N)
    return (ancestor.bool() & (node < T)[:, None]) | (node < 0)[:, None]


def tree_attention_reference(q, k_cache, v_cache, lengths, ancestors, scale=None, mask=None):
    """`tree_attention` by torch's own attention. With a `mask` at hand it costs little more than that one call."""
    _check_attention(q, k_cache, v_cache, lengths, ancestors)
    B, T, Hq, D = q.shape
    S = k_cache.shape[2]
    if mask is None:
        _check_lengths(lengths, T, S)
        mask = tree_mask(lengths, ancestors, int(lengths.max()) + T)
    N = mask.shape[-1]
    _check(mask.shape == (B, T, N) and mask.dtype == torch.bool and N <= S, f"mask [{B}, {T}, N <= {S}] bool", mask)
    k, v = k_cache[:, :, :N], v_cache[:, :, :N]  # (B, Hkv, N, D)
    # A masked score is -inf, yet 0 * NaN is NaN. Committed rows always count, so only the rows behind the shortest
    # sequence can hold NaN or inf that must not: one look at them costs far less than cleaning all of V in each layer.
    first = int(lengths.min())
    tail = k[:, :, first:].sum() + v[:, :, first:].sum()
    if not math.isfinite(tail):
        unseen = ~mask.any(1)[:, None, :, None]  # (B, 1, N, 1)
        k, v = k.masked_fill(unseen, 0), v.masked_fill(unseen, 0)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask[:, None], scale=scale, enable_gqa=True)
    return out.transpose(1, 2)  # (B, T, Hq, D)


def tree_attention(q, k_cache, v_cache, lengths, ancestors, scale=None, mask=None):
    """Attention of a token tree over the committed cache and each node's own ancestors.

    q [B, T, Hq, D], caches [B, Hkv, S, D], one dtype (float32, float16, bfloat16), any strides; T 1..64, D 16..256;
    lengths int32 [B], 0..S - T; ancestors int64 [B, T], bit j of node i set: node j is i or an ancestor of i. Node j's
    keys and values already stand at cache row lengths[b] + j. Cache rows that no node sees may hold anything.
    scale: default D ** -0.5. mask: `tree_mask(lengths, ancestors, N)`, read by the reference alone.
    Returns [B, T, Hq, D]; a node that sees nothing gives zeros. ValueError for shapes, dtypes and, on a CPU, lengths.
    """
    attend = tree_attention_triton if _runs_triton(q) else tree_attention_reference
    return attend(q, k_cache, v_cache, lengths, ancestors, scale, mask)


# ---------------------------------------------------------------------------------------------------------------------
# project_topk
#
#   logits = hidden @ weight.T;  logprobs = logits - logsumexp(logits);  the k largest of a row, of equals the lowest id
#
# Bytes: V * C elements of weight, read once: the floor (V = 128256, C = 4096, bf16: 1.05 GB, 0.31 ms at 3.35 TB/s).
# FLOPs: 2 * M * V * C, so M a byte in bf16: bound by memory up to M = 64 and beyond. Storing M * V logits would write
# them once and read them twice: at M = 64 another 10%, and two launches. Here each program walks a run of
# vocabulary tiles with a running log-sum-exp and a running top-k, and a second kernel merges the programs' lists.


@triton.jit
def _logits_tile(
    hidden_ptr, weight_ptr, rows, tokens, M, V, C, stride_hm, stride_hc, stride_wv, stride_wc,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """Logits [BLOCK_M, BLOCK_V] of `rows` for `tokens`, -inf beyond the vocabulary."""
    row_mask = (rows < M)[:, None]
    token_mask = (tokens < V)[None, :]
    hidden_ptrs = hidden_ptr + rows.to(tl.int64)[:, None] * stride_hm
    weight_ptrs = weight_ptr + tokens.to(tl.int64)[None, :] * stride_wv
    logits = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for start in range(0, C, BLOCK_C):
        channels = (start + tl.arange(0, BLOCK_C)).to(tl.int64)
        channel_mask = channels < C
        # [BLOCK_M, BLOCK_C]
        hidden = tl.load(hidden_ptrs + channels[None, :] * stride_hc, mask=row_mask & channel_mask[None, :], other=0.0)
        # [BLOCK_C, BLOCK_V]
        weight_mask = token_mask & channel_mask[:, None]
        weight = tl.load(weight_ptrs + channels[:, None] * stride_wc, mask=weight_mask, other=0.0)
        # [BLOCK_M, BLOCK_V] += [BLOCK_M, BLOCK_C] @ [BLOCK_C, BLOCK_V]
        logits = _dot(hidden, weight, logits)
    return tl.where(token_mask, logits, float("-inf"))


@triton.jit
def _merge_topk(logits, first, values, tokens, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """Merges a tile into the sorted lists (values, tokens) by taking the larger of both heads K times."""
    slots = tl.arange(0, BLOCK_K)[None, :]
    columns = tl.arange(0, BLOCK_V)[None, :]
    new_values = tl.full(values.shape, float("-inf"), tl.float32)
    new_tokens = tl.zeros(tokens.shape, tl.int32)
    place = tl.zeros([values.shape[0]], tl.int32)  # how many entries of its list each row has used
    for slot in range(K):
        tile_value, column = tl.max(logits, 1, return_indices=True)  # the leftmost of equals
        head = slots == place[:, None]
        list_value = tl.sum(tl.where(head, values, 0.0), 1)
        list_token = tl.sum(tl.where(head, tokens, 0), 1)
        from_list = list_value >= tile_value  # the list holds lower token ids than the tile, so it wins ties
        new_values = tl.where(slots == slot, tl.where(from_list, list_value, tile_value)[:, None], new_values)
        new_tokens = tl.where(slots == slot, tl.where(from_list, list_token, first + column)[:, None], new_tokens)
        place += from_list.to(tl.int32)
        logits = tl.where((columns == column[:, None]) & (from_list == 0)[:, None], float("-inf"), logits)
    return new_values, new_tokens


@triton.jit
def _project_topk_kernel(
    hidden_ptr, weight_ptr, values_ptr, tokens_ptr, lse_ptr,
    stride_hm, stride_hc, stride_wv, stride_wc, M, V, C, programs, run,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """Program (p, row tile): the k best of vocabulary entries p * run .. (p + 1) * run, and their log-sum-exp."""
    program = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    slots = tl.arange(0, BLOCK_K)
    values = tl.full([BLOCK_M, BLOCK_K], float("-inf"), tl.float32)
    tokens = tl.zeros([BLOCK_M, BLOCK_K], tl.int32)
    best = tl.full([BLOCK_M], PIVOT, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    begin = program * run
    for first in range(begin, tl.minimum(begin + run, V), BLOCK_V):
        logits = _logits_tile(hidden_ptr, weight_ptr, rows, first + tl.arange(0, BLOCK_V), M, V, C,
                              stride_hm, stride_hc, stride_wv, stride_wc, BLOCK_M, BLOCK_V, BLOCK_C)
        new_best = tl.maximum(best, tl.max(logits, 1))
        total = total * tl.exp(best - new_best) + tl.sum(tl.exp(logits - new_best[:, None]), 1)
        best = new_best
        values, tokens = _merge_topk(logits, first, values, tokens, K, BLOCK_K, BLOCK_V)
    out_rows = rows * programs + program
    out_places = out_rows[:, None] * BLOCK_K + slots[None, :]
    tl.store(lse_ptr + out_rows, best + tl.log(total), mask=rows < M)
    tl.store(values_ptr + out_places, values, mask=(rows < M)[:, None])
    tl.store(tokens_ptr + out_places, tokens, mask=(rows < M)[:, None])


@triton.jit
def _merge_lists_kernel(
    values_ptr, tokens_ptr, lse_ptr, logprobs_ptr, out_tokens_ptr, V, programs,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_PROGRAMS: tl.constexpr,
):
    """Program m: the k best of all lists for row m. They lie in token order, so the leftmost of equals wins."""
    row = tl.program_id(0)
    program = tl.arange(0, BLOCK_PROGRAMS)
    # [BLOCK_PROGRAMS]
    lse = tl.load(lse_ptr + row * programs + program, mask=program < programs, other=float("-inf"))
    best = tl.max(lse, 0)
    lse = best + tl.log(tl.sum(tl.exp(lse - best), 0))
    places = tl.arange(0, BLOCK_PROGRAMS * BLOCK_K)
    # [BLOCK_PROGRAMS * BLOCK_K]
    first = row * programs * BLOCK_K
    values = tl.load(values_ptr + first + places, mask=places < programs * BLOCK_K, other=float("-inf"))
    for slot in range(K):
        value, place = tl.max(values, 0, return_indices=True)
        token = tl.minimum(tl.load(tokens_ptr + first + place), V - 1)  # NaN logits still name a token
        tl.store(logprobs_ptr + row * K + slot, value - lse)
        tl.store(out_tokens_ptr + row * K + slot, token.to(tl.int64))
        values = tl.where(places == place, float("-inf"), values)


def _project_blocks(M, V, dtype):
    """(blocks, grid, run): at most 256 programs, two per multiprocessor of a large GPU, each over `run` entries.

    More than 64 rows take one pass over the weight per 64 of them.
    """
    BLOCK_M = min(max(16, triton.next_power_of_2(M)), 64)
    blocks = dict(BLOCK_M=BLOCK_M, BLOCK_V=128, BLOCK_C=128 // dtype.itemsize,
                  num_warps=8 if BLOCK_M >= 32 or dtype == torch.float32 else 4, num_stages=3)
    run = triton.cdiv(triton.cdiv(V, 128), 256) * 128
    return blocks, (triton.cdiv(V, run), triton.cdiv(M, BLOCK_M)), run


def _check_project(hidden, weight):
    _check(hidden.dim() == 2 and weight.dim() == 2 and hidden.shape[1] == weight.shape[1] > 0 and weight.shape[0] > 0,
           "hidden [M, C] and weight [V, C]", hidden, weight)
    _check(len(hidden) > 0, "at least 1 row of hidden", hidden)
    _check(hidden.dtype in FLOATS and hidden.dtype == weight.dtype,
           "hidden and weight of one dtype: float32, float16 or bfloat16", hidden, weight)


def _check_topk(hidden, weight, k):
    _check_project(hidden, weight)
    _check(isinstance(k, int) and 1 <= k <= min(32, len(weight)), f"k of 1 to {min(32, len(weight))}", k)


def project_topk_triton(hidden, weight, k):
    """`project_topk` by the Triton kernels: one pass over the weight, no logits stored."""
    _check_topk(hidden, weight, k)
    (M, C), V = hidden.shape, weight.shape[0]
    blocks, grid, run = _project_blocks(M, V, hidden.dtype)
    programs = grid[0]
    BLOCK_K = triton.next_power_of_2(k)
    values = hidden.new_empty((M, programs, BLOCK_K), dtype=torch.float32)
    listed = hidden.new_empty((M, programs, BLOCK_K), dtype=torch.int32)
    lse = hidden.new_empty((M, programs), dtype=torch.float32)
    logprobs = hidden.new_empty((M, k), dtype=torch.float32)
    tokens = hidden.new_empty((M, k), dtype=torch.int64)
    _project_topk_kernel[grid](
        hidden, weight, values, listed, lse, *hidden.stride(), *weight.stride(), M, V, C, programs, run,
        K=k, BLOCK_K=BLOCK_K, **blocks)
    _merge_lists_kernel[(M,)](
        values, listed, lse, logprobs, tokens, V, programs,
        K=k, BLOCK_K=BLOCK_K, BLOCK_PROGRAMS=triton.next_power_of_2(programs), num_warps=4)
    return logprobs, tokens


def _logits(hidden, weight):
    """[M, V] in float32: half precision would make ties. On a CPU few rows take half the time with the weight first."""
    return (weight.float() @ hidden.float().T).T.contiguous()


def project_topk_reference(hidden, weight, k):
    """`project_topk` by torch, through the [M, V] logits."""
    _check_topk(hidden, weight, k)
    logits = _logits(hidden, weight)
    values, tokens = logits.topk(min(k + 1, len(weight)))
    # topk promises no order among equals, and the (k + 1)st shows whether the k-th has an equal left outside
    if (values[:, 1:] == values[:, :-1]).any():
        values, tokens = logits.sort(dim=-1, descending=True, stable=True)
    return values[:, :k] - logits.logsumexp(-1, keepdim=True), tokens[:, :k]


def project_topk(hidden, weight, k):
    """The k most likely tokens of each row and their log-probabilities, best first, of equals the lowest id first.

    hidden [M, C] and weight [V, C] in one dtype (float32, float16, bfloat16), any strides, k 1..min(32, V);
    above 64 rows the weight is read once per 64.
    Returns (logprobs float32 [M, k], tokens int64 [M, k]). ValueError for shapes, dtypes and k.
    """
    project = project_topk_triton if _runs_triton(hidden) else project_topk_reference
    return project(hidden, weight, k)


# ---------------------------------------------------------------------------------------------------------------------
# project_sample
#
#   token = argmax_t(logits_t / temperature + gumbel(seed, sequence, position, t)), at temperature 0 argmax_t(logits_t)
#
# That argmax is a sample of softmax(logits / temperature) (the Gumbel-max trick). The noise is a pure function of its
# arguments, made where it is needed: storing it would add M * V floats to a pass whose floor is V * C weight elements.
# About 15 integer operations and two logarithms per logit against 2 * C FLOPs: under 1% at C = 4096.
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


@triton.jit(do_not_specialize=["seed_key"])
def _project_sample_kernel(
    hidden_ptr, weight_ptr, sequence_ptr, position_ptr, values_ptr, tokens_ptr,
    stride_hm, stride_hc, stride_wv, stride_wc, temperature, seed_key, M, V, C, programs, run,
    NOISE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """Program (p, row tile): the best of vocabulary entries p * run .. (p + 1) * run."""
    program = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    best_token = tl.zeros([BLOCK_M], tl.int32)
    if NOISE:
        sequence = tl.load(sequence_ptr + rows, mask=rows < M, other=0).to(tl.int64)
        position = tl.load(position_ptr + rows, mask=rows < M, other=0).to(tl.int64)
        key = _mix64_kernel((sequence + seed_key).to(tl.uint64))
        key = _mix64_kernel(key + position.to(tl.uint64))
        low = key.to(tl.uint32)
        high = (key >> 32).to(tl.uint32)
    begin = program * run
    for first in range(begin, tl.minimum(begin + run, V), BLOCK_V):
        tokens = first + tl.arange(0, BLOCK_V)
        logits = _logits_tile(hidden_ptr, weight_ptr, rows, tokens, M, V, C,
                              stride_hm, stride_hc, stride_wv, stride_wc, BLOCK_M, BLOCK_V, BLOCK_C)
        if NOISE:
            logits = logits / temperature + _gumbel_kernel(low, high, tokens.to(tl.uint32))
        value, column = tl.max(logits, 1, return_indices=True)
        best_token = tl.where(value > best, first + column, best_token)  # an equal of a later tile has a higher id
        best = tl.maximum(best, value)
    tl.store(values_ptr + rows * programs + program, best, mask=rows < M)
    tl.store(tokens_ptr + rows * programs + program, best_token, mask=rows < M)


@triton.jit
def _pick_best_kernel(values_ptr, tokens_ptr, out_ptr, V, programs, BLOCK_PROGRAMS: tl.constexpr):
    """Program m: the best of all programs' bests for row m, the leftmost of equals."""
    row = tl.program_id(0)
    program = tl.arange(0, BLOCK_PROGRAMS)
    # [BLOCK_PROGRAMS]
    values = tl.load(values_ptr + row * programs + program, mask=program < programs, other=float("-inf"))
    token = tl.load(tokens_ptr + row * programs + tl.argmax(values, 0))
    tl.store(out_ptr + row, tl.minimum(token, V - 1).to(tl.int64))


def _check_noise(M, temperature, sequence, position):
    _check(0 <= temperature < math.inf, "a finite temperature of at least 0", temperature)
    _check(sequence.shape == position.shape == (M,) and sequence.dtype in INTEGERS and position.dtype in INTEGERS,
           f"sequence and position [{M}] int32 or int64", sequence, position)


def project_sample_triton(hidden, weight, temperature, seed, sequence, position):
    """`project_sample` by the Triton kernels: one pass over the weight, neither logits nor noise stored."""
    _check_project(hidden, weight)
    _check_noise(len(hidden), temperature, sequence, position)
    (M, C), V = hidden.shape, weight.shape[0]
    blocks, grid, run = _project_blocks(M, V, hidden.dtype)
    programs = grid[0]
    values = hidden.new_empty((M, programs), dtype=torch.float32)
    listed = hidden.new_empty((M, programs), dtype=torch.int32)
    tokens = hidden.new_empty((M,), dtype=torch.int64)
    _project_sample_kernel[grid](
        hidden, weight, sequence.contiguous(), position.contiguous(), values, listed,
        *hidden.stride(), *weight.stride(), float(temperature), _seed_key(seed), M, V, C, programs, run,
        NOISE=temperature > 0, **blocks)
    _pick_best_kernel[(M,)](
        values, listed, tokens, V, programs, BLOCK_PROGRAMS=triton.next_power_of_2(programs), num_warps=1)
    return tokens


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
    return int(_mix64(torch.tensor(seed)))


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


def gumbel_argmax(logits, temperature, seed, sequence, position):
    """A sample of softmax(logits / temperature) per row: int64 [M]. Temperature 0: argmax, the lowest id of equals.

    logits [M, V], -inf for tokens ruled out; sequence and position int [M]. ValueError for shapes and temperature.
    """
    M, V = logits.shape
    _check_noise(M, temperature, sequence, position)
    if temperature == 0:
        return logits.argmax(-1)
    noise = gumbel(seed, sequence, position, torch.arange(V, device=logits.device))
    return noise.add_(logits.float() / temperature).argmax(-1)


def project_sample_reference(hidden, weight, temperature, seed, sequence, position):
    """`project_sample` by torch, through the [M, V] logits."""
    _check_project(hidden, weight)
    return gumbel_argmax(_logits(hidden, weight), temperature, seed, sequence, position)


def project_sample(hidden, weight, temperature, seed, sequence, position):
    """The model's own next token of each row: argmax at temperature 0, else a sample that depends on nothing drafted.

    hidden [M, C] and weight [V, C] in one dtype (float32, float16, bfloat16), any strides; temperature float;
    seed int of at most 64 bits; sequence and position int tensors [M]: whose token, and at which place of its text.
    Returns int64 [M]. Equal logits: the lowest token id. ValueError for shapes, dtypes, temperature and seed.
    """
    project = project_sample_triton if _runs_triton(hidden) else project_sample_reference
    return project(hidden, weight, temperature, seed, sequence, position)


# ---------------------------------------------------------------------------------------------------------------------
# commit_path
#
#   kv[:, :, b, :, lengths[b] + j] = old kv[:, :, b, :, lengths[b] + path[b, j]]  for j < count[b]
#
# Bytes: 2 * L * Hkv * D elements read and written per moved row, 10 kB to 1 MB a step. What costs is the launch, so one
# serves all layers. Nodes already in place (path[j] == j) are not touched.


@triton.jit
def _commit_path_kernel(
    kv_ptr, lengths_ptr, path_ptr, count_ptr,
    stride_kvl, stride_kvside, stride_kvb, stride_kvh, stride_kvn, stride_kvd, P, S, Hkv,
    D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Program (layer, K or V, and head; sequence): moves the path's rows of one [S, D] slice."""
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
    _check(kv.dim() == 6 and kv.shape[1] == 2, "kv [L, 2, B, Hkv, S, D]", kv)
    _check(kv.dtype in FLOATS, "kv of float32, float16 or bfloat16", kv)
    B = kv.shape[2]
    _check(lengths.shape == (B,) and lengths.dtype == torch.int32, f"lengths [{B}] int32", lengths)
    _check(path.dim() == 2 and len(path) == B and 1 <= path.shape[1] <= 64 and path.dtype in INTEGERS,
           f"path [{B}, 1 to 64] int32 or int64", path)
    _check(count.shape == (B,) and count.dtype in INTEGERS, f"count [{B}] int32 or int64", count)


def commit_path_triton(kv, lengths, path, count):
    """`commit_path` by the Triton kernel: one launch for all layers."""
    _check_commit(kv, lengths, path, count)
    L, _, B, Hkv, S, D = kv.shape
    P = path.shape[1]
    _commit_path_kernel[(L * 2 * Hkv, B)](
        kv, lengths.contiguous(), path.contiguous(), count.contiguous(), *kv.stride(), P, S, Hkv,
        D=D, BLOCK_P=triton.next_power_of_2(P), BLOCK_D=triton.next_power_of_2(D), num_warps=4)


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
           f"paths that rise from the root within the {S} rows of the cache", path.tolist(), lengths.tolist())
    kv[:, :, b, :, target] = kv[:, :, b, :, source]  # (moved rows, L, 2, Hkv, D)


def commit_path(kv, lengths, path, count):
    """Moves the accepted nodes' keys and values to the front of their tree, in place, for all layers at once.

    kv [L, 2, B, Hkv, S, D] (float32, float16, bfloat16), any strides; lengths int32 [B]; path [B, P] node ids, root (0)
    first and rising, entries from count on ignored; count [B]; both int32 or int64. For j < count[b], cache row
    lengths[b] + j becomes what row lengths[b] + path[b, j] was; no other row changes, nor do the lengths.
    ValueError for shapes and dtypes and, in the reference, for paths that leave the cache.
    """
    commit = commit_path_triton if _runs_triton(kv) else commit_path_reference
    commit(kv, lengths, path, count)
