"""Tool calls through tools/serve.py: responses, streams, clients that are used to OpenAI's own endpoint."""

import io
import json

import pytest

from conftest import toy_model
from test_hf_calls import CITY, HERMES, TOOLS, add_markers, calls_of, tool
from test_tools_cli import main
from test_tools_cli import refusal as refused
from test_tools_serve import Running, events, until

CHAT = "/v1/chat/completions"
SAID = [dict(role="user", content="hi")]
named = lambda name: dict(type="function", function=dict(name=name))
ask = lambda **fields: dict(messages=SAID, tools=TOOLS, max_tokens=99, temperature=2.0, seed=1) | fields


def save_agent(path):
    """A random model whose chat template takes tools, and which has tokens for their markers."""
    toy_model(vocab_size=264, block_size=1024).save_pretrained(path)
    add_markers(path)
    (path / "chat_template.jinja").write_text(HERMES)
    return path


def serve_agent(path, *flags):
    save_agent(path)
    return Running(path, "--batch-size", "4", "--queue", "20", *flags, context=1024)


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    running = serve_agent(tmp_path_factory.mktemp("agent") / "model")
    yield running
    until(running.idle)
    running.stop()


def streamed(parts):
    """Of a stream's objects, a message for each choice, as a client puts it together, and the reasons. Asserts that
    an id and a name come first."""
    messages, reasons = {}, {}
    for choice in (choice for part in parts for choice in part["choices"]):
        message = messages.setdefault(choice["index"], dict(content="", tool_calls=[]))
        message["content"] += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            assert (call["index"] == len(message["tool_calls"])) == ("id" in call) == ("name" in call["function"])
            if "id" in call:
                function = dict(name=call["function"]["name"], arguments="")
                message["tool_calls"].append(dict(id=call["id"], function=function))
            message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        reasons[choice["index"]] = choice["finish_reason"]
    return [messages[i] for i in sorted(messages)], [reasons[i] for i in sorted(reasons)]


@pytest.mark.parametrize("choice, parallel", [("auto", True), ("required", True), (named("get.time"), True),
                                              ("required", False)])
def test_responses_and_streams_have_the_same_calls(agent, choice, parallel):
    """Bug: a marker in the content, a call cut elsewhere, no JSON, a wrong reason, 400 for a call and its result."""
    body = ask(tool_choice=choice, parallel_tool_calls=parallel, n=20 if choice == "auto" else 6)
    whole = agent.post(body, CHAT).json()["choices"]
    parts = events(agent.post(body | dict(stream=True, show_steps=True), CHAT).text.splitlines())
    messages, reasons = streamed(parts)
    assert reasons == [choice["finish_reason"] for choice in whole]
    assert [(one["content"], calls_of(one)) for one in messages] == [
        (choice["message"]["content"] or "", calls_of(choice["message"])) for choice in whole]
    called = [calls_of(choice["message"]) for choice in whole if choice["finish_reason"] == "tool_calls"]
    names = {name for calls in called for name, _ in calls}
    assert called and names <= {"get", "get.time", 'größe-"x"'}
    assert all(isinstance(json.loads(x), dict) for calls in called for _, x in calls)
    assert choice == "auto" or not any(one["content"] for one in messages)
    assert parallel and choice != named("get.time") or max(map(len, called)) == 1
    assert choice != named("get.time") or names == {"get.time"}
    assert not any("<tool_call>" in one["content"] for one in messages)
    ids = [call["id"] for one in messages for call in one["tool_calls"]]
    assert len({*ids}) == len(ids)
    shown = "".join(token for part in parts if part["choices"][0]["index"] == 0 for token in part["clover"]["tokens"])
    assert ("<tool_call>" in shown) == bool(calls_of(messages[0]))
    message = next(choice["message"] for choice in whole if choice["finish_reason"] == "tool_calls")
    results = [dict(role="tool", tool_call_id=call["id"], content="5") for call in message["tool_calls"]]
    assert agent.post(ask(messages=[*SAID, message, *results]), CHAT).status_code == 200


@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_tools_beside_a_response_format(agent, choice):
    """Bug: 400, free text where a schema was asked for, a call that was excluded, tools hidden from the template."""
    schema = CITY | dict(properties=dict(n=dict(enum=[1, 2])), required=["n"], additionalProperties=False)
    form = dict(type="json_schema", json_schema=dict(name="a", schema=schema))
    said = agent.post(ask(tool_choice=choice, response_format=form, n=20), CHAT).json()
    calls = [one for one in said["choices"] if one["message"].get("tool_calls")]
    for message in (one["message"] for one in said["choices"] if one not in calls and one["finish_reason"] == "stop"):
        assert json.loads(message["content"]) in (dict(n=1), dict(n=2))
    assert 0 < len(calls) < 20 if choice == "auto" else len(calls) == 20 * (choice == "required")
    assert not any(one["message"]["content"] for one in calls)
    assert said["usage"]["prompt_tokens"] == agent.post(ask(), CHAT).json()["usage"]["prompt_tokens"]


BAD = [(dict(tool_choice=named("x")), "tool_choice"), (dict(tool_choice="any"), "tool_choice"),
       (dict(tool_choice="required", tools=[]), "tool_choice"), (dict(tool_choice=dict(type=1)), "tool_choice.type"),
       (dict(structured_outputs=dict(regex="a")), "beside tools"), (dict(tools=[tool("a"), tool("a")]), "tools[1]: "),
       (dict(tools=[tool("b", strict=True, parameters=dict(properties=dict(x=dict(uniqueItems=True))))]), "tool 'b': "),
       (dict(tools=[tool("")]), "tools[0].function.name"), (dict(tools=[dict(type="web_search")]), "tools[0]"),
       (dict(tools=[tool("a", parameters=dict(type="array"))]), "tools[0].function.parameters")]


@pytest.mark.parametrize("fields, says", BAD)
def test_bad_requests_for_calls_get_a_line(agent, fields, says):
    """Bug: a 500, or a choice or a schema that is ignored."""
    answer = agent.post(ask(**fields), CHAT)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and message.startswith(says) and "\n" not in message


def test_calls_on_the_command_line_are_lines_of_json(capsys, tmp_path, monkeypatch):
    """Bug: a marker that is printed, a prompt without its tools, --compare without its grammar, another template."""
    prompt = dict(prompt="hi", tools=TOOLS, parallel_tool_calls=False)
    prompts = [prompt | dict(tool_choice="required"), prompt, prompt | dict(tool_choice=named("get.time"))]
    files = {"tools.json": json.dumps(TOOLS), "prompts.jsonl": "\n".join(map(json.dumps, prompts)), "bad.json": "[",
             "mistral.jinja": "{{ tools[0].function.name }}[TOOL_CALLS][", "plain.jinja": "{{ messages }}"}
    paths = {name: tmp_path / name for name in files}
    for name, text in files.items():
        paths[name].write_text(text)
    model = save_agent(tmp_path / "model")
    flags = [model, "--heads", "none", "--chat", "--max-new-tokens", 90, "--temperature", 1, "--top-p", 1, "--seed", 5]
    main(*flags, "--prompts", paths["prompts.jsonl"], "--json", "--compare")
    out, err = capsys.readouterr()
    texts = [json.loads(line)["text"] for line in out.splitlines()]
    assert "output is identical" in err and json.loads(texts[0])["name"] in ("get", "get.time", 'größe-"x"')
    assert "<tool_call>" not in "".join(texts) and json.loads(texts[2]) == dict(name="get.time", arguments={})
    main(*flags, "--chat-template", paths["mistral.jinja"], "--prompts", paths["prompts.jsonl"], "--quiet")
    assert '{"name": "get.time", "arguments": {}}\n---' in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\n")))
    tools = ["--tools", paths["tools.json"]]
    main(*flags, *tools, "--quiet")
    assert capsys.readouterr().out
    for more, says in (([*tools, "--regex", "a"], "not allowed with argument"),
                       (["--tools", paths["bad.json"]], "expected a JSON list of functions, but: "),
                       ([*tools, "--chat-template", paths["plain.jinja"]], "the chat template takes no tools")):
        assert says in refused(capsys, *flags, "--prompt", "a", *more)
    assert "--tools needs --chat" in refused(capsys, model, "--prompt", "a", *tools)
    both = refused(capsys, *flags, "--prompts", paths["prompts.jsonl"], "--regex", "a")
    assert "a prompt has tools or a grammar" in both
