"""The tree that is fastest here. A larger tree finds more tokens per step, and makes the step slower.

How much slower is measured, once for a machine, model and batch size. How many tokens a tree finds is known from
training: heads carry a table of how often the n-th likeliest node of a tree is accepted, by depth. The tree of most
tokens per second is taken; where that is a tree of one node, decoding is plain.
"""

import hashlib
import json
import math
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from clover import MAX_TREE
from generate import DEFAULT_TREE, STAGES, Engine, Sampling, capture, check_beams
from kernels import unchecked
from model import InputError, atomic_write

TREE_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
ROUNDS = 3      # on a CPU, whose other work comes and goes, the fastest of these counts
MARGIN = 0.08   # error of times and expectations: plain decoding is taken where it is this near the best
PREFIX = 256    # tokens in the cache while a step is timed
MEASURED = {}   # cache_key -> {tree size: seconds per step}, of this process


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

    def count(index, path):
        for depth, node in enumerate(path[1:]):
            hits[depth, node - 1] += 1
    output = engine.generate(prompts, max_new_tokens, on_path=count)
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


def timing_engine(model, heads, batch_size, tree_size, sampling, beams=None, graph=True, capacity=PREFIX + 1):
    """An engine that can step for ever: its slots are idle, with PREFIX tokens in the cache, or fewer where `capacity`,
    the most that a sequence will have, is less."""
    prefix = min(PREFIX, model.config.block_size - 1, capacity - 1)
    engine = Engine(model, heads, batch_size=batch_size, capacity=prefix + 1, tree_size=tree_size, beams=beams,
                    sampling=sampling, graph=graph)
    engine.slots.cache.lengths.fill_(prefix)
    return engine


@torch.inference_mode()
def step_time(model, heads, batch_size, tree_size, sampling, beams=None, graph=True, capacity=PREFIX + 1):
    """Seconds of one step."""
    engine = timing_engine(model, heads, batch_size, tree_size, sampling, beams, graph, capacity)
    return seconds(engine.replay or engine.step, model.device)


@torch.inference_mode()
def stage_times(model, heads, batch_size, tree_size, sampling, beams=None, graph=True):
    """{stage: seconds} of one step, each stage timed by itself; on CUDA as a graph of its own, if `graph`. A tree of
    one is not drafted: 0."""
    engine, device = timing_engine(model, heads, batch_size, tree_size, sampling, beams, graph=False), model.device
    tree = engine.draft()
    hidden = engine.verify(tree)
    target = engine.sample(tree, hidden)
    accepted = engine.accept(tree, target)
    stages = dict(draft=engine.draft, verify=lambda: engine.verify(tree), sample=lambda: engine.sample(tree, hidden),
                  accept=lambda: engine.accept(tree, target), commit=lambda: engine.commit(hidden, accepted))
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
    what = (asdict(model.config), str(model.dtype), asdict(heads.config), batch_size, min(capacity, PREFIX + 1), beams,
            graph, sampling.temperature > 0, sampling.filtered, gpu, platform.node(), torch.get_num_threads(),
            torch.__version__)
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def read_times(file):
    """{cache_key: {tree size: seconds}}; nothing where the file is missing or broken, so that all is measured again."""
    try:
        times = {key: {int(size): float(value) for size, value in entry.items()}
                 for key, entry in json.loads(file.read_text()).items()}
        return times if all(0 < value < math.inf for entry in times.values() for value in entry.values()) else {}
    except (AttributeError, OSError, TypeError, ValueError):
        return {}


def write_times(file, key, times):
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(read_times(file) | {key: times}, indent=1)
        atomic_write(file, lambda tmp: Path(tmp).write_text(text))
    except OSError:  # a home that cannot be written to: measured again next time
        pass


# ---------------------------------------------------------------------------------------------------------------------
# The choice

@dataclass
class Fit:
    """The tree size taken, and why: a list of (tree size, seconds per step, tokens per step expected)."""
    tree_size: int
    table: list


def fit_tree(model, heads, batch_size, capacity, sampling, beams=None, graph=True, file=None, fresh=False):
    """The `Fit` of heads to this machine. capacity: tokens a sequence can have. file: where step times are kept between
    processes, None for nowhere. fresh: measure again what is known. InputError for beams out of range."""
    tables = heads.info.get("acceptance")
    if not tables:
        return Fit(DEFAULT_TREE, [])
    if beams is not None:
        check_beams(model, heads, beams)  # not below, where a tree that is refused is taken for one without room
    key = cache_key(model, heads, batch_size, capacity, sampling, beams, graph)
    times = {} if fresh else (read_times(file).get(key, {}) if file else {}) | MEASURED.get(key, {})
    measure = lambda size: step_time(model, heads, batch_size, size, sampling, beams, graph, capacity)
    expected = lambda size: expected_tokens(tables, size, sampling.temperature)
    rate = lambda size: expected(size) / times[size]
    tried, new = [], []
    for size in TREE_SIZES:
        if size not in times:
            try:
                times[size] = measure(size)
            except (InputError, torch.OutOfMemoryError):  # no room for this one, nor for a larger one
                break
            new.append(size)
        tried.append(size)
        if expected(MAX_TREE) / times[size] < max(map(rate, tried)):  # a larger one cannot win: its steps are no faster
            break
    for _ in range(ROUNDS - 1 if model.device.type == "cpu" else 0):
        times |= {size: min(times[size], measure(size)) for size in new}
    if new:
        MEASURED[key] = times
        if file:
            write_times(file, key, times)
    best = max(tried, key=rate, default=1)
    if best > 1 and rate(1) >= (1 - MARGIN) * rate(best):
        best = 1
    return Fit(best, [(size, times[size], expected(size)) for size in tried])


def explain(engine, heads, graph=True):
    """The lines of --explain: what the tree was chosen from, and where the time of a step goes."""
    model, fit = engine.model, engine.fit
    lines = [f"tree size {engine.tree_size}, {engine.beams} beams, batch size {engine.batch_size}, on {model.device}"]
    if fit:
        lines += ["", "tree size   ms per step   tokens per step (expected)   tokens per second and sequence"]
        lines += [f"{size:>9}{seconds * 1e3:>14.2f}{tokens:>20.2f}{tokens / seconds:>26.0f}"
                  + ("   <- chosen" if size == fit.tree_size else "") for size, seconds, tokens in fit.table]
    elif heads and not heads.info.get("acceptance"):
        lines.append(f"these heads carry no acceptance table, hence by default a tree of {DEFAULT_TREE}, unmeasured; "
                     "train_heads.py --evaluate makes one")
    lines += ["", "ms per stage" + "".join(f"{stage:>10}" for stage in STAGES)]
    for tree_size in sorted({1, engine.tree_size}):
        beams = engine.beams if tree_size > 1 else None
        times = stage_times(model, heads, engine.batch_size, tree_size, engine.sampling, beams, graph)
        lines.append(f"tree of {tree_size:<4}" + "".join(f"{times[stage] * 1e3:>10.2f}" for stage in STAGES))
    return lines
