"""What each step drafts, and on how many threads of a CPU it runs: `AdaptivePolicy` takes what
brings most tokens per second.

What a plan takes is learnt from the steps themselves, as ratios, since other work on the machine
slows down all plans alike. What it finds is learnt from the text."""

import itertools
import math
import operator
from bisect import bisect_right
from copy import copy, deepcopy

import torch

from backends.tensor_parallel import Group

NOISE = 0.1 ** 2    # variance of a step's log time, all else being equal
DRIFT = 0.05 ** 2   # of the machine's log speed, from step to step
UNKNOWN = 0.3 ** 2  # of a log ratio of times of which there is an estimate alone
AGEING = 3e-5       # what the variance of a plan's ratio gains in a step of another
CHANGED = 0.25      # of the log speed, against its mean: other work has come or gone
FADING = 1 / 64     # share that a mean forgets in a step
FEWER = 1.15        # more threads are taken where they are quicker by this factor
MEMORY = 32     # steps that a running mean of tokens looks back on
FEWEST = 4      # an expectation counts as much as this many sequences of one step
STALE = 8       # steps that showed nothing of a plan, after which it may be tried
TRIALS = 0.01   # share of the time that may be lost by trying others
FIRST = 2       # steps' time that may be lost at the start
# plain decoding is taken where it is this near the best: a batch's texts then end together
MARGIN = 0.06
GOES_ON = 0.8   # expected until more is known: how likely a chain that was right so far goes on
USELESS = 128   # by how many steps of a sequence those without heads are ahead, until heads go
SHARED = 32     # steps after which ranks learn the times of rank 0


class Estimate:
    """A number that is not known exactly: its mean and variance."""

    def __init__(self, mean=0.0, variance=UNKNOWN):
        self.mean = mean
        self.variance = variance


class StepTimes:
    """Log seconds of a step = log cost(plan, batch) + a correction for the plan + the machine's
    speed by this number of threads: a Kalman filter that takes the two for independent.

    cost(plan, batch): an estimate, in any unit. gains: {number of threads: the log of how much
    quicker than one it is expected to be}."""

    def __init__(self, cost, plans, gains):
        self.cost = cost
        self.gains = gains
        self.plans = {plan: Estimate() for plan in plans}
        self.speeds = {n: Estimate(-gain, variance=1e3) for n, gain in gains.items()}
        self.usual = {}  # number of threads -> a running mean of its speed

    def estimates(self):
        """What was learnt."""
        return dict(plans=self.plans, speeds=self.speeds, usual=self.usual)

    def with_estimates(self, estimates):
        """Another one of the same costs, which has learnt this."""
        other = copy(self)
        vars(other).update(deepcopy(estimates))
        return other

    def learnt_gains(self):
        """`gains` as they were found to be."""
        first, *_ = self.speeds.values()
        return {n: first.mean - speed.mean for n, speed in self.speeds.items()}

    def seconds(self, plan, threads, batch):
        log = self.plans[plan].mean + self.speeds[threads].mean
        return self.cost(plan, batch) * math.exp(log)

    def update(self, plan, threads, batch, seconds):
        """Learns from a step."""
        speed, correction = parts = self.speeds[threads], self.plans[plan]
        total = NOISE + speed.variance + correction.variance
        error = math.log(seconds / self.seconds(plan, threads, batch))
        if abs(error) < 3 * math.sqrt(total):
            for part in parts:
                gain = part.variance / total
                part.mean += gain * error
                part.variance *= 1 - gain
        else:  # it counts for nothing; another one like it will, for the machine's speed
            speed.variance += error ** 2
        speed.variance += DRIFT
        for other, estimate in self.plans.items():
            if other != plan:
                estimate.variance = min(estimate.variance + AGEING, UNKNOWN)
        for n, other in self.speeds.items():
            if n != threads:
                other.variance += FADING * (UNKNOWN - other.variance)
        usual = self.usual.get(threads, speed.mean if self.usual else math.inf)
        # the first step tells of all numbers of threads; later, other work may have gone for all
        if speed.mean < usual - CHANGED:
            self.usual = {threads: speed.mean}
            self.speeds |= {n: Estimate(speed.mean + self.gains[threads] - gain)
                            for n, gain in self.gains.items() if n != threads}
        else:
            self.usual[threads] = usual + FADING * (speed.mean - usual)


class AdaptivePolicy:
    """Which plan the next step takes: that of most tokens per second, by `StepTimes` and a running
    mean of the tokens that it finds. A step also tells what the plans that are part of its own
    would have found. Others are tried now and then: trials may lose a share TRIALS of the time.

    expected: {DraftPlan: tokens per step and sequence}, until more is known. group: the ranks that
    decode together, which all have to select the same."""

    def __init__(self, times, expected, group=None):
        self.group = group or Group()
        self.observed = times
        self.times = times if self.group.size == 1 else times.with_estimates(times.estimates())
        self.plans = tuple(expected)
        self.expected = expected
        self.tokens = dict(expected)               # running means
        self.weights = dict.fromkeys(expected, 0)  # how many steps each of them counts as
        self.added = dict.fromkeys(expected, 0)    # the step that was last added to it
        self.shown = dict.fromkeys(expected, 0)    # the last step that showed all that a plan finds
        # by token of lookup's chain: how often it is right, where those before it are
        self.goes_on = [GOES_ON] * max(plan.lookup_tokens for plan in expected)
        self.step = 0
        self.batch = 1     # sequences of the last step
        self.start(may_drop_heads=True)
        self.threads = self.best_threads
        self.allowance = FIRST  # what trials may lose, in steps of the best plan

    def start(self, may_drop_heads):
        """A call begins, in which heads may be dropped or not: those of a chat go on reading."""
        self.may_drop_heads = may_drop_heads
        self.useless = 0   # steps of a sequence in which heads did not pay, less those they did
        self.decide()

    @property
    def drops_heads(self):
        """Whether heads need not read any more in this call, since they do not pay."""
        return self.may_drop_heads and self.useless >= USELESS

    def time(self, plan, threads=None):
        """Seconds of a step."""
        return self.times.seconds(plan, threads or self.best_threads, self.batch)

    def decide(self):
        """Sets the best number of threads and plan, and the plans' rates: tokens of a sequence per
        second."""
        slow = lambda n: self.times.speeds[n].mean + (math.log(FEWER) if n > 1 else 0)
        self.best_threads = min(self.times.speeds, key=slow)
        self.rates = {plan: self.tokens[plan] / self.time(plan) for plan in self.plans
                      if not (plan.head_nodes and self.drops_heads)}
        favour = lambda plan: self.rates[plan] * (1 if plan.tree_size > 1 else 1 + MARGIN)
        self.best = max(self.rates, key=favour)

    def loss(self, plan, time):
        """What a step of this plan, which takes `time`, loses to one of the best, in steps."""
        lost = time / self.time(self.best) - self.tokens[plan] / self.tokens[self.best]
        return max(lost, 1e-9)

    def select(self):
        """The plan of the next step. Sets torch's number of threads, if there is a choice."""
        losses = {}
        urgency = {}
        for trial, never_timed in self.open_questions():
            loss = self.loss(trial[0], self.time(*trial))
            if loss <= MEMORY:
                losses[trial] = loss
                age = self.step - self.shown[trial[0]] + 1
                urgency[trial] = never_timed, age / loss  # others wait until that can be afforded
        trial = max(urgency, key=urgency.get, default=None)
        if trial is None or losses[trial] > self.allowance:
            trial = self.best, self.best_threads
        plan, self.threads = trial
        if len(self.times.speeds) > 1 and torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        return plan

    def open_questions(self):
        """((plan, number of threads), whether it was never timed) of what may be better than the
        best: nothing showed for long what it finds, or well enough what it takes."""
        for plan, rate in self.rates.items():
            variance = self.times.plans[plan].variance
            unsure = math.log(self.rates[self.best] / rate) < 2 * math.sqrt(variance)
            stale = self.step - self.shown[plan] >= STALE
            if plan != self.best and (unsure or stale):
                yield (plan, self.best_threads), unsure and variance > 0.9 * UNKNOWN
        best = self.times.speeds[self.best_threads].mean
        for n, speed in self.times.speeds.items():
            unsure = speed.mean - best < 2 * math.sqrt(speed.variance)
            stale = self.step >= STALE and speed.variance > UNKNOWN / 2
            if n != self.best_threads and unsure and stale:
                yield (self.best, n), speed.variance > 0.9 * UNKNOWN

    def update(self, plan, found, seconds=None):
        """What a step of `plan` found in each sequence: (its tokens, its path, lookup's chain or
        None), as `Engine.retire` has them, and how long it took, if that is known."""
        self.step += 1
        if not found:
            return
        self.batch = len(found)
        self.add_tokens(plan, found)
        self.add_time(plan, seconds)
        if not self.drops_heads:
            self.useless = max(self.useless + self.batch * (-1 if self.best.head_nodes else 1), 0)
        self.decide()

    def add_time(self, plan, seconds):
        """Learns what a step took, and charges what it lost if it was a trial."""
        known = seconds is not None and 0 < seconds < math.inf  # clocks stand still, or go back
        if known:
            self.observed.update(plan, self.threads, self.batch, seconds)
        taken = self.time(plan, self.threads)
        if known and self.group.size == 1:
            taken = max(taken, seconds)
        if (plan, self.threads) != (self.best, self.best_threads):
            self.allowance -= self.loss(plan, taken)
        self.allowance = max(min(self.allowance + TRIALS, MEMORY), -MEMORY)
        if self.group.size > 1 and self.step % SHARED == 0:
            estimates = self.group.broadcast(self.observed.estimates())
            self.times = self.times.with_estimates(estimates)

    def add_tokens(self, plan, found):
        """Learns what all plans that are part of this one would have found."""
        right = [right_tokens(tokens, chain) if plan.lookup_tokens else 0
                 for tokens, _, chain in found]
        for n in right:
            for i in range(min(n + 1, plan.lookup_tokens)):
                self.goes_on[i] += ((i < n) - self.goes_on[i]) / MEMORY
        for other in self.plans:
            looks_up_more = other.lookup_tokens and not plan.lookup_tokens
            if other.head_nodes > plan.head_nodes or looks_up_more:
                continue  # it is not part of this plan
            rest = self.goes_on[plan.lookup_tokens:other.lookup_tokens]
            beyond = sum(itertools.accumulate(rest, operator.mul))
            self.add(other, [would_find(other, plan, path, n, beyond)
                             for (_, path, _), n in zip(found, right)])
            if other.lookup_tokens <= plan.lookup_tokens or max(right) < plan.lookup_tokens:
                self.shown[other] = self.step

    def add(self, plan, tokens):
        """Adds one step's tokens, of each sequence, to a running mean, which weighs less the longer
        nothing was added, but no less than FEWEST sequences do in one step."""
        missed = self.step - self.added[plan] - 1
        faded = min(self.weights[plan], MEMORY) * (1 - 1 / MEMORY) ** missed
        self.weights[plan] = max(faded, FEWEST / len(tokens)) + 1
        self.tokens[plan] += (sum(tokens) / len(tokens) - self.tokens[plan]) / self.weights[plan]
        self.added[plan] = self.step


def right_tokens(tokens, chain):
    """How many tokens of lookup's chain were right, where a step emitted `tokens`. Where lookup
    drafted alone, chain is None: all were but the last."""
    n = len(tokens) - 1
    if chain is None:
        return n
    return next((i for i in range(n) if i == len(chain) or chain[i] != tokens[i]), n)


def would_find(other, plan, path, right, beyond):
    """How many tokens a step of `other` would have emitted where one of `plan`, of which it is
    part, had this path, root first, and this many right tokens of lookup's chain; `beyond` more,
    where these were all that it had.

    A short chain is the front of a longer one, and a small tree of the heads that of a larger one
    with as many beams; with fewer it finds nearly as much."""
    by_heads = bisect_right(path, other.head_nodes) - 1
    by_lookup = min(right, other.lookup_tokens)
    if right == plan.lookup_tokens < other.lookup_tokens:
        by_lookup += beyond
    return 1 + max(by_heads, by_lookup)
