"""The fields of a request to tools/serve.py. A field is implemented, accepted without an effect, or
refused by its name: docs/serving.md has the tables below in words.

A reader takes a field's name and its value, and returns what the server uses; it raises InputError,
which names the field."""

import json

from hf.chat import SAMPLING
from model import InputError, check, expect


def any_value(name, value):
    return value


def whole(low, high):
    def read(name, value):
        check(name, value, low, high, whole=True)
        return value
    return read


def of(kind, what):
    """Reads a value of one type."""
    def read(name, value):
        expect(type(value) is kind, f"{name} must be {what}, not {value!r}")
        return value
    return read


def list_of(kind, what):
    def read(name, value):
        expect(type(value) is list and all(type(x) is kind for x in value),
               f"{name} must be a list of {what}")
        return value
    return read


flag = of(bool, "true or false")
text = of(str, "a text")
variables = of(dict, "an object")
token_ids = list_of(int, "token ids")


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
    def read(name, value):
        valid = any(value == x and isinstance(value, bool) == isinstance(x, bool) for x in values)
        expect(valid, f"{name}: only {' or '.join(map(json.dumps, values))} is supported; leave it "
               "out")
        return value
    return read


def stop_texts(name, value):
    texts = list_of(str, "texts, or a text")(name, [value] if isinstance(value, str) else value)
    expect(len(texts) <= 16, f"{name} may have 16 texts, not {len(texts)}")
    return [text for text in texts if text]


def prompts(name, value):
    """-> texts and lists of token ids"""
    several = type(value) is list and any(type(x) is not int for x in value)
    read = list_of(int, "token ids, a text, or a list of these")
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
               tool_calls=list_of(dict, "objects"))


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
COMMON = (
    dict(model=any_value, n=whole(1, 128), draft=only("none"), show_steps=flag, stream=flag,
         stream_options=object_of(STREAM_OPTIONS), stop=stop_texts, stop_token_ids=token_ids)
    | dict.fromkeys(("max_tokens", "max_completion_tokens"), whole(1, 2**31))
    | dict.fromkeys((*SAMPLING, "seed"), any_value)  # `Sampling` checks them
    # accepted and ignored: they do not change the text
    | dict.fromkeys(("user", "metadata", "store", "service_tier", "safety_identifier", "request_id",
                     "priority", "prediction", "parallel_tool_calls", "prompt_cache_key",
                     "prompt_cache_options", "prompt_cache_retention"), any_value)
    # not supported, but accepted where they ask for nothing
    | dict.fromkeys(("tools", "functions", "bad_words"), only([]))
    | dict.fromkeys(("tool_choice", "function_call"), only("none", "auto"))
    | dict.fromkeys(("presence_penalty", "frequency_penalty", "min_tokens", "top_logprobs"),
                    only(0))
    | dict.fromkeys(("repetition_penalty", "length_penalty", "best_of"), only(1))
    | dict.fromkeys(("logprobs", "echo", "ignore_eos", "use_beam_search"), only(False))
    | dict(logit_bias=only({}), suffix=only(""), modalities=only(["text"]),
           response_format=only(dict(type="text"))))
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
