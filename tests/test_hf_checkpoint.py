"""hf/checkpoint.py: folders load as in transformers; broken ones raise a one-line error."""

import json
import math
import os
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file

from clover import CloverHeads, preset
from conftest import MODELS, convert_llama, edit_json, edit_weights, random_prompts, refusal, toy_model
from drafters.base import BlockConfig, Eagle3Config
from drafters.block import BlockHeads
from drafters.eagle3 import Eagle3Heads
from generate import generate
from hf.families import FAMILIES, family_of, text_config
from model import GPT, GPTConfig, InputError

TINY = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=None, pad_token_id=None)
LLAMA = dict(model_type="llama", rms_norm_eps=1e-5) | TINY
GPT2 = dict(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=128, bos_token_id=None, eos_token_id=None)
ROPES = {
    "linear": dict(rope_type="linear", factor=4.0, rope_theta=10000.0),
    "dynamic": dict(rope_type="dynamic", factor=2.0, rope_theta=500.0),
    "llama3": dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=64, rope_theta=500.0),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, rope_theta=10000.0),
    "yarn-scaled": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, rope_theta=500.0,
                        beta_fast=8.0, beta_slow=2.0, mscale=0.7, mscale_all_dim=1.3, truncate=False),
    "longrope": dict(rope_type="longrope", short_factor=[1.0 + i / 5 for i in range(8)], long_factor=[9.0] * 8,
                     rope_theta=10000.0),
}
LAYERED = {kind: ROPES["yarn"] | dict(rope_type="default") for kind in ("full_attention", "sliding_attention")}
PARTIAL = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)
GEMMA = dict(num_hidden_layers=4, sliding_window=28, head_dim=32, query_pre_attn_scalar=20, layer_types=None)
SEES = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=16,
            patch_size=4)
VISION = {"gemma3": dict(vision_config=SEES, mm_tokens_per_image=4),
          "mistral3": dict(vision_config=SEES | dict(head_dim=8)),
          "llava": dict(vision_config=SEES | dict(model_type="clip_vision_model", projection_dim=16)),
          "qwen3_5": dict(vision_config=dict(depth=1, hidden_size=16, intermediate_size=32, num_heads=2, patch_size=4,
                                             out_hidden_size=64, num_position_embeddings=16))}
MULTIPLIERS = dict(embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.1, logits_scaling=8.0)
DENSE = MULTIPLIERS | dict(num_local_experts=0, shared_intermediate_size=96, intermediate_size=1,
                           layer_types=["full_attention"] * 2)
HYBRID = dict(num_hidden_layers=4, head_dim=32, linear_num_value_heads=4, linear_num_key_heads=2,
              linear_key_head_dim=16, linear_value_head_dim=24)
# Windows are at most a third of the tokens.
FOLDERS = {  # name: (family in transformers, fields of its config)
    "gpt2": ("GPT2", GPT2),
    "gpt2-wide": ("GPT2", GPT2 | dict(n_inner=96, tie_word_embeddings=False)),
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", dict(tie_word_embeddings=True)),  # like SmolLM
    "llama-biased": ("Llama", dict(attention_bias=True, mlp_bias=True, head_dim=32)),
    **{f"llama-{kind}": ("Llama", dict(rope_parameters=ROPES[kind])) for kind in ROPES},
    "mistral-window": ("Mistral", dict(sliding_window=28, head_dim=32)),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", dict(use_sliding_window=True, sliding_window=1, max_window_layers=1)),
    "qwen3": ("Qwen3", dict(head_dim=32)),
    "phi3-window": ("Phi3", dict(sliding_window=17)),
    "phi3-longrope": ("Phi3", dict(rope_parameters=ROPES["longrope"], original_max_position_embeddings=100)),
    "phi4-mini": ("Phi3", dict(  # 12 of 16 dimensions are rotated: 6 pairs
        rope_parameters=ROPES["longrope"] | dict(
            partial_rotary_factor=0.75, short_factor=[1.0 + i / 5 for i in range(6)], long_factor=[9.0] * 6),
        original_max_position_embeddings=100)),
    "smollm3": ("SmolLM3", dict(num_hidden_layers=5)),
    "smollm3-window": ("SmolLM3", dict(num_hidden_layers=3, no_rope_layers=[1, 0, 1], use_sliding_window=True,
                                       sliding_window=28, tie_word_embeddings=False)),
    "olmo2": ("Olmo2", dict(attention_bias=True)),
    "olmo3": ("Olmo3", dict(num_hidden_layers=5, sliding_window=28)),
    "olmo3-yarn": ("Olmo3", dict(num_hidden_layers=4, sliding_window=20, rope_parameters=LAYERED | dict(
        full_attention=ROPES["yarn"]))),
    "gemma3": ("Gemma3", GEMMA | dict(num_hidden_layers=7)),
    "gemma3-untied": ("Gemma3", GEMMA | dict(tie_word_embeddings=False, sliding_window=15, layer_types=[
        "full_attention", "sliding_attention"] * 2)),
    "gemma3-vision": ("Gemma3", GEMMA),
    "llava-vision": ("Llama", dict(tie_word_embeddings=True)),
    "mistral3-vision": ("Mistral", dict(sliding_window=None, head_dim=32)),
    "granite": ("Granite", MULTIPLIERS | dict(tie_word_embeddings=True)),
    "granite-biased": ("Granite", MULTIPLIERS | dict(attention_bias=True, mlp_bias=True)),
    "granite-4": ("GraniteMoeHybrid", DENSE | dict(position_embedding_type="rope")),
    "granite-4-nope": ("GraniteMoeHybrid", DENSE),
    "glm": ("Glm", dict(head_dim=32, rope_parameters=PARTIAL, attention_bias=True)),
    "glm4": ("Glm4", dict(head_dim=16, rope_parameters=PARTIAL)),
    "qwen3_5": ("Qwen3_5", HYBRID),
    "qwen3_5-1": ("Qwen3_5", HYBRID | dict(linear_num_key_heads=4, tie_word_embeddings=True, attention_bias=True)),
    "qwen3_5-3": ("Qwen3_5", HYBRID | dict(linear_num_value_heads=6, linear_conv_kernel_dim=3, layer_types=[
        "full_attention", *["linear_attention"] * 3])),
    "qwen3_5-vision": ("Qwen3_5", HYBRID),
    **{f"baichuan{kind}": ("Llama", {}) for kind in ("-7b", "2-7b", "-13b", "2-13b")},
}
LIKE_LLAMA = *(name for name in FOLDERS if "llama" in name), "mistral3-vision", "phi3-longrope", "baichuan-7b"


def theirs_of(name, **changes):
    """The transformers model of a folder, with random norms and biases too. changes: fields of its config."""
    transformers = pytest.importorskip("transformers", reason="needs pip install transformers")
    kind, flags = FOLDERS[name]
    flags = flags if kind == "GPT2" else TINY | flags | (dict(num_key_value_heads=4) if "baichuan" in name else {})
    flags = flags | changes
    torch.manual_seed(0)
    model = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")
    config = getattr(transformers, f"{kind}TextConfig" if kind in ("Gemma3", "Qwen3_5") else f"{kind}Config")(**flags)
    if name.endswith("vision"):  # the text model of a multimodal one
        outer = name.split("-")[0]
        model = getattr(transformers, f"{outer.capitalize()}ForConditionalGeneration")
        config = getattr(transformers, f"{outer.capitalize()}Config")(
            text_config=config.to_dict(), tie_word_embeddings=config.tie_word_embeddings, **VISION[outer])
    model = model(config).eval()
    with torch.no_grad():
        for _, p in model.named_parameters():
            p.add_((0.1 if p.dim() == 2 else 0.3) * torch.randn(p.shape))
    return model


def their_logits(name, model, tokens):
    """Logits from transformers; for Baichuan, from an equivalent Llama model."""
    with torch.no_grad():
        if name.startswith("baichuan2"):
            model.lm_head.weight.copy_(torch.nn.functional.normalize(model.lm_head.weight, dim=-1))
        if not name.endswith("13b"):
            return model(tokens).logits
        n = tokens.shape[1]  # position 0: no rotation; ALiBi as a mask (arXiv 2108.12409, section 3)
        slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256])
        places = torch.arange(n)
        mask = slopes[:, None, None] * (places[None, :] - places[:, None]) + torch.full((n, n), -math.inf).triu(1)
        return model(tokens, attention_mask=mask[None], position_ids=torch.zeros_like(tokens)).logits


def save_theirs(name, model, path, shards=False):
    model.save_pretrained(path, **dict(max_shard_size="60KB") if shards else {})
    if name.startswith("baichuan"):
        rename_to_baichuan(path, name)
    return path


def rename_to_baichuan(path, name):
    """Rewrites a Llama folder in Baichuan's format, in one file."""
    files = sorted(path.glob("*.safetensors"))
    save_file({key: value for file in files for key, value in load_file(file).items()}, path / "model.safetensors")
    convert_llama(path, "baichuan", model_max_length=128, **dict(z_loss_weight=0) if "2" in name else {},
                  **dict(max_position_embeddings=None) if name.endswith("13b") else {})


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_and_texts_equal_transformers(name, tmp_path):
    """Catches a misread field, swapped weights, a wrong RoPE or cache, bad shards, a folder that only we can read."""
    def check(logits):
        torch.testing.assert_close(logits, want, atol=1e-4, rtol=0)

    theirs, tokens = theirs_of(name), torch.tensor(random_prompts([90, 90]))
    whole, sharded = (save_theirs(name, theirs, tmp_path / kind, kind == "sharded") for kind in ("whole", "sharded"))
    assert "baichuan" in name or len(list(sharded.glob("*.safetensors"))) > 2
    load = lambda folder: GPT.from_pretrained(folder, device="cpu", packed=False)
    want, ours = their_logits(name, theirs, tokens), load(whole)
    check(ours.lm_head(ours(tokens)))
    if name in LIKE_LLAMA:
        ours.save_pretrained(tmp_path / "ours")
        same = load(tmp_path / "ours")
        assert same.config == ours.config and all(map(torch.equal, same.parameters(), ours.parameters()))
        import transformers
        check(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)(tokens).logits)
    prompt = random_prompts([20])[0]
    text = generate(GPT.from_pretrained(whole, device="cpu"), [prompt], 64).tokens[0]
    their_text = their_logits(name, theirs, torch.tensor([prompt + text]))[0].argmax(-1).tolist()
    assert len(text) == 64 and text == their_text[len(prompt) - 1:-1]  # transformers' argmax at each position
    model = load(sharded)
    heads = CloverHeads(preset("clover"), model).requires_grad_(False).eval()
    assert generate(model, [prompt, prompt[:7]], 24, heads, tree_size=12).tokens[0] == text[:24]


def pickled(path, value, **options):
    (path / "model.safetensors").unlink()
    torch.save(value, path / "pytorch_model.bin", **options)


def without_prefix(tensors):
    """The original GPT-2 folder, with stored masks, one larger than any weight."""
    masks = {"h.0.attn.bias": torch.ones(1, 1, 512, 512, dtype=torch.bool), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    return {key.removeprefix("transformer."): value for key, value in tensors.items()} | masks


def as_version_4(tensors):
    """The names of transformers 4, with model. first; vision tensors have a type that would be refused if read."""
    renamed = {key.replace("language_model.model.", "model.language_model.").replace("language_model.lm", "lm"): value
               for key, value in tensors.items()}
    return {key: value.to(torch.int8) if "vision" in key else value for key, value in renamed.items()}


def with_a_head(tensors):
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}


def with_a_head_alone(tensors):
    return {key.replace("model.embed_tokens", "lm_head"): value for key, value in tensors.items()}


@pytest.mark.parametrize("name, rename, zipped", [
    ("gpt2", dict, True), ("gpt2", dict, False),  # torch's current and legacy formats
    ("gpt2", without_prefix, None), ("gemma3-vision", as_version_4, None), ("mistral3-vision", as_version_4, None),
    ("qwen3_5-vision", as_version_4, None),
    ("llama-tied", with_a_head, None), ("llama-tied", with_a_head_alone, None)])
def test_other_names_and_files_of_the_same_weights(name, rename, zipped, tmp_path):
    """Catches .bin files or renamed tensors that load as other weights."""
    want = GPT.from_pretrained(save_theirs(name, theirs_of(name), tmp_path), device="cpu", packed=False)
    tensors = rename(load_file(tmp_path / "model.safetensors"))
    if zipped is None:
        save_file(tensors, tmp_path / "model.safetensors")
    else:
        pickled(tmp_path, tensors, _use_new_zipfile_serialization=zipped)
    got = GPT.from_pretrained(tmp_path, device="cpu", packed=False)
    assert all(map(torch.equal, want.state_dict().values(), got.state_dict().values()))


def test_an_lm_head_that_differs_from_a_tied_table_is_kept_as_by_transformers(tmp_path, capsys):
    """Catches an LM head that is silently dropped because config.json says it is tied."""
    theirs, tokens = theirs_of("llama-tied"), torch.tensor(random_prompts([20]))
    theirs.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["lm_head.weight"] = torch.randn_like(state["model.embed_tokens.weight"])
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    want = type(theirs).from_pretrained(tmp_path)(tokens).logits.detach()
    for packed in (False, None):
        ours = GPT.from_pretrained(tmp_path, torch.float32, "cpu", packed=packed)
        torch.testing.assert_close(ours.lm_head(ours(tokens)), want, atol=1e-4, rtol=0)
    assert not ours.config.tied
    assert capsys.readouterr().err.count("ties the LM head to the embeddings, but") == 1


@pytest.mark.parametrize("kind", ROPES)
def test_rope_settings_in_all_spellings(kind):
    """Catches settings read from one place or under one name only, and nulls treated as values."""
    nulls = ("rope_scaling", "partial_rotary_factor", "rope_theta", "attention_bias", "quantization_config")
    assert family_of(LLAMA | dict.fromkeys(nulls)).config == family_of(LLAMA).config
    want = family_of(LLAMA | dict(rope_parameters=ROPES[kind], rope_theta=None)).config
    assert want.rope_theta == ROPES[kind]["rope_theta"]
    scaling = {key: value for key, value in ROPES[kind].items() if key != "rope_theta"}
    for name in ("rope_type", "type"):
        renamed = {name if key == "rope_type" else key: value for key, value in scaling.items()}
        assert family_of(LLAMA | dict(rope_scaling=renamed, rope_theta=want.rope_theta)).config == want


YARN, LONGROPE, WINDOW = ROPES["yarn"], ROPES["longrope"], dict(num_hidden_layers=8, sliding_window=9)
OLDER = [  # model_type, other fields of a config.json, field of the GPTConfig, value
    ("mistral", dict(sliding_window=100), "block_size", 128), ("llama", dict(rope_scaling=YARN), "block_size", 128),
    ("llama", dict(rope_scaling=YARN | dict(original_max_position_embeddings=128)), "block_size", 512),
    ("phi3", dict(rope_scaling=LONGROPE, original_max_position_embeddings=64), "block_size", 64),
    ("llama", dict(max_position_embeddings=64, max_sequence_length=256, rope_scaling=dict(type="linear", factor=4.0)),
     "block_size", 256), ("llama", dict(max_position_embeddings=None, max_sequence_length=64), "block_size", 64),
    ("llama", dict(max_sequence_length=64), "block_size", 128),
    ("qwen2", WINDOW | dict(use_sliding_window=True, max_window_layers=6), "windows", (0,) * 6 + (9, 9)),
    ("qwen3", WINDOW | dict(use_sliding_window=True), "windows", ()), ("phi3", {}, "windows", ()),
    ("olmo3", dict(num_hidden_layers=8), "windows", (4096, 4096, 4096, 0) * 2),
    ("smollm3", WINDOW | dict(use_sliding_window=True, no_rope_layer_interval=2), "windows", (0, 9) * 4),
    ("gemma3_text", WINDOW | dict(sliding_window_pattern=2), "windows", (9, 0) * 4)]


@pytest.mark.parametrize("kind, said, field, want", OLDER)
def test_the_contexts_end_and_the_windows_of_older_folders(kind, said, field, want):
    """Bug: a context longer than the RoPE scaling allows; Vicuna 1.5 16k ends at a quarter of its own; Llama 1, which
    has another name for it, is refused; a folder without layer_types, whose pattern is only in transformers' code."""
    assert getattr(family_of(LLAMA | said | dict(model_type=kind)).config, field) == want


SPARSE = dict(num_hidden_layers="n_layer", hidden_size="n_embd", intermediate_size="n_inner", vocab_size="vocab_size",
              num_attention_heads="n_head", num_key_value_heads="n_kv_head", max_position_embeddings="block_size",
              rms_norm_eps="norm_eps", tie_word_embeddings="tied", head_dim="head_size")


@pytest.mark.parametrize("outer, kind, said", [
    ("llava", "llama", {}), ("llava", "mistral", {}), ("llava", "qwen2", {}), ("gemma3", "gemma3_text", dict(
        hidden_size=2560, intermediate_size=10240, num_hidden_layers=34, sliding_window=1024,
        rope_scaling=dict(factor=8.0, rope_type="linear")))])
def test_what_a_text_config_leaves_out_is_transformers_default(outer, kind, said):
    """Bug: LLaVA 1.5, whose text_config names five values, is refused or gets another number of layers; the same for
    Gemma 3's larger models, which omit the vocabulary size, the heads and the context length."""
    theirs = pytest.importorskip("transformers").AutoConfig.for_model(kind, **said)
    ours = family_of(text_config(dict(model_type=outer, text_config=said | dict(model_type=kind)))).config
    assert {key: getattr(theirs, key, None) or getattr(ours, name) for key, name in SPARSE.items()} == {
        key: getattr(ours, name) for key, name in SPARSE.items()}
    if kind == "gemma3_text":
        assert (ours.rope_theta, ours.window_theta, ours.attn_scale) == (1e6, 1e4, 256 ** -0.5)
        assert ours.rope_frequencies.scaling == dict(rope_type="linear", factor=8.0)
        assert [kind == "sliding_attention" for kind in theirs.layer_types] == [w > 0 for w in ours.windows]


@pytest.mark.parametrize("outer", ["gemma3", "mistral3", "llava", "internvl", "aya_vision", "qwen2_5_vl"])
def test_an_lm_head_is_tied_where_transformers_ties_it(outer):
    """Bug: "the weights lack lm_head.weight" where only the outer part of config.json says that it is tied."""
    transformers = pytest.importorskip("transformers")
    kind = "gemma3_text" if outer == "gemma3" else "qwen2_5_vl_text" if outer == "qwen2_5_vl" else "llama"
    for said in product((None, True, False), repeat=2):
        whole, text = ({} if value is None else dict(tie_word_embeddings=value) for value in said)
        raw = whole | dict(text_config=dict(model_type=kind) | text)
        theirs = transformers.AutoConfig.for_model(outer, **raw)
        assert text_config(dict(model_type=outer) | raw)["tie_word_embeddings"] == theirs.tie_word_embeddings, said


def test_granites_states_are_those_of_its_authors(tmp_path):
    """Bug: published heads read states that are 1 / 0.22 times as large as those that they were trained on."""
    theirs, tokens = theirs_of("granite"), torch.tensor(random_prompts([30]))
    ours = GPT.from_pretrained(save_theirs("granite", theirs, tmp_path), torch.float32, "cpu", packed=False)
    want = theirs(tokens, output_hidden_states=True).hidden_states
    layers = GPTConfig(vocab_size=97, n_embd=64, n_layer=1, block_size=128)
    for heads in (Eagle3Heads(Eagle3Config(layers, 3, (0, 1)), ours), BlockHeads(BlockConfig(layers, 3, (0, 1)), ours)):
        states = heads.states(ours(tokens, layers=(0, 1)))
        torch.testing.assert_close(states, torch.cat(want[:2], -1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
def test_casts_do_not_change_values(name, stored, tmp_path):
    """Catches a cast before norms are offset, or another hash after a cast."""
    path = save_theirs(name, theirs_of(name), tmp_path)
    tensors = {key: value.to(stored) for key, value in load_file(path / "model.safetensors").items()}
    save_file(tensors, path / "model.safetensors")
    want, *others = (GPT.from_pretrained(path, dtype, "cpu", packed=False)
                     for dtype in (torch.float32, torch.float16, torch.bfloat16))
    for got in others:
        pairs = zip(want.parameters(), got.parameters())
        assert got.hash == want.hash and all(torch.equal(a.to(got.dtype), b) for a, b in pairs)


def test_weights_that_do_not_fit_the_memory_are_refused_before_they_are_read(tmp_path, monkeypatch):
    """Catches loading that makes the machine swap."""
    toy_model().save_pretrained(tmp_path)
    monkeypatch.setattr("common.machine.free_memory", lambda device: 1000)
    with pytest.raises(InputError, match=r"its weights take 2\d\d.\d? ?kB, but 1 kB are free on cpu"):
        GPT.from_pretrained(tmp_path, device="cpu")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


class Code:
    def __reduce__(self):
        return print, ("code ran",)


def rope(**settings):
    return dict(rope_parameters=settings)


def one_shard(path, name, file=None):
    """Replaces the weights by a shard index, and moves them to `file` or deletes them."""
    weights = path / "model.safetensors"
    if file is None:
        weights.unlink()
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        weights.rename(file)
    (path / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=dict(a=name))))


SIZE_KEYS = "vocab_size", "hidden_size", "intermediate_size", "num_key_value_heads", "num_hidden_layers", "head_dim"
BROKEN = {  # case: (changes to config.json or a function that breaks the folder, part of the message)
    "another family": (dict(model_type="mamba"), f"supported: {', '.join(FAMILIES)}"),
    "a mixture": (dict(model_type="qwen3_5_moe"), "'qwen3_5_moe'"),
    "soft-capping": (dict(final_logit_softcapping=30.0), "final_logit_softcapping"),
    "weights are cut": (lambda p: os.truncate(p / "model.safetensors", 5000), "model.safetensors: truncated"),
    "header of 2^63 bytes": (lambda p: (p / "model.safetensors").write_bytes(b"\0" * 7 + b"\x80{}"), "too large"),
    "flag that is text": (dict(tie_word_embeddings="false"), "tie_word_embeddings"),
    "rope with few factors": (rope(rope_type="longrope", short_factor=[1.0], long_factor=[1.0]), "a list of 8 numbers"),
    "a factor of no type": (dict(rope_scaling=dict(factor=8.0), rope_parameters=None), "rope_type"),
    "scaled windows": (dict(model_type="gemma3_text", **rope(sliding_attention=dict(rope_type="linear"))), "windows"),
    "another GPT-2": (dict(model_type="gpt2", scale_attn_weights=False), "scale_attn_weights"),
    **{f"large {key}": ({key: 2**24}, "") for key in SIZE_KEYS},
    "all sizes large": (dict.fromkeys(SIZE_KEYS[:3], 2**24), "expected floats of shape (16777216, 16777216)"),
    "quantised, says a type": (lambda p: edit_weights(p, lambda t: t.update(
        {"model.norm.weight": t["model.norm.weight"].to(torch.float8_e4m3fn)})), "float8_e4m3fn"),
    "tensor missing": (lambda p: edit_weights(p, lambda t: t.pop("model.norm.weight")), "lack norm.weight"),
    "shard missing": (lambda p: one_shard(p, "model-2.safetensors"), "model-2.safetensors: truncated"),
    "shard above the folder": (lambda p: one_shard(p, "../b.safetensors", p.parent / "b.safetensors"), "r/b.safet"),
    "pointer instead of a pickle": (lambda p: (p / "model.safetensors").rename(p / "pytorch_model.bin").write_text(
        POINTER), "pytorch_model.bin: is a git-lfs pointer"),
    "shards without their index": (lambda p: (p / "model.safetensors").rename(p / "model-00001-of-00002.safetensors"),
                                   "the index.json of its shards"),
    "LoRA adapter": (lambda p: (p / "config.json").rename(p / "adapter_config.json"), "folder: is a LoRA adapter"),
    "weights beside a LoRA adapter's": (lambda p: edit_weights(p, lambda t: t.update(
        {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 64)})), "a LoRA adapter"),
    "experts": (dict(model_type="granitemoehybrid"), "num_local_experts 8 is not supported; supported: 0"),
    "recurrent": (dict(model_type="granitemoehybrid", num_local_experts=0, layer_types=["mamba"]), "type 'mamba'"),
    "value heads that share no key": (dict(
        model_type="qwen3_5_text", head_dim=64, linear_num_value_heads=24, full_attention_interval=2), "of 16 value"),
    "pickle with code": (lambda p: pickled(p, dict(a=Code())), "or contains more than tensors"),
    "pickle of a huge view": (lambda p: pickled(p, {"a.bias": torch.ones(1).expand(10**9, 10**6)}), "not store"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_and_harmful_folders_are_refused_at_once_in_one_line(case, tmp_path, capsys):
    """Catches a folder that loads as garbage, reads other files, runs code, or is trusted before it is checked."""
    path = tmp_path / "folder"
    toy_model().save_pretrained(path)
    breaks, says = BROKEN[case]
    edit_json(path / "config.json", **breaks) if isinstance(breaks, dict) else breaks(path)
    refusal(lambda: GPT.from_pretrained(path), says)
    assert "code ran" not in capsys.readouterr().out


@pytest.mark.parametrize("shape", sorted({*MODELS} - {"llama", "untied-biased"}))
def test_what_llama_cannot_say_is_not_written(shape, tmp_path):
    """Catches a folder that loads as another model."""
    said = next(iter(MODELS[shape]))
    refusal(lambda: toy_model(**MODELS[shape]).save_pretrained(tmp_path / "out"), "has no way to say", f"{said}=")
    assert not (tmp_path / "out").exists()
