"""Requests made again from the journal: their tokens are known, their bodies are not.

Owns: what is asked of llama-server then. The tokens are evaluated as a bare prompt, in the namespace of
whoever sent them first, so that the next request of theirs finds the state.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import aiohttp

from proxy.core.cuts import SLACK_TOKENS
from proxy.core.model import Checkpoint, CheckpointKind, Prompt, Rule
from proxy.core.rule import usable_tokens
from proxy.core.slots import Content, Known, Slot, Unknown
from proxy.core.tokens import Namespace, TokenIds, common_prefix_length
from proxy.errors import CacheFault, UpstreamEnded, UpstreamFault, UpstreamNotReached
from proxy.explain.explanation import Explanation
from proxy.explain.report import Journal, Keep
from proxy.llama.answers import AnswerReader
from proxy.llama.bodies import tokens_request
from proxy.llama.client import LlamaServer
from proxy.llama.routes import Route
from proxy.servers.pool import Pool
from proxy.servers.server import Server
from proxy.serving.cache import EXAMINATION_SECONDS, WillBeRefused
from proxy.serving.desk import DeskClosed
from proxy.serving.process import Process, Shared
from proxy.serving.request import Answer, OnStart, Request

# Requests made again from the journal: their tokens are known, their bodies are not.
#
# Owns: what is asked of llama-server then. The tokens are evaluated as a bare prompt, in the namespace of
# whoever sent them first, so that the next request of theirs finds the state.


_PATH = "/completion"


class NotKnown(CacheFault):
    """A request cannot be made again; the message says why."""


class EarlierRequests:
    """Makes requests again whose prompts the journal has kept."""

    def __init__(self, journal: Journal, pool: Pool) -> None:
        self._journal = journal
        self._pool = pool

    def again(self, request_id: str, keys: Mapping[str, str], *, is_whole: bool) -> Request:
        """Return a request that evaluates the header of an earlier one, or all of it; raises NotKnown.

        A header that was not found is all of the prompt. Without *keys* the proxy's own one is used.
        """
        explanation = self._journal.explain(request_id)
        if explanation is None:
            raise NotKnown(self._journal.why_unknown(request_id))
        namespace, tokens = self._prompt(explanation)
        upstream, tenant = self._owner(namespace)
        n_header = cuts[0] if (cuts := explanation.request.cuts) else 0
        wanted = tokens if is_whole or not n_header else tokens[:n_header]
        headers = keys or upstream.own_headers
        request = Request(
            path=_PATH,
            route=Route.COMPLETION,
            headers=headers,
            relay=partial(send_for_nobody, _PATH, headers),
            tenant=tenant,
            model=upstream.target.model,
        )
        return request.receive(tokens_request(wanted, upstream.target.model))

    def _owner(self, namespace: Namespace) -> tuple[LlamaServer, bytes]:
        """Return the llama-server that serves a namespace, and its tenant."""
        processes = self._pool.processes
        if not processes:
            raise NotKnown("llama-server is not attached: /health says why")
        for process in processes:
            tenant = _tenant(process, namespace)
            if tenant is not None:
                return process.upstream, tenant
        raise NotKnown("llama-server has another model, other adapters or other settings since")

    def _prompt(self, explanation: Explanation) -> tuple[Namespace, TokenIds]:
        if self._journal.keep is Keep.NONE:
            raise NotKnown("no prompts are kept: explain_keep is none")
        request = explanation.request
        if (known := self._journal.prompts.find(request.id)) is None:
            if request.n_prompt is None:
                raise NotKnown(f"the prompt of {request.id} was never read: {request.why}")
            raise NotKnown(f"the prompt of {request.id} is no longer kept")
        return known.namespace, known.tokens[: request.n_prompt]


def _tenant(process: Process, namespace: Namespace) -> bytes | None:
    tenants = (b"", *process.tenants)
    return next((t for t in tenants if process.tenant_namespace(t) == namespace), None)


# Evaluates and keeps a header before the first user needs it.
#
# It goes the way of any request, so that it is rewritten, planned and confirmed like one; then its slot
# is saved at once, and as a header, which no later state makes needless.


_LOOK_SECONDS = 0.5

OnProgress = Callable[[int, int], object]
"""Is told how many tokens are done, of how many."""


class NotWarmed(CacheFault):
    """A header could not be evaluated or is not kept; the message says why."""


@dataclass(frozen=True, slots=True)
class Warmed:
    """A header that is kept: the checkpoint that gives it, and how much of the prompt that is."""

    checkpoint: Checkpoint
    n_usable: int
    n_header: int
    n_prompt: int
    was_kept: bool
    seconds: float


class Warming:
    """Warms headers."""

    def __init__(self, shared: Shared, pool: Pool) -> None:
        self._shared = shared
        self._pool = pool
        self._busy = asyncio.Lock()

    async def warm(self, request: Request, on_progress: OnProgress, *, is_whole: bool) -> Warmed:
        """Evaluate the prompt of a request and keep its header, or all of it; one request at a time.

        Raises NotWarmed, or what makes serving any request impossible.
        """
        async with self._busy:
            async with self._pool.lent(request.model, time.monotonic(), request.headers) as servers:
                return await self._warm(servers, request, on_progress, is_whole=is_whole)

    async def _warm(
        self,
        servers: Sequence[Server],
        request: Request,
        on_progress: OnProgress,
        *,
        is_whole: bool,
    ) -> Warmed:
        began = time.monotonic()
        if not servers:
            raise NotWarmed(f"there is no model {request.model!r}")
        server, process = await self._pool.ready(servers, began)
        if process is not None:
            await process.examination(EXAMINATION_SECONDS)
        if process is None or not process.is_caching:
            raise NotWarmed("nothing is cached now: /health says why")
        prompt = await _read(server, process, request)
        wanted = _wanted_tokens(prompt, is_whole=is_whole) - SLACK_TOKENS
        n_usable, checkpoint = self._best(process, prompt)
        if was_kept := n_usable >= wanted:
            on_progress(prompt.n_tokens, prompt.n_tokens)
        else:
            async with self._watched(process, prompt, on_progress):
                await self._pool.serve_in(servers, request)
            await self._save(servers, prompt)
            n_usable, checkpoint = self._best(process, prompt)
        if checkpoint is None or n_usable < wanted:
            raise NotWarmed(_why_not_kept(process.rule, n_usable, wanted))
        seconds, n_header = time.monotonic() - began, prompt.cuts.header
        return Warmed(checkpoint, n_usable, n_header, prompt.n_tokens, was_kept, seconds)

    @asynccontextmanager
    async def _watched(
        self, process: Process, prompt: Prompt, on_progress: OnProgress
    ) -> AsyncIterator[None]:
        watch = self._shared.tasks.start(self._watch(process, prompt, on_progress))
        try:
            yield
        finally:
            watch.cancel()
        on_progress(prompt.n_tokens, prompt.n_tokens)

    async def _watch(self, process: Process, prompt: Prompt, on_progress: OnProgress) -> None:
        """Tell again and again how many tokens the slot holds in which the prompt is evaluated."""
        while True:
            try:
                statuses = await process.slot_states()
            except UpstreamFault:
                return  # --no-slots: nobody can tell
            table = process.slots
            busy = [s.n_held or 0 for s in statuses if s.is_processing]
            if any(_is_of(prompt, slot.content) for slot in table if slot.is_leased) and busy:
                on_progress(min(max(busy), prompt.n_tokens), prompt.n_tokens)
            await asyncio.sleep(_LOOK_SECONDS)

    async def _save(self, servers: Sequence[Server], prompt: Prompt) -> None:
        """Save the slot that holds the prompt, unless a file covers it already."""
        for process in [server.process for server in servers if server.process]:
            desk = process.desk
            async with process.launches.turn():
                for slot in desk.table.free():
                    if not _holds(prompt, slot) or (lease := desk.try_lease(slot.id)) is None:
                        continue
                    with lease:
                        save = process.saves.write_back(slot.id, CheckpointKind.HEADER)
                        await process.finish(lease, save)

    def _best(self, process: Process, prompt: Prompt) -> tuple[int, Checkpoint | None]:
        """Return how many tokens of a prompt can be restored at most, and from what."""
        rule, n_prompt = process.rule, prompt.n_tokens + 1
        best: tuple[int, Checkpoint | None] = (0, None)
        for found in self._shared.store.find(prompt.namespace, prompt.tokens):
            n_usable = usable_tokens(rule, found.checkpoint, found.n_common, n_prompt)
            if n_usable > best[0]:
                best = n_usable, found.checkpoint
        return best


async def _read(server: Server, process: Process, request: Request) -> Prompt:
    try:
        await server.cache.read(process, request)
    except WillBeRefused as why:
        raise NotWarmed(f"this request is not cached: {why}") from why
    except DeskClosed as gone:
        raise NotWarmed("llama-server was replaced meanwhile") from gone
    if request.prompt is None:
        raise NotWarmed(f"this request is not cached: {request.why}")
    return request.prompt


async def send_for_nobody(
    path: str,
    keys: Mapping[str, str],
    upstream: LlamaServer,
    raw: bytes,
    on_start: OnStart,
    n_found: int | None,
) -> Answer:
    """Send a request that no client has made; raises NotWarmed if llama-server refuses it."""
    headers = {"Content-Type": "application/json", **keys}
    try:
        async with upstream.session.post(upstream.url(path), data=raw, headers=headers) as reply:
            body = await reply.read()
    except aiohttp.ClientConnectorError as error:
        raise UpstreamNotReached(str(error)) from error
    except (aiohttp.ClientError, OSError) as error:
        raise UpstreamEnded(f"llama-server went away: {error}") from error
    if reply.status != 200:
        raise NotWarmed(f"llama-server answered {reply.status}: {body[:300]!r}")
    reader = AnswerReader(reply.headers.get("Content-Type", ""))
    reader.feed(body)
    return Answer(reply.status, reader.timings())


def _wanted_tokens(prompt: Prompt, *, is_whole: bool) -> int:
    """Return how much of a prompt is to be kept; where no header is known that is all of it."""
    n_whole = prompt.cuts.message_end or prompt.n_tokens
    return n_whole if is_whole else prompt.cuts.header or n_whole


def _why_not_kept(rule: Rule, n_usable: int, wanted: int) -> str:
    if wanted < rule.end_holds_from:
        return (
            f"states of fewer than {rule.end_holds_from:,} tokens are continued only at a context "
            "checkpoint of llama-server's, and this one has none that would do"
        )
    return f"it was evaluated, but {n_usable:,} of {wanted:,} tokens are kept: /health says why"


def _holds(prompt: Prompt, slot: Slot) -> bool:
    content = slot.content
    if not isinstance(content, Known) or content.namespace != prompt.namespace:
        return False
    return common_prefix_length(content.tokens, prompt.tokens) == prompt.n_tokens


def _is_of(prompt: Prompt, content: Content) -> bool:
    """Return whether a slot is being filled with the beginning of a prompt."""
    tokens = content.tokens if isinstance(content, Known) else None
    if isinstance(content, Unknown):
        tokens = content.likely
    return bool(tokens) and tokens == prompt.tokens[: len(tokens or ())]
