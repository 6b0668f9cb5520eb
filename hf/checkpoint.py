"""Hugging Face checkpoint folders: what config.json means, and the weights under our names.

Weights come from model.safetensors or pytorch_model.bin, in one file or in shards. A further family
of models is a further entry of FAMILIES.
"""

import itertools
import json
import math
import pickle
import re
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from backends.cpu import default_dtype
from clover import samples_hash
from model import GPT, GPTConfig, InputError, atomic_write, check_memory, free_memory, read_json

LARGE = 10**9  # bytes of weights; reading more than these is reported file by file


# --------------------------------------------------------------------------------------------------
# Families

# Our parameters -> the checkpoint's tensors, without the family's prefix. N is the layer's number.
# Each ends in .weight or .bias. Several tensors are stacked, in order, into one of ours.
LLAMA_NAMES = {
    "embed": ("embed_tokens",),
    "norm": ("norm",),
    "head": ("lm_head",),
    "blocks.N.attn_norm": ("layers.N.input_layernorm",),
    "blocks.N.attn.qkv": tuple(f"layers.N.self_attn.{x}_proj" for x in "qkv"),
    "blocks.N.attn.q_norm": ("layers.N.self_attn.q_norm",),
    "blocks.N.attn.k_norm": ("layers.N.self_attn.k_norm",),
    "blocks.N.attn.proj": ("layers.N.self_attn.o_proj",),
    "blocks.N.mlp_norm": ("layers.N.post_attention_layernorm",),
    "blocks.N.mlp.up": ("layers.N.mlp.gate_proj", "layers.N.mlp.up_proj"),
    "blocks.N.mlp.down": ("layers.N.mlp.down_proj",),
}
BAICHUAN_NAMES = LLAMA_NAMES | {"blocks.N.attn.qkv": ("layers.N.self_attn.W_pack",)}
PHI3_NAMES = LLAMA_NAMES | {"blocks.N.attn.qkv": ("layers.N.self_attn.qkv_proj",),
                            "blocks.N.mlp.up": ("layers.N.mlp.gate_up_proj",)}
GPT2_NAMES = {
    "embed": ("wte",),
    "embed_positions": ("wpe",),
    "norm": ("ln_f",),
    "head": ("lm_head",),
    "blocks.N.attn_norm": ("h.N.ln_1",),
    "blocks.N.attn.qkv": ("h.N.attn.c_attn",),
    "blocks.N.attn.proj": ("h.N.attn.c_proj",),
    "blocks.N.mlp_norm": ("h.N.ln_2",),
    "blocks.N.mlp.up": ("h.N.mlp.c_fc",),
    "blocks.N.mlp.down": ("h.N.mlp.c_proj",),
}
LLAMA_KEYS = dict(  # fields of GPTConfig -> keys of config.json
    vocab_size="vocab_size", block_size="max_position_embeddings", n_layer="num_hidden_layers",
    n_head="num_attention_heads", n_kv_head="num_key_value_heads", head_size="head_dim",
    n_embd="hidden_size", n_inner="intermediate_size", norm_eps="rms_norm_eps",
    activation="hidden_act", tied="tie_word_embeddings")
BAICHUAN_KEYS = {ours: theirs for ours, theirs in LLAMA_KEYS.items()
                 if ours not in ("n_kv_head", "head_size", "block_size")}
GPT2_KEYS = dict(
    vocab_size="vocab_size", block_size="n_positions", n_layer="n_layer", n_head="n_head",
    n_embd="n_embd", n_inner="n_inner", norm_eps="layer_norm_epsilon",
    activation="activation_function", tied="tie_word_embeddings")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu"}
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


class Family(NamedTuple):
    """How the folders of one model_type are written."""
    architecture: str
    names: dict = LLAMA_NAMES
    keys: dict = LLAMA_KEYS
    flags: Callable = lambda raw: {}       # config.json -> what no key of `keys` gives of GPTConfig
    written: Callable = lambda config: {}  # the inverse of flags
    transposed: tuple = ()                 # ends of names of ours, stored as [inputs, outputs]
    window: Callable = lambda raw: None    # how many tokens attention sees, its own too; None: all
    prefix: str = "model."                 # of all tensors but the LM head's
    defaults: Callable = lambda raw: {}    # config.json -> what a missing key of `keys` means


def read_biases(raw):
    """One key is for the biases of all four projections of attention."""
    bias = value_of(raw, "attention_bias", bool, False)
    return dict(qkv_bias=bias, proj_bias=bias)


def qwen_window(raw):
    """Qwen always names a window; a second key says whether it is used."""
    used = value_of(raw, "use_sliding_window", bool, False)
    return raw.get("sliding_window", 4096) if used else None


def read_gpt2(raw):
    """GPT-2's fixed fields. Raises InputError for variants of its attention."""
    for key, value in dict(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False,
                           add_cross_attention=False).items():
        if value_of(raw, key, bool, value) != value:
            raise InputError(f"{key} {raw[key]} is not supported; supported: {value}")
    return dict(norm="layer", positions="learned", gated=False, qkv_bias=True, proj_bias=True,
                mlp_bias=True)


def read_baichuan(raw):
    """The 13B models have ALiBi and call their context model_max_length. Baichuan 2, whose LM
    head's rows are normalised, is recognised by its key z_loss_weight or by its vocabulary."""
    flags = dict(unit_head="z_loss_weight" in raw or raw.get("vocab_size") == 125696)
    if "max_position_embeddings" not in raw or raw.get("hidden_size") == 5120:
        flags |= dict(positions="alibi", block_size=value_of(raw, "model_max_length", int))
    return flags


def write_baichuan(config):
    written = dict(model_max_length=config.block_size)
    if config.positions != "alibi":
        written["max_position_embeddings"] = config.block_size
    return written | (dict(z_loss_weight=0) if config.unit_head else {})


FAMILIES = {  # by model_type
    "llama": Family(
        "LlamaForCausalLM",
        flags=lambda raw: read_biases(raw) | dict(mlp_bias=value_of(raw, "mlp_bias", bool, False)),
        written=lambda c: dict(attention_bias=c.proj_bias, mlp_bias=c.mlp_bias)),
    "mistral": Family(
        "MistralForCausalLM", window=lambda raw: raw.get("sliding_window", 4096),
        written=lambda c: dict(sliding_window=None)),
    "qwen2": Family(
        "Qwen2ForCausalLM", flags=lambda raw: dict(qkv_bias=True), window=qwen_window),
    "qwen3": Family(
        "Qwen3ForCausalLM", flags=lambda raw: read_biases(raw) | dict(qk_norm=True),
        window=qwen_window, written=lambda c: dict(attention_bias=c.proj_bias)),
    "phi3": Family(
        "Phi3ForCausalLM", PHI3_NAMES, window=lambda raw: raw.get("sliding_window"),
        written=lambda c: dict(original_max_position_embeddings=c.block_size, pad_token_id=None)),
    "baichuan": Family(
        "BaichuanForCausalLM", BAICHUAN_NAMES, BAICHUAN_KEYS, read_baichuan, write_baichuan),
    "gpt2": Family(
        "GPT2LMHeadModel", GPT2_NAMES, GPT2_KEYS, read_gpt2, prefix="transformer.",
        transposed=("attn.qkv.weight", "attn.proj.weight", "mlp.up.weight", "mlp.down.weight"),
        defaults=lambda raw: dict(activation="gelu_new", tied=True,
                                  n_inner=4 * value_of(raw, "n_embd", int))),
}


# --------------------------------------------------------------------------------------------------
# config.json. A key that is null counts as missing.

EXPECTED = {int: "a whole number of at least 1 and below 2**31", float: "a number above 0",
            bool: "true or false"}


def value_of(raw, key, kind, default=None):
    """raw[key], or the default. Raises InputError for none, and unless EXPECTED[kind] fits it."""
    value = default if raw.get(key) is None else raw[key]
    fits = {int: type(value) is int and 1 <= value < 2**31, bool: type(value) is bool,
            float: type(value) in (int, float) and 0 < value < math.inf}
    if not fits[kind]:
        found = "nothing" if value is None else repr(value)
        raise InputError(f"{key}: expected {EXPECTED[kind]}, found {found}")
    return kind(value)


def one_of(supported, what, value):
    """The value, a key of `supported`. Raises InputError for any other."""
    if not isinstance(value, str) or value not in supported:
        raise InputError(f"{what} {value!r} is not supported; supported: {', '.join(supported)}")
    return value


def read_config(path):
    """config.json of a folder -> GPTConfig. Raises InputError for a broken or unsupported one."""
    if not Path(path).is_dir():
        raise InputError(f"{path}: no such folder; expected a Hugging Face checkpoint folder")
    path = Path(path) / "config.json"
    raw = read_json(path)
    try:
        return parse_config(raw)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise InputError(f"{path}: a value has the wrong type ({error})") from None


def parse_config(raw):
    """The dict of a config.json -> GPTConfig. A sliding window ends the context: it does not affect
    texts up to its length, and longer ones are refused."""
    name = one_of(FAMILIES, "model_type", raw.get("model_type"))
    if quantised := raw.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise InputError(f"the checkpoint is quantised ({method or 'by an unknown method'}), which "
                         "is not supported; use the float16 or bfloat16 one")
    family = FAMILIES[name]
    key = family.keys.get
    defaults = dict(activation="silu", tied=False, n_inner=None) | family.defaults(raw)
    size = lambda field, default=None: value_of(raw, key(field), int, default)
    C = size("n_embd")
    n_head = size("n_head")
    if n_head > C:
        raise InputError(f"{n_head} attention heads do not fit a hidden size of {C}")
    activation = raw.get(key("activation")) or defaults["activation"]
    config = GPTConfig(**dict(block_size=0) | dict(
        family=name, n_embd=C, n_head=n_head, vocab_size=size("vocab_size"),
        n_layer=size("n_layer"), n_inner=size("n_inner", defaults["n_inner"]),
        n_kv_head=size("n_kv_head", n_head), head_size=size("head_size", C // n_head),
        norm_eps=value_of(raw, key("norm_eps"), float),
        activation=ACTIVATIONS[one_of(ACTIVATIONS, key("activation"), activation)],
        tied=value_of(raw, key("tied"), bool, defaults["tied"])) | family.flags(raw))
    if not config.block_size:
        config.block_size = value_of(raw, key("block_size", "max_position_embeddings"), int)
    n_kv_head, D = config.n_kv_head, config.head_size
    if n_head % n_kv_head or D % 2 or not 16 <= D <= 256:
        raise InputError("the number of heads must be a multiple of that of key/value heads, and "
                         f"the head size even, from 16 to 256; found {n_head}, {n_kv_head}, {D}")
    if config.tied and config.unit_head:
        raise InputError("tie_word_embeddings is not supported with Baichuan 2's LM head, whose "
                         "rows are normalised")
    if config.positions == "rope":
        config.rope_theta, config.rope_scaling, config.block_size = read_rope(
            raw, config.block_size, D)
    window = dict(sliding_window=family.window(raw))
    config.block_size = min(config.block_size,
                            value_of(window, "sliding_window", int, config.block_size))
    return config


def read_rope(raw, context, head_size):
    """(theta, GPTConfig.rope_scaling, longest sequence) of a config.json.

    transformers 5 writes `rope_parameters`; older versions `rope_scaling` and `rope_theta`."""
    settings = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    kind = settings.get("rope_type", settings.get("type")) or "default"
    kind = "longrope" if kind == "su" else kind  # Phi-3's first name for it
    one_of(ROPE_KINDS, "rope type", kind)
    number = lambda key, default=None: value_of(settings, key, float, default)
    partial_rotary = value_of(raw, "partial_rotary_factor", float, 1.0)
    if number("partial_rotary_factor", partial_rotary) != 1:
        raise InputError("a partial_rotary_factor other than 1 is not supported; use another model")
    theta = number("rope_theta", value_of(raw, "rope_theta", float, 10000.0))
    # dynamic changes theta beyond the context only, and texts end there
    if kind in ("default", "dynamic"):
        return theta, None, context
    if kind == "linear":
        return theta, dict(rope_type=kind, factor=number("factor")), context
    original = value_of(raw, "original_max_position_embeddings", int,
                        settings.get("original_max_position_embeddings") or context)
    scaling = dict(rope_type=kind, original_max_position_embeddings=original)
    if kind == "llama3":
        scaling |= {key: number(key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
        if scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
            raise InputError("low_freq_factor must be below high_freq_factor")
        return theta, scaling, context
    factor = number("factor", context / original)
    if kind == "yarn":
        if theta == 1:
            raise InputError("rope_theta must be above 1 for yarn, found 1")
        magnitude = lambda scale: 0.1 * scale * math.log(max(factor, 1.0)) + 1
        scales = settings.get("mscale"), settings.get("mscale_all_dim")
        default = magnitude(scales[0]) / magnitude(scales[1]) if all(scales) else magnitude(1)
        scaling |= dict(factor=factor, beta_fast=number("beta_fast", 32.0),
                        beta_slow=number("beta_slow", 1.0),
                        truncate=bool(settings.get("truncate", True)))
        context = max(context, int(factor * original))
    else:
        for key in ("short_factor", "long_factor"):
            values = settings.get(key)
            if not isinstance(values, list) or len(values) != head_size // 2:
                raise InputError(f"{key}: expected a list of {head_size // 2} numbers, half of the "
                                 f"head size, found {values!r}")
            scaling[key] = [value_of({key: value}, key, float) for value in values]
        default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        # texts end where the long factors would begin to apply, to all keys of a text
        context = min(context, original)
    return theta, scaling | dict(attention_factor=number("attention_factor", default)), context


def hf_config(config, dtype):
    """GPTConfig -> the dict of a config.json, with the rope settings in both spellings."""
    family = FAMILIES[config.family]
    raw = dict(architectures=[family.architecture], model_type=config.family,
               torch_dtype=str(dtype).removeprefix("torch."))
    raw |= {theirs: getattr(config, ours) for ours, theirs in family.keys.items()}
    raw[family.keys["activation"]] = {"silu": "silu", "gelu": "gelu_new"}[config.activation]
    if config.positions == "rope":
        scaling = config.rope_scaling or dict(rope_type="default")
        theta = dict(rope_theta=config.rope_theta)
        raw |= theta | dict(rope_parameters=scaling | theta)
        raw |= dict(rope_scaling=scaling) if config.rope_scaling else {}
    return raw | family.written(config)


# --------------------------------------------------------------------------------------------------
# Names: one of our parameters may be stacked from several tensors of the checkpoint, its parts

def stored_parts(name, rows, config):
    """The parts of a parameter of that many rows: [(name without prefix, first row, rows)]."""
    stem, _, kind = name.rpartition(".")
    number = re.search(r"\d+|$", stem).group()
    keys = [f"{key}.{kind}".replace(".N.", f".{number}.")
            for key in FAMILIES[config.family].names[re.sub(r"\d+", "N", stem)]]
    sizes = [rows // len(keys)] * len(keys)
    if len(keys) == 3:
        heads = (config.n_head, config.n_kv_head, config.n_kv_head)
        sizes = [n * config.head_size for n in heads]
    return list(zip(keys, itertools.accumulate(sizes, initial=0), sizes))


def is_transposed(name, config):
    """Whether the checkpoint stores a parameter as [inputs, outputs]."""
    return name.endswith(FAMILIES[config.family].transposed)


def split_weight(name, value, config):
    """A parameter as the checkpoint stores it: {tensor name: tensor}."""
    prefix = "" if name == "head.weight" else FAMILIES[config.family].prefix
    tensors = {}
    for key, start, size in stored_parts(name, value.shape[0], config):
        part = value[start:start + size]
        part = part.T if is_transposed(name, config) else part
        tensors[prefix + key] = part.contiguous()
    return tensors


# --------------------------------------------------------------------------------------------------
# Files

class StoredTensor(NamedTuple):
    """A tensor as the file's header describes it."""
    shape: tuple
    dtype: torch.dtype | str  # a str for a type of safetensors' that is not in DTYPES
    load: Callable            # () -> its values, mapped into memory where possible


QUANTISED = {  # the last part of a tensor's name -> what it says about quantisation
    "qweight": "GPTQ or AWQ", "qzeros": "GPTQ or AWQ", "scales": "GPTQ or AWQ", "g_idx": "GPTQ",
    "SCB": "bitsandbytes", "absmax": "bitsandbytes", "weight_format": "bitsandbytes",
    "weight_scale": "fp8 or int8", "weight_scale_inv": "fp8", "input_scale": "fp8"}
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
        return {name: StoredTensor(tuple(part.get_shape()),
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
    return {name: StoredTensor(tuple(value.shape), value.dtype, lambda value=value: value)
            for name, value in state.items()}


# --------------------------------------------------------------------------------------------------
# From files to parameters

def check_headers(path, config):
    """The shapes of all parameters, {name: shape}. Raises InputError if the headers of the folder's
    files have a tensor that is missing, unknown, quantised or of another shape.

    Builds nothing per layer before the headers show that many."""
    count = sum(len(open_weights(file)) for file in weight_files(path))
    if config.n_layer > count:
        raise InputError(f"{path}: config.json says {config.n_layer} layers, but the files hold "
                         f"only {count} tensors; fetch the checkpoint again")
    try:
        with torch.device("meta"):  # a single layer, without memory, whose names are repeated
            parameters = GPT(replace(config, n_layer=1)).named_parameters()
    except (RuntimeError, TypeError) as error:  # sizes whose product does not fit an int64
        reason = str(error).splitlines()[0]
        raise InputError(f"{path}: config.json has sizes that no tensor can have ({reason}); fetch "
                         "it again") from None
    shapes = {}
    for name, parameter in parameters:
        layers = range(config.n_layer) if name.startswith("blocks.0.") else [0]
        shape = tuple(parameter.shape)
        shapes |= {name.replace("blocks.0.", f"blocks.{i}."): shape for i in layers}
    for _ in match_tensors(path, config, shapes):
        pass
    return shapes


def match_tensors(path, config, shapes):
    """Yields (file, stored tensor, parameter's name, first row, rows that it fills) for every
    tensor of a folder, file by file. Raises InputError as check_headers does."""
    family = FAMILIES[config.family]
    parts = {key: (name, start, size) for name, shape in shapes.items()
             for key, start, size in stored_parts(name, shape[0], config)}
    missing = dict(parts)
    embedding = f"{family.names['embed'][0]}.weight"
    for file in weight_files(path):
        for key, tensor in open_weights(file).items():
            part = key.removeprefix(family.prefix)  # which only some folders have
            tied_head = config.tied and part == "lm_head.weight"
            if key.endswith(IGNORED) or tied_head and embedding not in missing:
                continue
            part = embedding if tied_head else part  # some folders keep one name, some both
            if part not in parts:
                kind = QUANTISED.get(key.rpartition(".")[2])
                hint = f"; it looks quantised ({kind}), which is not supported" if kind else ""
                raise InputError(f"{file}: expected the tensors of its config.json, found {key} "
                                 f"too{hint}")
            name, start, size = parts[part]
            expected = (size, *shapes[name][1:])[::-1 if is_transposed(name, config) else 1]
            if tensor.dtype not in DTYPES.values():
                raise InputError(f"{file}: {key} is quantised ({tensor.dtype}), which is not "
                                 "supported; use the float16 or bfloat16 checkpoint")
            if tensor.shape != expected:
                raise InputError(f"{file}: {key} should have shape {expected} by config.json, but "
                                 f"has {tensor.shape}")
            missing.pop(part, None)
            yield file, tensor, name, start, size
    if missing:
        part, (name, *_) = next(iter(missing.items()))
        raise InputError(f"{path}: the checkpoint lacks what {name} is made of ({part}); it does "
                         "not fit its config.json")


def load(path, dtype=None, device=None, group=None):
    """Reads a folder of one of FAMILIES, straight to the device -> GPT, frozen.

    dtype: torch dtype, default `backends.cpu.default_dtype`; device: default CUDA where there is a
    GPU. group: the ranks that hold it together, a `backends.tensor_parallel.Group`: only this
    rank's part is read. Raises InputError if the checkpoint is invalid, or the device has no room
    for it."""
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    config = read_config(path)
    shapes = check_headers(path, config)
    tensors = (tensor for _, tensor, *_ in match_tensors(path, config, shapes))
    largest = max(tensors, key=lambda tensor: math.prod(tensor.shape))
    dtype = dtype or default_dtype(device, largest.dtype)
    slices = {name: group.shard_slices(name, config) if group else None for name in shapes}
    held = {name: shard_shape(shape, slices[name]) for name, shape in shapes.items()}
    size = dtype.itemsize * sum(map(math.prod, held.values()))
    advice = "take a smaller model" + (" or --dtype bfloat16" if dtype == torch.float32 else "")
    check_memory(f"{path}: its weights take", size, free_memory(device), device, advice)
    with torch.device("meta"):
        model = GPT(config)
        if group:
            group.divide(model)
    state, model.hash = read_state(path, config, shapes, dtype, device, slices)
    if config.tied:
        state["head.weight"] = state["embed.weight"]
    model.load_state_dict(state, assign=True)
    model.requires_grad_(False)
    model.tie_and_place()
    if group:
        group.connect(model)
    return model.eval()


def read_state(path, config, shapes, dtype, device, slices):
    """Reads a folder's weights -> (state {name: tensor of `dtype` on `device`}, hash of the model).

    shapes: {name: shape} of all parameters. slices: {name: what to read of it}, as
    `Group.shard_slices` gives it. The hash is of the values in the files, before any cast. Takes
    the memory of the state and of about one tensor."""
    state, samples = {}, {}
    for tensor, name, start, size in show_files(path, match_tensors(path, config, shapes)):
        shape = shapes[name]
        if name not in state:
            state[name] = torch.empty(shard_shape(shape, slices[name]), dtype=dtype, device=device)
        value = tensor.load()
        value = value.T if is_transposed(name, config) else value
        copy_shard(state[name], value, start, slices[name])
        # of the whole parameter, `state_hash` samples one value in every stride
        stride = max(1, math.prod(shape) // 64)
        first = -start * math.prod(shape[1:]) % stride
        samples.setdefault(name, {})[start] = value.flatten()[first::stride].clone()
    if config.unit_head:
        for rows in state["head.weight"].split(4096):  # in float32, a few at a time
            rows.copy_(F.normalize(rows.float(), dim=-1))
    if config.tied:
        samples["head.weight"] = samples["embed.weight"]
        shapes = shapes | {"head.weight": shapes["embed.weight"]}
    joined = {name: (shapes[name], torch.cat([values for _, values in sorted(parts.items())]))
              for name, parts in samples.items()}
    return state, samples_hash(joined)


def show_files(path, matches):
    """Yields the matches, without their files, of which it prints those of a large checkpoint."""
    files = weight_files(path)
    total = sum(file.stat().st_size for file in files)
    for file, group in itertools.groupby(matches, itemgetter(0)):
        if total >= LARGE:
            print(f"reading {file.name} ({files.index(file) + 1} of {len(files)}, "
                  f"{total / 1e9:.1f} GB in all)", file=sys.stderr)
        for _, *match in group:
            yield match


def shard_shape(shape, slices):
    """The shape of what a rank holds of a parameter. slices: as `Group.shard_slices` gives them."""
    if slices is None:
        return shape
    dim, parts = slices
    return *shape[:dim], sum(part.stop - part.start for part in parts), *shape[dim + 1:]


def copy_shard(target, value, start, slices):
    """Copies what a rank holds of a stored tensor, which fills a parameter's rows from `start`."""
    end = start + len(value)
    dim, parts = slices or (0, [slice(0, len(target))])
    if dim == 1:
        target[start:end].copy_(value[:, parts[0]])
        return
    for part, rows in zip(parts, target.split([part.stop - part.start for part in parts])):
        first, last = max(part.start, start), min(part.stop, end)
        if first < last:
            rows[first - part.start:last - part.start].copy_(value[first - start:last - start])


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
    for name, value in model.state_dict().items():
        if not (name == "head.weight" and model.config.tied):
            tensors.update(split_weight(name, value.detach().to("cpu", dtype), model.config))
    write = partial(save_file, tensors, metadata={"format": "pt"})
    atomic_write(path / "model.safetensors", write)
    text = json.dumps(raw, indent=2) + "\n"
    atomic_write(path / "config.json", lambda tmp: Path(tmp).write_text(text))


def describe(path):
    """What a checkpoint folder holds, in lines of text. Reads headers only. Raises InputError as
    check_headers does."""
    c, files = read_config(path), weight_files(path)
    count = sum(map(math.prod, check_headers(path, c).values()))
    per_token = 2 * c.n_layer * c.n_kv_head * c.head_size / 1024
    scaling = f", {c.rope_scaling['rope_type']}" if c.rope_scaling else ""
    shards = f"{len(files)} files" if len(files) > 1 else files[0].name
    gb = lambda size: f"{size / 1e9:.2f} GB"
    return f"""\
family        {c.family} ({FAMILIES[c.family].architecture})
layers        {c.n_layer}, hidden size {c.n_embd}, MLP {c.n_inner}{" gated" if c.gated else ""}
heads         {c.n_head}, key/value heads {c.n_kv_head}, head size {c.head_size}
vocabulary    {c.vocab_size}, LM head {"tied to the embeddings" if c.tied else "of its own"}
context       {c.block_size} tokens, positions by {c.positions}{scaling}
parameters    {count / 1e6:.1f} million: {gb(4 * count)} in float32, {gb(2 * count)} in bfloat16
weights       {shards}, {gb(sum(file.stat().st_size for file in files))}
KV cache      {per_token * 4:.1f} KiB per token in float32, {per_token * 2:.1f} KiB in bfloat16"""
