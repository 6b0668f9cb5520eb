"""backends/cpu.py and cpu.c: each function against a reference, row invariance, packed weights, and building the
library."""

import copy
import ctypes
import math
import os
import pickle
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import model as models
from backends import cpu, cpu_layers, cpu_library
from backends.cpu_layers import PackedHeads, PackedLinear, pack_quantized
from backends.cpu_library import header, library
from backends.tensor_parallel import Group
from clover import PRESETS, AttentionDecoder, CloverHeads
from common.values import warn
from conftest import MODELS, ToyGrammar, needs_compiler, random_prompts, refusal, slow, toy_model
from engine.batching import Engine
from engine.policy import Policy
from generate import NOISE, Decoder, Plan, Sampling, decoder_class, generate
from hf import checkpoint
from kernels import gumbel_argmax, tree_attention_reference
from test_clover import random_heads
from test_drafters import MAKERS, random_published
from test_kernels import as_int64, random_forest
from test_model import chain

pytestmark = needs_compiler
ROOT = Path(__file__).parents[1]


# ---------------------------------------------------------------------------------------------------------------------
# Functions of cpu.c

def packed_weight(kind, n, k, group=32):
    """(a `cpu_layers.PackedWeight` with a bias, the weight and the bias in float64)"""
    bias = torch.randn(n)
    if kind in (header.FLOAT32, header.BFLOAT16):
        weight = torch.randn(n, k).to(torch.float32 if kind == header.FLOAT32 else torch.bfloat16)
        return cpu_layers.pack_floats(weight, bias), weight.double(), bias.double()
    q = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    if kind == header.INT4:
        q = (q & 15).view(torch.uint8)
    G = -(-k // 32) * 32 // group
    scales = (torch.rand(G, n) + 0.1).to(torch.float16 if kind == header.INT8 else torch.float32)
    minimums = torch.randn(G, n) if kind == header.INT4 else None
    spread = lambda x: x.double().T.repeat_interleave(group, 1)[:, :k]
    weight = spread(scales) * q.double()
    if minimums is not None:
        weight = weight + spread(minimums)
    return pack_quantized(q, scales, minimums, bias), weight, bias.double()


def rounded(x):
    """(rows rounded to integers from -127 to 127 in groups of 32, the scale of each group)"""
    groups = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).view(len(x), -1, 32)
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 1e-30, 127 / largest, 0)
    return (groups.double() * inverse.double()).round().float(), largest / 127


@pytest.mark.parametrize("kind", range(4), ids=["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("n, k, group", [(40, 192, 32), (17, 180, 64), (33, 380, 128), (5, 20, 32)])
def test_product_is_the_sum_of_products(kind, n, k, group):
    """Bug: inputs beyond a ragged end, another group's scale, bits that depend on other rows or threads."""
    packed, weight, bias = packed_weight(kind, n, k, group)
    rows = torch.randint(0, n, (7,))
    torch.testing.assert_close(packed.unpack(rows), weight[rows].float())
    for M in (1, 2, 3, 8, 11, 64):
        x = torch.randn(M, k)
        got = packed.multiply(x)
        floats = {header.FLOAT32: x, header.BFLOAT16: x.bfloat16()}
        whole = floats.get(kind, math.prod(rounded(x)).flatten(1)[:, :k])
        want = whole.double() @ weight.T + bias
        assert (got - want).abs().max() < 1e-5 * want.abs().max(), M
        torch.set_num_threads(2)
        assert torch.equal(torch.cat([packed.multiply(row[None]) for row in x]), got)
        torch.set_num_threads(1)


@pytest.mark.parametrize("k", [20, 512, 551, 1090])
def test_rows_are_rounded_as_the_formula_says(k):
    """Bug: another group's maximum or sum, a tie not rounded to even, a division by 0, NaN in another row."""
    x = torch.randn(9, k) * torch.logspace(-4, 4, k)
    x[1] = 0
    x[2, :17] = 1e-35
    x[3, :20] = torch.tensor([-3.5, 0.5, 1.5, -2.5, 127, *[0] * 15])
    x[4, 7] = math.nan
    x[5, k - 1] = math.inf
    q, scale = rounded(x)
    ones = torch.ones(q.shape[1], k)
    got = pack_quantized(torch.eye(k, dtype=torch.int8), ones).multiply(x)  # returns the rounded rows
    sums = pack_quantized(torch.zeros(k, k, dtype=torch.uint8), 0 * ones, ones).multiply(x)
    finite = [0, 1, 2, 3, 6, 7, 8]
    assert torch.equal(got[finite], (q * scale).flatten(1)[finite, :k]) and not got[4:6].isfinite().any()
    want = sum((scale[..., 0] * q.sum(-1)).unbind(1), start=torch.zeros(9))
    assert torch.equal(sums[finite], want[finite, None].expand(-1, k)) and not sums[4:6].isfinite().any()


def attend(q, kv, slopes, window, lengths, ancestors, threads=1, slots=None, first=0):
    """cpu.c's attention of q [B, T, Hq, D] over keys and values kv [2, slots, Hkv, S, D]."""
    B, T, Hq, D = q.shape
    sizes = dict(n_head=Hq, n_kv_head=kv.shape[2], head_size=D)
    block = header.BlockWeights(**sizes, window=window, rope=-1, scale=D ** -0.5)
    tensors = slots, lengths, ancestors, None, None, None, slopes, kv
    a_pass = header.Pass(B, T, threads, kv.dtype == torch.bfloat16, kv.shape[3], 0,
                         *map(cpu_layers.pointer, tensors), 0, *kv.stride()[:3], first=first)
    out = torch.empty_like(q)
    library().attention(block, a_pass, q.data_ptr(), out.data_ptr())
    return out


@pytest.mark.parametrize("T, Hq, Hkv, D", [(1, 2, 2, 16), (5, 3, 1, 72), (33, 6, 3, 21), (64, 2, 2, 128), (9, 7, 1, 1),
                                           (3, 4, 1, 256)])
@pytest.mark.parametrize("biased", [False, True], ids=["no-bias", "alibi"])
@pytest.mark.parametrize("window, dtype", [(0, torch.float32), (6, torch.bfloat16), (150, torch.float32)])
def test_attention_of_a_tree_is_tree_attention(T, Hq, Hkv, D, dtype, biased, window):
    """Bug: a node that sees another branch, a sign bit lost in a shift, another head's keys or slope, NaN from unseen
    rows or an earlier call, a missing split of the cache."""
    attend(torch.ones(1, 1, 1, 256), torch.full((2, 1, 1, 128, 256), math.nan), None, 0, torch.tensor([99]).int(), None)
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([14, 125, 300], dtype=torch.int32)
    q = torch.randn(3, T, Hq, D, generator=generator)
    kv = torch.randn(2, 3, Hkv, 370, D, generator=generator).to(dtype)
    ancestors = as_int64([random_forest(T, (), generator) for _ in range(3)])  # every node sees itself
    slopes = 2.0 ** -torch.arange(1.0, Hq + 1) if biased else None
    for b, length in enumerate(lengths):
        kv[:, b, :, length + T:] = math.nan
    got = attend(q, kv, slopes, window, lengths, ancestors)
    want = tree_attention_reference(q.double(), *kv.double(), lengths, ancestors, None, slopes, window)
    assert torch.allclose(got.double(), want, atol=1e-5)
    assert torch.equal(attend(q, kv, slopes, window, lengths, ancestors, threads=2), got)
    slots = torch.tensor([2, 0], dtype=torch.int32)
    rows = q[slots], kv, slopes, window, lengths, ancestors[slots]
    assert torch.equal(attend(*rows, slots=slots), got[slots])
    n = T // 3  # the first nodes are in the cache already
    rest = (x[:, n:].contiguous() for x in (q, ancestors))
    assert torch.equal(attend(next(rest), kv, slopes, window, lengths, next(rest), first=n), got[:, n:])
    # a prompt is a chain
    prompt = attend(q, kv, slopes, window, lengths, None)
    assert torch.equal(prompt, attend(q, kv, slopes, window, lengths, chain(T).expand(3, T).contiguous()))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_argmax_is_gumbel_argmax(temperature):
    """Bug: a part of the vocabulary left out, a tie that a higher id wins, another row's noise, NaN that wins."""
    logits = torch.randn(6, 9000).mul(3)
    logits[0, [5000, 8999]] = logits[1, [7, 23]] = 50
    sequence, position = torch.tensor([0, 0, 3, 2**40, 1, 1]), torch.arange(6) + 2**33
    for seed in (0, 2**64 - 1):
        args = temperature, seed, sequence, position
        want = gumbel_argmax(logits, *args)
        assert torch.equal(cpu_layers.argmax(logits, *args), want)
    rows = torch.tensor([temperature, 0.0, 1.3]), torch.tensor([5, -7, 2**62]), sequence[:3]  # of two rows each
    assert torch.equal(cpu_layers.argmax(logits, *rows, position), gumbel_argmax(logits, *rows, position))
    logits[2, 100] = math.nan
    assert torch.equal(cpu_layers.argmax(logits, *args), want)


# ---------------------------------------------------------------------------------------------------------------------
# The stages of a step against those of generate.Decoder on the same packed model

SAMPLINGS = Sampling(), Sampling(0.8, seed=2**62), Sampling(1.3, seed=-5), Sampling()

TOKENS = [96, 3, 50, 7, 21, 8, 0, 11]


LAYERS = MAKERS | {  # heads of a layer; 17 depths of 4 beams fill a mask
    "eagle3 of 17": partial(random_published, n_draft=17, norm_before_residual=True, norm_before_fc=True, fc_norm=True),
    "eagle3 with biases": partial(random_published, n_draft=3, own_embed=True,
                                  layers=dict(qk_norm="head", qkv_bias=True))}


def packed_toy(shape="llama", name=None, dtype=torch.float32, **flags):
    """(model, heads), packed. Every second token ties with the one before, unless a layer's output may round apart."""
    model = toy_model(**MODELS[shape] | flags).to(dtype)
    if name in LAYERS:
        cpu.apply(model)
        return model, LAYERS[name](model)
    model.head.weight.data[1::2] = model.head.weight[:-1:2]
    heads = name and random_heads(model, name.removesuffix(" with NaN")).to(dtype)
    if name and name.endswith("NaN"):
        heads.heads[1].project.linear.bias.fill_(math.nan)
        heads.heads[-1].project.linear.bias.fill_(math.inf)
    cpu.apply(model, heads)
    return model, heads


@torch.inference_mode()
def filled_decoder(cls, model, heads, tree_size, lengths=(40, 13, 0, 77)):
    """A decoder whose slots hold random sequences with a small vocabulary."""
    made = cls(model, policy=Policy(model, heads, True, tree_size), batch_size=len(lengths), capacity=90)
    slots, generator = made.slots, torch.Generator().manual_seed(1)
    slots.cache.kv.normal_(generator=generator)
    slots.history.copy_(torch.tensor(TOKENS)[torch.randint(0, 6, slots.history.shape, generator=generator)])
    slots.cache.lengths.copy_(torch.tensor(lengths))
    slots.all.root.copy_(slots.history[torch.arange(len(lengths)), slots.cache.lengths])
    slots.all.sequence.copy_(torch.arange(len(lengths)) + 2**40)
    slots.active.fill_(1)
    for slot, sampling in zip(range(len(lengths)), SAMPLINGS):
        slots.set(slot, **vars(sampling))

    return made


@pytest.mark.parametrize("shape", ["llama", "gpt2", "gemma", "hybrid"])
def test_states_in_bfloat16_are_the_decoders(shape):
    """Bug: an embedding rounded too late; a norm rounded for heads that cpu.c does not run, whose output then differs
    from plain decoding."""
    both = packed_toy(shape, None, torch.bfloat16, embed_scale=3.7)
    theirs, ours = (filled_decoder(cls, *both, 20) for cls in (cpu.PackedDecoder, cpu.CompiledDecoder))
    plan = Plan(4, 20, 0, NOISE)
    with torch.inference_mode():
        draft = ours.draft(plan)
        want = theirs.verify(plan, draft._replace(batch=theirs.batch(4)))
        assert all(map(torch.equal, ours.verify(plan, draft), want))


@torch.inference_mode()
def test_heads_in_c_read_no_row_before_the_first():
    """Bug: a server dies of a prompt of one token, which has no committed row, in its first slot."""
    decoder = filled_decoder(cpu.CompiledDecoder, *packed_toy(name="clover"), 5, lengths=(0, 13))
    rows = torch.zeros(1 + decoder.hidden_rows.shape[:2].numel(), decoder.hidden_rows.shape[2])
    rows[0] = math.nan
    decoder.struct.hidden_rows = rows[1:].data_ptr()
    decoder.draft(Plan(2, 5, 4, NOISE))
    assert decoder.slots.heads_cache.kv.isfinite().all()


@pytest.mark.parametrize("shape, name, lookup, T, vocabulary, grammars", [
    *((shape, "clover", True, 9, [], shape == "qk-norm") for shape in MODELS),
    *(("llama", name, True, 63, vocabulary, bool(vocabulary)) for name in PRESETS for vocabulary in ([], TOKENS)),
    ("untied-biased", "clover2", False, 5, TOKENS, True), ("gpt2", "medusa", True, 2, [], False),
    ("llama", "clover with NaN", True, 30, [], True), ("gemma", None, True, 20, [], True),
    ("hybrid", "clover2", False, 5, [], False), ("gpt2", None, False, 1, [], False),
    ("hybrid", "mtp", False, 5, [], False), ("hybrid", "mtp", True, 9, [], True),
    ("gemma", "eagle3", False, 9, [], True), ("untied-biased", "eagle3 of 33 tokens", True, 9, [], False),
    ("gpt2", "eagle3 with biases", False, 5, [], False), ("untied-biased", "eagle3 of 17", False, 18, [], False),
    ("llama", None, False, 9, [], True)])
def test_steps_in_c_are_those_of_the_decoder(shape, name, lookup, T, vocabulary, grammars, exact, monkeypatch):
    """Bug: another beam's state, another order of equals, a match that is not the latest, another token's embedding,
    position or noise, another slot's row, state that one step leaves wrong for the next; a mask of another row, a chain
    of forced text beyond its end, counts of sequences with a grammar."""
    model, heads = packed_toy(shape, name, embed_scale=1.0 if name in LAYERS else 3.7)
    if heads and name not in LAYERS:
        heads.set_vocabulary(vocabulary)
    engines = []
    for cls in (Decoder, cpu.CompiledDecoder):
        monkeypatch.setattr(model, "decoder", None if cls is Decoder else cls)
        policy = Policy(model, heads, lookup, T, schema=grammars)
        engines.append(Engine(model, policy=policy, batch_size=3, capacity=80))
        assert type(engines[-1].decoder) is cls
        prompts = [2 * prompt for prompt in random_prompts([7, 1, 30, 12, 2], vocab_size=8)]
        prompts.append(prompts[0][:9] + prompts[1])  # shares a part of a slot's cache
        for index, (prompt, sampling) in enumerate(zip(prompts, SAMPLINGS * 2)):
            grammar = ToyGrammar() if grammars and index % 3 else None
            engines[-1].add(prompt, 20, sampling, index=index, grammar=grammar)
    while engines[0].busy:
        steps = (sorted(engine.step(with_trees=True), key=lambda x: x.sequence.index) for engine in engines)
        for want, got in zip(*steps, strict=True):
            assert got[1:5] == want[1:5] and got.tree[:5] == want.tree[:5]
            assert got.tree.probabilities == pytest.approx(want.tree.probabilities, abs=1e-5)
    assert torch.equal(*(engine.policy.counts for engine in engines))


def test_two_threads_decode_with_one_model():
    """Bug: buffers in cpu.c or the packed heads that threads share."""
    model, heads = packed_toy(name="clover")
    say = lambda seed: generate(model, random_prompts([9, 30]), 40, heads, lookup=True, temperature=1, seed=seed).tokens
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(say, range(6))] == [*map(say, range(6))]


# ---------------------------------------------------------------------------------------------------------------------
# Models

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", MODELS)
def test_a_tokens_hidden_state_is_the_same_bits_wherever_it_is(shape, dtype):
    """Row invariance: in a prefill, alone, in a tree of two branches, in a batch. Bug: a sum whose order depends on
    other rows or on the cache rows of its terms, which sooner or later changes an output."""
    model = toy_model(**MODELS[shape] | dict(n_layer=3, n_embd=256, n_inner=700), scale=1.0).to(dtype)
    cpu.apply(model)
    new_cache = partial(model.new_cache, capacity=200, nodes=64)
    n, texts = 30, torch.tensor(random_prompts([160] * 3))
    with torch.inference_mode():
        want = model.prefill(texts[:1], new_cache(1))[0]
        alone = new_cache(1)
        for i in range(60):
            hidden = model(texts[:1, i:i + 1], torch.tensor([[i]]), alone, chain(1))
            assert torch.equal(hidden[0, 0], want[i]), i
            if alone.states:
                alone.states.commit(torch.tensor([[0]]), torch.tensor([1]))
            alone.lengths += 1
        for T, batch in ((1, 2), (2, 1), (17, 3)):
            cache = new_cache(batch)
            for b in range(batch):
                for start in range(0, 120, 40):
                    model.prefill(texts[b:b + 1, start:start + 40], cache.one(b), start)
            hidden = model(texts[:batch, 120:120 + T], torch.arange(120, 120 + T).expand(batch, T), cache,
                           chain(T).expand(batch, T))
            assert torch.equal(hidden[0], want[120:120 + T]), (T, batch)
        # a sequence's next n tokens at even nodes, another's at odd nodes; alone, then in a batch of three trees
        nodes, depths = texts[:2, 110:110 + n].T.flatten(), torch.arange(2 * n) // 2
        ancestors = torch.tensor([[sum(1 << j for j in range(i % 2, i + 1, 2)) | 1 for i in range(2 * n)]])
        for batch in (1, 3):
            cache = new_cache(batch)
            for b in range(batch):
                model.prefill(texts[b:b + 1, :110], cache.one(b))
            hidden = model(nodes.expand(batch, -1), 110 + depths.expand(batch, -1), cache, ancestors.expand(batch, -1))
            assert torch.equal(hidden[0, ::2], want[110:110 + n]), batch


@pytest.mark.parametrize("shape", MODELS)
def test_a_packed_model_computes_the_same_and_refuses_the_rest(shape, tmp_path):
    """Bug: a norm, rotation or window missing in C, a float copy that stays in memory, a packed weight that trains."""
    model, tokens = toy_model(**MODELS[shape]), torch.tensor(random_prompts([140] * 2))
    heads, want = random_heads(model), model(tokens)
    logits = model.lm_head(want)
    config, size = model.config, sum(p.numel() for p in model.parameters() if p.dim() == 2)
    cpu.apply(model, heads)
    cpu.apply(model, heads)  # does nothing the second time
    assert cpu.is_exact(model) and sum(p.numel() for p in model.parameters() if p.dim() == 2) < size / 4
    with torch.no_grad():
        cache, positions = model.new_cache(2, 200, nodes=10), torch.arange(130, 140).expand(2, -1)
        prompt = model.prefill(tokens[:, :130], cache)
        nodes = model(tokens[:, 130:], positions, cache, chain(10).expand(2, -1))
        for hidden in (model(tokens), torch.cat((prompt, nodes), 1)):
            torch.testing.assert_close(hidden, want, atol=3e-4, rtol=3e-4)
            torch.testing.assert_close(model.lm_head(hidden), logits, atol=1e-3, rtol=1e-3)
    x = torch.randn(2, config.n_embd, requires_grad=True)
    for token in (-1, 97):
        pytest.raises(IndexError, model, torch.tensor([[token]]))
    for use in (lambda: model.head.weight, lambda: model.to("cpu", torch.bfloat16), lambda: copy.deepcopy(model),
                lambda: pickle.dumps(model), model.state_dict, lambda: model.save_pretrained(tmp_path),
                lambda: model.head(x), lambda: heads.to("meta"), lambda: heads.save_pretrained(tmp_path)):
        refusal(use, "packed for decoding", "packed=False")


def test_only_what_has_kernels_is_packed():
    """Bug: packing float16, which has no kernels, a custom layer, or a model on another device; beside heads in torch,
    states whose bits depend on the tree."""
    refusal(lambda: cpu.apply(toy_model().to(torch.float16)), "in float32 or bfloat16, not in torch.float16")
    model = toy_model()
    model.blocks[0].mlp.up.__class__ = type("Own", (torch.nn.Linear,), {})
    cpu.apply(model)
    assert isinstance(model.blocks[0].mlp.up, torch.nn.Linear) and not cpu.is_exact(model)
    assert isinstance(model.blocks[0].mlp.down, PackedLinear)
    heads = random_heads(toy_model(**MODELS["hybrid"]))
    heads.heads[1].project.linear.__class__ = type("Own", (torch.nn.Linear,), {})
    cpu.apply(heads.model, heads)
    assert not isinstance(heads.heads, PackedHeads) and isinstance(heads.heads[1].mix.query, PackedLinear)
    assert decoder_class(heads.model, heads) is cpu.PackedDecoder
    prompts = random_prompts([9, 30, 1])
    want = generate(heads.model, prompts, 20).tokens
    assert generate(heads.model, prompts, 20, heads, tree_size=17, batch_size=2).tokens == want
    model = toy_model().to("meta")
    cpu.apply(model)
    assert type(model.head) is models.LMHead


def test_memory_taken_while_decoding_serves_later_packing(monkeypatch):
    """Bug: a vocabulary set inside inference mode takes memory that no model can be packed into afterwards."""
    monkeypatch.setattr(cpu_layers, "FREE", [torch.empty(0, dtype=torch.uint8)])
    with torch.inference_mode():
        cpu_layers.pack_rounded(torch.randn(8, 64))
    cpu_layers.pack_rounded(torch.randn(8, 64))


def keyed(self, z, e):
    """In place of the Attention Decoder: a sigmoid instead of the cosine."""
    key, value = self.key_value(e).chunk(2, dim=-1)
    return z + (self.query(self.norm(z)) * key).sum(-1, keepdim=True).sigmoid() * value


def parallel(self, hidden, residual, rope, mask, cache=None):
    """In place of a block: attention and MLP read the same norm."""
    normed, hidden = self.attn_norm.add_and_norm(hidden, residual)
    return hidden + self.attn(normed, rope, mask, cache) + self.mlp(normed), None


EDITS = {"head": (AttentionDecoder, "forward", keyed), "block": (models.Block, "forward", parallel),
         "norm": (models.Norm, "add_and_norm", lambda self, x, _: (x * self.weight, x))}


@pytest.mark.parametrize("name, edit", [
    ("clover", None), ("clover", "head"), ("medusa", "head"), ("clover", "block"), ("hydra", "norm")])
def test_edited_heads_run_as_they_are_written(name, edit, monkeypatch, capsys):
    """Bug: a researcher changes a class of the heads, trains with it, and measures what cpu.c has instead."""
    warn.cache_clear()
    model = toy_model()
    heads = random_heads(model, name)
    if edit:
        monkeypatch.setattr(*EDITS[edit])
    cpu.apply(model, heads)
    runs_in_c = edit is None or (edit == "head" and name == "medusa")  # which mixes no tokens
    assert isinstance(heads.heads, PackedHeads) == runs_in_c
    assert capsys.readouterr().err.count("run in torch") == (not runs_in_c)
    if edit != "norm":  # the model's blocks stay in C
        assert generate(model, [[5, 6]], 9, heads, tree_size=9).tokens == generate(model, [[5, 6]], 9).tokens


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_models_and_their_heads_are_loaded_packed(quantize, tmp_path, capsys):
    """Bug: float16 on a CPU, which has no kernels, so that the output may depend on the tree."""
    model = toy_model()
    model.save_pretrained(tmp_path)
    random_heads(model).save_pretrained(tmp_path / "clover")
    load = partial(checkpoint.load, tmp_path, device="cpu", quantize=quantize)
    plain = load(packed=False)
    assert type(plain.blocks[0].attn.qkv) is torch.nn.Linear and plain.head.weight.shape == (97, 64)
    assert type(CloverHeads.from_pretrained(tmp_path / "clover", plain).heads[0].mix.query) is torch.nn.Linear
    warn.cache_clear()
    half = load(dtype=torch.float16)
    assert half.dtype == torch.bfloat16 and capsys.readouterr().err.count("float16 is not for a CPU") == 1
    for model in (load(), half):
        heads = CloverHeads.from_pretrained(tmp_path / "clover", model)
        assert cpu.is_exact(model) and decoder_class(model, heads) is cpu.CompiledDecoder
        want = generate(model, random_prompts([9, 30]), 20, batch_size=1).tokens
        assert generate(model, random_prompts([9, 30]), 20, heads, tree_size=17).tokens == want


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
def test_what_torch_multiplies_is_loaded_in_the_faster_dtype(fast, tmp_path, monkeypatch, capsys):
    """Bug: bfloat16 at a fraction of float32's speed, packed models in float32, a line from each rank or load."""
    toy_model().save_pretrained(tmp_path, torch.bfloat16)
    monkeypatch.setattr(cpu, "torch_multiplies_bfloat16", lambda: fast)
    warn.cache_clear()
    load = partial(checkpoint.load, tmp_path, device="cpu")
    by_torch = torch.bfloat16 if fast else torch.float32
    assert load().dtype == load(dtype=torch.bfloat16, packed=False).dtype == torch.bfloat16
    assert load(group=Group(rank=1, size=2)).dtype == by_torch and not capsys.readouterr().err
    assert load(group=Group(rank=0, size=2)).dtype == load(packed=False).dtype == by_torch
    assert capsys.readouterr().err.splitlines() == [cpu.SLOW_BFLOAT16] * (not fast)


@pytest.mark.parametrize("features, onednn, fast", [
    ("avx512_f avx512_bf16", True, True), ("amx_bf16", True, True), ("bf16", True, True),
    ("avx2 avx512_f avx512_vnni", True, False), ("avx512_bf16", False, False), ("bf16", None, False)])
def test_torch_is_fast_in_bfloat16_by_instructions_for_it(features, onednn, fast, monkeypatch):
    """Bug: yes for AVX-512 without BF16, where oneDNN converts to float32; an error where torch lacks oneDNN."""
    operators = {} if onednn is None else dict(_is_mkldnn_bf16_supported=lambda: onednn)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(features.split(), True) | dict(avx=False))
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(**operators))
    assert cpu.torch_multiplies_bfloat16() is fast


# ---------------------------------------------------------------------------------------------------------------------
# The library

def run_with(environment, code, *arguments):
    """Runs code in a new process from the root; returns the finished process with its output."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


TEXT = """
import sys, torch
from backends.cpu_library import library
from generate import generate
from hf import checkpoint
torch.set_num_threads(1)
dtypes = [checkpoint.load(path, device="cpu").dtype for path in sys.argv[2:]]  # stored in bfloat16, float16
model = checkpoint.load(sys.argv[1], device="cpu")
print(library() is not None, *dtypes, generate(model, [[1, 2, 3], [50] * 40], 20, lookup=True, tree_size=5).tokens)
"""


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The folder of a library of one function in place of cpu.c, and of temporary files."""
    for name, text in {"cpu.c": "int answer(void) { return 42; }", "cpu.h": ""}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(cpu_library, "FOLDER", tmp_path)
    monkeypatch.setattr(cpu_library.tempfile, "tempdir", str(tmp_path))
    warn.cache_clear()
    return tmp_path


def test_the_library_is_built_once_and_again_if_broken(small, monkeypatch, capsys):
    """Bug: a compiler that runs each time, a broken, another machine's or half-written file that is loaded, a traceback
    or several lines if the cache folder is not writable."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(small))
    runs, run, macros = [], subprocess.run, [""]

    def run_here(command, **options):
        runs.append(command)
        done = run(command, **options)
        if "-dM" in command:
            done.stdout += macros[-1]
        return done
    monkeypatch.setattr(subprocess, "run", run_here)
    compiled = lambda: sum("-o" in command for command in runs)
    command = ["cc", "-shared", "-fPIC"]
    code = (f"from backends import cpu_library as x; x.FOLDER = x.Path({str(small)!r}); "
            f"x.load_or_build({command})")
    both = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    (file,) = (small / "clover").iterdir()
    assert file.suffix == ".so" and not compiled()
    file.write_bytes(b"truncated")
    for _ in range(2):
        assert cpu_library.load_or_build(command).answer() == 42
    assert compiled() == 1 and capsys.readouterr().err.count("\n") == 1  # else seconds without a word
    macros.append("#define another CPU")
    cpu_library.load_or_build(command)
    assert compiled() == 2 and len(list((small / "clover").iterdir())) == 2
    file.parent.chmod(0o500)  # not writable, but not empty
    assert cpu_library.load_or_build(command).answer() == 42 and compiled() == 2 and not capsys.readouterr().err


def test_without_a_home_the_library_is_cached_where_nobody_else_can_plant_one(small, monkeypatch, capsys):
    """Bug: a traceback for a user id without a passwd entry; a library of another user that is loaded."""
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    folder, other = small / f"clover-{os.getuid()}", small / "other"

    def load(warnings):
        warn.cache_clear()
        for _ in range(2):
            assert cpu_library.load_or_build(["cc", "-shared", "-fPIC"]).answer() == 42
        assert capsys.readouterr().err.count("anew") == warnings
    load(0)
    assert folder.stat().st_mode & 0o777 == 0o700
    (file,) = folder.iterdir()
    file.rename(file.with_suffix(""))  # loaded, so it must not change
    file.write_bytes(b"planted")
    folder.chmod(0o777)
    load(1)
    folder.rename(other).chmod(0o700)
    folder.symlink_to(other)
    monkeypatch.setenv("HOME", str(small / "cpu.h"))  # a file: no folder can be made in it
    load(1)
    assert file.read_bytes() == b"planted"


def test_libraries_load_from_where_they_can_and_without_a_compiler(small, monkeypatch, capsys):
    """Bug: a folder mounted noexec that counts as a compiler that fails; a cached library that is not used, or is used
    on another CPU or with other flags."""
    cache, temporary = small / "cache", small / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(header, "functions", {})
    monkeypatch.setattr(cpu_library.tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.delenv("CLOVER_CFLAGS", raising=False)
    native = ctypes.CDLL

    def load(says, blocked=(), **environment):
        def mapped(path):
            if any(Path(path).is_relative_to(folder) for folder in blocked):
                raise OSError("failed to map segment from shared object")
            return native(path)
        warn.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(ctypes, "CDLL", mapped)
            for name, value in environment.items():
                patch.setenv(name, value)
            loaded = cpu_library.library.__wrapped__()
        lines = [line for line in capsys.readouterr().err.splitlines() if "compiling" not in line]
        assert len(lines) == bool(says) and says in "".join(lines)
        assert loaded is None or loaded.answer() == 42
        return loaded
    assert load("not mounted noexec", [cache, temporary]) is None
    assert load("", [cache]) and load(f"C kernels of {temporary}", [cache], CC="/none")
    assert load("", [temporary]) and load("", CC="") and load("", CFLAGS="-march=nocona -O0")
    assert load(f"with the C kernels of {cache}", CC="/none") and load("No closing quotation", CC="'")
    assert load("without the C kernels", CC="/none", CLOVER_CFLAGS="-DPLAIN") is None
    monkeypatch.setattr(cpu_library, "find", lambda *args: "another CPU")
    assert load("without the C kernels", CC="/none") is None
    assert load("", CLOVER_CFLAGS="-mtune=generic -march=native")


def test_the_environments_flags_do_not_choose_the_instructions(monkeypatch):
    """Bug: conda's CFLAGS, whose kernels are three times slower, or other arithmetic; no way to choose on purpose."""
    for name in ("CC", "CFLAGS", "CLOVER_CFLAGS"):
        monkeypatch.delenv(name, raising=False)
    own = cpu_library.compiler_command()
    monkeypatch.setenv("CC", " ")
    monkeypatch.setenv("CFLAGS", "-march=nocona -mtune=haswell -mno-avx2 -O2 -ffast-math -isystem /opt/include")
    assert cpu_library.compiler_command() == ["cc", "-isystem", "/opt/include", *own[1:]]
    monkeypatch.setenv("CLOVER_CFLAGS", "-march=x86-64-v3 -O1")
    assert cpu_library.compiler_command()[-2:] == ["-march=x86-64-v3", "-O1"]


@pytest.mark.parametrize("compiler", ["/nonexistent/cc", slow("false")])
def test_without_a_compiler_the_output_is_the_same(compiler, tmp_path, monkeypatch, capsys):
    """Bug: a traceback, an unhelpful message, bfloat16 without kernels. In float32, where ties are unlikely."""
    folders = tmp_path / "float32", tmp_path / "bfloat16", tmp_path / "float16"
    for folder in folders:
        toy_model().save_pretrained(folder, getattr(torch, folder.name))
    monkeypatch.setattr(sys, "argv", ["-c", *map(str, folders)])
    exec(TEXT, {})
    want, warned = capsys.readouterr()
    got = run_with(dict(CC=compiler, XDG_CACHE_HOME=str(tmp_path), TMPDIR=str(tmp_path)), TEXT, *folders)
    assert want.startswith("True torch.bfloat16 torch.float32") and not warned
    assert got.stdout == want.replace("True torch.bfloat16", "False torch.float32")
    assert len(got.stderr.splitlines()) == 1
    assert "install a C compiler" in got.stderr


PRODUCTS = """
import hashlib, sys, torch
sys.path.append("tests")
from test_backends_cpu import packed_weight
torch.manual_seed(0)
torch.set_num_threads(1)
for kind in range(4):
    packed = packed_weight(kind, 40, 192)[0]
    rows = packed.unpack(torch.arange(40))
    for x in (rows, *(torch.randn(M, 192) for M in (1, 3, 7, 8, 16))):
        print(kind, len(x), hashlib.sha256(packed.multiply(x).numpy()).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.skipif(not all(map(shutil.which, ("gcc", "clang"))), reason="needs gcc and clang")
@pytest.mark.parametrize("flags", ["", "-DPLAIN", *(["-march=x86-64-v3"] if platform.machine() == "x86_64" else [])])
def test_compilers_multiply_to_the_same_bits(flags, tmp_path):
    """Bug: a product and a sum that one compiler rounds once and the other twice."""
    gcc, clang = (run_with(dict(CC=compiler, CLOVER_CFLAGS=flags, XDG_CACHE_HOME=str(tmp_path / compiler)), PRODUCTS)
                  for compiler in ("gcc", "clang"))
    assert gcc.stdout.count("\n") == 24 and gcc.stdout == clang.stdout
    assert all(done.stderr.count("\n") == 1 and "compiling" in done.stderr for done in (gcc, clang))


FUNCTIONS = "product or blocks_are or rounded or attention or argmax or same_bits or in_c or states_in or threads"
SANITIZED = "-fsanitize=address,undefined -fno-sanitize-recover=all -g"


@pytest.mark.parametrize("flags", ["-O0 -DPLAIN", *(slow(f"-O1 {flags}") for flags in (
    "-march=x86-64-v3", "-march=x86-64-v2", "-march=x86-64-v4", SANITIZED) if platform.machine() == "x86_64")])
def test_other_processors_compute_the_same(flags, tmp_path):
    """Bug: an error in code for other CPUs, or one that sanitizers find."""
    environment = dict(CLOVER_CFLAGS=flags, XDG_CACHE_HOME=str(tmp_path))
    if SANITIZED in flags:
        libraries = [subprocess.run(["cc", f"-print-file-name=lib{name}.so"], capture_output=True, text=True).stdout
                     for name in ("asan", "ubsan")]
        environment |= dict(LD_PRELOAD=" ".join(map(str.strip, libraries)), ASAN_OPTIONS="detect_leaks=0")
    code = "import pytest, sys; sys.exit(pytest.main(['-q', '-x', '-n', '0', *sys.argv[1:]]))"
    functions = "product or blocks_are or rounded" if "PLAIN" in flags else FUNCTIONS  # only these differ
    files = ["tests/test_backends_cpu.py", *["tests/test_hf_gguf.py"] * bool(find_spec("gguf"))]
    done = run_with(environment, code, *files, "-k", functions)
    assert "passed" in done.stdout and "skipped" not in done.stdout
