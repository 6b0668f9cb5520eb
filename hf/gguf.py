"""GGUF files, read by the gguf package as what a Hugging Face folder would hold. The format is that
of llama.cpp's converter (conversion/) and tokenizers (src/llama-vocab.cpp)."""

import itertools
import re
import struct
from functools import cached_property, lru_cache, partial

import gguf
import numpy as np
import torch
from gguf import GGUFValueType, TokenType

from backends.quantized import QuantizedWeight, round_weight
from hf.families import FAMILIES, value_of
from hf.splits import PIECE_IS_TOKEN, byte_level_spec, sentencepiece_spec
from model import InputError, expect, one_of

ARCHITECTURES = "llama", "qwen2", "qwen3", "gemma3", "phi3", "smollm3"
KEYS = {  # metadata, after the architecture's name -> config.json
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq", "attention.sliding_window": "sliding_window",
    "final_logit_softcapping": "final_logit_softcapping"}
SCALING = {  # metadata, after rope.scaling. -> config.json's rope_scaling
    "type": "rope_type", "factor": "factor", "attn_factor": "attention_factor",
    "original_context_length": "original_max_position_embeddings", "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor"}
ROPE_FACTORS = {  # tensors -> config.json's rope_scaling; Llama 3's hold for all lengths
    "rope_freqs.weight": ("short_factor", "long_factor"),
    "rope_factors_short.weight": ("short_factor",), "rope_factors_long.weight": ("long_factor",)}
PERMUTED = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
SAMPLING = dict(temp="temperature", top_k="top_k", top_p="top_p", min_p="min_p")
SPECIAL = dict(bos_token_id="bos_token", eos_token_id="eos_token", unknown_token_id="unk_token",
               padding_token_id="pad_token")
ENDS = "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"  # of a chat turn
FLOATS = "F64", "F32", "F16", "BF16"


class Reader(gguf.GGUFReader):
    """GGUFReader that checks offsets against the file's size and reads a list at once."""

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


class GGUFFile:
    """A GGUF file, read once. meta: {key: value}, without the prefixes of the architecture's name
    and tokenizer.ggml. tensors: {name: tensor}. Methods named in PARTS give what a folder's json
    files would hold."""

    def __init__(self, path):
        with np.errstate(over="raise"):  # of offsets
            reader = Reader(path)
        meta = {key: field.parts[-1] if field.types[0] == GGUFValueType.ARRAY else field.contents()
                for key, field in reader.fields.items()}
        name = meta.get("general.architecture")
        self.architecture = one_of("general.architecture", name, ARCHITECTURES)
        self.family = self.architecture.replace("gemma3", "gemma3_text")
        self.tokens = meta.get("tokenizer.ggml.tokens", [])
        self.meta = {}
        for key, value in meta.items():
            if not key.endswith("_token_id") or value in range(len(self.tokens)):
                self.meta[re.sub(rf"^({self.architecture}|tokenizer\.ggml)\.", "", key)] = value
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        for kind in {tensor.tensor_type for tensor in reader.tensors}:  # raises if not supported
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)

    def renamed(self, keys, prefix=""):
        """{name in a folder: value} of the metadata {key after the prefix: name in a folder}."""
        return {theirs: self.meta[prefix + key] for key, theirs in keys.items()
                if prefix + key in self.meta}

    def config(self):
        tensors = self.tensors
        expect("token_embd.weight" in tensors, "has no tensor token_embd.weight")
        n_vocab = int(tensors["token_embd.weight"].shape[-1])
        n_tokens = len(self.tokens)
        expect(n_tokens <= n_vocab, f"{n_tokens} tokens, but only {n_vocab} embeddings")
        raw = {theirs: self.meta.get(key) or None for key, theirs in KEYS.items()}
        size = value_of(raw, "hidden_size", int) // value_of(raw, "num_attention_heads", int)
        head_size = value_of(self.meta, "attention.key_length", int, size)
        rotary_size = value_of(self.meta, "rope.dimension_count", int, head_size)
        gemma_27b = raw["num_hidden_layers"] == 62  # which alone scales by another size
        return raw | dict(
            model_type=self.family, vocab_size=n_vocab, head_dim=head_size,
            rope_theta=raw["rope_theta"] or 10000.0, rope_scaling=self.rope_scaling(),
            partial_rotary_factor=rotary_size / head_size,
            query_pre_attn_scalar=size if gemma_27b else head_size,
            tie_word_embeddings="output.weight" not in tensors,
            attention_bias="blk.0.attn_q.bias" in tensors, mlp_bias="blk.0.ffn_up.bias" in tensors)

    def rope_scaling(self):
        scaling = self.renamed(SCALING, "rope.scaling.")
        for name, keys in ROPE_FACTORS.items():
            if name in self.tensors:
                factors = dequantized(self.tensors[name]).tolist()
                scaling |= dict.fromkeys(keys, factors) | {"rope_type": "longrope"}
                scaling |= {"attention_factor": 1.0} if name == "rope_freqs.weight" else {}
        return scaling if scaling.get("rope_type", "none") != "none" else None

    def generation_config(self):
        """Sampling, and where output ends: at the file's end tokens and at the end of a turn."""
        ids = [self.meta[key] for key in ("eos_token_id", "eot_token_id", "eom_token_id")
               if key in self.meta]
        if "tokenizer.chat_template" in self.meta:
            ids += [token["id"] for token in self.added_tokens if token["content"] in ENDS]
        sampling = self.renamed(SAMPLING, "general.sampling.")
        return sampling | dict(eos_token_id=ids or None, do_sample=bool(sampling))

    def tokenizer_config(self):
        special = {name: self.tokens[index] for name, index in self.renamed(SPECIAL).items()}
        return special | dict(chat_template=self.meta.get("tokenizer.chat_template"))

    @cached_property
    def added_tokens(self):
        """tokenizer.json's list of the tokens that are matched before a text is split."""
        special = TokenType.CONTROL, TokenType.UNKNOWN
        kinds = np.array(self.meta.get("token_type", ()))[:len(self.tokens)]
        added = np.isin(kinds, (*special, TokenType.USER_DEFINED)).nonzero()[0]
        return [dict(id=i, content=self.tokens[i], special=kinds[i] in special, normalized=False)
                for i in added.tolist()]

    def tokenizer(self):
        tokens, meta = self.tokens, self.meta
        expect(isinstance(tokens, list) and tokens, "has no list tokenizer.ggml.tokens")
        kind = one_of("tokenizer.ggml.model", meta.get("model"), ("gpt2", "llama"))
        split = meta.get("pre", "default")
        if kind == "gpt2":
            spec = byte_level_spec(tokens, meta["merges"], split)
        else:  # Gemma's merges are in the order of ids
            scores = -np.arange(len(tokens)) if self.family == "gemma3_text" else meta["scores"]
            normal = (meta["token_type"] == TokenType.NORMAL).nonzero()[0].tolist()
            spec = sentencepiece_spec(tokens, scores, normal, meta.get("add_space_prefix", True))
        spec["added_tokens"] = self.added_tokens
        bos_by_default = kind == "llama" or split in PIECE_IS_TOKEN
        if meta.get("add_bos_token", bos_by_default) and "bos_token_id" in meta:
            bos = tokens[meta["bos_token_id"]]
            parts = [dict(SpecialToken=dict(id=bos, type_id=0)),
                     dict(Sequence=dict(id="A", type_id=0))]
            special = {bos: dict(id=bos, ids=[meta["bos_token_id"]], tokens=[bos])}
            spec["post_processor"] = dict(type="TemplateProcessing", single=parts, pair=parts,
                                          special_tokens=special)
        return spec

    def weights(self):
        """{name as in a folder: (shape, function that reads float32 values, type, *`quantized`)}"""
        family = FAMILIES[self.family]
        names_of = gguf.get_tensor_name_map(gguf.MODEL_ARCH[self.architecture.upper()], 1)
        names = {}  # of the first block
        for name in itertools.chain(*family.names.values()):
            first = name.replace(".N.", ".0.")
            names[names_of.get_name(family.prefix + first) or names_of.get_name(first)] = name
        weights = {}
        for name, tensor in self.tensors.items():
            stem, _, kind = name.rpartition(".")
            number = re.search(r"\d+|$", stem).group()
            first = stem.replace(f"blk.{number}.", "blk.0.")
            expect(first in names or name in ROPE_FACTORS,
                   f"{name} is not a tensor that {self.architecture} models have")
            if first in names:
                theirs = names[first].replace(".N.", f".{number}.")
                weights[f"{theirs}.{kind}"] = (
                    tuple(tensor.shape[::-1].tolist()), partial(self.read_values, tensor),
                    tensor.tensor_type.name, *self.quantized(tensor))
        return weights

    def read_values(self, tensor):
        """A tensor's float32 values as a folder stores them."""
        values = self.in_order(tensor, dequantized(tensor))
        if self.architecture == "gemma3" and tensor.name.endswith("norm.weight"):
            values -= 1
        return values

    def in_order(self, tensor, rows):
        """Rows [N, ...] of a tensor in a folder's order: llama.cpp pairs rotated neighbours."""
        part = tensor.name.split(".")[-2]
        if self.architecture not in ("llama", "smollm3") or part not in PERMUTED:
            return rows
        heads = self.meta.get(PERMUTED[part], self.meta["attention.head_count"])
        return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(rows.shape)

    def quantized(self, tensor):
        """(bits, function that gives the `QuantizedWeight`), (None, None) for floats. What has no
        kernel is rounded to 8 bits."""
        kind = tensor.tensor_type.name
        if kind in FLOATS or len(tensor.shape) != 2:
            return None, None
        if kind not in BLOCKS:
            return 8, lambda: round_weight(self.read_values(tensor), 8, 32)
        bits, split = BLOCKS[kind]
        return bits, partial(self.read_quantized, tensor, bits, split)

    def read_quantized(self, tensor, bits, split):
        """-> `QuantizedWeight` [N, C]"""
        N = len(tensor.data)
        size = gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]
        blocks = torch.from_numpy(np.array(tensor.data)).view(N, -1, size)
        q, scales, minimums = split(self.in_order(tensor, blocks))
        by_group = lambda x: x if x is None else x.reshape(N, -1).T.contiguous()
        q = q.reshape(N, -1)
        return QuantizedWeight(q if bits == 4 else q.view(torch.int8), by_group(scales),
                               by_group(minimums))


@lru_cache(maxsize=2)
def open_file(path, changed, size):
    """The GGUFFile of a path. changed, size: as they were, so that a new version is read again."""
    return GGUFFile(path)


def read_part(path, name):
    """The counterpart of a folder's json file, {} if there is none; or its "weights"."""
    try:
        stat = path.stat()
        file = open_file(path, stat.st_mtime_ns, stat.st_size)
        return PARTS[name](file) if name in PARTS else {}
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # numpy and the package raise many kinds
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise InputError(f"{path}: truncated, or not a GGUF file that can be read ({reason}); "
                         "fetch it again, or another") from error


def dequantized(tensor):
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    return torch.from_numpy(np.require(values, requirements="W"))


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
PARTS = {"config.json": GGUFFile.config, "generation_config.json": GGUFFile.generation_config,
         "tokenizer_config.json": GGUFFile.tokenizer_config, "weights": GGUFFile.weights,
         "tokenizer.json": GGUFFile.tokenizer}
