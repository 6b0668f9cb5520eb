"""generate.py's command line: output, statistics, errors and exit codes."""

import io
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from backends import cpu_library
from conftest import ROOT, edit_json, random_prompts, toy_model
from engine.batching import Engine
from generate import Fixed, Sampling, Sequence, generate
from hf.heads import load_heads
from hf.tokenizer import load_encoding
from model import GPT
from test_hf_tokenizer import added
from tools import conversation, errors
from tools.compare import first_difference
from tools.flags import parse_generate
from tools.load import new_tokens, threads_are_set
from tools.printer import COLOURS
from tools.run import main as program
from training.flags import parse_heads

PROMPTS = random_prompts([7])
FILTERED = dict(temperature=0.7, top_k=20, top_p=0.8, seed=2**40)


def test_a_difference_is_a_bug_or_a_tie():
    """Bug: --compare calls a wrong token a tie, though the gap is larger than rounding."""
    model = toy_model(tied=False)
    text = generate(model, PROMPTS[:1], 10).tokens
    greedy = [Sampling()]
    assert first_difference(model, PROMPTS[:1], text, text, greedy) is None
    wrong = [text[0][:4] + [(text[0][4] + 1) % 97] + text[0][5:]]
    assert first_difference(model, PROMPTS[:1], text, wrong, greedy)[1::2] == (4, "bug")
    best = text[0][4]
    with torch.no_grad():
        model.head.weight[(best + 1) % 97] = model.head.weight[best]
    assert first_difference(model, PROMPTS[:1], text, wrong, greedy)[3] == "tie"
    third = [text[0][:4] + [(best + 2) % 97]]  # not one of the two tied tokens
    assert first_difference(model, PROMPTS[:1], text, third, greedy)[1::2] == (4, "bug")
    sampled = generate(model, PROMPTS[:1], 10, **FILTERED).tokens
    ours = sampled, [sampled[0][:9]], [Sampling(**FILTERED)]
    assert first_difference(model, PROMPTS[:1], *ours) == (0, 9, None, "bug")


def main(model, *flags):
    """Runs generate.py on a model with these flags."""
    program(parse_generate(["--model", str(model), "--device", "cpu", *map(str, flags)]))


def refusal(capsys, model, *flags):
    """The one-line error for these flags."""
    with pytest.raises(SystemExit, match="2"):
        main(model, *flags)
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line


def run(capsys, model, *flags):
    """The text on standard output."""
    main(model, *flags)
    return capsys.readouterr().out


def result(capsys, model, *flags):
    """The object of --json."""
    return json.loads(run(capsys, model, *flags, "--json"))


def test_json_has_the_tree_sizes_and_their_expected_times(folder, capsys, monkeypatch, tmp_path):
    """Bug: a tree size that was used is missing, steps or tokens are not counted, or a time is another size's."""
    monkeypatch.setattr("engine.times.StepTimes.seconds", lambda self, B, T, depths: B * T / 1000 + depths)
    (tmp_path / "link").symlink_to(folder)
    flags = tmp_path / "link", "--prompt", "abcabc", "--max-new-tokens", 60
    found = result(capsys, *flags, "--tree-size", 12)
    assert found["model"] == "link" and found["sizes"] == {"12": [found["steps"], len(found["tokens"][0])]}
    assert found["expected_ms"] == {"1": 1, "2": 2, "4": 4, "8": 8, "12": 12}
    assert result(capsys, *flags, "--tree-size", 1)["expected_ms"] == {}


@pytest.mark.parametrize("draft, names", [("heads+lookup", {"head", "lookup"}), ("heads", {"head"}), ("none", set()),
                                          ("lookup", {"lookup"}), (None, {"head", "lookup"})])
def test_draft_selects_the_drafters_and_keeps_the_output(folder, capsys, draft, names):
    """Bug: --draft selects the wrong drafters, or changes the output."""
    flags = folder, "--prompt", "abcabcabc", "--max-new-tokens", 30
    plain = result(capsys, *flags, "--tree-size", 1)
    size = () if draft == "none" else ("--tree-size", 17)
    drafted = result(capsys, *flags, *size, *(("--draft", draft) if draft else ()))
    assert drafted["tokens"] == plain["tokens"] and not plain["accepted"]
    assert drafted["tree_size"] == (17 if names else 1) and plain["tree_size"] == 1
    assert {name.split()[0] for name in drafted["accepted"]} == names


def test_structured_output_on_the_command_line(folder, capsys, tmp_path):
    """Bug: a grammar of another prompt, a flag that wins over a prompt's own schema, --compare without the grammar."""
    pytest.importorskip("llguidance", reason="pip install llguidance")
    (tmp_path / "schema.json").write_text('{"enum": [1, "two"]}')
    (tmp_path / "two.LARK").write_text('?start: "xx"')
    (tmp_path / "bits.gbnf").write_text('root ::= [01] | [01] root')
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "json_schema": {"const": [true, null]}}\n{"prompt": "b"}')
    flags = folder, "--max-new-tokens", 20, "--temperature", 1
    for more, pattern in ((["--json-schema", tmp_path / "schema.json"], '1|"two"'), (["--regex", "(a|b)!"], "(a|b)!"),
                          (["--json-schema", '{"type": "boolean"}', "--draft", "schema"], "true|false"),
                          (["--grammar", tmp_path / "bits.gbnf", "--draft", "none"], "[01]+"),
                          (["--grammar", tmp_path / "two.LARK"], "xx")):
        found = result(capsys, *flags, "--prompt", "a", "--compare", *more)
        assert re.fullmatch(pattern, found["texts"][0]) and found["difference"] is None
    lines = run(capsys, *flags, "--prompts", tmp_path / "prompts.jsonl", "--json", "--regex", "x{3}").splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["[true, null]", "xxx"]


TEMPLATE = """{% for m in messages %}{{ m.role[0] }}:{{ m.content }}
{% endfor %}{% if add_generation_prompt %}a:{% endif %}"""


@pytest.fixture
def chat_folder(folder, tmp_path):
    """The checkpoint with heads and a chat template."""
    shutil.copytree(folder, tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path / "chat"


def typed(monkeypatch, *lines):
    """Sets standard input to these lines, as a Windows editor saves them."""
    data = "".join(line + "\r\n" for line in lines).encode("utf-8-sig")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_a_token_without_an_embedding_is_refused_only_in_a_prompt(chat_folder, capsys):
    """Bug: a model is refused because its tokenizer has image tokens without embeddings, as Gemma 3's."""
    edit_json(chat_folder / "tokenizer.json", added_tokens=[
        added(257, "<|endoftext|>"), added(258, "<image>"), added(259, "<sound>", special=False)])
    flags = chat_folder, "--max-new-tokens", 3, "--temperature", 0, "--prompt"
    assert run(capsys, *flags, "ab")
    for prompt in ("a <image>", "<sound>"):
        for chat in ([], ["--chat"]):
            assert "prompt 0 has token ids outside 0..257" in refusal(capsys, *flags, prompt, *chat)


@pytest.mark.parametrize("context", [20, conversation.CONTEXT])
def test_a_conversation_takes_turns(chat_folder, prefilled, capsys, monkeypatch, context):
    """Bug: a turn is forgotten, mixed up or, where the cache grows, prefilled again; /clear does not clear."""
    capacities, grown = [], Engine.grown
    monkeypatch.setattr(conversation, "CONTEXT", context)
    monkeypatch.setattr(Engine, "grown", lambda self, n: capacities.append(n) or grown(self, n))
    flags = chat_folder, "--max-new-tokens", 10, "--tree-size", 5, "--temperature", 0
    def single(text):
        found = result(capsys, *flags, "--prompt", text)
        return found["texts"][0], encoding.encode(text) + found["tokens"][0]
    encoding = load_encoding(chat_folder)
    first, tokens = single("u:hi\na:")
    asked = f"u:hi\na:{first}\nu:you\na:"
    second, _ = single(asked)
    typed(monkeypatch, "hi", "", "you", "/clear", "hi")
    prefilled.clear()
    said = run(capsys, *flags, "--chat")
    assert said == f"{first}\n{second}\n{first}\n" and bool(capacities) == (context == 20)
    asked = encoding.encode(asked)
    same = next(i for i, (a, b) in enumerate(zip([*tokens, None], asked)) if a != b)
    read = [n for _, n in prefilled]
    assert same > 8 and read == [6, len(asked) - same, 6 - 5]  # all but the last token; what differs; "u:hi\na:" again


def test_without_a_template_each_line_is_a_prompt(folder, capsys, monkeypatch):
    """Bug: a line of code that is a command of the chat, or lost."""
    lines = "abc", "  import", "exit", "/x", '"""'
    want = [result(capsys, folder, "--max-new-tokens", 10, "--prompt", text)["texts"][0] for text in lines]
    typed(monkeypatch, *lines)
    assert run(capsys, folder, "--max-new-tokens", 10) == "".join(f"{text}\n{'-' * 40}\n" for text in want)


def in_take(monkeypatch, n, action):
    """Calls action() in the n-th step of a sequence. Returns a list that grows with each step."""
    take, calls = Sequence.take, []

    def act(self, tokens):
        calls.append(tokens)
        if len(calls) == n:
            action()
        return take(self, tokens)
    monkeypatch.setattr(Sequence, "take", act)
    return calls


def test_neither_ctrl_c_nor_a_line_that_is_too_long_ends_the_conversation(chat_folder, prefilled, capsys, monkeypatch):
    """Bug: also, a turn after Ctrl-C that reads the whole conversation again."""
    calls = in_take(monkeypatch, 9, lambda: os.kill(os.getpid(), signal.SIGINT))
    typed(monkeypatch, "hi", "x" * 200, "go on")
    main(chat_folder, "--max-new-tokens", 30, "--chat", "--draft", "none", "--temperature", 0)
    err = capsys.readouterr().err
    assert "/clear" in err and err.count("tokens per step") == 2 and len(calls) > 9
    assert [n for _, n in prefilled] == [6, len("?\nu:go on\na:") - 1]


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_grown_engine_drafts_as_before(folder, prefilled, monkeypatch, is_compiled):
    """Bug: heads that lose their cache, or what they have not read yet, and then guess worse."""
    if not is_compiled:
        monkeypatch.setattr(cpu_library, "library", lambda: None)
    model = GPT.from_pretrained(folder, device="cpu")
    heads = load_heads(folder / "clover", model)
    trees = {100: [], 40: []}
    for capacity, nodes in trees.items():
        engine = Engine(model, policy=Fixed(model, heads, tree_size=8), capacity=capacity)
        tokens = engine.generate([[*b"abcabc"]], 20).tokens[0]
        engine = engine.grown(100) if capacity == 40 else engine
        engine.generate([[*b"abcabc", *tokens, *b"ab"]], 20, on_step=lambda step: nodes.append(step.tree),
                        with_trees=True)
    assert trees[40] == trees[100] and prefilled[1::2] == [(1, 2)] * 2


@pytest.mark.parametrize("given, block, length, ends, most", [
    (None, 2**17, 30, True, 4066), (None, 2**17, 5000, True, 1024), (None, 4096, 30, True, 4096),
    (None, 2**17, 30, False, 128), (7, 2**17, 30, True, 7), (9999, 512, 30, False, 9999)])
def test_chats_and_grammars_may_fill_the_context(given, block, length, ends, most):
    """Bug: an answer cut in the middle of a word, or a cache for a context of 128k tokens."""
    assert new_tokens(Mock(max_new_tokens=given), Mock(block_size=block), length, ends) == most


@pytest.mark.parametrize("flags, says, ended", [
    ("--chat", "context of 128", "context"), ("--chat --max-new-tokens 5", "after 5 new", "length"),
    ("--regex [ab]+ --max-new-tokens 6", "after 6 new", "length"), ("--regex ab", "", "stop")])
def test_a_cut_is_reported(chat_folder, capsys, flags, says, ended):
    """Bug: an answer that a limit cuts, and nothing says so."""
    pytest.importorskip("llguidance", reason="pip install llguidance")
    flags = chat_folder, "--prompt", "hi", "--temperature", 0, "--quiet", *flags.split()
    main(*flags)
    assert says in (err := capsys.readouterr().err) and (" cut " in err) == bool(says)
    assert result(capsys, *flags)["ended"] == [ended]


def test_a_chat_is_sampled_unless_something_says_otherwise(chat_folder, capsys):
    """Bug: the same poem in every chat; a seed that nobody knows; other text that is sampled; a fixed seed for -1."""
    def said(*more):
        main(chat_folder, "--prompt", "hi", "--max-new-tokens", 20, "--quiet", *more)
        out, err = capsys.readouterr()
        return out.strip(), re.findall(r"seed: (\d+)", err), "temperature 0.7, top-p 0.95" in err
    text, (seed,), is_told = said("--chat")
    assert is_told and said("--chat") != (text, [seed], True) and said("--chat", "--seed", seed) == (text, [], True)
    assert said("--temperature", 2, "--seed", -1) != said("--temperature", 2, "--seed", -1)
    greedy = said("--chat", "--temperature", 0)
    assert greedy[1:] == ([], False) and said()[1:] == ([], False) and greedy[0] != text
    config = chat_folder / "generation_config.json"
    config.write_text('{"eos_token_id": 257}')
    assert said("--chat")[2]
    config.write_text('{"do_sample": false}')
    assert said("--chat") == greedy


def terminal(monkeypatch, *lines):
    """Makes standard input a terminal on which these lines are typed, or keys pressed."""
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", Mock(side_effect=lines))


CTRL_C = KeyboardInterrupt


@pytest.mark.parametrize("lines, messages", [
    (["/help", " /x", "/bye"], []), (["exit"], []), ([EOFError], []), (["a", "/exit"], ["a"]),
    ([CTRL_C, "a", CTRL_C, "", CTRL_C, CTRL_C], ["a", CTRL_C]), (["/x y", "/clear ", "quit"], ["/x y", "/clear"]),
    (['"""', "a", '', 'b"""', EOFError], ["a\n\nb"]), (['"""a', CTRL_C, '"""b"""', EOFError], ["b"]),
    (['"""pasted\nlines', '"""c', EOFError, EOFError], ['"""pasted\nlines', "c"])], ids=str)
def test_what_is_typed_on_a_terminal(lines, messages, capsys, monkeypatch):
    """Bug: commands and their misspellings are sent to the model; Ctrl-C ends the program at once, or never."""
    terminal(monkeypatch, *lines)
    found = []
    try:
        while (message := conversation.read_message(True, True)) is not None:
            found.append(message)
    except KeyboardInterrupt:
        found.append(CTRL_C)
    assert found == messages
    assert capsys.readouterr().err.count("/clear starts over") == len({"/help", " /x"}.intersection(lines))


def test_pasted_lines_are_one_message():
    """Bug: a turn for each line. Python's readline switches bracketed paste off."""
    pty = pytest.importorskip("pty")
    readline = pytest.importorskip("readline")
    if "libedit" in readline.__doc__:
        pytest.skip("libedit has no bracketed paste")
    code = "import tools.conversation as c; c.prepare_terminal(); print(repr(c.read_message(True, True)))"
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", code], stdin=theirs, stdout=theirs, cwd=ROOT):
        os.close(theirs)
        said = b""
        while b"> " not in said:
            said += os.read(ours, 999)
        os.write(ours, b"\x1b[200~one\r\"two\x1b[201~ three\r")
        while b"three'" not in said:
            said += os.read(ours, 999)
    os.close(ours)
    assert b"""'one\\n"two three'""" in said


def test_a_conversation_begins_with_what_runs(chat_folder, capsys, monkeypatch):
    """Bug: no word about the model, its drafters and their colours, or of heads that are not there."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "vt100")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    def banner(*flags):
        terminal(monkeypatch, EOFError)
        main(chat_folder, "--chat", *flags)
        return capsys.readouterr().err
    told = banner()
    assert all(f"\x1b[{COLOURS[name]}m{name}" in told for name in ("head 4", "lookup"))
    assert "lookup" not in banner("--draft", "heads") and "head 1" not in banner("--heads", "none")
    shutil.rmtree(chat_folder / "clover")
    assert "train_heads.py" in banner() and "train_heads.py" not in banner("--heads", "none") + banner("--quiet")


def test_generation_config_has_the_stop_tokens_and_sampling_defaults(chat_folder, capsys):
    """Bug: generation_config.json is not read, or overrides a flag."""
    flags = chat_folder, "--prompt", "abc", "--max-new-tokens", 20
    tokens = lambda *more: result(capsys, *flags, *more)["tokens"]
    config = lambda **more: (chat_folder / "generation_config.json").write_text(json.dumps(settings | more))
    greedy, sampled = tokens(), tokens("--temperature", 2, "--top-k", 50)
    assert greedy != sampled and greedy == tokens("--temperature", 0)
    settings = dict(do_sample=True, temperature=2, top_k=50)
    config(temperature=None, top_k=None)
    assert tokens() == tokens("--temperature", 1, "--top-k", 0) != greedy
    config(do_sample=None)
    assert tokens() == greedy
    stop = sampled[0][9]
    config(eos_token_id=[stop, 257], repetition_penalty=1.05, suppress_tokens=[7], typical_p=1.0, num_beams=1)
    main(*flags, "--json")
    said, err = capsys.readouterr()
    assert json.loads(said)["tokens"][0] == sampled[0][:sampled[0].index(stop) + 1]
    assert "generation_config.json: not applied: repetition_penalty 1.05, suppress_tokens [7]\n" in err
    assert tokens("--temperature", 0) == greedy
    config(top_k=2.5)
    assert "generation_config.json: top_k" in refusal(capsys, *flags)
    for more in (["--top-k", 1], ["--top-p", 0], ["--temperature", 1e-7, "--stop", ""]):  # without the file's
        assert tokens(*more) == greedy


def test_the_template_gets_variables_and_the_system_message(chat_folder, capsys):
    """Bug: --template-kwargs or --system do not reach the template, or are ignored without --chat."""
    (chat_folder / "chat_template.jinja").write_text(TEMPLATE + "{{ 'no ' if think is false }}")
    flags = chat_folder, "--max-new-tokens", 20, "--temperature", 0, "--prompt"
    chat = *flags, "abc", "--chat", "--system", "be"
    want = result(capsys, *flags, "s:be\nu:abc\na:no ")
    asked = result(capsys, *chat, "--template-kwargs", '{"think": false}')
    assert asked["tokens"] == want["tokens"] != result(capsys, *chat)["tokens"] and asked["prompts"] == ["abc"]
    for bad in ("[1]", "{", "9" * 5000, '{"think": false}'):  # the last is valid, but lacks --chat
        assert "--template-kwargs" in refusal(capsys, *flags, "abc", "--template-kwargs", bad)


def test_show_tree_shows_the_drafted_trees(folder, capsys):
    """Bug: a tree of another step or prompt, wrong parents or drafters, or another output."""
    flags = folder, "--prompt", "abcabcabc", "--prompt", "import", "--max-new-tokens", 24, "--tree-size", 9
    plain, shown = (result(capsys, *flags, *more) for more in ((), ("--show-tree",)))
    assert "drafts" not in plain and plain["tokens"] == shown["tokens"] and plain["accepted"] == shown["accepted"]
    by, decode = Counter(), load_encoding(folder).decode
    for index, tokens in enumerate(shown["tokens"]):
        steps = [step for step in shown["drafts"] if step["prompt"] == index]
        assert [text for step in steps for text in step["emitted"]] == [decode([token]) for token in tokens]
        for step in steps:
            size = len(step["nodes"])
            assert size == len(step["parents"]) == len(step["drafted_by"]) == len(step["probabilities"]) <= 9
            path = step["path"][1:]
            assert [step["drafted_by"][node] for node in path] == step["guessed_by"][:len(path)]
            assert [step["parents"][node] for node in step["path"]] == [-1, *step["path"][:-1]]
            assert all(step["nodes"][node] == text for node, text in zip(path, step["emitted"]))
            by.update(step["guessed_by"])
    assert shown["accepted"] == {name: n for name, n in by.items() if name != "model"} and by["lookup"] > 0
    main(*flags, "--show-tree")
    trees = [step for step in shown["drafts"] if len(step["nodes"]) > 1][:4]
    assert capsys.readouterr().err.count("\n* ") == sum(len(step["path"]) - 1 for step in trees)


@pytest.mark.parametrize("flags, says", [
    ("--compare", "--prompt"), ("--prompt a --draft heads+heads", "--draft"), ("--prompt a --heads nowhere", "nowhere"),
    ("--prompt a --draft none --tree-size 5", "--tree-size"), ("--prompt a --draft lookup --heads nowhere", "--draft"),
    ("--prompt a --draft heads --heads none", "--draft"), ("--prompt a --regex a --json-schema {}", "--regex"),
    ("--prompt a --system b", "--chat"), ("--prompt a --chat", "--chat"), ("--prompt a --device warp", "warp"),
    ("--prompts nowhere.jsonl", "nowhere.jsonl"), ("--prompt a --draft schema", "--regex")])
def test_bad_flags_are_refused_in_one_line(folder, capsys, flags, says):
    """Bug: a traceback, or a flag that contradicts another and is ignored."""
    assert says in refusal(capsys, folder, *flags.split())


@pytest.mark.parametrize("content, says", [
    ('{"prompt": "a"}\n\n{"prompt": 3}', "line 3"), ('{"prompt": ""}', "0 tokens"), ('{"messages": []}', "line 1"),
    ('{"messages": [{"role": "user", "content": "hi"}]}', "--chat"), ("", "no prompts"), ('["a"]', "not an object"),
    ('{"prompt": "a"}\n{"messages": [{"role": "dog", "content": "a"}]}', "prompts.jsonl, prompt 2: ")])
def test_errors_in_a_prompt_file_name_the_line(chat_folder, tmp_path, capsys, content, says):
    """Bug: prompts are decoded before a later bad line is found, or one that the template refuses is not named."""
    (chat_folder / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'dog' %}{{ raise_exception('no dogs') }}{% endif %}a")
    (tmp_path / "prompts.jsonl").write_text(content)
    chat = ["--chat", "--temperature", 0] if "dog" in content else []
    assert says in refusal(capsys, chat_folder, "--prompts", tmp_path / "prompts.jsonl", *chat)


@pytest.mark.parametrize("allocate", [lambda: torch.empty(2**60, dtype=torch.int8),
                                      Mock(side_effect=torch.OutOfMemoryError("CUDA is full"))], ids=["cpu", "cuda"])
def test_out_of_memory_exits_with_2_and_advice(capsys, monkeypatch, allocate):
    """Bug: a traceback. Other torch errors must keep theirs."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as caught, errors.command():
        allocate()
    said = capsys.readouterr().err
    assert caught.value.code == 2 and said.count("\n") == 1 and "out of memory" in said and "--batch-size" in said
    with pytest.raises(SystemExit) as caught, errors.command():
        torch.ones(2) + torch.ones(3)
    assert caught.value.code == 1 and "Traceback" in capsys.readouterr().err


def test_standard_output_holds_only_prompt_and_output(folder, capsys):
    """Bug: `> out.txt` holds statistics, --quiet prints them, or --compare or heads change the output."""
    flags = folder, "--prompt", "abc", "--max-new-tokens", 9999
    main(*flags, "--compare")
    out, err = capsys.readouterr()
    assert out.startswith("abc") and "tokens per" not in out and "tokens per second" in err
    assert "output is identical" in err and "context of 128 tokens" in err
    main(*flags, "--heads", "none", "--quiet")
    quiet = capsys.readouterr()
    assert quiet.out == out and "tokens per second" not in quiet.err
    found = result(capsys, *flags, "--compare")
    assert found["difference"] is None and found["plain"]["tokens"] == found["tokens"]


def test_prompts_of_a_file(folder, capsys, tmp_path):
    """Bug: outputs in another order; lines dropped, or split at more characters; a byte order mark; no --compare."""
    texts = ["abc\u2028d", "import os\x0c\x85", "x", "def f(\x1c", "abc"]
    flags = folder, "--max-new-tokens", 12, "--batch-size", 2
    want = [result(capsys, *flags, "--prompt", text)["texts"][0] for text in texts]
    objects = [dict(prompt=text) for text in texts]
    lines = (json.dumps(value, ensure_ascii=False) for value in objects)
    contents = {"a.txt": "\r\n\n".join(texts), "a.jsonl": "\n".join(lines), "a.json": json.dumps(objects)}
    for name, content in contents.items():
        file = tmp_path / name
        file.write_bytes(content.encode("utf-8-sig"))
        shown = run(capsys, *flags, "--prompts", file)
        assert shown == "".join(f"{text}{more}\n{'-' * 40}\n" for text, more in zip(texts, want))
        main(*flags, "--prompts", file, "--json", "--compare", "--show-tree", "--tree-size", 4)
        out, err = capsys.readouterr()
        assert "identical" in err and "the newest token" in err
        found = [json.loads(line) for line in out.splitlines()]
        assert [(one["prompt"], one["text"]) for one in found] == list(zip(texts, want))
        assert {one["ended"] for one in found} == {"length"}


@pytest.mark.parametrize("step", [4, 12], ids=["decoding", "comparing"])
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_runs_exit_with_the_signals_code(folder, capsys, monkeypatch, number, code, step):
    """Bug: exit code 0, so that `a && b` continues after Ctrl-C; text or statistics of the steps before are lost;
    a traceback while torch is being imported."""
    in_take(monkeypatch, step, lambda: os.kill(os.getpid(), number))
    monkeypatch.setattr(errors, "received", [])
    flags = f"--model {folder} --device cpu --prompt abc --heads none --temperature 1 --max-new-tokens 8".split()
    monkeypatch.setattr(sys, "argv", ["generate.py", *flags, *["--compare"] * (step == 12)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "generate.py"), run_name="__main__")
    out, err = capsys.readouterr()
    assert ended.value.code == code and out.startswith("abc") and len(out.strip()) > 3
    assert "1.00 tokens per step, " in err and "identical" not in err
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)  # as if torch were still being imported
    assert capsys.readouterr().err == "interrupted\n"


def test_bad_input_and_heads_without_their_record_are_refused(chat_folder, capsys, monkeypatch):
    """Bug: a traceback for standard input that is not UTF-8; a model that decodes without its heads in silence."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    assert "standard input" in refusal(capsys, chat_folder, "--prompt", "-")
    record = chat_folder / "clover" / "heads.json"
    record.unlink()
    assert str(record) in refusal(capsys, chat_folder, "--prompt", "abc")
    assert "abc" in run(capsys, chat_folder, "--prompt", "abc", "--max-new-tokens", 3, "--heads", "none")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_output_that_cannot_be_written(folder, capsys, monkeypatch):
    """Bug: a traceback, exit code 0 for a full disk, an error because of `| head`, a second error at exit."""
    flags = folder, "--prompt", "abc", "--quiet"
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert refusal(capsys, *flags).endswith(": [Errno 28] No space left on device\n")
        full.write("the rest")  # is written to /dev/null
    reader, closed = os.pipe()
    os.close(reader)
    with open(closed, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        main(*flags)
    assert "rror" not in capsys.readouterr().err


@pytest.mark.parametrize("closed", [["stdin"], ["stdout"], ["stderr"], ["stdin", "stdout", "stderr"]], ids=" ".join)
def test_standard_streams_may_be_closed(closed, folder, capsys, monkeypatch):
    """Bug: a traceback for `2>&-`; text for standard error on standard output."""
    with monkeypatch.context() as patch:
        for name in closed:
            patch.setattr(sys, name, None)
        main(folder, *([] if "stdin" in closed else ["--prompt", "abc"]))
        assert all(getattr(sys, name).name == os.devnull for name in closed)
    out, err = capsys.readouterr()
    assert out.startswith("abc") == (closed == ["stderr"]) and ("per second" in err) == (closed == ["stdout"])


@pytest.mark.parametrize("variable, value, coloured", [
    ("NO_COLOR", "", True), ("NO_COLOR", "1", False), ("TERM", "dumb", False), ("TERM", "vt100", True)])
def test_colours_are_for_terminals_that_have_them(variable, value, coloured, folder, capsys, monkeypatch):
    """Bug: escapes in Emacs' shell; an empty NO_COLOR, which by its definition does not count."""
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    text = run(capsys, folder, "--prompt", "abcabcabc", "--tree-size", 8)
    assert ("\x1b[" in text) == coloured


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    """Bug: --model=~/x, which shells leave as it is, is "no such file"; a prompt that begins with ~ is changed."""
    monkeypatch.setenv("HOME", str(tmp_path))
    names = ("model", "heads", "prompts", "json-schema")
    args = parse_generate([f"--{name}=~/{name}" for name in names] + ["--stop=~/x"])
    assert [args.model, args.heads, args.prompts, args.json_schema] == [str(tmp_path / name) for name in names]
    assert args.stop == ["~/x"] and parse_generate(["--prompt=~/x"]).prompt == ["~/x"]
    trained = parse_heads(["--out=~/o", "--init=~/i", "--data=~/d"])
    assert [trained.out, trained.init, *trained.data] == [str(tmp_path / name) for name in "oid"]


@pytest.mark.parametrize("value, is_set", [
    ("", False), ("0", False), ("-1", False), ("x", False), ("2", True), ("4,2", True)])
def test_only_a_number_of_threads_counts(value, is_set, monkeypatch):
    """Bug: an empty OMP_NUM_THREADS, which OpenMP ignores, keeps one thread per CPU."""
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert threads_are_set() is is_set
