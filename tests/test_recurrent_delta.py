"""recurrent/delta.py, as in test_kernels.py, against float64 node by node, as plain decoding does it."""

import math
from itertools import cycle

import pytest
import torch
import torch.nn.functional as F

from recurrent import delta
from static import BF16, FP16, FP32, compiled, launches_of, signature
from test_kernels import as_int64, every_second, inside, random_forest, records, turned

STRIDES = {"contiguous": lambda x: x, "inside-NaN": inside, "every-second-column": every_second, "turned": turned}


def chain_of(mask):
    """The nodes that a node sees, root first."""
    return [j for j in range(64) if mask >> j & 1]


def tree_masks(B, T, chain, generator):
    """Random forests in which a quarter of the nodes are unused, or chains."""
    if chain:
        return [[2 ** (i + 1) - 1 for i in range(T)]] * B
    return [random_forest(T, {*torch.randperm(T - 1, generator=generator)[:T // 4].tolist()}, generator)
            for _ in range(B)]


def equal(x, want):
    """Whether x is want up to float32 sums and one unit of x's dtype."""
    return torch.allclose(x.cpu().double(), want, rtol=torch.finfo(x.dtype).eps, atol=2e-5)


def convolve(x, history, weight, masks):
    """`tree_conv` of float64 for each used node."""
    out = torch.zeros_like(x)
    for b, row in enumerate(masks):
        for i, mask in enumerate(row):
            window = torch.cat((history[b], x[b, chain_of(mask)]))[-weight.shape[1]:]
            out[b, i] = F.silu((window * weight.T).sum(0)) if mask else 0
    return out


def decode(qkv, a, b, A, dt_bias, state, Hk, masks):
    """Each used node after its parent, in float64 -> out, and dicts by (sequence, node): states, sums of g."""
    H, Dk, Dv = state.shape[1:]
    q, k, v = qkv.split((Hk * Dk, Hk * Dk, H * Dv), -1)
    q, k = (x.unflatten(-1, (Hk, Dk))[:, :, torch.arange(H) % Hk] for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    out, states, sums = torch.zeros_like(v.unflatten(-1, (H, Dv))), {}, {}
    for s, row in enumerate(masks):
        for i, mask in enumerate(row):
            if mask:
                parent = (s, ([-1] + chain_of(mask))[-2])
                g = A * F.softplus(a[s, i] + dt_bias)
                S = states.get(parent, state[s]) * g.exp()[:, None, None]
                u = b[s, i].sigmoid()[:, None] * (v[s, i].view(H, Dv) - torch.einsum("hkv,hk->hv", S, k[s, i]))
                states[s, i] = S + k[s, i, :, :, None] * u[:, None]
                sums[s, i] = sums.get(parent, 0) + g
                out[s, i] = torch.einsum("hkv,hk->hv", states[s, i], q[s, i]) * Dk ** -0.5
    return out, states, sums


# B, T, Hk, H, Dk, Dv, n, dtype, whether a chain. T 1 to 64; one, two and three value heads per key head; sizes of heads
# that fill their tile or not
CASES = {
    "one-node": (3, 1, 2, 2, 16, 16, 4, FP32, False), "two-per-key-head": (2, 13, 2, 4, 32, 48, 4, FP32, False),
    "wide-heads": (1, 5, 1, 1, 256, 256, 4, FP32, False), "three-per-key-head": (2, 8, 2, 6, 21, 16, 2, FP32, False),
    "bfloat16": (2, 16, 1, 2, 128, 128, 4, BF16, False), "chain-of-33": (1, 33, 1, 3, 64, 80, 4, BF16, True),
    "float16": (2, 5, 1, 2, 96, 33, 6, FP16, False), "64-nodes": (1, 64, 1, 2, 16, 20, 4, FP32, False),
    "chain-of-64": (1, 64, 1, 1, 16, 16, 3, FP32, True),
}


@pytest.mark.parametrize("case, strides", [*zip(CASES.values(), cycle(STRIDES))], ids=CASES)
def test_a_tree_is_every_path_decoded_alone(case, strides, device):
    """Bug: a node that sees a cousin, or another head's key, decay or state; a convolution of rows instead of
    ancestors, from the wrong row of the history; NaN of an unused node, an idle slot or a row that nothing has stored;
    an assumed stride; a decay whose last digits are lost. Committed: the decay or input of the wrong nodes, a layer
    that gets another's; a path beyond count; a slot without accepted nodes, or an idle one, that changes."""
    B, T, Hk, H, Dk, Dv, n, dtype, chain = case
    C = 2 * Hk * Dk + H * Dv
    generator = torch.Generator().manual_seed(T + Dk)
    normal = lambda *shape: torch.randn(*shape, generator=generator)
    prepare = lambda x: STRIDES[strides](x.to(device))
    masks = tree_masks(B, T, chain, generator)
    x, weight, a, b = (y.to(dtype) for y in (normal(B, T, C), normal(C, n), 6 * normal(B, T, H), 2 * normal(B, T, H)))
    x[:, T // 2:] = x[:, :T - T // 2].clone()  # similar keys, at which a solver's errors grow
    A, dt_bias = -normal(H).exp(), normal(H)
    unused = as_int64(masks) == 0
    x[unused] = a[unused] = math.nan
    b[unused] = math.inf
    slots = torch.arange(B - 1, -1, -1) * 2 + 1  # of 2 B + 1
    states, history = (torch.full((2, 2 * B + 1, *shape), math.nan) for shape in ((H, Dk, Dv), (n - 1, C)))
    states[:, slots], history[:, slots] = normal(2, B, H, Dk, Dv), normal(2, B, n - 1, C)
    history[1, slots[0]] = 0  # the start of a text
    states, history = prepare(states), prepare(history.to(dtype))
    kept = [torch.full((2, B + 1, T + 2, *shape), math.nan, dtype=kind, device=device)  # of two layers
            for kind, shape in ((dtype, (C,)), (dtype, (Hk, Dk)), (FP32, (H, Dv)), (FP32, (H,)))]
    inputs, keys, u, G = kept
    tree = as_int64(masks).to(device), slots.to(device)

    qkv = delta.tree_conv(prepare(x), history[1], prepare(weight), inputs[1], *tree)
    assert qkv.dtype == dtype
    assert equal(qkv, convolve(x.double(), history[1, slots].cpu().double(), weight.double(), masks))
    out = delta.tree_delta(prepare(qkv), prepare(a), prepare(b), A.to(device), dt_bias.to(device), states[1],
                           keys[1], u[1], G[1], *tree)
    want, after, sums = decode(qkv.cpu().double(), *(y.double() for y in (a, b, A, dt_bias)),
                               states[1, slots].cpu().double(), Hk, masks)
    assert out.dtype == dtype and equal(out, want)
    assert all(torch.allclose(G[1][place].cpu().double(), g, rtol=2e-6, atol=0) for place, g in sums.items())

    for y in kept:
        y[0] = y[1]
    u[0] = 0  # the other layer only forgets
    first, past = states.cpu().clone(), history.cpu().clone()
    longest = [chain_of(max(row, key=lambda mask: bin(mask).count("1"))) for row in masks]
    path = torch.tensor([[*nodes, *[10**9] * (T - len(nodes))] for nodes in longest])
    for counts in ([len(nodes) for nodes in longest], [(s + 1) % 2 for s in range(B)]):
        states.copy_(first)
        history.copy_(past)
        delta.commit_delta(states, history, *kept, path.to(device), torch.tensor(counts).int().to(device), tree[1])
        assert [i for i in range(2 * B + 1) if states[:, i].isnan().all() and history[:, i].isnan().all()] == [
            i for i in range(2 * B + 1) if i not in slots]
        for s, slot in enumerate(slots.tolist()):
            nodes = longest[s][:counts[s]]
            decay = sums[s, nodes[-1]].exp()[:, None, None] if nodes else 1
            assert equal(states[1, slot], after[s, nodes[-1]] if nodes else first[1, slot].double())
            assert equal(states[0, slot], first[0, slot].double() * decay)
            for layer in (0, 1):
                rows = torch.cat((past[layer, slot], x[s, nodes]))
                assert torch.equal(history[layer, slot].cpu(), rows[len(nodes):])


@pytest.mark.parametrize("T", [13, 40])
def test_a_node_does_not_feel_other_branches(T, device):
    """Bug: sums of what a node sees and what it does not, which make its bits depend on its tree."""
    generator = torch.Generator().manual_seed(T)
    normal = lambda *shape: torch.randn(*shape, generator=generator).to(device)
    row, = tree_masks(1, T, False, generator)
    node = max(range(T), key=lambda i: len(chain_of(row[i])))
    A, dt_bias, state = -normal(4).exp(), normal(4), normal(1, 4, 32, 48)
    given = [normal(1, T, n) for n in (2 * 2 * 32 + 4 * 48, 4, 4)]
    results = []
    for _ in range(2):
        kept = [torch.zeros(1, T, *shape, device=device) for shape in ((2, 32), (4, 48), (4,))]
        out = delta.tree_delta(*given, A, dt_bias, state, *kept, as_int64([row]).to(device))
        results.append([x[0, node] for x in (out, *kept)])
        others = [i for i in range(T) if i not in chain_of(row[node])]
        given = [x.index_copy(1, torch.tensor(others, device=device), normal(1, len(others), x.shape[2]))
                 for x in given]
    assert all(map(torch.equal, *results))


@records
def test_the_order_of_sums_does_not_depend_on_the_number_of_nodes():
    """Bug: a tl.dot of another kind for trees of one size, on Hopper, where the first operand has 64 rows."""
    launches = [launches_of("tree_delta", T=T)[0] for T in (1, 32, 64)]
    code = [compiled("cuda:90", signature(name, args, named)).asm["ttgir"] for name, _, args, named in launches]
    assert all("versionMajor = 2" in text and "versionMajor = 3" not in text for text in code)
