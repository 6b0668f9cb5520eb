"""Draft heads against each other: accuracy, tokens per step and throughput, on equal terms.

With --train every kind below is first trained by train_heads.py on the same base, data, steps and batches: the four presets,
and Clover with one of its parts taken out, as in the ablation of its paper (arXiv 2405.00263). Kinds that are trained already
are not trained again, and one that was interrupted is resumed.
"""

import json
from pathlib import Path

import train_heads
from hf.chat import load_chat_template
from model import InputError
from clover import CloverHeads
from training.data import load_tokens, prompts
from training.evaluate import head_accuracy
from generate import generate
from tools.cli import load_model
from hf.tokenizer import tokenizer_hash

KINDS = {  # name: flags of train_heads.py; the first is what the others are compared with
    "medusa": ["--preset", "medusa"],
    "hydra": ["--preset", "hydra"],
    "clover": ["--preset", "clover"],
    "clover2": ["--preset", "clover2"],
    "clover-no-regressive": ["--preset", "clover", "--mix", "none"],      # no head reads the token guessed before it
    "clover-no-attention": ["--preset", "clover", "--mix", "concat"],     # they read it, but not through the Attention Decoder
    "clover-no-augmenting": ["--preset", "clover", "--augment-layers", "0"],
}


def train(args):
    """Trains args.kinds into folders of args.train -> these folders."""
    folders = [Path(args.train) / name for name in args.kinds]
    for name, folder in zip(args.kinds, folders):
        flags = [*KINDS[name], "--out", str(folder), "--model", args.model, "--device", args.device, "--steps", str(args.steps)]
        flags += ["--dtype", args.dtype] if args.dtype else []
        flags += ["--data", *args.data] if args.data else []
        try:
            record = json.loads((folder / "heads.json").read_text())
        except (OSError, ValueError):
            record = {}
        if record.get("training", {}).get("steps") == args.steps and "acceptance" in record:
            continue
        print(f"\ntraining {name}", flush=True)
        train_heads.main(flags + (["--resume"] if (folder / "train_state.pt").exists() else []))
        if json.loads((folder / "heads.json").read_text())["training"]["steps"] < args.steps:
            raise InputError(f"{folder}: training was interrupted; the same command goes on with it")
    records = [json.loads((folder / "heads.json").read_text())["training"] for folder in folders]
    for folder, record in zip(folders, records):
        if record != records[0]:
            raise InputError(f"{folder} was trained on other data or otherwise than {folders[0]}; choose another --train DIR")
    return folders


def decode(model, given, args, heads, temperature, batch_size, tree_size):
    """One decoding run as a dict: tokens per step, tokens per second, and the tokens themselves."""
    options = dict(temperature=temperature, tree_size=tree_size, batch_size=batch_size)
    generate(model, given[:batch_size], args.max_new_tokens, heads, **options)  # warm: compiled, loaded
    out = generate(model, given, args.max_new_tokens, heads, **options)
    return dict(tokens_per_step=out.tokens_per_step, tokens_per_second=out.tokens_per_second, tokens=out.tokens)


def decoding_rows(model, given, heads, args):
    """Rows of the decoding table: every kind of heads at every temperature, batch and tree size, plain decoding with each."""
    rows = []
    for temperature in args.temperatures:
        for batch_size in args.batch_sizes:
            plain = decode(model, given, args, None, temperature, batch_size, 1)
            for tree_size in args.tree_sizes:
                first = None
                for name, these in heads.items():
                    run = decode(model, given, args, these, temperature, batch_size, tree_size)
                    first = first or run
                    extra, firsts = run["tokens_per_step"] - 1, first["tokens_per_step"] - 1
                    rows.append(dict(
                        heads=name, temperature=temperature, batch_size=batch_size, tree_size=tree_size,
                        tokens_per_step=run["tokens_per_step"], extra_over_first=extra / firsts if firsts else None,
                        tokens_per_second=run["tokens_per_second"], plain_tokens_per_second=plain["tokens_per_second"],
                        speed_up=run["tokens_per_second"] / plain["tokens_per_second"],
                        speed_up_over_first=run["tokens_per_second"] / first["tokens_per_second"],
                        identical=sum(a == b for a, b in zip(run["tokens"], plain["tokens"])) / len(given)))
                    print(line(rows[-1]), flush=True)
    return rows


def line(row):
    ratio = "-" if row["extra_over_first"] is None else f"{row['extra_over_first']:.2f}"
    return (f"| {row['heads']} | {row['temperature']:g} | {row['batch_size']} | {row['tree_size']} | {row['tokens_per_step']:.2f} | {ratio} "
            f"| {row['tokens_per_second']:.0f} | {row['speed_up']:.2f}x | {row['speed_up_over_first']:.2f}x | {row['identical']:.0%} |")


def accuracies(heads, heldout):
    """Held-out head accuracy of every kind: {name: [share per head]}."""
    found = {}
    most = max(these.config.n_draft for these in heads.values())
    print("| heads | " + " | ".join(f"accuracy of head {i + 1}" for i in range(most)) + " |\n|---|" + "---|" * most)
    for name, these in heads.items():
        model = these.model
        size = min(256, model.config.block_size - these.config.n_draft - 1)
        found[name] = shares = head_accuracy(these, heldout, 8, size)[1]
        print(f"| {name} | " + " | ".join([f"{share:.1%}" for share in shares] + ["-"] * (most - len(shares))) + " |", flush=True)
    return found


def bench(args):
    """`bench.py heads`."""
    folders = train(args) if args.train else [Path(path) for path in args.heads]
    model, encoding = load_model(args)
    heads = {path.name: CloverHeads.from_pretrained(path, model, tokenizer_hash(encoding)) for path in folders}
    heldout = load_tokens(args.data, encoding, "heldout", load_chat_template(args.model))
    accuracy = accuracies(heads, heldout)
    first = next(iter(heads))
    print(f"\n| heads | temperature | batch size | tree size | tokens per step | extra over {first} | tokens per second | over plain "
          f"| over {first} | identical texts |\n|---|" + "---|" * 9)
    rows = decoding_rows(model, prompts(heldout, args.prompts, args.prompt_length), heads, args)
    settings = {name: getattr(args, name) for name in ("prompts", "prompt_length", "max_new_tokens")}
    training = {name: these.info.get("training") for name, these in heads.items()}
    return dict(bench="heads", model=Path(args.model).name, device=str(model.device), dtype=str(model.dtype), **settings,
                training=training, accuracy=accuracy, decoding=rows)
