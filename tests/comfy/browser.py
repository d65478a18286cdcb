"""A headless Chromium with one page, driven through its DevTools protocol. It needs Chromium alone."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from comfy_websocket import WebSocket

#: Names of the program, the first that there is; CHROMIUM is a path to another one.
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
#: Minutes: other processes may want the machine.
PATIENCE = 120
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-extensions", "--remote-debugging-port=0", "--mute-audio", "--disable-quic"),
)


def program() -> str | None:
    """Return the path of a Chromium, None where there is none."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, PROGRAMS)), None)


class PageError(AssertionError):
    """The page threw, or was not as it was waited for."""


class Page:
    """The one page of a browser of its own; ``errors`` are what its console called errors."""

    def __init__(self, size: tuple[int, int] = (1400, 900)):
        chromium = program()
        if chromium is None:
            raise PageError("there is no Chromium")
        self._folder = tempfile.mkdtemp(prefix="pdit-chromium-")
        own = (f"--user-data-dir={self._folder}", f"--window-size={size[0]},{size[1]}")
        self._process = subprocess.Popen(
            [chromium, *FLAGS, *own, "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.errors: list[str] = []
        self._answers: dict[int, dict] = {}
        self._count = 0
        self._socket = self._connected()
        for domain in ("Page", "Runtime", "Log"):
            self.command(f"{domain}.enable")
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", **metrics)

    def _connected(self) -> WebSocket:
        """Connect to the page, once the browser has written where it listens."""
        told = Path(self._folder) / "DevToolsActivePort"
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if told.exists() and (lines := told.read_text().split()):
                port = int(lines[0])
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=PATIENCE) as answer:
                    pages = [each for each in json.loads(answer.read()) if each["type"] == "page"]
                if pages:
                    return WebSocket("127.0.0.1", port, urlsplit(pages[0]["webSocketDebuggerUrl"]).path)
            time.sleep(0.1)
        raise PageError("Chromium does not listen")

    def close(self):
        """End the browser and remove its profile."""
        self._socket.close()
        self._process.terminate()
        self._process.wait(30)
        shutil.rmtree(self._folder, ignore_errors=True)

    def command(self, method: str, **parameters) -> dict:
        """Return the result of a DevTools command."""
        self._count += 1
        self._socket.send(json.dumps({"id": self._count, "method": method, "params": parameters}))
        deadline = time.monotonic() + PATIENCE
        while self._count not in self._answers:
            if time.monotonic() > deadline:
                raise PageError(f"Chromium does not answer {method}")
            self._receive(1.0)
        answer = self._answers.pop(self._count)
        if "error" in answer:
            raise PageError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _receive(self, seconds: float):
        frame = self._socket.receive(seconds)
        if frame is None:
            return
        message = json.loads(frame[1])
        if "id" in message:
            self._answers[message["id"]] = message
        elif message["method"] == "Runtime.exceptionThrown":
            details = message["params"]["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif message["method"] == "Page.javascriptDialogOpening":  # nobody is there to answer
            self._socket.send(
                json.dumps({"id": 0, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}})
            )

    def open(self, url: str):
        """Go to ``url`` and wait until its document is there."""
        self.command("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def evaluate(self, script: str):
        """Return the JSON value of an expression, awaited. Raises PageError where it throws."""
        asked = {"expression": script, "awaitPromise": True, "returnByValue": True}
        answer = self.command("Runtime.evaluate", **asked)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise PageError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def call(self, function: str, *arguments):
        """Return what a JavaScript function makes of JSON arguments."""
        return self.evaluate(f"({function})(...{json.dumps(arguments)})")

    def wait(self, script: str, seconds: float = PATIENCE):
        """Return the first value of an expression that is true; PageError after ``seconds``."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                found = self.evaluate(script)
            except PageError as error:  # the document changes just now
                found, why = None, str(error)
            else:
                why = ""
            if found:
                return found
            if time.monotonic() > deadline:
                raise PageError(f"after {seconds:.0f} s still not: {script} {why}")
            time.sleep(0.1)

    def becomes(self, script: str, seconds: float) -> bool:
        """Return whether an expression becomes true in so many seconds."""
        try:
            return bool(self.wait(script, seconds))
        except PageError:
            return False

    def click(self, selector: str, text: str = ""):
        """Click the middle of the first visible element of a selector, with ``text`` and no other where that
        is given; scroll to it first."""
        x, y = self.wait(f"({_MIDDLE})({json.dumps(selector)}, {json.dumps(text)})", 60)
        self.click_at(x, y)

    def click_at(self, x: float, y: float, count: int = 1):
        """Click, or double-click, at a place of the page."""
        self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for number in range(1, count + 1):
            for kind in ("mousePressed", "mouseReleased"):
                button = {"button": "left", "clickCount": number}
                self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def drag(self, start: tuple[float, float], end: tuple[float, float]):
        """Press at ``start``, move to ``end`` in a few moves, and release there."""
        button = {"button": "left", "buttons": 1, "clickCount": 1}
        self.command("Input.dispatchMouseEvent", type="mouseMoved", x=start[0], y=start[1])
        self.command("Input.dispatchMouseEvent", type="mousePressed", x=start[0], y=start[1], **button)
        for part in (0.1, 0.4, 0.7, 1.0, 1.0):
            x, y = (a + (b - a) * part for a, b in zip(start, end))
            self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, button="left", buttons=1)
            time.sleep(0.05)
        self.command("Input.dispatchMouseEvent", type="mouseReleased", x=end[0], y=end[1], **button)

    def type(self, text: str):
        """Write a text where the caret is."""
        self.command("Input.insertText", text=text)

    def press(self, key: str, code: int, modifiers: int = 0):
        """Press a key; ``modifiers``: 2 is Control."""
        for kind in ("keyDown", "keyUp"):
            values = {"key": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
            self.command("Input.dispatchKeyEvent", type=kind, **values)

    def screenshot(self, path: Path, quality: int = 80):
        """Write what the page shows as a JPEG, or PNG, by the name of ``path``."""
        kind = {"format": "png"} if path.suffix == ".png" else {"format": "jpeg", "quality": quality}
        path.write_bytes(base64.b64decode(self.command("Page.captureScreenshot", **kind)["data"]))


_MIDDLE = """(selector, text) => {
  for (const found of document.querySelectorAll(selector)) {
    if (text && found.textContent.trim() !== text) continue;
    found.scrollIntoView?.({ block: "nearest" });
    const { x, y, width, height } = found.getBoundingClientRect();
    if (width && height) return [x + width / 2, y + height / 2];
  }
}"""
