"""What a folder says about generating: a chat template, the tokens that end a text, sampling."""

import contextlib
import json
import sys
import time
from datetime import datetime
from functools import partial
from pathlib import Path

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from clover import read_record
from hf.families import text_config
from hf.tokenizer import end_of_text, load_encoding, optional_json, token_settings, token_text
from model import InputError

SAMPLING = ("temperature", "top_k", "top_p", "min_p")  # keys of generation_config.json
MAX_SECONDS = 5      # that a template may take; milliseconds are usual
MAX_LENGTH = 10**7   # characters that it may give


# --------------------------------------------------------------------------------------------------
# A folder's files

def stop_tokens(path, encoding):
    """The ids that end a generation: eos_token_id of generation_config.json, else of config.json,
    else end_of_text; with a chat template tokenizer_config.json's eos_token, too. Raises InputError
    for ids that the tokenizer does not have."""
    folder = Path(path)
    for file in (folder / "generation_config.json", folder / "config.json"):
        settings = optional_json(file)
        ids = settings.get("eos_token_id")
        ids = text_config(settings).get("eos_token_id") if ids is None else ids
        if ids is not None:
            break
    ids = [end_of_text(encoding)] if ids is None else ids if isinstance(ids, list) else [ids]
    if not ids or not all(type(index) is int and 0 <= index < encoding.n_vocab for index in ids):
        raise InputError(f"{file}: expected an eos_token_id of the tokenizer's, but it is {ids}; "
                         "correct the file")
    text = token_text(optional_json(folder / "tokenizer_config.json").get("eos_token"))
    if _template_source(folder)[1] and text in encoding.special_tokens:
        ids = [*ids, encoding.special_tokens[text]]
    return list(dict.fromkeys(ids))


def sampling_defaults(path):
    """How generation_config.json says to sample, unchecked: a dict with "temperature", and what
    else of SAMPLING it holds. Without a do_sample that is true it is {"temperature": 0.0}."""
    config = optional_json(Path(path) / "generation_config.json")
    if config.get("do_sample") is not True:
        return dict(temperature=0.0)
    found = {name: config[name] for name in SAMPLING if config.get(name) is not None}
    return dict(temperature=1.0) | found


def load_chat_template(path):
    """A folder's ChatTemplate: from chat_template.jinja, else tokenizer_config.json, else
    chat_template.json, which folders of models that read pictures have, else None. Of several
    templates the one named "default" is taken."""
    file, source = _template_source(Path(path))
    if source is None:
        return None
    texts = {key: token_text(value) for key, value in token_settings(Path(path)).items()
             if key.endswith("_token") and token_text(value) is not None}
    return ChatTemplate(file, source, texts)


def _template_source(folder):
    """(file, text of its template or None)."""
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return file, file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{file}: expected UTF-8, but: {error}; fetch it again") from error
    for name in ("tokenizer_config.json", "chat_template.json"):
        file = folder / name
        source = optional_json(file).get("chat_template")
        if source is not None:
            break
    if isinstance(source, list):
        entries = (entry for entry in source if isinstance(entry, dict))
        named = (entry for entry in entries if entry.get("name") == "default")
        source = next(named, {}).get("template", source)
    if not isinstance(source, str | None):
        raise InputError(f"{file}: expected a chat_template that is a text, or a list with one "
                         f"named default, not a {type(source).__name__}; correct the file")
    return file, source


def describe_texts(path, vocab_size):
    """What generate.py takes from a folder beside the weights, and what it lacks there, in lines of
    text. vocab_size: the model's."""
    lacks = []

    def read(load):
        try:
            return load()
        except InputError as error:
            lacks.append(str(error))

    ends, tokenizer = "", "cannot be read"
    if encoding := read(lambda: load_encoding(path)):
        special = {index: text for text, index in encoding.special_tokens.items()}
        names = lambda ids: " ".join(special.get(index, str(index)) for index in ids)
        tokenizer = f"{encoding.n_vocab:,} tokens"
        if encoding.prefix:
            tokenizer += f", {names(encoding.prefix)} before a prompt"
        if encoding.max_token_value >= vocab_size:
            lacks.append(f"a tokenizer of the model's own: this one has ids up to "
                         f"{encoding.max_token_value}, the model {vocab_size} embeddings")
        ends = names(read(lambda: stop_tokens(path, encoding)) or [])
    template = read(lambda: load_chat_template(path))
    sampling = read(lambda: sampling_defaults(path)) or {}
    sampling = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in sampling.items())
    heads = [read(lambda: describe_heads(file)) for file in sorted(Path(path).glob("*/heads.json"))]
    return f"""\
tokenizer     {tokenizer}
chat          {f"template of {template.file.name}" if template else "no template, so no --chat"}
a text ends   at {" or ".join(filter(None, (ends, "the end of the context")))}
sampling      {sampling.replace("temperature 0.0", "greedy")}, unless flags say otherwise
draft heads   {"; ".join(filter(None, heads)) or "none beside it: lookup drafts (train_heads.py)"}
generate.py   {"lacks " + "; ".join(lacks) if lacks else "has all that it needs"}"""


def describe_heads(file):
    """A heads.json in a few words. It is not checked that the heads are this model's."""
    config, record = read_record(file)
    words = f"{file.parent.name}/ ({config.preset}, {config.n_draft} heads"
    if found := record.get("tokens_per_step"):
        words += f", {found:.2f} tokens per step"
    return words + ")"


# --------------------------------------------------------------------------------------------------
# Templates

class ChatTemplate:
    """Turns messages into the text of a prompt, as transformers' apply_chat_template does.

    The prompt's ids are `encoding.encode(text, allowed_special="all")`, without `encoding.prefix`:
    a template writes its own BOS token."""

    def __init__(self, file, source, tokens):
        self.file = file
        self.source = source
        self.tokens = tokens
        extensions = [Generation, jinja2.ext.loopcontrols]
        environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        with self._named_errors():
            self.template = environment.from_string(source)

    def render(self, messages, add_generation_prompt=True, **variables):
        """The text of messages, a list of {"role": ..., "content": ...}. variables: what else the
        template uses, such as tools. Raises InputError, with the reason, if the template raises,
        leaves its sandbox or does not end."""
        given = dict(messages=messages, tools=None, documents=None,
                     add_generation_prompt=add_generation_prompt)
        text = ""
        previous = sys.gettrace()
        with self._named_errors():
            sys.settrace(_time_limit(MAX_SECONDS))  # checks at each line of the compiled template
            try:
                for part in self.template.generate(**self.tokens | given | variables):
                    text += part
                    if len(text) > MAX_LENGTH:
                        raise OverflowError(f"it gives more than {MAX_LENGTH} characters")
            finally:
                sys.settrace(previous)
        return text

    @contextlib.contextmanager
    def _named_errors(self):
        try:
            yield
        except Exception as error:  # a template can raise anything
            line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise InputError(f"{self.file}: cannot render these messages: {line}{reason}; correct "
                             "the messages or the template") from error


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, without what a single expression could spend hours or gigabytes on."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, **options):
        super().__init__(**options)
        self.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # not escaped for HTML
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        del self.globals["lipsum"]  # it makes texts of any length

    def call_binop(self, context, operator, left, right):
        sizes = [abs(x) if isinstance(x, (int, float)) else len(x) for x in (left, right)]
        if operator == "**" or sizes[0] * sizes[1] > 10**9:
            raise OverflowError(f"{operator} of numbers this large")
        return super().call_binop(context, operator, left, right)


class Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} mark what the assistant wrote, and give no text."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _raise(message):
    raise jinja2.TemplateError(message)


def _time_limit(seconds):
    """A function for sys.settrace that raises TimeoutError after this many seconds."""
    end = time.monotonic() + seconds

    def check(frame, event, arg):
        if time.monotonic() > end:
            raise TimeoutError(f"it takes more than {seconds} seconds")
        return check

    return check
