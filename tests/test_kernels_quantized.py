"""linear_quantized and LM heads of int8, tested as in test_kernels.py, against products in float64 of weights that are
made one number at a time."""

import pytest
import torch

import kernels
from conftest import toy_model
from hf import checkpoint
from kernels import QuantizedWeight
from test_hf_quantization import write_quantised
from test_kernels import BF16, FP16, FP32, INTERPRETED, device, set_gpu, slow_to_interpret

ERROR = {FP32: 1e-6, FP16: 1e-3, BF16: 2**-7}  # of the largest result; the interpreter does not round
__all__ = ["device"]  # the fixture


def quantized(kind, N, C, group=None, zeros=False, scales=FP16):
    """(a random QuantizedWeight, its values float64 [N, C]): each number is put where the layout says."""
    G = C // group if group else 1
    scale = (torch.rand(G, N) / 10 + 0.01).to(scales)
    zero = torch.randint(0, 17, (G, N), dtype=torch.int8) if zeros else None
    bits = 4 if kind == "int4" else 8
    width = 128 * bits // 32  # words of a step
    words = torch.randint(-2**31, 2**31, (N, -(-C // 128) * width))  # padding holds anything
    value = torch.empty(N, C, dtype=torch.float64)
    for c in range(C):
        step, plane, lane = c // 128, c % 128 // width, c % width
        code = words[:, step * width + lane] >> plane * bits & 2**bits - 1
        if kind == "e4m3":
            code[code & 127 == 127] -= 1  # no NaN
            words[:, step * width + lane] &= ~(255 << plane * bits)
            words[:, step * width + lane] |= code << plane * bits
            q = code.to(torch.uint8).view(torch.float8_e4m3fn).double()
        else:
            q = code - 256 * (code > 127)
        offset = 8 if kind == "int4" else 0
        g = c // (C // G)
        value[:, c] = (q - (zero[g] if zeros else offset)) * scale[g].double()
    packed = (words + 2**31) % 2**32 - 2**31  # as int32
    return QuantizedWeight(packed.int(), scale, zero, kind), value


def on(device, *arguments):
    return [x.to(device) if torch.is_tensor(x) else x for x in arguments]


# kind, N, C, channels of a group, zeros, bias, M, dtype. Between them: N that fills no tile, C that fills no step, all
# groups, one split and several, M of all tiles.
CASES = {
    "int4": ("int4", 37, 256, 128, True, True, 1, BF16),
    "int4-half": ("int4", 130, 512, 64, True, False, 17, FP16),
    "int4-groups-of-32": ("int4", 129, 288, 32, False, True, 3, BF16),
    "int4-float32": ("int4", 70, 320, 64, True, True, 64, FP32),
    "int4-rows": ("int4", 33, 1000, None, False, False, 128, BF16),
    "int4-splits": ("int4", 64, 2048, 128, True, True, 5, BF16),
    "int8-rows": ("int8", 37, 100, None, False, True, 3, BF16),
    "int8-groups": ("int8", 131, 1280, 128, True, False, 16, FP16),
    "int8-groups-of-32": ("int8", 20, 160, 32, True, False, 100, FP32),
    "e4m3-blocks": ("e4m3", 131, 384, 128, False, True, 128, BF16),
    "e4m3-rows": ("e4m3", 31, 700, None, False, False, 16, FP16),
}


@pytest.mark.parametrize("capability", [pytest.param(8, marks=slow_to_interpret), 9])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_linear_quantized(case, capability, device, monkeypatch):
    """Bug: a number of another plane, a group's scale or zero one step off, padding that counts, a split left out."""
    if device == "cpu":
        set_gpu(monkeypatch, major=capability)
    kind, N, C, group, zeros, biased, M, dtype = case
    weight, value = quantized(kind, N, C, group, zeros)
    x = torch.full((2 * M, C + 3), torch.nan, dtype=dtype)[::2, :C]
    x[:] = torch.randn(M, C)
    bias = torch.randn(N).to(dtype) if biased else None
    want = x.double() @ value.T + (0 if bias is None else bias.double())
    got = kernels.linear_quantized(*on(device, x, *weight, bias))
    assert got.dtype == dtype and got.shape == (M, N)
    out = torch.empty(N, C, dtype=dtype)
    assert torch.equal(kernels.dequantize(*weight, C, dtype, out), value.to(dtype))  # rounded once
    assert torch.equal(kernels.dequantize(*weight, C, dtype), out)
    torch.testing.assert_close(got.cpu().double(), want, rtol=0, atol=ERROR[dtype] * want.abs().max().item())


@pytest.mark.parametrize("kind, group, capability", [
    ("int4", 128, 9), ("e4m3", 128, 8), *(pytest.param(*case, marks=slow_to_interpret) for case in (
        ("int4", 128, 8), ("int4", 32, 9), ("int8", None, 9)))])
def test_a_row_does_not_depend_on_the_others(kind, group, capability, device, monkeypatch):
    """Bug: tiles of other sizes, or splits, that sum in another order; a row of NaN that reaches its neighbours."""
    if not (INTERPRETED or device == "cuda"):
        pytest.skip("the reference takes torch's products")
    if device == "cpu":
        set_gpu(monkeypatch, major=capability)
    weight = on(device, *quantized(kind, 70, 1280, group, kind == "int4")[0])
    x = torch.randint(-8, 9, (128, 1280)).to(BF16).to(device)  # numpy's sums, too, are exact then
    x = x if device == "cpu" else torch.randn_like(x)
    x[2] = torch.nan
    together = kernels.linear_quantized(x, *weight)
    assert together[2].isnan().all() and together[3:].isfinite().all()
    for M in (1, 17, 64):
        assert torch.equal(kernels.linear_quantized(x[3:3 + M], *weight), together[3:3 + M])


@pytest.mark.parametrize("M, dtype, gathered", [
    (1, FP32, True), (1, BF16, False), pytest.param(33, BF16, True, marks=slow_to_interpret),
    (65, FP32, False)])
def test_lm_heads_of_int8(M, dtype, gathered, device):
    """Bug: a scale of another row, or noise that is scaled too."""
    V, C = 300, 96
    hidden = torch.randn(M, C).to(dtype)
    weight = torch.randint(-127, 128, (V, C), dtype=torch.int8)
    scales = (torch.rand(2 * V) / 50 + 0.001)[::2]
    ids = torch.randperm(V)[:77].int() if gathered else torch.arange(V).int()
    logits = hidden.double() @ (weight.double() * scales[:, None].double()).T
    args = [x.to(device) for x in (hidden, weight)]
    logprobs, tokens = kernels.project_topk(*args, 4, ids.to(device) if gathered else None, scales=scales.to(device))
    want = logits[:, ids].log_softmax(-1).topk(4)
    assert torch.equal(tokens.cpu(), ids[want.indices].long())
    torch.testing.assert_close(logprobs.cpu().double(), want.values, rtol=0, atol=1e-4)
    place = torch.arange(M)
    got = kernels.project_sample(*args, 0.8, 7, place.to(device), place.to(device), scales=scales.to(device))
    assert torch.equal(got.cpu(), (logits / 0.8 + kernels.gumbel(7, place, place, torch.arange(V))).argmax(-1))


@pytest.mark.skipif(not INTERPRETED, reason="layers call the kernels where these run")
@pytest.mark.parametrize("kind", [
    "fp8", "int4", *(pytest.param(kind, marks=slow_to_interpret) for kind in ("awq", "int8"))])
def test_a_packed_model_says_what_it_says_dequantised(kind, tmp_path):
    """Bug: a layer that hands its kernel other rows, scales or groups than it holds."""
    if kind.startswith("int"):
        toy_model(n_embd=128, head_size=32, n_inner=160, n_layer=1).save_pretrained(tmp_path)
        path, quantize = tmp_path, kind
    else:
        path, quantize = write_quantised(tmp_path, kind, n_layer=1), None
    packed, dense = (checkpoint.load(path, FP32, "cpu", None, quantize, packed) for packed in (True, False))
    assert packed.hash == dense.hash and len(list(packed.parameters())) < len(list(dense.parameters()))
    tokens = torch.randint(0, 97, (1, 9))
    got, want = (model.head.logits(model.norm(model(tokens))[0]) for model in (packed, dense))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * want.abs().max().item())
