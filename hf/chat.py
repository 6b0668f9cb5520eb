"""A model's settings for generation: chat template, stop tokens, sampling."""

import contextlib
import json
import re
from datetime import datetime
from functools import partial

import jinja2.sandbox

from hf.families import text_config
from hf.files import optional_part, part_file
from hf.paths import find_model, is_gguf
from hf.text import read_text
from model import InputError, expect

SAMPLING = ("temperature", "top_k", "top_p", "min_p")  # keys of generation_config.json
# others that change a text, unless 0, null or empty; the first four unless 1, too
NOT_APPLIED = (
    "repetition_penalty", "typical_p", "guidance_scale", "num_beams", "no_repeat_ngram_size",
    "min_length", "min_new_tokens", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids",
    "forced_bos_token_id", "forced_eos_token_id", "sequence_bias", "penalty_alpha", "stop_strings")
ENDS = "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"  # of a chat turn
UNFINISHED = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers' mark, where a message goes on
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<|im_end|>", "<|eot_id|>", "<eos>")


def end_of_text(encoding):
    """The id that separates documents: the first of SEPARATORS that the encoding has."""
    ids = [encoding.special_tokens[text] for text in SEPARATORS if text in encoding.special_tokens]
    expect(ids, f"expected a tokenizer with one of {' '.join(SEPARATORS)}; add one to it")
    return ids[0]


def token_text(token):
    """The text of a token in tokenizer_config.json: a str, a dict with "content", or null."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def stop_tokens(path, encoding):
    """The ids that end a generation: eos_token_id of generation_config.json, else of config.json,
    else end_of_text; with a chat template tokenizer_config.json's eos_token, too, and those of
    ENDS that it writes, or of a GGUF file all."""
    files = [optional_part(path, name) for name in ("generation_config.json", "config.json")]
    settings = [raw.get("eos_token_id") for file in files for raw in (file, text_config(file))]
    ids = next((ids for ids in settings if ids is not None), None)
    ids = end_of_text(encoding) if ids is None else ids
    ids = ids if isinstance(ids, list) else [ids]
    expect(ids and all(type(index) is int and 0 <= index < encoding.n_vocab for index in ids),
           f"{path}: the tokenizer has no ids {ids}, the eos_token_id of generation_config.json or "
           "config.json; correct the file")
    template = find_template(path)[1]
    if template:
        eos = token_text(optional_part(path, "tokenizer_config.json").get("eos_token"))
        # GGUF files often have no other end than a base model's
        ends = [eos, *(text for text in ENDS if text in template or is_gguf(find_model(path)))]
        ids = ids + [encoding.special_tokens[text] for text in ends
                     if text in encoding.special_tokens]
    return list(dict.fromkeys(ids))


def sampling_defaults(path):
    """generation_config.json's values for SAMPLING, unchecked; greedy unless do_sample is true."""
    config = optional_part(path, "generation_config.json")
    if config.get("do_sample") is not True:
        return dict(temperature=0.0)
    values = {name: config[name] for name in SAMPLING if config.get(name) is not None}
    return dict(temperature=1.0) | values


def not_applied(path):
    """{name: value} of generation_config.json's values that would change a text, but do not."""
    config = optional_part(path, "generation_config.json")
    return {name: config[name] for name in NOT_APPLIED
            if config.get(name) and (config[name] != 1 or name not in NOT_APPLIED[:4])}


def load_chat_template(path):
    """The model's ChatTemplate, or None."""
    file, source = find_template(path)
    if source is None:
        return None
    settings = optional_part(path, "special_tokens_map.json")  # the older file
    settings |= optional_part(path, "tokenizer_config.json")
    tokens = {key: text for key, value in settings.items()
              if key.endswith("_token") and (text := token_text(value)) is not None}
    return ChatTemplate(file, source, tokens)


def find_template(path):
    """(file, its template or None). Of several templates, the one named default."""
    path = find_model(path)
    file = path / "chat_template.jinja"
    if file.exists():
        return file, read_text(file)
    for name in ("tokenizer_config.json", "chat_template.json"):
        file = part_file(path, name)
        source = optional_part(path, name).get("chat_template")
        if source is not None:
            break
    if isinstance(source, list):
        source = next((entry.get("template") for entry in source
                       if isinstance(entry, dict) and entry.get("name") == "default"), source)
    expect(isinstance(source, str | None),
           f"{file}: chat_template must be a text or a list with one named default")
    return file, source


class ChatTemplate:
    """Turns messages into the text of a prompt, as transformers' apply_chat_template does. Its ids
    are `encoding.encode(text, allowed_special="all")`: a template writes its own BOS token."""

    def __init__(self, file, source, tokens):
        self.file = file
        self.source = source
        self.tokens = tokens
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # no HTML escapes
        environment.globals["raise_exception"] = partial(expect, False)
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        # {% generation %} ... {% endgeneration %} mark what the assistant wrote, without output
        source = re.sub(r"(\{%[-+]?\s*(end)?)generation(?=\s*[-+]?%\})", r"\1with", source)
        with self.named_errors():
            self.template = environment.from_string(source)

    def render(self, messages, /, add_generation_prompt=True, continue_final_message=False,
               **variables):
        """The text of messages [{"role", "content", ...}], without what is None in them. variables:
        the template's, such as tools. A developer is the system, unless the template knows both.
        add_generation_prompt: whether it ends where the assistant begins; but with
        continue_final_message it ends where the last message does."""
        with self.named_errors():
            messages = [{name: value for name, value in message.items() if value is not None}
                        for message in messages]
            for message in messages:
                if message.get("role") == "developer" and "developer" not in self.source:
                    message["role"] = "system"
            if continue_final_message:
                content = messages[-1].get("content")
                expect(isinstance(content, str), "continue_final_message needs a text")
                messages[-1]["content"] += UNFINISHED
            text = self.template.render(
                dict(tools=None, documents=None) | self.tokens | variables | dict(
                    messages=messages,
                    add_generation_prompt=add_generation_prompt and not continue_final_message))
            if not continue_final_message:
                return text
            shown, mark, _ = text.rpartition(UNFINISHED.strip())
            expect(mark and content.strip() in shown, "the template changes the final message")
            return shown if UNFINISHED in text else shown.rstrip()

    @contextlib.contextmanager
    def named_errors(self):
        """Turns any error into an InputError that names the file."""
        try:
            yield
        except Exception as error:  # a template can raise anything
            line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise InputError(f"{self.file}: cannot render messages: {line}{reason}") from error
