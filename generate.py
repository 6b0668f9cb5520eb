"""Decoding: the stages of a step, the engine that schedules prompts, and `generate()`.

    python generate.py --prompt "def fibonacci(n):"
    python generate.py --prompt "import os" --temperature 0.8 --top-p 0.9 --compare
    python generate.py --model FOLDER --chat      a conversation, if the folder has a chat template

Draft heads, n-gram lookup, or both propose a draft tree, which one forward pass verifies. A
`Policy` chooses how many nodes to verify. Plain decoding is the same loop with one-node trees and
has the same output, so the tree size may differ in each step. On CUDA the step of each size is
captured in a CUDA graph and replayed, and the host reads a step's tokens while the next one runs.
There, prompts are read by the same steps: a prompt is a draft that cannot be wrong.

Letters: B sequences, T tree nodes, K draft heads, P nodes of an accepted path, n tokens proposed by
lookup, W beams, C hidden size, V vocabulary."""

if __name__ == "__main__":  # before importing torch, so that a mistyped flag fails at once
    from tools.flags import parse_generate
    args = parse_generate()

import contextlib
import math
import time
from bisect import bisect
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, product
from numbers import Integral
from typing import NamedTuple

import torch

from clover import DEFAULT_BEAMS, MAX_BEAMS, Tree, is_allowed, root_tree
from kernels import (
    BINS,
    HAS_TRITON,
    SCHEMA,
    SOURCES,
    accept_path,
    advance,
    best_tree,
    commit_path,
    filter_logits,
    gumbel_argmax,
    mask_logits,
    ngram_lookup,
    prompt_chain,
)
from model import MAX_TREE, InputError, KVCache, check, expect

PREFILL_CHUNK = 512  # prompt tokens per forward pass; bounds its memory and the wait between steps
# Where steps read prompts: a long prompt (see `long_prompt`) has a forward pass of its own, up to
# its last PROMPT_REST tokens. While a prompt is unread, a fixed T competes with READ_SIZES.
PROMPT_REST = 64
READ_SIZES = 4, 16, 64
READ_STEPS = 32    # steps in which to read a prompt
# exponent of a prompt's tokens in `select_reading`: below 1, as large steps delay other sequences
READ_VALUE = 0.75
LONG_PROMPT = 512   # most unread tokens that steps read
LARGEST_STEP = 512  # most nodes of a step that `capture_all` captures
LARGEST_MASKED = 128  # the same for batches with grammars, whose masks the host computes
MEMORY_LEFT = 0.05  # it stops when less than this share of the GPU's memory is free
DEFAULT_BATCH = 8    # sequences
MAX_CHAIN = 15       # most tokens that lookup or a schema proposes
# sampling modes, cheapest first; a batch runs in its costliest one, which changes no tokens
GREEDY, NOISE, FILTERED = range(3)


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a sequence. A temperature below 1e-6 or a top_p of 0 means greedy. The
    defaults filter nothing, nor does a top_k of -1. Raises InputError for values out of range."""
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
        vars(self).update(top_k=max(self.top_k, 0))  # plain assignment fails: frozen
        if self.temperature < 1e-6 or self.top_p == 0:
            vars(self).update(temperature=0.0, top_p=1.0)

    @property
    def mode(self):
        """The cheapest sampling mode for these parameters."""
        if self.temperature == 0:
            return GREEDY
        is_filtered = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return FILTERED if is_filtered else NOISE


class Accepted(NamedTuple):
    """The accepted paths of B trees. The host copies `packed`; the properties are views of it."""
    packed: torch.Tensor  # int64 [B, 3 P + 2], from `accept_path`
    P: int                # most nodes of a path

    @property
    def tokens(self):  # [B, P]: the accepted guesses, then the bonus token, the next root
        return self.packed[:, :self.P]

    @property
    def path(self):    # [B, P]: the accepted nodes, root first
        return self.packed[:, self.P:2 * self.P]

    @property
    def count(self):   # [B]: the number of accepted nodes
        return self.packed[:, -2]

    def to_lists(self):
        """(tokens, path, sources of the path's nodes) of each sequence."""
        B, P = len(self.packed), self.P
        packed = self.packed.numpy()  # slices and lists take less time than in torch
        if P == 1:  # shared lists: one per sequence would trigger garbage collections
            path, sources = [0], [-1]
            return [(tokens, path, sources) for tokens in packed[:, :1].tolist()]
        counts = packed[:, -2].tolist()
        columns = packed[:, :3 * P].reshape(B, 3, P)[:, :, :max(counts)].tolist()
        return [(tokens[:n], path[:n], sources[:n])
                for (tokens, path, sources), n in zip(columns, counts)]


# --------------------------------------------------------------------------------------------------
# How many nodes a step verifies, and how many heads draft them

TREE_SIZES = dict(cpu=(2, 3, 4, 6, 8, 12, 16), cuda=(2, 4, 8, 16, 32, 64))  # T to select
LARGEST = 16    # largest T that a C step chooses by itself
PERIOD = 16     # steps between two updates of the tables
PACE = 0.3      # share of a prediction's error that is put down to the machine's speed
UNUSED = 64     # steps after which an option is tried for two steps
TRIAL_TIME = 0.01  # largest share of the time that trials may take
# (accepted, proposed) tokens of lookup assumed at the start, by match length 0 to 4, and of schemas
CHAIN_PRIOR = (0, 1), (0.5, 2.5), (1, 3), (1.5, 3.5), (2, 4), (9, 10)
WINDOW = 64     # of running means, in steps
PRIOR = 2       # weight of an option's rate before its first use, in steps
MEMORY = 256, 64  # window of the acceptance counts: head nodes per bin, lookup tokens per length
ROW = 0.15      # cost of a further row on a CPU, relative to a step of one row: an initial guess
# Initial guesses for a GPU, measured on an H100 by `bench gpu`
BANDWIDTH = 3e12           # bytes per second of a copy
FLOPS = 5.5e14             # per second, of products with many rows
LAUNCH_SECONDS = 12 * 2e-6 # launches of a layer or a draft head in a CUDA graph
EAGER_SECONDS = 4.3e-4     # of a layer without a graph


class Policy:
    """Selects an option for each step: (tree size T, heads that draft). It is fixed by `tree_size`,
    or the one with the most expected tokens per second.

    `chances`, float32 [2, SOURCES], holds the acceptance probabilities of nodes for greedy and
    sampled sequences, by the bin of a head's joint log-probability, by the length of lookup's
    match, and for schemas. Each step counts how many proposed nodes were accepted. Where cpu.c runs
    the step, the option has T = None: the step chooses T itself, from these probabilities and
    `step_seconds`. Elsewhere T is fixed before the step, by the mean acceptance of the n-th
    likeliest node.

    schema: whether the text that a grammar forces is drafted. Batches with grammars ("masked") have
    rates of their own. tree_size (InputError if out of range) may be lowered between steps: 1 is
    plain decoding."""

    def __init__(self, model, heads=None, lookup=False, tree_size=None, schema=False):
        if tree_size is not None:
            check("tree size", tree_size, 1, MAX_TREE, whole=True)
        self.tree_size = tree_size if heads or lookup or schema else 1
        self.heads = None if self.tree_size == 1 else heads
        self.lookup = lookup and self.tree_size != 1
        self.schema = schema and self.tree_size != 1
        self.depth = K = heads.config.n_draft if self.heads else 0
        chain = self.lookup or self.schema
        if self.tree_size:
            self.options = [(self.tree_size, min(K, self.tree_size - 1))]
        elif decoder_class(model, self.heads).chooses_size:
            depths = {*range(min(K, 2) + 1), min(K, LARGEST - 1)}
            self.options = [(None, d) for d in sorted(depths)]
        else:
            sizes = TREE_SIZES[model.device.type]
            self.options = [(1, 0), *((T, min(K, T - 1)) for T in sizes if K),
                            *((T, 0) for T in sizes if chain and T <= MAX_CHAIN + 1)]
        self.largest = max(T or LARGEST for T, _ in self.options)
        # where steps read prompts
        reads = [(T, min(K, T - 1)) for T in READ_SIZES if T > (self.tree_size or 0)]
        self.reading_options = list(dict.fromkeys([*self.options, *reads]))
        self.group = model.group
        self.known = known_counts(self.heads)  # [2, SOURCES, 2]: accepted, proposed
        # totals, to which steps add; in float32 they would stop at 2^24
        self.counts = torch.zeros(2, SOURCES, 2, dtype=torch.float64, device=model.device)
        self.seen = torch.zeros(2, SOURCES, 2)  # the part of `counts` that `known` includes
        self.chances = torch.zeros(2, SOURCES, device=model.device)
        self.learn_chances(self.seen)
        # (masked, heads draft) -> of the n-th likeliest node, mean acceptance and number of steps
        self.means = {(masked, drafts): ([0.5 if drafts else 0.35], [2])
                      for masked, drafts in product((False, True), repeat=2)}
        # (option with T = None, masked) -> recent expected tokens, time in plain steps
        self.sums = {}
        self.chains = []         # of the step's sequences with a grammar, the forced tokens
        self.mask_seconds = 0.0  # of a node, and the number of steps that it is the mean of
        self.mask_steps = 0
        costs = guessed_costs(model, self.heads)
        if self.group:
            costs = self.group.broadcast(costs)  # ranks hold unequal parts
        self.times = StepTimes(*costs)
        self.step_seconds = torch.ones(LARGEST + 1)  # of T nodes, for the next step's heads and B
        self.tables = {}  # heads that draft -> `step_seconds`, until the next update
        # share of the model's blocks that heads run over each committed row
        self.augmenting = len(heads.augment_blocks) / model.config.n_layer if self.heads else 0
        # (B, *option) that `Decoder.capture_all` captured, by `masked`; none: any will do
        self.captured = {False: set(), True: set()}
        self.steps = 0
        self.masked = False
        self.all_forced = False  # whether all sequences of the step go on with forced text
        self.batch = self.best = None
        self.last_use = Counter()  # (option, masked) -> step
        self.trial = []  # options to try in the next steps
        self.elapsed = self.trial_seconds = 0.0

    def select(self, B, behind=lambda: 0, unread=(), chains=()):
        """The option of the next step, of a batch of B. behind(): how many committed rows the heads
        have not read. unread: the number of prompt tokens that each running sequence has not read,
        if steps read prompts. chains: of each sequence with a grammar, the number of tokens of the
        text that it forces."""
        self.steps += 1
        self.chains = chains
        self.masked = len(chains) > 0
        self.all_forced = len(chains) == B and all(chains)
        if any(unread):
            return self.select_reading(B, unread)
        if not (self.depth or self.lookup or self.masked):  # a schema alone needs a grammar
            return 1, 0
        if self.tree_size:
            return self.tree_size, min(self.depth, self.tree_size - 1)
        batch = B, self.masked
        is_due = batch != self.batch or self.steps % PERIOD == 0 or self.steps in (2, 4, 8)
        if is_due or (self.masked and self.options[0][0]):  # a T fixed here depends on chains
            if batch != self.batch:
                self.trial = []
            self.tables = {}
            self.batch = batch
            rate = partial(self.rate, B, self.expected_tokens(B))
            self.best = max(self.possible(B, self.options), key=rate)
            self.begin_trial(B, behind)
        if self.all_forced and self.best[0] is None:
            option = None, 0  # heads know no more about forced text
        else:
            option = self.trial.pop() if self.trial else self.best
            self.last_use[option, self.masked] = self.steps
        if option[0] is None:
            self.set_step_seconds(B, option[1])
        return option

    def set_step_seconds(self, B, depths):
        if depths not in self.tables:
            seconds = [self.expected_seconds(B, T, depths) for T in range(1, LARGEST + 1)]
            self.tables[depths] = torch.tensor(seconds).cummax(0).values
        self.step_seconds[1:] = self.tables[depths]

    def select_reading(self, B, unread):
        """The option with the most tokens per second, where n tokens of a prompt count as
        n^READ_VALUE. Among options that take at most twice as long as that one, prefers those that
        read the longest prompt in READ_STEPS steps; if there are none, the largest."""
        expected = self.expected_tokens(B)
        reading = sorted(n for n in unread if n)
        sums = list(accumulate((n ** READ_VALUE for n in reading), initial=0))
        seconds = lambda option: self.expected_seconds(B, *option)

        def rate(option):
            T, depths = option
            tokens = expected[depths > 0][min(T, self.tree_size or self.largest)]
            shorter = bisect(reading, T)  # prompts of which T nodes read all that is unread
            read = sums[shorter] + T ** READ_VALUE * (len(reading) - shorter)
            return (read + (len(unread) - len(reading)) * tokens) / seconds(option)
        options = self.possible(B, self.reading_options)
        limit = 2 * seconds(max(options, key=rate))
        options = [option for option in options if seconds(option) <= limit]
        fast = [option for option in options if option[0] * READ_STEPS >= reading[-1]]
        return max(fast, key=rate) if fast else max(options)

    def possible(self, B, options):
        """Those options that need no capture while a server runs; if there are none, all."""
        return [x for x in options if (B, *x) in self.captured[self.masked]] or options

    def begin_trial(self, B, behind):
        """Tries the option that was not used for longest, if time is left for it."""
        last_use = lambda option: self.last_use[option, self.masked]
        unused = [option for option in self.possible(B, self.options)
                  if self.steps - last_use(option) >= UNUSED]
        if not unused or self.trial:
            return
        T, depths = option = min(unused, key=last_use)
        seconds = 2 * self.times.seconds(B, T or depths + 1, depths)
        if depths:
            seconds += self.augmenting * self.times.seconds(1, 1 + behind(), 0)
        if self.trial_seconds + seconds < TRIAL_TIME * self.elapsed:
            self.trial_seconds += seconds
            self.trial = [option, option]

    def expected_tokens(self, B):
        """{whether heads draft: expected tokens of a sequence, by tree size 0, 1, ...}."""
        expected = {}
        for drafts in (True, False):
            means, _ = self.means[self.masked, drafts]
            expected[drafts] = [0, *accumulate(extended(means, self.largest - 1), initial=1)]
            if any(self.chains):
                expected[drafts] = self.with_chains(expected[drafts], B)
        return expected

    def with_chains(self, expected, B):
        """Expected tokens where some sequences draft n tokens of forced text: 1 + p + ... + p^n."""
        right, proposed = self.known[:, BINS + SCHEMA].sum(0).tolist()
        powers = ((right / proposed) ** j for j in range(len(expected)))
        sums = [0, *accumulate(powers)]
        chains = [n for n in self.chains if n]
        return [((B - len(chains)) * tokens + sum(sums[min(n + 1, T)] for n in chains)) / B
                for T, tokens in enumerate(expected)]

    def rate(self, B, expected, option):
        """Expected tokens of a sequence in the time of a plain step."""
        T, depths = option
        T = T or depths + 1
        tokens = expected[depths > 0][T]
        time = self.plain_steps(B, T, depths)
        recent_tokens, recent_time = self.sums.get((option, self.masked), (0, 0))
        return (PRIOR * tokens + recent_tokens) / (PRIOR * time + recent_time)

    def expected_seconds(self, B, T, depths):
        """Of a step, masks included."""
        masks = self.mask_seconds * T * len(self.chains)
        return self.times.seconds(B, T, depths) + masks

    def plain_steps(self, B, T, depths):
        """The time relative to that of a plain step."""
        return self.expected_seconds(B, T, depths) / self.expected_seconds(B, 1, 0)

    def update(self, step, results):
        """Learns from a `StepRun` and its `StepResult`s."""
        if not results or self.tree_size == 1:
            return
        if step.counts is not None:
            self.learn_chances(step.counts)
        seconds = step.seconds
        mask_seconds = step.mask_seconds
        if self.group:  # ranks see the same tokens, but each has its own clock
            is_due = self.steps % PERIOD == 0
            both = self.group.broadcast((seconds, mask_seconds)) if is_due else (None, None)
            seconds, mask_seconds = both
        self.elapsed += (seconds or 0) * (PERIOD if self.group else 1)
        if seconds and not step.catches_up:
            self.times.learn(step.B, step.tree_size, step.depths, seconds)
        if seconds and step.masked:
            self.mask_steps = min(self.mask_steps + 1, WINDOW)
            mean = mask_seconds / (step.masked * step.tree_size)
            self.mask_seconds += (mean - self.mask_seconds) / self.mask_steps
        if step.tree_size > 1:
            self.learn_means(step, results)
        if step.expected and not self.all_forced:
            key = (None, step.depths), step.masked > 0
            tokens, time = self.sums.get(key, (0, 0))
            tokens += step.expected / step.B - tokens / WINDOW
            time += self.plain_steps(step.B, step.tree_size, step.depths) - time / WINDOW
            self.sums[key] = tokens, time

    def learn_means(self, step, results):
        hits = [0] * step.tree_size
        for result in results:
            for node in result.path:
                hits[node] += 1
        means, counts = self.means[step.masked > 0, step.depths > 0]
        means += extended(means, step.tree_size - 1)[len(means):]
        counts += [2] * (len(means) - len(counts))
        for i, accepted in enumerate(hits[1:]):
            counts[i] = min(counts[i] + 1, WINDOW)
            means[i] += (accepted / len(results) - means[i]) / counts[i]

    def learn_chances(self, counts):
        """Updates `chances` from the new total `counts`."""
        self.known += counts - self.seen
        self.seen = counts
        for part, memory in zip(self.known.split((BINS, SOURCES - BINS), dim=1), MEMORY):
            part *= (memory / part[..., 1:]).clamp(max=1)  # forgets what is older
        chances = self.known[..., 0] / self.known[..., 1]
        chances[:, :BINS] = torch.tensor([falling(bins) for bins in self.known[:, :BINS].tolist()])
        if self.chances.is_cuda:
            chances = chances.pin_memory()  # else the host would wait for the copy
        self.chances.copy_(chances, non_blocking=True)


def extended(means, n):
    """n means; those beyond the last known one fall as rank ** -1.4."""
    last = len(means)
    return means[:n] + [means[-1] * (last / rank) ** 1.4 for rank in range(last + 1, n + 1)]


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


def known_counts(heads):
    """The initial counts, float32 [2, SOURCES, 2]: (accepted, proposed). Heads: 4 proposals in each
    bin, accepted with its probability, plus the counts in heads.json. Chains: CHAIN_PRIOR."""
    counts = torch.zeros(2, SOURCES, 2)
    counts[:, :BINS, 1] = 4.0
    counts[:, :BINS, 0] = 4.0 * torch.exp(-(torch.arange(BINS) + 0.5) / 4)
    counts[:, BINS:] = torch.tensor(CHAIN_PRIOR)
    if heads and (tables := heads.info.get("acceptance")):
        counts[:, :BINS] += torch.tensor([tables["greedy"], tables["sampled"]])
    return counts


class StepTimes:
    """Predicts the seconds of a step of B trees of T nodes, drafted by `depths` heads:

        unit * (rows[bucket(B * T)] + heads[depths, bucket(B)]),   rows[1] = 1

    unit: the machine's present speed. The tables are guesses times corrections; a cell that was
    never measured has the correction of the nearest one that was. costs: see `guessed_costs`."""

    def __init__(self, *costs):
        self.costs = costs
        self.unit = None  # seconds
        # (depths, bucket(B)) of heads, (0, bucket(B * T)) of rows -> log of the correction, number
        # of measurements
        self.corrections = {(0, 1): (0.0, 1)}

    def cost(self, depths, n):
        """The cost of n rows, or of that many heads for n sequences."""
        row, bound, head = self.costs
        rows = lambda n: max(1 + row * (n - 1), bound * n)
        guess = rows(n)
        if depths:  # the augmenting block and head 1, then heads that read beams
            guess = head * (2 * rows(n) + (depths - 1) * rows(n * DEFAULT_BEAMS))
        return guess * math.exp(self.correction(depths, n))

    def correction(self, depths, n):
        cell = depths, bucket(n)
        if cell not in self.corrections:
            measured = [other for other in self.corrections if (other[0] > 0) == (depths > 0)]
            distance = lambda other: (abs(other[0] - depths), abs(other[1] - cell[1]))
            cell = min(measured, key=distance, default=None)
        return self.corrections[cell][0] if cell else 0.0

    def seconds(self, B, T, depths):
        heads = self.cost(depths, B) if depths else 0
        return (self.unit or 1.0) * (self.cost(0, B * T) + heads)

    def learn(self, B, T, depths, seconds):
        """Corrects the prediction by the measured seconds of a step."""
        if self.unit is None:
            self.unit = seconds / self.seconds(B, T, depths)
        error = math.log(seconds / self.seconds(B, T, depths))
        error = max(min(error, 0.5), -0.5)  # one slow step says little
        self.unit *= math.exp(PACE * error)
        if B * T > 1:
            self.correct(0, B * T, error)
        if depths:
            self.correct(depths, B, error)

    def correct(self, depths, n, error):
        cell = depths, bucket(n)
        count = self.corrections[cell][1] if cell in self.corrections else 0
        change = max(1 / WINDOW, 1 / (2 + count)) * error
        self.corrections[cell] = self.correction(depths, n) + change, count + 1


def guessed_costs(model, heads):
    """Initial costs, relative to a step of one row: (of a further row, of a row where compute is
    the bound, of a draft head)."""
    is_cuda = model.device.type == "cuda"
    row = ROW
    bound = head = 0.0
    if is_cuda:
        bound = 2 * linear_weights(model) / FLOPS / guessed_seconds(model)
        row = bound / 2
    if heads:  # reads its weights and the (draft) vocabulary's rows
        numbers = (heads.config.vocabulary or model.config.vocab_size) * model.config.n_embd
        numbers += linear_weights(heads.draft_head(0))
        size = model.dtype.itemsize if is_cuda else 0.625  # packed in 4 bits, and scales
        launches = LAUNCH_SECONDS if is_cuda else 0.0
        head = (numbers * size / BANDWIDTH + launches) / guessed_seconds(model)
    return row, bound, head


def linear_weights(module):
    """How many numbers the weights of its linear layers have."""
    return sum(layer.in_features * layer.out_features for layer in module.modules()
               if hasattr(layer, "in_features"))


def guessed_seconds(model):
    """A guess at the seconds of a plain step."""
    launches = LAUNCH_SECONDS if model.device.type == "cuda" else 0.0
    return model.weight_bytes() / BANDWIDTH + model.config.n_layer * launches


def long_prompt(model):
    """How many unread tokens make it faster to read a prompt by itself, in a pass that is not
    captured, than by steps of 64 nodes."""
    steps = EAGER_SECONDS * model.config.n_layer / guessed_seconds(model)
    return min(MAX_TREE * math.ceil(steps), LONG_PROMPT)


def bucket(rows):
    """The cell of `StepTimes` for a number of rows: its own up to 16, then two per doubling."""
    return rows if rows <= 16 else 16 + round(2 * math.log2(rows / 16))


# --------------------------------------------------------------------------------------------------
# The decoder

class Batch(NamedTuple):
    """What a step reads of the sequences that it runs, B of all slots."""
    slots: torch.Tensor | None  # int64 [B]; None: all
    lengths: torch.Tensor       # int32 [B]: committed rows
    root: torch.Tensor          # int64 [B]: the newest token, not yet in the cache
    sequence: torch.Tensor      # int64 [B]: the sequence's index, an argument of its noise
    sampling: dict              # {field of `Sampling`: float32 or int64 [B]}


INTEGER_FIELDS = "root", "sequence", "seed", "top_k"
FLOAT_FIELDS = "temperature", "top_p", "min_p"


def make_batch(slots, lengths, integers, floats):
    """A `Batch` from the columns of `Slots.integers` and `Slots.floats`."""
    fields = dict(zip((*INTEGER_FIELDS, *FLOAT_FIELDS), (*integers, *floats)))
    return Batch(slots, lengths, fields.pop("root"), fields.pop("sequence"), fields)


@dataclass
class Slots:
    """The state of all sequences, one per slot."""
    cache: KVCache
    heads_cache: KVCache    # of the augmenting block
    integers: torch.Tensor  # int64 [4, slots]: INTEGER_FIELDS
    floats: torch.Tensor    # float32 [3, slots]: FLOAT_FIELDS
    state: torch.Tensor     # [slots, C]: what the heads draft from
    history: torch.Tensor   # int32 [slots, > capacity]: tokens up to the root, for lookup
    ends: torch.Tensor      # int32 [slots]: index of the prompt's last token
    active: torch.Tensor    # int32 [slots]: 0 for an idle slot, 2 for a sequence with a grammar

    def __post_init__(self):
        self.all = make_batch(None, self.cache.lengths, self.integers, self.floats)

    def batch(self, slots):
        """The `Batch` of some slots, int64 [B]."""
        columns = self.cache.lengths, self.integers, self.floats
        return make_batch(slots, *(x.index_select(-1, slots) for x in columns))

    def set(self, slot, **values):
        """Sets numbers of a slot, by name: ends, active, INTEGER_FIELDS, FLOAT_FIELDS, and length.
        They are copied to the device; the host does not wait."""
        tensors = self.all._asdict() | self.all.sampling | dict(
            length=self.cache.lengths, ends=self.ends, active=self.active)
        for name, value in values.items():
            x = tensors[name]
            x[slot:slot + 1].copy_(pinned([value], x.device, x.dtype), non_blocking=True)


def new_slots(model, heads, batch_size, capacity, max_tree, max_path):
    """Empty `Slots` for sequences of `capacity` tokens. On a GPU the next step already runs when
    the host reads the one that ended a sequence, so there is room for what that step adds."""
    zeros = lambda *shape, dtype: torch.zeros(*shape, dtype=dtype, device=model.device)
    cache = model.new_cache(batch_size, capacity + max_path + max_tree)  # a path, then a tree
    # heads only write paths to their cache, on a CPU up to MAX_CHAIN + 1 rows at once
    rows = capacity + max_path + max(max_path, MAX_CHAIN + 1)
    heads_kv = heads.new_cache(batch_size, rows).kv if heads else cache.kv[:0]
    return Slots(
        cache, KVCache(heads_kv, cache.lengths),
        integers=zeros(len(INTEGER_FIELDS), batch_size, dtype=torch.int64),
        floats=zeros(len(FLOAT_FIELDS), batch_size, dtype=torch.float32),
        state=zeros(batch_size, model.config.n_embd, dtype=model.dtype),
        history=zeros(batch_size, capacity + 2 * max_path + 1, dtype=torch.int32),  # 1: the root
        ends=zeros(batch_size, dtype=torch.int32),
        active=zeros(batch_size, dtype=torch.int32))


class StepRun(NamedTuple):
    """A finished step, copied to the host."""
    accepted: list         # (tokens, path, sources) of each sequence
    trees: list | None     # the `Tree` of each sequence as lists, if requested
    B: int
    tree_size: int
    depths: int            # drafted by heads
    seconds: float | None  # without the wait for masks; None for the first step of its kind, which
                           # compiles and captures
    counts: torch.Tensor | None   # the `Policy`'s, every PERIOD steps
    expected: float | None = None # tokens, by acceptance probabilities, if the step chose T
    catches_up: bool = False      # whether heads read rows that earlier steps left unread
    masked: int = 0               # sequences with a grammar
    mask_seconds: float = 0.0     # of the wait for their masks


@dataclass
class InFlight:
    """A step that has been started. Its tensors are on the host, and filled when it ends."""
    accepted: Accepted
    tree: Tree | None            # if requested
    counts: torch.Tensor | None  # as in `StepRun`, like the rest
    sizes: tuple                 # B, T
    depths: int
    times: tuple                 # `timestamp`s of its start and end
    is_steady: bool              # it compiled and captured nothing
    masked: int = 0
    pause: tuple | None = None   # `timestamp`s around the wait for masks
    expected: float | None = None
    catches_up: bool = False

    def wait(self):
        """Waits for the end of the step and returns its `StepRun`."""
        seconds = seconds_between(*self.times)
        mask_seconds = seconds_between(*self.pause) if self.pause else 0.0
        trees = self.tree and list(map(Tree, *(x.tolist() for x in self.tree)))
        return StepRun(self.accepted.to_lists(), trees, *self.sizes, self.depths,
                       seconds - mask_seconds if self.is_steady else None, self.counts,
                       self.expected, self.catches_up, self.masked, mask_seconds)


class Constraint(NamedTuple):
    """What a sequence's grammar says of its next step."""
    matcher: object    # of `hf.grammar`; None without a grammar
    unread: int = 0    # prompt tokens
    forced: tuple = () # tokens of the text that must come next, as far as it is known


def decoder_class(model, heads):
    """The `Decoder` class of a model's backend."""
    return model.blocks.decoder_class(heads) or Decoder


class Decoder:
    """Decodes up to batch_size sequences step by step, one in each slot. A step runs B of them.

    policy: a `Policy`, which names the drafters. Its heads read every accepted token, even in steps
    that they do not draft. capacity: most tokens of a sequence, prompt included; default: the
    model's context. sampling: for sequences without their own. reads_in_steps: whether steps read
    prompts, beside sequences that generate; default: on CUDA. beams, graph: as in `prepare`. Raises
    InputError for sizes out of range and for caches that do not fit in memory."""
    chooses_size = False  # whether `draft` chooses the tree size, if it is None

    @torch.inference_mode()
    def __init__(self, model, *, policy, batch_size=1, capacity=None, beams=None, sampling=None,
                 graph=True, reads_in_steps=None):
        check("batch size", batch_size, 1, 2**16, whole=True)
        heads = policy.heads
        max_beams = heads.max_beams if heads else MAX_BEAMS
        self.beams = min(DEFAULT_BEAMS, max_beams) if beams is None else beams
        check("beams", self.beams, 1, max_beams, whole=True)
        self.model = model
        self.head = model.head  # each attribute lookup in a module takes 5 us of a step
        self.device = model.device
        self.heads = heads
        self.policy = policy
        self.batch_size = batch_size
        self.sampling = sampling or Sampling()
        self.sampling_mode = self.sampling.mode  # of the next step
        self.capacity = model.config.block_size if capacity is None else capacity
        check("capacity", self.capacity, 1, model.config.block_size, whole=True)
        self.context = model.blocks.decoding_context
        self.inference_mode = torch.inference_mode()  # creating one takes as long as a stage
        is_cuda = model.device.type == "cuda"
        self.reads_in_steps = is_cuda if reads_in_steps is None else reads_in_steps
        self.long_prompt = long_prompt(model)
        largest = max(policy.largest, *READ_SIZES) if self.reads_in_steps else policy.largest
        P = self.path_limit(largest)
        # captured graphs hold addresses: these tensors are allocated once and changed in place
        self.offsets = torch.arange(P, device=model.device)
        self.path_ancestors = (2 << self.offsets) - 1  # a path has no branches: j sees nodes 0..j
        self.slots = new_slots(model, heads, batch_size, self.capacity, largest, P)
        for slot in range(batch_size):
            self.slots.set(slot, **vars(self.sampling))
        self.root_tree = root_tree(self.slots.all.root)
        self.slot_ids = torch.zeros(batch_size, dtype=torch.int64, device=model.device)
        self.B = batch_size  # of the next step, which runs the first B slots of slot_ids
        self.batch = self.slots.all  # of the present step
        # arguments of `prompt_chain` and `accept_path`
        self.known = None
        if self.reads_in_steps:
            self.known = self.slots.history, self.slots.cache.lengths, self.slots.ends
            self.no_chain = torch.zeros(batch_size, 1, dtype=torch.int64, device=model.device)
        self.steps_ahead = 1 if is_cuda else 0  # steps in flight while the host reads an older one
        self.constraints = []  # the `Constraint` of each row of the next step; []: no grammars
        # What steps read of grammars: on the host, where it is written, and on the device. Made for
        # the first grammar.
        self.on_host = self.on_device = None
        self.pause = None         # `timestamp`s around the wait for the last step's masks
        self.graphs = {}  # (arguments of `step`, sampling mode) -> function that replays, or None
        self.masked_graphs = {}  # the same for steps with grammars
        self.captured_stages = []  # of these, and the `Batch`: they own what the parts share
        self.pool = None  # memory shared by the graphs; None: steps run eagerly
        self.batch_sizes = range(1, batch_size)  # B that a step may have; always also all slots
        if is_cuda and graph and HAS_TRITON:  # the references read values, so no graph holds them
            self.pool = torch.cuda.graph_pool_handle()
            self.batch_sizes = ()

    def path_limit(self, tree_size):
        """P: a path ends with the heads' last depth or with lookup's chain, while the chain of a
        prompt's tokens fills the tree."""
        if self.reads_in_steps:
            return tree_size
        return min(tree_size, 1 + max(self.policy.depth, MAX_CHAIN))

    # One step of B slots: fixed shapes, state changed in place, no host synchronisation.

    def step(self, *arguments):
        part = partial(next, self.stages(*arguments))
        return self.run_parts(part, part, part)

    def run_parts(self, draft, verify, finish):
        """Runs the parts of `stages`. The host computes masks while a GPU verifies the tree."""
        tree = draft()
        if not self.constraints:
            verify()
            return finish()
        columns = tree.tokens, tree.parents, tree.ancestors
        columns = [x.to("cpu", non_blocking=True) for x in columns]
        copied = timestamp(self.device)
        verify()
        start = timestamp(self.device)
        seconds_between(copied, copied)  # waits
        self.fill_masks(tree, *(x.tolist() for x in columns))
        self.pause = start, timestamp(self.device)
        return finish()

    def stages(self, B, tree_size, depths):
        """The stages of a step, as a generator that pauses before and after verifying the tree."""
        self.read_batch(B)
        tree, chain = self.draft(tree_size, depths)      # a `Tree` [B, T]
        yield tree
        positions = self.positions(tree)                 # [B, T]
        normed, hidden = self.verify(tree, positions)    # [B, T, C]; K/V go to rows lengths..
        yield
        target = self.sample(normed, positions)          # [B, T]: the model's own next tokens
        accepted = self.accept(tree, chain, target)      # tokens, path [B, P], count [B]
        self.commit(tree, hidden, accepted)
        self.batch = self.slots.all  # drops references to the graph's memory
        yield accepted, tree

    def read_batch(self, B):
        slots = self.slots
        self.batch = slots.all if B == self.batch_size else slots.batch(self.slot_ids[:B])

    def draft(self, tree_size, depths):
        """Returns the tree and its chain, as `ngram_lookup`'s; None without lookup and grammars."""
        slots = self.slots
        batch = self.batch
        B = len(batch.root)
        temperature = batch.sampling["temperature"]
        if tree_size == 1:
            return Tree(batch.root[:, None], *(x[:B] for x in self.root_tree[1:])), None
        candidates = chain = None
        if depths:
            noise = (temperature, batch.sampling["seed"], batch.sequence,
                     batch.lengths) if self.sampling_mode != GREEDY else None
            state = slots.state if batch.slots is None else slots.state[batch.slots]
            masks = self.mask_rows("first_masks", B)
            candidates = self.heads.draft(state, batch.root, tree_size, self.beams, noise, masks)
        if self.policy.lookup:
            n = min(tree_size - 1, MAX_CHAIN)
            chain = ngram_lookup(slots.history, slots.cache.lengths, n, batch.slots)
        elif self.reads_in_steps:
            chain = None if depths else self.no_chain[:B]
        if self.constraints:
            chain = self.constrained_chain(chain, B, min(tree_size - 1, MAX_CHAIN))
        *tree, probabilities = best_tree(batch.root, candidates, chain, self.policy.chances,
                                         temperature, tree_size)
        if self.reads_in_steps:
            prompt_chain(*self.known, tree, probabilities, chain, batch.slots)
        return Tree(*tree, probabilities), chain

    def constrained_chain(self, chain, B, n):
        """Forced text, else lookup's chain, if the grammar allows its first token."""
        forced = self.mask_rows("forced", B)[:, :1 + n]
        if self.policy.lookup:
            forced = torch.where(forced[:, :1] > 0, forced, chain)
        allowed = is_allowed(self.mask_rows("first_masks", B), forced[:, 1:2])
        return torch.cat((forced[:, :1] * allowed, forced[:, 1:]), dim=1)

    def mask_rows(self, name, rows):
        """The first rows of a tensor of `on_device`; None for a step without grammars."""
        return self.on_device[name][:rows] if self.constraints else None

    def positions(self, tree):
        return self.batch.lengths[:, None] + tree.depths

    def verify(self, tree, positions):
        """Returns the final norm's output and its input."""
        if self.model.config.positions == "learned":
            # nodes beyond the context's end are never emitted, but have no position embedding
            positions = positions.clamp(max=self.model.config.block_size - 1)
        model = self.model
        cache = self.slots.cache.select(self.batch.slots)
        hidden = model.embeddings(tree.tokens, positions)
        return model.norm.add_and_norm(*model.blocks(hidden, model.tables, positions, cache,
                                                     tree.ancestors))

    def sample(self, normed, positions):
        sequence = self.batch.sequence
        sampling = self.batch.sampling
        masks = self.mask_rows("masks", positions.numel())
        if self.sampling_mode != FILTERED:
            temperature = 0.0 if self.sampling_mode == GREEDY else sampling["temperature"]
            return self.head.sample(normed, temperature, sampling["seed"], sequence, positions,
                                    masks)
        logits = self.head.logits(normed.flatten(0, 1))  # (B * T, V)
        filters = dict(sampling)
        seed, temperature = filters.pop("seed"), filters["temperature"]
        logits = filter_logits(mask_logits(logits, masks), **filters)
        return gumbel_argmax(logits, 1.0 * (temperature > 0), seed, sequence,
                             (positions + 1).view(-1)).view_as(positions)

    def accept(self, tree, chain, target):
        P = self.path_limit(tree.tokens.shape[1])
        temperature = self.batch.sampling["temperature"]
        packed = accept_path(*tree[:5], target, self.slots.active, P, temperature,
                             self.policy.counts, chain, self.known, self.batch.slots)
        return Accepted(packed, P)

    def commit(self, tree, hidden, accepted):
        """Keeps the path's cache rows, feeds its tokens to heads and lookup, and makes the bonus
        token the next root. Rows from `count` on are junk that the next step overwrites."""
        slots = self.slots
        running = self.batch.slots
        lengths = slots.cache.lengths
        history = slots.history if self.policy.lookup else None
        states = None
        if self.heads:
            # lookup's tree is a chain: without heads its path is in place already
            if tree.tokens.shape[1] > 1:
                commit_path(slots.cache.kv, lengths, accepted.path, accepted.count, running)
                index = accepted.path[:, :, None].expand(-1, -1, hidden.shape[2])
                hidden = hidden.gather(1, index)
            positions = self.batch.lengths[:, None] + self.offsets[:accepted.P]  # (B, P)
            ancestors = self.path_ancestors[:accepted.P].expand_as(positions)
            states = self.heads.augment(hidden, accepted.tokens, positions,
                                        slots.heads_cache.select(running), ancestors)
        advance(accepted.packed, lengths, slots.all.root, history, states, slots.state, running)

    # On the host

    def run_slots(self, running):
        """Announces the slots of running sequences (a set or dict); returns the slots that the next
        step computes, in its order. An idle slot fills the batch up to the next possible size."""
        self.B = next((n for n in self.batch_sizes if n >= len(running)), self.batch_size)
        if self.B == self.batch_size:
            return range(self.batch_size)
        idle = next(slot for slot in range(self.batch_size) if slot not in running)
        slots = [*running, *[idle] * (self.B - len(running))]
        with self.inference_mode:
            self.slot_ids[:self.B].copy_(pinned(slots, self.device), non_blocking=True)
        return slots

    def constrain(self, constraints):
        """Announces the grammars of the next step: a `Constraint` for each row, or []."""
        self.constraints = constraints
        if not constraints:
            return
        if self.on_host is None:
            self.make_mask_tensors()
        forced, masks = (self.on_host[name].numpy() for name in ("forced", "first_masks"))
        for b, (matcher, unread, chain) in enumerate(constraints):
            chain = chain[:MAX_CHAIN]
            forced[b, 0] = SCHEMA if chain else 0
            forced[b, 1:] = -1
            forced[b, 1:1 + len(chain)] = chain
            masks[b] = matcher.mask if matcher and not unread else -1
        self.to_device("forced", len(constraints))
        self.to_device("first_masks", len(constraints))

    def make_mask_tensors(self):
        sizes = READ_SIZES if self.reads_in_steps else (1,)
        B = self.batch_size
        nodes = B * max(self.policy.largest, *sizes)
        words = -(-self.model.config.vocab_size // 32)
        self.on_host = dict(forced=torch.zeros(B, 1 + MAX_CHAIN, dtype=torch.int64),
                            first_masks=torch.zeros(B, words, dtype=torch.int32),  # of the roots
                            masks=torch.zeros(nodes, words, dtype=torch.int32))  # of all nodes
        if self.device.type == "cuda":
            self.on_host = {name: x.pin_memory() for name, x in self.on_host.items()}
        self.on_device = {name: x.to(self.device) for name, x in self.on_host.items()}

    def to_device(self, name, rows):
        if self.device.type == "cuda":  # else the tensors are the same
            self.on_device[name][:rows].copy_(self.on_host[name][:rows], non_blocking=True)

    def fill_masks(self, tree, tokens, parents, ancestors):
        """Computes the masks of a tree's nodes. tokens, parents, ancestors: lists, [B, T]."""
        T = len(tokens[0])
        for b, (matcher, unread, _) in enumerate(self.constraints):
            masks = self.on_host["masks"].numpy()[b * T:(b + 1) * T]
            if unread or not matcher:
                masks[:] = -1
                if matcher and unread < T:  # node `unread` is the prompt's last token
                    masks[unread] = matcher.mask
                continue
            n = T - ancestors[b].count(0)
            if not matcher.masks(tokens[b][:n], parents[b][:n], masks):
                tree.ancestors[b, 1:].zero_()  # makes the other nodes padding
        self.to_device("masks", len(tokens) * T)

    def behind(self):
        """Committed rows that the heads have not read."""
        return 0

    def run(self, *arguments):
        """Runs `step`. With graphs, the first step of these arguments and sampling mode runs
        eagerly, which compiles its kernels, and is then captured; later steps replay the graph, or
        with grammars one graph for each part of the step."""
        graphs = self.masked_graphs if self.constraints else self.graphs
        key = arguments, self.sampling_mode
        if replay := graphs.get(key):
            return replay()
        result = self.step(*arguments)
        graphs[key] = None
        if self.pool is not None:
            body = partial(self.step, *arguments)
            graphs[key] = (self.capture_parts(arguments) if self.constraints
                           else capture(body, self.device, self.pool))
        return result

    def capture_parts(self, arguments):
        stages = self.stages(*arguments)
        part = partial(capture, partial(next, stages), self.device, self.pool)
        draft = part()
        self.captured_stages.append((stages, self.batch))
        return partial(self.run_parts, draft, part(), part())

    def launch(self, tree_size, depths, with_trees=False):
        """Starts a step and returns it as an `InFlight`."""
        graphs = self.masked_graphs if self.constraints else self.graphs
        is_steady = ((self.B, tree_size, depths), self.sampling_mode) in graphs
        self.pause = None
        start = timestamp(self.device)
        to_host = lambda x: x.to("cpu", non_blocking=True, copy=True)  # the next step overwrites x
        with self.inference_mode:
            accepted, tree = self.run(self.B, tree_size, depths)
            packed = to_host(accepted.packed)
            counts = to_host(self.policy.counts) if self.policy.steps % PERIOD == 0 else None
            columns = Tree(*map(to_host, tree)) if with_trees else None
        masked = sum(x.matcher is not None for x in self.constraints)
        return InFlight(Accepted(packed, accepted.P), columns, counts, tree.tokens.shape, depths,
                        (start, timestamp(self.device)), is_steady, masked, self.pause)

    def warm_up(self, masked=False):
        """Compiles and captures every option of the policy, in the present sampling mode, while all
        slots are idle. masked: those of batches with grammars."""
        policy = self.policy
        reading = policy.reading_options if self.reads_in_steps else []
        self.constrain([Constraint(None)] * self.B if masked else [])
        for option in dict.fromkeys([*policy.options, *reading]):
            with self.context():
                self.launch(*option).wait()
        self.constrain([])

    def capture_all(self, progress=iter, masked=False):
        """Captures, while all slots are idle, the policy's options in all sampling modes for 1, 2,
        4, ... sequences: plain steps and a fixed tree size, then steps of up to LARGEST_STEP nodes,
        the largest first, until the GPU's memory is nearly full. Others are no options from then
        on. Replays each graph once, to learn its time. progress: wraps the list of steps, as tqdm
        does. masked: captures the steps of batches with grammars, of up to LARGEST_MASKED nodes."""
        policy = self.policy
        sizes = {2 ** i for i in range(self.batch_size.bit_length())} | {self.batch_size}
        options = {(1, 0), *policy.reading_options}
        largest = LARGEST_MASKED if masked else LARGEST_STEP
        steps = [(B, T, depths) for B, (T, depths) in product(sizes, options)
                 if B * T <= largest or T <= READ_SIZES[0] or T == policy.tree_size]
        needed = 1, policy.tree_size
        steps.sort(key=lambda step: (step[1] not in needed, -step[0] * step[1], step))
        captured = policy.captured[masked]
        captured.clear()
        for step in progress(steps):
            free, total = torch.cuda.mem_get_info(self.device)
            if free < MEMORY_LEFT * total:
                break
            with contextlib.suppress(torch.OutOfMemoryError), self.context():
                self.capture_modes(captured, masked, *step)
        self.constrain([])
        self.B = self.batch_size
        if not masked:
            self.batch_sizes = sorted({B for B, T, _ in captured if T == (policy.tree_size or 1)})

    def capture_modes(self, captured, masked, B, *option):
        """Captures an option in all sampling modes, times it, and adds it to `captured`."""
        self.B = B
        self.constrain([Constraint(None)] * B if masked else [])
        for mode in (FILTERED, NOISE, GREEDY):  # the last one's time is learnt
            self.sampling_mode = mode
            self.launch(*option).wait()
            seconds = self.launch(*option).wait().seconds
        self.policy.times.learn(B, *option, seconds)
        captured.add((B, *option))

    def prefill_end(self, length, start):
        """How many tokens of a prompt to read by `prefill`, from token `start` on; steps read the
        rest. Without `reads_in_steps` all but the last, which is the root of the first step."""
        last = length - 1
        if not self.reads_in_steps:
            return last
        return last - PROMPT_REST if last - start > self.long_prompt else start

    @torch.inference_mode()
    def prefill(self, slot, prompt, start, end):
        """Reads the prompt's tokens start, ..., end - 1 into a slot. Steps between two calls write
        their trees where the next call will write."""
        tokens = pinned([prompt[start:end + 1]], self.device)  # (1, end + 1 - start)
        tokens = tokens.to(self.device, non_blocking=True)
        hidden = self.model.prefill(tokens[:, :-1], self.slots.cache.one(slot), start)
        if self.heads:
            self.read_prompt(slot, hidden, tokens[:, 1:], start)

    def read_prompt(self, slot, hidden, tokens, start):
        """Lets the heads read hidden states of a prompt [1, T, C]. tokens: those that follow."""
        states = self.heads.augment(hidden, tokens, cache=self.slots.heads_cache.one(slot),
                                    start=start)
        self.slots.state[slot:slot + 1] = states[:, -1]

    @torch.inference_mode()
    def begin(self, slot, sequence, start):
        """Makes a slot run a sequence. The slot's cache holds the first `start` prompt tokens."""
        prompt = sequence.prompt
        if self.reads_in_steps or self.policy.largest > 1:  # else nobody reads the history
            tokens = pinned(prompt, self.device, torch.int32)
            self.slots.history[slot, :len(prompt)].copy_(tokens, non_blocking=True)
        if len(prompt) == 1:  # no token before it gives a state
            self.slots.state[slot].zero_()
        self.slots.set(slot, root=prompt[start], ends=len(prompt) - 1, sequence=sequence.index,
                       length=start, active=2 if sequence.matcher else 1,
                       **vars(sequence.sampling))

    @torch.inference_mode()
    def release(self, slot, rows=0):
        """Makes a slot idle. Steps may still compute it and write their trees after the first
        `rows` rows of its cache."""
        self.slots.set(slot, active=0, ends=0, length=rows)


def pinned(values, device, dtype=torch.int64):
    """A tensor on the host, which can be copied to a GPU without waiting."""
    x = torch.tensor(values, dtype=dtype)
    return x.pin_memory() if device.type == "cuda" else x


def timestamp(device):
    """The time on the device's clock at this point of its queue."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start, end):
    """Seconds between two timestamps; waits for the later one."""
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def capture(body, device, pool=None):
    """Captures body(), which has run before, in a CUDA graph; returns a function that replays it.
    Existing tensors that body() reads or writes must live as long as the graph. Graphs of one pool
    share memory: copy a graph's result, on the same stream, before another graph runs."""
    with torch.inference_mode(), torch.cuda.device(device):
        # else this graph would use a cuBLAS workspace from an earlier graph's memory
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
    """Schedules prompts: they wait in a queue, are read into free slots of a `Decoder`, and run
    until they end. `add` prompts, then `step` while it is `busy`. An engine can be reused for any
    prompts that fit its capacity. policy: default one with these heads. options: the Decoder's."""

    def __init__(self, model, heads=None, *, policy=None, **options):
        self.policy = policy or Policy(model, heads)
        self.decoder = decoder_class(model, self.policy.heads)(model, policy=self.policy, **options)
        self.clear()

    def clear(self):
        """Drops all sequences."""
        for slot in range(self.decoder.batch_size):
            self.decoder.release(slot)
        self.waiting = deque()
        # the free slots, each with the tokens in its cache
        self.cached_prefix = dict.fromkeys(range(self.decoder.batch_size), ())
        self.prefilling = None    # (slot, sequence, next token, end) of the prefill in progress
        self.running = {}         # slot -> sequence
        # ({row: (slot, sequence, its unread prompt tokens)}, `InFlight`) of steps not read yet
        self.in_flight = deque()

    @property
    def busy(self):
        return bool(self.waiting or self.prefilling or self.running)

    def add(self, prompt, max_new_tokens, sampling=None, stop=(), encoding=None, index=0,
            grammar=None):
        """Queues a prompt (token ids) and returns its `Sequence`, which steps extend. sampling:
        default the Decoder's. index: an argument of the noise. stop, encoding, grammar: as in
        `generate`."""
        decoder = self.decoder
        check_prompt(decoder.model, prompt, index)
        sequence = Sequence(index, prompt, max_new_tokens, decoder.model.config.block_size, stop,
                            encoding, sampling or decoder.sampling, grammar)
        length = len(prompt) + sequence.limit
        expect(length <= decoder.capacity, f"a sequence of {length} tokens does not fit an engine "
               f"with a capacity of {decoder.capacity}; make a larger one")
        self.waiting.append(sequence)
        return sequence

    def step(self, with_trees=False):
        """Admits prompts, runs one step of the running sequences and returns its `StepResult`s; on
        a GPU those of the previous step, which the host reads while this one runs. A sequence whose
        step only read its prompt has none."""
        decoder = self.decoder
        results = []
        with decoder.context():
            self.admit()
            masked = any(sequence.matcher for sequence in self.running.values())
            while masked and self.in_flight:  # its matchers need the tokens of the last step
                results += self.retire()
            if self.running:
                self.launch(with_trees)
        ahead = 0 if masked else decoder.steps_ahead
        if self.in_flight and not (self.running and len(self.in_flight) <= ahead):
            results += self.retire()
        return results

    def launch(self, with_trees):
        """Starts a step of the running sequences."""
        decoder = self.decoder
        slots = decoder.run_slots(self.running)
        running = self.running.values()
        constraints = self.constraints(slots)
        if constraints or decoder.constraints:
            decoder.constrain(constraints)
        unread = [s.unread for s in running]
        chains = [len(x.forced) for x in constraints if x.matcher]
        option = self.policy.select(len(slots), decoder.behind, unread, chains)
        decoder.sampling_mode = max(s.sampling.mode for s in running)
        sequences = {row: (slot, self.running[slot], self.running[slot].unread)
                     for row, slot in enumerate(slots) if slot in self.running}
        self.in_flight.append((sequences, decoder.launch(*option, with_trees)))
        for sequence in running:
            sequence.unread -= min(sequence.unread, option[0] or 0)

    def constraints(self, slots):
        """The `Constraint` of each slot; [] if no sequence has a grammar."""
        if not any(sequence.matcher for sequence in self.running.values()):
            return []
        constraints = []
        schema = self.policy.schema and self.policy.tree_size != 1
        for sequence in map(self.running.get, slots):
            matcher, unread = (sequence.matcher, sequence.unread) if sequence else (None, 0)
            drafts = matcher and not unread and schema
            constraints.append(Constraint(matcher, unread, matcher.forced() if drafts else ()))
        return constraints

    def admit(self):
        """Moves prompts into free slots. Prefills about PREFILL_CHUNK tokens between two steps."""
        decoder = self.decoder
        budget = PREFILL_CHUNK
        while budget > 0 and (self.prefilling or (self.waiting and self.cached_prefix)):
            if not self.prefilling:
                sequence = self.waiting.popleft()
                slot, start = best_slot(self.cached_prefix, sequence.prompt)
                del self.cached_prefix[slot]
                end = decoder.prefill_end(len(sequence.prompt), start)
                self.prefilling = slot, sequence, start, end
            slot, sequence, start, end = self.prefilling
            stop = min(start + PREFILL_CHUNK, end)
            if start < stop:
                decoder.prefill(slot, sequence.prompt, start, stop)
                budget -= stop - start
            self.prefilling = slot, sequence, stop, end
            if stop == end:
                decoder.begin(slot, sequence, end)
                sequence.unread = len(sequence.prompt) - 1 - end
                self.running[slot] = sequence
                self.prefilling = None

    def retire(self):
        """Reads the oldest step in flight and frees the slots of the sequences that it ends."""
        sequences, in_flight = self.in_flight.popleft()
        step = in_flight.wait()
        results = []
        decoded = []  # results of the sequences that had read their prompts before this step
        for row, (slot, sequence, unread) in sequences.items():
            read = min(unread, step.tree_size)  # known tokens, which the step accepted
            if sequence.ended or read == step.tree_size:
                continue  # it ended while this step was in flight, or only read its prompt
            tokens, path, sources = step.accepted[row]
            if read:
                tokens, path, sources = tokens[read:], path[read:], sources[read:]
            tree = step.trees and step.trees[row]
            if tree and unread:
                tree = Tree(*([value] for value in (0, 0, 0, 1, -1, 1.0)))
            if tree:  # plain decoding's tree is a view of the root, which is the next one by now
                tree.tokens[0] = (sequence.tokens or sequence.prompt)[-1]
            size = 1 if unread else step.tree_size
            result = StepResult(sequence, sequence.take(tokens), path, sources, size, tree)
            results.append(result)
            if not unread:
                decoded.append(result)
            if sequence.ended:
                self.free(slot)
        self.policy.update(step, decoded)
        return results

    def free(self, slot):
        """Frees a slot. Its cache keeps the sequence except for the last token."""
        tokens = ()
        if sequence := self.running.pop(slot, None):
            tokens = [*sequence.prompt, *sequence.tokens]
            tokens = tokens[:len(tokens) - sequence.unread]
        self.cached_prefix[slot] = tokens
        self.decoder.release(slot, max(len(tokens) - 1, 0))

    def cancel(self, sequence):
        """Ends a sequence, waiting or in a slot, between two steps."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if self.prefilling and self.prefilling[1] is sequence:
            self.free(self.prefilling[0])
            self.prefilling = None
        for slot, other in [*self.running.items()]:
            if other is sequence:
                self.free(slot)
        sequence.ended = sequence.ended or "cancelled"

    def generate(self, prompts, max_new_tokens, stop=(), on_step=None, encoding=None,
                 sampling=None, with_trees=False, grammars=None):
        """Adds the prompts, steps until all have ended and returns an `Output`; calls on_step with
        each `StepResult`. sampling, grammars: lists with one for each prompt. Raises InputError as
        `add` does, Interrupted on Ctrl-C."""
        output = Output(batch_size=self.decoder.batch_size)
        started = time.perf_counter()
        try:
            for index, prompt in enumerate(prompts):
                own = sampling[index] if sampling else None
                grammar = grammars[index] if grammars else None
                sequence = self.add(prompt, max_new_tokens, own, stop, encoding, index, grammar)
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
    """The free slot whose cache shares the longest prefix with a prompt (ties: the one free for
    longest), and the index of the first token that must be read."""
    starts = {}
    for slot, tokens in cached_prefix.items():
        same = common_prefix(tokens, prompt)
        # a heads' row needs the next token to match, too; reading the last row gives their state
        starts[slot] = max(min(same - 1, len(prompt) - 2), 0)
    slot = max(starts, key=starts.get)
    return slot, starts[slot]


def common_prefix(a, b):
    """The length of the longest common prefix of two lists, by bisection: a loop over the tokens
    of 64 slots would take longer than a step."""
    low = 0
    high = min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Sequence:
    """A prompt and the tokens generated after it. ended: None, "stop" (a stop token or text, or the
    grammar's end), "length" (max_new_tokens), "context" (the model's is full), "error" (the grammar
    got too complex, see `error`) or "cancelled". Raises InputError for a bad limit or stop."""

    def __init__(self, index, prompt, max_new_tokens, context, stop, encoding, sampling=None,
                 grammar=None):
        check("max new tokens", max_new_tokens, 1, 2**31, whole=True)
        check("index", index, -2**63, 2**63 - 1, whole=True)
        self.index = index
        self.prompt = list(prompt)
        self.sampling = sampling
        self.unread = 0  # prompt tokens that the steps launched so far leave unread
        self.tokens = []
        self.ended = None
        self.limit = min(max_new_tokens, context - len(prompt))
        self.at_limit = "length" if self.limit == max_new_tokens else "context"
        stop = [stop] if isinstance(stop, (int, str)) else stop
        stop = [s for s in stop if s != ""]
        for s in stop:
            expect(type(s) in (int, str), f"stop must be token ids and strings, not {s!r}")
        texts = [s for s in stop if isinstance(s, str)]
        if texts and not hasattr(encoding, "stream"):
            raise InputError(f"stop text {texts[0]!r} needs a tokenizer; give encoding=, from "
                             "hf.tokenizer.load_encoding")
        self.stop_tokens = set(stop).difference(texts)
        self.grammar = grammar
        self.matcher = None
        if grammar:
            self.matcher = grammar.start()
            self.stop_tokens |= set(grammar.stop)
        self.stream = encoding.stream(texts) if texts else None

    @property
    def error(self):
        return self.matcher.error if self.matcher else ""

    def take(self, tokens):
        """Appends a step's tokens, up to the end of the sequence; returns those appended."""
        left = self.limit - len(self.tokens)
        new = tokens if len(tokens) <= left else tokens[:left]  # no copy: see `to_lists`
        if self.matcher:
            new = new[:self.matcher.take(new)]
        if self.stream or not self.stop_tokens.isdisjoint(new):
            new = self.until_stop(new)
        self.tokens += new
        if self.matcher and not self.ended:
            self.ended = self.matcher.ended
        if not self.ended and len(self.tokens) == self.limit:
            self.ended = self.at_limit
        return new

    def until_stop(self, tokens):
        """The tokens up to the first that ends the sequence."""
        for number, token in enumerate(tokens, start=1):
            if self.stream:
                self.stream.feed([token])
            if token in self.stop_tokens or (self.stream and self.stream.stopped):
                self.ended = "stop"
                return tokens[:number]
        return tokens


class StepResult(NamedTuple):
    """The result of a step for one sequence."""
    sequence: Sequence
    tokens: list       # new tokens, already appended to sequence.tokens
    path: list         # accepted nodes, root first; path[i + 1] guessed tokens[i]
    sources: list      # of these nodes, as in `best_tree`
    tree_size: int     # T
    tree: Tree = None  # as lists, if `step` was called with trees

    @property
    def drafters(self):
        """The drafter of each guessed token; the token after them is the model's own."""
        guessed = self.sources[1:len(self.tokens) + 1]  # a sequence may end inside the path
        return [drafter(source, depth) for depth, source in enumerate(guessed, start=1)]


def drafter(source, depth):
    """The drafter of a node with this source (see `best_tree`) and depth."""
    if source == BINS + SCHEMA:
        return "schema"
    return "lookup" if source >= BINS else f"head {depth}"


@dataclass
class Output:
    """Generated sequences and statistics."""
    sequences: list = field(default_factory=list)  # a `Sequence` for each prompt, in order
    batch_steps: int = 0  # steps of the whole batch
    seconds: float = 0.0  # wall time, prefill included
    batch_size: int = 1   # B
    shapes: Counter = field(default_factory=Counter)   # (T, emitted tokens) -> verify steps
    guesses: Counter = field(default_factory=Counter)  # (depth, source) -> accepted guesses

    def count(self, result):
        """Counts a `StepResult`."""
        _, tokens, _, sources, tree_size, _ = result
        self.shapes[tree_size, len(tokens)] += 1
        if guessed := sources[1:len(tokens) + 1]:  # a sequence may end inside the path
            self.guesses.update(enumerate(guessed, start=1))

    @property
    def steps(self):
        """Verify steps, summed over the sequences."""
        return self.shapes.total()

    @property
    def step_lengths(self):
        """n -> steps that emitted n tokens."""
        lengths = Counter()
        for (_, emitted), steps in self.shapes.items():
            lengths[emitted] += steps
        return lengths

    @property
    def sizes(self):
        """T -> [steps, tokens]."""
        sizes = {}
        for (T, emitted), steps in self.shapes.items():
            so_far = sizes.get(T, (0, 0))
            sizes[T] = [so_far[0] + steps, so_far[1] + steps * emitted]
        return sizes

    @property
    def accepted(self):
        """Drafter -> accepted guesses."""
        accepted = Counter()
        for (depth, source), number in self.guesses.items():
            accepted[drafter(source, depth)] += number
        return accepted

    @property
    def tree_size(self):
        """Mean T over the steps."""
        return sum(T * steps for T, (steps, _) in self.sizes.items()) / max(self.steps, 1)

    @property
    def tokens(self):
        """The new tokens of each prompt."""
        return [sequence.tokens for sequence in self.sequences]

    @property
    def ended(self):
        """Why each sequence ended, see `Sequence`; None if it was interrupted."""
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
    """Ctrl-C while decoding; `output` is the `Output` so far."""

    def __init__(self, output):
        self.output = output


def check_prompt(model, prompt, index=0):
    V, longest = model.config.vocab_size, model.config.block_size - 1
    if not isinstance(prompt, (list, tuple)):
        raise InputError(f"prompt {index} must be a list of token ids, not {prompt!r}")
    expect(all(issubclass(kind, Integral) for kind in {*map(type, prompt)}),
           f"prompt {index} must be a list of token ids, not of other values; encode the text")
    expect(1 <= len(prompt) <= longest, f"prompt {index} has {len(prompt)} tokens; give 1 to "
           f"{longest}, since the model's context must hold a new one too")
    expect(min(prompt) >= 0 and max(prompt) < V, f"prompt {index} has token ids outside 0..{V - 1},"
           " the model's vocabulary; remove them or use the model's tokenizer")


# --------------------------------------------------------------------------------------------------
# The call

def generate(model, prompts, max_new_tokens, heads=None, *, lookup=False, temperature=0.0, top_k=0,
             top_p=1.0, min_p=0.0, seed=0, tree_size=None, beams=None, stop=(), batch_size=None,
             on_tokens=None, encoding=None, sampling=None, schema=True, grammar=None):
    """Continues each prompt (a list of token ids) and returns an `Output`. The tokens do not depend
    on heads, lookup, schema, tree_size, beams or batch_size, except for ties in half precision on a
    GPU.

    lookup      also draft by n-gram lookup
    schema      also draft the text that a grammar forces
    grammar     a `hf.grammar.Grammar` that outputs must match; or a list of one per prompt, or None
    tree_size   nodes T verified per step, root included; 1: plain decoding; default: chosen for
                each step to maximise tokens per second, see `Policy`
    beams       W, default 4
    stop        token ids, and strings if there is an `encoding` to decode with, that end a sequence
    batch_size  sequences decoded together, default up to 8; further prompts wait for a free slot
    on_tokens   called as on_tokens(index, tokens) with the new tokens of each step
    sampling    a list of one `Sampling` per prompt, instead of temperature, ..., seed
    Raises InputError for bad input, Interrupted on Ctrl-C."""
    engine = prepare(model, prompts, max_new_tokens, heads, lookup=lookup, tree_size=tree_size,
                     beams=beams, batch_size=batch_size, temperature=temperature, top_k=top_k,
                     top_p=top_p, min_p=min_p, seed=seed, schema=schema and grammar is not None)
    if sampling:
        expect(len(sampling) == len(prompts) and engine.decoder.sampling == Sampling(),
               "sampling takes one for each prompt, in place of temperature, ..., seed")
    on_step = on_tokens and (lambda step: on_tokens(step.sequence.index, step.tokens))
    grammars = grammar if isinstance(grammar, (list, tuple)) else [grammar] * len(prompts)
    expect(len(grammars) == len(prompts), "grammar takes one, or a list of one for each prompt")
    return engine.generate(prompts, max_new_tokens, stop, on_step, encoding, sampling,
                           grammars=grammars)


def prepare(model, prompts, max_new_tokens, heads=None, *, lookup=False, schema=False,
            tree_size=None, beams=None, batch_size=None, graph=True, **sampling):
    """The Engine that `generate` runs with these arguments. graph: on CUDA, capture the step of
    each tree size in a CUDA graph."""
    sampling = Sampling(**sampling)
    expect(prompts, "there is no prompt; give at least one")
    for index, prompt in enumerate(prompts):
        check_prompt(model, prompt, index)
    check("max new tokens", max_new_tokens, 1, 2**31, whole=True)
    capacity = max(min(len(prompt) + max_new_tokens, model.config.block_size) for prompt in prompts)
    batch_size = min(len(prompts), DEFAULT_BATCH if batch_size is None else batch_size)
    policy = Policy(model, heads, lookup, tree_size, schema)
    return Engine(model, policy=policy, batch_size=batch_size, capacity=capacity, beams=beams,
                  sampling=sampling, graph=graph)


if __name__ == "__main__":
    from tools.run import main  # imports this file as a module: `__main__` has other classes
    main(args)
