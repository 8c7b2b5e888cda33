"""The driver: every generation request takes a lease, and the cache where that helps.

tokenize -> hash the prefix -> look up checkpoints -> plan -> lease a slot -> restore the checkpoint ->
send only what is left to be evaluated -> relay the stream -> confirm the hit -> release; save it when
it is worth saving.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

from proxy.core.explaining.causes import Cause
from proxy.core.model import Outcome, Prompt
from proxy.driver.contact.lifecycle import Lifecycle
from proxy.driver.contact.memory import remember_tenant
from proxy.driver.reporting.inquiry import Inquiry
from proxy.driver.reporting.report import Findings
from proxy.driver.requests import Answer, GenerationRequest, Send
from proxy.driver.services import Services
from proxy.driver.serving.arrival_order import ArrivalOrder, Place
from proxy.driver.serving.cached import CachedRequest
from proxy.driver.serving.overflow import Fitted, Overflow
from proxy.driver.serving.similar import SimilarRequest
from proxy.driver.serving.stabilizing import Stabilizing
from proxy.driver.serving.uncached import serve_pinned
from proxy.driver.serving.unpinned import UnpinnedRequest
from proxy.driver.session import Session
from proxy.driver.slots.leases import DeskClosed
from proxy.errors import NotConvertible, UpstreamGone, UpstreamNotReached, UpstreamRefused
from proxy.upstream.bodies import (
    GenerationBody,
    as_chat_body,
    bypass_reason,
    chat_reason,
    n_completions,
    parse_body,
)
from proxy.upstream.routes import Route, honours_id_slot

_TOKENIZED_OTHERWISE = "requests of this shape are tokenized differently"


@dataclass(frozen=True, slots=True)
class _Read:
    """A request's prompt, and its body in the chat form; without a prompt `why` says why."""

    prompt: Prompt | None = None
    chat_body: GenerationBody | None = None
    why: str | None = None


class _KeyRefused(Exception):
    """llama-server does not take the client's key: it will refuse the request before any slot."""


class Cache:
    """Serves generation requests, from the cache where that helps."""

    def __init__(
        self,
        services: Services,
        lifecycle: Lifecycle,
        stabilizing: Stabilizing,
        overflow: Overflow,
    ) -> None:
        self._services = services
        self._lifecycle = lifecycle
        self._stabilizing = stabilizing
        self._overflow = overflow
        self._order = ArrivalOrder()

    async def serve(self, request: GenerationRequest, send: Send) -> None:
        """Serve one request; what *send* raises passes through, cache faults do not.

        A request of which nothing was sent yet waits for a llama-server that is away. Raises
        UpstreamAbsent if that takes too long.
        """

        async def send_and_watch(
            raw: bytes, on_start: Callable[[], None], n_found: int | None = None
        ) -> Answer:
            answer = await send(raw, on_start, n_found)
            self._stabilizing.note_calls(request, answer.calls)
            if answer.is_broken:
                self._lifecycle.poke()
            return answer

        place = Place(request.arrival.arrived_at)
        try:
            while not await self._try_to_serve(request, send_and_watch, place):
                self._order.join(place)
        finally:
            self._order.leave(place)

    async def _try_to_serve(self, request: GenerationRequest, send: Send, place: Place) -> bool:
        """Serve a request; return False if llama-server went away before anything was sent."""
        if self._order or self._lifecycle.current is None:
            self._order.join(place)
        session = await self._lifecycle.session(place.since)
        try:
            if session is None:
                self._order.leave(place)
                await self._serve_unplaced(request, send)
            else:
                await self._serve_in(session, request, send, place)
        except _KeyRefused:
            self._order.leave(place)
            answer = await send(request.raw, lambda: None)
            self._report(request, answer, Outcome.BYPASS, "the key was refused")
        except DeskClosed:
            self._lifecycle.poke()
            return False
        except UpstreamNotReached:
            if session is not None and await self._lifecycle.is_replaced(session):
                return False
            self._lifecycle.poke()
            raise
        except UpstreamGone:
            self._lifecycle.poke()
            raise
        return True

    async def prompt_of(
        self, session: Session, request: GenerationRequest
    ) -> tuple[Prompt | None, str | None]:
        """Return the prompt that a request will have when it is served; None, and why, if not read."""
        request = await self._stabilizing.rewrite(session, request)
        try:
            read = await self._read_prompt(session, request, parse_body(request.raw))
        except _KeyRefused:
            return None, "llama-server refuses the key"
        return read.prompt, read.why

    async def server_state_changed(self) -> None:
        """A client changed slots or adapters: nothing that was known holds any more."""
        await self._lifecycle.attach_again()

    async def _serve_unplaced(self, request: GenerationRequest, send: Send) -> None:
        """Forward without a slot of our choice: llama-server is not attached."""
        try:
            answer = await send(request.raw, lambda: None)
        finally:
            if self._lifecycle.current:
                self._lifecycle.current.attachment.desk.table.forget_free()
        self._report(request, answer, Outcome.DEGRADED, "llama-server is not attached")

    def _report(
        self, request: GenerationRequest, answer: Answer, outcome: Outcome, why: str | None
    ) -> None:
        is_otherwise = why == _TOKENIZED_OTHERWISE
        cause = Cause.TOKENIZED_OTHERWISE if is_otherwise else Cause.NOT_LOOKED_UP
        self._services.report.answered(request, answer, outcome, Findings(why=why, cause=cause))

    async def _serve_in(
        self, session: Session, request: GenerationRequest, send: Send, place: Place
    ) -> None:
        request = await self._stabilizing.rewrite(session, request)
        body = parse_body(request.raw)
        read, is_current = await asyncio.gather(
            self._read_prompt(session, request, body), self._lifecycle.is_still(session)
        )
        if not is_current:
            raise DeskClosed
        if body is not None and read.prompt is not None:
            given = request
            request, body, read = await self._fit(session, request, body, read.prompt, read)
            if request is not given and not await self._lifecycle.is_still(session):
                raise DeskClosed  # that took its time
        await self._order.turn(place)
        self._order.leave(place)  # whoever is next comes to the desk after us
        serve = self._way(session, request, body, read)
        async with session.launches.turn() as turn:
            await serve(session.launches.in_turn(turn, send))

    async def _fit(
        self,
        session: Session,
        request: GenerationRequest,
        body: GenerationBody,
        prompt: Prompt,
        read: "_Read",
    ) -> tuple[GenerationRequest, GenerationBody, "_Read"]:
        """Return the request as it is, or without its oldest part if it does not fit the context."""
        last = read

        async def read_again(shorter: GenerationRequest, body: GenerationBody) -> Prompt | None:
            nonlocal last
            last = await self._read_prompt(session, shorter, body)
            return last.prompt

        fitted = await self._overflow.fit(session, Fitted(request, body, prompt), read_again)
        is_same = fitted.request is request
        return fitted.request, fitted.body, read if is_same else last

    def _way(
        self,
        session: Session,
        request: GenerationRequest,
        body: GenerationBody | None,
        read: "_Read",
    ) -> Callable[[Send], Awaitable[object]]:
        """Return how a request is served: by its prompt, in a slot of our choice, or of llama-server's."""
        attachment = session.attachment
        # Of slots that are emptied all the time, llama-server's RAM cache makes more than we can.
        is_left_alone = attachment.clears_idle_slots and not attachment.is_caching
        if read.prompt is not None and body is not None and not is_left_alone:
            serving = SimilarRequest if request.route is Route.MESSAGES else CachedRequest
            is_current = partial(self._lifecycle.is_still, session)
            inquiry = Inquiry(
                self._services.journal, attachment, read.prompt, read.chat_body or body
            )
            cached = serving(
                self._services, session, request, body, read.prompt, inquiry, is_current
            )
            return cached.serve

        async def serve_uncached(send: Send) -> None:
            async def send_and_report(
                raw: bytes, on_start: Callable[[], None], n_found: int | None = None
            ) -> Answer:
                # At once: clients that have their answer hang up, and what is left to do is cut short.
                answer = await send(raw, on_start, n_found)
                self._report(request, answer, Outcome.BYPASS, read.why or "nothing is cached")
                return answer

            is_pinned = body is not None and honours_id_slot(request.route) and not is_left_alone
            if body is None or not is_pinned or n_completions(body) > 1:
                unpinned = UnpinnedRequest(self._services, session, request, body)
                await unpinned.serve(send_and_report)
            else:
                await serve_pinned(self._services, session, request, body, send_and_report)

        return serve_uncached

    async def _read_prompt(
        self, session: Session, request: GenerationRequest, body: GenerationBody | None
    ) -> "_Read":
        """Return what llama-server will evaluate; None, and why, if that is not looked up."""
        body, reason = _chat_form(request.route, body)
        if body is None:
            return _Read(why=reason)
        attachment = session.attachment
        try:
            shape = body.shape(request.path)
            if shape in attachment.disabled_shapes:
                return _Read(why=_TOKENIZED_OTHERWISE)
            namespace = attachment.tenant_namespace(request.tenant)
            prompt = await session.reader.read(
                request.route, body, request.headers, namespace, attachment.rule
            )
            if attachment.can_cache and request.tenant not in attachment.tenants:
                # Its key was good enough for llama-server to tokenize.
                await remember_tenant(self._services.store, attachment, request.tenant)
                attachment.note_tenants()
        except Exception as fault:
            if isinstance(fault, UpstreamRefused) and fault.status in (401, 403):
                raise _KeyRefused from fault
            # The request itself may be what is wrong: llama-server's own answer says so best.
            self._services.faults.record("tokenize", fault)
            return _Read(why="the prompt could not be tokenized")
        if not prompt.n_tokens:
            return _Read(why="empty prompt")
        return _Read(replace(prompt, shape=shape), body)


def _chat_form(
    route: Route, body: GenerationBody | None
) -> tuple[GenerationBody | None, str | None]:
    """Return the body whose prompt can be read, or why there is none."""
    reason = bypass_reason(route, body)
    if reason is not None or body is None or route is Route.COMPLETION:
        return (None, reason) if reason is not None else (body, None)
    try:
        chat = as_chat_body(route, body)
    except NotConvertible as why:
        return None, str(why)
    reason = chat_reason(chat)
    return (None, reason) if reason is not None else (chat, None)
