"""README.md and docs/: links lead somewhere, flags exist, lines fit a terminal."""

import re
from pathlib import Path

import pytest

import train_heads
from bench import __main__ as bench
from tools import cli
from training import base

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
BENCH = ("heads", "decode", "exact", "kernels", "launches", "tests", "gpu", "report", "roofline")
FLAG = r"(?<![\w-])--[a-z][\w-]*"
OTHERS = {"--nproc-per-node",  # torchrun's
          "--show-tree"}       # documented before it landed
name = lambda path: path.name


def prose(page):
    """(number, line) of a page's lines outside code and tables."""
    code = False
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        code ^= line.startswith("```")
        if not code and not line.startswith(("|", "```")):
            yield number, line


def anchors(page):
    """What GitHub calls the headings of a page."""
    headings = (line.lstrip("# ").lower() for _, line in prose(page) if line.startswith("#"))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=name)
def test_links_lead_somewhere(page):
    """Bug: a link to a file that moved, or to a heading that is now called otherwise."""
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, heading = link.partition("#")
        if not path.startswith(("http:", "https:")):
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not heading or heading in anchors(target), link


def flags(capsys, parse, *command):
    """The flags that a command's --help names."""
    with pytest.raises(SystemExit):
        parse([*command, "--help"])
    return set(re.findall(FLAG, capsys.readouterr().out))


def test_flags_of_the_pages_exist(capsys):
    """Bug: a flag that was renamed, or never was; one of generate.py or train_heads.py that no page tells of."""
    generate, heads = flags(capsys, cli.parse), flags(capsys, train_heads.parse)
    known = set.union(OTHERS, generate, heads, flags(capsys, base.parse),
                      *(flags(capsys, bench.parse, command) for command in BENCH))
    told = {page.name: set(re.findall(FLAG, page.read_text())) for page in DOCS}
    assert {page: found - known for page, found in told.items() if found - known} == {}
    assert generate - told["cli.md"] == set() and heads - told["cli.md"] - told["training.md"] == set()


@pytest.mark.parametrize("page", DOCS, ids=name)
def test_lines_fit(page):
    """Bug: prose that an editor or a terminal of 120 columns cuts off."""
    assert [(number, len(line)) for number, line in prose(page) if len(line) > 120] == []
