"""tools/serve.py: outputs equal generate()'s; bad requests, lost clients and errors do not affect other requests."""

import asyncio
import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from backends.tensor_parallel import Group
from conftest import ROOT, toy_model, write_tokenizer
from generate import generate
from hf.chat import SAMPLING_KEYS
from hf.tokenizer import encode_prompt
from model import InputError
from tools.flags import parse_serve
from tools.load import load

httpx = pytest.importorskip("httpx", reason="the tests of the server need pip install httpx")
pytest.importorskip("starlette", reason="the server needs pip install starlette uvicorn")
uvicorn = pytest.importorskip("uvicorn", reason="the server needs pip install starlette uvicorn")

from tools import serve  # noqa: E402
from tools.metrics import Metrics  # noqa: E402

TEMPLATE = """{% for m in messages %}{{ raise_exception("no dogs") if m.role == "dog" }}{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}{{ m.tool_call_id }}{% endfor %}
{{- "think " if enable_thinking }}{{ "off " if enable_thinking is false }}{{ reasoning_effort }}
{{- "a:" if add_generation_prompt }}"""


START = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


class Running:
    """A server in this process, with its own threads."""

    def __init__(self, folder, *flags, context=128):
        self.args = parse_serve(["--model", str(folder), "--device", "cpu", "--threads", "1", "--name", "toy", *flags])
        self.loaded = load(self.args, Group())
        self.app = serve.App(self.args, self.loaded, context)
        self.engine, self.worker = self.app.engine, self.app.worker
        self.server = uvicorn.Server(uvicorn.Config(self.app.asgi, log_level="critical", **serve.HTTP))
        listener = serve.listen("127.0.0.1", 0)
        assert serve.HTTP["http"] == "h11"  # see `post`
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)  # else each answer is 40 ms late
        self.address = listener.getsockname()
        self.url = "http://{}:{}".format(*self.address)
        self.client = httpx.Client(base_url=self.url, timeout=60)
        self.thread = threading.Thread(target=self.server.run, args=([listener],), daemon=True)
        self.thread.start()

    def stop(self):
        self.client.close()
        self.server.should_exit = True
        self.thread.join()

    def post(self, body, path="/v1/completions"):
        """Sends a request as Java's HttpClient does; httptools, where it is installed, would drop the body."""
        content = body if isinstance(body, (bytes, str)) else json.dumps(body)
        headers = {"content-type": "application/json", "upgrade": "h2c", "connection": "Upgrade, HTTP2-Settings",
                   "http2-settings": "AAMAAABkAAQBAAAAAAIAAAAA"}
        return self.client.post(path, content=content, headers=headers)

    def want(self, body, chat=False):
        """What generate() gives for a request: (texts, finish reasons, Output)."""
        encoding = self.loaded.encoding
        texts = [body["messages"]] if chat else body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
        prompts = [encoding.chat(text) if chat else encode_prompt(encoding, text) for text in texts]
        sampling = {name: body[name] for name in (*SAMPLING_KEYS, "seed") if name in body}
        stop = [*self.loaded.stop, *filter(None, body.get("stop", []))]
        out = generate(self.loaded.model, [prompt for prompt in prompts for _ in range(body.get("n", 1))],
                       body["max_tokens"], stop=stop, encoding=encoding, **sampling)
        streams = [encoding.stream(stop) for _ in out.tokens]
        texts = [stream.feed(tokens) + stream.finish() for stream, tokens in zip(streams, out.tokens)]
        return texts, ["stop" if ended == "stop" else "length" for ended in out.ended], out

    @contextlib.contextmanager
    def paused(self):
        """Holds the engine between two steps."""
        barrier = threading.Barrier(2, timeout=60)
        self.worker.calls.put(lambda: (barrier.wait(), barrier.wait()))
        barrier.wait()
        yield
        barrier.wait()

    def idle(self):
        return (self.app.active == 0 and not self.worker.jobs and self.worker.calls.empty() and not self.engine.busy
                and len(self.engine.idle) == self.args.batch_size)


def until(condition):
    assert any(condition() or threading.Event().wait(0.01) for _ in range(6000))


def events(lines):
    *data, last = [line.removeprefix("data: ") for line in lines if line]
    assert last == "[DONE]"
    return list(map(json.loads, data))


def joined(parts, chat=False):
    """The (texts, finish reasons) of a stream's objects."""
    texts, reasons = defaultdict(str), {}
    for choice in (choice for part in parts for choice in part["choices"]):
        texts[choice["index"]] += choice["delta"]["content"] if chat else choice["text"]
        reasons[choice["index"]] = choice["finish_reason"]
    return [texts[i] for i in sorted(texts)], [reasons[i] for i in sorted(reasons)]


@pytest.fixture(scope="module")
def folder(folder, tmp_path_factory):
    """The checkpoint with heads and a chat template."""
    path = shutil.copytree(folder, tmp_path_factory.mktemp("served") / "model")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def server(folder):
    running = Running(folder, "--batch-size", "3", "--queue", "5", "--draft", "heads+lookup", "--tree-size", "7")
    yield running
    running.stop()


@pytest.fixture
def served(server):
    yield server
    until(server.idle)  # catches slots and places in the queue that leak


SAID = dict(role="user", content="hi é")
CHAT = [dict(role="system", content="be"), SAID | dict(content=[dict(type="text", text=t) for t in ("hi ", "é")])]
BODIES = {"greedy": dict(), "sampled": dict(temperature=0.9, seed=7, n=3), "context": dict(max_tokens=500),
          "stop": dict(temperature=1, stop=["", "e"], seed=0),
          "filtered": dict(temperature=1.2, top_p=0.8, top_k=50, min_p=0.01, seed=-5)}


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
@pytest.mark.parametrize("case", BODIES)
def test_outputs_equal_generate(served, case, chat):
    """Bug: sampling, stop strings or a limit are lost, choices are mixed up, or other requests change the output."""
    prompt = dict(messages=CHAT) if chat else dict(prompt=["abcabc", "\0\x1b\ud800<b>"])
    body = dict(max_tokens=30, model="toy", user="ignored") | prompt | BODIES[case]
    texts, reasons, out = served.want(body | dict(messages=[CHAT[0], SAID]), chat)
    path = "/v1/chat/completions" if chat else "/v1/completions"
    whole = served.post(body, path).json()
    said = [choice["message"]["content"] if chat else choice["text"] for choice in whole["choices"]]
    assert (said, [choice["finish_reason"] for choice in whole["choices"]]) == (texts, reasons)
    n = sum(len(s.prompt) for s in out.sequences[::body.get("n", 1)])
    usage = dict(prompt_tokens=n, completion_tokens=out.emitted, total_tokens=n + out.emitted)
    body |= dict(stream=True, stream_options=dict(include_usage=True))
    answer = served.post(body, path)
    assert (answer.headers["x-accel-buffering"], answer.headers["cache-control"]) == ("no", "no-cache")
    *parts, last = events(answer.text.splitlines())
    assert joined(parts, chat) == (texts, reasons) and last["choices"] == []
    for said in (whole, last):
        details = dict(accepted_prediction_tokens=sum(said["speculation"]["guessed"].values()))
        assert said["usage"].pop("prompt_tokens_details")["cached_tokens"] < n
        assert said["usage"] == usage | dict(completion_tokens_details=details)


def test_prompt_tokens_that_the_cache_holds_are_counted(served):
    """Bug: no count, or one that later choices of the same prompt are part of."""
    cached = lambda **fields: served.post(ask(**fields)).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    text = "no other request has this prompt " * 2
    assert [cached(prompt=text), cached(prompt=text)] == [0, 64]  # the last tokens are read again
    assert cached(prompt=[text, "\x07\x07"], n=4) == 64


@pytest.mark.parametrize("fields, same", [
    (dict(max_tokens=-1), dict(max_tokens=500)), (dict(max_completion_tokens=-1.0), dict(max_tokens=500)),
    (dict(stop=[f"{i} no" for i in range(31)] + ["x" * 256]), {}), (dict(verbosity="low"), {}),
    *((dict(model=name), {}) for name in ("gpt-4", "\ud800", 5, ["a"], "toy"))])
def test_fields_as_clients_write_them(served, fields, same):
    """Bug: 400 for -1, which llama.cpp's clients send, or for 17 stop texts; 404 for another model's name."""
    answers = [served.post(ask(**given)).json() for given in (fields, same)]
    assert answers[0]["choices"] == answers[1]["choices"] and {answer["model"] for answer in answers} == {"toy"}


def test_steps_are_shown_on_request(served):
    """Bug: tokens do not add up to the text, draft="none" still drafts, or drafting stays off afterwards."""
    body = dict(prompt="abcabcabc", max_tokens=30, stream=True, show_steps=True)
    for draft, size in ((None, 7), ("none", 1), (None, 7)):
        parts = events(served.post(body | dict(draft=draft)).text.splitlines())
        assert all("".join(part["clover"]["tokens"]) == part["choices"][0]["text"] for part in parts)
        assert {part["clover"]["tree_size"] for part in parts} == {size} and (len(parts) == 30) == (size == 1)
        assert joined(parts)[0] == served.want(body)[0]


@pytest.mark.parametrize("top", [0, 4])
@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_log_probabilities(served, chat, top):
    """Bug: entries of another choice, bytes that are not the text's, offsets of other characters, another stream."""
    path, body = ("/v1/chat/completions", dict(messages=CHAT, logprobs=True, top_logprobs=top)) if chat else (
        "/v1/completions", dict(prompt="abcé", logprobs=top))
    body |= dict(max_tokens=30, temperature=1.2, seed=2, n=8, stop=["q"])
    whole = served.post(body, path).json()
    stream = [defaultdict(list) for _ in range(8)]
    for part in events(served.post(body | dict(stream=True), path).text.splitlines()):
        for name, values in part["choices"][0]["logprobs"].items():
            stream[part["choices"][0]["index"]][name] += values or []
    count, begins = 0, []
    for choice, parts in zip(whole["choices"], stream):
        said = choice["logprobs"]
        assert parts == {name: values or [] for name, values in said.items()}
        entries = said["content" if chat else "tokens"]
        if chat:
            raw = b"".join(bytes(entry["bytes"]) for entry in entries)
            assert raw.decode(errors="replace").startswith(choice["message"]["content"]) and said["refusal"] is None
            best = [[one["logprob"] for one in entry["top_logprobs"]] for entry in entries]
            assert {*map(len, best)} == {top}
            assert all(entry["logprob"] <= max(some, default=0) < 1e-9 for entry, some in zip(entries, best))
        else:
            assert {len(column) for column in said.values()} == {len(entries)}
            begins += [choice["text"].startswith(token, offset) for token, offset in zip(entries, said["text_offset"])
                       if "\ufffd" not in choice["text"][:offset + 1] and not re.match("q|<.+|bytes:", token)]
            columns = zip(said["top_logprobs"], entries, said["token_logprobs"])
            assert all(found[token] == value < 0 for found, token, value in columns)
        count += len(entries)
    assert count == whole["usage"]["completion_tokens"] and all(begins) and (chat or sum(begins) > 3)
    assert served.post({name: body[name] for name in body if "logprobs" not in name}, path).json()["choices"] == [
        choice | dict(logprobs=None) for choice in whole["choices"]]


PAIR = dict(type="object", properties=dict(n=dict(type="integer", minimum=0, maximum=99), kind=dict(enum=["a", "b"])),
            required=["n", "kind"], additionalProperties=False)
JSON = r'\{"n": \d{1,2}, "kind": "[ab]"\}'
SCHEMA = dict(type="json_schema", json_schema=dict(name="pair", strict=True, schema=PAIR))
structured = lambda **source: dict(structured_outputs=source)
STRUCTURED = {  # fields, an expression that the output matches
    "OpenAI's": (dict(response_format=SCHEMA), JSON), "vLLM's": (structured(json=PAIR), JSON),
    "llama.cpp's": (dict(response_format=dict(type="json_object", schema=PAIR)), JSON),
    "text of JSON": (structured(json=json.dumps(PAIR)), JSON), "choice": (structured(choice=["a", "\"b"]), 'a|"b'),
    "regex": (structured(regex="[ab]{3}-(x|y)"), "[ab]{3}-(x|y)"),
    "GBNF": (structured(grammar='root ::= "a" | "b" root'), "b*a"),
    "Lark": (structured(grammar=dict(lark='?start: "a" | "b" start')), "b*a")}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """A server of a model whose chat template opens <think>, unless enable_thinking is false."""
    pytest.importorskip("llguidance", reason="structured output needs pip install llguidance")
    path = tmp_path_factory.mktemp("thinker") / "model"
    toy_model(vocab_size=260, block_size=128).save_pretrained(path)
    write_tokenizer(path, {"<think>": False, "</think>": False})
    opened = "{{ 'a:' if enable_thinking is false else '<think>' }}"
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}" + opened)
    running = Running(path, "--batch-size", "4", "--queue", "20")
    yield running
    until(running.idle)
    running.stop()


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("case", STRUCTURED)
def test_structured_output(thinker, case, thinks):
    """Bug: a grammar that constrains reasoning, reasoning in the content, a stream of another text."""
    fields, pattern = STRUCTURED[case]
    body = dict(messages=[SAID], max_tokens=90, temperature=3.0, seed=1, n=20) | fields
    body |= dict(chat_template_kwargs=dict(enable_thinking=True)) if thinks else {}
    choices = thinker.post(body, "/v1/chat/completions").json()["choices"]
    texts, reasons = ([choice[key] for choice in choices] for key in ("message", "finish_reason"))
    texts = [text["content"] for text in texts]
    assert joined(events(thinker.post(body | dict(stream=True), "/v1/chat/completions").text.splitlines()), True) == (
        texts, reasons)
    done = [text for text, reason in zip(texts, reasons) if reason == "stop"]
    assert all(text == "" and thinks or re.fullmatch(pattern, text) for text in done)
    assert any(done) if thinks else len(done) > 10


def test_a_grammar_that_explodes_fails_alone(thinker):
    """Bug: a request that fails with another one, an error without a reason, an unsupported schema found in a step."""
    from test_hf_grammar import EXPLODES  # needs llguidance, like the fixture
    bodies = [ask(**structured(grammar=dict(lark=EXPLODES)), max_tokens=50, stop_token_ids=[257]), ask(max_tokens=40)]
    alone = thinker.post(bodies[1]).json()["choices"]
    with ThreadPoolExecutor(2) as pool:
        failed, other = [answer.json()["choices"] for answer in pool.map(thinker.post, bodies)]
    assert failed[0]["finish_reason"] == "error" and failed[0]["error"].startswith("parser error") and other == alone
    answer = thinker.post(ask(**structured(json=dict(uniqueItems=True))))
    assert answer.status_code == 400 and "uniqueItems" in answer.json()["error"]["message"]


FUNCTION = dict(name="sum", arguments='{"a": 1}')
CALL = dict(role="assistant", tool_calls=[dict(id="c1", type="function", function=FUNCTION)])
ask = lambda **fields: dict(prompt="a", max_tokens=4) | fields
say = lambda *messages, **more: ("/v1/chat/completions", dict(messages=list(messages), max_tokens=4) | more)
BAD = {
    "broken JSON": ('{"prompt": "a"', 400, "not valid JSON"), "no UTF-8": (b'{"prompt": "\xff"}', 400, "not valid"),
    "NaN": ('{"prompt": "a", "temperature": NaN}', 400, "not valid JSON: NaN"), "a list": ([], 400, "a JSON object"),
    "depth": ("[" * 10**5, 400, "not valid JSON"),
    "choices": (ask(n=9), 400, "expected up to 8 sequences (this server's --batch-size plus --queue), not 9"),
    "infinity": ('{"prompt": "a", "n": 1e999}', 400, "n must be"),
    "no prompt": ({}, 400, "prompt is missing"),
    "two grammars": (ask(**structured(regex="a"), response_format=SCHEMA), 400, "takes one of"),
    "another path": (("/v1/responses", {}), 404, "Not Found"), "another page": (("/nothing", None), 404, "Not Found"),
    "a method": (("/v1/completions", None), 405, "Method"),
    "a large body": (b" " * (4 * 2**20 + 1), 413, "4194304 bytes"),
    "nothing to continue": (say(CALL, continue_final_message=True), 400, "continue_final_message needs a text"),
    "roles": (say(dict(role="dog", content="w")), 400, "toy/chat_template.jinja: cannot render messages: no dogs")}


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_get_a_one_line_error(served, monkeypatch, case):
    """Bug: a traceback, a 500, a path of this machine in the message, or a server that hangs."""
    body, status, says = BAD[case]
    path, body = body if isinstance(body, tuple) else ("/v1/completions", body)
    answer = served.post(body, path) if body is not None else served.client.get(path)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (status, "invalid_request_error") and says in error["message"]
    assert str(served.args.model) not in error["message"] and len(error["message"]) <= 1000
    of_a_file = served.app.as_error(InputError(f"{served.args.model}: no"))  # as of GGUF
    assert of_a_file["error"]["message"] == "toy: no"
    monkeypatch.setattr(served.args, "chat_template", "/home/me/mine.jinja")
    of_a_file = served.app.as_error(InputError("/home/me/mine.jinja: no"))
    assert of_a_file["error"]["message"] == "mine.jinja: no"


@pytest.mark.parametrize("path, body", [
    ("/v1/completions", dict(prompt=[[]] * 10**4)), ("/v1/completions", dict(prompt=[0] * 10**4))],
    ids=["prompts", "ids"])
def test_a_large_body_is_refused_before_it_is_encoded_or_checked_on_the_event_loop(served, monkeypatch, path, body):
    """Bug: /health and all streams stand still while one request is read."""
    threads, fields = [], serve.request_fields
    read = fields.read
    monkeypatch.setattr(fields, "read", lambda *args: threads.append(threading.current_thread()) or read(*args))
    monkeypatch.setattr(served.loaded.encoding, "encode", lambda *args, **options: 1 / 0)
    answer = served.post(body, path)
    error = answer.json()["error"]
    want = r"This model's maximum context length is 128 tokens\. However, your messages resulted in \d+ tokens;"
    assert re.match("expected up to 8" if "[]" in str(body) else want, error["message"]) and answer.status_code == 400
    assert (error["code"] == "context_length_exceeded") == ("[]" not in str(body))
    assert len(threads) == 1 and served.thread not in threads


REFUSED = [*dict(
    ignore_eos=True, min_tokens=3, repetition_penalty=1.1, guided_json=dict(type="object"), bad_words=["a"],
    structured_outputs=dict(structural_tag="a"), response_format=dict(type="xml"),
    prompt_logprobs=0, logprobs="5", tool_choice="required", best_of=2,
    skip_special_tokens=False, include_stop_str_in_output=True, typical_p=0.9,
    tools=[dict(type="function")], logit_bias={"1": 5}, presence_penalty=0.5, suffix="a", echo=True, x="é",
    continue_final_message="yes", top_logprobs=False, stop_token_ids="a", stream_options=dict(include=True),
    temperature=-1, stream="yes", stop=["a"] * 33, max_tokens=0, draft="all", n=129).items(),
    ("top_logprobs", 21), ("top_logprobs", 2), ("logprobs", 6), ("stop", ["b" * 257]),
    ("prompt", ["a", 3]), ("prompt", [[1], [258]]), ("messages", []), ("messages", [SAID | dict(tool_calls=["f"])]),
    *(("messages", [dict(role="user", content=content)]) for content in (None, [dict(type="image_url")])),
    ("structured_outputs", dict(grammar=dict(ebnf="a"))), ("response_format", dict(type=["text"])),
    ("response_format", dict(type="json_schema")),
    *(("response_format", dict(type=kind, json_schema=PAIR)) for kind in ("text", "json_object", "json_schema"))]
NEUTRAL = dict(
    ignore_eos=False, min_tokens=0, repetition_penalty=1.0, tools=[], response_format=dict(type="text"), best_of=1,
    tool_choice="auto", echo=False, logit_bias={}, presence_penalty=0, frequency_penalty=0.0, suffix="", stop="",
    skip_special_tokens=True, spaces_between_special_tokens=False, include_stop_str_in_output=False, repeat_penalty=1.0,
    top_k=-1, user="u", metadata=dict(a="b"), store=True, service_tier="auto", logprobs=False, anything=None)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_unsupported_fields_are_ignored_or_refused_by_name(served, path):
    """Bug: a field that changes the output is ignored, or one that does not is refused; an error after 200."""
    body = dict(prompt="abc") if path == "/v1/completions" else dict(messages=[SAID])
    text = lambda body: str(served.post(body | dict(max_tokens=9), path).json()["choices"])
    assert text(body | NEUTRAL) == text(body)
    for name, value in REFUSED:
        answer = served.post(body | dict(stream=True) | {name: value}, path)
        assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(name), name


called_with = lambda text: dict(messages=[CALL | dict(tool_calls=[dict(function=FUNCTION | dict(arguments=text))])])
CALLED = [CALL | dict(content=None), dict(role="tool", tool_call_id="c1", content="5")]


@pytest.mark.parametrize("body, prompt", [
    (dict(messages=[SAID], chat_template_kwargs=dict(enable_thinking=True, messages=[])), "hi éthink a:"),
    (dict(messages=[SAID], add_generation_prompt=False), "hi é"),
    (dict(messages=[SAID, dict(role="assistant", content="so")], continue_final_message=True), "hi éso"),
    (dict(messages=[CALL, *CALLED]), '{"a": 1}{"a": 1}5c1a:'),
    (called_with(""), "{}a:"), (called_with(" \n"), "{}a:"), (called_with('{"a": '), '"{\\"a\\": "a:'),
    (dict(messages=[SAID], reasoning_effort="xhigh"), "hi éxhigha:"),
    (dict(messages=[SAID], reasoning_effort="none"), "hi éoff a:"),
    (dict(messages=[SAID], reasoning_effort="none", chat_template_kwargs=dict(enable_thinking=True)), "hi éthink a:")])
def test_the_template_gets_the_request(served, body, prompt):
    """Bug: tool calls, variables or an unfinished message do not reach the template."""
    more = dict(max_tokens=20, temperature=1, seed=5)
    said = served.post(body | more, "/v1/chat/completions").json()
    want = served.post(dict(prompt=prompt) | more).json()
    assert said["choices"][0]["message"]["content"] == want["choices"][0]["text"]
    assert all(said["usage"][name] == want["usage"][name] for name in ("prompt_tokens", "completion_tokens"))


def test_prompts_and_stops_may_be_token_ids(served):
    """Bug: a list of ids is read as a list of prompts; a stop id does not stop, or is shown."""
    more = dict(max_tokens=20, temperature=1.5, seed=1)
    said = lambda prompt, **stop: [x["text"] for x in served.post(dict(prompt=prompt) | more | stop).json()["choices"]]
    ids, other = map(served.loaded.encoding.encode, ("abc", "é"))
    texts, _, out = served.want(dict(prompt=["abc", "é"]) | more)
    assert said([ids, other]) == texts and said(ids) == texts[:1]
    tokens = out.tokens[0]
    before = tokens[:tokens.index(tokens[9])]
    assert said(ids, stop_token_ids=[tokens[9], 999]) == [served.loaded.decode(before)]


@pytest.mark.parametrize("stream", [False, True])
def test_control_tokens_are_not_in_the_text(served, monkeypatch, stream):
    """Bug: <|im_start|> in an answer; a control token that a client stops at is not seen."""
    body = dict(prompt="abc", max_tokens=20, temperature=1.5, seed=1, skip_special_tokens=True)
    tokens = served.want(body)[2].tokens[0]
    hidden, text = tokens[5], served.loaded.encoding.stream()
    shown = text.feed([token for token in tokens if token != hidden]) + text.finish()
    monkeypatch.setattr(served.loaded.encoding, "control_ids", {hidden})
    said = served.post(body | dict(stream=stream))
    said = joined(events(said.text.splitlines()))[0] if stream else [said.json()["choices"][0]["text"]]
    assert said == [shown] == [served.loaded.decode(tokens)]
    stopped = served.post(body | dict(stop=[served.loaded.encoding.decode([hidden])])).json()["choices"][0]
    assert stopped["finish_reason"] == "stop" and shown.startswith(stopped["text"])


def test_a_request_without_a_seed_gets_a_random_one(served, monkeypatch):
    """Bug: repeating a request never changes the output, a drawn seed is not reported, or --seed is ignored."""
    body = ask(max_tokens=20, temperature=1.5)
    for any_seed in ({}, dict(seed=-1)):
        first, second = (served.post(body | any_seed).json() for _ in range(2))
        assert first["choices"] != second["choices"] and -1 not in (first["seed"], second["seed"])
    assert served.post(body | dict(seed=first["seed"])).json()["choices"] == first["choices"]
    parts = events(served.post(body | dict(stream=True)).text.splitlines())
    assert joined(parts)[0] == served.want(body | dict(seed=parts[0]["seed"]))[0]
    monkeypatch.setitem(served.loaded.sampling, "seed", 4)  # as --seed does
    assert [served.post(body).json()["seed"] for _ in range(2)] == [4, 4]
    monkeypatch.setitem(served.loaded.sampling, "seed", -1)
    assert len({served.post(body).json()["seed"] for _ in range(2)}) == 2


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="there is no IPv6")
def test_addresses_of_ipv6():
    """Bug: a traceback for ::1, or a server on :: that IPv4 cannot reach."""
    with serve.listen("::1", 0) as listener:
        socket.create_connection(listener.getsockname()[:2]).close()
    with serve.listen("::", 0) as listener:
        for host in ("::1", "127.0.0.1"):
            socket.create_connection((host, listener.getsockname()[1])).close()


def test_clients_that_send_half_a_request_or_read_nothing_time_out(served, monkeypatch):
    """Bug: a task waits for a body, or a response for its reader, for ever and keeps its place in the queue."""
    for patience in (60, 0.05):
        monkeypatch.setattr(serve, "PATIENCE", patience)
        with socket.create_connection(served.address) as half:
            half.sendall(START + b"content-length: 100\r\n\r\n{")
            assert patience == 60 or half.recv(100).startswith(b"HTTP/1.1 408")
    until(lambda: not served.server.server_state.tasks)
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = dict(type="http", method="POST", path="/v1/completions", query_string=b"", headers=headers)
    messages = iter([dict(type="http.request", body=json.dumps(ask(stream=True)).encode())])
    never = lambda *_: asyncio.Event().wait()
    receive = lambda: asyncio.sleep(0, message) if (message := next(messages, None)) else never()
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(served.app.asgi(scope, receive, never))


def test_api_key_and_allowed_origins(folder, served, monkeypatch):
    """Bug: an endpoint without a key check; an allowed page is blocked by the browser, or any other is not."""
    monkeypatch.setenv("CLOVER_API_KEY", "k\u00e9y")
    running = Running(folder, "--batch-size", "1", "--allow-origin", "http://a")
    assert parse_serve(["--api-key", "flag"]).api_key == "flag" and "k\u00e9y" == running.args.api_key
    get = lambda path, key="none", scheme="Bearer ", **headers: running.client.get(
        path, headers=headers | {"authorization": f"{scheme}{key}".encode()})
    for path in ("/v1/models", "/metrics"):
        assert [get(path, key).status_code for key in ("k", "key", "k\u00e9y")] == [401, 401, 200]
        schemes = {"bearer ": 200, "BEARER  ": 200, "Basic ": 401, "": 401}
        assert {scheme: get(path, "k\u00e9y", scheme).status_code for scheme in schemes} == schemes
    assert running.post(ask()).status_code == 401
    assert [get(path).status_code for path in ("/", "/health")] == [200, 200]
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization",
            "access-control-request-private-network": "true"}
    for server, letter, allowed in ((running, "a", "http://a"), (running, "b", None), (served, "a", None)):
        page = dict(origin=f"http://{letter}")
        preflight = server.client.options("/v1/completions", headers=asks | page)
        assert (preflight.status_code == 200) == bool(allowed)
        assert not allowed or preflight.headers["access-control-allow-private-network"] == "true"
        for answer in (preflight, server.client.get("/v1/models", headers=page)):  # the second request has no key
            assert answer.headers.get("access-control-allow-origin") == allowed
    other_site = dict(host="evil.example", origin="http://evil.example")
    assert get("/v1/models", "k\u00e9y", **other_site).status_code == 200  # it has the key
    running.stop()


HOSTS = "[::1]:8000 host.docker.internal:8 App.localhost a.b.localhost Box.local"
OTHER_HOSTS = """[::1 localhost.evil.example 1.evil.example other.local a.box.local box.example x-localhost .localhost
    a.localhost.x a.host.docker.internal host.docker.internal.x hostxdocker.internal"""
EVIL = "http://evil.example"
PAGES = {  # status: headers
    200: [{}, {"content-type": "Application/JSON; charset=utf-8"}, *(dict(host=host) for host in HOSTS.split()),
          dict(host="localhost:80", origin="http://localhost:80"), dict(origin="http://a"),
          dict(host="Clover.example:8443", origin="https://clover.example"),  # a proxy, with its own name
          dict(host="10.0.0.5:8000", origin="https://clover.example:8443")],
    415: [{"content-type": kind} for kind in ("text/plain", "", "application/json-seq")],
    403: [*(dict(origin=origin) for origin in (EVIL, "null", "http://localhost:3000")),
          dict(host="evil.example:8000", origin=f"{EVIL}:8000"), *(dict(host=host) for host in OTHER_HOSTS.split())]}


@pytest.mark.parametrize("status, headers", [(status, headers) for status in PAGES for headers in PAGES[status]])
def test_pages_of_other_sites_reach_no_server_without_a_key(served, monkeypatch, status, headers):
    """Bug: a page in the user's browser asks by DNS rebinding or as text; a client is refused."""
    monkeypatch.setattr(serve.socket, "gethostname", lambda: "Box.example")
    monkeypatch.setattr(served.args, "allow_host", ["clover.example"])
    monkeypatch.setattr(served.args, "allow_origin", ["http://a"])
    headers = {"content-type": "application/json"} | headers
    answer = served.client.post("/v1/completions", content=json.dumps(ask()), headers=headers)
    assert answer.status_code == status, answer.text
    reads = 200 if status == 415 else status
    assert [served.client.get(path, headers=headers).status_code for path in ("/", "/v1/models", "/metrics", "/health")
            ] == [reads, reads, reads, 200]


def test_a_slash_at_the_end_of_a_path_changes_nothing(served):
    """Bug: 404 for a model named '', or for a base URL without /v1; a redirect that clients do not follow."""
    for path in ("/v1/models", "/health", "/"):
        assert served.client.get(path + "/").text == served.client.get(path).raise_for_status().text
        assert served.client.get(path.removeprefix("/v1")).text == served.client.get(path).text
    (model,) = served.client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("toy", 128)
    for path in ("/v1/completions/", "/completions"):
        assert served.post(ask(), path).json()["choices"] == served.post(ask()).json()["choices"]
    assert served.post(say(SAID)[1], "/chat/completions").json()["object"] == "chat.completion"


def test_a_full_queue_sends_retry_after(served):
    """Bug: requests pile up, or a place in the queue is never freed."""
    with ThreadPoolExecutor(8) as pool:
        with served.paused():
            asked = [pool.submit(served.post, ask(temperature=1, seed=seed)) for seed in range(8)]
            until(lambda: served.app.active == 8)
            refused = served.post(ask())
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        texts = [answer.result().json()["choices"][0]["text"] for answer in asked]
    assert texts == [served.want(ask(temperature=1, seed=seed))[0][0] for seed in range(8)]


def parsed(text):
    """{sample's name and labels: value} of the Prometheus text format."""
    values = {}
    for family, lines in re.findall(r"# TYPE ([a-z_:]+) \w+\n((?:[^#].*\n)*)", text):
        found = re.findall(rf'({family}(?:_sum|_count|_bucket)?\{{(?:[a-z_]+="(?:[^"\\]|\\.)*",?)+\}}) (\S+)\n', lines)
        values |= {name: float(value) for name, value in found}
    assert len(values) == sum(not line.startswith("#") for line in text.splitlines())  # none twice or of no family
    return values


def test_metrics_have_vllms_names(served):
    """Bug: a sample outside its family, an unescaped label, plain steps counted as drafts, buckets not cumulative."""
    read = lambda: Counter(parsed(served.client.get("/metrics").text))
    before = read()
    said = [served.post(ask(prompt="abcabcabc", max_tokens=40, **draft)).json() for draft in ({}, dict(draft="none"))]
    new = read() - before
    count = lambda name: new[f'vllm:{name}{{model_name="toy"}}']
    steps, accepted = said[0]["speculation"]["steps"], sum(said[0]["speculation"]["guessed"].values())
    assert count("generation_tokens_total") == 80 and accepted > 0
    assert count("spec_decode_num_drafts_total") == steps and count("spec_decode_num_draft_tokens_total") == 6 * steps
    by_position = [new[f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}",model_name="toy"}}']
                   for i in range(6)]
    assert count("spec_decode_num_accepted_tokens_total") == sum(by_position) == accepted
    assert steps >= by_position[0] and by_position == sorted(by_position, reverse=True)
    assert count("time_to_first_token_seconds_count") == 2 and count("time_to_first_token_seconds_sum") > 0
    assert new['vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="toy"}'] == 2

    metrics = Metrics()
    for seconds in (0.001, 0.0011, 3000):
        metrics.first_token(seconds)
    said = parsed(metrics.text('a"b\\c\nd', 3, 4))
    name = r'model_name="a\"b\\c\nd"'
    bucket = lambda bound: said[f'vllm:time_to_first_token_seconds_bucket{{le="{bound}",{name}}}']
    assert [bucket(bound) for bound in (0.001, 0.005, 2560.0, "+Inf")] == [1, 2, 2, 3]
    assert [said[f"vllm:num_requests_{state}{{{name}}}"] for state in ("running", "waiting")] == [3, 4]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_its_slot(served, stream):
    """Bug: sequences of a lost client keep running or waiting."""
    body = json.dumps(ask(max_tokens=100, stream=stream, n=7)).encode()
    with served.paused():
        with socket.create_connection(served.address) as client:
            client.sendall(START + b"content-length: %d\r\n\r\n" % len(body) + body)
            until(lambda: served.worker.calls.qsize())
            served.worker.calls.get()()  # adds the job
            served.worker.step()
            sequences = list(served.worker.jobs)
            assert (len(served.engine.running), len(served.engine.waiting)) == (3, 4)
        until(lambda: served.app.active == 0)
    until(served.idle)
    assert all(sequence.ended == "cancelled" and len(sequence.tokens) <= 7 for sequence in sequences)


@pytest.mark.parametrize("error, says", [(KeyError("bug"), "KeyError in a step"),
                                         (torch.OutOfMemoryError("full"), "out of memory (full)")])
def test_an_error_in_a_step_fails_only_its_requests(served, monkeypatch, error, says):
    """Bug: the server dies or hangs, waiting requests are lost, or later outputs are wrong."""
    step, errors = served.engine.step, [error]

    def fail(with_trees):
        if errors and served.engine.running and next(iter(served.worker.jobs)).tokens:
            raise errors.pop()
        return step(with_trees)
    with ThreadPoolExecutor(5) as pool:
        with served.paused():
            monkeypatch.setattr(served.engine, "step", fail)
            running = [pool.submit(served.post, ask(max_tokens=90, stream=i == 2)) for i in range(3)]
            until(lambda: served.worker.calls.qsize() == 3)
            waiting = pool.submit(served.post, ask(n=2))
            until(lambda: served.worker.calls.qsize() == 4)
        answers = [future.result() for future in running]
        assert [choice["text"] for choice in waiting.result().json()["choices"]] == served.want(ask(n=2))[0]
    assert sorted(answer.status_code for answer in answers) == [200, 500, 500]
    for answer in answers:
        said = json.loads(answer.text.split("data: ")[-2] if answer.status_code == 200 else answer.text)["error"]
        assert says in said["message"] and said["type"] == "server_error"


def test_sigterm_lets_requests_end_and_a_second_one_does_not():
    """Bug: a restart cuts off running requests, or the server cannot be stopped."""
    command = [sys.executable, "-m", "tools.serve", "--device", "cpu", "--threads", "1", "--port", "0"]
    start = lambda: subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    body = dict(prompt="def f(", max_tokens=80, temperature=0.7, n=8, stream=True)
    for process, code in ((start(), 0), (start(), 143)):
        address = next(line.split()[-1] for line in process.stderr if "http://" in line)
        with process, httpx.stream("POST", address + "/v1/completions", json=body, timeout=60) as answer:
            first = next(lines := answer.iter_lines())
            process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.TransportError):  # no new requests
                while True:
                    httpx.get(address + "/health")
            if code:
                process.send_signal(signal.SIGTERM)
            else:
                texts, reasons = joined(events([first, *lines]))
                assert len(texts) == 8 and None not in reasons
            assert process.wait(60) == code


def test_startup_errors_are_one_line(monkeypatch, capsys):
    """Bug: a traceback, or an error only after loading the model."""
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit, match="2"):
        serve.main(parse_serve(["--port", str(taken.getsockname()[1])]))
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "cannot listen on 127.0.0.1" in said
    monkeypatch.setattr("tools.flags.find_spec", lambda name: name != "uvicorn")
    with pytest.raises(SystemExit, match="2"):
        parse_serve([])
    assert "pip install starlette uvicorn" in capsys.readouterr().err.splitlines()[-1]
