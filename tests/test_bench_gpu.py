"""bench gpu: torch's versions do the same work, rows hold the measurements and are kept."""

import json
import os
import shutil
from itertools import count
from types import SimpleNamespace

import pytest
import torch

import kernels
from bench import CHATS, gpu, operations, size_config, timing
from bench import __main__ as bench
from conftest import call_once, refusal
from hf.tokenizer import load_encoding
from tools.flags import DEMO


@torch.inference_mode()
def test_torch_computes_the_same_attention():
    """Bug: the benchmark compares with an easier computation, or a wrong mask."""
    sizes = SimpleNamespace(prefixes=[3, 70], trees=[1, 13, 64], sequences=[3])
    for _, _, _, make, ours, theirs in operations.attention_cases(size_config("tiny"), "cpu", sizes):
        x = make()
        torch.testing.assert_close(theirs(*x), ours(*x), atol=0.03, rtol=0)


@torch.inference_mode()
def test_torch_computes_the_same_projections():
    """Bug: the benchmark compares with an easier computation."""
    hidden, weight, rows = torch.randn(5, 16), torch.randn(300, 16), torch.arange(5)
    for ours, theirs in zip(kernels.project_topk(hidden, weight, 4), operations.topk(hidden, weight, 4)):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert torch.equal(operations.argmax(hidden, weight), kernels.project_sample(hidden, weight, 0.0, *[rows] * 3))


def rows_of(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_a_dry_run_runs_every_part(tmp_path, capsys, monkeypatch):
    """Bug: a part raises or measures nothing; rows are lost or of other shapes; a tree has a wrong plain step."""
    clock = count(1)
    monkeypatch.setattr(timing, "seconds", lambda body, *_: (body(), float(next(clock)))[1])
    for module in gpu, operations:
        monkeypatch.setattr(module, "seconds", call_once)
    monkeypatch.setattr(gpu, "copy_bandwidth", lambda device: 1e9)
    monkeypatch.setitem(gpu.SIZES, "prompts", (None, 4))
    monkeypatch.setenv("CLOVER_COMMIT", "abc123")
    out = tmp_path / "out"
    bench.main(bench.parse(["gpu", "--dry-run", "--out", str(out)]))
    rows = rows_of(out)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows
    assert rows[0]["dry_run"] and rows[0]["commit"] == "abc123"
    assert [*dict.fromkeys(row["part"] for row in rows)] == ["machine", *gpu.PARTS]
    select = lambda part, key: [row for row in rows if row["part"] == part and key in row]
    steps = select("steps", "step_ms")
    plain = {(row["products"], row["batch_size"]): row for row in steps if row["tree_size"] == 1}
    assert [*plain] == [("cublas", 1), ("default", 1), ("default", 2), ("8 bits", 1), ("4 bits", 1)]
    assert len(steps) == 2 * len(plain) and all(row["verify_ms"] > 0 and row["over_plain"] > 0 for row in steps)
    floors = [plain[products, 1]["floor_ms"] for products in ("4 bits", "8 bits", "cublas")]
    assert floors == sorted({*floors})  # weights of 4 bits are smaller than those of 8
    assert {row["kernel"] for row in select("kernels", "us")} == {
        "linear_rows", "tree_attention", "project_topk", "project_sample"}
    assert all(row["us"] == pytest.approx(1000 / operations.COPIES, rel=1e-3) for row in select("kernels", "us"))
    first = select("kernels", "prefix")[0]  # 16 + 4 rows of 2 heads of 16, and 4 x 4 queries in and out
    assert select("kernels", "copy_gb_per_s")[0]["copy_gb_per_s"] == 1
    assert first["share_of_copy"] == pytest.approx(4 * 16 * (2 * 20 + 4 * 4) / 1e9 / (first["us"] / 1e6), rel=1e-3)
    runs = [(T, B, t, seed) for B in (1, 2) for t in (0.0, 0.8) for T in (1, "auto", 4, 16) for seed in range(B)]
    plain = {}
    for row, case in zip(select("smollm2", "tree_size"), runs, strict=True):
        _, *setting, seed = case
        assert tuple(row[key] for key in ("tree_size", "batch_size", "temperature", "seed")) == case
        base = plain.setdefault((*setting, seed), row)
        assert row["speed_up"] == pytest.approx(row["tokens_per_second"] / base["tokens_per_second"], rel=2e-3)
        assert row["identical"] == 1 and row["bugs"] == row["ties"] == 0 and row["model"] == "demo"
        # on a busy machine the policy may only decode plainly
        assert row["engine_ms"] > 0 and (row["tokens_per_step"] > 1 or row["tree_size"] in (1, "auto"))
    assert {*os.listdir(out)} == {"results.jsonl"}


def test_a_model_with_a_chat_template_answers_chats(tmp_path, monkeypatch):
    """Bug: a chat model continues texts, or those of B = 1 are all of one kind."""
    folder = shutil.copytree(DEMO, tmp_path / "chatty", copy_function=os.symlink,
                             ignore=shutil.ignore_patterns("medusa", "smollm2"))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content[:20] }}{% endfor %}")
    answered = []
    monkeypatch.setattr(gpu, "answers", lambda model, heads, texts, *_: answered.append(texts) or [])
    sizes = SimpleNamespace(prompts=6, chats=(1, 2), new_tokens=8)
    assert [*gpu.smollm2(SimpleNamespace(model=str(folder), heads=None, device="cpu", sizes=sizes))] == []
    encoding = load_encoding(folder)
    want = [json.loads(line)["messages"][0]["content"] for line in CHATS.open()][:6]
    assert [[encoding.decode(prompt) for prompt in texts] for texts in answered] == [
        [x[:20] for x in want[:n]] for n in (3, 3, 6, 6)]


def test_each_differing_output_is_looked_into(monkeypatch):
    """Bug: only the first that differs counts, or another sequence's noise is used; a run with many takes minutes."""
    ours = [[1, i] for i in range(20)]
    plain = [[1, i if i < 3 else 0] for i in range(20)]

    def first(model, prompts, ours, plain, sampling):
        index = next(i for i, (a, b) in enumerate(zip(ours, plain)) if a != b)
        return index, 1, 0.0, "tie" if 5 <= index <= 10 else "bug"  # the first eight: 3 to 10
    monkeypatch.setattr(gpu, "first_difference", first)
    assert gpu.differences(None, None, None, ours, ours) == dict(ties=0, bugs=0)
    assert gpu.differences(None, None, None, ours, plain) == dict(ties=6, bugs=2)


def test_rows_before_an_error_are_kept(monkeypatch, tmp_path):
    """Bug: rows are written at the end, so that an interrupted run loses them; a part that was not named runs."""
    def fails(run):
        yield dict(row=1 / 3)
        raise ValueError("a reason")
    monkeypatch.setattr(gpu, "PARTS", dict(fails=fails))
    with pytest.raises(ValueError, match="a reason"):
        gpu.bench(SimpleNamespace(out=str(tmp_path), parts=["fails"], dry_run=True, model=None, heads=None))
    assert rows_of(tmp_path)[1:] == [dict(part="fails", row=0.3333)]


def test_what_is_missing_is_told_in_one_line(monkeypatch, checkpoint, tmp_path):
    """Bug: a traceback, figures of a CPU, plain decoding where the heads are missing; --parts lists other parts."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu_bench = lambda *flags: bench.main(bench.parse(["gpu", "--out", str(tmp_path / "out"), *flags]))
    refusal(gpu_bench, "needs a CUDA device; --dry-run")
    assert not (tmp_path / "out").exists()
    refusal(lambda: gpu_bench("--dry-run", "--model", str(checkpoint)), "has no draft heads; give their folder")
    pytest.raises(SystemExit, gpu_bench, "--dry-run", "--parts", "kernel")
    assert [*gpu.PARTS] == bench.parse(["gpu", "--out", "x"]).parts
