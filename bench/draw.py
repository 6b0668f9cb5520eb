"""`python -m bench draw`: the pictures of README.md and docs/results.md, as SVG: a saved run, whose
tokens have the colours of their drafters, and speed-ups by kind of chat. All are on a dark card
that is readable on GitHub's white and dark pages."""

import json
from xml.sax.saxutils import escape

from bench import ROOT
from common.files import read_json
from model import InputError

RUN = ROOT / "docs" / "img" / "run.json"  # from generate.py --json --show-tree
MEASURED = ROOT / "bench" / "results" / "cpu-zen4.jsonl"  # by `bench cpu`
PICTURE = RUN.with_name("text.svg")
KINDS = {"spec bench": RUN.with_name("kinds.svg"),
         "coder, spec bench": RUN.with_name("kinds-coder.svg")}
WIDTH = 760
COLUMNS = 88  # characters per line
CARD, FRAME, BRIGHT, DIM = "#161b22", "#6e7681", "#f0f6fc", "#8b949e"
COLOURS = {"root": BRIGHT, "model": DIM, "lookup": "#e3b341", "head 1": "#3fb950",
           "head 2": "#39c5cf", "head 3": "#58a6ff", "head 4": "#d2a8ff"}
MONO = 'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace"'
STYLE = {"figure.facecolor": CARD, "savefig.facecolor": CARD, "axes.facecolor": CARD,
         "axes.grid": True, "grid.color": FRAME, "grid.alpha": 0.4, "legend.fontsize": 8,
         "axes.titlesize": 10, "svg.fonttype": "none", "svg.hashsalt": "clover"}


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


def draw_kinds(rows, path):
    """Draws the speed-up over plain decoding by kind of chat, one bar per drafter, greedy and
    sampled, of the rows of `bench decode` with tree size "auto", as SVG. Returns a matplotlib
    Figure. Raises InputError without matplotlib."""
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("bench draw needs matplotlib; pip install matplotlib") from None
    rows = [row for row in rows if row["tree_size"] == "auto"]
    temperatures = sorted({row["temperature"] for row in rows})
    kinds = [*dict.fromkeys(row["kind"] for row in rows)]
    drafters = [*dict.fromkeys(row["drafted_by"] for row in rows)]
    with style.context(["dark_background", STYLE]):
        figure = Figure(figsize=(7.6, 3.2), layout="constrained")
        panels = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
        for axes, temperature in zip(panels, temperatures):
            axes.set_title(f"temperature {temperature:g}" if temperature else "greedy")
            for i, drafter in enumerate(drafters):
                bars = {row["kind"]: row["speed_up"] for row in rows
                        if (row["drafted_by"], row["temperature"]) == (drafter, temperature)}
                at = [kinds.index(kind) + (i - (len(drafters) - 1) / 2) / (len(drafters) + 1)
                      for kind in bars]
                axes.bar(at, bars.values(), 1 / (len(drafters) + 1),
                         label=drafter.replace("smollm2", "heads"))
            axes.axhline(1, color=BRIGHT, linewidth=1)
            axes.set_xticks(range(len(kinds)), [kind.replace("_", " ") for kind in kinds],
                            rotation=20, ha="right")
            axes.set_axisbelow(True)
            axes.tick_params(labelsize=8)
        panels[0].set_ylabel("speed-up over plain decoding")
        panels[-1].legend()
        figure.savefig(path, format="svg", metadata=dict(Date=None))
    return figure


def bench():
    """`bench draw`: draws what the records hold, and prints the files."""
    PICTURE.write_text(draw_text(read_json(RUN)), encoding="utf-8")
    print(PICTURE)
    records = {record["part"]: record for record in map(json.loads, MEASURED.open())}
    for part, picture in KINDS.items():
        if part in records:
            draw_kinds(records[part]["decoding"], picture)
            print(picture)
