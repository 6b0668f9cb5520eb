"""Draft heads in other projects' formats, made by these tests."""

import pytest
import torch

from backends import cpu
from conftest import needs_compiler, random_prompts, toy_model
from drafters.eagle3 import Eagle3Heads
from drafters.published import Eagle3Config
from model import GPTConfig, add


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_read_between_packed_blocks(dtype):
    """Bug: a piece of the blocks that reads another layer's cache or starts from a rounded stream, or a state of the
    layer beside the one that was asked for."""
    tokens = torch.tensor(random_prompts([40]))
    model = toy_model(n_layer=5).to(dtype)
    layers = 3, 0, 5, 1
    want = [*model(tokens, layers=layers).chunk(4, dim=-1)]
    torch.testing.assert_close(want[1], model.embeddings(tokens, None), rtol=0, atol=0)
    torch.testing.assert_close(want[2], model(tokens), rtol=0, atol=0)
    cpu.apply(model)
    whole, pieces = (model.new_cache(1, 80) for _ in range(2))
    last = model.prefill(tokens, whole)
    states = model.prefill(tokens, pieces, layers=layers)
    assert torch.equal(whole.kv, pieces.kv) and torch.equal(states.chunk(4, dim=-1)[2], last)
    torch.testing.assert_close(states, torch.cat(want, -1), rtol=0.05, atol=0.05 if dtype != torch.float32 else 1e-3)


def random_eagle3(model, n_draft=5, vocabulary=0, seed=0, layers=(), **switches):
    """EAGLE-3 heads with random weights for a toy model, of other sizes than its layers."""
    sizes = dict(n_layer=1, n_head=6, n_kv_head=3, n_inner=80, rope_theta=500.0, norm_eps=1e-3)
    sizes |= dict(vocab_size=97, n_embd=64, head_size=16, block_size=model.config.block_size)
    own = GPTConfig(**sizes | dict(layers))
    config = Eagle3Config(own, n_draft, (1, 2, 0), vocabulary, own_head=True, **switches)
    heads = Eagle3Heads(config, model)
    generator = torch.Generator().manual_seed(seed)
    for p in heads.parameters():
        p.data.normal_(0, 0.3, generator=generator).add_(p.dim() == 1)
    if vocabulary:
        heads.vocabulary.copy_(torch.randperm(97, generator=generator)[:vocabulary])
    return heads.place()


def chain_logprobs(heads, hidden, tokens, path):
    """Log-probabilities of the tokens of a path, one after another, by whole causal passes without a cache. hidden
    [T, n C] of the committed rows, tokens [T] that follow them."""
    inputs = heads.g(hidden[None])
    logprobs = []
    for n in range(len(path)):
        e = heads.embedding(torch.tensor([[*tokens, *path[:n]]]))
        h = add(*heads.blocks(torch.cat((e, inputs), -1), heads.tables, torch.arange(e.shape[1])[None])[:2])
        normed = heads.norm(h[:, -1:])
        row = heads.lm_head(normed[0, 0]).log_softmax(-1)
        ids = list(range(97)) if heads.vocabulary is None else heads.vocabulary.tolist()
        logprobs.append(row[ids.index(path[n])].item())
        inputs = torch.cat((inputs, normed if heads.config.norm_output else h[:, -1:]), 1)
    return logprobs


@pytest.mark.parametrize("beams, switches", [
    (1, dict(norm_before_residual=True)), (4, dict(fc_norm=True, vocabulary=33)),
    (3, dict(norm_before_fc=True, norm_output=True)), (8, dict(layers=dict(qk_norm="head", qkv_bias=True)))], ids=str)
def test_eagle3_drafts_a_beam_search(beams, switches):
    """Bug: a beam that reads the state, the keys or the token of another one, a row at a wrong position, keys that
    overwrite a committed row or another sequence's. Sequences of unequal lengths, in other slots than their rows."""
    model = toy_model(n_layer=3)
    heads = random_eagle3(model, **switches)
    prompts = random_prompts([9, 30, 2])
    slots = torch.tensor([2, 0, 3])
    cache = heads.new_cache(4, 100)
    cache.kv.normal_()  # rows that nothing wrote
    states = torch.zeros(4, 64)
    for slot, prompt in zip(slots, prompts):
        tokens = torch.tensor([prompt])
        hidden = model(tokens, layers=heads.hidden_layers)
        states[slot] = heads.augment(hidden[:, :-1], tokens[:, 1:], cache=cache.one(slot))[0, -1]
        cache.lengths[slot] = len(prompt) - 1
    root = torch.tensor([prompt[-1] for prompt in prompts])
    candidates = heads.draft(states[slots], root, 64, beams, cache=cache.select(slots))
    for b, prompt in enumerate(prompts):
        hidden = model(torch.tensor([prompt]), layers=heads.hidden_layers)[0, :-1]
        paths = [((), 0.0)]
        for depth in range(heads.n_draft):
            rows = zip(*(column[b, depth].tolist() for column in candidates))
            paths = [((*paths[parent][0], token), joint) for joint, token, parent in rows if parent >= 0]
            for path, joint in (paths[0], paths[-1], paths[len(paths) // 2]):
                want = sum(chain_logprobs(heads, hidden, prompt[1:], path))
                assert joint == pytest.approx(want, abs=2e-3), (b, path)

