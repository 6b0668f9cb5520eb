"""A checkpoint folder's tokenizer, with exactly the ids of the folder's own files.

The tokenizers package reads every tokenizer.json. tiktoken, which is faster, does the encoding where that is plainly a
byte-level BPE with one of the patterns below. sentencepiece serves folders that have a tokenizer.model alone.
"""

import functools
import hashlib
import itertools
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tiktoken
from tokenizers import Tokenizer, normalizers

from model import InputError, read_json

# The pattern that ByteLevel itself splits by: GPT-2's.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Those of a Split before it: demo/'s, Llama 3's (English contractions besides), Qwen's (digits one by one).
DEMO_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{DEMO_PATTERN}"
QWEN_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
SPLITS = DEMO_PATTERN, LLAMA3_PATTERN, QWEN_PATTERN
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<|im_end|>", "<|eot_id|>", "<eos>")
LONG = 200_000  # characters; tiktoken crashes at a single match of about 1,000,000
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"  # normalizer_spec { add_dummy_prefix: false }, to append to a ModelProto


# ---------------------------------------------------------------------------------------------------------------------
# What load_encoding gives

class Encoding(tiktoken.Encoding):
    """tiktoken's encoding of a plain byte-level BPE, with these additions.

    special_tokens: {text: id} of all added tokens. prefix: the ids before a prompt. always: the added tokens that are
    not special; they are found in every text, as the tokenizers package finds them. nfc: texts are normalised first.
    exact: the package's tokenizer, which encodes texts that are too long for tiktoken.
    """

    def __init__(self, name, pattern, ranks, special, always, exact, nfc):
        super().__init__(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        self.special_tokens, self.prefix, self.exact, self.nfc = special, [], exact, nfc
        self._split_all, self._split_always = _splitter(special), _splitter(always)
        self._ids = {*ranks.values(), *special.values()}

    def encode(self, text, *, allowed_special=(), disallowed_special=()):
        """The ids of a text (str). With allowed_special="all" the text of special tokens becomes these tokens."""
        parts = (self._split_all if allowed_special == "all" else self._split_always)(text)
        ids = ([self.special_tokens[part]] if i % 2 else self._encode_plain(part) for i, part in enumerate(parts))
        return list(itertools.chain.from_iterable(ids))

    def encode_ordinary(self, text):
        return self.encode(text)

    def _encode_plain(self, text):
        text = normalizers.NFC().normalize_str(_well_formed(text)) if self.nfc else text
        if len(text) > LONG:
            return self.exact.encode(_well_formed(text), add_special_tokens=False).ids
        return super().encode_ordinary(text)

    def decode(self, ids, errors="replace"):
        """The text of ids. An id without a token gives nothing."""
        return super().decode([i for i in ids if i in self._ids], errors)


class PackageEncoding:
    """The same methods and attributes over another package.

    encode, encode_plain: str -> ids, with and without special tokens. decode: ids -> str. identity: what tokenizer_hash
    hashes. Decoding may take a space off the start of a text, as the folder's own tokenizer does.
    """

    def __init__(self, name, encode, encode_plain, decode, special, last, identity):
        self.name, self._encode, self._encode_plain, self._decode = name, encode, encode_plain, decode
        self.special_tokens = self._special_tokens = special
        self.max_token_value, self.identity, self.prefix = last, identity, []

    @property
    def n_vocab(self):
        return self.max_token_value + 1

    def encode(self, text, *, allowed_special=(), disallowed_special=()):
        return (self._encode if allowed_special == "all" else self._encode_plain)(_well_formed(text))

    def encode_ordinary(self, text):
        return self._encode_plain(_well_formed(text))

    def encode_ordinary_batch(self, texts, *, num_threads=8):
        with ThreadPoolExecutor(num_threads) as pool:
            return list(pool.map(self.encode_ordinary, texts))

    def decode(self, ids):
        return self._decode([i for i in ids if 0 <= i < self.n_vocab])


def _well_formed(text):
    """The text with U+FFFD for lone surrogates, which UTF-8 cannot hold."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _splitter(tokens):
    """A function: text -> [plain, token, plain, ..., plain]. Where several tokens begin, it takes the longest."""
    if not tokens:
        return lambda text: [text]
    return re.compile("(" + "|".join(re.escape(text) for text in sorted(tokens, key=len, reverse=True)) + ")").split


def encode_prompt(encoding, text):
    """The ids of a prompt: `encoding.prefix`, such as a BOS token, then the text's, special tokens included.

    Equal to transformers' encode(text), except that nothing is put behind the text: a prompt is to be continued."""
    return [*encoding.prefix, *encoding.encode(text, allowed_special="all")]


def tokenizer_hash(encoding):
    """16 hex digits of a tokenizer: its vocabulary, pattern and special tokens."""
    if isinstance(encoding, PackageEncoding):
        content = (encoding.identity, sorted(encoding.special_tokens.items()))
    else:
        vocabulary, special = sorted(encoding._mergeable_ranks.items()), sorted(encoding._special_tokens.items())
        content = (vocabulary, encoding._pat_str, special) + ("NFC",) * getattr(encoding, "nfc", False)
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def end_of_text(encoding):
    """The id that separates documents: the first of SEPARATORS that the encoding has. Raises InputError for none."""
    for text in SEPARATORS:
        if text in encoding._special_tokens:
            return encoding._special_tokens[text]
    raise InputError(f"expected a tokenizer with one of {' '.join(SEPARATORS)}, but it has none; add one to its file")


# ---------------------------------------------------------------------------------------------------------------------
# A folder's files

def load_encoding(path):
    """The tokenizer of a Hugging Face folder, or of one of its files: an `Encoding` or a `PackageEncoding`.

    Reads the first of tokenizer.json, vocab.json with merges.txt, tokenizer.model. Raises InputError for files that are
    missing, broken or unknown, and for a missing package.
    """
    file = _tokenizer_file(Path(path))
    read = {"vocab.json": _read_vocab, "tokenizer.model": _read_sentencepiece}.get(file.name, _read_tokenizer)
    try:
        return read(file)
    except OSError as error:
        name = error.filename or file
        raise InputError(f"{name}: expected a {Path(name).name}, but: {error.strerror}; check the path") from error
    except (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(f"{file}: expected a {file.name}, but misshapen: {reason}; fetch it again") from error


def _tokenizer_file(path):
    if path.is_dir():
        names = ["tokenizer.json", *["vocab.json"] * (path / "merges.txt").exists(), "tokenizer.model"]
        path = next((path / name for name in names if (path / name).exists()), path / "tokenizer.json")
    if path.suffix == ".tiktoken" or not path.exists() and (tiktoken_files := sorted(path.parent.glob("*.tiktoken"))):
        found = path if path.suffix == ".tiktoken" else tiktoken_files[0]
        raise InputError(f"{found}: expected a tokenizer.json, but this is a .tiktoken file, which is not supported; "
                         "fetch the model's tokenizer.json")
    return path


def optional_json(file):
    """The object in a json file, {} if the file does not exist."""
    return read_json(file) if file.exists() else {}


def read_text(file):
    """The text of a file. Raises InputError unless it is UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: expected a text in UTF-8, but: {error}; fetch it again") from error


def _refuse(file, what):
    raise InputError(f"{file}: expected a tokenizer that can be read exactly, but it has {what}; "
                     "fetch the model's tokenizer.json again, or take another model")


# ---------------------------------------------------------------------------------------------------------------------
# tokenizer.json

def _read_tokenizer(file):
    return _from_spec(file, read_json(file))


def _from_spec(file, spec):
    """The content of a tokenizer.json -> Encoding or PackageEncoding."""
    if spec["model"].get("dropout"):
        _refuse(file, "a BPE model with dropout, whose ids are random")
    added = [token for token in spec.get("added_tokens") or [] if token["content"]]
    spec = {"version": "1.0"} | spec | {"truncation": None, "padding": None}
    spec["added_tokens"] = [_flags(token) | token for token in added]
    package = _package_tokenizer(file, spec)
    encoding = _through_tiktoken(file, spec, package) or _through_tokenizers(file, spec, package)
    encoding.prefix = _call_package(file, lambda: _prefix(package))
    if max(encoding.prefix, default=0) > encoding.max_token_value:
        _refuse(file, f"the ids {encoding.prefix} before a text, which are no tokens")
    return encoding


def _prefix(package):
    """The ids that the post_processor puts before a text."""
    encoded = package.encode("a")
    return encoded.ids[:(encoded.special_tokens_mask + [0]).index(0)]


def _package_tokenizer(file, spec):
    return _call_package(file, lambda: Tokenizer.from_str(json.dumps(spec)))


def _call_package(file, call):
    """call(), with the package's errors as InputErrors. It raises plain Exceptions; its panics are BaseExceptions."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{file}: expected a tokenizer that the package tokenizers reads, but: {reason}; fetch it "
                         "again") from error


def _flags(token):
    """The flags that a file may leave out of an added token."""
    return dict(single_word=False, lstrip=False, rstrip=False, normalized=not token.get("special"), special=False)


def _through_tokenizers(file, spec, package):
    """PackageEncoding over the tokenizers package."""
    special = {token["content"]: token["id"] for token in spec["added_tokens"]}
    vocab = package.get_vocab(with_added_tokens=True)
    for text, index in special.items():  # the package numbers added tokens itself
        if vocab.get(text) != index:
            _refuse(file, f"the id {index!r} for the added token {text!r}, where it should be {vocab.get(text)}")
    if len(set(vocab.values())) < len(vocab):
        _refuse(file, "an id that stands for two tokens")

    @functools.cache
    def plain():
        tokenizer = _package_tokenizer(file, spec)
        tokenizer.encode_special_tokens = True  # as any other text
        return tokenizer

    def encode(tokenizer, text):
        try:
            return tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # a model without an unknown token met an unknown character
            raise InputError(f"{file}: expected a text in its vocabulary, but: {error}; change the text") from error

    parts = ("normalizer", "pre_tokenizer", "model", "added_tokens")
    return PackageEncoding(
        file.parent.name, encode=lambda text: encode(package, text), encode_plain=lambda text: encode(plain(), text),
        decode=lambda ids: package.decode(ids, skip_special_tokens=False), special=special, last=max(vocab.values()),
        identity=json.dumps([spec.get(part) for part in parts], sort_keys=True))


def _through_tiktoken(file, spec, package):
    """Encoding, or None unless the tokenizer is plainly a byte-level BPE for which tiktoken gives the same ids."""
    model, added, nfc = spec["model"], spec["added_tokens"], spec.get("normalizer") == {"type": "NFC"}
    pattern, special = _pattern(spec.get("pre_tokenizer")), {token["content"]: token["id"] for token in added}
    options = ("byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")
    if (pattern is None or model.get("type", "BPE") != "BPE" or any(model.get(option) for option in options)
            or (spec.get("normalizer") and not nfc) or (spec.get("decoder") or {}).get("type") != "ByteLevel"
            or not _plainly_added(added, nfc)):
        return None
    ranks = _ranks(model, special, package.model)
    ids = [*(ranks or {}).values(), *special.values()]
    if ranks is None or len(set(ids)) < len(ids) or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        return None
    always = [token["content"] for token in added if not token["special"]]
    package.encode_special_tokens = True  # as any other text
    return Encoding(file.parent.name, pattern, ranks, special, always, package, nfc)


def _split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level(use_regex):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _pattern(pre_tokenizer):
    """tiktoken's pattern for a pre_tokenizer, or None."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer]) if pre_tokenizer else [{}]
    splits, byte_level = steps[:-1], {"use_regex": True} | steps[-1] | {"trim_offsets": True}  # which changes no id
    if not splits and byte_level == _byte_level(True):
        return GPT2_PATTERN
    for pattern in SPLITS:
        if splits == [_split(pattern)] and byte_level == _byte_level(False):
            return f"(?:{pattern})|(?:(?!{pattern})(?s:.))+"  # the second half never matches; hashes include it
    return None


def _plainly_added(added, nfc):
    """Whether cutting added tokens out of the text finds them as the tokenizers package does."""
    normalized, always = {token["normalized"] for token in added}, [t["content"] for t in added if not t["special"]]
    nested = any(a != t["content"] and (a in t["content"] or t["content"] in a) for a in always for t in added)
    strips = any(token[flag] for token in added for flag in ("single_word", "lstrip", "rstrip"))
    return not strips and not nested and len(normalized) <= 1 and not (nfc and True in normalized)


def _ranks(model, special, bpe):
    """{bytes: id} of the ordinary tokens, or None if tiktoken would give other ids than the merges.

    tiktoken joins the two neighbours whose joint token has the lowest id. The merges do the same if the ids of the
    tokens they make rise, and if they make every token from its own bytes. With ignore_merges a piece that is a token
    is taken as it is, so the merges need not make it; but they must not stop at two parts: tiktoken joins these."""
    table, vocab, whole_pieces = _byte_symbols(), model["vocab"], bool(model.get("ignore_merges"))
    merged = ["".join(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
    ids = [vocab[token] for token in merged]
    ordinary = {token: index for token, index in vocab.items() if token not in special}
    bpe.ignore_merges = False
    counts = {len(bpe.tokenize(token)) for token in ordinary}
    bpe.ignore_merges = whole_pieces
    followed = ids == sorted(ids) and (counts <= {1} or whole_pieces and not counts & {0, 2})
    all_bytes = table.keys() <= ordinary.keys() and set("".join(ordinary)) <= table.keys()
    if not followed or not all_bytes or special.keys() & set(merged):
        return None
    return {bytes(map(table.get, token)): index for token, index in ordinary.items()}


def _byte_symbols():
    """{symbol: byte}: GPT-2's printable characters for bytes (openai/gpt-2, encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


# ---------------------------------------------------------------------------------------------------------------------
# Folders without a tokenizer.json

def _tokenizer_class(file, config, *known):
    """tokenizer_config.json's tokenizer_class, which must be one of `known`. Where it has none, Qwen's by config.json's
    model_type, else the first."""
    kind = config.get("tokenizer_class")
    if not kind:
        qwen = str(optional_json(file.parent / "config.json").get("model_type")).startswith("qwen")
        kind = "Qwen2Tokenizer" if qwen and "Qwen2Tokenizer" in known else known[0]
    if kind.removesuffix("Fast") not in known:
        _refuse(file, f"the tokenizer_class {kind}, and no tokenizer.json ({' and '.join(known)} need none)")
    return kind.removesuffix("Fast")


def _added_tokens(folder, config, index_of, defaults):
    """The added tokens in a tokenizer.json's form, from tokenizer_config.json, added_tokens.json and, if the first has
    no added_tokens_decoder, special_tokens_map.json. index_of(text): the vocabulary's id, or None."""
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
            _refuse(folder / "tokenizer_config.json", f"the token {text!r} with the id {index}, elsewhere {known}")
        strips = {flag: bool(flags.get(flag)) for flag in ("single_word", "lstrip", "rstrip")}
        tokens.setdefault(text, {"id": index, "content": text, **strips, "normalized": False, "special": True})
    ids = [token["id"] for token in tokens.values()]
    if len(set(ids)) < len(ids):
        _refuse(folder / "tokenizer_config.json", f"one id for two tokens among {ids}")
    return list(tokens.values())


def _bos(folder, config, special, default, text=None):
    """The prefix: the id of bos_token (`text` if none is named), if add_bos_token (else `default`) says so."""
    if not config.get("add_bos_token", default):
        return []
    named = config.get("bos_token") or optional_json(folder / "special_tokens_map.json").get("bos_token")
    text = token_text(named or text)
    if text not in special:
        _refuse(folder / "tokenizer_config.json", f"add_bos_token, but a bos_token ({text!r}) without an id")
    return [special[text]]


def token_text(token):
    """A token's text, or None: tokenizer_config.json has texts, dicts with "content", nulls and switches."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read_vocab(file):
    """vocab.json with merges.txt, GPT-2's or Qwen's, through the tokenizer.json that they stand for."""
    folder, vocab, config = file.parent, read_json(file), optional_json(file.parent / "tokenizer_config.json")
    qwen = _tokenizer_class(file, config, "GPT2Tokenizer", "Qwen2Tokenizer") == "Qwen2Tokenizer"
    byte_level = _byte_level(not qwen) | {"add_prefix_space": bool(config.get("add_prefix_space")) and not qwen}
    split = {"type": "Sequence", "pretokenizers": [_split(QWEN_PATTERN), byte_level]}
    lines = read_text(folder / "merges.txt").split("\n")
    encoding = _from_spec(file, {
        "added_tokens": _added_tokens(folder, config, vocab.get, ["<|endoftext|>"]),
        "normalizer": {"type": "NFC"} if qwen else None,
        "pre_tokenizer": split if qwen else byte_level,
        "decoder": _byte_level(True),
        "model": {"type": "BPE", "vocab": vocab, "merges": [x for x in lines[lines[0].startswith("#version"):] if x]},
    })
    encoding.prefix = _bos(folder, config, encoding.special_tokens, False)
    return encoding


def _read_sentencepiece(file):
    """tokenizer.model alone, Llama's or Baichuan's. By default Llama's bos_token is a prefix, and Baichuan's is not."""
    content, config = file.read_bytes(), optional_json(file.parent / "tokenizer_config.json")
    if re.match(rb"[A-Za-z0-9+/]+=* \d+\n", content):
        raise InputError(f"{file}: expected a sentencepiece model, but this is tiktoken's format, which is not "
                         "supported; fetch the model's tokenizer.json")
    kind = _tokenizer_class(file, config, "LlamaTokenizer", "BaichuanTokenizer")
    if config.get("add_prefix_space") is False or config.get("sp_model_kwargs"):
        _refuse(file, "add_prefix_space=false or sp_model_kwargs in its tokenizer_config.json")
    first = _sentencepiece(file, content)
    # what follows a special token starts with the model's dummy prefix, a space, unless legacy is false
    rest = first if config.get("legacy", True) else _sentencepiece(file, content + NO_DUMMY_PREFIX)
    special = _pieces_added(file, config, first)
    encode, decode = _piece_functions(special, first, rest)
    last = max([first.get_piece_size() - 1, *special.values()])
    encoding = PackageEncoding(file.parent.name, encode, first.encode, decode, special, last,
                               identity=(hashlib.sha256(content).hexdigest(), rest is first))
    encoding.prefix = _bos(file.parent, config, special, kind == "LlamaTokenizer", "<s>")
    return encoding


def _sentencepiece(file, content):
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        raise InputError(f"{file}: expected the package sentencepiece, which a tokenizer.model needs, but it is "
                         "missing; pip install sentencepiece") from None
    try:
        return SentencePieceProcessor(model_proto=content or b"\0")
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{file}: expected a sentencepiece model, but: {reason}; fetch it again") from error


def _pieces_added(file, config, model):
    """{text: id} of a tokenizer.model's special tokens and the folder's added ones."""
    def index_of(text):
        index = model.piece_to_id(text)
        return index if model.id_to_piece(index) == text else None

    added = _added_tokens(file.parent, config, index_of, ["<s>", "</s>", "<unk>"])
    for token in added:
        text, index = token["content"], token["id"]
        if token["single_word"] or token["lstrip"] or token["rstrip"]:
            _refuse(file, "an added token with single_word, lstrip or rstrip")
        if index < model.get_piece_size() and model.id_to_piece(index) != text:
            _refuse(file, f"the id {index} for {text!r}, which is {model.id_to_piece(index)!r}")
    return {token["content"]: token["id"] for token in added}


def _piece_functions(special, first, rest):
    """(encode, decode): special tokens are cut out; `first` takes the text before them, `rest` what follows them."""
    split = _splitter(special)
    names = {index: text for text, index in special.items() if index != first.unk_id()}
    known = {*range(first.get_piece_size()), *names}

    def encode(text):
        ids = ([special[part]] if i % 2 else (rest if i else first).encode(part) for i, part in enumerate(split(text)))
        return list(itertools.chain.from_iterable(ids))

    def decode(ids):
        runs = itertools.groupby(filter(known.__contains__, ids), names.__contains__)
        texts = ("".join(map(names.get, run)) if is_special else (rest if i else first).decode(list(run))
                 for i, (is_special, run) in enumerate(runs))
        return "".join(texts)

    return encode, decode
