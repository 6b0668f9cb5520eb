"""Reads GGUF files as if they were Hugging Face folders, with the gguf package. What keys mean is
defined by llama.cpp's converter (conversion/) and tokenizers (src/llama-vocab.cpp)."""

import itertools
import math
import mmap
import re
import struct
from functools import lru_cache, partial
from typing import NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType, TokenType

from backends import cpu_layers, quantized
from backends.linear import Quantized
from common.files import check_content
from common.values import one_line, one_of, warn
from hf.families import HYBRID_TYPES, family_of, value_of
from hf.paths import gguf_parts
from hf.tensors import MTP, StoredTensor
from hf.tokenizer_json import END_TOKENS, PIECE_IS_TOKEN, byte_level_spec, sentencepiece_spec
from model import InputError, expect

FAMILY_OF = {  # general.architecture -> model_type in config.json
    **{name: name for name in ("llama", "qwen2", "qwen3", "phi3", "smollm3", "granite")},
    "gemma3": "gemma3_text", "mistral3": "mistral", "qwen35": "qwen3_5_text"}
INTERLEAVED = "llama", "smollm3", "granite", "mistral3"  # whose RoPE pairs neighbours in a file
ADDED_TO_NORMS = "gemma3", "qwen35"  # 1 is added to their norms in a file
KEYS = {  # metadata key after the architecture's prefix -> config.json
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq", "attention.sliding_window": "sliding_window",
    "final_logit_softcapping": "final_logit_softcapping", "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling", "full_attention_interval": "full_attention_interval",
    "ssm.time_step_rank": "linear_num_value_heads", "ssm.group_count": "linear_num_key_heads",
    "ssm.state_size": "linear_key_head_dim", "ssm.conv_kernel": "linear_conv_kernel_dim",
    "nextn_predict_layers": "mtp_num_hidden_layers"}
NEXTN = {  # tensor of MTP heads after blk.N.nextn. -> its name in a folder after mtp.
    "eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden",
    "shared_head_norm": "norm", "embed_tokens": "embed_tokens", "shared_head_head": "lm_head"}
SCALING = {  # metadata key after rope.scaling. -> rope_scaling in config.json
    "type": "rope_type", "factor": "factor", "attn_factor": "attn_factor",
    "original_context_length": "original_max_position_embeddings", "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor",
    "yarn_log_multiplier": "mscale_all_dim"}
ROPE_FACTORS = {  # tensor -> rope_scaling in config.json; Llama 3 has one tensor for all lengths
    "rope_freqs.weight": ("short_factor", "long_factor"),
    "rope_factors_short.weight": ("short_factor",), "rope_factors_long.weight": ("long_factor",)}
PERMUTED = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
ENDS = "eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"  # their tokens end generation
SAMPLING_NAMES = dict(temp="temperature", top_k="top_k", top_p="top_p", min_p="min_p",
                      penalty_repeat="repetition_penalty")
SPECIAL = dict(bos_token_id="bos_token", eos_token_id="eos_token", unknown_token_id="unk_token",
               padding_token_id="pad_token")
# Phi-3's other special tokens strip the white space after them; no key says so.
KEEP_SPACE = "<unk>", "<s>", "<|endoftext|>"

ONE, ZERO = b"\0\x3c", b"\0\0"  # as float16
UNIT_SCALES = {  # type: where a block's scales are, and those with which its values are integers
    "Q4_0": (0, ONE), "Q4_1": (0, ONE + ZERO), "Q5_0": (0, ONE), "Q5_1": (0, ONE + ZERO),
    "Q8_0": (0, ONE), "Q6_K": (192, bytes([1] * 16) + ONE)} | dict.fromkeys(
    ("Q4_K", "Q5_K"), (0, ONE + ZERO + bytes([1] * 4 + [0] * 4 + [1] * 4)))


class Tensor(NamedTuple):
    """A tensor in a GGUF file, not converted yet."""
    name: str
    kind: GGMLQuantizationType
    shape: tuple      # rows first
    file: mmap.mmap
    data: np.ndarray  # its bytes, uint8 [..., bytes of a row], memory-mapped


class Reader:
    """Reads a GGUF file from front to back. meta: {key: value}. tensors: [`Tensor`]. In a file that
    is cut off, or has a size that is too large, the next read raises an error.

    gguf.GGUFReader takes 25 times as long for a vocabulary, and trusts the sizes in a file."""

    def __init__(self, path):
        with open(path, "rb") as file:
            self.file = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.bytes = memoryview(self.file)
        self.position = 0
        magic, version, n_tensors, n_keys = self.numbers("4sIQQ")
        expect(magic == b"GGUF", "not a GGUF file; download one")
        expect(version in (2, 3), f"GGUF version {version} and big-endian files are not supported; "
               "use another file")
        self.meta = {self.text(): self.value() for _ in range(n_keys)}
        headers = [self.header() for _ in range(n_tensors)]
        expect(self.position <= len(self.bytes), "truncated; download it again")
        alignment = self.meta.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        first = -(-self.position // alignment) * alignment
        self.tensors = [self.tensor(first, *header) for header in headers]

    def numbers(self, form):
        """The next numbers. form: their types, in the notation of the module struct."""
        values = struct.unpack_from(f"<{form}", self.bytes, self.position)
        self.position += struct.calcsize(f"<{form}")
        return values

    def text(self):
        size, = struct.unpack_from("<Q", self.bytes, self.position)
        start = self.position + 8
        self.position = start + size
        return str(self.bytes[start:self.position], "utf-8")

    def array(self, kind, count):
        """The next numbers of a `GGUFValueType`, which has the name of numpy's."""
        start = self.position
        dtype = np.dtype(GGUFValueType(kind).name.lower())
        self.position += count * dtype.itemsize
        return np.frombuffer(self.bytes[start:self.position], dtype)

    def value(self):
        """The next value of the metadata: a number, a str, a numpy array, or a list of str."""
        kind, = self.numbers("I")
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind != GGUFValueType.ARRAY:
            return self.array(kind, 1).item()
        kind, count = self.numbers("IQ")
        if kind == GGUFValueType.STRING:
            return [self.text() for _ in range(count)]
        return self.array(kind, count)

    def header(self):
        """The next tensor's (name, type, shape, offset in the data)."""
        name = self.text()
        n_dims, = self.numbers("I")
        *shape, kind, offset = self.numbers(f"{n_dims}QIQ")
        return name, GGMLQuantizationType(kind), tuple(reversed(shape)), offset

    def tensor(self, first, name, kind, shape, offset):
        self.position = first + offset
        size = gguf.quant_shape_to_byte_shape(shape, kind)
        data = self.array(GGUFValueType.UINT8, math.prod(size)).reshape(size)
        return Tensor(name, kind, shape, self.file, data)


class GGUFFile:
    """A GGUF file, or the parts of a split one. meta: {key: value} of the first part, keys without
    the prefixes ARCHITECTURE. and tokenizer.ggml. tensors: {name: tensor}. The methods config,
    generation_config, ... return what the JSON file of that name in a folder would contain."""

    def __init__(self, paths):
        self.path = paths[0]
        readers = list(map(Reader, paths))
        for path, reader in zip(paths, readers):
            count = reader.meta.get("split.count", 0)
            expect(count in (0, len(readers)),
                   f"{path.name} is one of {count} files; download all, without renaming them")
        meta = readers[0].meta
        name = meta.get("general.architecture")
        expect(meta.get("general.type") != "adapter", "is a LoRA adapter, not a model; merge it "
               "into its model, with llama.cpp's llama-export-lora")
        self.architecture = one_of("general.architecture", name, FAMILY_OF)
        self.family = FAMILY_OF[self.architecture]
        self.tokens = meta.get("tokenizer.ggml.tokens", [])
        self.meta = {}
        for key, value in meta.items():
            if not key.endswith("_token_id") or value in range(len(self.tokens)):  # a valid id
                self.meta[re.sub(rf"^({self.architecture}|tokenizer\.ggml)\.", "", key)] = value
        self.tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
        for kind in {tensor.kind for tensor in self.tensors.values()}:  # raises if unknown
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)

    def renamed(self, names, prefix=""):
        """The metadata as {name: value}. names: {key after the prefix: name}."""
        return {name: self.meta[prefix + key] for key, name in names.items()
                if prefix + key in self.meta}

    def config(self):
        tensors = self.tensors
        raw = {name: self.meta.get(key) or None for key, name in KEYS.items()}
        raw["num_hidden_layers"] = self.n_layer
        size = value_of(raw, "hidden_size", int) // value_of(raw, "num_attention_heads", int)
        head_size = value_of(self.meta, "attention.key_length", int, size)
        rotary_size = value_of(self.meta, "rope.dimension_count", int, head_size)
        gemma_27b = raw["num_hidden_layers"] == 62  # scales by size, not head_size
        recurrent = self.meta.get("attention.recurrent_layers", ())[:self.n_layer]
        expect(not self.meta.get("attention.temperature_scale"),
               "attention.temperature_scale is not supported; use another model")
        if self.meta.get("rope.scaling.finetuned") is False and self.family == "granite":
            raw["position_embedding_type"] = "nope"
        return raw | dict(
            model_type=self.family, vocab_size=tensors["token_embd.weight"].shape[0],
            rope_theta=raw["rope_theta"] or 10000.0, rope_scaling=self.rope_scaling(),
            head_dim=head_size, partial_rotary_factor=rotary_size / head_size,
            query_pre_attn_scalar=size if gemma_27b else head_size,
            tie_word_embeddings="output.weight" not in tensors,
            attention_bias="blk.0.attn_q.bias" in tensors, mlp_bias="blk.0.ffn_up.bias" in tensors,
            attention_output_bias="blk.0.attn_output.bias" in tensors,
            attention_multiplier=raw["attention_multiplier"] or head_size ** -0.5,
            layer_types=[HYBRID_TYPES[int(kind)] for kind in recurrent] or None,
            linear_value_head_dim=raw["linear_key_head_dim"], tiled_heads=True)

    @property
    def n_layer(self):
        """The layers, without those of MTP heads, which come last."""
        return self.meta["block_count"] - self.meta.get("nextn_predict_layers", 0)

    def rope_scaling(self):
        """rope_scaling in config.json, None without. Its attn_factor multiplies cos and sin of any
        rope_type."""
        scaling = dict(rope_type="linear") | self.renamed(SCALING, "rope.scaling.")
        scaling["factor"] = scaling.get("factor") or self.meta.get("rope.scale_linear", 1.0)
        if scaling["rope_type"] == "none":
            scaling |= dict(rope_type="linear", factor=1.0)
        if scaling.get("mscale_all_dim"):
            scaling["mscale"] = 1.0
        for name, keys in ROPE_FACTORS.items():
            if name in self.tensors:
                factors = (dequantized(self.tensors[name]) * scaling["factor"]).tolist()
                scaling |= dict.fromkeys(keys, factors) | dict(
                    rope_type="longrope", attention_factor=1.0)
        if "rope_freqs.weight" in self.tensors:
            scaling["original_max_position_embeddings"] = None  # these hold for all lengths
        is_plain = (scaling["rope_type"], scaling["factor"]) == ("linear", 1)
        return None if is_plain and scaling.get("attn_factor", 1) == 1 else scaling

    def generation_config(self):
        """The sampling defaults and the stop tokens."""
        ids = [self.meta[f"{key}_token_id"] for key in ENDS if f"{key}_token_id" in self.meta]
        sampling = self.renamed(SAMPLING_NAMES, "general.sampling.")
        return sampling | dict(eos_token_id=ids or None, do_sample=True if sampling else None)

    def tokenizer_config(self):
        special = {name: self.tokens[index] for name, index in self.renamed(SPECIAL).items()}
        templates = self.renamed({"tokenizer.chat_template": "default",
                                  "tokenizer.chat_template.tool_use": "tool_use"})
        named = [dict(name=name, template=text) for name, text in templates.items()]
        return special | dict(chat_template=named or None, add_bos_token=self.adds_bos())

    def adds_bos(self):
        """Whether the BOS token comes before any text, in llama.cpp before that of a chat too."""
        by_default = self.meta.get("model") == "llama" or self.meta.get("pre") in PIECE_IS_TOKEN
        return bool(self.meta.get("add_bos_token", by_default)) and "bos_token_id" in self.meta

    def added_tokens(self):
        """added_tokens of tokenizer.json: tokens that are matched before text is split."""
        special = TokenType.CONTROL, TokenType.UNKNOWN
        kinds = np.array(self.meta.get("token_type", ()))[:len(self.tokens)]
        kinds[[text in END_TOKENS for text in self.tokens[:len(kinds)]]] = TokenType.CONTROL
        added = np.isin(kinds, (*special, TokenType.USER_DEFINED)).nonzero()[0]
        strips = self.architecture == "phi3" and self.meta.get("model") == "llama"  # not Phi-4
        return [dict(id=i, content=self.tokens[i], special=kinds[i] in special, normalized=False,
                     single_word=False, lstrip=False,
                     rstrip=strips and self.tokens[i] not in KEEP_SPACE) for i in added.tolist()]

    def tokenizer(self):
        tokens, meta = self.tokens, self.meta
        expect(isinstance(tokens, list) and tokens, "has no list tokenizer.ggml.tokens")
        kind = one_of("tokenizer.ggml.model", meta.get("model"), ("gpt2", "llama"))
        split = meta.get("pre", "default")
        if kind == "gpt2":
            if "pre" not in meta:
                warn(f"{self.path}: has no tokenizer.ggml.pre; text is split as llama.cpp does, "
                     "maybe not as in the training data; use a file that has the key")
            spec = byte_level_spec(tokens, meta["merges"], split)
        else:  # Gemma merges pairs in the order of their ids
            in_order = range(0, -len(tokens), -1)
            scores = in_order if self.family == "gemma3_text" else meta["scores"].tolist()
            normal = (meta["token_type"] == TokenType.NORMAL).nonzero()[0].tolist()
            spec = sentencepiece_spec(tokens, scores, normal, meta.get("add_space_prefix", True))
        spec["added_tokens"] = self.added_tokens()
        if self.adds_bos():
            bos = tokens[meta["bos_token_id"]]
            parts = [dict(SpecialToken=dict(id=bos, type_id=0)),
                     dict(Sequence=dict(id="A", type_id=0))]
            special = {bos: dict(id=bos, ids=[meta["bos_token_id"]], tokens=[bos])}
            spec["post_processor"] = dict(type="TemplateProcessing", single=parts, pair=parts,
                                          special_tokens=special)
        return spec

    def weights(self):
        """{name as in a folder: `StoredTensor`}. All claim bfloat16, the model's default dtype."""
        n_blocks = min(self.meta["block_count"], len(self.tensors))  # the count may be hostile
        names_of = gguf.get_tensor_name_map(gguf.MODEL_ARCH[self.architecture.upper()], n_blocks)
        names = {}  # in the file -> in a folder
        patterns = itertools.chain(*family_of(self.config()).names.values())
        for pattern, i in itertools.product(patterns, range(n_blocks)):
            name = pattern.replace(".N.", f".{i}.")
            if name.endswith(".dt_bias"):  # a whole name, as that of A_log
                names[f"{names_of.get_name(name.replace('dt_bias', 'dt_proj'))}.bias"] = name
            else:
                names[names_of.get_name(name)] = name
        for i in range(self.n_layer, n_blocks):  # of MTP heads
            names |= {f"blk.{i}.nextn.{key}": name for key, name in NEXTN.items()}
        weights = {}
        for name, tensor in self.tensors.items():
            stem, _, kind = name.rpartition(".")
            if name not in ROPE_FACTORS:
                # an unknown name is refused with those of a folder
                folder_name = names.get(name, f"{names.get(stem, stem)}.{kind}")
                weights[self.mtp_name(name, folder_name)] = self.stored_tensor(tensor)
        return weights

    def mtp_name(self, name, folder_name):
        """The name in a folder of a tensor that may be one of the MTP heads, the last blocks."""
        block = re.match(r"blk\.(\d+)\.", name)
        number = int(block[1]) - self.n_layer if block else -1
        if number < 0:
            return folder_name
        return MTP + folder_name.replace(f"model.layers.{block[1]}.", f"layers.{number}.")

    def stored_tensor(self, tensor):
        kind = tensor.kind
        per_block, size = gguf.GGML_QUANT_SIZES[kind]
        shape = tensor.shape
        if tensor.name.endswith("ssm_conv1d.weight"):
            shape = shape[0], 1, shape[1]
        stored = StoredTensor(self.path, shape, torch.bfloat16,
                              partial(self.read_values, tensor), order=self.row_order(tensor))
        if per_block == 1 or len(shape) != 2:
            return stored
        bits = 8 * size / per_block if kind.name in cpu_layers.FORMATS else 8
        return stored._replace(bits=bits, read_packed=partial(self.read_packed, tensor),
                               read_quantized=partial(self.read_quantized, tensor),
                               quantized_bits=5 if kind.name.startswith("Q4") else 9)  # at most

    def read_values(self, tensor):
        """A tensor's values as a folder stores them, but for the order of rows, float32."""
        values = dequantized(tensor)
        name = tensor.name
        if self.architecture in ADDED_TO_NORMS and name.endswith("norm.weight") and (
                not name.endswith("ssm_norm.weight")):
            values -= 1
        if name.endswith("ssm_a"):
            values = (-values).log()
        if name.endswith("ssm_conv1d.weight"):
            values = values[:, None]
        release(tensor)
        return values

    def row_order(self, tensor):
        """The file's row for each row in a folder, None if the order is the same. llama.cpp's RoPE
        pairs neighbouring dimensions."""
        part = tensor.name.split(".")[-2]
        if self.architecture not in INTERLEAVED or part not in PERMUTED:
            return None
        heads = self.meta.get(PERMUTED[part], self.meta["attention.head_count"])
        return torch.arange(tensor.shape[0]).view(heads, -1, 2).transpose(1, 2).flatten()

    def read_packed(self, tensor, order):
        """Packs a tensor's rows in this order. Types without a kernel are rounded to 8 bits."""
        kind = tensor.kind
        if kind.name not in cpu_layers.FORMATS:
            return quantized.pack(self.read_rounded(tensor, order, cpu_layers.FORMATS))
        packed = cpu_layers.pack_blocks(kind.name, kind.value, tensor.data, tensor.shape[1], order)
        release(tensor)
        return packed

    def read_quantized(self, tensor, order):
        """A tensor's rows in this order as a `linear.Quantized`."""
        if tensor.kind.name not in UNIT_SCALES:
            return self.read_rounded(tensor, order, UNIT_SCALES)
        weight = unpack_blocks(tensor.kind, tensor.data)
        release(tensor)
        return quantized.select_rows(weight, order)

    def read_rounded(self, tensor, order, formats):
        """The same for types without a kernel, which are rounded to 8 bits."""
        warn(f"weights of type {tensor.kind.name} are rounded to 8 bits, as there is no kernel for "
             f"them; there are kernels for {', '.join(formats)}")
        weight = quantized.round_weight(self.read_values(tensor), 8, 32)
        return quantized.select_rows(weight, order)


@lru_cache(maxsize=2)
def open_file(*versions):
    """The GGUFFile of parts (path, mtime, size); a changed file is a new cache key."""
    return GGUFFile([path for path, *_ in versions])


def read_part(path, name):
    """The equivalent of a folder's JSON file, {} if there is none. "weights": all tensors."""
    whole = re.sub(r"\.part\d+(of\d+)?$", "", path.name)
    expect(whole == path.name, f"{path}: is a part of a file; join all of them: cat {whole}.part* "
           f"> {whole}")
    check_content(path)
    try:
        file = open_file(*((part, part.stat().st_mtime_ns, part.stat().st_size)
                           for part in gguf_parts(path)))
        return getattr(file, name.removesuffix(".json"), dict)()
    except Exception as error:  # struct, numpy and the package raise many types
        reason = one_line(error)  # names in the file may have line breaks
        if not isinstance(error, InputError):
            reason = (f"truncated, or not a GGUF file that can be read ({type(error).__name__}: "
                      f"{reason:.200}); download it again, or use another")
        raise InputError(f"{path}: {reason}") from error


def dequantized(tensor):
    values = gguf.dequantize(tensor.data, tensor.kind)
    return torch.from_numpy(np.require(values, requirements="W"))


def unpack_blocks(kind, data):
    """A `linear.Quantized` with the values of blocks, uint8 [N, bytes of a row]. The products of
    K-quants' two scales are rounded to float16."""
    N, size = len(data), gguf.GGML_QUANT_SIZES[kind][1]
    blocks = data.reshape(-1, size)
    half = lambda start: blocks[:, start:start + 2].view(np.float16).astype(np.float32)
    scales, minimums = half(208 if kind.name == "Q6_K" else 0), None
    if kind.name in ("Q4_1", "Q5_1"):
        minimums = half(2)
    elif kind.name in ("Q4_K", "Q5_K"):
        factors, offsets = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16])
        scales, minimums = scales * factors, -half(2) * offsets
    elif kind.name == "Q6_K":
        scales = scales * blocks[:, 192:208].view(np.int8)
    start, ones = UNIT_SCALES[kind.name]
    units = blocks.copy()
    units[:, start:start + len(ones)] = np.frombuffer(ones, np.uint8)
    q = torch.from_numpy(gguf.dequantize(units.reshape(data.shape), kind))
    spread = lambda x: torch.from_numpy(x.astype(np.float16)).view(N, -1).T.contiguous()
    scales = spread(scales)
    if kind.name == "Q4_0":  # from -8 on
        q += 8
        minimums = torch.full_like(scales, 8, dtype=torch.uint8)
    elif minimums is not None:
        minimums = spread(minimums)
    is_4_bits = kind.name.startswith("Q4")
    q = quantized.pack_nibbles(q.to(torch.uint8)) if is_4_bits else q.to(torch.int8)
    return Quantized(q, scales, minimums)


def release(tensor):
    """Lets the system reclaim the memory-mapped pages that were read."""
    if hasattr(mmap, "MADV_DONTNEED"):
        tensor.file.madvise(mmap.MADV_DONTNEED)
