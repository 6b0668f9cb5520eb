"""What a folder says of conversations: its chat template, in Jinja, and the tokens that end a generation."""

import json
from datetime import datetime
from pathlib import Path

import jinja2  # torch brings it
import jinja2.ext
import jinja2.sandbox

from model import InputError
from hf.tokenizer import end_of_text, optional_json, read_text, token_text


def _folder(path):
    return Path(path) if Path(path).is_dir() else Path(path).parent


def stop_tokens(path, encoding):
    """The ids that end a generation: eos_token_id of generation_config.json, else of config.json, else end_of_text; for a
    chat model, which has a chat template, tokenizer_config.json's eos_token besides. Raises InputError for broken files
    and for ids that are no token's."""
    folder = _folder(path)
    ids, file = None, None
    for name in ("generation_config.json", "config.json"):
        if ids is None:
            file, ids = folder / name, optional_json(folder / name).get("eos_token_id")
    ids = [end_of_text(encoding)] if ids is None else ids if isinstance(ids, list) else [ids]
    if not ids or not all(_is_token(encoding, index) for index in ids):
        raise InputError(f"{file}: expected an eos_token_id of the tokenizer's, but it is {ids}; mend the file")
    config = optional_json(folder / "tokenizer_config.json")
    eos = encoding._special_tokens.get(token_text(config.get("eos_token"))) if _template_source(folder)[1] else None
    return list(dict.fromkeys([*ids, *([] if eos is None else [eos])]))


def _is_token(encoding, index):
    return type(index) is int and 0 <= index <= encoding.max_token_value


def load_chat_template(path):
    """A folder's chat template: chat_template.jinja's, else tokenizer_config.json's (the "default" of several), else None.

    Raises InputError for files that are broken and a template that does not parse.
    """
    folder = _folder(path)
    file, source = _template_source(folder)
    if source is None:
        return None
    config = optional_json(folder / "tokenizer_config.json")
    named = optional_json(folder / "special_tokens_map.json") | config
    tokens = {key: token_text(value) for key, value in named.items() if key.endswith("_token")}
    return ChatTemplate(file, source, {key: text for key, text in tokens.items() if text is not None})


def _template_source(folder):
    """(file, text of its template or None)."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file, read_text(file)
    file = folder / "tokenizer_config.json"
    source = optional_json(file).get("chat_template")
    try:
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}["default"]
        if source is not None and not isinstance(source, str):
            raise TypeError(type(source).__name__)
    except (KeyError, TypeError) as error:
        raise InputError(f"{file}: expected a chat_template that is a text, or a list with one named default, but: "
                         f"{error}; mend the file") from error
    return file, source


class ChatTemplate:
    """Messages in, the text of the prompt out, as transformers' apply_chat_template renders it.

    Its ids are `encoding.encode(text, allowed_special="all")`, without the prefix: a template writes its own BOS.
    """

    def __init__(self, file, source, tokens):
        self.file, self.source, self.tokens = file, source, tokens
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self.template = environment.from_string(source)
        except Exception as error:
            raise InputError(f"{file}: expected a chat template, but: {_reason(error)}; mend the template") from error

    def render(self, messages, add_generation_prompt=True, **variables):
        """The text of messages, a list of {"role": ..., "content": ...}. variables: what else the template asks for,
        such as tools. Raises InputError, with the reason, when the template raises or leaves its sandbox."""
        given = dict(messages=messages, tools=None, documents=None, add_generation_prompt=add_generation_prompt)
        try:
            return self.template.render(**self.tokens | given | variables)
        except Exception as error:
            raise InputError(f"{self.file}: expected messages that the chat template takes, but: {_reason(error)}; "
                             "mend the messages or the template") from error


class Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: marks what the assistant wrote, for training; rendered as it stands."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """json, without jinja's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message):
    raise jinja2.TemplateError(message)


def _reason(error):
    line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
    return f"{line}{' '.join(str(error).split()) or type(error).__name__}"
