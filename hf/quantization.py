"""Quantised Hugging Face folders: AWQ, GPTQ, compressed-tensors, FP8.

`read_scheme` reads config.json's quantization_config. `combine` makes one QuantizedTensor of the
tensors that hold a layer's weight: the rest of the reader takes it for a plain tensor. Formats are
those of AutoAWQ (GEMM), AutoGPTQ and GPTQModel, compressed-tensors, and of transformers'
FineGrainedFP8Config. How activations are quantised is ignored: they never are here.
"""

import math
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn as nn

from backends.quantized import INT8_ROWS, Layout, Unpacked, largest_group
from model import InputError, human

FP8 = torch.float8_e4m3fn
TYPES = dict(I8=torch.int8, I32=torch.int32, I64=torch.int64, F8_E4M3=FP8, F16=torch.float16,
             BF16=torch.bfloat16, F32=torch.float32)  # of a safetensors header
FLOATS = torch.float16, torch.bfloat16, torch.float32
AWQ_ORDER = 0, 4, 1, 5, 2, 6, 3, 7  # where an int32 holds each of 8 neighbours, in units of 4 bits


# --------------------------------------------------------------------------------------------------
# What config.json says

class Scheme(NamedTuple):
    """How a folder stores the weights of its quantised layers."""
    method: str             # as config.json names it
    storage: str            # a key of PARTS
    bits: int
    block: tuple            # (rows, columns) that share a scale; None: all
    dtype: torch.dtype = torch.int8
    has_zeros: bool = False
    zero_offset: int = 0    # what the folder subtracted from the zeros

    def __str__(self):
        rows, columns = self.block
        shared = f"groups of {columns}" if rows == 1 else f"blocks of {rows} x {columns}"
        if columns is None:
            shared = "a scale per row" if rows == 1 else "one scale per tensor"
        kind = " (e4m3)" if self.dtype == FP8 else ""
        return f"{self.method}: {self.bits} bits{kind}, {shared}"


PARTS = {  # tensors of a quantised layer; first that of the values, then that of the scales
    "awq": ("qweight", "scales", "qzeros"),
    "gptq": ("qweight", "scales", "qzeros", "g_idx"),
    "packed": ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape"),
    "plain": ("weight", "weight_scale", "weight_zero_point"),
    "fp8": ("weight", "weight_scale_inv", "")}
# of activations and caches, which are not quantised here
IGNORED = "input_scale", "input_zero_point", "activation_scale", "k_scale", "v_scale"


def read_scheme(config):
    """config.json's quantization_config -> `Scheme`, None for None. Raises InputError for what is
    not supported."""
    if not config:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else None
    if not isinstance(method, str) or method not in METHODS:
        raise InputError(f"the checkpoint is quantised ({method or 'by an unknown method'}), which "
                         f"is not supported; supported: {', '.join(METHODS)}")
    return METHODS[method](config)


def one_of(config, key, supported, default=None):
    value = config.get(key, default)
    value = value.lower() if isinstance(value, str) else value
    if not any(value == other and type(value) is type(other) for other in supported):
        names = ", ".join(map(str, supported))
        raise InputError(f"{config.get('quant_method')}'s {key} {value!r} is not supported; "
                         f"supported: {names}")
    return value


def read_block(rows, columns):
    """(rows, columns) that share a scale; -1 means all."""
    for size in (rows, columns):
        if size is not None and (type(size) is not int or size < 1 and size != -1):
            raise InputError(f"the group size must be a whole number above 0, or -1, not {size!r}")
    return rows, None if columns == -1 else columns


def read_awq(config):
    one_of(config, "version", ("gemm",), "gemm")
    one_of(config, "zero_point", (True,), True)
    bits = one_of(config, "bits", (4,), config.get("w_bit"))
    group = config.get("group_size", config.get("q_group_size", 128))
    return Scheme("awq", "awq", bits, read_block(1, group), has_zeros=True)


def read_gptq(config):
    version = one_of(config, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    bits = one_of(config, "bits", (4, 8))
    block = read_block(1, config.get("group_size", 128))
    return Scheme("gptq", "gptq", bits, block, has_zeros=True, zero_offset=int(version == "gptq"))


def read_compressed_tensors(config):
    one_of(config, "quantization_status", ("compressed",), "compressed")
    stored = one_of(config, "format", ("pack-quantized", "float-quantized", "int-quantized",
                                       "naive-quantized"))
    if config.get("sparsity_config") or config.get("transform_config"):
        raise InputError("compressed-tensors with sparsity or transforms is not supported")
    groups = config.get("config_groups")
    groups = groups.values() if isinstance(groups, dict) else []
    schemes = [group.get("weights") for group in groups if isinstance(group, dict)]
    keys = "num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "actorder"
    distinct = {repr([(weights or {}).get(key) for key in keys]) for weights in schemes}
    if len(distinct) != 1 or not isinstance(schemes[0], dict):
        raise InputError("expected config_groups of which all have the same scheme of weights")
    weights = schemes[0] | dict(quant_method="compressed-tensors")
    one_of(weights, "actorder", (None, False, "weight", "static"))
    kind = one_of(weights, "type", ("int", "float"), "int")
    packed = stored == "pack-quantized"
    if packed and kind == "float" or stored == f"{'float' if kind == 'int' else 'int'}-quantized":
        raise InputError(f"{stored} weights of type {kind} are not supported")
    bits = one_of(weights, "num_bits", (4, 8) if packed else (8,), 8)
    strategy = one_of(weights, "strategy", ("tensor", "channel", "group", "block"), "tensor")
    block = (None, None) if strategy == "tensor" else read_block(1, -1)
    if strategy == "group":
        block = read_block(1, weights.get("group_size"))
    elif strategy == "block":
        block = read_block(*pair(weights.get("block_structure")))
    has_zeros = not one_of(weights, "symmetric", (True, False), True)
    dtype = FP8 if kind == "float" else torch.int8
    return Scheme("compressed-tensors", "packed" if packed else "plain", bits, block, dtype,
                  has_zeros)


def read_fp8(config):
    size = config.get("weight_block_size")
    block = (None, None) if size is None else read_block(*pair(size))
    return Scheme("fp8", "fp8", 8, block, FP8)


def pair(value):
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise InputError(f"expected blocks as a list of rows and columns, not {value!r}")
    return value


METHODS = {"awq": read_awq, "gptq": read_gptq, "compressed-tensors": read_compressed_tensors,
           "fp8": read_fp8}


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
        """Raises InputError for scales that are not finite, an order of channels, or a
        weight_shape of another shape. It reads these alone."""
        scales = self.parts[PARTS[self.scheme.storage][1]].load()
        if not scales.float().isfinite().all():
            raise InputError(f"{self.file}: {self.name} has scales that are not finite; fetch the "
                             "checkpoint again")
        if "g_idx" in self.parts:
            columns = self.scheme.block[1] or self.shape[1]
            if not torch.equal(self.parts["g_idx"].load().long(),
                               torch.arange(self.shape[1]) // columns):
                raise InputError(f"{self.file}: {self.name} was quantised in another order of its "
                                 "channels (desc_act, act-order), which is not supported; take a "
                                 "checkpoint without it")
        if "weight_shape" in self.parts:
            stored = tuple(self.parts["weight_shape"].load().tolist())
            if stored != self.shape:
                raise InputError(f"{self.file}: {self.name} has a weight_shape of {stored}, but "
                                 f"its values are {self.shape}")

    def weight(self, device="cpu", arrange=lambda rows: rows):
        """-> `Unpacked` [N, C]. arrange: puts rows [N, ...] in the order wanted."""
        values, scales, zeros = (self.parts[name].load().to(device) if name in self.parts else None
                                 for name in PARTS[self.scheme.storage][:3])
        q, zeros = unpack(self.scheme, values, zeros)
        N, C = self.shape
        rows, columns = (size or max(N, C) for size in self.scheme.block)
        shape = -(-N // rows), -(-C // columns)
        group = self.layout.group or C
        # which scale is that of each of our groups, [G, N]
        order = arrange(torch.arange(N)[:, None])[:, 0].to(device)
        row = order // rows
        column = torch.arange(C // group, device=device)[:, None] * group // columns
        spread = lambda x: x.reshape(shape)[row, column].contiguous()
        scales = spread(scales.T if "qweight" in self.parts else scales)
        zeros = None if zeros is None else spread(zeros).view(torch.int8)
        return Unpacked(q[order], scales, zeros, self.layout.kind)


def unpack(scheme, values, zeros):
    """The stored parts -> (q [N, C], zeros [rows of blocks, columns of blocks] or None), both uint8
    of 0 to 15 for 4 bits, else of the bytes of int8 or e4m3."""
    fields = lambda x: unpack_int32(x, scheme.bits)
    if scheme.storage in ("plain", "fp8"):
        return values.view(torch.uint8), zeros
    if scheme.storage == "packed":
        q = fields(values)
        zeros = None if zeros is None else fields(zeros.T).T[:len(q)]
    elif scheme.storage == "gptq":
        q, zeros = fields(values.T), fields(zeros).T + scheme.zero_offset & 2**scheme.bits - 1
    else:
        q, zeros = (fields(x).view(len(x), -1, 8)[..., AWQ_ORDER].flatten(1).T
                    for x in (values, zeros))
    if scheme.bits == 4:
        return q, zeros
    return q ^ 128, None if zeros is None else zeros ^ 128


def unpack_int32(x, bits):
    """int32 [M, n] -> uint8 [M, n * 32 / bits], the lowest bits first."""
    x = x.contiguous().view(torch.uint8)
    return x if bits == 8 else torch.stack((x & 15, x >> 4), dim=-1).flatten(1)


def combine(path, tensors, scheme):
    """{name: StoredTensor} of a folder -> the same with one QuantizedTensor for what a quantised
    layer's weight is made of. Raises InputError for parts that do not fit one another."""
    if scheme is None:
        return tensors
    values, scales, *_ = PARTS[scheme.storage]
    combined, layers = {}, defaultdict(dict)
    for name, tensor in tensors.items():
        stem, _, part = name.rpartition(".")
        if f"{stem}.{scales}" in tensors and part in PARTS[scheme.storage]:
            layers[stem][part] = tensor
        elif part not in IGNORED:
            combined[name] = tensor
    if not layers:
        raise InputError(f"{path}: config.json says that it is quantised ({scheme}), but no tensor "
                         f"is called {scales}; fetch the checkpoint again")
    for stem, parts in layers.items():
        combined[f"{stem}.weight"] = combine_layer(stem, parts, scheme, values, scales)
    return combined


def combine_layer(stem, parts, scheme, values, scales):
    """{part: StoredTensor} of a layer -> QuantizedTensor."""
    file = parts[scales].file
    if values not in parts or len(parts[values].shape) != 2:
        raise InputError(f"{file}: {stem} has {scales}, but no {values} of two dimensions; fetch "
                         "the checkpoint again")
    first, second = parts[values].shape
    fields = 32 // scheme.bits  # in an int32
    N, C = {"awq": (second * fields, first), "gptq": (second, first * fields),
            "packed": (first, second * fields)}.get(scheme.storage, (first, second))
    columns = scheme.block[1] or C
    if scheme.block[0] == 1 and C % columns:
        raise InputError(f"{file}: {stem} has {C} inputs, which groups of {columns} do not divide")
    for name, (shape, *types) in expected_parts(scheme, N, C).items():
        if name not in parts:
            if name == "g_idx":
                continue
            raise InputError(f"{file}: {stem} lacks {name}, which {scheme} has")
        found = parts[name]
        dtype = stored_dtype(found)
        without_ones = lambda shape: [size for size in shape if size != 1]
        if without_ones(found.shape) != without_ones(shape) or dtype not in types:
            *kinds, kind = (str(x).removeprefix("torch.") for x in (*types, dtype))
            raise InputError(f"{file}: {stem}.{name} should be {' or '.join(kinds)} of shape "
                             f"{shape} for {scheme}, but is {kind} of {found.shape}")
    group = 0 if columns >= C else largest_group(math.gcd(C, columns))
    if group is None:
        raise InputError(f"{file}: {stem} has {C} inputs in groups of {columns}; groups of 128, 64 "
                         "or 32 are supported")
    kind = "e4m3" if scheme.dtype == FP8 else f"int{scheme.bits}"
    layout = Layout(kind, group, stored_dtype(parts[scales]), scheme.has_zeros)
    return QuantizedTensor(file, (N, C), torch.bfloat16, parts, scheme, layout, stem)


def stored_dtype(tensor):
    """The torch dtype of a StoredTensor, or what its header calls it, where there is none."""
    return TYPES.get(tensor.dtype, tensor.dtype)


def expected_parts(scheme, N, C):
    """{part: (shape, dtypes)} of a layer [N, C]."""
    fields = 32 // scheme.bits
    rows, columns = (size or max(N, C) for size in scheme.block)
    R, G = -(-N // rows), -(-C // columns)
    int32 = torch.int32
    match scheme.storage:
        case "awq":
            return dict(qweight=((C, N // fields), int32), qzeros=((G, N // fields), int32),
                        scales=((G, N), *FLOATS))
        case "gptq":
            return dict(qweight=((C // fields, N), int32), qzeros=((G, N // fields), int32),
                        scales=((G, N), *FLOATS), g_idx=((C,), int32))
        case "fp8":
            return dict(weight=((N, C), FP8), weight_scale_inv=((R, G), *FLOATS))
    found = dict(weight_scale=((R, G), *FLOATS))
    if scheme.storage == "plain":
        found |= dict(weight=((N, C), scheme.dtype))
        return found | (dict(weight_zero_point=((R, G), torch.int8)) if scheme.has_zeros else {})
    found |= dict(weight_packed=((N, C // fields), int32), weight_shape=((2,), torch.int64))
    zeros = dict(weight_zero_point=((-(-N // fields), G), int32))
    return found | (zeros if scheme.has_zeros else {})


# --------------------------------------------------------------------------------------------------
# A model's layers

def weight_layouts(model, matches):
    """{name of a parameter: its `Layout`} for the linear layers that can stay packed: all that they
    are stacked from is quantised alike, and the LM head to int8 with one scale per row."""
    parts = defaultdict(set)
    for tensor, name, _ in matches:
        parts[name].add(getattr(tensor, "layout", None))
    linear = {f"{name}.weight" for name, layer in model.named_modules()
              if isinstance(layer, nn.Linear)}
    found = {name: layouts.pop() for name, layouts in parts.items()
             if name in linear and len(layouts) == 1 and None not in layouts}
    head = found.get("head.weight")
    if head and (model.config.unit_head or head._replace(scales=INT8_ROWS.scales) != INT8_ROWS):
        del found["head.weight"]
    return found


def describe_scheme(matches):
    """A line about a folder's quantised layers, "" where it has none."""
    found = [tensor for tensor, *_ in matches if isinstance(tensor, QuantizedTensor)]
    if not found:
        return ""
    size = sum(math.prod(part.shape) * stored_dtype(part).itemsize
               for tensor in found for part in tensor.parts.values())
    return f"\nquantised     {found[0].scheme}; {len(found)} weights in {human(size, 'B')}"
