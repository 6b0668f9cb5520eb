"""A model's generation settings: chat template, stop tokens, sampling defaults."""

import contextlib
import copy
import itertools
import json
import re
from datetime import datetime
from functools import partial
from pathlib import Path

import jinja2.sandbox

from common.files import read_text
from common.values import one_line, warn
from hf.families import text_config
from hf.files import optional_part, part_file
from hf.paths import find_model, is_gguf
from hf.tokenizer_json import END_TOKENS
from model import InputError, expect

SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p")  # keys of generation_config.json
# Unsupported keys that change the output unless they are 0, null or empty (or 1: the first four)
NEUTRAL_AT_1 = "repetition_penalty", "typical_p", "guidance_scale", "num_beams"
NOT_APPLIED = (*NEUTRAL_AT_1, "no_repeat_ngram_size", "min_length", "min_new_tokens",
               "suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "forced_bos_token_id",
               "forced_eos_token_id", "sequence_bias", "penalty_alpha", "stop_strings")
REASONING = "reasoning_content", "reasoning", "thinking"  # names of a message's reasoning
CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "  # what transformers appends to a message to continue
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<|im_end|>", "<|eot_id|>", "<eos>")


def end_of_text(encoding):
    """The token id that separates documents: the first of SEPARATORS in the vocabulary, else the
    model's own end-of-sequence token. Raises InputError without any."""
    eos = token_text(optional_part(encoding.path, "tokenizer_config.json").get("eos_token"))
    ids = [encoding.special_tokens[text] for text in SEPARATORS if text in encoding.special_tokens]
    ids = ids or eos_ids(encoding.path, encoding) or [encoding.package.token_to_id(eos or "")]
    expect(ids[0] is not None, f"{encoding.path}: expected a tokenizer with one of "
           f"{' '.join(SEPARATORS)}, or an eos_token_id in config.json; add one")
    return ids[0]


def eos_ids(path, encoding):
    """eos_token_id of generation_config.json, else of config.json, as a list; None if neither has
    it. Raises InputError for bad ids."""
    config = optional_part(path, "config.json")
    sources = optional_part(path, "generation_config.json"), config, text_config(config)
    found = [raw["eos_token_id"] for raw in sources if raw.get("eos_token_id") is not None]
    if not found:
        return None
    ids = found[0] if isinstance(found[0], list) else found[:1]
    expect(ids and all(type(index) is int and 0 <= index < encoding.n_vocab for index in ids),
           f"{path}: eos_token_id in generation_config.json or config.json is {ids}, but the "
           f"tokenizer has ids 0 to {encoding.n_vocab - 1}; correct the file")
    return ids


def parse_arguments(message):
    """A message whose tool calls have objects as arguments, where they are strings with JSON."""
    calls = copy.deepcopy(message.get("tool_calls"))
    if not isinstance(calls, list):
        return message
    for call in calls:
        with contextlib.suppress(AttributeError, TypeError, ValueError, RecursionError):  # no JSON
            call = call.get("function", call)
            arguments = call.get("arguments").strip() or "{}"
            if isinstance(value := json.loads(arguments), dict):
                call["arguments"] = value
    return message | dict(tool_calls=calls)


def token_text(token):
    """The text of a token in tokenizer_config.json, a str or a dict with "content"; else None."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def stop_tokens(path, encoding):
    """The token ids that end generation: eos_token_id of generation_config.json, else of
    config.json, else end_of_text. A chat template adds the eos_token of tokenizer_config.json and
    the END_TOKENS that it contains. A GGUF file, and a folder whose generation_config.json names no
    token, end at all END_TOKENS of the vocabulary. Raises InputError for bad ids."""
    ids = eos_ids(path, encoding) or [end_of_text(encoding)]
    template = encoding.template
    said = optional_part(path, "generation_config.json").get("eos_token_id")
    # many GGUF files of chat models only name the base model's eos token
    is_open = said is None or is_gguf(find_model(path))
    ends = [text for text in END_TOKENS if is_open or template and text in template.sources]
    if template:
        ends.append(token_text(optional_part(path, "tokenizer_config.json").get("eos_token")))
    ids = ids + [encoding.special_tokens[text] for text in ends if text in encoding.special_tokens]
    return list(dict.fromkeys(ids))


def sampling_defaults(path, unsaid=None):
    """generation_config.json's values of SAMPLING_KEYS, unchecked; greedy unless do_sample is true.
    unsaid: other values to use where do_sample is missing."""
    config = optional_part(path, "generation_config.json")
    if config.get("do_sample") is not True:
        return unsaid if unsaid and config.get("do_sample") is None else dict(temperature=0.0)
    values = {name: config[name] for name in SAMPLING_KEYS if config.get(name) is not None}
    return dict(temperature=1.0) | values


def not_applied(path):
    """{key: value} of the settings in generation_config.json that we do not support."""
    config = optional_part(path, "generation_config.json")
    return {name: config[name] for name in NOT_APPLIED
            if config.get(name) and not (name in NEUTRAL_AT_1 and config[name] == 1)}


def load_chat_template(path, template=None):
    """The model's ChatTemplate, or None. template: a file to read in its place."""
    templates = find_templates(path, template)
    if not templates:
        return None
    settings = optional_part(path, "special_tokens_map.json")  # used by older checkpoints
    settings |= optional_part(path, "tokenizer_config.json")
    tokens = {key: text for key, value in settings.items()
              if key.endswith("_token") and (text := token_text(value)) is not None}
    adds_bos = is_gguf(find_model(path)) and settings.get("add_bos_token")
    return ChatTemplate(*templates["default"], tokens, templates.get("tool_use"),
                        tokens["bos_token"] if adds_bos else "")


def find_templates(path, template=None):
    """{name: (file, source)} of the chat templates, {} without any; one is "default". template: a
    file that replaces them."""
    if template:
        return dict(default=(template, read_text(Path(template))))
    path = find_model(path)
    for name in ("tokenizer_config.json", "chat_template.json"):
        file = part_file(path, name)
        source = optional_part(path, name).get("chat_template")
        if source is not None:
            break
    entries = source if isinstance(source, list) else [dict(name="default", template=source)]
    named = {str(entry.get("name")): (file, entry["template"]) for entry in entries
             if isinstance(entry, dict) and entry.get("template") is not None}
    own = dict(default=path / "chat_template.jinja",
               tool_use=path / "additional_chat_templates" / "tool_use.jinja")
    named |= {name: (file, read_text(file)) for name, file in own.items() if file.exists()}
    is_valid = "default" in named and all(isinstance(source, str) for _, source in named.values())
    expect(is_valid or source is None and not named,
           f"{file}: chat_template must be a string, or a list with a template named default")
    return named


class ChatTemplate:
    """Renders messages as a prompt, like transformers' apply_chat_template. Encode the text with
    `encoding.encode(text, allowed_special="all")`: the template writes its own BOS token, or it is
    `begin`, which any text has once. tool_use: (file, source) of the one for chats with tools."""

    def __init__(self, file, source, variables, tool_use=None, begin=""):
        self.with_tools = tool_use and ChatTemplate(*tool_use, variables, begin=begin)
        self.begin = begin
        self.file = file
        self.source = source
        self.variables = variables  # default options of `render`, such as the special tokens' texts
        known = [name for name in REASONING if re.search(rf"\.{name}\b|(['\"]){name}\1", source)]
        self.names = {name: known[0] for name in REASONING if known and name not in known}
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # no HTML escapes
        environment.globals["raise_exception"] = partial(expect, False)
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        # {% generation %} blocks mark the assistant's text and render nothing themselves
        source = re.sub(r"(\{%[-+]?\s*(end)?)generation(?=\s*[-+]?%\})", r"\1with", source)
        with self.named_errors():
            self.template = environment.from_string(source)

    @property
    def takes_tools(self):
        return bool(self.with_tools) or "tools" in self.source

    @property
    def sources(self):
        return self.source + (self.with_tools.source if self.with_tools else "")

    def render(self, messages, /, **options):
        """Renders messages [{"role", "content", ...}] to text, ignoring None values. Role
        "developer" becomes "system" unless the template mentions it, and reasoning has the name
        that it mentions. options: add_generation_prompt (default: True): append the start of an
        assistant turn; continue_final_message: leave the last message open instead; others are
        variables of the template, such as tools; a warning says if it ignores these. Raises
        InputError if the template fails."""
        failed = None
        options = self.variables | options
        if options.get("tools") and self.with_tools:
            return self.with_tools.render(messages, **options)
        if options.get("tools") and not self.takes_tools:
            warn(f"{self.file}: the chat template ignores tools")
        with self.named_errors():
            if options.get("continue_final_message"):
                expect(isinstance(messages[-1].get("content"), str),
                       "continue_final_message needs a text")
            for variant in self.variants(messages):
                try:
                    text = self.render_once(variant, **options)
                    return self.begin + text.removeprefix(self.begin)
                except Exception as error:  # a template can raise anything
                    failed = failed or error
            raise failed

    def variants(self, messages):
        """Yields the messages as templates may need them: without a content where there is none,
        else with null, else with an empty string; with the arguments of tool calls as objects, else
        as the strings that they are in OpenAI's format."""
        contents = {}, dict(content=None), dict(content="")
        for default, read in itertools.product(contents, (parse_arguments, dict)):
            yield [default | self.named(read(message)) for message in messages]

    def named(self, message):
        """A message without None values, and with the names that the template knows."""
        message = {self.names.get(name, name): x for name, x in message.items() if x is not None}
        if message.get("role") == "developer" and "developer" not in self.source:
            message["role"] = "system"
        return message

    def render_once(self, messages, /, add_generation_prompt=True, continue_final_message=False,
                    **variables):
        if continue_final_message:
            content = messages[-1]["content"]
            messages = [*messages[:-1], messages[-1] | dict(content=content + CONTINUE)]
        text = self.template.render(
            dict(tools=None, documents=None) | variables | dict(
                messages=messages,
                add_generation_prompt=add_generation_prompt and not continue_final_message))
        if not continue_final_message:
            return text
        prompt, tag, _ = text.rpartition(CONTINUE.strip())
        expect(tag and content.strip() in prompt, "the template changes the final message")
        return prompt if CONTINUE in text else prompt.rstrip()  # the template strips messages

    @contextlib.contextmanager
    def named_errors(self):
        """Turns any error inside into an InputError that names the file."""
        try:
            yield
        except Exception as error:  # a template can raise anything
            line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
            reason = one_line(error) or type(error).__name__
            raise InputError(f"{self.file}: cannot render messages: {line}{reason}") from error
