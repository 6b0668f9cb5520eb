"""`python -m bench decode`: drafters and plain decoding, over temperatures, batch sizes and tree
sizes, interleaved, so that other work on the machine slows all of them alike."""

from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median

from backends.capture import warm_up
from bench import Table
from bench.llama_cpp import llama_cpp_methods
from bench.timing import Measured
from engine.batching import Engine
from engine.policy import Policy
from generate import Sampling
from hf.chat import stop_tokens
from hf.heads import default_heads, load_heads
from hf.paths import find_model
from model import expect
from tools.load import load_model
from tools.prompts import read_prompt_file
from training.data import load_tokens, prompts


def bench(args):
    """`bench decode`: prints the table and returns the result. A method is (drafter, tree size)."""
    model, encoding = load_model(args)
    drafters = load_drafters(args, model, encoding)
    groups, stop = load_prompts(args, encoding)
    fewest = min(map(len, groups.values()))
    expect(max(args.batch_sizes) <= fewest, f"there are {fewest} prompts of a kind, fewer than a "
           f"batch has; give --batch-sizes up to {fewest}")
    options = {("plain", 1): dict(tree_size=1)} | {
        (name, T or "auto"): dict(tree_size=T, **drafter)
        for (name, drafter), T in product(drafters.items(), args.tree_sizes) if T != 1}
    longest = max(len(prompt) for group in groups.values() for prompt in group)
    table = Table()
    for temperature, B in product(args.temperatures, args.batch_sizes):
        start = partial(start_decoding, model, stop=stop, batch_size=B, temperature=temperature)
        methods = {method: partial(start, **own) for method, own in options.items()}
        if args.llama_cpp:
            methods |= llama_cpp_methods(find_model(args.model), model.device, B,
                                         longest + args.max_new_tokens, temperature, stop)
        for kind, runs in interleave(methods, groups, args.max_new_tokens, args.runs, B):
            for (name, T), row in compare(runs).items():
                table.add(dict(kind=kind, drafted_by=name, temperature=temperature, batch_size=B,
                               tree_size=T) | row)
    accuracy = {name: drafter["heads"].info.get("accuracy", [])
                for name, drafter in drafters.items() if drafter["heads"]}
    return dict(device=str(model.device), dtype=str(model.dtype), accuracy=accuracy,
                prompts=sum(map(len, groups.values())), decoding=table)


def load_drafters(args, model, encoding):
    """Loads --drafters, by default all that the model has: {name: arguments of a `Policy`}."""
    own = default_heads(args.model, model)
    args.drafters = args.drafters or ["lookup", *["heads", "heads+lookup"] * bool(own)]
    heads = {"lookup": None}
    options = {}
    for drafter in args.drafters:
        folder = drafter.removesuffix("+lookup")
        if folder not in heads:
            expect(own or folder != "heads", f"{args.model}: has no draft heads of its own; give "
                   "their folder to --drafters")
            heads[folder] = load_heads(own if folder == "heads" else folder, model, encoding.hash)
        name = Path(folder).name + (" + lookup" if drafter != folder else "")
        options[name] = dict(heads=heads[folder], lookup=drafter != folder or folder == "lookup")
    return options


def load_prompts(args, encoding):
    """({kind: prompts}, stop tokens) of --chats, or of held-out texts without stop tokens."""
    if args.chats:
        return read_chats(args.chats, args.model, encoding, args.prompts)
    n = args.prompts or max(16, *args.batch_sizes)
    heldout = load_tokens(args.data, encoding, "heldout")
    return dict(text=prompts(heldout, n, args.prompt_tokens)), ()


def read_chats(file, model, encoding, count=None):
    """({kind: prompts}, stop tokens) of the first chats of a file."""
    groups = {}
    for prompt in read_prompt_file(file)[:count]:
        tokens = encoding.chat(prompt.messages, **prompt.tools)
        groups.setdefault(prompt.kind, []).append(tokens)
    return groups, stop_tokens(model, encoding)


def start_decoding(model, texts, new, stop=(), batch_size=1, temperature=0.0, **drafters):
    """Makes an engine for the prompts `texts` and returns a function that decodes some of them, and
    returns a `Measured`. Everything is compiled by then, but the policy has learnt nothing yet.
    drafters: arguments of its `Policy`."""
    policy = Policy(model, **drafters)
    plain = Policy(model)
    capacity = min(max(map(len, texts)) + new, model.config.block_size)
    engine = Engine(model, policy=policy, batch_size=batch_size, capacity=capacity,
                    sampling=Sampling(temperature))
    engine.policy = plain
    decode(engine, texts[:batch_size], 1)  # compiles the plain step
    engine.clear()
    engine.policy = policy
    warm_up(engine)

    def run(part, sampling=None):
        engine.policy = plain
        first = decode(engine, part, 1)
        engine.policy = policy
        out = decode(engine, part, new, stop, sampling)
        return Measured(**vars(out), decode_seconds=out.seconds - first.seconds,
                        prompt_tokens=sum(map(len, part)))
    return run


def decode(engine, texts, new, stop=(), sampling=None):
    """`Engine.generate`, except that prompts do not reuse the cache of earlier ones."""
    def forget(step):
        if step.sequence.ended:
            engine.idle = dict.fromkeys(engine.idle, ())
    return engine.generate(texts, new, stop, forget, sampling=sampling)


def interleave(methods, groups, new, rounds, batch_size=1):
    """Decodes each group of prompts with every method, `rounds` times; a single sequence prompt by
    prompt, a batch the whole group. Yields (kind, {method: a `Measured` per round}), and last, for
    several kinds, their sums as "all". methods: {method: function like `start_decoding`}."""
    results = []
    for kind, group in groups.items():
        runs = {method: [] for method in methods}
        for _ in range(rounds):
            if batch_size == 1:
                started = {method: start(group, new) for method, start in methods.items()}
                measured = [{method: run([prompt]) for method, run in started.items()}
                            for prompt in group]
            else:  # the caches of all methods might not fit in memory together
                measured = [{method: start(group, new)(group) for method, start in methods.items()}]
            for method in methods:
                runs[method].append(total(own[method] for own in measured))
        results.append(runs)
        yield kind, runs
    if len(results) > 1:
        yield "all", {method: list(map(total, zip(*(runs[method] for runs in results))))
                      for method in methods}


def total(runs):
    """The sum of several `Measured`."""
    runs = list(runs)
    names = "steps", "seconds", "decode_seconds", "prompt_tokens"
    sums = {name: sum(getattr(run, name) for run in runs) for name in names}
    return Measured([one for run in runs for one in run.sequences], **sums)


def compare(runs):
    """{method: row} from {method: its runs}, plain decoding first. Figures are those of the run of
    median duration, ratios are medians over the rounds."""
    plain = next(iter(runs.values()))
    rows = {}
    for method, own in runs.items():
        run = sorted(own, key=lambda run: run.seconds)[len(own) // 2]
        same = [x == y for a, b in zip(own, plain) for x, y in zip(a.tokens, b.tokens)]
        decoded = run.emitted - len(run.tokens)
        rows[method] = dict(
            tokens_per_step=run.tokens_per_step, tokens_per_second=run.tokens_per_second,
            decoding_per_second=decoded / run.decode_seconds if run.decode_seconds > 0 else None,
            prompt_tokens_per_second=run.prompt_tokens / (run.seconds - run.decode_seconds),
            speed_up=median(a.tokens_per_second / b.tokens_per_second for a, b in zip(own, plain)),
            identical=fmean(same) if method[1] else None)  # not for llama.cpp
    return rows
