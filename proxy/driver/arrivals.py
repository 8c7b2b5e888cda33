"""States that requests on their way are about to save, for others to wait for.

Two requests with the same new header come at the same moment: the first evaluates and saves it, the
second waits for that instead of evaluating it again beside the first.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from proxy.core.model import SlotId
from proxy.core.plan import Coming
from proxy.core.prefix import Namespace, TokenIds
from proxy.driver.leases import LeaseDesk


@dataclass(frozen=True, slots=True)
class Arrival:
    """A state of *tokens* that will be saved at about *expected_at* on the monotonic clock."""

    tokens: TokenIds
    namespace: Namespace
    expected_at: float
    size_bytes: int


class Arrivals:
    """What is about to be saved in the slots of one llama-server process."""

    def __init__(self, desk: LeaseDesk) -> None:
        self._desk = desk
        self._arrivals: dict[SlotId, Arrival] = {}

    @contextmanager
    def announced(self, slot_id: SlotId, arrival: Arrival | None) -> Iterator[None]:
        """Let others wait for a state while the block runs; then it is there, or never will be."""
        if arrival is None:
            yield
            return
        self._arrivals[slot_id] = arrival
        try:
            yield
        finally:
            del self._arrivals[slot_id]
            self._desk.reconsider()

    def coming(self) -> tuple[Coming, ...]:
        """Return what can be waited for now; what is overdue still counts as about to come."""
        now = time.monotonic()
        return tuple(
            Coming(a.tokens, a.namespace, max(0.0, a.expected_at - now), a.size_bytes)
            for a in self._arrivals.values()
        )
