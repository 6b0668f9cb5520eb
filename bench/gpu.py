"""`python -m bench gpu --out DIR`: all measurements that need a GPU, in eight minutes.

Runs PARTS in order, the most important first. Each part yields rows, which are printed and appended
to DIR/results.jsonl at once, so an interrupted run keeps them. A part ends after the row during
which its share of the time runs out. An error ends only its own part. --dry-run uses tiny sizes,
also on a CPU."""

import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import torch

from bench import ROOT, machine, size_config
from bench import operations as ops
from bench.decoding import compare, decode_once, load_prompts
from bench.timing import copy_bandwidth, seconds, step_time, timing_decoder
from clover import CloverHeads
from generate import Sampling
from hf.paths import default_heads
from kernels import add_norm
from model import InputError, expect
from tools.compare import first_difference
from tools.flags import DEMO
from tools.load import load_model

NOISE, TOP_P = Sampling(temperature=0.8), Sampling(temperature=0.8, top_p=0.9)
FULL = SimpleNamespace(
    large="8b", small="135m",    # of bench.MODEL_SIZES
    batch_sizes=(1, 32),
    tree_sizes=(1, 16, 4, 64, 32),
    prefixes=(256, 4096),        # cached tokens
    rows=(1, 16, 32, 64, 256, 512),  # of a matrix product
    matmul=8192,                 # rows and columns of a large product
    new_tokens=128,
    copies=64,                   # most copies of a kernel's inputs
    workers=("-n", "12"),        # for pytest-xdist
    tests=("-m", "gpu", "--continue-on-collection-errors"))
TINY = SimpleNamespace(
    large="tiny", small="tiny", batch_sizes=(1, 2), tree_sizes=(1, 4), prefixes=(16,), rows=(1, 3),
    matmul=64, new_tokens=8, copies=1, workers=(), tests=("-m", "not gpu", "tests/test_model.py"))


# --------------------------------------------------------------------------------------------------
# The parts: generators of rows. run has the attributes device, sizes, out, deadline and model.

def ceilings(run):
    """The limits of the hardware: a large copy, a large product, a launch in a graph; and the
    products of a model's step, a lower bound of the step's time."""
    random = partial(torch.randn, device=run.device, dtype=torch.bfloat16)
    time_graph = lambda body: seconds(ops.in_graph(body, run.device), run.device)
    yield dict(copy_gb_per_s=copy_bandwidth(run.device) / 1e9)
    n = run.sizes.matmul
    a, b = random(2, n, n)
    yield dict(matmul_tflop_per_s=2 * n**3 / time_graph(lambda: a @ b) / 1e12)
    x, weight = random(2, 4096)
    norms = lambda: [add_norm(x[None], None, weight) for _ in range(300)]
    yield dict(launch_us=1e6 * time_graph(norms) / 300)
    model, _ = ops.random_model(run.sizes.large, run.device, torch.bfloat16)
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    moved = sum(layer.weight.nbytes for layer in layers)
    for M in run.sizes.rows:
        inputs = {size: random(M, size) for size in {layer.in_features for layer in layers}}
        time = time_graph(lambda: [layer(inputs[layer.in_features]) for layer in layers])
        yield dict(model=run.sizes.large, M=M, products_ms=1e3 * time, gb_per_s=moved / time / 1e9)


def steps(run, size):
    """Steps and their stages at the large or small model's size."""
    name = getattr(run.sizes, size)
    prefixes = run.sizes.prefixes if size == "large" else run.sizes.prefixes[:1]
    model, heads = ops.random_model(name, run.device, torch.bfloat16)
    cases = [*product(prefixes, [Sampling()], run.sizes.tree_sizes),
             *product(prefixes[:1], [NOISE, TOP_P], run.sizes.tree_sizes[:2])]
    shapes = [("heads" if T > 1 else "plain", B, T, prefix, sampling)
              for prefix, sampling, T in cases for B in run.sizes.batch_sizes]
    rows = ops.step_rows(model, heads, shapes, copy_bandwidth(run.device))
    for row in ops.over_plain(rows):
        yield dict(model=name) | row


def demo(run):
    """demo/ continues held-out texts, four per slot of the largest batch."""
    for dtype in ("bfloat16", "float32"):
        yield from decoded(run, model=str(DEMO), dtype=dtype, chats=None,
                           prompts=4 * max(run.sizes.batch_sizes))


def chats(run):
    """--model answers the chats of bench/prompts.jsonl."""
    expect(run.model, "no --model was given")
    yield from decoded(run, model=run.model, dtype=None, chats=ROOT / "bench" / "prompts.jsonl",
                       prompts=None)


def decoded(run, **flags):
    """Rows of plain decoding and each drafter, over batch sizes. graph_ms: a step's graph alone."""
    args = SimpleNamespace(**flags, device=str(run.device), quantize=None, data=None,
                           prompt_tokens=64)
    model, encoding = load_model(args)
    heads = default_heads(args.model)
    heads = heads and CloverHeads.from_pretrained(heads, model, encoding.hash)
    groups, stop = load_prompts(args, encoding)
    prompts = [prompt for row in zip(*groups.values()) for prompt in row]  # kinds alternate
    drafted = [("plain", 1), ("lookup", 8), *product(["heads"], (4, 8, 16) if heads else ()),
               *product(["heads + lookup" if heads else "lookup"], (16, None))]
    new = run.sizes.new_tokens
    for B in run.sizes.batch_sizes:
        # several prompts per slot: the last ones leave slots idle, which cost as much as busy ones
        group = prompts[:max(4 * B, 16)]
        prefix = sum(map(len, group)) // len(group) + new // 2  # about the mean length
        options = {(name, T or "auto"): dict(tree_size=T, batch_size=B, **ops.drafters(name, heads))
                   for name, T in drafted}
        runs = {method: [decode_once(model, group, new, stop, **own)]
                for method, own in options.items()}
        plain, = runs["plain", 1]
        for (name, T), row in compare(runs).items():
            out, = runs[name, T]
            row |= differences(model, group, out, plain)
            row["engine_ms"] = 1e3 * out.decode_seconds / max(out.batch_steps, 1)
            if T != "auto":
                decoder = timing_decoder(model, prefix=prefix, **options[name, T])
                row["graph_ms"] = 1e3 * step_time(decoder)
            yield dict(model=Path(args.model).name, dtype=str(model.dtype), drafter=name,
                       batch_size=B, tree_size=T) | row


def differences(model, prompts, ours, plain):
    """Counts the outputs that differ from plain decoding: by ties, and by bugs."""
    found = [first_difference(model, [prompt], [a], [b], [Sampling()])
             for prompt, a, b in zip(prompts, ours.tokens, plain.tokens)]
    kinds = Counter(difference[-1] for difference in found if difference)
    return dict(ties=kinds["tie"], bugs=kinds["bug"])


def tests(run):
    """The tests that need a GPU. The one that measures free memory runs alone."""
    alone = "memory_of_a_graph"
    for flags in ((*run.sizes.workers, "-k", f"not {alone}"), ("-k", alone)):
        output, code = run_process(run, "tests.log", sys.executable, "-m", "pytest", "-v", "-rfE",
                                   "--tb=short", *flags, *run.sizes.tests)
        failures = re.findall(r"^(?:FAILED|ERROR) (tests/.*)", output, re.MULTILINE)
        yield dict(summary=output.rstrip().splitlines()[-1:], exit_code=code,
                   failures=[line[:300] for line in failures[:20]])


def run_process(run, log, *command):
    """Runs a command and appends its output to a log. Returns the output and the exit code, None if
    the command was killed at the part's deadline."""
    with open(run.out / log, "a+") as file:
        start = file.tell()
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file,
                                   start_new_session=True)
        try:
            code = process.wait(max(run.deadline - time.perf_counter(), 1))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its workers too, which hold the GPU
            process.wait()
            code = None
        file.seek(start)
        return file.read(), code


def kernels(run):
    """Kernels beside their bounds and the same work in torch."""
    bandwidth = copy_bandwidth(run.device)
    c = size_config(run.sizes.large)
    for cases in (ops.attention_cases, ops.lm_head_cases, ops.commit_cases):
        for case in cases(c, run.device, run.sizes):
            yield ops.kernel_row(case, run.device, bandwidth, run.sizes.copies)


PARTS = {  # name: (function, share of --seconds, relative to the other parts)
    "ceilings": (ceilings, 0.06), "steps": (partial(steps, size="large"), 0.22),
    "small-steps": (partial(steps, size="small"), 0.07),
    "demo": (demo, 0.15), "chats": (chats, 0.15), "tests": (tests, 0.2), "kernels": (kernels, 0.08)}


# --------------------------------------------------------------------------------------------------
# The run

def bench(args):
    """`bench gpu`: runs args.parts, by default all."""
    if not (args.dry_run or torch.cuda.is_available()):
        raise InputError("bench gpu needs a CUDA device; --dry-run runs tiny sizes on a CPU")
    parts = args.parts or [name for name in PARTS if args.model or name != "chats"]
    if unknown := [name for name in parts if name not in PARTS]:
        raise InputError(f"--parts: expected some of {', '.join(PARTS)}, not {unknown[0]!r}")
    run = SimpleNamespace(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
                          sizes=TINY if args.dry_run else FULL, model=args.model,
                          out=Path(args.out).absolute())
    run.out.mkdir(exist_ok=True)
    write(run, dict(part="machine", dry_run=args.dry_run) | machine())
    total = sum(PARTS[name][1] for name in parts)
    for name in parts:
        run_part(run, name, args.seconds * PARTS[name][1] / total)
        gc.collect()  # frees the part's memory
        with contextlib.suppress(RuntimeError):  # after an illegal access every call fails
            torch.cuda.empty_cache()


def run_part(run, name, budget):
    started = time.perf_counter()
    run.deadline = started + budget
    ended = "done"
    try:
        for row in PARTS[name][0](run):
            write(run, dict(part=name) | row)
            if time.perf_counter() > run.deadline:
                ended = "out of time"
                break
    except Exception as error:
        ended = f"{type(error).__name__}: {error}"[:500]
    write(run, dict(part=name, ended=ended, seconds=time.perf_counter() - started))


def write(run, row):
    row = {key: float(f"{x:.4g}") if isinstance(x, float) else x for key, x in row.items()}
    line = json.dumps(row)
    print(line, flush=True)
    with open(run.out / "results.jsonl", "a") as file:
        file.write(line + "\n")
