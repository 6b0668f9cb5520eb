"""Each kernel test runs with the torch references in this process, with the Triton kernels under Triton's interpreter
in another process (`test_kernels_under_the_interpreter`), and on CUDA if there is a device."""

import math
import os
import re
import subprocess
import sys
from functools import partial
from importlib.metadata import version
from itertools import cycle, product
from types import SimpleNamespace

import pytest
import torch

import kernels
from conftest import INTERPRETED, ROOT
from static import BF16, FP16, FP32, h200, launches_of

plain = pytest.mark.skipif(INTERPRETED, reason="tests no kernel")
slow_to_interpret = [pytest.mark.slow] if INTERPRETED else []
DTYPES = pytest.mark.parametrize("dtype", [FP32, pytest.param(FP16, marks=slow_to_interpret), BF16], ids=str)
records = pytest.mark.skipif(INTERPRETED or not kernels.HAS_TRITON, reason="needs triton, and not its interpreter")

if INTERPRETED:  # patch Triton's language once: the interpreter does so at every call of a nested function
    from triton.runtime import interpreter
    interpreter._patch_lang(SimpleNamespace(__globals__=dict(tl=kernels.tl, core=kernels.tl.core)))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()


def glu_formula(gate, up, activation):
    """act(gate) * up by the formula."""
    tanh = torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate ** 3))
    return (gate * torch.sigmoid(gate) if activation == "silu" else 0.5 * gate * (1 + tanh)) * up


def random_forest(T, unused, generator):
    """Ancestor bitmasks of T nodes with a random parent or none; `unused` nodes have mask 0 and no children."""
    masks = []
    for node in range(T):
        parent = int(torch.randint(-1, node, (), generator=generator)) if node else -1
        alone = node in unused or parent < 0 or parent in unused
        masks.append(0 if node in unused else (0 if alone else masks[parent]) | 1 << node)
    return masks


def node_depth(mask):
    return max(bin(mask).count("1") - 1, 0)


def visible_rows(length, masks, i, window=0):
    """The cache rows that node i sees."""
    first = length + node_depth(masks[i]) + 1 - window if window else 0  # position
    ancestors = [j for j, mask in enumerate(masks) if masks[i] >> j & 1 and length + node_depth(mask) >= first]
    return list(range(max(first, 0), length)) + [length + j for j in ancestors]


def attention_case(lengths, T, Hq, Hkv, D, S, dtype, generator, window=0):
    """q, caches, lengths, bitmasks; NaN and inf in rows that no node sees."""
    B = len(lengths)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in ((B, T, Hq, D), *[(B, Hkv, S, D)] * 2))
    unused = set(torch.randperm(T - 1, generator=generator)[:T // 4].tolist())  # the last node counts: bit 63 at T = 64
    masks = [random_forest(T, unused, generator) for _ in lengths]
    for b, length in enumerate(lengths):
        seen = {row for i in range(T) for row in visible_rows(length, masks[b], i, window)}
        unseen = [row for row in range(S) if row not in seen]
        k[b, :, unseen], v[b, :, unseen] = math.nan, math.inf
        k[b, :, unseen[::2]], v[b, :, unseen[::2]] = -math.inf, math.nan
    return q, k, v, torch.tensor(lengths, dtype=torch.int32), masks


def attend_row_by_row(q, k, v, lengths, masks, scale, slopes=None, window=0):
    """The expected result if q is float64; else the same arithmetic in q's dtype, which measures torch's error."""
    B, T, Hq, D = q.shape
    kv_heads = torch.arange(Hq) * k.shape[1] // Hq
    out = torch.zeros_like(q)
    for b in range(B):
        length = int(lengths[b])
        position = torch.tensor([*range(length), *(length + node_depth(mask) for mask in masks[b])])
        for i in range(T):
            rows = visible_rows(length, masks[b], i, window)
            if rows:
                keys, values = k[b, :, rows][kv_heads], v[b, :, rows][kv_heads]  # (Hq, rows, D)
                scores = (keys @ q[b, i, :, :, None])[:, :, 0] * scale  # (Hq, rows)
                if slopes is not None:
                    scores -= (slopes[:, None].double() * (position[length + i] - position[rows])).to(q.dtype)
                out[b, i] = (torch.softmax(scores, -1)[:, None] @ values)[:, 0]
    return out


def as_int64(masks):
    return torch.tensor([[mask - (mask >> 63 << 64) for mask in row] for row in masks])


def alibi_slopes(heads):
    """From 1/2 to 1/256, in memory that is not contiguous."""
    return (2.0 ** -torch.linspace(1, 8, heads)).repeat_interleave(2)[::2]


ERRORS = {FP32: 4, FP16: 2, BF16: 2}  # the allowed multiple of torch's own error in that dtype


def check_attention(case, device, prepare=lambda q, k, v: (q, k, v), biased=False):
    """case: lengths, T, Hq, Hkv, D, S, dtype, then scale and window unless default."""
    *sizes, dtype, scale, window = case + (None, 0)[len(case) - 7:]
    q, k, v, lengths, masks = attention_case(*sizes, dtype, torch.Generator().manual_seed(1), window)
    slopes = alibi_slopes(sizes[2]) if biased else None
    factor = sizes[4] ** -0.5 if scale is None else scale
    want = attend_row_by_row(q.double(), k.double(), v.double(), lengths, masks, factor, slopes, window)
    torch_error = (attend_row_by_row(q, k, v, lengths, masks, factor, slopes, window).double() - want).abs().max()
    q, k, v, lengths, ancestors = (x.to(device) for x in (q, k, v, lengths, as_int64(masks)))
    slopes = slopes if slopes is None else slopes.to(device)
    got = kernels.tree_attention(*prepare(q, k, v), lengths, ancestors, scale, slopes, window)
    assert got.dtype == dtype and got.shape == q.shape
    assert (got.cpu().double() - want).abs().max() <= ERRORS[dtype] * torch_error + 1e-9


# They cover T 1 to 64; D 16 to 256, filling their tile or not; Hq / Hkv 1, 3, 8, 12; lengths 0, 1, odd, S - T, ragged;
# one tile of rows and several; windows of 1, of 2, of a tile and one less, shorter and longer than the text.
ATTENTION = {
    "many-row-tiles": ([65], 33, 8, 1, 80, 130, BF16, 0.3, 0),
    "one-node-empty-cache": ([0], 1, 1, 1, 16, 20, FP32),
    "ragged-lengths": ([0, 1, 37, 87], 13, 6, 2, 48, 100, FP32),
    "bit-63-wide-head": ([5], 64, 1, 1, 256, 69, FP32),
    "float32-12-heads-a-group": ([1, 31], 7, 12, 1, 96, 38, FP32),
    "bfloat16": ([130, 0], 13, 8, 1, 80, 160, BF16),
    "bfloat16-one-node": ([700, 513], 1, 16, 2, 128, 714, BF16),
    "bfloat16-narrow-head": ([63], 64, 12, 1, 16, 130, BF16),
    "bfloat16-wide-head": ([77, 32], 33, 3, 1, 256, 110, BF16),
    "float16": ([257], 33, 3, 1, 64, 300, FP16),
    "float16-odd-head-size": ([3, 20], 13, 3, 1, 21, 40, FP16),
    "window-one": ([0, 1, 37, 87], 13, 6, 2, 48, 100, FP32, None, 1),
    "window-two-of-64-nodes": ([30, 3], 64, 2, 1, 16, 96, FP32, None, 2),
    "window-a-tile-less-one": ([0, 14, 15, 16, 90], 5, 4, 2, 80, 111, FP32, 0.3, 15),
    "window-bfloat16-a-tile-less-one": ([700, 62, 63, 64], 1, 16, 2, 64, 714, BF16, None, 63),
    "window-bfloat16-64-nodes": ([129, 5], 64, 3, 1, 128, 200, BF16, 0.05, 31),
}
BIASED = {"ragged-lengths", "bit-63-wide-head", "bfloat16-one-node", "bfloat16-narrow-head", "float16",
          "window-two-of-64-nodes", "window-bfloat16-64-nodes"}
SLOW = {"bfloat16-narrow-head", "window-bfloat16-64-nodes", "many", "a-long-text-beside-short-ones"}


def inside(x):
    """x as a slice in every dimension of a larger tensor, which holds NaN elsewhere; rows stay 16-byte aligned."""
    outer = torch.full([n + 16 for n in x.shape], math.nan, device=x.device, dtype=x.dtype)
    view = outer[tuple(slice(8, -8) for _ in x.shape)]
    return view.copy_(x)


def every_second(x):
    """x in non-contiguous memory, with NaN, or ones, in between."""
    outer = torch.full((*x.shape[:-1], 2 * x.shape[-1]), math.nan if x.is_floating_point() else 1, dtype=x.dtype)
    return outer.to(x.device)[..., ::2].copy_(x)


def turned(x):
    """x with its dimensions in the opposite order in memory."""
    return x.permute(*range(x.dim())[::-1]).contiguous().permute(*range(x.dim())[::-1])


STRIDES = {
    "contiguous": lambda *tensors: tensors,
    "inside-NaN": lambda q, k, v: (inside(q), inside(k), inside(v)),
    "every-second-column": lambda q, k, v: (every_second(q), every_second(k), every_second(v)),
    "turned-around": lambda q, k, v: (turned(q), turned(k), turned(v)),
    "keys-and-values-differ": lambda q, k, v: (q.transpose(1, 2).contiguous().transpose(1, 2), turned(k), inside(v)),
    "one-sequence-of-many": lambda q, k, v: (q, *(x.repeat_interleave(2, 0)[::2] for x in (k, v))),
}


@pytest.mark.parametrize("case, biased, strides", [
    pytest.param(case, biased, strides, id=f"{name}{'-alibi' * biased}-{strides}",
                 marks=slow_to_interpret if biased != (name in BIASED) or name in SLOW else [])
    for (name, case), strides in zip(ATTENTION.items(), cycle(STRIDES)) for biased in (False, True)])
def test_tree_attention_matches_float64(case, biased, strides, device):
    """Bug: a row sees too much, too little or NaN; another head's slope; a window measured in rows, not in depth; an
    assumed stride, the last one included; a read outside a slice."""
    check_attention(case, device, STRIDES[strides], biased)


# multiprocessors, expected splits, case, whether ALiBi
SPLITS = {
    "one": (1, 1, ([0, 255, 256, 687], 13, 3, 1, 32, 700, BF16), True),
    "many": (10**6, 11, ([0, 255, 256, 687], 13, 3, 1, 32, 700, BF16), True),
    "many-of-a-window": (10**6, 8, ([0, 255, 687], 13, 3, 1, 32, 700, BF16, None, 500), True),
    "more-than-fit-one-tile": (10**6, 22, ([600, 699], 1, 1, 1, 16, 700, FP32), False),
    "a-long-text-beside-short-ones": (4, 3, ([2040, *(7 * i % 40 for i in range(31))], 3, 1, 1, 16, 2100, FP32), False),
}


@pytest.mark.parametrize("multiprocessors, splits, case, biased", [
    pytest.param(*case, id=name, marks=slow_to_interpret if name in SLOW else [])
    for name, case in SPLITS.items()])
def test_splits_are_combined(multiprocessors, splits, case, biased, device, monkeypatch):
    """Bug: an unwritten split is read, an empty one has weight, boundary rows count twice or never."""
    monkeypatch.setattr(kernels, "_gpu", lambda _: h200(multiprocessors))
    chosen, choose = [], kernels._splits
    monkeypatch.setattr(kernels, "_splits", lambda *args: chosen.append(choose(*args)) or chosen[-1])
    check_attention(case, device, biased=biased)
    assert not chosen or chosen == [splits]


@records
def test_grids_fit_the_work_and_the_gpu():
    """Bug: programs for rows before a window, partial sums of gigabytes, more than 65535 programs along a grid's second
    or third axis; a draft vocabulary that leaves half of the multiprocessors idle."""
    splits = lambda **sizes: launches_of("tree_attention", D=128, **sizes)[0][1][1]
    assert splits(B=32, T=64, Hq=32, Hkv=8, S=32768) * 32 * 64 * 32 * 128 * 4 <= 2**29
    wide, near, far = (splits(B=2, T=16, S=S, window=window)
                       for S, window in ((50000, 1025), (1041, 1025), (50000, 20000)))
    assert wide == near < far
    for M, V in product((1, 16, 64, 200), (8192, 9000, 32000, 49152, 128256, 151936)):
        (_, (rows, programs), _, blocks), _ = launches_of("project_topk", M=M, V=V)
        each = math.ceil(V / blocks["BLOCK_V"] / programs)  # tiles of most programs
        assert rows * programs >= 120 and V > 0.95 * each * programs * blocks["BLOCK_V"]
    large = dict(M=2**20, C=4096, V=128256)
    launches = launches_of("tree_attention", B=70_000, T=16, Hq=32, Hkv=32, D=128)
    launches += launches_of("tree_attention", B=1, T=16, Hq=2**17, Hkv=32, D=128, multiprocessors=10**6)
    launches += launches_of("project_topk", k=32, **large) + launches_of("project_sample", **large)
    launches += launches_of("commit_path", L=80, B=70_000, Hkv=32, S=64, D=128, P=17)
    for name, (first, *others), *_ in launches:
        assert first < 2**31 and all(n <= 65535 for n in others), name


PROJECTIONS = {
    "k-is-V": (1, 16, 7, 7, FP32), "V-no-tile-divides": (5, 70, 997, 4, FP32), "70-rows": (70, 32, 130, 5, FP32),
    "several-tiles-a-program": (3, 17, 1303, 2, FP32), "k-is-V-is-32": (2, 16, 32, 32, BF16),
    "bfloat16": (17, 96, 997, 5, BF16), "bfloat16-8-rows": (8, 192, 1450, 8, BF16),
    "bfloat16-64-rows": (64, 128, 550, 3, BF16),
    "float16": (16, 33, 130, 1, FP16), "float16-128-rows": (65, 64, 300, 4, FP16),
    "bfloat16-two-row-tiles": (130, 80, 130, 2, BF16),
}


@pytest.mark.parametrize("gathered, noisy", [
    pytest.param(False, False, id="all-tokens", marks=slow_to_interpret), pytest.param(True, False, id="vocab-ids"),
    pytest.param(False, True, id="noise"), pytest.param(True, True, id="vocab-ids-noise", marks=slow_to_interpret)])
@pytest.mark.parametrize("M, C, V, k, dtype", PROJECTIONS.values(), ids=PROJECTIONS.keys())
def test_project_topk_matches_float64(M, C, V, k, dtype, gathered, noisy, device):
    """Bug: a tile or a channel left out, padding in the log-sum-exp, a column mistaken for a token id, an assumed
    stride; noise of a column instead of a token id, or of another row; noise in greedy rows."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, C, generator=generator).to(dtype) for n in (M, V))
    rows = torch.randperm(3 * V, generator=generator)[:V].sort().values.int() if gathered else None
    ids = torch.arange(V) if rows is None else rows
    scores = hidden.double() @ weight.double().T
    noise, B = None, M // 2 if M % 2 == 0 else M  # sequences of two rows, or of one
    if noisy:
        temperature = torch.tensor([0.0, 0.7, 3.0]).repeat(B)[:B]
        noise = [temperature, torch.arange(B) - 1, torch.arange(B) * 2**40, torch.randperm(M, generator=generator)]
        scores += temperature.repeat_interleave(M // B)[:, None] * kernels.gumbel(
            *noise[1:], ids)
        noise = [x.to(device) for x in noise]
    want = torch.log_softmax(scores, -1)
    args = hidden.to(device), weight.to(device), k, None if rows is None else rows.to(device)
    if C in (32, 33):
        args = every_second(args[0]), every_second(args[1].T).T, k, None if rows is None else every_second(args[3])
    logprobs, tokens = (x.cpu() for x in kernels.project_topk(*args, noise))
    assert logprobs.dtype == torch.float32 and tokens.dtype == torch.int64 and logprobs.shape == tokens.shape == (M, k)
    assert torch.allclose(logprobs.double(), want.topk(k).values, atol=1e-4)
    assert torch.allclose(logprobs.double(), want.gather(1, torch.searchsorted(ids, tokens)), atol=1e-4)
    assert all(len(set(row)) == k for row in tokens.tolist())


@pytest.mark.parametrize("order", ["ascending", "shuffled"])
@pytest.mark.parametrize("V, k, multiprocessors", [(200, 32, 4), (1500, 3, 4), (1500, 5, 1)])
def test_the_first_of_equal_logits_wins(V, k, multiprocessors, order, device, monkeypatch):
    """Bug: another of equal logits wins, in a tile, between tiles or programs, or is replaced by a later tile's."""
    monkeypatch.setattr(kernels, "_gpu", lambda _: h200(multiprocessors))
    generator = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randint(-1, 2, (n, 24), generator=generator) for n in (4, V))
    token = torch.arange(V)
    weight = weight[token // 256 * 256 + token % 128]  # every other tile of 128 repeats the one before
    weight[V // 2:] = weight[:V - V // 2].clone()
    rows = None if order == "ascending" else torch.randperm(V, generator=generator).int()
    ids = token.tolist() if rows is None else rows.tolist()
    logits = (hidden @ weight.T).tolist()
    want = [[ids[i] for i in sorted(range(V), key=lambda i: (-row[i], i))[:k]] for row in logits]
    hidden, weight = hidden.float().to(device), weight.float().to(device)
    rows = None if rows is None else rows.to(device)
    assert kernels.project_topk(hidden, weight, k, rows)[1].tolist() == want
    if rows is None:
        place = torch.zeros(4, dtype=torch.int64, device=device)
        assert kernels.project_sample(hidden, weight, 0.0, 0, place, place).tolist() == [row[0] for row in want]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN
def test_projections_survive_infinity_and_nan(device):
    """Bug: an endless loop or a token outside the vocabulary if logits overflow; NaN that ranks first."""
    weight = torch.randn(20, 16, generator=torch.Generator().manual_seed(8)).to(device)
    hidden = torch.stack([torch.full((16,), value, device=device) for value in (math.inf, -math.inf, math.nan, 1.0)])
    place = torch.arange(4, device=device)
    for tokens in (kernels.project_topk(hidden, weight, 3)[1],
                   *(kernels.project_sample(hidden, weight, t, 0, place, place) for t in (0.0, 1.0))):
        assert 0 <= tokens.min() and tokens.max() < 20
        assert all(len(set(row)) == len(row) for row in tokens.view(4, -1).tolist())
    weight[3:5] = math.nan
    hidden, place = torch.ones(8, 16, device=device), torch.arange(8, device=device)
    noise = torch.full((8,), 0.5, device=device), torch.zeros_like(place), place, place
    for given in (None, noise):
        logprobs, tokens = kernels.project_topk(hidden, weight, 20, noise=given)
        assert tokens[:, 18:].tolist() == [[3, 4]] * 8 and (logprobs[:, 18:] == -math.inf).all()
        assert logprobs[:, :18].exp().sum(1).allclose(torch.ones(8, device=device))
    filtered = partial(kernels.sample_filtered, hidden @ weight.T, top_k=0, top_p=0.9, min_p=0.0, seed=0)
    for temperature in (0.0, 1.5):
        own = kernels.project_sample(hidden, weight, temperature, 0, place, place)
        others = filtered(temperature=torch.full((8,), temperature, device=device), sequence=place, position=place)
        assert not {3, 4} & {*own.tolist(), *others.tolist()} and (len({*own.tolist()}) > 1) == (temperature > 0)


def noise_by_hand(seed, sequence, position, token):
    """The noise in Python integers, from its documentation."""
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
    """Bug: the noise, and with it all sampled output, changes in a new version, with a sign or by an overflow."""
    places, tokens = [(0, 0), (3, 2**33 + 1), (2**40, 7)], torch.tensor([0, 1, 128255])
    want = torch.tensor([[noise_by_hand(seed, *place, token) for token in tokens.tolist()] for place in places])
    sequence, position = torch.tensor(places).T
    got = kernels.gumbel(seed, sequence, position, tokens)
    assert got.dtype == torch.float32 and torch.allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("D, dtype, integers", [(20, FP32, torch.int64), (80, BF16, torch.int32)], ids=["fp32", "bf16"])
def test_commit_path_moves_only_the_path(D, dtype, integers, device):
    """Bug: a row overwritten before it is read, nodes beyond count moved, or rows outside the path changed."""
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


@records
@pytest.mark.parametrize("cases", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_kernels_under_the_interpreter(cases):
    """Bug: any bug of the other tests, in the Triton kernels."""
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if triton < (3, 7) and numpy >= (2, 4):
        pytest.skip("the interpreter of triton 3.6 converts arrays to numbers in a way that numpy 2.4 rejects")
    files = [file for name in ("kernels", "backends_linear", "backends_sampling", "backends_tree", "recurrent_delta")
             for file in ROOT.glob(f"tests/test_{name}*.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", cases, *files]
    variables = dict(TRITON_INTERPRET="1", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # numpy's threads compete
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0 and int(re.search(r"(\d+) passed", done.stdout)[1]) > 80, done.stdout[-8000:]
