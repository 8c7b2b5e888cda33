"""The cache before one llama-server: every generation request takes a lease, and is cached if that helps.

tokenize -> hash the prefix -> look up checkpoints -> plan -> lease a slot -> restore the checkpoint ->
send only what is left to be evaluated -> relay the stream -> confirm the hit -> release; save it when
it is worth saving.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

import xxhash

from proxy.core.model import Outcome, Prompt
from proxy.errors import NotConvertible, UpstreamFault, UpstreamRefused
from proxy.explain.causes import Cause
from proxy.explain.explanation import Judgement
from proxy.explain.report import Inquiry
from proxy.llama.bodies import (
    GenerationBody,
    as_chat_body,
    bypass_reason,
    chat_reason,
    is_no_json_object,
    n_completions,
    parse_body,
)
from proxy.llama.routes import Route, honours_id_slot, reads_forms
from proxy.servers.attachment import Attachment, remember_tenant
from proxy.serving.cached import CachedRequest
from proxy.serving.desk import DeskClosed
from proxy.serving.launches import Session
from proxy.serving.placement import SimilarRequest, UnpinnedRequest, serve_pinned
from proxy.serving.process import Services
from proxy.serving.request import Answer, GenerationRequest, Send
from proxy.serving.rewriting import Fitted, Overflow, Stabilizing

EXAMINATION_SECONDS = 10.0
"""So long a request waits for the first self-test of a model that was loaded for it: what begins without a
rule is not cut, and may be evaluated again as a whole."""
_TOKENIZED_OTHERWISE = "requests of this shape are tokenized differently"


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A request as it is served, and its prompt; without one `why` says why it is not cached.

    `body` is None if it is no JSON object, `chat_body` is the body in the chat form.
    """

    request: GenerationRequest
    body: GenerationBody | None
    prompt: Prompt | None = None
    chat_body: GenerationBody | None = None
    why: str | None = None


class WillBeRefused(Exception):
    """llama-server will refuse a request before it comes to any slot; the message says why."""


class Cache:
    """Serves generation requests by one llama-server, from the cache where that helps."""

    def __init__(
        self,
        services: Services,
        is_still: Callable[[Session], Awaitable[bool]],
        stabilizing: Stabilizing,
        overflow: Overflow,
    ) -> None:
        """*is_still* looks whether a session is still that of the process that answers."""
        self._services = services
        self._is_still = is_still
        self._stabilizing = stabilizing
        self._overflow = overflow

    async def read(self, session: Session, request: GenerationRequest) -> ReadRequest:
        """Rewrite a request as it is to be served, and read its prompt.

        Raises WillBeRefused, or DeskClosed if llama-server was replaced.
        """
        await self._require_key(session, request)
        if session.upstream.target.model:
            await session.attachment.examination(EXAMINATION_SECONDS)
        request = await self._stabilizing.rewrite(session, request)
        request = replace(request, server=self._services.where) if self._services.where else request
        body = parse_body(request.raw)
        if request.path in session.attachment.unsupported_paths:
            raise WillBeRefused("llama-server does not support it")
        if body is None and not reads_forms(request.path) and is_no_json_object(request.raw):
            raise WillBeRefused("body is not a JSON object")
        read, is_current = await asyncio.gather(
            self._read_prompt(session, request, body), self._is_still(session)
        )
        if not is_current:
            raise DeskClosed
        return read

    async def take_over(self, session: Session, read: ReadRequest) -> ReadRequest:
        """Return a request that was read for another llama-server as this one is to serve it.

        Only one with another namespace has to read it again. Raises as `read` does.
        """
        attachment, prompt = session.attachment, read.prompt
        is_same = (
            prompt is None
            or prompt.namespace == attachment.tenant_namespace(read.request.tenant)
            and prompt.shape not in attachment.disabled_shapes
        )
        if not is_same:
            return await self.read(session, read.request)
        if not await self._is_still(session):
            raise DeskClosed
        if prompt is not None:
            await self._note_tenant(attachment, read.request.tenant)
        return replace(read, request=replace(read.request, server=self._services.where))

    async def serve(
        self, session: Session, read: ReadRequest, send: Send, turn: Callable[[], Awaitable[None]]
    ) -> None:
        """Serve a request that was read, as soon as its *turn* to come to the desk has come.

        What *send* raises passes through, cache faults do not. Raises DeskClosed if llama-server was
        replaced before anything was sent.
        """
        if read.prompt is not None:
            given = read.request
            read = await self._fit(session, read)
            if read.request is not given and not await self._is_still(session):
                raise DeskClosed  # that took its time
        await turn()
        async with session.launches.turn() as start:
            await self._way(session, read)(session.launches.in_turn(start, send))

    async def let_refuse(
        self, session: Session, request: GenerationRequest, send: Send, why: WillBeRefused
    ) -> None:
        """Forward what llama-server will refuse; no slot is prepared for it."""
        answer = await send(request.raw, lambda: None)
        if answer.status < 400:  # then nobody knows where it ran, and the key is good
            session.attachment.desk.table.forget_free()
            session.attachment.accepted_keys[_key_digest(request)] = True
        self._report(request, answer, Outcome.BYPASS, str(why))

    async def prompt_of(
        self, session: Session, request: GenerationRequest
    ) -> tuple[Prompt | None, str | None]:
        """Return the prompt that a request will have when it is served; None, and why, if not read."""
        try:
            await self._require_key(session, request)
            request = await self._stabilizing.rewrite(session, request)
            read = await self._read_prompt(session, request, parse_body(request.raw))
        except WillBeRefused as why:
            return None, str(why)
        return read.prompt, read.why

    async def _require_key(self, session: Session, request: GenerationRequest) -> None:
        """Raise WillBeRefused if llama-server does not take the client's key.

        Nothing else proves it: a prompt of token ids is not tokenized, and one without a key is by the
        proxy's own. A key that was taken is asked about once.
        """
        attachment, digest = session.attachment, _key_digest(request)
        if not attachment.asks_for_key or digest in attachment.accepted_keys:
            return
        try:
            is_taken = await session.upstream.takes_key(request.headers)
        except UpstreamFault:
            return  # what is wrong with llama-server, others find out
        if not is_taken:
            given = "this API key is refused" if request.headers else "an API key is needed"
            raise WillBeRefused(f"llama-server says that {given}")
        attachment.accepted_keys[digest] = True

    def _report(
        self, request: GenerationRequest, answer: Answer, outcome: Outcome, why: str | None
    ) -> None:
        is_otherwise = why == _TOKENIZED_OTHERWISE
        cause = Cause.TOKENIZED_OTHERWISE if is_otherwise else Cause.NOT_LOOKED_UP
        self._services.report.answered(request, answer, outcome, Judgement(cause), why=why)

    async def _fit(self, session: Session, read: ReadRequest) -> ReadRequest:
        """Return the request as it is, or without its oldest part if it does not fit the context."""
        if read.body is None or read.prompt is None:
            return read
        last = read

        async def read_again(shorter: GenerationRequest, body: GenerationBody) -> Prompt | None:
            nonlocal last
            last = await self._read_prompt(session, shorter, body)
            return last.prompt

        given = Fitted(read.request, read.body, read.prompt)
        fitted = await self._overflow.fit(session, given, read_again)
        return read if fitted.request is read.request else last

    def _way(self, session: Session, read: ReadRequest) -> Callable[[Send], Awaitable[object]]:
        """Return how a request is served: by its prompt, in a slot of our choice, or of llama-server's."""
        attachment, request, body = session.attachment, read.request, read.body
        # Of slots that are emptied all the time, llama-server's RAM cache makes more than we can.
        is_left_alone = attachment.clears_idle_slots and not attachment.is_caching
        if read.prompt is not None and body is not None and not is_left_alone:
            serving = SimilarRequest if request.route is Route.MESSAGES else CachedRequest
            is_current = partial(self._is_still, session)
            inquiry = Inquiry(
                self._services.journal,
                attachment,
                read.prompt,
                read.chat_body or body,
                self._services.opened_store,
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
                if answer.status == 501 and request.route in (Route.PINNED, Route.UNPINNED):
                    attachment.unsupported_paths.add(request.path)
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
    ) -> ReadRequest:
        """Return the request with what llama-server will evaluate, or why that is not looked up."""
        chat, reason = _chat_form(request.route, body)
        unread = partial(ReadRequest, request, body)
        if chat is None:
            return unread(why=reason)
        attachment = session.attachment
        try:
            shape = chat.shape(request.path)
            if session.upstream.target.model:  # a host may change requests by the name they say
                shape += f" {request.model}"
            if shape in attachment.disabled_shapes:
                return unread(why=_TOKENIZED_OTHERWISE)
            namespace = attachment.tenant_namespace(request.tenant)
            prompt = await session.reader.read(
                request.route, chat, request.headers, namespace, attachment.rule
            )
            await self._note_tenant(attachment, request.tenant)
        except Exception as fault:
            if isinstance(fault, UpstreamRefused) and fault.status in (401, 403):
                raise WillBeRefused("llama-server refuses the key") from fault
            # The request itself may be what is wrong: llama-server's own answer says so best.
            self._services.faults.record("tokenize", fault)
            return unread(why="the prompt could not be tokenized")
        if not prompt.n_tokens:
            return unread(why="empty prompt")
        return ReadRequest(request, body, replace(prompt, shape=shape), chat)

    async def _note_tenant(self, attachment: Attachment, tenant: bytes) -> None:
        """Note whose key llama-server has taken."""
        is_new = not attachment.is_one_tenant and tenant not in attachment.tenants
        if attachment.can_cache and is_new:
            await remember_tenant(self._services.store, attachment, tenant)
            attachment.note_tenants()


def _key_digest(request: GenerationRequest) -> bytes:
    """Return what tells apart the keys that requests themselves are sent with."""
    return xxhash.xxh3_128_digest(repr(sorted(request.headers.items())).encode())


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
