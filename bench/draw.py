"""`python -m bench draw`: the README's picture, drawn from a saved run as SVG. Tokens have the
colours of their drafters, on a dark card that is readable on GitHub's white and dark pages."""

from xml.sax.saxutils import escape

from bench import ROOT
from model import read_json

RUN = ROOT / "docs" / "img" / "run.json"  # from generate.py --json --show-tree
PICTURE = RUN.with_name("text.svg")
WIDTH = 760
COLUMNS = 88  # characters per line
CARD, FRAME, BRIGHT, DIM = "#161b22", "#6e7681", "#f0f6fc", "#8b949e"
COLOURS = {"root": BRIGHT, "model": DIM, "lookup": "#e3b341", "head 1": "#3fb950",
           "head 2": "#39c5cf", "head 3": "#58a6ff", "head 4": "#d2a8ff"}
MONO = 'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace"'


def line(y, content, style=""):
    # Chromium ignores xml:space on the svg element
    return f'<text x="24" y="{y}" fill="{BRIGHT}" xml:space="preserve" {style}>{content}</text>'


def span(words, drafter):
    words = "".join(c if c.isprintable() else "\ufffd" for c in words)  # XML forbids some
    return f'<tspan fill="{COLOURS[drafter]}">{escape(words)}</tspan>'


def draw_text(run):
    """The SVG of a run's prompt and output, each token in the colour of its drafter."""
    steps = run["drafts"]
    tokens = [pair for step in steps for pair in zip(step["emitted"], step["guessed_by"])]
    lines = [""]
    column = 0
    for words, drafter in [(run["prompts"][0] + "\n", "root"), *tokens]:
        for i, part in enumerate(words.split("\n")):
            wraps = i == 0 and part.startswith(" ") and column + len(part) > COLUMNS
            if i or wraps:
                part = part.lstrip() if wraps else part
                lines.append("")
                column = 0
            lines[-1] += span(part, drafter)
            column += len(part)
    height = 99 + 19 * len(lines)
    legend = [span(f"by {name}    ", name) for name in sorted({name for _, name in tokens})]
    result = (f"{len(tokens)} tokens in {len(steps)} steps: {len(tokens) / len(steps):.2f} "
              "tokens per step (plain decoding: 1)")
    shapes = [line(32, "".join(legend)),
              *(line(66 + 19 * i, content, MONO) for i, content in enumerate(lines)),
              line(height - 24, result)]
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            'font-family="Helvetica, Arial, DejaVu Sans" font-size="13">\n'
            "<title>Generated text, each token in the colour of its drafter</title>\n"
            f'<rect width="{WIDTH}" height="{height}" fill="{CARD}" stroke="{FRAME}"/>\n'
            + "\n".join(shapes) + "\n</svg>\n")


def bench():
    PICTURE.write_text(draw_text(read_json(RUN)), encoding="utf-8")
    print(PICTURE)
