"""The queue for slots: requests wait in order of arrival; a lease is granted and reserved in one step.

A waiting request brings a function that chooses among the slots as they are at that moment. There are
four cases:

1. The request chooses free slots. These slots are its lease.
2. The request declines the free slots, because a better slot will soon be free. At most MAX_OVERTAKES
   later requests may take a lease before it.
3. The request would empty a slot that already holds the prefix of a request behind it. The request behind
   takes that slot first, with the same limit.
4. The request is a *placement*: llama-server itself chooses the slot. Until that choice is known it may be
   any idle slot, so no other lease is granted, and slots that come free join the lease.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Any, Generic, TypeVar

from proxy.core.model import SlotId
from proxy.core.slots import TAINTED, SlotTable
from proxy.errors import ServerAway, TooManyRequests

C = TypeVar("C")

MAX_OVERTAKES = 8
"""How many later requests may take a lease before one that waits for a better slot."""

MAX_LOOKED_AT = 8
"""How many waiting requests are asked whether a slot fits them."""


class Turn:
    """The right to be the only one; ending it again is harmless."""

    def __init__(self, end: Callable[[], None] | None) -> None:
        """Without *end* the turn excludes nobody."""
        self._end = end

    @property
    def has_ended(self) -> bool:
        return self._end is None

    def end(self) -> None:
        """Let the next one have the turn."""
        end, self._end = self._end, None
        if end is not None:
            end()


class Turns:
    """Hands out a turn that one has at a time, in the order of asking."""

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
        return Turn(self._pass_on)

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
                self._pass_on()  # the turn came as its taker left
            else:
                self._waiting.remove(passed)
            raise
        return Turn(self._pass_on)

    def _pass_on(self) -> None:
        while self._waiting:
            passed = self._waiting.popleft()
            if not passed.done():
                return passed.set_result(None)
        self._is_taken = False


@dataclass(frozen=True, slots=True)
class Choice(Generic[C]):
    """The slots a request takes, and why (its plan).

    `is_warm` says that it goes on with what they hold, so that nobody else could use them better.
    """

    slot_ids: tuple[SlotId, ...]
    reason: C
    is_warm: bool = False


class Lease(Generic[C]):
    """The exclusive right to some slots; leaving the `with` block gives them back."""

    def __init__(self, queue: "SlotQueue", choice: Choice[C]) -> None:
        self._queue = queue
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
        self._queue.give_back(self, given_back)

    def join(self, slot_id: SlotId) -> None:
        """Take a slot that came free during this placement."""
        self._held.add(slot_id)
        if self._is_handed_over:
            # Whether the abandoned request ran there will never be known.
            self._queue.table.set_content(slot_id, TAINTED)
            self._queue.table.close_lease(slot_id)

    def move(self, slot_id: SlotId, reason: C) -> None:
        """Exchange all slots for another one that was reserved."""
        left = self.held
        self._held.add(slot_id)
        self.slot_ids, self.reason = (slot_id,), reason
        self.give_up(left)

    def hand_over(self, task: "asyncio.Task[Any]") -> None:
        """Leave the slots to *task*: they are given back when it ends, whatever becomes of us."""
        for slot_id in self._held:
            self._queue.table.close_lease(slot_id)
        self._is_handed_over = True
        task.add_done_callback(lambda _: self.give_up(self._held))


def replaced() -> ServerAway:
    """Return what is raised where llama-server was replaced before a request was sent."""
    return ServerAway("llama-server was replaced meanwhile", was_sent="no")


class FreeElsewhere(Exception):
    """Another llama-server with the same model has a free slot for a request that waited here."""


@dataclass(slots=True, eq=False)
class _Waiting:
    choose: Callable[[], Choice[Any] | None]
    granted: "asyncio.Future[Lease[Any]]"
    n_passes: int
    is_placement: bool


class SlotQueue:
    """Hands out leases on the slots of one llama-server process."""

    def __init__(self, table: SlotTable, max_waiting: int) -> None:
        self.table = table
        self._max_waiting = max_waiting
        self._waiting: deque[_Waiting] = deque()
        self._placement: Lease[Any] | None = None
        self._choosing = Turns()
        self.on_idle: Callable[[SlotQueue], None] = lambda queue: None
        """Is told when a slot has come free that nobody here waits for."""
        self._is_held = False
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether llama-server has been replaced since: nothing may be saved or restored any more."""
        return self._is_closed

    @property
    def is_placing(self) -> bool:
        """Whether llama-server may be about to run a request in any slot that is idle to it."""
        return self._placement is not None or self._is_held

    @property
    def grants_at_once(self) -> bool:
        """Whether a request that finds its slot free gets the slot without waiting."""
        return not (self._is_closed or self._waiting or self.is_placing)

    async def hold(self) -> Turn:
        """Grant nothing until the turn ends: llama-server is choosing a slot by what the slots hold."""
        choosing = await self._choosing.take()
        self._is_held = True

        def end() -> None:
            self._is_held = False
            choosing.end()
            self._grant()

        return Turn(end)

    async def await_choice(self) -> None:
        """Wait until nobody holds the queue: what slots hold may change then."""
        (await self._choosing.take()).end()

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    async def lease(
        self,
        choose: Callable[[], Choice[C] | None],
        *,
        may_be_passed: bool = False,
        is_placement: bool = False,
    ) -> Lease[C]:
        """Wait for the turn and for slots to choose from.

        With *may_be_passed*, declining free slots does not hold up those who came later, within bounds.
        Raises TooManyRequests if the queue is full, ServerAway if llama-server is replaced meanwhile, and
        FreeElsewhere.
        """
        if self._is_closed:
            raise replaced()
        if self.grants_at_once and (choice := choose()):
            return self._reserve(choice, is_placement=is_placement)
        if len(self._waiting) >= self._max_waiting:
            raise TooManyRequests(f"{self._max_waiting} requests are waiting for a slot already")
        granted: asyncio.Future[Lease[C]] = asyncio.get_running_loop().create_future()
        n_passes = MAX_OVERTAKES if may_be_passed else 0
        waiting = _Waiting(choose, granted, n_passes, is_placement)
        self._waiting.append(waiting)
        self._grant()
        try:
            return await granted
        except asyncio.CancelledError:
            self._abandon(waiting)
            raise

    def try_lease(self, slot_id: SlotId) -> Lease[None] | None:
        """Lease one slot if it is free and nobody waits."""
        if not self.grants_at_once or self.table[slot_id].is_leased:
            return None
        return self._reserve(Choice((slot_id,), None))

    def end_placement(self, lease: Lease[Any], used: Collection[SlotId]) -> None:
        """Note that a placement's request runs in the slots *used*; the lease keeps only those."""
        if self._placement is lease:
            self._placement = None
        for slot_id in used:
            self.table.note_running(slot_id)
        lease.give_up(set(lease.held) - set(used))

    def lease_free(self, slot_id: SlotId) -> Lease[None] | None:
        """Lease one slot if it is free, whoever waits; only for who holds the queue."""
        if self._is_closed or self.table[slot_id].is_leased:
            return None
        return self._reserve(Choice((slot_id,), None))

    def move(self, lease: Lease[C], slot_id: SlotId, reason: C) -> None:
        """Let a lease have a free slot instead of its own; only for who holds the queue."""
        self.table.lease(slot_id, time.monotonic())
        lease.move(slot_id, reason)

    def take_over(self, slot_id: SlotId) -> Lease[None]:
        """Return the lease of a slot that was found in somebody else's use."""
        return Lease(self, Choice((slot_id,), None))

    def note_running(self, slot_id: SlotId) -> None:
        """Note that llama-server runs the request that a slot was leased for."""
        self.table.note_running(slot_id)
        self._grant()

    def reconsider(self) -> None:
        """Ask those who wait again: what a slot holds has changed."""
        self._grant()

    def give_back(self, lease: Lease[Any], slot_ids: set[SlotId]) -> None:
        """Free slots of *lease*; while another lease is a placement, they join that one instead."""
        if self._placement is lease and not lease.reserved:
            self._placement = None
        for slot_id in slot_ids:
            self.table.release(slot_id, time.monotonic())
            if self._placement not in (None, lease):
                self.table.lease(slot_id, time.monotonic())
                self._placement.join(slot_id)
        self._grant()
        is_idle = not self._waiting and not self.is_placing and bool(self.table.free())
        if slot_ids and is_idle and not self._is_closed:
            self.on_idle(self)

    def let_go(self) -> bool:
        """Send who has waited longest to a slot that is free elsewhere; return False if nobody waits."""
        for waiting in tuple(self._waiting):
            self._waiting.remove(waiting)
            if not waiting.granted.done():
                waiting.granted.set_exception(FreeElsewhere())
                return True
        return False

    def close(self) -> None:
        """Send everybody who waits away; leases that are out stay harmless."""
        self._is_closed = True
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.granted.done():
                waiting.granted.set_exception(replaced())

    def _reserve(self, choice: Choice[C], *, is_placement: bool = False) -> Lease[C]:
        for slot_id in choice.slot_ids:
            if self.table[slot_id].is_leased:
                raise ValueError(f"slot {slot_id} is leased already")
        for slot_id in choice.slot_ids:
            self.table.lease(slot_id, time.monotonic())
        lease = Lease(self, choice)
        if is_placement:
            self._placement = lease
        return lease

    def _grant(self) -> None:
        """Give free slots to those who wait, in arrival order but for a bounded number of overtakes."""
        declined: list[_Waiting] = []
        for waiting in tuple(self._waiting):
            if self.is_placing:
                return
            if waiting.granted.done():
                self._waiting.remove(waiting)
                continue
            taker = self._try_to_grant(waiting)
            if taker is None:
                if waiting.n_passes == 0 or not self.table.free():
                    return
                declined.append(waiting)
                continue
            for overtaken in islice(self._waiting, self._waiting.index(taker)):
                overtaken.n_passes -= 1
            self._waiting.remove(taker)
            if taker is not waiting:
                return self._grant()
            if any(overtaken.n_passes == 0 for overtaken in declined):
                return

    def _try_to_grant(self, waiting: _Waiting) -> _Waiting | None:
        """Grant the slots that *waiting* chooses; return who has them, None if it chooses none.

        That is another who waits if they fit that one and would be emptied for *waiting*.
        """
        try:
            choice = waiting.choose()
            if choice is None:
                return None
            if not choice.is_warm and waiting.n_passes > 0 and not waiting.is_placement:
                if fitting := self._fitting(waiting, choice):
                    waiting, choice = fitting
            lease = self._reserve(choice, is_placement=waiting.is_placement)
            waiting.granted.set_result(lease)
        except Exception as error:
            waiting.granted.set_exception(error)
        return waiting

    def _fitting(
        self, passed: _Waiting, wanted: Choice[Any]
    ) -> tuple[_Waiting, Choice[Any]] | None:
        """Return who behind *passed* would go on with what the *wanted* slots hold.

        Nobody passes a placement, nor who has been passed often enough.
        """
        behind = list(self._waiting)[self._waiting.index(passed) + 1 :][:MAX_LOOKED_AT]
        for waiting in behind:
            if waiting.granted.done():
                continue
            if waiting.is_placement:
                return None
            with suppress(Exception):  # whoever cannot choose is told so at its own turn
                choice = waiting.choose()
                if choice and choice.is_warm and set(choice.slot_ids) & set(wanted.slot_ids):
                    return waiting, choice
            if waiting.n_passes == 0:
                return None
        return None

    def _abandon(self, waiting: _Waiting) -> None:
        # Cancelled between the grant and our waking up: the lease is ours to give back.
        if waiting.granted.done() and not waiting.granted.cancelled():
            if waiting.granted.exception() is None:
                waiting.granted.result().release()
        elif waiting in self._waiting:
            self._waiting.remove(waiting)
            self._grant()
