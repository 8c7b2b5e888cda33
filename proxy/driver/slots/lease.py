"""One lease: the right of one request to some slots, and how it ends."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from proxy.core.model import SlotId
from proxy.core.slots import TAINTED, SlotTable

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Choice(Generic[C]):
    """The slots a request takes, and why (its plan).

    `is_warm` says that it goes on with what they hold, so that nobody else could use them better.
    """

    slot_ids: tuple[SlotId, ...]
    reason: C
    is_warm: bool = False


class Desk(Protocol):
    """Who handed the lease out, and takes its slots back."""

    @property
    def table(self) -> SlotTable: ...

    def give_back(self, lease: "Lease[Any]", slot_ids: set[SlotId]) -> None: ...


class Lease(Generic[C]):
    """The exclusive right to some slots; leaving the `with` block gives them back."""

    def __init__(self, desk: Desk, choice: Choice[C]) -> None:
        self._desk = desk
        self._held = set(choice.slot_ids)
        self._is_handed_over = False
        self.slot_ids = choice.slot_ids
        self.reason = choice.reason

    @property
    def held(self) -> tuple[SlotId, ...]:
        """The slots that its request may use: neither given back nor handed over."""
        return () if self._is_handed_over else tuple(self._held)

    @property
    def reserved(self) -> tuple[SlotId, ...]:
        """The slots that nobody else may use, whoever they were handed over to."""
        return tuple(self._held)

    def __enter__(self) -> "Lease[C]":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Give back all slots that were not handed over; again is harmless."""
        self.give_up(self.held)

    def give_up(self, slot_ids: Iterable[SlotId]) -> None:
        """Give back some of the slots."""
        given_back = self._held & set(slot_ids)
        self._held -= given_back
        self._desk.give_back(self, given_back)

    def join(self, slot_id: SlotId) -> None:
        """Take a slot that came free during this placement."""
        self._held.add(slot_id)
        if self._is_handed_over:
            # Whether the abandoned request ran there will never be known.
            self._desk.table.set_content(slot_id, TAINTED)
            self._desk.table.close_lease(slot_id)

    def move(self, slot_id: SlotId, reason: C) -> None:
        """Exchange all slots for another one that was reserved."""
        left = self.held
        self._held.add(slot_id)
        self.slot_ids, self.reason = (slot_id,), reason
        self.give_up(left)

    def hand_over(self, task: "asyncio.Task[Any]") -> None:
        """Leave the slots to *task*: they are given back when it ends, whatever becomes of us."""
        for slot_id in self._held:
            self._desk.table.close_lease(slot_id)
        self._is_handed_over = True
        task.add_done_callback(lambda _: self.give_up(self._held))
