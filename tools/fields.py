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


def flag(name, value):
    expect(isinstance(value, bool), f"{name} must be true or false, not {value!r}")
    return value


def variables(name, value):
    expect(isinstance(value, dict), f"{name} must be an object, not {value!r}")
    return value


def refused(name, value):
    raise InputError(f"{name} is not supported; leave it out")


def object_of(readers, others=refused):
    """Reads an object by a table {its field: reader}; a field that is null counts as left out."""
    def read(name, value):
        return {field: readers.get(field, others)(f"{name}.{field}".lstrip("."), x)
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
    texts = [value] if isinstance(value, str) else value
    expect(isinstance(texts, list) and all(isinstance(text, str) for text in texts),
           f"{name} must be a text or a list of texts")
    expect(len(texts) <= 16, f"{name} may have 16 texts, not {len(texts)}")
    return [text for text in texts if text]


def is_ids(value):
    return isinstance(value, list) and all(type(index) is int for index in value)


def token_ids(name, value):
    expect(is_ids(value), f"{name} must be a list of token ids")
    return value


def prompts(name, value):
    """-> texts and lists of token ids"""
    several = isinstance(value, list) and value and not is_ids(value)
    values = value if several else [value]
    expect(all(isinstance(one, str) or is_ids(one) for one in values),
           f"{name} must be a text, a list of token ids, or a list of these")
    return values


def text(name, value):
    expect(isinstance(value, str), f"{name} must be a text, not {value!r}")
    return value


def content(name, value):
    """-> a text: that of the parts, if it has several"""
    parts = value if isinstance(value, list) else [dict(type="text", text=value)]
    for part in parts:
        kind = variables(f"a part of {name}", part).get("type")
        expect(kind == "text", f"{name}: a part of type {kind!r} is not supported, for the model "
               "reads text alone")
        text(name, part.get("text"))
    return "".join(part["text"] for part in parts)


def calls(name, value):
    expect(isinstance(value, list) and all(isinstance(call, dict) for call in value),
           f"{name} must be a list of objects")
    return value


MESSAGE = dict(role=text, content=content, name=text, tool_calls=calls, tool_call_id=text)


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
