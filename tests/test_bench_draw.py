"""bench/draw.py: the pictures say what the records say, can be read on both pages, and survive any token."""

import json
import re
from argparse import Namespace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench import __main__ as bench
from bench import draw, roofline, svg
from model import InputError
from tools.cli import DEMO, HEAD_COLOURS, LOOKUP_COLOUR

ROOT = Path(__file__).parent.parent
PAGES = ("#ffffff", "#0d1117")  # GitHub's light and dark one
MACHINE = dict(cpu="AMD EPYC", threads=2, gpu=None)
SETTINGS = dict(model="demo", dtype="torch.float32", prompts=32, max_new_tokens=128, machine=MACHINE,
                training=dict(medusa=dict(steps=500), clover=dict(steps=500)))


def step(emitted, guessed_by, nodes, parents, heads, path, prompt=0):
    """One of Drafts.steps. heads: how many of the nodes are the heads'; the rest are lookup's."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    drafted_by = [f"head {depth}" if node <= heads else "lookup" for node, depth in enumerate(depths)]
    return dict(prompt=prompt, step=1, variant="heads", emitted=emitted, guessed_by=guessed_by, nodes=nodes,
                parents=parents, drafted_by=["root", *drafted_by[1:]], path=path)


PLAIN = step([" b"], ["model"], [":"], [-1], 0, [0])
BRANCHES = step([" return", " a", "\n"], ["head 1", "lookup", "model"], [" b", " return", " self", " a", " + 1"],
                [-1, 0, 0, 1, 3], 2, [0, 1, 3])
CHAIN = step(["a", "b", "c", "d"], ["lookup"] * 3 + ["model"], ["x", "a", "b", "c"], [-1, 0, 1, 2], 0, [0, 1, 2, 3])
LARGE = step(["a", "b", "c", "d"], ["head 1", "head 2", "head 3", "model"], ["x", "a", "b", "c", *"0123456789ab"],
             [-1, 0, 1, 2, *[0] * 12], 15, [0, 1, 2, 3])
CUT = step(["a", "b"], ["head 1", "head 2"], ["x", "a", "b", "c"], [-1, 0, 1, 0], 3, [0, 1, 2])


def flags(results, **others):
    return ["draw", f"--results={results}", *(f"--{name}={value}" for name, value in others.items())]


@pytest.fixture
def drawn(tmp_path, capsys):
    """Draws from these steps and records: drawn(name, *steps, **{file: record}) -> the root element of a picture, or,
    where it is left out, that line."""
    def drawn(name, *steps, prompt="def f(a):", **records):
        run = dict(prompts=[prompt], drafts=list(steps))
        (tmp_path / "run.json").write_text(json.dumps(run))
        for file, record in records.items():
            (tmp_path / f"{file.replace('_', '-')}.json").write_text(json.dumps(SETTINGS | record))
        bench.main(flags(tmp_path, out=tmp_path / "out", run=tmp_path / "run.json"))
        said = capsys.readouterr().out.splitlines()
        assert len(said) == len(draw.PICTURES), "one line for each picture, no JSON line"
        left_out = [line for line in said if line.startswith(f"left out: {name}: ")]
        return left_out[0] if left_out else ElementTree.parse(tmp_path / "out" / name).getroot()
    return drawn


def tags(root, name):
    return [element for element in root.iter() if element.tag.endswith(f"}}{name}")]


def texts(root):
    """{text: fill} of all pieces of text."""
    return {element.text: element.get("fill") for element in tags(root, "text") + tags(root, "tspan") if element.text}


def lines(root):
    """The lines of the monospaced text, as they are shown."""
    group, = tags(root, "g")
    return ["".join(line.itertext()) for line in group]


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

def committed(name):
    """The picture of the records in the repository, or None where one is missing."""
    args = Namespace(results=ROOT / "bench" / "results", run=ROOT / "docs" / "img" / "run.json")
    try:
        return draw.draw(name, args)
    except InputError as error:
        assert "is not here" in str(error)


@pytest.mark.parametrize("name", draw.PICTURES)
def test_committed_pictures_are_those_of_the_committed_records(name):
    """Bug: a record that changed, and a picture that did not: python -m bench draw."""
    path = ROOT / "docs" / "img" / name
    assert (path.read_text(encoding="utf-8") if path.is_file() else None) == committed(name)


def examples(drawn):
    """All pictures: those of the repository's records, and of steps where no run is saved."""
    for name in draw.PICTURES:
        picture = committed(name)
        yield name, ElementTree.fromstring(picture) if picture else drawn(name, PLAIN, BRANCHES)


def test_every_picture_can_be_read_on_both_pages(drawn):
    """Bug: a colour that one of the two pages swallows, or a card its text; a picture that is too large."""
    on_both = (svg.GREY, svg.GREEN, svg.AMBER, svg.BLUE, svg.PINK)
    assert all(contrast(mark, page) >= 4 for mark in on_both for page in PAGES)
    assert all(contrast(mark, svg.CARD) >= 4 for mark in (svg.BRIGHT, svg.DIM, *svg.ANSI.values()))
    for name, root in examples(drawn):
        card = [rect.get("fill") for rect in root if rect.get("width") == str(svg.WIDTH - 1)]
        assert bool(card) == (name in ("text.svg", "tree.svg"))
        seen = 0
        for group in tags(root, "svg") + tags(root, "g"):
            pages, box = card or PAGES, None
            for element in group:
                kind, fill = element.tag.split("}")[1], element.get("fill")
                if kind == "text":
                    on = [box] if box else pages
                    for piece in [element] if fill else element:
                        assert all(contrast(piece.get("fill"), page) >= 4 for page in on), (name, piece.get("fill"))
                        seen += 1
                elif kind in ("rect", "path", "circle") and fill not in card:
                    marks = {fill, element.get("stroke")} - {None, "none"}
                    assert all(contrast(mark, page) >= 3 for mark in marks for page in pages), (name, marks)
                box = fill if kind == "rect" and group.tag.endswith("}g") else None  # a box of the tree, then its text
        assert seen >= 5 and len(ElementTree.tostring(root)) < 60_000
        assert "{http://www.w3.org/2000/svg}title" == root[0].tag and root[0].text


def test_pictures_keep_their_words_inside(drawn):
    """Bug: a caption that runs out of the picture. By the widths of a wide sans-serif font."""
    for name, root in examples(drawn):
        for element in tags(root, "text"):
            size, x = float(element.get("font-size", 13)), float(element.get("x"))
            width = sum(0.3 if c in " .,:;il|'()/" else 0.56 for c in "".join(element.itertext())) * size
            left = x - width * dict(end=1, middle=0.5).get(element.get("text-anchor"), 0)
            if not element.get("style"):  # lines of tokens are cut by columns, see below
                assert left >= 0 and left + width <= svg.WIDTH, (name, "".join(element.itertext()))


def test_what_has_no_record_is_left_out_in_one_line(tmp_path, capsys):
    """Bug: a traceback, a bad record that hides the good ones, a reason that says nothing."""
    (tmp_path / "heads-cpu.json").write_text("{broken")
    (tmp_path / "decode-cpu.json").write_text(json.dumps(dict(decoding=[dict(drafted_by=1)])))
    bench.main(flags(tmp_path, out=tmp_path / "a" / "b", run=tmp_path / "r.json"))
    text, tree, heads, decode, last = capsys.readouterr().out.splitlines()
    assert text.startswith("left out: text.svg: ") and "r.json is not here; python generate.py --prompt" in text
    assert tree.startswith("left out: tree.svg: ") and "--show-tree writes it" in tree
    assert heads.startswith("left out: tokens-per-step.svg: ") and "cannot be read as json" in heads
    assert decode == ("left out: batch.svg: its record is not what its command writes (KeyError: "
                      "'tokens_per_second')")
    assert re.fullmatch(r".*roofline.svg: \d\.\d kB", last)
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["roofline.svg"]


@pytest.mark.parametrize("name, bad", [
    ("text.svg", dict(guessed_by=["head 1"])), ("text.svg", dict(guessed_by=["a", "b", "c"])),
    ("text.svg", dict(emitted=[1, 2, 3])), ("tree.svg", dict(parents=[-1, 4, 4, 4, 4])),
    ("tree.svg", dict(drafted_by=None)), ("tree.svg", dict(path=[0, 1, 9])), ("tree.svg", dict(nodes=[None] * 5))])
def test_a_run_that_is_none_is_left_out(drawn, name, bad):
    assert "its record is not what its command writes" in drawn(name, BRANCHES | bad)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written .*choose another --out"):
        bench.main(flags(tmp_path, out=tmp_path / "file", run=tmp_path))


# ---------------------------------------------------------------------------------------------------------------------
# Text and tree

HOSTILE = ["<b>&amp;\"'", "\x1b[31m", "\x00\x07\x7f", "\ud800", "\u202egnirts", "\ufffe", "]]>",
           "\u00e9\u4e2d\U0001f600", "\r"]


def test_tokens_have_the_colours_of_the_terminal(drawn):
    """Bug: a colour that means another drafter than in generate.py, a count of other steps."""
    other = step(["no"], ["model"], ["x"], [-1], 0, [0], prompt=1)
    six = step(list("123456"), [f"head {i}" for i in range(1, 7)], ["x"], [-1], 6, [0])
    root = drawn("text.svg", PLAIN, other, BRANCHES, six)
    shown = texts(root)
    assert lines(root) == ["def f(a): b return a", "123456"]
    assert (shown["def f(a):"], shown[" b"], shown[" return"], shown[" a"]) == (
        svg.BRIGHT, svg.DIM, svg.ANSI[HEAD_COLOURS[0]], svg.ANSI[LOOKUP_COLOUR])
    assert [shown[c] for c in "1234"] == [svg.ANSI[colour] for colour in HEAD_COLOURS[:4]]
    assert shown["56"] == svg.ANSI[HEAD_COLOURS[-1]] == shown["head 5"] == shown["head 6"]
    assert "10 tokens in 3 steps: 3.33 tokens per step (plain decoding: 1)" in shown
    assert len({*svg.ANSI.values(), svg.DIM, svg.BRIGHT}) == 8 and set(svg.ANSI) >= {*HEAD_COLOURS, LOOKUP_COLOUR}


def test_lines_break_where_the_text_does_and_at_the_edge(drawn):
    """Bug: indentation that is lost, a line that runs out of the card, a card without an end."""
    tokens = ["\n", "\tif a", ":\r\n", "        b", "\n\n    "]
    root = drawn("text.svg", step(tokens, ["model"] * 5, ["x"], [-1], 0, [0]))
    assert lines(root) == ["def f(a):", "    if a:", "        b"]
    assert all("white-space:pre" in line.get("style") for line in tags(root, "g")[0])
    root = drawn("text.svg", step(["a" * 100, "\u4e2d" * 50], ["model", "lookup"], ["x"], [-1], 0, [0]), prompt="b")
    assert lines(root) == ["b" + "a" * 87, "a" * 13 + "\u4e2d" * 37, "\u4e2d" * 13]
    assert svg.WIDTH - 2 * 24 >= draw.COLUMNS * svg.MONO_WIDTH * 13
    root = drawn("text.svg", step(["\n"] * 500 + ["a"], ["model"] * 501, ["x"], [-1], 0, [0]))
    assert lines(root)[-1] == "..." and int(root.get("height")) < 900


def test_hostile_tokens_are_shown(drawn):
    """Bug: a token that ends the element it stands in, that XML forbids, or that turns the line around."""
    many = step([*HOSTILE, "x" * 5000, "end"], ["lookup", "model"] * 5 + ["model"], ["<"], [-1], 0, [0])
    shown = "".join(lines(drawn("text.svg", many)))
    assert "<b>&amp;\"'\u241b[31m\u2400\u2407\u2421\ufffd\ufffdgnirts\ufffd]]>\u00e9\u4e2d\U0001f600\u240dxxx" in shown
    assert len(shown) < draw.LINES * draw.COLUMNS and shown.endswith("x...")
    tree = step(["a", "b", "\t" * 30], ["head 1", "head 2", "model"], ["0", *HOSTILE, "a\n b", "b"],
                [-1, *[0] * 10, 10], 11, [0, 10, 11])
    labels = [element.text or "" for element in tags(tags(drawn("tree.svg", tree), "g")[0], "text")]
    assert labels == ["0", "<b>&amp;\"'", "\u241b[31m", "\u2400\u2407\u2421", "\ufffd", "\ufffdgnirts", "\ufffd", "]]>",
                      "\u00e9\u4e2d\U0001f600", "\u240d", "a↵·b", "b", "⇥" * 13 + "…"]


def test_a_picture_that_is_too_large_is_left_out(drawn):
    """Bug: a README that loads megabytes."""
    restless = step(list("&<" * 2000), ["head 1", "model"] * 2000, ["x"], [-1], 0, [0])
    assert re.fullmatch(r"left out: text.svg: it would have \d+ kB, and 60 are allowed", drawn("text.svg", restless))


def test_the_tree_is_the_readable_step_with_most_accepted(drawn):
    """Bug: a step that shows nothing, one too large for the picture, one without the model's own token."""
    three = step(["1", "2", "3", "4"], ["head 1", "head 2", "lookup", "model"], ["0", "no", "1", "2", "3"],
                 [-1, 0, 0, 2, 3], 3, [0, 2, 3, 4], prompt=1)
    root = drawn("tree.svg", PLAIN, BRANCHES, CHAIN, LARGE, three, CUT)
    boxes, words = tags(tags(root, "g")[0], "rect"), [text.text for text in tags(tags(root, "g")[0], "text")]
    assert words == ["0", "no", "1", "2", "3", "4"] and "One step: 3 guesses accepted, 4 tokens" in texts(root)
    head, later, lookup = (svg.ANSI[colour] for colour in (*HEAD_COLOURS[:2], LOOKUP_COLOUR))
    assert [box.get("fill") for box in boxes] == [svg.BRIGHT, svg.CARD, head, later, lookup, svg.DIM]
    assert [box.get("stroke") for box in boxes] == [svg.BRIGHT, head, head, later, lookup, svg.DIM]
    assert len({box.get("y") for box in boxes if box.get("fill") != svg.CARD}) == 1, "the accepted path is a line"
    for steps in ([PLAIN], [CHAIN], [LARGE], [CUT], []):
        assert "has no step of fewer than 16 nodes" in drawn("tree.svg", *steps)


def test_boxes_and_edges_of_the_tree_do_not_collide(drawn):
    """Bug: boxes that cover each other or leave the card, an edge that ends elsewhere."""
    wide = step(["w" * 20, "b", "\n"], ["head 1", "head 2", "model"], ["root", *["w" * 20] * 3, "b", "c", "d", "e"],
                [-1, 0, 0, 0, 1, 2, 2, 5], 7, [0, 1, 4])
    root = drawn("tree.svg", wide)
    boxes = [[float(box.get(key)) for key in ("x", "y", "width", "height")] for box in tags(tags(root, "g")[0], "rect")]
    for i, (x, y, width, height) in enumerate(boxes):
        assert 0 < x and x + width < svg.WIDTH and y + height < int(root.get("height"))
        assert all(x + width < x2 or x2 + width2 < x or y + height < y2 or y2 + height2 < y
                   for x2, y2, width2, height2 in boxes[:i])
    edges = [[float(number) for number in re.findall(r"[\d.]+", path.get("d"))] for path in tags(root, "path")]
    for node, parent in enumerate([0, 0, 0, 1, 2, 2, 5, 4], 1):
        (x, y, width, _), (x2, y2, _, _) = boxes[parent], boxes[node]
        assert edges[node - 1][:2] + edges[node - 1][-2:] == pytest.approx([x + width, y + 12, x2, y2 + 12], abs=0.11)


# ---------------------------------------------------------------------------------------------------------------------
# Charts

def heads_row(name, tokens, **others):
    return dict(heads=name, temperature=0.0, tree_size=17, batch_size=1, tokens_per_step=tokens) | others


def test_bars_are_tokens_per_step(drawn):
    """Bug: a bar of another tree or temperature, an ablation among the presets, a length that is not the value's."""
    rows = [heads_row("medusa", 1.5), heads_row("medusa", 9.0, tree_size=5), heads_row("medusa", 9.0, temperature=0.8),
            heads_row("medusa", 9.0, batch_size=8), heads_row("clover-no-attention", 9.0), heads_row("clover", 2.0)]
    root = drawn("tokens-per-step.svg", heads_cpu=dict(decoding=rows))
    shown = [text.text for text in tags(root, "text")]
    assert {"Medusa", "Clover", "1.00", "1.50", "2.00"} < set(shown)
    assert not {"Hydra", "lookup alone", "9.00"} & set(shown)
    assert "greedy, 32 prompts, 128 new tokens each; 2 cores of an AMD EPYC" in shown[-1]
    assert shown[-2] == "16 guesses per step, heads of 500 training steps."
    rows += [heads_row("lookup", 5.0), heads_row("clover + lookup", 6.0), heads_row("hydra", 1.75)]
    root = drawn("tokens-per-step.svg", heads_cpu=dict(decoding=rows))
    shown = [text.text for text in tags(root, "text")]
    names = [name for name in shown if name in ("plain decoding", *draw.BARS.values())]
    assert names == ["plain decoding", "Medusa", "Hydra", "Clover", "lookup alone", "Clover + lookup"]
    ends = [float(rect.get("x")) + float(rect.get("width")) for rect in tags(root, "rect")]
    start = float(tags(root, "rect")[0].get("x"))
    assert [(end - start) / (ends[0] - start) for end in ends[3::2]] == pytest.approx([1.5, 1.75, 2, 5, 6], abs=0.01)
    assert "no greedy rows of tree size 17" in drawn("tokens-per-step.svg", heads_cpu=dict(decoding=rows[1:4]))


def test_lines_are_the_best_of_each_kind(drawn):
    """Bug: not the best variant, a kind under another's name, a point at a wrong height."""
    rows = [("plain", 100, 400), ("medusa 4", 110, 300), ("heads 7", 150, 500), ("heads 15", 160, 450),
            ("lookup 4", 250, 600), ("lookup 20", 300, 410), ("heads 3 + lookup 4", 200, 799.6), ("auto", 310, 800),
            ("transformers", 50, None), ("transformers, prompt lookup", 90, None)]
    rows = [dict(drafted_by=name, batch_size=size, tokens_per_second=speed) for name, *speeds in rows
            for size, speed in zip((1, 16), speeds) if speed]
    root = drawn("batch.svg", decode_cpu=dict(heads=["medusa", "clover"], decoding=rows, dtype="torch.bfloat16"))
    shown = texts(root)
    for end in ("plain decoding 100", "plain decoding 400", "Medusa heads 110", "Clover heads 160", "Clover heads 500",
                "lookup 300", "lookup 600", "Clover + lookup 200", "Clover + lookup 800", "auto (default) 310",
                "transformers 50", "transformers, prompt lookup 90", "batch size: sequences decoded together", "16"):
        assert end in shown
    assert sum("lookup" in words for words in shown) == 5 and len([words for words in shown if "trans" in words]) == 2
    rise = {}
    for circle in tags(root, "circle"):
        rise.setdefault(circle.get("fill"), []).append(float(circle.get("cy")))
    lookup, both = (rise[fill][0] - rise[fill][1] for fill in (svg.AMBER, svg.BLUE))
    assert both == pytest.approx(2 * lookup, abs=0.3), "from 200 to 800 it is two times as far as from 300 to 600"
    assert "bfloat16" in list(shown)[-1]


def test_labels_are_moved_apart():
    """Bug: names on top of each other, or in another order than their lines."""
    heights = [100, 101, 102, 300, 99.5]
    moved = svg.apart(heights)
    assert sorted(range(5), key=heights.__getitem__) == sorted(range(5), key=moved.__getitem__) and moved[3] == 300
    assert all(b - a > 15.5 for a, b in zip(sorted(moved), sorted(moved)[1:]))
    assert svg.apart([]) == [] and svg.apart([5]) == [5]


def test_the_roofline_is_the_commands_prediction_and_says_so(drawn):
    """Bug: a prediction that passes for a measurement, one of another tree, a line beyond the memory."""
    root = drawn("roofline.svg")
    shown = texts(root)
    assert "Predicted, not measured: speed-up on one H200 (logarithmic)" in shown
    heads, tokens = roofline.acceptance(Namespace(acceptance=None, heads=DEMO / "clover", temperature=0.0))
    for model, fill in draw.MODELS.items():
        prediction = roofline.Prediction(roofline.GPUS["h200"], roofline.sizes(model), heads)
        best = max(prediction.row(1, T, tokens(T))["speed_up"] for T in range(2, 65))
        assert shown[f"{draw.SIZES[model][1]} {best:.2f}x"] == fill
    ends = [re.findall(r"[\d.]+", path.get("d"))[-2] for path in tags(root, "path") if path.get("fill") == "none"]
    assert len(ends) == 4 and len(set(ends)) == 2, "30B fills the memory before 256 sequences"


@pytest.mark.parametrize("machine, words", [
    (MACHINE, "2 cores of an AMD EPYC"), (dict(cpu="Ryzen 7", threads=1, gpu=None), "1 core of a Ryzen 7"),
    (MACHINE | dict(gpu="NVIDIA H200"), "NVIDIA H200")])
def test_hardware(machine, words):
    assert draw.hardware(machine) == words
