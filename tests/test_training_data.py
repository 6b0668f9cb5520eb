"""training/data.py: documents are complete, splits never overlap, the loss mask is exact."""

import gzip
import json
import os
import random
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import test_hf_tokenizer as tk
from common.values import warn
from conftest import refusal
from hf.chat import ChatTemplate
from hf.tokenizer import load_encoding
from test_hf_tokenizer import write
from tools.prompts import read_prompt_file
from training import data

EOT = tk.EOT
CHATML = ChatTemplate("chatml", (
    "{% for m in messages %}{% if m.role == 'refused' %}{{ raise_exception('no such role') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"), {})
DEEPSEEK = {"<｜begin▁of▁sentence｜>": 261, "<｜end▁of▁sentence｜>": 262}
THINK = {EOT: 261, "<|im_start|>": 262, "<|im_end|>": 263, "<think>": 264, "</think>": 265}
FAMILIES = {  # name: (added tokens, a template that treats reasoning as the model's own does)
    "Qwen3": (THINK, (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n"
        "{{ m.content.split('</think>')[0].split('<think>')[1].strip() if '</think>' in m.content }}\n</think>\n\n"
        "{% endif %}{{ m.content.split('</think>')[-1].lstrip() }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}")),
    "ChatML": (THINK, CHATML.source),  # keeps all reasoning
    "DeepSeek-R1-Distill": (DEEPSEEK | {"<｜User｜>": 263, "<｜Assistant｜>": 264, "<think>": 265, "</think>": 266}, (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
        "{% else %}<｜Assistant｜>{{ m.content.split('</think>')[-1].lstrip() }}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}")),
    "DeepSeek-LLM": (DEEPSEEK, (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}User: {{ m.content }}\n\n{% else %}"
        "Assistant: {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}")),
}


def save(folder, added, special_thoughts=False):
    """A tokenizer of GPT-2's 256 bytes, five merges, and added tokens, {text: id}, all special but perhaps <think>s."""
    special = [tk.added(index, text, special=special_thoughts or "think" not in text) for text, index in added.items()]
    return load_encoding(tk.save(folder, tk.tiny_spec() | dict(added_tokens=special)))


@pytest.fixture
def tiny(tmp_path):
    return save(tmp_path, {EOT: 261})


@pytest.fixture
def chatty(tmp_path):
    """tiny with ChatML and its two tokens."""
    encoding = save(tmp_path, {EOT: 261, "<|im_start|>": 262, "<|im_end|>": 263})
    encoding.template = CHATML
    return encoding


def save_family(folder, name):
    """The tokenizer and chat template of a family, in a folder."""
    added, source = FAMILIES[name]
    bos, eos = [text for text, i in added.items() if i < 263]
    config = dict(chat_template=source, bos_token=bos, eos_token=eos if name.startswith("Deep") else "<|im_end|>")
    write(folder, {"tokenizer_config.json": json.dumps(config)})
    return save(folder, added)


def documents_in(paths, **options):
    return [record.text for record in data.read_records(paths, **options)]


PAIR = {"prompt": "he", "completion": "ll"}
CHAT = {"messages": [dict(role="user", content="q"), dict(role="assistant", content="a")]}


def jsonl(values):
    return "".join(json.dumps(value) + "\n" for value in values)


def records_of(folder, lines, template=CHATML, key=None):
    """The records of a file of these lines."""
    write(folder, {"a.jsonl": jsonl(lines)})
    return list(data.read_records([folder / "a.jsonl"], template, key))


def messages(turns):
    return {"messages": [dict(role=role, content=content) for role, content in turns]}


def test_builtin_corpus_splits_by_name_and_leaves_out_what_is_not_the_librarys_own(tmp_path, monkeypatch):
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    refusal(lambda: data.builtin_corpus("train"), tmp_path)
    kept = {f"lib/m{i}.py": "x = 1\n" for i in range(60)} | {"database/a.py": ""}
    left_out = ("site-packages/a.py", "lib/dist-packages/b.py", "__pycache__/c.py", "notes.txt",
                "encodings/a.py", "test/xmltestdata/c.py", "data/d.py")
    write(tmp_path, kept | dict.fromkeys(left_out, "x"))
    train, heldout = data.builtin_corpus("train"), data.builtin_corpus("heldout")
    assert sorted(train + heldout) == sorted(tmp_path / name for name in kept)
    # Fixed names: a split that changed between runs would put held-out files into training.
    assert [file.name for file in heldout] == "m0.py m2.py m25.py m37.py".split()


def test_documents_of_folders_are_read_once_in_order_and_what_has_no_text_is_counted(tmp_path, monkeypatch, capsys):
    """Bug: a file is missed, read twice or of a training run; one that is not UTF-8 ends the run, or is not told."""
    ignored = (".git/a.txt", "node_modules/b.js", "c.png", "run/train_state.pt", "run/notes.txt", "written_by.json",
               "locked.md", ".c/d")
    write(tmp_path / "one", dict.fromkeys(ignored, "x") | {
        "a.py": "a", "b/c.md": "é\r\n", "b/d.txt": b"\xff\xfe", "b/empty.txt": "", "latin.txt": b"\xe9",
        "g.jsonl": '{"text": "one"}\n\n{"text": "two\\nlines", "id": 2}\r\n{"text": ""}\n', "h.txt/i.txt": "i"})
    write(tmp_path / "two", {"b.txt": "b"})
    for link, to in (("link", "../two"), ("b/again", "../../two"), ("../two/back", "../one"), ("e.md", "../two/b.txt"),
                     ("dangling.txt", "none")):
        (tmp_path / "one" / link).symlink_to(to)
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "locked" not in str(path) and access(path, mode))
    assert documents_in([tmp_path / "one"]) == ["a", "é\r\n", "b", "one", "two\nlines", "i"]
    said = capsys.readouterr().err
    assert said.startswith("left out of the data: 4 files or lines") and said.endswith("b/d.txt\n")
    assert documents_in([tmp_path / "one/c.png", tmp_path / "one/a.py"]) == ["x", "a"]
    write(tmp_path, {"blank.jsonl": "\n \n", "none/a.bin": "x", "none/b.txt": ""})
    for name, says in (("one/latin.txt", "UTF-8"), ("one/locked.md", "no right to read it"), ("blank.jsonl", "none"),
                       ("none", "none"), ("missing.txt", "no such file")):
        refusal(lambda: documents_in([tmp_path / name]), f"{tmp_path / name}: ", says)


def test_roles_are_read_as_other_trainers_read_them(tmp_path, capsys):
    """Bug: chats vanish where the assistant has another name."""
    warn.cache_clear()
    shared = {"conversations": [{"from": "Human", "value": "q"}, {"from": "model", "value": "a"}]}
    lines = [messages([("User", "q"), ("Assistant", "a")]), shared, messages([("user", "q"), ("Narrator", "a")])]
    write(tmp_path, {"a.jsonl": jsonl([*lines, {"messages": []}]), "b.jsonl": jsonl(lines[2:])})
    [text] = {*documents_in([tmp_path / "a.jsonl"], template=CHATML)}
    assert text == CHATML.render(CHAT["messages"], add_generation_prompt=False)
    said = capsys.readouterr().err
    assert "2 files or lines" in said and said.endswith(f"the first is {tmp_path}/a.jsonl, line 3\n")
    refusal(lambda: documents_in([tmp_path / "b.jsonl"], template=CHATML), tmp_path / "b.jsonl", "assistant's answer")


def test_a_line_holds_a_text_or_a_prompt_and_its_completion_or_messages_gzipped_or_not(tmp_path):
    """Catches a missed field or one that is null, chats in TRL's format refused, a loss that covers their prompt."""
    turns = messages([("user", "q"), ("assistant", "a"), ("user", "r"), ("bot", "b")])["messages"]
    trl = jsonl([dict(prompt=turns[:n], completion=turns[n:]) for n in (3, 1)])
    lines = trl + jsonl([{"text": "t"}, PAIR, CHAT, PAIR | {"text": None}, CHAT | {"prompt": "p"}, {"text": ""},
                         {"text": "t"} | PAIR, messages([("user", "not answered")])])
    write(tmp_path, {"plain/a.jsonl": lines, "packed/a.jsonl.gz": gzip.compress(lines.encode())})
    one, two, *found = list(data.read_records([tmp_path / "plain"], CHATML))
    assert one.text == two.text and one.parts[1:] == (("b<|im_end|>\n", True),) and two.parts[1][1]
    assert [record.kind for record in found] == "text completion chat completion chat text".split()
    assert found[0].parts == (("t", True),)
    assert found[1].parts == (("he", False), ("ll", True)) and found[1].text == "hell"
    for path in ("packed", "packed/a.jsonl.gz"):
        assert list(data.read_records([tmp_path / path], CHATML)) == [one, two, *found]


def test_a_json_file_is_read_as_lines_are(tmp_path):
    """Bug: a JSON array or object, a byte order mark or ShareGPT's role names are trained on as raw text."""
    turns = [("human", "q\u2028"), ("gpt", "a")]
    shared = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    chats = [shared, shared | {"system": "s"}, PAIR]
    same = [("system", "s"), ("user", "q\u2028"), ("assistant", "a")]
    want = records_of(tmp_path, [messages(same[1:]), messages(same), PAIR])
    for content, n in ((json.dumps(chats, indent=1), 3), (jsonl(chats), 3), (json.dumps(shared, indent=1), 1)):
        write(tmp_path, {"a.json": content, "b.txt": "\ufefftext"})
        assert list(data.read_records([tmp_path / "a.json"], CHATML)) == want[:n]
    assert documents_in([tmp_path / "b.txt"]) == ["text"]
    for content, where in (('[{"text": "t"}, {"text": 7}]', "element 2"), ('["half', "line 1")):
        write(tmp_path, {"a.json": content})
        refusal(lambda: documents_in([tmp_path / "a.json"]), tmp_path / "a.json", where)


def test_a_few_chats_that_the_template_refuses_are_left_out(tmp_path, capsys):
    """Bug: one odd chat in a million ends the run, or half of the data is dropped with only a warning."""
    bad = messages([("refused", "q"), ("assistant", "a")])
    found = records_of(tmp_path, [CHAT] * 4 + [bad] + [CHAT] * 14 + [bad] + [PAIR] * 99)
    assert [record.kind for record in found] == ["chat"] * 18 + ["completion"] * 99
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"2 of 20 chats; the first is {tmp_path}/a.jsonl, line 5: " in said
    write(tmp_path, {"b.jsonl": jsonl([bad] + [CHAT] * 6)})
    refusal(lambda: list(data.read_records([tmp_path], CHATML)), "3 of 27 chats", tmp_path / "a.jsonl", "line 5")


def test_answers_before_the_first_question_are_left_out(tmp_path):
    """Bug: training aborts at the parts of long ShareGPT chats, of which a third begin with an answer."""
    strict = ChatTemplate("strict", "{% if messages and messages[0].role == 'assistant' %}"
                          "{{ raise_exception('no question') }}{% endif %}" + CHATML.source, {})
    turns = [{"from": role, "value": text} for role, text in (("gpt", "a"), ("gpt", "b"), ("human", "q"), ("gpt", "c"))]
    trl = dict(prompt=[dict(role="assistant", content="x"), dict(role="user", content="q")],
               completion=[dict(role="assistant", content="c")])
    found = records_of(tmp_path, [dict(conversations=turns), trl, CHAT], strict)
    assert [record.parts[-1][0] for record in found] == ["c<|im_end|>\n"] * 2 + ["a<|im_end|>\n"]
    assert found[0].text == found[1].text and found[0].text.startswith("<|im_start|>user\nq")


def test_texts_with_special_tokens_are_counted(chatty, tmp_path, capsys):
    """Bug: a chat that was rendered before is spelled out, and the heads look bad after hours."""
    write(tmp_path, {"a.jsonl": jsonl([{"text": f"<|im_start|>user {i}"} for i in range(3)] + [{"text": "plain"}] * 40
                                      + [{"prompt": "<|im_start|>", "completion": "a"}] * 9)})
    data.encode_splits([tmp_path / "a.jsonl"], data.SPLITS[:1], chatty)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "3 of the texts contain special tokens, such as <|im_start|>" in said


@pytest.mark.parametrize("line", [
    "{", "7", '{"text": 7}', b'{"text": "\xff"}', "[" * 100_000, {"prompt": "p"}, {"messages": ["hello", "you"]},
    messages([("user", "q"), ("assistant", None)]), {"messages": [dict(role="user", content="q"), dict(content="a")]},
    messages([("user", [dict(type="image_url")]), ("assistant", "a")]), CHAT | {"tools": "{"}], ids=range(11))
def test_a_broken_line_is_refused_by_its_number(line, tmp_path):
    """Catches a KeyError or a RecursionError from a single bad line."""
    line = json.dumps(line) if isinstance(line, dict) else line
    line = line if isinstance(line, bytes) else line.encode()
    write(tmp_path, {"a.jsonl": b'{"text": "fine"}\n\n' + line + b"\n"})
    refusal(lambda: list(data.read_records([tmp_path], CHATML)), tmp_path / "a.jsonl", "line 3")


def test_messages_without_a_template_odd_templates_and_damaged_files_are_refused(tmp_path):
    """Catches chats that are silently skipped, a misplaced loss mask, a truncated file that is accepted."""
    write(tmp_path, {"b.jsonl": jsonl([PAIR] * 50 + [CHAT])})
    refusal(lambda: documents_in([tmp_path / "b.jsonl"]), tmp_path / "b.jsonl", "line 51", "chat template")
    odd = ChatTemplate("odd", "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", {})
    refusal(lambda: documents_in([tmp_path / "b.jsonl"], template=odd), "does not render a prefix", "line 51")
    whole = gzip.compress(jsonl([{"text": str(i)} for i in range(5000)]).encode())
    for content in (whole[:len(whole) // 2], whole[:100] + bytes(50) + whole[150:]):
        write(tmp_path, {"a.jsonl.gz": content})
        refusal(lambda: documents_in([tmp_path / "a.jsonl.gz"]), tmp_path / "a.jsonl.gz")


@pytest.mark.parametrize("name, variables, thought, counted", [
    ("Qwen3", {}, "ll", ["<think>\nll\n</think>\n\nhe<|im_end|>\n"]),
    ("Qwen3", {"enable_thinking": False}, None, ["he<|im_end|>\n"]),
    ("Qwen3", {"enable_thinking": False}, "ll", ["ll\n</think>\n\nhe<|im_end|>\n"]),
    ("ChatML", {}, "ll", [f"<think>\nll\n</think>\n\n{text}<|im_end|>\n" for text in ("hell", "he")]),
    ("DeepSeek-R1-Distill", {}, "ll", ["hell<｜end▁of▁sentence｜>", "he<｜end▁of▁sentence｜>"]),
    ("DeepSeek-LLM", {}, None, [" hell<｜end▁of▁sentence｜>", " he<｜end▁of▁sentence｜>"])])
def test_the_loss_begins_where_a_chat_leaves_the_prompt(name, variables, thought, counted, tmp_path):
    """Bug: all chats are refused where the prompt opens a block that the template does not render again; heads trained
    on the user's text, the template's, a greeting that no prompt asks for, what has no answer, half a <tool_call>."""
    encoding = save_family(tmp_path, name)
    encoding.template.variables |= variables
    think = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    turns = [("user", "q"), ("assistant", f"{think}hell"), ("user", "2"), ("assistant", f"{think}he")]
    greeting = [("assistant", "a greeting")] * (name == "ChatML")
    [record] = records_of(tmp_path, [messages([*greeting, *turns, ("user", "bye")])], encoding.template)
    assert [text for text, in_loss in record.parts if in_loss] == counted
    assert record.text == encoding.template.render(messages(turns)["messages"], add_generation_prompt=False)
    for text in ("<tool_call>2", "[b]", "he"):
        assert data.shared_length("q<|im_end|>\n<think>\n", f"q<|im_end|>\n{text}") == len("q<|im_end|>\n")
    assert data.shared_length("Assistant", "Assistants") == len("Assistant")


def test_tools_their_calls_and_contents_in_parts_reach_the_template(tmp_path, capsys):
    """Bug: a line's tools are dropped without a word, a null content beside tool calls ends the run."""
    tool = ChatTemplate("tool", "{{ tools | tojson }}" + CHATML.source, {})
    line = {"tools": [{"name": "f"}], "messages": [
        dict(role="user", content=[dict(type="text", text="q"), dict(type="text", text="r")]),
        dict(role="assistant", content=None, tool_calls=[dict(function=dict(name="f", arguments="{}"))])]}
    texts = [record.text for record in records_of(tmp_path, [line, line | {"tools": '[{"name": "f"}]'}, CHAT], tool)]
    assert texts[0] == texts[1] and texts[0].startswith('[{"name": "f"}]<|im_start|>user\nqr<|im_end|>\n')
    assert texts[2].startswith("null") and not capsys.readouterr().err
    deaf = ChatTemplate(tmp_path / "deaf", CHATML.source, {})
    assert len(documents_in([tmp_path / "a.jsonl"], template=deaf)) == 3
    assert "deaf: the chat template ignores tools" in (said := capsys.readouterr().err) and said.count("\n") == 1


def test_a_prompt_that_a_template_refuses_is_named_by_its_line(tmp_path):
    """Bug: an error hours later, or one that names no line; tools of prompts that are dropped without a word."""
    tools = [{"name": "f"}]
    turns = CHAT["messages"]
    lines = [CHAT | {"tools": tools}, dict(prompt="q", tools=json.dumps(tools)), dict(prompt=turns, tools="")]
    write(tmp_path, {"a.jsonl": jsonl(lines), "b.jsonl": "\n" + jsonl([CHAT, messages([("refused", "q")])]),
                     "c.jsonl": jsonl([dict(prompt="q"), lines[1]])})
    found = read_prompt_file(tmp_path / "a.jsonl", template=CHATML)
    said = [turns, [dict(role="user", content="q")], turns]
    assert [prompt[:3] for prompt in found] == list(zip(said, (dict(tools=tools), dict(tools=tools), {}), [None] * 3))
    refusal(lambda: read_prompt_file(tmp_path / "b.jsonl", template=CHATML), "line 3", "no such role")
    refusal(lambda: read_prompt_file(tmp_path / "c.jsonl", "--chat"), "line 2", "tools need --chat")


def test_written_ids_are_read_as_they_are_in_their_own_format_only(chatty, tmp_path):
    """Bug: an answer is encoded anew to other ids; turns that do not continue each other are one text; the ids of
    another tokenizer or template are trained on; the turns of a chat are in both splits."""
    key, base = data.format_key(chatty), CHAT | {"ids": [[1, 2], [3, 4], [1, 2, 3, 4, 5], [6], [7], [8, 9]]}
    [other] = records_of(tmp_path, [base | {"format": "other"}], CHATML, key)
    assert other.kind == "chat"
    [whole] = records_of(tmp_path, [base | {"format": key}], CHATML, key)
    split = data.split_of(whole.text)
    found = data.load_tokens([tmp_path / "a.jsonl"], chatty, split)
    assert found.ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9] and found.starts.tolist() == [0, 6]
    assert np.flatnonzero(found.loss_mask).tolist() == [2, 3, 5, 7, 8]
    chatty.template = ChatTemplate("other", CHATML.source, {"enable_thinking": False})
    assert data.format_key(chatty) != key
    for ids in ([[1, "2"]], None, [[2**32]]):
        refusal(lambda: records_of(tmp_path, [base | {"format": key, "ids": ids}], CHATML, key), "line 1")


@pytest.fixture
def library(tmp_path):
    """A folder of 200 different documents of 30 to 50 letters."""
    rng = random.Random(3)
    texts = ["".join(rng.choices("abcdefgijkmnopqrstuvxyz", k=rng.randint(30, 50))) for _ in range(200)]
    return write(tmp_path / "library", {f"{i:03}.txt": text for i, text in enumerate(texts)})


def test_documents_are_split_by_their_text_alone(library, tiny, tmp_path):
    documents_of = lambda tokens: tiny.decode(tokens.ids.tolist()).split(EOT)[:-1]
    train, heldout = (documents_of(data.load_tokens([library], tiny, split)) for split in ("train", "heldout"))
    assert sorted(train + heldout) == sorted(documents_in([library])) and 3 < len(heldout) < 20
    write(tmp_path, {"all.jsonl": jsonl({"text": text} for text in documents_in([library]))})
    assert documents_of(data.load_tokens([tmp_path / "all.jsonl"], tiny, "heldout")) == heldout
    write(tmp_path, {"one.txt": heldout[0]})
    refusal(lambda: data.load_tokens([tmp_path / "one.txt"], tiny, "train"), tmp_path / "one.txt", "train")


def test_prompts_with_completions_are_in_one_split_whole_and_texts_in_pieces(tmp_path, monkeypatch):
    """Catches a completion split in two, a shifted loss mask, or neighbouring pieces that are not joined."""
    monkeypatch.setattr(data, "PIECE", 10)
    long = "".join(random.Random(0).choices("abcdefgijk", k=995))
    write(tmp_path, {"a.jsonl": jsonl([{"prompt": long, "completion": long[::-1]}, {"text": long}])})
    found = list(data.split_records([tmp_path / "a.jsonl"], data.SPLITS))
    assert [record.text for _, record in found if record.kind == "completion"] == [long + long[::-1]]
    texts = [(split, record.text) for split, record in found if record.kind == "text"]
    assert "".join(text for _, text in texts) == long and len(texts) > 3
    assert all(one != next for (one, _), (next, _) in zip(texts, texts[1:]))
    assert {split for split, _ in texts} == set(data.SPLITS)


def test_texts_and_completions_have_a_prefix_and_an_end_and_special_text_only_where_it_is_meant(tiny):
    """Catches a BOS in the loss, an end that is not, and text that is encoded to special tokens."""
    tiny.prefix = [7, 8]
    encoded = lambda *record: [array.tolist() for array in data.encode_record(data.Record(*record), tiny)]
    ids, counts = encoded(((f"he{EOT}", True),))
    assert ids == [7, 8, *tiny.encode(f"he{EOT}"), 261] and counts == [False] * 2 + [True] * (len(ids) - 2)
    ids, counts = encoded((("he", False), (f"ll{EOT}", True)), "completion")
    assert ids == [7, 8, 256, 257, 261, 261]  # not 258, "hell": no token spans the end of the prompt
    assert counts == [False] * 3 + [True] * 3
    assert encoded((("he", False), (EOT, True)), "chat") == [[256, 261], [False, True]]
    tiny.prefix = [261]  # ends the previous document
    assert encoded((("he", True),))[0] == [*tiny.encode("he"), 261]


@pytest.fixture
def paths(library, tmp_path):
    """Texts, completions and conversations."""
    lines = [{"prompt": f"p{i}", "completion": "c" * (i % 7)} for i in range(60)]
    lines += [messages([("user", f"q{i}"), ("assistant", "hell")]) for i in range(60)]
    return [library, *write(tmp_path / "lines", {"a.jsonl": jsonl(lines)}).iterdir()]


def same(tokens, other):
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(tokens[:3], other[:3], strict=True))


def store(file, paths, encoding):
    return data.store_tokens(file, data.tokens_key(paths, encoding), paths, encoding, 2**20)


def test_stored_tokens_are_used_again_until_what_they_are_of_changes(paths, chatty, tmp_path, monkeypatch):
    """Catches tokenising again where data was touched, copied or renamed; stale tokens, mixed-up splits, odd ids."""
    file = tmp_path / "tokens.pt"
    first = store(file, paths, chatty)
    assert all(same(first[split], data.load_tokens(paths, chatty, split)) for split in data.SPLITS)
    refusal(lambda: data.store_tokens(tmp_path / "small.pt", "", paths, chatty, 258), "ids of 258 and up")
    calls, encode = [], data.encode_splits
    monkeypatch.setattr(data, "encode_splits", lambda *given: calls.append(1) or encode(*given))
    moved = [shutil.copy(paths[1], tmp_path / "moved.jsonl"), shutil.copytree(paths[0], tmp_path / "moved")]
    os.utime(paths[1], ns=(0, 0))
    for known in ([str(path) for path in paths], moved):
        again = store(file, known, chatty)
        assert all(same(first[split], again[split]) for split in data.SPLITS) and not calls
    (paths[0] / "001.txt").write_text("another text")
    store(file, paths, chatty)
    chatty.template = ChatTemplate("other", CHATML.source + " ", {})
    store(file, paths, chatty)
    chatty.prefix = [7]
    assert store(file, paths, chatty)["train"].ids[0] == 7 and len(calls) == 3
    for content in (b"", file.read_bytes()[:1000], b"no tokens"):
        file.write_bytes(content)
        refusal(lambda: data.open_tokens(file), file)
        assert len(store(file, paths, chatty)["train"].ids)


def draft_vocabulary(counts, n):
    """The draft vocabulary chosen for text that has id i counts[i] times."""
    ids = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    chosen, model = [], SimpleNamespace(config=SimpleNamespace(vocab_size=len(counts)))
    heads = SimpleNamespace(model=model, set_vocabulary=chosen.extend)
    data.set_draft_vocabulary(heads, ids.astype(np.uint32), n, log=lambda line: None)
    return chosen


def test_a_draft_vocabulary_covers_most_of_the_text_with_few_ids():
    """Catches the rarest ids being chosen, and a size that is rounded down, no multiple, or nearly all."""
    counts = [1] * 3500 + [100] * 500  # 97% of 53,500 tokens: the last 500 ids and 1,895 others
    counts += [0] * (8192 - len(counts))
    assert draft_vocabulary(counts, None) == [*range(3500, 4000), *range(3072 - 500)]
    for n in (0, 8, 501):
        assert draft_vocabulary(counts, n) == [*range(3500, 4000), 0][:n]
    for V, size in ((2049, 1024), (2048, 0)):
        assert draft_vocabulary([2] * 1000 + [0] * (V - 1000), None) == list(range(size))


@pytest.mark.parametrize("N, n", [(300, 4), (12 * 16 + 3, 3), (17, 3)])
def test_a_pass_reads_all_windows_once_in_an_order_of_the_seed(N, n):
    """Catches windows that repeat or overlap within a pass, an order that depends on earlier steps or never changes."""
    tokens = data.Tokens(np.arange(N).astype(np.uint32), np.ones(N, bool), np.zeros(1, np.int64))
    batch = lambda step, seed=3, **part: data.window_batch(tokens, n, 16, 1, seed, step, **part)[0]
    rows = torch.cat([batch(step) for step in range(20)])
    assert ((rows.diff(dim=1) - 1) % N == 0).all()
    first, second = rows[:2 * (N // 16), :16].chunk(2)
    assert len(first.unique()) == len(second.unique()) == first.numel() > N - 16
    jumps = [one[:, 0].diff() % N for one in (first, second)]
    assert N == 17 or not torch.equal(*jumps)  # equal for the same order from another token on
    data.window_starts.cache_clear()  # as in a resumed run
    assert torch.equal(batch(2), rows[2 * n:3 * n]) and not torch.equal(batch(2), batch(2, seed=4))
    assert torch.equal(batch(1, mine=slice(1, None, 2)), rows[n:2 * n][1::2])
    refusal(lambda: data.window_batch(tokens, 1, 16, N - 15, 3, 0), N + 1, N)


def test_windows_carry_their_loss_masks_and_the_numbers_of_their_documents():
    """Catches wrong document indices, the last document read as one with the first, and states of other tokens."""
    rng = np.random.default_rng(0)
    begins = np.append(True, rng.random(299) < 0.2)
    states = torch.arange(300).bfloat16().view(torch.int16)[:, None].expand(-1, 2).numpy()
    tokens = data.Tokens(np.arange(300).astype(np.uint32), rng.random(300) < 0.5, np.flatnonzero(begins), states)
    ids, loss_mask, numbers, hidden = data.window_batch(tokens, 90, 15, 2, 3, 0)
    assert torch.equal(hidden, ids[:, :-1, None].expand(-1, -1, 2).bfloat16())
    assert (ids.dtype, loss_mask.dtype, numbers.dtype) == (torch.int64, torch.bool, torch.int64)
    assert (ids[:, 1:] == 0).any()  # a window goes on at the first document
    assert np.array_equal(loss_mask, tokens.loss_mask[ids])
    assert np.array_equal(numbers.diff(dim=1) != 0, begins[ids[:, 1:]]) and not numbers[:, 0].any()
    one = tokens._replace(starts=np.zeros(1, np.int64))
    for step, window in enumerate(ids):
        assert (data.window_batch(one, 1, 15, 2, 3, step)[2] is None) == bool((window[1:] != 0).all())


def test_prompts_of_texts_are_windows_of_single_documents_one_of_each_while_they_last(library, tiny):
    """Catches prompts that span documents or end with a text's last token, and documents used twice."""
    tiny.prefix = [7]
    tokens = data.load_tokens([library], tiny, "heldout")
    texts = [[7, *tiny.encode(record.text)] for _, record in data.split_records([library], ["heldout"])]
    long = [i for i, text in enumerate(texts) if len(text) >= 33]
    assert 2 < len(long) < len(texts)
    found = data.prompts(tokens, 2 * len(long), 33)
    inside = [[i for i in long for at in range(len(texts[i]) - 32) if texts[i][at:at + 33] == p] for p in found]
    assert sorted(inside[:len(long)]) == sorted(inside[len(long):]) == [[i] for i in long]
    assert found[:3] == data.prompts(tokens, 3, 33) != data.prompts(tokens, 3, 33, seed=1)
    longest = max(texts, key=len)
    assert data.prompts(tokens, 1, len(longest)) == data.prompts(tokens, 1, 99) == [longest]


def test_prompts_of_completions_and_conversations_end_where_an_answer_begins(chatty, tmp_path):
    """Catches a prompt that contains part of the answer, or the start of a long prompt instead of its end."""
    two = [[("user", c), ("assistant", "hell"), ("user", c + c), ("assistant", "he")] for c in "abcdefgh" * 5]
    completions = [{"prompt": 4 * c, "completion": "0" * 50} for c in "stuvwxyz" * 5]
    long = [{"prompt": 101 * c, "completion": "0"} for c in "ijk"]
    write(tmp_path, {"a.jsonl": jsonl([*map(messages, two), *completions, *long])})
    tokens = data.load_tokens([tmp_path / "a.jsonl"], chatty, "train")
    found = {chatty.decode(prompt) for prompt in data.prompts(tokens, 500, 25)}
    opening = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    both = [opening.format(c) + f"hell<|im_end|>\n{opening.format(c + c)}" for c in "abcdefgh"]
    allowed = {opening.format(c) for c in "abcdefgh"} | set(both)
    allowed |= {4 * c for c in "stuvwxyz"} | {100 * c for c in "ijk"}
    assert found <= allowed and len(found) > 15 and any(text in found for text in both)
    tokens_of = lambda *mask: data.Tokens(np.arange(5, dtype=np.uint32), np.array(mask) > 0, np.array([0]))
    assert data.prompts(tokens_of(1, 1, 0, 0, 1), 20, 2) == [[0, 1, 2, 3]] * 20
    refusal(lambda: data.prompts(tokens_of(0, 0, 0, 0, 0), 1, 1))
