"""backends/tree.py, as in test_kernels.py, against plain searches in Python. Without Triton its functions are those of
clover.py and generate.py."""

import math
import random

import pytest
import torch
from torch.utils._pytree import tree_leaves

import clover
from backends import tree as triton_tree
from clover import BINS, SCHEMA, SOURCES, Candidates, Tree
from engine.acceptance import ACTIVE, GUIDED
from generate import Accepted
from static import module_of
from test_kernels import INTERPRETED, as_int64, every_second, slow_to_interpret
from test_kernels_fused import normal

# B, K, W, T, whether all beams share proposals
TREES = {"small": (3, 4, 4, 16, False), "two-nodes": (2, 1, 1, 2, False), "shared-proposals": (2, 4, 3, 30, True),
         "64-nodes": (2, 4, 8, 64, False), "one-beam": (3, 5, 1, 4, False), "32-beams": (1, 2, 32, 64, False),
         "more-nodes-than-proposals": (2, 2, 2, 20, False)}


def random_proposals(B, w, W):
    """logprobs and tokens [B, w, W] with many ties, -inf, NaN and one above 0, half of them between two bins."""
    logprobs = -torch.rand(B, w, W).mul(8).round().mul(3 / 8).sort(-1).values
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
    candidates = Candidates.empty(root, K, n)
    candidates.joint.fill_(math.nan)
    joint, tokens, parents = candidates
    assert all(x.shape == (B, K, n) and x.is_contiguous() for x in candidates)
    lists = [[[]] for _ in range(B)]  # per depth: (joint, token, parent's index in the depth before), best first
    for depth in range(K):
        w = 1 if depth == 0 else W
        logprobs, proposed = random_proposals(B, 1 if shared else w, W)
        inputs = every_second(logprobs.to(device)), every_second(proposed.to(device))
        triton_tree.extend_candidates(*inputs, candidates, depth)
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


def plain_lookup(text, n):
    """The length of the match and the chain, by trying every place from the newest back."""
    last = len(text) - 1
    matches = ((size, end) for size in (4, 3, 2, 1) for end in range(last, size - 1, -1)
               if text[end - size:end] == text[last + 1 - size:])
    size, end = next(matches, (0, 0))
    return [size, *(text[end + i % (last + 1 - end)] if size else -1 for i in range(n))]


def lookup(texts, n, device, rng=None):
    """The chains of texts of any lengths; the rest of the history holds tokens of all texts."""
    S = max(map(len, texts)) + 9
    junk = rng.choices([token for text in texts for token in text], k=S) if rng else [0] * S
    filled = torch.tensor([(text + junk)[:S] for text in texts], dtype=torch.int32, device=device)
    lengths = torch.tensor([len(text) - 1 for text in texts], dtype=torch.int32, device=device)
    chains = triton_tree.ngram_lookup(filled, every_second(lengths), n)
    assert chains.shape == (len(texts), 1 + n) and chains.dtype == torch.int64
    return chains.tolist()


VOCABULARIES = {"one-token": [3], "70,000": range(70_000), "to-2^31": [0, 2**31 - 1, 5],
                "equal-in-16-bits": [7, 7 + 2**16, 7 + 2**17, 2**16]}
LENGTHS = {"1": [1], "2": [2, 1], "3": [3, 2, 1], "ragged": [7, 1, 4, 2, 111, 3, 63, 64, 5],
           "several-tiles": [4097, 9001, 4095], "many-short": [*range(1, 15)] * (1 if INTERPRETED else 20)}


@pytest.mark.parametrize("n", [pytest.param(1, marks=slow_to_interpret), 63])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES.keys())
def test_lookup_is_a_plain_search(vocabulary, lengths, n, device):
    """Bug: a token of 16 bits, a tile's end left out, a match outside its text, of 5 tokens, nearer but shorter."""
    rng = random.Random(0)
    texts = [rng.choices(vocabulary, k=length) for length in lengths]
    texts += [text[:-2] + text[:2] for text in texts]  # so that a large vocabulary has matches too
    got = lookup(texts, n, device, rng)
    assert got == [plain_lookup(text, n) for text in texts]


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
    root, candidates = torch.randint(0, 9, (B,)), Candidates.empty(torch.zeros(B).long(), K, n) if K else None
    for depth in range(K):
        clover.extend_candidates(*random_proposals(B, W if depth else 1, W), candidates, depth)
    match = torch.randint(0, 6, (B, 1))
    lookup = torch.cat((match, torch.randint(0, 3, (B, n_chain))), 1)
    for b in range(B if K and n_chain else 0):
        beam = int(torch.randint(0, W, ()))
        for depth in range(min(int(torch.randint(0, K + 1, ())), n_chain) - 1, -1, -1):
            lookup[b, 1 + depth] = candidates.tokens[b, depth, beam]
            beam = max(int(candidates.parents[b, depth, beam]), 0)
    ends = torch.where(match == SCHEMA, torch.randint(0, 1 + n_chain, (B, 1)), n_chain * (match > 0))
    lookup[:, 1:].masked_fill_(torch.arange(n_chain) >= ends, -1)
    return root, candidates, lookup if n_chain else None


def plain_trees(root, candidates, lookup, chances, temperature, T):
    """The six columns of `Tree` [B, T], from paths as tuples of tokens."""
    chances = chances.nan_to_num(0.0).clamp(0, 1)[(temperature > 0).long()]  # (B, SOURCES)
    joint, tokens, parents = candidates or Candidates.empty(root, 0, 1)
    n = joint.shape[2]
    x = (-4 * joint.flatten(1)).nan_to_num(BINS - 1).clamp(0, BINS - 1)  # (B, K n)
    low = x.long().clamp(max=BINS - 2)
    p, q = (chances[:, :BINS].cummin(1).values.gather(1, low + i) for i in (0, 1))
    p = torch.maximum(p + (q - p) * (x - low), q)
    parents = parents.where(joint > -math.inf, -1)  # what a mask forbids is no node
    columns = [y.flatten(1).tolist() for y in (tokens, parents, x.long(), p)]
    trees = []
    for b, root_token in enumerate(root.tolist()):
        paths = [(root_token,)] * n  # of tokens: n times the root's, then each candidate's
        pool = {paths[0]: (-1, 1.0)}  # path: (source, probability)
        for i, (token, parent, *node) in enumerate(zip(*(column[b] for column in columns))):
            paths.append((*paths[i - i % n + parent], token))
            if parent >= 0:
                pool[paths[-1]] = node
        match, *chain = [0] if lookup is None else lookup[b].tolist()
        chain, chance = chain[:[*chain, -1].index(-1)], torch.ones(())
        for j in range(1, 1 + len(chain) * (match > 0)):
            chance = chance * chances[b, BINS + match]
            path = root_token, *chain[:j]
            if path not in pool or chance > pool[path][1]:
                pool[path] = BINS + match, chance.item()
        node_of, tree = {(): 0}, []
        for path in sorted(pool, key=lambda path: (-pool[path][1], len(path), path[-1]))[:T]:
            node = node_of[path] = len(tree)
            parent = node_of[path[:-1]]
            ancestors = 1 << node | (tree[parent][3] if tree else 0)
            tree.append((path[-1], parent, len(path) - 1, ancestors - (ancestors >> 63 << 64), *pool[path]))
        trees.append(tree + [(0, 0, 0, 0, -1, 0.0)] * (T - len(tree)))
    return [torch.tensor([[node[i] for node in tree] for tree in trees]) for i in range(6)]


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())
@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS.keys())
def test_trees_are_the_front_of_a_plain_search(pool, table, device):
    """Bug: a wrong order of ties, a child without its parent, one token twice, padding or a forbidden token that counts
    as a node; a small tree that is not the front of a larger one; a chance that rises along a path, is of the other
    mode, a power too many or not interpolated between bins; the smaller chance or its source for a merged node."""
    for _ in range(1 if INTERPRETED else 20):
        root, candidates, lookup = random_pool(*pool)
        chances, temperature = torch.tensor([table, table[::-1]]), torch.randint(0, 2, root.shape).float()
        want = plain_trees(root, candidates, lookup, chances, temperature, 64)
        on_device = [None if x is None else every_second(x.to(device)) for x in (root, lookup, chances, temperature)]
        heads = candidates and Candidates(*(x.to(device) for x in candidates))
        for T in (64,) if INTERPRETED and pool[-1] > 15 else (2, 15, 64):  # the interpreter takes seconds
            got = triton_tree.build_tree(on_device[0], heads, *on_device[1:], T)
            assert all(torch.equal(x.cpu(), y[:, :T]) for x, y in zip(got, want, strict=True)), T


def random_tree(rng, T, max_depth=6):
    """[tokens, parents, depths, bitmasks] of T nodes, some of them padding; a node's i-th child has the token i."""
    used = rng.choice([T, T, 1, rng.randint(1, T)])
    tokens, parents, depths, masks = [rng.randint(0, 99)], [0], [0], [1]
    for i in range(1, used):
        parent = rng.choice([j for j in range(i) if depths[j] < max_depth])
        tokens.append(parents[1:].count(parent))
        parents.append(parent), depths.append(depths[parent] + 1), masks.append(masks[parent] | 1 << i)
    return [x + [0] * (T - used) for x in (tokens, parents, depths, masks)]


def random_trees(rng, B, T, max_depth=6):
    """A `Tree` of B random trees, of random sources."""
    columns = [as_int64(x) for x in zip(*(random_tree(rng, T, max_depth) for _ in range(B)))]
    sources = torch.randint(-1, SOURCES, (B, T))
    sources[:, 0] = -1
    return Tree(*columns, sources, torch.rand(B, T))


def plain_counts(counts, tree, path, targets, activity, mode, chain):
    """Adds what a sequence of `tree` (lists) counts, see `engine.acceptance.count_nodes`."""
    for i, (source, ancestors) in enumerate(zip(tree.sources, tree.ancestors)):
        if i and ancestors and 0 <= source < BINS and activity == ACTIVE:
            counts[mode, source] += counts.new_tensor([i in path, 1])
    match, *chain = chain or [0]
    chain = chain[:[*chain, -1].index(-1)]
    equal = [guess == token for guess, token in zip(chain, targets)]
    right = [*equal, False].index(False)
    if match and (activity == ACTIVE or activity == GUIDED and match == SCHEMA):
        counts[mode, BINS + match] += counts.new_tensor([right, min(right + 1, len(equal))])


@pytest.mark.parametrize("n_chain", [0, 1, 3, 20])
def test_paths_and_counts_are_those_of_a_plain_walk(n_chain, device):
    """Bug: a node accepted under a rejected parent, a padding node, an idle sequence that runs; counts of the other
    mode or of an idle sequence; the end of a chain counted as a wrong token."""
    rng = random.Random(n_chain)
    counts = torch.full((2, SOURCES, 2), 2.0**24, dtype=torch.float64, device=device)
    want = counts.cpu().clone()
    active = torch.tensor([ACTIVE, GUIDED, 0, ACTIVE], dtype=torch.int32)
    temperature = torch.tensor([0.0, 1.0, 0.5, 0.0])
    for _ in range(10 if INTERPRETED else 100):
        T, P = rng.randint(1, 64), rng.randint(1, 6)
        tree = random_trees(rng, 4, T, 4)
        target = torch.randint(0, 3, (4, T))
        lookup = torch.cat((torch.randint(0, 6, (4, 1)), torch.randint(0, 3, (4, n_chain))), 1)
        paths = []
        for b, activity in enumerate(active.tolist()):
            nodes, targets = Tree(*(x[b].tolist() for x in tree)), target[b].tolist()
            path = [0]
            while following := [i for i in range(1, T) if nodes.ancestors[i] and nodes.parents[i] == path[-1]
                                and nodes.tokens[i] == targets[path[-1]]]:
                path += following
            path = path[:P]  # deeper nodes are left out
            emitted = [targets[i] for i in path]
            equal = rng.randint(0, min(n_chain, len(path)))
            lookup[b, 1:1 + equal] = torch.tensor(emitted[:equal])
            if lookup[b, 0] == SCHEMA:
                lookup[b, 1 + rng.randint(0, n_chain):] = -1  # a shorter chain
            plain_counts(want, nodes, path, emitted, activity, int(temperature[b] > 0),
                         lookup[b].tolist() if n_chain else None)
            paths.append((path, emitted, activity))
        spread = lambda x: every_second(x.to(device))
        chain = spread(lookup) if n_chain else None
        got = triton_tree.accept_path(Tree(*map(spread, tree)), spread(target), spread(active), P, spread(temperature),
                                      counts, chain)
        for b, (path, emitted, activity) in enumerate(paths):
            rest = P - len(path)
            assert got.path[b].tolist() == [*path, *[0] * rest] and got.count[b] == bool(activity) * len(path)
            assert got.tokens[b].tolist() == [*emitted, *[target[b, 0].item()] * rest]
            assert got.sources[b].tolist() == [*tree.sources[b, path].tolist(), *[-1] * rest]
        assert torch.equal(counts.cpu(), want)
        assert all(map(torch.equal, triton_tree.to_host(got), (x.cpu() for x in got)))


@pytest.mark.parametrize("T", [1, 2, 13, 64])
@pytest.mark.parametrize("n_chain", [None, 0, 15])
def test_a_prompt_is_a_chain_that_is_accepted(T, n_chain, device):
    """Bug: a known token rejected or replaced by a sample, padding accepted, another tree changed, a guess counted."""
    rng = random.Random(T)
    starts, ends = [0, 5, 0, 40, 7, 90], [70, 5, 0, 41, 7 + T, 3]  # the second, the third and the last have been read
    texts = torch.randint(0, 99, (6, 200))
    tree = random_trees(rng, 6, T)
    lookup = None if n_chain is None else torch.randint(1, 5, (6, 1 + n_chain))
    target, counts = torch.randint(100, 200, (6, T)), torch.zeros(2, SOURCES, 2, dtype=torch.float64)
    known = [x.to(device) for x in (texts.int(), torch.tensor(starts).int(), torch.tensor(ends).int())]
    got = Tree(*(x.clone().to(device) for x in tree))
    chain = lookup if lookup is None else lookup.clone().to(device)
    triton_tree.prompt_chain(*known, got, chain)
    inputs = [x.to(device) for x in (target, torch.ones(6, dtype=torch.int32))]
    out = triton_tree.accept_path(got, *inputs, T, torch.zeros(6).to(device), counts.to(device), chain, prompts=known)
    for b, (start, end) in enumerate(zip(starts, ends)):
        columns, unread = [x[b].tolist() for x in got], end - start
        if unread <= 0:
            assert columns == [x[b].tolist() for x in tree]
            assert chain is None or torch.equal(chain[b].cpu(), lookup[b])
            continue
        n = min(T, unread + 1)  # nodes; each has the one before as its parent
        masks = [(2 << j) - 1 for j in range(63)] + [-1]
        nodes = [(texts[b, start + j].item(), max(j - 1, 0), j, masks[j], -1, 1) for j in range(n)]
        assert [*zip(*columns)] == nodes + [(0, 0, 0, 0, -1, 0)] * (T - n)
        assert chain is None or chain[b, 0] == 0
        emitted = [texts[b, at].item() if at <= end else target[b, at - 1 - start].item()
                   for at in range(start + 1, start + n + 1)]
        assert out.tokens[b, :n].tolist() == emitted and out.path[b, :n].tolist() == [*range(n)] and out.count[b] == n


def by_slot():
    """{function: (arguments of 5 sequences, names of those that slots index, names of those changed in place)}"""
    rng, B, T, P, S, C = random.Random(1), 5, 6, 4, 90, 40
    lengths = torch.tensor([3, 70, 0, 41, 12], dtype=torch.int32)
    ends = torch.tensor([3, 75, 0, 42, 90], dtype=torch.int32)
    history = torch.randint(0, 3, (B, S), dtype=torch.int32)
    kv = normal(3, 2, B, 2, S, 16)
    tree = random_trees(rng, B, T, 3)
    path, count = torch.tensor([[0, 1, 3, 5]] * B), torch.tensor([4, 1, 2, 0, 3])
    accepted = Accepted(torch.randint(0, 9, (B, P)), path, path, count)
    counts = torch.zeros(2, SOURCES, 2, dtype=torch.float64)
    cached = dict(lengths=lengths)
    return dict(
        tree_attention=(dict(q=normal(B, T, 4, 16), k_cache=kv[0, 0], v_cache=kv[0, 1], ancestors=tree.ancestors)
                        | cached, "k_cache v_cache lengths", ""),
        rope_cache=(dict(qkv=normal(B, T, 8, 16), rope=normal(B, T, 2, 16), kv=kv[0].clone()) | cached,
                    "kv lengths", "kv"),
        commit_path=(dict(kv=kv, path=path, count=count) | cached, "kv lengths", "kv"),
        ngram_lookup=(dict(history=history, n=7) | cached, "history lengths", ""),
        prompt_chain=(dict(history=history, ends=ends, tree=tree, chain=torch.ones(B, 8).long()) | cached,
                      "history ends lengths", ""),
        accept_path=(dict(
            tree=tree, target=torch.randint(0, 3, (B, T)), active=torch.tensor([1, 1, 0, 1, 1]).int(), max_path=P,
            temperature=torch.tensor([0.0, 1, 0, 1, 1]), counts=counts, prompts=(history, lengths, ends)),
            "active prompts", ""),
        advance=(dict(accepted=accepted, root=torch.arange(B), history=history, states=normal(B, P, C),
                      state=normal(B, C)) | cached, "lengths root history state", "lengths root history state"))


@pytest.mark.parametrize("name", by_slot())
def test_slots_select_sequences_of_the_caches(name, device):
    """Bug: a row reads or writes the cache, history or numbers of another slot."""
    def each(function, x):
        if not isinstance(x, tuple):
            return function(x)
        parts = (each(function, y) for y in x)
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)

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
    function = getattr(module_of(name), name)
    want, got = function(**alone), function(**batch, slots=slots.to(device))
    if name == "prompt_chain":
        want, got = ((*given["tree"], given["chain"]) for given in (alone, batch))
    for a, b in zip(tree_leaves([want]), tree_leaves([got]), strict=True):
        assert a is b is None or torch.equal(a, b)
    for key in changed.split():
        assert torch.equal(alone[key].cpu(), batch[key].cpu().index_select(at(key), slots))
        others = torch.tensor([1, 2])
        assert torch.equal(made[key].index_select(at(key), others), batch[key].cpu().index_select(at(key), others))


def test_advance_appends_a_path(device):
    """Bug: tokens at wrong places, beyond the path or of an empty path; the root or state of another node."""
    tokens, path = torch.tensor([[5, 6, 7], [8, 9, 1]]), torch.tensor([[0, 2, 3], [0, 0, 0]])
    lengths, root = torch.tensor([2, 3], dtype=torch.int32), torch.tensor([40, 41])
    history, states, state = torch.arange(14).view(2, 7).int(), normal(2, 3, 1111), normal(2, 1111)
    accepted = Accepted(*(x.to(device) for x in (tokens, path, path, torch.tensor([2, 0]))))
    given = [x.to(device) for x in (lengths, root, history, states, state)]
    triton_tree.advance(accepted, *given)
    assert given[0].tolist() == [4, 3] and given[1].tolist() == [6, 41]
    assert given[2].tolist() == [[0, 1, 2, 5, 6, 5, 6], [*range(7, 14)]]
    assert torch.equal(given[4].cpu(), torch.stack((states[0, 1], state[1])))
