"""SVG by hand, for bench/draw.py: elements, text that any token may be, colours, and a chart of lines.

A page of GitHub is white or nearly black. A picture has no background, and mid-tones that are readable on both, or a
dark card of its own.
"""

import unicodedata
from itertools import pairwise
from math import log2
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

WIDTH = 760  # of a picture, in pixels
SANS = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
MONO_WIDTH = 0.61  # of a character, in font sizes
TITLE = dict(font_size=16, font_weight="bold")
KEEP_SPACES = {"xml:space": "preserve", "style": "white-space:pre"}  # for old viewers, and for new ones

GREY, GREEN, AMBER, BLUE, PINK = "#727a84", "#2c8a3f", "#a26f0a", "#2f7ad4", "#c94a8f"  # on both pages
CARD, FRAME, BRIGHT, DIM = "#161b22", "#6e7681", "#f0f6fc", "#8b949e"                   # the card, and what is on it
ANSI = {31: "#ff7b72", 32: "#3fb950", 33: "#e3b341", 34: "#58a6ff", 35: "#d2a8ff", 36: "#39c5cf"}  # on the card


def tag(name, *inside, **attributes):
    """An element. font_size=13 is the attribute font-size; numbers are rounded to a tenth."""
    show = lambda value: f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
    given = "".join(f" {key.replace('_', '-')}={quoteattr(show(value))}" for key, value in attributes.items())
    return f"<{name}{given}>{''.join(inside)}</{name}>" if inside else f"<{name}{given}/>"


def text(x, y, words, fill, **attributes):
    return tag("text", escape(printable(words)), x=x, y=y, fill=fill, **attributes)


def printable(words):
    """Text without characters that XML forbids or that no one sees: a control character becomes its picture."""
    show = lambda c: (chr(0x2400 + ord(c)) if c < " " else "\u2421" if c == "\x7f" else
                      "\ufffd" if unicodedata.category(c)[0] == "C" else c)
    return "".join(map(show, words))


def columns(words):
    """The width of a text in columns of a terminal."""
    return sum(2 if unicodedata.east_asian_width(c) in "FW" else 1 for c in words)


def picture(title, height, *parts, card=False):
    """A whole file; `title` is what a screen reader says. card: on a dark background of its own."""
    back = tag("rect", x=0.5, y=0.5, width=WIDTH - 1, height=height - 1, rx=8, fill=CARD, stroke=FRAME)
    parts = [tag("title", escape(title)), *([back] if card else []), *parts]
    return tag("svg", *(f"\n{part}" for part in parts), "\n", xmlns="http://www.w3.org/2000/svg", width=WIDTH,
               height=height, viewBox=f"0 0 {WIDTH} {height}", role="img", font_family=SANS, font_size=13) + "\n"


# ---------------------------------------------------------------------------------------------------------------------
# Charts

def chart(title, height, below, *parts):
    """A picture of parts of that height, with a title and with small lines below."""
    lines = [text(0, height + 16 * i, line, GREY, font_size=12) for i, line in enumerate(below.split("\n"), 1)]
    return picture(title, height + 16 * len(lines) + 8, text(0, 18, title, GREY, **TITLE), *parts, *lines)


class Line(NamedTuple):
    name: str
    points: list     # (batch size, value), ...
    fill: str
    width: int = 2
    dashes: str = "none"


def apart(heights, least=16):
    """Heights of labels, moved until there is so much between any two."""
    order, heights = sorted(range(len(heights)), key=lambda i: heights[i]), [*heights]
    for _ in range(100):
        for a, b in pairwise(order):
            lack = max(0, least - heights[b] + heights[a])
            heights[a], heights[b] = heights[a] - lack / 2, heights[b] + lack / 2
    return heights


def names(lines, ends, x, side, form):
    """Beside the ends of lines their names and values. ends: the (x, y) of each; side: -1 is left, 1 is right."""
    for line, (x_end, y_end), y in zip(lines, ends, apart([y for _, y in ends])):
        value = line.points[0 if side < 0 else -1][1]
        yield tag("path", d=f"M{x_end + 6 * side:.1f} {y_end:.1f}L{x - 4 * side:.1f} {y:.1f}", stroke=line.fill)
        yield text(x, y + 4, f"{line.name} {form.format(value)}", line.fill, text_anchor="end" if side < 0 else "start",
                   font_weight="bold" if line.width > 2 else "normal")


def log_axis(low, high, start, end):
    """A function from low..high to start..end."""
    return lambda value: start + (end - start) * log2(value / low) / (log2(high / low) or 1)


def line_chart(title, lines, ticks, form, below):
    """Lines over the batch size, each with its name and value at both ends; both axes are logarithmic. form: of a
    value."""
    left, right, top, bottom = 244, WIDTH - 180, 54, 370
    values = [value for line in lines for _, value in line.points]
    x, y = log_axis(ticks[0], ticks[-1], left, right), log_axis(min(values), max(values), bottom, top)
    parts = [tag("path", d=f"M{left} {bottom + 20}H{right}", stroke=GREY)]
    for size in ticks:
        parts += [tag("path", d=f"M{x(size):.1f} {bottom + 20}v5", stroke=GREY),
                  text(x(size), bottom + 40, str(size), GREY, text_anchor="middle")]
    for line in lines:
        d = "M" + "L".join(f"{x(size):.1f} {y(value):.1f}" for size, value in line.points)
        parts.append(tag("path", d=d, fill="none", stroke=line.fill, stroke_width=line.width,
                         stroke_dasharray=line.dashes))
        if len(line.points) <= len(ticks):
            parts += [tag("circle", cx=x(size), cy=y(value), r=3, fill=line.fill) for size, value in line.points]
    place = lambda point: (x(point[0]), y(point[1]))
    longer = [line for line in lines if len(line.points) > 1]
    parts += names(lines, [place(line.points[0]) for line in lines], left - 30, -1, form)
    parts += names(longer, [place(line.points[-1]) for line in longer], right + 30, 1, form)
    return chart(title, bottom + 72, below, *parts,
                 text((left + right) / 2, bottom + 60, "batch size: sequences decoded together", GREY,
                      text_anchor="middle"))
