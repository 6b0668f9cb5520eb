"""How likely nodes of a draft tree are to be accepted, from counts of those that earlier steps
proposed and accepted."""

from collections import Counter
from itertools import accumulate

import torch

from clover import BINS, SCHEMA, SOURCES
from engine.times import Mean
from generate import prior_chances

ACTIVE, GUIDED = 1, 2  # in `Slots.active`: a sequence without or with a grammar
PROPOSED = [1.0, 2.5, 3.0, 3.5, 4.0, 10.0]  # tokens that the prior of chains is worth
MEMORY = 256, 64  # window of the counts: head nodes per bin, lookup tokens per length


class Acceptance:
    """The tables of a policy (see `generate.Fixed`) at fixed addresses: steps add to `counts` and
    read `chances`, which `learn` updates."""

    def __init__(self, heads, device):
        # [2, SOURCES, 2]: accepted, proposed; at first by the prior, and those in heads.json
        proposed = torch.tensor([4.0] * BINS + PROPOSED).expand(2, -1)
        self.known = torch.stack((prior_chances() * proposed, proposed), dim=2)
        if heads and (tables := heads.info.get("acceptance")):
            self.known[:, :BINS] += torch.tensor([tables["greedy"], tables["sampled"]])
        # totals; in float32 they would stop at 2^24
        self.counts = torch.zeros(2, SOURCES, 2, dtype=torch.float64, device=device)
        self.seen = torch.zeros(2, SOURCES, 2)  # the part of `counts` that `known` includes
        self.chances = torch.zeros(2, SOURCES, device=device)
        self.learn(self.seen)

    def learn(self, counts):
        """Updates `chances` from the new total `counts`, on the host."""
        self.known += counts - self.seen
        self.seen = counts
        for part, memory in zip(self.known.split((BINS, SOURCES - BINS), dim=1), MEMORY):
            part *= (memory / part[..., 1:]).clamp(max=1)  # forgets what is older
        chances = self.known[..., 0] / self.known[..., 1]
        chances[:, :BINS] = torch.tensor([falling(bins) for bins in self.known[:, :BINS].tolist()])
        if self.chances.is_cuda:
            chances = chances.pin_memory()  # else the host would wait for the copy
        self.chances.copy_(chances, non_blocking=True)

    def forced(self):
        """The probability that a token of forced text is accepted, in both modes."""
        right, proposed = self.known[:, BINS + SCHEMA].sum(0).tolist()
        return right / proposed


def falling(bins):
    """Acceptance rate of each bin of (accepted, proposed) nodes, made non-increasing by pooling
    adjacent bins (isotonic regression)."""
    pools = []
    for accepted, proposed in bins:
        width = 1  # in bins
        while pools and accepted * pools[-1][1] > pools[-1][0] * proposed:
            a, p, w = pools.pop()
            accepted, proposed, width = accepted + a, proposed + p, width + w
        pools.append((accepted, proposed, width))
    return [accepted / proposed for accepted, proposed, width in pools for _ in range(width)]


def count_nodes(counts, tree, accepted, active, temperature, chain=None):
    """Adds a step's (accepted, proposed) nodes to counts, float64 [mode, source, 2]. Of a chain,
    the tokens that were emitted, and these with the first wrong one. A sequence with a grammar
    (active, int32 [B], is GUIDED) counts only chains of forced text. temperature: [B]."""
    is_head = (tree.sources >= 0) & (tree.sources < BINS) & (tree.ancestors != 0)
    proposed = is_head & (active == ACTIVE)[:, None]
    on_path = torch.zeros_like(proposed).scatter(1, accepted.path, True)
    add_counts(counts, tree.sources, temperature, on_path & proposed, proposed)
    if chain is None:
        return
    match = chain[:, :1]
    n = min(chain.shape[1] - 1, accepted.path.shape[1])
    guesses = chain[:, 1:n + 1]
    compared = (torch.arange(n, device=chain.device) < accepted.count[:, None]) & (guesses >= 0)
    compared = compared.cumprod(1)  # up to the chain's end
    right = (compared * (guesses == accepted.tokens[:, :n])).cumprod(1).sum(1, keepdim=True)
    tried = torch.minimum(right + 1, compared.sum(1, keepdim=True))
    active = active[:, None]
    counted = (match > 0) & ((active == ACTIVE) | (active == GUIDED) & (match == SCHEMA))
    add_counts(counts, BINS + match, temperature, right * counted, tried * counted)


def add_counts(counts, sources, temperature, right, tried):
    """Adds right and tried [B, n] to the counts of their sources."""
    cell = sources.clamp(min=0) + SOURCES * (temperature > 0)[:, None]
    added = torch.stack((right, tried), dim=-1).flatten(0, 1).to(counts.dtype)
    counts.view(-1, 2).index_add_(0, cell.flatten(), added)


class NodeMeans:
    """Running means of the acceptance of a tree's n-th likeliest node after the root, where the
    size is fixed before the step."""

    def __init__(self, first):
        self.means = [Mean(first, 2)]  # a guess

    def learn(self, tree_size, paths):
        """paths: accepted nodes of each sequence, root first."""
        hits = Counter(node for path in paths for node in path)
        self.means += [Mean(x, 2) for x in self.extended(tree_size - 1)[len(self.means):]]
        for node, mean in enumerate(self.means[:tree_size - 1], start=1):
            mean.learn(hits[node] / len(paths))

    def extended(self, n):
        """n means; those beyond the last known one fall as rank ** -1.4."""
        known = len(self.means)
        means = [mean.value for mean in self.means]
        fall = ((known / rank) ** 1.4 for rank in range(known + 1, n + 1))
        return means[:n] + [means[-1] * x for x in fall]

    def expected(self, largest):
        """Expected tokens of a step, by tree size 0, 1, ..., largest."""
        return [0, *accumulate(self.extended(largest - 1), initial=1)]
