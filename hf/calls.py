"""Tool calls: the formats in which models write them, the grammar of calls of given functions, and
the calls in an output."""

import contextlib
import json
import re
import uuid
from functools import cached_property
from typing import NamedTuple

from hf.grammar import schema_text
from model import InputError, expect


class Format(NamedTuple):
    """How a model calls functions: begin call (between call)* end, where a call is
    {"name": ..., arguments: {...}}. trigger: what only a call begins with. known_by: an expression
    that is found in its chat templates."""
    name: str
    known_by: str
    trigger: str
    begin: str
    between: str | None  # None: one call, which is the whole output
    end: str
    arguments: str = "arguments"


CALL = '{"name": "'
FORMATS = (
    Format("Hermes (Qwen 2.5 and 3, SmolLM)", r"<tool_call>(\\n|\s)*\{\\*[\"']",
           "<tool_call>", "<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    Format("Mistral before [ARGS]", r"\[TOOL_CALLS\] \[", "[TOOL_CALLS]", "[TOOL_CALLS] [", ", ",
           "]"),
    Format("Mistral before [ARGS]", r"\[TOOL_CALLS\]\[", "[TOOL_CALLS]", "[TOOL_CALLS][", ", ",
           "]"),
    Format("Llama 3", r'(?s)<\|start_header_id\|>.*\{\\?"name\\?": [^{}]*"parameters\\?": ', CALL,
           "", None, "", "parameters"))
MARKERS = "<tool_call>", "</tool_call>", "[TOOL_CALLS]"  # of these, some are tokens
PYTHON_TAG = "<|python_tag|>"  # Llama's calls may begin with this token
EMPTY = dict(type="object", properties={}, additionalProperties=False)
COMBINED = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"}


def functions_of(tools):
    """{name: JSON schema of the arguments} of tools in OpenAI's format. Arguments that a schema
    does not name are not allowed, unless it says otherwise. Raises InputError."""
    expect(isinstance(tools, list), "tools must be a list of objects")
    found = {}
    for number, tool in enumerate(tools):
        place = f"tools[{number}]"
        expect(isinstance(tool, dict), f"{place} must be an object")
        expect(tool.get("type") == "function" and isinstance(tool.get("function"), dict),
               f"{place} must be a function, not of type {tool.get('type')!r}")
        name = tool["function"].get("name")
        schema = tool["function"].get("parameters") or EMPTY
        is_object = isinstance(schema, dict) and (schema.get("type") or "object") == "object"
        expect(isinstance(name, str) and name, f"{place}.function.name must be a string")
        expect(name not in found, f"{place}: there is another tool named {name!r}; rename one")
        expect(is_object, f"{place}.function.parameters must be a JSON schema of an object")
        found[name] = (dict(type="object") if COMBINED & schema.keys() else EMPTY) | schema
    return found


class Tools:
    """Functions that a model may call. tools: in OpenAI's format. required: whether the output
    begins with a call; else text may come first, or only text. only: the name of the one function
    that may be called, once. parallel: whether several calls may follow each other. answer: a JSON
    schema for an output without calls. Raises InputError for tools that are wrong, and for a chat
    template that takes none."""

    def __init__(self, encoding, tools, required=False, only=None, parallel=True, answer=None):
        self.encoding = encoding
        self.functions = functions_of(tools)
        template = encoding.template
        expect(template.takes_tools, f"{template.file}: the chat template takes no tools; give "
               "--chat-template a file with one that does")
        self.for_template = [dict(type="function", function=dict(parameters=EMPTY) | {
            key: x for key, x in tool["function"].items() if x is not None}) for tool in tools]
        self.strict = {tool["function"]["name"] for tool in tools if tool["function"].get("strict")}
        self.lenient = set()  # names of functions whose arguments may break a part of the schema
        self.required = required
        self.answer = None if required else answer
        self.parallel = parallel and only is None
        if only is not None:
            names = ", ".join(self.functions)
            expect(only in self.functions, f"tool_choice is {only!r}, but the tools are {names}")
            self.functions = {only: self.functions[only]}

    @cached_property
    def format(self):
        """The `Format` of the chat template."""
        template = self.encoding.template
        source = (template.with_tools or template).source
        known = [form for form in FORMATS if re.search(form.known_by, source)]
        names = ", ".join(dict.fromkeys(form.name for form in FORMATS))
        expect(known, f"{template.file}: calls in the format of this chat template are not "
               f"supported, only those of {names}")
        return known[0]

    @cached_property
    def tokens(self):
        """{marker: id} of the MARKERS that are tokens."""
        tokens = self.encoding.special_tokens
        return {marker: tokens[marker] for marker in MARKERS if marker in tokens}

    def compile(self, tokenizer):
        """The `Grammar` of the outputs. tokenizer: a `GrammarTokenizer`. An InputError for a schema
        names the function."""
        if self.answer is not None:
            tokenizer.compile("json_schema", self.answer)
        try:
            grammar = tokenizer.compile("lark", self.lark())
        except (ValueError, TypeError, RecursionError):  # an InputError, or schemas that are none
            self.loosen(tokenizer)
            grammar = tokenizer.compile("lark", self.lark())
        grammar.tools = self
        return grammar

    def loosen(self, tokenizer):
        """Of functions whose schema cannot be compiled, ignores the keywords that llguidance does
        not support, or else the whole schema. Raises InputError for one that is strict."""
        for name, schema in self.functions.items():
            try:
                tokenizer.compile("json_schema", schema)
            except InputError as error:
                if name in self.strict:
                    raise InputError(f"tool {name!r}: {error}") from None
                self.lenient.add(name)
                try:
                    tokenizer.compile("json_schema", json.loads(schema_text(schema, True)))
                except (InputError, ValueError, TypeError, RecursionError):
                    self.functions[name] = dict(type="object")

    def lark(self):
        """The grammar of the outputs in llguidance's notation. A marker that is a token is written
        as one, since text cannot match it."""
        form = self.format
        trigger = self.terminals(form.begin and form.trigger)
        more = f"({self.terminals(form.between)} call)*" if form.between and self.parallel else ""
        call = quoted(CALL)
        head = lambda name, rest: quoted(quoted(name)[1:] + rest)
        if self.answer is not None:  # an object, too: where both could go on, terminals must agree
            call = " ".join(map(quoted, ("{", '"name"', ": ")))
            head = lambda name, rest: f"{quoted(quoted(name))} {quoted(rest)}"
        names = [f"function{i}" for i in range(len(self.functions))]
        rules = [f"calls: {self.terminals(form.begin.removeprefix(form.trigger))} call {more} "
                 f"{self.terminals(form.end)}",
                 f"call: {call} ({' | '.join(names)})"]
        for rule, (name, schema) in zip(names, self.functions.items()):
            schema = schema_text(schema, name in self.lenient)
            begin = head(name, f", \"{form.arguments}\": ")
            rules.append(f"{rule}: {begin} %json {schema} \"}}\"")
        return "\n".join([*self.start(form, trigger), *rules])

    def start(self, form, trigger):
        """The rules of what comes before the calls, or in place of them."""
        if self.required:
            return [f"start: {trigger} calls"]
        if self.answer is not None:
            return [f"start: {trigger} calls | answer", f"answer: %json {schema_text(self.answer)}"]
        if form.trigger in self.tokens:  # text may have other special tokens, such as <think>
            return [f"start: (<[^{self.tokens[form.trigger]}]>)* ({trigger} calls)?"]
        if form.begin:
            return ["start: text_and_trigger calls | TEXT",
                    f"text_and_trigger[lazy]: TEXT {trigger}", r"TEXT: /(.|\n)*/"]
        tag = self.encoding.special_tokens.get(PYTHON_TAG)
        return [f"start: {'' if tag is None else f'<[{tag}]>?'} calls | TEXT",
                rf"TEXT: /(.|\n)*/ & ~/{re.escape(CALL)}(.|\n)*/"]

    def terminals(self, text):
        parts = re.split(f"({'|'.join(map(re.escape, MARKERS))})", text)
        return " ".join(f"<[{self.tokens[part]}]>" if part in self.tokens else quoted(part)
                        for part in parts if part)


def quoted(text):
    return json.dumps(text, ensure_ascii=False)


class CallReader:
    """Finds the calls in an output while it arrives, as parts (kind, text, number of the call):
    "text" before calls, a call's "name", its "arguments", JSON in pieces, and its "end", a brace.
    is_complete: whether the output has calls and ends with one."""

    def __init__(self, tools):
        self.tools = tools
        self.trigger = tools.format.trigger
        self.key = tools.format.arguments
        starts = tools.answer is not None or not tools.format.begin  # a call starts the output
        self.read = self.read_start if starts else self.read_text
        self.text = ""       # not read yet
        self.number = -1     # of the current call
        self.arguments = ""
        self.is_complete = False

    def feed(self, text, token=None):
        """The parts in the next text. token: its last one."""
        self.text += text
        self.token = token
        parts = []
        while self.text and (found := self.read()) is not None:
            parts += [(*part, self.number) for part in found if part[1]]
        return parts

    def finish(self):
        """The parts in text that was held back because it could begin a call."""
        is_text = self.read in (self.read_text, self.read_start)
        is_text |= self.number < 0 and not self.tools.format.begin  # as {"name": in an answer
        return [("text", self.text, 0)] if is_text and self.text else []

    # Each reads the front of `text`, or returns None if it needs more

    def read_start(self):
        """An output that is a call, or else text."""
        if len(self.text) < len(self.trigger) and self.trigger.startswith(self.text):
            return None
        self.read = self.read_head if self.text.startswith(self.trigger) else self.read_rest
        return []

    def read_rest(self):
        text, self.text = self.text, ""
        return [("text", text)]

    def read_text(self):
        """Text before a call. A trigger that is a token begins none where its text has others."""
        trigger = self.tools.tokens.get(self.trigger)
        before, found, after = self.text.partition(self.trigger)
        if found and trigger in (None, self.token):
            self.text = after
            self.read = self.read_head
            return [("text", before)]
        ends = [n for n in range(len(self.trigger)) if self.text.endswith(self.trigger[:n])]
        end = len(self.text) - (max(ends) if trigger is None else 0)
        before, self.text = self.text[:end], self.text[end:]
        return [("text", before)] if before else None

    def read_head(self):
        """A call up to its arguments."""
        head = re.match(rf'[^{{]*\{{"name": ("(?:[^"\\]|\\.)*"), "{self.key}": ', self.text)
        if head is None:
            return None
        self.text = self.text[head.end():]
        self.number += 1
        self.arguments = ""
        self.is_complete = False
        self.read = self.read_arguments
        return [("name", json.loads(head[1]))]

    def read_arguments(self):
        start = len(self.arguments)
        self.arguments += self.text
        new, self.text = self.text, ""
        if "}" in new:
            with contextlib.suppress(ValueError, RecursionError):  # they are not complete
                _, end = json.JSONDecoder().raw_decode(self.arguments)
                self.text = self.arguments[end:]
                self.is_complete = True
                self.read = self.read_head
                return [("arguments", self.arguments[start:end]), ("end", "}")]
        return [("arguments", new)]


class CallText:
    """A `TextStream` of an output in which each call is a line of JSON."""

    def __init__(self, tools, stop):
        self.stream = tools.encoding.stream(stop, tools.tokens.values())
        self.reader = CallReader(tools)
        self.line = ""  # what ends the line before a call

    def feed(self, tokens):
        return "".join(self.shown(*part) for token in tokens
                       for part in self.reader.feed(self.stream.feed([token]), token))

    def finish(self):
        rest = self.reader.feed(self.stream.finish()) + self.reader.finish()
        return "".join(self.shown(*part) for part in rest)

    def shown(self, kind, text, number):
        line, self.line = self.line, "\n"
        name = json.dumps(text, ensure_ascii=False)
        return f'{line}{{"name": {name}, "arguments": ' if kind == "name" else text


def message_of(parts, is_delta=False):
    """The content and tool_calls of a message in OpenAI's format, or of the next part of one."""
    content = "".join(text for kind, text, _ in parts if kind == "text")
    calls = {}
    for kind, text, number in parts:
        if kind == "name":
            function = dict(name=text, arguments="")
            calls[number] = dict(id=uuid.uuid4().hex[:9], type="function", function=function)
        elif kind == "arguments":
            call = calls.setdefault(number, dict(function=dict(arguments="")))
            call["function"]["arguments"] += text
    calls = [(dict(index=number) if is_delta else {}) | call for number, call in calls.items()]
    return dict(content=content or None, tool_calls=calls) if calls else dict(content=content)
