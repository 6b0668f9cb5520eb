"""The layout: what imports what, and what runs when it is copied elsewhere."""

import ast
import os
import re
import shutil
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest

from conftest import ROOT

# each imports only from itself and from those before it
ORDER = ["kernels", "model", "clover", "generate", "train_heads", "common", "engine", "recurrent", "backends",
         "drafters", "hf", "tools", "training", "bench"]
FOLDERS = [name for name in ORDER if (ROOT / name).is_dir()]
FILES = [name for name in ORDER if name not in FOLDERS and "." not in name]
LINES = dict(library=16900, tests=12671)  # at most: all Python without tests, and tests
# of the root's files: the agreed sizes, together 3,500 at most; clover.py and train_heads.py lend generate.py 31
CEILINGS = dict(kernels=1225, model=590, clover=565, generate=881, train_heads=269)
MODULES = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
           for pattern in ("*.py", *(f"{folder}/*.py" for folder in FOLDERS)) for file in sorted(ROOT.glob(pattern))}
LOADERS = dict(model=("GPT.from_pretrained", "GPT.save_pretrained"),  # functions that import from folders
               generate=("make_policy",))


def imports(module):
    """{project module} of a module's imports, those in functions too, but not in LOADERS or a program's first lines."""
    found = set()

    def visit(node, inside):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "__main__" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            if isinstance(child, ast.ImportFrom):
                names = [f"{child.module}.{alias.name}" for alias in child.names]
                found.update(name if name in MODULES else child.module for name in names)
            name = f"{inside}{child.name}" if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else ""
            if name not in LOADERS.get(module, ()):
                visit(child, f"{name}." if name else inside)
    visit(ast.parse(MODULES[module].read_text()), "")
    return found & MODULES.keys()


def test_the_root_holds_the_five_files():
    assert sorted(p.stem for p in ROOT.glob("*.py")) == sorted(FILES)
    assert {p.parent.name for p in ROOT.glob("*/__init__.py")} == set(FOLDERS)
    assert not {name.split(".")[-1] for name in MODULES if "." in name} & {*FILES}, "shadows a file of the root"


def test_imports_run_one_way():
    """Catches an import of what comes later in ORDER, and modules that import each other, even inside functions."""
    graph = {module: imports(module) for module in MODULES}
    rank = lambda module: ORDER.index(module if module in ORDER else module.split(".")[0])
    assert [(a, b) for a in graph for b in graph[a] if rank(b) > rank(a)] == []
    assert {b for a in graph for b in graph[a] if a.startswith("common")} - {"model", "common.values"} == set()
    assert [*TopologicalSorter(graph).static_order()]  # a CycleError names the circle


def test_growth_is_a_decision():
    """Bug: a library made to be read that grows past reading, a little in every commit."""
    files = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    files = files or [str(p.relative_to(ROOT)) for p in ROOT.glob("*/*.py")] + [f"{name}.py" for name in FILES]
    lines = {part: 0 for part in LINES}
    for file in files:
        lines["tests" if file.startswith("tests/") else "library"] += len((ROOT / file).read_text().splitlines())
    assert all(lines[part] <= LINES[part] for part in LINES), lines
    lines = {name: len(MODULES[name].read_text().splitlines()) for name in CEILINGS}
    assert all(lines[name] <= CEILINGS[name] for name in CEILINGS) and sum(lines.values()) <= 3500, lines


@pytest.mark.parametrize("file", [*MODULES.values(), ROOT / "demo/train_base.py"], ids=lambda file: file.name)
def test_code_is_not_packed(file):
    """Bug: lines won by packing, which are lost to the reader; a function that does not fit on a screen."""
    text = file.read_text()
    assert [line for line in text.splitlines() if len(line) > 100] == []
    nodes = [*ast.walk(ast.parse(text))]
    pairs = [node.lineno for node in nodes if isinstance(node, ast.Assign)
             and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)]
    assert len(pairs) <= 5, pairs
    limit = lambda name: 100 if name.endswith("_kernel") else 60
    long = [node.name for node in nodes if isinstance(node, ast.FunctionDef)
            and node.end_lineno - node.lineno >= limit(node.name)]
    assert long == []


@pytest.mark.parametrize("name", ["model", "clover"])
def test_the_model_does_not_know_where_it_runs(name):
    """Bug: a backend that is not applied from outside, or a feature that belongs to a folder."""
    words = r"mkldnn|onednn|\brank|\bgroup\b|all_reduce|tensor.parallel|cgroup|gguf|server|grammar|matcher|llguidance"
    assert re.findall(words, MODULES[name].read_text(), re.IGNORECASE) == []


DECODE = """
import torch
from clover import CloverHeads, preset
from generate import generate, make_policy
from model import GPT, GPTConfig, InputError
torch.manual_seed(0)
model = GPT(GPTConfig(vocab_size=50, n_layer=2, n_embd=64, n_head=4, n_kv_head=2, tied=False)).init_weights()
model.requires_grad_(False).eval()
for p in model.parameters():
    p.mul_(4 if p.dim() > 1 else 1)
heads = CloverHeads(preset("clover"), model).requires_grad_(False).eval()
for options in (dict(heads=None), dict(heads=heads, lookup=True), dict(heads=heads, tree_size=9, temperature=0.8),
                dict(lookup=True, temperature=0.7, top_p=0.8, tree_size=5), dict(heads=heads, tree_size=1)):
    out = generate(model, [[1, 2, 3], [4], [*range(30)]], 20, batch_size=2, **options)
    print(*out.tokens, out.ended)
"""
ALONE = """
from train_heads import train
lines = []
heads = CloverHeads(preset("clover"), model)
train(heads, torch.arange(3000) % 50, steps=40, batch_size=4, block_size=32, lr=6e-3, log=lines.append)
losses = [float(line.split()[3]) for line in lines]
same = [generate(model, [[1, 2, 3], [4]], 20, x, tree_size=9).tokens for x in (heads, None)]
print(lines[0], len(losses), losses[1] < losses[0], same[0] == same[1])
policy, engine = make_policy(model, heads, True, None, False)
print(engine.__module__, policy.tree_size, type(policy).__name__)
heads.save_pretrained("heads")
heads = CloverHeads.from_pretrained("heads", model)
for call in (lambda: GPT.from_pretrained("."), lambda: model.save_pretrained("saved"),
             lambda: generate(model, [[1]], 9, grammar="a grammar")):
    try:
        call()
    except InputError as error:
        print(error)
"""


def test_the_five_files_alone_give_the_same_tokens(tmp_path, capsys):
    """Catches an import of a folder where none is needed, a missing folder that is not named where it is, and a policy
    or an engine that changes the output."""
    for name in FILES:
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | dict(OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-c", DECODE + ALONE], cwd=tmp_path, env=clean, capture_output=True,
                          text=True)
    exec(DECODE, {})
    tokens = capsys.readouterr().out
    assert done.stdout.startswith(tokens) and len({*tokens.splitlines()}) == 3, done.stderr
    missing = "this needs the folder {}, which is not beside model.py: copy it here too".format
    step, *others = done.stdout.removeprefix(tokens).splitlines()
    assert re.fullmatch(r"step 20/40  loss \d\S+  accuracy( \d\.\d{3}){4} 2 True True", step) and others == [
        "generate 8 Fixed", *[missing("hf/")] * 2,
        "stop texts and grammars need the folder engine/; copy it beside generate.py"]


@pytest.mark.parametrize("command", ["generate.py --prmpt x", "generate.py --top-p x", "generate.py --help",
                                     "train_heads.py --steps none", "train_heads.py --help",
                                     "-m bench decode --runs x"])
def test_mistakes_are_told_before_torch_is_loaded(command):
    """Bug: four seconds until a typo is reported."""
    done = subprocess.run([sys.executable, "-X", "importtime", *command.split()], cwd=ROOT, capture_output=True,
                          text=True)
    told = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == (0 if "--help" in command else 2) and len(told) == ("--help" not in command)
    assert not re.findall(r"\b(torch|numpy|triton)\b", done.stderr)
