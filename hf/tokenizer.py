"""A model's tokenizer, from tokenizer.json, or from older files with transformers. tiktoken encodes
where it gives the same ids (bpe.py), tokenizers elsewhere."""

import importlib
import json
import re
from functools import cached_property

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from common.files import check_content, value_hash
from common.values import one_line
from hf.bpe import BYTES, byte_level_bpe
from hf.chat import load_chat_template, token_text
from hf.files import optional_part, part_file, read_part
from hf.paths import find_model, is_gguf
from hf.text_stream import TextStream
from model import InputError, expect

ADDED_FLAGS = "single_word", "lstrip", "rstrip", "normalized", "special"  # of an AddedToken
NAMED = "bos", "eos", "unk", "sep", "pad", "cls", "mask"  # special tokens, in transformers' order


class Encoding:
    """A tokenizer made of the contents of a tokenizer.json (spec), and more `AddedToken`s.
    special_tokens: {text: id} of all added tokens. control_ids: those marked special, but <think>
    or [THINK]: no answer has them. prefix: ids to put before a prompt."""

    def __init__(self, file, spec, more=()):
        spec = {"normalizer": None, "pre_tokenizer": None} | spec | {
            "truncation": None, "padding": None, "added_tokens": spec.get("added_tokens") or []}
        self.file = file
        self.path = file.parent if file.name == "tokenizer.json" else file
        self.package, vocab = read_package(spec)
        self.package.add_tokens(list(more))
        added = self.package.get_added_tokens_decoder()
        self.special_tokens = {token.content: i for i, token in added.items()}
        self.vocab = vocab | self.special_tokens
        self.control_ids = {i for i, token in added.items()
                            if token.special and "think" not in token.content.lower()}
        self.ids = set(self.vocab.values())
        self.n_vocab = max(self.ids) + 1
        self.decoder = json.dumps(spec.get("decoder"), ensure_ascii=False)
        encoded = self.package.encode("a")
        self.prefix = encoded.ids[:(encoded.special_tokens_mask + [0]).index(0)]
        expect(not spec["model"].get("dropout"), f"{file}: BPE dropout is not supported; remove it")
        expect(len(self.ids) == len(self.vocab) and self.ids.issuperset(self.prefix),
               f"{file}: two tokens share an id, or no token has the prefix's ids {self.prefix}")
        self.bpe = byte_level_bpe(self.package, spec, added)
        self.context = self.encode("a", allowed_special="all")  # of streams, before their first id

    @cached_property
    def hash(self):
        """16 hex digits of the vocabulary, the same in a GGUF file, whose converter adds tokens
        [PADn] of id n and writes some ▁ as spaces."""
        pairs = sorted((text.replace(" ", "▁"), i) for text, i in self.vocab.items()
                       if text != f"[PAD{i}]")
        return value_hash(pairs)

    @cached_property
    def plain_package(self):
        """Like package, but matches no special tokens. It is a second one because switching the
        first would take a lock for as long as the longest text is encoded."""
        package = Tokenizer.from_str(self.package.to_str())
        package.encode_special_tokens = True
        return package

    def encode(self, text, *, allowed_special=()):
        """Text -> token ids. allowed_special "all": match them. Lone surrogates become U+FFFD."""
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if self.bpe and self.bpe.suits(text):
            return self.bpe.encode(text, allowed_special == "all")
        package = self.package if allowed_special == "all" else self.plain_package
        try:  # a batch: `encode` would hold the interpreter's lock
            return package.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except Exception as error:  # a character without a token, where no unknown token exists
            raise InputError(f"{self.file}: cannot encode this text ({error})") from error

    def decode(self, ids):
        """Decodes token ids to text, skipping unknown ids. Some decoders drop a leading space."""
        return self.package.decode([i for i in ids if i in self.ids], skip_special_tokens=False)

    def token_bytes(self, token):
        """The bytes of a token id; None for an unknown id or a decoder that is no table of them."""
        text = self.package.id_to_token(token)
        if text is None or text in self.special_tokens:
            return text and text.encode()
        if "ByteLevel" in self.decoder:
            return bytes(map(BYTES.get, text)) if BYTES.keys() >= set(text) else None
        if "ByteFallback" in self.decoder and re.fullmatch("<0x[0-9A-F]{2}>", text):
            return bytes.fromhex(text[3:5])
        return text.replace("▁", " ").encode() if "▁" in self.decoder else None

    @cached_property
    def template(self):
        """The `ChatTemplate` in the same folder, or None."""
        return load_chat_template(self.path)

    def chat(self, messages, /, **options):
        """The token ids of a chat prompt. messages, options: as in `ChatTemplate.render`."""
        expect(self.template, f"{self.path}: has no chat template; use encode_prompt, or a model "
               "trained to chat")
        return self.encode(self.template.render(messages, **options), allowed_special="all")

    def stream(self, stop=(), shown=None, begin=None):
        """A `TextStream` of an output. stop: texts and ids that end it. shown: control tokens to
        show; None: all. begin: as in `TextStream`."""
        hidden = {token for token in stop if not isinstance(token, str)}
        if shown is not None:
            hidden |= self.control_ids.difference(shown)
        return TextStream(self, [text for text in stop if isinstance(text, str)], hidden, begin)


def encode_prompt(encoding, text):
    """The ids of a prompt, like transformers' encode(text), but without tokens after the text."""
    return [*encoding.prefix, *encoding.encode(text, allowed_special="all")]


def read_package(spec):
    """The `Tokenizer` of a tokenizer.json's contents, and all its tokens, {text: id}. Most of the
    time goes into a BPE's merges, which are read twice as fast as Python objects than as JSON."""
    model = spec.get("model") or {}
    added = {token["content"]: token["id"] for token in spec["added_tokens"]}
    merges = model.get("merges") or [""]  # older files have texts instead of pairs
    if isinstance(merges[0], str) or not added.items() <= model["vocab"].items():
        package = Tokenizer.from_str(json.dumps(spec))
        return package, package.get_vocab(with_added_tokens=True)
    small = model | dict(vocab=added, merges=[])
    package = Tokenizer.from_str(json.dumps(spec | dict(model=small)))
    flags = {name: value for name, value in model.items()
             if name not in ("type", "vocab", "merges") and value is not None}
    package.model = BPE(model["vocab"], [*map(tuple, merges)], **flags)
    return package, model["vocab"]


def more_tokens(spec, path):
    """[AddedToken] that tokenizer_config.json or added_tokens.json in the folder have, but not its
    tokenizer.json (spec), as transformers adds them: those with ids, then special ones without."""
    if is_gguf(path):
        return []
    config = optional_part(path, "tokenizer_config.json")
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    named = [config.get(f"{name}_token") for name in NAMED]
    named += extra.values() if isinstance(extra, dict) else extra
    special = [text for text in map(token_text, named) if text]
    numbered = config.get("added_tokens_decoder")
    if numbered is None:
        numbered = {i: dict(content=text)
                    for text, i in optional_part(path, "added_tokens.json").items()}
    tokens = [numbered[i] for i in sorted(numbered, key=int)]
    found = {}
    for token in tokens + [dict(content=text) for text in special]:
        flags = {name: token[name] for name in ADDED_FLAGS if name in token}
        if token["content"] in special:
            flags["special"] = True
        found.setdefault(token["content"], AddedToken(token["content"], **flags))
    known = {token["content"] for token in spec.get("added_tokens") or []}
    return [token for text, token in found.items() if text not in known]


def load_encoding(path):
    """Loads the Encoding of a folder, a GGUF file or a short name. Never runs a folder's code."""
    path = find_model(path)
    file = part_file(path, "tokenizer.json")
    older = [name for name in ("merges.txt", "tokenizer.model") if file.with_name(name).exists()]
    try:
        if file.exists() or not older:
            spec = read_part(path, "tokenizer.json")
            return Encoding(file, spec, more_tokens(spec, path))
        check_content(file.with_name(older[0]))
        import transformers
        reader = transformers.AutoTokenizer
        if older[0] == "tokenizer.model":  # not AutoTokenizer: Baichuan's class is custom code
            for package in ("sentencepiece", "google.protobuf"):
                importlib.import_module(package)
            reader = transformers.PreTrainedTokenizerFast
        tokenizer = reader.from_pretrained(file.parent, trust_remote_code=False)
        return Encoding(file, json.loads(tokenizer.backend_tokenizer.to_str()))
    except (InputError, KeyboardInterrupt, SystemExit):
        raise
    except ImportError as error:
        raise InputError(f"{file}: no such file; to read {older[0]}, pip install transformers "
                         f"sentencepiece protobuf ({error})") from None
    except BaseException as error:  # a panic in Rust is no Exception
        reason = one_line(f"{type(error).__name__}: {error}")
        raise InputError(f"{file}: not a usable tokenizer: {reason}; download it again") from error
