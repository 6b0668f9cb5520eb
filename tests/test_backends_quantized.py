"""quantized.py: packed layers compute what dequantised ones do, and --quantize rounds to the nearest."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch

from backends import cpu
from backends.quantized import (
    INT8_ROWS,
    Layout,
    PackedLayer,
    QuantizedLinear,
    QuantizedLMHead,
    round_weight,
    rounded_layouts,
)
from backends.tensor_parallel import Group
from clover import PRESETS, CloverHeads
from conftest import random_prompts, toy_model
from generate import generate
from hf import checkpoint
from model import InputError
from test_hf_quantization import write_quantised

ROOT = Path(__file__).parent.parent
INT4 = lambda group: Layout("int4", group, torch.bfloat16, True)
SIZES = dict(n_embd=128, head_size=32, n_inner=160)  # groups of 128, and of 32 in the MLP


@pytest.fixture
def packs(monkeypatch):
    """Lets folders load as where kernels run; what computes here are the kernels' references."""
    monkeypatch.setattr(checkpoint, "runs_triton", lambda *_: True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    toy_model(**SIZES).save_pretrained(path)
    return path


def values(layer):
    """A packed layer's weight, float32."""
    return layer.embedding(torch.arange(len(layer.weight))) if isinstance(layer, QuantizedLMHead) else layer.values()


@pytest.mark.parametrize("layout", [INT8_ROWS, INT4(128), INT4(64), INT4(32)], ids=str)
def test_rounding_is_to_the_nearest(layout):
    """Catches a zero off the grid, a largest number that is clipped, NaN for a group of zeros, another chunk's rows."""
    value = torch.randn(70, 256) * torch.logspace(-3, 3, 70)[:, None]
    value[3] = 0
    value[4, :128] = value[4, :128].abs() + 1  # a group without 0
    weight = round_weight(value, layout)
    got = weight.values()
    group = layout.group or 256
    step = weight.scales.T.float().repeat_interleave(group, dim=1)
    slack = 0.51 if layout == INT8_ROWS else 0.6  # of which a step rounded to bfloat16 takes some
    assert ((got - value).abs() <= slack * step).all()
    assert torch.equal(got[3], value[3]) and got.isfinite().all()
    packed = weight.pack()
    assert packed.packed.nbytes == 70 * 256 // (1 if layout == INT8_ROWS else 2)
    layer = QuantizedLinear(packed, 256, None)
    x = torch.randn(200, 256)  # as many rows take another way
    torch.testing.assert_close(layer(x), x @ got.T, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(layer(x[:7]), layer(x)[:7], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_packed_and_dequantised_are_one_model(folder, quantize, monkeypatch):
    """Catches a packed layer that is rounded otherwise than a dequantised one, a tied table rounded for both uses."""
    want = checkpoint.load(folder, torch.float32, "cpu", quantize=quantize)
    plain = checkpoint.load(folder, torch.float32, "cpu")
    monkeypatch.setattr(checkpoint, "runs_triton", lambda *_: True)
    got = checkpoint.load(folder, torch.float32, "cpu", quantize=quantize)
    assert got.hash == want.hash == plain.hash  # so that heads of the one serve the others
    assert torch.equal(got.embed.weight, plain.embed.weight) and torch.equal(want.embed.weight, plain.embed.weight)
    for name in rounded_layouts(want, quantize):
        assert torch.equal(values(got.get_submodule(name.removesuffix(".weight"))), want.get_parameter(name)), name
    prompts = random_prompts([5, 150])
    for way in (dict(tree_size=1), dict(tree_size=5, lookup=True), dict(temperature=0.7, top_k=20, tree_size=1)):
        assert generate(got, prompts, 12, **way).tokens == generate(want, prompts, 12, **way).tokens


@pytest.mark.parametrize("move", [lambda m: m.to(torch.bfloat16), deepcopy, lambda m: deepcopy(m).to("cpu")])
def test_packed_weights_keep_their_bits(folder, packs, move):
    """Catches scales or e4m3 values that a cast of the model rounds, and heads that read rows in another dtype."""
    model = checkpoint.load(folder, torch.float32, "cpu", quantize="int8")
    own = lambda model: [x.clone() for layer in (model.head, model.blocks[0].mlp.up) for x in layer.buffers()]
    before = own(model)
    moved = move(model)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(before, own(moved), strict=True))
    assert CloverHeads(PRESETS["hydra"], moved).embedding(torch.tensor([1])).dtype == moved.dtype
    cpu.apply(moved)


def test_the_head_is_an_lm_head():
    """Catches a method that gives what LMHead's does not."""
    head = QuantizedLMHead(97, 64)
    weight = round_weight(torch.randn(97, 64), INT8_ROWS)
    for target, stored, _ in head.slots(weight, None):
        target.copy_(stored)
    dense = weight.values()
    hidden = torch.randn(130, 64)
    logits = hidden @ dense.T
    torch.testing.assert_close(head.logits(hidden), logits)
    torch.testing.assert_close(head(hidden), logits)
    torch.testing.assert_close(head.topk(hidden, 3)[0], logits.log_softmax(-1).topk(3).values, atol=1e-4, rtol=1e-4)
    some = torch.tensor([5, 9, 11, 60], dtype=torch.int32)
    assert (torch.isin(head.topk(hidden, 2, some)[1], some)).all()
    position = torch.zeros(130, dtype=torch.int64)
    assert torch.equal(head.sample(hidden, 0.0, 0, position, position), logits.argmax(-1))
    assert torch.equal(head.embedding(torch.tensor([[3, 9]])), dense[[3, 9]][None])


@pytest.mark.parametrize("kind", ["awq", "gptq-8", "fp8", "int4", "int8"])
def test_ranks_hold_slices_of_the_packed_rows(kind, tmp_path, packs):
    """Catches columns of another rank, or scales that were not cut with them."""
    flags = dict(n_embd=256, head_size=64, n_inner=512)
    toy_model(**flags).save_pretrained(tmp_path / "whole")
    path, quantize = tmp_path / "whole", kind
    if not kind.startswith("int"):
        path, quantize = write_quantised(tmp_path, kind, **flags), None
    whole = checkpoint.load(path, torch.float32, "cpu", quantize=quantize)
    for rank in range(2):
        class Alone(Group):
            def connect(self, model):
                """A rank of which the others do not run."""
        group = Alone(rank, 2)
        part = checkpoint.load(path, torch.float32, "cpu", group, quantize)
        assert part.hash == whole.hash
        for name, layer in part.named_modules():
            if isinstance(layer, PackedLayer):
                want = values(whole.get_submodule(name))
                dim, slices = group.shard_slices(f"{name}.weight", whole.config)
                want = torch.cat([want[x] if dim == 0 else want[:, x] for x in slices], dim=dim)
                assert torch.equal(values(layer), want), name


def test_what_cannot_be_rounded_is_refused(folder, packs, tmp_path):
    """Catches a rank that cuts a group, a folder that is rounded twice, channels that make no whole groups."""
    with pytest.raises(InputError, match="a rank's 64 inputs of blocks.0.attn.proj.weight cut a group of 128; take"):
        checkpoint.load(folder, torch.float32, "cpu", Group(0, 2), "int4")
    with pytest.raises(InputError, match="is quantised already .*4 bits, groups of 64.*; leave out --quantize"):
        checkpoint.load(write_quantised(tmp_path, "awq"), torch.float32, "cpu", quantize="int8")
    toy_model(n_inner=90).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="mlp.down.weight has 90 inputs; take --quantize int8"):
        checkpoint.load(tmp_path, torch.float32, "cpu", quantize="int4")
    checkpoint.load(tmp_path, torch.float32, "cpu", quantize="int8")


# ---------------------------------------------------------------------------------------------------------------------
# Heads, and the demo

@pytest.mark.parametrize("quantize, temperature", [("int8", 0.8), ("int4", 0.0)])
def test_the_demo_says_the_same_in_every_tree_and_batch(quantize, temperature):
    """Catches rounded weights whose products depend on the rows beside them, or on the number of threads."""
    model = checkpoint.load(ROOT / "demo", device="cpu", quantize=quantize)
    assert 0.3 < model.weight_bytes() / 18.8e6 < 0.7  # of bfloat16's; else auto takes it for a smaller one
    heads = CloverHeads.from_pretrained(ROOT / "demo" / "clover", model)
    prompts = random_prompts([9, 30, 4], vocab_size=4096)
    want = generate(model, prompts, 24, tree_size=1, batch_size=1, temperature=temperature).tokens
    torch.set_num_threads(2)
    for way in (dict(tree_size=5, batch_size=1), dict(tree_size=17, lookup=True), dict(tree_size=8, batch_size=2)):
        assert generate(model, prompts, 24, heads, **way, temperature=temperature).tokens == want, way
    torch.set_num_threads(1)


@pytest.mark.skipif(cpu.library() is None, reason="there is no C compiler")
@pytest.mark.parametrize("kind", ["awq", "gptq-4", "gptq-8", "fp8", "int8", "int4"])
def test_layers_on_a_cpu_hold_the_same_values(kind, tmp_path):
    """Catches a zero, a scale or an order of rows that is lost on the way to cpu.c, and dequantised weights."""
    quantize = kind if kind.startswith("int") else None
    path = tmp_path if quantize else write_quantised(tmp_path, kind)
    if quantize:
        toy_model(**SIZES).save_pretrained(path)
    want = checkpoint.load(path, torch.float32, "cpu", quantize=quantize)
    got = checkpoint.load(path, None, "cpu", quantize=quantize)
    assert got.hash == want.hash
    for name in ("attn.qkv", "attn.proj", "mlp.up", "mlp.down"):
        layer, weight = (model.blocks[1].get_submodule(name) for model in (got, want))
        rounded = 0.01 if kind == "fp8" else 1e-6
        values = layer.embedding(torch.arange(layer.out_features))
        torch.testing.assert_close(values, weight.weight, atol=rounded * weight.weight.abs().max(), rtol=0)
        x = torch.randn(9, layer.in_features)
        exact = weight(x)
        assert (layer(x) - exact).norm() < 0.02 * exact.norm()
