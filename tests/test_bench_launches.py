"""bench/launches.py: how many launches a step takes."""

import json

import pytest
import torch

import kernels
from bench import __main__ as bench
from bench.launches import Launches, step_launches
from clover import CloverHeads
from generate import Fixed, Sampling, Variant
from model import GPT
from tools.cli import DEMO
from tools.tune import Choice

pytestmark = pytest.mark.skipif(not kernels.HAS_TRITON or kernels.INTERPRETED.value,
                                reason="needs triton, and not its interpreter")


@pytest.fixture(scope="module")
def demo():
    """demo/ and its heads, without values."""
    model = GPT.from_pretrained(DEMO, device="cpu")
    heads = CloverHeads.from_pretrained(DEMO / "clover", model)
    return model.to("meta"), heads.to("meta")


@pytest.mark.parametrize("variant, sampling, most", [
    (Variant(), Sampling(), 140), (Variant(), Sampling(temperature=0.8), 140), (Variant(0, 15), Sampling(), 145),
    (Variant(15), Sampling(), 223), (Variant(63), Sampling(), 240), (Variant(8, 7), Sampling(), 223)],
    ids=["plain", "plain-sampled", "lookup", "tree-of-16", "tree-of-64", "both"])
def test_a_step_takes_few_launches(demo, variant, sampling, most):
    """Bug: an operation that falls apart into several, in a step of the 12 layers of demo/; on a GPU each costs about 2
    us."""
    found = step_launches(*demo, choice=Fixed(variant), capacity=512, sampling=sampling)
    assert found.total() <= most, found
    heads, looked_up = variant.heads > 0, variant.lookup > 0
    assert found["rope_cache"] == found["tree_attention"] == found["glu"] == 12 + heads
    assert found["project"] == found["merge_lists"] == 1 + found["best_guesses"]
    assert found["accept_path"] == 1 and found["best_tree"] == found["commit_path"] == heads
    assert found["lookup"] == found["merge_chain"] == looked_up


def test_plain_steps_stay_cheap_where_other_variants_may_follow(demo):
    """Bug: launches of the heads in a step that they do not draft, beyond keeping what they read later."""
    variants = dict.fromkeys((Variant(), Variant(8, 7), Variant(15)), 1.0)
    found = step_launches(*demo, choice=Choice(variants, variants), capacity=512)
    assert found.total() <= 145 and found["tree_attention"] == 12, found


def test_the_command_prints_the_counts(capsys):
    """Bug: a count under another tree size or drafter, or one that the JSON line lacks."""
    bench.main(["launches", "--tree-sizes", "1", "2", "5"])
    *lines, last = capsys.readouterr().out.splitlines()
    steps = json.loads(last)["steps"]
    assert [(row["tree_size"], row["drafted_by"]) for row in steps] == [
        (1, "plain"), (2, "heads 1"), (5, "heads 4"), (5, "lookup 4"), (5, "heads 2 + lookup 2")]
    counts = [row["launches"] for row in steps]
    assert counts[0] < counts[3] < counts[1] < counts[2] and counts[3] < counts[4]
    assert all(sum(row["operations"].values()) == row["launches"] for row in steps)
    assert f"| 5 | lookup 4 | {counts[3]} | " in "".join(lines)


def test_views_are_free_and_composites_count_what_they_are_made_of():
    """Bug: a count that misses what an operation calls, or takes a view for work."""
    x, norm = torch.zeros(4, 6, device="meta"), torch.nn.RMSNorm(6, device="meta")
    with torch.inference_mode(), Launches() as launches:
        x.view(6, 4).transpose(0, 1)[1:].unsqueeze(0)
        torch.empty(3, device="meta")
    assert launches.counts.total() == 0
    with torch.inference_mode(), Launches() as launches:
        norm(torch.nn.functional.linear(x, torch.zeros(6, 6, device="meta")))
    assert launches.counts["mm"] == 1 and launches.counts.total() > 3
