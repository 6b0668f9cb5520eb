"""The generation loop: `Decoder.step`, the `Engine` that queues prompts, and `generate()`.

    python generate.py --prompt "def fibonacci(n):"
    python generate.py --prompt "import os" --temperature 0.8 --top-p 0.9 --compare
    python generate.py --model FOLDER --chat      a conversation, if the folder has a chat template

The heads, n-gram lookup, or both draft a tree, as a `DraftPlan` says. Plain decoding is the same
loop with trees of one node. The output does not depend on the drafter, so each step may use another
plan. On CUDA each plan's step is captured in a graph once and replayed, and the host reads a step's
tokens while the next step runs.

Letters: B slots, T tree nodes, K draft heads, P nodes of a path, n tokens of lookup's chain, W
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

from clover import MAX_BEAMS, Tree, root_tree
from kernels import HAS_TRITON, commit_path
from model import MAX_TREE, InputError, KVCache, check, expect

PREFILL_CHUNK = 512  # prompt tokens per pass, which bounds its memory, and between two steps
DEFAULT_TREE = 5     # nodes
DEFAULT_BATCH = 8    # sequences
# sampling modes: a later one costs more, and gives a sequence of an earlier one the same tokens
GREEDY, NOISE, FILTERED = range(3)


class DraftPlan(NamedTuple):
    """What a step drafts: nodes guessed by the heads, and tokens of lookup's chain in the same
    tree. With neither it is plain decoding."""
    head_nodes: int = 0
    lookup_tokens: int = 0

    @property
    def tree_size(self):
        return 1 + self.head_nodes + self.lookup_tokens

    def __str__(self):
        names = dict(heads=self.head_nodes, lookup=self.lookup_tokens)
        return " + ".join(f"{name} {n}" for name, n in names.items() if n) or "plain"


@dataclass(frozen=True)
class Sampling:
    """How target tokens are sampled. Temperature 0 is greedy; the defaults keep every token."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self):
        check("temperature", self.temperature, 0, 1e4)
        expect(self.temperature == 0 or self.temperature >= 1e-6, "temperature must be 0, which is "
               f"greedy, or at least 1e-06, not {self.temperature!r}")
        check("top-k", self.top_k, 0, 2**31, whole=True)
        check("top-p", self.top_p, 0, 1, above=True)
        check("min-p", self.min_p, 0, 1)
        check("seed", self.seed, -2**63, 2**63 - 1, whole=True)

    @property
    def mode(self):
        """The cheapest sampling mode for these parameters."""
        filtered = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return GREEDY if self.temperature == 0 else FILTERED if filtered else NOISE


class FixedPolicy:
    """One plan for all steps. Every policy has these three: `plans` to select among, `select` and
    `update`. `tools.policy.AdaptivePolicy` selects among several plans."""

    def __init__(self, plan):
        self.plans = (plan,)

    def select(self, sequences=()):
        """The plan of the next step, in which these sequences run."""
        return self.plans[0]

    def update(self, plan, results, seconds=None):
        """Learns from a step's `StepResult`s and its seconds, or None."""


class Accepted(NamedTuple):
    """What a step accepted of B trees: views of one tensor, `packed`, all that the host copies."""
    packed: torch.Tensor  # int64 [B, 2 P + 2], of `accept_path`
    P: int                # nodes of a path, at most

    @property
    def tokens(self):
        """[B, P]: accepted guesses, then the bonus token, the next root"""
        return self.packed[:, :self.P]

    @property
    def path(self):
        """[B, P]: the accepted nodes, root first"""
        return self.packed[:, self.P:-2]

    @property
    def count(self):
        """[B]: how many nodes were accepted"""
        return self.packed[:, -2]

    @property
    def last(self):
        """[B]: the index of the last"""
        return self.packed[:, -1]

    def to_lists(self):
        """(tokens, path) of each sequence."""
        return [(row[:row[-2]], row[self.P:self.P + row[-2]]) for row in self.packed.tolist()]


# --------------------------------------------------------------------------------------------------
# The decoder

@dataclass
class Slots:
    """The state of B sequences, one per slot."""
    cache: KVCache
    heads_cache: KVCache            # the augmenting block's; it has the same lengths
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

    @torch.inference_mode()
    def swap(self, a, b):
        """Exchanges what two slots hold."""
        n = int(self.cache.lengths[[a, b]].max())
        for cache in self.cache, self.heads_cache:
            cache.kv[:, :, [a, b], :, :n] = cache.kv[:, :, [b, a], :, :n]
        rows = self.cache.lengths, *(getattr(self, name) for name in self.ROWS)
        for x in *rows, *self.sampling.values():
            x[[a, b]] = x[[b, a]]

    def set_sampling(self, samplings):
        """Sets the `Sampling` of each slot."""
        for name, rows in self.sampling.items():
            rows.copy_(send([getattr(s, name) for s in samplings], rows.device, rows.dtype))


def new_slots(model, heads, batch_size, capacity, max_tree, max_path):
    """Empty `Slots` for texts of `capacity` tokens. On a GPU the host learns of a text's end a step
    late, so a text may grow by two paths: the sums below add what its last step writes."""
    zeros = lambda *shape, dtype: torch.zeros(*shape, dtype=dtype, device=model.device)
    cache = model.new_cache(batch_size, capacity + max_path + max_tree)  # a tree after one path
    # heads read paths alone; without any, a cache of no layers
    heads_kv = heads.new_cache(batch_size, capacity + 2 * max_path).kv if heads else cache.kv[:0]
    return Slots(
        cache, KVCache(heads_kv, cache.lengths),
        root=zeros(batch_size, dtype=torch.int64),
        state=zeros(batch_size, model.config.n_embd, dtype=model.dtype),
        history=zeros(batch_size, capacity + 2 * max_path + 1, dtype=torch.int32),  # and the root
        sequence=zeros(batch_size, dtype=torch.int64),
        active=zeros(batch_size, dtype=torch.int32),
        sampling={name: zeros(batch_size, dtype=torch.float32 if kind is float else torch.int64)
                  for name, kind in Sampling.__annotations__.items()})


class Decoder:
    """Decodes B sequences, one in each slot, step by step. heads: they read every accepted token,
    also in steps that do not use them. capacity: most tokens of a sequence, prompt included;
    default: the model's context. plans: those that a step may take. beams, graph: as in `generate`.
    sampling: of sequences without their own. Raises InputError for sizes out of range and caches
    without room in memory."""

    @torch.inference_mode()
    def __init__(self, model, heads=None, *, batch_size=1, capacity=None, plans=(DraftPlan(),),
                 beams=None, sampling=None, graph=True):
        check("batch size", batch_size, 1, 2**16, whole=True)
        if beams is not None:
            check("beams", beams, 1, heads.max_beams if heads else MAX_BEAMS, whole=True)
        self.model = model
        self.blocks = model.blocks  # each look-up in a module takes 5 us of a step
        self.head = model.head
        self.device = model.device
        self.heads = heads
        self.batch_size = batch_size
        self.plans = plans
        self.beams = beams
        self.sampling = sampling or Sampling()
        self.sampling_mode = self.sampling.mode  # of the next step
        self.capacity = model.config.block_size if capacity is None else capacity
        check("capacity", self.capacity, 1, model.config.block_size, whole=True)
        self.context = model.blocks.decoding_context
        self.inference_mode = torch.inference_mode()  # making one takes as long as a step's stage
        P = max(map(self.max_path, plans))
        self.offsets = torch.arange(P, device=model.device)
        self.path_ancestors = (2 << self.offsets) - 1  # a path has no branches: j sees nodes 0..j
        self.looks_up = any(plan.lookup_tokens for plan in plans)
        max_tree = max(plan.tree_size for plan in plans)
        self.buffers = new_slots(model, heads, batch_size, self.capacity, max_tree, P)
        self.buffers.set_sampling([self.sampling] * batch_size)
        # made once and only viewed from here on, as the buffers are: captured graphs hold addresses
        self.root_trees = root_tree(self.buffers.root)
        is_cuda = model.device.type == "cuda"
        self.steps_ahead = 1 if is_cuda else 0  # in flight while the host reads an earlier one
        self.width = 0  # the slots that run are the first `width`
        self.clear()
        # (plan, sampling mode) of the steps so far -> a function that replays the graph, or None
        self.graphs = {}
        self.pool = None  # the memory of all graphs; None: steps run eagerly
        if is_cuda and graph and HAS_TRITON:  # the references read values back
            self.pool = torch.cuda.graph_pool_handle()

    def max_path(self, plan):
        """P: a path ends with the heads' last depth, or with the chain."""
        depth = min(self.heads.config.n_draft, plan.head_nodes) if plan.head_nodes else 0
        return 1 + max(depth, plan.lookup_tokens)

    # One step of all slots. Shapes are fixed, state changes in place, nothing is read back.

    def step(self, plan):
        tree = self.draft(plan)                        # tokens, parents, depths, ancestors [B, T]
        positions = self.blocks.positions(self.slots.cache, tree.depths)  # [B, T]
        normed, hidden = self.verify(tree, positions)  # [B, T, C]; K/V go to rows lengths..
        target = self.sample(normed, positions)        # [B, T]: the model's own next tokens
        accepted = self.accept(plan, tree, target)     # tokens, path [B, P], count [B]
        self.commit(plan, hidden, accepted)
        return accepted, tree

    def draft(self, plan):
        tree = self.plain_tree
        slots = self.slots
        if plan.head_nodes:
            size = plan.head_nodes + 1
            beams = self.beams or self.heads.default_beams(size)
            tree = self.heads.draft(slots.state, slots.root, size, beams)
        if plan.lookup_tokens:
            tree = Tree(*self.blocks.add_lookup(tree, slots.history, slots.cache.lengths,
                                                plan.lookup_tokens))
        return tree

    def verify(self, tree, positions):
        """-> (the final norm of hidden, hidden)"""
        if self.model.config.positions == "learned":
            # nodes past the context's end are never emitted, but have no position of their own
            positions = positions.clamp(max=self.model.config.block_size - 1)
        return self.blocks.norm_and_hidden(self.model, tree.tokens, positions, self.slots.cache,
                                           tree.ancestors)

    def sample(self, normed, positions):
        sampling, sequence = self.slots.sampling, self.slots.sequence
        if self.sampling_mode != FILTERED:
            temperature = 0.0 if self.sampling_mode == GREEDY else sampling["temperature"]
            return self.head.sample(normed, temperature, sampling["seed"], sequence, positions)
        logits = self.head.logits(normed.flatten(0, 1))  # (B * T, V)
        target = self.head.filtered_sample(logits, **sampling, sequence=sequence,
                                           position=(positions + 1).view(-1))
        return target.view_as(positions)

    def accept(self, plan, tree, target):
        P = self.max_path(plan)
        return Accepted(self.blocks.accept_path(*tree, target, self.slots.active, P), P)

    def commit(self, plan, hidden, accepted):
        """Keeps the path's cache rows, lets heads and lookup read its tokens, and makes the bonus
        token the next root. Rows from `count` on are junk, which the next step overwrites."""
        slots = self.slots
        moves = plan.head_nodes > 0  # else the tree is a chain, whose path is its first nodes
        if self.blocks.commit(slots, self.heads, hidden, accepted.packed, moves, self.looks_up):
            return
        lengths = slots.cache.lengths
        if self.heads or self.looks_up:
            positions = lengths[:, None] + self.offsets[:accepted.path.shape[1]]  # (B, P)
        last = accepted.last[:, None]
        if moves:
            commit_path(slots.cache.kv, lengths, accepted.path, accepted.count)
            hidden = hidden.gather(1, accepted.path[:, :, None].expand(-1, -1, hidden.shape[2]))
        if self.heads:
            ancestors = self.path_ancestors[:positions.shape[1]].expand_as(positions)
            states = self.heads.augment(hidden, accepted.tokens, positions, slots.heads_cache,
                                        ancestors)  # (B, P, C)
            last_state = last[:, :, None].expand(-1, 1, states.shape[2])
            torch.gather(states, 1, last_state, out=slots.state[:, None])
        if self.looks_up:
            slots.history[:, 1:].scatter_(1, positions, accepted.tokens.int())
        torch.gather(accepted.tokens, 1, last, out=slots.root[:, None])
        lengths += accepted.count

    # What the host does around steps

    def run(self, plan):
        """Runs one step -> what `step` returns. With graphs the first step of each plan and
        sampling mode runs eagerly, which compiles its kernels, and is then captured; later ones
        replay it."""
        key = plan, self.sampling_mode
        if replay := self.graphs.get(key):
            return replay()
        result = self.step(plan)
        self.graphs[key] = None
        if self.pool is not None:
            self.graphs[key] = capture(partial(self.step, plan), self.model.device, self.pool)
        return result

    def launch(self, plan, with_trees=False):
        """Starts one step -> a function that waits for it and returns [(tokens, path)] of the
        slots, their `Tree`s of lists or None, and the step's own seconds: None for the first step
        of a plan and sampling mode, which compiles and captures it."""
        is_steady = (plan, self.sampling_mode) in self.graphs
        device = self.device
        start = mark(device)
        with self.inference_mode:
            accepted, tree = self.run(plan)
            tensors = accepted.packed, *(tree if with_trees else ())
            if device.type != "cpu":  # before another graph overwrites them
                tensors = [x.to("cpu", non_blocking=True) for x in tensors]
        end = mark(device)

        def wait():
            seconds = seconds_between(start, end)
            packed, *columns = tensors
            trees = list(map(Tree, *(x.tolist() for x in columns))) if with_trees else None
            return Accepted(packed, accepted.P).to_lists(), trees, seconds if is_steady else None
        if device.type == "cpu":  # the step is over, and the next one overwrites its results
            results = wait()
            return lambda: results
        return wait

    def warm_up(self):
        """Compiles and captures every plan, while all slots are idle."""
        for plan in self.plans:
            with self.context():
                self.launch(plan)()

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
        if self.looks_up:
            slots.history[:, start:end + 1] = tokens
        torch.gather(tokens, 1, last - start, out=slots.root[:, None])
        slots.cache.lengths.copy_(last[:, 0])
        if end == longest:
            slots.sequence.copy_(send([s.index for s in sequences], device))
            slots.set_sampling([s.sampling for s in sequences])
            slots.active.fill_(1)  # on a GPU, [:] = 1 would wait for it
        return end

    @torch.inference_mode()
    def clear(self):
        """Makes all slots idle."""
        self.resize(range(self.batch_size))
        self.release(slice(None))

    @torch.inference_mode()
    def release(self, slot, rows=0):
        """Makes a slot idle, or a slice of them. It still runs, since shapes are fixed, and writes
        its trees after these rows of its cache."""
        self.slots.active[slot].zero_()
        self.slots.cache.lengths[slot].fill_(rows)

    def resize(self, busy):
        """Sets how many slots run, and moves these busy ones to the front -> {slot: its new
        number}. On a GPU all run and stay, for a graph holds addresses. On a CPU, where an idle
        slot costs as much as a busy one, up to an eighth of the batch run beside the busy ones: a
        new batch size costs more."""
        n = self.batch_size
        numbers = {slot: slot for slot in range(n)}
        if self.steps_ahead == 0:
            multiple = max(n // 8, 1)
            n = math.ceil(len(busy) / multiple) * multiple
        idle = [slot for slot in range(n) if slot not in busy]
        for a, b in zip([slot for slot in busy if slot >= n], idle):
            self.buffers.swap(a, b)
            numbers |= {a: b, b: a}
        if n != self.width:
            self.width = n
            self.slots = self.buffers.view(0, n)
            self.plain_tree = Tree(*(x[:n] for x in self.root_trees))  # its tokens are the roots
        return numbers


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


def fixed_plan(tree_size, heads, lookup):
    """The `DraftPlan` of T nodes, default DEFAULT_TREE. With both drafters, lookup has half of the
    guesses, and a single guess is the heads'. Without any it is plain. Checks T."""
    tree_size = DEFAULT_TREE if tree_size is None else tree_size
    check("tree size", tree_size, 1, MAX_TREE, whole=True)
    chain = (tree_size - 1) // (2 if heads else 1) if lookup else 0
    return DraftPlan(tree_size - 1 - chain if heads else 0, chain)


# --------------------------------------------------------------------------------------------------
# The engine: continuous batching

class Engine:
    """Schedules prompts: they wait in a queue, are read into free slots of a `Decoder`, and run to
    their end. `add` them, and `step` while it is `busy`. Reusable for any prompts that fit its
    capacity. policy: selects each step's plan, default plain decoding. options: the Decoder's."""

    def __init__(self, model, heads=None, *, policy=FixedPolicy(DraftPlan()), **options):
        self.policy = policy
        heads = heads if any(plan.head_nodes for plan in policy.plans) else None
        self.decoder = Decoder(model, heads, plans=policy.plans, **options)
        self.clear()

    def clear(self):
        """Drops all sequences."""
        self.decoder.clear()
        self.waiting = deque()
        # free slot -> the text that its cache holds
        self.cached_prefix = dict.fromkeys(range(self.decoder.batch_size), ())
        self.prefilling = {}      # slot -> sequence, of the prefill pass that goes on
        self.prefill_start = 0    # its next token
        self.running = {}         # slot -> sequence
        self.in_flight = deque()  # steps not read yet: (plan, `running`, function that waits)

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
            run_all = self.waiting or self.prefilling
            new = decoder.resize(range(decoder.batch_size) if run_all else self.running)
            self.running = {new[slot]: held for slot, held in self.running.items()}
            self.cached_prefix = {new[slot]: held for slot, held in self.cached_prefix.items()}
            self.admit()
            if self.running:
                plan = self.policy.select(self.running.values())
                decoder.sampling_mode = max(s.sampling.mode for s in self.running.values())
                wait = decoder.launch(plan, with_trees)
                self.in_flight.append((plan, dict(self.running), wait))
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
        plan, sequences, wait = self.in_flight.popleft()
        accepted, trees, seconds = wait()
        results = []
        for slot, sequence in sequences.items():
            if sequence.ended:
                continue  # a step earlier, when this step was already in flight
            tokens, path = accepted[slot]
            tree = trees and trees[slot]
            if tree:  # plain decoding's tree shows the next root by now
                tree.tokens[0] = (sequence.tokens or sequence.prompt)[-1]
            results.append(StepResult(sequence, sequence.take(tokens), path, plan, tree))
            if sequence.ended:
                self.free(slot)
        self.policy.update(plan, results, seconds)
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
        output = Output(tree_size=max(plan.tree_size for plan in self.policy.plans),
                        batch_size=self.decoder.batch_size)
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
        stop = [stop] if isinstance(stop, (int, str)) else list(stop)
        if bad := [s for s in stop if type(s) not in (int, str) or s == ""]:
            raise InputError(f"stop must hold token ids and non-empty texts, not {bad[0]!r}")
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
    plan: DraftPlan
    tree: Tree = None  # of lists, if `step` was asked for trees

    @property
    def drafters(self):
        """"heads" or "lookup" for each guessed token; the one after them is the model's own."""
        guessed = self.path[1:len(self.tokens) + 1]  # a sequence may end inside the path
        return ["lookup" if node > self.plan.head_nodes else "heads" for node in guessed]


@dataclass
class Output:
    """What decoding returns."""
    sequences: list = field(default_factory=list)  # a `Sequence` for each prompt, in order
    steps: int = 0        # verify steps, summed over the sequences
    batch_steps: int = 0  # steps of the batch, each for all of its slots
    seconds: float = 0.0  # wall time, prefill included
    step_lengths: Counter = field(default_factory=Counter)  # n -> how many steps emitted n tokens
    accepted: Counter = field(default_factory=Counter)  # "heads", "lookup" -> tokens it guessed
    plans: dict = field(default_factory=dict)           # DraftPlan -> [its steps, their tokens]
    tree_size: int = 1    # T, the largest
    batch_size: int = 1   # B

    def count(self, result):
        """Counts a `StepResult`."""
        emitted = len(result.tokens)
        self.steps += 1
        self.step_lengths[emitted] += 1
        self.accepted.update(result.drafters)
        steps, tokens = self.plans.get(result.plan, (0, 0))
        self.plans[result.plan] = [steps + 1, tokens + emitted]

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
    expect(min(prompt) >= 0 and max(prompt) < V, f"prompt {index} has token ids outside "
           f"0..{V - 1}; is this the model's own tokenizer?")


# --------------------------------------------------------------------------------------------------
# The call

def generate(model, prompts, max_new_tokens, heads=None, *, lookup=False, temperature=0.0, top_k=0,
             top_p=1.0, min_p=0.0, seed=0, tree_size=None, beams=None, stop=(), batch_size=None,
             on_tokens=None, encoding=None, graph=True, sampling=None, policy=None):
    """Continues prompts (lists of token ids) with the model's own tokens -> `Output`: the same with
    any heads, lookup, tree or batch size, up to ties, which half precision on a GPU makes.

    lookup      also draft by n-gram lookup
    tree_size   nodes T verified per step, root included; 1: plain decoding; default: 5
    policy      selects each step's plan, in place of lookup and tree_size. What the command line
                does by default is policy=tools.policy.pick_policy(model, prompts, heads, lookup)
    beams       W, default about the square root of the heads' nodes
    stop        token ids and, with an `encoding` to read them by, texts that end a sequence
    batch_size  sequences decoded together, default up to 8; the next prompt follows a finished one
    on_tokens   called as on_tokens(index, tokens) with the tokens of each step
    graph       on CUDA, capture each plan's step in a graph once and replay it
    sampling    a `Sampling` for each prompt, in place of temperature, ..., seed
    Raises InputError for bad input, Interrupted on Ctrl-C."""
    engine = prepare(model, prompts, max_new_tokens, heads, lookup=lookup, tree_size=tree_size,
                     beams=beams, batch_size=batch_size, graph=graph, policy=policy,
                     temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    own = not sampling or len(sampling) == len(prompts) and engine.decoder.sampling == Sampling()
    expect(own, "sampling takes one for each prompt, in place of temperature, ..., seed")
    on_step = on_tokens and (lambda step: on_tokens(step.sequence.index, step.tokens))
    return engine.generate(prompts, max_new_tokens, stop, on_step, encoding, sampling)


def prepare(model, prompts, max_new_tokens, heads=None, *, lookup=False, tree_size=None, beams=None,
            batch_size=None, graph=True, policy=None, **sampling):
    """The Engine that `generate` runs, of the same arguments."""
    sampling = Sampling(**sampling)
    expect(prompts, "there is no prompt; give at least one")
    for index, prompt in enumerate(prompts):
        check_prompt(model, prompt, index)
    check("max new tokens", max_new_tokens, 1, 2**31, whole=True)
    capacity = max(min(len(prompt) + max_new_tokens, model.config.block_size) for prompt in prompts)
    batch_size = min(len(prompts), DEFAULT_BATCH if batch_size is None else batch_size)
    policy = policy or FixedPolicy(fixed_plan(tree_size, heads, lookup))
    return Engine(model, heads, policy=policy, batch_size=batch_size, capacity=capacity,
                  beams=beams, sampling=sampling, graph=graph)
