"""backends/cpu.py and cpu.c: each function against float64, the same bits wherever a row is, packed weights, and the
library where there is no compiler or no room for it."""

import copy
import math
import os
import pickle
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import kernels
import model as models
from backends import cpu
from clover import PRESETS, CloverHeads, preset
from conftest import SHAPES, random_prompts, refusal, toy_model
from generate import Decoder, generate
from hf import checkpoint
from kernels import gumbel_argmax, tree_attention_reference
from model import GPT
from test_clover import random_heads
from test_kernels import as_int64, random_forest
from test_model import chain

needs_compiler = pytest.mark.skipif(cpu.library() is None, reason="there is no C compiler")
ROOT = Path(__file__).parents[1]


# ---------------------------------------------------------------------------------------------------------------------
# Functions of cpu.c

def packed_weight(kind, n, k, group=32):
    """(a `cpu.PackedWeight` with a bias, the weight and the bias in float64)"""
    bias = torch.randn(n)
    if kind in (cpu.FLOAT32, cpu.BFLOAT16):
        weight = torch.randn(n, k).to(torch.float32 if kind == cpu.FLOAT32 else torch.bfloat16)
        return cpu.pack_floats(weight, bias), weight.double(), bias.double()
    q = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    if kind == cpu.INT4:
        q = (q & 15).view(torch.uint8)
    G = -(-k // 32) * 32 // group
    scales = (torch.rand(G, n) + 0.1).to(torch.float16 if kind == cpu.INT8 else torch.float32)
    minimums = torch.randn(G, n) if kind == cpu.INT4 else None
    spread = lambda x: x.double().T.repeat_interleave(group, 1)[:, :k]
    weight = spread(scales) * q.double()
    if minimums is not None:
        weight = weight + spread(minimums)
    return cpu.pack_quantized(q, scales, minimums, bias), weight, bias.double()


def rounded(x, kind):
    """Rows as a product multiplies them, in float64."""
    if kind < cpu.INT8:
        return (x.bfloat16() if kind == cpu.BFLOAT16 else x).double()
    groups = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).view(len(x), -1, 32)
    inverse = 127 / groups.abs().amax(-1, keepdim=True)
    return ((groups * inverse).round().double() / inverse.double()).flatten(1)[:, :x.shape[1]]


@needs_compiler
@pytest.mark.parametrize("kind", range(4), ids=["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("n, k, group", [(40, 192, 32), (17, 180, 64), (33, 380, 128), (5, 20, 32)])
def test_product_is_the_sum_of_products(kind, n, k, group):
    """Catches an input or output too many or too few at a ragged end, another group's scale, bytes multiplied with the
    wrong sign, a row whose bits depend on the number of rows or threads, and another row unpacked."""
    packed, weight, bias = packed_weight(kind, n, k, group)
    rows = torch.randint(0, n, (7,))
    torch.testing.assert_close(packed.unpack(rows), weight[rows].float())
    for M in (1, 2, 3, 8, 11, 64):
        x = torch.randn(M, k)
        got = packed.multiply(x)
        want = rounded(x, kind) @ weight.T + bias
        assert (got - want).abs().max() < 1e-5 * want.abs().max(), M
        torch.set_num_threads(2)
        assert torch.equal(torch.cat([packed.multiply(row[None]) for row in x]), got)
        torch.set_num_threads(1)


@needs_compiler
@pytest.mark.parametrize("kind", range(4))
def test_a_row_without_numbers_stays_alone(kind):
    """Catches NaN or infinity that comes into another row, or is lost in its own."""
    packed, *_ = packed_weight(kind, 20, 64)
    x = torch.randn(5, 64)
    want = packed.multiply(x)
    x[1, 3], x[3, 40] = math.nan, math.inf
    got = packed.multiply(x)
    assert torch.equal(got[::2], want[::2]) and not got[1].isfinite().any() and not got[3].isfinite().any()


def attention_structs(q, k, slopes, window, lengths, ancestors, scale, threads):
    """(Block, Pass) for keys and values k [2, B, Hkv, S, D] of a layer."""
    B, T, Hq, D = q.shape
    block = cpu.Block(n_head=Hq, n_kv_head=k.shape[2], head_size=D, window=window, rope=-1, scale=scale or D ** -0.5)
    tensors = lengths, ancestors, None, None, None, slopes, k
    return block, cpu.Pass(B, T, threads, k.dtype == torch.bfloat16, k.shape[3], 0, *map(cpu.pointer, tensors), 0,
                           *k.stride()[:3])


def attend(q, k, slopes, window, lengths, ancestors, scale=None, threads=1):
    out = torch.empty_like(q)
    cpu.library().attention(*attention_structs(q, k, slopes, window, lengths, ancestors, scale, threads),
                            q.data_ptr(), out.data_ptr())
    return out


@needs_compiler
@pytest.mark.parametrize("T, Hq, Hkv, D", [(1, 2, 2, 16), (5, 6, 2, 64), (33, 3, 1, 80), (64, 2, 2, 128),
                                           (3, 4, 1, 256)])
@pytest.mark.parametrize("biased", [False, True], ids=["no-bias", "alibi"])
@pytest.mark.parametrize("window, dtype", [(0, torch.float32), (6, torch.bfloat16), (150, torch.float32)])
def test_attention_of_a_tree_is_tree_attention(T, Hq, Hkv, D, dtype, biased, window):
    """Bug: a node sees another's branch or too far, the sign bit lost by a shift, a head takes another's keys or slope,
    NaN in rows that no node sees comes through, a split of the cache left out."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([3, 125, 300], dtype=torch.int32)
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
    # the tokens of a prompt are a chain
    prompt = attend(q, kv, slopes, window, lengths, None)
    assert torch.equal(prompt, attend(q, kv, slopes, window, lengths, chain(T).expand(3, T).contiguous()))


@needs_compiler
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_argmax_is_gumbel_argmax(temperature):
    """Catches a part left out, a tie not given to the lowest id, other noise, another row's, NaN that wins."""
    logits = torch.randn(6, 9000).mul(3)
    logits[0, [5000, 8999]] = logits[1, [7, 23]] = 50
    sequence, position = torch.tensor([0, 0, 3, 2**40, 1, 1]), torch.arange(6) + 2**33
    for seed, first in ((0, 0), (2**64 - 1, 777)):
        args = temperature, seed, sequence, position
        want = gumbel_argmax(logits, *args, first_token=first)
        assert torch.equal(cpu.argmax(logits, *args, first), want)
    rows = torch.tensor([temperature, 0.0, 1.3]), torch.tensor([5, -7, 2**62]), sequence[:3]  # of two rows each
    assert torch.equal(cpu.argmax(logits, *rows, position, first), gumbel_argmax(logits, *rows, position, first))
    logits[2, 100] = math.nan
    assert torch.equal(cpu.argmax(logits, *args, first), want)


@needs_compiler
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("B, T", [(1, 1), (3, 5), (2, 40), (70, 1)])
def test_sample_is_argmax_of_the_logits(B, T, temperature):
    """Catches rows of another sequence or position where not all fit in memory, and the noise of another position."""
    packed, *_ = packed_weight(cpu.INT8, 300, 64)
    packed.linear.bias = None
    head, hidden = cpu.PackedLMHead(packed), torch.randn(B, T, 64) * 1e-3  # beside larger logits noise changes nothing
    sequence, position = torch.arange(B) + 2**40, torch.randint(0, 1000, (B, T))
    temperature = temperature and torch.linspace(0, 2, B)
    want = cpu.argmax(packed.multiply(hidden).flatten(0, 1), temperature, 5, sequence, position.flatten() + 1)
    assert torch.equal(head.sample(hidden, temperature, 5, sequence, position), want.view(B, T))



# ---------------------------------------------------------------------------------------------------------------------
# Models

@needs_compiler
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_in_c_compute_what_torch_does(shape, monkeypatch):
    """Catches a norm, bias, rotation, activation or window that the C blocks lack or apply elsewhere."""
    model = toy_model(**SHAPES[shape])
    want = model(torch.tensor(random_prompts([140] * 2)))
    cpu.apply(model)
    assert cpu.is_exact(model)
    with torch.inference_mode():
        cache = model.new_cache(2, 200)
        hidden = model.prefill(torch.tensor(random_prompts([140] * 2))[:, :130], cache)
        torch.testing.assert_close(hidden, want[:, :130], atol=3e-4, rtol=3e-4)
        nodes = torch.tensor(random_prompts([140] * 2))[:, 130:]
        normed, hidden = model.blocks.norm_and_hidden(model, nodes, 130 + torch.arange(10).expand(2, -1), cache,
                                                      chain(10).expand(2, -1))
    torch.testing.assert_close(hidden, want[:, 130:], atol=3e-4, rtol=3e-4)
    torch.testing.assert_close(normed, model.norm(want[:, 130:]), atol=3e-4, rtol=3e-4)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_tokens_hidden_state_is_the_same_bits_wherever_it_is(shape, dtype):
    """Row invariance: read with its prompt, alone, in a tree of two branches, in a batch. Catches a sum whose order
    depends on other rows or on where in the cache its terms are, which sooner or later changes a text."""
    model = toy_model(**SHAPES[shape] | dict(n_layer=3, n_embd=256, n_inner=700), scale=1.0).to(dtype)
    cpu.apply(model)
    n, texts = 30, torch.tensor(random_prompts([160] * 3))
    with torch.inference_mode():
        want = model.prefill(texts[:1], model.new_cache(1, 200))[0]
        alone = model.new_cache(1, 200)
        for i in range(60):
            hidden = model(texts[:1, i:i + 1], torch.tensor([[i]]), alone, chain(1))
            assert torch.equal(hidden[0, 0], want[i]), i
            alone.lengths += 1
        for T, batch in ((1, 2), (2, 1), (17, 3)):
            cache = model.new_cache(batch, 200)
            for b in range(batch):
                for start in range(0, 120, 40):
                    model.prefill(texts[b:b + 1, start:start + 40], cache.slots(b), start)
            hidden = model(texts[:batch, 120:120 + T], torch.arange(120, 120 + T).expand(batch, T), cache,
                           chain(T).expand(batch, T))
            assert torch.equal(hidden[0], want[120:120 + T]), (T, batch)
        # the text's next n tokens at a tree's even nodes, another text's at the odd ones; then beside two more trees
        nodes, depths = texts[:2, 110:110 + n].T.flatten(), torch.arange(2 * n) // 2
        ancestors = torch.tensor([[sum(1 << j for j in range(i % 2, i + 1, 2)) | 1 for i in range(2 * n)]])
        for batch in (1, 3):
            cache = model.new_cache(batch, 200)
            for b in range(batch):
                model.prefill(texts[b:b + 1, :110], cache.slots(b))
            hidden = model(nodes.expand(batch, -1), 110 + depths.expand(batch, -1), cache, ancestors.expand(batch, -1))
            assert torch.equal(hidden[0, ::2], want[110:110 + n]), batch


@needs_compiler
@pytest.mark.parametrize("shape", ["llama", "untied-biased", "gpt2"])
def test_a_packed_model_computes_the_same_and_refuses_the_rest(shape, tmp_path):
    """Catches a float copy that is kept, and a weight that is missing where somebody reads, trains or saves it."""
    model, tokens = toy_model(**SHAPES[shape]), torch.tensor(random_prompts([12]))
    heads = random_heads(model)
    want = model.lm_head(model(tokens))
    config, size = model.config, sum(p.numel() for p in model.parameters() if p.dim() == 2)
    cpu.apply(model, heads)
    cpu.apply(model, heads)  # once is enough
    assert cpu.is_exact(model) and sum(p.numel() for p in model.parameters() if p.dim() == 2) < size / 4
    with torch.no_grad():
        for hidden in (model(tokens), model.prefill(tokens, model.new_cache(1, 20))):
            torch.testing.assert_close(model.lm_head(hidden), want, atol=1e-3, rtol=1e-3)
    x = torch.randn(2, config.n_embd, requires_grad=True)
    for token in (-1, 97):
        pytest.raises(IndexError, model, torch.tensor([[token]]))
    for use in (lambda: model.head.weight, lambda: model.to("cpu", torch.bfloat16), lambda: copy.deepcopy(model),
                lambda: pickle.dumps(model), model.state_dict, lambda: model.save_pretrained(tmp_path),
                lambda: model.head(x), lambda: CloverHeads(preset("medusa"), model), lambda: heads.to("meta"),
                lambda: heads.save_pretrained(tmp_path)):
        refusal(use, "packed for decoding", "packed=False")


@needs_compiler
def test_only_what_has_kernels_is_packed():
    """Catches float16, which has none, a layer of somebody's own, which may compute anything, and another device."""
    refusal(lambda: cpu.apply(toy_model().to(torch.float16)), "in float32 or bfloat16, not in torch.float16")
    model = toy_model()
    model.blocks[0].mlp.up.__class__ = type("Own", (torch.nn.Linear,), {})
    cpu.apply(model)
    assert isinstance(model.blocks[0].mlp.up, torch.nn.Linear) and not cpu.is_exact(model)
    assert isinstance(model.blocks[0].mlp.down, cpu.PackedLinear)
    heads = random_heads(toy_model())
    heads.heads[1].project.linear.__class__ = type("Own", (torch.nn.Linear,), {})
    cpu.apply(heads.model, heads)
    assert not isinstance(heads.heads, cpu.PackedHeads) and isinstance(heads.heads[1].mix.query, cpu.PackedLinear)
    with torch.no_grad():
        assert len(paths(heads.draft(torch.randn(1, 64), torch.tensor([5]), 17, 4), 0)) == 17
    model = toy_model().to("meta")
    cpu.apply(model)
    assert type(model.head) is models.LMHead


@needs_compiler
@pytest.mark.parametrize("kind", ["folder", "int8"])
def test_a_model_comes_packed_and_heads_follow_it(kind, tmp_path, capsys):
    """Catches float16, which has no kernels, that says another text with another tree."""
    model = toy_model()
    model.save_pretrained(tmp_path)
    random_heads(model).save_pretrained(tmp_path / "clover")
    load = lambda **options: checkpoint.load(tmp_path, device="cpu", quantize=None if kind == "folder" else kind,
                                             **options)
    plain = load(packed=False)
    assert type(plain.blocks[0].attn.qkv) is torch.nn.Linear and plain.head.weight.shape == (97, 64)
    assert type(CloverHeads.from_pretrained(tmp_path / "clover", plain).heads[0].mix.query) is torch.nn.Linear
    models.warn.cache_clear()
    half = load(dtype=torch.float16)
    assert half.dtype == torch.bfloat16 and capsys.readouterr().err.count("float16 is not for a CPU") == 1
    for model in (load(), half):
        heads = CloverHeads.from_pretrained(tmp_path / "clover", model)
        assert cpu.is_exact(model) and isinstance(heads.heads[0].mix.query, cpu.PackedLinear)
        assert isinstance(heads.augment_blocks, cpu.PackedBlocks)
        want = generate(model, random_prompts([9, 30]), 20, batch_size=1).tokens
        assert generate(model, random_prompts([9, 30]), 20, heads, tree_size=17).tokens == want


@pytest.mark.parametrize("stored, want", [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32),
                                          (torch.float16, torch.float32)])
def test_a_checkpoint_comes_in_the_dtype_that_is_fast_here(stored, want, tmp_path):
    """Catches bfloat16 without kernels for it, and a float32 checkpoint rounded unasked."""
    toy_model().save_pretrained(tmp_path, stored)
    want = want if cpu.library() else torch.float32
    assert GPT.from_pretrained(tmp_path, device="cpu").dtype == want


@needs_compiler
@pytest.mark.parametrize("vocab_ids", [None, [90, 4, 17, 33, 60]])
def test_the_lm_head_finds_the_same_tokens_packed(vocab_ids):
    """Catches a packed part of the vocabulary that belongs to other ids."""
    model, hidden = toy_model(), torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    vocab_ids = None if vocab_ids is None else torch.tensor(vocab_ids, dtype=torch.int32)
    want = model.head.topk(hidden, 4, vocab_ids)
    cpu.apply(model)
    got = model.head.topk(hidden, 4, vocab_ids)
    torch.testing.assert_close(got[0], want[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(got[1], want[1])



# ---------------------------------------------------------------------------------------------------------------------
# The library

def run_with(environment, code, *arguments):
    """Runs code in a fresh process from the root -> what it printed."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


TEXT = """
import sys, torch
from backends import cpu
from generate import generate
from hf import checkpoint
torch.set_num_threads(1)
model = checkpoint.load(sys.argv[1], device="cpu", quantize=sys.argv[2] if len(sys.argv) > 2 else None)
print(cpu.library() is not None, generate(model, [[1, 2, 3], [50] * 40], 20, lookup=True, tree_size=5).tokens)
"""


@needs_compiler
def test_the_library_is_built_once_and_anew_where_it_is_broken(tmp_path, monkeypatch, capsys):
    """Catches a compiler that runs each time, a broken file or another machine's that is taken, a folder that cannot be
    written and then a traceback, or more than one line about it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
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
    source = tmp_path / "small.c"
    source.write_text("int answer(void) { return 42; }")
    monkeypatch.setattr(cpu, "SOURCE", source)
    run_with({}, f"from backends import cpu; cpu.SOURCE = cpu.Path({str(source)!r}); cpu.load_or_build({command})")
    (file,) = (tmp_path / "clover").iterdir()
    assert file.suffix == ".so" and not compiled()
    file.write_bytes(b"truncated")
    for _ in range(2):
        assert cpu.load_or_build(command).answer() == 42
    assert compiled() == 1
    macros.append("#define another CPU")
    cpu.load_or_build(command)
    assert compiled() == 2 and len(list((tmp_path / "clover").iterdir())) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # where no folder can be made
    macros.append("#define a third")
    models.warn.cache_clear()
    cpu.load_or_build(command)
    assert compiled() == 3 and capsys.readouterr().err.count("compiled anew in each run") == 1


@needs_compiler
@pytest.mark.parametrize("compiler", ["/nonexistent/cc", pytest.param("false", marks=pytest.mark.slow)])
def test_without_a_compiler_the_texts_are_the_same(compiler, tmp_path):
    """Catches a traceback, and a line that does not help; in float32, where a tie would be chance."""
    toy_model().save_pretrained(tmp_path)
    want = run_with({}, TEXT, tmp_path)
    got = run_with(dict(CC=compiler), TEXT, tmp_path)
    assert want.stdout.startswith("True") and not want.stderr
    assert got.stdout == want.stdout.replace("True", "False") and len(got.stderr.splitlines()) == 1
    assert "install a C compiler" in got.stderr


@needs_compiler
def test_two_processes_may_build_at_once(tmp_path):
    """Catches a file that one reads while the other writes it."""
    environment = os.environ | dict(XDG_CACHE_HOME=str(tmp_path), CFLAGS="-O1")
    code = "from backends import cpu; assert cpu.library()"
    both = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert len(list((tmp_path / "clover").iterdir())) == 1


FUNCTIONS = ("product or row_without or attention or argmax or same_bits or trees_in_c or chains_in_c or accept_path "
             "or commit")
SANITIZED = "-fsanitize=address,undefined -fno-sanitize-recover=all -g"


@needs_compiler
@pytest.mark.parametrize("flags", [
    "-DPLAIN -O2", *(pytest.param(flags, marks=pytest.mark.slow) for flags in ("-mno-avx512f", SANITIZED))])
def test_other_processors_compute_the_same(flags, tmp_path):
    """Catches a version of the dot products that this CPU does not take, and what sanitizers find."""
    environment = dict(CFLAGS=flags, XDG_CACHE_HOME=str(tmp_path))
    if flags == SANITIZED:
        libraries = [subprocess.run(["cc", f"-print-file-name=lib{name}.so"], capture_output=True, text=True).stdout
                     for name in ("asan", "ubsan")]
        environment |= dict(LD_PRELOAD=" ".join(map(str.strip, libraries)), ASAN_OPTIONS="detect_leaks=0")
    code = "import pytest, sys; sys.exit(pytest.main(['-q', '-x', *sys.argv[1:]]))"
    functions = "product or row_without" if "PLAIN" in flags else FUNCTIONS  # nothing else has versions
    done = run_with(environment, code, "tests/test_backends_cpu.py", "-k", functions)
    assert "passed" in done.stdout and "skipped" not in done.stdout
