"""backends/tensor_parallel.py: generate.py in several processes, as torchrun starts them: they say what one says, and
end together."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from backends import tensor_parallel as ranks
from clover import PRESETS, CloverHeads
from model import GPT, InputError

GENERATE = Path(__file__).parent.parent / "generate.py"
FLAGS = "--model", "model", "--device", "cpu", "--max-new-tokens", "24"


@pytest.fixture(scope="module")
def folder(checkpoint, tmp_path_factory):
    """Where each rank has a `model` with heads of its own: a/ and b/ the same one, c/ one with other heads."""
    root = tmp_path_factory.mktemp("ranks")
    for i, name in enumerate("abc"):
        shutil.copytree(checkpoint, root / name / "model", ignore=shutil.ignore_patterns("clover"))
        torch.manual_seed(0)
        heads = CloverHeads(PRESETS["clover"], GPT.from_pretrained(root / name / "model", device="cpu"))
        if name == "c":
            heads.heads[0].requires_grad_(False).project.linear.weight += 1
        heads.save_pretrained(root / name / "model" / "clover")
    (root / "empty").mkdir()
    return root


def start(folders, *flags, seeds=(0, 0)):
    """Starts generate.py, a rank in each folder -> Popen objects."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    shared = os.environ | dict(TORCHELASTIC_RUN_ID="x", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                               WORLD_SIZE=str(len(folders)), LOCAL_WORLD_SIZE=str(len(folders)), OMP_NUM_THREADS="1")
    return [subprocess.Popen([sys.executable, str(GENERATE), *FLAGS, *flags, "--seed", str(seed)], cwd=folder,
                             text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             env=shared | dict(RANK=str(i), LOCAL_RANK=str(i)))
            for i, (folder, seed) in enumerate(zip(folders, seeds))]


def finish(processes, given=""):
    """-> [(exit code, output, messages)]; rank 0 reads `given`."""
    processes[0].stdin.write(given)
    for process in processes:
        process.stdin.close()
        process.stdin = None
    said = [process.communicate(timeout=120) for process in processes]
    return [(process.returncode, out, errors) for process, (out, errors) in zip(processes, said)]


def test_ranks_print_what_one_process_prints(folder):
    """Catches two ranks that read standard input or print, and step times that ranks do not share."""
    flags = "--prompt", "-", "--prompt", "a b c", "--temperature", "0.8", "--json"
    (code, out, errors), second = finish(start([folder / "a", folder / "b"], *flags), "once upon")
    assert (code, second) == (0, (0, "", "")), errors
    (_, alone, _), = finish(start([folder / "a"], *flags), "once upon")
    together, alone = json.loads(out), json.loads(alone)
    assert together["tokens"] == alone["tokens"] and together["prompts"] == ["once upon", "a b c"]


def test_ranks_that_differ_are_refused(folder):
    """Catches ranks that wait for each other, or draft different trees."""
    a, b, c, empty = (folder / name for name in ("a", "b", "c", "empty"))
    for folders, seeds, message in (((a, b), (0, 1), "the processes were started with different flags; start all"),
                                    ((a, c), (0, 0), "the processes have read different files; start all"),
                                    ((a, empty), (0, 0), "rank 1: model: no such folder")):
        first, second = finish(start(folders, "--prompt", "a b c", seeds=seeds))
        assert first[:2] == (2, "") and f"generate.py: {message}" in first[2], first
        assert first[2].count("\n") <= 1 + first[2].count("sampling as"), first
        assert second[0] == 2, second


def test_a_rank_that_dies_ends_the_others(folder):
    """In a conversation: the second rank waits for what the first one reads."""
    first, second = processes = start([folder / "a", folder / "b"])
    first.stdin.write("x y\n")
    first.stdin.flush()
    while "tokens per second" not in first.stderr.readline():
        pass
    second.kill()
    code, _, errors = finish(processes, "a b c\n")[0]
    assert code == 2 and "generate.py: another process has ended" in errors and "Traceback" not in errors


@pytest.mark.parametrize("flags", [("--prompt", "a", "--temperature", "-1"), ("--json",)], ids=lambda flags: flags[-1])
def test_what_all_find_is_told_once(folder, flags):
    """Catches a line from every rank that torchrun started."""
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                           str(GENERATE), *FLAGS, *flags], cwd=folder / "a",
                          capture_output=True, text=True, timeout=120, env=os.environ | dict(OMP_NUM_THREADS="1"))
    assert done.stderr.count("generate.py: ") == 1 and "rank 1:" not in done.stderr, done.stderr
    assert "exitcode  : 2" in done.stderr and done.returncode


def test_what_torchrun_leaves_out_is_named(monkeypatch):
    given = dict(TORCHELASTIC_RUN_ID="x", **dict.fromkeys(ranks.VARIABLES, "2"), MASTER_ADDR="localhost")
    for name in given:
        monkeypatch.setenv(name, given[name])
    assert ranks.numbers() == (2, 2, 2)
    args = SimpleNamespace(device="cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match="2 processes on this machine need as many GPUs, but it has 1"):
        ranks.start(args)
    for name in (*ranks.VARIABLES, "MASTER_ADDR"):
        with monkeypatch.context() as patched:
            patched.delenv(name)
            with pytest.raises(InputError, match=f"torchrun sets {name}, but it is missing; start this with"):
                ranks.numbers()
