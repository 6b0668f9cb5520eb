"""ngram_lookup and merge_chain, tested as in test_kernels.py, against a plain search and nodes added one by one."""

import random

import pytest
import torch

import kernels
from test_kernels import INTERPRETED, device, every_second, slow_to_interpret
from test_kernels_fused import random_tree

__all__ = ["device"]  # the fixture


def lookup(texts, n, device, rng=None):
    """The chains of texts of any lengths, in a history whose other columns hold tokens of all texts."""
    S = max(map(len, texts)) + 9
    junk = rng.choices([token for text in texts for token in text], k=S) if rng else [0] * S
    filled = torch.tensor([(text + junk)[:S] for text in texts], dtype=torch.int32, device=device)
    lengths = torch.tensor([len(text) - 1 for text in texts], dtype=torch.int32, device=device)
    chains = kernels.ngram_lookup(filled, every_second(lengths), n)
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
           "several-tiles": [4096, 4097, 4098, 9001, 8193, 12],
           "many-short": [*range(1, 15)] * (2 if INTERPRETED else 20)}


@pytest.mark.parametrize("n", [1, pytest.param(10, marks=slow_to_interpret), 63])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES.keys())
def test_lookup_equals_a_plain_search(vocabulary, lengths, n, device):
    """Bug: a token cut to 16 bits, an end of a tile left out, a suffix or a match that leaves its text."""
    rng = random.Random(0)
    texts = [rng.choices(vocabulary, k=length) for length in lengths]
    texts += [text[:-2] + text[:2] for text in texts]  # so that something is found in a large vocabulary too
    assert lookup(texts, n, device, rng) == [searched(text, n) for text in texts]


FOLLOWING = {  # (text, what it suggests)
    "longest-beats-nearest": ([1, 2, 3, 9, 5, 3, 8, 1, 2, 3], [9, 5, 3, 8, 1, 2, 3, 9]),
    "nearest-of-equals": ([3, 7, 3, 8, 4, 3], [8, 4, 3, 8, 4]),
    "no-more-than-four": ([0, 1, 2, 3, 4, 7, 9, 1, 2, 3, 4, 8, 0, 1, 2, 3, 4], [8, 0, 1, 2, 3, 4, 8]),
    "match-overlaps-the-suffix": ([5, 1, 2, 1, 2, 1, 2], [1, 2, 1, 2, 1, 2]),
    "a-run": ([6] * 9, [6] * 12),
    "newest-is-new": ([5, 5, 5, 5, 6], [-1] * 12),
}


@pytest.mark.parametrize("text, following", FOLLOWING.values(), ids=FOLLOWING.keys())
def test_which_match_wins(text, following, device):
    """Bug: another order of matches than by length, then by how recent they are."""
    assert lookup([text], len(following), device) == [following] == [searched(text, len(following))]


@pytest.mark.parametrize("place", [0, 4094, 4095, 99_990])
def test_a_long_text(place, device):
    """Bug: a match lost between tiles, or a nearer and shorter one of another tile that wins."""
    text = torch.arange(100_000).tolist()
    text[place + 3::1024] = [text[place + 3]] * len(text[place + 3::1024])  # at the same place of later tiles too
    text[-4:] = text[place:place + 4]
    assert lookup([text], 5, device) == [text[place + 4:place + 9]]


# ---------------------------------------------------------------------------------------------------------------------
# merge_chain

# T, n: plain roots, one more node than a tile has, 64 nodes in all
MERGED = [(1, 1), (1, 10), (1, 63), (2, 1), (5, 4), (9, 4), (16, 48), (30, 31), (33, 31), (54, 10), (63, 1)]


def random_chain(rng, n, tree):
    """What begins as a path of the tree does, or, at times, nothing."""
    tokens, parents, depths, _ = tree
    node, path = rng.randrange(len(tokens)), []
    while depths[node]:
        path.insert(0, tokens[node])
        node = parents[node]
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
    """Bug: a node twice, a common path mistaken for a longer or shorter one, the ancestors of another node."""
    rng = random.Random(0)
    trees = [random_tree(rng, T) for _ in range(24 if INTERPRETED else 100)]
    chains = [random_chain(rng, n, tree) for tree in trees]
    assert merge(trees, chains, device) == list(map(added_one_by_one, trees, chains))
