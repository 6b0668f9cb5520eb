"""`python -m bench gpu --out DIR`: everything that only a GPU can tell, one command after another,
each in a process of its own. Its output goes to DIR/NAME.log and its result to DIR/NAME.json; one
that succeeded, which DIR/NAME.done tells, is not run again."""

import shlex
import subprocess
import sys
from pathlib import Path

import torch

from bench import ROOT
from model import InputError

RESULT = "--out {out}/{name}.json"
STEPS = f"bench decode {RESULT} --batch-sizes 1 8 32 --tree-sizes 1 4 8 16 64 --random-weights"
COMMANDS = {  # name: arguments of python -m
    "tests": "pytest -m gpu --junitxml={out}/tests.xml",
    "kernels": f"bench kernels --models 8b {RESULT}",
    "steps-8b": f"{STEPS} 8b", "steps-7b": f"{STEPS} 7b", "steps-70b-layer": f"{STEPS} 70b-layer",
    "decode": f"bench decode {RESULT} --batch-sizes 1 8 32 64",
    "heads": f"bench heads {RESULT} --temperatures 0 --batch-sizes 1 8 32",
}


def argv(name, out):
    words = COMMANDS[name].format(name=name, out=shlex.quote(str(out)))
    return [sys.executable, "-m", *shlex.split(words)]


def bench(args):
    """Runs every command that did not succeed before."""
    if not torch.cuda.is_available():
        raise InputError("this needs a CUDA device; without one run python -m bench decode")
    out = Path(args.out).absolute()
    out.mkdir(exist_ok=True)
    for name in COMMANDS:
        done = out / f"{name}.done"
        if not done.exists():
            with open(out / f"{name}.log", "w") as log:
                code = subprocess.run(argv(name, out), cwd=ROOT, stdout=log, stderr=log).returncode
            print(f"{name}: {f'failed, see {log.name}' if code else 'done'}", flush=True)
            if code == 0:
                done.touch()
