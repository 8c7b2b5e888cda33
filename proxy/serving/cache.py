"""Generation requests to one llama-server: each takes a lease, and uses the cache if that helps."""

import asyncio
from dataclasses import replace
from functools import partial

from proxy.core.messages import BYTES_PER_TOKEN, Route
from proxy.core.model import Prompt, Title
from proxy.core.residency import choose_slot_for_brief, slot_to_extend
from proxy.core.saving import is_expected_to_pay
from proxy.core.slots import Known
from proxy.errors import UpstreamRefused, WillBeRefused, replaced
from proxy.explain.report import TOKENIZED_OTHERWISE
from proxy.explain.views import OWN_CLIENT
from proxy.llama import requests
from proxy.serving import fetching, planning
from proxy.serving.cached import CachedRequest
from proxy.serving.placement import SimilarRequest
from proxy.serving.process import Process
from proxy.serving.request import NO_READ, Request
from proxy.serving.rewriting import Overflow, Stabilizing
from proxy.serving.tenants import admit, note_taken, note_tenant
from proxy.serving.uncached import UncachedRequest

_MAX_BRIEF_BYTES = 768
"""The body of a chat of some 100 tokens."""
_LOOKING_SECONDS = 0.05
"""How long it takes to read a prompt, to plan, and to restore and save a small state."""
BRIEF = "too short: looking it up costs more than it could spare"


class Cache:
    """Serves generation requests by a llama-server process, from the cache where that helps."""

    def __init__(self, stabilizing: Stabilizing, overflow: Overflow | None) -> None:
        """*overflow* shortens prompts that do not fit; without it llama-server refuses them."""
        self._stabilizing = stabilizing
        self._overflow = overflow

    async def read(self, process: Process, request: Request, *, may_extend: bool = True) -> None:
        """Rewrite a request as it is to be served, and read its prompt.

        A request that *may_extend* what a slot holds, and plainly does, is read later, beside its answer.
        Raises WillBeRefused, or ServerAway if llama-server was replaced.
        """
        request.begin(process.server_name, process.tenant_namespace(request.tenant))
        await admit(process, request)
        await self._stabilizing.rewrite(process, request)
        if request.path in process.unsupported_paths:
            raise WillBeRefused("llama-server does not support it")
        if request.body is None and request.is_json and not requests.is_too_deep(request.raw):
            raise WillBeRefused("body is not a JSON object")
        if self._is_brief(process, request):
            request.is_brief, request.why = True, BRIEF
            process.journal.note_chat(request)
        elif not (may_extend and await self._extends(process, request)):
            await self._read_now(process, request)

    def _is_brief(self, process: Process, request: Request) -> bool:
        """Return whether a chat is so short that a lookup costs more than it could spare.

        Such a chat takes a slot only if that slot holds nothing of worth.
        """
        n_bytes, rates = len(request.raw), process.rates
        if n_bytes > _MAX_BRIEF_BYTES or request.wishes or request.warms:
            return False
        if not requests.honours_id_slot(request.route):
            return False
        seconds = rates.evaluation_seconds(0, n_bytes // BYTES_PER_TOKEN)
        if rates.is_measured and seconds > _LOOKING_SECONDS:
            return False
        if not self._to_chat_form(process, request) or not (conversation := request.conversation):
            return False
        return choose_slot_for_brief(process.slots, conversation, request.namespace) is not None

    async def _extends(self, process: Process, request: Request) -> bool:
        """Return whether a request plainly goes on with what a slot holds, and note with what."""
        if not self._to_chat_form(process, request) or not (conversation := request.conversation):
            return False
        rule = process.rule
        if NO_READ in request.wishes or (rule.is_end_only and _is_wanted(request)):
            return False
        # A slot that has just answered this conversation: its content is known sooner than our prompt.
        settling = [task for digests, task in process.settling if conversation.n_behind(digests)]
        if settling:
            await asyncio.wait(settling)
        n_room = self._overflow.n_room(process, request) if self._overflow else process.n_ctx
        pays = partial(is_expected_to_pay, process.sizes, process.rates)
        is_pinned = requests.honours_id_slot(request.route)
        slots, namespace = process.slots, request.namespace
        slot = slot_to_extend(
            conversation, slots, rule, namespace, n_room, pays=pays, is_pinned=is_pinned
        )
        if slot is None or not isinstance(content := slot.content, Known):
            return False
        # Only a stream can be withdrawn if another process answers.
        if not request.wants_stream and not await process.is_current():
            raise replaced()
        prompt = Prompt(content.tokens, request.namespace, shape=request.shape)
        if rule.is_end_only and not planning.has_file(process, prompt, content.n_saved):
            return False
        request.extends, request.prompt = content, prompt
        return True

    async def _read_now(
        self, process: Process, request: Request, *, was_looked_at: bool = False
    ) -> None:
        """Read a prompt; raises WillBeRefused, or ServerAway if llama-server was replaced.

        If llama-server *was_looked_at* just before, it is not looked at again.
        """
        request.extends = None
        reading = self._read_prompt(process, request)
        if was_looked_at:
            return await reading
        _, is_current = await asyncio.gather(reading, process.is_current())
        if not is_current:
            raise replaced()

    async def take_over(self, process: Process, request: Request) -> None:
        """Prepare a request, which was read for another llama-server, to be served by this one.

        The prompt is read again only where the namespace is another. Raises as `read` does.
        """
        prompt, namespace = request.prompt, process.tenant_namespace(request.tenant)
        is_disabled = prompt and prompt.shape in process.disabled_shapes
        if request.extends or is_disabled or (prompt and prompt.namespace != namespace):
            return await self.read(process, request)
        if not await process.is_current():
            raise replaced()
        await note_tenant(process, request)
        request.server, request.namespace = process.server_name, namespace

    async def serve(self, process: Process, request: Request) -> None:
        """Serve a request that was read, in one of three ways.

        1. Its prompt is known: in the slot that the plan chooses. llama-server drops the `id_slot` of
           /v1/messages, so that there the chosen slot is also made the most similar one.
        2. Its prompt is not known, but llama-server honours `id_slot`: in a slot of the proxy's choice.
        3. Otherwise in a slot of llama-server's choice.

        What sending raises passes through, cache faults do not. Raises ServerAway if llama-server was
        replaced before anything was sent.
        """
        has_waited = False
        if self._overflow:  # shortening takes a while
            read = partial(self._read_prompt, process)
            has_waited = await self._overflow.fit(process, request, read)
        if process.tier:
            has_waited |= await fetching.fetch_first(process.tier, process, request)
        if has_waited and not await process.is_current():
            raise replaced()
        # Before a whole answer llama-server was looked at (`_extends`), before a stream it was not.
        read_now = partial(self._read_now, process, request, was_looked_at=not request.wants_stream)
        try:
            async with process.launches.turn() as turn:
                if request.extends is not None and not process.can_extend(request.extends):
                    await self._read_now(process, request)
                # Where slots are emptied all the time, llama-server's RAM cache does better than the proxy.
                is_left_alone = process.clears_idle_slots and not process.is_caching
                is_pinned = requests.honours_id_slot(request.route) and not is_left_alone
                if request.prompt is not None and not is_left_alone:
                    serving = SimilarRequest if request.route is Route.MESSAGES else CachedRequest
                    await serving(process, request, turn, read_now).serve()
                elif request.body is None or not is_pinned or request.n_completions > 1:
                    await UncachedRequest(process, request, turn).serve_unpinned()
                else:
                    await UncachedRequest(process, request, turn).serve_pinned(request.body)
        except WillBeRefused as why:
            # The slot that it extends was taken meanwhile, so its prompt was read only now.
            await self.let_refuse(process, request, why)

    async def let_refuse(self, process: Process, request: Request, why: WillBeRefused) -> None:
        """Forward a request that llama-server will refuse; no slot is prepared for it."""
        answer = await request.send(process.upstream, request.raw)
        if answer.status < 400:  # llama-server took it: the key is good, and its slot is not known
            process.slots.forget_free()
            note_taken(process, request)
        process.report.not_looked_up(request, str(why))

    async def _read_prompt(self, process: Process, request: Request) -> None:
        """Read the tokens that llama-server will evaluate; without a prompt `request.why` says why."""
        request.prompt = None
        if not self._to_chat_form(process, request) or request.chat is None:
            return
        process.journal.note_chat(request)
        try:
            prompt = await process.reader.read(request, request.chat, process.rule)
        except Exception as fault:
            if isinstance(fault, UpstreamRefused) and fault.status in (401, 403):
                raise WillBeRefused("llama-server refuses the key") from fault
            # The request itself may be wrong: llama-server's own answer says so best.
            process.faults.record("tokenize", fault)
            request.why = "the prompt could not be tokenized"
            return
        if not prompt.n_tokens:
            request.why = "empty prompt"
            return
        digests = request.conversation.digests if request.conversation else b""
        title = Title(process.journal.shown(request.words), request.client)
        prompt = replace(prompt, shape=request.shape, conversation=digests, title=title)
        request.prompt = replace(prompt, is_wanted=_is_wanted(request))

    def _to_chat_form(self, process: Process, request: Request) -> bool:
        """Put a request into the chat form; return False, and set `why`, if its prompt cannot be read.

        Raises WillBeRefused if it has images or sounds that the model does not take.
        """
        request.why = None
        if request.chat is None:  # otherwise the body has not changed since the last call
            request.chat, request.why = requests.chat_form(request.route, request.body)
            if request.chat is None:
                return False
            request.shape = request.chat.shape(request.path)
            if process.upstream.target.model:  # a host may change requests by their model's name
                request.shape += f" {request.model}"
            if request.route is not Route.COMPLETION:
                request.conversation = requests.conversation_of(request.chat, request.encoded)
                if request.chat.has_media:  # more is evaluated than its messages render
                    if not process.takes_media:
                        raise WillBeRefused("the model takes neither images nor sounds")
                    process.journal.note_chat(request)
                    request.conversation = None
        if request.shape in process.disabled_shapes:
            request.why = TOKENIZED_OTHERWISE
            return False
        return True


def _is_wanted(request: Request) -> bool:
    """Return whether a request is there to have its prompt saved."""
    return request.warms or request.client == OWN_CLIENT
