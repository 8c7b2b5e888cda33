"""A real Chromium without a window, driven through its DevTools protocol.

Owns the process, its profile folder and the connection to it.  Knows nothing about the page it shows.
"""

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from tests.lab.server import REPOSITORY
from tests.lab.waiting import until

DEFAULT_BROWSER = REPOSITORY / ".lab" / "chromium" / "chromium"
START_TIMEOUT_SECONDS = 300.0
WAIT_SECONDS = 300.0
POLL_SECONDS = 0.05
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
    "--disable-dev-shm-usage",  # containers have little of it, and tests use it
    *("--disable-sync", "--disable-default-apps", "--hide-scrollbars", "--mute-audio"),
    "--disable-features=Translate,OptimizationHints,MediaRouter,DialMediaRouteProvider",
)
_KEYS = {"Tab": 9, "Enter": 13, "Space": 32, "Escape": 27}


class BrowserError(Exception):
    """Chromium is missing, did not start, or a script in its page failed."""


def find_browser() -> Path:
    """Return the Chromium to test with: CHROMIUM_BIN, PATH, or the fetched one."""
    chosen = os.environ.get("CHROMIUM_BIN") or shutil.which("chromium")
    binary = Path(chosen) if chosen else DEFAULT_BROWSER
    if not os.access(binary, os.X_OK):
        raise BrowserError(
            f"no chromium at {binary}: run tests/lab/fetch_chromium.sh, or `make chromium`"
        )
    return binary


class Page:
    """One tab: what it is told, and what it has complained of and asked for since it was opened."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.complaints: list[str] = []
        self.requested: list[str] = []
        self._loaded: set[str] = set()

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command of the protocol and return its result."""
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(WAIT_SECONDS):
            answer = await self._answers[number]
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    async def listen(self) -> None:
        """Take what the browser sends until it closes the connection."""
        async for message in self._socket:
            content = json.loads(message.data)
            if waiting := self._answers.pop(content.get("id", 0), None):
                waiting.set_result(content)
            elif "method" in content:
                self._note(content["method"], content["params"])

    def _note(self, method: str, event: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(event["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if event["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(event["args"]))
            case "Log.entryAdded" if event["entry"]["level"] in ("error", "warning"):
                self.complaints.append(json.dumps(event["entry"]))
            case "Page.lifecycleEvent" if event["name"] == "load":
                self._loaded.add(event["loaderId"])
            case "Network.requestWillBeSent":
                self.requested.append(event["request"]["url"])

    async def goto(self, url: str) -> None:
        """Open a page and wait until all that its HTML names is loaded."""
        opened = await self.send("Page.navigate", url=url)
        # The page before goes on for a moment, and may be the same one.
        await until(lambda: opened["loaderId"] in self._loaded)

    async def run(self, script: str) -> Any:
        """Return the value of an expression in the page; a promise is awaited."""
        result = await self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if details := result.get("exceptionDetails"):
            raise BrowserError(f"{script}: {details}")
        return result["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until an expression is true in the page."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not await self.run(f"Boolean({script})"):
            if time.monotonic() > deadline:
                shown = await self.run("document.body.innerText")
                raise BrowserError(f"never true: {script}\n{shown}\n{self.complaints}")
            await asyncio.sleep(POLL_SECONDS)

    async def press(self, key: str) -> None:
        text = {"Enter": "\r", "Space": " "}.get(key, "")
        parameters = {"key": text or key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
        await self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **parameters)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **parameters)

    async def resize(self, width: int, height: int, scale: float = 1) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600},
        )

    async def prefer(self, **features: str) -> None:
        """Set media features, such as prefers_color_scheme="dark"."""
        named = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        await self.send("Emulation.setEmulatedMedia", features=named)

    async def picture(self) -> bytes:
        """Return a PNG of what is visible."""
        result = await self.send("Page.captureScreenshot", format="png")
        return base64.b64decode(result["data"])


@asynccontextmanager
async def open_page() -> AsyncIterator[Page]:
    """Start Chromium and yield an empty tab."""
    async with AsyncExitStack() as stack:
        profile = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        )
        address = await stack.enter_async_context(_started(Path(profile)))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        async with session.put(f"http://{address}/json/new?about:blank") as reply:
            url = (await reply.json(content_type=None))["webSocketDebuggerUrl"]
        socket = await stack.enter_async_context(session.ws_connect(url, max_msg_size=0))
        page = Page(socket)
        listening = asyncio.ensure_future(page.listen())
        stack.callback(listening.cancel)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await page.send(f"{domain}.enable")
        await page.send("Page.setLifecycleEventsEnabled", enabled=True)
        yield page


@asynccontextmanager
async def _started(profile: Path) -> AsyncIterator[str]:
    """Run Chromium and yield HOST:PORT of its protocol."""
    with (profile / "chromium.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            str(find_browser()),
            *(*_FLAGS, f"--user-data-dir={profile}", "about:blank"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        port = await _until_there(profile / "DevToolsActivePort", lambda: process.returncode)
        yield f"127.0.0.1:{port}"
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        # Its children may outlive it for a moment, and write into the profile that is being removed.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


async def _until_there(path: Path, exit_status: Callable[[], int | None]) -> str:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while exit_status() is None and time.monotonic() < deadline:
        if lines := _lines(path):
            return lines[0]
        await asyncio.sleep(POLL_SECONDS)
    raise BrowserError(
        "chromium did not start:\n" + "\n".join(_lines(path.with_name("chromium.log")))
    )


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
