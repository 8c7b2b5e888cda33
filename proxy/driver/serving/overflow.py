"""Conversations that have outgrown the context, made to fit: the setting context_overflow.

Owns: what each message counts, how far each conversation is cut. Without it llama-server refuses such a
prompt, which clients know how to answer.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import msgspec
import xxhash
from cachetools import LRUCache

from proxy.core.model import Prompt
from proxy.core.planning.overflow import (
    Begins,
    Part,
    Place,
    first_to_try,
    places_to_cut,
    room_for_prompt,
    step_of,
)
from proxy.driver.requests import GenerationRequest
from proxy.driver.services import Shared
from proxy.driver.serving.stabilizing import FORMS
from proxy.driver.session import Session
from proxy.errors import StabilizerFailed, UpstreamFault
from proxy.stabilize.model import Form, Json, UnknownShape
from proxy.stabilize.shortening import (
    begins_step,
    begins_turn,
    conversation_of,
    rendered_text,
    shortened,
    wanted_tokens,
)
from proxy.upstream.bodies import GenerationBody
from proxy.upstream.llama_server import LlamaServer

REWRITE = "context_overflow"
_N_CONVERSATIONS = 1024
_N_MESSAGES = 16384
_N_COUNTED_AT_ONCE = 8

Read = Callable[[GenerationRequest, GenerationBody], Awaitable[Prompt | None]]


@dataclass(frozen=True, slots=True)
class Fitted:
    """A request as it is to be served."""

    request: GenerationRequest
    body: GenerationBody
    prompt: Prompt


class Overflow:
    """Leaves out what is oldest of conversations that do not fit, in large steps."""

    def __init__(self, services: Shared, *, is_on: bool) -> None:
        self._services = services
        self._is_on = is_on
        self._counts: LRUCache[bytes, int] = LRUCache(_N_MESSAGES)
        self._reached: LRUCache[bytes, int] = LRUCache(_N_CONVERSATIONS)

    async def fit(self, session: Session, given: Fitted, read: Read) -> Fitted:
        """Return a request that fits, the same one if it does already or cannot be made to.

        *read* tells the prompt of a changed one.
        """
        form, n_ctx = FORMS.get(given.request.route), session.attachment.n_ctx
        if not self._is_on or form is None:
            return given
        n_room = room_for_prompt(n_ctx, wanted_tokens(given.body.fields))
        if given.prompt.n_tokens <= n_room:
            return given
        try:
            conversation = conversation_of(form, given.body.fields)
            parts = await self._count(session.upstream, conversation, given.request)
            places = places_to_cut(parts, step_of(n_ctx, n_room))
            key = _key_of(session.upstream, given.request, conversation)
            return await self._shorten(form, given, read, places, key, n_room) or given
        except UpstreamFault as fault:
            self._services.faults.record("stabilize", fault)
        except UnknownShape as fault:
            self._services.faults.record("stabilize", StabilizerFailed(f"{REWRITE}: {fault}"))
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            failure = StabilizerFailed(f"{REWRITE}: {type(error).__name__}")
            self._services.faults.record("stabilize", failure)
        return given

    async def _shorten(
        self,
        form: Form,
        given: Fitted,
        read: Read,
        places: list[Place],
        key: bytes,
        n_room: int,
    ) -> Fitted | None:
        n_over = given.prompt.n_tokens - n_room
        for index in range(first_to_try(places, n_over, self._reached.get(key, 0)), len(places)):
            fields = shortened(form, given.body.fields, places[index].first, places[index].asked)
            raw = msgspec.json.encode(fields)
            rewrites = (*given.request.rewrites, REWRITE)
            request = replace(given.request, raw=raw, rewrites=rewrites)
            body = GenerationBody(raw, fields)
            prompt = await read(request, body)
            if prompt is None:
                return None
            if prompt.n_tokens <= n_room:
                self._reached[key] = index
                metrics = self._services.metrics
                metrics.shortened_requests.inc()
                metrics.left_out_tokens.inc(given.prompt.n_tokens - prompt.n_tokens)
                return Fitted(request, body, prompt)
        return None

    async def _count(
        self, upstream: LlamaServer, conversation: list[Json], request: GenerationRequest
    ) -> list[Part]:
        """Return the messages with their own tokens, whatever a template adds to them."""
        parts: list[Part] = []
        for start in range(0, len(conversation), _N_COUNTED_AT_ONCE):
            some = conversation[start : start + _N_COUNTED_AT_ONCE]
            counts = await asyncio.gather(
                *(self._n_tokens(upstream, message, request) for message in some)
            )
            for index, n_tokens in enumerate(counts, start):
                before = conversation[index - 1] if index else None
                parts.append(Part(_begins(conversation[index], before), n_tokens))
        return parts

    async def _n_tokens(
        self, upstream: LlamaServer, message: Json, request: GenerationRequest
    ) -> int:
        text = rendered_text(message)
        key = xxhash.xxh3_128_digest(f"{upstream.target.model}\0{text}".encode())
        if key not in self._counts:
            tokens = await upstream.tokenize(text, request.headers, add_special=False)
            self._counts[key] = len(tokens)
        return self._counts[key]


def _begins(message: Json, before: Json | None) -> Begins:
    if begins_turn(message):
        return Begins.TURN
    return Begins.STEP if begins_step(message, before) else Begins.NOTHING


def _key_of(upstream: LlamaServer, request: GenerationRequest, conversation: list[Json]) -> bytes:
    """Return what tells a conversation from others: with whom, who leads it, and how it began."""
    model = upstream.target.model
    began = msgspec.json.encode([model, request.session, rendered_text(conversation[:1])])
    return xxhash.xxh3_128_digest(request.tenant + began)
