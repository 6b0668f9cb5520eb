"""Reads documents from text and chat files, and splits them into training and held-out data."""

import contextlib
import hashlib
import itertools
import sysconfig
from pathlib import Path
from typing import NamedTuple

from hf.text import OBJECTS, messages_of, read_objects, read_text
from model import InputError, expect, warn
from training.common import STATE_FILE

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".js", ".ts", ".java", ".go",
                 ".rs", ".jsonl", ".jsonl.gz")
SPLITS = ("train", "heldout")
NO_CODE = {"site-packages", "dist-packages", "__pycache__", "encodings"}  # and *data
MOST_REFUSED = 0.1  # share of the chats that the template may refuse; more are an error
PIECE = 4096  # characters; longer texts are cut into pieces, each of which goes to either split


class Record(NamedTuple):
    """A document as (text, in_loss) pairs; in_loss: its tokens are training targets. kind: "text",
    "completion" (the loss covers all but the prompt) or "chat" (only the assistant's turns)."""
    parts: tuple
    kind: str = "text"

    @property
    def text(self):
        return "".join(text for text, _ in self.parts)


def builtin_corpus(split):
    """The source files of Python's standard library in a split, which need no download."""
    root = Path(sysconfig.get_paths()["stdlib"])
    is_code = lambda path: not any(part in NO_CODE or part.endswith("data") for part in path.parts)
    files = [file for file in sorted(root.rglob("*.py")) if is_code(file.relative_to(root))
             and split_of(file.relative_to(root).as_posix()) == split]
    expect(files, f"{root}: no code for the {split} split; use --data")
    return files


def find_files(path):
    """The file at a path, or the text files in a folder, except in folders of training runs."""
    path = Path(path)
    expect(path.exists(), f"{path}: no such file or folder")
    if path.is_file():
        return [path]
    runs = {state.parent for state in path.rglob(STATE_FILE)}
    return [file for file in sorted(path.rglob("*")) if file.name.endswith(TEXT_SUFFIXES)
            and file.is_file() and not runs & set(file.parents)]


def read_records(paths, template=None):
    """Yields a `Record` for each non-empty document. template: the `ChatTemplate` for chats; those
    it refuses are skipped with a warning. Raises InputError for a path without documents, a
    malformed line, and if more than MOST_REFUSED of the chats are refused."""
    chats = 0
    refused = []
    for path in paths:
        empty = True
        for file in find_files(path):
            for where, record in read_file(file):
                if record.kind == "chat":
                    expect(template, f"{file}, {where}: messages need a model with a chat template")
                    chats += 1
                    try:
                        record = Record(chat_parts(record.parts, template), "chat")
                    except InputError as error:
                        refused.append(f"{file}, {where}: {error}")
                        empty = False
                        continue
                if record.text:
                    empty = False
                    yield record
        expect(not empty, f"{path}: expected UTF-8 text, got none; check the path")
    if refused:
        problem = (f"the chat template refuses {len(refused)} of {chats} chats; the first is "
                   f"{refused[0]}")
        expect(len(refused) <= MOST_REFUSED * chats, f"{problem}; correct or remove them")
        warn(f"{problem}; skipping these")


def read_file(file):
    """Yields (position, `Record`) for each document of a file; nothing if it is not UTF-8 text. The
    parts of a chat are its messages, not rendered yet."""
    if not file.name.endswith(OBJECTS):
        with contextlib.suppress(InputError):
            yield "", Record(((read_text(file), True),))
        return
    expected = 'an object with "text", "prompt" and "completion", "messages" or "conversations"'
    yield from read_objects(file, parse_record, expected)


def parse_record(value):
    """The Record of an object with "text", else "prompt" and "completion", else chat messages."""
    text, prompt, completion = map(value.get, ("text", "prompt", "completion"))
    if text is not None:
        record = Record(((text, True),))
    elif prompt is not None and completion is not None:
        record = Record(((prompt, False), (completion, True)), "completion")
    else:
        return Record(messages_of(value), "chat")
    valid = all(isinstance(part, str) for part, _ in record.parts)
    expect(valid, f"its {record.kind} is not a string")
    return record


def chat_parts(messages, template):
    """The (text, in_loss) pairs of a chat up to the assistant's last turn. The loss covers what
    rendering an assistant turn adds to its prompt."""
    # skip an assistant's first message: many templates refuse the empty chat before it
    turns = [i for i, message in enumerate(messages) if i and message["role"] == "assistant"]
    # if the template drops the reasoning of earlier turns, only the last turn is as generated
    for answers in (turns, turns[-1:]):
        texts = [""]  # each must be a prefix of the next
        for i in answers:
            texts.append(template.render(messages[:i], add_generation_prompt=True))
            texts.append(template.render(messages[:i + 1], add_generation_prompt=False))
        pairs = list(itertools.pairwise(texts))
        if all(text.startswith(before) for before, text in pairs):
            return tuple((text[len(before):], i % 2 > 0) for i, (before, text) in enumerate(pairs))
    raise InputError("the chat template does not render a prefix of a chat as a prefix of its text")


def split_of(text):
    """The split of a text, by its hash: 1 in 20 is held out."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") % 20 == 0 else "train"


def split_records(paths, splits, template=None):
    """Yields (split, Record) for the documents in some of SPLITS. paths None: the built-in corpus.
    Texts are cut, so that one file can fill both splits; neighbours in a split are joined again."""
    if paths is None:
        for split in splits:
            for file in builtin_corpus(split):
                yield from ((split, record) for _, record in read_file(file) if record.text)
        return
    missing = set(splits)
    for record in read_records(paths, template):
        whole = record.kind != "text"  # completions and chats are not cut
        pieces = [record.text[i:i + PIECE] for i in range(0, len(record.text), PIECE)]
        for split, run in itertools.groupby([record.text] if whole else pieces, split_of):
            if split in splits:
                missing.discard(split)
                yield split, record if whole else Record((("".join(run), True),))
    expect(not missing, f"{' '.join(map(str, paths))}: too little text, none is in the split "
           f"{' or '.join(missing)}; give more, or a larger --self-tokens")
