"""bench/launches.py: how many launches a step takes."""

import json

import pytest
import torch

import kernels
from bench import __main__ as bench
from bench.launches import Launches, step_launches
from clover import CloverHeads
from generate import Sampling
from model import GPT
from tools.cli import DEMO

pytestmark = pytest.mark.skipif(not kernels.HAS_TRITON or kernels.INTERPRETED.value,
                                reason="needs triton, and not its interpreter")


@pytest.fixture(scope="module")
def demo():
    """demo/ and its heads, without values."""
    model = GPT.from_pretrained(DEMO, device="cpu")
    heads = CloverHeads.from_pretrained(DEMO / "clover", model)
    return model.to("meta"), heads.to("meta")


@pytest.mark.parametrize("tree_size, sampling, most", [
    (1, Sampling(), 140), (1, Sampling(temperature=0.8), 140), (16, Sampling(), 240), (64, Sampling(), 240)],
    ids=["plain", "plain-sampled", "tree-of-16", "tree-of-64"])
def test_a_step_takes_few_launches(demo, tree_size, sampling, most):
    """Bug: an operation that falls apart into several, in a step of the 12 layers of demo/; on a GPU each costs about 2
    us."""
    model, heads = demo
    found = step_launches(model, heads if tree_size > 1 else None, tree_size=tree_size, capacity=512, sampling=sampling)
    assert found.total() <= most, found
    layers = 12 + (tree_size > 1)
    assert found["rope_cache"] == found["tree_attention"] == found["glu"] == layers
    assert found["project"] == found["merge_lists"] == 1 + found["best_guesses"]
    assert found["accept_path"] == 1 and found["best_tree"] == found["commit_path"] == (tree_size > 1)


def test_the_command_prints_the_counts(capsys):
    """Bug: a count under another tree size, or one that the JSON line lacks."""
    bench.main(["launches", "--tree-sizes", "1", "5"])
    *lines, last = capsys.readouterr().out.splitlines()
    steps = json.loads(last)["steps"]
    assert [row["tree_size"] for row in steps] == [1, 5] and steps[0]["launches"] < steps[1]["launches"]
    assert all(sum(row["operations"].values()) == row["launches"] for row in steps)
    assert f"| 5 | {steps[1]['launches']} | " in "".join(lines)


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
