"""`linear_rows`, a linear layer for few rows with the operations around it, and quantised weights,
which it and the LM head's kernels read as they are stored. Laid out like kernels.py.

Letters: M rows, C inputs, N outputs, G groups of inputs that share a scale."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels import (
    SIZES,
    activate,
    contiguous,
    dot,
    fits,
    glu_reference,
    is_real,
    launch,
    load_rows,
    reader,
    require,
    runs_triton,
    strides,
    tl,
    triton,
)

FLOATS = torch.float32, torch.float16, torch.bfloat16
PACKED = torch.int8, torch.uint8, torch.float8_e4m3fn
MOST_MEMORY = 96 * 1024  # bytes of shared memory that a program may have on any GPU


# --------------------------------------------------------------------------------------------------
# Quantised weights

class Quantized(NamedTuple):
    """A weight [N, C] = q * scale + minimum. C / G inputs of a row share a scale."""
    q: torch.Tensor       # int8 or float8_e4m3 [N, C]; uint8 [N, C / 2]: two of 4 bits, low first
    scales: torch.Tensor  # [G, N], any float
    minimums: torch.Tensor | None = None  # [G, N]; uint8 or int8: zeros, minimum = -zero * scale
    order: torch.Tensor | None = None     # int32 [C]: the channel of x for each column of q

    @property
    def shape(self):
        N, bytes_per_row = self.q.shape
        return torch.Size((N, bytes_per_row * self.per_byte))

    @property
    def per_byte(self):
        return 2 if self.q.dtype == torch.uint8 else 1

    @property
    def group(self):
        """Inputs that share a scale."""
        return self.shape[1] // len(self.scales)

    def check(self, x=None):
        """Raises ValueError unless x [..., C] can be multiplied by this weight."""
        q = self.q
        N, C = self.shape
        G = len(self.scales)
        require(q.dtype in PACKED and q.numel() > 0 and fits(self.scales, q, (G, N), *FLOATS)
                and fits(self.minimums, q, (G, N), *FLOATS, torch.uint8, torch.int8)
                and fits(self.order, q, (C,), torch.int32)
                and G in (1, *(C / size for size in (16, 32, 64, 128)))
                and (x is None or x.shape[-1] == C and x.device == q.device),
                f"{SIZES}, x [..., {C}], scales of 16, 32, 64, 128 or all inputs", x, *self)

    def reader(self, x):
        """As in `kernels.reader`: gathers x in the order of the columns."""
        self.check(x)
        q = self.q
        if q.dtype == torch.float8_e4m3fn:  # Triton converts it only on new GPUs
            q = q.view(torch.uint8)
        stored = q, *map(contiguous, (self.scales, self.minimums)), *strides(q)
        x = x if self.order is None else x.index_select(-1, self.order)
        return x, load_quantized, stored, (self.group, self.per_byte)

    def values(self, dtype=torch.float32, rows=None):
        """`dequantize` by the formula."""
        select = lambda x: x if x is None or rows is None else x[..., rows]
        scales, minimums = (select(x) for x in (self.scales, self.minimums))
        scales = scales.float().movedim(0, -1)[..., None]  # (N, G, 1)
        q = self.q if rows is None else self.q[rows]
        q = unpack_nibbles(q) if self.per_byte == 2 else q
        values = q.float().unflatten(-1, (-1, self.group)) * scales  # (N, G, group)
        if minimums is not None:
            factor = 1 if minimums.is_floating_point() else -scales
            values += minimums.float().movedim(0, -1)[..., None] * factor
        return self.in_order(values.flatten(-2).to(dtype))

    def in_order(self, values):
        """Values [..., C] of the columns of q -> of the channels of x."""
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(-1, self.order.long(), values)


def unpack_nibbles(x):
    """uint8 [..., n] -> its numbers of 4 bits, uint8 [..., 2 n], low ones first."""
    return torch.stack((x & 15, x >> 4), dim=-1).flatten(-2)


@triton.jit
def _small_float(x, ZERO: tl.constexpr):
    """uint8 - ZERO in float32, exactly. The bits of 2^23 + x are set, because conversions have a
    quarter of the rate of other instructions."""
    return (x.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)


@triton.jit
def _numbers(q, PER_BYTE: tl.constexpr):
    """The numbers of quantised weights in float32. uint8 of one per byte is float8_e4m3, whose NaN
    becomes 480."""
    if PER_BYTE == 2:
        numbers = _small_float(tl.interleave(q & 15, q >> 4), 0)
    elif q.dtype == tl.int8:
        numbers = _small_float(q.to(tl.uint8, bitcast=True) ^ 128, 128)
    else:  # float16 with the same bits of exponent and mantissa is 256 times smaller
        half = ((q & 0x80).to(tl.uint16) << 8) | ((q & 0x7F).to(tl.uint16) << 7)
        numbers = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return numbers


@triton.jit
def _scaled(numbers, scales_ptr, minimums_ptr, n, start, N, C: tl.constexpr, GROUP: tl.constexpr):
    """Numbers [BLOCK_N, BLOCK_C] times their scales plus their minimums."""
    BLOCK_N: tl.constexpr = numbers.shape[0]
    BLOCK_C: tl.constexpr = numbers.shape[1]
    # of the tile; a single group may have any size
    GROUPS: tl.constexpr = BLOCK_C // GROUP if GROUP < min(C, BLOCK_C) else 1
    group = tl.minimum(start // GROUP + tl.arange(0, GROUPS), (C - 1) // GROUP)
    # Where n is contiguous, masked loads of two or more values are pipelined; clamped ones are not.
    places = group.to(tl.int64)[None, :] * N + n[:, None]
    inside = (n < N)[:, None]
    scales = tl.load(scales_ptr + places, mask=inside, other=0.0).to(tl.float32)
    numbers = tl.reshape(numbers, [BLOCK_N, GROUPS, BLOCK_C // GROUPS]) * scales[:, :, None]
    if minimums_ptr is not None:
        minimums = tl.load(minimums_ptr + places, mask=inside, other=0).to(tl.float32)
        if minimums_ptr.dtype.element_ty.is_int():
            minimums *= -scales
        numbers += minimums[:, :, None]
    return tl.reshape(numbers, [BLOCK_N, BLOCK_C])


@triton.jit
def load_quantized(
    weight, rows, start, N, dtype: tl.constexpr, C: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """`kernels.load_rows` of a `Quantized` weight. FORMAT: (inputs that share a scale, numbers in a
    byte)."""
    q_ptr, scales_ptr, minimums_ptr, stride_n, stride_c = weight
    GROUP: tl.constexpr = FORMAT[0]
    PER_BYTE: tl.constexpr = FORMAT[1]
    q = load_rows((q_ptr, stride_n, stride_c), rows, start // PER_BYTE, N, dtype, C // PER_BYTE,
                  None, BLOCK_C // PER_BYTE)  # [BLOCK_N, BLOCK_C / PER_BYTE]
    return _scaled(_numbers(q, PER_BYTE), scales_ptr, minimums_ptr, rows, start, N, C,
                   GROUP).to(dtype)


@triton.jit
def _dequantize_kernel(
    q_ptr, scales_ptr, minimums_ptr, stride_n, stride_c, rows_ptr, out_ptr, n, N,
    C: tl.constexpr, FORMAT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """Program (tile of rows, tile of inputs)."""
    start = tl.program_id(1) * BLOCK_C
    place = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(place, n - 1)
    if rows_ptr is not None:
        row = tl.load(rows_ptr + row)
    weight = q_ptr, scales_ptr, minimums_ptr, stride_n, stride_c
    values = load_quantized(weight, row, start, N, out_ptr.dtype.element_ty, C, FORMAT, BLOCK_C)
    inputs = start + tl.arange(0, BLOCK_C)
    inside = inputs < C
    tl.store(out_ptr + place[:, None] * C + inputs[None, :], values,
             mask=(place < n)[:, None] & inside[None, :])


def dequantize(weight, dtype, rows=None):
    """A `Quantized` weight [N, C], or these rows of it, int64 [...] -> [N or ..., C] of this
    dtype."""
    weight.check()
    N, C = weight.shape
    if not runs_triton(weight.q):
        return weight.values(dtype, rows)
    rows = contiguous(rows)
    shape = (N,) if rows is None else rows.shape
    out = torch.empty(*shape, C, dtype=dtype, device=weight.q.device)
    n = math.prod(shape)
    _, _, stored, layout = weight._replace(order=None).reader(out)
    launch(_dequantize_kernel, (triton.cdiv(n, 8), triton.cdiv(C, 512)),
           *stored, rows, out, n, N, C=C, FORMAT=layout, BLOCK_N=8, BLOCK_C=512, num_warps=4)
    return weight.in_order(out)


# --------------------------------------------------------------------------------------------------
# linear_rows: a linear layer for few rows, with the operations around it
#
#   y = norm(x) @ weight.T + bias          norm: RMSNorm (arXiv 1910.07467), or none
#   out = residual + y, or residual + act(gate) * up for y = [gate, up]
#   weight = q * scale + minimum, rounded to x's dtype, if it is quantised (`Quantized`)
#
# RMSNorm multiplies a row by one number, and so does the product: the loop multiplies x by the
# norm's weight, sums the squares of x beside it, and the result is scaled at the end.
#
# N: outputs. Bytes: N * C elements of weight as they are stored, read once per 32 or 64 rows.
# FLOPs: 2 * M * N * C.
# The weight is the first operand, whose tile has 16 or 32 outputs. Neither it nor the order of sums
# depends on M, so the bits of a row do not depend on what is computed beside it. Hence nothing is
# split over C.

@triton.jit
def _fold(x, WIDTH: tl.constexpr):
    """Adds neighbours of each row until `WIDTH` sums are left. The order of tl.sum depends on the
    layout, which the compiler chooses, and not alike for all numbers of rows."""
    for _ in tl.static_range(7):
        if x.shape[1] > WIDTH:
            left, right = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
            x = left + right
    return x


@triton.jit(do_not_specialize=["M"])
def _linear_rows_kernel(
    x_ptr, norm_ptr, weight, bias_ptr, residual_ptr, out_ptr, stride_xm, stride_xk, eps, M, N,
    C: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, LOAD: tl.constexpr,
    FORMAT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """Program (tile of rows, tile of outputs). GATED: outputs N, N + 1, ... are up, others gate.
    weight, LOAD, FORMAT: from `kernels.reader`."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    outputs = 2 * N if GATED else N
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * stride_xm
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    # A thread loads 16 bytes of x, whose squares it adds up.
    SUMS: tl.constexpr = BLOCK_C * dtype.primitive_bitwidth // 128
    squares = tl.zeros([BLOCK_M, SUMS], tl.float32)
    for start in range(0, C, BLOCK_C):
        inputs = start + tl.arange(0, BLOCK_C)
        inside = (inputs < C) | (C % BLOCK_C == 0)
        # [BLOCK_M, BLOCK_C]
        x = tl.load(x_ptrs + inputs.to(tl.int64)[None, :] * stride_xk,
                    mask=(m < M)[:, None] & inside[None, :], other=0.0)
        if norm_ptr is not None:
            norm = tl.load(norm_ptr + inputs, mask=inside, other=0.0).to(tl.float32)
            exact = x.to(tl.float32)
            squares += _fold(exact * exact, SUMS)
            x = (exact * norm[None, :]).to(dtype)
        # [BLOCK_N, BLOCK_M] += [BLOCK_N, BLOCK_C] @ [BLOCK_C, BLOCK_M]
        rows = LOAD(weight, n, start, outputs, dtype, C, FORMAT, BLOCK_C)
        acc = dot(rows, tl.trans(x), acc)
        if GATED:
            rows = LOAD(weight, n + N, start, outputs, dtype, C, FORMAT, BLOCK_C)
            up = dot(rows, tl.trans(x), up)

    output = tl.minimum(n, N - 1)
    if norm_ptr is not None:
        scale = tl.rsqrt(tl.reshape(_fold(squares, 1), [1, BLOCK_M]) / C + eps)
        acc *= scale
        up *= scale
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + output).to(tl.float32)[:, None]
    if GATED:
        if bias_ptr is not None:
            up += tl.load(bias_ptr + output + N).to(tl.float32)[:, None]
        acc = activate(acc, GELU) * up
    places = m.to(tl.int64)[None, :] * N + n[:, None]
    mask = (m < M)[None, :] & (n < N)[:, None]
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, acc.to(out_ptr.dtype.element_ty), mask=mask)


def linear_rows(x, weight, bias=None, *, norm=None, eps=1e-5, activation=None, residual=None,
                dtype=None):
    """A linear layer for x [..., C], meant for up to 64 rows -> [..., N]. weight: [N, C], or a
    `Quantized` one. bias [N]. norm [C]: the weight of an RMSNorm of x before the product.
    activation, "silu" or "gelu": weight and bias are those of gate, then up, of N outputs each, and
    the result is act(gate) * up. residual [..., N]: added at the end. dtype: the result's, default
    x's."""
    *rows, C = x.shape
    outputs = weight.shape[0]
    parts = 1 if activation is None else 2
    N = outputs // parts
    plain = weight if isinstance(weight, torch.Tensor) else weight.check(x)
    require(is_real(x) and fits(plain, x, (outputs, C)) and fits(bias, x, (outputs,))
            and fits(norm, x, (C,), x.dtype, torch.float32) and fits(residual, x, (*rows, N))
            and activation in (None, "silu", "gelu") and parts * N == outputs,
            f"{SIZES}, silu, gelu or None", x, norm, residual, plain, bias, activation)
    if not runs_triton(x, plain, norm, bias, residual):
        return linear_rows_reference(x, weight, bias, norm=norm, eps=eps, activation=activation,
                                     residual=residual, dtype=dtype)
    x = x.reshape(-1, C)
    M = len(x)
    if norm is not None and isinstance(weight, Quantized) and weight.order is not None:
        norm = norm[weight.order]
    x, load, weight, layout = reader(x, weight)
    norm, bias, residual = map(contiguous, (norm, bias, residual))
    out = torch.empty(*rows, N, dtype=dtype or x.dtype, device=x.device)
    size = weight[0].element_size() / (layout[1] if layout else 1)
    blocks = _linear_blocks(M, C, size, x.dtype, activation is not None, norm is not None)
    launch(_linear_rows_kernel,
           (triton.cdiv(M, blocks["BLOCK_M"]), triton.cdiv(N, blocks["BLOCK_N"])),
           x, norm, weight, bias, residual, out, *strides(x), eps, M, N, C=C,
           GATED=activation is not None, GELU=activation == "gelu", LOAD=load, FORMAT=layout,
           **blocks)
    return out


LINEAR_TILES = {
    # case: most BLOCK_M, before it spills; BLOCK_N, BLOCK_C, num_warps
    "slow loads": (32, 32, 32, 4),  # float32, unaligned rows
    "16 bits": (64, 16, 128, 2),
    "norm, gated, or few inputs": (32, 32, 128, 2),
    "quantised": (64, 16, 256, 2),
}


def _linear_blocks(M, C, size, dtype, gated, normed):
    """Tile sizes and launch options; `pytest -m static` compiles every case. size: bytes of a
    weight's number. BLOCK_C does not depend on M: it is the order of sums."""
    case = "16 bits" if size == 2 else "quantised"
    if dtype == torch.float32 or C % 16:
        case = "slow loads"
    elif gated or (size < 2 and (normed or C < 2048)):
        case = "norm, gated, or few inputs"
    most_rows, BLOCK_N, BLOCK_C, num_warps = LINEAR_TILES[case]
    BLOCK_M = min(max(16, triton.next_power_of_2(M)), most_rows)
    stage = BLOCK_C * (BLOCK_N * (1 + gated) * size + BLOCK_M * dtype.itemsize)
    return dict(BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_C=BLOCK_C, num_warps=num_warps,
                num_stages=min(max(int(MOST_MEMORY // stage), 2), 6))


def linear_rows_reference(x, weight, bias=None, *, norm=None, eps=1e-5, activation=None,
                          residual=None, dtype=None):
    if norm is not None:
        x = F.rms_norm(x, x.shape[-1:], norm.to(x.dtype), eps)
    if isinstance(weight, Quantized):
        weight = dequantize(weight, x.dtype)
    out = F.linear(x, weight, bias)
    out = out if activation is None else glu_reference(out, activation)
    out = out if residual is None else residual + out
    return out.to(dtype or x.dtype)
