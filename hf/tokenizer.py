"""A checkpoint folder's tokenizer, with exactly the ids of the folder's own files.

The tokenizers package reads every tokenizer.json. tiktoken, which is faster, encodes where that is
plainly a byte-level BPE with one of the patterns below. sentencepiece reads a tokenizer.model.
"""

import hashlib
import itertools
import json
import re
from functools import partial
from pathlib import Path

import tiktoken
from tokenizers import Tokenizer, normalizers

from model import InputError, read_json

# The pattern that ByteLevel itself splits by: GPT-2's.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Patterns of a Split before it: Llama 3's, with English contractions, and Qwen's, digit by digit.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
PIECES = WORDS + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Of training.base. Punctuation takes no line end, so a prompt that ends with a colon, as prompts of
# code do, is cut into tokens as the text before a line end is.
CODE_PATTERN = WORDS + r"| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{PIECES}"
QWEN_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<|im_end|>", "<|eot_id|>", "<eos>")
STRIPS = ("single_word", "lstrip", "rstrip")  # an added token's flags about the text around it
LONG = 200_000  # characters; tiktoken crashes at a single match of about 1,000,000
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
              "use_regex": True}  # a tokenizer.json's step that splits by GPT2_PATTERN
# normalizer_spec { add_dummy_prefix: false }, to append to a ModelProto
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


class Encoding:
    """A tokenizer, whichever package does the work.

    encode, encode_plain: str -> ids, with and without special tokens. decode: ids -> str; it may
    take a space off the start of a text, as the folder's own tokenizer does. special_tokens:
    {text: id} of all added tokens. ids: those of all tokens. prefix: the ids before a prompt.
    hash: 16 hex digits of `hashed`, what the ids depend on."""

    def __init__(self, encode, encode_plain, decode, special_tokens, ids, hashed):
        self._encode = encode
        self._encode_plain = encode_plain
        self._decode = decode
        self.special_tokens = special_tokens
        self.ids = set(ids)
        self.prefix = []
        self.max_token_value = max(self.ids)
        self.n_vocab = self.max_token_value + 1
        self.hash = hashlib.sha256(repr(hashed).encode()).hexdigest()[:16]

    def encode(self, text, *, allowed_special=()):
        """The ids of a text, in which special tokens are found with allowed_special="all"."""
        # U+FFFD for lone surrogates
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return (self._encode if allowed_special == "all" else self._encode_plain)(text)

    def decode(self, ids):
        """The text of ids. An id without a token gives nothing."""
        return self._decode([i for i in ids if i in self.ids])

    def stream(self, stop_texts=()):
        return TextStream(self, stop_texts)


def encode_prompt(encoding, text):
    """The ids of a prompt, special tokens and `encoding.prefix` included: those of transformers'
    encode(text), but that nothing is put after the text."""
    return [*encoding.prefix, *encoding.encode(text, allowed_special="all")]


def end_of_text(encoding):
    """The id that separates documents: the first of SEPARATORS that the encoding has."""
    for text in SEPARATORS:
        if text in encoding.special_tokens:
            return encoding.special_tokens[text]
    raise InputError(f"expected a tokenizer with one of {' '.join(SEPARATORS)}; add one to it")


# --------------------------------------------------------------------------------------------------
# Text as tokens come

class TextStream:
    """Text from token ids as they come: whole characters, and no part of a stop text.

    In sum it is what decoding all ids at once gives, but for a space that some decoders take off
    the start of a text. encoding: any object with encode(text) and decode(ids). stopped: whether a
    stop text has come."""

    def __init__(self, encoding, stop_texts=()):
        self.decode = encoding.decode
        self.stop_texts = stop_texts
        self.stopped = False
        self.held = ""  # text that may be the beginning of a stop text
        self._continue_after(encoding.encode("a"))  # after any text a space stays

    def _continue_after(self, context):
        """The next ids are decoded after those of `context`, whose text has been given."""
        self.context = context
        self.pending = []  # ids after the context
        self.shown = self.decode(context)  # what of context and pending has been given

    def feed(self, tokens):
        """The text that these further ids complete."""
        return self._release("".join(map(self._completed, tokens)))

    def finish(self):
        """The rest, at the end of a text."""
        rest = self._release(self.decode(self.context + self.pending)[len(self.shown):])
        return rest + self.held

    def _completed(self, token):
        self.pending.append(token)
        text = self.decode(self.context + self.pending)
        # an incomplete character decodes to U+FFFD; so do bytes that will never be one
        complete = text if len(self.pending) > 16 else text.rstrip("\N{REPLACEMENT CHARACTER}")
        new = complete[len(self.shown):]
        if new and complete == text:
            self._continue_after(self.pending)
        elif new:
            self.shown = complete
        return new

    def _release(self, text):
        """Holds back from the first stop text on, and what may be the beginning of one."""
        if self.stopped:
            return ""
        text = self.held + text
        self.held = ""
        found = [i for stop in self.stop_texts if (i := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return text[:min(found)]
        begun = (n for stop in self.stop_texts for n in range(1, len(stop))
                 if text.endswith(stop[:n]))
        end = len(text) - max(begun, default=0)
        self.held = text[end:]
        return text[:end]


# --------------------------------------------------------------------------------------------------
# A folder's files

def load_encoding(path):
    """The Encoding of a Hugging Face folder.

    Reads the first of tokenizer.json, vocab.json with merges.txt, tokenizer.model. Raises
    InputError for files that are missing, broken or unknown, and for a missing package."""
    folder = Path(path)
    names = "tokenizer.json", "merges.txt", "tokenizer.model"
    files = [*(folder / name for name in names), *sorted(folder.glob("*.tiktoken"))]
    file = next((file for file in files if file.exists()), files[0])
    try:
        if file.name == "tokenizer.json":
            return _from_spec(file, read_json(file))
        return (_read_vocab if file.name == "merges.txt" else _read_sentencepiece)(file)
    except (InputError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the packages' panics are not Exceptions
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise InputError(f"{file}: expected a tokenizer, but: {reason}; fetch it again") from error


def optional_json(file):
    """The object in a json file, {} if the file does not exist."""
    return read_json(file) if file.exists() else {}


def _refuse(file, what):
    raise InputError(f"{file}: expected a tokenizer that can be read exactly, but it has {what}; "
                     "fetch the model's tokenizer.json, or take another model")


def _with_special(special, encode):
    """A function: text -> ids, special tokens included, the longest where several begin.

    encode(text, after): the ids of a plain text; after: whether a special token precedes it."""
    if not special:
        return lambda text: encode(text, False)
    longest_first = sorted(special, key=len, reverse=True)
    split = re.compile(f"({'|'.join(map(re.escape, longest_first))})").split

    def encode_all(text):  # split gives plain, special, plain, ..., plain
        ids = ([special[part]] if i % 2 else encode(part, i > 0)
               for i, part in enumerate(split(text)))
        return list(itertools.chain.from_iterable(ids))

    return encode_all


# --------------------------------------------------------------------------------------------------
# tokenizer.json

def _from_spec(file, spec):
    """The content of a tokenizer.json -> Encoding."""
    if spec["model"].get("dropout"):
        _refuse(file, "a BPE model with dropout, whose ids are random")
    flags = dict.fromkeys((*STRIPS, "special"), False)
    added = [flags | {"normalized": not token.get("special")} | token
             for token in spec.get("added_tokens") or [] if token["content"]]
    spec = {"version": "1.0"} | spec | {"truncation": None, "padding": None, "added_tokens": added}
    special = {token["content"]: token["id"] for token in added}
    package = Tokenizer.from_str(json.dumps(spec))
    encoded = package.encode("a")  # after the special tokens that the post_processor puts there
    encoding = (_through_tiktoken(spec, special, package)
                or _through_tokenizers(file, spec, special, package))
    encoding.prefix = encoded.ids[:(encoded.special_tokens_mask + [0]).index(0)]
    if not encoding.ids.issuperset(encoding.prefix):
        _refuse(file, f"the ids {encoding.prefix} before a text, which are not tokens")
    return encoding


def _through_tokenizers(file, spec, special, package):
    vocab = package.get_vocab(with_added_tokens=True)
    for text, index in special.items():  # the package numbers added tokens itself
        if vocab.get(text) != index:
            _refuse(file, f"the id {index!r} for the added token {text!r}, not {vocab.get(text)}")
    if len(set(vocab.values())) < len(vocab):
        _refuse(file, "one id for two tokens")

    def encode(text, plain):
        package.encode_special_tokens = plain  # as any other text
        try:
            return package.encode(text, add_special_tokens=False).ids
        except Exception as error:  # a model without an unknown token met an unknown character
            raise InputError(f"{file}: expected a text in its vocabulary ({error}); change the text"
                             ) from error

    parts = [spec.get(part) for part in ("normalizer", "pre_tokenizer", "model", "added_tokens")]
    return Encoding(partial(encode, plain=False), partial(encode, plain=True),
                    partial(package.decode, skip_special_tokens=False), special, vocab.values(),
                    (json.dumps(parts, sort_keys=True), sorted(special.items())))


def _through_tiktoken(spec, special, package):
    """An Encoding, or None unless tiktoken gives the same ids for this byte-level BPE."""
    always = {token["content"]: token["id"] for token in spec["added_tokens"]
              if not token["special"]}  # found in plain texts too
    pattern = _pattern(spec.get("pre_tokenizer"))
    plain = pattern is not None and _is_plain_bpe(spec, special, always)
    ranks = _ranks(spec["model"], special, package.model) if plain else None
    ids = [*(ranks or {}).values(), *special.values()]
    if ranks is None or len(set(ids)) < len(ids) or max(ids) >= 2**31:
        return None
    nfc = bool(spec.get("normalizer"))
    package.encode_special_tokens = True  # as any other text
    bpe = tiktoken.Encoding("", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)

    def encode(text, after):
        text = normalizers.NFC().normalize_str(text) if nfc else text
        if len(text) > LONG:
            return package.encode(text, add_special_tokens=False).ids
        return bpe.encode_ordinary(text)

    hashed = (sorted(ranks.items()), pattern, sorted(special.items())) + ("NFC",) * nfc
    return Encoding(_with_special(special, encode), _with_special(always, encode), bpe.decode,
                    special, ids, hashed)


def _is_plain_bpe(spec, special, always):
    """Whether only a pattern and merges decide how a text without added tokens is cut."""
    model = spec["model"]
    nfc = spec.get("normalizer") == {"type": "NFC"}
    normalized = {token["normalized"] for token in spec["added_tokens"]}
    others = ("byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")
    return ((nfc or not spec.get("normalizer"))
            and model.get("type", "BPE") == "BPE" and not any(map(model.get, others))
            and (spec.get("decoder") or {}).get("type") == "ByteLevel"
            and not any(token[flag] for token in spec["added_tokens"] for flag in STRIPS)
            and not any(a != b and (a in b or b in a) for a in always for b in special)
            # the package finds normalized tokens in a second round
            and len(normalized) <= 1 and not (nfc and True in normalized))


def _split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
            "invert": False}


def _pattern(pre_tokenizer):
    """tiktoken's pattern for a pre_tokenizer, or None."""
    *splits, last = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {}])
    steps = [*splits, {"use_regex": True} | last | {"trim_offsets": True}]  # which changes no id
    if steps == [BYTE_LEVEL]:
        return GPT2_PATTERN
    for pattern in (CODE_PATTERN, PIECES, LLAMA3_PATTERN, QWEN_PATTERN):
        if steps == [_split(pattern), BYTE_LEVEL | {"use_regex": False}]:
            # the second half never matches; hashes include it
            return f"(?:{pattern})|(?:(?!{pattern})(?s:.))+"
    return None


def _ranks(model, special, bpe):
    """{bytes: id} of the ordinary tokens, or None if tiktoken would give other ids than the merges.

    tiktoken joins the two neighbours whose joint token has the lowest id. The merges do the same if
    the ids of the tokens they make rise, and if they make every token from its own bytes. With
    ignore_merges they need not make it, but must not stop at two parts, which tiktoken joins."""
    vocab = model["vocab"]
    whole_pieces = bool(model.get("ignore_merges"))
    merged = ["".join(pair.split(" ") if isinstance(pair, str) else pair)
              for pair in model["merges"]]
    ids = [vocab[token] for token in merged]
    ordinary = {token: index for token, index in vocab.items() if token not in special}
    bpe.ignore_merges = False
    counts = {len(bpe.tokenize(token)) for token in ordinary}
    bpe.ignore_merges = whole_pieces
    followed = ids == sorted(ids) and (counts <= {1} or whole_pieces and not counts & {0, 2})
    table = _byte_symbols()
    all_bytes = table.keys() <= ordinary.keys() and set("".join(ordinary)) <= table.keys()
    if not followed or not all_bytes or special.keys() & set(merged):
        return None
    return {bytes(map(table.get, token)): index for token, index in ordinary.items()}


def _byte_symbols():
    """{symbol: byte}: GPT-2's printable characters for bytes (openai/gpt-2, encoder.py)."""
    printable = [byte for a, b in ("!~", "¡¬", "®ÿ") for byte in range(ord(a), ord(b) + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {chr(byte): byte for byte in printable}
    return symbols | {chr(256 + i): byte for i, byte in enumerate(others)}


# --------------------------------------------------------------------------------------------------
# Folders without a tokenizer.json

def _tokenizer_class(file, config, *known):
    """tokenizer_config.json's tokenizer_class, one of `known`; where it is missing, the first."""
    kind = (config.get("tokenizer_class") or known[0]).removesuffix("Fast")
    if kind not in known:
        _refuse(file, f"the tokenizer_class {kind}, not {' or '.join(known)}, which need no other "
                      "file")
    return kind


def token_text(token):
    """A token's text, or None. tokenizer_config.json has texts, dicts with "content", nulls."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def token_settings(folder):
    """The content of tokenizer_config.json over that of special_tokens_map.json, the older file."""
    older = optional_json(folder / "special_tokens_map.json")
    return older | optional_json(folder / "tokenizer_config.json")


def _added_tokens(file, config, vocab, defaults):
    """The added tokens in a tokenizer.json's form, in the order of their ids. config: the settings.
    vocab: {text: id}. defaults: texts of tokens that need not be named."""
    named = [(int(index), token)
             for index, token in (config.get("added_tokens_decoder") or {}).items()]
    named += [(id, text) for text, id in optional_json(file.with_name("added_tokens.json")).items()]
    for key, value in config.items():
        if key.endswith(("_token", "_special_tokens")):
            named += [(None, token) for token in (value if isinstance(value, list) else [value])]
    named += [(None, text) for text in defaults if text in vocab]
    ids = dict(vocab)
    tokens = {}
    for index, token in named:
        text = token_text(token)
        if not text:
            continue
        known = ids.setdefault(text, index)
        if type(known) is not int or known < 0 or index not in (None, known):
            _refuse(file, f"the added token {text!r} with the id {index}, elsewhere {known}")
        strips = {flag: isinstance(token, dict) and bool(token.get(flag)) for flag in STRIPS}
        tokens.setdefault(text, {"id": known, "content": text, "special": True} | strips)
    if len(set(ids.values())) < len(ids):
        _refuse(file, "one id for two tokens")
    return sorted(tokens.values(), key=lambda token: token["id"])


def _bos(file, config, special, default, text=None):
    """The prefix: the id of bos_token (or `text`) if add_bos_token (or `default`) says so."""
    if not config.get("add_bos_token", default):
        return []
    text = token_text(config.get("bos_token") or text)
    if text not in special:
        _refuse(file, f"add_bos_token, but no id for the bos_token {text!r}")
    return [special[text]]


def _read_vocab(file):
    """merges.txt with vocab.json, GPT-2's or Qwen's, through the equivalent tokenizer.json."""
    vocab = read_json(file.with_name("vocab.json"))
    config = token_settings(file.parent)
    model_type = str(optional_json(file.with_name("config.json")).get("model_type"))
    known = ["GPT2Tokenizer", "Qwen2Tokenizer"]
    known = known[::-1] if model_type.startswith("qwen") else known
    qwen = _tokenizer_class(file, config, *known) == "Qwen2Tokenizer"
    byte_level = BYTE_LEVEL | {"add_prefix_space": bool(config.get("add_prefix_space"))}
    steps = [_split(QWEN_PATTERN), BYTE_LEVEL | {"use_regex": False}]
    lines = file.read_text(encoding="utf-8").split("\n")
    merges = [line for line in lines[lines[0].startswith("#version"):] if line]
    encoding = _from_spec(file, {
        "added_tokens": _added_tokens(file, config, vocab, ["<|endoftext|>"]),
        "normalizer": {"type": "NFC"} if qwen else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps} if qwen else byte_level,
        "decoder": BYTE_LEVEL,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    })
    encoding.prefix = _bos(file, config, encoding.special_tokens, False)
    return encoding


def _read_sentencepiece(file):
    """tokenizer.model alone, Llama's, whose bos_token is a prefix by default, or Baichuan's."""
    content = file.read_bytes()
    config = token_settings(file.parent)
    if re.match(rb"[A-Za-z0-9+/]+=* \d+\n", content):
        _refuse(file, "tiktoken's format")
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        raise InputError(f"{file}: needs the package sentencepiece, which is missing; pip install "
                         "sentencepiece") from None
    kind = _tokenizer_class(file, config, "LlamaTokenizer", "BaichuanTokenizer")
    if config.get("add_prefix_space") is False or config.get("sp_model_kwargs"):
        _refuse(file, "add_prefix_space=false or sp_model_kwargs in its tokenizer_config.json")
    first = rest = SentencePieceProcessor(model_proto=content or b"\0")
    # what follows a special token starts with the model's dummy prefix, a space, if legacy is true
    if not config.get("legacy", True):
        rest = SentencePieceProcessor(model_proto=content + NO_DUMMY_PREFIX)
    vocab = {first.id_to_piece(index): index for index in range(first.get_piece_size())}
    added = _added_tokens(file, config, vocab, ["<s>", "</s>", "<unk>"])
    if any(token[flag] for token in added for flag in STRIPS):
        _refuse(file, f"an added token with one of {' '.join(STRIPS)}")
    special = {token["content"]: token["id"] for token in added}
    names = {index: text for text, index in special.items() if index != first.unk_id()}

    def decode(ids):
        runs = itertools.groupby(ids, names.__contains__)
        return "".join("".join(map(names.get, run)) if is_special
                       else (rest if i else first).decode(list(run))
                       for i, (is_special, run) in enumerate(runs))

    encode = _with_special(special, lambda text, after: (rest if after else first).encode(text))
    ids = [*vocab.values(), *special.values()]
    hashed = (hashlib.sha256(content).hexdigest(), rest is first), sorted(special.items())
    encoding = Encoding(encode, first.encode, decode, special, ids, hashed)
    encoding.prefix = _bos(file, config, special, kind == "LlamaTokenizer", "<s>")
    return encoding
