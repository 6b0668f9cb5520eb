"""bench/draw.py: the pictures say what the records say, can be read on both pages, and survive any token."""

import json
import re
from argparse import Namespace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench import __main__ as bench
from bench import draw, hardware, roofline
from model import InputError
from tools.flags import DEMO
from tools.printer import HEAD_COLOURS, LOOKUP_COLOUR

matplotlib = pytest.importorskip("matplotlib", reason="needs matplotlib")
ROOT = Path(__file__).parent.parent
PAGES = ("#ffffff", "#0d1117")  # GitHub's light and dark one
CARDS = ("text.svg", "tree.svg")
ON_PAGE = {draw.GREY, draw.GREEN, draw.AMBER, draw.BLUE, draw.PINK}
ON_CARD = {draw.CARD, draw.FRAME, draw.BRIGHT, draw.DIM, *draw.ANSI.values()}
MACHINE = dict(cpu="AMD EPYC", threads=2, gpu=None)
SETTINGS = dict(model="demo", dtype="torch.float32", prompts=32, max_new_tokens=128, machine=MACHINE,
                training=dict(medusa=dict(steps=500), clover=dict(steps=500)))
HOSTILE = ["<b>&\"'", "\x1b[31m", "\0\x07\x7f", "\ud800", "\u202egnirts", "\ufffe", "]]>", "$x_1$", "\u4e2d\U0001f600"]


def step(emitted, guessed_by, nodes, parents, heads, path):
    """One of Drafts.steps. heads: how many of the nodes are the heads'; the rest are lookup's."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    drafted_by = [f"head {depth}" if node <= heads else "lookup" for node, depth in enumerate(depths)]
    return dict(prompt=0, step=1, variant="heads", emitted=emitted, guessed_by=guessed_by, nodes=nodes,
                parents=parents, drafted_by=["root", *drafted_by[1:]], path=path)


BRANCHES = step([" return", " a", "\n"], ["head 1", "lookup", "model"], [" b", " return", " self", " a", " + 1"],
                [-1, 0, 0, 1, 3], 2, [0, 1, 3])
CHAIN = step(["a", "b", "c", "d"], ["lookup"] * 3 + ["model"], ["x", "a", "b", "c"], [-1, 0, 1, 2], 0, [0, 1, 2, 3])
CUT = step(["a", "b"], ["head 1", "head 2"], ["x", "a", "b", "c"], [-1, 0, 1, 0], 3, [0, 1, 2])


def axes_of(picture, *given):
    """What a picture is drawn with."""
    kept = []

    def draws(figure, *given):
        picture(figure, *given)
        kept.append(figure)
    draw.render(draws, *given)
    return kept[0].axes[0]


def texts(axes):
    """{text: colour}"""
    return {text.get_text(): text.get_color() for text in axes.figure.findobj(matplotlib.text.Text) if text.get_text()}


def run(*steps, prompt="def f(a):"):
    return dict(prompts=[prompt], drafts=list(steps))


def contrast(*colours):
    """The contrast ratio of two colours, as the Web Content Accessibility Guidelines define it."""
    def luminance(colour):
        channels = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b
    low, high = sorted(map(luminance, colours))
    return (high + 0.05) / (low + 0.05)


# ---------------------------------------------------------------------------------------------------------------------
# All pictures

@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """{name: the SVG of the repository's records}"""
    out = tmp_path_factory.mktemp("drawn")
    draw.bench(Namespace(results=ROOT / "bench" / "results", run=ROOT / "docs" / "img" / "run.json", out=out))
    return {name: ElementTree.parse(out / name).getroot() for name in draw.PICTURES}


def words(root):
    return [(text.text, re.search("#[0-9a-f]{6}", text.get("style")).group())
            for text in root.iter("{http://www.w3.org/2000/svg}text")]


def test_committed_pictures_are_those_of_the_committed_records(drawn):
    """Bug: a record that changed, and a picture that did not: python -m bench draw."""
    for name, root in drawn.items():
        assert words(ElementTree.parse(ROOT / "docs" / "img" / name).getroot()) == words(root), name


def test_every_picture_can_be_read_on_both_pages(drawn):
    """Bug: a colour that one of the two pages swallows, or a card its text; text that is drawn as paths, a picture that
    is too large or has no name."""
    assert all(contrast(mark, page) >= 4 for mark in ON_PAGE for page in PAGES)
    assert all(contrast(mark, draw.CARD) >= (3 if mark == draw.FRAME else 4) for mark in ON_CARD - {draw.CARD})
    for name, root in drawn.items():
        used = set(re.findall("#[0-9a-f]{6}", ElementTree.tostring(root).decode()))
        assert used <= (ON_CARD if name in CARDS else ON_PAGE), (name, used)
        assert len(words(root)) >= 10 and root[0].tag.endswith("title") and root[0].text


def test_pictures_keep_their_words_inside():
    """Bug: a caption that runs out of the picture, in matplotlib's own font, which is a wide one."""
    for picture, source, _ in draw.PICTURES.values():
        path = source and source.format(run=ROOT / "docs/img/run.json", results=ROOT / "bench/results")
        figure = axes_of(picture, path and json.loads(Path(path).read_text())).figure
        for text in figure.findobj(matplotlib.text.Text):
            inside = text.get_window_extent()
            assert not text.get_text() or inside.x0 >= -1 and inside.x1 <= figure.bbox.x1 + 1, text.get_text()


def test_the_same_records_give_the_same_bytes_and_what_has_none_is_left_out(tmp_path, capsys):
    """Bug: a date in the file; a traceback, a bad record that hides the good ones, a reason that says nothing."""
    (tmp_path / "heads-cpu.json").write_text("{broken")
    (tmp_path / "decode-cpu.json").write_text(json.dumps(dict(decoding=[dict(drafted_by=1)])))
    out, found = tmp_path / "a" / "b", []
    for _ in range(2):
        bench.main(["draw", f"--results={tmp_path}", f"--out={out}", f"--run={tmp_path / 'r.json'}"])
        found.append((out / "roofline.svg").read_bytes())
    text, tree, heads, decode, last = capsys.readouterr().out.splitlines()[:5]
    assert text.startswith("left out: text.svg: ") and "r.json is not here; python generate.py --prompt" in text
    assert tree.startswith("left out: tree.svg: ") and "--show-tree writes it" in tree
    assert heads.startswith("left out: tokens-per-step.svg: ") and "cannot be read as json" in heads
    assert "is not what python -m bench decode --out writes (KeyError: 'batch_size')" in decode
    assert re.fullmatch(r".*roofline.svg: \d+\.\d kB", last) and found[0] == found[1]
    assert [path.name for path in out.iterdir()] == ["roofline.svg"]


@pytest.mark.parametrize("name, bad", [
    ("text.svg", dict(guessed_by=["head 1"])), ("text.svg", dict(guessed_by=["a", "b", "c"])),
    ("text.svg", dict(emitted=[1, 2, 3])), ("tree.svg", dict(parents=[-1, 4, 4, 4, 4])),
    ("tree.svg", dict(drafted_by=None)), ("tree.svg", dict(path=[0, 1, 9])), ("tree.svg", dict(nodes=[None] * 5))])
def test_a_broken_run_is_left_out(tmp_path, capsys, name, bad):
    (tmp_path / "run.json").write_text(json.dumps(run(BRANCHES | bad)))
    draw.bench(Namespace(results=tmp_path, run=tmp_path / "run.json", out=tmp_path))
    assert f"left out: {name}: {tmp_path / 'run.json'} is not what python generate.py" in capsys.readouterr().out


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match="needs matplotlib.*pip install matplotlib"):
        draw.render(draw.draw_batch, {})


# ---------------------------------------------------------------------------------------------------------------------
# Cards

def test_text_has_the_colours_of_what_guessed_it_and_breaks_where_it_should():
    """Bug: a token in another's colour, lost indentation, a line that runs out of the card."""
    head, lookup = draw.ANSI[HEAD_COLOURS[0]], draw.ANSI[LOOKUP_COLOUR]
    axes = axes_of(draw.draw_text, run(BRANCHES))
    assert texts(axes) == {"not guessed": draw.DIM, "guessed by:": draw.BRIGHT, "head 1": head, "lookup": lookup,
                           "def": draw.BRIGHT, "f(a):": draw.BRIGHT, "return": head, "a": lookup,
                           "3 tokens in 1 steps: 3.00 tokens per step (plain decoding: 1)": draw.BRIGHT}
    places = lambda axes: {text.get_text(): text.get_position() for text in axes.texts}
    letter = 13 * 0.61
    assert places(axes)["return"] == pytest.approx((24 + 10 * letter, 66))
    lines = step(["\r\n  a", "x" * 80, "y" * 20, "\n"], ["lookup", *["head 1"] * 2, "model"], ["x"], [-1], 0, [0])
    place = places(axes_of(draw.draw_text, run(lines)))
    assert place["a"] == pytest.approx((24 + 2 * letter, 85)) and place["y" * 20] == pytest.approx((24, 104))


def test_hostile_tokens_are_shown():
    """Bug: a token that ends its element, that XML forbids, that is taken for a formula or turns the line around."""
    many = step([*HOSTILE, "x" * 5000], ["lookup", "model"] * 5, ["<"], [-1], 0, [0])
    root = ElementTree.fromstring(draw.render(draw.draw_text, run(many)))
    shown = "".join(text for text, _ in words(root))
    assert "<b>&\"'\ufffd[31m\ufffd\ufffd\ufffd\ufffd\ufffdgnirts\ufffd]]>$x_1$\u4e2d\U0001f600xxx" in shown
    tree = step(["a", "b", "\t" * 30], ["head 1", "head 2", "model"], ["0", *HOSTILE, "b"],
                [-1, *[0] * 9, 9], 10, [0, 9, 10])
    labels = texts(axes_of(draw.draw_tree, run(tree)))
    assert {"<b>&\"'", "\ufffd[31m", "\ufffd" * 3, "$x_1$", "⇥" * 12} < {*labels}


def test_the_tree_is_the_small_step_with_most_accepted():
    """Bug: a step that shows nothing, one too large for the picture, one without the model's own token; an edge that
    ends elsewhere, the accepted path not in a line."""
    three = step(["1", "2", "3", "4"], ["head 1", "head 2", "lookup", "model"], ["0", "no", "1", "2", "3"],
                 [-1, 0, 0, 2, 3], 3, [0, 2, 3, 4])
    axes = axes_of(draw.draw_tree, run(BRANCHES, CHAIN, three, CUT))
    assert any("One step: 3 guesses accepted, 4 tokens" in words for words in texts(axes))
    nodes = [text for text in axes.texts if text.get_bbox_patch()]
    head, later, lookup = (draw.ANSI[colour] for colour in (*HEAD_COLOURS[:2], LOOKUP_COLOUR))
    colours = lambda get: [matplotlib.colors.to_hex(get(node.get_bbox_patch())) for node in nodes]
    fills = [draw.BRIGHT, draw.CARD, head, later, lookup, draw.DIM]
    assert colours(lambda box: box.get_facecolor()) == fills
    assert colours(lambda box: box.get_edgecolor()) == [draw.BRIGHT, head, head, later, lookup, draw.DIM]
    places = [node.get_position() for node in nodes]
    assert len({y for (_, y), fill in zip(places, fills) if fill != draw.CARD}) == 1 and len(set(places)) == 6
    for line, node, parent in zip(axes.lines, range(1, 6), [0, 0, 2, 3, 4]):
        ends = list(zip(line.get_xdata(), line.get_ydata()))
        assert (ends[0], ends[-1]) == (places[parent], places[node])
    for steps in ([CHAIN], [CUT], []):
        with pytest.raises(InputError, match="no step of fewer than 16 nodes"):
            axes_of(draw.draw_tree, run(*steps))


# ---------------------------------------------------------------------------------------------------------------------
# Charts

def heads_row(name, tokens, **others):
    return dict(heads=name, temperature=0.0, tree_size=17, batch_size=1, tokens_per_step=tokens) | others


def test_bars_are_tokens_per_step():
    """Bug: a bar of another tree or temperature, an ablation among the presets, a length that is not the value's."""
    rows = [heads_row("medusa", 1.5), heads_row("medusa", 9.0, tree_size=5), heads_row("medusa", 9.0, temperature=0.8),
            heads_row("medusa", 9.0, batch_size=8), heads_row("clover-no-attention", 9.0), heads_row("clover", 2.0),
            heads_row("clover + lookup", 6.0)]
    axes = axes_of(draw.draw_tokens_per_step, SETTINGS | dict(decoding=rows))
    shown = list(texts(axes))
    assert [name for name in shown if name in ("plain decoding", "Medusa", "Hydra", "Clover", "Clover + lookup")] == [
        "plain decoding", "Medusa", "Clover", "Clover + lookup"]
    assert {"1.00", "1.50", "2.00", "6.00"} < set(shown) and "9.00" not in shown
    assert any("16 guesses per step, heads of 500 training steps." in words for words in shown)
    assert any("greedy, 32 prompts, 128 new tokens each; 2 cores of an AMD EPYC" in words for words in shown)
    ends, start = [bar.get_x() + bar.get_width() for bar in axes.patches], axes.patches[0].get_x()
    assert [(end - start) / (ends[0] - start) for end in ends[3::2]] == pytest.approx([1.5, 2, 6], abs=0.01)


def test_lines_are_the_best_of_each_kind():
    """Bug: not the best variant, a kind under another's name, a point at a wrong height, labels that collide."""
    rows = [("plain", 100, 400), ("medusa 4", 110, 300), ("heads 7", 150, 500), ("heads 15", 160, 450),
            ("lookup 4", 250, 600), ("lookup 20", 300, 410), ("heads 3 + lookup 4", 200, 799.6), ("auto", 310, 800),
            ("transformers", 50, None), ("transformers, prompt lookup", 90, None)]
    rows = [dict(drafted_by=name, batch_size=size, tokens_per_second=speed) for name, *speeds in rows
            for size, speed in zip((1, 16), speeds) if speed]
    axes = axes_of(draw.draw_batch, SETTINGS | dict(heads=["medusa", "clover"], decoding=rows, dtype="torch.bfloat16"))
    shown = texts(axes)
    for end in ("plain decoding 100", "plain decoding 400", "Medusa 110", "Clover 160", "Clover 500",
                "lookup alone 300", "lookup alone 600", "Clover + lookup 200", "Clover + lookup 800",
                "auto (default) 310", "transformers 50", "transformers, prompt lookup 90",
                "batch size: sequences decoded together", "16"):
        assert end in shown
    assert sum("lookup" in words for words in shown) == 5 and any("bfloat16" in words for words in shown)
    lines = {line.get_color(): line.get_ydata() for line in axes.lines}
    assert lines[draw.AMBER] == pytest.approx([300, 600]) and lines[draw.BLUE] == pytest.approx([200, 799.6])
    assert axes.get_xscale() == axes.get_yscale() == "log"
    heights = sorted(text.get_position()[1] for text in axes.texts if text.get_ha() == "right")
    assert all(b - a > 0.049 for a, b in zip(heights, heights[1:]))


def test_the_roofline_is_the_commands_prediction_and_says_so():
    """Bug: a prediction that passes for a measurement, one of another tree, a line beyond the memory."""
    axes = axes_of(draw.draw_roofline, None)
    shown = texts(axes)
    assert "Predicted, not measured: speed-up on one H200 (logarithmic)" in shown
    heads, tokens = roofline.acceptance(DEMO / "clover", temperature=0.0)
    for model, colour in {"30b": draw.PINK, "8b": draw.GREEN, "1.5b": draw.BLUE}.items():
        prediction = roofline.Prediction(roofline.GPUS["h200"], roofline.sizes(model), heads)
        best = max(prediction.row(1, T, tokens(T))["speed_up"] for T in range(2, 65))
        assert shown[f"{draw.SIZES[model][0]} {best:.2f}x"] == colour
    assert {line.get_xdata()[-1] for line in axes.lines} == {128, 256}, "30B fills the memory before 256 sequences"


@pytest.mark.parametrize("machine, words", [
    (MACHINE, "2 cores of an AMD EPYC"), (dict(cpu="Ryzen 7", threads=1, gpu=None), "1 core of a Ryzen 7"),
    (MACHINE | dict(gpu="NVIDIA H200"), "NVIDIA H200")])
def test_hardware(machine, words):
    assert hardware(machine) == words
