"""Which plans a run selects among, and what is known of them before its first step.

How many tokens the heads find is known from training: they carry a table of how often the n-th
likeliest node of a tree is accepted, by depth. How many lookup finds depends on the text. What a
step takes is measured at once, where it takes little, or estimated from sizes, and learnt from then
on; a file keeps it."""

import contextlib
import hashlib
import json
import math
import os
import platform
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch

from backends import cpu
from backends.quantized import packed_bytes
from backends.tensor_parallel import group_of
from clover import check_beams
from generate import DEFAULT_TREE, DraftPlan, FixedPolicy, fixed_plan, prepare
from model import MAX_TREE, atomic_write
from tools.found import TokensFound
from tools.policy import FEWER, GAIN, GUESSED, AdaptivePolicy, StepTimes
from tools.timing import STAGES, quick_times, stage_times, timing_decoder

TREE_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
CHAINS = (4, 10)  # tokens of lookup
# what a product takes for each row after the first, as a share of the first's: of the records of
# bench/results on a CPU, of datasheets on a GPU
ROW = {"cpu": 0.025, "cuda": 0.004}
LOOKUP = 0.1    # of lookup's own operations, as a share of plain decoding
SMALL = 5e7     # bytes of weights that a CPU reads no quicker with more threads, at a guess
POWER = 0.8     # the power of the number of threads by which a large model is quicker
PROBE = 0.5     # seconds that measuring times may take at the start
KEPT = 200      # entries of the file
KNOWN = {}      # key -> StepTimes, of this process


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

class StepCost:
    """Calling it gives what a step of a plan takes: as it was measured, else at a guess from sizes
    alone, in units of a step that decodes one token plainly: the weights that it reads, and ROW of
    that for each row after the first."""

    def __init__(self, model, heads, beams, batch_size):
        self.batch_size = batch_size
        self.set_measured({}, None)
        count = lambda part: sum(p.nbytes for p in part.parameters()) + packed_bytes(part)
        self.row = ROW["cuda" if model.device.type == "cuda" else "cpu"]
        lm_head = count(model.head)
        self.model = count(model.blocks) + lm_head
        self.n_draft = 0
        if heads:
            rows = heads.config.vocabulary or model.config.vocab_size
            self.n_draft = heads.config.n_draft
            self.head = count(heads.heads[0]) + lm_head * rows / model.config.vocab_size
            self.augment = count(heads.augment_blocks)
            self.reads_tokens = heads.reads_tokens
            self.beams = beams
            self.max_beams = heads.max_beams

    def set_measured(self, measured, reading):
        """measured: {plan: (seconds with one sequence, with batch_size)}, on the fewest threads;
        reading: the same of the heads' reading, or None."""
        self.measured = measured
        self.reading = reading
        self.calls = {}  # what was asked for is not computed again

    def __call__(self, plan, batch, reads=True):
        """reads: whether heads read, as they always do where they draft."""
        call = plan, batch, reads or plan.head_nodes > 0
        if call not in self.calls:
            self.calls[call] = self.compute(*call)
        return self.calls[call]

    def compute(self, plan, batch, reads):
        known = next(iter(self.measured), None)
        unit = self.measured[known][1] / self.guess(known, self.batch_size) if known else 1.0
        share = (batch - 1) / max(self.batch_size - 1, 1)
        between = lambda one, all: one + share * (all - one)
        if plan in self.measured:
            total = between(*self.measured[plan])
        else:
            total = unit * self.guess(plan, batch)
        if reads:
            return total
        reading = between(*self.reading) if self.reading else unit * self.guess_reading(batch)
        return max(total - reading, total / 2)

    def product(self, weights, rows):
        return weights / self.model * (1 + self.row * (rows - 1))

    def guess_reading(self, batch):
        return self.product(self.augment, batch * (1 + self.n_draft)) if self.n_draft else 0.0

    def guess(self, plan, batch):
        total = self.product(self.model, batch * plan.tree_size) + self.guess_reading(batch)
        for depth in range(min(self.n_draft, plan.head_nodes)):
            beams = self.beams or min(math.isqrt(plan.head_nodes) + 1, self.max_beams)
            rows = beams if depth and self.reads_tokens else 1
            total += self.product(self.head, batch * rows)
        return total + (LOOKUP if plan.lookup_tokens else 0)


def thread_gains(model, threads=None):
    """{number of threads: the log of how much quicker than the first it may be} to select among:
    those given, or that OMP_NUM_THREADS gives; else up to torch's own number, where texts do not
    depend on it."""
    most = torch.get_num_threads()
    given = threads or os.environ.get("OMP_NUM_THREADS") or group_of(model).size > 1
    if given or model.device.type != "cpu":
        return {most: 0.0}
    counts = sorted({1, most // 4, most // 2, most} - {0})
    size = sum(p.nbytes for p in model.blocks.parameters())
    large = min(max(math.log(size / SMALL) / math.log(8), 0), 1)
    return {n: POWER * large * math.log(n) for n in cpu.same_bits(model, counts)}


@torch.inference_mode()
def probe(engine):
    """Measures on a CPU, in about PROBE seconds, what the steps of an engine's policy take where
    nothing is known of that: steps of idle slots, of one and of all. Sizes tell enough where a step
    is slow, and on a GPU each plan would need a graph."""
    policy, decoder = engine.policy, engine.decoder
    on_cpu = decoder.model.device.type == "cpu" and policy.group.size == 1
    if on_cpu and not policy.times.cost.measured:
        threads = torch.get_num_threads()
        measure_steps(policy, decoder, time.perf_counter() + PROBE)
        torch.set_num_threads(threads)
        decoder.reset()


def measure_steps(policy, decoder, end):
    plain, heads = DraftPlan(), decoder.heads
    cost, gains = policy.times.cost, policy.times.threads.now
    decoder.slots.cache.lengths.fill_(3 * decoder.capacity // 4)

    def times(plan, n):
        decoder.run_first(n)
        return quick_times(partial(decoder.step, plan), end)
    pair = lambda plan: [unit * times(plan, n)[0] for n in (1, decoder.batch_size)]
    torch.set_num_threads(min(gains))
    if times(plain, 1)[0] > PROBE / 50:
        return
    by_threads = {}
    for n in gains:
        torch.set_num_threads(n)
        by_threads[n] = times(plain, decoder.batch_size)[0]
    quickest = min(by_threads.values())
    best = min(n for n in gains if by_threads[n] < FEWER * quickest)
    torch.set_num_threads(best)
    unit = by_threads[min(gains)] / by_threads[best]  # costs are those on the fewest threads
    decoder.set_heads(None)
    alone = pair(plain)
    decoder.set_heads(heads)
    measured = {}
    promising = sorted(policy.plans, key=policy.rates.get, reverse=True)
    for plan in sorted(promising, key=plain.__ne__):
        if time.perf_counter() < end:
            measured[plan] = pair(plan)
    reading = None
    if plain in measured:
        reading = [max(a - b, 0.0) for a, b in zip(measured[plain], alone)]
    cost.set_measured(measured, reading)
    gains = {n: math.log(by_threads[min(gains)] / by_threads[n]) for n in gains}
    policy.set_times(StepTimes(cost, policy.plans, gains))
    KNOWN[policy.key] = policy.times


# --------------------------------------------------------------------------------------------------
# The policy, and the file of what steps took, which the command lines keep

def fit(model, heads, lookup, batch_size, sampling, *, tree_size=None, beams=None, threads=None,
        file=None):
    """The `AdaptivePolicy` among the plans that heads (or None) and lookup (or False) allow, or of
    the one that tree_size gives.

    threads: of a CPU, default what is quickest. file: where times are kept between processes, None
    for nowhere. InputError for beams out of range."""
    if beams is not None:
        check_beams(heads, beams)
    if threads:
        torch.set_num_threads(threads)
    group = group_of(model)
    tables = heads.info.get("acceptance") if heads else None
    key = times_key(model, heads, batch_size, sampling, beams)
    known, gains = read_entry(entry(KNOWN[key]) if key in KNOWN else file_entries(file).get(key))
    cost = StepCost(model, heads, beams, batch_size)
    vars(cost).update(group.broadcast(vars(cost) | known))  # ranks hold a row more or less
    by_heads = lambda nodes: (expected_tokens(tables, nodes + 1, sampling.temperature) if tables
                              else min(nodes + 1.0, 2.0))
    if tree_size is not None:
        plans = [fixed_plan(tree_size, heads, lookup)]
    else:
        sizes = TREE_SIZES if tables else (1, DEFAULT_TREE) if heads else (1,)
        rate = lambda plan: by_heads(plan.head_nodes) / cost.guess(plan, batch_size)
        trees = some_trees([DraftPlan(size - 1) for size in sizes[1:]], rate)
        plans = [DraftPlan(), *trees, *(some_chains(trees) if lookup else [])]
    gains = group.broadcast({n: gains.get(n, gain)
                             for n, gain in thread_gains(model, threads).items()})
    found = TokensFound({plan.head_nodes: by_heads(plan.head_nodes) for plan in plans},
                        {plan.lookup_tokens for plan in plans} - {0},
                        ahead=model.device.type == "cuda")
    policy = AdaptivePolicy(StepTimes(cost, plans, gains), found, group)
    policy.key = key
    KNOWN[key] = policy.observed
    return policy


def some_trees(trees, rate):
    """Of the heads' trees what should be the best, and the best of those at most half, and at least
    twice as large."""
    best = max(trees, key=rate, default=DraftPlan())
    small = [tree for tree in trees if 2 * tree.head_nodes <= best.head_nodes]
    large = [tree for tree in trees if tree.head_nodes >= 2 * best.head_nodes]
    return [max(some, key=rate) for some in (small, [best], large) if some and trees]


def some_chains(trees):
    """Lookup alone, and beside the heads' trees."""
    alone = [DraftPlan(0, n) for n in CHAINS]
    return alone + [DraftPlan(min(tree.head_nodes, MAX_TREE - 1 - n), n)
                    for tree, n in zip(trees, CHAINS)]


def times_file():
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "clover" / "step_times.json"


def times_key(model, heads, batch_size, sampling, beams):
    """16 hex digits over all that the ratios of steps' times depend on."""
    gpu = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else None
    what = ("times 2", asdict(model.config), str(model.dtype), heads and asdict(heads.config),
            batch_size, beams, sampling.temperature > 0, sampling.filtered, gpu, platform.node(),
            os.cpu_count(), torch.__version__, group_of(model).size,
            getattr(model, "quantization", None))
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def file_entries(file):
    """{key: `entry`} of a file, which may be None, missing, or broken."""
    try:
        return dict(json.loads(file.read_text()))
    except (AttributeError, OSError, RecursionError, TypeError, ValueError):
        return {}


def entry(times):
    """What the file keeps of a `StepTimes`: what plans cost that were measured, or ran."""
    cost = times.cost
    pair = lambda plan: [math.exp(times.plans.now[plan]) * cost(plan, n)
                         for n in (1, cost.batch_size)]
    plans = {f"{plan.head_nodes}+{plan.lookup_tokens}": pair(plan)
             for plan, variance in times.plans.variance.items() if variance < GUESSED / 2}
    fewest, *_ = times.threads.now.values()
    gains = {n: fewest - log for n, log in times.threads.now.items()
             if times.threads.variance[n] < GAIN / 2 and log <= fewest}  # other work goes
    return dict(plans=plans, reading=cost.reading, gains=gains)


def read_entry(found):
    """-> (attributes of a StepCost, {number of threads: gain}); nothing of an entry that is
    broken."""
    plan = lambda name: DraftPlan._make(map(int, name.split("+")))
    try:
        measured = {plan(name): (one, all) for name, (one, all) in found["plans"].items()}
        gains = {int(n): gain for n, gain in found["gains"].items()}
        sane = (all(0 < x < 1e6 for pair in measured.values() for x in pair)
                and all(0 <= x < 1e6 for x in found["reading"] or ())
                and all(abs(gain) < 10 for gain in gains.values()))
    except (AttributeError, KeyError, TypeError, ValueError):
        sane = False
    return (dict(measured=measured, reading=found["reading"]), gains) if sane else ({}, {})


def keep_times(engine):
    """Adds to the file what an engine's policy learnt; without a word where it cannot be
    written."""
    policy, file = engine.policy, times_file()
    if not isinstance(policy, AdaptivePolicy) or policy.group.rank:
        return
    found = {key: kept for key, kept in file_entries(file).items()
             if key != policy.key and any(read_entry(kept))}
    found[policy.key] = entry(policy.observed)  # the last: the first are forgotten
    text = json.dumps({key: found[key] for key in list(found)[-KEPT:]}, indent=1)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(file, lambda tmp: Path(tmp).write_text(text))


# --------------------------------------------------------------------------------------------------
# --explain

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
            decoder.model, engine.heads, plan, batch_size=decoder.batch_size,
            beams=decoder.given_beams, sampling=decoder.sampling, graph=decoder.pool is not None))
        lines.append(f"{str(plan):<24}" + "".join(f"{1e3 * t:>10.2f}" for t in times.values()))
    return lines


def explain_policy(policy, output):
    """A table of the plans, as the policy believes at the end."""
    threads = ", ".join(f"{n}: {policy.time(policy.best, n) / policy.time(policy.best):.2f}"
                        for n in policy.times.threads.now)
    yield f"threads {policy.best_threads}; a step's time by number of threads, relative: {threads}"
    yield ""
    yield (f"{'drafted by':<24}{'ms per step':>12}{'tokens per step: expected':>28}{'believed':>10}"
           f"{'found':>8}{'tokens per second and sequence':>33}{'share of steps':>17}")
    for plan in policy.plans:
        steps, tokens = output.plans.get(plan, (0, 0))
        found = f"{tokens / steps:.2f}" if steps else "-"
        seconds = policy.times.seconds(plan, policy.best_threads, policy.batch)
        yield (f"{str(plan):<24}{seconds * 1e3:>12.2f}{policy.expected[plan]:>28.2f}"
               f"{policy.tokens[plan]:>10.2f}{found:>8}{policy.tokens[plan] / seconds:>33.0f}"
               f"{steps / max(output.steps, 1):>17.0%}")
