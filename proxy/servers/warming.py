"""Headers that are evaluated and kept before the first user needs them.

A warming request is served like any request, so that it is rewritten, planned and confirmed; then its
slot is saved at once, and as a header, which no later state makes needless. A request can also be made
again from the journal. The journal has its tokens, but not its body: the tokens are evaluated as a bare
prompt, in the namespace of the tenant that sent them first, so that its next request finds the state.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import aiohttp

from proxy.core.cuts import SLACK_TOKENS
from proxy.core.messages import Route
from proxy.core.model import Checkpoint, CheckpointKind, Prompt, Rule, SlotId
from proxy.core.plan import most_useful
from proxy.core.slots import shared_tokens
from proxy.core.tokens import Namespace, TokenIds
from proxy.errors import ProxyError, UpstreamFault, UpstreamRefused
from proxy.explain.views import OWN_CLIENT, Explanation
from proxy.llama.answers import Answer, AnswerReader
from proxy.llama.client import LlamaServer
from proxy.llama.connection import away, end_to_end, read_most
from proxy.llama.requests import tokens_request
from proxy.servers.pool import Pool
from proxy.servers.server import Server
from proxy.serving.process import Process
from proxy.serving.request import OnStart, Request
from proxy.serving.services import Services

_PATH = "/completion"
_LOOK_SECONDS = 0.25

OnProgress = Callable[..., Awaitable[None]]
"""Is told that `n_done` tokens are done, of `n_tokens`."""


class NotWarmed(ProxyError):
    """A header could not be evaluated or is not kept; the message says why."""

    status = 404


class Warming:
    """Warms headers."""

    def __init__(self, shared: Services, pool: Pool) -> None:
        self._shared = shared
        self._pool = pool
        self._busy = asyncio.Lock()

    def again(self, request_id: str, keys: Mapping[str, str], *, is_whole: bool) -> Request:
        """Return a request that evaluates the header of an earlier one, or all of it; raises NotWarmed.

        If the header is not known, it is all of the prompt. Without *keys* the proxy's own key is used.
        Raises NotKnown if the request is not known.
        """
        explanation = self._shared.journal.explain(request_id)
        namespace, tokens = self._prompt(explanation)
        upstream, tenant = self._owner(namespace)
        n_header = cuts[0] if (cuts := explanation.request.cuts) else 0
        if not is_whole and 0 < n_header <= SLACK_TOKENS:
            raise NotWarmed(_why_too_short(n_header, len(tokens)))
        wanted = tokens if is_whole or not n_header else tokens[:n_header]
        model, headers = upstream.target.model, keys or upstream.own_headers
        again = own_request(_PATH, Route.COMPLETION, headers, tenant, model)
        return again.receive(tokens_request(wanted, model), self._shared.secret)

    def _owner(self, namespace: Namespace) -> tuple[LlamaServer, bytes]:
        """Return the llama-server that serves a namespace, and its tenant."""
        if not self._pool.processes:
            raise NotWarmed("llama-server is not attached: /health says why")
        for process in self._pool.processes:
            for tenant in (b"", *process.tenants):
                if process.tenant_namespace(tenant) == namespace:
                    return process.upstream, tenant
        raise NotWarmed("llama-server has another model, other adapters or other settings since")

    def _prompt(self, explanation: Explanation) -> tuple[Namespace, TokenIds]:
        journal, request = self._shared.journal, explanation.request
        if journal.keep == "none":
            raise NotWarmed("no prompts are kept: explain_keep is none")
        if (known := journal.prompts.find(request.id)) is None:
            if request.n_prompt is None:
                raise NotWarmed(f"the prompt of {request.id} was never read: {request.why}")
            raise NotWarmed(f"the prompt of {request.id} is no longer kept")
        return known.namespace, known.tokens[: request.n_prompt]

    async def warm(
        self, request: Request, on_progress: OnProgress, *, is_whole: bool
    ) -> dict[str, Any]:
        """Evaluate the prompt of a request and keep its header, or all of it; one request at a time.

        Returns which checkpoint gives the header, and how much of the prompt. Raises NotWarmed, or what
        makes serving any request impossible.
        """
        async with self._busy, self._pool.lent(request) as servers:
            began = time.monotonic()
            if not servers:
                raise NotWarmed(f"there is no model {request.model!r}")
            _, process = await self._pool.ready(servers)
            if process is None or not process.is_caching:
                raise NotWarmed("nothing is cached now: /health says why")
            await self._pool.cache.read(process, request, may_extend=False)
            if (prompt := request.prompt) is None:
                raise NotWarmed(f"this request is not cached: {request.why}")
            n_whole = prompt.cuts.message_end or prompt.n_tokens
            # Where no header is known, all of it is to be kept.
            n_header = 0 if is_whole else prompt.cuts.header
            wanted = (n_header or n_whole) - SLACK_TOKENS
            if wanted <= 0:
                raise NotWarmed(_why_too_short(n_header, n_whole))
            n_usable, checkpoint = _kept(process, prompt)
            if not (was_kept := n_usable >= wanted):
                watch = process.tasks.start(_watch(process, prompt, on_progress))
                try:
                    await self._pool.serve(request, servers)
                finally:
                    watch.cancel()
                if (answer := request.answer) and answer.status != 200:
                    raise NotWarmed(str(UpstreamRefused(answer.status, answer.complaint)))
            await on_progress(n_done=prompt.n_tokens, n_tokens=prompt.n_tokens)
            if not was_kept:
                await _save(servers, prompt)
                n_usable, checkpoint = _kept(process, prompt)
        if checkpoint is None or n_usable < wanted:
            raise NotWarmed(_why_not_kept(process.rule, n_usable, wanted))
        return {
            "id": f"{checkpoint.id:016x}",
            "size_bytes": checkpoint.size_bytes,
            "n_usable": n_usable,
            "n_header_tokens": prompt.cuts.header,
            "n_prompt_tokens": prompt.n_tokens,
            "was_kept": was_kept,
            "is_pinned": checkpoint.is_pinned,
            "seconds": round(time.monotonic() - began, 3),
        }


async def _watch(process: Process, prompt: Prompt, on_progress: OnProgress) -> None:
    """Report again and again how many tokens of the prompt are evaluated."""
    with suppress(UpstreamFault):  # --no-slots
        while True:
            for status in await process.slot_states():
                is_ours = process.slots[SlotId(status.id)].destined == prompt.tokens
                if is_ours and status.is_processing:
                    n_done = min(status.n_held or 0, prompt.n_tokens)
                    await on_progress(n_done=n_done, n_tokens=prompt.n_tokens)
            await asyncio.sleep(_LOOK_SECONDS)


async def _save(servers: Sequence[Server], prompt: Prompt) -> None:
    """Save the slot that holds the prompt, unless a checkpoint covers it already.

    A save that began at a stop or with the answer is waited for.
    """
    for process in [server.process for server in servers if server.process]:
        if under_way := process.saves.under_way:
            await asyncio.wait(under_way)
        async with process.launches.turn():
            for slot in process.slots.free():
                n_held = shared_tokens(slot.content, prompt.tokens, prompt.namespace)
                if n_held == prompt.n_tokens and (lease := process.queue.try_lease(slot.id)):
                    with lease:
                        save = process.saves.write_back(slot.id, CheckpointKind.HEADER)
                        await process.finish(lease, save)


def _kept(process: Process, prompt: Prompt) -> tuple[int, Checkpoint | None]:
    """Return how many tokens of a prompt can be restored at most, and from what."""
    found = process.store.find(prompt.namespace, prompt.tokens)
    return most_useful(process.rule, found, prompt.n_tokens + 1)


def own_request(
    path: str, route: Route, keys: Mapping[str, str], tenant: bytes, model: str = ""
) -> Request:
    """Return a request that no client has made; it is for the *tenant* with these *keys*."""
    relay = partial(_send_for_nobody, path, route, keys)
    own = Request(path=path, route=route, keys=keys, relay=relay, tenant=tenant, model=model)
    own.client = OWN_CLIENT
    return own


async def _send_for_nobody(
    path: str, route: Route, keys: Mapping[str, str], upstream: LlamaServer, raw: bytes, _: OnStart
) -> Answer:
    """Send a request that no client has made: a Relay that has nobody to tell when llama-server starts."""
    headers = end_to_end({"Content-Type": "application/json", **keys})
    try:
        async with upstream.waiting(), await upstream.forward("POST", path, headers, raw) as reply:
            body = await read_most(reply.content)
    except (aiohttp.ClientError, OSError) as error:
        raise away(error, upstream.target.base_url) from error
    reader = AnswerReader(reply.headers.get("Content-Type", ""), route)
    reader.feed(body)
    return reader.answer(reply.status)


def _why_too_short(n_header: int, n_whole: int) -> str:
    what = "header (tools and system prompt)" if n_header else "prompt"
    sizes = f"(tokens: {n_header or n_whole}; needed: more than {SLACK_TOKENS})"
    return f"the {what} is too short {sizes}" + "; --whole keeps the messages too" * bool(n_header)


def _why_not_kept(rule: Rule, n_usable: int, wanted: int) -> str:
    if wanted < rule.end_holds_from:
        return (
            f"states of fewer than {rule.end_holds_from:,} tokens are continued only at a context "
            "checkpoint of llama-server's, and this one has none that would do"
        )
    return f"it was evaluated, but {n_usable:,} of {wanted:,} tokens are kept: /health says why"
