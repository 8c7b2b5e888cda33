"""Keeps llama-server running: starts it, waits until it is ready, says how it died, starts it again."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from proxy.core.launch import restart_delay_seconds
from proxy.errors import LlamaServerDied
from proxy.log import get_logger
from proxy.run.process import LlamaProcess

STOP_SECONDS = 20.0
"""How long llama-server may take to end; it finishes the batch at hand first."""
_LOOK_SECONDS = 0.2
_STEADY_SECONDS = 60.0
"""A process that was ready for so long starts a new count of failures."""


@dataclass(frozen=True, slots=True)
class _End:
    """How a process ended, its last lines, and how long it had been ready: None if it never was."""

    how: str
    last_lines: str
    ready_seconds: float | None

    def __str__(self) -> str:
        if self.ready_seconds is not None:
            return f"llama-server died: {self.how}"
        return (
            f"llama-server died before it was ready: {self.how}; it said last:\n{self.last_lines}"
        )


class Supervisor:
    """Runs one llama-server command."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        is_ready: Callable[[], Awaitable[bool]],
        *,
        restarts: bool,
    ) -> None:
        """*environment* is what the command gets beside ours."""
        self._command = command
        self._environment = environment
        self._is_ready = is_ready
        self._restarts = restarts
        self._log = get_logger("llama-server")

    async def run(self) -> None:
        """Run llama-server until cancelled, then stop it; cancelled once more, kill it.

        Raises LlamaServerDied when it ends by itself: always if it was never ready, because a command
        that does not work now will not work the next time either; later unless it may be restarted.
        """
        n_failures = 0
        has_been_ready = False
        while True:
            end = await self._run_once()
            has_been_ready = has_been_ready or end.ready_seconds is not None
            if not (self._restarts and has_been_ready):
                raise LlamaServerDied(str(end))
            n_failures = 1 if (end.ready_seconds or 0.0) >= _STEADY_SECONDS else n_failures + 1
            delay_seconds = restart_delay_seconds(n_failures)
            self._log.error(str(end), restart_in_seconds=delay_seconds)
            await asyncio.sleep(delay_seconds)

    async def _run_once(self) -> _End:
        process = await LlamaProcess.start(self._command, self._environment)
        self._log.info("started llama-server", pid=process.pid)
        ended = asyncio.ensure_future(process.wait())
        try:
            ready_at = await self._await_ready(ended)
            how = await ended
        finally:
            ended.cancel()
            await process.stop(STOP_SECONDS)
        ready_seconds = None if ready_at is None else time.monotonic() - ready_at
        return _End(how, process.tail(), ready_seconds)

    async def _await_ready(self, ended: "asyncio.Future[str]") -> float | None:
        """Return when it was ready; None if it ended first. Loading a large model takes minutes."""
        began = time.monotonic()
        while not ended.done():
            if await self._is_ready():
                now = time.monotonic()
                self._log.info("llama-server is ready", after_seconds=round(now - began, 1))
                return now
            await asyncio.wait({ended}, timeout=_LOOK_SECONDS)
        return None
