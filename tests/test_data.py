"""data.py: text comes back whole from its documents' ids, and splits never overlap."""

import json
import random

import numpy as np
import pytest
import torch

import data
from test_tokenizer import EOT, refusal, save, tiny, tiny_spec, write  # noqa: F401, tiny is a fixture

# ---------------------------------------------------------------------------------------------------------------------
# documents and splits


def test_builtin_corpus_is_large_and_its_splits_share_nothing():
    train, heldout = data.builtin_corpus("train"), data.builtin_corpus("heldout")
    assert not set(train) & set(heldout)
    assert train == sorted(train) and train == data.builtin_corpus("train")
    assert 0.03 < len(heldout) / (len(train) + len(heldout)) < 0.08
    assert sum(file.stat().st_size for file in train) > 8e6  # without its tests the library still has this much
    assert not any("site-packages" in file.parts or file.suffix != ".py" for file in train + heldout)
    assert sum(1 for _ in data.read_documents(heldout)) == len(heldout)


def test_builtin_corpus_splits_by_name_and_leaves_out_what_is_not_the_librarys_own(tmp_path, monkeypatch):
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    refusal(lambda: data.builtin_corpus("train"), tmp_path)
    write(tmp_path, {f"lib/m{i}.py": "x = 1\n" for i in range(60)})
    foreign = ("site-packages/a.py", "lib/dist-packages/b.py", "__pycache__/c.py", "_sysconfigdata__x.py", "notes.txt")
    write(tmp_path, dict.fromkeys(foreign, "x") | {"empty.py": "", "latin1.py": b"# \xe9"})
    train, heldout = data.builtin_corpus("train"), data.builtin_corpus("heldout")
    assert sorted(train + heldout) == sorted((tmp_path / "lib").glob("m*.py"))
    # These names are fixed: a split that moves between runs would train on what is later held out.
    assert [file.name for file in heldout] == "m0.py m2.py m25.py m37.py".split()
    refusal(lambda: data.builtin_corpus("test"), "'test'")


def test_documents_come_from_named_files_folders_and_jsonl_lines(tmp_path):
    files = {"a.py": "a", "b/c.md": "é\r\n", "b/d.bin": "no", "e.txt": "", "f.txt": b"\xff", "odd.xyz": "odd"}
    jsonl = '{"text": "one"}\n\n{"text": "two\\nlines", "id": 2}\r\n{"text": ""}\n'
    write(tmp_path, files | {"g.jsonl": jsonl, "h.txt/i.txt": "in a folder"})
    assert list(data.read_documents([tmp_path])) == ["a", "é\r\n", "one", "two\nlines", "in a folder"]
    assert list(data.read_documents([str(tmp_path / "odd.xyz"), tmp_path / "a.py"])) == ["odd", "a"]


@pytest.mark.parametrize(
    "name, content",
    [
        ("missing.txt", None),
        ("empty.txt", ""),
        ("latin1.txt", b"caf\xe9"),
        ("blank.jsonl", "\n \n"),
        ("folder", {"folder/a.bin": "x", "folder/b.txt": "", "folder/c.py": b"\xff"}),
    ],
)
def test_paths_without_a_document_are_refused_by_name(name, content, tmp_path):
    if content is not None:
        write(tmp_path, content if isinstance(content, dict) else {name: content})
    refusal(lambda: list(data.read_documents([tmp_path / name])), tmp_path / name)


@pytest.mark.parametrize("line", ["{", "7", '{"txt": "a"}', '{"text": 7}', b'{"text": "\xff"}', "plain text"])
def test_a_broken_jsonl_line_is_refused_by_its_number(line, tmp_path):
    line = line if isinstance(line, bytes) else line.encode()
    write(tmp_path, {"a.jsonl": b'{"text": "fine"}\n\n' + line + b"\n"})
    for path in (tmp_path, tmp_path / "a.jsonl"):
        refusal(lambda: list(data.read_documents([path])), tmp_path / "a.jsonl", "line 3")


@pytest.fixture
def library(tmp_path):
    """A folder of 200 documents of 30 to 50 letters, no two alike."""
    rng = random.Random(3)
    texts = ["".join(rng.choices("abcdefgijkmnopqrstuvxyz", k=rng.randint(30, 50))) for _ in range(200)]
    return write(tmp_path / "library", {f"{i:03}.txt": text for i, text in enumerate(texts)})


def documents_of(tokens, encoding):
    return encoding.decode(tokens.tolist()).split(EOT)[:-1]


def test_user_documents_are_split_by_their_text_alone(library, tiny, tmp_path):
    train, heldout = (documents_of(data.load_tokens([library], tiny, split), tiny) for split in ("train", "heldout"))
    assert sorted(train + heldout) == sorted(data.read_documents([library])) and 3 < len(heldout) < 20
    lines = "".join(json.dumps({"text": text}) + "\n" for text in data.read_documents([library]))
    write(tmp_path, {"all.jsonl": lines})
    assert documents_of(data.load_tokens([tmp_path / "all.jsonl"], tiny, "heldout"), tiny) == heldout
    refusal(lambda: data.load_tokens([library], tiny, "dev"), "'dev'")
    for split, document in (("train", heldout[0]), ("heldout", train[0])):
        write(tmp_path, {"one.txt": document})
        refusal(lambda: data.load_tokens([tmp_path / "one.txt"], tiny, split), tmp_path / "one.txt", split)


# ---------------------------------------------------------------------------------------------------------------------
# tokens


def test_token_array_separates_documents_and_takes_special_text_as_text(tiny, monkeypatch):
    documents = ["hell", f"a{EOT}", "", "日本"]
    expected = [token for text in documents for token in [*tiny.encode_ordinary(text), 300]]
    whole = data.token_array(iter(documents), tiny, 300)
    assert whole.dtype == np.uint16 and whole.tolist() == expected and expected.count(300) == 4
    monkeypatch.setattr(data, "CHUNK_CHARACTERS", 1)
    assert data.token_array(documents, tiny, 300).tolist() == expected
    assert data.token_array([], tiny, 300).shape == (0,)


def test_token_array_widens_for_ids_beyond_16_bits(tmp_path):
    for last, dtype in ((2**16 - 1, np.uint16), (2**16, np.uint32)):
        spec = tiny_spec()
        spec["added_tokens"][0]["id"] = last
        encoding = data.load_encoding(save(tmp_path, spec))
        tokens = data.token_array(["a"], encoding, last)
        assert tokens.dtype == dtype and tokens.tolist() == [64, last]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_batch_gives_windows_of_the_array_with_its_first_and_last_token_among_them(dtype):
    tokens = np.arange(65_500, 65_511).astype(dtype)
    windows = data.batch(tokens, 200, 7, torch.Generator().manual_seed(0))
    assert windows.dtype == torch.int64 and windows.shape == (200, 7)
    assert (windows.diff(dim=1) == 1).all() and set(windows[:, 0].tolist()) == set(range(65_500, 65_505))
    assert torch.equal(windows, data.batch(tokens, 200, 7, torch.Generator().manual_seed(0)))
    assert data.batch(tokens, 2, 11, torch.Generator()).tolist() == [tokens.tolist()] * 2
    refusal(lambda: data.batch(tokens, 2, 12, torch.Generator()), 12, 11)


def test_heldout_prompts_come_from_heldout_documents_one_of_each_while_they_last(library, tiny):
    heldout = documents_of(data.load_tokens([library], tiny, "heldout"), tiny)
    n = len(heldout)
    prompts = data.heldout_prompts(tiny, 2 * n, 20, paths=[library])
    assert all(len(prompt) == 20 and type(prompt[0]) is int for prompt in prompts)
    sources = [[text for text in heldout if tiny.decode(prompt) in text] for prompt in prompts]
    assert all(len(source) == 1 for source in sources)
    assert sorted(text for [text] in sources[:n]) == sorted(text for [text] in sources[n:]) == sorted(heldout)
    assert prompts == data.heldout_prompts(tiny, 2 * n, 20, seed=0, paths=[library])
    assert prompts != data.heldout_prompts(tiny, 2 * n, 20, seed=1, paths=[library])


def test_heldout_prompts_skip_short_documents_and_refuse_what_none_can_give(library, tiny):
    heldout = documents_of(data.load_tokens([library], tiny, "heldout"), tiny)
    longest = max(len(tiny.encode_ordinary(text)) for text in heldout)
    whole = data.heldout_prompts(tiny, 3, longest, paths=[library])
    assert all(tiny.decode(prompt) in heldout for prompt in whole)
    refusal(lambda: data.heldout_prompts(tiny, 1, longest + 1, paths=[library]), longest + 1)
    refusal(lambda: data.heldout_prompts(tiny, 1, 0, paths=[library]))
    assert data.heldout_prompts(tiny, 0, 5, paths=[library]) == []


def test_heldout_prompts_of_the_builtin_corpus_are_in_its_heldout_files(tiny):
    texts = list(data.read_documents(data.builtin_corpus("heldout")))
    for prompt in data.heldout_prompts(tiny, 4, 200):
        assert any(tiny.decode_bytes(prompt) in text.encode() for text in texts)
