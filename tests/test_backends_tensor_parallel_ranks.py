"""backends/tensor_parallel.py: generate.py in several processes, as torchrun starts them: they say what one says, and
end together."""

import json
import os
import shutil
import signal
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


STARTER = """
import json, os, socket, sys
from backends import tensor_parallel
from tools import cli
link = socket.socket(fileno=int(sys.argv[1]))
while (message := socket.recv_fds(link, 2**16, 3))[0]:
    asked, streams = json.loads(message[0]), message[1]
    if isinstance(asked, int):
        link.send(str(os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1])).encode())
        continue
    child = os.fork()
    if not child:
        os.chdir(asked["folder"])
        os.environ.update(asked["env"])
        tensor_parallel.GRACE = asked["grace"]
        sys.argv = ["generate.py", *asked["flags"]]
        for i, stream in enumerate(streams):
            os.dup2(stream, i)
        os.closerange(3, 256)
        cli.command(cli.generate_main)
        sys.exit()
    for stream in streams:
        os.close(stream)
    link.send(str(child).encode())
"""


@pytest.fixture(scope="module")
def link():
    """A socket to a process that has imported everything, which is most of a rank's time, and forks ranks."""
    ours, theirs = socket.socketpair()
    ours.settimeout(120)
    process = subprocess.Popen([sys.executable, "-c", STARTER, str(theirs.fileno())], cwd=GENERATE.parent,
                               pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=os.environ | dict(OMP_NUM_THREADS="1"))
    theirs.close()
    yield ours
    os.killpg(process.pid, signal.SIGKILL)  # with ranks that a failed test has left
    print(process.communicate()[1])
    ours.close()


class Rank:
    """A process that runs generate.py's command line in a folder."""

    def __init__(self, link, folder, flags, env, grace):
        pipes = [os.pipe() for _ in range(3)]
        streams = [pipes[0][0], pipes[1][1], pipes[2][1]]
        asked = dict(folder=str(folder), flags=[*FLAGS, *flags], env=env, grace=grace)
        socket.send_fds(link, [json.dumps(asked).encode()], streams)
        self.link, self.pid = link, int(link.recv(100))
        for stream in streams:
            os.close(stream)
        self.stdin, self.stdout, self.stderr = open(pipes[0][1], "w"), open(pipes[1][0]), open(pipes[2][0])

    def wait(self):
        """Its exit code. What it wrote must fit the pipes."""
        self.link.send(str(self.pid).encode())
        return int(self.link.recv(100))


def start(link, folders, *flags, seeds=(0, 0), grace=0.2):
    """Starts a rank in each folder, with what torchrun would tell it."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    size = str(len(folders))
    shared = dict(TORCHELASTIC_RUN_ID="x", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=size,
                  LOCAL_WORLD_SIZE=size, XDG_CACHE_HOME=os.environ["XDG_CACHE_HOME"])
    return [Rank(link, folder, [*flags, "--seed", str(seed)], shared | dict(RANK=str(i), LOCAL_RANK=str(i)), grace)
            for i, (folder, seed) in enumerate(zip(folders, seeds))]


def finish(ranks, given=""):
    """-> [(exit code, output, messages)]; rank 0 reads `given`."""
    ranks[0].stdin.write(given)
    for rank in ranks:
        rank.stdin.close()
    codes = [rank.wait() for rank in ranks]
    return [(code, rank.stdout.read(), rank.stderr.read()) for code, rank in zip(codes, ranks)]


def test_ranks_print_what_one_process_prints(folder, link):
    """Catches two ranks that read standard input or print, and step times that ranks do not share."""
    flags = "--prompt", "-", "--prompt", "a b c", "--temperature", "0.8", "--json"
    (code, out, errors), second = finish(start(link, [folder / "a", folder / "b"], *flags), "once upon")
    assert (code, second) == (0, (0, "", "")), errors
    (_, alone, _), = finish(start(link, [folder / "a"], *flags), "once upon")
    together, alone = json.loads(out), json.loads(alone)
    assert together["tokens"] == alone["tokens"] and together["prompts"] == ["once upon", "a b c"]


def test_ranks_that_differ_are_refused(folder, link):
    """Catches ranks that wait for each other, or draft different trees."""
    a, b, c, empty = (folder / name for name in ("a", "b", "c", "empty"))
    for folders, seeds, message in (((a, b), (0, 1), "the processes were started with different flags; start all"),
                                    ((a, c), (0, 0), "the processes have read different files; start all"),
                                    ((a, empty), (0, 0), "rank 1: model: no such folder")):
        first, second = finish(start(link, folders, "--prompt", "a b c", seeds=seeds))
        assert first[:2] == (2, "") and f"generate.py: {message}" in first[2], first
        assert first[2].count("\n") <= 1 + first[2].count("sampling as"), first
        assert second[0] == 2, second


def test_a_rank_that_dies_ends_the_others(folder, link):
    """In a conversation: the second rank waits for what the first one reads."""
    first, second = processes = start(link, [folder / "a", folder / "b"])
    first.stdin.write("x y\n")
    first.stdin.flush()
    while "tokens per second" not in first.stderr.readline():
        pass
    os.kill(second.pid, signal.SIGKILL)
    code, _, errors = finish(processes, "a b c\n")[0]
    assert code == 2 and "generate.py: another process has ended" in errors and "Traceback" not in errors


def test_what_all_find_is_told_once(folder):
    """Catches a line from every rank that torchrun started."""
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                           str(GENERATE), *FLAGS, "--prompt", "a", "--temperature", "-1"], cwd=folder / "a",
                          capture_output=True, text=True, timeout=120, env=os.environ | dict(OMP_NUM_THREADS="1"))
    assert done.stderr.count("generate.py: ") == 1 and "rank 1:" not in done.stderr, done.stderr
    assert "exitcode  : 2" in done.stderr and done.returncode


def test_what_all_find_before_they_meet_is_told_once(folder, link):
    """The same, of flags that exclude each other. The other rank is ended as torchrun ends it."""
    first, second = start(link, [folder / "a", folder / "b"], "--json", grace=60)
    assert first.wait() == 2
    os.kill(second.pid, signal.SIGTERM)
    second.wait()
    assert first.stderr.read().count("generate.py: ") == 1 and second.stderr.read() == ""


def test_what_torchrun_leaves_out_is_named(monkeypatch):
    given = dict(TORCHELASTIC_RUN_ID="x", **dict.fromkeys(ranks.VARIABLES, "2"))
    for name in given:
        monkeypatch.setenv(name, given[name])
    assert ranks.numbers() == (2, 2, 2)
    args = SimpleNamespace(device="cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match="2 processes on this machine need as many GPUs, but it has 1"):
        ranks.start(args)
    for name in ranks.VARIABLES:
        with monkeypatch.context() as patched:
            patched.delenv(name)
            with pytest.raises(InputError, match=f"torchrun sets {name}, but it is missing; start this with"):
                ranks.numbers()
