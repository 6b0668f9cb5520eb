"""model.py: one sequence gives one answer however it is fed, and checkpoint folders mean what transformers says they do."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import model as models
from conftest import SHAPES, random_prompts, toy_model
from model import GPT, InputError, atomic_write, read_config

TINY = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=None)


def transformers_model(kind, **flags):
    transformers = pytest.importorskip("transformers", reason="transformers is optional")
    config = getattr(transformers, f"{kind}Config")(**TINY | flags)
    torch.manual_seed(0)
    return getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config).eval()


def chain(n):
    """Ancestors of n nodes that follow each other."""
    return ((2 << torch.arange(n)) - 1)[None]


# ---------------------------------------------------------------------------------------------------------------------
# One sequence, four ways

@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_steps_and_trees_agree(shape):
    """Catches a position, a cache row or a mask that is off in one of the ways to feed tokens."""
    model = toy_model(**SHAPES[shape])
    tokens = torch.tensor(random_prompts([23]))
    want = model(tokens)  # no cache
    chunked, single = model.new_cache(1, 40), model.new_cache(1, 40)
    got = torch.cat([model.prefill(tokens[:, i:i + 5], chunked, i) for i in range(0, 23, 5)], dim=1)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert chunked.lengths.tolist() == [23]
    for i in range(23):
        step = model(tokens[:, i:i + 1], torch.tensor([[i]]), single, torch.ones(1, 1, dtype=torch.int64))
        torch.testing.assert_close(step[0, 0], want[0, i], atol=1e-4, rtol=1e-4)
        single.lengths += 1
    torch.testing.assert_close(single.kv[:, :, :, :, :23], chunked.kv[:, :, :, :, :23], atol=1e-4, rtol=1e-4)
    tree = model.new_cache(1, 40)
    model.prefill(tokens[:, :13], tree)
    nodes = model(tokens[:, 13:], torch.arange(13, 23)[None], tree, chain(10))
    torch.testing.assert_close(nodes, want[:, 13:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_tree_nodes_see_their_own_path(shape):
    """Catches siblings that see each other and ragged sequences that see another's length."""
    model = toy_model(**SHAPES[shape])
    prompts = [torch.tensor(p) for p in random_prompts([9, 1, 20])]
    parents = [0, 0, 0, 1, 1, 3]
    depths = torch.tensor([0, 1, 1, 2, 2, 3])
    ancestors = [1]
    for i, parent in enumerate(parents[1:], 1):
        ancestors.append(ancestors[parent] | 1 << i)
    nodes = torch.tensor(random_prompts([6, 6, 6], seed=1))
    cache = model.new_cache(3, 40)
    for b, prompt in enumerate(prompts):
        model.prefill(prompt[None], cache.slots(b))
    assert cache.lengths.tolist() == [9, 1, 20]
    hidden = model(nodes, cache.lengths[:, None] + depths, cache, torch.tensor(ancestors).expand(3, -1))
    for b, prompt in enumerate(prompts):
        for i in range(6):
            path = [j for j in range(6) if ancestors[i] >> j & 1]
            want = model(torch.cat((prompt, nodes[b, path]))[None])[0, -1]
            torch.testing.assert_close(hidden[b, i], want, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# Packed weights

@pytest.mark.skipif(not models.PACKS, reason="this torch has no oneDNN")
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_weights_give_the_same_and_never_an_old_result(shape, monkeypatch):
    """Catches a copy that outlives its weight: changed in place, replaced, moved, cast, or wanted for gradients."""
    model, tokens = toy_model(**SHAPES[shape]), torch.tensor(random_prompts([12]))
    used = []
    monkeypatch.setattr(models, "packed_linear", lambda *a, call=models.packed_linear: used.append(a) or call(*a))

    def check(packed):
        with torch.inference_mode():
            used.clear()
            got = model.lm_head(model(tokens))
            assert bool(used) == packed
        with torch.no_grad():  # never packed
            used.clear()
            torch.testing.assert_close(got, model.lm_head(model(tokens)), atol=1e-4, rtol=1e-4)
            assert not used
    check(packed=False)
    models.pack(model)
    check(packed=True)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.01)
    check(packed=False)
    models.pack(model)
    check(packed=True)
    model = copy.deepcopy(model)
    check(packed=False)
    models.pack(model)
    for layer in list(model.modules()):
        if isinstance(layer, models.Linear):
            layer.weight = torch.nn.Parameter(layer.weight * 1.01, requires_grad=False)
    check(packed=False)
    models.pack(model)
    model.requires_grad_(True)
    models.pack(model)
    check(packed=False)
    model.requires_grad_(False)
    models.pack(model)
    model.to(torch.float64)
    check(packed=False)


def test_packing_needs_room(monkeypatch):
    """Catches copies that push a large model out of the memory."""
    model = toy_model()
    monkeypatch.setattr(models, "free_memory", lambda device: 1000)
    models.pack(model)
    assert model.head.copy is None


@pytest.mark.skipif(not models.PACKS, reason="this torch has no oneDNN")
@pytest.mark.parametrize("rows", [None, [90, 4, 17, 33, 60]])
def test_the_lm_head_finds_the_same_tokens_packed(rows):
    """Catches a part of the vocabulary that belongs to other rows or to an older weight."""
    model, hidden = toy_model(), torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    rows = None if rows is None else torch.tensor(rows, dtype=torch.int32)
    for factor in (1.0, 1.5):
        with torch.no_grad():
            model.head.weight.mul_(factor)
        want = model.head.topk(hidden, 4, rows)
        models.pack(model)
        with torch.inference_mode():
            got = model.head.topk(hidden, 4, rows)
        torch.testing.assert_close(got[0], want[0], atol=1e-5, rtol=1e-5)
        assert torch.equal(got[1], want[1])


def test_free_memory_is_a_number():
    assert 2**20 < models.free_memory("cpu") < 2**50


# ---------------------------------------------------------------------------------------------------------------------
# Folders

FOLDERS = {
    "llama": ("Llama", dict()),
    "llama-tied": ("Llama", dict(tie_word_embeddings=True)),
    "llama-biased": ("Llama", dict(attention_bias=True, mlp_bias=True, head_dim=32)),
    "llama-theta": ("Llama", dict(rope_parameters=dict(rope_type="default", rope_theta=500000.0))),
    "qwen2": ("Qwen2", dict()),
    "qwen3": ("Qwen3", dict(head_dim=32)),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_equal_transformers_both_ways(name, tmp_path):
    """Catches a misread flag, a swapped weight or a wrong rotation; and that what we write means the same there."""
    kind, flags = FOLDERS[name]
    theirs = transformers_model(kind, **flags)
    with torch.no_grad():
        for name, p in theirs.named_parameters():  # transformers starts norms at 1 and biases at 0, which hides mistakes
            p.add_(0.1 * torch.randn(p.shape))
    tokens = torch.tensor(random_prompts([31, 31]))
    want = theirs(tokens).logits
    theirs.save_pretrained(tmp_path / "theirs")
    ours = GPT.from_pretrained(tmp_path / "theirs", device="cpu")
    torch.testing.assert_close(ours.lm_head(ours(tokens)), want, atol=1e-4, rtol=1e-4)
    ours.save_pretrained(tmp_path / "ours")
    again = type(theirs).from_pretrained(tmp_path / "ours", dtype=torch.float32)
    torch.testing.assert_close(again(tokens).logits, want, atol=1e-4, rtol=1e-4)


def test_gpt2_shape_equals_transformers():
    """Catches an activation, norm or learned position that differs from GPT-2's."""
    theirs = transformers_model("GPT2", n_embd=64, n_layer=2, n_head=4, n_positions=128, n_inner=96)
    ours = toy_model(**SHAPES["gpt2"])
    state, source = {}, theirs.transformer.state_dict()
    names = {"embed.weight": "wte.weight", "embed_positions.weight": "wpe.weight", "head.weight": "wte.weight",
             "norm.weight": "ln_f.weight", "norm.bias": "ln_f.bias"}
    parts = {"attn_norm": "ln_1", "attn.qkv": "attn.c_attn", "attn.proj": "attn.c_proj", "mlp_norm": "ln_2",
             "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    for i in range(2):
        for mine, its in parts.items():
            names |= {f"blocks.{i}.{mine}.{kind}": f"h.{i}.{its}.{kind}" for kind in ("weight", "bias")}
    for mine, its in names.items():
        state[mine] = source[its].T if source[its].dim() == 2 and its.startswith("h.") else source[its]
    state["embed_positions.weight"] = torch.cat((state["embed_positions.weight"], torch.zeros(128, 64)))
    ours.load_state_dict(state)
    tokens = torch.tensor(random_prompts([31]))
    torch.testing.assert_close(ours.lm_head(ours(tokens)), theirs(tokens).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", ["llama", "untied-biased"])
def test_save_and_load(shape, tmp_path):
    """Catches a weight that is lost, renamed or split wrongly on the way to disk and back, in one file and in shards."""
    model = toy_model(**SHAPES[shape])
    model.save_pretrained(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    same = GPT.from_pretrained(tmp_path, device="cpu")
    assert same.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), same.state_dict().values()))
    tensors = load_file(tmp_path / "model.safetensors")
    shards = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(shards.values()):
        save_file({n: t for n, t in tensors.items() if shards[n] == file}, tmp_path / file)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=shards)))
    sharded = GPT.from_pretrained(tmp_path, device="cpu", dtype=torch.bfloat16)
    assert sharded.dtype == torch.bfloat16
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(model.state_dict().values(), sharded.state_dict().values()))


def test_rope_theta_in_both_spellings(tmp_path):
    """Catches a theta that is read from one place only."""
    toy_model(rope_theta=77.0).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    for gone in ("rope_theta", "rope_parameters"):
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if k != gone}))
        assert read_config(tmp_path).rope_theta == 77.0


def edit_config(path, **changes):
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({k: v for k, v in (raw | changes).items() if v is not None}))


def edit_weights(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


BROKEN = {
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "no such file"),
    "no config": (lambda p: (p / "config.json").unlink(), "no such file"),
    "config is cut": (lambda p: (p / "config.json").write_text('{"a": '), "cannot be read as json"),
    "config is a list": (lambda p: (p / "config.json").write_text("[1]"), "expected a json object"),
    "config is not text": (lambda p: (p / "config.json").write_bytes(b"\xff\xfe\x80"), "cannot be read as json"),
    "weights are cut": (lambda p: (p / "model.safetensors").write_bytes((p / "model.safetensors").read_bytes()[:5000]),
                        "truncated"),
    "weights are text": (lambda p: (p / "model.safetensors").write_text("hello"), "truncated or not a safetensors"),
    "another family": (lambda p: edit_config(p, model_type="mamba"), "not supported; supported: llama"),
    "key missing": (lambda p: edit_config(p, hidden_size=None), "'hidden_size' is missing"),
    "key of another type": (lambda p: edit_config(p, hidden_size="big"), "wrong type"),
    "size of zero": (lambda p: edit_config(p, num_hidden_layers=0), "at least 1"),
    "heads do not divide": (lambda p: edit_config(p, num_attention_heads=3), "multiple"),
    "scaled rope": (lambda p: edit_config(p, rope_parameters=dict(rope_type="yarn")), "'yarn' is not supported"),
    "rope of another type": (lambda p: edit_config(p, rope_parameters="x"), "wrong type"),
    "rope of zero": (lambda p: edit_config(p, rope_parameters=dict(rope_theta=0)), "above 0"),
    "no heads": (lambda p: edit_config(p, num_attention_heads=0, head_dim=None), "wrong type"),
    "family of another type": (lambda p: edit_config(p, model_type=[]), "not supported"),
    "sliding window": (lambda p: edit_config(p, use_sliding_window=True), "sliding-window"),
    "quantised": (lambda p: edit_config(p, quantization_config=dict(quant_method="gptq")), "quantised"),
    "other shape": (lambda p: edit_config(p, intermediate_size=95), "should have shape"),
    "tensor missing": (lambda p: edit_weights(p, lambda t: t.pop("model.norm.weight")), "lacks what norm.weight"),
    "tensor too many": (lambda p: edit_weights(p, lambda t: t.update(extra=torch.ones(1))), "extra"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders_are_refused_in_one_line(case, tmp_path):
    """Catches a broken folder that loads as garbage or ends in a traceback from deep inside."""
    toy_model().save_pretrained(tmp_path)
    breaks, says = BROKEN[case]
    breaks(tmp_path)
    with pytest.raises(InputError) as caught:
        GPT.from_pretrained(tmp_path, device="cpu")
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_config_without_a_spelling_is_not_written(tmp_path):
    """Catches a folder that reads back as another model: Llama's format has one flag for all attention biases."""
    for flags in (dict(qkv_bias=True), SHAPES["gpt2"]):
        with pytest.raises(InputError, match="no way to write|not supported"):
            toy_model(**flags).save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(InputError, match="nowhere: no such folder"):
        GPT.from_pretrained(tmp_path / "nowhere")


def test_a_failed_write_leaves_the_old_file(tmp_path):
    """Catches half-written files."""
    def fail(tmp):
        open(tmp, "w").write("half")
        raise OSError("disk full")
    (tmp_path / "file").write_text("old")
    with pytest.raises(OSError):
        atomic_write(tmp_path / "file", fail)
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "old"
