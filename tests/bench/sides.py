"""The two sides of a comparison: llama-server alone, and the proxy in front of a llama-server of its own.

Owns: both stacks, the cores they run on, their CPU time, and a blocking client that is the same for both.
"""

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any, Self
from urllib.parse import urlsplit

from tests.bench.processes import Setup, Stack
from tests.bench.traces.chat import ChatFailed, Reply, read_chunks

MODEL = ("hybrid", "tiny")
SERVER_CORE = 1
OUR_CORE = 0
N_HTTP_THREADS = 144
"""Each takes one connection until its client closes it; by default there are few more than slots."""
TRAINED_CONTEXT = 131072
"""Of the hybrid model; llama-server gives no slot more."""
_QUIET_SECONDS = 0.1
_QUIET_CPU_SECONDS = 0.004
"""The proxy looks after its llama-server now and then; that much is still quiet."""
_REQUEST_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class Cpu:
    """CPU seconds that processes have used since their start."""

    server: float
    proxy: float = 0.0

    def __sub__(self, earlier: Self) -> "Cpu":
        return Cpu(self.server - earlier.server, self.proxy - earlier.proxy)


class Side:
    """One llama-server of one thread, with the proxy in front or without."""

    def __init__(
        self,
        leftovers: ExitStack,
        model: tuple[str, str] = MODEL,
        *,
        has_proxy: bool,
        n_slots: int,
        n_ctx: int,
        is_pinned: bool,
    ) -> None:
        arguments = ["--threads-http", str(N_HTTP_THREADS)]
        if n_ctx > TRAINED_CONTEXT and model[0] == "hybrid":
            arguments += ["--override-kv", f"qwen35.context_length=int:{n_ctx}"]
        setup = Setup(
            n_slots=n_slots,
            n_ctx=n_ctx * n_slots,
            n_threads=1,
            server_arguments=tuple(arguments),
            proxy_options=("--log-format", "json"),
            server_core=SERVER_CORE if is_pinned else None,
        )
        self.stack = Stack(*model, leftovers, has_proxy=has_proxy, setup=setup)

    @property
    def base_url(self) -> str:
        return self.stack.base_url

    def cpu(self) -> Cpu:
        proxy = self.stack.proxy
        return Cpu(cpu_seconds(self.stack.server.pid), cpu_seconds(proxy.pid) if proxy else 0.0)

    async def until_quiet(self) -> None:
        """Wait until neither process works any more."""
        before = self.cpu()
        while True:
            await asyncio.sleep(_QUIET_SECONDS)
            used, before = self.cpu() - before, self.cpu()
            if used.server + used.proxy < _QUIET_CPU_SECONDS:
                return

    def log_lines(self) -> list[dict[str, Any]]:
        """Return the proxy's lines on requests, the oldest first."""
        if not self.stack.proxy:
            return []
        texts = self.stack.proxy.log_path.read_text().splitlines()
        lines = [json.loads(text) for text in texts if text.startswith("{")]
        return [line for line in lines if line.get("event") == "request"]


class Sides:
    """Both sides, started together."""

    def __init__(
        self,
        leftovers: ExitStack,
        model: tuple[str, str] = MODEL,
        *,
        n_slots: int = 1,
        n_ctx: int = 65536,
        is_pinned: bool = False,
    ) -> None:
        self.alone, self.ours = (
            Side(
                *(leftovers, model),
                has_proxy=has_proxy,
                n_slots=n_slots,
                n_ctx=n_ctx,
                is_pinned=is_pinned,
            )
            for has_proxy in (False, True)
        )
        self.both = self.alone, self.ours

    async def __aenter__(self) -> Self:
        for side in self.both:
            await side.stack.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for side in self.both:
            await side.stack.stop()

    def by_turns(self, index: int) -> tuple[Side, Side]:
        """Return both sides, in another order at every other index."""
        return self.both if index % 2 else self.both[::-1]


def keep_to_our_core() -> None:
    """Run this process, and all that it starts but llama-server, on one core."""
    os.sched_setaffinity(0, {OUR_CORE})


def ask(
    base_url: str, body: Mapping[str, Any], on_token: Callable[[], object] = lambda: None
) -> Reply:
    """Stream one chat completion to its end; raises ChatFailed.

    The connection is open before the clock starts, as a client's that was used before. *on_token* is
    called at the first token.
    """
    sent = json.dumps({**body, "stream": True}).encode()
    connection = HTTPConnection(urlsplit(base_url).netloc, timeout=_REQUEST_SECONDS)
    connection.connect()
    chunks: list[bytes] = []
    began, first = time.perf_counter(), 0.0
    try:
        connection.request(
            "POST", "/v1/chat/completions", sent, {"Content-Type": "application/json"}
        )
        reply = connection.getresponse()
        if reply.status != 200:
            raise ChatFailed(f"answered {reply.status}: {reply.read().decode()}")
        while line := reply.readline():
            if line.startswith(b"data: "):
                if not chunks:
                    first = time.perf_counter()
                    on_token()
                chunks.append(line[len(b"data: ") :].strip())
        ended = time.perf_counter()
    finally:
        connection.close()
    message, timings = read_chunks(chunks)
    text = message.get("reasoning_content", "") + message["content"]
    return Reply(message, text, timings, first - began, ended - began)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used since its start."""
    # The clock of another process, as clock_getcpuclockid(3) makes it: threads that have ended count too.
    return time.clock_gettime(~pid << 3 | 2)
