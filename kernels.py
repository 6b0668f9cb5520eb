"""Triton kernels for speculative decoding, each with a torch reference.

    tree_attention      attention of a token tree over the committed cache and itself
    project_topk        LM head + log-softmax + top-k, for drafting
    project_sample      LM head + argmax or Gumbel-argmax, for verifying
    commit_path         moves the accepted nodes' cache rows to the front
    add_norm            residual add + RMSNorm or LayerNorm
    rope_cache          norm and RoPE of queries and keys, then writes keys and values to the cache
    glu, cosine_mix     act(gate) * up; z + cos(q, k) * v of the Attention Decoder

The first four account for a step's memory traffic beside the linear layers, the others save
launches. Each section has the formula, its cost, the kernel, its launcher and a torch reference.
The launcher checks sizes, dtypes and devices, not values. It runs the kernel on CUDA tensors, and
with TRITON_INTERPRET=1 on CPU tensors; otherwise, in float64, and if a gradient is required, the
reference. Inputs may have any strides unless noted.

Letters: B sequences of a batch, T tree nodes, L layers, S cache capacity, Hq and
Hkv query and key/value heads, G = Hq / Hkv, D head size, C hidden size, V vocabulary, M rows
(hidden states), P nodes of a path, K depths and W beams of a draft."""

import math
import os
from functools import lru_cache
from types import SimpleNamespace

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
    HAS_TRITON = True
except ImportError:  # macOS, Windows: stubs, so that the file imports; kernels are never called
    triton = SimpleNamespace(jit=lambda kernel=None, **_: kernel or (lambda kernel: kernel))
    tl = SimpleNamespace(constexpr=lambda value: SimpleNamespace(value=value))
    HAS_TRITON = False

INTERPRETED = tl.constexpr(HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1")
LOG2_E = tl.constexpr(math.log2(math.e))
FINITE_MIN = tl.constexpr(-3.0e38)  # initial running maximum: -inf - -inf would be NaN
NO_TOKEN = tl.constexpr(2**31 - 1)  # larger than any token id or column of the logits
NO_ENTRY = tl.constexpr(-2**63)  # smaller than any entry of `pack_entries`


# --------------------------------------------------------------------------------------------------
# tree_attention
#
#   out[b, i, h] = sum_s softmax_s(scale * q[b, i, h] . k[b, h // G, s]) v[b, h // G, s]
#   over committed rows s < lengths[b], and lengths[b] + j for each set bit j of ancestors[b, i]
#
# ALiBi (arXiv 2108.12409) subtracts slopes[h] * (position(i) - position(s)) from each score. Tree
# node j has position lengths[b] + its depth. Terms equal for all s cancel in the softmax, so the
# kernel adds slopes[h] * (position(s) - lengths[b]). A window hides all s with position(i) -
# position(s) >= window.
#
# Bytes: 2 * B * Hkv * (length + T) * D elements of K and V, read once per tile; with a window,
# min(length, window - 1) instead of length. FLOPs: 2 * T * G per element. So up to 64 of the T * G
# query rows of a kv head share a tile, and the cache is cut into splits that fill the GPU (flash-
# decoding). The number of splits depends on shapes alone, since a CUDA graph has a fixed grid;
# their size depends on the sequence's length.

@triton.jit
def dot(a, b, acc):
    if INTERPRETED:  # the interpreter multiplies bfloat16 bit patterns as integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _softmax_step(q, keys, values, visible, positions, slopes, scale, row_max, row_sum, acc):
    """One online-softmax step in base 2: adds a tile of keys and values to the running results."""
    # [BLOCK_Q, BLOCK_S] = [BLOCK_Q, BLOCK_D] @ [BLOCK_D, BLOCK_S]
    scores = dot(q, tl.trans(keys), tl.zeros([q.shape[0], keys.shape[0]], tl.float32)) * scale
    if slopes is not None:
        scores += slopes[:, None] * positions.to(tl.float32)[None, :]
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    rescale = tl.exp2(row_max - new_max)
    weights = tl.exp2(scores - new_max[:, None])
    # [BLOCK_Q, BLOCK_D] = [BLOCK_Q, BLOCK_S] @ [BLOCK_S, BLOCK_D]
    acc = dot(weights.to(values.dtype), values, acc * rescale[:, None])
    return new_max, row_sum * rescale + tl.sum(weights, 1), acc


@triton.jit
def _depth(bits):
    """A node's depth: the number of set bits in its ancestor mask minus 1, so -1 for an empty mask.
    The constants mask out the copies of the sign bit that >> makes."""
    bits = (bits & 0x5555555555555555) + ((bits >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits & 0x0F0F0F0F0F0F0F0F) + ((bits >> 4) & 0x0F0F0F0F0F0F0F0F)
    return (bits * 0x0101010101010101 >> 56).to(tl.int32) - 1  # the sum of all bytes


@triton.jit
def slot_of(slots_ptr, b):
    """The cache slot of sequence b."""
    return b if slots_ptr is None else tl.load(slots_ptr + b)


@triton.jit
def _first_row(length, WINDOW: tl.constexpr):
    """The first cache row that any node sees, where the root's window starts."""
    return tl.maximum(length + 1 - WINDOW, 0) if WINDOW else 0


@triton.jit
def _split_size(rows, splits, tile, min_split):
    """Cache rows per split: whole tiles of BLOCK_S rows, and at least min_split."""
    return tl.maximum(tl.cdiv(tl.cdiv(rows, splits), tile) * tile, min_split)


@triton.jit(do_not_specialize=["T", "G", "S", "Hkv", "splits"])
def _tree_attention_kernel(
    q_ptr, k_ptr, v_ptr, lengths_ptr, ancestors_ptr, slopes_ptr, slots_ptr, partial_ptr, lse_ptr,
    stride_qb, stride_qt, stride_qh, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    scale, T, G, S, Hkv, splits, min_split,
    D: tl.constexpr, WINDOW: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr, TAIL_STAGES: tl.constexpr,
):
    """Program (sequence, kv head and tile of query rows; split): attention over one split."""
    q_tiles = tl.cdiv(T * G, BLOCK_Q)
    group = tl.program_id(0) // q_tiles  # neighbouring programs share keys in the L2 cache
    kv_head = (group % Hkv).to(tl.int64)
    b = (group // Hkv).to(tl.int64)
    slot = slot_of(slots_ptr, b)
    split = tl.program_id(1)
    length = tl.load(lengths_ptr + slot)
    first = _first_row(length, WINDOW)
    end = tl.minimum(length + T, S)
    split_size = _split_size(end - first, splits, BLOCK_S, min_split)
    begin = first + split * split_size
    end = tl.minimum(begin + split_size, end)
    if begin >= end:
        return

    # query row = node * G + query head within the group
    rows = tl.program_id(0) % q_tiles * BLOCK_Q + tl.arange(0, BLOCK_Q)
    row_mask = rows < T * G
    nodes = rows // G
    heads = rows % G
    dims = tl.arange(0, BLOCK_D).to(tl.int64)
    tile_rows = tl.arange(0, BLOCK_S)
    dim_mask = (dims < D)[None, :]  # compiled away if D is a power of two

    # [BLOCK_Q, BLOCK_D]
    q_ptr += b * stride_qb + kv_head * G * stride_qh
    q_offsets = nodes.to(tl.int64) * stride_qt + heads.to(tl.int64) * stride_qh
    q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :] * stride_qd,
                mask=row_mask[:, None] & dim_mask, other=0.0)
    k_ptr += slot * stride_kb + kv_head * stride_kh
    v_ptr += slot * stride_kb + kv_head * stride_kh
    slopes = None
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + kv_head * G + heads, mask=row_mask, other=0.0) * LOG2_E
    row_max = tl.full([BLOCK_Q], FINITE_MIN, tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    if WINDOW:
        depth = _depth(tl.load(ancestors_ptr + b * T + nodes, mask=row_mask, other=0))
        unseen = tl.maximum(depth, 0) - WINDOW  # the last position before each window

    # Full tiles of committed rows: every node sees all of them, so only a window needs a mask.
    masked_begin = begin + tl.maximum(tl.minimum(length, end) - begin, 0) // BLOCK_S * BLOCK_S
    for start in range(begin, masked_begin, BLOCK_S):
        offsets = (start + tile_rows).to(tl.int64)[:, None] * stride_ks + dims[None, :] * stride_kd
        positions = start + tile_rows - length
        visible = positions[None, :] > unseen[:, None] if WINDOW else None
        keys = tl.load(k_ptr + offsets, mask=dim_mask, other=0.0)  # [BLOCK_S, BLOCK_D]
        values = tl.load(v_ptr + offsets, mask=dim_mask, other=0.0)
        row_max, row_sum, acc = _softmax_step(
            q, keys, values, visible, positions, slopes, scale, row_max, row_sum, acc)

    # The remaining committed rows and the tree: a few tiles, too few to pipeline.
    # Rows that no node sees are not loaded, since 0 * NaN is NaN.
    bits = tl.load(ancestors_ptr + b * T + nodes, mask=row_mask, other=0)
    low = bits.to(tl.int32)
    high = (bits >> 32).to(tl.int32)
    if slopes_ptr is not None or WINDOW:
        tree = tl.arange(0, 64)
        depths = _depth(tl.load(ancestors_ptr + b * T + tree, mask=tree < T, other=0))
    for start in tl.range(masked_begin, end, BLOCK_S, num_stages=TAIL_STAGES):
        cache_rows = start + tile_rows
        node = cache_rows - length
        word = tl.where((node < 32)[None, :], low[:, None], high[:, None])
        ancestor = (word >> (node & 31)[None, :]) & 1
        visible = (node < 0)[None, :] | (ancestor != 0)
        visible = visible & (cache_rows < end)[None, :]
        positions = node
        if slopes_ptr is not None or WINDOW:
            positions = tl.where(node < 0, node, tl.gather(depths, node & 63, 0))
        if WINDOW:
            visible = visible & (positions[None, :] > unseen[:, None])
        load_mask = (tl.max(visible.to(tl.int32), 0) > 0)[:, None] & dim_mask
        offsets = cache_rows.to(tl.int64)[:, None] * stride_ks + dims[None, :] * stride_kd
        keys = tl.load(k_ptr + offsets, mask=load_mask, other=0.0)  # [BLOCK_S, BLOCK_D]
        values = tl.load(v_ptr + offsets, mask=load_mask, other=0.0)
        row_max, row_sum, acc = _softmax_step(
            q, keys, values, visible, positions, slopes, scale, row_max, row_sum, acc)

    empty = row_sum == 0.0
    acc = acc / tl.where(empty, 1.0, row_sum)[:, None]
    out_rows = (b * T * Hkv + kv_head) * G + nodes * Hkv * G + heads  # rows of [B, T, Hq, D]
    out_rows = out_rows * splits + split
    tl.store(partial_ptr + out_rows[:, None] * D + dims[None, :],
             acc.to(partial_ptr.dtype.element_ty), mask=row_mask[:, None] & dim_mask)
    if lse_ptr is not None:
        lse = tl.where(empty, FINITE_MIN, row_max + tl.log2(tl.where(empty, 1.0, row_sum)))
        tl.store(lse_ptr + out_rows, lse, mask=row_mask)


@triton.jit(do_not_specialize=["T", "Hq", "S", "splits"])
def _combine_splits_kernel(
    partial_ptr, lse_ptr, lengths_ptr, slots_ptr, out_ptr, T, Hq, S, splits, tile, min_split,
    D: tl.constexpr, WINDOW: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):
    """Program (sequence, node and head): combines the partial results of its splits."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_D).to(tl.int64)
    length = tl.load(lengths_ptr + slot_of(slots_ptr, row // (T * Hq)))
    rows = tl.minimum(length + T, S) - _first_row(length, WINDOW)
    n_splits = tl.cdiv(rows, _split_size(rows, splits, tile, min_split))  # others wrote nothing
    row_max = FINITE_MIN
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


def tree_attention(q, k_cache, v_cache, lengths, ancestors, scale=None, slopes=None, window=0,
                   slots=None):
    """Attention of tree nodes over the committed cache and their ancestors: q [B, T, Hq, D], caches
    [slots, Hkv, S, D] -> [B, T, Hq, D]. Cache row lengths[b] + j must hold node j; rows that no
    node sees may hold anything. ancestors: bit j of node i is set if j is i or its ancestor. A node
    that sees nothing gives zeros. scale: default D ** -0.5. slopes [Hq]: for ALiBi. window: how
    many positions a node sees, its own included; 0: all. slots int64 [B]: whose cache and length a
    sequence has; None: b, of B slots."""
    B, T, Hq, D = q.shape
    n_slots, Hkv, S, _ = k_cache.shape
    require(is_real(q) and all(fits(x, q, (n_slots, Hkv, S, D)) for x in (k_cache, v_cache))
            and fits(lengths, q, (n_slots,), torch.int32) and fits_slots(slots, q, B, n_slots)
            and fits(ancestors, q, (B, T), torch.int64) and fits(slopes, q, (Hq,), torch.float32)
            and T <= min(S, 64) and 16 <= D <= 256 and Hq % Hkv == 0 and window >= 0,
            f"{SIZES}, T <= min(S, 64), 16 <= D <= 256, Hq % Hkv == 0, window >= 0",
            q, k_cache, v_cache, lengths, ancestors, slopes, slots, window)
    if not runs_triton(q, k_cache, v_cache):
        return tree_attention_reference(
            q, k_cache, v_cache, lengths, ancestors, scale, slopes, window, slots)
    G = Hq // Hkv
    if strides(k_cache) != strides(v_cache):  # the kernel uses one set of strides for both
        k_cache, v_cache = map(contiguous, (k_cache, v_cache))
    lengths, ancestors, slopes, slots = map(contiguous, (lengths, ancestors, slopes, slots))
    scale = math.log2(math.e) * (D ** -0.5 if scale is None else scale)  # for base-2 exponentials
    window = window if window < S else 0
    biased = slopes is not None or window > 0
    blocks = _attention_blocks(T * G, D, q.dtype, _aligned(q, k_cache, v_cache), biased)
    BLOCK_Q, BLOCK_S, BLOCK_D = blocks["BLOCK_Q"], blocks["BLOCK_S"], blocks["BLOCK_D"]
    grid_rows = B * Hkv * triton.cdiv(T * G, BLOCK_Q)
    rows = min(S, window - 1 + T) if window else S  # the most that a sequence reads
    min_split = max(BLOCK_Q, 2 * BLOCK_S)
    at_once = _programs_at_once(blocks, q.element_size(), _gpu(q.device))
    # for a long sequence among short ones: about 1,024 rows a split if partial sums fit 256 MiB
    fewest = max(1, min(triton.cdiv(rows, max(1024, 16 * BLOCK_Q)), 2**26 // q.numel()))
    splits = _splits(rows, min_split, BLOCK_Q, grid_rows, at_once, fewest)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    partial, lse = out, None  # a single split writes the output itself
    if splits > 1:
        partial = q.new_empty((B, T, Hq, splits, D), dtype=torch.float32)
        lse = q.new_empty((B, T, Hq, splits), dtype=torch.float32)
    launch(_tree_attention_kernel, (grid_rows, splits),
           q, k_cache, v_cache, lengths, ancestors, slopes, slots, partial, lse,
           *strides(q), *strides(k_cache), scale, T, G, S, Hkv, splits, min_split,
           D=D, WINDOW=window, **blocks)
    if lse is not None:
        launch(_combine_splits_kernel, (B * T * Hq,),
               partial, lse, lengths, slots, out, T, Hq, S, splits, BLOCK_S, min_split,
               D=D, WINDOW=window, BLOCK_D=BLOCK_D, BLOCK_SPLITS=16 if splits <= 16 else 64,
               num_warps=4)
    return out


ATTENTION_TILES = {
    # case: BLOCK_Q, BLOCK_S, num_stages, maxnreg, the outputs (rows times D) that four warps hold
    "slow loads": (16, 16, 2, None, 2048),  # float32, unaligned rows: loads take more registers
    "16 rows": (16, 64, 4, 168, 8192),      # three programs per multiprocessor
    "32 rows": (32, 64, 4, 255, 8192),      # two
    "64 rows": (64, 64, 3, 255, 8192),      # two; 128 rows would leave one
    "biased": (64, 32, 4, 255, 4096),       # positions take registers, so half the scores
}


def _attention_blocks(rows, D, dtype, aligned, biased):
    """Tile sizes and launch options; `pytest -m static` compiles every case. A tile of keys has at
    most 4096 elements, 8 kB. biased: by ALiBi or a window."""
    BLOCK_D = max(16, triton.next_power_of_2(D))
    BLOCK_Q = min(max(16, triton.next_power_of_2(rows)), 64)
    case = f"{BLOCK_Q} rows"
    if dtype == torch.float32 or not aligned:
        case = "slow loads"
    elif biased and BLOCK_Q > 16:
        case = "biased"
    most_rows, BLOCK_S, num_stages, maxnreg, four_warps = ATTENTION_TILES[case]
    BLOCK_Q = min(BLOCK_Q, most_rows)
    return dict(BLOCK_Q=BLOCK_Q, BLOCK_S=min(BLOCK_S, 4096 // BLOCK_D), BLOCK_D=BLOCK_D,
                num_warps=4 if BLOCK_Q * BLOCK_D <= four_warps else 8, num_stages=num_stages,
                TAIL_STAGES=2 if case == "slow loads" else 1,  # with 1 they would spill
                maxnreg=maxnreg)


def _programs_at_once(blocks, itemsize, gpu):
    """How many programs fit on a GPU by registers, 65536 per multiprocessor, and shared memory."""
    by_registers = 65536 // (32 * blocks["num_warps"] * (blocks["maxnreg"] or 255))
    rows = blocks["BLOCK_Q"] + 2 * blocks["BLOCK_S"] * blocks["num_stages"]
    by_memory = gpu.shared_memory_per_multiprocessor // (rows * blocks["BLOCK_D"] * itemsize)
    return gpu.multi_processor_count * max(min(by_registers, by_memory), 1)


@lru_cache
def _splits(rows, min_split, BLOCK_Q, grid_rows, at_once, fewest):
    """The number of splits, at least `fewest`, that is fastest for `rows` cache rows. Estimated
    time: waves * (rows of a split + 2 * BLOCK_Q for its partial sums + min_split for its start). A
    partial wave takes the latency of a full one but only its part of the bandwidth, hence the sum
    of both. The launch that combines splits counts as 192 rows."""
    def time(splits):
        waves = grid_rows * splits / at_once
        combine = 192 if splits > 1 else 0
        return (math.ceil(waves) + waves) * (rows / splits + 2 * BLOCK_Q + min_split) + combine
    return min(range(fewest, triton.cdiv(rows, min_split) + 1), key=time)


def tree_attention_reference(q, k_cache, v_cache, lengths, ancestors, scale=None, slopes=None,
                             window=0, slots=None):
    """`tree_attention` by the formula, in float32 or float64."""
    B, T, Hq, D = q.shape
    if slots is not None:
        k_cache, v_cache, lengths = (x[slots] for x in (k_cache, v_cache, lengths))
    S = min(int(lengths.max()) + T, k_cache.shape[2])  # no node sees later rows
    dtype = torch.promote_types(q.dtype, torch.float32)
    node = torch.arange(S, device=q.device) - lengths[:, None]  # (B, S), negative: committed
    bits = ancestors[:, :, None] >> torch.arange(64, device=q.device) & 1  # (B, T, 64)
    ancestor = bits.gather(2, node.clamp(0, 63)[:, None].expand(B, T, S))
    visible = (node < 0)[:, None] | (node < T)[:, None] & (ancestor == 1)  # (B, T, S)
    depth = (bits.sum(-1) - 1).clamp(min=0)  # (B, T)
    position = torch.where(node < 0, node, depth.gather(1, node.clamp(0, T - 1)))  # (B, S)
    distance = depth[:, :, None] - position[:, None]  # (B, T, S)
    if window:
        visible &= distance < window
    seen = visible.any(1)[:, None, :, None]  # the other rows may hold NaN, and 0 * NaN is NaN
    k, v = (torch.where(seen, x[:, :, :S], 0).to(dtype).repeat_interleave(Hq // x.shape[1], dim=1)
            for x in (k_cache, v_cache))  # (B, Hq, S, D)
    scores = q.to(dtype).transpose(1, 2) @ k.mT * (D ** -0.5 if scale is None else scale)
    if slopes is not None:
        scores = scores - slopes.to(dtype)[:, None, None] * distance[:, None]
    scores = scores.masked_fill(~visible[:, None], FINITE_MIN.value)  # (B, Hq, T, S)
    weights = scores.softmax(-1).masked_fill(~visible[:, None], 0)
    return (weights @ v).transpose(1, 2).to(q.dtype)  # (B, T, Hq, D)


# --------------------------------------------------------------------------------------------------
# project_topk and project_sample: one pass over the LM head
#
#   project_topk     logits = hidden @ weight.T; the k largest of logits - logsumexp(logits)
#   project_sample   argmax_t(logits_t / temperature + gumbel(seed, sequence, position, t)), which
#                    samples softmax(logits / temperature); at temperature 0 argmax_t(logits_t);
#                    with masks, over the tokens t whose bit t % 32 of word t // 32 is set
#
# Bytes: V * C elements of weight, read once. FLOPs: 2 * M * V * C. Two programs per multiprocessor
# walk the vocabulary in tiles, each with a running log-sum-exp and a list of its best tokens, and a
# small second kernel merges the lists. The logits are never stored. NaN counts as -inf there.
#
# The noise is a pure function of its arguments, computed where it is added. The splitmix64
# finalizer turns (seed, sequence, position) into a 64-bit key per row. The 32-bit finalizer
# lowbias32 then runs per token. One half of the key is mixed in before its multiplications, the
# other between them: with one half alone, a row's noise could be a permutation of another's.

@triton.jit
def _splitmix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def load_noise_key(seed_ptr, sequence_ptr, position_ptr, b, m):
    """The 64-bit noise key of row m in sequence b, as two uint32."""
    key = _splitmix64(tl.load(seed_ptr + b).to(tl.uint64) + 0x9E3779B97F4A7C15)
    key = _splitmix64(key + tl.load(sequence_ptr + b).to(tl.int64).to(tl.uint64))
    key = _splitmix64(key + tl.load(position_ptr + m).to(tl.int64).to(tl.uint64))
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def _gumbel(low, high, tokens):
    """`gumbel` from row keys (low, high) and tokens, all uint32."""
    key = tokens ^ low
    key = (key ^ (key >> 16)) * 0x7FEB352D
    key = key ^ high
    key = (key ^ (key >> 15)) * 0x846CA68B
    key = key ^ (key >> 16)
    uniform = ((key >> 8) | 1).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
    return -tl.log(-tl.log(uniform))


@triton.jit
def add_noise(x, temperature, low, high, tokens):
    """x + `gumbel`, or x at temperature 0."""
    return tl.where(temperature > 0, x + _gumbel(low, high, tokens), x)


def gumbel(seed, sequence, position, tokens):
    """Gumbel noise float32 [M, n], the same on every machine except for the logarithm's rounding.
    seed: up to 64 bits, or int64 [B]. sequence: a number per sequence, int [B]; each sequence has
    M / B rows. position: int [M]. tokens: int [n]."""
    # mixed one by one, so that seed 1, sequence 0 differs from seed 0, sequence 1
    key = _splitmix64_torch(filled(seed, position) - 0x61C8864680B583EB)
    key = _splitmix64_torch(key + sequence.long())  # (B,)
    key = _splitmix64_torch(per_row(key, position) + position.long()[:, None])  # (M, 1)
    x = (tokens ^ key) & 0xFFFFFFFF  # (M, n), of 32 bits
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (key >> 32)) & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
    x = (x ^ (x >> 16)) >> 8 | 1
    return -(-(x.float() * 2.0 ** -24).log()).log()  # odd / 2^24: never 0 and never 1


def _splitmix64_torch(x):
    """`_splitmix64` on int64: the masks remove the copies of the sign bit that >> makes."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def filled(x, rows, B=1):
    """A number or a tensor [B] -> a contiguous tensor [B] on the device of `rows`."""
    if isinstance(x, torch.Tensor):
        return x.contiguous()
    x = (x + 2**63) % 2**64 - 2**63 if isinstance(x, int) else x  # wraps an unsigned seed
    return torch.full((B,), x, device=rows.device)


def per_row(x, rows):
    """A number, or a tensor [B] with one per M / B rows -> [M, 1]. rows: [M, ...]."""
    x = filled(x, rows)
    return x.repeat_interleave(len(rows) // len(x))[:, None]


@triton.jit
def allowed(masks_ptr, row, columns, V):
    """Whether these columns' bits are set in a row of masks; not beyond V."""
    words = masks_ptr + row.to(tl.int64) * ((V + 31) // 32) + columns // 32
    return (tl.load(words, mask=columns < V, other=0) >> columns % 32) & 1 != 0


def mask_logits(logits, masks):
    """logits [M, V] with -inf for NaN and for the tokens that masks forbid, int32 [M, ceil(V / 32)]
    with a bit for each token; None: allow all."""
    logits = logits.nan_to_num(-math.inf, math.inf, -math.inf)
    if masks is None:
        return logits
    bits = masks[:, :, None] >> torch.arange(32, dtype=torch.int32, device=masks.device)
    forbidden = (bits & 1 == 0).flatten(1)[:, :logits.shape[1]]
    return logits.masked_fill(forbidden, -math.inf)


@triton.jit
def sortable(x):
    """float32 -> int32 in the same order."""
    bits = tl.where(x == 0.0, 0, x.to(tl.int32, bitcast=True))  # -0.0 is 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_sortable(order):
    """The inverse of `sortable`."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pack_entries(scores, columns):
    """int64 entries, ordered by score; of equal scores the lower column is larger."""
    return (sortable(scores).to(tl.int64) << 32) | (columns ^ NO_TOKEN)


@triton.jit
def _take_best(entries, best):
    """Merges a tile's entries [rows, n] into each row's list of its best, [rows, k], in any order.
    A round replaces the least of a list by the largest of the tile; the first tile takes k."""
    largest = tl.max(entries, 1)
    if best.shape[1] == 1:
        return tl.maximum(best, largest[:, None])
    least = tl.min(best, 1)
    while tl.max((largest > least).to(tl.int32), 0) > 0:
        best = tl.where(best == least[:, None], tl.maximum(best, largest[:, None]), best)
        largest = tl.max(tl.where(entries < largest[:, None], entries, NO_ENTRY), 1)
        least = tl.min(best, 1)
    return best


@triton.jit
def load_rows(
    weight, rows, start, N, dtype: tl.constexpr, C: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The tile [BLOCK_N, BLOCK_C] of a weight [N, C]: these rows, columns start, start + 1, ..."""
    weight_ptr, stride_n, stride_c = weight
    columns = (start + tl.arange(0, BLOCK_C)).to(tl.int64)[None, :]
    inside = (columns < C) | (C % BLOCK_C == 0)
    row = tl.minimum(rows, N - 1).to(tl.int64)[:, None]
    return tl.load(weight_ptr + row * stride_n + columns * stride_c, mask=inside, other=0)


def reader(x, weight):
    """How kernels multiply x [M, C] by a weight [N, C] -> (x, a Triton function like `load_rows`,
    what it reads, its FORMAT). A backend's weight, as `linear.Quantized`, brings its own."""
    if isinstance(weight, torch.Tensor):
        return x, load_rows, (weight, *strides(weight)), None
    return weight.reader(x)


@triton.jit(do_not_specialize=["M", "T", "programs"])
def _project_kernel(
    hidden_ptr, weight, vocab_ids_ptr, temperature_ptr, seed_ptr, sequence_ptr, position_ptr,
    masks_ptr, entries_ptr, lse_ptr, stride_hm, stride_hc, programs, M, T, V, C: tl.constexpr,
    BLOCK_K: tl.constexpr, DRAFTS: tl.constexpr, LOAD: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """Program (tile of rows; p): the k best and the log-sum-exp of vocabulary tiles p, p +
    programs, ... One loop over (tile, channels) loads the next weights during a search. LOAD,
    FORMAT: from `reader`. DRAFTS: temperature multiplies the noise, instead of dividing scores."""
    program = tl.program_id(1)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = m < M
    row = tl.minimum(m, M - 1)[:, None]
    hidden_ptrs = hidden_ptr + row.to(tl.int64) * stride_hm
    slots = tl.arange(0, BLOCK_K).to(tl.int64)[None, :]
    # Empty slots hold NO_ENTRY, NO_ENTRY + 1, ...: a round finds the slot to replace by its entry.
    best = tl.full([BLOCK_M, BLOCK_K], NO_ENTRY, tl.int64) + slots
    row_max = tl.full([BLOCK_M], FINITE_MIN, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if sequence_ptr is not None:
        low, high = load_noise_key(seed_ptr, sequence_ptr, position_ptr, row // T, row)

    # Hopper's wide tensor-core instructions need 64 rows or more in the first operand, so few
    # hidden states are the second.
    VOCABULARY_FIRST: tl.constexpr = BLOCK_M < 32
    CHUNKS: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    acc = tl.zeros([BLOCK_V, BLOCK_M] if VOCABULARY_FIRST else [BLOCK_M, BLOCK_V], tl.float32)
    tiles = tl.cdiv(tl.cdiv(V, BLOCK_V) - program, programs)
    for step in range(0, tiles * CHUNKS):
        tile_start = (program + step // CHUNKS * programs) * BLOCK_V
        column = tile_start + tl.arange(0, BLOCK_V)
        output = tl.minimum(column, V - 1)
        start = step % CHUNKS * BLOCK_C
        channels = (start + tl.arange(0, BLOCK_C)).to(tl.int64)[None, :]
        inside = (channels < C) | (C % BLOCK_C == 0)
        # [BLOCK_V, BLOCK_C]
        rows = LOAD(weight, column, start, V, hidden_ptr.dtype.element_ty, C, FORMAT, BLOCK_C)
        # [BLOCK_M, BLOCK_C]
        hidden = tl.load(hidden_ptrs + channels * stride_hc, mask=inside, other=0.0)
        if VOCABULARY_FIRST:  # [BLOCK_V, BLOCK_M] += [BLOCK_V, BLOCK_C] @ [BLOCK_C, BLOCK_M]
            acc = dot(rows, tl.trans(hidden), acc)
        else:  # [BLOCK_M, BLOCK_V] += [BLOCK_M, BLOCK_C] @ [BLOCK_C, BLOCK_V]
            acc = dot(hidden, tl.trans(rows), acc)
        if step % CHUNKS == CHUNKS - 1:
            # [BLOCK_M, BLOCK_V]
            scores = tl.trans(acc) if VOCABULARY_FIRST else acc
            scores = tl.where((column < V)[None, :] & (scores == scores), scores, float("-inf"))
            if masks_ptr is not None:
                scores = tl.where(allowed(masks_ptr, row, column[None, :], V), scores,
                                  float("-inf"))
            acc = tl.zeros(acc.shape, tl.float32)
            if sequence_ptr is not None:
                token = output
                if vocab_ids_ptr is not None:
                    token = tl.load(vocab_ids_ptr + output)
                ids = token.to(tl.uint32)[None, :]
                temperature = tl.load(temperature_ptr + row // T)  # late, to save registers
                if DRAFTS:
                    scores += temperature * _gumbel(low, high, ids)
                else:
                    scores /= tl.where(temperature > 0, temperature, 1.0)
                    scores = add_noise(scores, temperature, low, high, ids)
            if lse_ptr is not None:
                new_max = tl.maximum(row_max, tl.max(scores, 1))
                row_sum *= tl.exp(row_max - new_max)
                row_sum += tl.sum(tl.exp(scores - new_max[:, None]), 1)
                row_max = new_max
            best = _take_best(pack_entries(scores, column[None, :]), best)

    lists = m * programs + program
    if lse_ptr is not None:
        tl.store(lse_ptr + lists, row_max + tl.log(row_sum), mask=row_mask)
    tl.store(entries_ptr + lists[:, None] * BLOCK_K + slots, best, mask=row_mask[:, None])


@triton.jit(do_not_specialize=["programs", "n", "k"])
def _merge_lists_kernel(
    entries_ptr, lse_ptr, vocab_ids_ptr, logprobs_ptr, tokens_ptr, programs, n, k,
    BLOCK_ENTRIES: tl.constexpr,
):
    """Program m: the k best of the n entries of row m's lists; ties go to the lowest column."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK_ENTRIES)
    entries = tl.load(entries_ptr + row * n + index, mask=index < n, other=NO_ENTRY)
    if lse_ptr is not None:
        # [BLOCK_ENTRIES], one per program
        lse = tl.load(lse_ptr + row * programs + index, mask=index < programs, other=float("-inf"))
        max_lse = tl.max(lse, 0)
        lse = max_lse + tl.log(tl.sum(tl.exp(lse - max_lse), 0))
    for slot in range(0, k):
        entry = tl.max(entries, 0)
        entries = tl.where(entries == entry, NO_ENTRY, entries)
        token = entry.to(tl.int32) ^ NO_TOKEN
        if vocab_ids_ptr is not None:
            token = tl.load(vocab_ids_ptr + token)
        tl.store(tokens_ptr + row * k + slot, token.to(tl.int64))
        if lse_ptr is not None:
            logprob = from_sortable((entry >> 32).to(tl.int32)) - lse
            tl.store(logprobs_ptr + row * k + slot, logprob)


def _project_triton(hidden, weight, k, vocab_ids=None, logprobs=None, noise=(None,) * 4,
                    masks=None):
    """Launches both kernels -> tokens [M, k]; fills logprobs [M, k] unless None."""
    M, C = hidden.shape
    vocab_ids = contiguous(vocab_ids)
    T = 1 if noise[0] is None else M // len(noise[0])
    V = weight.shape[0]
    hidden, load, weight, layout = reader(hidden, weight)
    multiprocessors = _gpu(hidden.device).multi_processor_count
    blocks = _project_blocks(
        M, k, hidden.dtype, _aligned(hidden, weight[0]),
        small_vocabulary=V < 128 * multiprocessors, noisy=noise[0] is not None,
        unpacks=load is not load_rows, masked=masks is not None)
    m_tiles = triton.cdiv(M, blocks["BLOCK_M"])
    tiles = triton.cdiv(V, blocks["BLOCK_V"])
    at_once = min(max(2 * multiprocessors // m_tiles, 1), 512)  # the merge takes up to 512 lists
    programs = triton.cdiv(tiles, triton.cdiv(tiles, at_once))  # tile counts differ by at most 1
    BLOCK_K = triton.next_power_of_2(k)  # entries of a list
    entries = hidden.new_empty((M, programs, BLOCK_K), dtype=torch.int64)
    tokens = hidden.new_empty((M, k), dtype=torch.int64)
    lse = None if logprobs is None else logprobs.new_empty(M, programs)
    n = programs * BLOCK_K
    BLOCK_ENTRIES = triton.next_power_of_2(n)
    launch(_project_kernel, (m_tiles, programs),
           hidden, weight, vocab_ids, *noise, masks, entries, lse, *strides(hidden), programs,
           M, T, V, C=C, BLOCK_K=BLOCK_K, DRAFTS=logprobs is not None, LOAD=load, FORMAT=layout,
           **blocks)
    launch(_merge_lists_kernel, (M,),
           entries, lse, vocab_ids, logprobs, tokens, programs, n, k,
           BLOCK_ENTRIES=BLOCK_ENTRIES, num_warps=_num_warps(BLOCK_ENTRIES, 512))
    return tokens


PROJECT_TILES = {
    # case: BLOCK_M, BLOCK_V, BLOCK_C, num_stages
    "slow loads": (64, 64, 32, 3),          # float32, unaligned rows
    "vocabulary": (64, 128, 64, 4),         # 16 kB of weights
    "small vocabulary": (64, 64, 64, 6),    # 8 kB, so that all multiprocessors have a tile
    "many rows": (128, 128, 64, 3),         # compute-bound
    "many rows, narrow": (128, 64, 64, 3),  # faster for argmax of 128; noise, unpacking would spill
}


def _project_blocks(M, k, dtype, aligned, small_vocabulary, noisy, unpacks, masked):
    """Tile sizes and launch options; `pytest -m static` compiles every case. unpacks: quantised
    weights, which takes registers, as masks do."""
    rows = max(16, triton.next_power_of_2(M))
    case = "vocabulary"
    if dtype == torch.float32 or not aligned:
        case = "slow loads"
    elif rows > 64:
        narrow = small_vocabulary or noisy or unpacks or (k == 1 and rows == 128)
        case = "many rows, narrow" if narrow else "many rows"
    elif small_vocabulary or (noisy and rows == 64 and 1 < k <= 8):  # noise would spill
        case = "small vocabulary"
    most_rows, BLOCK_V, BLOCK_C, num_stages = PROJECT_TILES[case]
    BLOCK_M = min(rows, most_rows)
    if BLOCK_M == 64 and case != "slow loads":
        num_stages -= 1  # for the hidden states of 64 rows
    maxnreg = 255 if BLOCK_M < 64 or unpacks else None
    if case == "slow loads" and not masked:
        maxnreg = 168
    most_k = 4 if noisy and rows > 64 else 8
    if maxnreg is None and BLOCK_M * BLOCK_V <= 8192 and 1 < k <= most_k:
        maxnreg = 128  # two programs of 8 warps share a multiprocessor; more entries would spill
    return dict(BLOCK_M=BLOCK_M, BLOCK_V=BLOCK_V, BLOCK_C=BLOCK_C, num_stages=num_stages,
                num_warps=8 if BLOCK_M >= 64 else 4, maxnreg=maxnreg)


def _check_head(hidden, weight, temperature, seed, sequence, position, vocab_ids=None, masks=None):
    M, C = hidden.shape
    V = weight.shape[0]
    B = M if sequence is None else len(sequence)
    require(is_real(hidden) and fits(weight, hidden, (V, C)) and V > 0 and weight.shape[1] == C
            and M % B == 0 and fits(temperature, hidden, (B,), torch.float32)
            and fits(seed, hidden, (B,), torch.int64) and fits(sequence, hidden, (B,), *INTEGERS)
            and fits(position, hidden, (M,), *INTEGERS)
            and fits(vocab_ids, hidden, (V,), torch.int32)
            and fits(masks, hidden, (M, (V + 31) // 32), torch.int32), f"{SIZES}, M / B rows each",
            hidden, weight.shape, vocab_ids, masks, position, sequence, temperature, seed)


def project_topk(hidden, weight, k, vocab_ids=None, noise=None):
    """The k most likely tokens of each row of hidden [M, C], best first, ties by lower row ->
    (logprobs float32 [M, k], tokens int64 [M, k]). weight: [V, C]. vocab_ids int32 [V]: its rows'
    tokens, for a draft vocabulary (FR-Spec, arXiv 2502.14856). noise: (temperature, seed, sequence,
    position) as in `project_sample`: adds temperature * noise to the logits, which favours the
    tokens that the sampler will choose."""
    _check_head(hidden, weight, *([None] * 4 if noise is None else noise), vocab_ids)
    V = weight.shape[0]
    require(1 <= k <= min(V, 32), "1 <= k <= 32, and k <= V", k, V)
    if not runs_triton(hidden):
        return project_topk_reference(hidden, weight, k, vocab_ids, noise)
    logprobs = hidden.new_empty((len(hidden), k), dtype=torch.float32)
    noise = [None] * 4 if noise is None else [filled(x, hidden, len(noise[2])) for x in noise]
    return logprobs, _project_triton(hidden, weight, k, vocab_ids, logprobs, noise)


def project_topk_reference(hidden, weight, k, vocab_ids=None, noise=None):
    return best_tokens(float_logits(hidden, weight), k, vocab_ids, noise)


def best_tokens(logits, k, vocab_ids=None, noise=None):
    """`project_topk` from logits [M, V]."""
    tokens = torch.arange(logits.shape[1], device=logits.device) if vocab_ids is None else vocab_ids
    if noise is not None:
        temperature, *key = noise
        logits = logits + per_row(temperature, logits) * gumbel(*key, tokens)
    logits = logits.nan_to_num(-math.inf, math.inf, -math.inf)  # NaN comes last
    columns = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return logits.log_softmax(-1).gather(1, columns), tokens[columns].long()


def project_sample(hidden, weight, temperature, seed, sequence, position, masks=None):
    """The model's next token for each row of hidden [M, C] -> int64 [M]: argmax at temperature 0,
    otherwise a sample; ties go to the lowest id. weight: [V, C]. temperature: a number or float32
    [B]. masks: as in `mask_logits`. The rest as in `gumbel`."""
    _check_head(hidden, weight, temperature, seed, sequence, position, masks=masks)
    if not runs_triton(hidden):
        return project_sample_reference(hidden, weight, temperature, seed, sequence, position,
                                        masks)
    noise = [None] * 4
    if isinstance(temperature, torch.Tensor) or temperature:
        noise = [filled(x, hidden, len(sequence)) for x in (temperature, seed, sequence, position)]
    return _project_triton(hidden, weight, 1, noise=noise, masks=contiguous(masks))[:, 0]


def project_sample_reference(hidden, weight, temperature, seed, sequence, position, masks=None):
    logits = mask_logits(float_logits(hidden, weight), masks)
    return gumbel_argmax(logits, temperature, seed, sequence, position)


def sample_filtered(logits, *, temperature, top_k, top_p, min_p, seed, sequence, position,
                    masks=None):
    """`gumbel_argmax` of the tokens that masks and `filter_logits` keep. logits: [M, V].
    Parameters: numbers or tensors [B]; position [M]."""
    logits = filter_logits(mask_logits(logits, masks), top_k, top_p, min_p, temperature)
    return gumbel_argmax(logits, 1.0 * (temperature > 0), seed, sequence, position)


def gumbel_argmax(logits, temperature, seed, sequence, position):
    """Samples softmax(logits / temperature) for logits [M, V] -> int64 [M]; at temperature 0 the
    first argmax."""
    if not isinstance(temperature, torch.Tensor) and temperature == 0:
        return logits.argmax(-1)
    tokens = torch.arange(logits.shape[1], device=logits.device)
    noise = gumbel(seed, sequence, position, tokens) * (per_row(temperature, logits) > 0)
    return (filter_logits(logits.float(), temperature=temperature) + noise).argmax(-1)


def filter_logits(logits, top_k=0, top_p=1.0, min_p=0.0, temperature=1.0):
    """x = logits [M, V] / temperature (undivided at 0), with -inf for the tokens that are removed.
    Keeps the top_k largest; of these the fewest whose mass, the sum of exp(x), reaches top_p of the
    total (arXiv 1904.09751); of these the tokens with at least min_p times the largest mass (arXiv
    2407.01082). Ties with the last kept token are kept."""
    top_k, top_p, min_p, temperature = (
        per_row(x, logits) for x in (top_k, top_p, min_p, temperature))
    logits = logits / torch.where(temperature > 0, temperature, 1.0)
    V = logits.shape[1]
    if (top_k > 0).any():
        k = top_k.clamp(1, V)
        kth = logits.topk(int(k.max())).values.gather(1, k - 1)
        logits = logits.masked_fill((logits < kth) & (top_k > 0), -math.inf)
    if (top_p < 1).any():
        total = logits.logsumexp(dim=-1, keepdim=True)
        for n in (min(1024, V), V):  # the 1,024 likeliest, or all if some row needs more
            ranked = logits.topk(n).values
            probs = (ranked - total).exp()
            kept = probs.cumsum(dim=-1) - probs < top_p
            if not (kept[:, -1:] & (top_p < 1)).any():
                break
        last = (kept.sum(dim=-1, keepdim=True) - 1).clamp(min=0)  # if all is NaN, none is kept
        cut = ranked.gather(1, last)
        logits = logits.masked_fill((logits < cut) & (top_p < 1), -math.inf)
    if (min_p > 0).any():
        cut = logits.amax(dim=-1, keepdim=True) + min_p.double().log().to(logits.dtype)
        logits = logits.masked_fill(logits < cut, -math.inf)
    return logits


def float_logits(hidden, weight):
    """Logits [M, V] in float32: rounding would cause ties."""
    if not isinstance(weight, torch.Tensor):
        weight = weight.values(hidden.dtype)
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return (weight.float() @ hidden.float().T).T.contiguous()  # twice as fast on a CPU for small M


# --------------------------------------------------------------------------------------------------
# commit_path
#
#   kv[:, :, b, :, lengths[b] + j] = old kv[:, :, b, :, lengths[b] + path[b, j]]  for j < count[b]
#
# Bytes: 2 * L * Hkv * D elements read and written per moved row. One launch moves all layers.

@triton.jit(do_not_specialize=["P", "S", "Hkv"])
def _commit_path_kernel(
    kv_ptr, lengths_ptr, path_ptr, count_ptr, slots_ptr,
    stride_kvl, stride_kvside, stride_kvb, stride_kvh, stride_kvs, stride_kvd, P, S, Hkv,
    D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Program (sequence and kv head; layer, keys or values): moves rows of one [S, D] slice."""
    b = (tl.program_id(0) // Hkv).to(tl.int64)
    slot = slot_of(slots_ptr, b)
    head = (tl.program_id(0) % Hkv).to(tl.int64)
    layer = (tl.program_id(1) // 2).to(tl.int64)
    side = (tl.program_id(1) % 2).to(tl.int64)
    index = tl.arange(0, BLOCK_P)
    dims = tl.arange(0, BLOCK_D).to(tl.int64)
    valid = (index < P) & (index < tl.load(count_ptr + b))
    nodes = tl.load(path_ptr + b * P + index, mask=valid, other=0).to(tl.int64)  # [BLOCK_P]
    target = tl.load(lengths_ptr + slot).to(tl.int64) + index
    source = target - index + nodes
    moved = valid & (nodes != index) & (target >= 0) & (target < S) & (source >= 0) & (source < S)
    moved = moved[:, None] & (dims < D)[None, :]
    slice_ptr = kv_ptr + layer * stride_kvl + side * stride_kvside
    slice_ptr = slice_ptr + slot * stride_kvb + head * stride_kvh
    slice_ptrs = slice_ptr + dims[None, :] * stride_kvd
    tile = tl.load(slice_ptrs + source[:, None] * stride_kvs, mask=moved)  # [BLOCK_P, BLOCK_D]
    tl.debug_barrier()  # all warps read before any writes: a target may be another row's source
    tl.store(slice_ptrs + target[:, None] * stride_kvs, tile, mask=moved)


def commit_path(kv, lengths, path, count, slots=None):
    """Moves the accepted nodes' keys and values to the front of their tree, in place, in all layers
    of kv [L, 2, B, Hkv, S, D]. path [B, P]: ascending nodes from 0; the first count[b] are used.
    slots: as in `tree_attention`."""
    L, sides, n_slots, Hkv, S, D = kv.shape
    B, P = path.shape
    require(is_real(kv) and sides == 2 and fits(lengths, kv, (n_slots,), torch.int32)
            and fits(path, kv, (B, P), *INTEGERS) and fits(count, kv, (B,), *INTEGERS)
            and fits_slots(slots, kv, B, n_slots) and P <= 64, f"{SIZES}, P <= 64", kv, lengths,
            path, count, slots)
    if not runs_triton(kv):
        return commit_path_reference(kv, lengths, path, count, slots)
    BLOCK_P, BLOCK_D = map(triton.next_power_of_2, (P, D))
    inputs = map(contiguous, (lengths, path, count, slots))
    launch(_commit_path_kernel, (B * Hkv, L * 2), kv, *inputs, *kv.stride(),
           P, S, Hkv, D=D, BLOCK_P=BLOCK_P, BLOCK_D=BLOCK_D,
           num_warps=_num_warps(BLOCK_P * BLOCK_D, 1024))


def commit_path_reference(kv, lengths, path, count, slots=None):
    index = torch.arange(path.shape[1], device=kv.device)
    moved = (path != index) & (index < count[:, None])  # (B, P)
    b, index = moved.nonzero(as_tuple=True)  # (moved rows,) each
    slot = b if slots is None else slots[b]
    target = lengths[slot] + index
    source = lengths[slot] + path[b, index]
    kv[:, :, slot, :, target] = kv[:, :, slot, :, source]  # (moved rows, L, 2, Hkv, D)


# --------------------------------------------------------------------------------------------------
# add_norm
#
#   sum = x + delta
#   RMSNorm (arXiv 1910.07467)    normed = sum * rsqrt(mean(sum^2) + eps) * weight
#   LayerNorm (arXiv 1607.06450)  normed = (sum - mean(sum)) * rsqrt(var(sum) + eps) * weight + bias
#
# Bytes: 4 * M * C elements: x and delta read, sum and normed written.

@triton.jit
def _add_norm_kernel(
    x_ptr, delta_ptr, weight_ptr, bias_ptr, sum_ptr, normed_ptr, eps,
    C: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """Program m: row m."""
    columns = tl.arange(0, BLOCK_C)
    mask = columns < C
    offsets = tl.program_id(0).to(tl.int64) * C + columns
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_C]
    if weight_ptr is not None:  # loaded before the reductions, which wait for x
        weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if delta_ptr is not None:
        x += tl.load(delta_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + offsets, rounded, mask=mask)
        x = rounded.to(tl.float32)
    if bias_ptr is not None:
        x = tl.where(mask, x - tl.sum(x, 0) / C, 0.0)
    x *= tl.rsqrt(tl.sum(x * x, 0) / C + eps)
    if weight_ptr is not None:
        x *= weight
    if bias_ptr is not None:
        x += bias
    tl.store(normed_ptr + offsets, x.to(normed_ptr.dtype.element_ty), mask=mask)


def add_norm(x, delta, weight, bias=None, eps=1e-5):
    """Residual add, then norm -> (norm(x + delta), x + delta), each [..., C]. delta: None for 0.
    weight [C]: None for ones. bias [C]: selects LayerNorm; None: RMSNorm."""
    C = x.shape[-1]
    require(is_real(x) and C <= 16384 and fits(delta, x, x.shape)
            and all(fits(p, x, (C,), x.dtype, torch.float32) for p in (weight, bias)),
            f"{SIZES}, C <= 16384", x, delta, weight, bias)
    if not runs_triton(x, delta, weight, bias):
        return add_norm_reference(x, delta, weight, bias, eps)
    x, delta, weight, bias = map(contiguous, (x, delta, weight, bias))
    total = x if delta is None else torch.empty_like(x)
    normed = torch.empty_like(x)
    BLOCK_C = triton.next_power_of_2(C)
    launch(_add_norm_kernel, (x.numel() // C,), x, delta, weight, bias, total, normed, eps,
           C=C, BLOCK_C=BLOCK_C, num_warps=_num_warps(BLOCK_C, 512))
    return normed, total


def add_norm_reference(x, delta, weight, bias=None, eps=1e-5):
    x = x if delta is None else x + delta
    if bias is not None:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps), x
    weight = None if weight is None else weight.to(x.dtype)
    return F.rms_norm(x, x.shape[-1:], weight, eps), x


# --------------------------------------------------------------------------------------------------
# rope_cache
#
#   RMSNorm of each query and key head, times q_weight and k_weight, if given
#   RoPE (arXiv 2104.09864): (x, y) -> (x cos - y sin, y cos + x sin) for the halves x, y of a head
#   keys and values of token t of sequence b -> cache row lengths[b] + t
#
# Bytes: B * T * (Hq + 2 * Hkv) * D elements, read and written. Queries are updated in place.

def rotate(x, rope):
    """Rotates x [B, T, H, D] by rope [B, T, 2, D]: cos, and sin with its first half negated."""
    cos, sin = rope.split(1, dim=2)  # (B, T, 1, D)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


@triton.jit(do_not_specialize=["T", "S", "Hq", "Hkv"])
def _rope_cache_kernel(
    qkv_ptr, rope_ptr, q_weight_ptr, k_weight_ptr, kv_ptr, lengths_ptr, slots_ptr,
    stride_qb, stride_qt, stride_qh, stride_qd,
    stride_kvside, stride_kvb, stride_kvh, stride_kvs, stride_kvd,
    eps, T, S, Hq, Hkv, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Program (token; block of heads): two tiles, the first and second halves of the heads."""
    HALF: tl.constexpr = (D + 1) // 2  # D may be odd without rope
    token = tl.program_id(0).to(tl.int64)
    b = token // T
    t = token % T
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
    is_query = head < Hq
    is_value = head >= Hq + Hkv
    dims = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    low_mask = (head < Hq + 2 * Hkv) & (dims < HALF)
    high_mask = low_mask & (dims + HALF < D)
    # [BLOCK_H, BLOCK_D]
    head_ptrs = qkv_ptr + b * stride_qb + t * stride_qt + head * stride_qh
    slot = slot_of(slots_ptr, b)
    row = tl.load(lengths_ptr + slot).to(tl.int64) + t
    low = tl.load(head_ptrs + dims * stride_qd, mask=low_mask, other=0.0)
    high = tl.load(head_ptrs + (dims + HALF) * stride_qd, mask=high_mask, other=0.0)
    x = low.to(tl.float32)
    y = high.to(tl.float32)
    if q_weight_ptr is not None:
        scale = tl.rsqrt(tl.sum(x * x + y * y, 1) / D + eps)[:, None]
        weight_ptrs = tl.where(is_query, q_weight_ptr + dims, k_weight_ptr + dims)
        x *= scale * tl.load(weight_ptrs, mask=low_mask, other=0.0).to(tl.float32)
        y *= scale * tl.load(weight_ptrs + HALF, mask=high_mask, other=0.0).to(tl.float32)
    if rope_ptr is not None:
        cos_ptrs = rope_ptr + 2 * token * D + dims
        cos = tl.load(cos_ptrs, mask=dims < HALF, other=0.0).to(tl.float32)
        sin = tl.load(cos_ptrs + D + HALF, mask=dims < HALF, other=0.0).to(tl.float32)
        x, y = x * cos - y * sin, y * cos + x * sin
    low = tl.where(is_value, low, x.to(low.dtype))
    high = tl.where(is_value, high, y.to(low.dtype))

    tl.store(head_ptrs + dims * stride_qd, low, mask=low_mask & is_query)
    tl.store(head_ptrs + (dims + HALF) * stride_qd, high, mask=high_mask & is_query)
    cached = (head >= Hq) & (row >= 0) & (row < S)
    kv_head = tl.where(is_value, head - Hkv, head) - Hq
    row_ptrs = kv_ptr + is_value.to(tl.int64) * stride_kvside + slot * stride_kvb
    row_ptrs = row_ptrs + kv_head * stride_kvh + row * stride_kvs
    tl.store(row_ptrs + dims * stride_kvd, low, mask=low_mask & cached)
    tl.store(row_ptrs + (dims + HALF) * stride_kvd, high, mask=high_mask & cached)


def rope_cache(qkv, rope, kv, lengths, q_weight=None, k_weight=None, eps=1e-5, slots=None):
    """Applies RoPE to queries and keys and writes keys and values to cache rows lengths, lengths +
    1, ... -> the queries [B, T, Hq, D], a view of qkv. qkv [B, T, H, D]: H = Hq + 2 Hkv query, key
    and value heads in this order; queries are overwritten. rope: as in `rotate`, or None. kv [2, B,
    Hkv, S, D]: a layer's cache. q_weight, k_weight [D]: RMSNorm. slots: as in `tree_attention`."""
    B, T, H, D = qkv.shape
    _, n_slots, Hkv, S, _ = kv.shape
    require(is_real(qkv) and fits(kv, qkv, (2, n_slots, Hkv, S, D))
            and fits(rope, qkv, (B, T, 2, D)) and fits(lengths, qkv, (n_slots,), *INTEGERS)
            and fits_slots(slots, qkv, B, n_slots)
            and fits(q_weight, qkv, (D,)) and fits(k_weight, qkv, (D,))
            and (q_weight is None) == (k_weight is None)
            and H > 2 * Hkv and T <= S and (rope is None or D % 2 == 0),
            f"{SIZES}, H > 2 Hkv, T <= S, even D for a rotation, both weights or none",
            qkv, kv, rope, lengths, q_weight, k_weight, slots)
    if not runs_triton(qkv, kv):
        return rope_cache_reference(qkv, rope, kv, lengths, q_weight, k_weight, eps, slots)
    tables = map(contiguous, (rope, q_weight, k_weight))
    BLOCK_D = triton.next_power_of_2((D + 1) // 2)
    BLOCK_H = min(triton.next_power_of_2(H), 16, 1024 // BLOCK_D)
    launch(_rope_cache_kernel, (B * T, triton.cdiv(H, BLOCK_H)),
           qkv, *tables, kv, lengths.contiguous(), contiguous(slots), *strides(qkv),
           *strides(kv), eps, T, S, H - 2 * Hkv, Hkv, D=D, BLOCK_H=BLOCK_H, BLOCK_D=BLOCK_D,
           num_warps=4)
    return qkv[:, :, :H - 2 * Hkv]


def rope_cache_reference(qkv, rope, kv, lengths, q_weight=None, k_weight=None, eps=1e-5,
                         slots=None):
    B, T, H, D = qkv.shape
    Hkv = kv.shape[2]
    queries = qkv[:, :, :H - 2 * Hkv]  # (B, T, Hq, D)
    rotated = qkv[:, :, :H - Hkv]      # (B, T, Hq + Hkv, D): queries and keys
    new = qkv[:, :, H - 2 * Hkv:].view(B, T, 2, Hkv, D)  # keys and values
    if q_weight is not None:
        queries.copy_(F.rms_norm(queries, (D,), q_weight, eps))
        new[:, :, 0] = F.rms_norm(new[:, :, 0], (D,), k_weight, eps)
    if rope is not None:
        rotated.copy_(rotate(rotated, rope))
    slots = torch.arange(B, device=kv.device) if slots is None else slots
    rows = lengths[slots, None] + torch.arange(T, device=kv.device)  # (B, T)
    kv.permute(1, 3, 0, 2, 4)[slots[:, None], rows] = new
    return queries


# --------------------------------------------------------------------------------------------------
# glu: GLU variants (arXiv 2002.05202)
#
#   out = act(gate) * up for x = [gate, up]; bytes: 3 * M * N elements
#   SiLU: act(z) = z * sigmoid(z)
#   GELU, in its tanh approximation: act(z) = z * sigmoid(2 sqrt(2 / pi) (z + 0.044715 z^3))

@triton.jit
def activate(gate, GELU: tl.constexpr):
    """SiLU, or GELU in its tanh approximation."""
    z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    return gate * tl.sigmoid(z)


@triton.jit
def _glu_kernel(x_ptr, out_ptr, N, GELU: tl.constexpr, BLOCK_N: tl.constexpr):
    """Program (block of columns, row m)."""
    m = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = columns < N
    gate = tl.load(x_ptr + m * 2 * N + columns, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_N]
    up = tl.load(x_ptr + m * 2 * N + N + columns, mask=mask, other=0.0).to(tl.float32)
    out = activate(gate, GELU) * up
    tl.store(out_ptr + m * N + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


def glu(x, activation="silu"):
    """act(gate) * up for x [..., 2 N] = [gate, up] -> [..., N]. activation: "silu" or "gelu"."""
    require(is_real(x) and x.shape[-1] % 2 == 0 and activation in ("silu", "gelu"),
            f"{SIZES}, silu or gelu", x, activation)
    if not runs_triton(x):
        return glu_reference(x, activation)
    x = x.contiguous()
    N = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], N)
    launch(_glu_kernel, (out.numel() // N, triton.cdiv(N, 1024)),
           x, out, N, GELU=activation == "gelu", BLOCK_N=1024, num_warps=4)
    return out


def glu_reference(x, activation="silu"):
    gate, up = x.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


# --------------------------------------------------------------------------------------------------
# cosine_mix: the Attention Decoder of Clover (arXiv 2405.00263)
#
#   out = z + cos(q, k) * v per attention head, cos(q, k) = q . k / (|q| |k|)
#   bytes: 5 * M * C elements

@triton.jit
def _cosine_mix_kernel(z_ptr, q_ptr, kv_ptr, out_ptr, C, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Program (row m, head)."""
    m = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * D + tl.arange(0, BLOCK_D)
    mask = tl.arange(0, BLOCK_D) < D
    z = tl.load(z_ptr + m * C + columns, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_D]
    q = tl.load(q_ptr + m * C + columns, mask=mask, other=0.0).to(tl.float32)
    k = tl.load(kv_ptr + m * 2 * C + columns, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(kv_ptr + m * 2 * C + C + columns, mask=mask, other=0.0).to(tl.float32)
    norms = tl.maximum(tl.sqrt(tl.sum(q * q, 0)), 1e-8)
    norms *= tl.maximum(tl.sqrt(tl.sum(k * k, 0)), 1e-8)
    out_ptrs = out_ptr + m * C + columns
    out = z + tl.sum(q * k, 0) / norms * v
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


def cosine_mix(z, q, kv, n_head):
    """z + cos(q, k) * v per head -> [..., C]. z, q: [..., C]; kv [..., 2 C] = [k, v]."""
    *rows, C = z.shape
    D = C // max(n_head, 1)
    require(is_real(z) and fits(q, z, z.shape) and fits(kv, z, (*rows, 2 * C)) and D * n_head == C
            and D <= 16384, f"{SIZES}, n_head parts of at most 16384", z, q, kv, n_head)
    if not runs_triton(z, q, kv):
        return cosine_mix_reference(z, q, kv, n_head)
    z = z.contiguous()
    BLOCK_D = triton.next_power_of_2(D)
    out = torch.empty_like(z)
    launch(_cosine_mix_kernel, (z.numel() // C, n_head), z, q.contiguous(), kv.contiguous(), out,
           C, D=D, BLOCK_D=BLOCK_D, num_warps=_num_warps(BLOCK_D, 256))
    return out


def cosine_mix_reference(z, q, kv, n_head):
    q = q.unflatten(-1, (n_head, -1))                       # (..., n_head, C / n_head)
    k, v = kv.unflatten(-1, (2, n_head, -1)).unbind(-3)     # the same
    return z + (F.cosine_similarity(q, k, dim=-1).unsqueeze(-1) * v).flatten(-2)


# --------------------------------------------------------------------------------------------------
# Launching kernels

def runs_triton(*tensors):
    """Whether to run the kernel on these tensors: not in float64, not if a gradient is required."""
    x = tensors[0]
    if not (HAS_TRITON and (x.is_cuda or INTERPRETED.value) and x.dtype != torch.float64):
        return False
    return not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors))


@lru_cache
def _gpu(device):
    """Properties of a GPU; off CUDA, in tests, those of an H200 with fewer multiprocessors."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device)
    return SimpleNamespace(multi_processor_count=4, shared_memory_per_multiprocessor=233472)


def launch(kernel, grid, *args, **options):
    """Runs a kernel on the device of its first argument."""
    with torch.cuda.device_of(args[0]):
        kernel[grid](*args, **options)


def strides(x):
    """Strides, but 0 for dimensions of size 1: their strides must not specialise the kernel."""
    return tuple(stride if n > 1 else 0 for n, stride in zip(x.shape, x.stride()))


def _aligned(*tensors):
    """Whether rows can be loaded 16 bytes at a time: last stride 1, others multiples of 16."""
    return all(strides(x)[-1] == 1 and x.data_ptr() % 16 == 0
               and all(stride % 16 == 0 for stride in strides(x)[:-1]) for x in tensors)


def contiguous(x):
    return x if x is None else x.contiguous()


def _num_warps(elements, per_warp):
    return min(max(elements // per_warp, 1), 16)


# --------------------------------------------------------------------------------------------------
# Input checks. A step runs about a hundred, so messages are built only on failure.

SIZES = "sizes, dtypes and devices as documented"
INTEGERS = torch.int32, torch.int64


def require(condition, expected, *got):
    """Raises ValueError unless the condition holds, and describes what it was given."""
    if not condition:
        got = [f"{list(x.shape)} {x.dtype} on {x.device}" if isinstance(x, torch.Tensor) else str(x)
               for x in got]
        raise ValueError(f"expected {expected}; got {', '.join(got)}".replace("torch.", ""))


def is_real(x):
    """Whether a tensor holds floats of 16 bits or more, at least one."""
    return x.is_floating_point() and x.dtype.itemsize > 1 and x.numel() > 0


def fits(x, like, shape, *dtypes):
    """Whether a tensor has this shape, one of these dtypes (none: like's), and like's device. None
    and numbers fit."""
    return not isinstance(x, torch.Tensor) or (
        x.shape == shape and x.dtype in (dtypes or (like.dtype,)) and x.device == like.device)


def fits_slots(slots, like, B, n_slots):
    """Whether slots, or without them B sequences, are those of caches with n_slots."""
    return B == n_slots if slots is None else fits(slots, like, (B,), torch.int64)
