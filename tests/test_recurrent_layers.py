"""recurrent/layers.py and engine/kept.py: the states of hybrid models, from prompts, pieces of them, trees and kept
prefixes."""

import pytest
import torch

from backends import cpu
from conftest import MODELS, needs_compiler, random_prompts, toy_model
from engine import batching
from generate import generate
from model import GPT
from recurrent.layers import CHUNK, DeltaConfig
from test_generate import either_decoder, load, new_engine
from test_hf_checkpoint import theirs_of
from test_kernels import as_int64, random_forest

HYBRID = MODELS["hybrid"]


def same(got, want):
    torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)


def states_after(model, tokens):
    """The states after a prompt, read at once."""
    cache = model.new_cache(1, len(tokens))
    model.prefill(torch.tensor([tokens]), cache)
    return cache.states.committed


@pytest.mark.parametrize("n", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_pieces_of_a_prompt_leave_what_the_whole_leaves(n):
    """Bug: a last token that is padding, a window or state cut at a border, the state of the sequence before."""
    model = toy_model(**HYBRID).double()
    tokens = torch.tensor(random_prompts([n, n]))
    want = model(tokens)
    cache = model.new_cache(2, n)
    for size in (n, 3, 70):
        pieces = [model.prefill(tokens[:, i:i + size], cache, i) for i in range(0, n, size)]
        same(torch.cat(pieces, dim=1), want)
    for x, y in zip(cache.states.committed, states_after(model, tokens[1].tolist())):
        same(x[:, 1:], y)


@needs_compiler
@pytest.mark.parametrize("sizes", [(2, 2, 33, 16, 2), (4, 2, 8, 70), (3, 1, 128, 130, 6)])
def test_c_computes_what_torch_does(sizes):
    """Bug: another head's key, the end of a head or of a tile of columns, the convolution's inputs in another order, a
    gate of another head; a piece of a prompt that starts with another state."""
    flags = HYBRID | dict(mixers=(DeltaConfig(*sizes), None, DeltaConfig(*sizes)))
    models = toy_model(**flags, scale=2.0).double(), toy_model(**flags, scale=2.0)
    cpu.apply(models[1])
    tokens = torch.tensor(random_prompts([70, 70]))
    caches = [model.new_cache(2, 70) for model in models]
    for start, end in ((0, 1), (1, 67), (67, 70)):
        want, got = (model.prefill(tokens[:, start:end], cache, start) for model, cache in zip(models, caches))
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-4)


@either_decoder
@pytest.mark.parametrize("T", [1, 7, 64])
def test_a_committed_path_leaves_what_a_prompt_leaves(T, compiled):
    """Bug: a state of another branch, row, slot or layer; a slot that accepts nothing and changes; nodes of the tree
    before. In C: bits that depend on the tree or the threads."""
    generator = torch.Generator().manual_seed(T)
    model = toy_model(**HYBRID).to(torch.float32 if compiled else torch.float64)
    if compiled:
        cpu.apply(model)
    prompts = random_prompts([9, 2, 70, 30])
    cache = model.new_cache(4, 200, nodes=64)
    for slot, prompt in enumerate(prompts):
        model.prefill(torch.tensor([prompt]), cache.one(slot))
    slots = torch.tensor([3, 0, 2])
    for _ in range(2):
        nodes = torch.randint(97, (3, T), generator=generator)
        masks = [random_forest(T, set(), generator) for _ in slots]
        paths = [[j for j in range(T) if masks[0][T - 1] >> j & 1], [0], []]
        count = torch.tensor(list(map(len, paths)))
        path = torch.tensor([(nodes_of + [0] * T)[:T] for nodes_of in paths])
        own = cache.lengths[slots][:, None] + torch.tensor([[m.bit_count() - 1 for m in row] for row in masks])
        batch = type(cache)(cache.kv, cache.lengths, slots, cache.states)
        torch.set_num_threads(2)
        model(nodes, own.clamp(min=0), batch, as_int64(masks))
        cache.states.commit(path, count, slots)
        torch.set_num_threads(1)
        for row, slot in enumerate(slots.tolist()):
            prompts[slot] = prompts[slot] + nodes[row, paths[row]].tolist()
        for slot, prompt in enumerate(prompts):
            for x, y in zip(cache.states.committed, states_after(model, prompt)):
                same(x[:, slot], y[:, 0])
                assert not compiled or torch.equal(x[:, slot], y[:, 0])
            model.prefill(torch.tensor([prompt]), cache.one(slot))  # `commit_path` for the other layers


def test_logits_in_bfloat16_are_as_near_as_those_of_transformers(tmp_path):
    """Bug: rates, states or windows that are rounded."""
    theirs = theirs_of("qwen3_5")
    theirs.save_pretrained(tmp_path)
    tokens = torch.tensor(random_prompts([60] * 4))
    ours = GPT.from_pretrained(tmp_path, torch.bfloat16, "cpu", packed=False)
    assert ours.blocks[0].attn.A.dtype == torch.float32
    with torch.no_grad():
        want = theirs(tokens).logits.double()
        near, far = ours.lm_head(ours(tokens)), theirs.bfloat16()(tokens).logits
    assert (near - want).norm() < 1.05 * (far - want).norm()


by_decoder = pytest.mark.parametrize("reads_prompts, compiled", [
    (False, False), (True, False), pytest.param(False, True, marks=needs_compiler)])


@by_decoder
@pytest.mark.parametrize("keeps_answers", [True, False])
def test_conversations_read_little_again(keeps_answers, reads_prompts, compiled, monkeypatch, prefilled):
    """Bug: a state of other tokens than the cached rows', or never kept; a text read from its start at each turn, when
    sent again or after a cancelled one. Templates that drop earlier reasoning differ where the last prompt ended."""
    model, heads = load("clover", compiled, block_size=1024, **HYBRID)
    monkeypatch.setattr(batching, "PREFILL_CHUNK", 32)
    monkeypatch.setattr(batching, "long_prompt", lambda model: 70)
    engine = new_engine(model, heads, tree_size=9, capacity=700, batch_size=2, reads_prompts=reads_prompts)
    text = random_prompts([200])[0]
    for number, turn in enumerate([[], *random_prompts([40] * 5, seed=1)]):
        prompt = text + [96, 95]  # begins the answer
        want = generate(model, [prompt], 12, tree_size=1).tokens
        prefilled.clear()
        if number > 2:
            cancelled = engine.add(prompt, 12)
            engine.step()
            engine.cancel(cancelled)
        assert engine.generate([prompt], 12).tokens == want
        if number not in (0, 2):  # a token; then two turns, or one, and what steps may read
            assert sum(n for _, n in prefilled) <= 120
        if turn:
            text = (prompt + want[0] if keeps_answers else text + want[0][8:]) + turn
        engine = engine.grown(900) if number == 4 else engine


@by_decoder
def test_slots_that_are_cancelled_or_reused_start_right(reads_prompts, compiled, monkeypatch):
    """Bug: a state left by a cancelled prompt, by the sequence before, or by a step in flight."""
    model, heads = load("clover", compiled, block_size=1024, **HYBRID)
    monkeypatch.setattr(batching, "PREFILL_CHUNK", 32)
    engine = new_engine(model, heads, tree_size=5, batch_size=2, capacity=300, reads_prompts=reads_prompts, ahead=1)
    prompts = random_prompts([7, 200, 1, 90, 3])
    want = generate(model, prompts, 12, tree_size=1).tokens
    for number in range(6):
        sequences = [engine.add(prompt, 12) for prompt in prompts]
        for _ in range(number):
            engine.step()
        for sequence in sequences[:number]:
            engine.cancel(sequence)
        while engine.busy:
            engine.step()
        assert [sequence.tokens for sequence in sequences[number:]] == want[number:]
        prompts, want = prompts[::-1], want[::-1]
