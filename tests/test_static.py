"""tests/static.py: what every kernel passes without a GPU, and how many launches a step needs. `pytest` compiles a
sample, `pytest -m static` every shape class."""

import pytest

import kernels
import static
from clover import CloverHeads
from generate import DraftPlan, Sampling
from model import GPT
from static import EXAMPLES, launches_of, step_launches
from test_kernels import records
from tools.flags import DEMO

TOP_P = Sampling(temperature=0.8, top_p=0.9)
pytestmark = records


def check_figures(launches, figures):
    """No spills, and no more shared memory than an RTX 30 or 40 has."""
    wrong = []
    for (name, _, constants, _, options), used in zip(launches, figures, strict=True):
        assert 8 <= used["registers"] <= 255  # fewer: a trap, and no kernel
        if used["spilled"] or used["shared"] > 101376:
            sizes = {getattr(kernels, name).arg_names[i]: value for i, value in constants}
            wrong.append((name, sizes, options, used))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("target", ["cuda:90", pytest.param("cuda:80", marks=pytest.mark.slow)])
def test_a_launch_of_every_kernel_compiles_without_spills(target):
    """Bug: a kernel that only the interpreter understands, that spills, or that needs too much shared memory."""
    launches = static.signatures([launch for name in EXAMPLES for launch in launches_of(name, **EXAMPLES[name])])
    assert {launch[0] for launch in launches} == {name for name in vars(kernels) if name.endswith("_kernel")}
    check_figures(launches, (static.usage(target, launch) for launch in launches))


@pytest.mark.static
def test_every_launch_compiles_without_spills():
    launches = static.all_launches()
    check_figures(launches, static.compile_all("cuda:90", launches))


def test_figures_are_read_from_the_binary():
    """Bug: a spill that the gate cannot see: 96 registers are too few for a tile of 64 rows."""
    name, _, args, named = launches_of("tree_attention", T=16, D=128)[0]
    used = static.usage("cuda:90", static.signature(name, args, named | dict(maxnreg=96)))
    assert used["registers"] <= 96 and used["spilled"] > 100 and used["shared"] > 32 * 1024


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
    rows = static.print_launches((1, 5))
    assert [str(plan) for plan, _ in rows] == ["plain", "heads 4", "lookup 4", "heads 2 + lookup 2"]
    assert f"| 5 | lookup 4 | {rows[2][1].total()} | " in capsys.readouterr().out
