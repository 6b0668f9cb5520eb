"""Loads what the flags name (model, heads, tokenizer, sampling), and builds the engine."""

import os
import re
import sys
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from backends import cpu, tensor_parallel
from common.machine import available_cpus, pick_device
from common.values import warn
from engine.batching import Engine
from engine.clock import seconds_between, timestamp
from engine.policy import Policy
from generate import Plan, Sampling
from hf import checkpoint
from hf.calls import CallText
from hf.chat import SAMPLING_KEYS, load_chat_template, not_applied, sampling_defaults, stop_tokens
from hf.files import part_file, read_family
from hf.grammar import GrammarTokenizer
from hf.heads import default_heads, load_heads
from hf.paths import find_model
from hf.tokenizer import Encoding, load_encoding
from model import GPT, InputError, check, expect

# Without --max-new-tokens, chats and grammars, which end by themselves, may fill this many tokens
CONTEXT = 4096    # with their prompt, up to the model's context
REPLY = 1024      # after a longer prompt
NEW_TOKENS = 128  # of other texts
CHAT_SAMPLING = dict(temperature=0.7, top_p=0.95)  # where the model's files have no advice


def load_model(args, group=None, packed=None, dtype=None, template=None):
    """Loads the GPT of --model, --device, --dtype and --quantize, and its tokenizer, whose chat
    template gets the variables of --template-kwargs. group, packed: as in `checkpoint.load`. dtype:
    used without --dtype. template: a file with another chat template."""
    device = pick_device((group and group.device) or args.device)
    if not threads_are_set():
        torch.set_num_threads(min(torch.get_num_threads(), available_cpus()))
    read_family(args.model)  # a path that is no model fails here, not for lack of a tokenizer
    encoding = load_encoding(args.model)
    if template:
        encoding.template = load_chat_template(args.model, template)
    if args.template_kwargs:
        expect(encoding.template, f"{args.model}: has no chat template; leave out "
               "--template-kwargs")
        encoding.template.variables |= args.template_kwargs
    dtype = getattr(torch, args.dtype) if args.dtype else dtype
    return checkpoint.load(args.model, dtype, device, group, args.quantize, packed), encoding


def threads_are_set():
    """Whether OMP_NUM_THREADS is a number that OpenMP accepts."""
    return re.match(r"\s*0*[1-9]", os.environ.get("OMP_NUM_THREADS", "")) is not None


@dataclass(eq=False)
class Loaded:
    """What the flags name, the same on all ranks."""
    model: GPT
    encoding: Encoding
    heads: torch.nn.Module | None  # from `load_heads`
    sampling: dict  # fields of a `Sampling`
    stop: list      # token ids and strings that end a sequence
    group: tensor_parallel.Group

    @cached_property
    def grammars(self):
        return GrammarTokenizer(self.encoding, self.model.config.vocab_size, self.stop)

    def stream(self, grammar=None):
        """A `TextStream` of an output. If its grammar has tools, calls are JSON."""
        if grammar and grammar.tools:
            return CallText(grammar.tools, self.stop)
        return self.encoding.stream(self.stop, shown=())

    def decode(self, tokens, grammar=None):
        """The text of token ids, without control tokens and the stop string at its end."""
        stream = self.stream(grammar)
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
    model, encoding = load_model(args, group, template=args.chat_template)
    heads = None
    path = args.heads or default_heads(args.model, model) or "none"
    if drafts(args, "heads") and path != "none":
        heads = load_heads(path, model, encoding.hash)
    elif args.draft and "heads" in args.draft:
        raise InputError(f"{args.model}: has no draft heads, but --draft "
                         f"{'+'.join(sorted(args.draft))} needs them; train them with "
                         "train_heads.py, give --heads, or use --draft lookup")
    stop = [*stop_tokens(args.model, encoding), *filter(None, args.stop)]
    return Loaded(model, encoding, heads, sampling, stop, group)


def drafts(args, drafter):
    """Whether --draft names a drafter; without the flag all draft."""
    return args.draft is None or drafter in args.draft


def make_engine(args, loaded, batch_size, capacity, plain=False, guided=False):
    """The Engine that the flags describe. plain: for plain decoding. guided: some prompts have
    grammars. Sets torch's number of threads."""
    policy = Policy(loaded.model, loaded.heads, drafts(args, "lookup"),
                    1 if plain else args.tree_size, guided and drafts(args, "schema"))
    engine = Engine(loaded.model, policy=policy, batch_size=batch_size, capacity=capacity,
                    beams=args.beams, sampling=Sampling(**loaded.sampling))
    may_choose = loaded.model.device.type == "cpu" and loaded.group.size == 1
    if args.threads:
        torch.set_num_threads(args.threads)
    elif may_choose and not threads_are_set():
        cpu.choose_threads(partial(plain_seconds, engine.decoder))
    return engine


def new_tokens(args, config, length, ends, capacity=CONTEXT):
    """The most new tokens after a prompt of this length. ends: it is a chat, or has a grammar."""
    if args.max_new_tokens:
        return args.max_new_tokens
    if not ends:
        return NEW_TOKENS
    return config.block_size if config.block_size <= capacity else max(capacity - length, REPLY)


def plain_seconds(decoder):
    """Seconds of a plain step."""
    with decoder.context():
        start = timestamp(decoder.device)
        decoder.launch(Plan(decoder.batch_size, 1, 0, decoder.sampling.mode)).wait()
        return seconds_between(start, timestamp(decoder.device))


def sampling_flags(args):
    """The fields of a `Sampling` from the flags, or else from the model's generation_config.json,
    whose values it prints."""
    flags = {name: value for name in (*SAMPLING_KEYS, "seed")
             if (value := getattr(args, name)) is not None}
    # raises an error for a bad flag before the model is loaded
    is_greedy = Sampling(**dict(temperature=1) | flags).temperature == 0
    defaults = sampling_defaults(args.model, CHAT_SAMPLING if args.chat else None)
    defaults = {name: x for name, x in defaults.items() if name not in flags}
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
        print(f"sampling: {settings.replace('_', '-')} (--temperature 0 is greedy)",
              file=sys.stderr)
    return defaults | flags
