"""GGUF files, read by the gguf package as what a Hugging Face folder would hold. Facts about the
format are those of llama.cpp's converter (conversion/) and tokenizers (src/llama-vocab.cpp)."""

import itertools
import re
import struct
from functools import lru_cache, partial

import gguf
import numpy as np
import torch
from gguf import GGUFValueType, TokenType

from backends.quantized import QuantizedWeight, round_weight
from hf import expect, one_of
from hf.families import FAMILIES, value_of
from hf.tokenizer import PIECE_IS_TOKEN, byte_level_spec, sentencepiece_spec
from model import InputError

ARCHITECTURES = "llama", "qwen2", "qwen3", "gemma3", "phi3", "smollm3"
KEYS = {  # of the metadata, after the architecture's name -> of config.json
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq", "attention.sliding_window": "sliding_window",
    "final_logit_softcapping": "final_logit_softcapping"}
SCALING = {  # after rope.scaling. -> of config.json's rope_scaling
    "type": "rope_type", "factor": "factor", "attn_factor": "attention_factor",
    "original_context_length": "original_max_position_embeddings", "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor"}
ROPE_FACTORS = {  # tensors -> of config.json's rope_scaling; Llama 3's hold for all lengths
    "rope_freqs": ("short_factor", "long_factor"), "rope_factors_short": ("short_factor",),
    "rope_factors_long": ("long_factor",)}
PERMUTED = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
SAMPLING = dict(temp="temperature", top_k="top_k", top_p="top_p", min_p="min_p")
SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
ENDS = "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"  # of a turn in a chat


class Reader(gguf.GGUFReader):
    """GGUFReader, but all that it reads must be in the file, and a list is read at once."""

    def _get(self, offset, dtype, count=1, override_order=None):
        end = offset + int(count) * np.dtype(dtype).itemsize
        expect(end <= len(self.data), f"ends before byte {end}; fetch it again")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs, raw_type):
        expect(self.byte_order == "I", "big-endian files are not supported")
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, count = struct.unpack_from("<IQ", self.data, orig_offs)
        end = orig_offs + 12
        if kind != GGUFValueType.STRING:
            array = self._get(end, self.gguf_scalar_to_np[kind], count)
            return 12 + array.nbytes, [array], [0], [GGUFValueType.ARRAY]
        texts = []
        for _ in range(count):
            start = end + 8
            end = start + struct.unpack_from("<Q", self.data, end)[0]
            texts.append(str(self.data[start:end].data, "utf-8"))
        return end - orig_offs, [texts], [0], [GGUFValueType.ARRAY]


@lru_cache(maxsize=2)
def read_file(path, changed, size):
    """(metadata, tensors), each by name; keys are without the architecture's name, and without
    tokenizer.ggml. The other arguments let a file that changes be read anew."""
    with np.errstate(over="raise"):  # of offsets
        reader = Reader(path)
    values = {key: field.parts[-1] if field.types[0] == GGUFValueType.ARRAY else field.contents()
              for key, field in reader.fields.items()}
    name = one_of("general.architecture", values.get("general.architecture"), ARCHITECTURES)
    for kind in {tensor.tensor_type for tensor in reader.tensors}:  # a type that it has not raises
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    ids = range(len(values.get("tokenizer.ggml.tokens", ())))  # others are as if not there
    values = {re.sub(rf"^({name}|tokenizer\.ggml)\.", "", key): value
              for key, value in values.items() if not key.endswith("_token_id") or value in ids}
    values["family"] = name.replace("gemma3", "gemma3_text")
    return values, {tensor.name: tensor for tensor in reader.tensors}


def read_part(path, name):
    """What would stand in a json file of a folder, {} if nothing; or its "weights"."""
    parts = {"config.json": config, "generation_config.json": generation_config, "weights": weights,
             "tokenizer_config.json": tokenizer_config, "tokenizer.json": tokenizer}
    try:
        stat = path.stat()
        file = read_file(path, stat.st_mtime_ns, stat.st_size)
        return parts[name](*file) if name in parts else {}
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # numpy and the package raise many kinds
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise InputError(f"{path}: truncated, or not a GGUF file that can be read ({reason}); "
                         "fetch it again, or another") from error


def config(meta, tensors):
    expect("token_embd.weight" in tensors, "has no tensor token_embd.weight")
    n_vocab = int(tensors["token_embd.weight"].shape[-1])
    n_tokens = len(meta.get("tokens", ()))
    expect(n_tokens <= n_vocab, f"{n_tokens} tokens, but only {n_vocab} embeddings")
    raw = {theirs: meta.get(key) or None for key, theirs in KEYS.items()}
    default_size = value_of(raw, "hidden_size", int) // value_of(raw, "num_attention_heads", int)
    head_size = value_of(meta, "attention.key_length", int, default_size)
    gemma_27b = raw["num_hidden_layers"] == 62  # which alone scales by another size
    return raw | dict(
        model_type=meta["family"], vocab_size=n_vocab, head_dim=head_size,
        rope_theta=raw["rope_theta"] or 10000.0, rope_scaling=rope_scaling(meta, tensors),
        partial_rotary_factor=value_of(meta, "rope.dimension_count", int, head_size) / head_size,
        query_pre_attn_scalar=default_size if gemma_27b else head_size,
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors, mlp_bias="blk.0.ffn_up.bias" in tensors)


def rope_scaling(meta, tensors):
    scaling = {theirs: meta[f"rope.scaling.{key}"] for key, theirs in SCALING.items()
               if f"rope.scaling.{key}" in meta}
    for name, keys in ROPE_FACTORS.items():
        if f"{name}.weight" in tensors:
            factors = dequantized(tensors[f"{name}.weight"]).tolist()
            scaling |= dict.fromkeys(keys, factors) | {"rope_type": "longrope"}
            scaling |= {"attention_factor": 1.0} if name == "rope_freqs" else {}
    return scaling if scaling.get("rope_type", "none") != "none" else None


def weights(meta, tensors):
    """{name as in a folder: (shape, function that gives float32 values, type, bits, function that
    gives the `QuantizedWeight`)}, the last two None of floats."""
    architecture = meta["general.architecture"]
    family = FAMILIES[meta["family"]]
    names_of = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], 1)
    names = {}  # of the first block
    for name in itertools.chain(*family.names.values()):
        first = name.replace(".N.", ".0.")
        names[names_of.get_name(family.prefix + first) or names_of.get_name(first)] = name
    found = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        number = re.search(r"\d+|$", stem).group()
        first = stem.replace(f"blk.{number}.", "blk.0.")
        expect(first in names or stem in ROPE_FACTORS,
               f"{name} is not a tensor that {architecture} models have")
        if first in names:
            theirs = names[first].replace(".N.", f".{number}.")
            shape = tuple(tensor.shape[::-1].tolist())
            load = partial(read_values, meta, tensor)
            stored_as = tensor.tensor_type.name
            found[f"{theirs}.{kind}"] = shape, load, stored_as, *quantized(meta, tensor)
    return found


def dequantized(tensor):
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def read_values(meta, tensor):
    """The float32 values of a tensor as a folder has them."""
    values = dequantized(tensor)
    if meta["general.architecture"] == "gemma3" and tensor.name.endswith("norm.weight"):
        return values - 1
    return in_order(meta, tensor, values)


def in_order(meta, tensor, rows):
    """Rows [N, ...] of a tensor as a folder has them, which parts the rows of a pair."""
    part = tensor.name.split(".")[-2]
    if meta["general.architecture"] not in ("llama", "smollm3") or part not in PERMUTED:
        return rows
    heads = meta.get(PERMUTED[part], meta["attention.head_count"])
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(rows.shape)


def quantized(meta, tensor):
    """(bits, function that gives the `QuantizedWeight`); (None, None) of floats. What has no kernel
    is rounded to 8 bits."""
    kind = tensor.tensor_type.name
    if kind in ("F64", "F32", "F16", "BF16") or len(tensor.shape) != 2:
        return None, None
    if kind not in BLOCKS:
        return 8, lambda: round_weight(read_values(meta, tensor), 8, 32)
    return BLOCKS[kind][0], partial(read_quantized, meta, tensor)


def read_quantized(meta, tensor):
    """-> `QuantizedWeight` [N, C]"""
    bits, split = BLOCKS[tensor.tensor_type.name]
    N, C = len(tensor.data), tensor.shape[0]
    size = gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]
    blocks = torch.from_numpy(np.array(tensor.data)).view(N, -1, size)
    q, scales, minimums = split(in_order(meta, tensor, blocks))
    by_group = lambda x: x if x is None else x.reshape(N, -1).T.contiguous()
    q = q.reshape(N, int(C))
    return QuantizedWeight(q if bits == 4 else q.view(torch.int8), by_group(scales),
                           by_group(minimums))


def halves(blocks, first, count=1):
    """float16 [..., count] at a byte of blocks uint8 [..., size]"""
    return blocks[..., first:first + 2 * count].contiguous().view(torch.float16)


def nibbles(x):
    """uint8 [..., n] -> [..., 2 n]: the low halves, then the high ones"""
    return torch.cat((x & 15, x >> 4), dim=-1)


def split_q5_0(blocks):
    bits = blocks[..., 2:6, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return nibbles(blocks[..., 6:]) + 16 * bits.flatten(-2) - 16, halves(blocks, 0), None


def split_q4_k(blocks):
    """8 groups of 32, whose scales and minimums are 6 bits times float16."""
    d = halves(blocks, 0, 2).float()
    low, middle, high = blocks[..., 4:16].split(4, dim=-1)
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), dim=-1)
    minimums = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), dim=-1)
    q = nibbles(blocks[..., 16:].unflatten(-1, (4, 32)))
    return q, d[..., :1] * scales, -d[..., 1:] * minimums


BLOCKS = {  # {type of ggml-common.h: (bits, blocks uint8 [N, n, size] -> q, scales, minimums)}
    "Q4_0": (4, lambda x: (nibbles(x[..., 2:]), halves(x, 0), -8 * halves(x, 0))),
    "Q4_1": (4, lambda x: (nibbles(x[..., 4:]), halves(x, 0), halves(x, 2))),
    "Q5_0": (8, split_q5_0),
    "Q8_0": (8, lambda x: (x[..., 2:], halves(x, 0), None)),
    "Q4_K": (4, split_q4_k)}


def tokenizer_config(meta, tensors):
    found = {f"{ours}_token": meta["tokens"][meta[f"{key}_token_id"]]
             for key, ours in SPECIAL.items() if f"{key}_token_id" in meta}
    return found | dict(chat_template=meta.get("tokenizer.chat_template"))


def generation_config(meta, tensors):
    """Where texts end: at the tokens that the file names, and at those that end a turn."""
    ids = [meta[f"{name}_token_id"] for name in ("eos", "eot", "eom") if f"{name}_token_id" in meta]
    if "tokenizer.chat_template" in meta:
        ids += [token["id"] for token in added_tokens(meta) if token["content"] in ENDS]
    sampling = {ours: meta[f"general.sampling.{key}"] for key, ours in SAMPLING.items()
                if f"general.sampling.{key}" in meta}
    return sampling | dict(eos_token_id=ids or None, do_sample=bool(sampling))


def added_tokens(meta):
    """Of a tokenizer.json: the tokens that are found whole in a text."""
    special = TokenType.CONTROL, TokenType.UNKNOWN
    return [dict(id=i, content=text, special=kind in special, normalized=False)
            for i, (text, kind) in enumerate(zip(meta["tokens"], meta.get("token_type", ())))
            if kind in (*special, TokenType.USER_DEFINED)]


def tokenizer(meta, tensors):
    tokens = meta.get("tokens")
    expect(isinstance(tokens, list) and tokens, "has no list tokenizer.ggml.tokens")
    kind = one_of("tokenizer.ggml.model", meta.get("model"), ("gpt2", "llama"))
    if kind == "gpt2":
        spec = byte_level_spec(tokens, meta["merges"], meta.get("pre", "default"))
    else:  # Gemma's scores are not in order
        order = range(0, -len(tokens), -1) if meta["family"] == "gemma3_text" else meta["scores"]
        normal = [kind == TokenType.NORMAL for kind in meta["token_type"]]
        spec = sentencepiece_spec(tokens, order, normal, meta.get("add_space_prefix", True))
    spec["added_tokens"] = added_tokens(meta)
    bos_by_default = kind == "llama" or meta.get("pre") in PIECE_IS_TOKEN
    if meta.get("add_bos_token", bos_by_default) and "bos_token_id" in meta:
        bos = tokens[meta["bos_token_id"]]
        text = dict(Sequence=dict(id="A", type_id=0))
        start = [dict(SpecialToken=dict(id=bos, type_id=0)), text]
        special = {bos: dict(id=bos, ids=[meta["bos_token_id"]], tokens=[bos])}
        spec["post_processor"] = dict(type="TemplateProcessing", single=start, pair=[*start, text],
                                      special_tokens=special)
    return spec
