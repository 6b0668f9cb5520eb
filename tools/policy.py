"""What each step drafts: `AdaptivePolicy` selects the plan of most tokens per second.

Tokens: heads carry a table from training of how often each node of a tree is accepted; their own
steps correct it. How often lookup is right is counted in every step, for each length of the match.
Seconds: guessed, and corrected by the steps; timing them in advance brought nothing."""

import math
import time
from collections import Counter
from functools import partial

import numpy as np
import torch

from backends.tensor_parallel import group_of
from generate import DEFAULT_BATCH, DEFAULT_TREE, DraftPlan, FixedPolicy, fixed_plan

TREE_SIZES = dict(cpu=(2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48), cuda=(2, 4, 8, 16, 32, 64))
CHAINS = dict(cpu=(1, 4, 10), cuda=(1, 3, 15))  # tokens of lookup
ROW = dict(cpu=0.13, cuda=0.002)  # what a step takes for each further row, relative to one
# Of a GPU, as `bench gpu` measured them on an H100: bytes per second of a copy, FLOP per second of
# a step of many rows, seconds of the launches of a layer, or of a draft head, in a CUDA graph
BANDWIDTH = 3e12
COMPUTE = 5.5e14
LAUNCH_SECONDS = 12 * 2e-6
WORTH = 1.1        # heads that read in every step must be expected to gain this factor
PRIORS = (0, 1), (0.5, 2), (1, 2), (1.5, 2), (2, 2)  # lookup: right and wrong tokens, by match
MEMORY = 64       # steps that counts of tokens look back on
PACE = 0.1        # share of a step's surprise by which its plan's duration is corrected
TRIAL = 64        # steps, after which an unused plan is tried for two, if it would be the best
OPTIMISM = 1.25   # with its rate times this
FEWER = 1.15      # more threads are used where they are quicker by this factor
BUDGET = 0.25     # seconds for choosing threads


def expected_tokens(tables, tree_size, temperature):
    """Tokens per step of a tree of T nodes of the heads: the bonus token and each node's share.
    tables: {temperature: `training.evaluate.acceptance`}, between which it interpolates linearly,
    clamped outside; without any, one guess is right."""
    if not tables:
        return min(tree_size, 2.0)
    total = lambda table: 1 + sum(sum(row[:tree_size - 1]) for row in table[:tree_size - 1])
    totals = sorted((float(t), total(table)) for t, table in tables.items())
    return float(np.interp(temperature, *zip(*totals)))


def guessed_costs(model, heads):
    """What a step takes for each further row, for each draft head, and for the arithmetic of a row,
    relative to a plain one."""
    weights = group_of(model).broadcast(model.weight_bytes())  # ranks hold unequal parts
    numbers = head_numbers(model, heads) if heads else 0
    if model.device.type != "cuda":
        return ROW["cpu"], numbers / weights, 0  # a byte each
    seconds = lambda size, layers: size / BANDWIDTH + layers * LAUNCH_SECONDS
    plain = seconds(weights, model.config.n_layer)
    arithmetic = 2 * weights / model.dtype.itemsize / COMPUTE / plain
    return ROW["cuda"], seconds(numbers * model.dtype.itemsize, 1) / plain, arithmetic


def head_numbers(model, heads):
    """How many weights a draft head reads, the draft vocabulary's among them."""
    layers = [x for x in heads.draft_head(0).modules() if hasattr(x, "in_features")]
    vocabulary = heads.config.vocabulary or model.config.vocab_size
    own = sum(layer.in_features * layer.out_features for layer in layers)
    return own + vocabulary * model.config.n_embd


def guessed_cost(costs, heads, plan, batch_size):
    """Duration of a step, relative to a plain one of one sequence. costs: of `guessed_costs`."""
    row, head, arithmetic = costs
    rows = batch_size * plan.tree_size
    depths = 1 + min(heads.config.n_draft, plan.head_nodes) if plan.head_nodes else 0
    return max(1 + row * (rows - 1), arithmetic * rows) + head * depths


def draft_plans(model, heads, lookup, batch_size, temperature, worth=WORTH):
    """At most five plans to select among: plain, the heads' best tree, lookup alone, and both.
    Heads that are not expected to be `worth` their reading in every step are left out, as in large
    sampled batches, if lookup drafts."""
    chains = CHAINS[model.device.type]
    if not heads:
        return DraftPlan(), *(DraftPlan(0, n) for n in chains if lookup)
    tables = heads.info.get("acceptance")
    sizes = TREE_SIZES[model.device.type] if tables else (DEFAULT_TREE,)
    trees = [DraftPlan(size - 1) for size in sizes]
    costs = guessed_costs(model, heads)
    rate = lambda plan: (expected_tokens(tables, plan.tree_size, temperature)
                         / guessed_cost(costs, heads, plan, batch_size))
    best = max(trees, key=rate)
    if not lookup:
        return DraftPlan(), best
    if rate(best) < worth * rate(DraftPlan()):
        return draft_plans(model, None, True, batch_size, temperature)
    if model.device.type == "cuda":  # a size in TREE_SIZES: the chain replaces some heads' nodes
        both = [DraftPlan(max(best.tree_size, 2 * n + 2) - 1 - n, n) for n in chains[1:]]
    else:
        both = [best._replace(lookup_tokens=n) for n in chains[1:]]
    return DraftPlan(), best, DraftPlan(0, chains[-1]), *both


class Text:
    """One text as it grows. A token is a character: nothing else of Python is searched as fast."""

    def __init__(self, prompt):
        self.text = ""
        self.match = self.source = 0
        self.add(prompt)

    def add(self, tokens):
        """Adds a step's tokens -> (match, how many of lookup's were right, 1 if one was wrong).

        Then finds what `kernels.ngram_lookup` copies from: `source` follows the last earlier place
        of the newest tokens, as many as `match`: 4 or fewer."""
        match, start = self.match, len(self.text)
        self.text += "".join([chr(token % 0x110000) for token in tokens])
        pairs = zip(self.text[start:], self.text[self.source:])
        right = next((i for i, (a, b) in enumerate(pairs) if a != b), len(tokens))
        end = len(self.text)
        self.match = self.source = 0
        for n in range(min(4, end), 0, -1):
            at = self.text.rfind(self.text[end - n:], 0, end - 1)
            if at >= 0:
                self.match = n
                self.source = at + n
                break
        return match, right, int(right < len(tokens))


class AdaptivePolicy:
    """Selects the plan of most tokens per second; ranks all the same, by rank 0's clock."""

    def __init__(self, model, heads, lookup, batch_size, temperature):
        self.plans = draft_plans(model, heads, lookup, batch_size, temperature)
        self.group = group_of(model)
        self.batch = batch_size  # slots that the next step runs, on a CPU those with a sequence
        self.slots = batch_size if model.device.type == "cuda" else None
        tables = heads and heads.info.get("acceptance")
        self.by_heads = {plan.head_nodes: expected_tokens(tables, plan.head_nodes + 1, temperature)
                         for plan in self.plans}
        self.heads_right = [4.0, 4.0]  # tokens of the heads that were right, that should have been
        self.lookup_right = list(map(list, PRIORS))
        self.texts = {}                # sequence -> its Text
        self.cost = partial(guessed_cost, guessed_costs(model, heads), heads)
        self.unit = None               # seconds of a cost of 1: other work slows down all plans
        self.log_ratio = dict.fromkeys(self.plans, 0.0)  # of a plan's duration to its cost
        self.last_use = Counter()
        self.steps = 0
        self.trial = []                # plans of the next steps, in the place of the best

    def seconds(self, plan):
        return (self.unit or 1.0) * self.cost(plan, self.batch) * math.exp(self.log_ratio[plan])

    def tokens(self, plan):
        """Expected tokens per step, the mean over the texts."""
        right, expected = self.heads_right
        by_heads = (self.by_heads[plan.head_nodes] - 1) * right / expected
        total = 0.0
        matches = [text.match for text in self.texts.values()] or [0]
        for match in matches:
            right, wrong = self.lookup_right[match]
            p = right / (right + wrong) if plan.lookup_tokens else 0.0
            total += sum(p ** i for i in range(1, plan.lookup_tokens + 1)) + (1 - p) * by_heads
        return 1 + total / len(matches)

    def select(self, sequences=()):
        """The plan of the next step."""
        self.steps += 1
        rates = {plan: self.tokens(plan) / self.seconds(plan) for plan in self.plans}
        best = max(rates, key=rates.get)
        if self.steps % TRIAL == 0:
            unused = [plan for plan in self.plans if self.steps - self.last_use[plan] >= TRIAL
                      and OPTIMISM * rates[plan] > rates[best]]
            self.trial = 2 * unused[:1]
        plan = self.trial.pop() if self.trial else best
        self.last_use[plan] = self.steps
        return plan

    def update(self, plan, results, seconds=None):
        """Learns from a step's results [(sequence, tokens, path, ...)] and its duration."""
        if not results:
            return
        if self.group.size > 1:  # all ranks see the same tokens, but clocks of their own
            seconds = self.group.broadcast(seconds) if self.steps % 8 == 0 else None
        self.batch = self.slots or len(results)
        if seconds:  # half of a surprise says something of the plan, half of the machine
            self.unit = self.unit or seconds / self.seconds(plan)
            surprise = math.log(seconds / self.seconds(plan))
            change = PACE * max(min(surprise, 1.0), -1.0)
            self.unit *= math.exp(change)
            self.log_ratio[plan] += change
        if plan.head_nodes and not plan.lookup_tokens:
            right = sum(len(path) - 1 for _, _, path, *_ in results)
            expected = len(results) * (self.by_heads[plan.head_nodes] - 1)
            self.heads_right = faded(self.heads_right, right, expected)
        self.texts = {sequence: self.texts.get(sequence) or Text(sequence.prompt)
                      for sequence, *_ in results}
        for sequence, tokens, *_ in results:
            match, right, wrong = self.texts[sequence].add(tokens)
            if match:
                self.lookup_right[match] = faded(self.lookup_right[match], right, wrong)


def pick_policy(model, prompts, heads=None, lookup=False, tree_size=None, batch_size=None,
                temperature=0.0):
    """The policy of --tree-size for an Engine that `generate.prepare` makes of these arguments. It
    adapts if no size is given and something is known of the drafters."""
    known = lookup or (heads and heads.info.get("acceptance"))
    if tree_size is not None or not known:
        return FixedPolicy(fixed_plan(tree_size, heads, lookup))
    batch_size = min(len(prompts), batch_size or DEFAULT_BATCH)
    return AdaptivePolicy(model, heads, lookup, batch_size, temperature)


def faded(counts, *more):
    return [(1 - 1 / MEMORY) * count + new for count, new in zip(counts, more)]


@torch.inference_mode()
def choose_threads(decoder):
    """Sets torch's number of threads: one, unless as many as it has now are quicker. Means count,
    not the quickest steps: where other work runs, threads wait for one another."""
    most = torch.get_num_threads()
    if most == 1 or decoder.model.device.type != "cpu" or group_of(decoder.model).size > 1:
        return
    torch.set_num_threads(1)
    step_seconds(decoder)  # the first one takes longer
    seconds = dict.fromkeys((1, most), 0.0)
    while sum(seconds.values()) < BUDGET:
        for n in seconds:
            torch.set_num_threads(n)
            seconds[n] += step_seconds(decoder)
    torch.set_num_threads(most if FEWER * seconds[most] < seconds[1] else 1)


def step_seconds(decoder):
    with decoder.context():
        started = time.perf_counter()
        decoder.step(DraftPlan())
        return time.perf_counter() - started
