"""backends/tensor_parallel.py: several ranks decode like one process, and end together. Ranks are forks of this process
with torchrun's environment variables; one test starts torchrun itself."""

import importlib.util
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backends.tensor_parallel import Group, SharedError, start
from clover import PRESETS, CloverHeads
from conftest import MODELS, ROOT, edit_weights, random_prompts, refusal, slow, toy_model
from generate import generate
from hf import checkpoint
from model import InputError
from test_hf_checkpoint import save_theirs, theirs_of
from tools.errors import command

BIASED = dict(tied=False, qkv_bias=True, proj_bias=True, mlp_bias=True)
FAMILIES = {  # name: Llama's GPTConfig, or changes to a folder of test_hf_checkpoint
    "llama": {}, "llama-untied": BIASED, "qwen2": dict(num_key_value_heads=1), "qwen3": dict(num_key_value_heads=1),
    "phi3-window": {}, "gpt2": {}, "baichuan2-13b": {}, "olmo2": dict(num_key_value_heads=1),
    "olmo3": dict(num_key_value_heads=4, sliding_window=7), "gemma3": dict(sliding_window=5), "glm4": {}}
if importlib.util.find_spec("transformers") is None:
    FAMILIES = {name: FAMILIES[name] for name in ("llama", "llama-untied")}
OPTIONS = [dict(heads=True, tree_size=9, lookup=True, temperature=0.8, batch_size=2),
           dict(tree_size=1, temperature=0.8), dict(heads=True, tree_size=6, batch_size=3),
           dict(lookup=True, tree_size=5, temperature=0.7, top_k=20),
           dict(heads=True, lookup=True, max_new_tokens=90, batch_size=3)]
PROMPTS = random_prompts([5, 14, 1])


def run_rank(rank, folder, action, size, port):
    os.environ.update(TORCHELASTIC_RUN_ID="x", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE=str(size),
                      LOCAL_WORLD_SIZE=str(size), RANK=str(rank), LOCAL_RANK=str(rank))
    for stream, file in enumerate(("in", f"out{rank}", f"err{rank}")):
        os.dup2(os.open(folder / file, os.O_RDWR | os.O_CREAT | os.O_TRUNC * (stream > 0)), stream)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")
    action(rank)
    sys.stdout.flush()


def run_ranks(folder, action, size=2, stdin="", context=multiprocessing.get_context("fork")):
    """Runs action(rank) in `size` processes, all with the same stdin -> [(exit code, output, errors)]."""
    folder.mkdir(exist_ok=True)
    (folder / "in").write_text(stdin)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [context.Process(target=run_rank, args=(rank, folder, action, size, port)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(200)
        rank.kill()
        rank.join()
    read = lambda name, i: (folder / f"{name}{i}").read_text()
    return [(rank.exitcode, read("out", i), read("err", i)) for i, rank in enumerate(ranks)]


def decode(folder, group):
    """Decodes with every model of a folder, the first one with all OPTIONS -> {name: lists of tokens}."""
    outputs = {}
    for i, name in enumerate(FAMILIES):
        model = checkpoint.load(Path(folder) / name, torch.float32, "cpu", group)
        heads = CloverHeads.from_pretrained(Path(folder) / name / "clover", model)
        for options in OPTIONS if i < 1 else OPTIONS[:1]:
            options = dict(max_new_tokens=6) | options | dict(heads=heads if "heads" in options else None)
            outputs[f"{name} {options.get('tree_size')}"] = generate(model, PROMPTS, **options).tokens
    return outputs


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Folders of random models of every family, with heads whose draft vocabulary is half of the tokens."""
    root = tmp_path_factory.mktemp("families")
    for i, (name, changes) in enumerate(FAMILIES.items()):
        if name.startswith("llama"):
            toy_model(seed=i, **changes).save_pretrained(root / name)
        else:
            save_theirs(name, theirs_of(name, **changes), root / name)
        model = checkpoint.load(root / name, torch.float32, "cpu", packed=False)
        heads = CloverHeads(PRESETS["clover"], model)
        heads.set_vocabulary(torch.randperm(97, generator=torch.Generator().manual_seed(i))[:48].tolist())
        heads.save_pretrained(root / name / "clover")
    return root


@pytest.mark.parametrize("size", [2, slow(4)])
def test_ranks_decode_like_one_process(families, size, tmp_path):
    """Catches overlapping or missing slices, a bias added twice, another token's noise, other heads' slopes."""
    results = run_ranks(tmp_path, lambda rank: print(json.dumps(decode(families, start("cpu")))), size)
    want, (first, *others) = decode(families, Group()), [json.loads(out) for _, out, _ in results]
    assert all(other == first for other in others)
    assert {name: first[name] == tokens for name, tokens in want.items()} == dict.fromkeys(want, True)


@pytest.mark.parametrize("flags", [dict(n_head=3, n_kv_head=1), dict(n_inner=97), dict(n_head=6, n_kv_head=3),
                                   MODELS["hybrid"]], ids=str)
def test_sizes_that_ranks_do_not_divide_are_refused(flags):
    """Bug: a rank that computes other heads than it has weights of."""
    group = Group(0, 2 if "n_kv_head" in flags or "mixers" in flags else 4)
    refusal(lambda: group.shard_config(toy_model(**flags).config), "one process" if "mixers" in flags else "--nproc")


def test_results_and_errors_reach_all_ranks(tmp_path):
    """Catches a value or an error that only one rank gets."""
    def fail(message):
        raise InputError(message)

    def action(rank):
        group, errors = start("cpu"), []
        for call in (lambda: group.on_first(lambda: fail(f"no {rank}")),
                     lambda: group.raise_together(lambda: rank and fail("broken"))):
            with pytest.raises(SharedError) as caught:
                call()
            errors.append(str(caught.value))
        print(json.dumps([group.min(5 - rank), group.any(rank == 1), group.any(False), *errors]))
        group.close()
    for _, out, errors in run_ranks(tmp_path, action):
        assert json.loads(out) == [4, True, False, "no 0", "rank 1: broken"], errors


@pytest.fixture(scope="module")
def models(folder, tmp_path_factory):
    """Folders for ranks to run in: a/ and b/ have the same model/ and heads, c/ has other heads, empty/ nothing."""
    root = tmp_path_factory.mktemp("ranks")
    for name in "abc":
        shutil.copytree(folder, root / name / "model")
    edit_weights(root / "c/model/clover", lambda x: x["heads.0.project.linear.weight"].add_(1), "heads.safetensors")
    (root / "empty").mkdir()
    return root


def run_generate(tmp_path, folders, *flags, seeds=(0, 0), stdin=""):
    """Runs generate.py on one rank per folder, in that folder."""
    def action(rank):
        os.chdir(folders[rank])
        sys.argv = ["generate.py", "--model", "model", "--device", "cpu", "--max-new-tokens", "12", *flags,
                    "--seed", str(seeds[rank])]
        runpy.run_path(str(ROOT / "generate.py"), run_name="__main__")
    return run_ranks(tmp_path, action, len(folders), stdin)


def test_ranks_print_what_one_process_prints(models, tmp_path, monkeypatch):
    """Catches a second rank that reads standard input or prints, and a function that torch 2.12 lacks."""
    monkeypatch.delattr(torch.distributed, "all_gather_single", raising=False)
    flags = "--prompt", "-", "--prompt", "a b c", "--temperature", "0.8", "--json"
    (code, out, errors), second = run_generate(tmp_path, [models / "a", models / "b"], *flags, stdin="once upon")
    assert (code, second) == (0, (0, "", "")), errors
    (_, alone, _), = run_generate(tmp_path, [models / "a"], *flags, stdin="once upon")
    together, alone = json.loads(out), json.loads(alone)
    assert together["tokens"] == alone["tokens"] and together["prompts"] == ["once upon", "a b c"]


@pytest.mark.parametrize("other, seed, message", [
    ("b", 1, "the processes were started with different flags; start all"),
    ("c", 0, "the processes have read different files; start all"), ("empty", 0, "rank 1: model: not found")])
def test_ranks_that_differ_are_refused(models, other, seed, message, tmp_path):
    """Catches ranks that wait for each other or draft different trees, and an error from each of them."""
    first, second = run_generate(tmp_path, [models / "a", models / other], "--prompt", "a b c", seeds=(0, seed))
    assert first[:2] == (2, "") and f"generate.py: {message}" in first[2], first
    assert second == (2, "", "")


def test_a_rank_that_dies_ends_the_others(tmp_path):
    """Catches a rank that waits for a dead one, and a library's traceback."""
    def action(rank):
        with command():
            main()

    def main():
        group = start("cpu")
        if group.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        group.on_first(lambda: None)
    (code, _, errors), second = run_ranks(tmp_path, action)
    assert second[0] == -signal.SIGKILL
    assert code == 2 and "another process has ended" in errors and "Traceback" not in errors


def test_an_error_of_all_ranks_is_printed_once(models):
    """Catches an error from every rank, and environment variables that torchrun does not set."""
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                           str(ROOT / "generate.py"), "--model", "nowhere", "--device", "cpu", "--prompt", "a"],
                          cwd=models, capture_output=True, text=True, timeout=120,
                          env=os.environ | dict(OMP_NUM_THREADS="1"))
    assert done.stderr.count("generate.py: nowhere: ") == 1 and "rank 1:" not in done.stderr, done.stderr
    assert "exitcode  : 2" in done.stderr and done.returncode


def test_a_rank_uses_the_gpu_of_its_number(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    refusal(lambda: start("cuda:0"), "expected --device cuda, not cuda:0")
    if not torch.cuda.is_available():
        refusal(lambda: start("cuda"), "device 'cuda:1' is not available here")
