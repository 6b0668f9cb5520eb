"""What the flags name, loaded: model, heads, tokenizer, prompts; and the engine for them."""

import contextlib
import json
import os
import sys
from functools import partial
from pathlib import Path

import torch

from backends import tensor_parallel
from clover import CloverHeads, state_hash
from generate import Sampling, prepare
from hf import checkpoint, default_heads, expect, find_model, part_file
from hf.chat import SAMPLING, load_chat_template, sampling_defaults, stop_tokens
from hf.families import read_config
from hf.tokenizer import encode_prompt, load_encoding
from model import InputError, pick_device
from tools.policy import choose_threads


def load_model(args, group=None, packed=True, dtype=None):
    """--model, --device, --dtype, --quantize -> (GPT, its tokenizer as `load_encoding` gives it).
    group, packed: as in `checkpoint.load`. dtype: the default of --dtype."""
    device = pick_device(args.device)
    vocab_size = read_config(args.model).vocab_size
    encoding = load_encoding(args.model)
    last = encoding.max_token_value
    expect(last < vocab_size, f"{args.model}: the tokenizer has ids up to {last}, the model only "
           f"{vocab_size} embeddings; they do not belong together")
    dtype = getattr(torch, args.dtype) if args.dtype else dtype
    return checkpoint.load(args.model, dtype, device, group, args.quantize, packed), encoding


# --------------------------------------------------------------------------------------------------
# For generate.py

class Session:
    """What generate.py's command line was asked for, loaded; of ranks, each has read the same."""

    def __init__(self, args):
        self.args = args
        self.group = tensor_parallel.start(args)
        self.conversations = self.group.on_first(lambda: read_prompts(args))
        self.texts = [messages[-1]["content"] for messages in self.conversations]
        self.group.raise_together(self.load)
        if self.group.size > 1:
            heads = self.heads and (state_hash(self.heads.state_dict()), self.heads.info)
            self.group.check_same([self.model.hash, self.model.dtype, heads, self.encoding.hash,
                                   self.sampling, self.stop], "have read different files")

    def load(self):
        args = self.args
        self.sampling = sampling_flags(args) | dict(seed=args.seed)
        self.template = load_chat_template(args.model) if args.chat else None
        expect(self.template or not args.chat, f"{args.model}: has no chat template; leave out "
               "--chat, or take a model that was trained to chat")
        self.system = [dict(role="system", content=args.system)] if args.system is not None else []
        self.model, self.encoding = load_model(args, self.group)
        self.heads = None
        path = args.heads or default_heads(args.model) or "none"
        if args.draft not in ("lookup", "none") and path != "none":
            self.heads = CloverHeads.from_pretrained(path, self.model, self.encoding.hash)
        elif args.draft in ("heads+lookup", "heads"):
            raise InputError(f"{args.model}: has no heads, which --draft {args.draft} needs; train "
                             "some with train_heads.py, give --heads, or take --draft lookup")
        self.lookup = args.draft in ("heads+lookup", "lookup", None)
        self.stop = [*stop_tokens(args.model, self.encoding), *args.stop]

    def encode(self, messages):
        """Token ids of a conversation after the system message; without a chat template, of its
        last message alone. On rank 0, since a template may look at the clock."""
        ids = partial(encode_prompt, self.encoding, messages[-1]["content"])
        if self.template:
            ids = partial(self.encoding.chat, [*self.system, *messages])
        return self.group.on_first(ids)

    def decode(self, tokens):
        """Text of token ids without the stop token or text that ended it."""
        stream = self.text_stream()
        return stream.feed([token for token in tokens if token not in self.stop]) + stream.finish()

    def text_stream(self):
        return self.encoding.stream([s for s in self.stop if isinstance(s, str)])

    def engine(self, prompts, max_new_tokens=None, **options):
        """The Engine for these prompts, by the flags and `options`. Sets the number of threads."""
        args = self.args
        flags = dict(heads=self.heads, lookup=self.lookup, tree_size=args.tree_size,
                     beams=args.beams, batch_size=args.batch_size,
                     graph=not (args.no_graph or args.show_tree)) | options
        engine = prepare(self.model, prompts, max_new_tokens or args.max_new_tokens, **flags,
                         **self.sampling)
        asked = (args.heads or args.draft) and flags["heads"] and flags["tree_size"] is None
        if asked and not engine.decoder.heads:
            print("the heads are left out, as here they are expected to cost more than they gain "
                  "(--tree-size N takes them)", file=sys.stderr)
        if args.threads:
            torch.set_num_threads(args.threads)
        elif "OMP_NUM_THREADS" not in os.environ:
            choose_threads(engine.decoder)
        if args.compare:  # what is compiled or loaded comes before what is timed
            engine.generate(prompts[:1], min(4, args.max_new_tokens))
            engine.clear()
            engine.decoder.warm_up()
        return engine


def sampling_flags(args):
    """How to sample: as the flags say, else as the folder does, of which a line is printed."""
    given = {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
    defaults = sampling_defaults(args.model)
    if given.get("temperature", defaults["temperature"]) == 0:
        filters = ", ".join(f"--{name.replace('_', '-')}" for name in given if given[name])
        if filters and "temperature" not in given:
            print(f"{filters}: no effect at temperature 0; give --temperature", file=sys.stderr)
        return dict(temperature=0.0) | given
    of_folder = {name: defaults[name] for name in defaults if name not in given}
    file = part_file(find_model(args.model), "generation_config.json")
    try:
        Sampling(**of_folder)
    except InputError as error:
        raise InputError(f"{file}: {error}; correct the file, or give the flag") from None
    if of_folder:
        words = ", ".join(f"{name} {value:g}" for name, value in of_folder.items())
        print(f"sampling as {file.parent.resolve().name}/{file.name} says: "
              f"{words.replace('_', '-')} (--temperature 0 is greedy)", file=sys.stderr)
    return of_folder | given


def read_prompts(args):
    """--prompt and --prompts -> conversations, lists of messages. "-" is standard input."""
    if args.prompts:
        return read_file(Path(args.prompts), args.chat)
    with utf8("standard input"):
        texts = [sys.stdin.buffer.read().decode() if text == "-" else text
                 for text in args.prompt or []]
    return [[dict(role="user", content=text)] for text in texts]


@contextlib.contextmanager
def utf8(name):
    """Raises InputError where the body reads text that is not UTF-8."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 text (byte {error.start})") from None


def read_file(path, chat):
    """The conversations of --prompts FILE. Raises InputError, with the line, for a bad one."""
    try:
        with utf8(path):
            lines = path.read_bytes().decode().splitlines()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    conversations = [read_line(f"{path}, line {number}", line, chat) if path.suffix == ".jsonl"
                     else [dict(role="user", content=line)]
                     for number, line in enumerate(lines, 1) if line.strip()]
    expect(conversations, f"{path}: holds no prompt")
    return conversations


def read_line(where, line, chat):
    """The messages of one line of a .jsonl file."""
    try:
        value = json.loads(line)
        messages = value.get("messages", [dict(role="user", content=value.get("prompt"))])
        valid = messages and all(isinstance(message[key], str) and message[key]
                                 for message in messages for key in ("role", "content"))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        valid = False
    expect(valid, f'{where}: expected an object with "prompt", a text, or "messages", a list of '
           'objects with "role" and "content"')
    expect(chat or "messages" not in value, f'{where}: "messages" need --chat')
    return messages
