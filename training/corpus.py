"""Files of text and of conversations into documents, in a training and a held-out split.

The built-in corpus is the source of Python's standard library: no command needs a download.
"""

import glob
import gzip
import hashlib
import itertools
import json
import os
import re
import sys
import sysconfig
import zlib
from pathlib import Path
from typing import NamedTuple

from model import InputError

LINES = (".jsonl", ".jsonl.gz")  # one document per line
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".js", ".ts", ".java", ".go",
                 ".rs", *LINES)
SPLITS = ("train", "heldout")
# group 1: a number, or a string on one line; what else is matched, comments and strings of several
# lines, mostly docstrings, does not count
LITERAL = re.compile(r"""(?s:"{3}.*?"{3}|'{3}.*?'{3})|\#.*"""
                     r"""|("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|\b\d[\w.]*)""")
# folders of the library that hold other packages, or tables (encodings, pydoc's topics)
NO_CODE = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
PIECE = 4096  # characters; a longer text is cut into pieces of this size, each for one split


class Record(NamedTuple):
    """A document as (text, in_loss) pairs; in_loss: heads learn to guess its tokens. kind: "text",
    "completion" (the prompt is not in the loss) or "chat" (only the assistant's words are)."""
    parts: tuple
    kind: str = "text"

    @property
    def text(self):
        return "".join(text for text, _ in self.parts)


class BrokenLine(Exception):
    """The reason why a line of a .jsonl file holds no document."""


def builtin_corpus(split):
    """The .py files of Python's standard library that are code and in this split, a sorted list of
    Path. `split_of` the path inside the library decides."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in sorted(root.rglob("*.py"))
             if split_of(file.relative_to(root).as_posix()) == split
             and is_code(file.relative_to(root), read_utf8(file))]
    if not files:
        raise InputError(f"{root}: expected code for the split {split!r}; name files of text")
    return files


def is_code(path, text):
    """Whether a file of the library is code to learn from: not of NO_CODE, nor the tests' data, nor
    by more than a quarter literals. path: inside the library. text: None where it is not UTF-8."""
    # _sysconfigdata describes a machine: it differs between two builds of one version
    if not text or NO_CODE & set(path.parts) or path.stem.startswith("_sysconfigdata"):
        return False
    if any(re.search(r"(?<!meta)data\d*$", folder) for folder in path.parts[:-1]):
        return False
    return 4 * sum(map(len, LITERAL.findall(text))) <= len(text)


def find_files(path):
    """The files that a path names, a sorted list of Path: the file itself, or all of TEXT_SUFFIXES
    below a folder, but for training runs. A path that does not exist is a pattern of files and
    folders. InputError where nothing fits it."""
    if os.path.isdir(path):
        runs = {state.parent for state in Path(path).rglob("train_state.pt")}
        return [file for file in sorted(Path(path).rglob("*"))
                if file.name.endswith(TEXT_SUFFIXES) and file.is_file()
                and not runs & set(file.parents)]
    if os.path.exists(path):
        return [Path(path)]
    matches = sorted(set(glob.glob(str(path), recursive=True)) - {str(path)})
    if not matches:
        raise InputError(f"{path}: expected a file, a folder or a pattern that fits some; check it")
    # ** matches a file twice, beside its folder
    return list(dict.fromkeys(file for match in matches for file in find_files(match)))


def source_files(paths):
    """All files of `paths`, or of the built-in corpus if None: a list of Path."""
    groups = map(builtin_corpus, SPLITS) if paths is None else map(find_files, paths)
    return list(itertools.chain.from_iterable(groups))


def read_utf8(file):
    """A file's text, or None where it cannot be read as UTF-8."""
    try:
        return file.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return None


def warn(line):
    print(line, file=sys.stderr, flush=True)


def read_records(paths, template=None, log=warn):
    """Yields each document that is not empty as a `Record`.

    paths: see `find_files`. A file is one document, but of LINES each line is one, see
    `parse_line`. template: the `ChatTemplate` that turns messages into text. log: called with a
    line of text per file in which broken lines, at most 1 in 100, were skipped. InputError for a
    path without anything to read, a .jsonl file with more broken lines, and messages without a
    template. Inside folders, files that are not UTF-8 are left out."""
    for path in paths:
        empty = True
        for file in find_files(path):
            if file.name.endswith(LINES):
                records = read_lines(file, template, log)
            else:
                records = [Record(((read_utf8(file) or "", True),))]
            for record in records:
                if record.text:
                    empty = False
                    yield record
        if empty:
            wanted = f"{' '.join(TEXT_SUFFIXES)} files" if os.path.isdir(path) else "text"
            raise InputError(f"{path}: expected {wanted} in UTF-8 that is not empty; name another")


def read_lines(file, template, log):
    """Yields the Records of a .jsonl or .jsonl.gz file."""
    total = 0
    broken = []
    try:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                total += 1
                try:
                    yield parse_line(line, template, f"{file}: line {number}")
                except BrokenLine as error:
                    broken.append(f"line {number} ({error})")
    except (EOFError, OSError, zlib.error) as error:
        raise InputError(f"{file}: expected lines of JSON, but: {error}; fetch it again") from None
    if 100 * len(broken) > total:
        raise InputError(f'{file}: expected {{"text": "..."}}, prompt and completion, or messages '
                         f"on each line, but {len(broken)} of {total} are broken: "
                         f"{', '.join(broken[:3])}; correct them")
    if broken:
        log(f"{file}: skipped {len(broken)} of {total} lines, which are broken: {broken[0]}, ...")


def parse_line(line, template, where):
    """The Record of a line of JSON with "text", else "prompt" and "completion", else "messages".
    BrokenLine for anything else; InputError for messages without a template."""
    try:
        value = json.loads(line)
    except (RecursionError, ValueError):
        raise BrokenLine("not JSON in UTF-8") from None
    if not isinstance(value, dict):
        raise BrokenLine("not a JSON object")
    text, prompt, completion, messages = map(
        value.get, ("text", "prompt", "completion", "messages"))
    if text is not None:
        record = Record(((text, True),))
    elif prompt is not None and completion is not None:
        record = Record(((prompt, False), (completion, True)), "completion")
    elif messages is None:
        raise BrokenLine('neither "text", nor "prompt" and "completion", nor "messages"')
    elif template is None:
        raise InputError(f"{where}: expected text, found messages; they need a chat template")
    else:
        record = Record(chat_parts(messages, template), "chat")
    if not all(isinstance(text, str) for text, _ in record.parts):
        raise BrokenLine(f"a {record.kind} that is not a string")
    return record


def chat_parts(messages, template):
    """The (text, in_loss) pairs of a conversation up to the assistant's last turn. In the loss is
    what the conversation with an assistant's turn has beyond the prompt for it."""
    is_message = lambda m: isinstance(m, dict) and all(isinstance(m.get(key), str)
                                                       for key in ("role", "content"))
    if not isinstance(messages, list) or not all(map(is_message, messages)):
        raise BrokenLine("messages that are not a list of objects with a role and a content")
    # a first message answers nothing, and many templates refuse the empty conversation before it
    turns = [i for i, message in enumerate(messages) if i and message["role"] == "assistant"]
    if not turns:
        raise BrokenLine("messages without an answer of the assistant's")
    # where a template drops the reasoning of earlier turns, only the last is as it was generated
    for answers in (turns, turns[-1:]):
        texts = [""]  # each begins with the one before it
        try:
            for i in answers:
                texts.append(template.render(messages[:i], add_generation_prompt=True))
                texts.append(template.render(messages[:i + 1], add_generation_prompt=False))
        except InputError as error:
            raise BrokenLine(error) from None
        pairs = list(itertools.pairwise(texts))
        if all(text.startswith(before) for before, text in pairs):
            return tuple((text[len(before):], i % 2 > 0)
                         for i, (before, text) in enumerate(pairs))
    raise BrokenLine("the chat template does not render a prefix")


def split_of(text):
    """The split that a text belongs to, by its hash: 1 in 20 is held out."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") % 20 == 0 else "train"


def split_records(paths, splits, template=None, log=warn):
    """Yields (split, Record) for the documents of `splits`, some of SPLITS. paths None is the
    built-in corpus.

    A longer text is first cut into pieces of PIECE characters, so that one file fills both splits;
    neighbouring pieces of a split stay one document. InputError as in `read_records`, and for a
    split that stays empty."""
    if paths is None:
        for split in splits:
            for record in read_records(builtin_corpus(split), log=log):
                yield split, record
        return
    missing = set(splits)
    for record in read_records(paths, template, log):
        whole = record.kind != "text"  # prompts with completions, and conversations
        pieces = [record.text[i:i + PIECE] for i in range(0, len(record.text), PIECE)]
        for split, run in itertools.groupby([record.text] if whole else pieces, split_of):
            if split in splits:
                missing.discard(split)
                yield split, record if whole else Record((("".join(run), True),))
    for split in sorted(missing):
        raise InputError(f"{corpus_name(paths)}: expected text for {split!r}; give more text")


def corpus_name(paths):
    return "the built-in corpus" if paths is None else " ".join(map(str, paths))
