"""The generation loop: `Engine.step`, continuous batching around it, `generate()`, and a command line.

    python generate.py --prompt "def fibonacci(n):"
    python generate.py --prompt "import os" --temperature 0.8 --top-p 0.9 --compare
    python generate.py --prompt "import os" --explain
    python generate.py --model FOLDER --chat              a conversation, if the folder has a chat template

A tree is drafted by the heads, by lookup in the text itself, or by both: a `Variant`. Plain decoding is the same loop
with trees of one node. Which variant drafted never shows in the text, so each step may take another. On CUDA the step
of each is captured in a graph once and replayed, and the host reads a step's tokens while the next step runs.

Letters: B slots, T tree nodes, K draft heads, P nodes of the longest path, C hidden size, V vocabulary.
"""

import json
import math
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from clover import MAX_TREE, Tree, root_tree
from kernels import accept_path, commit_path, gumbel_argmax, lookup, merge_chain, nucleus, runs_triton, unchecked
from model import InputError, KVCache, check_memory, needs_folder, pack, warn_of_emulation

STAGES = ("draft", "verify", "sample", "accept", "commit")
PREFILL_CHUNK = 512  # prompt tokens per pass, which bounds its memory; and per gap between two steps
DEFAULT_BATCH = 8    # slots, where no batch size is given
DEFAULT_TREE = 5     # nodes, for heads without an acceptance table


class Variant(NamedTuple):
    """How many nodes of a step's tree the heads guess, and how many tokens lookup, as a chain; with neither it is plain
    decoding. In the tree stand the root, the heads' guesses, and what of the chain is not among them."""
    heads: int = 0
    lookup: int = 0

    @property
    def tree_size(self):
        return 1 + self.heads + self.lookup

    def __str__(self):
        return " + ".join(f"{name} {n}" for name, n in self._asdict().items() if n) or "plain"


class Fixed:
    """The choice of one variant for all steps; `tools.tune.Choice` chooses among several."""

    def __init__(self, variant):
        self.variants = (variant,)

    def pick(self, unread):
        return self.variants[0]

    def learn(self, variant, found, unread):
        pass


class Engine:
    """Decodes prompts in B slots. Reusable for any prompts that fit its capacity.

    capacity: the most tokens of a sequence, prompt included; default: the model's context. tree_size: T, 1 for plain
    decoding; lookup: drafts from the text itself, too. beams: W, default about the square root of the heads' nodes.
    choice: what picks each step's variant, in the place of a fixed tree, see `tools.tune.Choice`. sampling: a
    `Sampling`, default greedy. graph: on CUDA, capture each variant's step once and replay it.
    Raises InputError for sizes out of range and for caches that the memory has no room for.
    """

    @torch.inference_mode()
    def __init__(self, model, heads=None, *, batch_size=1, capacity=None, tree_size=1, lookup=False, beams=None,
                 choice=None, sampling=None, graph=True):
        check("batch size", batch_size, 1, 2**16, whole=True)
        check_beams(model, heads, 1 if beams is None else beams)
        self.model, self.sampling, self.batch_size = model, sampling or Sampling(), batch_size
        self.choice, self.given_beams = choice or Fixed(tree_variant(tree_size, heads, lookup)), beams
        self.variants = self.choice.variants
        self.heads = heads = heads if any(variant.heads for variant in self.variants) else None
        self.drafting = self.variants[0]  # the variant that was last picked
        self.tree_size = max(variant.tree_size for variant in self.variants)
        self.capacity = model.config.block_size if capacity is None else capacity
        check("capacity", self.capacity, 1, model.config.block_size, whole=True)
        warn_of_emulation(model.dtype, model.device)
        for module in (model, heads) if heads else (model,):
            pack(module, model.group)
        device, P = model.device, max(map(self.max_path, self.variants))
        self.offsets = torch.arange(P, device=device)
        self.chain = (2 << self.offsets) - 1  # ancestors in a path, a tree without branches: node j sees nodes 0..j
        self.buffers = new_slots(model, heads, batch_size, self.capacity, self.tree_size, P)
        self.set_active_slots(batch_size)
        self.kept_text, self.kept_read = [], 0  # with one slot: what a call with keep=True left in the caches
        self.steps_ahead = 0   # steps in flight while the host reads an earlier one
        self.graphs = {}       # variant -> (its step's result, a function that replays the step)
        if device.type == "cuda":
            self.steps_ahead, width = 1, 2 * P + 2 + max(variant.lookup for variant in self.variants)
            self.pinned = [torch.zeros(batch_size * width, dtype=torch.int64, pin_memory=True) for _ in range(2)]
            self.written = [torch.cuda.Event() for _ in range(2)]
            if graph and runs_triton(self.slots.root):  # torch's references of the kernels read values back
                pool = torch.cuda.graph_pool_handle()
                for variant in self.variants:
                    self.graphs[variant] = capture(self.body(variant), device, pool)

    def max_path(self, variant):
        """P: a path ends with the heads' last depth, or with the chain."""
        return 1 + max(min(self.heads.config.n_draft, variant.heads) if variant.heads else 0, variant.lookup)

    def beams(self, variant):
        """W of the heads' tree."""
        return default_beams(self.heads, variant.heads + 1) if self.given_beams is None else self.given_beams

    def body(self, variant=None):
        """A function that runs one step of a variant, by default the first."""
        variant = variant or self.variants[0]
        return self.graphs[variant][1] if variant in self.graphs else partial(self.step, variant)

    # -----------------------------------------------------------------------------------------------------------------
    # One step of all slots. Every tensor has a fixed shape, state changes in place, nothing is read back to the host.

    def step(self, variant):
        with unchecked(variant in self.checked):            # shapes are fixed: checked in the first step alone
            tree, chain = self.draft(variant)               # tokens, parents, depths, ancestors: [B, T]; see draft
            hidden = self.verify(tree)                      # [B, T, C]; keys and values go to cache rows lengths..
            target = self.sample(tree, hidden)              # [B, T]: the model's own next token at every node
            accepted = self.accept(variant, tree, target)   # [B, 2P + 2]: emitted tokens, path, count, last of the path
            self.commit(variant, hidden, accepted)
        self.checked.add(variant)
        return accepted if chain is None else torch.cat((accepted, chain), dim=1)  # all that the host reads

    def draft(self, variant):
        """-> (the tree, lookup's chain [B, n] where both drafted: of that the path does not tell how much was right)"""
        tree, slots = self.plain_tree, self.slots
        if variant.heads:
            tree = self.heads.draft(slots.state, slots.root, variant.heads + 1, self.beams(variant))
        if not variant.lookup:
            return tree, None
        chain = lookup(slots.history, slots.cache.lengths, variant.lookup)
        return Tree(*merge_chain(*tree, chain)), chain if variant.heads else None

    def verify(self, tree):
        positions = self.slots.cache.lengths[:, None] + tree.depths
        # nodes past the context's end are never emitted, but a learned position must exist for them
        positions = positions.clamp(max=self.model.config.block_size - 1)
        return self.model(tree.tokens, positions, self.slots.cache, tree.ancestors)

    def sample(self, tree, hidden):
        (B, T, C), s = hidden.shape, self.sampling
        hidden = self.model.norm(hidden).view(B * T, C)
        sequence = self.slots.sequence[:, None].expand(B, T).reshape(-1)
        position = (self.slots.cache.lengths[:, None] + tree.depths + 1).reshape(-1)
        if not s.filtered:
            return self.model.head.sample(hidden, s.temperature, s.seed, sequence, position).view(B, T)
        logits = keep_likely(self.model.head.logits(hidden) / s.temperature, s.top_k, s.top_p, s.min_p)  # (B * T, V)
        return gumbel_argmax(logits, 1.0, s.seed, sequence, position).view(B, T)

    def accept(self, variant, tree, target):
        return accept_path(*tree, target, self.slots.active, self.max_path(variant))

    def commit(self, variant, hidden, accepted):
        """Keeps the path's cache rows, appends its tokens to the history, lets the heads read it, and makes the bonus
        token the next root. Rows that are written from `count` on are junk, which the next step overwrites. Where the
        heads drafted nothing they read nothing: the hidden states wait for `let_heads_read`."""
        slots, lengths, P = self.slots, self.slots.cache.lengths, self.max_path(variant)
        emitted, path, count, last = accepted.split((P, P, 1, 1), dim=1)  # the accepted guesses, then the bonus token
        positions = None if slots.history is None else lengths[:, None] + self.offsets[:P]
        if variant.heads:  # else the path's nodes stand in the first rows
            commit_path(slots.cache.kv, lengths, path, count[:, 0])
            hidden = hidden.gather(1, path[:, :, None].expand(-1, -1, hidden.shape[2]))  # (B, P, C)
            ancestors = self.chain[:P].expand_as(positions)
            states = self.heads.augment(hidden, emitted, positions, slots.heads_cache, ancestors)
            torch.gather(states, 1, last[:, :, None].expand(-1, 1, states.shape[2]), out=slots.state[:, None])
        elif self.heads:
            slots.hidden.scatter_(1, positions[:, :, None].expand_as(hidden), hidden)
        if positions is not None:
            slots.history[:, 1:].scatter_(1, positions, emitted.int())
        torch.gather(emitted, 1, last, out=slots.root[:, None])
        lengths += count[:, 0]

    # -----------------------------------------------------------------------------------------------------------------
    # Continuous batching: prompts wait, are admitted to free slots, run, and retire

    @torch.inference_mode()
    def generate(self, prompts, max_new_tokens, stop=(), on_tokens=None, encoding=None, keep=False, on_step=None):
        """Continues prompts (lists of token ids) -> `Output`.

        stop: token ids and, with an `encoding`, texts that end a sequence; the token that does it is kept.
        on_tokens(index, tokens) is called with the tokens of each step. on_step(index, tokens, path, variant) also
        tells the accepted nodes, root first, of which those behind variant.heads are lookup's alone.
        keep: for one prompt in one slot, as in a chat. What the prompt has in common with the text of the last call
        that kept it is not computed again; the model must be the same still.
        Raises InputError for what cannot be decoded, Interrupted on Ctrl-C.
        """
        check("max new tokens", max_new_tokens, 1, 2**31, whole=True)
        check_prompts(self.model, prompts)
        stop, context = check_stops(stop, encoding), self.model.config.block_size
        sequences = [Sequence(i, prompt, max_new_tokens, context, stop, encoding) for i, prompt in enumerate(prompts)]
        longest = max(len(s.prompt) + s.limit for s in sequences)
        if longest > self.capacity:
            raise InputError(f"a text of {longest} tokens does not fit an engine made for {self.capacity}; "
                             "make a larger one")
        if keep and (self.batch_size, len(prompts)) != (1, 1):
            raise InputError(f"keep is for one prompt in one slot, not for {len(prompts)} in {self.batch_size}")
        self.kept_text = self.kept_text if keep else []
        output = Output([s.tokens for s in sequences], [], tree_size=self.tree_size, batch_size=self.batch_size)

        def emit(sequence, tokens, path, variant):
            tokens = sequence.take(tokens)
            output.count(tokens, path, variant)
            if on_step:
                on_step(sequence.index, tokens, path, variant)
            if on_tokens:
                on_tokens(sequence.index, tokens)

        started = time.perf_counter()
        try:
            self.run(sequences, emit)
        except KeyboardInterrupt:
            raise Interrupted(output) from None
        finally:
            output.seconds = time.perf_counter() - started
            output.ended = [s.ended for s in sequences]
            self.kept_text = [*prompts[0], *output.tokens[0]] if keep and output.tokens[0] else []
            self.kept_read = sequences[0].read
            if len(self.slots.root) < self.batch_size:  # never with a graph, whose tensors must stay where they are
                self.set_active_slots(self.batch_size)
            for slot in range(self.batch_size):
                self.release(slot)
        return output

    def run(self, sequences, emit):
        self.waiting, self.free = deque(sequences), deque(range(self.batch_size))
        self.filling = None       # (slot, sequence, where the next chunk of its prompt starts)
        self.running = {}         # slot -> sequence
        self.in_flight = deque()  # steps not read yet: (variant, function that waits for it, `running`, unread)
        while self.waiting or self.filling or self.running:
            self.admit()
            self.compact_slots()
            unread = self.unread() if self.heads else []
            if self.running:
                self.drafting = self.choice.pick(unread)
            # the host must know the tokens of steps without the heads before the heads can read them
            ready = not self.drafting.heads or all(launched.heads for launched, *_ in self.in_flight)
            if self.running and ready:
                for slot, sequence in self.running.items() if self.drafting.heads else ():
                    self.let_heads_read(slot, sequence, sequence.length)
                self.in_flight.append((self.drafting, self.launch(self.drafting), dict(self.running), unread))
            if len(self.in_flight) > (self.steps_ahead if ready else 0):
                self.retire(emit)

    def unread(self):
        """How many tokens the heads have not read: of each running sequence, and of the prompt that is coming in."""
        coming = [end - sequence.read for _, sequence, end in filter(None, [self.filling])]
        return [sequence.length - sequence.read for sequence in self.running.values()] + coming

    def admit(self):
        """Fills free slots with waiting prompts, about PREFILL_CHUNK tokens at a time: the others go on between."""
        budget = PREFILL_CHUNK
        while budget > 0 and (self.filling or (self.waiting and self.free)):
            if not self.filling:
                sequence = self.waiting.popleft()
                start = self.reusable_prefix(sequence.prompt)
                sequence.read = min(start, self.kept_read)
                self.filling = self.free.popleft(), sequence, start
            slot, sequence, start = self.filling
            end = self.prefill(slot, sequence, start)
            budget -= max(end - start, 1)
            self.filling = slot, sequence, end
            if end == len(sequence.prompt) - 1:
                self.slots.sequence[slot].fill_(sequence.index)  # on a GPU, [slot] = index would wait for it
                self.slots.active[slot].fill_(1)
                self.running[slot], self.filling = sequence, None

    def prefill(self, slot, sequence, start):
        """Reads the next chunk of a prompt, from token `start`, into a slot -> where the chunk after it starts.

        The prompt's last token is not read here: it is the root of the first step, which is then like any other. Steps
        between two chunks write their trees behind the rows that are there, where the next chunk goes.
        """
        prompt, slots = sequence.prompt, self.slots
        end = min(start + PREFILL_CHUNK, len(prompt) - 1)
        tokens = torch.tensor([prompt[start:end + 1]])
        if self.model.device.type == "cuda":
            tokens = tokens.pin_memory().to(self.model.device, non_blocking=True)
        if start == 0:
            slots.cache.lengths[slot].zero_()
            if self.heads:
                slots.state[slot].zero_()
        if end > start:
            hidden = self.model.prefill(tokens[:, :-1], slots.cache.slots(slot), start)
            if self.heads:
                slots.hidden[slot, start:end] = hidden[0]
        if slots.history is not None:
            slots.history[slot, start:end + 1] = tokens[0]
        if self.drafting.heads:  # else when they draft, if they do
            self.let_heads_read(slot, sequence, end)
        slots.root[slot] = tokens[0, -1]
        return end

    @torch.inference_mode()
    def let_heads_read(self, slot, sequence, length):
        """The heads read of a text's first `length` rows what they have not read yet: a prompt, and the tokens of steps
        without the heads."""
        slots = self.slots
        for start in range(sequence.read, length, PREFILL_CHUNK):
            end = min(start + PREFILL_CHUNK, length)
            tokens = slots.history[slot, None, start + 1:end + 1].long()
            positions = torch.arange(start, end, device=tokens.device)[None]
            states = self.heads.augment(slots.hidden[slot, None, start:end], tokens, positions,
                                        slots.heads_cache.slots(slot), end=end)
            slots.state[slot] = states[0, -1]
        sequence.read = length

    @torch.inference_mode()
    def launch(self, variant):
        """Starts one step -> a function that waits for it and returns its result as lists, one per slot."""
        if variant in self.graphs:
            result, replay = self.graphs[variant]
            replay()
        else:
            result = self.step(variant)
        if self.model.device.type != "cuda":
            result = result.tolist()
            return lambda: result
        pinned, written = self.pinned[0][:result.numel()].view(result.shape), self.written[0]
        pinned.copy_(result, non_blocking=True)
        written.record(torch.cuda.current_stream(self.model.device))
        self.pinned.reverse()
        self.written.reverse()

        def wait():
            written.synchronize()
            return pinned.tolist()
        return wait

    def retire(self, emit):
        """Reads the oldest step in flight, emits its tokens, and frees the slots of the texts that end with it."""
        variant, wait, started_with, unread = self.in_flight.popleft()
        result, P, found = wait(), self.max_path(variant), []
        for slot, sequence in started_with.items():
            if self.running.get(slot) is not sequence:
                continue  # the text ended a step earlier, when this step was already in flight
            count = result[slot][2 * P]
            tokens, path = result[slot][:count], result[slot][P:P + count]
            found.append((tokens, path, result[slot][2 * P + 2:] or None))
            if variant.heads:
                sequence.read = sequence.length + count  # before emit, which Ctrl-C may end
            emit(sequence, tokens, path, variant)
            if sequence.ended:
                del self.running[slot]
                self.release(slot)
                self.free.append(slot)
        self.choice.learn(variant, found, unread)

    def release(self, slot):
        """Idle slots still run because shapes are fixed, on an empty sequence; their output is discarded."""
        self.slots.active[slot].zero_()
        self.slots.cache.lengths[slot].zero_()

    def set_active_slots(self, n):
        """Lets only the first n slots run. `slots` are views of the buffers."""
        self.slots, self.checked = self.buffers.first(n), set()
        self.plain_tree = root_tree(self.slots.root)  # a view of the root: it stays up to date

    def compact_slots(self):
        """With no prompt left to admit, moves the running sequences to the first slots and runs only these: a CPU needs
        as long for an idle slot as for a busy one. On a GPU a graph needs every tensor to stay where it is."""
        if self.steps_ahead or self.waiting or self.filling or not 0 < len(self.running) < len(self.slots.root):
            return
        for free in range(len(self.running)):
            if free not in self.running:
                source = max(self.running)
                self.buffers.move(source, free)
                self.running[free] = self.running.pop(source)
        self.set_active_slots(len(self.running))

    def reusable_prefix(self, prompt):
        """How many of a prompt's first rows `keep` left in the caches. The heads' row of a token depends on the token
        after it, and the prompt's last but one token must run, for the heads' state."""
        text = self.kept_text
        same = next((i for i, (a, b) in enumerate(zip(text, prompt)) if a != b), min(len(text), len(prompt)))
        return max(min(same - 1, len(prompt) - 2), 0)


# ---------------------------------------------------------------------------------------------------------------------
# What the engine works on

@dataclass
class Slots:
    """The state of B sequences, one per slot."""
    cache: KVCache
    heads_cache: KVCache | None     # the augmenting block's; its lengths are the cache's
    root: torch.Tensor              # int64 [B]
    state: torch.Tensor | None      # [B, C]: what the heads draft from
    hidden: torch.Tensor | None     # [B, S, C]: the model's hidden states, of rows that the heads have not read
    history: torch.Tensor | None    # int32 [B, S]: the text, of which root is the last; not for plain decoding alone
    sequence: torch.Tensor          # int64 [B]: which text this is; the noise is a function of it
    active: torch.Tensor            # int32 [B]: 0 for an idle slot

    def first(self, n):
        """Views of the first n slots."""
        return Slots(*(x if x is None else x.slots(0, n) if isinstance(x, KVCache) else x[:n]
                       for x in vars(self).values()))

    def move(self, source, free):
        """Copies slot `source` to slot `free`."""
        n = int(self.cache.lengths[source])
        for cache in filter(None, (self.cache, self.heads_cache)):
            cache.kv[:, :, free, :, :n] = cache.kv[:, :, source, :, :n]
        for tensor in (self.hidden, self.history):
            if tensor is not None:
                tensor[free, :n + 1] = tensor[source, :n + 1]
        for tensor in (self.cache.lengths, self.root, self.state, self.sequence, self.active):
            if tensor is not None:
                tensor[free] = tensor[source]


def new_slots(model, heads, batch_size, capacity, tree_size, max_path):
    """Empty `Slots`. The tree's rows stand behind the text's. On a GPU the host learns of a text's end a step late, so
    one more path must fit."""
    zeros = lambda dtype, *shape: torch.zeros(batch_size, *shape, dtype=dtype, device=model.device)
    cache, heads_cache, C = model.new_cache(batch_size, capacity + tree_size + max_path), None, model.config.n_embd
    if heads:
        heads_cache = heads.new_cache(batch_size, capacity + 2 * max_path)
        heads_cache.lengths = cache.lengths
        size = batch_size * (capacity + 2 * max_path) * C * model.dtype.itemsize
        check_memory(f"the hidden states of {batch_size} sequences of {capacity} tokens take", size, model.device,
                     "take a smaller batch size or fewer new tokens", model.group)
    return Slots(cache, heads_cache, root=zeros(torch.int64), sequence=zeros(torch.int64), active=zeros(torch.int32),
                 state=zeros(model.dtype, C) if heads else None,
                 hidden=zeros(model.dtype, capacity + 2 * max_path, C) if heads else None,
                 history=zeros(torch.int32, capacity + 2 * max_path + 1) if tree_size > 1 else None)


def capture(body, device, pool=None):
    """Records what body() does on a GPU in a CUDA graph -> (what body returned, a function that replays it). Graphs of
    one pool share memory: what one returned must be copied before another runs."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # compiles and allocates whatever the first call does
                body()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = body()
    return result, graph.replay


def tree_variant(tree_size, heads, lookup):
    """The `Variant` of T nodes. Of the guesses of both drafters, lookup has half. InputError for a T out of range."""
    check("tree size", tree_size, 1, MAX_TREE, whole=True)
    if tree_size == 2 and heads and lookup:
        raise InputError("a tree of 2 nodes has no room for guesses of both heads and lookup; give a tree size of 3 or "
                         "more, or one of the two")
    if not heads:
        return Variant(0, tree_size - 1 if lookup else 0)
    chain = (tree_size - 1) // 2 if lookup else 0
    return Variant(tree_size - 1 - chain, chain)


def most_beams(model, heads):
    """The largest W: project_topk gives at most 32 tokens, and no more than the draft vocabulary has."""
    return min(32, heads.config.vocabulary or model.config.vocab_size) if heads else 32


def default_beams(heads, tree_size):
    """W about the square root of T, so that a tree can be wide or deep."""
    return min(math.isqrt(tree_size - 1) + 1, most_beams(heads.model, heads)) if heads else 1


def check_beams(model, heads, beams):
    """Raises InputError for a W that is out of range, and names the draft vocabulary where that sets the limit."""
    most = most_beams(model, heads)
    limited = heads and heads.config.vocabulary == most
    check(f"beams for a draft vocabulary of {most} token ids" if limited else "beams", beams, 1, most, whole=True)


# ---------------------------------------------------------------------------------------------------------------------
# Sampling and accepting

@dataclass(frozen=True)
class Sampling:
    """How the target tokens are sampled. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 keep every token."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self):
        check("temperature", self.temperature, 0, 1e4)
        if 0 < self.temperature < 1e-6:
            raise InputError(f"temperature must be 0, which is greedy, or at least 1e-06, not {self.temperature!r}")
        check("top-k", self.top_k, 0, 2**31, whole=True)
        check("top-p", self.top_p, 0, 1, above=True)
        check("min-p", self.min_p, 0, 1)
        check("seed", self.seed, -2**63, 2**63 - 1, whole=True)

    @property
    def filtered(self):
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def keep_likely(logits, top_k=0, top_p=1.0, min_p=0.0):
    """logits [M, V] with these tokens at -inf: those outside the top_k, then those outside the nucleus of mass top_p
    (arXiv 1904.09751), then those under min_p times the likeliest token's probability (arXiv 2407.01082). The likeliest
    token always stays, and so do tokens that tie with the last one kept."""
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)
    if top_p < 1:
        logits = logits.masked_fill(logits < nucleus(logits, top_p)[:, None], -math.inf)
    if min_p > 0:
        logits = logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) + math.log(min_p), -math.inf)
    return logits


# ---------------------------------------------------------------------------------------------------------------------
# Texts

class Sequence:
    """One prompt and the text that grows from it. ended: None, "stop" (a stop token or text), "length" (max_new_tokens)
    or "context" (the model's is full)."""

    def __init__(self, index, prompt, max_new_tokens, context, stop, encoding):
        self.index, self.prompt, self.tokens, self.ended = index, prompt, [], None
        self.read = 0  # cache rows that the heads have read
        self.limit = min(max_new_tokens, context - len(prompt))
        self.at_limit = "length" if self.limit == max_new_tokens else "context"
        self.stop_tokens = {s for s in stop if not isinstance(s, str)}
        stop_texts = [s for s in stop if isinstance(s, str)]
        self.stream = TextStream(encoding, stop_texts) if stop_texts else None

    @property
    def length(self):
        """Its cache rows: all tokens but the last, which is the root."""
        return len(self.prompt) + len(self.tokens) - 1

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


class TextStream:
    """Text from token ids as they come: whole characters only, and nothing of a stop text or what may become one.

    In sum it is what decoding all ids at once gives, but for a space that some decoders take off the start of a text.
    encoding: any object with decode(ids) and encode_ordinary(text).
    """

    def __init__(self, encoding, stop_texts=()):
        self.decode, self.stop_texts, self.held, self.stopped = encoding.decode, stop_texts, "", False
        self._decode_behind(encoding.encode_ordinary("a"))  # any token: behind it, a space at the start stays

    def _decode_behind(self, context):
        """The ids of `context` are shown; the next ids are decoded behind them."""
        self.context, self.pending, self.shown = context, [], self.decode(context)

    def feed(self, tokens):
        """The text that these ids complete."""
        return self._release("".join(map(self._completed, tokens)))

    def finish(self):
        """The rest, at the end of a text."""
        rest = self._release(self.decode(self.context + self.pending)[len(self.shown):])
        rest, self.held = rest + self.held, ""
        return rest

    def _completed(self, token):
        self.pending.append(token)
        text = self.decode(self.context + self.pending)
        # a character that is not complete decodes to U+FFFD; so do bytes that never will be one
        complete = text if len(self.pending) > 16 else text.rstrip("\N{REPLACEMENT CHARACTER}")
        new = complete[len(self.shown):]
        if new and complete == text:
            self._decode_behind(self.pending)
        elif new:
            self.shown = complete
        return new

    def _release(self, text):
        """Holds back from the first stop text on, and what may be the beginning of one."""
        if self.stopped:
            return ""
        self.held += text
        found = [i for stop in self.stop_texts if (i := self.held.find(stop)) >= 0]
        if found:
            self.stopped = True
            text, self.held = self.held[:min(found)], ""
            return text
        begun = (n for stop in self.stop_texts for n in range(1, len(stop)) if self.held.endswith(stop[:n]))
        end = len(self.held) - max(begun, default=0)
        text, self.held = self.held[:end], self.held[end:]
        return text


@dataclass
class Output:
    """What decoding returns. tokens: the new tokens of each prompt, in the order of the prompts; ended: why each text
    ended, see `Sequence`, None where it was interrupted."""
    tokens: list
    ended: list
    steps: int = 0                                          # verify steps, summed over the sequences
    seconds: float = 0.0                                    # wall time, prefill included
    step_lengths: Counter = field(default_factory=Counter)  # n -> how many steps emitted n tokens
    accepted: Counter = field(default_factory=Counter)      # "heads", "lookup" -> how many tokens it guessed
    variants: dict = field(default_factory=dict)            # Variant -> [its steps, their tokens]
    tree_size: int = 1                                      # T, the largest
    batch_size: int = 1                                     # B

    def count(self, tokens, path, variant):
        """Counts one step. A token was guessed by the node after its own in the path; the last is the model's own."""
        self.steps += 1
        self.step_lengths[len(tokens)] += 1
        for node in path[1:len(tokens) + 1]:
            self.accepted["lookup" if node > variant.heads else "heads"] += 1
        taken = self.variants.setdefault(variant, [0, 0])
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


# ---------------------------------------------------------------------------------------------------------------------
# Checks

def check(name, value, low, high, whole=False, above=False):
    """Raises InputError for a value that is no number from low to high (above low, with `above`), NaN included."""
    kind = int if whole else (int, float)
    if not isinstance(value, kind) or isinstance(value, bool) or not low <= value <= high or (above and value == low):
        raise InputError(f"{name} must be {'a whole number' if whole else 'a number'} "
                         f"{f'above {low} and at most' if above else f'from {low} to'} {high}, not {value!r}")


def check_prompts(model, prompts):
    c = model.config
    if not prompts:
        raise InputError("no prompt was given; give at least one")
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, (list, tuple)):
            raise InputError(f"prompt {i} must be a list of token ids, not {prompt!r}")
        if not len(prompt):
            raise InputError(f"prompt {i} is empty; it needs at least one token")
        if len(prompt) >= c.block_size:
            raise InputError(f"prompt {i} has {len(prompt)} tokens; the model's context of {c.block_size} leaves room "
                             f"for at most {c.block_size - 1} and one new token: shorten the prompt")
        if min(prompt) < 0 or max(prompt) >= c.vocab_size:
            raise InputError(f"prompt {i} has token ids outside 0..{c.vocab_size - 1}; is this the model's own "
                             "tokenizer?")


def check_stops(stop, encoding):
    """stop as a tuple of token ids and texts that can be looked for."""
    stop = (stop,) if isinstance(stop, (int, str)) else tuple(stop)
    for s in stop:
        if isinstance(s, bool) or not isinstance(s, (int, str)) or s == "":
            raise InputError(f"stop must hold token ids and texts that are not empty, not {s!r}")
        if isinstance(s, str) and encoding is None:
            raise InputError(f"stop text {s!r} cannot be seen in token ids alone; give encoding=, the model's "
                             "tokenizer")
    return stop


# ---------------------------------------------------------------------------------------------------------------------
# The call

def generate(model, prompts, max_new_tokens, heads=None, *, lookup=False, temperature=0.0, top_k=0, top_p=1.0,
             min_p=0.0, seed=0, tree_size=None, beams=None, stop=(), batch_size=None, on_tokens=None, encoding=None,
             graph=True):
    """Continues prompts (lists of token ids) with the model's own tokens: the same with any heads, lookup, tree or
    batch size, up to ties of the model's best two, which half precision on a GPU makes.

    lookup: drafts from the text itself, too. tree_size: nodes T verified per step, root included, 1 for plain decoding;
    None lets each step take what brings most tokens per second, by step times that are measured first. beams: W,
    default about the square root of the heads' nodes. stop: token ids and, with an `encoding` to read them by, texts
    that end a sequence; the token that does it is kept. batch_size: sequences decoded together, default up to 8; a
    finished one makes room for the next prompt. on_tokens(index, tokens) is called with the tokens of each step. graph:
    on CUDA, replay the step from a CUDA graph.
    Returns `Output`. Raises InputError for what cannot be decoded, Interrupted on Ctrl-C.
    """
    engine = prepare(model, prompts, max_new_tokens, heads, lookup=lookup, tree_size=tree_size, beams=beams,
                     batch_size=batch_size, graph=graph, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
                     seed=seed)
    return engine.generate(prompts, max_new_tokens, stop, on_tokens, encoding)


def prepare(model, prompts, max_new_tokens, heads=None, *, lookup=False, tree_size=None, beams=None, batch_size=None,
            graph=True, choice=None, times_file=None, fresh=False, **sampling):
    """The Engine that `generate` runs these prompts on, with the same arguments. choice: what picks each step's
    variant, by default as tree_size says. times_file: where the step times that variants are chosen by are kept, see
    tools/tune.py; fresh: measure them again."""
    sampling = Sampling(**sampling)
    check("max new tokens", max_new_tokens, 1, 2**31, whole=True)
    check_prompts(model, prompts)
    capacity = max(min(len(prompt) + max_new_tokens, model.config.block_size) for prompt in prompts)
    batch_size = min(len(prompts), DEFAULT_BATCH if batch_size is None else batch_size)
    if choice is None and tree_size is None and (lookup or (heads and heads.info.get("acceptance"))):
        with needs_folder("tools", ", or give a tree_size"):
            from tools.tune import fit
        choice = fit(model, heads, lookup, batch_size, capacity, sampling, beams, graph, times_file, fresh)
    if tree_size is None:
        tree_size = DEFAULT_TREE if heads else 1
    return Engine(model, heads, batch_size=batch_size, capacity=capacity, tree_size=tree_size, lookup=lookup,
                  beams=beams, choice=choice, sampling=sampling, graph=graph)


# ---------------------------------------------------------------------------------------------------------------------
# Command line

def main(argv=None):
    from tools import cli, ranks
    args = cli.parse(argv)
    with ranks.joined(args, sys.argv[1:] if argv is None else argv) as group:
        answer(cli.open_session(args, group))


def answer(session):
    """Prints what the command line was asked for."""
    from tools import cli, compare, drafts, repl, tune
    args = session.args
    if not args.prompt:
        return repl.converse(session)
    prompts = [session.encode([dict(role="user", content=text)]) for text in session.texts]
    engine = session.engine(prompts, fresh=args.explain)
    if args.compare:
        engine.generate(prompts[:1], min(4, args.max_new_tokens))  # whatever is compiled or loaded, before it is timed
    trees = drafts.Drafts(engine, session) if args.show_tree else None
    printer, interrupted = cli.Printer(session, trees), False
    try:
        output = engine.generate(prompts, args.max_new_tokens, session.stop, encoding=session.encoding,
                                 on_step=printer.show)
    except Interrupted as interrupt:
        output, interrupted = interrupt.output, True
    result, say = session.report(output), (lambda text: None) if args.json else print
    printer.finish(output)
    say(f"\n{cli.statistics(output)}")
    if trees:
        result["drafts"] = trees.steps
        say("\n".join(trees.lines()))
    if args.explain and not interrupted:
        result["explained"] = tune.explain(engine, session.heads, output, not (args.no_graph or trees))
        say("\n" + "\n".join(result["explained"]))
    if args.compare and not interrupted:
        engine = None  # frees its memory for the next one
        result |= compare.against_plain(session, prompts, output, say)
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    try:
        from tools.cli import command
    except ModuleNotFoundError as error:
        sys.exit(f"generate.py: the command line needs {error.name}, which is not here; copy the folders tools/ and "
                 "hf/ here too")
    import generate as module  # not __main__, which would be a second copy of it
    command(module.main)
