"""training/writing.py: the model's own text."""

import json
from types import SimpleNamespace

import pytest

from conftest import refusal, toy_model
from model import InputError
from test_training_data import CHATML, EOT, save
from training import writing

END = 263  # <|im_end|>


@pytest.fixture
def encoding(tmp_path):
    return save(tmp_path, {EOT: 261, "<|im_start|>": 262, "<|im_end|>": END})


class Scripted:
    """A fake `Engine` that answers each prompt with a function of its index and text."""

    def __init__(self, encoding, says):
        self.encoding = encoding
        self.says = says
        self.calls = []

    def __call__(self, model, sampling, batch_size, **options):
        if batch_size > 3:
            raise InputError("the caches have no room")
        self.sampling = sampling
        return self

    def generate(self, prompts, max_new_tokens, stop):
        texts = [self.encoding.decode(prompt) for prompt in prompts]
        self.calls.append((texts, self.sampling.temperature, self.sampling.seed))
        said = [self.says(i, text) for i, text in enumerate(texts)]
        tokens = [self.encoding.encode(text, allowed_special="all") for text in said]
        return SimpleNamespace(sequences=[
            SimpleNamespace(tokens=ids, ended="stop" if ids[-1:] == [END] else "length") for ids in tokens])


def writer(folder, encoding, monkeypatch, says, template=CHATML, openings=("",)):
    monkeypatch.setattr(writing, "ROUND", (8, 8))
    script = Scripted(encoding, says)
    monkeypatch.setattr(writing, "Engine", script)
    encoding.template = template
    made = writing.Writer(folder, toy_model(), encoding, [END, 261], 1, log=lambda line: None)
    made.openings = openings
    made.claim()
    return made, script


def lines(folder):
    return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]


def test_a_chat_model_asks_and_answers_and_what_is_no_good_is_dropped(encoding, tmp_path, monkeypatch):
    """Catches text of the wrong role, near-duplicates, runaways, special tokens, second turns in all texts or none."""
    asked = ["what is 0", "What  is 0", "", "a" * 20, "2 <|im_start|>", "what is 5", "b b c", "what is 7"]
    ends = [True, True, True, False, True, True, True, True]

    def says(i, text):
        if text.endswith("assistant\n"):
            return "he" * 40 + "<|im_end|>" if "5" in text else f"to {text[-30:-24]!r}: hell"
        if text.count("user\n") > 1:
            return f"and {i}?<|im_end|>"
        return asked[i] + "<|im_end|>" * ends[i]
    made, script = writer(tmp_path / "self", encoding, monkeypatch, says)
    made.write(1)
    texts = [[m["content"] for m in line["messages"]] for line in lines(tmp_path / "self")]
    assert [text[0] for text in texts] == ["what is 0", "b b c", "what is 7"] and len(texts[2]) == 4
    assert len(texts[0]) == len(texts[1]) == 2 and texts[2][2] == "and 0?"
    (prompts, temperature, seed), (answered, colder, _), *_ = script.calls
    assert set(prompts) == {"<|im_start|>user\n"} and (temperature, colder) == (0.9, 0.0)
    assert answered[0] == "<|im_start|>user\nwhat is 0<|im_end|>\n<|im_start|>assistant\n"
    assert [role for m in lines(tmp_path / "self")[2]["messages"] for role in [m["role"]]] == ["user", "assistant"] * 2


def test_a_round_is_written_once_and_each_process_has_its_own(encoding, tmp_path, monkeypatch):
    """Catches a run that starts over after Ctrl-C, processes that write the same text, a constant temperature."""
    says = lambda i, text: f"{len(made.seen)} {i}" if text.endswith("user\n") else "hell"
    with_end = lambda i, text: says(i, text) + "<|im_end|>"
    made, script = writer(tmp_path / "self", encoding, monkeypatch, with_end)
    made.write(300, rank=1, size=2)
    files = sorted(file.name for file in (tmp_path / "self").glob("*.jsonl"))
    assert files[:2] == ["00001.jsonl", "00003.jsonl"] and len({call[2] for call in script.calls}) == len(files)
    assert {call[1] for call in script.calls} >= {0.9, 0.8, 1.0}
    again, script = writer(tmp_path / "self", encoding, monkeypatch, with_end)
    again.write(300, rank=1, size=2)
    assert not script.calls and again.seen == made.seen
    silent, _ = writer(tmp_path / "none", encoding, monkeypatch, lambda *_: "")
    refusal(lambda: silent.write(1), "give --data")
    (tmp_path / "self" / writing.ABOUT).write_text('{"model": "0123"}')
    refusal(again.claim, "another model")


def test_half_of_the_messages_begin_with_an_opening_that_may_quote_an_answer(encoding, tmp_path, monkeypatch):
    """Catches a message without its opening, an empty quotation, a lack of variety."""
    def says(i, text):
        return ("hell " * 2 + f"{len(script.calls)} {i}" if text.endswith("assistant\n") else f"ask {i}") + "<|im_end|>"
    monkeypatch.setattr(writing, "QUOTED", range(5, 100))
    made, script = writer(tmp_path / "self", encoding, monkeypatch, says, openings=["Explain: ", "Shorten: {text}. "])
    first, second = made.round(0, 8), made.round(1, 8)
    made.count(first)
    begun = {text["messages"][0]["content"] for text in made.round(1, 8)}
    assert {text["messages"][0]["content"] for text in first} >= {"Explain: ask 0", "ask 2", "Explain: ask 5"}
    assert second == [] and any(text.startswith("Shorten: hell hell ") for text in begun)  # no answers, nothing new


def test_a_round_has_as_many_chats_as_the_missing_tokens_need(encoding, tmp_path, monkeypatch):
    """Catches minutes of writing for a goal of a few tokens."""
    made, _ = writer(tmp_path / "self", encoding, monkeypatch, lambda i, text: f"{len(text)} {i}<|im_end|>", None)
    monkeypatch.setattr(writing, "ROUND", (4, 9))
    counts = []
    monkeypatch.setattr(made, "round", lambda number, count: counts.append(count) or [dict(text="hell")])
    monkeypatch.setattr(made, "count", lambda texts: 1000)
    made.write(3500)
    assert counts == [9, 9, 5, 4]


def test_a_base_model_writes_from_its_first_token(encoding, tmp_path, monkeypatch):
    made, script = writer(tmp_path / "self", encoding, monkeypatch, lambda i, text: f"text {i}", template=None)
    made.write(1)
    assert lines(tmp_path / "self") == [dict(text=f"text {i}") for i in range(8)]
    assert set(script.calls[0][0]) == {EOT} and script.calls[0][1] > 0
