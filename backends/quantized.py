"""8- and 4-bit weights as files store them, and the rounding of `--quantize`. backends/cpu.py
computes with them directly; other devices get dequantised weights, see docs/models.md.
hf/quantization.py reads them from folders, hf/gguf.py from GGUF files."""

from typing import NamedTuple

import torch
import torch.nn as nn

from backends import cpu
from model import expect

GROUPS = 128, 64, 32  # channels that share a scale
CHUNK_ROWS = 4096     # rows that are rounded at once, which bounds the memory


class QuantizedWeight(NamedTuple):
    """A weight [N, C] = q * scale + minimum, where C / G channels of a row share a scale."""
    q: torch.Tensor       # [N, C]: int8, float8_e4m3, or uint8 of 0 to 15
    scales: torch.Tensor  # [G, N]
    minimums: torch.Tensor | None = None  # float32 [G, N]

    def values(self):
        """float32 [N, C]"""
        values = self.q.float().reshape(len(self.q), len(self.scales), -1)  # (N, G, group)
        values *= self.scales.float().T[:, :, None]
        if self.minimums is not None:
            values += self.minimums.T[:, :, None]
        return values.flatten(1)

    def rows(self, index):
        """Selects rows, int64 [n]; None: all."""
        if index is None:
            return self
        minimums = None if self.minimums is None else self.minimums[:, index]
        return QuantizedWeight(self.q[index], self.scales[:, index], minimums)

    def pack(self):
        """A `cpu.PackedWeight`. float8 has no kernel: it is rounded to int8."""
        if self.q.dtype not in (torch.int8, torch.uint8):
            return round_weight(self.values(), 8, 32).pack()
        exact = self.minimums is None and self.scales.dtype == torch.float16
        scales = self.scales if exact else self.scales.float()
        return cpu.pack_quantized(self.q, scales, self.minimums)


def largest_group(size):
    return next((group for group in GROUPS if size % group == 0), None)


# --------------------------------------------------------------------------------------------------
# Rounding

def round_weight(value, bits, group=0):
    """A float weight [N, C] -> `QuantizedWeight`, rounded to nearest. 8 bits: symmetric, -127 to
    127. 4 bits: 0 to 15 over the group's range, extended to include 0. group: channels that share a
    scale; in 8 bits, a group of 0, or one that does not divide C, stands for all channels."""
    if bits == 8 and (group == 0 or value.shape[1] % group):
        group = value.shape[1]
    q = torch.empty(value.shape, dtype=torch.int8 if bits == 8 else torch.uint8)
    parts = [round_rows(rows, bits, group, out)
             for rows, out in zip(value.split(CHUNK_ROWS), q.split(CHUNK_ROWS))]
    scales, minimums = zip(*parts)
    minimums = torch.cat(minimums, dim=1) if bits == 4 else None
    return QuantizedWeight(q, torch.cat(scales, dim=1), minimums)


def round_rows(value, bits, group, out):
    """Rounds rows into `out` -> (scales, minimums)."""
    groups = value.float().reshape(len(value), -1, group)  # (N, G, group)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    if bits == 4:
        steps = ((high - low) / 15).bfloat16()
    else:
        steps = torch.maximum(-low, high) / 127
        if group < value.shape[1]:
            steps = steps.half()
    scales = steps.where(steps > 0, 1)  # 0 in a group of zeros
    q = (groups / scales.float()[..., None]).round()
    if bits == 8:
        out.copy_(q.clamp_(-127, 127).view(value.shape))
        return scales.T.contiguous(), None
    zeros = (-low / scales.float()).round().clamp(0, 15)
    out.copy_((q + zeros[..., None]).clamp_(0, 15).view(value.shape))
    minimums = -zeros * scales.float()
    return scales.T.contiguous(), minimums.T.contiguous()


def rounding(model, quantize):
    """How `--quantize` ("int8" or "int4") rounds each weight: {name: (bits, group)}."""
    layers = {f"{name}.weight": layer.in_features for name, layer in model.named_modules()
              if isinstance(layer, nn.Linear)}
    if model.config.unit_head:  # see `hf.checkpoint.load`
        del layers["head.weight"]
    formats = dict.fromkeys(layers, (8, 0))
    for name, C in layers.items():
        if quantize == "int4" and name != "head.weight":
            group = largest_group(C)
            expect(group, f"--quantize int4 takes groups of 128, 64 or 32 inputs, but {name} has "
                   f"{C} inputs; take --quantize int8")
            formats[name] = 4, group
    return formats
