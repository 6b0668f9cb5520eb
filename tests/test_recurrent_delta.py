"""recurrent/delta.py, as in test_kernels.py, against float64 node by node, as plain decoding does it."""

import math

import pytest
import torch
import torch.nn.functional as F

from recurrent import delta
from static import BF16, FP16, FP32
from test_kernels import as_int64, device, every_second, inside, random_forest

__all__ = ["device"]  # the fixture


def masks_of(T, generator):
    """Ancestor masks of a random forest; a quarter of the nodes are unused, the last one is used."""
    return random_forest(T, set(torch.randperm(T - 1, generator=generator)[:T // 4].tolist()), generator)


def chain_of(mask):
    """The nodes that a node sees, root first."""
    return [j for j in range(64) if mask >> j & 1]


def reversed_in_memory(x):
    """x with its dimensions in the opposite order in memory."""
    return x.permute(*range(x.dim())[::-1]).contiguous().permute(*range(x.dim())[::-1])


STRIDES = {"contiguous": lambda x: x, "inside-NaN": inside, "every-second-column": every_second,
           "turned": reversed_in_memory}


def rounded_once(x, want):
    """Whether x is want up to float32 sums and one rounding to x's dtype."""
    return torch.allclose(x.cpu().double(), want, rtol=0.51 * torch.finfo(x.dtype).eps, atol=2e-5)


def delta_case(B, T, Hk, H, Dk, Dv, dtype):
    """Arguments of `tree_delta` without slots, masks; NaN and inf in unused nodes. The gates reach from no decay to a
    state that is forgotten."""
    g = torch.Generator().manual_seed(T + Dk)
    normal = lambda *shape: torch.randn(*shape, generator=g)
    masks = [masks_of(T, g) for _ in range(B)]
    q, k, v, a, b = (x.to(dtype) for x in (normal(B, T, Hk, Dk), normal(B, T, Hk, Dk), normal(B, T, H, Dv),
                                           6 * normal(B, T, H), 2 * normal(B, T, H)))
    k[:, T // 2:] = k[:, :T - T // 2].clone()  # repeated keys, at which a solver's errors grow
    unused = as_int64(masks) == 0
    for i, x in enumerate((q, k, v, a, b)):
        x[unused] = (math.nan, math.inf)[i % 2]
    return [q, k, v, a, b, -torch.rand(H, generator=g).exp(), normal(H), normal(B, H, Dk, Dv)], masks


def node_by_node(q, k, v, a, b, A, dt_bias, state, masks):
    """In float64 -> out, and the state after every used node, a dict by (b, node)."""
    q, k, v, a, b, A, dt_bias, state = (x.double() for x in (q, k, v, a, b, A, dt_bias, state))
    H, Hk, Dk = v.shape[2], *k.shape[2:]
    heads = torch.arange(H) % Hk
    out, states = torch.zeros_like(v), {}
    for s, row in enumerate(masks):
        for i, mask in enumerate(row):
            if mask:
                S = states[s, chain_of(mask)[-2]] if len(chain_of(mask)) > 1 else state[s]
                query, key = (x[s, i, heads] / (x[s, i, heads].square().sum(-1, True) + 1e-6).sqrt() for x in (q, k))
                S = S * torch.exp(A * F.softplus(a[s, i] + dt_bias))[:, None, None]
                u = b[s, i].sigmoid()[:, None] * (v[s, i] - torch.einsum("hkv,hk->hv", S, key))
                states[s, i] = S + key[:, :, None] * u[:, None]
                out[s, i] = torch.einsum("hkv,hk->hv", states[s, i], query) * Dk ** -0.5
    return out, states


# B, T, Hk, H, Dk, Dv, dtype: T 1 to 64; one, two and three value heads per key head; sizes that fill their tile or not
DELTA = {
    "one-node": (2, 1, 2, 2, 16, 16, FP32), "two-per-key-head": (2, 13, 2, 4, 32, 48, FP32),
    "64-nodes": (1, 64, 1, 2, 16, 20, FP32), "three-per-key-head": (2, 8, 2, 6, 21, 16, FP32),
    "17-nodes-wide": (1, 17, 1, 1, 256, 256, FP32), "bfloat16": (2, 16, 2, 4, 128, 128, BF16),
    "bfloat16-33-nodes": (1, 33, 1, 3, 64, 80, BF16), "float16": (2, 5, 1, 2, 96, 33, FP16),
}


@pytest.mark.parametrize("case, strides", [
    pytest.param(case, strides, id=f"{name}-{strides}")
    for (name, case), strides in zip(DELTA.items(), [*STRIDES] * 2)])
def test_a_tree_is_every_path_decoded_alone(case, strides, device):
    """Bug: a node that sees a cousin, another head's key, decay or state; NaN of an unused node or an idle slot; an
    assumed stride. After commit: a decay of the wrong nodes, another path; a slot without accepted nodes changes."""
    args, masks = delta_case(*case)
    B, T, dtype = case[0], case[1], case[-1]
    want, states = node_by_node(*args, masks)
    slots = torch.arange(B - 1, -1, -1) * 2 + 1  # of 2 B + 1; the others idle
    state = torch.full((2 * B + 1, *args[-1].shape[1:]), math.nan)
    state[slots] = args[-1]
    state = STRIDES[strides](state.to(device))
    args = [STRIDES[strides](x.to(device)) if x.dim() == 4 else x.to(device) for x in args[:-1]]
    out, u, G = delta.tree_delta(*args, state, as_int64(masks).to(device), slots.to(device))
    assert out.dtype == dtype and u.dtype == G.dtype == torch.float32
    assert rounded_once(out, want)
    before = state.cpu().clone()
    for last in [i for i in range(T) if all(row[i] for row in masks)][-2:]:
        state.copy_(before)
        paths = [chain_of(row[last]) for row in masks]
        path = torch.tensor([[*path, *[10**9] * (T - len(path))] for path in paths])
        count = torch.tensor([0 if T == 13 and s == 1 else len(path) for s, path in enumerate(paths)])
        delta.commit_delta(state, args[1], u, G, path.to(device), count.int().to(device), slots.to(device))
        for s, slot in enumerate(slots.tolist()):
            expected = states[s, last] if count[s] else before[slot].double()
            assert rounded_once(state[slot], expected)
        idle = [i for i in range(len(state)) if i not in slots]
        assert state[idle].isnan().all()


# B, T, C, n, dtype
CONV = {
    "one-node": (3, 1, 20, 4, FP32), "64-nodes": (1, 64, 300, 4, BF16), "two-inputs": (2, 5, 7, 2, FP32),
    "33-nodes": (2, 33, 257, 3, FP16), "a-long-window": (2, 12, 64, 6, FP32),
}


@pytest.mark.parametrize("case, strides", [
    pytest.param(case, strides, id=f"{name}-{strides}")
    for (name, case), strides in zip(CONV.items(), [*STRIDES, "contiguous"])])
def test_a_convolution_reads_ancestors_then_history(case, strides, device):
    """Bug: a window of rows instead of ancestors, one that begins in the wrong row of the history or runs on into
    another slot; weights in the opposite order; NaN of an unused node or an idle slot; after commit, a history of the
    wrong nodes, or one overwritten before it is read."""
    B, T, C, n, dtype = case
    g = torch.Generator().manual_seed(T)
    masks = [masks_of(T, g) for _ in range(B)]
    x, weight = (torch.randn(*shape, generator=g).to(dtype) for shape in ((B, T, C), (C, n)))
    slots = torch.arange(B - 1, -1, -1) * 2 + 1
    history = torch.full((2 * B + 1, n - 1, C), math.nan, dtype=dtype)
    history[slots] = torch.randn(B, n - 1, C, generator=g).to(dtype)
    history[slots[0]] = 0  # the start of a text
    x[as_int64(masks) == 0] = math.nan
    chains = [[torch.cat((history[slot], x[s, chain_of(mask)])) for mask in masks[s]]
              for s, slot in enumerate(slots.tolist())]  # what every node sees
    want = torch.stack([torch.stack([F.silu((rows[-n:].double() * weight.double().T).sum(0)) if mask else
                                     torch.zeros(C).double() for rows, mask in zip(*pair)])
                        for pair in zip(chains, masks)])
    history, x, weight = (STRIDES[strides](tensor.to(device)) for tensor in (history, x, weight))
    ancestors, slots = as_int64(masks).to(device), slots.to(device)
    out = delta.tree_conv(x, history, weight, ancestors, slots)
    assert out.dtype == dtype and rounded_once(out, want)
    last = [next(i for i in range(T - 1, -1, -1) if row[i]) for row in masks]
    paths = [chain_of(row[i]) for row, i in zip(masks, last)]
    for shorter in range(len(paths[0]) + 1):
        before = history.clone()
        counts = [max(len(path) - shorter, 0) for path in paths]
        path = torch.tensor([[*path, *[-7] * (T - len(path))] for path in paths])
        delta.commit_history(history, x, path.to(device), torch.tensor(counts).to(device), slots)
        for s, slot in enumerate(slots.tolist()):
            rows = torch.cat((before[slot], x[s, paths[s][:counts[s]]]))
            assert torch.equal(history[slot], rows[-(n - 1):])
        history.copy_(before)
