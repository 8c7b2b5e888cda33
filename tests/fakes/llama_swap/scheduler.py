"""Which model runs: a busy model is waited for, and one swap serves all who wait for the same model.

Ready models serve at once, also past the queue: A B C A B C, sent while A runs, is served as A A B B C C.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tests.fakes.llama_swap.process import ModelProcess, StartFailed


class LimitReached(Exception):
    """A model serves as many requests as it may."""


class ModelUnloaded(Exception):
    """Somebody unloaded the model that a request waited for."""


@dataclass(eq=False, slots=True)
class Ticket:
    """One request on its way to a model."""

    process: ModelProcess
    granted: asyncio.Future[None]

    @property
    def is_served(self) -> bool:
        future = self.granted
        return future.done() and not future.cancelled() and future.exception() is None


class Scheduler:
    """All models' processes, the requests that wait, and the swaps under way with what each ends."""

    def __init__(self, processes: Collection[ModelProcess], start_seconds: float) -> None:
        self._processes = processes
        self._start_seconds = start_seconds
        self._waiting: list[Ticket] = []
        self._swaps: dict[ModelProcess, list[ModelProcess]] = {}
        self._tasks: set[asyncio.Future[None]] = set()
        self._is_closing = False

    @asynccontextmanager
    async def serving(self, process: ModelProcess) -> AsyncIterator[None]:
        """Have a model ready, and keep it so."""
        ticket = Ticket(process, asyncio.get_running_loop().create_future())
        self._waiting.append(ticket)
        self._advance()
        try:
            await ticket.granted
            yield
        finally:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            elif ticket.is_served:
                process.end_request()
            self._advance()

    async def unload(self, processes: Collection[ModelProcess]) -> None:
        """End these processes without waiting for their requests, and drop those that wait for them."""
        for process in processes:
            self._swaps.pop(process, None)
            for ticket in self._waiting_for(process):
                self._waiting.remove(ticket)
                ticket.granted.set_exception(ModelUnloaded("group: model unloaded"))
        await asyncio.gather(*(p.stop(p.model.unload_seconds) for p in processes))
        self._advance()

    async def close(self) -> None:
        """End all processes, and start none any more."""
        self._is_closing = True
        await self.unload(self._processes)
        await asyncio.gather(*self._tasks)

    def _advance(self) -> None:
        """Serve or start whatever nothing stands in the way of, in order of arrival."""
        if self._is_closing:
            return
        for ticket in list(self._waiting):
            process = ticket.process
            if process in self._swaps:
                continue
            evicted = self._evicted_for(process)
            if self._collides(process, evicted):
                continue
            if process.state == "ready" and not evicted:
                self._grant(ticket)
            elif not any(other.n_in_flight for other in evicted):
                self._begin_swap(process, evicted)

    def _evicted_for(self, process: ModelProcess) -> list[ModelProcess]:
        running = [p for p in self._processes if p.state != "stopped" or p in self._swaps]
        return [p for p in running if p is not process and _is_evicted(p, process)]

    def _collides(self, process: ModelProcess, evicted: list[ModelProcess]) -> bool:
        return any(
            target in evicted or process in ended or set(evicted) & set(ended)
            for target, ended in self._swaps.items()
        )

    def _begin_swap(self, process: ModelProcess, evicted: list[ModelProcess]) -> None:
        self._swaps[process] = evicted
        task = asyncio.ensure_future(self._swap(process, evicted))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _swap(self, process: ModelProcess, evicted: list[ModelProcess]) -> None:
        failure: StartFailed | None = None
        await asyncio.gather(*(other.stop(self._start_seconds) for other in evicted))
        if self._is_closing:
            return
        try:
            await process.start(self._start_seconds)
        except StartFailed as error:
            failure = error
        if self._swaps.pop(process, None) is not None:
            for ticket in self._waiting_for(process):
                self._grant(ticket, failure)
        self._advance()

    def _grant(self, ticket: Ticket, failure: Exception | None = None) -> None:
        self._waiting.remove(ticket)
        if ticket.granted.done():  # its client is gone
            return
        process = ticket.process
        if failure is None and process.n_in_flight >= process.model.concurrency_limit:
            failure = LimitReached()
        if failure is None:
            process.begin_request()
            ticket.granted.set_result(None)
        else:
            ticket.granted.set_exception(failure)

    def _waiting_for(self, process: ModelProcess) -> list[Ticket]:
        return [ticket for ticket in self._waiting if ticket.process is process]


def _is_evicted(running: ModelProcess, target: ModelProcess) -> bool:
    ours, theirs = target.model.group, running.model.group
    if ours is theirs:
        return ours.swap
    return ours.exclusive and not theirs.persistent
