"""Which llama-server serves a request, and which one after that went away."""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import count

import msgspec

from proxy.core.model import Outcome
from proxy.core.residency import Offer, best_offer
from proxy.errors import (
    ProxyError,
    StoreFault,
    UpstreamEnded,
    UpstreamGone,
    UpstreamNotReached,
    UpstreamPerhapsReached,
)
from proxy.explain.explanation import Judgement
from proxy.explain.report import Report
from proxy.llama.client import LlamaServer
from proxy.servers.backend import Backend, Group
from proxy.servers.pool import Fleet
from proxy.serving.cache import ReadRequest, WillBeRefused
from proxy.serving.desk import DeskClosed, EndedOver, FreeElsewhere
from proxy.serving.launches import QueuePlace, Session
from proxy.serving.planning import Planning
from proxy.serving.request import Answer, GenerationRequest, Send
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
        """Raise ProxyError for a request that llama-server has ended over twice in a row."""
        deaths = self._recent(key)
        if deaths is not None and deaths.n >= MAX_DEATHS:
            deaths.last_at = time.time()
            raise ProxyError(
                f"llama-server ended {deaths.n} times in a row while it worked on this request: see "
                "llama-server's log. The request is tried again once nobody has sent it for "
                f"{FORGET_SECONDS / 60:.0f} minutes",
                422,
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


def key_of(read: ReadRequest) -> str:
    """Return what tells a request from others: its prompt, or its body if that was not read."""
    content = read.request.raw if read.prompt is None else read.prompt.tokens.tobytes()
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
    """The llama-server that serves a request, and the request as it serves it."""

    backend: Backend
    session: Session
    read: ReadRequest
    on_way: OnWay


async def choose(group: Group, reader: Backend, session: Session, read: ReadRequest) -> Chosen:
    """Return the best llama-server of a group for a request that the *reader* has read.

    Raises what `Cache.take_over` does.
    """
    present = [(b, s) for b in group.backends if (s := b.lifecycle.current) is not None]
    if len(present) <= 1:
        return Chosen(reader, session, read, OnWay(group.on_way, reader))
    offers = [_offer(b, s, read).beside(group.on_way[b]) for b, s in present]
    backend, chosen = present[best_offer(offers)]
    on_way = OnWay(group.on_way, backend)
    if chosen is session:
        return Chosen(backend, chosen, read, on_way)
    try:
        taken = await backend.cache.take_over(chosen, read)
    except BaseException:
        on_way.arrive()
        raise
    return Chosen(backend, chosen, taken, on_way)


def _offer(backend: Backend, session: Session, read: ReadRequest) -> Offer:
    """Return what a llama-server can do for a request; one that was not read goes by who is busy."""
    attachment, prompt = session.attachment, read.prompt
    if prompt is not None:
        namespace = attachment.tenant_namespace(read.request.tenant)
        return Planning(backend.services, session, replace(prompt, namespace=namespace)).offer()
    n_busy = sum(slot.is_leased for slot in attachment.desk.table)
    return Offer(0.0, 0, n_busy, attachment.desk.n_waiting, len(attachment.desk.table))


# Brings each generation request to a llama-server that serves it, and to another one if that goes away.


MAX_LOADS = 4
"""A request has a model loaded so many times at most that does not stay: then its host answers."""

SendTo = Callable[[LlamaServer], Send]
"""Returns how a body is sent to a llama-server, and its answer relayed."""


class Dispatch:
    """Serves generation requests."""

    def __init__(
        self, fleet: Fleet, stabilizing: Stabilizing, report: Report, fatal: FatalRequests
    ) -> None:
        self._fleet = fleet
        self._fatal = fatal
        self._stabilizing = stabilizing
        self._report = report

    async def serve(self, request: GenerationRequest, send_to: SendTo) -> None:
        """Serve one request; what sending raises passes through, cache faults do not.

        A request of which nothing was sent yet waits for a llama-server that is away. Raises
        UpstreamAbsent if that takes too long, ProxyError if llama-server ends over it again and again.
        """
        place, last = QueuePlace(request.arrival.arrived_at), None
        try:
            for n_tries in count(1):
                async with self._fleet.group(
                    request.model, place.arrived_at, request.headers
                ) as group:
                    if last is not None and last is not group:
                        last.order.leave(place)
                    last = group
                    if group is None:
                        return await self._pass_on(request, send_to(self._fleet.roots[0]))
                    may_be_lost = n_tries < MAX_LOADS
                    if await self._try(group, request, send_to, place, may_be_lost=may_be_lost):
                        return None
                    group.keep(place)
        finally:
            if last is not None:
                last.order.leave(place)

    async def serve_in(self, group: Group, request: GenerationRequest, send_to: SendTo) -> None:
        """Serve one request for somebody who has the model kept loaded already.

        To ask for it again would wait for those who wait for it to leave. Raises as `serve` does, and
        UpstreamGone if llama-server goes away again and again.
        """
        place = QueuePlace(request.arrival.arrived_at)
        try:
            for _ in range(MAX_LOADS):
                if await self._try(group, request, send_to, place, may_be_lost=False):
                    return
                group.order.join(place)
        finally:
            group.order.leave(place)
        raise UpstreamGone("llama-server goes away again and again")

    async def _pass_on(self, request: GenerationRequest, send: Send) -> None:
        answer = await send(request.raw, lambda: None)
        self._report.answered(request, answer, Outcome.BYPASS, Judgement(), why="no such model")

    async def _try(
        self,
        group: Group,
        request: GenerationRequest,
        send_to: SendTo,
        place: QueuePlace,
        *,
        may_be_lost: bool,
    ) -> bool:
        """Serve a request; return False if llama-server went away before anything was sent."""
        if group.order or not group.sessions:
            group.order.join(place)
        was_there = group.presence.is_there
        backend, session = await group.first_to_ask(place.since)
        if session is None:
            if backend.lifecycle.is_over or (was_there and may_be_lost and await group.is_lost()):
                return False
            group.order.leave(place)
            return await self._serve_unplaced(
                group, backend, request, send_to, may_be_lost=may_be_lost
            )
        try:
            read = await backend.cache.read(session, request)
            chosen = await choose(group, backend, session, read)
        except WillBeRefused as why:
            group.order.leave(place)
            send = self._sending(backend, request, send_to)
            await backend.cache.let_refuse(session, request, send, why)
            return True
        except DeskClosed:
            return await _look_elsewhere(group, backend)
        try:
            return await self._serve_by(group, chosen, send_to, place)
        finally:
            chosen.on_way.arrive()

    async def _serve_by(
        self, group: Group, chosen: Chosen, send_to: SendTo, place: QueuePlace
    ) -> bool:
        """Serve a request that was read; return False if it has to be served elsewhere."""
        backend, session, read = chosen.backend, chosen.session, chosen.read
        key = key_of(read)
        self._fatal.require_harmless(key)
        send = self._sending(backend, read.request, send_to)

        async def turn() -> None:
            await group.order.turn(place)
            group.order.leave(place)  # whoever is next comes to the desk after us
            chosen.on_way.arrive()

        if len(group.backends) > 1:
            place.queued_at = place.queued_at or time.monotonic()
            read = replace(read, request=replace(read.request, queued_at=place.queued_at))
        try:
            await backend.cache.serve(session, read, send, turn)
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
            if is_unsent and await backend.lifecycle.is_replaced(session):
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
        request: GenerationRequest,
        send_to: SendTo,
        *,
        may_be_lost: bool,
    ) -> bool:
        """Forward to a llama-server that is not attached; return False if its host has gone away."""
        try:
            await backend.cache.serve_unplaced(request, self._sending(backend, request, send_to))
        except UpstreamGone as gone:
            backend.lifecycle.poke()
            may_be_lost &= group.is_hosted and isinstance(gone, UpstreamNotReached)
            if may_be_lost and await group.is_lost():
                return False
            raise
        return True

    def _sending(self, backend: Backend, request: GenerationRequest, send_to: SendTo) -> Send:
        """Return how to send to a llama-server, noting what its answer tells."""
        send = send_to(backend.services.upstream)

        async def send_and_watch(
            raw: bytes, on_start: Callable[[], None], n_found: int | None = None
        ) -> Answer:
            answer = await send(raw, on_start, n_found)
            self._stabilizing.note_calls(request, answer.calls)
            if answer.is_broken:
                backend.lifecycle.poke()
            return answer

        return send_and_watch


async def _look_elsewhere(group: Group, backend: Backend) -> bool:
    """Have it looked at what became of a llama-server; return False, for it does not serve any more."""
    backend.lifecycle.poke()
    await group.is_lost()
    return False
