"""quantized.py: packed layers have the values of dequantised ones, and --quantize rounds to nearest."""

import pytest
import torch

from backends.quantized import round_weight, rounding
from conftest import needs_compiler, refusal, toy_model
from hf import checkpoint
from test_hf_quantization import write_quantised

TOY_SIZES = dict(n_embd=128, head_size=32, n_inner=160)  # groups of 128, in the MLP of 32


@pytest.mark.parametrize("bits, group", [(8, 0), (8, 32), (4, 128), (4, 64), (4, 32)])
def test_rounding_is_to_the_nearest(bits, group):
    """Catches a zero off the grid, a clipped maximum, NaN for a group of zeros, rows of another chunk."""
    value = torch.randn(70, 256) * torch.logspace(-3, 3, 70)[:, None]
    value[3] = 0
    value[4, :128] = value[4, :128].abs() + 1  # a group without 0
    weight = round_weight(value, bits, group)
    got = weight.values()
    step = weight.scales.T.float().repeat_interleave(group or 256, dim=1)
    slack = 0.6 if group else 0.51  # steps of groups are rounded to 16 bits
    assert ((got - value).abs() <= slack * step).all()
    assert torch.equal(got[3], value[3]) and got.isfinite().all()


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_rounded_model_keeps_its_hash_and_its_embeddings(quantize, tmp_path):
    """Catches a tied table whose embeddings are rounded too, a layer left out."""
    toy_model(**TOY_SIZES).save_pretrained(tmp_path)
    plain, rounded = (checkpoint.load(tmp_path, torch.float32, "cpu", quantize=q, packed=False)
                      for q in (None, quantize))
    assert rounded.hash == plain.hash and torch.equal(rounded.embed.weight, plain.embed.weight)
    formats = rounding(rounded, quantize)
    assert len(formats) == 1 + 4 * len(plain.blocks)
    for name, (bits, group) in formats.items():
        exact = plain.embed.weight if name == "head.weight" else plain.get_parameter(name)
        assert torch.equal(rounded.get_parameter(name), round_weight(exact, bits, group).values()), name


def test_what_cannot_be_rounded_is_refused(tmp_path):
    """Catches a folder that is quantised twice, channels that groups do not divide."""
    load = lambda path, quantize: lambda: checkpoint.load(path, None, "cpu", quantize=quantize)
    refusal(load(write_quantised(tmp_path, "awq"), "int8"), "is quantised already, to 4 bits; leave out")
    toy_model(n_inner=90).save_pretrained(tmp_path)
    refusal(load(tmp_path, "int4"), "mlp.down.weight has 90 inputs; take --quantize int8")
    load(tmp_path, "int8")()


@needs_compiler
@pytest.mark.parametrize("kind", ["awq", "gptq-4", "gptq-8", "fp8", "int8", "int4"])
def test_layers_on_a_cpu_hold_the_same_values(kind, tmp_path):
    """Catches a zero, a scale or a row order lost in packing for cpu.c, and weights that are dequantised."""
    quantize = kind if kind.startswith("int") else None
    path = tmp_path if quantize else write_quantised(tmp_path, kind, vocab_size=999)  # the largest tensor has floats
    if quantize:
        toy_model(**TOY_SIZES).save_pretrained(path)
    want = checkpoint.load(path, torch.float32, "cpu", quantize=quantize, packed=False)
    got = checkpoint.load(path, None, "cpu", quantize=quantize)
    assert got.hash == want.hash and got.dtype == (torch.float32 if quantize else torch.bfloat16)
    for name in ("attn.qkv", "attn.proj", "mlp.up", "mlp.down"):
        layer, weight = (model.blocks[1].get_submodule(name) for model in (got, want))
        rounded = 0.01 if kind == "fp8" else 1e-6
        values = layer.embedding(torch.arange(layer.out_features))
        torch.testing.assert_close(values, weight.weight, atol=rounded * weight.weight.abs().max(), rtol=0)
        x = torch.randn(9, layer.in_features)
        exact = weight(x)
        assert (layer(x) - exact).norm() < 0.02 * exact.norm()
