"""A headless Chromium that tests drive over its DevTools protocol."""

import contextlib
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.request import urlopen

import psutil
from aiohttp import ClientSession

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WAIT_S = 30.0


class Browser:
    """One page of a Chromium. `problems` has its console errors and uncaught exceptions."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._number = 0

    async def __aenter__(self) -> "Browser":
        assert CHROMIUM is not None, "tests are skipped without it"
        self._folder = tempfile.TemporaryDirectory(prefix="verl-browser-")
        self._process = subprocess.Popen(
            [
                *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
                *("--remote-debugging-port=0", f"--user-data-dir={self._folder.name}"),
                *("--window-size=1280,820", "--hide-scrollbars", "about:blank"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        port = self._port()
        with urlopen(f"http://127.0.0.1:{port}/json") as answer:
            pages = [page for page in json.load(answer) if page["type"] == "page"]
        self._session = ClientSession()
        self._socket = await self._session.ws_connect(
            pages[0]["webSocketDebuggerUrl"], max_msg_size=0
        )
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        return self

    async def __aexit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()
        # Its helpers write into the profile as long as they live.
        helpers = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        for helper in helpers:
            with contextlib.suppress(psutil.NoSuchProcess):
                helper.kill()
        self._process.wait()
        psutil.wait_procs(helpers, timeout=WAIT_S)
        self._folder.cleanup()

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, and collect the events that come meanwhile."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=WAIT_S)
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    async def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression, which may be a promise."""
        answer = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def open(self, url: str) -> None:
        """Load a page."""
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        gives_up_at = time.monotonic() + WAIT_S
        while not await self.run(f"Boolean({condition})"):
            assert time.monotonic() < gives_up_at, f"never: {condition}; {self.problems}"
            await self.run("new Promise((done) => setTimeout(done, 30))")

    async def show(self, view: str, **state: Any) -> None:
        """Go to a view of the page of `verl view`."""
        values = "&".join(f"{name}={value}" for name, value in {"view": view, **state}.items())
        await self.run("delete document.getElementById('main').dataset.drawn")
        await self.run(f"location.hash = {json.dumps(values)}")
        await self.until(f"document.getElementById('main').dataset.drawn === '{view}'")

    async def press(self, key: str) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **text)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        if message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])
        if message.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.problems.append(str(params["args"]))
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def _port(self) -> int:
        file = Path(self._folder.name) / "DevToolsActivePort"
        gives_up_at = time.monotonic() + WAIT_S
        while not file.is_file() or not file.read_text().strip():
            assert self._process.poll() is None, "Chromium ended"
            assert time.monotonic() < gives_up_at, "Chromium does not start"
            time.sleep(0.05)
        return int(file.read_text().split()[0])
