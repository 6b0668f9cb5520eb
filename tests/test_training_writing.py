"""training/writing.py: the model's own text; and the stored states of training/data.py."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from backends.tensor_parallel import Group
from conftest import refusal, toy_model
from model import InputError
from test_training_data import CHATML, EOT, save
from training import data, writing
from training.loss import run_model

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


def test_stored_states_are_those_of_each_document_alone(tmp_path, monkeypatch):
    """Catches rows stored for another document, padding that is stored, the lost end of a long document."""
    monkeypatch.setattr(data, "BATCH", 40)
    model, rng = toy_model(), np.random.default_rng(0)
    sizes = [5, 1, 30, 7, 7, 12]
    tokens = data.pack([(rng.integers(0, 97, n), np.ones(n, bool)) for n in sizes])
    monkeypatch.setattr(data, "SPAN", 16)
    file = tmp_path / "states-0.npy"
    rows = data.store_states(file, model, tokens, Group(), torch.float32)
    assert rows.shape == (62, 64 + 4) and rows.nbytes + 128 == file.stat().st_size
    stored = tokens._replace(states=rows)
    spans = [(a, b) for batch in data.span_batches(tokens, 16) for a, b in batch]
    assert sorted(spans) == [(0, 5), (5, 6), (6, 22), (22, 36), (36, 43), (43, 50), (50, 62)]
    for start, end in spans:
        ids = torch.from_numpy(tokens.ids[start:end].astype(np.int64))[None]
        want = run_model(model, torch.nn.functional.pad(ids, (0, 1)))
        got = data.unpack_teacher(torch.tensor(rows[None, start:end]), torch.float32)
        torch.testing.assert_close(got.hidden, want.hidden, atol=0.02, rtol=0.01)
        torch.testing.assert_close(got.logsumexp, want.logsumexp, atol=0.02, rtol=0.01)
        assert (got.greedy == want.greedy).float().mean() > 0.8
    ids, _, _, teacher = data.window_batch(stored, 20, 9, 0, "cpu")
    assert teacher.hidden.shape == (20, 8, 64) and teacher.greedy.shape == (20, 8)
    first = next(i for i in range(54) if (tokens.ids[i:i + 9] == ids[0].numpy()).all())
    whole = data.unpack_teacher(torch.tensor(rows[None, first:first + 8]), torch.float32)
    assert torch.equal(teacher.hidden[0], whole.hidden[0]) and torch.equal(teacher.logsumexp[0], whole.logsumexp[0])
    monkeypatch.setattr(data, "write_states", None)  # not called: they exist
    data.store_states(file, model, tokens, Group(), torch.float32)
    monkeypatch.setattr(data.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    more = tmp_path / "states-1.npy"
    refusal(lambda: data.store_states(more, model, tokens, Group(), torch.float32), "hidden states take", "are free on")
    assert [path.name for path in tmp_path.iterdir()] == ["states-0.npy"]
