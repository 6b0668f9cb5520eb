"""hf/quantization.py: quantised folders, packed here from their formats' descriptions, load with the right weights;
broken ones raise a one-line error."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import convert_llama, edit_json, edit_weights, refusal, toy_model
from hf import checkpoint
from model import GPT

TOY_SIZES = dict(n_embd=128, head_size=32, n_inner=192, tied=False)  # groups of 64, and a partial block of 128
FP8 = torch.float8_e4m3fn


def words(values, bits):
    """Packs numbers [M, n * 32 / bits] into int32 [M, n], the first in the lowest bits."""
    fields = 32 // bits
    parts = [values[:, i::fields].long() << bits * i for i in range(fields)]
    return sum(parts).numpy().astype("uint32").view("int32")


def draw(N, C, rows, columns, bits, dtype=torch.float16):
    """Random q and zeros of `bits`, unsigned, and scales -> (q [N, C], scales, zeros, the weight float32 [N, C])."""
    shape = -(-N // rows), -(-C // columns)
    q = torch.randint(0, 2**bits, (N, C))
    zeros = torch.randint(1, 2**bits, shape)
    scales = (0.01 + 0.02 * torch.rand(shape)).to(dtype)
    return q, scales, zeros


def value(q, scales, zeros, rows, columns):
    """(q - zero) * scale, element by element, as each format defines it."""
    spread = lambda x: x.repeat_interleave(rows, 0)[:len(q)].repeat_interleave(columns, 1)[:, :q.shape[1]]
    return (q.float() - spread(zeros.expand(scales.shape)).float()) * spread(scales).float()


def awq(N, C):
    q, scales, zeros = draw(N, C, 1, 64, 4)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    ordered = lambda x: torch.cat([x[:, i:i + 8][:, order] for i in range(0, N, 8)], dim=1)
    parts = dict(qweight=words(ordered(q.T), 4), qzeros=words(ordered(zeros.T), 4), scales=scales.T)
    return parts, value(q, scales, zeros, 1, 64)


def gptq(bits, group, version=1):
    def make(N, C):
        columns = C if group == -1 else group
        q, scales, zeros = draw(N, C, 1, columns, bits)
        stored = zeros.T - 1 if version == 1 else zeros.T
        parts = dict(qweight=words(q, bits).T, qzeros=words(stored, bits), scales=scales.T,
                     g_idx=(torch.arange(C) // columns).int())
        return parts, value(q, scales, zeros, 1, columns)
    return make


def fp8(rows, columns):
    def make(N, C):
        r, c = rows or N, columns or C
        _, scales, _ = draw(N, C, r, c, 8, torch.float32)
        q = torch.randn(N, C).mul(20).to(FP8)
        return dict(weight=q, weight_scale_inv=scales), value(q, scales, torch.tensor(0), r, c)
    return make


def fp8_static(N, C):
    """As AutoFP8 writes it: one scale, and one for activations, which we do not quantise so."""
    parts, weight = fp8(None, None)(N, C)
    return dict(weight=parts["weight"], weight_scale=parts["weight_scale_inv"][0, 0], input_scale=torch.ones(1)), weight


KINDS = {  # name: (config, (N, C) -> (a layer's parts, its weight))
    "awq": (dict(quant_method="awq", version="gemm", bits=4, group_size=64, zero_point=True), awq),
    "gptq-4": (dict(quant_method="gptq", bits=4, group_size=64, desc_act=False), gptq(4, 64)),
    "gptq-8": (dict(quant_method="gptq", bits=8, group_size=32, desc_act=True), gptq(8, 32)),
    "gptq-v2": (dict(quant_method="gptq", bits=4, group_size=-1, checkpoint_format="gptq_v2"), gptq(4, -1, 2)),
    "fp8-tensor": (dict(quant_method="fp8"), fp8(None, None)),
    "fp8-static": (dict(quant_method="fp8", activation_scheme="static", ignored_layers=["lm_head"]), fp8_static),
    "fp8": (dict(quant_method="fp8", weight_block_size=[128, 128], activation_scheme="dynamic"), fp8(128, 128)),
}


def write_quantised(path, kind, family="llama", **flags):
    """Writes a folder path / "quantised" and one with the same weights, path / "plain". Returns the first."""
    config, make = KINDS[kind] if isinstance(kind, str) else kind
    toy_model(**TOY_SIZES | flags).save_pretrained(path / "plain")
    if family != "llama":
        convert_llama(path / "plain", family)
    tensors = load_file(path / "plain" / "model.safetensors")
    stored = dict(tensors)
    for name, weight in tensors.items():
        if ".layers." in name and weight.dim() == 2:
            parts, tensors[name] = make(*weight.shape)
            stem = name.removesuffix("weight")
            del stored[name]
            stored |= {stem + part: torch.as_tensor(x).contiguous() for part, x in parts.items()}
    save_file(tensors, path / "plain" / "model.safetensors")
    (path / "quantised").mkdir()
    save_file(stored, path / "quantised" / "model.safetensors")
    raw = json.loads((path / "plain" / "config.json").read_text()) | dict(quantization_config=config)
    (path / "quantised" / "config.json").write_text(json.dumps(raw))
    return path / "quantised"


@pytest.mark.parametrize("family", ["llama", "glm"])
@pytest.mark.parametrize("kind", KINDS)
def test_dequantised_weights_are_bit_for_bit_those_of_the_description(kind, family, tmp_path):
    """Catches nibbles in the wrong order, zeros off by one, wrong scales, rows reordered without their scales."""
    path = write_quantised(tmp_path, kind, family)
    got, want = (checkpoint.load(x, torch.float32, "cpu", packed=False) for x in (path, tmp_path / "plain"))
    for name, parameter in want.named_parameters():
        assert torch.equal(got.get_parameter(name), parameter), name


def test_biases_of_zeros_are_no_biases(tmp_path):
    """Catches AutoGPTQ's zero biases being refused, and real biases being dropped."""
    path = write_quantised(tmp_path, "gptq-4")
    edit_weights(path, lambda tensors: tensors.update({LAYER + "bias": torch.zeros(128)}))
    checkpoint.load(path, torch.float32, "cpu")
    edit_weights(path, lambda tensors: tensors.update({LAYER + "bias": torch.ones(128)}))
    refusal(lambda: checkpoint.load(path, torch.float32, "cpu"), "has no 'layers.0.mlp.down_proj.bias'")


@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens"])
def test_a_quantised_table_is_read(name, tmp_path):
    """Catches a quantised table read as floats, and a tied one that is loaded for one use only."""
    path = write_quantised(tmp_path, "gptq-8", vocab_size=96, tied=name != "lm_head")
    parts, value = KINDS["gptq-8"][1](96, 128)
    edit_weights(path, lambda tensors: (tensors.pop(f"{name}.weight"), tensors.update(
        {f"{name}.{part}": torch.as_tensor(x).contiguous() for part, x in parts.items()})))
    plain, packed = (checkpoint.load(path, dtype, "cpu", packed=dtype and False) for dtype in (torch.float32, None))
    assert torch.equal(plain.head.weight, value)
    tokens = torch.arange(96)
    torch.testing.assert_close(packed.embed(tokens).float(), plain.embed(tokens), rtol=2**-7, atol=1e-6)


LAYER = "model.layers.0.mlp.down_proj."
tensor = lambda part, f: lambda path: edit_weights(path, lambda x: x.update({LAYER + part: f(x[LAYER + part])}))
BROKEN = {  # case: (kind, what breaks it, part of the message)
    "another method": ("awq", dict(quant_method="bitsandbytes"), "'bitsandbytes'"),
    "bits": ("gptq-4", dict(bits=3), "gptq's bits 3"),
    "other group than the tensors": ("awq", dict(group_size=32), "qzeros is torch.int32 (3, 16)"),
    "small group": ((dict(quant_method="gptq", bits=8, group_size=16), gptq(8, 16)), {}, "in groups of 16"),
    "g_idx": ("gptq-4", tensor("g_idx", lambda x: x.clamp(max=1)), "does not name each group 64 times"),
    "scales that are not finite": ("awq", tensor("scales", lambda x: x * torch.inf), "not finite"),
    "part missing": ("awq", lambda p: edit_weights(p, lambda t: t.pop(LAYER + "qzeros")), "lacks qzeros"),
    "no config": ("awq", lambda p: edit_json(p / "config.json", quantization_config=None), "quantization_config"),
    "no tensors": ("awq", lambda p: (p.parent / "plain/model.safetensors").rename(p / "model.safetensors"), "scales"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders_are_refused_in_one_line(case, tmp_path, monkeypatch):
    """Catches a folder that is trusted, or memory that is allocated, before it is checked."""
    kind, breaks, says = BROKEN[case]
    path = write_quantised(tmp_path, kind)
    change = lambda path: edit_json(path / "config.json", "quantization_config", **breaks)
    (change if isinstance(breaks, dict) else breaks)(path)
    if says != "not finite":  # values are only checked when the layer is loaded
        monkeypatch.setattr(checkpoint, "check_memory", lambda *_: pytest.fail("memory was taken"))
    refusal(lambda: GPT.from_pretrained(path, device="cpu"), says)
