"""tools/timing.py: how long steps and stages take; and on how many threads of a CPU a model runs."""

import pytest
import torch

from backends import cpu
from conftest import needs_compiler
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
    assert decoder.slots.cache.lengths.tolist() == [255]  # its slot stays idle
