"""`python -m bench gpu --out DIR`: answers to chats, steps and kernels on a GPU.

Each of PARTS yields rows, which are printed and appended to DIR/results.jsonl at once, so an
interrupted run keeps them. --dry-run uses tiny sizes, also on a CPU."""

import gc
import json
from functools import partial
from itertools import product
from operator import eq
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import torch

from backends.gpu import apply
from bench import CHATS, machine, size_config
from bench import operations as ops
from bench.decoding import read_chats, start_decoding
from bench.timing import copy_bandwidth, seconds
from generate import Sampling
from hf.heads import default_heads, load_heads
from hf.paths import find_model
from hf.tokenizer import load_encoding
from kernels import add_norm
from model import GPT, expect
from tools.compare import first_difference
from tools.flags import DEMO
from training.data import load_tokens, prompts

SIZES = dict(  # name=(value, value with --dry-run)
    models=(("135m", "1.2b", "8b"), ("tiny",)),  # of bench.MODEL_SIZES
    batch_sizes=((1, 8, 32), (1, 2)),            # of steps
    tree_sizes=((1, 4, 16), (1, 4)),
    chats=((1, 8, 32, 64), (1, 2)),              # batch sizes
    prompts=(72, 8),
    new_tokens=(128, 8),
    sequences=((1, 32), (1, 2)),                 # of kernels
    trees=((16, 64), (4,)),
    prefixes=((256, 4096), (16,)),
    rows=((1, 32, 512), (1, 3)),                 # of the LM head's product
    products=((1, 16, 64), (1, 3)),              # rows of a layer's
    matmul=(8192, 64))                           # rows and columns of a large product
CHECKED = 8  # outputs that differ from plain decoding, at most, whose difference is looked into


def smollm2(run):
    """Answers chats, plainly and with heads and lookup: half of them at B = 1, else all of them,
    with two seeds. A model without a chat template continues held-out texts."""
    path = find_model(run.model)
    encoding = load_encoding(path)
    model = GPT.from_pretrained(path, device=run.device)
    folder = run.heads or default_heads(path, model)
    expect(folder, f"{path}: has no draft heads; give their folder as --heads")
    heads = load_heads(folder, model, encoding.hash)
    n = run.sizes.prompts
    if encoding.template:
        groups, stop = read_chats(CHATS, path, encoding, n)
    else:
        groups, stop = dict(text=prompts(load_tokens(None, encoding, "heldout"), n, 64)), ()
    texts = [prompt for row in zip(*groups.values()) for prompt in row]  # kinds alternate
    for B, temperature in product(run.sizes.chats, (0.0, 0.8)):
        own, seeds = (texts[:len(texts) // 2], (0,)) if B == 1 else (texts, (0, 1))
        for row in answers(model, heads, own, run.sizes.new_tokens, stop, B, temperature, seeds):
            yield dict(model=Path(path).name, dtype=str(model.dtype)) | row


def answers(model, heads, texts, new, stop, B, temperature=0.0, seeds=(0,)):
    """Yields a row for each tree size and seed, plain decoding first. engine_ms: of a step, by the
    wall. ties, bugs: see `differences`."""
    plain = {}  # seed -> Output
    for T in (1, None, 4, 16):
        decode = start_decoding(model, texts, new, stop, B, temperature, heads=heads, lookup=True,
                                tree_size=T)
        for seed in seeds:
            sampling = [Sampling(temperature, seed=seed)] * len(texts)
            out = decode(texts, sampling)
            reference = plain.setdefault(seed, out)
            yield dict(
                batch_size=B, tree_size=T or "auto", temperature=temperature, seed=seed,
                tokens_per_second=out.tokens_per_second,
                speed_up=out.tokens_per_second / reference.tokens_per_second,
                tokens_per_step=out.tokens_per_step, engine_ms=1e3 * out.seconds / out.batch_steps,
                identical=fmean(map(eq, out.tokens, reference.tokens)),
                **differences(model, texts, sampling, out.tokens, reference.tokens))


def differences(model, texts, sampling, ours, plain):
    """Counts the first CHECKED outputs that differ from plain decoding: by ties, and by bugs."""
    differ = [i for i, tokens in enumerate(ours) if tokens != plain[i]][:CHECKED]
    kinds = [first_difference(model, texts, ours, [*ours[:i], plain[i]], sampling)[-1]
             for i in differ]
    return dict(ties=kinds.count("tie"), bugs=kinds.count("bug"))


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
    time_graph = lambda body: seconds(ops.in_graph(body, run.device))
    n = run.sizes.matmul
    a, b = random(2, n, n)
    x, weight = random(2, 4096)
    norms = lambda: [add_norm(x[None], None, weight) for _ in range(300)]
    yield dict(copy_gb_per_s=bandwidth / 1e9, launch_us=1e6 * time_graph(norms) / 300,
               matmul_tflop_per_s=2 * n**3 / time_graph(lambda: a @ b) / 1e12)
    c = size_config(run.sizes.models[-1])
    for cases in (ops.linear_cases, ops.attention_cases, ops.lm_head_cases):
        for case in cases(c, run.device, run.sizes):
            yield ops.kernel_row(case, run.device, bandwidth)


PARTS = dict(smollm2=smollm2, steps=steps, kernels=kernels)


def bench(args):
    """`bench gpu`: runs args.parts."""
    has_gpu = torch.cuda.is_available()
    expect(has_gpu or args.dry_run,
           "bench gpu needs a CUDA device; --dry-run runs tiny sizes on a CPU")
    sizes = {name: values[args.dry_run] for name, values in SIZES.items()}
    run = SimpleNamespace(device=torch.device("cuda" if has_gpu else "cpu"), heads=args.heads,
                          model=args.model or (DEMO if args.dry_run else "smollm2"),
                          sizes=SimpleNamespace(**sizes))
    out = Path(args.out)
    out.mkdir(exist_ok=True)
    write(out, dict(part="machine", dry_run=args.dry_run) | machine())
    for name in args.parts:
        for row in PARTS[name](run):
            write(out, dict(part=name) | row)
        gc.collect()  # frees the part's memory
        torch.cuda.empty_cache()


def write(out, row):
    row = {key: float(f"{x:.4g}") if isinstance(x, float) else x for key, x in row.items()}
    line = json.dumps(row)
    print(line, flush=True)
    with open(out / "results.jsonl", "a") as file:
        file.write(line + "\n")
