"""ngram_lookup and merge_chain, tested three ways as in test_kernels.py: by the torch references here, by the
Triton kernels under the interpreter in another process, and on CUDA where there is a device. The results are compared
with a plain search and with nodes added one by one."""

import random

import pytest
import torch

import kernels
from test_kernels import INTERPRETED, device, plain, slow_to_interpret
from test_kernels_fused import every_second

__all__ = ["device"]  # the fixture


def lookup(texts, n, device, junk=(), S=None):
    """The chains of texts of any lengths. After each comes the junk, repeated up to S tokens in all."""
    S = S or max(map(len, texts))
    filled = [[*text, *(list(junk or [0]) * S)[:S - len(text)]] for text in texts]
    lengths = torch.tensor([len(text) - 1 for text in texts], dtype=torch.int32, device=device)
    chains = kernels.ngram_lookup(torch.tensor(filled, dtype=torch.int32, device=device), lengths, n)
    assert chains.shape == (len(texts), n) and chains.dtype == torch.int64
    return chains.tolist()


def searched(text, n):
    """By trying every earlier end of every suffix."""
    last = len(text) - 1
    for size in (4, 3, 2, 1):
        for end in range(last - 1, size - 2, -1):
            if text[end - size + 1:end + 1] == text[last - size + 1:]:
                longer = list(text)
                for _ in range(n):
                    longer.append(longer[end - last])
                return longer[last + 1:]
    return [-1] * n


# ---------------------------------------------------------------------------------------------------------------------
# ngram_lookup

VOCABULARIES = {"one-token": [3], "two": [0, 1], "five": range(5), "70,000": range(70_000),
                "to-2^31": [0, 2**31 - 1, 5], "equal-in-16-bits": [7, 7 + 2**16, 7 + 2**17, 2**16]}
LENGTHS = {"1": [1], "2": [2, 1], "3": [3, 2, 1], "ragged": [7, 1, 4, 2, 111, 3, 63, 64, 5],
           "several-tiles": [4096, 4097, 4098, 9001, 8193, 12]}


@pytest.mark.parametrize("n", [1, pytest.param(10, marks=slow_to_interpret), 63])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES.keys())
def test_lookup_equals_a_plain_search(vocabulary, lengths, n, device):
    """Bug: a token cut to 16 bits, an end of a tile left out, a suffix that begins before its text, a match with the
    suffix itself, tokens that the text does not have yet."""
    rng = random.Random(0)
    texts = [rng.choices(vocabulary, k=length) for length in lengths]
    texts += [text[:-2] + text[:2] for text in texts]  # so that something is found in a large vocabulary too
    assert lookup(texts, n, device) == [searched(text, n) for text in texts]


def test_lookup_equals_a_plain_search_in_many_short_texts(device):
    """Bug: as above, in a case that few texts have."""
    rng = random.Random(0)
    for V in (2, 3, 4):
        texts = [rng.choices(range(V), k=rng.randint(1, 14)) for _ in range(30 if INTERPRETED else 400)]
        assert lookup(texts, 6, device) == [searched(text, 6) for text in texts]


FOLLOWING = {  # (text, what it suggests)
    "longest-beats-nearest": ([1, 2, 3, 9, 5, 3, 8, 1, 2, 3], [9, 5, 3, 8, 1, 2, 3, 9]),
    "nearest-of-equals": ([3, 7, 3, 8, 4, 3], [8, 4, 3, 8, 4]),
    "no-more-than-four": ([0, 1, 2, 3, 4, 7, 9, 1, 2, 3, 4, 8, 0, 1, 2, 3, 4], [8, 0, 1, 2, 3, 4, 8]),
    "four-beat-three": ([1, 2, 3, 4, 7, 9, 2, 3, 4, 8, 1, 2, 3, 4], [7, 9, 2, 3]),
    "match-overlaps-the-suffix": ([5, 1, 2, 1, 2, 1, 2], [1, 2, 1, 2, 1, 2]),
    "a-run": ([6] * 9, [6] * 12),
    "a-pair": ([6, 6], [6] * 12),
    "newest-is-new": ([5, 5, 5, 5, 6], [-1] * 12),
    "one-token": ([5], [-1] * 12),
}


@pytest.mark.parametrize("text, following", FOLLOWING.values(), ids=FOLLOWING.keys())
def test_which_match_wins(text, following, device):
    """Bug: another order of matches than by length, then by how recent they are; a chain that stops at the newest
    token."""
    n = len(following)
    assert lookup([text], n, device) == [following] == [searched(text, n)]
    assert lookup([text], 1, device) == [following[:1]]


@pytest.mark.parametrize("n", [1, 63])
def test_what_comes_after_the_newest_token_does_not_count(n, device):
    """Bug: a match in a longer text that was there before, or a chain that reads on into it."""
    texts = [[1, 2, 3, 4], [4], [8, 4, 9, 2, 3, 4], [4, 4], [2, 3, 4, 6, 5, 1, 2, 3, 4]]
    want = [searched(text, n) for text in texts]
    assert want[0] == want[1] == [-1] * n
    for junk in ([0], [-1], [2**31 - 1], [4], [1, 2, 3, 4], [5, 1, 2, 3, 4, 6]):
        for S in (9, 33):
            assert lookup(texts, n, device, junk, S) == want, (junk, S)


def test_a_text_does_not_begin_in_the_one_before(device):
    """Bug: a suffix that matches across two rows of the history. 2 1 is the suffix of the second text; its first token
    is 1, and the other text ends with 2."""
    texts = [[7, 8, 9, 3, 4, 2], [1, 7, 1, 8, 2, 1]]
    assert lookup(texts, 2, device)[1] == [8, 2]


@pytest.mark.parametrize("place", [0, 4094, 4095, 99_990])
def test_a_long_text(place, device):
    """Bug: a match lost between tiles, or a nearer and shorter one of another tile that wins."""
    text = torch.arange(100_000).tolist()
    text[place + 3::1024] = [text[place + 3]] * len(text[place + 3::1024])  # at the same place of later tiles too
    text[-4:] = text[place:place + 4]
    assert lookup([text], 5, device) == [text[place + 4:place + 9]]


def test_lengths_may_be_strided(device):
    """Bug: the lengths of other sequences."""
    history = torch.tensor([[1, 2, 1, 2], [3, 3, 4, 4], [1, 2, 3, 4]], dtype=torch.int32, device=device)
    lengths = torch.tensor([2, 0, 1, 0, 3, 0], dtype=torch.int32, device=device)[::2]
    assert kernels.ngram_lookup(history, lengths, 2).tolist() == [[2, 1], [3, 3], [-1, -1]]


@plain
def test_a_growing_text_needs_no_more_memory():
    """Bug: a constant is kept for each length that the text had."""
    kernels._column.cache_clear()
    for length in range(40):
        kernels.ngram_lookup(torch.zeros(1, 50, dtype=torch.int32), torch.tensor([length], dtype=torch.int32), 3)
    assert kernels._column.cache_info().currsize <= 3


# ---------------------------------------------------------------------------------------------------------------------
# merge_chain

# T, n: plain roots, one more node than a tile has, 64 nodes in all
MERGED = [(1, 1), (1, 10), (1, 63), (2, 1), (5, 4), (9, 4), (16, 48), (30, 31), (33, 31), (54, 10), (63, 1)]


def random_tree(rng, T):
    """(tokens, parents, depths, bitmasks) of T nodes, of which the last ones may be spare."""
    used = rng.choice([T, T, 1, rng.randint(1, T)])
    tokens, parents, depths, masks = [rng.randint(0, 99)], [0], [0], [1]
    for i in range(1, used):
        parent = rng.choice([j for j in range(i) if depths[j] < 6])
        tokens.append(parents[1:].count(parent))  # a node's i-th child has the token i, so siblings differ
        parents.append(parent), depths.append(depths[parent] + 1), masks.append(masks[parent] | 1 << i)
    return [x + [0] * (T - used) for x in (tokens, parents, depths, masks)]


def path_to(node, tokens, parents, depths):
    """The tokens below the root that lead to a node."""
    return [*path_to(parents[node], tokens, parents, depths), tokens[node]] if depths[node] else []


def random_chain(rng, n, tree):
    """What begins as a path of the tree does, or, at times, nothing."""
    path = path_to(rng.randrange(len(tree[0])), *tree[:3])
    return [-1] * n if rng.random() < 0.1 else [*path, *(rng.randint(0, 2) for _ in range(n))][:n]


def merge(trees, chains, device):
    """Lists of (token, parent, depth, bitmask) for each sequence, a bitmask from 0 to 2^64 - 1."""
    nodes = [every_second(torch.tensor(x, device=device)) for x in (*zip(*trees), chains)]
    merged = kernels.merge_chain(*nodes)
    (B, T), n = nodes[0].shape, nodes[4].shape[1]
    assert len(merged) == 4 and all(x.shape == (B, T + n) and x.dtype == torch.int64 for x in merged)
    return [[(*row[:3], row[3] % 2**64) for row in zip(*rows)] for rows in zip(*(x.tolist() for x in merged))]


def added_one_by_one(tree, chain):
    rows, T, node = list(zip(*tree)), len(tree[0]), 0
    for depth, token in enumerate(chain, start=1):
        below = [i for i, row in enumerate(rows) if row[:3] == (token, node, depth) and row[3]]
        if token >= 0 and not below:
            below = [len(rows)]
            rows.append((token, node, depth, rows[node][3] | 1 << len(rows)))
        node = below[0] if below else None
    return rows + [(0, 0, 0, 0)] * (T + len(chain) - len(rows))


@pytest.mark.parametrize("T, n", MERGED)
def test_a_merged_tree_is_what_adding_one_by_one_gives(T, n, device):
    """Bug: a node twice, a shared path taken for longer or shorter than it is, a spare node for a shared one, the
    parent or the ancestors of another node."""
    rng = random.Random(0)
    trees = [random_tree(rng, T) for _ in range(24 if INTERPRETED else 100)]
    chains = [random_chain(rng, n, tree) for tree in trees]
    assert merge(trees, chains, device) == list(map(added_one_by_one, trees, chains))


# root 7 with children 1 and 2, of which 1 has the child 3; the last node is spare
TREE = [7, 1, 2, 3, 0], [0, 0, 0, 1, 0], [0, 1, 1, 2, 0], [0b1, 0b11, 0b101, 0b1011, 0]
SPARE = (0, 0, 0, 0)
CHAINS = {  # (chain, what is appended: token, parent, depth, bitmask)
    "goes-on-below-a-leaf": ([1, 3, 5], [(5, 3, 3, 0b101011), SPARE, SPARE]),
    "parts-within": ([1, 4, 5], [(4, 1, 2, 0b100011), (5, 5, 3, 0b1100011), SPARE]),
    "parts-at-the-root": ([3, 3, 0], [(3, 0, 1, 0b100001), (3, 5, 2, 0b1100001), (0, 6, 3, 0b11100001)]),
    "inside-the-tree": ([1, 3], [SPARE] * 2),
    "shorter-than-the-path": ([1], [SPARE]),
    "token-0-is-not-a-spare-node": ([0], [(0, 0, 1, 0b100001)]),
    "its-third-token-at-another-depth": ([2, 3], [(3, 2, 2, 0b100101), SPARE]),
    "none": ([-1, -1, -1], [SPARE] * 3),
}


@pytest.mark.parametrize("chain, appended", CHAINS.values(), ids=CHAINS.keys())
def test_where_a_chain_and_a_tree_part(chain, appended, device):
    """Bug: as above, in cases that can be read; the tree's own nodes changed or moved."""
    got, = merge([TREE], [chain], device)
    assert got == [*zip(*TREE), *appended]


@pytest.mark.parametrize("T, n", MERGED)
def test_a_merged_tree_accepts_what_the_tree_or_the_chain_would(T, n, device):
    """Bug: a token twice under one parent, of which both or neither are accepted; a child before its parent; a guess
    that is lost."""
    rng = random.Random(1)
    for _ in range(4 if INTERPRETED else 30):
        tree = random_tree(rng, T)
        chain = random_chain(rng, n, tree)
        rows, = merge([tree], [chain], device)
        guessed = [[token for token in chain if token >= 0], *(path_to(i, *tree[:3]) for i in range(T))]
        text = [*rng.choice([guessed[0], rng.choice(guessed)]), *rng.choices(range(3), k=64)]
        agreed = max(next((d for d, (a, b) in enumerate(zip(guess, text)) if a != b), len(guess)) for guess in guessed)
        tokens, parents, depths, masks = map(list, zip(*rows))
        used = [i for i in range(1, T + n) if masks[i]]
        assert len({(parents[i], tokens[i]) for i in used}) == len(used)
        for i in used:
            assert parents[i] < i and depths[i] == depths[parents[i]] + 1 and masks[i] == masks[parents[i]] | 1 << i
        paths = [path_to(i, tokens, parents, depths) for i in range(T + n)]
        target = [text[len(path)] if path == text[:len(path)] else rng.randint(0, 2) for path in paths]
        inputs = [tokens, parents, depths, [mask - (mask >> 63 << 64) for mask in masks], target]
        inputs = [torch.tensor([x], device=device) for x in inputs]
        out, = kernels.accept_path(*inputs, torch.ones(1, dtype=torch.int32, device=device), 64).tolist()
        assert out[-2] == agreed + 1 and out[:agreed + 1] == text[:agreed + 1]


def test_a_chain_of_lookup_is_one_of_merge_chain(device):
    """Bug: the two do not fit together: where nothing is found, or as a tree of one root."""
    texts = torch.tensor([[1, 2, 3, 1, 2], [1, 2, 3, 4, 5]], dtype=torch.int32, device=device)
    chain = kernels.ngram_lookup(texts, torch.tensor([4, 4], dtype=torch.int32, device=device), 2)
    root, zero = texts[:, -1:].long(), torch.zeros(2, 1, dtype=torch.int64, device=device)
    tokens, parents, depths, ancestors = kernels.merge_chain(root, zero, zero, zero + 1, chain)
    assert tokens.tolist() == [[2, 3, 1], [5, 0, 0]] and parents.tolist() == [[0, 0, 1], [0, 0, 0]]
    assert depths.tolist() == [[0, 1, 2], [0, 0, 0]] and ancestors.tolist() == [[1, 0b11, 0b111], [1, 0, 0]]
