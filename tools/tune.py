"""The tree that fits the machine: a larger one finds more tokens per step, and makes the step slower.

How much slower is measured here, once for a machine, model and batch size, and kept in a small file. How many tokens a tree
finds is known from training: heads carry a table of how often the n-th likeliest node of a tree is accepted, by depth. The
tree of most tokens per second is taken, and that may be none at all, which is plain decoding.
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

from model import atomic_write
from clover import MAX_TREE
from generate import STAGES, Engine, Sampling, capture, memory_needed
from model import free_memory

TREE_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
UNKNOWN = 5  # the tree for heads that carry no table
ROUNDS = 3  # on a CPU, whose other work comes and goes, the quickest of these counts
UNSURE = 0.08  # what times and expectations may be off by: plain decoding is taken where it is this near the best
PREFIX = 256  # tokens in the cache while a step is timed


# ---------------------------------------------------------------------------------------------------------------------
# What heads find

@torch.inference_mode()
def acceptance(model, heads, prompts, temperature, max_new_tokens=64, batch_size=8):
    """How often node n of a tree, the n-th likeliest, was accepted at depth d: [[share] * 63] * K, row d - 1, column n - 1.

    Counted over the steps of decoding the prompts with trees of 64 nodes and 8 beams. A smaller tree of as many beams is the
    front of a larger one, and fewer beams find nearly as much, so one table serves all sizes."""
    rows = min(max(map(len, prompts)) + max_new_tokens, model.config.block_size)
    engine = Engine(model, heads, batch_size=min(batch_size, len(prompts)), rows=rows, tree_size=MAX_TREE,
                    sampling=Sampling(temperature), graph=False)
    hits, steps = torch.zeros(heads.config.n_draft, MAX_TREE - 1), 0
    engine.lag = 0  # no step after a text's end, which would be counted
    stage = engine.accept

    def counting():
        nonlocal steps
        stage()
        for path, count in zip(engine.path.tolist(), engine.count.tolist()):
            steps += count > 0
            for depth, node in enumerate(path[1:count]):
                hits[depth, node - 1] += 1
    engine.accept = counting
    engine.generate(prompts, max_new_tokens)
    return (hits / steps).tolist()


def expected_tokens(tables, tree_size, temperature):
    """Tokens per step of a tree of T nodes: the bonus token and each node's share. tables: {temperature: `acceptance`};
    between two of their temperatures the line, outside the nearest."""
    found = [(float(t), 1 + sum(sum(row[:tree_size - 1]) for row in table[:tree_size - 1])) for t, table in tables.items()]
    found.sort()
    below = max((f for f in found if f[0] <= temperature), default=found[0])
    above = min((f for f in found if f[0] >= temperature), default=found[-1])
    share = (temperature - below[0]) / (above[0] - below[0]) if above[0] > below[0] else 0
    return below[1] + share * (above[1] - below[1])


# ---------------------------------------------------------------------------------------------------------------------
# What a step takes

def seconds(body, device):
    """Time of one body(): on a CPU the quickest of some calls, since whatever else runs only adds; on CUDA the mean of calls
    back to back, the quickest of some rounds. Takes a tenth of a second, or three rounds of what is slower."""
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


def timing_engine(model, heads, batch_size, tree_size, sampling, beams=None, graph=True, rows=PREFIX + 1):
    """An engine that can be stepped for ever: its slots are idle, with PREFIX tokens in the cache, or fewer if `rows`, the most
    that a sequence will have, is less."""
    prefix = min(PREFIX, model.config.block_size - 1, rows - 1)
    engine = Engine(model, heads, batch_size=batch_size, rows=prefix + 1, tree_size=tree_size, beams=beams, sampling=sampling,
                    graph=graph)
    engine.cache.lengths.fill_(prefix)
    return engine


@torch.inference_mode()
def step_time(model, heads, batch_size, tree_size, sampling, beams=None, graph=True, rows=PREFIX + 1):
    """Seconds of one step."""
    engine = timing_engine(model, heads, batch_size, tree_size, sampling, beams, graph, rows)
    return seconds(engine.run_step, model.device)


@torch.inference_mode()
def stage_times(model, heads, batch_size, tree_size, sampling, beams=None, graph=True):
    """{stage: seconds} of one step, each stage timed by itself (on CUDA as a graph of its own, if `graph`)."""
    engine = timing_engine(model, heads, batch_size, tree_size, sampling, beams, graph=False)
    engine.step()
    wrap = capture if graph and model.device.type == "cuda" else lambda stage, device: stage
    return {name: seconds(wrap(getattr(engine, name), model.device), model.device) for name in STAGES}


def times_file():
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clover" / "step_times.json"


def circumstances(model, heads, batch_size, rows, sampling, beams, graph):
    """16 hex digits over all that a step's time depends on."""
    gpu = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else None
    what = (asdict(model.config), str(model.dtype), asdict(heads.config), batch_size, min(rows, PREFIX + 1), beams, graph,
            sampling.temperature > 0, sampling.filtered, gpu, platform.node(), torch.get_num_threads(), torch.__version__)
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def read_times():
    try:
        times = {key: {int(size): float(value) for size, value in known.items()}
                 for key, known in json.loads(times_file().read_text()).items()}
        return times if all(0 < value < math.inf for known in times.values() for value in known.values()) else {}
    except (AttributeError, OSError, TypeError, ValueError):  # none yet, or a broken one: measured again
        return {}


def keep_times(key, times):
    try:
        times_file().parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(read_times() | {key: times}, indent=1)
        atomic_write(times_file(), lambda tmp: Path(tmp).write_text(text))
    except OSError:  # a home that cannot be written to: measured again next time
        pass


# ---------------------------------------------------------------------------------------------------------------------
# The choice

@dataclass
class Fit:
    """The chosen tree_size, and what it was chosen from: a list of (tree size, seconds per step, tokens per step expected)."""
    tree_size: int
    table: list


def fit_tree(model, heads, batch_size, rows, sampling, beams=None, graph=True, fresh=False):
    """The `Fit` of heads to this machine. rows: tokens a sequence can have. fresh: measure even if it was done before."""
    tables = heads.info.get("acceptance")
    if not tables:
        return Fit(UNKNOWN, [])
    key = circumstances(model, heads, batch_size, rows, sampling, beams, graph)
    times, free, tried, new = {} if fresh else read_times().get(key, {}), free_memory(model.device), [], []
    measure = lambda size: step_time(model, heads, batch_size, size, sampling, beams, graph, rows)
    expected = lambda size: expected_tokens(tables, size, sampling.temperature)
    rate = lambda size: expected(size) / times[size]
    for size in TREE_SIZES:
        if sum(memory_needed(model, heads, batch_size, rows, size, sampling)) > free:
            break
        if size not in times:
            times[size] = measure(size)
            new.append(size)
        tried.append(size)
        if expected(MAX_TREE) / times[size] < max(map(rate, tried)):  # a larger one cannot win: its steps are no quicker
            break
    for size in new * (ROUNDS - 1 if model.device.type == "cpu" else 0):
        times[size] = min(times[size], measure(size))
    if new:
        keep_times(key, times)
    best = max(tried, key=rate, default=1)
    if best > 1 and rate(1) >= (1 - UNSURE) * rate(best):
        best = 1
    return Fit(best, [(size, times[size], expected(size)) for size in tried])
