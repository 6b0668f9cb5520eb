"""Text in, token ids out: corpora and their documents, arrays of their ids, training batches, prompts.

The built-in corpus is the Python standard library's own source, so that every command runs with nothing downloaded.
`load_encoding` and the rest of a folder's tokenizer are in tokenizer.py; they can be imported from here too.
"""

import contextlib
import glob
import gzip
import hashlib
import itertools
import json
import os
import random
import sys
import sysconfig
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from checkpoint import InputError, atomic_write
from tokenizer import end_of_text, load_encoding, tokenizer_hash  # noqa: F401, load_encoding for who imports it from here

LINES = (".jsonl", ".jsonl.gz")  # a document on each line
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".js", ".ts", ".java", ".go", ".rs", *LINES)
SPLITS = ("train", "heldout")
PIECE = 4096  # characters of a long document that are held out, or not, together
CHUNK_CHARACTERS = 4_000_000  # documents encoded at once: bounds the memory that lists of ids take
PROGRESS_CHARACTERS = 20_000_000  # tokenised between two lines that say so
COUNTS, START = 1, 2  # bits of a token's flags: heads are trained to guess it; it is the first of a document
LEAD = 2  # tokens before the counted ones that a tokenizer may have put there; a longer lead is a prompt


class Record(NamedTuple):
    """A document: (text, counts) pairs, where counts says that heads are trained to guess these tokens, and its kind."""

    parts: tuple
    kind: str  # "text", "completion" (of a prompt, which does not count) or "chat" (what the assistant says counts)

    @property
    def text(self):
        return "".join(text for text, _ in self.parts)


class Tokens(NamedTuple):
    """The documents of a split, one after the other: in memory, or mapped from files."""

    ids: np.ndarray  # [N], uint16 or uint32
    flags: np.ndarray  # [N], uint8: COUNTS and START


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
    there is no such path and it has a *, ? or [, what fits this pattern, folders again searched through. Sorted.
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
    return [file for file in sorted(Path(path).rglob("*")) if file.name.endswith(TEXT_SUFFIXES) and file.is_file()]


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
        raise InputError(f"{_names(paths)}: expected documents for the {split} split, but it is empty; give more text")


def _divided(record):
    """Yield (split, Record) for what falls into one split after the other: of a prompt's or a conversation's, all of it."""
    if record.kind != "text":
        yield _split_of(record.text), record
        return
    pieces = (record.text[i : i + PIECE] for i in range(0, len(record.text), PIECE))
    for split, run in itertools.groupby(pieces, _split_of):
        yield split, _plain("".join(run))


def _names(paths):
    return "the built-in corpus" if paths is None else " ".join(map(str, paths))


# ---------------------------------------------------------------------------------------------------------------------
# tokens


def _encode(documents, encoding):
    """Each document's ids as an array of uint32, a few MB of text at a time, so that memory stays bounded."""
    for chunk in _chunks(documents):
        for tokens in encoding.encode_ordinary_batch(chunk, num_threads=os.cpu_count() or 1):
            yield np.array(tokens, dtype=np.uint32)


def _chunks(documents, size=len):
    chunk, total = [], 0
    for document in documents:
        chunk.append(document)
        total += size(document)
        if total >= CHUNK_CHARACTERS:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk


def _id_type(last):
    return np.uint16 if last < 2**16 else np.uint32


def token_array(documents, encoding, separator):
    """The ids of all documents (an iterable of str) as one array [N], the id `separator` after each document.

    uint16 where all the vocabulary's ids fit, else uint32. Text that spells a special token is encoded as plain text.
    Bytes that the vocabulary lacks are dropped, as Hugging Face's tokenizers do.
    """
    dtype = _id_type(max(encoding.max_token_value, separator))
    arrays = [np.append(tokens, separator).astype(dtype) for tokens in _encode(documents, encoding)]
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def encode_record(record, encoding):
    """(ids, uint32 [n]; counts, bool [n]) of a Record.

    A text has the tokenizer's prefix before it and end_of_text behind it, and what spells a special token in it is text.
    So has a prompt with its completion, but there it is that token; likewise in a conversation, whose template writes all
    that belongs around it. Prompt and answer are encoded apart, as when decoding. Raises InputError as end_of_text does.
    """
    if record.kind == "text":
        parts = [(encoding.encode_ordinary(text), counts) for text, counts in record.parts]
    else:
        parts = [(encoding.encode(text, allowed_special="all"), counts) for text, counts in record.parts]
    if record.kind != "chat":
        parts = [(encoding.prefix, False), *parts, ([end_of_text(encoding)], True)]
    ids = np.array([token for tokens, _ in parts for token in tokens], dtype=np.uint32)
    return ids, np.repeat([counts for _, counts in parts], [len(tokens) for tokens, _ in parts])


def _encode_records(records, encoding):
    """Yield (split, record, ids, counts) for (split, Record) pairs, encoded a few MB of text at a time by all cores."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for chunk in _chunks(records, lambda pair: len(pair[1].text)):
            encoded = pool.map(lambda pair: encode_record(pair[1], encoding), chunk)
            yield from ((*pair, *arrays) for pair, arrays in zip(chunk, encoded))


def _flags(counts):
    """The flags, uint8 [n], of a document's tokens of which `counts`, n bools, says which count."""
    flags = np.asarray(counts, dtype=bool) * np.uint8(COUNTS)
    flags[:1] |= START
    return flags


def load_tokens(paths, encoding, split, template=None):
    """The Tokens of a split, "train" or "heldout", in memory. paths, template and errors as for split_records; besides,
    InputError where no token of the training split counts."""
    dtype, ids, flags = _id_type(encoding.max_token_value), [], []
    for _, _, tokens, counts in _encode_records(split_records(paths, [split], template), encoding):
        ids.append(tokens.astype(dtype))
        flags.append(_flags(counts))
    tokens = Tokens(np.concatenate(ids), np.concatenate(flags))
    if split == "train" and not (tokens.flags & COUNTS).any():
        raise _unusable(paths)
    return tokens


def _unusable(paths):
    return InputError(f"{_names(paths)}: expected tokens for heads to guess, but the train split has no usable tokens; give more")


# ---------------------------------------------------------------------------------------------------------------------
# tokens in files


def store_tokens(folder, paths, encoding, template=None, log=print):
    """Both splits' Tokens, {"train": Tokens, "heldout": Tokens}, mapped from files in a folder, which is made.

    Text is read once and a few MB at a time; where the folder has the tokens of this very text, tokenizer and template
    already, it is not read at all. log is called with a line of text for each 20 million characters, and for each file of
    which broken lines are skipped. Nothing that a run leaves when it fails or is killed is taken for tokens.
    Raises InputError as load_tokens does for either split, and where the files cannot be written.
    """
    folder, key, dtype = Path(folder), _key(paths, encoding, template), _id_type(encoding.max_token_value)
    stored = _stored(folder, key, dtype)
    if stored:
        return stored
    kinds, tokens, counted, characters = Counter(), Counter(), Counter(), 0
    with _disk(folder):
        with _writing(folder, SPLITS, dtype) as add:
            records = split_records(paths, SPLITS, template, log)
            for split, record, ids, counts in _encode_records(records, encoding):
                add(split, ids, counts)
                kinds[record.kind] += 1
                tokens[split] += len(ids)
                counted[split] += int(counts.sum())
                before, characters = characters, characters + len(record.text)
                if characters // PROGRESS_CHARACTERS > before // PROGRESS_CHARACTERS:
                    log(f"tokenised {characters / 1e6:.1f}M characters, {tokens.total() / 1e6:.1f}M tokens")
            if not counted["train"]:
                raise _unusable(paths)
            (folder / "tokens.json").unlink(missing_ok=True)
        info = dict(key=key, dtype=np.dtype(dtype).name, tokens=tokens, counted=counted, kinds=kinds)
        atomic_write(folder / "tokens.json", lambda tmp: Path(tmp).write_text(json.dumps(info, indent=2) + "\n"))
    return {split: open_tokens(folder, split, dtype) for split in SPLITS}


def _key(paths, encoding, template):
    """16 hex digits of what tokens depend on: tokenizer, template, and the files' paths, sizes and times."""
    if paths is None:
        root, names = _library()
        files = [root / name for name in names]
    else:
        files = [file for path in paths for file in find_files(path)]
    stats = [(str(file.absolute()), file.stat()) for file in files]
    seen = sorted((file, stat.st_size, stat.st_mtime_ns) for file, stat in stats)
    whole = tokenizer_hash(encoding), encoding.prefix, _rendered(template), seen, TEXT_SUFFIXES, PIECE
    return hashlib.sha256(repr(whole).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _rendered(template):
    """What a template, or None, makes of a short conversation and of one with all that templates care for."""
    short = [dict(role="user", content="x"), dict(role="assistant", content="y")]
    thoughts = [dict(role="user", content="x"), dict(role="assistant", content="<think>\nt\n</think>\n\ny")]
    texts = []
    for messages in [short, [dict(role="system", content="s"), *thoughts, *thoughts]] if template else []:
        try:
            texts.append(template.render(messages))
        except InputError as error:
            texts.append(str(error))
    return texts


def _stored(folder, key, dtype):
    """What store_tokens gave for a key, None where the folder does not have it, or not whole."""
    try:
        info = json.loads((folder / "tokens.json").read_bytes())
        stored = {split: open_tokens(folder, split, dtype) for split in SPLITS}
        whole = info["key"] == key and all(len(stored[split].ids) == info["tokens"][split] for split in SPLITS)
    except (KeyError, OSError, TypeError, ValueError):  # InputError is a ValueError
        return None
    return stored if whole else None


@contextlib.contextmanager
def _disk(folder):
    """Within it files of tokens are written to the folder, which is made. Raises InputError where that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise InputError(f"{folder}: expected to write tokens there, but: {error.strerror or error}; make room, or name "
                         "another folder") from None


@contextlib.contextmanager
def _writing(folder, names, dtype):
    """Gives add(name, ids, counts), which appends a document to a name's files. They get their names at the end, after the
    files that had them are gone, so that new ids never stand beside old flags; where an error ends it, none is left."""
    files = [folder / f"{name}.{part}" for name in names for part in ("ids", "flags")]
    for file in files:
        for leftover in folder.glob(f"{file.name}.tmp*"):  # of a run that was killed
            leftover.unlink(missing_ok=True)
    unfinished = [f"{file}.tmp{os.getpid()}" for file in files]
    try:
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(open(file, "wb")) for file in unfinished]
            of = dict(zip(names, zip(opened[::2], opened[1::2])))

            def add(name, ids, counts):
                for file, array in zip(of[name], (np.asarray(ids, dtype=dtype), _flags(counts))):
                    file.write(array.tobytes())

            yield add
        for file in files:
            file.unlink(missing_ok=True)
        for file, whole in zip(unfinished, files):
            os.replace(file, whole)
    finally:
        for file in unfinished:
            Path(file).unlink(missing_ok=True)


def save_tokens(folder, name, documents, dtype=np.uint32):
    """Writes documents, an iterable of (ids, counts) pairs of n ints and n bools each, as {name}.ids and {name}.flags in a
    folder, which is made -> Tokens, as open_tokens gives them. The files are whole or not there. Raises InputError where
    they cannot be written."""
    folder = Path(folder)
    with _disk(folder), _writing(folder, [name], dtype) as add:
        for ids, counts in documents:
            add(name, ids, counts)
    return open_tokens(folder, name, dtype)


def open_tokens(folder, name, dtype=np.uint32):
    """The Tokens in {name}.ids, of dtype, and {name}.flags, mapped into memory. Raises InputError where they are missing
    or do not fit each other."""
    files = {Path(folder) / f"{name}.ids": np.dtype(dtype), Path(folder) / f"{name}.flags": np.dtype(np.uint8)}
    try:
        sizes = [file.stat().st_size / of.itemsize for file, of in files.items()]
        if sizes[0] != sizes[1]:
            raise OSError("they are of different lengths")
        # mmap has no place for a file of nothing
        return Tokens(*(np.memmap(file, of, "r") if sizes[0] else np.empty(0, of) for file, of in files.items()))
    except OSError as error:
        raise InputError(f"{Path(folder) / name}.ids: expected tokens and their flags, but: {error.strerror or error}; make "
                         "them anew") from None


# ---------------------------------------------------------------------------------------------------------------------
# windows and prompts


def batch(tokens, batch_size, block_size, generator):
    """Random windows of tokens [N], as torch.int64 [batch_size, block_size]. Raises InputError if N < block_size."""
    return _cut(tokens, _starts(tokens, batch_size, block_size, generator), block_size)


def windows(tokens, batch_size, length, generator):
    """Random windows of Tokens, where `batch` would take them of their ids: (ids, torch.int64; counts, torch.bool;
    documents, torch.int64), each [batch_size, length]. documents numbers those of a window, from 0. Errors as for batch."""
    starts = _starts(tokens.ids, batch_size, length, generator)
    ids, flags = (_cut(array, starts, length) for array in tokens)
    numbers = ((flags & START) > 0).cumsum(dim=1)
    return ids, (flags & COUNTS) > 0, numbers - numbers[:, :1]


def _starts(array, batch_size, length, generator):
    places = len(array) - length + 1
    if places < 1:
        raise InputError(f"expected at least {length} tokens, one block, but got {len(array)}; give more text")
    return torch.randint(places, (batch_size,), generator=generator).tolist()


def _cut(array, starts, length):
    return torch.from_numpy(np.stack([array[i : i + length] for i in starts]).astype(np.int64))


def prompts(tokens, n, length, seed=0):
    """n prompts, lists of ids, from random documents of Tokens: the same for the same seed.

    Of a text, `length` ids from a random place, with at least one more behind them; of a completion or a conversation, all
    before one of the runs that count, if that is at most 4 * length ids. A document gives a second prompt only when all
    that can give one have. Raises InputError if none can.
    """
    if length < 1:
        raise InputError(f"expected prompts of 1 token or more, but got a length of {length}; ask for more")
    rng = np.random.default_rng(seed)
    starts = np.flatnonzero(tokens.flags & START)
    ends = np.append(starts[1:], len(tokens.flags))
    usable, found = [], []
    for i in rng.permutation(len(starts)):
        if len(found) == n:
            break
        prompt = _prompt(tokens, starts[i], ends[i], length, rng)
        if prompt:
            usable.append(i)
            found.append(prompt)
    if not usable and n > 0:
        raise InputError(f"expected a document that gives a prompt of {length} tokens, but found none; ask for fewer")
    again = itertools.islice(itertools.cycle(usable), n - len(found))
    return found + [_prompt(tokens, starts[i], ends[i], length, rng) for i in again]


def _prompt(tokens, start, end, length, rng):
    """A prompt from the document at start to end, None where it can give none."""
    counts = (tokens.flags[start:end] & COUNTS) > 0
    runs = np.flatnonzero(counts & ~np.append(False, counts[:-1]))  # where one that counts begins
    if len(runs) == 1 and runs[0] <= LEAD and counts[-1]:
        if len(counts) <= length:
            return None
        first = start + rng.integers(len(counts) - length)
        return tokens.ids[first : first + length].tolist()
    runs = runs[(runs > 0) & (runs <= 4 * length)]
    return tokens.ids[start : start + rng.choice(runs)].tolist() if len(runs) else None


def heldout_prompts(encoding, n, length, seed=0, paths=None):
    """n prompts, lists of `length` ids each, from random places of held-out documents: the same for the same seed.

    A document gives a second prompt only when all that are long enough have given one. paths: as for load_tokens.
    Raises InputError if no held-out document is long enough.
    """
    if length < 1:
        raise InputError(f"expected prompts of 1 token or more, but got a length of {length}; ask for more")
    rng = random.Random(seed)
    heldout = list(documents(paths, "heldout"))
    rng.shuffle(heldout)
    usable = []
    for document in heldout:
        if len(usable) == n:
            break
        usable += [tokens.tolist() for tokens in _encode([document], encoding) if len(tokens) >= length]
    if not usable and n > 0:
        raise InputError(f"expected a held-out document of {length} tokens or more, but found none; ask for fewer")
    prompts = []
    for tokens in (usable[i % len(usable)] for i in range(n)):
        start = rng.randrange(len(tokens) - length + 1)
        prompts.append(tokens[start : start + length])
    return prompts
