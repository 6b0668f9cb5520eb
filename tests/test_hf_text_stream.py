"""hf/text_stream.py: text is shown once, up to a stop text."""

import random
import re

import pytest

from hf.tokenizer import load_encoding


@pytest.fixture(scope="module")
def encoding():
    return load_encoding("demo")


def test_random_stop_texts(encoding):
    """Bug: a partly shown stop text, one that overlaps another is not found, or the text is cut in another place."""
    rng = random.Random(1)
    word = lambda low, high: "".join(rng.choices("ab", k=rng.randint(low, high)))
    for _ in range(300):
        text, stop = word(0, 40), [word(1, 6) for _ in range(rng.randint(1, 4))]
        stream, shown = encoding.stream(stop), ""
        for part in re.findall(rng.choice(["..?.?.?", "."]), text):  # tokens of several characters, or of one
            assert stream.length >= len(shown)
            shown += stream.feed(encoding.encode(part))
        ends = [end for end in range(len(text) + 1) if text[:end].endswith(tuple(stop))]
        longest = ends and max(len(one) for one in stop if text[:ends[0]].endswith(one))
        want = text[:ends[0] - longest] if ends else text
        assert want.startswith(shown) and shown + stream.finish() == want and stream.stopped == bool(ends)


def test_hidden_tokens_are_part_of_stop_texts(encoding):
    """Bug: a stop text with a control token in it, or in the reasoning, is not seen; hidden text is shown with what was
    held back, or moves the offsets of log-probabilities."""
    a, b, c, x = (encoding.encode(char)[0] for char in "abcx")
    read = lambda stop, tokens, **more: [*map(encoding.stream([*stop, x], **more).piece, tokens)]
    assert read(["bxc"], [a, b, x, c, a]) == [(0, "a"), (1, ""), (2, ""), (2, ""), (3, "")]
    assert read(["bxd"], [a, b, x, c, a]) == [(0, "a"), (1, ""), (2, ""), (2, "bc"), (3, "a")]
    assert read([], [a, c, b, a], begin=c) == read(["ax"], [a, c, b, c], begin=c)[:2] + [(0, "b"), (1, "a")]
    assert read(["ba"], [b, a, c, b], begin=c) == [(0, "")] * 4


def test_held_text_costs_constant_time_per_character(encoding):
    """Bug: each token looks at all of the text that is held back, so a long stop text stops the server."""
    class Counted(str):
        def startswith(self, text):
            steps.append(1)
            return super().startswith(text)
    steps = []
    stream = encoding.stream([Counted("a" * 2000 + "b")])
    tokens = encoding.encode("a") * 1000
    assert stream.feed(tokens) == "" and len(steps) <= 2000 and len(stream.held) == 1000
    assert stream.feed(encoding.encode("c")) == "a" * 1000 + "c" and not stream.held
