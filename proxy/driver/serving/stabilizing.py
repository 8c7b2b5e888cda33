"""The stabilizers at work: requests are rewritten before anything else looks at them.

Owns: what each llama-server's template does (asked once for each process), and the memory of earlier
requests, which outlives this process in the index. What cannot be rewritten goes on as it came.
"""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

import msgspec
from cachetools import LRUCache

from proxy.driver.requests import GenerationRequest
from proxy.driver.services import Shared
from proxy.driver.session import Session
from proxy.errors import StabilizerFailed, StoreFault, UpstreamFault, UpstreamRefused
from proxy.stabilize.calls_made import CallMade
from proxy.stabilize.effect import Effect
from proxy.stabilize.memory import Memory
from proxy.stabilize.model import Facts, Form, Stabilized, UnknownShape
from proxy.stabilize.names import Name
from proxy.stabilize.stabilizing import stabilize
from proxy.stabilize.template_facts import BODIES, inlined_body, keeps_inlined, read_facts
from proxy.upstream.bodies import GenerationBody, parse_body
from proxy.upstream.llama_server import LlamaServer
from proxy.upstream.routes import Route
from proxy.upstream.target import Target

FORMS = {
    Route.CHAT: Form.CHAT,
    Route.MESSAGES: Form.ANTHROPIC,
    Route.RESPONSES: Form.RESPONSES,
}
"""The API forms that stabilizers know, by route."""
_ASK_SECONDS = 2.0
"""So long a request waits for what the template does; after that it goes on as if nothing were known."""
_VALUE_NAME = "stabilizers"
_N_PROCESSES = 64
_CACHE_KEYS = ("prompt_cache_key", "promptCacheKey")
"""OpenAI's name, and OpenCode's for other providers."""


class Stabilizing:
    """Applies the stabilizers that are switched on."""

    def __init__(self, services: Shared, switches: frozenset[Name]) -> None:
        self._services = services
        self._switches = switches
        self._memory = self._remembered()
        self._effect = Effect()
        self._facts: LRUCache[tuple[Target, str], asyncio.Task[Facts]] = LRUCache(_N_PROCESSES)

    async def rewrite(self, session: Session, request: GenerationRequest) -> GenerationRequest:
        """Return the request as it is to be served: the same one if nothing applies."""
        form = FORMS.get(request.route)
        body = parse_body(request.raw) if form and self._switches else None
        if form is None or body is None:
            return request
        known = await self._facts_of(session)
        facts = replace(
            known, session=request.session or _cache_key(body), tenant=request.tenant.hex()
        )
        result = stabilize(form, body.fields, self._memory, self._switches, facts)
        for failure in result.failures:
            self._services.faults.record("stabilize", StabilizerFailed(str(failure)))
        self._memory.learn(result.lessons)
        self._count_effect(form, body, result, facts)
        if result.body is body.fields:
            return request
        names = tuple(dict.fromkeys(change.stabilizer.value for change in result.changes))
        for name in names:
            self._services.metrics.stabilized.labels(name).inc()
        return replace(request, raw=msgspec.json.encode(result.body), rewrites=names)

    def _count_effect(
        self, form: Form, body: GenerationBody, result: Stabilized, facts: Facts
    ) -> None:
        try:
            effect = self._effect.of(form, body.fields, result, facts.tenant)
        except UnknownShape:
            return
        except Exception as error:  # nobody's request fails for a count
            failure = StabilizerFailed(f"effect: {type(error).__name__}")
            self._services.faults.record("stabilize", failure)
            return
        if effect is not None:
            name, n_characters = effect
            self._services.metrics.stabilized_characters.labels(name).inc(n_characters)

    def note_calls(self, request: GenerationRequest, calls: Iterable[CallMade]) -> None:
        """Remember the tool calls of an answer, as the model made them."""
        tenant = request.tenant.hex()
        for call in calls:
            self._memory.remember_call(call.call_id, call.name, call.raw_arguments, tenant=tenant)

    async def keep(self) -> None:
        """Write what was learned to the index; without it the next start's prompts would differ."""
        store = self._services.opened_store
        if store is not None and len(self._memory):
            with suppress(StoreFault):
                await store.put_value(_VALUE_NAME, self._memory.to_bytes())

    def _remembered(self) -> Memory:
        store = self._services.opened_store
        data = store.index.value(_VALUE_NAME, bytes) if store is not None else None
        try:
            return Memory.from_bytes(data) if data else Memory()
        except msgspec.DecodeError:
            return Memory()

    async def _facts_of(self, session: Session) -> Facts:
        """Return what the template of this llama-server does; nothing is known if it cannot be asked."""
        key = session.upstream.target, session.attachment.process_id
        if key not in self._facts:
            self._facts[key] = self._services.tasks.start(self._ask(session.upstream))
        asked = self._facts[key]
        await asyncio.wait({asked}, timeout=_ASK_SECONDS)
        return asked.result() if asked.done() else Facts()

    async def _ask(self, upstream: LlamaServer) -> Facts:
        try:
            renderings = {probe: await _render(upstream, body) for probe, body in BODIES.items()}
            facts = read_facts(renderings)
            inlined = inlined_body(facts)
            if inlined is None or keeps_inlined(await _render(upstream, inlined), renderings):
                return facts
            return replace(facts, reasoning_marks=None)
        except (UpstreamFault, ValueError, KeyError) as fault:
            self._services.faults.record("stabilize", fault)
            return Facts()


async def _render(upstream: LlamaServer, body: dict[str, object]) -> str | None:
    """Return a rendering, None if the template refuses the body; raises UpstreamFault."""
    try:
        return await upstream.apply_template(msgspec.json.encode(body), {})
    except UpstreamRefused as refusal:
        if refusal.status in (400, 500):
            return None
        raise


def _cache_key(body: GenerationBody) -> str:
    """Return what a client without a header for it calls its session by."""
    keys = (body.fields.get(name) for name in _CACHE_KEYS)
    return next((key for key in keys if isinstance(key, str)), "")
