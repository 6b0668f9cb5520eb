"""hf/tokenizer.py, hf/bpe.py: ids equal those of the folder's own tokenizer, with tiktoken or without it; text
round-trips; broken files are refused."""

import json
import random
import sys
import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import tokenizers

from conftest import refusal
from hf import tokenizer_json
from hf.bpe import BYTES
from hf.chat import end_of_text
from hf.tokenizer import encode_prompt, load_encoding
from hf.tokenizer_json import BYTE_LEVEL, DIGITS, LLAMA3_PATTERN, QWEN_PATTERN, split_steps

EOT = "<|endoftext|>"
BYTES_IN_ORDER = [*BYTES.values()]  # tiny_spec's ids are positions in this list


def tiny_spec():
    """Written by hand: GPT-2's 256 byte tokens with GPT-2's ids, five merges, one special token."""
    symbols = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = ["h e", "l l", "he ll", "Ġ w", "Ġ Ġ"]
    vocab = {symbol: i for i, symbol in enumerate([*symbols, "he", "ll", "hell", "Ġw", "ĠĠ"])}
    return {
        "added_tokens": [added(261, EOT)],
        "normalizer": None,
        "pre_tokenizer": BYTE_LEVEL,
        "decoder": BYTE_LEVEL,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }


def save(folder, spec):
    (folder / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    return folder


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def streamed(encoding, *parts):
    stream = encoding.stream()
    return [stream.feed(part) for part in parts] + [stream.finish()]


@pytest.fixture
def tiny(tmp_path):
    return load_encoding(save(tmp_path, tiny_spec()))


def test_the_hash_is_fixed_and_depends_on_all_tokens(tmp_path, tiny):
    """Catches a hash that changes with the run, machine or code, so that saved heads no longer load."""
    assert tiny.hash == "e0ac55cde61dd6a5"
    assert load_encoding("demo").hash == "bfbba4a43fa2119e"
    turned = dict(reversed(tiny_spec().items())) | {"post_processor": BOS}  # with a BOS token
    (tmp_path / "tokenizer.json").write_text(json.dumps(turned, indent=1))
    assert load_encoding(tmp_path).hash == tiny.hash
    changed = [tiny_spec() for _ in range(3)]
    changed[0]["model"]["vocab"] |= {"!": 1, '"': 0}
    changed[1]["added_tokens"][0]["content"] = "</s>"
    changed[2]["added_tokens"].append(added(263, "[PAD7]"))  # no padding, as converters to GGUF write it
    assert len({load_encoding(save(tmp_path, spec)).hash for spec in [tiny_spec(), *changed]}) == 4


def test_a_stream_of_bytes_that_are_no_utf8_gives_what_decoding_them_at_once_gives(tiny):
    rng = random.Random(2)
    for _ in range(300):
        raw = bytes(rng.choice(b"a\x80\xbf\xc3\xe2\x82\xf0\x9f\x91\xff") for _ in range(12))
        assert "".join(streamed(tiny, *[[BYTES_IN_ORDER.index(byte)] for byte in raw])) == raw.decode(errors="replace")
    assert streamed(tiny, [64, 299, 64, -1, 2**40, 261]) == [f"aa{EOT}", ""]  # like transformers
    assert tiny.decode(tiny.encode("a\ud800b")) == "a\ufffdb"


SNIPPETS = [
    "👩‍👩‍👧‍👦", "🇩🇪👍🏽", "e\u0301\u0327", "\u1100\u1161\u11a8", "日本語テキスト", "العربية", "हिन्दी ไทย", "½Ⅷ²",
    "don't WE'LL '", "<|im_", "</s", "\x00\x7f", "\r\n\r\n  \r\nx", "\ufeffBOM", "a" * 300, "1234567 89.0e-10",
    " \u00a0\u2003\u0085\u3000", " " * 70, "\n" * 8,
    'def f(a):\n\treturn a  # naïve\n\n\n    x = {"k": [1]}\r\nfor (i = 0; i < 9; ++i) { s; }']
WORDS = ["hello hell", "helll lle ellhe", "w  hehell", "hello", "hello hello, xhello helloo"]
ASSIGNED = " ".join(c for c in map(chr, range(0, 0x110000, 41)) if unicodedata.category(c) not in ("Cn", "Co", "Cs"))
BLOCKS = [(0, 0x250), (0x250, 0x3000), (0x300, 0x370), (0x3000, 0xD800), (0xE000, 0x20000), (0x1F300, 0x1FAFF)]


def random_texts(count, seed=0, tokens=()):
    """Random texts of Unicode, code, white space, digits, emoji, combining marks, and the text of `tokens`."""
    rng = random.Random(seed)

    def part():
        low, high = rng.choice(BLOCKS)
        letters = "".join(chr(rng.randrange(low, high)) for _ in range(rng.randint(1, 12)))
        snippet = rng.choice([*SNIPPETS, *tokens, *tokens])
        return rng.choice([letters, snippet, snippet[rng.randrange(len(snippet)):]])

    for _ in range(count):
        yield "".join(part() for _ in range(rng.randint(0, 6)))


def split_form(split):
    return {"type": "Sequence", "pretokenizers": split_steps(split)}


def added(index, content, **flags):
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": index, "content": content} | plain | flags


def template(before, after=()):
    """A TemplateProcessing that puts these (text, id) tokens around a text."""
    def item(pair):
        return {"SpecialToken": {"id": pair[0], "type_id": 0}}

    single = [*map(item, before), {"Sequence": {"id": "A", "type_id": 0}}, *map(item, after)]
    tokens = {text: {"id": text, "ids": [index], "tokens": [text]} for text, index in [*before, *after]}
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": tokens}


def byte_level(corpus, form, tokens=(), alphabet=True, model=(), **changes):
    """The spec of a byte-level BPE with 700 tokens, trained by the package, and more added tokens from id 700 on."""
    base = {"type": "BPE", "vocab": {}, "merges": []}
    spec = {"version": "1.0", "added_tokens": [], "pre_tokenizer": form, "decoder": BYTE_LEVEL, "model": base}
    tool = tokenizers.Tokenizer.from_str(json.dumps(spec))
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet() if alphabet else []
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet,
                                             special_tokens=[EOT, "<|im_end|>"], show_progress=False)
    tool.train_from_iterator(corpus, trainer)
    spec = json.loads(tool.to_str())
    spec["added_tokens"] += [added(700 + i, text, **flags) for i, (text, flags) in enumerate(tokens)]
    spec["model"] |= dict(model)
    return spec | changes


def pieces(corpus, normalizer, pre_tokenizer, strip, more=("[INST]",)):
    """The spec of a tokenizer like sentencepiece's: BPE with ▁ for a space and a token for each byte. more: added."""
    tool = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", "<s>", "</s>"],
                                             show_progress=False)
    tool.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"▁?[^▁]+|▁+"), "isolated")
    tool.train_from_iterator([text.replace(" ", "▁") for text in corpus], trainer)
    spec = json.loads(tool.to_str())
    vocab = spec["model"]["vocab"]
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    vocab |= {"▁": len(vocab)} if "▁" not in vocab else {}
    steps = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}]
    steps += [{"type": "Fuse"}] + [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * strip
    return spec | {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer,
                   "decoder": {"type": "Sequence", "decoders": steps},
                   "added_tokens": spec["added_tokens"] + [added(len(vocab), text) for text in more]}


SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPEND = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, SPACE]}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
NFC = {"type": "NFC"}
CHAT = [("<|im_start|>", {}), ("<tool_call>", {"special": False})]
NESTED = [("<a>", {}), ("<a><b>", {}), ("<a><b>c", {"special": False}), ("b>c", {})]
STRIPS = [("<mask>", {"lstrip": True}), ("<end>", {"rstrip": True}), ("word", {"single_word": True, "special": False})]
BOS = template([(EOT, 0)])


def every_split(corpus, **model):
    """Like Llama 3's: merges are all splits of each token, and one token of three parts is made by none."""
    spec = byte_level(corpus, split_form(LLAMA3_PATTERN), model=model)
    vocab = spec["model"]["vocab"]
    tokens = [token for token, index in vocab.items() if index > 1]
    pairs = [(token[:i], token[i:]) for token in tokens for i in range(1, len(token))]
    spec["model"]["merges"] = sorted((p for p in pairs if vocab.keys() >= set(p)), key=lambda p: vocab["".join(p)])
    vocab["qzqzx"] = 700
    return spec


def tiny_with(merges, vocab=(), **model):
    """tiny_spec without the special token, with other merges and ids."""
    spec = tiny_spec() | {"added_tokens": []}
    spec["model"] |= {"merges": merges.split(", "), "vocab": spec["model"]["vocab"] | dict(vocab)} | model
    return spec


def removed_form(split):
    form = split_form(split)
    form["pretokenizers"][0] |= {"behavior": "Removed", "invert": True}
    return form


TIKTOKEN = {  # corpus -> spec, first those of published models
    "gpt2": lambda c: byte_level(c, BYTE_LEVEL, post_processor=BYTE_LEVEL),
    "llama3": lambda c: every_split(c, ignore_merges=True) | {"post_processor": BOS},
    "qwen": lambda c: byte_level(c, split_form(QWEN_PATTERN), CHAT, normalizer=NFC),
    "smollm": lambda c: byte_level(c, split_form(DIGITS), CHAT),
    "olmo2, phi4": lambda c: byte_level(c, removed_form(LLAMA3_PATTERN), [("|||IP|||", {"special": False})]),
    "glm4": lambda c: byte_level(c, split_form(LLAMA3_PATTERN), [("[MASK]", {}), ("[gMASK]", {}), ("<sop>", {})]),
    "gpt4o": lambda c: byte_level(c, removed_form(tokenizer_json.GPT4O_PATTERN)),
    "tekken": lambda c: byte_level(c, split_form(tokenizer_json.TEKKEN_PATTERN), model={"ignore_merges": True}),
    "demo": lambda c: byte_level(c, split_form(tokenizer_json.CODE_PATTERN)),
    "tokens after a text": lambda c: byte_level(c, BYTE_LEVEL, post_processor=template(
        [(EOT, 0), ("<|im_end|>", 1)], [(EOT, 0)])),
    "nested special tokens": lambda c: byte_level(c, split_form(LLAMA3_PATTERN), NESTED[:2]),
    "nested tokens": lambda c: byte_level(c, split_form(LLAMA3_PATTERN), NESTED),
    "missing bytes": lambda c: byte_level([x.encode("ascii", "ignore").decode() for x in c], BYTE_LEVEL,
                                           alphabet=False),
    "a token by no merge": lambda c: tiny_with("h e, l l, Ġ w, Ġ Ġ"),
    "new digits": lambda c: tiny_with("ł ð", {"łð": 261}) | {"pre_tokenizer": split_form(DIGITS)},  # bytes of two
}
TOKENIZERS = {  # where tiktoken would give other ids
    "a piece of two parts": lambda c: tiny_with("h e, l l, Ġ w, Ġ Ġ", ignore_merges=True),
    "merges out of order": lambda c: tiny_with("h e, l l, he ll, Ġ w, Ġ Ġ", dict(he=257, ll=256)),
    "another splitting rule": lambda c: byte_level(c, split_form(LLAMA3_PATTERN.replace("{1,3}", "{1,2}"))),
    "a space before": lambda c: byte_level(c, BYTE_LEVEL | {"add_prefix_space": True}),
    "another normalizer": lambda c: byte_level(c, BYTE_LEVEL, normalizer={"type": "NFKC"}),
    "missing bytes after NFC": lambda c: byte_level(
        [x.encode("ascii", "ignore").decode() for x in c], BYTE_LEVEL, alphabet=False, normalizer=NFC),
    "a token to normalize": lambda c: tiny_spec() | {
        "normalizer": NFC, "added_tokens": [added(261, "e\u0301", normalized=True)]},
    "tokens in two rounds": lambda c: byte_level(c, BYTE_LEVEL, [("<a", {"normalized": True}), ("a>", {})]),
    "stripping tokens": lambda c: byte_level(c, BYTE_LEVEL, STRIPS),
    "llama2": lambda c: pieces(c, PREPEND, None, True),
    "llama2, all in the vocabulary": lambda c: pieces(c, PREPEND, None, True, ()),  # merges are not read as JSON
    "mistral": lambda c: pieces(c, None, METASPACE, True),
    "gemma": lambda c: pieces(c, SPACE, None, False),
}
KINDS = TIKTOKEN | TOKENIZERS


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_tokenizer_json_gives_the_packages_ids_text_and_stream(name, corpus, tmp_path):
    spec = KINDS[name](corpus)
    encoding = load_encoding(save(tmp_path, spec))
    assert bool(encoding.bpe) == (name in TIKTOKEN)
    whole, plain = (tokenizers.Tokenizer.from_str(json.dumps(spec)) for _ in range(2))
    plain.encode_special_tokens = True
    assert encoding.n_vocab - 1 == max(whole.get_vocab().values())
    last = [0] * (name == "tokens after a text")  # left out of prompts
    for text in (*random_texts(60, 1, encoding.special_tokens), *(x[:3000] for x in corpus[:3]), *WORDS, ASSIGNED):
        ids = encoding.encode(text, allowed_special="all")
        assert ids == whole.encode(text, add_special_tokens=False).ids, ascii(text)
        assert [*encode_prompt(encoding, text), *last] == whole.encode(text).ids, ascii(text)
        decoded = encoding.decode(ids)
        assert decoded == whole.decode(ids, skip_special_tokens=False), ascii(text)
        stream = "".join(streamed(encoding, *[[token] for token in ids]))
        assert stream.endswith(decoded) and not stream.removesuffix(decoded).strip(" "), ascii(text)
        assert encoding.encode(text) == plain.encode(text, add_special_tokens=False).ids, ascii(text)


@pytest.mark.parametrize("name", ["llama2", "qwen"])
def test_other_threads_run_while_a_long_text_is_encoded(name, corpus, tmp_path):
    """Bug: the interpreter's lock, or one of ours, is held until the end, and streams of other requests stand still."""
    encoding = load_encoding(save(tmp_path, KINDS[name](corpus)))
    text, times = "".join(random_texts(5000, 4)), []
    with ThreadPoolExecutor(1) as pool:
        ids = pool.submit(encoding.encode, text, allowed_special="all")
        while not ids.done():
            encoding.stream().feed(encoding.context)
            times.append(time.perf_counter())
    longest_wait = max(after - before for before, after in pairwise(times))
    assert len(ids.result()) > 5 * 10**4 and longest_wait < (times[-1] - times[0]) / 2


@pytest.mark.parametrize("name, text", [
    ("qwen", "x" + EOT + " " * 1_050_000 + "x"), ("qwen", f"{EOT}\u0338 e\u0301{EOT}"), ("qwen", "[MAS\u212a] \u1fef"),
    ("new digits", "a\U00011de0\U00011de1b")],
    ids=["endless run", "token that composes with what follows", "ASCII after NFC", "digits of Unicode 17"])
def test_texts_that_packages_treat_differently_give_the_packages_ids(name, text, corpus, tmp_path):
    spec = KINDS[name](corpus)
    encoding, package = load_encoding(save(tmp_path, spec)), tokenizers.Tokenizer.from_str(json.dumps(spec))
    assert encoding.bpe and encoding.encode(text, allowed_special="all") == package.encode(text).ids


REFUSED = {  # reason: a change to the tiny spec, or the file's content
    "dropout": lambda spec: spec["model"].update(dropout=0.1),
    "ids [99999]": lambda spec: spec.update(post_processor=template([("<s>", 99999)])),
    "two tokens share an id": lambda spec: spec["model"]["vocab"].update(he=257) or spec.update(added_tokens=[]),
    "out of vocabulary": lambda spec: spec["model"]["merges"].append("q q"),
    "Model missing": lambda spec: spec.pop("model"),
} | {content[:20]: content for content in (b"", b"{", b"\xff\xfe\x00", b"[]", b'{"model": []}', b"[" * 200_000,
                                           b"version https://git-lfs.github.com/spec/v1")}


@pytest.mark.parametrize("reason", REFUSED, ids=repr)
def test_a_broken_or_missing_tokenizer_is_refused_by_name(reason, tmp_path):
    refusal(lambda: load_encoding(tmp_path), tmp_path / "tokenizer.json")
    if isinstance(reason, bytes):
        write(tmp_path, {"tokenizer.json": REFUSED[reason]})
        refusal(lambda: load_encoding(tmp_path), tmp_path / "tokenizer.json")
    else:
        REFUSED[reason](spec := tiny_spec())
        refusal(lambda: load_encoding(save(tmp_path, spec)), reason, tmp_path / "tokenizer.json")


@pytest.mark.parametrize("file, content", [
    ("generation_config.json", {"eos_token_id": [262, 261]}), ("config.json", {"eos_token_id": 262}),
    ("tokenizer_config.json", {"eos_token": {"content": "<｜end▁of▁sentence｜>"}})])
def test_the_end_of_a_text_may_have_any_name(file, content, tmp_path):
    """Bug: DeepSeek's name for it is none of a list, so that its models cannot be trained on or stopped; a guess."""
    spec = tiny_spec() | {"added_tokens": [added(261, "<|other|>"), added(262, "<｜end▁of▁sentence｜>")]}
    encoding = load_encoding(save(write(tmp_path, {file: json.dumps(content)}), spec))
    assert end_of_text(encoding) == 262
    save(tmp_path, spec | {"added_tokens": [*spec["added_tokens"], added(263, "</s>")]})
    assert end_of_text(load_encoding(tmp_path)) == 263  # a base model's generation_config may name the turn's end
    (tmp_path / file).unlink()
    encoding = load_encoding(save(tmp_path, spec | {"added_tokens": [added(300, ""), added(261, "<pad>")]}))
    refusal(lambda: end_of_text(encoding), EOT)
    assert encoding.encode("a<pad>", allowed_special="all") == [64, 261]  # passes over the empty one


def test_a_text_that_a_model_without_an_unknown_token_cannot_hold_is_refused(tmp_path):
    spec = {"model": {"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0], ["b", -1.0]]}}
    encoding = load_encoding(save(tmp_path, spec))
    assert encoding.encode("ab") == [0, 1]
    refusal(lambda: encoding.encode("日本", allowed_special="all"), tmp_path / "tokenizer.json")


def folder_of(folder, spec, config, files=()):
    write(folder, {"tokenizer_config.json": json.dumps(config), "config.json": '{"model_type": "llama"}'} | dict(files))
    return save(folder, spec) if spec else folder


def auto_tokenizer(folder):
    transformers = pytest.importorskip("transformers", reason="needs pip install transformers")
    return transformers.AutoTokenizer.from_pretrained(folder)


def token(text):
    return {"__type": "AddedToken", **added(0, text)} | {"id": None}


ADDED = {  # case: the folder's files beside a base tokenizer.json with 700 tokens
    "decoder": {"tokenizer_config.json": {"added_tokens_decoder": {
        "701": added(701, "<|im_start|>"), "700": added(700, "<tool>", special=False, rstrip=True),
        "1": added(1, "<|im_end|>")}}},
    "file": {"added_tokens.json": {"<|im_start|>": 700, "<tool>": 701}, "tokenizer_config.json": {
        "additional_special_tokens": ["<|im_start|>"]}},
    "named": {"tokenizer_config.json": {"eos_token": "<|end|>", "pad_token": token("<pad>"),
                                        "extra_special_tokens": {"image_token": "<image>"}}},
    "decoder, not the file": {"tokenizer_config.json": {"added_tokens_decoder": {"700": added(700, "<a>")}},
                              "added_tokens.json": {"<b>": 701}},
}


@pytest.mark.parametrize("case", ADDED)
def test_tokens_that_only_the_config_names_are_added_as_by_transformers(case, corpus, tmp_path):
    """Bug: <|im_end|> in ten pieces, so that no chat ends; the ids of heads and rows of another token."""
    files = dict(ADDED[case])
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | files.pop("tokenizer_config.json")
    files = {name: json.dumps(content) for name, content in files.items()}
    folder_of(tmp_path, byte_level(corpus[:2], BYTE_LEVEL), config, files)
    theirs, ours = auto_tokenizer(tmp_path), load_encoding(tmp_path)
    assert ours.special_tokens == theirs.get_added_vocab() and len(ours.special_tokens) > 2
    texts = [f"a {text} b{text}" for text in (*ours.special_tokens, "<b>")]
    assert [encode_prompt(ours, text) for text in texts] == [theirs.encode(text) for text in texts]
    special = {i for i, token in theirs.added_tokens_decoder.items() if token.special}
    assert ours.control_ids == special


@pytest.mark.parametrize("kind, pattern, config, prefix", [
    ("GPT2Tokenizer", BYTE_LEVEL, {"additional_special_tokens": ["<|im_end|>"]}, []),
    ("GPT2TokenizerFast", BYTE_LEVEL, {"add_bos_token": True, "bos_token": EOT, "eos_token": "<|im_end|>"}, [0]),
    ("Qwen2Tokenizer", split_form(QWEN_PATTERN), {"added_tokens_decoder": {
        "700": added(700, "<|im_start|>"), "1": added(1, "<|im_end|>")}}, []),
])
def test_vocab_and_merges_give_the_ids_of_transformers(kind, pattern, config, prefix, corpus, tmp_path):
    model = byte_level(corpus, pattern)["model"]
    merges = "\n".join(" ".join(merge) for merge in model["merges"])
    folder_of(tmp_path, None, {"tokenizer_class": kind} | config,
              {"vocab.json": json.dumps(model["vocab"]), "merges.txt": f"#version: 0.2\n{merges}\n"})
    reference, encoding = auto_tokenizer(tmp_path), load_encoding(tmp_path)
    assert encoding.special_tokens[EOT] == 0 and encoding.prefix == prefix
    for text in random_texts(100, 3, encoding.special_tokens):
        assert encode_prompt(encoding, text) == reference.encode(text), ascii(text)


@pytest.mark.parametrize("config, prefix", [
    ({}, []), ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>"}, [1]),
    ({"tokenizer_class": "BaichuanTokenizer", "add_bos_token": False,
      "auto_map": {"AutoTokenizer": ["tokenization_baichuan.BaichuanTokenizer", None]}}, [])])
def test_tokenizer_model_alone_gives_sentencepieces_ids(config, prefix, corpus, tmp_path):
    """Catches Baichuan's folder, whose tokenizer is custom code, being refused or its code being run."""
    for package in ("transformers", "google.protobuf"):
        pytest.importorskip(package, reason="needs pip install transformers sentencepiece protobuf")
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(corpus).split("\n")), model_prefix=str(tmp_path / "tokenizer"), vocab_size=700,
        minloglevel=2, model_type="bpe", byte_fallback=True, remove_extra_whitespaces=False,
        normalization_rule_name="identity", split_digits=True, allow_whitespace_only_pieces=True)
    (tmp_path / "tokenization_baichuan.py").write_text("raise SystemExit")
    encoding = load_encoding(folder_of(tmp_path, None, config))
    model = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    assert encoding.prefix == prefix and encoding.special_tokens["</s>"] == 2
    for text in random_texts(100, 8):
        if not {*"<▁"} & {*text}:
            assert encoding.encode(text) == model.encode(text), ascii(text)
            assert encoding.decode(model.encode(text)) == model.decode(model.encode(text)), ascii(text)


def test_a_missing_package_is_named_with_what_installs_it(tmp_path, monkeypatch):
    write(tmp_path, {"tokenizer.model": b"\x0a\x0e"})
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    refusal(lambda: load_encoding(tmp_path), "pip install transformers sentencepiece protobuf", tmp_path)
