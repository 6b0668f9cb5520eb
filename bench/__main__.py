"""Measures decoding, draft heads and kernels, each against others in the same run. Prints tables
and, last, a JSON line with the numbers, the hardware and the versions. docs/cli.md has more."""

from pathlib import Path

from bench import ROOT, SIZES
from hf import is_gguf
from tools import flags
from training.flags import add_data_flag


def parse(argv=None):
    """Loads no torch, so that a typo is told at once."""
    parser = flags.Parser(__doc__, prog="python -m bench")
    add = parser.add_subparsers(dest="command", required=True).add_parser
    add_heads_flags(add("heads", help="heads against each other, lookup and plain decoding"))
    add_decode_flags(add("decode", help="plain decoding, heads, lookup and auto"))
    add_gpu_flags(add("gpu", help="everything that only a GPU can tell"))
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
    elif args.random_weights and (args.quantize or args.llama_cpp):
        parser.error("--quantize and --llama-cpp go without --random-weights")
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


def add_gpu_flags(parser):
    parser.add_argument("--out", required=True, metavar="DIR", help="where results.jsonl grows")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="default: all, see docs")
    flags.add_number(parser, "--seconds", 1, 86400, default=480, metavar="N",
                     help="for all parts; each has its share")
    parser.add_argument("--model", type=flags.model_path, metavar="MODEL", help="also decode the "
                        "chats of bench/prompts.jsonl by this model, with its heads")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, also on a CPU")


def main(args):
    import torch

    from bench import decoding, draw, finish, gpu, operations
    from model import InputError
    if args.command == "gpu" and not (args.dry_run or torch.cuda.is_available()):
        raise InputError("bench gpu needs a CUDA device; --dry-run takes tiny sizes on a CPU")
    run = dict(heads=decoding.bench_heads, decode=decoding.bench_decode, draw=draw.bench,
               gpu=gpu.bench)[args.command]
    result = (operations.bench_steps if getattr(args, "random_weights", None) else run)(args)
    if result:
        finish(args, result)


if __name__ == "__main__":
    ARGS = parse()
    from tools.errors import command
    with command():
        main(ARGS)
