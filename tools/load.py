"""Loads what the flags name (model, heads, tokenizer, prompts), and builds the engine."""

import itertools
import os
import re
import sys
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import torch

from backends import cpu, tensor_parallel
from backends.capture import warm_up
from common.files import OBJECTS, decode, read_lines, read_objects, read_text
from common.machine import available_cpus, pick_device
from common.values import warn
from engine.clock import seconds_between, timestamp
from generate import Plan, Sampling, prepare
from hf import checkpoint
from hf.calls import CallText, Tools
from hf.chat import SAMPLING_KEYS, load_chat_template, not_applied, sampling_defaults, stop_tokens
from hf.files import part_file, read_config
from hf.grammar import GrammarTokenizer
from hf.heads import load_heads
from hf.messages import messages_of, tools_of
from hf.paths import default_heads, find_model
from hf.tokenizer import Encoding, encode_prompt, load_encoding
from model import GPT, InputError, check, expect
from tools import fields


def load_model(args, group=None, packed=None, dtype=None, template=None):
    """Loads the GPT of --model, --device, --dtype and --quantize, and its tokenizer, whose chat
    template gets the variables of --template-kwargs. group, packed: as in `checkpoint.load`. dtype:
    used without --dtype. template: a file with another chat template."""
    device = pick_device((group and group.device) or args.device)
    if not threads_are_set():
        torch.set_num_threads(min(torch.get_num_threads(), available_cpus()))
    read_config(args.model)  # a path that is no model fails here, not for lack of a tokenizer
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


class Prompt(NamedTuple):
    """A conversation, and what the answer must match."""
    messages: list
    tools: dict = {}              # as of `tools_of`
    grammar: tuple | None = None  # arguments of `GrammarTokenizer.compile`
    choice: dict = {}             # other arguments of `Tools`


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
        """The `GrammarTokenizer`."""
        return GrammarTokenizer(self.encoding, self.model.config.vocab_size, self.stop)

    def tools(self, prompt):
        """The `Tools` of a `Prompt`, or None."""
        return Tools(self.encoding, **prompt.tools, **prompt.choice) if prompt.tools else None

    def encode(self, prompts, args):
        """Token ids of each `Prompt`, or without --chat of its last message. Runs on rank 0, since
        a template may read the clock."""
        def tokens(number, prompt):
            messages = prompt.messages
            try:
                tools = self.tools(prompt)
                thinks = not (prompt.grammar or tools and tools.required)
                options = {} if thinks else without_thinking(self.encoding.template)
                options |= dict(tools=tools.for_template) if tools else {}
                return (self.encoding.chat(messages, **options) if args.chat
                        else encode_prompt(self.encoding, messages[-1]["content"]))
            except InputError as error:
                source = f"{args.prompts}, prompt {number}: " if args.prompts else ""
                raise InputError(f"{source}{error}") from None
        return self.group.on_first(lambda: list(map(tokens, itertools.count(1), prompts)))

    def compile(self, prompts, ids):
        """The `Grammar` or None of each `Prompt`. ids: the prompts' token ids."""
        def grammar(number, prompt, tokens):
            try:
                source = ("tools", self.tools(prompt)) if prompt.tools else prompt.grammar
                return source and self.grammars.compile(*source).for_prompt(tokens)
            except InputError as error:
                raise InputError(f"prompt {number}: {error}") from None
        return list(map(grammar, itertools.count(1), prompts, ids))

    def stream(self, grammar=None):
        """A `TextStream` of an output. If its grammar has tools, calls are JSON."""
        if grammar and grammar.tools:
            return CallText(grammar.tools, self.stop)
        return self.encoding.output_stream(self.stop)

    def decode(self, tokens, grammar=None):
        """The text of token ids, without control tokens and the stop string at its end."""
        stream = self.stream(grammar)
        return stream.feed(tokens) + stream.finish()


def load(args, group):
    """Loads a `Loaded` on every rank, and checks that all ranks have read the same files."""
    loaded = group.raise_together(lambda: load_alone(args, group))
    if group.size > 1:
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
    path = args.heads or default_heads(args.model) or "none"
    if drafts(args, "heads") and path != "none":
        heads = load_heads(path, model, encoding.hash)
    elif args.draft and "heads" in args.draft:
        raise InputError(f"{args.model}: has no draft heads, but --draft "
                         f"{'+'.join(sorted(args.draft))} needs them; train them with "
                         "train_heads.py, give --heads, or use --draft lookup")
    stop = [*stop_tokens(args.model, encoding, args.chat_template), *filter(None, args.stop)]
    return Loaded(model, encoding, heads, sampling, stop, group)


def drafts(args, drafter):
    """Whether --draft names a drafter; without the flag all draft."""
    return args.draft is None or drafter in args.draft


def make_engine(args, loaded, prompts, max_new_tokens, plain=False, grammars=()):
    """The Engine that the flags describe for these prompts. Sets torch's number of threads.
    grammars: the `Grammar` or None of each prompt."""
    engine = prepare(loaded.model, prompts, max_new_tokens, loaded.heads,
                     lookup=drafts(args, "lookup"), schema=drafts(args, "schema") and any(grammars),
                     tree_size=1 if plain else args.tree_size, beams=args.beams,
                     batch_size=args.batch_size, **loaded.sampling)
    may_choose = loaded.model.device.type == "cpu" and loaded.group.size == 1
    if args.threads:
        torch.set_num_threads(args.threads)
    elif may_choose and not threads_are_set():
        cpu.choose_threads(partial(plain_seconds, engine.decoder))
    if args.compare:  # the timed run must not compile or load anything
        engine.generate(prompts[:1], min(4, max_new_tokens), grammars=grammars)
        engine.clear()
        warm_up(engine, guided=any(grammars))
    return engine


def plain_seconds(decoder):
    """Seconds of a plain step; None for the first one."""
    with decoder.context():
        start = timestamp(decoder.device)
        step = decoder.launch(Plan(decoder.batch_size, 1, 0, decoder.sampling.mode))
        step.wait()
        return None if step.is_first else seconds_between(start, timestamp(decoder.device))


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
    """The `Prompt`s of --prompt and --prompts; "-" is standard input. Raises InputError for --chat
    if the model has no chat template."""
    expect(not args.chat or load_chat_template(args.model, args.chat_template), f"{args.model}: "
           "has no chat template; leave out --chat, give --chat-template, or use a chat model")
    if args.prompts:
        found = read_prompt_file(args.prompts, None if args.chat else "--chat")
    else:
        found = [from_user(decode(sys.stdin.buffer.read(), "standard input") if text == "-"
                           else text) for text in args.prompt or []]
    own = read_grammar(args)
    own_tools = read_tools(args)
    prompts = [Prompt([*opening(args), *messages], tools or own_tools, grammar or own, choice)
               for messages, tools, grammar, choice in found]
    expect(not any(prompt.tools and prompt.grammar for prompt in prompts),
           "a prompt has tools or a grammar, not both; leave out one")
    return prompts


def read_tools(args):
    """The functions of --tools, as in `Prompt`."""
    if args.tools is None:
        return {}
    try:
        return tools_of(dict(tools=read_text(Path(args.tools))))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{args.tools}: expected a JSON list of functions, but: {error}") from None


def read_grammar(args):
    """The grammar of --json-schema, --regex or --grammar, as in `Prompt`; None without."""
    if args.json_schema is not None:
        is_json = args.json_schema.lstrip().startswith("{")
        return "json_schema", args.json_schema if is_json else read_text(Path(args.json_schema))
    if args.regex is not None:
        return "regex", args.regex
    file = args.grammar and Path(args.grammar)
    kinds = {".lark": "lark", ".gbnf": "gbnf"}
    return file and (kinds.get(file.suffix.lower(), "grammar"), read_text(file))


def read_prompt_file(file, missing=None, template=None):
    """The `Prompt`s of a file: its lines, or the objects of a .jsonl or .json file with a "prompt"
    or "messages", and maybe a "json_schema", or "tools" and a "tool_choice". missing: what messages
    and tools need and do not have. template: renders each, so that an error names the line."""
    file = Path(file)

    def parse(value):
        tools = tools_of(value)
        schema = value.get("json_schema")
        choice = fields.tool_choice("its tool_choice", value.get("tool_choice", "auto"))
        expect(choice is not None, "its tool_choice is none; leave out the tools")
        choice |= dict(parallel=value.get("parallel_tool_calls", True))
        expect(isinstance(schema, dict | None), "its json_schema is no object")
        is_text = isinstance(value.get("prompt"), str) and value.get("messages") is None
        messages = from_user(value["prompt"]).messages if is_text else messages_of(value)
        expect(messages, "it has no message")
        expect(is_text and not tools or not missing, f"messages and tools need {missing}")
        if template:
            template.render(messages, **tools)
        return Prompt(messages, tools, schema and ("json_schema", schema), choice)
    if file.name.endswith(OBJECTS):
        expected = 'an object with a "prompt" string or "messages"'
        found = [prompt for _, prompt in read_objects(file, parse, expected)]
    else:
        found = list(map(from_user, read_lines(file)))
    expect(found, f"{file}: contains no prompts")
    return found


def from_user(text):
    return Prompt([dict(role="user", content=text)])


def without_thinking(template):
    """Options for which a chat template does not open <think>, unless --template-kwargs decides."""
    is_set = template is None or "enable_thinking" in template.variables
    return {} if is_set else dict(enable_thinking=False)
