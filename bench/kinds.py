"""Draft heads against each other and lookup on equal terms: accuracy, tokens per step, throughput.

With --train, train_heads.py first trains the kinds below on the same base, data, steps and batches,
to guess among all token ids: the four presets, and Clover with one of its parts taken out, as in
the ablation of its paper (arXiv 2405.00263). Trained kinds are kept; an interrupted one is resumed.
"""

from itertools import product
from pathlib import Path

import torch

import train_heads
from bench import Record, Table
from bench.decoding import decode_in_turns, load, settings
from model import InputError, read_json
from training import base
from training.data import prompts
from training.evaluate import head_accuracy

KINDS = {  # name: flags of train_heads.py; the others are compared with the first
    "medusa": "--preset medusa",
    "hydra": "--preset hydra",
    "clover": "--preset clover",
    "clover2": "--preset clover2",
    "clover-no-regressive": "--preset clover --mix none",     # no head reads the token before it
    "clover-no-attention": "--preset clover --mix concat",    # no Attention Decoder
    "clover-no-augmenting": "--preset clover --augment-layers 0",
}
BASES = {  # name: flags of training.base
    "124m": "--n-layer 12 --n-head 12 --n-kv-head 12 --n-embd 768 --n-inner 2048 "
            "--vocab-size 50304 --block-size 1024 --batch-size 16 --steps 3000 --lr 0.002",
}


def steps_done(folder):
    """For how many steps a base was trained into a folder, or heads, if they were measured too."""
    state = folder / "train_state.pt"
    if not state.is_file():
        return 0
    if (folder / "heads.json").is_file():
        record = read_json(folder / "heads.json")
        return record["training"]["steps"] if "acceptance" in record else 0
    return torch.load(state, map_location="cpu", weights_only=True, mmap=True)["step"]


def train(args, name, main, flags):
    """Trains into a folder of --train by main(flags), where that is not done -> the folder."""
    folder = Path(args.train) / name
    steps = int(flags[flags.index("--steps") + 1])
    if steps_done(folder) != steps:
        data = ["--data", *args.data] if args.data else []
        resume = ["--resume"] if (folder / "train_state.pt").is_file() else []
        print(f"\ntraining {name}", flush=True)
        main([*flags, "--out", str(folder), "--device", args.device, *data, *resume])
        if steps_done(folder) != steps:
            raise InputError(f"{folder}: training was interrupted; the same command continues it")
    return str(folder)


def train_kinds(args):
    """The folders of args.kinds, trained; args.model becomes that of --base, trained too."""
    if args.base:
        args.model = train(args, args.base, base.main, BASES[args.base].split())
    flags = ["--model", args.model, "--steps", str(args.steps), "--draft-vocabulary", "0"]
    flags += ["--dtype", args.dtype] if args.dtype else []
    return [train(args, name, train_heads.main, KINDS[name].split() + flags)
            for name in args.kinds]


def accuracy_table(accuracy):
    """({heading: column}, rows) of {heads: [share per head]}."""
    columns = {f"head {i + 1}": f"{i} {{:.1%}}" for i in range(max(map(len, accuracy.values())))}
    return {"heads": "heads {}"} | columns, [
        dict(heads=name) | {str(i): share for i, share in enumerate(shares)}
        for name, shares in accuracy.items()]


def accuracies(heads, heldout):
    """Held-out head accuracy of every kind, printed: {name: [share per head]}."""
    size = lambda kind: min(256, kind.model.config.block_size - kind.config.n_draft - 1)
    found = {name: head_accuracy(kind, heldout, 8, size(kind))[1] for name, kind in heads.items()}
    print("\nhead accuracy")
    Table(*accuracy_table(found))
    return found


def decoding_columns(first):
    return {"heads": "heads {}", "temperature": "temperature {:g}", "batch size": "batch_size {}",
            "tree size": "tree_size {}", "tokens per step": "tokens_per_step {:.2f}",
            f"extra over {first}": "extra_over_first {:.2f}",
            "tokens per second": "tokens_per_second {:.0f}", "over plain": "speed_up {:.2f}x",
            f"over {first}": "speed_up_over_first {:.2f}x", "identical texts": "identical {:.0%}"}


def measure_decoding(model, given, heads, args, table):
    """Adds the rows of every kind at every temperature, batch and tree size, of lookup, and of
    lookup with Clover's heads or, without these, the last; plain decoding runs beside each."""
    last = "clover" if "clover" in heads else list(heads)[-1]
    for label in product(args.temperatures, args.batch_sizes, args.tree_sizes):
        label = dict(zip(("temperature", "batch_size", "tree_size"), label))
        if table.has(**label):
            continue
        size = label["tree_size"]
        ways = {"plain": dict(tree_size=1)}
        ways |= {name: dict(tree_size=size, heads=kind) for name, kind in heads.items()}
        if size > 1:
            ways["lookup"] = dict(tree_size=size, lookup=True)
        if size > 2:
            ways[f"{last} + lookup"] = dict(tree_size=size, heads=heads[last], lookup=True)
        rows, _ = decode_in_turns(model, given, ways, args, batch_size=label["batch_size"],
                                  temperature=label["temperature"])
        plain = rows.pop("plain")
        beside = rows[next(iter(heads))]
        extra = beside["tokens_per_step"] - 1
        table.add(*(dict(heads=name) | row | label | dict(
            plain_tokens_per_second=plain["tokens_per_second"],
            speed_up_over_first=row["tokens_per_second"] / beside["tokens_per_second"],
            extra_over_first=(row["tokens_per_step"] - 1) / extra if extra else None)
            for name, row in rows.items()))


def bench(args):
    """`python -m bench heads`: prints the tables, returns the Record."""
    model, heads, heldout, _ = load(args, train_kinds(args) if args.train else args.heads)
    training = {name: kind.info.get("training") for name, kind in heads.items()}
    different = [name for name in heads if training[name] != training[next(iter(heads))]]
    if args.train and different:
        raise InputError(f"{args.train}: {different[0]} was not trained as the first was; choose "
                         "another --train DIR")
    record = Record(args.out, bench="heads", **settings(args, model), base=args.base,
                    training=training)
    record.once("accuracy", lambda: accuracies(heads, heldout))
    table = record.table("decoding", decoding_columns(next(iter(heads))))
    given = prompts(heldout, args.prompts, args.prompt_length)
    measure_decoding(model, given, heads, args, table)
    return record.done()
