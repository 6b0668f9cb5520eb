"""MTP heads in a model's own folder or GGUF file, against the format's description."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from backends.cpu_library import library
from backends.tensor_parallel import Group
from conftest import edit_json, edit_weights, random_prompts, refusal, toy_model, write_tokenizer
from drafters import mtp
from drafters.mtp import MTPHeads
from generate import generate
from hf.heads import default_heads, load_heads
from model import GPT
from test_hf_checkpoint import as_version_4, theirs_of
from test_hf_gguf import write
from tools.flags import parse_generate
from tools.load import load_alone

C, D, INNER = 64, 32, 96
TENSORS = {  # in a folder: (in a file, shape); 4 query heads with a gate each, 2 key heads
    "fc": ("nextn.eh_proj", (C, 2 * C)), "pre_fc_norm_embedding": ("nextn.enorm", (C,)),
    "pre_fc_norm_hidden": ("nextn.hnorm", (C,)), "norm": ("nextn.shared_head_norm", (C,)),
    **{f"layers.0.{name}": stored for name, stored in {
        "input_layernorm": ("attn_norm", (C,)), "self_attn.q_proj": ("attn_q", (8 * D, C)),
        "self_attn.k_proj": ("attn_k", (2 * D, C)), "self_attn.v_proj": ("attn_v", (2 * D, C)),
        "self_attn.q_norm": ("attn_q_norm", (D,)), "self_attn.k_norm": ("attn_k_norm", (D,)),
        "self_attn.o_proj": ("attn_output", (C, 4 * D)), "post_attention_layernorm": ("post_attention_norm", (C,)),
        "mlp.gate_proj": ("ffn_gate", (INNER, C)), "mlp.up_proj": ("ffn_up", (INNER, C)),
        "mlp.down_proj": ("ffn_down", (C, INNER))}.items()}}
OWN = {"embed_tokens": ("nextn.embed_tokens", (97, C)), "lm_head": ("nextn.shared_head_head", (97, C))}


def weights_of(tensors):
    generator = torch.Generator().manual_seed(0)
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, (_, shape) in tensors.items()}


def save_folder(path, tensors=TENSORS, name="qwen3_5", **changes):
    """A folder with a transformers model, which it returns, and MTP heads."""
    theirs = theirs_of(name, **changes)
    theirs.save_pretrained(path)
    is_outer = name.endswith("vision")
    stored = load_file(path / "model.safetensors")
    heads = {f"mtp.{name}.weight": x for name, x in weights_of(tensors).items()}
    save_file((as_version_4(stored) if is_outer else stored) | heads, path / "model.safetensors")
    edit_json(path / "config.json", "text_config" if is_outer else None, mtp_num_hidden_layers=1)
    return theirs


def save_gguf(path, tensors=TENSORS):
    """The same as a GGUF file, whose norms hold the 1."""
    theirs = theirs_of("qwen3_5", linear_value_head_dim=16)
    heads = {f"blk.4.{tensors[name][0]}.weight": (x + (x.dim() == 1)).numpy()
             for name, x in weights_of(tensors).items()}
    write(path, "qwen35", theirs, lambda stored, values: stored.update(heads))
    return theirs


def rotated(x):
    """x [T, heads, D] at positions 0, 1, ...: RoPE over the first 8 dimensions, in halves."""
    angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)  # (T, 4)
    cos, sin = (y.repeat(1, 2)[:, None] for y in (angles.cos(), angles.sin()))
    first, second, rest = x.split((4, 4, D - 8), -1)
    return torch.cat((x[..., :8] * cos + torch.cat((-second, first), -1) * sin, rest), -1)


def their_outputs(w, e, states):
    """The format: embeddings of the next tokens and states of the rows, each [T, C] -> the outputs [T, C]."""
    norm = lambda x, name: (1 + w[name]) * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    linear = lambda x, name: x @ w[f"layers.0.{name}"].T
    T = len(e)
    x = torch.cat((norm(e, "pre_fc_norm_embedding"), norm(states, "pre_fc_norm_hidden")), -1) @ w["fc"].T
    y = norm(x, "layers.0.input_layernorm")
    q, gate = linear(y, "self_attn.q_proj").view(T, 4, 2 * D).chunk(2, -1)
    k, v = (linear(y, f"self_attn.{name}_proj").view(T, 2, D) for name in "kv")
    q, k = (rotated(norm(z, f"layers.0.self_attn.{name}_norm")) for z, name in ((q, "q"), (k, "k")))
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(2, 1)) / D ** 0.5
    scores = scores.masked_fill(torch.ones(T, T).triu(1) > 0, -torch.inf).softmax(-1)
    y = torch.einsum("hij,jhd->ihd", scores, v.repeat_interleave(2, 1)) * gate.sigmoid()
    x = x + linear(y.flatten(1), "self_attn.o_proj")
    y = norm(x, "layers.0.post_attention_layernorm")
    y = torch.nn.functional.silu(linear(y, "mlp.gate_proj")) * linear(y, "mlp.up_proj")
    return norm(x + linear(y, "mlp.down_proj"), "norm")


def their_logits(w, theirs, prompt, path=()):
    """Logits [rows, V] of the heads after a prompt, whose last token is the root, and a drafted path."""
    embed = w.get("embed_tokens", theirs.get_input_embeddings().weight)
    text = getattr(theirs.model, "language_model", theirs.model)
    states = text(torch.tensor([prompt])).last_hidden_state[0, :-1]  # after the final norm
    for n in range(len(path) + 1):
        outputs = their_outputs(w, embed[[*prompt[1:], *path[:n]]], states)
        states = torch.cat((states, outputs[-1:]))
    return outputs @ w.get("lm_head", theirs.lm_head.weight).T


@torch.no_grad()
@pytest.mark.parametrize("save, tensors, packed, n", [
    (save_folder, TENSORS, False, 97), (save_folder, TENSORS | OWN, None, 97),
    (partial(save_folder, tie_word_embeddings=True), TENSORS, None, 97),
    (partial(save_folder, name="qwen3_5-vision"), TENSORS, False, 97),
    (save_gguf, TENSORS, None, 97), (save_gguf, TENSORS | OWN, False, 97), (save_gguf, TENSORS, False, 40)],
    ids=["folder", "own", "tied", "vision", "gguf", "gguf-own", "gguf-vocabulary"])
def test_logits_and_chains_are_those_of_the_format(save, tensors, packed, n, tmp_path, monkeypatch, exact):
    """Bug: a norm without its 1, the embedding after the state, a state before the final norm, gates of other heads, a
    position off by one, the output before mtp.norm fed back; another beam's state, keys or token; a row of the draft
    vocabulary for a token. Sequences of unequal lengths, in other slots than their rows."""
    monkeypatch.setattr(mtp, "VOCABULARY", n)
    path = tmp_path / ("m.gguf" if save is save_gguf else "folder")
    theirs, weights = save(path, tensors), weights_of(tensors)
    model = GPT.from_pretrained(path, torch.float32, "cpu", packed=packed)
    heads = load_heads(default_heads(path, model), model)
    assert isinstance(heads, MTPHeads) and heads.n_draft == 3 and heads.n_rows == n
    prompts, slots = random_prompts([9, 30, 2]), torch.tensor([2, 0, 3])
    cache = heads.new_cache(4, 100)
    cache.kv.normal_()  # rows that nothing wrote
    state = torch.zeros(4, C)
    for slot, prompt in zip(slots, prompts):
        hidden = model(torch.tensor([prompt]))[:, :-1]
        out = heads.augment(hidden, torch.tensor([prompt[1:]]), cache=cache.one(slot))
        logits = heads.lm_head.logits(heads.norm(out)[0])
        torch.testing.assert_close(logits, their_logits(weights, theirs, prompt)[:, :n], atol=2e-3, rtol=1e-3)
        state[slot] = out[0, -1]
        cache.lengths[slot] = len(prompt) - 1
    root = torch.tensor([prompt[-1] for prompt in prompts])
    candidates = heads.draft(state[slots], root, heads.n_draft, 4, cache=replace(cache, slots=slots))
    for b, prompt in enumerate(prompts):
        paths = [((), 0.0)]
        for depth in range(heads.n_draft):
            rows = zip(*(column[b, depth].tolist() for column in candidates))
            paths = [((*paths[parent][0], token), joint) for joint, token, parent in rows if parent >= 0]
            for path, joint in paths[:4] + paths[-1:]:
                logits = their_logits(weights, theirs, prompt, path[:-1])[-len(path):, :n]
                want = logits.log_softmax(-1)[range(len(path)), path].sum()
                assert joint == pytest.approx(want.item(), abs=5e-3), (b, path)
        assert candidates.tokens[b, 0, :4].tolist() == logits[0].topk(4).indices.tolist()


def test_they_are_found_without_a_flag(tmp_path, monkeypatch):
    """Bug: heads that need a flag, or that none leaves in; heads that a config.json names and the file lacks, as after
    fine-tuning with transformers, refused; those of several layers half read; another model's."""
    def load(*flags):
        return load_alone(parse_generate(["--model", str(tmp_path), *flags]), Group())

    monkeypatch.setattr(mtp, "VOCABULARY", 100)
    save_folder(tmp_path, vocab_size=258)
    write_tokenizer(tmp_path)
    loaded = load()
    assert isinstance(loaded.heads, MTPHeads) and loaded.heads.hash and loaded.heads.lm_head.out_features == 100
    if library():  # without a copy of the rows
        assert loaded.heads.lm_head.packed.memory is loaded.model.head.packed.memory
    texts = [generate(loaded.model, [[1, 2, 3]], 20, heads, tree_size=9).tokens for heads in (loaded.heads, None)]
    assert texts[0] == texts[1]
    assert load("--heads", "none").heads is load("--draft", "lookup").heads is None
    assert isinstance(load("--heads", str(tmp_path)).heads, MTPHeads)
    refusal(lambda: load_heads(tmp_path, toy_model()), tmp_path, "vocab_size 258, not 97")
    for layers in (2, 0, None):
        edit_json(tmp_path / "config.json", mtp_num_hidden_layers=layers)
        assert load().heads is None
    edit_json(tmp_path / "config.json", mtp_num_hidden_layers=1)
    edit_weights(tmp_path, lambda tensors: tensors.pop("mtp.norm.weight"))
    refusal(load, tmp_path, "the weights lack norm.weight")
    edit_weights(tmp_path, lambda tensors: [tensors.pop(name) for name in [*tensors] if name.startswith("mtp.")])
    assert load().heads is None
