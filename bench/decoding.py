"""Decoding: plain, and with all that can draft, by the same loop over batch sizes, against the
memory's bandwidth and against transformers."""

import keyword
import re
import statistics
from collections import Counter
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch

from backends.quantized import packed_bytes
from backends.tensor_parallel import Group, group_of
from bench import Record, Table, peers
from generate import DEFAULT_TREE, DraftPlan, FixedPolicy, Sampling, prepare
from hf.chat import load_chat_template
from tools.cli import load_heads, load_model
from tools.timing import PREFIX, copy_bandwidth, step_time, timing_decoder
from tools.tune import fit
from training.data import load_tokens, prompts

GB = 1e9
DECODING = {  # the columns of the tables, as in bench.Table
    "batch size": "batch_size {}", "drafted by": "drafted_by {}", "tree size": "tree_size {}",
    "tokens per step": "tokens_per_step {:.2f}", "tokens per second": "tokens_per_second {:.0f}",
    "speed-up": "speed_up {:.2f}x", "ms per step": "step_ms {:.2f}", "floor, ms": "floor_ms {:.2f}",
    "peak memory, GB": "peak_gb {:.2f}", "identical texts": "identical {:.0%}"}
FIELDS = "tree_size", "tokens_per_step", "tokens_per_second", "peak_gb"  # of an Output
TEXTS = {"heldout": "held-out text",
         "rename": "held-out text and its first quarter with a name changed"}
NAMES = r"(?<=[^\w\\])[A-Za-z_]\w{2,}(?=\W)"  # not cut off at the text's start or end, no \uXXXX
NEW_NAME = "renamed_item"  # which --text rename puts in the place of another


# -------------------------------------------------------------------------------------------------
# What `bench heads` measures with, too

def load(args, folders, group=None):
    """The model of --model, {folder name: heads}, the held-out tokens of --data, the tokenizer."""
    model, encoding = load_model(args, group)
    of_original = getattr(args, "heads_of_original", False)
    heads = {Path(path).name: load_heads(path, model, encoding, of_original) for path in folders}
    heldout = load_tokens(args.data, encoding, "heldout", load_chat_template(args.model))
    return model, heads, heldout, encoding


def settings(args, model):
    """What every result of decoding says of its run."""
    return dict(model=Path(args.model).name, device=str(model.device), dtype=str(model.dtype),
                prompts=args.prompts, prompt_length=args.prompt_length,
                max_new_tokens=args.max_new_tokens)


def decode_in_turns(model, given, ways, args, runs=1, **options):
    """Decodes the prompts in each way, `runs` times in turns. ways: {name: options of `prepare`, or
    what calls another program}, plain decoding first -> ({name: row of medians and of the
    share of texts that are plain decoding's, `identical`}, {name: what each run gave})."""
    outputs = {name: [] for name in ways}
    for name, way in list(ways.items()) * runs:
        if isinstance(way, dict):
            out = decode_once(model, given, args.max_new_tokens, **options, **way)
        else:
            out = way(given, args.max_new_tokens)
        outputs[name].append(out)
    plain = next(iter(outputs.values()))
    rows = {}
    for name, done in outputs.items():
        same = [a == b for ours, its in zip(done, plain) for a, b in zip(ours.tokens, its.tokens)]
        rows[name] = {field: getattr(median_run(done), field, None) for field in FIELDS} | dict(
            speed_up=paired_ratio(done, plain), identical=statistics.fmean(same))
    return rows, outputs


def decode_once(model, given, max_new_tokens, policy=None, **options):
    """The Output of an engine of its own, after a few tokens that compile and load everything, with
    `peak_gb` of a GPU's memory. policy: default what `prepare` fits, with the times that it
    measures; a copy of it learns, from the prompts alone."""
    def ready_engine():
        engine = prepare(model, given, max_new_tokens, policy=policy, **options)
        afresh = deepcopy(engine.policy)
        engine.generate(given[:engine.decoder.batch_size], min(8, max_new_tokens))
        engine.policy = afresh
        return engine
    engine, taken = reserved_gb(ready_engine, model.device)
    out = engine.generate(given, max_new_tokens)
    weights = sum(parameter_bytes(x) for x in (model, engine.decoder.heads) if x) / GB
    out.peak_gb = None if taken is None else weights + taken
    return out


def median_run(done):
    return sorted(done, key=lambda out: out.seconds)[len(done) // 2]


def paired_ratio(done, others):
    """Tokens per second over those of others: the median over the rounds."""
    return statistics.median(a.tokens_per_second / b.tokens_per_second
                             for a, b in zip(done, others))


def reserved_gb(make, device):
    """(what make() returns, GB that torch took from the GPU for it at most; None on a CPU):
    reserved, not allocated, as a CUDA graph's memory counts as free between two replays."""
    if device.type != "cuda":
        return make(), None
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    return make(), (torch.cuda.max_memory_reserved(device) - before) / GB


def parameter_bytes(module):
    return sum(p.nbytes for p in module.parameters()) + packed_bytes(module)


def step_bytes(model, batch_size):
    """What one step must read, on each rank: the weights, but for an embedding table that is not
    the LM head as well, and the keys and values of PREFIX tokens of each sequence, or of those in a
    layer's window."""
    c = model.blocks[0].attn.config
    table = 0 if model.config.tied and group_of(model).size == 1 else model.embed.weight.nbytes
    windows = (block.attn.window for block in model.blocks)
    rows = sum(min(PREFIX, window - 1) if window else PREFIX for window in windows)
    row = 2 * c.n_kv_head * c.head_size * model.dtype.itemsize
    return parameter_bytes(model) - table + batch_size * rows * row


def open_record(args, group, **settings):
    """The Record of `bench decode`; the first rank keeps it, and all go on from it."""
    record = Record(None if group.rank else args.out, temperature=args.temperature, runs=args.runs,
                    ranks=group.size, **settings)
    record.update(group.broadcast(dict(record)))
    return record


def measure_bandwidth(record, device, group=None):
    """Bytes per second of a copy, printed; of ranks that copy at once, the first's."""
    group = group or Group()
    rate = record.once("copy_gb_per_s", lambda: group.broadcast(copy_bandwidth(device) / GB))
    print(f"copy bandwidth {rate:.1f} GB/s (bytes read and written)")
    return GB * rate


# -------------------------------------------------------------------------------------------------
# `python -m bench decode`

def renaming(piece, encoding):
    """A piece of text (token ids) and, as an editor repeats it, its first quarter again with a name
    changed: of that quarter's names the one that is most frequent in the piece."""
    names = lambda text: [name for name in re.findall(NAMES, text) if not keyword.iskeyword(name)]
    start = encoding.decode(piece[:max(len(piece) // 4, 1)])
    counts = Counter(names(encoding.decode(piece)))
    name = max(names(start), key=lambda name: counts[name], default=None)
    start = re.sub(rf"\b{name}\b", NEW_NAME, start) if name else start
    return [*piece, *encoding.encode("\n\n" + start)]


def text_prompts(heldout, encoding, n, args):
    """n prompts as --text says, of up to --prompt-length tokens, neighbours of other lengths."""
    pieces = [piece[min(i % 8 * args.prompt_length // 32, len(piece) - 1):]
              for i, piece in enumerate(prompts(heldout, n, args.prompt_length))]
    return [renaming(piece, encoding) for piece in pieces] if args.text == "rename" else pieces


def ways_to_draft(heads, fitted, timed):
    """({what drafts: options of `prepare`}, {what drafts: seconds per step}).

    heads: {name: heads}, the last of which, or None, draft beside lookup: each plan of their policy
    is a way, and the policy itself. The others draft alone, with their best tree of more than one
    node. fitted(heads, lookup) -> an AdaptivePolicy; timed(heads, plan) -> seconds."""
    *others, (_, last) = heads.items()
    policy = fitted(last, True)
    plain, *plans = policy.plans
    drafters = [("plain", None, plain)]
    for name, kind in others:
        found = fitted(kind, False)
        drafting = (plan for plan in found.plans if plan.head_nodes)
        plan = max(drafting, key=found.rates.get, default=DraftPlan(DEFAULT_TREE - 1))
        drafters.append((f"{name} {plan.head_nodes}", kind, plan))  # as in str(plan)
    drafters += [(str(plan), last, plan) for plan in plans]
    ways = {name: dict(heads=kind, policy=FixedPolicy(plan)) for name, kind, plan in drafters}
    times = {name: timed(kind if plan.head_nodes else None, plan) for name, kind, plan in drafters}
    return ways | {"auto": dict(heads=last, lookup=True)}, times


def measure_batch(model, given, heads, batch_size, floor, args, record, table):
    """Adds the rows of one batch size, of all `ways_to_draft` and transformers. floor: seconds."""
    capacity = min(max(map(len, given)) + args.max_new_tokens, model.config.block_size)
    options = dict(batch_size=batch_size, sampling=Sampling(args.temperature))
    fitted = partial(fit, model, **options)
    timed = lambda heads, plan: step_time(timing_decoder(model, heads, plan, capacity, **options))
    ways, times = ways_to_draft(heads, fitted, timed)
    others, words = peers.generating(model, args.model, args.temperature, batch_size, given)
    rows, outputs = decode_in_turns(model, given, ways | others, args, args.runs,
                                    batch_size=batch_size, temperature=args.temperature)
    for name, row in rows.items():
        row |= dict(step_ms=1e3 * times[name]) if times.get(name) else {}
    steps = median_run(outputs["auto"]).plans
    rows["auto"]["plans"] = {str(plan): count for plan, (count, _) in steps.items()}
    ours = None, ways["auto"]["heads"]
    *singles, _ = (name for name, way in ways.items() if way["heads"] in ours)
    best = max(singles, key=lambda name: rows[name]["tokens_per_second"])
    ratio = paired_ratio(outputs["auto"], outputs[best])
    record.setdefault("auto_over_best", {})[str(batch_size)] = ratio
    if batch_size == 1 or "transformers" not in record:
        record["transformers"] = words
    table.add(*(dict(batch_size=batch_size, drafted_by=name, floor_ms=1e3 * floor) | row
                for name, row in rows.items()))


def tree_columns(sizes):
    return {"drafted by": "drafted_by {}"} | {f"T = {size}": f"{size} {{:.2f}}" for size in sizes}


def measure_trees(model, given, heads, args):
    """Tokens per step of each kind of heads, of lookup, and of lookup with the last heads, printed:
    {what drafts: {tree size: tokens per step}}."""
    print("\ntokens per step over tree sizes")
    table = Table(tree_columns(args.tree_sizes))
    last = list(heads)[-1]
    drafters = {name: (kind, False) for name, kind in heads.items() if kind}
    drafters |= {"lookup": (None, True)}
    drafters |= {f"{last} + lookup": (heads[last], True)} if heads[last] else {}
    for name, (kind, lookup) in drafters.items():
        found = {}
        for size in args.tree_sizes:
            if not (kind and lookup and size == 2):  # no room for both
                engine = prepare(model, given, args.max_new_tokens, kind, lookup=lookup,
                                 tree_size=size, temperature=args.temperature)
                found[str(size)] = engine.generate(given, args.max_new_tokens).tokens_per_step
        table.add(found, drafted_by=name)
    return dict(zip(drafters, table))


def bench(args, group):
    """`python -m bench decode` on a checkpoint: prints the tables, returns the Record."""
    names = [Path(path).name for path in args.heads]
    folders = [path for path in args.heads if path != "none"]
    model, found, heldout, encoding = load(args, folders, group)
    heads = {name: found.get(name) for name in names}
    record = open_record(args, group, bench="decode", **settings(args, model), heads=names,
                         text=args.text)
    bandwidth = measure_bandwidth(record, model.device, group)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters")
    table = record.table("decoding", DECODING)
    for batch_size in args.batch_sizes:
        if not table.has(batch_size=batch_size):
            given = text_prompts(heldout, encoding, max(args.prompts, batch_size), args)
            floor = step_bytes(model, batch_size) / bandwidth
            measure_batch(model, given, heads, batch_size, floor, args, record, table)
    ratios = [f"{ratio:.2f}x at batch size {size}"
              for size, ratio in record["auto_over_best"].items()]
    print(f"\nauto over the best single plan: {', '.join(ratios)}\n"
          f"transformers: {record['transformers']}")
    given = text_prompts(heldout, encoding, args.prompts, args)
    record.once("trees", lambda: measure_trees(model, given, heads, args))
    return record.done()
