"""Measures decoding, draft heads and kernels, each against others in the same run. Prints tables
and, last, a JSON line with the numbers, the hardware and the versions. docs/cli.md has more."""

import subprocess
import sys
from pathlib import Path

from bench import ROOT, SIZES
from hf import is_gguf
from tools import flags
from training.flags import add_data_flag

OPERATIONS = ["attention", "flex", "topk", "quantized"]
RESULT = "--out {out}/{name}.json"
STEPS = f"bench decode {RESULT} --batch-sizes 1 8 32 --tree-sizes 1 4 8 16 64 --random-weights"
GPU_COMMANDS = {  # name: arguments of python -m
    "tests": "pytest -m gpu --junitxml={out}/tests.xml",
    "kernels": f"bench kernels --models 8b {RESULT}",
    "steps-8b": f"{STEPS} 8b", "steps-7b": f"{STEPS} 7b", "steps-70b-layer": f"{STEPS} 70b-layer",
    "decode": f"bench decode {RESULT} --batch-sizes 1 8 32 64",
    "heads": f"bench heads {RESULT} --prompts 50 --temperatures 0 --batch-sizes 1 8 32",
}


def parse(argv=None):
    """Loads no torch, so that a typo is told at once."""
    parser = flags.Parser(__doc__, prog="python -m bench")
    add = parser.add_subparsers(dest="command", required=True).add_parser
    add_heads_flags(add("heads", help="heads against each other, lookup and plain decoding"))
    add_decode_flags(add("decode", help="plain decoding, heads, lookup and auto"))
    add_kernels_flags(add("kernels", help="kernels against the memory's bandwidth and torch"))
    gpu = add("gpu", help="everything that only a GPU can tell")
    gpu.add_argument("--out", required=True, metavar="DIR", help="for the results")
    draw = add("draw", help="pictures of README.md and docs/, tables by kind of prompts")
    draw.add_argument("--out", default=ROOT / "docs" / "img", metavar="DIR")
    args = parser.parse_args(argv)
    if args.command in ("heads", "decode"):
        check_decoding_flags(parser, args)
    if args.out and not Path(args.out).absolute().parent.is_dir():
        parser.error(f"--out {args.out}: its folder does not exist")
    return args


def check_decoding_flags(parser, args):
    """Checks what argparse cannot know: which flags exclude others."""
    if args.command == "heads":
        names = [Path(path).name for path in args.heads]
        if len({*names}) < len(names):
            parser.error("two of the heads folders have the same name; rename one")
    elif args.random_weights and (args.quantize or args.heads_of_original or args.llama_cpp):
        parser.error("--quantize, --heads-of-original and --llama-cpp go without --random-weights")
    elif args.llama_cpp and not (is_gguf(Path(args.model)) and args.batch_sizes == [1]):
        parser.error("--llama-cpp decodes a GGUF file, one text at a time; give one as --model, "
                     "and --batch-sizes 1")
    if args.chats and args.data:
        parser.error("--chats and --data are both prompts; give one of them")
    if args.chats and not args.chats.endswith(".jsonl"):
        parser.error(f"--chats {args.chats}: expected a .jsonl file, such as bench/prompts.jsonl")


def add_numbers(parser, flag, low, high, kind=int, **options):
    flags.add_number(parser, flag, low, high, kind, nargs="+", metavar="N", **options)


def add_shape_flags(parser, batch_sizes, tree_sizes):
    add_numbers(parser, "--batch-sizes", 1, 1024, default=batch_sizes, help="sequences together")
    add_numbers(parser, "--tree-sizes", 1, 64, default=tree_sizes, help="nodes of a drafted tree")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON line to this file")


def add_decoding_flags(parser, runs, batch_sizes, tree_sizes):
    add_shape_flags(parser, batch_sizes, tree_sizes)
    flags.add_model_flags(parser)
    flags.add_quantize_flag(parser)
    flags.add_original_heads_flag(parser)
    add_data_flag(parser)
    parser.add_argument("--chats", metavar="FILE", help="answer these chats, such as "
                        "bench/prompts.jsonl; default: continue held-out texts of --data")
    number = lambda flag, **options: flags.add_number(parser, flag, 1, 10**6, **options)
    number("--prompts", metavar="N", help="default: 16, or the largest batch; all of --chats")
    number("--prompt-length", default=64, help="tokens of each prompt")
    number("--max-new-tokens", default=128, help="of each prompt")
    number("--runs", default=runs, help="rounds; medians count")


def add_heads_flags(parser):
    add_decoding_flags(parser, 1, [1], [5, 17])
    parser.add_argument("--heads", nargs="+", metavar="DIR",
                        help="folders of draft heads; the others are compared to the first",
                        default=[str(flags.DEMO / "medusa"), str(flags.DEMO / "clover")])
    add_numbers(parser, "--temperatures", 0.0, 1e4, float, default=[0.0, 0.8], help="0: greedy")


def add_decode_flags(parser):
    add_decoding_flags(parser, 3, [1, 8, 32], [1, 4, 16])
    parser.add_argument("--heads", metavar="DIR|none", default=str(flags.DEMO / "clover"))
    flags.add_number(parser, "--temperature", 0.0, 1e4, float, default=0.0, help="0: greedy")
    parser.add_argument("--llama-cpp", action="store_true", help="also by llama.cpp on the same "
                        "GGUF file, plainly and with its n-grams; needs the package xllamacpp")
    parser.add_argument("--random-weights", choices=SIZES, help="time steps of --tree-sizes nodes")


def add_kernels_flags(parser):
    add_shape_flags(parser, [1, 8, 32], [1, 8, 16, 64])
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=["8b", "70b"])
    add_numbers(parser, "--prefixes", 0, 2**20, default=[512, 8192, 32768], help="cached tokens")


def bench_gpu(args):
    """`bench gpu`: runs each of GPU_COMMANDS that did not succeed before, which DIR/NAME.done
    tells, in a process of its own. Output goes to DIR/NAME.log, the result to DIR/NAME.json."""
    out = Path(args.out).absolute()
    out.mkdir(exist_ok=True)
    for name, command in GPU_COMMANDS.items():
        done = out / f"{name}.done"
        if not done.exists():
            words = [word.format(name=name, out=out) for word in command.split()]
            with open(out / f"{name}.log", "w") as log:
                code = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, stdout=log,
                                      stderr=log).returncode
            print(f"{name}: {f'failed, see {log.name}' if code else 'done'}", flush=True)
            if code == 0:
                done.touch()


def main(args):
    import torch

    from bench import decoding, draw, finish, operations
    from model import InputError
    if args.command in ("kernels", "gpu") and not torch.cuda.is_available():
        raise InputError(f"bench {args.command} needs a CUDA device")
    run = dict(heads=decoding.bench_heads, decode=decoding.bench_decode, draw=draw.bench,
               kernels=operations.bench_kernels, gpu=bench_gpu)[args.command]
    result = (operations.bench_steps if getattr(args, "random_weights", None) else run)(args)
    if result:
        finish(args, result)


if __name__ == "__main__":
    ARGS = parse()
    from tools.cli import command
    command(lambda: main(ARGS))
