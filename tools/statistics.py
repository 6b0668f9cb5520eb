"""Statistics of decoding: steps by size, accepted guesses by drafter."""

from collections import Counter
from dataclasses import dataclass, field

from clover import BINS, SCHEMA


def drafter(source, depth):
    """The drafter of a node with this source (see `Tree`) and depth."""
    if source == BINS + SCHEMA:
        return "schema"
    return "lookup" if source >= BINS else f"head {depth}"


def guessed_by(result):
    """The drafter of each token of a `StepResult`; of the one after the path, "model"."""
    drafters = map(drafter, result.sources[1:], range(1, len(result.sources)))
    return [*drafters, "model"][:len(result.tokens)]


@dataclass
class Statistics:
    """Counts of `StepResult`s."""
    shapes: Counter = field(default_factory=Counter)   # (T, emitted tokens) -> verify steps
    guesses: Counter = field(default_factory=Counter)  # (depth, source) -> accepted guesses

    def count(self, result):
        self.shapes[result.tree_size, len(result.tokens)] += 1
        guessed = result.sources[1:len(result.tokens) + 1]  # a sequence may end inside the path
        self.guesses.update(enumerate(guessed, start=1))

    @property
    def steps(self):
        """Verify steps, summed over the sequences."""
        return self.shapes.total()

    @property
    def emitted(self):
        return sum(emitted * steps for (_, emitted), steps in self.shapes.items())

    @property
    def step_lengths(self):
        """n -> steps that emitted n tokens."""
        lengths = Counter()
        for (_, emitted), steps in self.shapes.items():
            lengths[emitted] += steps
        return lengths

    @property
    def sizes(self):
        """T -> [steps, tokens]."""
        sizes = {}
        for (T, emitted), steps in self.shapes.items():
            so_far = sizes.get(T, (0, 0))
            sizes[T] = [so_far[0] + steps, so_far[1] + steps * emitted]
        return sizes

    @property
    def accepted(self):
        """Drafter -> accepted guesses."""
        accepted = Counter()
        for (depth, source), number in self.guesses.items():
            accepted[drafter(source, depth)] += number
        return accepted

    @property
    def tree_size(self):
        """Mean T over the steps."""
        return sum(T * steps for (T, _), steps in self.shapes.items()) / max(self.steps, 1)
