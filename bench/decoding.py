"""`python -m bench decode`: plain decoding, all that can draft, and transformers, over batch sizes.
`python -m bench heads`: draft heads against each other. What is compared takes turns, so that other
work on the machine meets all alike."""

import statistics
import time
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import torch

from bench import Table
from generate import FixedPolicy, prepare
from hf.chat import load_chat_template
from tools.cli import load_heads, load_model
from tools.policy import AdaptivePolicy
from training.data import load_tokens, prompts

FIELDS = "tree_size", "tokens_per_step", "tokens_per_second"  # of an Output


def load(args, folders):
    """The model of --model, {folder name: heads}, the held-out tokens of --data."""
    model, encoding = load_model(args)
    heads = {Path(path).name: load_heads(path, model, encoding, args.heads_of_original)
             for path in folders}
    return model, heads, load_tokens(args.data, encoding, "heldout", load_chat_template(args.model))


def settings(args, model):
    """What a result says of its run."""
    return dict(bench=args.command, model=Path(args.model).name, device=str(model.device),
                dtype=str(model.dtype), prompts=args.prompts, prompt_length=args.prompt_length,
                max_new_tokens=args.max_new_tokens)


def decode_in_turns(ways, texts, new, runs=1):
    """Decodes the prompts in each way, `runs` times in turns. ways: {name: a function of prompts
    and new tokens}, plain decoding first -> ({name: row of medians}, {name: Outputs})."""
    outputs = {name: [] for name in ways}
    for _ in range(runs):
        for name, decode in ways.items():
            outputs[name].append(decode(texts, new))
    plain = next(iter(outputs.values()))
    rows = {}
    for name, done in outputs.items():
        same = [a == b for ours, its in zip(done, plain) for a, b in zip(ours.tokens, its.tokens)]
        rows[name] = {field: getattr(median_run(done), field, None) for field in FIELDS} | dict(
            speed_up=paired_ratio(done, plain), identical=statistics.fmean(same))
    return rows, outputs


def decode_once(model, texts, new, make_policy=lambda: None, **options):
    """The Output of an engine of its own, after a few tokens that compile and load everything, and
    from which its policy does not learn. options: of `prepare`."""
    engine = prepare(model, texts, new, policy=make_policy(), **options)
    engine.generate(texts[:engine.decoder.batch_size], min(8, new))
    engine.policy = make_policy() or engine.policy
    return engine.generate(texts, new)


def median_run(done):
    return sorted(done, key=lambda out: out.seconds)[len(done) // 2]


def paired_ratio(done, others):
    """Tokens per second over those of others: the median over the rounds."""
    return statistics.median(a.tokens_per_second / b.tokens_per_second
                             for a, b in zip(done, others))


def bench(args):
    """`bench decode`: prints the table -> the result."""
    model, heads, heldout = load(args, [] if args.heads == "none" else [args.heads])
    own = next(iter(heads.values()), None)
    table = Table()
    for batch_size in args.batch_sizes:
        texts = prompts(heldout, max(args.prompts, batch_size), args.prompt_length)
        for name, row in measure_batch(model, own, texts, batch_size, args).items():
            table.add(dict(batch_size=batch_size, drafted_by=name) | row)
    return settings(args, model) | dict(temperature=args.temperature, runs=args.runs,
                                        heads=list(heads), decoding=table)


def measure_batch(model, heads, texts, batch_size, args):
    """{drafted by: row} of one batch size."""
    auto = partial(AdaptivePolicy, model, heads, True, batch_size, args.temperature)
    plans = auto().plans  # plain decoding first
    policies = {str(plan): partial(FixedPolicy, plan) for plan in plans} | dict(auto=auto)
    ways = {name: partial(decode_once, model, heads=heads, make_policy=make_policy,
                          batch_size=batch_size, temperature=args.temperature)
            for name, make_policy in policies.items()}
    if batch_size == 1 and not args.temperature:
        ways |= transformers_ways(model, args.model, texts)
    rows, outputs = decode_in_turns(ways, texts, args.max_new_tokens, args.runs)
    taken = median_run(outputs["auto"]).plans
    best = max(map(str, plans), key=lambda name: rows[name]["tokens_per_second"])
    rows["auto"] |= dict(plans={str(plan): steps for plan, (steps, _) in taken.items()},
                         over_best_plan=paired_ratio(outputs["auto"], outputs[best]))
    return rows


def transformers_ways(model, folder, texts):
    """{name: a function that decodes the checkpoint with transformers, in our dtype and on our
    device, greedily, one prompt at a time}; empty where transformers is not installed."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        print("transformers: not installed (pip install transformers)")
        return {}
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype).to(model.device)
    theirs.generation_config.eos_token_id = None  # no text ends early, as with us

    @torch.inference_mode()
    def decode(texts, new, **options):
        tokens = []
        start = time.perf_counter()
        for text in texts:
            ids = torch.tensor([text], device=theirs.device)
            out = theirs.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0,
                                  do_sample=False, max_new_tokens=new, **options)
            tokens.append(out[0, len(text):].tolist())
        seconds = time.perf_counter() - start
        return SimpleNamespace(tokens=tokens, seconds=seconds,
                               tokens_per_second=sum(map(len, tokens)) / seconds)

    ways = {"transformers": decode,
            "transformers, prompt lookup": partial(decode, prompt_lookup_num_tokens=10)}
    for way in ways.values():
        way(texts[:1], 8)  # what only the first call does
    return ways


def bench_heads(args):
    """`bench heads`: prints the table -> the result."""
    model, heads, heldout = load(args, args.heads)
    texts = prompts(heldout, args.prompts, args.prompt_length)
    table = Table()
    for temperature, B, T in product(args.temperatures, args.batch_sizes, args.tree_sizes):
        ways = {name: partial(decode_once, model, batch_size=B, temperature=temperature, **options)
                for name, options in fixed_trees(heads, T).items()}
        rows, _ = decode_in_turns(ways, texts, args.max_new_tokens)
        first = rows[next(iter(heads))]
        extra = first["tokens_per_step"] - 1
        for name, row in rows.items():
            table.add(dict(heads=name, temperature=temperature, batch_size=B) | row | dict(
                speed_up_over_first=row["tokens_per_second"] / first["tokens_per_second"],
                extra_over_first=(row["tokens_per_step"] - 1) / extra if extra else None))
    training = {name: own.info.get("training") for name, own in heads.items()}
    return settings(args, model) | dict(training=training, decoding=table)


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
