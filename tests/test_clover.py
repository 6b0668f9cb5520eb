"""clover.py: drafting against a plain beam search, decoding states against training states, heads' folders."""

import math
import os
import shutil
import weakref
from functools import partial

import pytest
import torch

from backends import cpu
from clover import BINS, PRESETS, SOURCES, CloverHeads, build_tree, preset
from conftest import MODELS, edit_json, edit_weights, random_prompts, refusal, toy_model
from hf import checkpoint
from hf.heads import load_heads


def random_heads(model, name="clover", seed=0, **switches):
    """Heads with random weights, large enough that their predictions differ."""
    heads = CloverHeads(preset(name, **switches), model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in heads.parameters():
            p.add_(0.15 * torch.randn(p.shape, generator=generator))
    return heads.requires_grad_(False).eval()


def beam_search(heads, state, root, tree_size, beams, allowed=None):
    """A tree, {path of tokens: joint log-probability}, in plain Python. allowed: a draft vocabulary."""
    V = heads.model.config.vocab_size
    others = torch.ones(V, dtype=torch.bool).index_fill(0, torch.tensor(allowed or range(V)), False)
    found, front = {(): 0.0}, [((), 0.0, state)]
    for depth in range(min(heads.config.n_draft, tree_size - 1)):
        proposals = []
        for path, joint, z in front:
            token = torch.tensor(path[-1] if path else root)
            z, out, residual = heads.draft_head(depth)(z, heads.embedding(token))
            logits = heads.model.lm_head(out if residual is None else residual + out).double()
            logprobs = logits.masked_fill(others, -math.inf).log_softmax(-1)
            for token in logprobs.topk(beams).indices.tolist():
                proposals.append((path + (token,), joint + min(logprobs[token].item(), 0.0), z))
        found.update((path, joint) for path, joint, _ in proposals)
        front = sorted(proposals, key=lambda p: -p[1])[:beams]
    return dict(sorted(found.items(), key=lambda item: -item[1])[:tree_size])


def paths(tree, b):
    """Sequence b of a drafted `Tree`: {path of tokens: node}."""
    found = {}
    for node in range(tree.tokens.shape[1]):
        if tree.ancestors[b, node] != 0:
            path, at = (), node
            while at:
                path, at = (tree.tokens[b, at].item(),) + path, tree.parents[b, at].item()
            found[path] = node
    return found


TOKENS = [96, 3, 50, 7, 21, 8, 0, 11]  # a draft vocabulary
ABLATIONS = dict(mix="none"), dict(projector="linear"), dict(augment_layers=0), dict(mix="concat", shared=True)
HEADS = [*((name, {}) for name in PRESETS), *zip(("clover2", "medusa", "clover", "clover"), ABLATIONS)]


@pytest.mark.parametrize("name, switches", HEADS, ids=str)
@pytest.mark.parametrize("tree_size, beams, tokens, packed", [
    (2, 1, None, False), (5, 2, None, False), (17, 4, None, False), (64, 8, None, False), (14, 3, None, False),
    (9, 1, None, False), (30, 4, TOKENS, False), (30, 4, TOKENS, True)], ids=str)
def test_draft_equals_a_plain_beam_search(name, switches, tree_size, beams, tokens, packed, exact):
    """Catches a beam that reads another beam's state, a wrong parent, a dropped proposal, a padding node; indices into
    a draft vocabulary mistaken for token ids; an ablation that crashes. B = 3."""
    model = toy_model()
    heads = random_heads(model, name, **switches)
    heads.set_vocabulary(tokens or [])
    state, root = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)), torch.tensor([5, 0, 96])
    wanted = [beam_search(heads, state[b], root[b].item(), tree_size, beams, tokens) for b in range(3)]
    if packed:
        cpu.apply(model)
    with torch.inference_mode():
        chances = torch.exp(-torch.arange(SOURCES) / 4).repeat(2, 1)  # the joint probability
        candidates = heads.draft(state, root, min(heads.n_draft, tree_size - 1), beams)
        tree = build_tree(root, candidates, None, chances, torch.zeros(len(root)), tree_size)
    for b, want in enumerate(wanted):
        got = paths(tree, b)
        assert set(got) == set(want) and tree.tokens[b, 0] == root[b]
        for path, node in got.items():
            assert tree.depths[b, node] == len(path)
            assert tree.probabilities[b, node] == pytest.approx(math.exp(want[path]), rel=0.01, abs=5e-5)


def test_heads_survive_the_disk(toy, tmp_path):
    """Catches ids of a draft vocabulary that are rounded, a vocabulary that heads without one get, norms or biases in 8
    bits, heads that are not read back in the model's dtype."""
    heads = random_heads(toy)
    for tokens in ([3, 4, 3], [97], [-1], [2**40]):
        refusal(lambda: heads.set_vocabulary(tokens), "a draft vocabulary has token ids outside 0..96, or one twice")
    heads.set_vocabulary([96, 95, 33])
    heads.save_pretrained(tmp_path, dtype=torch.bfloat16)
    same = CloverHeads.from_pretrained(tmp_path, toy)
    assert same.config.vocabulary == 3 and same.vocabulary.tolist() == [96, 95, 33]
    assert same.vocabulary.dtype == torch.int32
    edit_weights(tmp_path, lambda x: x.update(vocabulary=torch.tensor([1, 2, 97]).int()), "heads.safetensors")
    refusal(lambda: CloverHeads.from_pretrained(tmp_path, toy), "outside 0..96")
    random_heads(toy).save_pretrained(tmp_path)
    assert CloverHeads.from_pretrained(tmp_path, toy).vocabulary is None
    heads = random_heads(toy)
    heads.save_pretrained(tmp_path, dtype=torch.float8_e4m3fn)
    same = CloverHeads.from_pretrained(tmp_path, toy).state_dict()
    for name, x in heads.state_dict().items():
        rounded = x.to(torch.float8_e4m3fn) if x.dim() > 1 else x
        assert torch.equal(same[name], rounded.to(x.dtype)), name


def test_captured_steps_keep_the_vocabulary_that_they_read(toy):
    """Catches rows of the LM head that are freed while a graph reads them."""
    heads = random_heads(toy)
    heads.set_vocabulary([96, 95, 33])
    rows = weakref.ref(heads.lm_head.weight)
    heads.set_vocabulary([1, 2, 3, 4])
    assert len(heads.lm_head.weight) == 4 and rows().shape == (3, 64)


@pytest.mark.parametrize("name, switches", HEADS, ids=str)
def test_decoding_states_equal_training_states(toy, name, switches):
    """Catches heads that read another token, position or cache row in decoding than in training."""
    heads, K = random_heads(toy, name, **switches), 4
    tokens = torch.tensor(random_prompts([30, 30]))
    hidden = toy(tokens)
    outputs = heads(hidden[:, :-K - 1], tokens[:, 1:])
    whole = heads.augment(hidden[:, :-1], tokens[:, 1:])
    cache = heads.new_cache(2, 40)
    chain = ((2 << torch.arange(3)) - 1).expand(2, -1)
    first = heads.augment(hidden[:, :20], tokens[:, 1:21], cache=cache)
    cache.lengths += 20
    then = heads.augment(hidden[:, 20:23], tokens[:, 21:24], torch.arange(20, 23).expand(2, -1), cache, chain)
    torch.testing.assert_close(torch.cat((first, then), 1), whole[:, :23], atol=1e-4, rtol=1e-4)
    state = then[:, -1]  # position 22; head i reads token 23 + i
    for i in range(K):
        state, out, residual = heads.draft_head(i)(state, heads.embedding(tokens[:, 23 + i]))
        out = out if residual is None else residual + out
        torch.testing.assert_close(out, outputs[i][:, 22], atol=1e-4, rtol=1e-4)


def test_presets_start_where_the_papers_start(toy):
    """Catches heads that do not start as the model's LM head, as Medusa's and Hydra's do."""
    hidden, tokens = toy(torch.tensor(random_prompts([12]))), torch.tensor(random_prompts([16]))
    for name in ("medusa", "hydra"):
        for out in CloverHeads(preset(name), toy)(hidden, tokens):
            torch.testing.assert_close(toy.lm_head(out), toy.lm_head(hidden), atol=1e-3, rtol=1e-3)


def test_heads_serve_their_model_in_any_format_and_no_other_one(toy, tmp_path, capsys):
    """Catches heads that load for a model of other sizes, or fail to load for a quantised one."""
    toy.save_pretrained(tmp_path / "base")
    random_heads(toy).save_pretrained(tmp_path / "heads", tokenizer="abc")
    load = partial(CloverHeads.from_pretrained, tmp_path / "heads")
    half = checkpoint.load(tmp_path / "base", torch.bfloat16, "cpu", packed=False)
    assert load(half).heads[0].project.linear.weight.dtype == torch.bfloat16
    load(checkpoint.load(tmp_path / "base", torch.bfloat16, "cpu", quantize="int8"), "abc")
    assert capsys.readouterr().err == ""
    refusal(lambda: load(toy_model(n_inner=90)), "belong to another model", "'n_inner': 90")
    refusal(lambda: load(toy, "xyz"), "another tokenizer")
    edit_json(tmp_path / "heads" / "heads.json", "base", norm="b72a2315165318eb")  # as older versions wrote
    load(toy, "abc")


BROKEN = {
    "no folder": shutil.rmtree,
    "no record": lambda path: (path / "heads.json").unlink(),
    "record is cut": lambda path: (path / "heads.json").write_text("{"),
    "no base": lambda path: edit_json(path / "heads.json", base=None),
    "unknown switch": lambda path: edit_json(path / "heads.json", "config", colour="blue"),
    "absurdly many heads": lambda path: edit_json(path / "heads.json", "config", n_draft=10**9),
    "weights are cut": lambda path: os.truncate(path / "heads.safetensors", 999),
    "a weight is missing": lambda path: edit_weights(path, dict.popitem, "heads.safetensors"),
    "wrong type": lambda path: edit_json(path / "heads.json", "config", shared=1),
    "an older record": lambda path: edit_json(path / "heads.json", acceptance={"0": [[0.5]]}),
    "more accepted than proposed": lambda path: edit_json(
        path / "heads.json", acceptance=dict.fromkeys(("greedy", "sampled"), [[3, 2]] * BINS)),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders_are_refused_in_one_line(toy, case, tmp_path):
    random_heads(toy).save_pretrained(tmp_path / "heads")
    BROKEN[case](tmp_path / "heads")
    refusal(lambda: load_heads(tmp_path / "heads", toy), tmp_path / "heads")


@pytest.mark.parametrize("name", PRESETS)
def test_heads_do_not_see_across_documents(name):
    """Catches an augmenting block that attends across a document border, or whose positions do not restart there."""
    model = toy_model()
    heads = random_heads(model, name)
    K, parts = heads.config.n_draft, [random_prompts([n], seed=n)[0] for n in (12, 20)]
    documents = torch.tensor([[0] * 12 + [1] * 20])
    tokens = torch.tensor([parts[0] + parts[1]])
    hidden = model(tokens[:, :-1], documents=documents[:, :-1])
    outputs = heads(hidden[:, :-K], tokens[:, 1:], documents[:, :-K - 1])
    for part, start in zip(parts, (0, 12)):
        alone = torch.tensor([part])
        wanted = heads(model(alone[:, :-1])[:, :-K], alone[:, 1:])
        for i, (out, want) in enumerate(zip(outputs, wanted)):  # where all tokens are of this document
            n = want.shape[1]
            torch.testing.assert_close(out[:, start:start + n], want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", ["gemma", "olmo", "partial", "hybrid"])
def test_the_augmenting_block_is_a_copy_of_the_last_layer_with_attention(shape):
    """Catches the window, rotation or norms of another layer; here all layers differ. A recurrent one would have a
    state that no tree of the heads changes."""
    model = toy_model(**MODELS[shape])
    heads = CloverHeads(preset("clover"), model)
    x, positions = torch.randn(2, 30, 64), torch.arange(30).expand(2, 30)
    last = 1 if shape == "hybrid" else 2
    last, own = (blocks(x, model.tables, positions) for blocks in (model.blocks[last:last + 1], heads.augment_blocks))
    assert torch.equal(last[0], own[0]) and torch.equal(last[1], own[1])
    heads.augment_blocks[0].attn.window += 1
    changed = heads.augment_blocks(x, model.tables, positions)
    assert not torch.equal(changed[0], own[0]) and last[0].isfinite().all()
