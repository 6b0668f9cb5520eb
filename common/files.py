"""Reads, writes and identifies files. Text is UTF-8, with or without a byte order mark. Its lines
end with \\n or \\r\\n; str.splitlines would also split at U+2028, form feeds and others."""

import contextlib
import gzip
import hashlib
import json
import re
import zlib
from pathlib import Path

from model import InputError, expect, replace_file

OBJECTS = (".jsonl", ".jsonl.gz", ".json")  # suffixes of files of JSON objects
POINTER = b"version https://git-lfs"  # how a git-lfs pointer begins
SAMPLES = 64   # how many samples of a file are hashed
SAMPLE = 4096  # bytes per sample


def check_content(path):
    """Raises InputError if a file only says where git-lfs finds its content."""
    with open(path, "rb") as file:
        expect(file.read(len(POINTER)) != POINTER, f"{path}: is a git-lfs pointer, not the file "
               "itself; run git lfs pull, or download the file")


def read_json(path):
    """The object in a JSON file. Raises InputError if it is missing or malformed."""
    try:
        check_content(path)
        value = json.loads(Path(path).read_bytes())  # bytes: a byte order mark is skipped
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; expected a checkpoint folder with it") from None
    except (OSError, RecursionError, ValueError) as error:
        raise InputError(f"{path}: not a readable JSON file ({error})") from None
    expect(isinstance(value, dict), f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


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
                    value = json.loads(value) if kind == "line" else value
                    expect(isinstance(value, dict), "it is not an object")
                    yield f"{kind} {number}", parse(value)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror or error})") from None
    except (AttributeError, EOFError, RecursionError, TypeError, ValueError, zlib.error) as error:
        raise InputError(f"{file}, {kind} {number}: expected {expected}, but: {error}; "
                         "correct it") from None


def save_lines(path, values):
    """Writes values as JSON, a line for each."""
    text = "".join(json.dumps(value) + "\n" for value in values)
    replace_file(path, lambda tmp: tmp.write_text(text))


def content_hash(file):
    """A hash of all bytes of a file."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def value_hash(value):
    """16 hex digits that identify a value by its repr."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def files_hash(files):
    """16 hex digits that identify files by their sizes and samples, whatever their names."""
    sha = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        sha.update(f"{size} ".encode())
        with file.open("rb") as opened:
            for i in range(SAMPLES):
                opened.seek(max(size - SAMPLE, 0) * i // (SAMPLES - 1))
                sha.update(opened.read(SAMPLE))
    return sha.hexdigest()[:16]
