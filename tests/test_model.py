"""model.py: prefill, steps and trees give the same hidden states; initialisation."""

import pytest
import torch

import model as models
from common.machine import weight_bytes
from conftest import MODELS, SHAPES, needs_cuda, random_prompts, toy_model


def chain(n):
    """Ancestor bitmasks of a path of n nodes."""
    return ((2 << torch.arange(n)) - 1)[None]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])])
@pytest.mark.parametrize("shape", MODELS)
def test_prefill_and_steps_agree(shape, device):
    """Catches a wrong position, cache row or mask in a plain pass, in chunked prefill or in single steps."""
    model = toy_model(**MODELS[shape]).to(device)
    tokens = torch.tensor(random_prompts([23, 23]), device=device)
    want = model(tokens)  # no cache
    chunked, single = model.new_cache(2, 40), model.new_cache(1, 40, nodes=1)
    got = torch.cat([model.prefill(tokens[:, i:i + 5], chunked, i) for i in range(0, 23, 5)], dim=1)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert chunked.lengths.tolist() == [23, 23]
    for i in range(23):
        step = model(tokens[:1, i:i + 1], torch.tensor([[i]], device=device), single, chain(1).to(device))
        torch.testing.assert_close(step[0, 0], want[0, i], atol=1e-4, rtol=1e-4)
        if single.states:
            single.states.commit(torch.zeros_like(tokens[:1, :1]), torch.ones_like(tokens[0, :1]))
        single.lengths += 1
    torch.testing.assert_close(single.kv[:, :, :, :, :23], chunked.kv[:, :, :1, :, :23], atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_in_bfloat16_comes_near_float32(shape):
    """Catches a causal mask that flash attention aligns to the wrong end in later chunks."""
    model = toy_model(**SHAPES[shape], scale=1.0)
    tokens = torch.tensor(random_prompts([200]))
    want, model = model(tokens).double(), model.to("cuda", torch.bfloat16)
    cache, tokens = model.new_cache(1, 200), tokens.to("cuda")
    got = torch.cat([model.prefill(tokens[:, i:i + 64], cache, i) for i in range(0, 200, 64)], dim=1).cpu().double()
    assert (got - want).norm() < 0.03 * want.norm()


@pytest.mark.parametrize("shape", MODELS)
def test_tree_nodes_see_their_own_path(shape):
    """Catches siblings that attend to each other, and a sequence that uses another's length."""
    model = toy_model(**MODELS[shape])
    prompts = [torch.tensor(p) for p in random_prompts([9, 1, 20])]
    ancestors = [0b1, 0b11, 0b101, 0b1011, 0b10011, 0b101011]
    depths = torch.tensor([mask.bit_count() - 1 for mask in ancestors])
    nodes = torch.tensor(random_prompts([6, 6, 6], seed=1))
    cache = model.new_cache(3, 40, nodes=6)
    for b, prompt in enumerate(prompts):
        model.prefill(prompt[None], cache.one(b))
    assert cache.lengths.tolist() == [9, 1, 20]
    hidden = model(nodes, cache.lengths[:, None] + depths, cache, torch.tensor(ancestors).expand(3, -1))
    for b, prompt in enumerate(prompts):
        for i in range(6):
            path = [j for j in range(6) if ancestors[i] >> j & 1]
            want = model(torch.cat((prompt, nodes[b, path]))[None])[0, -1]
            torch.testing.assert_close(hidden[b, i], want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", ["llama", "alibi"])
def test_positions_stay_exact_when_a_model_is_cast(shape):
    """Catches angles and slopes rounded along with the weights."""
    model = toy_model(**SHAPES[shape])
    table = lambda model: model.tables[dict(llama=0, alibi=2)[shape]]
    want = table(model)
    assert torch.equal(table(model.bfloat16()), want.bfloat16() if shape == "llama" else want)
    assert torch.equal(table(model.float()), want)


def test_position_tables_grow_as_they_are_needed():
    """Catches tables of 1.4 GB for a context of a million tokens, other positions in longer ones, a table that a
    captured step still reads but nobody owns, and one that cannot be trained with after decoding."""
    model = toy_model(block_size=1_010_000, window_theta=500.0, windows=(0, 6))
    assert weight_bytes(model) < 6e6
    short = model.tables
    tokens = torch.tensor(random_prompts([9]))
    hidden = model(tokens)
    with torch.inference_mode():
        assert model.new_cache(1, 100).kv.shape[4] == 100 and model.tables is short
        model.reserve(9_000)
    assert model.n_positions == 9_000 and model.outgrown == [short]
    for before, now in zip(short[:2], model.tables):
        assert torch.equal(now[:len(before)], before) and len(now) == 9_000 and not now.is_inference()
    assert torch.equal(model(tokens), hidden)
    positions = torch.tensor([[20_000]])
    with torch.no_grad():
        model(torch.zeros(1, 20_001, dtype=torch.int64)[:, :1], start=20_000, cache=model.new_cache(1, 20_001))
    assert model.n_positions == 20_001 and model.tables[0][positions].isfinite().all()


def test_alibi_is_exact_in_half_precision():
    """Catches a bias rounded to bfloat16, in which distances above 256 have no units; slopes in another order."""
    slopes = models.alibi_slopes(6)
    assert slopes.tolist() == [2.0 ** -n for n in (2, 4, 6, 8, 1, 3)]
    mask = models.causal_mask(torch.zeros(1, 500, 8).bfloat16(), slopes=slopes)
    distance = torch.arange(500)[:, None] - torch.arange(500)
    want = (-slopes[:, None, None] * distance).masked_fill(distance < 0, -torch.inf)
    assert torch.equal(mask[0], want)
    q, k, v = torch.randn(3, 1, 500, 6, 16).unbind()
    exact = models.causal_attention(q, k.transpose(1, 2), v.transpose(1, 2), mask)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    half = models.causal_attention(q, k.transpose(1, 2), v.transpose(1, 2), mask)
    assert half.dtype == torch.bfloat16 and (half - exact).abs().mean() < 0.005


@pytest.mark.parametrize("shape", MODELS)
def test_documents_in_one_window_do_not_see_one_another(shape):
    """Catches attention across a document border, and positions that do not restart there."""
    model = toy_model(**MODELS[shape])
    parts = [random_prompts([n], seed=n)[0] for n in (5, 9, 4)]
    documents = torch.tensor([[i for i, part in enumerate(parts) for _ in part], [0] * 18])
    tokens = torch.tensor([sum(parts, []), random_prompts([18], seed=1)[0]])
    hidden = model(tokens, documents=documents)
    for part, got in zip(parts, hidden[0].split([5, 9, 4])):
        torch.testing.assert_close(got, model(torch.tensor([part]))[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(hidden[1], model(tokens[1:])[0], atol=1e-4, rtol=1e-4)
