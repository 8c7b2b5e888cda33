"""The llama-servers and hosts of models at the addresses of `upstream`.

Each address is watched: it has a llama-server, or a host that starts a llama-server for each of its models.
`servers/pool.py` chooses the llama-server for a request.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from proxy.core.launch import Launch
from proxy.core.model import Checkpoint
from proxy.llama.client import LlamaServer
from proxy.llama.hosts import recognise
from proxy.llama.requests import unloads_models
from proxy.log import get_logger
from proxy.servers.background import drain, remember_rates, save_idle_slots, verify_stored
from proxy.servers.models import HostedModels
from proxy.servers.server import Phase, Server
from proxy.serving.process import Process
from proxy.serving.queue import SlotQueue
from proxy.serving.shared import Services, Shared
from proxy.settings import Settings

_RETRY_SECONDS = 1.0


class Addresses:
    """The llama-servers and hosts of models behind one proxy."""

    def __init__(
        self,
        settings: Settings,
        shared: Shared,
        roots: Sequence[LlamaServer],
        launch: Launch | None,
    ) -> None:
        """With a *launch*, llama-server is being started with it: the first requests wait for that."""
        self.settings = settings
        self._shared = shared
        self._roots = list(roots)
        self._launch = launch
        self._running: list[asyncio.Task[None]] = []
        self._plain: list[Server] = []
        self._hosts: dict[LlamaServer, HostedModels] = {}

    @asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """Watch all llama-servers, and verify stored states, while the block runs."""
        is_single = len(self._roots) == 1
        for root in self._roots:
            where = "" if is_single else root.target.name
            server = self._followed(self._shared.of(root, where), is_host_of_models=self._is_host)
            self._plain.append(server)
            if not is_single:
                server.on_idle = self._call_away
        if self._shared.opened_store is not None:
            self._shared.opened_store.on_damage = self._note_damage
        self._run(partial(verify_stored, self._shared))
        try:
            yield
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

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

    async def accounted(self) -> None:
        """Wait until every answered request is recorded."""
        reading = [task for process in self.processes for _, task in process.settling]
        if reading:
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

    async def find(self, model: str, keys: Mapping[str, str]) -> tuple[HostedModels | None, str]:
        """Return a host that has a model, loaded if possible, and the model's name there."""
        hosts = list(self._hosts.values()) if model else []
        found = [(hosted, name) for hosted in hosts if (name := hosted.models.named(model))]
        if not found:
            asked = [(hosted, await hosted.named(model, keys)) for hosted in hosts]
            found = [(hosted, name) for hosted, name in asked if name]

        def is_worse(each: tuple[HostedModels, str]) -> tuple[bool, bool]:
            hosted, name = each
            return hosted.is_away, name not in hosted.loaded

        return min(found, key=is_worse, default=(None, ""))

    @asynccontextmanager
    async def passing(
        self, method: str, path: str, model: str, keys: Mapping[str, str]
    ) -> AsyncIterator[Sequence[LlamaServer]]:
        """Yield where to forward a request that is no generation; its model stays loaded in the block.

        Each of the llama-servers may take the request: the next one if the one before cannot be reached.
        """
        if unloads_models(method, path):
            await asyncio.gather(*(hosted.save_all(keys) for hosted in self._hosts.values()))
        elif model:
            hosted, named = await self.find(model, keys)
            if hosted is not None:
                if method == "GET" and hosted.host.hides_names and named not in hosted.loaded:
                    # Only llama-swap's configuration tells for which paths it loads a model.
                    await hosted.save_all(keys)
                    yield [hosted.root]
                    return
                async with hosted.use(named, time.monotonic(), keys):
                    yield [hosted.root]
                return
        yield self.roots

    async def drain(self, seconds: float) -> None:
        """Save every dirty slot now, in at most *seconds*."""
        await drain(self.processes, seconds)

    def give_up(self) -> None:
        """Refuse all requests that wait for a llama-server: the proxy is about to stop."""
        for each in (*self.servers, *self._hosts.values()):
            each.give_up()

    def _followed(self, services: Services, **options: Any) -> Server:
        """Return a new Server with its background work; *options* are those of Server."""
        server = Server(self.settings, services, self._launch, **options)
        self._run(server.watch)
        self._run(partial(save_idle_slots, lambda: server.process, self.settings.idle_save_seconds))
        self._run(partial(remember_rates, lambda: server.process))
        return server

    def _run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._running.append(asyncio.ensure_future(self._supervised(work)))

    async def _supervised(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run background work until it ends; start it again after any fault."""
        while True:
            try:
                return await work()
            except Exception as error:
                self._shared.faults.record("lifecycle", error)
                await asyncio.sleep(_RETRY_SECONDS)

    def _note_damage(self, damaged: Checkpoint, stemming: list[Checkpoint]) -> None:
        """Log and count a damaged file, and taint the slots whose content may stem from it."""
        self._shared.metrics.damaged_checkpoints.inc()
        get_logger("store").warning(
            "state damaged: it is removed, and what may stem from it",
            file=damaged.file_name,
            n_tokens=damaged.n_tokens,
            stemming=[checkpoint.file_name for checkpoint in stemming],
        )
        for process in self.processes:
            process.slots.distrust([checkpoint.id for checkpoint in (damaged, *stemming)])

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
        self._run(hosted.watch)
        return True

    def _new_model(self, hosted: HostedModels, model: str) -> Server:
        upstream = hosted.root.at(hosted.host.target(model))
        return self._followed(self._shared.of(upstream, upstream.target.name), host=hosted)

    def _call_away(self, idle: SlotQueue) -> None:
        """Call a request away from the longest queue: the llama-server of *idle* has a free slot."""
        queues = [process.queue for server in self._plain if (process := server.process)]
        fullest = max(queues, key=lambda queue: queue.n_waiting, default=idle)
        if fullest is not idle:
            fullest.let_go()
