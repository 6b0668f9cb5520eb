"""data.py: ids are the tokenizer.json's own or the file is refused, text comes back whole, splits never overlap."""

import json
import random
import re

import numpy as np
import pytest
import torch

import data
from model import InputError

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BYTES_ONLY = BYTE_LEVEL | {"use_regex": False}
EOT = "<|endoftext|>"


def sequence(*steps):
    return {"type": "Sequence", "pretokenizers": list(steps)}


def split_form(regex, behavior="Isolated", invert=False):
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert}
    return sequence(split, BYTES_ONLY)


def digits_form(individual):
    return sequence({"type": "Digits", "individual_digits": individual}, BYTE_LEVEL)


FORMS = {
    "gpt2": BYTE_LEVEL,
    "split": split_form(LLAMA3),
    "removed": split_form(LLAMA3, "Removed", True),
    "letters": split_form(r"\p{L}+"),  # what it does not match is a piece too
    "digit": digits_form(True),
    "digits": digits_form(False),
}


def tiny_spec():
    """Written by hand: GPT-2's 256 byte tokens under GPT-2's ids, five merges, one special token after a gap."""
    symbols = map(chr, (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 256 + 68)))
    merges = ["h e", "l l", "he ll", "Ġ w", "Ġ Ġ"]
    vocab = {symbol: i for i, symbol in enumerate([*symbols, "he", "ll", "hell", "Ġw", "ĠĠ"])}
    return {
        "added_tokens": [{"id": 300, "content": EOT, "special": True}],
        "normalizer": None,
        "pre_tokenizer": BYTE_LEVEL,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }


def save(folder, spec):
    (folder / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    return folder


@pytest.fixture
def tiny(tmp_path):
    return data.load_encoding(save(tmp_path, tiny_spec()))


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def refusal(call, *names):
    """The message of the InputError that `call` raises: one line that names all of `names`."""
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and "expected" in message and ";" in message
    assert all(str(name) in message for name in names), message
    return message


def hostile_texts():
    """Random characters of every kind and what tokenizers are known to trip over."""
    rng = random.Random(1)
    blocks = [(0, 128), (0, 0x250), (0x250, 0x3000), (0x3000, 0xD800), (0xE000, 0x10000), (0x1F300, 0x1FAFF)]
    for low, high in blocks * 6:
        yield "".join(chr(rng.randrange(low, high)) for _ in range(60))
    for alphabet in (" \t\n\r\u00a0\u2003\u0085xA1", "aAé'stDLl 1२½Ⅷ²,\n", "<|endofx>t "):
        for _ in range(25):
            yield "".join(rng.choice(alphabet) for _ in range(50))
    yield from ("", " ", "\n", "\x00", "\x00\x7f\x1b[0m", " " * 300 + "x", "\r\n\r\n  \r\nx", "a" * 500)
    yield from ("e\u0301 é", "don't WE'LL '", "x = 12345 + 0x1F  # ½Ⅷ²", "def f(a):\n\treturn a\n\n\n")
    yield from ("👩‍👩‍👧‍👦🇩🇪👍🏽", "naïve café 日本語テキスト العربية हिन्दी ไทย")
    yield from (EOT, f"a {EOT}{EOT} b", "<|endoftext|", "<|endo<|endoftext|>ftext|>")
    yield from ("\ufeffBOM", "\U0010ffff\U000f0000")


# ---------------------------------------------------------------------------------------------------------------------
# ids


def test_known_ids_of_the_handwritten_vocabulary(tiny):
    assert tiny.encode_ordinary("hello world") == [258, 78, 259, 78, 81, 75, 67]
    assert tiny.encode_ordinary("he\n   é") == [256, 198, 260, 220, 127, 102]
    assert tiny.encode("ll" + EOT, allowed_special="all") == [257, 300]
    assert 300 not in tiny.encode_ordinary(EOT)
    assert tiny.max_token_value == 300 and data.end_of_text(tiny) == 300


def test_a_file_does_as_well_as_its_folder(tmp_path, tiny):
    assert data.tokenizer_hash(data.load_encoding(tmp_path / "tokenizer.json")) == data.tokenizer_hash(tiny)


def test_merges_read_the_same_in_both_spellings(tmp_path, tiny):
    spec = tiny_spec()
    spec["model"]["merges"] = [merge.split(" ") for merge in spec["model"]["merges"]]
    assert data.tokenizer_hash(data.load_encoding(save(tmp_path, spec))) == data.tokenizer_hash(tiny)


def test_hash_is_fixed_and_sees_vocabulary_pattern_and_specials(tmp_path, tiny):
    hashes = {data.tokenizer_hash(tiny)}
    assert all(re.fullmatch("[0-9a-f]{16}", h) for h in hashes)
    changed = [tiny_spec() for _ in range(3)]
    changed[0]["model"]["vocab"]["ĠĠ"] = 261
    changed[1]["pre_tokenizer"] = FORMS["split"]
    changed[2]["added_tokens"][0]["id"] = 301
    hashes |= {data.tokenizer_hash(data.load_encoding(save(tmp_path, spec))) for spec in changed}
    assert len(hashes) == 4
    # A hash that moved with a run, a machine or an edit here would orphan every saved set of heads.
    assert data.tokenizer_hash(tiny) == "8ce07d26c422038c"


@pytest.fixture(scope="module")
def corpus():
    files = data.builtin_corpus("heldout")
    return [text[:20_000] for text in data.read_documents(files[:25])]


def trained(corpus, form, whole_alphabet=True):
    """A tokenizer.json that the tokenizers package trains: 700 tokens for one form of pre-tokenizer."""
    tokenizers = pytest.importorskip("tokenizers", reason="the reference ids come from the tokenizers package")
    model = {"type": "BPE", "vocab": {}, "merges": []}
    spec = {"version": "1.0", "added_tokens": [], "pre_tokenizer": form, "model": model}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(spec))
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet() if whole_alphabet else []
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=[EOT, "<|im_end|>"], show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return json.loads(tokenizer.to_str())


def reference_ids(spec):
    """The tokenizers package's ids for a text, with added tokens found in it and with their text taken as plain."""
    tokenizers = pytest.importorskip("tokenizers")
    whole = tokenizers.Tokenizer.from_str(json.dumps(spec))
    plain = tokenizers.Tokenizer.from_str(json.dumps(spec | {"added_tokens": []}))
    return (lambda text: whole.encode(text).ids), (lambda text: plain.encode(text).ids)


@pytest.mark.parametrize("form", FORMS)
def test_ids_equal_those_of_the_tokenizers_package(form, corpus, tmp_path):
    spec = trained(corpus, FORMS[form])
    encoding = data.load_encoding(save(tmp_path, spec))
    whole, plain = reference_ids(spec)
    for text in [*corpus, *hostile_texts()]:
        assert encoding.encode_ordinary(text) == plain(text), text
        assert encoding.encode(text, allowed_special="all") == whole(text), text
        assert encoding.decode(encoding.encode_ordinary(text)) == text


def test_ids_with_every_merge_of_each_token_as_llama_3_files_have(corpus, tmp_path):
    spec = trained(corpus, FORMS["split"])
    model = spec["model"]
    vocab = {token: i for token, i in model["vocab"].items() if i > 1} | {"hello": 700}
    model["vocab"]["hello"] = 700  # no merge leads there: it is taken when it is a whole piece, and only then
    splits = [(token[:i], token[i:]) for token in vocab if token != "hello" for i in range(1, len(token))]
    model["merges"] = [pair for pair in splits if set(pair) <= set(vocab)]
    model["ignore_merges"] = True
    encoding = data.load_encoding(save(tmp_path, spec))
    assert len(model["merges"]) > 443 and encoding.encode_ordinary("hello") == [700]
    _, plain = reference_ids(spec)
    for text in [*corpus, *hostile_texts(), "hello", "hello hello, xhello helloo"]:
        assert encoding.encode_ordinary(text) == plain(text), text


def test_bytes_that_a_vocabulary_lacks_are_dropped_and_do_not_count(tmp_path, corpus):
    spec = trained([text.encode("ascii", "ignore").decode() for text in corpus], BYTE_LEVEL, whole_alphabet=False)
    assert len(spec["model"]["vocab"]) == 700
    encoding = data.load_encoding(save(tmp_path, spec))
    assert encoding.max_token_value == 699 and encoding.n_vocab == 700
    _, plain = reference_ids(spec)
    text = "x = 'é日' \x01 "
    assert data.token_array([text], encoding, 0).tolist() == [*plain(text), 0]
    assert encoding.decode(encoding.encode_ordinary(text)) == text


def test_lone_surrogates_are_encoded_as_replacement_characters(tiny):
    assert tiny.decode(data.token_array(["a\ud800b"], tiny, 300).tolist()) == f"a\ufffdb{EOT}"


# ---------------------------------------------------------------------------------------------------------------------
# refusals


def changed(where, value):
    """A change to a spec: `where` is a path of keys, a value of None takes the key away."""

    def change(spec):
        *path, last = where.split(".")
        for key in path:
            spec = spec[key]
        spec.pop(last) if value is None else spec.__setitem__(last, value)

    return change


def vocab_change(**ids):
    return lambda spec: spec["model"]["vocab"].update(ids)


REFUSED = {
    "Unigram": changed("model", {"type": "Unigram", "vocab": [["a", 0.0]]}),
    "WordPiece": changed("model", {"type": "WordPiece", "vocab": {"a": 0}}),
    "byte_fallback": changed("model.byte_fallback", True),
    "end_of_word_suffix": changed("model.end_of_word_suffix", "</w>"),
    "NFC": changed("normalizer", {"type": "NFC"}),
    "Metaspace": changed("pre_tokenizer", {"type": "Metaspace"}),
    "Whitespace+ByteLevel": changed("pre_tokenizer", sequence({"type": "Whitespace"}, BYTE_LEVEL)),
    "no pre_tokenizer": changed("pre_tokenizer", 0),
    "add_prefix_space": changed("pre_tokenizer", {"type": "ByteLevel"}),
    "use_regex=True": changed("pre_tokenizer", sequence(split_form("a")["pretokenizers"][0], BYTE_LEVEL)),
    "use_regex=False": changed("pre_tokenizer", BYTES_ONLY),
    "MergedWithNext": changed("pre_tokenizer", split_form(LLAMA3, "MergedWithNext")),
    "Parsing error": changed("pre_tokenizer", split_form("(a")),
    "order of its merges (token 257": vocab_change(he=257, ll=256),
    "order of its merges (token 261": vocab_change(lle=261),
    "lead to no token": changed("model.merges", ["h e", "l l", "he ll", "Ġ w", "Ġ Ġ", "h h"]),
    "too many values": changed("model.merges", ["h e x"]),
    "the id 257": vocab_change(he=257),
    "the id 78": changed("added_tokens", [{"id": 78, "content": EOT}]),
    "the id -1": vocab_change(a=-1),
    "TypeError": vocab_change(a="7"),
    "can't encode": vocab_change(**{"▁the": 261}),
    "KeyError: 'vocab'": changed("model.vocab", None),
    "KeyError: 'merges'": changed("model.merges", None),
    "KeyError: 'model'": changed("model", None),
    "KeyError: 'pre_tokenizer'": changed("pre_tokenizer", None),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_tokenizer_that_would_give_other_ids_is_refused_by_name(reason, tmp_path):
    spec = tiny_spec()
    REFUSED[reason](spec)
    save(tmp_path, spec)
    refusal(lambda: data.load_encoding(tmp_path), reason, tmp_path / "tokenizer.json")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[]", b"7", b"null", b'{"model": []}'])
def test_a_file_that_is_no_tokenizer_is_refused(content, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(content)
    refusal(lambda: data.load_encoding(tmp_path), tmp_path / "tokenizer.json")


def test_a_missing_tokenizer_is_refused(tmp_path):
    refusal(lambda: data.load_encoding(tmp_path), tmp_path / "tokenizer.json")
    refusal(lambda: data.load_encoding(tmp_path / "nowhere"), tmp_path / "nowhere")


def test_no_separator_is_refused_and_empty_added_tokens_are_passed_over(tmp_path):
    spec = tiny_spec() | {"added_tokens": [{"id": 300, "content": ""}, {"id": 301, "content": "<pad>"}]}
    encoding = data.load_encoding(save(tmp_path, spec))
    assert encoding.encode("a<pad>", allowed_special="all") == [64, 301]  # tiktoken hangs on an empty special token
    refusal(lambda: data.end_of_text(encoding), EOT)


# ---------------------------------------------------------------------------------------------------------------------
# TextStream


def streamed(encoding, *parts):
    stream = data.TextStream(encoding)
    return [stream.feed(part) for part in parts] + [stream.finish()]


@pytest.mark.parametrize("text", ["hé日👍🏽\u200d!", "👩‍👩‍👧‍👦", "e\u0301\U0010ffff"])
def test_stream_holds_back_half_characters_at_every_split(text, tiny):
    tokens = tiny.encode_ordinary(text)
    for i in range(len(tokens) + 1):
        head, tail, rest = streamed(tiny, tokens[:i], tokens[i:])
        assert text.startswith(head) and head + tail == text and rest == ""
    assert "".join(streamed(tiny, *[[token] for token in tokens])) == text
    assert streamed(tiny, tokens[:-1])[-1] in ("", "\ufffd")


def test_stream_of_bytes_that_are_no_utf8_gives_what_decoding_them_at_once_gives(tiny):
    rng = random.Random(2)
    for _ in range(300):
        raw = bytes(rng.choice(b"a\x80\xbf\xc3\xe2\x82\xf0\x9f\x91\xff") for _ in range(12))
        tokens = [tiny.encode_single_token(bytes([byte])) for byte in raw]
        assert "".join(streamed(tiny, *[[token] for token in tokens])) == raw.decode(errors="replace")


def test_stream_outlives_ids_that_are_no_tokens_and_can_be_used_again(tiny):
    half = tiny.encode_ordinary("é")[:1]
    assert streamed(tiny, [64, 299, 64, -1, 2**40, 64]) == ["a\ufffda\ufffd\ufffda", ""]
    assert streamed(tiny, half + [999]) == ["\ufffd\ufffd", ""]
    assert streamed(tiny, [64, 300, 64]) == [f"a{EOT}a", ""]
    stream = data.TextStream(tiny)
    assert [stream.feed(half), stream.finish(), stream.feed([64]), stream.finish()] == ["", "\ufffd", "a", ""]


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
