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
from proxy.explain.explanation import Judgement
from proxy.llama.client import LlamaServer
from proxy.llama.hosts import recognise
from proxy.llama.routes import unloads_models
from proxy.log import get_logger
from proxy.servers.background import note_damage, verify_stored
from proxy.servers.fatal import FatalRequests, key_of
from proxy.servers.models import HostedModels
from proxy.servers.server import ArrivalOrder, Phase, Server
from proxy.serving.cache import ReadRequest, WillBeRefused
from proxy.serving.desk import DeskClosed, EndedOver, FreeElsewhere, LeaseDesk
from proxy.serving.launches import Session
from proxy.serving.planning import Planning
from proxy.serving.process import Shared
from proxy.serving.request import Answer, GenerationRequest, Send
from proxy.serving.rewriting import Overflow, Stabilizing
from proxy.serving.saver import RewriteStateFile
from proxy.settings import Settings
from proxy.stabilize.model import parse_switches

MAX_LOADS = 4
"""A request has a model loaded so many times at most that does not stay: then its host answers."""
_RETRY_SECONDS = 1.0

SendTo = Callable[[LlamaServer], Send]
"""Returns how a body is sent to a llama-server, and its answer relayed."""


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
    ) -> None:
        """*is_coming* says that llama-server is being started, so that the first requests wait for it."""
        self._settings = settings
        self._shared = shared
        self._roots = list(roots)
        self._rewrite = rewrite
        self._is_coming = is_coming
        self.stabilizing = Stabilizing(shared, parse_switches(settings.stabilizers))
        self._overflow = Overflow(shared, is_on=settings.context_overflow == "stable")
        self._fatal = FatalRequests(shared.opened_store)
        self._running: list[asyncio.Task[None]] = []
        self._plain: list[Server] = []
        self._order = ArrivalOrder()
        self._queued_at: dict[str, float] = {}
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
    def processes(self) -> list[Session]:
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

    def _share_slots(self, process: Session) -> None:
        """Let who waits longest for a slot of another llama-server have those that come free here."""
        desk = process.attachment.desk
        desk.on_idle = self._call_away
        for _ in desk.table.free():
            self._call_away(desk)

    def _call_away(self, idle: LeaseDesk) -> None:
        desks = [process.attachment.desk for server in self._plain if (process := server.process)]
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

    async def ready(self, servers: Sequence[Server], since: float) -> tuple[Server, Session | None]:
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

    async def serve(self, request: GenerationRequest, send_to: SendTo) -> None:
        """Serve one request; what sending raises passes through, cache faults do not.

        A request of which nothing was sent yet waits for a llama-server that is away. Raises
        UpstreamAbsent if that takes too long, EndsLlamaServer if llama-server ends over it again and again.
        """
        arrival = request.arrival
        try:
            for n_tries in count(1):
                async with self.lent(request.model, arrival.arrived_at, request.headers) as servers:
                    if not servers:
                        answer = await send_to(self.roots[0])(request.raw, lambda: None)
                        return self._report(request, answer, Outcome.BYPASS, "no such model")
                    if servers[0].is_hosted:
                        self._order.leave(arrival)
                    may_be_lost = n_tries < MAX_LOADS
                    if await self._try(servers, request, send_to, may_be_lost=may_be_lost):
                        return None
                    # Who waits for its model again may be what that model waits for: no place is kept.
                    if not servers[0].is_hosted:
                        self._order.join(arrival)
        finally:
            self._order.leave(arrival)
            self._queued_at.pop(request.id, None)

    async def serve_in(
        self, servers: Sequence[Server], request: GenerationRequest, send_to: SendTo
    ) -> None:
        """Serve one request for somebody who has the model kept loaded already.

        To ask for it again would wait for those who wait for it to leave. Raises as `serve` does, and
        UpstreamGone if llama-server goes away again and again.
        """
        order = servers[0].order
        try:
            for _ in range(MAX_LOADS):
                if await self._try(servers, request, send_to, may_be_lost=False):
                    return
                order.join(request.arrival)
        finally:
            order.leave(request.arrival)
        raise UpstreamGone("llama-server goes away again and again")

    async def _try(
        self,
        servers: Sequence[Server],
        request: GenerationRequest,
        send_to: SendTo,
        *,
        may_be_lost: bool,
    ) -> bool:
        """Serve a request; return False if llama-server went away before anything was sent."""
        order, arrival = servers[0].order, request.arrival
        since = arrival.arrived_at
        if order or not any(server.process for server in servers):
            since = order.join(arrival)
        was_there = servers[0].phase is not Phase.UNLOADED
        try:
            server, process = await self.ready(servers, since)
            if process is None:
                is_over = await server.is_lost()
                if is_over and (not server.is_hosted or (was_there and may_be_lost)):
                    return False
                order.leave(arrival)
                return await self._serve_unplaced(server, request, send_to, may_be_lost)
            try:
                read = await server.cache.read(process, request)
                server, process, read = await self._choose(servers, server, process, read)
            except WillBeRefused as why:
                order.leave(arrival)
                send = self._sending(server, request, send_to)
                await server.cache.let_refuse(process, request, send, why)
                return True
            except DeskClosed:
                server.poke()
                await server.is_lost()
                return False
            if len(servers) > 1:  # the time in the queues of all of them counts
                queued_at = self._queued_at.setdefault(request.id, time.monotonic())
                read = replace(read, request=replace(read.request, queued_at=queued_at))
            return await self._serve_by(server, process, read, send_to)
        finally:
            for each in servers:
                each.on_way.discard(request.id)
            if servers[0].is_hosted:
                order.leave(arrival)

    async def _choose(
        self, servers: Sequence[Server], reader: Server, process: Session, read: ReadRequest
    ) -> tuple[Server, Session, ReadRequest]:
        """Return the best llama-server for a request that *reader* has read, and what it serves there.

        Raises what `Cache.take_over` does.
        """
        present = [(server, there) for server in servers if (there := server.process)]
        server, chosen = reader, process
        if len(present) > 1:
            offers = [_offer(s, there, read).beside(len(s.on_way)) for s, there in present]
            server, chosen = present[best_offer(offers)]
        server.on_way.add(read.request.id)
        if chosen is not process:
            read = await server.cache.take_over(chosen, read)
        return server, chosen, read

    async def _serve_by(
        self, server: Server, process: Session, read: ReadRequest, send_to: SendTo
    ) -> bool:
        """Serve a request that was read; return False if it has to be served elsewhere."""
        key, request = key_of(read), read.request
        self._fatal.require_harmless(key)

        async def turn() -> None:
            await server.order.turn(request.arrival)
            server.order.leave(request.arrival)  # whoever is next comes to the queue after us
            server.on_way.discard(request.id)

        try:
            await server.cache.serve(process, read, self._sending(server, request, send_to), turn)
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

    async def _serve_unplaced(
        self, server: Server, request: GenerationRequest, send_to: SendTo, may_be_lost: bool
    ) -> bool:
        """Forward to a llama-server that is not attached; return False if its host has gone away."""
        send, answer = self._sending(server, request, send_to), None
        try:
            answer = await send(request.raw, lambda: None)
        except UpstreamGone as gone:
            server.poke()
            may_be_lost &= server.is_hosted and isinstance(gone, UpstreamNotReached)
            if may_be_lost and await server.is_lost():
                return False
            raise
        finally:
            is_refused = answer is not None and answer.status in (401, 403)
            if server.process and not is_refused:  # attached meanwhile: it ran in some slot
                server.process.attachment.desk.table.forget_free()
        self._report(request, answer, Outcome.DEGRADED, "llama-server is not attached")
        return True

    def _report(
        self, request: GenerationRequest, answer: Answer, outcome: Outcome, why: str
    ) -> None:
        self._shared.report.answered(request, answer, outcome, Judgement(), why=why)

    def _sending(self, server: Server, request: GenerationRequest, send_to: SendTo) -> Send:
        """Return how to send to a llama-server, noting what its answer tells."""
        send = send_to(server.upstream)

        async def send_and_watch(
            raw: bytes, on_start: Callable[[], None], n_found: int | None = None
        ) -> Answer:
            answer = await send(raw, on_start, n_found)
            self.stabilizing.note_calls(request, answer.calls)
            if answer.is_broken:
                server.poke()
            return answer

        return send_and_watch


def _offer(server: Server, process: Session, read: ReadRequest) -> Offer:
    """Return what a llama-server can do for a request; one that was not read goes by who is busy."""
    attachment, prompt = process.attachment, read.prompt
    if prompt is not None:
        namespace = attachment.tenant_namespace(read.request.tenant)
        return Planning(server.services, process, replace(prompt, namespace=namespace)).offer()
    n_busy = sum(slot.is_leased for slot in attachment.desk.table)
    return Offer(0.0, 0, n_busy, attachment.desk.n_waiting, len(attachment.desk.table))
