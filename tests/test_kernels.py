"""Every kernel test runs three ways: against the torch references in this process, against the Triton kernels under
Triton's interpreter in a process of its own (`test_kernels_under_the_interpreter`), and on CUDA where there is one.
The yardstick is a plain loop in float64."""

import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import kernels

ROOT = Path(__file__).resolve().parent.parent
INTERPRETED = bool(kernels.INTERPRETED)
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
plain = pytest.mark.skipif(INTERPRETED, reason="tests no kernel")
needs_triton = pytest.mark.skipif(not kernels.HAS_TRITON, reason="triton is not installed")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="no CUDA device")])])
def device(request):
    """With memory that nobody wrote filled with NaN, so that a kernel reading its scratch too early shows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield request.param
    torch.use_deterministic_algorithms(False)


# ---------------------------------------------------------------------------------------------------------------------
# tree_attention


def random_forest(T, unused, generator):
    """Ancestor bitmasks of T nodes with random parents or none; `unused` nodes have none and are nobody's parent."""
    masks = []
    for node in range(T):
        parent = int(torch.randint(-1, node, (), generator=generator)) if node else -1
        alone = node in unused or parent < 0 or parent in unused
        masks.append(0 if node in unused else (0 if alone else masks[parent]) | 1 << node)
    return masks


def visible_rows(length, mask, T):
    return list(range(length)) + [length + j for j in range(T) if mask >> j & 1]


def attention_case(lengths, T, Hq, Hkv, D, S, dtype, generator):
    """q, caches, lengths, bitmasks; NaN and inf wherever no node looks."""
    B = len(lengths)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in ((B, T, Hq, D), *[(B, Hkv, S, D)] * 2))
    unused = set(torch.randperm(T - 1, generator=generator)[:T // 4].tolist())  # the last node counts: bit 63 at T = 64
    masks = [random_forest(T, unused, generator) for _ in lengths]
    for b, length in enumerate(lengths):
        seen = {row for mask in masks[b] for row in visible_rows(length, mask, T)}
        unseen = [row for row in range(S) if row not in seen]
        k[b, :, unseen], v[b, :, unseen] = math.nan, math.inf
        k[b, :, unseen[::2]], v[b, :, unseen[::2]] = -math.inf, math.nan
    return q, k, v, torch.tensor(lengths, dtype=torch.int32), masks


def attend_row_by_row(q, k, v, lengths, masks, scale):
    """The oracle where q is float64; else the same arithmetic in q's dtype, which measures torch's own error."""
    B, T, Hq, D = q.shape
    out = torch.zeros_like(q)
    for b in range(B):
        for i in range(T):
            rows = visible_rows(int(lengths[b]), masks[b][i], T)
            for h in range(Hq if rows else 0):
                head = h * k.shape[1] // Hq
                scores = k[b, head, rows] @ q[b, i, h] * scale
                out[b, i, h] = torch.softmax(scores, 0) @ v[b, head, rows]
    return out


def as_int64(masks):
    return torch.tensor([[mask - (mask >> 63 << 64) for mask in row] for row in masks])


ATTENTION = {
    "one-node-empty-cache": ([0], 1, 1, 1, 16, 20, FP32, None),
    "ragged-lengths": ([0, 1, 37, 87], 13, 6, 2, 48, 100, FP32, None),
    "two-splits-many-row-tiles": ([255], 33, 8, 1, 80, 350, FP32, 0.3),
    "bit-63-wide-head": ([5], 64, 2, 2, 256, 69, FP32, None),
    "bfloat16": ([270, 0], 13, 8, 1, 80, 300, BF16, None),
    "float16": ([257], 33, 3, 1, 64, 300, FP16, None),
}


@pytest.mark.parametrize("case", ATTENTION.values(), ids=ATTENTION.keys())
def test_tree_attention_matches_float64(case, device):
    """Bug: a row sees too much or too little, a split is weighed wrongly, or NaN of an unused row gets through."""
    *case, scale = case
    D, dtype = case[4], case[6]
    q, k, v, lengths, masks = attention_case(*case, torch.Generator().manual_seed(1))
    factor = D ** -0.5 if scale is None else scale
    want = attend_row_by_row(q.double(), k.double(), v.double(), lengths, masks, factor)
    torch_error = (attend_row_by_row(q, k, v, lengths, masks, factor).double() - want).abs().max()
    q, k, v, lengths, ancestors = (x.to(device) for x in (q, k, v, lengths, as_int64(masks)))
    mask = kernels.tree_mask(lengths, ancestors, int(lengths.max()) + q.shape[1])
    for got in (kernels.tree_attention(q, k, v, lengths, ancestors, scale),
                kernels.tree_attention(q, k, v, lengths, ancestors, scale, mask)):
        assert got.dtype == dtype and got.shape == q.shape
        assert (got.cpu().double() - want).abs().max() <= 2 * torch_error + 1e-9


def test_tree_attention_takes_any_strides(device):
    """Bug: a stride taken for granted, the last one included."""
    generator = torch.Generator().manual_seed(2)
    q, k, v, lengths, masks = attention_case([7, 40], 5, 4, 2, 48, 60, FP32, generator)
    plain_args = [x.to(device) for x in (q, k, v, lengths, as_int64(masks))]
    sliced = [torch.full((2, *x.shape[:-1], 2 * x.shape[-1]), math.nan, device=device)[1, ..., ::2] for x in (q, k, v)]
    turned = [torch.empty(*x.shape[::-1], device=device).permute(3, 2, 1, 0) for x in (q, k, v)]
    want = kernels.tree_attention(*plain_args)
    for views in (sliced, turned):
        for view, x in zip(views, (q, k, v)):
            view.copy_(x)
        assert not views[0].is_contiguous()
        got = kernels.tree_attention(*views, *plain_args[3:])
        assert torch.allclose(got, want, atol=1e-5)


def test_a_row_that_sees_nothing_gives_zeros(device):
    """Bug: softmax over nothing gives NaN, or the mean of all rows."""
    q, cache = torch.randn(1, 3, 2, 16, device=device), torch.full((1, 1, 8, 16), math.nan, device=device)
    nothing = torch.zeros(1, device=device, dtype=torch.int32), torch.zeros(1, 3, device=device, dtype=torch.int64)
    assert torch.equal(kernels.tree_attention(q, cache, cache, *nothing), torch.zeros_like(q))


def test_tree_mask_follows_the_bits(device):
    """Bug: the sign bit lost by a shift, or bits of nodes beyond T counted."""
    masks = [[1, 3, 2**64 - 1], [0, 1 << 63, 5]]
    mask = kernels.tree_mask(torch.tensor([0, 4], dtype=torch.int32, device=device), as_int64(masks).to(device), 8)
    for b, length in enumerate((0, 4)):
        for i in range(3):
            assert mask[b, i].nonzero().flatten().tolist() == visible_rows(length, masks[b][i], 3)
    deep = kernels.tree_mask(torch.zeros(1, dtype=torch.int32), as_int64([[0] * 63 + [1 << 63]]), 64)
    assert deep.nonzero().tolist() == [[0, 63, 63]]


# ---------------------------------------------------------------------------------------------------------------------
# project_topk


@pytest.mark.parametrize("M, C, V, k, dtype", [
    (1, 16, 7, 7, FP32), (5, 70, 997, 4, FP32), (70, 40, 200, 32, FP32), (3, 17, 33000, 2, FP32),
    (17, 96, 997, 5, BF16), (16, 33, 130, 1, FP16),
], ids=["k-is-V", "V-no-tile-divides", "70-rows-k-32", "several-tiles-a-program", "bfloat16", "float16"])
def test_project_topk_matches_float64(M, C, V, k, dtype, device):
    """Bug: a tile or a channel left out, the log-sum-exp of padding, a list merged in the wrong order."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, C, generator=generator).to(dtype) for n in (M, V))
    want = torch.log_softmax(hidden.double() @ weight.double().T, -1)
    logprobs, tokens = (x.cpu() for x in kernels.project_topk(hidden.to(device), weight.to(device), k))
    assert logprobs.dtype == torch.float32 and tokens.dtype == torch.int64 and logprobs.shape == tokens.shape == (M, k)
    assert torch.allclose(logprobs.double(), want.topk(k).values, atol=1e-4)
    assert torch.allclose(logprobs.double(), want.gather(1, tokens), atol=1e-4)
    assert all(len(set(row)) == k for row in tokens.tolist())


@pytest.mark.parametrize("V, k", [(200, 32), (997, 5), (33000, 3)])
def test_project_topk_gives_equals_to_the_lowest_id(V, k, device):
    """Bug: among equal logits another token wins, within a tile, between tiles, or between programs."""
    generator = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randint(-1, 2, (n, 24), generator=generator) for n in (4, V))
    token = torch.arange(V)
    weight = weight[token // 256 * 256 + token % 128]  # every other tile of 128 repeats the one before
    weight[V // 2:] = weight[:V - V // 2].clone()
    logits = hidden @ weight.T
    want = [sorted(range(V), key=lambda token: (-row[token], token))[:k] for row in logits.tolist()]
    args = hidden.float().to(device), weight.float().to(device)
    assert kernels.project_topk(*args, k)[1].tolist() == want
    assert kernels.project_sample(*args, 0.0, 0, *[torch.zeros(4, dtype=torch.int64, device=device)] * 2).tolist() == [
        row[0] for row in want]


def test_projections_take_any_strides(device):
    """Bug: a transposed weight or a slice of the hidden states read as if it were contiguous."""
    hidden = torch.randn(40, 10, device=device).T[::2]
    weight = torch.randn(40, 200, device=device).T
    rows = torch.arange(10, device=device)[::2]
    for project, rest in ((kernels.project_topk, (3,)), (kernels.project_sample, (0.5, 1, rows, rows))):
        contiguous = project(hidden.contiguous(), weight.contiguous(), *[
            x.contiguous() if isinstance(x, torch.Tensor) else x for x in rest])
        for got, want in zip(project(hidden, weight, *rest), contiguous):
            assert torch.allclose(got, want)


# ---------------------------------------------------------------------------------------------------------------------
# project_sample and its noise


def noise_by_hand(seed, sequence, position, token):
    """The noise in Python integers, written from its description."""
    def mix64(x):
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31
    key = mix64((mix64((seed + 0x9E3779B97F4A7C15) % 2**64) + sequence) % 2**64)
    key = mix64((key + position) % 2**64)
    x = token ^ key % 2**32
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32 ^ key >> 32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    x ^= x >> 16
    return -math.log(-math.log((x >> 8 | 1) / 2**24))


@plain
@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**63, 2**64 - 1, -2**63])
def test_gumbel_is_the_documented_function(seed):
    """Bug: the noise, and with it every sampled text, changes with a version, a sign, or an overflow."""
    places, tokens = [(0, 0), (3, 2**33 + 1), (2**40, 7)], torch.tensor([0, 1, 128255])
    want = torch.tensor([[noise_by_hand(seed, *place, token) for token in tokens.tolist()] for place in places])
    sequence, position = torch.tensor(places).T
    got = kernels.gumbel(seed, sequence, position, tokens)
    assert got.dtype == torch.float32 and torch.allclose(got, want, rtol=1e-5, atol=1e-5)
    each_row = kernels.gumbel(seed, sequence.int() * 0, position, tokens.expand(3, 3))
    assert torch.equal(each_row, kernels.gumbel(seed, sequence * 0, position, tokens))


@plain
def test_gumbel_noise_is_independent_and_gumbel():
    """Bug: the noise repeats or leans along tokens, positions, sequences or seeds."""
    positions, tokens = torch.arange(1000), torch.arange(1000)
    noise = kernels.gumbel(5, positions * 0, positions, tokens)
    n = noise.numel()
    assert abs(noise.mean() - 0.57722) < 5 * (1.645 / n) ** 0.5 and abs(noise.var() - 1.64493) < 0.02
    others = {"next token": noise.roll(1, 1), "next position": noise.roll(1, 0), "transposed": noise.T,
              "next sequence": kernels.gumbel(5, positions * 0 + 1, positions, tokens),
              "sequence and position swapped": kernels.gumbel(5, positions, positions * 0, tokens),
              "next seed": kernels.gumbel(6, positions * 0, positions, tokens)}
    for name, other in others.items():
        correlation = torch.corrcoef(torch.stack([noise.flatten(), other.flatten()]))[0, 1]
        assert abs(correlation) < 5 / n ** 0.5, name


@plain
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_gumbel_argmax_samples_the_softmax(temperature):
    """Bug: sampling leans to some tokens, or a token filtered out is drawn."""
    logits = torch.tensor([1.0, -0.5, 0.3, -math.inf, 2.0, 0.0, 0.3, -1.0])
    n = 20000
    drawn = kernels.gumbel_argmax(logits.expand(n, 8), temperature, 11, torch.zeros(n).long(), torch.arange(n))
    counts, expected = torch.bincount(drawn, minlength=8), n * torch.softmax(logits / temperature, 0)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    assert ((counts - expected)[kept] ** 2 / expected[kept]).sum() < 22.5  # 99.9% of chi-squared with 6 degrees


@pytest.mark.parametrize("seed", [0, 2**64 - 1, -12345678901234567])
def test_project_sample_makes_the_same_noise(seed, device):
    """Bug: the kernel's integers differ from torch's: of 997 equal logits, 70 rows would not pick the same tokens."""
    hidden, weight = torch.zeros(70, 16, device=device), torch.ones(997, 16, device=device)
    sequence, position = torch.arange(70) * 3 % 5, torch.arange(70) * 2**33
    want = kernels.gumbel(seed, sequence, position, torch.arange(997)).argmax(-1)
    got = kernels.project_sample(hidden, weight, 1.0, seed, sequence.int().to(device), position.to(device))
    assert got.dtype == torch.int64 and torch.equal(got.cpu(), want)


@pytest.mark.parametrize("V, dtype", [(997, FP32), (33000, FP32), (300, BF16)],
                         ids=["997", "several-tiles-a-program", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_project_sample_picks_the_best(V, dtype, temperature, device):
    """Bug: temperature applied to the noise, a tile left out, or a program's best lost."""
    generator = torch.Generator().manual_seed(6)
    hidden, weight = (torch.randn(n, 40, generator=generator).to(dtype) for n in (5, V))
    rows = torch.arange(5)
    scores = hidden.double() @ weight.double().T
    if temperature:
        scores = scores / temperature + kernels.gumbel(9, rows, rows + 100, torch.arange(V)).double()
    args = (x.to(device) for x in (hidden, weight))
    got = kernels.project_sample(*args, temperature, 9, rows.to(device), rows.to(device) + 100).cpu()
    assert torch.allclose(scores.gather(1, got[:, None])[:, 0], scores.max(1).values, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# commit_path


@pytest.mark.parametrize("D, dtype, integers", [(20, FP32, torch.int64), (80, BF16, torch.int32)], ids=["fp32", "bf16"])
def test_commit_path_moves_only_the_path(D, dtype, integers, device):
    """Bug: a row overwritten before it is read, garbage beyond count followed, or rows outside the path touched."""
    S, garbage = 40, 10**9
    paths = torch.tensor([[0, 2, 3, 5, 9, 20], [0, 1, 2, 3, 4, 6], [0, -7, garbage, 3, 0, 0], [garbage] * 6])
    counts, lengths = torch.tensor([5, 6, 1, 0]), torch.tensor([3, 33, 39, 0])
    outer = torch.randn(2, 2, 4, 3, S + 2, 2 * D).to(dtype)
    want, outer = outer.clone(), outer.to(device)
    for b, count in enumerate(counts.tolist()):
        old, length = want[:, :, b].clone(), int(lengths[b])
        for j in range(count):
            want[:, :, b, :, 1 + length + j, ::2] = old[:, :, :, 1 + length + int(paths[b, j]), ::2]
    kv = outer[:, :, :, :, 1:-1, ::2]
    assert kv.shape == (2, 2, 4, 3, S, D) and not kv.is_contiguous()
    kernels.commit_path(kv, lengths.int().to(device), paths.to(integers).to(device), counts.to(integers).to(device))
    assert torch.equal(outer.cpu(), want)


# ---------------------------------------------------------------------------------------------------------------------
# what comes in wrong, and which function runs


def attention_args(**changed):
    q, cache = torch.zeros(2, 3, 4, 16), torch.zeros(2, 2, 10, 16)
    args = dict(q=q, k_cache=cache, v_cache=cache, lengths=torch.tensor([0, 7], dtype=torch.int32),
                ancestors=torch.zeros(2, 3, dtype=torch.int64))
    return args | changed


def project_args(**changed):
    return dict(hidden=torch.zeros(2, 8), weight=torch.zeros(9, 8)) | changed


def sample_args(**changed):
    rows = torch.zeros(2, dtype=torch.int64)
    return project_args(temperature=1.0, seed=0, sequence=rows, position=rows) | changed


def commit_args(**changed):
    return dict(kv=torch.zeros(1, 2, 2, 1, 10, 16), lengths=torch.tensor([0, 7], dtype=torch.int32),
                path=torch.tensor([[0, 1, 2], [0, 2, 9]]), count=torch.tensor([3, 2])) | changed


WRONG = {
    "q-of-3-dimensions": (kernels.tree_attention, attention_args(q=torch.zeros(2, 3, 16))),
    "heads-do-not-divide": (kernels.tree_attention, attention_args(q=torch.zeros(2, 3, 3, 16))),
    "65-nodes": (kernels.tree_attention, attention_args(
        q=torch.zeros(2, 65, 4, 16), k_cache=torch.zeros(2, 2, 80, 16), v_cache=torch.zeros(2, 2, 80, 16),
        ancestors=torch.zeros(2, 65, dtype=torch.int64))),
    "float64": (kernels.tree_attention, {n: x.double() if x.is_floating_point() else x
                                         for n, x in attention_args().items()}),
    "mixed-dtypes": (kernels.tree_attention, attention_args(q=torch.zeros(2, 3, 4, 16).half())),
    "int64-lengths": (kernels.tree_attention, attention_args(lengths=torch.zeros(2, dtype=torch.int64))),
    "lengths-beyond-the-cache": (kernels.tree_attention, attention_args(lengths=torch.tensor([0, 8]).int())),
    "negative-lengths": (kernels.tree_attention, attention_args(lengths=torch.tensor([-1, 0]).int())),
    "int32-ancestors": (kernels.tree_attention, attention_args(ancestors=torch.zeros(2, 3, dtype=torch.int32))),
    "too-few-mask-rows": (kernels.tree_mask, dict(
        lengths=torch.tensor([4], dtype=torch.int32), ancestors=torch.zeros(1, 3, dtype=torch.int64), rows=6)),
    "channels-differ": (kernels.project_topk, project_args(weight=torch.zeros(9, 7), k=2)),
    "k-above-V": (kernels.project_topk, project_args(k=10)),
    "k-above-32": (kernels.project_topk, project_args(weight=torch.zeros(50, 8), k=33)),
    "integer-hidden": (kernels.project_topk, project_args(hidden=torch.zeros(2, 8).long(), k=1)),
    "negative-temperature": (kernels.project_sample, sample_args(temperature=-0.1)),
    "temperature-nan": (kernels.project_sample, sample_args(temperature=math.nan)),
    "seed-of-65-bits": (kernels.project_sample, sample_args(seed=2**64)),
    "positions-missing": (kernels.project_sample, sample_args(position=torch.zeros(1, dtype=torch.int64))),
    "float-count": (kernels.commit_path, commit_args(count=torch.zeros(2))),
    "path-of-one-dimension": (kernels.commit_path, commit_args(path=torch.zeros(2, dtype=torch.int64))),
    "cache-of-5-dimensions": (kernels.commit_path, commit_args(kv=torch.zeros(2, 2, 1, 10, 16))),
}


@pytest.mark.parametrize("function, args", WRONG.values(), ids=WRONG.keys())
def test_wrong_input_is_named_in_one_line(function, args):
    """Bug: wrong input crashes deep inside, reads other memory, or quietly gives an answer."""
    with pytest.raises(ValueError, match="expected .*, got ") as error:
        function(**args)
    assert "\n" not in str(error.value)


@plain
@pytest.mark.parametrize("path", [[[0, 1, 2], [0, 3, 9]], [[0, 2, 1], [0, 1, 2]]], ids=["beyond-the-cache", "falling"])
def test_the_reference_refuses_wrong_paths(path):
    """Bug: an index from the wrong end, or a row that was overwritten before it was read."""
    with pytest.raises(ValueError, match="expected .*, got "):
        kernels.commit_path(**commit_args(path=torch.tensor(path)))


CALLS = {"tree_attention": attention_args(), "project_topk": project_args(k=2), "project_sample": sample_args(),
         "commit_path": commit_args(count=torch.tensor([1, 1]))}


@pytest.mark.parametrize("name", CALLS)
def test_dispatch(name, monkeypatch):
    """Bug: a CPU runs the kernels, or the interpreter tests would test the reference."""
    ran = []
    for suffix in ("_reference", "_triton"):
        monkeypatch.setattr(kernels, name + suffix, lambda *args, suffix=suffix: ran.append(suffix))
    getattr(kernels, name)(**CALLS[name])
    assert ran == ["_triton" if INTERPRETED else "_reference"]


# ---------------------------------------------------------------------------------------------------------------------
# other processes, and other targets


def run_python(arguments, folder, **environment):
    """Its output; fails with that output if it fails. One thread: numpy's would fight over the cores."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


@plain
@needs_triton
def test_kernels_under_the_interpreter():
    """Bug: any that the tests above catch, in the Triton kernels. Triton reads the variable when it is imported."""
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", __file__]
    output = run_python(command, ROOT, TRITON_INTERPRET="1")
    assert int(re.search(r"(\d+) passed", output)[1]) > 30


@plain
@pytest.mark.parametrize("triton", ["triton", "no-triton"])
def test_kernels_alone_in_a_folder(triton, tmp_path):
    """Bug: kernels.py needs another file of the project, or cannot be imported where triton does not exist."""
    shutil.copy(ROOT / "kernels.py", tmp_path)
    if triton == "no-triton":
        (tmp_path / "triton.py").write_text("raise ImportError('no triton here')")
    program = """
import torch, kernels
q, cache = torch.ones(1, 1, 2, 16), torch.ones(1, 1, 4, 16)
out = kernels.tree_attention(q, cache, cache, torch.zeros(1, dtype=torch.int32), torch.ones(1, 1, dtype=torch.int64))
rows = torch.zeros(1, dtype=torch.int64)
print(kernels.HAS_TRITON, out.sum().item(), kernels.project_topk(q[0, 0, :1], cache[0, 0], 2)[1].tolist(),
      kernels.project_sample(q[0, 0, :1], cache[0, 0], 0.0, 0, rows, rows).item())
"""
    output = run_python(["-c", program], tmp_path, TRITON_INTERPRET="0", PYTHONPATH="")
    assert output.split(maxsplit=1)[1].strip() == "32.0 [[0, 1]] 0"
    assert output.startswith("False") or triton == "triton"


class Recorder:
    """Stands in for a kernel: keeps what the host function would launch."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        return lambda *args, **named: self.launches.append((self.kernel, args, named))


def compile_launch(kernel, args, named):
    """Compiles for Hopper what the launch would compile: types and multiples of 16 are read off the arguments."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    pointers = {FP32: "*fp32", FP16: "*fp16", BF16: "*bf16", torch.int32: "*i32", torch.int64: "*i64"}
    options = {name: named.pop(name) for name in ("num_warps", "num_stages") if name in named}
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = args[i] if i < len(args) else named[parameter.name]
        fixed = parameter.is_constexpr or type(value) is int and value == 1 and not parameter.do_not_specialize
        if fixed:
            constants[(i,)] = value
        elif isinstance(value, torch.Tensor) or type(value) is int and value % 16 == 0:
            attributes[(i,)] = [["tt.divisibility", 16]]
        kind = pointers[value.dtype] if isinstance(value, torch.Tensor) else "fp32" if type(value) is float else None
        signature[parameter.name] = "constexpr" if fixed else kind or ("i32" if abs(value) < 2**31 else "i64")
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def spilled_bytes(compiled):
    from triton import knobs
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(compiled.asm["ptx"])
        command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(ptx), "-o", str(ptx.with_suffix(".cubin"))]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return max(int(spilled) for spilled in re.findall(r"(\d+) bytes spill stores", log))


def launch_attention(T, Hq, Hkv, D, dtype):
    q, cache = torch.empty(1, T, Hq, D, dtype=dtype), torch.empty(1, Hkv, 2048, D, dtype=dtype)
    kernels.tree_attention_triton(q, cache, cache, torch.zeros(1).int(), torch.zeros(1, T).long())


def launch_topk(M, k, dtype):
    kernels.project_topk_triton(torch.empty(M, 512, dtype=dtype), torch.empty(32000, 512, dtype=dtype), k)


def launch_sample(M, temperature, dtype):
    rows = torch.zeros(M, dtype=torch.int64)
    hidden, weight = torch.empty(M, 512, dtype=dtype), torch.empty(32000, 512, dtype=dtype)
    kernels.project_sample_triton(hidden, weight, temperature, 0, rows, rows)


def launch_commit(P, D, dtype):
    kernels.commit_path_triton(torch.empty(2, 2, 1, 2, 64, D, dtype=dtype), torch.zeros(1, dtype=torch.int32),
                               torch.zeros(1, P, dtype=torch.int64), torch.zeros(1, dtype=torch.int32))


LAUNCHES = {
    "attention-1-node": (launch_attention, 1, 32, 8, 64, BF16),
    "attention-17-nodes": (launch_attention, 17, 32, 8, 128, BF16),
    "attention-64-nodes-wide": (launch_attention, 64, 8, 8, 256, FP16),
    "attention-float32": (launch_attention, 5, 4, 2, 80, FP32),
    "topk-5-rows": (launch_topk, 5, 4, BF16),
    "topk-64-rows": (launch_topk, 64, 32, BF16),
    "topk-float32": (launch_topk, 20, 8, FP32),
    "sample-17-rows": (launch_sample, 17, 1.0, BF16),
    "argmax-5-rows": (launch_sample, 5, 0.0, FP16),
    "commit-5-nodes": (launch_commit, 5, 128, BF16),
    "commit-64-nodes-wide": (launch_commit, 64, 256, FP32),
}


@plain
@needs_triton
@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES.keys())
def test_kernels_compile_for_a_gpu(launch, monkeypatch):
    """Bug: a kernel that only the interpreter understands, that spills, or that wants more shared memory than small
    GPUs have."""
    launches = []
    for name in [name for name in vars(kernels) if name.endswith("_kernel")]:
        monkeypatch.setattr(kernels, name, Recorder(getattr(kernels, name), launches))
    function, *args = launch
    function(*args)
    monkeypatch.undo()
    assert launches
    for kernel, args, named in launches:
        compiled = compile_launch(kernel, args, named)
        assert compiled.metadata.shared <= 99 * 1024, kernel.__name__
        assert spilled_bytes(compiled) <= 64, kernel.__name__
