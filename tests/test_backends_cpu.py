"""backends/cpu.py: masks made once a step, attention with exact sums in bfloat16, logits scored again where their
rounding could decide, packed weights."""

import copy
import math

import pytest
import torch

import model as models
from backends import cpu
from backends.cpu import cached_attention, rescored_argmax
from conftest import SHAPES, random_prompts, toy_model
from generate import Engine
from kernels import gumbel, gumbel_argmax, tree_attention_reference
from model import GPT
from test_clover import random_heads
from test_kernels import as_int64, random_forest
from test_model import chain

needs_bfloat16 = pytest.mark.skipif(not cpu.NATIVE_BFLOAT16, reason="this CPU has no instructions for bfloat16")
needs_onednn = pytest.mark.skipif(not cpu.ONEDNN_LINEAR, reason="this torch has no oneDNN")


@pytest.mark.parametrize("dtype, atol", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("T, Hq, Hkv", [(1, 2, 2), (5, 6, 2), (33, 3, 1), (64, 2, 2)])
@pytest.mark.parametrize("biased", [False, True], ids=["no-bias", "alibi"])
@pytest.mark.parametrize("window", [0, 6])
def test_attention_of_a_tree_is_tree_attention(T, Hq, Hkv, dtype, atol, biased, window):
    """Bug: a node sees another's branch or too far, the sign bit lost by a shift, a head takes another's keys or slope,
    NaN in rows that no node sees comes through."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype)
               for shape in ((2, T, Hq, 16), *[(2, Hkv, T + 9, 16)] * 2))
    ancestors = as_int64([random_forest(T, (), generator) for _ in range(2)])  # every node sees itself
    lengths = torch.tensor([3, 9], dtype=torch.int32)
    slopes = 2.0 ** -torch.arange(1.0, Hq + 1) if biased else None
    k[0, :, 3 + T:] = v[0, :, 3 + T:] = math.nan
    got = cpu.CPUContext(lengths=lengths, ancestors=ancestors, slopes=slopes).attend(q, k, v, window)
    want = tree_attention_reference(q, k, v, lengths, ancestors, None, slopes, window)
    assert got.dtype == dtype and torch.allclose(got.float(), want.float(), atol=atol)


@pytest.mark.parametrize("groups", [1, 3])
def test_attention_in_bfloat16_does_not_depend_on_the_cache_row(groups):
    """Bug: sums in float32, whose rounding shows where in the cache a token's ancestors are. A flipped bit is enough to
    change a text."""
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(1, 1, 2 * groups, 64, generator=generator).bfloat16()
    k, v = (torch.randn(1, 2, 300, 64, generator=generator).bfloat16() for _ in range(2))
    want = cached_attention(q, k, v)
    for T in (1, 5):  # not exact: in the cache's own dtype, within its rounding
        nodes = torch.randn(1, T, 2 * groups, 64, generator=generator).bfloat16()
        got = cached_attention(nodes, k, v, exact=False)
        torch.testing.assert_close(got, cached_attention(nodes, k, v), atol=0.02, rtol=0.02)
    for _ in range(5):
        order = torch.randperm(300, generator=generator)
        assert torch.equal(cached_attention(q, k[:, :, order], v[:, :, order]), want)
        assert torch.equal(cached_attention(q, k[:, :, order].double(), v[:, :, order].double()), want)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rescored_argmax_undoes_the_rounding_of_the_logits(temperature):
    """Bug: the best token of the rounded logits taken, a candidate missed, noise left out, another row's token, also
    beside rows that are no numbers; ties in rows of zeros not given to the lowest id."""
    M, V, C = 600, 500, 64
    hidden, weight = torch.randn(M, C).bfloat16(), torch.randn(V, C).bfloat16()
    weight[100:400] = weight[:100].repeat(3, 1)  # many logits differ by less than their rounding, or not at all
    weight[100:300, 5:8] *= 1.03
    hidden[7] = 0
    exact = hidden.double() @ weight.double().T
    rounded = exact.float().bfloat16().float()
    sequence, position = torch.arange(M) % 3, torch.arange(M)
    want = exact.argmax(1)
    if temperature:
        want = (exact / temperature + gumbel(9, sequence, position, torch.arange(V))).argmax(1)
    assert (gumbel_argmax(rounded, temperature, 9, sequence, position) != want).any() or temperature
    got = rescored_argmax(rounded, hidden, weight, temperature, 9, sequence, position)
    assert torch.equal(got, want)
    broken = rounded.clone()
    broken[3], broken[4, 6] = math.nan, math.inf
    mended = rescored_argmax(broken, hidden, weight, temperature, 9, sequence, position)
    others = (torch.arange(M) != 3) & (torch.arange(M) != 4)
    assert torch.equal(mended[others], want[others]) and mended[3] < V and mended[4] == 6
    alone = [rescored_argmax(rounded[i:i + 1], hidden[i:i + 1], weight, temperature, 9, sequence[i:i + 1],
                                     position[i:i + 1]) for i in range(30)]
    assert torch.equal(torch.cat(alone), got[:30])


@needs_bfloat16
@pytest.mark.parametrize("cache_dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_tokens_hidden_state_is_the_same_bits_wherever_it_is(shape, cache_dtype, monkeypatch):
    """Row invariance in bfloat16: read with its prompt, alone, in a tree of two branches, in a batch. Catches a sum
    whose order depends on other rows or on where in the cache its terms are, which sooner or later changes a text."""
    sizes = dict(n_layer=3, n_embd=256, n_inner=2816, head_size=32)  # enough sums for one to be rounded another way
    model = toy_model(**SHAPES[shape] | sizes, scale=1.0).to(torch.bfloat16)
    cpu.apply(model)
    monkeypatch.setattr(models, "free_memory", lambda device: math.inf if cache_dtype == torch.float64 else 0)
    monkeypatch.setattr(models, "check_memory", lambda *_: None)
    n, texts = 30, torch.tensor(random_prompts([120] * 3))
    with torch.inference_mode():
        read = model.new_cache(1, 200)
        assert read.kv.dtype == cache_dtype
        want = model.prefill(texts[:1], read)[0]
        alone = model.new_cache(1, 200)
        for i in range(60):
            hidden = model(texts[:1, i:i + 1], torch.tensor([[i]]), alone, chain(1))
            assert torch.equal(hidden[0, 0], want[i]), i
            alone.lengths += 1
        for T, batch in ((1, 2), (1, 3), (2, 1), (3, 1), (2, 3)):  # some are padded to MIN_ROWS
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


# ---------------------------------------------------------------------------------------------------------------------
# Packed weights

def scaled(model):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.01)


def replaced(model):
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight = torch.nn.Parameter(layer.weight * 1.01, requires_grad=False)


@needs_onednn
@pytest.mark.parametrize("shape", ["llama", "untied-biased", "gpt2"])
def test_packed_weights_give_the_same_and_never_an_old_result(shape, monkeypatch):
    """Catches a copy that outlives its weight: changed in place, replaced, moved, cast, or wanted for gradients."""
    model, tokens = toy_model(**SHAPES[shape]), torch.tensor(random_prompts([12]))
    used = []
    call = cpu.packed_linear
    monkeypatch.setattr(cpu, "packed_linear", lambda *a, **k: used.append(a) or call(*a, **k))

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
    for change in (scaled, replaced, copy.deepcopy, lambda model: cpu.apply(model.requires_grad_(True)),
                   lambda model: model.to(torch.float64)):
        cpu.apply(model.requires_grad_(False))
        check(packed=True)
        model = change(model) or model
        check(packed=False)


@needs_bfloat16
def test_bits_that_depend_on_rows_or_threads_are_found(monkeypatch, capsys):
    """Catches a check that sees no difference, or one where there is none, and a number of threads that stays."""
    model, usual = toy_model().bfloat16(), torch.get_num_threads()
    call = cpu.packed_linear

    def same_bits(product, counts=(usual, usual + 1)):
        models.warn.cache_clear()
        cpu.product_bits.cache_clear()
        monkeypatch.setattr(cpu, "packed_linear", product)
        return cpu.same_bits(model, counts), "depend on the number of rows" in capsys.readouterr().err
    assert same_bits(call) == ([usual, usual + 1], False)
    assert same_bits(lambda x, packed: call(x if len(x) > 5 else 1.01 * x, packed)) == ([usual], True)
    by_threads = lambda x, packed: call(x, packed) * (1.01 if torch.get_num_threads() > usual else 1)
    assert same_bits(by_threads) == ([usual], False) and torch.get_num_threads() == usual
    model.float()
    assert same_bits(by_threads) == ((usual, usual + 1), False)
    cpu.product_bits.cache_clear()


def test_layers_become_what_they_were_where_a_model_leaves_the_cpu():
    """Catches a mask read back from a GPU, or a float64 cache there, after the model has decoded on a CPU."""
    model = toy_model()
    heads = random_heads(model)
    types = lambda: [type(layer) for module in (model, heads) for layer in module.modules()]
    before = types()
    cpu.apply(model, heads)
    assert types() != before and model.context_type.func is cpu.CPUContext
    model.to("meta")
    cpu.apply(model, heads)
    assert types() == before and model.context_type is models.AttentionContext and "cache_dtype" not in vars(model)


@pytest.mark.parametrize("native, stored, want", [
    (True, torch.bfloat16, torch.bfloat16), (True, torch.float32, torch.float32), (True, torch.float16, torch.float32),
    (False, torch.bfloat16, torch.float32)])
def test_a_checkpoint_comes_in_the_dtype_that_is_fast_here(native, stored, want, tmp_path, monkeypatch, capsys):
    """Catches bfloat16 on a CPU that emulates it, a float32 checkpoint rounded unasked, and silence about either."""
    monkeypatch.setattr(cpu, "NATIVE_BFLOAT16", native)
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
    cpu.apply(model)
    cpu.apply(model)
    assert getattr(model.head, "packed_weight", None) is None
    told = capsys.readouterr().err
    assert told.count("no room for packed copies") == bool(cpu.ONEDNN_LINEAR), told


@needs_onednn
@pytest.mark.parametrize("vocab_ids", [None, [90, 4, 17, 33, 60]])
def test_the_lm_head_finds_the_same_tokens_packed(vocab_ids):
    """Catches a packed part of the vocabulary that belongs to other ids or to an older weight."""
    model, hidden = toy_model(), torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    vocab_ids = None if vocab_ids is None else torch.tensor(vocab_ids, dtype=torch.int32)
    for factor in (1.0, 1.5):
        with torch.no_grad():
            model.head.weight.mul_(factor)
        want = model.head.topk(hidden, 4, vocab_ids)
        cpu.apply(model)
        with torch.inference_mode():
            got = model.head.topk(hidden, 4, vocab_ids)
        torch.testing.assert_close(got[0], want[0], atol=1e-5, rtol=1e-5)
        assert torch.equal(got[1], want[1])
