"""Quantised weights in folders: AWQ (AutoAWQ's GEMM), GPTQ, FP8 (FineGrainedFP8Config)."""

import math
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch

from backends.quantized import INT8_GROUPS, INT8_ROWS, Layout, QuantizedWeight, largest_group
from model import expect, one_of

FP8 = torch.float8_e4m3fn
AWQ_ORDER = 0, 4, 1, 5, 2, 6, 3, 7  # where an int32 holds each of 8 neighbours, in units of 4 bits
PARTS = {  # tensors of a quantised layer: the values, the scales, others
    "awq": ("qweight", "scales", "qzeros"),
    "gptq": ("qweight", "scales", "qzeros", "g_idx"),
    "fp8": ("weight", "weight_scale_inv")}
VARIANTS = {  # config.json's key of the version, the versions and the numbers of bits that are read
    "awq": ("version", ("gemm",), (4,)),
    "gptq": ("checkpoint_format", ("gptq", "gptq_v2"), (4, 8))}
IGNORED = "input_scale", "activation_scale", "k_scale", "v_scale"  # of what is not quantised here


class Scheme(NamedTuple):
    method: str             # as config.json names it
    bits: int
    block: tuple            # (rows, columns) that share a scale; None: all
    zero_offset: int = 0    # what the folder subtracted from the zeros

    def __str__(self):
        rows, columns = (size or "all" for size in self.block)
        shared = f"groups of {columns}" if rows == 1 else f"blocks of {rows} x {columns}"
        return f"{self.method}: {self.bits} bits, {shared}"


def read_scheme(config):
    """config.json's quantization_config -> `Scheme`, None for None."""
    if not config:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else None
    one_of("quantization_config's quant_method", method, PARTS)
    if method == "fp8":
        return Scheme(method, 8, read_block(config.get("weight_block_size") or [-1, -1]))
    key, versions, sizes = VARIANTS[method]
    version = one_of(f"{method}'s {key}", str(config.get(key, versions[0])).lower(), versions)
    bits = one_of(f"{method}'s bits", config.get("bits"), sizes)
    block = read_block([1, config.get("group_size", 128)])
    return Scheme(method, bits, block, zero_offset=int(version == "gptq"))


def read_block(block):
    """(rows, columns) that share a scale; -1 means all."""
    is_size = lambda size: type(size) is int and (size > 0 or size == -1)
    expect(isinstance(block, list) and len(block) == 2 and all(map(is_size, block)),
           f"a group or block must have whole sizes above 0, or -1, not {block!r}")
    return tuple(None if size == -1 else size for size in block)


class QuantizedTensor(NamedTuple):
    """A layer's weight [N, C] in several tensors; a StoredTensor to the rest of the reader."""
    file: Path
    shape: tuple
    dtype: torch.dtype
    parts: dict       # {name of a part: its StoredTensor}
    scheme: Scheme
    layout: Layout
    name: str

    def check_values(self):
        """Reads the scales and the order of channels, and raises InputError for bad ones."""
        expect(self.parts[PARTS[self.scheme.method][1]].load().float().isfinite().all(),
               f"{self.file}: {self.name} has scales that are not finite; fetch it again")
        C = self.shape[1]
        in_order = torch.arange(C) // (self.scheme.block[1] or C)
        order = self.parts["g_idx"].load().long() if "g_idx" in self.parts else in_order
        expect(torch.equal(order, in_order),
               f"{self.file}: {self.name} was quantised in another order of its channels "
               "(desc_act, act-order), which is not supported; take a checkpoint without it")

    def weight(self, arrange):
        """-> `QuantizedWeight` [N, C]. arrange: puts rows [N, ...] in the order wanted."""
        parts = [self.parts[name].load() for name in PARTS[self.scheme.method][:3]]
        q, scales, zeros = unpack(self.scheme, *parts)
        N, C = self.shape
        rows, columns = (size or max(N, C) for size in self.scheme.block)
        group = self.layout.group or C
        # which scale is that of each of our groups, [G, N]
        order = arrange(torch.arange(N)[:, None])[:, 0]
        row = order // rows
        column = torch.arange(C // group)[:, None] * group // columns
        spread = lambda x: x.reshape(-(-N // rows), -(-C // columns))[row, column].contiguous()
        zeros = None if zeros is None else spread(zeros).view(torch.int8)
        return QuantizedWeight(q[order], spread(scales), zeros, self.layout.kind)


def unpack(scheme, values, scales, zeros=None):
    """The stored parts -> (q [N, C], scales, zeros), the last two by blocks. q and zeros are uint8:
    0 to 15 for 4 bits, else the bytes of int8 or e4m3."""
    if scheme.method == "fp8":
        return values.view(torch.uint8), scales, None
    if scheme.method == "gptq":
        q = unpack_int32(values.T, scheme.bits)
        zeros = unpack_int32(zeros, scheme.bits).T + scheme.zero_offset & 2**scheme.bits - 1
    else:
        q, zeros = (unpack_int32(x, 4).view(len(x), -1, 8)[..., AWQ_ORDER].flatten(1).T
                    for x in (values, zeros))
    if scheme.bits == 8:  # from unsigned to int8
        return q ^ 128, scales.T, zeros ^ 128
    return q, scales.T, zeros


def unpack_int32(x, bits):
    """int32 [M, n] -> uint8 [M, n * 32 / bits], the lowest bits first."""
    x = x.contiguous().view(torch.uint8)
    return x if bits == 8 else torch.stack((x & 15, x >> 4), dim=-1).flatten(1)


def combine(path, tensors, scheme):
    """{name: StoredTensor} -> the same with a QuantizedTensor for each quantised weight's parts."""
    if scheme is None:
        return tensors
    scales = PARTS[scheme.method][1]
    combined = {}
    layers = defaultdict(dict)
    for name, tensor in tensors.items():
        stem, _, part = name.rpartition(".")
        if f"{stem}.{scales}" in tensors and part in PARTS[scheme.method]:
            layers[stem][part] = tensor
        elif part not in IGNORED:
            combined[name] = tensor
    expect(layers, f"{path}: config.json says that it is quantised ({scheme}), but no tensor is "
           f"called {scales}; fetch the checkpoint again")
    return combined | {f"{stem}.weight": combine_layer(stem, parts, scheme)
                       for stem, parts in layers.items()}


def combine_layer(stem, parts, scheme):
    values, scales, *_ = PARTS[scheme.method]
    what = f"{parts[scales].file}: {stem}"
    missing = {*PARTS[scheme.method]} - {*parts, "g_idx"}
    expect(not missing, f"{what} lacks {' '.join(missing)}, which {scheme} has")
    expect(len(parts[values].shape) == 2, f"{what}.{values} should have two dimensions")
    first, second = parts[values].shape
    fields = 32 // scheme.bits  # in an int32
    N, C = {"awq": (second * fields, first), "gptq": (second, first * fields),
            "fp8": (first, second)}[scheme.method]
    rows, columns = (size or max(N, C) for size in scheme.block)
    R, G = -(-N // rows), -(-C // columns)
    int32, floats = (torch.int32,), (torch.float16, torch.bfloat16, torch.float32)
    expected = dict(qweight=((first, second), int32), qzeros=((G, N // fields), int32),
                    scales=((G, N), floats), g_idx=((C,), int32),
                    weight=((N, C), (FP8,)), weight_scale_inv=((R, G), floats))
    without_ones = lambda sizes: [size for size in sizes if size != 1]
    for name, part in parts.items():
        shape, dtypes = expected[name]
        expect(without_ones(part.shape) == without_ones(shape) and part.dtype in dtypes,
               f"{what}.{name} is {part.dtype} {part.shape}, not {dtypes[0]} {shape} ({scheme})")
    group = 0 if columns >= C else largest_group(math.gcd(C, columns))
    expect(group is not None, f"{what}: {C} inputs in groups of {columns} are not supported; "
           "groups of 128, 64 or 32 are")
    layout = Layout("e4m3" if scheme.method == "fp8" else f"int{scheme.bits}", group,
                    parts[scales].dtype, scheme.method != "fp8")
    return QuantizedTensor(parts[scales].file, (N, C), torch.bfloat16, parts, scheme, layout, stem)


def cpu_layouts(model, matches):
    """{parameter: `Layout`} of the weights whose parts are all quantised, as CPULinear takes them:
    what cpu.c does not multiply as it is stored is rounded to 8 bits, in groups of 32 where these
    divide the channels."""
    stored = defaultdict(set)
    for tensor, name, _ in matches:
        stored[name].add(tensor.layout)
    found = {}
    for name, layouts in stored.items():
        if None in layouts:
            continue
        layout = layouts.pop()
        if layouts or layout.kind == "e4m3":
            C = model.get_parameter(name).shape[1]
            layout = INT8_ROWS if C % INT8_GROUPS.group else INT8_GROUPS
        found[name] = layout
    return found
