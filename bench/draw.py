"""`python -m bench draw`: the pictures of README.md, as SVG: a saved run, whose tokens have the
colours of their drafters, and speed-ups by kind of chat. Both are on a dark card that is readable
on GitHub's white and dark pages."""

import json
from html import escape
from importlib.util import find_spec

from bench import ROOT
from common.files import read_json
from model import expect

RUN = ROOT / "docs" / "img" / "run.json"  # from generate.py --json --show-tree
MEASURED = ROOT / "bench" / "results" / "cpu-zen4.jsonl"  # by `bench cpu`
TEXT, KINDS = RUN.with_name("text.svg"), RUN.with_name("kinds.svg")
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
    return f'<tspan fill="{COLOURS[drafter]}">{escape(words, quote=False)}</tspan>'


def coloured_lines(tokens):
    """(text, drafter) pairs -> lines of `span`s, wrapped before words."""
    lines = [""]
    column = 0
    for words, drafter in tokens:
        for i, part in enumerate(words.split("\n")):
            wraps = i == 0 and part.startswith(" ") and column + len(part) > COLUMNS
            if i or wraps:
                part = part.lstrip() if wraps else part
                lines.append("")
                column = 0
            lines[-1] += span(part, drafter)
            column += len(part)
    return lines


def draw_text(run):
    """The SVG of a run's prompt and output, each token in the colour of its drafter."""
    steps = run["drafts"]
    tokens = [pair for step in steps for pair in zip(step["emitted"], step["guessed_by"])]
    lines = coloured_lines([(run["prompts"][0] + "\n", "root"), *tokens])
    height = 99 + 19 * len(lines)
    legend = [span(f"by {name}    ", name) for name in sorted({name for _, name in tokens})]
    result = (f"{len(tokens)} tokens in {len(steps)} steps: {len(tokens) / len(steps):.2f} "
              "tokens per step (plain decoding: 1)")
    shapes = [line(32, "".join(legend)),
              *(line(66 + 19 * i, content, MONO) for i, content in enumerate(lines)),
              line(height - 24, result)]
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{height}" '
            'font-family="Helvetica, Arial, DejaVu Sans" font-size="13">\n'
            "<title>Generated text, each token in the colour of its drafter</title>\n"
            f'<rect width="760" height="{height}" fill="{CARD}" stroke="{FRAME}"/>\n'
            + "\n".join(shapes) + "\n</svg>\n")


def draw_kinds(rows, path):
    """Draws, from rows of `bench decode`, the speed-up of three drafters by kind of chat -> a
    matplotlib Figure."""
    from matplotlib import style
    from matplotlib.figure import Figure
    rows = [row for row in rows if row["tree_size"] == "auto"]
    kinds = [*dict.fromkeys(row["kind"].replace("_", " ") for row in rows)]
    with style.context(["dark_background", STYLE]):
        figure = Figure(figsize=(7.6, 3.2), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for axes, temperature in zip(panels, (0.0, 0.8)):
            axes.set_title(f"temperature {temperature}" if temperature else "greedy")
            for i, drafter in enumerate(dict.fromkeys(row["drafted_by"] for row in rows)):
                bars = [row["speed_up"] for row in rows
                        if (row["drafted_by"], row["temperature"]) == (drafter, temperature)]
                axes.bar([n + (i - 1) / 4 for n in range(len(kinds))], bars, 1 / 4,
                         label=drafter.replace("smollm2", "heads"))
            axes.axhline(1, color=BRIGHT, linewidth=1)
            axes.set_xticks(range(len(kinds)), kinds, rotation=20, ha="right")
            axes.set_axisbelow(True)
            axes.tick_params(labelsize=8)
        panels[0].set_ylabel("speed-up over plain decoding")
        panels[-1].legend()
        figure.savefig(path, format="svg", metadata=dict(Date=None))
    return figure


def bench():
    """`bench draw`: draws what the records hold."""
    expect(find_spec("matplotlib"), "drawing needs another package: pip install matplotlib")
    TEXT.write_text(draw_text(read_json(RUN)), encoding="utf-8")
    records = {record["part"]: record for record in map(json.loads, MEASURED.open())}
    draw_kinds(records["spec bench"]["decoding"], KINDS)
