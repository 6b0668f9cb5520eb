"""Decoding: the stages of a step, the engine that schedules prompts, and `generate()`.

    python generate.py --prompt "def fibonacci(n):"
    python generate.py --model FOLDER --chat      a conversation, if the folder has a chat template

A step (`Decoder.step`) drafts a tree of guesses, runs the model on all of them in one forward pass,
and keeps the path that the model would have written itself:

    slot     a row of the KV cache, where a sequence runs; its first `lengths` tokens are committed
    root     the sequence's newest token, not yet in the cache; node 0 of its tree
    tree     nodes, each a guess of the token after its parent (clover.py). Its drafters are draft
             heads, n-gram lookup and the text that a grammar forces
    chance   that a node is accepted, by its source: a bin of heads' probability, or lookup's match
    target   the model's own next token at a node
    path     the accepted nodes: the root, then whichever child is its parent's target. All of their
             targets are new tokens; the last one is the next root
    state    what heads draft from: what their `augment` makes of the last committed token's hidden
             state
    plan     the shape of a step, which a policy selects (see `Fixed`)

Only targets are kept, and a target depends on the text before it, the sequence's index and the seed
alone. So the output is that of plain decoding, the same step with one-node trees; up to rounding,
where the order of a kernel's sums depends on the number of nodes. On CUDA a step is captured in a
CUDA graph and replayed, and the host reads its tokens while the next one runs. A backend overrides
stages of the `Decoder`; another engine may put work of its own between them (engine/).

Letters: B sequences, T tree nodes, K draft heads, P nodes of an accepted path, n tokens proposed by
lookup, W beams, C hidden size, V vocabulary."""

if __name__ == "__main__":  # before importing torch, so that a mistyped flag fails at once
    from tools.flags import parse_generate
    args = parse_generate()

import time
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from numbers import Integral
from typing import NamedTuple

import torch
import torch.nn.functional as F

from clover import (
    BINS,
    DEFAULT_BEAMS,
    MAX_BEAMS,
    SOURCES,
    Tree,
    build_tree,
    extend_candidates,
    is_allowed,
    root_tree,
)
from kernels import HAS_TRITON, commit_path
from model import GPT, MAX_TREE, KVCache, check, expect

DEFAULT_BATCH = 8    # sequences
DEFAULT_TREE = 8     # T, where nothing chooses it
MAX_CHAIN = 15       # most tokens that lookup or a guide proposes
# sampling modes, cheapest first; a batch runs in its costliest
GREEDY, NOISE, FILTERED = range(3)


@dataclass
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
        self.top_k = max(self.top_k, 0)
        if self.temperature < 1e-6 or self.top_p == 0:
            self.temperature = 0.0
            self.top_p = 1.0

    @property
    def mode(self):
        """The cheapest sampling mode for these parameters."""
        if self.temperature == 0:
            return GREEDY
        is_filtered = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return FILTERED if is_filtered else NOISE


# --------------------------------------------------------------------------------------------------
# Lookup and acceptance

class Accepted(NamedTuple):
    """The accepted paths of B trees, of at most P nodes; shorter ones are padded by the root."""
    tokens: torch.Tensor   # int64 [B, P]: the path's targets; the last one is the next root
    path: torch.Tensor     # int64 [B, P]: the accepted nodes, root first
    sources: torch.Tensor  # int64 [B, P]: of these nodes, as in `Tree`
    count: torch.Tensor    # int64 [B]: the number of accepted nodes; 0 for an idle slot

    def to_lists(self):
        """(tokens, path, sources) of each sequence, up to its count."""
        counts = self.count.tolist()
        columns = (x[:, :max(counts)].tolist() for x in self[:3])
        return [(tokens[:n], path[:n], sources[:n])
                for tokens, path, sources, n in zip(*columns, counts)]


def ngram_lookup(history, lengths, n, slots=None):
    """n tokens proposed by n-gram lookup (prompt lookup decoding): those that followed the latest
    earlier occurrence of the longest suffix, 4 tokens down to 1 -> int64 [B, 1 + n]: the length of
    the match, then the tokens; 0 and -1 if there is none. At the text's end the chain repeats the
    tokens after the match. history: int32 [slots, S]. lengths: int32 [slots], index of the newest
    token. slots: int64 [B]; None: all."""
    if slots is not None:
        history, lengths = history[slots], lengths[slots]
    S = history.shape[1]
    last = lengths[:, None].long()
    index = torch.arange(S, device=history.device)
    suffix = history.gather(1, (last - index[:4]).clamp(min=0))  # from the newest token back
    padded = F.pad(history, (3, 0), value=-1)
    matches = index < last  # whether the suffix's first tokens match up to here
    size = 0                # how many of them do
    for i in range(suffix.shape[1]):
        matches = matches & (padded[:, 3 - i:3 - i + S] == suffix[:, i:i + 1])
        size = size + matches
    best = (size * S + index).amax(1, keepdim=True)  # of the longest, the latest
    size, end = best // S, best % S
    source = end + 1 + torch.arange(n, device=history.device) % (last - end).clamp(min=1)
    tokens = history.gather(1, source.clamp(max=S - 1)).long()
    return torch.cat((size, tokens.where(size > 0, -1)), dim=1)


def accept_path(tree, target, active, max_path, slots=None):
    """Accepts the root, and each node whose parent is accepted and has its token as target.
    Children of one parent have different tokens, so the accepted nodes are a path -> `Accepted`, at
    most P = max_path nodes. target: the model's own next token at each node. active: int32 [slots],
    0 for idle ones, which accept nothing. slots: as in `ngram_lookup`."""
    active = active if slots is None else active[slots]
    B, T = target.shape
    node = torch.arange(T, device=target.device)
    wrong = (tree.depths > 0) & (tree.tokens != target.gather(1, tree.parents))
    wrong = (wrong * (1 << node)).sum(1, keepdim=True)  # a bitmask
    on_path = (tree.ancestors != 0) & (tree.ancestors & wrong == 0) & (tree.depths < max_path)
    # the path's node of each depth, the root beyond its end
    path = target.new_zeros(B, max_path + 1)
    path = path.scatter(1, tree.depths.where(on_path, max_path), node.expand(B, T))[:, :max_path]
    count = on_path.sum(1) * (active != 0)
    return Accepted(target.gather(1, path), path, tree.sources.gather(1, path), count)


def advance(accepted, lengths, root, history=None, states=None, state=None, slots=None):
    """Appends the tokens of accepted paths to their sequences, in place. lengths: int32 [slots],
    index of the root. root: int64 [slots], the newest token. history: int32 [slots, S]. states
    [B, P, C] of the path's nodes: the last one's becomes state [slots, C]. A path of no tokens
    changes nothing."""
    tokens, _, _, count = accepted
    if slots is None:
        slots = torch.arange(len(count), device=count.device)
    count = count[:, None]
    last = (count - 1).clamp(min=0)
    if history is not None:
        # beyond the path: its last token again, so that a graph has a fixed number of writes
        step = torch.arange(tokens.shape[1], device=tokens.device).minimum(last)
        rows, columns = slots[:, None], lengths[slots][:, None] + 1 + step
        values = tokens.gather(1, step).to(history.dtype)
        history[rows, columns] = values.where(count > 0, history[rows, columns])
    if states is not None:
        newest = states.gather(1, last[:, :, None].expand(-1, -1, states.shape[2]))[:, 0]
        state[slots] = newest.where(count > 0, state[slots])
    root[slots] = tokens.gather(1, last)[:, 0].where(count[:, 0] > 0, root[slots])
    lengths.index_add_(0, slots, count[:, 0].to(lengths.dtype))


class StepResult(NamedTuple):
    """The result of a step for one sequence."""
    sequence: "Sequence"
    tokens: list       # new tokens, already appended to sequence.tokens
    path: list         # accepted nodes, root first; path[i + 1] guessed tokens[i]
    sources: list      # of these nodes, as in `Tree`
    tree_size: int     # T
    tree: Tree = None  # as lists, if `step` was called with trees
    logprobs: list = None  # of the new tokens, if requested: see engine/logprobs.py


# --------------------------------------------------------------------------------------------------
# How many nodes a step verifies

CHAIN_CHANCES = 0, 0.2, 1 / 3, 3 / 7, 0.5, 0.9  # of lookup by match length, and of a guide's text


class Fixed:
    """A policy: verifies T = tree_size nodes in every step, drafted by all heads.

    A policy names the drafters and `select`s the size of each step. `chances`, float32 [2,
    SOURCES], are the acceptance probabilities of nodes for greedy and sampled sequences, by their
    source (see `Tree`). Steps may add to `counts`, float64 [2, SOURCES, 2], how many nodes of each
    source were accepted and proposed. Captured steps hold the addresses of both."""

    def __init__(self, model, heads=None, lookup=False, tree_size=None):
        tree_size = DEFAULT_TREE if tree_size is None else tree_size
        check("tree size", tree_size, 1, MAX_TREE, whole=True)
        self.tree_size = self.largest = tree_size if heads or lookup else 1
        self.heads = heads if self.tree_size > 1 else None
        self.lookup = lookup and self.tree_size > 1
        self.depth = heads.n_draft if self.heads else 0
        self.chances = prior_chances().to(model.device)
        self.counts = torch.zeros(2, SOURCES, 2, dtype=torch.float64, device=model.device)

    def select(self, B, **details):
        """(T, `Plan.depths`) of a step of B sequences. details: what engine/ knows beside B."""
        return self.tree_size, min(self.depth, self.tree_size - 1)

    def count(self, draft, accepted, active):
        """Adds to `counts` within a step, from a `Draft` and its `Accepted`."""

    def learn(self, step, results):
        """Learns from a finished `Step` and its `StepResult`s."""


def prior_chances():
    """Acceptance probabilities before anything is known, float32 [2, SOURCES]: of heads, their own
    probability; of lookup by match length 0 to 4, and of guides."""
    heads = torch.exp(-(torch.arange(BINS) + 0.5) / 4)
    return torch.cat((heads, torch.tensor(CHAIN_CHANCES))).expand(2, -1).contiguous()


# --------------------------------------------------------------------------------------------------
# The state of the sequences

class Batch(NamedTuple):
    """What a step reads of its B sequences: copies, or if these are all slots, the tensors of
    `Slots` themselves, which `commit` changes."""
    slots: torch.Tensor | None  # int64 [B]; None: all
    lengths: torch.Tensor       # int32 [B]: committed rows, which is also the root's index
    root: torch.Tensor          # int64 [B]: the newest token, not yet in the cache
    sequence: torch.Tensor      # int64 [B]: the sequence's index, an argument of its noise
    sampling: dict              # {field of `Sampling`: float32 or int64 [B]}


INTEGER_FIELDS = "root", "sequence", "seed", "top_k"
FLOAT_FIELDS = "temperature", "top_p", "min_p"


class Slots:
    """The state of all sequences, one per slot, of up to `capacity` tokens, with room for the step
    that a GPU may have begun when one ends. Captured steps hold the addresses of these tensors."""

    def __init__(self, model, heads, batch_size, capacity, max_tree, max_path):
        zeros = partial(torch.zeros, device=model.device)
        model.reserve(capacity + 2 * max_path + max_tree)
        self.cache = model.new_cache(batch_size, capacity + max_path + max_tree, nodes=max_tree)
        heads_kv = self.cache.kv[:0]
        if heads:  # they write drafts or paths, which on a CPU have up to MAX_CHAIN + 1 rows
            rows = capacity + max_path + max(max_path, MAX_CHAIN + 1, heads.draft_rows)
            heads_kv = heads.new_cache(batch_size, rows).kv
        self.heads_cache = KVCache(heads_kv, self.cache.lengths)
        self.integers = zeros(len(INTEGER_FIELDS), batch_size, dtype=torch.int64)
        self.floats = zeros(len(FLOAT_FIELDS), batch_size)
        self.state = zeros(batch_size, model.config.n_embd, dtype=model.dtype)  # the heads' input
        self.history = zeros(batch_size, capacity + 2 * max_path + 1, dtype=torch.int32)  # tokens
        self.active = zeros(batch_size, dtype=torch.int32)  # 0: idle
        self.all = self.make_batch(None, self.cache.lengths, self.integers, self.floats)

    def make_batch(self, slots, lengths, integers, floats):
        fields = dict(zip((*INTEGER_FIELDS, *FLOAT_FIELDS), (*integers, *floats)))
        return Batch(slots, lengths, fields.pop("root"), fields.pop("sequence"), fields)

    def set(self, slot, **values):
        """Sets numbers of a slot, by name: active, INTEGER_FIELDS, FLOAT_FIELDS, and length."""
        tensors = self.all._asdict() | self.all.sampling | dict(
            length=self.cache.lengths, active=self.active)
        for name, value in values.items():
            set_number(tensors[name], slot, value)


def set_number(x, slot, value):
    """x[slot] = value, for which the host does not wait."""
    x[slot:slot + 1].copy_(pinned([value], x.device, x.dtype), non_blocking=True)


def pinned(values, device, dtype=torch.int64):
    """A tensor on the host, which can be copied to a GPU without waiting."""
    x = torch.tensor(values, dtype=dtype)
    return x.pin_memory() if device.type == "cuda" else x


# --------------------------------------------------------------------------------------------------
# One step

class Plan(NamedTuple):
    """The shape of a step. A CUDA graph is captured for each."""
    B: int                 # rows
    tree_size: int | None  # T; None: the step chooses it (backends/cpu.c)
    depths: int            # heads that draft: 0, or min(K, T - 1)
    mode: int              # the costliest sampling mode of the rows


class Draft(NamedTuple):
    """What `draft` hands to the other stages, in plain decoding only the roots."""
    batch: Batch
    tree: Tree
    positions: torch.Tensor     # int64 [B, T]
    chain: torch.Tensor | None  # from `ngram_lookup`, or a guide's; counted in `accept`


@dataclass
class Step:
    """A step that has been started. Its tensors are on the host, and filled when it ends."""
    plan: Plan
    accepted: Accepted
    tree: Tree | None       # if requested
    tree_size: int          # T
    done: object = None     # an event on CUDA
    sequences: dict = field(default_factory=dict)  # row -> the `Sequence` whose tokens it gives

    def wait(self):
        if self.done is not None:
            self.done.synchronize()


def decoder_class(model, heads):
    """The `Decoder` class that runs these heads: the one that a model's backend names for them."""
    return model.decoder.for_heads(heads) if model.decoder else Decoder


class Decoder:
    """Decodes up to batch_size sequences step by step, one in each slot. A step runs all slots.

    policy: names the drafters, see `Fixed`. Its heads read every accepted token, even in steps for
    which they draft nothing. capacity: most tokens of a sequence, prompt included; default: the
    model's context. sampling: for sequences without their own. beams: as in `generate`. graph: on
    CUDA, capture the step of each plan. Raises InputError for sizes out of range."""
    tree_sizes = 2, 3, 4, 6, 8, 12, 16  # from which an adaptive policy selects T, besides 1
    chooses_size = False  # whether `draft` chooses one, if the plan's is None
    read_sizes = ()       # T of steps that read prompts, too; (): none do
    captured_modes = GREEDY, NOISE  # `filter_logits` reads values
    # functions that a backend replaces
    extend_candidates = staticmethod(extend_candidates)
    ngram_lookup = staticmethod(ngram_lookup)
    advance = staticmethod(advance)

    @torch.inference_mode()
    def __init__(self, model, *, policy, batch_size=1, capacity=None, beams=None, sampling=None,
                 graph=True):
        check("batch size", batch_size, 1, 2**16, whole=True)
        heads = policy.heads
        max_beams = heads.max_beams if heads else MAX_BEAMS
        self.beams = min(DEFAULT_BEAMS, max_beams) if beams is None else beams
        check("beams", self.beams, 1, max_beams, whole=True)
        self.model = model
        self.head = model.head  # each attribute lookup in a module takes 5 us of a step
        self.device = model.device
        self.heads = heads
        self.hidden_layers = heads.hidden_layers if heads else ()
        self.policy = policy
        self.batch_size = batch_size
        self.sampling = sampling or Sampling()
        self.capacity = model.config.block_size if capacity is None else capacity
        check("capacity", self.capacity, 1, model.config.block_size, whole=True)
        self.context = model.blocks.decoding_context
        self.inference_mode = torch.inference_mode()  # creating one takes as long as a stage
        self.max_tree = max(policy.largest, *self.read_sizes, 1)  # nodes of a step
        P = self.path_limit(self.max_tree)
        # captured graphs hold addresses: these tensors are allocated once and changed in place
        self.offsets = torch.arange(P, device=model.device)
        self.path_ancestors = (2 << self.offsets) - 1  # a path has no branches: j sees nodes 0..j
        self.slots = Slots(model, heads, batch_size, self.capacity, self.max_tree, P)
        for slot in range(batch_size):
            self.slots.set(slot, **vars(self.sampling))
        self.root_columns = root_tree(self.slots.all.root)[1:]  # of plain decoding's trees
        self.graphs = {}    # (part, plan) of those that have run -> what replays it, or None
        self.eager = set()  # plans for whose graphs memory is short
        self.n_slow = 0     # runs so far that compiled or captured
        self.pool = None    # memory shared by the graphs; None: steps run eagerly
        if self.device.type == "cuda" and graph and HAS_TRITON:  # references read values
            self.pool = torch.cuda.graph_pool_handle()

    def path_limit(self, tree_size):
        """P: a path ends with the heads' last depth or with lookup's chain."""
        return min(tree_size, 1 + max(self.policy.depth, MAX_CHAIN))

    # Fixed shapes, state changed in place; only FILTERED sampling waits for the device

    def step(self, plan):
        """Runs a step -> (`Accepted`, `Tree`, the final norm's output at each node [B, T, C])."""
        draft = self.draft(plan)
        normed, hidden = self.verify(plan, draft)
        return self.finish(plan, draft, normed, hidden), draft.tree, normed

    def finish(self, plan, draft, normed, hidden, masks=None):
        target = self.sample(plan, draft, normed, masks)  # [B, T]: the model's own next tokens
        accepted = self.accept(plan, draft, target)       # tokens, path [B, P], count [B]
        self.commit(plan, draft, hidden, accepted)
        return accepted

    def run(self, part, plan, *inputs):
        """Runs `step`, or a part of it. With graphs, its first run with a plan compiles its
        kernels, the second captures it, and later ones replay the graph, which reads what the
        graphs of earlier parts left in memory in place of `inputs`."""
        key = part.__name__, plan
        if replay := self.graphs.get(key):
            return replay()
        captures = self.pool is not None and plan.mode in self.captured_modes
        captures = captures and plan not in self.eager
        has_run = key in self.graphs
        self.graphs[key] = None
        self.n_slow += captures or not has_run
        if has_run and captures:
            try:
                self.graphs[key] = capture(partial(part, plan, *inputs), self.device, self.pool)
                return self.graphs[key]()
            except torch.OutOfMemoryError:
                self.eager.add(plan)
        return part(plan, *inputs)

    def draft(self, plan, masks=None, forced=None):
        """Proposes nodes and builds the tree of the likeliest -> `Draft`. For a grammar, masks: the
        tokens that may follow the roots, as in `is_allowed`; forced: int64 [B, 1 + n], SCHEMA, the
        text that must follow, then -1; or a 0 in front, where none must."""
        T = plan.tree_size
        batch = self.batch(plan.B)
        if T == 1:
            tokens = batch.root[:, None].clone()  # `commit` changes the root
            tree = Tree(tokens, *(x[:plan.B] for x in self.root_columns))
            return Draft(batch, tree, batch.lengths[:, None] + tree.depths, None)
        candidates = None
        if plan.depths:
            noise = (batch.sampling["temperature"], batch.sampling["seed"], batch.sequence,
                     batch.lengths) if plan.mode != GREEDY else None
            state = self.slots.state if batch.slots is None else self.slots.state[batch.slots]
            candidates = self.heads.draft(state, batch.root, plan.depths, self.beams, noise, masks,
                                          self.extend_candidates,
                                          replace(self.slots.heads_cache, slots=batch.slots))
        chain = self.chain(batch, T, masks, forced)
        tree = self.build_tree(batch, candidates, chain, T)
        return Draft(batch, tree, batch.lengths[:, None] + tree.depths, chain)

    def batch(self, B):
        """The `Batch` of a step of B rows: all slots."""
        return self.slots.all

    def chain(self, batch, tree_size, masks, forced):
        """A chain for each sequence, as from `ngram_lookup`, or None: the forced text, else what
        lookup proposes if the masks allow its first token."""
        chain = None
        if self.policy.lookup:
            chain = self.ngram_lookup(self.slots.history, self.slots.cache.lengths,
                                      min(tree_size - 1, MAX_CHAIN), batch.slots)
        if forced is None:
            return chain
        forced = forced[:, :tree_size]
        if chain is not None:
            forced = torch.where(forced[:, :1] > 0, forced, chain)
        allowed = is_allowed(masks, forced[:, 1:2])
        return torch.cat((forced[:, :1] * allowed, forced[:, 1:]), dim=1)

    def build_tree(self, batch, candidates, chain, tree_size):
        return build_tree(batch.root, candidates, chain, self.policy.chances,
                          batch.sampling["temperature"], tree_size)

    def verify(self, plan, draft):
        """Runs the model on the tree -> the final norm's output [B, T, C], and the states that the
        heads read [B, T, ...]. Keys and values of node j go to cache row lengths + j."""
        model = self.model
        cache = replace(self.slots.cache, slots=draft.batch.slots)
        hidden = model.embeddings(draft.tree.tokens, draft.positions)
        *last, states = model.blocks(hidden, model.tables, draft.positions, cache,
                                     draft.tree.ancestors, layers=self.hidden_layers)
        normed, hidden = model.norm.add_and_norm(*last)
        return normed, states if self.hidden_layers else hidden

    def sample(self, plan, draft, normed, masks=None):
        """The model's own next token at each node, int64 [B, T]. masks: of the nodes [B T, ...],
        as in `kernels.mask_logits`."""
        batch = draft.batch
        if plan.mode == FILTERED:
            logits = self.head.logits(normed.flatten(0, 1))  # (B T, V)
            tokens = self.head.sample_filtered(
                logits, **batch.sampling, sequence=batch.sequence,
                position=(draft.positions + 1).flatten(), masks=masks)
            return tokens.view_as(draft.positions)
        temperature = 0.0 if plan.mode == GREEDY else batch.sampling["temperature"]
        return self.head.sample(normed, temperature, batch.sampling["seed"], batch.sequence,
                                draft.positions, masks)

    def accept(self, plan, draft, target):
        """The path of nodes that equal their parent's target token, at most P of them."""
        P = self.path_limit(plan.tree_size)
        accepted = accept_path(draft.tree, target, self.slots.active, P, draft.batch.slots)
        self.policy.count(draft, accepted, self.slots.active)
        return accepted

    def commit(self, plan, draft, hidden, accepted):
        """Keeps the path's part of the cache, feeds its tokens to lookup, and to heads with hidden
        [B, T, C], and makes the bonus token the next root. Later cache rows are junk."""
        slots = self.slots
        batch = draft.batch
        states = None
        if slots.cache.states:
            slots.cache.states.commit(accepted.path, accepted.count, batch.slots)
        if self.heads:  # only heads branch; the path of a chain is in place
            if plan.tree_size > 1:
                commit_path(slots.cache.kv, slots.cache.lengths, accepted.path, accepted.count,
                            batch.slots)
                index = accepted.path[:, :, None].expand(-1, -1, hidden.shape[2])
                hidden = hidden.gather(1, index)  # (B, P, C)
            P = accepted.path.shape[1]
            positions = batch.lengths[:, None] + self.offsets[:P]  # (B, P)
            ancestors = self.path_ancestors[:P].expand_as(positions)
            states = self.heads.augment(hidden, accepted.tokens, positions,
                                        replace(slots.heads_cache, slots=batch.slots), ancestors)
        history = slots.history if self.policy.lookup else None
        self.advance(accepted, slots.cache.lengths, slots.all.root, history, states, slots.state,
                     batch.slots)

    # On the host

    def place(self, running):
        """The slot of each row of the next step. running: the sequences, by slot."""
        return range(self.batch_size)

    def launch(self, plan, with_trees=False, run=None):
        """Starts a step and returns it as a `Step`. run: runs the plan in place of `step`."""
        with self.inference_mode:
            accepted, tree, _ = run(plan) if run else self.run(self.step, plan)
            tree_size = tree.tokens.shape[1]
            accepted = self.to_host(accepted)
            tree = Tree(*map(to_host, tree)) if with_trees else None
        done = None
        if self.device.type == "cuda":
            done = torch.cuda.Event(enable_timing=True)
            done.record(torch.cuda.current_stream(self.device))
        return Step(plan, accepted, tree, tree_size, done)

    def to_host(self, accepted):
        """A copy of an `Accepted` on the host, filled when the step ends."""
        return Accepted(*map(to_host, accepted))

    @torch.inference_mode()
    def prefill(self, slot, prompt, start, end):
        """Reads the prompt's tokens start, ..., end - 1 into a slot. Steps between two calls write
        their trees where the next call will write."""
        tokens = pinned([prompt[start:end + 1]], self.device).to(self.device, non_blocking=True)
        cache = self.slots.cache.one(slot)
        hidden = self.model.prefill(tokens[:, :-1], cache, start, self.hidden_layers)
        if self.heads:
            self.read_prompt(slot, hidden, tokens[:, 1:], start)

    def read_prompt(self, slot, hidden, tokens, start):
        """Lets the heads read hidden states of a prompt [1, T, C]. tokens: those that follow."""
        states = self.heads.augment(hidden, tokens, cache=self.slots.heads_cache.one(slot),
                                    start=start)
        if states is not None:
            self.slots.state[slot:slot + 1] = states[:, -1]

    @torch.inference_mode()
    def begin(self, slot, sequence, start):
        """Makes a slot run a sequence. The slot's cache holds the first `start` prompt tokens."""
        sequence.slot = slot
        prompt = sequence.prompt
        tokens = pinned(prompt, self.device, torch.int32)
        self.slots.history[slot, :len(prompt)].copy_(tokens, non_blocking=True)
        if start == 0:  # no token before it gives a state
            self.slots.state[slot].zero_()
            if self.slots.cache.states:
                self.slots.cache.states.one(slot).clear()
        self.slots.set(slot, root=prompt[start], sequence=sequence.index, length=start,
                       active=sequence.activity, **vars(sequence.sampling))

    @torch.inference_mode()
    def release(self, slot, rows=0):
        """Makes a slot idle. Steps may still compute it and write their trees after the first
        `rows` rows of its cache."""
        self.slots.set(slot, active=0, length=rows)


def to_host(x):
    return x.to("cpu", non_blocking=True, copy=True)  # the next step overwrites x


def capture(body, device, pool=None):
    """Captures body(), which has run before, in a CUDA graph -> a function that replays it and
    returns its result. What body() reads or writes must live as long as the graph. Graphs of one
    pool share memory: copy a result before a graph runs that was captured earlier."""
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
# Sequences

class Sequence:
    """A prompt and the tokens generated after it. ended: None, "stop" (a stop token or text),
    "length" (max_new_tokens), "context" (the model's is full), "error" or "cancelled". Raises
    InputError for a bad prompt, limit or stop."""
    activity = 1  # `Slots.active`
    error = ""    # why it ended with an error

    def __init__(self, config, prompt, max_new_tokens, sampling, stop=(), index=0, encoding=None,
                 grammar=None):
        prompt = as_list(prompt)
        stop = as_list(stop)
        self.stop_tokens = {*stop} if isinstance(stop, (list, tuple, set)) else {stop}
        expect(grammar is None and all(isinstance(x, Integral) for x in self.stop_tokens),
               "stop texts and grammars need the folder engine/; copy it beside generate.py")
        check_prompt(config, prompt, index)
        check("max new tokens", max_new_tokens, 1, 2**31, whole=True)
        check("index", index, -2**63, 2**63 - 1, whole=True)
        self.index = index
        self.prompt = list(prompt)
        self.sampling = sampling
        self.slot = None  # where it runs
        self.tokens = []
        self.ended = None
        self.limit = min(max_new_tokens, config.block_size - len(prompt))
        self.at_limit = "length" if self.limit == max_new_tokens else "context"

    def take(self, tokens):
        """Appends a step's tokens, up to the end of the sequence; returns those appended."""
        new = tokens[:self.limit - len(self.tokens)]
        if not self.stop_tokens.isdisjoint(new):
            last = next(i for i, token in enumerate(new) if token in self.stop_tokens)
            new = new[:last + 1]
            self.ended = "stop"
        self.tokens += new
        if not self.ended and len(self.tokens) == self.limit:
            self.ended = self.at_limit
        return new


def as_list(values):
    """A tensor or an array as numbers; anything else as it is."""
    return values.tolist() if hasattr(values, "tolist") else values


def check_prompt(config, prompt, index=0):
    V, longest = config.vocab_size, config.block_size - 1
    are_ids = isinstance(prompt, (list, tuple)) and all(isinstance(x, Integral) for x in prompt)
    expect(are_ids, f"prompt {index} must be a list of token ids, not {repr(prompt)[:40]}; encode "
           "the text")
    expect(1 <= len(prompt) <= longest, f"prompt {index} has {len(prompt)} tokens; give 1 to "
           f"{longest}, since the model's context must hold a new one too")
    expect(min(prompt) >= 0 and max(prompt) < V, f"prompt {index} has token ids outside 0..{V - 1},"
           " the model's vocabulary; remove them or use the model's tokenizer")


@dataclass
class Output:
    """Generated sequences."""
    sequences: list = field(default_factory=list)  # a `Sequence` for each prompt, in order
    steps: int = 0        # verify steps, summed over the sequences
    batch_steps: int = 0  # steps of the whole batch
    seconds: float = 0.0  # wall time, prefill included
    batch_size: int = 1   # B

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


# --------------------------------------------------------------------------------------------------
# The engine

class Engine:
    """Schedules prompts, first come, first served: they wait in a queue, are read into free slots
    of a `Decoder`, and run until they end. `add` prompts, then `step` while it is `busy`. policy:
    default a `Fixed` one with these heads. options: the Decoder's."""
    sequence_class = Sequence

    def __init__(self, model, heads=None, *, policy=None, **options):
        self.policy = policy or Fixed(model, heads)
        self.decoder = decoder_class(model, self.policy.heads)(model, policy=self.policy, **options)
        # steps in flight while the host reads an older one
        self.ahead = 1 if model.device.type == "cuda" else 0
        self.clear()

    def clear(self):
        """Drops all sequences."""
        for slot in range(self.decoder.batch_size):
            self.decoder.release(slot)
        self.waiting = deque()
        # free slots -> what their caches hold, for engine/batching.py
        self.idle = dict.fromkeys(range(self.decoder.batch_size), ())
        self.running = {}         # slot -> sequence
        self.in_flight = deque()  # `Step`s that are not read yet

    @property
    def busy(self):
        return bool(self.waiting or self.running)

    def add(self, prompt, max_new_tokens, sampling=None, stop=(), index=0, encoding=None,
            grammar=None):
        """Queues a prompt (token ids) and returns its `Sequence`, which steps extend. sampling:
        default the Decoder's. index: an argument of the noise. stop, encoding, grammar: as in
        `generate`."""
        sequence = self.sequence_class(
            self.decoder.model.config, prompt, max_new_tokens, sampling or self.decoder.sampling,
            stop, index, encoding, grammar)
        self.queue(sequence)
        return sequence

    def queue(self, sequence):
        length = len(sequence.prompt) + sequence.limit
        expect(length <= self.decoder.capacity, f"a sequence of {length} tokens does not fit an "
               f"engine with a capacity of {self.decoder.capacity}; make a larger one")
        self.waiting.append(sequence)

    def step(self, with_trees=False):
        """Admits prompts, runs one step of the running sequences and returns its `StepResult`s; on
        a GPU those of the previous step, which the host reads while this one runs."""
        with self.decoder.context():
            self.admit()
            if self.running:
                self.in_flight.append(self.launch(with_trees))
        keep = self.ahead if self.running else 0
        return self.retire(self.in_flight.popleft()) if len(self.in_flight) > keep else []

    def admit(self):
        """Reads waiting prompts into free slots."""
        while self.waiting and self.idle:
            sequence = self.waiting[0]  # still waits if the next lines raise an error
            slot = next(iter(self.idle))
            last = len(sequence.prompt) - 1  # the root of the first step
            if last:
                self.decoder.prefill(slot, sequence.prompt, 0, last)
            self.decoder.begin(slot, sequence, last)
            del self.idle[slot]
            self.running[slot] = self.waiting.popleft()

    def launch(self, with_trees=False):
        """Starts a step of the running sequences."""
        slots = self.decoder.place(self.running)
        step = self.decoder.launch(self.plan(len(slots)), with_trees)
        step.sequences = {row: self.running[slot] for row, slot in enumerate(slots)
                          if slot in self.running}
        return step

    def plan(self, B, **details):
        """The `Plan` of the next step, of B rows. details: of the policy's `select`."""
        mode = max(sequence.sampling.mode for sequence in self.running.values())
        return Plan(B, *self.policy.select(B, **details), mode)

    def retire(self, step):
        """Reads a step and frees the slots of the sequences that it ends."""
        step.wait()
        paths = step.accepted.to_lists()
        results = []
        for row, sequence in step.sequences.items():
            if sequence.ended:
                continue  # it ended while this step was in flight
            results.append(self.result(step, row, sequence, *paths[row]))
            if sequence.ended:
                self.free(sequence)
        self.policy.learn(step, results)
        return results

    def result(self, step, row, sequence, tokens, path, sources):
        """The `StepResult` of a row."""
        tree = step.tree and Tree(*(column[row].tolist() for column in step.tree))
        return StepResult(sequence, sequence.take(tokens), path, sources, step.tree_size, tree)

    def free(self, sequence):
        """Frees the slot of a sequence."""
        del self.running[sequence.slot]
        self.idle[sequence.slot] = ()
        self.decoder.release(sequence.slot)

    def generate(self, prompts, max_new_tokens, stop=(), on_step=None, encoding=None,
                 sampling=None, with_trees=False, grammars=None, output=None):
        """Adds the prompts, steps until all have ended and returns an `Output`; calls on_step with
        each `StepResult`. sampling, grammars: lists with one for each prompt. output: an empty one
        to fill in, for a caller who wants what there is after Ctrl-C. Raises InputError as `add`
        does."""
        output = Output() if output is None else output
        output.batch_size = self.decoder.batch_size
        started = time.perf_counter()
        sampling = sampling or [None] * len(prompts)
        grammars = grammars or [None] * len(prompts)
        expect(len(sampling) == len(grammars) == len(prompts), "sampling and grammars are lists of "
               f"one for each prompt, here {len(prompts)}")
        try:
            for index, (prompt, own, grammar) in enumerate(zip(prompts, sampling, grammars)):
                output.sequences.append(
                    self.add(prompt, max_new_tokens, own, stop, index, encoding, grammar))
            while self.busy:
                results = self.step(with_trees)
                output.batch_steps += len(results) > 0
                output.steps += len(results)
                for result in results:
                    if on_step:
                        on_step(result)
        finally:
            output.seconds = time.perf_counter() - started
            if self.busy:
                self.clear()
        return output


# --------------------------------------------------------------------------------------------------
# The call

def generate(model, prompts, max_new_tokens, heads=None, *, lookup=False, temperature=0.0, top_k=0,
             top_p=1.0, min_p=0.0, seed=0, tree_size=None, beams=None, stop=(), batch_size=None,
             on_tokens=None, encoding=None, schema=True, grammar=None):
    """Continues each prompt (token ids: a list, 1-D tensor or array) and returns an `Output`.
    Heads, lookup, schema, tree_size, beams and batch_size do not change the tokens; where C kernels
    do not run, rounding can.

    lookup      also draft by n-gram lookup
    schema      also draft the text that a grammar forces
    grammar     a `hf.grammar.Grammar` that outputs must match; or a list of one per prompt, or None
    tree_size   nodes T verified per step, root included; 1: plain decoding; default: chosen for
                each step to maximise tokens per second where engine/ is there, else 8
    beams       W, default 4
    stop        token ids, and strings if there is an `encoding` to decode with, that end a sequence
    batch_size  sequences decoded together, default up to 8; further prompts wait for a free slot
    on_tokens   called as on_tokens(index, tokens) with the new tokens of each step
    Raises InputError for bad input."""
    expect(isinstance(model, GPT), f"model must be a GPT of model.py, not {type(model).__name__}; "
           "docs/copying.md shows how to load the weights of another model into one")
    sampling = Sampling(temperature, top_k, top_p, min_p, seed)
    expect(len(prompts), "there is no prompt; give at least one")
    check("max new tokens", max_new_tokens, 1, 2**31, whole=True)
    # `add` refuses others
    lengths = [len(x) for x in map(as_list, prompts) if isinstance(x, (list, tuple))]
    capacity = min(max(lengths, default=1) + max_new_tokens, model.config.block_size)
    batch_size = min(len(prompts), DEFAULT_BATCH if batch_size is None else batch_size)
    policy, engine = make_policy(model, heads, lookup, tree_size, schema and grammar is not None)
    engine = engine(model, policy=policy, batch_size=batch_size, capacity=capacity, beams=beams,
                    sampling=sampling)
    on_step = on_tokens and (lambda step: on_tokens(step.sequence.index, step.tokens))
    grammars = grammar if isinstance(grammar, (list, tuple)) else [grammar] * len(prompts)
    return engine.generate(prompts, max_new_tokens, stop, on_step, encoding, grammars=grammars)


def make_policy(model, heads, lookup, tree_size, schema):
    """(a policy, the class of an engine): those of engine/ where that folder is beside this file,
    else `Fixed` and `Engine`."""
    if find_spec("engine") is None:
        return Fixed(model, heads, lookup, tree_size), Engine
    from engine.batching import Engine as Batching
    from engine.policy import Policy
    return Policy(model, heads, lookup, tree_size, schema), Batching


if __name__ == "__main__":
    from tools.run import main  # imports this file as a module: `__main__` has other classes
    main(args)
