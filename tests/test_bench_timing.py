"""bench/timing.py: times of steps and stages; and how many CPU threads are chosen."""

import pytest
import torch

from backends import cpu
from bench import timing
from bench.timing import stage_times, step_time, timing_decoder
from conftest import needs_compiler
from test_generate import load


@pytest.mark.parametrize("quicker, want", [(1.0, 1), (1.1, 1), (1.3, 2), (0.02, 1)])
def test_more_threads_are_used_if_they_are_15_percent_faster(monkeypatch, quicker, want):
    """Bug: the fastest steps decide, though threads that wait for each other have a few fast ones."""
    threads = [2]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: threads.__setitem__(0, n))
    cpu.choose_threads(lambda: 0.01 / (quicker if threads[0] == 2 else 1))
    assert threads == [want]


@needs_compiler
def test_heads_read_a_token_in_each_timed_draft(monkeypatch):
    """Bug: draft times leave out the augmenting block, which reads nothing in an idle slot."""
    def reads(body, *_):
        decoder.hidden_rows.fill_(1)
        body()
        decoder.slots.state.zero_()
        body()
        return decoder.slots.state.any()
    decoder = timing_decoder(*load("clover", True), 5)
    monkeypatch.setattr(timing, "seconds", reads)
    assert step_time(decoder) and stage_times(decoder)["draft"]
    assert decoder.slots.cache.lengths.tolist() == [255]  # the slot stays idle
