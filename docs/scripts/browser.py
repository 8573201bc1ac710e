"""Drive Debian's chromium without a window, over a pipe, with nothing but the standard library.

    with Browser() as browser, browser.open("http://127.0.0.1:8000/index.html") as page:
        page.screenshot(Path("index.png"))
        print(page.problems)

Messages are those of the Chrome DevTools Protocol: JSON objects that end with a null byte.
"""

import base64
import itertools
import json
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

NAME = "chromium"
TALLEST = 16000  # pixels of a screenshot; chromium draws no more without a GPU
LOOPBACK = ("127.0.0.1", "localhost", None)
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio",
)  # fmt: skip


class BrowserError(Exception):
    """The browser could not be started, or did not do what it was asked to."""


class Window(NamedTuple):
    """How a reader looks at a page."""

    name: str
    width: int = 1280
    height: int = 900
    scheme: str = "light"
    scale: float = 1


WIDE = Window("wide")


def installed() -> str | None:
    """The path of the browser, or None."""
    return shutil.which(NAME)


class Browser:
    """A running chromium with a profile of its own; a context manager."""

    def __init__(self) -> None:
        executable = installed()
        if executable is None:
            raise BrowserError(f"{NAME} is not installed: apt install {NAME}")
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        # The protocol uses the file descriptors 3 and 4.
        command = ["sh", "-c", 'exec "$@" 3<&0 4>&1 0</dev/null 1>/dev/null', "sh", executable, *OPTIONS]
        self.process = subprocess.Popen(
            [*command, f"--user-data-dir={self.profile.name}", "about:blank"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self.numbers = itertools.count(1)
        self.received = b""
        self.pages: dict[str, Page] = {}

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()  # type: ignore[union-attr]
        self.profile.cleanup()

    def call(self, method: str, session: str | None = None, seconds: float = 60, **parameters: Any) -> dict:
        """The result of one command of the protocol."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        self.process.stdin.write(json.dumps(message).encode() + b"\0")  # type: ignore[union-attr]
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            answer = self.receive(deadline - time.monotonic())
            if answer is not None and answer.get("id") == number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                return answer["result"]
        raise BrowserError(f"{method}: no answer within {seconds:g} s")

    def receive(self, seconds: float) -> dict | None:
        """The next message, if one arrives in time; events are also given to their page."""
        pipe = self.process.stdout
        while b"\0" not in self.received:
            if not select.select([pipe], [], [], max(seconds, 0))[0]:
                return None
            more = pipe.read(1 << 20)  # type: ignore[union-attr]
            if not more:
                raise BrowserError(f"{NAME} ended, exit code {self.process.wait()}")
            self.received += more
        first, _, self.received = self.received.partition(b"\0")
        message = json.loads(first)
        page = self.pages.get(message.get("sessionId"))
        if page is not None and "method" in message:
            page.handle(message["method"], message["params"])
        return message

    @contextmanager
    def open(self, url: str, window: Window = WIDE) -> Iterator["Page"]:
        """Open a page, without anything that earlier pages stored, and wait until it has been loaded."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self.pages[session] = Page(self, session)
        try:
            page.load(url, window)
            yield page
        finally:
            del self.pages[session]
            self.call("Target.disposeBrowserContext", browserContextId=context)


class Page:
    """An open page; `problems` has one line for each error that it reported."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self.session = browser, session
        self.problems: list[str] = []
        self.addresses: dict[str, str] = {}  # of the requests under way

    def call(self, method: str, **parameters: Any) -> dict:
        return self.browser.call(method, self.session, **parameters)

    def load(self, url: str, window: Window) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=window.width, height=window.height, deviceScaleFactor=window.scale, mobile=window.width < 600,
        )  # fmt: skip
        self.call(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": window.scheme}]
        )
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def handle(self, event: str, values: dict) -> None:
        """Note an error that the page, or a request of it, reports."""
        if event == "Runtime.exceptionThrown":
            details = values["exceptionDetails"]
            text = details.get("exception", {}).get("description") or details["text"]
            self.problems.append(f"console: {text.splitlines()[0]}")
        elif event == "Runtime.consoleAPICalled" and values["type"] in ("error", "assert"):
            words = [str(a.get("value", a.get("description", ""))) for a in values["args"]]
            self.problems.append(f"console: {' '.join(words)}")
        elif event == "Log.entryAdded" and values["entry"]["level"] == "error":
            entry = values["entry"]
            if entry["source"] != "network":  # reported below
                self.problems.append(f"console: {entry['text']}")
        elif event == "Network.requestWillBeSent":
            url = self.addresses[values["requestId"]] = values["request"]["url"]
            parts = urlsplit(url)
            if parts.scheme in ("http", "https", "ws", "wss") and parts.hostname not in LOOPBACK:
                self.problems.append(f"loads {url} from a network")
        elif event == "Network.responseReceived" and values["response"]["status"] >= 400:
            self.problems.append(f"{values['response']['url']}: status {values['response']['status']}")
        elif event == "Network.loadingFailed" and not values.get("canceled"):
            url = self.addresses.get(values["requestId"], "a request")
            self.problems.append(f"{url}: {values['errorText']}")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, which may be a promise."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise BrowserError(f"{expression}: {done['exceptionDetails']['exception'].get('description')}")
        return done["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 30) -> Any:
        """The value of an expression, as soon as it is true."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            value = self.evaluate(expression)
            if value:
                return value
            self.browser.receive(0.1)
        raise BrowserError(f"not true within {seconds:g} s: {expression}")

    def click(self, expression: str) -> None:
        """Click in the middle of the element that an expression gives."""
        x, y = self.evaluate(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect();"
            f" return [r.x + r.width / 2, r.y + r.height / 2]; }})({expression})"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, code: int) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def upload(self, expression: str, file: Path) -> None:
        """Choose a file in the input element that an expression gives."""
        element = self.call("Runtime.evaluate", expression=expression)["result"]["objectId"]
        self.call("DOM.setFileInputFiles", files=[str(file.resolve())], objectId=element)

    def screenshot(self, file: Path) -> None:
        """The whole page, from its top to its end, as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], TALLEST), "scale": 1}
        shot = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))
