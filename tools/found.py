"""What plans find in the texts of a run. The longer the match from which lookup copies, the more of
its tokens are right, and the match is seen before the step; what heads find is expected as in their
table, as far as their own steps bear it out."""

from bisect import bisect_right
from collections import Counter

LENGTHS = (1, 2, 3, 4, 8, 16)  # of a match, in tokens, from which it counts as a longer one
# by length of the match, none first: how likely a token is right if those before it are, until more
# is known
HOPES = (0.0, 0.3, 0.5, 0.6, 0.75, 0.85, 0.93)
HOPEFUL = 1.05       # times what heads are expected to find is hoped for, until they have drafted
FEWEST = 4           # an expectation counts as much as this many nodes found, or chains
FORGOTTEN = 1 / 512  # share of what the heads found that is forgotten in a step
MEMORY = 200         # chains that the means of lookup look back on


class Text:
    """One text as it grows, and lookup's chains at the starts of its steps, whether they were
    drafted or not. A token is a character here: nothing else of Python is searched as fast."""

    def __init__(self, prompt, longest):
        self.longest = longest  # tokens of a chain
        self.text = ""
        self.append(prompt)
        self.match = None       # class of the last match
        self.chains = []        # that may still be right: (class, where the step starts, source)

    def append(self, tokens):
        self.text += "".join([chr(token % 0x110000) for token in tokens])  # of all there are

    def find(self):
        """(length, source) of the match from which `kernels.ngram_lookup` copies: where the newest
        tokens, 4 or fewer, stood last, and up to 16 before them; (0, None) if they did not."""
        text, end = self.text, len(self.text)
        for n in range(min(4, end), 0, -1):
            found = text.rfind(text[end - n:], 0, end - 1)
            if found >= 0:
                source, length = found + n, n
                while n == 4 and length < min(16, source) and (
                        text[source - length - 1] == text[end - length - 1]):
                    length += 1
                return length, source
        return 0, None

    def start_step(self, ahead):
        """The class of the match before a step. ahead: the step starts after one in flight, but is
        selected by what is known now."""
        length, source = self.find()
        before, self.match = self.match, bisect_right(LENGTHS, length)
        known = before if ahead and before is not None else self.match
        self.chains.append((known, len(self.text), source))
        return self.match

    def add(self, tokens):
        """Adds tokens to the text -> [(class, right tokens)] of the chains that end with them."""
        self.append(tokens)
        going, ended = [], []
        for match, start, source in self.chains:
            text = self.text[start:start + self.longest]
            # after a period a chain copies itself, which is the text as long as it is right
            right = common_prefix(text, self.text[source:source + len(text)]) if source else 0
            if right < len(text) or right == self.longest:
                ended.append((match, right))
            else:
                going.append((match, start, source))
        self.chains = going
        return ended


def common_prefix(a, b):
    """Its length, for texts of the same length."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(a))


class TokensFound:
    """Calling it with a plan gives the tokens that its next step should yield in each sequence: the
    harmonic mean over them, since a batch ends with the slowest.

    by_heads: {how many nodes the heads draft: tokens per step that are expected of them alone}.
    chains: lengths of lookup's chains. ahead: a step is in flight when the next one is selected."""

    def __init__(self, by_heads, chains, ahead=False):
        self.by_heads = {0: 1.0} | by_heads
        self.nodes_right = self.nodes_expected = 0.0
        self.ahead = ahead
        self.texts = {}                # sequence -> its Text
        self.matches = Counter([2])    # classes of the texts' matches
        # by class: means, over chains, of right tokens by length of the chain, and of whether there
        # were none
        self.right = {n: [sum(hope**i for i in range(1, n + 1)) for hope in HOPES] for n in chains}
        self.empty = [1 - hope for hope in HOPES]
        self.counted = [FEWEST] * len(HOPES)

    def __call__(self, plan):
        share = (FEWEST * HOPEFUL + self.nodes_right) / (FEWEST + self.nodes_expected)
        by_heads = (self.by_heads[plan.head_nodes] - 1) * share
        if not plan.lookup_tokens:
            return 1 + by_heads
        right = self.right[plan.lookup_tokens]
        steps = sum(count / (1 + right[match] + self.empty[match] * by_heads)
                    for match, count in self.matches.items())
        return self.matches.total() / steps

    def add(self, plan, found):
        """Learns what a step of this plan found, [(sequence, tokens, path)]."""
        self.nodes_right *= 1 - FORGOTTEN
        self.nodes_expected *= 1 - FORGOTTEN
        if plan.head_nodes:
            self.nodes_right += sum(0 < node <= plan.head_nodes
                                    for _, _, path in found for node in path)
            self.nodes_expected += len(found) * (self.by_heads[plan.head_nodes] - 1)
        if self.right:
            self.add_texts(found)

    def add_texts(self, found):
        longest = max(self.right)
        self.texts = {sequence: self.texts.get(sequence) or Text(sequence.prompt, longest)
                      for sequence, _, _ in found}  # without those that ended
        for sequence, tokens, _ in found:
            for match, right in self.texts[sequence].add(tokens):
                self.add_chain(match, right)
        self.matches = Counter(text.start_step(self.ahead) for text in self.texts.values())

    def add_chain(self, match, right):
        """Moves the means of a class: the first chains count alike, then recent ones more."""
        self.counted[match] += 1
        pace = 1 / min(self.counted[match], MEMORY)
        for n, means in self.right.items():
            means[match] += pace * (min(right, n) - means[match])
        self.empty[match] += pace * ((right == 0) - self.empty[match])
