"""`python -m bench decode`: plain decoding and all that can draft, over batch sizes.
`python -m bench heads`: draft heads against each other. What is compared takes turns, so that other
work on the machine meets all alike; with --chats it does so once for each kind of prompts."""

import json
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median

from bench import Table
from bench.llama_cpp import NAME, llama_cpp_ways
from clover import CloverHeads
from generate import FixedPolicy, Output, prepare
from hf.chat import stop_tokens
from model import InputError
from tools.load import load_model, read_file
from tools.policy import AdaptivePolicy, draft_plans
from training.data import load_tokens, prompts


def load(args, folders):
    """The model of --model, {folder name: heads}, {kind: prompts}, and the tokens that end a text:
    none do where prompts are held-out texts, which have no kind. Sets --prompts to their number."""
    model, encoding = load_model(args)
    heads = {Path(path).name: CloverHeads.from_pretrained(path, model, encoding.hash)
             for path in folders}
    if not args.chats:
        args.prompts = max(args.prompts or 16, *args.batch_sizes)
        heldout = load_tokens(args.data, encoding, "heldout", encoding.template)
        return model, heads, {None: prompts(heldout, args.prompts, args.prompt_length)}, ()
    groups = chat_prompts(Path(args.chats), encoding, args.prompts)
    fewest = min(map(len, groups.values()))
    if max(args.batch_sizes) > fewest:
        raise InputError(f"{args.chats}: has {fewest} prompts of a kind, fewer than decode "
                         f"together; give --batch-sizes up to {fewest}")
    args.prompts = sum(map(len, groups.values()))
    return model, heads, groups, stop_tokens(args.model, encoding)


def chat_prompts(file, encoding, n):
    """{kind: token ids of each prompt} of a .jsonl file's first n chats; None: of all."""
    groups = {}
    lines = filter(str.strip, file.read_text(encoding="utf-8").splitlines())
    for messages, line in zip(read_file(file, chat=True)[:n], lines):
        kind = str(json.loads(line).get("kind", "chat"))
        groups.setdefault(kind, []).append(encoding.chat(messages))
    return groups


def decode_in_turns(ways, groups, args):
    """Decodes the prompts in each way, args.runs times in turns: yields (first columns, {name:
    Outputs}) for each kind of prompts, and at last for all, whose rounds are the sums of theirs.
    ways: {name: a function of prompts and new tokens}, plain decoding first."""
    results = []
    for kind, texts in groups.items():
        outputs = {name: [] for name in ways}
        for name, decode in args.runs * list(ways.items()):
            outputs[name].append(decode(texts, args.max_new_tokens))
        results.append(outputs)
        yield dict(kind=kind) if kind else {}, outputs
    if len(results) > 1:
        yield dict(kind="all"), {name: list(map(total, *(outputs[name] for outputs in results)))
                                 for name in ways}


def total(*outputs):
    """One Output of several."""
    return Output(sequences=sum((output.sequences for output in outputs), []),
                  steps=sum(output.steps for output in outputs),
                  seconds=sum(output.seconds for output in outputs),
                  prefill_seconds=sum(output.prefill_seconds for output in outputs),
                  tree_size=outputs[0].tree_size)


def medians(outputs):
    """{name: row} of what decode_in_turns returns."""
    plain = next(iter(outputs.values()))
    rows = {}
    for name, done in outputs.items():
        out = sorted(done, key=lambda out: out.seconds)[len(done) // 2]
        same = [a == b for ours, its in zip(done, plain) for a, b in zip(ours.tokens, its.tokens)]
        later = out.emitted - len(out.sequences)  # tokens after each one's first
        rate = None
        if 0 < out.prefill_seconds < out.seconds:
            rate = later / (out.seconds - out.prefill_seconds)
        rows[name] = dict(tree_size=out.tree_size,
                          tokens_per_step=out.tokens_per_step,
                          tokens_per_second=out.tokens_per_second,
                          decoding_per_second=rate,
                          speed_up=paired_ratio(done, plain),
                          identical=fmean(same) if out.tree_size else None)  # else not ours
    return rows


def decode_once(model, texts, new, make_policy=lambda: None, stop=(), **options):
    """The Output of an engine of its own, warmed up, with a fresh policy; its prefill_seconds are
    those of the same prompts with one new token each. options: of `prepare`."""
    engine = prepare(model, texts, new, policy=make_policy(), **options)
    forget = lambda *_: engine.kept.update(dict.fromkeys(engine.kept, ()))  # reads whole prompts
    engine.generate(texts[:engine.decoder.batch_size], 1)
    engine.clear()
    engine.decoder.warm_up()
    first = engine.generate(texts, 1, on_step=forget)
    engine.policy = make_policy() or engine.policy
    output = engine.generate(texts, new, stop, forget)
    output.prefill_seconds = first.seconds
    return output


def paired_ratio(done, others):
    """Tokens per second over those of others: the median over the rounds."""
    return median(a.tokens_per_second / b.tokens_per_second for a, b in zip(done, others))


def bench_decode(args):
    """`bench decode`: prints the table -> the result."""
    model, heads, groups, stop = load(args, [] if args.heads == "none" else [args.heads])
    own = next(iter(heads.values()), None)
    table = Table()
    for batch_size in args.batch_sizes:
        ways = plan_ways(model, own, batch_size, args.temperature, stop)
        if args.llama_cpp:
            capacity = max(len(x) for texts in groups.values() for x in texts) + args.max_new_tokens
            ways |= llama_cpp_ways(args.model, model.device, capacity, args.temperature, stop)
        for label, outputs in decode_in_turns(ways, groups, args):
            for name, row in decode_rows(outputs).items():
                table.add(label | dict(batch_size=batch_size, drafted_by=name) | row)
    return dict(device=str(model.device), dtype=str(model.dtype), decoding=table)


def plan_ways(model, heads, batch_size, temperature, stop):
    """{name: a function of prompts and new tokens} for each plan of auto, plain decoding first, for
    those of the heads if auto leaves them out, and for auto."""
    auto = partial(AdaptivePolicy, model, heads, True, batch_size, temperature)
    plans = *auto().plans, *draft_plans(model, heads, True, batch_size, temperature, worth=0)
    policies = {str(plan): partial(FixedPolicy, plan) for plan in plans} | dict(auto=auto)
    return {name: partial(decode_once, model, heads=heads, make_policy=make_policy, stop=stop,
                          batch_size=batch_size, temperature=temperature)
            for name, make_policy in policies.items()}


def decode_rows(outputs):
    """The rows of `medians`; auto's is also compared to the best of the plans, each to llama.cpp
    where that decoded, too."""
    rows = medians(outputs)
    plans = [name for name, row in rows.items() if row["tree_size"] and name != "auto"]
    best = max(plans, key=lambda name: rows[name]["tokens_per_second"])
    rows["auto"]["over_best_plan"] = paired_ratio(outputs["auto"], outputs[best])
    if NAME in rows:
        for name, row in rows.items():
            row["over_llama_cpp"] = paired_ratio(outputs[name], outputs[NAME])
    return rows


def bench_heads(args):
    """`bench heads`: prints the table, each row also compared to the first heads -> the result."""
    model, heads, groups, stop = load(args, args.heads)
    first = next(iter(heads))
    table = Table()
    for temperature, B, T in product(args.temperatures, args.batch_sizes, args.tree_sizes):
        ways = {name: partial(decode_once, model, batch_size=B, temperature=temperature, stop=stop,
                              **options) for name, options in fixed_trees(heads, T).items()}
        for label, outputs in decode_in_turns(ways, groups, args):
            rows = medians(outputs)
            of_first = rows[first]["tokens_per_step"] - 1
            for name, row in rows.items():
                extra = row["tokens_per_step"] - 1
                row |= dict(speed_up_over_first=paired_ratio(outputs[name], outputs[first]),
                            extra_tokens=extra,
                            extra_over_first=extra / of_first if of_first else None)
                table.add(label | dict(heads=name, temperature=temperature, batch_size=B) | row)
    accuracy = {name: own.info.get("accuracy", []) for name, own in heads.items()}
    return dict(device=str(model.device), dtype=str(model.dtype), accuracy=accuracy,
                decoding=table)


def fixed_trees(heads, tree_size):
    """{name: options of `prepare`}: plain decoding, all heads, lookup, and lookup with Clover's
    heads or, without these, the last."""
    last = "clover" if "clover" in heads else list(heads)[-1]
    ways = {"plain": dict(tree_size=1)}
    ways |= {name: dict(tree_size=tree_size, heads=own) for name, own in heads.items()}
    if tree_size > 1:
        ways["lookup"] = dict(tree_size=tree_size, lookup=True)
    if tree_size > 2:
        ways[f"{last} + lookup"] = ways[last] | dict(lookup=True)
    return ways
