"""backends/tensor_parallel.py: what several processes hold together says what one process says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backends.tensor_parallel import Group
from clover import PRESETS, CloverHeads
from conftest import random_prompts, toy_model
from generate import generate
from hf import checkpoint
from model import InputError

ROOT = Path(__file__).parent.parent
FAMILIES = {
    "llama": dict(), "llama-untied": dict(family="llama", tied=False, qkv_bias=True, proj_bias=True, mlp_bias=True),
    "mistral": dict(n_head=8, n_kv_head=4), "qwen2": dict(qkv_bias=True, n_kv_head=1),
    "qwen3": dict(qk_norm="head", n_kv_head=1, tied=False), "phi3": dict(tied=False),
    "gpt2": dict(norm="layer", positions="learned", activation="gelu", gated=False, n_kv_head=4, qkv_bias=True,
                 proj_bias=True, mlp_bias=True),
    "baichuan": dict(positions="alibi", n_kv_head=4, tied=False, unit_head=True),
    "olmo2": dict(qk_norm="all", norm_at="after", n_kv_head=1, tied=False),
    "olmo3": dict(qk_norm="all", norm_at="after", n_kv_head=4, windows=(7, 0), tied=False),
    "gemma3_text": dict(qk_norm="head", norm_at="both", windows=(0, 5), window_theta=500.0, activation="gelu",
                        embed_scale=8.0, attn_scale=0.25),
    "glm4": dict(norm_at="both", rotary_size=8, qkv_bias=True, tied=False),
    "smollm3": dict(unrotated=(0,), windows=(9, 0))}
WAYS = [dict(tree_size=1), dict(tree_size=1, temperature=0.8), dict(heads=True, tree_size=6, batch_size=3),
        dict(heads=True, tree_size=9, lookup=True, temperature=0.8, batch_size=2),
        dict(lookup=True, tree_size=5, temperature=0.7, top_k=20, top_p=0.9)]
PROMPTS = random_prompts([5, 9, 2, 14, 30, 1])
RANK = """
import json, sys
import torch, torch.distributed as dist
sys.path[:0] = {path!r}
import test_backends_tensor_parallel as test_group
torch.set_num_threads(1)
rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{{folder}}/meet{{size}}", rank=rank, world_size=size)
print(json.dumps(test_group.texts(folder, test_group.Group(rank, size))))
dist.destroy_process_group()
"""


def texts(folder, group):
    """Decodes every family's model of a folder in every way -> {name: lists of tokens}."""
    found = {}
    for name in FAMILIES:
        model = checkpoint.load(Path(folder) / name, torch.float32, "cpu", group)
        heads = CloverHeads.from_pretrained(Path(folder) / name / "clover", model)
        for i, way in enumerate(WAYS):
            way = way | dict(heads=heads if "heads" in way else None)
            found[f"{name} {i}"] = generate(model, PROMPTS, 20, **way).tokens
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folders of random models of every family, with heads that draft among half of the vocabulary."""
    root = tmp_path_factory.mktemp("families")
    for i, (name, flags) in enumerate(FAMILIES.items()):
        toy_model(seed=i, **dict(family=name.split("-")[0], head_size=16) | flags).save_pretrained(root / name)
        model = checkpoint.load(root / name, torch.float32, "cpu")
        heads = CloverHeads(PRESETS["clover"], model)
        heads.set_vocabulary(torch.randperm(97, generator=torch.Generator().manual_seed(i))[:48].tolist())
        heads.save_pretrained(root / name / "clover")
    return root


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_say_what_one_process_says(folder, size):
    """Catches a part of a fused matrix that another rank has too, a bias that is added twice, noise of another token,
    slopes of other heads, a draft vocabulary cut at the wrong id, ranks that take different tokens."""
    code = RANK.format(path=[str(ROOT), str(ROOT / "tests")])
    run = lambda rank: subprocess.Popen([sys.executable, "-c", code, str(rank), str(size), str(folder)],
                                        stdout=subprocess.PIPE, env=os.environ | dict(OMP_NUM_THREADS="1"))
    done = [process.communicate()[0] for process in [run(rank) for rank in range(size)]]
    want, (first, *others) = texts(folder, Group()), map(json.loads, done)
    assert all(other == first for other in others)
    assert {name: first[name] == tokens for name, tokens in want.items()} == dict.fromkeys(want, True)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hold_every_weight_once(folder, name, size):
    """Catches rows that no rank holds, or that two do without need."""
    model, *ranks = [checkpoint.read_headers(folder / name)[0] for _ in range(size + 1)]
    config = model.config
    for rank, part in enumerate(ranks):
        with torch.device("meta"):
            Group(rank, size).divide(part)
    for parameter, whole in model.named_parameters():
        whole = torch.arange(whole.numel()).view(whole.shape)
        counts = torch.zeros(whole.numel())
        for rank, part in enumerate(ranks):
            part = torch.empty_like(part.get_parameter(parameter), dtype=torch.int64, device="cpu")
            checkpoint.copy_shard(part, whole, 0, Group(rank, size).shard_slices(parameter, config))
            counts[part.flatten()] += 1
        kv_copies = max(size // config.n_kv_head, 1)
        allowed = {1.0} if ".mlp." in parameter or "proj.weight" in parameter else {1.0, float(kv_copies), float(size)}
        allowed |= {float(size)} if parameter.endswith("bias") else set()
        assert set(counts.tolist()) <= allowed and counts.min() >= 1, parameter


@pytest.mark.parametrize("flags", [dict(n_head=3, n_kv_head=1), dict(n_inner=97), dict(n_head=6, n_kv_head=3)], ids=str)
def test_sizes_that_ranks_do_not_divide_are_refused(flags):
    with pytest.raises(InputError, match="do not divide .* take another --nproc-per-node"):
        Group(0, 4 if "n_kv_head" not in flags else 2).shard_config(toy_model(**flags).config)
