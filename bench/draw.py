"""`python -m bench draw`: the pictures of README.md and docs/, from records and from a saved run.

Text stays text, and the same records give the same bytes. A page of GitHub is white or nearly
black: a chart has no background and mid-tones that are readable on both; a run is on a dark card,
its tokens in the colours of generate.py on a terminal.
"""

import io
import re
import warnings
from argparse import Namespace
from itertools import accumulate
from math import inf
from pathlib import Path

from bench import hardware, make_folder, roofline, write_file
from bench.steps import SIZES
from clover import MAX_TREE
from model import InputError, read_json
from tools.cli import DEMO
from tools.printer import HEAD_COLOURS, LOOKUP_COLOUR
from tools.tune import PREFIX

WIDTH = 760            # of a picture, in pixels, of which 96 are an inch
COLUMNS = 88           # of text.svg
LETTER = 0.61          # width of a monospaced character, in font sizes
NODES, LABEL = 16, 14  # of tree.svg: boxes, characters of one
TREE_SIZE = 17         # of tokens-per-step.svg
GREY, GREEN, AMBER, BLUE, PINK = "#727a84", "#2c8a3f", "#a26f0a", "#2f7ad4", "#c94a8f"
CARD, FRAME, BRIGHT, DIM = "#161b22", "#6e7681", "#f0f6fc", "#8b949e"
ANSI = {31: "#ff7b72", 32: "#3fb950", 33: "#e3b341", 34: "#58a6ff", 35: "#d2a8ff", 36: "#39c5cf"}
COLOURED = "text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"
STYLE = dict.fromkeys(COLOURED, GREY) | {
    "svg.fonttype": "none", "svg.hashsalt": "clover", "text.parse_math": False, "font.size": 9.75,
    "font.sans-serif": ["Segoe UI", "Noto Sans", "Helvetica", "Arial", "DejaVu Sans"],
    "font.monospace": ["DejaVu Sans Mono", "Menlo", "Liberation Mono", "Lucida Console"],
    "figure.facecolor": "none", "axes.facecolor": "none", "axes.spines.left": False,
    "axes.spines.top": False, "axes.spines.right": False, "lines.markersize": 4}
DRAFTERS = {  # as records call them: (name, colour)
    "plain": ("plain decoding", GREY), "medusa": ("Medusa", GREEN), "hydra": ("Hydra", GREEN),
    "clover": ("Clover", GREEN), "clover2": ("Clover-2", GREEN), "lookup": ("lookup alone", AMBER),
    "clover + lookup": ("Clover + lookup", BLUE), "auto": ("auto (default)", PINK)}
MODELS = {"30b": PINK, "8b": GREEN, "1.5b": BLUE}  # of roofline.svg


def card(figure, title, height, own, drafted_by, below):
    """Axes in pixels, y downwards, with what the colours mean. own: the model's own tokens."""
    figure.set(size_inches=(WIDTH / 96, height / 96), label=title, facecolor=CARD, edgecolor=FRAME,
               linewidth=1)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
    axes.set_axis_off()
    colours = {own: DIM, "guessed by:": BRIGHT} | {by: colour_of(by) for by in sorted(drafted_by)}
    x = 24
    for words, colour in colours.items():
        axes.text(x, 34, words, color=colour)
        x += 7.2 * len(words) + 16
    axes.text(24, height - 24, below, color=BRIGHT)
    return axes


def printable(words):
    """Text without characters that XML forbids or that no one sees."""
    return "".join(c if c.isprintable() else "\ufffd" for c in words)


def colour_of(guessed_by):
    """On the card, of what "head 1", "lookup" or the "model" guessed."""
    if guessed_by in ("model", "lookup"):
        return DIM if guessed_by == "model" else ANSI[LOOKUP_COLOUR]
    return ANSI[HEAD_COLOURS[min(int(guessed_by.removeprefix("head ")), len(HEAD_COLOURS)) - 1]]


def draw_text(figure, run):
    steps = [step for step in run["drafts"] if step["prompt"] == 0]
    tokens = [token for step in steps
              for token in zip(step["emitted"], step["guessed_by"], strict=True)]
    row = column = 0
    placed = []
    for words, by in [(run["prompts"][0], "prompt"), *tokens]:
        for part in re.findall(r"\n| +|\S+", words.expandtabs(4)):
            if part == "\n" or column + len(part) > COLUMNS:
                row += 1
                column = 0
            placed.append((24 + 13 * LETTER * column, 66 + 19 * row, part, by))
            column += len(part) if part != "\n" else 0
    axes = card(figure, "A text, each token in the colour of what guessed it", 122 + 19 * row,
                "not guessed", {by for _, by in tokens} - {"model"},
                f"{len(tokens)} tokens in {len(steps)} steps: {len(tokens) / len(steps):.2f} "
                "tokens per step (plain decoding: 1)")
    for x, y, part, by in placed:
        if not part.isspace():
            axes.text(x, y, printable(part), family="monospace",
                      color=BRIGHT if by == "prompt" else colour_of(by))


def layout(step):
    """[(x, y, label, parent)] of a step's nodes and, as the last one, of the model's own token:
    depths from left to right, the accepted path along the top."""
    parents = [*step["parents"], step["path"][-1]]
    labels = [printable(words.translate(str.maketrans(" \n\t", "·↵⇥")))
              for words in (*step["nodes"], step["emitted"][-1])]
    labels = [words if len(words) <= LABEL else words[:LABEL - 1] + "…" for words in labels]
    places = {}

    def place(node, depth, row):
        """Gives a node and its descendants their places -> the first row that is free."""
        places[node] = depth, row
        children = [i for i, parent in enumerate(parents) if parent == node]
        for child in sorted(children, key=lambda i: i not in (*step["path"], len(step["nodes"]))):
            row = place(child, depth + 1, row)
        return row if children else row + 1

    place(0, 0, 0)
    widths = [12 * LETTER * max(len(labels[i]) for i in places if places[i][0] == depth) + 36
              for depth in range(max(places.values())[0] + 1)]
    lefts = [*accumulate(widths, initial=24)]
    return [(lefts[places[i][0]], 76 + 34 * places[i][1], labels[i], parent)
            for i, parent in enumerate(parents)]


def shows_the_method(step):
    """Whether a step is small and has a root that can be seen, two accepted guesses, a branch that
    was not accepted and the model's own token."""
    return (len(step["parents"]) < NODES and len(step["path"]) > 2
            and len(set(step["parents"])) < len(step["parents"]) and step["nodes"][0].strip()
            and step["guessed_by"][-1:] == ["model"] and max(layout(step))[0] < WIDTH - 130)


def draw_tree(figure, run):
    steps = filter(shows_the_method, run["drafts"])
    step = max(steps, key=lambda step: len(step["path"]), default=None)
    if not step:
        raise InputError(f"the run has no step of fewer than {NODES} nodes with two accepted "
                         "guesses and another branch; save a run with a smaller --tree-size")
    nodes = layout(step)
    axes = card(figure, "A drafted tree, with what was accepted", max(y for _, y, *_ in nodes) + 84,
                "the model's next token", set(step["drafted_by"][1:]),
                "White: the newest token. Full: accepted, the model says the same. Outlined: "
                f"rejected.\nOne step: {len(step['path']) - 1} guesses accepted and the model's "
                f"next token, {len(step['path'])} tokens.")
    colours = [BRIGHT, *map(colour_of, (*step["drafted_by"][1:], "model"))]
    for i, ((x, y, words, parent), colour) in enumerate(zip(nodes, colours, strict=True)):
        accepted = i in (*step["path"], len(nodes) - 1)
        if i:
            left, top, *_ = nodes[parent]
            axes.plot([left + 8, x - 12, x - 12, x], [top, top, y, y], zorder=1 + accepted,
                      color=BRIGHT if accepted else FRAME, linewidth=1.5 if accepted else 0.75)
        axes.text(x + 6, y, words, color=CARD if accepted else colour, size=9, family="monospace",
                  va="center_baseline", bbox=dict(
                      boxstyle="round,pad=0.5,rounding_size=0.4", edgecolor=colour,
                      facecolor=colour if accepted else CARD, linewidth=0.75))


def chart(figure, title, height, margins, *below):
    """Axes with a title above and small lines below; the height and the margins in pixels."""
    left, right, bottom = margins
    total = height + 50 + bottom
    figure.set(size_inches=(WIDTH / 96, total / 96), label=title)
    figure.text(0, 1 - 18 / total, title, size=12, weight="bold")
    figure.text(0, 6 / total, "\n".join(below), size=9)
    return figure.add_axes((left / WIDTH, bottom / total, 1 - (left + right) / WIDTH,
                            height / total))


def measured(record):
    """What was measured and where, for the small line below a chart."""
    kind = f"temperature {record['temperature']:g}" if record.get("temperature") else "greedy"
    dtype = record["dtype"].removeprefix("torch.")
    return (f"Measured: {record['model']}/, {dtype}, {kind}, {record['prompts']} prompts, "
            f"{record['max_new_tokens']} new tokens each; {hardware(record['machine'])}")


def draw_tokens_per_step(figure, record):
    """Bars: the model's own token of each step in grey, and what was guessed right."""
    found = {"plain": 1.0} | {
        row["heads"]: row["tokens_per_step"] for row in record["decoding"]
        if (row["temperature"], row["tree_size"], row["batch_size"]) == (0, TREE_SIZE, 1)}
    steps = " or ".join(sorted({str(heads["steps"]) for heads in record["training"].values()}))
    bars = [(*DRAFTERS[name], found[name]) for name in DRAFTERS if name in found]
    axes = chart(figure, "Tokens per step", 32 * len(bars), (130, 60, 52),
                 f"{TREE_SIZE - 1} guesses per step, heads of {steps} training steps.",
                 measured(record))
    for name, colour, value in bars:
        axes.barh(name, 1, 0.7, color=GREY)
        axes.barh(name, value - 1, 0.7, 1, color=colour)
        axes.annotate(f"{value:.2f}", (value, name), (6, 0), textcoords="offset points",
                      color=colour, va="center_baseline", weight="bold")
    axes.text(0, -0.6, "not guessed", size=9)
    axes.text(1.08, -0.6, "guessed right", size=9)
    axes.set(xlim=(0, max(found.values())), ylim=(len(bars) - 0.5, -0.5))
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    axes.spines["bottom"].set_visible(False)


def label_ends(axes, ends, edge, ha):
    """Names and values at the ends of lines, each 16 pixels or more below the one above. ends:
    [(value, batch size, words, colour)]; edge: where the words begin or end, of the axes."""
    height = inf
    for value, size, words, colour in sorted(ends, reverse=True):
        _, y = axes.transAxes.inverted().transform(axes.transData.transform((size, value)))
        height = min(y, height - 16 / 340)
        axes.annotate(words, (size, value), (edge, height), textcoords="axes fraction", ha=ha,
                      va="center", color=colour, arrowprops=dict(
                          arrowstyle="-", color=colour, linewidth=0.75, shrinkA=2, shrinkB=4,
                          relpos=(ha == "right", 0.5)))


def line_chart(figure, title, lines, form, *below):
    """Lines over the batch size, with names and values at both ends; both axes are logarithmic.
    lines: {(name, colour, style): {batch size: value}}; form: of a value."""
    axes = chart(figure, f"{title} (logarithmic)", 340, (252, 180, 90), *below)
    sizes = sorted({size for points in lines.values() for size in points})
    starts, ends = [], []
    for (name, colour, style), points in lines.items():
        axes.plot(points.keys(), points.values(), style, color=colour, marker="o")
        for labels, size in zip((starts, ends), sorted({min(points), max(points)})):
            labels.append((points[size], size, f"{name} {form.format(points[size])}", colour))
    axes.set(xscale="log", yscale="log", yticks=[],
             xlabel="batch size: sequences decoded together")
    axes.minorticks_off()
    axes.set_xticks(sizes, sizes)
    axes.autoscale_view()
    label_ends(axes, starts, -0.05, "right")
    label_ends(axes, ends, 1.05, "left")


def draw_batch(figure, record):
    """Tokens per second over batch sizes, of each kind of drafter the best."""
    best = {}
    for row in sorted(record["decoding"], key=lambda row: row["batch_size"]):
        kind = re.sub(r" \d+", "", row["drafted_by"]).replace("heads", record["heads"][-1])
        style = "--" if kind in record["heads"][:-1] else "-"
        points = best.setdefault((*DRAFTERS.get(kind, (kind, GREY)), style), {})
        size = row["batch_size"]
        points[size] = max(row["tokens_per_second"], points.get(size, 0))
    line_chart(figure, "Tokens per second, all sequences together", best, "{:,.0f}",
               "Of each kind the best. Batches of more than that many prompts take one for each "
               "sequence.", measured(record))


def draw_roofline(figure, _):
    """The speed-up that bench/roofline.py predicts, of the best tree for each batch size."""
    heads, tokens = roofline.acceptance(
        Namespace(acceptance=None, heads=DEMO / "clover", temperature=0.0))
    sizes = [2 ** i for i in range(9)]
    lines = {("plain decoding", GREY, ":"): dict.fromkeys(sizes, 1.0)}
    for model, colour in MODELS.items():
        predict = roofline.Prediction(roofline.GPUS["h200"], roofline.sizes(model), heads).row
        rows = [predict(size, T, tokens(T)) for size in sizes for T in range(2, MAX_TREE + 1)]
        rows = sorted((row for row in rows if row), key=lambda row: row["speed_up"])
        best = {row["batch_size"]: row["speed_up"] for row in rows}
        lines[SIZES[model][0], colour, "-"] = dict(sorted(best.items()))
    line_chart(figure, "Predicted, not measured: speed-up on one H200", lines, "{:.2f}x",
               f"By python -m bench roofline, from the GPU's datasheet: bfloat16, {PREFIX} tokens "
               "in each cache, guesses as good", "as those of demo/clover, the best tree for each "
               "batch size. A line ends where the memory is full.")


RUN = "run", "python generate.py --prompt TEXT --json --show-tree"
PICTURES = {  # name: (what draws it, its record, what writes that)
    "text.svg": (draw_text, *RUN), "tree.svg": (draw_tree, *RUN),
    "tokens-per-step.svg": (draw_tokens_per_step, "heads-cpu.json", "python -m bench heads --out"),
    "batch.svg": (draw_batch, "decode-cpu.json", "python -m bench decode --out"),
    "roofline.svg": (draw_roofline, None, None)}


def render(picture, *given, kind="svg"):
    """The bytes of what picture(figure, *given) draws."""
    try:
        import matplotlib.figure
    except ImportError:
        raise InputError("drawing needs matplotlib, which is not installed: "
                         "pip install matplotlib") from None
    file = io.BytesIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of characters that the fonts here do not have
        figure = matplotlib.figure.Figure()
        picture(figure, *given)
        metadata = dict(Title=figure.get_label(), Date=None, Creator=None) if kind == "svg" else {}
        figure.savefig(file, format=kind, dpi=192, metadata=metadata)
    return file.getvalue()


def draw(name, args):
    """The bytes of a picture. Raises InputError where its record is missing or is another's."""
    picture, source, how = PICTURES[name]
    path = Path(args.run if source == "run" else f"{args.results}/{source}")
    if source and not path.is_file():
        raise InputError(f"{path} is not here; {how} writes it")
    try:
        return render(picture, source and read_json(path))
    except InputError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        kind = type(error).__name__
        raise InputError(f"{path} is not what {how} writes ({kind}: {error})") from None


def bench(args):
    """`python -m bench draw`: writes the pictures into args.out."""
    make_folder(args.out)
    for name in PICTURES:
        try:
            content = draw(name, args)
            write_file(Path(args.out) / name, content)
            print(f"{args.out}/{name}: {len(content) / 1000:.1f} kB")
        except InputError as error:
            print(f"left out: {name}: {error}")
