"""One llama-server, or one model of a host of several, and those that may serve the same requests."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from cachetools import TTLCache

from proxy.errors import UpstreamFault, UpstreamRefused
from proxy.llama.hosts import ModelHost
from proxy.llama.routes import Presence, Target
from proxy.servers.background import Remembering, WriteBack
from proxy.servers.server import Lifecycle
from proxy.serving.cache import Cache
from proxy.serving.desk import LeaseDesk
from proxy.serving.launches import ArrivalOrder, QueuePlace
from proxy.serving.process import Process, Services

# Names that a host has for its models and does not list, found out by asking for them.


_N_UNKNOWN = 256
_UNKNOWN_SECONDS = 60.0
"""So long a name that no model has is not asked for again."""


class HiddenNames:
    """Asks a host for names that it does not list."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host
        self._unknown: TTLCache[str, bool] = TTLCache(_N_UNKNOWN, _UNKNOWN_SECONDS)

    def may_be_one(self, name: str) -> bool:
        """Return whether a name that is not listed may be a model's."""
        return self._host.hides_names and name not in self._unknown

    async def find(self, name: str) -> str | None:
        """Return the model of that name, None if there is none or it cannot be told now; may load it."""
        with suppress(UpstreamFault):  # it may be known later
            try:
                found = await self._host.resolve(name)
            except UpstreamRefused:
                found = None
            if found is None:
                self._unknown[name] = True
            return found
        return None


# One llama-server, or one model of a host of several: what follows it, serves it and saves its slots.


@dataclass(frozen=True, slots=True, eq=False)
class Backend:
    """Everything that belongs to one llama-server, whichever process of it is running."""

    services: Services
    lifecycle: Lifecycle
    cache: Cache
    write_back: WriteBack
    remembering: Remembering

    @property
    def name(self) -> str:
        return self.services.upstream.target.name

    async def run(self) -> None:
        """Follow llama-server and save what is dirty, until cancelled."""
        work = (self.remembering.run(), self.write_back.run(), self.lifecycle.watch())
        tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


NewBackend = Callable[[Target, Presence], Backend]


# The llama-servers any of which may serve a request: those with the same model.


class Group:
    """Backends of one model, and the order in which requests come to them after a wait."""

    def __init__(
        self,
        backends: Iterable[Backend],
        presence: Presence | None = None,
        look: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """*presence* and *look* are those of a model at its host."""
        self.backends = list(backends)
        self.presence = presence or Presence()
        self._look = look
        self.order = ArrivalOrder()
        self.on_way: Counter[Backend] = Counter()
        """How many requests were sent to each, and are not at its desk yet."""

    @property
    def is_hosted(self) -> bool:
        """Whether a host has it loaded and unloaded."""
        return self._look is not None

    @property
    def processes(self) -> list[Process]:
        """Those of the llama-servers that are attached."""
        return [process for b in self.backends if (process := b.lifecycle.current)]

    def share(self) -> None:
        """Let who waits longest at one know of every slot of another that comes free."""
        for backend in self.backends:
            backend.lifecycle.on_attached = self._welcome

    def _welcome(self, process: Process) -> None:
        desk = process.desk
        desk.on_idle = self._offer
        for _ in desk.table.free():
            self._offer(desk)

    def _offer(self, idle: LeaseDesk) -> None:
        desks = [process.desk for process in self.processes]
        fullest = max(desks, key=lambda desk: desk.n_waiting, default=idle)
        if fullest is not idle:
            fullest.let_go()

    async def first_to_ask(self, since: float) -> tuple[Backend, Process | None]:
        """Return an attached llama-server; if there is none, wait a while for the first.

        The process is None if one is there, but not attached. Raises UpstreamAbsent if all are away for too
        long; *since* is when the request began to wait.
        """
        present = [b for b in self.backends if b.lifecycle.current]
        if present or len(self.backends) == 1:
            backend = min(present or self.backends, key=lambda b: b.lifecycle.n_waiting)
            return backend, await backend.lifecycle.process(since)
        asked = {asyncio.ensure_future(b.lifecycle.process(since)): b for b in self.backends}
        waiting: set[asyncio.Task[Process | None]] = set(asked)
        try:
            # One that is missing, or there without a process, is not taken over one that comes.
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if task.exception() is None and task.result() is not None:
                        return asked[task], task.result()
            is_there = (task for task in asked if _is_there(task, asked[task]))
            refused = (task for task in asked if task.exception() is not None)
            last = next(is_there, None) or next(refused, None) or next(iter(asked))
            return asked[last], last.result()
        finally:
            for task in asked:
                task.cancel()

    def keep(self, place: QueuePlace) -> None:
        """Let a request that has to try again come before those who arrived after it.

        Not where it asks for its model again: who waits for it there may be what its model waits for.
        """
        if self.is_hosted:
            self.order.leave(place)
        else:
            self.order.join(place)

    async def is_lost(self) -> bool:
        """Look again, after something went wrong; return whether the model is not loaded any more."""
        if self._look is not None:
            await self._look()
        return not self.presence.is_there


def _is_there(task: "asyncio.Task[Process | None]", backend: Backend) -> bool:
    """Return whether a llama-server can be reached that is not attached."""
    return task.exception() is None and not backend.lifecycle.absence.unreachable_seconds
