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

import torch

import kernels
from bench import decoding, kinds, machine, operations, static
from clover import MAX_TREE
from generate import Sampling, check
from model import InputError
from tools.cli import DEMO, Parser, add_model_flags, command
from training.common import add_data_flag


def add_decoding_flags(parser, prompts, batch_sizes, tree_sizes):
    add_model_flags(parser)
    add_data_flag(parser)
    parser.add_argument("--heads", nargs="+", default=[str(DEMO / "medusa"), str(DEMO / "clover")],
                        help="folders of draft heads")
    parser.add_argument("--prompts", type=int, default=prompts,
                        help="held-out ones; with decode, a larger batch takes as many as it has slots")
    parser.add_argument("--prompt-length", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=batch_sizes)
    parser.add_argument("--tree-sizes", type=int, nargs="+", default=tree_sizes,
                        help="nodes; with decode, the sizes to count tokens per step for, or to time")


def add_kernel_flags(parser):
    operation_names = ("attention", "projections", "commit")
    parser.add_argument("--static", action="store_true", help="only compile, for four targets; needs no GPU")
    parser.add_argument("--operations", nargs="+", default=list(operation_names), choices=operation_names,
                        help="what to time")
    parser.add_argument("--heads", nargs="+", default=["8b", "70b"], choices=tuple(operations.HEADS),
                        help="the models whose attention heads are taken")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32], help="sequences")
    parser.add_argument("--prefixes", type=int, nargs="+", default=[512, 8192, 32768], help="committed tokens")
    parser.add_argument("--capacity", type=int, default=0, help="tokens of the KV cache, if prefix and tree need fewer")
    parser.add_argument("--tree-sizes", type=int, nargs="+", default=[1, 8, 16, 64], help="nodes")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 64], help="hidden states projected at once")


def parse(argv):
    parser = Parser("Measures decoding, draft heads and kernels.", prog="python -m bench")
    what = parser.add_subparsers(dest="what", required=True)
    heads = what.add_parser("heads", help="heads against each other and against plain decoding")
    add_decoding_flags(heads, prompts=50, batch_sizes=[1], tree_sizes=[5, 17])
    heads.add_argument("--train", metavar="DIR", help="train --kinds into DIR first, and measure those")
    heads.add_argument("--kinds", nargs="+", default=list(kinds.KINDS), choices=tuple(kinds.KINDS), help="to train")
    heads.add_argument("--steps", type=int, default=500, help="of training, each kind")
    heads.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    decode = what.add_parser("decode", help="plain decoding, heads and transformers over batch sizes")
    add_decoding_flags(decode, prompts=16, batch_sizes=[1, 2, 4, 8, 16, 32, 64], tree_sizes=[1, 2, 4, 8, 16, 32, 64])
    decode.add_argument("--tree-size", type=int, help="for all heads; default: the best of those above one node")
    decode.add_argument("--temperature", type=float, default=0.0)
    decode.add_argument("--runs", type=int, default=3, help="paired runs, of which the medians count")
    decode.add_argument("--no-graph", action="store_true", help="on CUDA, run each step eagerly")
    decode.add_argument("--random-weights", choices=tuple(decoding.SIZES), help="time its steps")
    add_kernel_flags(what.add_parser("kernels", help="kernels against the memory's bandwidth and other code"))
    args = parser.parse_args(argv)
    check_flags(args)
    return args


def check_flags(args):
    """Raises InputError for numbers out of range."""
    batch_limit = 1024 if args.what == "kernels" else 2**16
    limits = dict(tree_sizes=(1, MAX_TREE), tree_size=(1, MAX_TREE), batch_sizes=(1, batch_limit), prefixes=(0, 2**20),
                  rows=(1, 4096), capacity=(0, 2**20), prompts=(1, 10**6), prompt_length=(1, 10**6),
                  max_new_tokens=(1, 10**6), steps=(1, 10**6), runs=(1, 10**6))
    for name, (low, high) in limits.items():
        values = getattr(args, name, None)
        for value in values if isinstance(values, list) else [] if values is None else [values]:
            check(name.replace("_", " "), value, low, high, whole=True)
    for temperature in getattr(args, "temperatures", [getattr(args, "temperature", 0.0)]):
        Sampling(temperature)
    if args.what != "kernels" and len({Path(path).name for path in args.heads}) < len(args.heads):
        raise InputError("two of the heads folders have the same name; rename one, to tell their rows apart")


def run_kernels(args):
    if args.static:
        if not kernels.HAS_TRITON:
            raise InputError("--static needs triton, which is not installed; pip install triton")
        return dict(bench="kernels-static", table=static.static_table())
    if not torch.cuda.is_available():
        raise InputError("timing kernels needs a CUDA device, and there is none; --static only compiles them")
    return dict(bench="kernels", **operations.bench(args))


def main(argv=None):
    args = parse(sys.argv[1:] if argv is None else argv)
    decode = decoding.bench_random if getattr(args, "random_weights", None) else decoding.bench
    result = dict(kernels=run_kernels, heads=kinds.bench, decode=decode)[args.what](args)
    print(json.dumps(result | dict(machine=machine())))


if __name__ == "__main__":
    command(main)
