"""A checkpoint folder's tokenizer: ids that are exact, or refused in one line.

tiktoken does the work wherever it gives the very ids that the folder's files stand for. Every other tokenizer goes
through the package it was made for, tokenizers or sentencepiece: both optional, and imported only then.
"""

import base64
import codecs
import functools
import hashlib
import importlib
import itertools
import json
import re
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import regex  # tiktoken brings it
import tiktoken

from model import InputError, read_json

# ByteLevel's own split when its use_regex is on: GPT-2's pattern.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The same after Digits has cut every digit (run) out: no space joins a digit, and a digit ends the text before it.
# (The tokenizers package's Digits knows 13 digits of Unicode 17, such as U+11DE0, which no regex engine here does yet.)
DIGITS_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"
# Llama 3's (up to three digits together) and Qwen's (one).
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
# Those of tiktoken_ext/openai_public.py, which downloads the vocabulary where one asks it for a pattern.
CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
O200K_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K_TOKENS = {"<|endoftext|>": 100257, "<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260,
                 "<|endofprompt|>": 100276}
QWEN_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))]
TIKTOKEN_FILES = {  # name -> (lines, pattern, special tokens, normalizer); Qwen's is that of Qwen 1, tokenization_qwen.py
    "r50k_base": (50256, GPT2_PATTERN, {"<|endoftext|>": 50256}, ""),
    "p50k_base": (50280, GPT2_PATTERN, {"<|endoftext|>": 50256}, ""),
    "cl100k_base": (100256, CL100K_PATTERN, CL100K_TOKENS, ""),
    "o200k_base": (199998, O200K_PATTERN, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}, ""),
    "qwen": (151643, QWEN_PATTERN, {token: 151643 + i for i, token in enumerate(QWEN_TOKENS)}, "NFC first"),
}
LLAMA3_LINES = 128000
# In a Split's regex, what Oniguruma, which the tokenizers package uses, reads in another way than tiktoken's engine.
OTHER_SYNTAX = re.compile(r"(?<!\[)\^|\$|\\[^pPsSrntdD\W]|\[:|[\d,]\}\+")
# The tokenizers package normalises by Unicode 9: marks that came later, and blocks that compose, stand alone there.
LATER_MARKS = re.compile(
    "([\u05c8-\u05c9\u07fd\u0897-\u08d3\u09fe\u0c3c\u0d3b-\u0d3c\u0eba\u1715\u1abf-\u1af0\u1df6-\u1dfa\ua82c"
    "\U000105c0-\U000105ff\U00010d24-\U00010f85\U00011070\U0001133b\U00011380-\U000113ff\U0001145e\U00011839-\U00011a99"
    "\U00011d42-\U0001613f\U00016d40-\U00016ff1\U0001d127-\U0001d128\U0001d250-\U0001d281\U0001e08f-\U0001e6f5])"
)
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<|im_end|>", "<|eot_id|>", "<eos>")
LONG = 200_000  # characters; tiktoken's regex engine panics at a match of about 1,000,000
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"  # normalizer_spec { add_dummy_prefix: false } merges into the ModelProto before it


class Inexact(Exception):
    """Why tiktoken would not give the ids that a tokenizer.json stands for: "a Unigram model"."""


# ---------------------------------------------------------------------------------------------------------------------
# What load_encoding gives


class Encoding(tiktoken.Encoding):
    """tiktoken's, with the ids before a prompt (`prefix`), Unicode normalisation, and texts with endless runs of spaces.

    normal: "" for none, "NFC" between the special tokens (as the tokenizers package), "NFC first" for the whole text.
    special_tokens: {text: id}; their text is theirs where `encode` has allowed_special="all" or names them, and plain
    text elsewhere: disallowed_special, which tiktoken raises for, is ignored. Bytes that the vocabulary lacks are
    dropped before any merge, as the package does.
    Raises InputError, naming `file`, for ids that are none or stand for two tokens.
    """

    def __init__(self, file, pattern, ranks, special, normal="", prefix=()):
        last = _last_id(file, ranks, special)
        self._lacking = bytes(byte for byte in range(256) if bytes([byte]) not in ranks)
        # tiktoken panics at a byte without an id
        ranks = {bytes([byte]): last + 1 + byte for byte in self._lacking} | ranks
        super().__init__(file.parent.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        self.max_token_value, self.special_tokens = last, special
        self.normal, self.prefix, self._cut = normal, list(prefix), _cutter(special)

    def encode(self, text, *, allowed_special=frozenset(), disallowed_special=()):
        cut = self._cut if allowed_special == "all" else _cutter(allowed_special)
        parts = cut(_normalize(text) if self.normal == "NFC first" else text)
        ids = ([self.special_tokens[part]] if i % 2 else self.encode_ordinary(part) for i, part in enumerate(parts))
        return list(itertools.chain.from_iterable(ids))

    def encode_ordinary(self, text):
        if self.normal:
            text = _normalize(text, LATER_MARKS if self.normal == "NFC" else None)
        if len(text) > LONG and max((len(match.group()) for match in self._pieces(text)), default=0) > LONG:
            return self._encode_by_piece(text)
        ids = super().encode_ordinary(text)
        if self._lacking and max(ids, default=0) > self.max_token_value:
            return self._encode_by_piece(text)
        return ids

    def _pieces(self, text):
        return regex.finditer(self._pat_str, _well_formed(text))

    def _encode_by_piece(self, text):
        pieces = (match.group().encode().translate(None, self._lacking) for match in self._pieces(text))
        return [token for piece in pieces if piece for token in self._encode_single_piece(piece)]


class PackageEncoding:
    """The methods of tiktoken.Encoding that this project uses, over the package that a tokenizer was made for.

    encode with allowed_special="all" takes the text of special tokens as these tokens, and otherwise as plain text.
    decode is the package's own, which may take a space off the start of a text; `decode_single_token_bytes` gives each
    token's bytes in mid-text, and raises KeyError for an id that is no token's. special_tokens: {text: id}.
    """

    def __init__(self, name, encode, encode_plain, decode, token_bytes, special, last, identity, prefix=()):
        self.name, self._encode, self._encode_plain, self.decode = name, encode, encode_plain, decode
        self.decode_single_token_bytes = token_bytes
        self.special_tokens = self._special_tokens = special
        self.max_token_value, self.identity, self.prefix = last, identity, list(prefix)

    @property
    def n_vocab(self):
        return self.max_token_value + 1

    def encode(self, text, *, allowed_special=frozenset(), disallowed_special=()):
        return (self._encode if allowed_special == "all" else self._encode_plain)(_well_formed(text))

    def encode_ordinary(self, text):
        return self._encode_plain(_well_formed(text))

    def encode_ordinary_batch(self, texts, *, num_threads=8):
        with ThreadPoolExecutor(num_threads) as pool:
            return list(pool.map(self.encode_ordinary, texts))


def _well_formed(text):
    """The text with lone surrogates, which no UTF-8 can hold, as U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _normalize(text, apart=None):
    parts = apart.split(text) if apart else [text]
    return "".join(unicodedata.normalize("NFC", part) for part in parts)


def _cutter(special):
    """Text -> [plain, special, plain, special, ..., plain]: where several begin, the longest, as the packages do."""
    if not special:
        return lambda text: [text]
    return re.compile("(" + "|".join(re.escape(text) for text in sorted(special, key=len, reverse=True)) + ")").split


def encode_prompt(encoding, text):
    """The ids of a prompt: what the tokenizer puts before a text (`encoding.prefix`, a BOS token or nothing), then the
    text's, in which the text of special tokens is these tokens. What a tokenizer puts behind a text is left out, since
    a prompt is to be continued. Else equal to transformers' `encode(text)`."""
    return [*encoding.prefix, *encoding.encode(text, allowed_special="all")]


def tokenizer_hash(encoding):
    """16 hex digits which two encodings share when they give the same ids: vocabulary, pattern and special tokens."""
    if isinstance(encoding, PackageEncoding):
        whole = (encoding.identity, sorted(encoding.special_tokens.items()))
    else:
        whole = (sorted(encoding._mergeable_ranks.items()), encoding._pat_str, sorted(encoding._special_tokens.items()))
        whole += (encoding.normal,) if getattr(encoding, "normal", "") else ()
    return hashlib.sha256(repr(whole).encode()).hexdigest()[:16]


def end_of_text(encoding):
    """The id that separates documents: the first of SEPARATORS that the encoding has. Raises InputError if none."""
    for text in SEPARATORS:
        if text in encoding._special_tokens:
            return encoding._special_tokens[text]
    raise InputError(f"expected a tokenizer with one of {' '.join(SEPARATORS)}, but it has none; add one to its file")


class TextStream:
    """Text from token ids as they come: never half a character, and in sum what decoding all of them at once gives.

    One difference: where decoding takes a space off the start of a text, as Llama 2's does, the stream does not: it
    continues a text in mid-line.
    """

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
# A folder's files


def load_encoding(path):
    """The tokenizer of a Hugging Face folder, or of one of its files: an `Encoding` (a tiktoken.Encoding) or, where
    tiktoken would not be exact, a `PackageEncoding` with the same methods.

    Read is the first of tokenizer.json, vocab.json with merges.txt, *.tiktoken, tokenizer.model. Ids equal the file's.
    Added tokens, special or not, are special tokens here: `encode_ordinary` takes their text as plain text,
    `encode(text, allowed_special="all")` takes it as the token. Nothing is put before or after the text: `prefix` holds
    what belongs before a prompt. Raises InputError for missing, broken or unknown files, and for a missing package.
    """
    file = _tokenizer_file(Path(path))
    read = {"vocab.json": _read_vocab, ".tiktoken": _read_tiktoken, ".model": _read_model}
    read = read.get(file.name) or read.get(file.suffix) or _read_tokenizer
    try:
        return read(file)
    except InputError:
        raise
    except OSError as error:
        name = error.filename or file
        raise InputError(f"{name}: expected a {Path(name).name}, but: {error.strerror}; check the path") from error
    except (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(f"{file}: expected a {file.name}, but misshapen: {what}; fetch it again") from error


def _tokenizer_file(path):
    if not path.is_dir() or (path / "tokenizer.json").exists():
        return path if not path.is_dir() else path / "tokenizer.json"
    pair = [path / "vocab.json"] if (path / "merges.txt").exists() else []
    known = [path / f"{name}.tiktoken" for name in TIKTOKEN_FILES]
    files = [*pair, *known, *sorted(path.glob("*.tiktoken")), path / "tokenizer.model"]
    return next((file for file in files if file.exists()), path / "tokenizer.json")


def optional_json(file):
    """The object in a json file, {} where there is none."""
    return read_json(file) if file.exists() else {}


def read_text(file):
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: expected a text in UTF-8, but: {error}; fetch it again") from error


def _refuse(file, what):
    raise InputError(f"{file}: expected a tokenizer that can be read exactly, but it has {what}; "
                     "fetch the model's tokenizer.json again, or take another model")


def _package(file, name, reason):
    """An optional package, which `reason` needs."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise InputError(f"{file}: expected the package {name}, which {reason} needs, but it is missing; "
                         f"pip install {name}") from None


def _last_id(file, ranks, special):
    """The highest id, once it is sure that every id is a number and stands for one token."""
    tokens = {}
    for token, index in [*ranks.items(), *((text.encode(), index) for text, index in special.items())]:
        if type(index) is not int or not 0 <= index < 2**31 or tokens.setdefault(index, token) != token:
            _refuse(file, f"the id {index!r} for the token {token!r}, which is no id or another token's")
    return max(tokens)


# ---------------------------------------------------------------------------------------------------------------------
# tokenizer.json


def _read_tokenizer(file):
    try:
        spec = json.loads(file.read_bytes())
    except ValueError as error:
        raise InputError(f"{file}: expected JSON, but: {error}; fetch the file again") from error
    return _from_spec(file, spec, _prefix(file, spec.get("post_processor")))


def _prefix(file, processor):
    """The ids that a post_processor puts before a text."""
    kind = processor["type"] if processor else "ByteLevel"
    if kind == "Sequence":
        return [index for step in reversed(processor["processors"]) for index in _prefix(file, step)]
    if kind in ("BertProcessing", "RobertaProcessing"):
        return [processor["cls"][1]]
    if kind == "ByteLevel":
        return []
    if kind != "TemplateProcessing":
        _refuse(file, f"the post_processor {kind}")
    names = [item["SpecialToken"]["id"] for item in itertools.takewhile(lambda i: "Sequence" not in i, processor["single"])]
    return [index for name in names for index in processor["special_tokens"][name]["ids"]]


def _from_spec(file, spec, prefix):
    """A tokenizer.json's content -> Encoding, or PackageEncoding where tiktoken would not be exact."""
    try:
        encoding = _through_tiktoken(file, spec)
    except Inexact as reason:
        encoding = _through_tokenizers(file, spec, reason)
    encoding.prefix = prefix
    if not all(type(index) is int and 0 <= index <= encoding.max_token_value for index in prefix):
        _refuse(file, f"the ids {prefix} before a text, which are no tokens")
    return encoding


def _through_tiktoken(file, spec):
    model, normalizer = spec["model"], spec.get("normalizer")
    kind = model.get("type", "BPE" if "merges" in model else "nameless")
    if kind != "BPE":
        raise Inexact(f"a {kind} model")
    for option in ("byte_fallback", "dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise Inexact(f"a BPE model with {option}")
    if normalizer and normalizer["type"] != "NFC":
        raise Inexact(f"the normalizer {normalizer['type']}")
    pattern = _pattern(spec["pre_tokenizer"])
    added = [token for token in spec.get("added_tokens") or [] if token["content"]]
    _check_added(added, normalizer)
    special = {token["content"]: token["id"] for token in added}
    ranks = _ranks(model, special)
    if model.get("unk_token") and sum(len(token) == 1 for token in ranks) < 256:
        raise Inexact("an unk_token for bytes that its vocabulary lacks")
    try:
        return Encoding(file, pattern, ranks, special, "NFC" if normalizer else "")
    except InputError:
        raise
    except ValueError as error:  # tiktoken's word on the pattern
        raise Inexact(f"a pattern that tiktoken refuses ({str(error).splitlines()[0]})") from None


def _check_added(added, normalizer):
    """Added tokens that one cut through the raw text would not find as the tokenizers package does."""
    for flag in ("single_word", "lstrip", "rstrip"):
        if any(token.get(flag) for token in added):
            raise Inexact(f"an added token with {flag}")
    normalized = {bool(token.get("normalized", not token.get("special"))) for token in added}
    if len(normalized) > 1 or (normalizer and True in normalized):
        raise Inexact("added tokens that are looked for after others, in normalized text")


def _pattern(pre_tokenizer):
    """The regular expression that cuts text into the pieces which BPE works within."""
    if not pre_tokenizer:
        raise Inexact("no pre_tokenizer")
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    kinds = "+".join(step["type"] for step in steps)
    if kinds not in ("ByteLevel", "Split+ByteLevel", "Digits+ByteLevel"):
        raise Inexact(f"the pre_tokenizer {kinds}")
    first, byte_level = steps[0], steps[-1]
    use_regex = byte_level.get("use_regex", True)
    if byte_level.get("add_prefix_space", True) or use_regex == (kinds == "Split+ByteLevel"):
        raise Inexact(f"the pre_tokenizer {kinds} with add_prefix_space or with use_regex={use_regex}")
    if kinds == "ByteLevel":
        return GPT2_PATTERN
    if kinds == "Digits+ByteLevel":
        return DIGITS_PATTERN % ("" if first.get("individual_digits") else "+")
    expression, behavior = first["pattern"].get("Regex"), (first["behavior"], first.get("invert", False))
    if expression is None or OTHER_SYNTAX.search(expression) or behavior not in (("Isolated", False), ("Removed", True)):
        raise Inexact(f"the pre_tokenizer Split by {first['pattern']}, {first['behavior']}")
    # tiktoken drops what no match covers. "Isolated" keeps each such stretch as one piece, so it needs a match too.
    return f"(?:{expression})|(?:(?!{expression})(?s:.))+" if behavior[0] == "Isolated" else expression


def _byte_symbols():
    """GPT-2's printable stand-ins for bytes (openai/gpt-2, encoder.py), as a table for str.translate.

    It turns a token into characters that latin-1 encodes to the token's bytes, and to none if it is no byte string.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return dict.fromkeys(others, "\uffff") | {256 + i: byte for i, byte in enumerate(others)}


def _pairs(model):
    """The merges of a BPE model as pairs, in either spelling."""
    return [tuple(entry.split(" ") if isinstance(entry, str) else entry) for entry in model["merges"]]


def _ranks(model, special):
    """{token bytes: id} of the ordinary tokens, once it is sure that they merge as the file's merges say."""
    table = _byte_symbols()
    pairs = _pairs(model)
    # An added token may also be an ordinary one: when merges lead to it.
    ordinary = {left + right for left, right in pairs}
    try:
        ranks = {
            token.translate(table).encode("latin-1"): index
            for token, index in model["vocab"].items()
            if token not in special or token in ordinary or len(token) == 1
        }
    except UnicodeEncodeError as error:
        raise Inexact(f"a token that is no string of bytes ({error})") from None
    merges = {}
    for left, right in pairs:
        pair = left.translate(table).encode("latin-1"), right.translate(table).encode("latin-1")
        merges.setdefault(pair, len(merges))
    _check_merges(ranks, merges, model.get("ignore_merges", False))
    return ranks


def _check_merges(ranks, merges, ignore_merges):
    """Raises Inexact for a vocabulary on which tiktoken would part from the merges.

    tiktoken joins whichever two neighbours give the lowest id; the merges say which pairs may join, and when. Inside
    the bytes of one token nothing outside matters until they are joined, so both agree on all texts if they agree on
    each token's own bytes, and if ids and the merges that complete their tokens are in the same order.
    """
    if not {left + right for left, right in merges} <= ranks.keys():
        raise Inexact("merges that lead to no token")
    previous = -1
    for token in sorted(ranks, key=ranks.get):
        parts = _last_parts(token, merges)
        # Stuck in three or more parts: no text leads there. With ignore_merges both take it when it is a whole piece.
        if len(parts) == 1 or (len(parts) > 2 and ignore_merges):
            continue
        rank = merges.get(tuple(parts), -1)
        if rank <= previous:
            raise Inexact(f"ids that do not follow the order of its merges (token {ranks[token]}, {token!r})")
        previous = rank


def _last_parts(token, merges):
    """What the merges make of a token's bytes just before the last merge: 2 parts, or more where they get stuck."""
    parts, none = [token[i : i + 1] for i in range(len(token))], len(merges)
    order = [merges.get(pair, none) for pair in zip(parts, parts[1:])]
    while len(parts) > 2 and (first := min(order)) < none:
        i = order.index(first)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
        order[i : i + 2] = [merges.get((parts[i], parts[i + 1]), none)] if i + 1 < len(parts) else []
        if i:
            order[i - 1] = merges.get((parts[i - 1], parts[i]), none)
    return parts


# ---------------------------------------------------------------------------------------------------------------------
# tokenizer.json through the tokenizers package


def _through_tokenizers(file, spec, reason):
    """The package's own ids. Where bytes are no UTF-8, decode differs from TextStream in how many U+FFFD it gives."""
    package = _package(file, "tokenizers", f"a tokenizer with {reason}")
    if spec["model"].get("dropout"):
        _refuse(file, "a BPE model with dropout, whose ids are random")
    token_bytes = _token_bytes(file, spec.get("decoder"))
    bare = {"version": "1.0"} | spec | {"post_processor": None, "truncation": None, "padding": None}
    special = {token["content"]: token["id"] for token in spec.get("added_tokens") or [] if token["content"]}
    try:
        whole = package.Tokenizer.from_str(json.dumps(bare))
    except Exception as error:  # the package raises nothing narrower
        raise InputError(f"{file}: expected a tokenizer that the package tokenizers reads, but: "
                         f"{' '.join(str(error).split())}; fetch it again") from error
    vocab = whole.get_vocab(with_added_tokens=True)
    tokens = {index: text for text, index in vocab.items()}
    for text, index in special.items():  # which the package numbers itself
        if vocab.get(text) != index:
            _refuse(file, f"the id {index!r} for the added token {text!r}, where it should be {vocab.get(text)}")
    if len(tokens) < len(vocab):
        _refuse(file, "an id that stands for two tokens")
    plain = functools.cache(lambda: package.Tokenizer.from_str(json.dumps(_without_added(bare, special))))

    def encode(tool, text):
        try:
            return tool.encode(text, add_special_tokens=False).ids
        except Exception as error:  # a character that the model has no token for, nor an unknown one
            raise InputError(f"{file}: expected a text in its vocabulary, but: {error}; change the text") from error

    parts = ("normalizer", "pre_tokenizer", "model", "added_tokens")
    return PackageEncoding(
        file.parent.name,
        encode=lambda text: encode(whole, text),
        encode_plain=lambda text: encode(plain(), text),
        decode=lambda ids: whole.decode(list(ids), skip_special_tokens=False),
        token_bytes=lambda index: token_bytes(tokens[index]),
        special=special,
        last=max(tokens),
        identity=json.dumps([spec.get(part) for part in parts], sort_keys=True),
    )


def _without_added(spec, special):
    """The same without its added tokens: their text is plain text, which only merges can make one of them again."""
    model = spec["model"]
    reached = {part for pair in _pairs(model) for part in (*pair, "".join(pair))} if "merges" in model else set()
    hide = lambda token: f"\0\uffff{token}" if token in special and token not in reached else token
    if isinstance(model["vocab"], dict):
        vocab = {hide(token): index for token, index in model["vocab"].items()}
    else:
        vocab = [[hide(token), score] for token, score in model["vocab"]]
    unknown = {"unk_token": hide(model["unk_token"])} if model.get("unk_token") else {}
    return spec | {"added_tokens": [], "model": model | {"vocab": vocab} | unknown}


def _token_bytes(file, decoder):
    """Token -> its bytes in mid-text, as the decoder gives them."""
    steps = [] if not decoder else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = "+".join(step["type"] for step in steps)
    if kinds == "ByteLevel":
        table = _byte_symbols()

        def symbols(token):
            try:
                return token.translate(table).encode("latin-1")
            except UnicodeEncodeError:  # an added token: text, not stand-ins
                return token.encode()

        return symbols
    if kinds == "Metaspace":
        return lambda token: token.replace(steps[0]["replacement"], " ").encode()
    pieces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if kinds.removesuffix("+Strip") != "Replace+ByteFallback+Fuse" or steps[0] != pieces or steps[3:] not in ([], [strip]):
        _refuse(file, f"the decoder {kinds or 'null'}{' with other settings' if kinds.startswith('Replace+') else ''}")

    def piece_bytes(token):
        byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)
        return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()

    return piece_bytes


# ---------------------------------------------------------------------------------------------------------------------
# Folders without a tokenizer.json


def _tokenizer_class(folder, config, default):
    """tokenizer_config.json's tokenizer_class without the Fast at its end; where it has none, Qwen's by config.json."""
    if config.get("tokenizer_class"):
        return config["tokenizer_class"].removesuffix("Fast")
    return "Qwen2Tokenizer" if str(optional_json(folder / "config.json").get("model_type")).startswith("qwen") else default


def _added_tokens(folder, config, index_of, defaults=()):
    """The tokens that stand apart, in a tokenizer.json's form, from tokenizer_config.json, added_tokens.json and (where
    the first has no added_tokens_decoder) special_tokens_map.json. index_of(text): the vocabulary's id, or None."""
    decoder = config.get("added_tokens_decoder") or {}
    found = [(int(index), token) for index, token in decoder.items()]
    found += [(index, text) for text, index in optional_json(folder / "added_tokens.json").items()]
    named = ({} if decoder else optional_json(folder / "special_tokens_map.json")) | config
    for key, value in named.items():
        if key.endswith("_token") or key in ("additional_special_tokens", "extra_special_tokens"):
            found += [(None, token) for token in (value if isinstance(value, list) else [value])]
    found += [(None, text) for text in defaults if index_of(text) is not None]
    tokens = {}
    for index, token in found:
        text, flags = token_text(token), token if isinstance(token, dict) else {}
        if not text:
            continue
        known = tokens[text]["id"] if text in tokens else index_of(text)
        index = known if index is None else index
        if type(index) is not int or index < 0 or known not in (None, index):
            _refuse(folder / "tokenizer_config.json", f"the token {text!r} with the id {index}, in the vocabulary {known}")
        strips = {flag: bool(flags.get(flag)) for flag in ("single_word", "lstrip", "rstrip")}
        tokens.setdefault(text, {"id": index, "content": text, **strips, "normalized": False, "special": True})
    ids = [token["id"] for token in tokens.values()]
    if len(set(ids)) < len(ids):
        _refuse(folder / "tokenizer_config.json", f"one id for two tokens among {ids}")
    return list(tokens.values())


def _bos(folder, config, special, default, text=None):
    """The ids before a prompt: bos_token's (`text` where none is named), if add_bos_token (`default`) says so."""
    if not config.get("add_bos_token", default):
        return []
    text = token_text(config.get("bos_token") or optional_json(folder / "special_tokens_map.json").get("bos_token") or text)
    if text not in special:
        _refuse(folder / "tokenizer_config.json", f"add_bos_token, but a bos_token ({text!r}) without an id")
    return [special[text]]


def token_text(token):
    """A token's text, or None: tokenizer_config.json has texts, dicts with "content", nulls and switches."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read_vocab(file):
    """GPT-2's vocab.json with merges.txt, through the tokenizer.json that they stand for."""
    folder, vocab, config = file.parent, read_json(file), optional_json(file.parent / "tokenizer_config.json")
    kind = _tokenizer_class(folder, config, "GPT2Tokenizer")
    if kind not in ("GPT2Tokenizer", "Qwen2Tokenizer"):
        _refuse(file, f"the tokenizer_class {kind}, and no tokenizer.json (GPT2Tokenizer and Qwen2Tokenizer need none)")
    byte_level = {"type": "ByteLevel", "add_prefix_space": bool(config.get("add_prefix_space")), "trim_offsets": True}
    split = {"type": "Split", "pattern": {"Regex": QWEN_PATTERN}, "behavior": "Isolated", "invert": False}
    qwen = {"type": "Sequence", "pretokenizers": [split, byte_level | {"use_regex": False}]}
    lines = read_text(folder / "merges.txt").split("\n")
    merges = [line for line in lines[lines[0].startswith("#version"):] if line]
    added = _added_tokens(folder, config, vocab.get, ["<|endoftext|>"])
    spec = {
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if kind == "Qwen2Tokenizer" else None,
        "pre_tokenizer": qwen if kind == "Qwen2Tokenizer" else byte_level | {"use_regex": True},
        "decoder": byte_level | {"use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    return _from_spec(file, spec, _bos(folder, config, {token["content"]: token["id"] for token in added}, False))


def _read_tiktoken(file):
    """tiktoken's own file, which holds no pattern: its name says which."""
    if file.stem not in TIKTOKEN_FILES:
        _refuse(file, f"a name that says nothing of its pattern (known: {' '.join(TIKTOKEN_FILES)})")
    lines, pattern, special, normal = TIKTOKEN_FILES[file.stem]
    return Encoding(file, pattern, _read_ranks(file, file.read_bytes(), lines), special, normal)


def _read_ranks(file, content, lines):
    ranks = {}
    for line in filter(None, content.split(b"\n")):
        token, rank = line.split()
        ranks[base64.b64decode(token, validate=True)] = int(rank)
    if len(ranks) != lines:
        _refuse(file, f"{len(ranks)} tokens where {lines} are known, so that it is cut short or another file")
    return ranks


def _read_model(file):
    """A tokenizer.model: sentencepiece's, or Llama 3's, which is a tiktoken file."""
    content, config = file.read_bytes(), optional_json(file.parent / "tokenizer_config.json")
    if re.match(rb"[A-Za-z0-9+/]+=* \d+\n", content):
        return _read_llama3(file, content, config)
    return _through_sentencepiece(file, content, config)


def _read_llama3(file, content, config):
    """Llama 3 and 3.1 share the file but not the special tokens, so that tokenizer_config.json must name these."""
    special = {token["content"]: token["id"] for token in _added_tokens(file.parent, config, lambda text: None)}
    if not {"<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"} <= special.keys():
        _refuse(file, "base64 lines, and no tokenizer_config.json with Llama 3's special tokens beside it")
    ranks = _read_ranks(file, content, LLAMA3_LINES)
    prefix = _bos(file.parent, config, special, True, "<|begin_of_text|>")
    return Encoding(file, LLAMA3_PATTERN, ranks, special, prefix=prefix)


def _through_sentencepiece(file, content, config):
    """Added tokens are cut out of the text first. What follows one starts with the model's dummy prefix, a space, unless
    tokenizer_config.json has legacy=false; decode takes off the same, and shows an unknown character as sentencepiece
    does, " ⁇ ". A bos_token is a prefix by default, except Baichuan's."""
    kind = _tokenizer_class(file.parent, config, "LlamaTokenizer")
    if kind not in ("LlamaTokenizer", "BaichuanTokenizer"):
        _refuse(file, f"the tokenizer_class {kind}, and no tokenizer.json (LlamaTokenizer and BaichuanTokenizer need none)")
    if config.get("add_prefix_space") is False or config.get("sp_model_kwargs"):
        _refuse(file, "add_prefix_space=false or sp_model_kwargs in its tokenizer_config.json")
    processor = _package(file, "sentencepiece", "a tokenizer.model").SentencePieceProcessor
    try:
        first = processor(model_proto=content or b"\0")
        rest = first if config.get("legacy", True) else processor(model_proto=content + NO_DUMMY_PREFIX)
    except RuntimeError as error:
        what = str(error).splitlines()[0]
        raise InputError(f"{file}: expected a sentencepiece model, but: {what}; fetch it again") from error
    size = first.get_piece_size()

    def index_of(text):
        index = first.piece_to_id(text)
        return index if first.id_to_piece(index) == text else None

    added = _added_tokens(file.parent, config, index_of, ["<s>", "</s>", "<unk>"])
    if any(token[flag] for token in added for flag in ("single_word", "lstrip", "rstrip")):
        _refuse(file, "an added token with single_word, lstrip or rstrip")
    special = {token["content"]: token["id"] for token in added}
    for text, index in special.items():
        if index < size and first.id_to_piece(index) != text:
            _refuse(file, f"the id {index} for {text!r}, which is {first.id_to_piece(index)!r}")
    cut, last = _cutter(special), max([size - 1, *special.values()])
    names = {index: text for text, index in special.items() if index != first.unk_id()}

    def encode(text):
        ids = ([special[part]] if i % 2 else (rest if i else first).encode(part) for i, part in enumerate(cut(text)))
        return list(itertools.chain.from_iterable(ids))

    def decode(ids):
        text = ""
        for i, (is_special, run) in enumerate(itertools.groupby(ids, names.__contains__)):
            text += "".join(map(names.get, run)) if is_special else (rest if i else first).decode(list(run))
        return text

    def token_bytes(index):
        if index in names:
            return names[index].encode()
        if not 0 <= index < size:
            raise KeyError(index)
        if first.is_byte(index):
            return bytes.fromhex(first.id_to_piece(index)[3:5])
        shown = first.is_control(index) or first.is_unknown(index)
        return (first.decode([index]) if shown else first.id_to_piece(index).replace("▁", " ")).encode()

    return PackageEncoding(file.parent.name, encode, first.encode, decode, token_bytes, special, last,
                           identity=(hashlib.sha256(content).hexdigest(), rest is first),
                           prefix=_bos(file.parent, config, special, kind != "BaichuanTokenizer", "<s>"))
