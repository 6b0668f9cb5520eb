"""`python -m bench gpu --out DIR`: all measurements that need a GPU, in eight minutes.

Runs PARTS in order, the most important first. Each part yields rows, which are printed and appended
to DIR/results.jsonl at once, so an interrupted run keeps them. A part ends after the row during
which its time runs out; the next parts get the time that it left. An error ends only its own part.
--dry-run uses tiny sizes, also on a CPU."""

import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import torch

from backends.gpu import apply
from bench import CHATS, ROOT, machine, serving, size_config
from bench import operations as ops
from bench.decoding import gpu_rows, read_chats
from bench.timing import copy_bandwidth, seconds
from generate import Sampling
from hf.heads import default_heads, load_heads
from hf.paths import find_model
from hf.tokenizer import load_encoding
from kernels import add_norm
from model import GPT, InputError, expect
from tools.flags import DEMO
from training.data import load_tokens, prompts

SIZES = dict(  # name=(value, value with --dry-run)
    models=(("135m", "1.2b", "8b"), ("tiny",)),  # of bench.MODEL_SIZES
    batch_sizes=((1, 8, 32), (1, 2)),            # of steps and demo/
    tree_sizes=((1, 4, 16), (1, 4)),
    chats=((1, 8, 32, 64), (1, 2)),              # batch sizes
    prompts=(128, 8),                            # at most
    new_tokens=(128, 8),
    slots=(32, 2),                               # of the server
    clients=(64, 4),
    written=(100_000, 5000),                     # tokens to train on
    training=(("--steps", "200"), ("--steps", "2", "--block-size", "32")),
    sequences=((1, 32), (1, 2)),                 # of kernels
    trees=((16, 64), (4,)),
    prefixes=((256, 4096), (16,)),
    histories=((256, 32_768), (64,)),
    rows=((1, 32, 512), (1, 3)),                 # of the LM head's product
    products=((1, 16, 64), (1, 3)),              # rows of a layer's
    matmul=(8192, 64),                           # rows and columns of a large product
    tests=(("-n", "12", "--dist", "load", "-m", "gpu", "--continue-on-collection-errors"),
           ("-n", "0", "-m", "not gpu", "tests/test_model.py")))


# --------------------------------------------------------------------------------------------------
# The parts: generators of rows. run has the attributes device, sizes, out, deadline, model, heads.

def tests(run):
    """The tests that need a GPU. The one that measures free memory runs alone."""
    alone = "memory_of_a_graph"
    for chosen in (f"not {alone}", alone):
        with program(run, "tests.log", "-m", "pytest", "-v", "-rfE", "--tb=short",
                     *run.sizes.tests, "-k", chosen) as (process, output):
            code = process.wait()
            lines = output().splitlines()
        failures = [line[:300] for line in lines if re.match("(FAILED|ERROR) tests/", line)]
        yield dict(summary=lines[-1:], exit_code=code, failures=failures[:20])


@contextlib.contextmanager
def program(run, log, *arguments):
    """Runs Python with arguments and appends its output to a log. Yields the process and a function
    that returns its output so far. Kills it at the part's deadline or when the block ends, with its
    children, which hold the GPU."""
    with open(run.out / log, "a+") as file:
        start = file.tell()
        process = subprocess.Popen([sys.executable, "-u", *arguments], cwd=ROOT, stdout=file,
                                   stderr=file, start_new_session=True)

        def output():
            file.seek(start)
            return file.read()

        def kill():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        timer = threading.Timer(run.deadline - time.perf_counter(), kill)
        timer.start()
        try:
            yield process, output
        finally:
            timer.cancel()
            kill()
            process.wait()


def decoded(run, path, heads, batch_sizes, temperatures):
    """Rows of `gpu_rows`, of answered chats or continued texts: half of the prompts at B = 1, else
    all of them, with two seeds."""
    texts, stop = read_prompts(path, run.sizes.prompts)
    model = GPT.from_pretrained(path, device=run.device)
    heads = load_heads(heads, model, load_encoding(path).hash)
    for B, temperature in product(batch_sizes, temperatures):
        own, seeds = (texts[::2], (0,)) if B == 1 else (texts, (0, 1))
        rows = gpu_rows(model, heads, own, run.sizes.new_tokens, stop, B, temperature, seeds)
        for row in rows:
            yield dict(model=Path(path).name) | row


@cache
def read_prompts(model, count):
    """Chats, or held-out texts for a model without a chat template, as token ids; and the stop
    tokens."""
    encoding = load_encoding(model)
    if not encoding.template:
        return prompts(load_tokens(None, encoding, "heldout"), count, 64), ()
    groups, stop = read_chats(CHATS, model, encoding, count)
    return [prompt for row in zip(*groups.values()) for prompt in row], stop  # kinds alternate


def server(run):
    """A server under load, plain and with all drafters. start_seconds: until it listens."""
    sizes = run.sizes
    texts = read_prompts(run.model, sizes.prompts)[0][:sizes.clients]
    flags = ("--port", "0", "--model", run.model, "--batch-size", str(sizes.slots),
             "--context", "1024", "--device", str(run.device))
    plain = None
    for name, drafter in (("plain", ("--draft", "none")), ("auto", ("--heads", run.heads))):
        started = time.perf_counter()
        with program(run, "server.log", "-m", "tools.serve", *flags, *drafter) as running:
            port = wait_for_port(*running)
            row = dict(model=Path(run.model).name, drafter=name, batch_size=sizes.slots,
                       clients=sizes.clients, start_seconds=time.perf_counter() - started)
            row |= serving.load(port, texts, sizes.new_tokens)
        plain = plain or row["tokens_per_second"]
        yield row | dict(speed_up=row["tokens_per_second"] / plain)


def wait_for_port(process, output):
    """The port that a server reports when it listens. Raises RuntimeError if it ends before."""
    while process.poll() is None:
        if address := re.search(r"http://127\.0\.0\.1:(\d+)\n", output()):
            return int(address[1])
        time.sleep(0.05)
    raise RuntimeError("the server did not start; see server.log")


def training(run):
    """Writing text with the model and training heads on it, by the rates that train_heads.py
    prints."""
    with (tempfile.TemporaryDirectory() as out,
          program(run, "training.log", "train_heads.py", "--model", run.model, "--data", "self",
                  "--self-tokens", str(run.sizes.written), *run.sizes.training, "--out", out,
                  "--device", str(run.device)) as (process, output)):
        row = dict(model=Path(run.model).name, exit_code=process.wait())
        for kind, start in (("written", r"\d.* of .* tokens,"), ("trained", "step")):
            rates = re.findall(rf"^{start}.* (\d+) tokens/s", output(), re.MULTILINE)
            row[f"{kind}_tokens_per_second"] = int(rates[-1]) if rates else None
    yield row


def steps(run):
    """Steps at the sizes of published models, with their stages; of one sequence also with
    cuBLAS's products, and with weights in 8 and 4 bits."""
    sizes = run.sizes
    shapes = [("heads" if T > 1 else "plain", B, T, Sampling())
              for B, T in product(sizes.batch_sizes, sizes.tree_sizes)]
    few = [shape for shape in shapes if shape[1] == 1]
    bandwidth = copy_bandwidth(run.device)
    for name in sizes.models:
        for products, bits, some in (("cublas", 16, few), ("default", 16, shapes),
                                     ("8 bits", 8, few), ("4 bits", 4, few)):
            model = heads = None  # frees those before
            model, heads = ops.random_model(name, run.device, torch.bfloat16)
            if bits < 16:
                ops.quantize_randomly(model, bits)
            if products != "cublas":
                apply(model)
                apply(heads)
            for row in ops.over_plain(ops.step_rows(model, heads, some, bandwidth)):
                yield dict(model=name, products=products) | row


def kernels(run):
    """The limits of the hardware: a large copy, a large product, a launch in a graph. Then kernels
    beside their bounds and the same work in torch."""
    bandwidth = copy_bandwidth(run.device)
    random = partial(torch.randn, device=run.device, dtype=torch.bfloat16)
    time_graph = lambda body: seconds(ops.in_graph(body, run.device), run.device)
    n = run.sizes.matmul
    a, b = random(2, n, n)
    x, weight = random(2, 4096)
    norms = lambda: [add_norm(x[None], None, weight) for _ in range(300)]
    yield dict(copy_gb_per_s=bandwidth / 1e9, launch_us=1e6 * time_graph(norms) / 300,
               matmul_tflop_per_s=2 * n**3 / time_graph(lambda: a @ b) / 1e12)
    c = size_config(run.sizes.models[-1])
    for cases in (ops.linear_cases, ops.tree_cases, ops.attention_cases, ops.lm_head_cases):
        for case in cases(c, run.device, run.sizes):
            yield ops.kernel_row(case, run.device, bandwidth)


PARTS = {  # name: (function, seconds of 450)
    "tests": (tests, 50),
    "smollm2": (lambda run: decoded(run, run.model, run.heads, run.sizes.chats, (0.0, 0.8)), 150),
    "server": (server, 60), "training": (training, 60), "steps": (steps, 80),
    "demo": (lambda run: decoded(run, DEMO, DEMO / "clover", run.sizes.batch_sizes, (0.0,)), 30),
    "kernels": (kernels, 20)}
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
    sizes = {name: values[args.dry_run] for name, values in SIZES.items()}
    run = SimpleNamespace(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
                          sizes=SimpleNamespace(**sizes), out=Path(args.out).absolute())
    if WITH_MODEL.intersection(parts):
        model = find_model(args.model or (DEMO if args.dry_run else "smollm2"))
        heads = args.heads or default_heads(model, GPT.from_pretrained(model, device="cpu"))
        expect(heads and (Path(heads) / "heads.json").exists(),
               f"{heads or model}: has no draft heads; give their folder as --heads")
        # absolute paths, which other processes read too
        run.model, run.heads = (os.path.abspath(path) for path in (model, heads))
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
