"""What each step drafts, and on how many threads of a CPU it runs: `AdaptivePolicy` takes what
brings most tokens per second.

What a plan takes is learnt from the steps themselves, as ratios, since other work on the machine
slows down all plans alike. `tools.found` knows what it finds."""

import math
from copy import copy, deepcopy

import torch

from backends.tensor_parallel import Group

NOISE = 0.1 ** 2    # variance of a step's log time, all else being equal
DRIFT = 0.05 ** 2   # of the machine's log speed, from step to step
GUESSED = 0.3 ** 2  # of a log ratio of times, where it is a guess
TIMED = 0.1 ** 2    # where it was measured, in this run or an earlier one
AGEING = 3e-5       # what the variance of a plan's ratio gains in a step
UNUSED = 0.035 ** 2  # of a number of threads' log speed, from step to step without it
CHANGED = 0.25      # of the log speed, against its mean: other work has come or gone
FADING = 1 / 64     # share that a mean forgets in a step
WAITS = 1.0         # of the log speed: several threads wait for one that does not run
FEWER = 1.15        # more threads are taken where they are quicker by this factor
TRIALS = 0.01       # share of the time that may be lost by trials
FIRST = 1           # steps' time that may be lost by them at once
MOST_LOST = 8       # steps' time of a trial that later ones make up for
# plain decoding is taken where it is this near the best: a batch's texts then end together
MARGIN = 0.06
USELESS = 1         # steps' time of a sequence that heads may lose by reading, until they stop
EVERY = 4           # steps between two trials, at least
SHARED = 32         # steps after which ranks learn the times of rank 0, and ratios age


class Estimate:
    """A number that is not known exactly: its mean and variance."""

    def __init__(self, mean=0.0, variance=GUESSED):
        self.mean = mean
        self.variance = variance


class StepTimes:
    """Log seconds of a step = log cost(plan, batch, reads) + a correction for the plan + the
    machine's speed by this number of threads: a Kalman filter that takes the two for independent.

    cost: a `tools.tune.StepCost`. gains: {number of threads: the log of how much quicker than one
    it is expected to be}. spread: the variance of the log speed, before the first step."""

    def __init__(self, cost, plans, gains, spread=1e3):
        self.cost = cost
        self.gains = gains
        self.plans = {plan: Estimate(variance=TIMED if plan in cost.measured else GUESSED)
                      for plan in plans}
        self.speeds = {n: Estimate(-gain, spread) for n, gain in gains.items()}
        self.learnt_gains = gains  # running means
        self.usual = {}  # number of threads -> a running mean of its speed
        self.noise = NOISE

    def learnt(self):
        return dict(plans=self.plans, speeds=self.speeds, usual=self.usual, noise=self.noise)

    def seconds(self, plan, threads, batch, reads=True):
        """Of a step of `batch` sequences. reads: whether heads read, also where lookup drafts."""
        log = self.plans[plan].mean + self.speeds[threads].mean
        return self.cost(plan, batch, reads) * math.exp(log)

    def update(self, plan, threads, batch, reads, seconds):
        """Learns from a step."""
        speed, correction = parts = self.speeds[threads], self.plans[plan]
        total = self.noise + speed.variance + correction.variance
        error = math.log(seconds / self.seconds(plan, threads, batch, reads))
        if abs(error) < 3 * math.sqrt(total):
            self.noise = max(self.noise + FADING * (error ** 2 - self.noise), NOISE)
            for part in parts:
                gain = part.variance / total
                part.mean += gain * error
                part.variance *= 1 - gain
        else:  # it counts for nothing; another one like it will, for the machine's speed
            speed.variance += error ** 2
            if threads > min(self.speeds) and error > WAITS:
                speed.mean += error
        speed.variance += DRIFT
        for n, other in self.speeds.items():
            if n != threads:
                other.variance += UNUSED
        usual = self.usual.get(threads, speed.mean if self.usual else math.inf)
        # the first step tells of all numbers of threads; later, other work may have gone for all
        if speed.mean < usual - CHANGED:
            self.usual = {threads: speed.mean}
            self.speeds |= {n: Estimate(speed.mean + self.gains[threads] - gain)
                            for n, gain in self.gains.items() if n != threads}
        else:
            self.usual[threads] = usual + FADING * (speed.mean - usual)
        if batch == self.cost.batch_size:  # fewer sequences gain less
            first, *_ = self.speeds.values()
            self.learnt_gains = {n: gain + FADING * (first.mean - self.speeds[n].mean - gain)
                                 for n, gain in self.learnt_gains.items()}

    def age(self, steps):
        """What was learnt of the plans' ratios counts less after these steps."""
        for correction in self.plans.values():
            correction.variance = min(correction.variance + steps * AGEING, GUESSED)


class AdaptivePolicy:
    """Which plan the next step takes: that of most tokens per second. One that may be better, as
    far as is known, is tried now and then.

    times: `StepTimes` of the plans. found: `tools.found.TokensFound`. group: the ranks that decode
    together, which all have to select the same."""

    def __init__(self, times, found, group=None):
        self.group = group or Group()
        self.found = found
        self.plans = tuple(times.plans)
        self.step = 0
        self.batch = times.cost.batch_size  # slots of the last step
        self.allowance = FIRST  # what trials may lose, in steps of the best plan
        self.set_times(times)
        self.expected = self.tokens

    def set_times(self, times):
        """Goes on with these `StepTimes`."""
        self.observed = times
        self.times = times if self.group.size == 1 else copy(times)
        self.share()
        self.useless = 0        # what heads lost by reading, in steps' time of a sequence
        self.may_drop_heads = True
        self.decide()
        self.threads = self.best_threads

    def share(self):
        """Lets all ranks believe what rank 0 observed."""
        if self.group.size > 1:
            vars(self.times).update(deepcopy(self.group.broadcast(self.observed.learnt())))

    def start(self, may_drop_heads):
        """A call begins, in which heads may be dropped or not: those of a chat go on reading."""
        with_heads = [plan.head_nodes > 0 for plan in self.plans]
        self.may_drop_heads = may_drop_heads and any(with_heads) and not all(with_heads)
        self.useless = 0
        self.decide()
        self.set_threads(self.best_threads)

    def set_threads(self, n):
        """Sets torch's number of threads, if there is a choice."""
        self.threads = n
        if len(self.times.speeds) > 1 and torch.get_num_threads() != n:
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
        slow = lambda n: self.times.speeds[n].mean + (math.log(FEWER) if n > 1 else 0)
        self.best_threads = min(self.times.speeds, key=slow)
        self.tokens = {plan: self.found(plan) for plan in self.plans}
        self.rates = {plan: tokens / self.time(plan) for plan, tokens in self.tokens.items()
                      if not (plan.head_nodes and self.drops_heads)}
        favour = lambda plan: self.rates[plan] * (1 if plan.tree_size > 1 else 1 + MARGIN)
        self.best = max(self.rates, key=favour)

    def loss(self, plan, time):
        """What a step of this plan, which takes `time`, loses to one of the best, in steps."""
        lost = time / self.time(self.best) - self.tokens[plan] / self.tokens[self.best]
        return max(lost, 0)

    def select(self):
        """The plan of the next step, for which it sets the number of threads."""
        plan, threads = self.best, self.best_threads
        if self.step % EVERY == 0:
            gains = self.trials()
            trial = max(gains, key=gains.get, default=(plan, threads))
            lost = self.loss(trial[0], self.time(*trial))
            if min(lost, FIRST) <= self.allowance:  # all of it pays for any trial
                plan, threads = trial
        self.set_threads(threads)
        return plan

    def trials(self):
        """{(plan, number of threads): log of how much better than the best it may well be}."""
        gains = {}
        for plan, rate in self.rates.items():
            variance = self.times.plans[plan].variance
            if plan.head_nodes:
                variance += self.found.heads_variance
            gain = math.log(rate / self.rates[self.best]) + 2 * math.sqrt(variance)
            if gain > 0 and plan != self.best and self.loss(plan, self.time(plan)) <= FIRST:
                gains[plan, self.best_threads] = gain
        best = self.times.speeds[self.best_threads].mean
        speeds = self.times.speeds if self.step else {}  # the first step tells of all of them
        for n, speed in speeds.items():
            gain = best - speed.mean + 2 * math.sqrt(speed.variance)
            if gain > 0 and n != self.best_threads and speed.variance > GUESSED / 2:
                gains[self.best, n] = gain
        return gains

    def update(self, plan, found, seconds=None, slots=None):
        """What a step of `plan` found in each sequence, [(`Sequence`, its tokens, its path)], how
        long it took, if that is known, and how many slots ran, default one for each sequence."""
        self.step += 1
        if not found:
            return
        self.batch = slots or len(found)
        self.found.add(plan, found)
        self.add_time(plan, seconds)
        self.decide()
        if self.may_drop_heads and not self.drops_heads:
            gain = self.batch * self.gain_without_heads()
            self.useless = max(self.useless + gain, -USELESS)
            if self.drops_heads:
                self.decide()

    def add_time(self, plan, seconds):
        """Learns what a step took, and charges what it lost if it was a trial."""
        known = seconds is not None and 0 < seconds < math.inf  # clocks stand still, or go back
        if known:
            reads = not self.drops_heads
            self.observed.update(plan, self.threads, self.batch, reads, seconds)
        if (plan, self.threads) != (self.best, self.best_threads):
            taken = self.time(plan, self.threads)
            if known and self.group.size == 1:
                taken = max(taken, seconds)
            self.allowance -= self.loss(plan, taken)
        self.allowance = max(min(self.allowance + TRIALS, FIRST), -MOST_LOST)
        if self.step % SHARED == 0:
            self.observed.age(SHARED)
            self.share()

    def gain_without_heads(self):
        """What a step would gain if heads did not read any more, as a share of its time."""
        rates = [self.tokens[plan] / self.times.seconds(plan, self.best_threads, self.batch, False)
                 for plan in self.plans if not plan.head_nodes]
        return 1 - max(self.rates.values()) / max(rates)
