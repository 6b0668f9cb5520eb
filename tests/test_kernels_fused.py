"""The small fused operations, as in test_kernels.py, against formulas in float64 or plain Python."""

import math

import pytest
import torch

import kernels
from static import BF16, FP16, FP32
from test_kernels import DTYPES, INTERPRETED, every_second, glu_formula

ERROR = {FP32: 3e-6, FP16: 3e-3, BF16: 2.5e-2}  # a few roundings of numbers from about 1 to 3


def close(got, want, dtype):
    assert got.dtype == dtype and got.shape == want.shape
    torch.testing.assert_close(got.double().cpu(), want, atol=ERROR[dtype], rtol=ERROR[dtype])


def normal(*shape, dtype=FP32):
    return torch.randn(*shape).to(dtype)


@DTYPES
@pytest.mark.parametrize("kind", ["rms", "layer", "no-weight", "no-delta"])
@pytest.mark.parametrize("shape", [(1, 16), (2, 63), (5, 1111)], ids=str)
def test_add_norm_is_the_formula(shape, kind, dtype, device):
    """Bug: padding in the mean, a norm of the unrounded sum, a bias in RMSNorm."""
    C = shape[-1]
    x, delta = 2 * normal(*shape, dtype=dtype), normal(*shape, dtype=dtype)
    weight, bias = normal(C, dtype=dtype), normal(C, dtype=dtype) if kind == "layer" else None
    delta, weight = None if kind == "no-delta" else delta, None if kind == "no-weight" else weight
    want = (x.double() + (0 if delta is None else delta.double())).to(dtype).double()
    normed = want - want.mean(-1, keepdim=True) if kind == "layer" else want
    normed = normed / (normed.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    normed = normed if weight is None else normed * weight.double()
    normed = normed if bias is None else normed + bias.double()
    on_device = [y if y is None else every_second(y.to(device)) for y in (x, delta, weight, bias)]
    if kind == "layer":  # as in training under autocast
        on_device[2:] = [y.float() for y in on_device[2:]]
    got = kernels.add_norm(*on_device, 1e-3)
    close(got[0], normed, dtype)
    close(got[1], want, dtype)
    assert torch.equal(got[1].double().cpu(), want) or INTERPRETED and dtype == BF16  # the interpreter truncates


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("N", [1, 63, 1025])
def test_glu_is_the_formula(N, activation, dtype, device):
    """Bug: gate and up swapped, a column of the next row, an overflow of the exponential."""
    x = normal(2, 3, 2 * N, dtype=dtype)
    x[0, 0, 0], x[1, 2, 0] = -60, 60
    want = glu_formula(*x.double().chunk(2, -1), activation)
    close(kernels.glu(every_second(x.to(device)), activation), want, dtype)


@DTYPES
@pytest.mark.parametrize("C, n_head", [(16, 1), (111, 3), (1024, 2)])
def test_cosine_mix_is_the_formula(C, n_head, dtype, device):
    """Bug: a cosine over all heads or over another head's channels, a division by zero."""
    z, q, kv = normal(2, 3, C, dtype=dtype), normal(2, 3, C, dtype=dtype), normal(2, 3, 2 * C, dtype=dtype)
    if dtype != FP16 or kernels.runs_triton(torch.zeros(1, device=device)):  # torch's own gives NaN in float16
        q[1, 1] = 0
    parts = lambda x: x.double().view(2, 3, n_head, -1)
    (k, v), q64 = map(parts, kv.chunk(2, -1)), parts(q)
    cosine = (q64 * k).sum(-1) / (q64.norm(dim=-1) * k.norm(dim=-1)).clamp(min=1e-30)
    want = (parts(z) + cosine[..., None] * v).view(2, 3, C)
    close(kernels.cosine_mix(*(every_second(x.to(device)) for x in (z, q, kv)), n_head), want, dtype)


# B, T, Hq, Hkv, D, rotated, normed. They cover D 16 to 256, odd sizes and sizes that do not fill a tile; one query head
# per key head and 8; more heads than one program has.
ROPE = {
    "llama": (2, 5, 8, 2, 64, True, False),
    "qwen-3": (3, 1, 4, 2, 128, True, True),
    "gpt-2": (1, 7, 3, 3, 16, False, False),
    "odd-head": (2, 3, 2, 1, 21, False, True),
    "wide-head": (1, 2, 8, 1, 256, True, True),
    "many-heads": (1, 1, 33, 11, 80, True, False),
}


@DTYPES
@pytest.mark.parametrize("case", ROPE.values(), ids=ROPE.keys())
def test_rope_cache_rotates_and_writes(case, dtype, device):
    """Bug: values rotated, the keys' weight applied to a query head, a write to another row."""
    B, T, Hq, Hkv, D, rotated, normed = case
    S, H = T + 9, Hq + 2 * Hkv
    qkv, kv = normal(B, T, H, D, dtype=dtype), torch.full((2, B, Hkv, S, D), math.nan, dtype=dtype)
    lengths = torch.randint(0, S - T + 1, (B,))
    rows = lengths[:, None] + torch.arange(T)
    angles = torch.rand(B, T, 1, D // 2) * 6
    cos, sin = torch.cat([angles.cos()] * 2, -1).to(dtype), torch.cat([-angles.sin(), angles.sin()], -1).to(dtype)
    weights = (normal(D, dtype=dtype), normal(D, dtype=dtype)) if normed else (None, None)

    want = qkv.double()
    for part, weight in (((slice(0, Hq)), weights[0]), (slice(Hq, Hq + Hkv), weights[1])):
        x = want[:, :, part]
        x = x if weight is None else x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        if rotated:
            turn = torch.complex(cos.double(), sin.double())[..., D // 2:]
            x = torch.complex(x[..., :D // 2], x[..., D // 2:]) * turn
            x = torch.cat((x.real, x.imag), -1)
        want[:, :, part] = x
    cache = kv.double()
    for b in range(B):
        for t in range(T):
            cache[0, b, :, rows[b, t]], cache[1, b, :, rows[b, t]] = want[b, t, Hq:Hq + Hkv], want[b, t, Hq + Hkv:]

    strided = every_second(kv.to(device)).transpose(2, 3).contiguous().transpose(2, 3)
    rope = every_second(torch.cat((cos, sin), 2).to(device)) if rotated else None
    lengths = lengths.to(device, torch.int32 if rotated else torch.int64)
    weights = [every_second(x.to(device)) for x in weights if x is not None]
    q = kernels.rope_cache(every_second(qkv.to(device)), rope, strided, lengths, *weights)
    close(q, want[:, :, :Hq], dtype)
    got, written = strided.double().cpu(), ~cache.isnan()
    assert torch.equal(written, ~got.isnan())
    torch.testing.assert_close(got[written], cache[written], atol=ERROR[dtype], rtol=ERROR[dtype])
    values = lambda x: torch.stack([x[1, b, :, rows[b]] for b in range(B)])
    assert torch.equal(values(got), values(cache))  # bit for bit


@pytest.mark.skipif(not INTERPRETED, reason="on a CPU the reference indexes as torch does")
def test_rope_cache_skips_rows_outside_the_cache():
    """Bug: a write before or after the cache, to another sequence or beyond the memory."""
    outer = torch.zeros(2, 2, 1, 12, 16)
    kernels.rope_cache(torch.ones(2, 2, 3, 16), None, outer[:, :, :, 4:8], torch.tensor([-1, 3]))
    assert outer[..., 0].nonzero()[:, 1:4:2].tolist() == [[0, 4], [1, 7]] * 2
