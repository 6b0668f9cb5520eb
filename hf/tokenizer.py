"""A model's tokenizer. The tokenizers package reads tokenizer.json, transformers older files."""

import hashlib
import importlib
import json
import threading
from functools import cached_property

from tokenizers import Tokenizer

from hf.chat import load_chat_template
from hf.files import part_file, read_part
from hf.paths import find_model
from model import InputError, expect


class Encoding:
    """The tokenizer of a tokenizer.json (spec, read from file). special_tokens: {text: id} of all
    added tokens. prefix: ids before a prompt. hash: 16 hex digits of all tokens and their ids."""

    def __init__(self, file, spec):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
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
        self.hash = hashlib.sha256(repr(sorted(vocab.items())).encode()).hexdigest()[:16]

    def encode(self, text, *, allowed_special=()):
        """The ids of a text. "all": special tokens are matched. A lone surrogate is U+FFFD."""
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        try:
            with self.lock:  # other threads may encode, too
                self.package.encode_special_tokens = allowed_special != "all"
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
