"""tools/tune.py: the tree of most tokens per second, from measured times and what heads were seen to find."""

import json
import math

import pytest
import torch

import generate as module
from clover import CloverHeads
from conftest import random_prompts
from generate import DEFAULT_TREE, Decoder, DraftPlan, Sampling, generate, prepare
from hf.tokenizer import load_encoding
from model import GPT, InputError
from test_clover import random_heads
from tools import tune
from tools.flags import DEMO
from tools.policy import MEASURED
from tools.tune import (
    StepCost,
    acceptance,
    expected_tokens,
    fit,
    keep_times,
    thread_gains,
    times_file,
)
from training.data import load_tokens, prompts

TABLE = [[0.8, 0.1, 0.05] + [0.0] * 60, [0.0, 0.5, 0.1] + [0.0] * 60, [0.0] * 63, [0.0] * 63]


def test_acceptance_is_what_decoding_accepts():
    """Catches a table that counts the wrong node or depth: for every tree it must foretell the tokens per step."""
    model = GPT.from_pretrained(DEMO, device="cpu")
    heads = CloverHeads.from_pretrained(DEMO / "clover", model)
    given = prompts(load_tokens(None, load_encoding(DEMO), "heldout"), 16, 30)
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
    class AsOnCuda(Decoder):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.steps_ahead = 1

        def step(self, plan):
            result = super().step(plan)
            assert len(result) == self.batch_size
            return result
    heads, given = random_heads(toy), random_prompts([9, 30, 3, 14, 7])
    want = [acceptance(toy, heads, given, t, 20, batch_size=3) for t in (0.0, 1.0)]
    monkeypatch.setattr(module, "Decoder", AsOnCuda)
    assert [acceptance(toy, heads, given, t, 20, batch_size=3) for t in (0.0, 1.0)] == want


def test_expected_tokens_between_temperatures():
    """Catches depths that a small tree does not have, and a line drawn past its ends."""
    tables = {"0": TABLE, "1": [[share / 2 for share in row] for row in TABLE]}
    assert expected_tokens(tables, 2, 0) == pytest.approx(1.8)
    assert expected_tokens(tables, 3, 0) == pytest.approx(1 + 0.8 + 0.1 + 0.5)
    assert expected_tokens(tables, 3, 1) == pytest.approx(1 + 0.7)
    assert expected_tokens(tables, 3, 0.25) == pytest.approx(1 + 1.4 * 0.875)
    assert expected_tokens(tables, 3, 5) == expected_tokens(tables, 3, 1)


# ---------------------------------------------------------------------------------------------------------------------
# Which plans there are to choose from

def heads_with_table(model):
    heads = random_heads(model)
    heads.info = dict(acceptance={"0": TABLE})
    return heads


def plans_of(*args, **options):
    return fit(*args, Sampling(), **options).plans


def test_plans_are_those_that_may_pay(toy):
    """Catches a chain where lookup was not asked for, none where it was, a tree of more than 64 nodes, and a single
    tree, should the guess of what it takes be wrong."""
    heads = heads_with_table(toy)
    chains = tuple(DraftPlan(0, n) for n in tune.CHAINS)
    assert plans_of(toy, None, False, 1) == (DraftPlan(),)
    assert plans_of(toy, None, True, 1) == (DraftPlan(), *chains)
    plain, *trees = plans_of(toy, heads, False, 1)
    assert plain == DraftPlan() and len(trees) >= 2
    assert all(tree.head_nodes and not tree.lookup_tokens for tree in trees)
    both = plans_of(toy, heads, True, 1)
    assert both[:1 + len(trees)] == (plain, *trees) and both[1 + len(trees):][:2] == chains
    assert both[-1].head_nodes and both[-1].lookup_tokens
    heads.info = dict(acceptance={"0": [[1.0] * 63] * 4})
    assert max(plan.tree_size for plan in plans_of(toy, heads, True, 1)) == 64
    assert plans_of(toy, heads, True, 1, tree_size=9) == (DraftPlan(4, 4),)
    with pytest.raises(InputError, match="beams"):
        plans_of(toy, heads, True, 1, beams=99)


def test_a_guess_of_costs_is_a_guess_of_ratios(demo):
    """Catches a part of a step that is left out: ratios of what was measured on two cores, batch sizes 1 and 32."""
    measured = {(DraftPlan(1), 1): 1.25, (DraftPlan(4), 1): 1.6, (DraftPlan(15), 1): 2.0, (DraftPlan(0, 10), 1): 1.45,
                (DraftPlan(9, 10), 1): 2.2, (DraftPlan(4), 32): 2.7, (DraftPlan(0, 10), 32): 4.1}
    cost = StepCost(*demo, None, 1)
    for (plan, batch), ratio in measured.items():
        assert 0.6 < cost(plan, batch) / cost(DraftPlan(), batch) / ratio < 1.6
    assert cost(DraftPlan(), 1) > StepCost(demo[0], None, None, 1)(DraftPlan(), 1)  # heads read


@pytest.fixture(scope="module")
def demo():
    model = GPT.from_pretrained(DEMO, torch.float32, "cpu")
    return model, CloverHeads.from_pretrained(DEMO / "clover", model)


def engine_of(model, heads, **options):
    return prepare(model, random_prompts([5]), 20, heads, lookup=True, **options)


def test_the_file_of_times_serves_the_next_process(toy):
    """Catches a library call that writes a file, times that are lost, and a file that grows without end."""
    heads, file = heads_with_table(toy), times_file()
    engine = engine_of(toy, heads, times_file=file)
    engine.generate(random_prompts([5]), 20)
    assert not file.parent.exists()
    keep_times(engine)
    tune.KNOWN.clear()
    first, again = engine.policy.times, engine_of(toy, heads, times_file=file).policy.times
    for plan in first.plans.now:
        cost = first.cost(plan, 1) * math.exp(first.plans.now[plan])
        assert again.cost(plan, 1) == pytest.approx(cost) and again.plans.variance[plan] == MEASURED
    gains = lambda times: {n: times.threads.now[1] - log for n, log in times.threads.now.items()}
    assert gains(again) == pytest.approx({n: max(gain, 0) for n, gain in gains(first).items()})
    assert again.cost.reading == first.cost.reading
    entry, = json.loads(file.read_text()).values()
    file.write_text(json.dumps({str(key): entry for key in range(3 * tune.KEPT)}))
    keep_times(engine)
    kept = list(json.loads(file.read_text()))
    assert len(kept) == tune.KEPT and kept[-1] == engine.policy.key


def test_a_broken_file_of_times_is_ignored(toy, capfd):
    """Catches a crash over a file that another version wrote, and times that cannot be kept."""
    heads, file = heads_with_table(toy), times_file()
    file.parent.mkdir(parents=True)
    key = tune.times_key(toy, heads, 1, Sampling(), None)
    good = dict(plans={"1+0": [0.1, 0.1]}, reading=[0.1, 0.1], gains={"1": 0.0})
    wrong = dict(plans=[{"1+0": "x"}, {"1": [1, 1]}, {"1+0": [1e9, 1]}, {"1+0": [1]}, {"1+0": [0, 0.1]}, 3],
                 reading=[["x", 1], [-1, 1], 3], gains=[{"1": math.nan}, {"x": 0.0}, {"1": "0"}])
    broken = [3, {"1+0": 1.0}, {}, *(good | {name: value} for name in wrong for value in wrong[name])]
    for content in ("", "[]", "{", '{"a": 3}', *(json.dumps({key: value}) for value in broken)):
        file.write_text(content)
        tune.KNOWN.clear()
        engine = engine_of(toy, heads, times_file=file)
        engine.generate(random_prompts([5]), 20)
        keep_times(engine)
        assert len(json.loads(file.read_text())) == 1
    file.unlink()
    file.mkdir()
    keep_times(engine)
    assert engine_of(toy, heads, times_file=file).policy.plans == engine.policy.plans
    assert capfd.readouterr() == ("", "")


def test_what_steps_take_is_measured_where_that_is_quick(toy, monkeypatch):
    """Catches texts that idle steps change, a probe that is made again, and one of a model whose steps are slow."""
    heads, given = heads_with_table(toy), random_prompts([5, 9, 1])
    want = generate(toy, given, 20, tree_size=1).tokens
    for limit, measured in ((1e9, True), (0.0, False)):
        monkeypatch.setattr(tune, "PROBE", limit)
        tune.KNOWN.clear()
        engine = prepare(toy, given, 20, heads, lookup=True)
        cost, threads = engine.policy.times.cost, torch.get_num_threads()
        assert set(cost.measured) == (set(engine.policy.plans) if measured else set())
        assert engine.generate(given, 20).tokens == want
        assert torch.get_num_threads() == threads
        if measured:
            assert min(min(pair) for pair in cost.measured.values()) > 0
            assert cost(DraftPlan(), 2, reads=False) <= cost(DraftPlan(), 2)
            monkeypatch.setattr(Decoder, "run_first", None)  # which a probe calls
            assert set(tune.fit(toy, heads, True, 3, Sampling()).times.cost.measured) == set(cost.measured)
            tune.probe(engine)
            monkeypatch.undo()


def test_heads_without_a_table_get_a_small_tree(toy):
    heads = random_heads(toy)
    out = generate(toy, random_prompts([5]), 20, heads)
    assert out.tree_size == DEFAULT_TREE and list(out.plans) == [DraftPlan(DEFAULT_TREE - 1)]
    assert plans_of(toy, heads, True, 1)[:2] == (DraftPlan(), DraftPlan(DEFAULT_TREE - 1))


def test_threads_that_are_given_are_taken(toy, monkeypatch):
    """Catches a choice where there is none: --threads, OMP_NUM_THREADS, a GPU."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert list(thread_gains(toy)) == [1, 2, 4, 8]
    assert set(thread_gains(toy).values()) == {0.0}  # so small a model gains nothing
    assert list(thread_gains(toy, threads=8)) == [8]
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert list(thread_gains(toy)) == [8]
