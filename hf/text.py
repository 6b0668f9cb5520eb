"""Reads text files: UTF-8, with or without a byte order mark. Lines end with \\n or \\r\\n;
str.splitlines would also split at U+2028, form feeds and others."""

import contextlib
import gzip
import json
import re
import zlib

from model import InputError, expect

OBJECTS = (".jsonl", ".jsonl.gz", ".json")  # suffixes of files of JSON objects
ROLES = {name: name for name in ("system", "developer", "user", "assistant", "tool")}
ROLES |= dict(human="user", prompter="user") | dict.fromkeys(  # names in other datasets
    ("gpt", "chatgpt", "bing", "bard", "model", "ai", "bot"), "assistant")


def decode(data, name):
    """Decodes bytes to text without a byte order mark. name: of the data, in an InputError."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 text (byte {error.start})") from None


def read_text(file):
    """The text of a file (a Path)."""
    try:
        return decode(file.read_bytes(), file)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from None


def read_lines(file):
    """The lines of a file (a Path), without blank ones."""
    return [line for line in re.split("\r?\n", read_text(file)) if line.strip()]


def read_objects(file, parse, expected):
    """Yields ("line 3" or the like, parse(value)) for each line of a .jsonl or .jsonl.gz file, or
    each element of a .json array. A bad one raises an InputError that says what was expected."""
    kind, number = "line", 1
    try:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rb") as values:
            if file.suffix == ".json":
                with contextlib.suppress(ValueError):  # it may contain lines like .jsonl
                    array = json.loads(file.read_bytes())
                    kind = "element"
                    values = array if isinstance(array, list) else [array]
            for number, value in enumerate(values, start=1):
                if kind == "element" or value.strip():
                    yield f"{kind} {number}", parse(json.loads(value) if kind == "line" else value)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror or error})") from None
    except (AttributeError, EOFError, RecursionError, TypeError, ValueError, zlib.error) as error:
        raise InputError(f"{file}, {kind} {number}: expected {expected}, but: {error}; "
                         "correct it") from None


def messages_of(value):
    """The messages of an object in OpenAI's format ("messages"), TRL's (a "prompt" of messages) or
    ShareGPT's ("conversations"), whose turns may also be OpenAI's. Roles have OpenAI's names."""
    messages = value.get("messages")
    if messages is None and isinstance(value.get("prompt"), list):
        messages = value["prompt"]
    if messages is None and isinstance(value.get("conversations"), list):
        turns = [{"from": "system", "value": value["system"]}] if value.get("system") else []
        messages = [turn if "role" in turn else from_sharegpt(turn)
                    for turn in turns + value["conversations"]]
    expect(isinstance(messages, list), 'its "messages" are not a list')
    return list(map(message_of, messages))


def tools_of(value):
    """{"tools": [...]}, variables for the chat template, of an object whose tools are a list or a
    string with one; {} without any."""
    tools = value.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) and tools else tools
    return dict(tools=tools) if tools else {}


def from_sharegpt(turn):
    return dict(role=turn.get("from"), content=turn.get("value"))


def message_of(message):
    """A message, with the parts of its content joined. It needs no content beside tool calls."""
    content = message.get("content")
    if isinstance(content, list):
        expect(all(part.get("type") == "text" for part in content),
               "a part of a message is not of type text")
        content = "".join(part.get("text") for part in content)
    is_valid = isinstance(content, str) or content is None and message.get("tool_calls")
    role = message.get("role")
    expect(is_valid and isinstance(role, str), "a message is no object with a role and a content")
    return message | dict(role=ROLES.get(role.lower(), role), content=content)
