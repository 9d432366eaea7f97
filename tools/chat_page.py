"""The server's page in headless Chromium: what its test drives it with, and a picture of it for the documentation.

    offload-runtime serve --target ./model.gguf --port 8000 &
    python tools/chat_page.py --message "Why is the sky blue?" --out docs/page.png

Sends the messages one after the other, waits for each answer, and writes what the window shows then. Needs Debian's
`chromium`, which is told what to do in the DevTools protocol.
"""

from __future__ import annotations

import argparse
import base64
import json
import socket
import subprocess
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

BROWSER = "chromium"
_ANSWER_S = 300.0
_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")
_KEYS = {"Enter": 13, "Escape": 27, "Tab": 9}


class Tab(AbstractContextManager["Tab"]):
    """A tab of a browser of its own, which ends with it.

    Args:
        url: The page that it opens.
        wait_s: How long the browser and the page may take for anything before that is an error.

    Attributes:
        problems: What the console has shown as warnings and errors, breaches of the Content-Security-Policy included.

    Raises:
        TimeoutError: From every call that the browser does not answer in time.
    """

    def __init__(self, url: str, *, wait_s: float = 30.0) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(wait_s)
        self._wait_s, self._received, self._calls, self._session = wait_s, b"", 0, None
        self.problems: list[str] = []
        # Chromium reads at descriptor 3 and writes at 4.
        start = f'exec {BROWSER} "$@" 3<&{theirs.fileno()} 4>&{theirs.fileno()}'
        options = [*_OPTIONS, f"--user-data-dir={self._profile.name}"]
        self._process = subprocess.Popen(
            ["bash", "-c", start, BROWSER, *options], pass_fds=[theirs.fileno()], stderr=subprocess.DEVNULL
        )
        theirs.close()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")
        failure = self.call("Page.navigate", url=url).get("errorText")
        if failure:
            raise ConnectionError(f"{url} cannot be opened: {failure}")
        self.wait_for("document.readyState === 'complete'")

    def __exit__(self, *_: object) -> None:
        self._socket.close()  # without it the browser ends
        self._process.wait(self._wait_s)
        self._profile.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """What a method of the protocol gives."""
        self._calls += 1
        session = {} if self._session is None else {"sessionId": self._session}
        self._socket.sendall(
            json.dumps({"id": self._calls, "method": method, "params": params, **session}).encode() + b"\0"
        )
        while True:
            message = self._receive()
            if message.get("id") == self._calls:
                assert "error" not in message, f"{method}: {message['error']['message']}"
                return message["result"]
            self._note(message.get("method"), message.get("params", {}))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            received = self._socket.recv(1 << 20)
            assert received, f"{BROWSER} has ended"
            self._received += received
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def _note(self, event: str | None, params: dict[str, Any]) -> None:
        """Keep what the console shows of it."""
        if event == "Runtime.exceptionThrown":
            self.problems.append(params["exceptionDetails"]["exception"]["description"])
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str([argument.get("value") for argument in params["args"]]))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{script}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def wait_for(self, script: str, *, wait_s: float | None = None) -> None:
        """Wait until an expression is true."""
        wait_s = wait_s or self._wait_s
        deadline_s = time.monotonic() + wait_s
        while not self.evaluate(f"Boolean({script})"):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not within {wait_s} s: {script}")
            time.sleep(0.02)

    def type(self, text: str) -> None:
        """Put a text where the keyboard writes."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key and let go of it."""
        about = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key], "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", text="\r" if key == "Enter" else "", **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def click(self, selector: str) -> None:
        """Click in the middle of an element."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.evaluate(f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({box})")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def resize(self, width: int, height: int, *, is_dark: bool = False) -> None:
        """Give the window a size in pixels, and what the user prefers of light and dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self) -> bytes:
        """What the window shows, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


def ask(tab: Tab, message: str) -> None:
    """Send a message and wait until the answer to it has ended."""
    tab.type(message)
    tab.press("Enter")
    tab.wait_for("document.querySelector('#stop').disabled", wait_s=_ANSWER_S)


def main() -> None:
    """Draw the page after an answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/", help="where the server is reached")
    parser.add_argument("--message", action="append", required=True, help="may be repeated")
    parser.add_argument("--size", type=int, nargs=2, default=(900, 760), metavar=("WIDTH", "HEIGHT"), help="pixels")
    parser.add_argument("--dark", action="store_true", help="as for those who prefer dark pages")
    parser.add_argument("--out", type=Path, required=True, help="PNG file")
    options = parser.parse_args()
    with Tab(options.url) as tab:
        tab.resize(*options.size, is_dark=options.dark)
        tab.wait_for("document.title !== 'offload-runtime'")  # the name of the model
        tab.evaluate("document.querySelector('#seed').value = 1")
        for message in options.message:
            ask(tab, message)
        options.out.write_bytes(tab.picture())


if __name__ == "__main__":
    main()
