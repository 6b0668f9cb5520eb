"""bench/gpu.py: slices that end in time, go on where they were, and leave one another's results alone."""

import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from bench import __main__ as bench
from bench import gpu
from model import InputError

SAVES = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('{\"bench\": \"toy\", \"complete\": true}')"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
BLOCKS = "import signal; [signal.pause() for _ in iter(int, 1)]"


def script(code, path):
    return [sys.executable, "-c", code, str(path)]


def test_a_failure_leaves_the_others_and_nothing_runs_twice(tmp_path, capsys):
    """Bug: a part that takes the slice with it, a failure that is not told, or a part that is measured again."""
    begun = dict(bench="toy", rows=[1, 2], complete=False)
    (tmp_path / "partial.json").write_text(json.dumps(begun))
    argvs = dict(crashes=script("raise SystemExit('out of luck')", ""),
                 silent=script("pass", ""), partial=script("raise SystemExit(3)", ""),
                 fine=script(SAVES, tmp_path / "fine.json"))
    gpu.run_slice(argvs, tmp_path, 600)
    error = json.loads((tmp_path / "crashes.json").read_text())["error"]
    assert error == dict(exit_code=1, tail=["out of luck"])
    assert json.loads((tmp_path / "silent.json").read_text())["error"] == dict(exit_code=0, tail=[])
    assert json.loads((tmp_path / "partial.json").read_text()) == begun | dict(error=dict(exit_code=3, tail=[]))
    assert [gpu.state(tmp_path / f"{name}.json") for name in argvs] == ["failed"] * 3 + ["complete"]
    said = capsys.readouterr().out
    assert "fine: complete" in said and f"crashes: failed; see {tmp_path / 'crashes.log'}, and delete" in said
    gpu.run_slice({name: script("raise SystemExit(4)", "") for name in argvs}, tmp_path, 600)
    assert json.loads((tmp_path / "partial.json").read_text())["error"]["exit_code"] == 3
    assert gpu.state(tmp_path / "fine.json") == "complete"


def test_what_was_begun_goes_on_and_nothing_starts_too_late(tmp_path):
    """Bug: a part that was stopped counts as done, or a slice that starts a command when its time is up."""
    path = tmp_path / "part.json"
    path.write_text('{"complete": false}')
    gpu.run_slice({"part": script(SAVES, path)}, tmp_path, 0)
    assert gpu.state(path) == "begun" and not (tmp_path / "part.log").exists()
    gpu.run_slice({"part": script(SAVES, path)}, tmp_path, 600)
    assert gpu.state(path) == "complete"


def test_a_command_ends_when_its_time_is_up(tmp_path):
    """Bug: a slice that waits for a command that hangs."""
    assert gpu.run(script(BLOCKS, ""), tmp_path / "log", 0) is None


@pytest.mark.parametrize("listens", [True, False])
def test_a_command_may_save_and_then_it_ends(listens, monkeypatch):
    """Bug: a command that is killed before it saved, or one that runs on."""
    monkeypatch.setattr(gpu, "GRACE", 60 if listens else 0)
    code = f"{'' if listens else DEAF}print(flush=True); {BLOCKS}"
    with subprocess.Popen(script(code, ""), stdout=subprocess.PIPE, start_new_session=True) as process:
        process.stdout.readline()
        try:
            gpu.stop(process)
            assert process.returncode == -(signal.SIGTERM if listens else signal.SIGKILL)
        finally:
            process.kill()


def test_the_slices_are_commands_of_bench(tmp_path):
    """Bug: a flag that does not exist, found when a GPU is there; a folder with a space in its name."""
    out = tmp_path / "a folder"
    for parts in gpu.SLICES:
        for name, argv in gpu.commands(parts, out).items():
            args = bench.parse(argv[3:])
            assert argv[:3] == [sys.executable, "-m", "bench"] and args.out == str(out / f"{name}.json")
            assert getattr(args, "train", None) in (None, str(out / "124m"))
    assert len(args.data) == 3 and args.base == "124m"


def test_a_slice_runs_a_command_of_bench(tmp_path):
    """Bug: a process that does not find bench, a record that nobody writes."""
    (tmp_path / "test_nothing.py").touch()
    gpu.run_slice(gpu.commands(dict(toy=f"tests {tmp_path / 'test_nothing.py'}"), tmp_path), tmp_path, 600)
    record = json.loads((tmp_path / "toy.json").read_text())
    assert record["complete"] and record["tests"] == [], (tmp_path / "toy.log").read_text()


def test_without_a_gpu_one_line_says_what_to_run(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "run_slice", lambda *_: pytest.fail("ran"))
    with pytest.raises(InputError, match="needs a CUDA device.*bench decode or bench roofline"):
        bench.main(["gpu", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_one_slice_or_all_of_them(monkeypatch, tmp_path):
    """Bug: another slice than the one asked for, or another limit."""
    ran = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "SLICES", ({"a": "tests"}, {"b": "tests"}))
    monkeypatch.setattr(gpu, "run_slice", lambda argvs, out, seconds: ran.append((*argvs, seconds)))
    args = SimpleNamespace(out=str(tmp_path / "out"), slice=2, minutes=3)
    assert gpu.bench(args)["parts"] == dict(a="missing", b="missing") and ran == [("b", 180)]
    args.slice = None
    gpu.bench(args)
    assert ran[1:] == [("a", 180), ("b", 180)]
    (tmp_path / "file").touch()
    args.out = str(tmp_path / "file")
    with pytest.raises(InputError, match="cannot be made a folder"):
        gpu.bench(args)


# ---------------------------------------------------------------------------------------------------------------------
# The tests on a GPU

TESTS = """
import pytest
pytestmark = pytest.mark.gpu

def test_passes(): pass
def test_fails(): assert 1 == 2, "one is not two"
@pytest.mark.skip
def test_is_skipped(): pass
@pytest.fixture
def broken(): raise OSError("no fixture")
def test_has_no_fixture(broken): pass
@pytest.mark.parametrize("n", range(2))
def test_is_stopped(n):
    import pathlib
    stops = pathlib.Path(__file__).with_name("stops")
    if n and stops.exists():
        stops.unlink()
        raise KeyboardInterrupt
"""


@pytest.mark.filterwarnings("ignore")
def test_outcomes_are_kept_and_a_stopped_run_goes_on(tmp_path, capsys):
    """Bug: an outcome of another test, a failure without its reason, a test that runs twice, or one that stopped the
    process and is tried again and again."""
    file = tmp_path / f"test_toy_{tmp_path.name.replace('-', '_')}.py"
    file.write_text(TESTS)
    (tmp_path / "stops").touch()
    args = SimpleNamespace(out=str(tmp_path / "tests.json"), files=[str(file)])
    record = gpu.bench_tests(args)
    outcome = lambda: {row["test"].split("::")[1]: row["outcome"] for row in record["tests"]}
    found = dict(test_passes="passed", test_fails="failed", test_is_skipped="skipped", test_has_no_fixture="failed")
    assert outcome() == found | {"test_is_stopped[0]": "passed"} and not record["complete"]
    errors = [row.get("error", "") for row in record["tests"]]
    assert "one is not two" in errors[1] and "no fixture" in errors[3] and not errors[0]
    kept = json.loads((tmp_path / "tests.json").read_text())
    kept["tests"][0]["outcome"] = "unfinished"  # as if it had taken the process with it
    (tmp_path / "tests.json").write_text(json.dumps(kept))
    record = gpu.bench_tests(args)
    stopped = {"test_passes": "unfinished", "test_is_stopped[0]": "passed", "test_is_stopped[1]": "passed"}
    assert outcome() == found | stopped and record["complete"]
    assert "1 unfinished, 2 failed, 1 skipped, 2 passed" in capsys.readouterr().out
