"""docs/copying.md: the files that it names run without others, and without triton."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
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
    "weights": (FOUR, """
import torch
from model import GPT, GPTConfig, InputError
sizes = dict(vocab_size=50, n_layer=2, n_head=4, n_kv_head=2, n_embd=64, n_inner=160, tied=False)
original = GPT(GPTConfig(**sizes))
value = original.state_dict()
saved = {f"{theirs}.weight": value[f"{ours}.weight"]
         for ours, theirs in {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}.items()}
for i in range(2):
    ours, theirs = f"blocks.{i}", f"model.layers.{i}"
    q, k, v = value[f"{ours}.attn.qkv.weight"].split([64, 32, 32])
    gate, up = value[f"{ours}.mlp.up.weight"].split(160)
    layers = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "mlp.gate_proj": gate,
              "mlp.up_proj": up}
    for own, name in {"attn_norm": "input_layernorm", "attn.proj": "self_attn.o_proj", "mlp.down": "mlp.down_proj",
                      "mlp_norm": "post_attention_layernorm"}.items():
        layers[name] = value[f"{ours}.{own}.weight"]
    saved |= {f"{theirs}.{name}.weight": x for name, x in layers.items()}
torch.save(saved, "weights.pt")
""" + WEIGHTS + """
assert all(map(torch.equal, model.state_dict().values(), original.state_dict().values()))
try:
    generate(torch.nn.Linear(2, 2), [[1]], 5)
except InputError as error:
    assert "must be a GPT of model.py, not Linear" in str(error)
""", r"\[\[\d+.*\]\]"),
    "head": (FOUR, """
import torch
import torch.nn as nn
from clover import MIXERS, CloverHeads, preset
from generate import generate
from model import GPT, GPTConfig, Norm


class Gate(nn.Module):  # in place of the Attention Decoder
    # z + sigmoid(W norm(z)) * (V e), which starts as z

    def __init__(self, config):  # the model's GPTConfig
        super().__init__()
        self.norm = Norm(config.norm, config.n_embd, config.norm_eps)
        self.gate = nn.Linear(config.n_embd, config.n_embd)
        self.value = nn.Linear(config.n_embd, config.n_embd)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def forward(self, z, e):  # state and embedding of the previous token, each [..., C]
        return z + self.gate(self.norm(z)).sigmoid() * self.value(e)


MIXERS["gate"] = Gate
torch.manual_seed(0)
model = GPT(GPTConfig(vocab_size=50, n_layer=2, n_embd=64, n_head=4, tied=False))
heads = CloverHeads(preset("clover", mix="gate"), model)
out = generate(model, [[1, 2, 3], [4]], 20, heads, tree_size=9)
print(out.tokens == generate(model, [[1, 2, 3], [4]], 20).tokens, out.tokens_per_step)
assert type(heads.draft_head(1).mix) is Gate and len(set(out.tokens[0])) > 1 and out.emitted == 40
""", r"True \d\.\d+"),
    "training": ([*FOUR, "train_heads.py"], """
import runpy
import torch
from clover import CloverHeads, preset
from generate import generate
from model import GPT, GPTConfig
from train_heads import train

torch.manual_seed(0)
model = GPT(GPTConfig(vocab_size=50, n_layer=2, n_embd=64, n_head=4, block_size=64))
heads = CloverHeads(preset("clover"), model)
lines = []
train(heads, torch.arange(3000) % 50, steps=40, batch_size=4, block_size=32, lr=6e-3, log=lines.append)
print(lines[0])
losses = [float(line.split()[3]) for line in lines]
assert len(losses) == 2 and losses[1] < losses[0]
out = generate(model, [[1, 2, 3], [4]], 20, heads, tree_size=9)
assert out.tokens == generate(model, [[1, 2, 3], [4]], 20).tokens and out.tokens_per_step > 1.2
try:
    runpy.run_path("train_heads.py", run_name="__main__")
except SystemExit as ended:
    print(ended.code)
""", r"step 20/40  loss \d\S+  accuracy( \d\.\d{3}){4}\n2"),
    "family": ([*FOUR, "common", "engine", "backends", "hf"], """
import json
from pathlib import Path
import torch
from hf.families import FAMILIES, LLAMA_NAMES, llama
from model import GPT, GPTConfig
from safetensors.torch import load_file, save_file


def acme(raw):  # Llama with scaled embeddings, and two tensors renamed
    return llama(raw) | dict(
        embed_scale=raw["embedding_multiplier"],
        names=LLAMA_NAMES | {"norm": ("model.final_norm",), "embed": ("model.embeddings",)})


FAMILIES["acme"] = acme
sizes = dict(vocab_size=50, n_layer=2, n_embd=64)
GPT(GPTConfig(**sizes)).save_pretrained("tiny")
config = Path("tiny/config.json")
config.write_text(json.dumps(json.loads(config.read_text()) | dict(model_type="acme", embedding_multiplier=8.0)))
tensors = load_file("tiny/model.safetensors")
for new, old in {"final_norm": "norm", "embeddings": "embed_tokens"}.items():
    tensors[f"model.{new}.weight"] = tensors.pop(f"model.{old}.weight")
save_file(tensors, "tiny/model.safetensors")
model = GPT.from_pretrained("tiny", dtype=torch.float32, device="cpu", packed=False)
assert torch.equal(model.embed.weight, tensors["model.embeddings.weight"])
print(model.config == GPTConfig(**sizes, embed_scale=8.0))
""", "True"),
}


@pytest.mark.parametrize("name", CASES)
def test_copied_files_run_alone(tmp_path, name):
    """Bug: an outdated example, or a file that needs another which docs/copying.md does not name."""
    files, code, pattern = CASES[name]
    for path in files:
        (shutil.copytree if (ROOT / path).is_dir() else shutil.copy)(ROOT / path, tmp_path / path)
    (tmp_path / "triton.py").write_text("raise ImportError('no triton here')")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | dict(OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    missing = "train_heads.py: this needs the folder t[a-z]+/, which is not beside model.py: copy it here too\n"
    assert re.fullmatch(missing if name == "training" else "", done.stderr)
    assert re.fullmatch(pattern, done.stdout.strip())
