"""Hugging Face checkpoint folders: what a config.json means, and its tensors under our names, read straight to where they
belong. A further family of models is a further entry of FAMILIES.

Reads config.json and the weights of model.safetensors or pytorch_model.bin, whole or in shards. Writes config.json.
"""

import hashlib
import json
import math
import os
import pickle
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from model import GPTConfig, InputError, digest, read_json, sample_places

LARGE = 10**9        # bytes of weights from which on each file read is told of
BUFFER = 64 * 2**20  # bytes of a tensor that are cast or sent to a GPU at once


# ---------------------------------------------------------------------------------------------------------------------
# Families

LLAMA_NAMES = {  # ours -> the checkpoint's, without "model."; several parts are stacked, in order, into one of ours
    "embed.{}": ("embed_tokens.{}",),
    "norm.{}": ("norm.{}",),
    "head.{}": ("lm_head.{}",),
    "blocks.N.attn_norm.{}": ("layers.N.input_layernorm.{}",),
    "blocks.N.attn.qkv.{}": tuple(f"layers.N.self_attn.{x}_proj.{{}}" for x in "qkv"),
    "blocks.N.attn.q_norm.{}": ("layers.N.self_attn.q_norm.{}",),
    "blocks.N.attn.k_norm.{}": ("layers.N.self_attn.k_norm.{}",),
    "blocks.N.attn.proj.{}": ("layers.N.self_attn.o_proj.{}",),
    "blocks.N.mlp_norm.{}": ("layers.N.post_attention_layernorm.{}",),
    "blocks.N.mlp.up.{}": ("layers.N.mlp.gate_proj.{}", "layers.N.mlp.up_proj.{}"),
    "blocks.N.mlp.down.{}": ("layers.N.mlp.down_proj.{}",),
}
GPT2_NAMES = {  # without "transformer."; weights of linear layers are stored input by output
    "embed.{}": ("wte.{}",),
    "embed_positions.{}": ("wpe.{}",),
    "norm.{}": ("ln_f.{}",),
    "head.{}": ("lm_head.{}",),
    "blocks.N.attn_norm.{}": ("h.N.ln_1.{}",),
    "blocks.N.attn.qkv.{}": ("h.N.attn.c_attn.{}",),
    "blocks.N.attn.proj.{}": ("h.N.attn.c_proj.{}",),
    "blocks.N.mlp_norm.{}": ("h.N.ln_2.{}",),
    "blocks.N.mlp.up.{}": ("h.N.mlp.c_fc.{}",),
    "blocks.N.mlp.down.{}": ("h.N.mlp.c_proj.{}",),
}
LLAMA_KEYS = dict(  # fields of GPTConfig -> keys of config.json
    vocab_size="vocab_size", block_size="max_position_embeddings", n_layer="num_hidden_layers", n_head="num_attention_heads",
    n_kv_head="num_key_value_heads", head_size="head_dim", n_embd="hidden_size", n_inner="intermediate_size",
    norm_eps="rms_norm_eps", activation="hidden_act", tied="tie_word_embeddings")
GPT2_KEYS = dict(
    vocab_size="vocab_size", block_size="n_positions", n_layer="n_layer", n_head="n_head", n_embd="n_embd", n_inner="n_inner",
    norm_eps="layer_norm_epsilon", activation="activation_function", tied="tie_word_embeddings")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu"}
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


class Family(NamedTuple):
    """How one model_type writes its folders."""
    architecture: str
    names: dict = LLAMA_NAMES
    keys: dict = LLAMA_KEYS
    flags: Callable = lambda raw: {}      # config.json -> fields that none of the keys gives
    written: Callable = lambda config: {}  # the inverse
    transposed: tuple = ()                # our parameters that are stored input by output
    window: Callable = lambda raw: None   # tokens that attention looks back, itself included; None: all


def read_biases(raw):
    bias = flag(raw, "attention_bias", False)
    return dict(qkv_bias=bias, proj_bias=bias)


def qwen_window(raw):
    """Qwen names a window always, and uses it if a second key says so."""
    return raw.get("sliding_window", 4096) if flag(raw, "use_sliding_window", False) else None


def read_gpt2(raw):
    """What all of GPT-2's family has in common; InputError for variants of its attention."""
    for key, value in dict(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False).items():
        if flag(raw, key, value) != value:
            raise InputError(f"{key} {raw[key]} is not supported; supported: {value}")
    return dict(norm="layer", positions="learned", gated=False, qkv_bias=True, proj_bias=True, mlp_bias=True)


def read_baichuan(raw):
    """The 13B models have ALiBi and call their context model_max_length. Baichuan 2 has a key for its training's z-loss, or
    is known by its vocabulary."""
    alibi = "max_position_embeddings" not in raw or raw["hidden_size"] == 5120
    unit = "z_loss_weight" in raw or raw["vocab_size"] == 125696
    return dict(unit_head=unit) | (dict(positions="alibi", block_size=whole(raw, "model_max_length")) if alibi else {})


def write_baichuan(config):
    sizes = dict(model_max_length=config.block_size)
    sizes |= {} if config.positions == "alibi" else dict(max_position_embeddings=config.block_size)
    return sizes | (dict(z_loss_weight=0) if config.unit_head else {})


FAMILIES = {  # by model_type
    "llama": Family("LlamaForCausalLM", flags=lambda raw: read_biases(raw) | dict(mlp_bias=flag(raw, "mlp_bias", False)),
                    written=lambda c: dict(attention_bias=c.proj_bias, mlp_bias=c.mlp_bias)),
    "mistral": Family("MistralForCausalLM", window=lambda raw: raw.get("sliding_window", 4096),
                      written=lambda c: dict(sliding_window=None)),
    "qwen2": Family("Qwen2ForCausalLM", flags=lambda raw: dict(qkv_bias=True), window=qwen_window),
    "qwen3": Family("Qwen3ForCausalLM", flags=lambda raw: read_biases(raw) | dict(qk_norm=True), window=qwen_window,
                    written=lambda c: dict(attention_bias=c.proj_bias)),
    "phi3": Family("Phi3ForCausalLM", window=lambda raw: raw.get("sliding_window"),
                   names=LLAMA_NAMES | {"blocks.N.attn.qkv.{}": ("layers.N.self_attn.qkv_proj.{}",),
                                        "blocks.N.mlp.up.{}": ("layers.N.mlp.gate_up_proj.{}",)},
                   written=lambda c: dict(original_max_position_embeddings=c.block_size, pad_token_id=None)),
    "baichuan": Family("BaichuanForCausalLM", flags=read_baichuan, written=write_baichuan,
                       names=LLAMA_NAMES | {"blocks.N.attn.qkv.{}": ("layers.N.self_attn.W_pack.{}",)},
                       keys={k: v for k, v in LLAMA_KEYS.items() if k not in ("n_kv_head", "head_size", "block_size")}),
    "gpt2": Family("GPT2LMHeadModel", GPT2_NAMES, GPT2_KEYS, read_gpt2,
                   transposed=("attn.qkv.weight", "attn.proj.weight", "mlp.up.weight", "mlp.down.weight")),
}


# ---------------------------------------------------------------------------------------------------------------------
# config.json

def whole(raw, key, default=None):
    """A whole number of at least 1 from a json object. Here and below: null is as good as missing, and InputError says what
    came where there is neither a value of the type nor a default."""
    value = raw.get(key)
    value = default if value is None else value
    if value is None:
        raise InputError(f"the key {key!r} is missing")
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{key} has the wrong type: expected a whole number, found {value!r}")
    if not 1 <= value < 2**31:
        raise InputError(f"{key} must be at least 1 and below 2**31, found {value}")
    return value


def number(raw, key, default=None):
    """A number above 0 from a json object."""
    value = raw.get(key)
    value = default if value is None else value
    if value is None:
        raise InputError(f"the key {key!r} is missing")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{key} has the wrong type: expected a number, found {value!r}")
    if not 0 < value < math.inf:
        raise InputError(f"{key} must be above 0, found {value}")
    return float(value)


def flag(raw, key, default):
    """true or false from a json object."""
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise InputError(f"{key} has the wrong type: expected true or false, found {value!r}")
    return default if value is None else value


def read_rope(raw, context, head_size):
    """(theta, rope_scaling, longest sequence) from `rope_parameters` (transformers 5), or `rope_scaling` and `rope_theta`."""
    settings = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(settings, dict):
        raise InputError(f"rope parameters of the wrong type: expected an object, found {settings!r}")
    kind = settings.get("rope_type", settings.get("type")) or "default"
    if kind == "su":  # Phi-3's first name for it
        kind = "longrope"
    if kind not in ROPE_KINDS:
        raise InputError(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    if number(settings, "partial_rotary_factor", number(raw, "partial_rotary_factor", 1.0)) != 1:
        raise InputError("a partial_rotary_factor other than 1 is not supported; use a model that rotates whole heads")
    theta = number(settings, "rope_theta", number(raw, "rope_theta", 10000.0))
    if kind in ("default", "dynamic"):  # dynamic changes theta beyond the context, which no sequence here is
        return theta, None, context
    if kind == "linear":
        return theta, dict(rope_type=kind, factor=number(settings, "factor")), context
    original = whole(raw, "original_max_position_embeddings", settings.get("original_max_position_embeddings") or context)
    scaling = dict(rope_type=kind, original_max_position_embeddings=original)
    if kind == "llama3":
        scaling |= {key: number(settings, key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
        if scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
            raise InputError("low_freq_factor must be below high_freq_factor")
        return theta, scaling, context
    factor = number(settings, "factor", context / original)
    if kind == "yarn":
        if theta == 1:
            raise InputError("rope_theta must be above 1 for yarn, found 1")
        magnitude = lambda scale: 0.1 * scale * math.log(max(factor, 1.0)) + 1
        scales = settings.get("mscale"), settings.get("mscale_all_dim")
        default = magnitude(scales[0]) / magnitude(scales[1]) if all(scales) else magnitude(1)
        scaling |= dict(factor=factor, beta_fast=number(settings, "beta_fast", 32.0), beta_slow=number(settings, "beta_slow", 1.0),
                        truncate=bool(settings.get("truncate", True)))
        context = max(context, int(factor * original))
    else:  # past the original context longer factors would turn all keys anew, so that is where texts end
        for key in ("short_factor", "long_factor"):
            scaling[key] = settings.get(key)
            if not isinstance(scaling[key], list) or len(scaling[key]) != head_size // 2:
                raise InputError(f"{key} must be a list of {head_size // 2} numbers, half of the head size")
            scaling[key] = [number({key: value}, key) for value in scaling[key]]
        default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        context = min(context, original)
    return theta, scaling | dict(attention_factor=number(settings, "attention_factor", default)), context


def read_config(path):
    """config.json of a checkpoint folder -> GPTConfig; InputError for what is missing, broken or not supported."""
    if not Path(path).is_dir():
        raise InputError(f"{path}: no such folder; expected a Hugging Face checkpoint folder")
    path = Path(path) / "config.json"
    return parse_config(read_json(path), path)


def parse_config(raw, path):
    """The dict of a config.json -> GPTConfig; InputError for what is not supported, missing or of the wrong type.

    A sliding window ends the context: up to its length it changes nothing, and longer texts are refused."""
    try:
        return _parse_config(raw)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"the key {error} is missing" if isinstance(error, KeyError) else f"a value has the wrong type ({error})"
        raise InputError(f"{path}: {what}") from None


def _parse_config(raw):
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise InputError(f"model_type {model_type!r} is not supported; supported: {', '.join(FAMILIES)}")
    quantised = raw.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise InputError(f"the checkpoint is quantised ({method or 'by an unknown method'}), which is not supported; use the float16 or "
                         "bfloat16 one")
    family = FAMILIES[model_type]
    keys = family.keys
    activation = raw.get(keys["activation"], "gelu_new" if model_type == "gpt2" else "silu")
    if activation not in ACTIVATIONS:
        raise InputError(f"{keys['activation']} {activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    flags = family.flags(raw)
    C, heads = whole(raw, keys["n_embd"]), whole(raw, keys["n_head"])
    if heads > C:
        raise InputError(f"{heads} attention heads do not fit a hidden size of {C}")
    sizes = dict(family=model_type, n_embd=C, n_head=heads, activation=ACTIVATIONS[activation],
                 vocab_size=whole(raw, "vocab_size"), n_layer=whole(raw, keys["n_layer"]),
                 n_inner=whole(raw, keys["n_inner"], 4 * C if model_type == "gpt2" else None),
                 n_kv_head=whole(raw, keys.get("n_kv_head", ""), heads), head_size=whole(raw, keys.get("head_size", ""), C // heads),
                 norm_eps=number(raw, keys["norm_eps"]), tied=flag(raw, keys["tied"], model_type == "gpt2"))
    config = GPTConfig(**dict(block_size=0) | sizes | flags)
    config.block_size = config.block_size or whole(raw, keys.get("block_size", "max_position_embeddings"))
    if config.positions == "rope":
        config.rope_theta, config.rope_scaling, config.block_size = read_rope(raw, config.block_size, config.head_size)
    window = family.window(raw)
    if window is not None:
        config.block_size = min(config.block_size, whole(dict(sliding_window=window), "sliding_window"))
    if config.tied and config.unit_head:
        raise InputError("tie_word_embeddings is not supported with Baichuan 2's LM head, whose rows are brought to length 1")
    if heads % config.n_kv_head or config.head_size % 2 or not 16 <= config.head_size <= 256:
        raise InputError(f"the number of heads must be a multiple of that of key/value heads, and the head size even, from 16 to "
                         f"256; found {heads}, {config.n_kv_head}, {config.head_size}")
    return config


def hf_config(config, dtype):
    """GPTConfig -> the dict of config.json, rope settings in both spellings."""
    c, family = config, FAMILIES[config.family]
    raw = dict(architectures=[family.architecture], model_type=c.family, torch_dtype=str(dtype).removeprefix("torch."))
    raw |= {theirs: getattr(c, ours) for ours, theirs in family.keys.items()}
    raw[family.keys["activation"]] = {"silu": "silu", "gelu": "gelu_new"}[c.activation]
    if c.positions == "rope":
        scaling = c.rope_scaling or dict(rope_type="default")
        raw |= dict(rope_theta=c.rope_theta, rope_parameters=scaling | dict(rope_theta=c.rope_theta))
        raw |= dict(rope_scaling=scaling) if c.rope_scaling else {}
    return raw | family.written(c)


# ---------------------------------------------------------------------------------------------------------------------
# Names and parts

def checkpoint_names(name, config):
    """Our parameter name -> the tensor names in the checkpoint that are stacked into it, without the base model's prefix."""
    stem, _, kind = name.rpartition(".")
    parts = stem.split(".")
    number = parts[1] if parts[0] == "blocks" else ""
    if number:
        parts[1] = "N"
    pattern = ".".join(parts) + ".{}"
    return [part.format(kind).replace(".N.", f".{number}.") for part in FAMILIES[config.family].names[pattern]]


def part_sizes(name, rows, config):
    """How many of the rows of a parameter come from each of its parts."""
    c, count = config, len(checkpoint_names(name, config))
    if count == 3:
        return [c.n_head * c.head_size, c.n_kv_head * c.head_size, c.n_kv_head * c.head_size]
    return [rows // count] * count


def is_transposed(name, config):
    return name.endswith(FAMILIES[config.family].transposed)


def split_weight(name, value, config):
    """One parameter as the checkpoint has it: {tensor name: tensor}."""
    names, prefix = checkpoint_names(name, config), "transformer." if config.family == "gpt2" else "model."
    parts = value.split(part_sizes(name, value.shape[0], config))
    return {(part if part.startswith("lm_head") else prefix + part): (x.T if is_transposed(name, config) else x).contiguous()
            for part, x in zip(names, parts)}


def base_name(name):
    """A tensor's name without the prefix that some folders give the base model's tensors and others do not."""
    return name.removeprefix("model.").removeprefix("transformer.")


def ignored(name):
    """What old folders store although it follows from the config: rotary tables, GPT-2's causal masks."""
    return name.endswith(("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"))


# ---------------------------------------------------------------------------------------------------------------------
# Weights

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
          "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
          "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


class FileTensor(NamedTuple):
    """A tensor in a safetensors file. Read by hand: the library maps files into memory, which took three times as long as
    reading them to where the weights belong, and counts as memory."""
    file: object       # open, unbuffered
    offset: int
    dtype: torch.dtype
    shape: tuple

    def sample(self, rows, columns):
        """The elements at these places of the tensor as a matrix [prod(shape[:-1]), shape[-1]]."""
        size, width = self.dtype.itemsize, self.shape[-1]
        data = bytearray()
        for place in (rows * width + columns).tolist():
            self.file.seek(self.offset + size * place)
            data += self.file.read(size)
        return torch.frombuffer(data, dtype=self.dtype)

    def read_into(self, target, buffer):
        """Fills `target`, a view of this shape: straight where it lies as the file has it, else by way of `buffer`."""
        self.file.seek(self.offset)
        if target.dtype == self.dtype and target.is_cpu and target.is_contiguous():
            return read_bytes(self.file, target)
        rows, width = target.view(-1, 1) if target.dim() == 1 else target, math.prod(self.shape[1:])
        step = max(1, buffer.numel() // (width * self.dtype.itemsize))
        if width * self.dtype.itemsize > buffer.numel():
            buffer = torch.empty(width * self.dtype.itemsize, dtype=torch.uint8)
        for start in range(0, len(rows), step):
            part = rows[start:start + step]
            chunk = buffer[:part.numel() * self.dtype.itemsize].view(self.dtype).view(part.shape)
            read_bytes(self.file, chunk)
            part.copy_(chunk)  # casts and transposes; waits for a GPU, so that the buffer can be filled again


def read_bytes(file, tensor):
    """Fills a contiguous CPU tensor from where an unbuffered file stands."""
    view, done = memoryview(tensor.view(-1).view(torch.uint8).numpy()), 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            raise EOFError("it ends within a tensor")
        done += count


class LoadedTensor(NamedTuple):
    """A tensor of a pytorch_model.bin, mapped into memory."""
    value: torch.Tensor

    @property
    def dtype(self):
        return self.value.dtype

    @property
    def shape(self):
        return tuple(self.value.shape)

    def sample(self, rows, columns):
        return self.value.view(-1, self.shape[-1])[rows, columns]

    def read_into(self, target, buffer):
        target.copy_(self.value)


def weight_files(path):
    """The files that hold a folder's weights: safetensors, or where there are none pytorch_model.bin; one, or shards."""
    path = Path(path)
    for whole_file in (path / "model.safetensors", path / "pytorch_model.bin"):
        index = path / f"{whole_file.name}.index.json"
        if whole_file.is_file():
            return [whole_file]
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(n, str) for n in weight_map.values()):
                raise InputError(f"{index}: expected a weight_map of tensor names to file names")
            files = [path / name for name in sorted(set(weight_map.values()))]
            for file in files:
                if not file.is_file():
                    raise InputError(f"{file}: no such file, but {index.name} names it; fetch the missing shard")
            return files
    raise InputError(f"{path}: no such file as model.safetensors, pytorch_model.bin or the index of their shards; expected the "
                     "checkpoint's weights there")


def read_header(file):
    """The header of an open safetensors file: {name: FileTensor}. ValueError for what does not add up."""
    total = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= total - 8:
        raise ValueError("its header is longer than the file")
    header, tensors, data = json.loads(file.read(length)), {}, 8 + length
    header.pop("__metadata__", None)
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        dtype, shape = DTYPES.get(entry["dtype"]), tuple(entry["shape"])
        if dtype is None:
            raise ValueError(f"{name} is of the unknown type {entry['dtype']}")
        if not 0 <= begin <= end <= total - data or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} does not lie within the file")
        tensors[name] = FileTensor(file, data + begin, dtype, shape)
    return tensors


def stored_tensors(path):
    """Yields (file, tensor name, FileTensor or LoadedTensor), file by file; each is good until the next is asked for."""
    files = weight_files(path)
    total, done = sum(file.stat().st_size for file in files), 0
    for i, file in enumerate(files):
        if total >= LARGE:
            print(f"reading {file.name} ({i + 1} of {len(files)}, {done / 1e9:.1f} of {total / 1e9:.1f} GB read)", file=sys.stderr)
        try:
            if file.suffix == ".safetensors":
                with open(file, "rb", buffering=0) as opened:
                    # in the order of the file, as a disk likes it
                    for name, tensor in sorted(read_header(opened).items(), key=lambda item: item[1].offset):
                        yield file, name, tensor
            else:
                mapped = zipfile.is_zipfile(file)  # older files are not, and are read whole
                with open(file, "rb") as opened:
                    if not mapped and opened.read(1) != b"\x80":
                        raise ValueError("it is no pickle")
                state = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
                if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
                    raise ValueError("it does not hold tensors by name")
                for name, value in state.items():
                    yield file, name, LoadedTensor(value)
        except pickle.UnpicklingError:
            raise InputError(f"{file}: not just tensors: it holds code or other objects, which are not loaded; get the safetensors "
                             "version") from None
        except InputError:
            raise
        except (AttributeError, EOFError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
            what = " ".join(str(error).split())[:200]
            raise InputError(f"{file}: truncated or not a {file.suffix[1:]} file ({what}); fetch it again") from None
        done += file.stat().st_size


def read_state(path, config, shapes, dtype, device):
    """Reads the parameters `shapes` {name: shape} of a model from a folder -> ({name: tensor}, `identity` of the values in the
    file, before any cast). Every tensor of the folder has its place, or is named in an InputError; so is a parameter that
    nothing fills. Takes the memory of the parameters and of one buffer."""
    places, missing = {}, {}
    for name, shape in shapes.items():
        start = 0
        for part, size in zip(checkpoint_names(name, config), part_sizes(name, shape[0], config)):
            places[part] = name, start, size
            missing[part] = name
            start += size
    buffer = torch.empty(BUFFER, dtype=torch.uint8, pin_memory=torch.device(device).type == "cuda")
    state, samples = {}, {}
    for file, key, tensor in stored_tensors(path):
        part = base_name(key)
        if ignored(key):
            continue
        if part == "lm_head.weight" and config.tied:
            part = "embed_tokens.weight" if config.family != "gpt2" else "wte.weight"  # some folders keep the one, some both
            if part not in missing:
                continue
        if part not in places:
            broken = quantised_name(key, tensor.dtype)
            raise InputError(f"{file}: the checkpoint has tensors that its config.json gives no place to: {key}"
                             + (f"; it looks quantised ({broken}), which is not supported" if broken else ""))
        name, start, size = places[part]
        transposed = is_transposed(name, config)
        if tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            raise InputError(f"{file}: {key} is quantised ({str(tensor.dtype).removeprefix('torch.')}), which is not supported; use the "
                             "float16 or bfloat16 checkpoint")
        expected = (size, *shapes[name][1:])[::-1 if transposed else 1]
        if tensor.shape != expected:
            raise InputError(f"{file}: {key} should have shape {expected} by config.json, the checkpoint has {tensor.shape}")
        if name not in state:
            state[name] = torch.empty(shapes[name], dtype=dtype, device=device)
        target, (rows, columns) = state[name][start:start + size], sample_places(shapes[name], start, size)
        try:
            tensor.read_into(target.T if transposed else target, buffer)
            samples[name, start] = tensor.sample(columns, rows) if transposed else tensor.sample(rows, columns)
        except (EOFError, OSError) as error:
            raise InputError(f"{file}: cannot be read to its end ({error}); fetch it again") from None
        missing.pop(part, None)
    if missing:
        part, name = next(iter(missing.items()))
        raise InputError(f"{path}: the checkpoint lacks what {name} is made of ({part}); it does not fit its config.json")
    if config.unit_head:
        head = state["head.weight"]
        for rows in head.split(4096):  # in float32, a few at a time
            rows.copy_(torch.nn.functional.normalize(rows.float(), dim=-1))
    if config.tied:
        samples |= {("head.weight", start): x for (name, start), x in list(samples.items()) if name == "embed.weight"}
    ordered = {}
    for (name, start), values in sorted(samples.items()):
        ordered.setdefault(name, []).append(values)
    shapes = shapes | (dict([("head.weight", shapes["embed.weight"])]) if config.tied else {})
    return state, digest({name: (shapes[name], torch.cat(values)) for name, values in ordered.items()})


def quantised_name(key, dtype):
    """What a tensor's name says about quantisation, or None."""
    kinds = {"qweight": "GPTQ or AWQ", "qzeros": "GPTQ or AWQ", "scales": "GPTQ or AWQ", "g_idx": "GPTQ",
             "weight_scale": "fp8 or int8", "weight_scale_inv": "fp8", "input_scale": "fp8", "absmax": "bitsandbytes",
             "SCB": "bitsandbytes", "weight_format": "bitsandbytes"}
    return kinds.get(key.rpartition(".")[2])
