"""bench_kernels.py: the gate that every kernel passes without a GPU, and rivals that do the same work."""

import re
from types import SimpleNamespace

import pytest
import torch

from bench import __main__ as bench
from bench import operations as bench_kernels
import kernels
from model import InputError

INTERPRETED = bool(kernels.INTERPRETED)
needs_compiler = pytest.mark.skipif(not kernels.HAS_TRITON or INTERPRETED, reason="needs triton, not interpreting")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@needs_compiler
def test_every_launch_compiles_without_spills_on_every_target():
    """Bug: a kernel that only the interpreter understands, that spills registers, or that wants more shared memory than
    the small GPUs of a generation have."""
    launches = bench_kernels.all_launches()
    pairs = [(target, launch) for target in bench_kernels.TARGETS for launch in launches]
    wrong = []
    for (target, launch), used in zip(pairs, bench_kernels.compile_all(pairs)):
        assert 0 < used["registers"] <= 512
        if used["shared"] > bench_kernels.TARGETS[target] or target.startswith("cuda") and used["spilled"]:
            wrong.append((target, *bench_kernels.shape_class(launch), used))
    assert not wrong, "\n".join(map(str, wrong))


def random_launches(generator):
    """Launches of shapes and dtypes drawn at random from all that the host functions take."""
    def draw(*choices):
        return choices[int(torch.randint(0, len(choices), (), generator=generator))]
    T, G = draw(1, 2, 5, 17, 33, 64), draw(1, 2, 3, 8, 12)
    wide, dtype = draw(True, True, False), draw(BF16, FP16, FP32)
    launches = bench_kernels.attention_launches(
        T, G, draw(16, 32, 48, 64, 80, 96, 128, 192, 256), dtype, wide, draw(100, 4096, 50000), draw(False, dtype != FP16))
    k, temperature = draw((1, 0.8), (1, 0.0), (1, None), (4, None), (32, None))
    launches += bench_kernels.project_launches(draw(1, 8, 17, 33, 64, 200), k, draw(BF16, FP32), temperature, draw(False, wide),
                                               wide, V=draw(32000, 151936), multiprocessors=draw(4, 24, 132, 304))
    return launches + bench_kernels.commit_launches(draw(1, 5, 17, 64), draw(16, 80, 256), draw(BF16, FP32))


@needs_compiler
def test_the_gate_knows_every_shape_class():
    """Bug: a host function chooses a tile, a number of warps or of stages that the gate never compiled."""
    def options(launch):
        return bench_kernels.shape_class(launch), launch[-1]

    known = {options(launch) for launch in bench_kernels.all_launches()}
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        for name, _, args, named in random_launches(generator):
            assert options(bench_kernels.signature(name, args, named)) in known


@needs_compiler
def test_figures_are_read_from_the_binary():
    """Bug: a spill that the gate cannot see: 96 registers are too few for a tile of 64 rows."""
    launch = bench_kernels.attention_launches(16, 4, 128, BF16)[0]
    signature = bench_kernels.signature(launch[0], launch[2], launch[3] | dict(maxnreg=96))
    used = bench_kernels.usage("cuda:90", signature)
    assert used["registers"] <= 96 and used["spilled"] > 100 and used["shared"] > 32 * 1024


@needs_compiler
@pytest.mark.parametrize("launches, args, product", [
    (bench_kernels.attention_launches, (2, 4, 128, BF16), "HMMA"),
    (bench_kernels.attention_launches, (16, 4, 128, BF16), "HGMMA"),
    (bench_kernels.attention_launches, (16, 8, 128, BF16), "HGMMA"),
    (bench_kernels.attention_launches, (64, 1, 128, BF16, True, 4096, True), "HGMMA"),
    (bench_kernels.project_launches, (8, 8, BF16), "HGMMA"),
    (bench_kernels.project_launches, (32, 8, BF16), "HMMA"),
    (bench_kernels.project_launches, (64, 8, BF16), "HGMMA"),
    (bench_kernels.project_launches, (8, 8, BF16, None, True), "HGMMA"),
], ids=["attention-8-rows", "64-rows", "128-rows", "alibi-64-rows", "project-8-rows", "32-rows", "64-rows", "gathered-rows"])
def test_hopper_loads_16_bytes_at_a_time(launches, args, product):
    """Bug: the cache or the weights are not streamed by asynchronous copies of 16 bytes, or the tensor cores stand idle."""
    name, _, values, named = launches(*args)[0]
    compiled = bench_kernels.compile_launch("cuda:90", bench_kernels.signature(name, values, named))
    code = bench_kernels.cuobjdump(compiled.asm["cubin"], "--dump-sass")
    assert len(re.findall(r"\bLDGSTS\.E\.BYPASS\.128\b", code)) >= 12 and re.search(rf"\b{product}\.", code)
    assert not re.search(r"\b(LDG|LDGSTS)\.E(\.BYPASS)?\.(U8|U16|S16)\b", code)


@pytest.mark.skipif(INTERPRETED, reason="tests no kernel")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_rivals_compute_the_same_attention():
    """Bug: the benchmark compares with something easier, or with a wrong mask."""
    from torch.nn.attention.flex_attention import flex_attention
    inputs = bench_kernels.attention_inputs((8, 2, 16), 3, 70, 13, "cpu", FP32, count=2)
    rivals = bench_kernels.attention_rivals(inputs, flex_attention)
    assert set(rivals) == {"sdpa", "sdpa packed", "flex"}
    for i, x in enumerate(inputs):
        want = kernels.tree_attention(*x)
        for name, calls in rivals.items():
            assert torch.allclose(calls[i](), want, atol=1e-5), name
    assert not torch.allclose(kernels.tree_attention(*inputs[0]), kernels.tree_attention(*inputs[1]))


@pytest.mark.skipif(INTERPRETED, reason="tests no kernel")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_tables_hold_what_was_timed(monkeypatch, capsys):
    """Bug: a row that belongs to other shapes, a wrong byte count, or a rival that differs and still gets a time."""
    monkeypatch.setattr(bench_kernels, "median_us", lambda calls: (len(calls) * 1000.0, calls[0]())[0])
    monkeypatch.setattr(bench_kernels, "copies", lambda size: 2)
    monkeypatch.setattr(bench_kernels, "HEADS", {"toy": (8, 2, 16)})
    monkeypatch.setattr(bench_kernels, "LAYERS", {"toy": 3})
    monkeypatch.setattr(bench_kernels, "PROJECTIONS", {"toy": (64, 300)})
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    args = SimpleNamespace(heads=["toy"], batch_sizes=[2], prefixes=[70], tree_sizes=[1, 5], rows=[3], capacity=200)
    one, five = bench_kernels.bench_attention(args, 1e9, "cpu")
    assert five["bytes"] == 2 * (2 * 2 * 2 * 75 * 16 + 2 * 2 * 5 * 8 * 16) and five["T"] == 5 and five["prefix"] == 70
    assert five["share_of_copy"] == pytest.approx(five["bytes"] / 1e9 / 2000e-6) and five["speed_up"] == 1.0
    top, top32, argmax, sample = bench_kernels.bench_projections(args, 1e9, "cpu")
    assert top["bytes"] == 2 * 64 * 303 and (top["operation"], top32["operation"]) == ("top 8", "top 32")
    assert "gumbel" in sample and "argmax" in argmax
    moved, = bench_kernels.bench_commit(args, 1e9, "cpu")
    assert moved["bytes"] == 2 * 2 * 3 * 2 * (4 * 2) * 16 * 2 and moved["us"] == 8000.0
    for line in capsys.readouterr().out.split("\n\n"):
        assert len({row.count("|") for row in line.strip().splitlines()}) == 1, line
    wrong = bench_kernels.timed_row({}, 1, 1e9, [lambda: 1], dict(other=[lambda: 2], broken=[lambda: 1 / 0]), lambda a, b: b - a)
    assert wrong["other"] == 1000.0 and "ZeroDivisionError" in wrong["broken"]
    wrong = bench_kernels.timed_row({}, 1, 1e9, [lambda: 3], dict(other=[lambda: 2]), lambda a, b: b - a)
    assert "differs by 1" in wrong["other"] and wrong["speed_up"] is None


@pytest.mark.skipif(INTERPRETED, reason="tests no kernel")
def test_rivals_compute_the_same_projection():
    """Bug: the benchmark compares with something easier."""
    inputs = [(torch.randn(5, 16), torch.randn(300, 16))]
    rivals = bench_kernels.project_rivals(inputs, 4, 0.8)
    want = kernels.project_topk(*inputs[0], 4)
    for rival in ("log_softmax", "logsumexp"):
        for got, expected in zip(rivals[rival][0](), want):
            assert torch.allclose(got, expected, atol=1e-5)
    assert torch.equal(rivals["argmax"][0](), want[1][:, 0])
    counts = torch.bincount(torch.stack([rivals["gumbel"][0]()[0] for _ in range(4000)]), minlength=300)
    expected = 4000 * torch.softmax(inputs[0][0][0] @ inputs[0][1].T / 0.8, -1)
    assert (counts - expected).abs().max() < 6 * expected.max() ** 0.5


def test_kernels_without_a_gpu_names_the_other_way(monkeypatch):
    """Bug: a traceback, or numbers of a CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="CUDA.*--static"):
        bench.main(["kernels"])


def test_bad_flags_are_refused():
    for flags, message in ((["--tree-sizes", "65"], "tree size"), (["--prefixes", "-1"], "prefix"), (["--rows", "0"], "rows")):
        with pytest.raises(InputError, match=message):
            bench.main(["kernels", *flags])


@needs_compiler
def test_static_table_keeps_the_worst_of_a_row(monkeypatch, capsys):
    """Bug: a spilling launch hidden behind a good one of the same tile, or a target's figures under another's name."""
    launches = bench_kernels.all_launches()[:2]
    assert bench_kernels.shape_class(launches[0])[0] == "tree_attention"
    monkeypatch.setattr(bench_kernels, "all_launches", lambda: [launches[0], launches[0]])
    used = [dict(registers=n, spilled=8 * (n == 3), shared=100 - n) for n in range(8)]
    monkeypatch.setattr(bench_kernels, "compile_all", lambda pairs: used)
    row, = bench_kernels.static_table()
    assert row["cuda:80"] == dict(launches=2, registers=4, spilled=0, shared=100)
    assert row["hip:gfx942"] == dict(launches=2, registers=7, spilled=8, shared=97)
    assert "| 4 / 0 / 100 |" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="no CUDA device")
def test_kernels_bench_on_a_gpu(capsys):
    """Bug: a benchmark that only ran on paper."""
    bench.main(["kernels", "--heads", "8b", "--batch-sizes", "2", "--prefixes", "512", "--tree-sizes", "8", "--rows", "8"])
    assert '"share_of_copy"' in capsys.readouterr().out.strip().splitlines()[-1]
