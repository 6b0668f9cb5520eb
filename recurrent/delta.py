"""The operations of gated delta layers (arXiv 2412.06464) over a draft tree, laid out like
kernels.py.

    tree_conv           causal convolution of a node's nearest ancestors, and SiLU
    tree_delta          the gated delta rule: every node sees the state and its own ancestors
    commit_delta        the state and the convolution's history after the accepted path

A token with decay exp(g) and rate beta changes the state S [Dk, Dv] of a head by

    S <- exp(g) S;   u = beta (v - S^T k);   S <- S + k u^T;   output S^T q

In a tree a node's S is its parent's. Nothing is rolled back: S after the accepted path is a sum
over the path's k and u, which verification has computed.

Letters: as in kernels.py; H value heads and Hk key heads, of sizes Dv and Dk; value head h reads
key head h % Hk. C channels, n inputs in a convolution's window. What verification stores for
`commit_delta` has R >= B rows of N >= T nodes."""

import torch
import torch.nn.functional as F

from kernels import (
    INTEGERS,
    SIZES,
    activate,
    contiguous,
    dot,
    fits,
    fits_slots,
    is_real,
    launch,
    require,
    runs_triton,
    slot_of,
    strides,
    tl,
    triton,
)

EPS = tl.constexpr(1e-6)  # added to the squared length of queries and keys


def gates(a, b, A, dt_bias):
    """(g, beta) of `tree_delta`: g = A softplus(a + dt_bias), the log of the decay, beta =
    sigmoid(b). a, b [..., H]; A [H] negative."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    return A * F.softplus(a.to(dtype) + dt_bias), b.to(dtype).sigmoid()


def unit(x, heads):
    """Key heads [..., Hk, D] -> the unit vectors that value heads read, [..., heads, D]."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    x = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS.value)
    return x.repeat(*[1] * (x.dim() - 2), heads // x.shape[-2], 1)


def nodes_seen(ancestors):
    """Bitmasks int64 [B, T] -> bool [B, T, T]: whether node i sees node j."""
    nodes = torch.arange(ancestors.shape[1], device=ancestors.device)
    return ancestors[:, :, None] >> nodes & 1 == 1


def nodes_used(x, ancestors):
    """x [B, T, ...] with zeros in place of nodes with an empty mask, which may hold NaN."""
    return torch.where((ancestors != 0).view(*ancestors.shape, *[1] * (x.dim() - 2)), x, 0)


def path_rows(x, path, count):
    """The nodes of x [L, R, N, ...] on paths [B, P] -> [L, B, P, ...]; zeros beyond count."""
    used = torch.arange(path.shape[1], device=path.device) < count[:, None]  # (B, P)
    b = torch.arange(len(path), device=path.device)[:, None]
    rows = x[:, b, torch.where(used, path, 0).long()]
    return torch.where(used.view(*used.shape, *[1] * (x.dim() - 3)), rows, 0)


def has_room(B, T, *kept):
    """Whether these tensors [R, N, ...] are contiguous, with R >= B and N >= T alike."""
    return all(x.is_contiguous() and len(x) >= B and x.shape[1] >= T
               and x.shape[:2] == kept[0].shape[:2] for x in kept)


# --------------------------------------------------------------------------------------------------
# tree_conv
#
#   out[b, i, c] = silu(sum_j weight[c, n - 1 - j] window_j[c]), window_0 = x[b, i], window_1 its
#   parent's row of x, ..., and beyond the root the rows of history[b], the last one first
#
# Bytes: 3 * T * C elements per sequence: x read, the output and a copy of x written.

@triton.jit(do_not_specialize=["T", "N"])
def _tree_conv_kernel(
    x_ptr, history_ptr, weight_ptr, inputs_ptr, ancestors_ptr, slots_ptr, out_ptr,
    stride_xb, stride_xt, stride_xc, stride_hs, stride_hn, stride_hc, stride_wc, stride_wn, T, N, C,
    WINDOW: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """Program (node, block of channels)."""
    row = tl.program_id(0).to(tl.int64)
    b = row // T
    channels = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    bits = tl.load(ancestors_ptr + row)
    mask = (channels < C) & (bits != 0)
    tree = tl.arange(0, 64)
    seen = ((bits >> tree) & 1) != 0
    x_ptr += b * stride_xb
    history_ptr += slot_of(slots_ptr, b) * stride_hs
    node = 64
    committed = WINDOW - 1
    acc = tl.zeros([BLOCK_C], tl.float32)
    for j in tl.static_range(WINDOW):
        node = tl.max(tl.where(seen & (tree < node), tree, -1), 0)  # the next ancestor, or -1
        committed -= (node < 0).to(tl.int32)
        x_ptrs = x_ptr + node.to(tl.int64) * stride_xt + channels * stride_xc
        history_ptrs = history_ptr + committed.to(tl.int64) * stride_hn + channels * stride_hc
        x = tl.load(tl.where(node < 0, history_ptrs, x_ptrs), mask=mask, other=0.0)  # [BLOCK_C]
        weight = tl.load(weight_ptr + channels * stride_wc + (WINDOW - 1 - j) * stride_wn,
                         mask=mask, other=0.0)
        if j == 0:
            tl.store(inputs_ptr + (b * N + row % T) * C + channels, x, mask=mask)
        acc += x.to(tl.float32) * weight.to(tl.float32)
    out = activate(acc, False)
    tl.store(out_ptr + row * C + channels, out.to(out_ptr.dtype.element_ty), mask=channels < C)


def tree_conv(x, history, weight, inputs, ancestors, slots=None):
    """Causal depthwise convolution of tree nodes, with SiLU: x [B, T, C] -> [B, T, C]. history
    [slots, n - 1, C]: the last committed inputs, zeros before the text. weight [C, n]. inputs [R,
    N, C]: x is copied to its rows [:B, :T]. ancestors, slots: as in `kernels.tree_attention`. A
    node with an empty mask is not read and gives zeros."""
    B, T, C = x.shape
    n_slots, n = len(history), weight.shape[1]
    require(is_real(x) and fits(history, x, (n_slots, n - 1, C)) and n > 1 and T <= 64
            and fits(weight, x, (C, n), x.dtype, torch.float32) and has_room(B, T, inputs)
            and fits(inputs, x, (*inputs.shape[:2], C))
            and fits(ancestors, x, (B, T), torch.int64) and fits_slots(slots, x, B, n_slots),
            f"{SIZES}, T <= 64, n > 1", x, history, weight, inputs, ancestors, slots)
    if not runs_triton(x, history, weight):
        return tree_conv_reference(x, history, weight, inputs, ancestors, slots)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    launch(_tree_conv_kernel, (B * T, triton.cdiv(C, 256)),
           x, history, weight, inputs, contiguous(ancestors), contiguous(slots), out, *strides(x),
           *strides(history), *strides(weight), T, inputs.shape[1], C, WINDOW=n, BLOCK_C=256,
           num_warps=2)
    return out


def tree_conv_reference(x, history, weight, inputs, ancestors, slots=None):
    B, T, C = x.shape
    n = weight.shape[1]
    inputs[:B, :T] = x
    dtype = torch.promote_types(x.dtype, torch.float32)
    history = history if slots is None else history[slots]
    rows = torch.cat((history, x), 1)  # (B, n - 1 + T, C)
    seen = F.pad(nodes_seen(ancestors), (n - 1, 0), value=True)  # (B, T, n - 1 + T)
    index = torch.where(seen, torch.arange(n - 1 + T, device=x.device), 0)
    index = index.sort(-1).values[..., -n:]  # (B, T, n): the last rows that the node sees
    window = rows[torch.arange(B, device=x.device)[:, None, None], index].to(dtype)
    out = F.silu((window * weight.T.to(dtype)).sum(2))
    return nodes_used(out, ancestors).to(x.dtype)


# --------------------------------------------------------------------------------------------------
# tree_delta
#
#   G_i = sum of g_j over i and its ancestors; of these, with q and k of length 1, q / sqrt(Dk):
#   u_i = beta_i (v_i - exp(G_i) S^T k_i - sum_{j != i} exp(G_i - G_j) (k_i . k_j) u_j)
#   out_i = exp(G_i) S^T q_i + sum_j exp(G_i - G_j) (q_i . k_j) u_j
#
# Bytes: Dk * Dv floats of S per sequence and head, read once. FLOPs: 4 * T per float of S, and
# 4 * T^2 * (Dk + Dv) per head. The u_j are solved for one after the other, parents first; what a
# node does not see counts 0 times. The other sums are by tensor cores, in the same tiles for all T.
# So a node's bits depend neither on other branches nor on T.

@triton.jit
def _dot(a, b, acc):
    """In float32 by three TF32 products, of the high bits of both and of low and high bits."""
    return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="tf32x3")


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), with the digits that 1 + small loses."""
    small = tl.exp(-tl.abs(x))
    total = 1.0 + small
    return tl.maximum(x, 0.0) + tl.log(total) + (small - (total - 1.0)) / total


@triton.jit(do_not_specialize=["T", "N", "H", "Hk"])
def _tree_delta_kernel(
    qkv_ptr, a_ptr, b_ptr, A_ptr, dt_bias_ptr, state_ptr, keys_ptr, u_ptr, G_ptr,
    ancestors_ptr, slots_ptr, out_ptr, stride_ab, stride_at, stride_ah,
    stride_ss, stride_sh, stride_sk, stride_sv, T, N, H, Hk, C,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):
    """Program (sequence and value head; tile of Dv). Columns of its tiles are the nodes' queries,
    then their keys: column BLOCK_T + j becomes u_j."""
    b = (tl.program_id(0) // H).to(tl.int64)
    head = (tl.program_id(0) % H).to(tl.int64)
    columns = tl.arange(0, 2 * BLOCK_T)
    is_key = columns >= BLOCK_T
    nodes = (columns % BLOCK_T).to(tl.int64)
    bits = tl.load(ancestors_ptr + b * T + nodes, mask=nodes < T, other=0)
    used = bits != 0
    values = (tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)).to(tl.int64)[:, None]
    inside = values < DV

    # -beta, or 1 for queries; the log decays, added up from the root
    a_ptr += b * stride_ab + head * stride_ah
    b_ptr += b * stride_ab + head * stride_ah
    beta = tl.load(b_ptr + nodes * stride_at, mask=used, other=0.0)
    factor = tl.where(is_key, -tl.sigmoid(beta.to(tl.float32)), 1.0)
    rate = tl.load(A_ptr + head)
    bias = tl.load(dt_bias_ptr + head)
    G = tl.zeros([2 * BLOCK_T], tl.float32)
    for node in range(0, T):
        g = rate * _softplus(tl.load(a_ptr).to(tl.float32) + bias)
        G += tl.where(((bits >> node) & 1) != 0, g, 0.0)
        a_ptr += stride_at

    # S^T [q, k], and the squared lengths of q and k
    qkv_ptr += b * T * C
    q_ptr = qkv_ptr + head % Hk * DK
    k_ptr = q_ptr + Hk * DK
    row_ptrs = tl.where(is_key, k_ptr, q_ptr) + nodes * C
    state_ptr += slot_of(slots_ptr, b) * stride_ss + head * stride_sh
    x = tl.zeros([BLOCK_V, 2 * BLOCK_T], tl.float32)
    squares = tl.zeros([16, 2 * BLOCK_T], tl.float32)
    first = tl.program_id(1) == 0
    kept = is_key & used & first & (head < Hk)
    for start in range(0, DK, BLOCK_K):
        dims = (start + tl.arange(0, BLOCK_K)).to(tl.int64)[None, :]
        state = tl.load(state_ptr + dims * stride_sk + values * stride_sv,
                        mask=inside & (dims < DK), other=0.0)  # [BLOCK_V, BLOCK_K]
        rows = tl.load(row_ptrs[:, None] + dims, mask=used[:, None] & (dims < DK), other=0.0)
        tl.store(keys_ptr + ((b * N + nodes) * Hk + head)[:, None] * DK + dims, rows,
                 mask=kept[:, None] & (dims < DK))
        rows = rows.to(tl.float32)
        x = _dot(state, tl.trans(rows), x)
        squares = _dot(tl.full([16, BLOCK_K], 1.0, tl.float32), tl.trans(rows * rows), squares)
    length = tl.rsqrt(tl.max(squares, 0) + EPS)  # tl.sum's order of sums would depend on T
    scale = tl.where(is_key, length, length * DK ** -0.5)
    x *= (scale * tl.exp(G) * factor)[None, :]
    v_ptr = qkv_ptr + 2 * Hk * DK + head * DV
    v = tl.load(v_ptr + nodes[None, :] * C + values, mask=inside & (used & is_key)[None, :],
                other=0.0)  # [BLOCK_V, 2 * BLOCK_T]
    x -= v.to(tl.float32) * factor[None, :]

    # weights [j, column]: how u_j counts there. u_j is final once all before it are added.
    for start_j in range(0, T, BLOCK_J):
        j = start_j + tl.arange(0, BLOCK_J)
        weights = tl.zeros([BLOCK_J, 2 * BLOCK_T], tl.float32)
        seen = ((bits[None, :] >> j[:, None]) & 1) != 0
        seen &= columns[None, :] != BLOCK_T + j[:, None]
        visible = tl.max(seen.to(tl.int32), 1) > 0
        for start in range(0, DK, BLOCK_K):
            dims = (start + tl.arange(0, BLOCK_K)).to(tl.int64)[None, :]
            keys = tl.load(k_ptr + j.to(tl.int64)[:, None] * C + dims,
                           mask=visible[:, None] & (dims < DK), other=0.0)
            rows = tl.load(row_ptrs[:, None] + dims, mask=used[:, None] & (dims < DK), other=0.0)
            weights = dot(keys, tl.trans(rows), weights)
        key = tl.minimum(BLOCK_T + j, 2 * BLOCK_T - 1)
        ratio = G[None, :] - tl.gather(G, key, 0)[:, None]
        weights *= tl.exp(tl.where(seen, ratio, float("-inf")))
        weights *= tl.gather(length, key, 0)[:, None] * (scale * factor)[None, :]
        for i in range(0, tl.minimum(T - start_j, BLOCK_J)):
            u = tl.sum(tl.where((columns == BLOCK_T + start_j + i)[None, :], x, 0.0), 1)
            weight = tl.sum(tl.where((j == start_j + i)[:, None], weights, 0.0), 0)
            x += u[:, None] * weight[None, :]

    mask = inside & (nodes < T)[None, :]
    out_ptrs = out_ptr + ((b * T + nodes) * H + head)[None, :] * DV + values
    tl.store(out_ptrs, x.to(out_ptr.dtype.element_ty), mask=mask & ~is_key[None, :])
    rows = (b * N + nodes) * H + head
    tl.store(u_ptr + rows[None, :] * DV + values, x, mask=mask & is_key[None, :])
    tl.store(G_ptr + rows, G, mask=(nodes < T) & is_key & first)


def tree_delta(qkv, a, b, A, dt_bias, state, keys, u, G, ancestors, slots=None):
    """The gated delta rule over a tree -> [B, T, H, Dv]. qkv [B, T, C]: of `tree_conv`, the queries
    and the keys of Hk heads, the values of H. a, b [B, T, H] and A, dt_bias float32 [H]: as in
    `gates`. state float32 [slots, H, Dk, Dv]. Written, in rows [:B, :T]: the keys to keys [R, N,
    Hk, Dk], the formula's u and G to float32 [R, N, H, Dv] and [R, N, H]. ancestors, slots: as in
    `tree_conv`."""
    B, T, C = qkv.shape
    n_slots, H, Dk, Dv = state.shape
    R, N, Hk = keys.shape[:3]
    exact = torch.promote_types(qkv.dtype, torch.float32)
    require(is_real(qkv) and C == 2 * Hk * Dk + H * Dv and H % Hk == 0
            and fits(a, qkv, (B, T, H)) and fits(b, qkv, (B, T, H))
            and fits(A, qkv, (H,), exact) and fits(dt_bias, qkv, (H,), exact)
            and fits(state, qkv, state.shape, exact) and fits(keys, qkv, (R, N, Hk, Dk))
            and fits(u, state, (R, N, H, Dv)) and fits(G, state, (R, N, H))
            and has_room(B, T, keys, u, G)
            and fits(ancestors, qkv, (B, T), torch.int64) and fits_slots(slots, qkv, B, n_slots)
            and T <= 64 and max(Dk, Dv) <= 256,
            f"{SIZES}, C = 2 Hk Dk + H Dv, H % Hk == 0, T <= 64, sizes up to 256",
            qkv, a, b, A, dt_bias, state, keys, u, G, ancestors, slots)
    if not runs_triton(qkv, a, b, A, dt_bias, state):
        return tree_delta_reference(qkv, a, b, A, dt_bias, state, keys, u, G, ancestors, slots)
    if strides(a) != strides(b):  # the kernel uses one set of strides for both
        a, b = a.contiguous(), b.contiguous()
    out = qkv.new_empty((B, T, H, Dv))
    launch(_tree_delta_kernel, (B * H, triton.cdiv(Dv, 32)),
           qkv.contiguous(), a, b, *map(contiguous, (A, dt_bias)), state, keys, u, G,
           *map(contiguous, (ancestors, slots)), out, *strides(a), *strides(state), T, N, H, Hk, C,
           DK=Dk, DV=Dv, BLOCK_T=max(8, triton.next_power_of_2(T)), BLOCK_J=16, BLOCK_K=32,
           BLOCK_V=32, num_warps=4 if T <= 32 else 8, num_stages=3 if T <= 32 else 2,
           maxnreg=255)
    return out


def tree_delta_reference(qkv, a, b, A, dt_bias, state, keys, u, G, ancestors, slots=None):
    B, T = ancestors.shape
    Hk, Dk = keys.shape[2:]
    H = len(A)
    state = state if slots is None else state[slots]  # (B, H, Dk, Dv)
    qkv, a, b = (nodes_used(x, ancestors) for x in (qkv, a, b))
    q, k, v = qkv.split((Hk * Dk, Hk * Dk, qkv.shape[2] - 2 * Hk * Dk), dim=-1)
    keys[:B, :T] = k.unflatten(-1, (Hk, Dk))
    q, k = (unit(x.unflatten(-1, (Hk, Dk)), H) for x in (q, k))
    q, k, v, g, beta = (x.transpose(1, 2) for x in (
        q * Dk ** -0.5, k, v.unflatten(-1, (H, -1)).to(k.dtype), *gates(a, b, A, dt_bias)))
    seen = nodes_seen(ancestors)[:, None]  # (B, 1, T, T)
    total = torch.where(seen, g[:, :, None], 0).sum(-1)  # G, (B, H, T)
    ratio = (total[..., None] - total[..., None, :]).masked_fill(~seen, -torch.inf).exp()
    decay = total.exp()[..., None]  # (B, H, T, 1)
    beta = beta[..., None]
    system = beta * ratio * (k @ k.mT)  # (B, H, T, T); solving does not read its diagonal
    solved = torch.linalg.solve_triangular(
        system, beta * (v - decay * (k @ state)), upper=False, unitriangular=True)
    out = decay * (q @ state) + ratio * (q @ k.mT) @ solved  # (B, H, T, Dv)
    u[:B, :T] = solved.transpose(1, 2)
    G[:B, :T] = total.transpose(1, 2)
    return nodes_used(out.transpose(1, 2), ancestors).to(qkv.dtype)


# --------------------------------------------------------------------------------------------------
# commit_delta
#
#   S <- exp(G_last) S + sum_j exp(G_last - G_j) k_j u_j^T over the path's nodes j
#   history <- the last n - 1 rows of history and the path's inputs
#
# Bytes: Dk * Dv floats of S per layer, sequence and head, read and written. One launch moves all.

@triton.jit
def _commit_history(
    history_ptr, inputs_ptr, path_ptr, count, stride_hn, channels, C,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Moves some channels of a sequence's history. history_ptr, channels [1, BLOCK_C]."""
    target = tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
    source = target + count  # of the history's rows, then the path's
    on_path = source >= ROWS
    nodes = tl.load(path_ptr + source - ROWS, mask=(target < ROWS) & on_path, other=0)
    inputs_ptrs = inputs_ptr + nodes.to(tl.int64) * C + channels
    mask = (target < ROWS) & (channels < C)
    rows = tl.load(tl.where(on_path, inputs_ptrs, history_ptr + source * stride_hn), mask=mask)
    tl.debug_barrier()  # all warps read before any writes: a target may be another row's source
    tl.store(history_ptr + target * stride_hn, rows, mask=mask)


@triton.jit(do_not_specialize=["P", "R", "N", "H", "Hk"])
def _commit_delta_kernel(
    state_ptr, history_ptr, inputs_ptr, keys_ptr, u_ptr, G_ptr, path_ptr, count_ptr, slots_ptr,
    stride_sl, stride_ss, stride_sh, stride_sk, stride_sv,
    stride_hl, stride_hs, stride_hn, stride_hc, P, R, N, H, Hk, C,
    DK: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """Program (sequence and value head; tile of Dv, or at last the head's part of the channels;
    layer)."""
    b = (tl.program_id(0) // H).to(tl.int64)
    head = (tl.program_id(0) % H).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    slot = slot_of(slots_ptr, b)
    count = tl.load(count_ptr + b).to(tl.int32)
    if count <= 0:
        return
    path_ptr += b * P
    row = (layer * R + b) * N  # of node 0
    if tl.program_id(1) * BLOCK_V >= DV:
        channels = (head * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
        history_ptr += layer * stride_hl + slot * stride_hs
        _commit_history(history_ptr + channels * stride_hc, inputs_ptr + row * C, path_ptr, count,
                        stride_hn, channels, C, ROWS, BLOCK_N)
        return

    dims = tl.arange(0, BLOCK_K).to(tl.int64)
    values = (tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)).to(tl.int64)[None, :]
    inside = (dims < DK)[:, None] & (values < DV)
    state_ptrs = state_ptr + layer * stride_sl + slot * stride_ss + head * stride_sh
    state_ptrs = state_ptrs + dims[:, None] * stride_sk + values * stride_sv
    last = row + tl.load(path_ptr + count - 1)
    G_last = tl.load(G_ptr + last * H + head)
    # [BLOCK_K, BLOCK_V]
    state = tl.load(state_ptrs, mask=inside, other=0.0) * tl.exp(G_last)
    for start in range(0, count, BLOCK_P):
        step = start + tl.arange(0, BLOCK_P)
        valid = step < count
        nodes = row + tl.load(path_ptr + step, mask=valid, other=0)
        k = tl.load(keys_ptr + (nodes * Hk + head % Hk)[:, None] * DK + dims[None, :],
                    mask=valid[:, None] & (dims < DK)[None, :], other=0.0).to(tl.float32)
        u = tl.load(u_ptr + (nodes * H + head)[:, None] * DV + values,
                    mask=valid[:, None] & (values < DV), other=0.0)  # [BLOCK_P, BLOCK_V]
        G = tl.load(G_ptr + nodes * H + head, mask=valid, other=0.0)
        weight = tl.exp(G_last - G) * tl.rsqrt(tl.sum(k * k, 1) + EPS)
        state = _dot(tl.trans(k), u * weight[:, None], state)
    tl.store(state_ptrs, state, mask=inside)


def commit_delta(state, history, inputs, keys, u, G, path, count, slots=None):
    """Applies the accepted nodes to all layers' state [L, slots, H, Dk, Dv] and history [L, slots,
    n - 1, C], in place. inputs, keys, u, G [L, R, N, ...]: what `tree_conv` and `tree_delta` have
    written. path, count, slots: as in `kernels.commit_path`; count 0 changes nothing."""
    L, n_slots, H, Dk, Dv = state.shape
    B, P = path.shape
    R, N, Hk = keys.shape[1:4]
    rows, C = history.shape[2:]
    require(is_real(state) and is_real(keys) and fits(keys, keys, (L, R, N, Hk, Dk))
            and fits(inputs, keys, (L, R, N, C)) and fits(history, keys, (L, n_slots, rows, C))
            and fits(u, state, (L, R, N, H, Dv)) and fits(G, state, (L, R, N, H))
            and fits(path, keys, (B, P), *INTEGERS) and fits(count, keys, (B,), *INTEGERS)
            and fits_slots(slots, state, B, n_slots) and R >= B and P <= 64
            and max(Dk, Dv) <= 256 and H % Hk == 0,
            f"{SIZES}, P <= 64, sizes up to 256, H % Hk == 0",
            state, history, inputs, keys, u, G, path, count, slots)
    if not runs_triton(state, history, inputs, keys, u):
        return commit_delta_reference(state, history, inputs, keys, u, G, path, count, slots)
    BLOCK_K, BLOCK_N, BLOCK_C = map(triton.next_power_of_2, (Dk, rows, triton.cdiv(C, H)))
    launch(_commit_delta_kernel, (B * H, triton.cdiv(Dv, 32) + 1, L),
           state, history, *map(contiguous, (inputs, keys, u, G, path, count, slots)),
           *strides(state), *strides(history), P, R, N, H, Hk, C, DK=Dk, DV=Dv, ROWS=rows,
           BLOCK_P=16, BLOCK_K=max(16, BLOCK_K), BLOCK_V=32, BLOCK_N=BLOCK_N, BLOCK_C=BLOCK_C,
           num_warps=4 if Dk <= 128 else 8)


def commit_delta_reference(state, history, inputs, keys, u, G, path, count, slots=None):
    b = torch.arange(len(path), device=path.device)
    slots = b if slots is None else slots
    inputs, keys, u, G = (path_rows(x, path, count) for x in (inputs, keys, u, G))
    rows = torch.cat((history[:, slots], inputs), 2)  # (L, B, n - 1 + P, C)
    last = count[:, None] + torch.arange(history.shape[2], device=path.device)
    history[:, slots] = rows[:, b[:, None], last]
    last = G[:, b, (count - 1).clamp(min=0).long()]  # (L, B, H): 0 if count is 0
    weight = (last[:, :, None] - G).exp()  # of nodes beyond count, keys and u are 0
    update = torch.einsum("lbph,lbphk,lbphv->lbhkv", weight, unit(keys, u.shape[3]), u)
    state[:, slots] = last.exp()[..., None, None] * state[:, slots] + update
