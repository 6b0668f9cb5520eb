"""The generation loop: `Decoder.step`, the `Engine` that queues prompts, and `generate()`.

    python generate.py --prompt "def fibonacci(n):"
    python generate.py --prompt "import os" --temperature 0.8 --top-p 0.9 --compare
    python generate.py --model FOLDER --chat      a conversation, if the folder has a chat template

A tree is drafted by the heads, by lookup in the text itself, or by both, as a `DraftPlan` says.
Plain decoding is the same loop with trees of one node. The text never depends on what drafted it,
so each step may take another plan. On CUDA each plan's step is captured in a graph once and
replayed, and the host reads a step's tokens while the next step runs.

Letters: B slots, T tree nodes, K draft heads, P nodes of a path, n tokens of lookup's chain, W
beams, C hidden size, V vocabulary."""

import sys

if __name__ == "__main__":  # before torch is loaded, so that a typo in a flag is told at once
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
from kernels import HAS_TRITON, accept_path, commit_path, merge_chain, ngram_lookup
from model import MAX_TREE, InputError, KVCache, check, needs_folders

PREFILL_CHUNK = 512  # prompt tokens per pass, which bounds its memory, and between two steps
DEFAULT_TREE = 5     # nodes, for heads without an acceptance table
GREEDY, NOISE, FILTERED = range(3)  # ways to sample: a later one gives a text the same tokens


class DraftPlan(NamedTuple):
    """What a step drafts: how many nodes of its tree the heads guess, and how long lookup's chain
    is, which shares the tree with them. With neither it is plain decoding."""
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
        if 0 < self.temperature < 1e-6:
            raise InputError("temperature must be 0, which is greedy, or at least 1e-06, not "
                             f"{self.temperature!r}")
        check("top-k", self.top_k, 0, 2**31, whole=True)
        check("top-p", self.top_p, 0, 1, above=True)
        check("min-p", self.min_p, 0, 1)
        check("seed", self.seed, -2**63, 2**63 - 1, whole=True)

    @property
    def way(self):
        """The cheapest way to sample so."""
        filtered = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return GREEDY if self.temperature == 0 else FILTERED if filtered else NOISE


class FixedPolicy:
    """Selects one plan for all steps. Every policy has these three: `plans` to select among,
    `select` and `update`. `tools.policy.AdaptivePolicy` has several plans."""

    def __init__(self, plan):
        self.plans = (plan,)

    def select(self):
        """The plan of the next step."""
        return self.plans[0]

    def update(self, plan, results, seconds=None):
        """Learns from a step's results [(sequence, tokens, path)] and its seconds or None."""


class Accepted(NamedTuple):
    """What one step accepted: views of one tensor, `packed`, which is all that the host reads."""
    packed: torch.Tensor  # int64 [B, 2 P + 2]
    tokens: torch.Tensor  # [B, P]: accepted guesses, then the bonus token, the next root
    path: torch.Tensor    # [B, P]: the accepted nodes, root first
    count: torch.Tensor   # [B]: how many there are
    last: torch.Tensor    # [B]: the index of the last


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

    def swap(self, a, b):
        """Exchanges what two slots hold."""
        n = int(self.cache.lengths[[a, b]].max())
        for cache in self.cache, self.heads_cache:
            cache.kv[:, :, [a, b], :, :n] = cache.kv[:, :, [b, a], :, :n]
        rows = self.cache.lengths, *(getattr(self, name) for name in self.ROWS)
        for x in *rows, *self.sampling.values():
            x[[a, b]] = x[[b, a]]

    def set_sampling(self, samplings):
        """Sets how each slot samples. The host does not wait for the copies to a GPU."""
        for name, rows in self.sampling.items():
            values = torch.tensor([getattr(s, name) for s in samplings], dtype=rows.dtype)
            rows.copy_(values.pin_memory() if rows.is_cuda else values, non_blocking=True)


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
    """Decodes B sequences, one in each slot, step by step. heads: they read in every step, also
    where lookup drafts. capacity: the most tokens of a sequence, prompt included; default: the
    model's context. plans: those that a step may take. beams, graph: as in `generate`. sampling: of
    texts without their own; `way`: the next step's, as its texts need. Raises InputError for sizes
    out of range and caches without room in memory."""

    @torch.inference_mode()
    def __init__(self, model, heads=None, *, batch_size=1, capacity=None, plans=(DraftPlan(),),
                 beams=None, sampling=None, graph=True):
        check("batch size", batch_size, 1, 2**16, whole=True)
        if beams is not None:
            check("beams", beams, 1, heads.max_beams if heads else MAX_BEAMS, whole=True)
        self.model = model
        self.heads = heads
        self.batch_size = batch_size
        self.plans = plans
        self.beams = beams
        self.sampling = sampling or Sampling()
        self.way = self.sampling.way
        self.capacity = model.config.block_size if capacity is None else capacity
        check("capacity", self.capacity, 1, model.config.block_size, whole=True)
        self.context = model.blocks.decoding_context
        P = max(map(self.max_path, plans))
        self.offsets = torch.arange(P, device=model.device)
        self.path_ancestors = (2 << self.offsets) - 1  # a path has no branches: j sees nodes 0..j
        self.looks_up = any(plan.lookup_tokens for plan in plans)
        max_tree = max(plan.tree_size for plan in plans)
        self.buffers = new_slots(model, heads, batch_size, self.capacity, max_tree, P)
        self.buffers.set_sampling([self.sampling] * batch_size)
        # made once and only viewed from here on, as the buffers are: captured graphs hold addresses
        self.root_trees = root_tree(self.buffers.root)
        self.run_first(batch_size)
        is_cuda = model.device.type == "cuda"
        self.steps_ahead = 1 if is_cuda else 0  # in flight while the host reads an earlier one
        self.runs = Counter()  # of each (plan, way)
        self.graphs = {}  # (plan, way) -> a function that replays its step
        self.pool = None  # the memory of all graphs; None: there are none
        if is_cuda and graph and HAS_TRITON:  # the references read values back
            self.pool = torch.cuda.graph_pool_handle()

    def max_path(self, plan):
        """P: a path ends with the heads' last depth, or with the chain."""
        depth = min(self.heads.config.n_draft, plan.head_nodes) if plan.head_nodes else 0
        return 1 + max(depth, plan.lookup_tokens)

    # One step of all slots. Shapes are fixed, state changes in place, nothing is read back.

    def step(self, plan):
        tree = self.draft(plan)                        # tokens, parents, depths, ancestors [B, T]
        positions = self.slots.cache.lengths[:, None] + tree.depths  # [B, T]
        normed, hidden = self.verify(tree, positions)  # [B, T, C]; K/V go to rows lengths..
        target = self.sample(normed, positions)        # [B, T]: the model's own next tokens
        accepted = self.accept(plan, tree, target)     # tokens, path [B, P], count [B]
        self.commit(plan, hidden, accepted)
        return accepted.packed

    def draft(self, plan):
        tree = self.plain_tree
        slots = self.slots
        if plan.head_nodes:
            size = plan.head_nodes + 1
            beams = self.beams or self.heads.default_beams(size)
            tree = self.heads.draft(slots.state, slots.root, size, beams)
        if plan.lookup_tokens:
            chain = ngram_lookup(slots.history, slots.cache.lengths, plan.lookup_tokens)
            tree = Tree(*merge_chain(*tree, chain))
        return tree

    def verify(self, tree, positions):
        """-> (the final norm of hidden, hidden)"""
        if self.model.config.positions == "learned":
            # nodes past the context's end are never emitted, but have no position of their own
            positions = positions.clamp(max=self.model.config.block_size - 1)
        return self.model.norm_and_hidden(tree.tokens, positions, self.slots.cache, tree.ancestors)

    def sample(self, normed, positions):
        normed = normed.flatten(0, 1)  # (B * T, C)
        sampling = self.slots.sampling
        place = dict(sequence=self.slots.sequence, position=(positions + 1).view(-1))
        if self.way == FILTERED:
            logits = self.model.head.logits(normed)
            target = self.model.head.filtered_sample(logits, **sampling, **place)
        else:
            temperature = 0.0 if self.way == GREEDY else sampling["temperature"]
            target = self.model.head.sample(normed, temperature, sampling["seed"], **place)
        return target.view_as(positions)

    def accept(self, plan, tree, target):
        P = self.max_path(plan)
        packed = accept_path(*tree, target, self.slots.active, P)
        tokens, path, ends = packed.split((P, P, 2), dim=1)
        return Accepted(packed, tokens, path, *ends.unbind(1))

    def commit(self, plan, hidden, accepted):
        """Keeps the path's cache rows, lets heads and lookup read its tokens, and makes the bonus
        token the next root. Rows from `count` on are junk, which the next step overwrites."""
        slots = self.slots
        lengths = slots.cache.lengths
        if self.heads or self.looks_up:
            positions = lengths[:, None] + self.offsets[:accepted.path.shape[1]]  # (B, P)
        last = accepted.last[:, None]
        if plan.head_nodes:  # else the tree is a chain, whose path is its first nodes
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

    def body(self, plan=None):
        """A function that runs one step of a plan, by default the first -> `Accepted.packed`. With
        graphs its first step in each way runs eagerly, which compiles it; then it is captured."""
        key = plan or self.plans[0], self.way
        self.runs[key] += 1
        step = partial(self.step, key[0])
        if self.pool is None or self.runs[key] == 1:
            return step
        if key not in self.graphs:
            self.graphs[key] = capture(step, self.model.device, self.pool)
        return self.graphs[key]

    @torch.inference_mode()
    def launch(self, plan):
        """Starts one step -> a function that waits for it and returns ([(tokens, path)] of the
        slots, seconds of this step alone; None for a plan's first two, which compile and capture
        it)."""
        P = self.max_path(plan)
        packed, wait_seconds = timed(self.body(plan), self.model.device)
        is_steady = self.runs[plan, self.way] > 2

        def wait():
            seconds = wait_seconds()
            accepted = [(row[:row[-2]], row[P:P + row[-2]]) for row in packed.tolist()]
            return accepted, seconds if is_steady else None
        return wait

    def warm_up(self):
        """Compiles and captures every plan, while all slots are idle."""
        for plan in 2 * self.plans:
            with self.context():
                self.launch(plan)()

    def prefill(self, slot, sequences, start):
        """Reads the next chunk of a prompt, from token `start`, into a slot -> where it ends; after
        the last chunk the slot runs. The prompts of several `Sequence`s that fit in one chunk are
        read at once, into the slots from this one on.

        A prompt's last token is not read here: it is the root of the first step, which is then like
        any other. Steps between two chunks write their trees where the next chunk goes."""
        n = len(sequences)
        slots = self.slots.view(slot, n)
        longest = max(len(s.prompt) for s in sequences) - 1
        end = min(start + PREFILL_CHUNK, longest)
        tokens, last, numbers = chunk_tensors(sequences, start, end, self.model.device)
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
            slots.sequence.copy_(numbers[:, 0])
            slots.set_sampling([s.sampling for s in sequences])
            slots.active.fill_(1)  # on a GPU, [:] = 1 would wait for it
        return end

    def release(self, slot, rows=0):
        """Makes a slot idle, or a slice of them. It still runs, since shapes are fixed, and writes
        its trees after these rows of its cache."""
        self.slots.active[slot].zero_()
        self.slots.cache.lengths[slot].fill_(rows)

    def run_first(self, n):
        """Steps run the first n slots alone from now on; with a graph all, for it has addresses."""
        self.slots = self.buffers.view(0, n)
        self.plain_tree = Tree(*(x[:n] for x in self.root_trees))  # its tokens are the roots


def chunk_tensors(sequences, start, end, device):
    """Tokens start, ..., end of prompts, padded [n, end + 1 - start], where each prompt's last of
    these is [n, 1], and the sequences' numbers [n, 1]. The host does not wait for the copy to a
    GPU."""
    rows = []
    for s in sequences:
        padding = [0] * (end + 1 - len(s.prompt))
        last = min(end, len(s.prompt) - 1)
        rows.append([*s.prompt[start:end + 1], *padding, last, s.index])
    rows = torch.tensor(rows)
    if device.type == "cuda":
        rows = rows.pin_memory().to(device, non_blocking=True)
    return rows.split((end + 1 - start, 1, 1), dim=1)


def timed(body, device):
    """Starts body(), which returns a tensor -> (the tensor on the host, a function that waits for
    it and returns the seconds that body() took on the device)."""
    if device.type != "cuda":
        started = time.perf_counter()
        result = body()
        seconds = time.perf_counter() - started
        return result, lambda: seconds
    stream = torch.cuda.current_stream(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(stream)
    result = body().to("cpu", non_blocking=True)  # before another graph overwrites it
    end.record(stream)

    def wait():
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    return result, wait


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
    """The `DraftPlan` of T nodes. Where both draft, lookup has half of the guesses, and the heads
    have a single one. Checks T."""
    check("tree size", tree_size, 1, MAX_TREE, whole=True)
    chain = (tree_size - 1) // (2 if heads else 1) if lookup else 0
    return DraftPlan(tree_size - 1 - chain if heads else 0, chain)


# --------------------------------------------------------------------------------------------------
# The engine: continuous batching

class Engine:
    """Prompts wait, are admitted to free slots of a `Decoder`, run, and retire: `add` them, and
    `step` while it is `busy`. Reusable for any prompts that fit its capacity. policy: what selects
    each step's plan, default plain decoding. options: the Decoder's."""

    def __init__(self, model, heads=None, *, policy=None, **options):
        self.policy = policy or FixedPolicy(DraftPlan())
        heads = heads if any(plan.head_nodes for plan in self.policy.plans) else None
        self.decoder = Decoder(model, heads, plans=self.policy.plans, **options)
        self.clear()

    @torch.inference_mode()
    def clear(self):
        """Drops all sequences."""
        self.waiting = deque()
        self.kept = dict.fromkeys(range(self.decoder.batch_size), ())  # free slot -> text it holds
        self.prefilling = None    # (slot, sequences, where the next chunk of their prompts starts)
        self.running = {}         # slot -> sequence
        self.in_flight = deque()  # steps not read yet: (plan, `running`, function that waits)
        self.decoder.run_first(self.decoder.batch_size)
        self.decoder.release(slice(None))

    @property
    def busy(self):
        return bool(self.waiting or self.prefilling or self.running)

    def add(self, prompt, max_new_tokens, sampling=None, stop=(), encoding=None, index=0):
        """Queues a prompt (token ids) -> its `Sequence`, to which steps add tokens. sampling: None
        for the Decoder's. index: of which the noise is a function. The rest as in `generate`."""
        model, capacity = self.decoder.model, self.decoder.capacity
        check("max new tokens", max_new_tokens, 1, 2**31, whole=True)
        check_prompt(model, prompt, index)
        sequence = Sequence(index, prompt, max_new_tokens, model.config.block_size, stop, encoding,
                            sampling or self.decoder.sampling)
        length = len(prompt) + sequence.limit
        if length > capacity:
            raise InputError(f"a text of {length} tokens does not fit an engine made for "
                             f"{capacity}; make a larger one")
        self.waiting.append(sequence)
        return sequence

    @torch.inference_mode()
    def step(self):
        """Admits prompts and runs one step of all slots -> [(sequence, new tokens, path, plan)].
        path: the accepted nodes, root first, of which those after plan.head_nodes are lookup's. On
        a GPU the results are those of the step before: the host reads them while this one runs."""
        with self.decoder.context():
            self.resize()
            self.admit()
            if self.running:
                plan = self.policy.select()
                self.decoder.way = max(s.sampling.way for s in self.running.values())
                self.in_flight.append((plan, dict(self.running), self.decoder.launch(plan)))
        if not self.in_flight or (self.running and len(self.in_flight) <= self.decoder.steps_ahead):
            return []
        return self.retire()

    def admit(self):
        """Fills free slots with prompts, about PREFILL_CHUNK tokens between two steps."""
        budget = PREFILL_CHUNK
        while budget > 0 and (self.prefilling or (self.waiting and self.kept)):
            slot, sequences, start = self.prefilling or self.next_prompts()
            end = self.decoder.prefill(slot, sequences, start)
            budget -= max(end - start, 1) * len(sequences)
            self.prefilling = slot, sequences, end
            if end == max(len(s.prompt) for s in sequences) - 1:
                self.running |= dict(enumerate(sequences, slot))
                self.prefilling = None

    def next_prompts(self):
        """(slot, sequences, where they start): the next prompt that waits, in the free slot with
        most of it, else the one free the longest; and on a GPU, which takes as long for one short
        prompt as for many, those after it that start there too, and fit in one chunk with it and
        in the free slots after its own."""
        slot, start = max(self.starts().items(), key=lambda item: item[1])
        sequences = [self.waiting.popleft()]
        longest = len(sequences[0].prompt)
        while self.decoder.steps_ahead and self.waiting:
            starts = self.starts()
            n = len(sequences)
            longest = max(longest, len(self.waiting[0].prompt))
            alike = starts.get(slot + n) == start == max(starts.values())
            if (n + 1) * (longest - 1 - start) > PREFILL_CHUNK or not alike:
                break
            sequences.append(self.waiting.popleft())
        for i in range(len(sequences)):
            del self.kept[slot + i]
        return slot, sequences, start

    def starts(self):
        """{free slot: where the next prompt would start, after what its text shares with it}"""
        prompt = self.waiting[0].prompt
        same = lambda text: len(list(takewhile(lambda pair: pair[0] == pair[1], zip(text, prompt))))
        # the heads' row of a token depends on the next one; the last row gives the heads' state
        start = lambda text: max(min(same(text) - 1, len(prompt) - 2), 0)
        return {slot: start(text) for slot, text in self.kept.items()}

    def resize(self):
        """Runs all slots while prompts wait; then, on a CPU, only the busy ones, moved to the
        front, and up to an eighth of the batch more: an idle slot costs as much as a busy one, and
        a new batch size costs more. On a GPU a graph needs tensors to stay where they are."""
        decoder = self.decoder
        n = decoder.batch_size
        if not (decoder.steps_ahead or self.waiting or self.prefilling):
            multiple = max(n // 8, 1)
            n = math.ceil(len(self.running) / multiple) * multiple
        if n == len(decoder.slots.root):
            return
        for source in sorted((slot for slot in self.running if slot >= n), reverse=True):
            free = next(slot for slot in self.kept if slot < n)
            decoder.buffers.swap(source, free)
            self.running[free] = self.running.pop(source)
            self.kept = {source if slot == free else slot: x for slot, x in self.kept.items()}
        decoder.run_first(n)

    def retire(self):
        """Reads the oldest step in flight, frees the slots of the texts that end with it, and tells
        the policy -> [(sequence, new tokens, path, plan)]."""
        plan, sequences, wait = self.in_flight.popleft()
        accepted, seconds = wait()
        results = []
        for slot, sequence in sequences.items():
            if sequence.ended:
                continue  # a step earlier, when this step was already in flight
            tokens, path = accepted[slot]
            results.append((sequence, sequence.take(tokens), path))
            if sequence.ended:
                self.free(slot)
        self.policy.update(plan, results, seconds)
        return [(*result, plan) for result in results]

    def free(self, slot):
        """Gives a slot back, with the text that its caches hold."""
        sequence = self.running.pop(slot, None)
        self.kept[slot] = [*sequence.prompt, *sequence.tokens] if sequence else ()
        self.decoder.release(slot, max(len(self.kept[slot]) - 1, 0))

    @torch.inference_mode()
    def cancel(self, sequence):
        """Ends a text wherever it is, between two steps; the next step may use its slot."""
        slots = [slot for slot, running in self.running.items() if running is sequence]
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif self.prefilling and sequence in self.prefilling[1]:  # of several chunks, so alone
            slots = [self.prefilling[0]]
            self.prefilling = None
        for slot in slots:
            self.free(slot)
        sequence.ended = sequence.ended or "cancelled"

    def generate(self, prompts, max_new_tokens, stop=(), on_step=None, encoding=None,
                 sampling=None):
        """Adds the prompts and steps until all texts have ended -> `Output`; calls on_step with
        each result of `step`. sampling: one for each prompt. Raises InputError as `add` does,
        Interrupted on Ctrl-C."""
        sampling = sampling or [None] * len(prompts)
        output = Output(tree_size=max(plan.tree_size for plan in self.policy.plans),
                        batch_size=self.decoder.batch_size)
        started = time.perf_counter()
        try:
            for index, (prompt, own) in enumerate(zip(prompts, sampling, strict=True)):
                sequence = self.add(prompt, max_new_tokens, own, stop, encoding, index)
                output.sequences.append(sequence)
            while self.busy:
                results = self.step()
                output.batch_steps += len(results) > 0
                for sequence, tokens, path, plan in results:
                    output.count(tokens, path, plan)
                    if on_step:
                        on_step(sequence, tokens, path, plan)
        except KeyboardInterrupt:
            raise Interrupted(output) from None
        finally:
            output.seconds = time.perf_counter() - started
            if self.busy:
                self.clear()
        return output


class Sequence:
    """One prompt and the text that grows from it. ended: None, "stop" (a stop token or text),
    "length" (max_new_tokens), "context" (the model's is full) or "cancelled". Checks what is to
    stop it."""

    def __init__(self, index, prompt, max_new_tokens, context, stop, encoding, sampling=None):
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
        """Appends a step's tokens up to the text's end -> the tokens taken."""
        taken = []
        for token in tokens[:self.limit - len(self.tokens)]:
            taken.append(token)
            if self.stream:
                self.stream.feed([token])
            if token in self.stop_tokens or (self.stream and self.stream.stopped):
                self.ended = "stop"
                break
        self.tokens += taken
        if not self.ended and len(self.tokens) == self.limit:
            self.ended = self.at_limit
        return taken


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

    def count(self, tokens, path, plan):
        """Counts one step. path[i + 1] guessed tokens[i], and no node the bonus token."""
        self.steps += 1
        self.step_lengths[len(tokens)] += 1
        for node in path[1:len(tokens) + 1]:
            self.accepted["lookup" if node > plan.head_nodes else "heads"] += 1
        steps, emitted = self.plans.get(plan, (0, 0))
        self.plans[plan] = [steps + 1, emitted + len(tokens)]

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
    if not 1 <= len(prompt) <= longest:
        raise InputError(f"prompt {index} has {len(prompt)} tokens; give 1 to {longest}, for the "
                         "model's context must hold a new one too")
    if min(prompt) < 0 or max(prompt) >= V:
        raise InputError(f"prompt {index} has token ids outside 0..{V - 1}; is this the model's "
                         "own tokenizer?")


# --------------------------------------------------------------------------------------------------
# The call

def generate(model, prompts, max_new_tokens, heads=None, *, lookup=False, temperature=0.0, top_k=0,
             top_p=1.0, min_p=0.0, seed=0, tree_size=None, beams=None, stop=(), batch_size=None,
             on_tokens=None, encoding=None, graph=True, sampling=None):
    """Continues prompts (lists of token ids) with the model's own tokens -> `Output`: the same with
    any heads, lookup, tree or batch size, up to ties, which half precision on a GPU makes.

    lookup      drafts from the text itself, too
    tree_size   nodes T verified per step, root included; 1: plain decoding; None: each step takes
                what brings most tokens per second
    beams       W, default about the square root of the heads' nodes
    stop        token ids and, with an `encoding` to read them by, texts that end a sequence
    batch_size  sequences decoded together, default up to 8; the next prompt follows a finished one
    on_tokens   called as on_tokens(index, tokens) with the tokens of each step
    graph       on CUDA, capture each plan's step in a graph once and replay it
    sampling    a `Sampling` for each prompt, in place of temperature, ..., seed
    Raises InputError for bad input, Interrupted on Ctrl-C."""
    engine = prepare(model, prompts, max_new_tokens, heads, lookup=lookup, tree_size=tree_size,
                     beams=beams, batch_size=batch_size, graph=graph, temperature=temperature,
                     top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    if sampling and (len(sampling) != len(prompts) or engine.decoder.sampling != Sampling()):
        raise InputError("sampling takes one for each prompt, in place of temperature, ..., seed")
    on_step = on_tokens and (lambda sequence, tokens, *_: on_tokens(sequence.index, tokens))
    return engine.generate(prompts, max_new_tokens, stop, on_step, encoding, sampling)


def prepare(model, prompts, max_new_tokens, heads=None, *, lookup=False, tree_size=None, beams=None,
            batch_size=None, graph=True, policy=None, **sampling):
    """The Engine that `generate` runs, of the same arguments. policy: default as tree_size says."""
    sampling = Sampling(**sampling)
    if not prompts:
        raise InputError("no prompt was given; give at least one")
    for index, prompt in enumerate(prompts):
        check_prompt(model, prompt, index)
    check("max new tokens", max_new_tokens, 1, 2**31, whole=True)
    capacity = max(min(len(prompt) + max_new_tokens, model.config.block_size) for prompt in prompts)
    batch_size = min(len(prompts), 8 if batch_size is None else batch_size)
    fits = lookup or (heads and heads.info.get("acceptance"))
    if policy is None and tree_size is None and fits:
        with needs_folders(", or give a tree_size"):
            from tools.policy import AdaptivePolicy
        policy = AdaptivePolicy(model, heads, lookup, batch_size, sampling.temperature)
    elif policy is None:
        default = DEFAULT_TREE if heads else 1
        policy = FixedPolicy(fixed_plan(default if tree_size is None else tree_size, heads, lookup))
    return Engine(model, heads, policy=policy, batch_size=batch_size, capacity=capacity,
                  beams=beams, sampling=sampling, graph=graph)
