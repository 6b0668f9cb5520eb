"""bench/operations.py: the rivals do the same work, and the tables hold what was timed."""

from types import SimpleNamespace

import pytest
import torch

import kernels
from bench import Record, Table, operations, steps
from bench import __main__ as bench
from model import InputError

FP32 = torch.float32
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def test_rivals_compute_the_same_attention():
    """Bug: the benchmark compares with something easier, or with a wrong mask."""
    from torch.nn.attention.flex_attention import flex_attention
    inputs = operations.attention_inputs((8, 2, 16), 3, 70, 13, "cpu", FP32, count=2)
    rivals = operations.attention_rivals(*inputs[0], flex_attention)
    assert set(rivals) == {"sdpa", "sdpa packed", "flex"}
    assert rivals["sdpa"].backend in ("FLASH_ATTENTION", "MATH")  # torch's on a CPU; kept in the record
    for x in inputs:
        want = kernels.tree_attention(*x)
        for name, rival in rivals.items():
            assert torch.allclose(rival(*x), want, atol=1e-5), name
    assert not torch.allclose(kernels.tree_attention(*inputs[0]), kernels.tree_attention(*inputs[1]))


def test_rivals_compute_the_same_projection():
    """Bug: the benchmark compares with something easier."""
    hidden, weight = torch.randn(5, 16), torch.randn(300, 16)
    want = kernels.project_topk(hidden, weight, 4)
    for rival in (operations.log_softmax, operations.logsumexp):
        for got, expected in zip(rival(hidden, weight, 4), want):
            assert torch.allclose(got, expected, atol=1e-5)
    assert torch.equal(operations.argmax(hidden, weight, 1), want[1][:, 0])
    draws = torch.stack([operations.gumbel(hidden, weight, 1)[0] for _ in range(4000)])
    expected = 4000 * torch.softmax(hidden[0] @ weight.T / 0.8, -1)
    assert (torch.bincount(draws, minlength=300) - expected).abs().max() < 6 * expected.max() ** 0.5


def test_trees_to_merge_are_trees():
    """Bug: other work than the engine's: nodes that are not below their parents."""
    _, inputs, ours, _ = operations.merge_case(None, "cpu", 3, 20)
    tokens, parents, depths, ancestors = (x.tolist() for x in ours(*inputs[0]))
    for b in range(3):
        assert parents[b][0] == depths[b][0] == 0 and ancestors[b][0] == 1
        for i in range(1, 30):
            parent = parents[b][i]
            assert ancestors[b][i] in (0, ancestors[b][parent] | 1 << i) and (i < 20) <= (ancestors[b][i] > 0)
            assert depths[b][i] == (depths[b][parent] + 1) * (ancestors[b][i] > 0)


def test_tables_hold_what_was_timed(monkeypatch, capsys):
    """Bug: a row that belongs to other shapes, a wrong byte count, or a rival that differs and still gets a time."""
    monkeypatch.setattr(operations, "median_us", lambda calls: (len(calls) * 1000.0, calls[0]())[0])
    monkeypatch.setattr(operations, "copies", lambda size: 2)
    monkeypatch.setitem(steps.SIZES, "toy", ("a toy", (300, 3, 8, 2, 16, 64, 96), {}))
    monkeypatch.setattr(operations, "PROJECTIONS", {"toy": (64, 300)})
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    args = SimpleNamespace(heads=["toy"], batch_sizes=[2], prefixes=[70], tree_sizes=[1, 5], rows=[3],
                           no_flex=False)
    rows = {}
    for name, operation in operations.OPERATIONS.items():
        rows[name] = Table(operation.columns)
        operations.measure(operation, args, "cpu", 1e9, rows[name])
    one, five = rows["attention"]
    assert five["bytes"] == 2 * (2 * 2 * 2 * 75 * 16 + 2 * 2 * 5 * 8 * 16) and five["T"] == 5 and five["prefix"] == 70
    assert five["share_of_copy"] == pytest.approx(five["bytes"] / 1e9 / 2000e-6) and five["speed_up"] == 1.0
    top, top32, argmax, sample = rows["projections"]
    assert top["bytes"] == 2 * 64 * 303 and (top["operation"], top32["operation"]) == ("top 8", "top 32")
    assert "gumbel" in sample and "argmax" in argmax and "flex" in five
    *_, four, eight = rows["quantized"]
    assert (eight["layer"], eight["kind"], eight["M"]) == ("down", "int8", 3) and four["kind"] == "int4"
    assert four["bytes"] == 64 * 16 * 4 + 2 * 64 + 2 * 3 * 160 and eight["bytes"] == 64 * 32 * 4 + 2 * 64 + 2 * 3 * 160
    assert len(rows["quantized"]) == 8 and four["matmul"] == eight["matmul"] == eight["torch"] == 2000.0
    moved, = rows["commit"]
    assert moved["bytes"] == 2 * 2 * 3 * 2 * (4 * 2) * 16 * 2 and moved["us"] == 8000.0
    found, = rows["lookup"]
    assert found["bytes"] == 2 * 4 * 71 and found["prefix"] == 70
    root, tree = rows["merge"]
    assert (root["T"], tree["T"]) == (1, 5) and tree["bytes"] == 2 * 8 * (5 * 4 + 10 + 15 * 4)
    for line in capsys.readouterr().out.split("\n\n"):
        assert len({row.count("|") for row in line.strip().splitlines()}) == 1, line
    a, b = (lambda value=value: torch.tensor(value) for value in (3.0, 2.0))
    toy = operations.Operation(("of",), ("equal", "other", "broken"), lambda args: [("toy",)], lambda *_, **label: (
        1, [()], a, dict(equal=a, other=b, broken=lambda: 1 / 0)))
    operations.measure(toy, None, "cpu", 1e9, table := Table(toy.columns))
    row, = table
    assert row["equal"] == 1000.0 and row["speed_up"] == 1.0 and "ZeroDivisionError" in row["broken"]
    printed = capsys.readouterr().out
    assert "differs by 1" in row["other"] and "| the result differs by 1.0 | ZeroDivisionError |" in printed
    assert operations.timed_row({}, 1e9, 1, [()], a, dict(other=b))["speed_up"] is None


def test_a_stopped_run_goes_on_with_what_is_missing(monkeypatch, tmp_path, capsys):
    """Bug: a row measured twice, one lost, or a size without room that ends the run."""
    calls = []

    def case(args, device, of):
        calls.append(of)
        if of == "large":
            raise torch.OutOfMemoryError
        return 1, [], None, {}
    monkeypatch.setattr(operations, "median_us", lambda calls: 5.0)
    toy = operations.Operation(("of",), (), lambda args: [(of,) for of in args], case)
    table = Record(tmp_path / "file", bench="toy").table("rows", toy.columns)
    operations.measure(toy, ["a", "large"], "cpu", 1e9, table)
    table = Record(tmp_path / "file", bench="toy").table("rows", toy.columns)
    operations.measure(toy, ["a", "b"], "cpu", 1e9, table)
    assert calls == ["a", "large", "b"] and [row["of"] for row in table] == ["a", "b"]
    assert "| large | does not fit the memory |" in capsys.readouterr().out


def test_flex_attention_can_be_left_out():
    """Bug: minutes of compiling where it was not asked for."""
    inputs = operations.attention_inputs((4, 2, 16), 1, 20, 3, "cpu", FP32)
    assert set(operations.attention_rivals(*inputs[0])) == {"sdpa", "sdpa packed"}
    assert bench.parse(["kernels", "--no-flex"]).no_flex and not bench.parse(["kernels"]).no_flex


def test_kernels_without_a_gpu_names_the_other_way(monkeypatch):
    """Bug: a traceback, or numbers of a CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="CUDA.*pytest -m static"):
        bench.main(["kernels"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_kernels_bench_on_a_gpu(capsys):
    """Bug: a benchmark that only ran on paper."""
    bench.main(["kernels", "--heads", "8b", "--batch-sizes", "2", "--prefixes", "512", "--tree-sizes", "8",
                "--rows", "8"])
    assert '"share_of_copy"' in capsys.readouterr().out.strip().splitlines()[-1]
