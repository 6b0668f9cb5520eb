"""tools/tune.py: the tree of most tokens per second, from measured times and what heads were seen to find."""

import itertools
import json
import math
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import generate as module
from clover import CloverHeads
from conftest import random_prompts, toy_model
from generate import DEFAULT_TREE, Decoder, DraftPlan, Engine, FixedPolicy, Sampling, generate
from hf.tokenizer import load_encoding
from model import GPT, InputError
from test_clover import random_heads
from tools import tune
from tools.cli import DEMO
from tools.tune import (
    AdaptivePolicy,
    acceptance,
    expected_tokens,
    fit,
    right_tokens,
    seconds,
    stage_times,
    step_time,
    times_file,
    timing_decoder,
    would_find,
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


def timed(monkeypatch, times):
    """Step times are times(plan) -> the list of plans that were timed."""
    measured = []

    def measure(decoder):
        plan, = decoder.plans
        measured.append(plan)
        return times(plan)
    monkeypatch.setattr(tune, "step_time", measure)
    return measured


@pytest.mark.parametrize("times, want", [(lambda T: 1.0, (2, 4)), (lambda T: T, (2,)),
                                         (lambda T: 1 + 0.5 * (T > 2), (2,)), (lambda T: 1 + T / 10, (2, 3)),
                                         (lambda T: 1 + T / 100, (2, 4))],
                         ids=["free", "linear", "step", "slope", "flat"])
def test_the_trees_that_find_most_per_second_are_chosen_from(toy, monkeypatch, times, want):
    """Catches a search that stops too soon, and a policy without plain decoding."""
    measured = timed(monkeypatch, lambda plan: times(plan.tree_size))
    heads = heads_with_table(toy)
    found = fit(toy, heads, False, 1, 100, Sampling())
    assert [plan.tree_size for plan in found.plans] == [1, *want]
    assert all(found.seconds[v] == times(v.tree_size)
               and found.expected[v] == expected_tokens({"0": TABLE}, v.tree_size, 0)
               for v in found.plans)
    first = len(measured)
    assert fit(toy, heads, False, 1, 100, Sampling()).seconds == found.seconds and len(measured) == first  # known now
    fit(toy, heads, False, 1, 100, Sampling(), fresh=True)
    fit(toy, heads, False, 2, 100, Sampling())
    fit(toy, heads, False, 1, 100, Sampling(), beams=1)
    assert len(measured) == 4 * first  # another batch size or number of beams is another measurement


def test_drafters_that_are_there_are_chosen_from(toy, monkeypatch):
    """Catches a chain where lookup was not asked for, none where it was, and a tree of more than 64 nodes."""
    timed(monkeypatch, lambda plan: 1.0 + 0.001 * plan.tree_size)
    heads = heads_with_table(toy)
    chains = tuple(DraftPlan(0, n) for n in tune.CHAINS)
    assert fit(toy, None, False, 1, 100, Sampling()).plans == (DraftPlan(),)
    assert fit(toy, None, True, 1, 100, Sampling()).plans == (DraftPlan(), *chains)
    found = fit(toy, heads, True, 1, 100, Sampling()).plans
    trees = DraftPlan(), DraftPlan(1), DraftPlan(3)
    assert found == (*trees, *chains, DraftPlan(1, 4), DraftPlan(3, 10), DraftPlan(3, 20))
    heads.info = dict(acceptance={"0": [[1 / 64] * 63] * 4})
    found = fit(toy, heads, True, 2, 100, Sampling()).plans
    assert found[2] == DraftPlan(63) and max(plan.tree_size for plan in found) == 64
    assert len(set(found)) == 9


def test_a_time_that_other_work_spoilt_is_seen(toy, monkeypatch):
    """Catches a step that is taken for slower than one that does more: what else ran just then is no property of it."""
    slow = DraftPlan(0, 10)
    timed(monkeypatch, lambda plan: 50.0 if plan == slow else 1.0 + plan.tree_size / 100)
    found = fit(toy, None, True, 1, 100, Sampling())
    assert found.seconds[slow] == found.seconds[DraftPlan(0, 20)] == 1.21 and found.seconds[DraftPlan(0, 4)] == 1.05


def test_the_file_of_times_serves_the_next_process(toy, monkeypatch):
    """Catches a library call that writes a file, and a command line that measures every time."""
    heads, measured = heads_with_table(toy), timed(monkeypatch, lambda plan: 1.0)
    generate(toy, random_prompts([5]), 20, heads, lookup=True)
    assert measured and not times_file().parent.exists()
    tune.MEASURED.clear()
    found = fit(toy, heads, True, 1, 100, Sampling(), file=times_file())
    tune.MEASURED.clear()
    measured.clear()
    assert fit(toy, heads, True, 1, 100, Sampling(), file=times_file()).seconds == found.seconds and not measured


def test_a_broken_file_of_times_is_measured_again(toy, monkeypatch):
    """Catches a crash over a file that another version wrote, and times that cannot be kept."""
    heads, file, want = heads_with_table(toy), times_file(), (DraftPlan(), DraftPlan(1), DraftPlan(3))
    measured = timed(monkeypatch, lambda plan: 1.0)
    file.parent.mkdir(parents=True)
    key = tune.cache_key(toy, heads, 1, 100, Sampling(), None, True)
    broken = 3, {"1+0": "x"}, {"1+0": 0}, {"1+0": -1}, {"1": 1.0}, {"1+0+2": 1.0}
    for content in ("", "[]", "{", '{"a": 3}', *(json.dumps({key: value}) for value in broken)):
        file.write_text(content)
        tune.MEASURED.clear()
        measured.clear()
        assert fit(toy, heads, False, 1, 100, Sampling(), file=file).plans == want and DraftPlan(1) in measured
        assert len(json.loads(file.read_text())) >= 1
    file.unlink()
    file.mkdir()
    assert fit(toy, heads, False, 1, 100, Sampling(), file=file, fresh=True).plans == want


def test_heads_without_a_table_get_a_small_tree(toy, monkeypatch):
    heads = random_heads(toy)
    timed(monkeypatch, lambda plan: 1.0)
    out = generate(toy, random_prompts([5]), 20, heads)
    assert out.tree_size == DEFAULT_TREE and list(out.plans) == [DraftPlan(DEFAULT_TREE - 1)]
    assert fit(toy, heads, True, 1, 100, Sampling()).plans[:2] == (DraftPlan(), DraftPlan(DEFAULT_TREE - 1))


@pytest.mark.parametrize("error", [InputError("no room"), torch.OutOfMemoryError("no room")], ids=["refused", "failed"])
def test_trees_that_do_not_fit_the_memory_are_not_chosen(toy, monkeypatch, error):
    def times(plan):
        if plan.tree_size > 6:
            raise error
        return 1.0
    timed(monkeypatch, times)
    found = fit(toy, heads_with_table(toy), True, 1, 100, Sampling()).plans
    assert found == (DraftPlan(), DraftPlan(1), DraftPlan(3), DraftPlan(0, 4))


# ---------------------------------------------------------------------------------------------------------------------
# What each step takes

PLAIN, SMALL, LARGE = DraftPlan(), DraftPlan(2), DraftPlan(8)
CHAIN, LONG, BOTH = DraftPlan(0, 4), DraftPlan(0, 16), DraftPlan(8, 16)
SECONDS = {PLAIN: 1.0, SMALL: 1.2, LARGE: 1.5, CHAIN: 1.2, LONG: 1.5, BOTH: 2.1}
EXPECTED = {PLAIN: 1.0, SMALL: 1.6, LARGE: 2.2, CHAIN: 1.65, LONG: 1.67, BOTH: 2.9}
TEXTS = {  # chances that the heads' small tree, their large one, and each token of a chain are right
    "nothing pays": (0.05, 0.08, 0.02), "heads pay": (0.5, 1.2, 0.05), "it repeats": (0.3, 0.5, 0.97),
    "both pay": (0.5, 0.8, 0.7)}


def emitted(rng, plan, chances):
    """What a step finds in a made-up text: (tokens, path, chain) as `AdaptivePolicy.update` takes them."""
    small, large, right = chances
    found = lambda share: int(share) + (rng.random() < share % 1)
    by_small = found(small)
    by_heads = by_small * (plan.head_nodes > 0) + (found(large - small) if plan.head_nodes == LARGE.head_nodes else 0)
    by_lookup = next((i for i in range(plan.lookup_tokens) if rng.random() >= right), plan.lookup_tokens)
    path = [0, 1, 2, 3, 4, 5, 6, 7, 8][:1 + min(by_small, by_heads)] + [4, 5, 6, 7, 8][:max(by_heads - by_small, 0)]
    path += range(plan.head_nodes + 1, plan.head_nodes + 1 + by_lookup - by_heads)
    tokens = list(range(len(path)))
    both = plan.head_nodes and plan.lookup_tokens
    return tokens, path, [*tokens[:by_lookup], *[-2] * (plan.lookup_tokens - by_lookup)] if both else None


def spend(policy, rng, chances, steps, batch):
    """(tokens, seconds) of this many steps."""
    total, taken = 0, 0.0
    for _ in range(steps):
        plan = policy.select()
        found = [emitted(rng, plan, chances) for _ in range(batch)]
        policy.update(plan, found)
        total, taken = total + sum(len(tokens) for tokens, _, _ in found), taken + SECONDS[plan]
    return total, taken


def speed(policy, texts, batch, steps=3000):
    """Tokens per second over some texts, one after the other."""
    rng = random.Random(0)
    totals = [spend(policy, rng, TEXTS[text], steps, batch) for text in texts]
    return sum(tokens for tokens, _ in totals) / sum(taken for _, taken in totals)


@pytest.mark.parametrize("text, batch", [
    *((text, 1) for text in TEXTS), ("both pay", 8),
    *(pytest.param(text, 8, marks=pytest.mark.slow) for text in TEXTS if text != "both pay")])
def test_a_policy_is_as_quick_as_the_best_plan(text, batch):
    """Catches trials that cost more than they may, a plan that is never tried, a mean that forgets too soon."""
    singles = [speed(FixedPolicy(plan), [text], batch) for plan in SECONDS]
    assert speed(AdaptivePolicy(SECONDS, EXPECTED), [text], batch) >= 0.97 * max(singles)


@pytest.mark.parametrize("texts", [("nothing pays", "it repeats"), ("it repeats", "nothing pays"),
                                   ("heads pay", "it repeats", "nothing pays", "both pay")], ids=" then ".join)
def test_a_policy_follows_the_text(texts):
    """Catches a plan selected once and for all: it is quicker than any single plan."""
    singles = [speed(FixedPolicy(plan), texts, 1, 500) for plan in SECONDS]
    assert speed(AdaptivePolicy(SECONDS, EXPECTED), texts, 1, 500) >= 1.02 * max(singles)


def test_wrong_expectations_are_given_up():
    """Catches a table of another text that is believed for ever, in either direction."""
    for wrong in ({LARGE: 9.0, SMALL: 8.0}, {plan: 1.0 for plan in EXPECTED}):
        for text in TEXTS:
            best = max(speed(FixedPolicy(plan), [text], 1) for plan in SECONDS)
            assert speed(AdaptivePolicy(SECONDS, EXPECTED | wrong), [text], 1) >= 0.93 * best


def test_trials_cost_what_they_may():
    """Catches trials that are free of charge: where all else is worse by far they lose at most their share."""
    policy, taken = AdaptivePolicy(SECONDS, dict.fromkeys(SECONDS, 1.0)), Counter()
    for _ in range(5000):
        plan = policy.select()
        policy.update(plan, [([0], [0], [-1] * plan.lookup_tokens if plan == BOTH else None)])
        taken[plan] += 1
    spent = sum(count * SECONDS[plan] for plan, count in taken.items())
    assert 1 - 5000 / spent <= 1.1 * tune.TRIALS
    assert set(taken) == {*SECONDS} - {LONG}  # of which CHAIN tells all: it is never right to its end


def test_a_policy_without_a_running_text_learns_nothing():
    """Catches a mean of no numbers: a step in flight when the last text ended."""
    policy = AdaptivePolicy(SECONDS, EXPECTED)
    policy.update(BOTH, [])
    assert policy.tokens == EXPECTED


@torch.inference_mode()
def test_what_other_plans_would_have_found_is_what_they_find():
    """Catches a node counted for a tree that does not have it, or a chain that is right beyond its first mistake."""
    plans = PLAIN, SMALL, LARGE, CHAIN, LONG, BOTH, DraftPlan(2, 4)
    known, unknown = 0, 0
    model = toy_model(scale=1.5)  # texts of which some repeat and some do not
    heads = random_heads(model)
    made = Engine(model, heads, batch_size=1, capacity=200, policy=SimpleNamespace(plans=plans), beams=3)
    decoder, rng = made.decoder, random.Random(0)

    def tokens_of(plan):
        """(tokens, path, chain) as `Engine.retire` has them; the state stays as it is."""
        tree, chain = decoder.draft(plan)
        positions = decoder.slots.cache.lengths[:, None] + tree.depths
        target = decoder.sample(decoder.verify(tree, positions)[0], positions)
        found = decoder.accept(plan, tree, target, chain).lists()
        count = found.count[0]
        return found.tokens[0][:count], found.path[0][:count], found.chain and found.chain[0]

    def select():
        if made.running and decoder.slots.active[0]:
            nonlocal known, unknown
            found = {plan: tokens_of(plan) for plan in plans}
            for plan, other in itertools.product(plans, plans):
                if other.head_nodes <= plan.head_nodes and (plan.lookup_tokens or not other.lookup_tokens):
                    tokens, path, chain = found[plan]
                    right = right_tokens(tokens, chain) if plan.lookup_tokens else 0
                    told, emitted = would_find(other, plan, path, right, math.inf), len(found[other][0])
                    assert told in (emitted, math.inf), (plan, other, found)
                    known, unknown = known + (told == emitted), unknown + (told == math.inf)
        return rng.choice(plans)
    made.policy = SimpleNamespace(plans=plans, select=select, update=lambda plan, found: None)
    made.generate(random_prompts([60, 30, 5]), 60)
    assert known > 500 and unknown > 20


def test_seconds_takes_the_quickest_call(monkeypatch):
    """Catches a mean, which whatever else runs on the machine would spoil."""
    clock = iter([0.0, 5.0, 5.0, 6.0, 6.0, 9.0])
    monkeypatch.setattr(tune.time, "perf_counter", lambda: next(clock))
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
    monkeypatch.setattr(tune, "capture", lambda stage, device: captured.append(stage) or stage)
    monkeypatch.setattr(tune, "seconds", lambda body, device, group: 1.0)
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
