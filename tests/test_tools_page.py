"""tools/page.html in a browser: what it shows is what the server sent."""

import json
import os
import shutil
import subprocess

import pytest

pytest.importorskip("httpx", reason="the tests of the server need pip install httpx")
pytest.importorskip("uvicorn", reason="the server needs pip install starlette uvicorn")

from test_tools_serve import Running, ask, until  # noqa: E402
from test_tools_serve import folder as model_folder  # noqa: E402, F401

pytestmark = pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")


class Browser:
    """Headless Chromium, by its debugging protocol over two pipes."""

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


@pytest.mark.parametrize("width", [1000, 400])
def test_a_chat_beside_plain_decoding(model_folder, tmp_path, width):  # noqa: F811
    """Bug: tokens without a colour, a tree that is not drawn, a page too wide, text of the model that becomes HTML."""
    served = Running(model_folder, "--draft", "heads+lookup", "--tree-size", "7")
    browser = Browser(served.url, tmp_path, width)
    try:
        until(lambda: browser["document.getElementById('name').textContent"] == "toy")
        browser["document.getElementById('race').checked = true; document.getElementById('limit').value = 40"]
        browser.type("<b>ab</b>")
        until(lambda: "times as fast" in browser["document.body.textContent"] and browser["control === null"])
        text = served.want(ask(messages=[dict(role="user", content="<b>ab</b>")], max_tokens=40), chat=True)[0][0]
        assert browser["[...document.querySelectorAll('main pre')].map(node => node.textContent).join('')"] == 3 * text
        assert "The same text" in browser["document.querySelector('main .note').textContent"]
        assert browser["document.querySelectorAll('main b').length"] == 0
        assert browser["document.querySelectorAll('main pre .model').length"] >= 40
        assert browser["document.querySelectorAll('#tree div').length"] == 1  # the plain text's
        assert browser["document.documentElement.scrollWidth"] <= width
    finally:
        browser.close()
        served.stop()
