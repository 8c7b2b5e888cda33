"""Which llama-server serves a request.

There are four cases (`Pool.serve`):

1. One llama-server at an address: it serves every request.
2. Several addresses, all with the same model: one llama-server reads the prompt, a plan is made for each
   llama-server, and the one with the best plan serves the request.
3. A host of models answers at an address: it loads the model of the request, which is then case 1.
4. No host knows the model: the first address refuses the request in its own words.

While all llama-servers of a request are away, the request waits for the first that comes back
(`Server.ready`). If a llama-server goes away before anything of the request was sent to it, the request
begins again.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from itertools import count
from typing import Any

from proxy.core.model import Outcome
from proxy.core.residency import best_offer
from proxy.errors import OutOfCells, ServerAway, WillBeRefused
from proxy.servers.addresses import Addresses
from proxy.servers.background import Ahead
from proxy.servers.server import FatalRequests, Phase, Server
from proxy.serving.cache import Cache
from proxy.serving.planning import offer
from proxy.serving.process import Process
from proxy.serving.queue import FreeElsewhere
from proxy.serving.request import Request
from proxy.serving.rewriting import Overflow, Stabilizing
from proxy.serving.services import Services
from proxy.settings import Settings
from proxy.stabilize.model import parse_switches

MAX_LOADS = 4
"""How often a model is loaded for one request. If it is unloaded each time, its host answers."""


class Pool(Addresses):
    """The llama-servers behind one proxy, for callers that send requests."""

    def __init__(self, settings: Settings, shared: Services, *others: Any) -> None:
        """*others* are those of Addresses."""
        super().__init__(settings, shared, *others)
        self.stabilizing = Stabilizing(shared, parse_switches(settings.stabilizers))
        overflow = Overflow(shared) if settings.context_overflow == "stable" else None
        self.cache = Cache(self.stabilizing, overflow)
        self.ahead = Ahead(settings.ahead_seconds)
        self._fatal = FatalRequests(shared)

    async def serve(self, request: Request, lent: Sequence[Server] | None = None) -> None:
        """Serve one request. Errors of sending pass through, cache faults do not.

        *lent* are the llama-servers of a `lent` block around this call; to ask for their model again would
        wait behind requests that wait for its end. Raises ServerAway if llama-server is away for too long,
        or goes away after the request was sent; ProxyError if it ended twice during this request.
        """
        await self.ahead.give_way(request.session)
        for n_tries in count(1):
            if self.has_models:
                self.require_named(request)
            async with self.lent(request) if lent is None else nullcontext(lent) as servers:
                with suppress(OutOfCells):  # raised once a request: then the client gets the error
                    if not servers:
                        await request.send(self.roots[0], request.raw)
                        return self._shared.report.not_looked_up(request, "no such model")
                    may_reload = lent is None and n_tries < MAX_LOADS
                    if await self._try(servers, request, may_reload=may_reload):
                        return None

    async def _try(self, servers: Sequence[Server], request: Request, *, may_reload: bool) -> bool:
        """Serve a request; return False if it has to begin again.

        If it *may_reload* its model, it begins again when the host has unloaded the model meanwhile.
        """
        epoch, request.answered_at = servers[0].epoch, 0.0  # a try that failed was no answer
        server, process = await self.ready(servers)
        if process is None:
            is_lost = await server.is_lost()
            if server.host:  # the model may have been unloaded and be loaded again: the epoch tells
                is_lost = may_reload and server.epoch != epoch
            return False if is_lost else await self._serve_unplaced(server, request, may_reload)
        try:
            await self.cache.read(process, request)
            if len(servers) > 1:
                server, process = await self._choose(servers, server, process, request)
                # Its waiting time counts from its first queue on.
                request.queued_at = request.queued_at or time.monotonic()
        except WillBeRefused as why:
            await self._watched(server, request, self.cache.let_refuse(process, request, why))
            return True
        except ServerAway:
            server.poke()
            await server.is_lost()
            return False
        return await self._serve_by(server, process, request)

    async def _choose(
        self, servers: Sequence[Server], reader: Server, process: Process, request: Request
    ) -> tuple[Server, Process]:
        """Return the best llama-server for a request that *reader* has read; raises as `Cache.read`."""
        present = [(server, there) for server in servers if (there := server.process)]
        if len(present) < 2:
            return reader, process
        server, chosen = present[best_offer([offer(there, request) for _, there in present])]
        if chosen is not process:
            chosen.on_way.add(request)
            try:
                await self.cache.take_over(chosen, request)
            finally:
                chosen.on_way.discard(request)
        return server, chosen

    async def _serve_by(self, server: Server, process: Process, request: Request) -> bool:
        """Serve a request that was read; return False if it has to begin again."""
        self._fatal.refuse(request)
        try:
            await self._watched(server, request, self.cache.serve(process, request))
            await self._fatal.note_answer(request)
            self.ahead.note(process, request)
        except FreeElsewhere:
            return False
        except OutOfCells:
            process.has_run_out_of_cells = process.shares_cells
            raise
        except ServerAway as away:
            if away.has_ended and await process.has_ended():
                await self._fatal.note_death(request)
            server.poke()
            if away.was_sent:
                raise
            # If llama-server ended over a saved state, that state is quarantined now.
            if not (process.queue.is_closed or away.has_ended or await process.has_ended()):
                raise
            await server.is_lost()
            return False
        return True

    async def _serve_unplaced(self, server: Server, request: Request, may_reload: bool) -> bool:
        """Forward to a llama-server that is not attached; return False if the request begins again."""
        request.begin(server.services.server_name)
        try:
            await self._watched(server, request, request.send(server.upstream, request.raw))
        except ServerAway as away:
            server.poke()
            may_reload &= server.host is not None and not away.was_sent
            if may_reload and await server.is_lost():
                return False
            raise
        finally:
            if request.answer is None or request.answer.status not in (401, 403):
                server.note_unplaced()
        self._shared.report.not_looked_up(request, "llama-server is not attached", Outcome.DEGRADED)
        return True

    async def _watched(self, server: Server, request: Request, serving: Awaitable[object]) -> None:
        """Await *serving* and note the tool calls, even if the client hangs up at the end of the answer."""
        request.answer = None
        try:
            await serving
        finally:
            self.stabilizing.note_calls(request)
            if request.answer is not None and request.answer.is_broken:
                server.poke()

    # Which llama-servers may serve a request.

    @asynccontextmanager
    async def lent(self, request: Request) -> AsyncIterator[list[Server]]:
        """Yield the llama-servers that may serve a request; its model stays loaded in the block.

        Yields an empty list if no host knows the model. Raises ServerAway if the host is away for too long.
        """
        hosted, named = (
            await self.find(request.model, request.keys) if self.has_models else (None, "")
        )
        if hosted is None:
            yield list(self._plain)  # a host of models may turn out to be at one of the addresses
            return
        async with hosted.use(named, request.arrived_at, request.keys) as server:
            yield [server]

    async def ready(self, servers: Sequence[Server]) -> tuple[Server, Process | None]:
        """Return an attached llama-server and its process; if there is none, wait for the first.

        The process is None if a llama-server is there, but not attached. Raises ServerAway if all are away
        for too long.
        """
        if attached := [(server, there) for server in servers if (there := server.process)]:
            if len(attached) == 1:
                return attached[0]
            return min(attached, key=lambda each: each[0].n_queued)
        waits = {asyncio.ensure_future(server.ready()): server for server in servers}
        try:
            for wait in asyncio.as_completed(waits):
                with suppress(ServerAway):
                    await wait
                if found := [(s, s.process) for s in servers if s.process]:
                    return found[0]
        finally:
            for task in waits:
                task.cancel()

        def rank(wait: "asyncio.Task[Process | None]") -> int:
            """Prefer a llama-server that answers, then one that may come back."""
            return 1 if wait.exception() else 2 * (waits[wait].phase is Phase.UNREACHABLE)

        best = min(waits, key=rank)
        return waits[best], best.result()
