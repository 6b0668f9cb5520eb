"""README.md and docs/: links lead somewhere, flags exist, lines fit a terminal."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from backends.tensor_parallel import Group
from bench import __main__ as bench
from bench import size_config
from clover import PRESETS, Head
from model import GPT, Block
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


def result(name, **row):
    """The row of a record of bench/results that has these values."""
    rows = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())["decoding"]
    return next(found for found in rows if row.items() <= found.items())


def test_figures_of_the_readme_are_those_of_the_records():
    """Bug: a sentence or a table that stayed when the measurement changed."""
    text = " ".join((ROOT / "README.md").read_text().split())
    greedy, sampled = (result("heads-smollm2-trained-cpu", kind="all", drafted_by="clover + lookup", tree_size=17,
                              temperature=t)["tokens_per_step"] for t in (0, 0.8))
    assert f"yield {greedy:.2f} tokens per step, greedy, in trees of 17 nodes, and {sampled:.2f} at" in text
    for name, column, form in (("auto", "speed_up", "| {:.2f}x |"), ("plain", "tokens_per_second", "| {:.0f} |")):
        assert form.format(result("decode-smollm2-cpu", kind="all", drafted_by=name)[column]) in text
    sizes = (file.stat().st_size for file in (ROOT / "demo").glob("*.safetensors"))  # bfloat16: 2 bytes a parameter
    assert f"a model of {sum(sizes) / 2e6:.0f} million parameters" in text


def test_what_fits_several_gpus():
    """Bug: a table of sizes that no model has. The heads are Clover's, the cache is of 8 texts of 4,096 tokens."""
    large = dict(n_layer=126, n_head=128, n_embd=16384, n_inner=53248)
    models = {"Llama 3 8B": size_config("8b"), "Llama 3 70B": size_config("70b"),
              "Llama 3.1 405B": replace(size_config("70b"), **large)}
    page, clover = (ROOT / "docs" / "models.md").read_text(), PRESETS["clover"]
    count = lambda module: sum(p.numel() for p in module.parameters())
    for name, config in models.items():
        with torch.device("meta"):
            ranks = [GPT(config) for _ in range(4)]
            for size, model in zip((1, 2, 4, 8), ranks):
                Group(0, size).divide(model)
            heads = count(Block(config)) + clover.n_draft * count(Head(clover, config))
        parts = [model.blocks[0].attn.config for model in ranks]
        cached = [2 * c.n_layer * c.n_kv_head * c.head_size * 8 * 4096 for c in parts]
        cells = [f"{2 * (count(model) + heads + cache) / 1e9:.0f}" for model, cache in zip(ranks, cached)]
        assert f"| {name} | {' | '.join(cells)} |" in page


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


def test_the_readme_is_short_and_quotes_the_code_as_it_is():
    """Bug: a README that grows again, lengths of files that are long past, a step that is no longer the step."""
    text, loop = (ROOT / "README.md").read_text(), (ROOT / "generate.py").read_text()
    assert len(text.splitlines()) <= 180
    for file, lines in re.findall(r"^\| \[(\w+\.py)\].*?\| ([\d,]+) \|", text, re.M):
        assert int(lines.replace(",", "")) == pytest.approx(len((ROOT / file).read_text().splitlines()), rel=0.1), file
    step = re.search(r"def step\(self, plan\):\n.*?```", text, re.S)[0].splitlines()[:-1]
    code = [" ".join(line.split()) for line in loop.splitlines()]
    assert len(step) == 7 and all(" ".join(line.split()) in code for line in step)
