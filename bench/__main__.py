"""Measures decoding, draft heads and kernels: same inputs, same run, against each other and against the limits.

    python -m bench heads                                     # demo/clover and demo/medusa on demo/
    python -m bench heads --model DIR --heads DIR DIR ...     # others; the rest is compared with the first
    python -m bench heads --train out/bench                   # the four presets and Clover's ablations, trained alike
    python -m bench decode                                    # plain, Medusa, Clover, lookup and both, transformers
    python -m bench decode --heads none --text rename         # lookup alone, on texts that an editor repeats
    python -m bench decode --random-weights 360m              # times of a step at a real size, beside llama.cpp's
    torchrun --nproc-per-node 2 -m bench decode ...           # with the model held by several processes, or GPUs
    python -m bench exact                                     # on a CPU: what bits that never differ cost in bfloat16
    python -m bench kernels                                   # on a GPU: times against the memory's bandwidth
    python -m bench kernels --static                          # anywhere: registers, spills and shared memory
    python -m bench launches                                  # anywhere: how many launches a step takes
    python -m bench tests                                     # on a GPU: pytest -m gpu, the outcomes kept as it goes
    python -m bench gpu --out DIR --slice 3                   # on a GPU: all of these, in slices of at most 9 minutes
    python -m bench report DIR                                # the tables of the files in DIR, as Markdown
    python -m bench roofline --model 8b --gpu h200            # predicts what speculation gains; needs no GPU
    python -m bench roofline --gpu h200 --check DIR           # the prediction beside the steps that were measured
    python -m bench draw                                      # the pictures of README.md and docs/, from records

Prints tables and, last, one JSON line with the numbers, the hardware and the versions. With --out FILE heads, decode,
exact, kernels and tests keep that line in a file as it grows, and a run that was stopped goes on from there.
"""

import json
import sys
from functools import partial
from pathlib import Path

from bench import Record, decoding, draw, exact, gpu, kinds, launches, machine, operations, report, roofline, static
from clover import MAX_TREE
from generate import Sampling, check
from model import InputError
from tools import ranks
from tools.cli import DEMO, Parser, add_model_flags, command
from tools.tune import PREFIX
from training.common import add_data_flag

NUMBERS = {  # flags: least, most, help
    "prompts": (1, 10**6, "held-out ones; with decode, a larger batch takes as many as it has slots"),
    "prompt_length": (1, 10**6, "tokens of each prompt"),
    "max_new_tokens": (1, 10**6, "of each prompt"),
    "batch_sizes": (1, 1024, "sequences decoded together"),
    "tree_sizes": (1, MAX_TREE, "nodes; with decode, the sizes to count tokens per step for, or to time"),
    "tree_size": (1, MAX_TREE, "for all heads but the last; default: the best of those above one node"),
    "steps": (1, 10**6, "of training, each kind"),
    "runs": (1, 10**6, "paired runs, of which the medians count; default: 3, with --random-weights 5"),
    "prefixes": (0, 2**20, "committed tokens"),
    "capacity": (0, 2**20, "tokens of the KV cache, if prefix and tree need fewer"),
    "rows": (1, 4096, "hidden states projected at once"),
    "slice": (1, len(gpu.SLICES), "the slice to run; default: all, one after another"),
    "minutes": (1, 9, "that a slice may take"),
    "prefix": (0, 2**20, "tokens in the cache of each sequence"),
}


def add_numbers(parser, **defaults):
    """Flags of NUMBERS; those with a list as default take several values."""
    for name, default in defaults.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, nargs="+" if isinstance(default, list) else None,
                            default=default, help=NUMBERS[name][2])


def add_decoding_flags(parser, **defaults):
    add_model_flags(parser)
    add_data_flag(parser)
    parser.add_argument("--heads", nargs="+", default=[str(DEMO / "medusa"), str(DEMO / "clover")],
                        help="folders of draft heads; with decode, the last draft with lookup and may be none")
    add_out(parser)
    add_numbers(parser, prompt_length=64, max_new_tokens=128, **defaults)


def add_out(parser):
    parser.add_argument("--out", metavar="FILE", help="keep the numbers here, and go on from what is there")


def parse(argv):
    parser = Parser("Measures decoding, draft heads and kernels.", prog="python -m bench")
    what = parser.add_subparsers(dest="what", required=True)
    heads = what.add_parser("heads", help="heads against each other and against plain decoding")
    add_decoding_flags(heads, prompts=50, batch_sizes=[1], tree_sizes=[5, 17], steps=500)
    heads.add_argument("--train", metavar="DIR", help="train --kinds into DIR first, and measure those")
    heads.add_argument("--base", choices=kinds.BASES, help="with --train, train this model first, and heads for it")
    heads.add_argument("--kinds", nargs="+", default=list(kinds.KINDS), choices=kinds.KINDS, help="to train")
    heads.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    decode = what.add_parser("decode", help="plain decoding, heads, lookup and transformers over batch sizes")
    sizes = [1, 2, 4, 8, 16, 32, 64]
    add_decoding_flags(decode, prompts=16, batch_sizes=sizes, tree_sizes=sizes, tree_size=None, runs=None)
    decode.add_argument("--text", choices=decoding.TEXTS, default="heldout", help="of the prompts; rename: held-out "
                        "text and its beginning once more with a name changed, as when editing")
    decode.add_argument("--temperature", type=float, default=0.0)
    decode.add_argument("--no-graph", action="store_true", help="on CUDA, run each step eagerly")
    decode.add_argument("--random-weights", choices=decoding.SIZES, help="time its steps, on a CPU beside llama.cpp "
                        "and transformers where these are installed")
    decode.add_argument("--draft-vocabulary", type=int, metavar="N", help="with --random-weights, the heads draft "
                        f"among the first N ids, 0: all; default: {decoding.FEW_TOKENS} where there are twice as many")
    timed = what.add_parser("kernels", help="kernels against the memory's bandwidth and other code")
    timed.add_argument("--static", action="store_true", help="only compile, for four targets; needs no GPU")
    timed.add_argument("--operations", nargs="+", default=list(operations.OPERATIONS), choices=operations.OPERATIONS,
                       help="what to time")
    timed.add_argument("--heads", nargs="+", default=["8b", "70b"], choices=operations.HEADS,
                       help="the models whose attention heads are taken")
    timed.add_argument("--no-flex", action="store_true", help="leave out FlexAttention, which compiles for every shape")
    add_out(timed)
    add_numbers(timed, batch_sizes=[1, 8, 32], prefixes=[512, 8192, 32768], capacity=0, tree_sizes=[1, 8, 16, 64],
                rows=[1, 8, 16, 64])
    add_others(what)
    args = parser.parse_args(argv)
    if args.what == "decode":
        args.runs = (5 if args.random_weights else 3) if args.runs is None else args.runs
    check_flags(args)
    return args


def add_others(what):
    """The flags of the commands that measure nothing themselves."""
    tests = what.add_parser("tests", help="pytest -m gpu, its outcomes kept as it goes")
    tests.add_argument("files", nargs="*", default=["tests"], help="for pytest")
    add_out(tests)
    exactness = what.add_parser("exact", help="on a CPU, what texts that rounding never changes cost in bfloat16")
    exactness.add_argument("--random-weights", default="360m", choices=decoding.SIZES, help="of this model's sizes")
    add_out(exactness)
    add_numbers(exactness, prefixes=[256, 2000], tree_sizes=[1, 4, 16], runs=5)
    counted = what.add_parser("launches", help="how many launches a step takes, without a GPU")
    counted.add_argument("--model", default=str(DEMO), metavar="DIR", help="a checkpoint folder")
    counted.add_argument("--heads", default=str(DEMO / "clover"), metavar="DIR", help="draft heads")
    add_numbers(counted, tree_sizes=[1, 5, 16, 64])
    slices = what.add_parser("gpu", help="all that only a GPU can tell, in slices")
    slices.add_argument("--out", required=True, metavar="DIR", help="for the records; what is there is not run again")
    add_numbers(slices, slice=None, minutes=9)
    tables = what.add_parser("report", help="Markdown tables of the records in a folder")
    tables.add_argument("folder")
    drawn = what.add_parser("draw", help="the pictures of README.md and docs/, from the records and from a saved run")
    drawn.add_argument("--out", default="docs/img", metavar="DIR", help="for the pictures")
    drawn.add_argument("--results", default="bench/results", metavar="DIR", help="the records")
    drawn.add_argument("--run", default="docs/img/run.json", metavar="FILE",
                       help="what python generate.py --prompt TEXT --json --show-tree printed")
    predicted = what.add_parser("roofline", help="predicts what speculation gains, from bytes and FLOPs")
    predicted.add_argument("--model", default="8b", help=f"a checkpoint folder, or {', '.join(decoding.SIZES)}")
    predicted.add_argument("--gpu", default="h200", type=str.lower, choices=roofline.GPUS)
    predicted.add_argument("--heads", default=str(DEMO / "clover"), metavar="DIR",
                           help="draft heads, whose heads.json says how often a guess is accepted")
    predicted.add_argument("--acceptance", type=float, metavar="X",
                           help="instead: draft a chain, each guess of which is accepted with this chance")
    predicted.add_argument("--temperature", type=float, default=0.0)
    predicted.add_argument("--plot", metavar="FILE", help="draw the speed-up over the batch size; needs matplotlib")
    predicted.add_argument("--check", metavar="DIR", help="hold the prediction against the steps measured there")
    add_numbers(predicted, batch_sizes=[1, 2, 4, 8, 16, 32, 64, 128, 256], tree_sizes=[2, 4, 8, 16, 32, 64],
                prefix=PREFIX)


def check_flags(args):
    """Raises InputError for numbers out of range, and for heads that a table could not tell apart."""
    for name, (low, high, _) in NUMBERS.items():
        values = getattr(args, name, None)
        for value in values if isinstance(values, list) else [] if values is None else [values]:
            check(name.replace("_", " "), value, low, high, whole=True)
    for temperature in getattr(args, "temperatures", [getattr(args, "temperature", 0.0)]):
        Sampling(temperature)
    if args.what in ("heads", "decode"):
        check_names([Path(path).name for path in args.heads], args.what)
    if getattr(args, "base", None) and not args.train:
        raise InputError("--base needs --train DIR, the folder to train in")
    if getattr(args, "draft_vocabulary", None) is not None and not args.random_weights:
        raise InputError("--draft-vocabulary needs --random-weights SIZE; train_heads.py gives trained heads theirs")
    if getattr(args, "acceptance", None) is not None:
        check("acceptance", args.acceptance, 0, 1)


def check_names(names, what):
    """Raises InputError for folders of heads that the rows of a table could not tell apart."""
    others = set(names[:-1]) if what == "decode" else set()
    if len({"plain", "lookup", *names}) < len(names) + 2 or "heads" in others:
        raise InputError("two of the heads folders have the same name, or one is called plain, heads or lookup; rename "
                         "one, to tell their rows apart")
    if "none" in others:
        raise InputError("of --heads only the last can be none, which drafts by lookup alone")


def bench_static(args):
    record = Record(args.out, bench="kernels-static")
    record.update(static.bench(args))
    return record.done()


def bench_decode(args, argv):
    with ranks.joined(args, argv) as group:
        return (decoding.bench_random if args.random_weights else decoding.bench)(args, group)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    commands = dict(decode=partial(bench_decode, argv=argv), exact=exact.bench, heads=kinds.bench,
                    kernels=operations.bench, tests=gpu.bench_tests, gpu=gpu.bench, launches=launches.bench,
                    report=report.bench, roofline=roofline.bench, draw=draw.bench)
    bench = commands[args.what]
    if args.what == "kernels" and args.static:
        bench = bench_static
    result = bench(args)
    if args.what not in ("report", "draw"):
        print(json.dumps(dict(result) | dict(machine=machine())))


if __name__ == "__main__":
    command(main)
