"""What each step drafts, and on how many threads of a CPU it runs: `AdaptivePolicy` takes what
brings most tokens per second.

`tools.found` tells what a plan should find in the texts as they are. What a step takes is learnt
from the steps themselves, as ratios, since other work on the machine slows down all plans alike."""

import math
from copy import copy, deepcopy

import torch

from backends.tensor_parallel import Group

NOISE = 0.1 ** 2      # variance of a step's log time, all else being equal, at least
SPEED = 0.05 ** 2     # of the machine's log speed, from one step to the next
GUESSED = 0.3 ** 2    # of a plan's log ratio, where it is a guess
MEASURED = 0.05 ** 2  # of one that was measured, in this run or an earlier one
GAIN = 0.25 ** 2      # of that of threads, measured or not: other work comes and goes
KNOWN = 0.02 ** 2     # of any ratio, at least
UNUSED_PLAN = 3e-5    # what the variance of a plan's ratio gains in a step of another one
UNUSED = 3e-4         # the same for a number of threads
FADING = 1 / 64       # share that a mean forgets in a step
CHANGED = 0.25        # by which the log of a speed falls below its mean when other work has gone
FEWER = 1.15          # more threads are taken where they are quicker by this factor
PRICE = 0.02    # of a step's time, that heads' reading may cost without need
USELESS = 0.5   # steps' time of a sequence that it may cost above that, until they stop
SHARED = 32     # steps after which ranks learn the times of rank 0


class Ratios:
    """{key: the log of a ratio}, `now`, with its variance, which grows while a key is not used: the
    worse it was, the later it is tried again.

    expected: {key: log}. guessed: its variance, but for the keys that were `measured`. unused: what
    the variance gains in a step."""

    def __init__(self, expected, guessed, measured, unused):
        self.expected = expected
        self.guessed = guessed
        self.unused = unused
        self.now = dict(expected)
        self.variance = {key: MEASURED if key in measured else guessed for key in expected}

    def hoped(self, key):
        """As low as the ratio may well be."""
        return self.now[key] - math.sqrt(self.variance[key])

    def update(self, key, error, variance):
        """Takes its share of an error, which has this variance in all."""
        gain = self.variance[key] / variance
        self.now[key] += gain * error
        self.variance[key] = max((1 - gain) * self.variance[key], KNOWN)
        for other in self.now.keys() - {key}:
            self.variance[other] += self.unused

    def forget(self):
        self.now = dict(self.expected)
        self.variance = dict.fromkeys(self.expected, self.guessed)


class StepTimes:
    """Log seconds of a step = log cost(plan, batch, reads) + ratio of the plan + ratio of the
    number of threads + the machine's speed.

    cost: a `tools.tune.StepCost`. gains: {number of threads: the log of how much quicker than one
    it is expected to be}."""

    def __init__(self, cost, plans, gains):
        self.cost = cost
        self.plans = Ratios(dict.fromkeys(plans, 0.0), GUESSED, cost.measured, UNUSED_PLAN)
        log_times = {n: -gain for n, gain in gains.items()}
        self.threads = Ratios(log_times, GAIN if len(gains) > 1 else MEASURED, (), UNUSED)
        self.speed = 0.0
        self.noise = NOISE
        self.usual = {}  # number of threads -> a mean of its log speed
        self.has_unit = bool(cost.measured)  # else the first step, of the first plan, tells it

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
            self.speed = error
            self.plans.variance[plan] = self.threads.variance[threads] = MEASURED
            self.has_unit = True
            return
        variance = self.noise + SPEED + self.plans.variance[plan] + self.threads.variance[threads]
        if abs(error) > 3 * math.sqrt(variance):  # a pause; another such step will be believed
            self.threads.variance[threads] += error ** 2
        else:
            self.noise = max(self.noise + FADING * (error ** 2 - self.noise), NOISE)
            self.speed += SPEED / variance * error
            self.plans.update(plan, error, variance)
            self.threads.update(threads, error, variance)
        level = self.speed + self.threads.now[threads]
        usual = self.usual.get(threads, level)
        if level < usual - CHANGED:
            self.speed = level - self.threads.expected[threads]
            self.threads.forget()
            self.usual = {}
        else:
            self.usual[threads] = usual + FADING * (level - usual)


class AdaptivePolicy:
    """Which plan the next step takes: that of most tokens per second.

    times: `StepTimes` of the plans. found: `tools.found.TokensFound`. group: the ranks that decode
    together, which all have to select the same."""

    def __init__(self, times, found, group=None):
        self.group = group or Group()
        self.found = found
        self.plans = tuple(times.plans.now)
        self.step = 0
        self.ran = set()    # kinds of steps: (plan, threads, batch, whether heads read)
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
        self.select()  # prompts are read on as many threads

    @property
    def drops_heads(self):
        """Whether heads need not read any more in this call, since they do not pay."""
        return self.may_drop_heads and self.useless >= USELESS

    def time(self, plan, threads=None):
        """Seconds of a step."""
        threads = threads or self.best_threads
        return self.times.seconds(plan, threads, self.batch, not self.drops_heads)

    def rate(self, plan, reads):
        """Tokens of a sequence per second, if the step is as quick as it may well be."""
        seconds = self.times.seconds(plan, self.best_threads, self.batch, reads)
        return self.tokens[plan] / seconds * math.exp(math.sqrt(self.times.plans.variance[plan]))

    def decide(self):
        """Sets the best plan and number of threads, the number to take next, which may be a trial,
        and of each plan the tokens per step and the rate."""
        log, hoped = self.times.threads.now, self.times.threads.hoped
        price = lambda n, than: math.log(FEWER) if n > than else 0.0
        self.best_threads = min(log, key=lambda n: log[n] + price(n, 1))
        self.next_threads = min(log, key=lambda n: hoped(n) + price(n, self.best_threads))
        self.tokens = {plan: self.found(plan) for plan in self.plans}
        self.rates = {plan: self.rate(plan, not self.drops_heads) for plan in self.plans
                      if not (plan.head_nodes and self.drops_heads)}
        self.best = max(self.rates, key=self.rates.get)

    def select(self):
        """The plan of the next step, for which it sets torch's number of threads."""
        self.threads = self.next_threads
        if len(self.times.threads.now) > 1 and torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        return self.best if self.times.has_unit else self.plans[0]

    def update(self, plan, found, seconds=None, slots=None):
        """What a step of `plan` found in each sequence, [(`Sequence`, its tokens, its path)], how
        long it took, if that is known, and how many slots ran, default one for each sequence."""
        self.step += 1
        if not found:
            return
        self.batch = slots or len(found)
        self.found.add(plan, found)
        kind = plan, self.threads, self.batch, not self.drops_heads
        known = seconds is not None and 0 < seconds < math.inf  # clocks stand still, or go back
        if known and kind in self.ran:  # the first of a kind is slow
            self.observed.update(*kind, seconds)
        self.ran.add(kind)
        if self.step % SHARED == 0:
            self.share()
        self.decide()
        if self.may_drop_heads and not self.drops_heads:
            gain = self.batch * self.gain_without_heads()
            self.useless = max(self.useless + gain, -USELESS)
            if self.drops_heads:
                self.decide()

    def gain_without_heads(self):
        """What a step would gain if heads did not read any more, as a share of its time, above
        PRICE."""
        alone = max(self.rate(plan, False) for plan in self.plans if not plan.head_nodes)
        return 1 - max(self.rates.values()) / alone - PRICE
