"""Decoding: plain, Medusa and Clover by the same loop over batch sizes, against the memory's bandwidth and against
transformers; and the times of single steps at the sizes of real models, with random weights."""

import statistics
import time
from pathlib import Path

import torch

from bench import Table, print_head, print_row
from clover import CloverHeads, preset
from generate import DEFAULT_TREE, STAGES, Sampling, prepare
from hf.chat import load_chat_template
from hf.tokenizer import tokenizer_hash
from model import GPT, GPTConfig, InputError, check_memory
from tools.cli import load_model, pick_device
from tools.tune import PREFIX, copy_bandwidth, fit_tree, stage_times, step_time
from training.data import load_tokens, prompts

GB = 1e9
SIZES = {  # name -> (its fields of a GPTConfig, the model)
    "7b": (dict(vocab_size=32000, n_layer=32, n_head=32, n_kv_head=32, head_size=128, n_embd=4096, n_inner=11008),
           "Llama 2 7B"),
    "8b": (dict(vocab_size=128256, n_layer=32, n_head=32, n_kv_head=8, head_size=128, n_embd=4096, n_inner=14336),
           "Llama 3 8B"),
    "70b-layer": (dict(vocab_size=128256, n_layer=1, n_head=64, n_kv_head=8, head_size=128, n_embd=8192, n_inner=28672),
                  "one layer of Llama 3 70B, and its LM head"),
}


# ---------------------------------------------------------------------------------------------------------------------
# What heads' measurements share

def load(args, folders):
    """The model of --model, {folder name: heads} and the held-out tokens of --data."""
    model, encoding = load_model(args)
    heads = {Path(path).name: CloverHeads.from_pretrained(path, model, tokenizer_hash(encoding)) for path in folders}
    return model, heads, load_tokens(args.data, encoding, "heldout", load_chat_template(args.model))


def warm_engine(model, given, args, heads=None, **options):
    """An engine for the prompts that has already decoded a few tokens, so that everything is compiled and loaded."""
    engine = prepare(model, given, args.max_new_tokens, heads, **options)
    engine.generate(given[:engine.batch_size], min(8, args.max_new_tokens))
    return engine


def share_equal(texts, others):
    """The share of texts that are the same in both lists."""
    return sum(a == b for a, b in zip(texts, others)) / len(others)


def settings(args, model):
    """What every result of decoding says of its run."""
    names = ("prompts", "prompt_length", "max_new_tokens")
    return dict(model=Path(args.model).name, device=str(model.device), dtype=str(model.dtype),
                **{name: getattr(args, name) for name in names})


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


def step_floor(model, batch_size, bandwidth):
    """The least seconds of a step: its weights and caches of PREFIX tokens, read once at the speed of a large copy."""
    return (weight_bytes(model) + cache_bytes(model, batch_size * PREFIX)) / bandwidth


def with_peak_memory(body, device):
    """(body(), the most bytes held meanwhile): on CUDA by tensors, on Linux by the process, elsewhere None."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return body(), torch.cuda.max_memory_allocated(device)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's count
    except OSError:
        pass
    result, peak = body(), None
    if Path("/proc/self/status").is_file():
        lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
        peak = 1024 * int(lines["VmHWM"].split()[0])
    return result, peak


# ---------------------------------------------------------------------------------------------------------------------
# Decoding a checkpoint

def best_tree(fit):
    """The best tree of a `Fit` that is more than a root."""
    rows = [row for row in fit.table if row[0] > 1]
    return max(rows, key=lambda row: row[2] / row[1])[0] if rows else DEFAULT_TREE


DECODING = {
    "batch size": ("batch_size", "{}"), "heads": ("heads", "{}"), "tree size": ("tree_size", "{}"),
    "auto takes": ("auto", "{}"), "tokens per step": ("tokens_per_step", "{:.2f}"),
    "tokens per second": ("tokens_per_second", "{:.0f}"), "speed-up": ("speed_up", "{:.2f}x"),
    "ms per step": ("step_ms", "{:.2f}"), "floor, ms": ("floor_ms", "{:.2f}"), "peak memory, GB": ("peak_gb", "{:.2f}"),
    "identical texts": ("identical", "{:.0%}")}


def measure_batch(model, given, heads, batch_size, bandwidth, args, table):
    """Adds the rows of one batch size: plain decoding and each kind of heads with its best tree, in paired runs.
    Returns the texts of plain decoding."""
    options = dict(batch_size=batch_size, temperature=args.temperature, graph=not args.no_graph)
    sampling = Sampling(args.temperature)
    engines, auto = {"plain": warm_engine(model, given, args, tree_size=1, **options)}, {"plain": 1}
    for name, kind in heads.items():
        fit = fit_tree(model, kind, batch_size, engines["plain"].capacity, sampling, graph=not args.no_graph)
        auto[name] = fit.tree_size
        engines[name] = warm_engine(model, given, args, kind, tree_size=args.tree_size or best_tree(fit), **options)
    runs, peaks = {name: [] for name in engines}, {}
    for _ in range(args.runs):
        for name, engine in engines.items():
            output, peaks[name] = with_peak_memory(lambda: engine.generate(given, args.max_new_tokens), model.device)
            runs[name].append(output)
    for name, engine in engines.items():
        median = sorted(runs[name], key=lambda out: out.seconds)[args.runs // 2]
        seconds = step_time(model, heads.get(name), batch_size, engine.tree_size, sampling, graph=not args.no_graph)
        table.add(dict(
            batch_size=batch_size, heads=name, tree_size=engine.tree_size, auto=auto[name],
            tokens_per_step=median.tokens_per_step, tokens_per_second=median.tokens_per_second,
            speed_up=statistics.median(plain.seconds / out.seconds for out, plain in zip(runs[name], runs["plain"])),
            step_ms=seconds * 1e3, floor_ms=step_floor(model, batch_size, bandwidth) * 1e3,
            peak_gb=peaks[name] and peaks[name] / GB,
            identical=share_equal(runs[name][0].tokens, runs["plain"][0].tokens)))
    return runs["plain"][0].tokens


def measure_trees(model, given, heads, args):
    """Tokens per step of each kind of heads over tree sizes, printed: {heads: {tree size: tokens per step}}."""
    found = {name: {} for name in heads}
    for name, kind in heads.items():
        for tree_size in args.tree_sizes:
            engine = prepare(model, given, args.max_new_tokens, kind, tree_size=tree_size, temperature=args.temperature)
            found[name][tree_size] = engine.generate(given, args.max_new_tokens).tokens_per_step
        print_row(name, *(f"{value:.2f}" for value in found[name].values()))
    return found


def decode_with_transformers(theirs, given, max_new_tokens, **flags):
    """transformers' generate, one prompt at a time: (new tokens of each, seconds)."""
    outputs, times = [], []
    for prompt in [given[0], *given]:  # the first call warms up
        start = time.perf_counter()
        tokens = torch.tensor([prompt], device=theirs.device)
        with torch.inference_mode():
            out = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, pad_token_id=0,
                                  max_new_tokens=max_new_tokens, **flags)
        outputs.append(out[0, len(prompt):].tolist())  # waits for the device
        times.append(time.perf_counter() - start)
    return outputs[1:], sum(times[1:])


def transformers_rows(model, given, wanted, args):
    """Rows of transformers' generate with the same weights and prompts, printed, or why it cannot be measured."""
    if args.temperature:
        return "measured at temperature 0 only"
    table = Table({"one at a time": ("how", "{}"), "tokens per second": ("tokens_per_second", "{:.0f}"),
                   "identical texts": ("identical", "{:.0%}")})
    try:
        import transformers
    except ImportError:
        reason = "transformers is not installed (pip install transformers)"
        table.add(dict(how=reason, tokens_per_second=None, identical=None))
        return reason
    transformers.logging.set_verbosity_error()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=model.dtype).to(model.device).eval()
    theirs.generation_config.eos_token_id = None  # our runs do not stop either
    for name, flags in dict(greedy={}, prompt_lookup=dict(prompt_lookup_num_tokens=10)).items():
        outputs, seconds = decode_with_transformers(theirs, given, args.max_new_tokens, **flags)
        table.add(dict(how=f"transformers {transformers.__version__}, {name}",
                       tokens_per_second=sum(map(len, outputs)) / seconds, identical=share_equal(outputs, wanted)))
    return table.rows


def bench(args):
    """`python -m bench decode` on a checkpoint: prints the tables, returns what goes into the JSON line."""
    model, heads, heldout = load(args, args.heads)
    bandwidth = copy_bandwidth(model.device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters; copy bandwidth {bandwidth / GB:.1f} "
          "GB/s (bytes read and written)")
    table, wanted = Table(DECODING), None
    for batch_size in args.batch_sizes:
        given = prompts(heldout, max(args.prompts, batch_size), args.prompt_length)
        plain = measure_batch(model, given, heads, batch_size, bandwidth, args, table)
        wanted = wanted or plain[:args.prompts]
    given = prompts(heldout, args.prompts, args.prompt_length)
    print_head("heads", *(f"tokens per step, T = {size}" for size in args.tree_sizes))
    trees = measure_trees(model, given, heads, args)
    return dict(bench="decode", **settings(args, model), temperature=args.temperature, runs=args.runs,
                copy_gb_per_s=bandwidth / GB, decoding=table.rows, trees=trees,
                transformers=transformers_rows(model, given, wanted, args))


# ---------------------------------------------------------------------------------------------------------------------
# Steps at real sizes

def random_model(name, device, dtype):
    """A GPT of a real model's sizes with random weights. Raises InputError where it does not fit the memory."""
    config = GPTConfig(**SIZES[name][0], tied=False, block_size=4096, rope_theta=500000.0)
    with torch.device("meta"):
        model = GPT(config).to(dtype)
    size = sum(p.nbytes for p in model.parameters())
    check_memory(f"random weights of {name} in {str(dtype).removeprefix('torch.')} take", size, device,
                 "take another size or --dtype bfloat16")
    model = model.to_empty(device=device)
    model.tie_and_place()
    for p in model.parameters():
        p.data.normal_(0, 0.02) if p.dim() > 1 else p.data.fill_(1)
    return model.requires_grad_(False).eval()


def measure_step(model, heads, batch_size, tree_size, bandwidth, args):
    """A row of one step, printed: its time, its floor and the time of each stage."""
    options = dict(sampling=Sampling(args.temperature), graph=not args.no_graph)
    seconds = step_time(model, heads, batch_size, tree_size, **options)
    stages = stage_times(model, heads, batch_size, tree_size, **options)
    floor = step_floor(model, batch_size, bandwidth)
    print_row(batch_size, tree_size, f"{seconds * 1e3:.2f}", f"{floor * 1e3:.2f}", f"{floor / seconds:.0%}",
              *(f"{stages[name] * 1e3:.2f}" for name in STAGES))
    return dict(batch_size=batch_size, tree_size=tree_size, step_ms=seconds * 1e3, floor_ms=floor * 1e3,
                stages_ms={name: value * 1e3 for name, value in stages.items()})


def bench_random(args):
    """`python -m bench decode --random-weights`: the time of one step for each batch and tree size."""
    device = pick_device(args.device)
    dtype = getattr(torch, args.dtype) if args.dtype else torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model(args.random_weights, device, dtype)
    heads = CloverHeads(preset("clover"), model).to(device=device, dtype=dtype).requires_grad_(False).eval()
    bandwidth, rows = copy_bandwidth(device), []
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{SIZES[args.random_weights][1]}, {parameters / 1e9:.2f}B random parameters; "
          f"copy bandwidth {bandwidth / GB:.1f} GB/s; {PREFIX} tokens in the cache of each sequence")
    print_head("batch size", "tree size", "ms per step", "floor, ms", "share of the floor", *STAGES)
    for batch_size in args.batch_sizes:
        for tree_size in args.tree_sizes:
            try:
                rows.append(measure_step(model, heads, batch_size, tree_size, bandwidth, args))
            except (InputError, torch.OutOfMemoryError):
                print_row(batch_size, tree_size, "does not fit the memory", *["-"] * (2 + len(STAGES)))
    return dict(bench="decode-random", model=args.random_weights, device=str(device), dtype=str(dtype),
                copy_gb_per_s=bandwidth / GB, steps=rows)
