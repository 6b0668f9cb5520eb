"""The adaptive policy: how many nodes a step verifies and how many heads draft them, from measured
acceptance (acceptance.py) and step times (times.py)."""

from collections import Counter
from functools import partial
from itertools import accumulate, product

import torch

from engine.acceptance import Acceptance, NodeMeans, count_nodes
from engine.times import StepTimes, cost_of, guessed_costs
from generate import MAX_CHAIN, decoder_class
from model import MAX_TREE, check

READ_STEPS = 32    # steps in which to read a prompt
# exponent of a prompt's tokens in `select_reading`: below 1, as large steps delay other sequences
READ_VALUE = 0.75
PERIOD = 16        # steps between two updates of the tables
UNUSED = 64        # steps after which an option is tried for two steps
TRIAL_TIME = 0.01  # largest share of the time that trials may take
WINDOW = 64        # of recent rates, in steps
PRIOR = 2          # weight of an option's rate before its first use, in steps


class Policy:
    """Selects an option for each step: (tree size T, heads that draft). It is fixed by `tree_size`,
    or the one with the most expected tokens per second.

    `chances`, float32 [2, SOURCES], holds the acceptance probabilities of nodes for greedy and
    sampled sequences, by the bin of a head's joint log-probability, by the length of lookup's
    match, and for schemas. Each step counts how many proposed nodes were accepted. Where cpu.c runs
    the step, the option has T = None: the step chooses T itself, from these probabilities and
    `step_seconds`. Elsewhere T is fixed before the step, by the mean acceptance of the n-th
    likeliest node.

    schema: whether the text that a grammar forces is drafted. Batches with grammars ("guided") have
    rates of their own. tree_size (InputError if out of range) may be lowered between steps: 1 is
    plain decoding."""

    def __init__(self, model, heads=None, lookup=False, tree_size=None, schema=False):
        if tree_size is not None:
            check("tree size", tree_size, 1, MAX_TREE, whole=True)
        self.tree_size = tree_size if heads or lookup or schema else 1
        drafts = self.tree_size != 1
        self.heads = heads if drafts else None
        self.lookup = lookup and drafts
        self.schema = schema and drafts
        self.depth = self.heads.n_draft if self.heads else 0
        decoder = decoder_class(model, self.heads)
        self.options = self.possible_options(decoder)
        largest = decoder.tree_sizes[-1]
        self.largest = max(T or largest for T, _ in self.options)
        # while a prompt is unread, a fixed T competes with the larger sizes that read prompts
        reads = [(T, min(self.depth, T - 1)) for T in decoder.read_sizes
                 if T > (self.tree_size or 0)]
        self.reading_options = list(dict.fromkeys([*self.options, *reads]))
        self.group = getattr(model.head, "group", None)
        self.acceptance = Acceptance(self.heads, model.device)
        self.chances = self.acceptance.chances
        self.counts = self.acceptance.counts
        # (guided, heads draft) -> the means that select T where it is fixed before the step
        self.means = {(guided, drafts): NodeMeans(0.5 if drafts else 0.35)
                      for guided, drafts in product((False, True), repeat=2)}
        # (option with T = None, guided) -> recent expected tokens, time in plain steps
        self.sums = {}
        costs = guessed_costs(model, self.heads)
        if self.group:
            costs = self.group.broadcast(costs)  # ranks hold unequal parts
        self.times = StepTimes(*costs)
        # what cpu.c reads: the seconds of T nodes, for the next step's heads and B; and writes: the
        # tokens expected of the step, the committed rows that heads had not read before it
        self.step_seconds = torch.ones(largest + 1)
        self.drafted = torch.zeros(2)
        self.tables = {}  # heads that draft -> `step_seconds`, until the next update
        # share of the model's blocks that heads run over each committed row
        self.augmenting = cost_of(heads)[1] / model.config.n_layer if self.heads else 0
        # (B, *option) that backends/capture.py captured, by `guided`; none: any will do
        self.captured = {False: set(), True: set()}
        self.steps = 0
        self.chains = ()  # of the step's sequences with a grammar, the forced tokens
        self.batch = self.best = None
        self.last_use = Counter()  # (option, guided) -> step
        self.trial = []            # options to try in the next steps
        self.tried = 0.0           # the time of all trials, in plain steps

    def possible_options(self, decoder):
        """The options of a Decoder class, but for captures."""
        K = self.depth
        sizes = decoder.tree_sizes
        if self.tree_size:
            return [(self.tree_size, min(K, self.tree_size - 1))]
        if decoder.chooses_size:
            return [(None, d) for d in sorted({*range(min(K, 2) + 1), min(K, sizes[-1] - 1)})]
        chains = [T for T in sizes if (self.lookup or self.schema) and T <= MAX_CHAIN + 1]
        return [(1, 0), *((T, min(K, T - 1)) for T in sizes if K), *((T, 0) for T in chains)]

    @property
    def guided(self):
        return len(self.chains) > 0

    def select(self, B, behind=lambda: 0, unread=(), chains=()):
        """The option of the next step, of a batch of B. behind(): how many committed rows the heads
        have not read. unread: the number of prompt tokens that each running sequence has not read,
        if steps read prompts. chains: of each sequence with a grammar, the number of tokens of the
        text that it forces."""
        self.steps += 1
        self.chains = chains
        if any(unread):
            return self.select_reading(B, unread)
        if not (self.depth or self.lookup or self.guided):  # a schema alone needs a grammar
            return 1, 0
        if self.tree_size:
            return self.tree_size, min(self.depth, self.tree_size - 1)
        batch = B, self.guided
        is_due = batch != self.batch or self.steps % PERIOD == 0 or self.steps in (2, 4, 8)
        if is_due or (self.guided and self.options[0][0]):  # a T fixed here depends on chains
            if batch != self.batch:
                self.trial = []
            self.tables = {}
            self.batch = batch
            rate = partial(self.rate, B, self.expected_tokens(B))
            self.best = max(self.possible(B, self.options), key=rate)
            self.begin_trial(B, behind)
        if self.all_forced(B) and self.best[0] is None:
            option = None, 0  # heads know no more about forced text
        else:
            option = self.trial.pop() if self.trial else self.best
            self.last_use[option, self.guided] = self.steps
        T, depths = option
        if T is None:
            if depths not in self.tables:
                sizes = range(1, self.largest + 1)
                seconds = [self.expected_seconds(B, n, depths) for n in sizes]
                self.tables[depths] = torch.tensor(seconds).cummax(0).values
            self.step_seconds[1:] = self.tables[depths]
        return option

    def all_forced(self, B):
        """Whether all sequences of the step go on with forced text."""
        return len(self.chains) == B and all(self.chains)

    def select_reading(self, B, unread):
        """The option with the most tokens per second, where n tokens of a prompt count as
        n^READ_VALUE. Among options that take at most twice as long as that one, prefers those that
        read the longest prompt in READ_STEPS steps; if there are none, the largest."""
        expected = self.expected_tokens(B)
        seconds = lambda option: self.expected_seconds(B, *option)

        def rate(option):
            T, depths = option
            tokens = expected[depths > 0][min(T, self.tree_size or self.largest)]
            read = sum(min(n, T) ** READ_VALUE for n in unread if n)
            return (read + unread.count(0) * tokens) / seconds(option)
        options = self.possible(B, self.reading_options)
        limit = 2 * seconds(max(options, key=rate))
        options = [option for option in options if seconds(option) <= limit]
        fast = [option for option in options if option[0] * READ_STEPS >= max(unread)]
        return max(fast, key=rate) if fast else max(options)

    def possible(self, B, options):
        """Those options that need no capture while a server runs; if there are none, all."""
        return [x for x in options if (B, *x) in self.captured[self.guided]] or options

    def begin_trial(self, B, behind):
        """Tries the option that was not used for longest, if time is left for it."""
        last_use = lambda option: self.last_use[option, self.guided]
        unused = [option for option in self.possible(B, self.options)
                  if self.steps - last_use(option) >= UNUSED]
        if not unused or self.trial:
            return
        T, depths = option = min(unused, key=last_use)
        time = 2 * self.plain_steps(B, T or depths + 1, depths)
        if depths:
            rows = self.times.seconds(1, 1 + behind(), 0) / self.times.seconds(B, 1, 0)
            time += self.augmenting * rows
        if self.tried + time < TRIAL_TIME * self.steps:
            self.tried += time
            self.trial = [option, option]

    def expected_tokens(self, B):
        """{whether heads draft: expected tokens of a sequence, by tree size 0, 1, ...}. Sequences
        that draft n tokens of forced text have 1 + p + ... + p^n."""
        p = self.acceptance.forced()
        sums = [0, *accumulate(p ** j for j in range(self.largest))]
        chains = [n for n in self.chains if n]
        expected = {}
        for drafts in (True, False):
            means = self.means[self.guided, drafts].expected(self.largest)
            expected[drafts] = [
                ((B - len(chains)) * tokens + sum(sums[min(n + 1, T)] for n in chains)) / B
                for T, tokens in enumerate(means)]
        return expected

    def rate(self, B, expected, option):
        """Expected tokens of a sequence in the time of a plain step."""
        T, depths = option
        T = T or depths + 1
        tokens = expected[depths > 0][T]
        time = self.plain_steps(B, T, depths)
        recent_tokens, recent_time = self.sums.get((option, self.guided), (0, 0))
        return (PRIOR * tokens + recent_tokens) / (PRIOR * time + recent_time)

    def expected_seconds(self, B, T, depths):
        """Of a step, masks included."""
        masks = self.times.mask.value * T * len(self.chains)
        return self.times.seconds(B, T, depths) + masks

    def plain_steps(self, B, T, depths):
        """The time relative to that of a plain step."""
        return self.expected_seconds(B, T, depths) / self.expected_seconds(B, 1, 0)

    def count(self, draft, accepted, active):
        if draft.tree.tokens.shape[1] == 1:
            return  # only a root, which is no guess
        batch = draft.batch
        active = active if batch.slots is None else active[batch.slots]
        count_nodes(self.counts, draft.tree, accepted, active, batch.sampling["temperature"],
                    draft.chain)

    def learn(self, step, results):
        """Learns from a finished `engine.batching.MeasuredStep` and its `StepResult`s."""
        paths = [result.path for result in results if result.sequence not in step.reading]
        if not paths or self.tree_size == 1:
            return
        if step.counts is not None:
            self.acceptance.learn(step.counts)
        self.learn_times(step)
        guided = step.grammars > 0
        B, T, depths, _ = step.plan
        if step.tree_size > 1:
            self.means[guided, depths > 0].learn(step.tree_size, paths)
        if T is None and not self.all_forced(B):
            expected, _ = self.drafted.tolist()
            tokens, time = self.sums.get(((T, depths), guided), (0, 0))
            tokens += expected / B - tokens / WINDOW
            time += self.plain_steps(B, step.tree_size, depths) - time / WINDOW
            self.sums[(T, depths), guided] = tokens, time

    def learn_times(self, step):
        seconds = step.seconds
        mask_seconds = step.mask_seconds
        if self.group:  # ranks see the same tokens, but each has its own clock
            if self.steps % PERIOD:
                return
            seconds, mask_seconds = self.group.broadcast((seconds, mask_seconds))
        if not seconds:
            return
        _, behind = self.drafted.tolist()
        if behind <= 1 + MAX_CHAIN:  # else heads read a prompt, or what they had skipped
            self.times.learn(step.plan.B, step.tree_size, step.plan.depths, seconds)
        if step.grammars:
            self.times.mask.learn(mask_seconds / (step.grammars * step.tree_size))
