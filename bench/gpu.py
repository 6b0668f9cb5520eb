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
KERNELS = f"bench kernels --models 8b {RESULT} --operations"
STEPS = f"bench decode {RESULT} --batch-sizes 1 8 32 --tree-sizes 1 4 8 16 64 --random-weights"
HEADS = "train_heads --model {out}/base --data {code} --draft-vocabulary 0 --out {out}/{name}"
COMMANDS = {  # name: arguments of python -m
    "tests": "pytest -m gpu --junitxml={out}/tests.xml",
    "attention": f"{KERNELS} attention --tree-sizes 1 16 64",
    "flex": f"{KERNELS} flex --batch-sizes 1 8 --prefixes 512 8192 --tree-sizes 16",
    "products": f"{KERNELS} topk sample quantized",
    "steps-8b": f"{STEPS} 8b", "steps-7b": f"{STEPS} 7b", "steps-70b-layer": f"{STEPS} 70b-layer",
    "demo": f"bench decode {RESULT} --batch-sizes 1 8 32 64",
    "base": "training.base --n-layer 12 --n-head 12 --n-kv-head 12 --n-embd 768 --n-inner 2048 "
            "--vocab-size 50304 --block-size 1024 --batch-size 16 --steps 3000 --lr 0.002 "
            "--data {code} --out {out}/base",
    "medusa": f"{HEADS} --preset medusa", "hydra": f"{HEADS} --preset hydra",
    "clover": f"{HEADS} --preset clover", "clover2": f"{HEADS} --preset clover2",
    "heads": f"bench heads {RESULT} --model {{out}}/base --data {{code}} --temperatures 0 "
             "--batch-sizes 1 8 32 --heads {out}/medusa {out}/hydra {out}/clover {out}/clover2",
}


def argv(name, out):
    code = shlex.quote(f"{Path(torch.__file__).parent}/**/*.py")  # to train on
    words = COMMANDS[name].format(name=name, out=shlex.quote(str(out)), code=code)
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
