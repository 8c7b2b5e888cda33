"""One llama-server, whichever process of it runs: whether it is there, and what serves requests for it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

from proxy.core.conditions import OF_PROCESS, DegradationKind
from proxy.errors import UpstreamAbsent, UpstreamFault, UpstreamRefused, UpstreamSlow
from proxy.llama.client import Props
from proxy.log import get_logger
from proxy.servers.attach import Attacher
from proxy.servers.self_test import Learning
from proxy.serving.launches import outlast
from proxy.serving.process import Process, Services

# llama-server is not there: it crashed, is being started again, or loads its model. Requests wait.
#
# Once it has been unreachable for longer than a request would wait, requests fail at once: somebody has
# to look after it. One that answers that it is loading is waited for by each request anew. One that was
# never reached is not waited for: most likely its address is wrong.


class Absence:
    """Knows whether llama-server is away, and lets requests wait until it is back."""

    def __init__(self, patience_seconds: float, *, is_expected: bool) -> None:
        """*is_expected* says that it is being started, so that it is waited for from the beginning."""
        self._patience_seconds = patience_seconds
        self._was_there = is_expected
        self._is_away = False
        self._unreachable_since: float | None = None
        self._changed = asyncio.Event()
        self.n_waiting = 0

    def note_unreachable(self) -> None:
        self._is_away = True
        if self._unreachable_since is None:
            self._unreachable_since = time.monotonic()
        self._wake()

    def note_answer(self, *, is_loading: bool = False) -> None:
        """Note that llama-server has answered, if only that it is loading."""
        self._was_there = True
        self._is_away = is_loading
        self._unreachable_since = None
        self._wake()

    def give_up(self) -> None:
        """Send away whoever waits, now and from now on: the proxy is about to stop."""
        self._patience_seconds = 0.0
        self._wake()

    @property
    def is_waited_for(self) -> bool:
        return self._is_away and self._was_there

    @property
    def unreachable_seconds(self) -> float:
        return time.monotonic() - self._unreachable_since if self._unreachable_since else 0.0

    async def outlast(self, since: float) -> None:
        """Return when llama-server answers again; raises UpstreamAbsent if it takes too long.

        *since* is when the request began to wait, of the monotonic clock.
        """
        self.n_waiting += 1
        try:
            while self.is_waited_for:
                await self._await_change(self._seconds_left(since))
        finally:
            self.n_waiting -= 1

    def _seconds_left(self, since: float) -> float:
        began = since if self._unreachable_since is None else min(since, self._unreachable_since)
        return began + self._patience_seconds - time.monotonic()

    async def _await_change(self, seconds: float) -> None:
        if seconds <= 0:
            raise UpstreamAbsent(
                "llama-server cannot be reached"
                if self._unreachable_since is not None
                else "llama-server is still loading its model"
            )
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


# Watches which llama-server process answers, attaches to it, and learns its rule.
#
# A restart can take a tenth of a second, so looking at /health misses it: what is watched is the
# process's own mark in /props, every second, after every connection error, and beside the tokenizing of
# every request, where it costs no time. While requests wait for it to come back, it is looked for more
# often.


WATCH_SECONDS = 1.0
RETURN_WATCH_SECONDS = 0.2
CUT_SECONDS = 2.0
"""So long llama-server may be unreachable, and silent in what it has begun to answer, until that is cut
off: told to end, it waits for those clients to leave."""
RETRY_SECONDS = 15.0
"""How often an attachment that cannot cache is tried again, while no slot is in use."""
ATTACH_WAIT_SECONDS = 30.0
"""How long a request waits for an attachment under way before it is forwarded without one."""


class Lifecycle:
    """Knows the current process, if one is attached."""

    def __init__(
        self,
        services: Services,
        attacher: Attacher,
        learning: Learning,
        absence: Absence,
        is_host_of_models: Callable[[], Awaitable[bool]],
    ) -> None:
        """*is_host_of_models* finds out whether what answers starts llama-servers; then this is over."""
        self._services = services
        self._degradations = services.degradations
        self._upstream = services.upstream
        self._attacher = attacher
        self._learning = learning
        self._is_host_of_models = is_host_of_models
        self._presence = services.upstream.presence
        self.absence = absence
        self._log = get_logger("lifecycle")
        self._poked = asyncio.Event()
        self._look: asyncio.Task[None] | None = None
        self._is_retry_due = False
        self._is_stale = False
        self.current: Process | None = None
        self._reported = ""
        self.on_attached: Callable[[Process], None] = lambda process: None
        """Is told of every new process."""
        self.is_over = False
        """Whether there is no llama-server at this address, but a host of several models."""
        if self._presence.is_there:
            self._degradations.begin(DegradationKind.ATTACHING)

    async def process(self, since: float) -> Process | None:
        """Return the current process; if there is none, look once more, and wait a while for it.

        Raises UpstreamAbsent if llama-server is away for too long; *since* is when the request began to
        wait. None if it is there, but not attached.
        """
        while self.current is None:
            await self._look_for(ATTACH_WAIT_SECONDS)
            if self._is_stale:
                self._is_stale = False
                continue
            if not self.absence.is_waited_for:
                break
            self.poke()
            await self.absence.outlast(since)
        return self.current

    async def is_still(self, process: Process) -> bool:
        """Look at llama-server now; return whether *process* is still the current one."""
        await self._look_for(ATTACH_WAIT_SECONDS)
        return self.current is process

    async def is_replaced(self, process: Process) -> bool:
        """Look at llama-server after a failure; return whether *process* is over.

        A look that was under way may have begun before the failure, so there are two.
        """
        return not (await self.is_still(process) and await self.is_still(process))

    @property
    def n_waiting(self) -> int:
        """How many requests wait for a slot, or for llama-server."""
        n_waiting = self.absence.n_waiting
        if self.current:
            n_waiting += self.current.desk.n_waiting + self.current.launches.n_waiting
        return n_waiting

    def poke(self) -> None:
        """Look at llama-server now: a connection to it has just failed."""
        self._poked.set()

    async def watch(self) -> None:
        """Follow llama-server until cancelled."""
        since_retry = 0.0
        while True:
            seconds = self._seconds_to_next_look()
            since_retry += seconds
            self._is_retry_due = since_retry >= RETRY_SECONDS
            since_retry = 0.0 if self._is_retry_due else since_retry
            if self._is_look_due():
                await self._look_for(None)
            if self.current:
                self._learning.look_again(self.current)
            self._poked.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._poked.wait()
            except TimeoutError:
                pass

    def _is_look_due(self) -> bool:
        presence = self._presence
        is_news = presence.is_there != (self.current is not None) or self._poked.is_set()
        return not self.is_over and (presence.is_polled or is_news)

    def _seconds_to_next_look(self) -> float:
        return min(WATCH_SECONDS, RETURN_WATCH_SECONDS) if self.absence.n_waiting else WATCH_SECONDS

    async def _look_for(self, seconds: float | None) -> None:
        """Wait for a look at llama-server, at most *seconds*; everybody shares one that is under way."""
        if self._look is None or self._look.done():
            self._look = self._services.tasks.start(self._look_once())
        await asyncio.wait({self._look}, timeout=seconds)

    async def _look_once(self) -> None:
        if self.is_over or not self._presence.is_there:
            return self.end()
        n_lost = self._presence.n_lost
        try:
            props = await self._ask()
            if props.total_slots < 1:
                await self._lose_or_end(DegradationKind.NOT_A_LLAMA_SERVER, "no slots")
            else:
                await self._follow(props, n_lost)
        except UpstreamSlow:
            pass  # busy is not gone
        except UpstreamFault as fault:
            if n_lost == self._presence.n_lost:  # else whoever said that it is gone has ended it
                await self._lose_or_end(kind_of(fault), str(fault))
        except Exception as error:
            self._services.faults.record("lifecycle", error)
            if self.current is None:
                self._lose(DegradationKind.ATTACH_FAILED, str(error) or type(error).__name__)

    async def _ask(self) -> Props:
        """Ask llama-server what it is, and note whether it is there at all."""
        try:
            props = await self._upstream.props()
        except UpstreamSlow:
            raise
        except UpstreamRefused as refusal:
            self.absence.note_answer(is_loading=refusal.status == 503)
            raise
        except UpstreamFault:
            self.absence.note_unreachable()
            if self.absence.unreachable_seconds >= CUT_SECONDS:
                self._upstream.pending.cut_silent(CUT_SECONDS)
            raise
        self.absence.note_answer()
        return props

    async def _follow(self, props: Props, n_lost: int) -> None:
        process = self.current
        process_id = await self._upstream.process_id(props)
        if process is None or process.id != process_id:
            self._lose(DegradationKind.ATTACHING)
            await self._attach(props, process_id, n_lost)
        elif self._is_retry_due and not process.can_cache and _is_idle(process):
            await self._attach(props, process_id, n_lost)

    def end(self) -> None:
        """Forget the process: its process is gone, and nobody misses it."""
        self.absence.note_answer()  # its host is what would be waited for
        self._close()
        self._degradations.leave()

    async def _lose_or_end(self, kind: DegradationKind, detail: str) -> None:
        if kind is DegradationKind.NOT_A_LLAMA_SERVER and await self._is_host_of_models():
            self.is_over = True
            return self.end()
        self._lose(kind, detail)

    def _lose(self, kind: DegradationKind, detail: str = "") -> None:
        """Forget the process; what was wrong with its process is over, and this begins."""
        self._close()
        self._degradations.begin(kind, detail)
        self._degradations.end(*(OF_PROCESS - {kind}))

    def _close(self) -> None:
        if self.current:
            self.current.desk.close()
            self.current = None

    async def _attach(self, props: Props, process_id: str, n_lost: int) -> None:
        last = self.current
        self._close()
        before = self._degradations.kinds & OF_PROCESS  # attaching, or what the last try came to
        process = await self._attacher.attach(props, process_id)
        if n_lost != self._presence.n_lost:
            process.desk.close()
            self._is_stale = True  # that process is gone; the next one is looked at anew
            self._degradations.leave()
            return self.poke()
        if obstacle := process.obstacle:
            process.degrade(obstacle.kind, obstacle.detail)
            before -= {obstacle.kind}
            if last:
                _keep_contents(last, process)
        if process.clears_idle_slots:
            before -= {DegradationKind.IDLE_SLOTS_CLEARED}
        process.note_tenants()
        process.is_current = partial(self.is_still, process)
        self._outlast_strangers(process)
        self._learning.begin(process)
        self._degradations.end(*before)
        self._services.served.note(self._upstream.target, process)
        self.current = process
        self.on_attached(process)
        self._report(process, props)

    def _outlast_strangers(self, process: Process) -> None:
        """Keep the slots that were busy at first contact until whatever runs there has ended."""
        desk = process.desk
        for slot in desk.table:
            if slot.is_leased:
                ended = self._services.tasks.start(outlast(process, partial(list, [slot.id])))
                desk.take_over(slot.id).hand_over(ended)

    def _report(self, process: Process, props: Props) -> None:
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


def _keep_contents(last: Process, process: Process) -> None:
    """Believe of the same process's slots what was known before a try to attach that came to nothing."""
    for slot in process.slots:
        if not slot.is_leased:
            process.slots.set_content(slot.id, last.slots[slot.id].content)


def _is_idle(process: Process) -> bool:
    return process.desk.n_waiting == 0 and not any(s.is_leased for s in process.slots)


def kind_of(fault: UpstreamFault) -> DegradationKind:
    """Return what it means that llama-server could not be asked what it is."""
    if isinstance(fault, UpstreamRefused):
        match fault.status:
            case 503:
                return DegradationKind.LOADING
            case 401:
                return DegradationKind.API_KEY_REFUSED
            case _:
                return DegradationKind.NOT_A_LLAMA_SERVER
    return DegradationKind.UNREACHABLE
