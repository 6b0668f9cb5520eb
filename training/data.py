"""Documents into tokens: files of token ids that are mapped into memory, training windows, prompts.

A folder of tokens holds three arrays per split, see `Tokens`, and meta.json, which says what the
tokens were made from. It is written under a temporary name and renamed at the end: a folder is
complete or not there.
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

from hf.tokenizer import end_of_text
from model import InputError, read_json
from training import corpus
from training.corpus import SPLITS, corpus_name, source_files, split_records, warn

CHUNK_CHARACTERS = 20_000_000  # of text in memory at a time, and between two lines of progress
COVERAGE = 0.97  # the share of the training text's tokens that an "auto" draft vocabulary holds
VOCABULARY_STEP = 1024  # the size of such a vocabulary is a multiple of this
MAX_PREFIX = 2  # tokens that a tokenizer puts before a text; where more precede the loss, a prompt


class Tokens(NamedTuple):
    """Documents one after the other, in memory or mapped from files."""

    ids: np.ndarray        # [N], uint16 or uint32
    loss_mask: np.ndarray  # [N], bool: heads are trained to guess this token
    starts: np.ndarray     # int64, ascending: the offset of each document's first token


# --------------------------------------------------------------------------------------------------
# Text into tokens

def document(ids, loss_mask, dtype):
    """One document as Tokens; an empty one has no start."""
    starts = np.zeros(min(len(ids), 1), np.int64)
    return Tokens(np.array(ids, dtype), np.array(loss_mask, bool), starts)


def encode_record(record, encoding):
    """A Record as Tokens. InputError as in `end_of_text`.

    A text, and a prompt with its completion, gets the tokenizer's prefix before it and end_of_text
    after it, which is also the prefix of the next where they are one token; a chat template writes
    both itself. Special tokens are recognised except in plain texts. Prompt and answer are encoded
    separately, as in decoding."""
    special = () if record.kind == "text" else "all"
    parts = [(encoding.encode(text, allowed_special=special), in_loss)
             for text, in_loss in record.parts]
    if record.kind != "chat":
        end = [end_of_text(encoding)]
        prefix = [] if encoding.prefix == end else encoding.prefix
        parts = [(prefix, False), *parts, (end, True)]
    loss_mask = np.repeat([in_loss for _, in_loss in parts], [len(ids) for ids, _ in parts])
    dtype = np.uint16 if encoding.max_token_value < 2**16 else np.uint32
    return document([token for ids, _ in parts for token in ids], loss_mask, dtype)


def chunks(records):
    """Yields lists of (split, Record) of CHUNK_CHARACTERS or just more; the last is shorter."""
    chunk = []
    characters = 0
    for split, record in records:
        chunk.append((split, record))
        characters += len(record.text)
        if characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk = []
            characters = 0
    yield chunk


def encode_documents(paths, splits, encoding, template=None, log=warn):
    """Yields (split, kind, Tokens) for each document of some of SPLITS, encoded by all cores.
    Arguments and errors as in `split_records`; log also tells the progress. InputError where a
    training split has no token to guess."""
    characters = tokens = guessed = 0
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for chunk in chunks(split_records(paths, splits, template, log)):
            if characters:
                log(f"tokenised {characters / 1e6:.1f}M characters, {tokens / 1e6:.1f}M tokens")
            encoded = pool.map(lambda pair: encode_record(pair[1], encoding), chunk)
            for (split, record), found in zip(chunk, encoded):
                yield split, record.kind, found
                characters += len(record.text)
                tokens += len(found.ids)
                guessed += split == "train" and found.loss_mask.any()
    if "train" in splits and not guessed:
        raise InputError(f"{corpus_name(paths)}: expected tokens for heads to guess, but the train "
                         "split has no usable tokens; give more")


def concatenate(parts):
    """Several Tokens as one, in memory."""
    offsets = itertools.accumulate((len(part.ids) for part in parts), initial=0)
    shifted = (part._replace(starts=part.starts + offset) for part, offset in zip(parts, offsets))
    return Tokens(*map(np.concatenate, zip(*shifted)))


def load_tokens(paths, encoding, split, template=None):
    """The Tokens of a split, "train" or "heldout", in memory. Errors as in `encode_documents`."""
    documents = encode_documents(paths, [split], encoding, template)
    return concatenate([found for *_, found in documents])


# --------------------------------------------------------------------------------------------------
# Token folders

def write_tokens(folder, documents, key=None):
    """Writes documents, an iterable of (split, kind, Tokens), for `open_tokens`. The folder appears
    at the end, in place of an older one, which any error leaves as it is."""
    folder = Path(folder)
    temporary = folder.with_name(f"{folder.name}.tmp{os.getpid()}")
    missing = [parent for parent in folder.parents if not parent.exists()]
    try:
        for leftover in folder.parent.glob(f"{folder.name}.tmp*"):  # of a killed run
            shutil.rmtree(leftover)
        temporary.mkdir(parents=True)
        meta = dict(key=key) | write_arrays(temporary, documents)
        (temporary / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(temporary, folder)
    except OSError as error:
        raise InputError(f"{folder}: expected to write tokens there, but: "
                         f"{error.strerror or error}; make room, or name another folder") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        remove_empty(missing)


def remove_empty(folders):
    """Removes those of the folders, inner ones first, that exist and hold nothing."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def write_arrays(folder, documents):
    """Writes the documents' arrays -> what meta.json says about them."""
    lengths = {split: [0, 0, 0] for split in SPLITS}
    kinds = Counter()
    dtype = "uint16"
    with contextlib.ExitStack() as stack:
        files = {(split, i): stack.enter_context(open(folder / f"{split}.{name}", "wb"))
                 for split in SPLITS for i, name in enumerate(Tokens._fields)}
        for split, kind, found in documents:
            kinds[kind] += 1
            dtype = found.ids.dtype.name
            found = found._replace(starts=found.starts + lengths[split][0])
            for i, array in enumerate(found):
                files[split, i].write(array.tobytes())
                lengths[split][i] += len(array)
    return dict(kinds=kinds, dtype=dtype, lengths=lengths)


def open_tokens(folder):
    """What `write_tokens` wrote: ({split: Tokens mapped into memory}, the dict of meta.json)."""
    folder = Path(folder)
    meta = read_json(folder / "meta.json")
    tokens = {}
    try:
        for split, lengths in meta["lengths"].items():
            fields = zip(Tokens._fields, (meta["dtype"], bool, np.int64), lengths, strict=True)
            arrays = [np.memmap(folder / f"{split}.{name}", dtype, "r") if n else np.empty(0, dtype)
                      for name, dtype, n in fields]
            if [len(array) for array in arrays] != lengths:
                raise ValueError("a file is of another size than meta.json says")
            tokens[split] = Tokens(*arrays)
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise InputError(f"{folder}: expected a folder of tokens, but it is damaged ({error}); "
                         "remove it") from None
    return tokens, meta


def tokens_key(paths, encoding, template=None):
    """16 hex digits of what tokens depend on: tokenizer, template, each file's path, size, time."""
    files = sorted((str(f.absolute()), f.stat().st_size, f.stat().st_mtime_ns)
                   for f in source_files(paths))
    template = template and (template.source, template.tokens)
    parts = (encoding.hash, encoding.prefix, template, files, corpus.TEXT_SUFFIXES,
             corpus.PIECE)
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def store_tokens(folder, paths, encoding, template=None, log=print):
    """Both splits' tokens in a folder, as `open_tokens` gives them; they are made unless the folder
    holds those of these files, tokenizer and template."""
    key = tokens_key(paths, encoding, template)
    with contextlib.suppress(InputError):
        tokens, meta = open_tokens(folder)
        if meta.get("key") == key:
            return tokens, meta
    write_tokens(folder, encode_documents(paths, SPLITS, encoding, template, log), key)
    return open_tokens(folder)


# --------------------------------------------------------------------------------------------------
# Draft vocabularies

def draft_vocabulary(ids, n, vocab_size, log=print):
    """The n most frequent token ids of an array [N], most frequent first, then lowest first. An
    empty list means all ids. n: a number; "auto": see `auto_size`, whose line is logged."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(ids), 2**24):  # bincount copies its input to int64
        counts += np.bincount(ids[start:start + 2**24], minlength=vocab_size)
    if n == "auto":
        n, line = auto_size(counts)
        log(line)
    return np.argsort(-counts, kind="stable")[:n].tolist()


def auto_size(counts):
    """counts [V]: how often each token id is in a text -> (how many of the most frequent ids cover
    COVERAGE of it, rounded up to a multiple of VOCABULARY_STEP, but 0 unless that is under half of
    V; a line that says so)."""
    V = len(counts)
    covered = np.sort(counts)[::-1].cumsum() / counts.sum()
    needed = int(np.searchsorted(covered, COVERAGE)) + 1
    n = -(-needed // VOCABULARY_STEP) * VOCABULARY_STEP
    if 2 * n < V:
        return n, (f"draft vocabulary: {n} of {V} token ids, which cover {covered[n - 1]:.1%} of "
                   "the training text")
    return 0, (f"draft vocabulary: all {V} token ids ({COVERAGE:.0%} of the training text needs "
               f"{needed}, rounded up to {n}: not under half)")


# --------------------------------------------------------------------------------------------------
# Windows and prompts

def step_seed(seed, step):
    """The seed of a training step's windows: each step has its own, the same in a resumed run."""
    return seed * 1_000_003 + step


def window_batch(parts, length, seed, device, mine=slice(None)):
    """Random windows, the same for the same seed: n of the Tokens of each (Tokens, n) in `parts`,
    and of all these the slice `mine` -> (ids, int64; loss_mask, bool; documents, int64), each
    [windows, length]. documents: the number of each token's document in its window, from 0; None
    where every window lies within one document. InputError for Tokens of fewer than `length`."""
    batch = []
    for tokens, n in parts:
        last = len(tokens.ids) - length
        if last < 0:
            raise InputError(f"expected at least {length} tokens, one block, but got "
                             f"{len(tokens.ids)}; give more text")
        starts = torch.randint(last + 1, (n, 1), generator=torch.Generator().manual_seed(seed))
        columns = starts.numpy() + np.arange(length)
        documents = np.searchsorted(tokens.starts, columns, side="right")
        batch.append((tokens.ids[columns].astype(np.int64), tokens.loss_mask[columns],
                      documents - documents[:, :1]))
    ids, loss_mask, documents = (to_device(np.concatenate(arrays)[mine], device)
                                 for arrays in zip(*batch))
    return ids, loss_mask, documents if any(numbers.any() for *_, numbers in batch) else None


def check_length(splits, window, batch_size):
    """Refuses splits, {name: Tokens}, too short for a step of training or for the evaluation."""
    for split, windows in (("train", batch_size), ("heldout", 1)):
        found = len(splits[split].ids)
        if found < windows * window:
            raise InputError(f"expected at least {windows * window} tokens in the {split} split, "
                             f"{windows} windows of {window}, but it has {found}; give more text, "
                             "or a smaller --block-size or --batch-size")


def to_device(array, device):
    """A numpy array as a tensor. To CUDA it goes from pinned memory: the host does not wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    on_gpu = torch.device(device).type == "cuda"
    return (tensor.pin_memory() if on_gpu else tensor).to(device, non_blocking=on_gpu)


def prompts(tokens, n, length, seed=0, max_len=None):
    """n prompts, lists of ids, from random documents: the same for the same seed.

    From a text: `length` ids from a random offset, with at least one more after them. From a
    completion or a conversation: what precedes an answer, its last max_len ids (default: 4 *
    length). A document gives a second prompt only after all that can have given one. Where all
    texts are too short, `length` is halved. InputError where no document has two tokens."""
    if length < 1:
        raise InputError(f"expected prompts of 1 token or more, not {length}; ask for more")
    rng = np.random.default_rng(seed)
    max_len = max_len or 4 * length
    ends = np.append(tokens.starts[1:], len(tokens.ids))
    prompt_of = lambda i: prompt_from(tokens, tokens.starts[i], ends[i], length, max_len, rng)
    found = {}
    for i in rng.permutation(len(tokens.starts)):
        if len(found) == n:
            break
        if prompt := prompt_of(i):
            found[i] = prompt
    if not found and n > 0:
        if length > 1:
            return prompts(tokens, n, length // 2, seed, max_len)
        raise InputError("expected documents of two tokens, for prompts; give more text")
    again = itertools.islice(itertools.cycle(found), n - len(found))
    return [*found.values(), *map(prompt_of, again)]


def prompt_from(tokens, start, end, length, max_len, rng):
    """A prompt from the document at offsets start..end; None if it has none."""
    mask = tokens.loss_mask[start:end]
    answers = np.flatnonzero(mask & ~np.append(False, mask[:-1]))  # where a run in the loss begins
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
