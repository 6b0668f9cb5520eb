"""Families of models: what a folder's config.json means, and what its tensors are called.

A further family is a further entry of FAMILIES.
"""

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from model import GPTConfig, InputError, check, read_json

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
KINDS = {field.name: field.type for field in fields(GPTConfig)}
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
    alibi = "max_position_embeddings" not in raw or raw.get("hidden_size") == 5120
    length = "model_max_length" if alibi else "max_position_embeddings"
    return dict(unit_head="z_loss_weight" in raw or raw.get("vocab_size") == 125696,
                positions="alibi" if alibi else "rope", block_size=value_of(raw, length, int))


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

def value_of(raw, key, kind, default=None):
    """raw[key], or the default: a bool, a str, or an int or float above 0. Raises InputError for
    any other value, or for none."""
    value = default if raw.get(key) is None else raw[key]
    if kind is bool and not isinstance(value, bool):
        raise InputError(f"{key} must be true or false, not {value!r}")
    if kind in (int, float):
        check(key, value, 0, 2**31 - 1 if kind is int else 1e30, whole=kind is int, above=True)
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
    keys = family.keys
    C = value_of(raw, keys["n_embd"], int)
    n_head = value_of(raw, keys["n_head"], int)
    if n_head > C:
        raise InputError(f"{n_head} attention heads do not fit a hidden size of {C}")
    found = dict(n_kv_head=n_head, head_size=C // n_head, activation="silu", tied=False)
    found |= family.defaults(raw)
    for ours, theirs in keys.items():
        found[ours] = value_of(raw, theirs, KINDS[ours], found.get(ours))
    one_of(ACTIVATIONS, keys["activation"], found["activation"])
    found["activation"] = ACTIVATIONS[found["activation"]]
    config = GPTConfig(family=name, **found | family.flags(raw))
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
        theta = dict(rope_theta=config.rope_theta)
        scaling = config.rope_scaling or dict(rope_type="default")
        raw |= theta | dict(rope_scaling=config.rope_scaling, rope_parameters=theta | scaling)
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
