"""The generation loop: `Decoder.step`, the `Engine` that queues prompts, and `generate()`.

    python generate.py --prompt "def fibonacci(n):"
    python generate.py --prompt "import os" --temperature 0.8 --top-p 0.9 --compare
    python generate.py --model FOLDER --chat      a conversation, if the folder has a chat template

The heads, n-gram lookup, or both propose nodes for a tree, and a `Policy` decides how many of them
are worth verifying. Plain decoding is the same loop with trees of one node. The output does not
depend on the drafter, so each step may have another tree size. On CUDA the step of each size is
captured in a graph once and replayed, and the host reads a step's tokens while the next step runs.

Letters: B sequences, T tree nodes, K draft heads, P nodes of a path, n tokens of lookup's chain, W
beams, C hidden size, V vocabulary."""

import sys

if __name__ == "__main__":  # before torch is loaded, so that a typo in a flag is reported at once
    from tools.cli import main
    sys.exit(main())

import math
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import NamedTuple

import torch

from clover import DEFAULT_BEAMS, MAX_BEAMS, Tree, root_tree
from kernels import BINS, HAS_TRITON, SOURCES, accept_path, best_tree, commit_path, ngram_lookup
from model import MAX_TREE, InputError, KVCache, check, expect

PREFILL_CHUNK = 512  # prompt tokens per pass, which bounds its memory, and between two steps
DEFAULT_BATCH = 8    # sequences
MAX_CHAIN = 15       # tokens that lookup proposes
# sampling modes: a later one costs more, and gives a sequence of an earlier one the same tokens
GREEDY, NOISE, FILTERED = range(3)


@dataclass(frozen=True)
class Sampling:
    """How target tokens are sampled. A temperature below 1e-6 and top_p 0 are greedy; the defaults
    keep every token, as top_k -1 does."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self):
        check("temperature", self.temperature, 0, 1e4)
        check("top_k", self.top_k, -1, 2**31, whole=True)
        check("top_p", self.top_p, 0, 1)
        check("min_p", self.min_p, 0, 1)
        check("seed", self.seed, -2**63, 2**63 - 1, whole=True)
        vars(self).update(top_k=max(self.top_k, 0))  # of a frozen dataclass
        if self.temperature < 1e-6 or self.top_p == 0:
            vars(self).update(temperature=0.0, top_p=1.0)

    @property
    def mode(self):
        """The cheapest sampling mode for these parameters."""
        filtered = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return GREEDY if self.temperature == 0 else FILTERED if filtered else NOISE


class Accepted(NamedTuple):
    """What a step accepted of B trees: views of one tensor, `packed`, all that the host copies."""
    packed: torch.Tensor  # int64 [B, 3 P + 2], of `accept_path`
    P: int                # nodes of a path, at most

    @property
    def tokens(self):
        """[B, P]: accepted guesses, then the bonus token, the next root"""
        return self.packed[:, :self.P]

    @property
    def path(self):
        """[B, P]: the accepted nodes, root first"""
        return self.packed[:, self.P:2 * self.P]

    @property
    def count(self):
        """[B]: how many nodes were accepted"""
        return self.packed[:, -2]

    @property
    def last(self):
        """[B]: the index of the last"""
        return self.packed[:, -1]

    def to_lists(self):
        """(tokens, path, sources of its nodes) of each sequence."""
        P = self.P
        return [(row[:row[-2]], row[P:P + row[-2]], row[2 * P:2 * P + row[-2]])
                for row in self.packed.tolist()]


# --------------------------------------------------------------------------------------------------
# How many nodes a step verifies

SIZES = dict(cpu=(1, 2, 3, 4, 6, 8, 12, 16), cuda=(1, 2, 4, 8, 16, 32, 64))  # T to choose among
LARGEST = 16    # T where a step chooses by itself
PERIOD = 8      # steps between two updates of the tables
PACE = 0.1      # share of a step's surprise by which durations are corrected
TRIAL = 64      # steps, after which an unused size is tried for two, if it would be the best
OPTIMISM = 1.25 # with its rate times this
# right and proposed tokens of lookup that are assumed before any is seen, by length of the match
LOOKUP_PRIOR = (0, 1), (0.5, 2.5), (1, 3), (1.5, 3.5), (2, 4)
MEMORY = 256, 64  # proposed nodes of a bin, tokens of lookup by match, that the counts look back on
ROW = dict(cpu=0.15, cuda=0.002)  # what a step takes for each further row, relative to one
# Of a GPU, as `bench gpu` measured them on an H100: bytes per second of a copy, FLOP per second of
# a step of many rows, seconds of the launches of a layer, or of a draft head, in a CUDA graph
BANDWIDTH = 3e12
COMPUTE = 5.5e14
LAUNCH_SECONDS = 12 * 2e-6


class Policy:
    """Decides how many nodes T the next step verifies: tree_size, or the T with the largest

        (1 + sum of the acceptance probabilities of the T - 1 likeliest nodes) / seconds(T)

    chances, float32 [2, SOURCES], are these probabilities for greedy and for sampled sequences: how
    often heads' nodes of a joint log-probability, and lookup's of a match's length, were accepted,
    counted in every step. A CPU's kernels choose T inside a step, by its own nodes. Elsewhere T is
    chosen before it, by means over earlier steps of how often the n-th likeliest node was accepted.

    tree_size (InputError if out of range) may be lowered between steps: 1 is plain decoding."""

    def __init__(self, model, heads=None, lookup=False, tree_size=None):
        if tree_size is not None:
            check("tree size", tree_size, 1, MAX_TREE, whole=True)
        self.tree_size = tree_size if heads or lookup else 1
        self.heads = None if self.tree_size == 1 else heads
        self.lookup = lookup and self.tree_size != 1
        self.depth = heads.config.n_draft if self.heads else 0
        self.chooses_inside = decoder_class(model, self.heads).chooses_size
        self.options = [(self.tree_size or 0, self.heads is not None)]  # what `select` may give
        if not (self.tree_size or self.chooses_inside):
            self.options = tree_options(model.device.type, heads, lookup)
        self.largest = self.tree_size or max(LARGEST, *(T for T, _ in self.options))
        self.group = model.group
        self.known = known_counts(self.heads)  # [2, SOURCES, 2]: right, proposed
        self.counts = torch.zeros(2, SOURCES, 2, device=model.device)  # the steps add to them
        self.chances = torch.zeros(2, SOURCES, device=model.device)
        self.seen = torch.zeros(2, SOURCES, 2)
        self.learn_chances(self.seen)
        self.means = {with_heads: [0.5 * rank ** -1.4 for rank in range(1, MAX_TREE)]
                      for with_heads in (False, True)}
        self.looks = {with_heads: [2] * MAX_TREE for with_heads in self.means}  # at each rank
        self.durations = Durations(*guessed_costs(model, self.heads))
        # seconds: [T] of T nodes, [0] of the first head, [-1] of each further one
        self.prices = torch.full((MAX_TREE + 2,), math.inf)
        self.priced = 0            # the number of sequences that they are of
        self.steps = 0
        self.last_use = Counter()
        self.trial = []            # options of the next steps, in the place of the best

    def select(self, B):
        """(T, whether heads draft) for the next step of B sequences. T = 0: the step chooses T and
        the depth by `prices`."""
        self.steps += 1
        if self.tree_size:
            return self.tree_size, self.heads is not None and self.tree_size > 1
        if self.chooses_inside:
            if self.steps % PERIOD == 0 or B != self.priced:
                self.set_prices(B)
            return self.options[0]
        rates = {option: self.rate(B, *option) for option in self.options}
        best = max(rates, key=rates.get)
        if self.steps % TRIAL == 0:
            unused = [option for option in sorted(rates, key=rates.get, reverse=True)
                      if self.steps - self.last_use[option] >= TRIAL
                      and (OPTIMISM * rates[option] > rates[best] or option not in self.last_use)]
            self.trial = 2 * unused[:1]
        option = self.trial.pop() if self.trial else best
        self.last_use[option] = self.steps
        return option

    def set_prices(self, B):
        self.priced = B
        plain, one, two = (self.durations.seconds(B, 1, depths) for depths in range(3))
        self.prices[0] = one - plain
        self.prices[-1] = two - one
        seconds = [self.durations.seconds(B, T, 0) for T in range(1, LARGEST + 1)]
        self.prices[1:LARGEST + 1] = torch.tensor(seconds).cummax(0).values

    def rate(self, B, T, with_heads):
        depths = min(self.depth, T - 1) if with_heads else 0
        tokens = 1 + sum(self.means[with_heads][:T - 1])
        return tokens / self.durations.seconds(B, T, depths)

    def update(self, step, results):
        """Learns from a step that `Decoder.launch` waited for, and its `StepResult`s."""
        if not results or self.tree_size == 1:
            return
        seconds = step.seconds
        if self.group:  # all ranks see the same tokens, but clocks of their own
            seconds = self.group.broadcast(seconds) if self.steps % PERIOD == 0 else None
        if seconds:
            self.durations.learn(step.B, step.tree_size, step.depths, seconds)
        if step.counts is not None:
            self.learn_chances(step.counts)
        if self.chooses_inside:
            return
        hits = Counter(node for result in results for node in result.path[1:])
        means = self.means[step.depths > 0]
        looks = self.looks[step.depths > 0]
        for i in range(step.tree_size - 1):
            looks[i] = min(looks[i] + 1, MEMORY[1])
            means[i] += (hits[i + 1] / len(results) - means[i]) / looks[i]

    def learn_chances(self, counts):
        """Makes `chances` from `counts`, of which `seen` are known already."""
        self.known += counts - self.seen
        self.seen = counts
        limits = torch.tensor([MEMORY[0]] * BINS + [MEMORY[1]] * (SOURCES - BINS))[:, None]
        self.known *= (limits / self.known[..., 1:]).clamp(max=1)
        chances = self.known[..., 0] / self.known[..., 1]
        chances[:, :BINS] = torch.tensor([falling(bins) for bins in self.known[:, :BINS].tolist()])
        on_host = chances.pin_memory() if self.chances.is_cuda else chances  # else a GPU is awaited
        self.chances.copy_(on_host, non_blocking=True)


def falling(bins):
    """The chance of each bin of (right, proposed) guesses. Where it would rise, neighbours count
    as one bin (isotonic regression by pooling adjacent violators)."""
    pools = []
    for right, proposed in bins:
        pools.append((right, proposed, 1))
        while len(pools) > 1 and pools[-1][0] * pools[-2][1] > pools[-2][0] * pools[-1][1]:
            pools[-2:] = [tuple(map(sum, zip(*pools[-2:])))]
    return [right / proposed for right, proposed, width in pools for _ in range(width)]


def tree_options(device_type, heads, lookup):
    """The (T, whether heads draft) among which a policy chooses before a step."""
    drafters = [drafts for drafts, is_there in ((True, heads), (False, lookup)) if is_there]
    return [(1, False), *((T, drafts) for drafts in drafters for T in SIZES[device_type][1:])]


def known_counts(heads):
    """float32 [2, SOURCES, 2]: right and proposed guesses that are assumed at the start: those of
    heads.json, beside which a bin's joint probability counts as four proposals."""
    counts = torch.zeros(2, SOURCES, 2)
    counts[:, :BINS, 1] = 4.0
    counts[:, :BINS, 0] = 4.0 * torch.exp(-(torch.arange(BINS) + 0.5) / 4)
    counts[:, BINS:] = torch.tensor(LOOKUP_PRIOR)
    if heads and (tables := heads.info.get("acceptance")):
        counts[:, :BINS] += torch.tensor([tables["greedy"], tables["sampled"]])
    return counts


class Durations:
    """Seconds of a step of B trees of T nodes, in which heads draft to some depth: guessed from
    what a further row, a draft head, a further row of that, and the arithmetic of a row take
    relative to a plain step, and learnt from every step.

    It is a regression, step by step: what all steps have in common is the machine's present speed,
    what goes with the share of further rows, or of heads, is their cost; the rest is the size's."""

    def __init__(self, row, head, head_row=0.0, arithmetic=0.0):
        self.costs = row, head, head_row, arithmetic
        self.unit = None             # seconds of a plain step of one sequence
        self.log_costs = [0.0, 0.0]  # corrections of the costs of rows and of heads
        self.shares = [(0.0, 0.02)] * 2  # mean and spread of their shares of a step
        self.log_ratio = Counter()   # of a duration to what the costs say, by `bucket` of rows
        self.steps = 0

    def parts(self, B, T, depths):
        """What the further rows and the heads take, relative to a step of one row."""
        row, head, head_row, arithmetic = self.costs
        log_row, log_head = self.log_costs
        more = max(row * math.exp(log_row) * (B * T - 1), arithmetic * B * T - 1)
        head_rows = B * (2 + DEFAULT_BEAMS * (depths - 1))  # 2: the augmenting block, the first
        heads = (head * (1 + depths) + head_row * head_rows) * math.exp(log_head)
        return more, heads * (depths > 0)

    def seconds(self, B, T, depths):
        more, heads = self.parts(B, T, depths)
        return (self.unit or 1.0) * ((1 + more) * math.exp(self.log_ratio[bucket(B * T)]) + heads)

    def learn(self, B, T, depths, seconds):
        if self.unit is None:
            self.unit = seconds / self.seconds(B, T, depths)
        surprise = math.log(seconds / self.seconds(B, T, depths))
        self.steps += 1
        pace = max(PACE, 2 / (self.steps + 5))  # the first steps count most
        change = pace * max(min(surprise, 0.3), -0.3)  # one slow step says little
        parts = self.parts(B, T, depths)
        for i, part in enumerate(parts):
            mean, spread = self.shares[i]
            off = part / (1 + sum(parts)) - mean
            self.shares[i] = mean + off / MEMORY[1], spread + (off * off - spread) / MEMORY[1]
            self.log_costs[i] += change * off / (4 * spread + 0.04)
        self.unit *= math.exp(change)
        self.log_ratio[bucket(B * T)] += change / 8


def guessed_costs(model, heads):
    """The arguments of `Durations`."""
    weights = model.weight_bytes()
    if model.group:
        weights = model.group.broadcast(weights)  # ranks hold unequal parts
    count = lambda module: sum(x.in_features * x.out_features for x in module.modules()
                               if hasattr(x, "in_features"))
    numbers = 0  # that a head reads, the draft vocabulary's among them
    if heads:
        numbers = (heads.config.vocabulary or model.config.vocab_size) * model.config.n_embd
        numbers += count(heads.draft_head(0))
    if model.device.type != "cuda":
        row = ROW["cpu"]
        return row, 0.625 * numbers / weights, row * numbers / count(model)  # 4 bits and scales
    seconds = lambda size, layers: size / BANDWIDTH + layers * LAUNCH_SECONDS
    plain = seconds(weights, model.config.n_layer)
    arithmetic = 2 * weights / model.dtype.itemsize / COMPUTE / plain
    size = numbers * model.dtype.itemsize
    return ROW["cuda"], seconds(size, 1) / plain, arithmetic * size / weights, arithmetic


def bucket(rows):
    """Row counts whose durations are corrected together: up to 16 each, then two per doubling."""
    return rows if rows <= 16 else 16 + round(2 * math.log2(rows / 16))


# --------------------------------------------------------------------------------------------------
# The decoder

@dataclass
class Slots:
    """The state of B sequences, one per slot."""
    cache: KVCache
    heads_cache: KVCache            # the augmenting block's
    root: torch.Tensor              # int64 [B]: the newest token, which has no cache row yet
    state: torch.Tensor             # [B, C]: what the heads draft from
    history: torch.Tensor           # int32 [B, capacity]: the text, root included, for lookup
    sequence: torch.Tensor          # int64 [B]: the text's number; the noise is a function of it
    active: torch.Tensor            # int32 [B]: 0 for an idle slot
    sampling: dict                  # {name: float32 or int64 [B]} of the texts' `Sampling`s

    ROWS = "root", "state", "history", "sequence", "active"

    def view(self, first, count):
        """Slots first, first + 1, ..., which share the memory of these."""
        rows = slice(first, first + count)
        caches = (cache.slots(first, count) for cache in (self.cache, self.heads_cache))
        return Slots(*caches, *(getattr(self, name)[rows] for name in self.ROWS),
                     {name: x[rows] for name, x in self.sampling.items()})

    def set_sampling(self, samplings):
        """Sets the `Sampling` of each slot."""
        for name, rows in self.sampling.items():
            rows.copy_(send([getattr(s, name) for s in samplings], rows.device, rows.dtype))


def new_slots(model, heads, batch_size, capacity, max_tree, max_path):
    """Empty `Slots` for texts of `capacity` tokens. On a GPU the host learns of a text's end a step
    late, so a text may grow by two paths: the sums below add what its last step writes."""
    zeros = lambda *shape, dtype: torch.zeros(*shape, dtype=dtype, device=model.device)
    cache = model.new_cache(batch_size, capacity + max_path + max_tree)  # a tree after one path
    # heads read paths alone, on a CPU up to MAX_CHAIN + 1 tokens; without any, no layers
    rows = capacity + max_path + max(max_path, MAX_CHAIN + 1)
    heads_kv = heads.new_cache(batch_size, rows).kv if heads else cache.kv[:0]
    return Slots(
        cache, KVCache(heads_kv, cache.lengths),
        root=zeros(batch_size, dtype=torch.int64),
        state=zeros(batch_size, model.config.n_embd, dtype=model.dtype),
        history=zeros(batch_size, capacity + 2 * max_path + 1, dtype=torch.int32),  # and the root
        sequence=zeros(batch_size, dtype=torch.int64),
        active=zeros(batch_size, dtype=torch.int32),
        sampling={name: zeros(batch_size, dtype=torch.float32 if kind is float else torch.int64)
                  for name, kind in Sampling.__annotations__.items()})


class StepRun(NamedTuple):
    """A step that is over, as the host sees it."""
    accepted: list         # (tokens, path, sources) of each of its sequences
    trees: list | None     # their `Tree`s of lists, if asked for
    B: int
    tree_size: int
    depths: int            # of the tree that heads drafted
    seconds: float | None  # its own; None for the first of its kind, which compiles and captures it
    counts: torch.Tensor | None  # those of the `Policy`, every PERIOD steps


def decoder_class(model, heads):
    """The `Decoder` of a model's backend."""
    return model.blocks.decoder_class(heads) or Decoder


class Decoder:
    """Decodes B sequences, one in each slot, step by step. policy: says which drafters there are,
    default none; heads read every accepted token, also in steps that do not use them. capacity:
    most tokens of a sequence, prompt included; default: the model's context. beams, graph: as in
    `prepare`. sampling: of sequences without their own. Raises InputError for sizes out of range
    and caches without room in memory."""
    chooses_size = False  # whether `draft` chooses the tree size by the policy's prices

    @torch.inference_mode()
    def __init__(self, model, *, policy=None, batch_size=1, capacity=None, beams=None,
                 sampling=None, graph=True):
        check("batch size", batch_size, 1, 2**16, whole=True)
        policy = policy or Policy(model)
        heads = policy.heads
        most = heads.max_beams if heads else MAX_BEAMS
        self.beams = min(DEFAULT_BEAMS, most) if beams is None else beams
        check("beams", self.beams, 1, most, whole=True)
        self.model = model
        self.head = model.head  # each look-up in a module takes 5 us of a step
        self.device = model.device
        self.heads = heads
        self.policy = policy
        self.batch_size = batch_size
        self.sampling = sampling or Sampling()
        self.sampling_mode = self.sampling.mode  # of the next step
        self.capacity = model.config.block_size if capacity is None else capacity
        check("capacity", self.capacity, 1, model.config.block_size, whole=True)
        self.context = model.blocks.decoding_context
        self.inference_mode = torch.inference_mode()  # making one takes as long as a step's stage
        P = self.path_limit(policy.largest)
        # made once, and only viewed from here on: captured graphs hold addresses
        self.offsets = torch.arange(P, device=model.device)
        self.path_ancestors = (2 << self.offsets) - 1  # a path has no branches: j sees nodes 0..j
        self.slots = new_slots(model, heads, batch_size, self.capacity, policy.largest, P)
        self.slots.set_sampling([self.sampling] * batch_size)
        self.root_tree = root_tree(self.slots.root)
        is_cuda = model.device.type == "cuda"
        self.steps_ahead = 1 if is_cuda else 0  # in flight while the host reads an earlier one
        self.graphs = {}  # (arguments of `step`, sampling mode) -> replays its graph, or None
        self.pool = None  # the memory of all graphs; None: steps run eagerly
        if is_cuda and graph and HAS_TRITON:  # the references read values back
            self.pool = torch.cuda.graph_pool_handle()

    def path_limit(self, tree_size):
        """P: a path ends with the heads' last depth, or with the longest chain."""
        return min(tree_size, 1 + max(self.policy.depth, MAX_CHAIN))

    # One step of all slots. Shapes are fixed, state changes in place, nothing is read back.

    def step(self, tree_size, with_heads):
        tree, chain = self.draft(tree_size, with_heads)  # a `Tree` [B, T]
        positions = self.positions(tree)                 # [B, T]
        normed, hidden = self.verify(tree, positions)    # [B, T, C]; K/V go to rows lengths..
        target = self.sample(normed, positions)          # [B, T]: the model's own next tokens
        accepted = self.accept(tree, chain, target)      # tokens, path [B, P], count [B]
        self.commit(tree, hidden, accepted)
        return accepted, tree

    def draft(self, tree_size, with_heads):
        """-> (the tree, what `ngram_lookup` gives or None)"""
        slots = self.slots
        if tree_size == 1:
            return self.root_tree, None
        candidates = chain = None
        if with_heads:
            noise = (slots.sampling["temperature"], slots.sampling["seed"], slots.sequence,
                     slots.cache.lengths) if self.sampling_mode != GREEDY else None
            candidates = self.heads.draft(slots.state, slots.root, tree_size, self.beams, noise)
        if self.policy.lookup:
            n = min(tree_size - 1, MAX_CHAIN)
            chain = ngram_lookup(slots.history, slots.cache.lengths, n)
        return Tree(*best_tree(slots.root, candidates, chain, self.policy.chances,
                               slots.sampling["temperature"], tree_size)), chain

    def positions(self, tree):
        return self.slots.cache.lengths[:, None] + tree.depths

    def verify(self, tree, positions):
        """-> (the final norm of hidden, hidden)"""
        if self.model.config.positions == "learned":
            # nodes past the context's end are never emitted, but have no position of their own
            positions = positions.clamp(max=self.model.config.block_size - 1)
        model, cache = self.model, self.slots.cache
        hidden = model.embeddings(tree.tokens, positions)
        return model.norm.add_and_norm(*model.blocks(hidden, model.tables, positions, cache,
                                                     tree.ancestors))

    def sampling_rows(self):
        """(the number, {name: parameter}) of each sequence of a step."""
        return self.slots.sequence, self.slots.sampling

    def sample(self, normed, positions):
        sequence, sampling = self.sampling_rows()
        if self.sampling_mode != FILTERED:
            temperature = 0.0 if self.sampling_mode == GREEDY else sampling["temperature"]
            return self.head.sample(normed, temperature, sampling["seed"], sequence, positions)
        logits = self.head.logits(normed.flatten(0, 1))  # (B * T, V)
        target = self.head.filtered_sample(logits, **sampling, sequence=sequence,
                                           position=(positions + 1).view(-1))
        return target.view_as(positions)

    def accept(self, tree, chain, target):
        slots = self.slots
        T = tree.tokens.shape[1]
        P = self.path_limit(T)
        packed = accept_path(*tree[:5], target, slots.active, P, slots.sampling["temperature"],
                             self.policy.counts, chain)
        return Accepted(packed, P)

    def commit(self, tree, hidden, accepted):
        """Keeps the path's cache rows, lets heads and lookup read its tokens, and makes the bonus
        token the next root. Rows from `count` on are junk, which the next step overwrites."""
        slots = self.slots
        lengths = slots.cache.lengths
        if self.heads or self.policy.lookup:
            positions = lengths[:, None] + self.offsets[:accepted.P]  # (B, P)
        last = accepted.last[:, None]
        if self.heads and tree.tokens.shape[1] > 1:  # lookup's chain is in place
            commit_path(slots.cache.kv, lengths, accepted.path, accepted.count)
            hidden = hidden.gather(1, accepted.path[:, :, None].expand(-1, -1, hidden.shape[2]))
        if self.heads:
            ancestors = self.path_ancestors[:positions.shape[1]].expand_as(positions)
            states = self.heads.augment(hidden, accepted.tokens, positions, slots.heads_cache,
                                        ancestors)  # (B, P, C)
            last_state = last[:, :, None].expand(-1, 1, states.shape[2])
            torch.gather(states, 1, last_state, out=slots.state[:, None])
        if self.policy.lookup:
            slots.history[:, 1:].scatter_(1, positions, accepted.tokens.int())
        torch.gather(accepted.tokens, 1, last, out=slots.root[:, None])
        lengths += accepted.count

    # What the host does around steps

    def run_slots(self, running):
        """Says which slots hold sequences that run -> the slots that a step runs, in its order.
        Here all, for shapes are fixed: an idle slot runs too."""
        return range(self.batch_size)

    def run(self, *arguments):
        """Runs one step -> what `step` returns. With graphs the first step of its arguments and
        sampling mode runs eagerly, which compiles its kernels, and is then captured; later ones
        replay it."""
        key = arguments, self.sampling_mode
        if replay := self.graphs.get(key):
            return replay()
        result = self.step(*arguments)
        self.graphs[key] = None
        if self.pool is not None:
            self.graphs[key] = capture(partial(self.step, *arguments), self.device, self.pool)
        return result

    def depths(self, tree_size, with_heads):
        """To how many depths the heads drafted in a step."""
        return min(self.policy.depth, tree_size - 1) if with_heads else 0

    def launch(self, tree_size, with_heads, with_trees=False):
        """Starts one step -> a function that waits for it and returns its `StepRun`."""
        is_steady = ((tree_size, with_heads), self.sampling_mode) in self.graphs
        device = self.device
        start = mark(device)
        with self.inference_mode:
            accepted, tree = self.run(tree_size, with_heads)
            counts = self.policy.counts if self.policy.steps % PERIOD == 0 else None
            tensors = accepted.packed, counts, *(tree if with_trees else ())
            if device.type != "cpu":  # before another graph overwrites them
                tensors = [x if x is None else x.to("cpu", non_blocking=True) for x in tensors]
        end = mark(device)

        def wait():
            seconds = seconds_between(start, end)
            packed, counts, *columns = tensors
            B, T = tree.tokens.shape
            trees = list(map(Tree, *(x.tolist() for x in columns))) if with_trees else None
            return StepRun(Accepted(packed, accepted.P).to_lists(), trees, B, T,
                           self.depths(T, with_heads), seconds if is_steady else None,
                           counts if counts is None else counts.clone())
        if device.type == "cpu":  # the step is over, and the next one overwrites its results
            results = wait()
            return lambda: results
        return wait

    def warm_up(self):
        """Compiles and captures all that the policy may select, while all slots are idle."""
        for option in self.policy.options:
            with self.context():
                self.launch(*option)()

    @torch.inference_mode()
    def prefill(self, sequences, start):
        """Reads the next chunk of prompts, from token `start`, into adjacent slots -> where it
        ends; after the last chunk the slots run. sequences: {slot: Sequence}, one, or several whose
        prompts fit in one chunk.

        A prompt's last token is not read here: it is the root of the first step, which is then like
        any other. Steps between two chunks write their trees where the next chunk goes."""
        device = self.model.device
        slots = self.slots.view(min(sequences), len(sequences))
        sequences = list(sequences.values())
        longest = max(len(s.prompt) for s in sequences) - 1
        end = min(start + PREFILL_CHUNK, longest)
        padded = [[*s.prompt[start:end + 1], *[0] * (end + 1 - len(s.prompt))] for s in sequences]
        tokens = send(padded, device)  # (n, end + 1 - start)
        last = send([[min(end, len(s.prompt) - 1)] for s in sequences], device)  # (n, 1)
        if end > start:
            hidden = self.model.prefill(tokens[:, :-1], slots.cache, start)
            if self.heads:
                states = self.heads.augment(hidden, tokens[:, 1:], cache=slots.heads_cache,
                                            start=start)
                # a prompt of one token has no state yet: beside longer ones it gets any
                at = (last - start - 1).clamp(min=0)[:, :, None].expand(-1, 1, states.shape[2])
                torch.gather(states, 1, at, out=slots.state[:, None])
        elif self.heads:
            slots.state.zero_()
        if self.policy.largest > 1:  # something drafts
            slots.history[:, start:end + 1] = tokens
        torch.gather(tokens, 1, last - start, out=slots.root[:, None])
        slots.cache.lengths.copy_(last[:, 0])
        if end == longest:
            slots.sequence.copy_(send([s.index for s in sequences], device))
            slots.set_sampling([s.sampling for s in sequences])
            slots.active.fill_(1)  # on a GPU, [:] = 1 would wait for it
        return end

    @torch.inference_mode()
    def release(self, slot, rows=0):
        """Makes a slot idle, or a slice of them. It may still run, since shapes are fixed, and
        write its trees after these rows of its cache."""
        self.slots.active[slot].zero_()
        self.slots.cache.lengths[slot].fill_(rows)


def send(values, device, dtype=torch.int64):
    """A tensor of the host's values on a device; the host does not wait for the copy to a GPU."""
    x = torch.tensor(values, dtype=dtype)
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def mark(device):
    """The time on a device's own clock: when it gets here in the work that is queued."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start, end):
    """Seconds between two marks; waits for the later one."""
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def capture(body, device, pool=None):
    """Records body(), which has run before, in a CUDA graph -> a function that replays it. Tensors
    from before that body() reads or writes must live as long as the graph. Graphs of one pool share
    memory: what one returns must be copied, on the same stream, before another runs."""
    with torch.inference_mode(), torch.cuda.device(device):
        # else this graph would use the workspace that cuBLAS took from an earlier graph's memory
        torch._C._cuda_clearCublasWorkspaces()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = body()

    def replay():
        graph.replay()
        return result
    return replay


# --------------------------------------------------------------------------------------------------
# The engine: continuous batching

class Engine:
    """Schedules prompts: they wait in a queue, are read into free slots of a `Decoder`, and run to
    their end. `add` them, and `step` while it is `busy`. Reusable for any prompts that fit its
    capacity. policy: a `Policy`, default one that drafts by the heads. options: the Decoder's."""

    def __init__(self, model, heads=None, *, policy=None, **options):
        self.policy = policy or Policy(model, heads)
        self.decoder = decoder_class(model, self.policy.heads)(model, policy=self.policy, **options)
        self.clear()

    def clear(self):
        """Drops all sequences."""
        self.decoder.release(slice(None))
        self.waiting = deque()
        # free slot -> the text that its cache holds
        self.cached_prefix = dict.fromkeys(range(self.decoder.batch_size), ())
        self.prefilling = {}      # slot -> sequence, of the prefill pass that goes on
        self.prefill_start = 0    # its next token
        self.running = {}         # slot -> sequence
        self.in_flight = deque()  # steps not read yet: ({row: (slot, sequence)}, how to wait)

    @property
    def busy(self):
        return bool(self.waiting or self.prefilling or self.running)

    def add(self, prompt, max_new_tokens, sampling=None, stop=(), encoding=None, index=0):
        """Queues a prompt (token ids) -> its `Sequence`, to which steps add tokens. sampling:
        default the Decoder's. index: the noise is a function of it. The rest as in `generate`."""
        decoder = self.decoder
        check_prompt(decoder.model, prompt, index)
        sequence = Sequence(index, prompt, max_new_tokens, decoder.model.config.block_size, stop,
                            encoding, sampling or decoder.sampling)
        length = len(prompt) + sequence.limit
        expect(length <= decoder.capacity, f"a text of {length} tokens does not fit an engine made "
               f"for {decoder.capacity}; make a larger one")
        self.waiting.append(sequence)
        return sequence

    def step(self, with_trees=False):
        """Admits prompts and runs one step of all slots -> `StepResult`s, on a GPU those of the
        step before: the host reads them while this one runs."""
        decoder = self.decoder
        with decoder.context():
            self.admit()
            if self.running:
                slots = decoder.run_slots(self.running)
                option = self.policy.select(len(slots))
                decoder.sampling_mode = max(s.sampling.mode for s in self.running.values())
                sequences = {row: (slot, self.running[slot]) for row, slot in enumerate(slots)
                             if slot in self.running}
                self.in_flight.append((sequences, decoder.launch(*option, with_trees)))
        if not self.in_flight or (self.running and len(self.in_flight) <= decoder.steps_ahead):
            return []
        return self.retire()

    def admit(self):
        """Fills free slots with prompts, about PREFILL_CHUNK tokens between two steps."""
        budget = PREFILL_CHUNK
        while budget > 0 and (self.prefilling or (self.waiting and self.cached_prefix)):
            if not self.prefilling:
                self.next_prompts()
            start = self.prefill_start
            self.prefill_start = self.decoder.prefill(self.prefilling, start)
            budget -= max(self.prefill_start - start, 1) * len(self.prefilling)
            if self.prefill_start == max(len(s.prompt) for s in self.prefilling.values()) - 1:
                self.running |= self.prefilling
                self.prefilling = {}

    def next_prompts(self):
        """Begins a prefill pass of the next prompt. A GPU reads several short prompts as fast as
        one: if this one starts at 0, those behind it share the pass, in the next slots, while all
        fit in a chunk."""
        slot, self.prefill_start = best_slot(self.cached_prefix, self.waiting[0].prompt)
        may_share = self.decoder.steps_ahead > 0 and self.prefill_start == 0
        while self.waiting and slot in self.cached_prefix:
            sequences = [*self.prefilling.values(), self.waiting[0]]
            fits = len(sequences) * max(len(s.prompt) - 1 for s in sequences) <= PREFILL_CHUNK
            if self.prefilling and not (may_share and fits):
                break
            self.prefilling[slot] = self.waiting.popleft()
            del self.cached_prefix[slot]
            slot += 1

    def retire(self):
        """Reads the oldest step in flight and frees the slots of sequences that end with it."""
        sequences, wait = self.in_flight.popleft()
        step = wait()
        results = []
        for row, (slot, sequence) in sequences.items():
            if sequence.ended:
                continue  # a step earlier, when this step was already in flight
            tokens, path, sources = step.accepted[row]
            tree = step.trees and step.trees[row]
            if tree:  # plain decoding's tree shows the next root by now
                tree.tokens[0] = (sequence.tokens or sequence.prompt)[-1]
            results.append(StepResult(sequence, sequence.take(tokens), path, sources,
                                      step.tree_size, tree))
            if sequence.ended:
                self.free(slot)
        self.policy.update(step, results)
        return results

    def free(self, slot):
        """Frees a slot; its cache holds the text but for the last token."""
        self.prefilling.pop(slot, None)
        sequence = self.running.pop(slot, None)
        text = self.cached_prefix[slot] = [*sequence.prompt, *sequence.tokens] if sequence else ()
        self.decoder.release(slot, max(len(text) - 1, 0))

    def cancel(self, sequence):
        """Ends a sequence, waiting or in a slot, between two steps."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        for slot, held in [*self.running.items(), *self.prefilling.items()]:
            if held is sequence:
                self.free(slot)
        sequence.ended = sequence.ended or "cancelled"

    def generate(self, prompts, max_new_tokens, stop=(), on_step=None, encoding=None,
                 sampling=None, with_trees=False):
        """Adds the prompts and steps until all have ended -> `Output`; calls on_step with each
        `StepResult`. sampling: one for each prompt. Raises InputError as `add` does, Interrupted on
        Ctrl-C."""
        output = Output(batch_size=self.decoder.batch_size)
        started = time.perf_counter()
        try:
            for index, prompt in enumerate(prompts):
                own = sampling[index] if sampling else None
                sequence = self.add(prompt, max_new_tokens, own, stop, encoding, index)
                output.sequences.append(sequence)
            while self.busy:
                results = self.step(with_trees)
                output.batch_steps += len(results) > 0
                for result in results:
                    output.count(result)
                    if on_step:
                        on_step(result)
        except KeyboardInterrupt:
            raise Interrupted(output) from None
        finally:
            output.seconds = time.perf_counter() - started
            if self.busy:
                self.clear()
        return output


def best_slot(cached_prefix, prompt):
    """The slot whose cached text begins with most of a prompt, else the one free the longest, and
    where the prompt starts there."""
    starts = {}
    for slot, text in cached_prefix.items():
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(text, prompt))))
        # the heads' row of a token depends on the next one; the last row gives the heads' state
        starts[slot] = max(min(same - 1, len(prompt) - 2), 0)
    slot = max(starts, key=starts.get)
    return slot, starts[slot]


class Sequence:
    """A prompt and the tokens that follow it. ended: None, "stop" (a stop token or text), "length"
    (max_new_tokens), "context" (the model's is full) or "cancelled". Checks these arguments."""

    def __init__(self, index, prompt, max_new_tokens, context, stop, encoding, sampling=None):
        check("max new tokens", max_new_tokens, 1, 2**31, whole=True)
        self.index = index
        self.prompt = prompt
        self.sampling = sampling
        self.tokens = []
        self.ended = None
        self.limit = min(max_new_tokens, context - len(prompt))
        self.at_limit = "length" if self.limit == max_new_tokens else "context"
        stop = [s for s in ([stop] if isinstance(stop, (int, str)) else stop) if s != ""]
        if bad := [s for s in stop if type(s) not in (int, str)]:
            raise InputError(f"stop must hold token ids and texts, not {bad[0]!r}")
        texts = [s for s in stop if isinstance(s, str)]
        if texts and not hasattr(encoding, "stream"):
            raise InputError(f"stop text {texts[0]!r} cannot be seen in token ids alone; give "
                             "encoding=, the model's tokenizer, from hf.tokenizer.load_encoding")
        self.stop_tokens = set(stop).difference(texts)
        self.stream = encoding.stream(texts) if texts else None

    def take(self, tokens):
        """Appends a step's tokens, up to where the sequence ends -> those appended."""
        new = []
        for token in tokens[:self.limit - len(self.tokens)]:
            new.append(token)
            if self.stream:
                self.stream.feed([token])
            if token in self.stop_tokens or (self.stream and self.stream.stopped):
                self.ended = "stop"
                break
        self.tokens += new
        if not self.ended and len(self.tokens) == self.limit:
            self.ended = self.at_limit
        return new


class StepResult(NamedTuple):
    """What one step brought one sequence."""
    sequence: Sequence
    tokens: list       # the new ones; sequence.tokens has them already
    path: list         # the accepted nodes, root first; path[i + 1] guessed tokens[i]
    sources: list      # of these nodes, as `best_tree` gives them
    tree_size: int     # T
    tree: Tree = None  # of lists, if `step` was asked for trees

    @property
    def drafters(self):
        """"head 1", "head 2", ... or "lookup" for each guessed token; the one after them is the
        model's own."""
        guessed = self.sources[1:len(self.tokens) + 1]  # a sequence may end inside the path
        return [drafter(source, depth) for depth, source in enumerate(guessed, start=1)]


def drafter(source, depth):
    """What proposed a node of a source, as `best_tree` gives it, at this depth."""
    return "lookup" if source >= BINS else f"head {depth}"


@dataclass
class Output:
    """What decoding returns."""
    sequences: list = field(default_factory=list)  # a `Sequence` for each prompt, in order
    steps: int = 0        # verify steps, summed over the sequences
    batch_steps: int = 0  # steps of the batch, each for all of its slots
    seconds: float = 0.0  # wall time, prefill included
    step_lengths: Counter = field(default_factory=Counter)  # n -> how many steps emitted n tokens
    accepted: Counter = field(default_factory=Counter)  # "head 1", ..., "lookup" -> tokens guessed
    sizes: dict = field(default_factory=dict)           # T -> [its steps, their tokens]
    batch_size: int = 1   # B

    def count(self, result):
        """Counts a `StepResult`."""
        emitted = len(result.tokens)
        self.steps += 1
        self.step_lengths[emitted] += 1
        self.accepted.update(result.drafters)
        steps, tokens = self.sizes.get(result.tree_size, (0, 0))
        self.sizes[result.tree_size] = [steps + 1, tokens + emitted]

    @property
    def tree_size(self):
        """T, the mean over the steps."""
        return sum(T * steps for T, (steps, _) in self.sizes.items()) / max(self.steps, 1)

    @property
    def tokens(self):
        """The new tokens of each prompt."""
        return [sequence.tokens for sequence in self.sequences]

    @property
    def ended(self):
        """Why each text ended, see `Sequence`; None where it was interrupted."""
        return [sequence.ended for sequence in self.sequences]

    @property
    def emitted(self):
        return sum(map(len, self.tokens))

    @property
    def tokens_per_step(self):
        return self.emitted / max(self.steps, 1)

    @property
    def tokens_per_second(self):
        return self.emitted / max(self.seconds, 1e-9)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while decoding. `output` holds what there was."""

    def __init__(self, output):
        self.output = output


def check_prompt(model, prompt, index=0):
    V, longest = model.config.vocab_size, model.config.block_size - 1
    if not isinstance(prompt, (list, tuple)):
        raise InputError(f"prompt {index} must be a list of token ids, not {prompt!r}")
    expect(1 <= len(prompt) <= longest, f"prompt {index} has {len(prompt)} tokens; give 1 to "
           f"{longest}, for the model's context must hold a new one too")
    expect(min(prompt) >= 0 and max(prompt) < V, f"prompt {index} has token ids outside 0..{V - 1},"
           " which the model has no embeddings for; leave those tokens out")


# --------------------------------------------------------------------------------------------------
# The call

def generate(model, prompts, max_new_tokens, heads=None, *, lookup=False, temperature=0.0, top_k=0,
             top_p=1.0, min_p=0.0, seed=0, tree_size=None, beams=None, stop=(), batch_size=None,
             on_tokens=None, encoding=None, sampling=None):
    """Continues prompts (lists of token ids) with the model's own tokens -> `Output`: the same with
    any heads, lookup, tree or batch size, up to ties, which half precision on a GPU makes.

    lookup      also draft by n-gram lookup
    tree_size   nodes T verified per step, root included; 1: plain decoding; default: in each step
                those of most tokens per second, see `Policy`
    beams       W, default 4
    stop        token ids and, with an `encoding` to read them by, texts that end a sequence
    batch_size  sequences decoded together, default up to 8; the next prompt follows a finished one
    on_tokens   called as on_tokens(index, tokens) with the tokens of each step
    sampling    a `Sampling` for each prompt, in place of temperature, ..., seed
    Raises InputError for bad input, Interrupted on Ctrl-C."""
    engine = prepare(model, prompts, max_new_tokens, heads, lookup=lookup, tree_size=tree_size,
                     beams=beams, batch_size=batch_size, temperature=temperature, top_k=top_k,
                     top_p=top_p, min_p=min_p, seed=seed)
    own = not sampling or len(sampling) == len(prompts) and engine.decoder.sampling == Sampling()
    expect(own, "sampling takes one for each prompt, in place of temperature, ..., seed")
    on_step = on_tokens and (lambda step: on_tokens(step.sequence.index, step.tokens))
    return engine.generate(prompts, max_new_tokens, stop, on_step, encoding, sampling)


def prepare(model, prompts, max_new_tokens, heads=None, *, lookup=False, tree_size=None, beams=None,
            batch_size=None, graph=True, **sampling):
    """The Engine that `generate` runs, of the same arguments. graph: on CUDA, capture the step of
    each size in a graph once and replay it."""
    sampling = Sampling(**sampling)
    expect(prompts, "there is no prompt; give at least one")
    for index, prompt in enumerate(prompts):
        check_prompt(model, prompt, index)
    check("max new tokens", max_new_tokens, 1, 2**31, whole=True)
    capacity = max(min(len(prompt) + max_new_tokens, model.config.block_size) for prompt in prompts)
    batch_size = min(len(prompts), DEFAULT_BATCH if batch_size is None else batch_size)
    policy = Policy(model, heads, lookup, tree_size)
    return Engine(model, policy=policy, batch_size=batch_size, capacity=capacity, beams=beams,
                  sampling=sampling, graph=graph)
