"""FAMILIES: for each model family, the keys of config.json and the names of the tensors."""

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import fields, replace
from typing import NamedTuple

import torch

from model import GPTConfig, check, expect, one_of

# Our parameter names -> the checkpoint's tensor names, without the family's prefix and without
# .weight or .bias. N is the layer number. Several tensors are stacked into one, in this order.
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
GLM_NAMES = LLAMA_NAMES | {"blocks.N.mlp.up": ("layers.N.mlp.gate_up_proj",)}
PHI3_NAMES = GLM_NAMES | {"blocks.N.attn.qkv": ("layers.N.self_attn.qkv_proj",)}
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
# Fields of GPTConfig -> keys of config.json.
BAICHUAN_KEYS = dict(
    vocab_size="vocab_size", n_layer="num_hidden_layers", n_head="num_attention_heads",
    n_embd="hidden_size", n_inner="intermediate_size", norm_eps="rms_norm_eps",
    activation="hidden_act", tied="tie_word_embeddings")
LLAMA_KEYS = BAICHUAN_KEYS | dict(
    block_size="max_position_embeddings", n_kv_head="num_key_value_heads", head_size="head_dim")
GLM_KEYS = LLAMA_KEYS | dict(qkv_bias="attention_bias")
BIAS_KEYS = GLM_KEYS | dict(proj_bias="attention_bias")  # one key for all four projections
MLP_BIAS_KEYS = BIAS_KEYS | dict(mlp_bias="mlp_bias")
GEMMA_KEYS = BIAS_KEYS | dict(activation="hidden_activation")
GPT2_KEYS = dict(
    vocab_size="vocab_size", block_size="n_positions", n_layer="n_layer", n_head="n_head",
    n_embd="n_embd", norm_eps="layer_norm_epsilon", activation="activation_function",
    tied="tie_word_embeddings")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu"}
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
LAYER_TYPES = ("full_attention", "sliding_attention")
UNSUPPORTED = (  # keys of config.json that change attention or logits
    "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention",
    "scale_attn_by_inverse_layer_idx", "add_cross_attention")


class Family(NamedTuple):
    architecture: str
    names: dict = LLAMA_NAMES
    keys: dict = LLAMA_KEYS
    fixed: dict = {}                # GPTConfig fields that config.json has no key for
    defaults: dict = {}             # defaults of optional keys, by GPTConfig field
    read: Callable = lambda raw: {}      # config.json -> further GPTConfig fields
    write: Callable = lambda config: {}  # the inverse of read
    window: int | None = None       # default sliding window in tokens; 0: none; None: unsupported
    window_switch: bool = False     # windows are off unless use_sliding_window is true
    window_layers: Callable | None = None  # (config.json, L) -> [layer has a window]; None: all do
    window_theta: float | None = None  # default theta of windows, unscaled; 0: theta; None: shared
    prefix: str = "model."          # of all tensor names but the LM head's
    theta: float = 10000.0          # default rope_theta
    rotary: float | None = None     # default partial_rotary_factor; None: always 1
    neighbours: bool = False        # RoPE pairs dimensions 2i and 2i + 1 instead of two halves
    norm_offset: float = 0.0        # added to stored norm weights
    transposed: tuple = ()          # suffixes of our names that are stored as [inputs, outputs]


def unrotated_layers(raw, n_layer):
    """SmolLM3: [layer has no RoPE]. In no_rope_layers, 1 stands for a layer with RoPE."""
    rotated = by_layer(raw, "no_rope_layers", (0, 1), n_layer)
    period = value_of(raw, "no_rope_layer_interval", int, 4)
    return [not x for x in rotated or ((i + 1) % period for i in range(n_layer))]


def read_baichuan(raw):
    """The 13B models use ALiBi and store the context length as model_max_length. Baichuan 2, which
    has z_loss_weight or a vocabulary of 125,696, normalises the LM head's rows."""
    alibi = raw.get("max_position_embeddings") is None or raw.get("hidden_size") == 5120
    length = "model_max_length" if alibi else "max_position_embeddings"
    return dict(positions="alibi" if alibi else "rope", block_size=value_of(raw, length, int),
                unit_head=raw.get("z_loss_weight") is not None or raw.get("vocab_size") == 125696)


QWEN = dict(window=4096, window_switch=True, window_layers=lambda raw, L: [
    i >= raw.get("max_window_layers", 28) for i in range(L)])
OLMO = dict(names=OLMO_NAMES, keys=BIAS_KEYS, fixed=dict(qk_norm="all", norm_at="after"))
GLM = dict(keys=GLM_KEYS, defaults=dict(qkv_bias=True), rotary=0.5, neighbours=True)
FAMILIES = {  # by model_type
    "llama": Family("LlamaForCausalLM", keys=MLP_BIAS_KEYS),
    "mistral": Family("MistralForCausalLM", window=4096),
    "qwen2": Family("Qwen2ForCausalLM", fixed=dict(qkv_bias=True), **QWEN),
    "qwen3": Family("Qwen3ForCausalLM", keys=BIAS_KEYS, fixed=dict(qk_norm="head"), **QWEN),
    "phi3": Family(
        "Phi3ForCausalLM", PHI3_NAMES, rotary=1.0, window=0,
        write=lambda config: dict(original_max_position_embeddings=config.block_size)),
    "smollm3": Family(
        "SmolLM3ForCausalLM", keys=MLP_BIAS_KEYS, defaults=dict(tied=True), theta=2e6,
        window=4096, window_switch=True, window_layers=unrotated_layers,
        read=lambda raw: dict(unrotated=tuple(
            i for i, x in enumerate(unrotated_layers(raw, raw["num_hidden_layers"])) if x)),
        write=lambda config: dict(
            no_rope_layers=[int(i not in config.unrotated) for i in range(config.n_layer)])),
    "olmo2": Family("Olmo2ForCausalLM", **OLMO),
    "olmo3": Family(
        "Olmo3ForCausalLM", **OLMO, theta=500000.0, window=4096, window_theta=0,
        window_layers=lambda raw, L: [(i + 1) % 4 > 0 for i in range(L)]),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", GEMMA_NAMES, GEMMA_KEYS, fixed=dict(qk_norm="head", norm_at="both"),
        defaults=dict(n_head=8, n_kv_head=4, head_size=256, vocab_size=262208, block_size=131072,
                      norm_eps=1e-6, activation="gelu_pytorch_tanh", tied=True),
        norm_offset=1.0, theta=1e6, window=4096, window_theta=10000.0,
        window_layers=lambda raw, L: [
            (i + 1) % (raw.get("sliding_window_pattern") or 6) > 0 for i in range(L)],
        read=lambda raw: dict(
            attn_scale=value_of(raw, "query_pre_attn_scalar", float, 256.0) ** -0.5,
            embed_scale=raw["hidden_size"] ** 0.5),
        write=lambda config: dict(query_pre_attn_scalar=round(config.attn_scale ** -2))),
    "glm": Family("GlmForCausalLM", GLM_NAMES, **GLM),
    "glm4": Family("Glm4ForCausalLM", GLM4_NAMES, fixed=dict(norm_at="both"), **GLM),
    "baichuan": Family(
        "BaichuanForCausalLM", BAICHUAN_NAMES, BAICHUAN_KEYS, read=read_baichuan,
        write=lambda config: dict(
            model_max_length=config.block_size, z_loss_weight=0 if config.unit_head else None,
            max_position_embeddings=config.block_size if config.positions == "rope" else None)),
    "gpt2": Family(
        "GPT2LMHeadModel", GPT2_NAMES, GPT2_KEYS, prefix="transformer.",
        fixed=dict(norm="layer", positions="learned", gated=False, qkv_bias=True, proj_bias=True,
                   mlp_bias=True),
        defaults=dict(activation="gelu_new", tied=True),
        read=lambda raw: dict(n_inner=value_of(raw, "n_inner", int, 4 * raw["n_embd"])),
        write=lambda config: dict(n_inner=config.n_inner),
        transposed=("attn.qkv.weight", "attn.proj.weight", "mlp.up.weight", "mlp.down.weight")),
}


def value_of(raw, key, kind, default=None):
    """raw[key] as bool, str, or int or float above 0; the default if it is null or missing."""
    value = default if raw.get(key) is None else raw[key]
    expect(kind is not bool or isinstance(value, bool), f"{key} must be a bool, not {value!r}")
    if kind in (int, float):  # the bound on ints keeps products of two sizes within int64
        check(key, value, 0, 2**24 if kind is int else 1e30, whole=kind is int, above=True)
    return kind(value)


def by_layer(raw, key, values, n_layer):
    """raw[key]: None, or a list of n_layer elements, each one of the two values."""
    layers = raw.get(key)
    valid = isinstance(layers, list) and len(layers) == n_layer and {*layers} <= {*values}
    expect(layers is None or valid,
           f"{key} must be a list of {n_layer} elements, each {values[0]} or {values[1]}")
    return layers


def text_config(raw):
    """config.json itself, or the text model's part of a multimodal one."""
    if not isinstance(raw.get("text_config"), dict):
        return raw
    return dict(quantization_config=raw.get("quantization_config")) | raw["text_config"]


def parse_config(raw):
    """A config.json dict -> GPTConfig. `hf.files.read_config` turns its errors into InputErrors."""
    name = one_of("model_type", raw.get("model_type"), FAMILIES)
    for key in UNSUPPORTED:
        expect(not raw.get(key), f"{key} is not supported")
    family = FAMILIES[name]
    if raw.get("quantization_config"):
        from hf.quantization import read_scheme  # not at the top: it loads the CPU backend
        read_scheme(raw["quantization_config"])
        expect(not family.transposed, f"a quantised {name} checkpoint is not supported; use an "
               "unquantised one")
    one_of("scale_attn_weights", raw.get("scale_attn_weights", True), (True,))
    keys = family.keys
    n_head = value_of(raw, keys["n_head"], int, family.defaults.get("n_head"))
    head_size = value_of(raw, keys["n_embd"], int) // n_head
    types = {field.name: field.type for field in fields(GPTConfig)}
    values = {ours: False for ours in keys if types[ours] is bool}
    values |= dict(n_kv_head=n_head, head_size=head_size, activation="silu") | family.defaults
    for ours, key in keys.items():
        values[ours] = value_of(raw, key, types[ours], values.get(ours))
    activation = one_of(keys["activation"], values["activation"], ACTIVATIONS)
    values["activation"] = ACTIVATIONS[activation]
    config = GPTConfig(family=name, **values | family.fixed | family.read(raw))
    D = config.head_size
    expect(config.n_head % config.n_kv_head == 0 and D % 2 == 0 and 16 <= D <= 256, f"expected a "
           f"multiple of {config.n_kv_head} heads of even size, 16 to 256, got {n_head} of {D}")
    expect(not config.tied or not config.unit_head, "a tied LM head cannot be normalised")
    config.windows = read_windows(raw, family, config.n_layer)
    rope = read_rope(raw, family, config) if config.positions == "rope" else {}
    return replace(config, **rope)


def read_windows(raw, family, n_layer):
    """GPTConfig.windows: a size for each layer, 0 for none; () if no layer has a window."""
    used = not family.window_switch or value_of(raw, "use_sliding_window", bool, False)
    is_null = raw.get("sliding_window", family.window or None) is None
    if family.window is None or is_null or not used:
        return ()
    size = value_of(raw, "sliding_window", int, family.window)
    types = by_layer(raw, "layer_types", LAYER_TYPES, n_layer)
    if family.window_layers is None:
        return (size,) * n_layer
    has_window = [x == LAYER_TYPES[1] for x in types or ()] or family.window_layers(raw, n_layer)
    return tuple(size * x for x in has_window) if any(has_window) else ()


def read_rope(raw, family, config):
    """The RoPE fields of GPTConfig, from rope_parameters or the older rope_scaling, rope_theta."""
    settings = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    window_settings = settings.get("sliding_attention") or {}
    settings = settings.get("full_attention", settings)
    older = {key: raw.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    settings = older | {key: value for key, value in settings.items() if value is not None}
    theta = value_of(settings, "rope_theta", float, family.theta)
    part = value_of(settings, "partial_rotary_factor", float, family.rotary or 1.0)
    D = config.head_size
    R = int(D * part)
    expect(R % 2 == 0 and 0 < R <= D and (R == D or family.rotary), f"partial_rotary_factor {part} "
           f"is not supported with {config.family} and a head size of {D}")
    scaling, context = read_scaling(raw, settings, theta, config.block_size, R)
    values = dict(rope_theta=theta, rope_scaling=scaling, block_size=context,
                  rotary_size=R if R < D else None)
    if config.windows and family.window_theta is not None:
        one_of("rope type of windows", window_settings.get("rope_type", "default"), ("default",))
        own = value_of(raw, "rope_local_base_freq", float, family.window_theta or theta)
        own = value_of(window_settings, "rope_theta", float, own)
        values["window_theta"] = own if own != theta or scaling else None
    return values


def read_scaling(raw, settings, theta, context, rotary_size):
    """(config.json, its RoPE settings, ...) -> (GPTConfig.rope_scaling, GPTConfig.block_size)"""
    number = lambda key, default=None: value_of(settings, key, float, default)
    kind = settings.get("rope_type", settings.get("type")) or "default"
    kind = one_of("rope type", "longrope" if kind == "su" else kind, ROPE_TYPES)  # su: Phi-3
    if kind in ("default", "dynamic"):  # dynamic only changes theta beyond the context length
        return None, context
    if kind == "linear":
        return dict(rope_type=kind, factor=number("factor")), context
    original = value_of(raw, "original_max_position_embeddings", int,
                        settings.get("original_max_position_embeddings") or context)
    scaling = dict(rope_type=kind, original_max_position_embeddings=original)
    if kind == "llama3":
        scaling |= {key: number(key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
        return scaling, context
    factor = number("factor", context / original)
    if kind == "yarn":
        check("rope_theta", theta, 1, 1e30, above=True)
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
            expect(isinstance(values, list) and len(values) == rotary_size // 2,
                   f"{key} must be a list of {rotary_size // 2} numbers")
            scaling[key] = [value_of({key: value}, key, float) for value in values]
        default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        context = min(context, original)  # beyond it, cached keys would need another rotation
    return scaling | dict(attention_factor=number("attention_factor", default)), context


def hf_config(config, dtype):
    """Converts a GPTConfig to config.json, with RoPE settings for old and new transformers."""
    family = FAMILIES[config.family]
    raw = dict(architectures=[family.architecture], model_type=config.family,
               torch_dtype=str(dtype).removeprefix("torch."), attention_bias=config.qkv_bias,
               mlp_bias=config.mlp_bias, pad_token_id=None)
    raw |= {key: getattr(config, ours) for ours, key in family.keys.items()}
    raw[family.keys["activation"]] = {"silu": "silu", "gelu": "gelu_new"}[config.activation]
    if config.positions == "rope":
        part = (config.rotary_size or config.head_size) / config.head_size
        settings = dict(rope_theta=config.rope_theta)
        settings |= dict(partial_rotary_factor=part) if family.rotary else {}
        raw |= settings | dict(rope_scaling=config.rope_scaling)
        settings |= config.rope_scaling or dict(rope_type="default")
        if family.window_theta is not None:
            own = dict(rope_type="default", rope_theta=config.window_theta or config.rope_theta)
            settings = dict(full_attention=settings, sliding_attention=own)
        raw["rope_parameters"] = settings
    if family.window is not None:
        raw |= dict(sliding_window=max(config.windows, default=None),
                    use_sliding_window=bool(config.windows))
    if family.window_layers:
        raw["layer_types"] = [LAYER_TYPES[x > 0] for x in config.windows or [0] * config.n_layer]
    return raw | family.write(config)


def stored_parts(name, rows, config):
    """The tensors stacked into a parameter: [(name without prefix, first row, number of rows)]."""
    stem, _, kind = name.rpartition(".")
    number = re.search(r"\d+|$", stem).group()
    keys = [f"{key}.{kind}".replace(".N.", f".{number}.")
            for key in FAMILIES[config.family].names[re.sub(r"\d+", "N", stem)]]
    sizes = [rows // len(keys)] * len(keys)
    if len(keys) == 3:
        sizes = [n * config.head_size for n in (config.n_head, config.n_kv_head, config.n_kv_head)]
    return list(zip(keys, itertools.accumulate(sizes, initial=0), sizes))


def stored_rows(name, config):
    """The checkpoint's row for each row of a parameter; None: the same. `rope_table` needs in each
    head: first dimensions of the pairs, half of the unrotated ones, second dimensions, the rest."""
    D = config.head_size
    R = config.rotary_size or D
    neighbours = FAMILIES[config.family].neighbours
    if ".attn.qkv." not in name or (R == D and not neighbours):
        return None
    pairs = torch.arange(R).view(-1, 2).T if neighbours else torch.arange(R).view(2, -1)
    order = torch.cat((pairs, torch.arange(R, D).view(2, -1)), dim=1).flatten()  # (D,)
    rows = torch.arange((config.n_head + 2 * config.n_kv_head) * D).view(-1, D)
    rows[:-config.n_kv_head] = rows[:-config.n_kv_head, order]  # value heads are not rotated
    return rows.flatten()


def from_stored(name, value, start, config):
    """Converts a stored tensor to the rows of our parameter from `start` on."""
    family = FAMILIES[config.family]
    value = value.T if name.endswith(family.transposed) else value
    if family.norm_offset and name.endswith("norm.weight"):
        value = value.float() + family.norm_offset
    rows = stored_rows(name, config)
    return value if rows is None else value[rows[start:start + len(value)] - start]


def split_weight(name, value, config):
    """Splits a parameter into the checkpoint's tensors, {name: tensor}."""
    family = FAMILIES[config.family]
    prefix = "" if name == "head.weight" else family.prefix
    if family.norm_offset and name.endswith("norm.weight"):
        value = (value.float() - family.norm_offset).to(value.dtype)
    rows = stored_rows(name, config)
    value = value if rows is None else value[rows.argsort()]
    parts = stored_parts(name, len(value), config)
    stored = value.split([size for *_, size in parts])
    if name.endswith(family.transposed):
        stored = [part.T for part in stored]
    return {prefix + key: part.contiguous() for (key, *_), part in zip(parts, stored)}
