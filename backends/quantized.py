"""Weights of 8 and 4 bits, as files hold them, and how `--quantize` rounds.

backends/cpu.py multiplies them as they are. Elsewhere they are dequantised as they are read, see
docs/models.md. hf/quantization.py reads the folders that hold such weights, hf/gguf.py the files.
"""

from typing import NamedTuple

import torch
import torch.nn as nn

from backends import cpu
from model import expect

GROUPS = 128, 64, 32  # channels that share a scale
CHUNK = 4096          # rows that are rounded at once, which takes memory


class QuantizedWeight(NamedTuple):
    """A weight [N, C]: q * scale + minimum, by G groups of C / G channels of a row."""
    q: torch.Tensor       # [N, C]: int8 or e4m3; or uint8 of 0 to 15
    scales: torch.Tensor  # [G, N]
    minimums: torch.Tensor | None = None  # [G, N]

    def values(self):
        """float32 [N, C]"""
        values = self.q.float().reshape(len(self.q), len(self.scales), -1)  # (N, G, group)
        values *= self.scales.float().T[:, :, None]
        if self.minimums is not None:
            values += self.minimums.float().T[:, :, None]
        return values.flatten(1)

    def rows(self, index):
        """The rows int64 [n]."""
        minimums = None if self.minimums is None else self.minimums[:, index]
        return QuantizedWeight(self.q[index], self.scales[:, index], minimums)


def largest_group(size):
    return next((group for group in GROUPS if size % group == 0), None)


def pack(weight):
    """`QuantizedWeight` -> `cpu.PackedWeight`. What has no kernel is rounded to 8 bits."""
    if weight.q.dtype not in (torch.int8, torch.uint8):
        weight = round_weight(weight.values(), 8, 32)
    q, *floats = weight
    if any(x is not None and x.dtype != torch.float16 for x in floats):
        floats = (x if x is None else x.float() for x in floats)
    return cpu.pack_quantized(q, *floats)


# --------------------------------------------------------------------------------------------------
# Rounding

def round_weight(value, bits, group=0):
    """A weight float [N, C] -> `QuantizedWeight`, rounded to the nearest: 8 bits from -127 to 127,
    4 bits between a group's own least and largest. group: channels that share a scale, 0 for all;
    all, too, where 8 bits come in groups that do not divide C."""
    if bits == 8 and (group == 0 or value.shape[1] % group):
        group = value.shape[1]
    q = torch.empty(value.shape, dtype=torch.int8 if bits == 8 else torch.uint8)
    parts = [round_rows(rows, bits, group, out)
             for rows, out in zip(value.split(CHUNK), q.split(CHUNK))]
    floats = (None if x[0] is None else torch.cat(x, dim=1) for x in zip(*parts))
    return QuantizedWeight(q, *floats)


def round_rows(value, bits, group, out):
    """Rounds rows to `out` -> (scales, minimums)"""
    groups = value.float().reshape(len(value), -1, group)  # (N, G, group)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    steps = (high - low) / 15 if bits == 4 else torch.maximum(-low, high) / 127
    if bits == 4:
        steps = steps.bfloat16()
    elif group < value.shape[1]:
        steps = steps.half()
    scales = steps.where(steps > 0, 1)  # of zeros alone
    q = (groups / scales.float()[..., None]).round()
    if bits == 8:
        out.copy_(q.clamp_(-127, 127).view(value.shape))
        return scales.T.contiguous(), None
    zeros = (-low / scales.float()).round().clamp(0, 15)
    out.copy_((q + zeros[..., None]).clamp_(0, 15).view(value.shape))
    minimums = -zeros * scales.float()
    return scales.T.contiguous(), minimums.T.contiguous()


def rounding(model, quantize):
    """{name of a weight: (bits, group) of its `round_weight`} by `--quantize`, "int8" or "int4"."""
    layers = {f"{name}.weight": layer.in_features for name, layer in model.named_modules()
              if isinstance(layer, nn.Linear)}
    if model.config.unit_head:  # see `hf.checkpoint.load`
        del layers["head.weight"]
    found = dict.fromkeys(layers, (8, 0))
    for name, C in layers.items():
        if quantize == "int4" and name != "head.weight":
            group = largest_group(C)
            expect(group, f"--quantize int4 takes groups of 128, 64 or 32 inputs, but {name} has "
                   f"{C} inputs; take --quantize int8")
            found[name] = 4, group
    return found
