"""The write-back of dirty slots: when they have been idle for a while, and at shutdown."""

import asyncio
import time

from proxy.core.model import CheckpointKind
from proxy.core.slots import Slot
from proxy.core.write_back import is_write_back_due
from proxy.driver.lifecycle import Lifecycle
from proxy.driver.session import Session
from proxy.driver.tasks import Tasks

_LOOK_SECONDS = 0.5


class WriteBack:
    """Saves what no file has."""

    def __init__(self, lifecycle: Lifecycle, tasks: Tasks, idle_save_seconds: float) -> None:
        self._lifecycle = lifecycle
        self._tasks = tasks
        self._idle_save_seconds = idle_save_seconds

    async def run(self) -> None:
        """Save slots that have been idle long enough, until cancelled."""
        while True:
            await asyncio.sleep(min(_LOOK_SECONDS, self._idle_save_seconds / 2 or _LOOK_SECONDS))
            idle_since = time.monotonic() - self._idle_save_seconds
            self._begin_saves(idle_since)

    async def drain(self, seconds: float) -> None:
        """Save every dirty slot now, in at most *seconds*."""
        if saves := self._begin_saves(time.monotonic()):
            await asyncio.wait(saves, timeout=seconds)

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
