"""Structured output: which tokens a JSON schema, a regular expression or a grammar allows next. The
package llguidance compiles and matches them; it is imported when the first one is needed."""

import copy
import json
import re

import numpy as np

from common.values import one_line
from hf.bpe import any_of
from model import InputError, expect

# They bound the time of a mask: 25 ms at worst with 49 thousand tokens, of these 7 of the lexer. An
# object with 1,000 optional properties takes 12; by default, ambiguous grammars take 590.
LIMITS = dict(max_items_in_row=5000, step_max_items=5000, step_lexer_fuel=200_000)
FORCED_BYTES = 512  # of forced text that are tokenized at once
SPECIAL = rb"\xff\[(\d+)\]"  # in forced text, the token of this id
# how JSON is written, as by json.dumps: with one choice, most of a document's structure is forced;
# where a value could match several schemas of a oneOf, it may do so
JSON_STYLE = dict(item_separator=", ", key_separator=": ", whitespace_flexible=False,
                  coerce_one_of=True)
# of JSON schemas: formats that llguidance checks, and pydantic's for UUID4
FORMATS = {name: dict(format=name) for name in
           "date-time date time duration email hostname ipv4 ipv6 uri uuid".split()}
FORMATS["uuid4"] = dict(pattern=r"^[\da-f]{8}-[\da-f]{4}-4[\da-f]{3}-[89ab][\da-f]{3}-[\da-f]{12}$")
DRAFTS = r"(http://json-schema.org/draft-0\d|https://json-schema.org/draft/20[\d-]+)/schema#?"
NEUTRAL = dict(uniqueItems=[False], propertyNames=[True, {}, dict(type="string")])  # allow all
# signs of bounds; those beyond 64-bit integers, such as of float64, are no bounds in practice, and
# too long for an expression
BOUNDS = dict(minimum=-1, exclusiveMinimum=-1, maximum=1, exclusiveMaximum=1)
FAR = 2**63 - 1
LOOK_AROUND = re.compile(r"\(\?<?[=!]|\\[1-9]")  # and references, in patterns
NAMED = "properties", "patternProperties", "$defs", "definitions", "dependentSchemas"
VALUES = "const", "enum", "default", "example", "examples"  # not schemas


class GrammarTokenizer:
    """Compiles grammars for a model's tokenizer. encoding: its `Encoding`. vocab_size: V of the
    model. stop: the ids that end its text. Takes 0.4 s for 49 thousand tokens, 4.5 s for 262."""

    def __init__(self, encoding, vocab_size, stop):
        try:
            import llguidance
        except ImportError as error:
            raise InputError("structured output (JSON schemas, grammars) needs one more package: "
                             f"pip install llguidance ({error})") from None
        self.stop = [token for token in stop if isinstance(token, int)]
        self.llguidance = llguidance
        self.words = -(-vocab_size // 32)  # int32 of a mask
        self.encoding = encoding
        try:
            self.package = llguidance.LLTokenizer(rename_special_tokens(encoding.package),
                                                  n_vocab=vocab_size, eos_token=self.stop)
        except ValueError as error:
            raise InputError(f"{encoding.file}: llguidance cannot use this tokenizer "
                             f"({one_line(error)}); use the model's own") from None

    def compile(self, kind, source):
        """A `Grammar`. kind: "json_schema" (source: a dict or its text), "regex", "choice" (a list
        of texts), "lark", "gbnf" (llama.cpp's notation), or "tools" (a `hf.calls.Tools`). Raises
        InputError."""
        made = self.llguidance
        if kind == "tools":
            return source.compile(self)
        try:
            if kind == "json_schema":
                # as text: objects that are nested too deeply would crash the conversion
                text = made.LLMatcher.grammar_from_json_schema(schema_text(source))
            elif kind == "choice":
                # one terminal: llguidance's own "choice" has a parser item for each text
                texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in source)
                text = made.grammar_from("grammar", f"start: CHOICE\nCHOICE: {texts}")
            elif kind == "gbnf":
                text = made.grammar_from("lark", made.gbnf_to_lark.gbnf_to_lark(source))
            else:
                text = made.grammar_from(kind, source)
        except Exception as error:  # gbnf_to_lark raises no other
            raise InputError(f"not a {kind} that llguidance supports: {one_line(error)}") from None
        limits = made.LLParserLimits(**LIMITS, verbose_errors=False)
        return Grammar(self, made.LLMatcher(self.package, text, log_level=0, limits=limits))


def rename_special_tokens(package):
    """A tokenizer.json of a package in which no text has the name of a special token, or of one in
    angle brackets: llguidance would write a text such as <filename> as this token, which grammars
    forbid. Merges that make or use such a token go, too."""
    added = package.get_added_tokens_decoder().values()
    names = {token.content for token in added
             if token.special or re.fullmatch("(?s)<.*>", token.content)}
    described = json.loads(package.to_str())
    model = described["model"]
    if model.get("merges"):
        model["merges"] = [pair for pair in model["merges"]
                           if names.isdisjoint((*pair, "".join(pair)))]
    text = json.dumps(described, ensure_ascii=False)
    quoted = {json.dumps(name, ensure_ascii=False) for name in names}
    rename = lambda match: f'"<\uffff{match[0][1:-1]}>"'  # U+FFFF is no character
    return re.sub(any_of(quoted), rename, text) if names else text


def schema_text(schema, lenient=False):
    """The JSON of a schema, an object or its text, for llguidance. lenient: it ignores keywords
    that it does not support."""
    schema = json.loads(schema) if isinstance(schema, str) else schema
    schema = supported(schema, lenient)
    if isinstance(schema, dict):
        own = schema.get("x-guidance", {})
        schema = schema | {"x-guidance": JSON_STYLE | dict(lenient=lenient) | own}
    return json.dumps(schema, allow_nan=False)


def supported(schema, lenient=False):
    """A JSON schema without formats that llguidance does not know, keywords that are null or have
    NEUTRAL values, bounds beyond FAR, and $schemas other than DRAFTS. lenient: also without the
    patterns that it refuses."""
    if isinstance(schema, list):
        return [supported(part, lenient) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key in VALUES:
            kept[key] = value
        elif key in NAMED and isinstance(value, dict):
            kept[key] = {name: supported(part, lenient) for name, part in value.items()}
        elif key == "format" and isinstance(value, str):
            kept = FORMATS.get(value, {}) | kept
        elif not is_ignored(key, value, lenient):
            kept[key] = supported(value, lenient)
    return kept


def is_ignored(key, value, lenient):
    if key == "$schema":
        return not re.fullmatch(DRAFTS, str(value))
    if key == "pattern" and lenient:
        return bool(LOOK_AROUND.search(str(value)))
    if key in BOUNDS and isinstance(value, int | float):
        return value * BOUNDS[key] >= FAR
    return value is None or value in NEUTRAL.get(key, ())


class Grammar:
    """What an output must match. Only its first mask is checked: others may exceed a limit, which
    ends the sequence. begin: the id of a token that must come first, such as </think>:
    until it comes, all tokens are allowed. tools: the `hf.calls.Tools` whose calls it describes.
    Raises InputError for a grammar that is wrong or too large."""

    begin = tools = None

    def __init__(self, tokenizer, matcher):
        self.tokenizer = tokenizer
        self.stop = tokenizer.stop
        self.matcher = matcher
        self.mask = np.empty(tokenizer.words, np.int32)
        fill_mask(matcher, self.mask)
        expect(not matcher.is_error(), f"the grammar cannot be used: {error_of(matcher)}")

    def start(self):
        """The `Matcher` of a sequence."""
        return Matcher(self)

    def for_prompt(self, prompt):
        """This grammar, which begins after </think> if the prompt, token ids, ends in <think>."""
        encoding = self.tokenizer.encoding
        if not encoding.decode(prompt[-16:]).rstrip().endswith("<think>"):
            return self
        begin = encoding.special_tokens.get("</think>")
        expect(begin is not None, "the prompt ends in <think>, and no token is </think>, after "
               "which structured output could begin; give enable_thinking=False")
        later = copy.copy(self)
        later.begin = begin
        return later


class Matcher:
    """A grammar's state after the tokens of a sequence. mask, int32 [ceil(V / 32)]: the tokens
    allowed next, one per bit. ended: None, "stop" if only an end of text may follow, or "error".
    error: why."""

    def __init__(self, grammar):
        self.grammar = grammar
        self.waits = grammar.begin is not None  # for that token
        self.mask = np.full_like(grammar.mask, -1) if self.waits else grammar.mask.copy()
        self.matcher = grammar.matcher.deep_copy()
        self.ended = None
        self.error = ""

    def masks(self, tokens, parents, out):
        """The masks of a draft tree's n nodes -> out, int32 [T, ceil(V / 32)], all bits set where
        no sequence can get to, and from row n on. Returns False if the grammar is too ambiguous
        for a node: the tree must not be used beyond its root."""
        out[0] = self.mask
        out[1:] = -1
        children = [[] for _ in tokens]
        for node, parent in enumerate(parents[1:], start=1):
            children[parent].append(node)
        if not children[0]:
            return True
        begin = self.grammar.begin
        probe = self.matcher.deep_copy()  # keeps errors of guesses from the sequence; takes 1 us

        def visit(node, waits):
            for child in children[node]:
                token = tokens[child]
                if token in self.grammar.stop or not out[node, token >> 5] >> (token & 31) & 1:
                    continue
                if waits:
                    if token == begin:
                        out[child] = self.grammar.mask
                    visit(child, token != begin)
                    continue
                probe.consume_token(token)
                fill_mask(probe, out[child])
                if not probe.is_error():
                    visit(child, False)
                    probe.rollback(1)
                if probe.is_error():
                    return
        visit(0, self.waits)
        return not probe.is_error()

    def forced(self):
        """The ids of the text that must come next, as far as it is known; [] where there is a
        choice."""
        if self.waits or self.ended:
            return []
        package = self.grammar.tokenizer.package
        tokens = []
        parts = re.split(SPECIAL, self.matcher.compute_ff_bytes()[:FORCED_BYTES])
        for number, part in enumerate(parts):
            tokens += [int(part)] if number % 2 else package.tokenize_bytes(part)
        return tokens

    def take(self, tokens):
        """Appends a step's tokens; returns how many. Fewer than all if the output `ended`."""
        for number, token in enumerate(tokens, start=1):
            if self.waits:
                self.waits = token != self.grammar.begin
                continue
            self.matcher.consume_token(token)
            if self.matcher.is_stopped():  # also after an error
                return self.end(number)
        if not self.waits:
            fill_mask(self.matcher, self.mask)
            if self.matcher.is_error():
                return self.end(len(tokens) + 1)
        return len(tokens)

    def end(self, number):
        """Ends the output after `number` tokens, or before the last of them if it failed."""
        self.error = error_of(self.matcher)
        self.ended = "error" if self.error else "stop"
        return number - bool(self.error)


def fill_mask(matcher, mask):
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)


def error_of(matcher):
    return one_line(matcher.get_error().removesuffix("<non-verbose/>"))
