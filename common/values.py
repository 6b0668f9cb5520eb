"""Checks values, and prints them for people."""

import sys
from functools import lru_cache

from model import expect


def one_of(what, value, supported):
    """Returns value. Raises InputError unless it equals a supported one, types included."""
    expect(any(value == other and type(value) is type(other) for other in supported),
           f"{what} {value!r} is not supported; supported: {', '.join(map(str, supported))}")
    return value


def human(number, unit=""):
    """A number for people: 9.3 M, 7.2 B; with unit "B", in bytes: 18.6 MB, 1.5 GB."""
    prefixes = ["", "k", "M", "G" if unit else "B", "T"]
    while number >= 999.5 and len(prefixes) > 1:
        number /= 1000
        del prefixes[0]
    digits = f"{number:.0f}" if number >= 99.95 else f"{number:.1f}".removesuffix(".0")
    return f"{digits} {prefixes[0]}{unit}".strip()


def one_line(error):
    """An error, or its text, as one line of at most 300 characters."""
    return " ".join(str(error).split())[:300]


@lru_cache
def warn(line):
    """Prints a line to standard error; the same line only once."""
    print(line, file=sys.stderr)
