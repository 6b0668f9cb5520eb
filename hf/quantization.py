"""Reads quantised checkpoint folders: AWQ (AutoAWQ's GEMM), GPTQ, FP8 (FineGrainedFP8Config)."""

import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from backends.quantized import QuantizedWeight, largest_group, pack
from model import expect, one_of

FP8 = torch.float8_e4m3fn
AWQ_ORDER = 0, 4, 1, 5, 2, 6, 3, 7  # the nibble of an int32 that holds each of 8 neighbours
PARTS = {  # tensors of a quantised layer: values, scales, others
    "awq": ("qweight", "scales", "qzeros"),
    "gptq": ("qweight", "scales", "qzeros", "g_idx"),
    "fp8": ("weight", "weight_scale_inv")}
VARIANTS = {  # config.json's key for the version, supported versions, supported bits
    "awq": ("version", ("gemm",), (4,)),
    "gptq": ("checkpoint_format", ("gptq", "gptq_v2"), (4, 8))}
IGNORED = "input_scale", "activation_scale", "k_scale", "v_scale"  # for activations and KV cache


class StoredTensor(NamedTuple):
    """A tensor in a file, known from the header and not loaded yet."""
    file: Path
    shape: tuple
    dtype: torch.dtype | str  # a str for safetensors types that torch lacks
    load: Callable            # () -> its values, memory-mapped if possible
    stored_as: str | None = None     # GGUF type or quantisation scheme, for `describe`
    bits: float | None = None        # bits per number, if quantised
    pack: Callable | None = None     # row order, int64 [N] -> `cpu.PackedWeight`, if quantised


class Scheme(NamedTuple):
    method: str             # quant_method in config.json
    bits: int
    block: tuple            # (rows, columns) that share a scale; None: all
    zero_offset: int = 0    # to add to the stored zeros

    def __str__(self):
        rows, columns = (size or "all" for size in self.block)
        shared = f"groups of {columns}" if rows == 1 else f"blocks of {rows} x {columns}"
        return f"{self.method}: {self.bits} bits, {shared}"


def read_scheme(config):
    """Converts config.json's quantization_config to a `Scheme`; None if the model has none."""
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
           f"group and block sizes must be whole numbers above 0, or -1, not {block!r}")
    return tuple(None if size == -1 else size for size in block)


def read_layer(what, parts, scheme, shape):
    """Loads the stored parts of a layer -> `QuantizedWeight` [N, C]. what: its name in errors."""
    N, C = shape
    rows, columns = (size or max(N, C) for size in scheme.block)
    in_order = torch.arange(C) // columns
    order = parts["g_idx"].load().long() if "g_idx" in parts else in_order
    expect(torch.equal(order, in_order), f"{what} was quantised with act-order (desc_act), which "
           "is not supported; use a checkpoint without it")
    stored = (parts[name].load() for name in PARTS[scheme.method][:3])
    q, scales, zeros = unpack(scheme, *stored)
    expect(scales.float().isfinite().all(), f"{what}: scales are not finite; download it again")
    group = shared_columns(C, columns)
    # the block of each row [N], and of each of our column groups [G, 1]
    row = torch.arange(N) // rows
    column = torch.arange(C // group)[:, None] * group // columns
    spread = lambda x: x.reshape(-(-N // rows), -(-C // columns))[row, column].contiguous()
    minimums = None if zeros is None else -spread(zeros).float() * spread(scales).float()
    return QuantizedWeight(q, spread(scales), minimums)


def shared_columns(C, columns):
    """Our group size for C channels of which `columns` share a stored scale; None if none fits."""
    return C if columns >= C else largest_group(math.gcd(C, columns))


def unpack(scheme, values, scales, zeros=None):
    """Unpacks the stored parts -> (q [N, C], scales and zeros by block). q and zeros are uint8, 0
    to 15, for 4 bits; else int8 or e4m3. FP8 has no zeros."""
    if scheme.method == "fp8":
        return values, scales, None
    if scheme.method == "gptq":
        q = unpack_int32(values.T, scheme.bits)
        zeros = (unpack_int32(zeros, scheme.bits).T + scheme.zero_offset) & (2**scheme.bits - 1)
    else:
        q, zeros = (unpack_int32(x, 4).view(len(x), -1, 8)[..., AWQ_ORDER].flatten(1).T
                    for x in (values, zeros))
    if scheme.bits == 8:  # shift unsigned values and zeros to int8
        return (q ^ 128).view(torch.int8), scales.T, (zeros ^ 128).view(torch.int8)
    return q, scales.T, zeros


def unpack_int32(x, bits):
    """Unpacks int32 [M, n] to uint8 [M, n * 32 / bits], lowest bits first."""
    x = x.contiguous().view(torch.uint8)
    return x if bits == 8 else torch.stack((x & 15, x >> 4), dim=-1).flatten(1)


def combine(path, tensors, scheme):
    """Replaces the parts of each quantised weight in {name: StoredTensor} by one StoredTensor."""
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
    expect(layers, f"{path}: quantised according to config.json ({scheme}), but no tensor is "
           f"called {scales}; download the checkpoint again")
    return combined | {f"{stem}.weight": combine_layer(stem, parts, scheme)
                       for stem, parts in layers.items()}


def combine_layer(stem, parts, scheme):
    """The parts of a layer, {name: StoredTensor} -> the `StoredTensor` of its weight."""
    values, scales, *_ = PARTS[scheme.method]
    what = f"{parts[scales].file}: {stem}"
    missing = {*PARTS[scheme.method]} - {*parts, "g_idx"}
    expect(not missing, f"{what} lacks {' '.join(missing)}, which {scheme} needs")
    expect(len(parts[values].shape) == 2, f"{what}.{values} must have two dimensions")
    first, second = parts[values].shape
    fields = 32 // scheme.bits  # values per int32
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
    expect(shared_columns(C, columns), f"{what}: {C} inputs in groups of {columns} are not "
           "supported; expected groups of 128, 64 or 32")
    weight = partial(read_layer, what, parts, scheme, (N, C))
    return StoredTensor(parts[scales].file, (N, C), torch.bfloat16, lambda: weight().values(),
                        str(scheme), scheme.bits, lambda order: pack(weight().rows(order)))
