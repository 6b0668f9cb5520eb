"""bench/: the tables say what a run of `generate` says."""

import json

import pytest
import torch

import train_heads
from bench import __main__ as bench
from bench import decoding as bench_decode
from bench import kinds as bench_heads
from clover import PRESETS, CloverHeads
from generate import generate
from hf.tokenizer import load_encoding
from model import GPT, GPTConfig, InputError
from training.data import load_tokens, prompts


def test_bench_heads_prints_tables_and_one_json_line(checkpoint, tmp_path, capsys):
    """Catches a row that belongs to other heads, or a ratio the wrong way round."""
    model = GPT.from_pretrained(checkpoint, device="cpu")
    folders = [tmp_path / name for name in ("medusa", "clover")]
    for folder in folders:
        CloverHeads(PRESETS[folder.name], model).save_pretrained(folder)
    text = tmp_path / "texts.jsonl"
    text.write_text("".join(json.dumps(dict(text=f"def f{i}(): return {i} " * 40)) + "\n" for i in range(200)))
    bench.main(["heads", "--model", str(checkpoint), "--device", "cpu", "--heads", *map(str, folders),
                "--data", str(text), "--prompts", "3", "--prompt-length", "16", "--max-new-tokens", "12",
                "--tree-sizes", "6", "--temperatures", "0.5", "--batch-sizes", "2"])
    *lines, last = capsys.readouterr().out.strip().splitlines()
    result = json.loads(last)
    medusa, clover = result["decoding"]
    assert medusa["heads"] == "medusa" and medusa["extra_over_first"] == 1.0
    extra = [row["tokens_per_step"] - 1 for row in (clover, medusa)]
    assert clover["extra_over_first"] == pytest.approx(extra[0] / extra[1])
    assert clover["identical"] == medusa["identical"] == 1.0
    assert set(result["accuracy"]) == {"medusa", "clover"} and result["machine"]["torch"]
    given = prompts(load_tokens([text], load_encoding(checkpoint), "heldout"), 3, 16)
    heads = CloverHeads.from_pretrained(folders[1], model)
    want = generate(model, given, 12, heads, tree_size=6, temperature=0.5, batch_size=2)
    assert clover["tokens_per_step"] == want.tokens_per_step
    assert clover["speed_up_over_first"] == pytest.approx(clover["tokens_per_second"] / medusa["tokens_per_second"])
    assert any(line.startswith("| clover | 0.5 | 2 | 6 |") for line in lines)


def test_bench_heads_trains_every_kind_alike_and_once(checkpoint, tmp_path, capsys, monkeypatch):
    """Catches an ablation that is not one, kinds with unequal training, and training that is repeated."""
    text = tmp_path / "texts.jsonl"
    text.write_text("".join(json.dumps(dict(text=f"def f{i}(): return {i} " * 40)) + "\n" for i in range(200)))
    monkeypatch.setattr(train_heads, "PROMPTS", 2)
    out = tmp_path / "out"
    flags = ["heads", "--model", str(checkpoint), "--device", "cpu", "--data", str(text), "--train", str(out),
             "--steps", "2", "--prompts", "2", "--prompt-length", "16", "--max-new-tokens", "6", "--tree-sizes", "4",
             "--temperatures", "0"]
    measured = dict(accuracy=[0.5] * 4, top_accuracy={n: [0.5] * 4 for n in (1, 2, 4, 8)}, prompts=2,
                    tokens_per_step=1.0, tokens_per_step_interval=[1.0, 1.0], acceptance={"0": [[0.5] * 63] * 4})
    monkeypatch.setattr(train_heads, "measure", lambda *_: measured)  # measuring would take most of the time
    monkeypatch.setattr(train_heads, "plot", lambda folder: None)  # as would drawing
    bench.main(flags)
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert [row["heads"] for row in result["decoding"]] == list(result["accuracy"]) == list(bench_heads.KINDS)
    assert len({json.dumps(training) for training in result["training"].values()}) == 1
    config = {name: json.loads((out / name / "heads.json").read_text())["config"] for name in bench_heads.KINDS}
    switches = dict(regressive=dict(mix="none"), attention=dict(mix="concat"), augmenting=dict(augment_layers=0))
    for name, switch in switches.items():
        assert config[f"clover-no-{name}"] == config["clover"] | switch
    monkeypatch.setattr(train_heads, "main", lambda flags: pytest.fail("trained again"))
    bench.main([*flags, "--kinds", "medusa", "clover2"])
    again = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["accuracy"]
    assert again == {name: result["accuracy"][name] for name in ("medusa", "clover2")}


@pytest.fixture
def decode(checkpoint, tmp_path, capsys, monkeypatch):
    """Runs `bench decode` on the toy checkpoint: (its printed lines, the object of its last line)."""
    monkeypatch.setattr("tools.tune.TREE_SIZES", (1, 2, 4))  # fewer trees to time
    model = GPT.from_pretrained(checkpoint, device="cpu")
    folders = [tmp_path / name for name in ("medusa", "clover")]
    table = [[0.5] + [0.0] * 62] + [[0.0] * 63] * 3
    for folder in folders:
        CloverHeads(PRESETS[folder.name], model).save_pretrained(folder, acceptance={"0": table, "1": table})
    text = tmp_path / "texts.jsonl"
    text.write_text("".join(json.dumps(dict(text=f"def f{i}(): return {i} " * 40)) + "\n" for i in range(200)))

    def run(*flags):
        bench.main(["decode", "--model", str(checkpoint), "--device", "cpu", "--heads", *map(str, folders),
                    "--data", str(text), "--prompts", "3", "--prompt-length", "16", "--max-new-tokens", "12",
                    "--runs", "2", *flags])
        *lines, last = capsys.readouterr().out.strip().splitlines()
        return lines, json.loads(last)
    return run


def test_bench_decode_prints_every_way_and_every_batch(decode):
    """Catches a row of another batch or tree, a speed-up over something else than the plain run beside it."""
    lines, result = decode("--batch-sizes", "1", "4", "--tree-sizes", "1", "3")
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


def test_bench_decode_sampled_with_a_given_tree(decode):
    _, result = decode("--batch-sizes", "2", "--tree-sizes", "2", "--tree-size", "6", "--temperature", "0.7")
    assert [row["tree_size"] for row in result["decoding"]] == [1, 6, 6] and result["temperature"] == 0.7
    assert all(row["identical"] == 1.0 for row in result["decoding"])


def test_bench_decode_on_random_weights(monkeypatch, capsys):
    """Catches sizes that differ from the model's, and a floor that counts an embedding table which no step reads."""
    sizes = dict(vocab_size=97, n_layer=2, n_head=4, n_kv_head=2, head_size=16, n_embd=64, n_inner=96)
    monkeypatch.setitem(bench_decode.SIZES, "7b", (sizes, "a toy"))
    bench.main(["decode", "--random-weights", "7b", "--device", "cpu", "--batch-sizes", "1", "2",
                "--tree-sizes", "1", "5"])
    *lines, last = capsys.readouterr().out.strip().splitlines()
    result = json.loads(last)
    assert [(row["batch_size"], row["tree_size"]) for row in result["steps"]] == [(1, 1), (1, 5), (2, 1), (2, 5)]
    assert all(list(row["stages_ms"]) == ["draft", "verify", "sample", "accept", "commit"] for row in result["steps"])
    model = bench_decode.random_model("7b", "cpu", torch.float32)
    assert bench_decode.weight_bytes(model) == 4 * (sum(p.numel() for p in model.parameters()) - 97 * 64)
    assert bench_decode.cache_bytes(model, 10) == 4 * 2 * 2 * 2 * 16 * 10
    monkeypatch.setattr("model.free_memory", lambda device: 1000)
    with pytest.raises(InputError, match="random weights of 7b in float32 take .* GB"):
        bench_decode.random_model("7b", "cpu", torch.float32)


def test_real_sizes_are_those_of_the_models():
    for name, billions in {"7b": 6.74, "8b": 8.03, "70b-layer": 2.96}.items():
        with torch.device("meta"):
            model = GPT(GPTConfig(**bench_decode.SIZES[name][0], tied=False))
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)


def test_a_step_that_does_not_fit_the_memory_is_named(monkeypatch, capsys):
    """Catches a table that ends at the first size without room."""
    sizes = dict(vocab_size=97, n_layer=2, n_head=4, n_kv_head=2, head_size=16, n_embd=64, n_inner=96)
    monkeypatch.setitem(bench_decode.SIZES, "7b", (sizes, "a toy"))
    measure = bench_decode.measure_step

    def without_room(model, heads, batch_size, *rest):
        if batch_size == 2:
            raise torch.OutOfMemoryError
        return measure(model, heads, batch_size, *rest)
    monkeypatch.setattr(bench_decode, "measure_step", without_room)
    bench.main(["decode", "--random-weights", "7b", "--device", "cpu", "--batch-sizes", "2", "1", "--tree-sizes", "1"])
    *lines, last = capsys.readouterr().out.strip().splitlines()
    assert "| 2 | 1 | does not fit the memory | - | - | - | - | - | - | - |" in lines
    assert [row["batch_size"] for row in json.loads(last)["steps"]] == [1]


def test_bad_flags_are_refused():
    with pytest.raises(InputError, match="tree size must be"):
        bench.main(["decode", "--tree-size", "65"])
    with pytest.raises(InputError, match="same name"):
        bench.main(["decode", "--heads", "a/clover", "b/clover"])
    with pytest.raises(InputError, match="runs must be"):
        bench.main(["decode", "--runs", "0"])
    with pytest.raises(InputError, match="prompts must be"):
        bench.main(["heads", "--prompts", "0"])
    with pytest.raises(InputError, match="kernel"):
        bench.main(["kernel"])
    for flag, value in (("--tree-sizes", "65"), ("--prefixes", "-1"), ("--rows", "0")):
        with pytest.raises(InputError, match=flag.strip("-").replace("-", " ")):
            bench.main(["kernels", flag, value])
