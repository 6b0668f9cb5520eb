"""train_heads.py: heads learn to predict the model's tokens, runs resume, the output works in generate.py."""

import json
import multiprocessing.forkserver
import os
import resource
import shutil
import signal
import sys
from functools import partial

import pytest
import torch

import train_heads
from backends import cpu
from backends.tensor_parallel import Group
from clover import BINS, PRESETS, CloverHeads
from common.files import save_lines
from conftest import Operations, edit_json, needs_cuda, random_prompts, refusal, slow, toy_model, write_tokenizer
from hf.tokenizer import load_encoding
from model import GPT
from test_backends_tensor_parallel import run_ranks
from test_clover import random_heads
from test_hf_checkpoint import theirs_of
from test_training_data import save_family
from tools.errors import command
from training import data, evaluate, program, runs, writing
from training.data import load_tokens
from training.flags import RunConfig, parse_heads

TINY = "--device cpu --batch-size 8 --block-size 40 --lr 0.005".split()
FORKS = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    lines = (dict(text=f"line {i} of a text, {i * i} " * 20) for i in range(200))
    return write_lines(tmp_path_factory.mktemp("texts") / "texts.jsonl", lines)


@pytest.fixture(scope="module")
def forks():
    """Starts the server process of FORKS, which loads torch once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        FORKS.set_forkserver_preload(["test_train_heads"])
        multiprocessing.forkserver.ensure_running()


@pytest.fixture(autouse=True)
def few_prompts(monkeypatch):
    monkeypatch.setattr(evaluate, "PROMPTS", 4)  # decoded at the end of a run
    monkeypatch.setattr(evaluate, "DECODED", 24)


def write_lines(file, values):
    file.write_text("".join(json.dumps(value) + "\n" for value in values))
    return file


def measured(heads, *_):
    K = heads.config.n_draft
    return dict(accuracy=[0.5] * K, prompts=1, tokens_per_step=1.0,
                acceptance=dict.fromkeys(("greedy", "sampled"), [[1, 2]] * BINS))


@pytest.fixture
def unmeasured(monkeypatch):
    """Skips the final measurements, which dominate the time of a short run."""
    monkeypatch.setattr(evaluate, "measure", measured)


def train(*flags):
    return program.main(parse_heads([*TINY, *map(str, flags)]))


def run(checkpoint, texts, out, *flags):
    train("--model", checkpoint, "--data", texts, "--out", out, *flags)
    return record(out)


def record(out):
    return json.loads((out / "heads.json").read_text())


def trained(out):
    return torch.load(out / "train_state.pt", weights_only=True)["heads"]


def same_heads(one, other):
    return all(torch.equal(a, b) for a, b in zip(trained(one).values(), trained(other).values(), strict=True))


def learned(checkpoint, texts, out, name, *flags):
    """heads.json of a run of 60 steps in which every head improves."""
    model = GPT.from_pretrained(checkpoint, device="cpu", packed=False)
    heldout = load_tokens([texts], load_encoding(checkpoint), "heldout")
    start = evaluate.head_accuracy(CloverHeads(PRESETS[name], model), heldout, 8, 40)
    found = run(checkpoint, texts, out, "--preset", name, "--steps", "60", *flags)
    assert all(b > a + 0.1 for a, b in zip(start, found["accuracy"])), (start, found["accuracy"])
    return found


def test_heads_of_a_hybrid_in_bfloat16_learn(texts, tmp_path):
    """Catches states that cross documents, a program that cannot load, train or decode a hybrid, and a traceback after
    hours of training on a CPU, which decodes in float32, while heads are stored in bfloat16."""
    theirs_of("qwen3_5", vocab_size=258, linear_num_value_heads=6).bfloat16().save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    assert learned(tmp_path / "model", texts, tmp_path / "heads", "clover")["tokens_per_step"] >= 1


@pytest.mark.parametrize("name", ["clover2", *map(slow, ("medusa", "hydra", "clover"))])
def test_every_preset_learns(checkpoint, texts, tmp_path, capsys, name):
    """Catches heads that are trained on the wrong target."""
    found = learned(checkpoint, texts, tmp_path, name)
    assert found["config"]["preset"] == name and found["training"]["steps"] == 60 and 1 <= found["tokens_per_step"] <= 5
    for table in found["acceptance"].values():  # of trees of 17 nodes
        (accepted, proposed), steps = map(sum, zip(*table)), sum(n for _, n in table) / 16
        assert len(table) == BINS and 0 < accepted < proposed and all(0 <= right <= n for right, n in table)
    assert 0 <= 1 + accepted / steps - found["tokens_per_step"] < 0.5  # the greedy table; a text may end within a path
    assert f"--heads {tmp_path}" in capsys.readouterr().out


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_run_on_a_gpu_learns_and_its_steps_do_not_wait(dtype, checkpoint, texts, tmp_path, monkeypatch):
    """Catches tensors on two devices, a host synchronisation in a step, and errors of CUDA's autocast."""
    train_step = train_heads.Trainer.train_step

    def unwaiting(self, *args):
        torch.cuda.set_sync_debug_mode("error" if self.step else "default")  # the first step loads kernels
        try:
            return train_step(self, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    monkeypatch.setattr(train_heads.Trainer, "train_step", unwaiting)
    learned(checkpoint, texts, tmp_path, "clover", "--device", "cuda", "--dtype", dtype)


@pytest.fixture(scope="module")
def finished(checkpoint, texts, tmp_path_factory):
    """The output folder of a run of 12 steps."""
    out = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "measure", measured)
        torch.manual_seed(0)
        run(checkpoint, texts, out, "--steps", "12")
    return out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_goes_on(number, finished, checkpoint, texts, tmp_path, monkeypatch, capsys, unmeasured):
    """Catches work lost to a signal; a resume without the optimizer, schedule, data position or flags."""
    monkeypatch.setattr(train_heads, "SHOW_EVERY", 2)
    optimizer_step, handler = torch.optim.AdamW.step, signal.getsignal(number)

    def stopped(self, *args):  # in the middle of a step
        if 0.9 > self.param_groups[0]["lr"] / 0.005 > 0.8:
            os.kill(os.getpid(), number)
            if number == signal.SIGTERM:  # a parent process may forward it
                os.kill(os.getpid(), number)
        return optimizer_step(self, *args)
    monkeypatch.chdir(texts.parent)  # relative paths
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", stopped)
        flags = ["--model", os.path.relpath(checkpoint), "--data", texts.name, "--out", tmp_path, "--steps", "12"]
        assert train(*flags) == 128 + number
    assert "interrupted at step" in capsys.readouterr().out
    step = record(tmp_path)["training"]["steps"]
    assert 0 < step < 12 and signal.getsignal(number) == handler
    monkeypatch.chdir(tmp_path)
    assert program.main(parse_heads(["--out", str(tmp_path), "--resume"])) == 0
    assert same_heads(finished, tmp_path) and record(tmp_path) == record(finished)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6, 8, 10, 12]
    assert set(lines[0]) == {"step", "tokens", "loss", "accuracy", "lr"}


def test_a_run_refuses_other_flags_data_models_and_formats(finished, checkpoint, tmp_path):
    """Catches a run resumed with other settings, and a refusal that has already changed files."""
    before = {file: file.read_bytes() for file in finished.rglob("*") if file.is_file()}
    (tmp_path / "more.txt").write_text("more " * 2000)
    other = shutil.copytree(checkpoint, tmp_path / "other")
    toy_model(seed=1, vocab_size=258, block_size=128).save_pretrained(other)
    for flags, says in (
            (["--preset", "medusa"], "holds a run with preset clover, not medusa"),
            (["--seed", "2", "--draft-heads", "3", "--lr", "0.1"], "lr 0.005, not 0.1; seed 1, not 2; draft-heads 4, "),
            (["--template-kwargs", '{"a": 1}'], "template-kwargs"),
            (["--data", tmp_path / "more.txt"], "another model or other data"),
            (["--model", other], "another model or other data")):
        refusal(lambda: train("--resume", "--out", finished, *flags), says)
    refusal(lambda: train("--out", finished), "holds a run already")
    heads = shutil.copytree(finished, tmp_path / "heads", ignore=shutil.ignore_patterns("run.json", "train_state.pt"))
    refusal(lambda: train("--out", heads), "holds heads that no run there wrote")
    pytest.raises(SystemExit, train, "--resume", "--out", finished, "--steps", "0")
    assert before == {file: file.read_bytes() for file in finished.rglob("*") if file.is_file()}
    out = shutil.copytree(finished, tmp_path / "out")
    for file, content in (("train_state.pt", b"half"), ("run.json", b"7"), ("run.json", b'{"steps": 3}')):
        (out / file).write_bytes(content)
        refusal(lambda: train("--resume", "--out", out), "this version")


def test_a_loss_that_is_no_number_ends_the_run(checkpoint, texts, tmp_path, monkeypatch, unmeasured):
    """Catches NaN weights written over good ones."""
    adamw_step, calls = torch.optim.AdamW.step, []

    def poisoned(self, *args):
        adamw_step(self, *args)
        calls.append(1)
        if len(calls) == 5:
            self.param_groups[0]["params"][0].data.fill_(float("nan"))
    monkeypatch.setattr(torch.optim.AdamW, "step", poisoned)
    for save_every, step in ((0.0, 5), (1e9, 20)):  # detected in the weights, in the loss
        monkeypatch.setattr(runs, "SAVE_EVERY", save_every)
        calls.clear()
        diverged = partial(run, checkpoint, texts, tmp_path / str(step), "--steps", "60")
        refusal(diverged, f"diverged at step {step}: ", " lower --lr")
        assert all(x.isfinite().all() for x in trained(tmp_path / str(step)).values())


@pytest.mark.parametrize("file, saved, advice", [
    ("heads.safetensors", -1, "start it again"), ("train_state.pt", -1, "start it again"),
    ("run.json", 1, "--resume"), ("heads.safetensors", 5, "--resume"), ("log.jsonl", 8, "--resume"),
    ("train_state.pt", 1, "--resume"), ("heads.json", 12, "--evaluate")])
def test_a_full_disk_ends_the_run(file, saved, advice, finished, checkpoint, texts, tmp_path, monkeypatch, unmeasured):
    """Catches a traceback, and files that do not fit one another, so that the next run fails or has other heads."""
    monkeypatch.setattr(runs, "SAVE_EVERY", 0.0)
    replace, path = os.replace, tmp_path / "train_state.pt"

    def full_replace(name, target):
        if file in str(name) and saved <= (torch.load(path)["step"] if path.exists() else -1):
            raise OSError(28, "No space left on device")
        replace(name, target)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full_replace)
        said = refusal(lambda: run(checkpoint, texts, tmp_path, "--steps", "12"))
        assert said.endswith(f" (No space left on device); make room and {advice}")
    assert not list(tmp_path.glob("*.tmp*")) and path.exists() == (saved >= 0)
    resume = ["--resume"] if path.exists() else []
    (tmp_path / "heads.json.tmp1").touch()  # of a killed run
    run(checkpoint, texts, tmp_path, "--steps", "12", *resume)
    assert same_heads(finished, tmp_path) and not list(tmp_path.glob("*.tmp*"))


def test_a_write_that_fails_midway_is_one_line_and_keeps_the_old_file(tmp_path):
    """Bug: torch's RuntimeError, which hides the system's error. A limit on files' sizes fails as a full disk does."""
    path, limits = tmp_path / "state.pt", resource.getrlimit(resource.RLIMIT_FSIZE)
    runs.save_file(path, dict(x=torch.zeros(10)))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        for save in (lambda: runs.save_file(path, dict(x=torch.zeros(10**5))),
                     lambda: save_lines(path, ["x" * 10**5])):
            refusal(runs.saving("it is lost", "make room")(save), "it is lost (File too large); make room")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(runs.load_file(path, ["x"])["x"]) == 10 and [*tmp_path.iterdir()] == [path]


def train_rank(flags, rank):
    """Runs train_heads.py in a process of `run_ranks`."""
    train_heads.SHOW_EVERY, evaluate.PROMPTS, evaluate.DECODED = 1, 2, 16
    with command():
        train(*flags)


def test_two_processes_train_as_one_does(forks, checkpoint, texts, tmp_path, monkeypatch, unmeasured):
    """Catches a batch that is not split, masks counted per process."""
    pair = lambda i: dict(prompt=f"{i} is", completion=f" a number, {i * i} its square" * (i % 5))
    chats = write_lines(tmp_path / "pairs.jsonl", map(pair, range(600)))  # few and unevenly spread tokens in the loss
    flags = ["--model", checkpoint, "--data", texts, chats, "--steps", "12", "--dtype", "float32"]
    two = partial(train_rank, [*flags, "--out", tmp_path / "two"])
    (code, said, errors), second = run_ranks(tmp_path, two, context=FORKS)
    assert (code, said.count("held-out accuracy"), second) == (0, 1, (0, "", "")), errors
    assert record(tmp_path / "two")["acceptance"]["greedy"]
    monkeypatch.setattr(train_heads, "SHOW_EVERY", 1)
    train(*flags, "--out", tmp_path / "one")
    one, two = ([json.loads(line)["loss"] for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
                for name in ("one", "two"))
    assert len(one) == 12 and one[-1] < one[0] and two == pytest.approx(one, rel=1e-5)
    for a, b in zip(trained(tmp_path / "one").values(), trained(tmp_path / "two").values()):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-3)


def test_the_model_writes_its_own_data_and_another_preset_reads_them(checkpoint, tmp_path, monkeypatch, unmeasured):
    """Catches texts generated twice, tokens of another folder, and less text by default than one pass reads."""
    monkeypatch.setattr(writing, "TEMPERATURES", (1.0,))
    monkeypatch.setattr(program, "MIN_SELF_TOKENS", 1000)
    write, goals = writing.Writer.write, []
    monkeypatch.setattr(writing.Writer, "write", lambda self, tokens, *part: (goals.append(tokens),
                                                                              write(self, tokens, *part))[1])
    flags = ["--model", checkpoint, "--steps", "6"]
    train(*flags, "--data", "self", "--out", tmp_path / "one")
    folder = tmp_path / "one" / "self"
    assert (folder / "tokens.pt").exists() and record(tmp_path / "one")["training"]["data"] == ["self"]
    with monkeypatch.context() as patch:
        patch.setattr(writing.Writer, "step", None)
        patch.setattr(data, "encode_splits", None)
        train(*flags, "--data", "self", "--steps", "7", "--out", tmp_path / "one", "--resume")
        train(*flags, "--data", folder, "--preset", "medusa", "--out", tmp_path / "two")
    assert record(tmp_path / "one")["training"]["key"] == record(tmp_path / "two")["training"]["key"]
    train(*flags, "--data", "self", "--self-tokens", "1800", "--quantize", "int8", "--out", tmp_path / "rounded")
    assert goals == [6 * 8 * 40, 1800]
    CloverHeads.from_pretrained(tmp_path / "rounded", GPT.from_pretrained(checkpoint, device="cpu"))


def test_heads_train_on_answers_to_prompts_of_ones_own(checkpoint, tmp_path, unmeasured, capsys):
    """Catches other text beside the answers, and a resumed run that forgets them."""
    flags = ["--model", checkpoint, "--steps", "2", "--out", tmp_path / "out"]
    file = write_lines(tmp_path / "prompts.jsonl", [dict(prompt=f"{i} plus {i * i}") for i in range(60)])
    train(*flags, "--prompts", file)
    texts = [json.loads(line) for part in (tmp_path / "out/self").glob("0*.jsonl") for line in open(part)]
    assert {text["prompt"] for text in texts} <= {f"{i} plus {i * i}" for i in range(60)} and len(texts) > 100
    assert "all prompts are answered" in capsys.readouterr().out
    assert record(tmp_path / "out")["training"]["data"] == ["self"]
    train(*flags[:2], "--resume", "--steps", "3", "--prompts", file, "--out", tmp_path / "out")
    other = write_lines(tmp_path / "other.jsonl", [dict(messages=[dict(role="user", content="hi")])])
    flags[-1] = tmp_path / "new"
    refusal(lambda: train(*flags, "--prompts", other), "line 1", "need a model with a chat template")


@pytest.mark.parametrize("name", ["Qwen3", "DeepSeek-R1-Distill", slow("DeepSeek-LLM")])
def test_chat_models_of_today_train_from_nothing(name, tmp_path, monkeypatch, unmeasured):
    """Bug: no answer of a model that reasons is kept, a chat is refused since its template does not render a prompt
    again, answers are encoded to other ids than were generated, thinking cannot be switched off."""
    monkeypatch.setattr(writing, "LONGEST", dict(user=8, assistant=12))
    base = tmp_path / "base"
    toy_model(vocab_size=267, block_size=512).save_pretrained(base)
    encoding = save_family(base, name)
    ends = [encoding.special_tokens[encoding.template.variables["eos_token"]], *range(200, 256)]
    edit_json(base / "config.json", eos_token_id=ends)
    train("--model", base, "--steps", "3", "--out", tmp_path / "self", "--self-tokens", 9000, "--template-kwargs",
          '{"enable_thinking": false}')
    encoding.template.variables |= {"enable_thinking": False}
    stored = data.open_tokens(tmp_path / "self/self/tokens.pt")
    assert stored["key"] == data.tokens_key([tmp_path / "self/self"], encoding)
    lines = [line for file in (tmp_path / "self/self").glob("0*.jsonl") for line in file.read_text().splitlines()]
    chats = [json.loads(line) for line in lines]
    assert all(chat["ids"][-2] == encoding.chat(chat["messages"][:-1]) for chat in chats)
    answers = [ids for chat in chats for ids in chat["ids"][1::2]]
    assert sum(stored[split].loss_mask.sum() for split in data.SPLITS) == sum(map(len, answers))
    assert {answer[-1] in ends for answer in answers} == {True, False}
    train("--resume", "--out", tmp_path / "self", "--steps", "4")


def test_heads_are_measured_on_the_data_of_their_training(checkpoint, texts, tmp_path, monkeypatch, unmeasured):
    """Catches measurements on other data than heads.json says; data refused or read again since its path is another."""
    trained_on = run(checkpoint, texts, tmp_path, "--steps", "1")["training"]
    want = {name: trained_on[name] for name in ("data", "key")}
    more = tmp_path / "more.txt"

    def evaluated(*flags):
        train("--model", checkpoint, "--out", tmp_path, "--evaluate", *flags)
        return record(tmp_path)["measured_on"]
    assert record(tmp_path)["measured_on"] == want == evaluated() and want["data"] == ["texts.jsonl"]
    more.write_text("".join(f"{i} more words " for i in range(5000)))
    measured_on = evaluated("--data", more)
    assert measured_on["data"] == ["more.txt"] and measured_on["key"] != want["key"]
    assert record(tmp_path)["training"] == trained_on
    copied = shutil.copy(texts, tmp_path / "copy.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(data, "encode_splits", None)
        assert run(checkpoint, copied, tmp_path, "--steps", "2", "--resume")["measured_on"]["key"] == want["key"]
        assert evaluated("--data", copied)["key"] == want["key"]
    (tmp_path / "tokens.pt").unlink()
    refusal(evaluated, "copy.jsonl", " are gone; give --data")
    assert evaluated("--data", texts) == want


def test_an_ablation_and_its_draft_vocabulary_are_kept(checkpoint, texts, tmp_path, monkeypatch, capsys, unmeasured):
    """Catches flags that fall back to defaults, a record or weights that do not match them, an --init that is lost."""
    monkeypatch.setattr(data, "VOCABULARY_STEP", 16)  # the text needs fewer than 32 of 258 ids
    switches = "--draft-heads 3 --mix concat --augment-layers 2 --no-shared --mix-before --projector res"
    want = dict(preset="clover2", n_draft=3, augment_layers=2, mix="concat", mix_before=True, projector="res",
                shared=False, vocabulary=32)
    first, second = tmp_path / "first", tmp_path / "second"
    load = lambda out: CloverHeads.from_pretrained(out, GPT.from_pretrained(checkpoint, device="cpu", packed=False))
    given = ["--steps", "1", "--preset", "clover2", *switches.split()]
    for flags in (given, ["--steps", "2", "--resume"], ["--evaluate"]):
        before = run(checkpoint, texts, first, *flags)
        assert before["config"] == want and len(before["accuracy"]) == 3 and len(load(first).vocabulary) == 32
    assert capsys.readouterr().out.count("draft vocabulary: 32 of 258 token ids") == 1
    refusal(lambda: train("--resume", "--out", first, "--draft-vocabulary", "12"), "draft-vocabulary None, not 12")
    others = write_lines(tmp_path / "others.jsonl", (dict(text=f"{i}th OTHER Text; " * 30) for i in range(100)))
    after = run(checkpoint, others, second, "--steps", "2", "--init", first, "--lr", "1e-9")
    assert after["config"] == want and after["training"]["init"] == "first"
    torch.testing.assert_close(trained(second), dict(load(first).state_dict()), atol=1e-7, rtol=0)
    shutil.rmtree(first)
    train("--out", second, "--resume", "--steps", "3", "--lr", "1e-9")
    assert record(second)["training"]["steps"] == 3
    pytest.raises(SystemExit, train, "--resume", "--init", second)


@pytest.mark.parametrize("fast, flag, want", [(True, None, torch.bfloat16), (False, None, torch.float32),
                                              (False, "bfloat16", torch.bfloat16), (True, "float32", torch.float32)])
def test_products_are_in_the_faster_dtype(fast, flag, want, tmp_path, monkeypatch):
    """Catches training at a fraction of its speed on CPUs that have no instructions for bfloat16."""
    monkeypatch.setattr(cpu, "torch_multiplies_bfloat16", lambda: fast)
    heads, seen = random_heads(toy_model()), set()
    config = RunConfig(dtype=flag, device="cpu")
    run = runs.Run(config, tmp_path, heads.requires_grad_(), "", "", Group())
    with Operations(lambda name, args, _: seen.update(x.dtype for x in args if name == "addmm")):
        run.trainer.train_step(torch.tensor(random_prompts([25, 25])), torch.ones(2, 25, dtype=torch.bool), None)
    assert seen == {want}


@pytest.mark.parametrize("flags, says", [
    ("--preset eagle", "'eagle'"), ("--mix in", "'in'"), ("--draft-heads 33", "draft heads"), ("--lr 0", "lr"),
    ("--block-size 4000", "block size"), ("--draft-vocabulary 7", "draft vocabulary"), ("--evaluate", "/out: "),
    ("--data {}/short.txt", "short.txt"), ("--out {}/short.txt", "tokens.pt"), ("--resume", "--resume"),
    ("--init nowhere", "nowhere"), ("--init nowhere --preset medusa", "--preset")])
def test_bad_input_is_refused_in_one_line_and_leaves_nothing(checkpoint, texts, tmp_path, flags, says):
    """Bug: a traceback, or an output folder that the next run refuses."""
    (tmp_path / "short.txt").write_text("short")
    flags = flags.format(tmp_path).split()
    refusal(lambda: train("--model", checkpoint, "--data", texts, "--out", tmp_path / "out", *flags), says)
    assert not (tmp_path / "out").exists()
