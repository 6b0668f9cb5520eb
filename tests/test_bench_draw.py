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


def test_hostile_tokens_are_shown():
    """Bug: a token that ends its element, that XML forbids, or that turns the line around."""
    many = step([*HOSTILE, "x" * 5000], ["lookup", "model"] * 4 + ["model"], ["<"], [-1], 0, [0])
    shown = "".join(text["words"] for text in shapes(draw.draw_text(run(many)), "tspan"))
    assert "<b>&\"'\ufffd[31m\ufffd\ufffd\ufffd\ufffd\ufffdgnirts\ufffd]]>\u4e2d\U0001f600xxx" in shown
    tree = step(["a", "b", "\t" * 30], ["head 1", "head 2", "model"], ["0", *HOSTILE, "b"],
                [-1, *[0] * 8, 8], 9, [0, 8, 9])
    assert {"<b>&\"'", "\ufffd[31m", "\ufffd" * 3, "⇥" * 10} < {*colours(draw.draw_tree(run(tree)))}


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
