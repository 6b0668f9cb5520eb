"""What each step drafts. A larger tree finds more tokens per step, and makes the step slower.

How much slower is measured, once for a machine, model and batch size. How many tokens the heads find is known from
training: they carry a table of how often the n-th likeliest node of a tree is accepted, by depth. How many lookup finds
depends on the text. So a few variants, picked by step times and table, are tried while decoding, and each step takes
the one that brings most tokens per second: `Choice`.
"""

import contextlib
import hashlib
import itertools
import json
import math
import operator
import os
import platform
import sys
import time
from bisect import bisect_right
from dataclasses import asdict
from pathlib import Path

import torch

from clover import MAX_TREE
from generate import DEFAULT_TREE, STAGES, Engine, Fixed, Sampling, Variant, capture, check_beams
from kernels import unchecked
from model import Group, InputError, atomic_write, pack

TREE_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
CHAINS = (4, 10, 20)  # tokens of lookup
ROUNDS = 3      # on a CPU, whose other work comes and goes, the fastest of these counts
PREFIX = 256    # tokens in the cache while a step is timed
MEASURED = {}   # cache_key -> {Variant: seconds per step}, of this process
MEMORY = 32     # steps that a running mean looks back on
FEWEST = 4      # an expectation counts as much as so many sequences of one step
STALE = 8       # steps that showed nothing of a variant, after which it may be tried
TRIALS = 0.01   # share of the time that may be lost by trying other variants
MARGIN = 0.06   # plain decoding is taken where it is this near the best: a batch's texts then end together
HOPE = 0.4      # expected of lookup, until more is known: how likely each token is right after those before it
GOES_ON = 0.8   # the same, of a chain that was right so far
READ_SEQUENCE, READ_TOKEN = Variant(-1, 0), Variant(-1, 1)  # among step times: those of the heads' reading


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

def seconds(body, device, group=None):
    """Time of one body(): on a CPU the fastest call, since other work on the machine only adds; on CUDA the mean of
    calls back to back, the fastest of some rounds. Takes about a tenth of a second, or three rounds of what is slower.
    group: the ranks that run body() together, the result being rank 0's."""
    group, calls = group or Group(), 10 if device.type == "cuda" else 1

    def once():
        start = time.perf_counter()
        for _ in range(calls):
            body()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / calls
    body()
    times = [once() for _ in range(3)]
    more = group.first(math.ceil(0.1 / max(calls * min(times), 1e-6)) - 3)  # all ranks must take as many
    return group.first(min(times + [once() for _ in range(more)]))


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
    engine = timing_engine(model, heads, batch_size, variant, sampling, beams, graph, capacity)  # graphs keep no tensor
    return seconds(engine.body(), model.device, model.group)


@torch.inference_mode()
def reading_times(model, heads):
    """Seconds per sequence, and per token, in which the heads read what steps without them emitted."""
    pack(heads, model.group)

    def read(n):
        hidden = torch.zeros(1, n, model.config.n_embd, device=model.device, dtype=model.dtype)
        tokens, positions = hidden[:, :, 0].long(), torch.arange(n, device=model.device)[None]
        cache = heads.new_cache(1, n)
        return seconds(lambda: heads.augment(hidden, tokens, positions, cache, end=n), model.device, model.group)
    one, many = read(1), read(64)
    return {READ_SEQUENCE: one, READ_TOKEN: max(many - one, 1e-9) / 63}


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
        return {name: seconds(stages[name], device, model.group) if name in stages else 0.0 for name in STAGES}


# ---------------------------------------------------------------------------------------------------------------------
# The file of step times, which the command lines keep

def times_file():
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clover" / "step_times.json"


def cache_key(model, heads, batch_size, capacity, sampling, beams, graph):
    """16 hex digits over all that a step's time depends on."""
    gpu = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else None
    what = ("guesses", asdict(model.config), str(model.dtype), heads and asdict(heads.config), batch_size,
            min(capacity, PREFIX + 1), beams, graph, sampling.temperature > 0, sampling.filtered, gpu, platform.node(),
            torch.get_num_threads(), torch.__version__, model.group.size)
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def read_times(file):
    """{cache_key: {Variant: seconds}}; nothing where the file is missing or broken, so that all is measured again."""
    try:
        times = {key: {Variant._make(map(int, name.split("+"))): float(value) for name, value in entry.items()}
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

class Choice:
    """Which variant the next step takes: that of most tokens per second, by times that were measured and a running mean
    of the tokens that it finds. A step also tells what the variants that are part of its own would have found. Others
    are tried now and then: trials may lose a share TRIALS of the time.

    seconds: {Variant: seconds per step}. expected: {Variant: tokens per step and sequence}, until more is known.
    reading: (seconds per sequence, seconds per token) in which the heads read what steps without them emitted.
    """

    def __init__(self, seconds, expected, reading=(0.0, 0.0)):
        self.variants, self.seconds, self.expected, self.reading = tuple(seconds), seconds, expected, reading
        self.tokens = dict(expected)              # running means
        self.weights = dict.fromkeys(seconds, 0)  # how many steps each of them stands for
        self.added = dict.fromkeys(seconds, 0)    # the step that was last added to it
        self.shown = dict.fromkeys(seconds, 0)    # the step that last showed for certain what the variant finds
        # by token of lookup's chain: how often it is right, where those before it are
        self.goes_on = [GOES_ON] * max(variant.lookup for variant in seconds)
        self.step = 0
        self.allowance = 0.0  # seconds that trials may lose

    def rate(self, variant):
        """Tokens per second and sequence."""
        return self.tokens[variant] / self.seconds[variant]

    def best(self):
        return max(self.variants, key=lambda v: self.rate(v) * (1 if v.heads or v.lookup else 1 + MARGIN))

    def loss(self, variant, best, unread):
        """Seconds that a step of this variant is expected to lose to one of the best."""
        loss = max(self.seconds[variant] - self.tokens[variant] / self.rate(best), 0.0)
        if bool(variant.heads) != bool(best.heads):  # the heads have to read, now or when the best has its turn again
            loss += self.reading[0] * len(unread) + self.reading[1] * sum(unread)
        return loss

    def pick(self, unread):
        """unread: of each sequence, how many tokens the heads have not read."""
        best = self.best()
        stale = [v for v, shown in self.shown.items() if v != best and self.step - shown >= STALE]
        losses = {v: max(self.loss(v, best, unread), 1e-9) for v in stale}
        losses = {v: loss for v, loss in losses.items() if loss <= self.most_allowed(best)}
        due = max(losses, key=lambda v: (self.step - self.shown[v]) / losses[v], default=best)
        return due if losses.get(due, 0.0) <= self.allowance else best

    def most_allowed(self, best):
        """Seconds that trials may lose at most, however long there was none."""
        return MEMORY * self.seconds[best]

    def learn(self, variant, found, unread):
        """What a step of `variant` found in each sequence: (its tokens, its path, lookup's chain or None), as
        `Engine.retire` has them; unread as it was picked with."""
        self.step += 1
        best = self.best()
        self.allowance += TRIALS * self.seconds[variant] - self.loss(variant, best, unread)
        self.allowance = min(self.allowance, self.most_allowed(best))
        right = [right_tokens(tokens, chain) if variant.lookup else 0 for tokens, _, chain in found]
        for n in right:
            for i in range(min(n + 1, variant.lookup)):
                self.goes_on[i] += ((i < n) - self.goes_on[i]) / MEMORY
        for other in self.variants if found else ():
            if other.heads <= variant.heads and (variant.lookup or not other.lookup):
                beyond = sum(itertools.accumulate(self.goes_on[variant.lookup:other.lookup], operator.mul))
                self.add(other, [would_find(other, variant, path, n, beyond) for (_, path, _), n in zip(found, right)])
                if other.lookup <= variant.lookup or max(right) < variant.lookup:
                    self.shown[other] = self.step

    def add(self, variant, tokens):
        """Adds one step's tokens, of each sequence, to a running mean, which weighs less the longer it was left alone.
        It weighs no less than FEWEST sequences do in one step."""
        faded = min(self.weights[variant], MEMORY) * (1 - 1 / MEMORY) ** (self.step - self.added[variant] - 1)
        self.weights[variant] = max(faded, FEWEST / len(tokens)) + 1
        self.tokens[variant] += (sum(tokens) / len(tokens) - self.tokens[variant]) / self.weights[variant]
        self.added[variant] = self.step


def right_tokens(tokens, chain):
    """How many tokens of lookup's chain were right, where a step emitted `tokens`. Where lookup drafted alone, chain is
    None: all were but the last."""
    n = len(tokens) - 1
    return n if chain is None else next((i for i in range(n) if i == len(chain) or chain[i] != tokens[i]), n)


def would_find(other, variant, path, right, beyond):
    """How many tokens a step of `other` would have emitted where one of `variant`, of which it is part, had this path,
    root first, and so many right tokens of lookup's chain; `beyond` more, where these were all that it had.

    A short chain is the front of a longer one, and a small tree of the heads that of a larger one with as many beams;
    with fewer it finds nearly as much.
    """
    by_heads = bisect_right(path, other.heads) - 1
    by_lookup = min(right, other.lookup) + (beyond if right == variant.lookup < other.lookup else 0)
    return 1 + max(by_heads, by_lookup)


def fit(model, heads, lookup, batch_size, capacity, sampling, beams=None, graph=True, file=None, fresh=False):
    """The `Choice` among the variants that heads (or None) and lookup (or False) allow, with what each takes here.

    capacity: tokens a sequence can have. file: where step times are kept between processes, None for nowhere. fresh:
    measure again what is known. InputError for beams out of range.
    """
    tables = heads.info.get("acceptance") if heads else None
    if beams is not None:
        check_beams(model, heads, beams)  # not below, where a tree that is refused is taken for one without room
    key = cache_key(model, heads, batch_size, capacity, sampling, beams, graph)
    times = {} if fresh else (read_times(file).get(key, {}) if file else {}) | MEASURED.get(key, {})
    times = model.group.first(times)  # what is measured is rank 0's too: all must take the same variants
    known = len(times)
    measure = lambda variant: step_time(model, heads, batch_size, variant, sampling, beams, graph, capacity)
    rounds, errors = ROUNDS if model.device.type == "cpu" else 1, no_room(model.group)

    def expected(variant):
        tree_size = variant.heads + 1
        by_heads = expected_tokens(tables, tree_size, sampling.temperature) if tables else min(tree_size, 2)
        return by_heads + sum(HOPE**i for i in range(1, variant.lookup + 1))

    def enough(tried):
        """No larger tree can win where even the largest would not, with steps as fast as this one's."""
        rate = lambda variant: expected(variant) / times[variant]
        return expected(Variant(MAX_TREE - 1)) / times[tried[-1]] < max(map(rate, tried))

    if file and not known:
        print("measuring how long steps take on this machine; kept for the next run", file=sys.stderr)
    sizes = TREE_SIZES if tables else (1, DEFAULT_TREE) if heads else (1,)
    tried = measure_steps([Variant(size - 1) for size in sizes], times, measure, rounds, errors, enough)
    trees = some_trees(tried[1:], lambda variant: expected(variant) / times[variant])
    chains = measure_steps(some_chains(trees), times, measure, rounds, errors) if lookup else []
    if trees and READ_TOKEN not in times:
        with contextlib.suppress(*errors):
            times |= reading_times(model, heads)
    if len(times) > known:
        MEASURED[key] = times
        if file and not model.group.rank:
            write_times(file, key, times)
    variants = list(dict.fromkeys((*tried[:1], *trees, *chains))) or [Variant()]  # the Engine says what has no room
    return Choice({variant: at_most(variant, times) for variant in variants},
                  {variant: expected(variant) for variant in variants},
                  (times.get(READ_SEQUENCE, 0.0), times.get(READ_TOKEN, 0.0)))


def some_trees(trees, rate):
    """Of the heads' trees the best, and the best of half its size."""
    best = max(trees, key=rate, default=None)
    small = [tree for tree in trees if tree.heads <= max(best.heads // 2, 1)]
    return [max(small, key=rate, default=best), best] if trees else []


def some_chains(trees):
    """Lookup alone, and beside the heads' trees."""
    alone = [Variant(0, n) for n in CHAINS]
    beside = zip((trees[0], trees[1], trees[1]), CHAINS) if trees else ()
    return alone + [Variant(min(tree.heads, MAX_TREE - 1 - n), n) for tree, n in beside]


def no_room(group):
    """What says that the memory has no room. Ranks do not run out of it alike: where that was not foreseen, all end."""
    return (InputError,) if group.size > 1 else (InputError, torch.OutOfMemoryError)


def measure_steps(variants, times, measure, rounds, errors, enough=lambda tried: False):
    """Adds to `times` what measure(variant) gives, where it is not known: the least of so many rounds, in turns.
    -> [the variants] before the first that the memory has no room for, by `no_room`'s errors, and up to where it is
    `enough`."""
    tried, new = [], []
    for variant in variants:
        if variant not in times:
            try:
                times[variant] = measure(variant)
            except errors:
                break
            new.append(variant)
        tried.append(variant)
        if enough(tried):
            break
    for _ in range(rounds - 1):
        for variant in new:
            with contextlib.suppress(*errors):  # what else runs may have taken the memory
                times[variant] = min(times[variant], measure(variant))
    return tried


def at_most(variant, times):
    """A variant's time. What does more and took less shows that other work slowed this one down."""
    more = [time for v, time in times.items() if v.heads >= variant.heads and v.lookup >= variant.lookup]
    return min(more, default=1.0)


def explain(engine, heads, output, graph=True):
    """The lines of --explain: what each step was chosen from, how often, what it found, and where its time goes."""
    model, choice = engine.model, engine.choice
    lines = [f"batch size {engine.batch_size}, on {model.device}"]
    if isinstance(choice, Choice):
        lines += ["", f"{'drafted by':<24}{'ms per step':>12}{'tokens per step: expected':>28}{'found':>8}"
                  f"{'tokens per second and sequence':>33}{'share of steps':>17}"]
    for v in choice.variants if isinstance(choice, Choice) else ():
        steps, tokens = output.variants.get(v, (0, 0))
        found, rate = (f"{tokens / steps:.2f}", tokens / steps / choice.seconds[v]) if steps else ("-", choice.rate(v))
        lines.append(f"{str(v):<24}{choice.seconds[v] * 1e3:>12.2f}{choice.expected[v]:>28.2f}{found:>8}{rate:>33.0f}"
                     f"{steps / max(output.steps, 1):>17.0%}")
    if isinstance(choice, Choice) and heads and not heads.info.get("acceptance"):
        lines.append("these heads carry no acceptance table, hence a tree that is not fitted to them; train_heads.py "
                     "--evaluate makes one")
    lines += ["", f"{'ms per stage':<24}" + "".join(f"{stage:>10}" for stage in STAGES)]
    most = max(output.variants, key=lambda v: output.variants[v][0], default=engine.variants[0])
    for variant in dict.fromkeys((Variant(), most)):
        times = stage_times(model, heads, engine.batch_size, variant, engine.sampling, engine.given_beams, graph)
        lines.append(f"{str(variant):<24}" + "".join(f"{times[stage] * 1e3:>10.2f}" for stage in STAGES))
    return lines
