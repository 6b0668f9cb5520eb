"""model.py: one sequence gives one answer however it is fed, and a folder can be looked at."""

import copy
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import model as models
from conftest import SHAPES, random_prompts, toy_model
from generate import Engine, capture
from model import GPT

ROOT = Path(__file__).parent.parent

def chain(n):
    """Ancestors of n nodes that follow each other."""
    return ((2 << torch.arange(n)) - 1)[None]


# ---------------------------------------------------------------------------------------------------------------------
# One sequence, four ways

@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")])])
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_steps_and_trees_agree(shape, device):
    """Catches a position, a cache row or a mask that is off in one of the ways to feed tokens."""
    model = toy_model(**SHAPES[shape]).to(device)
    tokens = torch.tensor(random_prompts([23]), device=device)
    want = model(tokens)  # no cache
    chunked, single = model.new_cache(1, 40), model.new_cache(1, 40)
    got = torch.cat([model.prefill(tokens[:, i:i + 5], chunked, i) for i in range(0, 23, 5)], dim=1)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert chunked.lengths.tolist() == [23]
    for i in range(23):
        step = model(tokens[:, i:i + 1], torch.tensor([[i]], device=device), single, chain(1).to(device))
        torch.testing.assert_close(step[0, 0], want[0, i], atol=1e-4, rtol=1e-4)
        single.lengths += 1
    torch.testing.assert_close(single.kv[:, :, :, :, :23], chunked.kv[:, :, :, :, :23], atol=1e-4, rtol=1e-4)
    tree = model.new_cache(1, 40)
    model.prefill(tokens[:, :13], tree)
    nodes = model(tokens[:, 13:], torch.arange(13, 23, device=device)[None], tree, chain(10).to(device))
    torch.testing.assert_close(nodes, want[:, 13:], atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not models.NATIVE_BFLOAT16, reason="this CPU has no instructions for bfloat16")
@pytest.mark.parametrize("cache_dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_tokens_hidden_state_is_the_same_bits_wherever_it_stands(shape, cache_dtype, monkeypatch):
    """Row invariance in bfloat16: read with its prompt, alone, in a tree of two branches, in a batch. Catches a sum
    whose order depends on other rows or on where in the cache its terms are, which sooner or later changes a text."""
    sizes = dict(n_layer=3, n_embd=256, n_inner=2816, head_size=32)  # enough sums for one to be rounded another way
    model = toy_model(**SHAPES[shape] | sizes, scale=1.0).to(torch.bfloat16)
    models.pack(model)
    monkeypatch.setattr(models, "free_memory", lambda device: math.inf if cache_dtype == torch.float64 else 0)
    monkeypatch.setattr(models, "check_memory", lambda *_: None)
    n, texts = 30, torch.tensor(random_prompts([150] * 3))
    with torch.inference_mode():
        read = model.new_cache(1, 200)
        assert read.kv.dtype == cache_dtype
        want = model.prefill(texts[:1], read)[0]
        alone = model.new_cache(1, 200)
        for i in range(150):
            hidden = model(texts[:1, i:i + 1], torch.tensor([[i]]), alone, chain(1))
            assert torch.equal(hidden[0, 0], want[i]), i
            alone.lengths += 1
        for T, batch in ((1, 2), (1, 3), (2, 1), (3, 1), (2, 3)):  # some are padded to FEWEST_ROWS
            cache = model.new_cache(batch, 200)
            for b in range(batch):
                for start in range(0, 50, 25):
                    model.prefill(texts[b:b + 1, start:start + 25], cache.slots(b), start)
            hidden = model(texts[:batch, 50:50 + T], torch.arange(50, 50 + T).expand(batch, T), cache,
                           chain(T).expand(batch, T))
            assert torch.equal(hidden[0], want[50:50 + T]), (T, batch)
        # the text's next n tokens at a tree's even nodes, another text's at the odd ones; then beside two more trees
        nodes, depths = texts[:2, 90:90 + n].T.flatten(), torch.arange(2 * n) // 2
        ancestors = torch.tensor([[sum(1 << j for j in range(i % 2, i + 1, 2)) | 1 for i in range(2 * n)]])
        for batch in (1, 3):
            cache = model.new_cache(batch, 200)
            for b in range(batch):
                model.prefill(texts[b:b + 1, :90], cache.slots(b))
            hidden = model(nodes.expand(batch, -1), 90 + depths.expand(batch, -1), cache, ancestors.expand(batch, -1))
            assert torch.equal(hidden[0, ::2], want[90:90 + n]), batch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_in_bfloat16_comes_near_float32(shape):
    """Catches flash attention's causal mask aligned to the wrong end, in the chunks behind the first."""
    model = toy_model(**SHAPES[shape], scale=1.0)
    tokens = torch.tensor(random_prompts([200]))
    want, model = model(tokens).double(), model.to("cuda", torch.bfloat16)
    cache, tokens = model.new_cache(1, 200), tokens.to("cuda")
    got = torch.cat([model.prefill(tokens[:, i:i + 64], cache, i) for i in range(0, 200, 64)], dim=1).cpu().double()
    assert (got - want).norm() < 0.03 * want.norm()


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

@pytest.mark.skipif(not models.ONEDNN_LINEAR, reason="this torch has no oneDNN")
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_weights_give_the_same_and_never_an_old_result(shape, monkeypatch):
    """Catches a copy that outlives its weight: changed in place, replaced, moved, cast, or wanted for gradients."""
    model, tokens = toy_model(**SHAPES[shape]), torch.tensor(random_prompts([12]))
    used = []
    call = models.packed_linear
    monkeypatch.setattr(models, "packed_linear", lambda *a, **k: used.append(a) or call(*a, **k))

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


@pytest.mark.skipif(not models.NATIVE_BFLOAT16, reason="this CPU has no instructions for bfloat16")
def test_products_that_depend_on_the_number_of_rows_are_told_of(monkeypatch, capsys):
    """Catches a check that sees no difference, or one where there is none."""
    models.warn.cache_clear()
    models.check_rows.cache_clear()
    models.check_rows(96, 1001)
    assert not capsys.readouterr().err

    def reordered(x, packed, call=models.packed_linear):
        return call(x, packed) if len(x) > 5 else call(x * 1.01, packed)
    monkeypatch.setattr(models, "packed_linear", reordered)
    models.check_rows.cache_clear()
    models.check_rows(96, 1001)
    assert "1001 by 96 depend on the number of rows" in capsys.readouterr().err
    models.check_rows.cache_clear()


@pytest.mark.parametrize("native, stored, want", [
    (True, torch.bfloat16, torch.bfloat16), (True, torch.float32, torch.float32), (True, torch.float16, torch.float32),
    (False, torch.bfloat16, torch.float32)])
def test_a_checkpoint_comes_in_the_dtype_that_is_fast_here(native, stored, want, tmp_path, monkeypatch, capsys):
    """Catches bfloat16 on a CPU that emulates it, a float32 checkpoint rounded unasked, and silence about either."""
    monkeypatch.setattr(models, "NATIVE_BFLOAT16", native)
    toy_model().save_pretrained(tmp_path, stored)
    assert GPT.from_pretrained(tmp_path, device="cpu").dtype == want
    for dtype, slow in ((want, False), (torch.float16, True), (torch.bfloat16, not native)):
        models.warn.cache_clear()
        Engine(GPT.from_pretrained(tmp_path, dtype, "cpu"), capacity=8)
        line = f"{dtype} is slow on this CPU, which has no instructions for it; --dtype "[6:]
        faster = "bfloat16 is faster" if native else "float32 is faster"
        assert capsys.readouterr().err == (line + faster + "\n") * slow


def test_packing_needs_room(monkeypatch, capsys):
    """Catches copies that push a large model out of the memory, and silence or a line for each engine about it."""
    model = toy_model()
    monkeypatch.setattr(models, "free_memory", lambda device: 1000)
    models.warn.cache_clear()
    models.pack(model)
    models.pack(model)
    assert model.head.copy is None
    told = capsys.readouterr().err
    assert told.count("no room for packed copies") == bool(models.ONEDNN_LINEAR), told


@pytest.mark.skipif(not models.ONEDNN_LINEAR, reason="this torch has no oneDNN")
@pytest.mark.parametrize("vocab_ids", [None, [90, 4, 17, 33, 60]])
def test_the_lm_head_finds_the_same_tokens_packed(vocab_ids):
    """Catches a packed part of the vocabulary that belongs to other ids or to an older weight."""
    model, hidden = toy_model(), torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    vocab_ids = None if vocab_ids is None else torch.tensor(vocab_ids, dtype=torch.int32)
    for factor in (1.0, 1.5):
        with torch.no_grad():
            model.head.weight.mul_(factor)
        want = model.head.topk(hidden, 4, vocab_ids)
        models.pack(model)
        with torch.inference_mode():
            got = model.head.topk(hidden, 4, vocab_ids)
        torch.testing.assert_close(got[0], want[0], atol=1e-5, rtol=1e-5)
        assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("shape", ["llama", "alibi"])
def test_positions_stay_exact_when_a_model_is_cast(shape):
    """Catches angles and slopes that are rounded with the weights."""
    model = toy_model(**SHAPES[shape])
    name = dict(llama="frequencies", alibi="slopes")[shape]
    want = getattr(model, name).clone()
    assert torch.equal(getattr(model.bfloat16(), name), want) and torch.equal(getattr(model.float(), name), want)


def test_a_folder_can_be_looked_at(checkpoint, tmp_path):
    """The command line, in processes of its own."""
    command = [sys.executable, "model.py"]
    look = lambda *args: subprocess.run([*command, *map(str, args)], cwd=ROOT, capture_output=True, text=True)
    said = look(checkpoint)
    assert said.returncode == 0
    assert "llama (LlamaForCausalLM)" in said.stdout and "context       128 tokens" in said.stdout
    parameters = sum(p.numel() for p in GPT.from_pretrained(checkpoint, device="cpu").parameters())
    assert f"{parameters / 1e6:.1f} million" in said.stdout and "0.5 KiB per token in float32" in said.stdout
    said = look(tmp_path / "nowhere")
    assert said.returncode == 2 and said.stderr.count("\n") == 1 and not said.stdout


def test_free_memory_is_a_number():
    assert 2**20 < models.free_memory("cpu") < 2**50


def test_what_a_live_graph_reserves_is_not_free(monkeypatch):
    """Catches memory counted as free that only a captured CUDA graph can use, and what torch keeps for itself not."""
    driver, kept, pool, freed = 100, 40, 30, []  # bytes free at the driver, in torch's cache, in a graph's pool
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(kept))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (driver + sum(freed), 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500 + kept + pool)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 500)
    assert models.free_memory("cuda") == driver + kept


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_of_a_graph_is_free_again_without_it():
    """The same on a device: a graph that needs 1 GiB while it runs."""
    x = torch.ones(2**28, device="cuda")
    before = models.free_memory("cuda")
    replay = capture(lambda: (2 * x).sum(), x.device)[1]
    assert models.free_memory("cuda") < before - 0.9 * 2**30
    del replay
    assert models.free_memory("cuda") > before - 0.1 * 2**30


@pytest.mark.parametrize("shape", SHAPES)
def test_documents_in_one_window_do_not_see_one_another(shape):
    """Catches a token that attends across a border, and positions that run on behind one."""
    model = toy_model(**SHAPES[shape])
    parts = [random_prompts([n], seed=n)[0] for n in (5, 9, 4)]
    documents = torch.tensor([[i for i, part in enumerate(parts) for _ in part], [0] * 18])
    tokens = torch.tensor([sum(parts, []), random_prompts([18], seed=1)[0]])
    hidden = model(tokens, documents=documents)
    for part, got in zip(parts, hidden[0].split([5, 9, 4])):
        torch.testing.assert_close(got, model(torch.tensor([part]))[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(hidden[1], model(tokens[1:])[0], atol=1e-4, rtol=1e-4)
