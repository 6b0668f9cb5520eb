"""Text in, token ids out: a Hugging Face tokenizer.json read into tiktoken, the built-in corpus, training batches.

The encoding is exact or refused: what `load_encoding` returns gives the ids the tokenizer.json stands for. The
built-in corpus is the Python standard library's own source, so that every command runs with nothing downloaded.
"""

import codecs
import hashlib
import itertools
import json
import os
import random
import sysconfig
from pathlib import Path

import numpy as np
import tiktoken
import torch

from model import InputError

# ByteLevel's own split when its use_regex is on: GPT-2's pattern.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The same after Digits has cut every digit (run) out: no space joins a digit, and a digit ends the text before it.
DIGITS_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<|im_end|>", "<|eot_id|>", "<eos>")
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".js", ".ts", ".java", ".go", ".rs", ".jsonl")
PIECE = 4096  # characters of a long document that are held out, or not, together
CHUNK_CHARACTERS = 4_000_000  # documents encoded at once: bounds the memory that lists of ids take


# ---------------------------------------------------------------------------------------------------------------------
# tokenizer.json -> tiktoken


def load_encoding(path):
    """The byte-level BPE tokenizer of a Hugging Face folder (or of a tokenizer.json file) as a tiktoken.Encoding.

    Ids equal the file's. Added tokens, special or not, become tiktoken's special tokens: `encode_ordinary` takes their
    text as plain text, `encode(text, allowed_special="all")` takes it as the token, as Hugging Face does. Nothing is
    put before or after the text (no BOS). A byte that the vocabulary lacks gets an id above `max_token_value`.
    Raises InputError for a missing or broken file, for any other kind of tokenizer, and for merges that BPE by token
    id, which is what tiktoken does, would not follow.
    """
    file = Path(path, "tokenizer.json") if os.path.isdir(path) else Path(path)
    try:
        spec = json.loads(file.read_bytes())
    except OSError as error:
        raise InputError(f"{file}: expected a tokenizer.json, but: {error.strerror}; check the path") from error
    except ValueError as error:
        raise InputError(f"{file}: expected JSON, but: {error}; fetch the file again") from error
    try:
        _check_kind(file, spec)
        pattern = _pattern(file, spec["pre_tokenizer"])
        special = {token["content"]: token["id"] for token in spec.get("added_tokens") or [] if token["content"]}
        ranks = _ranks(file, spec["model"], special)
        last = _last_id(file, ranks, special)
        # tiktoken panics at a byte without an id. Some vocabularies lack rare ones: they get ids that no model has.
        ranks = {bytes([byte]): last + 1 + byte for byte in range(256)} | ranks
        encoding = tiktoken.Encoding(file.parent.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        encoding.max_token_value = last
        return encoding
    except InputError:
        raise
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(f"{file}: expected a tokenizer.json, but misshapen: {what}; fetch it again") from error


def _refuse(file, what):
    raise InputError(f"{file}: expected a byte-level BPE tokenizer, but it has {what}; take a model with such a one")


def _check_kind(file, spec):
    model, normalizer = spec["model"], spec.get("normalizer")
    kind = model.get("type", "BPE" if "merges" in model else "nameless")
    if kind != "BPE":
        _refuse(file, f"a {kind} model")
    for option in ("byte_fallback", "dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            _refuse(file, f"a BPE model with {option}")
    if normalizer:
        _refuse(file, f"the normalizer {normalizer['type']}")


def _pattern(file, pre_tokenizer):
    """The regular expression that cuts text into the pieces which BPE works within."""
    if not pre_tokenizer:
        _refuse(file, "no pre_tokenizer")
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    kinds = "+".join(step["type"] for step in steps)
    if kinds not in ("ByteLevel", "Split+ByteLevel", "Digits+ByteLevel"):
        _refuse(file, f"the pre_tokenizer {kinds}")
    first, byte_level = steps[0], steps[-1]
    use_regex = byte_level.get("use_regex", True)
    if byte_level.get("add_prefix_space", True) or use_regex == (kinds == "Split+ByteLevel"):
        _refuse(file, f"the pre_tokenizer {kinds} with add_prefix_space or with use_regex={use_regex}")
    if kinds == "ByteLevel":
        return GPT2_PATTERN
    if kinds == "Digits+ByteLevel":
        return DIGITS_PATTERN % ("" if first.get("individual_digits") else "+")
    regex, behavior = first["pattern"].get("Regex"), (first["behavior"], first.get("invert", False))
    if regex is None or behavior not in (("Isolated", False), ("Removed", True)):
        _refuse(file, f"the pre_tokenizer Split by {first['pattern']}, {first['behavior']}")
    # tiktoken drops what no match covers. "Isolated" keeps each such stretch as one piece, so it needs a match too.
    return f"(?:{regex})|(?:(?!{regex})(?s:.))+" if behavior[0] == "Isolated" else regex


def _byte_symbols():
    """GPT-2's printable stand-ins for bytes (openai/gpt-2, encoder.py), as a table for str.translate.

    It turns a token into characters that latin-1 encodes to the token's bytes, and to none if it is no byte string.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return dict.fromkeys(others, "\uffff") | {256 + i: byte for i, byte in enumerate(others)}


def _ranks(file, model, special):
    """{token bytes: id} of the ordinary tokens, once it is sure that they merge as the file's merges say."""
    table = _byte_symbols()
    pairs = [entry.split(" ") if isinstance(entry, str) else entry for entry in model["merges"]]
    # An added token may also be an ordinary one: when merges lead to it.
    ordinary = {left + right for left, right in pairs}
    ranks = {
        token.translate(table).encode("latin-1"): index
        for token, index in model["vocab"].items()
        if token not in special or token in ordinary or len(token) == 1
    }
    merges = {}
    for left, right in pairs:
        pair = left.translate(table).encode("latin-1"), right.translate(table).encode("latin-1")
        merges.setdefault(pair, len(merges))
    _check_merges(file, ranks, merges, model.get("ignore_merges", False))
    return ranks


def _check_merges(file, ranks, merges, ignore_merges):
    """Refuse a vocabulary on which tiktoken would part from the merges.

    tiktoken joins whichever two neighbours give the lowest id; the merges say which pairs may join, and when. Inside
    the bytes of one token nothing outside matters until they are joined, so both agree on all texts if they agree on
    each token's own bytes, and if ids and the merges that complete their tokens are in the same order.
    """
    if not {left + right for left, right in merges} <= ranks.keys():
        _refuse(file, "merges that lead to no token")
    previous = -1
    for token in sorted(ranks, key=ranks.get):
        parts = _last_parts(token, merges)
        # Stuck in three or more parts: no text leads there. With ignore_merges both take it when it is a whole piece.
        if len(parts) == 1 or (len(parts) > 2 and ignore_merges):
            continue
        rank = merges.get(tuple(parts), -1)
        if rank <= previous:
            _refuse(file, f"ids that do not follow the order of its merges (token {ranks[token]}, {token!r})")
        previous = rank


def _last_parts(token, merges):
    """What the merges make of a token's bytes just before the last merge: 2 parts, or more where they get stuck."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        order = [merges.get(pair, len(merges)) for pair in zip(parts, parts[1:])]
        first = min(order)
        if first == len(merges):
            break
        i = order.index(first)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def _last_id(file, ranks, special):
    """The highest id, once it is sure that every id is a number and stands for one token."""
    tokens = {}
    for token, index in [*ranks.items(), *((text.encode(), index) for text, index in special.items())]:
        if type(index) is not int or not 0 <= index < 2**31 or tokens.setdefault(index, token) != token:
            _refuse(file, f"the id {index!r} for the token {token!r}, which is no id or another token's")
    return max(tokens)


def tokenizer_hash(encoding):
    """16 hex digits which two encodings share when they give the same ids: vocabulary, pattern and special tokens."""
    whole = (sorted(encoding._mergeable_ranks.items()), encoding._pat_str, sorted(encoding._special_tokens.items()))
    return hashlib.sha256(repr(whole).encode()).hexdigest()[:16]


def end_of_text(encoding):
    """The id that separates documents: the first of SEPARATORS that the encoding has. Raises InputError if none."""
    for text in SEPARATORS:
        if text in encoding._special_tokens:
            return encoding._special_tokens[text]
    raise InputError(f"expected a tokenizer with one of {' '.join(SEPARATORS)}, but it has none; add one to its file")


class TextStream:
    """Text from token ids as they come: never half a character, and in sum what decoding all of them at once gives."""

    def __init__(self, encoding):
        self.encoding = encoding
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens):
        """The str that these ids (an iterable of int) complete. Bytes that are no UTF-8, and an id that is no token's,
        give U+FFFD."""
        return "".join(self.decoder.decode(self._bytes(token)) for token in tokens)

    def finish(self):
        """The rest, for a text that ends within a character: U+FFFD, else nothing. The stream is then as new."""
        rest = self.decoder.decode(b"", final=True)
        self.decoder.reset()
        return rest

    def _bytes(self, token):
        try:
            return self.encoding.decode_single_token_bytes(token)
        except (KeyError, OverflowError):
            return "\N{REPLACEMENT CHARACTER}".encode()


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
            tokens = np.array(tokens, dtype=np.uint32)
            yield tokens[tokens <= encoding.max_token_value]


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
