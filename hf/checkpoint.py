"""Loads and saves weights: Hugging Face checkpoint folders and GGUF files."""

import json
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from backends import cpu, cpu_layers, gpu, quantized, tensor_parallel
from backends.slots import SomeSlots
from common.files import files_hash, read_json
from common.machine import check_memory, weight_bytes
from common.values import warn
from hf.families import family_of, llama_json
from hf.files import read_family, read_part
from hf.paths import find_model, gguf_parts, is_gguf
from hf.quantization import combine, read_scheme
from hf.tensors import MTP, open_tensors
from model import GPT, InputError, expect, replace_file

FLOATS = torch.float64, torch.float32, torch.float16, torch.bfloat16
PATIENCE = 2  # seconds before a progress bar appears
BUFFERS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # recomputed from the config


@dataclass
class Source:
    """Where the values of a parameter come from, and how a backend packs its layer, if it does."""
    stacked: list                   # [(first row that it fills, `StoredTensor`)], in order
    rounding: tuple | None = None   # (bits, group) for `quantized.round_weight`, of --quantize
    pack: Callable | None = None    # StoredTensor -> a part for the backend's `put`
    bits: float | None = None       # of a packed number in memory

    @property
    def tensors(self):
        return [tensor for _, tensor in self.stacked]


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
    raise InputError(f"{path}: expected model.safetensors or pytorch_model.bin, or the index.json "
                     "of its shards; download one")


def read_headers(path):
    """Reads config.json and headers -> (GPT on the meta device, {parameter name: Source})."""
    family = read_family(path)
    tensors = text_tensors(path, family)
    n = len(tensors)  # checked before building config.n_layer blocks
    n_layer = family.config.n_layer
    expect(n_layer <= n, f"{path}: {n_layer} layers, but {n} tensors; download again")
    with torch.device("meta"):
        model = GPT(family.config)
    return model, match_tensors(path, model, family, tensors)


def stored_tensors(path):
    """{name: StoredTensor} of a folder or a GGUF file, from the headers."""
    if is_gguf(path):
        return read_part(path, "weights")
    tensors = {}
    for file in weight_files(path):
        tensors |= open_tensors(file)
    return tensors


def text_tensors(path, family):
    """Those of the text model and its MTP heads, whatever they are quantised to."""
    tensors = stored_tensors(path)
    if any("language_model." in name for name in tensors):  # a multimodal model
        warn(f"{path}: the parts of this model that see or hear are left out; it reads text only")
        tensors = {name.rpartition("language_model.")[2]: tensor for name, tensor in tensors.items()
                   if "language_model." in name or name == "lm_head.weight"
                   or name.startswith(MTP)}
    scheme = read_scheme(path, family.quantization)
    expect(not (scheme and family.transposed), f"{path}: a quantised checkpoint of this family is "
           "not supported; use an unquantised one")
    return combine(path, tensors, scheme)


def short(name):
    """A tensor's name without the prefix that some checkpoints omit."""
    return name.removeprefix("model.").removeprefix("transformer.")


def match_tensors(path, model, family, tensors):
    """Maps {name: StoredTensor} to {parameter name: Source}. Unties the LM head if the checkpoint
    stores one that differs from the embeddings."""
    stored = {short(name): tensor for name, tensor in tensors.items()
              if not name.endswith(BUFFERS) and not name.startswith(MTP)}
    if model.config.tied and "lm_head.weight" in stored:  # alone, or beside the embeddings
        head = stored["lm_head.weight"]
        table = stored.setdefault(short(f"{family.names['embed'][0]}.weight"), head)
        values = table.load()
        if table is head or torch.equal(values, head.load().to(values.dtype)):
            del stored["lm_head.weight"]
        else:
            warn(f"{path}: config.json ties the LM head to the embeddings, but the stored LM head "
                 "differs; using the stored one, like transformers")
            untie(model)
    return match_parameters(path, model, family, stored)


def match_parameters(path, module, family, stored):
    """`match_tensors` for any module. stored: {name without a prefix: StoredTensor}."""
    expected = {}  # {tensor name: (parameter name, first row, shape)}
    for name, parameter in module.named_parameters():
        for key, start, size in family.stacked(name, len(parameter)):
            shape = (size, *parameter.shape[1:])
            is_transposed = name.endswith(family.transposed)
            expected[short(key)] = name, start, shape[::-1] if is_transposed else shape
    matches = defaultdict(list)
    for key, tensor in stored.items():
        if key not in expected and key.endswith(".bias") and not tensor.load().any():
            continue  # AutoGPTQ adds zero biases to every layer
        expect(key in expected, f"{tensor.file}: a model with this config.json has no {key!r}; a "
               "quantised checkpoint needs its quantization_config")
        name, start, shape = expected.pop(key)
        expect(tensor.dtype in FLOATS, f"{tensor.file}: {key} is stored as {tensor.dtype}, but "
               "config.json does not say how it is quantised; use another checkpoint")
        expect(tensor.shape == shape, f"{tensor.file}: {key}: expected floats of shape {shape}, "
               f"as in config.json, got {tensor.shape}; download the checkpoint again")
        matches[name].append((start, family.convert(name, start, tensor)))
    expect(not expected, f"{path}: the weights lack {', '.join([*expected][:3])}; download again")
    return {name: Source(sorted(stacked)) for name, stacked in matches.items()}


def untie(model):
    """Gives the LM head its own weight. The model is still on the meta device."""
    model.config.tied = False  # the layers share this config object
    model.head.weight = torch.nn.Parameter(torch.empty_like(model.embed.weight))


def load(path, dtype=None, device=None, group=None, quantize=None, packed=None):
    """Loads a folder, a GGUF file or a short name to the device -> frozen GPT in eval mode.
    group: tensor-parallel ranks, each of which loads its shard. quantize: round the weights to
    "int8" or "int4". packed: on a GPU, and on a CPU with the C kernels, layers are replaced by
    faster ones that only decode, and quantised weights stay quantised unless dtype is float32. With
    packed=False, or several ranks, layers are plain and quantised weights are dequantised."""
    path = find_model(path)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    group = group or tensor_parallel.Group()
    backend = None  # the module whose layers replace the model's
    if packed is not False:
        backend = next((module for module in (gpu, cpu) if module.is_usable(device)), None)
    model, sources = read_headers(path)
    choose_rounding(path, model, sources, quantize)
    dtype = choose_dtype(dtype, device, sources, backend, group)
    if backend and group.size == 1:
        choose_packing(model, sources, dtype, backend is gpu)
    with torch.device("meta"):
        group.divide(model)
    allocate(path, model, dtype, device, sources, backend is gpu)
    read_weights(model, sources, group, backend)
    model.hash = files_hash(weight_files(path))
    group.connect(model)
    if backend:
        backend.apply(model)
    if backend is cpu:
        cpu.trim_memory()
    if device.type == "cuda":  # plain layers, too
        model.decoder = gpu.GraphDecoder
    model.decoder = model.decoder or SomeSlots
    return model


def choose_rounding(path, model, sources, quantize):
    """Sets how --quantize rounds weights. Unties the LM head, which is rounded, from the
    embeddings, which are not."""
    if not quantize:
        return
    bits = max(tensor.bits or 0 for source in sources.values() for tensor in source.tensors)
    expect(not bits or is_gguf(path), f"{path}: the checkpoint is quantised already, to {bits} "
           "bits; leave out --quantize")
    if model.config.tied:
        untie(model)
        sources["head.weight"] = Source(sources["embed.weight"].stacked)
    for name, rounding in quantized.rounding(model, quantize).items():
        sources[name].rounding = rounding


def choose_dtype(dtype, device, sources, backend, group):
    """The dtype to compute in: if none is given, the largest tensor's, if it is fast here."""
    if dtype == torch.float16 and backend is cpu:
        warn("float16 is not for a CPU: there are no kernels for it; using bfloat16")
        return torch.bfloat16
    if dtype is not None:
        return dtype
    tensors = [tensor for source in sources.values() for tensor in source.tensors]
    stored = max(tensors, key=lambda tensor: math.prod(tensor.shape)).dtype
    if any(tensor.bits for tensor in tensors):
        stored = torch.bfloat16
    return cpu.default_dtype(device, stored, backend is cpu and group.size == 1, group.rank)


def choose_packing(model, sources, dtype, on_gpu):
    """Sets how the layers that a backend replaces are packed: those that are rounded, or quantised
    unless dtype is float32, and on a CPU all layers."""
    floats = set()
    if not on_gpu:
        floats = {f"{name}.weight" for name, layer in model.named_modules()
                  if type(layer) in cpu_layers.LAYERS}
        if model.config.tied:
            floats.add("embed.weight")  # it is the LM head, too
    reader = attrgetter("read_quantized" if on_gpu else "read_packed")
    for name, source in sources.items():
        is_quantized = all(map(reader, source.tensors))
        if name == "head.weight" and model.config.unit_head:
            continue  # read_weights normalises its rows first
        if source.rounding:
            source.pack = partial(pack_rounded, source.rounding, on_gpu)
            source.bits = source.rounding[0]
        elif is_quantized and dtype != torch.float32:
            source.pack = lambda tensor: reader(tensor)(tensor.order)
            source.bits = max(x.quantized_bits if on_gpu else x.bits for x in source.tensors)
        elif name in floats:
            source.pack = lambda tensor: cpu_layers.pack_floats(tensor.load().to(dtype))
            source.bits = 8 * dtype.itemsize


def pack_rounded(rounding, on_gpu, tensor):
    weight = quantized.round_weight(tensor.load(), *rounding)
    return weight if on_gpu else quantized.pack(weight)


def allocate(path, model, dtype, device, sources, on_gpu):
    """Moves a model from the meta device to uninitialised memory, but for the layers to pack, which
    `put` will replace. Raises InputError if memory is short for all of them."""
    packed = {name: source for name, source in sources.items() if source.pack}
    size = 0
    for name, source in packed.items():
        layer = model.get_submodule(name.removesuffix(".weight"))
        size += int(layer.weight.numel() * source.bits / 8)
        layer.weight = None
    model.to(dtype)
    size += weight_bytes(model)
    if on_gpu and packed:
        largest = max(math.prod(x.shape) for source in packed.values() for x in source.tensors)
        size += 2 * largest * dtype.itemsize  # a long prompt dequantises a layer at a time
    advice = "use a smaller model" + " or --dtype bfloat16" * (dtype == torch.float32)
    check_memory(f"{path}: its weights take", size, device, advice)
    # not to_empty, which imports sympy
    model._apply(lambda x: torch.empty(x.shape, dtype=x.dtype, device=device))
    model.requires_grad_(False).eval()


def read_weights(model, sources, group, backend):
    """Loads {parameter name: Source} into a model, or into this rank's shard. backend: the module
    that packs layers."""
    parameters = dict(model.named_parameters())
    biases_first = sorted(sources, key=lambda name: len(sources[name].stacked[0][1].shape))
    for name in tqdm(biases_first, "reading the weights", leave=False, delay=PATIENCE,
                     disable=group.rank > 0 or None):  # None: only on a terminal
        source = sources[name]
        if source.pack:
            backend.put(model, name.removesuffix(".weight"), list(map(source.pack, source.tensors)))
            continue
        for start, tensor in source.stacked:
            value = tensor.load()
            if source.rounding:
                value = quantized.round_weight(value, *source.rounding).values()
            copy_shard(parameters[name], value, start, group.shard_slices(name, model.config))
    if model.config.unit_head:
        for rows in parameters["head.weight"].split(4096):  # chunks, as float32 takes memory
            rows.copy_(torch.nn.functional.normalize(rows.float(), dim=-1))


def copy_shard(target, value, start, shard):
    """Copies a rank's shard (`Group.shard_slices`) of a stored tensor, which fills the parameter
    from row `start` on."""
    dim, slices = shard or (0, [slice(0, len(target))])
    if dim == 1:  # such a parameter is stored as one tensor
        target.copy_(value[:, slices[0]])
        return
    for own, rows in zip(slices, target.split([own.stop - own.start for own in slices])):
        overlap = value[max(own.start - start, 0):max(own.stop - start, 0)]
        first = max(start - own.start, 0)
        rows[first:first + len(overlap)] = overlap


def save(model, path, dtype=None):
    """Writes a Llama folder: config.json and model.safetensors, which transformers can load too.
    dtype: default the model's. Raises InputError for a packed model, and for one that Llama's
    config.json cannot describe."""
    path, dtype = Path(path), dtype or model.dtype
    model.check_plain("saved")
    raw = llama_json(model.config, dtype)
    llama = family_of(raw)
    ours, theirs = vars(model.config), vars(llama.config)
    others = [f"{name}={ours[name]!r:.60}" for name in ours if ours[name] != theirs[name]]
    expect(not others, f"{path}: a Llama folder is written, whose config.json has no way to say "
           f"{', '.join(others)}; use torch.save(model.state_dict(), file) instead")
    path.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, value in model.named_parameters():
        names, _, sizes = zip(*llama.stacked(name, len(value)))
        stacked = value.detach().to("cpu", dtype).split(sizes)
        tensors |= {key: rows.contiguous() for key, rows in zip(names, stacked)}
    replace_file(path / "model.safetensors", partial(save_file, tensors, metadata={"format": "pt"}))
    text = json.dumps(raw, indent=2) + "\n"
    replace_file(path / "config.json", lambda tmp: tmp.write_text(text))
