"""Measures decoding and kernels, each against others in the same run. Prints tables and, last, a
JSON line with the numbers, the hardware and the versions. docs/cli.md has more."""

from pathlib import Path

from bench import ROOT, SIZES
from hf.paths import default_heads, is_gguf
from tools import flags
from training.flags import add_data_flag


def parse(argv=None):
    parser = flags.Parser(__doc__, prog="python -m bench")
    add = parser.add_subparsers(dest="command", required=True).add_parser
    add_decode_flags(add("decode", help="drafters against each other and plain decoding"))
    add_gpu_flags(add("gpu", help="everything that only a GPU can tell"))
    draw = add("draw", help="the pictures of README.md")
    draw.add_argument("--out", default=ROOT / "docs" / "img", metavar="DIR")
    args = parser.parse_args(argv)
    if args.command == "decode":
        check_decode_flags(parser, args)
    if args.out and not Path(args.out).absolute().parent.is_dir():
        parser.error(f"--out {args.out}: its folder does not exist")
    return args


def add_decode_flags(parser):
    flags.add_model_flags(parser)
    flags.add_quantize_flag(parser)
    input_of = parser.add_mutually_exclusive_group()
    add_data_flag(input_of)
    input_of.add_argument("--chats", metavar="FILE", help="answer these chats, such as "
                          "bench/prompts.jsonl; default: continue held-out texts of --data")
    input_of.add_argument("--random-weights", choices=SIZES, help="time steps of this size instead")
    parser.add_argument("--drafters", nargs="+", metavar="DRAFTER", help="folders of draft heads, "
                        "lookup, or both: DIR+lookup; default: the model's own heads, and lookup")
    several = dict(nargs="+", metavar="N")
    number = lambda *flag, **options: flags.add_number(parser, *flag, **options)
    number("--tree-sizes", 1, 64, auto=True, default=[5, 17, None], **several,
           help="nodes of a drafted tree, or auto; default: 5 17 auto")
    number("--batch-sizes", 1, 1024, default=[1], **several, help="sequences together")
    number("--temperatures", 0, 1e4, float, default=[0.0], **several, help="0: greedy")
    number("--prompts", 1, 10**6, metavar="N",
           help="default: 16, or the largest batch; all of --chats")
    number("--max-new-tokens", 1, 10**6, default=128, help="of each prompt")
    number("--runs", 1, 10**6, default=3, help="rounds; medians count")
    parser.add_argument("--llama-cpp", action="store_true", help="also by llama.cpp on the same "
                        "GGUF file, plainly and with its n-grams; needs the package xllamacpp")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON line to this file")


def check_decode_flags(parser, args):
    """Checks what argparse cannot know, and sets the default of --drafters."""
    if args.drafters is None:
        own = default_heads(args.model)
        args.drafters = [str(own), "lookup", f"{own}+lookup"] if own else ["lookup"]
    names = [Path(drafter).name for drafter in args.drafters]
    if len({*names}) < len(names):
        parser.error("two of the --drafters have the same name; rename a folder")
    if args.random_weights and args.quantize:
        parser.error("--random-weights are not quantized; give --dtype")
    if args.llama_cpp and not (is_gguf(Path(args.model)) and args.batch_sizes == [1]):
        parser.error("--llama-cpp decodes a GGUF file, one prompt at a time; give one as --model, "
                     "and --batch-sizes 1")
    if args.chats and not args.chats.endswith(".jsonl"):
        parser.error(f"--chats {args.chats}: expected a .jsonl file, such as bench/prompts.jsonl")


def add_gpu_flags(parser):
    parser.add_argument("--out", required=True, metavar="DIR", help="where results.jsonl grows")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="default: all, see docs")
    flags.add_number(parser, "--seconds", 1, 86400, default=480, metavar="N",
                     help="for all parts; each has its share")
    parser.add_argument("--model", type=flags.model_path, metavar="MODEL", help="also decode the "
                        "chats of bench/prompts.jsonl by this model, with its heads")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, also on a CPU")


def main(args):
    from bench import decoding, draw, finish, gpu, operations
    if args.command == "decode":
        finish(args, (operations if args.random_weights else decoding).bench(args))
    else:
        dict(gpu=gpu, draw=draw)[args.command].bench(args)


if __name__ == "__main__":
    arguments = parse()  # before torch is loaded
    from tools.errors import command
    with command():
        main(arguments)
