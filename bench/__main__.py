"""Measures decoding, draft heads and kernels: same inputs, same run, against each other and against the limits.

    python -m bench heads                                     # demo/clover and demo/medusa on demo/
    python -m bench heads --model DIR --heads DIR DIR ...     # others; the rest is compared with the first
    python -m bench heads --train out/bench                   # the four presets and Clover's ablations, trained alike
    python -m bench decode                                    # plain, Medusa, Clover and transformers, over batch sizes
    python -m bench decode --random-weights 8b                # times of a step at a real model's sizes
    python -m bench kernels                                   # on a GPU: times against the memory's bandwidth
    python -m bench kernels --static                          # anywhere: registers, spills and shared memory

Prints tables and, last, one JSON line with the numbers, the hardware and the versions.
"""

import json
import sys
from pathlib import Path

from bench import decoding, kinds, machine, operations, static
from clover import MAX_TREE
from generate import Sampling, check
from model import InputError
from tools.cli import DEMO, Parser, add_model_flags, command
from training.common import add_data_flag

NUMBERS = {  # flags: least, most, help
    "prompts": (1, 10**6, "held-out ones; with decode, a larger batch takes as many as it has slots"),
    "prompt_length": (1, 10**6, "tokens of each prompt"),
    "max_new_tokens": (1, 10**6, "of each prompt"),
    "batch_sizes": (1, 1024, "sequences decoded together"),
    "tree_sizes": (1, MAX_TREE, "nodes; with decode, the sizes to count tokens per step for, or to time"),
    "tree_size": (1, MAX_TREE, "for all heads; default: the best of those above one node"),
    "steps": (1, 10**6, "of training, each kind"),
    "runs": (1, 10**6, "paired runs, of which the medians count"),
    "prefixes": (0, 2**20, "committed tokens"),
    "capacity": (0, 2**20, "tokens of the KV cache, if prefix and tree need fewer"),
    "rows": (1, 4096, "hidden states projected at once"),
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
                        help="folders of draft heads")
    add_numbers(parser, prompt_length=64, max_new_tokens=128, **defaults)


def parse(argv):
    parser = Parser("Measures decoding, draft heads and kernels.", prog="python -m bench")
    what = parser.add_subparsers(dest="what", required=True)
    heads = what.add_parser("heads", help="heads against each other and against plain decoding")
    add_decoding_flags(heads, prompts=50, batch_sizes=[1], tree_sizes=[5, 17], steps=500)
    heads.add_argument("--train", metavar="DIR", help="train --kinds into DIR first, and measure those")
    heads.add_argument("--kinds", nargs="+", default=list(kinds.KINDS), choices=kinds.KINDS, help="to train")
    heads.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    decode = what.add_parser("decode", help="plain decoding, heads and transformers over batch sizes")
    sizes = [1, 2, 4, 8, 16, 32, 64]
    add_decoding_flags(decode, prompts=16, batch_sizes=sizes, tree_sizes=sizes, tree_size=None, runs=3)
    decode.add_argument("--temperature", type=float, default=0.0)
    decode.add_argument("--no-graph", action="store_true", help="on CUDA, run each step eagerly")
    decode.add_argument("--random-weights", choices=decoding.SIZES, help="time its steps")
    timed = what.add_parser("kernels", help="kernels against the memory's bandwidth and other code")
    timed.add_argument("--static", action="store_true", help="only compile, for four targets; needs no GPU")
    timed.add_argument("--operations", nargs="+", default=list(operations.OPERATIONS), choices=operations.OPERATIONS,
                       help="what to time")
    timed.add_argument("--heads", nargs="+", default=["8b", "70b"], choices=operations.HEADS,
                       help="the models whose attention heads are taken")
    add_numbers(timed, batch_sizes=[1, 8, 32], prefixes=[512, 8192, 32768], capacity=0, tree_sizes=[1, 8, 16, 64],
                rows=[1, 8, 16, 64])
    args = parser.parse_args(argv)
    check_flags(args)
    return args


def check_flags(args):
    """Raises InputError for numbers out of range, and for heads that a table could not tell apart."""
    for name, (low, high, _) in NUMBERS.items():
        values = getattr(args, name, None)
        for value in values if isinstance(values, list) else [] if values is None else [values]:
            check(name.replace("_", " "), value, low, high, whole=True)
    for temperature in getattr(args, "temperatures", [getattr(args, "temperature", 0.0)]):
        Sampling(temperature)
    names = ["plain", *(Path(path).name for path in args.heads)]
    if args.what != "kernels" and len(set(names)) < len(names):
        raise InputError("two of the heads folders have the same name, or one is called plain; rename one, to tell "
                         "their rows apart")


def main(argv=None):
    args = parse(sys.argv[1:] if argv is None else argv)
    if args.what == "kernels":
        bench = static.bench if args.static else operations.bench
    elif args.what == "heads":
        bench = kinds.bench
    else:
        bench = decoding.bench_random if args.random_weights else decoding.bench
    print(json.dumps(bench(args) | dict(machine=machine())))


if __name__ == "__main__":
    command(main)
