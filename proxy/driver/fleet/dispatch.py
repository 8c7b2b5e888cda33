"""Brings each generation request to a llama-server that serves it, and to another one if that goes away."""

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count

from proxy.core.explaining.causes import Cause
from proxy.core.model import Outcome
from proxy.driver.fleet.backend import Backend
from proxy.driver.fleet.choosing import Chosen, choose
from proxy.driver.fleet.fleet import Fleet
from proxy.driver.fleet.group import Group
from proxy.driver.reporting.report import Findings, Report
from proxy.driver.requests import Answer, GenerationRequest, Send
from proxy.driver.serving.arrival_order import Place
from proxy.driver.serving.cache import KeyRefused
from proxy.driver.serving.stabilizing import Stabilizing
from proxy.driver.slots.leases import DeskClosed, FreeElsewhere
from proxy.errors import UpstreamGone, UpstreamNotReached
from proxy.upstream.llama_server import LlamaServer

MAX_LOADS = 4
"""A request has a model loaded so many times at most that does not stay: then its host answers."""

SendTo = Callable[[LlamaServer], Send]
"""Returns how a body is sent to a llama-server, and its answer relayed."""


class Dispatch:
    """Serves generation requests."""

    def __init__(self, fleet: Fleet, stabilizing: Stabilizing, report: Report) -> None:
        self._fleet = fleet
        self._stabilizing = stabilizing
        self._report = report

    async def serve(self, request: GenerationRequest, send_to: SendTo) -> None:
        """Serve one request; what sending raises passes through, cache faults do not.

        A request of which nothing was sent yet waits for a llama-server that is away. Raises
        UpstreamAbsent if that takes too long.
        """
        place, last = Place(request.arrival.arrived_at), None
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
        place = Place(request.arrival.arrived_at)
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
        findings = Findings(why="no such model", cause=Cause.NOT_LOOKED_UP)
        self._report.answered(request, answer, Outcome.BYPASS, findings)

    async def _try(
        self,
        group: Group,
        request: GenerationRequest,
        send_to: SendTo,
        place: Place,
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
        except KeyRefused:
            group.order.leave(place)
            await backend.cache.let_refuse(request, self._sending(backend, request, send_to))
            return True
        except DeskClosed:
            return await _look_elsewhere(group, backend)
        try:
            return await self._serve_by(group, chosen, send_to, place)
        finally:
            chosen.on_way.arrive()

    async def _serve_by(self, group: Group, chosen: Chosen, send_to: SendTo, place: Place) -> bool:
        """Serve a request that was read; return False if it has to be served elsewhere."""
        backend, session, read = chosen.backend, chosen.session, chosen.read
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
        except DeskClosed:
            return await _look_elsewhere(group, backend)
        except UpstreamGone as gone:
            is_unsent = isinstance(gone, UpstreamNotReached)
            if is_unsent and await backend.lifecycle.is_replaced(session):
                await group.is_lost()
                return False
            backend.lifecycle.poke()
            raise
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
