"""The layout: what imports what, and what runs when it is copied elsewhere."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = ["kernels", "model", "clover", "generate", "train_heads"]  # each imports only from those before it
FOLDERS = ["backends", "hf", "tools", "training", "bench"]  # likewise
LINES = dict(library=10224, tests=8973)  # at most: all Python without tests, and tests
REACHES = {  # where the first four files import from a folder, and from which; nowhere else
    "model": {("GPT.from_pretrained", "hf"), ("GPT.save_pretrained", "hf"), ("__main__", "tools")},
    "generate": {("Decoder.__init__", "backends"), ("prepare", "tools"), ("__main__", "tools")}}
MODULES = [f"{name}.py" for name in FILES] + sorted(
    str(p.relative_to(ROOT)) for f in FOLDERS for p in (ROOT / f).glob("*.py"))


def imports(file):
    """{(function, project module)} of a file's imports: "" for those that run with it; "hf" is all of hf/."""
    found = set()

    def visit(node, inside):
        for child in ast.iter_child_nodes(node):
            names = [alias.name for alias in child.names] if isinstance(child, ast.Import) else []
            names += [child.module or ""] if isinstance(child, ast.ImportFrom) else []
            modules = {name.split(".")[0] for name in names} & {*FILES, *FOLDERS}
            found.update((inside, module) for module in modules)
            named = child.name if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else ""
            visit(child, ".".join(filter(None, (inside, "__main__" if is_main(child) else named))))
    visit(ast.parse((ROOT / file).read_text()), "")
    return found


def is_main(node):
    return isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)


def test_the_root_holds_the_five_files():
    assert sorted(p.stem for p in ROOT.glob("*.py")) == sorted(FILES)
    assert {p.parent.name for p in ROOT.glob("*/__init__.py")} == set(FOLDERS)


@pytest.mark.parametrize("file", MODULES)
def test_imports_keep_the_order(file):
    """Catches an arrow that points the wrong way, and one more function that needs a folder."""
    found, name = imports(file), Path(file).stem
    modules = {module for _, module in found}
    if file.count("/"):
        folder = file.split("/")[0]
        assert "train_heads" not in modules or folder == "bench" or file == "training/cli.py"
        assert name not in FILES, "a folder's module must not shadow a file of the root"
        assert modules & set(FOLDERS) <= set(FOLDERS[:FOLDERS.index(folder) + 1])
        return
    assert modules - set(FOLDERS) <= set(FILES[:FILES.index(name)])
    reached = {(function, module) for function, module in found if module in FOLDERS}
    if name == "train_heads":
        assert "bench" not in modules
    else:
        assert reached == REACHES.get(name, set())


def test_growth_is_a_decision():
    """Bug: a library made to be read that grows past reading, a little in every commit."""
    files = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    files = files or [str(p.relative_to(ROOT)) for p in ROOT.glob("*/*.py")] + [f"{name}.py" for name in FILES]
    lines = {part: 0 for part in LINES}
    for file in files:
        lines["tests" if file.startswith("tests/") else "library"] += len((ROOT / file).read_text().splitlines())
    assert all(lines[part] <= LINES[part] for part in LINES), lines


@pytest.mark.parametrize("file", [*MODULES, "demo/train_base.py"])
def test_lines_are_not_packed(file):
    """Bug: lines won by packing, which are lost to the reader."""
    text = (ROOT / file).read_text()
    assert [line for line in text.splitlines() if len(line) > 100] == []
    pairs = [node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assign)
             and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)]
    assert len(pairs) <= 10, pairs


@pytest.mark.parametrize("word", ["mkldnn", "onednn", "packed", r"\brank", "all_reduce"])
def test_the_model_does_not_know_where_it_runs(word):
    """Bug: a backend that is not applied from outside."""
    assert re.findall(word, (ROOT / "model.py").read_text(), re.IGNORECASE) == []


FOUR = """
import torch
from clover import CloverHeads, preset
from generate import generate
from model import GPT, GPTConfig, InputError
model = GPT(GPTConfig(vocab_size=50, n_layer=2, n_embd=64, n_head=4, n_kv_head=2, head_size=16)).init_weights()
model = model.requires_grad_(False).eval()
heads = CloverHeads(preset("clover"), model).requires_grad_(False).eval()
plain = generate(model, [[1, 2, 3], [4]], 20).tokens
assert generate(model, [[1, 2, 3], [4]], 20, heads).tokens == plain
assert generate(model, [[1, 2, 3], [4]], 20, heads, tree_size=9, temperature=0.8, batch_size=1).emitted == 40
heads.save_pretrained("heads")
heads = CloverHeads.from_pretrained("heads", model)
for call in (lambda: GPT.from_pretrained("."), lambda: model.save_pretrained("saved")):
    try:
        call()
    except InputError as error:
        print(error)
heads.info["acceptance"] = {"0": [[0.5] * 63] * 4}
try:
    generate(model, [[1]], 5, heads)
except InputError as error:
    print(error)
"""


def test_the_first_four_files_decode_alone(tmp_path):
    """Catches an import of a folder where none is needed, and a missing folder that is not named where it is."""
    for name in FILES[:4]:
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | dict(OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-c", FOUR], cwd=tmp_path, env=clean, capture_output=True, text=True)
    said = done.stdout.splitlines()
    missing = "this needs the folder {}, which is not beside model.py: copy it here too".format
    assert said == [missing("hf/")] * 2 + [missing("tools/") + ", or give a tree_size"], done.stderr


@pytest.mark.parametrize("command", ["generate.py --prmpt x", "generate.py --top-p x", "generate.py --help", "model.py",
                                     "train_heads.py --steps none", "train_heads.py --help"])
def test_mistakes_are_told_before_torch_is_loaded(command):
    """Bug: four seconds until a typo is reported."""
    done = subprocess.run([sys.executable, "-X", "importtime", *command.split()], cwd=ROOT, capture_output=True,
                          text=True)
    told = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == (0 if "--help" in command else 2) and len(told) == ("--help" not in command)
    assert not re.findall(r"\b(torch|numpy|triton)\b", done.stderr)
