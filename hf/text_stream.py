"""The text of an output while its tokens arrive, in whole characters, up to a stop text."""

from itertools import compress


class TextStream:
    """Decodes token ids as they arrive. Unlike decoding all at once, it may keep a leading space.

    stop: texts that end it, also where hidden tokens are part of them. hidden: ids of tokens that
    are not shown. begin: the id of a token up to which none is shown. stopped: whether a stop text
    was reached. length: characters of the text so far, also of those held back because they may
    begin a stop text."""

    def __init__(self, encoding, stop=(), hidden=(), begin=None):
        self.decode = encoding.decode
        self.stop_texts = stop
        self.held = ""   # what may be the start of a stop text
        self.shown = []  # whether each of its characters is shown
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
        return self._release(rest, self.begin is None) + self._take(len(self.held))

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
        self.held += text
        self.shown += [is_shown] * len(text)
        ends = [(start + len(stop), -len(stop)) for stop in self.stop_texts
                if (start := self.held.find(stop)) >= 0]
        if ends:  # the one that ends first, of several the longest
            self.stopped = True
            end, length = min(ends)
            text = self._take(end + length)
            self.held = ""
            return text
        # what comes before the longest start of a stop text is never looked at again
        starts = (start for start in range(len(self.held))
                  if any(stop.startswith(self.held[start:]) for stop in self.stop_texts))
        return self._take(next(starts, len(self.held)))

    def _take(self, count):
        """Removes the first `count` characters that are held; returns those that are shown."""
        taken = compress(self.held[:count], self.shown)
        self.held = self.held[count:]
        self.shown = self.shown[count:]
        return "".join(taken)
