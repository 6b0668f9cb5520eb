"""docs/copying.md: the files that it names run without others, and without triton."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from conftest import ROOT
from model import GPT, GPTConfig

FOUR = ["kernels.py", "model.py", "clover.py", "generate.py"]
WEIGHTS, EXAMPLE = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "copying.md").read_text(), re.M | re.S)
CASES = {  # name: (files, code, pattern of its output)
    "cache": (FOUR[:1], EXAMPLE + """
import torch.nn.functional as F
b, node, seen = 0, 3, lengths[0] - 3     # before the last commit; node 3 is now in the third row
k, v = (x[b].repeat_interleave(Hq // Hkv, 0)[:, :seen + 3] for x in cache[0])
want = F.scaled_dot_product_attention(q[b, node][:, None], k, v)[:, 0]
assert torch.allclose(out[b, node], want, atol=1e-5)
""", r"torch.Size\(\[2, 4, 8, 64\]\) \[14, 15\]"),
    "weights": (FOUR, WEIGHTS + """
assert all(map(torch.equal, model.state_dict().values(), torch.load("ours.pt").values()))
try:
    generate(torch.nn.Linear(2, 2), [[1]], 5)
except ValueError as error:
    assert "must be a GPT of model.py, not Linear" in str(error)
""", r"\[\[\d+.*\]\]"),
    "folder": ([*FOUR, "common", "engine", "recurrent", "backends", "hf"], """
import torch
from model import GPT, GPTConfig
original = GPT(GPTConfig(vocab_size=50, n_layer=2, n_embd=64))
original.save_pretrained("tiny")
model = GPT.from_pretrained("tiny", dtype=torch.float32, device="cpu", packed=False)
print(all(map(torch.equal, model.state_dict().values(), original.state_dict().values())))
""", "True"),
}


@pytest.mark.parametrize("name", CASES)
def test_copied_files_run_alone(tmp_path, name):
    """Bug: an outdated example, or a file that needs another which docs/copying.md does not name."""
    files, code, pattern = CASES[name]
    for path in files:
        (shutil.copytree if (ROOT / path).is_dir() else shutil.copy)(ROOT / path, tmp_path / path)
    (tmp_path / "triton.py").write_text("raise ImportError('no triton here')")
    if name == "weights":
        model = GPT(GPTConfig(vocab_size=50, n_layer=2, n_head=4, n_kv_head=2, n_embd=64, n_inner=160, tied=False))
        model.save_pretrained(tmp_path / "saved")
        torch.save(load_file(tmp_path / "saved/model.safetensors"), tmp_path / "weights.pt")
        torch.save(model.state_dict(), tmp_path / "ours.pt")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | dict(OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert re.fullmatch(pattern, done.stdout.strip())
