"""bench gpu: torch's versions do the same work, rows hold the measurements, parts run and fail independently."""

import io
import json
import os
import shutil
import signal
import time
from contextlib import contextmanager, redirect_stdout
from itertools import count
from types import SimpleNamespace

import pytest
import torch

import kernels
from bench import ROOT, decoding, gpu, operations, size_config, timing
from bench import __main__ as bench
from conftest import call_once, refusal
from hf.tokenizer import load_encoding
from test_train_heads import measured
from tools.flags import DEMO
from training import evaluate, program, writing
from training.flags import parse_heads


@torch.inference_mode()
def test_torch_computes_the_same_attention():
    """Bug: the benchmark compares with an easier computation, or a wrong mask."""
    sizes = SimpleNamespace(prefixes=[3, 70], trees=[1, 13, 64], sequences=[3])
    for _, _, _, make, ours, theirs in operations.attention_cases(size_config("tiny"), "cpu", sizes):
        x = make()
        torch.testing.assert_close(theirs(*x), ours(*x), atol=0.03, rtol=0)


@torch.inference_mode()
def test_torch_computes_the_same_projections():
    """Bug: torch's version has cheaper noise or none."""
    hidden, weight = torch.randn(5, 16), torch.randn(300, 16)
    for ours, theirs in zip(kernels.project_topk(hidden, weight, 4), operations.topk(hidden, weight, 4)):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    hidden, weight = hidden[:1], weight[:5] / 4
    tokens = operations.sample(hidden.expand(20_000, 16), weight, 0.7)
    share = torch.bincount(tokens, minlength=5) / len(tokens)
    torch.testing.assert_close(share, ((hidden @ weight.T)[0] / 0.7).softmax(-1), atol=0.02, rtol=0)
    assert torch.equal(operations.sample(hidden, weight, 0.0), (hidden @ weight.T).argmax(-1))


@torch.inference_mode()
def test_trees_of_the_benchmark_are_full():
    """Bug: a kernel is timed on padding: trees without candidates, prompts that are read, paths of one node."""
    sizes = SimpleNamespace(trees=[16], sequences=[2], histories=[64])
    inputs, outputs = {}, {}
    for name, _, _, make, ours, _ in operations.tree_cases(size_config("tiny"), "cpu", sizes):
        inputs[name] = make()
        outputs[name] = ours(*inputs[name])
    assert (outputs["build_tree"].sources[:, 1:] >= 0).all()
    assert (inputs["prompt_chain"][3].tokens == 1).all()
    assert (outputs["accept_path"].count > 3).all()


def rows_of(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@contextmanager
def run_here(run, log, *flags, elsewhere=gpu.program):
    """gpu.program, but training and servers run in this process, which has loaded torch already."""
    if flags[0] == "train_heads.py":
        with redirect_stdout(io.StringIO()) as output:
            code = program.main(parse_heads(flags[1:]))
        yield SimpleNamespace(wait=lambda: code), output.getvalue
    elif flags[1] == "tools.serve":
        from test_tools_serve import Running  # needs the server's packages
        server = Running(run.model, *map(str, flags[2:]))
        yield SimpleNamespace(poll=lambda: None), lambda: f"{server.url}\n"
        server.stop()
    else:
        with elsewhere(run, log, *flags) as running:
            yield running


def test_a_dry_run_runs_every_part(tmp_path, capsys, monkeypatch):
    """Bug: a part raises or measures nothing; rows are lost or of other shapes; a tree has a wrong plain step."""
    clock = count(1)
    monkeypatch.setattr(timing, "seconds", lambda body, *_: (body(), float(next(clock)))[1])
    for module in gpu, operations:
        monkeypatch.setattr(module, "seconds", call_once)
    monkeypatch.setattr(gpu, "copy_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(gpu, "program", run_here)
    monkeypatch.setattr(evaluate, "measure", measured)
    monkeypatch.setattr(writing, "LONGEST", dict(assistant=64))
    monkeypatch.setitem(gpu.SIZES, "prompts", (None, 4))
    monkeypatch.setenv("CLOVER_COMMIT", "abc123")
    (tmp_path / "test_one.py").write_text("def test_one(): pass")
    chosen = "-n", "0", "-p", "no:cacheprovider", str(tmp_path / "test_one.py")
    monkeypatch.setitem(gpu.SIZES, "tests", (None, chosen))
    out = tmp_path / "out"
    bench.main(bench.parse(["gpu", "--dry-run", "--out", str(out)]))
    rows = rows_of(out)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows
    assert rows[0]["dry_run"] and rows[0]["commit"] == "abc123"
    assert {row["part"]: row["ended"] for row in rows if "ended" in row} == dict.fromkeys(gpu.PARTS, "done")
    select = lambda part, key: [row for row in rows if row["part"] == part and key in row]
    steps = select("steps", "step_ms")
    plain = {(row["products"], row["batch_size"]): row for row in steps if row["tree_size"] == 1}
    assert [*plain] == [("cublas", 1), ("default", 1), ("default", 2), ("8 bits", 1), ("4 bits", 1)]
    assert len(steps) == 2 * len(plain) and all(row["verify_ms"] > 0 and row["over_plain"] > 0 for row in steps)
    floors = [plain[products, 1]["floor_ms"] for products in ("4 bits", "8 bits", "cublas")]
    assert floors == sorted({*floors})  # weights of 4 bits are smaller than those of 8
    assert {row["kernel"] for row in select("kernels", "us")} == {
        "linear_rows", "ngram_lookup", "build_tree", "prompt_chain", "accept_path", "filtered_sample", "tree_attention",
        "project_topk", "project_sample"}
    assert all(row["us"] == pytest.approx(1000 / operations.COPIES, rel=1e-3) for row in select("kernels", "us"))
    first = select("kernels", "prefix")[0]  # 16 + 4 rows of 2 heads of 16, and 4 x 4 queries in and out
    assert select("kernels", "copy_gb_per_s")[0]["copy_gb_per_s"] == 1
    assert first["share_of_copy"] == pytest.approx(4 * 16 * (2 * 20 + 4 * 4) / 1e9 / (first["us"] / 1e6), rel=1e-3)
    ways = [("plain", 1), *(("heads + lookup", T) for T in ("auto", 4, 16))]
    runs = [(*way, B, t, seed) for B in (1, 2) for t in (0.0, 0.8) for way in ways for seed in range(B)]
    for part, want in (("smollm2", runs), ("demo", [run for run in runs if run[3] == 0])):
        decoded, plain = select(part, "drafter"), {}
        for row, case in zip(decoded, want, strict=True):
            _, T, *setting, seed = case
            assert tuple(row[key] for key in ("drafter", "tree_size", "batch_size", "temperature", "seed")) == case
            base = plain.setdefault((*setting, seed), row)
            assert row["speed_up"] == pytest.approx(row["tokens_per_second"] / base["tokens_per_second"], rel=2e-3)
            assert row["identical"] == 1 and row["bugs"] == row["ties"] == 0 and row["model"] == "demo"
            assert ("graph_ms" in row) == (T != "auto") and row["engine_ms"] > 0 and row["warm_seconds"] > 0
    plain, auto = select("server", "drafter")
    assert (plain["drafter"], auto["drafter"]) == ("plain", "auto")
    assert all(0 < row["first_token_ms"] <= row["worst_first_token_ms"] for row in (plain, auto))
    assert auto["speed_up"] == pytest.approx(auto["tokens_per_second"] / plain["tokens_per_second"], rel=2e-3)
    training, = select("training", "exit_code")
    assert training["written_tokens_per_second"] > 0 and training["trained_tokens_per_second"] > 0
    tests = select("tests", "summary")[0]
    assert "1 passed" in tests["summary"][0] and tests["exit_code"] == 0
    assert {*os.listdir(out)} == {"results.jsonl", "tests.log"}


def test_a_model_with_a_chat_template_answers_chats(tmp_path):
    """Bug: a chat model continues texts, or all chats of one kind come before the others."""
    folder = shutil.copytree(DEMO, tmp_path / "chatty", copy_function=os.symlink,
                             ignore=shutil.ignore_patterns("clover", "medusa", "smollm2"))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content[:20] }}{% endfor %}")
    prompts, _ = gpu.read_prompts(folder, 3)
    encoding = load_encoding(folder)
    want = [json.loads(line)["messages"][0]["content"] for line in (ROOT / "bench/prompts.jsonl").open()][:3]
    assert [encoding.decode(prompt) for prompt in prompts] == [x[:20] for x in want]


def test_each_differing_output_is_looked_into(monkeypatch):
    """Bug: only the first that differs counts, or another sequence's noise is used; a run with many takes minutes."""
    ours = [[1, i] for i in range(20)]
    plain = [[1, i if i < 3 else 0] for i in range(20)]

    def first(model, prompts, ours, plain, sampling):
        index = next(i for i, (a, b) in enumerate(zip(ours, plain)) if a != b)
        return index, 1, 0.0, "tie" if 5 <= index <= 10 else "bug"  # the first eight: 3 to 10
    monkeypatch.setattr(decoding, "first_difference", first)
    assert decoding.differences(None, None, None, ours, ours) == dict(ties=0, bugs=0)
    assert decoding.differences(None, None, None, ours, plain) == dict(ties=6, bugs=2)


def test_a_program_ends_with_its_part(tmp_path):
    """Bug: a mistake in the server's flags, or a program that hangs, takes longer than the part."""
    run = SimpleNamespace(out=tmp_path, deadline=time.perf_counter() + 60)
    with pytest.raises(RuntimeError, match="did not start"), gpu.program(run, "log", "-c", "print(1 / 0)") as running:
        gpu.wait_for_port(*running)
    assert "ZeroDivisionError" in (tmp_path / "log").read_text()
    run.deadline = time.perf_counter()
    with gpu.program(run, "log", "-c", "import time; time.sleep(60)") as (process, output):
        assert process.wait() == -signal.SIGKILL and output() == ""


def test_an_error_or_a_budget_ends_only_its_part(monkeypatch, tmp_path):
    """Bug: an error ends other parts, rows are written at the end, a part exceeds its time or gets no unused time."""
    def fails(run):
        yield dict(row=1)
        raise ValueError("a reason")

    def endless(run):
        while True:
            yield dict(row=2)
    clock = count()
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(gpu, "PARTS", dict(fails=(fails, 1), endless=(endless, 1)))
    gpu.bench(SimpleNamespace(out=str(tmp_path), parts=None, dry_run=True, seconds=10))
    assert [row.get("row") or row["ended"] for row in rows_of(tmp_path)[1:]] == [
        1, "ValueError: a reason", *[2] * 7, "out of time"]


def test_what_is_missing_is_told_in_one_line(monkeypatch, checkpoint, tmp_path):
    """Bug: a traceback, figures of a CPU, or plain decoding where the heads are missing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for flags, says in (("", "needs a CUDA device; --dry-run"), ("--dry-run --parts kernel", "some of tests, "),
                        (f"--dry-run --model {checkpoint}", "has no draft heads; give their folder as --heads"),
                        (f"--dry-run --parts server --heads {tmp_path}", "has no draft heads")):
        refusal(lambda: bench.main(bench.parse(["gpu", "--out", str(tmp_path / "out"), *flags.split()])), says)
    assert not (tmp_path / "out").exists()
