"""tests/static.py: what every kernel passes without a GPU, and how many launches a step needs. `pytest` compiles a
sample, `pytest -m static` every shape class."""

import re

import pytest
import torch

import kernels
import static
from clover import CloverHeads
from generate import DraftPlan, Sampling
from model import GPT
from static import BF16, EXAMPLES, FP32, launches_of, step_launches
from test_kernels import records
from tools.flags import DEMO

TOP_P = Sampling(temperature=0.8, top_p=0.9)
pytestmark = records


def check_figures(pairs, figures):
    """Of (target, launch) pairs: no spills, and no more shared memory than an RTX 30 or 40 has."""
    wrong = []
    for (target, launch), used in zip(pairs, figures):
        assert 8 <= used["registers"] <= 255  # fewer: a trap, and no kernel
        if used["spilled"] or used["shared"] > 101376:
            wrong.append((target, *static.shape_class(launch), used))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("target", [pytest.param("cuda:90", marks=pytest.mark.static),
                                    pytest.param("cuda:80", marks=pytest.mark.slow)])
def test_every_launch_compiles_without_spills(target):
    """Bug: a kernel that only the interpreter understands, that spills, or that needs too much shared memory."""
    launches = static.all_launches()
    if target == "cuda:80":
        tiled = "_tree_attention_kernel", "_project_kernel"
        launches = {static.shape_class(launch): launch for launch in launches if launch[0] in tiled}.values()
    pairs = [(target, launch) for launch in launches]
    check_figures(pairs, static.compile_all(pairs))


def test_a_launch_of_every_kernel_compiles_without_spills():
    launches = static.signatures([launch for name in EXAMPLES for launch in launches_of(name, **EXAMPLES[name])])
    assert {launch[0] for launch in launches} == {name for name in vars(kernels) if name.endswith("_kernel")}
    pairs = [("cuda:90", launch) for launch in launches]
    check_figures(pairs, (static.usage(*pair) for pair in pairs))


def random_launches(generator):
    """Launches of shapes and dtypes drawn at random, of the functions that choose tiles by shape class."""
    def draw(*choices):
        return choices[int(torch.randint(0, len(choices), (), generator=generator))]
    launches = launches_of(
        "tree_attention", draw(BF16, FP32), draw("", "slopes"), draw(True, True, False), T=draw(1, 2, 5, 17, 33, 64),
        window=draw(0, 0, 40, 1024), Hq=2 * draw(1, 2, 3, 8, 12), D=draw(16, 32, 48, 64, 80, 96, 128, 192, 256),
        S=draw(100, 4096, 50000))
    aligned = draw(True, False)
    return launches + launches_of(draw("project_sample", "project_topk"), draw(BF16, FP32), aligned=aligned,
                                  k=32, M=draw(1, 8, 17, 33, 64, 200), V=draw(8192, 32000, 151936))


def test_the_gate_knows_every_shape_class():
    """Bug: a host function chooses a tile, a number of warps or of stages that the gate never compiled."""
    def choice(launch):
        kernel, *others = static.shape_class(launch)
        return kernel.split()[0], others, launch[-1]

    known = [choice(launch) for launch in static.all_launches()]
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        for launch in static.signatures(random_launches(generator)):
            assert choice(launch) in known or launch[0] == "_merge_lists_kernel"


def test_figures_are_read_from_the_binary():
    """Bug: a spill that the gate cannot see: 96 registers are too few for a tile of 64 rows."""
    name, _, args, named = launches_of("tree_attention", T=16, D=128)[0]
    used = static.usage("cuda:90", static.signature(name, args, named | dict(maxnreg=96)))
    assert used["registers"] <= 96 and used["spilled"] > 100 and used["shared"] > 32 * 1024


@pytest.mark.parametrize("name, given, product", [
    pytest.param("tree_attention", dict(T=16, D=128), "HGMMA", id="attention-64-rows"),
    pytest.param("project_topk", dict(M=8), "HGMMA", id="project-8-rows"),
    *(pytest.param(*case, id=name, marks=pytest.mark.static) for name, case in {  # `pytest` runs the others
        "attention-8-rows": ("tree_attention", dict(T=2, D=128), "HMMA"),
        "attention-128-rows": ("tree_attention", dict(T=16, Hq=16, D=128), "HGMMA"),
        "project-64-rows": ("project_topk", dict(M=64), "HGMMA"),
        "project-128-rows": ("project_topk", dict(M=128), "HGMMA"),
        "gathered-rows": ("project_topk", dict(M=8, present="vocab_ids"), "HGMMA")}.items())])
def test_hopper_loads_16_bytes_at_a_time(name, given, product):
    """Bug: the cache or the weights are not streamed by asynchronous copies of 16 bytes; tensor cores are idle."""
    name, _, values, named = launches_of(name, **given)[0]
    compiled = static.compile_launch("cuda:90", static.signature(name, values, named))
    code = static.cuobjdump(compiled.asm["cubin"], "--dump-sass")
    assert len(re.findall(r"\bLDGSTS\.E\.BYPASS\.128\b", code)) >= 12 and re.search(rf"\b{product}\.", code)
    assert not re.search(r"\b(LDG|LDGSTS)\.E(\.BYPASS)?\.(U8|U16|S16)\b", code)


def with_runtime_strides(launch):
    """The launch with every stride an int32 argument: none is known to be 1, 0 or a multiple of 16."""
    name, kinds, constants, multiples, options = launch
    strides = {i for i, parameter in enumerate(getattr(kernels, name).arg_names) if parameter.startswith("stride_")}
    kinds = tuple("i32" if i in strides else kind for i, kind in enumerate(kinds))
    return (name, kinds, tuple((i, value) for i, value in constants if i not in strides),
            tuple(i for i in multiples if i not in strides), options)


def products(ttir, arguments):
    """{argument: types of its products} of a kernel's Triton IR; an argument extended or broadcast is still itself."""
    same, found = {f"%{name}": name for name in arguments}, {name: [] for name in arguments}
    for result, operation, operands, kind in re.findall(r"(%\S+) = (\S+) (%[^:]*) : (.*?)(?: loc\(.*)?\n", ttir):
        for name in {same[operand] for operand in re.findall(r"%\w+", operands) if operand in same}:
            if operation in ("arith.extsi", "tt.splat", "tt.broadcast", "tt.expand_dims"):
                same[result] = name
            if operation == "arith.muli":
                found[name].append(kind)
    return found


@pytest.mark.parametrize("name", ["tree_attention", "project_topk", "commit_path", "rope_cache", "select_candidates",
                                  "best_tree"])
def test_addresses_have_64_bits(name):
    """Bug: an offset computed in 32 bits: from 2^31 elements on, 4 GB in bfloat16, it points to random places."""
    for launch in map(with_runtime_strides, static.signatures(launches_of(name, **EXAMPLES[name]))):
        strides = [name for name in getattr(kernels, launch[0]).arg_names if name.startswith(("stride_", "splits"))]
        found = products(static.compile_launch("cuda:90", launch).asm["ttir"], strides)  # splits: partial results
        for name, kinds in found.items():
            assert kinds and all(re.fullmatch("i64|tensor<.*xi64>", kind) for kind in kinds), (launch[0], name, kinds)


def test_commit_path_reads_all_rows_before_it_writes_any():
    """Bug: without a barrier one warp overwrites a row that another has yet to read."""
    launch, = static.signatures(launches_of("commit_path", **EXAMPLES["commit_path"]))
    assert dict(launch[-1])["num_warps"] > 1
    code = re.findall(r"\b(?:ld\.global|st\.global|bar\.sync)\b", static.compile_launch("cuda:90", launch).asm["ptx"])
    assert re.fullmatch("L+B+S+", "".join(dict(l="L", s="S", b="B")[operation[0]] for operation in code)), code


# ---------------------------------------------------------------------------------------------------------------------
# The launches of a step

@pytest.fixture(scope="module")
def demo():
    """demo/ and its heads, without values."""
    model = GPT.from_pretrained(DEMO, device="cpu", packed=False)
    heads = CloverHeads.from_pretrained(DEMO / "clover", model)
    return model.to("meta"), heads.to("meta")


@pytest.mark.parametrize("plan, sampling, most", [
    (DraftPlan(), Sampling(), 130), (DraftPlan(), Sampling(temperature=0.8), 130), (DraftPlan(), TOP_P, 132),
    (DraftPlan(0, 15), Sampling(), 135), (DraftPlan(15), Sampling(), 201), (DraftPlan(15), TOP_P, 204),
    (DraftPlan(8, 7), Sampling(), 206)],
    ids=["plain", "plain-sampled", "plain-top-p", "lookup", "tree-of-16", "tree-of-16-top-p", "both"])
def test_a_step_needs_few_launches(demo, plan, sampling, most):
    """Bug: an operation that falls apart into several, in a step of the 12 layers of demo/; each costs about 2 us."""
    model, heads = demo
    found = step_launches(model, heads if plan.head_nodes else None, plans=(plan,), capacity=512, sampling=sampling)
    assert found.total() <= most, found
    heads, looked_up = plan.head_nodes > 0, plan.lookup_tokens > 0
    assert found["rope_cache"] == found["tree_attention"] == found["glu"] == 12 + heads
    assert found["project"] == found["merge_lists"] == (sampling != TOP_P) + found["select_candidates"]
    assert found["accept_path"] == 1 and found["best_tree"] == found["commit_path"] == heads
    assert found["ngram_lookup"] == found["merge_chain"] == looked_up


def test_the_table_has_the_counts(capsys):
    """Bug: a count under another tree size or drafter."""
    rows = static.print_launches((1, 2, 5))
    assert [str(plan) for plan, _ in rows] == ["plain", "heads 1", "heads 4", "lookup 4", "heads 2 + lookup 2"]
    plain, one, four, lookup, both = (counts.total() for _, counts in rows)
    assert plain < lookup < one < four and lookup < both
    assert f"| 5 | lookup 4 | {lookup} | " in capsys.readouterr().out
