"""`python -m bench decode`: drafters beside plain decoding, over temperatures, batch sizes and tree
sizes. What is compared takes turns, so that other work on the machine meets all alike; with --chats
it does so once for each kind of prompts."""

import json
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median

from bench import Table
from bench.llama_cpp import PLAIN, llama_cpp_ways
from clover import CloverHeads
from generate import DraftPlan, FixedPolicy, Output, prepare
from hf.chat import stop_tokens
from model import InputError
from tools.load import load_model, read_file
from training.data import load_tokens, prompts

PROMPT_LENGTH = 64  # tokens of a held-out text, which are continued


@dataclass
class Measured(Output):
    """An `Output`, and what it takes to tell prefill from decoding."""
    first: Output | None = None  # of the same prompts with one new token each, by plain steps


def bench(args):
    """`bench decode`: prints the table -> the result."""
    model, encoding = load_model(args)
    drafters = load_drafters(args.drafters, model, encoding)
    groups, stop = load_prompts(args, encoding)
    fewest = min(map(len, groups.values()))
    if max(args.batch_sizes) > fewest:
        raise InputError(f"there are {fewest} prompts of a kind, fewer than decode together; give "
                         f"--batch-sizes up to {fewest}")
    longest = max(len(text) for texts in groups.values() for text in texts)
    table = Table()
    for temperature, B in product(args.temperatures, args.batch_sizes):
        ways = drafting_ways(drafters, args.tree_sizes, partial(
            decode_once, model, stop=stop, batch_size=B, temperature=temperature))
        if args.llama_cpp:
            ways |= llama_cpp_ways(args.model, model.device, longest + args.max_new_tokens,
                                   temperature, stop)
        for kind, outputs in decode_in_turns(ways, groups, args.max_new_tokens, args.runs):
            for (name, T), row in compared(outputs, first=next(iter(drafters))).items():
                table.add(dict(kind=kind, drafted_by=name, temperature=temperature, batch_size=B)
                          | row | dict(tree_size=T))
    accuracy = {name: drafter["heads"].info.get("accuracy", [])
                for name, drafter in drafters.items() if drafter["heads"]}
    return dict(device=str(model.device), dtype=str(model.dtype), accuracy=accuracy,
                prompts=sum(map(len, groups.values())), decoding=table)


def load_drafters(drafters, model, encoding):
    """{name: what `prepare` takes for it} of --drafters."""
    heads = {"lookup": None}
    options = {}
    for drafter in drafters:
        folder = drafter.removesuffix("+lookup")
        if folder not in heads:
            heads[folder] = CloverHeads.from_pretrained(folder, model, encoding.hash)
        name = Path(folder).name + (" + lookup" if drafter != folder else "")
        options[name] = dict(heads=heads[folder], lookup=drafter != folder or folder == "lookup")
    return options


def load_prompts(args, encoding):
    """{kind: prompts}, and the tokens that end a text: none do where prompts are held-out texts,
    which are of one kind."""
    if args.chats:
        groups = chat_prompts(Path(args.chats), encoding, args.prompts)
        return groups, stop_tokens(args.model, encoding)
    n = args.prompts or max(16, *args.batch_sizes)
    heldout = load_tokens(args.data, encoding, "heldout", encoding.template)
    return dict(text=prompts(heldout, n, PROMPT_LENGTH)), ()


def chat_prompts(file, encoding, n):
    """{kind: token ids of each prompt} of a .jsonl file's first n chats; None: of all."""
    groups = {}
    lines = filter(str.strip, file.read_text(encoding="utf-8").splitlines())
    for messages, line in zip(read_file(file, chat=True)[:n], lines):
        kind = str(json.loads(line).get("kind", "chat"))
        groups.setdefault(kind, []).append(encoding.chat(messages))
    return groups


def drafting_ways(drafters, tree_sizes, decode):
    """{(drafter, tree size): a function of prompts and new tokens}, plain decoding first. decode: a
    function of these, and of what `prepare` takes for a drafter and its tree size."""
    ways = {("plain", 1): partial(decode, tree_size=1)}
    for (name, drafter), T in product(drafters.items(), tree_sizes):
        least = 3 if drafter["heads"] and drafter["lookup"] else 2
        if T is None or T >= least:
            ways[name, T or "auto"] = partial(decode, tree_size=T, **drafter)
    return ways


def decode_once(model, texts, new, stop=(), **options):
    """The `Measured` of an engine of its own, warmed up, whose policy learnt nothing from that.
    options: of `prepare`."""
    engine = prepare(model, texts, new, **options)
    forget = lambda *_: engine.kept.update(dict.fromkeys(engine.kept, ()))  # reads whole prompts
    policy = engine.policy
    engine.policy = FixedPolicy(DraftPlan())
    for _ in range(2):  # the first run compiles the plain step, the second captures it
        engine.generate(texts[:engine.decoder.batch_size], 1, on_step=forget)
    engine.clear()
    engine.decoder.warm_up()
    first = engine.generate(texts, 1, on_step=forget)
    engine.policy = policy
    return Measured(**vars(engine.generate(texts, new, stop, forget)), first=first)


def decode_in_turns(ways, groups, new, runs):
    """Decodes the prompts in each way, `runs` times in turns: yields (kind, {way: Outputs}) for
    each kind of prompts, and at last for "all", whose rounds are the sums of theirs.
    ways: {way: a function of prompts and new tokens}."""
    results = []
    for kind, texts in groups.items():
        outputs = {way: [] for way in ways}
        for way, decode in runs * list(ways.items()):
            outputs[way].append(decode(texts, new))
        results.append(outputs)
        yield kind, outputs
    if len(results) > 1:
        yield "all", {way: list(map(total, *(outputs[way] for outputs in results))) for way in ways}


def total(*outputs):
    """One Output of several."""
    firsts = [getattr(output, "first", None) for output in outputs]  # None: llama.cpp's
    return Measured(sequences=sum((output.sequences for output in outputs), []),
                    steps=sum(output.steps for output in outputs),
                    batch_steps=sum(output.batch_steps for output in outputs),
                    seconds=sum(output.seconds for output in outputs),
                    tree_size=outputs[0].tree_size, first=total(*firsts) if all(firsts) else None)


def medians(outputs):
    """{way: row} of {way: Outputs}, plain decoding first."""
    plain = next(iter(outputs.values()))
    rows = {}
    for way, done in outputs.items():
        out = sorted(done, key=lambda out: out.seconds)[len(done) // 2]
        same = [a == b for ours, its in zip(done, plain) for a, b in zip(ours.tokens, its.tokens)]
        first = getattr(out, "first", None)
        rate = None
        if first and first.seconds < out.seconds:
            rate = (out.emitted - first.emitted) / (out.seconds - first.seconds)
        rows[way] = dict(tree_size=out.tree_size,
                         tokens_per_step=out.tokens_per_step,
                         tokens_per_second=out.tokens_per_second,
                         decoding_per_second=rate,
                         speed_up=paired_ratio(done, plain),
                         identical=fmean(same) if out.tree_size else None)  # else not ours
    return rows


def paired_ratio(done, others):
    """Tokens per second over those of others: the median over the rounds."""
    return median(a.tokens_per_second / b.tokens_per_second for a, b in zip(done, others))


def compared(outputs, first):
    """The rows of `medians`, also compared to the drafter `first` in trees of the same size, and to
    llama.cpp where that decoded."""
    rows = medians(outputs)
    extra = {way: row["tokens_per_step"] - 1 for way, row in rows.items()}
    for way, row in rows.items():
        of_first = extra.get((first, way[1]))
        row["extra_over_first"] = extra[way] / of_first if of_first else None
        if PLAIN in outputs:
            row["over_llama_cpp"] = paired_ratio(outputs[way], outputs[PLAIN])
    return rows
