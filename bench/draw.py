"""`python -m bench draw`: the pictures of README.md and docs/ as SVG, from results and a saved run;
prints the prediction's table.
A page of GitHub is white or nearly black: a chart has no background and mid-tones that are
readable on both; a run is on a dark card, its tokens in generate.py's colours."""

from math import log2
from pathlib import Path
from xml.sax.saxutils import escape

from bench import ROOT, roofline
from model import read_json

WIDTH = 760
COLUMNS = 88  # of monospaced text in a card
MONO = 'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace"'
GREY, GREEN, AMBER, BLUE = "#727a84", "#2c8a3f", "#a26f0a", "#2f7ad4"
CARD, FRAME, BRIGHT, DIM = "#161b22", "#6e7681", "#f0f6fc", "#8b949e"
TOKENS = {"root": BRIGHT, "model": DIM, "lookup": "#e3b341", "head 1": "#3fb950",
          "head 2": "#39c5cf", "head 3": "#58a6ff", "head 4": "#d2a8ff"}
DRAFTERS = {"plain": GREY, "medusa": GREEN, "hydra": GREEN, "clover": GREEN, "clover2": GREEN,
            "lookup": AMBER, "clover + lookup": BLUE}  # as results call them


def svg(title, height, shapes):
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            'xml:space="preserve" font-family="Helvetica, Arial, DejaVu Sans" font-size="13">\n'
            f"<title>{title}</title>\n" + "\n".join(shapes) + "\n</svg>\n")


def text(x, y, content, colour=GREY, style=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" {style}>{content}</text>'


def span(words, colour):
    words = "".join(c if c.isprintable() else "\ufffd" for c in words)  # XML forbids some
    return f'<tspan fill="{colour}">{escape(words)}</tspan>'


def box(x, y, width, height, colour, frame="none"):
    return (f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" '
            f'fill="{colour}" stroke="{frame}"/>')


def line(points, colour, width=1):
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def card(title, height, drafters, shapes, below):
    """shapes with a legend above and a line below."""
    names = sorted({*drafters} - {"root"})
    legend = "".join(span(f"by {name}    ", TOKENS[name]) for name in names)
    return svg(title, height, [box(0, 0, WIDTH, height, CARD, FRAME), text(24, 32, legend),
                               *shapes, text(24, height - 24, below, BRIGHT)])


def draw_text(run):
    """The text, each token in the colour of what guessed it."""
    steps = run["drafts"]
    tokens = [pair for step in steps for pair in zip(step["emitted"], step["guessed_by"])]
    lines = [""]
    column = 0
    for words, drafter in [(run["prompts"][0] + "\n", "root"), *tokens]:
        for i, part in enumerate(words.split("\n")):
            if i == 0 and part.startswith(" ") and column + len(part) > COLUMNS:
                part = part.lstrip()
                i = 1
            if i:
                lines.append("")
                column = 0
            lines[-1] += span(part, TOKENS[drafter])
            column += len(part)
    shapes = [text(24, 66 + 19 * i, spans, style=MONO) for i, spans in enumerate(lines)]
    return card("A text, each token in the colour of what guessed it", 99 + 19 * len(lines),
                {drafter for _, drafter in tokens}, shapes,
                f"{len(tokens)} tokens in {len(steps)} steps: {len(tokens) / len(steps):.2f} "
                "tokens per step (plain decoding: 1)")


def draw_tree(run):
    """Of the step with most accepted: depths from left to right, the accepted path on top."""
    steps = [step for step in run["drafts"] if len(step["path"]) < 8
             and step["nodes"][0].strip() and step["guessed_by"][-1] == "model"]
    step = max(steps, key=lambda step: len(step["path"]))
    accepted = {*step["path"], len(step["nodes"])}
    names = [*step["nodes"], step["emitted"][-1]]
    drafters = [*step["drafted_by"], "model"]
    parents = [*step["parents"], step["path"][-1]]
    keys = [()]  # of a node: for each node of its path, whether it was rejected, and its number
    for node, parent in enumerate(parents[1:], 1):
        keys.append((*keys[parent], (node not in accepted, node)))
    leaves = [key for node, key in enumerate(keys) if node not in parents]
    spots = [(24 + 100 * len(key), 66 + 34 * sum(leaf < key for leaf in leaves)) for key in keys]
    edges = []
    boxes = []
    for node, (x, y) in enumerate(spots):
        colour = TOKENS[drafters[node]]
        on_path = node in accepted
        words = names[node].translate(str.maketrans(" \n\t", "·↵⇥"))[:10]
        boxes += [box(x, y, 12 + 8 * len(words), 20, colour if on_path else CARD, colour),
                  text(x + 6, y + 14, span(words, CARD if on_path else colour), style=MONO)]
        left, top = spots[parents[node]]  # of the root: nowhere, and its edge is left out
        edges.append(line([(left, top + 10), (x - 12, top + 10), (x - 12, y + 10), (x, y + 10)],
                          BRIGHT if on_path else FRAME, 1 + on_path))
    return card("A drafted tree, with what was accepted", 126 + 34 * len(leaves), drafters,
                edges[1:] + boxes, "White: the newest token. Full: accepted, the model says the "
                f"same. Outlined: rejected. {len(accepted) - 1} tokens.")


def draw_tokens_per_step(result):
    """Bars: the model's own token of each step in grey, and what was guessed right."""
    values = {"plain": 1.0}
    for row in result["decoding"]:
        if [row[key] for key in ("kind", "temperature", "tree_size")] == ["all", 0, 17]:
            values[row["drafted_by"]] = row["tokens_per_step"]
    names = [name for name in DRAFTERS if name in values]
    unit = 590 / max(values[name] for name in names)
    title = ("Tokens per step with 16 guesses: one is the model's own (grey), the others were "
             "guessed right")
    shapes = [text(0, 20, title)]
    for i, name in enumerate(names):
        y = 46 + 32 * i
        value, colour = values[name], DRAFTERS[name]
        shapes += [text(0, y + 16, name), box(118, y, unit, 22, GREY),
                   box(118 + unit, y, unit * (value - 1), 22, colour),
                   text(124 + unit * value, y + 16, f"{value:.2f}", colour)]
    machine = result["machine"]
    where = machine["gpu"] or f"{machine['threads']} threads of {machine['cpu']}"
    height = 80 + 32 * len(names)
    shapes.append(text(0, height - 6, (
        f"Measured: {result['model']}/, {result['dtype'].removeprefix('torch.')}, greedy, "
        f"{result['prompts']} prompts, {result['max_new_tokens']} new tokens each; {where}")))
    return svg(title, height, shapes)


def draw_figure2():
    """Lines over the batch size, both axes logarithmic; a square where a plan stops paying."""
    predicted = roofline.predict(*roofline.NOMINAL)
    spot = lambda B, value: (60 + 46 * log2(B), 360 - 38 * log2(value / 40))
    title = "Predicted, not measured: tokens per second of all sequences, by what is drafted"
    shapes = [text(0, 20, title), text(180, 410, "B: sequences decoded together")]
    shapes += [text(spot(2 ** i, 1)[0] - 4, 388, 2 ** i) for i in range(10)]
    shapes += [text(0, spot(1, n)[1] + 4, f"{n:,}") for n in (100, 1000, 10000)]
    colours = {"chain of 5 at 0.4": AMBER, "tree of 16": BLUE, "tree of 4": GREEN, "plain": GREY}
    for name, colour in colours.items():
        _, rates, last = predicted[name]
        points = [spot(B, rates[B - 1]) for B in sorted({round(2 ** (n / 4)) for n in range(37)})]
        if last:
            x, y = spot(last, predicted["plain"][1][last - 1])
            shapes.append(box(x - 4, y - 4, 8, 8, colour))
            name += f": pays up to B = {last}"
        shapes += [line(points, colour, 2), text(484, points[-1][1] + 4, name, colour)]
    return svg(title, 444, [*shapes, text(0, 438, "A model of 32 B parameters in bfloat16; nominal "
                                          "figures of an H100: 3.35 TB/s, 989 TFLOP/s")])


def bench(args):
    """Writes the pictures into args.out, and prints the prediction."""
    run = read_json(ROOT / "docs" / "img" / "run.json")  # by generate.py --json --show-tree
    results = ROOT / "bench" / "results"
    heads = read_json(results / "heads-smollm2-cpu.json")
    pictures = {"text": draw_text(run), "tree": draw_tree(run),
                "tokens-per-step": draw_tokens_per_step(heads), "figure2": draw_figure2()}
    Path(args.out).mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        path = Path(args.out) / f"{name}.svg"
        path.write_text(picture, encoding="utf-8")
        print(path)
    roofline.print_table(*roofline.NOMINAL)
