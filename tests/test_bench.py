"""bench/: the tables say what a run of `generate` says."""

import contextlib
import json
import os
import signal
import sys
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import bench as bench_package
import train_heads
from bench import Table, decoding, kinds, steps
from bench import __main__ as bench
from bench.kinds import KINDS
from clover import PRESETS, CloverHeads
from generate import DraftPlan, Engine, FixedPolicy, Sampling, capture, generate
from hf.families import hf_config, parse_config
from hf.tokenizer import load_encoding
from model import GPT, GPTConfig, InputError
from tools import timing, tune
from tools.policy import AdaptivePolicy
from tools.timing import PREFIX, STAGES, timing_decoder
from training import base
from training.data import load_tokens, prompts

TOY = "a toy", (97, 2, 4, 2, 16, 64, 96), {}  # in the place of a row of SIZES
MEASURED = dict(accuracy=[0.5] * 4, top_accuracy={n: [0.5] * 4 for n in (1, 2, 4, 8)}, prompts=2, tokens_per_step=1.0,
                tokens_per_step_interval=[1.0, 1.0], acceptance={"0": [[0.5] * 63] * 4})


def test_ranks_print_their_numbers_before_they_end(monkeypatch, capsys):
    """Bug: `torchrun -m bench decode` without its JSON line, since a rank ends where it leaves its group."""
    @contextlib.contextmanager
    def joined(args, argv):
        yield None
        raise SystemExit(0)
    monkeypatch.setattr(bench.tensor_parallel, "joined", joined)
    monkeypatch.setattr(decoding, "bench", lambda args, group: dict(bench="decode"))
    with pytest.raises(SystemExit):
        bench.main(["decode", "--device", "cpu"])
    assert json.loads(capsys.readouterr().out)["bench"] == "decode"


@pytest.fixture(name="run")
def run_fixture(capsys, monkeypatch):
    """Runs a command line: (its printed lines, the object of its last line). What is timed runs once."""
    for module in (steps, timing):
        monkeypatch.setattr(module, "seconds", lambda body, *_: (body(), 0.001)[1])
    monkeypatch.setattr(decoding, "copy_bandwidth", lambda device: 1e10)
    monkeypatch.setitem(steps.SIZES, "7b", TOY)

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
    """Folders of Medusa and Clover heads, for which a step takes as long as this says, by its tree."""
    monkeypatch.setattr(decoding, "step_time", lambda decoder: 1 + decoder.plans[0].tree_size / 100)
    monkeypatch.setattr(tune, "TREE_SIZES", (1, 2, 4))
    monkeypatch.setattr(tune, "CHAINS", (3,))
    model, table = GPT.from_pretrained(checkpoint, device="cpu"), [[0.5] + [0.0] * 62] + [[0.0] * 63] * 3
    for name in ("medusa", "clover"):
        CloverHeads(PRESETS[name], model).save_pretrained(tmp_path / name, acceptance={"0": table, "1": table})
    return [str(tmp_path / "medusa"), str(tmp_path / "clover")]


def test_heads_prints_tables_and_one_json_line(run, flags, folders, checkpoint):
    """Catches a row that belongs to other heads, or a ratio the wrong way round."""
    lines, result = run("heads", *flags, "--heads", *folders, "--tree-sizes", "6", "--temperatures", "0.5",
                        "--batch-sizes", "2")
    medusa, clover, alone, both = result["decoding"]
    assert medusa["heads"] == "medusa" and medusa["extra_over_first"] == 1.0
    extra = [row["tokens_per_step"] - 1 for row in (clover, medusa)]
    assert clover["extra_over_first"] == pytest.approx(extra[0] / extra[1])
    assert {row["identical"] for row in result["decoding"]} == {1.0}
    assert (alone["heads"], both["heads"]) == ("lookup", "clover + lookup")
    assert set(result["accuracy"]) == {"medusa", "clover"} and result["machine"]["torch"]
    model = GPT.from_pretrained(checkpoint, device="cpu")
    given = prompts(load_tokens([flags[3]], load_encoding(checkpoint), "heldout"), 3, 16)
    heads = CloverHeads.from_pretrained(folders[1], model)
    for row, drafting, lookup in ((clover, heads, False), (alone, None, True), (both, heads, True)):
        want = generate(model, given, 12, drafting, lookup=lookup, tree_size=6, temperature=0.5, batch_size=2)
        assert row["tokens_per_step"] == want.tokens_per_step
    assert clover["speed_up_over_first"] == pytest.approx(clover["tokens_per_second"] / medusa["tokens_per_second"])
    assert clover["speed_up"] == pytest.approx(clover["tokens_per_second"] / clover["plain_tokens_per_second"])
    assert any(line.startswith("| clover | 0.5 | 2 | 6 |") for line in lines)


def test_heads_trains_every_kind_alike_and_once(run, flags, tmp_path, monkeypatch):
    """Catches an ablation that is not one, kinds with unequal training, and training that is repeated."""
    monkeypatch.setattr(train_heads, "measure", lambda *_: MEASURED)  # measuring would take most of the time
    monkeypatch.setattr(train_heads, "plot", lambda folder: None)  # as would drawing
    out = tmp_path / "out"
    flags = ["heads", *flags, "--train", str(out), "--steps", "2", "--tree-sizes", "4", "--temperatures", "0",
             "--max-new-tokens", "3", "--prompts", "1"]
    _, result = run(*flags, "--kinds", "medusa", "clover")
    assert [row["heads"] for row in result["decoding"][:-2]] == list(result["accuracy"]) == ["medusa", "clover"]
    assert len({json.dumps(training) for training in result["training"].values()}) == 1
    monkeypatch.setattr(train_heads, "main", lambda flags: pytest.fail("trained again"))
    _, again = run(*flags, "--kinds", "clover")
    assert again["accuracy"] == {"clover": result["accuracy"]["clover"]}


def test_ablations_differ_from_clover_in_one_switch():
    config = {name: train_heads.parse([*flags.split(), "--out", "x"]).config for name, flags in KINDS.items()}
    switches = dict(regressive=dict(mix="none"), attention=dict(mix="concat"), augmenting=dict(augment_layers=0))
    for name, switch in switches.items():
        assert config[f"clover-no-{name}"] == replace(config["clover"], **switch)
    assert len(set(map(str, config.values()))) == 7 and config["hydra"] == PRESETS["hydra"]


OURS = ["plain", "medusa 1", "heads 1", "heads 3", "lookup 3", "heads 1 + lookup 3", "auto"]


def test_decode_prints_every_way_and_every_batch(run, flags, folders, monkeypatch):
    """Bug: a row of another batch, tree or plan, a time of another's step, a speed-up over something else than the
    plain run beside it."""
    monkeypatch.setitem(sys.modules, "transformers", None)  # cannot be imported
    lines, result = run("decode", *flags, "--heads", *folders, "--runs", "2", "--batch-sizes", "1", "4",
                        "--tree-sizes", "1", "2", "3")
    rows = result["decoding"]
    assert [(row["batch_size"], row["drafted_by"]) for row in rows] == [(b, name) for b in (1, 4) for name in OURS]
    assert [row["tree_size"] for row in rows] == [1, 2, 2, 4, 4, 5, 5] * 2
    for row in rows:
        assert row["identical"] == 1.0 and row["tokens_per_second"] > 0 and row["floor_ms"] > 0
        assert row.get("step_ms") == (None if row["drafted_by"] == "auto" else 1000 + 10 * row["tree_size"])
        assert row["drafted_by"] != "plain" or row["speed_up"] == row["tokens_per_step"] == 1
        assert any(line.startswith(f"| {row['batch_size']} | {row['drafted_by']} | {row['tree_size']} |")
                   for line in lines)
    assert set(rows[6]["plans"]) <= {*OURS} - {"medusa 1", "auto"} and sum(rows[6]["plans"].values()) <= 3 * 12
    sizes = {name: list(column) for name, column in result["trees"].items()}
    assert sizes == {name: ["1", "2", "3"] for name in ("medusa", "clover", "lookup")} | {"clover + lookup": ["1", "3"]}
    assert all(column["1"] == 1.0 for column in result["trees"].values())
    assert list(result["auto_over_best"]) == ["1", "4"] and result["heads"] == ["medusa", "clover"]
    assert "transformers: not installed (pip install transformers)" in lines


def test_decode_sampled(run, flags, folders):
    """Bug: greedy texts of transformers beside sampled ones."""
    lines, result = run("decode", *flags, "--heads", *folders, "--runs", "1", "--batch-sizes", "1", "--tree-sizes",
                        "2", "--temperature", "0.7")
    assert [row["drafted_by"] for row in result["decoding"]] == OURS and result["temperature"] == 0.7
    assert all(row["identical"] == 1.0 for row in result["decoding"])
    assert "transformers: measured only on one rank, at temperature 0 and batch size 1" in lines


def test_decode_without_heads_on_texts_with_a_name_changed(run, flags, folders):
    """Bug: lookup that needs heads, prompts of another text than the record says."""
    lines, result = run("decode", *flags, "--heads", "none", "--runs", "1", "--batch-sizes", "2", "--text", "rename")
    assert [row["drafted_by"] for row in result["decoding"]] == ["plain", "lookup 3", "auto"]
    assert all(row["identical"] == 1.0 for row in result["decoding"])
    assert result["text"] == "rename" and list(result["trees"]) == ["lookup"]
    assert list(result["auto_over_best"]) == ["2"]
    assert "transformers: measured only on one rank, at temperature 0 and batch size 1" in lines


def test_a_name_is_changed_everywhere_in_the_repetition(checkpoint):
    """Bug: a keyword, part of a word or of an escape that is taken for a name, a name in the rest of the text changed,
    a rarer name."""
    encoding = load_encoding(checkpoint)
    changed = lambda text: encoding.decode(decoding.renaming(encoding.encode(text), encoding))
    start = "ount = for item, for for \\ufffe \\ufffe items(item) "
    text = start + " ount, items item".rjust(3 * len(start), ".")
    want = "\n\nount = for renamed_item, for for \\ufffe \\ufffe items(renamed_item) "
    assert changed(text) == text + want
    assert changed("a = 1; for") == "a = 1; for\n\na "  # nothing to change
    once = changed("x = first(later); " + "later(later, first), " * 3)
    assert once.endswith("\n\nx = first(renamed_item); la")  # the name that is most frequent in all of the text


def spent(*seconds):
    """What each run gives that emits 12 tokens in this many seconds."""
    return [SimpleNamespace(tokens=[[7] * 12], seconds=s, tokens_per_second=12 / s, tokens_per_step=1.0, tree_size=2,
                            plans={DraftPlan(0, 3): [8, 9]}) for s in seconds]


def test_programs_take_turns_and_ratios_are_those_of_a_round(monkeypatch):
    """Bug: a ratio of medians, or the wrong way round; all runs of a program in a row; a text of the first round alone
    that is compared."""
    order, runs = [], dict(plain=spent(1, 2, 4), other=spent(4, 1, 2))
    runs["other"][2].tokens = [[8] * 12]

    def program(name, given, max_new_tokens):
        order.append(name)
        return runs[name].pop(0)
    ways = {name: partial(program, name) for name in runs}
    rows, outputs = decoding.decode_in_turns(None, [[1]], ways, SimpleNamespace(max_new_tokens=12), runs=3)
    assert order == ["plain", "other"] * 3 and [out.seconds for out in outputs["other"]] == [4, 1, 2]
    assert rows["other"] == dict(tree_size=2, tokens_per_step=1.0, tokens_per_second=6, peak_gb=None, speed_up=2,
                                 identical=pytest.approx(2 / 3))


def test_auto_is_held_against_the_best_variant_round_by_round(monkeypatch, toy):
    """Bug: auto beside other heads that were faster, beside a plan that is not the best, or a ratio of medians."""
    ways = {"plain": None, "medusa 1": "medusa", "lookup 3": "clover", "auto": "clover"}
    ways = {name: dict(heads=heads) for name, heads in ways.items()}
    runs = {"plain": spent(8, 8, 8), "medusa 1": spent(1, 1, 1), "lookup 3": spent(4, 2, 6), "auto": spent(2, 8, 3)}
    rows = {name: dict(tokens_per_second=decoding.median_run(done).tokens_per_second) for name, done in runs.items()}
    monkeypatch.setattr(decoding, "ways_to_draft", lambda *_: (ways, {"plain": 2.0}))
    monkeypatch.setattr(decoding, "decode_in_turns", lambda *_, **__: (rows, runs))
    args = SimpleNamespace(temperature=0.0, max_new_tokens=12, runs=3, model="none")
    record, table = {}, Table(decoding.DECODING)
    decoding.measure_batch(toy, [[1]], {}, 2, 0.5, args, record, table)
    assert record["auto_over_best"] == {"2": 2.0} and "batch size 1" in record["transformers"]
    assert table[3]["plans"] == {"lookup 3": 8} and [row.get("step_ms") for row in table] == [2000, *[None] * 3]


def test_every_run_of_auto_starts_afresh(toy, monkeypatch):
    """Bug: a run that knows what an earlier run learnt, from the same prompts or from warming up; one that knows no
    times, as nobody's does."""
    ways = dict(plain=dict(policy=FixedPolicy(DraftPlan())), auto=dict(lookup=True))
    args, given, policies = SimpleNamespace(max_new_tokens=40), [[5, 9, 2], [7, 1]], []
    generate = Engine.generate

    def noted(engine, prompts, max_new_tokens):
        policies.append((max_new_tokens, deepcopy(engine.policy)))
        return generate(engine, prompts, max_new_tokens)
    monkeypatch.setattr(Engine, "generate", noted)
    rows, outputs = decoding.decode_in_turns(toy, given, ways, args, runs=2, temperature=1.0, batch_size=2)
    first, second = outputs["auto"]
    assert first.tokens == second.tokens and rows["auto"]["identical"] == 1.0
    starts = [policy for new, policy in policies if new == 40 and isinstance(policy, AdaptivePolicy)]
    assert len(starts) == 2
    for policy in starts:
        assert policy.step == 0 and policy.tokens == policy.expected and policy.times.cost.measured


def test_decode_on_random_weights(run, monkeypatch):
    """Catches sizes that differ from the model's, a floor that counts an embedding table which no step reads, and a
    table that ends at the first size without room."""
    timing_decoder = steps.timing_decoder

    def without_room(*args, batch_size=1, **options):
        if batch_size == 2:
            raise torch.OutOfMemoryError
        return timing_decoder(*args, batch_size=batch_size, **options)

    monkeypatch.setattr(steps, "timing_decoder", without_room)
    monkeypatch.setattr(steps.peers, "PROGRAMS", {})  # see test_bench_peers.py
    lines, result = run("decode", "--random-weights", "7b", "--batch-sizes", "2", "1", "--tree-sizes", "1", "5",
                        "--runs", "1")
    assert [(row["batch_size"], row["tree_size"]) for row in result["steps"]] == [(1, 1), (1, 5)]
    assert all(tuple(row["stages_ms"]) == STAGES for row in result["steps"])
    assert "| 2 | 1 | does not fit the memory |" + " - |" * 11 in lines
    assert all(row["share"] == pytest.approx(row["floor_ms"] / row["step_ms"]) for row in result["steps"])
    assert result["prefix"] == PREFIX and result["complete"]
    model = steps.random_model("7b", "cpu", torch.float32)
    weights = sum(p.numel() for p in model.parameters()) - 97 * 64
    assert decoding.step_bytes(model, 10) == 4 * (weights + 10 * PREFIX * 2 * 2 * 2 * 16)
    monkeypatch.setattr(steps, "free_memory", lambda device: 1000)
    with pytest.raises(InputError, match="random weights of 7b in float32 take .* kB"):
        steps.random_model("7b", "cpu", torch.float32)


def test_a_stopped_run_goes_on_with_what_is_missing(run, monkeypatch, tmp_path):
    """Catches a row that is measured twice or lost, and rows of two runs in one file."""
    monkeypatch.setattr(steps.peers, "PROGRAMS", {})
    flags, timed = ["decode", "--random-weights", "7b", "--batch-sizes", "1", "--tree-sizes", "1", "3", "4",
                    "--runs", "1", "--out", str(tmp_path / "steps.json")], []
    measure_step = steps.measure_step

    def stopped(model, heads, batch_size, tree_size, *rest):
        timed.append(tree_size)
        if timed == [1, 3]:
            raise KeyboardInterrupt
        return measure_step(model, heads, batch_size, tree_size, *rest)
    monkeypatch.setattr(steps, "measure_step", stopped)
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
    for name in ("decode_in_turns", "measure_trees", "copy_bandwidth"):
        monkeypatch.setattr(decoding, name, lambda *_, **__: pytest.fail("measured again"))
    for name in ("decode_in_turns", "accuracies"):
        monkeypatch.setattr(kinds, name, lambda *_, **__: pytest.fail("measured again"))
    lines, again = run(*decode)
    assert (again, run(*heads)[1]) == before
    names = [row["drafted_by"] for row in again["decoding"]]
    assert [line.split(" | ")[1] for line in lines if line.startswith("| 1 | ")] == names and names[:7] == OURS
    for setting in (["--text", "rename"], ["--heads", "none"]):
        with pytest.raises(InputError, match="decode.json holds a run with"):
            run(*decode, *setting)


def test_a_gpus_record_goes_on_on_another_host(tmp_path, monkeypatch):
    """Bug: a run that a second lent machine cannot finish, since its host has another number of cores; one that goes on
    with another GPU, or another CPU."""
    file = tmp_path / "a.json"
    machine = lambda **changed: dict(cpu="a", cores=2, gpu="H200", torch="2", triton="3", commit="x") | changed
    for first, second, same in (({}, dict(cores=16, commit="y", cpu="b"), True), ({}, dict(gpu="A100"), False),
                                ({}, dict(torch="3"), False), (dict(gpu=None), dict(gpu=None, cpu="b"), False)):
        file.unlink(missing_ok=True)
        monkeypatch.setattr(bench_package, "machine", lambda: machine(**first))
        bench_package.Record(file, bench="a")
        monkeypatch.setattr(bench_package, "machine", lambda: machine(**second))
        with contextlib.nullcontext() if same else pytest.raises(InputError, match="holds a run with machine"):
            assert bench_package.Record(file, bench="a")["machine"] == machine(**first)


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
    assert kinds.steps_done(tmp_path / "out" / "tiny") == 2 and not (tmp_path / "out" / "medusa").exists()
    monkeypatch.setattr(base, "set_learning_rate", set_learning_rate)
    _, result = run(*flags)
    assert result["model"] == result["base"] == "tiny" and kinds.steps_done(tmp_path / "out" / "tiny") == 4
    assert [row["heads"] for row in result["decoding"]] == ["medusa", "lookup", "medusa + lookup"]
    monkeypatch.setattr(base, "main", lambda flags: pytest.fail("trained again"))
    run(*flags)


gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_the_memory_of_a_graph_counts(device):
    """Catches a peak that leaves out what a graph keeps for itself: here as much as the eager calls before it took."""
    body = lambda: torch.ones(2**28, device=device, dtype=torch.uint8).max()  # not sum, which makes int64 of it first
    body()
    _, taken = decoding.reserved_gb(lambda: capture(body, torch.device(device)), torch.device(device))
    assert 2**28 / 1e9 <= taken < 2 * 2**28 / 1e9


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_launches_of_a_captured_step_are_counted(device):
    """Catches a profile that sees a graph as one launch, or counts what the host does."""
    model = GPT(GPTConfig(vocab_size=97, n_layer=2, n_embd=64, n_head=4, n_kv_head=2, head_size=16))
    model = model.to(device, torch.bfloat16).requires_grad_(False).eval()
    engines = [timing_decoder(model, None, DraftPlan(), batch_size=8, graph=graph) for graph in (False, True)]
    with torch.inference_mode():
        found = [steps.kernel_times(engine.body(), model.device) for engine in engines]
    launches = [sum(count for count, _ in kernels.values()) for kernels in found]
    assert launches[0] >= 20 and abs(launches[1] - launches[0]) <= 4
    assert any("tree_attention" in name for name in found[1]) and all(ms > 0 for _, ms in found[1].values())


def test_steps_are_profiled_once_each(monkeypatch, capsys):
    """Catches launches beside another step, a profile that is taken again, and one that is not kept."""
    engines, saved = [], []
    engine = lambda _, __, plan, batch_size, **___: engines.append(plan) or SimpleNamespace(
        body=lambda: (batch_size, plan))
    monkeypatch.setattr(steps, "timing_decoder", engine)
    monkeypatch.setattr(steps, "kernel_times", lambda body, _: {"a": [body[0], 0.5], "b": [body[1].head_nodes, 0.25]})
    row = lambda batch_size, **more: dict(batch_size=batch_size, tree_size=4, **more)
    table = Table({}, [row(1, launches=7, kernels_ms=1.0, kernels={}), row(2), row(3)], lambda: saved.append(1))
    steps.profile_steps(SimpleNamespace(device="cpu"), None, table, Sampling())
    assert [row["launches"] for row in table] == [7, 5, 6] and table[1]["kernels"] == {"a": [2, 0.5], "b": [3, 0.25]}
    assert len(engines) == len(saved) == 2 and "| 3 | 4 | 6 | 0.75 |" in capsys.readouterr().out


def test_real_sizes_are_those_of_the_models():
    for name, billions in {"135m": 0.1345, "360m": 0.3618, "0.5b": 0.494, "1.5b": 1.5437, "7b": 6.74, "8b": 8.03,
                           "30b": 32.53, "70b": 70.55, "70b-layer": 2.96}.items():
        with torch.device("meta"):
            model = GPT(steps.size_config(name))
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=2e-3)
        assert parse_config(hf_config(model.config, torch.float32)) == model.config  # its family has all of it


@pytest.mark.parametrize("flags, message", [
    ("decode --tree-sizes 65", "--tree-sizes: expected"), ("decode --runs 0", "--runs: expected"),
    ("heads --temperatures 0 -1", "--temperatures: expected a number from 0"), ("gpu", "--out"),
    ("decode --draft-vocabulary 5", "--draft-vocabulary needs --random-weights"),
    ("decode --heads a/clover b/clover", "same name"), ("decode --heads a/plain", "plain"), ("kernel", "kernel"),
    ("decode --heads a/lookup b/clover", "called plain, heads or lookup"), ("decode --text novel", "'novel'"),
    ("decode --heads none b/clover", "only the last can be none"), ("kernels --heads 9b", "of 7b, 8b, 70b, not"),
    ("heads --base 124m", "--base needs --train"), ("gpu --out x --minutes 10", "a whole number from 1 to 9"),
    ("roofline --gpu h3", "'h3' .*'h200', 'h100'"), 
    ("roofline --acceptance 1.5", "a number from 0.0 to 1.0, not '1.5'")])
def test_bad_flags_are_refused(flags, message):
    with pytest.raises(InputError, match=message):
        bench.main(flags.split())
