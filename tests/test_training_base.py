"""training/base.py: a run learns, is resumed to the same weights, and leaves a folder that everything else reads."""

import math
import os
import re
import signal

import pytest
import torch

from hf.tokenizer import encode_prompt, end_of_text, load_encoding
from model import GPT, InputError
from training import base, common

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
    base.main([*TINY, "--data", str(texts), "--out", str(out), *flags])
    return GPT.from_pretrained(out, dtype=torch.float32, device="cpu")


def test_a_run_learns_and_resumes_to_the_same_weights(texts, tmp_path, monkeypatch, capsys):
    """Catches a resume that forgets the optimiser, the schedule or the place in the data."""
    whole = run(texts, tmp_path / "whole", "--steps", "40")
    report = capsys.readouterr().out
    loss = float(report.split("held-out loss ")[1].split()[0])
    assert loss < math.log(300) - 1.5 and "tokens/s" in report and "left" in report
    encoding = load_encoding(tmp_path / "whole")
    assert encoding.n_vocab == 300 and encode_prompt(encoding, "def")[0] == end_of_text(encoding)
    base.main([*TINY, "--data", str(texts), "--out", str(tmp_path / "whole"), "--evaluate"])
    again, per_byte = re.search(r"loss ([\d.]+) nats per token, ([\d.]+) per byte", capsys.readouterr().out).groups()
    assert float(again) == pytest.approx(loss, abs=0.02)  # the folder is bfloat16
    assert 1.5 < float(again) / float(per_byte) < 10  # bytes per token

    set_learning_rate = base.set_learning_rate

    def interrupted(optimizer, peak, step, steps):
        if step == 15:
            os.kill(os.getpid(), signal.SIGTERM)  # in the middle of a step, which is then done to its end
        set_learning_rate(optimizer, peak, step, steps)
    monkeypatch.setattr(base, "set_learning_rate", interrupted)
    run(texts, tmp_path / "parts", "--steps", "40")
    said = capsys.readouterr().out
    assert "interrupted at step 16" in said and "held-out" not in said  # which takes minutes on a large corpus
    monkeypatch.undo()
    parts = run(texts, tmp_path / "parts", "--steps", "40", "--resume")
    for a, b in zip(whole.parameters(), parts.parameters()):
        torch.testing.assert_close(a, b, atol=0, rtol=0.02)  # the folder is bfloat16


def test_each_step_draws_its_own_windows(texts, tmp_path, monkeypatch):
    """Catches windows that are seeded without the step: a run that sees the same few all along."""
    seen, windows = [], base.Run.windows
    monkeypatch.setattr(base.Run, "windows", lambda *given: seen.append(windows(*given)) or seen[-1])
    run(texts, tmp_path, "--steps", "3")
    first, *seen = seen  # of the held-out text
    assert len(seen) == 3 and not any(torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_on_a_gpu_learns_and_resumes(texts, tmp_path, capsys):
    """Catches tensors on two devices, those of the optimisers' states after a resume too."""
    run(texts, tmp_path, "--device", "cuda", "--steps", "39")
    run(texts, tmp_path, "--device", "cuda", "--steps", "40", "--resume")
    losses = [float(said.split()[0]) for said in capsys.readouterr().out.split("held-out loss ")[1:]]
    assert len(losses) == 2 and all(loss < math.log(300) - 1.5 for loss in losses)


def test_a_finished_run_is_not_overwritten(texts, tmp_path):
    """Catches a new tokenizer written beside old weights, and one written before the data is known to be good."""
    run(texts, tmp_path / "run", "--steps", "1")
    before = (tmp_path / "run" / "tokenizer.json").read_bytes()
    with pytest.raises(InputError, match="holds a run already"):
        run(texts, tmp_path / "run", "--steps", "1", "--vocab-size", "280")
    run(texts, tmp_path / "run", "--steps", "2", "--resume")
    with pytest.raises(InputError, match="at step 2 already; --steps 1 is less: choose more"):
        run(texts, tmp_path / "run", "--steps", "1", "--resume")
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == before
    (tmp_path / "short.txt").write_text("too short for two splits")
    with pytest.raises(InputError, match="give more text"):
        run(tmp_path / "short.txt", tmp_path / "new", "--steps", "1")
    assert not (tmp_path / "new").exists()


def test_a_full_disk_is_one_line_and_resume_takes_the_flags_of_the_run(texts, tmp_path, monkeypatch):
    """Catches a traceback, an empty folder that is left, and a resumed run of the default sizes."""
    def full(*_):
        raise OSError(28, "No space left on device")
    reason = r" \(No space left on device\); "
    with monkeypatch.context() as patch:
        patch.setattr(base, "atomic_write", full)
        with pytest.raises(InputError, match=f"a tokenizer cannot be written there{reason}make room"):
            run(texts, tmp_path / "run", "--steps", "1")
    assert not (tmp_path / "run").exists()
    with monkeypatch.context() as patch:
        patch.setattr(common, "atomic_write", full)
        with pytest.raises(InputError, match=f"step 1 cannot be saved{reason}nothing is kept: make room and start it"):
            run(texts, tmp_path / "run", "--steps", "1")
    before = run(texts, tmp_path / "run", "--steps", "1").config
    base.main(["--out", str(tmp_path / "run"), "--resume", "--steps", "2"])
    assert GPT.from_pretrained(tmp_path / "run", device="cpu").config == before
    with pytest.raises(InputError, match="holds a run with n-layer 2, not 3; n-embd 32, not 48: "):
        base.main(["--out", str(tmp_path / "run"), "--resume", "--n-layer", "3", "--n-embd", "48"])


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
    ("--steps 0", "--steps: expected"),
    ("--lr nan", "--lr: expected"),
    ("--vocab-size 100", "--vocab-size: expected a whole number from 257"),
    ("--head-size 8", "--head-size: expected a whole number from 16"),
    ("--head-size 258", "from 16 to 256"),
    ("--n-head 3 --n-kv-head 2", "a multiple of n_kv_head"),
    ("--data nowhere.txt", "nowhere.txt"),
    ("--resume", "--resume needs a run"),
])
def test_bad_input_is_refused_in_one_line_and_leaves_nothing(texts, tmp_path, flags, says):
    with pytest.raises(InputError) as caught:
        run(texts, tmp_path / "out", *flags.split())
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
