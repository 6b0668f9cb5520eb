"""hf/grammar.py, and decoding under grammars: output is valid, and that of plain decoding under the same grammar."""

import json
import random
import re
import string
from functools import cache
from itertools import cycle

import pytest
import torch

from backends import cpu
from clover import CloverHeads
from generate import Policy, Sampling, prepare
from hf.chat import stop_tokens
from hf.tokenizer import load_encoding
from model import GPT
from test_generate import new_engine
from tools.flags import DEMO

pytest.importorskip("llguidance")
from hf.grammar import GrammarTokenizer  # noqa: E402

N = 60  # new tokens of each prompt


@cache
def load(name="demo", dtype="float32", packed=None):
    """(model, heads, encoding, its GrammarTokenizer)"""
    path = DEMO if name == "demo" else name
    encoding = load_encoding(path)
    model = GPT.from_pretrained(path, getattr(torch, dtype), "cpu", packed)
    heads = CloverHeads.from_pretrained(DEMO / ("clover" if name == "demo" else name), model)
    return model, heads, encoding, GrammarTokenizer(encoding, model.config.vocab_size, stop_tokens(path, encoding))


# ---------------------------------------------------------------------------------------------------------------------
# Random schemas and regular expressions

def random_schema(rng, depth=0):
    """A JSON schema of supported keywords whose documents are short enough to end."""
    kinds = ["string", "integer", "number", "boolean", "enum", "null", "ref", "const", "pattern"]
    kind = rng.choice(kinds + 3 * ["object"] + ["array", "anyOf"] if depth < 3 else kinds)
    low = rng.randint(-20, 20)
    many = lambda n: [random_schema(rng, depth + 1) for _ in range(rng.randint(1, n))]
    match kind:
        case "enum":
            return dict(enum=rng.sample(["red", "green", "b l u e", 1, 2.5, None, True, "ü"], 3))
        case "const":
            return dict(const=rng.choice(["a constant", 7, [1, 2], {"a": None}]))
        case "ref":
            return {"$ref": "#/$defs/point"}
        case "pattern":
            return dict(type="string", pattern=rng.choice(["^[A-Z]{3}-[0-9]{2}$", "^(yes|no)$", "^[a-f]{1,9}$"]))
        case "string":
            return dict(type="string", maxLength=rng.randint(1, 12))
        case "integer" | "number":
            return dict(type=kind, minimum=low, maximum=low + rng.randint(1, 500))
        case "array":
            return dict(type="array", items=random_schema(rng, depth + 1), minItems=rng.randint(0, 1), maxItems=2)
        case "anyOf":
            return dict(anyOf=many(2))
        case "object":
            names = rng.sample(["id", "name", "first name", "x", "größe", "list", "value"], rng.randint(1, 4))
            return dict(type="object", properties={name: random_schema(rng, depth + 1) for name in names},
                        required=[name for name in names if rng.random() < 0.7], additionalProperties=False)
    return dict(type=kind)


def document_schema(rng):
    point = dict(type="object", properties=dict(x=dict(type="integer", minimum=0, maximum=9)), required=["x"],
                 additionalProperties=False)
    names = rng.sample(["title", "kind", "size", "parts", "note"], rng.randint(1, 3))
    return {"$defs": dict(point=point), "type": "object", "properties": {name: random_schema(rng, 1) for name in names},
            "required": names, "additionalProperties": False}


def random_regex(rng, depth=0):
    """A regular expression whose matches are short."""
    kind = rng.randint(0, 3 if depth < 3 else 1)
    if kind == 0:
        return re.escape("".join(rng.choices(string.ascii_letters + " .-é", k=rng.randint(1, 8))))
    if kind == 1:
        return f"[{''.join(rng.sample(string.ascii_lowercase, 4))}0-{rng.randint(1, 9)}]{{1,{rng.randint(1, 6)}}}"
    parts = [random_regex(rng, depth + 1) for _ in range(rng.randint(1, 3))]
    return f"({'|'.join(parts)})" if kind == 2 else "".join(parts)


def check_valid(kind, source, text, ended):
    if ended != "stop":
        assert ended == "length"
    elif kind == "regex":
        assert re.fullmatch(source, text), (source, text)
    else:
        pytest.importorskip("jsonschema").validate(json.loads(text), source)


SCHEMA_A = dict(type="object", properties=dict(a=dict(type="string")), required=["a"], additionalProperties=False)


def mask_after(grammar, tokens, path):
    """The mask after tokens and a path of guesses; all bits set if the path is forbidden."""
    matcher = grammar.start()
    matcher.take(tokens)
    for token in path:
        if token in grammar.stop or not matcher.mask[token >> 5] >> (token & 31) & 1:
            return [-1] * len(matcher.mask)
        matcher.take([token])
    return None if matcher.ended else matcher.mask.tolist()


@pytest.mark.parametrize("thinks", [False, True])
def test_masks_of_a_tree_are_those_of_its_paths(thinks):
    """Bug: a state left over from another branch, a bit of another token, a node below a forbidden one or an end of
    text that has consequences, a matcher that starts before or after the token that begins its output."""
    *_, encoding, tokenizer = load()
    tag, right = encoding.encode("#")[0], encoding.encode('{"a": "text"}')
    grammar = tokenizer.json_schema(SCHEMA_A, begin=tag if thinks else None)
    right, rng = [5, *tokenizer.stop, tag] * thinks + right, random.Random(1)
    matcher = grammar.start()
    for start in range(len(right)):
        tokens, parents = [0], [0]
        for token in right[start:]:
            tokens.append(token), parents.append(len(tokens) - 2)
        for _ in range(20):
            tokens.append(rng.choice([*right, *tokenizer.stop, rng.randrange(4096)]))
            parents.append(rng.randrange(len(parents)))
        out = grammar.mask[None].repeat(len(tokens) + 1, 0)
        assert matcher.masks(tokens, parents, out) and (out[-1] == -1).all()
        for node in range(len(tokens)):
            path, above = [], node
            while above:
                path, above = [tokens[above], *path], parents[above]
            if path[-1:] != [tag]:  # what follows a second tag is as good as any mask
                want = mask_after(grammar, right[:start], path)
                assert want is None or out[node].tolist() == want, (start, path)
        assert matcher.take(right[start:start + 1]) == 1
    assert matcher.ended == "stop" and not matcher.error


# ---------------------------------------------------------------------------------------------------------------------
# Decoding

MIXED = [Sampling(), Sampling(1.0, seed=3), Sampling(0.8, top_k=20, top_p=0.9, seed=5)]
PROMPT = "# a document\n"
# drafter, T, batch size, dtype, decoder
WAYS = [("schema", None, 1, "float32", "c"), ("heads+lookup+schema", None, 8, "bfloat16", "c"),
        ("heads+lookup+schema", 17, 3, "float32", "c"), ("lookup", 5, 8, "float32", "c"),
        ("heads", 5, 1, "bfloat16", "c"), ("heads+lookup+schema", None, 3, "float32", "torch"),
        ("schema", 17, 8, "float32", "torch"), ("heads+lookup+schema", 9, 3, "float32", "ahead"),
        ("lookup+schema", None, 8, "float32", "ahead"), ("schema", 5, 1, "float32", "ahead")]


def random_grammars(tokenizer, seeds):
    """[(kind, source, grammar)]; every fourth is None, for a sequence without a grammar."""
    made = []
    for seed in seeds:
        rng, kind = random.Random(seed), ("json_schema", "json_schema", "regex", None)[seed % 4]
        source = dict(json_schema=document_schema, regex=random_regex).get(kind, lambda _: None)(rng)
        made.append((kind, source, kind and getattr(tokenizer, kind)(source)))
    return made


def run(engine, prompts, grammars, samplings, stop):
    return engine.generate(prompts, N, stop, sampling=samplings, grammars=grammars)


@pytest.mark.parametrize("drafter, tree_size, batch_size, dtype, decoder", WAYS)
def test_output_is_valid_and_that_of_plain_decoding(drafter, tree_size, batch_size, dtype, decoder):
    """Bug: a mask of another node, row or slot, a guess accepted that the grammar forbids, a matcher that lags behind
    or is ahead, a token after the end, sequences with and without grammars that change each other."""
    if decoder == "c" and cpu.library() is None:
        pytest.skip("there is no C compiler")
    model, heads, encoding, tokenizer = load("demo", dtype, packed=None if decoder == "c" else False)
    grammars = random_grammars(tokenizer, range(len(WAYS)))
    prompts = [encoding.encode(PROMPT) + encoding.encode(str(n)) * n for n in range(len(grammars))]
    given = [grammar for *_, grammar in grammars]
    samplings = [way for way, _ in zip(cycle(MIXED), prompts)]
    plain = []
    for index, (prompt, grammar, sampling) in enumerate(zip(prompts, given, samplings)):
        engine = prepare(model, [prompt], N, tree_size=1)
        plain.append(engine.add(prompt, N, sampling, tokenizer.stop, index=index, grammar=grammar))
        while engine.busy:
            engine.step()
    policy = Policy(model, heads if "heads" in drafter else None, "lookup" in drafter, tree_size, "schema" in drafter)
    engine = new_engine(model, policy=policy, batch_size=batch_size, capacity=200, reads_in_steps=decoder == "ahead")
    if decoder == "ahead":
        engine.decoder.steps_ahead = 1
        engine.decoder.batch_sizes = [n for n in (1, 2, 4) if n < batch_size]
    output = run(engine, prompts, given, samplings, tokenizer.stop)
    assert output.tokens == [sequence.tokens for sequence in plain]
    assert output.ended == [sequence.ended for sequence in plain]
    for (kind, source, _), tokens, ended in zip(grammars, output.tokens, output.ended):
        if kind:
            text = encoding.decode([token for token in tokens if token not in tokenizer.stop])
            check_valid(kind, source, text, ended)
    assert output.ended.count("stop") > 3 and (output.accepted["schema"] > 10) == ("schema" in drafter)
