"""Draft heads against each other and lookup on equal terms: accuracy, tokens per step and throughput.

With --train, train_heads.py first trains every kind below on the same base, data, steps and batches, to guess
among all token ids: the four presets, and Clover with one of its parts taken out, as in the ablation of its paper
(arXiv 2405.00263). Trained kinds are kept, and an interrupted one is resumed.
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
    "medusa": ["--preset", "medusa"],
    "hydra": ["--preset", "hydra"],
    "clover": ["--preset", "clover"],
    "clover2": ["--preset", "clover2"],
    "clover-no-regressive": ["--preset", "clover", "--mix", "none"],      # no head reads the token guessed before it
    "clover-no-attention": ["--preset", "clover", "--mix", "concat"],     # heads read it without the Attention Decoder
    "clover-no-augmenting": ["--preset", "clover", "--augment-layers", "0"],
}
BASES = {  # name: flags of training.base
    "124m": "--n-layer 12 --n-head 12 --n-kv-head 12 --n-embd 768 --n-inner 2048 --vocab-size 50304 --block-size 1024 "
            "--batch-size 16 --steps 6000 --lr 0.002",  # about ten minutes on an H200, by estimate
}


def finished(folder, steps):
    """Whether a folder holds heads that were trained for these steps, and measured."""
    record = read_json(folder / "heads.json") if (folder / "heads.json").is_file() else {}
    return "acceptance" in record and record.get("training", {}).get("steps") == steps


def base_steps(folder):
    """The steps of a base that was trained into a folder so far."""
    state = folder / "train_state.pt"
    return torch.load(state, map_location="cpu", weights_only=True, mmap=True)["step"] if state.exists() else 0


def train_base(args):
    """Trains --base into a folder of --train, unless that is done -> the folder."""
    folder, flags = Path(args.train) / args.base, BASES[args.base].split()
    steps = int(flags[flags.index("--steps") + 1])
    run_training(base.main, f"the {args.base} base", folder, flags, args, lambda: base_steps(folder) == steps)
    return str(folder)


def train(args):
    """Trains args.kinds into folders of args.train, unless that is done -> these folders."""
    folders = [Path(args.train) / name for name in args.kinds]
    for name, folder in zip(args.kinds, folders):
        flags = [*KINDS[name], "--model", args.model, "--steps", str(args.steps), "--draft-vocabulary", "0"]
        flags += ["--dtype", args.dtype] if args.dtype else []
        run_training(train_heads.main, name, folder, flags, args, lambda: finished(folder, args.steps))
    return folders


def run_training(main, what, folder, flags, args, is_done):
    """Starts a training's main(flags), or goes on with it, unless it is done."""
    if is_done():
        return
    data = ["--data", *args.data] if args.data else []
    resume = ["--resume"] if (folder / "train_state.pt").exists() else []
    print(f"\ntraining {what}", flush=True)
    main([*flags, "--out", str(folder), "--device", args.device, *data, *resume])
    if not is_done():
        raise InputError(f"{folder}: training was interrupted; the same command continues it")


def accuracy_columns(accuracy):
    """accuracy: {heads: [share per head]}."""
    return {"heads": "heads {}"} | {f"head {i + 1}": f"{i} {{:.1%}}" for i in range(max(map(len, accuracy.values())))}


def accuracies(heads, heldout):
    """Held-out head accuracy of every kind, printed: {name: [share per head]}."""
    found = {}
    for name, kind in heads.items():
        block_size = min(256, kind.model.config.block_size - kind.config.n_draft - 1)
        found[name] = head_accuracy(kind, heldout, 8, block_size)[1]
    print("\nhead accuracy")
    Table(accuracy_columns(found), accuracy_rows(found))
    return found


def accuracy_rows(accuracy):
    return [dict(heads=name) | {str(i): share for i, share in enumerate(shares)} for name, shares in accuracy.items()]


def decoding_columns(first):
    return {"heads": "heads {}", "temperature": "temperature {:g}", "batch size": "batch_size {}",
            "tree size": "tree_size {}", "tokens per step": "tokens_per_step {:.2f}",
            f"extra over {first}": "extra_over_first {:.2f}", "tokens per second": "tokens_per_second {:.0f}",
            "over plain": "speed_up {:.2f}x", f"over {first}": "speed_up_over_first {:.2f}x",
            "identical texts": "identical {:.0%}"}


def measure_decoding(model, given, heads, args, table):
    """Adds the rows of every kind at every temperature, batch and tree size; plain decoding runs beside each."""
    first = next(iter(heads))
    for temperature, batch_size, tree_size in product(args.temperatures, args.batch_sizes, args.tree_sizes):
        label = dict(temperature=temperature, batch_size=batch_size, tree_size=tree_size)
        if table.has(**label):
            continue
        ways = {"plain": dict(tree_size=1)}
        ways |= {name: dict(heads=kind, tree_size=tree_size) for name, kind in heads.items()}
        ways |= with_lookup(heads, tree_size)
        rows, _ = decode_in_turns(model, given, ways, args, batch_size=batch_size, temperature=temperature)
        plain, base = rows.pop("plain"), rows[first]
        base_extra = base["tokens_per_step"] - 1
        table.add(*(dict(heads=name) | row | label | dict(
            plain_tokens_per_second=plain["tokens_per_second"],
            speed_up_over_first=row["tokens_per_second"] / base["tokens_per_second"],
            extra_over_first=(row["tokens_per_step"] - 1) / base_extra if base_extra else None)
            for name, row in rows.items()))


def with_lookup(heads, tree_size):
    """{name: options of `prepare`} of lookup alone, and of lookup with Clover's heads or, without these, the last."""
    name = "clover" if "clover" in heads else list(heads)[-1]
    both = {f"{name} + lookup": dict(heads=heads[name], lookup=True, tree_size=tree_size)} if tree_size > 2 else {}
    return ({"lookup": dict(lookup=True, tree_size=tree_size)} | both) if tree_size > 1 else {}


def bench(args):
    """`python -m bench heads`: prints the tables, returns the Record."""
    if args.base:
        args.model = train_base(args)
    model, heads, heldout, _ = load(args, train(args) if args.train else args.heads)
    training = {name: kind.info.get("training") for name, kind in heads.items()}
    different = [name for name in heads if training[name] != training[next(iter(heads))]]
    if args.train and different:
        raise InputError(f"{args.train}: {different[0]} was not trained as the first was; choose another --train DIR")
    record = Record(args.out, bench="heads", **settings(args, model), base=args.base, training=training)
    record.once("accuracy", lambda: accuracies(heads, heldout))
    table = record.table("decoding", decoding_columns(next(iter(heads))))
    measure_decoding(model, prompts(heldout, args.prompts, args.prompt_length), heads, args, table)
    return record.done()
