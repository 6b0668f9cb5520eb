"""The small fused operations, as in test_kernels.py, against formulas in float64 or plain Python."""

import math
import random

import pytest
import torch

import kernels
from static import BF16, FP16, FP32
from test_kernels import DTYPES, INTERPRETED, as_int64, device, every_second, glu_formula, slow_to_interpret

ERROR = {FP32: 3e-6, FP16: 3e-3, BF16: 2.5e-2}  # a few roundings of numbers from about 1 to 3
__all__ = ["device"]  # the fixture


def close(got, want, dtype):
    assert got.dtype == dtype and got.shape == want.shape
    torch.testing.assert_close(got.double().cpu(), want, atol=ERROR[dtype], rtol=ERROR[dtype])


def normal(*shape, dtype=FP32):
    return torch.randn(*shape).to(dtype)


# ---------------------------------------------------------------------------------------------------------------------
# add_norm, glu, cosine_mix

@DTYPES
@pytest.mark.parametrize("kind", ["rms", "layer", "no-weight", "no-delta"])
@pytest.mark.parametrize("shape", [(1, 16), (2, 63), (5, 1111)], ids=str)
def test_add_norm_is_the_formula(shape, kind, dtype, device):
    """Bug: padding in the mean, a norm of the unrounded sum, a bias in RMSNorm."""
    C = shape[-1]
    x, delta = 2 * normal(*shape, dtype=dtype), normal(*shape, dtype=dtype)
    weight, bias = normal(C, dtype=dtype), normal(C, dtype=dtype) if kind == "layer" else None
    delta, weight = None if kind == "no-delta" else delta, None if kind == "no-weight" else weight
    want = (x.double() + (0 if delta is None else delta.double())).to(dtype).double()
    normed = want - want.mean(-1, keepdim=True) if kind == "layer" else want
    normed = normed / (normed.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    normed = normed if weight is None else normed * weight.double()
    normed = normed if bias is None else normed + bias.double()
    on_device = [y if y is None else every_second(y.to(device)) for y in (x, delta, weight, bias)]
    if kind == "layer":  # as in training under autocast
        on_device[2:] = [y.float() for y in on_device[2:]]
    got = kernels.add_norm(*on_device, 1e-3)
    close(got[0], normed, dtype)
    close(got[1], want, dtype)
    assert torch.equal(got[1].double().cpu(), want) or INTERPRETED and dtype == BF16  # the interpreter truncates


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("N", [1, 63, 1025])
def test_glu_is_the_formula(N, activation, dtype, device):
    """Bug: gate and up swapped, a column of the next row, an overflow of the exponential."""
    x = normal(2, 3, 2 * N, dtype=dtype)
    x[0, 0, 0], x[1, 2, 0] = -60, 60
    want = glu_formula(*x.double().chunk(2, -1), activation)
    close(kernels.glu(every_second(x.to(device)), activation), want, dtype)


@DTYPES
@pytest.mark.parametrize("C, n_head", [(16, 1), (111, 3), (1024, 2)])
def test_cosine_mix_is_the_formula(C, n_head, dtype, device):
    """Bug: a cosine over all heads or over another head's channels, a division by zero."""
    z, q, kv = normal(2, 3, C, dtype=dtype), normal(2, 3, C, dtype=dtype), normal(2, 3, 2 * C, dtype=dtype)
    if dtype != FP16 or kernels.runs_triton(torch.zeros(1, device=device)):  # torch's own gives NaN in float16
        q[1, 1] = 0
    parts = lambda x: x.double().view(2, 3, n_head, -1)
    (k, v), q64 = map(parts, kv.chunk(2, -1)), parts(q)
    cosine = (q64 * k).sum(-1) / (q64.norm(dim=-1) * k.norm(dim=-1)).clamp(min=1e-30)
    want = (parts(z) + cosine[..., None] * v).view(2, 3, C)
    close(kernels.cosine_mix(*(every_second(x.to(device)) for x in (z, q, kv)), n_head), want, dtype)


# ---------------------------------------------------------------------------------------------------------------------
# rope_cache

# B, T, Hq, Hkv, D, rotated, normed. They cover D 16 to 256, odd sizes and sizes that do not fill a tile; one query head
# per key head and 8; more heads than one program has.
ROPE = {
    "llama": (2, 5, 8, 2, 64, True, False),
    "qwen-3": (3, 1, 4, 2, 128, True, True),
    "gpt-2": (1, 7, 3, 3, 16, False, False),
    "odd-head": (2, 3, 2, 1, 21, False, True),
    "wide-head": (1, 2, 8, 1, 256, True, True),
    "many-heads": (1, 1, 33, 11, 80, True, False),
}


@DTYPES
@pytest.mark.parametrize("case", ROPE.values(), ids=ROPE.keys())
def test_rope_cache_rotates_and_writes(case, dtype, device):
    """Bug: values rotated, the keys' weight applied to a query head, a write to another row."""
    B, T, Hq, Hkv, D, rotated, normed = case
    S, H = T + 9, Hq + 2 * Hkv
    qkv, kv = normal(B, T, H, D, dtype=dtype), torch.full((2, B, Hkv, S, D), math.nan, dtype=dtype)
    lengths = torch.randint(0, S - T + 1, (B,))
    rows = lengths[:, None] + torch.arange(T)
    angles = torch.rand(B, T, 1, D // 2) * 6
    cos, sin = torch.cat([angles.cos()] * 2, -1).to(dtype), torch.cat([-angles.sin(), angles.sin()], -1).to(dtype)
    weights = (normal(D, dtype=dtype), normal(D, dtype=dtype)) if normed else (None, None)

    want = qkv.double()
    for part, weight in (((slice(0, Hq)), weights[0]), (slice(Hq, Hq + Hkv), weights[1])):
        x = want[:, :, part]
        x = x if weight is None else x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        if rotated:
            turn = torch.complex(cos.double(), sin.double())[..., D // 2:]
            x = torch.complex(x[..., :D // 2], x[..., D // 2:]) * turn
            x = torch.cat((x.real, x.imag), -1)
        want[:, :, part] = x
    cache = kv.double()
    for b in range(B):
        for t in range(T):
            cache[0, b, :, rows[b, t]], cache[1, b, :, rows[b, t]] = want[b, t, Hq:Hq + Hkv], want[b, t, Hq + Hkv:]

    strided = every_second(kv.to(device)).transpose(2, 3).contiguous().transpose(2, 3)
    rope = every_second(torch.cat((cos, sin), 2).to(device)) if rotated else None
    lengths = lengths.to(device, torch.int32 if rotated else torch.int64)
    weights = [every_second(x.to(device)) for x in weights if x is not None]
    q = kernels.rope_cache(every_second(qkv.to(device)), rope, strided, lengths, *weights)
    close(q, want[:, :, :Hq], dtype)
    got, written = strided.double().cpu(), ~cache.isnan()
    assert torch.equal(written, ~got.isnan())
    torch.testing.assert_close(got[written], cache[written], atol=ERROR[dtype], rtol=ERROR[dtype])
    values = lambda x: torch.stack([x[1, b, :, rows[b]] for b in range(B)])
    assert torch.equal(values(got), values(cache))  # bit for bit


@pytest.mark.skipif(not INTERPRETED, reason="on a CPU the reference indexes as torch does")
def test_rope_cache_skips_rows_outside_the_cache():
    """Bug: a write before or after the cache, to another sequence or beyond the memory."""
    outer = torch.zeros(2, 2, 1, 12, 16)
    kernels.rope_cache(torch.ones(2, 2, 3, 16), None, outer[:, :, :, 4:8], torch.tensor([-1, 3]))
    assert outer[..., 0].nonzero()[:, 1:4:2].tolist() == [[0, 4], [1, 7]] * 2


# ---------------------------------------------------------------------------------------------------------------------
# select_candidates

# B, K, W, T, whether all beams share proposals
TREES = {"small": (3, 4, 4, 16, False), "two-nodes": (2, 1, 1, 2, False), "shared-proposals": (2, 4, 3, 30, True),
         "64-nodes": (2, 4, 8, 64, False), "one-beam": (3, 5, 1, 4, False), "32-beams": (1, 2, 32, 64, False),
         "more-nodes-than-proposals": (2, 2, 2, 20, False)}


def random_proposals(B, w, W):
    """logprobs and tokens [B, w, W] with many ties, -inf, NaN and one above 0."""
    logprobs = -torch.rand(B, w, W).mul(3).round().sort(-1).values
    tokens = torch.stack([torch.randperm(max(W, 9))[:W] for _ in range(B * w)]).view(B, w, W)
    logprobs[0, 0, -1] = -math.inf
    if w > 1:
        logprobs[0, -1, 0], logprobs[-1, 0, 0] = math.nan, 0.25
    return logprobs, tokens


@pytest.mark.parametrize("B, K, W, T, shared", TREES.values(), ids=TREES.keys())
def test_candidates_are_those_of_a_plain_search(B, K, W, T, shared, device):
    """Bug: a wrong order of ties, another beam's child, a NaN that wins, a candidate where there is none."""
    n = min(W * W, T - 1)
    root = torch.arange(B).to(device) + 70
    candidates = kernels.Candidates.empty(root, K, n)
    candidates.joint.fill_(math.nan)
    joint, tokens, parents = candidates
    assert all(x.shape == (B, K, n) and x.is_contiguous() for x in candidates)
    lists = [[[]] for _ in range(B)]  # per depth: (joint, token, parent's index in the depth before), best first
    for depth in range(K):
        w = 1 if depth == 0 else W
        logprobs, proposed = random_proposals(B, 1 if shared else w, W)
        inputs = every_second(logprobs.to(device)), every_second(proposed.to(device))
        kernels.select_candidates(*inputs, candidates, depth)
        for b in range(B):
            found = []
            for beam in range(w):
                before = lists[b][-1][beam][0] if depth else 0.0
                for j in range(W):
                    chance = logprobs[b, 0 if shared else beam, j].item()
                    chance = -math.inf if math.isnan(chance) else min(chance, 0.0)
                    total = (torch.tensor(before) + torch.tensor(chance)).item()  # in float32
                    found.append((total, 0, proposed[b, 0 if shared else beam, j].item(), beam * W + j))
            found.sort(key=lambda entry: (-entry[0], *entry[1:]))
            best = [(total, token, column // W) for total, _, token, column in found[:n]]
            lists[b].append(best)
            got = zip(joint[b, depth].tolist(), tokens[b, depth].tolist(), parents[b, depth].tolist())
            assert list(got) == best + [(-math.inf, 0, -1)] * (n - len(best))


# ---------------------------------------------------------------------------------------------------------------------
# ngram_lookup

def lookup(texts, n, device, rng=None):
    """The chains of texts of any lengths; the rest of the history holds tokens of all texts."""
    S = max(map(len, texts)) + 9
    junk = rng.choices([token for text in texts for token in text], k=S) if rng else [0] * S
    filled = torch.tensor([(text + junk)[:S] for text in texts], dtype=torch.int32, device=device)
    lengths = torch.tensor([len(text) - 1 for text in texts], dtype=torch.int32, device=device)
    chains = kernels.ngram_lookup(filled, every_second(lengths), n)
    assert chains.shape == (len(texts), 1 + n) and chains.dtype == torch.int64
    return chains.tolist()


VOCABULARIES = {"one-token": [3], "70,000": range(70_000), "to-2^31": [0, 2**31 - 1, 5],
                "equal-in-16-bits": [7, 7 + 2**16, 7 + 2**17, 2**16]}
LENGTHS = {"1": [1], "2": [2, 1], "3": [3, 2, 1], "ragged": [7, 1, 4, 2, 111, 3, 63, 64, 5],
           "several-tiles": [4097, 9001, 4095], "many-short": [*range(1, 15)] * (1 if INTERPRETED else 20)}


@pytest.mark.parametrize("n", [pytest.param(1, marks=slow_to_interpret), 63])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES.keys())
def test_lookup_is_its_reference(vocabulary, lengths, n, device):
    """Bug: a token truncated to 16 bits, the end of a tile left out, a suffix or a match outside its text."""
    rng = random.Random(0)
    texts = [rng.choices(vocabulary, k=length) for length in lengths]
    texts += [text[:-2] + text[:2] for text in texts]  # so that a large vocabulary has matches too
    got = lookup(texts, n, device, rng)
    for text, chain in zip(texts, got):
        want = kernels.ngram_lookup_reference(torch.tensor([text]), torch.tensor([len(text) - 1]), n)
        assert chain == want[0].tolist()


def test_the_longest_suffix_wins_then_the_latest(device):
    """Bug: a nearer, shorter match wins, a match of 5 tokens, the newest token matches itself."""
    texts = {(7,): [0, -1, -1, -1], (5, 5): [1, 5, 5, 5], (1, 2, 9, 2, 8, 1, 2): [2, 9, 2, 8],
             (3, 1, 4, 1, 5, 1): [1, 5, 1, 5], (9, 1, 2, 3, 4, 6, 8, 1, 2, 3, 4, 7, 9, 1, 2, 3, 4): [4, 7, 9, 1]}
    assert lookup(list(map(list, texts)), 3, device) == list(texts.values())


# ---------------------------------------------------------------------------------------------------------------------
# best_tree

# B, K, W, candidates per depth, tokens of the chain
POOLS = {"heads": (3, 4, 4, 16, 0), "lookup": (3, 0, 0, 0, 15), "one-token": (2, 0, 0, 0, 1), "both": (4, 4, 4, 16, 15),
         "long-chain": (2, 2, 3, 9, 63), "few": (2, 1, 1, 1, 2), "a-full-tile": (2, 3, 4, 16, 15),
         "2047-candidates": (1, 32, 32, 63, 31)}
FALLING = torch.linspace(1, 0, 41).square().tolist()
TABLES = {"falling": [*FALLING, 0.0, 0.3, 0.5, 0.7, 0.9, 0.95], "zero": [0.0] * 47,
          "ties": [1.0] * 9 + [0.5] * 32 + [1.0, 0.5, 0.25, 0.0, 1.0, 1.0],
          "rising": [*FALLING[::-1], 0.5, 0.9, 0.8, 0.7, 0.6, 0.5],
          "hostile": [math.nan, 0.7, -0.0, 2.0, 1.0, -math.inf, math.inf] * 6 + [0.5, -1.0, math.inf, math.nan, 2.0]}


def random_pool(B, K, W, n, n_chain):
    """root, candidates and lookup; a chain starts with a path of the candidates, if there are any."""
    root, candidates = torch.randint(0, 9, (B,)), kernels.Candidates.empty(torch.zeros(B).long(), K, n) if K else None
    for depth in range(K):
        kernels.select_candidates_reference(*random_proposals(B, W if depth else 1, W), candidates, depth)
    match = torch.randint(0, 6, (B, 1))
    lookup = torch.cat((match, torch.randint(0, 3, (B, n_chain))), 1)
    for b in range(B if K and n_chain else 0):
        beam = int(torch.randint(0, W, ()))
        for depth in range(min(int(torch.randint(0, K + 1, ())), n_chain) - 1, -1, -1):
            lookup[b, 1 + depth] = candidates.tokens[b, depth, beam]
            beam = max(int(candidates.parents[b, depth, beam]), 0)
    ends = torch.where(match == kernels.SCHEMA, torch.randint(0, 1 + n_chain, (B, 1)), n_chain * (match > 0))
    lookup[:, 1:].masked_fill_(torch.arange(n_chain) >= ends, -1)
    return root, candidates, lookup if n_chain else None


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())
@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS.keys())
def test_trees_are_the_front_of_a_plain_search(pool, table, device):
    """Bug: a wrong order of ties, a child without its parent, one token twice, padding that counts as a node; a small
    tree that is not the front of a larger one; a chance that rises along a path; chances of the other mode."""
    for _ in range(1 if INTERPRETED else 20):
        root, candidates, lookup = random_pool(*pool)
        chances, temperature = torch.tensor([table, table[::-1]]), torch.randint(0, 2, root.shape).float()
        want = kernels.best_tree_reference(root, candidates, lookup, chances, temperature, 64)
        on_device = [None if x is None else every_second(x.to(device)) for x in (root, lookup, chances, temperature)]
        heads = candidates and kernels.Candidates(*(x.to(device) for x in candidates))
        for T in (2, 15, 64):
            got = kernels.best_tree(on_device[0], heads, *on_device[1:], T)
            assert all(torch.equal(x.cpu(), y[:, :T]) for x, y in zip(got, want, strict=True)), T
        for b, nodes in enumerate(zip(*(x.tolist() for x in want))):
            nodes = [*zip(*nodes)]
            used = [node for node in nodes if node[3]]
            assert used[0] == (root[b], 0, 0, 1, -1, 1.0)
            assert nodes[len(used):] == [(0, 0, 0, 0, -1, 0.0)] * (64 - len(used))
            assert len({node[:2] for node in used[1:]}) == len(used) - 1
            for i, (_, parent, depth, ancestors, source, chance) in enumerate(used[1:], start=1):
                above = used[parent]
                assert parent < i and depth == above[2] + 1 and ancestors % 2**64 == above[3] | 1 << i
                assert 0 <= source < kernels.SOURCES and 0 <= chance <= min(above[5], used[i - 1][5])


def test_chances_are_the_formula(device):
    """Bug: no interpolation between bins, a power too many, the smaller chance or its source for a merged node."""
    joint = torch.tensor([[[-0.125, -1.5, -99.0], [-0.625, -10.0, -math.inf]]])
    tokens, parents = torch.tensor([[[5, 6, 7], [8, 9, 3]]]), torch.tensor([[[0, 0, 0], [0, 0, -1]]])
    candidates = kernels.Candidates(*(x.to(device) for x in (joint, tokens, parents)))
    chances = torch.zeros(2, kernels.SOURCES)
    chances[1, :8], chances[1, kernels.BINS + 2] = torch.tensor([0.75, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125, 0]), 0.5
    inputs = torch.tensor([4]), torch.tensor([[2, 5, 8, 5]]), chances, torch.tensor([0.7])
    root, *inputs = (x.to(device) for x in inputs)
    *columns, probabilities = (x[0].tolist() for x in kernels.best_tree(root, candidates, *inputs, 8))
    assert probabilities == [1, 0.625, 0.375, 0.125, 0.125, 0, 0, 0]
    assert [*zip(*columns)] == [
        (4, 0, 0, 1, -1), (5, 0, 1, 3, 0), (8, 1, 2, 7, 2), (6, 0, 1, 9, 6), (5, 2, 3, 23, 43), (7, 0, 1, 33, 40),
        (9, 1, 2, 67, 40), (0, 0, 0, 0, -1)]


# ---------------------------------------------------------------------------------------------------------------------
# accept_path

def random_tree(rng, T, max_depth=6):
    """[tokens, parents, depths, bitmasks] of T nodes, some of them padding; a node's i-th child has the token i."""
    used = rng.choice([T, T, 1, rng.randint(1, T)])
    tokens, parents, depths, masks = [rng.randint(0, 99)], [0], [0], [1]
    for i in range(1, used):
        parent = rng.choice([j for j in range(i) if depths[j] < max_depth])
        tokens.append(parents[1:].count(parent))
        parents.append(parent), depths.append(depths[parent] + 1), masks.append(masks[parent] | 1 << i)
    return [x + [0] * (T - used) for x in (tokens, parents, depths, masks)]


@pytest.mark.parametrize("n_chain", [0, 1, 3, 20])
def test_paths_and_counts_are_those_of_a_plain_walk(n_chain, device):
    """Bug: a node accepted under a rejected parent, a padding node, an idle sequence that runs; counts of the other
    mode or of an idle sequence; the end of a chain counted as a wrong token."""
    rng = random.Random(n_chain)
    counts = torch.full((2, kernels.SOURCES, 2), 2.0**24, dtype=torch.float64, device=device)
    want = counts.cpu().clone()
    active, temperature = torch.tensor([1, 2, 0, 1], dtype=torch.int32), torch.tensor([0.0, 1.0, 0.5, 0.0])
    for _ in range(10 if INTERPRETED else 100):
        T, P = rng.randint(1, 64), rng.randint(1, 6)
        trees = [as_int64(x) for x in zip(*(random_tree(rng, T, 4) for _ in range(4)))]
        sources = torch.randint(-1, kernels.SOURCES, (4, T))
        sources[:, 0] = -1  # a root's
        tree = [every_second(x.to(device)) for x in (*trees, sources, torch.randint(0, 3, (4, T)), active)]
        modes = every_second(temperature.to(device))
        out = kernels.accept_path(*tree, P, modes, torch.zeros_like(counts))
        rows = zip(*(x.tolist() for x in (out, active, *tree[:4], tree[5])))
        for row, running, tokens, parents, _, masks, target in rows:
            path = [0]
            while following := [i for i in range(1, T) if masks[i] and parents[i] == path[-1]
                                and tokens[i] == target[path[-1]]]:
                path += following
            path = path[:P]  # deeper nodes are left out
            rest, count = P - len(path), bool(running) * len(path)
            assert row[P:2 * P] == [*path, *[0] * rest] and row[-2:] == [count, max(count - 1, 0)]
            assert row[:P] == [*(target[i] for i in path), *[target[0]] * rest]
        lookup = torch.cat((torch.randint(0, 6, (4, 1)), torch.randint(0, 3, (4, n_chain))), 1)
        equal = rng.randint(0, min(n_chain, P))
        lookup[:, 1:1 + equal] = out[:, :equal]
        lookup[:, 1 + rng.randint(0, n_chain):].masked_fill_(lookup[:, :1] == kernels.SCHEMA, -1)  # a shorter chain
        lookup = every_second(lookup.to(device)) if n_chain else None
        got = kernels.accept_path(*tree, P, modes, counts, lookup)
        assert torch.equal(got, out)
        *on_host, chain = [x if x is None else x.cpu() for x in (*tree, lookup)]
        assert torch.equal(got.cpu(), kernels.accept_path_reference(*on_host, P, temperature, want, chain))
        assert torch.equal(counts.cpu(), want)


# ---------------------------------------------------------------------------------------------------------------------
# prompt_chain

@pytest.mark.parametrize("T", [1, 2, 13, 64])
@pytest.mark.parametrize("n_chain", [None, 0, 15])
def test_a_prompt_is_a_chain_that_is_accepted(T, n_chain, device):
    """Bug: a known token that is rejected or replaced by a sample, padding that is accepted, another sequence's tree
    changed, a prompt's tokens counted as guesses."""
    rng = random.Random(T)
    starts, ends = [0, 5, 0, 40, 7, 90], [70, 5, 0, 41, 7 + T, 3]  # the second, the third and the last have been read
    texts = torch.randint(0, 99, (6, 200))
    trees = [as_int64(x) for x in zip(*(random_tree(rng, T) for _ in starts))]
    trees.append(torch.randint(0, kernels.SOURCES, (6, T)))
    chances = torch.rand(6, T)
    lookup = None if n_chain is None else torch.randint(1, 5, (6, 1 + n_chain))
    target, counts = torch.randint(100, 200, (6, T)), torch.zeros(2, kernels.SOURCES, 2, dtype=torch.float64)
    known = [x.to(device) for x in (texts.int(), torch.tensor(starts).int(), torch.tensor(ends).int())]
    got = [x if x is None else x.clone().to(device) for x in (*trees, chances, lookup)]
    kernels.prompt_chain(*known, got[:5], got[5], got[6])
    active = torch.ones(6, dtype=torch.int32)
    inputs = [x.to(device) for x in (target, active)]
    out = kernels.accept_path(*got[:5], *inputs, T, torch.zeros(6).to(device), counts.to(device), got[6], known)
    for b, (start, end) in enumerate(zip(starts, ends)):
        tree, unread, row = [x[b].tolist() for x in got[:6]], end - start, out[b].tolist()
        if unread <= 0:
            assert tree == [x[b].tolist() for x in (*trees, chances)]
            assert got[6] is None or torch.equal(got[6][b].cpu(), lookup[b])
            continue
        n = min(T, unread + 1)  # nodes; each has the one before as its parent
        masks = [(2 << j) - 1 for j in range(63)] + [-1]
        nodes = [(texts[b, start + j].item(), max(j - 1, 0), j, masks[j], -1, 1) for j in range(n)]
        assert [*zip(*tree)] == nodes + [(0, 0, 0, 0, -1, 0)] * (T - n)
        assert got[6] is None or got[6][b, 0] == 0
        emitted = [texts[b, at].item() if at <= end else target[b, at - 1 - start].item()
                   for at in range(start + 1, start + n + 1)]
        assert row[:n] == emitted and row[T:T + n] == [*range(n)] and row[-2:] == [n, n - 1]


# ---------------------------------------------------------------------------------------------------------------------
# advance, and slots

def by_slot():
    """{function: (arguments of 5 sequences, names of those that slots index, names of those changed in place)}"""
    rng, B, T, P, S, C = random.Random(1), 5, 6, 4, 90, 40
    lengths = torch.tensor([3, 70, 0, 41, 12], dtype=torch.int32)
    ends = torch.tensor([3, 75, 0, 42, 90], dtype=torch.int32)
    history = torch.randint(0, 3, (B, S), dtype=torch.int32)
    kv = normal(3, 2, B, 2, S, 16)
    trees = [as_int64(x) for x in zip(*(random_tree(rng, T, 3) for _ in range(B)))]
    columns = dict(zip(("tokens", "parents", "depths", "ancestors"), trees), sources=torch.zeros(B, T).long())
    path, count = torch.tensor([[0, 1, 3, 5]] * B), torch.tensor([4, 1, 2, 0, 3])
    packed = torch.cat((torch.randint(0, 9, (B, 3 * P)), count[:, None], (count[:, None] - 1).clamp(min=0)), 1)
    counts = torch.zeros(2, kernels.SOURCES, 2, dtype=torch.float64)
    cached = dict(lengths=lengths)
    return dict(
        tree_attention=(dict(q=normal(B, T, 4, 16), k_cache=kv[0, 0], v_cache=kv[0, 1], ancestors=trees[3]) | cached,
                        "k_cache v_cache lengths", ""),
        rope_cache=(dict(qkv=normal(B, T, 8, 16), rope=normal(B, T, 2, 16), kv=kv[0].clone()) | cached,
                    "kv lengths", "kv"),
        commit_path=(dict(kv=kv, path=path, count=count) | cached, "kv lengths", "kv"),
        ngram_lookup=(dict(history=history, n=7) | cached, "history lengths", ""),
        prompt_chain=(dict(history=history, ends=ends, tree=[*columns.values()], probabilities=torch.rand(B, T),
                           lookup=torch.ones(B, 8).long()) | cached, "history ends lengths", ""),
        accept_path=(columns | dict(
            target=torch.randint(0, 3, (B, T)), active=torch.tensor([1, 1, 0, 1, 1]).int(), max_path=P,
            temperature=torch.tensor([0.0, 1, 0, 1, 1]), counts=counts, known=(history, lengths, ends)),
            "active known", ""),
        advance=(dict(packed=packed, root=torch.arange(B), history=history, states=normal(B, P, C),
                      state=normal(B, C)) | cached, "lengths root history state", "lengths root history state"))


@pytest.mark.parametrize("name", by_slot())
def test_slots_select_sequences_of_the_caches(name, device):
    """Bug: a row reads or writes the cache, history or numbers of another slot."""
    def each(function, x):
        return type(x)(each(function, y) for y in x) if isinstance(x, (list, tuple)) else function(x)

    made, indexed, changed = by_slot()[name]
    slots = torch.tensor([3, 0, 4])
    at = lambda key: 2 if name == "commit_path" and key == "kv" else 1 if key == "kv" else 0
    copy = lambda key, x: each(lambda y: y.clone() if torch.is_tensor(y) else y, x)
    alone, batch = ({key: copy(key, x) for key, x in made.items()} for _ in range(2))
    for key, x in made.items():
        own = lambda y: y.index_select(at(key), slots) if torch.is_tensor(y) and key != "counts" else y
        alone[key] = each(own, x)
        if key not in indexed.split():
            batch[key] = each(own, x)
    to_device = lambda x: each(lambda y: y.to(device) if torch.is_tensor(y) else y, x)
    alone, batch = ({key: to_device(x) for key, x in given.items()} for given in (alone, batch))
    function = getattr(kernels, name)
    want, got = function(**alone), function(**batch, slots=slots.to(device))
    assert (want is None) == (got is None) and (want is None or torch.equal(want, got))
    if name == "prompt_chain":
        for a, b in zip([*alone["tree"], alone["lookup"]], [*batch["tree"], batch["lookup"]]):
            assert torch.equal(a, b)
    for key in changed.split():
        assert torch.equal(alone[key].cpu(), batch[key].cpu().index_select(at(key), slots))
        others = torch.tensor([1, 2])
        assert torch.equal(made[key].index_select(at(key), others), batch[key].cpu().index_select(at(key), others))


def test_advance_appends_a_path(device):
    """Bug: tokens at wrong places, beyond the path or of an empty path; the root or state of another node."""
    packed = torch.tensor([[5, 6, 7, 0, 2, 3, -1, -1, -1, 2, 1], [8, 9, 1, 0, 0, 0, -1, -1, -1, 0, 0]])
    lengths, root = torch.tensor([2, 3], dtype=torch.int32), torch.tensor([40, 41])
    history, states, state = torch.arange(14).view(2, 7).int(), normal(2, 3, 1111), normal(2, 1111)
    given = [x.to(device) for x in (packed, lengths, root, history, states, state)]
    kernels.advance(*given)
    assert given[1].tolist() == [4, 3] and given[2].tolist() == [6, 41]
    assert given[3].tolist() == [[0, 1, 2, 5, 6, 5, 6], [*range(7, 14)]]
    assert torch.equal(given[5].cpu(), torch.stack((states[0, 1], state[1])))
