"""Measures decoding, draft heads and kernels, each against others in the same run. Prints tables
and, last, one JSON line with the numbers, the hardware and the versions.

    python -m bench COMMAND --help     # docs/cli.md describes the commands
"""

from pathlib import Path

from bench import ROOT
from bench.sizes import SIZES
from tools import flags
from training.flags import add_data_flag

OPERATIONS = ["attention", "flex", "topk", "quantized"]


def parse(argv=None):
    """Loads no torch, so that a typo is told at once."""
    parser = flags.Parser(__doc__.split("\n\n")[0], prog="python -m bench")
    add = parser.add_subparsers(dest="command", required=True).add_parser
    add_heads_flags(add("heads", help="heads against each other, lookup and plain decoding"))
    add_decode_flags(add("decode", help="plain decoding, heads, lookup, auto and transformers"))
    add_kernels_flags(add("kernels", help="kernels against the memory's bandwidth and torch"))
    gpu = add("gpu", help="everything that only a GPU can tell")
    gpu.add_argument("--out", required=True, metavar="DIR", help="for the results")
    draw = add("draw", help="the pictures of README.md and docs/")
    draw.add_argument("--out", default=ROOT / "docs" / "img", metavar="DIR")
    args = parser.parse_args(argv)
    if args.command == "heads" and len({Path(x).name for x in args.heads}) < len(args.heads):
        parser.error("two of the heads folders have the same name; rename one")
    if getattr(args, "random_weights", None) and (args.quantize or args.heads_of_original):
        parser.error("--quantize and --heads-of-original go without --random-weights")
    if args.out and not Path(args.out).absolute().parent.is_dir():
        parser.error(f"--out {args.out}: its folder does not exist")
    return args


def add_numbers(parser, flag, low, high, kind=int, **options):
    flags.add_number(parser, flag, low, high, kind, nargs="+", metavar="N", **options)


def add_shape_flags(parser, batch_sizes, tree_sizes):
    add_numbers(parser, "--batch-sizes", 1, 1024, default=batch_sizes, help="sequences together")
    add_numbers(parser, "--tree-sizes", 1, 64, default=tree_sizes, help="nodes of a drafted tree")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON line to this file")


def add_decoding_flags(parser, prompts):
    flags.add_model_flags(parser)
    flags.add_quantize_flag(parser)
    flags.add_original_heads_flag(parser)
    add_data_flag(parser)
    flags.add_number(parser, "--prompts", 1, 10**6, default=prompts, help="held-out ones")
    flags.add_number(parser, "--prompt-length", 1, 10**6, default=64, help="tokens of each prompt")
    flags.add_number(parser, "--max-new-tokens", 1, 10**6, default=128, help="of each prompt")


def add_heads_flags(parser):
    add_decoding_flags(parser, prompts=50)
    add_shape_flags(parser, [1], [5, 17])
    parser.add_argument("--heads", nargs="+", metavar="DIR", help="folders of draft heads",
                        default=[str(flags.DEMO / "medusa"), str(flags.DEMO / "clover")])
    add_numbers(parser, "--temperatures", 0.0, 1e4, float, default=[0.0, 0.8], help="0: greedy")


def add_decode_flags(parser):
    add_decoding_flags(parser, prompts=16)
    add_shape_flags(parser, [1, 8, 32], [1, 4, 16])
    parser.add_argument("--heads", metavar="DIR|none", default=str(flags.DEMO / "clover"))
    flags.add_number(parser, "--temperature", 0.0, 1e4, float, default=0.0, help="0: greedy")
    flags.add_number(parser, "--runs", 1, 10**6, default=3, help="rounds; medians count")
    parser.add_argument("--random-weights", choices=SIZES,
                        help="time single steps of this size, with trees of --tree-sizes")


def add_kernels_flags(parser):
    add_shape_flags(parser, [1, 8, 32], [1, 8, 16, 64])
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS,
                        help="flex: attention beside FlexAttention, which compiles for each shape")
    parser.add_argument("--models", nargs="+", choices=SIZES, default=["8b", "70b"])
    add_numbers(parser, "--prefixes", 0, 2**20, default=[512, 8192, 32768], help="cached tokens")


def main(args):
    from bench import decoding, draw, finish, gpu, operations, steps
    run = dict(heads=decoding.bench_heads, decode=decoding.bench, kernels=operations.bench,
               gpu=gpu.bench, draw=draw.bench)[args.command]
    result = (steps.bench if getattr(args, "random_weights", None) else run)(args)
    if result:
        finish(result, args.out)


if __name__ == "__main__":
    ARGS = parse()
    from tools.cli import command
    command(lambda: main(ARGS))
