"""A queue with slots that hold nothing, and requests that ask it for them."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from proxy.core.model import SlotId
from proxy.core.slots import Empty, SlotTable
from proxy.serving.queue import Choice, Lease, SlotQueue
from tests.lab.waiting import HANG_SECONDS

T = TypeVar("T")
Choose = Callable[[], Choice | None]
ONE, TWO = SlotId(0), SlotId(1)


def queue_of(n_slots: int, max_waiting: int = 10) -> SlotQueue:
    return SlotQueue(SlotTable([Empty() for _ in range(n_slots)]), max_waiting)


def any_slot(queue: SlotQueue) -> Choose:
    def choose() -> Choice | None:
        free = queue.table.free()
        return Choice((free[0].id,)) if free else None

    return choose


def both_slots(queue: SlotQueue) -> Choose:
    def choose() -> Choice | None:
        return Choice((ONE, TWO)) if len(queue.table.free()) == 2 else None

    return choose


async def join(queue: SlotQueue, choose: Choose, **how: bool) -> "asyncio.Task[Lease]":
    """Return a task that has begun to wait for a lease."""
    task = asyncio.get_running_loop().create_task(queue.lease(choose, **how))
    await asyncio.sleep(0)
    return task


async def soon(task: "asyncio.Task[T]") -> T:
    """Wait for *task*, but not for ever: a lost slot must fail a test, not hang it."""
    return await asyncio.wait_for(task, 60)


def n_free(queue: SlotQueue) -> int:
    return len(queue.table.free())


def fitting(queue: SlotQueue, slot_id: SlotId = ONE) -> Choose:
    """Return who wants one slot only, and would go on with what it holds."""

    def choose() -> Choice | None:
        return None if queue.table[slot_id].is_leased else Choice((slot_id,), is_warm=True)

    return choose


class Queue:
    """Requests with names that use a slot for a moment, and in which order they had one."""

    def __init__(self, queue: SlotQueue) -> None:
        self._queue = queue
        self.so_far: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def join(
        self,
        name: str,
        choose: Choose,
        *,
        may_be_overtaken: bool = True,
        is_placement: bool = False,
    ) -> None:
        async def use() -> None:
            with await self._queue.lease(
                choose, may_be_overtaken=may_be_overtaken, is_placement=is_placement
            ):
                self.so_far.append(name)
                await asyncio.sleep(0)

        self._tasks.append(asyncio.get_running_loop().create_task(use()))
        await asyncio.sleep(0)

    async def order(self) -> list[str]:
        """Return the names of those who joined, in the order in which they had a slot."""
        async with asyncio.timeout(HANG_SECONDS):
            await asyncio.gather(*self._tasks)
        return self.so_far
