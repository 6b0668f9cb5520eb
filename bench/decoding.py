"""Decoding measured whole, for bench.py: plain, Medusa and Clover by the same loop, over batch sizes, against the memory's
bandwidth and against what transformers does; and single steps at the sizes of real models, on random weights."""

import statistics
import time
from pathlib import Path

import torch

from bench.operations import print_head
from hf.chat import load_chat_template
from model import GPTConfig, InputError
from clover import CloverHeads, preset
from training.data import load_tokens, prompts
from generate import STAGES, Sampling, memory_needed
from tools.tune import copy_bandwidth, fit_tree, stage_times, step_time
from generate import prepare
from tools.cli import load_model, pick_device
from model import GPT, free_memory
from hf.tokenizer import tokenizer_hash

GB = 1e9
SIZES = {  # name -> (what a GPTConfig of it differs in, the model)
    "7b": (dict(vocab_size=32000, n_layer=32, n_head=32, n_kv_head=32, head_size=128, n_embd=4096, n_inner=11008), "Llama 2 7B"),
    "8b": (dict(vocab_size=128256, n_layer=32, n_head=32, n_kv_head=8, head_size=128, n_embd=4096, n_inner=14336), "Llama 3 8B"),
    "70b-layer": (dict(vocab_size=128256, n_layer=1, n_head=64, n_kv_head=8, head_size=128, n_embd=8192, n_inner=28672),
                  "one layer of Llama 3 70B, and its LM head"),
}


# ---------------------------------------------------------------------------------------------------------------------
# Limits

def weight_bytes(model):
    """Bytes of weights that one step reads: all but an embedding table that is not the LM head as well."""
    unread = 0 if model.config.tied else model.embed.weight.nbytes
    return sum(p.nbytes for p in model.parameters()) - unread


def cache_bytes(model, tokens):
    """Bytes of keys and values of so many tokens."""
    c = model.config
    return 2 * c.n_layer * c.n_kv_head * c.head_size * tokens * model.dtype.itemsize


def floor(model, tokens, bandwidth):
    """Seconds below which no step can stay: its weights and its cache, read once at the speed of a large copy."""
    return (weight_bytes(model) + cache_bytes(model, tokens)) / bandwidth


class PeakMemory:
    """Bytes that a `with` block held at most: on CUDA of tensors, on Linux of the whole process, elsewhere None."""

    def __init__(self, device):
        self.device, self.peak = device, None

    def __enter__(self):
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            try:
                Path("/proc/self/clear_refs").write_text("5")  # the kernel starts its count anew
            except OSError:
                pass
        return self

    def __exit__(self, *_):
        if self.device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(self.device)
        elif Path("/proc/self/status").is_file():
            lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
            self.peak = 1024 * int(lines["VmHWM"].split()[0])


# ---------------------------------------------------------------------------------------------------------------------
# Decoding

def speculating(fit):
    """The best tree of a `Fit` that is more than a root."""
    rows = [row for row in fit.table if row[0] > 1]
    return max(rows, key=lambda row: row[2] / row[1])[0] if rows else max(fit.tree_size, 5)


def measure_batch(model, given, heads, batch, bandwidth, args):
    """Rows of one batch size: plain decoding and each kind of heads with its best tree, in paired runs."""
    options = dict(batch_size=batch, temperature=args.temperature, graph=not args.no_graph)
    sampling, N = Sampling(args.temperature), args.max_new_tokens
    engines, auto = {"plain": prepare(model, given, N, tree_size=1, **options)}, {"plain": 1}
    for name, one in heads.items():
        fit = fit_tree(model, one, batch, engines["plain"].rows, sampling, graph=not args.no_graph)
        auto[name] = fit.tree_size
        engines[name] = prepare(model, given, N, one, tree_size=args.tree_size or speculating(fit), **options)
    runs = {name: [] for name in engines}
    peaks = {}
    for name, engine in engines.items():
        engine.generate(given[:batch], min(8, N))  # warm
    for _ in range(args.runs):
        for name, engine in engines.items():
            with PeakMemory(model.device) as memory:
                runs[name].append(engine.generate(given, N))
            peaks[name] = memory.peak
    rows = []
    for name, engine in engines.items():
        middle = sorted(runs[name], key=lambda out: out.seconds)[len(runs[name]) // 2]
        speed_up = statistics.median(b.seconds / a.seconds for a, b in zip(runs[name], runs["plain"]))
        seconds = step_time(model, heads.get(name), batch, engine.tree_size, sampling, graph=not args.no_graph)
        rows.append(dict(
            batch_size=batch, heads=name, tree_size=engine.tree_size, auto=auto[name], tokens_per_step=middle.tokens_per_step,
            tokens_per_second=middle.tokens_per_second, speed_up=speed_up, step_ms=seconds * 1e3,
            floor_ms=floor(model, batch * 256, bandwidth) * 1e3, peak_gb=peaks[name] and peaks[name] / GB,
            identical=sum(a == b for a, b in zip(runs[name][0].tokens, runs["plain"][0].tokens)) / len(given)))
        print(decode_line(rows[-1]), flush=True)
    return rows, runs["plain"][0].tokens


def decode_line(row):
    memory = "-" if row["peak_gb"] is None else f"{row['peak_gb']:.2f}"
    return (f"| {row['batch_size']} | {row['heads']} | {row['tree_size']} | {row['auto']} | {row['tokens_per_step']:.2f} "
            f"| {row['tokens_per_second']:.0f} | {row['speed_up']:.2f}x | {row['step_ms']:.2f} | {row['floor_ms']:.2f} "
            f"| {memory} | {row['identical']:.0%} |")


def measure_trees(model, given, heads, args):
    """Tokens per step of each kind of heads over tree sizes: {heads: {tree size: tokens per step}}."""
    found = {}
    for name, one in heads.items():
        found[name] = {}
        for tree_size in args.tree_sizes:
            engine = prepare(model, given, args.max_new_tokens, one, tree_size=tree_size, temperature=args.temperature)
            found[name][tree_size] = engine.generate(given, args.max_new_tokens).tokens_per_step
        print(f"| {name} | " + " | ".join(f"{value:.2f}" for value in found[name].values()) + " |", flush=True)
    return found


def transformers_rows(model, given, wanted, args):
    """What transformers' generate does with the same weights and prompts, one at a time, or why it cannot be measured."""
    try:
        import transformers
    except ImportError:
        return "transformers is not installed (pip install transformers)"
    transformers.logging.set_verbosity_error()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=model.dtype).to(model.device).eval()
    theirs.generation_config.eos_token_id = None  # ours is not told to stop either
    rows = []
    for name, flags in dict(greedy={}, prompt_lookup=dict(prompt_lookup_num_tokens=10)).items():
        outputs, times = [], []
        for i, prompt in enumerate([given[0], *given]):  # the first one warms
            start = time.perf_counter()
            tokens = torch.tensor([prompt], device=model.device)
            with torch.inference_mode():
                out = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, pad_token_id=0,
                                      max_new_tokens=args.max_new_tokens, **flags)
            if i:
                outputs.append(out[0, len(prompt):].tolist())  # and waits for the device
                times.append(time.perf_counter() - start)
        rows.append(dict(how=f"transformers {transformers.__version__}, {name}", tokens_per_second=sum(map(len, outputs)) / sum(times),
                         identical=sum(a == b for a, b in zip(outputs, wanted)) / len(wanted)))
        print(f"| {rows[-1]['how']} | {rows[-1]['tokens_per_second']:.0f} | {rows[-1]['identical']:.0%} |", flush=True)
    return rows


def pyplot():
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot
    except ImportError:
        raise InputError("--plot needs matplotlib, which is not installed; pip install matplotlib") from None
    return matplotlib.pyplot


def plot(result, file):
    """Throughput over batch size, and tokens per step over tree size."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name in dict.fromkeys(row["heads"] for row in result["decoding"]):
        rows = [row for row in result["decoding"] if row["heads"] == name]
        left.plot([row["batch_size"] for row in rows], [row["tokens_per_second"] for row in rows], marker="o", label=name)
    for name, column in result["trees"].items():
        right.plot(list(column), list(column.values()), marker="o", label=name)
    left.set(xlabel="batch size", ylabel="tokens per second", xscale="log")
    right.set(xlabel="tree size", ylabel="tokens per step")
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(file)
    plt.close(figure)


def bench(args):
    """`bench.py decode` on a checkpoint."""
    if args.plot:
        pyplot()  # says now, not after the measurement, that it cannot
    model, encoding = load_model(args)
    heads = {Path(path).name: CloverHeads.from_pretrained(path, model, tokenizer_hash(encoding)) for path in args.heads}
    bandwidth = copy_bandwidth(model.device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters; copy bandwidth {bandwidth / GB:.1f} GB/s "
          "(bytes read and written)")
    print_head("batch size", "heads", "tree size", "auto takes", "tokens per step", "tokens per second", "speed-up",
               "ms per step", "floor, ms", "peak memory, GB", "identical texts")
    heldout, decoding, wanted = load_tokens(args.data, encoding, "heldout", load_chat_template(args.model)), [], None
    for batch in args.batch_sizes:
        rows, plain = measure_batch(model, prompts(heldout, max(args.prompts, batch), args.prompt_length), heads, batch, bandwidth, args)
        decoding += rows
        wanted = wanted or plain[:args.prompts]
    given = prompts(heldout, args.prompts, args.prompt_length)
    print_head("heads", *(f"tokens per step, T = {size}" for size in args.tree_sizes))
    trees = measure_trees(model, given, heads, args)
    theirs = "measured at temperature 0 only"
    if args.temperature == 0:
        print_head("one at a time", "tokens per second", "identical texts")
        theirs = transformers_rows(model, given, wanted, args)
        if isinstance(theirs, str):
            print(f"| {theirs} | - | - |")
    result = dict(bench="decode", model=Path(args.model).name, device=str(model.device), dtype=str(model.dtype),
                  temperature=args.temperature, prompts=args.prompts, prompt_length=args.prompt_length,
                  max_new_tokens=args.max_new_tokens, runs=args.runs, copy_gb_per_s=bandwidth / GB,
                  decoding=decoding, trees=trees, transformers=theirs)
    if args.plot:
        plot(result, args.plot)
    return result


# ---------------------------------------------------------------------------------------------------------------------
# Steps at real sizes

def random_model(name, device, dtype):
    """A GPT of a real model's sizes with random weights. Raises InputError where it does not fit the memory."""
    config = GPTConfig(**SIZES[name][0], tied=False, block_size=4096, rope_theta=500000.0)
    with torch.device("meta"):
        model = GPT(config).to(dtype)
    need, free = sum(p.nbytes for p in model.parameters()), free_memory(device)
    if 1.1 * need > free:
        raise InputError(f"random weights of {name} take {need / GB:.1f} GB in {str(dtype).removeprefix('torch.')}, but "
                         f"{free / GB:.1f} GB are free on {device}; take another size or --dtype bfloat16")
    model = model.to_empty(device=device)
    model.tie_and_place()
    for p in model.parameters():
        p.data.normal_(0, 0.02) if p.dim() > 1 else p.data.fill_(1)
    return model.requires_grad_(False).eval()


def bench_random(args):
    """`bench.py decode --random-weights`: the time of one step, for each batch and tree size, against its floor."""
    device = pick_device(args.device)
    dtype = getattr(torch, args.dtype) if args.dtype else torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model(args.random_weights, device, dtype)
    heads = CloverHeads(preset("clover"), model).to(device=device, dtype=dtype).requires_grad_(False).eval()
    bandwidth, sampling, prefix = copy_bandwidth(device), Sampling(args.temperature), 256
    print(f"{SIZES[args.random_weights][1]}, {sum(p.numel() for p in model.parameters()) / 1e9:.2f}B random parameters; copy "
          f"bandwidth {bandwidth / GB:.1f} GB/s; {prefix} tokens in the cache of each sequence")
    print_head("batch size", "tree size", "ms per step", "floor, ms", "share of the floor", *STAGES)
    rows = []
    for batch in args.batch_sizes:
        for tree_size in args.tree_sizes:
            if sum(memory_needed(model, heads, batch, prefix + 1, tree_size, sampling)) > free_memory(device):
                print(f"| {batch} | {tree_size} | does not fit the memory |" + " - |" * (2 + len(STAGES)))
                continue
            seconds = step_time(model, heads, batch, tree_size, sampling, graph=not args.no_graph)
            stages = stage_times(model, heads, batch, tree_size, sampling, graph=not args.no_graph)
            least = floor(model, batch * prefix, bandwidth)
            rows.append(dict(batch_size=batch, tree_size=tree_size, step_ms=seconds * 1e3, floor_ms=least * 1e3,
                             stages_ms={name: value * 1e3 for name, value in stages.items()}))
            print(f"| {batch} | {tree_size} | {seconds * 1e3:.2f} | {least * 1e3:.2f} | {least / seconds:.0%} | "
                  + " | ".join(f"{stages[name] * 1e3:.2f}" for name in STAGES) + " |", flush=True)
    return dict(bench="decode-random", model=args.random_weights, device=str(device), dtype=str(dtype),
                copy_gb_per_s=bandwidth / GB, steps=rows)
