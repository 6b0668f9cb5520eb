"""bench/: the tables say what a run of `generate` says."""

import json
import os
import signal
from types import SimpleNamespace

import pytest
import torch

import train_heads
from bench import Table, decoding, kinds
from bench import __main__ as bench
from bench.kinds import KINDS
from clover import PRESETS, CloverHeads
from generate import STAGES, Sampling, capture, generate
from hf.checkpoint import hf_config, parse_config
from hf.tokenizer import load_encoding
from model import GPT, GPTConfig, InputError
from tools.tune import PREFIX, timing_engine
from training import base
from training.data import load_tokens, prompts

TOY = dict(vocab_size=97, n_layer=2, n_head=4, n_kv_head=2, head_size=16, n_embd=64, n_inner=96)
MEASURED = dict(accuracy=[0.5] * 4, top_accuracy={n: [0.5] * 4 for n in (1, 2, 4, 8)}, prompts=2, tokens_per_step=1.0,
                tokens_per_step_interval=[1.0, 1.0], acceptance={"0": [[0.5] * 63] * 4})


@pytest.fixture
def run(capsys):
    """Runs a command line: (its printed lines, the object of its last line)."""
    def run(*flags):
        bench.main([*flags, "--device", "cpu"])
        *lines, last = capsys.readouterr().out.strip().splitlines()
        return lines, json.loads(last)
    return run


@pytest.fixture
def flags(checkpoint, tmp_path):
    """Flags of short runs of the toy checkpoint on a text."""
    text = tmp_path / "texts.jsonl"
    text.write_text("".join(json.dumps(dict(text=f"def f{i}(): return {i} " * 40)) + "\n" for i in range(200)))
    return ["--model", str(checkpoint), "--data", str(text), "--prompts", "3", "--prompt-length", "16",
            "--max-new-tokens", "12"]


@pytest.fixture
def folders(checkpoint, tmp_path, monkeypatch):
    """Folders of Medusa and Clover heads."""
    monkeypatch.setattr("tools.tune.TREE_SIZES", (1, 2, 4))  # fewer trees to time
    model, table = GPT.from_pretrained(checkpoint, device="cpu"), [[0.5] + [0.0] * 62] + [[0.0] * 63] * 3
    for name in ("medusa", "clover"):
        CloverHeads(PRESETS[name], model).save_pretrained(tmp_path / name, acceptance={"0": table, "1": table})
    return [str(tmp_path / "medusa"), str(tmp_path / "clover")]


def test_heads_prints_tables_and_one_json_line(run, flags, folders, checkpoint):
    """Catches a row that belongs to other heads, or a ratio the wrong way round."""
    lines, result = run("heads", *flags, "--heads", *folders, "--tree-sizes", "6", "--temperatures", "0.5",
                        "--batch-sizes", "2")
    medusa, clover = result["decoding"]
    assert medusa["heads"] == "medusa" and medusa["extra_over_first"] == 1.0
    extra = [row["tokens_per_step"] - 1 for row in (clover, medusa)]
    assert clover["extra_over_first"] == pytest.approx(extra[0] / extra[1])
    assert clover["identical"] == medusa["identical"] == 1.0
    assert set(result["accuracy"]) == {"medusa", "clover"} and result["machine"]["torch"]
    model = GPT.from_pretrained(checkpoint, device="cpu")
    given = prompts(load_tokens([flags[3]], load_encoding(checkpoint), "heldout"), 3, 16)
    heads = CloverHeads.from_pretrained(folders[1], model)
    want = generate(model, given, 12, heads, tree_size=6, temperature=0.5, batch_size=2)
    assert clover["tokens_per_step"] == want.tokens_per_step
    assert clover["speed_up_over_first"] == pytest.approx(clover["tokens_per_second"] / medusa["tokens_per_second"])
    assert clover["speed_up"] == pytest.approx(clover["tokens_per_second"] / clover["plain_tokens_per_second"])
    assert any(line.startswith("| clover | 0.5 | 2 | 6 |") for line in lines)


def test_heads_trains_every_kind_alike_and_once(run, flags, tmp_path, monkeypatch):
    """Catches an ablation that is not one, kinds with unequal training, and training that is repeated."""
    monkeypatch.setattr(train_heads, "measure", lambda *_: MEASURED)  # measuring would take most of the time
    monkeypatch.setattr(train_heads, "plot", lambda folder: None)  # as would drawing
    out = tmp_path / "out"
    flags = ["heads", *flags, "--train", str(out), "--steps", "2", "--tree-sizes", "4", "--temperatures", "0"]
    _, result = run(*flags)
    assert [row["heads"] for row in result["decoding"]] == list(result["accuracy"]) == list(KINDS)
    assert len({json.dumps(training) for training in result["training"].values()}) == 1
    config = {name: json.loads((out / name / "heads.json").read_text())["config"] for name in KINDS}
    switches = dict(regressive=dict(mix="none"), attention=dict(mix="concat"), augmenting=dict(augment_layers=0))
    for name, switch in switches.items():
        assert config[f"clover-no-{name}"] == config["clover"] | switch
    monkeypatch.setattr(train_heads, "main", lambda flags: pytest.fail("trained again"))
    _, again = run(*flags, "--kinds", "medusa", "clover2")
    assert again["accuracy"] == {name: result["accuracy"][name] for name in ("medusa", "clover2")}


def test_decode_prints_every_way_and_every_batch(run, flags, folders):
    """Catches a row of another batch or tree, a speed-up over something else than the plain run beside it."""
    lines, result = run("decode", *flags, "--heads", *folders, "--runs", "2", "--batch-sizes", "1", "4",
                        "--tree-sizes", "1", "3")
    rows = result["decoding"]
    kinds = ("plain", "medusa", "clover")
    assert [(row["batch_size"], row["heads"]) for row in rows] == [(b, kind) for b in (1, 4) for kind in kinds]
    for row in rows:
        assert row["identical"] == 1.0 and row["tokens_per_second"] > 0 and row["step_ms"] > 0 and row["floor_ms"] > 0
        assert (row["tree_size"] == 1) == (row["heads"] == "plain") and row["tokens_per_step"] >= 1
        assert row["heads"] != "plain" or (row["speed_up"] == row["tokens_per_step"] == row["auto"] == 1)
        assert any(line.startswith(f"| {row['batch_size']} | {row['heads']} | {row['tree_size']} |") for line in lines)
    sizes = {name: list(column) for name, column in result["trees"].items()}
    assert sizes == dict(medusa=["1", "3"], clover=["1", "3"])
    assert result["trees"]["clover"]["1"] == 1.0 and result["machine"]["torch"] and result["runs"] == 2
    if isinstance(result["transformers"], str):
        assert "pip install" in result["transformers"]
    else:
        assert [row["identical"] for row in result["transformers"]] == [1.0, 1.0]


def test_decode_sampled_with_a_given_tree(run, flags, folders):
    _, result = run("decode", *flags, "--heads", *folders, "--runs", "1", "--batch-sizes", "2", "--tree-sizes", "2",
                    "--tree-size", "6", "--temperature", "0.7")
    assert [row["tree_size"] for row in result["decoding"]] == [1, 6, 6] and result["temperature"] == 0.7
    assert all(row["identical"] == 1.0 for row in result["decoding"])


def test_decode_on_random_weights(run, monkeypatch):
    """Catches sizes that differ from the model's, a floor that counts an embedding table which no step reads, and a
    table that ends at the first size without room."""
    monkeypatch.setitem(decoding.SIZES, "7b", (TOY, "a toy"))
    timing_engine = decoding.timing_engine

    def without_room(model, heads, batch_size, *rest, **options):
        if batch_size == 2:
            raise torch.OutOfMemoryError
        return timing_engine(model, heads, batch_size, *rest, **options)

    monkeypatch.setattr(decoding, "timing_engine", without_room)
    monkeypatch.setattr(decoding.peers, "PROGRAMS", {})  # see test_bench_peers.py
    lines, result = run("decode", "--random-weights", "7b", "--batch-sizes", "2", "1", "--tree-sizes", "1", "5",
                        "--runs", "1")
    assert [(row["batch_size"], row["tree_size"]) for row in result["steps"]] == [(1, 1), (1, 5)]
    assert all(tuple(row["stages_ms"]) == STAGES for row in result["steps"])
    assert "| 2 | 1 | does not fit the memory |" + " - |" * 11 in lines
    assert all(row["share"] == pytest.approx(row["floor_ms"] / row["step_ms"]) for row in result["steps"])
    assert result["prefix"] == PREFIX and result["complete"]
    model = decoding.random_model("7b", "cpu", torch.float32)
    weights = sum(p.numel() for p in model.parameters()) - 97 * 64
    assert decoding.step_bytes(model, 10) == 4 * (weights + 10 * PREFIX * 2 * 2 * 2 * 16)
    monkeypatch.setattr("model.free_memory", lambda device: 1000)
    with pytest.raises(InputError, match="random weights of 7b in float32 take .* GB"):
        decoding.random_model("7b", "cpu", torch.float32)


def test_a_stopped_run_goes_on_with_what_is_missing(run, monkeypatch, tmp_path):
    """Catches a row that is measured twice or lost, and rows of two runs in one file."""
    monkeypatch.setitem(decoding.SIZES, "7b", (TOY, "a toy"))
    monkeypatch.setattr(decoding.peers, "PROGRAMS", {})
    flags, timed = ["decode", "--random-weights", "7b", "--batch-sizes", "1", "--tree-sizes", "1", "3", "4",
                    "--runs", "1", "--out", str(tmp_path / "steps.json")], []
    measure_step = decoding.measure_step

    def stopped(model, heads, batch_size, tree_size, *rest):
        timed.append(tree_size)
        if timed == [1, 3]:
            raise KeyboardInterrupt
        return measure_step(model, heads, batch_size, tree_size, *rest)
    monkeypatch.setattr(decoding, "measure_step", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(*flags)
    kept = json.loads((tmp_path / "steps.json").read_text())
    assert [row["tree_size"] for row in kept["steps"]] == [1] and kept["complete"] is False
    lines, result = run(*flags)
    assert timed == [1, 3, 3, 4] and result["steps"][0] == kept["steps"][0] and result["complete"]
    assert result == json.loads((tmp_path / "steps.json").read_text())
    assert any(line.startswith("| 1 | 1 |") for line in lines)
    with pytest.raises(InputError, match="steps.json holds a run with temperature 0.0, not 0.5; delete it"):
        run(*flags, "--temperature", "0.5")
    with pytest.raises(InputError, match="nowhere.*cannot be written.*another --out"):
        run(*flags[:-1], str(tmp_path / "nowhere" / "steps.json"))


def test_nothing_of_a_complete_file_is_measured_again(run, flags, folders, monkeypatch, tmp_path):
    """Catches a table of decode or heads that does not look into the file."""
    common = [*flags, "--heads", *folders, "--batch-sizes", "1", "--tree-sizes", "3"]
    decode = ["decode", *common, "--runs", "1", "--out", str(tmp_path / "decode.json")]
    heads = ["heads", *common, "--temperatures", "0", "--out", str(tmp_path / "heads.json")]
    before = run(*decode)[1], run(*heads)[1]
    for name in ("decode_in_turns", "measure_trees", "transformers_rows", "copy_bandwidth"):
        monkeypatch.setattr(decoding, name, lambda *_, **__: pytest.fail("measured again"))
    for name in ("decode_in_turns", "accuracies"):
        monkeypatch.setattr(kinds, name, lambda *_, **__: pytest.fail("measured again"))
    lines, again = run(*decode)
    assert (again, run(*heads)[1]) == before
    assert sum(line.startswith(("| 1 | plain |", "| 1 | medusa |", "| 1 | clover |")) for line in lines) == 3


def test_heads_trains_a_base_of_its_own_first(run, flags, tmp_path, monkeypatch):
    """Catches a base that is trained twice, heads for another base, and heads for a base that was interrupted."""
    monkeypatch.setattr(train_heads, "measure", lambda *_: MEASURED)
    monkeypatch.setattr(train_heads, "plot", lambda folder: None)
    monkeypatch.setitem(kinds.BASES, "tiny", "--vocab-size 300 --n-layer 1 --n-head 2 --n-kv-head 1 --head-size 16 "
                                             "--n-embd 32 --n-inner 48 --batch-size 2 --block-size 96 --steps 4")
    set_learning_rate = base.set_learning_rate

    def interrupted(optimizer, peak, step, steps):
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        set_learning_rate(optimizer, peak, step, steps)
    monkeypatch.setattr(base, "set_learning_rate", interrupted)
    flags = ["heads", *flags[2:], "--base", "tiny", "--train", str(tmp_path / "out"), "--kinds", "medusa",
             "--steps", "2", "--tree-sizes", "4", "--temperatures", "0"]
    with pytest.raises(InputError, match="out/tiny: training was interrupted"):
        run(*flags)
    assert kinds.base_steps(tmp_path / "out" / "tiny") == 2 and not (tmp_path / "out" / "medusa").exists()
    monkeypatch.setattr(base, "set_learning_rate", set_learning_rate)
    _, result = run(*flags)
    assert result["model"] == result["base"] == "tiny" and kinds.base_steps(tmp_path / "out" / "tiny") == 4
    assert [row["heads"] for row in result["decoding"]] == ["medusa"]
    monkeypatch.setattr(base, "main", lambda flags: pytest.fail("trained again"))
    run(*flags)


gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_the_memory_of_a_graph_counts(device):
    """Catches a peak that leaves out what a graph keeps for itself: here as much as the eager calls before it took."""
    body = lambda: torch.ones(2**28, device=device, dtype=torch.uint8).sum()
    _, taken = decoding.reserved_gb(lambda: capture(body, torch.device(device)), torch.device(device))
    assert 2 * 2**28 / 1e9 <= taken < 3 * 2**28 / 1e9


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_launches_of_a_captured_step_are_counted(device):
    """Catches a profile that sees a graph as one launch, or counts what the host does."""
    config = GPTConfig(**TOY)
    model = GPT(config).to(device, torch.bfloat16).requires_grad_(False).eval()
    eager, captured = (timing_engine(model, None, 8, 1, Sampling(), graph=graph) for graph in (False, True))
    with torch.inference_mode():
        found = [decoding.kernel_times(body, model.device) for body in (eager.step, captured.replay)]
    launches = [sum(count for count, _ in kernels.values()) for kernels in found]
    assert launches[0] >= 20 and abs(launches[1] - launches[0]) <= 4
    assert any("tree_attention" in name for name in found[1]) and all(ms > 0 for _, ms in found[1].values())


def test_steps_are_profiled_once_each(monkeypatch, capsys):
    """Catches launches beside another step, a profile that is taken again, and one that is not kept."""
    engines, saved = [], []
    monkeypatch.setattr(decoding, "timing_engine", lambda *_, **__: engines.append(_) or SimpleNamespace(replay=_))
    monkeypatch.setattr(decoding, "kernel_times", lambda body, device: {"a": [body[2], 0.5], "b": [body[3], 0.25]})
    row = lambda batch_size, **more: dict(batch_size=batch_size, tree_size=4, **more)
    table = Table({}, [row(1, launches=7, kernels_ms=1.0, kernels={}), row(2), row(3)], lambda: saved.append(1))
    decoding.profile_steps(SimpleNamespace(device="cpu"), None, table, Sampling(), True)
    assert [row["launches"] for row in table] == [7, 6, 7] and table[1]["kernels"] == {"a": [2, 0.5], "b": [4, 0.25]}
    assert len(engines) == len(saved) == 2 and "| 3 | 4 | 7 | 0.75 |" in capsys.readouterr().out


def test_real_sizes_are_those_of_the_models():
    for name, billions in {"135m": 0.1345, "360m": 0.3618, "0.5b": 0.494, "1.5b": 1.5437, "7b": 6.74, "8b": 8.03,
                           "30b": 32.53, "70b": 70.55, "70b-layer": 2.96}.items():
        with torch.device("meta"):
            model = GPT(decoding.size_config(name))
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=2e-3)
        assert parse_config(hf_config(model.config, torch.float32), name) == model.config  # its family has all of it


@pytest.mark.parametrize("flags, message", [
    ("decode --tree-size 65", "tree size must be"), ("decode --runs 0", "runs must be"),
    ("heads --prompts 0", "prompts must be"), ("heads --temperatures -1", "temperature must be"),
    ("decode --draft-vocabulary 5", "--draft-vocabulary needs --random-weights"),
    ("decode --random-weights 8b --draft-vocabulary 7", "from 8, the beams of the largest tree, to 128256, not 7"),
    ("decode --random-weights 7b --tree-sizes 5 --draft-vocabulary 32001", "from 3, .* to 32000, not 32001"),
    ("decode --heads a/clover b/clover", "same name"), ("decode --heads a/plain", "plain"), ("kernel", "kernel"),
    ("kernels --tree-sizes 65", "tree sizes must be"), ("kernels --prefixes -1", "prefixes must be"),
    ("kernels --rows 0", "rows must be"), ("heads --base 124m", "--base needs --train"), ("gpu", "--out"),
    ("gpu --out x --slice 0", "slice must be"), ("gpu --out x --minutes 10", "minutes must be"),
    ("roofline --gpu h3", "'h3' .*'h200', 'h100'"), ("roofline --acceptance 1.5", "acceptance must be"),
    ("roofline --prefix -1", "prefix must be")])
def test_bad_flags_are_refused(flags, message):
    with pytest.raises(InputError, match=message):
        bench.main(flags.split())
