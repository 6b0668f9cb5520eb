"""Loads and saves weights: Hugging Face checkpoint folders and GGUF files."""

import hashlib
import json
import math
import zipfile
from collections import defaultdict
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from backends import cpu, quantized, tensor_parallel
from hf import chat, families
from hf.families import FAMILIES
from hf.files import read_config, read_part
from hf.paths import find_heads, find_model, gguf_parts, is_gguf
from hf.quantization import FP8, StoredTensor, combine, read_scheme
from hf.tokenizer import load_encoding
from model import (
    GPT,
    InputError,
    atomic_write,
    check_memory,
    expect,
    free_memory,
    human,
    read_json,
    warn,
)

FLOAT_DTYPES = dict(F64=torch.float64, F32=torch.float32, F16=torch.float16, BF16=torch.bfloat16)
DTYPES = FLOAT_DTYPES | dict(F8_E4M3=FP8, I32=torch.int32)  # names in a safetensors header
SAMPLES = 64   # how many samples of a file are hashed
SAMPLE = 4096  # bytes per sample
PATIENCE = 2   # seconds before a progress bar appears
IGNORED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # recomputed from the config


def weight_files(path):
    """The weight files of a folder, safetensors if present, else .bin; all parts of a GGUF file."""
    if is_gguf(path):
        return gguf_parts(path)
    for single in (path / "model.safetensors", path / "pytorch_model.bin"):
        if single.is_file():
            return [single]
        index = single.with_name(f"{single.name}.index.json")
        if index.is_file():
            shards = read_json(index).get("weight_map")
            expect(isinstance(shards, dict), f"{index}: expected a weight_map")
            return sorted({index.parent / Path(str(shard)).name for shard in shards.values()})
    raise InputError(f"{path}: expected model.safetensors or pytorch_model.bin; download one")


def files_hash(path):
    """16 hex digits that identify the weight files: a hash of names, sizes and samples."""
    sha = hashlib.sha256()
    for file in weight_files(path):
        size = file.stat().st_size
        sha.update(f"{file.name} {size}".encode())
        with file.open("rb") as opened:
            for i in range(SAMPLES):
                opened.seek(max(size - SAMPLE, 0) * i // (SAMPLES - 1))
                sha.update(opened.read(SAMPLE))
    return sha.hexdigest()[:16]


def open_weights(file):
    """{name: StoredTensor} of a file. Raises InputError if it is damaged or holds other objects."""
    if file.suffix not in (".safetensors", ".bin"):
        return read_part(file, "weights")
    try:
        return (open_safetensors if file.suffix == ".safetensors" else open_pickle)(file)
    except Exception as error:  # safetensors and torch raise many types
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{file}: truncated, not a {file.suffix[1:]} file, or contains more than "
                         f"tensors ({reason}); download it again or use safetensors") from error


def open_safetensors(file):
    def load(name):  # reopens the file: a file left open keeps every tensor read in memory
        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(name)

    with safe_open(file, framework="pt") as opened:
        parts = {name: opened.get_slice(name) for name in opened.offset_keys()}  # in file order
        return {name: StoredTensor(file, tuple(part.get_shape()),
                                   DTYPES.get(part.get_dtype(), part.get_dtype()),
                                   partial(load, name)) for name, part in parts.items()}


def open_pickle(file):
    mapped = zipfile.is_zipfile(file)  # torch's legacy format is no zip and cannot be mapped
    state = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    for value in state.values():
        if value.layout is not torch.strided or value.nbytes > value.untyped_storage().nbytes():
            raise ValueError("a tensor does not store all its values")  # sparse, or a huge view
    return {name: StoredTensor(file, tuple(value.shape), value.dtype, lambda value=value: value)
            for name, value in state.items()}


def read_headers(path):
    """Reads config.json and headers -> (GPT on the meta device, tensors as in `match_tensors`)."""
    config = read_config(path)
    tensors = {}
    for file in [path] if is_gguf(path) else weight_files(path):
        tensors |= open_weights(file)
    if any("language_model." in name for name in tensors):  # a multimodal model
        tensors = {name.rpartition("language_model.")[2]: tensor for name, tensor in tensors.items()
                   if "language_model." in name or name == "lm_head.weight"}
    raw = families.text_config(read_part(path, "config.json"))
    tensors = combine(path, tensors, read_scheme(raw.get("quantization_config")))
    n = len(tensors)  # checked before building config.n_layer blocks
    expect(config.n_layer <= n, f"{path}: {config.n_layer} layers, but {n} tensors; download again")
    with torch.device("meta"):
        model = GPT(config)
    return model, match_tensors(path, model, tensors)


def match_tensors(path, model, tensors):
    """Maps {name: StoredTensor} to {parameter name: [(first row it fills, tensor)]}. Unties the
    LM head if the checkpoint stores one that differs from the embeddings."""
    family = FAMILIES[model.config.family]
    stored = {name.removeprefix(family.prefix): tensor  # some checkpoints omit the prefix
              for name, tensor in tensors.items() if not name.endswith(IGNORED)}
    if model.config.tied and "lm_head.weight" in stored:  # alone, or beside the embeddings
        head = stored["lm_head.weight"]
        table = stored.setdefault(f"{family.names['embed'][0]}.weight", head)
        values = table.load()
        if table is head or torch.equal(values, head.load().to(values.dtype)):
            del stored["lm_head.weight"]
        else:
            warn(f"{path}: config.json ties the LM head to the embeddings, but the stored LM head "
                 "differs; using the stored one, like transformers")
            untie(model)
    expected = {}  # tensor name without prefix -> (parameter name, first row, shape)
    for name, parameter in model.named_parameters():
        for part, start, size in families.stored_parts(name, len(parameter), model.config):
            shape = (size, *parameter.shape[1:])
            is_transposed = name.endswith(family.transposed)
            expected[part] = name, start, shape[::-1] if is_transposed else shape
    matches = defaultdict(list)
    for part, tensor in stored.items():
        if part not in expected and part.endswith(".bias") and not tensor.load().any():
            continue  # AutoGPTQ adds zero biases to every layer
        expect(part in expected, f"{tensor.file}: a model with this config.json has no {part}; a "
               "quantised checkpoint needs its quantization_config")
        name, start, shape = expected.pop(part)
        expect(tensor.shape == shape and tensor.dtype in FLOAT_DTYPES.values(),
               f"{tensor.file}: {part}: expected floats of shape {shape}, as in config.json, got "
               f"{tensor.dtype} of shape {tensor.shape}; download the checkpoint again")
        matches[name].append((start, tensor))
    expect(not expected, f"{path}: the weights lack {', '.join([*expected][:3])}; download again")
    return {name: sorted(parts) for name, parts in matches.items()}


def untie(model):
    """Gives the LM head its own weight. The model is still on the meta device."""
    model.config.tied = False  # the layers share this config object
    model.head.weight = torch.nn.Parameter(torch.empty_like(model.embed.weight))


def load(path, dtype=None, device=None, group=None, quantize=None, packed=None):
    """Loads a folder, a GGUF file or a short name to the device -> frozen GPT in eval mode.
    group: tensor-parallel ranks, each of which loads its shard. quantize: round the weights to
    "int8" or "int4"; CPU only. packed: on a CPU with the C kernels, layers are packed for
    decoding, and quantised weights stay quantised unless dtype is float32. With packed=False, or
    on other devices, layers are plain and quantised weights are dequantised."""
    path = find_model(path)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    expect(not quantize or device.type == "cpu", f"--quantize is for a CPU, not for {device.type}; "
           "leave it out, or add --device cpu")
    packed = packed is not False and cpu.is_usable(device)
    group = group or tensor_parallel.Group()
    model, matches = read_headers(path)
    tensors = [tensor for parts in matches.values() for _, tensor in parts]
    stored_as = next((tensor.stored_as for tensor in tensors if tensor.pack), None)
    expect(not (quantize and stored_as) or is_gguf(path),
           f"{path}: the checkpoint is quantised already ({stored_as}); leave out --quantize")
    if packed and dtype == torch.float16:
        warn("float16 is not for a CPU: there are no kernels for it; using bfloat16")
        dtype = torch.bfloat16
    packs_layers = packed and group.size == 1
    if dtype is None:
        largest = max(tensors, key=lambda tensor: math.prod(tensor.shape))
        stored = torch.bfloat16 if stored_as else largest.dtype
        dtype = cpu.default_dtype(device, stored, packs_layers, group.rank)
    if quantize and model.config.tied:  # round the LM head, but not the embeddings
        untie(model)
        matches["head.weight"] = matches["embed.weight"]
    rounding = quantized.rounding(model, quantize) if quantize else {}
    packers = choose_packers(model, matches, rounding, dtype) if packs_layers else {}
    with torch.device("meta"):
        group.divide(model)
    size = 0
    for name, (bits, _) in packers.items():
        layer = model.get_submodule(name.removesuffix(".weight"))
        size += int(layer.weight.numel() * bits / 8)
        layer.weight = None  # the packed layer allocates its own
    model = model.to(dtype)
    size += model.weight_bytes()
    if device.type != "cpu" and stored_as:
        warn(f"{path}: quantised weights are dequantised to {str(dtype).removeprefix('torch.')} on "
             f"{device.type}, where they take {human(size, 'B')} in each process")
    advice = "use a smaller model" + " or --dtype bfloat16" * (dtype == torch.float32)
    check_memory(f"{path}: its weights take", size, free_memory(device), device, advice)
    # not to_empty, which imports sympy
    model._apply(lambda x: torch.empty(x.shape, dtype=x.dtype, device=device))
    model = model.requires_grad_(False).eval()
    read_weights(model, matches, group, rounding, packers)
    model.hash = files_hash(path)
    group.connect(model)
    if packed:
        cpu.apply(model)
        cpu.trim_memory()
    return model


def choose_packers(model, matches, rounding, dtype):
    """{weight name: (bits per number, pack(tensor, arrange) -> `cpu.PackedWeight`)} of the layers
    to pack. Quantised weights stay quantised unless dtype is float32."""
    names = [f"{name}.weight" for name, layer in model.named_modules() if type(layer) in cpu.LAYERS]
    if model.config.tied:
        names[names.index("head.weight")] = "embed.weight"
    pack_floats = lambda tensor, arrange: cpu.pack_floats(arrange(tensor.load()).to(dtype))
    pack_stored = lambda tensor, arrange: tensor.pack(  # arrange takes matrices
        arrange(torch.arange(tensor.shape[0])[:, None])[:, 0])
    pack_rounded = lambda how, tensor, arrange: quantized.pack(
        quantized.round_weight(arrange(tensor.load()), *how))
    packers = dict.fromkeys(names, (8 * dtype.itemsize, pack_floats))
    for name, parts in matches.items():
        if all(tensor.pack for _, tensor in parts) and dtype != torch.float32:
            packers[name] = max(tensor.bits for _, tensor in parts), pack_stored
    for name, how in rounding.items():
        packers[name] = how[0], partial(pack_rounded, how)
    if model.config.unit_head:  # read_weights normalises its rows first
        packers.pop("head.weight", None)
    return packers


def read_weights(model, matches, group, rounding, packers):
    """Loads the stored tensors into a model, or into this rank's shard. rounding: {name: (bits,
    group) for `round_weight`}. packers: from `choose_packers`."""
    parameters = dict(model.named_parameters())
    biases_first = sorted(matches, key=lambda name: len(matches[name][0][1].shape))
    for name in tqdm(biases_first, "reading the weights", leave=False, delay=PATIENCE,
                     disable=group.rank > 0 or None):  # None: only on a terminal
        arrange = partial(families.from_stored, name, config=model.config)
        if name in packers:
            _, pack = packers[name]
            parts = [pack(tensor, partial(arrange, start=start)) for start, tensor in matches[name]]
            put_packed(model, name.removesuffix(".weight"), parts)
            continue
        for start, tensor in matches[name]:
            value = arrange(tensor.load(), start=start)
            if name in rounding:
                value = quantized.round_weight(value, *rounding[name]).values()
            copy_shard(parameters[name], value, start, group.shard_slices(name, model.config))
    if model.config.unit_head:
        for rows in parameters["head.weight"].split(4096):  # chunks, as float32 takes memory
            rows.copy_(torch.nn.functional.normalize(rows.float(), dim=-1))


def put_packed(model, name, parts):
    """Replaces the layer `name` by a packed layer made of `cpu.PackedWeight`s."""
    layer = model.get_submodule(name)
    weight = cpu.stack(parts, getattr(layer, "bias", None))
    if name != "embed":
        model.set_submodule(name, cpu.LAYERS[type(layer)](weight))
    elif model.config.tied:
        model.head = cpu.PackedLMHead(weight)  # also serves as the embeddings
    else:
        model.embed = cpu.PackedEmbedding(cpu.PackedLinear(weight), model.dtype)


def copy_shard(target, value, start, slices):
    """Copies a rank's part of a stored tensor, which fills the parameter from row `start` on."""
    dim, parts = slices or (0, [slice(0, len(target))])
    if dim == 1:  # such a parameter is stored as one tensor
        target.copy_(value[:, parts[0]])
        return
    for part, rows in zip(parts, target.split([part.stop - part.start for part in parts])):
        overlap = value[max(part.start - start, 0):max(part.stop - start, 0)]
        first = max(start - part.start, 0)
        rows[first:first + len(overlap)] = overlap


def save(model, path, dtype=None):
    """Writes config.json and model.safetensors, which transformers can load. dtype: default the
    model's. Raises InputError for a sharded or packed model and an unrepresentable config."""
    path, dtype = Path(path), dtype or model.dtype
    expect(model.group is None, f"{path}: the model is sharded; save it from one process")
    model.check_plain("saved")
    raw = families.hf_config(model.config, dtype)
    expect(families.parse_config(raw) == model.config,
           f"{path}: the {model.config.family} format has no way to write {model.config}")
    path.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, value in model.named_parameters():
        tensors |= families.split_weight(name, value.detach().to("cpu", dtype), model.config)
    atomic_write(path / "model.safetensors", partial(save_file, tensors, metadata={"format": "pt"}))
    text = json.dumps(raw, indent=2) + "\n"
    atomic_write(path / "config.json", lambda tmp: Path(tmp).write_text(text))


def describe(path):
    """A summary of a folder or file, one "name value" line each. Reads headers, not weights."""
    path = find_model(path)
    model, matches = read_headers(path)
    c = model.config
    types = {tensor.stored_as for parts in matches.values() for _, tensor in parts} - {None}
    cache = 4 * c.n_layer * c.n_kv_head * c.head_size / 1024
    size = sum(file.stat().st_size for file in weight_files(path))
    lines = {name: f"{value!s:.80}" for name, value in vars(c).items()} | {
        "parameters": human(sum(parameter.numel() for parameter in model.parameters())),
        "weights": ", ".join((human(size, "B"), *sorted(types))),
        "KV cache": f"{cache * 2:.1f} KiB per token in float32, {cache:.1f} KiB in bfloat16",
        "draft heads": [folder.name for folder in find_heads(path)]}
    try:
        encoding = load_encoding(path)
        lines |= {"tokenizer": f"{encoding.n_vocab} tokens, {encoding.prefix} before a prompt",
                  "ends at": encoding.decode(chat.stop_tokens(path, encoding)),
                  "chat template": encoding.template and encoding.template.file.name,
                  "sampling": chat.sampling_defaults(path)}
    except InputError as error:
        lines["tokenizer"] = error
    return "\n".join(f"{name:<14}{text}" for name, text in lines.items())
