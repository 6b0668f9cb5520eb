"""bench/draw.py: the pictures say what the results say, and survive any token."""

import math
import re
from argparse import Namespace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from bench import draw, roofline, size_config
from clover import PRESETS, Head
from model import GPT, Block

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


def test_a_predicted_step_is_the_sum_that_is_written_down():
    """Bug: weights, heads, beams or caches counted wrongly. Here by the modules themselves, norms and biases too."""
    config, (B, T, K, W) = size_config("32b"), (3, 16, 4, 4)
    with torch.device("meta"):
        modules = GPT(config), Block(config), Head(PRESETS["clover"], config)
    model, block, head = (sum(p.numel() for p in module.parameters()) for module in modules)
    weights, head = model - 152064 * 5120, head + 9216 * 5120  # without the embedding table, with the draft vocabulary
    seconds = lambda name, *ceilings: (lambda tokens, rates, _: B * tokens / rates[B - 1])(
        *roofline.predict(*ceilings, prefix=100)[name])
    cache = B * 2 * 8 * 128 * 100  # numbers of a layer
    plain, tree = (seconds(name, 1, math.inf) for name in ("plain", "tree of 16"))
    assert plain == pytest.approx(2 * (weights + 64 * cache), rel=1e-3)
    assert tree - plain == pytest.approx(2 * (K * head + block + cache), rel=1e-3)
    products = 2 * (B * T * weights + (B + (K - 1) * B * W) * head + B * (K + 1) * block)
    attention = 4 * 65 * B * T * 40 * 128 * 100
    assert seconds("tree of 16", math.inf, 1) == pytest.approx(products + attention, rel=1e-3)


def test_the_prediction_has_the_shape_of_the_papers_figure():
    """Figure 2 of arXiv 2405.00263. Bug: at batch size 1 a gain other than that in tokens per step, one that does not
    fall when the arithmetic runs out, a batch size where the lines do not cross."""
    predicted = roofline.predict(*roofline.NOMINAL)
    bare, long = (roofline.predict(*roofline.NOMINAL, prefix=n) for n in (0, 1024))
    slower = roofline.predict(3.0e12, 8.0e14)
    _, plain, none = predicted.pop("plain")
    assert none == 0 and predicted["chain of 5 at 0.4"][0] == pytest.approx(1.65984)
    for name, (tokens, rates, last) in predicted.items():
        T = 6 if "chain" in name else int(name.split()[-1])
        gains = rates / plain
        assert 0.95 * tokens < gains[0] < tokens and gains[-1] < 1
        rows = bare[name][1][-1] / bare["plain"][1][-1] * T  # where nothing but the arithmetic of rows counts
        assert 0.95 * tokens < rows < tokens
        assert (gains[1:] < gains[:-1] + 1e-4).all()  # more sequences share the heads' weights
        assert (rates[1:] > rates[:-1] * (1 - 1e-9)).all()
        assert (gains[:last] > 1).all() and (gains[last:] <= 1).all() and slower[name][2] < last <= long[name][2]
    crossings = [last for name, (_, _, last) in predicted.items() if "tree" in name]
    assert crossings == sorted(crossings, reverse=True)


def test_the_prediction_is_the_same_in_picture_table_and_text(capsys):
    """Bug: a page that says other batch sizes than the function."""
    page = (ROOT / "docs" / "results.md").read_text()
    words = " ".join(page.split())
    roofline.print_table(*roofline.NOMINAL)
    title, table = capsys.readouterr().out.strip().split("\n\n")
    assert title.endswith(" at 3.35 TB/s, 989 TFLOP/s") and table in page
    shown = re.findall(r"(.*): pays up to B = (\d+)", "\n".join(colours(draw.draw_figure2())))
    last = {name: last for name, (_, _, last) in roofline.predict(*roofline.NOMINAL).items()}
    assert len(shown) == 3 and all(last[name] == int(B) for name, B in shown)
    chain, *trees, most = (last for _, _, last in list(roofline.predict(3.0e12, 8.0e14).values())[1:])
    assert f"are {chain} for the chain, and {', '.join(map(str, trees))} and {most} for the trees" in words
    long = roofline.predict(*roofline.NOMINAL, prefix=4096)
    assert all(long[f"tree of {T}"][2] == 1024 for T in (2, 4, 8)) and f"16 up to {long['tree of 16'][2]}." in words
