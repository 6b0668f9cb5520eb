"""The text of an output while its tokens arrive, in whole characters, up to a stop text."""

from collections import deque
from functools import lru_cache


@lru_cache(maxsize=256)
def borders(text):
    """The longest proper prefix of text[:n] that is also its suffix, in characters, for n = 0, 1,
    ... (Knuth, Morris and Pratt, SIAM Journal on Computing, 1977)."""
    lengths = [0, 0]
    for char in text[1:]:
        lengths.append(matched(text, lengths, lengths[-1], char))
    return lengths


def matched(text, lengths, n, char):
    """How many characters of the front of text a stream ends in, after one more; n: before it.
    lengths: the text's `borders`. Takes constant time per character of the stream, on average."""
    while n and text[n] != char:
        n = lengths[n]
    return n + (text[n] == char)


class TextStream:
    """Decodes token ids as they arrive. Unlike decoding all at once, it may keep a leading space.

    stop: texts that end it, also where hidden tokens are part of them. hidden: ids of tokens that
    are not shown. begin: the id of a token up to which none is shown. stopped: whether a stop text
    was reached. length: characters of the text so far, also of those held back because they may
    begin a stop text."""

    def __init__(self, encoding, stop=(), hidden=(), begin=None):
        self.decode = encoding.decode
        self.stop_texts = [(text, borders(text)) for text in stop]
        self.matched = [0] * len(stop)  # characters of each in which the text ends
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
        if not self.stop_texts:
            return text * is_shown
        start = max(self.matched)  # characters held so far
        self.held.append((text, is_shown))
        for number, char in enumerate(text, start=start + 1):
            self.matched = [matched(stop, lengths, n, char)
                            for (stop, lengths), n in zip(self.stop_texts, self.matched)]
            found = [n for (stop, _), n in zip(self.stop_texts, self.matched) if n == len(stop)]
            if found:
                self.stopped = True
                text = self._take(number - max(found))
                self.held.clear()
                return text
        return self._take(start + len(text) - max(self.matched))

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
