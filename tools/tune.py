"""Which plans a run selects among, and what is known of them before its first step.

How many tokens the heads find is known from training: they carry a table of how often the n-th
likeliest node of a tree is accepted, by depth. How many lookup finds depends on the text. What a
step takes is estimated from sizes alone, and learnt from then on; a file keeps it."""

import contextlib
import hashlib
import json
import math
import os
import platform
from copy import copy
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from backends import cpu
from backends.tensor_parallel import group_of
from clover import check_beams
from generate import DEFAULT_TREE, DraftPlan, FixedPolicy, fixed_plan, prepare
from model import MAX_TREE, atomic_write
from tools.policy import UNKNOWN, AdaptivePolicy, Estimate, StepTimes
from tools.timing import STAGES, stage_times, timing_decoder

TREE_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
CHAINS = (4, 10)  # tokens of lookup
# expected of lookup until more is known: how likely a token is right if those before it are
HOPE = 0.4
# what a product takes for each row after the first, as a share of the first's: of the records of
# bench/results on a CPU, of datasheets on a GPU
ROW = {"cpu": 0.025, "cuda": 0.004}
LOOKUP = 0.1    # of lookup's own operations, as a share of plain decoding
SMALL = 5e7     # bytes of weights that a CPU reads no quicker with more threads, at a guess
GAIN = 0.8      # the power of the number of threads by which a large model is quicker
KEPT = 200      # entries of the file
FADED = 0.01    # what the variance of a time gains between two runs
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


def expected_of_plan(plan, tables, temperature):
    """Tokens per step of a plan, until more is known."""
    tree_size = plan.head_nodes + 1
    by_heads = expected_tokens(tables, tree_size, temperature) if tables else min(tree_size, 2)
    return by_heads + sum(HOPE**i for i in range(1, plan.lookup_tokens + 1))


# --------------------------------------------------------------------------------------------------
# What a step takes, at a guess

class StepCost:
    """Calling it with a plan and a batch size gives what a step takes, in units of one that decodes
    one token plainly: the weights that it reads, and ROW of that for each row after the first."""

    def __init__(self, model, heads, beams):
        count = lambda part: sum(p.numel() for p in part.parameters())
        self.row = ROW["cuda" if model.device.type == "cuda" else "cpu"]
        lm_head = model.head.weight.numel() if hasattr(model.head, "weight") else count(model.head)
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

    @lru_cache
    def __call__(self, plan, batch):
        product = lambda weights, rows: weights * (1 + self.row * (rows - 1))
        total = product(self.model, batch * plan.tree_size)
        if self.n_draft:  # the heads read
            total += product(self.augment, batch * (1 + self.n_draft))
        for depth in range(min(self.n_draft, plan.head_nodes)):
            beams = self.beams or min(math.isqrt(plan.head_nodes) + 1, self.max_beams)
            total += product(self.head, batch * (beams if depth and self.reads_tokens else 1))
        return total / self.model + (LOOKUP if plan.lookup_tokens else 0)


def thread_gains(model, threads=None):
    """{number of threads: the log of how much quicker than one it may be} to select among: those
    given, or that OMP_NUM_THREADS gives; else up to torch's own number, where texts do not depend
    on it."""
    most = torch.get_num_threads()
    given = threads or os.environ.get("OMP_NUM_THREADS") or group_of(model).size > 1
    if given or model.device.type != "cpu":
        return {most: 0.0}
    counts = sorted({1, most // 4, most // 2, most} - {0})
    size = sum(p.nbytes for p in model.blocks.parameters())
    large = min(max(math.log(size / SMALL) / math.log(8), 0), 1)
    return {n: GAIN * large * math.log(n) for n in cpu.same_bits(model, counts)}


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
    tables = heads.info.get("acceptance") if heads else None
    cost = StepCost(model, heads, beams)
    vars(cost).update(group_of(model).broadcast(vars(cost)))  # ranks hold a row more or less
    expected = lambda plan: expected_of_plan(plan, tables, sampling.temperature)
    key = times_key(model, heads, batch_size, sampling, beams)
    corrections, gains = group_of(model).broadcast(known_times(file).get(key, ({}, {})))
    correction = lambda plan: corrections.get(plan, Estimate()).mean
    rate = lambda plan: expected(plan) / (cost(plan, batch_size) * math.exp(correction(plan)))
    if tree_size is not None:
        plans = [fixed_plan(tree_size, heads, lookup)]
    else:
        sizes = TREE_SIZES if tables else (1, DEFAULT_TREE) if heads else (1,)
        trees = some_trees([DraftPlan(size - 1) for size in sizes[1:]], rate)
        plans = [DraftPlan(), *trees, *(some_chains(trees) if lookup else [])]
    guess = thread_gains(model, threads)
    times = StepTimes(cost, plans, {n: gains.get(n, guess[n]) for n in guess})
    times.plans |= {plan: copy(corrections[plan]) for plan in times.plans if plan in corrections}
    policy = AdaptivePolicy(times, {plan: expected(plan) for plan in times.plans}, group_of(model))
    policy.key = key
    KNOWN[key] = times
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
    what = ("ratios", asdict(model.config), str(model.dtype), heads and asdict(heads.config),
            batch_size, beams, sampling.temperature > 0, sampling.filtered, gpu, platform.node(),
            os.cpu_count(), torch.__version__, group_of(model).size)
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def known_times(file):
    """{key: ({plan: Estimate}, {number of threads: gain})} of this process and of a file, which may
    be None, missing, or broken."""
    found = {key: (times.plans, times.learnt_gains()) for key, times in KNOWN.items()}
    try:
        return {key: read_entry(**entry)
                for key, entry in json.loads(file.read_text()).items()} | found
    except (AttributeError, OSError, RecursionError, TypeError, ValueError):
        return found


def read_entry(plans, gains):
    """An entry of the file. ValueError or TypeError where it is none."""
    valid = lambda mean, variance=1.0: abs(mean) < 10 and 0 < variance < 10
    if not (all(valid(*numbers) for numbers in plans.values()) and all(map(valid, gains.values()))):
        raise ValueError("not logarithms of ratios of times")
    plan = lambda name: DraftPlan._make(map(int, name.split("+")))
    estimate = lambda mean, variance: Estimate(mean, min(variance + FADED, UNKNOWN))
    return ({plan(name): estimate(*numbers) for name, numbers in plans.items()},
            {int(n): gain for n, gain in gains.items()})


def keep_times(engine):
    """Adds to the file what an engine's policy learnt; without a word where it cannot be
    written."""
    policy, file = engine.policy, times_file()
    if not isinstance(policy, AdaptivePolicy) or policy.group.rank:
        return
    known = known_times(file)
    known[policy.key] = known.pop(policy.key)  # the last: the first are forgotten
    name = lambda plan: f"{plan.head_nodes}+{plan.lookup_tokens}"
    entry = lambda plans, gains: dict(
        plans={name(plan): [x.mean, x.variance] for plan, x in plans.items()}, gains=gains)
    text = json.dumps({key: entry(*known[key]) for key in list(known)[-KEPT:]}, indent=1)
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
                        for n in policy.times.speeds)
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
