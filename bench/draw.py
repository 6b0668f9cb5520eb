"""`python -m bench draw`: the pictures of README.md and docs/results.md, as SVG: a saved run, whose
tokens have the colours of their drafters, and throughput over batch size. Both are on a dark card
that is readable on GitHub's white and dark pages."""

import json
from collections import defaultdict
from statistics import fmean
from xml.sax.saxutils import escape

from bench import ROOT, roofline
from model import InputError, read_json

RUN = ROOT / "docs" / "img" / "run.json"  # from generate.py --json --show-tree
PICTURE = RUN.with_name("text.svg")
BATCHES = RUN.with_name("batches.svg")
LARGEST = 256  # batch size of the prediction
PREDICTED = ("plain, T = 1", "heads + lookup, T = 5", "heads + lookup, T = 17",
             "chain of 5 at 0.4")  # of `roofline.predict`
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


def measured(records):
    """{label: [(B, tokens per second)]} of SmolLM2 in records of `bench gpu`, greedy, means over
    the seeds; the last record that has a (label, B) counts."""
    points = {}
    for record in records:
        rates = defaultdict(list)
        for row in map(json.loads, record.read_text().splitlines()):
            if row.get("part") == "smollm2" and row.get("temperature") == 0:
                T = row["tree_size"]
                size = T if T == "auto" else f"T = {T}"
                label = "plain" if T == 1 else f"{row['drafter']}, {size}"
                rates[label, row["batch_size"]].append(row["tokens_per_second"])
        points |= {key: fmean(values) for key, values in rates.items()}
    lines = defaultdict(list)
    for (label, B), rate in sorted(points.items()):
        lines[label].append((B, rate))
    return lines


def draw_batches(records):
    """A matplotlib Figure like Figure 2 of the paper: throughput over batch size, predicted for a
    model of 32 B parameters, and measured for SmolLM2 if the records (paths) have it. Raises
    InputError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("bench draw needs matplotlib; pip install matplotlib") from None
    lines = measured(records)
    figure = Figure(figsize=(7.6, 3.6), facecolor=CARD, layout="constrained")
    axes, *others = figure.subplots(1, 2 if lines else 1, squeeze=False)[0]
    axes.set_title("predicted: 32 B parameters, H100", fontsize=10)
    for name, (_, rates, _) in roofline.predict(*roofline.NOMINAL).items():
        if name in PREDICTED:
            axes.plot(range(1, LARGEST + 1), rates[:LARGEST], label=name)
    for other in others:
        other.set_title("measured: SmolLM2-135M, H100", fontsize=10)
        for label, points in lines.items():
            other.plot(*zip(*points), marker="o", label=label)
    for part in figure.axes:
        style(part)
    return figure


def style(axes):
    """Logarithmic axes in the card's colours; plain decoding is the brightest line."""
    colours = iter(list(COLOURS.values())[2:])
    for drawn in axes.lines:
        drawn.set_color(BRIGHT if drawn.get_label().startswith("plain") else next(colours))
    axes.set_facecolor(CARD)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set(xlabel="sequences decoded together, B", ylabel="tokens per second")
    axes.tick_params(which="both", colors=BRIGHT)
    axes.grid(color=FRAME, alpha=0.4)
    for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
        text.set_color(BRIGHT)
    axes.spines[:].set_color(FRAME)
    axes.legend(facecolor=CARD, edgecolor=FRAME, labelcolor=BRIGHT, fontsize=8)


def save(figure, path):
    """Writes a Figure as SVG, with the same bytes every time."""
    from matplotlib import rc_context
    with rc_context({"svg.hashsalt": "clover", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata=dict(Date=None))


def bench():
    PICTURE.write_text(draw_text(read_json(RUN)), encoding="utf-8")
    records = sorted((ROOT / "bench" / "results").glob("gpu-h100*.jsonl"))
    save(draw_batches(records), BATCHES)
    print(PICTURE, BATCHES, sep="\n")
