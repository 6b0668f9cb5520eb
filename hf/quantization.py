"""Reads quantised checkpoint folders: AWQ (AutoAWQ's GEMM), GPTQ, FP8 (transformers, AutoFP8)."""

import math
from collections import defaultdict
from functools import partial
from typing import NamedTuple

import torch

from backends.linear import Quantized, unpack_nibbles
from backends.quantized import largest_group, pack, pack_nibbles, select_rows
from common.values import one_of
from hf.tensors import FP8, StoredTensor
from model import expect

AWQ_ORDER = 0, 4, 1, 5, 2, 6, 3, 7  # the nibble of an int32 that holds each of 8 neighbours
SUFFIXES = {  # of the names of a quantised layer's tensors: values, scales, others
    "awq": ("qweight", "scales", "qzeros"),
    "gptq": ("qweight", "scales", "qzeros", "g_idx"),
    "fp8": ("weight", "weight_scale")}
VARIANTS = {  # config.json's key for the version, supported versions, supported bits
    "awq": ("version", ("gemm",), (4,)),
    "gptq": ("checkpoint_format", ("gptq", "gptq_v2"), (4, 8))}


class Scheme(NamedTuple):
    method: str             # quant_method in config.json
    bits: int
    block: tuple            # (rows, columns) that share a scale; None: all
    zero_offset: int = 0    # to add to the stored zeros


def read_scheme(path, config):
    """Converts config.json's quantization_config to a `Scheme`; None if the model has none."""
    if not config:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else None
    one_of(f"{path}: quantization_config's quant_method", method, SUFFIXES)
    if method == "fp8":
        return Scheme(method, 8, read_block(path, config.get("weight_block_size") or [-1, -1]))
    key, versions, sizes = VARIANTS[method]
    version = str(config.get(key, versions[0])).lower()
    one_of(f"{path}: {method}'s {key}", version, versions)
    bits = one_of(f"{path}: {method}'s bits", config.get("bits"), sizes)
    block = read_block(path, [1, config.get("group_size", 128)])
    return Scheme(method, bits, block, zero_offset=int(version == "gptq"))


def read_block(path, block):
    """(rows, columns) that share a scale; -1 means all."""
    is_size = lambda size: type(size) is int and (size > 0 or size == -1)
    expect(isinstance(block, list) and len(block) == 2 and all(map(is_size, block)), f"{path}: "
           f"group and block sizes must be whole numbers above 0, or -1, not {block!r}")
    return tuple(None if size == -1 else size for size in block)


def read_layer(what, layer, scheme, shape):
    """Loads the tensors of a layer, {suffix: StoredTensor} -> `Quantized` [N, C]. what: its name in
    errors."""
    N, C = shape
    rows, columns = (size or max(N, C) for size in scheme.block)
    stored = (layer[suffix].load() for suffix in SUFFIXES[scheme.method][:3])
    q, scales, zeros = unpack(scheme, *stored)
    expect(scales.float().isfinite().all(), f"{what}: scales are not finite; use another file")
    group = shared_columns(C, columns)
    # the block of each row [N], and of each of our column groups [G, 1]
    row = torch.arange(N) // rows
    column = torch.arange(C // group)[:, None] * group // columns
    spread = lambda x: x.reshape(-(-N // rows), -(-C // columns))[row, column].contiguous()
    order = act_order(what, layer, C, columns)
    if order is not None:
        q = q[:, order]
        order = order.int()
    if q.dtype == torch.uint8:
        q = pack_nibbles(q)
    return Quantized(q, spread(scales), None if zeros is None else spread(zeros), order)


def act_order(what, layer, C, columns):
    """The channel of x for each column of q, int64 [C], where groups hold channels of similar
    importance (GPTQ's act-order); None if they hold neighbours."""
    in_order = torch.arange(C) // columns
    if "g_idx" not in layer or torch.equal(groups := layer["g_idx"].load().long(), in_order):
        return None
    order = groups.argsort(stable=True)
    expect(torch.equal(groups[order], in_order), f"{what}.g_idx does not name each group {columns} "
           "times; download it again")
    return order


def shared_columns(C, columns):
    """Our group size for C channels of which `columns` share a stored scale; None if none fits."""
    return C if columns >= C else largest_group(math.gcd(C, columns))


def unpack(scheme, values, scales, zeros=None):
    """Unpacks the stored tensors -> (q [N, C], scales and zeros by block). q and zeros are uint8, 0
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
    return x if bits == 8 else unpack_nibbles(x)


def combine(path, tensors, scheme):
    """Replaces the tensors of each quantised layer in {name: StoredTensor} by its weight."""
    if scheme is None:
        return tensors
    suffixes = SUFFIXES[scheme.method]
    # AutoFP8 calls weight_scale what others call weight_scale_inv; both are factors
    tensors = {name.removesuffix("_inv"): tensor for name, tensor in tensors.items()}
    combined = {}
    layers = defaultdict(dict)
    for name, tensor in tensors.items():
        stem, _, suffix = name.rpartition(".")
        if f"{stem}.{suffixes[1]}" in tensors and suffix in suffixes:
            layers[stem][suffix] = tensor
        elif not suffix.endswith("_scale"):  # those of activations and the KV cache are not used
            combined[name] = tensor
    expect(layers, f"{path}: quantised according to config.json ({scheme.method}), but no "
           f"tensor is called {suffixes[1]}; use another checkpoint")
    return combined | {f"{stem}.weight": combine_layer(stem, layer, scheme)
                       for stem, layer in layers.items()}


def combine_layer(stem, layer, scheme):
    """The tensors of a layer, {suffix: StoredTensor} -> the `StoredTensor` of its weight."""
    values, scales, *_ = SUFFIXES[scheme.method]
    file = layer[scales].file
    what = f"{file}: {stem}"
    missing = {*SUFFIXES[scheme.method]} - {*layer, "g_idx"}
    expect(not missing, f"{what} lacks {' '.join(missing)}, which {scheme.method} needs")
    expect(len(layer[values].shape) == 2, f"{what}.{values} must have two dimensions")
    first, second = layer[values].shape
    fields = 32 // scheme.bits  # values per int32
    N, C = {"awq": (second * fields, first), "gptq": (second, first * fields),
            "fp8": (first, second)}[scheme.method]
    rows, columns = (size or max(N, C) for size in scheme.block)
    R, G = -(-N // rows), -(-C // columns)
    int32, floats = (torch.int32,), (torch.float16, torch.bfloat16, torch.float32)
    expected = dict(qweight=((first, second), int32), qzeros=((G, N // fields), int32),
                    scales=((G, N), floats), g_idx=((C,), int32),
                    weight=((N, C), (FP8,)), weight_scale=((R, G), floats))
    without_ones = lambda sizes: [size for size in sizes if size != 1]
    for suffix, tensor in layer.items():
        shape, dtypes = expected[suffix]
        expect(without_ones(tensor.shape) == without_ones(shape) and tensor.dtype in dtypes,
               f"{what}.{suffix} is {tensor.dtype} {tensor.shape}, not {dtypes[0]} {shape}")
    expect(shared_columns(C, columns), f"{what}: {C} inputs in groups of {columns} are not "
           "supported; expected groups of 128, 64 or 32")
    weight = partial(read_layer, what, layer, scheme, (N, C))
    ordered = lambda order: select_rows(weight(), order)
    scale_bits = 8 * layer[scales].dtype.itemsize + (scheme.bits == 4) * 8  # and a zero
    quantized_bits = scheme.bits + scale_bits / shared_columns(C, columns)
    # no kernel for a CPU gathers inputs, so there the layer is dequantised
    read_packed = None if act_order(what, layer, C, columns) is not None else (
        lambda order: pack(ordered(order)))
    return StoredTensor(file, (N, C), torch.bfloat16, lambda: weight().values(), scheme.bits,
                        read_packed, ordered, quantized_bits)
