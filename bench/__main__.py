"""Measures decoding, draft heads and kernels: same inputs, same run, against each other and against the limits.

    python bench.py heads                                     # demo/clover and demo/medusa on demo/
    python bench.py heads --model DIR --heads DIR DIR ...     # others; the first is what the rest is compared with
    python bench.py heads --train out/bench                   # the four presets and Clover's ablations, trained alike
    python bench.py decode                                    # plain, Medusa, Clover and transformers, over batch sizes
    python bench.py decode --random-weights 8b                # times of a step at a real model's sizes
    python bench.py kernels                                   # on a GPU: times against the memory's bandwidth
    python bench.py kernels --static                          # anywhere: registers, spills and shared memory

Prints tables and, last, one JSON line with the numbers, the hardware and the versions.
"""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

from bench import decoding as bench_decode
from bench import kinds as bench_heads
from bench import operations as bench_kernels
import kernels
from model import InputError
from clover import MAX_TREE
from generate import Sampling, check
from tools.cli import DEMO, Parser, add_model_flags, command
from training.run import add_data_flag


def machine():
    """What the numbers were measured on."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").is_file():
        names = [line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
        cpu = names[0] if names else cpu
    try:
        git = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(git, cwd=Path(__file__).parent.parent, capture_output=True, text=True).stdout.strip() or None
    except OSError:  # no git: the numbers still count
        commit = None
    return dict(cpu=cpu, cores=os.cpu_count(), threads=torch.get_num_threads(),
                gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                python=platform.python_version(), torch=torch.__version__,
                triton=kernels.triton.__version__ if kernels.HAS_TRITON else None, commit=commit)


def run_kernels(args):
    if args.static:
        if not kernels.HAS_TRITON:
            raise InputError("--static compiles the kernels and needs triton, which is not installed; pip install triton")
        return dict(bench="kernels-static", table=bench_kernels.static_table())
    if not torch.cuda.is_available():
        raise InputError("bench.py kernels needs a CUDA device, and there is none; --static compiles the kernels without")
    return dict(bench="kernels", **bench_kernels.bench(args))


def parse(argv):
    parser = Parser("Measures draft heads and kernels against each other and against the limits.")
    what = parser.add_subparsers(dest="what", required=True)
    heads = what.add_parser("heads", help="heads against each other and against plain decoding")
    add_model_flags(heads)
    heads.add_argument("--heads", nargs="+", default=[str(DEMO / "medusa"), str(DEMO / "clover")], help="folders of draft heads")
    heads.add_argument("--train", metavar="DIR", help="train --kinds into DIR first, and measure those")
    heads.add_argument("--kinds", nargs="+", default=list(bench_heads.KINDS), choices=tuple(bench_heads.KINDS), help="of heads to train")
    heads.add_argument("--steps", type=int, default=500, help="of training, each kind")
    add_data_flag(heads)
    heads.add_argument("--prompts", type=int, default=50)
    heads.add_argument("--prompt-length", type=int, default=64, help="tokens of each held-out prompt")
    heads.add_argument("--max-new-tokens", type=int, default=128)
    heads.add_argument("--batch-sizes", type=int, nargs="+", default=[1])
    heads.add_argument("--tree-sizes", type=int, nargs="+", default=[5, 17])
    heads.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    decode = what.add_parser("decode", help="plain decoding, heads and transformers over batch sizes, against the memory's bandwidth")
    add_model_flags(decode)
    decode.add_argument("--heads", nargs="+", default=[str(DEMO / "medusa"), str(DEMO / "clover")], help="folders of draft heads")
    add_data_flag(decode)
    decode.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    decode.add_argument("--tree-size", type=int, help="for all heads; default: the best of more than one node, as measured here")
    decode.add_argument("--tree-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64],
                        help="sizes to count tokens per step for, or with --random-weights to time")
    decode.add_argument("--prompts", type=int, default=16, help="held-out ones; a larger batch takes as many as it has slots")
    decode.add_argument("--prompt-length", type=int, default=64, help="tokens of each")
    decode.add_argument("--max-new-tokens", type=int, default=128)
    decode.add_argument("--temperature", type=float, default=0.0)
    decode.add_argument("--runs", type=int, default=3, help="paired runs, of which the medians count")
    decode.add_argument("--no-graph", action="store_true", help="on CUDA, run each step eagerly")
    decode.add_argument("--random-weights", choices=tuple(bench_decode.SIZES), help="time steps at these sizes, without a checkpoint")
    decode.add_argument("--plot", metavar="FILE", help="draw the tables (needs matplotlib)")
    kernel = what.add_parser("kernels", help="kernels against the memory's bandwidth and other implementations")
    kernel.add_argument("--static", action="store_true", help="compile for four targets, needs no GPU; nothing is timed")
    kernel.add_argument("--operations", nargs="+", default=["attention", "projections", "commit"],
                        choices=("attention", "projections", "commit"), help="what to time")
    kernel.add_argument("--heads", nargs="+", default=["8b", "70b"], choices=tuple(bench_kernels.HEADS),
                        help="of which model")
    kernel.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32], help="sequences")
    kernel.add_argument("--prefixes", type=int, nargs="+", default=[512, 8192, 32768], help="committed tokens")
    kernel.add_argument("--capacity", type=int, default=0, help="rows of the KV cache, where prefix and tree need no more")
    kernel.add_argument("--tree-sizes", type=int, nargs="+", default=[1, 8, 16, 64], help="nodes")
    kernel.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 64], help="hidden states projected at once")
    args = parser.parse_args(argv)
    check_all("tree size", args.tree_sizes, 1, MAX_TREE)
    if args.what == "kernels":
        check_all("batch size", args.batch_sizes, 1, 1024)
        check_all("prefix", args.prefixes, 0, 2**20)
        check_all("rows", args.rows, 1, 4096)
        check("capacity", args.capacity, 0, 2**20, whole=True)
        return args
    for name in ("prompts", "prompt_length", "max_new_tokens", "steps", "runs"):
        check(name.replace("_", " "), getattr(args, name, 1), 1, 10**6, whole=True)
    check_all("batch size", getattr(args, "batch_sizes", []), 1, 2**16)
    check("tree size", getattr(args, "tree_size", None) or 1, 1, MAX_TREE, whole=True)
    for temperature in [args.temperature] if args.what == "decode" else args.temperatures:
        Sampling(temperature)
    if len({Path(path).name for path in args.heads}) < len(args.heads):
        raise InputError("two of the heads folders have the same name; rename one, so that the table can tell them apart")
    return args


def check_all(name, values, low, high):
    for value in values:
        check(name, value, low, high, whole=True)


def main(argv=None):
    args = parse(sys.argv[1:] if argv is None else argv)
    if args.what == "decode":
        result = bench_decode.bench_random(args) if args.random_weights else bench_decode.bench(args)
    else:
        result = bench_heads.bench(args) if args.what == "heads" else run_kernels(args)
    print(json.dumps(result | dict(machine=machine())))


if __name__ == "__main__":
    command(main)
