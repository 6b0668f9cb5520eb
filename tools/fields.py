"""The fields of a request to tools/serve.py. A field is implemented, accepted without an effect, or
refused by its name: docs/serving.md has the tables below in words.

A reader takes a field's name and its value, and returns what the server uses; it raises InputError,
which names the field."""

import json

from model import InputError, check, expect


def any_value(name, value):
    return value


def whole(low, high):
    def read(name, value):
        check(name, value, low, high, whole=True)
        return value
    return read


def of(kind, what, listed=False):
    """Reads a value of one type, or a list of such."""
    def read(name, value):
        is_list = listed and type(value) is list
        types = {*map(type, value)} if is_list else {type(value)}
        expect(types <= {kind} and is_list == listed, f"{name} must be {what}")
        return value
    return read


flag = of(bool, "true or false")
text = of(str, "a text")
variables = of(dict, "an object")
token_ids = of(int, "a list of token ids", listed=True)


def refused(name, value):
    raise InputError(f"{name} is not supported; leave it out")


def object_of(readers, others=refused):
    """Reads an object by a table {its field: reader}; a field that is null counts as left out."""
    def read(name, value):
        return {field: readers.get(field, others)(f"{name}.{field}" if name else field, x)
                for field, x in variables(name, value).items() if x is not None}
    return read


def only(*values):
    """Reads what is supported with these values alone, most of which ask for nothing."""
    texts = list(map(json.dumps, values))  # as which 0 is not false

    def read(name, value):
        expect(json.dumps(value) in texts, f"{name}: only {' or '.join(texts)} is supported; leave "
               "it out")
        return value
    return read


def stop_texts(name, value):
    read = of(str, "a list of texts, or a text", listed=True)
    texts = read(name, [value] if isinstance(value, str) else value)
    expect(len(texts) <= 16, f"{name} may have 16 texts, not {len(texts)}")
    return [text for text in texts if text]


def prompts(name, value):
    """-> texts and lists of token ids"""
    several = type(value) is list and any(type(x) is not int for x in value)
    read = of(int, "a text, a list of token ids, or a list of these", listed=True)
    return [prompt if isinstance(prompt, str) else read(name, prompt)
            for prompt in (value if several else [value])]


def content(name, value):
    """-> a text: that of the parts, if it has several"""
    parts = value if isinstance(value, list) else [dict(type="text", text=value)]
    for part in parts:
        kind = variables(f"a part of {name}", part).get("type")
        expect(kind == "text", f"{name}: a part of type {kind!r} is not supported, for the model "
               "reads text alone")
        text(name, part.get("text"))
    return "".join(part["text"] for part in parts)


MESSAGE = dict(role=text, content=content, name=text, tool_call_id=text,
               tool_calls=of(dict, "a list of objects", listed=True))


def messages(name, value):
    """-> messages as a chat template reads them"""
    expect(isinstance(value, list) and value, f"{name} must be a list of at least one message")
    read = object_of(MESSAGE, any_value)
    values = [read(f"{name}[{number}]", message) for number, message in enumerate(value)]
    for number, message in enumerate(values):
        needed = {"role"} if message.get("role") == "assistant" else {"role", "content"}
        expect(needed <= message.keys(), f"{name}[{number}] needs a role and a content")
    return values


# --------------------------------------------------------------------------------------------------
# The table

STREAM_OPTIONS = dict(include_usage=flag, include_obfuscation=flag,
                      continuous_usage_stats=only(False))
COMMON = {name: reader for reader, names in {
    flag: "stream show_steps", whole(1, 128): "n",
    whole(1, 2**31): "max_tokens max_completion_tokens",
    object_of(STREAM_OPTIONS): "stream_options", stop_texts: "stop", token_ids: "stop_token_ids",
    only("none"): "draft",
    # those from user on are ignored: they do not change the text; `Sampling` checks the others
    any_value: "model temperature top_k top_p min_p seed user metadata store service_tier "
               "safety_identifier request_id priority prediction parallel_tool_calls "
               "prompt_cache_key prompt_cache_options prompt_cache_retention",
    # not supported, but accepted where they ask for nothing
    only([]): "tools functions bad_words", only({}): "logit_bias", only(""): "suffix",
    only("none", "auto"): "tool_choice function_call", only(["text"]): "modalities",
    only(0, 0.0): "presence_penalty frequency_penalty min_tokens top_logprobs",
    only(1, 1.0): "repetition_penalty length_penalty best_of",
    only(False): "logprobs echo ignore_eos use_beam_search",
    only(dict(type="text")): "response_format"}.items() for name in names.split()}
CHAT = COMMON | dict(messages=messages, chat_template_kwargs=variables, add_generation_prompt=flag,
                     continue_final_message=flag)
COMPLETION = COMMON | dict(prompt=prompts)
DEFAULTS = dict(stream=False, stream_options={}, show_steps=False, n=1, stop=[], stop_token_ids=[],
                chat_template_kwargs={})


def read(body, chat):
    """The fields of a request, with defaults for some of those that are left out or null."""
    values = object_of(CHAT if chat else COMPLETION)("", body)
    needed = "messages" if chat else "prompt"
    expect(needed in values, f"{needed} is missing")
    return DEFAULTS | values
