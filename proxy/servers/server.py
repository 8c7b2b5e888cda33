"""One llama-server through all its processes: whether a process answers, and which requests ended one.

Its phase says whether a process answers. This file makes every change of a phase:

| event                                                | from                | to           |
|------------------------------------------------------|---------------------|--------------|
| a look finds a process that is not attached          | any but unloaded    | attaching    |
| the attach ends                                      | attaching           | attached     |
| a look gets no connection                            | any but unloaded    | unreachable  |
| a look is answered 503                               | any but unloaded    | loading      |
| a look is answered in a way that cannot be attached  | any but unloaded    | not a server |
| the host ends the process, or is about to (`lose`)   | any                 | unloaded     |
| the host has loaded the model (`appear`)             | unloaded            | attaching    |
| a host of models turns out to be at the address      | any                 | unloaded     |

A look that times out changes no phase: a busy llama-server is not gone, and /health says that it is silent.
A look during which the model was lost changes nothing: `epoch` counts the losses.

What a request does (`ready`):

- attached: it is served.
- attaching: it waits for the look that runs, for at most ATTACH_WAIT_SECONDS.
- loading: it waits, for at most `upstream_wait_seconds`.
- unreachable: it waits, for at most `upstream_wait_seconds` after llama-server went away or the proxy came.
- unloaded, not a server: it does not wait.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from enum import StrEnum
from functools import partial
from hashlib import blake2b
from math import inf

from cachetools import LRUCache

from proxy import errors
from proxy.core.conditions import OF_PROCESS, DegradationKind
from proxy.core.launch import Launch
from proxy.core.slots import Empty
from proxy.llama.client import Props
from proxy.log import get_logger
from proxy.servers.attach import attach, look_again
from proxy.serving.launches import outlast
from proxy.serving.process import Process
from proxy.serving.queue import Lease, SlotQueue
from proxy.serving.request import Request
from proxy.serving.services import ServerServices, Services
from proxy.serving.tenants import warn_of_several
from proxy.settings import MAX_REQUESTS, Settings
from proxy.tasks import wait_for

WATCH_SECONDS = 1.0
RETURN_WATCH_SECONDS = 0.2
"""The time between looks while requests wait for llama-server to come back."""
SILENT_SECONDS = 5.0
"""How long llama-server may take to answer a look before /health reports it as silent."""
CUT_SECONDS = 2.0
"""An answer that has begun is cut off once llama-server is unreachable, and silent in it, for so long.

A llama-server that is stopping waits for the clients of requests that it will not answer."""
RETRY_SECONDS, _MOST_DOUBLED = 15.0, 6
"""How soon an attach that found no way to cache is tried again, while no slot is in use, and how often that
time is doubled: a try may have llama-server write all that a slot holds, for nothing."""
_FINAL = (DegradationKind.OTHER_DIRECTORY, DegradationKind.DIRECTORY_IS_NO_USE)
"""Behind these another try would only leave another file in llama-server's directory, or empty a slot."""
N_ASKED = 6
"""How often it is asked at first contact which process it is: a load balancer may choose at random."""
ATTACH_WAIT_SECONDS = 30.0
"""How long a request waits for a running attach before it is forwarded without one."""


class Phase(StrEnum):
    ATTACHING = "attaching"
    ATTACHED = "attached"
    UNREACHABLE = "unreachable"
    LOADING = "loading"
    NOT_A_SERVER = "not a server"
    UNLOADED = "unloaded"


_PHASE_OF = {DegradationKind.UNREACHABLE: Phase.UNREACHABLE, DegradationKind.LOADING: Phase.LOADING}


class Watched:
    """A llama-server or a host of models: the proxy asks it again and again, and requests wait for it."""

    is_polled = True
    """Whether it may be polled: llama-swap unloads an unused model, and a poll counts as use."""

    def __init__(self, phase: Phase, patience_seconds: float) -> None:
        """While it is away, requests wait for *patience_seconds* at most."""
        self.phase = phase
        self.n_waiting = 0
        self._patience_seconds = patience_seconds
        self._unreachable_since: float | None = None
        self._changed = asyncio.Event()
        self._poked = asyncio.Event()
        """Set if it was poked since the last look began: the next look is due at once."""

    async def look(self) -> None:
        """Ask for its state, and enter the phase that follows from the answer."""
        raise NotImplementedError

    def enter(self, phase: Phase) -> None:
        """Change the phase, and wake the requests that wait."""
        self.phase = phase
        if phase is not Phase.UNREACHABLE:
            self._unreachable_since = None
        elif self._unreachable_since is None:
            self._unreachable_since = time.monotonic()
        self._wake()

    @property
    def is_away(self) -> bool:
        """Whether requests wait until it answers again."""
        return self.phase in (Phase.LOADING, Phase.UNREACHABLE)

    @property
    def is_long_unreachable(self) -> bool:
        """Whether it has been unreachable for so long that it will not finish the answers it began."""
        since = self._unreachable_since
        return since is not None and time.monotonic() - since >= CUT_SECONDS

    async def back(self, since: float) -> None:
        """Wait until it answers; raises ServerAway if that takes too long.

        The request has waited *since* that moment of the monotonic clock.
        """
        self.n_waiting += 1
        try:
            while self.is_away:
                began = min(since, self._unreachable_since or since)
                seconds = began + self._patience_seconds - time.monotonic()
                if seconds <= 0:
                    is_loading = self.phase is Phase.LOADING
                    why = "is still loading its model" if is_loading else "cannot be reached"
                    raise errors.ServerAway(f"llama-server {why}", was_sent=False, status=503)
                await wait_for(self._changed, seconds)
        finally:
            self.n_waiting -= 1

    def give_up(self) -> None:
        """Refuse the requests that wait, and all later ones: the proxy is about to stop."""
        self._patience_seconds = 0.0
        self._wake()

    def poke(self) -> None:
        """Look at it now: something went wrong."""
        self._poked.set()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Server(Watched):
    """One llama-server: at an address of its own, or as a model of a host.

    `process` serves requests; None unless the phase is attached.
    """

    def __init__(
        self,
        settings: Settings,
        services: ServerServices,
        launch: Launch | None = None,
        host: Watched | None = None,
        *,
        is_host_of_models: Callable[["Server"], Awaitable[bool]] | None = None,
    ) -> None:
        """A *host* loads and unloads it; None for an address of its own.

        With a *launch*, llama-server is being started with it. *is_host_of_models* is called if the answer
        at the address is not a llama-server's.
        """
        phase = Phase.UNLOADED if host else Phase.ATTACHING
        super().__init__(phase, settings.upstream_wait_seconds)
        self.services = services
        self.upstream = services.upstream
        self._degradations = services.degradations
        self.host = host
        if host is None:
            self._degradations.begin(DegradationKind.ATTACHING)
        else:
            self.is_polled = host.is_polled
            self.upstream.require_loaded = self.require_loaded
        self.process: Process | None = None
        self.epoch = 0
        self.on_idle: Callable[[SlotQueue], None] = lambda queue: None
        """Called for each slot of this llama-server that is free while no request waits for it there."""
        self.looks = services.tasks
        """Where its looks run; a proxy that stops does not wait for those of `Addresses`."""
        self._settings = settings
        self._launch = launch or Launch()
        self._is_host_of_models = is_host_of_models
        self._looking: asyncio.Task[None] | None = None
        self._retry_at, self._n_tries = 0.0, 0
        self._n_unplaced = 0
        self._is_starting = launch is not None
        self._log = get_logger("lifecycle")

    @property
    def n_queued(self) -> int:
        """How many requests wait for a slot, or for llama-server."""
        return self.n_waiting + (self.process.n_queued if self.process else 0)

    async def ready(self) -> Process | None:
        """Return the process that serves; if there is none, look, and wait for llama-server.

        None if there is nothing to wait for: the phase is unloaded or not a server, or the attach takes too
        long. Raises ServerAway if llama-server is away for too long.
        """
        since = time.monotonic()
        while self.process is None:
            await self.look()
            if not self.is_away:
                break
            self.poke()
            await self.back(since)
        return self.process

    async def is_still(self, process: Process) -> bool:
        """Look at llama-server now; return whether *process* is still the one that serves."""
        await self.look()
        return self.process is process

    async def is_lost(self) -> bool:
        """Ask the host, after something went wrong; return whether it has unloaded this llama-server."""
        if self.host is not None:
            await self.host.look()
        return self.phase is Phase.UNLOADED

    def note_unplaced(self) -> None:
        """Note that a request was forwarded, and ran in any slot if llama-server is attached, or is now."""
        self._n_unplaced += 1
        if self.process:
            self.process.slots.forget_free()

    def appear(self) -> None:
        """Note that the host has loaded the model."""
        if self.phase is Phase.UNLOADED:
            self.enter(Phase.ATTACHING)
            self.poke()

    def lose(self) -> None:
        """Note that the host has ended the process, or is about to; that is no degradation."""
        self.epoch += 1
        self._close()
        self.enter(Phase.UNLOADED)
        self._degradations.leave()

    def require_loaded(self) -> None:
        """Raise UpstreamUnreachable while it is not loaded: llama-swap would load it for any call."""
        if self.phase is Phase.UNLOADED:
            raise errors.UpstreamUnreachable(f"{self.upstream.target.name} is not loaded")

    async def watch(self) -> None:
        """Follow llama-server until cancelled."""
        while True:
            is_settled = self.phase in (Phase.ATTACHED, Phase.UNLOADED, Phase.NOT_A_SERVER)
            if self.is_polled or not is_settled or self._poked.is_set():
                await self.look()
            if self.process:
                look_again(self.process)
            await wait_for(self._poked, RETURN_WATCH_SECONDS if self.n_waiting else WATCH_SECONDS)

    async def look(self, *, is_patient: bool = False) -> None:
        """Wait for a look at llama-server; a running look is shared.

        The wait ends after ATTACH_WAIT_SECONDS, unless the caller *is_patient*.
        """
        if self._looking is None or self._looking.done():
            self._poked.clear()
            self._looking = self.looks.start(self._look())
        await asyncio.wait({self._looking}, timeout=None if is_patient else ATTACH_WAIT_SECONDS)

    async def _look(self) -> None:
        """Ask llama-server which process it is; if the model was lost and loaded meanwhile, ask again.

        A restart can take a tenth of a second, and polling /health would miss it. So the proxy compares the
        id of the process (`LlamaServer.process_id`): every second, after every connection error, and while
        a prompt is tokenized, when the look costs no time.
        """
        while self.phase is not Phase.UNLOADED:
            epoch, props = self.epoch, None
            try:
                props = await self.upstream.props(SILENT_SECONDS)
                self._degradations.end(DegradationKind.SILENT)
                await self._follow(props, epoch)
            except errors.UpstreamSlow as slow:
                if epoch == self.epoch:
                    self._degradations.begin(DegradationKind.SILENT, str(slow))
            except errors.UpstreamFault as fault:
                if epoch == self.epoch and not await self.is_lost():
                    await self._miss(kind_of(fault), str(fault), has_answered=props is not None)
            except Exception as error:
                self.services.faults.record("lifecycle", error)
                if self.process is None and epoch == self.epoch:
                    reason = str(error) or type(error).__name__
                    self._enter_without(Phase.NOT_A_SERVER, DegradationKind.ATTACH_FAILED, reason)
            if epoch == self.epoch:
                return

    async def _miss(self, kind: DegradationKind, detail: str, *, has_answered: bool) -> None:
        """Note that a look has failed; *has_answered* says that llama-server is there, but not attached."""
        if kind is DegradationKind.NOT_A_LLAMA_SERVER and self._is_host_of_models:
            if await self._is_host_of_models(self):
                return self.lose()
        phase = Phase.NOT_A_SERVER if has_answered else _PHASE_OF.get(kind, Phase.NOT_A_SERVER)
        if kind is DegradationKind.UNREACHABLE and self._is_starting:
            kind, detail = DegradationKind.LOADING, ""  # nothing can answer there yet
        self._enter_without(phase, kind, detail)
        if self.is_long_unreachable:
            self.upstream.cut_silent(CUT_SECONDS)

    async def _follow(self, props: Props, epoch: int) -> None:
        """Attach if another process answers, or the scales of adapters were changed, or the last attach
        found no way to cache some time ago.
        """
        self._is_starting = False
        if not 0 < props.total_slots <= MAX_REQUESTS:  # llama.cpp has 256
            kind, told = DegradationKind.NOT_A_LLAMA_SERVER, f"{props.total_slots or 'no'} slots"
            return await self._miss(kind, told, has_answered=True)
        process_id, last = await self.upstream.process_id(props), self.process
        # Asked only while no slot is in use, because llama-server answers between two batches.
        is_idle = last is not None and not any(slot.is_leased for slot in last.slots)
        adapters = last.adapters if last and is_idle and not props.is_sleeping else []
        has_other_adapters = bool(adapters) and await self.upstream.lora_adapters() != adapters
        if epoch != self.epoch:
            return
        if last is None or last.id != process_id or has_other_adapters:
            # An attach to several would save, erase and evaluate in the slots of any.
            asked = (self.upstream.is_replaced(process_id) for _ in range(N_ASKED))
            if self.host is None and any(await asyncio.gather(*asked)):
                return await self._miss(DegradationKind.SEVERAL_SERVERS, "", has_answered=True)
            self._enter_without(Phase.ATTACHING, DegradationKind.ATTACHING)
            await self._attach(props, process_id, epoch)
        elif props.is_sleeping:  # --sleep-idle-seconds: its slots will be empty when it wakes
            for slot in last.slots.free():
                last.slots.set_content(slot.id, Empty())
        elif not last.can_cache and time.monotonic() >= self._retry_at:
            if not (last.queue.n_waiting or any(slot.is_leased for slot in last.slots)):
                self._close()
                self.enter(Phase.ATTACHING)
                await self._attach(props, process_id, epoch, last)

    def _enter_without(self, phase: Phase, kind: DegradationKind, detail: str = "") -> None:
        """Enter a phase without a process; the earlier degradations end, and *kind* begins."""
        self._close()
        self._degradations.begin(kind, detail)
        self._degradations.end(*(OF_PROCESS - {kind}))
        self.enter(phase)

    def _close(self) -> None:
        if self.process:
            self.process.queue.close()
            for request in self.process.extending:
                request.withdraw()  # in the next process a restore may spare the whole evaluation
            self.process = None

    async def _attach(
        self, props: Props, process_id: str, epoch: int, last: Process | None = None
    ) -> None:
        """Attach to a process; *last* is an earlier attach to it that could not cache."""
        before = self._degradations.kinds & OF_PROCESS  # attaching, or those of the last try
        n_unplaced = self._n_unplaced
        attaching = attach(self.services, self._settings, props, process_id, self._launch)
        process = await self.services.tasks.start(attaching)
        if epoch != self.epoch:
            process.queue.close()
            self._degradations.leave()
            return
        if obstacle := process.obstacle:
            process.degrade(obstacle.kind, obstacle.detail)
            before -= {obstacle.kind}
            if last:
                process.slots.go_on_from(last.slots)
        if self._n_unplaced > n_unplaced:
            process.slots.forget_free()
        # These end when the slots are shown, and when one is saved.
        before -= {DegradationKind.SLOTS_NOT_SHOWN, DegradationKind.SAVES_FAIL}
        if process.clears_idle_slots:
            before -= {DegradationKind.IDLE_SLOTS_CLEARED}
        warn_of_several(process)
        process.is_current = partial(self.is_still, process)
        self._outlast_strangers(process)
        self._degradations.end(*before)
        self.services.served[self.upstream.target] = process
        kind = obstacle.kind if obstacle else None
        is_again = last and kind is not DegradationKind.EVERY_SLOT_BUSY
        self._n_tries = self._n_tries + 1 if is_again else 0
        seconds = RETRY_SECONDS * 2 ** min(self._n_tries, _MOST_DOUBLED)
        self._retry_at = inf if kind in _FINAL else time.monotonic() + seconds
        self.process = process
        self.enter(Phase.ATTACHED)
        process.queue.on_idle = self.on_idle
        for _ in process.slots.free():
            self.on_idle(process.queue)
        # A failing attach is repeated, but logged once.
        if process.can_cache or last is None:
            n_slots, name = props.total_slots, props.model_path.rpartition("/")[2]
            slots = f"{n_slots} slot{'s' * (n_slots != 1)} of {process.n_ctx:,} tokens"
            self._log.info(
                "attached to llama-server",
                build=props.build_info,
                slots=n_slots,
                caches=process.can_cache,
                rule=process.rule.kind.value,
                says=f"caching {self.upstream.target.model or name}: {slots}" * process.is_caching,
            )
            if process.n_ctx + 256 < self._launch.n_ctx:  # llama-server rounds
                given = f"{process.n_ctx:,} tokens a slot, not {self._launch.n_ctx:,}"
                self._log.warning(f"llama-server gives {given}: the model has no longer context")

    def _outlast_strangers(self, process: Process) -> None:
        """Keep the slots that were busy at first contact leased until their requests have ended."""
        for slot in process.slots:
            if slot.is_leased:
                ended = self.services.tasks.start(outlast(process, partial(list, [slot.id])))
                Lease(process.queue, (slot.id,)).hand_over(ended)


def kind_of(fault: errors.UpstreamFault) -> DegradationKind:
    """Return the degradation that the fault of a look stands for."""
    if not isinstance(fault, errors.UpstreamRefused):
        return DegradationKind.UNREACHABLE
    kinds = {503: DegradationKind.LOADING, 401: DegradationKind.API_KEY_REFUSED}
    return kinds.get(fault.status, DegradationKind.NOT_A_LLAMA_SERVER)


# Requests during which llama-server ended: after two deaths in a row such a request is refused.
#
# The index keeps the hashes of their prompts, because the proxy may be restarted with llama-server.


MAX_DEATHS = 2
FORGET_SECONDS = 600.0
"""A refused request is tried again once no client has sent it for so long."""
_MAX_REMEMBERED = 64
_NAME = "fatal requests"


class FatalRequests:
    """Remembers during which requests llama-server ended: how often in a row, and when last."""

    def __init__(self, shared: Services) -> None:
        self._shared = shared
        self._deaths: LRUCache[str, tuple[int, float]] = LRUCache(_MAX_REMEMBERED)
        """By the hash of a request; while none is known, no hash is made."""
        with suppress(errors.StoreFault):  # also where no store is open
            known = shared.store.index.value(_NAME, dict[str, tuple[int, float]])
            self._deaths.update(known or {})

    def refuse(self, request: Request) -> None:
        """Raise ProxyError if llama-server has ended twice in a row during this request."""
        if self._deaths and (n_deaths := self._n_deaths(request)) >= MAX_DEATHS:
            self._deaths[key_of(request)] = n_deaths, time.time()
            raise errors.ProxyError(
                f"llama-server ended {n_deaths} times in a row while it worked on this request: see "
                "llama-server's log. The request is tried again once nobody has sent it for "
                f"{FORGET_SECONDS / 60:.0f} minutes",
                422,
            )

    async def note_answer(self, request: Request) -> None:
        """Note that a request was answered: its deaths in a row end here."""
        if self._deaths and (key := key_of(request)) in self._deaths:
            del self._deaths[key]
            await self._write()

    async def note_death(self, request: Request) -> None:
        """Note that llama-server ended while it worked on a request."""
        n_before, key = self._n_deaths(request), key_of(request)
        self._deaths[key] = n_before + 1, time.time()
        await self._write()

    def _n_deaths(self, request: Request) -> int:
        n_deaths, last_at = self._deaths.get(key_of(request), (0, 0.0))
        return n_deaths if abs(time.time() - last_at) < FORGET_SECONDS else 0

    async def _write(self) -> None:
        with suppress(errors.StoreFault):  # then the deaths are known only while the proxy runs
            await self._shared.store.put_value(_NAME, dict(self._deaths))


def key_of(request: Request) -> str:
    """Return a hash of a request's messages, else of its prompt, else of its raw body."""
    content = request.raw if request.prompt is None else request.prompt.tokens.tobytes()
    content = request.conversation.digests if request.conversation else content
    return blake2b(content, digest_size=16).hexdigest()
