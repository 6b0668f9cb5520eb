"""Draft heads against each other on equal terms: accuracy, tokens per step and throughput.

With --train, train_heads.py first trains every kind below on the same base, data, steps and batches: the four presets,
and Clover with one of its parts taken out, as in the ablation of its paper (arXiv 2405.00263). Trained kinds are kept,
and an interrupted one is resumed.
"""

import json
from itertools import product
from pathlib import Path

import train_heads
from bench import Table, print_head, print_row
from bench.decoding import load, settings, share_equal, warm_engine
from model import InputError
from training.data import prompts
from training.evaluate import head_accuracy

KINDS = {  # name: flags of train_heads.py; the others are compared with the first
    "medusa": ["--preset", "medusa"],
    "hydra": ["--preset", "hydra"],
    "clover": ["--preset", "clover"],
    "clover2": ["--preset", "clover2"],
    "clover-no-regressive": ["--preset", "clover", "--mix", "none"],      # no head reads the token guessed before it
    "clover-no-attention": ["--preset", "clover", "--mix", "concat"],     # heads read it without the Attention Decoder
    "clover-no-augmenting": ["--preset", "clover", "--augment-layers", "0"],
}


def read_record(folder):
    """heads.json of a folder, {} where there is none."""
    try:
        return json.loads((folder / "heads.json").read_text())
    except (OSError, ValueError):
        return {}


def train_kind(args, name, folder):
    """Trains one kind into its folder, unless that is done."""
    record = read_record(folder)
    if record.get("training", {}).get("steps") == args.steps and "acceptance" in record:
        return
    flags = [*KINDS[name], "--out", str(folder), "--model", args.model, "--device", args.device]
    flags += ["--steps", str(args.steps)]
    flags += ["--dtype", args.dtype] if args.dtype else []
    flags += ["--data", *args.data] if args.data else []
    flags += ["--resume"] if (folder / "train_state.pt").exists() else []
    print(f"\ntraining {name}", flush=True)
    train_heads.main(flags)
    if read_record(folder)["training"]["steps"] < args.steps:
        raise InputError(f"{folder}: training was interrupted; the same command continues it")


def train(args):
    """Trains args.kinds into folders of args.train -> these folders."""
    folders = [Path(args.train) / name for name in args.kinds]
    for name, folder in zip(args.kinds, folders):
        train_kind(args, name, folder)
    records = [read_record(folder)["training"] for folder in folders]
    for folder, record in zip(folders, records):
        if record != records[0]:
            raise InputError(f"{folder} was not trained as {folders[0]} was; choose another --train DIR")
    return folders


def accuracies(heads, heldout):
    """Held-out head accuracy of every kind, printed: {name: [share per head]}."""
    n_draft = max(kind.config.n_draft for kind in heads.values())
    print_head("heads", *(f"accuracy of head {i + 1}" for i in range(n_draft)))
    found = {}
    for name, kind in heads.items():
        block_size = min(256, kind.model.config.block_size - kind.config.n_draft - 1)
        found[name] = shares = head_accuracy(kind, heldout, 8, block_size)[1]
        print_row(name, *(f"{share:.1%}" for share in shares), *["-"] * (n_draft - len(shares)))
    return found


def decoding_rows(model, given, heads, args):
    """Rows of every kind at every temperature, batch and tree size, printed; plain decoding runs beside each batch."""
    first = next(iter(heads))
    table = Table({
        "heads": ("heads", "{}"), "temperature": ("temperature", "{:g}"), "batch size": ("batch_size", "{}"),
        "tree size": ("tree_size", "{}"), "tokens per step": ("tokens_per_step", "{:.2f}"),
        f"extra over {first}": ("extra_over_first", "{:.2f}"), "tokens per second": ("tokens_per_second", "{:.0f}"),
        "over plain": ("speed_up", "{:.2f}x"), f"over {first}": ("speed_up_over_first", "{:.2f}x"),
        "identical texts": ("identical", "{:.0%}")})

    def run(kind, tree_size):
        options = dict(temperature=temperature, batch_size=batch_size, tree_size=tree_size)
        return warm_engine(model, given, args, kind, **options).generate(given, args.max_new_tokens)

    for temperature, batch_size in product(args.temperatures, args.batch_sizes):
        plain = run(None, 1)
        for tree_size in args.tree_sizes:
            runs = {}
            for name, kind in heads.items():
                runs[name] = run(kind, tree_size)
                table.add(dict(heads=name, temperature=temperature, batch_size=batch_size, tree_size=tree_size,
                               **compare(runs[name], runs[first], plain)))
    return table.rows


def compare(out, first, plain):
    """The figures of one run, against the first kind's and against plain decoding."""
    extra, first_extra = out.tokens_per_step - 1, first.tokens_per_step - 1
    return dict(tokens_per_step=out.tokens_per_step, extra_over_first=extra / first_extra if first_extra else None,
                tokens_per_second=out.tokens_per_second, plain_tokens_per_second=plain.tokens_per_second,
                speed_up=out.tokens_per_second / plain.tokens_per_second,
                speed_up_over_first=out.tokens_per_second / first.tokens_per_second,
                identical=share_equal(out.tokens, plain.tokens))


def bench(args):
    """`python -m bench heads`: prints the tables, returns what goes into the JSON line."""
    model, heads, heldout = load(args, train(args) if args.train else args.heads)
    accuracy = accuracies(heads, heldout)
    rows = decoding_rows(model, prompts(heldout, args.prompts, args.prompt_length), heads, args)
    training = {name: kind.info.get("training") for name, kind in heads.items()}
    return dict(bench="heads", **settings(args, model), training=training, accuracy=accuracy, decoding=rows)
