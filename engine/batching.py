"""Continuous batching: chunked prefill, prefixes that a slot's cache still holds, prompts that
steps read, grammars, log-probabilities, cancelled sequences, and the durations of steps for the
policy."""

import math
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import compress, count
from operator import ne

import torch

from clover import Tree
from common import machine
from engine.clock import seconds_between, timestamp
from engine.guide import Guide, GuidedSequence
from engine.kept import PROMPT, SHARED, KeptStates
from engine.logprobs import LogProbs
from engine.policy import PERIOD, Policy
from engine.times import long_prompt
from generate import Engine as FifoEngine
from generate import Step, StepResult, decoder_class, to_host
from model import MAX_TREE, check

PREFILL_CHUNK = 512  # prompt tokens per forward pass; bounds its memory and the wait between steps
# where steps read prompts, the tokens that they read of one that has a forward pass of its own
PROMPT_REST = 64


@dataclass(kw_only=True)
class MeasuredStep(Step):
    """A `Step`, and what the policy learns from it beside its results."""
    times: tuple                  # timestamps of its start and end
    pause: tuple | None           # timestamps around the wait for masks
    counts: object                # the policy's `counts` on the host, every PERIOD steps; or None
    grammars: int                 # sequences with a grammar
    logprobs: LogProbs | None     # of the sequences that ask
    is_slow: bool = False         # whether it compiled kernels or captured a graph
    # sequence -> prompt tokens, of those that read the end of their prompt and begin to generate
    reading: dict = field(default_factory=dict)
    # without the wait for masks and the log-probabilities; None if it is slow
    seconds: float | None = None
    mask_seconds: float = 0.0

    def wait(self):
        """Waits until the step has ended, and fills in its durations."""
        super().wait()
        self.mask_seconds = seconds_between(*self.pause) if self.pause else 0.0
        seconds = seconds_between(*self.times) - self.mask_seconds
        if self.logprobs:
            seconds -= seconds_between(*self.logprobs.span)
        self.seconds = None if self.is_slow else seconds


class Engine(FifoEngine):
    """Schedules prompts like `generate.Engine`, and more: a long prompt is read in chunks between
    the steps of other sequences, or by these steps; a prompt goes to the slot whose cache shares
    the longest prefix with it. An engine can be reused for any prompts that fit its capacity.
    Raises InputError if the caches do not fit in memory."""
    sequence_class = GuidedSequence

    def __init__(self, model, heads=None, *, policy=None, batch_size=1, capacity=None, **options):
        policy = policy or Policy(model, heads)
        full = model.config.block_size
        check_memory(model, policy, batch_size, full if capacity is None else capacity)
        super().__init__(model, policy=policy, batch_size=batch_size, capacity=capacity, **options)
        states = self.decoder.slots.cache.states
        self.kept = KeptStates(states.committed) if states else None
        self.long_prompt = long_prompt(model)
        self.launches = 0

    @cached_property
    def guide(self):
        """The `Guide`, made for the first grammar."""
        return Guide(self.decoder)

    def clear(self):
        super().clear()
        # (slot, sequence, next token, end, shared prefix) of the prefill in progress
        self.prefilling = None

    @property
    def busy(self):
        return bool(self.waiting or self.prefilling or self.running)

    @property
    def is_guided(self):
        return any(sequence.matcher for sequence in self.running.values())

    def step(self, with_trees=False):
        """Admits prompts, runs one step of the running sequences and returns its `StepResult`s; on
        a GPU those of the previous step, which the host reads while this one runs. A sequence whose
        step only read its prompt has none."""
        results = []
        with self.decoder.context():
            self.admit()
            is_guided = self.is_guided
            while is_guided and self.in_flight:  # matchers need the tokens of the last step
                results += self.retire(self.in_flight.popleft())
            if self.running:
                self.in_flight.append(self.launch(with_trees))
        keep = self.ahead if self.running and not is_guided else 0
        if len(self.in_flight) > keep:
            results += self.retire(self.in_flight.popleft())
        return results

    # Prompts

    def admit(self):
        """Moves prompts into free slots. Prefills about PREFILL_CHUNK tokens between two steps."""
        decoder = self.decoder
        budget = PREFILL_CHUNK
        while budget > 0 and (self.prefilling or (self.waiting and self.idle)):
            if not self.prefilling:
                sequence = self.waiting.popleft()
                slot, start, shared = best_slot(self.idle, sequence.prompt, self.kept)
                if self.kept:
                    self.kept.restore(slot, start, shared)
                del self.idle[slot]
                sequence.cached = start
                end = self.prefill_end(len(sequence.prompt), start)
                self.prefilling = slot, sequence, start, end, shared
            slot, sequence, start, end, shared = self.prefilling
            stop = min(start + PREFILL_CHUNK, end)
            kept = shared or len(sequence.prompt) - 2  # a new prompt may be sent again
            if self.kept and start < kept < stop:
                stop = kept
            if start < stop:
                decoder.prefill(slot, sequence.prompt, start, stop)
                budget -= stop - start
                if self.kept and stop in (kept, end):
                    self.kept.keep(slot, PROMPT if stop == end else SHARED, stop)
            self.prefilling = slot, sequence, stop, end, shared
            if stop == end:
                sequence.unread = len(sequence.prompt) - 1 - end
                decoder.begin(slot, sequence, end)
                self.running[slot] = sequence
                self.prefilling = None

    def prefill_end(self, length, start):
        """How many tokens of a prompt to read by `prefill`, from token `start` on; steps read the
        rest: its last token, which is their root, or, where they read prompts, more."""
        last = length - 1
        if not self.decoder.read_sizes:
            return last
        return last - PROMPT_REST if last - start > self.long_prompt else start

    # Steps

    def launch(self, with_trees=False):
        decoder = self.decoder
        slots = decoder.place(self.running)
        sequences = list(map(self.running.get, slots))
        top = {row: sequence.top_logprobs for row, sequence in enumerate(sequences)
               if sequence and sequence.top_logprobs is not None}
        logprobs = LogProbs(decoder.head, top) if top else None
        guide = self.guide if self.is_guided else None
        if guide:
            drafts = getattr(self.policy, "schema", False) and self.policy.tree_size != 1
            guide.begin(sequences, drafts)
        chains = guide.chains if guide else ()
        plan = self.plan(len(slots), behind=self.behind, chains=chains,
                         unread=[sequence.unread for sequence in self.running.values()])
        start = timestamp(decoder.device)
        n_slow = decoder.n_slow
        step = decoder.launch(plan, with_trees, partial(run_step, decoder, guide, logprobs))
        self.launches += 1
        is_due = self.launches % PERIOD == 0
        # filled by the time that the next line notes
        counts = to_host(self.policy.counts) if is_due else None
        times = start, timestamp(decoder.device)
        pause = guide.pause if guide else None
        step = MeasuredStep(**vars(step), times=times, pause=pause, counts=counts,
                            grammars=len(chains), logprobs=logprobs,
                            is_slow=decoder.n_slow > n_slow)
        for row, sequence in enumerate(sequences):
            if sequence is None:
                continue  # a row that only fills the batch
            unread = sequence.unread
            sequence.unread -= min(unread, step.tree_size)
            if unread < step.tree_size:  # else the step only reads its prompt
                step.sequences[row] = sequence
                if unread:
                    step.reading[sequence] = unread
        return step

    def behind(self):
        """How many committed rows of the running sequences the heads have not read: none but in C,
        where they read when they draft."""
        lengths, read = (cache.lengths for cache in (self.decoder.slots.cache,
                                                     self.decoder.slots.heads_cache))
        return 0 if read is lengths else int((lengths - read)[[*self.running]].sum())

    def result(self, step, row, sequence, tokens, path, sources):
        read = step.reading.get(sequence, 0)  # known tokens, which the step accepted
        if read:
            tree = step.tree and Tree([sequence.prompt[-1]], [0], [0], [1], [-1], [1.0])
            result = StepResult(sequence, sequence.take(tokens[read:]), path[read:], sources[read:],
                                1, tree)
        else:
            result = super().result(step, row, sequence, tokens, path, sources)
        if sequence.top_logprobs is None:
            return result
        logprobs = step.logprobs.of(row, slice(read, read + len(result.tokens)))
        sequence.logprobs += logprobs
        return result._replace(logprobs=logprobs)

    def free(self, sequence):
        """Frees a slot, whose cache keeps the sequence except for the last token."""
        del self.running[sequence.slot]
        tokens = [*sequence.prompt, *sequence.tokens]
        self.keep_prefix(sequence.slot, tokens[:len(tokens) - sequence.unread])

    def keep_prefix(self, slot, tokens):
        self.idle[slot] = tokens
        self.decoder.release(slot, max(len(tokens) - 1, 0))

    @torch.inference_mode()
    def grown(self, capacity):
        """An engine of a larger capacity, with what this one has learnt and the prefixes that its
        caches hold. Neither runs any sequence."""
        old = self.decoder
        engine = Engine(old.model, policy=self.policy, batch_size=old.batch_size, beams=old.beams,
                        capacity=capacity, sampling=old.sampling)
        new = engine.decoder
        for mine, theirs in zip(caches(new), caches(old)):
            mine[..., :theirs.shape[-2], :] = theirs
        if self.kept:
            engine.kept.copies, engine.kept.lengths = self.kept.copies, self.kept.lengths
        # else the heads would read these rows again
        new.slots.heads_cache.lengths.copy_(old.slots.heads_cache.lengths)
        engine.idle = self.idle
        return engine

    def cancel(self, sequence):
        """Ends a sequence, waiting or in a slot, between two steps."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if self.prefilling and self.prefilling[1] is sequence:
            slot, _, start, _, shared = self.prefilling
            if self.kept and start:
                self.kept.keep(slot, PROMPT, start)
            rows = max(start, shared)  # those up to `shared` are in the cache, read again or not
            self.keep_prefix(slot, sequence.prompt[:rows + 1] if rows else ())
            self.prefilling = None
        if sequence in self.running.values():
            self.free(sequence)
        sequence.ended = sequence.ended or "cancelled"


def run_step(decoder, guide, logprobs, plan):
    """`Decoder.step` with masks between its parts and log-probabilities after them, where there is
    a `Guide`, or a `LogProbs`."""
    step = guide.step(decoder, plan) if guide else decoder.run(decoder.step, plan)
    if logprobs:
        accepted, _, normed = step
        logprobs.read(normed, accepted)
    return step


def caches(decoder):
    """What a decoder keeps of its slots' tokens, a row for each in the dimension before the
    last."""
    unread = getattr(decoder, "hidden_rows", None)  # in C: by the heads
    kept = [decoder.slots.cache.kv, decoder.slots.heads_cache.kv]
    return kept if unread is None else [*kept, unread]


def check_memory(model, policy, batch_size, capacity):
    """Raises InputError for sizes out of range, and if memory is short for a `Decoder`'s caches."""
    check("batch size", batch_size, 1, 2**16, whole=True)
    check("capacity", capacity, 1, model.config.block_size, whole=True)
    largest = max(policy.largest, *decoder_class(model, policy.heads).read_sizes, 1)
    rows = capacity + 2 * largest  # a path and a tree
    cache = model.new_cache(batch_size, rows, device="meta", nodes=largest)
    size = bytes_beside(model, policy.heads, batch_size, rows, largest) + cache.kv.nbytes
    if cache.states:
        size += sum(x.nbytes for x in (*cache.states, *2 * cache.states.committed))  # two are kept
    if policy.heads:
        size += policy.heads.new_cache(batch_size, rows, device="meta").kv.nbytes
    machine.check_memory(f"a cache of {batch_size} sequences of {rows} tokens takes", size,
                         model.device, "use a smaller batch size or fewer new tokens",
                         getattr(model.head, "group", None))


def bytes_beside(model, heads, batch_size, rows, nodes):
    """Bytes that an engine may take beside its caches: for the masks of grammars, longer position
    tables, and on a CPU the hidden states that heads have yet to read."""
    config = model.config
    masks = batch_size * (nodes + 1) * 4 * math.ceil(config.vocab_size / 32)
    positions = min(rows, config.block_size + MAX_TREE)
    own = getattr(heads, "rotations", None)  # of heads in drafters/
    tables = sum(x[0].nbytes * max(positions - len(x), 0)
                 for x in (*model.tables[:2], own) if x is not None)
    keeps_states = heads and model.device.type == "cpu"
    states = batch_size * rows * config.n_embd * model.dtype.itemsize if keeps_states else 0
    return masks + tables + states


def best_slot(idle, prompt, kept=None):
    """The free slot whose cache has the most of a prompt, and at least half; else the one free for
    longest. With it, the first token that must be read, and the length of the shared prefix. idle:
    {slot: tokens in its cache}. kept: `KeptStates`, of which the read tokens must follow one."""
    starts = {}
    for slot, tokens in idle.items():
        parted = compress(count(), map(ne, tokens, prompt))  # where, without a loop in Python
        same = next(parted, min(len(tokens), len(prompt)))
        # a heads' row needs the next token to match, too; reading the last row gives their state
        shared = max(min(same - 1, len(prompt) - 2), 0)
        starts[slot] = kept.longest(slot, shared) if kept else shared, shared
    is_half = lambda slot: 2 * starts[slot][1] >= len(prompt)
    slot = max(starts, key=lambda slot: starts[slot] if is_half(slot) else (0, 0))
    return slot, *starts[slot]
