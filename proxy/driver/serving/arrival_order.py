"""Requests that had to wait for llama-server come to the desk in the order in which they arrived.

They all wait at once and have their prompts read at once, which takes some longer than others.
"""

import asyncio
import time
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Place:
    """One request's place; `since` is when it last joined, all times of the monotonic clock.

    `queued_at` is when it came to the first desk, 0 if it was at none yet.
    """

    arrived_at: float
    since: float = 0.0
    queued_at: float = 0.0
    moved: asyncio.Event = field(default_factory=asyncio.Event)


class ArrivalOrder:
    """The requests that are on their way to the desk after a wait."""

    def __init__(self) -> None:
        self._places: list[Place] = []

    def __len__(self) -> int:
        return len(self._places)

    def join(self, place: Place) -> None:
        """Take a place among those who wait; again is harmless."""
        if place not in self._places:
            place.since = time.monotonic()
            self._places.append(place)

    def leave(self, place: Place) -> None:
        """Let the next one go; again is harmless."""
        if place in self._places:
            self._places.remove(place)
            if self._places:
                self._first().moved.set()

    async def turn(self, place: Place) -> None:
        """Return once nobody who arrived earlier is still on the way."""
        while place in self._places and self._first() is not place:
            place.moved.clear()
            await place.moved.wait()

    def _first(self) -> Place:
        return min(self._places, key=lambda place: place.arrived_at)
