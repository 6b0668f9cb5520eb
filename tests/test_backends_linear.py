"""backends/linear.py, as in test_kernels.py, against formulas in float64."""

import math

import pytest
import torch

import kernels
from backends.gpu import QuantizedHead
from backends.linear import Quantized, dequantize, linear_rows
from backends.quantized import select_rows, stack
from conftest import needs_cuda
from test_kernels import BF16, DTYPES, FP16, FP32, every_second, glu_formula, slow_to_interpret

ERROR = {FP32: 2e-6, FP16: 2e-3, BF16: 3e-2}  # of the largest output; the interpreter truncates bfloat16
FORMATS = {  # name: (dtype of q, inputs that share a scale, dtype of minimums)
    "int8": (torch.int8, None, None), "int8-groups": (torch.int8, 16, None), "int8-minimums": (torch.int8, 32, FP16),
    "int8-zeros": (torch.int8, 64, torch.int8), "fp8": (torch.float8_e4m3fn, 64, None),
    "int4": (torch.uint8, 64, None), "int4-minimums": (torch.uint8, 32, BF16),
    "int4-zeros": (torch.uint8, 32, torch.uint8)}


def draw(*shape):
    return torch.randn(shape) / math.sqrt(shape[-1])


def draw_quantized(N, K, kind, group, minimums, order=False):
    G = K // (group or K)
    bits = torch.randint(0, 256, (N, K // 2 if kind == torch.uint8 else K), dtype=torch.uint8)
    if kind == torch.float8_e4m3fn:
        bits = torch.where(bits & 127 == 127, 0, bits)  # NaN
    scales = (0.5 + torch.rand(G, N)).mul(0.01).to(minimums if minimums == BF16 else FP16)
    if minimums is not None:
        drawn = torch.randn(G, N).mul(0.1) if minimums.is_floating_point else torch.randint(0, 16, (G, N))
        minimums = drawn.to(minimums)
    return Quantized(bits.view(kind), scales, minimums, torch.randperm(K).int() if order else None)


def on(device, weight):
    """The same weight on a device, with scales, minimums and order that are not contiguous."""
    if not isinstance(weight, Quantized):
        return weight.to(device)
    q, *others = weight
    return Quantized(q.to(device), *(x if x is None else every_second(x.to(device)) for x in others))


def values(weight):
    """The weight in float64, by other means than `Quantized.values`."""
    if not isinstance(weight, Quantized):
        return weight.double()
    q, scales, minimums, order = weight
    N, C = weight.shape
    numbers = q.double()
    if weight.per_byte == 2:
        nibbles = [[byte >> shift & 15 for byte in row for shift in (0, 4)] for row in q.tolist()]
        numbers = torch.tensor(nibbles).double()
    spread = lambda x: x.double().T.repeat_interleave(C // len(scales), dim=1)
    found = numbers * spread(scales)
    if minimums is not None:
        found += spread(minimums) * (1 if minimums.is_floating_point() else -spread(scales))
    return found if order is None else found[:, order.argsort()]


def formula(x, weight, bias, norm, activation, residual):
    x = x.double()
    if norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.double()
    y = x @ values(weight).T + (0 if bias is None else bias.double())
    if activation is not None:
        y = glu_formula(*y.chunk(2, -1), activation)
    return y + (0 if residual is None else residual.double())


def check(M, N, weight, dtype, device, present, activation=None):
    """Compares linear_rows with the formula."""
    outputs, K = weight.shape
    x = 3 * torch.randn(M, K).to(dtype)
    bias = torch.randn(outputs).to(dtype) if "bias" in present else None
    norm = torch.randn(K).to(dtype) if "norm" in present else None
    residual = torch.randn(M, N).to(dtype) if "residual" in present else None
    want = formula(x, weight, bias, norm, activation, residual)
    args = [y if y is None else every_second(y.to(device)) for y in (x, bias, norm, residual)]
    got = linear_rows(args[0], on(device, weight), args[1], norm=args[2], eps=1e-3, activation=activation,
                      residual=args[3])
    assert got.dtype == dtype and got.shape == want.shape
    assert (got.double().cpu() - want).abs().max() <= ERROR[dtype] * want.abs().max()


@DTYPES
@pytest.mark.parametrize("present, activation", [
    ("", None), ("norm bias", "silu"), ("norm", "gelu"), ("bias residual", None)], ids=str)
@pytest.mark.parametrize("M, N, K", [(1, 80, 111), (5, 33, 576), (16, 1, 64), (17, 80, 111), (64, 70, 130),
                                     pytest.param(2, 1536, 576, marks=slow_to_interpret),
                                     pytest.param(33, 576, 1536, marks=slow_to_interpret)])
def test_linear_rows_is_the_formula(M, N, K, present, activation, dtype, device):
    """Bug: padding in the mean of squares, a norm of the product, gate and up swapped, another tile, a stride."""
    torch.manual_seed(M)
    weight = draw(N if activation is None else 2 * N, K).to(dtype)
    check(M, N, weight, dtype, device, present, activation)


@pytest.mark.parametrize("M, dtype", [(1, FP32), (17, BF16), (65, FP32),
                                      pytest.param(256, BF16, marks=slow_to_interpret)], ids=str)
@pytest.mark.parametrize("kind", FORMATS)
def test_quantised_weights_are_unpacked_in_the_product(kind, M, dtype, device):
    """Bug: nibbles swapped, another group's scale, the sign of a zero, an e4m3 exponent or subnormal, act-order."""
    torch.manual_seed(M)
    gated = M == 17
    weight = draw_quantized(40, 192, *FORMATS[kind], order=M == 65)
    check(M, 20 if gated else 40, weight, dtype, device, "norm", "silu" if gated else None)


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_are_dequantised(kind, device):
    """Bug: a row's scales of another row, a token id in 32 bits, the last tile."""
    weight = draw_quantized(37, 576, *FORMATS[kind], order=kind == "int4-zeros")
    want, rows = values(weight), torch.tensor([[36, 0, 5], [5, 9, 35]])
    for some, part in ((None, want), (rows.to(device), want[rows])):
        got = dequantize(on(device, weight), FP32, some)
        torch.testing.assert_close(got.cpu().double(), part, rtol=1e-6, atol=1e-7)


def test_a_row_of_nan_leaves_the_others_alone(device):
    x, weight = torch.randn(7, 96), draw(64, 96)
    x[3] = math.nan
    got = linear_rows(x.to(device), weight.to(device), norm=torch.ones(96, device=device), activation="silu").cpu()
    assert got[3].isnan().all() and got[[0, 1, 2, 4, 5, 6]].isfinite().all()


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("kind", [None, *FORMATS])
def test_the_bits_of_a_row_do_not_depend_on_the_others(kind):
    """Bug: another tile or order of sums for more rows. The interpreter adds in another order, so only on a GPU."""
    for N, K in ((4096, 4096), (576, 1536), (6144, 4096)):
        weight = on("cuda", draw(N, K).to(BF16) if kind is None else draw_quantized(N, K, *FORMATS[kind]))
        x, norm = torch.randn(64, K, dtype=BF16, device="cuda"), torch.rand(K, dtype=BF16, device="cuda")
        for others in (dict(norm=norm), {}, dict(norm=norm, activation="silu")):
            alone = linear_rows(x[:1], weight, **others)
            for M in (2, 16, 17, 33, 64):
                assert torch.equal(linear_rows(x[:M], weight, **others)[:1], alone), (N, K, M, [*others])


@pytest.mark.parametrize("kind", ["int8-groups", "fp8", "int4-minimums"])
def test_the_lm_heads_kernels_read_quantised_weights(kind, device):
    """Bug: a scale of another token, noise or a token of the unpacked weight only, act-order that is ignored."""
    torch.manual_seed(1)
    weight, hidden = draw_quantized(150, 64, *FORMATS[kind], order=kind == "int4-minimums"), torch.randn(6, 64)
    place = torch.arange(6)
    logits = hidden.double() @ values(weight).T
    args = hidden.to(device), on(device, weight)
    got = QuantizedHead(args[1], FP32).logits(args[0])
    torch.testing.assert_close(got.cpu().double(), logits, rtol=1e-4, atol=1e-4)
    logprobs, tokens = kernels.project_topk(*args, 3)
    want = logits.log_softmax(-1).topk(3)
    assert torch.equal(tokens.cpu(), want.indices)
    torch.testing.assert_close(logprobs.cpu().double(), want.values, rtol=1e-4, atol=1e-4)
    noisy = logits + 0.8 * kernels.gumbel(5, place, place, torch.arange(150))
    got = kernels.project_sample(*args, 0.8, 5, *[place.to(device)] * 2)
    assert torch.equal(got.cpu(), noisy.argmax(-1))


@pytest.mark.parametrize("kinds", [("int4-zeros", "int8-groups"), ("int4-minimums", "int8-groups"),
                                   ("int4-zeros", "int4-zeros"), ("int8-minimums", "int4-zeros")], ids="+".join)
def test_parts_of_a_layer_are_stacked_with_their_values(kinds):
    """Bug: a part's scale lost in a smaller group, a zero that is not subtracted, parts swapped."""
    parts = [draw_quantized(n, 192, *FORMATS[kind]) for n, kind in zip((5, 3), kinds)]
    torch.testing.assert_close(values(stack(parts)), torch.cat([*map(values, parts)]), rtol=1e-3, atol=1e-3)
    index = torch.tensor([4, 0, 2])
    assert torch.equal(values(select_rows(parts[0], index)), values(parts[0])[index])
