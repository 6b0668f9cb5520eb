"""Weights of 8 and 4 bits: layers that keep them packed, and how `--quantize` rounds them.

`pack_layers` puts QuantizedLinear and QuantizedLMHead in the place of a model's layers, where
kernels run; `pack_cpu_layers` CPULinear and CPULMHead, where those of backends/cpu.c do. Elsewhere
weights are dequantised as they are read, see docs/models.md. hf/quantization.py reads the folders
that hold such weights, hf/gguf.py the files."""

from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

import kernels
from backends import cpu
from kernels import QuantizedWeight, dequantize, float_logits, linear_quantized
from model import InputError

GROUPS = 128, 64, 32  # channels that share a scale
MAX_ROWS = 128        # of linear_quantized
CHUNK = 4096          # rows that are rounded or dequantised at once, which takes memory
STEP = 128            # channels that are packed together


# --------------------------------------------------------------------------------------------------
# The layout

class Layout(NamedTuple):
    """What differs between `QuantizedWeight`s of one shape."""
    kind: str            # "int4", "int8" or "e4m3"
    group: int           # channels that share a scale; 0: all
    scales: torch.dtype
    has_zeros: bool

    def empty(self, N, C):
        """A QuantizedWeight [N, C] without values."""
        G = C // self.group if self.group else 1
        words = -(-C // STEP) * STEP // (8 if self.kind == "int4" else 4)
        zeros = torch.empty(G, N, dtype=torch.int8) if self.has_zeros else None
        return QuantizedWeight(torch.empty(N, words, dtype=torch.int32),
                               torch.empty(G, N, dtype=self.scales), zeros, self.kind)


# what --quantize int8 gives, and the one that an LM head can have
INT8_ROWS = Layout("int8", 0, torch.float32, False)
# on a CPU: of what cpu.c has no layout for
INT8_GROUPS = Layout("int8", 32, torch.float16, False)


class Unpacked(NamedTuple):
    """A weight [N, C] before it is packed: scale * (q - zero), or scale * q + minimum."""
    q: torch.Tensor             # uint8 [N, C]: 0 to 15, or the bits of int8 or e4m3
    scales: torch.Tensor        # [G, N]
    zeros: torch.Tensor | None  # int8 [G, N]
    kind: str
    minimums: torch.Tensor | None = None  # [G, N]

    def pack(self):
        """-> `QuantizedWeight`, which says how."""
        N, C = self.q.shape
        planes = 8 if self.kind == "int4" else 4
        q = F.pad(self.q, (0, -C % STEP)).view(N, -1, planes, STEP // planes).transpose(2, 3)
        if self.kind == "int4":
            q = q[..., ::2] | q[..., 1::2] << 4
        packed = q.contiguous().view(torch.int32).view(N, -1)
        return QuantizedWeight(packed, self.scales, self.zeros, self.kind)

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

    def columns(self, part):
        """A slice of the channels, at the borders of groups."""
        size = self.q.shape[1] // len(self.scales)
        groups = slice(part.start // size, -(-part.stop // size))
        zeros = None if self.zeros is None else self.zeros[groups]
        return self._replace(q=self.q[:, part], scales=self.scales[groups], zeros=zeros)


def largest_group(size):
    return next((group for group in GROUPS if size % group == 0), None)


# --------------------------------------------------------------------------------------------------
# Layers

class PackedLayer(nn.Module):
    """A layer whose values are buffers that keep their dtypes."""

    def __init__(self, **buffers):
        super().__init__()
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def _apply(self, fn, *args, **kwargs):
        """The buffers go to another device as bytes."""
        def move(x):
            return fn(x) if isinstance(x, nn.Parameter) else fn(x.view(torch.uint8)).view(x.dtype)
        return super()._apply(move, *args, **kwargs)


class QuantizedLinear(PackedLayer):
    """nn.Linear whose weight stays packed, for inference. A product of at most MAX_ROWS rows reads
    the packed words; for more rows the weight is dequantised first."""

    def __init__(self, weight, C, bias):
        super().__init__(packed=weight.packed, scales=weight.scales, zeros=weight.zeros)
        self.kind = weight.kind
        self.in_features = C
        self.bias = bias

    def values(self, dtype=torch.float32):
        """The weight [N, C]."""
        out = self.scales.new_empty(len(self.packed), self.in_features, dtype=dtype)
        for first in range(0, len(out), CHUNK):
            rows = slice(first, first + CHUNK)
            zeros = None if self.zeros is None else self.zeros[:, rows]
            dequantize(self.packed[rows], self.scales[:, rows], zeros, self.kind, self.in_features,
                       dtype, out[rows])
        return out

    def forward(self, x):
        """x [..., C] -> [..., N]"""
        rows = x.reshape(-1, self.in_features)
        if len(rows) > MAX_ROWS:
            return F.linear(x, self.values(x.dtype), self.bias)
        out = linear_quantized(rows, self.packed, self.scales, self.zeros, self.kind, self.bias)
        return out.view(*x.shape[:-1], -1)

    def slots(self, weight, cut):
        """[(a buffer with a row for each output, those of an `Unpacked` weight that go there, what
        this rank holds of them)]; cut: as `Group.shard_slices` gives it."""
        if cut and cut[0] == 1:  # of a weight that is stored in one piece
            weight, cut = weight.columns(*cut[1]), None
        stored = weight.pack()
        slots = [(self.packed, stored.packed, cut), (self.scales.T, stored.scales.T, cut)]
        return slots if stored.zeros is None else [*slots, (self.zeros.T, stored.zeros.T, cut)]


class QuantizedLMHead(PackedLayer):
    """`model.LMHead` of int8 rows, each with a float32 scale. Methods as there."""

    def __init__(self, N, C):
        super().__init__(weight=torch.empty(N, C, dtype=torch.int8), scales=torch.empty(N))

    def slots(self, weight, cut):
        return [(self.weight, weight.q.view(torch.int8), cut), (self.scales, weight.scales[0], cut)]

    def topk(self, hidden, k, vocab_ids=None):
        return kernels.project_topk(hidden, self.weight, k, vocab_ids, self.scales)

    def sample(self, hidden, temperature, seed, sequence, position, first_token=0):
        return kernels.project_sample(hidden, self.weight, temperature, seed, sequence, position,
                                      first_token=first_token, scales=self.scales)

    def logits(self, hidden):
        parts = zip(self.weight.split(4 * CHUNK), self.scales.split(4 * CHUNK))
        return torch.cat([float_logits(hidden, rows, scales=scales) for rows, scales in parts], -1)

    def forward(self, x):
        return self.logits(x.reshape(-1, x.shape[-1])).to(x.dtype).view(*x.shape[:-1], -1)

    def embedding(self, tokens):
        return self.weight[tokens].float() * self.scales[tokens, None]


def pack_layers(model, layouts):
    """Puts packed layers, without values yet, in the place of a model's linear layers. layouts:
    {name of the weight: its `Layout`}. Raises InputError where a rank's part of a layer would cut a
    group of channels."""
    for name, layout in layouts.items():
        stem = name.removesuffix(".weight")
        linear = model.get_submodule(stem)
        N, C = linear.weight.shape
        if layout.group and C % layout.group:
            raise InputError(f"a rank's {C} inputs of {name} cut a group of {layout.group}; take "
                             "another --nproc-per-node")
        with torch.device(model.device):
            layer = (QuantizedLMHead(N, C) if stem == "head"
                     else QuantizedLinear(layout.empty(N, C), C, linear.bias))
        model.set_submodule(stem, layer)


# --------------------------------------------------------------------------------------------------
# Layers on a CPU

class CPULinear(nn.Module):
    """nn.Linear whose packed weight cpu.c multiplies, for inference."""
    packed = None  # `cpu.PackedWeight`

    def __init__(self, layout, N, C, bias=None):
        super().__init__()
        self.layout, self.out_features, self.in_features = layout, N, C
        self.nbytes = N * C // (2 if layout.kind == "int4" else 1)
        self.bias = bias
        self.parts = {}  # {first row: `Unpacked`}, until all are there

    def fill(self, start, weight):
        """Takes rows of the weight, from `start` on."""
        self.parts[start] = weight
        if sum(len(part.q) for part in self.parts.values()) == self.out_features:
            self.packed = pack_for_cpu([self.parts[row] for row in sorted(self.parts)], self.bias)
            self.parts = {}

    def current(self):
        return self.packed

    def forward(self, x):
        return self.packed.multiply(x).to(x.dtype)

    def embedding(self, tokens):
        """The rows of token ids [...] -> float32 [..., C]."""
        return self.packed.unpack(tokens.flatten().long()).view(*tokens.shape, -1)


def pack_for_cpu(parts, bias):
    """`Unpacked` parts of a weight, one below the other -> `cpu.PackedWeight`."""
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


def pack_cpu_layers(model, layouts):
    """As `pack_layers`, for a CPU; also of the tables, of which a tied one is packed once."""
    for name, layout in layouts.items():
        stem = name.removesuffix(".weight")
        layer = model.get_submodule(stem)
        kind = CPULMHead if stem == "head" else CPULinear
        packed = kind(layout, *layer.weight.shape, getattr(layer, "bias", None))
        model.set_submodule(stem, CPUEmbedding(packed) if stem == "embed" else packed)


# --------------------------------------------------------------------------------------------------
# Rounding: --quantize

def round_weight(value, layout):
    """value float [N, C] -> `Unpacked`, rounded to the nearest: 8 bits from -127 to 127, or 4 bits
    between each group's own least and largest."""
    q, scales, zeros = zip(*(round_rows(rows, layout) for rows in value.split(CHUNK)))
    zeros = torch.cat(zeros, dim=1) if layout.has_zeros else None
    return Unpacked(torch.cat(q), torch.cat(scales, dim=1), zeros, layout.kind)


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
