"""bench kernels and gpu: torch's versions do the same work, the tables hold what was timed, all is run."""

import subprocess
from types import SimpleNamespace

import pytest
import torch

import kernels
from bench import SIZES, operations
from bench import __main__ as bench
from model import InputError
from test_kernels import as_int64, random_forest

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.mark.parametrize("T", [1, 13, 64])
@pytest.mark.parametrize("other", ["sdpa", "flex"])
def test_torch_computes_the_same_attention(monkeypatch, other, T):
    """Bug: the benchmark compares with something easier, or with a wrong mask."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    masks = as_int64([random_forest(T, (), torch.Generator().manual_seed(b)) for b in range(3)])
    tree = torch.full((3,), 70, dtype=torch.int32), masks
    inputs = lambda: (torch.randn(3, T, 8, 16), *torch.randn(2, 3, 2, 140, 16), *tree)
    attend = getattr(operations, other)(*inputs())
    x = inputs()
    torch.testing.assert_close(attend(*x), kernels.tree_attention(*x), atol=1e-5, rtol=0)


def test_torch_computes_the_same_projections():
    hidden, weight = torch.randn(5, 16), torch.randn(300, 16)
    want = kernels.project_topk(hidden, weight, 4)
    for got, expected in zip(operations.topk(hidden, weight, 4), want):
        assert torch.allclose(got, expected, atol=1e-5)


def test_tables_hold_what_was_timed(monkeypatch):
    """Bug: a row that belongs to other shapes, a wrong byte count, an error that ends the run."""
    def call(function, inputs):
        for x in inputs:
            function(*x)
        return 1000.0 * len(inputs)
    monkeypatch.setattr(operations, "call_us", call)
    monkeypatch.setattr(operations, "BYTES", 0)
    monkeypatch.setitem(SIZES, "toy", ("a toy", (300, 3, 8, 2, 16, 128, 256), dict(tied=True)))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    args = SimpleNamespace(models=["toy"], batch_sizes=[2], prefixes=[70], tree_sizes=[1, 5])
    rows = {name: operations.measure(name, args, "cpu", 1e9) for name in bench.OPERATIONS}
    size = lambda row: row["share_of_copy"] * 1e3 * row["us"]  # at 1e9 bytes per second
    for name in ("attention", "flex"):
        one, five = rows[name]
        assert (one["T"], five["T"], five["prefix"], five["us"], five["torch_us"]) == (1, 5, 70, 2000, 2000)
        assert size(five) == pytest.approx(2 * (2 * 2 * 2 * 75 * 16 + 2 * 2 * 5 * 8 * 16)) and five["speed_up"] == 1
    assert [(row["k"], row["M"]) for row in rows["topk"]] == [(k, M) for k in (8, 32) for M in (1, 8, 16, 64)]
    assert size(rows["topk"][0]) == pytest.approx(2 * 128 * 301) and len(rows["quantized"]) == 4 * 2 * 4
    four, eight = (row for row in rows["quantized"] if (row["layer"], row["M"]) == ("mlp.down", 8))
    assert (four["kind"], eight["kind"]) == ("int4", "int8")
    assert size(four) == pytest.approx(128 * 128 + 128 * 2 * 3 + 2 * 8 * 384)  # a scale and a zero for each 128
    assert size(eight) == pytest.approx(128 * 256 + 128 * 4 + 2 * 8 * 384)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_kernels_bench_on_a_gpu(capsys):
    bench.main(bench.parse("kernels --models 8b --batch-sizes 2 --prefixes 512 --tree-sizes 8".split()))
    assert '"share_of_copy"' in capsys.readouterr().out.strip().splitlines()[-1]


# ---------------------------------------------------------------------------------------------------------------------
# bench gpu

@pytest.mark.parametrize("command", [["kernels"], ["gpu", "--out", "out"]])
def test_without_a_gpu_one_line_says_so(command, monkeypatch):
    """Bug: a traceback, or numbers of a CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="needs a CUDA device"):
        bench.main(bench.parse(command))


def test_everything_that_runs_on_a_gpu_is_a_command(monkeypatch, tmp_path):
    """Bug: a flag that does not exist, found when a GPU is there; a folder with a space in its name."""
    ran = []
    monkeypatch.setattr(subprocess, "run", lambda argv, **options: ran.append(argv) or SimpleNamespace(returncode=0))
    bench.bench_gpu(SimpleNamespace(out=tmp_path / "a folder"))
    for name, (_, _, module, *flags) in zip(bench.GPU_COMMANDS, ran, strict=True):
        assert module == "pytest" or bench.parse(flags).out == str(tmp_path / "a folder" / f"{name}.json")


def test_a_failure_leaves_the_others_and_what_succeeded_is_not_run_again(monkeypatch, tmp_path, capsys):
    """Bug: a command that takes the others with it, a failure that is not told, one that is measured twice."""
    out = tmp_path / "out"
    monkeypatch.setattr(bench, "GPU_COMMANDS", dict(fails="no_such_module", works="platform"))
    bench.bench_gpu(SimpleNamespace(out=str(out)))
    assert capsys.readouterr().out == f"fails: failed, see {out}/fails.log\nworks: done\n"
    assert "no_such_module" in (out / "fails.log").read_text() and (out / "works.log").read_text()
    monkeypatch.setattr(bench, "GPU_COMMANDS", dict(fails="platform", works="no_such_module"))
    bench.bench_gpu(SimpleNamespace(out=str(out)))
    assert capsys.readouterr().out == "fails: done\n"
