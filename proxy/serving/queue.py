"""The queue for slots: requests wait in order of arrival; a lease is granted and reserved in one step.

The order is that of arrival at the proxy: a request whose prompt takes long to read loses no place.

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
import bisect
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from proxy.core.model import ExpectedState, SlotId
from proxy.core.slots import TAINTED, SlotPhase, SlotTable
from proxy.core.tokens import TokenIds
from proxy.errors import TooManyRequests, replaced
from proxy.tasks import Turn, Turns

MAX_OVERTAKES = 8
"""How many later requests may take a lease before one that waits for a better slot."""
MAX_LOOKED_AT = 8
"""How many waiting requests are asked whether a slot fits them."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The slots that a request takes.

    `is_warm` says that the request goes on with the slots' content, so that no other could use them better.
    `destined` are the tokens that the request will put there.
    """

    slot_ids: tuple[SlotId, ...]
    is_warm: bool = False
    destined: TokenIds | None = None


class Lease(AbstractContextManager["Lease"]):
    """The exclusive right to some slots; leaving the `with` block gives them back."""

    def __init__(self, queue: "SlotQueue", slot_ids: Iterable[SlotId]) -> None:
        self._queue = queue
        self.reserved = set(slot_ids)
        """The slots that are not free yet, handed over or not."""
        self._keeper: asyncio.Future[Any] | None = None

    @property
    def held(self) -> tuple[SlotId, ...]:
        """The slots that the request may use: neither given back nor handed over."""
        return () if self._keeper else tuple(self.reserved)

    def release(self, *_: object) -> None:
        """Give back all slots that were not handed over; a second call is harmless."""
        self._queue.take_back(self, self.held)

    __exit__ = release

    def join(self, slot_id: SlotId) -> None:
        """Add a slot that came free during this placement."""
        self.reserved.add(slot_id)
        if self._keeper:
            # Nobody will ever know whether the abandoned request ran there.
            self._queue.table.set_content(slot_id, TAINTED)
            self._queue.table[slot_id].phase = SlotPhase.CLOSING

    def move(self, slot_id: SlotId) -> None:
        """Exchange all slots for a free one; the caller must hold the queue."""
        left = self.held
        self._queue.table.lease(slot_id, time.monotonic())
        self.reserved.add(slot_id)
        self._queue.take_back(self, left)

    def hand_over(self, task: "asyncio.Future[Any]") -> None:
        """Leave the slots to *task*, in place of an earlier task; when it ends, they are given back."""
        for slot_id in self.reserved:
            self._queue.table[slot_id].phase = SlotPhase.CLOSING
        self._keeper = task
        task.add_done_callback(
            lambda done: self._queue.take_back(self, self.reserved if done is self._keeper else ())
        )


class FreeElsewhere(Exception):
    """Another llama-server with the same model has a free slot for a request that waited here."""


@dataclass(slots=True, eq=False)
class _Waiting:
    since: float
    choose: Callable[[], Choice | None]
    granted: "asyncio.Future[Lease]"
    n_overtakes_left: int
    """How many later requests may still take a lease before this one."""
    is_placement: bool


class SlotQueue:
    """Hands out leases on the slots of one llama-server process."""

    def __init__(self, table: SlotTable, max_waiting: int) -> None:
        self.table = table
        self._max_waiting = max_waiting
        self._waiting: deque[_Waiting] = deque()
        self._placement: Lease | None = None
        self._choosing = Turns(self.reconsider)
        self.expected: list[ExpectedState] = []
        """The states that are about to be saved, overdue ones included."""
        self.on_idle: Callable[[SlotQueue], None] = lambda queue: None
        """Called when slots have come free and no request here waits for one; the server sets it."""
        self._has_come_free = False
        self.is_closed = False
        """Whether llama-server has been replaced: nothing may be saved or restored any more."""

    @property
    def is_placing(self) -> bool:
        """Whether llama-server may be about to run a request in any idle slot."""
        return self._placement is not None or self._choosing.is_taken

    @property
    def grants_at_once(self) -> bool:
        """Whether a request whose slot is free gets it without waiting."""
        return not (self.is_closed or self._waiting or self.is_placing)

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    async def lease(
        self,
        choose: Callable[[], Choice | None],
        *,
        since: float | None = None,
        may_be_overtaken: bool = False,
        is_placement: bool = False,
    ) -> Lease:
        """Wait for the turn and for slots to choose from.

        The place in the queue goes by *since*, the arrival on the monotonic clock; by default it is now.
        With *may_be_overtaken*, some later requests may go first while this one declines free slots.
        Raises TooManyRequests if the queue is full, ServerAway if llama-server is replaced meanwhile, and
        FreeElsewhere.
        """
        if self.is_closed:
            raise replaced()
        if self.grants_at_once and (choice := choose()):
            return self._reserve(choice, is_placement=is_placement)
        if len(self._waiting) >= self._max_waiting:
            raise TooManyRequests(f"{self._max_waiting} requests are waiting for a slot already")
        granted: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        n_overtakes_left = MAX_OVERTAKES if may_be_overtaken else 0
        since = time.monotonic() if since is None else since
        waiting = _Waiting(since, choose, granted, n_overtakes_left, is_placement)
        bisect.insort(self._waiting, waiting, key=lambda each: each.since)
        self.reconsider()
        try:
            return await granted
        except asyncio.CancelledError:
            self._abandon(waiting)
            raise

    def _reserve(self, choice: Choice, *, is_placement: bool = False) -> Lease:
        for slot_id in choice.slot_ids:
            self.table.lease(slot_id, time.monotonic())
            self.table[slot_id].destined = choice.destined
        lease = Lease(self, choice.slot_ids)
        if is_placement:
            self._placement = lease
        return lease

    def try_lease(self, slot_id: SlotId, *, overtakes_all: bool = False) -> Lease | None:
        """Lease one slot if it is free and no request waits.

        With *overtakes_all* others may wait: the caller holds the queue, or is about to start one of them.
        """
        may_lease = not self.is_closed if overtakes_all else self.grants_at_once
        if not may_lease or self.table[slot_id].is_leased:
            return None
        return self._reserve(Choice((slot_id,)))

    def _abandon(self, waiting: _Waiting) -> None:
        # Cancelled after the grant, before our task woke up: give the lease back.
        if waiting.granted.done() and not waiting.granted.cancelled():
            if waiting.granted.exception() is None:
                waiting.granted.result().release()
        elif waiting in self._waiting:
            self._waiting.remove(waiting)
            self.reconsider()

    def reconsider(self) -> None:
        """Grant free slots to waiting requests; if none waits, tell `on_idle` of slots that came free."""
        self._grant()
        if self._has_come_free and not (self._waiting or self.is_placing or self.is_closed):
            self._has_come_free = False
            if self.table.free():
                self.on_idle(self)

    def _grant(self) -> None:
        """Grant free slots in arrival order, with a bounded number of overtakes."""
        declined: list[_Waiting] = []
        for waiting in tuple(self._waiting):
            if self.is_placing:
                return
            if waiting.granted.done():
                self._waiting.remove(waiting)
                continue
            taker = self._try_to_grant(waiting)
            if taker is None:
                if waiting.n_overtakes_left == 0 or not self.table.free():
                    return
                declined.append(waiting)
                continue
            for overtaken in islice(self._waiting, self._waiting.index(taker)):
                overtaken.n_overtakes_left -= 1
            self._waiting.remove(taker)
            if taker is not waiting:  # case 3: it chooses again, among the slots that are left
                return self._grant()
            if any(overtaken.n_overtakes_left == 0 for overtaken in declined):
                return

    def _try_to_grant(self, waiting: _Waiting) -> _Waiting | None:
        """Grant the slots that *waiting* chooses; return who got them, None if it chooses none.

        A request behind gets them if they hold its prefix and would be emptied for *waiting* (case 3).
        """
        try:
            choice = waiting.choose()
            if choice is None:
                return None
            if not choice.is_warm and waiting.n_overtakes_left > 0 and not waiting.is_placement:
                if fitting := self._fitting(waiting, choice):
                    waiting, choice = fitting
            waiting.granted.set_result(self._reserve(choice, is_placement=waiting.is_placement))
        except Exception as error:
            waiting.granted.set_exception(error)
        return waiting

    def _fitting(self, first: _Waiting, wanted: Choice) -> tuple[_Waiting, Choice] | None:
        """Return a request behind *first* that would go on with the content of the *wanted* slots.

        No request overtakes a placement, or one that was overtaken often enough.
        """
        behind = list(self._waiting)[self._waiting.index(first) + 1 :][:MAX_LOOKED_AT]
        for waiting in behind:
            if waiting.granted.done():
                continue
            if waiting.is_placement:
                return None
            with suppress(Exception):  # the request gets its error at its own turn
                choice = waiting.choose()
                if choice and choice.is_warm and set(choice.slot_ids) & set(wanted.slot_ids):
                    return waiting, choice
            if waiting.n_overtakes_left == 0:
                return None
        return None

    async def hold(self) -> Turn:
        """Grant no lease until the turn ends: llama-server is choosing a slot by the contents."""
        return await self._choosing.take()

    async def until_unheld(self) -> None:
        """Wait until llama-server is not choosing a slot by the contents, so that they may change."""
        (await self.hold()).end()

    @contextmanager
    def announced(self, state: ExpectedState | None) -> Iterator[None]:
        """Let requests wait for a state until the block ends: then the state is there, or never comes."""
        expected = [state] if state else []
        self.expected += expected
        try:
            yield
        finally:
            for each in expected:
                self.expected.remove(each)
                self.reconsider()

    def end_placement(self, lease: Lease, used: Collection[SlotId]) -> None:
        """Note that the request of a placement runs in the slots *used*; the lease keeps only those."""
        if self._placement is lease:
            self._placement = None
        for slot_id in used:
            self.table[slot_id].note_running()
        self.take_back(lease, set(lease.held) - set(used))

    def note_running(self, slot_id: SlotId) -> None:
        """Note that llama-server now runs the request of a slot's lease."""
        self.table[slot_id].note_running()
        self.reconsider()

    def take_back(self, lease: Lease, slot_ids: Iterable[SlotId]) -> None:
        """Free slots that a lease gives back; if another lease is a placement, they join it instead."""
        given_back = lease.reserved & set(slot_ids)
        lease.reserved -= given_back
        if self._placement is lease and not lease.reserved:
            self._placement = None
        for slot_id in given_back:
            self.table.release(slot_id, time.monotonic())
            if self._placement not in (None, lease):
                self.table.lease(slot_id, time.monotonic())
                self._placement.join(slot_id)
        self._has_come_free |= bool(given_back)
        self.reconsider()

    def refuse_first(self, why: Exception) -> None:
        """Refuse the first waiting request."""
        while self._waiting:
            if not (granted := self._waiting.popleft().granted).done():
                return granted.set_exception(why)

    def close(self) -> None:
        """Refuse all waiting requests; leases that are still held do no harm."""
        self.is_closed = True
        while self._waiting:
            self.refuse_first(replaced())
