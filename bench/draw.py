"""`python -m bench draw`: the pictures of README.md and docs/, from records and from a saved run.

Text stays text, and the same records give the same bytes. A page of GitHub is white or nearly
black: a chart has no background and mid-tones that are readable on both; a run is on a dark card,
its tokens in the colours of generate.py on a terminal.
"""

import io
import re
import warnings
from math import inf
from pathlib import Path

from bench import hardware, make_folder, roofline, write_file
from bench.steps import SIZES
from clover import MAX_DRAFT
from model import MAX_TREE, InputError, read_json
from tools.flags import DEMO
from tools.printer import HEAD_COLOURS, LOOKUP_COLOUR
from tools.timing import PREFIX

WIDTH = 760  # of a picture, in pixels, of which 96 are an inch
GREY, GREEN, AMBER, BLUE, PINK = "#727a84", "#2c8a3f", "#a26f0a", "#2f7ad4", "#c94a8f"
CARD, FRAME, BRIGHT, DIM = "#161b22", "#6e7681", "#f0f6fc", "#8b949e"
ANSI = {31: "#ff7b72", 32: "#3fb950", 33: "#e3b341", 34: "#58a6ff", 35: "#d2a8ff", 36: "#39c5cf"}
COLOURED = "text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"
STYLE = dict.fromkeys(COLOURED, GREY) | {
    "svg.fonttype": "none", "svg.hashsalt": "clover", "text.parse_math": False, "font.size": 9.75,
    "font.sans-serif": ["Segoe UI", "Noto Sans", "Helvetica", "Arial", "DejaVu Sans"],
    "font.monospace": ["DejaVu Sans Mono", "Menlo", "Liberation Mono", "Lucida Console"],
    "figure.facecolor": "none", "axes.facecolor": "none", "axes.spines.left": False,
    "axes.spines.top": False, "axes.spines.right": False, "lines.markersize": 4,
    "figure.constrained_layout.h_pad": 0.1}
DRAFTERS = {  # as records call them: (name, colour)
    "plain": ("plain decoding", GREY), "medusa": ("Medusa", GREEN), "hydra": ("Hydra", GREEN),
    "clover": ("Clover", GREEN), "clover2": ("Clover-2", GREEN), "lookup": ("lookup alone", AMBER),
    "clover + lookup": ("Clover + lookup", BLUE), "auto": ("auto (default)", PINK)}
GUESSED_BY = {f"head {i + 1}": ANSI[HEAD_COLOURS[min(i, len(HEAD_COLOURS) - 1)]]
              for i in range(MAX_DRAFT)} | {"model": DIM, "lookup": ANSI[LOOKUP_COLOUR]}


def card(figure, title, height, own, drafted_by, below):
    """Axes in pixels, y downwards, with what the colours mean. own: the model's own tokens."""
    figure.set(size_inches=(WIDTH / 96, height / 96), label=title, facecolor=CARD, edgecolor=FRAME,
               linewidth=1)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
    axes.set_axis_off()
    colours = {own: DIM, "guessed by:": BRIGHT} | {by: GUESSED_BY[by] for by in sorted(drafted_by)}
    x = 24
    for words, colour in colours.items():
        axes.text(x, 32, words, color=colour)
        x += 7.2 * len(words) + 16
    axes.text(24, height - 24, below, color=BRIGHT)
    return axes


def draw_text(figure, run):
    steps = [step for step in run["drafts"] if step["prompt"] == 0]
    tokens = [(words, by, GUESSED_BY[by]) for step in steps
              for words, by in zip(step["emitted"], step["guessed_by"], strict=True)]
    row = column = 0
    placed = []
    for words, _, colour in [(run["prompts"][0], "", BRIGHT), *tokens]:
        for part in re.findall(r"\n| +|\S+", words.expandtabs(4)):
            if part == "\n" or column + len(part) > 88:
                row += 1
                column = 0
            if part != "\n":
                placed.append((24 + 7.93 * column, 66 + 19 * row, part, colour))
                column += len(part)
    axes = card(figure, "A text, each token in the colour of what guessed it", 118 + 19 * row,
                "not guessed", {by for _, by, _ in tokens} - {"model"},
                f"{len(tokens)} tokens in {len(steps)} steps: {len(tokens) / len(steps):.2f} "
                "tokens per step (plain decoding: 1)")
    for x, y, part, colour in placed:
        axes.text(x, y, part.strip(), color=colour, family="monospace")


def draw_tree(figure, run):
    """Of the step with most accepted: depths from left to right, the accepted path on top."""
    steps = [step for step in run["drafts"] if 2 < len(step["path"]) < 8
             and len(set(step["parents"])) < len(step["parents"]) < 16
             and step["guessed_by"][-1] == "model" and step["nodes"][0].strip()]
    if not steps:
        raise InputError("the run has no step of fewer than 16 nodes with two accepted guesses "
                         "and another branch; save a run with a smaller --tree-size")
    step = max(steps, key=lambda step: len(step["path"]))
    tokens = [*step["nodes"], step["emitted"][-1]]
    parents = [*step["parents"], step["path"][-1]]
    accepted = {*step["path"], len(step["nodes"])}
    keys = [()]  # of a node: for each node of its path, whether it was rejected, and its number
    for i, parent in enumerate(parents[1:], 1):
        keys.append((*keys[parent], (i not in accepted, i)))
    leaves = [key for i, key in enumerate(keys) if i not in parents]
    width = min(110, 712 / (1 + max(map(len, keys))))
    spots = [(30 + width * len(key), 78 + 34 * sum(leaf < key for leaf in leaves)) for key in keys]
    axes = card(figure, "A drafted tree, with what was accepted", 144 + 34 * len(leaves),
                "the model's next token", set(step["drafted_by"][1:]), "White: the newest token. "
                "Full: accepted, the model says the same. Outlined: rejected.\nOne step: "
                f"{len(accepted) - 2} guesses accepted, {len(accepted) - 1} tokens.")
    colours = [BRIGHT, *(GUESSED_BY[by] for by in (*step["drafted_by"][1:], "model"))]
    for i, (words, colour) in enumerate(zip(tokens, colours, strict=True)):
        x, y = spots[i]
        edge, line, ink, fill = FRAME, 0.75, colour, CARD
        if i in accepted:
            edge, line, ink, fill = BRIGHT, 1.5, CARD, colour
        if i:
            left, top = spots[parents[i]]
            axes.plot([left, x - 15, x - 15, x], [top, top, y, y], color=edge, linewidth=line,
                      zorder=line)
        words = words.translate(str.maketrans(" \n\t", "·↵⇥"))[:int((width - 26) / 7)]
        axes.text(x, y, words, color=ink, size=8.5, family="monospace", va="center_baseline",
                  bbox=dict(boxstyle="round", edgecolor=colour, facecolor=fill, linewidth=0.75))


def chart(figure, title, height, *below):
    """Axes with a title above and small lines below."""
    figure.set(size_inches=(WIDTH / 96, height / 96), label=title, layout_engine="constrained")
    figure.suptitle(title, x=0, ha="left", size=12, weight="bold")
    figure.supxlabel("\n".join(below), x=0, ha="left", size=9)
    return figure.subplots()


def measured(record):
    """What was measured and where, for the small line below a chart."""
    kind = f"temperature {record['temperature']:g}" if record.get("temperature") else "greedy"
    return (f"Measured: {record['model']}/, {record['dtype'].removeprefix('torch.')}, {kind}, "
            f"{record['prompts']} prompts, {record['max_new_tokens']} new tokens each; "
            + hardware(record["machine"]))


def draw_tokens_per_step(figure, record):
    """Bars: the model's own token of each step in grey, and what was guessed right."""
    found = {"plain": 1.0} | {
        row["heads"]: row["tokens_per_step"] for row in record["decoding"]
        if (row["temperature"], row["tree_size"], row["batch_size"]) == (0, 17, 1)}
    bars = [(*DRAFTERS[name], found[name]) for name in DRAFTERS if name in found]
    steps = " or ".join(sorted({str(heads["steps"]) for heads in record["training"].values()}))
    axes = chart(figure, "Tokens per step: one is the model's own (grey), others are guessed right",
                 80 + 34 * len(bars), f"16 guesses per step, heads of {steps} training steps.",
                 measured(record))
    for name, colour, value in bars:
        axes.barh(name, 1, 0.7, color=GREY)
        axes.barh(name, value - 1, 0.7, 1, color=colour)
        axes.annotate(f"{value:.2f}", (value, name), (6, 0), textcoords="offset points",
                      color=colour, va="center_baseline", weight="bold")
    axes.invert_yaxis()
    axes.margins(0)
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    axes.spines.bottom.set_visible(False)


def line_chart(figure, title, lines, form, *below):
    """Lines over the batch size, with names and values at both ends; both axes are logarithmic.
    lines: {(name, colour, style): {batch size: value}}; form: of a value."""
    axes = chart(figure, f"{title} (logarithmic)", 470, *below)
    for (_, colour, style), points in lines.items():
        axes.plot(points.keys(), points.values(), style, color=colour, marker="o")
    sizes = sorted({size for points in lines.values() for size in points})
    axes.set(xscale="log", yscale="log", xlabel="batch size: sequences decoded together")
    axes.minorticks_off()
    axes.set_xticks(sizes, sizes)
    axes.set_yticks([])
    axes.autoscale_view()
    for end, edge, ha in ((min, -0.05, "right"), (max, 1.05, "left")):
        height = inf
        labels = [(points[end(points)], end(points), name, colour)
                  for (name, colour, _), points in lines.items() if end is min or len(points) > 1]
        for value, size, name, colour in sorted(labels, reverse=True):
            _, y = axes.transAxes.inverted().transform(axes.transData.transform((size, value)))
            height = min(y, height - 0.05)  # labels are one below another
            arrow = dict(arrowstyle="-", color=colour, linewidth=0.75, relpos=(end is min, 0.5))
            axes.annotate(f"{name} {form.format(value)}", (size, value), (edge, height), ha=ha,
                          textcoords="axes fraction", va="center", color=colour, arrowprops=arrow)


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
    heads, tokens = roofline.acceptance(DEMO / "clover", temperature=0.0)
    sizes = [2 ** i for i in range(9)]
    lines = {("plain decoding", GREY, ":"): dict.fromkeys(sizes, 1.0)}
    for model, colour in {"30b": PINK, "8b": GREEN, "1.5b": BLUE}.items():
        predict = roofline.Prediction(roofline.GPUS["h200"], roofline.sizes(model), heads).row
        points = lines[SIZES[model][0], colour, "-"] = {}
        for size in sizes:
            rows = [predict(size, T, tokens(T)) for T in range(2, MAX_TREE + 1)]
            if any(rows):
                points[size] = max(row["speed_up"] for row in rows if row)
    line_chart(figure, "Predicted, not measured: speed-up on one H200", lines, "{:.2f}x",
               f"By python -m bench roofline, from the GPU's datasheet: bfloat16, {PREFIX} tokens "
               "in each cache, guesses as good", "as those of demo/clover, the best tree for each "
               "batch size. A line ends where the memory is full.")


RUN = "{run}", "python generate.py --prompt TEXT --json --show-tree"
PICTURES = {  # name: (what draws it, from which file, what writes that)
    "text.svg": (draw_text, *RUN), "tree.svg": (draw_tree, *RUN),
    "tokens-per-step.svg": (draw_tokens_per_step, "{results}/heads-cpu.json",
                            "python -m bench heads --out"),
    "batch.svg": (draw_batch, "{results}/decode-cpu.json", "python -m bench decode --out"),
    "roofline.svg": (draw_roofline, None, None)}


def render(picture, *given):
    """The SVG that picture(figure, *given) draws."""
    try:
        import matplotlib.figure
    except ImportError:
        raise InputError("drawing needs matplotlib, which is not installed: "
                         "pip install matplotlib") from None
    file = io.StringIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of characters that the fonts here do not have
        figure = matplotlib.figure.Figure()
        picture(figure, *given)
        for words in figure.findobj(matplotlib.text.Text):  # XML forbids some characters
            words.set_text("".join(c if c.isprintable() or c == "\n" else "\ufffd"
                                   for c in words.get_text()))
        figure.savefig(file, format="svg",
                       metadata=dict(Title=figure.get_label(), Date=None, Creator=None))
    return file.getvalue()


def bench(args):
    """`python -m bench draw`: writes the pictures into args.out."""
    make_folder(args.out)
    for name, (picture, source, how) in PICTURES.items():
        path = source and Path(source.format_map(vars(args)))
        try:
            if path and not path.is_file():
                raise InputError(f"{path} is not here; {how} writes it")
            content = render(picture, path and read_json(path))
            write_file(Path(args.out) / name, content)
            print(f"{args.out}/{name}: {len(content) / 1000:.1f} kB")
        except InputError as error:
            print(f"left out: {name}: {error}")
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            kind = type(error).__name__
            print(f"left out: {name}: {path} is not what {how} writes ({kind}: {error})")
