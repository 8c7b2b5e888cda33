"""The llama-servers and hosts of models at the addresses of `upstream`.

Each address is watched: it has a llama-server, or a host that starts a llama-server for each of its models.
`servers/pool.py` chooses the llama-server for a request.
"""

import asyncio
import bisect
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

from cachetools import TTLCache

from proxy import errors
from proxy.core.conditions import DegradationKind
from proxy.core.launch import Launch
from proxy.core.residency import Residents, next_step
from proxy.llama.client import LlamaServer
from proxy.llama.hosts import ModelHost, Models, recognise
from proxy.llama.requests import UNLOAD_ONE, is_too_deep, unloads_models
from proxy.log import get_logger
from proxy.servers import background
from proxy.servers.server import CUT_SECONDS, Phase, Server, Watched
from proxy.serving.process import Process
from proxy.serving.queue import FreeElsewhere, SlotQueue
from proxy.serving.request import Request
from proxy.serving.services import ServerServices, Services
from proxy.settings import Settings
from proxy.tasks import Tasks, wait_for

# The models of one host: which are loaded, how many requests use each, and when one is unloaded.
#
# A host ends a model's llama-server to load another model, and the content of its slots is lost. So the
# proxy decides when that happens: before a model is unloaded, it finishes its answers and its slots are
# saved.


_LOOK_SECONDS = 1.0
_N_UNKNOWN_NAMES = 256
_UNKNOWN_SECONDS = 60.0
"""How long the host is not asked again about a name that no model has."""


@dataclass(slots=True, eq=False)
class _WaitingForModel:
    since: float
    model: str
    admitted: "asyncio.Future[None]"


NewServer = Callable[["HostedModels", str], Server]
"""Makes the server of a model that its host has loaded for the first time."""


class HostedModels(Watched):
    """Watches a host of models, and lets requests use its models; its phase is attached while it answers.

    `models` are all models of the host; `servers` has an entry for each model that was loaded since the
    proxy started.
    """

    def __init__(
        self, settings: Settings, services: ServerServices, host: ModelHost, new_server: NewServer
    ) -> None:
        super().__init__(Phase.ATTACHED, settings.upstream_wait_seconds)
        self.root = services.upstream
        self.host = host
        self.is_polled = host.is_polled
        self.servers: dict[str, Server] = {}
        self._new_server = new_server
        self._degradations = services.degradations
        self._tasks = services.tasks
        self._save_seconds = settings.drain_seconds
        self.models = Models(frozenset(), frozenset())
        self._users: Counter[str] = Counter()
        self._used_at: dict[str, float] = {}
        self._together: set[frozenset[str]] = set()
        self._waiting: list[_WaitingForModel] = []
        self._changing: frozenset[str] = frozenset()
        self._failed: frozenset[str] = frozenset()
        """The model that could not be loaded last: its host tries again for each request."""
        self._has_given_up = False
        self._change_under_way: asyncio.Task[None] | None = None
        self._one_look = asyncio.Lock()
        self._unknown_names: TTLCache[str, bool] = TTLCache(_N_UNKNOWN_NAMES, _UNKNOWN_SECONDS)

    def give_up(self) -> None:
        """Refuse the requests that wait for a model, and all later ones: the proxy is about to stop."""
        super().give_up()
        self._has_given_up = True
        if self._change_under_way is not None:
            self._change_under_way.cancel()
        for waiting in self._waiting:
            if not waiting.admitted.done():
                told = "its model is not loaded yet"
                waiting.admitted.set_exception(errors.ServerAway(told, was_sent=False, status=503))
        self._waiting.clear()

    @property
    def n_queued(self) -> int:
        """How many requests wait for a model, or for the host itself."""
        return len(self._waiting) + self.n_waiting

    @property
    def loaded(self) -> frozenset[str]:
        return frozenset(m for m, s in self.servers.items() if s.phase is not Phase.UNLOADED)

    async def watch(self) -> None:
        """Follow which models are loaded, until something else answers at the address."""
        while True:
            self._poked.clear()
            await self.look()
            if self.phase is Phase.NOT_A_SERVER:
                return
            await wait_for(self._poked, _LOOK_SECONDS)

    async def look(self) -> None:
        """Ask the host which models it has loaded.

        Looks run one after the other, so that the result of an earlier one never replaces a later result.
        """
        async with self._one_look:
            try:
                self.models = await self.host.models()
            except errors.UpstreamSlow:
                return
            except errors.UpstreamRefused:
                if type(await recognise(self.root)) is type(self.host):
                    return
                self.enter(Phase.NOT_A_SERVER)
                self._degradations.leave()
                self.models = Models(frozenset(), frozenset())
                self._admit(self._waiting.copy())  # what answers there now may know them
            except errors.UpstreamUnreachable as fault:
                self.enter(Phase.UNREACHABLE)
                self._degradations.begin(DegradationKind.UNREACHABLE, str(fault))
                self.models = replace(self.models, loaded=frozenset())
                if self.is_long_unreachable:  # it will not finish the answers that it has begun
                    for upstream in (self.root, *(s.upstream for s in self.servers.values())):
                        upstream.cut_silent(CUT_SECONDS)
            else:
                self.enter(Phase.ATTACHED)
                self._degradations.leave()
                self._together.update(map(frozenset, combinations(self.models.loaded, 2)))
            self._note_loaded()
            self._advance()

    def _note_loaded(self) -> None:
        for model in self.models.loaded - self._changing:
            self.server(model).appear()
        for model in self.loaded - self.models.loaded:
            self.servers[model].lose()

    async def named(self, name: str, keys: Mapping[str, str]) -> str | None:
        """Look for a model with the name *name*; None if the host has none, or refuses these *keys*.

        A host may know names that it does not list: it is asked about such a name, which may load a model.
        """
        await self.look()
        found = self.models.named(name)
        if found or not self.host.hides_names or name in self._unknown_names:
            return found
        if await self.host.accepts(keys):
            # Only idle slots are saved: a mere name is no reason to wait for running requests.
            processes = (process for s in self.servers.values() if (process := s.process))
            await background.drain(processes, self._save_seconds)
            with suppress(errors.UpstreamUnreachable):  # the host may tell later
                with suppress(errors.UpstreamRefused):
                    found = await self.host.resolve(name)
                if found is None:
                    self._unknown_names[name] = True
            await self.look()
        return found

    def server(self, model: str) -> Server:
        """Return the server of a model; make it if there is none yet."""
        if model not in self.servers:
            self.servers[model] = self._new_server(self, model)
        return self.servers[model]

    @asynccontextmanager
    async def use(self, model: str, since: float, keys: Mapping[str, str]) -> AsyncIterator[Server]:
        """Keep a model loaded while the block runs, and load it first if it is not.

        Yields an unloaded server if the model cannot be loaded, no request may have it loaded, or the host
        does not accept the client's *keys*: then the host itself refuses the request. Raises ServerAway if
        the host is away for too long. Requests wait in the order of *since*, when each began to wait.
        """
        if self.is_away:
            self.poke()
            await self.back(since)
        server = self.server(model)
        may_wait = self._waiting or self._changing or server.phase is Phase.UNLOADED
        if model in self.models.by_hand or (may_wait and not await self.host.accepts(keys)):
            yield server
            return
        if self._has_given_up:
            told = "its model is not loaded, and the proxy is about to stop"
            raise errors.ServerAway(told, was_sent=False, status=503)
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = _WaitingForModel(since, model, admitted)
        bisect.insort(self._waiting, waiting, key=lambda each: each.since)
        self._advance()
        try:
            await admitted  # its model is loaded, or its load has failed
            yield server
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif not (admitted.cancelled() or admitted.exception()):
                self._users[model] -= 1
            self._advance()

    @property
    def _residents(self) -> Residents:
        together, n_at_most = frozenset(self._together), self.models.n_at_most
        return Residents(self.loaded, self._users, self._used_at, n_at_most, together)

    def _advance(self) -> None:
        """Admit the requests that can be served, and begin to load the next model."""
        wanted = [waiting.model for waiting in self._waiting]
        kept_out = self._changing | {m for m in self._failed - self.loaded if self._users[m]}
        admitted, load, leaving = next_step(wanted, self._residents, kept_out=kept_out)
        self._admit([self._waiting[index] for index in admitted])
        if load is not None:
            self._changing = leaving | {load}
            self._change_under_way = self._tasks.start(self._change(load, leaving))

    def _admit(self, admitted: Iterable[_WaitingForModel]) -> None:
        for waiting in admitted:
            self._waiting.remove(waiting)
            if not waiting.admitted.done():
                self._users[waiting.model] += 1
                self._used_at[waiting.model] = time.monotonic()
                waiting.admitted.set_result(None)

    async def _change(self, model: str, leaving: frozenset[str]) -> None:
        """Save and unload the models in *leaving*, then load *model*; if it cannot, the host says why."""
        before, began, log, reason = self.loaded, time.monotonic(), get_logger("models"), ""
        try:
            await self._let_go(leaving)
            await self.host.load(model)
        except errors.CacheFault as fault:  # vLLM, say, answers /health with nothing
            reason = str(fault)
        finally:
            await self.look()
            self._changing = frozenset()
            self._note_loaded()
            self._failed = frozenset({model}) - self.loaded
            gone = before - self.loaded
            if model in self.loaded:
                self._together -= {frozenset((model, other)) for other in gone}
            self._admit([w for w in self._waiting if w.model == model])
            self._advance()
        if model in self.loaded:
            seconds = round(time.monotonic() - began, 3)
            log.info("model loaded", model=model, seconds=seconds, unloaded=sorted(gone))
        elif reason:
            log.warning("model not loaded", model=model, reason=reason)

    async def _let_go(self, leaving: frozenset[str]) -> None:
        """Save the slots of these models, send the models nothing more, and unload them."""
        servers = [self.server(model) for model in leaving]
        await background.settle((s.process for s in servers if s.process), self._save_seconds)
        for server in servers:
            if server.process:  # no saved state is suspect because this process ends
                server.process.slots.forget_sources()
            server.lose()
        for model in leaving:
            await self.host.unload(model)

    async def save_before(self, path: str, model: str, keys: Mapping[str, str]) -> None:
        """Save the slots of the models that a client's request may unload, if the host accepts its *keys*.

        The request unloads one model, or loads one, or unloads all if *model* and *path* name none. Which
        models make room for one that is loaded is the host's choice.
        """
        may_go, named = self.loaded, self.models.named(model or path.removeprefix(UNLOAD_ONE))
        if named and "unload" in path:
            may_go &= {named}
        elif named and not self._residents.leaving_for(named):
            return
        if may_go and await self.host.accepts(keys):
            processes = (process for m in may_go if (process := self.servers[m].process))
            await background.settle(processes, self._save_seconds)


# All addresses.


_RETRY_SECONDS = 1.0


class Addresses:
    """The llama-servers and hosts of models behind one proxy."""

    def __init__(
        self, settings: Settings, shared: Services, roots: list[LlamaServer], launch: Launch | None
    ) -> None:
        """With a *launch*, llama-server is being started with it: the first requests wait for that."""
        self.settings = settings
        self._shared = shared
        self._roots = roots
        self._launch = launch
        self._running = Tasks()
        self._plain: list[Server] = []
        self._hosts: dict[LlamaServer, HostedModels] = {}

    @asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """Watch all llama-servers, and care for the store, while the block runs."""
        for root in self._roots:
            self._follow(root)
        if self._shared.opened_store is not None:
            self._shared.opened_store.on_damage = partial(background.note_damage, self._shared)
        self._run(partial(background.verify_stored, self._shared))
        self._run(partial(background.remember, self._shared, lambda: self.processes))
        try:
            yield
        finally:
            await self._running.drain(0)

    async def are_met(self) -> bool:
        """Look at all addresses; return whether first contact has ended wherever one answers."""
        await asyncio.gather(*(each.look() for each in (*self._plain, *self._hosts.values())))
        watched = (*self._plain, *self._hosts.values())  # a host may have turned out to be at one
        return not any(each.is_away or each.phase is Phase.ATTACHING for each in watched)

    @property
    def servers(self) -> list[Server]:
        """All llama-servers: those at addresses, and models that were loaded since the proxy started."""
        return [*self._plain, *(s for h in self._hosts.values() for s in h.servers.values())]

    @property
    def processes(self) -> list[Process]:
        return [process for server in self.servers if (process := server.process)]

    def split_path(self, path: str, model: str) -> tuple[str, str]:
        """Return the model that a client's path names, and the path as a llama-server would see it.

        *model* is the one that the query names.
        """
        hosts = [(hosted.host, hosted.models) for hosted in self._hosts.values()]
        split = [(models, *host.split_path(path, model, models)) for host, models in hosts]
        known = (found for found in split if found[0].named(found[1]))
        shortest = min(split, key=lambda found: len(found[2]), default=(None, "", path))
        _, named, rest = next(known, shortest)
        return named, rest

    async def accounted(self) -> None:
        """Wait until every answered request is recorded."""
        if reading := [task for process in self.processes for _, task in process.settling]:
            await asyncio.wait(reading)

    @property
    def n_waiting(self) -> int:
        """How many requests wait for a slot, for llama-server or for a model."""
        n_for_models = sum(hosted.n_queued for hosted in self._hosts.values())
        return n_for_models + sum(server.n_queued for server in self.servers)

    @property
    def roots(self) -> list[LlamaServer]:
        """The llama-servers and hosts at the addresses; the reachable ones come first."""
        plain = {server.upstream: server.process is None for server in self._plain}
        is_away = plain | {root: host.is_away for root, host in self._hosts.items()}
        return sorted(self._roots, key=lambda root: is_away.get(root, True))

    @property
    def has_models(self) -> bool:
        """Whether requests must name their model."""
        return bool(self._hosts)

    def require_named(self, request: Request) -> None:
        """Raise ProxyError if a host of models may read which one a body is for, and the proxy cannot.

        It would run in a slot that nobody has leased. Nobody looks up sounds, which come in forms.
        """
        is_hidden = request.body is None and "/audio/" not in request.path
        if is_hidden and (not request.is_json or is_too_deep(request.raw)):
            raise errors.ProxyError("which model this body is for cannot be read here", 400)

    async def find(self, model: str, keys: Mapping[str, str]) -> tuple[HostedModels | None, str]:
        """Return a host that has a model, loaded if possible, and the model's name there."""
        hosts = list(self._hosts.values()) if model else []
        found = [(hosted, name) for hosted in hosts if (name := hosted.models.named(model))]
        if not found:
            asked = [(hosted, await hosted.named(model, keys)) for hosted in hosts]
            found = [(hosted, name) for hosted, name in asked if name]
        # The best one is there, and has loaded the model.
        return min(found, key=lambda f: (f[0].is_away, f[1] not in f[0].loaded), default=(None, ""))

    @asynccontextmanager
    async def passing(
        self, method: str, path: str, model: str, keys: Mapping[str, str]
    ) -> AsyncIterator[Sequence[LlamaServer]]:
        """Yield where to forward a request that is no generation; its model stays loaded in the block.

        Each of the llama-servers may take the request: the next one if the one before cannot be reached.
        """
        if unloads_models(method, path):
            hosts = self._hosts.values()
            await asyncio.gather(*(hosted.save_before(path, model, keys) for hosted in hosts))
        elif model:
            hosted, named = await self.find(model, keys)
            if hosted is not None:
                if method != "POST" and hosted.host.hides_names and named not in hosted.loaded:
                    # Only llama-swap's configuration tells for which paths it loads a model.
                    await hosted.save_before("", named, keys)
                    yield [hosted.root]
                    return
                async with hosted.use(named, time.monotonic(), keys):
                    yield [hosted.root]
                return
        yield self.roots

    async def drain(self, seconds: float) -> None:
        """Save every dirty slot now, in at most *seconds*."""
        await background.drain(self.processes, seconds)

    def give_up(self) -> None:
        """Refuse all requests that wait for a llama-server: the proxy is about to stop."""
        for each in (*self.servers, *self._hosts.values()):
            each.give_up()

    def _follow(self, root: LlamaServer) -> None:
        """Follow what answers at an address as a llama-server, until it turns out to be a host."""
        is_single = len(self._roots) == 1
        services = self._shared.of(root, "" if is_single else root.target.name)
        self._plain.append(server := self._followed(services, is_host_of_models=self._is_host))
        if not is_single:
            server.on_idle = self._call_away

    async def _follow_host(self, hosted: HostedModels) -> None:
        await hosted.watch()
        del self._hosts[hosted.root]
        self._follow(hosted.root)

    def _followed(self, services: ServerServices, **options: Any) -> Server:
        """Return a new Server with its background work; *options* are those of Server."""
        server = Server(self.settings, services, self._launch, **options)
        server.looks = self._running
        self._run(server.watch)
        idle_seconds = self.settings.idle_save_seconds
        self._run(partial(background.save_idle_slots, lambda: server.process, idle_seconds))
        return server

    def _run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._running.start(self._supervised(work))

    async def _supervised(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run background work until it ends; start it again after any fault."""
        while True:
            try:
                return await work()
            except Exception as error:
                self._shared.faults.record("lifecycle", error)
                await asyncio.sleep(_RETRY_SECONDS)

    async def _is_host(self, server: Server) -> bool:
        """Return whether a host of models answers at an address; if so, its models replace *server*."""
        root = server.upstream
        if (host := await recognise(root)) is None:
            return False
        get_logger("pool").info("several models", address=root.target.base_url, kind=host.kind)
        services = self._shared.of(root, root.target.name)
        hosted = HostedModels(self.settings, services, host, self._new_model)
        await hosted.look()
        self._plain.remove(server)
        self._hosts[root] = hosted
        self._run(partial(self._follow_host, hosted))
        return True

    def _new_model(self, hosted: HostedModels, model: str) -> Server:
        upstream = hosted.root.at(hosted.host.target(model))
        return self._followed(self._shared.of(upstream, upstream.target.name), host=hosted)

    def _call_away(self, idle: SlotQueue) -> None:
        """Call a request away from the longest queue: the llama-server of *idle* has a free slot."""
        queues = [process.queue for server in self._plain if (process := server.process)]
        fullest = max(queues, key=lambda queue: queue.n_waiting, default=idle)
        if fullest is not idle:
            fullest.refuse_first(FreeElsewhere())
