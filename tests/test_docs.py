"""README.md, demo/README.md and docs/: links work, flags exist, commands and Python run."""

import importlib
import inspect
import io
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import test_demo
from bench import __main__ as bench
from bench import timing
from conftest import ROOT, call_once
from generate import Decoder, generate
from test_train_heads import measured, write_lines
from tools.flags import parse_generate, parse_serve
from tools.run import main as generate_main
from training import data, evaluate
from training.flags import parse_heads
from training.program import main as train_main

DOCS = [ROOT / "demo" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BENCH = ("decode", "cpu", "gpu", "draw")
FLAG = r"(?<![\w-])--[a-z][\w-]*"
OTHERS = {"--nproc-per-node", "--no-binary", "--no-deps", "--target"}  # torchrun's, pip's
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```", re.M | re.S)
name = lambda path: str(path.relative_to(ROOT))


def anchors(page):
    """GitHub's anchors for the headings of a page."""
    headings = re.findall(r"^#+ (.*)", re.sub(BLOCK, "", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=name)
def test_links_work(page):
    """Bug: a link to a file that moved, or to a heading that was renamed."""
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, heading = link.partition("#")
        if not path.startswith(("http:", "https:")):
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not heading or heading in anchors(target), link
    tests = "".join(file.read_text() for file in (ROOT / "tests").glob("test_*.py"))
    named = re.findall(r"\btest_\w+", page.read_text())
    assert [test for test in named if test not in tests and not (ROOT / "tests" / f"{test}.py").exists()] == []


def flags(capsys, parse, *command):
    """The flags in a command's --help."""
    with pytest.raises(SystemExit):
        parse([*command, "--help"])
    return set(re.findall(FLAG, capsys.readouterr().out))


def test_flags_exist_and_are_documented(capsys):
    """Bug: a page names a flag that does not exist, or a flag is not documented."""
    generate, heads, serve = (flags(capsys, parse) for parse in (parse_generate, parse_heads, parse_serve))
    known = set.union(OTHERS, generate, heads, serve, *(flags(capsys, bench.parse, command) for command in BENCH))
    named = {name(page): set(re.findall(FLAG, page.read_text())) for page in (ROOT / "README.md", *DOCS)}
    assert {page: found - known for page, found in named.items() if found - known} == {}
    assert generate - named["docs/cli.md"] == serve - generate - named["docs/serving.md"] == set()
    assert heads - named["docs/cli.md"] - named["docs/training.md"] == set()


# ---------------------------------------------------------------------------------------------------------------------
# Blocks of code. Those marked as history are records of past runs; only their flags are checked.

PAGES = {name(page): page.read_text() for page in (ROOT / "README.md", *DOCS)}
BLOCKS = {f"{page}:{text[:block.start()].count(chr(10)) + 1}": block.groups()
          for page, text in PAGES.items() for block in BLOCK.finditer(text)}
RECORD = """exec 3> "$LOG"
note() { printf '%s\\0' "$@" >&3; printf '\\1\\0' >&3; }
python() { case "$1" in -) note - "$(cat)";; -m) note "${@:2}";; *) note "$@";; esac; }
torchrun() { note "${@:3}"; }
pip() { :; }
curl() { :; }
"""
PARSERS = {"generate.py": parse_generate, "train_heads.py": parse_heads, "tools.serve": parse_serve,
           "bench": bench.parse}
TINY = "--device cpu --steps 1 --batch-size 2 --block-size 16 --data".split()


def commands(code, folder):
    """The argument lists of a block's Python commands, parsed by bash."""
    typed = re.findall(r"^\$ (.*)", code, re.M)  # in a block that also shows the output
    script = RECORD + ("\n".join(typed) or code)
    subprocess.run(["bash", "-ec", script], cwd=folder, env=dict(LOG="log", PATH="/usr/bin:/bin"), check=True)
    return [entry.split("\0")[:-1] for entry in (folder / "log").read_text().split("\1\0")[:-1]]


def run_command(program, *argv):
    if program in ("-", "-c"):
        exec(argv[0], {})
    elif program == "generate.py":
        generate_main(parse_generate([*argv, "--device", "cpu", "--max-new-tokens", "3"]))
    elif program == "train_heads.py":
        assert train_main(parse_heads([*argv, *TINY, "texts.jsonl"])) == 0
    else:  # other tests run these
        check_command(program, *argv)


def check_command(program, *argv):
    if program in PARSERS:
        PARSERS[program](argv)
    elif program != "-c":
        assert importlib.util.find_spec(program)


@pytest.fixture
def sandbox(folder, tmp_path, monkeypatch):
    """A working directory with the models, heads and texts that the pages name. Measurements are small."""
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    for path in ("smollm2", "path/to/model", "path/to/large", "path/to/model.gguf", "out/base", "Qwen/Qwen3-0.6B",
                 "Qwen/Qwen3-8B"):
        shutil.copytree(folder, tmp_path / path)
        (tmp_path / path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    for path in ("out/clover", *re.findall("--heads (\\S+/\\S+)", PAGES["docs/published.md"])):
        shutil.copytree(folder / "clover", tmp_path / path)
    (tmp_path / "out/clover/run.json").touch()  # a run's folder, which training may write to
    (tmp_path / "docs" / "img").mkdir(parents=True)
    write_lines(tmp_path / "texts.jsonl", (dict(text=f"line {i} of a text " * 20) for i in range(200)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hi!\n")))
    monkeypatch.setattr(timing, "seconds", call_once)
    monkeypatch.setattr("tools.flags.find_spec", bool)  # the server's flags are parsed without its packages
    monkeypatch.setattr(evaluate, "measure", measured)
    monkeypatch.setattr(test_demo, "STARTS", test_demo.STARTS[:2])
    monkeypatch.setattr(test_demo, "generate", lambda model, given, n, **options: generate(model, given, 2, **options))
    load, end = data.load_tokens, 1200
    few = lambda tokens: data.Tokens(tokens.ids[:end], tokens.loss_mask[:end], tokens.starts[tokens.starts < end])
    monkeypatch.setattr(data, "load_tokens", lambda *given: few(load(*given)))
    return tmp_path


@pytest.mark.parametrize("place", [place for place, (kind, _) in BLOCKS.items() if kind in ("", "history")])
def test_commands_in_the_docs_run(place, sandbox):
    """Bug: a command, or the code in it, is out of date; for example, a module was renamed."""
    kind, code = BLOCKS[place]
    if kind == "history":  # a flag may need a GGUF file
        shutil.rmtree("smollm2")
        Path("smollm2").touch()
    found = commands(code, sandbox)
    assert found or "pip install" in code or "curl" in code
    for command in found:
        (run_command if kind == "" else check_command)(*command)


def test_python_in_the_docs_runs(sandbox, capsys):
    """Bug: an example is out of date. tests/test_copying.py runs those of docs/copying.md."""
    blocks = {place: code for place, (kind, code) in BLOCKS.items() if kind == "python" and "copying" not in place}
    assert {kind for kind, _ in BLOCKS.values()} == {"", "history", "python", "python history", "text"}
    stages, readme, engine, _ = blocks.values()
    parts = Decoder.step, Decoder.finish
    assert stages == textwrap.dedent("\n".join(map(inspect.getsource, parts)))
    names = {}
    for code in (readme, engine):  # the second uses the README's model, heads and prompt
        exec(code, names)
    assert names["sequence"].ended == "length" and len(names["sequence"].tokens) == 64


def test_requests_in_the_docs_work(sandbox, capsys):
    """Bug: the server refuses a request in docs/serving.md."""
    pytest.importorskip("openai")
    from test_tools_serve import Running
    server = Running("smollm2", "--name", "smollm2", "--max-new-tokens", "8")
    try:
        client, = (code for _, code in BLOCKS.values() if "import OpenAI" in code)
        exec(client.replace("http://127.0.0.1:8000", server.url), {})
        assert capsys.readouterr().out
        (path, body), = re.findall(r"curl http://127.0.0.1:8000(\S+) .*?-d '(.*?)'", PAGES["docs/serving.md"], re.S)
        assert server.post(body, path).json()["choices"][0]["finish_reason"]
    finally:
        server.stop()
