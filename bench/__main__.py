"""Measures decoding, draft heads and kernels, each against others in the same run. Prints tables
and, last, a JSON line with the numbers, the hardware and the versions. docs/cli.md has more."""

from pathlib import Path

from bench import ROOT
from bench.sizes import SIZES
from tools import flags
from training.flags import PRESETS, add_data_flag

OPERATIONS = ["attention", "flex", "topk", "quantized"]
HELDOUT = dict(heads=50, decode=16)  # prompts, without --chats


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
    if args.command in HELDOUT:
        check_chats_flag(parser, args)
    if args.command == "heads":
        args.heads = heads_folders(args.heads)
        if len({Path(x).name for x in args.heads}) < len(args.heads):
            parser.error("two of the heads folders have the same name; rename one")
    if getattr(args, "random_weights", None) and (args.quantize or args.heads_of_original):
        parser.error("--quantize and --heads-of-original go without --random-weights")
    if args.out and not Path(args.out).absolute().parent.is_dir():
        parser.error(f"--out {args.out}: its folder does not exist")
    return args


def check_chats_flag(parser, args):
    """Sets how many prompts there are by default."""
    if not args.chats:
        args.prompts = args.prompts or HELDOUT[args.command]
    elif args.data:
        parser.error("--chats and --data are both prompts; give one of them")
    elif not args.chats.endswith(".jsonl"):
        parser.error(f"--chats {args.chats}: expected a .jsonl file, such as bench/prompts.jsonl")


def heads_folders(paths):
    """Folders of heads; of a path that holds such folders, these, the presets first."""
    rank = lambda path: ((*PRESETS, path.name).index(path.name), path.name)
    folders = []
    for path in map(Path, paths):
        folders += sorted((file.parent for file in path.glob("*/heads.json")), key=rank) or [path]
    return list(map(str, folders))


def add_numbers(parser, flag, low, high, kind=int, **options):
    flags.add_number(parser, flag, low, high, kind, nargs="+", metavar="N", **options)


def add_shape_flags(parser, batch_sizes, tree_sizes):
    add_numbers(parser, "--batch-sizes", 1, 1024, default=batch_sizes, help="sequences together")
    add_numbers(parser, "--tree-sizes", 1, 64, default=tree_sizes, help="nodes of a drafted tree")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON line to this file")


def add_decoding_flags(parser, command, runs):
    flags.add_model_flags(parser)
    flags.add_quantize_flag(parser)
    flags.add_original_heads_flag(parser)
    add_data_flag(parser)
    parser.add_argument("--chats", metavar="FILE", help="answer these chats, such as "
                        "bench/prompts.jsonl; default: continue held-out texts of --data")
    flags.add_number(parser, "--prompts", 1, 10**6, metavar="N",
                     help=f"default: {HELDOUT[command]}, or all of --chats")
    flags.add_number(parser, "--prompt-length", 1, 10**6, default=64, help="tokens of each prompt")
    flags.add_number(parser, "--max-new-tokens", 1, 10**6, default=128, help="of each prompt")
    flags.add_number(parser, "--runs", 1, 10**6, default=runs, help="rounds; medians count")


def add_heads_flags(parser):
    add_decoding_flags(parser, "heads", runs=1)
    add_shape_flags(parser, [1], [5, 17])
    parser.add_argument("--heads", nargs="+", metavar="DIR",
                        help="folders of draft heads, or one that holds them",
                        default=[str(flags.DEMO / "medusa"), str(flags.DEMO / "clover")])
    add_numbers(parser, "--temperatures", 0.0, 1e4, float, default=[0.0, 0.8], help="0: greedy")


def add_decode_flags(parser):
    add_decoding_flags(parser, "decode", runs=3)
    add_shape_flags(parser, [1, 8, 32], [1, 4, 16])
    parser.add_argument("--heads", metavar="DIR|none", default=str(flags.DEMO / "clover"))
    flags.add_number(parser, "--temperature", 0.0, 1e4, float, default=0.0, help="0: greedy")
    parser.add_argument("--random-weights", choices=SIZES, help="time steps of --tree-sizes nodes")


def add_kernels_flags(parser):
    add_shape_flags(parser, [1, 8, 32], [1, 8, 16, 64])
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=["8b", "70b"])
    add_numbers(parser, "--prefixes", 0, 2**20, default=[512, 8192, 32768], help="cached tokens")


def main(args):
    import torch

    from bench import decoding, draw, finish, gpu, operations, steps
    from model import InputError
    if args.command in ("kernels", "gpu") and not torch.cuda.is_available():
        raise InputError(f"bench {args.command} needs a CUDA device")
    run = dict(heads=decoding.bench_heads, decode=decoding.bench, kernels=operations.bench,
               gpu=gpu.bench, draw=draw.bench)[args.command]
    result = (steps.bench if getattr(args, "random_weights", None) else run)(args)
    if result:
        finish(args, result)


if __name__ == "__main__":
    ARGS = parse()
    from tools.cli import command
    command(lambda: main(ARGS))
