"""bench/draw.py: the pictures say what the results say, and survive any token."""

from argparse import Namespace
from pathlib import Path
from xml.etree import ElementTree

from bench import draw

ROOT = Path(__file__).parent.parent
HOSTILE = ["<b>&\"'", "\x1b[31m", "\0\x07\x7f", "\ud800", "\u202egnirts", "\ufffe", "]]>", "\u4e2d\U0001f600"]
SVG = "{http://www.w3.org/2000/svg}"


def step(emitted, guessed_by, nodes, parents, heads, path):
    """One of Trees.steps. heads: how many of the nodes are the heads'; the rest are lookup's."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    drafted_by = [f"head {depth}" if node <= heads else "lookup" for node, depth in enumerate(depths)]
    return dict(prompt=0, step=1, emitted=emitted, guessed_by=guessed_by, nodes=nodes, parents=parents,
                drafted_by=["root", *drafted_by[1:]], path=path)


BRANCHES = step([" return", " a", "\n"], ["head 1", "lookup", "model"], [" b", " return", " self", " a", " + 1"],
                [-1, 0, 0, 1, 3], 2, [0, 1, 3])
CUT = step(["a", "b"], ["head 1", "head 2"], ["x", "a", "b", "c"], [-1, 0, 1, 0], 3, [0, 1, 2])


def shapes(picture, tag):
    return [dict(shape.attrib, words=shape.text or "") for shape in ElementTree.fromstring(picture).iter(SVG + tag)]


def colours(picture):
    """{text: colour}"""
    return {text["words"]: text["fill"] for text in shapes(picture, "text") + shapes(picture, "tspan")}


def run(*steps, prompt="def f(a):"):
    return dict(prompts=[prompt], drafts=list(steps))


def test_committed_pictures_are_those_of_the_committed_results(tmp_path):
    """Bug: a result that changed, and a picture that did not: python -m bench draw."""
    draw.bench(Namespace(out=tmp_path))
    drawn = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert drawn == {file.name: file.read_text() for file in (ROOT / "docs" / "img").glob("*.svg")}
    for picture in drawn.values():
        assert ElementTree.fromstring(picture)[0].tag == SVG + "title" and len(shapes(picture, "text")) >= 10


def test_tokens_have_the_colour_of_what_guessed_them():
    """Bug: a token in another's colour, words out of place, a wrong count."""
    picture = draw.draw_text(run(BRANCHES, step(["b", "\n\n  c"], ["head 2", "model"], ["x"], [-1], 0, [0])))
    head, later, lookup = (draw.TOKENS[name] for name in ("head 1", "head 2", "lookup"))
    *lines, last = [[(span.text, span.get("fill")) for span in text]
                    for text in ElementTree.fromstring(picture).iter(SVG + "text")]
    assert lines == [
        [("by head 1    ", head), ("by head 2    ", later), ("by lookup    ", lookup), ("by model    ", draw.DIM)],
        [("def f(a):", draw.BRIGHT)], [(None, draw.BRIGHT), (" return", head), (" a", lookup), (None, draw.DIM)],
        [(None, draw.DIM), ("b", later), (None, draw.DIM)], [(None, draw.DIM)], [("  c", draw.DIM)]]
    assert "5 tokens in 2 steps: 2.50 tokens per step (plain decoding: 1)" in colours(picture) and not last
    assert [float(text["y"]) for text in shapes(picture, "text")][1:6] == [66, 85, 104, 123, 142]


def test_hostile_tokens_are_shown():
    """Bug: a token that ends its element, that XML forbids, or that turns the line around."""
    many = step([*HOSTILE, "x" * 5000], ["lookup", "model"] * 4 + ["model"], ["<"], [-1], 0, [0])
    shown = "".join(text["words"] for text in shapes(draw.draw_text(run(many)), "tspan"))
    assert "<b>&\"'\ufffd[31m\ufffd\ufffd\ufffd\ufffd\ufffdgnirts\ufffd]]>\u4e2d\U0001f600xxx" in shown
    tree = step(["a", "b", "\t" * 30], ["head 1", "head 2", "model"], ["0", *HOSTILE, "b"],
                [-1, *[0] * 8, 8], 9, [0, 8, 9])
    assert {"<b>&\"'", "\ufffd[31m", "\ufffd" * 3, "⇥" * 10} < {*colours(draw.draw_tree(run(tree)))}


def test_the_tree_is_the_small_step_with_most_accepted():
    """Bug: a step that shows nothing, one without the model's own token; an edge that ends elsewhere, the accepted path
    not in a line, two nodes in one place."""
    three = step(["1", "2", "3", "4"], ["head 1", "head 2", "lookup", "model"], ["0", "no", "1", "2", "3"],
                 [-1, 0, 0, 2, 3], 3, [0, 2, 3, 4])
    picture = draw.draw_tree(run(BRANCHES, three, CUT))
    assert any("rejected. 4 tokens." in words for words in colours(picture))
    _, *nodes = shapes(picture, "rect")
    first, later, lookup = (draw.TOKENS[name] for name in ("head 1", "head 2", "lookup"))
    fills = [draw.BRIGHT, draw.CARD, first, later, lookup, draw.DIM]
    assert [node["fill"] for node in nodes] == fills
    assert [node["stroke"] for node in nodes] == [draw.BRIGHT, first, first, later, lookup, draw.DIM]
    places = [(float(node["x"]), float(node["y"])) for node in nodes]
    assert len({y for (_, y), fill in zip(places, fills) if fill != draw.CARD}) == 1 and len(set(places)) == 6
    for edge, node, parent in zip(shapes(picture, "polyline"), range(1, 6), [0, 0, 2, 3, 4]):
        ends = [tuple(map(float, point.split(","))) for point in edge["points"].split()]
        assert (ends[0], ends[-1]) == tuple((x, y + 10) for x, y in (places[parent], places[node]))
        assert (edge["stroke"] == draw.BRIGHT) == (fills[node] != draw.CARD)


def test_tables_by_kind_have_a_row_for_each_drafter(capsys):
    """Bug: a cell in another's place, two tree sizes in one row, a table of what was not measured."""
    row = lambda kind, heads, T, value: dict(kind=kind, heads=heads, tree_size=T, tokens_per_step=value, speed_up=value)
    draw.print_kinds([row(kind, heads, T, value + T) for kind, value in (("code", 0.125), ("all", 0.25))
                      for heads, T in (("medusa", 5), ("clover", 5), ("clover", 9))])
    first, second = capsys.readouterr().out.split("\nspeed up\n")
    assert first.splitlines()[1:] == ["tokens per step", "", "| heads | tree size | code | all |",
                                      "| --- | --- | --- | --- |", "| medusa | 5 | 5.12 | 5.25 |",
                                      "| clover | 5 | 5.12 | 5.25 |", "| clover | 9 | 9.12 | 9.25 |"]
    assert second.splitlines()[-1] == "| clover | 9 | 9.12x | 9.25x |"
