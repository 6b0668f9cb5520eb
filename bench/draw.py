"""`python -m bench draw`: the README's pictures as SVG, from a saved run and a record.
A page on GitHub is white or nearly black: the chart has no background and mid-tones that are
readable on both; the run is on a dark card, in generate.py's colours."""

from pathlib import Path
from xml.sax.saxutils import escape

from bench import ROOT
from model import read_json

RUN = ROOT / "docs" / "img" / "run.json"  # by generate.py --json --show-tree
RECORD = ROOT / "bench" / "results" / "heads-smollm2-cpu.json"
WIDTH = 760
COLUMNS = 88  # of monospaced text on a card
MONO = 'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace"'
GREY, GREEN, AMBER, BLUE = "#727a84", "#2c8a3f", "#a26f0a", "#2f7ad4"
CARD, FRAME, BRIGHT, DIM = "#161b22", "#6e7681", "#f0f6fc", "#8b949e"
TOKENS = {"root": BRIGHT, "model": DIM, "lookup": "#e3b341", "head 1": "#3fb950",
          "head 2": "#39c5cf", "head 3": "#58a6ff", "head 4": "#d2a8ff"}
DRAFTERS = {"plain": GREY, "medusa": GREEN, "hydra": GREEN, "clover": GREEN, "clover2": GREEN,
            "lookup": AMBER, "clover + lookup": BLUE}  # as the record calls them


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


def draw_text(run):
    """The prompt and the output, each token in the colour of what guessed it."""
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
            lines[-1] += span(part, TOKENS[drafter])
            column += len(part)
    height = 99 + 19 * len(lines)
    names = sorted({drafter for _, drafter in tokens})
    legend = "".join(span(f"by {name}    ", TOKENS[name]) for name in names)
    result = (f"{len(tokens)} tokens in {len(steps)} steps: {len(tokens) / len(steps):.2f} "
              "tokens per step (plain decoding: 1)")
    return svg("A text, each token in the colour of what guessed it", height, [
        box(0, 0, WIDTH, height, CARD, FRAME), text(24, 32, legend),
        *(text(24, 66 + 19 * i, line, style=MONO) for i, line in enumerate(lines)),
        text(24, height - 24, result, BRIGHT)])


def draw_tokens_per_step(result):
    """Bars: the model's own token of each step in grey, and what was guessed right."""
    values = {row["drafted_by"]: row["tokens_per_step"] for row in result["decoding"]
              if row["kind"] == "all" and row["temperature"] == 0 and row["tree_size"] in (1, 17)}
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


def bench(args):
    """Writes the pictures into args.out."""
    pictures = {"text": draw_text(read_json(RUN)),
                "tokens-per-step": draw_tokens_per_step(read_json(RECORD))}
    Path(args.out).mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        path = Path(args.out) / f"{name}.svg"
        path.write_text(picture, encoding="utf-8")
        print(path)
