"""The text of an output while its tokens arrive, in whole characters, up to a stop text."""

from collections import deque
from functools import lru_cache


class StopTexts:
    """Finds texts in a longer one that arrives in pieces, by the automaton of Aho and Corasick
    (Communications of the ACM, 1975). A state is the longest suffix of the text so far that begins
    one of the texts; 0 is the empty one.

    depth: its characters. found: those of the longest text that ends there, or 0."""

    def __init__(self, texts):
        self.next = [{}]  # state -> {character: state}
        self.depth = [0]
        self.found = [0]
        for text in texts:
            state = 0
            for char in text:
                if char not in self.next[state]:
                    self.next[state][char] = len(self.next)
                    self.next.append({})
                    self.depth.append(self.depth[state] + 1)
                    self.found.append(0)
                state = self.next[state][char]
            self.found[state] = len(text)
        self.shorter = [0] * len(self.next)  # the state of a suffix that is shorter
        for state in sorted(range(len(self.next)), key=self.depth.__getitem__):
            for char, child in self.next[state].items():
                self.shorter[child] = self.after(self.shorter[state], char) if state else 0
                self.found[child] = self.found[child] or self.found[self.shorter[child]]

    def after(self, state, char):
        """The state after one more character."""
        while state and char not in self.next[state]:
            state = self.shorter[state]
        return self.next[state].get(char, 0)


stop_texts = lru_cache(maxsize=64)(StopTexts)


class TextStream:
    """Decodes token ids as they arrive. Unlike decoding all at once, it may keep a leading space.

    stop: texts that end it, also where hidden tokens are part of them. hidden: ids of tokens that
    are not shown. begin: the id of a token up to which none is shown. stopped: whether a stop text
    was reached. length: characters of the text so far, also of those held back because they may
    begin a stop text."""

    def __init__(self, encoding, stop=(), hidden=(), begin=None):
        self.decode = encoding.decode
        self.stop_texts = stop_texts(tuple(stop)) if stop else None
        self.state = 0
        self.held = deque()  # (text, whether it is shown)
        self.hidden = hidden
        self.begin = begin
        self.stopped = False
        self.length = 0
        self._restart(encoding.context)  # some decoders drop a space at the start of text

    def _restart(self, context):
        self.context = context
        self.pending = []  # ids after the context
        self.decoded = len(self.decode(context))  # characters of both that were returned

    def feed(self, tokens):
        """Returns the text that these ids complete."""
        return "".join(map(self._feed, tokens))

    def piece(self, token):
        """(length of the text before a token, the text that it completes)"""
        return self.length, self._feed(token)

    def finish(self):
        """Returns the rest of the text."""
        rest = self.decode(self.context + self.pending)[self.decoded:]
        rest = self._release(rest, self.begin is None)
        return rest + self._take(sum(len(text) for text, _ in self.held))

    def _feed(self, token):
        is_hidden = token in self.hidden
        is_shown = not is_hidden and self.begin is None
        if token == self.begin:
            self.begin = None
        if not (is_shown or self.stop_texts):
            return ""
        text = self.decode([token]) if is_hidden else self._completed(token)
        return self._release(text, is_shown)

    def _completed(self, token):
        self.pending.append(token)
        text = self.decode(self.context + self.pending)
        # an incomplete character decodes to U+FFFD, and so do invalid bytes
        complete = text if len(self.pending) > 16 else text.rstrip("\N{REPLACEMENT CHARACTER}")
        new = complete[self.decoded:]
        self.decoded += len(new)
        if new and complete == text:
            self._restart(self.pending)
        return new

    def _release(self, text, is_shown):
        """Returns the text up to a stop text, and holds back what may be the start of one."""
        if self.stopped:
            return ""
        self.length += len(text) * is_shown
        if self.stop_texts is None:
            return text * is_shown
        start = self.stop_texts.depth[self.state]  # characters held so far
        self.held.append((text, is_shown))
        ends = []
        for number, char in enumerate(text, start=start + 1):
            self.state = self.stop_texts.after(self.state, char)
            if found := self.stop_texts.found[self.state]:
                ends.append(number - found)
        if not ends:
            return self._take(start + len(text) - self.stop_texts.depth[self.state])
        self.stopped = True
        text = self._take(min(ends))
        self.held.clear()
        return text

    def _take(self, count):
        """Removes the first `count` characters that are held; returns those that are shown."""
        taken = []
        while count:
            text, is_shown = self.held.popleft()
            if len(text) > count:
                self.held.appendleft((text[count:], is_shown))
                text = text[:count]
            count -= len(text)
            taken.append(text * is_shown)
        return "".join(taken)
