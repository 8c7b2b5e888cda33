"""Which llama-server serves a request, and which one after that went away."""

import time
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import count
from typing import Any

import msgspec

from proxy.core.residency import Offer, best_offer
from proxy.errors import (
    EndsLlamaServer,
    StoreFault,
    UpstreamEnded,
    UpstreamGone,
    UpstreamNotReached,
    UpstreamPerhapsReached,
)
from proxy.explain.report import Report
from proxy.servers.backend import Backend, Group
from proxy.servers.pool import Fleet
from proxy.serving.cache import WillBeRefused
from proxy.serving.desk import DeskClosed, EndedOver, FreeElsewhere
from proxy.serving.launches import QueuePlace
from proxy.serving.planning import offer
from proxy.serving.process import Process
from proxy.serving.request import Request
from proxy.serving.rewriting import Stabilizing
from proxy.store.store import CheckpointStore

# Requests that llama-server ended over: after two deaths in a row a request is refused.
#
# Owns: which they were, as hashes of their prompts, and for how long that counts. It is kept in the
# index, for the proxy may be restarted with llama-server.


MAX_DEATHS = 2
FORGET_SECONDS = 600.0
"""A request that nobody has sent for so long is tried again."""
_MAX_REMEMBERED = 64
_NAME = "fatal requests"


class _Deaths(msgspec.Struct):
    n: int
    last_at: float


class FatalRequests:
    """Remembers with which requests llama-server has ended."""

    def __init__(self, store: CheckpointStore | None) -> None:
        self._store = store
        self._deaths: dict[str, _Deaths] = {}
        if store is not None:
            with suppress(StoreFault):
                self._deaths = store.index.value(_NAME, dict[str, _Deaths]) or {}

    def require_harmless(self, key: str) -> None:
        """Raise EndsLlamaServer for a request that llama-server has ended over twice in a row."""
        deaths = self._recent(key)
        if deaths is not None and deaths.n >= MAX_DEATHS:
            deaths.last_at = time.time()
            raise EndsLlamaServer(
                f"llama-server ended {deaths.n} times in a row while it worked on this request: see "
                "llama-server's log. The request is tried again once nobody has sent it for "
                f"{FORGET_SECONDS / 60:.0f} minutes"
            )

    async def note_death(self, key: str) -> None:
        """Note that llama-server ended while it worked on a request that had no answer yet."""
        deaths = self._recent(key)
        n_before = deaths.n if deaths else 0
        self._deaths.pop(key, None)
        self._deaths[key] = _Deaths(n_before + 1, time.time())
        while len(self._deaths) > _MAX_REMEMBERED:
            del self._deaths[next(iter(self._deaths))]
        await self._write()

    async def note_answer(self, key: str) -> None:
        """Note that llama-server has begun to answer a request: the next death is not one in a row."""
        if self._deaths.pop(key, None):
            await self._write()

    async def _write(self) -> None:
        if self._store is not None:
            with suppress(StoreFault):  # then it is known while this process runs
                await self._store.put_value(_NAME, self._deaths)

    def _recent(self, key: str) -> _Deaths | None:
        deaths = self._deaths.get(key)
        is_recent = deaths is not None and time.time() - deaths.last_at < FORGET_SECONDS
        return deaths if is_recent else None


def key_of(request: Request) -> str:
    """Return what tells a request from others: its prompt, or its body if that was not read."""
    content = request.raw if request.prompt is None else request.prompt.tokens.tobytes()
    return blake2b(content, digest_size=16).hexdigest()


# Which llama-server of a group serves a request that was read: the best by what each would make of it.


class OnWay:
    """A request on its way to a desk, where others cannot see it yet; arriving again is harmless."""

    def __init__(self, on_way: Counter[Backend], backend: Backend) -> None:
        self._on_way = on_way
        self._backend: Backend | None = backend
        on_way[backend] += 1

    def arrive(self) -> None:
        if self._backend is not None:
            self._on_way[self._backend] -= 1
            self._backend = None


@dataclass(frozen=True, slots=True)
class Chosen:
    """The llama-server that serves a request."""

    backend: Backend
    process: Process
    on_way: OnWay


async def choose(group: Group, reader: Backend, process: Process, request: Request) -> Chosen:
    """Return the best llama-server of a group for a request that the *reader* has read.

    Raises what `Cache.take_over` does.
    """
    present = [(b, s) for b in group.backends if (s := b.lifecycle.current) is not None]
    if len(present) <= 1:
        return Chosen(reader, process, OnWay(group.on_way, reader))
    offers = [_offer(s, request).beside(group.on_way[b]) for b, s in present]
    backend, chosen = present[best_offer(offers)]
    on_way = OnWay(group.on_way, backend)
    if chosen is not process:
        try:
            await backend.cache.take_over(chosen, request)
        except BaseException:
            on_way.arrive()
            raise
    return Chosen(backend, chosen, on_way)


def _offer(process: Process, request: Request) -> Offer:
    """Return what a llama-server can do for a request; one that was not read goes by who is busy."""
    if request.prompt is not None:
        namespace = process.tenant_namespace(request.tenant)
        return offer(process, replace(request.prompt, namespace=namespace))
    n_busy = sum(slot.is_leased for slot in process.slots)
    return Offer(0.0, 0, n_busy, process.desk.n_waiting, len(process.slots))


# Brings each generation request to a llama-server that serves it, and to another one if that goes away.


MAX_LOADS = 4
"""A request has a model loaded so many times at most that does not stay: then its host answers."""


class Dispatch:
    """Serves generation requests."""

    def __init__(
        self, fleet: Fleet, stabilizing: Stabilizing, report: Report, fatal: FatalRequests
    ) -> None:
        self._fleet = fleet
        self._fatal = fatal
        self._stabilizing = stabilizing
        self._report = report

    async def serve(self, request: Request) -> None:
        """Serve one request; what sending raises passes through, cache faults do not.

        A request of which nothing was sent yet waits for a llama-server that is away. Raises
        UpstreamAbsent if that takes too long, EndsLlamaServer if llama-server ends over it again and again.
        """
        place, last = QueuePlace(request.arrived_at), None
        try:
            for n_tries in count(1):
                async with self._fleet.group(
                    request.model, place.arrived_at, request.headers
                ) as group:
                    if last is not None and last is not group:
                        last.order.leave(place)
                    last = group
                    if group is None:
                        return await self._pass_on(request)
                    may_be_lost = n_tries < MAX_LOADS
                    if await self._try(group, request, place, may_be_lost=may_be_lost):
                        return None
                    group.keep(place)
        finally:
            if last is not None:
                last.order.leave(place)

    async def serve_in(self, group: Group, request: Request) -> None:
        """Serve one request for somebody who has the model kept loaded already.

        To ask for it again would wait for those who wait for it to leave. Raises as `serve` does, and
        UpstreamGone if llama-server goes away again and again.
        """
        place = QueuePlace(request.arrived_at)
        try:
            for _ in range(MAX_LOADS):
                if await self._try(group, request, place, may_be_lost=False):
                    return
                group.order.join(place)
        finally:
            group.order.leave(place)
        raise UpstreamGone("llama-server goes away again and again")

    async def _pass_on(self, request: Request) -> None:
        await request.send(self._fleet.roots[0], request.raw)
        self._report.not_looked_up(request, "no such model")

    async def _try(
        self,
        group: Group,
        request: Request,
        place: QueuePlace,
        *,
        may_be_lost: bool,
    ) -> bool:
        """Serve a request; return False if llama-server went away before anything was sent."""
        if group.order or not group.processes:
            group.order.join(place)
        was_there = group.presence.is_there
        backend, process = await group.first_to_ask(place.since)
        if process is None:
            if backend.lifecycle.is_over or (was_there and may_be_lost and await group.is_lost()):
                return False
            group.order.leave(place)
            return await self._serve_unplaced(group, backend, request, may_be_lost=may_be_lost)
        try:
            await backend.cache.read(process, request)
            chosen = await choose(group, backend, process, request)
        except WillBeRefused as why:
            group.order.leave(place)
            await self._watched(backend, request, backend.cache.let_refuse(process, request, why))
            return True
        except DeskClosed:
            return await _look_elsewhere(group, backend)
        try:
            return await self._serve_by(group, chosen, request, place)
        finally:
            chosen.on_way.arrive()

    async def _serve_by(
        self, group: Group, chosen: Chosen, request: Request, place: QueuePlace
    ) -> bool:
        """Serve a request that was read; return False if it has to be served elsewhere."""
        backend, process = chosen.backend, chosen.process
        key = key_of(request)
        self._fatal.require_harmless(key)

        async def turn() -> None:
            await group.order.turn(place)
            group.order.leave(place)  # whoever is next comes to the desk after us
            chosen.on_way.arrive()

        if len(group.backends) > 1:
            request.queued_at = request.queued_at or time.monotonic()
        try:
            await self._watched(backend, request, backend.cache.serve(process, request, turn))
        except FreeElsewhere:
            return False
        except DeskClosed as closed:
            if isinstance(closed, EndedOver):
                await self._fatal.note_death(key)
            return await _look_elsewhere(group, backend)
        except UpstreamGone as gone:
            if isinstance(gone, UpstreamEnded | UpstreamPerhapsReached):
                await self._fatal.note_death(key)
            is_unsent = isinstance(gone, UpstreamNotReached)
            if is_unsent and await backend.lifecycle.is_replaced(process):
                await group.is_lost()
                return False
            backend.lifecycle.poke()
            raise
        await self._fatal.note_answer(key)
        return True

    async def _serve_unplaced(
        self,
        group: Group,
        backend: Backend,
        request: Request,
        *,
        may_be_lost: bool,
    ) -> bool:
        """Forward to a llama-server that is not attached; return False if its host has gone away."""
        try:
            await self._watched(backend, request, backend.cache.serve_unplaced(request))
        except UpstreamGone as gone:
            backend.lifecycle.poke()
            may_be_lost &= group.is_hosted and isinstance(gone, UpstreamNotReached)
            if may_be_lost and await group.is_lost():
                return False
            raise
        return True

    async def _watched(
        self, backend: Backend, request: Request, serving: Coroutine[Any, Any, None]
    ) -> None:
        """Serve a request, and note what its answer tells, also to a client that hangs up with it."""
        request.answer = None
        try:
            await serving
        finally:
            self._stabilizing.note_calls(request)
            if request.answer is not None and request.answer.is_broken:
                backend.lifecycle.poke()


async def _look_elsewhere(group: Group, backend: Backend) -> bool:
    """Have it looked at what became of a llama-server; return False, for it does not serve any more."""
    backend.lifecycle.poke()
    await group.is_lost()
    return False
