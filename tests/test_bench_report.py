"""bench/report.py: the tables say what the files hold, and a bad file says so."""

import json
import re
from pathlib import Path

import pytest

from bench import __main__ as bench
from bench import cell, operations, report
from model import InputError

ROOT = Path(__file__).parent.parent
MACHINE = dict(cpu="a CPU", cores=16, threads=8, python="3.12.3", torch="2.11.0", gpu="NVIDIA H200", triton="3.6.0",
               commit="1a2b3c4")
STEP = dict(batch_size=8, tree_size=16, step_ms=5.0, floor_ms=4.0, share=0.8, launches=350, kernels_ms=4.5, kernels={},
            stages_ms=dict(draft=1.0, verify=3.5, sample=0.25, accept=0.125, commit=0.125))


def markdown_tables(text):
    """[(headings, [cells of a row])] of the tables in a Markdown text; headings in small letters."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        head, _, *rows = ([cell.strip() for cell in line.strip("|\n ").split(" | ")] for line in block.splitlines())
        found.append(([heading.lower() for heading in head], rows))
    return found


@pytest.fixture
def shown(tmp_path, capsys):
    """Reports files of these contents, {name: record or text} -> the printed lines."""
    def shown(**files):
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content | dict(machine=MACHINE))
            (tmp_path / f"{name}.json").write_text(text)
        bench.main(["report", str(tmp_path)])
        return capsys.readouterr().out.splitlines()
    return shown


def test_measured_tables_of_the_readme_are_those_of_the_files():
    """Bug: a figure that was typed, or that stayed when the file changed."""
    ours = []
    for path in (ROOT / "bench" / "results").glob("*.json"):
        record = json.loads(path.read_text())
        ours += [({heading.lower(): column for heading, column in columns.items()}, rows)
                 for _, columns, rows in report.FORMS.get(record["bench"], lambda _: [])(record)]
    texts = "".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    checked = 0
    for headings, lines in markdown_tables(texts):
        same = [({tuple(cell(row, columns[heading]) for heading in headings) for row in rows})
                for columns, rows in ours if rows and set(headings) <= set(columns)]
        if {"heads", "drafted by", "kernel", "batch size"} & set(headings):
            checked += bool(same)
            assert not same or any({tuple(line) for line in lines} <= rows for rows in same), headings
    assert checked >= 1


def test_titles_name_hardware_versions_and_what_was_measured(shown):
    lines = shown(steps={"bench": "decode-random", "model": "8b", "dtype": "torch.bfloat16", "steps": [STEP]})
    assert lines[0] == ("### Steps of 8b with random weights, bfloat16, NVIDIA H200, torch 2.11.0, triton 3.6.0, "
                        "commit 1a2b3c4")
    assert markdown_tables("\n".join(lines) + "\n") == [(
        ["batch size", "tree size", "ms per step", "floor, ms", "share of the floor", "draft, ms", "verify, ms",
         "sample, ms", "accept, ms", "commit, ms", "launches", "in kernels, ms"],
        [["8", "16", "5.00", "4.00", "80%", "1.00", "3.50", "0.25", "0.12", "0.12", "350", "4.50"]])]


def test_columns_that_say_nothing_or_always_the_same(shown):
    """Bug: a column of dashes, or of one value; a value above the table that is not that of all rows."""
    rows = [STEP | dict(launches=None, tree_size=size, step_ms=size) for size in (1, 2, 4)]
    lines = shown(steps={"bench": "decode-random", "model": "8b", "steps": rows})
    assert lines[2].startswith("batch size: 8; floor, ms: 4.00; share of the floor: 80%; draft, ms: 1.00")
    headings, cells = markdown_tables("\n".join(lines) + "\n")[0]
    assert headings == ["tree size", "ms per step"] and cells == [["1", "1.00"], ["2", "2.00"], ["4", "4.00"]]


def test_decoding_names_its_text_heads_and_drafters(shown):
    """Bug: tables of two texts or heads that look the same, a ratio of another batch size."""
    row = dict(batch_size=1, floor_ms=0.5, identical=1.0, peak_gb=None)
    rows = [row | dict(drafted_by=name, tree_size=size, tokens_per_step=step, tokens_per_second=speed,
                       speed_up=speed / 100)
            for name, size, step, speed in (("plain", 1, 1.0, 100.0), ("auto", 30, 3.5, 250.0),
                                            ("transformers", None, None, 60.0))]
    record = dict(bench="decode", model="demo", heads=["medusa", "clover"], text="rename", temperature=0.8,
                  decoding=rows, auto_over_best={"1": 0.975, "8": 1.125}, transformers="5.0",
                  trees=dict(clover={"1": 1.0, "8": 2.5}))
    text = "\n".join(shown(decode=record, other=record | dict(text="heldout", heads=["none"])))
    assert "### Decoding demo, heads clover, held-out text and its first quarter with a name changed, temp" in text
    assert "### Decoding demo, heads none, held-out text, temperature 0.8, NVIDIA H200" in text
    assert "batch size: 1; floor, ms: 0.50; identical texts: 100%" in text
    assert "| auto | 30 | 3.50 | 250 | 2.50x |\n| transformers | - | - | 60 | 0.60x |" in text
    assert "| 1 | 0.97x |\n| 8 | 1.12x |" in text and "| clover | 1.00 | 2.50 |" in text


def test_kernels_and_tests_with_what_went_wrong(shown):
    """Bug: a rival's error that breaks the table, a failed test that is not named."""
    row = dict(heads="8b", batch=8, prefix=8192, T=16, us=100.0, bytes=1, share_of_copy=0.9, speed_up=1.25, sdpa=125.0,
               flex="BackendCompilerFailed: of\nmany | lines")
    tests = [dict(test="tests/test_a.py::test_b", outcome=outcome, seconds=2.5) for outcome in ("passed", "passed")]
    tests.append(dict(test="tests/test_a.py::test_c", outcome="failed", seconds=1.0, error="def test_c():\nE  a | b"))
    text = "\n".join(shown(kernels=dict(bench="kernels", copy_gb_per_s=4300.0, attention=[row]),
                           tests=dict(bench="tests", files=["tests"], tests=tests)))
    assert "### attention, us; 4300 GB/s copied" in text and "flex | against" in text
    assert "| 8b | 8 | 8192 | 16 | 100.0 | 90% | 125.0 | BackendCompilerFailed | 1.25x |" in text
    assert set(operations.OPERATIONS["attention"].rivals) == {"sdpa", "sdpa packed", "flex"}
    assert "packed" not in text
    assert "### pytest -m gpu, 6 seconds" in text and "| passed | 2 |\n| failed | 1 |" in text
    assert "| tests/test_a.py::test_c | failed | E  a / b |" in text


def test_bad_files_are_one_line_each_and_the_others_are_reported(shown):
    """Bug: a traceback, a bad file that hides the good ones, a failure or a missing rest that is not told."""
    good = {"bench": "decode-random", "model": "8b", "steps": [STEP]}
    lines = shown(a="{broken", b="[1, 2]", c={"bench": "other"}, d={"bench": "heads", "model": "8b"},
                  e={"bench": "decode-random", "model": "8b", "steps": [dict(step_ms="x", floor_ms=[])]}, f=good,
                  g=good | dict(complete=False), h=good | dict(error=dict(exit_code=2, tail=["a", "the reason"])),
                  i=dict(error=dict(exit_code=-9, tail=[])))
    say = lambda name: [line for line in lines if f"/{name}.json: " in line]
    assert [len(say(name)) for name in "abcdefghi"] == [1, 1, 1, 1, 1, 0, 1, 1, 1]
    assert "cannot be read as json" in say("a")[0] and "expected a json object" in say("b")[0]
    assert "left out; expected a record of bench decode" in say("c")[0] and "left out" in say("d")[0] + say("e")[0]
    assert "not complete" in say("g")[0] and "failed, exit code 2: the reason" in say("h")[0]
    assert "failed, exit code -9: no output" in say("i")[0]
    assert sum(line.startswith("### Steps of 8b") for line in lines) == 3


def test_a_folder_without_files_is_refused(tmp_path):
    with pytest.raises(InputError, match="expected a folder with .json files"):
        bench.main(["report", str(tmp_path)])
