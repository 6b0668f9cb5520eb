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

import math
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

if __name__ == "__main__":  # a mistake in the flags is told before torch is loaded
    try:
        from tools import flags
    except ModuleNotFoundError:
        print("generate.py: the command line needs tools/, hf/ and backends/; copy these folders "
              "here too", file=sys.stderr)
        sys.exit(2)
    flags.parse(sys.argv[1:])

import torch

from clover import Tree, check_beams, root_tree
from kernels import (
    accept_path,
    commit_path,
    filtered_sample,
    merge_chain,
    ngram_lookup,
    runs_triton,
    unchecked,
)
from model import MAX_TREE, InputError, KVCache, check, needs_folders

PREFILL_CHUNK = 512  # prompt tokens per pass, which bounds its memory, and between two steps
DEFAULT_BATCH = 8    # slots, where no batch size is given
DEFAULT_TREE = 5     # nodes, for heads without an acceptance table


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


class FixedPolicy:
    """Takes one plan in all steps. Every policy has what this one has: `plans` to select among,
    and what follows. `tools.policy.AdaptivePolicy` has several plans."""
    drops_heads = False  # whether heads need not read any more in this call

    def __init__(self, plan):
        self.plans = (plan,)

    def start(self, may_drop_heads):
        """A call begins."""

    def select(self):
        """The plan of the next step."""
        return self.plans[0]

    def update(self, plan, found, seconds=None, slots=None):
        """What a step of so many slots found, [(sequence, tokens, path)], and how long it took."""


class Accepted(NamedTuple):
    """What one step accepted: views of one tensor, `packed`, which is all that the host reads."""
    packed: torch.Tensor  # int64 [B, 2 P + 2]
    tokens: torch.Tensor  # [B, P]: accepted guesses, then the bonus token, the next root
    path: torch.Tensor    # [B, P]: the accepted nodes, root first
    count: torch.Tensor   # [B]: how many there are
    last: torch.Tensor    # [B]: the index of the last

    @classmethod
    def views(cls, packed, P):
        tokens, path, ends = packed.split((P, P, 2), dim=1)
        return cls(packed, tokens, path, *ends.unbind(1))

    def lists(self):
        """The views as lists, on the host."""
        return Accepted(None, *(x.tolist() for x in self[1:]))


# --------------------------------------------------------------------------------------------------
# The decoder

@dataclass
class Slots:
    """The state of B sequences, one per slot."""
    cache: KVCache
    heads_cache: KVCache | None     # the augmenting block's; its lengths are the cache's
    root: torch.Tensor              # int64 [B]: the newest token, which has no cache row yet
    state: torch.Tensor | None      # [B, C]: what the heads draft from
    history: torch.Tensor | None    # int32, one row per slot: the text, root included, for lookup
    sequence: torch.Tensor          # int64 [B]: which text this is; the noise is a function of it
    active: torch.Tensor            # int32 [B]: 0 for an idle slot

    def first(self, n):
        """Views of the first n slots."""
        view = lambda x: x.slots(0, n) if isinstance(x, KVCache) else x[:n]
        return Slots(*(None if x is None else view(x) for x in vars(self).values()))

    def move(self, source, free):
        """Copies slot `source` to slot `free`."""
        n = int(self.cache.lengths[source])
        for cache in filter(None, (self.cache, self.heads_cache)):
            cache.kv[:, :, free, :, :n] = cache.kv[:, :, source, :, :n]
        for tensor in (self.cache.lengths, *vars(self).values()):
            if isinstance(tensor, torch.Tensor):
                tensor[free] = tensor[source]


def new_slots(model, heads, batch_size, capacity, plans, max_path):
    """Empty `Slots` for texts of `capacity` tokens. On a GPU the host learns of a text's end a step
    late, so a text may grow by two paths: the sums below add what its last step writes."""
    zeros = lambda dtype, *shape: torch.zeros(batch_size, *shape, dtype=dtype, device=model.device)
    tree_size = max(plan.tree_size for plan in plans)
    cache = model.new_cache(batch_size, capacity + max_path + tree_size)  # a tree after one path
    heads_cache = state = history = None
    if heads:
        heads_cache = heads.new_cache(batch_size, capacity + 2 * max_path)  # heads read paths alone
        heads_cache.lengths = cache.lengths
        state = zeros(model.dtype, model.config.n_embd)
    if any(plan.lookup_tokens for plan in plans):
        history = zeros(torch.int32, capacity + 2 * max_path + 1)  # the root, too
    return Slots(cache, heads_cache, root=zeros(torch.int64), state=state, history=history,
                 sequence=zeros(torch.int64), active=zeros(torch.int32))


class Decoder:
    """Decodes B sequences, one in each slot, step by step. heads: they read in every step, also
    where lookup drafts. capacity: the most tokens of a sequence, prompt included; default: the
    model's context. plans: those that a step may take. beams: W, default about the square root of
    the heads' nodes. sampling: default greedy. graph: on CUDA, capture each plan's step once and
    replay it. Raises InputError for sizes out of range and caches without room in memory."""

    @torch.inference_mode()
    def __init__(self, model, heads=None, *, batch_size=1, capacity=None, plans=(DraftPlan(),),
                 beams=None, sampling=None, graph=True):
        check("batch size", batch_size, 1, 2**16, whole=True)
        check_beams(heads, 1 if beams is None else beams)
        self.model, self.heads = model, heads
        self.batch_size = batch_size
        self.plans = plans
        self.given_beams = beams
        self.sampling = sampling or Sampling()
        self.capacity = model.config.block_size if capacity is None else capacity
        check("capacity", self.capacity, 1, model.config.block_size, whole=True)
        if find_spec("backends"):
            from backends import cpu  # on a CPU, replaces layers of the caller's model
            cpu.apply(model, heads)
        P = max(map(self.max_path, plans))
        self.offsets = torch.arange(P, device=model.device)
        self.path_ancestors = (2 << self.offsets) - 1  # a path has no branches: j sees nodes 0..j
        self.buffers = new_slots(model, self.heads, batch_size, self.capacity, plans, P)
        self.run_first(batch_size)
        self.ran = set()       # (plan, the heads that read or None), of the steps until now
        self.has_read = False  # a prompt: then its shapes are not checked any more
        self.steps_ahead = 0   # steps in flight while the host reads an earlier one
        self.pool = None       # the memory of all graphs; None: there are none
        self.graphs = {}       # plan -> a function that replays its step
        if model.device.type == "cuda":
            self.prepare_cuda(P, graph)

    def max_path(self, plan):
        """P: a path ends with the heads' last depth, or with the chain."""
        depth = min(self.heads.config.n_draft, plan.head_nodes) if plan.head_nodes else 0
        return 1 + max(depth, plan.lookup_tokens)

    # One step of all slots. Shapes are fixed, state changes in place, nothing is read back.

    def step(self, plan):
        with unchecked(self.has_run(plan)):    # fixed shapes are checked in the first step alone
            tree = self.draft(plan)            # tokens, parents, depths, ancestors: [B, T]
            positions = self.slots.cache.lengths[:, None] + tree.depths  # [B, T]
            normed, hidden = self.verify(tree, positions)      # [B, T, C]; K/V go to rows lengths..
            target = self.sample(normed, positions)            # [B, T]: the model's own next tokens
            accepted = self.accept(plan, tree, target)         # tokens, path [B, P], count [B]
            self.commit(plan, hidden, accepted)
        self.ran |= {(plan, self.heads), (plan, None)}  # without heads a step does less
        return accepted.packed

    def has_run(self, plan):
        return (plan, self.heads) in self.ran

    def draft(self, plan):
        tree, slots = self.plain_tree, self.slots
        if plan.head_nodes:
            size = plan.head_nodes + 1
            beams = self.given_beams or self.heads.default_beams(size)
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
        B, T, C = normed.shape
        s = self.sampling
        normed = normed.view(B * T, C)
        sequence = self.slots.sequence[:, None].expand(B, T).reshape(-1)
        position = (positions + 1).view(-1)
        if s.filtered:
            logits = self.model.head.logits(normed)  # (B * T, V)
            target = filtered_sample(logits, s.temperature, s.top_k, s.top_p, s.min_p, s.seed,
                                     sequence, position)
        else:
            target = self.model.head.sample(normed, s.temperature, s.seed, sequence, position)
        return target.view(B, T)

    def accept(self, plan, tree, target):
        P = self.max_path(plan)
        return Accepted.views(accept_path(*tree, target, self.slots.active, P), P)

    def commit(self, plan, hidden, accepted):
        """Keeps the path's cache rows, lets heads and lookup read its tokens, and makes the bonus
        token the next root. Rows from `count` on are junk, which the next step overwrites."""
        slots, lengths = self.slots, self.slots.cache.lengths
        if self.heads or slots.history is not None:
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
        if slots.history is not None:
            slots.history[:, 1:].scatter_(1, positions, accepted.tokens.int())
        torch.gather(accepted.tokens, 1, last, out=slots.root[:, None])
        lengths += accepted.count

    def prepare_cuda(self, P, graph):
        """Buffers for a step in flight, and the graphs' pool of memory."""
        self.steps_ahead = 1
        size = self.batch_size * (2 * P + 2)
        pinned = lambda: torch.zeros(size, dtype=torch.int64, pin_memory=True)
        self.pinned = [pinned(), pinned()]
        event = lambda: torch.cuda.Event(enable_timing=True)
        self.events = [(event(), event()), (event(), event())]  # before and after a step
        if graph and runs_triton(self.slots.root):  # the references read values back
            self.pool = torch.cuda.graph_pool_handle()

    def body(self, plan=None):
        """A function that runs one step of a plan, by default the first -> `Accepted.packed`. A
        plan's first step runs eagerly, which compiles it; then it is captured, and replayed."""
        plan = plan or self.plans[0]
        step = partial(self.step, plan)
        if self.pool is None or not self.has_run(plan):
            return step
        if plan not in self.graphs:
            self.graphs[plan] = capture(step, self.model.device, self.pool)
        return self.graphs[plan]

    @torch.inference_mode()
    def launch(self, plan):
        """Starts one step -> a function that waits for it and returns (`Accepted.lists`, seconds,
        None for a plan's first steps, which compile and capture it)."""
        usual = self.has_run(plan) and (self.pool is None or plan in self.graphs)
        P = self.max_path(plan)
        read = lambda packed: Accepted.views(packed, P).lists()
        started = time.perf_counter()
        if self.model.device.type != "cuda":
            accepted = read(self.body(plan)())
            seconds = time.perf_counter() - started
            return lambda: (accepted, seconds if usual else None)
        begun, written = self.events[0]
        stream = torch.cuda.current_stream(self.model.device)
        begun.record(stream)
        result = self.body(plan)()
        pinned = self.pinned[0][:result.numel()].view(result.shape)
        pinned.copy_(result, non_blocking=True)
        written.record(stream)
        self.pinned.reverse()
        self.events.reverse()

        def wait():
            written.synchronize()
            return read(pinned), begun.elapsed_time(written) / 1e3 if usual else None
        return wait

    def prefill(self, slot, prompts, start, index):
        """Reads the next chunk of a prompt, from token `start`, into a slot -> where it ends; after
        the last chunk the slot runs, as the text of this index. Several prompts that fit in one
        chunk are read at once, into the slots and as the texts from these on.

        A prompt's last token is not read here: it is the root of the first step, which is then like
        any other. Steps between two chunks write their trees where the next chunk goes."""
        slots = self.slots
        n = len(prompts)
        longest = max(map(len, prompts)) - 1
        end = min(start + PREFILL_CHUNK, longest)
        tokens, last = chunk_tensors(prompts, start, end, self.model.device)
        rows = slice(slot, slot + n)
        if end > start:
            with unchecked(self.has_read):
                hidden = self.model.prefill(tokens[:, :-1], slots.cache.slots(slot, n), start)
                if self.heads:
                    positions = torch.arange(start, end, device=tokens.device).expand(n, -1)
                    cache = slots.heads_cache.slots(slot, n)
                    states = self.heads.augment(hidden, tokens[:, 1:], positions, cache, end=end)
                    # a prompt of one token has no state yet: beside longer ones it gets any
                    at = (last - start - 1).clamp(min=0)[:, :, None].expand(-1, 1, states.shape[2])
                    slots.state[rows] = states.gather(1, at)[:, 0]
            self.has_read = True
        elif self.heads:
            slots.state[rows].zero_()
        if slots.history is not None:
            slots.history[rows, start:end + 1] = tokens
        slots.root[rows] = tokens.gather(1, last - start)[:, 0]
        slots.cache.lengths[rows] = last[:, 0]
        if end == longest:
            slots.sequence[rows] = torch.arange(index, index + n, device=tokens.device)
            slots.active[rows].fill_(1)  # on a GPU, [rows] = 1 would wait for it
        return end

    def set_heads(self, heads):
        """Lets these heads read from now on, or none. What was captured is captured anew."""
        if heads is not self.heads:
            if self.graphs:
                torch.cuda.synchronize(self.model.device)  # a step may be in flight
            self.heads = heads
            self.graphs.clear()

    def release(self, slot):
        """Makes a slot idle. It still runs, since shapes are fixed, on an empty sequence."""
        self.slots.active[slot].zero_()
        self.slots.cache.lengths[slot].zero_()

    def reset(self):
        """Makes all slots idle."""
        if len(self.slots.root) < self.batch_size:  # never with a graph, whose tensors must stay
            self.run_first(self.batch_size)
        for slot in range(self.batch_size):
            self.release(slot)

    def run_first(self, n):
        """Steps run the first n slots alone from now on: `slots` are views of the buffers."""
        self.slots = self.buffers.first(n)
        self.plain_tree = root_tree(self.slots.root)  # a view of the root: it stays up to date


def chunk_tensors(prompts, start, end, device):
    """Tokens start, ..., end of prompts, padded [n, end + 1 - start], and where each prompt's last
    of these is [n, 1]. The host does not wait for the copy to a GPU."""
    rows = []
    for prompt in prompts:
        padding = [0] * (end + 1 - len(prompt))
        rows.append([*prompt[start:end + 1], *padding, min(end, len(prompt) - 1)])
    rows = torch.tensor(rows)
    if device.type == "cuda":
        rows = rows.pin_memory().to(device, non_blocking=True)
    return rows.split((end + 1 - start, 1), dim=1)


def capture(body, device, pool=None):
    """Records body(), which has run before, in a CUDA graph -> a function that replays it. Graphs
    of one pool share memory: what one returns must be copied before another runs."""
    with torch.cuda.device(device):
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
    """The `DraftPlan` of T nodes, of which lookup has half where both draft. Checks T."""
    check("tree size", tree_size, 1, MAX_TREE, whole=True)
    if tree_size == 2 and heads and lookup:
        raise InputError("a tree of 2 nodes has no room for guesses of both heads and lookup; give "
                         "a tree size of 3 or more, or one of the two")
    chain = (tree_size - 1) // (2 if heads else 1) if lookup else 0
    return DraftPlan(tree_size - 1 - chain if heads else 0, chain)


# --------------------------------------------------------------------------------------------------
# Sampling

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
    def filtered(self):
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


# --------------------------------------------------------------------------------------------------
# The engine: continuous batching

class Engine:
    """Prompts wait, are admitted to free slots of a `Decoder`, run, and retire. Reusable for any
    prompts that fit its capacity. policy: what selects each step's plan, default plain decoding.
    options: the Decoder's."""

    def __init__(self, model, heads=None, *, policy=None, **options):
        self.policy = policy or FixedPolicy(DraftPlan())
        self.heads = heads if any(plan.head_nodes for plan in self.policy.plans) else None
        self.decoder = Decoder(model, self.heads, plans=self.policy.plans, **options)
        self.kept_text = []  # with one slot: what a call with keep=True left in the caches

    @torch.inference_mode()
    def generate(self, prompts, max_new_tokens, stop=(), on_step=None, encoding=None, keep=False,
                 on_end=None):
        """Continues prompts (lists of token ids) -> `Output`. stop, encoding: see `generate`.

        on_step(index, tokens, path, plan) is called with the tokens of each step and the accepted
        nodes, root first, of which those after plan.head_nodes are lookup's alone; on_end(sequence)
        with a `Sequence` that ended. keep: for one prompt in one slot, as in a chat. What the
        prompt shares with the text of the last call that kept it is not computed again; the model
        must be the same. Raises InputError for what cannot be decoded, Interrupted on Ctrl-C."""
        decoder = self.decoder
        sequences = self.new_sequences(prompts, max_new_tokens, stop, encoding)
        if keep and (decoder.batch_size, len(prompts)) != (1, 1):
            raise InputError("keep is for one prompt in one slot, not for "
                             f"{len(prompts)} in {decoder.batch_size}")
        self.kept_text = self.kept_text if keep else []
        output = Output([s.tokens for s in sequences], [], batch_size=decoder.batch_size,
                        tree_size=max(plan.tree_size for plan in decoder.plans))

        def emit(sequence, tokens, path, plan):
            tokens = sequence.take(tokens)
            output.count(tokens, path, plan)
            if on_step:
                on_step(sequence.index, tokens, path, plan)
            if sequence.ended and on_end:
                on_end(sequence)

        threads = torch.get_num_threads()  # which the policy may change
        self.policy.start(may_drop_heads=not keep)
        decoder.set_heads(self.heads)
        started = time.perf_counter()
        try:
            self.run(sequences, emit)
        except KeyboardInterrupt:
            raise Interrupted(output) from None
        finally:
            output.seconds = time.perf_counter() - started
            torch.set_num_threads(threads)
            output.ended = [s.ended for s in sequences]
            text = [*prompts[0], *output.tokens[0]]
            self.kept_text = text if keep and output.tokens[0] else []
            decoder.reset()
        return output

    def new_sequences(self, prompts, max_new_tokens, stop, encoding):
        """Checks what `generate` was given -> a `Sequence` for each prompt."""
        model, capacity = self.decoder.model, self.decoder.capacity
        check("max new tokens", max_new_tokens, 1, 2**31, whole=True)
        check_prompts(model, prompts)
        stop = check_stops(stop, encoding)
        sequences = [Sequence(i, prompt, max_new_tokens, model.config.block_size, stop, encoding)
                     for i, prompt in enumerate(prompts)]
        longest = max(len(s.prompt) + s.limit for s in sequences)
        if longest > capacity:
            raise InputError(f"a text of {longest} tokens does not fit an engine made for "
                             f"{capacity}; make a larger one")
        return sequences

    def run(self, sequences, emit):
        self.waiting = deque(sequences)
        self.free = deque(range(self.decoder.batch_size))
        self.filling = None       # (slot, sequences, where the next chunk of their prompts starts)
        self.running = {}         # slot -> sequence
        self.in_flight = deque()  # steps not read yet: (plan, function that waits, `running`)
        while self.waiting or self.filling or self.running:
            self.admit()
            self.compact_slots()
            if self.running:
                if self.policy.drops_heads:
                    self.decoder.set_heads(None)
                plan = self.policy.select()
                self.in_flight.append((plan, self.decoder.launch(plan), dict(self.running)))
            if len(self.in_flight) > self.decoder.steps_ahead:
                self.retire(emit)

    def admit(self):
        """Fills free slots with prompts, about PREFILL_CHUNK tokens between two steps."""
        budget = PREFILL_CHUNK
        while budget > 0 and (self.filling or (self.waiting and self.free)):
            slot, sequences, start = self.filling or self.next_prompts()
            prompts = [s.prompt for s in sequences]
            end = self.decoder.prefill(slot, prompts, start, sequences[0].index)
            budget -= max(end - start, 1) * len(prompts)
            self.filling = slot, sequences, end
            if end == max(map(len, prompts)) - 1:
                self.running |= dict(enumerate(sequences, slot))
                self.filling = None

    def next_prompts(self):
        """(slot, sequences, where they start): the next prompt that waits, and on a GPU, which
        takes as long for one short prompt as for many, those after it that fit in one chunk with
        it and in the free slots after its own."""
        slot = self.free.popleft()
        sequences = [self.waiting.popleft()]
        longest = len(sequences[0].prompt)
        while self.decoder.steps_ahead and self.waiting and self.free:
            longest = max(longest, len(self.waiting[0].prompt))
            n = len(sequences) + 1
            if n * (longest - 1) > PREFILL_CHUNK or self.free[0] != slot + n - 1:
                break
            self.free.popleft()
            sequences.append(self.waiting.popleft())
        return slot, sequences, self.reusable_prefix(sequences[0].prompt)

    def retire(self, emit):
        """Reads the oldest step in flight and frees the slots of the texts that end with it."""
        plan, wait, started_with = self.in_flight.popleft()
        accepted, seconds = wait()
        found = []
        for slot, sequence in started_with.items():
            if self.running.get(slot) is not sequence:
                continue  # the text ended a step earlier, when this step was already in flight
            count = accepted.count[slot]
            tokens, path = accepted.tokens[slot][:count], accepted.path[slot][:count]
            found.append((sequence, tokens, path))
            emit(sequence, tokens, path, plan)
            if sequence.ended:
                del self.running[slot]
                self.decoder.release(slot)
                self.free.append(slot)
        self.policy.update(plan, found, seconds, slots=len(self.decoder.slots.root))

    def compact_slots(self):
        """With no prompt left to admit, runs only the slots that are busy, moved to the front, and
        some more: a CPU needs as long for an idle one, and longer for a number that is new to it.
        On a GPU a graph needs tensors to stay where they are."""
        decoder = self.decoder
        some = max(decoder.batch_size // 8, 1)
        n = math.ceil(len(self.running) / some) * some
        idle = 0 < n < len(decoder.slots.root)
        if decoder.steps_ahead or self.waiting or self.filling or not idle:
            return
        for free in range(n):
            if free not in self.running and max(self.running) >= n:
                source = max(self.running)
                decoder.buffers.move(source, free)
                self.running[free] = self.running.pop(source)
        decoder.run_first(n)

    def reusable_prefix(self, prompt):
        """How many of a prompt's first rows `keep` left in the caches. A row of the heads depends
        on the next token too; the last but one token must run, for the heads' state."""
        pairs = enumerate(zip(self.kept_text, prompt))
        same = next((i for i, (a, b) in pairs if a != b), min(len(self.kept_text), len(prompt)))
        return max(min(same - 1, len(prompt) - 2), 0)


class Sequence:
    """One prompt and the text that grows from it. ended: None, "stop" (a stop token or text),
    "length" (max_new_tokens) or "context" (the model's is full)."""

    def __init__(self, index, prompt, max_new_tokens, context, stop, encoding):
        self.index = index
        self.prompt = prompt
        self.tokens = []
        self.ended = None
        self.limit = min(max_new_tokens, context - len(prompt))
        self.at_limit = "length" if self.limit == max_new_tokens else "context"
        self.stop_tokens = {s for s in stop if not isinstance(s, str)}
        stop_texts = [s for s in stop if isinstance(s, str)]
        self.stream = encoding.stream(stop_texts) if stop_texts else None

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
    """What decoding returns. tokens: the new ones of each prompt, in order; ended: why each text
    ended, see `Sequence`, None where it was interrupted."""
    tokens: list
    ended: list
    steps: int = 0        # verify steps, summed over the sequences
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
        taken = self.plans.setdefault(plan, [0, 0])
        taken[0] += 1
        taken[1] += len(tokens)

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
        super().__init__()
        self.output = output


def check_prompts(model, prompts):
    V, longest = model.config.vocab_size, model.config.block_size - 1
    if not prompts:
        raise InputError("no prompt was given; give at least one")
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, (list, tuple)):
            raise InputError(f"prompt {i} must be a list of token ids, not {prompt!r}")
        if not len(prompt):
            raise InputError(f"prompt {i} is empty; it needs at least one token")
        if len(prompt) > longest:
            raise InputError(f"prompt {i} has {len(prompt)} tokens; the model's context of "
                             f"{longest + 1} leaves room for at most {longest} and one new token: "
                             "shorten the prompt")
        if min(prompt) < 0 or max(prompt) >= V:
            raise InputError(f"prompt {i} has token ids outside 0..{V - 1}; is this the model's "
                             "own tokenizer?")


def check_stops(stop, encoding):
    """stop as a tuple of token ids and texts that can be looked for."""
    stop = (stop,) if isinstance(stop, (int, str)) else tuple(stop)
    for s in stop:
        if isinstance(s, bool) or not isinstance(s, (int, str)) or s == "":
            raise InputError(f"stop must hold token ids and texts that are not empty, not {s!r}")
        if isinstance(s, str) and not hasattr(encoding, "stream"):
            raise InputError(f"stop text {s!r} cannot be seen in token ids alone; give encoding=, "
                             "the model's tokenizer as hf.tokenizer.load_encoding reads it")
    return stop


# --------------------------------------------------------------------------------------------------
# The call

def generate(model, prompts, max_new_tokens, heads=None, *, lookup=False, temperature=0.0, top_k=0,
             top_p=1.0, min_p=0.0, seed=0, tree_size=None, beams=None, stop=(), batch_size=None,
             on_tokens=None, encoding=None, graph=True):
    """Continues prompts (lists of token ids) with the model's own tokens -> `Output`: the same with
    any heads, lookup, tree or batch size, up to ties, which half precision on a GPU makes.

    lookup      drafts from the text itself, too
    tree_size   nodes T verified per step, root included; 1: plain decoding; None: each step takes
                what brings most tokens per second
    beams       W, default about the square root of the heads' nodes
    stop        token ids and, with an `encoding` to read them by, texts that end a sequence
    batch_size  sequences decoded together, default up to 8; the next prompt follows a finished one
    on_tokens   called as on_tokens(index, tokens) with the tokens of each step
    graph       on CUDA, replay a CUDA graph
    Raises InputError for bad input, Interrupted on Ctrl-C."""
    engine = prepare(model, prompts, max_new_tokens, heads, lookup=lookup, tree_size=tree_size,
                     beams=beams, batch_size=batch_size, graph=graph, temperature=temperature,
                     top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    on_step = on_tokens and (lambda index, tokens, path, plan: on_tokens(index, tokens))
    return engine.generate(prompts, max_new_tokens, stop, on_step, encoding)


def prepare(model, prompts, max_new_tokens, heads=None, *, lookup=False, tree_size=None, beams=None,
            batch_size=None, graph=True, policy=None, threads=None, times_file=None, **sampling):
    """The Engine that `generate` runs, with the same arguments. policy: what selects each step's
    plan, default as tree_size says. threads, times_file: see `tools.tune.fit`."""
    sampling = Sampling(**sampling)
    check("max new tokens", max_new_tokens, 1, 2**31, whole=True)
    check_prompts(model, prompts)
    capacity = max(min(len(prompt) + max_new_tokens, model.config.block_size) for prompt in prompts)
    batch_size = min(len(prompts), DEFAULT_BATCH if batch_size is None else batch_size)
    adapts = tree_size is None and (lookup or (heads and heads.info.get("acceptance")))
    if tree_size is None and not adapts:
        tree_size = DEFAULT_TREE if heads else 1
    fitted = policy is None and (adapts or times_file)
    if fitted:
        with needs_folders(", or give a tree_size"):
            from tools.tune import fit, probe
        policy = fit(model, heads, lookup, batch_size, sampling, tree_size=tree_size, beams=beams,
                     threads=threads, file=times_file)
    policy = policy or FixedPolicy(fixed_plan(tree_size, heads, lookup))
    engine = Engine(model, heads, policy=policy, batch_size=batch_size, capacity=capacity,
                    beams=beams, sampling=sampling, graph=graph)
    if fitted:
        probe(engine)
    return engine


if __name__ == "__main__":
    from tools.cli import command, generate_main
    command(generate_main)
