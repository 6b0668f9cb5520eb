"""`python -m bench draw`: the pictures of README.md and docs/, as SVG, from bench/results/*.json and from a saved run.

Text stays text, and the same records give the same bytes. Tokens have the colours that generate.py gives them on a
terminal. A picture without its record is left out, in one line that says so.
"""

from argparse import Namespace
from pathlib import Path
from xml.sax.saxutils import escape

from bench import roofline, svg
from bench.decoding import SIZES
from clover import MAX_TREE
from model import InputError, atomic_write, read_json
from tools.cli import DEMO, HEAD_COLOURS, LOOKUP_COLOUR
from tools.tune import PREFIX

LARGEST = 60_000                 # bytes of a picture
COLUMNS, LINES = 88, 40          # of text.svg, at most
LABEL, NODES, GAP = 14, 16, 24   # of tree.svg: characters of a box, boxes, pixels between columns
TREE_SIZE = 17                   # of tokens-per-step.svg
BARS = {"medusa": "Medusa", "hydra": "Hydra", "clover": "Clover", "clover2": "Clover-2", "lookup": "lookup alone",
        "clover + lookup": "Clover + lookup"}
GPU, MODELS = "h200", {"30b": svg.PINK, "8b": svg.GREEN, "1.5b": svg.BLUE}  # of roofline.svg


# ---------------------------------------------------------------------------------------------------------------------
# Records

def load(path, how):
    """The object of a file. how: the command that writes it."""
    if not Path(path).is_file():
        raise InputError(f"{path} is not here; {how} writes it")
    return read_json(path)


def load_run(args):
    return load(args.run, "python generate.py --prompt TEXT --json --show-tree")


def hardware(machine):
    """Such as "2 cores of an AMD EPYC"."""
    n, cpu = machine["threads"], machine["cpu"]
    return machine["gpu"] or f"{n} core{'s' * (n > 1)} of a{'n' * (cpu[0] in 'AEIO')} {cpu}"


def measured(record):
    """What was measured and where, for the small line below a chart."""
    kind = f"temperature {record['temperature']:g}" if record.get("temperature") else "greedy"
    return (f"Measured: {record['model']}/, {record['dtype'].removeprefix('torch.')}, {kind}, {record['prompts']} "
            f"prompts, {record['max_new_tokens']} new tokens each; {hardware(record['machine'])}")


def colour(guessed_by):
    """On the card, of what "head 1", "lookup" or the "model" guessed."""
    if guessed_by in ("model", "lookup"):
        return svg.DIM if guessed_by == "model" else svg.ANSI[LOOKUP_COLOUR]
    return svg.ANSI[HEAD_COLOURS[min(int(guessed_by.removeprefix("head ")), len(HEAD_COLOURS)) - 1]]


def legend(y, own, drafted_by):
    """A line that says what the colours on the card mean. own: the words for the model's own tokens."""
    pairs = [(own, svg.DIM), ("guessed by:", svg.BRIGHT), *((by, colour(by)) for by in sorted(drafted_by))]
    shown = pairs if drafted_by else pairs[:1]
    words = [svg.tag("tspan", words, fill=fill, dx=16 if i else 0) for i, (words, fill) in enumerate(shown)]
    return svg.tag("text", *words, x=24, y=y)


# ---------------------------------------------------------------------------------------------------------------------
# The text of a run, each token in the colour of what guessed it

def draw_text(args):
    run = load_run(args)
    steps = [step for step in run["drafts"] if step["prompt"] == 0]
    tokens = [pair for step in steps for pair in zip(step["emitted"], step["guessed_by"], strict=True)]
    if not tokens:
        raise InputError(f"{args.run} has no steps of its first prompt; save another run")
    lines = wrap([(run["prompts"][0], svg.BRIGHT), *((words, colour(by)) for words, by in tokens)])
    body = [svg.tag("text", *(svg.tag("tspan", escape(words), fill=fill) for words, fill in line), x=24, y=62 + 19 * i,
                **svg.KEEP_SPACES) for i, line in enumerate(lines) if line]
    below = 62 + 19 * len(lines) + 14
    count = f"{len(tokens)} tokens in {len(steps)} steps: {len(tokens) / len(steps):.2f} tokens per step"
    return svg.picture(
        "A text, each token in the colour of what guessed it", below + 22,
        legend(30, "not guessed", {by for _, by in tokens} - {"model"}),
        svg.tag("g", *body, font_family=svg.MONO),
        svg.text(24, below, f"{count} (plain decoding: 1)", svg.BRIGHT), card=True)


def wrap(pieces):
    """[(text, fill)] -> lines of [[text, fill]], cut at newlines and after COLUMNS columns; at most LINES of them, none
    empty at the end."""
    lines, column = [[]], 0
    for words, fill in pieces:
        for c in words.replace("\r\n", "\n").replace("\t", "    "):
            if c == "\n" or column + svg.columns(c) > COLUMNS:
                lines, column = [*lines, []], 0
            if c == "\n":
                continue
            if not lines[-1] or lines[-1][-1][1] != fill:
                lines[-1].append(["", fill])
            lines[-1][-1][0] += svg.printable(c)
            column += svg.columns(c)
    while lines and not any(words.strip() for words, _ in lines[-1]):
        lines.pop()
    return lines if len(lines) <= LINES else [*lines[:LINES - 1], [["...", svg.DIM]]]


# ---------------------------------------------------------------------------------------------------------------------
# A drafted tree, with what was accepted

class Tree:
    """A step's nodes, and as the last one the model's own token, as boxes: depths from left to right, the accepted path
    along the top."""

    def __init__(self, step):
        self.path = step["path"]
        self.parents, self.accepted = [*step["parents"], self.path[-1]], {*self.path, len(step["nodes"])}
        self.labels = [label(words) for words in (*step["nodes"], step["emitted"][-1])]
        self.depths, self.rows, self.n_rows = [0], {}, 0
        for parent in self.parents[1:]:
            self.depths.append(self.depths[parent] + 1)
        self.drafted_by = [*step["drafted_by"], "model"]
        self.fills = [svg.BRIGHT, *map(colour, self.drafted_by[1:])]
        longest = [max(svg.columns(name) for name, at in zip(self.labels, self.depths) if at == depth)
                   for depth in range(max(self.depths) + 1)]
        self.widths = [16 + 12 * svg.MONO_WIDTH * n for n in longest]
        self.lefts = [24 + sum(self.widths[:depth]) + GAP * depth for depth in range(len(self.widths))]
        self.place(0)

    def place(self, node):
        """Gives a row to a node and to all below it: that of its first child, or a new one."""
        children = [i for i, parent in enumerate(self.parents) if parent == node]
        children.sort(key=lambda i: i not in self.accepted)
        self.rows[node] = self.n_rows
        for child in children:
            self.place(child)
        self.n_rows += not children

    def y(self, node):
        return 106 + 34 * self.rows[node]

    def edge(self, node):
        """The line from a node's parent."""
        parent, fill, width = self.parents[node], *((svg.BRIGHT, 2) if node in self.accepted else (svg.FRAME, 1))
        x, end = self.lefts[self.depths[parent]] + self.widths[self.depths[parent]], self.lefts[self.depths[node]]
        middle, y, y_end = x + GAP / 2, self.y(parent), self.y(node)
        return svg.tag("path", d=f"M{x:.1f} {y}C{middle:.1f} {y} {middle:.1f} {y_end} {end:.1f} {y_end}", fill="none",
                       stroke=fill, stroke_width=width)

    def box(self, node):
        """Full where it was accepted, else an outline."""
        x, width, fill = self.lefts[self.depths[node]], self.widths[self.depths[node]], self.fills[node]
        inside, words = (fill, svg.CARD) if node in self.accepted else (svg.CARD, fill)
        return (svg.tag("rect", x=x, y=self.y(node) - 12, width=width, height=24, rx=5, fill=inside, stroke=fill)
                + svg.text(x + width / 2, self.y(node) + 4, self.labels[node], words))


def label(words):
    """A token's text for its box: spaces and ends of lines can be seen, and a long one is cut."""
    words = svg.printable(words.replace(" ", "·").replace("\n", "↵").replace("\t", "⇥"))
    return words if len(words) <= LABEL else words[:LABEL - 1] + "…"


def shows_the_method(step):
    """Whether a step is small, with a root that can be seen, two accepted guesses or more, a branch that was not
    accepted, and the model's own token."""
    parents = step["parents"]
    return len(parents) < NODES and len(step["path"]) > 2 and len(set(parents)) < len(parents) and (
        step["guessed_by"][-1:] == ["model"] and bool(step["nodes"][0].strip()))


def draw_tree(args):
    trees = [Tree(step) for step in load_run(args)["drafts"] if shows_the_method(step)]
    trees = [tree for tree in trees if tree.lefts[-1] + tree.widths[-1] <= svg.WIDTH - 24]
    if not trees:
        raise InputError(f"{args.run} has no step of fewer than {NODES} nodes that fits the picture, with two accepted "
                         "guesses and a branch that was not accepted; save a run with a smaller --tree-size")
    tree = max(trees, key=lambda tree: len(tree.path))
    nodes, guesses, below = range(len(tree.labels)), len(tree.path) - 1, 106 + 34 * tree.n_rows
    return svg.picture(
        "A drafted tree, with what was accepted", below + 26,
        svg.text(24, 36, f"One step: {guesses} guesses accepted, {guesses + 1} tokens", svg.BRIGHT, **svg.TITLE),
        legend(64, "the model's next token", {*tree.drafted_by} - {"root", "model"}), *map(tree.edge, nodes[1:]),
        svg.tag("g", *map(tree.box, nodes), font_family=svg.MONO, font_size=12, text_anchor="middle"),
        svg.text(24, below + 4, "White: the newest token. Full: accepted, the model says the same. Outlined: rejected. "
                 "Grey: comes free.", svg.DIM), card=True)


# ---------------------------------------------------------------------------------------------------------------------
# Charts

def draw_tokens_per_step(args):
    """Bars: the model's own token of each step in grey, and what was guessed right."""
    record = load(Path(args.results) / "heads-cpu.json", "python -m bench heads --out FILE")
    found = {row["heads"]: row["tokens_per_step"] for row in record["decoding"]
             if (row["temperature"], row["tree_size"], row["batch_size"]) == (0, TREE_SIZE, 1)}
    bars = [("plain decoding", svg.GREY, 1.0)]
    for name in filter(found.get, BARS):
        fill = svg.BLUE if "+" in name else svg.AMBER if name == "lookup" else svg.GREEN
        bars.append((BARS[name], fill, found[name]))
    if len(bars) == 1:
        raise InputError(f"heads-cpu.json has no greedy rows of tree size {TREE_SIZE} and batch size 1")
    left, one, parts = 130, (svg.WIDTH - 190) / max(value for _, _, value in bars), []
    for i, (name, fill, value) in enumerate(bars):
        y = 62 + 32 * i
        parts += [svg.text(left - 12, y + 15, name, svg.GREY, text_anchor="end"),
                  svg.tag("rect", x=left, y=y, width=one, height=22, fill=svg.GREY),
                  svg.tag("rect", x=left + one + 2, y=y, width=max(0.0, one * (value - 1) - 2), height=22, fill=fill),
                  svg.text(left + one * value + 8, y + 15, f"{value:.2f}", fill, font_weight="bold")]
    return svg.chart("Tokens per step", 70 + 32 * len(bars),
                     f"{TREE_SIZE - 1} guesses per step, heads of {trained(record)} training steps.\n"
                     + measured(record),
                     svg.text(left, 50, "not guessed", svg.GREY, font_size=12),
                     svg.text(left + max(one + 2, 100), 50, "guessed right", svg.GREY, font_size=12), *parts)


def trained(record):
    """The steps of the heads of a record, such as "500"."""
    return " or ".join(sorted({str(training["steps"]) for training in record["training"].values()}))


def look(drafted_by, heads):
    """What drafted a row, without sizes, and how its line looks. heads: all names; rows call the last one "heads"."""
    main, first = heads[-1].capitalize(), drafted_by.split()[0]
    if first == "heads":
        return (f"{main} + lookup", svg.BLUE) if "lookup" in drafted_by else (f"{main} heads", svg.GREEN)
    if first in heads:
        return f"{first.capitalize()} heads", svg.GREEN, 2, "5 3"
    looks = dict(plain=("plain decoding", svg.GREY), lookup=("lookup", svg.AMBER), auto=("auto (default)", svg.PINK, 4))
    return looks.get(first, (drafted_by, svg.GREY))


def draw_batch(args):
    """Tokens per second over batch sizes, of each kind of drafter the best."""
    record = load(Path(args.results) / "decode-cpu.json", "python -m bench decode --out FILE")
    best = {}  # (name, fill, ...): {batch size: tokens per second}
    for row in sorted(record["decoding"], key=lambda row: row["tokens_per_second"]):
        best.setdefault(look(row["drafted_by"], record["heads"]), {})[row["batch_size"]] = row["tokens_per_second"]
    lines = [svg.Line(name, sorted(points.items()), *style) for (name, *style), points in best.items()]
    sizes = sorted({row["batch_size"] for row in record["decoding"]})
    return svg.line_chart("Tokens per second, all sequences together (logarithmic)", lines, sizes, "{:,.0f}",
                          "Of each kind the best. Batches of more than that many prompts take one for each sequence.\n"
                          + measured(record))


def draw_roofline(args):
    """The speed-up that bench/roofline.py predicts, of the best tree for each batch size."""
    heads, tokens = roofline.acceptance(Namespace(acceptance=None, heads=DEMO / "clover", temperature=0.0))
    ticks, sizes = [2 ** i for i in range(9)], sorted({round(2 ** (i / 4)) for i in range(33)})
    lines = [svg.Line("plain decoding", [(size, 1.0) for size in sizes], svg.GREY, 2, "2 4")]
    for model, fill in MODELS.items():
        prediction = roofline.Prediction(roofline.GPUS[GPU], roofline.sizes(model), heads)
        rows = [prediction.row(size, T, tokens(T)) for size in sizes for T in range(2, MAX_TREE + 1)]
        rows = sorted(filter(None, rows), key=lambda row: row["speed_up"])
        best = {row["batch_size"]: row["speed_up"] for row in rows}  # the last of a size, the best, stays
        lines.append(svg.Line(SIZES[model][1], sorted(best.items()), fill))
    return svg.line_chart(
        f"Predicted, not measured: speed-up on one {GPU.upper()} (logarithmic)", lines, ticks, "{:.2f}x",
        f"By python -m bench roofline, from the GPU's datasheet: bfloat16, {PREFIX} tokens in each cache, guesses as "
        "good\nas those of demo/clover, the best tree for each batch size. A line ends where the memory is full.")


# ---------------------------------------------------------------------------------------------------------------------
# The command

PICTURES = {"text.svg": draw_text, "tree.svg": draw_tree, "tokens-per-step.svg": draw_tokens_per_step,
            "batch.svg": draw_batch, "roofline.svg": draw_roofline}


def draw(name, args):
    """The picture of that name. Raises InputError where its record is missing or not what it should be."""
    try:
        drawn = PICTURES[name](args)
    except InputError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise InputError(f"its record is not what its command writes ({type(error).__name__}: {error})") from None
    if len(drawn.encode()) > LARGEST:
        raise InputError(f"it would have {len(drawn.encode()) / 1000:.0f} kB, and {LARGEST / 1000:.0f} are allowed")
    return drawn


def bench(args):
    """`python -m bench draw`: writes the pictures into args.out."""
    for name in PICTURES:
        path = Path(args.out) / name
        try:
            drawn = draw(name, args)
        except InputError as error:
            print(f"left out: {name}: {error}")
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, lambda tmp: Path(tmp).write_text(drawn, encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror}); choose another --out") from None
        print(f"{path}: {len(drawn.encode()) / 1000:.1f} kB")
