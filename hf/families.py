"""Families of models: what a folder's config.json means, and what its tensors are called.

A further family is a further entry of FAMILIES.
"""

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import torch

from hf.quantization import read_scheme
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
GLM_NAMES = LLAMA_NAMES | {"blocks.N.mlp.up": ("layers.N.mlp.gate_up_proj",)}
GLM4_NAMES = GLM_NAMES | {
    "blocks.N.attn_post_norm": ("layers.N.post_self_attn_layernorm",),
    "blocks.N.mlp_post_norm": ("layers.N.post_mlp_layernorm",)}
OLMO_NAMES = LLAMA_NAMES | {
    "blocks.N.attn_post_norm": ("layers.N.post_attention_layernorm",),
    "blocks.N.mlp_post_norm": ("layers.N.post_feedforward_layernorm",)}
GEMMA_NAMES = OLMO_NAMES | {"blocks.N.mlp_norm": ("layers.N.pre_feedforward_layernorm",)}
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
GEMMA_KEYS = LLAMA_KEYS | dict(activation="hidden_activation")
GPT2_KEYS = dict(
    vocab_size="vocab_size", block_size="n_positions", n_layer="n_layer", n_head="n_head",
    n_embd="n_embd", n_inner="n_inner", norm_eps="layer_norm_epsilon",
    activation="activation_function", tied="tie_word_embeddings")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu"}
KINDS = {field.name: field.type for field in fields(GPTConfig)}
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
LAYER_KINDS = ("full_attention", "sliding_attention")
MAX_LAYERS = 10**5  # of a list by layer
REFUSED = {  # beginnings of model_type and keys of config.json -> what it has; what to take instead
    "gpt_oss": ("attention sinks", "Qwen 3"),
    "gemma2 attn_logit_softcapping": ("soft-capped scores", "Gemma 3"),
    "final_logit_softcapping": ("soft-capped logits", "Gemma 3"),
    "use_bidirectional_attention": ("attention to later tokens", "Gemma 3"),
    "gemma3n gemma4": ("embeddings by layer", "Gemma 3"),
    "kv_lora_rank": ("latent attention (MLA)", "Qwen 3 or Llama 3"),
    "qwen3_next qwen3_5": ("recurrent layers", "Qwen 3"),
    "num_experts num_local_experts n_routed_experts": (
        "a mixture of experts", "a dense model, such as Qwen 3 8B"),
}


class Family(NamedTuple):
    """How the folders of one model_type are written."""
    architecture: str
    names: dict = LLAMA_NAMES
    keys: dict = LLAMA_KEYS
    flags: Callable = lambda raw: {}       # config.json -> what no key of `keys` gives of GPTConfig
    written: Callable = lambda config: {}  # the inverse of flags
    transposed: tuple = ()                 # ends of names of ours, stored as [inputs, outputs]
    window: Callable | None = None         # config.json -> how many tokens a layer sees; None: all
    windowed: Callable | None = None       # (config.json, L) -> which layers have it, by default
    prefix: str = "model."                 # of all tensors but the LM head's
    defaults: Callable = lambda raw: {}    # config.json -> what a missing key of `keys` means
    theta: float = 10000.0                 # by default
    window_theta: Callable | None = None   # (config.json, theta) -> that of windows, by default
    rotary: float | None = None            # partial_rotary_factor by default; None: always 1
    neighbours: bool = False               # dimensions that are rotated as a pair are neighbours
    norm_offset: float = 0.0               # what is added to the norms' weights


def read_biases(raw):
    """One key is for the biases of all four projections of attention."""
    bias = value_of(raw, "attention_bias", bool, False)
    return dict(qkv_bias=bias, proj_bias=bias)


def read_llama(raw):
    return read_biases(raw) | dict(mlp_bias=value_of(raw, "mlp_bias", bool, False))


def qwen_window(raw):
    """Qwen always names a window; a second key says whether it is used."""
    used = value_of(raw, "use_sliding_window", bool, False)
    return raw.get("sliding_window", 4096) if used else None


def qwen_windowed(raw, n_layer):
    return [i >= raw.get("max_window_layers", 28) for i in range(n_layer)]


def unrotated_layers(raw, n_layer):
    """Whether each layer of SmolLM3 is without a rotation."""
    given = by_layer(raw, "no_rope_layers", (0, 1), n_layer)
    every = value_of(raw, "no_rope_layer_interval", int, 4)
    return [not x for x in given or ((i + 1) % every for i in range(n_layer))]


def read_smollm3(raw):
    unrotated = unrotated_layers(raw, value_of(raw, "num_hidden_layers", int))
    return read_llama(raw) | dict(unrotated=tuple(i for i, x in enumerate(unrotated) if x))


def write_smollm3(config):
    return dict(no_rope_layers=[int(i not in config.unrotated) for i in range(config.n_layer)])


def read_olmo(raw):
    return read_biases(raw) | dict(qk_norm="all", norm_at="after")


def read_gemma3(raw):
    scalar = value_of(raw, "query_pre_attn_scalar", float, 256.0)
    return read_biases(raw) | dict(qk_norm="head", norm_at="both", attn_scale=scalar ** -0.5,
                                   embed_scale=value_of(raw, "hidden_size", int) ** 0.5)


def gemma3_defaults(raw):
    """Folders of the larger models leave most keys out."""
    return dict(n_head=8, n_kv_head=4, head_size=256, vocab_size=262208, block_size=131072,
                norm_eps=1e-6, activation="gelu_pytorch_tanh", tied=True)


def gemma3_windowed(raw, n_layer):
    every = value_of(raw, "sliding_window_pattern", int, 6)
    return [(i + 1) % every > 0 for i in range(n_layer)]


def read_glm(raw):
    return dict(qkv_bias=value_of(raw, "attention_bias", bool, True))


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
    "llama": Family("LlamaForCausalLM", flags=read_llama),
    "mistral": Family("MistralForCausalLM", window=lambda raw: raw.get("sliding_window", 4096)),
    "qwen2": Family(
        "Qwen2ForCausalLM", flags=lambda raw: dict(qkv_bias=True), window=qwen_window,
        windowed=qwen_windowed),
    "qwen3": Family(
        "Qwen3ForCausalLM", flags=lambda raw: read_biases(raw) | dict(qk_norm="head"),
        window=qwen_window, windowed=qwen_windowed),
    "phi3": Family(
        "Phi3ForCausalLM", PHI3_NAMES, window=lambda raw: raw.get("sliding_window"), rotary=1.0,
        written=lambda c: dict(original_max_position_embeddings=c.block_size)),
    "smollm3": Family(
        "SmolLM3ForCausalLM", flags=read_smollm3, window=qwen_window, windowed=unrotated_layers,
        written=write_smollm3, theta=2e6, defaults=lambda raw: dict(tied=True)),
    "olmo2": Family("Olmo2ForCausalLM", OLMO_NAMES, flags=read_olmo),
    "olmo3": Family(
        "Olmo3ForCausalLM", OLMO_NAMES, flags=read_olmo,
        window=lambda raw: value_of(raw, "sliding_window", int, 4096),
        windowed=lambda raw, n_layer: [(i + 1) % 4 > 0 for i in range(n_layer)],
        theta=500000.0, window_theta=lambda raw, theta: theta),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", GEMMA_NAMES, GEMMA_KEYS, read_gemma3,
        lambda c: dict(query_pre_attn_scalar=round(c.attn_scale ** -2)),
        window=lambda raw: value_of(raw, "sliding_window", int, 4096),
        windowed=gemma3_windowed, defaults=gemma3_defaults, norm_offset=1.0, theta=1e6,
        window_theta=lambda raw, theta: value_of(raw, "rope_local_base_freq", float, 1e4)),
    "glm": Family("GlmForCausalLM", GLM_NAMES, flags=read_glm, rotary=0.5, neighbours=True),
    "glm4": Family(
        "Glm4ForCausalLM", GLM4_NAMES, flags=lambda raw: read_glm(raw) | dict(norm_at="both"),
        rotary=0.5, neighbours=True),
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
        return parse_config(text_config(raw))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise InputError(f"{path}: a value has the wrong type ({error})") from None


def text_config(raw):
    """The dict of a config.json, of the text model alone in one that reads pictures too."""
    if not isinstance(raw.get("text_config"), dict):
        return raw
    return dict(quantization_config=raw.get("quantization_config")) | raw["text_config"]


def parse_config(raw):
    """The dict of a config.json -> GPTConfig."""
    for words, (what, instead) in REFUSED.items():
        for word in words.split():
            if str(raw.get("model_type")).startswith(word) or raw.get(word):
                raise InputError(f"{what} ({word}) is not supported; take {instead}")
    name = one_of(FAMILIES, "model_type", raw.get("model_type"))
    family = FAMILIES[name]
    if read_scheme(raw.get("quantization_config")) and family.transposed:
        raise InputError(f"a quantised checkpoint of {name} is not supported; take the plain one")
    keys = family.keys
    defaults = family.defaults(raw)
    C = value_of(raw, keys["n_embd"], int)
    n_head = value_of(raw, keys["n_head"], int, defaults.get("n_head"))
    if n_head > C:
        raise InputError(f"{n_head} attention heads do not fit a hidden size of {C}")
    found = dict(n_kv_head=n_head, head_size=C // n_head, activation="silu", tied=False) | defaults
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
    config.windows = read_windows(raw, family, config.n_layer)
    if config.positions == "rope":
        config = replace(config, **read_rope(raw, family, config))
    return config


def by_layer(raw, key, values, n_layer):
    """A list of config.json, None if it is missing. Raises InputError unless it has one of these
    values for each layer."""
    check("num_hidden_layers", n_layer, 1, MAX_LAYERS, whole=True)
    given = raw.get(key)
    if given is not None and not (isinstance(given, list) and len(given) == n_layer
                                  and all(x in values for x in given)):
        raise InputError(f"{key} must be a list of {n_layer}, one for each layer, of "
                         f"{' or '.join(map(str, values))}; found {str(given)[:100]}")
    return given


def read_windows(raw, family, n_layer):
    """GPTConfig.windows of a config.json."""
    window = family.window(raw) if family.window else None
    if window is None:
        return ()
    window = value_of(dict(sliding_window=window), "sliding_window", int)
    given = by_layer(raw, "layer_types", LAYER_KINDS, n_layer)
    if family.windowed is None:  # whatever layer_types says
        return (window,) * n_layer
    windowed = [kind == LAYER_KINDS[1] for kind in given or ()] or family.windowed(raw, n_layer)
    return tuple(window * has for has in windowed) if any(windowed) else ()


def read_rope(raw, family, config):
    """What a config.json says of the rotation, and where texts end by it: fields of GPTConfig.

    transformers 5 writes `rope_parameters`; older versions `rope_scaling` and `rope_theta`. Both
    may be for layers without a window alone."""
    settings = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    of_windows = settings.get("sliding_attention") or {}
    settings = settings.get("full_attention", settings)
    number = lambda key, default=None: value_of(settings, key, float, default)
    D = config.head_size
    part = value_of(raw, "partial_rotary_factor", float, family.rotary or 1.0)
    part = number("partial_rotary_factor", part)
    R = int(D * part)
    if R % 2 or not 0 < R <= D or (R < D and family.rotary is None):
        raise InputError(f"partial_rotary_factor {part} is not supported with {config.family} and "
                         f"a head size of {D}; Phi-4-mini and GLM-4 have parts that are")
    theta = number("rope_theta", value_of(raw, "rope_theta", float, family.theta))
    scaling, context = read_scaling(raw, settings, theta, config.block_size, R)
    found = dict(rope_theta=theta, rope_scaling=scaling, block_size=context)
    if R < D:
        found["rotary_size"] = R
    if config.windows and family.window_theta:
        one_of(("default",), "rope type of layers with a window",
               of_windows.get("rope_type", "default"))
        own = value_of(of_windows, "rope_theta", float, family.window_theta(raw, theta))
        if own != theta or scaling:
            found["window_theta"] = own
    return found


def read_scaling(raw, settings, theta, context, rotary_size):
    """(GPTConfig.rope_scaling, longest sequence) of a config.json's settings of the rotation."""
    kind = settings.get("rope_type", settings.get("type")) or "default"
    kind = "longrope" if kind == "su" else kind  # Phi-3's first name for it
    one_of(ROPE_KINDS, "rope type", kind)
    number = lambda key, default=None: value_of(settings, key, float, default)
    # dynamic changes theta beyond the context only, and texts end there
    if kind in ("default", "dynamic"):
        return None, context
    if kind == "linear":
        return dict(rope_type=kind, factor=number("factor")), context
    original = value_of(raw, "original_max_position_embeddings", int,
                        settings.get("original_max_position_embeddings") or context)
    scaling = dict(rope_type=kind, original_max_position_embeddings=original)
    if kind == "llama3":
        scaling |= {key: number(key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
        if scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
            raise InputError("low_freq_factor must be below high_freq_factor")
        return scaling, context
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
            if not isinstance(values, list) or len(values) != rotary_size // 2:
                raise InputError(f"{key}: expected a list of {rotary_size // 2} numbers, half of "
                                 f"what is rotated of a head, found {values!r}")
            scaling[key] = [value_of({key: value}, key, float) for value in values]
        default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        # texts end where the long factors would begin to apply, to all keys of a text
        context = min(context, original)
    return scaling | dict(attention_factor=number("attention_factor", default)), context


def hf_config(config, dtype):
    """GPTConfig -> the dict of a config.json, with the rope settings in both spellings."""
    family = FAMILIES[config.family]
    raw = dict(architectures=[family.architecture], model_type=config.family,
               torch_dtype=str(dtype).removeprefix("torch."), attention_bias=config.qkv_bias,
               mlp_bias=config.mlp_bias, pad_token_id=None)
    raw |= {theirs: getattr(config, ours) for ours, theirs in family.keys.items()}
    raw[family.keys["activation"]] = {"silu": "silu", "gelu": "gelu_new"}[config.activation]
    if config.positions == "rope":
        settings = dict(rope_theta=config.rope_theta)
        if family.rotary:
            D = config.head_size
            settings["partial_rotary_factor"] = (config.rotary_size or D) / D
        raw |= settings | dict(rope_scaling=config.rope_scaling)
        settings |= config.rope_scaling or dict(rope_type="default")
        if family.window_theta:
            own = dict(rope_type="default", rope_theta=config.window_theta or config.rope_theta)
            settings = dict(full_attention=settings, sliding_attention=own)
        raw["rope_parameters"] = settings
    if family.window:
        raw |= dict(sliding_window=max(config.windows, default=None),
                    use_sliding_window=bool(config.windows))
    if family.windowed:
        windows = config.windows or (0,) * config.n_layer
        raw["layer_types"] = [LAYER_KINDS[window > 0] for window in windows]
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


def stored_rows(name, config):
    """Where the checkpoint stores each row of a parameter, int64; None where all are in place. Of a
    head's dimensions `rope_table` wants the firsts of all rotated pairs, half of the others, the
    seconds of all pairs, the rest."""
    D = config.head_size
    R = config.rotary_size or D
    neighbours = FAMILIES[config.family].neighbours
    if ".attn.qkv." not in name or (R == D and not neighbours):
        return None
    pairs = torch.arange(R).view(-1, 2).T if neighbours else torch.arange(R).view(2, -1)
    order = torch.cat((pairs, torch.arange(R, D).view(2, -1)), dim=1).flatten()  # (D,)
    rows = torch.arange((config.n_head + 2 * config.n_kv_head) * D).view(-1, D)
    rows[:-config.n_kv_head] = rows[:-config.n_kv_head, order]  # not of values
    return rows.flatten()


def from_stored(name, value, start, config):
    """A stored tensor -> the rows of our parameter from `start` on."""
    value = value.T if is_transposed(name, config) else value
    offset = FAMILIES[config.family].norm_offset
    if offset and name.endswith("norm.weight"):
        value = value.float() + offset
    rows = stored_rows(name, config)
    return value if rows is None else value[rows[start:start + len(value)] - start]


def split_weight(name, value, config):
    """A parameter as the checkpoint stores it: {tensor name: tensor}."""
    prefix = "" if name == "head.weight" else FAMILIES[config.family].prefix
    offset = FAMILIES[config.family].norm_offset
    if offset and name.endswith("norm.weight"):
        value = (value.float() - offset).to(value.dtype)
    rows = stored_rows(name, config)
    value = value if rows is None else value[rows.argsort()]
    tensors = {}
    for key, start, size in stored_parts(name, value.shape[0], config):
        part = value[start:start + size]
        part = part.T if is_transposed(name, config) else part
        tensors[prefix + key] = part.contiguous()
    return tensors
