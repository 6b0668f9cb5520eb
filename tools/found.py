"""What plans find in the texts of a run. What lookup finds is seen in the text, whether it drafted
or not; what heads find is expected as in their table, as far as their own steps bear it out."""

MEMORY = 16     # tokens of each sequence that running means look back on
FEWEST = 4      # an expectation counts as much as this many steps of one sequence
# expected of lookup until more is known: how likely a token is right if those before it are
HOPE = 0.4
# where lookup finds nothing, the heads find this share of what they find elsewhere
HARDER = 0.8
HEADS = 0.1 ** 2  # variance of the log of what the heads find, until their steps were seen


class Hindsight:
    """What lookup would have found in one text, seen as it grows: the chains that
    `kernels.ngram_lookup` drafts, of some lengths, each in steps that begin where its last one
    ended. A token is a character here: nothing else of Python is searched as fast."""

    def __init__(self, prompt, lengths):
        self.text = ""
        self.append(prompt)
        chain = len(self.text), self.source(len(self.text)), 0
        # length -> (where its step begins, where it copies from, right tokens so far)
        self.chains = dict.fromkeys(lengths, chain)

    def append(self, tokens):
        self.text += "".join([chr(token % 0x110000) for token in tokens])  # of all there are

    def source(self, begin):
        """What followed when the newest tokens before `begin`, 4 or fewer, stood in the text last;
        None if they did not."""
        for n in range(min(4, begin), 0, -1):
            found = self.text.rfind(self.text[begin - n:begin], 0, begin - 1)
            if found >= 0:
                return found + n

    def add(self, tokens):
        """Adds tokens to the text -> {length: right tokens of each of its steps that they end}."""
        self.append(tokens)
        return {n: self.end_steps(n) for n in self.chains}

    def end_steps(self, n):
        text, ended = self.text, []
        begin, source, right = self.chains[n]
        while begin + right < len(text):
            # after a period a chain copies itself, which is the text as long as it is right
            if source and right < n and text[source + right] == text[begin + right]:
                right += 1
            else:
                ended.append(right)
                begin += right + 1
                source, right = self.source(begin), 0
        self.chains[n] = begin, source, right
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
        self.texts = {sequence: self.texts.get(sequence) or Hindsight(sequence.prompt, self.lookup)
                      for sequence, _, _ in found}  # without those that ended
        tokens_per_sequence = sum(len(tokens) for _, tokens, _ in found) / len(found)
        kept = (1 - 1 / MEMORY) ** tokens_per_sequence
        for counts in self.lookup.values():
            counts[:] = [kept * count for count in counts]
        for sequence, tokens, _ in found:
            for n, ended in self.texts[sequence].add(tokens).items():
                counts = self.lookup[n]
                counts[0] += len(ended)
                counts[1] += sum(ended)
                counts[2] += ended.count(0)
