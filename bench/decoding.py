"""Decoding: plain, Medusa and Clover by the same loop over batch sizes, against the memory's bandwidth and against
transformers; and the times of single steps at the sizes of real models, with random weights."""

import statistics
import time
from itertools import product
from pathlib import Path

import torch

from bench import Table
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


def settings(args, model):
    """What every result of decoding says of its run."""
    names = ("prompts", "prompt_length", "max_new_tokens")
    return dict(model=Path(args.model).name, device=str(model.device), dtype=str(model.dtype),
                **{name: getattr(args, name) for name in names})


def decode_in_turns(model, given, kinds, args, runs=1, **options):
    """Decodes the prompts with each kind, {name: (heads, tree size)}, `runs` times in turns, after a few tokens that
    compile and load everything. The first kind is plain decoding.
    Returns {name: row}, with medians, and with the share of texts that are plain decoding's as `identical`; and plain
    decoding's texts."""
    outputs, peaks = {name: [] for name in kinds}, {}
    engines = {name: prepare(model, given, args.max_new_tokens, heads, tree_size=tree_size, **options)
               for name, (heads, tree_size) in kinds.items()}
    for engine in engines.values():
        engine.generate(given[:engine.batch_size], min(8, args.max_new_tokens))
    for name, engine in list(engines.items()) * runs:
        if model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(model.device)
        outputs[name].append(engine.generate(given, args.max_new_tokens))
        if model.device.type == "cuda":
            peaks[name] = torch.cuda.max_memory_allocated(model.device) / GB
    rows, plain = {}, next(iter(outputs.values()))
    for name, done in outputs.items():
        median = sorted(done, key=lambda out: out.seconds)[runs // 2]
        rows[name] = dict(
            heads=name, tree_size=median.tree_size, tokens_per_step=median.tokens_per_step,
            tokens_per_second=median.tokens_per_second, peak_gb=peaks.get(name),
            speed_up=statistics.median(slow.seconds / out.seconds for out, slow in zip(done, plain)),
            identical=share_equal(done[0].tokens, plain[0].tokens))
    return rows, plain[0].tokens


def share_equal(texts, others):
    """The share of texts that are the same in both lists."""
    return sum(a == b for a, b in zip(texts, others)) / len(others)


def step_bytes(model, batch_size):
    """What one step must read: all weights, but for an embedding table that is not the LM head as well, and the keys
    and values of PREFIX tokens of each sequence."""
    c = model.config
    weights = sum(p.nbytes for p in model.parameters()) - (0 if c.tied else model.embed.weight.nbytes)
    return weights + batch_size * PREFIX * 2 * c.n_layer * c.n_kv_head * c.head_size * model.dtype.itemsize


# ---------------------------------------------------------------------------------------------------------------------
# Decoding a checkpoint

def measure_batch(model, given, heads, batch_size, floor, args, table):
    """Adds the rows of one batch size: plain decoding, and each kind of heads with its best tree of more than a root.
    Returns the texts of plain decoding."""
    kinds, auto = {"plain": (None, 1)}, {"plain": 1}
    sampling, graph = Sampling(args.temperature), not args.no_graph
    capacity = min(max(map(len, given)) + args.max_new_tokens, model.config.block_size)
    for name, kind in heads.items():
        fit = fit_tree(model, kind, batch_size, capacity, sampling, graph=graph)
        trees = {tokens / seconds: size for size, seconds, tokens in fit.table if size > 1} or {0: DEFAULT_TREE}
        kinds[name], auto[name] = (kind, args.tree_size or trees[max(trees)]), fit.tree_size
    rows, texts = decode_in_turns(model, given, kinds, args, args.runs, batch_size=batch_size, graph=graph,
                                  temperature=args.temperature)
    for name, row in rows.items():
        seconds = step_time(model, kinds[name][0], batch_size, row["tree_size"], sampling, graph=graph)
        table.add(dict(batch_size=batch_size, auto=auto[name], step_ms=1e3 * seconds, floor_ms=1e3 * floor) | row)
    return texts


def measure_trees(model, given, heads, args):
    """Tokens per step of each kind of heads over tree sizes, printed: {heads: {tree size: tokens per step}}."""
    columns = {f"tokens per step, T = {size}": f"{size} {{:.2f}}" for size in args.tree_sizes}
    table = Table({"heads": "heads {}"} | columns)
    for name, kind in heads.items():
        found = {}
        for size in args.tree_sizes:
            engine = prepare(model, given, args.max_new_tokens, kind, tree_size=size, temperature=args.temperature)
            found[str(size)] = engine.generate(given, args.max_new_tokens).tokens_per_step
        table.add(found, heads=name)
    return dict(zip(heads, table))


def transformers_rows(model, given, wanted, args):
    """Rows of transformers' generate, with the same weights, one prompt at a time; or why there are none."""
    if args.temperature:
        return "measured at temperature 0 only"
    try:
        import transformers
    except ImportError:
        return "transformers is not installed (pip install transformers)"
    transformers.logging.set_verbosity_error()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=model.dtype).to(model.device).eval()
    theirs.generation_config.eos_token_id = None  # our runs do not stop either

    @torch.inference_mode()
    def decode(prompt, flags):
        tokens = torch.tensor([prompt], device=model.device)
        out = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, pad_token_id=0,
                              max_new_tokens=args.max_new_tokens, **flags)
        return out[0, len(prompt):].tolist()

    table = Table({"one at a time": "how {}", "tokens per second": "tokens_per_second {:.0f}",
                   "identical texts": "identical {:.0%}"})
    for name, flags in dict(greedy={}, prompt_lookup=dict(prompt_lookup_num_tokens=10)).items():
        decode(given[0], flags)  # warms up
        start = time.perf_counter()
        outputs = [decode(prompt, flags) for prompt in given]
        speed = sum(map(len, outputs)) / (time.perf_counter() - start)
        table.add(dict(how=f"transformers {transformers.__version__}, {name}", tokens_per_second=speed,
                       identical=share_equal(outputs, wanted)))
    return table


def bench(args):
    """`python -m bench decode` on a checkpoint: prints the tables, returns what goes into the JSON line."""
    model, heads, heldout = load(args, args.heads)
    bandwidth = copy_bandwidth(model.device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters; copy bandwidth {bandwidth / GB:.1f} "
          "GB/s (bytes read and written)")
    table = Table({
        "batch size": "batch_size {}", "heads": "heads {}", "tree size": "tree_size {}", "auto takes": "auto {}",
        "tokens per step": "tokens_per_step {:.2f}", "tokens per second": "tokens_per_second {:.0f}",
        "speed-up": "speed_up {:.2f}x", "ms per step": "step_ms {:.2f}", "floor, ms": "floor_ms {:.2f}",
        "peak memory, GB": "peak_gb {:.2f}", "identical texts": "identical {:.0%}"})
    for batch_size in args.batch_sizes:
        given = prompts(heldout, max(args.prompts, batch_size), args.prompt_length)
        texts = measure_batch(model, given, heads, batch_size, step_bytes(model, batch_size) / bandwidth, args, table)
    given, wanted = given[:args.prompts], texts[:args.prompts]
    return dict(bench="decode", **settings(args, model), temperature=args.temperature, runs=args.runs,
                copy_gb_per_s=bandwidth / GB, decoding=table, trees=measure_trees(model, given, heads, args),
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


def bench_random(args):
    """`python -m bench decode --random-weights`: the time of one step for each batch and tree size."""
    device = pick_device(args.device)
    dtype = getattr(torch, args.dtype) if args.dtype else torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model(args.random_weights, device, dtype)
    heads = CloverHeads(preset("clover"), model).to(device=device, dtype=dtype).requires_grad_(False).eval()
    bandwidth, options = copy_bandwidth(device), dict(sampling=Sampling(args.temperature), graph=not args.no_graph)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{SIZES[args.random_weights][1]}, {parameters / 1e9:.2f}B random parameters; "
          f"copy bandwidth {bandwidth / GB:.1f} GB/s; {PREFIX} tokens in the cache of each sequence")
    table = Table({"batch size": "batch_size {}", "tree size": "tree_size {}", "ms per step": "step_ms {:.2f}",
                   "floor, ms": "floor_ms {:.2f}", "share of the floor": "share {:.0%}",
                   **{stage: f"{stage} {{:.2f}}" for stage in STAGES}})
    for batch_size, tree_size in product(args.batch_sizes, args.tree_sizes):
        row = dict(batch_size=batch_size, tree_size=tree_size)
        try:
            step = 1e3 * step_time(model, heads, batch_size, tree_size, **options)
            times = stage_times(model, heads, batch_size, tree_size, **options)
        except (InputError, torch.OutOfMemoryError):
            table.show(row | dict(step_ms="does not fit the memory"))
            continue
        floor, stages = 1e3 * step_bytes(model, batch_size) / bandwidth, {name: 1e3 * t for name, t in times.items()}
        table.add(row | dict(step_ms=step, floor_ms=floor, stages_ms=stages), share=floor / step, **stages)
    return dict(bench="decode-random", model=args.random_weights, device=str(device), dtype=str(dtype),
                copy_gb_per_s=bandwidth / GB, steps=table)
