"""demo/: its script trains, and its model writes plausible Python; test_lossless.py decodes with its heads."""

import ast
import itertools
import math
import re
import warnings

import pytest
import torch

from generate import generate
from hf.chat import end_of_text, sampling_defaults, stop_tokens
from hf.tokenizer import encode_prompt, load_encoding
from model import GPT
from tools.flags import DEMO
from training.data import builtin_corpus

STARTS = [  # the README's prompts and 20 others, each the start of a file
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


def test_the_script_that_trained_the_model_still_does(tmp_path, capsys):
    """Catches a script that no longer runs, a run that learns nothing, a folder that does not load."""
    script = (DEMO / "train_base.py").read_text()
    data = [*map(str, DEMO.parent.glob("*.py")), *map(str, builtin_corpus("train")[:40])]  # enough for a held-out split
    tiny = dict(OUT=f"Path({str(tmp_path / 'base')!r})", DATA=data, STEPS=80, LONG_FROM=70,
                SHORT=(4, 32), LONG=(2, 64), COMPILE=False,
                CONFIG="GPTConfig(block_size=64, n_layer=2, n_head=2, n_embd=64)")
    for name, value in tiny.items():
        script, found = re.subn(rf"^{name} = .*$", lambda _: f"{name} = {value}", script, flags=re.M)
        assert found == 1, name
    exec(script, {})
    loss = float(re.search(r"held-out loss ([\d.]+) nats per token", capsys.readouterr().out)[1])
    assert loss < math.log(4096) - 1.5
    with pytest.raises(FileExistsError):  # does not overwrite a trained model
        exec(script, {})
    model, encoding = GPT.from_pretrained(tmp_path / "base", device="cpu"), load_encoding(tmp_path / "base")
    text = "def project_topk(hidden, weight, k):"
    ids = encode_prompt(encoding, text)
    assert ids[0] == end_of_text(encoding) == encoding.n_vocab - 1 == model.config.vocab_size - 1
    assert len(ids) < len(encode_prompt(load_encoding(DEMO), text))  # its merges fit its own text


def parses(start, new):
    """Whether a text up to its last full line is valid Python, with two or more lines from the model."""
    text = start + new[:new.rfind("\n") + 1]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as about invalid escapes
            ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return new.count("\n") >= 2


def count_texts(model, encoding, max_new_tokens, seed=0):
    """Of 50 texts with the folder's sampling: how many parse, and how many repeat a line more than four times."""
    starts = (STARTS * 3)[:50]
    given = [encode_prompt(encoding, text) for text in starts]
    out = generate(model, given, max_new_tokens, stop=stop_tokens(DEMO, encoding), batch_size=50, seed=seed,
                   **sampling_defaults(DEMO))
    texts = list(map(encoding.decode, out.tokens))
    repeated = [max(len(list(same)) for _, same in itertools.groupby(filter(None, text.split("\n")))) for text in texts]
    return sum(map(parses, starts, texts)), sum(count > 4 for count in repeated)


def test_demo_writes_python():
    """Catches an undertrained or repetitive model; demo/README.md has the counts of other seeds."""
    model = GPT.from_pretrained(DEMO, torch.float32, "cpu")
    parsing, repeating = count_texts(model, load_encoding(DEMO), max_new_tokens=64)
    assert parsing >= 25 and repeating <= 6
