"""train_heads.py: heads learn what the model would say, runs resume, the folder works in generate.py."""

import contextlib
import importlib.util
import json
import multiprocessing.forkserver
import os
import random
import re
import shutil
import signal
import socket
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import train_heads
from backends import tensor_parallel
from clover import PRESETS, CloverHeads
from conftest import SHAPES, random_prompts, toy_model
from generate import generate
from hf.tokenizer import load_encoding
from model import GPT, InputError
from test_clover import random_heads
from tools.cli import generate_main
from training import common, data, evaluate, parallel, self_distill
from training.common import Log
from training.data import load_tokens, open_tokens

TINY = "--device cpu --batch-size 8 --block-size 40 --lr 0.005".split()
FORKS = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    lines = (dict(text=f"line {i} of a text, {i * i} " * 20) for i in range(200))
    return write_lines(tmp_path_factory.mktemp("texts") / "texts.jsonl", lines)


@pytest.fixture(scope="module")
def forks():
    """Starts the process that FORKS forks, which loads torch once for all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        FORKS.set_forkserver_preload(["test_train_heads"])
        multiprocessing.forkserver.ensure_running()


@pytest.fixture(autouse=True)
def few_prompts(monkeypatch):
    monkeypatch.setattr(evaluate, "PROMPTS", 4)  # a run ends with decoding these
    monkeypatch.setattr(evaluate, "DECODED", 24)
    monkeypatch.setattr(train_heads, "plot", lambda folder: None)  # takes longer than a short run


def write_lines(file, values):
    file.write_text("".join(json.dumps(value) + "\n" for value in values))
    return file


def measured(heads, *_):
    K = heads.config.n_draft
    return dict(accuracy=[0.5] * K, top_accuracy={n: [0.5] * K for n in (1, 2, 4, 8)},
                acceptance={"0": [[0.5] * 63] * K})


@pytest.fixture
def unmeasured(monkeypatch):
    """Leaves out the measurements that end a run, which take most of the time of a short one."""
    monkeypatch.setattr(train_heads, "measure", measured)


def run(checkpoint, texts, out, *flags):
    train_heads.main([*TINY, "--model", str(checkpoint), "--data", str(texts), "--out", str(out), *flags])
    return json.loads((out / "heads.json").read_text())


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_learns(checkpoint, texts, tmp_path, capsys, name):
    """Catches heads that are trained towards the wrong token: accuracy must rise far above that of the untrained
    start."""
    model = GPT.from_pretrained(checkpoint, device="cpu")
    heldout = load_tokens([texts], load_encoding(checkpoint), "heldout")
    start = evaluate.head_accuracy(CloverHeads(PRESETS[name], model), heldout, 8, 40)[1]
    record = run(checkpoint, texts, tmp_path / "heads", "--preset", name, "--steps", "60")
    assert all(b > a + 0.1 for a, b in zip(start, record["accuracy"])), (start, record["accuracy"])
    top, (low, high) = record["top_accuracy"], record["tokens_per_step_interval"]
    assert top["1"] == record["accuracy"] and all(a <= b for n, m in ("12", "24", "48") for a, b in zip(top[n], top[m]))
    assert 1 <= low <= record["tokens_per_step"] <= high <= 5
    assert record["config"]["preset"] == name and record["training"]["steps"] == 60 and record["tokens_per_step"] >= 1
    said = capsys.readouterr().out
    assert "held-out accuracy" in said and f"--heads {tmp_path / 'heads'}" in said
    assert re.findall(r"^measuring (\d) of 4: ", said, re.M) == list("1234")
    heads = CloverHeads.from_pretrained(tmp_path / "heads", model)
    prompts = random_prompts([9, 20])
    assert generate(model, prompts, 20, heads, tree_size=9).tokens == generate(model, prompts, 20).tokens


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("flags", ["", "--smooth-l1 0.5 --on-policy-steps 20", "--dtype float32"])
def test_a_run_on_a_gpu_learns_and_its_steps_do_not_wait(flags, checkpoint, texts, tmp_path, monkeypatch):
    """Catches tensors on two devices, a value read back in a step, and what only CUDA's autocast does."""
    def unwaiting(call):
        def wrapped(self, *args):
            torch.cuda.set_sync_debug_mode("error" if self.step else "default")  # in the first step, kernels are loaded
            try:
                return call(self, *args)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return wrapped
    for name in ("batch", "train_step"):
        monkeypatch.setattr(train_heads.Run, name, unwaiting(getattr(train_heads.Run, name)))
    model = GPT.from_pretrained(checkpoint, device="cpu")
    heldout = load_tokens([texts], load_encoding(checkpoint), "heldout")
    start = evaluate.head_accuracy(CloverHeads(PRESETS["clover"], model), heldout, 8, 40)[1]
    flags = ["--device", "cuda", "--steps", "60", "--self-distill", "8", *flags.split()]
    record = run(checkpoint, texts, tmp_path, *flags)
    assert all(b > a + 0.1 for a, b in zip(start, record["accuracy"])), (start, record["accuracy"])
    assert record["tokens_per_step"] >= 1 and set(record["acceptance"]) == {"0", "1"}


@pytest.mark.parametrize("family, shape", [
    ("gpt2", SHAPES["gpt2"]), ("qwen3", dict(qk_norm="head")),
    ("llama", dict(rope_scaling=dict(rope_type="linear", factor=2.0))),
    ("baichuan", dict(n_kv_head=4, positions="alibi", unit_head=True)),
    ("gemma3_text", dict(qk_norm="head", norm_at="both", windows=(0, 9), window_theta=500.0, activation="gelu",
                         embed_scale=8.0, attn_scale=0.25)),
    pytest.param("olmo3", dict(qk_norm="all", norm_at="after", windows=(9, 0)), marks=pytest.mark.slow),
    pytest.param("glm4", dict(norm_at="both", rotary_size=8, qkv_bias=True), marks=pytest.mark.slow),
    pytest.param("smollm3", dict(unrotated=(1,)), marks=pytest.mark.slow),
    pytest.param("mistral", {}, marks=pytest.mark.slow), pytest.param("phi3", {}, marks=pytest.mark.slow),
    pytest.param("qwen2", dict(qkv_bias=True), marks=pytest.mark.slow)])
def test_heads_of_every_family_are_trained_and_used(family, shape, checkpoint, texts, tmp_path, capsys, unmeasured):
    """Catches a family that loads and cannot be trained on or decoded with, from the command line on."""
    model = toy_model(family=family, vocab_size=258, block_size=128, tied=family == "gpt2", **shape)
    model.save_pretrained(tmp_path)
    shutil.copy(checkpoint / "tokenizer.json", tmp_path)
    run(tmp_path, texts, tmp_path / "out", "--steps", "3")
    capsys.readouterr()
    for flags in ([], ["--temperature", "0.9", "--seed", "3"]):
        generate_main([*"--device cpu --tree-size 9 --max-new-tokens 30 --compare".split(), "--prompt", "line 7",
                       "--model", str(tmp_path), "--heads", str(tmp_path / "out"), *flags])
        assert "the text is identical, all" in capsys.readouterr().err


def trained(out):
    return torch.load(out / "train_state.pt", weights_only=True)["heads"]


@pytest.fixture(scope="module")
def finished(checkpoint, texts, tmp_path_factory):
    """The folder of a run of 12 steps."""
    out = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_heads, "measure", measured)
        torch.manual_seed(0)
        run(checkpoint, texts, out, "--steps", "12")
    return out


def same_heads(one, other):
    return all(torch.equal(a, b) for a, b in zip(trained(one).values(), trained(other).values(), strict=True))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_goes_on_to_the_same_heads(number, finished, checkpoint, texts, tmp_path, monkeypatch, capsys,
                                                 unmeasured):
    """Catches a resume that forgets the optimiser, the schedule or the place in the data; and a signal that loses
    work."""
    monkeypatch.setattr(train_heads, "SHOW_EVERY", 2)
    optimizer_step, out, handler = torch.optim.AdamW.step, tmp_path / "parts", signal.getsignal(number)

    def stopped(self, *args):  # in the middle of a step
        if 0.9 > self.param_groups[0]["lr"] / 0.005 > 0.8:
            os.kill(os.getpid(), number)
            if number == signal.SIGTERM:  # to the process, and through the one that started it
                os.kill(os.getpid(), number)
        return optimizer_step(self, *args)
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", stopped)
        run(checkpoint, texts, out, "--steps", "12")
    assert "interrupted at step" in capsys.readouterr().out
    step = json.loads((out / "heads.json").read_text())["training"]["steps"]
    assert 0 < step < 12 and signal.getsignal(number) == handler
    with open(out / "log.jsonl", "a") as log:
        log.write(json.dumps(dict(step=step + 1)) + '\n{"step": 9, "lo')  # past what was saved, and cut
    run(checkpoint, texts, out, "--steps", "12", "--resume")
    assert same_heads(finished, out)
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6, 8, 10, 12]
    assert set(lines[0]) == {"step", "tokens", "loss", "accuracy", "lr"}


def test_a_run_refuses_other_flags_data_and_models_and_states_of_another_format(finished, checkpoint, texts, tmp_path):
    """Catches a run that goes on as another one, and a refusal that has written something already."""
    before = {file: file.read_bytes() for file in finished.rglob("*") if file.is_file()}
    (tmp_path / "more.txt").write_text("more " * 2000)
    other = shutil.copytree(checkpoint, tmp_path / "other")
    toy_model(seed=1, vocab_size=258, block_size=128).save_pretrained(other)
    for folder, flags, says in (
            (checkpoint, ["--preset", "medusa"], "holds a run with preset clover, not medusa: --resume goes on with"),
            (checkpoint, ["--seed", "2", "--draft-heads", "3", "--lr", "0.1"],
             "holds a run with draft-heads 4, not 3; lr 0.005, not 0.1; seed 1, not 2: .*; leave out what differs"),
            (checkpoint, ["--steps", "10"], "at step 12 already; --steps 10 is less"),
            (checkpoint, ["--data", str(tmp_path / "more.txt")],
             "holds a run with data of hash .*, not of hash .*; leave out"),
            (other, [], "holds a run with model of hash .*, not of hash")):
        with pytest.raises(InputError, match=says):
            run(folder, texts, finished, "--steps", "12", "--resume", *flags)
    with pytest.raises(InputError, match="holds a run already; --resume goes on with it"):
        run(checkpoint, texts, finished, "--steps", "12")
    assert before == {file: file.read_bytes() for file in finished.rglob("*") if file.is_file()}
    old = dict(settings={}, step=3, heads={}, optimizer={})  # as older versions wrote it
    for state in (dict(model={}, optimizer=[], step=3), old, [1, 2]):
        torch.save(state, tmp_path / "train_state.pt")
        with pytest.raises(InputError, match="not a training state of this command and version") as caught:
            run(checkpoint, texts, tmp_path, "--steps", "12", "--resume")
        assert "\n" not in str(caught.value)
    (tmp_path / "train_state.pt").write_bytes(b"half")
    with pytest.raises(InputError, match="not a training state"):
        run(checkpoint, texts, tmp_path, "--steps", "12", "--resume")


def run_killed(left, flags):
    """Runs train_heads.py in a process of its own that SIGKILL ends at the `left`th of the calls below."""
    def mortal(call):
        def wrapped(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)
        return wrapped
    for where, name in ((os, "replace"), (os, "chmod"), (torch, "save"), (train_heads, "teacher_forced"),
                        (torch.optim.AdamW, "step")):
        setattr(where, name, mortal(getattr(where, name)))
    train_heads.SAVE_EVERY = 0.0  # after each step
    train_heads.main(flags)


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_to_the_same_heads(kills, forks, checkpoint, texts, tmp_path, unmeasured):
    """Catches files that are half written or do not belong together, whenever SIGKILL comes."""
    flags = [*TINY, "--model", str(checkpoint), "--data", str(texts), "--steps", str(6 * kills)]
    train_heads.main([*flags, "--out", str(tmp_path / "whole")])
    flags += ["--out", str(tmp_path / "parts")]
    rng, resume = random.Random(kills), []
    for _ in range(kills):
        process = FORKS.Process(target=run_killed, args=(rng.randint(10, 60), [*flags, *resume]))
        process.start()
        process.join(200)
        assert process.exitcode == -signal.SIGKILL
        resume = ["--resume"]
    train_heads.main([*flags, *resume])
    assert not list((tmp_path / "parts").glob("*.tmp*"))  # a killed run leaves what it was writing
    assert same_heads(tmp_path / "whole", tmp_path / "parts")


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_last_good_heads(checkpoint, texts, tmp_path, monkeypatch,
                                                                             unmeasured):
    """Catches NaN weights written over good ones."""
    step, calls = torch.optim.AdamW.step, []

    def poisoned(self, *args):
        step(self, *args)
        calls.append(1)
        if len(calls) == 5:
            self.param_groups[0]["params"][0].data.fill_(float("nan"))
    monkeypatch.setattr(torch.optim.AdamW, "step", poisoned)
    monkeypatch.setattr(train_heads, "SAVE_EVERY", 0.0)
    with pytest.raises(InputError, match="diverged at step 5: .* lower --lr"):
        run(checkpoint, texts, tmp_path / "heads", "--steps", "60")
    assert all(x.isfinite().all() for x in trained(tmp_path / "heads").values())
    monkeypatch.setattr(train_heads, "SAVE_EVERY", 1e9)
    calls.clear()
    with pytest.raises(InputError, match="diverged at step 20: "):  # seen by the loss
        run(checkpoint, texts, tmp_path / "others", "--steps", "60")


def test_a_full_disk_ends_the_run_and_keeps_the_last_good_heads(checkpoint, texts, tmp_path, monkeypatch, unmeasured):
    """Catches a traceback, a reason of torch's that says nothing, and a state that is half of a new one."""
    monkeypatch.setattr(train_heads, "SAVE_EVERY", 0.0)
    train_step = train_heads.Run.train_step
    with monkeypatch.context() as patch:
        def full_at_two(self, *args):
            if self.step == 1:
                patch.setattr(common, "open", lambda path, mode: open("/dev/full", mode), raising=False)
            return train_step(self, *args)
        patch.setattr(train_heads.Run, "train_step", full_at_two)
        with pytest.raises(InputError, match=r"step 2 cannot be saved \(No space left on device\); what was saved last "
                                             "is intact: make room and --resume$"):
            run(checkpoint, texts, tmp_path / "heads", "--steps", "12")
    assert not list((tmp_path / "heads").glob("*.tmp*"))
    log = Log(tmp_path / "log.jsonl", 0)
    log.path = tmp_path  # which nothing can be written to
    with pytest.raises(InputError, match="cannot be written .*make room and --resume"):
        log.add(step=1)
    assert run(checkpoint, texts, tmp_path / "heads", "--steps", "12", "--resume")["training"]["steps"] == 12


@pytest.mark.parametrize("file", ["train_state.pt", "heads.safetensors", "heads.json"])
def test_a_run_that_a_full_disk_did_not_let_begin_starts_anew(file, checkpoint, texts, tmp_path, monkeypatch,
                                                              unmeasured):
    """Catches a promise of a saved run where none is, and a command that is refused for what it left."""
    chmod = os.chmod

    def full(path, *mode):
        if file in path:
            raise OSError(28, "No space left on device")
        chmod(path, *mode)
    with monkeypatch.context() as patch:
        patch.setattr(os, "chmod", full)
        with pytest.raises(InputError, match=r"step 0 cannot be saved \(No space left on device\); nothing is kept: "
                                             "make room and start it again$"):
            run(checkpoint, texts, tmp_path / "heads", "--steps", "2")
    assert run(checkpoint, texts, tmp_path / "heads", "--steps", "2")["training"]["steps"] == 2


def test_what_cannot_be_recorded_is_said_in_one_line(finished, checkpoint, texts, monkeypatch, capsys, unmeasured):
    """Catches a traceback after minutes of measuring, and figures that are not shown."""
    def full(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "chmod", full)
    with pytest.raises(InputError, match=r"cannot be written \(No space left on device\); make room and --evaluate$"):
        run(checkpoint, texts, finished, "--evaluate")
    assert "held-out accuracy" in capsys.readouterr().out


def torchrun_sets(setenv, rank, size, local_rank, port=1):
    for name, value in dict(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=local_rank, LOCAL_WORLD_SIZE=2, MASTER_PORT=port,
                            MASTER_ADDR="localhost", TORCHELASTIC_RUN_ID="test").items():
        setenv(name, str(value))


def run_rank(rank, port, folder, flags):
    """Runs train_heads.py as one of two processes; what it prints goes to a file."""
    torchrun_sets(os.environ.__setitem__, rank, 2, rank, port)
    train_heads.SHOW_EVERY, evaluate.PROMPTS, evaluate.DECODED = 1, 2, 16
    finish, train_heads.plot = train_heads.finish, lambda folder: None

    def checked(run, heldout):
        for p in run.heads.model.blocks.parameters():
            assert hasattr(p, "to_local") == run.args.shard_base  # after passes too
        finish(run, heldout)
    train_heads.finish = checked
    with open(folder / f"{rank}.txt", "w") as file, contextlib.redirect_stdout(file):
        try:
            train_heads.main(flags)
        except InputError as error:
            print(f"process {rank} ends: {error}")


def run_two(folder, *flags):
    """Runs train_heads.py in two new processes -> what they print. A second run in the same processes would hang at
    times, in gloo."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    two = [FORKS.Process(target=run_rank, args=(rank, port, folder, flags)) for rank in range(2)]
    for process in two:
        process.start()
    for process in two:
        process.join(200)
    assert [process.exitcode for process in two] == [0, 0]
    return [(folder / f"{rank}.txt").read_text() for rank in range(2)]


def losses_of(out):
    return [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()]


def test_processes_do_not_meet_while_they_take_turns(checkpoint, monkeypatch):
    """Bug: the mesh of --shard-base, for which all processes meet, is made while each waits for its turn to load: where
    there is a GPU, --device cpu hangs."""
    done = []

    @contextlib.contextmanager
    def turns():
        done.append("turn")
        yield
    world = SimpleNamespace(size=2, device=torch.device("cpu"), any=bool, one_by_one=turns)
    monkeypatch.setattr(parallel, "init_device_mesh", lambda *_: done.append("mesh"))
    monkeypatch.setattr(parallel, "shard", lambda model, mesh: done.append("shard"))
    args = train_heads.parse(["--model", str(checkpoint), "--device", "cpu", "--shard-base"])
    parallel.load_for_training(args, world)
    assert done == ["mesh", "turn", "shard"]


def test_two_processes_train_as_one_does_and_may_divide_the_model(forks, checkpoint, texts, tmp_path, monkeypatch,
                                                                  unmeasured):
    """Catches a batch that is not split, gradients that are not averaged, masks counted per process, and a sharded
    model that says something else."""
    pair = lambda i: dict(prompt=f"{i} is", completion=f" a number, {i * i} its square" * (i % 5))
    chats = write_lines(tmp_path / "pairs.jsonl", map(pair, range(600)))  # few tokens in the loss, unevenly spread
    flags = [*TINY, "--model", str(checkpoint), "--data", str(texts), str(chats), "--steps", "12", "--dtype", "float32",
             "--smooth-l1", "0.5", "--on-policy-steps", "4"]
    for name, more in (("two", []), ("sharded", ["--shard-base"])):
        said, nothing = run_two(tmp_path, *flags, "--out", str(tmp_path / name), *more)
        assert said.count("held-out accuracy") == said.count("tokens per step") == 1 and not nothing
        assert said.count("draft vocabulary: all 258") == 1
    monkeypatch.setattr(train_heads, "SHOW_EVERY", 1)
    train_heads.main([*flags, "--out", str(tmp_path / "one")])
    one, two, sharded = (losses_of(tmp_path / name) for name in ("one", "two", "sharded"))
    assert len(one) == 12 and one[-1] < one[0]
    assert two == pytest.approx(one, rel=1e-5) and sharded == pytest.approx(two, rel=1e-5)
    for name in ("one", "sharded"):
        for a, b in zip(trained(tmp_path / "two").values(), trained(tmp_path / name).values()):
            torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-3)
    record = lambda: json.loads((tmp_path / "sharded" / "heads.json").read_text())
    together = record()["acceptance"]  # by two processes that hold the model together
    monkeypatch.setattr(train_heads, "measure", evaluate.measure)
    monkeypatch.setattr(evaluate, "PROMPTS", 2)
    monkeypatch.setattr(evaluate, "DECODED", 16)
    train_heads.main([*flags, "--out", str(tmp_path / "sharded"), "--evaluate"])
    alone = record()["acceptance"]
    assert sum(map(sum, alone["0"])) > 0 and alone.keys() == together.keys()
    for temperature in alone:
        for a, b in zip(together[temperature], alone[temperature]):
            assert a == pytest.approx(b, abs=0.01)


def test_where_the_first_process_cannot_go_on_all_end_in_one_line(forks, checkpoint, tmp_path):
    """Catches processes that wait for ever for one that has ended."""
    first, second = run_two(tmp_path, *TINY, "--model", str(checkpoint), "--data", str(tmp_path / "nowhere"),
                            "--out", str(tmp_path / "out"))
    assert first.startswith("process 0 ends: ") and "nowhere: expected a file" in first and first.count("\n") == 1
    assert second.startswith("process 1 ends: the first process cannot go on") and second.count("\n") == 1


def test_a_batch_that_does_not_divide_is_refused(monkeypatch):
    torchrun_sets(monkeypatch.setenv, rank=0, size=2, local_rank=0)
    with pytest.raises(InputError, match="must divide by their number, but 7 does not by 2; take"):
        parallel.World(train_heads.parse(["--batch-size", "7"]))


NCCL = "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize("device, want", [("cuda", (NCCL, torch.device("cuda:1"))), ("cpu", ("gloo", None))])
def test_processes_tell_nccl_which_gpu_is_theirs(device, want, monkeypatch):
    """Catches a barrier that has to guess its GPU, and a device given to gloo, which takes none."""
    started, current = [], []
    start = lambda backend, timeout, device_id=None: started.append((backend, device_id))
    monkeypatch.setattr(parallel.dist, "init_process_group", start)
    for module in (parallel, tensor_parallel):
        monkeypatch.setattr(module, "pick_device", torch.device)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    torchrun_sets(monkeypatch.setenv, rank=3, size=4, local_rank=1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    parallel.World(train_heads.parse(["--device", device]))
    assert started == [want] and current == [want[1]] * (device == "cuda")


def test_heads_learn_from_what_the_model_writes_itself(checkpoint, texts, tmp_path, monkeypatch, capsys, unmeasured):
    """Catches own text that is not the model's, or not trained on, and a resumed run that sees another."""
    flags = ["--steps", "16", "--self-distill", "8", "--self-distill-ratio", "0.75", "--dtype", "float32"]
    model, seen = GPT.from_pretrained(checkpoint, device="cpu"), []
    batch = train_heads.Run.batch

    def spied(self, parts):
        (_, rest), (own, n) = parts
        assert (rest, n) == (2, 6)
        seen.append((self.step, len(own.ids)))
        return batch(self, parts)
    monkeypatch.setattr(train_heads.Run, "batch", spied)
    run(checkpoint, texts, tmp_path / "whole", *flags)
    assert "the model wrote" in capsys.readouterr().out
    sizes = [size for step, size in seen]
    assert [step for step, _ in seen] == list(range(16)) and len(set(sizes)) == 4 and sizes == sorted(sizes)
    assert all(sizes[i] > sizes[i - 1] for i in (4, 8, 12))
    own = open_tokens(tmp_path / "whole" / "self_distill" / "0")[0]["train"]  # greedy
    starts = [*own.starts.tolist(), len(own.ids)]
    assert len(starts) == 3  # two of the eight prompts
    assert own.loss_mask.all()  # in texts, unlike chats, a prompt is in the loss too
    for a, b in zip(starts, starts[1:]):
        document = own.ids[a:b].tolist()
        want = generate(model, [document[:10]], len(document) - 10, None).tokens[0]  # a block of 40: prompts of 10
        assert document[10:] == want
    monkeypatch.setattr(train_heads, "SAVE_EVERY", 0.0)

    def killed(self, *args):
        if self.step == 9:
            raise KeyboardInterrupt
        return batch(self, *args)
    monkeypatch.setattr(train_heads.Run, "batch", killed)
    with pytest.raises(KeyboardInterrupt):
        run(checkpoint, texts, tmp_path / "parts", *flags)
    monkeypatch.setattr(train_heads.Run, "batch", batch)
    run(checkpoint, texts, tmp_path / "parts", *flags, "--resume")
    assert same_heads(tmp_path / "whole", tmp_path / "parts")


TEMPLATE = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}")


def test_chats_are_trained_on_the_assistants_words(checkpoint, tmp_path, monkeypatch, capsys, unmeasured):
    """Catches heads that learn what users say, and self-distillation that is off by default where it is wanted."""
    turn = lambda role, content: dict(role=role, content=content)
    says = lambda i: [turn("user", f"{i}?"), turn("assistant", f"it is {i}, and {i * i}, " * 3)]
    chats = write_lines(tmp_path / "chats.jsonl", (dict(messages=says(i)) for i in range(300)))
    folder = tmp_path / "model"
    with pytest.raises(InputError, match="chats.jsonl.*chat template"):
        run(checkpoint, chats, tmp_path / "out", "--steps", "2")
    shutil.copytree(checkpoint, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    masks, guess_masks = [], train_heads.guess_masks

    def spied(ids, K, loss_mask, documents):
        found = guess_masks(ids, K, loss_mask, documents)
        masks.append((ids, found[0]))
        return found
    monkeypatch.setattr(train_heads, "guess_masks", spied)
    monkeypatch.setattr(self_distill, "SELF_PROMPTS", 8)
    run(folder, chats, tmp_path / "out", "--steps", "3", "--self-distill-ratio", "0")
    said = capsys.readouterr().out
    assert said.count("the model wrote") == 4 and "--chat --prompt" in said
    before, _ = said.split("the model wrote", 1)
    assert re.search(r"self-distillation: the model continues 8 prompts by up to 45 tokens each, in 4 rounds .*; about "
                     r"\d+ s in all, .*; --self-distill 0 switches it off\n$", before) and said.count("0 switches") == 1
    encoding = load_encoding(checkpoint)
    for ids, head in masks:
        for row, mask in zip(ids, head):
            text = encoding.decode(row.tolist())
            assert text.isascii() and len(text) == len(row)
            for t in mask.nonzero().flatten().tolist():  # head 1 guesses t + 2, which must be in an assistant's turn
                said = text[:t + 3].rpartition("<")[2]
                assert text[:t + 3].count("<") == 0 or said.startswith("assistant>") or "assistant>".startswith(said)
    assert 0.2 < torch.stack([mask.float().mean() for _, mask in masks]).mean() < 0.95


def test_switches_make_an_ablation_and_are_part_of_the_run(checkpoint, texts, tmp_path, unmeasured):
    flags = "--steps 2 --draft-heads 3 --mix concat --augment-layers 2 --shared --mix-before --projector linear".split()
    record = run(checkpoint, texts, tmp_path / "a", *flags)
    assert len(record["accuracy"]) == 3 and record["config"] == dict(
        preset="clover", n_draft=3, augment_layers=2, mix="concat", mix_before=True, projector="linear", shared=True,
        vocabulary=0)
    assert run(checkpoint, texts, tmp_path / "b", "--steps", "2", "--preset", "clover2",
               "--no-shared")["config"]["shared"] is False
    with pytest.raises(InputError, match="holds a run with augment-layers 2, not 1; mix concat, not none: "):
        run(checkpoint, texts, tmp_path / "a", "--steps", "4", "--resume", "--augment-layers", "1", "--mix", "none")
    again = run(checkpoint, texts, tmp_path / "a", "--steps", "4", "--resume")
    assert again["config"] == record["config"] and again["training"]["steps"] == 4


def test_resume_alone_takes_the_flags_of_the_run(checkpoint, texts, tmp_path, monkeypatch, unmeasured):
    """Catches a run that goes on with defaults, or needs its flags, model and data spelled again."""
    out = tmp_path / "heads"
    monkeypatch.chdir(texts.parent)  # paths given relative to where the run began
    flags = ["--model", str(checkpoint), "--data", texts.name, "--steps", "3", "--preset", "hydra", "--lr", "0.01"]
    train_heads.main([*TINY, *flags, "--out", str(out)])
    before = json.loads((out / "heads.json").read_text())
    monkeypatch.chdir(tmp_path)
    train_heads.main(["--out", "heads", "--resume", "--steps", "5"])
    after = json.loads((out / "heads.json").read_text())
    assert after["training"] == before["training"] | dict(steps=5, tokens=5 * 8 * 40)
    assert after["config"] == before["config"]


def test_heads_are_measured_on_the_data_of_their_training(checkpoint, texts, tmp_path, monkeypatch, capsys, unmeasured):
    """Catches figures of other data in a record that names these."""
    out, seen = tmp_path / "heads", []
    trained_on = run(checkpoint, texts, out, "--steps", "1")
    want = {name: trained_on["training"][name] for name in ("data", "key")}
    assert trained_on["measured_on"] == want and want["data"] == ["texts.jsonl"]
    monkeypatch.setattr(train_heads, "measure", lambda heads, heldout, *_: seen.append(heldout) or measured(heads))
    flags = [*TINY, "--model", str(checkpoint), "--out", str(out), "--evaluate"]
    evaluate = lambda *more: train_heads.main([*flags, *more])
    record = lambda: json.loads((out / "heads.json").read_text())
    capsys.readouterr()
    evaluate()
    assert "measuring on" not in capsys.readouterr().out and record()["measured_on"] == want
    assert seen.pop().ids.tolist() == open_tokens(out / "tokens")[0]["heldout"].ids.tolist()
    more = tmp_path / "more.txt"
    more.write_text("".join(f"{i} more words " for i in range(5000)))
    evaluate("--data", str(more))
    assert f"measuring on {more}, which is not or no longer what" in capsys.readouterr().out
    assert record()["measured_on"]["data"] == ["more.txt"] and record()["measured_on"]["key"] != want["key"]
    assert record()["training"] == trained_on["training"]
    shutil.rmtree(out / "tokens")
    before = (out / "heads.json").read_bytes()
    with pytest.raises(InputError, match="trained on texts.jsonl, of which .*tokens has no tokens any more; give them"):
        evaluate()
    assert (out / "heads.json").read_bytes() == before
    evaluate("--data", str(texts))
    assert record()["measured_on"] == want
    library = record() | dict(training=dict(data=train_heads.STANDARD_LIBRARY, key="of another machine"))
    (out / "heads.json").write_text(json.dumps(library))
    monkeypatch.setattr(data, "tokens_key", lambda paths, *_: f"key of {paths}")
    monkeypatch.setattr(data, "load_tokens", lambda paths, *_, template: paths)
    evaluate()
    assert seen.pop() is None and "measuring on the built-in corpus, which is not" in capsys.readouterr().out
    assert record()["measured_on"] == dict(data=train_heads.STANDARD_LIBRARY, key="key of None")


def test_a_plot_is_drawn_where_matplotlib_is(finished):
    drawn, file = importlib.util.find_spec("matplotlib") is not None, finished / "training.png"
    assert file.exists() == drawn and (not drawn or file.read_bytes().startswith(b"\x89PNG"))


def test_a_draft_vocabulary_is_learned_and_kept(checkpoint, texts, tmp_path, monkeypatch, capsys):
    """Catches the rarest tokens instead of the most frequent, and a list that a resumed or evaluated run loses."""
    out, model = tmp_path / "heads", GPT.from_pretrained(checkpoint, device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(train_heads, "measure", measured)
        record = run(checkpoint, texts, out, "--steps", "2", "--draft-vocabulary", "12")
    assert record["config"]["vocabulary"] == 12
    heads = CloverHeads.from_pretrained(out, model)
    encoding = load_encoding(checkpoint)
    counts = Counter(load_tokens([texts], encoding, "train").ids.tolist())
    least = min(counts[token] for token in heads.vocabulary.tolist())
    assert len(set(heads.vocabulary.tolist())) == 12 and sum(n > least for n in counts.values()) < 12
    assert run(checkpoint, texts, out, "--steps", "4", "--resume")["config"]["vocabulary"] == 12
    weights = (out / "heads.safetensors").read_bytes()
    capsys.readouterr()
    before = json.loads((out / "heads.json").read_text())
    record = run(checkpoint, texts, out, "--evaluate")
    assert "held-out accuracy" in capsys.readouterr().out and (out / "heads.safetensors").read_bytes() == weights
    assert record["training"] == before["training"] and set(record["acceptance"]) == {"0", "1"}
    assert run(checkpoint, texts, out, "--evaluate", "--draft-vocabulary", "0")["config"]["vocabulary"] == 0


def test_the_draft_vocabulary_is_chosen_by_coverage_unless_it_is_given(checkpoint, texts, tmp_path, monkeypatch,
                                                                       capsys, unmeasured):
    """Catches a default that a resumed or evaluated run applies anew, a choice that is not told or told twice, and a
    record that does not follow."""
    monkeypatch.setattr(data, "VOCABULARY_STEP", 16)  # of 258 ids, of which the text needs fewer than 32
    out, line = tmp_path / "heads", "draft vocabulary: 32 of 258 token ids, which cover 100.0% of the training text"

    def size(*flags):
        """-> (the vocabulary in the record, whether the choice was printed)."""
        record, said = run(checkpoint, texts, out, *flags), capsys.readouterr().out
        assert said.count("draft vocabulary:") == said.count(line) <= 1
        heads = CloverHeads.from_pretrained(out, GPT.from_pretrained(checkpoint, device="cpu"))
        assert record["config"]["vocabulary"] == heads.config.vocabulary
        return heads.config.vocabulary, line in said
    assert size("--steps", "1") == (32, True)
    assert size("--steps", "2", "--resume") == (32, False)
    assert size("--steps", "3", "--resume", "--draft-vocabulary", "8") == (8, False)
    assert size("--steps", "4", "--resume") == size("--evaluate") == (8, False)
    assert size("--evaluate", "--draft-vocabulary", "auto") == (32, True)
    assert size("--evaluate", "--draft-vocabulary", "0") == size("--evaluate") == (0, False)
    assert size("--steps", "5", "--resume", "--draft-vocabulary", "0") == size("--steps", "6", "--resume") == (0, False)
    assert size("--steps", "7", "--resume", "--draft-vocabulary", "auto") == (32, True)


@pytest.mark.parametrize("tree_size", ["9", "auto"])
def test_more_beams_than_the_draft_vocabulary_has_are_refused(tree_size, checkpoint, tmp_path):
    """Catches a refusal that does not say why, or that is taken for a tree too large for the memory."""
    model = GPT.from_pretrained(checkpoint, device="cpu")
    heads = CloverHeads(PRESETS["medusa"], model)
    heads.set_vocabulary(range(12))
    heads.save_pretrained(tmp_path, **measured(heads))
    flags = ["--model", str(checkpoint), "--heads", str(tmp_path), "--device", "cpu", "--tree-size", tree_size]
    with pytest.raises(InputError, match="^beams for a draft vocabulary of 12 token ids must be .* to 12, not 13$"):
        generate_main([*flags, "--prompt", "line", "--beams", "13"])
    generate_main([*flags, "--prompt", "line", "--beams", "12", "--max-new-tokens", "4", "--tree-size", "9"])


def test_data_may_be_short_texts_beside_the_run_itself(checkpoint, tmp_path, unmeasured):
    """Catches prompts that no text is long enough for, and a run that reads its own log as data."""
    write_lines(tmp_path / "short.jsonl", (dict(text=f"{i} is short") for i in range(1000)))
    run(checkpoint, tmp_path, tmp_path / "out", "--steps", "2", "--self-distill", "4")
    (tmp_path / "out" / "notes.txt").write_text("not data either")
    assert run(checkpoint, tmp_path, tmp_path / "out", "--steps", "4", "--self-distill", "4",
               "--resume")["training"]["steps"] == 4
    write_lines(tmp_path / "few.jsonl", [dict(text=str(i)) for i in range(40)])
    with pytest.raises(InputError, match="windows of 45, but it has .*; give more text"):
        run(checkpoint, tmp_path / "few.jsonl", tmp_path / "few")
    with pytest.raises(InputError, match="5000 windows of 45, but it has"):
        run(checkpoint, tmp_path / "short.jsonl", tmp_path / "many", "--batch-size", "5000")


def test_a_run_that_cannot_be_saved_does_not_start(checkpoint, texts, tmp_path):
    """Catches minutes of training that end in an error about the folder."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="expected to write tokens there"):
        run(checkpoint, texts, tmp_path / "file", "--steps", "1000000")


def new_run(model, checkpoint, out, *flags):
    """A Run on a model that need not be the checkpoint's."""
    args = train_heads.parse([*TINY, "--dtype", "float32", "--out", str(out), "--model", str(checkpoint), *flags])
    return train_heads.Run(args, CloverHeads(args.config, model), "", parallel.World(args))


def test_losses_equal_cross_entropy_against_the_shifted_teacher(checkpoint, tmp_path):
    """Catches a head that is compared with the distribution one place too early or too late."""
    model = toy_model()
    heads, ids = random_heads(model), torch.tensor(random_prompts([25, 25]))
    T, loss_mask = 25 - 4 - 1, torch.ones(2, 25, dtype=torch.bool)
    found = {}
    for objective in ("distill", "data"):
        run = new_run(model, checkpoint, tmp_path, "--objective", objective)
        run.heads.load_state_dict(heads.state_dict())
        found[objective], accuracy = run.losses(ids, loss_mask, None)
    hidden = model(ids)
    whole = model.lm_head(hidden)
    for i, out in enumerate(heads(hidden[:, :T], ids[:, 1:])):  # the model predicts token t + 2 + i at t + 1 + i
        logs, teacher = model.lm_head(out).log_softmax(-1), whole[:, i + 1:i + 1 + T]
        torch.testing.assert_close(found["distill"][i], -(teacher.softmax(-1) * logs).sum(-1).mean(), atol=1e-4,
                                   rtol=1e-4)
        torch.testing.assert_close(found["data"][i], F.nll_loss(logs.flatten(0, 1), ids[:, i + 2:i + 2 + T].flatten()))
        assert accuracy[i] == (logs.argmax(-1) == teacher.argmax(-1)).float().mean()


def test_later_heads_weigh_less(checkpoint, tmp_path):
    """Catches weights that rise from head to head, such as 0.7^-i for 0.7^i."""
    model = toy_model()
    run, ids = new_run(model, checkpoint, tmp_path), torch.tensor(random_prompts([25, 25]))
    run.heads.load_state_dict(random_heads(model).state_dict())
    given = ids, torch.ones_like(ids, dtype=torch.bool), None
    losses, _ = run.losses(*given)
    loss, _ = run.train_step(*given)
    torch.testing.assert_close(loss, losses.detach() @ torch.tensor([1, 0.7, 0.49, 0.343]))


def test_each_step_draws_its_own_windows(checkpoint, texts, tmp_path, monkeypatch, unmeasured):
    """Catches windows that are seeded without the step: a run that sees the same few all along."""
    seen, train_step = [], train_heads.Run.train_step
    monkeypatch.setattr(train_heads.Run, "train_step", lambda run, ids, *given: (
        seen.append(ids), train_step(run, ids, *given))[1])
    run(checkpoint, texts, tmp_path, "--steps", "3")
    assert len(seen) == 3 and not any(torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])


def test_the_model_stays_frozen(checkpoint, texts, tmp_path, monkeypatch, unmeasured):
    """Catches heads that train the model under them."""
    frozen = []

    class Watched(train_heads.Run):
        def train(self, *given):
            model = self.heads.model
            frozen.append((model, {name: value.clone() for name, value in model.state_dict().items()}))
            return super().train(*given)
    monkeypatch.setattr(train_heads, "Run", Watched)
    run(checkpoint, texts, tmp_path, "--steps", "3")
    (model, before), = frozen
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(p is q for p in CloverHeads(PRESETS["clover"], model).parameters() for q in model.parameters())


def test_the_help_names_the_coverage_that_is_used(capsys):
    with pytest.raises(SystemExit):
        train_heads.parse(["--help"])
    said = capsys.readouterr().out
    assert f"cover {data.COVERAGE:.0%} of the data" in " ".join(said.split())


@pytest.mark.parametrize("flags, says", [
    ("--preset eagle", "invalid choice: 'eagle'"),
    ("--steps 0", "--steps: expected"),
    ("--lr -1", "--lr: expected"),
    ("--block-size 4000", "block size must be"),
    ("--block-size 0", "--block-size: expected"),
    ("--data nowhere.txt", "nowhere.txt"),
    ("--objective hope", "hope"),
    ("--draft-vocabulary 259", "draft vocabulary must be a whole number from 0 to 258"),
    ("--draft-vocabulary 7", "--draft-vocabulary: expected auto, 0 for all token ids, or 8 of them or more, not '7'"),
    ("--draft-vocabulary -1", "--draft-vocabulary: expected"),
    ("--draft-vocabulary few", "--draft-vocabulary: expected auto"),
    ("--evaluate", "no such folder"),
    ("--resume", "--resume needs a run"),
    ("--shard-base", "start them with torchrun"),
    ("--draft-heads 0", "--draft-heads: expected"),
    ("--mix hope", "hope"),
    ("--steps 5 --on-policy-steps 6", "on-policy steps must be"),
    ("--self-distill-ratio 1.5", "--self-distill-ratio: expected"),
    ("--smooth-l1 -1", "--smooth-l1: expected"),
])
def test_bad_input_is_refused_in_one_line_and_leaves_nothing(checkpoint, texts, tmp_path, flags, says):
    with pytest.raises(InputError) as caught:
        run(checkpoint, texts, tmp_path / "out", *flags.split())
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content, says", [(b"", "empty"), (b"\xff\xfe\x80", "UTF-8"), (b"short", "give more text")],
                         ids=["empty", "undecodable", "too short"])
def test_bad_data_files_are_named(checkpoint, tmp_path, content, says):
    (tmp_path / "data.txt").write_bytes(content)
    with pytest.raises(InputError) as caught:
        run(checkpoint, tmp_path / "data.txt", tmp_path / "out")
    assert says in str(caught.value) and "\n" not in str(caught.value)
