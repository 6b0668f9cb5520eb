"""Text in, token ids out: corpora and their documents, arrays of their ids, training batches.

The built-in corpus is the Python standard library's own source, so that every command runs with nothing downloaded.
`load_encoding` and the rest of a folder's tokenizer are in tokenizer.py; they can be imported from here too.
"""

import hashlib
import itertools
import json
import os
import random
import sysconfig
from pathlib import Path

import numpy as np
import torch

from checkpoint import InputError
from tokenizer import end_of_text, load_encoding  # noqa: F401, load_encoding for who imports it from here

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".js", ".ts", ".java", ".go", ".rs", ".jsonl")
PIECE = 4096  # characters of a long document that are held out, or not, together
CHUNK_CHARACTERS = 4_000_000  # documents encoded at once: bounds the memory that lists of ids take


# ---------------------------------------------------------------------------------------------------------------------
# documents


def builtin_corpus(split):
    """The Python standard library's own .py files on this machine: a sorted list of Path, fit for read_documents.

    split: "train", or "heldout" for the 1 file in 20 that a hash of its path inside the library picks.
    Raises InputError where Python came without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [file.relative_to(root) for file in sorted(root.rglob("*.py"))]
    files = [root / name for name in names if not _foreign(name) and _in_split(name.as_posix(), split)]
    files = [file for file in files if _read(file)]
    if not files:
        raise InputError(f"{root}: expected the sources of Python's library, but there are none; name files of text")
    return files


def _foreign(name):
    # _sysconfigdata describes the machine that Python was built on, so it would differ between two of the same version.
    return {"site-packages", "dist-packages", "__pycache__"} & set(name.parts) or name.stem.startswith("_sysconfigdata")


def _in_split(text, split):
    if split not in ("train", "heldout"):
        raise InputError(f"expected the split train or heldout, but got {split!r}; name one of the two")
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return (int.from_bytes(digest[:8], "big") % 20 == 0) == (split == "heldout")


def _read(file):
    """A file's text, or None where it cannot be read as UTF-8."""
    try:
        return file.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return None


def read_documents(paths):
    """Yield each document's text, a str that is not empty.

    paths: files, read whatever their suffix, and folders, searched through for TEXT_SUFFIXES. A file is a document; of
    a .jsonl file, the "text" of each line is one. Raises InputError for a path that is missing or has nothing to read,
    for a named file that is not UTF-8, and for a broken .jsonl line. In folders, files that are no UTF-8 are left out.
    """
    for path in map(Path, paths):
        if not os.access(path, os.R_OK):
            raise InputError(f"{path}: expected a file or folder of text, but there is none to read; check the path")
        files = [path]
        if path.is_dir():
            files = [file for file in sorted(path.rglob("*")) if file.suffix in TEXT_SUFFIXES and file.is_file()]
        texts = (text for file in files for text in _texts(file) if text)
        count = 0
        for count, text in enumerate(texts, start=1):
            yield text
        if not count:
            wanted = f"{' '.join(TEXT_SUFFIXES)} files" if path.is_dir() else "text"
            raise InputError(f"{path}: expected {wanted} in UTF-8, but it is empty or not UTF-8; name another")


def _texts(file):
    """The documents of one file: None for what is not UTF-8."""
    if file.suffix != ".jsonl":
        yield _read(file)
        return
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = json.loads(line)["text"] if line.strip() else ""
            except (KeyError, TypeError, ValueError):
                text = None
            if not isinstance(text, str):
                raise InputError(f'{file}: expected {{"text": "..."}}, but line {number} is {line[:40]!r}; mend it')
            yield text


# ---------------------------------------------------------------------------------------------------------------------
# tokens


def _encode(documents, encoding):
    """Each document's ids as an array of uint32, a few MB of text at a time, so that memory stays bounded."""
    for chunk in _chunks(documents):
        for tokens in encoding.encode_ordinary_batch(chunk, num_threads=os.cpu_count() or 1):
            yield np.array(tokens, dtype=np.uint32)


def _chunks(documents):
    chunk, size = [], 0
    for document in documents:
        chunk.append(document)
        size += len(document)
        if size >= CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def token_array(documents, encoding, separator):
    """The ids of all documents (an iterable of str) as one array [N], the id `separator` after each document.

    uint16 where all the vocabulary's ids fit, else uint32. Text that spells a special token is encoded as plain text.
    Bytes that the vocabulary lacks are dropped, as Hugging Face's tokenizers do.
    """
    dtype = np.uint16 if max(encoding.max_token_value, separator) < 2**16 else np.uint32
    arrays = [np.append(tokens, separator).astype(dtype) for tokens in _encode(documents, encoding)]
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def load_tokens(paths, encoding, split):
    """The tokens of a split, "train" or "heldout": an array [N] as token_array gives it.

    paths and errors as for `documents`."""
    return token_array(documents(paths, split), encoding, end_of_text(encoding))


def documents(paths, split):
    """Yield the documents of a split, "train" or "heldout". paths None is the built-in corpus.

    Of files and folders as for read_documents 1 piece in 20 is held out, by a hash of its text; a piece is a document,
    or PIECE characters of a longer one, so that a single file has both splits. Neighbours in one split stay together.
    Raises InputError as read_documents does, and where the split is empty.
    """
    if paths is None:
        yield from read_documents(builtin_corpus(split))
        return
    count = 0
    for document in read_documents(paths):
        pieces = (document[i : i + PIECE] for i in range(0, len(document), PIECE))
        for wanted, run in itertools.groupby(pieces, lambda piece: _in_split(piece, split)):
            if wanted:
                count += 1
                yield "".join(run)
    if not count:
        names = " ".join(map(str, paths))
        raise InputError(f"{names}: expected documents for the {split} split, but it is empty; give more text")


def batch(tokens, batch_size, block_size, generator):
    """Random windows of tokens [N], as torch.int64 [batch_size, block_size]. Raises InputError if N < block_size."""
    places = len(tokens) - block_size + 1
    if places < 1:
        raise InputError(f"expected at least {block_size} tokens, one block, but got {len(tokens)}; give more text")
    starts = torch.randint(places, (batch_size,), generator=generator).tolist()
    return torch.from_numpy(np.stack([tokens[i : i + block_size] for i in starts]).astype(np.int64))


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
