"""quantized.py: packed layers compute what dequantised ones do, and --quantize rounds to the nearest."""

import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import train_heads
from backends import cpu
from backends.quantized import (
    INT8_ROWS,
    Layout,
    PackedLayer,
    QuantizedLinear,
    QuantizedLMHead,
    Scratch,
    packed_bytes,
    round_weight,
    rounded_layouts,
)
from backends.tensor_parallel import Group
from bench import __main__ as bench
from clover import PRESETS, CloverHeads, read_record
from conftest import random_prompts, toy_model, write_tokenizer
from generate import generate
from hf import checkpoint
from model import InputError
from test_hf_quantization import write_quantised
from test_kernels import needs_triton, run_python
from tools.cli import generate_main
from training import base

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
    return layer.rows(torch.arange(len(layer.weight))) if isinstance(layer, QuantizedLMHead) else layer.values()


@pytest.mark.parametrize("layout", [INT8_ROWS, INT4(128), INT4(64), INT4(32)], ids=str)
def test_rounding_is_to_the_nearest(layout):
    """Catches a zero that is not on the grid, a group's largest number that is clipped, a group of zeros that becomes
    NaN, rows of another chunk."""
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
    assert weight.pack().packed.nbytes == 70 * 256 // (1 if layout == INT8_ROWS else 2)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_packed_and_dequantised_are_one_model(folder, quantize, monkeypatch):
    """Catches a packed layer that was rounded otherwise than where weights are dequantised, and a tied table whose
    embedding was rounded too."""
    want = checkpoint.load(folder, torch.float32, "cpu", quantize=quantize)
    plain = checkpoint.load(folder, torch.float32, "cpu")
    monkeypatch.setattr(checkpoint, "runs_triton", lambda *_: True)
    got = checkpoint.load(folder, torch.float32, "cpu", quantize=quantize)
    assert got.hash == want.hash != plain.hash and got.unrounded_hash == want.unrounded_hash == plain.hash
    assert torch.equal(got.embed.weight, plain.embed.weight) and torch.equal(want.embed.weight, plain.embed.weight)
    for name in rounded_layouts(want, quantize):
        assert torch.equal(values(got.get_submodule(name.removesuffix(".weight"))), want.get_parameter(name)), name
    prompts = random_prompts([5, 150])
    for way in (dict(tree_size=1), dict(tree_size=5, lookup=True), dict(temperature=0.7, top_k=20, tree_size=1)):
        assert generate(got, prompts, 12, **way).tokens == generate(want, prompts, 12, **way).tokens


@pytest.mark.parametrize("move", [lambda m: m.to(torch.bfloat16), deepcopy, lambda m: deepcopy(m).to("cpu")])
def test_packed_weights_keep_their_bits(folder, packs, move):
    """Catches scales or e4m3 values that a cast of the model rounds."""
    model = checkpoint.load(folder, torch.float32, "cpu", quantize="int8")
    own = lambda model: [x.clone() for layer in (model.head, model.blocks[0].mlp.up)
                         for x in layer.buffers(recurse=False)]
    before = own(model)
    moved = move(model)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(before, own(moved), strict=True))
    assert moved.head.embedding(torch.tensor([1])).dtype == moved.dtype
    assert moved.blocks[0].mlp.up.scratch is moved.blocks[1].attn.qkv.scratch
    cpu.apply(moved)
    cpu.restore(moved)


def test_the_head_is_an_lm_head():
    """Catches a method that gives what LMHead's does not."""
    head = QuantizedLMHead(97, 64, Scratch(0, torch.float32))
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
    torch.testing.assert_close(head.sum_of_squares(), dense.double().pow(2).sum())


def test_gradients_pass_a_packed_layer():
    """Catches a buffer of weights that the next layer overwrites before the gradient needs it."""
    scratch = Scratch(64 * 64, torch.float32)
    weights = [round_weight(torch.randn(64, 64), INT4(64)) for _ in range(2)]
    layers = [QuantizedLinear(weight.pack(), 64, None, scratch) for weight in weights]
    x = torch.randn(200, 64, requires_grad=True)
    [got] = torch.autograd.grad(layers[1](layers[0](x)).sum(), x)
    dense = [weight.values() for weight in weights]
    [want] = torch.autograd.grad(F.linear(F.linear(x, dense[0]), dense[1]).sum(), x)
    torch.testing.assert_close(got, want)


def test_memory_is_checked_for_what_is_packed(folder, packs, monkeypatch):
    """Catches a 70B model in 4 bits that is refused for its size in bfloat16."""
    sizes = []
    monkeypatch.setattr(checkpoint, "check_memory", lambda what, size, *_: sizes.append(size))
    packed = checkpoint.load(folder, torch.float32, "cpu", quantize="int4")
    dense = checkpoint.load(folder, torch.float32, "cpu", quantize="int4", packed=False)
    largest = 4 * max(x.numel() for x in dense.blocks[0].parameters())
    rest = sum(x.nbytes for x in packed.parameters())
    assert sizes[0] == packed_bytes(packed) + rest + largest
    assert sizes[1] == sum(x.nbytes for x in dense.parameters())


@pytest.mark.parametrize("kind", ["awq", "gptq-8", "packed-8", "fp8", "int4", "int8"])
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


def test_a_rank_cannot_cut_a_group(folder, packs):
    with pytest.raises(InputError, match="a rank's 64 inputs of blocks.0.attn.proj.weight cut a group of 128; take"):
        checkpoint.load(folder, torch.float32, "cpu", Group(0, 2), "int4")


@pytest.mark.parametrize("quantize, says", [("int8", "quantised already (awq: 4 bits, groups of 64); leave out")])
def test_quantised_folders_are_not_rounded_again(quantize, says, tmp_path):
    with pytest.raises(InputError) as caught:
        checkpoint.load(write_quantised(tmp_path, "awq"), torch.float32, "cpu", quantize=quantize)
    assert says in str(caught.value)


def test_sizes_that_have_no_groups(tmp_path):
    toy_model(n_inner=90).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="mlp.down.weight has 90 inputs; take --quantize int8"):
        checkpoint.load(tmp_path, torch.float32, "cpu", quantize="int4")
    checkpoint.load(tmp_path, torch.float32, "cpu", quantize="int8")


INTERPRETED = """
import sys
sys.path[:0] = {path!r}
import torch
from hf import checkpoint
from pathlib import Path
torch.manual_seed(0)
tokens = torch.randint(0, 97, (1, 9))
for kind in sys.argv[2:]:
    path = Path(sys.argv[1])
    folder, quantize = (path, kind) if kind.startswith("int") else (path / kind / "quantised", None)
    bounds = [(torch.float32, 1e-5), (torch.bfloat16, 0.1)]  # layers add up what each of them rounds
    for dtype, bound in bounds if quantize else bounds[:1]:
        packed, dense = (checkpoint.load(folder, dtype, "cpu", None, quantize, packed) for packed in (True, False))
        assert packed.hash == dense.hash and len(list(packed.parameters())) < len(list(dense.parameters()))
        got, want = (model.head.logits(model.norm(model(tokens))[0]) for model in (packed, dense))
        difference = (got - want).abs().max() / want.abs().max()
        assert difference < bound, (kind, dtype, difference)
        print(kind, dtype, "agrees", difference)
"""


@needs_triton
def test_packed_layers_in_the_interpreter(tmp_path):
    """Catches a layer that hands its kernel other rows, scales or groups than it holds: a model of each layout says
    what the same model says dequantised, within the dtype's rounding."""
    kinds = ["awq", "gptq-8", "fp8"]
    for kind in kinds:
        (tmp_path / kind).mkdir()
        write_quantised(tmp_path / kind, kind, n_layer=1)
    toy_model(**SIZES, n_layer=1).save_pretrained(tmp_path)
    code = INTERPRETED.format(path=[str(ROOT), str(ROOT / "tests")])
    output = run_python(["-c", code, str(tmp_path), *kinds, "int8", "int4"], ROOT, TRITON_INTERPRET="1")
    assert output.count("agrees") == 7


# --------------------------------------------------------------------------------------------------
# Heads, and the demo

def test_heads_of_the_folder_go_with_its_rounded_weights(capsys):
    """Catches heads that are refused, or taken without a word; and a text that depends on what drafts."""
    texts = set()
    for flags in (["--draft", "none"], ["--tree-size", "9"], ["--tree-size", "auto"]):
        generate_main(["--prompt", "def main():", "--quantize", "int8", "--temperature", "0", "--max-new-tokens", "24",
                       "--device", "cpu", *flags])
        out, err = capsys.readouterr()
        texts.add(out)
        assert ("before it was quantised (int8)" in err) == (flags[1] != "none")
    assert len(texts) == 1


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_the_demo_says_the_same_in_every_tree_and_batch(quantize):
    """Catches rounded weights whose products are not those of packed ones elsewhere."""
    model = checkpoint.load(ROOT / "demo", device="cpu", quantize=quantize)
    heads = CloverHeads.from_pretrained(ROOT / "demo" / "clover", model)
    prompts = random_prompts([9, 30, 4], vocab_size=4096)
    want = generate(model, prompts, 24, tree_size=1, batch_size=1).tokens
    for way in (dict(tree_size=5, batch_size=1), dict(tree_size=17, lookup=True), dict(tree_size=8, batch_size=2)):
        assert generate(model, prompts, 24, heads, **way).tokens == want, way


@pytest.fixture
def quantised_pair(tmp_path):
    """A quantised folder with a tokenizer, and beside it heads of the same sizes on other weights."""
    path = write_quantised(tmp_path, "packed-8", vocab_size=258)
    write_tokenizer(path)
    other = toy_model(seed=1, n_embd=128, head_size=32, n_inner=192, tied=False, vocab_size=258)
    CloverHeads(PRESETS["clover"], other).save_pretrained(path / "clover")
    return path


def run(path, *flags):
    generate_main(["--model", str(path), "--prompt", "ab", "--max-new-tokens", "8", "--device", "cpu", *flags])


def test_heads_of_the_original_need_a_flag(quantised_pair, capsys):
    """Catches heads of any model taken for a quantised one's, and a text that depends on them."""
    with pytest.raises(InputError, match="belong to other weights .* give --heads-of-original"):
        run(quantised_pair)
    run(quantised_pair, "--heads-of-original")
    out, err = capsys.readouterr()
    assert "trained on the model before it was quantised (compressed-tensors: 8 bits, a scale per row)" in err
    run(quantised_pair, "--draft", "none")
    assert capsys.readouterr().out == out


@pytest.mark.parametrize("flags, says", [
    (["--model", "demo", "--heads-of-original"], "is for a folder that is quantised"),
    (["--heads-of-original", "--draft", "lookup"], "--heads-of-original needs heads"),
    (["--quantize", "int3"], "invalid choice: 'int3'")])
def test_flags_that_do_not_fit(flags, says, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(InputError, match=says):
        generate_main(["--prompt", "a", "--device", "cpu", *flags])


def test_heads_are_trained_on_a_quantised_base(request, tmp_path, capsys):
    """Catches heads that are recorded as of the unrounded weights, and a --resume that forgets the rounding."""
    folder = request.getfixturevalue("checkpoint")
    lines = "".join(f"{{\"text\": \"line {i} of a text, {i * i}\"}}\n" * 20 for i in range(200))
    (tmp_path / "text.jsonl").write_text(lines)
    flags = ["--model", str(folder), "--data", str(tmp_path / "text.jsonl"), "--out", str(tmp_path / "out"),
             "--block-size", "16", "--batch-size", "2", "--device", "cpu"]
    train_heads.main([*flags, "--steps", "1", "--quantize", "int8"])
    rounded = checkpoint.load(folder, torch.float32, "cpu", quantize="int8")
    assert read_record(tmp_path / "out" / "heads.json")[1]["base"]["weights"] == rounded.hash
    assert train_heads.parse([*flags, "--resume"]).quantize == "int8"
    capsys.readouterr()
    run(folder, "--quantize", "int8", "--heads", str(tmp_path / "out"))
    assert "before it was quantised" not in capsys.readouterr().err


def test_measuring_never_records_a_rounding_as_the_heads_own(tmp_path):
    """Catches demo/clover's record, written anew with the rounded weights' hash."""
    shutil.copytree(ROOT / "demo" / "clover", tmp_path / "heads")
    before = (tmp_path / "heads" / "heads.json").read_bytes()
    with pytest.raises(InputError, match="before it was rounded; measure them without --quantize"):
        train_heads.main(["--model", str(ROOT / "demo"), "--out", str(tmp_path / "heads"), "--evaluate", "--quantize",
                          "int8", "--device", "cpu"])
    assert (tmp_path / "heads" / "heads.json").read_bytes() == before


@pytest.mark.parametrize("main, argv, says", [
    (base.main, ["--quantize", "int8"], "--quantize is for --evaluate"),
    (bench.main, ["decode", "--quantize", "int8", "--random-weights", "0.5b"], "go without --random-weights")])
def test_flags_that_need_others(main, argv, says):
    with pytest.raises(InputError, match=says):
        main(argv)
