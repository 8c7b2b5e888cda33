"""llama-server and, if wanted, the proxy before it, each as a process of its own.

Owns: their start, stop and restart in the right order, their directory and logs. Knows no requests.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from proxy.core.conditions import DegradationKind, State
from tests.lab.models import build_model
from tests.lab.server import DEFAULT_MODEL_FOLDER, REPOSITORY, LlamaServer, find_free_port

READY_SECONDS = 300.0
STOP_SECONDS = 120.0
POLL_SECONDS = 0.1
SETTLED_SECONDS = 0.3
TAIL_LINES = 20

Health = dict[str, Any]


class ProxyError(Exception):
    """The proxy died, did not become ready, or did not end."""


def proxy_environment() -> dict[str, str]:
    """Return the environment without settings of the user's own proxy."""
    return {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_PREFIX_CACHE_")}


@dataclass(frozen=True, slots=True)
class Setup:
    """How the processes are started; `launcher` is the Python module that serves, with its arguments.

    `server_core` is the only core that llama-server runs on, if it is given one.
    """

    n_slots: int = 2
    n_ctx: int = 65536
    n_threads: int = 2
    server_arguments: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ("proxy", "serve")
    proxy_options: tuple[str, ...] = ()
    server_core: int | None = None


class ProxyProcess:
    """One proxy with default settings; the same object can be started again, on the same ports."""

    def __init__(
        self, upstream: str, directory: Path, log_path: Path, setup: Setup | None = None
    ) -> None:
        self.log_path = log_path
        setup = setup or Setup()
        listen, admin = (f"127.0.0.1:{find_free_port()}" for _ in range(2))
        self.base_url, self._admin_url = f"http://{listen}", f"http://{admin}"
        self._command = [sys.executable, "-m", *setup.launcher, "--upstream", upstream]
        self._command += ["--slot-save-path", str(directory), "--listen", listen]
        self._command += ["--admin", admin, *setup.proxy_options]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, away from the terminal's Ctrl-C."""
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=REPOSITORY,
                env=proxy_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ProxyError("the proxy is not started")
        return self._process.pid

    def stop(self) -> None:
        """End the process with SIGTERM, so that it saves first."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise ProxyError("the proxy does not end") from None
        self._process = None

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    async def ready(self) -> None:
        """Wait until the proxy caches, or knows that nothing can be restored."""
        await self._wait_until("caching", _is_ready)

    async def reachable(self) -> None:
        """Wait until the proxy answers, whatever is behind it."""
        await self._wait_until("reachable", lambda _: True)

    async def settled(self) -> None:
        """Wait until no slot is leased, not even for a save."""
        for _ in range(2):
            await self._wait_until("idle", _is_idle)
            await asyncio.sleep(SETTLED_SECONDS)

    async def leased_at_most(self, n_slots: int) -> None:
        """Wait until no more slots than that are leased."""
        await self._wait_until("less busy", lambda health: n_leased(health) <= n_slots)

    async def metrics(self) -> str:
        """Return what GET /metrics says."""
        async with aiohttp.ClientSession() as client:
            async with client.get(self._admin_url + "/metrics") as reply:
                return await reply.text()

    async def _wait_until(self, state: str, holds: Callable[[Health], bool]) -> None:
        health = None
        try:
            async with asyncio.timeout(READY_SECONDS):
                while (health := await self._health()) is None or not holds(health):  # noqa: ASYNC110
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise ProxyError(f"the proxy is not {state}: {health}") from None

    async def _health(self) -> Health | None:
        if self._process is None or self._process.poll() is not None:
            raise ProxyError("the proxy died")
        try:
            async with aiohttp.ClientSession() as client:
                async with client.get(self._admin_url + "/health") as reply:
                    return dict(await reply.json())
        except aiohttp.ClientError:
            return None


def n_leased(health: Health) -> int:
    """Return how many slots are leased, of all llama-servers."""
    return sum(slot["state"] == "leased" for each in health["servers"] for slot in each["slots"])


def _is_ready(health: Health) -> bool:
    kinds = {reason["kind"] for reason in health["reasons"]}
    return health["state"] == State.CACHING or DegradationKind.RULE_IS_NOTHING in kinds


def _is_idle(health: Health) -> bool:
    return not n_leased(health) and not health["n_waiting"]


class Stack:
    """One llama-server in a temporary directory of its own, with the proxy before it or without."""

    def __init__(
        self,
        kind: str,
        size: str,
        leftovers: ExitStack,
        *,
        has_proxy: bool,
        setup: Setup | None = None,
    ) -> None:
        setup = setup or Setup()
        folder = Path(leftovers.enter_context(tempfile.TemporaryDirectory(prefix="prefix-cache-")))
        self.slots = folder / "slots"
        self.slots.mkdir(mode=0o700)
        self._server_core = setup.server_core
        self.server = LlamaServer(
            build_model(kind, size, DEFAULT_MODEL_FOLDER),
            self.slots,
            n_slots=setup.n_slots,
            n_ctx=setup.n_ctx,
            extra_args=setup.server_arguments,
            log_path=folder / "llama-server.log",
            n_threads=setup.n_threads,
        )
        leftovers.callback(self.server.kill)
        self.proxy: ProxyProcess | None = None
        if has_proxy:
            log_path = folder / "proxy.log"
            self.proxy = ProxyProcess(self.server.base_url, self.slots, log_path, setup)
            leftovers.callback(self.proxy.kill)

    @property
    def base_url(self) -> str:
        """Return where clients send their requests."""
        return self.proxy.base_url if self.proxy else self.server.base_url

    async def start(self) -> None:
        """Start llama-server, then the proxy, and wait until both are ready."""
        await asyncio.to_thread(self._start_server)
        if self.proxy:
            self.proxy.start()
            await self.proxy.ready()
            await self.proxy.settled()

    def _start_server(self) -> None:
        mine = os.sched_getaffinity(0)
        if self._server_core is not None:
            os.sched_setaffinity(0, {self._server_core})  # of this thread: the process inherits it
        try:
            self.server.start()
        finally:
            os.sched_setaffinity(0, mine)

    async def stop(self) -> None:
        """Stop the proxy, then llama-server."""
        if self.proxy:
            await asyncio.to_thread(self.proxy.stop)
        await asyncio.to_thread(self.server.stop)

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def evaluated_tokens(self) -> int:
        """Return llama-server's count of evaluated tokens once the proxy is idle."""
        if self.proxy:
            await self.proxy.settled()
        return await asyncio.to_thread(self.server.evaluated_tokens)

    def log_tail(self) -> str:
        """Return the end of the log that tells most about a failure."""
        is_proxy_relevant = self.proxy and self.proxy.log_path.exists() and self._server_answers()
        path = self.proxy.log_path if self.proxy and is_proxy_relevant else self.server.log_path
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join([f"{path.name} ends:", *lines[-TAIL_LINES:]])

    def _server_answers(self) -> bool:
        try:
            return self.server.request("GET", "/health", timeout_seconds=2.0)[0] == 200
        except OSError:
            return False
