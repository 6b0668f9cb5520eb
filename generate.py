"""The generation loop: `Engine.step`, continuous batching around it, `generate()`, and a command line.

    python generate.py --prompt "def fibonacci(n):"
    python generate.py --prompt "import os" --temperature 0.8 --top-p 0.9 --compare
    python generate.py --prompt "import os" --explain
    python generate.py --model FOLDER --chat              a conversation, if the folder has a chat template

Plain decoding is the same loop with trees of one node. On CUDA the step is captured in a graph once and replayed, and
the host reads a step's tokens while the next step runs.

Letters: B slots, T tree nodes, K depth of the tree below its root, P = K + 1 nodes of the longest path, C hidden size,
V vocabulary.
"""

import json
import math
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field

import torch

from clover import MAX_TREE, root_tree
from kernels import accept_path, commit_path, gumbel_argmax, nucleus, runs_triton, unchecked
from model import InputError, KVCache, needs_folder, pack, warn_of_emulation

STAGES = ("draft", "verify", "sample", "accept", "commit")
PREFILL_CHUNK = 512  # prompt tokens per pass, which bounds its memory; and per gap between two steps
DEFAULT_BATCH = 8    # slots, where no batch size is given
DEFAULT_TREE = 5     # nodes, for heads without an acceptance table


class Engine:
    """Decodes prompts in B slots. Reusable for any prompts that fit its capacity.

    capacity: the most tokens of a sequence, prompt included; default: the model's context. tree_size: T, 1 for plain
    decoding. beams: W, default about the square root of T. sampling: a `Sampling`, default greedy. graph: on CUDA,
    capture the step once and replay it.
    Raises InputError for sizes out of range and for caches that the memory has no room for.
    """

    @torch.inference_mode()
    def __init__(self, model, heads=None, *, batch_size=1, capacity=None, tree_size=1, beams=None, sampling=None,
                 graph=True):
        check("batch size", batch_size, 1, 2**16, whole=True)
        check("tree size", tree_size, 1, MAX_TREE, whole=True)
        self.model, self.sampling, self.batch_size = model, sampling or Sampling(), batch_size
        self.heads = heads = heads if tree_size > 1 else None
        self.tree_size = tree_size if heads else 1
        self.beams = default_beams(heads, self.tree_size) if beams is None else beams
        check_beams(model, heads, self.beams)
        self.capacity = model.config.block_size if capacity is None else capacity
        check("capacity", self.capacity, 1, model.config.block_size, whole=True)
        self.max_path = P = 1 + (min(heads.config.n_draft, self.tree_size - 1) if heads else 0)
        warn_of_emulation(model.dtype, model.device)
        for module in (model, heads) if heads else (model,):
            pack(module)
        device = model.device
        self.offsets = torch.arange(P, device=device)
        self.chain = (2 << self.offsets) - 1  # ancestors in a path, a tree without branches: node j sees nodes 0..j
        self.buffers = new_slots(model, heads, batch_size, self.capacity, self.tree_size, P)
        self.set_active_slots(batch_size)
        self.fit = None        # how tools/tune.py chose the tree, if it did
        self.kept_text = []    # with one slot: the tokens whose rows a call with keep=True left in the caches
        self.steps_ahead = 0   # steps in flight while the host reads an earlier one
        self.replay = None
        if device.type == "cuda":
            self.steps_ahead = 1
            self.pinned = [torch.zeros(batch_size, 2 * P + 2, dtype=torch.int64, pin_memory=True) for _ in range(2)]
            self.written = [torch.cuda.Event() for _ in range(2)]
            if graph and runs_triton(self.slots.root):  # torch's references of the kernels read values back
                self.result, self.replay = capture(self.step, device)

    # -----------------------------------------------------------------------------------------------------------------
    # One step of all slots. Every tensor has a fixed shape, state changes in place, nothing is read back to the host.

    def step(self):
        with unchecked(self.checked):                       # shapes are fixed: checked in the first step alone
            tree = self.draft()                             # tokens, parents, depths, ancestors: [B, T]
            hidden = self.verify(tree)                      # [B, T, C]; keys and values go to cache rows lengths..
            target = self.sample(tree, hidden)              # [B, T]: the model's own next token at every node
            accepted = self.accept(tree, target)            # [B, 2P + 2]: emitted tokens, path, count, last of the path
            self.commit(hidden, accepted)
        self.checked = True
        return accepted                                     # all that the host reads

    def draft(self):
        if self.heads is None:
            return self.plain_tree
        return self.heads.draft(self.slots.state, self.slots.root, self.tree_size, self.beams)

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

    def accept(self, tree, target):
        return accept_path(*tree, target, self.slots.active, self.max_path)

    def commit(self, hidden, accepted):
        """Keeps the path's cache rows, lets the heads read the path, and makes the bonus token the next root. Rows that
        the heads write from `count` on are junk, which the next step overwrites."""
        slots, lengths, P = self.slots, self.slots.cache.lengths, self.max_path
        emitted, path, count, last = accepted.split((P, P, 1, 1), dim=1)  # the accepted guesses, then the bonus token
        if self.heads:
            commit_path(slots.cache.kv, lengths, path, count[:, 0])
            hidden = hidden.gather(1, path[:, :, None].expand(-1, -1, hidden.shape[2]))  # (B, P, C)
            positions = lengths[:, None] + self.offsets
            states = self.heads.augment(hidden, emitted, positions, slots.heads_cache, self.chain.expand_as(positions))
            torch.gather(states, 1, last[:, :, None].expand(-1, 1, states.shape[2]), out=slots.state[:, None])
        torch.gather(emitted, 1, last, out=slots.root[:, None])
        lengths += count[:, 0]

    # -----------------------------------------------------------------------------------------------------------------
    # Continuous batching: prompts wait, are admitted to free slots, run, and retire

    @torch.inference_mode()
    def generate(self, prompts, max_new_tokens, stop=(), on_tokens=None, encoding=None, keep=False, on_path=None):
        """Continues prompts (lists of token ids) -> `Output`.

        stop: token ids and, with an `encoding`, texts that end a sequence; the token that does it is kept.
        on_tokens(index, tokens) is called with the tokens of each step, on_path(index, path) with its accepted nodes.
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
        output = Output([s.tokens for s in sequences], [], tree_size=self.tree_size, beams=self.beams,
                        batch_size=self.batch_size)

        def emit(sequence, tokens, path):
            tokens = sequence.take(tokens)
            output.steps += 1
            output.step_lengths[len(tokens)] += 1
            if on_path:
                on_path(sequence.index, path)
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
            if len(self.slots.root) < self.batch_size:  # never with a graph, whose tensors must stay where they are
                self.set_active_slots(self.batch_size)
            for slot in range(self.batch_size):
                self.release(slot)
        return output

    def run(self, sequences, emit):
        self.waiting, self.free = deque(sequences), deque(range(self.batch_size))
        self.filling = None       # (slot, sequence, where the next chunk of its prompt starts)
        self.running = {}         # slot -> sequence
        self.in_flight = deque()  # steps not read yet: (function that waits for the result, `running` at the start)
        while self.waiting or self.filling or self.running:
            self.admit()
            self.compact_slots()
            if self.running:
                self.in_flight.append((self.launch(), dict(self.running)))
            if len(self.in_flight) > self.steps_ahead:
                self.retire(emit)

    def admit(self):
        """Fills free slots with waiting prompts, about PREFILL_CHUNK tokens at a time: the others go on between."""
        budget = PREFILL_CHUNK
        while budget > 0 and (self.filling or (self.waiting and self.free)):
            if not self.filling:
                sequence = self.waiting.popleft()
                self.filling = self.free.popleft(), sequence, self.reusable_prefix(sequence.prompt)
            slot, sequence, start = self.filling
            end = self.prefill(slot, sequence.prompt, start)
            budget -= max(end - start, 1)
            self.filling = slot, sequence, end
            if end == len(sequence.prompt) - 1:
                self.slots.sequence[slot].fill_(sequence.index)  # on a GPU, [slot] = index would wait for it
                self.slots.active[slot].fill_(1)
                self.running[slot], self.filling = sequence, None

    def prefill(self, slot, prompt, start):
        """Reads a prompt's next chunk, from token `start`, into a slot -> where the chunk after it starts.

        The prompt's last token is not read here: it is the root of the first step, which is then like any other. Steps
        between two chunks write their trees behind the rows that are there, where the next chunk goes.
        """
        end, slots = min(start + PREFILL_CHUNK, len(prompt) - 1), self.slots
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
                positions = torch.arange(start, end, device=tokens.device)[None]
                states = self.heads.augment(hidden, tokens[:, 1:], positions, slots.heads_cache.slots(slot), end=end)
                slots.state[slot] = states[0, -1]
        slots.root[slot] = tokens[0, -1]
        return end

    @torch.inference_mode()
    def launch(self):
        """Starts one step -> a function that waits for it and returns its result as lists, one per slot."""
        if self.replay:
            self.replay()
        else:
            self.result = self.step()
        if self.model.device.type != "cuda":
            result = self.result.tolist()
            return lambda: result
        pinned, written = self.pinned[0], self.written[0]
        pinned.copy_(self.result, non_blocking=True)
        written.record(torch.cuda.current_stream(self.model.device))
        self.pinned.reverse()
        self.written.reverse()

        def wait():
            written.synchronize()
            return pinned.tolist()
        return wait

    def retire(self, emit):
        """Reads the oldest step in flight, emits its tokens, and frees the slots of the texts that end with it."""
        wait, started_with = self.in_flight.popleft()
        result, P = wait(), self.max_path
        for slot, sequence in started_with.items():
            if self.running.get(slot) is not sequence:
                continue  # the text ended a step earlier, when this step was already in flight
            count = result[slot][2 * P]
            emit(sequence, result[slot][:count], result[slot][P:P + count])
            if sequence.ended:
                del self.running[slot]
                self.release(slot)
                self.free.append(slot)

    def release(self, slot):
        """Idle slots still run because shapes are fixed, on an empty sequence; their output is discarded."""
        self.slots.active[slot].zero_()
        self.slots.cache.lengths[slot].zero_()

    def set_active_slots(self, n):
        """Lets only the first n slots run. `slots` are views of the buffers."""
        self.slots, self.checked = self.buffers.first(n), False
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
    sequence: torch.Tensor          # int64 [B]: which text this is; the noise is a function of it
    active: torch.Tensor            # int32 [B]: 0 for an idle slot

    def first(self, n):
        """Views of the first n slots."""
        return Slots(self.cache.slots(0, n), self.heads_cache and self.heads_cache.slots(0, n), self.root[:n],
                     None if self.state is None else self.state[:n], self.sequence[:n], self.active[:n])

    def move(self, source, free):
        """Copies slot `source` to slot `free`."""
        n = int(self.cache.lengths[source])
        for cache in filter(None, (self.cache, self.heads_cache)):
            cache.kv[:, :, free, :, :n] = cache.kv[:, :, source, :, :n]
        for tensor in (self.cache.lengths, self.root, self.state, self.sequence, self.active):
            if tensor is not None:
                tensor[free] = tensor[source]


def new_slots(model, heads, batch_size, capacity, tree_size, max_path):
    """Empty `Slots`. The tree's rows stand behind the text's. On a GPU the host learns of a text's end a step late, so
    one more path must fit."""
    zeros = lambda dtype, *shape: torch.zeros(batch_size, *shape, dtype=dtype, device=model.device)
    cache, heads_cache, state = model.new_cache(batch_size, capacity + tree_size + max_path), None, None
    if heads:
        heads_cache = heads.new_cache(batch_size, capacity + 2 * max_path)
        state = zeros(model.dtype, model.config.n_embd)
        heads_cache.lengths = cache.lengths
    return Slots(cache, heads_cache, zeros(torch.int64), state, zeros(torch.int64), zeros(torch.int32))


def capture(body, device):
    """Records what body() does on a GPU in a CUDA graph -> (what body returned, a function that replays it)."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # compiles and allocates whatever the first call does
                body()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = body()
    return result, graph.replay


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
        self.limit = min(max_new_tokens, context - len(prompt))
        self.at_limit = "length" if self.limit == max_new_tokens else "context"
        self.stop_tokens = {s for s in stop if not isinstance(s, str)}
        stop_texts = [s for s in stop if isinstance(s, str)]
        self.stream = TextStream(encoding, stop_texts) if stop_texts else None

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
    tree_size: int = 1                                      # T
    beams: int = 1                                          # W
    batch_size: int = 1                                     # B

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

def generate(model, prompts, max_new_tokens, heads=None, *, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0,
             tree_size=None, beams=None, stop=(), batch_size=None, on_tokens=None, encoding=None, graph=True):
    """Continues prompts (lists of token ids) with the model's own tokens: the same with any heads, tree or batch size,
    up to ties of the model's best two, which half precision on a GPU makes.

    tree_size: nodes T verified per step, root included. 1 is plain decoding; None takes the size that is fastest here,
    which is measured first. beams: W, default about the square root of T. stop: token ids and, with an `encoding` to
    read them by, texts that end a sequence; the token that does it is kept. batch_size: sequences decoded together,
    default up to 8; a finished one makes room for the next prompt. on_tokens(index, tokens) is called with the tokens
    of each step. graph: on CUDA, replay the step from a CUDA graph.
    Returns `Output`. Raises InputError for what cannot be decoded, Interrupted on Ctrl-C.
    """
    engine = prepare(model, prompts, max_new_tokens, heads, tree_size=tree_size, beams=beams, batch_size=batch_size,
                     graph=graph, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    return engine.generate(prompts, max_new_tokens, stop, on_tokens, encoding)


def prepare(model, prompts, max_new_tokens, heads=None, *, tree_size=None, beams=None, batch_size=None, graph=True,
            times_file=None, fresh=False, **sampling):
    """The Engine that `generate` runs these prompts on, with the same arguments. times_file: where the step times that
    the tree is chosen from are kept, see tools/tune.py; fresh: measure them again."""
    sampling, fit = Sampling(**sampling), None
    check("max new tokens", max_new_tokens, 1, 2**31, whole=True)
    check_prompts(model, prompts)
    capacity = max(min(len(prompt) + max_new_tokens, model.config.block_size) for prompt in prompts)
    batch_size = min(len(prompts), DEFAULT_BATCH if batch_size is None else batch_size)
    if tree_size is None and heads and heads.info.get("acceptance"):
        with needs_folder("tools", ", or give a tree_size"):
            from tools.tune import fit_tree
        fit = fit_tree(model, heads, batch_size, capacity, sampling, beams, graph, times_file, fresh)
        tree_size = fit.tree_size
    elif tree_size is None:
        tree_size = DEFAULT_TREE if heads else 1
    engine = Engine(model, heads, batch_size=batch_size, capacity=capacity, tree_size=tree_size, beams=beams,
                    sampling=sampling, graph=graph)
    engine.fit = fit
    return engine


# ---------------------------------------------------------------------------------------------------------------------
# Command line

def main(argv=None):
    from tools import cli, compare, repl, tune
    args = cli.parse(argv)
    session = cli.Session(args)
    if not args.prompt:
        return repl.converse(session)
    prompts = [session.encode([dict(role="user", content=text)]) for text in session.texts]
    engine = session.engine(prompts, fresh=args.explain)
    if args.compare:
        engine.generate(prompts[:1], min(4, args.max_new_tokens))  # whatever is compiled or loaded, before it is timed
    printer, interrupted = cli.Printer(session), False
    try:
        output = engine.generate(prompts, args.max_new_tokens, session.stop, printer.show, session.encoding)
    except Interrupted as interrupt:
        output, interrupted = interrupt.output, True
    result, say = session.report(output), (lambda text: None) if args.json else print
    printer.finish(output)
    say(f"\n{cli.statistics(output)}")
    if args.explain and not interrupted:
        result["explained"] = tune.explain(engine, session.heads, not args.no_graph)
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
