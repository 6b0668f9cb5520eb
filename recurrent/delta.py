"""The operations of gated delta layers (arXiv 2412.06464) over a draft tree, laid out like
kernels.py.

    tree_conv           causal convolution of a node's nearest ancestors, and SiLU
    tree_delta          the gated delta rule: every node sees the state and its own ancestors
    commit_history      the convolution's history after the accepted path
    commit_delta        the state after the accepted path

A token with decay exp(g) and rate beta changes the state S [Dk, Dv] of a head by

    S <- exp(g) S;   u = beta (v - S^T k);   S <- S + k u^T;   output S^T q

In a tree a node's S is its parent's. Nothing is rolled back: S after the accepted path is a sum
over the path's k and u, which verification has computed.

Letters: as in kernels.py; H value heads and Hk key heads, of sizes Dv and Dk; value head h reads
key head h % Hk. n: inputs in a convolution's window."""

import torch
import torch.nn.functional as F

from kernels import INTEGERS, SIZES, fits, fits_slots, is_real, require

EPS = 1e-6  # added to the squared length of queries and keys


def gates(a, b, A, dt_bias):
    """(g, beta) of `tree_delta`: g = A softplus(a + dt_bias), the log of the decay, beta =
    sigmoid(b). a, b [..., H]; A [H] negative."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    return A * F.softplus(a.to(dtype) + dt_bias), b.to(dtype).sigmoid()


def unit(x, heads):
    """Key heads [..., Hk, D] -> the unit vectors that value heads read, [..., heads, D]."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    x = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)
    return x.repeat(*[1] * (x.dim() - 2), heads // x.shape[-2], 1)


def nodes_seen(ancestors):
    """Bitmasks int64 [B, T] -> bool [B, T, T]: whether node i sees node j."""
    nodes = torch.arange(ancestors.shape[1], device=ancestors.device)
    return ancestors[:, :, None] >> nodes & 1 == 1


def nodes_used(x, ancestors):
    """x [B, T, ...] with zeros in place of nodes with an empty mask, which may hold NaN."""
    return torch.where((ancestors != 0).view(*ancestors.shape, *[1] * (x.dim() - 2)), x, 0)


def path_rows(x, path, count):
    """Rows of x [B, T, ...] on the paths [B, P] -> [B, P, ...]; zeros beyond count."""
    used = torch.arange(path.shape[1], device=path.device) < count[:, None]  # (B, P)
    rows = x[torch.arange(len(x), device=x.device)[:, None], torch.where(used, path, 0).long()]
    return torch.where(used.view(*used.shape, *[1] * (x.dim() - 2)), rows, 0)


# --------------------------------------------------------------------------------------------------
# tree_conv
#
#   out[b, i, c] = silu(sum_j weight[c, n - 1 - j] window_j[c]), window_0 = x[b, i], window_1 its
#   parent's row of x, ..., and beyond the root the rows of history[b], the last one first

def tree_conv(x, history, weight, ancestors, slots=None):
    """Causal depthwise convolution of tree nodes, with SiLU: x [B, T, C] -> [B, T, C]. history
    [slots, n - 1, C]: the last committed inputs, zeros before the text. weight [C, n]. ancestors,
    slots: as in `kernels.tree_attention`. A node with an empty mask is not read and gives zeros."""
    B, T, C = x.shape
    n_slots, n = len(history), weight.shape[1]
    require(is_real(x) and fits(history, x, (n_slots, n - 1, C)) and n > 1 and T <= 64
            and fits(weight, x, (C, n), x.dtype, torch.float32)
            and fits(ancestors, x, (B, T), torch.int64) and fits_slots(slots, x, B, n_slots),
            f"{SIZES}, T <= 64, n > 1", x, history, weight, ancestors, slots)
    return tree_conv_reference(x, history, weight, ancestors, slots)


def tree_conv_reference(x, history, weight, ancestors, slots=None):
    B, T, C = x.shape
    n = weight.shape[1]
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

def tree_delta(q, k, v, a, b, A, dt_bias, state, ancestors, slots=None):
    """The gated delta rule over a tree -> (out [B, T, H, Dv], and for `commit_delta` u float32
    [B, T, H, Dv] and G float32 [B, T, H]). q, k [B, T, Hk, Dk] and v [B, T, H, Dv]: as convolved.
    a, b [B, T, H] and A, dt_bias float32 [H]: as in `gates`. state float32 [slots, H, Dk, Dv].
    ancestors, slots: as in `kernels.tree_attention`. A node with an empty mask is not read, and its
    results are zeros."""
    B, T, H, Dv = v.shape
    n_slots, Hk, Dk = len(state), *k.shape[2:]
    exact = torch.promote_types(v.dtype, torch.float32)
    require(is_real(v) and all(fits(x, v, (B, T, Hk, Dk)) for x in (q, k))
            and fits(a, v, (B, T, H)) and fits(b, v, (B, T, H))
            and fits(A, v, (H,), exact) and fits(dt_bias, v, (H,), exact)
            and fits(state, v, (n_slots, H, Dk, Dv), exact) and fits_slots(slots, v, B, n_slots)
            and fits(ancestors, v, (B, T), torch.int64)
            and T <= 64 and max(Dk, Dv) <= 256 and H % Hk == 0,
            f"{SIZES}, T <= 64, sizes up to 256, H % Hk == 0",
            q, k, v, a, b, A, dt_bias, state, ancestors, slots)
    return tree_delta_reference(q, k, v, a, b, A, dt_bias, state, ancestors, slots)


def tree_delta_reference(q, k, v, a, b, A, dt_bias, state, ancestors, slots=None):
    T, H = v.shape[1:3]
    state = state if slots is None else state[slots]  # (B, H, Dk, Dv)
    q, k, v, a, b = (nodes_used(x, ancestors) for x in (q, k, v, a, b))
    q, k = unit(q, H) * q.shape[-1] ** -0.5, unit(k, H)
    q, k, values, g, beta = (x.transpose(1, 2) for x in (q, k, v, *gates(a, b, A, dt_bias)))
    seen = nodes_seen(ancestors)[:, None]  # (B, 1, T, T)
    G = torch.where(seen, g[:, :, None], 0).sum(-1)  # (B, H, T)
    ratio = (G[..., None] - G[..., None, :]).masked_fill(~seen, -torch.inf).exp()
    decay = G.exp()[..., None]  # (B, H, T, 1)
    beta = beta[..., None]
    u = beta * (values - decay * (k @ state))  # (B, H, T, Dv)
    system = beta * ratio * (k @ k.mT)  # (B, H, T, T); solving does not read its diagonal
    u = torch.linalg.solve_triangular(system, u, upper=False, unitriangular=True)
    out = decay * (q @ state) + ratio * (q @ k.mT) @ u
    out, u, G = (x.transpose(1, 2).contiguous() for x in (out, u, G))
    return nodes_used(out, ancestors).to(v.dtype), nodes_used(u, ancestors), G


# --------------------------------------------------------------------------------------------------
# commit_history and commit_delta
#
#   history <- the last n - 1 of (history, x of the path)
#   S <- exp(G_last) S + sum_j exp(G_last - G_j) k_j u_j^T over the path's nodes j

def commit_history(history, x, path, count, slots=None):
    """Appends the accepted nodes' inputs to history [slots, n - 1, C], in place. x [B, T, C]: as
    in `tree_conv`. path, count, slots: as in `kernels.commit_path`; count 0 changes nothing."""
    B, T, C = x.shape
    n_slots, rows, _ = history.shape
    P = path.shape[1]
    require(is_real(history) and fits(x, history, (B, T, C)) and history.shape[2] == C
            and fits(path, x, (B, P), *INTEGERS) and fits(count, x, (B,), *INTEGERS)
            and fits_slots(slots, x, B, n_slots) and P <= 64, f"{SIZES}, P <= 64",
            history, x, path, count, slots)
    commit_history_reference(history, x, path, count, slots)


def commit_history_reference(history, x, path, count, slots=None):
    B = len(x)
    index = torch.arange(B, device=x.device)
    slots = index if slots is None else slots
    rows = torch.cat((history[slots], path_rows(x, path, count)), 1)  # (B, n - 1 + P, C)
    last = count[:, None] + torch.arange(history.shape[1], device=x.device)
    history[slots] = rows[index[:, None], last]


def commit_delta(state, k, u, G, path, count, slots=None):
    """Applies the accepted nodes to state [slots, H, Dk, Dv], in place. k: what `tree_delta` got;
    u, G: what it gave. path, count, slots: as in `kernels.commit_path`; count 0 changes nothing."""
    B, T, H, Dv = u.shape
    n_slots, Hk, Dk = len(state), *k.shape[2:]
    P = path.shape[1]
    require(is_real(state) and fits(k, state, (B, T, Hk, Dk), k.dtype) and is_real(k)
            and fits(u, state, (B, T, H, Dv)) and fits(G, state, (B, T, H))
            and state.shape[1:] == (H, Dk, Dv) and fits_slots(slots, state, B, n_slots)
            and fits(path, state, (B, P), *INTEGERS) and fits(count, state, (B,), *INTEGERS)
            and P <= 64 and max(Dk, Dv) <= 256 and H % Hk == 0,
            f"{SIZES}, P <= 64, sizes up to 256, H % Hk == 0", state, k, u, G, path, count, slots)
    commit_delta_reference(state, k, u, G, path, count, slots)


def commit_delta_reference(state, k, u, G, path, count, slots=None):
    B, _, H, _ = u.shape
    index = torch.arange(B, device=u.device)
    slots = index if slots is None else slots
    k, u, G = (path_rows(x, path, count) for x in (unit(k, H), u, G))  # (B, P, ...)
    last = G[index, (count - 1).clamp(min=0).long()]  # (B, H): 0 if count is 0
    weight = (last[:, None] - G).exp()  # of nodes beyond count, k and u are 0
    update = torch.einsum("bph,bphk,bphv->bhkv", weight, k, u)
    state[slots] = last.exp()[..., None, None] * state[slots] + update
