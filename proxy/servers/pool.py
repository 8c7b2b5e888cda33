"""All llama-servers that the proxy stands before, and which of them serves a request.

There are four cases (`Pool.serve`):

1. One llama-server at an address: it serves every request.
2. Several addresses, all of the same model: one llama-server reads the request's prompt, each makes the
   plan that it would make, and the best plan's llama-server serves it.
3. A host of models answers at an address: it loads the model of the request, which is then case 1.
4. No host knows the model: what answers at the first address refuses the request in its own words.

While all llama-servers of a request are away, it waits for the first of them (`Server.ready`). A request
of which nothing was sent, because its llama-server went away meanwhile, begins again.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from proxy.core.model import Checkpoint, Outcome
from proxy.core.residency import Offer, best_offer
from proxy.errors import (
    UpstreamAbsent,
    UpstreamEnded,
    UpstreamGone,
    UpstreamNotReached,
    UpstreamPerhapsReached,
)
from proxy.llama.client import LlamaServer
from proxy.llama.hosts import recognise
from proxy.llama.routes import unloads_models
from proxy.log import get_logger
from proxy.servers.background import note_damage, verify_stored
from proxy.servers.fatal import FatalRequests, key_of
from proxy.servers.models import HostedModels
from proxy.servers.server import ArrivalOrder, Phase, Server
from proxy.serving.cache import WillBeRefused
from proxy.serving.desk import DeskClosed, EndedOver, FreeElsewhere, LeaseDesk
from proxy.serving.planning import offer
from proxy.serving.process import Process, Shared
from proxy.serving.request import Request
from proxy.serving.rewriting import Overflow, Stabilizing
from proxy.serving.saver import RewriteStateFile
from proxy.settings import Settings
from proxy.stabilize.model import parse_switches

MAX_LOADS = 4
"""A request has a model loaded so many times at most that does not stay: then its host answers."""
_RETRY_SECONDS = 1.0


class Pool:
    """The llama-servers behind one proxy."""

    def __init__(
        self,
        settings: Settings,
        shared: Shared,
        roots: Sequence[LlamaServer],
        rewrite: RewriteStateFile,
        *,
        is_coming: bool,
        n_context_checkpoints: int,
    ) -> None:
        """*is_coming* says that llama-server is being started, so that the first requests wait for it.

        *n_context_checkpoints* is how many a slot is believed to keep, until a save or a reply tells.
        """
        self._settings = settings
        self._shared = shared
        self._roots = list(roots)
        self._rewrite = rewrite
        self._is_coming = is_coming
        self._n_context_checkpoints = n_context_checkpoints
        self.stabilizing = Stabilizing(shared, parse_switches(settings.stabilizers))
        self._overflow = Overflow(shared, is_on=settings.context_overflow == "stable")
        self._fatal = FatalRequests(shared.opened_store)
        self._running: list[asyncio.Task[None]] = []
        self._plain: list[Server] = []
        self._order = ArrivalOrder()
        self._hosts: dict[LlamaServer, HostedModels] = {}

    @asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """Follow all llama-servers and verify what is stored while the block runs."""
        is_single = len(self._roots) == 1
        for root in self._roots:
            where = "" if is_single else root.target.name
            server = self._start(
                root,
                where,
                self._order,
                is_expected=self._is_coming,
                is_host_of_models=self._is_host,
            )
            self._plain.append(server)
            if not is_single:
                server.on_attached = self._share_slots
        if self._shared.opened_store is not None:
            self._shared.opened_store.on_damage = self._note_damage
        self._run(partial(verify_stored, self._shared, self._settings.verify_interval_seconds))
        try:
            yield
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    @property
    def servers(self) -> list[Server]:
        """Every llama-server that is followed: at an address, or as a model that was loaded once."""
        return [*self._plain, *(s for h in self._hosts.values() for s in h.servers.values())]

    @property
    def processes(self) -> list[Process]:
        return [process for server in self.servers if (process := server.process)]

    @property
    def n_waiting(self) -> int:
        """How many requests wait for a slot, for llama-server or for a model."""
        n_for_models = sum(hosted.n_queued for hosted in self._hosts.values())
        return n_for_models + sum(server.n_queued for server in self.servers)

    @property
    def is_single(self) -> bool:
        """Whether there is one llama-server, at an address of its own."""
        return len(self._plain) == 1 and not self._hosts

    @property
    def roots(self) -> list[LlamaServer]:
        """What answers at the addresses, those first that are there: any may answer for all."""
        plain = {server.upstream: server.process is None for server in self._plain}
        is_away = plain | {root: host.is_away for root, host in self._hosts.items()}
        return sorted(self._roots, key=lambda root: is_away.get(root, True))

    @property
    def has_models(self) -> bool:
        """Whether requests have to say which model they are for."""
        return bool(self._hosts)

    async def drain(self, seconds: float) -> None:
        """Save every dirty slot now, in at most *seconds*."""
        await asyncio.gather(*(server.drain(seconds) for server in self.servers))

    def give_up(self) -> None:
        """Send away whoever waits for a llama-server: the proxy is about to stop."""
        for each in (*self.servers, *self._hosts.values()):
            each.give_up()

    def _start(
        self, upstream: LlamaServer, where: str, order: ArrivalOrder, **options: Any
    ) -> Server:
        """Follow one llama-server; *where* tells its degradations from others', *options* are Server's."""
        server = Server(
            self._settings,
            self._shared.of(upstream, where),
            self._rewrite,
            self.stabilizing,
            self._overflow,
            order,
            n_context_checkpoints=self._n_context_checkpoints,
            **options,
        )
        self._run(server.run)
        return server

    def _run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._running.append(asyncio.ensure_future(self._supervised(work)))

    async def _supervised(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Go on with what follows a llama-server, whatever went wrong with it."""
        while True:
            try:
                return await work()
            except Exception as error:
                self._shared.faults.record("lifecycle", error)
                await asyncio.sleep(_RETRY_SECONDS)

    def _note_damage(self, damaged: Checkpoint, stemming: list[Checkpoint]) -> None:
        note_damage(self._shared, self.processes, damaged, stemming)

    async def _is_host(self, server: Server) -> bool:
        """Find out whether a host of models answers at an address; if so, it is followed from now on."""
        root = server.upstream
        if (host := await recognise(root)) is None:
            return False
        get_logger("fleet").info("several models", address=root.target.base_url, kind=host.kind)
        degradations = self._shared.everywhere.at(root.target.name)
        hosted = HostedModels(
            root, host, self._new_model, self._shared.tasks, degradations, self._settings
        )
        await hosted.try_to_look()
        self._plain.remove(server)
        self._hosts[root] = hosted
        self._run(hosted.watch)
        return True

    def _new_model(self, hosted: HostedModels, model: str) -> Server:
        upstream = hosted.root.at(hosted.host.target(model))
        return self._start(
            upstream,
            upstream.target.name,
            ArrivalOrder(),
            phase=Phase.UNLOADED,
            is_expected=True,
            is_polled=hosted.host.is_polled,
            look_at_host=hosted.try_to_look,
        )

    def _share_slots(self, process: Process) -> None:
        """Let who waits longest for a slot of another llama-server have those that come free here."""
        desk = process.desk
        desk.on_idle = self._call_away
        for _ in desk.table.free():
            self._call_away(desk)

    def _call_away(self, idle: LeaseDesk) -> None:
        desks = [process.desk for server in self._plain if (process := server.process)]
        fullest = max(desks, key=lambda desk: desk.n_waiting, default=idle)
        if fullest is not idle:
            fullest.let_go()

    # Which llama-servers may serve a request.

    @asynccontextmanager
    async def lent(
        self, model: str, since: float, keys: Mapping[str, str]
    ) -> AsyncIterator[list[Server]]:
        """Yield the llama-servers that may serve a request for *model*, loaded while the block runs.

        None of them if no host knows it. Raises UpstreamAbsent if the host is away for too long; *since* is
        when the request began to wait. *keys* are the headers with its client's key.
        """
        hosted, named = await self._find(model, keys)
        if hosted is None:
            yield self._plain
            return
        async with hosted.use(named, since, keys) as server:
            yield [server]

    async def _find(self, model: str, keys: Mapping[str, str]) -> tuple[HostedModels | None, str]:
        """Return a host that has a model, and its name there: if possible one that has loaded it."""
        hosts = list(self._hosts.values()) if model else []
        found = [(hosted, name) for hosted in hosts if (name := hosted.known(model))]
        if not found:
            asked = [(hosted, await hosted.named(model, keys)) for hosted in hosts]
            found = [(hosted, name) for hosted, name in asked if name]

        def is_worse(each: tuple[HostedModels, str]) -> tuple[bool, bool]:
            hosted, name = each
            return hosted.is_away, name not in hosted.loaded

        return min(found, key=is_worse, default=(None, ""))

    def split_path(self, path: str, model: str) -> tuple[str, str]:
        """Return the model that a client's path names, and the path as a llama-server would see it.

        *model* is what its query says.
        """
        split = [(hosted, *hosted.split_path(path, model)) for hosted in self._hosts.values()]
        known = (found for found in split if found[0].known(found[1]))
        shortest = sorted(split, key=lambda found: len(found[2]))
        _, named, rest = next(known, next(iter(shortest), (None, "", path)))
        return named, rest

    @asynccontextmanager
    async def passing(
        self, method: str, path: str, model: str, keys: Mapping[str, str]
    ) -> AsyncIterator[Sequence[LlamaServer]]:
        """Yield where to pass on a request that is no generation, with its model loaded meanwhile.

        Where several can take it, the next one is for when one cannot be reached.
        """
        if unloads_models(method, path):
            await asyncio.gather(*(hosted.save_all(keys) for hosted in self._hosts.values()))
        elif model:
            hosted, named = await self._find(model, keys)
            if hosted is not None:
                async with hosted.use(named, time.monotonic(), keys):
                    yield [hosted.root]
                return
        yield self.roots

    async def ready(self, servers: Sequence[Server], since: float) -> tuple[Server, Process | None]:
        """Return an attached llama-server and its process; if there is none, wait a while for the first.

        The process is None if one is there, but not attached. Raises UpstreamAbsent if all are away for too
        long; *since* is when the request began to wait.
        """
        attached = [server for server in servers if server.process]
        if attached or len(servers) == 1:
            server = min(attached or servers, key=lambda server: server.n_queued)
            return server, await server.ready(since)
        waits = {asyncio.ensure_future(server.ready(since)): server for server in servers}
        try:
            for wait in asyncio.as_completed(waits):
                with suppress(UpstreamAbsent):
                    await wait
                if found := [(s, s.process) for s in servers if s.process]:
                    return found[0]
        finally:
            for task in waits:
                task.cancel()
        # Nobody is attached: what is there without, rather than what was waited for in vain.
        is_there = (
            t for t in waits if t.exception() is None and waits[t].phase is not Phase.UNREACHABLE
        )
        refused = (task for task in waits if task.exception() is not None)
        last = next(is_there, None) or next(refused, None) or next(iter(waits))
        return waits[last], last.result()

    # How a request is served.

    async def serve(self, request: Request) -> None:
        """Serve one request; what sending raises passes through, cache faults do not.

        A request of which nothing was sent yet waits for a llama-server that is away. Raises
        UpstreamAbsent if that takes too long, ProxyError if llama-server ends over it again and again.
        """
        try:
            for n_tries in count(1):
                async with self.lent(request.model, request.arrived_at, request.headers) as servers:
                    if not servers:
                        await request.send(self.roots[0], request.raw)
                        return self._shared.report.not_looked_up(request, "no such model")
                    if servers[0].is_hosted:
                        self._order.leave(request)
                    if await self._try(servers, request, may_be_lost=n_tries < MAX_LOADS):
                        return None
                    # Who waits for its model again may be what that model waits for: no place is kept.
                    if not servers[0].is_hosted:
                        self._order.join(request)
        finally:
            self._order.leave(request)

    async def serve_in(self, servers: Sequence[Server], request: Request) -> None:
        """Serve one request for somebody who has the model kept loaded already.

        To ask for it again would wait for those who wait for it to leave. Raises as `serve` does, and
        UpstreamGone if llama-server goes away again and again.
        """
        order = servers[0].order
        try:
            for _ in range(MAX_LOADS):
                if await self._try(servers, request, may_be_lost=False):
                    return
                order.join(request)
        finally:
            order.leave(request)
        raise UpstreamGone("llama-server goes away again and again")

    async def _try(self, servers: Sequence[Server], request: Request, *, may_be_lost: bool) -> bool:
        """Serve a request; return False if llama-server went away before anything was sent."""
        order, since = servers[0].order, request.arrived_at
        if order or not any(server.process for server in servers):
            since = order.join(request)
        was_there = servers[0].phase is not Phase.UNLOADED
        try:
            server, process = await self.ready(servers, since)
            if process is None:
                is_over = await server.is_lost()
                if is_over and (not server.is_hosted or (was_there and may_be_lost)):
                    return False
                order.leave(request)
                return await self._serve_unplaced(server, request, may_be_lost)
            try:
                await server.cache.read(process, request)
                server, process = await self._choose(servers, server, process, request)
            except WillBeRefused as why:
                order.leave(request)
                await self._watched(server, request, server.cache.let_refuse(process, request, why))
                return True
            except DeskClosed:
                server.poke()
                await server.is_lost()
                return False
            if len(servers) > 1:  # the time in the queues of all of them counts
                request.queued_at = request.queued_at or time.monotonic()
            return await self._serve_by(server, process, request)
        finally:
            for each in servers:
                each.on_way.discard(request)
            if servers[0].is_hosted:
                order.leave(request)

    async def _choose(
        self, servers: Sequence[Server], reader: Server, process: Process, request: Request
    ) -> tuple[Server, Process]:
        """Return the best llama-server for a request that *reader* has read.

        Raises what `Cache.take_over` does.
        """
        present = [(server, there) for server in servers if (there := server.process)]
        server, chosen = reader, process
        if len(present) > 1:
            offers = [_offer(there, request).beside(len(s.on_way)) for s, there in present]
            server, chosen = present[best_offer(offers)]
        server.on_way.add(request)
        if chosen is not process:
            await server.cache.take_over(chosen, request)
        return server, chosen

    async def _serve_by(self, server: Server, process: Process, request: Request) -> bool:
        """Serve a request that was read; return False if it has to be served elsewhere."""
        key = key_of(request)
        self._fatal.require_harmless(key)

        async def turn() -> None:
            await server.order.turn(request)
            server.order.leave(request)  # whoever is next comes to the queue after us
            server.on_way.discard(request)

        try:
            await self._watched(server, request, server.cache.serve(process, request, turn))
        except FreeElsewhere:
            return False
        except DeskClosed as closed:
            if isinstance(closed, EndedOver):
                await self._fatal.note_death(key)
            server.poke()
            await server.is_lost()
            return False
        except UpstreamGone as gone:
            if isinstance(gone, UpstreamEnded | UpstreamPerhapsReached):
                await self._fatal.note_death(key)
            if isinstance(gone, UpstreamNotReached) and await server.is_replaced(process):
                await server.is_lost()
                return False
            server.poke()
            raise
        await self._fatal.note_answer(key)
        return True

    async def _serve_unplaced(self, server: Server, request: Request, may_be_lost: bool) -> bool:
        """Forward to a llama-server that is not attached; return False if its host has gone away."""
        request.begin(server.services.where)
        try:
            await self._watched(server, request, request.send(server.upstream, request.raw))
        except UpstreamGone as gone:
            server.poke()
            may_be_lost &= server.is_hosted and isinstance(gone, UpstreamNotReached)
            if may_be_lost and await server.is_lost():
                return False
            raise
        finally:
            is_refused = request.answer is not None and request.answer.status in (401, 403)
            if server.process and not is_refused:  # attached meanwhile: it ran in some slot
                server.process.slots.forget_free()
        why = "llama-server is not attached"
        self._shared.report.not_looked_up(request, why, Outcome.DEGRADED)
        return True

    async def _watched(
        self, server: Server, request: Request, serving: Coroutine[Any, Any, object]
    ) -> None:
        """Serve a request, and note what its answer tells, also to a client that hangs up with it."""
        request.answer = None
        try:
            await serving
        finally:
            self.stabilizing.note_calls(request)
            if request.answer is not None and request.answer.is_broken:
                server.poke()


def _offer(process: Process, request: Request) -> Offer:
    """Return what a llama-server can do for a request; one that was not read goes by who is busy."""
    if request.prompt is not None:
        namespace = process.tenant_namespace(request.tenant)
        return offer(process, replace(request.prompt, namespace=namespace))
    n_busy = sum(slot.is_leased for slot in process.slots)
    return Offer(0.0, 0, n_busy, process.desk.n_waiting, len(process.slots))
