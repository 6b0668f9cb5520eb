"""generate.py's command line: output, statistics, errors and exit codes."""

import io
import json
import os
import re
import runpy
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from conftest import edit_json, random_prompts, toy_model
from generate import Sampling, Sequence, generate
from hf.tokenizer import load_encoding
from test_hf_tokenizer import added
from tools import errors
from tools.compare import first_difference
from tools.flags import parse_generate
from tools.load import threads_are_set
from tools.run import main as program
from training.flags import parse_heads

ROOT = Path(__file__).parent.parent
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


def main(*flags):
    """Runs generate.py with these flags."""
    program(parse_generate([str(flag) for flag in flags]))


def refusal(capsys, *flags):
    """The one-line error for these flags."""
    with pytest.raises(SystemExit, match="2"):
        main(*flags)
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line


def run(capsys, *flags):
    """The printed text; with --json or without --prompt only that on standard output."""
    main(*flags)
    out, err = capsys.readouterr()
    return out + err if "--prompt" in flags and "--json" not in flags else out


def test_json_has_the_tree_sizes_and_their_expected_times(folder, capsys, monkeypatch, tmp_path):
    """Bug: a tree size that was used is missing, steps or tokens are not counted, or a time is another size's."""
    monkeypatch.setattr("engine.policy.StepTimes.seconds", lambda self, B, T, depths: B * T / 1000 + depths)
    (tmp_path / "link").symlink_to(folder)
    flags = ["--model", tmp_path / "link", "--device", "cpu", "--prompt", "abcabc", "--max-new-tokens", 60, "--json"]
    result = json.loads(run(capsys, *flags, "--tree-size", 12))
    assert result["model"] == "link"
    assert result["sizes"] == {"12": [result["steps"], len(result["tokens"][0])]}
    assert result["expected_ms"] == {"1": 1, "2": 2, "4": 4, "8": 8, "12": 12}
    assert json.loads(run(capsys, *flags, "--tree-size", 1))["expected_ms"] == {}


@pytest.mark.parametrize("draft, names", [("heads+lookup", {"head", "lookup"}), ("heads", {"head"}), ("none", set()),
                                          ("lookup", {"lookup"}), (None, {"head", "lookup"})])
def test_draft_selects_the_drafters_and_keeps_the_output(folder, capsys, draft, names):
    """Bug: --draft selects the wrong drafters, or changes the output."""
    flags = ["--model", folder, "--device", "cpu", "--prompt", "abcabcabc", "--max-new-tokens", 30, "--json"]
    plain = json.loads(run(capsys, *flags, "--tree-size", 1))
    size = () if draft == "none" else ("--tree-size", 17)
    drafted = json.loads(run(capsys, *flags, *size, *(("--draft", draft) if draft else ())))
    assert drafted["tokens"] == plain["tokens"] and not plain["accepted"]
    assert drafted["tree_size"] == (17 if names else 1) and plain["tree_size"] == 1
    assert {name.split()[0] for name in drafted["accepted"]} == names


def test_a_seed_of_minus_one_is_drawn_and_reported(folder, capsys):
    """Bug: a fixed seed, as good as any other, for those who ask for a new one each time."""
    flags = ["--model", folder, "--device", "cpu", "--prompt", "abc", "--max-new-tokens", 20, "--temperature", 2]
    said = [run(capsys, *flags, "--quiet", "--seed", -1) for _ in range(2)]
    text, seed = re.fullmatch(r"((?s:.*))seed: (\d+)\n", said[0]).groups()
    assert said[0] != said[1] and run(capsys, *flags, "--quiet", "--seed", seed) == text


def test_structured_output_on_the_command_line(folder, capsys, tmp_path):
    """Bug: a grammar of another prompt, a flag that wins over a prompt's own schema, --compare without the grammar."""
    pytest.importorskip("llguidance", reason="pip install llguidance")
    (tmp_path / "schema.json").write_text('{"enum": [1, "two"]}')
    (tmp_path / "two.LARK").write_text('?start: "xx"')
    (tmp_path / "bits.gbnf").write_text('root ::= [01] | [01] root')
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "json_schema": {"const": [true, null]}}\n{"prompt": "b"}')
    flags = ["--model", folder, "--device", "cpu", "--max-new-tokens", 20, "--temperature", 1]
    text = lambda *more: json.loads(run(capsys, *flags, "--prompt", "a", "--json", "--compare", *more))
    for more, pattern in ((["--json-schema", tmp_path / "schema.json"], '1|"two"'), (["--regex", "(a|b)!"], "(a|b)!"),
                          (["--json-schema", '{"type": "boolean"}', "--draft", "schema"], "true|false"),
                          (["--grammar", tmp_path / "bits.gbnf", "--draft", "none"], "[01]+"),
                          (["--grammar", tmp_path / "two.LARK"], "xx")):
        result = text(*more)
        assert re.fullmatch(pattern, result["texts"][0]) and result["difference"] is None
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
    flags = ["--model", chat_folder, "--device", "cpu", "--max-new-tokens", 3]
    assert run(capsys, *flags, "--prompt", "ab")
    for prompt in ("a <image>", "<sound>"):
        for chat in ([], ["--chat"]):
            assert "prompt 0 has token ids outside 0..257" in refusal(capsys, *flags, "--prompt", prompt, *chat)


def test_a_conversation_takes_turns(chat_folder, prefilled, capsys, monkeypatch):
    """Bug: a turn is forgotten, mixed up or prefilled again; /clear does not clear."""
    flags = ["--model", chat_folder, "--device", "cpu", "--max-new-tokens", 10, "--tree-size", 5, "--chat"]
    def single(text):
        result = json.loads(run(capsys, *flags[:-1], "--json", "--prompt", text))
        return result["texts"][0], encoding.encode(text) + result["tokens"][0]
    encoding = load_encoding(chat_folder)
    first, tokens = single("u:hi\na:")
    asked = f"u:hi\na:{first}\nu:you\na:"
    second, _ = single(asked)
    typed(monkeypatch, "hi", "", "you", "/clear", "hi")
    prefilled.clear()
    said = run(capsys, *flags)
    assert said == f"{first}\n{second}\n{first}\n"
    asked = encoding.encode(asked)
    same = next(i for i, (a, b) in enumerate(zip([*tokens, None], asked)) if a != b)
    read = [n for _, n in prefilled]
    assert same > 8 and read == [6, len(asked) - same, 6 - 5]  # all but the last token; what differs; "u:hi\na:" again


def test_without_a_template_each_line_is_a_prompt(folder, capsys, monkeypatch):
    flags = ["--model", folder, "--device", "cpu", "--max-new-tokens", 10]
    want = [json.loads(run(capsys, *flags, "--json", "--prompt", text))["texts"][0] for text in ("abc", "  import")]
    typed(monkeypatch, "abc", "  import")
    assert run(capsys, *flags) == f"{want[0]}\n{'-' * 40}\n{want[1]}\n{'-' * 40}\n"


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


def test_neither_ctrl_c_nor_a_line_that_is_too_long_ends_the_conversation(chat_folder, capsys, monkeypatch):
    calls = in_take(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
    typed(monkeypatch, "hi", "x" * 200, "go on")
    flags = ["--max-new-tokens", "10", "--chat", "--draft", "none"]
    main("--model", chat_folder, "--device", "cpu", *flags)
    err = capsys.readouterr().err
    assert "; /clear starts over" in err and err.count("tokens per step") == 2 and len(calls) > 3


def test_generation_config_has_the_stop_tokens_and_sampling_defaults(chat_folder, capsys):
    """Bug: generation_config.json is not read, or overrides a flag."""
    flags = ["--model", chat_folder, "--device", "cpu", "--prompt", "abc", "--max-new-tokens", 20, "--json"]
    tokens = lambda *more: json.loads(run(capsys, *flags, *more))["tokens"]
    config = lambda **more: (chat_folder / "generation_config.json").write_text(json.dumps(settings | more))
    greedy, sampled = tokens(), tokens("--temperature", 2, "--top-k", 50)
    assert greedy != sampled and greedy == tokens("--temperature", 0)
    settings = dict(do_sample=True, temperature=2, top_k=50)
    config()
    assert tokens() == sampled and tokens("--temperature", 0) == greedy
    config(temperature=None, top_k=None)
    assert tokens() == tokens("--temperature", 1, "--top-k", 0) != greedy
    config(do_sample=None)
    assert tokens() == greedy
    stop = sampled[0][9]
    config(eos_token_id=[stop, 257])
    ended = json.loads(run(capsys, *flags))
    assert ended["ended"] == ["stop"] and ended["tokens"][0] == sampled[0][:sampled[0].index(stop) + 1]
    config(repetition_penalty=1.05, suppress_tokens=[7], typical_p=1.0, num_beams=1, begin_suppress_tokens=[])
    main(*flags)
    said = "chat: generation_config.json: not applied: repetition_penalty 1.05, suppress_tokens [7]\n"
    assert said in capsys.readouterr().err
    assert tokens("--top-k", 1) == greedy != tokens("--temperature", 2, "--top-k", 0)
    config(top_k=2.5)
    assert "generation_config.json: top_k must be" in refusal(capsys, *flags)
    for more in (["--top-k", 1], ["--top-p", 0], ["--temperature", 1e-7, "--stop", ""]):  # without the file's
        assert tokens(*more) == greedy


def test_the_template_gets_variables_and_the_system_message(chat_folder, capsys):
    """Bug: --template-kwargs or --system do not reach the template, or are ignored without --chat."""
    (chat_folder / "chat_template.jinja").write_text(TEMPLATE + "{{ 'no ' if think is false }}")
    flags = ["--model", chat_folder, "--device", "cpu", "--max-new-tokens", 20, "--json", "--temperature", 0]
    tokens = lambda *more: json.loads(run(capsys, *flags, *more))["tokens"]
    chat = "--prompt", "abc", "--chat", "--system", "be"
    want = tokens("--prompt", "s:be\nu:abc\na:no ")
    asked = json.loads(run(capsys, *flags, *chat, "--template-kwargs", '{"think": false}'))
    assert asked["tokens"] == want != tokens(*chat) and asked["prompts"] == ["abc"]
    for bad in ("[1]", "{", "9" * 5000, '{"think": false}'):  # the last is valid, but lacks --chat
        with pytest.raises(SystemExit, match="2"):
            main("--prompt", "abc", "--template-kwargs", bad)
        assert "--template-kwargs" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# --show-tree

def test_show_tree_shows_the_drafted_trees(folder, capsys):
    """Bug: a tree of another step or prompt, wrong parents or drafters, or another output."""
    flags = ["--model", folder, "--device", "cpu", "--prompt", "abcabcabc", "--prompt", "import", "--max-new-tokens",
             24, "--draft", "heads+lookup", "--tree-size", 9, "--json"]
    plain, shown = (json.loads(run(capsys, *flags, *more)) for more in ((), ("--show-tree",)))
    assert "drafts" not in plain and plain["tokens"] == shown["tokens"] and plain["accepted"] == shown["accepted"]
    by, decode = Counter(), load_encoding(folder).decode
    for index, tokens in enumerate(shown["tokens"]):
        steps = [step for step in shown["drafts"] if step["prompt"] == index]
        assert [text for step in steps for text in step["emitted"]] == [decode([token]) for token in tokens]
        for step in steps:
            size = len(step["nodes"])
            assert size == len(step["parents"]) == len(step["drafted_by"]) == len(step["probabilities"]) <= 9
            assert step["probabilities"] == sorted(step["probabilities"], reverse=True)
            path = step["path"][1:]
            assert [step["drafted_by"][node] for node in path] == step["guessed_by"][:len(path)]
            assert [step["parents"][node] for node in step["path"]] == [-1, *step["path"][:-1]]
            assert all(step["nodes"][node] == text for node, text in zip(path, step["emitted"]))
            by.update(step["guessed_by"])
    assert shown["accepted"] == {name: n for name, n in by.items() if name != "model"} and by["lookup"] > 0
    drawn = run(capsys, *flags[:-1], "--show-tree")
    trees = [step for step in shown["drafts"] if len(step["nodes"]) > 1][:4]
    assert drawn.count("the newest token") == 4
    assert drawn.count("\n* ") == sum(len(step["path"]) - 1 for step in trees)


BAD_FLAGS = {
    "compare without a prompt": (["--compare"], "--compare needs --prompt"),
    "system without chat": (["--prompt", "a", "--system", "b"], "--system needs --chat"),
    "chat without a template": (["--prompt", "a", "--chat"], "has no chat template"),
    "a tree without drafters": (["--prompt", "a", "--draft", "none", "--tree-size", "5"], "a --tree-size of 1 ("),
    "heads that do not draft": (["--prompt", "a", "--draft", "lookup", "--heads", "nowhere"], "need draft heads"),
    "drafting by no heads": (["--prompt", "a", "--draft", "heads", "--heads", "none"], "but --draft heads needs them"),
    "unknown drafters": (["--prompt", "a", "--draft", "heads+heads"], "some of heads, lookup, schema joined by +"),
    "two grammars": (["--prompt", "a", "--regex", "a", "--json-schema", "{}"], "not allowed with argument --regex"),
    "unknown heads": (["--prompt", "a", "--heads", "nowhere"], "nowhere: no such folder"),
    "unknown device": (["--prompt", "a", "--device", "warp"], "'warp' is not available"),
}


@pytest.mark.parametrize("case", BAD_FLAGS)
def test_bad_flags_are_refused_in_one_line(folder, capsys, case):
    flags, says = BAD_FLAGS[case]
    assert says in refusal(capsys, "--model", folder, "--device", "cpu", *flags)


@pytest.mark.parametrize("allocate", [lambda: torch.empty(2**60, dtype=torch.int8),
                                      Mock(side_effect=torch.OutOfMemoryError("CUDA is full"))], ids=["cpu", "cuda"])
def test_out_of_memory_exits_with_2_and_advice(capsys, monkeypatch, allocate):
    """Bug: a traceback. Other torch errors must keep theirs."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as caught:
        with errors.command():
            allocate()
    said = capsys.readouterr().err
    assert caught.value.code == 2 and said.count("\n") == 1 and "out of memory" in said and "--batch-size" in said
    with pytest.raises(SystemExit) as caught:
        with errors.command():
            torch.ones(2) + torch.ones(3)
    assert caught.value.code == 1 and "Traceback" in capsys.readouterr().err


def test_standard_input_that_is_not_utf8_is_refused(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    said = refusal(capsys, "--model", folder, "--device", "cpu", "--prompt", "-")
    assert "standard input is not UTF-8" in said


# ---------------------------------------------------------------------------------------------------------------------
# Output and exit codes

def test_standard_output_holds_only_prompt_and_output(folder, capsys):
    """Bug: `> out.txt` holds statistics, --quiet prints them, or --compare or heads change the output."""
    flags = ["--model", folder, "--device", "cpu", "--prompt", "abc", "--max-new-tokens", 9999]
    main(*flags, "--compare")
    out, err = capsys.readouterr()
    assert out.startswith("abc") and "tokens per" not in out and "tokens per second" in err
    assert "output is identical" in err
    assert "1 of 1 sequences ended because they filled the model's context of 128 tokens" in err
    main(*flags, "--heads", "none", "--quiet")
    quiet = capsys.readouterr()
    assert quiet.out == out and "tokens per second" not in quiet.err
    result = json.loads(run(capsys, *flags, "--json", "--compare"))
    assert result["difference"] is None and result["plain"]["tokens"] == result["tokens"]


def test_prompts_of_a_file(folder, capsys, tmp_path):
    """Bug: outputs in the order in which they end; lines dropped, or split at more characters; a byte order mark;
    --compare and --show-tree computed beside --json but not printed."""
    texts = ["abc\u2028d", "import os\x0c\x85", "x", "def f(\x1c", "abc"]
    flags = ["--model", str(folder), "--device", "cpu", "--max-new-tokens", "12", "--batch-size", "2"]
    want = [json.loads(run(capsys, *flags, "--prompt", text, "--json"))["texts"][0] for text in texts]
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


@pytest.mark.parametrize("content, message", [
    ("", "contains no prompts"), ('{"prompt": "a"}\n\n{"prompt": 3}', "line 3: expected an object"),
    ('{"prompt": ""}', "0 tokens"), ('{"messages": []}', "it has no message"),
    ('{"messages": [{"role": "user", "content": "hi"}]}', "need --chat"), (None, "cannot be read")])
def test_errors_in_a_prompt_file_have_line_numbers(folder, tmp_path, capsys, content, message):
    """Bug: prompts are decoded before a later bad line is found."""
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_text(content)
    assert message in refusal(capsys, "--model", folder, "--device", "cpu", "--prompts", file)


def test_an_error_of_the_template_names_the_prompt(chat_folder, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    chats = (dict(messages=[dict(role=role, content="a")]) for role in ("user", "dog"))
    file.write_text("\n".join(map(json.dumps, chats)))
    (chat_folder / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'dog' %}{{ raise_exception('no dogs') }}{% endif %}a")
    said = refusal(capsys, "--model", chat_folder, "--device", "cpu", "--chat", "--prompts", file)
    assert "prompts.jsonl, prompt 2: " in said and "no dogs" in said


@pytest.mark.parametrize("step", [4, 12], ids=["decoding", "comparing"])
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_runs_exit_with_the_signals_code(folder, capsys, monkeypatch, number, code, step):
    """Bug: exit code 0, so that `a && b` continues after Ctrl-C; text or statistics of the steps before are lost."""
    in_take(monkeypatch, step, lambda: os.kill(os.getpid(), number))
    monkeypatch.setattr(errors, "received", [])
    flags = f"--model {folder} --device cpu --prompt abc --heads none --temperature 1 --max-new-tokens 8".split()
    monkeypatch.setattr(sys, "argv", ["generate.py", *flags, *["--compare"] * (step == 12)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "generate.py"), run_name="__main__")
    out, err = capsys.readouterr()
    assert ended.value.code == code and out.startswith("abc") and len(out.strip()) > 3
    assert "1.00 tokens per step, " in err and "identical" not in err


def test_heads_without_their_record_are_not_ignored(chat_folder, capsys):
    """Bug: the model decodes without its heads, and nothing says so."""
    flags = "--model", chat_folder, "--device", "cpu", "--prompt", "abc", "--max-new-tokens", 3
    record = chat_folder / "clover" / "heads.json"
    record.unlink()
    assert str(record) in refusal(capsys, *flags)
    assert "abc" in run(capsys, *flags, "--heads", "none")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_output_that_cannot_be_written(folder, capsys, monkeypatch):
    """Bug: a traceback, exit code 0 for a full disk, an error because of `| head`, a second error at exit."""
    flags = "--model", folder, "--device", "cpu", "--prompt", "abc", "--quiet"
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert refusal(capsys, *flags).endswith(": [Errno 28] No space left on device\n")
        full.write("the rest")  # is written to /dev/null
    reader, closed = os.pipe()
    os.close(reader)
    with open(closed, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        main(*flags)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("closed", [["stdin"], ["stdout"], ["stderr"], ["stdin", "stdout", "stderr"]], ids=" ".join)
def test_standard_streams_may_be_closed(closed, folder, capsys, monkeypatch):
    """Bug: a traceback for `2>&-`; text for standard error on standard output."""
    with monkeypatch.context() as patch:
        for name in closed:
            patch.setattr(sys, name, None)
        main("--model", folder, "--device", "cpu", *([] if "stdin" in closed else ["--prompt", "abc"]))
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
    text = run(capsys, "--model", folder, "--device", "cpu", "--prompt", "abcabcabc", "--tree-size", 8)
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
