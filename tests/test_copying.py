"""docs/copying.md: its examples run with no more files than they say, and where triton does not exist."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOUR = ["kernels.py", "model.py", "clover.py", "generate.py"]
EXAMPLES = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "copying.md").read_text(), re.M | re.S)
CASES = {  # example: (what is copied, what is checked after it, what it prints)
    "cache": (FOUR[:1], """
import torch.nn.functional as F
b, node, seen = 0, 3, lengths[0] - 3     # before the last commit; node 3 is now in the third row
k, v = (x[b].repeat_interleave(Hq // Hkv, 0)[:, :seen + 3] for x in cache[0])
want = F.scaled_dot_product_attention(q[b, node][:, None], k, v)[:, 0]
assert torch.allclose(out[b, node], want, atol=1e-5)
""", r"torch.Size\(\[2, 4, 8, 64\]\) \[14, 15\]"),
    "model": (FOUR, "assert len(set(out.tokens[0])) > 1 and out.emitted == 40", "True 16 160"),
    "head": (FOUR, "assert type(heads.draft_head(1).mix) is Gate", r"True \d\.\d+"),
    "family": ([*FOUR, "hf", "backends"], """
from safetensors import safe_open
with safe_open("acme-tiny/model.safetensors", "pt") as file:
    assert {"model.final_norm.weight", "model.embeddings.weight"} <= set(file.keys())
""", "True True"),
}


@pytest.mark.parametrize("name, example", list(zip(CASES, EXAMPLES, strict=True)), ids=CASES)
def test_examples_of_copying_run(tmp_path, name, example):
    """Bug: an example that the code has left behind, or that needs a file which it does not name."""
    copied, check, said = CASES[name]
    for path in copied:
        (shutil.copytree if (ROOT / path).is_dir() else shutil.copy)(ROOT / path, tmp_path / path)
    (tmp_path / "triton.py").write_text("raise ImportError('no triton here')")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | dict(OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-c", example + check], cwd=tmp_path, env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(said, done.stdout.strip())
