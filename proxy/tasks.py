"""Background work that outlives the request that began it; waits of limited length; deadlines; and turns.

The turn is the right to do something that only one caller at a time may do.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from typing import Any, TypeVar

from proxy.errors import ProxyStopped

T = TypeVar("T")


class Tasks:
    """Running tasks, referenced until they end: a caller may stop waiting for its task."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def drain(self, seconds: float) -> None:
        """Wait for all running tasks and those that they start, at most *seconds*, then cancel the rest."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._running:
                    await asyncio.wait(self._running)
        for task in tuple(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


async def wait_for(event: asyncio.Event, seconds: float) -> None:
    """Wait until an event is set, for at most *seconds*."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


class Deadline:
    """The end of blocks that run already when it is set."""

    def __init__(self) -> None:
        self._limits: set[asyncio.Timeout] = set()

    def set(self, seconds: float) -> None:
        """End all blocks in so many seconds; it may be set again to end them sooner."""
        for limit in self._limits:
            if not limit.expired():  # else its block is ending
                limit.reschedule(asyncio.get_running_loop().time() + seconds)

    @asynccontextmanager
    async def ends_block(self) -> AsyncIterator[None]:
        """Raise ProxyStopped where the block is at the deadline."""
        try:
            async with asyncio.timeout(None) as limit:
                self._limits.add(limit)
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise ProxyStopped("the proxy stopped before the answer was whole") from error
        finally:
            self._limits.remove(limit)


class Turn(AbstractContextManager["Turn"]):
    """A caller in the queue; the first caller in the queue has the turn, which ends with the `with` block.

    A second `end` is harmless.
    """

    def __init__(self, turns: "Turns") -> None:
        self._turns = turns
        self.has_come = asyncio.Event()

    def end(self, *_: object) -> None:
        """Leave the queue; the next caller gets the turn."""
        self._turns.leave(self)

    __exit__ = end


class Turns:
    """Gives the turn to one caller at a time, in the order of asking."""

    def __init__(self, on_end: Callable[[], None] = lambda: None) -> None:
        """*on_end* is called between two turns, when the turn is free."""
        self._queue: deque[Turn] = deque()
        self._on_end = on_end

    @property
    def n_waiting(self) -> int:
        return max(0, len(self._queue) - 1)

    @property
    def is_taken(self) -> bool:
        return bool(self._queue) and self._queue[0].has_come.is_set()

    def try_take(self) -> Turn | None:
        """Return the turn if it is free, else None."""
        return None if self._queue else self.join()

    async def take(self) -> Turn:
        """Wait for the turn."""
        turn = self.join()
        try:
            await turn.has_come.wait()
        except asyncio.CancelledError:
            turn.end()
            raise
        return turn

    def leave(self, turn: Turn) -> None:
        """Take a caller out of the queue; if it was the first, the next caller gets the turn."""
        if turn in self._queue:
            self._queue.remove(turn)
            if not self.is_taken:
                self._on_end()
                if self._queue:
                    self._queue[0].has_come.set()

    def join(self) -> Turn:
        """Join the queue; the turn has come once the caller is the first."""
        turn = Turn(self)
        self._queue.append(turn)
        self._queue[0].has_come.set()
        return turn
