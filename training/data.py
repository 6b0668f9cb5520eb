"""Documents into tokens: files of token ids that are mapped into memory, training windows, and prompts.

A folder of tokens holds three arrays per split, see `Tokens`, and meta.json, which says what the tokens were made from.
It is written under a temporary name and renamed at the end: a folder is complete or not there.
"""

import contextlib
import hashlib
import itertools
import json
import os
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from hf.tokenizer import end_of_text, tokenizer_hash
from model import InputError, read_json
from training.corpus import PIECE, SPLITS, TEXT_SUFFIXES, corpus_name, source_files, split_records

CHUNK_CHARACTERS = 4_000_000      # of text are tokenised at a time, which bounds the memory for lists of ids
PROGRESS_CHARACTERS = 20_000_000  # of text between two lines of progress
MAX_PREFIX = 2  # a tokenizer puts at most this many tokens before a text; where more precede the loss, it is a prompt


class Tokens(NamedTuple):
    """The documents of a split, one after the other, in memory or mapped from files."""

    ids: np.ndarray        # [N], uint16 or uint32
    loss_mask: np.ndarray  # [N], bool: heads are trained to guess this token
    starts: np.ndarray     # int64, ascending: the offset of each document's first token


# ---------------------------------------------------------------------------------------------------------------------
# Text into tokens

def id_dtype(last):
    return np.uint16 if last < 2**16 else np.uint32


def chunks(items, size):
    """Yields lists of items, each of about CHUNK_CHARACTERS characters; size: the characters of an item."""
    chunk, total = [], 0
    for item in items:
        chunk.append(item)
        total += size(item)
        if total >= CHUNK_CHARACTERS:
            yield chunk
            chunk, total = [], 0
    yield chunk


def encode_all(items, encode, size=len):
    """Yields (item, encode(item)) in order, computed by all cores and a chunk at a time."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for chunk in chunks(items, size):
            yield from zip(chunk, pool.map(encode, chunk))


def token_array(texts, encoding, separator):
    """The ids of all texts (an iterable of str) as one array [N], uint16 or uint32, with the id `separator` after each
    text. Text that spells a special token is encoded as plain text."""
    dtype = id_dtype(max(encoding.max_token_value, separator))
    arrays = [np.array([*ids, separator], dtype) for _, ids in encode_all(texts, encoding.encode_ordinary)]
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def encode_record(record, encoding):
    """A Record -> (ids, uint32 [n]; loss_mask, bool [n]).

    A text, and a prompt with its completion, gets the tokenizer's prefix before it and end_of_text after it; a chat
    template writes both itself. Special tokens are recognised except in plain texts. Prompt and answer are encoded
    separately, as in decoding. InputError as in `end_of_text`.
    """
    if record.kind == "text":
        parts = [(encoding.encode_ordinary(text), in_loss) for text, in_loss in record.parts]
    else:
        parts = [(encoding.encode(text, allowed_special="all"), in_loss) for text, in_loss in record.parts]
    if record.kind != "chat":
        parts = [(encoding.prefix, False), *parts, ([end_of_text(encoding)], True)]
    ids = np.array([token for tokens, _ in parts for token in tokens], dtype=np.uint32)
    return ids, np.repeat([in_loss for _, in_loss in parts], [len(tokens) for tokens, _ in parts])


def encode_records(records, encoding):
    """Yields ((split, Record), (ids, loss_mask)) for (split, Record) pairs."""
    return encode_all(records, lambda pair: encode_record(pair[1], encoding), lambda pair: len(pair[1].text))


def document_tokens(ids, loss_mask, dtype):
    """One document as Tokens; an empty one has no start."""
    return Tokens(np.asarray(ids, dtype), np.asarray(loss_mask, bool), np.zeros(min(len(ids), 1), np.int64))


def concatenate(parts):
    """Several Tokens as one, in memory."""
    offsets = itertools.accumulate((len(part.ids) for part in parts), initial=0)
    shifted = (part._replace(starts=part.starts + offset) for part, offset in zip(parts, offsets))
    return Tokens(*map(np.concatenate, zip(*shifted)))


def load_tokens(paths, encoding, split, template=None):
    """The Tokens of a split, "train" or "heldout", in memory. Arguments and errors as in `split_records`; InputError
    also where the training split has no token to guess."""
    records, dtype = split_records(paths, [split], template), id_dtype(encoding.max_token_value)
    tokens = concatenate([document_tokens(*arrays, dtype) for _, arrays in encode_records(records, encoding)])
    if split == "train" and not tokens.loss_mask.any():
        raise nothing_to_guess(paths)
    return tokens


def nothing_to_guess(paths):
    return InputError(f"{corpus_name(paths)}: expected tokens for heads to guess, but the train split has no usable "
                      "tokens; give more")


# ---------------------------------------------------------------------------------------------------------------------
# Token folders

@contextlib.contextmanager
def new_folder(folder):
    """Gives a temporary folder, which replaces `folder` at the end; an error removes it and leaves the older one as it
    is. InputError where it cannot be written."""
    temporary = folder.with_name(f"{folder.name}.tmp{os.getpid()}")
    try:
        for leftover in folder.parent.glob(f"{folder.name}.tmp*"):  # of a killed run
            shutil.rmtree(leftover)
        temporary.mkdir(parents=True)
        yield temporary
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(temporary, folder)
    except OSError as error:
        raise InputError(f"{folder}: expected to write tokens there, but: {error.strerror or error}; make room, or "
                         "name another folder") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def write_tokens(folder, dtype, splits=SPLITS):
    """Gives add(split, ids, loss_mask), which appends a document, and a dict to put into meta.json. The folder appears
    at the end, in place of an older one. InputError where it cannot be written."""
    meta, lengths = {}, {split: [0] * len(Tokens._fields) for split in splits}
    with new_folder(Path(folder)) as temporary, contextlib.ExitStack() as stack:
        files = {split: [stack.enter_context(open(temporary / f"{split}.{name}", "wb")) for name in Tokens._fields]
                 for split in splits}

        def add(split, ids, loss_mask):
            document = document_tokens(ids, loss_mask, dtype)
            document.starts[:] = lengths[split][0]
            for i, array in enumerate(document):
                files[split][i].write(array.tobytes())
                lengths[split][i] += len(array)
        yield add, meta
        meta.update(dtype=np.dtype(dtype).name, lengths=lengths)
        (temporary / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def open_tokens(folder):
    """What `write_tokens` wrote: ({split: Tokens mapped into memory}, the dict of meta.json). InputError where it is
    missing or damaged."""
    meta, tokens = read_json(Path(folder) / "meta.json"), {}
    try:
        for split, lengths in meta["lengths"].items():
            dtypes = Tokens(np.dtype(meta["dtype"]), np.dtype(bool), np.dtype(np.int64))
            files = [Path(folder) / f"{split}.{name}" for name in Tokens._fields]
            if any(file.stat().st_size != n * of.itemsize for file, n, of in zip(files, lengths, dtypes, strict=True)):
                raise ValueError("a file is of another size than meta.json says")
            # an empty file cannot be mapped
            tokens[split] = Tokens(*(np.memmap(file, of, "r") if n else np.empty(0, of)
                                     for file, n, of in zip(files, lengths, dtypes)))
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise InputError(f"{folder}: expected a folder of tokens, but it is damaged ({error}); remove it") from None
    return tokens, meta


def tokens_key(paths, encoding, template=None):
    """16 hex digits over what tokens depend on: the tokenizer, the template, and each file's path, size and time."""
    stats = [(str(file.absolute()), file.stat()) for file in source_files(paths)]
    files = sorted((file, stat.st_size, stat.st_mtime_ns) for file, stat in stats)
    template = template and (template.source, template.tokens)
    parts = tokenizer_hash(encoding), encoding.prefix, template, files, TEXT_SUFFIXES, PIECE
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def store_tokens(folder, paths, encoding, template=None, log=print):
    """Both splits' tokens in a folder, as `open_tokens` gives them. Text is read only if the folder does not yet hold
    the tokens of these files, tokenizer and template, and is then read once and encoded a chunk at a time.

    log: called with a line of text for every 20 million characters, and as in `read_records`. InputError as in
    `load_tokens`, for either split, and where the folder cannot be written.
    """
    key = tokens_key(paths, encoding, template)
    with contextlib.suppress(InputError):
        tokens, meta = open_tokens(folder)
        if meta.get("key") == key:
            return tokens, meta
    kinds, tokens, guessed, characters = Counter(), 0, Counter(), 0
    with write_tokens(folder, id_dtype(encoding.max_token_value)) as (add, meta):
        records = split_records(paths, SPLITS, template, log)
        for (split, record), (ids, loss_mask) in encode_records(records, encoding):
            add(split, ids, loss_mask)
            kinds[record.kind] += 1
            guessed[split] += int(loss_mask.sum())
            tokens += len(ids)
            before, characters = characters, characters + len(record.text)
            if characters // PROGRESS_CHARACTERS > before // PROGRESS_CHARACTERS:
                log(f"tokenised {characters / 1e6:.1f}M characters, {tokens / 1e6:.1f}M tokens")
        if not guessed["train"]:
            raise nothing_to_guess(paths)
        meta.update(key=key, kinds=kinds)
    return open_tokens(folder)


def most_frequent(ids, n, vocab_size):
    """The n most frequent token ids of an array [N], most frequent first; of equally frequent ones the lowest."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(ids), 2**24):  # bincount copies its input to int64
        counts += np.bincount(ids[start:start + 2**24], minlength=vocab_size)
    return np.argsort(-counts, kind="stable")[:n].tolist()


# ---------------------------------------------------------------------------------------------------------------------
# Windows and prompts

def window_columns(n, batch_size, length, generator):
    """The offsets [batch_size, length] of random windows in an array of n tokens. InputError if n < length."""
    if n < length:
        raise InputError(f"expected at least {length} tokens, one block, but got {n}; give more text")
    return torch.randint(n - length + 1, (batch_size, 1), generator=generator).numpy() + np.arange(length)


def batch(ids, batch_size, length, generator):
    """Random windows of an array of ids [N], as int64 [batch_size, length]. InputError if N < length."""
    return torch.from_numpy(ids[window_columns(len(ids), batch_size, length, generator)].astype(np.int64))


def windows(tokens, batch_size, length, generator):
    """Random windows of Tokens, the same as `batch` takes -> (ids, int64; loss_mask, bool; documents, int64: the number
    of each token's document in its window, from 0), each [batch_size, length]."""
    columns = window_columns(len(tokens.ids), batch_size, length, generator)
    documents = np.searchsorted(tokens.starts, columns, side="right")
    arrays = tokens.ids[columns].astype(np.int64), tokens.loss_mask[columns], documents - documents[:, :1]
    return tuple(map(torch.from_numpy, arrays))


def window_batch(tokens, batch_size, length, seed, device):
    """The `windows` of a seed, on a device; documents is None where every window lies within one document."""
    ids, loss_mask, documents = windows(tokens, batch_size, length, torch.Generator().manual_seed(seed))
    return ids.to(device), loss_mask.to(device), documents.to(device) if documents.any() else None


def prompts(tokens, n, length, seed=0, max_len=None):
    """n prompts, lists of ids, from random documents: the same for the same seed.

    From a text: `length` ids from a random offset, with at least one more after them. From a completion or a
    conversation: what precedes an answer, its last max_len ids (default: 4 * length). A document gives a second prompt
    only after all that can have given one. Where all texts are too short, `length` is halved. InputError where no
    document has two tokens.
    """
    if length < 1:
        raise InputError(f"expected prompts of 1 token or more, but got a length of {length}; ask for more")
    rng, max_len = np.random.default_rng(seed), max_len or 4 * length
    ends = np.append(tokens.starts[1:], len(tokens.ids))
    usable, found = [], []
    for i in rng.permutation(len(tokens.starts)):
        if len(found) == n:
            break
        prompt = prompt_from(tokens, tokens.starts[i], ends[i], length, max_len, rng)
        if prompt:
            usable.append(i)
            found.append(prompt)
    if not usable and n > 0:
        if length > 1:
            return prompts(tokens, n, length // 2, seed, max_len)
        raise InputError("expected documents of two tokens or more, to take prompts from, but found none; give more "
                         "text")
    again = itertools.islice(itertools.cycle(usable), n - len(found))
    return found + [prompt_from(tokens, tokens.starts[i], ends[i], length, max_len, rng) for i in again]


def prompt_from(tokens, start, end, length, max_len, rng):
    """A prompt from the document at offsets start..end; None if it has none."""
    mask = tokens.loss_mask[start:end]
    answers = np.flatnonzero(mask & ~np.append(False, mask[:-1]))  # where a run of tokens in the loss begins
    if len(answers) == 1 and answers[0] <= MAX_PREFIX and mask[-1]:  # a plain text
        if len(mask) <= length:
            return None
        first = start + rng.integers(len(mask) - length)
        return tokens.ids[first:first + length].tolist()
    answers = answers[answers > 0]
    if not len(answers):
        return None
    answer = rng.choice(answers)
    return tokens.ids[start + max(answer - max_len, 0):start + answer].tolist()
