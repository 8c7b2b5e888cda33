"""llama-server is not there: it crashed, is being started again, or loads its model. Requests wait.

Once it has been unreachable for longer than a request would wait, requests fail at once: somebody has to
look after it. One that answers that it is loading is waited for by each request anew. One that was never
reached is not waited for: most likely its address is wrong.
"""

import asyncio
import time

from proxy.errors import UpstreamAbsent


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
