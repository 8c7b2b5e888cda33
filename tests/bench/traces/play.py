"""Plays a trace on a stack: who sends what when, and what llama-server evaluates for all of it."""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.bench.processes import Stack
from tests.bench.traces.chat import ChatFailed, Reply, chat
from tests.bench.traces.trace import Client, Message, Request, Stage, Trace


@dataclass(slots=True)
class Sent:
    """A request with the real answers filled in; they stand in the order of sending."""

    request: Request
    answers: dict[str, Message]
    reply: Reply | None = None


@dataclass(slots=True)
class Played:
    """What came of a trace; `seconds` is the time in which clients ran.

    `n_written_bytes` is what the processes wrote to files, their logs included.
    """

    sent: list[Sent] = field(default_factory=list)
    n_evaluated: int = 0
    n_written_bytes: int = 0
    seconds: float = 0.0


class Player:
    """Plays one trace on one stack that has been started, and stops the proxy at the end.

    llama-server is left running, so that it can be asked for tokens.
    """

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._played = Played()
        self._answers: dict[str, Message] = {}
        self._n_before = 0

    async def play(self, trace: Trace) -> Played:
        """Play all stages and let write-backs drain; raises ChatFailed."""
        self._n_before = await self._evaluated_tokens()
        for stage in trace.stages:
            if stage.restarts:
                await self._restart()
            await self._play_stage(stage)
        await self._drain()
        return self._played

    async def _play_stage(self, stage: Stage) -> None:
        began = time.monotonic()
        # llama-server closes connections when it likes, and a POST that meets a closed one fails.
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as http, asyncio.TaskGroup() as tasks:
            for client in stage.clients:
                tasks.create_task(self._play_client(http, client))
        self._played.seconds += time.monotonic() - began

    async def _play_client(self, http: aiohttp.ClientSession, client: Client) -> None:
        for request in client:
            sent = Sent(request, dict(self._answers))
            self._played.sent.append(sent)
            try:
                body = request.body(self._answers)
                sent.reply = await self._ask(http, request, body)
            except ChatFailed as failure:
                raise ChatFailed(f"{request.label}: {failure}") from failure
            self._answers[request.label] = sent.reply.message

    async def _ask(
        self, http: aiohttp.ClientSession, request: Request, body: dict[str, Any]
    ) -> Reply:
        return await chat(http, self._stack.base_url, body, request.form)

    async def _restart(self) -> None:
        await self._drain()
        await asyncio.to_thread(self._stack.server.stop)
        await self._stack.start()
        self._n_before = 0  # of a new process, everything counts

    async def _drain(self) -> None:
        """Stop the proxy, so that it writes back, and take down what was evaluated until then."""
        if self._stack.proxy:
            self._played.n_written_bytes += _written_bytes(self._stack.proxy.pid)
            await asyncio.to_thread(self._stack.proxy.stop)
        self._played.n_written_bytes += _written_bytes(self._stack.server.pid)
        self._played.n_evaluated += await self._evaluated_tokens() - self._n_before

    async def _evaluated_tokens(self) -> int:
        return await asyncio.to_thread(self._stack.server.evaluated_tokens)


def _written_bytes(pid: int) -> int:
    """Return what a process has written with write(2) and its like; sockets use others."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])
