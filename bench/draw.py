"""`python -m bench draw`: the pictures of README.md and docs/, from records and from a saved run.

matplotlib draws them, in pixels. Text stays text, and the same records give the same bytes. A page
of GitHub is white or nearly black: a picture has no background and mid-tones that are readable on
both, or a dark card of its own, where tokens have the colours of generate.py on a terminal.
"""

import io
import re
import unicodedata
import warnings
from argparse import Namespace
from itertools import groupby
from math import log2
from pathlib import Path

from bench import hardware, make_folder, roofline, write_file
from bench.steps import SIZES
from clover import MAX_TREE
from model import InputError, read_json
from tools.cli import DEMO
from tools.printer import HEAD_COLOURS, LOOKUP_COLOUR
from tools.tune import PREFIX

WIDTH = 760        # of a picture, in pixels
LARGEST = 100_000  # bytes of a picture
COLUMNS, LINES = 88, 40  # of text.svg, at most
LETTER = 0.61      # width of a monospaced character, in font sizes
LABEL = 14         # of tree.svg: characters of a box,
NODES = 16         # boxes,
GAP = 24           # pixels between columns
TREE_SIZE = 17     # of tokens-per-step.svg
GREY, GREEN, AMBER, BLUE, PINK = "#727a84", "#2c8a3f", "#a26f0a", "#2f7ad4", "#c94a8f"
CARD, FRAME, BRIGHT, DIM = "#161b22", "#6e7681", "#f0f6fc", "#8b949e"
ANSI = {31: "#ff7b72", 32: "#3fb950", 33: "#e3b341", 34: "#58a6ff", 35: "#d2a8ff", 36: "#39c5cf"}
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "clover", "text.parse_math": False,
         "font.sans-serif": ["Segoe UI", "Noto Sans", "Helvetica", "Arial", "DejaVu Sans"],
         "font.monospace": ["DejaVu Sans Mono", "Menlo", "Liberation Mono", "Lucida Console"]}
BARS = {"plain": ("plain decoding", GREY), "medusa": ("Medusa", GREEN), "hydra": ("Hydra", GREEN),
        "clover": ("Clover", GREEN), "clover2": ("Clover-2", GREEN),
        "lookup": ("lookup alone", AMBER), "clover + lookup": ("Clover + lookup", BLUE)}
LOOKS = {"heads": ("{} heads", GREEN, 2), "heads + lookup": ("{} + lookup", BLUE, 2),
         "plain": ("plain decoding", GREY, 2), "lookup": ("lookup", AMBER, 2),
         "auto": ("auto (default)", PINK, 4)}                   # of batch.svg: name, colour, width
GPU = "h200"  # of roofline.svg
MODELS = {"30b": PINK, "8b": GREEN, "1.5b": BLUE}


def canvas(height, card=False):
    """Axes over all of a picture, in pixels, y downwards. card: on a dark background."""
    from matplotlib.figure import Figure
    figure = Figure((WIDTH / 96, height / 96), facecolor="none")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
    axes.set_axis_off()
    if card:
        box(axes, 0.5, 0.5, WIDTH - 1, height - 1, CARD, FRAME, radius=8)
    return axes


def text(axes, x, y, words, colour, size=13, **options):
    """size: in pixels, of which 96 are 72 points."""
    axes.text(x, y, printable(words), color=colour, size=0.75 * size, **options)


def line(axes, x, y, colour, width=1, **options):
    axes.plot(x, y, color=colour, linewidth=0.75 * width, clip_on=False, **options)


def box(axes, x, y, width, height, fill, edge="none", radius=0.001):
    from matplotlib.patches import FancyBboxPatch
    style = f"round,pad=0,rounding_size={radius}"
    axes.add_patch(FancyBboxPatch((x, y), width, height, style, facecolor=fill, edgecolor=edge,
                                  linewidth=0.75, clip_on=False))


def printable(words):
    """Text without characters that XML forbids or that no one sees."""
    show = lambda c: (chr(0x2400 + ord(c)) if c < " " else "\u2421" if c == "\x7f" else
                      "\ufffd" if unicodedata.category(c)[0] == "C" else c)
    return "".join(map(show, words))


# -------------------------------------------------------------------------------------------------
# A run: its text, each token in the colour of what guessed it, and a drafted tree

def colour_of(guessed_by):
    """On the card, of what "head 1", "lookup" or the "model" guessed."""
    if guessed_by in ("model", "lookup"):
        return DIM if guessed_by == "model" else ANSI[LOOKUP_COLOUR]
    return ANSI[HEAD_COLOURS[min(int(guessed_by.removeprefix("head ")), len(HEAD_COLOURS)) - 1]]


def legend(axes, y, own, drafted_by):
    """What the colours on the card mean. own: the words for the model's own tokens."""
    x = 24
    pairs = [("guessed by:", BRIGHT), *((by, colour_of(by)) for by in sorted(drafted_by))]
    for words, colour in [(own, DIM), *(pairs if drafted_by else ())]:
        text(axes, x, y, words, colour)
        x += 7.2 * len(words) + 16


def place(pieces):
    """[(text, colour)] -> (line, column, colour, character) of each, in lines of COLUMNS."""
    row = column = 0
    for words, colour in pieces:
        for c in words.replace("\r\n", "\n").replace("\t", "    "):
            if c == "\n" or column >= COLUMNS:
                row, column = row + 1, 0
            if c != "\n":
                yield row, column, colour, c
                column += 1 + (unicodedata.east_asian_width(c) in "FW")


def draw_text(run):
    steps = [step for step in run["drafts"] if step["prompt"] == 0]
    tokens = [(words, by) for step in steps
              for words, by in zip(step["emitted"], step["guessed_by"], strict=True)]
    if not tokens:
        raise InputError("the run has no steps of its first prompt; save another")
    coloured = [(run["prompts"][0], BRIGHT), *((words, colour_of(by)) for words, by in tokens)]
    placed = [at for at in place(coloured) if at[0] < LINES and not at[3].isspace()]
    below = 95 + 19 * placed[-1][0]
    axes = canvas(below + 22, card=True)
    legend(axes, 30, "not guessed", {by for _, by in tokens} - {"model"})
    side_by_side = lambda pair: (pair[1][0], pair[1][2], pair[1][1] - pair[0])
    for _, pairs in groupby(enumerate(placed), side_by_side):
        (row, column, colour, _), *_ = found = [at for _, at in pairs]
        text(axes, 24 + 13 * LETTER * column, 62 + 19 * row, "".join(c for *_, c in found), colour,
             family="monospace")
    rate = f"{len(tokens) / len(steps):.2f} tokens per step (plain decoding: 1)"
    text(axes, 24, below, f"{len(tokens)} tokens in {len(steps)} steps: {rate}", BRIGHT)
    return "A text, each token in the colour of what guessed it", axes


def label(words):
    """A token's text for its box: spaces and ends of lines can be seen, and a long one is cut."""
    words = printable(words.replace(" ", "·").replace("\n", "↵").replace("\t", "⇥"))
    return words if len(words) <= LABEL else words[:LABEL - 1] + "…"


def layout(step):
    """[(x, y, width, label, colour, parent, accepted)] of a step's nodes and, as the last one, of
    the model's own token: depths from left to right, the accepted path along the top."""
    parents = [*step["parents"], step["path"][-1]]
    accepted = {*step["path"], len(step["nodes"])}
    labels = [label(words) for words in (*step["nodes"], step["emitted"][-1])]
    colours = [BRIGHT, *map(colour_of, (*step["drafted_by"][1:], "model"))]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    rows, n_rows, todo = {}, 0, [0]
    while todo:  # a node has the row of its first child; one without children a row of its own
        rows[node := todo.pop()] = n_rows
        children = [i for i, parent in enumerate(parents) if parent == node]
        todo += sorted(children, key=lambda i: (i in accepted, -i))
        n_rows += not children
    widths = [max(16 + 12 * LETTER * len(labels[i]) for i in rows if depths[i] == depth)
              for depth in range(max(depths) + 1)]
    lefts = [24 + sum(widths[:depth]) + GAP * depth for depth in range(len(widths))]
    return [(lefts[depth], 106 + 34 * rows[i], widths[depth], labels[i], colours[i], parents[i],
             i in accepted) for i, depth in enumerate(depths)]


def shows_the_method(step):
    """Whether a step is small and has a root that can be seen, two accepted guesses, a branch that
    was not accepted and the model's own token."""
    parents = step["parents"]
    return (len(parents) < NODES and len(step["path"]) > 2 and len(set(parents)) < len(parents)
            and step["guessed_by"][-1:] == ["model"] and bool(step["nodes"][0].strip()))


def draw_tree(run):
    steps = [(step, layout(step)) for step in run["drafts"] if shows_the_method(step)]
    steps = [pair for pair in steps if max(x + width for x, _, width, *_ in pair[1]) < WIDTH - 23]
    if not steps:
        raise InputError(f"the run has no step of fewer than {NODES} nodes with two accepted "
                         "guesses and another branch; save a run with a smaller --tree-size")
    step, nodes = max(steps, key=lambda pair: len(pair[0]["path"]))
    guesses = len(step["path"]) - 1
    below = max(y for _, y, *_ in nodes) + 34
    axes = canvas(below + 26, card=True)
    text(axes, 24, 36, f"One step: {guesses} guesses accepted, {guesses + 1} tokens", BRIGHT, 16,
         weight="bold")
    legend(axes, 64, "the model's next token", {*step["drafted_by"][1:]})
    curve = [(i / 16, (i / 16) ** 2 * (3 - i / 8)) for i in range(17)]
    for x, y, width, words, colour, parent, accepted in nodes:
        if parent >= 0:
            start = nodes[parent][1]
            line(axes, [x - GAP * (1 - t) for t, _ in curve],
                 [start + (y - start) * share for _, share in curve],
                 *((BRIGHT, 2) if accepted else (FRAME, 1)), zorder=1)
        inside, outside = (colour, CARD) if accepted else (CARD, colour)
        box(axes, x, y - 12, width, 24, inside, colour, radius=5)
        text(axes, x + width / 2, y + 4, words, outside, 12, ha="center", family="monospace")
    text(axes, 24, below + 4, "White: the newest token. Full: accepted, the model says the same. "
         "Outlined: rejected. Grey: comes free.", DIM)
    return "A drafted tree, with what was accepted", axes


# -------------------------------------------------------------------------------------------------
# Charts

def chart(title, height, *below):
    """A canvas with a title, `height` pixels for what is drawn, and small lines below."""
    axes = canvas(height + 16 * len(below) + 8)
    text(axes, 0, 18, title, GREY, 16, weight="bold")
    for i, words in enumerate(below, 1):
        text(axes, 0, height + 16 * i, words, GREY, 12)
    return axes


def measured(record):
    """What was measured and where, for the small line below a chart."""
    kind = f"temperature {record['temperature']:g}" if record.get("temperature") else "greedy"
    dtype = record["dtype"].removeprefix("torch.")
    return (f"Measured: {record['model']}/, {dtype}, {kind}, {record['prompts']} prompts, "
            f"{record['max_new_tokens']} new tokens each; {hardware(record['machine'])}")


def draw_tokens_per_step(record):
    """Bars: the model's own token of each step in grey, and what was guessed right."""
    found = {row["heads"]: row["tokens_per_step"] for row in record["decoding"]
             if (row["temperature"], row["tree_size"], row["batch_size"]) == (0, TREE_SIZE, 1)}
    found = {"plain": 1.0} | found if found else {}
    bars = [(*BARS[name], found[name]) for name in BARS if name in found]
    steps = " or ".join(sorted({str(heads["steps"]) for heads in record["training"].values()}))
    axes = chart("Tokens per step", 70 + 32 * len(bars),
                 f"{TREE_SIZE - 1} guesses per step, heads of {steps} training steps.",
                 measured(record))
    left = 130
    one = (WIDTH - 190) / max(value for *_, value in bars)
    text(axes, left, 50, "not guessed", GREY, 12)
    text(axes, left + max(one + 2, 100), 50, "guessed right", GREY, 12)
    for i, (words, colour, value) in enumerate(bars):
        y = 62 + 32 * i
        text(axes, left - 12, y + 15, words, GREY, ha="right")
        box(axes, left, y, one, 22, GREY)
        box(axes, left + one + 2, y, max(0.0, one * (value - 1) - 2), 22, colour)
        text(axes, left + one * value + 8, y + 15, f"{value:.2f}", colour, weight="bold")
    return "Tokens per step", axes


def log_axis(values, start, end):
    """A function from the least and the largest of values to start and end."""
    low, high = min(values), max(values)
    return lambda value: start + (end - start) * log2(value / low) / (log2(high / low) or 1)


def line_chart(title, lines, form, *below, ticks=()):
    """Lines over the batch size, with names and values at both ends; both axes are logarithmic.
    lines: {(name, colour, width, dashes): {batch size: value}}, sizes in order; form: of a
    value."""
    left, right, top, bottom = 244, WIDTH - 180, 54, 370
    axes = chart(title, bottom + 72, *below)
    ticks = ticks or sorted({size for points in lines.values() for size in points})
    values = [value for points in lines.values() for value in points.values()]
    x, y = log_axis(ticks, left, right), log_axis(values, bottom, top)
    line(axes, [left, right], [bottom + 20] * 2, GREY)
    for size in ticks:
        line(axes, [x(size)] * 2, [bottom + 20, bottom + 25], GREY)
        text(axes, x(size), bottom + 40, str(size), GREY, ha="center")
    text(axes, (left + right) / 2, bottom + 60, "batch size: sequences decoded together", GREY,
         ha="center")
    ends = ([], [])  # left, right: (height, words, colour, width, x) of each label
    for (name, colour, width, dashes), points in lines.items():
        line(axes, [*map(x, points)], [*map(y, points.values())], colour, width, linestyle=dashes,
             marker="o" if len(points) <= len(ticks) else None, markersize=4)
        for labels, size in zip(ends, dict.fromkeys((min(points), max(points)))):
            words = f"{name} {form.format(points[size])}"
            labels.append((y(points[size]), words, colour, width, x(size)))
    for labels, side, edge in zip(ends, (-1, 1), (left - 30, right + 30)):
        at = 0
        for height, words, colour, width, x_end in sorted(labels):
            at = max(height, at + 16)  # labels keep off each other
            line(axes, [x_end + 6 * side, edge - 4 * side], [height, at], colour)
            text(axes, edge, at + 4, words, colour, ha="right" if side < 0 else "left",
                 weight="bold" if width > 2 else "normal")
    return title, axes


def look(drafted_by, heads):
    """(name, colour, width, dashes) of a row's line. heads: the last of these is "heads" in
    rows."""
    kind = re.sub(r" \d+", "", drafted_by)
    if kind in heads:
        return f"{kind.capitalize()} heads", GREEN, 2, (0, (2.5, 1.5))
    name, *rest = LOOKS.get(kind, (drafted_by, GREY, 2))
    return name.format(heads[-1].capitalize()), *rest, "-"


def draw_batch(record):
    """Tokens per second over batch sizes, of each kind of drafter the best."""
    best = {}
    by_speed = sorted(record["decoding"], key=lambda row: row["tokens_per_second"])
    for row in sorted(by_speed, key=lambda row: row["batch_size"]):
        points = best.setdefault(look(row["drafted_by"], record["heads"]), {})
        points[row["batch_size"]] = row["tokens_per_second"]
    return line_chart(
        "Tokens per second, all sequences together (logarithmic)", best, "{:,.0f}",
        "Of each kind the best. Batches of more than that many prompts take one for each sequence.",
        measured(record))


def draw_roofline(_):
    """The speed-up that bench/roofline.py predicts, of the best tree for each batch size."""
    given = Namespace(acceptance=None, heads=DEMO / "clover", temperature=0.0)
    heads, tokens = roofline.acceptance(given)
    sizes = sorted({round(2 ** (i / 4)) for i in range(33)})
    lines = {("plain decoding", GREY, 2, (0, (1, 2))): dict.fromkeys(sizes, 1.0)}
    for model, colour in MODELS.items():
        predict = roofline.Prediction(roofline.GPUS[GPU], roofline.sizes(model), heads).row
        points = lines[SIZES[model][0], colour, 2, "-"] = {}
        for size in sizes:
            rows = [predict(size, T, tokens(T)) for T in range(2, MAX_TREE + 1)]
            points |= {size: max(row["speed_up"] for row in rows if row)} if any(rows) else {}
    return line_chart(
        f"Predicted, not measured: speed-up on one {GPU.upper()} (logarithmic)", lines, "{:.2f}x",
        f"By python -m bench roofline, from the GPU's datasheet: bfloat16, {PREFIX} tokens in each "
        "cache, guesses as good", "as those of demo/clover, the best tree for each batch size. "
        "A line ends where the memory is full.", ticks=[2 ** i for i in range(9)])


# -------------------------------------------------------------------------------------------------
# The command

RUN = "run", "python generate.py --prompt TEXT --json --show-tree"
PICTURES = {  # name: (what draws it, its record, what writes that)
    "text.svg": (draw_text, *RUN), "tree.svg": (draw_tree, *RUN),
    "tokens-per-step.svg": (draw_tokens_per_step, "heads-cpu.json", "python -m bench heads --out"),
    "batch.svg": (draw_batch, "decode-cpu.json", "python -m bench decode --out"),
    "roofline.svg": (draw_roofline, None, None)}


def render(picture, *given, kind="svg"):
    """The bytes of a picture: of the (title, axes) that picture(*given) returns."""
    try:
        import matplotlib.figure
    except ImportError:
        raise InputError("drawing needs matplotlib, which is not installed: "
                         "pip install matplotlib") from None
    file = io.BytesIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of characters that the fonts here do not have
        title, axes = picture(*given)
        metadata = dict(Title=title, Date=None, Creator=None) if kind == "svg" else None
        axes.figure.savefig(file, format=kind, dpi=192, metadata=metadata)
    return file.getvalue()


def draw(name, args):
    """The bytes of a picture. Raises InputError where its record is missing or is another's."""
    picture, source, how = PICTURES[name]
    path = Path(args.run if source == "run" else f"{args.results}/{source}")
    if source and not path.is_file():
        raise InputError(f"{path} is not here; {how} writes it")
    try:
        content = render(picture, source and read_json(path))
    except InputError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        kind = type(error).__name__
        raise InputError(f"{path} is not what {how} writes ({kind}: {error})") from None
    if len(content) > LARGEST:
        raise InputError(f"it would have {len(content)} bytes, and {LARGEST} are allowed")
    return content


def bench(args):
    """`python -m bench draw`: writes the pictures into args.out."""
    for path in (Path(args.out) / name for name in PICTURES):
        try:
            content = draw(path.name, args)
        except InputError as error:
            print(f"left out: {path.name}: {error}")
            continue
        make_folder(path.parent)
        write_file(path, content)
        print(f"{path}: {len(content) / 1000:.1f} kB")
