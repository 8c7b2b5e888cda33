"""The write-back of dirty slots: when they have been idle for a while, and at shutdown."""

import asyncio
import time

from proxy.core.model import CheckpointKind
from proxy.core.slots import Slot
from proxy.core.write_back import is_write_back_due
from proxy.driver.lifecycle import Lifecycle
from proxy.driver.session import Session
from proxy.driver.tasks import Tasks
from proxy.log import get_logger

_LOOK_SECONDS = 0.5
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
            idle_since = time.monotonic() - self._idle_save_seconds
            self._begin_saves(idle_since)

    async def drain(self, seconds: float) -> None:
        """Save every dirty slot now, in at most *seconds*, and say what could not be saved."""
        self._take_up_postponed()
        if saves := self._begin_saves(time.monotonic()):
            await asyncio.wait(saves, timeout=seconds)
            n_saved = sum(task.done() and task.result() is not None for task in saves)
            get_logger("main").info("slots saved", n_saved=n_saved, n_dirty=len(saves))

    def _take_up_postponed(self) -> None:
        if session := self._lifecycle.current:
            session.work.take_up_postponed()

    def _begin_saves(self, idle_since: float) -> list["asyncio.Task[object]"]:
        session = self._lifecycle.current
        if session is None:
            return []
        due = [s for s in session.attachment.desk.table if self._is_due(session, s, idle_since)]
        tasks: list[asyncio.Task[object]] = []
        for slot in due:
            if lease := session.attachment.desk.try_lease(slot.id):
                work = session.work.write_back(slot.id, CheckpointKind.CONVERSATION)
                tasks.append(self._tasks.start(work))
                lease.hand_over(tasks[-1])
        return tasks

    def _is_due(self, session: Session, slot: Slot, idle_since: float) -> bool:
        return (
            not slot.is_leased
            and slot.used_at <= idle_since
            and is_write_back_due(session.attachment.rule, slot.content)
        )
