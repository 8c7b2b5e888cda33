"""One llama-server, whichever process of it runs: its phase is the only truth about whether it is there.

Everything that changes a phase stands in this file:

| event                                                     | from         | to            |
|-----------------------------------------------------------|--------------|---------------|
| a look finds a process that is not attached               | any other    | attaching     |
| the attach has ended                                      | attaching    | attached      |
| a look finds nobody                                       | any other    | unreachable   |
| a look is answered 503                                    | any other    | loading       |
| a look is answered by something that cannot be attached   | any other    | not a server  |
| its host ends its process, or is about to (`lose`)        | any          | unloaded      |
| its host has loaded its model (`appear`)                  | unloaded     | attaching     |
| what answers turns out to be a host of models             | any other    | unloaded      |

A look that is not answered in time changes nothing: a busy llama-server is not gone. A look during which
the model was lost changes nothing either: `epoch` counts the losses.

What requests do in each phase (`ready`): attached, they are served. Attaching, they wait for the look that
runs, ATTACH_WAIT_SECONDS at most. Loading, each of them waits for `patience_seconds`. Unreachable, they
wait for so long from when that began; but an address where nothing ever answered is most likely wrong, and
nobody waits for it. Unloaded or not a server, they do not wait.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from enum import StrEnum
from functools import partial

from proxy.core.conditions import OF_PROCESS, DegradationKind
from proxy.errors import (
    UpstreamAbsent,
    UpstreamFault,
    UpstreamRefused,
    UpstreamSlow,
    UpstreamUnreachable,
)
from proxy.llama.client import Props
from proxy.log import get_logger
from proxy.servers import background, self_test
from proxy.servers.attach import attach
from proxy.serving.cache import Cache
from proxy.serving.launches import outlast
from proxy.serving.process import Process, Services
from proxy.serving.request import Request
from proxy.serving.rewriting import Overflow, Stabilizing
from proxy.serving.saver import RewriteStateFile, Saver
from proxy.settings import Settings

WATCH_SECONDS = 1.0
RETURN_WATCH_SECONDS = 0.2
"""How often llama-server is looked for while requests wait for it to come back."""
CUT_SECONDS = 2.0
"""So long llama-server may be unreachable, and silent in what it has begun to answer, until that is cut
off: told to end, it waits for those clients to leave."""
RETRY_SECONDS = 15.0
"""How often an attachment that cannot cache is tried again, while no slot is in use."""
ATTACH_WAIT_SECONDS = 30.0
"""How long a request waits for an attachment under way before it is forwarded without one."""


class Phase(StrEnum):
    ATTACHING = "attaching"
    ATTACHED = "attached"
    UNREACHABLE = "unreachable"
    LOADING = "loading"
    NOT_A_SERVER = "not a server"
    UNLOADED = "unloaded"


_PHASE_OF = {
    DegradationKind.UNREACHABLE: Phase.UNREACHABLE,
    DegradationKind.LOADING: Phase.LOADING,
}


class Watched:
    """What the proxy asks again and again, and what requests wait for while it does not answer."""

    def __init__(self, phase: Phase, patience_seconds: float, *, was_there: bool) -> None:
        """*was_there* says that it was seen, or is being started: only then requests wait for it."""
        self.phase = phase
        self.n_waiting = 0
        self._patience_seconds = patience_seconds
        self._was_there = was_there
        self._unreachable_since: float | None = None
        self._changed = asyncio.Event()
        self._poked = asyncio.Event()

    def enter(self, phase: Phase) -> None:
        """Be in another phase from now on, and let those who wait see it."""
        self.phase = phase
        if phase is not Phase.UNREACHABLE:
            self._was_there, self._unreachable_since = True, None
        elif self._unreachable_since is None:
            self._unreachable_since = time.monotonic()
        self._wake()

    @property
    def is_away(self) -> bool:
        """Whether requests wait until it answers again."""
        return self.phase is Phase.LOADING or (self.phase is Phase.UNREACHABLE and self._was_there)

    @property
    def is_long_unreachable(self) -> bool:
        """Whether it will not go on with what it has begun to answer."""
        since = self._unreachable_since
        return since is not None and time.monotonic() - since >= CUT_SECONDS

    async def back(self, since: float) -> None:
        """Return when it is not away any more; raises UpstreamAbsent if that takes too long.

        *since* is when the request began to wait, of the monotonic clock.
        """
        self.n_waiting += 1
        try:
            while self.is_away:
                began = min(since, self._unreachable_since or since)
                seconds = began + self._patience_seconds - time.monotonic()
                if seconds <= 0 and self.phase is Phase.LOADING:
                    raise UpstreamAbsent("llama-server is still loading its model")
                if seconds <= 0:
                    raise UpstreamAbsent("llama-server cannot be reached")
                await _await_event(self._changed, seconds)
        finally:
            self.n_waiting -= 1

    def give_up(self) -> None:
        """Send away whoever waits, now and from now on: the proxy is about to stop."""
        self._patience_seconds = 0.0
        self._wake()

    def poke(self) -> None:
        """Look at it now: something went wrong."""
        self._poked.set()

    async def pause(self, seconds: float) -> None:
        """Wait until the next look is due."""
        self._poked.clear()
        await _await_event(self._poked, seconds)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def _await_event(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


class ArrivalOrder:
    """Requests that waited for llama-server come to the queue for a slot in the order of their arrival.

    They all wait at once and have their prompts read at once, which takes some longer than others.
    """

    def __init__(self) -> None:
        self._since: dict[Request, float] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._since)

    def join(self, request: Request) -> float:
        """Be one of those who wait; return since when that is so, of the monotonic clock."""
        return self._since.setdefault(request, time.monotonic())

    def leave(self, request: Request) -> None:
        """Let the next one go; again is harmless."""
        if self._since.pop(request, None) is not None:
            self._changed.set()
            self._changed = asyncio.Event()

    async def turn(self, request: Request) -> None:
        """Return once nobody who arrived earlier is still on the way."""
        while request in self._since and request is not min(
            self._since, key=lambda a: a.arrived_at
        ):
            await self._changed.wait()


class Server(Watched):
    """One llama-server, at an address of its own or as a model of a host; `process` serves while attached.

    `on_way` are requests that will be served here and are not in the queue for a slot yet.
    """

    def __init__(
        self,
        settings: Settings,
        services: Services,
        rewrite: RewriteStateFile,
        stabilizing: Stabilizing,
        overflow: Overflow,
        order: ArrivalOrder,
        *,
        phase: Phase = Phase.ATTACHING,
        is_expected: bool,
        n_context_checkpoints: int,
        is_polled: bool = True,
        is_host_of_models: Callable[["Server"], Awaitable[bool]] | None = None,
        look_at_host: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """*look_at_host* is for a model of a host, `is_host_of_models` for an address.

        *is_expected* says that llama-server is being started. *is_polled* says that it may be asked again
        and again: llama-swap unloads a model that nobody has asked anything for a while.
        """
        super().__init__(phase, settings.upstream_wait_seconds, was_there=is_expected)
        self.services = services
        self.upstream = services.upstream
        if look_at_host is not None:
            self.upstream.require_loaded = self.require_loaded
        self.process: Process | None = None
        self.epoch = 0
        self.order = order
        self.on_way: set[Request] = set()
        self.on_attached: Callable[[Process], None] = lambda process: None
        """Is told of every process that is attached."""
        self._saver = Saver(services, rewrite)
        self.cache = Cache(services, stabilizing, overflow)
        self._settings = settings
        self._n_context_checkpoints = n_context_checkpoints
        self._degradations = services.degradations
        self._is_polled = is_polled
        self._is_host_of_models = is_host_of_models
        self._look_at_host = look_at_host
        self._look: asyncio.Task[None] | None = None
        self._attached_at = 0.0
        self._reported = ""
        self._log = get_logger("lifecycle")
        if phase is Phase.ATTACHING:
            self._degradations.begin(DegradationKind.ATTACHING)

    @property
    def name(self) -> str:
        return self.upstream.target.name

    @property
    def is_hosted(self) -> bool:
        """Whether a host has it loaded and unloaded."""
        return self._look_at_host is not None

    @property
    def n_queued(self) -> int:
        """How many requests wait for a slot, or for llama-server."""
        if self.process is None:
            return self.n_waiting
        n_in_desk = self.process.desk.n_waiting + self.process.launches.n_waiting
        return self.n_waiting + n_in_desk

    async def run(self) -> None:
        """Follow llama-server and save what is dirty, until cancelled."""
        await background.all_of(
            background.remember_rates(self.services, lambda: self.process),
            background.save_idle_slots(
                self.services.tasks, lambda: self.process, self._settings.idle_save_seconds
            ),
            self._watch(),
        )

    async def drain(self, seconds: float) -> None:
        """Save every dirty slot now, in at most *seconds*."""
        if self.process:
            await background.drain(self.services.tasks, self.process, seconds)

    async def settle(self, seconds: float) -> None:
        """Save every dirty slot once nothing runs any more, in at most *seconds*."""
        if self.process:
            await background.settle(self.services.tasks, self.process, seconds)

    async def ready(self, since: float) -> Process | None:
        """Return the process that serves; if there is none, look once more, and wait a while for it.

        Raises UpstreamAbsent if llama-server is away for too long; *since* is when the request began to
        wait. None if nobody is to be waited for: what answers is not attached, or its host has unloaded it.
        """
        while self.process is None:
            await self._look_now(ATTACH_WAIT_SECONDS)
            if not self.is_away:
                break
            self.poke()
            await self.back(since)
        return self.process

    async def is_still(self, process: Process) -> bool:
        """Look at llama-server now; return whether *process* is still the one that serves."""
        await self._look_now(ATTACH_WAIT_SECONDS)
        return self.process is process

    async def is_replaced(self, process: Process) -> bool:
        """Look at llama-server after a failure; return whether *process* is gone.

        A look that was under way may have begun before the failure, so there are two.
        """
        return not (await self.is_still(process) and await self.is_still(process))

    async def is_lost(self) -> bool:
        """Look again, after something went wrong; return whether its host has unloaded it."""
        if self._look_at_host is not None:
            await self._look_at_host()
        return self.phase is Phase.UNLOADED

    def appear(self) -> None:
        """Note that its host has loaded it."""
        if self.phase is Phase.UNLOADED:
            self.enter(Phase.ATTACHING)
            self.poke()

    def lose(self) -> None:
        """Note that its host has ended it, or is about to: nobody misses it."""
        self.epoch += 1
        self._close()
        self.enter(Phase.UNLOADED)
        self._degradations.leave()

    def require_loaded(self) -> None:
        """Raise UpstreamUnreachable if its host has not loaded it: llama-swap would load it for a call."""
        if self.phase is Phase.UNLOADED:
            raise UpstreamUnreachable(f"{self.name} is not loaded")

    async def _watch(self) -> None:
        while True:
            is_settled = self.phase in (Phase.ATTACHED, Phase.UNLOADED)
            if self._is_polled or not is_settled or self._poked.is_set():
                await self._look_now(None)
            if self.process:
                self_test.look_again(self.process)
            await self.pause(
                min(WATCH_SECONDS, RETURN_WATCH_SECONDS) if self.n_waiting else WATCH_SECONDS
            )

    async def _look_now(self, seconds: float | None) -> None:
        """Wait for a look at llama-server, at most *seconds*; everybody shares one that is under way."""
        if self._look is None or self._look.done():
            self._look = self.services.tasks.start(self._look_once())
        await asyncio.wait({self._look}, timeout=seconds)

    async def _look_once(self) -> None:
        """Ask llama-server which process it is; if it was lost and loaded meanwhile, ask again.

        A restart can take a tenth of a second, so that looking at /health misses it: what is watched is the
        process's own mark in /props, every second, after every connection error, and beside the tokenizing
        of every request, where it costs no time.
        """
        while self.phase is not Phase.UNLOADED:
            epoch, props = self.epoch, None
            try:
                props = await self.upstream.props()
                await self._follow(props, epoch)
            except UpstreamSlow:
                pass
            except UpstreamFault as fault:
                if epoch == self.epoch:
                    await self._miss(kind_of(fault), str(fault), has_answered=props is not None)
            except Exception as error:
                self.services.faults.record("lifecycle", error)
                if self.process is None and epoch == self.epoch:
                    reason = str(error) or type(error).__name__
                    self._enter_without(Phase.NOT_A_SERVER, DegradationKind.ATTACH_FAILED, reason)
            if epoch == self.epoch:
                return

    async def _miss(self, kind: DegradationKind, detail: str, *, has_answered: bool) -> None:
        """Note that a look has failed; what *has_answered* is there, and cannot be attached."""
        if kind is DegradationKind.NOT_A_LLAMA_SERVER and self._is_host_of_models:
            if await self._is_host_of_models(self):
                return self.lose()
        phase = Phase.NOT_A_SERVER if has_answered else _PHASE_OF.get(kind, Phase.NOT_A_SERVER)
        self._enter_without(phase, kind, detail)
        if self.is_long_unreachable:
            self.upstream.cut_silent(CUT_SECONDS)

    async def _follow(self, props: Props, epoch: int) -> None:
        if props.total_slots < 1:
            kind = DegradationKind.NOT_A_LLAMA_SERVER
            return await self._miss(kind, "no slots", has_answered=True)
        process_id = await self.upstream.process_id(props)
        if epoch != self.epoch:
            return
        last = self.process
        if last is None or last.id != process_id:
            self._enter_without(Phase.ATTACHING, DegradationKind.ATTACHING)
            await self._attach(props, process_id, epoch)
        elif (
            not last.can_cache
            and _is_idle(last)
            and time.monotonic() >= self._attached_at + RETRY_SECONDS
        ):
            self._close()
            self.enter(Phase.ATTACHING)
            await self._attach(props, process_id, epoch, last)

    def _enter_without(self, phase: Phase, kind: DegradationKind, detail: str = "") -> None:
        """Enter a phase without a process; what was wrong with the last one is over, and this begins."""
        self._close()
        self._degradations.begin(kind, detail)
        self._degradations.end(*(OF_PROCESS - {kind}))
        self.enter(phase)

    def _close(self) -> None:
        if self.process:
            self.process.desk.close()
            self.process = None

    async def _attach(
        self, props: Props, process_id: str, epoch: int, last: Process | None = None
    ) -> None:
        """Attach to a process; *last* is an attachment to the same one that could not cache."""
        before = self._degradations.kinds & OF_PROCESS  # attaching, or what the last try came to
        process = await attach(
            self.services,
            self._saver,
            props,
            process_id,
            max_waiting=self._settings.max_requests,
            n_context_checkpoints=self._n_context_checkpoints,
            shares_between_api_keys=self._settings.share_between_api_keys,
            last=last,
        )
        if epoch != self.epoch:
            process.desk.close()
            self._degradations.leave()
            return
        if obstacle := process.obstacle:
            process.degrade(obstacle.kind, obstacle.detail)
            before -= {obstacle.kind}
            if last:  # what was known of the same process's slots is believed still
                for slot in process.slots:
                    if not slot.is_leased:
                        process.slots.set_content(slot.id, last.slots[slot.id].content)
        if process.clears_idle_slots:
            before -= {DegradationKind.IDLE_SLOTS_CLEARED}
        process.note_tenants()
        process.is_current = partial(self.is_still, process)
        self._outlast_strangers(process)
        self_test.begin(process)
        self._degradations.end(*before)
        self.services.served.note(self.upstream.target, process)
        self._attached_at = time.monotonic()
        self.process = process
        self.enter(Phase.ATTACHED)
        self.on_attached(process)
        # An attachment that cannot cache is tried again and again: it is told of once.
        if process.can_cache or self._reported != process.id:
            self._log.info(
                "attached to llama-server",
                build=props.build_info,
                slots=props.total_slots,
                caches=process.can_cache,
                rule=str(process.rule),
            )
        self._reported = process.id

    def _outlast_strangers(self, process: Process) -> None:
        """Keep the slots that were busy at first contact until whatever runs there has ended."""
        for slot in process.slots:
            if slot.is_leased:
                ended = self.services.tasks.start(outlast(process, partial(list, [slot.id])))
                process.desk.take_over(slot.id).hand_over(ended)


def _is_idle(process: Process) -> bool:
    return process.desk.n_waiting == 0 and not any(slot.is_leased for slot in process.slots)


def kind_of(fault: UpstreamFault) -> DegradationKind:
    """Return what it means that llama-server could not be asked what it is."""
    if not isinstance(fault, UpstreamRefused):
        return DegradationKind.UNREACHABLE
    kinds = {503: DegradationKind.LOADING, 401: DegradationKind.API_KEY_REFUSED}
    return kinds.get(fault.status, DegradationKind.NOT_A_LLAMA_SERVER)
