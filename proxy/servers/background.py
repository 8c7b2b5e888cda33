"""What is written in the background: idle slots, and what was learned."""

import asyncio
import time
from contextlib import suppress
from functools import partial

from proxy.core.model import CheckpointKind
from proxy.core.rates import Rates
from proxy.core.saving import is_worth_saving, is_write_back_due
from proxy.core.slots import Known, Slot, SlotTable
from proxy.errors import StoreFault, TooManyRequests
from proxy.log import get_logger
from proxy.servers.attachment import remember_rates
from proxy.servers.server import Lifecycle
from proxy.serving.desk import Choice, DeskClosed, FreeElsewhere
from proxy.serving.process import Process, Services
from proxy.tasks import Tasks

# Writes the learned rates to the index now and then, so that the next start begins with them.


_WRITE_SECONDS = 60.0


class Remembering:
    """Keeps the index up to date with what was measured, never in a request's way."""

    def __init__(self, services: Services, lifecycle: Lifecycle) -> None:
        self._services = services
        self._lifecycle = lifecycle
        self._written: tuple[Process, Rates] | None = None

    async def run(self) -> None:
        """Write what is new every minute, and once more when cancelled."""
        try:
            while True:
                await asyncio.sleep(_WRITE_SECONDS)
                await self._write()
        finally:
            await self._write()

    async def _write(self) -> None:
        process, store = self._lifecycle.current, self._services.opened_store
        if process is None or store is None or not process.can_cache:
            return
        process, rates = process, process.rates
        if self._written == (process, rates) or rates == Rates():
            return
        try:
            await remember_rates(store, process)
            self._written = process, rates
        except StoreFault as fault:
            self._services.faults.record("remember", fault)


# The write-back of dirty slots: when they have been idle for a while, and at shutdown.
#
# llama-server stalls all slots during a save. So while any of them answers a request, an idle slot is
# left alone until its save has been put off for long enough.


_LOOK_SECONDS = 0.5
MAX_PUT_OFF = 6.0
"""Beside others' answers, a slot is saved once it has been idle for so many times as long as otherwise."""
ROOM_RETRY_SECONDS = 30.0
"""How often what there was no room for is tried again."""


class WriteBack:
    """Saves what no file has."""

    def __init__(self, lifecycle: Lifecycle, tasks: Tasks, idle_save_seconds: float) -> None:
        self._lifecycle = lifecycle
        self._tasks = tasks
        self._idle_save_seconds = idle_save_seconds

    async def run(self) -> None:
        """Save slots that have been idle long enough, until cancelled."""
        retried_at = time.monotonic()
        while True:
            if time.monotonic() - retried_at >= ROOM_RETRY_SECONDS:
                retried_at = time.monotonic()
                self._take_up_postponed()
            await asyncio.sleep(min(_LOOK_SECONDS, self._idle_save_seconds / 2 or _LOOK_SECONDS))
            self._begin_saves(self._idle_save_seconds)

    async def drain(self, seconds: float) -> None:
        """Save every dirty slot now, in at most *seconds*, and say what could not be saved."""
        self._take_up_postponed()
        if saves := self._begin_saves(None):
            await asyncio.wait(saves, timeout=seconds)
            n_saved = sum(task.done() and task.result() is not None for task in saves)
            get_logger("main").info("slots saved", n_saved=n_saved, n_dirty=len(saves))

    async def settle(self, seconds: float) -> None:
        """Save every dirty slot once nothing runs any more, in at most *seconds*."""
        process = self._lifecycle.current
        if process is None:
            return
        desk = process.desk
        with suppress(TimeoutError, DeskClosed, FreeElsewhere, TooManyRequests):
            async with asyncio.timeout(seconds):
                (await desk.lease(partial(_all_slots, desk.table))).release()
        await self.drain(seconds)

    def _take_up_postponed(self) -> None:
        if process := self._lifecycle.current:
            process.saves.take_up_postponed()

    def _begin_saves(self, idle_seconds: float | None) -> list["asyncio.Task[object]"]:
        """Save what has been idle for so long and is worth it; without *idle_seconds* all that is dirty."""
        process = self._lifecycle.current
        if process is None:
            return []
        due = [s for s in process.slots if _is_due(process, s, idle_seconds)]
        # Where a start empties idle slots, those are saved by whoever is about to start.
        if not due or (turn := process.launches.try_turn()) is None:
            return []
        tasks: list[asyncio.Task[object]] = []
        for slot in due:
            if lease := process.desk.try_lease(slot.id):
                work = process.saves.write_back(slot.id, CheckpointKind.CONVERSATION)
                tasks.append(self._tasks.start(work))
                lease.hand_over(tasks[-1])
        saves = asyncio.gather(*tasks, return_exceptions=True)
        saves.add_done_callback(lambda _: turn.end())
        return tasks


def _all_slots(table: SlotTable) -> Choice[None] | None:
    is_free = not any(slot.is_leased for slot in table)
    return Choice(tuple(slot.id for slot in table), None) if is_free else None


def _is_due(process: Process, slot: Slot, idle_seconds: float | None) -> bool:
    process, content = process, slot.content
    if slot.is_leased or not is_write_back_due(process.rule, content):
        return False
    if idle_seconds is None:
        return True
    if any(other.is_leased and not other.is_closing for other in process.slots):
        idle_seconds *= MAX_PUT_OFF
    if slot.used_at > time.monotonic() - idle_seconds:
        return False
    return not isinstance(content, Known) or _is_worth_it(process, content)


def _is_worth_it(process: Process, content: Known) -> bool:
    size_bytes = process.state_bytes(content)
    return is_worth_saving(content, content.n_unsaved, size_bytes, process.rates)
