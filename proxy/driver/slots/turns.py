"""A turn that one has at a time, in the order of asking."""

import asyncio
from collections import deque


class Turn:
    """The right to be the only one; ended once, again is harmless."""

    def __init__(self, turns: "Turns | None") -> None:
        """Without *turns* it excludes nobody."""
        self._turns = turns

    @property
    def has_ended(self) -> bool:
        return self._turns is None

    def end(self) -> None:
        """Let the next one have it."""
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.pass_on()


class Turns:
    """Hands out turns."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    def try_take(self) -> Turn | None:
        """Return the turn if nobody has it."""
        if self._is_taken:
            return None
        self._is_taken = True
        return Turn(self)

    async def take(self) -> Turn:
        """Wait for the turn."""
        if turn := self.try_take():
            return turn
        passed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(passed)
        try:
            await passed
        except asyncio.CancelledError:
            if passed.done() and not passed.cancelled():
                self.pass_on()  # it came as we left
            else:
                self._waiting.remove(passed)
            raise
        return Turn(self)

    def pass_on(self) -> None:
        """Give the turn to who has waited longest; only its holder may."""
        while self._waiting:
            passed = self._waiting.popleft()
            if not passed.done():
                return passed.set_result(None)
        self._is_taken = False
