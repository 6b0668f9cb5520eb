"""corpus.py and data.py: text comes back whole from its documents' ids, splits never overlap, and the loss mask is
exact."""

import gzip
import json
import os
import random

import numpy as np
import pytest
import torch

from hf.chat import ChatTemplate
from hf.tokenizer import load_encoding
from model import InputError
from training import corpus, data

EOT = "<|endoftext|>"
CHATML = ChatTemplate("chatml", (
    "{% for m in messages %}{% if m.role == 'refused' %}{{ raise_exception('no such role') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"), {})
FORGETFUL = ChatTemplate("forgetful", (  # as Qwen3's: what an assistant thought is in the last message only
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"), {})
TURNS = [("system", "be he"), ("user", "hello"), ("assistant", "<think>ll</think>hell"), ("user", "2"),
         ("assistant", "he")]


def tiny_spec():
    """A tokenizer of the 256 bytes under GPT-2's ids, five merges, and one special token after a gap."""
    symbols = map(chr, (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 256 + 68)))
    vocab = {symbol: i for i, symbol in enumerate([*symbols, "he", "ll", "hell", "Ġw", "ĠĠ"])}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": 300, "content": EOT, "special": True}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": ["h e", "l l", "he ll", "Ġ w", "Ġ Ġ"]},
    }


def save(folder, spec):
    (folder / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    return folder


@pytest.fixture
def tiny(tmp_path):
    return load_encoding(save(tmp_path, tiny_spec()))


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def refusal(call, *names):
    """The message of the InputError that `call` raises: one line that contains all of `names`."""
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and "expected" in message and ";" in message
    assert all(str(name) in message for name in names), message
    return message


def documents_in(paths, **options):
    return [record.text for record in corpus.read_records(paths, **options)]


def test_builtin_corpus_is_large_and_its_splits_share_nothing():
    train, heldout = corpus.builtin_corpus("train"), corpus.builtin_corpus("heldout")
    assert not set(train) & set(heldout)
    assert train == sorted(train) and heldout == corpus.builtin_corpus("heldout")
    assert 0.03 < len(heldout) / (len(train) + len(heldout)) < 0.08
    assert sum(file.stat().st_size for file in train) > 8e6  # without its tests the library still has this much
    assert not any("site-packages" in file.parts or file.suffix != ".py" for file in train + heldout)
    assert len(documents_in(heldout)) == len(heldout)


def test_builtin_corpus_splits_by_name_and_leaves_out_what_is_not_the_librarys_own(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    refusal(lambda: corpus.builtin_corpus("train"), tmp_path)
    write(tmp_path, {f"lib/m{i}.py": "x = 1\n" for i in range(60)})
    foreign = ("site-packages/a.py", "lib/dist-packages/b.py", "__pycache__/c.py", "_sysconfigdata__x.py", "notes.txt")
    write(tmp_path, dict.fromkeys(foreign, "x") | {"empty.py": "", "latin1.py": b"# \xe9"})
    train, heldout = corpus.builtin_corpus("train"), corpus.builtin_corpus("heldout")
    assert sorted(train + heldout) == sorted((tmp_path / "lib").glob("m*.py"))
    # These names are fixed: a split that moves between runs would train on what is later held out.
    assert [file.name for file in heldout] == "m0.py m2.py m25.py m37.py".split()
    refusal(lambda: corpus.builtin_corpus("test"), "'test'")


def test_builtin_corpus_leaves_out_tables_data_and_files_of_literals(tmp_path, monkeypatch):
    """Catches a rule that drops code: docstrings and comments count as none of a file's literals."""
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    doc = 40 * "A long text, with 'quotes' and 12 numbers. "
    code = f'def f(x):\n    """{doc}"""\n    return x + 1  # "not code" 2 3\n'
    kept = {f"{folder}/m{i}.py": code for folder in ("json", "importlib/metadata", "database") for i in range(30)}
    left_out = {name: code for name in ("encodings/a.py", "pydoc_data/b.py", "test/xmltestdata/c.py", "x/data03/d.py")}
    write(tmp_path, kept | left_out | {"table.py": "T = [" + "1, 0x2f, 'abc', " * 20 + "]\n"})
    found = {file.relative_to(tmp_path).as_posix() for split in corpus.SPLITS for file in corpus.builtin_corpus(split)}
    assert found == set(kept)


def test_documents_come_from_files_folders_jsonl_lines_and_patterns_once_and_in_order(tmp_path):
    """Would catch: files read twice where ** fits a folder and what is in it, and a file a[1].txt that cannot be
    named."""
    documents = lambda *names: documents_in([f"{tmp_path}/{name}" for name in names])
    lines = '{"text": "one"}\n\n{"text": "two\\nlines", "id": 2}\r\n{"text": ""}\n'
    write(tmp_path, {"one/a.py": "a", "one/b/c.md": "é\r\n", "one/b/d.bin": "no", "one/e.txt": "", "one/f.txt": b"\xff",
                     "one/odd.xyz": "odd", "one/g.jsonl": lines, "one/h.txt/i.txt": "in a folder"})
    assert documents("one") == ["a", "é\r\n", "one", "two\nlines", "in a folder"]
    assert documents("one/odd.xyz", "one/a.py") == ["odd", "a"]
    write(tmp_path,
          {"b.txt": "b", "a[1].txt": "a1", "a1.txt": "other", "deep/er/c.odd": "c", "deep/d.md": "d", "x.bin": b"\xff"})
    assert documents("*.txt") == ["other", "a1", "b"] and documents("a[1].txt") == ["a1"]
    assert documents("deep/**") == ["d", "c"] and documents("d?ep", "[bx].*") == ["d", "b"]
    refusal(lambda: documents("*.rst"), f"{tmp_path}/*.rst", "pattern")
    refusal(lambda: documents("x.*"), f"{tmp_path}/x.*", "UTF-8")


PAIR = {"prompt": "he", "completion": "ll"}
CHAT = {"messages": [dict(role="user", content="q"), dict(role="assistant", content="a")]}


def jsonl(values):
    return "".join(json.dumps(value) + "\n" for value in values)


def test_a_line_holds_a_text_or_a_prompt_and_its_completion_or_messages_gzipped_or_not(tmp_path):
    """Would catch: a field that is overlooked, or a kind that a column of nulls beside it hides."""
    lines = jsonl([{"text": "t"}, PAIR, CHAT, PAIR | {"text": None}, CHAT | {"prompt": "p"}, {"text": ""},
                   {"text": "t"} | PAIR])
    write(tmp_path, {"plain/a.jsonl": lines, "packed/a.jsonl.gz": gzip.compress(lines.encode())})
    found = list(corpus.read_records([tmp_path / "plain"], CHATML))
    assert [record.kind for record in found] == "text completion chat completion chat text".split()
    assert found[0].parts == (("t", True),)
    assert found[1].parts == (("he", False), ("ll", True)) and found[1].text == "hell"
    for path in ("packed", "packed/a.jsonl.gz", "pack*/*.gz"):
        assert list(corpus.read_records([tmp_path / path], CHATML)) == found


def test_documents_as_text_join_prompts_and_completions_and_refuse_messages_at_once(tmp_path):
    """Would catch: training.base learning completions without their prompts, or skipping conversations in silence."""
    write(tmp_path, {"a.jsonl": jsonl([PAIR, {"text": "t"}]), "b.jsonl": jsonl([PAIR] * 500 + [CHAT])})
    assert documents_in([tmp_path / "a.jsonl"]) == ["hell", "t"]
    refusal(lambda: documents_in([tmp_path / "b.jsonl"]), tmp_path / "b.jsonl", "line 501",
            "chat template")


@pytest.mark.parametrize("name, content", [
    ("missing.txt", None), ("empty.txt", ""), ("latin1.txt", b"caf\xe9"), ("blank.jsonl", "\n \n"),
    ("folder", {"folder/a.bin": "x", "folder/b.txt": "", "folder/c.py": b"\xff"})])
def test_paths_without_a_document_are_refused_by_name(name, content, tmp_path):
    if content is not None:
        write(tmp_path, content if isinstance(content, dict) else {name: content})
    refusal(lambda: documents_in([tmp_path / name]), tmp_path / name)


def messages(turns):
    return {"messages": [dict(role=role, content=content) for role, content in turns]}


@pytest.mark.parametrize("line", [
    "{", "7", '{"txt": "a"}', '{"text": 7}', b'{"text": "\xff"}', "plain text", "[" * 100_000, [[[]]],
    {"prompt": "p"}, {"prompt": "p", "completion": 7}, {"prompt": ["p"], "completion": "c"},
    {"messages": "hello"}, {"messages": []}, {"messages": ["hello", "you"]}, {"conversations": CHAT["messages"]},
    messages([("user", "q")]), messages([("assistant", "greetings")]), messages([("user", "q"), ("assistant", None)]),
    {"messages": [dict(role="user", content="q"), dict(content="a")]}, messages([("refused", "q"), ("assistant", "a")]),
], ids=range(20))
def test_a_file_half_of_whose_lines_are_broken_is_refused_by_their_number(line, tmp_path):
    """Would catch: a KeyError, a RecursionError or a template's own error out of one line of a million."""
    line = json.dumps(line) if isinstance(line, (dict, list)) else line
    line = line if isinstance(line, bytes) else line.encode()
    write(tmp_path, {"a.jsonl": b'{"text": "fine"}\n\n' + line + b"\n"})
    for path in (tmp_path, tmp_path / "a.jsonl"):
        refusal(lambda: list(corpus.read_records([path], CHATML)), tmp_path / "a.jsonl", "line 3", "1 of 2")


@pytest.mark.parametrize("broken", [0, 2, 3, 4])
def test_one_broken_line_in_a_hundred_is_skipped_and_said_more_are_refused(broken, tmp_path, capsys):
    """Would catch: blank lines counted as lines, a share taken the wrong way round, a skip that nobody hears of."""
    lines = [json.dumps({"text": f"t{i}"}) for i in range(300)]
    for i in range(broken):
        lines[10 * i + 4] = '{"txt": 1}' if i % 2 else "{"
    write(tmp_path, {"a.jsonl": "\n\n".join(lines)})
    said = []
    if broken == 4:
        message = refusal(lambda: documents_in([tmp_path], log=said.append), tmp_path / "a.jsonl",
                          "4 of 300")
        assert all(f"line {n}" in message for n in (9, 29, 49)) and "69" not in message and "not JSON" in message
        assert said == []
        return
    found = documents_in([tmp_path], log=said.append)
    assert found == [f"t{i}" for i in range(300) if i not in range(4, 4 + 10 * broken, 10)]
    assert len(said) == bool(broken)
    assert all(text in line for line in said for text in (str(tmp_path / "a.jsonl"), f"{broken} of 300", "line 9 "))
    assert documents_in([tmp_path]) == found
    assert capsys.readouterr().err.splitlines() == said  # stderr, where no log is given


def test_a_damaged_gz_is_refused_by_name(tmp_path):
    """Would catch: EOFError and BadGzipFile, which are not InputErrors, or half a file that is taken for all of it."""
    whole = gzip.compress(jsonl([{"text": str(i)} for i in range(5000)]).encode())
    for content in (whole[: len(whole) // 2], b"no gzip", whole[:100] + bytes(50) + whole[150:]):
        write(tmp_path, {"a.jsonl.gz": content})
        refusal(lambda: documents_in([tmp_path / "a.jsonl.gz"]), tmp_path / "a.jsonl.gz")


@pytest.fixture
def chatty(tmp_path):
    """tiny with the two tokens of ChatML, 301 and 302."""
    spec = tiny_spec()
    added = {"<|im_start|>": 301, "<|im_end|>": 302}
    spec["added_tokens"] += [dict(id=index, content=text, special=True) for text, index in added.items()]
    return load_encoding(save(tmp_path, spec))


def conversation(encoding, turns, counted):
    """(ids, counts) of a ChatML conversation, put together token by token; `counted` says which turns count."""
    ids, counts = [], []
    for i, (role, content) in enumerate(turns):
        opening = [301, *encoding.encode(f"{role}\n")]
        said = [*encoding.encode(content), 302, *encoding.encode("\n")]
        ids += opening + said
        counts += [False] * len(opening) + [i in counted] * len(said)
    return ids, counts


@pytest.mark.parametrize("template, turns, counted, forgotten", [
    (CHATML, TURNS, (2, 4), None),
    (CHATML, [*TURNS, ("user", "bye")], (2, 4), None),  # what nobody answers is dropped
    (CHATML, [("assistant", "a greeting"), *TURNS[1:]], (2, 4), None),
    (CHATML, TURNS[:3], (2,), None),
    (FORGETFUL, TURNS, (4,), 2),  # its first answer is not as it was said: it does not count
    (FORGETFUL, TURNS[:3], (2,), None),
], ids="two trailing-user greeting one forgetful forgetful-one".split())
def test_exactly_what_the_assistant_says_counts(template, turns, counted, forgotten, chatty, tmp_path):
    """Would catch: heads trained on the user's words, on the template's, or on an answer that was cut later on."""
    write(tmp_path, {"a.jsonl": jsonl([messages(turns)])})
    [record] = corpus.read_records([tmp_path / "a.jsonl"], template)
    ids, counts, _ = data.encode_record(record, chatty)
    shown = [(role, "hell" if i == forgotten else content) for i, (role, content) in enumerate(turns)
             if content != "bye"]
    expected = conversation(chatty, shown, counted)
    assert (ids.tolist(), counts.tolist()) == expected and sum(expected[1]) >= 3


def test_a_template_that_renders_no_prefix_breaks_the_line(tmp_path):
    """Would catch: marks in the wrong place, where a prompt is not how the conversation with its answer begins."""
    odd = ChatTemplate("odd", "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", {})
    write(tmp_path, {"a.jsonl": jsonl([CHAT])})
    refusal(lambda: list(corpus.read_records([tmp_path / "a.jsonl"], odd)), "does not render a prefix", "line 1")


@pytest.fixture
def library(tmp_path):
    """A folder of 200 documents of 30 to 50 letters, no two alike."""
    rng = random.Random(3)
    texts = ["".join(rng.choices("abcdefgijkmnopqrstuvxyz", k=rng.randint(30, 50))) for _ in range(200)]
    return write(tmp_path / "library", {f"{i:03}.txt": text for i, text in enumerate(texts)})


def documents_of(tokens, encoding):
    return encoding.decode(tokens.ids.tolist()).split(EOT)[:-1]


def test_user_documents_are_split_by_their_text_alone(library, tiny, tmp_path):
    train, heldout = (documents_of(data.load_tokens([library], tiny, split), tiny) for split in ("train", "heldout"))
    assert sorted(train + heldout) == sorted(documents_in([library])) and 3 < len(heldout) < 20
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents_in([library]))
    write(tmp_path, {"all.jsonl": lines})
    assert documents_of(data.load_tokens([tmp_path / "all.jsonl"], tiny, "heldout"), tiny) == heldout
    refusal(lambda: data.load_tokens([library], tiny, "dev"), "'dev'")
    for split, document in (("train", heldout[0]), ("heldout", train[0])):
        write(tmp_path, {"one.txt": document})
        refusal(lambda: data.load_tokens([tmp_path / "one.txt"], tiny, split), tmp_path / "one.txt", split)
        refusal(lambda: data.store_tokens(tmp_path / "out", [tmp_path / "one.txt"], tiny), split)


def test_prompts_with_completions_are_in_one_split_whole_and_texts_in_pieces(tiny, tmp_path, monkeypatch):
    """Would catch: half of a completion held out, its mark moved, or neighbouring pieces torn apart."""
    monkeypatch.setattr(corpus, "PIECE", 10)
    long = "".join(random.Random(0).choices("abcdefgijk", k=995))
    write(tmp_path, {"a.jsonl": jsonl([{"prompt": long, "completion": long[::-1]}, {"text": long}])})
    found = list(corpus.split_records([tmp_path / "a.jsonl"], corpus.SPLITS))
    assert [record.text for _, record in found if record.kind == "completion"] == [long + long[::-1]]
    texts = [(split, record.text) for split, record in found if record.kind == "text"]
    assert "".join(text for _, text in texts) == long and len(texts) > 3
    assert all(one != next for (one, _), (next, _) in zip(texts, texts[1:]))
    assert {split for split, _ in texts} == set(corpus.SPLITS)


@pytest.mark.parametrize("last, dtype", [(2**16 - 1, np.uint16), (2**16, np.uint32)])
def test_ids_beyond_16_bits_are_kept(last, dtype, tmp_path):
    spec = tiny_spec()
    spec["added_tokens"][0]["id"] = last
    tokens = data.encode_record(corpus.Record((("a", True),)), load_encoding(save(tmp_path, spec)))
    assert tokens.ids.dtype == dtype and tokens.ids.tolist() == [64, last]


def test_texts_and_completions_have_a_prefix_and_an_end_and_special_text_only_where_it_is_meant(tiny):
    """Would catch: a BOS that heads learn to guess, an end that they do not, a text that can write special tokens."""
    tiny.prefix = [7, 8]
    plain = tiny.encode
    ids, counts, _ = data.encode_record(corpus.Record(((f"he{EOT}", True),), "text"), tiny)
    assert ids.tolist() == [7, 8, *plain(f"he{EOT}"), 300] and counts.tolist() == [False] * 2 + [True] * (len(ids) - 2)
    ids, counts, _ = data.encode_record(corpus.Record((("he", False), (f"ll{EOT}", True)), "completion"), tiny)
    assert ids.tolist() == [7, 8, 256, 257, 300, 300]  # not 258, hell: a prompt's end is a token's
    assert counts.tolist() == [False] * 3 + [True] * 3
    ids, counts, _ = data.encode_record(corpus.Record((("he", False), (EOT, True)), "chat"), tiny)
    assert ids.tolist() == [256, 300] and counts.tolist() == [False, True]
    tiny.prefix = [300]  # the end of the document before
    assert data.encode_record(corpus.Record((("he", True),), "text"), tiny).ids.tolist() == [*plain("he"), 300]


@pytest.fixture
def paths(library, tmp_path):
    """Texts, completions and conversations: all that store_tokens takes but for the encoding and its template."""
    lines = [{"prompt": f"p{i}", "completion": "c" * (i % 7)} for i in range(60)]
    lines += [messages([("user", f"q{i}"), ("assistant", "hell")]) for i in range(60)]
    return [library, *write(tmp_path / "lines", {"a.jsonl": jsonl(lines)}).iterdir()]


def same(tokens, other):
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(tokens, other, strict=True))


def stop(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize("chunk", [1, 300, 10**6])
def test_stored_tokens_are_those_that_load_tokens_gives(chunk, paths, chatty, tmp_path, monkeypatch):
    """Would catch: splits mixed up, chunks out of order or lost, a document's flags beside another's ids."""
    monkeypatch.setattr(data, "CHUNK_CHARACTERS", chunk)
    said = []
    stored, meta = data.store_tokens(tmp_path / "out" / "tokens", paths, chatty, CHATML, said.append)
    assert meta["kinds"] == {"text": 200, "completion": 60, "chat": 60}
    assert all(line.startswith("tokenised ") and line.endswith("M tokens") for line in said)
    assert len(said) == {1: 320, 300: len(said), 10**6: 0}[chunk] and (chunk != 300 or 20 < len(said) < 60)
    for split in ("train", "heldout"):
        assert same(stored[split], data.load_tokens(paths, chatty, split, CHATML)), split
        assert all(isinstance(array, np.memmap) for array in stored[split]) and stored[split].ids.dtype == np.uint16
    expected = [data.encode_record(record, chatty) for split, record in corpus.split_records(paths, ["train"], CHATML)]
    assert stored["train"].ids.tolist() == [token for one in expected for token in one.ids]
    assert stored["train"].loss_mask.tolist() == [in_loss for one in expected for in_loss in one.loss_mask]
    assert stored["train"].starts.tolist() == np.cumsum([0, *(len(one.ids) for one in expected[:-1])]).tolist()
    assert sorted(file.name for file in (tmp_path / "out" / "tokens").iterdir()) == [
        "heldout.ids", "heldout.loss_mask", "heldout.starts", "meta.json", "train.ids", "train.loss_mask",
        "train.starts"]
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["tokens"]


def test_stored_tokens_are_used_again_until_a_file_the_tokenizer_or_the_template_changes(paths, chatty, tmp_path,
                                                                                         monkeypatch):
    """Would catch: hours of tokenising for each --resume, and tokens of yesterday's text."""
    out = tmp_path / "out"
    first, _ = data.store_tokens(out, paths, chatty, CHATML)
    with monkeypatch.context() as patch:
        for where, name in ((data, "encode_record"), (corpus, "read_records"), (corpus, "read_utf8")):
            patch.setattr(where, name, stop)
        again, _ = data.store_tokens(out, [str(path) for path in paths], chatty, CHATML)
        assert all(same(first[split], again[split]) for split in first)
        os.utime(paths[0] / "001.txt", ns=(0, 0))
        for call in (lambda: data.store_tokens(out, paths, chatty, CHATML),
                     lambda: data.store_tokens(out, paths[:1], chatty, CHATML)):
            with pytest.raises(KeyboardInterrupt):
                call()
    write(paths[0], {"new.txt": "something new"})
    data.store_tokens(out, paths, chatty, CHATML)
    monkeypatch.setattr(corpus, "read_records", stop)
    data.store_tokens(out, paths, chatty, CHATML)
    with pytest.raises(KeyboardInterrupt):
        data.store_tokens(out, paths, chatty, FORGETFUL)
    chatty.prefix = [7]
    with pytest.raises(KeyboardInterrupt):
        data.store_tokens(out, paths, chatty, CHATML)


def test_text_is_taken_a_chunk_at_a_time(monkeypatch):
    """Would catch: a corpus larger than memory, all of it in lists."""
    monkeypatch.setattr(data, "CHUNK_CHARACTERS", 3)
    pair = "train", corpus.Record((("ab", True),))
    taken = iter([pair] * 5)
    chunks = data.chunks(taken)
    assert next(chunks) == [pair, pair] and len(list(taken)) == 3


def copied(tokens):
    return {split: data.Tokens(*(array.copy() for array in arrays)) for split, arrays in tokens.items()}


@pytest.mark.parametrize("name, damage", [
    ("train.ids", "gone"), ("train.ids", "short"), ("train.ids", "longer"), ("train.ids", "empty"),
    ("train.loss_mask", "gone"), ("train.starts", "longer"), ("train.*", "short"), ("heldout.ids", "empty"),
    ("meta.json", "gone"), ("meta.json", "short"), ("meta.json", "empty")])
def test_stored_files_that_are_damaged_are_made_anew(name, damage, library, tiny, tmp_path):
    """Would catch: files that do not fit each other, mapped because the key is right."""
    out = tmp_path / "out"
    first = copied(data.store_tokens(out, [library], tiny)[0])
    for file in list(out.glob(name)):
        content = file.read_bytes()
        file.unlink()
        if damage != "gone":
            file.write_bytes({"short": content[:len(content) // 8 * 4], "longer": content + content,
                              "empty": b""}[damage])
    if damage == "gone" or name != "meta.json":
        refusal(lambda: data.open_tokens(out))
    stored, _ = data.store_tokens(out, [library], tiny)
    assert all(same(first[split], stored[split]) for split in first)


@pytest.mark.parametrize("meta",
                         [[], {}, {"lengths": {"train": 3}}, {"lengths": {"train": ["3", 1, 1]}, "dtype": "uint16"},
                          {"lengths": {"train": [3, 3, 1]}, "dtype": "hope"},
                          {"lengths": {"train": [3]}, "dtype": "u2"}])
def test_a_meta_json_of_another_shape_is_refused_in_one_line(meta, tmp_path):
    write(tmp_path,
          {"meta.json": json.dumps(meta), "train.ids": b"123456", "train.loss_mask": b"111", "train.starts": bytes(8)})
    with pytest.raises(InputError) as caught:
        data.open_tokens(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("moment", ["encode", "remove", "rename"])
def test_a_run_that_is_killed_leaves_nothing_that_is_taken_for_whole(moment, library, tiny, tmp_path, monkeypatch):
    """Would catch: half a corpus, or an old file beside a new one, with a key that says all is well."""
    out = tmp_path / "out"
    monkeypatch.setattr(data, "CHUNK_CHARACTERS", 100)
    old = copied(data.store_tokens(out, [library], tiny)[0])
    calls, encode, rmtree = [], data.encode_record, data.shutil.rmtree

    def encode_some(*args):
        calls.append(args)
        return encode(*args) if len(calls) < 70 else stop()

    def remove_some(folder, *args, **kwargs):
        if folder != out:
            return rmtree(folder, *args, **kwargs)
        (out / "train.loss_mask").unlink()
        stop()

    longer = [f"{text}!" for text in documents_in([library])]
    write(library, {f"{i:03}.txt": text for i, text in enumerate(longer)})
    with monkeypatch.context() as patch:
        where, name, by = {"encode": (data, "encode_record", encode_some),
                           "remove": (data.shutil, "rmtree", remove_some),
                           "rename": (os, "replace", stop)}[moment]
        patch.setattr(where, name, by)
        with pytest.raises(KeyboardInterrupt):
            data.store_tokens(out, [library], tiny)
    assert not list(tmp_path.glob("out.tmp*")) and out.exists() == (moment != "rename")
    if moment == "encode":  # what was there before is there still
        assert all(same(tokens, data.open_tokens(out)[0][split]) for split, tokens in old.items())
    if moment == "remove":
        refusal(lambda: data.open_tokens(out))
    write(tmp_path / "out.tmp1", {"train.ids": "left by a run that was killed outright"})
    stored, _ = data.store_tokens(out, [library], tiny)
    for split in old:
        assert same(stored[split], data.load_tokens([library], tiny, split)) and not same(stored[split], old[split])
    assert not list(tmp_path.glob("out.tmp*"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_line_and_no_files(library, tiny, tmp_path, monkeypatch):
    """Would catch: a traceback, and gigabytes of half-written files on a disk that is full."""
    fake = lambda file, mode: open("/dev/full" if "heldout.ids" in str(file) else file, mode)
    monkeypatch.setattr(data, "open", fake, raising=False)
    refusal(lambda: data.store_tokens(tmp_path / "new" / "out", [library], tiny), tmp_path / "new" / "out",
            "No space left")
    assert not (tmp_path / "new").exists()  # which a failed run need not leave either
    write(tmp_path, {"file": "x"})
    refusal(lambda: data.store_tokens(tmp_path / "file" / "out", [library], tiny), tmp_path / "file")


def test_a_training_split_in_which_nothing_is_in_the_loss_is_refused(chatty, tmp_path):
    """Would catch: a run of hours that trains on nothing."""
    silent = ChatTemplate("silent", "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", {})
    write(tmp_path, {"a.jsonl": jsonl(messages([("user", f"q{i}"), ("assistant", "a")]) for i in range(100))})
    for call in (lambda: data.load_tokens([tmp_path / "a.jsonl"], chatty, "train", silent),
                 lambda: data.store_tokens(tmp_path / "out", [tmp_path / "a.jsonl"], chatty, silent)):
        refusal(call, "no usable tokens", tmp_path / "a.jsonl")
    assert not list(tmp_path.glob("out*"))


def write_own(folder, documents):
    own = (("train", "text", data.document(ids, loss_mask, np.uint32)) for ids, loss_mask in documents)
    data.write_tokens(folder, own, key=7)
    return data.open_tokens(folder)[0]["train"]


def test_written_documents_come_back_and_an_error_on_the_way_writes_none(tmp_path):
    """Would catch: ids cut to 16 bits, an empty document whose start is the next one's, half a file after an error."""
    documents = [([70_000, 2, 3], [False, True, True]), ([], []), (np.array([4]), np.array([True]))]
    tokens = write_own(tmp_path / "new", iter(documents))
    assert tokens.ids.tolist() == [70_000, 2, 3, 4] and tokens.loss_mask.tolist() == [False, True, True, True]
    assert tokens.starts.tolist() == [0, 3] and data.open_tokens(tmp_path / "new")[1]["key"] == 7

    def broken():
        yield [5], [True]
        raise InputError("no more")

    with pytest.raises(InputError, match="no more"):
        write_own(tmp_path / "new", broken())
    assert data.open_tokens(tmp_path / "new")[0]["train"].ids.tolist() == [70_000, 2, 3, 4]
    assert [file.name for file in tmp_path.iterdir()] == ["new"]
    assert write_own(tmp_path / "none", []).ids.shape == (0,)
    refusal(lambda: data.open_tokens(tmp_path / "missing"), tmp_path / "missing")
    twice = data.concatenate([tokens, write_own(tmp_path / "none", []), tokens])
    assert twice.ids.tolist() == [70_000, 2, 3, 4] * 2 and twice.starts.tolist() == [0, 3, 4, 7]


def draft_vocabulary(counts, n):
    """`data.draft_vocabulary` of a token file with id i counts[i] times -> (its ids, the lines printed)."""
    ids, lines = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts)), []
    return data.draft_vocabulary(ids.astype(np.uint16), n, len(counts), lines.append), lines


def test_a_draft_vocabulary_covers_most_of_the_text_with_few_ids():
    """Would catch: the rarest ids, a size that is rounded down, and a share that is not that of the ids taken."""
    counts = [1] * 3500 + [100] * 500  # of 53,500 tokens: 97% are the last 500 ids and 1,895 others, 2,395 in all
    counts += [0] * (8192 - len(counts))
    ids, lines = draft_vocabulary(counts, "auto")
    assert ids == [*range(3500, 4000), *range(3072 - 500)]
    assert lines == ["draft vocabulary: 3072 of 8192 token ids, which cover 98.3% of the training text"]
    for n in (0, 8, 501):
        assert draft_vocabulary(counts, n) == ([*range(3500, 4000), 0][:n], [])


@pytest.mark.parametrize("seen, V, size", [(1024, 2049, 1024), (1024, 2048, 0), (1025, 4097, 2048), (1025, 4096, 0),
                                           (1, 258, 0)])
def test_a_draft_vocabulary_of_half_the_ids_or_more_is_all_of_them(seen, V, size, monkeypatch):
    """Would catch: a size that is not smaller than the number of ids, or that gains next to nothing."""
    monkeypatch.setattr(data, "COVERAGE", 1.0)  # all that are seen
    ids, [line] = draft_vocabulary([2] * seen + [0] * (V - seen), "auto")
    assert ids == list(range(size))
    of_all = f"all {V} token ids (100% of the training text needs {seen}, rounded up to {-(-seen // 1024) * 1024}: not"
    assert line.startswith(f"draft vocabulary: {f'{size} of {V} token ids, which cover 100.0%' if size else of_all}")


@pytest.mark.parametrize("common, needed", [(97, 1), (96, 2)])
def test_exactly_the_coverage_is_enough(common, needed):
    """Would catch: one id too many or too few, by a comparison that rounds."""
    assert f"97% of the training text needs {needed}," in draft_vocabulary([100 - common, common], "auto")[1][0]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_windows_carry_their_marks_and_the_numbers_of_their_documents(dtype):
    """Would catch: a first or last token that is in no window, and guesses across the border of two documents."""
    rng = np.random.default_rng(0)
    starts = np.append(True, rng.random(299) < 0.2)
    tokens = data.Tokens(np.arange(300).astype(dtype), rng.random(300) < 0.5, np.flatnonzero(starts))
    ids, loss_mask, numbers = batch = data.window_batch([(tokens, 5000)], 17, 3, "cpu")
    assert (ids.dtype, loss_mask.dtype, numbers.dtype) == (torch.int64, torch.bool, torch.int64)
    assert (ids.diff(dim=1) == 1).all() and set(ids[:, 0].tolist()) == set(range(284))
    for window, mask, documents in zip(ids[:50].tolist(), loss_mask.tolist(), numbers.tolist()):
        assert mask == tokens.loss_mask[window].tolist()
        assert documents == [sum(starts[window[0] + 1 : i + 1].tolist()) for i in window]
    assert all(map(torch.equal, batch, data.window_batch([(tokens, 5000)], 17, 3, "cpu")))
    one = tokens._replace(starts=np.zeros(1, np.int64))
    assert data.window_batch([(one, 50)], 17, 3, "cpu")[2] is None
    assert data.window_batch([(tokens, 1)], 300, 3, "cpu")[0].tolist() == [list(range(300))]
    mixed = data.window_batch([(one, 4), (tokens, 50)], 17, 3, "cpu", slice(1, None, 2))
    parts = data.window_batch([(one, 4)], 17, 3, "cpu"), data.window_batch([(tokens, 50)], 17, 3, "cpu")
    assert torch.equal(mixed[0], torch.cat([part[0] for part in parts])[1::2]) and mixed[2].shape == (27, 17)
    assert not mixed[2][:2].any() and torch.equal(mixed[2][2:], parts[1][2][1::2])
    refusal(lambda: data.window_batch([(tokens, 1)], 301, 3, "cpu"), 301, 300)


class Pinned(torch.Tensor):
    """Stands for a tensor in pinned memory."""


def test_a_gpu_gets_windows_from_pinned_memory(monkeypatch):
    """Would catch: copies for which the host waits, as it does where memory is pageable or an array has gaps."""
    copies = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: torch.Tensor.as_subclass(x, Pinned))
    monkeypatch.setattr(Pinned, "to", lambda x, device, **options: copies.append((x.is_contiguous(), device, options)))
    tokens = data.Tokens(np.arange(300, dtype=np.uint16), np.ones(300, bool), np.arange(0, 300, 7))
    for device in ("cuda", torch.device("cuda:1")):
        data.window_batch([(tokens, 8)], 17, 3, device, slice(1, None, 2))
        assert copies == [(True, device, dict(non_blocking=True))] * 3
        copies.clear()


def test_prompts_of_texts_are_windows_of_single_documents_one_of_each_while_they_last(library, tiny):
    """Would catch: prompts across two documents, or that end with the end of a text, or one document asked twice."""
    tiny.prefix = [7]
    tokens = data.load_tokens([library], tiny, "heldout")
    texts = [[7, *tiny.encode(record.text)] for _, record in corpus.split_records([library], ["heldout"])]
    n = sum(len(text) >= 33 for text in texts)
    assert 2 < n < len(texts)
    found = data.prompts(tokens, 2 * n, 33)
    cuts = [(i, text[at : at + 33]) for i, text in enumerate(texts) for at in range(len(text) - 32)]
    inside = [[i for i, cut in cuts if cut == prompt] for prompt in found]
    assert all(len(places) == 1 for places in inside) and type(found[0]) is list and type(found[0][0]) is int
    assert sorted(inside[:n]) == sorted(inside[n:]) == sorted([i] for i, text in enumerate(texts) if len(text) >= 33)
    assert found == data.prompts(tokens, 2 * n, 33) != data.prompts(tokens, 2 * n, 33, seed=1)
    assert found[:3] == data.prompts(tokens, 3, 33) and data.prompts(tokens, 0, 33) == []
    longest = max(map(len, texts))
    assert data.prompts(tokens, 1, longest) == [max(texts, key=len)]
    [half] = data.prompts(tokens, 1, longest + 1)  # no text is that long
    assert len(half) == (longest + 1) // 2
    assert any(half == text[at:at + len(half)] for text in texts for at in range(len(text)))
    refusal(lambda: data.prompts(tokens, 1, 0))


def test_prompts_of_completions_and_conversations_end_where_an_answer_begins(chatty, tmp_path):
    """Would catch: a prompt that gives part of the answer away, or the front of one that is too long, not its end."""
    two = [[("user", c), ("assistant", "hell"), ("user", c + c), ("assistant", "he")] for c in "abcdefgh" * 5]
    completions = [{"prompt": 4 * c, "completion": "0" * 50} for c in "stuvwxyz" * 5]
    long = [{"prompt": 101 * c, "completion": "0"} for c in "ijk"]
    write(tmp_path, {"a.jsonl": jsonl([*map(messages, two), *completions, *long])})
    tokens = data.load_tokens([tmp_path / "a.jsonl"], chatty, "train", CHATML)
    found = {chatty.decode(prompt) for prompt in data.prompts(tokens, 500, 25)}
    opening = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    both = [opening.format(c) + f"hell<|im_end|>\n{opening.format(c + c)}" for c in "abcdefgh"]
    allowed = {opening.format(c) for c in "abcdefgh"} | set(both)
    allowed |= {4 * c for c in "stuvwxyz"} | {100 * c for c in "ijk"}
    assert found <= allowed and len(found) > 15 and any(text in found for text in both)
    assert {len(prompt) for prompt in data.prompts(tokens, 40, 1)} == {4}
    last = {encoded[-1] for encoded in map(chatty.encode, "\nstuvwxyzijk")}
    assert {prompt[-1] for prompt in data.prompts(tokens, 40, 25, max_len=1)} <= last
    ids = np.arange(5, dtype=np.uint16)
    tokens_of = lambda *loss_mask: data.Tokens(ids, np.array(loss_mask) > 0, np.array([0]))
    answered = tokens_of(1, 1, 0, 0, 1)
    assert data.prompts(answered, 20, 2) == [[0, 1, 2, 3]] * 20
    refusal(lambda: data.prompts(tokens_of(0, 0, 0, 0, 0), 1, 1))
