"""Weights of 8 and 4 bits: layers that keep them packed, and how `--quantize` rounds them.

`pack_layers` puts CPULinear, CPULMHead and CPUEmbedding in the place of a model's layers, where the
kernels of backends/cpu.c run. Elsewhere weights are dequantised as they are read, see
docs/models.md. hf/quantization.py reads the folders that hold such weights, hf/gguf.py the files.
"""

from typing import NamedTuple

import torch
import torch.nn as nn

from backends import cpu
from model import InputError

GROUPS = 128, 64, 32  # channels that share a scale
CHUNK = 4096          # rows that are rounded at once, which takes memory


# --------------------------------------------------------------------------------------------------
# The layout

class Layout(NamedTuple):
    """What differs between `QuantizedWeight`s of one shape."""
    kind: str            # "int4", "int8" or "e4m3"
    group: int           # channels that share a scale; 0: all
    scales: torch.dtype
    has_zeros: bool


# what --quantize int8 gives, and the one that an LM head can have
INT8_ROWS = Layout("int8", 0, torch.float32, False)
# of what cpu.c has no layout for
INT8_GROUPS = Layout("int8", 32, torch.float16, False)


class QuantizedWeight(NamedTuple):
    """A weight [N, C]: scale * (q - zero), or scale * q + minimum, by groups of C / G channels."""
    q: torch.Tensor             # uint8 [N, C]: 0 to 15, or the bits of int8 or e4m3
    scales: torch.Tensor        # [G, N]
    zeros: torch.Tensor | None  # int8 [G, N]
    kind: str                   # as in `Layout`
    minimums: torch.Tensor | None = None  # [G, N]

    def values(self):
        """float32 [N, C]"""
        dtypes = dict(int4=torch.uint8, int8=torch.int8, e4m3=torch.float8_e4m3fn)
        q = self.q.view(dtypes[self.kind])
        values = q.float().reshape(len(q), len(self.scales), -1)  # (N, G, group)
        if self.zeros is not None:
            values -= self.zeros.T[:, :, None]
        values *= self.scales.float().T[:, :, None]
        if self.minimums is not None:
            values += self.minimums.float().T[:, :, None]
        return values.flatten(1)


def largest_group(size):
    return next((group for group in GROUPS if size % group == 0), None)


# --------------------------------------------------------------------------------------------------
# Layers

class CPULinear(nn.Module):
    """nn.Linear whose packed weight cpu.c multiplies, for inference."""
    packed = None  # `cpu.PackedWeight`

    def __init__(self, N, C, bias, is_int4):
        super().__init__()
        self.out_features = N
        self.in_features = C
        self.nbytes = N * C // (2 if is_int4 else 1)
        self.bias = bias
        self.parts = {}  # {first row: `QuantizedWeight`}, until all are there

    def fill(self, start, weight):
        """Takes rows of the weight, from `start` on."""
        self.parts[start] = weight
        if sum(len(part.q) for part in self.parts.values()) == self.out_features:
            self.packed = pack([self.parts[row] for row in sorted(self.parts)], self.bias)
            self.parts = {}

    def current(self):
        return self.packed

    def forward(self, x):
        return self.packed.multiply(x).to(x.dtype)

    def embedding(self, tokens):
        """The rows of token ids [...] -> float32 [..., C]."""
        return self.packed.unpack(tokens.flatten().long()).view(*tokens.shape, -1)


def pack(parts, bias):
    """`QuantizedWeight`s, one below the other -> `cpu.PackedWeight`."""
    scales = torch.cat([part.scales for part in parts], dim=1)
    minimums = None
    if parts[0].zeros is not None:
        minimums = torch.cat([-part.zeros.float() * part.scales.float() for part in parts], dim=1)
    elif parts[0].minimums is not None:
        minimums = torch.cat([part.minimums for part in parts], dim=1)
    if scales.dtype != torch.float16 or minimums is not None and minimums.dtype != torch.float16:
        scales, minimums = (x if x is None else x.float() for x in (scales, minimums))
    return cpu.pack_quantized(torch.cat([part.q for part in parts]), parts[0].kind == "int4",
                              scales, minimums, bias)


class CPULMHead(cpu.KernelHead, CPULinear):
    """`model.LMHead` of such a weight."""


class CPUEmbedding(nn.Module):
    """nn.Embedding of such a table."""

    def __init__(self, table):
        super().__init__()
        self.table = table
        self.register_buffer("like", torch.empty(0), persistent=False)  # of the model's dtype

    def fill(self, start, weight):
        self.table.fill(start, weight)

    def forward(self, tokens):
        return self.table.embedding(tokens).to(self.like.dtype)


def pack_layers(model, layouts):
    """Puts packed layers, without values yet, in the place of a model's linear layers, LM head and
    embedding. layouts: {name of the weight: its `Layout`}"""
    for name, layout in layouts.items():
        stem = name.removesuffix(".weight")
        layer = model.get_submodule(stem)
        kind = CPULMHead if stem == "head" else CPULinear
        bias = getattr(layer, "bias", None)
        packed = kind(*layer.weight.shape, bias, layout.kind == "int4")
        model.set_submodule(stem, CPUEmbedding(packed) if stem == "embed" else packed)


# --------------------------------------------------------------------------------------------------
# Rounding: --quantize

def round_weight(value, layout):
    """value float [N, C] -> `QuantizedWeight`, rounded to the nearest: 8 bits from -127 to 127, or
    4 bits between each group's own least and largest."""
    q, scales, zeros = zip(*(round_rows(rows, layout) for rows in value.split(CHUNK)))
    zeros = torch.cat(zeros, dim=1) if layout.has_zeros else None
    return QuantizedWeight(torch.cat(q), torch.cat(scales, dim=1), zeros, layout.kind)


def round_rows(value, layout):
    groups = value.float().reshape(len(value), -1, layout.group or value.shape[1])  # (N, G, group)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    steps = (high - low) / 15 if layout.has_zeros else torch.maximum(-low, high) / 127
    scales = steps.to(layout.scales)
    scales = scales.where(scales > 0, 1)  # of zeros alone
    q = (groups / scales.float()[..., None]).round()
    if not layout.has_zeros:
        q = q.clamp(-127, 127).to(torch.int8).view(torch.uint8)
        return q.view(value.shape), scales.T.contiguous(), None
    zeros = (-low / scales.float()).round().clamp(0, 15)
    q = (q + zeros[..., None]).clamp(0, 15).to(torch.uint8)
    return q.view(value.shape), scales.T.contiguous(), zeros.to(torch.int8).T.contiguous()


def rounded_layouts(model, quantize):
    """{name of a weight: the `Layout` that it gets} by `--quantize`, "int8" or "int4"."""
    layers = {f"{name}.weight": layer.in_features for name, layer in model.named_modules()
              if isinstance(layer, nn.Linear)}
    if model.config.unit_head:  # whose rows are scaled once all are read
        del layers["head.weight"]
    found = dict.fromkeys(layers, INT8_ROWS)
    for name, C in layers.items():
        if quantize == "int4" and name != "head.weight":
            group = largest_group(C)
            if group is None:
                raise InputError(f"--quantize int4 takes groups of 128, 64 or 32 inputs, but "
                                 f"{name} has {C} inputs; take --quantize int8")
            found[name] = Layout("int4", group, torch.bfloat16, True)
    return found
