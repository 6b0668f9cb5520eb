"""Measures decoding and kernels beside baselines in the same run. Prints tables, then a JSON line
with results, hardware and versions. docs/cli.md has more."""

import json
import os
from pathlib import Path

from bench import CODING, MODEL_SIZES
from hf.paths import is_gguf, is_repository
from tools import flags
from training.flags import add_data_flag


def parse(argv=None):
    parser = flags.Parser(__doc__, prog="python -m bench")
    add = parser.add_subparsers(dest="command", required=True).add_parser
    add_decode_flags(add("decode", help="compare drafters with plain decoding"))
    add_cpu_flags(add("cpu", help="measure the CPU figures of README.md and docs/results.md"))
    add_gpu_flags(add("gpu", help="measure chats, steps and kernels on a GPU"))
    add_precision_flags(add("precision", help="compare next-token distributions with float32's"))
    add("draw", help="draw the pictures of README.md and docs/results.md")
    args = parser.parse_args(argv)
    if args.command == "decode":
        check_decode_flags(parser, args)
    folder = args.command != "draw" and args.out and Path(args.out).absolute().parent
    if folder and not os.access(folder, os.W_OK):
        parser.error(f"--out {args.out}: its folder does not exist, or cannot be written")
    return args


def add_common_flags(parser):
    flags.add_model_flags(parser)
    parser.add_argument("--llama-cpp", action="store_true", help="also run llama.cpp on the same "
                        "GGUF file; needs llama-cpp-python")
    parser.add_argument("--out", type=flags.home, metavar="FILE",
                        help="also write the JSON line to this file")


def add_decode_flags(parser):
    add_common_flags(parser)
    input_of = parser.add_mutually_exclusive_group()
    add_data_flag(input_of)
    input_of.add_argument("--chats", type=flags.home, metavar="FILE", help="answer these chats, "
                          "such as bench/prompts.jsonl; default: continue held-out texts of --data")
    input_of.add_argument("--random-weights", nargs="+", choices=MODEL_SIZES, metavar="SIZE",
                          help="time single steps instead, at the sizes of real models: "
                          f"{', '.join(MODEL_SIZES)}")
    parser.add_argument("--drafters", type=flags.home, nargs="+", metavar="DRAFTER",
                        help="lookup, heads (the model's own), a folder of heads, or the last "
                        "two with +lookup; default: heads lookup heads+lookup, or what there is")
    several = dict(nargs="+", metavar="N")
    count = flags.at_least(1)
    add = parser.add_argument
    add("--tree-sizes", type=flags.at_least(1, auto=True), **several,
        help="nodes per tree; default: 5 17 auto, with --random-weights 2 4 8 16")
    add("--batch-sizes", type=count, default=[1], **several, help="default: 1")
    add("--temperatures", type=float, default=[0.0], **several, help="default: 0, greedy")
    add("--prompts", type=count, metavar="N",
        help="how many prompts; default: all of --chats, else 16 or the largest batch size")
    add("--prompt-tokens", type=count, default=64, metavar="N",
        help="length of prompts from --data; default: 64")
    add("--max-new-tokens", type=count, default=128, metavar="N", help="per prompt; default: 128")
    add("--runs", type=count, default=3, metavar="N", help="rounds, for medians; default: 3")


def check_decode_flags(parser, args):
    """Rejects flags that exclude each other, and sets defaults that depend on other flags."""
    args.tree_sizes = args.tree_sizes or ([2, 4, 8, 16] if args.random_weights else [5, 17, None])
    names = [Path(drafter).name for drafter in args.drafters or ()]
    if len({*names}) < len(names):
        parser.error("two --drafters have the same name; rename a folder")
    if args.llama_cpp and not (is_repository(args.model) or is_gguf(Path(args.model))):
        parser.error("--llama-cpp needs a GGUF file; give one as --model")


def add_cpu_flags(parser):
    add = parser.add_argument
    add("--out", type=flags.home, required=True, metavar="FILE", help="a JSON line for each part")
    add("--chats", type=flags.home, metavar="FILE", help="also answer these, such as Spec-Bench's")
    add("--parts", nargs="+", metavar="PART", help="measure only these and keep the others' lines "
        "in --out; default: all, as they are printed")
    add("--coder", type=flags.model_path, metavar="FILE", help="also measure this larger model on "
        "bench/coding.jsonl, such as Qwen2.5-Coder-1.5B-Instruct as GGUF")
    add("--llama-cpp", action="store_true", help="beside llama.cpp; needs llama-cpp-python")


def add_gpu_flags(parser):
    add = parser.add_argument
    add("--out", type=flags.home, required=True, metavar="DIR", help="adds to results.jsonl there")
    parts = ["smollm2", "steps", "kernels"]
    add("--parts", nargs="+", choices=parts, default=parts, metavar="PART",
        help=f"some of {', '.join(parts)}; default: all")
    add("--model", type=flags.model_path, metavar="MODEL",
        help="answers chats; default: smollm2, with --dry-run demo/")
    add("--heads", type=flags.home, metavar="DIR", help="its draft heads; default: the model's own")
    add("--dry-run", action="store_true", help="use tiny sizes, also on a CPU")


def add_precision_flags(parser):
    add_common_flags(parser)
    add = parser.add_argument
    count = flags.at_least(1)
    add("--chats", type=flags.home, default=str(CODING), metavar="FILE",
        help="answer these; default: bench/coding.jsonl")
    add("--prompts", type=count, default=12, metavar="N", help="how many of them; default: 12")
    add("--max-new-tokens", type=count, default=32, metavar="N",
        help="length of an answer, up to 512; default: 32")


def main(args):
    from bench import cpu, draw, gpu, record
    from common.files import save_lines
    from generate import Sampling
    from model import MAX_TREE, check
    if args.command == "decode":  # check all values before measuring any
        for temperature in args.temperatures:
            Sampling(temperature)
        for size in filter(None, args.tree_sizes):
            check("tree size", size, 1, MAX_TREE, whole=True)
    if args.command in ("decode", "precision"):
        line = record(args, cpu.measure(args))
        print(json.dumps(line), flush=True)
        if args.out:
            save_lines(args.out, [line])
    elif args.command == "cpu":
        cpu.bench(args, parse)
    elif args.command == "gpu":
        gpu.bench(args)
    else:
        draw.bench()


if __name__ == "__main__":
    arguments = parse()  # before torch is loaded
    from tools.errors import command
    with command():
        main(arguments)
