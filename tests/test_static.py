"""tests/static.py: what every kernel passes without a GPU, and how many launches a step needs. `pytest` compiles a
sample, `pytest -m static` every choice, `pytest -m slow` all combinations of choices."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch

import static
from bench.operations import quantize_randomly
from conftest import slow
from drafters.base import BlockConfig, Eagle3Config
from drafters.block import BlockHeads
from drafters.eagle3 import Eagle3Heads
from generate import Decoder, Fixed, Sampling
from static import launches_of, step_launches
from test_kernels import records

TOP_P = dict(temperature=0.8, top_p=0.9)
pytestmark = records


def check_figures(launches, figures):
    """Asserts that nothing spills, and that shared memory fits an RTX 30 or 40."""
    wrong = []
    for (name, _, constants, _, options), used in zip(launches, figures, strict=True):
        assert 8 <= used["registers"] <= 255  # fewer means a trap instead of a kernel
        if used["spilled"] or used["shared"] > 101376:
            names = getattr(static.module_of(name), name).arg_names
            sizes = {names[i]: value for (i, *_), value in constants}
            wrong.append((name, sizes, options, used))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("target", ["cuda:90", slow("cuda:80")])
def test_a_launch_of_every_kernel_compiles_without_spills(target):
    """Bug: a kernel compiles only in the interpreter, spills, or needs too much shared memory."""
    launches = static.all_launches(static.last)
    assert {launch[0] for launch in launches} == {
        name for module in static.MODULES for name in vars(module) if name.endswith("_kernel")}
    check_figures(launches, (static.usage(target, launch) for launch in launches))


@pytest.mark.parametrize("combine", [pytest.param(static.covering, marks=pytest.mark.static), slow(static.product)])
def test_every_choice_compiles_without_spills(combine):
    """Bug: as above. slow: every combination of choices."""
    launches = static.all_launches(combine)
    check_figures(launches, static.compile_all("cuda:90", launches))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda:80", "cuda:89"])
def test_products_compile_for_older_gpus(target):
    """Bug: unpacked weights that spill, FP8 that only a newer GPU converts; products of three TF32 products."""
    launches = [(name, *rest) for name, *rest in static.all_launches() if "delta" in name or any(
        getattr(static.module_of(name), name).arg_names[i] == "FORMAT" and (value or "linear" in name)
        for (i, *_), value in rest[1])]
    check_figures(launches, static.compile_all(target, launches))


@pytest.mark.parametrize("sizes", [
    dict(N=14336, activation="silu", present="norm"), dict(N=6144, quantized=("int8", 32), present="norm"),
    dict(N=4096, quantized=("int8", 32))], ids=str)
def test_the_order_of_sums_does_not_depend_on_the_number_of_rows(sizes):
    """Bug: tl.sum, which adds as the compiler's layout is, another one for 17 to 32 rows; another kind of tl.dot."""
    launches = [launches_of("linear_rows", M=M, **sizes)[0] for M in (1, 17, 64)]
    code = [static.compiled("cuda:90", static.signature(name, args, named)).asm["ttgir"]
            for name, _, args, named in launches]
    assert not any("tt.reduce" in text for text in code)
    assert len({re.search(r"nvidia_mma<{versionMajor = .", text)[0] for text in code}) == 1


def test_register_counts_and_spills_are_read_from_the_binary():
    """Bug: spills are not detected. 96 registers are too few for a tile of 64 rows."""
    name, _, args, named = launches_of("tree_attention", T=16, D=128)[0]
    used = static.usage("cuda:90", static.signature(name, args, named | dict(maxnreg=96)))
    assert used["registers"] <= 96 and used["spilled"] > 100 and used["shared"] > 32 * 1024


demo = pytest.fixture(scope="module")(lambda: static.demo())


@pytest.mark.parametrize("drafters, sampling, most", [
    ("", {}, 93), ("", dict(temperature=0.8), 94), ("", TOP_P, 96), ("lookup", {}, 99), ("heads", {}, 159),
    ("heads", TOP_P, 165), ("heads+lookup", {}, 162)], ids=str)
def test_a_step_needs_few_launches(demo, drafters, sampling, most):
    """Bug: an operation of a step falls apart into several launches, about 2 us each. demo/ has 12 layers."""
    model, heads = demo[0], demo[1] if "heads" in drafters else None
    found = step_launches(model, heads, "lookup" in drafters, 16 if drafters else 1, capacity=512,
                          sampling=Sampling(**sampling))
    assert found.total() <= most, found


@pytest.mark.parametrize("drafters, most", [("", 160), ("lookup", 299), ("heads", 367), ("heads+lookup", 520)])
def test_the_launches_of_the_five_files_alone(drafters, most):
    """Bug: docs/kernels.md, which says what the Triton trees and fused blocks of backends/ save."""
    model, heads = static.demo(apply=lambda module: None)
    uses_heads = heads if "heads" in drafters else None
    found = step_launches(model, uses_heads, "lookup" in drafters, 16, Decoder, Fixed, capacity=512)
    assert found.total() <= most and found["linear_rows"] == found["build_tree"] == 0


@pytest.mark.parametrize("make, config, n_layer, most", [
    (Eagle3Heads, partial(Eagle3Config, vocabulary=32000, own_head=True), 1, 541),
    (BlockHeads, partial(BlockConfig, first=0, markov_rank=256), 5, 488)])
def test_the_launches_of_published_heads(make, config, n_layer, most):
    """Bug: as above. EAGLE-3 and DSpark for 8b draft 7 tokens; a plain step has 329 launches."""
    model = static.sized("8b")
    with torch.device("meta"):
        heads = make(config(replace(model.config, n_layer=n_layer), 7, (2, 16, 29)), model).place()
    found = step_launches(model, heads, tree_size=16, capacity=512)
    assert found.total() <= most and found["tree_attention"] == 32 + (7 if n_layer == 1 else 5), found


@pytest.mark.parametrize("size, bits, most", [("135m", 16, 225), ("8b", 4, 240), ("8b", 16, 330)])
def test_a_plain_step_of_other_models_needs_few_launches(size, bits, most):
    """Bug: as above. Of 8b in 16 bits, norms and activations run beside cuBLAS's products."""
    model = static.sized(size)
    if bits < 16:
        quantize_randomly(model, bits)
    assert step_launches(model, capacity=512).total() <= most
