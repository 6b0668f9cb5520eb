"""Corpora: files of text and of conversations into documents, and documents into splits.

The built-in corpus is the Python standard library's own source, so that every command runs with nothing downloaded.
"""

import glob
import gzip
import hashlib
import itertools
import json
import os
import sys
import sysconfig
import zlib
from pathlib import Path
from typing import NamedTuple

from model import InputError

LINES = (".jsonl", ".jsonl.gz")  # a document on each line
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".js", ".ts", ".java", ".go", ".rs", *LINES)
SPLITS = ("train", "heldout")
PIECE = 4096  # characters of a long document that are held out, or not, together


class Record(NamedTuple):
    """A document: (text, counts) pairs, where counts says that heads are trained to guess these tokens, and its kind."""

    parts: tuple
    kind: str  # "text", "completion" (of a prompt, which does not count) or "chat" (what the assistant says counts)

    @property
    def text(self):
        return "".join(text for text, _ in self.parts)


# ---------------------------------------------------------------------------------------------------------------------
# files


def builtin_corpus(split):
    """The Python standard library's own .py files on this machine: a sorted list of Path, fit for read_documents.

    split: "train", or "heldout" for the 1 file in 20 that a hash of its path inside the library picks.
    Raises InputError where Python came without its sources.
    """
    _check_split(split)
    root, names = _library()
    files = [root / name for name in names if _split_of(name.as_posix()) == split]
    files = [file for file in files if _read(file)]
    if not files:
        raise InputError(f"{root}: expected the sources of Python's library, but there are none; name files of text")
    return files


def _library():
    """(root of the library, names of its files inside it)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [file.relative_to(root) for file in sorted(root.rglob("*.py"))]
    return root, [name for name in names if not _foreign(name)]


def _foreign(name):
    # _sysconfigdata describes the machine that Python was built on, so it would differ between two of the same version.
    return {"site-packages", "dist-packages", "__pycache__"} & set(name.parts) or name.stem.startswith("_sysconfigdata")


def _check_split(split):
    if split not in SPLITS:
        raise InputError(f"expected the split train or heldout, but got {split!r}; name one of the two")


def _split_of(text):
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") % 20 == 0 else "train"


def find_files(path):
    """The files that a path stands for, a list of Path: a file; a folder's of TEXT_SUFFIXES, however deep; or, where
    there is no such path and it has a *, ? or [, what fits this pattern, folders again searched through. Sorted. Folders
    that hold a training run are left out.
    Raises InputError where there is none to read, but for a folder without files, which gives []."""
    if not os.path.exists(path) and set("*?[") & set(str(path)):
        files = [file for match in sorted(glob.glob(str(path), recursive=True)) for file in find_files(match)]
        if not files:
            raise InputError(f"{path}: expected files that fit this pattern, but there are none; check the pattern")
        return list(dict.fromkeys(files))  # ** fits a folder and, once more, what is in it
    if not os.access(path, os.R_OK):
        raise InputError(f"{path}: expected a file or folder of text, but there is none to read; check the path")
    if not os.path.isdir(path):
        return [Path(path)]
    runs = {state.parent for state in Path(path).rglob("train_state.pt")}  # what trainings wrote there is no data
    return [file for file in sorted(Path(path).rglob("*"))
            if file.name.endswith(TEXT_SUFFIXES) and file.is_file() and not runs & set(file.parents)]


def source_files(paths):
    """The files of paths, or None, for the built-in corpus: a list of Path. Errors as for find_files."""
    if paths is None:
        root, names = _library()
        return [root / name for name in names]
    return [file for path in paths for file in find_files(path)]


def _read(file):
    """A file's text, or None where it cannot be read as UTF-8."""
    try:
        return file.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return None


def _lines(file):
    """Yield (number from 1, line as bytes) of a .jsonl or .jsonl.gz file. Raises InputError for one that is damaged."""
    try:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rb") as lines:
            yield from enumerate(lines, start=1)
    except (EOFError, OSError, zlib.error) as error:
        raise InputError(f"{file}: expected lines of JSON, but it cannot be read ({error}); fetch it again") from None


# ---------------------------------------------------------------------------------------------------------------------
# documents


def _warn(line):
    print(line, file=sys.stderr, flush=True)


def read_documents(paths, log=_warn):
    """Yield each document's text, a str that is not empty; of a prompt with its completion, both as one.

    paths, log and errors as for `read_records`; a conversation, which needs a template, raises InputError.
    """
    for record in read_records(paths, log=log):
        yield record.text


def read_records(paths, template=None, log=_warn):
    """Yield each document as a Record of some text.

    paths: files, read whatever their suffix, folders, and patterns, see find_files. A file is a document; of a .jsonl or
    .jsonl.gz file each line is one, see _record. template: the chat.ChatTemplate that makes text of messages. log is
    called with a line of text for each file of which up to 1 line in 100 is broken: these are skipped.
    Raises InputError for a path that is missing or has nothing to read, for a named file that is not UTF-8, for a .jsonl
    file that has more broken lines, and for messages without a template. Elsewhere, files that are no UTF-8 are left out.
    """
    for path in paths:
        count = 0
        records = (record for file in find_files(path) for record in _records(file, template, log) if record.text)
        for count, record in enumerate(records, start=1):
            yield record
        if not count:
            wanted = f"{' '.join(TEXT_SUFFIXES)} files" if os.path.isdir(path) else "text"
            raise InputError(f"{path}: expected {wanted} in UTF-8, but it is empty or not UTF-8; name another")


def _records(file, template, log):
    """The Records of one file: none for what is not UTF-8."""
    if not file.name.endswith(LINES):
        yield _plain(_read(file) or "")
        return
    total, count, broken = 0, 0, []  # lines that are not blank, those broken, the first three of those as text
    for number, line in _lines(file):
        if not line.strip():
            continue
        total += 1
        try:
            record = _record(line, template, f"{file}: line {number}")
        except _Broken as error:
            count += 1
            broken += [f"line {number}" + ("" if broken else f" ({error})")] if count <= 3 else []
        else:
            yield record
    if 100 * count > total:
        raise InputError(f'{file}: expected {{"text": "..."}}, prompt and completion, or messages on each line, but {count} '
                         f"of {total} are broken: {', '.join(broken)}; mend them")
    if count:
        log(f"{file}: skipped {count} of {total} lines, which are broken, the first {broken[0]}")


class _Broken(Exception):
    """Why a line of a .jsonl file gives no document."""


def _plain(text):
    return Record(((text, True),), "text")


def _record(line, template, place):
    """The Record on a line: of "text", of "prompt" and "completion", or of "messages", where the line has several of
    them the first. Raises _Broken for any other, and InputError, naming the place, for messages without a template."""
    try:
        value = json.loads(line)
    except (RecursionError, ValueError):
        raise _Broken("not JSON in UTF-8") from None
    if not isinstance(value, dict):
        raise _Broken("not a JSON object")
    fields = [value.get(name) for name in ("text", "prompt", "completion", "messages")]
    text, prompt, completion, messages = fields
    if text is not None:
        record = _plain(text)
    elif prompt is not None and completion is not None:
        record = Record(((prompt, False), (completion, True)), "completion")
    elif messages is None:
        raise _Broken('neither "text", nor "prompt" and "completion", nor "messages"')
    elif template is None:
        raise InputError(f"{place}: expected text, but these are messages; they need a model folder with a chat template")
    else:
        return Record(_chat_parts(messages, template), "chat")
    if not all(isinstance(text, str) for text, _ in record.parts):
        raise _Broken(f"a {record.kind} that is no string")
    return record


def _chat_parts(messages, template):
    """The parts of a conversation up to the assistant's last turn: what a prompt for a turn and the conversation with it
    have in common does not count, the rest of the turn does. Raises _Broken."""
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in messages
    ):
        raise _Broken("messages that are not a list of objects with a role and a content, both strings")
    # What opens a conversation answers nothing, and many templates take no conversation of no messages.
    turns = [i for i, message in enumerate(messages) if i and message["role"] == "assistant"]
    if not turns:
        raise _Broken("messages without an answer of the assistant's")
    try:
        # Some templates leave the reasoning out of all turns but the last one: then only that turn is as it was said.
        parts = _turns(messages, turns, template) or _turns(messages, turns[-1:], template)
    except InputError as error:
        raise _Broken(error) from None
    if not parts:
        raise _Broken("the chat template does not render a prefix")
    return parts


def _turns(messages, turns, template):
    """The parts of a conversation in which these turns count; () where its text up to one does not go on to the next."""
    parts, before = [], ""
    for i in turns:
        prompt = template.render(messages[:i], add_generation_prompt=True)
        after = template.render(messages[: i + 1], add_generation_prompt=False)
        if not prompt.startswith(before) or not after.startswith(prompt):
            return ()
        parts += [(prompt[len(before) :], False), (after[len(prompt) :], True)]
        before = after
    return tuple(parts)


# ---------------------------------------------------------------------------------------------------------------------
# splits


def documents(paths, split):
    """Yield the documents of a split, "train" or "heldout", as text. paths and errors as for split_records."""
    for _, record in split_records(paths, [split]):
        yield record.text


def split_records(paths, splits, template=None, log=_warn):
    """Yield (split, Record) for the documents of `splits`, of "train" and "heldout". paths None is the built-in corpus.

    Of what read_records gives 1 piece in 20 is held out, by a hash of its text; a piece is a document, or PIECE characters
    of a longer text, so that a single file has both splits. Neighbours in one split stay together. Raises InputError as
    read_records does, and where a split is empty.
    """
    for split in splits:
        _check_split(split)
    if paths is None:
        for split in splits:
            yield from ((split, record) for record in read_records(builtin_corpus(split), log=log))
        return
    missing = set(splits)
    for record in read_records(paths, template, log):
        for split, part in _divided(record):
            if split in splits:
                missing.discard(split)
                yield split, part
    for split in sorted(missing):
        raise InputError(f"{names_of(paths)}: expected documents for the {split} split, but it is empty; give more text")


def _divided(record):
    """Yield (split, Record) for what falls into one split after the other: of a prompt's or a conversation's, all of it."""
    if record.kind != "text":
        yield _split_of(record.text), record
        return
    pieces = (record.text[i : i + PIECE] for i in range(0, len(record.text), PIECE))
    for split, run in itertools.groupby(pieces, _split_of):
        yield split, _plain("".join(run))


def names_of(paths):
    return "the built-in corpus" if paths is None else " ".join(map(str, paths))
