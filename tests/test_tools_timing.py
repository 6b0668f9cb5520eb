"""tools/timing.py: how long steps and stages take."""

import pytest
import torch

from conftest import toy_model
from generate import DraftPlan, Sampling
from test_clover import random_heads
from tools.timing import stage_times, step_time, timing_decoder

ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.filterwarnings("error:.*CUDA Graph is empty")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
@pytest.mark.parametrize("plan", [DraftPlan(), DraftPlan(8), DraftPlan(0, 8), DraftPlan(4, 4)], ids=str)
def test_stages_and_steps_are_timed(plan, device):
    """Catches a stage that cannot be captured by itself, a graph of nothing, where a tree of one has no draft, and
    steps that run out of the cache while they are timed."""
    model = toy_model().to(device)
    heads = random_heads(model).to(device)
    decoder = timing_decoder(model, heads, plan, batch_size=2, sampling=Sampling(0.5, top_k=3))
    times = stage_times(decoder)
    assert list(times) == ["draft", "verify", "sample", "accept", "commit"]
    assert (times.pop("draft") > 0) == (plan.tree_size > 1) and min(times.values()) > 0
    assert step_time(decoder) > 0 and decoder.slots.cache.lengths.tolist() == [255, 255]
