"""Draft heads against each other on equal terms: accuracy, tokens per step and throughput.

With --train, train_heads.py first trains every kind below on the same base, data, steps and batches: the four presets,
and Clover with one of its parts taken out, as in the ablation of its paper (arXiv 2405.00263). Trained kinds are kept,
and an interrupted one is resumed.
"""

from itertools import product
from pathlib import Path

import train_heads
from bench import Table
from bench.decoding import decode_in_turns, load, settings
from model import InputError, read_json
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


def finished(folder, steps):
    """Whether a folder holds heads that were trained for these steps, and measured."""
    record = read_json(folder / "heads.json") if (folder / "heads.json").is_file() else {}
    return "acceptance" in record and record.get("training", {}).get("steps") == steps


def train(args):
    """Trains args.kinds into folders of args.train, unless that is done -> these folders."""
    folders = [Path(args.train) / name for name in args.kinds]
    for name, folder in zip(args.kinds, folders):
        if not finished(folder, args.steps):
            flags = ["--out", str(folder), "--model", args.model, "--device", args.device, "--steps", str(args.steps)]
            flags += ["--dtype", args.dtype] if args.dtype else []
            flags += ["--data", *args.data] if args.data else []
            flags += ["--resume"] if (folder / "train_state.pt").exists() else []
            print(f"\ntraining {name}", flush=True)
            train_heads.main([*KINDS[name], *flags])
        if not finished(folder, args.steps):
            raise InputError(f"{folder}: training was interrupted; the same command continues it")
    return folders


def accuracies(heads, heldout):
    """Held-out head accuracy of every kind, printed: {name: [share per head]}."""
    n_draft = max(kind.config.n_draft for kind in heads.values())
    table = Table({"heads": "heads {}"} | {f"accuracy of head {i + 1}": f"{i} {{:.1%}}" for i in range(n_draft)})
    found = {}
    for name, kind in heads.items():
        block_size = min(256, kind.model.config.block_size - kind.config.n_draft - 1)
        found[name] = shares = head_accuracy(kind, heldout, 8, block_size)[1]
        table.show(dict(heads=name) | {str(i): share for i, share in enumerate(shares)})
    return found


def decoding_rows(model, given, heads, args):
    """Rows of every kind at every temperature, batch and tree size, printed; plain decoding runs beside each."""
    first = next(iter(heads))
    table = Table({
        "heads": "heads {}", "temperature": "temperature {:g}", "batch size": "batch_size {}",
        "tree size": "tree_size {}", "tokens per step": "tokens_per_step {:.2f}",
        f"extra over {first}": "extra_over_first {:.2f}", "tokens per second": "tokens_per_second {:.0f}",
        "over plain": "speed_up {:.2f}x", f"over {first}": "speed_up_over_first {:.2f}x",
        "identical texts": "identical {:.0%}"})
    for temperature, batch_size, tree_size in product(args.temperatures, args.batch_sizes, args.tree_sizes):
        kinds = {"plain": (None, 1)} | {name: (kind, tree_size) for name, kind in heads.items()}
        rows, _ = decode_in_turns(model, given, kinds, args, batch_size=batch_size, temperature=temperature)
        plain, base = rows.pop("plain"), rows[first]
        base_extra = base["tokens_per_step"] - 1
        for row in rows.values():
            table.add(row | dict(
                temperature=temperature, batch_size=batch_size, plain_tokens_per_second=plain["tokens_per_second"],
                speed_up_over_first=row["tokens_per_second"] / base["tokens_per_second"],
                extra_over_first=(row["tokens_per_step"] - 1) / base_extra if base_extra else None))
    return table


def bench(args):
    """`python -m bench heads`: prints the tables, returns what goes into the JSON line."""
    model, heads, heldout = load(args, train(args) if args.train else args.heads)
    training = {name: kind.info.get("training") for name, kind in heads.items()}
    different = [name for name in heads if training[name] != training[next(iter(heads))]]
    if args.train and different:
        raise InputError(f"{args.train}: {different[0]} was not trained as the first was; choose another --train DIR")
    return dict(bench="heads", **settings(args, model), training=training, accuracy=accuracies(heads, heldout),
                decoding=decoding_rows(model, prompts(heldout, args.prompts, args.prompt_length), heads, args))
