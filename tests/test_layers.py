"""Each file imports only from the files above it in the table of the design."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = ["kernels", "checkpoint", "model", "clover", "tokenizer", "chat", "corpus", "data", "loss", "engine", "fit", "generate",
         "evaluate", "training", "train_base", "train_heads", "bench_kernels", "bench_decode", "bench_heads", "bench"]


@pytest.mark.parametrize("name", ORDER)
def test_imports_point_up(name):
    tree = ast.parse((ROOT / f"{name}.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported & set(ORDER) <= set(ORDER[:ORDER.index(name)])


