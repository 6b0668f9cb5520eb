"""A model's tokenizer. The tokenizers package reads tokenizer.json, transformers older files.
tiktoken, which is faster, encodes if it gives the same ids."""

import hashlib
import importlib
import json
import threading
from functools import cached_property

import tiktoken
from tokenizers import Tokenizer

from hf.chat import load_chat_template
from hf.files import part_file, read_part
from hf.paths import find_model
from hf.splits import CODE_PATTERN, GPT2_PATTERN, LLAMA3_PATTERN, PIECES, QWEN_PATTERN, split_steps
from model import InputError, expect

STRIPS = ("single_word", "lstrip", "rstrip")  # an added token's flags about the text around it
LONG = 200_000  # characters; tiktoken crashes at a single match of about 1,000,000


class Encoding:
    """The tokenizer of a tokenizer.json (spec, read from file). special_tokens: {text: id} of all
    added tokens. prefix: ids before a prompt. hash: 16 hex digits of the ids' meanings."""

    def __init__(self, file, spec):
        flags = dict.fromkeys((*STRIPS, "special"), False)
        added = [flags | {"normalized": not token.get("special")} | token
                 for token in spec.get("added_tokens") or [] if token["content"]]
        spec = {"version": "1.0", "normalizer": None, "pre_tokenizer": None} | spec
        spec |= {"truncation": None, "padding": None, "added_tokens": added}
        self.file = file
        self.path = file.parent if file.name == "tokenizer.json" else file
        self.package = Tokenizer.from_str(json.dumps(spec))
        self.lock = threading.Lock()
        vocab = self.package.get_vocab(with_added_tokens=True)
        self.special_tokens = {token["content"]: vocab[token["content"]] for token in added}
        self.ids = set(vocab.values())
        self.n_vocab = max(self.ids) + 1
        encoded = self.package.encode("a")  # after the special tokens that start every text
        self.prefix = encoded.ids[:(encoded.special_tokens_mask + [0]).index(0)]
        expect(not spec["model"].get("dropout"), f"{file}: ids are random, it has dropout")
        expect(len(self.ids) == len(vocab) and self.ids.issuperset(self.prefix),
               f"{file}: two tokens share an id, or no token has the prefix's ids {self.prefix}")
        self.always = {token["content"] for token in added if not token["special"]}
        pattern = _pattern(spec)
        ranks = _ranks(spec, self.special_tokens, self.package.model) if pattern else None
        special = sorted(self.special_tokens.items())
        if ranks is None:
            self.bpe = None
            # not pre_tokenizer: transformers writes another for a GGUF file, which has equal heads
            keys = ("normalizer", "model", "added_tokens")
            hashed = json.dumps([spec.get(key) for key in keys], sort_keys=True), special
        else:
            self.bpe = tiktoken.Encoding("", pat_str=pattern, mergeable_ranks=ranks,
                                         special_tokens=self.special_tokens)
            hashed = sorted(ranks.items()), pattern, special, *["NFC"] * bool(spec["normalizer"])
        self.hash = hashlib.sha256(repr(hashed).encode()).hexdigest()[:16]

    def encode(self, text, *, allowed_special=()):
        """The ids of a text. "all": special tokens are matched. A lone surrogate is U+FFFD."""
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        special = allowed_special == "all"
        normalizer = self.package.normalizer
        is_normal = normalizer is None or normalizer.normalize_str(text) == text
        if self.bpe and len(text) <= LONG and is_normal:
            allowed = "all" if special else self.always
            return self.bpe.encode(text, allowed_special=allowed, disallowed_special=())
        try:
            with self.lock:  # other threads may encode, too
                self.package.encode_special_tokens = not special
                return self.package.encode(text, add_special_tokens=False).ids
        except Exception as error:  # an unknown character, and no token for those
            raise InputError(f"{self.file}: has no token for this text ({error})") from error

    def decode(self, ids):
        """The text of ids, without ids that have no token. It may lack a space at its start."""
        return self.package.decode([i for i in ids if i in self.ids], skip_special_tokens=False)

    @cached_property
    def template(self):
        """The `ChatTemplate` beside the tokenizer, or None."""
        return load_chat_template(self.path)

    def chat(self, messages, /, **options):
        """The ids of a chat's prompt. messages, options: as in `ChatTemplate.render`."""
        expect(self.template, f"{self.path}: has no chat template; use encode_prompt, or a model "
               "trained to chat")
        return self.encode(self.template.render(messages, **options), allowed_special="all")

    def stream(self, stop=()):
        return TextStream(self, stop)


def encode_prompt(encoding, text):
    """The ids of a prompt: those of transformers' encode(text), without any after the text."""
    return [*encoding.prefix, *encoding.encode(text, allowed_special="all")]


class TextStream:
    """Decodes token ids as they arrive, to whole characters, up to a stop text; like decoding all
    at once, but may keep a space at the start. stop: texts, and token ids that are left out.
    stopped: whether a stop text was reached."""

    def __init__(self, encoding, stop=()):
        self.decode = encoding.decode
        self.stop_texts = [text for text in stop if isinstance(text, str)]
        self.left_out = set(stop).difference(self.stop_texts)
        self.stopped = False
        self.held = ""  # text that may be the start of a stop text
        self._continue_after(encoding.encode("a"))  # decoders keep a space after any text

    def _continue_after(self, context):
        self.context = context
        self.pending = []  # ids that are decoded after those of the context
        self.shown = len(self.decode(context))  # characters of both that were returned

    def feed(self, tokens):
        """The text that these ids complete."""
        shown = (token for token in tokens if token not in self.left_out)
        return self._release("".join(map(self._completed, shown)))

    def finish(self):
        """The rest of the text."""
        return self._release(self.decode(self.context + self.pending)[self.shown:]) + self.held

    def _completed(self, token):
        self.pending.append(token)
        text = self.decode(self.context + self.pending)
        # an incomplete character decodes to U+FFFD, and so do invalid bytes
        complete = text if len(self.pending) > 16 else text.rstrip("\N{REPLACEMENT CHARACTER}")
        new = complete[self.shown:]
        self.shown += len(new)
        if new and complete == text:
            self._continue_after(self.pending)
        return new

    def _release(self, text):
        """The text up to a stop text. Holds back what may be the start of one."""
        if self.stopped:
            return ""
        text = self.held + text
        starts = [i for stop in self.stop_texts if (i := text.find(stop)) >= 0]
        begun = (n for stop in self.stop_texts for n in range(1, min(len(stop), len(text) + 1))
                 if text.endswith(stop[:n]))
        self.stopped = bool(starts)
        end = min(starts) if starts else len(text) - max(begun, default=0)
        self.held = "" if starts else text[end:]
        return text[:end]


def load_encoding(path):
    """The Encoding of a folder, a GGUF file or a short name. Never runs a folder's code."""
    path = find_model(path)
    file = part_file(path, "tokenizer.json")
    older = [name for name in ("merges.txt", "tokenizer.model") if file.with_name(name).exists()]
    try:
        if file.exists() or not older:
            return Encoding(file, read_part(path, "tokenizer.json"))
        import transformers
        reader = transformers.AutoTokenizer
        if older[0] == "tokenizer.model":  # also of classes such as Baichuan's
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
    except BaseException as error:  # the packages' panics are not Exceptions
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise InputError(f"{file}: expected a tokenizer, but: {reason}; fetch it again") from error


def _pattern(spec):
    """tiktoken's pattern for the pre_tokenizer of a BPE, or None."""
    pre_tokenizer = spec["pre_tokenizer"] if "merges" in spec["model"] else None
    *splits, last = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {}])
    steps = [*splits, {"use_regex": True} | last | {"trim_offsets": True}]  # offsets change no id
    for split in (None, CODE_PATTERN, PIECES, LLAMA3_PATTERN, QWEN_PATTERN):
        if steps == split_steps(split):
            # the second half never matches; hashes include it
            return f"(?:{split})|(?:(?!{split})(?s:.))+" if split else GPT2_PATTERN
    return None


def _ranks(spec, special, model):
    """{bytes: id} of the ordinary tokens, or None where tiktoken may give other ids: it joins the
    neighbours whose joint token has the lowest id. Merges do the same if each makes a higher id
    than the one before, and if they make every token from its own bytes."""
    added = spec["added_tokens"]
    ordinary = {text: i for text, i in spec["model"]["vocab"].items() if text not in special}
    merged = ["".join(pair).replace(" ", "") for pair in spec["model"]["merges"]]
    ids = [ordinary.get(token, -1) for token in merged]
    ignore_merges = model.ignore_merges
    model.ignore_merges = False
    parts = {len(model.tokenize(token)) for token in ordinary}  # tiktoken would join two
    model.ignore_merges = ignore_merges
    # GPT-2's printable characters for bytes (openai/gpt-2, encoder.py)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = dict(zip(map(chr, [*printable, *range(256, 324)]), printable + others))
    follows = (spec["normalizer"] in (None, {"type": "NFC"})
               and not any(token[flag] for token in added for flag in STRIPS)
               and not any(a != b and a in b for a in special for b in special)
               and len({token["normalized"] for token in added}) <= 1  # else there are two rounds
               and ids == sorted(ids) and min(ids, default=0) >= 0
               and symbols.keys() <= ordinary.keys() and set("".join(ordinary)) <= symbols.keys()
               and (parts <= {1} or model.ignore_merges and not parts & {0, 2}))
    return {bytes(map(symbols.get, token)): i for token, i in ordinary.items()} if follows else None
