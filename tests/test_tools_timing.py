"""tools/timing.py: how long steps and stages take."""

import pytest
import torch

from conftest import toy_model
from generate import Decoder, DraftPlan, Sampling
from test_clover import random_heads
from tools import timing
from tools.timing import seconds, stage_times, step_time, timing_decoder


def test_seconds_takes_the_quickest_call(monkeypatch):
    """Catches a mean, which whatever else runs on the machine would spoil."""
    clock = iter([0.0, 5.0, 5.0, 6.0, 6.0, 9.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    assert seconds(lambda: None, torch.device("cpu")) == 1.0


@pytest.mark.parametrize("plan", [DraftPlan(4, 4), *(pytest.param(plan, marks=pytest.mark.slow) for plan in (
    DraftPlan(8), DraftPlan(0, 4)))], ids=str)
def test_stages_and_steps_are_timed(plan, toy):
    times = stage_times(timing_decoder(toy, random_heads(toy), plan, batch_size=2, sampling=Sampling(0.5, top_k=3)))
    assert list(times) == ["draft", "verify", "sample", "accept", "commit"] and min(times.values()) > 0
    assert step_time(timing_decoder(toy, None, DraftPlan())) > 0


@torch.inference_mode()
@pytest.mark.parametrize("tree_size, draft", [(1, 0.0), (9, 1.0)])
def test_a_tree_of_one_has_no_draft_to_time(tree_size, draft, toy, monkeypatch):
    """Catches a CUDA graph captured of nothing, for which CUDA warns and which it may not launch."""
    decoder, captured = timing_decoder(toy, random_heads(toy), DraftPlan(tree_size - 1)), []
    decoder.pool = 0, 0
    monkeypatch.setattr(timing, "capture", lambda stage, device: captured.append(stage) or stage)
    monkeypatch.setattr(timing, "seconds", lambda body, device, group: 1.0)
    times = stage_times(decoder)
    assert times == dict(draft=draft, verify=1.0, sample=1.0, accept=1.0, commit=1.0)
    assert len(captured) == sum(times.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("error:.*CUDA Graph is empty")
@pytest.mark.parametrize("plan", [DraftPlan(), DraftPlan(8), DraftPlan(0, 8), DraftPlan(4, 4)], ids=str)
def test_stages_and_steps_are_timed_on_a_gpu(plan):
    """Catches a stage that cannot be captured by itself."""
    model = toy_model().to("cuda")
    heads = random_heads(model).to("cuda")
    decoder = timing_decoder(model, heads, plan, batch_size=2, sampling=Sampling(0.5, top_k=3))
    times = stage_times(decoder)
    assert (times.pop("draft") > 0) == (plan.tree_size > 1) and min(times.values()) > 0
    assert step_time(decoder) > 0


@torch.inference_mode()
def test_timing_leaves_the_cache_as_long_as_it_was(toy):
    """Catches steps that run out of the cache while they are timed."""
    made = timing_decoder(toy, random_heads(toy), DraftPlan(4, 4), batch_size=2)
    for _ in range(30):
        made.body()()
    assert made.slots.cache.lengths.tolist() == [255, 255] and isinstance(made, Decoder)
