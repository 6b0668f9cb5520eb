"""Hugging Face checkpoint folders: their files, and the weights under our names.

Weights come from model.safetensors or pytorch_model.bin, in one file or in shards.
"""

import json
import math
import pickle
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from backends.cpu import default_dtype
from backends.quantized import pack_layers, round_weight, rounded_layouts
from backends.tensor_parallel import Group
from clover import samples_hash
from hf.chat import describe_texts
from hf.families import (
    FAMILIES,
    from_stored,
    hf_config,
    is_transposed,
    parse_config,
    read_config,
    split_weight,
    stored_parts,
    text_config,
)
from hf.quantization import QuantizedTensor, combine, describe_scheme, read_scheme, weight_layouts
from kernels import runs_triton
from model import GPT, InputError, atomic_write, check_memory, free_memory, human, read_json

LARGE = 10**9  # bytes of weights; reading more than these is reported file by file


# --------------------------------------------------------------------------------------------------
# Files

class StoredTensor(NamedTuple):
    """A tensor as its file's header describes it."""
    file: Path
    shape: tuple
    dtype: torch.dtype | str  # a str for a type of safetensors' that is not in DTYPES
    load: Callable            # () -> its values, mapped into memory where possible


# Tensors that follow from the config: old folders' rotary tables and GPT-2's causal masks.
IGNORED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
DTYPES = dict(F64=torch.float64, F32=torch.float32, F16=torch.float16, BF16=torch.bfloat16)


def weight_files(path):
    """The files of a folder's weights: safetensors, else pytorch_model.bin; one file, or shards."""
    path = Path(path)
    for single in (path / "model.safetensors", path / "pytorch_model.bin"):
        index = path / f"{single.name}.index.json"
        if single.is_file():
            return [single]
        if index.is_file():
            return shard_files(index)
    raise InputError(f"{path}: no such file as model.safetensors, pytorch_model.bin or an index of "
                     "their shards; fetch the checkpoint's weights")


def shard_files(index):
    """The files that a shard index names. Raises InputError for one outside its folder."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or {*map(type, names.values())} != {str}:
        raise InputError(f"{index}: expected a weight_map of tensor names to file names")
    folder = index.parent.resolve()
    # the Hugging Face cache links to blobs/ beside snapshots/
    blobs = [parent.parent / "blobs" for parent in folder.parents if parent.name == "snapshots"]
    files = [index.parent / name for name in sorted(set(names.values()))]
    for file in files:
        inside = (file.resolve().is_relative_to(place) for place in (folder, *blobs))
        if "\0" in str(file) or not any(inside):
            raise InputError(f"{index}: expected files of its own folder, but {str(file)!r} is "
                             "outside; fetch the checkpoint again")
        if not file.is_file():
            raise InputError(f"{file}: no such file, but {index.name} names it; fetch it")
    return files


def open_weights(file):
    """{name: StoredTensor} of a file. Raises InputError if it is broken or holds anything else."""
    try:
        return (open_safetensors if file.suffix == ".safetensors" else open_pickle)(file)
    except pickle.UnpicklingError:
        raise InputError(f"{file}: holds code or other objects beside tensors; get the safetensors "
                         "version") from None
    except (AttributeError, EOFError, KeyError, OSError, RuntimeError, SafetensorError, TypeError,
            ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{file}: truncated or not a {file.suffix[1:]} file ({reason}); fetch it "
                         "again") from None


def open_safetensors(file):
    def load(name):  # an open file would keep all that was read in memory
        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(name)

    with safe_open(file, framework="pt") as opened:
        parts = {name: opened.get_slice(name) for name in opened.offset_keys()}  # in file order
        return {name: StoredTensor(file, tuple(part.get_shape()),
                                   DTYPES.get(part.get_dtype(), part.get_dtype()),
                                   partial(load, name)) for name, part in parts.items()}


def open_pickle(file):
    mapped = zipfile.is_zipfile(file)  # torch's first format is not a zip file; it is read at once
    with open(file, "rb") as opened:
        if not mapped and opened.read(1) != b"\x80":
            raise ValueError("it is not a pickle")
    state = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    is_tensor = lambda x: isinstance(x, torch.Tensor) and x.layout is torch.strided
    if not isinstance(state, dict) or not all(map(is_tensor, state.values())):
        raise ValueError("it does not hold tensors by name")
    return {name: StoredTensor(file, tuple(value.shape), value.dtype, lambda value=value: value)
            for name, value in state.items()}


# --------------------------------------------------------------------------------------------------
# From files to parameters

def read_headers(path):
    """(GPT without weights, on the meta device; what `match_tensors` gives) of a folder. Raises
    InputError if config.json or the files' headers are invalid."""
    config = read_config(path)
    tensors = {}
    for file in weight_files(path):
        tensors |= open_weights(file)
    if config.n_layer > len(tensors):  # before anything is built for each layer
        raise InputError(f"{path}: config.json says {config.n_layer} layers, but the files hold "
                         f"only {len(tensors)} tensors; fetch the checkpoint again")
    try:
        with torch.device("meta"):
            model = GPT(config)
    except (RuntimeError, TypeError) as error:  # sizes whose product does not fit an int64
        reason = str(error).splitlines()[0]
        raise InputError(f"{path}: config.json has sizes that no tensor can have ({reason}); fetch "
                         "it again") from None
    scheme = read_scheme(text_config(read_json(Path(path) / "config.json"))
                         .get("quantization_config"))
    return model, match_tensors(path, model, tensors, scheme)


def match_tensors(path, model, tensors, scheme=None):
    """[(stored tensor, parameter's name, the first of its rows that it fills)] for a folder's
    tensors, {name: StoredTensor}; scheme: how they are quantised. Raises InputError for one that is
    missing, unknown, quantised otherwise or of another shape."""
    family = FAMILIES[model.config.family]
    if any("language_model." in name for name in tensors):  # of a text model inside another
        tensors = {name.rpartition("language_model.")[2]: tensor for name, tensor in tensors.items()
                   if "language_model." in name or name == "lm_head.weight"}
    tensors = combine(path, tensors, scheme)
    expected = {}  # tensor name without prefix -> (name of the parameter, first row, shape)
    for name, parameter in model.named_parameters():
        order = -1 if is_transposed(name, model.config) else 1
        for part, start, size in stored_parts(name, len(parameter), model.config):
            expected[part] = name, start, (size, *parameter.shape[1:])[::order]
    found = {name.removeprefix(family.prefix): tensor  # which only some folders have
             for name, tensor in tensors.items() if not name.endswith(IGNORED)}
    if model.config.tied and "lm_head.weight" in found:  # some folders keep one name, some both
        table = found.pop("lm_head.weight")
        found.setdefault(f"{family.names['embed'][0]}.weight", table)
    matches = []
    for part, tensor in found.items():
        if scheme and part.endswith(".bias") and part not in expected and not tensor.load().any():
            continue  # GPTQ's writers gave every layer a bias, of zeros
        if part not in expected:
            raise InputError(f"{tensor.file}: expected the tensors of its config.json, found "
                             f"{part} too; a quantised checkpoint needs its quantization_config")
        name, start, shape = expected[part]
        if tensor.dtype not in DTYPES.values():
            raise InputError(f"{tensor.file}: {part} is quantised ({tensor.dtype}), but not as its "
                             "config.json says; fetch the checkpoint again")
        if tensor.shape != shape:
            raise InputError(f"{tensor.file}: {part} should have shape {shape} by config.json, but "
                             f"has {tensor.shape}")
        matches.append((tensor, name, start))
    for part, (name, *_) in expected.items():
        if part not in found:
            raise InputError(f"{path}: the checkpoint lacks what {name} is made of ({part}); it "
                             "does not fit its config.json")
    return matches


def load(path, dtype=None, device=None, group=None, quantize=None, packed=True):
    """Reads a folder of one of FAMILIES, straight to the device -> GPT, frozen.

    dtype: torch dtype, default `backends.cpu.default_dtype`; device: default CUDA where there is a
    GPU. group: the ranks that hold it together, a `backends.tensor_parallel.Group`: only this
    rank's part is read. quantize: "int8" or "int4", to which weights are rounded. Quantised weights
    stay packed where kernels run, unless `packed` is False. Raises InputError if the checkpoint is
    invalid, or the device has no room for it."""
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    group = group or Group()
    model, matches = read_headers(path)
    stored = [tensor for tensor, *_ in matches if isinstance(tensor, QuantizedTensor)]
    if quantize and stored:
        raise InputError(f"{path}: the checkpoint is quantised already ({stored[0].scheme}); leave "
                         "out --quantize")
    for tensor in stored:
        tensor.check_values()
    if quantize and model.config.tied:
        untie(model, matches)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    largest = max((tensor for tensor, *_ in matches), key=lambda x: math.prod(x.shape))
    dtype = dtype or default_dtype(device, largest.dtype)
    layouts = weight_layouts(model, matches)
    if quantize:
        layouts = rounded_layouts(model, quantize)
    packed = packed and runs_triton(torch.empty(0, device=device))
    with torch.device("meta"):
        group.divide(model)
        pack_layers(model, layouts if packed else {})
    model = model.to(dtype)
    size = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    advice = "take a smaller model" + (" or --dtype bfloat16" if dtype == torch.float32 else "")
    check_memory(f"{path}: its weights take", size, free_memory(device), device, advice)
    model = model.to_empty(device=device).requires_grad_(False).eval()
    model.hash, model.unrounded_hash = read_weights(model, matches, shapes, group, layouts,
                                                    quantize)
    model.quantization = quantize or (str(stored[0].scheme) if stored else None)
    group.connect(model)
    return model


def untie(model, matches):
    """Gives a model without weights an LM head of its own, of the same stored table."""
    model.config.tied = False  # its layers' too: they have the same config
    model.head.weight = nn.Parameter(torch.empty_like(model.embed.weight))
    matches += [(tensor, "head.weight", start) for tensor, name, start in matches
                if name == "embed.weight"]


def read_weights(model, matches, shapes, group, layouts, quantize):
    """Fills a model, or this rank's part of it, from the files -> (hash of the whole model, that of
    the folder's values before rounding).

    shapes: {name: shape} of the whole parameters; layouts: {name: `Layout`} of those that are
    quantised. The hash is of the values in the files, dequantised, before any cast. Takes the
    memory of about one tensor."""
    config = model.config
    parameters = dict(model.named_parameters())
    samples = {name: {} for name in shapes}
    unrounded = {name: {} for name in shapes}
    for tensor, name, start in show_files(matches):
        arrange = partial(from_stored, name, start=start, config=config)
        layout, weight = layouts.get(name), None
        if layout is None:
            given = value = arrange(tensor.load())
        elif quantize:
            given = arrange(tensor.load()).to(model.device)
            weight = round_weight(given, layout)
            value = weight.values()
        else:
            weight = tensor.weight(model.device, arrange)
            given = value = weight.values()
        cut = group.shard_slices(name, config)
        if name in parameters:
            copy_shard(parameters[name], value, start, cut)
        else:
            layer = model.get_submodule(name.removesuffix(".weight"))
            for target, stored, columns in layer.slots(weight, cut):
                copy_shard(target, stored, start, columns)
        # of the whole parameter, `state_hash` samples one value in every stride
        stride = max(1, shapes[name].numel() // 64)
        first = -start * shapes[name][1:].numel() % stride
        samples[name][start] = value.flatten()[first::stride].clone()
        unrounded[name][start] = given.flatten()[first::stride].clone()
    if config.unit_head:
        for rows in parameters["head.weight"].split(4096):  # in float32, a few at a time
            rows.copy_(F.normalize(rows.float(), dim=-1))
    return [hash_of(config, shapes, found) for found in (samples, unrounded)]


def hash_of(config, shapes, samples):
    """The hash of a model by its parameters' samples, {name: {first row: values}}."""
    joined = {name: (shapes[name], torch.cat([values for _, values in sorted(parts.items())]))
              for name, parts in samples.items()}
    if config.tied:
        joined["head.weight"] = joined["embed.weight"]
    return samples_hash(joined)


def show_files(matches):
    """Yields the matches, file by file. Of a large checkpoint it prints which file is read."""
    files = sorted({tensor.file for tensor, *_ in matches})
    total = sum(file.stat().st_size for file in files)
    for i, file in enumerate(files, start=1):
        if total >= LARGE:
            print(f"reading {file.name} ({i} of {len(files)}, {total / 1e9:.1f} GB in all)",
                  file=sys.stderr)
        yield from (match for match in matches if match[0].file == file)


def copy_shard(target, value, start, slices):
    """Copies what a rank holds of a stored tensor, which fills a parameter's rows from `start`."""
    dim, parts = slices or (0, [slice(0, len(target))])
    if dim == 1:  # of a parameter that is stored in one piece
        target.copy_(value[:, parts[0]])
        return
    for part, rows in zip(parts, target.split([part.stop - part.start for part in parts])):
        held = value[max(part.start - start, 0):max(part.stop - start, 0)]
        first = max(start - part.start, 0)
        rows[first:first + len(held)] = held


def save(model, path, dtype=None):
    """Writes config.json and model.safetensors (tensors in `dtype`, default the model's) for
    transformers to read. Raises InputError for a config that the family's format cannot express."""
    path, dtype = Path(path), dtype or model.dtype
    raw = hf_config(model.config, dtype)
    if parse_config(raw) != model.config:
        raise InputError(f"{path}: the {model.config.family} format has no way to write this "
                         f"config: {model.config}")
    path.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, value in model.named_parameters():
        tensors |= split_weight(name, value.detach().to("cpu", dtype), model.config)
    write = partial(save_file, tensors, metadata={"format": "pt"})
    atomic_write(path / "model.safetensors", write)
    text = json.dumps(raw, indent=2) + "\n"
    atomic_write(path / "config.json", lambda tmp: Path(tmp).write_text(text))


def special_layers(c):
    """What differs between families and layers, in lines of text: norms, windows, rotation."""
    norms = {"before": "before attention and MLP", "after": "after attention and MLP",
             "both": "before and after attention and MLP"}[c.norm_at]
    norms += {"head": "; of each query and key head", "all": "; of all queries, of all keys",
              None: ""}[c.qk_norm]
    sizes = sorted({window for window in c.windows if window})
    windows = [f"{size} tokens in {c.windows.count(size)} of {c.n_layer} layers" for size in sizes]
    rotation = [c.rope_scaling["rope_type"]] if c.rope_scaling else []
    if c.rotary_size:
        rotation.append(f"{c.rotary_size} of a head's {c.head_size} dimensions")
    if c.window_theta:
        rotation.append(f"base {c.rope_theta:g}, with a window {c.window_theta:g}")
    if c.unrotated:
        rotation.append(f"none in {len(c.unrotated)} of {c.n_layer} layers")
    return f"""\
positions     by {", ".join([c.positions, *rotation])}
windows       {", ".join(windows) or "none"}
norms         {norms}"""


def describe(path):
    """What a checkpoint folder holds, in lines of text. Of the weights it reads headers only.
    Raises InputError as read_headers does."""
    model, matches = read_headers(path)
    c = model.config
    files = weight_files(path)
    count = sum(parameter.numel() for parameter in model.parameters())
    per_token = 2 * c.n_layer * c.n_kv_head * c.head_size / 1024
    shards = f"{len(files)} files" if len(files) > 1 else files[0].name
    gb = lambda size: human(size, "B")
    return f"""\
family        {c.family} ({FAMILIES[c.family].architecture})
layers        {c.n_layer}, hidden size {c.n_embd}, MLP {c.n_inner}{" gated" if c.gated else ""}
heads         {c.n_head}, key/value heads {c.n_kv_head}, head size {c.head_size}
vocabulary    {c.vocab_size:,}, LM head {"tied to the embeddings" if c.tied else "of its own"}
context       {c.block_size:,} tokens
{special_layers(c)}
parameters    {human(count)}: {gb(4 * count)} in float32, {gb(2 * count)} in bfloat16
weights       {shards}, {gb(sum(file.stat().st_size for file in files))}{describe_scheme(matches)}
KV cache      {per_token * 4:.1f} KiB per token in float32, {per_token * 2:.1f} KiB in bfloat16
{describe_texts(path, c.vocab_size)}"""
