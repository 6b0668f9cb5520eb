"""What each step drafts. A larger tree finds more tokens per step, and makes the step slower.

How much slower is measured, once for a machine, model and batch size. How many tokens the heads
find is known from training: they carry a table of how often the n-th likeliest node of a tree is
accepted, by depth. How many lookup finds depends on the text. So a few plans, selected by step
times and table, are tried while decoding, and each step takes the one that brings most tokens per
second: `AdaptivePolicy`."""

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
from functools import partial
from pathlib import Path

import numpy as np
import torch

from backends.tensor_parallel import Group, group_of
from clover import check_beams
from generate import DEFAULT_TREE, Decoder, DraftPlan, FixedPolicy, capture, prepare
from kernels import unchecked
from model import MAX_TREE, InputError, atomic_write

STAGES = ("draft", "verify", "sample", "accept", "commit")
TREE_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
CHAINS = (4, 10, 20)  # tokens of lookup
ROUNDS = 3      # on a CPU, whose other work comes and goes, the fastest of these counts
PREFIX = 256    # tokens in the cache while a step is timed
MEASURED = {}   # cache_key -> {DraftPlan: seconds per step}, of this process
MEMORY = 32     # steps that a running mean looks back on
FEWEST = 4      # an expectation counts as much as this many sequences of one step
STALE = 8       # steps that showed nothing of a plan, after which it may be tried
TRIALS = 0.01   # share of the time that may be lost by trying other plans
# plain decoding is taken where it is this near the best: a batch's texts then end together
MARGIN = 0.06
# expected of lookup until more is known: how likely a token is right if those before it are
HOPE = 0.4
GOES_ON = 0.8   # the same, of a chain that was right so far


# --------------------------------------------------------------------------------------------------
# What heads find

@torch.inference_mode()
def acceptance(model, heads, prompts, temperature, max_new_tokens=64, batch_size=8):
    """How often node n of a tree, the n-th likeliest, was accepted at depth d: row d - 1, column
    n - 1 of [[share] * 63] * K.

    Counted over the steps of decoding the prompts with trees of 64 nodes and 8 beams. A smaller
    tree with as many beams is the front of a larger one, and fewer beams find nearly as much. So
    one table serves all sizes."""
    engine = prepare(model, prompts, max_new_tokens, heads, batch_size=batch_size, graph=False,
                     policy=FixedPolicy(DraftPlan(MAX_TREE - 1)), temperature=temperature)
    hits = torch.zeros(heads.config.n_draft, MAX_TREE - 1)

    def count(index, tokens, path, plan):
        for depth, node in enumerate(path[1:]):
            hits[depth, node - 1] += 1
    output = engine.generate(prompts, max_new_tokens, on_step=count)
    return (hits / output.steps).tolist()


def expected_tokens(tables, tree_size, temperature):
    """Tokens per step of a tree of T nodes: the bonus token and each node's share. tables:
    {temperature: `acceptance`}. Interpolates linearly between measured temperatures and clamps
    outside."""
    total = lambda table: 1 + sum(sum(row[:tree_size - 1]) for row in table[:tree_size - 1])
    found = sorted((float(t), total(table)) for t, table in tables.items())
    return float(np.interp(temperature, *zip(*found)))


# --------------------------------------------------------------------------------------------------
# What a step takes

def seconds(body, device, group=None):
    """Time of one body(): on a CPU the fastest call, since other work on the machine only adds; on
    CUDA the mean of calls back to back, the fastest of some rounds. Takes about a tenth of a
    second, or three rounds of what is slower. group: the ranks that run body() together; the
    result is rank 0's."""
    group = group or Group()
    calls = 10 if device.type == "cuda" else 1

    def once():
        start = time.perf_counter()
        for _ in range(calls):
            body()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / calls
    body()
    times = [once() for _ in range(3)]
    more = math.ceil(0.1 / max(calls * min(times), 1e-6)) - 3
    more = group.broadcast(more)  # all ranks must take as many
    return group.broadcast(min(times + [once() for _ in range(more)]))


def copy_bandwidth(device):
    """Bytes read and written per second by a copy of 2 GiB, on a CPU of 256 MiB."""
    size = 2**31 if device.type == "cuda" else 2**28
    source = torch.ones(size, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source), device)


@torch.inference_mode()
def timing_decoder(model, heads, plan, capacity=PREFIX + 1, **options):
    """A `Decoder` of one plan that can step forever: its slots are idle, with PREFIX tokens in the
    cache, or fewer where `capacity`, the most that a sequence will have, is less. options: the
    Decoder's."""
    capacity = min(capacity, PREFIX + 1, model.config.block_size)
    decoder = Decoder(model, heads, capacity=capacity, plans=(plan,), **options)
    decoder.slots.cache.lengths.fill_(capacity - 1)
    if decoder.pool is not None:
        decoder.step(plan)  # compiles it: what is timed is its graph
    return decoder


@torch.inference_mode()
def step_time(decoder):
    """Seconds of one step of a `timing_decoder`."""
    return seconds(decoder.body(), decoder.model.device, group_of(decoder.model))


@torch.inference_mode()
def stage_times(decoder):
    """{stage: seconds} of one step of a `timing_decoder`, each stage timed by itself; as a CUDA
    graph of its own, if the decoder has one. The draft of a tree of one is 0."""
    plan, = decoder.plans
    device = decoder.model.device
    tree, chain = decoder.draft(plan)
    positions = decoder.slots.cache.lengths[:, None] + tree.depths
    normed, hidden = decoder.verify(tree, positions)
    target = decoder.sample(normed, positions)
    accepted = decoder.accept(plan, tree, target, chain)
    stages = dict(draft=lambda: decoder.draft(plan), verify=lambda: decoder.verify(tree, positions),
                  sample=lambda: decoder.sample(normed, positions),
                  accept=lambda: decoder.accept(plan, tree, target, chain),
                  commit=lambda: decoder.commit(plan, hidden, accepted))
    if plan.tree_size == 1:
        del stages["draft"]  # launches nothing, and torch warns of an empty CUDA graph
    if decoder.pool is not None:
        stages = {name: capture(stage, device) for name, stage in stages.items()}
    with unchecked():  # as in all steps but the first
        times = {name: seconds(stage, device, group_of(decoder.model))
                 for name, stage in stages.items()}
    return dict.fromkeys(STAGES, 0.0) | times


# --------------------------------------------------------------------------------------------------
# The file of step times, which the command lines keep

def times_file():
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "clover" / "step_times.json"


def cache_key(model, heads, batch_size, capacity, sampling, beams, graph):
    """16 hex digits over all that a step's time depends on."""
    gpu = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else None
    what = ("plans", asdict(model.config), str(model.dtype), heads and asdict(heads.config),
            batch_size, min(capacity, PREFIX + 1), beams, graph, sampling.temperature > 0,
            sampling.filtered, gpu, platform.node(), torch.get_num_threads(), torch.__version__,
            group_of(model).size)
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def read_times(file):
    """{cache_key: {DraftPlan: seconds}}; nothing where the file is None, missing or broken, so that
    all is measured again."""
    try:
        plan = lambda name: DraftPlan._make(map(int, name.split("+")))
        times = {key: {plan(name): float(value) for name, value in entry.items()}
                 for key, entry in json.loads(file.read_text()).items()}
    except (AttributeError, OSError, TypeError, ValueError):
        return {}
    valid = all(0 < value < math.inf for entry in times.values() for value in entry.values())
    return times if valid else {}


def write_times(file, key, times):
    name = lambda plan: f"{plan.head_nodes}+{plan.lookup_tokens}"
    with contextlib.suppress(OSError):  # a home that cannot be written to: measured again next time
        file.parent.mkdir(parents=True, exist_ok=True)
        known = {key: {name(plan): value for plan, value in entry.items()}
                 for key, entry in (read_times(file) | {key: times}).items()}
        text = json.dumps(known, indent=1)
        atomic_write(file, lambda tmp: Path(tmp).write_text(text))


# --------------------------------------------------------------------------------------------------
# The policy

class AdaptivePolicy:
    """Which plan the next step takes: that of most tokens per second, by times that were measured
    and a running mean of the tokens that it finds. A step also tells what the plans that are part
    of its own would have found. Others are tried now and then: trials may lose a share TRIALS of
    the time.

    seconds: {DraftPlan: seconds per step}. expected: {DraftPlan: tokens per step and sequence},
    until more is known."""

    def __init__(self, seconds, expected):
        self.plans = tuple(seconds)
        self.seconds = seconds
        self.expected = expected
        self.tokens = dict(expected)              # running means
        self.weights = dict.fromkeys(seconds, 0)  # how many steps each of them counts as
        self.added = dict.fromkeys(seconds, 0)    # the step that was last added to it
        self.shown = dict.fromkeys(seconds, 0)    # the last step that showed all that a plan finds
        # by token of lookup's chain: how often it is right, where those before it are
        self.goes_on = [GOES_ON] * max(plan.lookup_tokens for plan in seconds)
        self.step = 0
        self.allowance = 0.0  # seconds that trials may lose

    def rate(self, plan):
        """Tokens per second and sequence."""
        return self.tokens[plan] / self.seconds[plan]

    def best(self):
        favour = lambda plan: 1 if plan.tree_size > 1 else 1 + MARGIN
        return max(self.plans, key=lambda plan: self.rate(plan) * favour(plan))

    def loss(self, plan, best):
        """Seconds that a step of this plan is expected to lose to one of the best."""
        return max(self.seconds[plan] - self.tokens[plan] / self.rate(best), 0.0)

    def select(self):
        """The plan of the next step."""
        best = self.best()
        age = lambda plan: self.step - self.shown[plan]
        stale = [plan for plan in self.plans if plan != best and age(plan) >= STALE]
        losses = {plan: max(self.loss(plan, best), 1e-9) for plan in stale}
        losses = {plan: loss for plan, loss in losses.items() if loss <= self.most_allowed(best)}
        due = max(losses, key=lambda plan: age(plan) / losses[plan], default=best)
        return due if losses.get(due, 0.0) <= self.allowance else best

    def most_allowed(self, best):
        """Seconds that trials may lose at most, however long there was none."""
        return MEMORY * self.seconds[best]

    def update(self, plan, found):
        """What a step of `plan` found in each sequence: (its tokens, its path, lookup's chain or
        None), as `Engine.retire` has them."""
        self.step += 1
        best = self.best()
        self.allowance += TRIALS * self.seconds[plan] - self.loss(plan, best)
        self.allowance = min(self.allowance, self.most_allowed(best))
        right = [right_tokens(tokens, chain) if plan.lookup_tokens else 0
                 for tokens, _, chain in found]
        for n in right:
            for i in range(min(n + 1, plan.lookup_tokens)):
                self.goes_on[i] += ((i < n) - self.goes_on[i]) / MEMORY
        for other in self.plans if found else ():
            looks_up_more = other.lookup_tokens and not plan.lookup_tokens
            if other.head_nodes > plan.head_nodes or looks_up_more:
                continue  # it is not part of this plan
            rest = self.goes_on[plan.lookup_tokens:other.lookup_tokens]
            beyond = sum(itertools.accumulate(rest, operator.mul))
            self.add(other, [would_find(other, plan, path, n, beyond)
                             for (_, path, _), n in zip(found, right)])
            if other.lookup_tokens <= plan.lookup_tokens or max(right) < plan.lookup_tokens:
                self.shown[other] = self.step

    def add(self, plan, tokens):
        """Adds one step's tokens, of each sequence, to a running mean, which weighs less the longer
        nothing was added, but no less than FEWEST sequences do in one step."""
        missed = self.step - self.added[plan] - 1
        faded = min(self.weights[plan], MEMORY) * (1 - 1 / MEMORY) ** missed
        self.weights[plan] = max(faded, FEWEST / len(tokens)) + 1
        self.tokens[plan] += (sum(tokens) / len(tokens) - self.tokens[plan]) / self.weights[plan]
        self.added[plan] = self.step


def right_tokens(tokens, chain):
    """How many tokens of lookup's chain were right, where a step emitted `tokens`. Where lookup
    drafted alone, chain is None: all were but the last."""
    n = len(tokens) - 1
    if chain is None:
        return n
    return next((i for i in range(n) if i == len(chain) or chain[i] != tokens[i]), n)


def would_find(other, plan, path, right, beyond):
    """How many tokens a step of `other` would have emitted where one of `plan`, of which it is
    part, had this path, root first, and this many right tokens of lookup's chain; `beyond` more,
    where these were all that it had.

    A short chain is the front of a longer one, and a small tree of the heads that of a larger one
    with as many beams; with fewer it finds nearly as much."""
    by_heads = bisect_right(path, other.head_nodes) - 1
    by_lookup = min(right, other.lookup_tokens)
    if right == plan.lookup_tokens < other.lookup_tokens:
        by_lookup += beyond
    return 1 + max(by_heads, by_lookup)


# --------------------------------------------------------------------------------------------------
# The plans that it selects among

def fit(model, heads, lookup, batch_size, capacity, sampling, beams=None, graph=True, file=None,
        fresh=False):
    """The `AdaptivePolicy` among the plans that heads (or None) and lookup (or False) allow, with
    what each takes here.

    capacity: tokens a sequence can have. file: where step times are kept between processes, None
    for nowhere. fresh: measure again what is known. InputError for beams out of range."""
    if beams is not None:
        check_beams(heads, beams)  # below, a tree that is refused is taken for one without room
    key = cache_key(model, heads, batch_size, capacity, sampling, beams, graph)
    times = {} if fresh else read_times(file).get(key, {}) | MEASURED.get(key, {})
    times = group_of(model).broadcast(times)  # all ranks must take the same plans
    known = len(times)
    if file and not known:
        print("measuring how long steps take on this machine; kept for the next run",
              file=sys.stderr)

    tables = heads.info.get("acceptance") if heads else None
    expected = lambda plan: expected_of_plan(plan, tables, sampling.temperature)
    rate = lambda plan: expected(plan) / times[plan]
    made = partial(timing_decoder, model, heads, capacity=capacity, batch_size=batch_size,
                   beams=beams, sampling=sampling, graph=graph)
    measure = partial(measure_steps, model, times, lambda plan: step_time(made(plan)))
    # no larger tree can win where even the largest would not, with steps as fast as the last one's
    most = expected(DraftPlan(MAX_TREE - 1))
    enough = lambda tried: most / times[tried[-1]] < max(map(rate, tried))
    sizes = TREE_SIZES if tables else (1, DEFAULT_TREE) if heads else (1,)
    tried = measure([DraftPlan(size - 1) for size in sizes], enough)
    trees = some_trees(tried[1:], rate)
    chains = measure(some_chains(trees)) if lookup else []
    if len(times) > known:
        MEASURED[key] = times
        if file and not group_of(model).rank:
            write_times(file, key, times)
    # where nothing has room, the Engine says so
    plans = list(dict.fromkeys((*tried[:1], *trees, *chains))) or [DraftPlan()]
    return AdaptivePolicy({plan: at_most(plan, times) for plan in plans},
                          {plan: expected(plan) for plan in plans})


def expected_of_plan(plan, tables, temperature):
    """Tokens per step of a plan, until more is known."""
    tree_size = plan.head_nodes + 1
    by_heads = expected_tokens(tables, tree_size, temperature) if tables else min(tree_size, 2)
    return by_heads + sum(HOPE**i for i in range(1, plan.lookup_tokens + 1))


def some_trees(trees, rate):
    """Of the heads' trees the best, and the best of half its size."""
    best = max(trees, key=rate, default=None)
    small = [tree for tree in trees if tree.head_nodes <= max(best.head_nodes // 2, 1)]
    return [max(small, key=rate, default=best), best] if trees else []


def some_chains(trees):
    """Lookup alone, and beside the heads' trees."""
    alone = [DraftPlan(0, n) for n in CHAINS]
    beside = zip((trees[0], trees[1], trees[1]), CHAINS) if trees else ()
    return alone + [DraftPlan(min(tree.head_nodes, MAX_TREE - 1 - n), n) for tree, n in beside]


def no_room(group):
    """The errors that say that memory has no room. Ranks do not run out of it alike: where that
    was not foreseen, all end."""
    return (InputError,) if group.size > 1 else (InputError, torch.OutOfMemoryError)


def measure_steps(model, times, step, plans, enough=lambda tried: False):
    """Adds step(plan), in seconds, to `times` where it is not known: on a CPU the least of ROUNDS.
    -> [the plans] before the first that memory has no room for, and up to where it is `enough`."""
    errors = no_room(group_of(model))
    known = set(times)
    tried = []
    for plan in plans:
        try:
            times[plan] = times.get(plan) or step(plan)
        except errors:
            break
        tried.append(plan)
        if enough(tried):
            break
    new = [plan for plan in tried if plan not in known]
    for plan in new * (ROUNDS - 1 if model.device.type == "cpu" else 0):
        with contextlib.suppress(*errors):  # what else runs may have taken the memory
            times[plan] = min(times[plan], step(plan))
    return tried


def at_most(plan, times):
    """A plan's time. What does more and took less shows that other work slowed this one down."""
    more = [time for other, time in times.items()
            if other.head_nodes >= plan.head_nodes and other.lookup_tokens >= plan.lookup_tokens]
    return min(more, default=1.0)


def explain(engine, heads, output):
    """The lines of --explain: what each step was selected from, how often, what it found, and where
    its time goes."""
    decoder, policy = engine.decoder, engine.policy
    lines = [f"batch size {decoder.batch_size}, on {decoder.model.device}"]
    if isinstance(policy, AdaptivePolicy):
        lines += explain_policy(policy, output)
        if heads and not heads.info.get("acceptance"):
            lines.append("these heads carry no acceptance table, hence a tree that is not fitted "
                         "to them; train_heads.py --evaluate makes one")
    lines += ["", f"{'ms per stage':<24}" + "".join(f"{stage:>10}" for stage in STAGES)]
    most = max(output.plans, key=lambda plan: output.plans[plan][0], default=decoder.plans[0])
    for plan in dict.fromkeys((DraftPlan(), most)):
        times = stage_times(timing_decoder(
            decoder.model, decoder.heads, plan, batch_size=decoder.batch_size,
            beams=decoder.given_beams, sampling=decoder.sampling, graph=decoder.pool is not None))
        lines.append(f"{str(plan):<24}" + "".join(f"{1e3 * t:>10.2f}" for t in times.values()))
    return lines


def explain_policy(policy, output):
    """A table of the plans."""
    yield ""
    yield (f"{'drafted by':<24}{'ms per step':>12}{'tokens per step: expected':>28}{'found':>8}"
           f"{'tokens per second and sequence':>33}{'share of steps':>17}")
    for plan in policy.plans:
        steps, tokens = output.plans.get(plan, (0, 0))
        found = f"{tokens / steps:.2f}" if steps else "-"
        rate = tokens / steps / policy.seconds[plan] if steps else policy.rate(plan)
        yield (f"{str(plan):<24}{policy.seconds[plan] * 1e3:>12.2f}"
               f"{policy.expected[plan]:>28.2f}{found:>8}{rate:>33.0f}"
               f"{steps / max(output.steps, 1):>17.0%}")
