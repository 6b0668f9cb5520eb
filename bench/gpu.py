"""`python -m bench gpu --out DIR`: all measurements that need a GPU, in eight minutes.

Runs PARTS in order, the most important first. Each part yields rows, which are printed and appended
to DIR/results.jsonl at once, so an interrupted run keeps them. A part ends after the row during
which its time runs out; the next parts get the time that it left. An error ends only its own part.
--dry-run uses tiny sizes, also on a CPU."""

import asyncio
import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import torch

from bench import ROOT, machine, serving, size_config
from bench import operations as ops
from bench.decoding import gpu_rows, load_prompts
from bench.timing import PREFIX, copy_bandwidth, seconds
from clover import CloverHeads
from generate import Sampling
from hf.files import read_config
from hf.paths import default_heads, find_model
from hf.tokenizer import load_encoding
from kernels import add_norm
from model import InputError, expect
from tools.flags import DEMO
from tools.load import load_model

FULL = SimpleNamespace(
    models=("135m", "1.2b", "8b"),  # of bench.MODEL_SIZES
    batch_sizes=(1, 8, 32),         # of steps
    tree_sizes=(1, 4, 16),
    chats=(1, 8, 32, 64),           # batch sizes
    texts=(1, 32),                  # batch sizes of demo/
    prompts=72, new_tokens=128,
    slots=32, clients=64,           # of the server
    trained=None, written=100_000,  # None: --model
    training=("--steps", "200"),
    sequences=(1, 32),              # of kernels
    trees=(16, 64), prefixes=(256, 4096), histories=(256, 32_768),
    rows=(1, 32, 512),              # of the LM head's product
    matmul=8192,                    # rows and columns of a large product
    copies=64,                      # most copies of a kernel's inputs
    workers=("-n", "12"),           # for pytest-xdist
    tests=("-m", "gpu", "--continue-on-collection-errors"))
TINY = SimpleNamespace(
    models=("tiny",), batch_sizes=(1, 2), tree_sizes=(1, 4), chats=(1, 2), texts=(2,), prompts=6,
    new_tokens=8,
    slots=2, clients=4, trained=DEMO, written=2000,
    training=("--steps", "2", "--block-size", "32"),
    sequences=(1, 2), trees=(4,), prefixes=(16,), histories=(64,), rows=(1, 3), matmul=64, copies=1,
    workers=(), tests=("-m", "not gpu", "tests/test_model.py"))


# --------------------------------------------------------------------------------------------------
# The parts: generators of rows. run has the attributes device, sizes, out, deadline, model, heads.

def tests(run):
    """The tests that need a GPU. The one that measures free memory runs alone."""
    alone = "memory_of_a_graph"
    for flags in ((*run.sizes.workers, "-k", f"not {alone}"), ("-k", alone)):
        output, code = run_process(run, "tests.log", "-m", "pytest", "-v", "-rfE", "--tb=short",
                                   *flags, *run.sizes.tests)
        failures = re.findall(r"^(?:FAILED|ERROR) (tests/.*)", output, re.MULTILINE)
        yield dict(summary=output.rstrip().splitlines()[-1:], exit_code=code,
                   failures=[line[:300] for line in failures[:20]])


def run_process(run, log, *arguments):
    """Runs Python with arguments and appends its output to a log. Returns the output and the exit
    code, None if it was killed at the part's deadline."""
    with open(run.out / log, "a+") as file:
        start = file.tell()
        process = subprocess.Popen([sys.executable, "-u", *arguments], cwd=ROOT, stdout=file,
                                   stderr=file, start_new_session=True)
        try:
            code = process.wait(max(run.deadline - time.perf_counter(), 1))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its workers too, which hold the GPU
            process.wait()
            code = None
        file.seek(start)
        return file.read(), code


def smollm2(run):
    """--model answers the chats of bench/prompts.jsonl: half of them at B = 1, else all of them,
    with two seeds."""
    model, heads, prompts, stop = load(run, run.model, run.heads, run.sizes.prompts)
    for B, temperature in product(run.sizes.chats, (0.0, 0.8)):
        own, seeds = (prompts[::2], (0,)) if B == 1 else (prompts, (0, 1))
        rows = gpu_rows(model, heads, own, run.sizes.new_tokens, stop, B, temperature, seeds)
        for row in rows:
            yield dict(model=Path(run.model).name) | row


def demo(run):
    """demo/ continues held-out texts, four per slot of the largest batch."""
    model, heads, prompts, stop = load(run, DEMO, default_heads(DEMO), 4 * max(run.sizes.texts))
    for B in run.sizes.texts:
        for row in gpu_rows(model, heads, prompts[:max(4 * B, 16)], run.sizes.new_tokens, stop, B):
            yield dict(model="demo") | row


def load(run, model, heads, count):
    """Returns (model, heads, prompts, stop tokens)."""
    args = SimpleNamespace(model=str(model), device=str(run.device), dtype=None, quantize=None)
    prompts, stop = read_prompts(args.model, count)
    model, encoding = load_model(args)
    return model, CloverHeads.from_pretrained(heads, model, encoding.hash), prompts, stop


def read_prompts(model, count):
    """Chats, or held-out texts for a model without a chat template, as token ids; and the stop
    tokens."""
    encoding = load_encoding(model)
    chats = ROOT / "bench" / "prompts.jsonl" if encoding.template else None
    args = SimpleNamespace(model=model, chats=chats, data=None, prompts=count, prompt_tokens=64)
    groups, stop = load_prompts(args, encoding)
    return [prompt for row in zip(*groups.values()) for prompt in row], stop  # kinds alternate


def server(run):
    """A server under load, plain and with all drafters. start_seconds: until it listens."""
    prompts, _ = read_prompts(run.model, run.sizes.prompts)
    prompts = (prompts * run.sizes.clients)[:run.sizes.clients]
    flags = ("--model", run.model, "--batch-size", str(run.sizes.slots), "--context", "1024",
             "--device", str(run.device))
    plain = None
    for name, drafter in (("plain", ("--draft", "none")), ("auto", ("--heads", run.heads))):
        started = time.perf_counter()
        with serving.server(run.out / "server.log", run.deadline, *flags, *drafter) as port:
            row = dict(model=Path(run.model).name, drafter=name, batch_size=run.sizes.slots,
                       clients=run.sizes.clients, start_seconds=time.perf_counter() - started)
            left = max(run.deadline - time.perf_counter(), 1)
            row |= asyncio.run(asyncio.wait_for(
                serving.load(port, prompts, run.sizes.new_tokens), left))
        plain = plain or row["tokens_per_second"]
        yield row | dict(speed_up=row["tokens_per_second"] / plain)


def training(run):
    """Writing text with the model and training heads on it, by the rates that train_heads.py
    prints."""
    model = str(run.sizes.trained or run.model)
    with tempfile.TemporaryDirectory() as out:
        output, code = run_process(
            run, "training.log", "train_heads.py", "--model", model, "--data", "self",
            "--self-tokens", str(run.sizes.written), *run.sizes.training, "--out", out,
            "--device", str(run.device))
    rates = {kind: re.findall(rf"^{start}.* (\d+) tokens/s", output, re.MULTILINE)
             for kind, start in (("written", r"\d+[.]jsonl"), ("trained", "step"))}
    yield dict(model=Path(model).name, exit_code=code) | {
        f"{kind}_tokens_per_second": int(found[-1]) if found else None
        for kind, found in rates.items()}


def steps(run):
    """Steps at the sizes of published models, with stages for the largest batch."""
    sizes = run.sizes
    shapes = [("heads" if T > 1 else "plain", B, T, PREFIX, Sampling())
              for B, T in product(sizes.batch_sizes, sizes.tree_sizes)]
    bandwidth = copy_bandwidth(run.device)
    for name in sizes.models:
        model, heads = ops.random_model(name, run.device, torch.bfloat16)
        rows = ops.step_rows(model, heads, shapes, bandwidth, staged=sizes.batch_sizes[-1])
        for row in ops.over_plain(rows):
            yield dict(model=name) | row


def ceilings(run):
    """The limits of the hardware: a large copy, a large product, a launch in a graph."""
    random = partial(torch.randn, device=run.device, dtype=torch.bfloat16)
    time_graph = lambda body: seconds(ops.in_graph(body, run.device), run.device)
    yield dict(copy_gb_per_s=copy_bandwidth(run.device) / 1e9)
    n = run.sizes.matmul
    a, b = random(2, n, n)
    yield dict(matmul_tflop_per_s=2 * n**3 / time_graph(lambda: a @ b) / 1e12)
    x, weight = random(2, 4096)
    norms = lambda: [add_norm(x[None], None, weight) for _ in range(300)]
    yield dict(launch_us=1e6 * time_graph(norms) / 300)


def kernels(run):
    """Kernels beside their bounds and the same work in torch."""
    bandwidth = copy_bandwidth(run.device)
    c = size_config(run.sizes.models[-1])
    for cases in (ops.tree_cases, ops.filtered_cases, ops.attention_cases, ops.lm_head_cases,
                  ops.commit_cases):
        for case in cases(c, run.device, run.sizes):
            yield ops.kernel_row(case, run.device, bandwidth, run.sizes.copies)


PARTS = {  # name: (function, seconds of 450)
    "tests": (tests, 50), "smollm2": (smollm2, 150), "server": (server, 60),
    "training": (training, 60), "steps": (steps, 80), "demo": (demo, 30),
    "ceilings": (ceilings, 5), "kernels": (kernels, 15)}
WITH_MODEL = {"smollm2", "server", "training"}


# --------------------------------------------------------------------------------------------------
# The run

def bench(args):
    """`bench gpu`: runs args.parts, by default all."""
    if not (args.dry_run or torch.cuda.is_available()):
        raise InputError("bench gpu needs a CUDA device; --dry-run runs tiny sizes on a CPU")
    parts = args.parts or [*PARTS]
    if unknown := [name for name in parts if name not in PARTS]:
        raise InputError(f"--parts: expected some of {', '.join(PARTS)}, not {unknown[0]!r}")
    run = SimpleNamespace(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
                          sizes=TINY if args.dry_run else FULL, out=Path(args.out).absolute())
    if WITH_MODEL.intersection(parts):
        find_models(run, args)
    run.out.mkdir(exist_ok=True)
    write(run, dict(part="machine", dry_run=args.dry_run) | machine())
    total = sum(PARTS[name][1] for name in parts)
    run.deadline = time.perf_counter()
    for name in parts:
        run.deadline += args.seconds * PARTS[name][1] / total
        run_part(run, name)
        gc.collect()  # frees the part's memory
        with contextlib.suppress(RuntimeError):  # after an illegal access every call fails
            torch.cuda.empty_cache()


def find_models(run, args):
    """Sets run.model and run.heads: absolute paths, which other processes read too."""
    model = find_model(args.model or (DEMO if args.dry_run else "smollm2"))
    read_config(model)  # raises if it is no model
    heads = args.heads or default_heads(model)
    expect(heads and (Path(heads) / "heads.json").exists(),
           f"{heads or model}: has no draft heads; give their folder as --heads")
    run.model, run.heads = (os.path.abspath(path) for path in (model, heads))


def run_part(run, name):
    started = time.perf_counter()
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
