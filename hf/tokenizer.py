"""A model's tokenizer, from tokenizer.json, or from older files with transformers. tiktoken encodes
where it gives the same ids (bpe.py), tokenizers elsewhere."""

import hashlib
import importlib
import json
import re
from functools import cached_property

from tokenizers import Tokenizer
from tokenizers.models import BPE

from common.files import check_content
from common.values import one_line
from hf.bpe import BYTES, byte_level_bpe
from hf.chat import load_chat_template, token_text
from hf.files import optional_part, part_file, read_part
from hf.paths import find_model, is_gguf
from hf.text_stream import TextStream
from model import InputError, expect

BPE_FLAGS = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
             "byte_fallback", "ignore_merges")
NAMED = "bos", "eos", "unk", "sep", "pad", "cls", "mask"  # special tokens, in transformers' order


class Encoding:
    """A tokenizer made of the contents of a tokenizer.json (spec). special_tokens: {text: id} of
    all added tokens. control_ids: those marked special, but <think> or [THINK]: no answer has them.
    prefix: ids to put before a prompt."""

    def __init__(self, file, spec):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
        added = [flags | {"normalized": not token.get("special")} | token
                 for token in spec.get("added_tokens") or [] if token["content"]]
        spec = {"version": "1.0", "normalizer": None, "pre_tokenizer": None} | spec
        spec |= {"truncation": None, "padding": None, "added_tokens": added}
        self.file = file
        self.path = file.parent if file.name == "tokenizer.json" else file
        self.package, self.vocab = read_package(spec)
        vocab = self.vocab
        self.special_tokens = {token["content"]: vocab[token["content"]] for token in added}
        self.control_ids = {vocab[token["content"]] for token in added
                            if token["special"] and "think" not in token["content"].lower()}
        self.ids = set(vocab.values())
        self.n_vocab = max(self.ids) + 1
        self.decoder = json.dumps(spec.get("decoder"), ensure_ascii=False)
        encoded = self.package.encode("a")
        self.prefix = encoded.ids[:(encoded.special_tokens_mask + [0]).index(0)]
        expect(not spec["model"].get("dropout"), f"{file}: BPE dropout is not supported; remove it")
        expect(len(self.ids) == len(vocab) and self.ids.issuperset(self.prefix),
               f"{file}: two tokens share an id, or no token has the prefix's ids {self.prefix}")
        self.bpe = byte_level_bpe(self.package, spec, self.special_tokens)
        self.context = self.encode("a", allowed_special="all")  # of streams, before their first id

    @cached_property
    def hash(self):
        """16 hex digits of the vocabulary, the same in a GGUF file, whose converter adds tokens
        [PADn] of id n and writes some ▁ as spaces."""
        pairs = sorted((text.replace(" ", "▁"), i) for text, i in self.vocab.items()
                       if text != f"[PAD{i}]")
        return hashlib.sha256(repr(pairs).encode()).hexdigest()[:16]

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

    def least_tokens(self, text):
        """A lower bound of the number of tokens of a text, from its bytes; 0 if none is known."""
        if not self.bpe:
            return 0
        data = text.encode(errors="ignore").translate(None, self.bpe.missing)  # these are dropped
        return len(data) // self.bpe.longest

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
    flags = {name: model[name] for name in BPE_FLAGS if model.get(name) is not None}
    package.model = BPE(model["vocab"], [*map(tuple, merges)], **flags)
    return package, model["vocab"]


def add_tokens(spec, path):
    """A tokenizer.json with the tokens that only tokenizer_config.json or added_tokens.json in the
    folder have, as transformers adds them: those with ids, then the special ones without."""
    if is_gguf(path):
        return spec
    config = optional_part(path, "tokenizer_config.json")
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    named = [config.get(f"{name}_token") for name in NAMED]
    named += extra.values() if isinstance(extra, dict) else extra
    special = [text for text in map(token_text, named) if text]
    numbered = config.get("added_tokens_decoder")
    if numbered is None:
        numbered = {i: dict(content=text, special=text in special)
                    for text, i in optional_part(path, "added_tokens.json").items()}
    added = list(spec.get("added_tokens") or [])
    known = {token["content"]: token["id"] for token in added}
    vocab = (spec.get("model") or {}).get("vocab") or {}
    ids = vocab if isinstance(vocab, dict) else {text: i for i, (text, _) in enumerate(vocab)}
    tokens = [numbered[i] | dict(id=int(i)) for i in sorted(numbered, key=int)]
    for token in tokens + [dict(content=text, special=True) for text in special]:
        text = token["content"]
        if text not in known:
            free = max([*ids.values(), *known.values()], default=-1) + 1
            known[text] = ids.get(text, token.get("id", free))
            is_special = token.get("special") or text in special
            added.append(token | dict(id=known[text], special=is_special))
    return spec | dict(added_tokens=added)


def load_encoding(path):
    """Loads the Encoding of a folder, a GGUF file or a short name. Never runs a folder's code."""
    path = find_model(path)
    file = part_file(path, "tokenizer.json")
    older = [name for name in ("merges.txt", "tokenizer.model") if file.with_name(name).exists()]
    try:
        if file.exists() or not older:
            return Encoding(file, add_tokens(read_part(path, "tokenizer.json"), path))
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
