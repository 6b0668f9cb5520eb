"""bench gpu: torch's versions do the same work, rows hold the measurements, parts run and fail independently."""

import json
import os
import re
import shutil
from itertools import count
from types import SimpleNamespace

import pytest
import torch

import kernels
from bench import __main__ as bench
from bench import gpu, operations, size_config, timing
from conftest import call_once, refusal
from test_kernels import as_int64, random_forest
from tools.flags import DEMO


@pytest.mark.parametrize("T", [1, 13, 64])
def test_torch_computes_the_same_attention(T):
    """Bug: the benchmark compares with an easier computation, or a wrong mask."""
    masks = as_int64([random_forest(T, (), torch.Generator().manual_seed(b)) for b in range(3)])
    tree = torch.full((3,), 70, dtype=torch.int32), masks
    inputs = lambda: (torch.randn(3, T, 8, 16), *torch.randn(2, 3, 2, 140, 16), *tree)
    attend = operations.sdpa(*inputs())
    x = inputs()
    torch.testing.assert_close(attend(*x), kernels.tree_attention(*x), atol=1e-5, rtol=0)


@torch.inference_mode()
def test_torch_computes_the_same_projections_and_moves():
    """Bug: torch's version has cheaper noise or none, or moves other rows; bytes count rows that stay."""
    hidden, weight = torch.randn(5, 16), torch.randn(300, 16)
    for ours, theirs in zip(kernels.project_topk(hidden, weight, 4), operations.topk(hidden, weight, 4)):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    hidden, weight = hidden[:1], weight[:5] / 4
    tokens = operations.sample(hidden.expand(20_000, 16), weight, 0.7)
    share = torch.bincount(tokens, minlength=5) / len(tokens)
    torch.testing.assert_close(share, ((hidden @ weight.T)[0] / 0.7).softmax(-1), atol=0.02, rtol=0)
    assert torch.equal(operations.sample(hidden, weight, 0.0), (hidden @ weight.T).argmax(-1))
    sizes = SimpleNamespace(batch_sizes=[3])
    (_, _, size, make, ours, other), = operations.commit_cases(size_config("tiny"), "cpu", sizes)
    assert size == 2 * 2 * 3 * 4 * 2 * 2 * 2 * 16
    a, *rest = make()
    b = a.clone()
    ours(a, *rest)
    other(b, *rest)
    assert torch.equal(a, b) and not torch.equal(a[..., 21, :], a[..., 22, :])


def rows_of(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_a_dry_run_runs_every_part(tmp_path, capsys, monkeypatch):
    """Bug: a part raises or measures nothing; rows are lost or of other shapes; a tree has a wrong plain step."""
    clock = count(1)
    monkeypatch.setattr(timing, "seconds", lambda body, *_: (body(), float(next(clock)))[1])
    for module in gpu, operations:
        monkeypatch.setattr(module, "seconds", call_once)
    monkeypatch.setattr(gpu, "copy_bandwidth", lambda device: 1e9)
    load = gpu.load_prompts

    def few_prompts(*given):
        groups, stop = load(*given)
        return {kind: [prompt[:16] for prompt in group[:4]] for kind, group in groups.items()}, stop
    monkeypatch.setattr(gpu, "load_prompts", few_prompts)
    monkeypatch.setenv("CLOVER_COMMIT", "abc123")
    (tmp_path / "test_one.py").write_text("def test_one(): pass")
    smaller = dict(batch_sizes=(2,), tests=("-p", "no:cacheprovider", str(tmp_path / "test_one.py")))
    monkeypatch.setattr(gpu, "TINY", SimpleNamespace(**vars(gpu.TINY) | smaller))
    folder = shutil.copytree(DEMO, tmp_path / "chatty", copy_function=os.symlink,
                             ignore=shutil.ignore_patterns("clover", "medusa", "smollm2"))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content[:99] }}{% endfor %}")
    out = tmp_path / "out"
    bench.main(bench.parse(["gpu", "--dry-run", "--model", str(folder), "--out", str(out)]))
    rows = rows_of(out)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows
    assert rows[0]["dry_run"] and rows[0]["commit"] == "abc123"
    ends = {row["part"]: row["ended"] for row in rows if "ended" in row}
    assert [*ends] == [*gpu.PARTS]
    select = lambda part, key: [row for row in rows if row["part"] == part and key in row]
    for part, end in ends.items():
        found = [row for row in rows if row["part"] == part and "ended" not in row]
        assert end in ("done", "out of time") and found, (part, end)
    steps, plain = select("steps", "step_ms"), {}
    for row in steps:
        case = row["batch_size"], row["temperature"], row["top_p"]
        assert plain.setdefault(case, row)["tree_size"] == 1
        assert row["over_plain"] == pytest.approx(row["step_ms"] / plain[case]["step_ms"], rel=1e-3)
    assert len(steps) == 2 * len(plain) == 3 * 2
    assert {row["kernel"] for row in select("kernels", "us")} == {
        "tree_attention", "project_topk", "project_sample", "commit_path"}
    assert all(row["us"] == 1000 for row in select("kernels", "us"))
    first = select("kernels", "T")[0]  # 2 sequences, 16 + 1 rows of 2 heads of 16, and 1 x 4 queries in and out
    assert select("ceilings", "copy_gb_per_s")[0]["copy_gb_per_s"] == 1
    assert first["share_of_copy"] == pytest.approx(2 * 4 * 16 * (2 * 17 + 4) / 1e9 / 0.001, rel=1e-3)
    by_lookup, by_heads = [("plain", 1), ("lookup", 8)], [("heads", T) for T in (4, 8, 16)]
    for part, name, runs, ways in (
            ("demo", "demo", 2, [*by_lookup, *by_heads, ("heads + lookup", 16), ("heads + lookup", "auto")]),
            ("chats", "chatty", 1, [*by_lookup, ("lookup", 16), ("lookup", "auto")])):
        decoded = select(part, "drafter")
        assert [(row["drafter"], row["tree_size"]) for row in decoded] == runs * ways
        assert all(row["bugs"] == 0 and row["model"] == name for row in decoded)
        assert all(("graph_ms" in row) == (row["tree_size"] != "auto") for row in decoded)
        assert sorted(row["engine_ms"] for row in decoded)[len(decoded) // 2] > 0  # other work may disturb a few
    (summary,), code = (select("tests", "summary")[0][key] for key in ("summary", "exit_code"))
    assert re.match("=+ 1 passed", summary) and code == 0
    assert {*os.listdir(out)} == {"results.jsonl", "tests.log"}


def parts_of(monkeypatch, tmp_path, **functions):
    monkeypatch.setattr(gpu, "PARTS", {name: (function, 1) for name, function in functions.items()})
    gpu.bench(SimpleNamespace(out=str(tmp_path / "new"), parts=[*functions], model=None, dry_run=True, seconds=5))
    return [{key: row[key] for key in row if key not in ("part", "seconds")} for row in rows_of(tmp_path / "new")[1:]]


def test_an_error_or_a_budget_ends_only_its_part(monkeypatch, tmp_path):
    """Bug: an error ends other parts, rows are written only at the end, or a part exceeds its budget."""
    def fails(run):
        yield dict(row=1)
        raise ValueError("a reason")

    def endless(run):
        while True:
            yield dict(row=2)
    clock = iter(range(100))
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: next(clock))
    assert parts_of(monkeypatch, tmp_path, fails=fails, endless=endless) == [
        dict(row=1), dict(ended="ValueError: a reason"), *[dict(row=2)] * 3, dict(ended="out of time")]


def test_without_a_gpu_the_error_is_one_line(monkeypatch):
    """Bug: a traceback, or figures of a CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for flags, says in (("", "needs a CUDA device; --dry-run"), ("--dry-run --parts kernel", "some of ceilings, ")):
        refusal(lambda: bench.main(bench.parse(["gpu", "--out", "out", *flags.split()])), says)
