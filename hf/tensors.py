"""Tensors in files: shapes and dtypes from the headers, values when they are needed."""

import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

from common.files import check_content
from common.values import one_line
from model import InputError, expect

MTP = "mtp."  # how the names of MTP heads' tensors begin in a folder
FP8 = torch.float8_e4m3fn
DTYPES = dict(F64=torch.float64, F32=torch.float32, F16=torch.float16, BF16=torch.bfloat16,
              F8_E4M3=FP8, I32=torch.int32)  # names in a safetensors header


class StoredTensor(NamedTuple):
    """A tensor in a file, known from the header and not loaded yet."""
    file: Path
    shape: tuple
    dtype: torch.dtype | str  # a str for safetensors types that torch lacks
    read: Callable            # () -> the stored values, memory-mapped if possible
    bits: float | None = None            # bits per number, if quantised
    # row order -> its values as they are quantised in the file, if they are
    read_packed: Callable | None = None     # as a `cpu_layers.PackedWeight`
    read_quantized: Callable | None = None  # as a `linear.Quantized`,
    quantized_bits: float | None = None     # which has this many bits per number
    order: torch.Tensor | None = None    # which stored row comes where, int64 [N]; None: in order

    def load(self):
        """Its values, in the dtype of the file."""
        values = self.read()
        return values if self.order is None else values[self.order]

    def rows(self, order):
        """The tensor with its rows in this order, int64 [N]."""
        return self._replace(order=order if self.order is None else self.order[order])


def open_tensors(file):
    """{name: StoredTensor} of a safetensors or .bin file. Raises InputError if it is damaged, or
    holds other objects or a LoRA adapter."""
    try:
        check_content(file)
        opened = (open_safetensors if file.suffix == ".safetensors" else open_pickle)(file)
        expect(not any(".lora_" in name for name in opened), f"{file}: holds a LoRA adapter; merge "
               "it into its model, with peft's merge_and_unload")
        return opened
    except InputError:
        raise
    except Exception as error:  # safetensors and torch raise many types
        raise InputError(
            f"{file}: truncated, not a {file.suffix[1:]} file, or contains more than tensors "
            f"({one_line(error)}); download it again or use safetensors") from error


def open_safetensors(file):
    def read(name):  # reopens the file: a file left open keeps every tensor read in memory
        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(name)

    with safe_open(file, framework="pt") as opened:
        headers = {name: opened.get_slice(name) for name in opened.offset_keys()}  # in file order
        return {name: StoredTensor(file, tuple(header.get_shape()),
                                   DTYPES.get(header.get_dtype(), header.get_dtype()),
                                   partial(read, name)) for name, header in headers.items()}


def open_pickle(file):
    mapped = zipfile.is_zipfile(file)  # torch's legacy format is no zip and cannot be mapped
    state = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    for value in state.values():
        if value.layout is not torch.strided or value.nbytes > value.untyped_storage().nbytes():
            raise ValueError("a tensor does not store all its values")  # sparse, or a huge view
    return {name: StoredTensor(file, tuple(value.shape), value.dtype, lambda value=value: value)
            for name, value in state.items()}
