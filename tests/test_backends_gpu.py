"""The layers of a GPU: fused blocks and quantised weights. They run here on the kernels' references, in one case under
Triton's interpreter."""

import pytest
import torch

from backends import cpu, cpu_library, gpu
from backends.quantized import pack_nibbles
from common.machine import weight_bytes
from conftest import SHAPES, edit_weights, random_prompts, refusal, toy_model
from hf import checkpoint
from hf.quantization import unpack_int32
from test_backends_cpu import run_with
from test_hf_checkpoint import theirs_of
from test_hf_gguf import Type, random_blocks, write  # needs gguf, else this file is skipped
from test_hf_quantization import KINDS, write_quantised
from test_kernels import BF16, FP32, records

LLAMA_CPP = {  # the types that it gives the tensors of a file
    "Q4_0": {}, "Q4_1": {}, "Q5_0": {}, "Q5_1": {}, "Q8_0": {}, "Q5_K": {"blk.0.attn_v": "Q6_K"},
    "Q4_K": {"blk.0.attn_v": "Q6_K", "blk.0.ffn_down": "Q6_K", "token_embd": "Q6_K"}, "Q3_K": {}}


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(gpu, "is_usable", lambda device: True)
    monkeypatch.setattr(cpu, "is_usable", lambda device: False)


def verify(model, tokens):
    """The hidden states of a tree of these tokens [B, T] after four committed rows, a chain and a branch."""
    B, T = tokens.shape
    cache = model.new_cache(B, 4 + T)
    cache.kv.copy_(torch.randn(cache.kv.shape, generator=torch.Generator().manual_seed(2)))
    cache.lengths.fill_(4)
    ancestors = torch.tensor([(2 << j) - 1 for j in range(T - 1)] + [1 | 1 << T - 1]).expand(B, T)
    depths = torch.tensor([*range(T - 1), 1])
    return model(tokens, 4 + depths.expand(B, T), cache, ancestors)


@pytest.mark.parametrize("dtype", [FP32, torch.float16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_fused_blocks_compute_the_same(name, dtype):
    """Bug: a norm or residual left out, a block fused whose norm is elsewhere, another activation, training changed."""
    model, tokens = toy_model(**SHAPES[name]).to(dtype), torch.tensor(random_prompts([5, 5]))
    want, whole = verify(model, tokens), model(tokens)
    gpu.apply(model)
    fused = [type(block) is gpu.FusedBlock for block in model.blocks]
    assert all(fused) if name not in ("gpt2", "gemma", "olmo") and dtype == FP32 else not any(fused)
    torch.testing.assert_close(verify(model, tokens), want, rtol=1e-4, atol=1e-4)
    assert torch.equal(model(tokens), whole)
    model.check_plain("trained")


def write_file(path, kind, **sizes):
    """Writes a GGUF file as llama.cpp quantises it, a tiny Llama with random blocks. Returns the file."""
    theirs = theirs_of("llama-tied", **dict(hidden_size=256, intermediate_size=512) | sizes)

    def convert(name, value):
        if value.ndim == 1:
            return value, None
        own = Type[LLAMA_CPP[kind].get(name.removesuffix(".weight"), kind)]
        return random_blocks(own, value.shape, 0.0005 if own.name.endswith("K") else 0.005), own
    return write(path / "m.gguf", "llama", theirs, convert=convert)


def loaded(kind, path):
    """(a model with quantised layers in bfloat16, the same with plain ones in float64)"""
    quantize = kind if kind.startswith("int") else None
    if quantize:
        toy_model(n_embd=128, head_size=32, n_inner=192).save_pretrained(path)
    else:
        path = write_quantised(path, kind) if kind in KINDS else write_file(path, kind)
    return (checkpoint.load(path, BF16, "cpu", quantize=quantize),
            checkpoint.load(path, BF16, "cpu", quantize=quantize, packed=False).double())


@pytest.mark.parametrize("kind", [*KINDS, "int4", "int8", *LLAMA_CPP])
def test_a_quantised_model_is_its_dequantised_one(kind, tmp_path):
    """Bug: a layer left out or put in the wrong place, parts of unequal types mixed up, embeddings of another row."""
    model, plain = loaded(kind, tmp_path)
    assert all(type(block) is gpu.FusedBlock for block in model.blocks) and model.hash == plain.hash
    assert all(isinstance(layer, gpu.QuantizedLinear) for layer in model.blocks[1].mlp.children())
    assert isinstance(model.embed, gpu.QuantizedEmbedding) == (kind in LLAMA_CPP)
    for name, layer in model.named_modules():
        if isinstance(layer, (gpu.QuantizedLinear, gpu.QuantizedEmbedding)):
            weight = plain.get_submodule(name).weight  # rounded to bfloat16
            values = layer.weight.values(torch.bfloat16).double()
            assert (values - weight).abs().max() <= (0.01 if kind in LLAMA_CPP else 0) * weight.abs().max(), name
    tokens = torch.tensor(random_prompts([5, 5]))
    for tokens, run in ((tokens, verify), (tokens.repeat(1, 30), lambda m, tokens: m(tokens))):  # few rows, and many
        got, want = (m.lm_head(run(m, tokens)[:, -3:]).double() for m in (model, plain))
        assert (got - want).norm() < 0.15 * want.norm()
    refusal(lambda: model.to(torch.float32), "packed for decoding, so it cannot be moved or cast")


@pytest.mark.parametrize("kind, most", [("Q4_0", 1.12), ("Q4_1", 1.02), ("Q5_1", 1.7), ("Q8_0", 1.02), ("Q4_K", 1.28)])
def test_quantised_weights_take_little_more_memory_than_their_file(kind, most, tmp_path, monkeypatch):
    """Bug: a layer that is dequantised, scales in 32 bits, memory that is taken before it is checked."""
    checked = []
    monkeypatch.setattr(checkpoint, "check_memory", lambda what, size, *_: checked.append(size))
    from hf.gguf import Reader
    file = write_file(tmp_path, kind)
    model = checkpoint.load(file, BF16, "cpu")
    tables = sum(x.nbytes for x in (*model.parameters(), *model.tables) if x is not None)
    stored = sum(tensor.data.nbytes for tensor in Reader(file).tensors if len(tensor.shape) == 2)
    assert weight_bytes(model) - tables <= most * stored
    assert weight_bytes(model) < checked[0] < weight_bytes(model) + 2 * 2 * 2 * 512 * 256  # one layer dequantised


def test_act_order_permutes_the_inputs(tmp_path, monkeypatch):
    """Bug: inputs in another order than their scales, or the layer's other parts; a CPU's layers ignore it."""
    path = write_quantised(tmp_path, "gptq-4")
    model = checkpoint.load(path, BF16, "cpu")
    order = torch.randperm(128)

    def shuffle(tensors):
        for name in list(tensors):
            if name.endswith(("q_proj.g_idx", "k_proj.g_idx", "v_proj.g_idx")):
                tensors[name] = tensors[name][order]
                stem = name.removesuffix("g_idx")
                q = unpack_int32(tensors[stem + "qweight"].T, 4)[:, order]
                tensors[stem + "qweight"] = pack_nibbles(q).contiguous().view(torch.int32).T.contiguous()
    edit_weights(path, shuffle)
    shuffled = checkpoint.load(path, BF16, "cpu")
    x = torch.randn(3, 128).bfloat16()
    weight = model.blocks[0].attn.qkv.weight.values()
    got = shuffled.blocks[0].attn.qkv.weight
    assert torch.equal(got.values(), weight[:, order])
    torch.testing.assert_close(shuffled.blocks[0].attn.qkv(x), model.blocks[0].attn.qkv(x[:, order.argsort()]))
    plain = checkpoint.load(path, FP32, "cpu", packed=False)
    assert torch.equal(plain.blocks[0].attn.qkv.weight, weight[:, order])
    if cpu_library.library():
        monkeypatch.setattr(cpu, "is_usable", lambda device: True)
        monkeypatch.setattr(gpu, "is_usable", lambda device: False)
        attn = checkpoint.load(path, BF16, "cpu").blocks[0].attn
        assert torch.equal(attn.qkv.embedding(torch.arange(256)), weight[:, order].bfloat16().float())
        assert attn.qkv.packed.linear.kind < cpu_library.header.INT8 <= attn.proj.packed.linear.kind


CODE = """
import sys, torch
from backends import gpu
from generate import generate
from hf import checkpoint
model = checkpoint.load(sys.argv[1], torch.bfloat16, "cpu")
assert type(model.blocks[0]) is gpu.FusedBlock and isinstance(model.head, gpu.QuantizedHead)
model.decoder = gpu.GraphDecoder
print(*(generate(model, [[3, 1, 3]], 4, lookup=lookup, tree_size=T).tokens for lookup, T in ((False, 1), (True, 3))))
"""


@records
def test_the_same_by_the_kernels(tmp_path):
    """Bug: arguments that the references take and the kernels do not."""
    file = write_file(tmp_path, "Q4_1", hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    plain, drafted = run_with(dict(TRITON_INTERPRET="1"), CODE, file).stdout.strip("[]\n").split("]] [[")
    assert plain == drafted
