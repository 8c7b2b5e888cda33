"""Requests rewritten before anything else looks at them: stabilized, or cut to the context."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from copy import copy
from dataclasses import replace
from operator import itemgetter

import msgspec
import xxhash
from cachetools import LRUCache

from proxy.core import cuts
from proxy.core.messages import CONVERSATIONS, Route, list_of
from proxy.errors import CacheFault, StoreFault, UpstreamRefused, WillBeRefused
from proxy.llama.client import LlamaServer, Target
from proxy.llama.requests import GenerationBody
from proxy.serving.process import Process
from proxy.serving.request import NO_STORE, Request
from proxy.serving.services import Services
from proxy.stabilize import drops
from proxy.stabilize.model import Json, Memory, Name, RequestFacts, list_name, why_failed
from proxy.stabilize.run import BODIES, Seen, inlined_body, keeps_inlined, read_facts, stabilize

_ASK_SECONDS = 2.0
"""How long a request waits for the examination of the template; then it goes on without the result."""
_VALUE_NAME = "stabilizers"
_N_PROCESSES = 64
_SEEN_BYTES = 16 << 20
"""So many bytes of bodies are remembered."""
_SMALL_BYTES = 16 << 10
"""A smaller body counts as much, which bounds the number of conversations."""
_N_FIRST_MESSAGES = 2
"""A conversation is told from others by its first messages: most often a system prompt and a question."""


class Stabilizing:
    """Applies the stabilizers that are switched on."""

    def __init__(self, services: Services, switches: frozenset[Name]) -> None:
        self._services = services
        self._switches = switches
        self._memory = self._remembered()
        self._seen = LRUCache[bytes, tuple[Seen, int]](_SEEN_BYTES, getsizeof=itemgetter(1))
        self._facts = LRUCache[tuple[Target, str], asyncio.Task[RequestFacts]](_N_PROCESSES)

    async def rewrite(self, process: Process, request: Request) -> None:
        """Apply the stabilizers to a request; it stays as it is if none applies."""
        route, body = request.route, request.body
        if route not in CONVERSATIONS or body is None or not self._switches:
            return
        facts = await self._facts_of(process)
        facts = replace(facts, session=request.session, tenant=request.tenant.hex())
        key = _conversation_key(request, body)
        seen, _ = self._seen.get(key, (Seen(), 0))
        result = stabilize(route, body.fields, self._memory, self._switches, facts, seen)
        for failed, reason in result.failures.items():
            self._services.faults.record("stabilize", CacheFault(f"{failed}: {reason}"))
        if result.lessons and NO_STORE not in request.wishes:  # lessons are written to the index
            self._memory.learn(result.lessons)
        with suppress(ValueError):  # larger than _SEEN_BYTES
            self._seen[key] = result.seen, max(len(body.raw), _SMALL_BYTES)
        if result.body is body.fields:
            if route is Route.CHAT:  # its messages are those of the chat form
                request.encoded = result.seen.messages
            return
        names = tuple(name.value for name in result.changed_by)
        for name in names:
            self._services.metrics.stabilized_requests.labels(name).inc()
        request.rewrite(result.body, *names)

    def note_calls(self, request: Request) -> None:
        """Remember the tool calls of an answer, as the model made them, if they will be restored."""
        is_wanted = Name.RESTORE_TOOL_ARGUMENTS in self._switches
        if not is_wanted or request.answer is None or NO_STORE in request.wishes:
            return
        tenant = request.tenant.hex()
        for call in request.answer.calls:
            self._memory.remember_call(call.call_id, call.name, call.raw_arguments, tenant=tenant)

    async def keep(self) -> None:
        """Write what was learned to the index; without it the next start's prompts would differ."""
        if len(self._memory):
            with suppress(StoreFault):  # also where no store is open
                await self._services.store.put_value(_VALUE_NAME, self._memory.to_bytes())

    def _remembered(self) -> Memory:
        store = self._services.opened_store
        if store is not None and (data := store.index.value(_VALUE_NAME, bytes)):
            with suppress(ValueError):
                return Memory.from_bytes(data)
        return Memory()

    async def _facts_of(self, process: Process) -> RequestFacts:
        """Return the facts about this llama-server's template; empty facts if it cannot tell in time."""
        key = process.upstream.target, process.id
        if key not in self._facts:
            self._facts[key] = self._services.tasks.start(self._ask(process.upstream))
        asked = self._facts[key]
        if not asked.done():
            await asyncio.wait({asked}, timeout=_ASK_SECONDS)
        return asked.result() if asked.done() else RequestFacts()

    async def _ask(self, upstream: LlamaServer) -> RequestFacts:
        with self._services.faults.suppressed("stabilize"):
            renderings = {probe: await _render(upstream, body) for probe, body in BODIES.items()}
            facts = read_facts(renderings)
            inlined = inlined_body(facts)
            if inlined is None or keeps_inlined(await _render(upstream, inlined), renderings):
                return facts
            return replace(facts, reasoning_marks=None)
        return RequestFacts()


async def _render(upstream: LlamaServer, body: dict[str, object]) -> str | None:
    """Return a rendering, None if the template refuses the body; raises UpstreamFault."""
    try:
        return await upstream.apply_template(msgspec.json.encode(body), {})
    except UpstreamRefused as refusal:
        if refusal.status in (400, 500):
            return None
        raise


def _conversation_key(request: Request, body: GenerationBody, model: str = "") -> bytes:
    """Return a key for a conversation: a digest of its tenant, session, model and first messages."""
    begins = list_of(body.fields.get(list_name(request.route)))[:_N_FIRST_MESSAGES]
    told = [request.route, request.tenant, request.session, model, begins]
    return xxhash.xxh3_128_digest(msgspec.json.encode(told))


# The setting context_overflow: the proxy shortens a conversation that has outgrown the context. Without
# the setting llama-server refuses the prompt, and clients know how to handle that.


REWRITE = "context_overflow"
_N_CONVERSATIONS = 1024
_N_MESSAGES = 16384

Read = Callable[[Request], Awaitable[None]]


class Overflow:
    """Leaves out the oldest messages of conversations that do not fit, in large steps."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._counts: LRUCache[bytes, int] = LRUCache(_N_MESSAGES)
        self._reached: LRUCache[bytes, int] = LRUCache(_N_CONVERSATIONS)

    def n_room(self, process: Process, request: Request) -> int:
        """Return how many tokens a prompt may have without being shortened."""
        if not request.body:
            return process.n_ctx
        return cuts.room_for_prompt(process.n_ctx, drops.wanted_tokens(request.body.fields))

    async def fit(self, process: Process, request: Request, read: Read) -> bool:
        """Shorten a request that does not fit; return whether the request was shortened.

        *read* reads the prompt of a shortened request.
        """
        if request.route not in CONVERSATIONS or not request.body or not request.prompt:
            return False
        n_room = self.n_room(process, request)
        if request.prompt.n_tokens <= n_room:
            return False
        try:
            conversation = drops.conversation_of(request.route, request.body.fields)
            parts = await self._count(process.upstream, conversation, request)
            places = cuts.places_to_cut(parts, cuts.step_of(process.n_ctx, n_room))
            key = _conversation_key(request, request.body, process.upstream.target.model)
            n_over, reached = request.prompt.n_tokens - n_room, self._reached.get(key, 0)
            for index in range(cuts.first_to_try(places, n_over, reached), len(places)):
                shorter = copy(request)
                first, asked = places[index].first, places[index].asked
                fields = drops.shortened(request.route, request.body.fields, first, asked)
                shorter.rewrite(fields, REWRITE)
                await read(shorter)
                if shorter.prompt is None:
                    return False
                if shorter.prompt.n_tokens <= n_room:
                    self._reached[key] = index
                    self._services.metrics.shortened_requests.inc()
                    vars(request).update(vars(shorter))
                    return True
        except WillBeRefused:
            raise
        except Exception as error:
            self._services.faults.record("stabilize", CacheFault(f"{REWRITE}: {why_failed(error)}"))
        return False

    async def _count(
        self, upstream: LlamaServer, conversation: list[Json], request: Request
    ) -> list[cuts.MessageSize]:
        """Return the size of each message in tokens, without the text that a template adds."""
        parts: list[cuts.MessageSize] = []
        for before, message in zip([None, *conversation], conversation, strict=False):
            text = drops.rendered_text(message)
            key = xxhash.xxh3_128_digest(request.namespace + text.encode())
            if key not in self._counts:
                tokens = await upstream.tokenize(text, request.keys, add_special=False)
                self._counts[key] = len(tokens)
            begins = drops.begins_turn(message), drops.begins_step(message, before)
            parts.append(cuts.MessageSize(self._counts[key], *begins))
        return parts
