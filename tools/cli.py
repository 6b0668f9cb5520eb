"""What the command lines share: flags, loading, errors in one line; and what generate.py's prints."""

import argparse
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from clover import CloverHeads
from generate import Sampling, TextStream, prepare
from hf import checkpoint
from hf.chat import SAMPLING, load_chat_template, sampling_defaults, stop_tokens
from hf.tokenizer import encode_prompt, load_encoding, tokenizer_hash
from model import GPT, InputError, identity
from tools import ranks
from tools.tune import times_file

DEMO = Path(__file__).parent.parent / "demo"
HEAD_COLOURS = (32, 36, 34, 35, 31)  # ANSI; a head beyond the last takes the last
LOOKUP_COLOUR = 33


# ---------------------------------------------------------------------------------------------------------------------
# For every command line

class Parser(argparse.ArgumentParser):
    """argparse with one line for a mistake, defaults in the help and no abbreviated flags."""

    def __init__(self, description=None, **options):
        options |= dict(allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        super().__init__(description=description, **options)

    def error(self, message):
        raise InputError(f"{message} (--help lists the flags)")


def command(main):
    """Runs a command line. Bad input and a lack of memory are one line on standard error and exit code 2. SIGTERM acts
    as Ctrl-C."""
    spec = sys.modules["__main__"].__spec__
    name = f"python -m {spec.name.removesuffix('.__main__')}" if spec else Path(sys.argv[0]).name
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows a question mark
    tell = ranks.voice()
    try:
        main()
    except InputError as error:
        tell(f"{name}: {error}")
        ranks.end(2)
    except RuntimeError as error:
        reason = str(error).split("\n")[0]
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in reason:  # torch's, on a CPU
            raise
        tell(f"{name}: out of memory ({reason}); a smaller --batch-size takes less, and so do shorter texts")
        ranks.end(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    except BrokenPipeError:  # the reader of our output is gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if dist.is_available() and dist.is_initialized():  # others may be waiting
        ranks.end(1)


def add_model_flags(parser):
    parser.add_argument("--model", default=str(DEMO), help="a Hugging Face checkpoint folder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"),
                        help="default: bfloat16 on CUDA and for a checkpoint stored in it on a CPU that has "
                        "instructions for it, else float32")


def pick_device(name):
    """A torch.device that exists here, or InputError."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # not on "meta", which computes nothing
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"device {name!r} is not available here ({reason}); try --device cpu") from None
    return device


def load_model(args, group=None):
    """--model, --device, --dtype -> (GPT, its tokenizer as `load_encoding` gives it). group: the ranks that hold it."""
    device, dtype = pick_device(args.device), getattr(torch, args.dtype) if args.dtype else None
    vocab_size, encoding = checkpoint.read_config(args.model).vocab_size, load_encoding(args.model)
    if encoding.max_token_value >= vocab_size:
        raise InputError(f"{args.model}: the tokenizer has ids up to {encoding.max_token_value}, the model only "
                         f"{vocab_size} embeddings; they do not belong together")
    return GPT.from_pretrained(args.model, dtype=dtype, device=device, group=group), encoding


def load_heads(path, args, model, encoding):
    """A heads folder, or the model folder's own `clover`. None for "none" and where a model has no heads beside it."""
    path = path or (Path(args.model) / "clover" if (Path(args.model) / "clover").is_dir() else "none")
    return None if str(path) == "none" else CloverHeads.from_pretrained(path, model, tokenizer_hash(encoding))


def describe():
    """python model.py FOLDER"""
    parser = Parser("Says what a Hugging Face checkpoint folder holds.")
    parser.add_argument("folder")
    print(checkpoint.describe(parser.parse_args().folder))


# ---------------------------------------------------------------------------------------------------------------------
# For generate.py

def parse(argv):
    """generate.py's flags."""
    parser = Parser("Continues prompts with a model's own text, faster by draft heads that guess ahead.")
    parser.add_argument("--prompt", action="append", help="text to continue; repeatable; - reads standard input; "
                        "without any, each line typed is one")
    parser.add_argument("--chat", action="store_true", help="the prompt is a message to a chat model, put into the "
                        "folder's template; without a prompt: a conversation")
    parser.add_argument("--system", help="the system message of a chat")
    add_model_flags(parser)
    parser.add_argument("--heads", help="a folder of draft heads, or none; default: the model folder's clover, if it "
                        "has one")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    folder = "default: as the folder's generation_config.json says, else"
    parser.add_argument("--temperature", type=float, help=f"0 is greedy; {folder} 0")
    parser.add_argument("--top-k", type=int, help=f"0 keeps all; {folder} 0")
    parser.add_argument("--top-p", type=float, help=f"{folder} 1")
    parser.add_argument("--min-p", type=float, help="least probability of a token, relative to the likeliest's; "
                        f"{folder} 0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", action="append", default=[], help="a text that ends the output; repeatable")
    parser.add_argument("--draft", choices=("heads+lookup", "heads", "lookup", "none"), help="what guesses: the heads, "
                        "lookup in the text itself, both, or nothing; default: both where there are heads, else lookup")
    parser.add_argument("--tree-size", type=tree_size, default="auto", metavar="N|auto", help="nodes per step, root "
                        "included; 1 is plain decoding; auto measures what is fastest here, and takes it step by step")
    parser.add_argument("--beams", type=int, help="paths kept while drafting; default: about the square root of the "
                        "heads' nodes")
    parser.add_argument("--batch-size", type=int, help="prompts decoded together; default: up to 8")
    parser.add_argument("--no-graph", action="store_true", help="on CUDA, run each step eagerly, not from a CUDA graph")
    parser.add_argument("--explain", action="store_true", help="measure again; say what drafted, why, and where time "
                        "goes")
    parser.add_argument("--show-tree", action="store_true", help="print the trees of the first steps, with what was "
                        "accepted; with --json those of all steps. Runs without a graph")
    parser.add_argument("--compare", action="store_true", help="also decode plainly and compare speed and text")
    parser.add_argument("--json", action="store_true", help="print one json object instead of text")
    args = parser.parse_args(argv)
    if "" in args.stop:
        parser.error("--stop needs a text that is not empty")
    if args.draft in ("heads+lookup", "heads") and args.heads == "none":
        parser.error(f"--draft {args.draft} needs heads; leave out --heads none")
    if args.draft in ("lookup", "none") and (args.beams is not None or args.heads not in (None, "none")):
        parser.error(f"--heads and --beams are for heads, which --draft {args.draft} leaves out")
    least = {"heads+lookup": 3, "heads": 2, "lookup": 2}.get(args.draft, 1)
    if args.draft and args.tree_size is not None and args.tree_size < least:
        parser.error(f"--draft {args.draft} needs --tree-size {least} or more, not {args.tree_size}")
    if args.draft == "none" and args.tree_size not in (None, 1):
        parser.error(f"--tree-size {args.tree_size} needs guesses; leave out --draft none")
    if args.system is not None and not args.chat:
        parser.error("--system is for chat models; give --chat with it")
    for flag in ("compare", "json", "explain", "show_tree"):
        if getattr(args, flag) and not args.prompt:
            parser.error(f"--{flag.replace('_', '-')} needs a --prompt")
    return args


def tree_size(text):
    return None if text == "auto" else int(text)


class Session:
    """What generate.py's command line was asked for, loaded."""

    def __init__(self, args, texts, group=None):
        """texts: the prompts, from `read_prompts`."""
        self.args, self.texts = args, texts
        self.sampling = self.sampling_flags() | dict(seed=args.seed)
        Sampling(**self.sampling)  # raises for a number out of range, before anything is loaded
        self.template = load_chat_template(args.model) if args.chat else None
        if args.chat and not self.template:
            raise InputError(f"{args.model}: has no chat template; leave out --chat, or take a model that was trained "
                             "to chat")
        self.model, self.encoding = load_model(args, group)
        self.heads, self.lookup = self.drafters()
        self.stop = [*stop_tokens(self.args.model, self.encoding), *args.stop]

    def sampling_flags(self):
        """The flags that say how to sample; those not given are as the folder says, which one line tells."""
        given = {name: getattr(self.args, name) for name in SAMPLING if getattr(self.args, name) is not None}
        folder = sampling_defaults(self.args.model)
        if given.get("temperature", folder["temperature"]) == 0:
            filters = ", ".join(f"--{name.replace('_', '-')}" for name in SAMPLING[1:] if given.get(name))
            if filters and "temperature" not in given:
                print(f"{filters}: no effect at temperature 0; give --temperature", file=sys.stderr)
            return dict(temperature=0.0) | given
        taken, file = {name: folder[name] for name in folder.keys() - given}, "generation_config.json"
        try:
            Sampling(**taken)
        except InputError as error:
            raise InputError(f"{Path(self.args.model) / file}: {error}; correct the file, or give the flag") from None
        if taken:
            words = ", ".join(f"{name.replace('_', '-')} {taken[name]:g}" for name in SAMPLING if name in taken)
            print(f"sampling as {Path(self.args.model).resolve().name}/{file} says: {words} (--temperature 0 is "
                  "greedy)", file=sys.stderr)
        return taken | given

    def drafters(self):
        """(the heads or None, whether lookup drafts) as --draft, --heads and --tree-size say."""
        args, heads = self.args, None
        if args.draft not in ("lookup", "none"):
            heads = load_heads(args.heads, args, self.model, self.encoding)
        if args.draft in ("heads+lookup", "heads") and heads is None:
            raise InputError(f"{args.model}: has no heads beside it, which --draft {args.draft} needs; train some with "
                             "train_heads.py, give --heads, or take --draft lookup")
        lookup = args.draft in ("heads+lookup", "lookup", None)
        return heads, lookup and not (heads and args.tree_size == 2)  # which has room for one guess

    def encode(self, messages):
        """Token ids of a conversation after the system message; without a chat template, of its last message alone. On
        rank 0, since a template may look at the clock."""
        return ranks.on_first(self.model.group, lambda: self.encode_here(messages))

    def encode_here(self, messages):
        if not self.template:
            return encode_prompt(self.encoding, messages[-1]["content"])
        system = [] if self.args.system is None else [dict(role="system", content=self.args.system)]
        return self.encoding.encode(self.template.render([*system, *messages]), allowed_special="all")

    def decode(self, tokens):
        """Text of token ids without the stop token or text that ended it."""
        stream = TextStream(self.encoding, [s for s in self.stop if isinstance(s, str)])
        return stream.feed([token for token in tokens if token not in self.stop]) + stream.finish()

    def engine(self, prompts, max_new_tokens=None, **options):
        """The Engine for these prompts, by the flags and `options` of `generate.prepare`."""
        a = self.args
        options = dict(heads=self.heads, lookup=self.lookup, tree_size=a.tree_size, beams=a.beams) | options
        return prepare(self.model, prompts, max_new_tokens or a.max_new_tokens, batch_size=a.batch_size,
                       graph=not (a.no_graph or a.show_tree), times_file=times_file(), **options, **self.sampling)

    def report(self, output):
        """The --json object of one run."""
        names = ("tokens", "ended", "tree_size", "batch_size", "steps", "seconds", "tokens_per_step",
                 "tokens_per_second", "accepted")
        return {name: getattr(output, name) for name in names} | dict(
            model=Path(self.args.model).resolve().name, sampling=self.sampling, prompts=self.texts,
            texts=list(map(self.decode, output.tokens)),
            step_lengths=dict(sorted(output.step_lengths.items())),
            variants={str(variant): dict(steps=steps, tokens=tokens)
                      for variant, (steps, tokens) in output.variants.items()})


def open_session(args, group):
    """The `Session` of a rank, which has read what the others have."""
    texts = ranks.on_first(group, lambda: read_prompts(args.prompt or []))
    session = ranks.agree(group, lambda: Session(args, texts, group))
    if group.size > 1:
        model, heads = session.model, session.heads and (identity(session.heads.state_dict()), session.heads.info)
        files = model.identity, model.dtype, heads, tokenizer_hash(session.encoding), session.sampling, session.stop
        ranks.check_same(group, files, "have read different files")
    return session


def read_prompts(texts):
    """--prompt flags -> texts; "-" is standard input."""
    prompts = []
    for text in texts:
        if text == "-":
            try:
                text = sys.stdin.buffer.read().decode("utf-8")
            except UnicodeDecodeError as error:
                raise InputError(f"standard input is not UTF-8 text ({error.reason} at byte {error.start})") from None
        if not text:
            raise InputError("a prompt is empty; give it at least one character")
        prompts.append(text)
    return prompts


class Printer:
    """Prints a prompt and its text as it comes; on a terminal, each guessed token in the colour of the head that
    guessed it, or of lookup. Several texts are printed at the end, and with --json none is. trees: a `Drafts`."""

    def __init__(self, session, trees=None):
        self.session, self.stop, self.trees = session, session.stop, trees
        self.streams = len(session.texts) <= 1 and not session.args.json
        self.stream = TextStream(session.encoding, [s for s in self.stop if isinstance(s, str)])
        self.colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self.shown = ["" if session.template else text for text in session.texts]
        if self.streams:
            print("".join(self.shown), end="", flush=True)

    def show(self, index, tokens, path, variant):
        """What `on_step` calls."""
        if self.trees:
            self.trees.show(index, tokens, path, variant)
        for i, token in enumerate(tokens if self.streams else []):
            text = self.stream.feed([token]) if token not in self.stop else ""
            if self.colours and i < len(path) - 1 and text:  # the last token of a step is the model's own
                head = HEAD_COLOURS[min(i, len(HEAD_COLOURS) - 1)]
                text = f"\x1b[{LOOKUP_COLOUR if path[i + 1] > variant.heads else head}m{text}\x1b[0m"
            print(text, end="", flush=True)

    def finish(self, output):
        if self.streams:
            print(self.stream.finish(), flush=True)
        elif not self.session.args.json:
            for text, tokens in zip(self.shown, output.tokens):
                print(f"{text}{self.session.decode(tokens)}\n{'-' * 40}")


def statistics(output):
    """The lines that end a run."""
    share = lambda n, of: f"{n / max(of, 1):.0%}"
    variants = sorted(output.variants.items(), key=lambda item: -item[1][0])
    lengths = "  ".join(f"{n}: {share(output.step_lengths[n], output.steps)}" for n in sorted(output.step_lengths))
    guessed = ", ".join(f"{share(n, output.emitted)} by {name}" for name, n in sorted(output.accepted.items()))
    return (f"drafted by: {', '.join(f'{variant} {share(steps, output.steps)}' for variant, (steps, _) in variants)}\n"
            f"tokens guessed: {guessed or 'none'}; tokens per step by share of steps: {lengths}\n"
            f"{output.tokens_per_step:.2f} tokens per step, {output.tokens_per_second:.1f} tokens per second")
