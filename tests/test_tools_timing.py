"""tools/timing.py: how long steps and stages take; and on how many threads of a CPU a model runs."""

import pytest
import torch

from backends import cpu
from conftest import needs_compiler, needs_cuda
from generate import Sampling
from test_generate import load
from tools import timing
from tools.timing import stage_times, step_time, timing_decoder


@pytest.mark.parametrize("quicker, want", [(1.0, 1), (1.1, 1), (1.3, 2), (0.02, 1)])
def test_more_threads_are_used_where_they_are_quicker_by_15_percent(monkeypatch, quicker, want):
    """Catches the quickest steps counting, where threads that wait for one another have a few quick ones."""
    threads = [2]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: threads.__setitem__(0, n))
    cpu.choose_threads(lambda: 0.01 / (quicker if threads[0] == 2 else 1))
    assert threads == [want]


@pytest.mark.filterwarnings("error:.*CUDA Graph is empty")
@pytest.mark.parametrize("compiled, device", [
    (False, "cpu"), pytest.param(True, "cpu", marks=needs_compiler),
    pytest.param(False, "cuda", marks=[pytest.mark.gpu, needs_cuda])])
@pytest.mark.parametrize("tree_size", [1, 9])
@pytest.mark.parametrize("drafters", ["heads", "lookup", "heads+lookup"])
def test_stages_and_steps_are_timed(compiled, device, tree_size, drafters):
    """Catches a stage that cannot be captured alone, a graph of nothing, steps that run out of the cache."""
    model, heads = load("clover", compiled, device)
    decoder = timing_decoder(model, heads if "heads" in drafters else None, tree_size, lookup="lookup" in drafters,
                             batch_size=2, sampling=Sampling(0.5, top_k=3))
    times = stage_times(decoder)
    assert list(times) == ["draft", "verify", "sample", "accept", "commit"]
    assert (times.pop("draft") > 0) == (tree_size > 1) and min(times.values()) > 0
    assert step_time(decoder) > 0 and decoder.slots.cache.lengths.tolist() == [255, 255]


@needs_compiler
def test_heads_read_a_token_in_each_timed_draft(monkeypatch):
    """Catches drafts without what augmenting blocks take, since an idle slot accepts nothing to read."""
    def reads(body, *_):
        decoder.hidden_rows.fill_(1)
        body()
        decoder.slots.state.zero_()
        body()
        return decoder.slots.state.any()
    decoder = timing_decoder(*load("clover", True), 5)
    monkeypatch.setattr(timing, "seconds", reads)
    assert step_time(decoder) and stage_times(decoder)["draft"]
