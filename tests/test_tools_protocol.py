"""tools/serve.py: what a request may not ask for."""

import pytest

pytest.importorskip("httpx", reason="the tests of the server need pip install httpx")
pytest.importorskip("uvicorn", reason="the server needs pip install starlette uvicorn")

from test_tools_serve import SAID, ask, folder, served, server  # noqa: E402, F401

say = lambda *messages: ("/v1/chat/completions", dict(messages=list(messages), max_tokens=4))
BAD = {
    "broken JSON": ('{"prompt": "a"', 400, "not valid JSON"), "no UTF-8": (b'{"prompt": "\xff"}', 400, "not valid"),
    "NaN": ('{"prompt": "a", "temperature": NaN}', 400, "not valid JSON: NaN"), "a list": ([], 400, "a JSON object"),
    "control characters": ('{"prompt": "a\n"}', 400, "not valid JSON"), "depth": ("[" * 10**5, 400, "not valid JSON"),
    "a huge number": (ask(max_tokens=10**400), 400, "max_tokens must be"), "n": (ask(n=0), 400, "n must be"),
    "digits": ('{"n": %s}' % ("9" * 5000), 400, "not valid JSON"), "infinity": (ask(temperature=1e999), 400, "JSON"),
    "a negative number": (ask(temperature=-1), 400, "temperature must be a number from 0"),
    "a word": (ask(top_p="half"), 400, "top-p must be"), "true": (ask(seed=True), 400, "seed must be"),
    "choices": (ask(n=9), 400, "number of texts must be"), "logprobs": (ask(logprobs=2), 400, "not supported"),
    "stream": (ask(stream="yes"), 400, "stream must be of type bool"), "stop": (ask(stop=[""]), 400, "of them empty"),
    "stops": (ask(stop=["a"] * 99), 400, "stop may have 16"), "prompts": (ask(prompt=["a", 3]), 400, "prompt must be"),
    "no prompt": ({}, 400, "number of texts must be"), "a number to stop at": (ask(stop=3), 400, "stop must be a text"),
    "an empty prompt": (ask(prompt=""), 400, "the prompt has 0 tokens; this server takes 1 to 127"),
    "a long prompt": (ask(prompt="a " * 100), 400, "has 200 tokens"), "a book": (ask(prompt="a" * 10**6), 400, "long"),
    "a large body": (b" " * (4 * 2**20 + 1), 413, "4194304 bytes"), "a path": (("/v2", {}), 404, "Not Found"),
    "a model that is no text": (ask(model=["\ud800"]), 404, "'toy'"), "draft": (ask(draft="all"), 400, "draft must be"),
    "no messages": (say(), 400, "messages must be"), "a role": (say(dict(content="a")), 400, "messages must be"),
    "an image": (say(dict(role="user", content=[dict(type="image_url")])), 400, "messages must be"),
    "roles": (say(dict(role="dog", content="w")), 400, "toy/chat_template.jinja: cannot render messages: no dogs"),
    "10,000 messages": (say(*[SAID] * 10**4), 400, "too long"), "1,000": (say(*[SAID] * 300), 400, "tokens")}


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_are_refused_in_a_sentence(served, case):  # noqa: F811
    """Bug: a traceback, a 500, a path of this machine, a server that stands still."""
    body, status, says = BAD[case]
    path, body = body if isinstance(body, tuple) else ("/v1/completions", body)
    answer = served.post(body, path)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (status, "invalid_request_error") and says in error["message"]
    assert str(served.args.model) not in error["message"] and len(error["message"]) <= 1000
