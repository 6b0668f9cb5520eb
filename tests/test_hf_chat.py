"""hf/chat.py: templates render like transformers; stop tokens and sampling defaults come from the folder."""

import json
import shutil

import pytest

import test_hf_tokenizer as tk
from conftest import refusal
from hf import chat, tokenizer
from hf.tokenizer_json import LLAMA3_PATTERN

SAID = {"generation_config.json": {"eos_token_id": 0}}


@pytest.mark.parametrize("files, expected", [
    ({}, [0, 1]),
    ({"config.json": {"eos_token_id": 1}}, [1, 0]),
    ({"config.json": {"eos_token_id": 1}, "generation_config.json": {"eos_token_id": [700, 0]}}, [700, 0]),
    ({"config.json": {"eos_token_id": 1}, "generation_config.json": {"eos_token_id": None}}, [1, 0]),
    ({"config.json": {"text_config": {"eos_token_id": 1}}}, [1, 0]),
    ({"config.json": {"eos_token_id": [700, 1], "text_config": {"eos_token_id": 0}}}, [700, 1, 0]),
    (SAID | {"tokenizer_config.json": {"eos_token": "<|im_end|>"}}, [0]),
    (SAID | {"tokenizer_config.json": {"eos_token": "<|im_end|>", "chat_template": "x"}}, [0, 1]),
    (SAID | {"tokenizer_config.json": {"eos_token": {"content": tk.EOT}, "chat_template": "x"}}, [0]),
    (SAID | {"tokenizer_config.json": {"chat_template": "{{ m }}<|im_end|>"}}, [0, 1]),
])
def test_stop_tokens_are_those_of_generation_config_then_config_then_the_end_of_text(files, expected, corpus, tmp_path):
    tk.save(tmp_path, tk.byte_level(corpus[:2], tk.BYTE_LEVEL, tk.CHAT))
    tk.write(tmp_path, {name: json.dumps(content) for name, content in files.items()})
    encoding = tokenizer.load_encoding(tmp_path)
    assert chat.stop_tokens(tmp_path, encoding) == expected


@pytest.mark.parametrize("ids", [700, -1, "0", True, [0, None], []])
def test_stop_tokens_that_are_no_tokens_are_refused(ids, corpus, tmp_path):
    tk.save(tmp_path, tk.byte_level(corpus[:2], tk.BYTE_LEVEL))
    tk.write(tmp_path, {"generation_config.json": json.dumps({"eos_token_id": ids})})
    encoding = tokenizer.load_encoding(tmp_path)
    refusal(lambda: chat.stop_tokens(tmp_path, encoding), tmp_path, "generation_config.json", "eos_token_id")
    tk.write(tmp_path, {"generation_config.json": "{"})
    refusal(lambda: chat.stop_tokens(tmp_path, encoding), tmp_path / "generation_config.json")


HEADERS = """{{- bos_token }}
{%- set ns = namespace(count=0) %}
<|head|>system<|/head|>

Today: {{ strftime_now("%d %b %Y") }}
{% if tools is not none %}
Tools: {{ tools | tojson(indent=2) }}
{% endif %}
{{ eos_token }}{{ nothing }}{{ unk_token if unk_token is defined else 'no unk' }}
{% for message in messages %}
    {% if message.content is not string %}
{{ raise_exception('text only') }}
    {% endif %}
    {%- if ns.count >= 3 %}{% break %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
{{- {'n': ns.count, 'text': message.content | trim, 'ümläut': '<&>'} | tojson }}{{ pad_token }}
{% endfor -%}
"""
CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": tk.EOT, "eos_token": tk.token("<|im_end|>"),
          "pad_token": tk.EOT}


def said(*turns):
    return [{"role": role, "content": content} for role, content in turns]


CHATS = [
    said(("user", " Hi <b>&amp;</b> 'é' 日\n")),
    said(("system", "be brief"), ("user", "x"), ("assistant", "y"), ("user", "z"), ("assistant", "w")),
    said(("user", ""))]


TOOLS = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is none %}NULL{% endif %}
{%- generation %}{% if message.content %}{{ message.content | trim }}{% endif %}{% endgeneration %}

{% for call in message.tool_calls or [] %}<call>{{ call | tojson }}{% endfor %}{{ message.tool_call_id }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{{ '<think></think>' if enable_thinking is false }}{% endif %}"""
CALL = {"id": "c1", "type": "function", "function": {"name": "sum", "arguments": {"a": [1, "é"]}}}
TURNS = [*said(("user", "2 + 3?")), {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
         {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c1", "content": "5"},
         *said(("assistant", " It is "))]


@pytest.mark.parametrize("source, chats, options", [
    (HEADERS, CHATS, {"add_generation_prompt": True}),
    (HEADERS, CHATS, {"add_generation_prompt": False, "tools": [{"type": "function", "name": "é<"}]}),
    *((TOOLS, [TURNS, TURNS[:1], CHATS[1]], options) for options in (
        {"add_generation_prompt": True}, {"continue_final_message": True},
        {"add_generation_prompt": True, "enable_thinking": False}))])
def test_a_template_renders_and_encodes_as_transformers_does(source, chats, options, corpus, tmp_path):
    """Bug: tool calls hidden from the template, a printed null, a final message that is closed, an extra BOS."""
    pytest.importorskip("transformers")
    spec = tk.byte_level(corpus[:2], tk.split_form(LLAMA3_PATTERN), tk.CHAT, post_processor=tk.BOS)
    tk.folder_of(tmp_path, spec, CONFIG | {"chat_template": source})
    ours, encoding = chat.load_chat_template(tmp_path), tokenizer.load_encoding(tmp_path)
    reference = tk.auto_tokenizer(tmp_path)
    for messages in chats:
        want = [reference.apply_chat_template(messages, tokenize=ids, return_dict=False, **options)
                for ids in (False, True)]
        assert [ours.render(messages, **options), encoding.chat(messages, **options)] == want


def test_a_developer_is_the_system_where_the_template_knows_no_other(tmp_path):
    for source, role in (("{{ messages[0].role }}", "system"), ("{{ messages[0].role }} {# developer #}", "developer")):
        tk.write(tmp_path, {"chat_template.jinja": source})
        assert chat.load_chat_template(tmp_path).render(said(("developer", "x"))).strip() == role


SMOLLM2 = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
ITERATES = """{% for m in messages %}{% for call in m.tool_calls %}{% for name, x in call.function.arguments | items %}
{{- name }}={{ x | tojson }}{% endfor %}{% endfor %}{% endfor %}"""
DUMPS = "{% for m in messages %}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}"
DEEPSEEK = """{% for m in messages %}{% if m['content'] is none %}
{{- '<call>' + m['tool_calls'][0]['function']['arguments'] }}
{%- else %}{{ m['content'] + '<end>' }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize("source, arguments, want", [
    (SMOLLM2, '{"a": 1}', "<|im_start|>assistant\n<|im_end|>"), (ITERATES, '{"a": "é"}', 'a="é"'),
    (DUMPS, '{"a": "é"}', '{"a": "é"}'), (DUMPS, "{no", '"{no"'), (DUMPS, {"a": 1}, '{"a": 1}'),
    pytest.param(DUMPS, "[" * 10**5, f'"{"[" * 10**5}"', id="depth"),
    (DEEPSEEK, '{"a":1}', '<call>{"a":1}')])
def test_tool_calls_of_openais_format_reach_every_kind_of_template(source, arguments, want, tmp_path):
    """Bug: string arguments are an error or escaped twice, a null content beside them is an error."""
    tk.write(tmp_path, {"chat_template.jinja": source})
    message = dict(role="assistant", content=None, tool_calls=[dict(function=dict(arguments=arguments))])
    before = json.dumps(message)
    assert chat.load_chat_template(tmp_path).render([message]) == want and json.dumps(message) == before


@pytest.mark.parametrize("name", chat.REASONING)
def test_reasoning_reaches_the_template_under_its_own_name(name, tmp_path):
    """Bug: reasoning that a client sends back under another name is dropped, or `enable_thinking` is taken for it."""
    for source in ("{{ enable_thinking }}{{ messages[0].%s }}", "{{ messages[0]['%s'] if '%s' in messages[0] }}"):
        tk.write(tmp_path, {"chat_template.jinja": source.replace("%s", name)})
        for sent in chat.REASONING:
            message = {"role": "assistant", "content": "x", sent: "why", "other": None}
            assert chat.load_chat_template(tmp_path).render([message]) == "why"


@pytest.mark.parametrize("source, reason", [
    ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
    ("{{ raise_exception('text only') }}", "text only"),
    ("{% set _ = messages.append(1) %}", "unsafe"),
    ("{{ range(1000000000) | list }}", "Range"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ("\n{{ raise_exception(1", "line 2"),
    ("{% generation %}", "line 1"),
    ("{% include 'tokenizer.json' %}", "loader"),
])
def test_a_broken_or_hostile_template_is_refused_in_one_line(source, reason, tmp_path):
    tk.write(tmp_path, {"chat_template.jinja": source})
    refusal(lambda: chat.load_chat_template(tmp_path).render(CHATS[0]), tmp_path / "chat_template.jinja", reason)


def test_where_a_template_is_looked_for(tmp_path):
    """Bug: a file of templates that is not read, or does not win; "default" renders a chat with tools, without them."""
    assert chat.load_chat_template(tmp_path) is None
    named = [{"name": name, "template": name + " {{ tools }}{{ mode }}{{ bos_token }}"}
             for name in ("default", "tool_use", "rag")]
    in_files = {"chat_template.jinja": "file " + named[0]["template"],
                "additional_chat_templates/tool_use.jinja": "file " + named[1]["template"]}
    for where, files in (("", {"tokenizer_config.json": json.dumps({"chat_template": named})}), ("file ", in_files)):
        tk.write(tmp_path, files | {"special_tokens_map.json": '{"bos_token": {"content": "<s>"}}'})
        template = chat.load_chat_template(tmp_path)
        template.variables["mode"] = "!"  # as --template-kwargs do
        assert template.render(CHATS[0]) == f"{where}default None!<s>"
        assert template.render(CHATS[0], tools=["f"]) == f"{where}tool_use ['f']!<s>"
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    refusal(lambda: chat.load_chat_template(tmp_path), "a template named default")
    shutil.rmtree(tmp_path / "additional_chat_templates")
    for broken in (7, [], [{"name": "tool_use", "template": "x"}], ["x"], {"default": 1}):
        tk.write(tmp_path, {"tokenizer_config.json": json.dumps({"chat_template": broken})})
        refusal(lambda: chat.load_chat_template(tmp_path), tmp_path / "tokenizer_config.json", "default")
    tk.write(tmp_path, {"tokenizer_config.json": "[]"})
    refusal(lambda: chat.load_chat_template(tmp_path), tmp_path / "tokenizer_config.json")
