"""tools/tune.py: the tree of most tokens per second, from measured times and what heads were seen to find."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import random_prompts, toy_model
from test_clover import random_heads

from clover import CloverHeads
from generate import DEFAULT_TREE, Engine, Sampling, generate
from hf.tokenizer import load_encoding
from model import GPT, InputError
from tools import tune
from tools.cli import DEMO
from tools.tune import acceptance, expected_tokens, fit_tree, seconds, stage_times, step_time, times_file
from training.data import load_tokens, prompts

TABLE = [[0.8, 0.1, 0.05] + [0.0] * 60, [0.0, 0.5, 0.1] + [0.0] * 60, [0.0] * 63, [0.0] * 63]


def test_acceptance_is_what_decoding_accepts():
    """Catches a table that counts the wrong node or depth: for every tree it must foretell the tokens per step."""
    model = GPT.from_pretrained(DEMO, device="cpu")
    heads = CloverHeads.from_pretrained(DEMO / "clover", model)
    given = prompts(load_tokens(None, load_encoding(DEMO), "heldout"), 6, 30)
    table = acceptance(model, heads, given, 0.0, max_new_tokens=48)
    assert len(table) == 4 and all(len(row) == 63 and all(0 <= share <= 1 for share in row) for row in table)
    found = [expected_tokens({"0": table}, size, 0.0) for size in range(1, 65)]
    assert found[0] == 1 and found == sorted(found) and found[-1] > 2
    for size in (3, 64):
        out = generate(model, given, 48, heads, tree_size=size, beams=8)
        assert found[size - 1] == pytest.approx(out.tokens_per_step, rel=0.06)  # a text's last step is cut


def test_acceptance_is_the_same_with_a_step_in_flight(toy, monkeypatch):
    """Catches slots moved or left out while a step is in flight: its result has a row for each, as the buffer that it
    is copied to on a GPU."""
    class AsOnCuda(Engine):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.steps_ahead = 1

        def step(self, variant):
            result = super().step(variant)
            assert len(result) == self.batch_size
            return result
    heads, given = random_heads(toy), random_prompts([9, 30, 3, 14, 7])
    want = [acceptance(toy, heads, given, t, 20, batch_size=3) for t in (0.0, 1.0)]
    monkeypatch.setattr(tune, "Engine", AsOnCuda)
    assert [acceptance(toy, heads, given, t, 20, batch_size=3) for t in (0.0, 1.0)] == want


def test_expected_tokens_between_temperatures():
    """Catches depths that a small tree does not have, and a line drawn past its ends."""
    tables = {"0": TABLE, "1": [[share / 2 for share in row] for row in TABLE]}
    assert expected_tokens(tables, 2, 0) == pytest.approx(1.8)
    assert expected_tokens(tables, 3, 0) == pytest.approx(1 + 0.8 + 0.1 + 0.5)
    assert expected_tokens(tables, 3, 1) == pytest.approx(1 + 0.7)
    assert expected_tokens(tables, 3, 0.25) == pytest.approx(1 + 1.4 * 0.875)
    assert expected_tokens(tables, 3, 5) == expected_tokens(tables, 3, 1)


@pytest.mark.parametrize("times, want", [(lambda T: 1.0, 4), (lambda T: T, 1), (lambda T: 1 + 0.5 * (T > 2), 2),
                                         (lambda T: 1 + T / 10, 3), (lambda T: 2.35 if T == 3 else T, 1)],
                         ids=["free", "linear", "step", "slope", "as good as plain"])
def test_the_best_tree_wins(toy, monkeypatch, times, want):
    """Catches speculation where it loses, and a search that stops too soon."""
    measured = []

    def measure(model, heads, batch, size, *_):
        measured.append(size)
        return times(size)
    monkeypatch.setattr(tune, "step_time", measure)
    heads = random_heads(toy)
    heads.info = dict(acceptance={"0": TABLE})
    found = fit_tree(toy, heads, 1, 100, Sampling())
    assert found.tree_size == want and [row[0] for row in found.table] * tune.ROUNDS == measured
    rates = {size: tokens / seconds for size, seconds, tokens in found.table}
    assert rates[want] >= 0.97 * max(rates.values())
    first = len(measured)
    assert fit_tree(toy, heads, 1, 100, Sampling()) == found and len(measured) == first  # known now
    assert fit_tree(toy, heads, 1, 100, Sampling(), fresh=True) == found and len(measured) == 2 * first
    fit_tree(toy, heads, 2, 100, Sampling())
    fit_tree(toy, heads, 1, 100, Sampling(), beams=1)
    assert len(measured) == 4 * first  # another batch size or number of beams is another measurement


def test_the_file_of_times_serves_the_next_process(toy, monkeypatch):
    """Catches a library call that writes a file, and a command line that measures every time."""
    heads, measured = random_heads(toy), []
    heads.info = dict(acceptance={"0": TABLE})
    monkeypatch.setattr(tune, "step_time", lambda *_: measured.append(1) or 1.0)
    generate(toy, random_prompts([5]), 20, heads)
    assert measured and not times_file().parent.exists()
    tune.MEASURED.clear()
    found = fit_tree(toy, heads, 1, 100, Sampling(), file=times_file())
    tune.MEASURED.clear()
    measured.clear()
    assert fit_tree(toy, heads, 1, 100, Sampling(), file=times_file()) == found and not measured


def test_a_broken_file_of_times_is_measured_again(toy, monkeypatch):
    """Catches a crash over a file that another version wrote, and times that cannot be kept."""
    heads, file = random_heads(toy), times_file()
    heads.info = dict(acceptance={"0": TABLE})
    monkeypatch.setattr(tune, "step_time", lambda *_: 1.0)
    file.parent.mkdir(parents=True)
    key = tune.cache_key(toy, heads, 1, 100, Sampling(), None, True)
    broken = [json.dumps({key: value}) for value in (3, {"1": "x"}, {"1": 0}, {"1": -1})]
    for content in ("", "[]", "{", '{"a": 3}', *broken):
        file.write_text(content)
        tune.MEASURED.clear()
        assert fit_tree(toy, heads, 1, 100, Sampling(), file=file).tree_size == 4
        assert len(json.loads(file.read_text())) >= 1
    file.unlink()
    file.mkdir()
    assert fit_tree(toy, heads, 1, 100, Sampling(), file=file, fresh=True).tree_size == 4


def test_heads_without_a_table_get_a_small_tree(toy):
    assert fit_tree(toy, random_heads(toy), 1, 100, Sampling()).tree_size == DEFAULT_TREE


@pytest.mark.parametrize("error", [InputError("no room"), torch.OutOfMemoryError("no room")], ids=["refused", "failed"])
def test_trees_that_do_not_fit_the_memory_are_not_chosen(toy, monkeypatch, error):
    def measure(model, heads, batch, size, *_):
        if size > 2:
            raise error
        return 1.0
    heads = random_heads(toy)
    heads.info = dict(acceptance={"0": TABLE})
    monkeypatch.setattr(tune, "step_time", measure)
    assert fit_tree(toy, heads, 1, 100, Sampling()).tree_size == 2


def test_auto_decodes_with_the_fitted_tree(toy, monkeypatch):
    heads = random_heads(toy)
    heads.info = dict(acceptance={"0": TABLE})
    monkeypatch.setattr(tune, "step_time", lambda *_: 1.0)
    out = generate(toy, random_prompts([5]), 20, heads)
    assert out.tree_size == 4 and out.tokens == generate(toy, random_prompts([5]), 20).tokens


def test_seconds_takes_the_quickest_call(monkeypatch):
    """Catches a mean, which whatever else runs on the machine would spoil."""
    clock = iter([0.0, 0.0, 5.0, 5.0, 6.0, 6.0, 9.0, 9.0])
    monkeypatch.setattr(tune.time, "perf_counter", lambda: next(clock))
    assert seconds(lambda: None, torch.device("cpu")) == 1.0


def test_stages_and_steps_are_timed(toy):
    times = stage_times(toy, random_heads(toy), 2, 9, Sampling(0.5, top_k=3))
    assert list(times) == ["draft", "verify", "sample", "accept", "commit"] and min(times.values()) > 0
    assert step_time(toy, None, 2, 1, Sampling()) > 0


@torch.inference_mode()
@pytest.mark.parametrize("tree_size, draft", [(1, 0.0), (9, 1.0)])
def test_a_tree_of_one_has_no_draft_to_time(tree_size, draft, toy, monkeypatch):
    """Catches a CUDA graph captured of nothing, for which CUDA warns and which it may not launch."""
    made, captured = tune.timing_engine(toy, random_heads(toy), 2, tree_size, Sampling()), []
    monkeypatch.setattr(tune, "timing_engine", lambda *_, **__: made)
    monkeypatch.setattr(tune, "capture", lambda stage, device: captured.append(stage) or (None, stage))
    monkeypatch.setattr(tune, "seconds", lambda body, device: 1.0)
    times = stage_times(SimpleNamespace(device=torch.device("cuda")), None, 2, tree_size, Sampling())
    assert times == dict(draft=draft, verify=1.0, sample=1.0, accept=1.0, commit=1.0)
    assert (made.draft in captured) == (tree_size > 1) and len(captured) == sum(times.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("error:.*CUDA Graph is empty")
@pytest.mark.parametrize("tree_size", [1, 9])
def test_stages_and_steps_are_timed_on_a_gpu(tree_size):
    """Catches a stage that cannot be captured by itself."""
    model = toy_model().to("cuda")
    heads = random_heads(model).to("cuda")
    times = stage_times(model, heads, 2, tree_size, Sampling(0.5, top_k=3))
    assert (times.pop("draft") > 0) == (tree_size > 1) and min(times.values()) > 0
    assert step_time(model, heads, 2, tree_size, Sampling()) > 0


@torch.inference_mode()
def test_timing_leaves_the_cache_as_long_as_it_was(toy):
    """Catches steps that run out of the cache while they are timed."""
    made = tune.timing_engine(toy, random_heads(toy), 2, 9, Sampling())
    for _ in range(300):
        made.step()
    assert made.slots.cache.lengths.tolist() == [255, 255] and isinstance(made, Engine)
