"""Statistics of decoding: steps by size, accepted guesses by drafter."""

from collections import Counter

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


class Statistics:
    """Counts of `StepResult`s. sizes: {T: [verify steps, emitted tokens]}. step_lengths: {n: steps
    that emitted n tokens}. accepted: {drafter: accepted guesses}. positions: {index in the path,
    without the root: accepted guesses}."""

    def __init__(self):
        self.sizes = {}
        self.step_lengths = Counter()
        self.accepted = Counter()
        self.positions = Counter()

    def count(self, result):
        n = len(result.tokens)
        size = self.sizes.setdefault(result.tree_size, [0, 0])
        size[0] += 1
        size[1] += n
        self.step_lengths[n] += 1
        guesses = [name for name in guessed_by(result) if name != "model"]
        self.accepted.update(guesses)
        self.positions.update(range(len(guesses)))

    @property
    def steps(self):
        """Verify steps, summed over the sequences."""
        return self.step_lengths.total()

    @property
    def tree_size(self):
        """Mean T over the steps."""
        return sum(T * steps for T, (steps, _) in self.sizes.items()) / max(self.steps, 1)
