"""training/base.py: a run learns and leaves a folder that everything else reads."""

import math
import re

import pytest
import torch

from hf.tokenizer import encode_prompt, end_of_text, load_encoding
from model import GPT, InputError
from training import base
from training.flags import parse_base

TINY = "--vocab-size 300 --n-layer 2 --n-head 2 --n-kv-head 1 --head-size 16 --n-embd 32 --n-inner 48 --device cpu " \
       "--batch-size 4 --block-size 32 --lr 0.01".split()


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for i in range(60):
        lines = [f"def function_{i}_{j}(x):\n    return x + {i * j}\n" for j in range(12)]
        (folder / f"{i}.py").write_text("\n".join(lines))
    return folder


def run(texts, out, *flags):
    base.main(parse_base([*TINY, "--data", str(texts), "--out", str(out), *flags]))


def held_out_loss(said):
    return map(float, re.search(r"loss ([\d.]+) nats per token, ([\d.]+) per byte", said).groups())


def test_a_run_learns_and_is_not_overwritten(texts, tmp_path, capsys):
    run(texts, tmp_path, "--steps", "40")
    report = capsys.readouterr().out
    loss, _ = held_out_loss(report)
    assert loss < math.log(300) - 1.5 and "tokens/s" in report and "left" in report
    encoding = load_encoding(tmp_path)
    assert encoding.n_vocab == 300 and encode_prompt(encoding, "def")[0] == end_of_text(encoding)
    run(texts, tmp_path, "--evaluate")
    again, per_byte = held_out_loss(capsys.readouterr().out)
    assert again == pytest.approx(loss, abs=0.02)  # the folder is bfloat16
    assert 1.5 < again / per_byte < 10  # bytes per token
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(InputError, match="holds a model already"):
        run(texts, tmp_path, "--steps", "1", "--vocab-size", "280")
    assert before == {file: file.read_bytes() for file in tmp_path.iterdir()}


def test_a_stopped_run_saves_what_there_is_and_each_step_draws_its_own_windows(texts, tmp_path, monkeypatch):
    """Catches hours that Ctrl-C loses, and windows that are seeded without the step."""
    seen, window_batch = [], base.window_batch

    def stopped(*given):
        if len(seen) == 3:
            raise KeyboardInterrupt  # as SIGTERM does, too
        seen.append(window_batch(*given)[0])
        return window_batch(*given)
    monkeypatch.setattr(base, "window_batch", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(texts, tmp_path, "--steps", "40")
    assert not any(torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])
    assert GPT.from_pretrained(tmp_path, device="cpu").config.n_inner == 48


def test_transformers_reads_what_was_trained(texts, tmp_path):
    """Catches a tokenizer or a config that only we can read."""
    transformers = pytest.importorskip("transformers", reason="transformers is optional")
    run(texts, tmp_path, "--steps", "2")
    text = "def function_1(x):\n    return  x + 12345  # é 😀 <|endoftext|>"
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path)(text).input_ids
    assert ids == encode_prompt(load_encoding(tmp_path), text)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = GPT.from_pretrained(tmp_path, torch.float32, "cpu")
    tokens = torch.tensor([ids])
    torch.testing.assert_close(ours.lm_head(ours(tokens)), model(tokens).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("flags, says", [
    ("--vocab-size 100", "--vocab-size: expected a whole number from 257"),
    ("--head-size 258", "even size, 16 to 256, not 2 of 258"),
    ("--n-head 3 --n-kv-head 2", "a multiple of 2 heads"),
    ("--data nowhere.txt", "nowhere.txt"),
    ("--quantize int8", "--quantize is for --evaluate"),
])
def test_bad_input_is_refused_in_one_line_and_leaves_nothing(texts, tmp_path, capsys, flags, says):
    with pytest.raises((InputError, SystemExit)) as caught:
        run(texts, tmp_path / "out", *flags.split())
    line = str(caught.value) if isinstance(caught.value, InputError) else capsys.readouterr().err.strip()
    assert says in line and "\n" not in line and not (tmp_path / "out").exists()
