"""What each step drafts. A larger tree finds more tokens per step, and makes the step slower.

How much slower is measured, once for a machine, model and batch size. How many tokens the heads find is known from
training: they carry a table of how often the n-th likeliest node of a tree is accepted, by depth. How many lookup finds
depends on the text. So a few variants, picked by step times and table, are tried while decoding, and each step takes
the one that brings most tokens per second: `Choice`.
"""

import hashlib
import itertools
import json
import math
import operator
import os
import platform
import time
from bisect import bisect_left
from dataclasses import asdict
from pathlib import Path

import torch

from clover import MAX_TREE
from generate import DEFAULT_TREE, STAGES, Engine, Sampling, Variant, capture, check_beams
from kernels import unchecked
from model import InputError, atomic_write

TREE_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
CHAINS = (4, 10, 20)  # tokens of lookup
ROUNDS = 3      # on a CPU, whose other work comes and goes, the fastest of these counts
PREFIX = 256    # tokens in the cache while a step is timed
MEASURED = {}   # cache_key -> {Variant: seconds per step}, of this process
MEMORY = 32     # steps that a running mean looks back on
FEWEST = 4      # an expectation, or a mean that nothing was added to for long, counts as a step of so many sequences
TRIALS = 0.01   # share of the time that may be lost by trying other variants
HOPE = 0.3      # expected of lookup, until more is known: that a chain's first token is right; the others, twice that


# ---------------------------------------------------------------------------------------------------------------------
# What heads find

@torch.inference_mode()
def acceptance(model, heads, prompts, temperature, max_new_tokens=64, batch_size=8):
    """How often node n of a tree, the n-th likeliest, was accepted at depth d: [[share] * 63] * K, row d - 1, column n
    - 1.

    Counted over the steps of decoding the prompts with trees of 64 nodes and 8 beams. A smaller tree with as many beams
    is the front of a larger one, and fewer beams find nearly as much. So one table serves all sizes.
    """
    capacity = min(max(map(len, prompts)) + max_new_tokens, model.config.block_size)
    engine = Engine(model, heads, batch_size=min(batch_size, len(prompts)), capacity=capacity, tree_size=MAX_TREE,
                    sampling=Sampling(temperature), graph=False)
    hits = torch.zeros(heads.config.n_draft, MAX_TREE - 1)

    def count(index, tokens, path, variant):
        for depth, node in enumerate(path[1:]):
            hits[depth, node - 1] += 1
    output = engine.generate(prompts, max_new_tokens, on_step=count)
    return (hits / output.steps).tolist()


def expected_tokens(tables, tree_size, temperature):
    """Tokens per step of a tree of T nodes: the bonus token and each node's share. tables: {temperature: `acceptance`}.
    Interpolates linearly between measured temperatures and clamps outside."""
    total = lambda table: 1 + sum(sum(row[:tree_size - 1]) for row in table[:tree_size - 1])
    found = sorted((float(t), total(table)) for t, table in tables.items())
    below = max((f for f in found if f[0] <= temperature), default=found[0])
    above = min((f for f in found if f[0] >= temperature), default=found[-1])
    share = (temperature - below[0]) / (above[0] - below[0]) if above[0] > below[0] else 0
    return below[1] + share * (above[1] - below[1])


# ---------------------------------------------------------------------------------------------------------------------
# What a step takes

def seconds(body, device):
    """Time of one body(): on a CPU the fastest call, since other work on the machine only adds; on CUDA the mean of
    calls back to back, the fastest of some rounds. Takes a tenth of a second, or three rounds of what is slower."""
    calls, times = 10 if device.type == "cuda" else 1, []
    body()
    began = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - began < 0.1:
        start = time.perf_counter()
        for _ in range(calls):
            body()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - start) / calls)
    return min(times)


def copy_bandwidth(device):
    """Bytes read and written per second by a copy of 2 GiB, on a CPU of 256 MiB."""
    source = torch.ones(2**31 if device.type == "cuda" else 2**28, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source), device)


def timing_engine(model, heads, batch_size, variant, sampling, beams=None, graph=True, capacity=PREFIX + 1):
    """An engine that can step for ever: its slots are idle, with PREFIX tokens in the cache, or fewer where `capacity`,
    the most that a sequence will have, is less."""
    prefix = min(PREFIX, model.config.block_size - 1, capacity - 1)
    engine = Engine(model, heads, batch_size=batch_size, capacity=prefix + 1, choice=Fixed(variant), beams=beams,
                    sampling=sampling, graph=graph)
    engine.slots.cache.lengths.fill_(prefix)
    return engine


@torch.inference_mode()
def step_time(model, heads, batch_size, variant, sampling, beams=None, graph=True, capacity=PREFIX + 1):
    """Seconds of one step."""
    return seconds(timing_engine(model, heads, batch_size, variant, sampling, beams, graph, capacity).body(),
                   model.device)


@torch.inference_mode()
def reading_time(model, heads, n=64):
    """Seconds per token in which the heads read a text."""
    n = min(n, model.config.block_size)
    hidden = torch.zeros(1, n, model.config.n_embd, device=model.device, dtype=model.dtype)
    tokens = torch.zeros(1, n, device=model.device, dtype=torch.int64)
    cache, positions = heads.new_cache(1, n), torch.arange(n, device=model.device)[None]
    return seconds(lambda: heads.augment(hidden, tokens, positions, cache, end=n), model.device) / n


@torch.inference_mode()
def stage_times(model, heads, batch_size, variant, sampling, beams=None, graph=True):
    """{stage: seconds} of one step, each stage timed by itself; on CUDA as a graph of its own, if `graph`. A tree of
    one is not drafted: 0."""
    engine, device = timing_engine(model, heads, batch_size, variant, sampling, beams, graph=False), model.device
    variant, = engine.variants
    tree, _ = engine.draft(variant)
    hidden = engine.verify(tree)
    target = engine.sample(tree, hidden)
    accepted = engine.accept(variant, tree, target)
    stages = dict(draft=lambda: engine.draft(variant), verify=lambda: engine.verify(tree),
                  sample=lambda: engine.sample(tree, hidden), accept=lambda: engine.accept(variant, tree, target),
                  commit=lambda: engine.commit(variant, hidden, accepted))
    if engine.tree_size == 1:
        del stages["draft"]  # nothing is launched, and torch warns of an empty CUDA graph
    if graph and device.type == "cuda":
        stages = {name: capture(stage, device)[1] for name, stage in stages.items()}
    with unchecked():  # as in all steps but the first
        return {name: seconds(stages[name], device) if name in stages else 0.0 for name in STAGES}


# ---------------------------------------------------------------------------------------------------------------------
# The file of step times, which the command lines keep

def times_file():
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clover" / "step_times.json"


def cache_key(model, heads, batch_size, capacity, sampling, beams, graph):
    """16 hex digits over all that a step's time depends on."""
    gpu = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else None
    what = (asdict(model.config), str(model.dtype), heads and asdict(heads.config), batch_size,
            min(capacity, PREFIX + 1), beams, graph, sampling.temperature > 0, sampling.filtered, gpu, platform.node(),
            torch.get_num_threads(), torch.__version__)
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def read_times(file):
    """{cache_key: {Variant: seconds}}; nothing where the file is missing or broken, so that all is measured again."""
    try:
        times = {key: {Variant(*map(int, name.split("+"))): float(value) for name, value in entry.items()}
                 for key, entry in json.loads(file.read_text()).items()}
        return times if all(0 < value < math.inf for entry in times.values() for value in entry.values()) else {}
    except (AttributeError, OSError, TypeError, ValueError):
        return {}


def write_times(file, key, times):
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        known = {key: {f"{v.heads}+{v.lookup}": value for v, value in entry.items()}
                 for key, entry in (read_times(file) | {key: times}).items()}
        text = json.dumps(known, indent=1)
        atomic_write(file, lambda tmp: Path(tmp).write_text(text))
    except OSError:  # a home that cannot be written to: measured again next time
        pass


# ---------------------------------------------------------------------------------------------------------------------
# The choice

class Fixed:
    """The choice of a single variant."""

    def __init__(self, variant):
        self.variants = (variant,)

    def pick(self, unread=0):
        return self.variants[0]

    def learn(self, variant, found):
        pass


class Choice:
    """Which variant the next step takes: that of most tokens per second, by times that were measured and a running mean
    of the tokens that it finds. A step also tells what the variants that are part of its own would have found. Others
    are tried now and then: trials may lose a share TRIALS of the time.

    seconds: {Variant: seconds per step}. expected: {Variant: tokens per step and sequence}, until more is known.
    reading: seconds per token that the heads have not read, which they must before they draft.
    """

    def __init__(self, seconds, expected, reading=0.0):
        self.reading, self.unread = reading, 0  # the latter in tokens of all sequences, when last picked
        self.variants, self.seconds, self.expected = tuple(seconds), seconds, expected
        self.tokens = dict(expected)                   # running means
        self.weights = dict.fromkeys(seconds, 0)       # steps that each stands for
        self.shown = dict.fromkeys(seconds, 0)         # step that last showed what a variant finds
        self.step, self.allowance = 0, 0.0             # the latter in seconds, for trials
        longest = max(variant.lookup for variant in seconds)
        self.right = [share for share, _ in zip(hopes(), range(longest))]  # chains whose i-th token was right, after
        self.wrong = [1 - share for share in self.right]                   # those before it; and was wrong

    def rate(self, variant):
        """Tokens per second and sequence."""
        return self.tokens[variant] / self.seconds[variant]

    def loss(self, variant, best):
        """Seconds that a step of this variant is expected to lose to one of the best."""
        reading = self.reading * self.unread if variant.heads > 1 and variant != best else 0.0
        return self.seconds[variant] + reading - self.tokens[variant] / self.rate(best)

    def pick(self, unread=0):
        """unread: tokens of the running sequences that the heads have not read."""
        self.unread, best = unread, max(self.variants, key=self.rate)
        age = {v: self.step - shown for v, shown in self.shown.items() if v != best and self.step - shown >= MEMORY}
        due = max(age, key=lambda v: age[v] / max(self.loss(v, best), 1e-9), default=best)
        return due if self.loss(due, best) <= self.allowance else best

    def learn(self, variant, found):
        """What a step of `variant` found in each sequence: (its tokens, its path, lookup's chain or None), as
        `Engine.retire` has them."""
        self.step += 1
        best = max(self.variants, key=self.rate)
        self.allowance += TRIALS * self.seconds[variant] - self.loss(variant, best)
        right = [right_tokens(tokens, chain) if variant.lookup else 0 for tokens, _, chain in found]
        self.count_chains(variant, right)
        for other in self.variants if found else ():
            if other.heads <= variant.heads and (variant.lookup or not other.lookup):
                beyond = self.beyond(variant.lookup, other.lookup)
                tokens = [would_find(other, variant, path, n, beyond) for (_, path, _), n in zip(found, right)]
                self.add(other, tokens)
                if other.lookup <= variant.lookup:
                    self.shown[other] = self.step

    def add(self, variant, tokens):
        """Adds one step's tokens, of each sequence, to a running mean, which weighs less the longer nothing showed what
        it should be."""
        age = self.step - self.shown[variant] - 1
        weight = max(min(self.weights[variant], MEMORY) * (1 - 1 / MEMORY) ** age, FEWEST / len(tokens)) + 1
        self.tokens[variant] += (sum(tokens) / len(tokens) - self.tokens[variant]) / weight
        self.weights[variant] = weight

    def count_chains(self, variant, right):
        """Counts how far chains were right, the older steps ever less."""
        if not variant.lookup or not right:
            return
        for counts in (self.right, self.wrong):
            counts[:] = [count * (1 - 1 / MEMORY) for count in counts]
        for n in right:
            for i in range(n):
                self.right[i] += 1
            if n < variant.lookup:
                self.wrong[n] += 1

    def beyond(self, n, longest):
        """How many more tokens of a chain are right, up to `longest`, where n were: the Kaplan-Meier estimate, since it
        is not seen how chains that were right to their end would have gone on."""
        total, chance = 0.0, 1.0
        for i in range(n, longest):
            chance *= self.right[i] / (self.right[i] + self.wrong[i])
            total += chance
        return total


def hopes():
    """How likely the tokens of a chain are right, each after those before it, until more is known."""
    return itertools.chain([HOPE], itertools.repeat(2 * HOPE))


def right_tokens(tokens, chain):
    """How many tokens of lookup's chain were right, where a step emitted `tokens`. Where lookup drafted alone, chain is
    None: all were but the last."""
    n = len(tokens) - 1
    return n if chain is None else next((i for i in range(n) if i == len(chain) or chain[i] != tokens[i]), n)


def would_find(other, variant, path, right, beyond):
    """How many tokens a step of `other` would have emitted where one of `variant`, of which it is part, had this path,
    root first, and so many right tokens of lookup's chain; `beyond` more, where these were all that it had.

    A small tree of the heads is the front of a larger one, a short chain that of a longer one.
    """
    by_heads = bisect_left(path, other.heads) - 1 if other.heads > 1 else 0
    by_lookup = min(right, other.lookup) + (beyond if right == variant.lookup < other.lookup else 0)
    return 1 + max(by_heads, by_lookup)


def fit(model, heads, lookup, batch_size, capacity, sampling, beams=None, graph=True, file=None, fresh=False):
    """The `Choice` among the variants that heads (or None) and lookup (or False) allow: plain decoding, two trees of
    the heads, the best by step times and acceptance table and a smaller one, three chains of lookup, and three of both.

    capacity: tokens a sequence can have. file: where step times are kept between processes, None for nowhere. fresh:
    measure again what is known. InputError for beams out of range.
    """
    tables = heads.info.get("acceptance") if heads else None
    if beams is not None:
        check_beams(model, heads, beams)  # not below, where a tree that is refused is taken for one without room
    key = cache_key(model, heads, batch_size, capacity, sampling, beams, graph)
    times = {} if fresh else (read_times(file).get(key, {}) if file else {}) | MEASURED.get(key, {})
    known = len(times)

    def expected(variant):
        found = expected_tokens(tables, variant.heads, sampling.temperature) if tables else 1 + (variant.heads > 1)
        return found + sum(itertools.accumulate(itertools.islice(hopes(), variant.lookup), operator.mul))

    measure = lambda variant: step_time(model, heads, batch_size, variant, sampling, beams, graph, capacity)
    rate = lambda variant: expected(variant) / times[variant]
    # no larger tree can win where even the largest would not, with steps as fast as this one's
    enough = lambda tried: expected(Variant(MAX_TREE)) / times[tried[-1]] < max(map(rate, tried))
    sizes = TREE_SIZES if tables else (1, DEFAULT_TREE) if heads else (1,)
    tried = measure_steps(map(Variant, sizes), times, measure, enough)
    if not tried:  # not even for plain decoding is there room, of which the Engine will say more
        return Fixed(Variant())
    plain, *trees = tried
    if trees:
        best = max(trees, key=rate)
        trees = max((v for v in trees if v.heads <= max(best.heads // 2, 2)), key=rate, default=best), best
    chains = [Variant(1, n) for n in CHAINS] if lookup else []
    for n, tree in zip(CHAINS if lookup else (), (*trees, *trees[1:])):
        chains.append(Variant(min(tree.heads, MAX_TREE - n), n))
    variants = dict.fromkeys((plain, *trees, *measure_steps(chains, times, measure)))
    if len(times) > known:
        MEASURED[key] = times
        if file:
            write_times(file, key, times)
    reading = reading_time(model, heads) if trees else 0.0
    return Choice({v: times[v] for v in variants}, {v: expected(v) for v in variants}, reading)


def measure_steps(variants, times, measure, enough=lambda tried: False):
    """Adds to `times` what measure(variant) gives, where it is not known; on a CPU the least of ROUNDS rounds in turns.
    -> [the variants], without those from the first on that the memory has no room for, or that `enough` leaves out."""
    tried, new = [], []
    for variant in variants:
        if variant not in times:
            try:
                times[variant] = measure(variant)
            except (InputError, torch.OutOfMemoryError):
                break
            new.append(variant)
        tried.append(variant)
        if enough(tried):
            break
    for _ in range(ROUNDS - 1):
        times |= {variant: min(times[variant], measure(variant)) for variant in new}
    for variant in new:  # what took less and does more shows that other work slowed this one down
        times[variant] = min(t for v, t in times.items() if v.heads >= variant.heads and v.lookup >= variant.lookup)
    return tried


def explain(engine, heads, output, graph=True):
    """The lines of --explain: what each step was chosen from, how often, what it found, and where its time goes."""
    model, choice = engine.model, engine.choice
    lines = [f"batch size {engine.batch_size}, on {model.device}"]
    if choice:
        lines += ["", f"{'drafted by':<24}{'ms per step':>12}{'tokens per step: expected':>28}{'found':>8}"
                  f"{'tokens per second and sequence':>33}{'share of steps':>17}"]
    for v in choice.variants if choice else ():
        steps, tokens = output.variants.get(v, (0, 0))
        found, rate = (f"{tokens / steps:.2f}", tokens / steps / choice.seconds[v]) if steps else ("-", choice.rate(v))
        lines.append(f"{str(v):<24}{choice.seconds[v] * 1e3:>12.2f}{choice.expected[v]:>28.2f}{found:>8}{rate:>33.0f}"
                     f"{steps / max(output.steps, 1):>17.0%}")
    if heads and not heads.info.get("acceptance"):
        lines.append("these heads carry no acceptance table, hence a tree that is not fitted to them; train_heads.py "
                     "--evaluate makes one")
    lines += ["", f"{'ms per stage':<24}" + "".join(f"{stage:>10}" for stage in STAGES)]
    most = max(output.variants, key=lambda v: output.variants[v][0], default=engine.variants[0])
    for variant in dict.fromkeys((Variant(), most)):
        times = stage_times(model, heads, engine.batch_size, variant, engine.sampling, engine.given_beams, graph)
        lines.append(f"{str(variant):<24}" + "".join(f"{times[stage] * 1e3:>10.2f}" for stage in STAGES))
    return lines
