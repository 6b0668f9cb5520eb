"""tokenizer.py: ids are those of the folder's files or the folder is refused, text comes back whole, prompts are exact."""

import base64
import io
import json
import random
import re
import sys
import unicodedata

import pytest
import tiktoken

from hf import chat as chat
from training import data as data
from hf import tokenizer as tokenizer
from model import InputError
from training.corpus import builtin_corpus, read_documents

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
    return tokenizer.load_encoding(save(tmp_path, tiny_spec()))


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
    assert tiny.max_token_value == 300 and tokenizer.end_of_text(tiny) == 300


def test_a_file_does_as_well_as_its_folder(tmp_path, tiny):
    assert tokenizer.tokenizer_hash(tokenizer.load_encoding(tmp_path / "tokenizer.json")) == tokenizer.tokenizer_hash(tiny)


def test_merges_read_the_same_in_both_spellings(tmp_path, tiny):
    spec = tiny_spec()
    spec["model"]["merges"] = [merge.split(" ") for merge in spec["model"]["merges"]]
    assert tokenizer.tokenizer_hash(tokenizer.load_encoding(save(tmp_path, spec))) == tokenizer.tokenizer_hash(tiny)


def test_hash_is_fixed_and_sees_vocabulary_pattern_and_specials(tmp_path, tiny):
    hashes = {tokenizer.tokenizer_hash(tiny)}
    assert all(re.fullmatch("[0-9a-f]{16}", h) for h in hashes)
    changed = [tiny_spec() for _ in range(3)]
    changed[0]["model"]["vocab"]["ĠĠ"] = 261
    changed[1]["pre_tokenizer"] = FORMS["split"]
    changed[2]["added_tokens"][0]["id"] = 301
    hashes |= {tokenizer.tokenizer_hash(tokenizer.load_encoding(save(tmp_path, spec))) for spec in changed}
    assert len(hashes) == 4
    # A hash that moved with a run, a machine or an edit here would orphan every saved set of heads.
    assert tokenizer.tokenizer_hash(tiny) == "8ce07d26c422038c"


@pytest.fixture(scope="module")
def corpus():
    files = builtin_corpus("heldout")
    return [text[:20_000] for text in read_documents(files[:25])]


def trained(corpus, form, whole_alphabet=True):
    """A tokenizer.json that the tokenizers package trains: 700 tokens for one form of pre-tokenizer."""
    tokenizers = pytest.importorskip("tokenizers", reason="the reference ids come from the tokenizers package")
    model = {"type": "BPE", "vocab": {}, "merges": []}
    spec = {"version": "1.0", "added_tokens": [], "pre_tokenizer": form, "decoder": BYTE_LEVEL, "model": model}
    trained = tokenizers.Tokenizer.from_str(json.dumps(spec))
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet() if whole_alphabet else []
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=[EOT, "<|im_end|>"], show_progress=False
    )
    trained.train_from_iterator(corpus, trainer)
    return json.loads(trained.to_str())


def reference_ids(spec):
    """The tokenizers package's ids for a text, with added tokens found in it and with their text taken as plain."""
    tokenizers = pytest.importorskip("tokenizers")
    whole = tokenizers.Tokenizer.from_str(json.dumps(spec))
    plain = tokenizers.Tokenizer.from_str(json.dumps(spec | {"added_tokens": []}))
    return (lambda text: whole.encode(text).ids), (lambda text: plain.encode(text).ids)


@pytest.mark.parametrize("form", FORMS)
def test_ids_equal_those_of_the_tokenizers_package(form, corpus, tmp_path):
    spec = trained(corpus, FORMS[form])
    encoding = tokenizer.load_encoding(save(tmp_path, spec))
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
    encoding = tokenizer.load_encoding(save(tmp_path, spec))
    assert len(model["merges"]) > 443 and encoding.encode_ordinary("hello") == [700]
    _, plain = reference_ids(spec)
    for text in [*corpus, *hostile_texts(), "hello", "hello hello, xhello helloo"]:
        assert encoding.encode_ordinary(text) == plain(text), text


def test_bytes_that_a_vocabulary_lacks_are_dropped_and_do_not_count(tmp_path, corpus):
    spec = trained([text.encode("ascii", "ignore").decode() for text in corpus], BYTE_LEVEL, whole_alphabet=False)
    assert len(spec["model"]["vocab"]) == 700
    encoding = tokenizer.load_encoding(save(tmp_path, spec))
    assert encoding.max_token_value == 699 and encoding.n_vocab == 700
    _, plain = reference_ids(spec)
    for text in ("x = 'é日' \x01 ", "x 日= 1", "retur日n a日", "日", ""):  # what stands beside a dropped byte may merge over it
        assert data.token_array([text], encoding, 0).tolist() == [*plain(text), 0]
        kept = text.encode().translate(None, encoding._lacking)
        assert encoding.decode_bytes(encoding.encode_ordinary(text)) == kept


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
    "NFKC": changed("normalizer", {"type": "NFKC"}),
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
def test_a_tokenizer_that_would_give_other_ids_is_refused_by_name(reason, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # which could read some of them
    spec = tiny_spec()
    REFUSED[reason](spec)
    save(tmp_path, spec)
    refusal(lambda: tokenizer.load_encoding(tmp_path), reason, tmp_path / "tokenizer.json")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[]", b"7", b"null", b'{"model": []}'])
def test_a_file_that_is_no_tokenizer_is_refused(content, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(content)
    refusal(lambda: tokenizer.load_encoding(tmp_path), tmp_path / "tokenizer.json")


def test_a_missing_tokenizer_is_refused(tmp_path):
    refusal(lambda: tokenizer.load_encoding(tmp_path), tmp_path / "tokenizer.json")
    refusal(lambda: tokenizer.load_encoding(tmp_path / "nowhere"), tmp_path / "nowhere")


def test_no_separator_is_refused_and_empty_added_tokens_are_passed_over(tmp_path):
    spec = tiny_spec() | {"added_tokens": [{"id": 300, "content": ""}, {"id": 301, "content": "<pad>"}]}
    encoding = tokenizer.load_encoding(save(tmp_path, spec))
    assert encoding.encode("a<pad>", allowed_special="all") == [64, 301]  # tiktoken hangs on an empty special token
    refusal(lambda: tokenizer.end_of_text(encoding), EOT)


# ---------------------------------------------------------------------------------------------------------------------
# TextStream


def streamed(encoding, *parts):
    stream = tokenizer.TextStream(encoding)
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
    stream = tokenizer.TextStream(tiny)
    assert [stream.feed(half), stream.finish(), stream.feed([64]), stream.finish()] == ["", "\ufffd", "a", ""]


# ---------------------------------------------------------------------------------------------------------------------
# every kind of tokenizer.json, against the tokenizers package

CODE = 'def f(a):\n\treturn a  # naïve\n\n\n    x = {"k": [1, 23, 456.789e-10]}\r\nfor (i = 0; i < 10; ++i) { s += "é"; }'
MIXED = ("👩‍👩‍👧‍👦", "🇩🇪👍🏽", "e\u0301\u0327", "\u1100\u1161\u11a8", "日本語テキスト", "العربية", "हिन्दी ไทย")
MIXED += ("don't WE'LL '", "½Ⅷ²", "<|im_", "</s", "\x00\x7f")


def random_texts(count, seed=0, tokens=()):
    """Each a row of random Unicode, code, runs of white space, digits, emoji, combining marks, and tokens' own text."""
    rng = random.Random(seed)
    blocks = [(0, 128), (0, 0x250), (0x250, 0x3000), (0x300, 0x370), (0x3000, 0xD800), (0xE000, 0x20000), (0x1F300, 0x1FAFF)]

    def part():
        kind = rng.randrange(8)
        if kind < 2:
            low, high = rng.choice(blocks)
            return "".join(chr(rng.randrange(low, high)) for _ in range(rng.randint(1, 12)))
        if kind == 2:
            return "".join(rng.choice(" \t\n\r\u00a0\u2003\u0085\u3000") for _ in range(rng.choice((1, 2, 5, 30))))
        if kind == 3:
            return rng.choice(" \n") * rng.choice((1, 3, 8, 70))
        if kind == 4:
            return str(rng.randrange(10 ** rng.randint(1, 12)))
        if kind == 5:
            start = rng.randrange(len(CODE))
            return CODE[start : start + rng.randint(1, 40)]
        return rng.choice([*MIXED, *tokens, *tokens])

    for _ in range(count):
        yield "".join(part() for _ in range(rng.randint(0, 6)))


def added(index, content, **flags):
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": index, "content": content} | plain | flags


def template(before, behind=()):
    """A TemplateProcessing with these (text, id) pairs around a text."""
    item = lambda pair: {"SpecialToken": {"id": pair[0], "type_id": 0}}
    single = [*map(item, before), {"Sequence": {"id": "A", "type_id": 0}}, *map(item, behind)]
    tokens = {text: {"id": text, "ids": [index], "tokens": [text]} for text, index in [*before, *behind]}
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": tokens}


def byte_level(corpus, form, tokens=(), **changes):
    """A trained byte-level spec with further added tokens, (text, flags) pairs, from 700 on."""
    spec = trained(corpus, form)
    spec["added_tokens"] += [added(700 + i, text, **flags) for i, (text, flags) in enumerate(tokens)]
    return spec | changes


def pieces(corpus, normalizer, pre_tokenizer, strip, unigram=False):
    """A spec of sentencepiece's kind: ▁ for a space, and BPE with a token for each byte or a Unigram model without."""
    tokenizers = pytest.importorskip("tokenizers")
    steps = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    steps += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if strip else []
    models = tokenizers.models
    tool = tokenizers.Tokenizer(
        models.Unigram() if unigram else models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    names, trainers = ["<unk>", "<s>", "</s>"], tokenizers.trainers
    if unigram:
        trainer = trainers.UnigramTrainer(vocab_size=500, special_tokens=names, unk_token="<unk>", show_progress=False)
        tool.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    else:
        trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=names, show_progress=False)
        tool.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"▁?[^▁]+|▁+"), "isolated")
    words = corpus if unigram else [text.replace(" ", "▁") for text in corpus]
    tool.train_from_iterator(words, trainer)
    spec = json.loads(tool.to_str())
    if not unigram:
        vocab = spec["model"]["vocab"]
        vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
        vocab |= {"▁": len(vocab)} if "▁" not in vocab else {}
    tokens = spec["added_tokens"] + [added(len(spec["model"]["vocab"]), "[INST]")]
    return spec | {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "added_tokens": tokens,
                   "decoder": METASPACE if unigram else {"type": "Sequence", "decoders": steps}}


def steps(*normalizers):
    return {"type": "Sequence", "normalizers": list(normalizers)}


SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
NFC = {"type": "NFC"}
CHAT = [("<|im_start|>", {}), ("<tool_call>", {"special": False})]
NESTED = [("<a>", {}), ("<a><b>", {}), ("<a><b>c", {"special": False}), ("b>c", {})]
NORMALIZED = [("é!", {"normalized": True, "special": False}), ("e\u0301?", {})]
STRIPS = [("<mask>", {"lstrip": True}), ("<end>", {"rstrip": True}), ("word", {"single_word": True, "special": False})]
ONE_BY_ONE = sequence(
    *split_form("[\r\n]")["pretokenizers"][:1], *split_form(r"\s?\p{L}+")["pretokenizers"][:1],
    *split_form("[一-龥]+")["pretokenizers"][:1], {"type": "Digits", "individual_digits": True}, BYTES_ONLY,
)
# name -> (spec from the corpus, whether it goes through tiktoken, what decode(encode_ordinary(text)) gives or None)
same, composed = (lambda text: text), (lambda text: composed_text(text))
KINDS = {
    "gpt2": (lambda c: byte_level(c, BYTE_LEVEL, post_processor=BYTE_LEVEL), True, same),
    "llama3": (lambda c: llama3_spec(c), True, same),
    "qwen": (lambda c: byte_level(c, split_form(tokenizer.QWEN_PATTERN), CHAT, normalizer=NFC), True, composed),
    "smollm": (lambda c: byte_level(c, digits_form(True), CHAT), True, same),
    "nemo": (lambda c: byte_level(c, split_form(tokenizer.O200K_PATTERN)), True, same),
    "nested tokens": (lambda c: byte_level(c, split_form(LLAMA3), NESTED), True, same),
    "normalized tokens": (lambda c: byte_level(c, split_form(LLAMA3), NORMALIZED, normalizer=NFC), False, composed),
    "tokens in two rounds": (lambda c: byte_level(c, BYTE_LEVEL, [("<a", {"normalized": True}), ("a>", {})]), False, same),
    "stripping tokens": (lambda c: byte_level(c, BYTE_LEVEL, STRIPS), False, same),
    "deepseek": (lambda c: byte_level(c, ONE_BY_ONE, [("<｜end▁of▁sentence｜>", {})]), False, same),
    "line ends": (lambda c: byte_level(c, split_form(r"\s+$|^\s+|\S+")), False, same),
    "roberta": (lambda c: byte_level(c, BYTE_LEVEL | {"add_prefix_space": True}), False, None),
    "llama2": (lambda c: pieces(c, steps({"type": "Prepend", "prepend": "▁"}, SPACE), None, True), False, same),
    "mistral": (lambda c: pieces(c, None, METASPACE, True), False, lambda text: text.removeprefix(" ")),
    "gemma": (lambda c: pieces(c, SPACE, None, False), False, same),
    "unigram": (lambda c: pieces(c, NFC, METASPACE | {"split": True}, False, unigram=True), False, None),
}


def composed_text(text):
    return pytest.importorskip("tokenizers").normalizers.NFC().normalize_str(text)


def llama3_spec(corpus):
    spec = byte_level(corpus, split_form(LLAMA3), post_processor=template([(EOT, 0)]))
    return spec | {"model": spec["model"] | {"ignore_merges": True}}


def compare_kind(name, corpus, folder, count, seed):
    """Ids, text and stream of `count` random texts against the package's own."""
    tokenizers = pytest.importorskip("tokenizers")
    build, through_tiktoken, back = KINDS[name]
    spec = build(corpus)
    encoding = tokenizer.load_encoding(save(folder, spec))
    assert isinstance(encoding, tiktoken.Encoding) == through_tiktoken
    package = tokenizers.Tokenizer.from_str(json.dumps(spec))
    _, plain = reference_ids(spec | {"post_processor": None})
    assert encoding.max_token_value == max(package.get_vocab().values())
    contents = [token["content"] for token in spec["added_tokens"]]
    for text in random_texts(count, seed, contents):
        text = re.sub("[\U00011de0-\U00011de9\U00016ff4-\U00016ff6]", "7", text) if name == "smollm" else text  # Unicode 17
        ids = encoding.encode(text, allowed_special="all")
        assert ids == package.encode(text, add_special_tokens=False).ids, ascii(text)
        assert tokenizer.encode_prompt(encoding, text) == package.encode(text).ids, ascii(text)
        decoded = encoding.decode(ids)
        assert decoded == package.decode(ids, skip_special_tokens=False), ascii(text)
        stream = "".join(streamed(encoding, ids))
        assert stream.endswith(decoded) and not stream.removesuffix(decoded).strip(" "), ascii(text)
        if name == "unigram" and any(content in text for content in contents):
            continue  # these are words of the model, which the reference finds even without added tokens
        ids = encoding.encode_ordinary(text)
        assert ids == plain(text), ascii(text)
        if back and "▁" not in text:
            assert encoding.decode(ids) == back(text), ascii(text)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_tokenizer_json_gives_the_packages_ids_text_and_stream(name, corpus, tmp_path):
    compare_kind(name, corpus, tmp_path, 400, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_tokenizer_json_on_100000_texts(name, corpus, tmp_path):
    compare_kind(name, corpus, tmp_path, 100_000, seed=2)


def test_special_words_of_a_unigram_model_are_plain_text_to_encode_ordinary(corpus, tmp_path):
    encoding = tokenizer.load_encoding(save(tmp_path, KINDS["unigram"][0](corpus)))
    assert 2 in encoding.encode("a</s>", allowed_special="all") and 2 not in encoding.encode_ordinary("a</s>")
    texts = ["a</s>", "b c"]
    assert encoding.encode_ordinary_batch(texts, num_threads=2) == [encoding.encode_ordinary(text) for text in texts]


def test_a_text_that_a_model_without_an_unknown_token_cannot_hold_is_refused(corpus, tmp_path):
    spec = KINDS["unigram"][0](corpus)
    spec["model"]["unk_id"] = None
    encoding = tokenizer.load_encoding(save(tmp_path, spec))
    refusal(lambda: encoding.encode("日本", allowed_special="all"), tmp_path / "tokenizer.json")


def test_a_package_encoding_has_the_methods_of_tiktokens(corpus, tmp_path):
    encoding = tokenizer.load_encoding(save(tmp_path, KINDS["llama2"][0](corpus)))
    assert tokenizer.end_of_text(encoding) == encoding.special_tokens["</s>"] == 2
    assert encoding.n_vocab == encoding.max_token_value + 1 == encoding.special_tokens["[INST]"] + 1
    for token in (encoding.n_vocab, -1, 2**40):
        with pytest.raises(KeyError):
            encoding.decode_single_token_bytes(token)
    assert encoding.decode_single_token_bytes(encoding.encode_ordinary("é日")[-1]) == "日".encode()[-1:]
    assert encoding.decode(encoding.encode("a\ud800b")) == "a\ufffdb"
    assert "".join(streamed(encoding, encoding.encode_ordinary("日")[-2:])) == "\ufffd" * 2
    tokens = data.token_array(["a</s>", "b"], encoding, 2)
    assert tokens.tolist() == [*encoding.encode_ordinary("a</s>"), 2, *encoding.encode_ordinary("b"), 2]


def test_hashes_of_all_kinds_differ_and_do_not_depend_on_the_files_layout(corpus, tmp_path):
    specs = [KINDS[name][0](corpus) for name in KINDS if name != "roberta"]
    specs += [specs[2] | {"normalizer": None}, specs[9] | {"normalizer": NFC}]
    specs += [specs[9] | {"added_tokens": specs[9]["added_tokens"][:2]}]
    hashes = [tokenizer.tokenizer_hash(tokenizer.load_encoding(save(tmp_path, spec))) for spec in specs]
    assert len(set(hashes)) == len(specs)
    for i in (2, 9):  # with indents, other keys first, and something before a prompt
        spec = dict(reversed(specs[i].items())) | {"post_processor": template([(EOT, 0)])}
        (tmp_path / "tokenizer.json").write_text(json.dumps(spec, indent=1), encoding="utf-8")
        assert tokenizer.tokenizer_hash(tokenizer.load_encoding(tmp_path)) == hashes[i]


def test_nfc_is_the_tokenizers_packages_where_unicode_grew():
    normalize = pytest.importorskip("tokenizers").normalizers.NFC().normalize_str
    every = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    for form in ("a{}\u0327\u0301 ", "a\u0301{} ", "{}\u0301{} ", "\u1611e{}\u1611f "):
        text = "".join(form.replace("{}", c) for c in every)
        assert tokenizer._normalize(text, tokenizer.LATER_MARKS) == normalize(text)


@pytest.mark.parametrize("package", ["tokenizers", "sentencepiece"])
def test_a_missing_package_is_named_with_what_installs_it(package, corpus, tmp_path, monkeypatch):
    if package == "tokenizers":
        save(tmp_path, KINDS["llama2"][0](corpus))
    write(tmp_path, {"tokenizer.model": b"\x0a\x0e"})
    monkeypatch.setitem(sys.modules, package, None)
    refusal(lambda: tokenizer.load_encoding(tmp_path), f"pip install {package}", tmp_path)


PACKAGE_REFUSED = {
    "the decoder WordPiece": changed("decoder", {"type": "WordPiece", "prefix": "##", "cleanup": True}),
    "the decoder null": changed("decoder", 0),
    "the decoder Replace+ByteFallback+Fuse+Strip with other settings": changed("decoder.decoders", [
        {"type": "Replace", "pattern": {"String": "_"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]),
    "dropout": changed("model.dropout", 0.1),
    "the post_processor Magic": changed("post_processor", {"type": "Magic"}),
    "the ids [99999]": changed("post_processor", template([("<s>", 99999)])),
    "KeyError": changed("post_processor", template([("<s>", 1)]) | {"special_tokens": {}}),
    "the id 1000000": lambda spec: spec["added_tokens"].append(added(1000000, "<far>")),
    "Token `q q`": lambda spec: spec["model"]["merges"].append(["q q", "z"]),
    "two tokens": lambda spec: spec["model"]["vocab"].update({"e": spec["model"]["vocab"]["t"]}),
}


@pytest.mark.parametrize("reason", PACKAGE_REFUSED)
def test_what_the_package_would_read_wrongly_is_refused_by_name(reason, corpus, tmp_path):
    spec = KINDS["llama2"][0](corpus)
    PACKAGE_REFUSED[reason](spec)
    refusal(lambda: tokenizer.load_encoding(save(tmp_path, spec)), reason, tmp_path / "tokenizer.json")


@pytest.mark.parametrize("name", ["gpt2", "qwen", "smollm", "mistral"])
def test_endless_runs_do_not_break_the_encoding(name, corpus, tmp_path):
    spec = KINDS[name][0](corpus)
    encoding = tokenizer.load_encoding(save(tmp_path, spec))
    whole, plain = reference_ids(spec)
    text = "x" + EOT + "\u3000" * 1_050_000 + "x"
    assert encoding.encode(text, allowed_special="all") == whole(text)
    text = "a b\ud800\n" + "\n \t" * 350_000
    assert encoding.encode_ordinary(text) == plain(text.replace("\ud800", "\ufffd"))


def test_a_vocabulary_of_150000_tokens_loads_fast(tmp_path, monkeypatch):
    """Three bytes to a token: nothing is slower to check for its length than real ones are."""
    rng = random.Random(4)
    spec, symbols = tiny_spec(), list(tiny_spec()["model"]["vocab"])[:256]
    pairs = [(a, b) for a in symbols for b in symbols]
    rank = {pair: i for i, pair in enumerate(pairs)}
    triples = {tuple(rng.choices(symbols, k=3)) for _ in range(85_000)}
    pairs += [((a + b, c) if rank[a, b] <= rank[b, c] else (a, b + c)) for a, b, c in triples]
    vocab = {symbol: i for i, symbol in enumerate([*symbols, *dict.fromkeys(a + b for a, b in pairs)])}
    spec["model"] |= {"vocab": vocab, "merges": [f"{a} {b}" for a, b in pairs]}
    spec["added_tokens"][0]["id"] = len(vocab)
    save(tmp_path, spec)
    work, last_parts = [], tokenizer._last_parts
    monkeypatch.setattr(tokenizer, "_last_parts", lambda token, merges: work.append(len(token)) or last_parts(token, merges))
    encoding = tokenizer.load_encoding(tmp_path)
    assert encoding.max_token_value > 150_000 and len(work) == len(vocab) and sum(work) < 4 * len(vocab)  # each token once
    assert encoding.decode(encoding.encode_ordinary("hé日!")) == "hé日!"


# ---------------------------------------------------------------------------------------------------------------------
# the ids before a prompt, against transformers


def folder_of(folder, spec, config, files=()):
    write(folder, {"tokenizer_config.json": json.dumps(config), "config.json": '{"model_type": "llama"}'} | dict(files))
    return save(folder, spec) if spec else folder


def auto_tokenizer(folder):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


PROCESSORS = {
    "none": (None, []),
    "byte level": (BYTE_LEVEL, []),
    "bos": (template([(EOT, 0)]), [0]),
    "two": (template([(EOT, 0), ("<|im_end|>", 1)]), [0, 1]),
    "bos and eos": (template([(EOT, 0)], [("<|im_end|>", 1)]), [0]),
    "eos": (template([], [(EOT, 0)]), []),
    "sequence": ({"type": "Sequence", "processors": [BYTE_LEVEL, template([(EOT, 0)])]}, [0]),
    "roberta": ({"type": "RobertaProcessing", "sep": [EOT, 0], "cls": ["<|im_end|>", 1], "trim_offsets": True,
                 "add_prefix_space": False}, [1]),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_prompts_begin_as_transformers_begins_them(name, corpus, tmp_path):
    processor, prefix = PROCESSORS[name]
    spec = byte_level(corpus, split_form(LLAMA3), post_processor=processor)
    folder_of(tmp_path, spec, {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": name == "none"})
    encoding, reference = tokenizer.load_encoding(tmp_path), auto_tokenizer(tmp_path)
    assert encoding.prefix == prefix
    for text in ("", "Hello world", f"a{EOT}b", "  \n日"):
        ids = tokenizer.encode_prompt(encoding, text)
        assert ids == reference.encode(text)[: len(ids)] and reference.encode(text)[len(ids) :] in ([], [0], [1])
    assert tokenizer.encode_prompt(encoding, "ab") == [*prefix, *encoding.encode("ab")]


def test_a_prompt_leaves_out_bytes_that_the_vocabulary_lacks(corpus, tmp_path):
    spec = trained(["only ascii"], BYTE_LEVEL, whole_alphabet=False)
    encoding = tokenizer.load_encoding(save(tmp_path, spec))
    whole, _ = reference_ids(spec)
    assert tokenizer.encode_prompt(encoding, "only 日ascii") == whole("only 日ascii") == whole("only ascii") != []


# ---------------------------------------------------------------------------------------------------------------------
# vocab.json with merges.txt, against transformers


def vocab_files(spec):
    merges = "\n".join(" ".join(merge) for merge in spec["model"]["merges"])
    return {"vocab.json": json.dumps(spec["model"]["vocab"]), "merges.txt": f"#version: 0.2\n{merges}\n"}


def token(text):
    return {"__type": "AddedToken", **added(0, text)} | {"id": None}


OLD_FORMS = {
    "gpt2": ("GPT2Tokenizer", {"additional_special_tokens": ["<|im_end|>"]}, {}),
    "gpt2 with a bos": ("GPT2TokenizerFast", {"add_bos_token": True, "bos_token": EOT, "eos_token": "<|im_end|>"}, {}),
    "gpt2 with tokens": ("GPT2Tokenizer", {"pad_token": token("<pad>"), "bos_token": "<|im_end|>"},
                         {"added_tokens.json": '{"<pad>": 700}'}),
    "qwen": ("Qwen2Tokenizer",
             {"added_tokens_decoder": {"700": added(700, "<|im_start|>"), "1": added(1, "<|im_end|>")}}, {}),
    "map": ("Qwen2Tokenizer", {},
            {"special_tokens_map.json": '{"eos_token": "<|im_end|>", "additional_special_tokens": []}'}),
}


@pytest.mark.parametrize("name", OLD_FORMS)
def test_vocab_and_merges_give_the_ids_of_transformers(name, corpus, tmp_path):
    kind, config, files = OLD_FORMS[name]
    spec = trained(corpus, BYTE_LEVEL if "gpt2" in name else split_form(tokenizer.QWEN_PATTERN))
    folder_of(tmp_path, None, {"tokenizer_class": kind} | config, vocab_files(spec) | files)
    encoding, reference = tokenizer.load_encoding(tmp_path), auto_tokenizer(tmp_path)
    assert isinstance(encoding, tiktoken.Encoding) and encoding.special_tokens[EOT] == 0
    for text in random_texts(300, 3, encoding.special_tokens):
        ids = reference.encode(text)
        assert tokenizer.encode_prompt(encoding, text) == ids, ascii(text)
    assert encoding.prefix == ([0] if "bos" in name else [])


def test_vocab_and_merges_alone_are_gpt2s_or_qwens_by_the_config(corpus, tmp_path):
    spec = trained(corpus, BYTE_LEVEL)
    write(tmp_path, vocab_files(spec) | {"special_tokens_map.json": '{"eos_token": "<|im_end|>"}'})
    assert tokenizer.load_encoding(tmp_path)._pat_str == tokenizer.GPT2_PATTERN
    assert tokenizer.tokenizer_hash(tokenizer.load_encoding(tmp_path / "vocab.json"))
    write(tmp_path, {"config.json": '{"model_type": "qwen3"}'})
    assert tokenizer.load_encoding(tmp_path).normal == "NFC"
    save(tmp_path, tiny_spec())
    assert tokenizer.load_encoding(tmp_path).max_token_value == 300  # tokenizer.json comes first


@pytest.mark.parametrize("files, reason", [
    ({"tokenizer_config.json": '{"tokenizer_class": "RobertaTokenizer"}'}, "RobertaTokenizer"),
    ({"tokenizer_config.json": '{"pad_token": "<pad>"}'}, "<pad>"),
    ({"added_tokens.json": '{"<pad>": "9"}'}, "<pad>"),
    ({"added_tokens.json": '{"<|endoftext|>": 9}'}, EOT),
    ({"tokenizer_config.json": '{"add_bos_token": true}'}, "add_bos_token"),
    ({"tokenizer_config.json": "{"}, "tokenizer_config.json"),
    ({"vocab.json": "[]"}, "vocab.json"),
    ({"merges.txt": b"\xff"}, "merges.txt"),
    ({"merges.txt": "a b c"}, "vocab.json"),
])  # fmt: skip
def test_broken_files_beside_vocab_json_are_refused_by_name(files, reason, corpus, tmp_path):
    write(tmp_path, vocab_files(trained(corpus, BYTE_LEVEL)) | files)
    one_line(lambda: tokenizer.load_encoding(tmp_path), reason, tmp_path)


def one_line(call, *names):
    """As refusal, where the words are those of read_json."""
    with pytest.raises(InputError) as caught:
        call()
    assert "\n" not in str(caught.value) and all(str(name) in str(caught.value) for name in names), str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# .tiktoken files, against tiktoken's own


def filled_ranks(corpus, count, gap=None):
    """{bytes: id} of `count` tokens: trained ones, then such as no text has."""
    model = trained(corpus, split_form(LLAMA3))["model"]
    table = tokenizer._byte_symbols()
    words = [token.translate(table).encode("latin-1") for token in model["vocab"] if not token.startswith("<|")]
    words += [b"\xff\xfe" + i.to_bytes(3, "big") for i in range(count - len(words))]
    ids = (i for i in range(count + 1) if i != gap)
    return dict(zip(words, ids))


def tiktoken_lines(ranks):
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


@pytest.mark.parametrize("name", ["r50k_base", "p50k_base", "cl100k_base", "o200k_base"])
def test_tiktoken_files_give_the_ids_of_tiktokens_own_encodings(name, corpus, tmp_path, monkeypatch):
    from tiktoken_ext import openai_public

    ranks = filled_ranks(corpus, tokenizer.TIKTOKEN_FILES[name][0], 50256 if name == "p50k_base" else None)
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: ranks)
    reference = tiktoken.Encoding(**getattr(openai_public, name)())  # which counts its tokens, too
    write(tmp_path, {f"{name}.tiktoken": tiktoken_lines(ranks)})
    encoding = tokenizer.load_encoding(tmp_path)
    assert encoding.special_tokens == reference._special_tokens and encoding.n_vocab == reference.n_vocab
    for text in random_texts(300, 5, encoding.special_tokens):
        assert encoding.encode(text, allowed_special="all") == reference.encode(text, allowed_special="all"), ascii(text)
        assert encoding.decode(encoding.encode_ordinary(text)) == text
    assert encoding.prefix == [] and tokenizer.end_of_text(encoding) == encoding.special_tokens[EOT]


def test_qwens_first_tokenizer_normalises_the_whole_text_first(corpus, tmp_path):
    ranks = filled_ranks(corpus, 151643)
    write(tmp_path, {"qwen.tiktoken": tiktoken_lines(ranks)})
    encoding = tokenizer.load_encoding(tmp_path / "qwen.tiktoken")
    names = {EOT: 151643, "<|im_start|>": 151644, "<|im_end|>": 151645, "<|extra_0|>": 151646, "<|extra_204|>": 151850}
    assert names.items() <= encoding.special_tokens.items() and encoding.n_vocab == 151851
    special = encoding.special_tokens
    reference = tiktoken.Encoding("q", pat_str=tokenizer.QWEN_PATTERN, mergeable_ranks=ranks, special_tokens=special)
    for text in [*random_texts(300, 6, names), "<|im_end|>\u0338"]:
        composed = unicodedata.normalize("NFC", text)
        assert encoding.encode(text, allowed_special="all") == reference.encode(composed, allowed_special="all"), ascii(text)
        assert encoding.decode(encoding.encode_ordinary(text)) == composed


LLAMA3_NAMES = {128000: "<|begin_of_text|>", 128001: "<|end_of_text|>", 128006: "<|start_header_id|>", 128009: "<|eot_id|>"}


def test_llama_3s_tokenizer_model_needs_the_names_of_its_special_tokens(corpus, tmp_path):
    ranks = filled_ranks(corpus, 128000)
    write(tmp_path, {"tokenizer.model": tiktoken_lines(ranks)})
    refusal(lambda: tokenizer.load_encoding(tmp_path), "Llama 3's special tokens", tmp_path)
    decoder = {str(i): added(i, text) for i, text in LLAMA3_NAMES.items()}
    config = {"bos_token": "<|begin_of_text|>", "added_tokens_decoder": decoder}
    write(tmp_path, {"tokenizer_config.json": json.dumps(config)})
    encoding = tokenizer.load_encoding(tmp_path)
    reference = tiktoken.Encoding("llama3", pat_str=LLAMA3, mergeable_ranks=ranks, special_tokens=encoding.special_tokens)
    assert encoding.max_token_value == 128009
    for text in random_texts(300, 7, LLAMA3_NAMES.values()):
        ids = [128000, *reference.encode(text, allowed_special="all")]
        assert tokenizer.encode_prompt(encoding, text) == ids, ascii(text)


@pytest.mark.parametrize("name, content, reason", [
    ("other.tiktoken", b"YQ== 0\n", "r50k_base"),
    ("cl100k_base.tiktoken", b"YQ== 0\n", "100256"),
    ("cl100k_base.tiktoken", b"YQ==\n", "misshapen"),
    ("cl100k_base.tiktoken", b"!!!! 0\n", "misshapen"),
    ("cl100k_base.tiktoken", b"YQ== x\n", "misshapen"),
])  # fmt: skip
def test_tiktoken_files_that_are_unknown_cut_short_or_broken_are_refused(name, content, reason, tmp_path):
    write(tmp_path, {name: content})
    refusal(lambda: tokenizer.load_encoding(tmp_path), reason, tmp_path / name)


def test_a_folder_without_a_tokenizer_and_a_folder_in_its_place_are_refused(tmp_path):
    refusal(lambda: tokenizer.load_encoding(tmp_path / "x.tiktoken"), tmp_path / "x.tiktoken")
    refusal(lambda: tokenizer.load_encoding(tmp_path / "tokenizer.model"), tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer.json").mkdir()
    refusal(lambda: tokenizer.load_encoding(tmp_path), tmp_path / "tokenizer.json")
    write(tmp_path, {"deep/tokenizer.json": "[" * 200_000})
    refusal(lambda: tokenizer.load_encoding(tmp_path / "deep"), tmp_path / "deep")


# ---------------------------------------------------------------------------------------------------------------------
# tokenizer.model, against sentencepiece


@pytest.fixture(scope="module")
def sentences(corpus):
    return [line for text in corpus[:10] for line in text.split("\n") if line.strip()]


PIECE_MODELS = {
    "bpe": dict(model_type="bpe", byte_fallback=True, remove_extra_whitespaces=False, normalization_rule_name="identity",
                split_digits=True, allow_whitespace_only_pieces=True, user_defined_symbols="<reserved_1>"),
    "unigram": dict(model_type="unigram", byte_fallback=True, remove_extra_whitespaces=False,
                    normalization_rule_name="identity"),
    "no dummy prefix": dict(model_type="bpe", byte_fallback=True, remove_extra_whitespaces=False, add_dummy_prefix=False,
                            normalization_rule_name="identity"),
    "nmt_nfkc, no bytes": dict(model_type="bpe"),
}  # fmt: skip


def sentencepiece_model(sentences, name):
    sentencepiece = pytest.importorskip("sentencepiece")
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=out, vocab_size=700, minloglevel=2, **PIECE_MODELS[name]
    )
    return out.getvalue(), sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())


def compare_pieces(name, sentences, folder, count, seed):
    content, model = sentencepiece_model(sentences, name)
    write(folder, {"tokenizer.model": content, "added_tokens.json": '{"[INST]": 700}'})
    encoding = tokenizer.load_encoding(folder)
    special = {"<unk>": 0, "<s>": 1, "</s>": 2, "[INST]": 700}
    assert encoding.special_tokens == special and encoding.max_token_value == 700 and encoding.prefix == [1]
    for text in random_texts(count, seed, special):
        ids = encoding.encode_ordinary(text)
        assert ids == model.encode(text), ascii(text)
        decoded, stream = encoding.decode(ids), "".join(streamed(encoding, ids))
        assert decoded == model.decode(ids), ascii(text)
        assert stream in (decoded, f" {decoded}"), ascii(text)
        if "nfkc" not in name and "▁" not in text:
            assert decoded == text
        parts = re.split("(" + "|".join(map(re.escape, special)) + ")", text)
        ids = [token for part in parts for token in ([special[part]] if part in special else model.encode(part))]
        assert tokenizer.encode_prompt(encoding, text) == [1, *ids], ascii(text)
        if "nfkc" not in name and "▁" not in text and "<unk>" not in text:
            assert encoding.decode(ids) == text


@pytest.mark.parametrize("name", PIECE_MODELS)
def test_tokenizer_model_gives_sentencepieces_ids_text_and_stream(name, sentences, tmp_path):
    compare_pieces(name, sentences, tmp_path, 400, seed=8)


@pytest.mark.slow
@pytest.mark.parametrize("name", PIECE_MODELS)
def test_tokenizer_model_on_100000_texts(name, sentences, tmp_path):
    compare_pieces(name, sentences, tmp_path, 100_000, seed=9)


def test_without_legacy_nothing_is_put_before_the_text_behind_a_special_token(sentences, tmp_path):
    content, model = sentencepiece_model(sentences, "bpe")
    assert "\n" not in "".join(sentences)
    write(tmp_path, {"tokenizer.model": content, "tokenizer_config.json": '{"legacy": false}'})
    encoding = tokenizer.load_encoding(tmp_path)
    for text in ("a", " a", "  def f(x):", "日本", ""):
        behind = model.encode(f"\n{text}")[2:]  # what stands behind ▁ and a byte that joins nothing
        ids = encoding.encode(f"a</s>{text}", allowed_special="all")
        assert ids == [*model.encode("a"), 2, *behind] and encoding.decode(ids) == f"a</s>{text}"
    with_legacy = tokenizer.load_encoding(write(tmp_path, {"tokenizer_config.json": "{}"}))
    assert tokenizer.tokenizer_hash(with_legacy) != tokenizer.tokenizer_hash(encoding)


@pytest.mark.parametrize("config, prefix", [
    ({}, [1]),
    ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False}, []),
    ({"tokenizer_class": "LlamaTokenizer", "bos_token": {"content": "</s>"}}, [2]),
    ({"tokenizer_class": "BaichuanTokenizer", "added_tokens_decoder": {"2": added(2, "</s>")}}, []),
    ({"tokenizer_class": "BaichuanTokenizer", "add_bos_token": True, "bos_token": "<s>"}, [1]),
])  # fmt: skip
def test_a_bos_token_is_llamas_default_and_baichuans_choice(config, prefix, sentences, tmp_path):
    content, model = sentencepiece_model(sentences, "bpe")
    write(tmp_path, {"tokenizer.model": content, "tokenizer_config.json": json.dumps(config)})
    encoding = tokenizer.load_encoding(tmp_path)
    assert tokenizer.encode_prompt(encoding, "def f") == [*prefix, *model.encode("def f")]
    assert encoding.encode_ordinary("<reserved_1>") == model.encode("<reserved_1>")


@pytest.mark.parametrize("files, reason", [
    ({"tokenizer_config.json": '{"tokenizer_class": "T5Tokenizer"}'}, "T5Tokenizer"),
    ({"tokenizer_config.json": '{"add_prefix_space": false}'}, "add_prefix_space"),
    ({"tokenizer_config.json": '{"sp_model_kwargs": {"enable_sampling": true}}'}, "sp_model_kwargs"),
    ({"tokenizer_config.json": json.dumps({"added_tokens_decoder": {"700": added(700, "<a>", rstrip=True)}})}, "rstrip"),
    ({"tokenizer_config.json": json.dumps({"added_tokens_decoder": {"5": added(5, "<a>")}})}, "<a>"),
    ({"tokenizer_config.json": '{"pad_token": "[PAD]"}'}, "[PAD]"),
    ({"added_tokens.json": '{"</s>": 700}'}, "</s>"),
    ({"added_tokens.json": '{"<a>": 700, "<b>": 700}'}, "700"),
    ({"tokenizer.model": b""}, "tokenizer.model"),
    ({"tokenizer.model": b"no model"}, "tokenizer.model"),
])  # fmt: skip
def test_what_tokenizer_model_does_not_say_is_refused(files, reason, sentences, tmp_path):
    write(tmp_path, {"tokenizer.model": sentencepiece_model(sentences, "bpe")[0]} | files)
    refusal(lambda: tokenizer.load_encoding(tmp_path), reason, tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# stop tokens


@pytest.mark.parametrize("files, expected", [
    ({}, [0]),
    ({"config.json": {"eos_token_id": 1}}, [1]),
    ({"config.json": {"eos_token_id": 1}, "generation_config.json": {"eos_token_id": [700, 0]}}, [700, 0]),
    ({"config.json": {"eos_token_id": 1}, "generation_config.json": {"eos_token_id": None}}, [1]),
    ({"config.json": {"eos_token_id": 0}, "tokenizer_config.json": {"eos_token": "<|im_end|>"}}, [0]),
    ({"config.json": {"eos_token_id": 0}, "tokenizer_config.json": {"eos_token": "<|im_end|>", "chat_template": "x"}},
     [0, 1]),
    ({"tokenizer_config.json": {"eos_token": {"content": EOT}, "chat_template": "x"}}, [0]),
    ({"tokenizer_config.json": {"eos_token": "<unheard>", "chat_template": "x"}}, [0]),
])  # fmt: skip
def test_stop_tokens_are_the_generation_configs_then_the_configs_then_the_end_of_text(files, expected, corpus, tmp_path):
    save(tmp_path, byte_level(corpus, BYTE_LEVEL, CHAT))
    write(tmp_path, {name: json.dumps(content) for name, content in files.items()})
    encoding = tokenizer.load_encoding(tmp_path)
    assert chat.stop_tokens(tmp_path, encoding) == expected
    assert chat.stop_tokens(tmp_path / "tokenizer.json", encoding) == expected


@pytest.mark.parametrize("ids", [700, -1, "0", True, 1.0, [0, None], [], 2**70])
def test_stop_tokens_that_are_no_tokens_are_refused(ids, corpus, tmp_path):
    save(tmp_path, trained(corpus, BYTE_LEVEL))
    write(tmp_path, {"generation_config.json": json.dumps({"eos_token_id": ids})})
    encoding = tokenizer.load_encoding(tmp_path)
    refusal(lambda: chat.stop_tokens(tmp_path, encoding), tmp_path / "generation_config.json", "eos_token_id")
    write(tmp_path, {"generation_config.json": "{"})
    one_line(lambda: chat.stop_tokens(tmp_path, encoding), tmp_path / "generation_config.json")


# ---------------------------------------------------------------------------------------------------------------------
# chat templates, against transformers

CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content }}{% endgeneration %}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
HEADERS = """{{- bos_token }}
{%- set day = strftime_now("%d %b %Y") %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
<|head|>system<|/head|>

Today: {{ day }}
{% if tools is not none %}
Tools: {{ tools | tojson(indent=2) }}
{% endif %}
{{ system }}{{ eos_token }}
{% for message in messages %}
    {% if message.content is not string %}
{{ raise_exception('text only') }}
    {% endif %}
<|head|>{{ message['role'] }}<|/head|>

{{ message['content'] | trim }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}
<|head|>assistant<|/head|>
{% endif %}"""
TURNS = """{{ bos_token }}{% for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('After a user comes an assistant, not "' + message.role + '"') }}
{%- endif %}
{%- if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}
{%- else %}{{ ' ' + message.content | trim + eos_token }}{% endif %}
{%- endfor %}"""
COUNTED = """
{%- set ns = namespace(count=0, last='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- if ns.count >= 3 %}{% break %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- set ns.last = message.role %}
    {{- {'n': ns.count, 'text': message.content, 'ümläut': '<&>'} | tojson }}{{ pad_token }}{{ nothing }}
{% endfor -%}
last: {{ ns.last }}, {{ unk_token if unk_token is defined else 'no unk' }}, {{ image_token }}
"""
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "turns": TURNS, "counted": COUNTED}
TOKENS = {"bos_token": EOT, "eos_token": token("<|im_end|>"), "pad_token": EOT, "image_token": "<|im_start|>"}


def said(*turns):
    return [{"role": role, "content": content} for role, content in turns]


CHATS = {
    "one": said(("user", " Hi <b>&amp;</b> 'é' 日\n")),
    "three": said(("user", "a"), ("assistant", " b "), ("user", "<|im_end|>")),
    "system": said(("system", "be brief"), ("user", "x"), ("assistant", "y"), ("user", "z"), ("assistant", "w")),
    "empty": said(("user", "")),
}


def chat_folder(folder, corpus, **config):
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | TOKENS | config
    return folder_of(folder, byte_level(corpus, split_form(LLAMA3), CHAT, post_processor=template([(EOT, 0)])), config)


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_and_encode_as_transformers_does(name, corpus, tmp_path):
    pytest.importorskip("transformers")
    chat_folder(tmp_path, corpus, chat_template=TEMPLATES[name])
    ours, encoding = chat.load_chat_template(tmp_path), tokenizer.load_encoding(tmp_path)
    reference, tools = auto_tokenizer(tmp_path), [{"type": "function", "name": "é<"}]
    assert tokenizer.encode_prompt(encoding, "") == [0]
    for kind, messages in CHATS.items():
        if (name, kind) == ("turns", "system"):
            continue
        for options in ({"add_generation_prompt": True}, {"add_generation_prompt": False, "tools": tools}):
            text = ours.render(messages, **options)
            assert text == reference.apply_chat_template(messages, tokenize=False, **options)
            ids = reference.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
            assert encoding.encode(text, allowed_special="all") == ids  # a BOS token only where the template writes one
    if name == "headers":
        assert re.search(r"Today: \d\d \w+ \d{4}\n", text)
    assert ours.render(CHATS["one"]) == ours.render(CHATS["one"], add_generation_prompt=True)


def test_what_a_template_raises_is_one_line_with_the_file_and_its_words(corpus, tmp_path):
    chat_folder(tmp_path, corpus, chat_template=TURNS)
    ours = chat.load_chat_template(tmp_path)
    refusal(lambda: ours.render(CHATS["system"]), tmp_path / "tokenizer_config.json", 'not "system"')
    write(tmp_path, {"chat_template.jinja": HEADERS})
    ours = chat.load_chat_template(tmp_path)
    refusal(lambda: ours.render([{"role": "user", "content": 7}]), tmp_path / "chat_template.jinja", "text only")


@pytest.mark.parametrize("source, reason", [
    ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
    ("{% set _ = messages.append(1) %}", "unsafe"),
    ("{{ messages | map(attribute='x') | join.y }}", "join.y"),
    ("{{ nothing.at.all }}", "nothing"),
    ("{{ 1 / 0 }}", "zero"),
    ("{{ range(10 ** 9) | list }}", "Range"),
    ("{{ messages | tojson(indent='x', separators=7) }}", ""),
    ("{% for %}", "line 1"),
    ("\n{{ raise_exception(1", "line 2"),
    ("{% generation %}", "line 1"),
    ("{% include 'tokenizer.json' %}", "loader"),
])  # fmt: skip
def test_a_broken_or_hostile_template_is_refused_in_one_line(source, reason, tmp_path):
    write(tmp_path, {"chat_template.jinja": source})
    refusal(lambda: chat.load_chat_template(tmp_path).render(CHATS["one"]), tmp_path / "chat_template.jinja", reason)


def test_where_a_template_is_looked_for(tmp_path):
    assert chat.load_chat_template(tmp_path) is None
    one = said(("user", "x"))
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default {{ bos_token }}"}]
    write(tmp_path, {"tokenizer_config.json": json.dumps({"chat_template": named})})
    write(tmp_path, {"special_tokens_map.json": '{"bos_token": {"content": "<s>"}}'})
    assert chat.load_chat_template(tmp_path).render(one) == "default <s>"
    write(tmp_path, {"chat_template.jinja": "file {{ messages[0].content }}\n", "tokenizer.json": "{}"})
    assert chat.load_chat_template(tmp_path / "tokenizer.json").render(one) == "file x"
    write(tmp_path, {"chat_template.jinja": b"\xff"})
    refusal(lambda: chat.load_chat_template(tmp_path), tmp_path / "chat_template.jinja")
    (tmp_path / "chat_template.jinja").unlink()
    for broken in (7, [], [{"name": "tool_use", "template": "x"}], ["x"], {"default": 1}):
        write(tmp_path, {"tokenizer_config.json": json.dumps({"chat_template": broken})})
        refusal(lambda: chat.load_chat_template(tmp_path), tmp_path / "tokenizer_config.json", "default")
    write(tmp_path, {"tokenizer_config.json": "[]"})
    one_line(lambda: chat.load_chat_template(tmp_path), tmp_path / "tokenizer_config.json")
