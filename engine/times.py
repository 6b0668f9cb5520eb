"""How long steps take: guesses at first, corrected by measured durations."""

import math

from clover import DEFAULT_BEAMS, CloverHeads
from common.machine import weight_bytes
from model import MAX_TREE

WINDOW = 64  # of running means, in steps
PACE = 0.3   # share of a prediction's error that is put down to the machine's speed
ROW = 0.15   # cost of a further row on a CPU, relative to a step of one row: an initial guess
# Initial guesses for a GPU, measured on an H100 by `bench gpu`
BANDWIDTH = 3e12           # bytes per second of a copy
FLOPS = 5.5e14             # per second, of products with many rows
LAUNCH_SECONDS = 12 * 2e-6 # launches of a layer or a draft head in a CUDA graph
EAGER_SECONDS = 4.3e-4     # of a layer without a graph
LONG_PROMPT = 512          # most unread tokens that steps read


class Mean:
    """A running mean, over WINDOW values at most. n: the number of values that the first one is
    worth."""

    def __init__(self, value=0.0, n=0):
        self.value = value
        self.n = n

    def learn(self, value):
        self.n = min(self.n + 1, WINDOW)
        self.value += (value - self.value) / self.n


class StepTimes:
    """Predicts the seconds of a step of B trees of T nodes, drafted by `depths` heads:

        unit * (rows[bucket(B * T)] + heads[depths, bucket(B)]),   rows[1] = 1

    unit: the machine's present speed. The tables are guesses times corrections; a cell that was
    never measured has the correction of the nearest one that was. costs: see `guessed_costs`."""

    def __init__(self, *costs):
        self.costs = costs
        self.unit = None  # seconds
        # (depths, bucket(B)) of heads, (0, bucket(B * T)) of rows -> log of the correction
        self.corrections = {(0, 1): Mean()}
        self.mask = Mean()  # seconds of a grammar's mask of a node

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
        return self.corrections[cell].value if cell else 0.0

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
        before = self.correction(depths, n)
        self.corrections.setdefault((depths, bucket(n)), Mean(before, 1)).learn(before + error)


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
        numbers, _ = cost_of(heads)
        size = model.dtype.itemsize if is_cuda else 0.625  # packed in 4 bits, and scales
        launches = LAUNCH_SECONDS if is_cuda else 0.0
        head = (numbers * size / BANDWIDTH + launches) / guessed_seconds(model)
    return row, bound, head


def cost_of(heads):
    """(weights that drafting a token reads, blocks that a committed row runs)."""
    if not isinstance(heads, CloverHeads):  # of drafters/
        return heads.cost
    rows = heads.config.vocabulary or heads.model.config.vocab_size
    weights = rows * heads.model.config.n_embd + linear_weights(heads.draft_head(0))
    return weights, len(heads.augment_blocks)


def linear_weights(module):
    """How many numbers the weights of its linear layers have."""
    layers = (layer for layer in module.modules() if hasattr(layer, "in_features"))
    return sum(layer.in_features * layer.out_features for layer in layers)


def guessed_seconds(model):
    """A guess at the seconds of a plain step."""
    launches = LAUNCH_SECONDS if model.device.type == "cuda" else 0.0
    return weight_bytes(model) / BANDWIDTH + model.config.n_layer * launches


def long_prompt(model):
    """How many unread tokens make it faster to read a prompt by itself, in a pass that is not
    captured, than by steps of 64 nodes."""
    steps = EAGER_SECONDS * model.config.n_layer / guessed_seconds(model)
    return min(MAX_TREE * math.ceil(steps), LONG_PROMPT)


def bucket(rows):
    """The cell of `StepTimes` for a number of rows: its own up to 16, then two per doubling."""
    return rows if rows <= 16 else 16 + round(2 * math.log2(rows / 16))
