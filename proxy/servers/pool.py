"""Several llama-servers behind one proxy: which of them serves a request."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from proxy.core.model import Checkpoint
from proxy.errors import UpstreamFault
from proxy.llama.client import LlamaServer
from proxy.llama.hosts import recognise
from proxy.llama.routes import Presence, Target, unloads_models
from proxy.log import get_logger
from proxy.servers.backend import Backend, Group
from proxy.servers.models import HostedModels
from proxy.servers.server import Absence
from proxy.serving.process import Shared

# All llama-servers that the proxy stands before, and which of them may serve a request.
#
# What answers at an address is found out when it is first asked: a llama-server, or a host of models that
# starts one for each.


_RETRY_SECONDS = 1.0
IsHost = Callable[[], Awaitable[bool]]
Build = Callable[[LlamaServer, str, IsHost], Backend]
"""Builds what follows and serves one llama-server: which one, what it is called among others, empty if it
is the only one, and what tells whether it is none, but a host of models."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long requests wait for an absent host, and how long a model may take to be saved."""

    wait_seconds: float
    save_seconds: float


class Fleet:
    """The llama-servers behind one proxy."""

    def __init__(
        self, roots: Sequence[LlamaServer], build: Build, shared: Shared, patience: Patience
    ) -> None:
        self._build = build
        self._tasks = shared.tasks
        self._everywhere = shared.everywhere
        self._faults = shared.faults
        self._patience = patience
        self._log = get_logger("fleet")
        self._running: list[asyncio.Task[None]] = []
        self._roots = list(roots)
        self._plain = Group([])
        self._hosted: dict[LlamaServer, HostedModels] = {}

    @asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """Follow all llama-servers while the block runs."""
        for root in self._roots:
            where = root.target.name if len(self._roots) > 1 else ""
            self._plain.backends.append(self._start(root, where, partial(self._is_host, root)))
        if len(self._roots) > 1:
            self._plain.share()
        try:
            yield
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    @property
    def backends(self) -> list[Backend]:
        """Every llama-server that is followed: at an address, or as a model that was loaded once."""
        of_models = (b for hosted in self._hosted.values() for b in hosted.backends)
        return [*self._plain.backends, *of_models]

    @property
    def n_waiting(self) -> int:
        """How many requests wait for a slot, for llama-server or for a model."""
        return sum(b.lifecycle.n_waiting for b in self.backends) + sum(
            hosted.n_waiting for hosted in self._hosted.values()
        )

    @property
    def is_single(self) -> bool:
        """Whether there is one llama-server, at an address of its own."""
        return len(self._plain.backends) == 1 and not self._hosted

    @property
    def first(self) -> LlamaServer:
        """An attached llama-server; if there is none, what answers at the first address."""
        attached = (b.services.upstream for b in self.backends if b.lifecycle.current)
        return next(attached, self._roots[0])

    @property
    def roots(self) -> list[LlamaServer]:
        """What answers at the addresses, those first that are there: any may answer for all."""
        plain = {b.services.upstream: b.lifecycle.current is None for b in self._plain.backends}
        hosts = {root: hosted.absence.is_waited_for for root, hosted in self._hosted.items()}
        is_away = plain | hosts
        return sorted(self._roots, key=lambda root: is_away.get(root, True))

    def _start(self, upstream: LlamaServer, where: str, is_host: IsHost) -> Backend:
        backend = self._build(upstream, where, is_host)
        self._run(backend.run)
        return backend

    def _run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._running.append(asyncio.ensure_future(self._supervised(work)))

    async def _supervised(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Go on with what follows a llama-server, whatever went wrong with it."""
        while True:
            try:
                return await work()
            except Exception as error:
                self._faults.record("lifecycle", error)
                await asyncio.sleep(_RETRY_SECONDS)

    async def _is_host(self, root: LlamaServer) -> bool:
        """Find out whether a host of models answers at an address; if so, it is followed from now on."""
        if (host := await recognise(root)) is None:
            return False
        self._log.info("several models", address=root.target.base_url, kind=host.kind)

        def new_backend(target: Target, presence: Presence) -> Backend:
            return self._start(root.at(target, presence), target.name, _is_no_host)

        hosted = HostedModels(
            root,
            host,
            new_backend,
            self._tasks,
            Absence(self._patience.wait_seconds, is_expected=True),
            self._everywhere.at(root.target.name),
            self._patience.save_seconds,
        )
        with suppress(UpstreamFault):
            await hosted.look()
        self._plain.backends = [b for b in self._plain.backends if b.services.upstream is not root]
        self._hosted[root] = hosted
        self._run(hosted.watch)
        return True

    @asynccontextmanager
    async def group(
        self, model: str, since: float, keys: Mapping[str, str]
    ) -> AsyncIterator[Group | None]:
        """Yield the llama-servers that may serve a request for *model*, loaded while the block runs.

        None if no host knows it. Raises UpstreamAbsent if the host is away for too long; *since* is when
        the request began to wait. *keys* are the headers with its client's key.
        """
        hosted, named = await self._find(model, keys)
        if hosted is not None and named:
            async with hosted.use(named, since, keys) as group:
                yield group
        else:
            yield self._plain if self._plain.backends else None

    async def _find(self, model: str, keys: Mapping[str, str]) -> tuple[HostedModels | None, str]:
        """Return a host that has a model, one that has loaded it if there is one, and its name there."""
        hosts = list(self._hosted.values()) if model else []
        found = [(hosted, name) for hosted in hosts if (name := hosted.known(model))]
        if not found:
            asked = [(hosted, await hosted.named(model, keys)) for hosted in hosts]
            found = [(hosted, name) for hosted, name in asked if name]
        return min(found, key=_preference, default=(None, ""))

    def split_path(self, path: str, model: str) -> tuple[str, str]:
        """Return the model that a client's path names, and the path as a llama-server would see it.

        *model* is what its query says.
        """
        split = [(hosted, *hosted.split_path(path, model)) for hosted in self._hosted.values()]
        known = (found for found in split if found[0].known(found[1]))
        shortest = sorted(split, key=lambda found: len(found[2]))
        _, named, rest = next(known, next(iter(shortest), (None, "", path)))
        return named, rest

    @property
    def has_models(self) -> bool:
        """Whether requests have to say which model they are for."""
        return bool(self._hosted)

    @asynccontextmanager
    async def passing(
        self, method: str, path: str, model: str, keys: Mapping[str, str]
    ) -> AsyncIterator[Sequence[LlamaServer]]:
        """Yield where to pass on a request that is no generation, with its model loaded meanwhile.

        Where several can take it, the next one is for when one cannot be reached.
        """
        if unloads_models(method, path):
            await asyncio.gather(*(hosted.save_all(keys) for hosted in self._hosted.values()))
        elif model:
            hosted, named = await self._find(model, keys)
            if hosted is not None and named:
                async with hosted.use(named, time.monotonic(), keys):
                    yield [hosted.root]
                return
        yield self.roots

    async def drain(self, seconds: float) -> None:
        """Save every dirty slot now, in at most *seconds*."""
        await asyncio.gather(*(b.write_back.drain(seconds) for b in self.backends))

    def give_up(self) -> None:
        """Send away whoever waits for a llama-server: the proxy is about to stop."""
        for backend in self.backends:
            backend.lifecycle.absence.give_up()
        for hosted in self._hosted.values():
            hosted.give_up()


def _preference(found: tuple[HostedModels, str]) -> tuple[bool, bool]:
    """Return what puts one host that has a model before another: that it is there, and has it loaded."""
    hosted, model = found
    return hosted.absence.is_waited_for, not hosted.is_loaded(model)


async def _is_no_host() -> bool:
    return False


# The verification of stored states in the background, and what follows from a damaged one.
#
# A state is verified before its first restore in any case; here those are found that nobody asks for,
# before their checksums are all that is left of them.


BYTES_PER_SECOND = 32 << 20
"""So little that neither a request nor a slow disk feels it; 20 GiB take eleven minutes."""
_LOOK_SECONDS = 60.0


class Verifying:
    """Verifies states that were not verified for *interval_seconds*; 0 leaves that to their restores."""

    def __init__(self, shared: Shared, fleet: Fleet, interval_seconds: float) -> None:
        self._store = shared.opened_store
        self._metrics = shared.metrics
        self._faults = shared.faults
        self._fleet = fleet
        self._interval_seconds = interval_seconds
        if self._store is not None:
            self._store.on_damage = self._note_damage

    @asynccontextmanager
    async def in_background(self) -> AsyncIterator[None]:
        """Verify whatever is due, that first which was not verified for longest, while the block runs."""
        running = asyncio.ensure_future(self._run())
        try:
            yield
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    async def _run(self) -> None:
        while self._store is not None and self._interval_seconds:
            due_before = time.time() - self._interval_seconds
            due = (c for c in self._store if c.verified_at < due_before)
            for checkpoint in sorted(due, key=lambda c: c.verified_at):
                try:
                    await self._store.verify(checkpoint, bytes_per_second=BYTES_PER_SECOND)
                except Exception as fault:
                    self._faults.record("verify", fault)
            await asyncio.sleep(min(_LOOK_SECONDS, self._interval_seconds))

    def _note_damage(self, damaged: Checkpoint, stemming: list[Checkpoint]) -> None:
        """Tell of a damaged file, and taint the slots that hold what may stem from it."""
        self._metrics.damaged_checkpoints.inc()
        get_logger("store").warning(
            "state damaged: it is removed, and what may stem from it",
            file=damaged.file_name,
            n_tokens=damaged.n_tokens,
            stemming=[checkpoint.file_name for checkpoint in stemming],
        )
        for backend in self._fleet.backends:
            if process := backend.lifecycle.current:
                ids = [checkpoint.id for checkpoint in (damaged, *stemming)]
                process.slots.distrust(ids)
