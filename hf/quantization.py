"""Quantised Hugging Face folders: AWQ, GPTQ, FP8.

`read_scheme` reads config.json's quantization_config. `combine` makes one QuantizedTensor of the
tensors that hold a layer's weight: the rest of the reader takes it for a plain tensor. Formats are
those of AutoAWQ (GEMM), of AutoGPTQ and GPTQModel, and of transformers' FineGrainedFP8Config. How
activations are quantised is ignored: they never are here.
"""

import math
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn as nn

from backends.quantized import Layout, Unpacked, largest_group
from model import InputError, human

FP8 = torch.float8_e4m3fn
AWQ_ORDER = 0, 4, 1, 5, 2, 6, 3, 7  # where an int32 holds each of 8 neighbours, in units of 4 bits
PARTS = {  # tensors of a quantised layer: first the values, then the scales
    "awq": ("qweight", "scales", "qzeros"),
    "gptq": ("qweight", "scales", "qzeros", "g_idx"),
    "fp8": ("weight", "weight_scale_inv")}
# of activations and caches, which are not quantised here
IGNORED = "input_scale", "activation_scale", "k_scale", "v_scale"


# --------------------------------------------------------------------------------------------------
# What config.json says

class Scheme(NamedTuple):
    """How a folder stores the weights of its quantised layers."""
    method: str             # as config.json names it
    bits: int
    block: tuple            # (rows, columns) that share a scale; None: all
    zero_offset: int = 0    # what the folder subtracted from the zeros

    def __str__(self):
        rows, columns = self.block
        shared = f"groups of {columns}" if rows == 1 else f"blocks of {rows} x {columns}"
        if columns is None:
            shared = "a scale per row" if rows == 1 else "one scale per tensor"
        return f"{self.method}: {self.bits} bits{' (e4m3)' * (self.method == 'fp8')}, {shared}"

    def grid(self, N, C):
        """(rows of blocks, columns of blocks) of a weight [N, C]."""
        rows, columns = (size or max(N, C) for size in self.block)
        return -(-N // rows), -(-C // columns)


def one_of(what, value, supported):
    """The value, if it is supported. Raises InputError for any other."""
    if not any(value == other and type(value) is type(other) for other in supported):
        raise InputError(f"{what} {value!r} is not supported; supported: "
                         f"{', '.join(map(str, supported))}")
    return value


def read_scheme(config):
    """config.json's quantization_config -> `Scheme`, None for None. Raises InputError for what is
    not supported."""
    if not config:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else None
    match method:
        case "awq":
            one_of("awq's version", str(config.get("version", "gemm")).lower(), ("gemm",))
            one_of("awq's zero_point", config.get("zero_point", True), (True,))
            bits = one_of("awq's bits", config.get("bits", config.get("w_bit")), (4,))
            group = config.get("group_size", config.get("q_group_size", 128))
            return Scheme(method, bits, read_block([1, group]))
        case "gptq":
            version = config.get("checkpoint_format", "gptq")
            one_of("gptq's checkpoint_format", version, ("gptq", "gptq_v2"))
            bits = one_of("gptq's bits", config.get("bits"), (4, 8))
            block = read_block([1, config.get("group_size", 128)])
            return Scheme(method, bits, block, zero_offset=int(version == "gptq"))
        case "fp8":
            block = config.get("weight_block_size")
            return Scheme(method, 8, (None, None) if block is None else read_block(block))
        case "compressed-tensors":
            raise InputError("the checkpoint is quantised by compressed-tensors, which is not read; "
                             "docs/models.md says how to unpack it")
    raise InputError(f"the checkpoint is quantised ({method or 'by an unknown method'}), which is "
                     f"not supported; supported: {', '.join(PARTS)}")


def read_block(block):
    """(rows, columns) that share a scale; -1 means all."""
    if not isinstance(block, list) or len(block) != 2:
        raise InputError(f"expected blocks as a list of rows and columns, not {block!r}")
    for size in block:
        if type(size) is not int or size < 1 and size != -1:
            raise InputError(f"the group size must be a whole number above 0, or -1, not {size!r}")
    rows, columns = block
    return rows, None if columns == -1 else columns


# --------------------------------------------------------------------------------------------------
# A folder's tensors

class QuantizedTensor(NamedTuple):
    """A layer's weight, stored in several tensors. The first four fields are those of the
    checkpoint's StoredTensor: to the rest of the reader it is a plain tensor [N, C]."""
    file: Path
    shape: tuple
    dtype: torch.dtype
    parts: dict       # {name of a part: its StoredTensor}
    scheme: Scheme
    layout: Layout
    name: str

    def load(self):
        return self.weight().values()

    def check_values(self):
        """Raises InputError for scales that are not finite, and for an order of channels. It reads
        these alone."""
        scales = self.parts[PARTS[self.scheme.method][1]].load()
        if not scales.float().isfinite().all():
            raise InputError(f"{self.file}: {self.name} has scales that are not finite; fetch the "
                             "checkpoint again")
        if "g_idx" in self.parts:
            in_order = torch.arange(self.shape[1]) // (self.scheme.block[1] or self.shape[1])
            if not torch.equal(self.parts["g_idx"].load().long(), in_order):
                raise InputError(f"{self.file}: {self.name} was quantised in another order of its "
                                 "channels (desc_act, act-order), which is not supported; take a "
                                 "checkpoint without it")

    def weight(self, device="cpu", arrange=lambda rows: rows):
        """-> `Unpacked` [N, C]. arrange: puts rows [N, ...] in the order wanted."""
        parts = [self.parts[name].load().to(device) for name in PARTS[self.scheme.method][:3]]
        q, scales, zeros = unpack(self.scheme, *parts)
        N, C = self.shape
        rows, columns = (size or max(N, C) for size in self.scheme.block)
        group = self.layout.group or C
        # which scale is that of each of our groups, [G, N]
        order = arrange(torch.arange(N)[:, None])[:, 0].to(device)
        row = order // rows
        column = torch.arange(C // group, device=device)[:, None] * group // columns
        spread = lambda x: x.reshape(self.scheme.grid(N, C))[row, column].contiguous()
        zeros = None if zeros is None else spread(zeros).view(torch.int8)
        return Unpacked(q[order], spread(scales), zeros, self.layout.kind)


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
        q, zeros = q ^ 128, zeros ^ 128
    return q, scales.T, zeros


def unpack_int32(x, bits):
    """int32 [M, n] -> uint8 [M, n * 32 / bits], the lowest bits first."""
    x = x.contiguous().view(torch.uint8)
    return x if bits == 8 else torch.stack((x & 15, x >> 4), dim=-1).flatten(1)


def combine(path, tensors, scheme):
    """{name: StoredTensor} of a folder -> the same with one QuantizedTensor for what a quantised
    layer's weight is made of. Raises InputError for parts that do not fit one another."""
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
    if not layers:
        raise InputError(f"{path}: config.json says that it is quantised ({scheme}), but no tensor "
                         f"is called {scales}; fetch the checkpoint again")
    for stem, parts in layers.items():
        combined[f"{stem}.weight"] = combine_layer(stem, parts, scheme)
    return combined


def combine_layer(stem, parts, scheme):
    """{part: StoredTensor} of a layer -> QuantizedTensor."""
    values, scales, *_ = PARTS[scheme.method]
    file = parts[scales].file
    if values not in parts or len(parts[values].shape) != 2:
        raise InputError(f"{file}: {stem} has {scales}, but no {values} of two dimensions; fetch "
                         "the checkpoint again")
    first, second = parts[values].shape
    fields = 32 // scheme.bits  # in an int32
    N, C = {"awq": (second * fields, first), "gptq": (second, first * fields),
            "fp8": (first, second)}[scheme.method]
    columns = scheme.block[1] or C
    if scheme.block[0] == 1 and C % columns:
        raise InputError(f"{file}: {stem} has {C} inputs, which groups of {columns} do not divide")
    check_parts(file, stem, parts, scheme, N, C)
    group = 0 if columns >= C else largest_group(math.gcd(C, columns))
    if group is None:
        raise InputError(f"{file}: {stem} has {C} inputs in groups of {columns}; groups of 128, 64 "
                         "or 32 are supported")
    kind = "e4m3" if scheme.method == "fp8" else f"int{scheme.bits}"
    layout = Layout(kind, group, parts[scales].dtype, scheme.method != "fp8")
    return QuantizedTensor(file, (N, C), torch.bfloat16, parts, scheme, layout, stem)


def check_parts(file, stem, parts, scheme, N, C):
    """Raises InputError unless the parts of a layer [N, C] are there with their shapes and dtypes."""
    R, G = scheme.grid(N, C)
    fields = 32 // scheme.bits
    int32, floats = (torch.int32,), (torch.float16, torch.bfloat16, torch.float32)
    expected = dict(qweight=((C, N // fields), int32), qzeros=((G, N // fields), int32),
                    scales=((G, N), floats), g_idx=((C,), int32),
                    weight=((N, C), (FP8,)), weight_scale_inv=((R, G), floats))
    if scheme.method == "gptq":
        expected["qweight"] = (C // fields, N), int32
    without_ones = lambda shape: [size for size in shape if size != 1]
    for name in PARTS[scheme.method]:
        if name not in parts and name != "g_idx":
            raise InputError(f"{file}: {stem} lacks {name}, which {scheme} has")
        shape, dtypes = expected[name]
        part = parts.get(name)
        if part and (without_ones(part.shape) != without_ones(shape) or part.dtype not in dtypes):
            *kinds, kind = (str(x).removeprefix("torch.") for x in (*dtypes, part.dtype))
            raise InputError(f"{file}: {stem}.{name} should be {' or '.join(kinds)} of shape "
                             f"{shape} for {scheme}, but is {kind} of {part.shape}")


# --------------------------------------------------------------------------------------------------
# A model's layers

def weight_layouts(model, matches):
    """{name of a parameter: its `Layout`} for the linear layers that can stay packed, the LM head
    not among them: all that they are stacked from is quantised alike."""
    layouts = defaultdict(set)
    for tensor, name, _ in matches:
        layouts[name].add(getattr(tensor, "layout", None))
    linear = {f"{name}.weight" for name, layer in model.blocks.named_modules(prefix="blocks")
              if isinstance(layer, nn.Linear)}
    return {name: found.pop() for name, found in layouts.items()
            if name in linear and len(found) == 1 and None not in found}


def describe_scheme(matches):
    """A line about a folder's quantised layers, "" where it has none."""
    found = [tensor for tensor, *_ in matches if isinstance(tensor, QuantizedTensor)]
    if not found:
        return ""
    size = sum(math.prod(part.shape) * part.dtype.itemsize
               for tensor in found for part in tensor.parts.values())
    return f"\nquantised     {found[0].scheme}; {len(found)} weights in {human(size, 'B')}"
