"""training/writing.py: the model's own text."""

import contextlib
import json
import random
import re
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from conftest import refusal, toy_model
from hf.chat import ChatTemplate
from model import InputError
from test_training_data import CHATML, EOT, THINK, save, save_family
from training import runs, writing

END = 263  # <|im_end|>


@pytest.fixture
def encoding(tmp_path):
    return save(tmp_path, {EOT: 261, "<|im_start|>": 262, "<|im_end|>": END})


class Scripted:
    """A fake `Engine`. says(prompt text, Sampling, index) -> text, which ends with <|im_end|> unless it
    ends with "...". Sequences end in a random order."""

    def __init__(self, encoding, says):
        self.encoding = encoding
        self.says = says
        self.calls = []
        self.grammars = []
        self.waiting = []
        self.random = random.Random(0)

    def __call__(self, model, batch_size, capacity):
        if batch_size > 2:
            raise InputError("the caches have no room")
        return self

    def add(self, prompt, longest, sampling, stop, encoding, index, grammar):
        self.grammars.append(grammar)
        text = self.encoding.decode(prompt)
        self.calls.append((text, sampling, index))
        said = self.says(text, sampling, index)
        tokens = self.encoding.encode(said, allowed_special="all") + [END] * (not said.endswith("..."))
        sequence = Mock(tokens=tokens, ended=None)
        self.waiting.append(sequence)
        return sequence

    def step(self):
        sequence = self.waiting.pop(self.random.randrange(len(self.waiting)))
        sequence.ended = "stop" if sequence.tokens[-1] == END else "length"
        return [SimpleNamespace(sequence=sequence, tokens=sequence.tokens)]


def writer(folder, encoding, monkeypatch, says=None, template=CHATML, grammar=None, **options):
    """A Writer, with the engine Scripted if `says` is given, and a grammar without second turns or these templates."""
    monkeypatch.setattr(writing, "PER_FILE", 8 if says else 4)
    script = Scripted(encoding, says)
    if says:
        monkeypatch.setattr(writing, "Engine", script)
    encoding.template = template
    model = toy_model(vocab_size=264, block_size=1024)
    made = writing.Writer(folder, model, encoding, [END, 261], 1, **dict(log=lambda line: None) | options)
    if "templates" not in options:
        made.grammars = [grammar or dict(templates=["Say {3-900}."], followups=["More."], words={})]
    made.claim()
    return made, script


def lines(folder):
    return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]


def conversations(folder):
    chats = [line["messages"] for line in lines(folder)]
    assert all(m["role"] == ("user", "assistant")[i % 2] for chat in chats for i, m in enumerate(chat))
    return [[m["content"] for m in chat] for chat in chats]


def test_a_chat_model_asks_and_answers_and_what_is_no_good_is_dropped(encoding, tmp_path, monkeypatch):
    """Catches text of the wrong role, near-duplicates, runaways, special tokens, no drawn messages, lost reasons."""
    asked = ["what is 0", "What  is 0", "", "a b. c...", "2 <|im_start|>", "what is 5", "b b c", "what is 7"]

    def says(text, sampling, index):
        if text.endswith("assistant\n"):
            answer = "hell" if "0<" in text else f"hell {sampling.seed} {index}"
            return "he" * 40 if "5<" in text and index == 0 else answer
        first = dict(enumerate(asked)).get(sampling.seed % 1_000_003, "next file")
        return first if text.count("user\n") == 1 else f"and {sampling.seed}?"
    logged = []
    made, script = writer(tmp_path / "self", encoding, monkeypatch, says, log=logged.append)
    made.write(1)
    chats = conversations(tmp_path / "self")
    assert [chat[0] for chat in chats if chat[0].startswith(("what", "a", "b"))] == [
        "what is 0", "a b.", "b b c", "what is 7"]
    drawn = [chat for chat in chats if re.fullmatch(r"Say \d+\.", chat[0])]
    assert len(drawn) == 8 and {len(chat) for chat in chats} == {2, 4} and len(chats) == 12
    assert {chat[2][:3] for chat in chats if len(chat) > 2} == {"and", "Mor"}
    assert made.dropped == {"empty": 1, "special tokens": 1, "repetitive": 1, "duplicate": 1}
    assert all(f"1 {reason}" in logged[-1] for reason in made.dropped) and "tokens/s" in logged[-1]
    first, answer = script.calls[0], next(call for call in script.calls if "what is 0" in call[0])
    assert first[0] == "<|im_start|>user\n" and first[1].temperature == 0.9
    assert answer[0] == "<|im_start|>user\nwhat is 0<|im_end|>\n<|im_start|>assistant\n"
    answered = {sampling.temperature for text, sampling, _ in script.calls if text.endswith("assistant\n")}
    assert answered == set(writing.TEMPERATURES)


@pytest.mark.parametrize("special", [False, True])
def test_answers_may_reason_and_users_may_not(special, tmp_path, monkeypatch):
    """Bug: all that Qwen3 or SmolLM3 writes is dropped: <think> is an added token, in some models a special one."""
    thinks = save(tmp_path, THINK, special)

    def says(text, sampling, index):
        return f"<think>\n{sampling.seed}" + "</think>hell" * index if text.endswith("assistant\n") else "<think>he"
    made, _ = writer(tmp_path / "self", thinks, monkeypatch, says)
    made.write(1)
    chats = conversations(made.folder)
    assert len(chats) == 8 and all(chat[0].startswith("Say") for chat in chats)
    assert all(chat[1].startswith("<think>") for chat in chats) and made.dropped["special tokens"] >= 8


MISTRAL = ChatTemplate("Mistral", "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}", {})


@pytest.mark.parametrize("name, end", [("Qwen3", END), ("DeepSeek-R1-Distill", 264), ("DeepSeek-LLM", "Assistant:"),
                                       ("Mistral", 264)])
def test_a_users_message_ends_where_the_template_goes_on(name, end, tmp_path, monkeypatch):
    """Bug: the users' messages of R1's distillations and DeepSeek-LLM run on into answers, and are all dropped."""
    added = {EOT: 261, "[INST]": 262, "<|im_end|>": END, "[/INST]": 264}
    family = save(tmp_path, added) if name == "Mistral" else save_family(tmp_path, name)
    says = lambda text, sampling, _: f"he {sampling.seed}\n\n" + f"{end} hell" * text.endswith("User: ")
    made, script = writer(tmp_path / "self", family, monkeypatch, says, family.template or MISTRAL)
    add, stops = script.add, []
    script.add = lambda *args, **rest: stops.append(args[3]) or add(*args, **rest)
    made.write(1)
    assert {frozenset(stop) for stop in stops} == {frozenset({END, 261}), frozenset({END, 261, end})}
    asked = [chat[0] for chat in conversations(made.folder) if not chat[0].startswith("Say")]
    assert len(asked) == 8 and all(re.fullmatch(r"he \d+", message) for message in asked)


def test_a_drawn_message_may_quote_the_answer_of_the_chat_before(encoding, tmp_path, monkeypatch):
    """Catches an empty quotation, another chat's answer, braces in an answer read as placeholders, text or half a block
    quoted as code, and code too long to quote."""
    def says(text, sampling, index):
        n = sampling.seed % 1_000_003
        return f"{n} {{name}} " + "".join(map(str, range(n * 8))) if text.endswith("assistant\n") else f"ask {n}"
    monkeypatch.setattr(writing, "QUOTED", range(50, 1000))
    monkeypatch.setattr(writing, "SLOTS", dict(cpu=8))  # else many other tasks run, too
    grammar = dict(templates=["Shorten: {text}", "Plain {0-999}"], followups=["More."], words={})
    made, _ = writer(tmp_path / "self", encoding, monkeypatch, says, grammar=grammar)
    made.write(1)
    chats = conversations(tmp_path / "self")
    quotes = [(before[1], chat[0]) for before, chat in zip(chats, chats[1:]) if chat[0].startswith("Shorten")]
    assert quotes and all(quote == f"Shorten: {answer}" and len(answer) >= 50 for answer, quote in quotes)
    block = "```python\n" + "x = 1\n" * 20 + "```"
    assert writing.CODE.findall(f"Like this:\n\n{block}\n\nor `x`:\n\n```\nshort\n```\n") == [block]
    assert writing.CODE.findall("```\n" + "x = 1\n" * 300 + "```") == []


@pytest.mark.parametrize("template", [CHATML, None], ids=["chat", "base"])
def test_a_killed_writer_continues_to_the_same_texts(encoding, tmp_path, monkeypatch, template):
    """Catches texts that depend on their batch, the process or what was there before, and texts written twice."""
    def texts(name, slots=5, rank=0, size=1, stop_after=10**6):
        monkeypatch.setattr(writing, "SLOTS", dict(cpu=slots))
        monkeypatch.setattr(writing, "LONGEST", dict(user=6, assistant=12))
        monkeypatch.setattr(writing, "TEMPERATURES", (0.0, 3.0, 5.0))
        made, _ = writer(tmp_path / name, encoding, monkeypatch, template=template)
        made.stop = set(range(200, 264))  # so that messages of random bytes end
        step, steps = made.step, iter(range(stop_after))
        made.step = lambda: (next(steps), step())
        with contextlib.suppress(StopIteration):
            made.write(500, rank, size)
        return {file.name: file.read_text() for file in (tmp_path / name).glob("*.jsonl")}
    whole = texts("whole")
    assert len(whole) > 3
    part = texts("part", stop_after=50)
    assert 0 < len(part) < len(whole)
    assert texts("part", slots=3) == whole
    assert texts("whole", stop_after=0) == whole  # nothing is left to do
    texts("both", rank=1, size=2)
    two = texts("both", rank=0, size=2)
    assert len(two) > 2 and all(two[name] == whole[name] for name in ("00000.jsonl", "00001.jsonl"))


def test_texts_of_another_model_or_prompts_are_not_continued(encoding, tmp_path, monkeypatch):
    """Catches heads that learn from another model's text, and an endless search for usable text."""
    silent, _ = writer(tmp_path / "self", encoding, monkeypatch, lambda *_: "")
    refusal(lambda: silent.write(1), "give --data")
    prompts = [([dict(role="user", content="a")], {}, None)]
    refusal(lambda: writer(tmp_path / "self", encoding, monkeypatch, prompts=prompts), "other prompts")
    (tmp_path / "self" / writing.ABOUT).write_text('{"model": "0123"}')
    refusal(silent.claim, "another model")


def test_prompts_are_answered_once_at_each_temperature(encoding, tmp_path, monkeypatch):
    """Catches text of other prompts, a prompt left out, answers without end, and long prompts cut off."""
    user = lambda i: [dict(role="user", content=f"{i} " * (1 if i else 450))]  # 900 tokens: too many
    grammars = [*[None] * 4, ("regex", "h.*")]
    prompts = [(user(i), dict(tools=[i]) if i == 3 else {}, grammars[i]) for i in range(5)]
    says = lambda text, sampling, index: f"hell {sampling.temperature}"
    template, logged = ChatTemplate("tools", "{{ tools }}" + CHATML.source, {}), []
    made, script = writer(tmp_path / "self", encoding, monkeypatch, says, template, prompts=prompts, log=logged.append)
    compile = lambda *source: SimpleNamespace(for_prompt=lambda prompt: source)
    made.grammar_tokenizer = SimpleNamespace(compile=compile)
    made.write(10**6)
    assert [*filter(None, script.grammars)] == grammars[4:] * 4
    assert made.dropped == {"too long": 4} and len(script.calls) == 16 and "prompts are answered" in logged[-1]
    assert [chat[1] for chat in conversations(made.folder)] == [
        f"hell {temperature}" for temperature in writing.TEMPERATURES for _ in range(4)]
    assert [text[0] for text, *_ in script.calls].count("[") == 4
    assert [line.get("tools") for line in lines(made.folder)] == [None, None, [3], None] * 4


@pytest.mark.parametrize("name", ["prompts.json", "coding.json"])
def test_templates_are_complete_and_seldom_repeat(name):
    """Catches a placeholder without a list or left in a message, entries that are there twice, repeated messages."""
    grammar = writing.read_templates(writing.TEMPLATES.with_name(name))
    words = grammar["words"]
    for entries in (grammar["templates"], grammar["followups"], *words.values()):
        repeated = entries is words.get("lang")  # weights the languages
        assert (repeated or len(entries) == len(set(entries))) and all(entry.strip() == entry for entry in entries)
        quotes = re.findall(r"{(text|block)}", " ".join(entries))
        assert not quotes or entries is grammar["templates"]
    quotes = {"{text}": "QUOTE", "{block}": "BLOCK"}
    for i, template in enumerate(grammar["templates"] + grammar["followups"]):
        message = writing.fill(random.Random(i), [template], words, quotes)
        assert not writing.PLACEHOLDER.search(message)
        assert all((quote in message) == (name in template) for name, quote in quotes.items())
    drawn = [writing.fill(random.Random(i), grammar["templates"], words, dict.fromkeys(quotes, ""))
             for i in range(1000)]
    assert "" not in drawn and len(set(drawn)) > 900
    pairs = [writing.fill(random.Random(i), ["{app} {app2} {app}"], dict(app=["a", "b"]), {}).split() for i in range(9)]
    assert all(a == c != b for a, b, c in pairs)


def test_templates_are_drawn_from_all_files_and_broken_ones_refused(encoding, tmp_path, monkeypatch):
    """Catches a file that is never drawn from, and one that fails after hours."""
    files = []
    for name in "ab":
        files.append(tmp_path / f"{name}.json")
        grammar = dict(templates=[f"{name} {{0-999}}"], followups=["More."], words={})
        files[-1].write_text(json.dumps(grammar | (dict(topics=["On {1-9}"]) if name == "b" else {})))
    says = lambda text, sampling, index: f"hell {sampling.seed} {index}"
    made, script = writer(tmp_path / "self", encoding, monkeypatch, says, templates=files)
    monkeypatch.setattr(writing, "PER_FILE", 32)
    made.write(1)
    first = [chat[0][0] for chat in conversations(made.folder) if re.fullmatch("[ab] [0-9]+", chat[0])]
    assert first.count("a") == first.count("b") > 8
    steered = [text for text, *_ in script.calls if "system" in text]
    assert 8 < len(steered) < sum(text.endswith("user\n") for text, *_ in script.calls)
    assert all(re.match(r"<.im_start.>system\nOn \d<", text) and text.endswith("user\n") for text in steered)
    refusal(lambda: writer(tmp_path / "self", encoding, monkeypatch, says), "--templates")
    whole = dict(templates=["a"], followups=["b"], words={})
    for broken in (dict(words=None), dict(topics=[1]), dict(topics=["{x}"]),
                   dict(templates=["{x}"]), dict(templates=[]), dict(words=dict(x=[1]))):
        files[0].write_text(json.dumps(whole | broken))
        refusal(lambda: writing.read_templates(files[0]), "a.json")


def test_a_long_job_prints_a_line_a_minute_and_its_last():
    """Bug: nothing is printed for minutes, or the end is not."""
    lines, clock = [], SimpleNamespace(now=100.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs.time, "perf_counter", lambda: clock.now)
        show = runs.progress(10, 200, 2, lines.append, every=60)
        for step in (11, 50, 60, 110, 111, 200):
            clock.now += 25
            show(step, f"{step}")
    assert [line.split()[0] for line in lines] == ["60", "200"]
    assert lines[0] == "60  1 tokens/s  0:03:30 left"
