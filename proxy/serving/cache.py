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
from proxy.servers.attachment import remember_tenant
from proxy.servers.server import Lifecycle
from proxy.serving.cached import CachedRequest
from proxy.serving.desk import DeskClosed
from proxy.serving.placement import SimilarRequest, UnpinnedRequest, serve_pinned
from proxy.serving.process import Process, Services
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
        lifecycle: Lifecycle,
        stabilizing: Stabilizing,
        overflow: Overflow,
    ) -> None:
        self._services = services
        self._lifecycle = lifecycle
        self._stabilizing = stabilizing
        self._overflow = overflow

    async def read(self, process: Process, request: GenerationRequest) -> ReadRequest:
        """Rewrite a request as it is to be served, and read its prompt.

        Raises WillBeRefused, or DeskClosed if llama-server was replaced.
        """
        await self._require_key(process, request)
        if process.upstream.target.model:
            await process.examination(EXAMINATION_SECONDS)
        request = await self._stabilizing.rewrite(process, request)
        request = replace(request, server=self._services.where) if self._services.where else request
        body = parse_body(request.raw)
        if request.path in process.unsupported_paths:
            raise WillBeRefused("llama-server does not support it")
        if body is None and not reads_forms(request.path) and is_no_json_object(request.raw):
            raise WillBeRefused("body is not a JSON object")
        read, is_current = await asyncio.gather(
            self._read_prompt(process, request, body), self._lifecycle.is_still(process)
        )
        if not is_current:
            raise DeskClosed
        return read

    async def take_over(self, process: Process, read: ReadRequest) -> ReadRequest:
        """Return a request that was read for another llama-server as this one is to serve it.

        Only one with another namespace has to read it again. Raises as `read` does.
        """
        prompt = read.prompt
        is_same = (
            prompt is None
            or prompt.namespace == process.tenant_namespace(read.request.tenant)
            and prompt.shape not in process.disabled_shapes
        )
        if not is_same:
            return await self.read(process, read.request)
        if not await self._lifecycle.is_still(process):
            raise DeskClosed
        if prompt is not None:
            await self._note_tenant(process, read.request.tenant)
        return replace(read, request=replace(read.request, server=self._services.where))

    async def serve(
        self, process: Process, read: ReadRequest, send: Send, turn: Callable[[], Awaitable[None]]
    ) -> None:
        """Serve a request that was read, as soon as its *turn* to come to the desk has come.

        What *send* raises passes through, cache faults do not. Raises DeskClosed if llama-server was
        replaced before anything was sent.
        """
        if read.prompt is not None:
            given = read.request
            read = await self._fit(process, read)
            if read.request is not given and not await self._lifecycle.is_still(process):
                raise DeskClosed  # that took its time
        await turn()
        async with process.launches.turn() as start:
            await self._way(process, read)(process.launches.in_turn(start, send))

    async def serve_unplaced(self, request: GenerationRequest, send: Send) -> None:
        """Forward without a slot of our choice: llama-server is not attached."""
        answer = None
        try:
            answer = await send(request.raw, lambda: None)
        finally:
            is_refused = answer is not None and answer.status in (401, 403)
            if self._lifecycle.current and not is_refused:
                self._lifecycle.current.desk.table.forget_free()
        self._report(request, answer, Outcome.DEGRADED, "llama-server is not attached")

    async def let_refuse(
        self, process: Process, request: GenerationRequest, send: Send, why: WillBeRefused
    ) -> None:
        """Forward what llama-server will refuse; no slot is prepared for it."""
        answer = await send(request.raw, lambda: None)
        if answer.status < 400:  # then nobody knows where it ran, and the key is good
            process.slots.forget_free()
            process.accepted_keys[_key_digest(request)] = True
        self._report(request, answer, Outcome.BYPASS, str(why))

    async def prompt_of(
        self, process: Process, request: GenerationRequest
    ) -> tuple[Prompt | None, str | None]:
        """Return the prompt that a request will have when it is served; None, and why, if not read."""
        try:
            await self._require_key(process, request)
            request = await self._stabilizing.rewrite(process, request)
            read = await self._read_prompt(process, request, parse_body(request.raw))
        except WillBeRefused as why:
            return None, str(why)
        return read.prompt, read.why

    async def _require_key(self, process: Process, request: GenerationRequest) -> None:
        """Raise WillBeRefused if llama-server does not take the client's key.

        Nothing else proves it: a prompt of token ids is not tokenized, and one without a key is by the
        proxy's own. A key that was taken is asked about once.
        """
        digest = _key_digest(request)
        if not process.asks_for_key or digest in process.accepted_keys:
            return
        try:
            is_taken = await process.upstream.takes_key(request.headers)
        except UpstreamFault:
            return  # what is wrong with llama-server, others find out
        if not is_taken:
            given = "this API key is refused" if request.headers else "an API key is needed"
            raise WillBeRefused(f"llama-server says that {given}")
        process.accepted_keys[digest] = True

    def _report(
        self, request: GenerationRequest, answer: Answer, outcome: Outcome, why: str | None
    ) -> None:
        is_otherwise = why == _TOKENIZED_OTHERWISE
        cause = Cause.TOKENIZED_OTHERWISE if is_otherwise else Cause.NOT_LOOKED_UP
        self._services.report.answered(request, answer, outcome, Judgement(cause), why=why)

    async def _fit(self, process: Process, read: ReadRequest) -> ReadRequest:
        """Return the request as it is, or without its oldest part if it does not fit the context."""
        if read.body is None or read.prompt is None:
            return read
        last = read

        async def read_again(shorter: GenerationRequest, body: GenerationBody) -> Prompt | None:
            nonlocal last
            last = await self._read_prompt(process, shorter, body)
            return last.prompt

        given = Fitted(read.request, read.body, read.prompt)
        fitted = await self._overflow.fit(process, given, read_again)
        return read if fitted.request is read.request else last

    def _way(self, process: Process, read: ReadRequest) -> Callable[[Send], Awaitable[object]]:
        """Return how a request is served: by its prompt, in a slot of our choice, or of llama-server's."""
        request, body = read.request, read.body
        # Of slots that are emptied all the time, llama-server's RAM cache makes more than we can.
        is_left_alone = process.clears_idle_slots and not process.is_caching
        if read.prompt is not None and body is not None and not is_left_alone:
            serving = SimilarRequest if request.route is Route.MESSAGES else CachedRequest
            is_current = partial(self._lifecycle.is_still, process)
            inquiry = Inquiry(
                self._services.journal,
                process,
                read.prompt,
                read.chat_body or body,
                self._services.opened_store,
            )
            cached = serving(process, request, body, read.prompt, inquiry, is_current)
            return cached.serve

        async def serve_uncached(send: Send) -> None:
            async def send_and_report(
                raw: bytes, on_start: Callable[[], None], n_found: int | None = None
            ) -> Answer:
                # At once: clients that have their answer hang up, and what is left to do is cut short.
                answer = await send(raw, on_start, n_found)
                if answer.status == 501 and request.route in (Route.PINNED, Route.UNPINNED):
                    process.unsupported_paths.add(request.path)
                self._report(request, answer, Outcome.BYPASS, read.why or "nothing is cached")
                return answer

            is_pinned = body is not None and honours_id_slot(request.route) and not is_left_alone
            if body is None or not is_pinned or n_completions(body) > 1:
                unpinned = UnpinnedRequest(process, request, body)
                await unpinned.serve(send_and_report)
            else:
                await serve_pinned(process, request, body, send_and_report)

        return serve_uncached

    async def _read_prompt(
        self, process: Process, request: GenerationRequest, body: GenerationBody | None
    ) -> ReadRequest:
        """Return the request with what llama-server will evaluate, or why that is not looked up."""
        chat, reason = _chat_form(request.route, body)
        unread = partial(ReadRequest, request, body)
        if chat is None:
            return unread(why=reason)
        try:
            shape = chat.shape(request.path)
            if process.upstream.target.model:  # a host may change requests by the name they say
                shape += f" {request.model}"
            if shape in process.disabled_shapes:
                return unread(why=_TOKENIZED_OTHERWISE)
            namespace = process.tenant_namespace(request.tenant)
            prompt = await process.reader.read(
                request.route, chat, request.headers, namespace, process.rule
            )
            await self._note_tenant(process, request.tenant)
        except Exception as fault:
            if isinstance(fault, UpstreamRefused) and fault.status in (401, 403):
                raise WillBeRefused("llama-server refuses the key") from fault
            # The request itself may be what is wrong: llama-server's own answer says so best.
            self._services.faults.record("tokenize", fault)
            return unread(why="the prompt could not be tokenized")
        if not prompt.n_tokens:
            return unread(why="empty prompt")
        return ReadRequest(request, body, replace(prompt, shape=shape), chat)

    async def _note_tenant(self, process: Process, tenant: bytes) -> None:
        """Note whose key llama-server has taken."""
        is_new = not process.is_one_tenant and tenant not in process.tenants
        if process.can_cache and is_new:
            await remember_tenant(self._services.store, process, tenant)
            process.note_tenants()


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
