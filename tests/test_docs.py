"""README.md and docs/: links lead somewhere, flags exist."""

import re
from pathlib import Path

import pytest

from bench import __main__ as bench
from tools.flags import parse_generate, parse_serve
from training.flags import parse_heads

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
BENCH = ("decode", "gpu", "draw")
FLAG = r"(?<![\w-])--[a-z][\w-]*"
OTHERS = {"--nproc-per-node", "--no-deps"}  # torchrun's, pip's
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
    generate, heads, serve = (flags(capsys, parse) for parse in (parse_generate, parse_heads, parse_serve))
    known = set.union(OTHERS, generate, heads, serve,
                      *(flags(capsys, bench.parse, command) for command in BENCH))
    told = {page.name: set(re.findall(FLAG, page.read_text())) for page in (ROOT / "README.md", *DOCS)}
    assert {page: found - known for page, found in told.items() if found - known} == {}
    assert generate - told["cli.md"] == serve - generate - told["serving.md"] == set()
    assert heads - told["cli.md"] - told["training.md"] == set()
