"""The process of one model: started on demand, asked for its health, ended with SIGTERM or SIGKILL."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress

import aiohttp

from tests.fakes.llama_swap.config import Model

POLL_SECONDS = 0.05
ABORT_SECONDS = 5.0


class StartFailed(Exception):
    """A model's process ended or stayed unready."""


class ModelProcess:
    """One model's process; its state is stopped, starting, ready or stopping."""

    def __init__(self, model: Model, client: aiohttp.ClientSession) -> None:
        self.model = model
        self.state = "stopped"
        self.n_in_flight = 0
        self._client = client
        self._used_at = 0.0
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Future[None] | None = None
        self._ending = asyncio.Lock()

    def begin_request(self) -> None:
        self.n_in_flight += 1

    def end_request(self) -> None:
        self.n_in_flight -= 1
        self._used_at = time.monotonic()

    async def start(self, timeout_seconds: float) -> None:
        """Be ready, or raise StartFailed."""
        async with self._ending:
            if self.state == "ready":
                return
            try:
                process = await asyncio.create_subprocess_exec(
                    *self.model.words, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
                )
            except OSError as error:
                raise StartFailed(
                    f"failed to start command '{self.model.command}': {error}"
                ) from None
            self._process, self.state = process, "starting"
        await self._be_ready(process, timeout_seconds)
        self.state = "ready"
        self._used_at = time.monotonic()
        self._watch = asyncio.ensure_future(self._attend(process))

    async def stop(self, patience_seconds: float) -> None:
        """End the process, whatever it is doing."""
        async with self._ending:
            process = self._process
            if process is not None and process.returncode is None:
                self.state = "stopping"
                await _end(process, patience_seconds)
            self.state = "stopped"

    async def _be_ready(self, process: asyncio.subprocess.Process, timeout_seconds: float) -> None:
        try:
            async with asyncio.timeout(timeout_seconds):
                while not await self._is_healthy():
                    if process.returncode is not None:
                        raise StartFailed("upstream command exited prematurely")
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            await self.stop(ABORT_SECONDS)
            raise StartFailed(f"health check timed out after {timeout_seconds}s") from None
        except StartFailed:
            self._note_end(process)
            raise

    async def _is_healthy(self) -> bool:
        if self.model.settings.check_endpoint == "none":
            return True
        with suppress(aiohttp.ClientError):
            url = self.model.proxy + self.model.settings.check_endpoint
            async with self._client.get(url) as answer:
                return answer.status == 200
        return False

    async def _attend(self, process: asyncio.subprocess.Process) -> None:
        """See the process end by itself, or end it when nobody has used it for its `ttl`."""
        while process.returncode is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await process.wait()
            if self._is_expired():
                await self.stop(self.model.unload_seconds)
        self._note_end(process)

    def _note_end(self, process: asyncio.subprocess.Process) -> None:
        if self._process is process:  # and not the next one already
            self.state = "stopped"

    def _is_expired(self) -> bool:
        ttl_seconds = self.model.settings.ttl
        if not ttl_seconds or self.state != "ready" or self.n_in_flight:
            return False
        return time.monotonic() - self._used_at > ttl_seconds


async def _end(process: asyncio.subprocess.Process, patience_seconds: float) -> None:
    _signal(process, signal.SIGTERM)
    try:
        async with asyncio.timeout(patience_seconds):
            await process.wait()
    except TimeoutError:
        _signal(process, signal.SIGKILL)
        await process.wait()


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
