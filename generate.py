"""The decoding loop: one step over B slots, fixed in shape, and the slots kept busy.

    engine = Engine(model, heads, batch_size=8, rows=600, tree_size=9)
    output = engine.generate(prompts, 128)

One step: draft a tree, verify it in one forward pass, choose the model's own token at every node, accept the path that
agrees, commit it. Plain decoding is the same step with a tree of one node. A step reads nothing back to the host, so on
CUDA it is captured in a graph once and replayed, and the host looks at a step's tokens while the next one runs.

Letters: B slots, T tree nodes, K depth of the tree below its root, P = K + 1 longest path, C hidden size, V vocabulary.
"""

import math
import time
from collections import Counter, deque
from dataclasses import dataclass, field

import torch

from clover import MAX_TREE, root_tree
from kernels import commit_path, gumbel_argmax, runs_triton
from model import InputError, free_memory, pack

PREFILL_CHUNK = 512  # prompt tokens per pass, a bound for the memory; between two steps passes go on until so many are in
STAGES = ("draft", "verify", "choose", "accept", "commit")


# ---------------------------------------------------------------------------------------------------------------------
# Choosing and accepting

@dataclass(frozen=True)
class Sampling:
    """How the model's own next token is chosen. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 keep every token."""
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


def check(name, value, low, high, whole=False, above=False):
    """Refuses a number that is not in low..high (not low itself with `above`), nan included."""
    kind = int if whole else (int, float)
    if not isinstance(value, kind) or isinstance(value, bool) or not low <= value <= high or (above and value == low):
        raise InputError(f"{name} must be {'a whole number' if whole else 'a number'} "
                         f"{f'above {low} and at most' if above else f'from {low} to'} {high}, not {value!r}")


def keep_likely(logits, top_k=0, top_p=1.0, min_p=0.0):
    """logits [M, V] with the tokens outside the top_k, then outside the nucleus of mass top_p (arXiv 1904.09751), then under
    min_p times the likeliest token's probability (arXiv 2407.01082) at -inf. The most likely token always stays; tokens
    that tie with the last one kept stay too."""
    least = torch.full_like(logits[:, :1], -math.inf)
    if top_k > 0 or top_p < 1:
        ranked = logits.sort(dim=-1, descending=True).values
        if 0 < top_k < logits.shape[-1]:
            ranked[:, top_k:] = -math.inf
        probs = ranked.softmax(dim=-1)
        kept = (probs.cumsum(dim=-1) - probs < top_p) & (ranked > -math.inf)  # the mass before a token is under top_p
        least = ranked.gather(1, (kept.sum(dim=-1, keepdim=True) - 1).clamp(min=0))  # below 0: all is NaN
    if min_p > 0:
        least = torch.maximum(least, logits.amax(dim=-1, keepdim=True) + math.log(min_p))
    return logits.masked_fill(logits < least, -math.inf)


def choose(model, hidden, sampling, sequence, positions):
    """The model's own next token [B, T] at every node: hidden [B, T, C], sequence [B], positions [B, T] of the nodes."""
    (B, T, C), s = hidden.shape, sampling
    rows = model.norm(hidden).view(B * T, C)
    place = sequence[:, None].expand(B, T).reshape(-1), (positions + 1).reshape(-1)
    if not s.filtered:
        return model.head.sample(rows, s.temperature, s.seed, *place).view(B, T)
    logits = keep_likely(model.head.logits(rows) / s.temperature, s.top_k, s.top_p, s.min_p)
    return gumbel_argmax(logits, 1.0, s.seed, *place).view(B, T)


def accept(tree, chosen, longest):
    """Walks from the root: a node is accepted when it is its parent's chosen token and its parent is accepted.

    tree of [B, T], chosen int64 [B, T] -> path int64 [B, longest] (accepted nodes, root first, then zeros), count int32 [B].
    """
    B, T = chosen.shape
    bits = torch.ones_like(chosen) << torch.arange(T, device=chosen.device)
    wrong = (tree.tokens != chosen.gather(1, tree.parents)) & (tree.depths > 0)
    refused = (bits * wrong).sum(dim=1, keepdim=True)  # the set of refused nodes, one bit each
    accepted = (tree.ancestors != 0) & (tree.ancestors & refused == 0)
    place = torch.where(accepted, tree.depths, longest)  # everything else lands in a spare column
    nodes = torch.arange(T, device=chosen.device).expand(B, T)
    path = torch.zeros(B, longest + 1, dtype=torch.int64, device=chosen.device).scatter_(1, place, nodes)
    return path[:, :longest], (tree.depths * accepted).amax(dim=1).to(torch.int32) + 1


# ---------------------------------------------------------------------------------------------------------------------
# What a run gives

@dataclass
class Output:
    """What decoding returns. tokens: the new tokens of each prompt, in the order of the prompts; ended: why each text ended,
    "stop" (a stop token or string), "length" (max_new_tokens), "context" (the model's), None if it was interrupted."""
    tokens: list
    ended: list
    steps: int = 0                                   # verify steps, counted per sequence
    seconds: float = 0.0                             # wall time, prefill included
    accepted: Counter = field(default_factory=Counter)  # tokens a step emitted (its path length) -> how many steps did
    tree_size: int = 1                               # T
    beams: int = 1                                   # W
    batch_size: int = 1                              # B

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
    """Ctrl-C while decoding; `output` holds what there was."""

    def __init__(self, output):
        super().__init__()
        self.output = output


class Text:
    """One sequence as it grows, and where it ends: after `limit` tokens, at a stop token, or at the token that completes a
    stop string."""

    def __init__(self, tokens, limit, stop, encoding):
        self.tokens, self.limit = tokens, limit
        self.stop_tokens = {s for s in stop if not isinstance(s, str)}
        self.stop_strings = [s for s in stop if isinstance(s, str)]
        self.stream = None
        if self.stop_strings:
            from hf.tokenizer import TextStream
            self.stream = TextStream(encoding)
        self.tail, self.reach = "", max(map(len, self.stop_strings), default=1) - 1

    def stops(self, token):
        if token in self.stop_tokens:
            return True
        if not self.stop_strings:
            return False
        text = self.tail + self.stream.feed([token])
        self.tail = text[len(text) - min(self.reach, len(text)):]
        return any(string in text for string in self.stop_strings)

    def take(self, tokens):
        """Appends one step's tokens as far as they count -> (tokens taken, whether a stop was among them, whether it ends)."""
        tokens = tokens[:self.limit - len(self.tokens)]
        end = next((i + 1 for i, token in enumerate(tokens) if self.stops(token)), None)
        taken = tokens[:end]
        self.tokens += taken
        return taken, end is not None, end is not None or len(self.tokens) == self.limit


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
            raise InputError(f"prompt {i} has {len(prompt)} tokens; the model's context of {c.block_size} leaves room for "
                             f"at most {c.block_size - 1} and one new token: shorten the prompt")
        if min(prompt) < 0 or max(prompt) >= c.vocab_size:
            raise InputError(f"prompt {i} has token ids outside 0..{c.vocab_size - 1}; is this the model's own tokenizer?")


def check_stops(stop, encoding):
    """stop as a tuple of token ids and texts that can be looked for."""
    stop = (stop,) if isinstance(stop, (int, str)) else tuple(stop)
    for s in stop:
        if isinstance(s, bool) or not isinstance(s, (int, str)) or s == "":
            raise InputError(f"stop must hold token ids and texts that are not empty, not {s!r}")
        if isinstance(s, str) and encoding is None:
            raise InputError(f"stop text {s!r} cannot be seen in token ids alone; give encoding=, the model's tokenizer")
    return stop


# ---------------------------------------------------------------------------------------------------------------------
# Memory

def memory_needed(model, heads, batch_size, rows, tree_size, sampling):
    """Bytes that an Engine of these sizes allocates: (its caches, the most that one of its passes holds beside them).

    The passes' share is an estimate: the widest of what lives at the same time in a step and in a chunk of prefill."""
    c, B, T, size = model.config, batch_size, tree_size, model.dtype.itemsize
    P = 1 + heads_depth(heads, T)
    S = rows + T + P
    cache_rows = c.n_layer * S + (heads.config.augment_layers * (rows + 2 * P) if heads and T > 1 else 0)
    caches = 2 * B * c.n_kv_head * c.head_size * cache_rows * size
    alibi = 8 * c.n_head if c.positions == "alibi" else 0  # bytes per cache row and token: its biases
    scores = 5 + alibi + (6 * c.n_head if model.device.type == "cuda" else 0)  # masks, and what CUDA's slowest attention stores
    per_token = (4 * c.n_embd + 3 * c.n_inner + 3 * (c.n_head + 2 * c.n_kv_head) * c.head_size) * size
    logits = (16 if sampling.filtered else 8) * B * T * c.vocab_size if sampling.filtered or model.device.type == "cpu" else 0
    step = B * T * (per_token + (13 + alibi) * S) + logits
    prefill = PREFILL_CHUNK * (per_token + scores * S) + B * T * per_token
    return caches, max(step, prefill)


def largest_batch(model, heads, most, rows, tree_size, sampling, free):
    """The largest batch size up to `most` that fits into so many free bytes, 0 if none does."""
    need = lambda batch: sum(memory_needed(model, heads, batch, rows, tree_size, sampling))
    return next((batch for batch in range(most, 0, -1) if need(batch) <= free), 0)


def check_memory(model, heads, batch_size, rows, tree_size, sampling, free=None):
    """Raises InputError, before anything is allocated, where a batch does not fit the memory."""
    free = free_memory(model.device) if free is None else free
    fits = largest_batch(model, heads, batch_size, rows, tree_size, sampling, free)
    if fits == batch_size:
        return
    caches, step = (f"{x / 2**30:.2f} GiB" for x in memory_needed(model, heads, batch_size, rows, tree_size, sampling))
    smaller = "a smaller tree or " if tree_size > 1 else ""
    advice = f"a batch size of {fits} fits" if fits else f"not even one sequence fits: take {smaller}fewer new tokens"
    raise InputError(f"batch size {batch_size} with a tree of {tree_size} and {rows} tokens each needs {caches} for its caches "
                     f"and {step} for a step, but {free / 2**30:.2f} GiB are free; {advice}")


def heads_depth(heads, tree_size):
    """K, the depth of a tree below its root."""
    return min(heads.config.n_draft, tree_size - 1) if heads else 0


# ---------------------------------------------------------------------------------------------------------------------
# The engine

class Engine:
    """B slots that decode together, each a sequence with its part of the caches. All tensors keep their places and shapes.

    rows: the most tokens a sequence can have, prompt included. tree_size: T, 1 for plain decoding; beams: W. graph: on CUDA,
    capture the step once and replay it. Raises InputError for sizes that cannot be and for what does not fit the memory.
    """

    @torch.inference_mode()
    def __init__(self, model, heads=None, *, batch_size=1, rows=None, tree_size=1, beams=None, sampling=Sampling(), graph=True):
        check("batch size", batch_size, 1, 2**16, whole=True)
        check("tree size", tree_size, 1, MAX_TREE, whole=True)
        self.model, self.sampling, self.batch_size = model, sampling, batch_size
        self.heads = heads = heads if tree_size > 1 else None
        self.tree_size = tree_size if heads else 1
        self.beams = default_beams(heads, self.tree_size) if beams is None else beams
        check("beams", self.beams, 1, most_beams(model, heads), whole=True)
        self.rows = model.config.block_size if rows is None else rows
        check("rows", self.rows, 1, model.config.block_size, whole=True)
        check_memory(model, heads, batch_size, self.rows, self.tree_size, sampling)
        self.longest = P = 1 + heads_depth(heads, self.tree_size)
        B, device = batch_size, model.device
        slots = lambda dtype, *shape: torch.zeros(B, *shape, dtype=dtype, device=device)
        self.whole = dict(root=slots(torch.int64), sequence=slots(torch.int64),  # the noise knows a slot's text by its sequence
                          active=slots(torch.int32))                             # 0: idle, and goes on computing in vain
        # the tree stands behind the text, and the host hears of a text's end when the next step is on its way
        self.caches = [model.new_cache(B, self.rows + self.tree_size + P)]
        pack(model)
        if heads:
            pack(heads)
            self.caches.append(heads.new_cache(B, self.rows + 2 * P))
            self.caches[1].lengths = self.caches[0].lengths
            self.whole |= dict(state=slots(model.dtype, model.config.n_embd))
            self.offsets = torch.arange(P, device=device)
            self.chain = (2 << self.offsets) - 1  # ancestors of a plain sequence of nodes
        self.narrow(B)
        self.fit = None  # what fit.py chose the tree from, if it did
        self.text = []   # of an engine with one slot: the tokens of the text that `keep` left in the caches
        self.lag = 0     # steps that are on their way when the host looks at one
        self.replay = None
        if device.type == "cuda":
            self.lag = 1
            self.host = [torch.zeros(B, P + 1, dtype=torch.int64, pin_memory=True) for _ in range(2)]
            self.written = [torch.cuda.Event() for _ in range(2)]
            if graph and runs_triton(self.root):  # torch's references of the kernels read values back
                self.replay = capture(self.step, device)

    # -----------------------------------------------------------------------------------------------------------------
    # One step: fixed shapes, everything in place, nothing read back

    def run_step(self):
        self.replay() if self.replay else self.step()

    def step(self):
        for stage in STAGES:
            getattr(self, stage)()

    def draft(self):
        if self.heads:
            self.tree = self.heads.draft(self.state, self.root, self.tree_size, self.beams)

    def verify(self):
        # nodes past the context's end are never emitted, but a learned position must exist for them
        self.positions = self.cache.lengths[:, None] + self.tree.depths
        positions = self.positions.clamp(max=self.model.config.block_size - 1)
        self.hidden = self.model(self.tree.tokens, positions, self.cache, self.tree.ancestors)  # (B, T, C)

    def choose(self):
        self.chosen = choose(self.model, self.hidden, self.sampling, self.sequence, self.positions)

    def accept(self):
        path, count = accept(self.tree, self.chosen, self.longest)
        self.path, self.count = path, count * self.active
        self.emitted = self.chosen.gather(1, path)  # the token after each accepted node: the accepted ones, then the bonus token
        self.result = torch.cat((self.emitted, self.count[:, None]), dim=1)  # (B, P + 1), all that the host reads

    def commit(self):
        last = (self.count - 1).clamp_(min=0).long()[:, None]
        if self.heads:
            commit_path(self.cache.kv, self.cache.lengths, self.path, self.count)
            # the accepted nodes and the tokens after them go into the heads' own cache
            hidden = self.hidden.gather(1, self.path[:, :, None].expand(-1, -1, self.hidden.shape[2]))
            positions = self.cache.lengths[:, None] + self.offsets
            states = self.heads.augment(hidden, self.emitted, positions, self.heads_cache, self.chain.expand_as(positions))
            self.state.copy_(states.gather(1, last[:, :, None].expand(-1, 1, states.shape[2]))[:, 0])
        self.root.copy_(self.emitted.gather(1, last)[:, 0])
        self.cache.lengths += self.count

    def launch(self):
        """Starts one step -> a function that waits for it and returns per slot its emitted tokens and how many count."""
        self.run_step()
        if self.model.device.type != "cuda":
            result = self.result.tolist()
            return lambda: result
        host, written = self.host[0], self.written[0]
        host.copy_(self.result, non_blocking=True)
        written.record(torch.cuda.current_stream(self.model.device))
        self.host.reverse()
        self.written.reverse()

        def wait():
            written.synchronize()
            return host.tolist()
        return wait

    # -----------------------------------------------------------------------------------------------------------------
    # Slots

    def narrow(self, count):
        """Lets only the first slots compute: `root`, `cache` and the like are views of their front."""
        for name, tensor in self.whole.items():
            setattr(self, name, tensor[:count])
        self.cache = self.caches[0].slots(0, count)
        if self.heads:
            self.heads_cache = self.caches[1].slots(0, count)
        self.tree = root_tree(self.root)  # a view of it: the tree of plain decoding stays up to date

    def close_ranks(self, at):
        """Moves the sequences of at, {slot: index}, to the first slots, and lets only these compute."""
        for target in range(len(at)):
            if target not in at:
                source = max(at)
                at[target] = at.pop(source)
                rows = int(self.cache.lengths[source])
                for cache in self.caches:
                    cache.kv[:, :, target, :, :rows] = cache.kv[:, :, source, :, :rows]
                for tensor in (*self.whole.values(), self.caches[0].lengths):
                    tensor[target] = tensor[source]
        self.narrow(len(at))

    def prefill(self, slot, prompt, start):
        """Takes a prompt's next chunk, from token `start`, into a slot -> where the one after it starts, None when all is in.

        The last token becomes the root, so that each step emits what it accepts. Steps between two chunks write their tree
        behind what is there, where the next chunk goes."""
        end = min(start + PREFILL_CHUNK, len(prompt) - 1)
        tokens = torch.tensor([prompt[start:end + 1]])
        if self.model.device.type == "cuda":
            tokens = tokens.pin_memory().to(self.model.device, non_blocking=True)
        if start == 0:
            self.cache.lengths[slot] = 0
            if self.heads:
                self.state[slot] = 0
        if end > start:
            hidden = self.model.prefill(tokens[:, :-1], self.cache.slots(slot), start)
            if self.heads:
                positions = torch.arange(start, end, device=tokens.device)[None]
                states = self.heads.augment(hidden, tokens[:, 1:], positions, self.heads_cache.slots(slot), end=end)
                self.state[slot] = states[0, -1]
        self.root[slot] = tokens[0, -1]
        return end if end < len(prompt) - 1 else None

    def release(self, slot):
        """An idle slot goes on computing, where shapes are fixed: on an empty sequence, and nobody listens."""
        self.active[slot] = 0
        self.cache.lengths[slot] = 0

    def known(self, prompt):
        """How many of a prompt's first rows the last text left in the caches. The heads' row of a token depends on the token
        after it, and the prompt's last but one must be run, for the heads' state."""
        same = next((i for i, (a, b) in enumerate(zip(self.text, prompt)) if a != b), min(len(self.text), len(prompt)))
        return max(min(same - 1, len(prompt) - 2), 0)

    @torch.inference_mode()
    def generate(self, prompts, max_new_tokens, stop=(), on_tokens=None, encoding=None, keep=False):
        """Continues prompts (lists of token ids) -> `Output`. stop: token ids, and texts if there is an `encoding`, that end a
        sequence; the token that does it is kept. on_tokens(index, tokens) is called with the tokens of each step.
        keep: with one slot and one prompt, as in a chat: what the prompt has in common with the text of the last call that
        kept it is not computed again. The model must be the same still.
        Raises InputError for what cannot be decoded, Interrupted on Ctrl-C."""
        check("max new tokens", max_new_tokens, 1, 2**31, whole=True)
        check_prompts(self.model, prompts)
        stop = check_stops(stop, encoding)
        limits = [min(max_new_tokens, self.model.config.block_size - len(prompt)) for prompt in prompts]
        rows = max(len(prompt) + limit for prompt, limit in zip(prompts, limits))
        if rows > self.rows:
            raise InputError(f"a text of {rows} tokens does not fit an engine made for {self.rows}; make a larger one")
        if keep and (self.batch_size, len(prompts)) != (1, 1):
            raise InputError(f"keep is for one prompt in one slot, not for {len(prompts)} in {self.batch_size}")
        self.text = self.text if keep else []
        output = Output([[] for _ in prompts], [None] * len(prompts),
                        tree_size=self.tree_size, beams=self.beams, batch_size=self.batch_size)
        texts = {}  # of the prompts in work

        def take(index, tokens):
            if index not in texts:
                texts[index] = Text(output.tokens[index], limits[index], stop, encoding)
            taken, stopped, done = texts[index].take(tokens)
            output.steps += 1
            output.accepted[len(taken)] += 1
            if done:
                del texts[index]
                output.ended[index] = "stop" if stopped else "length" if limits[index] == max_new_tokens else "context"
            if on_tokens:
                on_tokens(index, taken)
            return done

        began = time.perf_counter()
        try:
            self.run(prompts, take)
        except KeyboardInterrupt:
            raise Interrupted(output) from None
        finally:
            output.seconds = time.perf_counter() - began
            self.text = [*prompts[0], *output.tokens[0]] if keep and output.tokens[0] else []
            if len(self.root) < self.batch_size:  # never with a graph: it remembers where its tensors are
                self.narrow(self.batch_size)
            for slot in range(self.batch_size):
                self.release(slot)
        return output

    def run(self, prompts, take):
        """Keeps the slots filled and steps until take(index, tokens of one step) has said of every prompt that it is done."""
        waiting, free = deque(range(len(prompts))), deque(range(self.batch_size))
        filling = None      # (slot, index of the prompt, where its next chunk starts)
        at = {}             # slot -> index of the prompt that decodes there
        flying = deque()    # steps on their way: (function that waits for the result, at when it started)
        while waiting or filling or at:
            budget = PREFILL_CHUNK
            while budget > 0 and (filling or (waiting and free)):
                if not filling:
                    filling = free.popleft(), waiting[0], self.known(prompts[waiting.popleft()])
                slot, index, start = filling
                end = self.prefill(slot, prompts[index], start)
                budget -= (len(prompts[index]) if end is None else end) - start
                filling = None if end is None else (slot, index, end)
                if not filling:
                    self.sequence[slot] = index
                    self.active[slot] = 1
                    at[slot] = index
            if not self.lag and not self.replay and not waiting and not filling and 0 < len(at) < len(self.root):
                self.close_ranks(at)  # a CPU, unlike a GPU, takes as long for an idle slot as for a busy one
            if at:
                flying.append((self.launch(), dict(at)))
            if len(flying) > self.lag:
                wait, then = flying.popleft()
                results = wait()
                for slot, index in then.items():
                    *tokens, count = results[slot]
                    if at.get(slot) == index and take(index, tokens[:count]):  # else the step before ended it
                        del at[slot]
                        self.release(slot)
                        free.append(slot)


def capture(body, device):
    """A function that replays what body() does on a GPU, recorded in a CUDA graph. What body() works on must outlive it."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # what is compiled or allocated at the first call must be there
                body()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            body()
    return graph.replay


def most_beams(model, heads):
    """W can be no larger than what project_topk gives and the draft vocabulary has."""
    return min(32, heads.config.vocabulary or model.config.vocab_size) if heads else 32


def default_beams(heads, tree_size):
    """W: about the square root of T, so that a tree can be wide or deep."""
    return min(math.isqrt(tree_size - 1) + 1, most_beams(heads.model, heads)) if heads else 1


BATCH_SIZE = 8

# ---------------------------------------------------------------------------------------------------------------------
# Decoding

def prepare(model, prompts, max_new_tokens, heads=None, *, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0,
            tree_size=None, beams=None, batch_size=None, graph=True, fresh=False):
    """The Engine that `generate` runs these prompts on; it can run others that are no longer, again and again.
    Its `fit` says what the tree was chosen from, if it was; fresh: measure for that even what is known."""
    sampling = Sampling(temperature, top_k, top_p, min_p, seed)
    check("max new tokens", max_new_tokens, 1, 2**31, whole=True)
    check("batch size", BATCH_SIZE if batch_size is None else batch_size, 1, 2**16, whole=True)
    if tree_size is not None:
        check("tree size", tree_size, 1, MAX_TREE, whole=True)
    check_prompts(model, prompts)
    rows = max(min(len(prompt) + max_new_tokens, model.config.block_size) for prompt in prompts)
    batch = min(len(prompts), batch_size or BATCH_SIZE)
    if batch_size is None:  # nobody asked for more than fits
        batch = largest_batch(model, heads, batch, rows, tree_size or 1, sampling, free_memory(model.device)) or 1
    fit = None
    if tree_size is None and heads:
        from tools.tune import fit_tree
        check_memory(model, None, batch, rows, 1, sampling)
        fit = fit_tree(model, heads, batch, rows, sampling, beams, graph, fresh)
        tree_size = fit.tree_size
    engine = Engine(model, heads, batch_size=batch, rows=rows, tree_size=tree_size or 1, beams=beams, sampling=sampling, graph=graph)
    engine.fit = fit
    return engine


def generate(model, prompts, max_new_tokens, heads=None, *, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0,
             tree_size=None, beams=None, stop=(), batch_size=None, on_tokens=None, encoding=None, graph=True):
    """Continues prompts (lists of token ids) with the model's own tokens: the same ones with any heads, tree or batch.

    tree_size: nodes T verified per step, root included; 1 is plain decoding, None the size that is quickest here (fit.py).
    beams: W, default about the square root of T. stop: token ids and, with an `encoding` to read them by, texts that end
    a sequence; the token that does it is kept. batch_size: sequences decoded together, default up to 8; a finished one makes
    room for the next prompt. on_tokens(index, tokens) is called with the tokens of each step. graph: on CUDA, replay the
    step from a graph. Returns `Output`. Raises InputError for what cannot be decoded, Interrupted on Ctrl-C.
    """
    engine = prepare(model, prompts, max_new_tokens, heads, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
                     seed=seed, tree_size=tree_size, beams=beams, batch_size=batch_size, graph=graph)
    return engine.generate(prompts, max_new_tokens, stop, on_tokens, encoding)


if __name__ == "__main__":
    from tools.cli import command, main
    command(main)
