"""`python -m bench gpu --out DIR`: everything that only a GPU can tell, in under eight minutes.

PARTS run one after another, the most important first. Each yields rows; a row is printed and
appended to DIR/results.jsonl as soon as it is measured, so a run that is cut off loses only what it
had not reached. A part ends when its budget is spent, and an error ends only its own part.
--dry-run takes tiny sizes, also on a CPU: a test walks through all parts that way."""

import gc
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import torch

from bench import ROOT, machine, size_config
from bench import operations as ops
from bench.decoding import decode_in_turns, decode_once, load_prompts, medians
from clover import CloverHeads, preset
from generate import DraftPlan, FixedPolicy, Sampling, generate
from hf import default_heads
from kernels import add_norm
from model import GPT, GPTConfig, InputError
from tools.compare import first_difference
from tools.flags import DEMO
from tools.load import load_model
from tools.timing import copy_bandwidth, seconds, step_time, timing_decoder

NOISE, TOP_P = Sampling(temperature=0.8), Sampling(temperature=0.8, top_p=0.9)

# What the parts measure: models of bench.SIZES, and shapes.
FULL = SimpleNamespace(
    large="8b",
    small="135m",
    batch_sizes=(1, 32),
    tree_sizes=(1, 16, 4, 64, 32),
    prefixes=(256, 4096),           # tokens in the cache
    rows=(1, 16, 64, 256, 512),     # M of the LM head's kernels
    product_rows=(1, 16, 32, 512),  # M of a model's products
    matmul=8192,                    # rows and columns of a large product
    launches=300,                   # in the graph that prices one
    new_tokens=128,
    tests=["-m", "gpu", *(f"tests/test_{name}.py" for name in (
        "kernels", "kernels_fused", "model", "generate", "tools_policy", "train_heads"))])
TINY = SimpleNamespace(
    large="tiny", small="tiny", batch_sizes=(1, 2), tree_sizes=(1, 4), prefixes=(16,), rows=(1, 3),
    product_rows=(1, 2), matmul=64, launches=3, new_tokens=8,
    tests=["-m", "not gpu", "tests/test_model.py"])


# --------------------------------------------------------------------------------------------------
# The parts: generators of rows. run: device, dtype, sizes, out, model (of --model) as attributes.

def ceilings(run):
    """What the hardware gives: a large copy, a large product, a launch in a graph, and the products
    of a model's step alone, which no step can beat."""
    random = partial(torch.randn, device=run.device, dtype=run.dtype)
    time_graph = lambda body: seconds(ops.in_graph(body, run.device), run.device)
    yield dict(copy_gb_per_s=copy_bandwidth(run.device) / 1e9)
    n = run.sizes.matmul
    a, b = random(2, n, n)
    yield dict(matmul_tflop_per_s=2 * n**3 / time_graph(lambda: a @ b) / 1e12)
    x, weight = random(1, 4096), random(4096)
    n = run.sizes.launches
    norms = lambda: [add_norm(x, None, weight) for _ in range(n)]
    yield dict(launch_us=1e6 * time_graph(norms) / n)
    model, _ = run.random_model(run.sizes.large)
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    moved = sum(layer.weight.nbytes for layer in layers)
    for M in run.sizes.product_rows:
        inputs = {size: random(M, size) for size in {layer.in_features for layer in layers}}
        time = time_graph(lambda: [layer(inputs[layer.in_features]) for layer in layers])
        yield dict(model=run.sizes.large, M=M, products_ms=1e3 * time, gb_per_s=moved / time / 1e9)


def steps(run, large):
    """Steps of a model's sizes, by stage. over_plain: how many tokens a step must emit to pay; over
    the plain step of the same batch, prefix and sampling, which comes first."""
    name = run.sizes.large if large else run.sizes.small
    prefixes = run.sizes.prefixes if large else run.sizes.prefixes[:1]
    model, heads = run.random_model(name)
    shapes = [(B, T, prefix, Sampling()) for prefix in prefixes for T in run.sizes.tree_sizes
              for B in run.sizes.batch_sizes]
    shapes += [(B, T, prefixes[0], sampling) for sampling in (NOISE, TOP_P)
               for T in run.sizes.tree_sizes[:2] for B in run.sizes.batch_sizes]
    plain = {}
    for row in ops.step_rows(model, heads, shapes, copy_bandwidth(run.device)):
        case = tuple(row[key] for key in ("batch_size", "prefix", "temperature", "top_p"))
        plain.setdefault(case, row["step_ms"])
        yield dict(model=name) | row | dict(over_plain=row["step_ms"] / plain[case])


def demo(run):
    """demo/ decoded, in bfloat16 and float32."""
    for dtype in ("bfloat16", "float32"):
        yield from decoded(run, dict(model=str(DEMO), dtype=dtype, chats=None), DEMO / "clover")


def chats(run):
    """The chats of bench/prompts.jsonl, by the model of --model."""
    if run.model is None:
        raise Skipped("no --model was given")
    file = str(ROOT / "bench" / "prompts.jsonl")
    yield from decoded(run, dict(model=run.model, dtype=None, chats=file), default_heads(run.model))


def decoded(run, flags, heads_path):
    """Rows of plain decoding and of each drafter, over batch sizes, each beside its graph alone."""
    prompts = None if flags["chats"] else 4 * max(run.sizes.batch_sizes)
    args = SimpleNamespace(**flags, device=str(run.device), quantize=None, data=None,
                           prompts=prompts)
    model, encoding = load_model(args)
    heads = heads_path and CloverHeads.from_pretrained(heads_path, model, encoding.hash)
    groups, stop = load_prompts(args, encoding)
    texts = [text for row in zip(*groups.values()) for text in row]  # kinds take turns
    plans = [DraftPlan(), DraftPlan(0, 7)]
    plans += [DraftPlan(3), DraftPlan(7), DraftPlan(15), DraftPlan(8, 7)] if heads else []
    options = {str(plan): dict(policy=FixedPolicy(plan)) for plan in plans}
    options["auto"] = dict(lookup=True)
    for B in run.sizes.batch_sizes:
        ways = {name: partial(decode_once, model, heads=heads, batch_size=B, stop=stop, **option)
                for name, option in options.items()}
        # four prompts a slot: the last ones leave slots idle, which costs as much as busy ones
        (_, outputs), = decode_in_turns(ways, {None: texts[:max(4 * B, 16)]},
                                        run.sizes.new_tokens, runs=1)
        rows = medians(outputs)
        prefix = max(map(len, texts)) + run.sizes.new_tokens // 2  # about the mean
        for plan in plans:
            used = heads if plan.head_nodes else None
            decoder = timing_decoder(model, used, plan, prefix, batch_size=B)
            rows[str(plan)]["graph_ms"] = 1e3 * step_time(decoder)
        for name, row in rows.items():
            out, = outputs[name]
            steps = max(out.batch_steps - out.first.batch_steps, 1)
            yield dict(model=Path(args.model).name, dtype=str(model.dtype), drafter=name,
                       batch_size=B) | row | differences(model, out, *outputs["plain"]) | dict(
                engine_ms=1e3 * (out.seconds - out.first.seconds) / steps)


def differences(model, output, plain):
    """How many sequences differ from plain decoding's by ties, and by bugs."""
    kinds = Counter()
    for ours, theirs in zip(output.sequences, plain.sequences):
        found = first_difference(model, [ours.prompt], [ours.tokens], [theirs.tokens],
                                 [Sampling()])
        kinds[found[-1] if found else "none"] += 1
    return dict(ties=kinds["tie"], bugs=kinds["bug"])


def toy(run):
    """Random weights, decoded eagerly by every drafter and way to sample: all kernels of a step."""
    config = GPTConfig(vocab_size=300, block_size=256, n_layer=2, n_head=4, n_kv_head=2,
                       head_size=32, n_embd=128)
    prompts = [[1, 2, 3] * 4, [7] * 5]
    presets = "clover", "clover2", "hydra", "medusa"
    for name, dtype in product(presets, (run.dtype, torch.float32)):
        model = GPT(config).init_weights().to(run.device, dtype).requires_grad_(False).eval()
        heads = CloverHeads(preset(name), model).to(run.device, dtype).requires_grad_(False).eval()
        for sampling in (Sampling(), NOISE, Sampling(0.8, 50, 0.9, 0.01)):
            options = dict(sampling=[sampling] * 2, graph=False)
            plain = generate(model, prompts, 8, **options).tokens
            tree = generate(model, prompts, 8, heads, lookup=True, tree_size=9, **options).tokens
            yield dict(heads=name, dtype=str(dtype), sampling=str(sampling),
                       identical=tree == plain)


def tests(run):
    """The tests that need a GPU; the one that counts free memory runs alone."""
    require("pytest", "xdist")
    workers = ["-n", "12"] if run.sizes is FULL else []
    for flags in ([*workers, "-k", "not memory_of_a_graph"], ["-k", "memory_of_a_graph"]):
        output, code = run_process(
            [sys.executable, "-m", "pytest", "-v", "-rfE", "--tb=short", *flags, *run.sizes.tests],
            run.deadline)
        with open(run.out / "tests.log", "a") as log:
            log.write(output)
        counts = {name.lower(): len(re.findall(rf"\b{name}\b(?= *\[| tests/)", output))
                  for name in ("PASSED", "FAILED", "SKIPPED", "ERROR")}
        failures = re.findall(r"^(?:FAILED|ERROR) (tests/.*)", output, re.MULTILINE)
        yield counts | dict(exit_code=code, failures=[x[:300] for x in failures[:20]])


def run_process(command, deadline):
    """(what a command printed, its exit code; None where it was ended at the deadline)"""
    with tempfile.TemporaryFile("w+") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file,
                                   start_new_session=True)
        try:
            code = process.wait(max(deadline - time.perf_counter(), 1))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with its workers, which hold the GPU
            process.wait()
            code = None
        file.seek(0)
        return file.read(), code


def kernels(run):
    """Kernels beside their bounds and the same work by torch."""
    bandwidth = copy_bandwidth(run.device)
    for shape in attention_shapes(run):
        yield kernel_row(run, bandwidth, "tree_attention", ops.attention_case, ops.sdpa, **shape)
    for M in run.sizes.rows:
        yield kernel_row(run, bandwidth, "project_topk", ops.topk_case, M=M, k=8)
        for t in (0.0, 0.8):
            yield kernel_row(run, bandwidth, "project_sample", ops.sample_case, M=M, temperature=t)
    for B in run.sizes.batch_sizes:
        yield kernel_row(run, bandwidth, "commit_path", ops.commit_case, batch=B)


def flex(run):
    """Three shapes of FlexAttention, which takes long to compile."""
    bandwidth = copy_bandwidth(run.device)
    for shape in [shape for shape in attention_shapes(run) if shape["T"] > 1][:3]:
        yield kernel_row(run, bandwidth, "flex_attention", ops.attention_case, ops.compiled_flex,
                         **shape)


def attention_shapes(run):
    return (dict(batch=B, prefix=prefix, T=T) for prefix in run.sizes.prefixes[::-1]
            for T in run.sizes.tree_sizes[:4] for B in run.sizes.batch_sizes)


def kernel_row(run, bandwidth, name, case, *others, **shape):
    """The row of one kernel at one shape."""
    size, make, ours, other = case(run.device, run.sizes.large, *others, **shape)
    copies = min(math.ceil(1e8 / size) + 1, 64)  # that take turns, so no cache holds the next one
    inputs = [make() for _ in range(copies if run.sizes is FULL else 1)]
    us = ops.call_us(ours, inputs, run.device)
    torch_us = ops.call_us(other, inputs, run.device)
    return dict(kernel=name) | shape | dict(us=us, share_of_copy=size / bandwidth * 1e6 / us,
                                            torch_us=torch_us, speed_up=torch_us / us)


@torch.inference_mode()
def transformer_steps(run):
    """A plain step by transformers on the same sizes, eagerly and captured in a graph."""
    require("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
    run.forget_models()
    c = size_config(run.sizes.large)
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.n_embd, intermediate_size=c.n_inner,
        num_hidden_layers=c.n_layer, num_attention_heads=c.n_head, head_dim=c.head_size,
        num_key_value_heads=c.n_kv_head, max_position_embeddings=c.block_size, dtype=run.dtype)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(run.dtype)
    rotary = type(model.model.rotary_emb)(config).to(run.device)  # has values of its own
    model = model.to_empty(device=run.device).eval()
    model.model.rotary_emb = rotary
    for p in model.parameters():
        p.normal_(0, 0.02)
    prefix = run.sizes.prefixes[0]
    for B in run.sizes.batch_sizes:
        cache = StaticCache(config=config, max_cache_len=prefix + 1)
        tokens = torch.zeros(B, 1, dtype=torch.int64, device=run.device)
        model(tokens, past_key_values=cache)  # allocates
        lengths = torch.zeros(c.n_layer, dtype=torch.int64, device=run.device)
        for layer, length in zip(cache.layers, lengths):
            layer.cumulative_length = length  # so that one launch resets all of them

        def step():
            lengths.fill_(prefix)  # each layer has added the token
            return model(tokens, past_key_values=cache).logits.argmax(-1)
        row = dict(model=run.sizes.large, batch_size=B, prefix=prefix)
        yield row | dict(eager_ms=1e3 * seconds(step, run.device))
        yield row | dict(graph_ms=1e3 * seconds(ops.in_graph(step, run.device), run.device))


def sanitizer(run):
    """compute-sanitizer on `toy`: accesses out of bounds, then races in shared memory."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        raise Skipped("compute-sanitizer, of the CUDA toolkit, is not installed")
    for tool in ("memcheck", "racecheck"):
        seconds_left = max(run.deadline - time.perf_counter(), 2)
        with tempfile.TemporaryDirectory() as folder:
            output, code = run_process(
                [program, "--tool", tool, sys.executable, "-m", "bench", "gpu", "--out", folder,
                 "--parts", "toy", "--seconds", str(int(seconds_left / 2))], run.deadline)
        with open(run.out / "sanitizer.log", "a") as log:
            log.write(output)
        summary = re.findall(r"=+ (\w+ SUMMARY: .*)", output)
        cases = {answer: output.count(f'"identical": {answer}') for answer in ("true", "false")}
        yield dict(tool=tool, summary=summary[-1:], identical=cases["true"],
                   different=cases["false"], exit_code=code)


PARTS = {  # name: (function, its share of --seconds, relative to the others')
    "ceilings": (ceilings, 0.06), "steps": (partial(steps, large=True), 0.22),
    "small-steps": (partial(steps, large=False), 0.07),
    "demo": (demo, 0.15), "chats": (chats, 0.15), "toy": (toy, 0.04), "tests": (tests, 0.2),
    "kernels": (kernels, 0.08), "transformers": (transformer_steps, 0.05), "flex": (flex, 0.08),
    "sanitizer": (sanitizer, 0.2)}


# --------------------------------------------------------------------------------------------------
# The run

class Skipped(Exception):
    """A part that cannot run here; the message says why."""


def require(*modules):
    for name in modules:
        if find_spec(name) is None:
            raise Skipped(f"the package {name} is not installed")


class Run:
    """What the parts share."""

    def __init__(self, args):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.sizes = TINY if args.dry_run else FULL
        self.dtype = torch.bfloat16
        self.model = args.model
        self.out = Path(args.out)
        self.models = {}

    def random_model(self, name):
        """`operations.random_model`, made once for the parts that follow one another."""
        if name not in self.models:
            self.forget_models()
            self.models[name] = ops.random_model(name, self.device, self.dtype)
        return self.models[name]

    def forget_models(self):
        self.models.clear()
        gc.collect()  # no cycle may keep gigabytes

    def write(self, row):
        short = lambda x: float(f"{x:.4g}") if isinstance(x, float) else x
        line = json.dumps({key: short(value) for key, value in row.items()})
        print(line, flush=True)
        with open(self.out / "results.jsonl", "a") as file:
            file.write(line + "\n")


def bench(args):
    """`bench gpu`: runs args.parts, default all. An error that leaves CUDA unusable starts a new
    process for the parts that are left."""
    if not (args.dry_run or torch.cuda.is_available()):
        raise InputError("bench gpu needs a CUDA device; --dry-run takes tiny sizes on a CPU")
    parts = args.parts or [name for name in PARTS if args.model or name != "chats"]
    if unknown := [name for name in parts if name not in PARTS]:
        raise InputError(f"--parts: expected some of {', '.join(PARTS)}, not {unknown[0]!r}")
    run = Run(args)
    run.seconds = args.seconds / sum(PARTS[name][1] for name in parts)  # of a share of 1
    run.out.mkdir(exist_ok=True)
    run.write(dict(part="machine", dry_run=args.dry_run) | machine())
    for i, name in enumerate(parts, 1):
        run_part(run, name)
        if not is_usable(run.device) and parts[i:]:
            left = int(run.seconds * sum(PARTS[name][1] for name in parts[i:]))
            rest = ["--seconds", str(max(left, 1)), "--parts", *parts[i:]]  # the last ones count
            os.execv(sys.executable, [sys.executable, "-m", "bench", *sys.argv[1:], *rest])


def run_part(run, name):
    part, share = PARTS[name]
    started = time.perf_counter()
    run.deadline = started + share * run.seconds
    ended = "done"
    rows = part(run)
    try:
        for row in rows:
            run.write(dict(part=name) | row)
            if time.perf_counter() > run.deadline:
                ended = "out of time"
                break
    except Skipped as reason:
        ended = f"skipped: {reason}"
    except Exception as error:
        ended = f"{type(error).__name__}: {error}"[:500]
    rows.close()
    run.write(dict(part=name, ended=ended, seconds=time.perf_counter() - started))


def is_usable(device):
    """Whether CUDA still works: after an illegal access every call fails."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True
