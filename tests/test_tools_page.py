"""tools/page.html in a browser: the page shows what the server sent."""

import json
import os
import shutil
import subprocess

import pytest

from test_tools_serve import Running, ask, until
from test_tools_serve import folder as model_folder  # noqa: F401

pytestmark = pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")


class Browser:
    """Headless Chromium, driven through its debugging protocol over two pipes."""

    def __init__(self, url, folder, width):
        (its_in, self.out), (self.into, its_out) = os.pipe(), os.pipe()
        flags = f"--headless --no-sandbox --disable-gpu --remote-debugging-pipe --user-data-dir={folder} about:blank"
        self.process = subprocess.Popen(["bash", "-c", f"exec chromium {flags} 3<&{its_in} 4>&{its_out}"],
                                        pass_fds=(its_in, its_out), stderr=subprocess.DEVNULL)
        os.close(its_in)
        os.close(its_out)
        self.session, self.number, self.messages = {}, 0, open(self.into, "rb")
        page = self("Target.createTarget", url="about:blank")["targetId"]
        self.session = dict(sessionId=self("Target.attachToTarget", targetId=page, flatten=True)["sessionId"])
        self("Emulation.setDeviceMetricsOverride", width=width, height=700, deviceScaleFactor=1, mobile=False)
        self("Page.navigate", url=url)

    def __call__(self, method, **params):
        self.number += 1
        call = dict(id=self.number, method=method, params=params) | self.session
        os.write(self.out, json.dumps(call).encode() + b"\0")
        while True:
            message = b""
            while not message.endswith(b"\0"):
                message += self.messages.read(1)
            value = json.loads(message[:-1])
            if value.get("id") == self.number:
                return value["result"]

    def __getitem__(self, script):
        return self("Runtime.evaluate", expression=script)["result"].get("value")

    def type(self, text):
        self("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            self("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")

    def close(self):
        self.process.terminate()
        self.process.wait()


@pytest.fixture
def show(tmp_path):
    """A function that opens a server's page. Both are closed at the end."""
    opened = []

    def show(served, path="/", width=1000):
        browser = Browser(served.url + path, tmp_path, width)
        opened.extend((browser.close, served.stop))
        until(lambda: browser["document.getElementById('name').textContent"] == "toy")
        browser["texts = (where) => [...document.querySelectorAll(where)].map(node => node.textContent)"]
        return browser
    yield show
    for close in opened:
        close()


@pytest.mark.parametrize("width", [1000, 400])
def test_a_chat_beside_plain_decoding(model_folder, show, width):  # noqa: F811
    """Bug: output parsed as HTML, a wrong tree, a comparison with another seed, a page wider than the screen."""
    served = Running(model_folder, "--draft", "heads+lookup", "--tree-size", "7")
    browser = show(served, width=width)
    compared = lambda: browser["control === null && texts('#chat').join().split('identical output').length - 1"]
    browser["document.getElementById('max_tokens').value = 40"]
    browser.type("<b>ab</b>")
    until(lambda: compared() == 1)
    text = served.want(ask(messages=[dict(role="user", content="<b>ab</b>")], max_tokens=40), chat=True)[0][0]
    assert browser["texts('.user, .answer').join('')"] == "<b>ab</b>" + text
    assert browser["texts('main b').length"] == 0
    figures = lambda: [*map(float, browser["texts('#clover td, #plain td').map(parseFloat).join()"].split(","))]
    per_step, _, _, plain, *_ = figures()
    assert per_step > plain == 1
    browser["document.getElementById('temperature').value = 1"]
    browser.type("cd")
    until(lambda: compared() == 2)
    assert browser["""[...document.querySelectorAll('.token')].every(token => {
        token.click()
        const accepted = texts('#tree .accepted:not(.root, .model)').length
        return texts('#tree .node').length >= 7 && texts('.shown:not(.model)').length <= accepted
            && token.classList.contains('shown')})"""]
    assert browser["texts('.answer .token:not(.model)').length"] > 0
    browser["""score('clover', [{tokens: ['a'], seconds: 0}, {tokens: ['b', 'c'], seconds: 1e-4}])
        score('plain', [{tokens: 'a', tree_size: 1, seconds: 0}, {tokens: 'b', tree_size: 1, seconds: 2e-4}])"""]
    assert figures() == [1.5, 20000, 4, 1, 5000, 1]  # without prefill and the first step
    assert browser["document.documentElement.scrollWidth"] <= width


MARKDOWN = [["# A", " **b", "**\n"], ["``", "`py\n**x", "** `y`\n```\n"], ["- a `*c*` 2 * 3 *", "d*\n", "\n", "__e__"]]


def test_a_page_below_a_path(model_folder, show):  # noqa: F811
    """Bug: a page that a proxy serves below a path asks the proxy's root; Stop while nothing runs, no new chat,
    Markdown as its source, an answer that is another text than the model's."""
    served = Running(model_folder, "--tree-size", "7")
    until(lambda: served.server.started)
    inner = served.server.config.loaded_app

    async def proxy(scope, *rest):
        path = scope["path"].removeprefix("/clover")
        await inner(scope | dict(path=path if path != scope["path"] else "/none"), *rest)
    served.server.config.loaded_app = proxy
    browser = show(served, "/clover/")
    assert browser["$('stop').hidden && texts('.example').length == 3"]
    browser["$('max_tokens').value = 20; document.querySelector('.example').click()"]
    until(lambda: browser["control === null && messages.length == 2"])
    assert browser["messages[0].content == EXAMPLES[true][0] && !document.querySelector('.example')"]
    with served.paused():
        browser["submit('a')"]
        until(lambda: browser["!$('stop').hidden"])
        browser["$('new').click()"]
        until(lambda: browser["$('stop').hidden && !messages.length && texts('.example').length == 3"])
    browser[f"""steps = {json.dumps(MARKDOWN)}.map(tokens => ({{tokens, nodes: ["a"], parents: [-1], path: [0],
        guessed_by: tokens.map(() => "lookup"), drafted_by: ["root"], probabilities: [1]}}))
        place = add($("chat"), "div", "answer")
        write = writer(place)
        steps.forEach(step => write(step, steps))"""]
    assert browser["place.textContent"] == "".join(sum(MARKDOWN, []))
    lines = [line for line in browser["place.innerText"].split("\n") if line]
    assert lines == ["A b", "**x** `y`", "- a *c* 2 * 3 d", "__e__"]
    styled = "texts('.answer:last-child {}').join('|')".format
    assert [browser[styled(name)] for name in ("div.heading", "div.code", "div.item", "span.strong", "span.code",
                                               "span.em")] == [
        "# A **b**\n", "**x** `y`\n", "- a `*c*` 2 * 3 *d*\n", "b", "*c*", "d"]
    browser["steps[1].pieces[0].nodes[0].click()"]
    assert browser["texts('.shown').join('')"] == "".join(MARKDOWN[1])


def test_calls_are_shown_and_answered(tmp_path_factory, show):
    """Bug: a call that is lost in its tokens, or a result that the model does not get."""
    pytest.importorskip("llguidance", reason="pip install llguidance")
    from test_tools_calls import TOOLS, serve_agent
    served = serve_agent(tmp_path_factory.mktemp("agent"), "--temperature", "2", "--seed", "1")
    browser = show(served)
    element = "document.getElementById('{}')".format
    browser[f"{element('race')}.checked = false; {element('tools')}.value = {json.dumps(json.dumps(TOOLS))}"]
    for seed in range(20):
        browser[f"messages.length = 0; {element('max_tokens')}.value = 400; {element('seed')}.value = {seed}"]
        browser.type("ab")
        until(lambda: browser["control === null && messages.length == 2"])
        if calls := browser["waiting().length"]:
            break
    assert calls and browser[f"{element('chat')}.textContent"].count("write its result") == calls
    for _ in range(calls):
        browser.type("5")
    until(lambda: browser["control === null && !waiting().length || messages.at(-1).tool_calls != null"])
    said = json.loads(browser["JSON.stringify(messages)"])
    number = next(n for n, message in enumerate(said) if message.get("tool_calls"))
    assert [(one["role"], one["content"]) for one in said[number + 1:number + 1 + calls]] == [("tool", "5")] * calls
    assert "<tool_call>" not in said[number]["content"]
