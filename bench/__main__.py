"""Measures decoding, draft heads and kernels: same inputs, same run, against each other and limits.

    python -m bench COMMAND --help     # COMMANDS, below; docs/cli.md says what each measures
    torchrun --nproc-per-node 2 -m bench decode ...  # with the model held by several processes

Prints tables and, last, one JSON line with the numbers, the hardware and the versions. With --out
FILE heads, decode, kernels and tests keep that line in a file as it grows, and a run that was
stopped goes on from there.
"""

import json
import sys
from pathlib import Path

from backends import tensor_parallel
from bench import (
    decoding,
    draw,
    gpu,
    kinds,
    machine,
    operations,
    policies,
    report,
    roofline,
    steps,
)
from model import MAX_TREE, InputError
from tools.cli import command
from tools.flags import (
    DEMO,
    Parser,
    add_model_flags,
    add_number,
    add_original_heads_flag,
    add_quantize_flag,
)
from tools.timing import PREFIX
from training.flags import add_data_flag

SIZES = [1, 2, 4, 8, 16, 32, 64]
NUMBERS = {  # flag: (least, most, help)
    "prompts": (1, 10**6, "held-out ones; with decode, a larger batch takes one for each slot"),
    "prompt_length": (1, 10**6, "tokens of each prompt"),
    "max_new_tokens": (1, 10**6, "of each prompt"),
    "batch_sizes": (1, 1024, "sequences decoded together"),
    "tree_sizes": (1, MAX_TREE, "nodes; with decode, to count tokens per step for, or to time"),
    "steps": (1, 10**6, "of training, each kind"),
    "runs": (1, 10**6, "paired runs, of which medians count; default: 3, for random weights 5"),
    "prefixes": (0, 2**20, "committed tokens"),
    "prefix": (0, 2**20, "tokens in the cache of each sequence"),
    "rows": (1, 4096, "hidden states projected at once"),
    "slice": (1, len(gpu.SLICES), "the slice to run; default: all, one after another"),
    "minutes": (1, 9, "that a slice may take"),
    "draft_vocabulary": (0, 2**31, "with --random-weights, the heads draft among the first ids, 0: "
                         f"all; default: {steps.FEW_TOKENS} where there are twice as many"),
    "temperature": (0.0, 1e4, "0: greedy"),
    "temperatures": (0.0, 1e4, "0: greedy"),
    "acceptance": (0.0, 1.0, "draft a chain, each guess of which is accepted with this chance"),
}
TEXTS = {  # flag: options of add_argument; those with a list as default take several values
    "train": dict(metavar="DIR", help="train --kinds into DIR first, and measure those"),
    "base": dict(choices=kinds.BASES, help="with --train, train this model first, heads for it"),
    "kinds": dict(choices=kinds.KINDS, help="to train"),
    "text": dict(choices=decoding.TEXTS, help="of the prompts; rename: held-out text and its "
                 "beginning once more with a name changed, as when editing"),
    "random_weights": dict(choices=steps.SIZES, help="time steps of this model's sizes; on a CPU "
                           "beside llama.cpp and transformers where these are installed"),
    "operations": dict(choices=operations.OPERATIONS, help="what to time"),
    "no_flex": dict(help="leave out FlexAttention, which compiles for every shape"),
    "results": dict(metavar="DIR", help="the records"),
    "run": dict(metavar="FILE", help="what generate.py --prompt TEXT --json --show-tree printed"),
    "gpu": dict(choices=roofline.GPUS, type=str.lower, help="of a datasheet"),
    "quantize": dict(choices=("int8", "int4"), help="with the model's weights packed"),
    "check": dict(metavar="DIR", help="hold the prediction against the steps measured there"),
    "out": dict(metavar="PATH", help="keep the numbers here, and go on from what is there"),
    "model": dict(help=f"a checkpoint folder; with roofline also {', '.join(steps.SIZES)}"),
    "heads": dict(help="draft heads; decode: the last draft with lookup and may be none; kernels: "
                  f"whose attention heads are taken, {', '.join(operations.MODELS)}"),
}
HEADS = [str(DEMO / "medusa"), str(DEMO / "clover")]
DECODING = dict(heads=HEADS, out=None, prompt_length=64, max_new_tokens=128)
COMMANDS = {  # name: (what runs it, help, {flag: default})
    "heads": (kinds.bench, "heads against each other and against plain decoding", DECODING | dict(
        prompts=50, batch_sizes=[1], tree_sizes=[5, 17], steps=500, train=None, base=None,
        kinds=list(kinds.KINDS), temperatures=[0.0, 0.8])),
    "decode": (None, "plain decoding, heads, lookup and transformers over batch sizes",
               DECODING | dict(
                   prompts=16, batch_sizes=SIZES, tree_sizes=SIZES, runs=None, text="heldout",
                   temperature=0.0, random_weights=None, draft_vocabulary=None)),
    "policy": (policies.bench, "how well auto selects, replayed in seconds from recorded texts and "
               "times", DECODING | dict(prompts=32, batch_sizes=[1, 8, 32], text="heldout",
                                        temperatures=[0.0, 0.8, 1.0])),
    "kernels": (operations.bench, "kernels against the memory's bandwidth and other code", dict(
        operations=list(operations.OPERATIONS), heads=["8b", "70b"], no_flex=False,
        batch_sizes=[1, 8, 32], prefixes=[512, 8192, 32768], tree_sizes=[1, 8, 16, 64],
        rows=[1, 8, 16, 64], out=None)),
    "tests": (gpu.bench_tests, "pytest -m gpu, its outcomes kept as it goes", dict(out=None)),
    "gpu": (gpu.bench, "all that only a GPU can tell, in slices", dict(slice=None, minutes=9)),
    "report": (report.bench, "Markdown tables of the records in a folder", {}),
    "draw": (draw.bench, "the pictures of README.md and docs/, from records and a saved run", dict(
        out="docs/img", results="bench/results", run="docs/img/run.json")),
    "roofline": (roofline.bench, "predicts what speculation gains, from bytes and FLOPs", dict(
        model="8b", gpu="h200", heads=HEADS[1], acceptance=None, temperature=0.0,
        check=None, quantize=None, prefix=PREFIX, batch_sizes=[*SIZES, 128, 256],
        tree_sizes=SIZES[1:])),
}


def parse(argv):
    parser = Parser("Measures decoding, draft heads and kernels.", prog="python -m bench")
    what = parser.add_subparsers(dest="what", required=True)
    parsers = {name: what.add_parser(name, help=words) for name, (_, words, _) in COMMANDS.items()}
    for name in ("heads", "decode", "policy"):
        add_model_flags(parsers[name])
        add_data_flag(parsers[name])
    add_quantize_flag(parsers["decode"])
    add_original_heads_flag(parsers["decode"])
    parsers["tests"].add_argument("files", nargs="*", default=["tests"], help="for pytest")
    parsers["gpu"].add_argument("--out", required=True, metavar="DIR", help="for the records")
    parsers["report"].add_argument("folder")
    for name, (_, _, flags) in COMMANDS.items():
        for flag, default in flags.items():
            add_flag(parsers[name], flag, default)
    args = parser.parse_args(argv)
    if args.what == "decode":
        args.runs = args.runs or (5 if args.random_weights else 3)
    check_flags(args)
    return args


def add_flag(parser, name, default):
    flag = "--" + name.replace("_", "-")
    several = dict(nargs="+") if isinstance(default, list) else {}
    if name in NUMBERS:
        low, high, words = NUMBERS[name]
        add_number(parser, flag, low, high, type(low), default=default, help=words, **several)
    elif default is False:
        parser.add_argument(flag, action="store_true", **TEXTS[name])
    else:
        parser.add_argument(flag, default=default, **several, **TEXTS[name])


def check_flags(args):
    """Raises InputError for flags that do not go together, and for heads that a table could not
    tell apart."""
    if getattr(args, "base", None) and not args.train:
        raise InputError("--base needs --train DIR, the folder to train in")
    if getattr(args, "draft_vocabulary", None) is not None and not args.random_weights:
        raise InputError("--draft-vocabulary needs --random-weights SIZE; train_heads.py gives "
                         "trained heads theirs")
    if getattr(args, "random_weights", None) and (args.quantize or args.heads_of_original):
        raise InputError("--quantize and --heads-of-original need a --model, and go without "
                         "--random-weights")
    if args.what == "kernels" and set(args.heads) - {*operations.MODELS}:
        raise InputError(f"--heads must be of {', '.join(operations.MODELS)}, not {args.heads}")
    if args.what in ("heads", "decode"):
        names = [Path(path).name for path in args.heads]
        others = names[:-1] if args.what == "decode" else []
        if len({"plain", "lookup", *names}) < len(names) + 2 or "heads" in others:
            raise InputError("two of the heads folders have the same name, or one is called plain, "
                             "heads or lookup; rename one, to tell their rows apart")
        if "none" in others:
            raise InputError("of --heads only the last can be none, which drafts by lookup alone")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    if args.what != "decode":
        return show(COMMANDS[args.what][0](args))
    with tensor_parallel.joined(args, argv) as group:
        show((steps if args.random_weights else decoding).bench(args, group))  # ranks end here


def show(result):
    """Prints the JSON line of a result, if there is one."""
    if result is not None:
        print(json.dumps(dict(result) | dict(machine=machine())), flush=True)


if __name__ == "__main__":
    command(main)
