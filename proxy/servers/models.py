"""The models of one host: which are loaded, who uses them, and how they make room for each other.

A host ends a model's llama-server to load another, and what its slots held is gone. So the proxy decides
when that happens: a model that has to go is let finish what it answers and is written back first.
"""

import asyncio
import bisect
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import combinations

from proxy.core.conditions import DegradationKind
from proxy.core.residency import Residents, next_step
from proxy.errors import (
    CacheFault,
    UpstreamAbsent,
    UpstreamFault,
    UpstreamSlow,
    UpstreamUnreachable,
)
from proxy.health import Degradations
from proxy.llama.client import LlamaServer
from proxy.llama.hosts import ModelHost, Models
from proxy.llama.routes import Presence
from proxy.log import get_logger
from proxy.servers.backend import Backend, Group, HiddenNames, NewBackend
from proxy.servers.server import CUT_SECONDS, Absence
from proxy.tasks import Tasks

_LOOK_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class _WaitingForModel:
    since: float
    model: str
    admitted: "asyncio.Future[None]"


class HostedModels:
    """Follows a host of models, and lets requests use them."""

    def __init__(
        self,
        root: LlamaServer,
        host: ModelHost,
        new_backend: NewBackend,
        tasks: Tasks,
        absence: Absence,
        degradations: Degradations,
        save_seconds: float,
    ) -> None:
        self.root = root
        self._host = host
        self.absence = absence
        self._degradations = degradations
        self._new_backend = new_backend
        self._tasks = tasks
        self._save_seconds = save_seconds
        self._log = get_logger("models")
        self._models = Models(frozenset(), frozenset())
        self._groups: dict[str, Group] = {}
        self._users: Counter[str] = Counter()
        self._used_at: dict[str, float] = {}
        self._together: set[frozenset[str]] = set()
        self._waiting: list[_WaitingForModel] = []
        self._changing: frozenset[str] = frozenset()
        self._has_given_up = False
        self._change_under_way: asyncio.Task[None] | None = None
        self._poked = asyncio.Event()
        self._looking = asyncio.Lock()
        self._hidden_names = HiddenNames(host)

    def give_up(self) -> None:
        """Send away whoever waits for a model, now and from now on: the proxy is about to stop."""
        self._has_given_up = True
        self.absence.give_up()
        if self._change_under_way is not None:
            self._change_under_way.cancel()
        for waiting in self._waiting:
            if not waiting.admitted.done():
                waiting.admitted.set_exception(UpstreamAbsent("its model is not loaded yet"))
        self._waiting.clear()

    @property
    def n_waiting(self) -> int:
        """How many requests wait for a model, or for the host itself."""
        return len(self._waiting) + self.absence.n_waiting

    @property
    def backends(self) -> list[Backend]:
        """Those of the models that have been loaded since the proxy runs."""
        return [backend for group in self._groups.values() for backend in group.backends]

    async def watch(self) -> None:
        """Follow what is loaded, until cancelled."""
        while True:
            await self._try_to_look()
            self._poked.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._poked.wait()

    def poke(self) -> None:
        """Look soon: something went wrong with a model."""
        self._poked.set()

    async def look(self) -> None:
        """Ask the host which models it has loaded; raises UpstreamFault if it does not say.

        One look after the other, so that what an earlier one saw is never believed after a later one.
        """
        async with self._looking:
            try:
                models = await self._host.models()
            except UpstreamSlow:
                raise
            except UpstreamUnreachable as fault:
                self.absence.note_unreachable()
                self._degradations.begin(DegradationKind.UNREACHABLE, str(fault))
                self._follow(replace(self._models, loaded=frozenset()))
                if self.absence.unreachable_seconds >= CUT_SECONDS:
                    self._cut_silent()
                raise
            self.absence.note_answer()
            self._degradations.leave()
            self._follow(models)

    def _cut_silent(self) -> None:
        """End what the host has begun to answer and will not go on with."""
        for upstream in (self.root, *(backend.services.upstream for backend in self.backends)):
            upstream.pending.cut_silent(CUT_SECONDS)

    async def _try_to_look(self) -> None:
        with suppress(UpstreamFault):
            await self.look()

    def _follow(self, models: Models) -> None:
        self._models = models
        self._together.update(map(frozenset, combinations(models.loaded, 2)))
        for model in models.loaded - self._changing:
            self._note_loaded(self.group(model))
        for model, group in self._groups.items():
            if model not in models.loaded and group.presence.is_there:
                self._lose(group)
        self._advance()

    def _note_loaded(self, group: Group) -> None:
        if not group.presence.is_there:
            group.presence.is_there = True
            for backend in group.backends:
                backend.lifecycle.poke()

    def _lose(self, group: Group) -> None:
        group.presence.lose()
        for backend in group.backends:
            backend.lifecycle.end()

    def split_path(self, path: str, model: str) -> tuple[str, str]:
        """Return the model that a client's path or its query (*model*) names, and the path without it."""
        return self._host.split_path(path, model, self._models)

    def known(self, name: str) -> str | None:
        """Return the model that clients call *name*, as far as that is known."""
        return self._models.named(name)

    async def named(self, name: str, keys: Mapping[str, str]) -> str | None:
        """Return the model that clients call *name*, None if the host has none, or not for these *keys*."""
        found = self.known(name)
        if found is None:
            await self._try_to_look()
            found = self.known(name)
        is_asked = found is None and self._hidden_names.may_be_one(name)
        if is_asked and await self._host.accepts(keys):
            # To ask for a model loads it: what is idle is saved, and nobody is held up for a name.
            await asyncio.gather(*(b.write_back.drain(self._save_seconds) for b in self.backends))
            found = await self._hidden_names.find(name)
            await self._try_to_look()
        return found

    def is_loaded(self, model: str) -> bool:
        return model in self._models.loaded

    def group(self, model: str) -> Group:
        """Return what serves a model."""
        if model not in self._groups:
            presence = Presence(is_there=False, is_polled=self._host.is_polled)
            backend = self._new_backend(self._host.target(model), presence)
            self._groups[model] = Group([backend], presence, self._try_to_look)
        return self._groups[model]

    @asynccontextmanager
    async def use(self, model: str, since: float, keys: Mapping[str, str]) -> AsyncIterator[Group]:
        """Keep a model loaded while the block runs, and load it first if need be.

        One that cannot be loaded, or not for who has no right *keys*, is left to the host to refuse: its
        `presence` says so. Raises UpstreamAbsent if the host is away for too long; *since* is when the
        request began to wait.
        """
        if self.absence.is_waited_for:
            self.poke()
            await self.absence.outlast(since)
        group = self.group(model)
        may_wait = self._waiting or self._changing or not self.is_loaded(model)
        if may_wait and not await self._host.accepts(keys):
            yield group
            return
        await self._admission(model, since)
        try:
            yield group
        finally:
            self._users[model] -= 1
            self._advance()

    async def _admission(self, model: str, since: float) -> None:
        """Return once the model is loaded, or could not be; who has to try again keeps its place."""
        if self._has_given_up:
            raise UpstreamAbsent("its model is not loaded, and the proxy is about to stop")
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
        """Let in whoever can be, and begin to load what is to be loaded next."""
        wanted = [waiting.model for waiting in self._waiting]
        step = next_step(wanted, self._residents(), kept_out=self._changing)
        self._admit([self._waiting[place] for place in step.admitted])
        if step.load is not None:
            self._changing = step.leaving | {step.load}
            self._change_under_way = self._tasks.start(self._change(step.load, step.leaving))

    def _residents(self) -> Residents:
        models = self._models
        return Residents(
            models.loaded, self._users, self._used_at, models.n_at_most, frozenset(self._together)
        )

    def _admit(self, admitted: Iterable[_WaitingForModel]) -> None:
        for waiting in admitted:
            self._waiting.remove(waiting)
            if not waiting.admitted.done():
                self._users[waiting.model] += 1
                self._used_at[waiting.model] = time.monotonic()
                waiting.admitted.set_result(None)

    async def _change(self, model: str, leaving: frozenset[str]) -> None:
        """Write back and unload the models that leave, and load the one that comes."""
        before, began = self._models.loaded, time.monotonic()
        try:
            await self._let_go(leaving)
            await self._host.load(model)
        except CacheFault as fault:
            self._log.warning("model not loaded", model=model, reason=str(fault))
        finally:
            await self._try_to_look()
            self._changing = frozenset()
            self._note_displaced(model, before)
            # Who waited for a model that cannot be loaded is told so by the host itself.
            if model not in self._models.loaded:
                self._admit([w for w in self._waiting if w.model == model])
            self._follow(self._models)
        if model in self._models.loaded:
            seconds, gone = time.monotonic() - began, sorted(before - self._models.loaded)
            self._log.info("model loaded", model=model, seconds=round(seconds, 3), unloaded=gone)

    async def _let_go(self, leaving: frozenset[str]) -> None:
        """Save what the slots of these models hold, and let nothing of ours reach them any more."""
        groups = [self.group(model) for model in leaving]
        backends = [backend for group in groups for backend in group.backends]
        await asyncio.gather(*(b.write_back.settle(self._save_seconds) for b in backends))
        for group in groups:
            for session in group.sessions:
                session.attachment.desk.table.forget_sources()  # its end is no fault of a state's
            self._lose(group)
        for model in leaving:
            await self._host.unload(model)

    def _note_displaced(self, model: str, before: frozenset[str]) -> None:
        """Note which of the models that were loaded *before* have gone for one that is loaded now."""
        gone = before - self._models.loaded if model in self._models.loaded else ()
        self._together -= {frozenset((model, other)) for other in gone}

    async def save_all(self, keys: Mapping[str, str]) -> None:
        """Save what all models hold: a client is about to have some unloaded, if its *keys* are right."""
        if await self._host.accepts(keys):
            await asyncio.gather(*(b.write_back.settle(self._save_seconds) for b in self.backends))
