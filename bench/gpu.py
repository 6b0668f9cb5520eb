"""`python -m bench gpu`: everything that only a GPU can tell, in slices of a few minutes.

A slice runs other commands of bench, each in its own process with its record in DIR/NAME.json and
its output in DIR/NAME.log. When a slice's time is up, its command is stopped, and the next call
resumes it. A file that is complete, or that says what failed, stays: delete it to measure anew.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from pathlib import Path

import torch

from bench import Record, make_folder, write_file
from model import InputError, read_json

ROOT = Path(__file__).parent.parent
GRACE = 30  # seconds that a command has to save, once it is told to stop
TREES = "--batch-sizes 1 8 32 --tree-sizes 1 4 8 16 64"
CODE = " ".join(shlex.quote(f"{folder}.py") for folder in (  # Python and torch, to train a base on
    *(f"{sysconfig.get_paths()['stdlib']}/{files}" for files in ("*", "*/*")),
    f"{Path(torch.__file__).parent}/**/*"))
BASE = ("heads --base 124m --train {out}/124m --kinds medusa hydra clover clover2 --prompts 32 "
        f"--temperatures 0 --batch-sizes 1 8 32 --tree-sizes 5 17 --data {CODE}")
SLICES = (  # {name: command of bench}; one that takes longer than a slice goes on in the next
    {"tests": "tests"},
    {"attention": "kernels --operations attention --heads 8b --tree-sizes 1 16 64 --no-flex",
     "projections": "kernels --operations projections quantized commit lookup merge --heads 8b",
     "flex": "kernels --operations attention --heads 8b --batch-sizes 1 8 --prefixes 512 8192 "
             "--tree-sizes 16"},
    {"steps-8b": f"decode --random-weights 8b {TREES}",
     "steps-7b": f"decode --random-weights 7b {TREES}"},
    {"demo": "decode --batch-sizes 1 8 32 64 --runs 2"},
    {"steps-70b-layer": f"decode --random-weights 70b-layer {TREES}"},
    {"heads-124m": BASE}, {"heads-124m": BASE}, {"heads-124m": BASE},
)
TESTS = {"test": "test {}", "outcome": "outcome {}", "seconds": "seconds {:.1f}"}


def commands(parts, out):
    """{name: command of bench} -> {name: argv}, each of which keeps its record in `out`."""
    return {name: [sys.executable, "-m", "bench",
                   *shlex.split(words.format(out=shlex.quote(str(out)))),
                   "--out", str(out / f"{name}.json")] for name, words in parts.items()}


def state(path):
    """Of a command's record: "missing", "begun", "failed" or "complete"."""
    if not path.is_file():
        return "missing"
    record = read_json(path)
    return "failed" if "error" in record else "complete" if record.get("complete") else "begun"


def run_slice(argvs, out, seconds):
    """Runs those of {name: argv} that are not complete and did not fail, `seconds` in all."""
    deadline = time.monotonic() + seconds
    for name, argv in argvs.items():
        path = out / f"{name}.json"
        log = path.with_suffix(".log")
        left = deadline - time.monotonic()
        code = run(argv, log, left) if state(path) in ("missing", "begun") and left > 0 else None
        if code is not None and state(path) != "complete":
            record = read_json(path) if path.is_file() else {}
            tail = log.read_text(errors="replace").splitlines()[-30:]
            record["error"] = dict(exit_code=code, tail=tail)
            write_file(path, json.dumps(record) + "\n")
        advice = {"complete": "", "failed": f"; see {log}, and delete {path} to run it again"}
        print(f"{name}: {state(path)}{advice.get(state(path), '; the next call goes on with it')}",
              flush=True)


def run(argv, log, seconds):
    """Runs a command, its output added to a file -> its exit code, None when its time was up."""
    with open(log, "a") as file:
        process = subprocess.Popen(argv, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
                                   start_new_session=True)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:  # also after Ctrl-C, which only this process gets
            stop(process)


def stop(process):
    """SIGTERM, which acts as Ctrl-C; after GRACE seconds SIGKILL, for its children too."""
    process.terminate()  # does nothing to a process that ended
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def bench(args):
    """`python -m bench gpu`: runs the slices, returns the state of every part."""
    if not torch.cuda.is_available():
        raise InputError("this needs a CUDA device, and there is none; without one run python "
                         "-m bench decode or bench roofline")
    out = Path(args.out).absolute()
    make_folder(out)
    for parts in [SLICES[args.slice - 1]] if args.slice else SLICES:
        run_slice(commands(parts, out), out, 60 * args.minutes)
    return dict(bench="gpu", parts={name: state(out / f"{name}.json")
                                    for parts in SLICES for name in parts})


class Recorder:
    """A plugin of pytest that keeps outcomes in a Table and leaves out the tests that are there. A
    test that takes the process with it stays "unfinished"."""

    def __init__(self, table):
        self.table = table

    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if not self.table.has(test=item.nodeid)]

    def pytest_runtest_logstart(self, nodeid):
        self.table.append(dict(test=nodeid, outcome="unfinished", seconds=0.0))
        self.table.save()

    def pytest_runtest_logreport(self, report):
        row = self.table[-1]
        row["seconds"] += report.duration
        if report.when == "call" or not report.passed:  # a fixture may skip or fail too
            row["outcome"] = report.outcome
        if report.failed:
            row["error"] = report.longreprtext[-2000:]
        self.table.save()

    def pytest_keyboard_interrupt(self):
        if self.table and self.table[-1]["outcome"] == "unfinished":
            self.table.pop()  # it was stopped, and did not stop the process
            self.table.save()


def bench_tests(args):
    """`python -m bench tests`: `pytest -m gpu`, its outcomes kept as it goes."""
    import pytest
    record = Record(args.out, bench="tests", files=args.files)
    table = record.table("tests", TESTS)
    code = pytest.main(["-m", "gpu", "-q", "--tb=short", *args.files], plugins=[Recorder(table)])
    counts = Counter(row["outcome"] for row in table)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return record.done() if code in (0, 1, 5) else record  # 5: there is no test left to run
