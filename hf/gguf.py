"""GGUF files, read by the gguf package: what a Hugging Face folder would hold instead. Facts about
the format are those of llama.cpp's converter (conversion/) and tokenizers (src/llama-vocab.cpp)."""

import contextlib
import itertools
import re
import struct
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH,
    GGUFReader,
    GGUFValueType,
    TokenType,
    get_tensor_name_map,
    quants,
)

from hf import expect, one_of
from hf.families import FAMILIES
from hf.tokenizer import GPT4O_PATTERN, LLAMA3_PATTERN, QWEN_PATTERN, TEKKEN_PATTERN
from model import InputError

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text",
                 "phi3": "phi3", "smollm3": "smollm3"}  # general.architecture -> model_type
PERMUTED = ("llama", "smollm3")  # queries and keys: rotated pairs of rows are neighbours
MOST = 2**22                     # strings in a list, which are read one by one
KEYS = {  # of the metadata, after the architecture's name -> of config.json
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq"}
SCALING = {  # rope.scaling., likewise
    "type": "rope_type", "factor": "factor", "attn_factor": "attention_factor",
    "original_context_length": "original_max_position_embeddings", "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor"}
UNSUPPORTED = ("expert_count", "attention.scale", "attention.temperature_scale", "logit_scale",
               "final_logit_softcapping", "rope.scaling.yarn_log_multiplier")
ROPE_FACTORS = "rope_freqs", "rope_factors_short", "rope_factors_long"  # tensors for config.json
BYTE_LEVEL = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
# tokenizer.ggml.pre -> the first step of splitting a text; whether Llama 3's two rules hold: BOS
# by default, and a piece that is a token is that token
DIGITS = dict(type="Digits", individual_digits=True)
PRE = {"default": (None, False), "gpt-2": (None, False), "smollm": (DIGITS, False),
       "qwen2": (QWEN_PATTERN, False), "deepseek-r1-qwen": (QWEN_PATTERN, False),
       "dbrx": (LLAMA3_PATTERN, False), "smaug-bpe": (LLAMA3_PATTERN, False),
       "gpt-4o": (GPT4O_PATTERN, False), "llama-bpe": (LLAMA3_PATTERN, True),
       "llama-v3": (LLAMA3_PATTERN, True), "llama3": (LLAMA3_PATTERN, True),
       "tekken": (TEKKEN_PATTERN, True)}
ENDS = "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"  # of a turn in a chat


# --------------------------------------------------------------------------------------------------
# The file

class Reader(GGUFReader):
    """GGUFReader, but what it reads must be in the file, and a list is read at once."""

    def _get(self, offset, dtype, count=1, override_order=None):
        if offset + int(count) * np.dtype(dtype).itemsize > len(self.data):
            raise ValueError(f"{count} values at byte {offset} are not in the file")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs, raw_type):
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = GGUFValueType(self._get(orig_offs, np.uint32)[0])
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        start = orig_offs + 12
        if kind == GGUFValueType.STRING:
            values, end = self.read_strings(start, count)
        else:
            array = self._get(start, self.gguf_scalar_to_np[kind], count)
            values, end = array.tolist(), start + array.nbytes
        return end - orig_offs, [values], [0], [GGUFValueType.ARRAY, kind]

    def read_strings(self, offset, count):
        if count > MOST:
            raise ValueError(f"a list of {count} strings")
        data = memoryview(self.data)
        strings = []
        for _ in range(count):
            start = offset + 8
            offset = start + struct.unpack_from("<Q", data, offset)[0]
            strings.append(str(data[start:offset], "utf-8"))
        self._get(offset, np.uint8, 0 if offset <= len(data) else 1)
        return strings, offset


class File(NamedTuple):
    path: Path
    architecture: str
    values: dict   # the metadata, by key
    tensors: dict  # {name: the package's ReaderTensor}

    def get(self, key):
        """A value of the metadata by its key after the architecture's name, or None."""
        return self.values.get(f"{self.architecture}.{key}")


@contextlib.contextmanager
def named_errors(path):
    """Turns whatever is raised into an InputError of one line that names the file."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # numpy and the package raise many kinds
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise InputError(f"{path}: truncated, or not a valid GGUF file ({reason}); fetch it "
                         "again") from error


def open_file(path):
    """The `File` of a path."""
    stat = path.stat()
    return read_file(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=2)
def read_file(path, changed, size):
    with open(path, "rb") as opened:
        magic, version, *counts = struct.unpack("<4sIQQ", opened.read(24))
    expect(magic == b"GGUF", "not a GGUF file; expected one, or a Hugging Face folder")
    expect(version & 65535, "its bytes are in big-endian order, which is not supported")
    one_of("GGUF version", version, (2, 3))
    expect(max(counts) <= 2**16, f"{counts[0]} tensors and {counts[1]} values are too many")
    with np.errstate(over="raise"):  # an offset near 2**64
        reader = Reader(path)
    values = {key: field.parts[-1] if field.types[0] == GGUFValueType.ARRAY else field.contents()
              for key, field in reader.fields.items()}
    name = one_of("general.architecture", values.get("general.architecture"), ARCHITECTURES)
    for kind in {tensor.tensor_type for tensor in reader.tensors}:
        try:  # one block of zeros
            quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            raise InputError(f"values of type {kind.name} are not supported") from None
    return File(path, name, values, {tensor.name: tensor for tensor in reader.tensors})


def read_part(path, name):
    """What would stand in a json file of a folder, {} if nothing."""
    parts = {"config.json": config, "generation_config.json": generation_config,
             "tokenizer_config.json": tokenizer_config, "tokenizer.json": tokenizer}
    with named_errors(path):
        return parts[name](open_file(path)) if name in parts else {}


# --------------------------------------------------------------------------------------------------
# The model

def config(file):
    for key in UNSUPPORTED:
        expect(not file.get(key), f"{file.architecture}.{key} is not supported")
    raw = {theirs: file.get(key) for key, theirs in KEYS.items()}
    heads, size = raw["num_attention_heads"], raw["hidden_size"]
    head_dim = file.get("attention.key_length") or size // heads
    rotated = file.get("rope.dimension_count") or head_dim
    if file.architecture == "gemma3":  # of 62 layers: the 27B model
        large = raw["num_hidden_layers"] == 62
        raw["query_pre_attn_scalar"] = size // heads if large else head_dim
    n_vocab = len(file.values.get("tokenizer.ggml.tokens") or [])
    expect("token_embd.weight" in file.tensors, "has no tensor token_embd.weight")
    rows = shape_of(file.tensors["token_embd.weight"])[0]
    expect(n_vocab <= rows, f"{n_vocab} tokens, but only {rows} embeddings")
    return raw | dict(
        model_type=ARCHITECTURES[file.architecture], vocab_size=rows, head_dim=head_dim,
        partial_rotary_factor=rotated / head_dim, rope_theta=raw["rope_theta"] or 10000.0,
        rope_scaling=rope_scaling(file),
        sliding_window=file.get("attention.sliding_window") or None,
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors)


def rope_scaling(file):
    """Of config.json. Factors that are tensors are those of LongRoPE; Llama 3's hold for all
    lengths."""
    scaling = {theirs: value for key, theirs in SCALING.items()
               if (value := file.get(f"rope.scaling.{key}")) is not None}
    for name in ROPE_FACTORS:
        tensor = file.tensors.get(f"{name}.weight")
        if tensor is None:
            continue
        expect(tensor.n_elements <= 256, f"{name}.weight has {tensor.n_elements} factors")
        factors = dequantized(tensor).tolist()
        if name == "rope_freqs":
            return dict(rope_type="longrope", short_factor=factors, long_factor=factors,
                        attention_factor=1.0)
        scaling |= {"rope_type": "longrope", f"{name.rpartition('_')[2]}_factor": factors}
    return scaling if scaling.get("rope_type", "none") != "none" else None


def open_tensors(path):
    """{name as in a folder: (shape, type, function that gives float32 values)}."""
    with named_errors(path):
        file = open_file(path)
        names = tensor_names(file.architecture)
        found = {}
        for name, tensor in file.tensors.items():
            stem, _, kind = name.rpartition(".")
            number = (re.match(r"blk\.(\d+)\.", stem) or ["", ""])[1]
            known = names.get(re.sub(r"^blk\.\d+\.", "blk.0.", stem))
            if known is not None:
                found[f"{known.replace('.N.', f'.{number}.')}.{kind}"] = (
                    shape_of(tensor), tensor.tensor_type.name, partial(read_values, file, tensor))
                continue
            expect(stem in ROPE_FACTORS or stem.endswith("rot_embd"), f"{name} is not a tensor "
                   f"that models of the architecture {file.architecture} have")
        return found


def tensor_names(architecture):
    """{GGUF's name of a tensor in block 0: our families' name}, both without .weight."""
    family = FAMILIES[ARCHITECTURES[architecture]]
    theirs = get_tensor_name_map(MODEL_ARCH[architecture.upper()], 1)
    names = {}
    for name in itertools.chain(*family.names.values()):
        first = name.replace(".N.", ".0.")
        names[theirs.get_name(family.prefix + first) or theirs.get_name(first)] = name
    return names


def shape_of(tensor):
    return tuple(map(int, reversed(tensor.shape)))


def dequantized(tensor):
    values = quants.dequantize(tensor.data, tensor.tensor_type)
    return torch.from_numpy(np.array(values, copy=not values.flags.writeable or None))


def read_values(file, tensor):
    """The float32 values of a tensor as a folder has them."""
    values = dequantized(tensor)
    if file.architecture == "gemma3" and "norm." in tensor.name:
        return values - 1
    counts = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
    part = tensor.name.split(".")[-2]
    if file.architecture in PERMUTED and part in counts:
        heads = file.get(counts[part]) or file.get(counts["attn_q"])
        pairs = values.unflatten(0, (heads, -1, 2))
        return pairs.transpose(1, 2).reshape(values.shape)
    return values


# --------------------------------------------------------------------------------------------------
# Tokenizer, template, sampling

def tokenizer_value(file, key, default=None):
    return file.values.get(f"tokenizer.ggml.{key}", default)


def token_at(file, key):
    """The text of the token whose id the metadata have, or None."""
    index = tokenizer_value(file, f"{key}_token_id")
    tokens = tokenizer_value(file, "tokens", [])
    expect(index is None or type(index) is int and 0 <= index < len(tokens),
           f"tokenizer.ggml.{key}_token_id {index!r} is not the id of a token")
    return None if index is None else tokens[index]


def tokenizer_config(file):
    found = dict(chat_template=file.values.get("tokenizer.chat_template"))
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        found[f"{name}_token"] = token_at(file, key)
    return {key: value for key, value in found.items() if value is not None}


def generation_config(file):
    """Where texts end: at what the file names, and at the tokens that end a turn; sampling."""
    ids = [tokenizer_value(file, f"{name}_token_id") for name in ("eos", "eot", "eom")]
    if "tokenizer.chat_template" in file.values:
        ids += [i for i, text, _ in added_tokens(file) if text in ENDS]
    ids = [index for index in dict.fromkeys(ids) if index is not None]
    keys = dict(temperature="temp", top_k="top_k", top_p="top_p", min_p="min_p")
    sampling = {ours: value for ours, key in keys.items()
                if (value := file.values.get(f"general.sampling.{key}")) is not None}
    return sampling | dict(eos_token_id=ids or None, do_sample=bool(sampling))


def added_tokens(file):
    """[(id, text, whether special)] of the tokens that are found whole in a text."""
    kinds = tokenizer_value(file, "token_type") or []
    special = TokenType.CONTROL, TokenType.UNKNOWN
    return [(i, text, kind in special) for i, (text, kind) in
            enumerate(zip(tokenizer_value(file, "tokens", []), kinds))
            if kind in special or kind == TokenType.USER_DEFINED]


def tokenizer(file):
    """The dict of a tokenizer.json."""
    tokens = tokenizer_value(file, "tokens")
    expect(isinstance(tokens, list) and tokens, "has no list tokenizer.ggml.tokens")
    kind = tokenizer_value(file, "model")
    one_of("tokenizer.ggml.model", kind, ("gpt2", "llama"))
    vocab = {token: i for i, token in enumerate(tokens)}
    spec, bos = (byte_level if kind == "gpt2" else sentencepiece)(file, vocab)
    spec["model"] = dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix="",
                         end_of_word_suffix="", fuse_unk=False, byte_fallback=False,
                         ignore_merges=False, vocab=vocab) | spec["model"]
    spec["added_tokens"] = [dict(id=i, content=text, special=special, normalized=False)
                            for i, text, special in added_tokens(file)]
    if tokenizer_value(file, "add_bos_token", bos) and (text := token_at(file, "bos")) is not None:
        before, after = (dict(SpecialToken=dict(id=text, type_id=0)),
                         dict(Sequence=dict(id="A", type_id=0)))
        special = {text: dict(id=text, ids=[vocab[text]], tokens=[text])}
        spec["post_processor"] = dict(type="TemplateProcessing", single=[before, after],
                                      pair=[before, after, after], special_tokens=special)
    return spec


def byte_level(file, vocab):
    """(Parts of the spec of a byte-level BPE, whether BOS is before a text by default)."""
    pre = one_of("tokenizer.ggml.pre", tokenizer_value(file, "pre", "default"), PRE)
    split, like_llama3 = PRE[pre]
    if isinstance(split, str):
        split = dict(type="Split", pattern=dict(Regex=split), behavior="Isolated", invert=False)
        steps = [split, BYTE_LEVEL | dict(use_regex=False)]
    else:
        steps = [split, BYTE_LEVEL]
    merges = [pair.split(" ") for pair in tokenizer_value(file, "merges", [])]
    pre_tokenizer = dict(type="Sequence", pretokenizers=steps) if split else BYTE_LEVEL
    return dict(pre_tokenizer=pre_tokenizer, decoder=BYTE_LEVEL,
                model=dict(ignore_merges=like_llama3, merges=merges)), like_llama3


def sentencepiece(file, vocab):
    """Likewise of sentencepiece's BPE: a space is ▁, and a byte is a token where nothing else is.
    Gemma's scores are not the order of its merges; that of its ids is."""
    space = dict(type="Replace", pattern=dict(String=" "), content="▁")
    steps = [dict(type="Replace", pattern=dict(String="▁"), content=" "),
             dict(type="ByteFallback"), dict(type="Fuse")]
    normalizer = space
    if tokenizer_value(file, "add_space_prefix", True):
        normalizer = dict(type="Sequence",
                          normalizers=[dict(type="Prepend", prepend="▁"), space])
        steps.append(dict(type="Strip", content=" ", start=1, stop=0))
    scores = tokenizer_value(file, "scores")
    if file.architecture == "gemma3" or not scores:
        scores = [-i for i in range(len(vocab))]
    kinds = tokenizer_value(file, "token_type") or [TokenType.NORMAL] * len(vocab)
    plain = {token for token, i in vocab.items() if kinds[i] == TokenType.NORMAL}
    pairs = sorted((-scores[vocab[token]], vocab[token], -i) for token in plain
                   for i in range(1, len(token)) if token[:i] in plain and token[i:] in plain)
    tokens = list(vocab)
    merges = [[tokens[index][:-i], tokens[index][-i:]] for _, index, i in pairs]
    unknown = [token for token, i in vocab.items() if kinds[i] == TokenType.UNKNOWN]
    model = dict(merges=merges, fuse_unk=True, byte_fallback=True, unk_token=(unknown or [None])[0])
    return dict(normalizer=normalizer, decoder=dict(type="Sequence", decoders=steps),
                model=model), True
