"""Loads what the flags name (model, heads, tokenizer, prompts), and builds the engine."""

import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from backends import cpu, tensor_parallel
from clover import CloverHeads
from generate import Sampling, prepare
from hf import checkpoint
from hf.chat import SAMPLING_KEYS, load_chat_template, not_applied, sampling_defaults, stop_tokens
from hf.files import part_file, read_config
from hf.paths import default_heads, find_model
from hf.text import OBJECTS, decode, messages_of, read_lines, read_objects, tools_of
from hf.tokenizer import Encoding, encode_prompt, load_encoding
from model import GPT, InputError, check, expect, pick_device, warn


def load_model(args, group=None, packed=None, dtype=None):
    """Loads the GPT of --model, --device, --dtype and --quantize, and its tokenizer, whose chat
    template gets the variables of --template-kwargs. group, packed: as in `checkpoint.load`. dtype:
    used without --dtype."""
    device = pick_device((group and group.device) or args.device)
    read_config(args.model)  # a path that is no model fails here, not for lack of a tokenizer
    encoding = load_encoding(args.model)
    if args.template_kwargs:
        expect(encoding.template, f"{args.model}: has no chat template; leave out "
               "--template-kwargs")
        encoding.template.variables |= args.template_kwargs
    dtype = getattr(torch, args.dtype) if args.dtype else dtype
    return checkpoint.load(args.model, dtype, device, group, args.quantize, packed), encoding


@dataclass(eq=False)
class Loaded:
    """What the flags name, the same on all ranks."""
    model: GPT
    encoding: Encoding
    heads: CloverHeads | None
    sampling: dict  # fields of a `Sampling`
    stop: list      # token ids and strings that end a sequence
    group: tensor_parallel.Group

    def encode(self, conversations, args):
        """Token ids of each conversation, or without --chat of its last message. Runs on rank 0,
        since a template may read the clock."""
        def tokens(number, messages, tools):
            try:
                return (self.encoding.chat(messages, **tools) if args.chat
                        else encode_prompt(self.encoding, messages[-1]["content"]))
            except InputError as error:
                source = f"{args.prompts}, prompt {number}: " if args.prompts else ""
                raise InputError(f"{source}{error}") from None
        return self.group.on_first(lambda: [tokens(number, *conversation) for number, conversation
                                            in enumerate(conversations, start=1)])

    def decode(self, tokens):
        """The text of token ids, without the stop token or string at its end."""
        stream = self.encoding.stream(self.stop)
        return stream.feed(tokens) + stream.finish()


def load(args, group):
    """Loads a `Loaded` on every rank, and checks that all ranks have read the same files."""
    loaded = group.raise_together(lambda: load_alone(args, group))
    heads = loaded.heads and (loaded.heads.hash, loaded.heads.info)
    group.check_same([loaded.model.hash, loaded.model.dtype, heads, loaded.encoding.hash,
                      loaded.sampling, loaded.stop], "have read different files")
    return loaded


def load_alone(args, group):
    """`load` on one rank, which does not wait for the others."""
    if args.threads:
        check("threads", args.threads, 1, os.cpu_count() or 1, whole=True)
    sampling = sampling_flags(args)
    if ignored := not_applied(args.model):
        settings = ", ".join(f"{name} {value}" for name, value in ignored.items())
        warn(f"{args.model}: generation_config.json: not applied: {settings:.200}")
    model, encoding = load_model(args, group)
    heads = None
    path = args.heads or default_heads(args.model) or "none"
    if args.draft not in ("lookup", "none") and path != "none":
        heads = CloverHeads.from_pretrained(path, model, encoding.hash)
    elif args.draft in ("heads+lookup", "heads"):
        raise InputError(f"{args.model}: has no draft heads, but --draft {args.draft} needs them; "
                         "train them with train_heads.py, give --heads, or use --draft lookup")
    stop = [*stop_tokens(args.model, encoding), *filter(None, args.stop)]
    return Loaded(model, encoding, heads, sampling, stop, group)


def make_engine(args, loaded, prompts, max_new_tokens, plain=False):
    """The Engine that the flags describe for these prompts. Sets torch's number of threads."""
    engine = prepare(loaded.model, prompts, max_new_tokens, loaded.heads,
                     lookup=args.draft in ("heads+lookup", "lookup", None),
                     tree_size=1 if plain else args.tree_size, beams=args.beams,
                     batch_size=args.batch_size, **loaded.sampling)
    may_choose = loaded.model.device.type == "cpu" and loaded.group.size == 1
    if args.threads:
        torch.set_num_threads(args.threads)
    elif may_choose and "OMP_NUM_THREADS" not in os.environ:
        cpu.choose_threads(partial(plain_seconds, engine.decoder))
    if args.compare:  # the timed run must not compile or load anything
        engine.generate(prompts[:1], min(4, max_new_tokens))
        engine.clear()
        engine.decoder.warm_up()
    return engine


def plain_seconds(decoder):
    """Seconds of a plain step; None for the first one."""
    with decoder.context():
        return decoder.launch(1, 0).wait().seconds


def sampling_flags(args):
    """The fields of a `Sampling` from the flags, or else from the model's generation_config.json,
    whose values it prints."""
    flags = {name: value for name in (*SAMPLING_KEYS, "seed")
             if (value := getattr(args, name)) is not None}
    # raises an error for a bad flag before the model is loaded
    is_greedy = Sampling(**dict(temperature=1) | flags).temperature == 0
    defaults = {name: x for name, x in sampling_defaults(args.model).items() if name not in flags}
    if is_greedy or defaults.get("temperature") == 0:
        given = [name for name in SAMPLING_KEYS if flags.get(name)]
        filters = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        if filters and "temperature" not in flags:
            print(f"{filters}: no effect at temperature 0; give --temperature", file=sys.stderr)
        defaults = dict(temperature=0.0)
    elif defaults:
        file = part_file(find_model(args.model), "generation_config.json")
        try:
            Sampling(**defaults)
        except InputError as error:
            raise InputError(f"{file}: {error}; correct the file, or give the flag") from None
        settings = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        print(f"sampling defaults of {args.model}: {settings.replace('_', '-')} (--temperature 0 "
              "is greedy)", file=sys.stderr)
    return defaults | flags


def opening(args):
    """The first messages of a conversation: --system."""
    return [] if args.system is None else [dict(role="system", content=args.system)]


def read_prompts(args):
    """The conversations of --prompt and --prompts, pairs of messages and `tools_of`; "-" is
    standard input. Raises InputError for --chat if the model has no chat template."""
    expect(not args.chat or load_chat_template(args.model), f"{args.model}: has no chat template; "
           "leave out --chat, or use a chat model")
    if args.prompts:
        found = read_prompt_file(args.prompts, None if args.chat else "--chat")
    else:
        found = [(from_user(decode(sys.stdin.buffer.read(), "standard input") if text == "-"
                            else text), {}) for text in args.prompt or []]
    return [([*opening(args), *messages], tools) for messages, tools in found]


def read_prompt_file(file, missing=None, template=None):
    """The conversations of a file, pairs of messages and `tools_of`: its lines, or the objects of a
    .jsonl or .json file with a "prompt" or "messages". missing: what messages and tools need and do
    not have. template: renders each, so that an error names the line."""
    file = Path(file)

    def parse(value):
        tools = tools_of(value)
        is_text = isinstance(value.get("prompt"), str) and value.get("messages") is None
        messages = from_user(value["prompt"]) if is_text else messages_of(value)
        expect(messages, "it has no message")
        expect(is_text and not tools or not missing, f"messages and tools need {missing}")
        if template:
            template.render(messages, **tools)
        return messages, tools
    if file.name.endswith(OBJECTS):
        expected = 'an object with a "prompt" string or "messages"'
        found = [conversation for _, conversation in read_objects(file, parse, expected)]
    else:
        found = [(from_user(line), {}) for line in read_lines(file)]
    expect(found, f"{file}: contains no prompts")
    return found


def from_user(text):
    return [dict(role="user", content=text)]
