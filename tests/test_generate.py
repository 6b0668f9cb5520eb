"""generate.py: the command line says what it did, or what went wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import generate as command_line
from clover import PRESETS, CloverHeads
from conftest import random_prompts, toy_model
from generate import first_difference, generate
from model import GPT, InputError

ROOT = Path(__file__).parent.parent
PROMPTS = random_prompts([7])
FILTERED = dict(temperature=0.7, top_k=20, top_p=0.8, seed=2**40)


# ---------------------------------------------------------------------------------------------------------------------
# Comparing

def test_a_difference_is_a_bug_or_a_tie():
    """Catches a --compare that excuses everything: only a gap within rounding is a tie."""
    model = toy_model(tied=False)
    text = generate(model, PROMPTS[:1], 10).tokens
    assert first_difference(model, PROMPTS[:1], text, text) is None
    wrong = [text[0][:4] + [(text[0][4] + 1) % 97] + text[0][5:]]
    assert first_difference(model, PROMPTS[:1], text, wrong)[1::2] == (4, "bug")
    best = text[0][4]
    with torch.no_grad():
        model.head.weight[(best + 1) % 97] = model.head.weight[best]
    assert first_difference(model, PROMPTS[:1], text, wrong)[3] == "tie"
    third = [text[0][:4] + [(best + 2) % 97]]  # the best two tie, but this is neither
    assert first_difference(model, PROMPTS[:1], text, third)[1::2] == (4, "bug")
    sampled = generate(model, PROMPTS[:1], 10, **FILTERED).tokens
    assert first_difference(model, PROMPTS[:1], sampled, [sampled[0][:9]], **FILTERED) == (0, 9, None, "bug")


# ---------------------------------------------------------------------------------------------------------------------
# The command line

@pytest.fixture(scope="module")
def folder(checkpoint):
    """The checkpoint with Clover heads beside it."""
    model = GPT.from_pretrained(checkpoint, device="cpu")
    CloverHeads(PRESETS["clover"], model).save_pretrained(checkpoint / "clover")
    return checkpoint


def run(capsys, *flags):
    command_line.main([str(flag) for flag in flags])
    return capsys.readouterr().out


def test_the_command_line_prints_text_and_statistics(folder, capsys):
    flags = ["--model", folder, "--device", "cpu", "--prompt", "abc", "--max-new-tokens", 20, "--temperature", 0.8]
    text = run(capsys, *flags, "--compare")
    assert text.startswith("abc") and "tokens per step, " in text and "the text is identical" in text and "speed-up" in text
    result = json.loads(run(capsys, *flags, "--json", "--compare"))
    assert result["difference"] is None and result["plain"]["tokens"] == result["tokens"] and len(result["tokens"][0]) <= 20
    assert run(capsys, *flags, "--heads", "none").split("\n\n")[0] == text.split("\n\n")[0]
    two = run(capsys, *flags, "--prompt", "import", "--tree-size", 5)
    assert "import" in two and two.count("-" * 40) == 2


BAD_FLAGS = {
    "no prompt": ([], "--prompt"),
    "empty prompt": (["--prompt", ""], "empty"),
    "unknown flag": (["--prompt", "a", "--frobnicate"], "--frobnicate"),
    "not a number": (["--prompt", "a", "--max-new-tokens", "many"], "many"),
    "unknown folder": (["--prompt", "a", "--model", "nowhere"], "nowhere: no such folder"),
    "unknown heads": (["--prompt", "a", "--heads", "nowhere"], "nowhere: no such folder"),
    "unknown device": (["--prompt", "a", "--device", "warp"], "'warp' is not available"),
    "missing device": (["--prompt", "a", "--device", "cuda:99"], "'cuda:99' is not available"),
    "unknown dtype": (["--prompt", "a", "--dtype", "int3"], "int3"),
    "nan": (["--prompt", "a", "--temperature", "nan"], "temperature must be"),
    "long prompt": (["--prompt", "x" * 500], "shorten the prompt"),
}


@pytest.mark.parametrize("case", BAD_FLAGS)
def test_bad_flags_are_refused_in_one_line(folder, case):
    flags, says = BAD_FLAGS[case]
    with pytest.raises(InputError) as caught:
        command_line.main(["--model", str(folder), "--device", "cpu", *flags])
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_bad_input_exits_with_2_and_one_line(folder):
    """Catches a traceback: the whole command, in a process of its own, with a byte that is no UTF-8 on standard input."""
    command = [sys.executable, "generate.py", "--model", str(folder), "--device", "cpu", "--prompt", "-"]
    done = subprocess.run(command, cwd=ROOT, input=b"\xff\xfe", capture_output=True)
    assert done.returncode == 2 and done.stdout == b""
    assert done.stderr.decode().count("\n") == 1 and done.stderr.startswith(b"generate.py: standard input is not UTF-8")


def test_a_tokenizer_of_another_model_is_refused(folder, tmp_path):
    """Catches token ids beyond the embedding, which would end in an index error or garbage."""
    toy_model().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(InputError, match="do not belong together"):
        command_line.main(["--model", str(tmp_path), "--device", "cpu", "--prompt", "a"])
