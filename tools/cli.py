"""What the command lines share: loading, errors in one line; and generate.py's."""

import errno
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

import torch

from backends import tensor_parallel
from clover import CloverHeads, read_record, state_hash
from generate import Sampling, prepare
from hf import checkpoint
from hf.chat import SAMPLING, load_chat_template, sampling_defaults, stop_tokens
from hf.families import read_config
from hf.tokenizer import encode_prompt, load_encoding
from model import InputError, pick_device
from tools.compare import against_plain
from tools.drafts import Drafts
from tools.flags import flag, parse, parse_folder
from tools.printer import print_texts, statistics
from tools.repl import converse
from tools.tune import explain, keep_times, times_file

# --------------------------------------------------------------------------------------------------
# For every command line

def command(main):
    """Runs a command line. Bad input, a lack of memory, and output that has no room are one line on
    standard error and exit code 2; Ctrl-C and SIGTERM are 130 and 143, or what main returns."""
    spec = sys.modules["__main__"].__spec__
    name = f"python -m {spec.name.removesuffix('.__main__')}" if spec else Path(sys.argv[0]).name
    signal.signal(signal.SIGTERM, tensor_parallel.interrupt)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # "?" where a terminal cannot show a character
    print_error = tensor_parallel.error_printer()
    code = 0
    try:
        code = main() or 0
        sys.stdout.flush()
    except InputError as error:
        print_error(f"{name}: {error}")
        code = 2
    except RuntimeError as error:
        reason = str(error).split("\n")[0]
        # torch has no type of its own for a CPU's
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in reason:
            raise
        print_error(f"{name}: out of memory ({reason}); a smaller --batch-size takes less, and so "
                    "do shorter texts")
        code = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 128 + (tensor_parallel.signals or [signal.SIGINT])[0]
    except OSError as error:
        # a pipe breaks where the reader of our output is gone, as with `| head`
        if error.filename or error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        if error.errno == errno.ENOSPC:
            print_error(f"{name}: standard output cannot be written: {error.strerror}")
            code = 2
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    tensor_parallel.end_rank(code or 1)  # others may be waiting
    sys.exit(code)


def load_model(args, group=None, packed=True):
    """--model, --device, --dtype, --quantize -> (GPT, its tokenizer as `load_encoding` gives it).
    group, packed: as in `checkpoint.load`."""
    device = pick_device(args.device)
    dtype = getattr(torch, args.dtype) if args.dtype else None
    vocab_size = read_config(args.model).vocab_size
    encoding = load_encoding(args.model)
    if encoding.max_token_value >= vocab_size:
        raise InputError(f"{args.model}: the tokenizer has ids up to {encoding.max_token_value}, "
                         f"the model only {vocab_size} embeddings; they do not belong together")
    quantize = getattr(args, "quantize", None)
    return checkpoint.load(args.model, dtype, device, group, quantize, packed), encoding


def load_heads(path, model, encoding, of_original=False):
    """`CloverHeads.from_pretrained`, which also takes heads trained on the weights before they were
    quantised, and says so: by --quantize, or by whoever made the folder and --heads-of-original."""
    quantised_folder = model.quantization and model.unrounded_hash == model.hash
    if of_original and not quantised_folder:
        raise InputError("--heads-of-original is for a folder that is quantised; leave it out")
    if quantised_folder and Path(path).is_dir():
        theirs = read_record(Path(path) / "heads.json")[1]["base"]["weights"]
        if theirs != model.hash and not of_original:
            raise InputError(f"{path}: these heads belong to other weights (theirs {theirs}, these "
                             f"{model.hash}); if they were trained on this model before it was "
                             "quantised, give --heads-of-original")
        model.unrounded_hash = theirs
    heads = CloverHeads.from_pretrained(path, model, encoding.hash)
    if heads.info["base"]["weights"] != model.hash:
        print(f"{path}: these heads were trained on the model before it was quantised "
              f"({model.quantization}); texts are the quantised model's own, but fewer guesses may "
              "be right", file=sys.stderr)
    return heads


def describe():
    """python model.py FOLDER"""
    print(checkpoint.describe(parse_folder(sys.argv[1:]).folder))


# --------------------------------------------------------------------------------------------------
# For generate.py

def generate_main(argv=None):
    """generate.py's command line."""
    args = parse(argv)
    with tensor_parallel.joined(args, sys.argv[1:] if argv is None else argv) as group:
        answer(open_session(args, group))


def answer(session):
    """Prints what the command line was asked for."""
    args = session.args
    if not session.conversations:
        return converse(session)
    prompts = list(map(session.encode, session.conversations))
    engine = session.engine(prompts)
    if args.compare:  # what is compiled or loaded comes before what is timed
        engine.generate(prompts[:1], min(4, args.max_new_tokens))
    trees = Drafts(engine, session) if args.show_tree else None
    output = print_texts(session, engine, prompts, trees)
    keep_times(engine)
    finished = None not in output.ended
    result = session.report(output)
    say = (lambda text: None) if args.json else partial(print, file=sys.stderr)
    if not args.quiet:
        say(f"\n{statistics(output)}")
    if trees:
        result["drafts"] = trees.steps
        say("\n".join(trees.lines()))
    if args.explain and finished:
        result["explained"] = explain(engine, session.heads, output)
        say("\n" + "\n".join(result["explained"]))
    if args.compare and finished:
        engine = trees = None  # frees their memory for the next one
        result |= against_plain(session, prompts, output, say)
    if args.json and not args.prompts:
        print(json.dumps(result))
    if not finished:
        raise KeyboardInterrupt


class Session:
    """What generate.py's command line was asked for, loaded."""

    def __init__(self, args, conversations, group=None):
        """conversations: the prompts, from `read_prompts`."""
        self.args = args
        self.conversations = conversations
        self.texts = [messages[-1]["content"] for messages in conversations]
        self.sampling = self.sampling_flags() | dict(seed=args.seed)
        Sampling(**self.sampling)  # raises for a number out of range, before anything is loaded
        self.template = load_chat_template(args.model) if args.chat else None
        if args.chat and not self.template:
            raise InputError(f"{args.model}: has no chat template; leave out --chat, or take a "
                             "model that was trained to chat")
        self.model, self.encoding = load_model(args, group)
        self.heads, self.lookup = self.drafters()
        self.stop = [*stop_tokens(self.args.model, self.encoding), *args.stop]

    def sampling_flags(self):
        """The flags that say how to sample. Those not given are as the folder says; a line on
        standard error tells which."""
        flags = {name: getattr(self.args, name) for name in SAMPLING}
        given = {name: value for name, value in flags.items() if value is not None}
        defaults = sampling_defaults(self.args.model)
        if given.get("temperature", defaults["temperature"]) == 0:
            filters = ", ".join(f"--{flag(name)}" for name in SAMPLING[1:] if given.get(name))
            if filters and "temperature" not in given:
                print(f"{filters}: no effect at temperature 0; give --temperature", file=sys.stderr)
            return dict(temperature=0.0) | given
        folder, file = Path(self.args.model), "generation_config.json"
        taken = {name: defaults[name] for name in SAMPLING if name in defaults.keys() - given}
        try:
            Sampling(**taken)
        except InputError as error:
            raise InputError(f"{folder / file}: {error}; correct the file, or give the "
                             "flag") from None
        if taken:
            words = ", ".join(f"{flag(name)} {value:g}" for name, value in taken.items())
            print(f"sampling as {folder.resolve().name}/{file} says: {words} (--temperature 0 is "
                  "greedy)", file=sys.stderr)
        return taken | given

    def drafters(self):
        """(the heads or None, whether lookup drafts) as --draft, --heads and --tree-size say."""
        args = self.args
        beside = Path(args.model) / "clover"
        path = args.heads or (beside if beside.is_dir() else "none")
        heads = None
        if args.draft not in ("lookup", "none") and path != "none":
            heads = load_heads(path, self.model, self.encoding, args.heads_of_original)
        if args.draft in ("heads+lookup", "heads") and heads is None:
            raise InputError(f"{args.model}: has no heads beside it, which --draft {args.draft} "
                             "needs; train some with train_heads.py, give --heads, or take "
                             "--draft lookup")
        lookup = args.draft in ("heads+lookup", "lookup", None)
        # a tree of 2 nodes has room for one guess, the heads'
        return heads, lookup and not (heads and args.tree_size == 2)

    def encode(self, messages):
        """Token ids of a conversation after the system message; without a chat template, of its
        last message alone. On rank 0, since a template may look at the clock."""
        def encode_here():
            if not self.template:
                return encode_prompt(self.encoding, messages[-1]["content"])
            system = self.args.system
            start = [] if system is None else [dict(role="system", content=system)]
            text = self.template.render([*start, *messages])
            return self.encoding.encode(text, allowed_special="all")
        return tensor_parallel.on_first(tensor_parallel.group_of(self.model), encode_here)

    def decode(self, tokens):
        """Text of token ids without the stop token or text that ended it."""
        stream = self.text_stream()
        return stream.feed([token for token in tokens if token not in self.stop]) + stream.finish()

    def text_stream(self):
        return self.encoding.stream([s for s in self.stop if isinstance(s, str)])

    def engine(self, prompts, max_new_tokens=None, **options):
        """The Engine for these prompts, by the flags and `options` of `generate.prepare`."""
        args = self.args
        flags = dict(heads=self.heads, lookup=self.lookup, tree_size=args.tree_size,
                     beams=args.beams, batch_size=args.batch_size,
                     graph=not (args.no_graph or args.show_tree), threads=args.threads,
                     times_file=times_file())
        return prepare(self.model, prompts, max_new_tokens or args.max_new_tokens,
                       **flags | options, **self.sampling)

    def report(self, output):
        """The --json object of one run."""
        names = ("tokens", "ended", "tree_size", "batch_size", "steps", "seconds",
                 "tokens_per_step", "tokens_per_second", "accepted")
        return {name: getattr(output, name) for name in names} | dict(
            model=Path(self.args.model).resolve().name, sampling=self.sampling, prompts=self.texts,
            texts=list(map(self.decode, output.tokens)),
            step_lengths=dict(sorted(output.step_lengths.items())),
            plans={str(plan): dict(steps=steps, tokens=tokens)
                   for plan, (steps, tokens) in output.plans.items()})


def open_session(args, group):
    """The `Session` of a rank, which has read what the others have."""
    conversations = tensor_parallel.on_first(group, lambda: read_prompts(args))
    session = tensor_parallel.raise_together(group, lambda: Session(args, conversations, group))
    if group.size > 1:
        model, heads = session.model, session.heads
        files = (model.hash, model.dtype, heads and (state_hash(heads.state_dict()), heads.info),
                 session.encoding.hash, session.sampling, session.stop)
        tensor_parallel.check_same(group, files, "have read different files")
    return session


def read_prompts(args):
    """--prompt and --prompts -> conversations, lists of messages. "-" is standard input."""
    if args.prompts:
        return read_file(Path(args.prompts), args.chat)
    texts = [decode_text(sys.stdin.buffer.read(), "standard input") if text == "-" else text
             for text in args.prompt or []]
    if "" in texts:
        raise InputError("a prompt is empty; give it at least one character")
    return [[dict(role="user", content=text)] for text in texts]


def decode_text(data, name):
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 text ({error.reason} at byte "
                         f"{error.start})") from None


def read_file(path, chat):
    """The conversations of --prompts FILE. Raises InputError, with the line, for a bad one."""
    try:
        lines = decode_text(path.read_bytes(), path).splitlines()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise InputError(f"{path}: holds no prompt")
    if path.suffix != ".jsonl":
        return [[dict(role="user", content=line)] for _, line in numbered]
    found = []
    for number, line in numbered:
        try:
            value = json.loads(line)
            messages = value.get("messages", [dict(role="user", content=value.get("prompt"))])
            good = messages and all(
                isinstance(message["role"], str) and isinstance(message["content"], str)
                and message["content"] for message in messages)
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            good = False
        if not good:
            raise InputError(f'{path}, line {number}: expected an object with "prompt", a text, or '
                             '"messages", a list of objects with "role" and "content"')
        if "messages" in value and not chat:
            raise InputError(f'{path}, line {number}: "messages" need --chat')
        found.append(messages)
    return found
