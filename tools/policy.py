"""What each step drafts, and on how many threads of a CPU it runs: `AdaptivePolicy` takes what
brings most tokens per second.

`tools.found` tells what a plan should find in the texts as they are. What a step takes is learnt
from the steps themselves, as ratios, since other work on the machine slows down all plans alike."""

import math
from copy import copy, deepcopy

import torch

from backends.tensor_parallel import Group

HOPEFUL = 0.8    # of its time at a guess, a plan is expected to take until it has run
SEEN = 32        # steps, at most, that count as evidence of a ratio
UNUSED = 1 / 8   # of a step, is lost of that evidence in a step that does not use it
FADING = 1 / 512  # share of a ratio's difference from what was expected, lost in a step
PACE = 0.5       # share of an error by which the machine's log speed is corrected
MOST = 0.5       # of the log of a step's time over the expected one, that is believed
CHANGED = 0.3    # of the log speed against its mean: other work has come or gone
USUAL = 1 / 32   # share by which that mean follows
FEWER = 1.15     # more threads are taken where they are quicker by this factor
MARGIN = 0.03    # by which a plan must be better than plain decoding: texts end less evenly
USELESS = 1      # steps' time of a sequence that heads may lose by reading, until they stop
SHARED = 32      # steps after which ranks learn the times of rank 0


class Ratios:
    """{key: the log of a ratio}, `now`, learnt from errors: the first in full, later ones less and
    less. What was expected before counts again as time goes by, so that what was given up for one
    bad step is tried again.

    expected: {key: log}. measured: the keys of which it is more than a guess."""

    def __init__(self, expected, measured):
        self.expected = expected
        self.now = dict(expected)
        self.seen = {key: SEEN * (key in measured) for key in expected}  # steps

    def share(self, key):
        """The share of an error that is the ratio's own."""
        return 1 / (1 + self.seen[key])

    def update(self, key, error):
        self.now[key] += self.share(key) * error
        self.seen[key] = min(self.seen[key] + 1, SEEN)
        for other, expected in self.expected.items():
            self.now[other] += FADING * (expected - self.now[other])
            if other != key:
                self.seen[other] = max(self.seen[other] - UNUSED, 0)

    def forget(self):
        self.now = dict(self.expected)
        self.seen = dict.fromkeys(self.expected, 0)


class StepTimes:
    """Log seconds of a step = log cost(plan, batch, reads) + ratio of the plan + ratio of the
    number of threads + the machine's speed.

    cost: a `tools.tune.StepCost`. gains: {number of threads: the log of how much quicker than one
    it is expected to be}. measured: those of them that it was measured on."""

    def __init__(self, cost, plans, gains, measured=()):
        self.cost = cost
        hope = {plan: 0.0 if plan in cost.measured else math.log(HOPEFUL) for plan in plans}
        self.plans = Ratios(hope, cost.measured)
        self.threads = Ratios({n: -gain for n, gain in gains.items()}, measured)
        self.speed = self.usual = 0.0
        self.has_unit = bool(cost.measured)  # else the first step tells it

    def learnt(self):
        return {name: value for name, value in vars(self).items() if name != "cost"}

    def seconds(self, plan, threads, batch, reads=True):
        """Of a step of `batch` sequences. reads: whether heads read, also where lookup drafts."""
        log = self.plans.now[plan] + self.threads.now[threads] + self.speed
        return self.cost(plan, batch, reads) * math.exp(log)

    def update(self, plan, threads, batch, reads, seconds):
        """Learns from a step."""
        error = math.log(seconds / self.seconds(plan, threads, batch, reads))
        if not self.has_unit:
            self.speed = self.usual = error
            self.has_unit = True
            return
        if min(self.plans.seen[plan], self.threads.seen[threads]) >= 1:
            error = max(min(error, MOST), -MOST)  # a single pause of the machine tells little
        others = (1 - self.plans.share(plan)) * (1 - self.threads.share(threads))
        self.speed += PACE * others * error
        self.plans.update(plan, error)
        self.threads.update(threads, error)
        if abs(self.speed - self.usual) > CHANGED:
            self.threads.forget()
            self.usual = self.speed
        self.usual += USUAL * (self.speed - self.usual)


class AdaptivePolicy:
    """Which plan the next step takes: that of most tokens per second.

    times: `StepTimes` of the plans. found: `tools.found.TokensFound`. group: the ranks that decode
    together, which all have to select the same."""

    def __init__(self, times, found, group=None):
        self.group = group or Group()
        self.found = found
        self.plans = tuple(times.plans.now)
        self.step = 0
        self.batch = times.cost.batch_size  # slots of the last step
        self.useless = 0.0  # what heads lost by reading, in steps' time of a sequence
        self.may_drop_heads = True
        self.set_times(times)
        self.expected = self.tokens

    def set_times(self, times):
        """Goes on with these `StepTimes`."""
        self.observed = times
        self.times = times if self.group.size == 1 else copy(times)
        self.share()
        self.decide()

    def share(self):
        """Lets all ranks believe what rank 0 observed."""
        if self.group.size > 1:
            vars(self.times).update(deepcopy(self.group.broadcast(self.observed.learnt())))

    def start(self, may_drop_heads):
        """A call begins, in which heads may be dropped or not: those of a chat go on reading."""
        with_heads = [plan.head_nodes > 0 for plan in self.plans]
        self.may_drop_heads = may_drop_heads and any(with_heads) and not all(with_heads)
        self.useless = 0.0
        self.decide()
        self.set_threads(self.best_threads)

    def set_threads(self, n):
        """Sets torch's number of threads, if there is a choice."""
        self.threads = n
        if len(self.times.threads.now) > 1 and torch.get_num_threads() != n:
            torch.set_num_threads(n)

    @property
    def drops_heads(self):
        """Whether heads need not read any more in this call, since they do not pay."""
        return self.may_drop_heads and self.useless >= USELESS

    def time(self, plan, threads=None):
        """Seconds of a step."""
        threads = threads or self.best_threads
        return self.times.seconds(plan, threads, self.batch, not self.drops_heads)

    def decide(self):
        """Sets the best number of threads and plan, and of each plan the tokens per step and the
        rate: tokens of a sequence per second."""
        log_times = self.times.threads.now
        self.best_threads = min(log_times, key=lambda n: log_times[n] + math.log(FEWER) * (n > 1))
        self.tokens = {plan: self.found(plan) for plan in self.plans}
        self.rates = {plan: tokens / self.time(plan) for plan, tokens in self.tokens.items()
                      if not (plan.head_nodes and self.drops_heads)}
        favour = lambda plan: self.rates[plan] * (1 if plan.tree_size > 1 else 1 + MARGIN)
        self.best = max(self.rates, key=favour)

    def select(self):
        """The plan of the next step, for which it sets the number of threads."""
        threads = self.times.threads
        fewer = max((n for n in threads.now if n < self.best_threads), default=None)
        # whether more threads pay is seen by a step on fewer, now and then
        on_trial = fewer and self.step and not threads.seen[fewer]
        self.set_threads(fewer if on_trial else self.best_threads)
        return self.best

    def update(self, plan, found, seconds=None, slots=None):
        """What a step of `plan` found in each sequence, [(`Sequence`, its tokens, its path)], how
        long it took, if that is known, and how many slots ran, default one for each sequence."""
        self.step += 1
        if not found:
            return
        self.batch = slots or len(found)
        self.found.add(plan, found)
        if seconds is not None and 0 < seconds < math.inf:  # clocks stand still, or go back
            reads = not self.drops_heads
            self.observed.update(plan, self.threads, self.batch, reads, seconds)
        if self.step % SHARED == 0:
            self.share()
        self.decide()
        if self.may_drop_heads and not self.drops_heads:
            gain = self.batch * self.gain_without_heads()
            self.useless = max(self.useless + gain, -USELESS)
            if self.drops_heads:
                self.decide()

    def gain_without_heads(self):
        """What a step would gain if heads did not read any more, as a share of its time."""
        rates = [self.tokens[plan] / self.times.seconds(plan, self.best_threads, self.batch, False)
                 for plan in self.plans if not plan.head_nodes]
        return 1 - max(self.rates.values()) / max(rates)
