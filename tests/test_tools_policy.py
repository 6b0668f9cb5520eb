"""tools/policy.py and timing.py: what each step drafts, on how many threads of a CPU, and how long steps take."""

import itertools
import json
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from clover import CloverConfig, Head
from conftest import toy_model
from generate import DraftPlan, Sampling, Sequence, prepare
from kernels import ngram_lookup_reference
from model import GPTConfig
from test_clover import random_heads
from tools import policy as module
from tools.policy import AdaptivePolicy, Text, choose_threads, draft_plans, expected_tokens
from tools.timing import stage_times, step_time, timing_decoder

RECORD = Path(__file__).parent.parent / "bench" / "results" / "gpu-h100.jsonl"
PLAIN = DraftPlan()
TABLES = {"0": [[0.6, 0.1, 0.1], [0.4, 0.1, 0.0]], "1.0": [[0.3, 0.1, 0.0], [0.1, 0.0, 0.0]]}


class Heads:
    """What a policy asks of heads."""
    config = CloverConfig(n_draft=2)
    info = dict(acceptance=TABLES)


def test_expected_tokens_of_a_table():
    assert expected_tokens(TABLES, 1, 0.0) == 1.0
    assert expected_tokens(TABLES, 2, 0.0) == pytest.approx(1.6)
    assert expected_tokens(TABLES, 3, 0.0) == pytest.approx(2.2)
    assert expected_tokens(TABLES, 2, 0.5) == pytest.approx(1.45)
    assert expected_tokens(TABLES, 2, 9.0) == pytest.approx(1.3)
    assert expected_tokens(None, 9, 0.0) == 2.0


@pytest.fixture
def toy(monkeypatch):
    """A model beside which heads are large."""
    model = toy_model()
    monkeypatch.setattr(module, "head_numbers", lambda *_: model.weight_bytes())
    return model


@pytest.fixture
def large(monkeypatch):
    """A model beside which heads are small."""
    model = toy_model()
    monkeypatch.setattr(module, "head_numbers", lambda *_: 0.1 * model.weight_bytes())
    return model


@pytest.mark.parametrize("heads", [None, Heads()])
@pytest.mark.parametrize("lookup", [False, True])
def test_at_most_five_plans(large, heads, lookup):
    plans = draft_plans(large, heads, lookup, 1, 0.0)
    assert plans[0] == PLAIN and len(set(plans)) == len(plans) <= 5
    assert any(plan.head_nodes for plan in plans) == bool(heads)
    assert any(plan.lookup_tokens for plan in plans) == lookup
    if heads:
        assert plans[1].head_nodes and not plans[1].lookup_tokens


@pytest.mark.parametrize("model, batch, temperature", [("large", 32, 1.0), ("toy", 1, 0.0)])
def test_heads_that_are_not_worth_their_reading_are_left_out(request, model, batch, temperature):
    """Bug: heads that read in every step and never draft, in large sampled batches or beside a small model on a CPU."""
    model = request.getfixturevalue(model)
    assert all(plan.head_nodes == 0 for plan in draft_plans(model, Heads(), True, batch, temperature))


@pytest.mark.parametrize("vocabulary, low, high", [(0, 0.06, 0.08), (8192, 0.01, 0.02)])
def test_a_head_costs_what_it_reads_on_a_gpu(vocabulary, low, high):
    """Bug: heads of an 8B model, 7% of a step each, that are left out as if each took a fifth."""
    base = GPTConfig(vocab_size=128_256, n_layer=32, n_embd=4096, n_head=32)
    with torch.device("meta"):
        head = Head(CloverConfig(), base).bfloat16()
    model = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, config=base, group=None,
                            weight_bytes=lambda: 16e9)
    heads = SimpleNamespace(config=CloverConfig(vocabulary=vocabulary), info=dict(acceptance=TABLES),
                            draft_head=lambda i: head)
    costs = module.guessed_costs(model, heads)
    assert low < costs[1] < high
    if vocabulary:  # that of the steps that an H100 took
        rows = [json.loads(line) for line in RECORD.read_text().splitlines()]
        rows = [row for row in rows if row["part"] == "steps" and row.get("prefix") == 256][:10]  # the greedy ones
        for row in rows:
            guess = module.guessed_cost(costs, heads, DraftPlan(row["tree_size"] - 1), row["batch_size"])
            assert guess == pytest.approx(row["step_ms"] / rows[0]["step_ms"], rel=0.15), row
    for batch in (1, 8, 32):
        plans = draft_plans(model, heads, True, batch, 0.0, worth=0)
        assert plans[1].head_nodes and {plan.tree_size for plan in plans} <= {1, 2, 4, 8, 16, 32, 64}
    assert any(plan.head_nodes for plan in draft_plans(model, heads, True, 1, 0.0))


@pytest.mark.parametrize("device, slots", [("cpu", 1), ("cuda", 4)])
def test_idle_slots_are_priced_where_they_run(toy, device, slots):
    """Bug: large trees for the last sequences of a batch, on a GPU, where a step costs what all slots cost."""
    policy = AdaptivePolicy(SimpleNamespace(device=torch.device(device), dtype=torch.bfloat16, config=toy.config,
                                            group=None, weight_bytes=toy.weight_bytes), None, True, 4, 0.0)
    policy.update(policy.select(), [(Sequence(0, [1, 2], 9, 10**6, (), None), [3], [0])])
    assert policy.batch == slots


@pytest.mark.parametrize("tokens", [3, 20, 97])
def test_a_text_finds_what_lookups_kernel_copies(tokens):
    """Catches another source than the kernel's, and a match of another length."""
    generator = random.Random(tokens)
    text = [generator.randrange(tokens) for _ in range(5)]
    found = Text(text)
    for _ in range(60):
        history = torch.tensor([text], dtype=torch.int32)
        chain = ngram_lookup_reference(history, torch.tensor([len(text) - 1], dtype=torch.int32), 5)[0].tolist()
        step = [generator.randrange(tokens) for _ in range(generator.randrange(1, 5))]
        if generator.random() < 0.5:
            step = [token for token in chain if token >= 0][:len(step)] or step
        copied = chain[:len(step)]
        wanted = next((i for i, (a, b) in enumerate(zip(step, copied)) if a != b), len(step))
        match, right, wrong = found.add(step)
        assert match == 0 or (right, wrong) == (wanted, int(wanted < len(step)))
        assert (match > 0) == (chain[0] >= 0)
        text += step


# ---------------------------------------------------------------------------------------------------------------------
# What is selected in the long run

def duration(plan, step):
    return 5e-3 * (1 + 0.06 * plan.tree_size + 0.3 * (plan.head_nodes > 0))


def drive(policies, repeats, heads_right=0, seconds=duration, steps=400):
    """The plans of these many steps, which all policies select. Lookup finds all tokens of a text that repeats itself,
    and so many of the heads' guesses are right. All but the first policy have a clock of their own."""
    text = itertools.cycle((1, 2, 3)) if repeats else itertools.count()
    sequence = Sequence(0, list(itertools.islice(text, 10)), 10**5, 10**6, (), None)
    used = []
    for step in range(steps):
        plan, *others = [policy.select() for policy in policies]
        right = max(plan.lookup_tokens * repeats, heads_right * (plan.head_nodes > 0))
        new = sequence.take(list(itertools.islice(text, right + 1)))
        for policy in policies:
            took = seconds(plan, step) if policy is policies[0] else 7.0
            policy.update(plan, [(sequence, new, list(range(right + 1)))], took)
        assert all(other == plan for other in others)
        used.append(plan)
    return used


@pytest.mark.parametrize("repeats, heads_right, chain, heads", [
    (False, 0, False, False), (True, 0, True, False), (False, 2, False, True), (True, 2, True, False)])
@pytest.mark.parametrize("busy", [1, 3])
def test_the_plan_of_most_tokens_per_second_is_selected(large, repeats, heads_right, chain, heads, busy):
    """Catches plans that are tried too often, hopes that are not given up, a plan that is never found, and one that is
    blamed for other work, which comes and goes and slows down all plans."""
    seconds = lambda plan, step: duration(plan, step) * (busy if step // 20 % 2 else 1)
    used = drive([AdaptivePolicy(large, Heads(), True, 1, 0.0)], repeats, heads_right, seconds)
    found = [(plan.lookup_tokens > 0, plan.head_nodes > 0) for plan in used]
    assert found.count((chain, heads)) > 0.85 * len(found), Counter(used)


def test_a_plan_that_became_quicker_is_found_again(toy):
    policy = AdaptivePolicy(toy, None, True, 1, 0.0)
    policy.log_ratio |= {plan: 1.7 for plan in policy.plans if plan.lookup_tokens}
    used = drive([policy], True)
    assert set(used[:60]) == {PLAIN} and PLAIN not in used[100:]


def test_ranks_select_alike_though_their_clocks_differ(large):
    said = []
    ranks = [SimpleNamespace(size=2, broadcast=lambda value: said.append(value) or value),
             SimpleNamespace(size=2, broadcast=lambda value: said.pop(0))]
    policies = [AdaptivePolicy(large, Heads(), True, 1, 0.0) for _ in ranks]
    for policy, group in zip(policies, ranks):
        policy.group = group
    assert len(set(drive(policies, False, steps=200))) > 1


@pytest.mark.parametrize("quicker, want", [(1.0, 1), (1.1, 1), (1.3, 2), (0.02, 1)])
def test_more_threads_are_used_where_they_are_quicker_by_15_percent(monkeypatch, quicker, want):
    """Catches the quickest steps counting, where threads that wait for one another have a few quick ones."""
    threads = [2]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: threads.__setitem__(0, n))
    monkeypatch.setattr(module, "step_seconds", lambda decoder: 0.01 / (quicker if threads[0] == 2 else 1))
    choose_threads(prepare(toy_model(), [[1]], 4, tree_size=1).decoder)
    assert threads == [want]


ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.filterwarnings("error:.*CUDA Graph is empty")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
@pytest.mark.parametrize("plan", [DraftPlan(), DraftPlan(8), DraftPlan(0, 8), DraftPlan(4, 4)], ids=str)
def test_stages_and_steps_are_timed(plan, device):
    """Catches a stage that cannot be captured alone, a graph of nothing, steps that run out of the cache."""
    model = toy_model().to(device)
    heads = random_heads(model).to(device)
    decoder = timing_decoder(model, heads, plan, batch_size=2, sampling=Sampling(0.5, top_k=3))
    times = stage_times(decoder)
    assert list(times) == ["draft", "verify", "sample", "accept", "commit"]
    assert (times.pop("draft") > 0) == (plan.tree_size > 1) and min(times.values()) > 0
    assert step_time(decoder) > 0 and decoder.slots.cache.lengths.tolist() == [255, 255]
