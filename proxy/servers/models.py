"""The models of one host: which are loaded, how many requests use each, and when one is unloaded.

A host ends a model's llama-server to load another model, and the content of its slots is lost. So the proxy
decides when that happens: before a model is unloaded, it finishes its answers and its slots are saved.
"""

import asyncio
import bisect
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import combinations

from cachetools import TTLCache

from proxy.core.conditions import DegradationKind
from proxy.core.residency import Residents, next_step
from proxy.errors import (
    CacheFault,
    ServerAway,
    UpstreamFault,
    UpstreamRefused,
    UpstreamSlow,
    UpstreamUnreachable,
)
from proxy.llama.hosts import ModelHost, Models
from proxy.log import get_logger
from proxy.servers.background import drain, settle
from proxy.servers.server import CUT_SECONDS, Phase, Server, Watched
from proxy.serving.process import Process
from proxy.serving.shared import Services
from proxy.settings import Settings

_LOOK_SECONDS = 1.0
_N_UNKNOWN_NAMES = 256
_UNKNOWN_SECONDS = 60.0
"""How long the host is not asked again about a name that no model has."""


@dataclass(slots=True, eq=False)
class _WaitingForModel:
    since: float
    model: str
    admitted: "asyncio.Future[None]"


class HostedModels(Watched):
    """Watches a host of models, and lets requests use its models; its phase is attached while it answers.

    `models` are all models of the host; `servers` has an entry for each model that was loaded since the
    proxy started.
    """

    def __init__(
        self,
        settings: Settings,
        services: Services,
        host: ModelHost,
        new_server: Callable[["HostedModels", str], Server],
    ) -> None:
        super().__init__(Phase.ATTACHED, settings.upstream_wait_seconds, was_there=True)
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
                waiting.admitted.set_exception(
                    ServerAway("its model is not loaded yet", was_sent="no", status=503)
                )
        self._waiting.clear()

    @property
    def n_queued(self) -> int:
        """How many requests wait for a model, or for the host itself."""
        return len(self._waiting) + self.n_waiting

    @property
    def loaded(self) -> frozenset[str]:
        return frozenset(m for m, s in self.servers.items() if s.phase is not Phase.UNLOADED)

    @property
    def processes(self) -> list[Process]:
        return [process for server in self.servers.values() if (process := server.process)]

    async def watch(self) -> None:
        """Follow which models are loaded, until cancelled."""
        while True:
            await self.look()
            await self.pause(_LOOK_SECONDS)

    async def look(self) -> None:
        """Ask the host which models it has loaded.

        Looks run one after the other, so that the result of an earlier one never replaces a later result.
        """
        async with self._one_look:
            try:
                self.models = await self.host.models()
            except (UpstreamSlow, UpstreamRefused):
                return
            except UpstreamUnreachable as fault:
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
        """Return the model with the name *name*; None if the host has none, or refuses these *keys*.

        A host may know names that it does not list: it is asked about such a name, which may load a model.
        """
        if (found := self.models.named(name)) is None:
            await self.look()
            found = self.models.named(name)
        if found or not self.host.hides_names or name in self._unknown_names:
            return found
        if await self.host.accepts(keys):
            # Only idle slots are saved: a mere name is no reason to wait for running requests.
            await drain(self.processes, self._save_seconds)
            with suppress(UpstreamFault):  # the host may tell later
                try:
                    found = await self.host.resolve(name)
                except UpstreamRefused:
                    found = None
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

        Yields an unloaded server if the model cannot be loaded, or the host does not accept the client's
        *keys*: then the host itself refuses the request. Raises ServerAway if the host is away for too
        long; the request has waited *since* that moment.
        """
        if self.is_away:
            self.poke()
            await self.back(since)
        server = self.server(model)
        may_wait = self._waiting or self._changing or server.phase is Phase.UNLOADED
        if may_wait and not await self.host.accepts(keys):
            yield server
            return
        await self._admission(model, since)
        try:
            yield server
        finally:
            self._users[model] -= 1
            self._advance()

    async def _admission(self, model: str, since: float) -> None:
        """Wait until the model is loaded, or its load has failed; the queue is ordered by *since*."""
        if self._has_given_up:
            raise ServerAway(
                "its model is not loaded, and the proxy is about to stop", was_sent="no", status=503
            )
        waiting = _WaitingForModel(since, model, asyncio.get_running_loop().create_future())
        bisect.insort(self._waiting, waiting, key=lambda each: each.since)
        self._advance()
        try:
            await waiting.admitted
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif not waiting.admitted.cancelled() and not waiting.admitted.exception():
                self._users[model] -= 1
            self._advance()
            raise

    def _advance(self) -> None:
        """Admit the requests that can be served, and begin to load the next model."""
        residents = Residents(
            self.loaded,
            self._users,
            self._used_at,
            self.models.n_at_most,
            frozenset(self._together),
        )
        wanted = [waiting.model for waiting in self._waiting]
        admitted, load, leaving = next_step(wanted, residents, kept_out=self._changing)
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
        """Save and unload the models in *leaving*, then load *model*."""
        before, began = self.loaded, time.monotonic()
        try:
            await self._let_go(leaving)
            await self.host.load(model)
        except CacheFault as fault:
            get_logger("models").warning("model not loaded", model=model, reason=str(fault))
        finally:
            await self.look()
            self._changing = frozenset()
            self._note_loaded()
            gone = before - self.loaded
            if model in self.loaded:
                self._together -= {frozenset((model, other)) for other in gone}
            else:  # the host's own answer says why the model cannot be loaded
                self._admit([w for w in self._waiting if w.model == model])
            self._advance()
        if model in self.loaded:
            seconds = round(time.monotonic() - began, 3)
            log = get_logger("models")
            log.info("model loaded", model=model, seconds=seconds, unloaded=sorted(gone))

    async def _let_go(self, leaving: frozenset[str]) -> None:
        """Save the slots of these models, send the models nothing more, and unload them."""
        servers = [self.server(model) for model in leaving]
        await settle((s.process for s in servers if s.process), self._save_seconds)
        for server in servers:
            if server.process:  # no saved state is suspect because this process ends
                server.process.slots.forget_sources()
            server.lose()
        for model in leaving:
            await self.host.unload(model)

    async def save_all(self, keys: Mapping[str, str]) -> None:
        """Save the slots of all models before a client unloads some, if the host accepts its *keys*."""
        if await self.host.accepts(keys):
            await settle(self.processes, self._save_seconds)
