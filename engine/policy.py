"""The adaptive policy: how many nodes a step verifies and how many heads draft them, from measured
acceptance and step times."""

import math
from bisect import bisect
from collections import Counter
from functools import partial
from itertools import accumulate, product

import torch

from clover import BINS, DEFAULT_BEAMS, SCHEMA, SOURCES, linear_weights
from generate import MAX_CHAIN, decoder_class, prior_chances
from model import MAX_TREE, check

# While a prompt is unread, a fixed T competes with READ_SIZES, where steps read prompts
READ_SIZES = 4, 16, 64
READ_STEPS = 32    # steps in which to read a prompt
# exponent of a prompt's tokens in `select_reading`: below 1, as large steps delay other sequences
READ_VALUE = 0.75
LONG_PROMPT = 512  # most unread tokens that steps read
ACTIVE, GUIDED = 1, 2  # in `Slots.active`: a sequence without or with a grammar
TREE_SIZES = dict(cpu=(2, 3, 4, 6, 8, 12, 16), cuda=(2, 4, 8, 16, 32, 64))  # T to select
LARGEST = 16    # largest T that a C step chooses by itself
PERIOD = 16     # steps between two updates of the tables
PACE = 0.3      # share of a prediction's error that is put down to the machine's speed
UNUSED = 64     # steps after which an option is tried for two steps
TRIAL_TIME = 0.01  # largest share of the time that trials may take
WINDOW = 64     # of running means, in steps
PRIOR = 2       # weight of an option's rate before its first use, in steps
PROPOSED = [1.0, 2.5, 3.0, 3.5, 4.0, 10.0]  # tokens that the prior of chains is worth
MEMORY = 256, 64  # window of the acceptance counts: head nodes per bin, lookup tokens per length
ROW = 0.15      # cost of a further row on a CPU, relative to a step of one row: an initial guess
# Initial guesses for a GPU, measured on an H100 by `bench gpu`
BANDWIDTH = 3e12           # bytes per second of a copy
FLOPS = 5.5e14             # per second, of products with many rows
LAUNCH_SECONDS = 12 * 2e-6 # launches of a layer or a draft head in a CUDA graph
EAGER_SECONDS = 4.3e-4     # of a layer without a graph


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
        self.heads = None if self.tree_size == 1 else heads
        self.lookup = lookup and self.tree_size != 1
        self.schema = schema and self.tree_size != 1
        self.depth = K = heads.n_draft if self.heads else 0
        chain = self.lookup or self.schema
        if self.tree_size:
            self.options = [(self.tree_size, min(K, self.tree_size - 1))]
        elif decoder_class(model, self.heads).chooses_size:
            depths = {*range(min(K, 2) + 1), min(K, LARGEST - 1)}
            self.options = [(None, d) for d in sorted(depths)]
        else:
            sizes = TREE_SIZES[model.device.type]
            self.options = [(1, 0), *((T, min(K, T - 1)) for T in sizes if K),
                            *((T, 0) for T in sizes if chain and T <= MAX_CHAIN + 1)]
        self.largest = max(T or LARGEST for T, _ in self.options)
        # where steps read prompts
        reads = [(T, min(K, T - 1)) for T in READ_SIZES if T > (self.tree_size or 0)]
        self.reading_options = list(dict.fromkeys([*self.options, *reads]))
        self.group = getattr(model.head, "group", None)
        self.known = known_counts(self.heads)  # [2, SOURCES, 2]: accepted, proposed
        # totals, to which steps add; in float32 they would stop at 2^24
        self.counts = torch.zeros(2, SOURCES, 2, dtype=torch.float64, device=model.device)
        self.seen = torch.zeros(2, SOURCES, 2)  # the part of `counts` that `known` includes
        self.chances = torch.zeros(2, SOURCES, device=model.device)
        self.learn_chances(self.seen)
        # (guided, heads draft) -> of the n-th likeliest node, mean acceptance and number of steps
        self.means = {(guided, drafts): ([0.5 if drafts else 0.35], [2])
                      for guided, drafts in product((False, True), repeat=2)}
        # (option with T = None, guided) -> recent expected tokens, time in plain steps
        self.sums = {}
        self.chains = []         # of the step's sequences with a grammar, the forced tokens
        self.mask_seconds = 0.0  # of a node, and the number of steps that it is the mean of
        self.mask_steps = 0
        costs = guessed_costs(model, self.heads)
        if self.group:
            costs = self.group.broadcast(costs)  # ranks hold unequal parts
        self.times = StepTimes(*costs)
        # what cpu.c reads: the seconds of T nodes, for the next step's heads and B; and writes: the
        # tokens expected of the step, the committed rows that heads had not read before it
        self.step_seconds = torch.ones(LARGEST + 1)
        self.drafted = torch.zeros(2)
        self.tables = {}  # heads that draft -> `step_seconds`, until the next update
        # share of the model's blocks that heads run over each committed row
        self.augmenting = heads.cost[1] / model.config.n_layer if self.heads else 0
        # (B, *option) that backends/capture.py captured, by `guided`; none: any will do
        self.captured = {False: set(), True: set()}
        self.steps = 0
        self.guided = False
        self.all_forced = False  # whether all sequences of the step go on with forced text
        self.batch = self.best = None
        self.last_use = Counter()  # (option, guided) -> step
        self.trial = []  # options to try in the next steps
        self.elapsed = self.trial_seconds = 0.0

    def select(self, B, behind=lambda: 0, unread=(), chains=()):
        """The option of the next step, of a batch of B. behind(): how many committed rows the heads
        have not read. unread: the number of prompt tokens that each running sequence has not read,
        if steps read prompts. chains: of each sequence with a grammar, the number of tokens of the
        text that it forces."""
        self.steps += 1
        self.chains = chains
        self.guided = len(chains) > 0
        self.all_forced = len(chains) == B and all(chains)
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
        if self.all_forced and self.best[0] is None:
            option = None, 0  # heads know no more about forced text
        else:
            option = self.trial.pop() if self.trial else self.best
            self.last_use[option, self.guided] = self.steps
        if option[0] is None:
            self.set_step_seconds(B, option[1])
        return option

    def set_step_seconds(self, B, depths):
        if depths not in self.tables:
            seconds = [self.expected_seconds(B, T, depths) for T in range(1, LARGEST + 1)]
            self.tables[depths] = torch.tensor(seconds).cummax(0).values
        self.step_seconds[1:] = self.tables[depths]

    def select_reading(self, B, unread):
        """The option with the most tokens per second, where n tokens of a prompt count as
        n^READ_VALUE. Among options that take at most twice as long as that one, prefers those that
        read the longest prompt in READ_STEPS steps; if there are none, the largest."""
        expected = self.expected_tokens(B)
        reading = sorted(n for n in unread if n)
        sums = list(accumulate((n ** READ_VALUE for n in reading), initial=0))
        seconds = lambda option: self.expected_seconds(B, *option)

        def rate(option):
            T, depths = option
            tokens = expected[depths > 0][min(T, self.tree_size or self.largest)]
            shorter = bisect(reading, T)  # prompts of which T nodes read all that is unread
            read = sums[shorter] + T ** READ_VALUE * (len(reading) - shorter)
            return (read + (len(unread) - len(reading)) * tokens) / seconds(option)
        options = self.possible(B, self.reading_options)
        limit = 2 * seconds(max(options, key=rate))
        options = [option for option in options if seconds(option) <= limit]
        fast = [option for option in options if option[0] * READ_STEPS >= reading[-1]]
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
        seconds = 2 * self.times.seconds(B, T or depths + 1, depths)
        if depths:
            seconds += self.augmenting * self.times.seconds(1, 1 + behind(), 0)
        if self.trial_seconds + seconds < TRIAL_TIME * self.elapsed:
            self.trial_seconds += seconds
            self.trial = [option, option]

    def expected_tokens(self, B):
        """{whether heads draft: expected tokens of a sequence, by tree size 0, 1, ...}."""
        expected = {}
        for drafts in (True, False):
            means, _ = self.means[self.guided, drafts]
            expected[drafts] = [0, *accumulate(extended(means, self.largest - 1), initial=1)]
            if any(self.chains):
                expected[drafts] = self.with_chains(expected[drafts], B)
        return expected

    def with_chains(self, expected, B):
        """Expected tokens where some sequences draft n tokens of forced text: 1 + p + ... + p^n."""
        right, proposed = self.known[:, BINS + SCHEMA].sum(0).tolist()
        powers = ((right / proposed) ** j for j in range(len(expected)))
        sums = [0, *accumulate(powers)]
        chains = [n for n in self.chains if n]
        return [((B - len(chains)) * tokens + sum(sums[min(n + 1, T)] for n in chains)) / B
                for T, tokens in enumerate(expected)]

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
        masks = self.mask_seconds * T * len(self.chains)
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
        results = [result for result in results if result.sequence not in step.reading]
        if not results or self.tree_size == 1:
            return
        B, depths = step.plan.B, step.plan.depths
        expected, behind = self.drafted.tolist()
        if step.counts is not None:
            self.learn_chances(step.counts)
        seconds = step.seconds
        mask_seconds = step.mask_seconds
        if self.group:  # ranks see the same tokens, but each has its own clock
            is_due = self.steps % PERIOD == 0
            both = self.group.broadcast((seconds, mask_seconds)) if is_due else (None, None)
            seconds, mask_seconds = both
        self.elapsed += (seconds or 0) * (PERIOD if self.group else 1)
        if seconds and behind <= 1 + MAX_CHAIN:  # else heads read a prompt or what they skipped
            self.times.learn(B, step.tree_size, depths, seconds)
        if seconds and step.grammars:
            self.mask_steps = min(self.mask_steps + 1, WINDOW)
            mean = mask_seconds / (step.grammars * step.tree_size)
            self.mask_seconds += (mean - self.mask_seconds) / self.mask_steps
        if step.tree_size > 1:
            self.learn_means(step, results)
        if step.plan.tree_size is None and not self.all_forced:
            key = (None, depths), step.grammars > 0
            tokens, time = self.sums.get(key, (0, 0))
            tokens += expected / B - tokens / WINDOW
            time += self.plain_steps(B, step.tree_size, depths) - time / WINDOW
            self.sums[key] = tokens, time

    def learn_means(self, step, results):
        hits = [0] * step.tree_size
        for result in results:
            for node in result.path:
                hits[node] += 1
        means, counts = self.means[step.grammars > 0, step.plan.depths > 0]
        means += extended(means, step.tree_size - 1)[len(means):]
        counts += [2] * (len(means) - len(counts))
        for i, accepted in enumerate(hits[1:]):
            counts[i] = min(counts[i] + 1, WINDOW)
            means[i] += (accepted / len(results) - means[i]) / counts[i]

    def learn_chances(self, counts):
        """Updates `chances` from the new total `counts`."""
        self.known += counts - self.seen
        self.seen = counts
        for part, memory in zip(self.known.split((BINS, SOURCES - BINS), dim=1), MEMORY):
            part *= (memory / part[..., 1:]).clamp(max=1)  # forgets what is older
        chances = self.known[..., 0] / self.known[..., 1]
        chances[:, :BINS] = torch.tensor([falling(bins) for bins in self.known[:, :BINS].tolist()])
        if self.chances.is_cuda:
            chances = chances.pin_memory()  # else the host would wait for the copy
        self.chances.copy_(chances, non_blocking=True)


def count_nodes(counts, tree, accepted, active, temperature, chain=None):
    """Adds (accepted, proposed) nodes to counts[mode, source], float64 [2, SOURCES, 2]. Of a chain,
    the tokens that were emitted, and these with the first wrong one. A sequence with a grammar
    (active, int32 [B], is GUIDED) counts only chains of forced text. temperature: [B]."""
    is_head = (tree.sources >= 0) & (tree.sources < BINS) & (tree.ancestors != 0)
    proposed = is_head & (active == ACTIVE)[:, None]
    on_path = torch.zeros_like(proposed).scatter(1, accepted.path, True)
    add_counts(counts, tree.sources, temperature, on_path & proposed, proposed)
    if chain is None:
        return
    match = chain[:, :1]
    n = min(chain.shape[1] - 1, accepted.path.shape[1])
    guesses = chain[:, 1:n + 1]
    compared = (torch.arange(n, device=chain.device) < accepted.count[:, None]) & (guesses >= 0)
    compared = compared.cumprod(1)  # up to the chain's end
    right = (compared * (guesses == accepted.tokens[:, :n])).cumprod(1).sum(1, keepdim=True)
    tried = torch.minimum(right + 1, compared.sum(1, keepdim=True))
    active = active[:, None]
    counted = (match > 0) & ((active == ACTIVE) | (active == GUIDED) & (match == SCHEMA))
    add_counts(counts, BINS + match, temperature, right * counted, tried * counted)


def add_counts(counts, sources, temperature, right, tried):
    """Adds right and tried [B, n] to the counts of their sources."""
    cell = sources.clamp(min=0) + SOURCES * (temperature > 0)[:, None]
    added = torch.stack((right, tried), dim=-1).flatten(0, 1).to(counts.dtype)
    counts.view(-1, 2).index_add_(0, cell.flatten(), added)


def extended(means, n):
    """n means; those beyond the last known one fall as rank ** -1.4."""
    last = len(means)
    return means[:n] + [means[-1] * (last / rank) ** 1.4 for rank in range(last + 1, n + 1)]


def known_counts(heads):
    """The initial counts, float32 [2, SOURCES, 2]: (accepted, proposed). PROPOSED tokens, accepted
    with their prior probability, plus the counts in heads.json."""
    proposed = torch.tensor([4.0] * BINS + PROPOSED).expand(2, -1)
    counts = torch.stack((prior_chances() * proposed, proposed), dim=2)
    if heads and (tables := heads.info.get("acceptance")):
        counts[:, :BINS] += torch.tensor([tables["greedy"], tables["sampled"]])
    return counts


def falling(bins):
    """Acceptance rate of each bin of (accepted, proposed) nodes, made non-increasing by pooling
    adjacent bins (isotonic regression)."""
    pools = []
    for accepted, proposed in bins:
        width = 1  # in bins
        while pools and accepted * pools[-1][1] > pools[-1][0] * proposed:
            a, p, w = pools.pop()
            accepted, proposed, width = accepted + a, proposed + p, width + w
        pools.append((accepted, proposed, width))
    return [accepted / proposed for accepted, proposed, width in pools for _ in range(width)]


class StepTimes:
    """Predicts the seconds of a step of B trees of T nodes, drafted by `depths` heads:

        unit * (rows[bucket(B * T)] + heads[depths, bucket(B)]),   rows[1] = 1

    unit: the machine's present speed. The tables are guesses times corrections; a cell that was
    never measured has the correction of the nearest one that was. costs: see `guessed_costs`."""

    def __init__(self, *costs):
        self.costs = costs
        self.unit = None  # seconds
        # (depths, bucket(B)) of heads, (0, bucket(B * T)) of rows -> log of the correction, number
        # of measurements
        self.corrections = {(0, 1): (0.0, 1)}

    def cost(self, depths, n):
        """The cost of n rows, or of that many heads for n sequences."""
        row, bound, head = self.costs
        rows = lambda n: max(1 + row * (n - 1), bound * n)
        guess = rows(n)
        if depths:  # the augmenting block and head 1, then heads that read beams
            guess = head * (2 * rows(n) + (depths - 1) * rows(n * DEFAULT_BEAMS))
        return guess * math.exp(self.correction(depths, n))

    def correction(self, depths, n):
        cell = depths, bucket(n)
        if cell not in self.corrections:
            measured = [other for other in self.corrections if (other[0] > 0) == (depths > 0)]
            distance = lambda other: (abs(other[0] - depths), abs(other[1] - cell[1]))
            cell = min(measured, key=distance, default=None)
        return self.corrections[cell][0] if cell else 0.0

    def seconds(self, B, T, depths):
        heads = self.cost(depths, B) if depths else 0
        return (self.unit or 1.0) * (self.cost(0, B * T) + heads)

    def learn(self, B, T, depths, seconds):
        """Corrects the prediction by the measured seconds of a step."""
        if self.unit is None:
            self.unit = seconds / self.seconds(B, T, depths)
        error = math.log(seconds / self.seconds(B, T, depths))
        error = max(min(error, 0.5), -0.5)  # one slow step says little
        self.unit *= math.exp(PACE * error)
        if B * T > 1:
            self.correct(0, B * T, error)
        if depths:
            self.correct(depths, B, error)

    def correct(self, depths, n, error):
        cell = depths, bucket(n)
        count = self.corrections[cell][1] if cell in self.corrections else 0
        change = max(1 / WINDOW, 1 / (2 + count)) * error
        self.corrections[cell] = self.correction(depths, n) + change, count + 1


def guessed_costs(model, heads):
    """Initial costs, relative to a step of one row: (of a further row, of a row where compute is
    the bound, of a draft head)."""
    is_cuda = model.device.type == "cuda"
    row = ROW
    bound = head = 0.0
    if is_cuda:
        bound = 2 * linear_weights(model) / FLOPS / guessed_seconds(model)
        row = bound / 2
    if heads:
        numbers, _ = heads.cost
        size = model.dtype.itemsize if is_cuda else 0.625  # packed in 4 bits, and scales
        launches = LAUNCH_SECONDS if is_cuda else 0.0
        head = (numbers * size / BANDWIDTH + launches) / guessed_seconds(model)
    return row, bound, head


def guessed_seconds(model):
    """A guess at the seconds of a plain step."""
    launches = LAUNCH_SECONDS if model.device.type == "cuda" else 0.0
    return model.weight_bytes() / BANDWIDTH + model.config.n_layer * launches


def long_prompt(model):
    """How many unread tokens make it faster to read a prompt by itself, in a pass that is not
    captured, than by steps of 64 nodes."""
    steps = EAGER_SECONDS * model.config.n_layer / guessed_seconds(model)
    return min(MAX_TREE * math.ceil(steps), LONG_PROMPT)


def bucket(rows):
    """The cell of `StepTimes` for a number of rows: its own up to 16, then two per doubling."""
    return rows if rows <= 16 else 16 + round(2 * math.log2(rows / 16))


# --------------------------------------------------------------------------------------------------
