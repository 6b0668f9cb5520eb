"""tools/policy.py: what each step drafts, and on how many threads, by what steps take and find."""

import itertools
import math
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from conftest import random_prompts, toy_model
from generate import DraftPlan, Engine, FixedPolicy, Sampling, generate
from test_clover import random_heads
from tools import policy as module
from tools.policy import AdaptivePolicy, StepTimes, right_tokens, would_find

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


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    """Numbers of threads that do not change those of this process."""
    monkeypatch.setattr(module.torch, "set_num_threads", lambda n: None)


def adaptive(expected=EXPECTED, cost=lambda plan, batch: SECONDS[plan], gains={1: 0.0}, may_drop_heads=False):
    policy = AdaptivePolicy(StepTimes(cost, expected, gains), dict(expected))
    policy.start(may_drop_heads)
    return policy


def spend(policy, rng, chances, steps, batch, slower=lambda threads: 1.0):
    """(tokens, seconds) of this many steps, of which each takes a tenth more or less."""
    total, taken = 0, 0.0
    for _ in range(steps):
        plan = policy.select()
        seconds = SECONDS[plan] * slower(getattr(policy, "threads", 1)) * math.exp(rng.gauss(0, 0.1))
        found = [emitted(rng, plan, chances) for _ in range(batch)]
        policy.update(plan, found, seconds)
        total, taken = total + sum(len(tokens) for tokens, _, _ in found), taken + seconds
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
    assert speed(adaptive(), [text], batch) >= 0.97 * max(singles)


@pytest.mark.parametrize("texts", [("nothing pays", "it repeats"), ("it repeats", "nothing pays"),
                                   ("heads pay", "it repeats", "nothing pays", "both pay")], ids=" then ".join)
def test_a_policy_follows_the_text(texts):
    """Catches a plan selected once and for all: it is quicker than any single plan."""
    singles = [speed(FixedPolicy(plan), texts, 1, 500) for plan in SECONDS]
    assert speed(adaptive(), texts, 1, 500) >= max(singles)


def test_wrong_expectations_are_given_up():
    """Catches a table of another text that is believed for ever, in either direction."""
    for wrong in ({LARGE: 9.0, SMALL: 8.0}, {plan: 1.0 for plan in EXPECTED}):
        for text in TEXTS:
            best = max(speed(FixedPolicy(plan), [text], 1) for plan in SECONDS)
            assert speed(adaptive(EXPECTED | wrong), [text], 1) >= 0.93 * best


def test_trials_cost_what_they_may():
    """Catches trials that are free of charge: where all else is worse by far they lose at most their share."""
    policy, taken = adaptive(dict.fromkeys(SECONDS, 1.0)), Counter()
    for _ in range(5000):
        plan = policy.select()
        policy.update(plan, [([0], [0], [-1] * plan.lookup_tokens if plan == BOTH else None)], SECONDS[plan])
        taken[plan] += 1
    spent = sum(count * SECONDS[plan] for plan, count in taken.items())
    assert 1 - 5000 / spent <= 1.1 * module.TRIALS
    assert set(taken) == {*SECONDS}


def test_a_policy_without_a_running_text_learns_nothing():
    """Catches a mean of no numbers: a step in flight when the last text ended."""
    policy = adaptive()
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
    made.policy = FixedPolicy(PLAIN)
    made.policy.select = select
    made.generate(random_prompts([60, 30, 5]), 60)
    assert known > 500 and unknown > 20


# ---------------------------------------------------------------------------------------------------------------------
# What steps take

def test_wrong_guesses_of_times_are_given_up():
    """Catches a guess of costs that is believed for ever, or that hides the best plan."""
    for power in (0, 2):
        for text in TEXTS:
            best = max(speed(FixedPolicy(plan), [text], 1) for plan in SECONDS)
            policy = adaptive(cost=lambda plan, batch: SECONDS[plan] ** power)
            assert speed(policy, [text], 1) >= 0.93 * best, (power, text)


def test_times_are_ratios():
    """Catches a plan that is taken for slow since other work ran just then."""
    policy, rng = adaptive(), random.Random(0)
    for slower in (1.0, 5.0, 1.0, 0.2, 1.0):
        spend(policy, rng, TEXTS["both pay"], 200, 1, lambda threads: slower)
        timed = [plan for plan in SECONDS if policy.times.plans[plan].variance < module.UNKNOWN / 2]
        ratios = {plan: policy.time(plan) / policy.time(BOTH) for plan in timed}
        assert len(timed) > 2 and ratios == pytest.approx({plan: SECONDS[plan] / 2.1 for plan in timed}, rel=0.4)
        assert policy.time(BOTH) == pytest.approx(2.1 * slower, rel=0.3)


@pytest.mark.parametrize("seconds", [None, 0.0, -1.0, math.inf, math.nan], ids=str)
def test_a_clock_that_tells_nothing_changes_nothing(seconds):
    """Catches a division by a step that took no time."""
    policy = adaptive()
    for _ in range(20):
        policy.update(policy.select(), [([0], [0], None)], seconds)
    assert {x.mean for x in policy.times.plans.values()} == {0.0} and policy.times.speeds[1].mean == 0
    assert math.isfinite(policy.allowance)


def test_an_outlier_counts_little():
    """Catches a pause of the whole machine that settles what a plan takes."""
    policy = adaptive()
    spend(policy, random.Random(0), TEXTS["both pay"], 500, 1)
    ratios = lambda: {plan: policy.time(plan) / policy.time(PLAIN) for plan in SECONDS}
    before = ratios()
    policy.update(policy.select(), [([0], [0], [-1] * 16)], 1000.0)
    assert ratios() == pytest.approx(before, rel=0.15)


def test_the_first_step_tells_of_all_numbers_of_threads():
    """Catches a unit that is taken for a second."""
    policy = adaptive(gains={1: 0.0, 2: 0.5})
    policy.update(policy.select(), [([0], [0], [-1] * 16)], 0.001)
    assert policy.time(PLAIN, 1) / policy.time(PLAIN, 2) == pytest.approx(math.exp(0.5))


GAINS = {1: 0.0, 2: 0.55, 4: 1.1}


@pytest.mark.parametrize("gains", [GAINS, dict.fromkeys(GAINS, 0.0)], ids=["large model", "small model"])
def test_threads_are_as_many_as_are_quickest(gains):
    """Catches threads that wait for one that does not run, and ones that stay away when the others have gone."""
    quiet = lambda threads: math.exp(-gains[threads])
    busy = lambda threads: 1.5 * threads ** 2
    policy, rng = adaptive(gains=GAINS), random.Random(0)
    best = 4 if gains is GAINS else 1
    for slower, fewest in ((quiet, best), (busy, 1), (quiet, best), (busy, 1)):
        spend(policy, rng, TEXTS["both pay"], 100, 1, slower)  # until it is known
        _, taken = spend(policy, rng, TEXTS["nothing pays"], 300, 1, slower)
        assert policy.best_threads == fewest or slower is quiet and best == 1  # some are as good
        _, alone = spend(FixedPolicy(PLAIN), rng, TEXTS["nothing pays"], 300, 1, lambda _: slower(fewest))
        assert taken < 1.25 * alone


def test_few_threads_are_taken_where_more_bring_little():
    """Catches all cores for a gain that any other process takes away."""
    for share, most in ((0.95, 1), (0.7, 2)):
        policy, taken = adaptive(gains={1: 0.0, 2: 0.0}), Counter()

        def slower(threads):
            taken[threads] += 1
            return share if threads == 2 else 1.0
        spend(policy, random.Random(0), TEXTS["both pay"], 500, 1, slower)
        assert taken[most] > 400


def test_ranks_select_the_same():
    """Catches ranks that learn from clocks of their own, and wait for one another for ever."""
    told = []

    class Pair:
        size = 2

        def __init__(self, rank):
            self.rank = rank

        def broadcast(self, value):
            if self.rank == 0:
                told.append(value)
            return told[-1]
    times = lambda: StepTimes(lambda plan, batch: SECONDS[plan], EXPECTED, {1: 0.0})
    ranks = [AdaptivePolicy(times(), dict(EXPECTED), Pair(rank)) for rank in (0, 1)]
    rng, clocks = random.Random(0), [random.Random(rank) for rank in (0, 1)]
    for _ in range(500):
        plans = [policy.select() for policy in ranks]
        assert plans[0] == plans[1]
        found = [emitted(rng, plans[0], TEXTS["both pay"])]
        for policy, clock in zip(ranks, clocks):
            policy.update(plans[0], found, SECONDS[plans[0]] ** 2 * math.exp(clock.gauss(0, 0.3)))
    assert ranks[1].times.seconds(BOTH, 1, 1) > 3


# ---------------------------------------------------------------------------------------------------------------------
# Heads that do not pay

def test_heads_are_dropped_where_they_do_not_pay():
    """Catches heads that read to no end, ones that are dropped too soon, and ones that a chat cannot have back."""
    policy, rng = adaptive(may_drop_heads=True), random.Random(0)
    spend(policy, rng, TEXTS["heads pay"], 1000, 1)
    assert not policy.drops_heads
    spend(policy, rng, TEXTS["it repeats"], 1000, 1)
    assert policy.drops_heads and not policy.select().head_nodes
    policy.start(may_drop_heads=False)
    spend(policy, rng, TEXTS["it repeats"], 1000, 1)
    assert not policy.drops_heads


@pytest.mark.parametrize("ahead", [0, 1])
def test_texts_are_the_same_when_heads_are_dropped_on_the_way(ahead, monkeypatch):
    """Catches a plan of the heads after they are gone, and ones that do not come back for the next call."""
    model = toy_model()
    heads = random_heads(model)
    prompts = random_prompts([5, 9, 2, 14, 30, 1])
    want = generate(model, prompts, 40, tree_size=1).tokens
    monkeypatch.setattr(module, "USELESS", 20)
    policy = adaptive({PLAIN: 1.0, SMALL: 1.0, CHAIN: 1.0, DraftPlan(2, 4): 1.0}, lambda plan, batch: plan.tree_size)
    engine = Engine(model, heads, batch_size=2, capacity=200, policy=policy)
    engine.decoder.steps_ahead = ahead
    for _ in range(2):
        assert engine.generate(prompts, 40).tokens == want
        assert engine.decoder.heads is None
        assert engine.heads is heads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_policy_that_picks_at_random_changes_no_text(dtype):
    """Catches a text that depends on the plan, or in bfloat16 on the number of threads."""
    model = toy_model().to(dtype)
    heads = random_heads(model).to(dtype)
    prompts = random_prompts([5, 9, 2, 14, 30, 1])
    policy, rng, usual = FixedPolicy(PLAIN), random.Random(0), torch.get_num_threads()
    policy.plans = tuple(SECONDS)

    def select():
        torch.set_num_threads(rng.choice((1, usual)) if dtype == torch.bfloat16 else usual)
        return rng.choice(policy.plans)
    policy.select = select
    for sampling in (Sampling(), Sampling(0.8, top_p=0.9)):
        engine = Engine(model, heads, batch_size=3, capacity=200, policy=policy, sampling=sampling)
        want = generate(model, prompts, 40, tree_size=1, temperature=sampling.temperature, top_p=sampling.top_p)
        assert engine.generate(prompts, 40).tokens == want.tokens
