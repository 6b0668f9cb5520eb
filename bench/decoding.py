"""Decoding: plain, and with all that can draft, by the same loop over batch sizes, against the memory's bandwidth and
against transformers; and the times of single steps at the sizes of real models, with random weights."""

import contextlib
import keyword
import re
import statistics
import sys
from collections import Counter
from copy import deepcopy
from functools import partial
from math import isqrt
from pathlib import Path

import torch

from bench import Record, Table, peers
from clover import CloverHeads, preset
from generate import DEFAULT_TREE, STAGES, Fixed, Sampling, Variant, capture, prepare
from hf.chat import load_chat_template
from hf.tokenizer import tokenizer_hash
from model import GPT, GPTConfig, InputError, check_memory, default_dtype
from tools.cli import load_model, pick_device
from tools.tune import PREFIX, copy_bandwidth, fit, no_room, seconds, stage_times, step_time, timing_engine
from training.data import load_tokens, prompts

GB = 1e9
SIZES = {  # name -> (its fields of a GPTConfig, the model); see `size_config`
    "135m": (dict(vocab_size=49152, n_layer=30, n_head=9, n_kv_head=3, head_size=64, n_embd=576, n_inner=1536,
                  tied=True), "SmolLM2 135M"),
    "360m": (dict(vocab_size=49152, n_layer=32, n_head=15, n_kv_head=5, head_size=64, n_embd=960, n_inner=2560,
                  tied=True), "SmolLM2 360M"),
    "0.5b": (dict(vocab_size=151936, n_layer=24, n_head=14, n_kv_head=2, head_size=64, n_embd=896, n_inner=4864,
                  tied=True, qkv_bias=True, family="qwen2"), "Qwen2.5 0.5B"),
    "1.5b": (dict(vocab_size=151936, n_layer=28, n_head=12, n_kv_head=2, head_size=128, n_embd=1536, n_inner=8960,
                  tied=True, qkv_bias=True, family="qwen2"), "Qwen2.5 1.5B"),
    "7b": (dict(vocab_size=32000, n_layer=32, n_head=32, n_kv_head=32, head_size=128, n_embd=4096, n_inner=11008),
           "Llama 2 7B"),
    "8b": (dict(vocab_size=128256, n_layer=32, n_head=32, n_kv_head=8, head_size=128, n_embd=4096, n_inner=14336),
           "Llama 3 8B"),
    "30b": (dict(vocab_size=32000, n_layer=60, n_head=52, n_kv_head=52, head_size=128, n_embd=6656, n_inner=17920),
            "LLaMA 30B"),
    "70b": (dict(vocab_size=128256, n_layer=80, n_head=64, n_kv_head=8, head_size=128, n_embd=8192, n_inner=28672),
            "Llama 3 70B"),
    "70b-layer": (dict(vocab_size=128256, n_layer=1, n_head=64, n_kv_head=8, head_size=128, n_embd=8192, n_inner=28672),
                  "one layer of Llama 3 70B, and its LM head"),
}
DECODING = {  # the columns of the tables, as in bench.Table
    "batch size": "batch_size {}", "drafted by": "drafted_by {}", "tree size": "tree_size {}",
    "tokens per step": "tokens_per_step {:.2f}", "tokens per second": "tokens_per_second {:.0f}",
    "speed-up": "speed_up {:.2f}x", "ms per step": "step_ms {:.2f}", "floor, ms": "floor_ms {:.2f}",
    "peak memory, GB": "peak_gb {:.2f}", "identical texts": "identical {:.0%}"}
TEXTS = {"heldout": "held-out text", "rename": "held-out text and its first quarter with a name changed"}
NAMES = r"(?<=[^\w\\])[A-Za-z_]\w{2,}(?=\W)"  # not cut off at the text's start or end, and no \uXXXX
NEW_NAME = "renamed_item"  # which --text rename puts in the place of another
FEW_TOKENS = 8192  # of a vocabulary of twice as many or more, the random heads draft among these by default
STEPS = {"batch size": "batch_size {}", "tree size": "tree_size {}", "ms per step": "step_ms {:.2f}",
         "floor, ms": "floor_ms {:.2f}", "share of the floor": "share {:.0%}",
         **{f"{stage}, ms": f"stages_ms.{stage} {{:.2f}}" for stage in STAGES}}
GATHERS = {"gathers from the ranks, ms": "gathers_ms {:.2f}"}  # by themselves
RANKS = "left out, with several ranks"
LAUNCHES = {"batch size": "batch_size {}", "tree size": "tree_size {}", "launches": "launches {}",
            "in kernels, ms": "kernels_ms {:.2f}"}


# ---------------------------------------------------------------------------------------------------------------------
# What heads' measurements share

def load(args, folders, group=None):
    """The model of --model, {folder name: heads}, the held-out tokens of --data and the tokenizer."""
    model, encoding = load_model(args, group)
    heads = {Path(path).name: CloverHeads.from_pretrained(path, model, tokenizer_hash(encoding)) for path in folders}
    return model, heads, load_tokens(args.data, encoding, "heldout", load_chat_template(args.model)), encoding


def settings(args, model):
    """What every result of decoding says of its run."""
    names = ("prompts", "prompt_length", "max_new_tokens")
    return dict(model=Path(args.model).name, device=str(model.device), dtype=str(model.dtype),
                **{name: getattr(args, name) for name in names})


def decode_in_turns(model, given, ways, args, runs=1, **options):
    """Decodes the prompts in each way, `runs` times in turns. ways: {name: options of `prepare`, a tree size or choice
    among them; or another program, with a `generate`}; the first is plain decoding.

    Returns {name: row}, with medians, and with the share of texts that are plain decoding's as `identical`; and {name:
    what each run gave}."""
    outputs, peaks = {name: [] for name in ways}, {}
    for name, way in list(ways.items()) * runs:
        out, peaks[name] = (decode_once(model, given, args.max_new_tokens, **options, **way) if isinstance(way, dict)
                            else (way.generate(given, args.max_new_tokens), None))
        outputs[name].append(out)
    rows, plain = {}, next(iter(outputs.values()))
    for name, done in outputs.items():
        median = median_run(done)
        rows[name] = dict(
            tree_size=median.tree_size, tokens_per_step=median.tokens_per_step,
            tokens_per_second=median.tokens_per_second, peak_gb=peaks[name], speed_up=paired_ratio(done, plain),
            identical=share_equal(all_texts(done), all_texts(plain)))
    return rows, outputs


def decode_once(model, given, max_new_tokens, choice=None, **options):
    """(Output, GB of a GPU's memory or None), on an engine of its own, so that each has the memory to itself, after a
    few tokens that compile and load everything. The choice starts with what it expected at first: a copy learns."""
    def ready_engine():
        engine = prepare(model, given, max_new_tokens, choice=deepcopy(choice), **options)
        afresh = deepcopy(engine.choice)
        engine.generate(given[:engine.batch_size], min(8, max_new_tokens))
        engine.choice, engine.drafting = afresh, engine.variants[0]
        return engine
    engine, taken = reserved_gb(ready_engine, model.device)
    weights = sum(parameter_bytes(module) for module in (model, engine.heads) if module) / GB
    return engine.generate(given, max_new_tokens), None if taken is None else weights + taken


def median_run(done):
    return sorted(done, key=lambda out: out.seconds)[len(done) // 2]


def paired_ratio(done, others):
    """Tokens per second over those of others: the median over the rounds."""
    return statistics.median(a.tokens_per_second / b.tokens_per_second for a, b in zip(done, others))


def all_texts(done):
    """The texts of several runs."""
    return [tokens for out in done for tokens in out.tokens]


def reserved_gb(make, device):
    """(what make() returns, GB that torch took from the GPU for it at most; None on a CPU). Of what is reserved, not of
    what is allocated: the memory of a CUDA graph counts as free between two replays, and it is not."""
    if device.type != "cuda":
        return make(), None
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    return make(), (torch.cuda.max_memory_reserved(device) - before) / GB


def share_equal(texts, others):
    """The share of texts that are the same in both lists."""
    return sum(a == b for a, b in zip(texts, others)) / len(others)


def parameter_bytes(module):
    return sum(p.nbytes for p in module.parameters())


def step_bytes(model, batch_size):
    """What one step must read, on each rank: all weights that it holds, but for an embedding table that is not the LM
    head as well, and the keys and values of PREFIX tokens of each sequence."""
    c = model.share
    weights = parameter_bytes(model) - (0 if model.head.weight is model.embed.weight else model.embed.weight.nbytes)
    return weights + batch_size * PREFIX * 2 * c.n_layer * c.n_kv_head * c.head_size * model.dtype.itemsize


# ---------------------------------------------------------------------------------------------------------------------
# Decoding a checkpoint

def renaming(piece, encoding):
    """A prompt as an editor has it, from a piece of text (token ids): the piece, and its first quarter again with a
    name changed. Of that quarter's names it is the one that stands in the piece most often."""
    text, start = encoding.decode(piece), encoding.decode(piece[:max(len(piece) // 4, 1)])
    names = lambda text: [name for name in re.findall(NAMES, text) if not keyword.iskeyword(name)]
    counts = Counter(names(text))
    name = max(names(start), key=lambda name: counts[name], default=None)
    start = re.sub(rf"\b{name}\b", NEW_NAME, start) if name else start
    return [*piece, *encoding.encode_ordinary("\n\n" + start)]


def text_prompts(heldout, encoding, n, args):
    """n prompts as --text says, of up to --prompt-length tokens: in a batch no two neighbours have the same length."""
    shorter = [i % 8 * args.prompt_length // 32 for i in range(n)]
    pieces = prompts(heldout, n, args.prompt_length)
    pieces = [piece[min(less, len(piece) - 1):] for less, piece in zip(shorter, pieces)]
    return [renaming(piece, encoding) for piece in pieces] if args.text == "rename" else pieces


def ways_to_draft(heads, fitted, tree_size):
    """({what drafts: options of `prepare`}, {what drafts: seconds per step, where known}).

    heads: {name: heads}, the last of which, or None, draft beside lookup: each variant of their Choice is a way, and
    the Choice itself. The others draft alone, with a tree of this size, or else with their best of more than one node.
    fitted(heads, lookup) -> a Choice.
    """
    *others, (_, last) = heads.items()
    choice = fitted(last, True)
    plain, *variants = choice.variants
    ways, times = {"plain": dict(choice=Fixed(plain))}, {"plain": choice.seconds[plain]}
    for name, kind in others:
        found = fitted(kind, False)
        best = max((v for v in found.variants if v.heads), key=found.rate, default=Variant(DEFAULT_TREE - 1))
        variant = Variant(tree_size - 1) if tree_size else best
        way = f"{name} {variant.heads}"  # as in str(variant)
        ways[way], times[way] = dict(heads=kind, choice=Fixed(variant)), found.seconds.get(variant)
    for variant in variants:
        ways[str(variant)], times[str(variant)] = dict(heads=last, choice=Fixed(variant)), choice.seconds[variant]
    return ways | {"auto": dict(heads=last, choice=choice)}, times


def measure_batch(model, given, heads, batch_size, floor, args, record, table):
    """Adds the rows of one batch size, for all `ways_to_draft` and for transformers; floor: seconds per step."""
    sampling, graph = Sampling(args.temperature), not args.no_graph
    capacity = min(max(map(len, given)) + args.max_new_tokens, model.config.block_size)
    fitted = lambda kind, lookup: fit(model, kind, lookup, batch_size, capacity, sampling, graph=graph)
    ways, times = ways_to_draft(heads, fitted, args.tree_size)
    alone = model.group.size == 1
    others, words = peers.generating(model, args.model, args.temperature, batch_size, given) if alone else ({}, RANKS)
    rows, outputs = decode_in_turns(model, given, ways | others, args, args.runs, batch_size=batch_size, graph=graph,
                                    temperature=args.temperature)
    for name, row in rows.items():
        row |= dict(step_ms=1e3 * times[name]) if times.get(name) else {}
    steps = median_run(outputs["auto"]).variants
    rows["auto"]["variants"] = {str(variant): count for variant, (count, _) in steps.items()}
    best = max(map(str, ways["auto"]["choice"].variants), key=lambda name: rows[name]["tokens_per_second"])
    record.setdefault("auto_over_best", {})[str(batch_size)] = paired_ratio(outputs["auto"], outputs[best])
    if batch_size == 1 or "transformers" not in record:
        record["transformers"] = words
    table.add(*(dict(batch_size=batch_size, drafted_by=name, floor_ms=1e3 * floor) | row for name, row in rows.items()))


def tree_columns(sizes):
    return {"drafted by": "drafted_by {}"} | {f"T = {size}": f"{size} {{:.2f}}" for size in sizes}


def measure_trees(model, given, heads, args):
    """Tokens per step of each kind of heads, of lookup, and of lookup with the last heads, over tree sizes, printed:
    {what drafts: {tree size: tokens per step}}."""
    print("\ntokens per step over tree sizes")
    table, last = Table(tree_columns(args.tree_sizes)), list(heads)[-1]
    drafters = {name: (kind, False) for name, kind in heads.items() if kind} | {"lookup": (None, True)}
    drafters |= {f"{last} + lookup": (heads[last], True)} if heads[last] else {}
    for name, (kind, lookup) in drafters.items():
        found = {}
        for size in args.tree_sizes:
            if not (kind and lookup and size == 2):  # no room for both
                engine = prepare(model, given, args.max_new_tokens, kind, lookup=lookup, tree_size=size,
                                 temperature=args.temperature)
                found[str(size)] = engine.generate(given, args.max_new_tokens).tokens_per_step
        table.add(found, drafted_by=name)
    return dict(zip(drafters, table))


def open_record(args, group, **settings):
    """The Record of `bench decode`: of the ranks of a group the first keeps it, and all go on from it."""
    ranks = dict(ranks=group.size) if group.size > 1 else {}
    record = Record(None if group.rank else args.out, temperature=args.temperature, runs=args.runs, **ranks, **settings)
    record.update(group.first(dict(record)))
    return record


def measure_bandwidth(record, device, group):
    """Bytes per second of a copy, by `copy_bandwidth`; of ranks that copy at the same time, the first's."""
    return GB * record.once("copy_gb_per_s", lambda: group.first(copy_bandwidth(device) / GB))


def bench(args, group):
    """`python -m bench decode` on a checkpoint: prints the tables, returns the Record."""
    names = [Path(path).name for path in args.heads]
    model, heads, heldout, encoding = load(args, [path for path in args.heads if path != "none"], group)
    record = open_record(args, group, bench="decode", **settings(args, model), heads=names, text=args.text)
    bandwidth = measure_bandwidth(record, model.device, group)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters; copy bandwidth {bandwidth / GB:.1f} "
          "GB/s (bytes read and written)")
    table = record.table("decoding", DECODING)
    for batch_size in args.batch_sizes:
        if not table.has(batch_size=batch_size):
            given = text_prompts(heldout, encoding, max(args.prompts, batch_size), args)
            measure_batch(model, given, {name: heads.get(name) for name in names}, batch_size,
                          step_bytes(model, batch_size) / bandwidth, args, record, table)
    ratios = (f"{ratio:.2f}x at batch size {batch_size}" for batch_size, ratio in record["auto_over_best"].items())
    print(f"\nauto over the best single variant: {', '.join(ratios)}\ntransformers: {record['transformers']}")
    given = text_prompts(heldout, encoding, args.prompts, args)
    record.once("trees", lambda: measure_trees(model, given, {name: heads.get(name) for name in names}, args))
    return record.done()


# ---------------------------------------------------------------------------------------------------------------------
# Steps at real sizes

def size_config(name):
    """The GPTConfig of a name in SIZES."""
    return GPTConfig(**dict(tied=False) | SIZES[name][0], block_size=4096, rope_theta=500000.0)


def random_model(name, device, dtype, group=None):
    """A GPT of a real model's sizes with random weights. Raises InputError where it does not fit the memory."""
    with torch.device("meta"):
        model = GPT(size_config(name), group).to(dtype)
    size = parameter_bytes(model)
    check_memory(f"random weights of {name} in {str(dtype).removeprefix('torch.')} take", size, device,
                 "take another size or --dtype bfloat16", group)
    model = model.to_empty(device=device)
    model.tie_and_place()
    for parameter_name, p in model.named_parameters():
        p.data.fill_(1) if parameter_name.endswith("norm.weight") else p.data.normal_(0, 0.02)
    return model.requires_grad_(False).eval()


def random_heads(model, vocabulary):
    """Untrained Clover heads, which draft among the first ids of the vocabulary; 0: among all."""
    with model.device:
        heads = CloverHeads(preset("clover"), model).to(model.dtype)
    heads.set_vocabulary(torch.arange(vocabulary))
    return heads.requires_grad_(False).eval()


def draft_vocabulary(args):
    """How many ids the random heads draft among, 0 for all. Raises InputError for fewer than a tree has beams, and for
    more than there are."""
    V, beams = SIZES[args.random_weights][0]["vocab_size"], isqrt(max(args.tree_sizes) - 1) + 1
    default = FEW_TOKENS if V >= 2 * FEW_TOKENS else 0
    n = default if args.draft_vocabulary is None else args.draft_vocabulary
    if n and not beams <= n <= V:
        raise InputError(f"--draft-vocabulary must be 0, for all, or from {beams}, the beams of the largest tree, "
                         f"to {V}, not {n}")
    return n


def peak_memory(body):
    """GB of memory that this process has at most while body() runs, libraries and all. Where the system does not forget
    an earlier peak, this may be that one."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak starts anew
    body()
    try:
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024 / GB
    except (OSError, IndexError):  # not Linux
        import resource  # which Windows has not
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / GB


def in_turns(bodies, runs, device, group=None):
    """{name: the times of its body() in seconds, one of each round}. In a round all take turns, so that what else the
    machine does meets them alike. group: see `tools.tune.seconds`."""
    times = {name: [] for name in bodies}
    for _ in range(runs):
        for name, body in bodies.items():
            times[name].append(seconds(body, device, group))
    return times


def step_times(model, heads, batch_size, tree_size, sampling, graph, runs, others):
    """{"step": seconds of our step, one of each round; of ranks also "gathers"; and the name of each other program:
    those of its step}."""
    engine = timing_engine(model, heads, batch_size, Variant(tree_size - 1), sampling, graph=graph)
    bodies = dict(step=engine.body())
    if model.group.size > 1:
        bodies["gathers"] = gathers(engine, graph)
    bodies |= {name: program.body(tree_size) for name, program in others.items()}
    return in_turns({name: body for name, body in bodies.items() if body}, runs, model.device, model.group)


def gathers(engine, graph):
    """A function that does nothing of an engine's step but to gather from all ranks what it gathers."""
    group, device, gathered = engine.model.group, engine.model.device, []
    gather = group.gather
    group.gather = lambda x: gathered.append(x.clone()) or gather(x)
    try:
        engine.step(engine.variants[0])
    finally:
        del group.gather
    body = lambda: [group.gather(x) for x in gathered]
    if graph and device.type == "cuda":
        replay = capture(body, device)[1]
        return lambda: (replay(), gathered)[0]  # a graph keeps no tensor
    return body


@torch.inference_mode()
def measure_step(model, heads, batch_size, tree_size, floor, sampling, graph, runs, others):
    """A row of one step: its time and that of its stages, and the times of other programs' steps. floor: in seconds.
    others: {name: a running one of peers.PROGRAMS}. Times and ratios are medians of `runs` rounds."""
    times = step_times(model, heads, batch_size, tree_size, sampling, graph, runs, others)
    row = {f"{name}_ms": 1e3 * statistics.median(found) for name, found in times.items()}
    ratio = lambda a, b: statistics.median(x / y for x, y in zip(times[a], times[b]))
    row |= dict(llama_cpp_ratio=ratio("step", "llama_cpp")) if "llama_cpp" in times else {}
    row |= dict(transformers_ratio=ratio("transformers", "step")) if "transformers" in times else {}
    stages = stage_times(model, heads, batch_size, Variant(tree_size - 1), sampling, graph=graph)
    return row | dict(floor_ms=1e3 * floor, share=1e3 * floor / row["step_ms"],
                      stages_ms={name: 1e3 * time for name, time in stages.items()})


@torch.inference_mode()
def profile_steps(model, heads, table, sampling, graph):
    """Adds to the rows what the GPU did in their steps. Last, since a profiler may slow down what follows it."""
    shown = Table(LAUNCHES)
    for row in table:
        if "kernels" not in row:
            variant = Variant(row["tree_size"] - 1)
            engine = timing_engine(model, heads, row["batch_size"], variant, sampling, graph=graph)
            kernels = kernel_times(engine.body(), model.device)
            row |= dict(launches=sum(count for count, _ in kernels.values()), kernels=kernels,
                        kernels_ms=sum(ms for _, ms in kernels.values()))
            table.save()
        shown.show(row)


def kernel_times(body, device):
    """{kernel: [launches, ms]} of one body() on a GPU, as torch's profiler sees it, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        body()
        torch.cuda.synchronize(device)
    found = [(event.key, [event.count, event.self_device_time_total / 1e3]) for event in profile.key_averages()
             if event.device_type == torch.autograd.DeviceType.CUDA]
    return dict(sorted(found, key=lambda pair: -pair[1][1]))


def measure_steps(model, heads, batch_size, bandwidth, args, record, table):
    """Adds the rows of one batch size that are missing. Other programs run beside a batch of one."""
    missing = [size for size in args.tree_sizes if not table.has(batch_size=batch_size, tree_size=size)]
    floor, sampling = step_bytes(model, batch_size) / bandwidth, Sampling(args.temperature)
    compared = missing and batch_size == 1 and model.group.size == 1
    rivals = peers.running(model) if compared else contextlib.nullcontext(({}, {}))
    with rivals as (others, words):
        record.update(dict(peers=words) if words else {})
        for tree_size in missing:
            label = dict(batch_size=batch_size, tree_size=tree_size)
            try:
                table.add(label | measure_step(model, heads, batch_size, tree_size, floor, sampling, not args.no_graph,
                                               args.runs, others))
            except no_room(model.group):
                table.show(label | dict(step_ms="does not fit the memory"))


def bench_random(args, group):
    """`python -m bench decode --random-weights`: the time of one step for each batch and tree size."""
    device, vocabulary = pick_device(args.device), draft_vocabulary(args)
    dtype = getattr(torch, args.dtype) if args.dtype else default_dtype(device, torch.bfloat16)
    record = open_record(args, group, bench="decode-random", model=args.random_weights, device=str(device),
                         dtype=str(dtype), prefix=PREFIX, draft_vocabulary=vocabulary)
    model = random_model(args.random_weights, device, dtype, group)
    heads = random_heads(model, vocabulary)
    record.update(weights_gb=parameter_bytes(model) / GB, heads_gb=parameter_bytes(heads) / GB)
    if device.type == "cpu":  # before anything else takes memory
        step = partial(step_time, model, heads, 1, Variant(max(args.tree_sizes) - 1), Sampling(args.temperature))
        record.once("peak_rss_gb", partial(peak_memory, step))
    bandwidth = measure_bandwidth(record, device, group)
    parameters = sum(p.numel() for p in model.parameters())
    held = "" if group.size == 1 else f" on each of {group.size} ranks"
    print(f"{SIZES[args.random_weights][1]}, {parameters / 1e9:.2f}B random parameters{held}; "
          f"copy bandwidth {bandwidth / GB:.1f} GB/s; {PREFIX} tokens in the cache of each sequence")
    columns = GATHERS if group.size > 1 else peers.COLUMNS if device.type == "cpu" else {}
    table = record.table("steps", STEPS | columns)
    for batch_size in args.batch_sizes:
        measure_steps(model, heads, batch_size, bandwidth, args, record, table)
    if device.type == "cuda":
        profile_steps(model, heads, table, Sampling(args.temperature), not args.no_graph)
    for name, words in record.get("peers", {}).items():
        print(f"{peers.PROGRAMS[name].title}: {words}")
    return record.done()
