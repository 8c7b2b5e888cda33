"""States that requests on their way are about to save, for others to wait for.

Two requests with the same new header come at the same moment: the first evaluates and saves it, the
second waits for that instead of evaluating it again beside the first. Or a slot is being saved for one
request just when the next one of its conversation comes.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from proxy.core.planning.plan import Coming
from proxy.core.prefix import Namespace, TokenIds
from proxy.driver.slots.leases import LeaseDesk


@dataclass(frozen=True, eq=False, slots=True)
class Arrival:
    """A state of *tokens* that will be saved at about *expected_at* on the monotonic clock."""

    tokens: TokenIds
    namespace: Namespace
    expected_at: float
    size_bytes: int
    restore_points: tuple[int, ...] = ()


class Arrivals:
    """What is about to be saved in the slots of one llama-server process."""

    def __init__(self, desk: LeaseDesk) -> None:
        self._desk = desk
        self._arrivals: list[Arrival] = []

    @contextmanager
    def announced(self, arrival: Arrival | None) -> Iterator[None]:
        """Let others wait for a state while the block runs; then it is there, or never will be."""
        if arrival is None:
            yield
            return
        self._arrivals.append(arrival)
        try:
            yield
        finally:
            self._arrivals.remove(arrival)
            self._desk.reconsider()

    def coming(self) -> tuple[Coming, ...]:
        """Return what can be waited for now; what is overdue still counts as about to come."""
        now = time.monotonic()
        return tuple(
            Coming(
                arrival.tokens,
                arrival.namespace,
                max(0.0, arrival.expected_at - now),
                arrival.size_bytes,
                arrival.restore_points,
            )
            for arrival in self._arrivals
        )
