"""Reads text that people give: UTF-8, with or without a byte order mark. Lines end with \\n or
\\r\\n; str.splitlines would also split at U+2028, form feeds and more, which text may hold."""

import contextlib
import gzip
import json
import re
import zlib

from model import InputError, expect

OBJECTS = (".jsonl", ".jsonl.gz", ".json")  # suffixes of files that hold objects
# ShareGPT's names of roles
ROLES = dict(human="user") | dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant")


def decode(data, name):
    """The text of bytes, without a byte order mark. name: what an InputError calls them."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 text (byte {error.start})") from None


def read_text(file):
    """The text of a Path."""
    try:
        return decode(file.read_bytes(), file)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from None


def read_lines(file):
    """The lines of a Path, without blank ones."""
    return [line for line in re.split("\r?\n", read_text(file)) if line.strip()]


def read_objects(file, parse, expected):
    """Yields (where, parse(value)) for each value in a file: each line of .jsonl and .jsonl.gz,
    each element of an array in .json. Raises InputError, with where, for a bad one."""
    kind, number = "line", 1
    try:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rb") as values:
            if file.suffix == ".json":
                with contextlib.suppress(ValueError):  # it may hold lines, too
                    array = json.loads(file.read_bytes())
                    kind = "element"
                    values = array if isinstance(array, list) else [array]
            for number, value in enumerate(values, start=1):
                if kind == "element" or value.strip():
                    yield f"{kind} {number}", parse(json.loads(value) if kind == "line" else value)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror or error})") from None
    except (AttributeError, EOFError, RecursionError, TypeError, ValueError, zlib.error) as error:
        raise InputError(f"{file}, {kind} {number}: expected {expected}, but: {error}; correct "
                         "it") from None


def messages_of(value):
    """The messages of an object: "messages" as OpenAI has them, or ShareGPT's "conversations"."""
    messages = value.get("messages")
    if messages is None and isinstance(value.get("conversations"), list):
        turns = [{"from": "system", "value": value["system"]}] if value.get("system") else []
        messages = [dict(role=ROLES.get(turn.get("from"), turn.get("from")),
                         content=turn.get("value")) for turn in turns + value["conversations"]]
    is_message = lambda m: all(isinstance(m.get(key), str) for key in ("role", "content"))
    expect(isinstance(messages, list) and all(map(is_message, messages)),
           'its "messages" are not a list of objects with a role and a content')
    return messages
