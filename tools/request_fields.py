"""The fields of a request to tools/serve.py, as listed in docs/serving.md. A field's reader gets
its name and value, and returns the value to use or raises an InputError that names the field."""

import json

from hf.messages import message_of
from model import InputError, expect

MANY = 2**31  # tokens, more than a context has


def any_value(name, value):
    return value


def must_be(what, is_valid):
    """A reader of values for which is_valid(value). Raises InputError with `what` for others."""
    def read(name, value):
        expect(is_valid(value), f"{name} must be {what}")
        return value
    return read


def list_of(kind, what):
    return must_be(what, lambda value: type(value) is list and {*map(type, value)} <= {kind})


def whole(low, high):
    return must_be(f"a whole number from {low} to {high}",
                   lambda value: type(value) is int and low <= value <= high)


def limit(name, value):
    """Returns a number of tokens, for -1 one that is no limit."""
    return MANY if value == -1 else whole(1, MANY)(name, value)


def only(*values):
    """Reads one of a few supported values, most of which have no effect."""
    supported = [json.dumps(value) for value in values]  # as JSON, 0 differs from false
    return must_be(f"{' or '.join(supported)} or left out; other values are not supported",
                   lambda value: json.dumps(value) in supported)


flag = must_be("true or false", lambda value: type(value) is bool)
text = must_be("a string", lambda value: type(value) is str)
variables = must_be("an object", lambda value: type(value) is dict)
token_ids = list_of(int, "a list of token ids")


def refused(name, value):
    raise InputError(f"{name} is not supported; leave it out")


def object_of(readers, others=refused):
    """Reads an object, each field by its reader in {field: reader}. Drops fields that are null."""
    def read(name, value):
        prefix = f"{name}." if name else ""
        return {field: readers.get(field, others)(prefix + field, x)
                for field, x in variables(name, value).items() if x is not None}
    return read


def stop_strings(name, value):
    read = list_of(str, "a string or a list of strings")
    strings = read(name, [value] if isinstance(value, str) else value)
    expect(len(strings) <= 32 and max(map(len, strings), default=0) <= 256,
           f"{name} takes up to 32 strings of at most 256 characters")
    return [string for string in strings if string]


def prompts(name, value):
    """Returns a list whose elements are strings or lists of token ids."""
    is_batch = type(value) is list and any(type(x) is not int for x in value)
    read = list_of(int, "a string, a list of token ids, or a list of these")
    return [prompt if isinstance(prompt, str) else read(name, prompt)
            for prompt in (value if is_batch else [value])]


CALLS = dict(name=text, tool_call_id=text, tool_calls=list_of(dict, "a list of objects"))


def messages(name, value):
    """Returns the messages for the chat template."""
    expect(isinstance(value, list) and value, f"{name} must be a list of at least one message")
    read = object_of(CALLS, any_value)
    names = [f"{name}[{number}]" for number in range(len(value))]
    return [message_of(read(own, message), own) for own, message in zip(names, value)]


def tool_choice(name, value):
    """Returns the arguments of `hf.calls.Tools` for the choice; None for "none"."""
    if isinstance(value, dict):
        read = object_of(dict(type=only("function"), function=object_of(dict(name=text))))
        chosen = read(name, value).get("function", {}).get("name")
        expect(chosen is not None, f"{name}.function.name is missing")
        return dict(required=True, only=chosen)
    choices = dict(none=None, auto={}, required=dict(required=True))
    expect(isinstance(value, str) and value in choices,
           f"{name} must be {', '.join(choices)} or an object with the name of a function")
    return choices[value]


# --------------------------------------------------------------------------------------------------
# Structured output: readers return the arguments of `GrammarTokenizer.compile`

ANY_OBJECT = "json_schema", dict(type="object")
schema = must_be("a JSON schema, an object or its text", lambda value: type(value) in (dict, str))
choice = must_be("a list of at least one string",
                 lambda value: type(value) is list and {*map(type, value)} == {str})
STRUCTURED = dict(json=schema, json_object=only(True), regex=text, choice=choice, grammar=any_value)
NOTATIONS = dict(lark=text, gbnf=text)
WRAPPER = dict(name=text, description=text, strict=flag, schema=schema)
FORMATS = dict(text={}, json_object=dict(schema=schema),  # the second as in llama.cpp
               json_schema=dict(json_schema=object_of(WRAPPER)))


def single(name, value, readers):
    """Reads an object with one of the fields in {field: reader}. Returns the field and its value"""
    values = object_of(readers)(name, value)
    expect(len(values) == 1, f"{name} takes one of {', '.join(readers)}")
    return next(iter(values.items()))


def structured_outputs(name, value):
    """Reads vLLM's structured_outputs. Of a grammar, the text in llama.cpp's notation is enough."""
    kind, source = single(name, value, STRUCTURED)
    if kind == "json_object":
        return ANY_OBJECT
    if kind == "grammar":
        source = source if isinstance(source, dict) else dict(gbnf=source)
        return single(f"{name}.grammar", source, NOTATIONS)
    return "json_schema" if kind == "json" else kind, source


def response_format(name, value):
    """Reads OpenAI's response_format; None for plain text."""
    kind = variables(name, value).get("type")
    expect(kind in [*FORMATS], f"{name}.type must be {', '.join(FORMATS)}, not {kind!r}")
    values = object_of(dict(type=text) | FORMATS[kind])(name, value)
    if kind == "text":
        return None
    if kind == "json_schema":
        values = variables(f"{name}.json_schema", values.get("json_schema"))
    return ("json_schema", values["schema"]) if "schema" in values else ANY_OBJECT


GRAMMARS = dict(response_format=response_format, structured_outputs=structured_outputs)


def number_of_logprobs(name, value):
    return None if value is False else whole(0, 5)(name, value)


def how_many_top(values, chat):
    """How many of the likeliest tokens to list with each token, from the fields of a request; None
    if it does not ask for log-probabilities."""
    asked, top = values.get("logprobs"), values.get("top_logprobs", 0)
    expect(asked or not top, "top_logprobs needs logprobs: true")
    return (top if asked else None) if chat else asked


# --------------------------------------------------------------------------------------------------
# The table

STREAM_OPTIONS = dict(include_usage=flag, include_obfuscation=flag,
                      continuous_usage_stats=only(False))
SAMPLING_FIELDS = "temperature top_k top_p min_p seed".split()  # `Sampling` checks their values
IGNORED = """user metadata store verbosity service_tier safety_identifier request_id priority
    prediction prompt_cache_key prompt_cache_options prompt_cache_retention""".split()
NEUTRAL = {  # unsupported fields, each with the values that have no effect
    "tools functions bad_words": only([]), "logit_bias": only({}), "suffix": only(""),
    "tool_choice function_call": only("none", "auto"), "modalities": only(["text"]),
    "presence_penalty frequency_penalty min_tokens top_logprobs mirostat": only(0, 0.0),
    "repetition_penalty repeat_penalty length_penalty typical_p best_of": only(1, 1.0),
    "skip_special_tokens detokenize": only(True),
    "spaces_between_special_tokens": only(True, False),
    "echo ignore_eos use_beam_search include_stop_str_in_output": only(False)}
COMMON = GRAMMARS | dict(
    model=any_value, stream=flag, stream_options=object_of(STREAM_OPTIONS), show_steps=flag,
    n=whole(1, 128), max_tokens=limit, max_completion_tokens=limit,
    stop=stop_strings, stop_token_ids=token_ids, draft=only("none"),
    **dict.fromkeys((*SAMPLING_FIELDS, *IGNORED), any_value))
for names, reader in NEUTRAL.items():
    COMMON |= dict.fromkeys(names.split(), reader)
CHAT = COMMON | dict(messages=messages, chat_template_kwargs=variables, reasoning_effort=text,
                     add_generation_prompt=flag, continue_final_message=flag,
                     tools=list_of(dict, "a list of objects"), tool_choice=tool_choice,
                     parallel_tool_calls=flag, logprobs=flag, top_logprobs=whole(0, 20))
COMPLETION = COMMON | dict(prompt=prompts, parallel_tool_calls=any_value,
                           logprobs=number_of_logprobs)
DEFAULTS = dict(stream=False, stream_options={}, show_steps=False, n=1, stop=[], stop_token_ids=[],
                chat_template_kwargs={}, tools=[], tool_choice={}, parallel_tool_calls=True)


def read(body, chat):
    """Returns the fields of a request body, with defaults for those that need one."""
    values = object_of(CHAT if chat else COMPLETION)("", body)
    needed = "messages" if chat else "prompt"
    expect(needed in values, f"{needed} is missing")
    grammars = [values[name] for name in GRAMMARS if values.get(name)]
    expect(len(grammars) <= 1, f"a request takes one of {', '.join(GRAMMARS)}")
    may_call = values.get("tools") and values.get("tool_choice", {}) == {}
    expect(not may_call or all(kind == "json_schema" for kind, _ in grammars),
           "beside tools, an answer can match a JSON schema, but no other grammar")
    expect(not chat or values.get("tools") or not values.get("tool_choice"),
           "tool_choice needs tools")
    return DEFAULTS | values | dict(grammar=grammars[0] if grammars else None,
                                    top_logprobs=how_many_top(values, chat))
