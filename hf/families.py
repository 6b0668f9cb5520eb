"""FAMILIES: how each model family's config.json becomes a `Family`: a GPTConfig, and the names and
layout of its tensors. To add a family, copy the function or the entry of the nearest one."""

import itertools
import math
import re
from dataclasses import dataclass, fields
from functools import partial

import torch

from common.values import one_of
from hf.rope import SCALED, scale
from model import GPTConfig, check, expect
from recurrent.layers import DeltaConfig

# Our parameter names -> the checkpoint's tensor names, without .weight or .bias. N is the layer
# number. Several tensors are stacked into one, in this order.
LLAMA_NAMES = {
    "embed": ("model.embed_tokens",),
    "norm": ("model.norm",),
    "head": ("lm_head",),
    "blocks.N.attn_norm": ("model.layers.N.input_layernorm",),
    "blocks.N.attn.qkv": tuple(f"model.layers.N.self_attn.{x}_proj" for x in "qkv"),
    "blocks.N.attn.q_norm": ("model.layers.N.self_attn.q_norm",),
    "blocks.N.attn.k_norm": ("model.layers.N.self_attn.k_norm",),
    "blocks.N.attn.proj": ("model.layers.N.self_attn.o_proj",),
    "blocks.N.mlp_norm": ("model.layers.N.post_attention_layernorm",),
    "blocks.N.mlp.up": ("model.layers.N.mlp.gate_proj", "model.layers.N.mlp.up_proj"),
    "blocks.N.mlp.down": ("model.layers.N.mlp.down_proj",),
}
BAICHUAN_NAMES = LLAMA_NAMES | {"blocks.N.attn.qkv": ("model.layers.N.self_attn.W_pack",)}
GLM_NAMES = LLAMA_NAMES | {"blocks.N.mlp.up": ("model.layers.N.mlp.gate_up_proj",)}
PHI3_NAMES = GLM_NAMES | {"blocks.N.attn.qkv": ("model.layers.N.self_attn.qkv_proj",)}
GLM4_NAMES = GLM_NAMES | {
    "blocks.N.attn_post_norm": ("model.layers.N.post_self_attn_layernorm",),
    "blocks.N.mlp_post_norm": ("model.layers.N.post_mlp_layernorm",)}
GRANITE_HYBRID_NAMES = LLAMA_NAMES | {
    "blocks.N.mlp.up": ("model.layers.N.shared_mlp.input_linear",),
    "blocks.N.mlp.down": ("model.layers.N.shared_mlp.output_linear",)}
OLMO_NAMES = LLAMA_NAMES | {
    "blocks.N.attn_post_norm": ("model.layers.N.post_attention_layernorm",),
    "blocks.N.mlp_post_norm": ("model.layers.N.post_feedforward_layernorm",)}
GEMMA_NAMES = OLMO_NAMES | {
    "blocks.N.mlp_norm": ("model.layers.N.pre_feedforward_layernorm",)}
QWEN3_5_NAMES = LLAMA_NAMES | {
    "blocks.N.attn.qkvz": tuple(f"model.layers.N.linear_attn.in_proj_{x}" for x in ("qkv", "z")),
    "blocks.N.attn.ab": tuple(f"model.layers.N.linear_attn.in_proj_{x}" for x in "ab"),
    "blocks.N.attn.A": ("model.layers.N.linear_attn.A_log",),  # a whole name, like dt_bias
    **{f"blocks.N.attn.{x}": (f"model.layers.N.linear_attn.{x}",)
       for x in ("conv1d", "norm", "out_proj", "dt_bias")}}
GPT2_NAMES = {
    "embed": ("transformer.wte",),
    "embed_positions": ("transformer.wpe",),
    "norm": ("transformer.ln_f",),
    "head": ("lm_head",),
    "blocks.N.attn_norm": ("transformer.h.N.ln_1",),
    "blocks.N.attn.qkv": ("transformer.h.N.attn.c_attn",),
    "blocks.N.attn.proj": ("transformer.h.N.attn.c_proj",),
    "blocks.N.mlp_norm": ("transformer.h.N.ln_2",),
    "blocks.N.mlp.up": ("transformer.h.N.mlp.c_fc",),
    "blocks.N.mlp.down": ("transformer.h.N.mlp.c_proj",),
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu"}
ROPE_TYPES = ("default", "dynamic", *SCALED)
LAYER_TYPES = ("full_attention", "sliding_attention")
HYBRID_TYPES = ("full_attention", "linear_attention")
# Of transformers' classes, by model_type: what the text_config of LLaVA leaves out
SIZES_7B = dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, rms_norm_eps=1e-6)
DEFAULTS = {
    "llama": SIZES_7B | dict(vocab_size=32000, intermediate_size=11008,
                             max_position_embeddings=2048),
    "mistral": SIZES_7B | dict(vocab_size=32000, intermediate_size=14336, num_key_value_heads=8,
                               max_position_embeddings=131072),
    "qwen2": SIZES_7B | dict(vocab_size=151936, intermediate_size=22016,
                             max_position_embeddings=32768)}
TIED = "gemma3", "mistral3", "internvl", "aya_vision"  # multimodal; others: as their text_config
UNSUPPORTED = (  # keys of config.json that change attention or logits
    "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention",
    "scale_attn_by_inverse_layer_idx", "add_cross_attention")


# --------------------------------------------------------------------------------------------------
# Families: config.json -> keyword arguments of `Family`

def llama(raw):
    return common(raw) | attention_biases(raw) | dict(
        mlp_bias=value_of(raw, "mlp_bias", bool, False))


def granite(raw):
    """Granite multiplies the output of each attention and MLP by m before it is added. Our stream
    is theirs divided by m: the embeddings are, and norms, which undo it, have eps / m^2."""
    get = partial(value_of, raw)
    m = get("residual_multiplier", float, 1.0)
    values = llama(raw)
    values |= dict(embed_scale=get("embedding_multiplier", float, 1.0) / m, stream_scale=m,
                   norm_eps=values["norm_eps"] / m**2,
                   attn_scale=get("attention_multiplier", float, 1.0),
                   logits_divisor=get("logits_scaling", float, 1.0))
    is_rotated = raw.get("position_embedding_type", "rope") == "rope"
    return values | dict(unrotated=() if is_rotated else tuple(range(values["n_layer"])))


def granitemoehybrid(raw):
    """Granite 4's dense models, such as 4.0 Micro: without experts and recurrent layers."""
    one_of("num_local_experts", raw.get("num_local_experts", 8), (0,))
    for kind in raw.get("layer_types") or [None]:
        one_of("a layer of type", kind, ("attention", "full_attention"))
    raw = raw | dict(intermediate_size=raw.get("shared_intermediate_size"),
                     position_embedding_type=raw.get("position_embedding_type"))
    return granite(raw) | dict(names=GRANITE_HYBRID_NAMES)


def qwen_windows(raw):
    if not value_of(raw, "use_sliding_window", bool, False):
        return ()
    first = raw.get("max_window_layers", 28)
    return windows(raw, 4096, lambda layer: layer >= first)


def smollm3(raw):
    raw = with_defaults(raw, tie_word_embeddings=True, rope_theta=2e6)
    n_layer = value_of(raw, "num_hidden_layers", int)
    period = value_of(raw, "no_rope_layer_interval", int, 4)
    rotates = by_layer(raw, "no_rope_layers", (0, 1), n_layer)  # 1: a layer with RoPE
    rotates = rotates or [(layer + 1) % period for layer in range(n_layer)]
    has_windows = value_of(raw, "use_sliding_window", bool, False)
    return dict(
        **llama(raw), unrotated=tuple(layer for layer in range(n_layer) if not rotates[layer]),
        windows=windows(raw, 4096, lambda layer: not rotates[layer]) if has_windows else ())


def olmo2(raw):
    return common(raw) | attention_biases(raw) | dict(
        qk_norm="all", norm_at="after", names=OLMO_NAMES)


def olmo3(raw):
    raw = with_defaults(raw, rope_theta=500000.0)
    values = olmo2(raw) | dict(windows=windows(raw, 4096, lambda layer: (layer + 1) % 4))
    return values | window_rope(raw, values)


def gemma3_text(raw):
    raw = with_defaults(
        raw, num_attention_heads=8, num_key_value_heads=4, head_dim=256, vocab_size=262208,
        max_position_embeddings=131072, rms_norm_eps=1e-6, hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True, query_pre_attn_scalar=256, rope_theta=1e6,
        rope_local_base_freq=10000.0)
    period = raw.get("sliding_window_pattern") or 6
    values = common(raw, "hidden_activation") | attention_biases(raw) | dict(
        qk_norm="head", norm_at="both", embed_scale=raw["hidden_size"] ** 0.5,
        attn_scale=value_of(raw, "query_pre_attn_scalar", float) ** -0.5,
        windows=windows(raw, 4096, lambda layer: (layer + 1) % period),
        names=GEMMA_NAMES, norm_offset=1.0)
    return values | window_rope(raw, values)


def glm(raw):
    raw = with_defaults(raw, partial_rotary_factor=0.5)
    return common(raw, rotates_part=True) | dict(
        qkv_bias=value_of(raw, "attention_bias", bool, True), names=GLM_NAMES,
        pairs_neighbours=True)


def baichuan(raw):
    """The 13B models use ALiBi and store the context length as model_max_length. Baichuan 2, which
    has z_loss_weight or a vocabulary of 125,696, normalises the LM head's rows."""
    values = sizes(raw)
    if raw.get("max_position_embeddings") is None or raw.get("hidden_size") == 5120:
        values |= dict(positions="alibi", block_size=value_of(raw, "model_max_length", int))
    else:
        values |= rope(raw, values["head_size"])
    has_unit_head = raw.get("z_loss_weight") is not None or raw.get("vocab_size") == 125696
    return values | dict(unit_head=has_unit_head, names=BAICHUAN_NAMES)


def qwen3_5(raw):
    """Qwen 3.5, 3.6 and 3.8: three gated delta layers to one of full attention, whose output has a
    gate. The positions of text are the same in all parts of their multimodal RoPE."""
    raw = with_defaults(raw, partial_rotary_factor=0.25, head_dim=256)
    one_of("hidden_act", raw.get("hidden_act") or "silu", ("silu",))
    one_of("attn_output_gate", raw.get("attn_output_gate", True), (True,))
    values = common(raw, rotates_part=True) | attention_biases(raw)
    n_layer = values["n_layer"]
    period = value_of(raw, "full_attention_interval", int, 4)
    kinds = by_layer(raw, "layer_types", HYBRID_TYPES, n_layer) or [
        HYBRID_TYPES[(layer + 1) % period > 0] for layer in range(n_layer)]
    expect("full_attention" in kinds, "a model without full_attention layers is not supported")
    get = lambda key, default: value_of(raw, f"linear_{key}", int, default)
    delta = DeltaConfig(get("num_value_heads", 32), get("num_key_heads", 16),
                        get("key_head_dim", 128), get("value_head_dim", 128),
                        get("conv_kernel_dim", 4))
    expect(delta.n_head % delta.n_key_head == 0 and delta.window > 1,
           f"expected a multiple of {delta.n_key_head} value heads and a convolution of more than "
           f"one input, got {delta.n_head} and {delta.window}")
    mixers = tuple(delta if kind == "linear_attention" else None for kind in kinds)
    return values | dict(qk_norm="head", attn_gate=True, mixers=mixers, names=QWEN3_5_NAMES,
                         norm_offset=1.0, tiled_heads=raw.get("tiled_heads", False))


def gpt2(raw):
    one_of("scale_attn_weights", raw.get("scale_attn_weights", True), (True,))
    get = partial(value_of, raw)
    n_head = get("n_head", int)
    n_embd = get("n_embd", int)
    return dict(
        vocab_size=get("vocab_size", int), block_size=get("n_positions", int),
        n_layer=get("n_layer", int), n_head=n_head, n_kv_head=n_head, head_size=n_embd // n_head,
        n_embd=n_embd, n_inner=get("n_inner", int, 4 * n_embd), norm="layer",
        norm_eps=get("layer_norm_epsilon", float), positions="learned", gated=False,
        activation=activation(raw, "activation_function", "gelu_new"),
        qkv_bias=True, proj_bias=True, mlp_bias=True, tied=get("tie_word_embeddings", bool, True),
        names=GPT2_NAMES,
        transposed=("qkv.weight", "proj.weight", "up.weight", "down.weight"))


FAMILIES = dict(  # by model_type
    llama=llama,
    mistral=lambda raw: common(raw) | dict(windows=windows(raw, 4096)),
    qwen2=lambda raw: common(raw) | dict(qkv_bias=True, windows=qwen_windows(raw)),
    qwen3=lambda raw: common(raw) | attention_biases(raw) | dict(
        qk_norm="head", windows=qwen_windows(raw)),
    phi3=lambda raw: common(raw, rotates_part=True) | dict(windows=windows(raw), names=PHI3_NAMES),
    smollm3=smollm3, olmo2=olmo2, olmo3=olmo3, gemma3_text=gemma3_text, glm=glm,
    glm4=lambda raw: glm(raw) | dict(norm_at="both", names=GLM4_NAMES),
    baichuan=baichuan, gpt2=gpt2, granite=granite, granitemoehybrid=granitemoehybrid,
    qwen3_5_text=qwen3_5)


@dataclass
class Family:
    """A model's GPTConfig, and how its checkpoint stores the weights."""
    config: GPTConfig
    names: dict                       # the tensors of each parameter
    pairs_neighbours: bool = False    # RoPE pairs dimensions 2i and 2i + 1 instead of two halves
    transposed: tuple = ()            # ends of names of ours, stored as [inputs, outputs]
    norm_offset: float = 0.0          # to add to stored norm weights, not of gated delta layers
    tiled_heads: bool = False         # value heads of gated delta layers are stored in our order
    logits_divisor: float = 1.0       # of the logits; we divide the final norm's weight
    quantization: dict | None = None  # config.json's quantization_config

    def stacked(self, name, rows):
        """The tensors that are stacked into a parameter: [(name, first row, number of rows)]. rows:
        the parameter's."""
        c = self.config
        stem, _, kind = name.rpartition(".")
        layer = re.search(r"(?<=\.)\d+|$", stem).group()
        numbered = lambda x: re.sub(r"(?<=\.)\d+", "N", x)
        patterns = self.names.get(numbered(name)) or [
            f"{pattern}.{kind}" for pattern in self.names[numbered(stem)]]
        stored = [pattern.replace(".N.", f".{layer}.") for pattern in patterns]
        counts = [rows // len(stored)] * len(stored)
        if len(stored) == 3:
            n_query = 2 * c.n_head if c.attn_gate else c.n_head
            counts = [n * c.head_size for n in (n_query, c.n_kv_head, c.n_kv_head)]
        if stem.endswith(".qkvz"):
            channels = sum(c.mixers[int(layer)].parts)
            counts = [channels, rows - channels]
        return list(zip(stored, itertools.accumulate(counts, initial=0), counts))

    def convert(self, name, start, tensor):
        """The StoredTensor that fills a parameter from row `start` on, in our layout."""
        if name.endswith(self.transposed):
            return tensor._replace(shape=tensor.shape[::-1], read=lambda: tensor.read().T)
        if name == "norm.weight" and self.logits_divisor != 1:
            return tensor._replace(read=lambda: tensor.read().float() / self.logits_divisor)
        layer = re.match(r"blocks\.(\d+)\.attn\.", name)
        if layer and self.config.mixers and (delta := self.config.mixers[int(layer[1])]):
            return self.convert_delta(name, delta, tensor)
        if self.config.qk_norm == "head" and ".attn." in name and name.endswith("_norm.weight"):
            tensor = tensor.rows(self.head_order())
        if self.norm_offset and name.endswith("norm.weight"):
            return tensor._replace(read=lambda: tensor.read().float() + self.norm_offset)
        if ".attn.qkv." in name:
            order = self.qkv_order()
            return tensor if order is None else tensor.rows(order[start:][:tensor.shape[0]] - start)
        return tensor

    def head_order(self):
        """The stored dimension of each of a head's, int64 [D]; None: the same. `rope_table` needs:
        first dimensions of the pairs, half of the unrotated ones, second ones, the rest."""
        D = self.config.head_size
        R = self.config.rotary_size or D
        pairs = torch.arange(R).view(2, -1)
        if self.pairs_neighbours:
            pairs = torch.arange(R).view(-1, 2).T
        elif R == D:
            return None
        return torch.cat((pairs, torch.arange(R, D).view(2, -1)), dim=1).flatten()

    def qkv_order(self):
        """The stored row of each row of attn.qkv, int64; None: the same."""
        c = self.config
        order = self.head_order()
        if order is None and not c.attn_gate:
            return None
        n_gates = c.n_head if c.attn_gate else 0
        rows = torch.arange((n_gates + c.n_head + 2 * c.n_kv_head) * c.head_size)
        rows = rows.view(-1, c.head_size)
        if n_gates:  # stored: query, gate, query, gate, ...
            pairs = rows[:2 * n_gates]
            rows = torch.cat((pairs[1::2], pairs[::2], rows[2 * n_gates:]))
        if order is not None:  # value heads are not rotated
            rows[n_gates:-c.n_kv_head] = rows[n_gates:-c.n_kv_head, order]
        return rows.flatten()

    def convert_delta(self, name, delta, tensor):
        """`convert` for gated delta layers, of a `DeltaConfig`. Folders store a key head's value
        heads side by side, GGUF files and we the first one of each key head, then the second."""
        if name.endswith(".A"):
            read = tensor.read
            tensor = tensor._replace(read=lambda: -read().float().exp())
        is_output = name.endswith(".out_proj.weight")
        if self.tiled_heads or delta.n_head == delta.n_key_head or ".norm." in name:
            return tensor
        size = 1 if name.endswith((".ab.weight", ".A", ".dt_bias")) else delta.value_size
        heads = torch.arange(delta.n_head).view(delta.n_key_head, -1).T.flatten()
        values = (heads[:, None] * size + torch.arange(size)).flatten()
        others = tensor.shape[is_output] - len(values)  # of the queries and keys
        order = torch.cat((torch.arange(others), values + others))
        if not is_output:
            return tensor.rows(order)
        load = tensor.load  # quantised columns cannot be moved: they share scales
        return tensor._replace(read=lambda: load()[:, order], order=None, read_packed=None,
                               read_quantized=None)


def family_of(raw):
    """A config.json dict -> `Family`. `hf.files.read_family` turns its errors into InputErrors."""
    name = one_of("model_type", raw.get("model_type"), FAMILIES)
    for key in UNSUPPORTED:
        expect(not raw.get(key), f"{key} is not supported")
    values = dict(names=LLAMA_NAMES) | FAMILIES[name](raw)
    layout = {key: values.pop(key) for key in [x.name for x in fields(Family)] if key in values}
    c = GPTConfig(**values)
    expect(c.n_head % c.n_kv_head == 0 and c.head_size % 2 == 0 and 16 <= c.head_size <= 256,
           f"expected a multiple of {c.n_kv_head} heads of even size, 16 to 256, got {c.n_head} "
           f"of {c.head_size}")
    expect(not c.tied or not c.unit_head, "a tied LM head cannot be normalised")
    return Family(c, **layout, quantization=raw.get("quantization_config"))


def text_config(raw):
    """config.json itself, or the text model's part of a multimodal one, with what transformers
    takes from the outer part and its classes."""
    text = raw.get("text_config")
    if not isinstance(text, dict):
        return raw
    tied = raw.get("tie_word_embeddings")
    if raw.get("model_type") not in TIED:
        tied = tied or text.get("tie_word_embeddings") or False
    elif tied is None:
        tied = True
    text = with_defaults(text, **DEFAULTS.get(text.get("model_type"), {}))
    return dict(quantization_config=raw.get("quantization_config")) | text | dict(
        tie_word_embeddings=tied)


def llama_json(config, dtype):
    """Llama's config.json of a GPTConfig, with RoPE settings for old and new transformers."""
    c = config
    theta = dict(rope_theta=c.rope_theta)
    scaling = getattr(c.rope_frequencies, "scaling", None)
    return theta | dict(
        architectures=["LlamaForCausalLM"], model_type="llama", pad_token_id=None,
        torch_dtype=str(dtype).removeprefix("torch."), vocab_size=c.vocab_size,
        max_position_embeddings=c.block_size, num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head, head_dim=c.head_size,
        hidden_size=c.n_embd, intermediate_size=c.n_inner, rms_norm_eps=c.norm_eps,
        hidden_act={"silu": "silu", "gelu": "gelu_new"}[c.activation],
        attention_bias=c.qkv_bias, mlp_bias=c.mlp_bias, tie_word_embeddings=c.tied,
        rope_scaling=scaling,
        rope_parameters=theta | (scaling or dict(rope_type="default")))


# --------------------------------------------------------------------------------------------------
# What families share

def value_of(raw, key, kind, default=None):
    """raw[key] as bool, str, or int or float above 0; the default if it is null or missing."""
    value = default if raw.get(key) is None else raw[key]
    expect(kind is not bool or isinstance(value, bool), f"{key} must be a bool, not {value!r}")
    if kind in (int, float):  # the bound on ints keeps products of two sizes within int64
        low, high = (1, 2**24) if kind is int else (1e-30, 1e30)
        check(key, value, low, high, whole=kind is int)
    return kind(value)


def by_layer(raw, key, values, n_layer):
    """raw[key]: None, or a list of n_layer elements, each one of the two values."""
    layers = raw.get(key)
    valid = isinstance(layers, list) and len(layers) == n_layer and {*layers} <= {*values}
    expect(layers is None or valid,
           f"{key} must be a list of {n_layer} elements, each {values[0]} or {values[1]}")
    return layers


def with_defaults(raw, **defaults):
    """config.json with defaults in place of keys that are null or missing."""
    return raw | {key: value for key, value in defaults.items() if raw.get(key) is None}


def activation(raw, key, default="silu"):
    return ACTIVATIONS[one_of(key, value_of(raw, key, str, default), ACTIVATIONS)]


def sizes(raw, activation_key="hidden_act"):
    """The sizes, and what else nearly all families name alike."""
    get = partial(value_of, raw)
    n_head = get("num_attention_heads", int)
    n_embd = get("hidden_size", int)
    return dict(
        vocab_size=get("vocab_size", int), n_layer=get("num_hidden_layers", int),
        n_head=n_head, n_kv_head=get("num_key_value_heads", int, n_head),
        head_size=get("head_dim", int, n_embd // n_head), n_embd=n_embd,
        n_inner=get("intermediate_size", int), norm_eps=get("rms_norm_eps", float),
        activation=activation(raw, activation_key), tied=get("tie_word_embeddings", bool, False))


def common(raw, activation_key="hidden_act", rotates_part=False):
    """Sizes and RoPE."""
    values = sizes(raw, activation_key)
    return values | rope(raw, values["head_size"], rotates_part)


def attention_biases(raw):
    """In a folder, one key stands for the biases of all four projections."""
    has_bias = value_of(raw, "attention_bias", bool, False)
    proj_bias = value_of(raw, "attention_output_bias", bool, has_bias)  # from a GGUF file
    return dict(qkv_bias=has_bias, proj_bias=proj_bias)


def windows(raw, default=None, has_window=None):
    """GPTConfig.windows: a size for each layer, 0 for none; () if no layer has a window. default:
    size in tokens if there is no key sliding_window; null stands for no window. has_window: layer
    number -> whether it has one if config.json has no layer_types; None: all layers have."""
    if raw.get("sliding_window", default) is None:
        return ()
    size = value_of(raw, "sliding_window", int, default)
    n_layer = value_of(raw, "num_hidden_layers", int)
    types = by_layer(raw, "layer_types", LAYER_TYPES, n_layer)
    if has_window is None:
        return (size,) * n_layer
    if types:
        has_window = lambda layer: types[layer] == "sliding_attention"
    layers = tuple(size if has_window(layer) else 0 for layer in range(n_layer))
    return layers if any(layers) else ()


# --------------------------------------------------------------------------------------------------
# RoPE

def rope_settings(raw, kind):
    """rope_parameters, or the older rope_scaling, for layers of a kind of LAYER_TYPES."""
    settings = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if kind == "full_attention":  # most models have settings for all layers
        return settings.get(kind, settings)
    return settings.get(kind) or {}


def rope(raw, D, rotates_part=False):
    """The fields of RoPE in heads of size D, and the context length, which scaling changes.
    rotates_part: whether partial_rotary_factor may be below 1."""
    older = {key: raw.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    settings = rope_settings(raw, "full_attention")
    settings = older | {key: value for key, value in settings.items() if value is not None}
    theta = value_of(settings, "rope_theta", float, 10000.0)
    part = value_of(settings, "partial_rotary_factor", float, 1.0)
    R = int(D * part)
    expect(R == D or (rotates_part and R % 2 == 0 and 0 < R < D), f"partial_rotary_factor {part} "
           f"is not supported with {raw['model_type']} and a head size of {D}")
    scaling, context = scale_rope(raw, settings, theta, R)
    return scale(scaling, theta, R) | dict(
        rope_theta=theta, block_size=context, rotary_size=R if R < D else None)


def window_rope(raw, values):
    """The theta of layers with windows. values: the model's other fields."""
    if not values["windows"]:
        return {}
    settings = rope_settings(raw, "sliding_attention")
    one_of("rope type of windows", settings.get("rope_type", "default"), ("default",))
    theta = value_of(raw, "rope_local_base_freq", float, values["rope_theta"])
    theta = value_of(settings, "rope_theta", float, theta)
    is_own = theta != values["rope_theta"] or "rope_frequencies" in values
    return dict(window_theta=theta if is_own else None)


def scale_rope(raw, settings, theta, rotary_size):
    """(config.json, its RoPE settings, ...) -> (those that `scale` reads, GPTConfig.block_size)"""
    number = lambda key, default=None: value_of(settings, key, float, default)
    context = value_of(raw, "max_position_embeddings", int, raw.get("max_sequence_length"))
    context = max(context, raw.get("max_sequence_length") or 0)  # Vicuna's, scaled already
    attn_factor = number("attn_factor", 1.0)
    kind = settings.get("rope_type", settings.get("type")) or "default"
    expect(kind != "default" or settings.get("factor", 1) == 1, "rope_scaling has a factor, but no "
           "rope_type; add one, such as linear")
    kind = one_of("rope type", "longrope" if kind == "su" else kind, ROPE_TYPES)  # su: Phi-3
    if kind in ("default", "dynamic"):  # dynamic only changes theta beyond the context length
        return None, context
    if kind == "linear":
        scaled = dict(attention_factor=attn_factor) if attn_factor != 1 else {}
        return dict(rope_type=kind, factor=number("factor")) | scaled, context
    original = value_of(raw, "original_max_position_embeddings", int,
                        settings.get("original_max_position_embeddings") or context)
    scaling = dict(rope_type=kind, original_max_position_embeddings=original)
    if kind == "llama3":
        scaling |= {key: number(key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
        return scaling, context
    factor = number("factor", context / original)
    if kind == "yarn":
        check("rope_theta", theta, 2, 1e30)
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
    attention_factor = number("attention_factor", default) * attn_factor
    return scaling | dict(attention_factor=attention_factor), context
