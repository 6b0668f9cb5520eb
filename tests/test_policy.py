"""engine/policy.py: selects the tree size with the most tokens per second from measured durations and acceptance."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from backends.gpu import GraphDecoder
from bench import size_config
from clover import BINS, SOURCES, CloverConfig, CloverHeads, Head, preset
from conftest import needs_compiler, random_prompts, slow, toy_model
from engine.acceptance import MEMORY
from engine.batching import MeasuredStep
from engine.policy import Policy
from engine.times import StepTimes, guessed_costs, linear_weights
from generate import FILTERED, GREEDY, Decoder, Plan, Sampling, StepResult
from test_clover import random_heads
from test_generate import cpu, either_decoder, load, new_engine

RESULTS = Path(__file__).parents[1] / "bench" / "results"
MIXED = [Sampling(0.9, seed=3), Sampling(), Sampling(0.7, top_k=20)]


def test_chances_become_what_was_seen_and_forget(toy):
    """Bug: chances that rise along the bins, NaN for a bin without proposals, a table that never forgets."""
    policy, counts = Policy(toy, random_heads(toy), True), torch.zeros(2, SOURCES, 2)
    for rates in torch.rand(2, 2, SOURCES).sort(2, descending=True).values:
        for _ in range(100):
            proposed = torch.randint(0, 12, (2, SOURCES)).float()
            counts += torch.stack((torch.binomial(proposed, rates), proposed), 2)
            policy.acceptance.learn(counts.clone())
            chances = policy.chances
            assert (chances[:, 1:BINS] <= chances[:, :BINS - 1]).all() and ((chances >= 0) & (chances <= 1)).all()
        assert (chances - rates).abs().mean() < 0.04
        for part, memory in zip(policy.acceptance.known[..., 1].split((BINS, SOURCES - BINS), 1), MEMORY):
            assert memory - 1 < part.max() < memory + 1


def test_chances_begin_with_those_of_the_heads_training(toy):
    """Bug: the counts in heads.json ignored, or those of greedy and of sampled text swapped."""
    heads = random_heads(toy)
    heads.info["acceptance"] = dict(greedy=[[12, 16]] * BINS, sampled=[[0, 10**6]] * BINS)
    chances = Policy(toy, heads).chances
    assert chances[0, 0] == pytest.approx((12 + 4 * 0.8825) / 20, rel=1e-3) and chances[1, :BINS].max() < 1e-5


def test_step_times_follow_what_steps_take():
    """Bug: an error or other load attributed to the wrong rows or heads, a size that ignores its neighbours."""
    times = StepTimes(0.15, 0, 0.05)
    seconds = lambda rows, depths: 5e-3 * (1 + 0.3 * (rows - 1) + 0.1 * depths)
    for _ in range(300):
        for T, depths in (1, 0), (2, 0), (2, 1), (8, 4), (8, 0):
            times.learn(1, T, depths, seconds(T, depths))
    for T, depths in (1, 0), (2, 0), (2, 1), (8, 4), (8, 0):
        assert times.seconds(1, T, depths) == pytest.approx(seconds(T, depths), rel=0.02)
    assert times.seconds(1, 12, 0) == pytest.approx(seconds(12, 0), rel=0.2)
    assert times.seconds(4, 2, 0) == times.seconds(1, 8, 0) and times.correction(2, 1) == times.correction(1, 1)
    for _ in range(40):  # other work
        for T, depths in (1, 0), (8, 4):
            times.learn(1, T, depths, 2 * seconds(T, depths))
    for T, depths in (1, 0), (2, 0), (2, 1), (8, 4):
        assert times.seconds(1, T, depths) == pytest.approx(2 * seconds(T, depths), rel=0.05)


@pytest.mark.parametrize("record, size, weights, rel", [
    ("gpu-h100", "8b", 16e9, 0.15), ("gpu-h200", "8b", 16e9, 0.3), ("gpu-h200", "1.2b", 2.5e9, 0.3),
    ("gpu-h200", "135m", 0.27e9, 0.3)])
def test_costs_on_a_gpu_are_guessed_as_they_were_measured(record, size, weights, rel):
    """Bug: heads of an 8B model, or large trees of a small one, that are never used as they are thought too costly."""
    base = size_config(size)
    with torch.device("meta"):
        head = Head(CloverConfig(), base).bfloat16()
    model = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, config=base,
                            parameters=tuple, tables=(), modules=lambda: [
                                SimpleNamespace(in_features=1, out_features=weights / 2, nbytes=weights)])
    heads = SimpleNamespace(cost=(8192 * base.n_embd + linear_weights(head), 1))
    times = StepTimes(*guessed_costs(model, heads))
    rows = [json.loads(line) for line in (RESULTS / f"{record}.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["part"] == "steps" and row.get("model") == size and row["prefix"] == 256
            and row["temperature"] == 0]
    for row in rows:
        guess = times.seconds(row["batch_size"], row["tree_size"], min(4, row["tree_size"] - 1))
        assert guess == pytest.approx(row["step_ms"] / rows[0]["step_ms"], rel=rel), row


@needs_compiler
@pytest.mark.parametrize("name, lookup", [(None, True), ("clover", False), ("clover2", True)])
def test_a_compiled_step_has_the_size_of_most_tokens_per_second(name, lookup):
    """Bug: a sum over the wrong sequences, another number of heads, a tree that is not the front of the largest."""
    model, heads = load(name, True)
    engine = new_engine(model, heads, tree_size=None, lookup=lookup, batch_size=4, capacity=100)
    for prompt, sampling in zip(random_prompts([3, 5, 4], vocab_size=9), MIXED):
        engine.add(prompt * 5, 50, sampling)
    engine.step()
    decoder, policy, sizes = engine.decoder, engine.policy, Counter()
    for depths in [0, *range(1, 1 + policy.depth)] * 15:
        policy.chances.copy_(torch.rand(2, SOURCES).sort(descending=True).values ** 0.1)
        policy.step_seconds[1:] = 1 + (torch.rand(()) * torch.rand(16)).cumsum(0)
        tree = [column.clone() for column in decoder.draft(Plan(3, None, depths, FILTERED)).tree]
        expected, _ = policy.drafted.tolist()
        full = decoder.draft(Plan(3, 16, depths, FILTERED)).tree
        tokens = full[-1].double().sum(0).cumsum(0)  # of the first T nodes
        T = 1 + (tokens / policy.step_seconds[1:]).argmax().item()
        assert tree[0].shape == (3, T) and all(torch.equal(x, y[:, :T]) for x, y in zip(tree, full))
        assert expected == pytest.approx(tokens[T - 1].item()) and depths <= full[2].max() <= max(depths, 15)
        sizes[T] += 1
    assert len(sizes) > 2


@needs_compiler
def test_steps_that_read_a_prompt_are_not_timed():
    """Bug: heads that seem to cost as much as their reading of a prompt."""
    engine, seconds = new_engine(*load("clover", True), tree_size=5, capacity=100), []
    engine.policy.times.learn = lambda *step: seconds.append(step)
    steps = 0
    for index, prompt in enumerate(random_prompts([30, 40]), start=1):
        steps += engine.generate([prompt], 20).steps
        assert len(seconds) == steps - index


class Timed(Policy):
    """Gets durations that follow these costs of a further row and of a head, on a machine whose other load comes and
    goes. guess: of a head, at first. used: (T, depths of the heads) of each step."""

    def __init__(self, model, heads, lookup, costs, guess=None):
        super().__init__(model, heads, lookup)
        self.times = StepTimes(costs[0], 0, guess or costs[1])
        self.costs, self.used = costs, []

    def seconds_of(self, T, depths):
        return 1 + self.costs[0] * (T - 1) + self.costs[1] * (depths and 1 + depths)

    def learn(self, step, results):
        busy = 2 if len(self.used) // 20 % 2 else 1
        self.used.append((step.tree_size, step.plan.depths))
        step.seconds = busy * self.seconds_of(*self.used[-1])
        super().learn(step, results)


def repeating_model():
    """A model whose greedy output counts upwards modulo 7."""
    model = toy_model(positions="learned", n_layer=1, tied=False)
    for name, p in model.named_parameters():
        if name.startswith("blocks") or "position" in name:
            p.data.zero_()
    model.embed.weight.data[:7] = torch.eye(64)[:7]
    model.head.weight.data.zero_()[:7, :7] = torch.eye(7).roll(-1, dims=1) * 9
    return model


def drive(shift, lookup, costs, compiled, guess=None, steps=600):
    """The policy after those steps on output of period 7, which lookup guesses. Heads are certain of the token `shift`
    after the one they read; None: no heads."""
    model, heads = repeating_model(), None
    if shift:
        heads = CloverHeads(preset("clover2", augment_layers=0, mix="none"), model).requires_grad_(False).eval()
        for head in heads.heads:
            head.project.linear.weight.copy_(torch.cat((torch.zeros(64, 64), torch.eye(64)), 1))
            head.project.linear.weight[:7, 64:71] = torch.eye(7).roll(shift, 0)
    if compiled:
        cpu.apply(model, heads)
    policy = Timed(model, heads, lookup, costs, guess)
    engine = new_engine(model, policy=policy, capacity=250)
    while len(policy.used) < steps:
        engine.generate([[3, 4, 5, 6, 0, 1, 2, 3]], 240)
    return policy


@either_decoder
@pytest.mark.parametrize("shift, lookup, costs, want", [
    (None, True, (0.05, 0), (16, 0)), (1, False, (0.05, 0.05), (5, 4)), (3, False, (0.05, 0.05), (1, 0)),
    (1, False, (1.2, 0.05), (1, 0)), slow(3, True, (0.05, 0.05), (16, 0)), slow(None, True, (1.2, 0), (1, 0))])
def test_the_size_of_most_tokens_per_second_is_selected(shift, lookup, costs, want, compiled):
    """Bug: trials that never end, a best size that is never found or blamed for other load, heads never left out."""
    policy = drive(shift, lookup, costs, compiled)
    used = policy.used[300:]
    tokens = sum(min(T, 16 if lookup else 1 + depths * (shift == 1)) for T, depths in used)
    rate, best = tokens / sum(policy.seconds_of(*step) for step in used), want[0] / policy.seconds_of(*want)
    assert rate > 0.9 * best, Counter(used)
    assert shift != 3 or lookup or 0 < sum(depths > 0 for _, depths in policy.used[100:]) < 60


@needs_compiler
def test_heads_that_seemed_too_expensive_are_found():
    """Bug: an option that is never tried, or whose trial teaches nothing."""
    used = drive(1, False, (0.05, 0.02), True, guess=0.5, steps=1200).used
    assert set(used[:300]) == {(1, 0)} and sum(depths > 0 for _, depths in used) > 400


@needs_compiler
def test_trials_take_at_most_a_hundredth_of_the_time():
    """Bug: trials by the number of steps, without the price of the heads, or of each option in turn."""
    policy = drive(3, False, (0.05, 0.5), True, steps=1500)
    seconds = [policy.seconds_of(*step) for step in policy.used]
    tried = sum(policy.seconds_of(*step) for step in policy.used if step[1])
    assert 0 < tried < 0.015 * sum(seconds), Counter(policy.used)


def test_a_trial_of_heads_includes_the_rows_they_have_not_read(toy):
    """Bug: heads that read a batch's whole outputs for two steps of a trial."""
    policy = Policy(toy, random_heads(toy))
    policy.steps = 10**4
    policy.best, policy.last_use[(1, 0), False] = (1, 0), policy.steps
    policy.begin_trial(1, lambda: 10**6)
    assert not policy.trial and policy.tried == 0
    policy.begin_trial(1, lambda: 0)
    assert len(policy.trial) == 2 and 2 < policy.tried < 10


@pytest.mark.parametrize("tree_size, B, unread, want", [
    (1, 1, [40], 64), (1, 8, [3] + [0] * 7, 1), (1, 8, [90] * 8, 16), (5, 8, [2] + [0] * 7, 5),
    (1, 8, [60] + [0] * 7, 4), (1, 8, [5000] + [0] * 7, 4), (None, 2, [30, 30], 32), (1, 8, [60], 16)])
def test_prompts_are_read_by_the_size_of_most_tokens_per_second(toy, tree_size, B, unread, want, monkeypatch):
    """Bug: a prompt read a token at a time, or in small steps for idle slots (last case); slower neighbours."""
    monkeypatch.setattr(toy, "decoder", GraphDecoder)
    policy = Policy(toy, None, True, tree_size)
    policy.times = StepTimes(0.02, 0, 0)  # a further row takes a fiftieth of a step
    if tree_size is None:
        policy.reading_options = [(T, 0) for T in (1, 8, 32, 64)]
        policy.largest = 64
    assert policy.select(B, unread=unread)[0] == want


def test_ranks_select_alike_though_their_parts_and_clocks_differ(toy, monkeypatch):
    """Bug: ranks that guess costs from unequal parts or learn their own clock's seconds select other trees and hang."""
    said, used, policies = [], [], []
    first = SimpleNamespace(broadcast=lambda value: said.append(value) or value)
    for group, costs in ((first, (0.15, 0, 0)), (SimpleNamespace(broadcast=lambda value: said.pop()), (9, 0, 0))):
        monkeypatch.setattr(toy.head, "group", group, raising=False)
        monkeypatch.setattr("engine.policy.guessed_costs", lambda *_: costs)
        policies.append(Policy(toy, None, True))
    for step in range(300):
        (T, _), other = (policy.select(1) for policy in policies)
        assert other == (T, 0) and T in (1, *Decoder.tree_sizes)
        used.append(T)
        results = [StepResult(None, [], range(min(T, 7)), [], T)]
        for policy, seconds in zip(policies, (1 + 0.01 * T, 1 + 2 * T)):
            step = MeasuredStep(Plan(1, T, 0, GREEDY), None, None, T, times=(), pause=None, counts=None, grammars=0,
                                logprobs=None, seconds=seconds)
            policy.learn(step, results)
    assert len(set(used)) > 1
