"""hf/calls.py: outputs are calls of the functions that were given, and calls are read as they were written."""

import copy
import json
import re
from pathlib import Path

import pytest

from conftest import refusal, write_tokenizer
from hf.chat import ChatTemplate
from hf.tokenizer import load_encoding

pytest.importorskip("llguidance")

from hf.calls import CallReader, Tools, message_of  # noqa: E402
from hf.grammar import GrammarTokenizer  # noqa: E402
from test_hf_grammar import load  # noqa: E402

HERMES = (Path(__file__).parent.parent / "bench" / "hermes.jinja").read_text()
MISTRAL = '{{ tools }}{{- "[TOOL_CALLS] [" }}'
LLAMA = """<|start_header_id|>{{ tools }}{{- 'Write {"name": function name, "parameters": its arguments}.' }}"""
ADDED = "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>"
CITY = {"$defs": dict(name=dict(type="string", maxLength=9)), "type": "object", "required": ["city"],
        "properties": dict(city={"$ref": "#/$defs/name"})}
tool = lambda name, **function: dict(type="function", function=dict(name=name) | function)
TOOLS = [tool("get", parameters=CITY), tool("get.time"), tool('größe-"x"', parameters={}, description=None)]


def add_markers(path):
    """Writes a tokenizer with tokens for markers, with the ids from 258 on."""
    write_tokenizer(path, {text: "|" in text or "[" in text for text in ADDED})


def templated(encoding, source):
    encoding = copy.copy(encoding)
    encoding.template = ChatTemplate("template", source, {})
    return encoding


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """(an Encoding of bytes whose markers are tokens, its GrammarTokenizer)"""
    path = tmp_path_factory.mktemp("marked")
    add_markers(path)
    encoding = load_encoding(path)
    return encoding, GrammarTokenizer(encoding, 264, [257])


def calls_of(message):
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]


def written(grammar, encoding, text):
    """How many of a text's tokens the grammar allows, out of how many; whether the text may then end."""
    matcher, tokens = grammar.start(), encoding.encode(text, allowed_special="all")
    for number, token in enumerate(tokens):
        if not matcher.mask[token >> 5] >> (token & 31) & 1:
            return number, len(tokens), False
        assert matcher.take([token]) == 1
    stop = grammar.stop[0]
    return len(tokens), len(tokens), bool(matcher.ended or matcher.mask[stop >> 5] >> (stop & 31) & 1)


GET, TIME = ("get", '{"city": "a}\\"{"}'), ("get.time", "{}")
written_as = lambda calls: [f'{{"name": "{name}", "arguments": {x}}}' for name, x in calls]
hermes = lambda *calls: "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written_as(calls))
listed = lambda *calls: f"[TOOL_CALLS] [{', '.join(written_as(calls))}]"
llama = lambda name, x: f'{{"name": "{name}", "parameters": {x}}}'
WRITTEN = [  # template, options, output, its text and calls
    (HERMES, {}, f"So <tool_call {hermes(GET, TIME)}", "So <tool_call ", [GET, TIME]),
    (HERMES, {}, "<tool_", "<tool_", []), (MISTRAL, {}, f"I {listed(TIME, GET)}", "I ", [TIME, GET]),
    (HERMES, {}, hermes(('größe-\\"x\\"', "{}")), "", [('größe-"x"', "{}")]),
    (HERMES, dict(required=True), hermes(GET, GET), "", [GET, GET]),
    (HERMES, dict(required=True, only="get.time"), hermes(TIME), "", [TIME]), (LLAMA, {}, llama(*GET), "", [GET]),
    (LLAMA, {}, f"x{llama(*GET)}", f"x{llama(*GET)}", []), (LLAMA, {}, '{"name', '{"name', []),
    (LLAMA, {}, '{"name": 5}', '{"name": 5}', []), (LLAMA, dict(required=True), llama(*TIME), "", [TIME])]
TOKENS = [(HERMES, {}, f"<think>é</think>{hermes(GET)}", "<think>é</think>", [GET]),
          (LLAMA, {}, f"<|python_tag|>{llama(*GET)}", "", [GET])]


@pytest.mark.parametrize("template, options, output, text, calls", WRITTEN + TOKENS)
@pytest.mark.parametrize("are_tokens", [False, True])
def test_calls_are_allowed_and_read(marked, are_tokens, template, options, output, text, calls):
    """Bug: a token spelt as text, a call that a string's brace ends, text like a call that is lost, another stream."""
    if not are_tokens and output.startswith(("<think>", "<|python")):
        pytest.skip("has tokens")
    *_, encoding, tokenizer = (None, *marked) if are_tokens else load()
    tools = Tools(encoding := templated(encoding, template), TOOLS, **options)
    grammar = tokenizer.compile("tools", tools)
    number, total, may_end = written(grammar, encoding, output)
    assert number == total and may_end
    stream, reader, parts = encoding.stream([], tools.tokens.values()), CallReader(tools), []
    for token in encoding.encode(output, allowed_special="all"):
        parts += reader.feed(stream.feed([token]), token)
        done = calls_of(message_of(parts))
        assert all(name == want and full.startswith(x) for (name, x), (want, full) in zip(done, calls))
    said = message_of(parts + reader.feed(stream.finish()) + reader.finish())
    assert (said["content"] or "", done) == (text, calls) and reader.is_complete == bool(calls)
    assert all(re.fullmatch("[a-z0-9]{9}", call["id"]) for call in said.get("tool_calls", ()))


@pytest.mark.parametrize("template, options, output", [
    (HERMES, {}, hermes(("gets", "{}"))), (HERMES, {}, hermes(("get", "{}"))),
    (HERMES, {}, hermes(("get.time", '{"a": 1}'))), (HERMES, {}, hermes(("get", '{"city": 5}'))),
    (HERMES, {}, hermes(GET) + "so"), (HERMES, dict(parallel=False), hermes(GET, TIME)), (HERMES, {}, "<tool_call>so"),
    (HERMES, dict(required=True), "So " + hermes(GET)), (HERMES, dict(required=True, only="get"), hermes(TIME)),
    (HERMES, dict(required=True, only="get"), hermes(GET, GET)), (HERMES, dict(required=True), ""),
    (LLAMA, {}, llama("x", "{}")), (LLAMA, {}, llama(*GET) + " so"), (LLAMA, {}, llama(*TIME) + "; " + llama(*TIME))])
def test_other_calls_are_forbidden(marked, template, options, output):
    """Bug: an unknown function, arguments that break the schema, text after calls or instead, a second call."""
    for encoding, tokenizer in (marked, load()[2:]):
        grammar = tokenizer.compile("tools", Tools(templated(encoding, template), TOOLS, **options))
        number, total, may_end = written(grammar, encoding, output)
        assert not may_end and (number < total or output == "")


LOOK = r"^(?!\.)[a-z]+@[a-z]+$"  # as zod and pydantic write e-mails
LOOSE = {  # the schema of an argument, values that it allows nevertheless or not
    "unique": (dict(type="array", items=dict(type="integer"), uniqueItems=True), "[1, 1]", '["a"]'),
    "contains": (dict(type="array", contains=dict(const=1)), "[2]", "{}"),
    "not": ({"type": "string", "not": {}}, '""', "1"),
    "look": (dict(type="string", pattern=LOOK, maxLength=9), '"a@b"', "1"),
    "look inside": (dict(anyOf=[dict(type="null"), dict(pattern=LOOK, type="string")]), '"a"', "1"),
    "a reference": ({"$ref": "#/$defs/none"}, '{"any": [1]}', None), "a type": (dict(type="text"), "1", None),
    "depth": (json.loads('{"items": ' * 900 + "{}" + "}" * 900), "1", None)}


@pytest.mark.parametrize("template", [HERMES, LLAMA])
@pytest.mark.parametrize("schema, right, wrong", LOOSE.values(), ids=LOOSE)
def test_a_schema_that_cannot_be_compiled_is_loosened_unless_it_is_strict(marked, template, schema, right, wrong):
    """Bug: one such tool, and every request with it is refused, "hi" too; another tool is loosened with it."""
    encoding, tokenizer = marked
    parameters = dict(type="object", properties=dict(a=schema), required=["a"])
    given = [tool("f", parameters=parameters), TOOLS[0], *(tool(f"t{i}", parameters=CITY) for i in range(40))]
    grammar = tokenizer.compile("tools", Tools(encoding := templated(encoding, template), given))
    write = hermes if template == HERMES else lambda call: llama(*call)
    allowed = lambda name, x: written(grammar, encoding, write((name, x)))[2]
    assert written(grammar, encoding, "hi")[2] and allowed("f", f'{{"a": {right}}}') and allowed(*GET)
    assert not allowed("get", '{"city": 5}') and (wrong is None or not allowed("f", f'{{"a": {wrong}}}'))
    given[0]["function"]["strict"] = True
    refusal(lambda: tokenizer.compile("tools", Tools(encoding, given)), "tool 'f': ")


@pytest.mark.parametrize("template", [HERMES, MISTRAL, LLAMA])
@pytest.mark.parametrize("are_tokens", [False, True])
def test_an_answer_beside_tools_matches_its_schema(marked, are_tokens, template):
    """Bug: free text beside a response_format; an answer that begins like a call, or has a marker, is lost."""
    *_, encoding, tokenizer = (None, *marked) if are_tokens else load()
    answer = CITY | dict(properties=dict(name=dict(type="string")), required=["name"], additionalProperties=False)
    write = {HERMES: hermes, MISTRAL: listed}.get(template, lambda call: llama(*call))
    tools = Tools(encoding := templated(encoding, template), TOOLS, answer=json.dumps(answer))
    grammar = tokenizer.compile("tools", tools)
    assert written(grammar, encoding, write(GET))[2] and not written(grammar, encoding, "text")[2]
    for text in ('{"name": "Oslo"}', '{"name": "<tool_call>[TOOL_CALLS]"}'):
        tokens = [token for char in text for token in encoding.encode(char)]
        assert grammar.start().take(tokens) == len(tokens)
        stream, reader, parts = encoding.stream([], tools.tokens.values()), CallReader(tools), []
        for token in tokens:
            parts += reader.feed(stream.feed([token]), token)
        assert message_of(parts + reader.feed(stream.finish()) + reader.finish()) == dict(content=text)
    refusal(lambda: tokenizer.compile("tools", Tools(encoding, TOOLS, answer="{")), "not a json_schema")


def test_text_up_to_a_token_is_forced(marked):
    """Bug: a chain that spells a token as text, which the model never writes."""
    encoding, tokenizer = marked
    matcher = tokenizer.compile("tools", Tools(templated(encoding, HERMES), TOOLS[:1], required=True)).start()
    assert matcher.forced()[0] == 258 and encoding.decode(matcher.forced()).startswith('<tool_call>\n{"name": "get')
    matcher.take(encoding.encode('<tool_call>\n{"name": "get", "arguments": {"city": "a"', allowed_special="all"))
    assert matcher.forced()[-1] == 259


@pytest.mark.parametrize("source, says", [
    ("{{ messages }}", "takes no tools; give --chat-template"),
    ("{{ tools }}<tool_call>\n<function=name>\n<parameter=x>", "only those of Hermes"),  # Qwen 3 Coder
    ("{{ tools }}<tool_call>{function-name}\n<arg_key>", "only those of Hermes"),        # GLM 4.5
    ("{{ tools }}{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "only those of Hermes")])
def test_other_formats_are_refused(source, says):
    encoding = templated(load()[2], source)
    refusal(lambda: load()[3].compile("tools", Tools(encoding, TOOLS)), "template: ", says)
