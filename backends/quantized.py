"""8- and 4-bit weights (`linear.Quantized`) as files store them, and the rounding of `--quantize`.
cpu_layers.py and gpu.py compute with them. hf/quantization.py reads them from folders, hf/gguf.py
from GGUF files."""

import torch
import torch.nn as nn

from backends.cpu_layers import pack_quantized
from backends.linear import Quantized, unpack_nibbles
from model import expect

GROUPS = 128, 64, 32  # channels that share a scale
CHUNK_ROWS = 4096     # rows that are rounded at once, which bounds the memory


def pack_nibbles(q):
    """Numbers from 0 to 15, uint8 [N, C] -> two per byte, uint8 [N, C / 2]."""
    return q[:, ::2] | q[:, 1::2] << 4


def select_rows(weight, index):
    """These rows of a `Quantized` weight, int64 [n]; None: all."""
    if index is None:
        return weight
    q, scales, minimums, order = weight
    minimums = None if minimums is None else minimums[:, index]
    return Quantized(q[index], scales[:, index], minimums, order)


def pack(weight):
    """A `Quantized` weight as a `PackedWeight` of cpu.c. float8 has no C kernel: it is rounded to 8
    bits."""
    q, scales, minimums, order = weight
    assert order is None  # no C kernel gathers its inputs
    if q.dtype == torch.float8_e4m3fn:
        return pack(round_weight(weight.values(), 8, 32))
    if minimums is not None or scales.dtype != torch.float16:
        scales = scales.float()
    if minimums is not None:
        minimums = minimums.float() if minimums.is_floating_point() else -minimums.float() * scales
    return pack_quantized(unpack_nibbles(q) if q.dtype == torch.uint8 else q, scales, minimums)


def stack(parts):
    """Stacks `Quantized` weights [n, C] along their outputs. Where their formats differ, the result
    has 8 bits, groups of the smallest size, and minimums if one has: it has all their values."""
    kinds = {(part.q.dtype, part.group, getattr(part.minimums, "dtype", None)) for part in parts}
    if len(kinds) > 1:
        parts = [widened(part) for part in parts]
        group = min(part.group for part in parts)
        if any(part.minimums is not None for part in parts):
            parts = [part if part.minimums is not None else
                     part._replace(minimums=torch.zeros_like(part.scales)) for part in parts]
        parts = [regrouped(part, group) for part in parts]
    q, scales, minimums, orders = zip(*parts)
    order = orders[0]
    expect(order is None or all(torch.equal(order, other) for other in orders),
           "layers that read the same input are quantised with different act-orders (desc_act); "
           "use a checkpoint without it")
    minimums = None if minimums[0] is None else torch.cat(minimums, dim=1)
    return Quantized(torch.cat(q), torch.cat(scales, dim=1), minimums, order)


def widened(weight):
    """The same values in 8 bits."""
    q, scales, minimums, order = weight
    if q.dtype != torch.uint8:
        return weight
    q = unpack_nibbles(q).to(torch.int8)
    if minimums is not None and not minimums.is_floating_point():  # zeros
        q -= minimums.T.to(torch.int8).repeat_interleave(weight.group, dim=1)
        minimums = None
    return Quantized(q, scales, minimums, order)


def regrouped(weight, group):
    """The same values in groups of this size, which divides the weight's."""
    repeat = lambda x: None if x is None else x.repeat_interleave(weight.group // group, dim=0)
    return weight._replace(scales=repeat(weight.scales), minimums=repeat(weight.minimums))


def largest_group(size):
    return next((group for group in GROUPS if size % group == 0), None)


# --------------------------------------------------------------------------------------------------
# Rounding

def round_weight(value, bits, group=0):
    """A float weight [N, C] -> `Quantized`, rounded to nearest. 8 bits: symmetric, -127 to
    127. 4 bits: 0 to 15 over the group's range, extended to include 0. group: channels that share a
    scale; in 8 bits, a group of 0, or one that does not divide C, stands for all channels."""
    if bits == 8 and (group == 0 or value.shape[1] % group):
        group = value.shape[1]
    q = torch.empty(value.shape, dtype=torch.int8 if bits == 8 else torch.uint8)
    parts = [round_rows(rows, bits, group, out)
             for rows, out in zip(value.split(CHUNK_ROWS), q.split(CHUNK_ROWS))]
    scales, zeros = zip(*parts)
    scales = torch.cat(scales, dim=1)
    if bits == 8:
        return Quantized(q, scales)
    return Quantized(pack_nibbles(q), scales, torch.cat(zeros, dim=1))


def round_rows(value, bits, group, out):
    """Rounds rows into `out` -> (scales, zeros)."""
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
    return scales.T.contiguous(), zeros.T.to(torch.uint8).contiguous()


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
