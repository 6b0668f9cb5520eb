"""Prompts: those that the flags and files name, their token ids and their grammars."""

import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

from common.files import OBJECTS, decode, read_lines, read_objects, read_text
from hf.calls import Tools
from hf.chat import load_chat_template
from hf.messages import messages_of, tools_of
from hf.tokenizer import encode_prompt
from model import InputError, expect
from tools.request_fields import tool_choice


class Prompt(NamedTuple):
    """A conversation, and what the answer must match."""
    messages: list
    tools: dict = {}              # as of `tools_of`
    grammar: tuple | None = None  # arguments of `GrammarTokenizer.compile`
    choice: dict = {}             # other arguments of `Tools`
    kind: str = "chat"            # by which `bench decode` groups prompts


def from_user(text):
    return Prompt([dict(role="user", content=text)])


def read_prompt_file(file, missing=None, template=None):
    """The `Prompt`s of a file: its lines, or the objects of a .jsonl or .json file with a "prompt"
    or "messages", and maybe a "json_schema", or "tools" and a "tool_choice", and a "kind". missing:
    what messages and tools need and do not have. template: renders each, so that an error names the
    line."""
    file = Path(file)
    if file.name.endswith(OBJECTS):
        expected = 'an object with a "prompt" string or "messages"'
        parse = partial(parse_prompt, missing, template)
        found = [prompt for _, prompt in read_objects(file, parse, expected)]
    else:
        found = list(map(from_user, read_lines(file)))
    expect(found, f"{file}: contains no prompts")
    return found


def parse_prompt(missing, template, value):
    text = value.get("prompt") if value.get("messages") is None else None
    is_text = isinstance(text, str)
    messages = from_user(text).messages if is_text else messages_of(value)
    expect(messages, "it has no message")
    tools = tools_of(value)
    expect(is_text and not tools or not missing, f"messages and tools need {missing}")
    if template:
        template.render(messages, **tools)
    schema = value.get("json_schema")
    expect(isinstance(schema, dict | None), "its json_schema is no object")
    choice = tool_choice("its tool_choice", value.get("tool_choice", "auto"))
    expect(choice is not None, "its tool_choice is none; leave out the tools")
    choice |= dict(parallel=value.get("parallel_tool_calls", True))
    kind = str(value.get("kind", "chat"))
    return Prompt(messages, tools, schema and ("json_schema", schema), choice, kind)


# --------------------------------------------------------------------------------------------------
# Flags

def opening(args):
    """The first messages of a conversation: --system."""
    return [] if args.system is None else [dict(role="system", content=args.system)]


def read_prompts(args):
    """The `Prompt`s of --prompt and --prompts; "-" is standard input. Raises InputError for --chat
    if the model has no chat template."""
    expect(not args.chat or load_chat_template(args.model, args.chat_template), f"{args.model}: "
           "has no chat template; leave out --chat, give --chat-template, or use a chat model, "
           "such as --model smollm2")
    if args.prompts:
        found = read_prompt_file(args.prompts, None if args.chat else "--chat")
    else:
        found = [from_user(decode(sys.stdin.buffer.read(), "standard input") if text == "-"
                           else text) for text in args.prompt or []]
    own = read_shape(args)
    prompts = [prompt._replace(messages=[*opening(args), *prompt.messages],
                               tools=prompt.tools or own.tools,
                               grammar=prompt.grammar or own.grammar) for prompt in found]
    expect(not any(prompt.tools and prompt.grammar for prompt in prompts),
           "a prompt has tools or a grammar, not both; leave out one")
    return prompts


def read_shape(args):
    """A `Prompt` without messages: --tools, and the grammar of --json-schema, --regex or
    --grammar."""
    tools = {}
    if args.tools is not None:
        try:
            tools = tools_of(dict(tools=read_text(Path(args.tools))))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{args.tools}: expected a JSON list of functions, but: "
                             f"{error}") from None
    grammar = None
    if args.json_schema is not None:
        is_json = args.json_schema.lstrip().startswith("{")
        schema = args.json_schema if is_json else read_text(Path(args.json_schema))
        grammar = "json_schema", schema
    elif args.regex is not None:
        grammar = "regex", args.regex
    elif args.grammar:
        file = Path(args.grammar)
        grammar = "lark" if file.suffix.lower() == ".lark" else "gbnf", read_text(file)
    return Prompt([], tools, grammar)


# --------------------------------------------------------------------------------------------------
# Encoding

def encode(loaded, prompts, args):
    """The token ids of each `Prompt`, without --chat of its last message, and its `Grammar` or
    None -> two lists. Rank 0 encodes, since a template may read the clock."""
    encoding = loaded.encoding
    ids = []
    grammars = []
    for number, prompt in enumerate(prompts, start=1):
        try:
            tools = Tools(encoding, **prompt.tools, **prompt.choice) if prompt.tools else None
            options = dict(tools=tools.for_template) if tools else {}
            if prompt.grammar or tools and tools.required:
                options |= without_thinking(encoding.template)
            ids.append(loaded.group.on_first(
                lambda: encoding.chat(prompt.messages, **options) if args.chat
                else encode_prompt(encoding, prompt.messages[-1]["content"])))
            source = ("tools", tools) if tools else prompt.grammar
            grammars.append(source and loaded.grammars.compile(*source).for_prompt(ids[-1]))
        except InputError as error:
            file = f"{args.prompts}, " if args.prompts else ""
            raise type(error)(f"{file}prompt {number}: {error}") from None
    return ids, grammars


def without_thinking(template):
    """Options for which a chat template does not open <think>, unless --template-kwargs decides."""
    is_set = template is None or "enable_thinking" in template.variables
    return {} if is_set else dict(enable_thinking=False)
