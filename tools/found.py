"""What plans find in the texts of a run. What lookup finds is seen in the text, whether it drafted
or not; what heads find is expected as in their table, as far as their own steps bear it out."""

MEMORY = 32     # tokens of each sequence that running means look back on
FEWEST = 4      # an expectation counts as much as this many steps of one sequence
# expected of lookup until more is known: how likely a token is right if those before it are
HOPE = 0.4
# where lookup finds nothing, the heads find this share of what they find elsewhere
HARDER = 0.8
HEADS = 0.1 ** 2  # variance of the log of what the heads find, until their steps were seen


class Hindsight:
    """What lookup would have found in one text, seen as it grows: the chains that
    `kernels.ngram_lookup` drafts, of some lengths, each in steps that begin where its last one
    ended."""

    def __init__(self, prompt, lengths):
        self.text = []
        self.ends = {}    # the newest 1 to 4 tokens -> where they ended last
        self.chains = {}  # length -> (right tokens so far, where it copies from, where it begins)
        for token in prompt:
            self.append(token)
        self.begin(lengths)

    def append(self, token):
        self.text.append(token)
        suffixes = [tuple(self.text[-n:]) for n in (4, 3, 2, 1)]
        self.source = next((self.ends[x] for x in suffixes if x in self.ends), None)
        self.ends.update(dict.fromkeys(suffixes, len(self.text)))

    def begin(self, lengths):
        self.chains.update(dict.fromkeys(lengths, (0, self.source, len(self.text))))

    def add(self, token):
        """Adds a token to the text -> {length: right tokens} of the chains whose step it ends."""
        ended = {}
        for n, (right, source, start) in self.chains.items():
            drafted = source is not None and right < n
            if drafted and self.text[source + right % (start - source)] == token:
                self.chains[n] = right + 1, source, start
            else:
                ended[n] = right
        self.append(token)
        self.begin(ended)
        return ended


class TokensFound:
    """Calling it with a plan gives its tokens per step and sequence, by running means.

    by_heads: {how many nodes the heads draft: tokens per step that are expected of them alone}.
    chains: lengths of lookup's chains."""

    def __init__(self, by_heads, chains):
        self.by_heads = {0: 1.0} | by_heads
        self.nodes_right = self.nodes_expected = FEWEST
        self.lookup = {}  # length of a chain -> [its steps, their right tokens, those with none]
        for n in chains:
            right = sum(HOPE**i for i in range(1, n + 1))
            self.lookup[n] = [FEWEST, FEWEST * right, FEWEST * (1 - HOPE)]
        self.texts = {}   # sequence -> its Hindsight

    def __call__(self, plan):
        by_heads = (self.by_heads[plan.head_nodes] - 1) * self.nodes_right / self.nodes_expected
        if not plan.lookup_tokens:
            return 1 + by_heads
        steps, right, empty = self.lookup[plan.lookup_tokens]
        # with heads a stretch where lookup finds nothing takes fewer steps
        return (steps + right) / (steps - empty + empty / (1 + HARDER * by_heads))

    @property
    def heads_variance(self):
        """Of the log of what heads find."""
        return HEADS * FEWEST / self.nodes_expected

    def add(self, plan, found):
        """Learns what a step of this plan found, [(sequence, tokens, path)]."""
        if plan.head_nodes:
            right = sum(0 < node <= plan.head_nodes for _, _, path in found for node in path)
            expected = len(found) * (self.by_heads[plan.head_nodes] - 1)
            kept = 1 - 1 / MEMORY
            self.nodes_right = kept * self.nodes_right + right
            self.nodes_expected = kept * self.nodes_expected + expected
        if self.lookup:
            self.add_texts(found)

    def add_texts(self, found):
        before = self.texts  # of sequences that ended, too
        self.texts = {sequence: before.get(sequence) or Hindsight(sequence.prompt, self.lookup)
                      for sequence, _, _ in found}
        tokens_per_sequence = sum(len(tokens) for _, tokens, _ in found) / len(found)
        kept = (1 - 1 / MEMORY) ** tokens_per_sequence
        for counts in self.lookup.values():
            counts[:] = [kept * count for count in counts]
        for sequence, tokens, _ in found:
            for token in tokens:
                for n, right in self.texts[sequence].add(token).items():
                    counts = self.lookup[n]
                    counts[0] += 1
                    counts[1] += right
                    counts[2] += right == 0
