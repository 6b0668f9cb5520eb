"""Documents into token ids: arrays of them, in memory or in files that are mapped, training windows, prompts."""

import contextlib
import hashlib
import itertools
import json
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from model import InputError, atomic_write, read_json
from training.corpus import PIECE, SPLITS, TEXT_SUFFIXES, names_of, source_files, split_records
from hf.tokenizer import end_of_text, load_encoding, tokenizer_hash  # noqa: F401, load_encoding for who imports it from here

CHUNK_CHARACTERS = 4_000_000  # documents encoded at once: bounds the memory that lists of ids take
PROGRESS_CHARACTERS = 20_000_000  # tokenised between two lines that say so
COUNTS, START = 1, 2  # bits of a token's flags: heads are trained to guess it; it is the first of a document
LEAD = 2  # tokens before the counted ones that a tokenizer may have put there; a longer lead is a prompt


class Tokens(NamedTuple):
    """The documents of a split, one after the other: in memory, or mapped from files."""

    ids: np.ndarray  # [N], uint16 or uint32
    flags: np.ndarray  # [N], uint8: COUNTS and START


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
    return InputError(f"{names_of(paths)}: expected tokens for heads to guess, but the train split has no usable tokens; give more")


# ---------------------------------------------------------------------------------------------------------------------
# tokens in files


def store_tokens(folder, paths, encoding, template=None, log=print):
    """Both splits' Tokens, {"train": Tokens, "heldout": Tokens}, mapped from files in a folder, which is made.

    Documents are read once and encoded a few MB at a time; where the folder has the tokens of this very text, tokenizer and template
    already, it is not read at all. log is called with a line of text for each 20 million characters, and for each file of
    which broken lines are skipped. Nothing that a run leaves when it fails or is killed is taken for tokens.
    Raises InputError as load_tokens does for either split, and where the files cannot be written.
    """
    folder, key, dtype = Path(folder), tokens_key(paths, encoding, template), _id_type(encoding.max_token_value)
    with contextlib.suppress(InputError):
        tokens, record = stored_tokens(folder)
        if record["key"] == key:
            return tokens
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
    return stored_tokens(folder)[0]


def tokens_key(paths, encoding, template=None):
    """16 hex digits of what tokens depend on: tokenizer, template, and the files' paths, sizes and times."""
    stats = [(str(file.absolute()), file.stat()) for file in source_files(paths)]
    seen = sorted((file, stat.st_size, stat.st_mtime_ns) for file, stat in stats)
    whole = tokenizer_hash(encoding), encoding.prefix, template and (template.source, template.tokens), seen, TEXT_SUFFIXES, PIECE
    return hashlib.sha256(repr(whole).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def stored_tokens(folder):
    """What store_tokens left in a folder: ({"train": Tokens, "heldout": Tokens}, its record: their key, dtype, and numbers of
    tokens, of those that count, and of documents by kind). Raises InputError where that is not there or not whole."""
    record = read_json(Path(folder) / "tokens.json")
    try:
        tokens = {split: open_tokens(folder, split, np.dtype(record["dtype"])) for split in SPLITS}
        if all(len(tokens[split].ids) == record["tokens"][split] for split in SPLITS) and {"key", "kinds"} <= set(record):
            return tokens, record
    except (KeyError, TypeError):
        pass
    raise InputError(f"{folder}: expected tokens and tokens.json, which tells of them, but they do not fit each other; make them anew")


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


def prompts(tokens, n, length, seed=0, most=None):
    """n prompts, lists of ids, from random documents of Tokens: the same for the same seed.

    Of a text, `length` ids from a random place, with at least one more behind them; of a completion or a conversation, what
    is before one of the runs that count, the last `most` ids of it (default: 4 * length). A document gives a second prompt
    only when all that can give one have; where none can, texts being short, `length` is halved. Raises InputError if none can.
    """
    if length < 1:
        raise InputError(f"expected prompts of 1 token or more, but got a length of {length}; ask for more")
    rng, most = np.random.default_rng(seed), most or 4 * length
    starts = np.flatnonzero(tokens.flags & START)
    ends = np.append(starts[1:], len(tokens.flags))
    usable, found = [], []
    for i in rng.permutation(len(starts)):
        if len(found) == n:
            break
        prompt = _prompt(tokens, starts[i], ends[i], length, most, rng)
        if prompt:
            usable.append(i)
            found.append(prompt)
    if not usable and n > 0:
        if length > 1:
            return prompts(tokens, n, length // 2, seed, most)
        raise InputError("expected documents of two tokens or more, to take prompts from, but found none; give more text")
    again = itertools.islice(itertools.cycle(usable), n - len(found))
    return found + [_prompt(tokens, starts[i], ends[i], length, most, rng) for i in again]


def _prompt(tokens, start, end, length, most, rng):
    """A prompt from the document at start to end, None where it can give none."""
    counts = (tokens.flags[start:end] & COUNTS) > 0
    runs = np.flatnonzero(counts & ~np.append(False, counts[:-1]))  # where one that counts begins
    if len(runs) == 1 and runs[0] <= LEAD and counts[-1]:
        if len(counts) <= length:
            return None
        first = start + rng.integers(len(counts) - length)
        return tokens.ids[first : first + length].tolist()
    runs = runs[runs > 0]
    if not len(runs):
        return None
    last = rng.choice(runs)
    return tokens.ids[start + max(last - most, 0) : start + last].tolist()
