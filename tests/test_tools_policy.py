"""tools/policy.py and timing.py: what each step drafts, on how many threads of a CPU, and how long steps take."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from clover import CloverConfig, Head
from conftest import random_prompts, toy_model
from generate import DraftPlan, FixedPolicy, Sampling, Sequence, generate, prepare
from kernels import ngram_lookup_reference
from model import GPTConfig
from test_clover import random_heads
from tools import policy as module
from tools.policy import AdaptivePolicy, Text, choose_threads, draft_plans, expected_tokens, pick_policy
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
def large(monkeypatch):
    """A model beside which heads are small."""
    model = toy_model()
    monkeypatch.setattr(module, "HEAD_BYTES", 0.1 * model.weight_bytes())
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
    policy = AdaptivePolicy(SimpleNamespace(device=torch.device(device), dtype=torch.bfloat16, config=toy.config, group=None,
                                            weight_bytes=toy.weight_bytes), None, True, 4, 0.0)
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
# A simulated run: texts of which it is known what each drafter would have found

class Simulation:
    """heads: how often the heads' first node is right; repeats: how often the text goes on as it did before, for so
    many tokens; durations(plan, step, running texts): of a step."""

    def __init__(self, durations, heads=0.0, repeats=0.0, batch=1, seed=0):
        self.random = random.Random(seed)
        self.durations = durations
        self.heads = heads
        self.texts = []
        for _ in range(batch):
            text = [self.random.randrange(90) for _ in range(40)]
            while len(text) < 400:
                if self.random.random() < repeats:
                    start = self.random.randrange(len(text) - 30)
                    text += text[start:start + 30]
                else:
                    text.append(self.random.randrange(90))
            self.texts.append(text)

    def run(self, policy, tokens=128):
        """-> tokens per second of these many tokens for each text"""
        sequences = [Sequence(i, text[:40], tokens, 10**6, (), None) for i, text in enumerate(self.texts)]
        chances = random.Random(1)
        seconds = emitted = steps = 0
        while running := [s for s in sequences if not s.ended]:
            plan = policy.select()
            results = []
            for s in running:
                text, at = self.texts[s.index], 40 + len(s.tokens)
                right = int(plan.head_nodes > 0 and chances.random() < self.heads)
                if plan.lookup_tokens:
                    known = Text(text[:at])
                    match, found, _ = known.add(text[at:at + plan.lookup_tokens])
                    right = max(right, found if match else 0)
                new = s.take(text[at:at + right + 1])
                emitted += len(new)
                results.append((s, new, list(range(right + 1))))
            duration = self.durations(plan, steps, len(running)) * self.random.lognormvariate(0, 0.08)
            seconds += duration
            steps += 1
            policy.update(plan, results, duration)
        return emitted / seconds


def duration(plan, step, running=1):
    return 5e-3 * (1 + 0.06 * running * plan.tree_size + 0.3 * (plan.head_nodes > 0))


CASES = {"nothing is right": dict(), "the text repeats itself": dict(repeats=0.05), "good heads": dict(heads=0.9),
         "both": dict(heads=0.8, repeats=0.03)}


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("case", CASES)
def test_nearly_the_best_single_plan_and_never_much_below_plain(large, case, batch):
    """Catches plans that are tried too often, hopes that are not given up, a plan that is never found."""
    simulate = lambda policy: Simulation(duration, batch=batch, **CASES[case]).run(policy)
    policy = AdaptivePolicy(large, Heads(), True, batch, 0.0)
    rates = {plan: simulate(FixedPolicy(plan)) for plan in policy.plans}
    auto = simulate(policy)
    assert auto >= 0.95 * rates[PLAIN]
    assert auto >= 0.93 * max(rates.values())


def test_other_work_that_comes_and_goes_changes_nothing(toy):
    """Catches a policy that takes for a plan's fault what slows down all of them."""
    busy = lambda plan, step, running: duration(plan, step) * (3 if step // 20 % 2 else 1)
    simulate = lambda policy: Simulation(busy, repeats=0.05).run(policy, 300)
    policy = AdaptivePolicy(toy, None, True, 1, 0.0)
    assert simulate(policy) >= 0.85 * max(simulate(FixedPolicy(plan)) for plan in policy.plans)


def test_a_plan_that_became_quicker_is_found_again(toy):
    slow_start = lambda plan, step, running: duration(plan, step) * (4 if plan.lookup_tokens and step < 40 else 1)
    policy = AdaptivePolicy(toy, None, True, 1, 0.0)
    Simulation(slow_start, repeats=0.08).run(policy, 340)
    assert max(policy.last_use[plan] for plan in policy.plans if plan.lookup_tokens) > 64


def test_ranks_select_alike_though_their_clocks_differ(large):
    said = []
    group = [SimpleNamespace(size=2, broadcast=lambda value: said.append(value) or value),
             SimpleNamespace(size=2, broadcast=lambda value: said.pop(0))]
    policies = [AdaptivePolicy(large, Heads(), True, 1, 0.0) for _ in group]
    sequence = Sequence(0, [1, 2, 3] * 9, 1000, 10**6, (), None)
    for policy, ranks in zip(policies, group):
        policy.group = ranks
    for step in range(200):
        plans = [policy.select() for policy in policies]
        assert plans[0] == plans[1]
        new = sequence.take([1 + step % 3])
        for policy, seconds in zip(policies, (duration(plans[0], step), 7.0)):
            policy.update(plans[0], [(sequence, new, [0])], seconds)


@pytest.mark.parametrize("has_heads", [False, True])
def test_auto_gives_the_plain_text(large, has_heads):
    heads = random_heads(large)
    heads.info["acceptance"] = {"0": [[0.9, 0.0], [0.0, 0.8]]}
    prompts = random_prompts([5, 40, 9])
    plain = generate(large, prompts, 40, tree_size=1)
    used = heads if has_heads else None
    auto = generate(large, prompts, 40, used, policy=pick_policy(large, prompts, used, lookup=True))
    assert auto.tokens == plain.tokens and len(auto.plans) > 1
    assert any(plan.head_nodes for plan in auto.plans) == has_heads


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
