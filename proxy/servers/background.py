"""Background work: idle slots are saved, rates are remembered, stored states are verified."""

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

from proxy.core.rates import Rates
from proxy.core.saving import is_worth_saving, is_write_back_due
from proxy.core.slots import Known, Slot, SlotTable, n_busy
from proxy.errors import ServerAway, StoreFault, TooManyRequests
from proxy.log import get_logger
from proxy.serving.process import RATES, SIZES, Process
from proxy.serving.queue import Choice, FreeElsewhere
from proxy.serving.shared import Shared

_WRITE_SECONDS = 60.0
_LOOK_SECONDS = 0.5
MAX_PUT_OFF = 6.0
"""While other slots answer requests, a slot must be idle so many times longer before it is saved."""
ROOM_RETRY_SECONDS = 30.0
"""How often a save for which the store had no room is tried again."""
BYTES_PER_SECOND = 32 << 20
"""The speed of verification, slow enough for requests and slow disks; 20 GiB take eleven minutes."""
_VERIFY_LOOK_SECONDS = 60.0
VERIFY_SECONDS = 7 * 86400.0
"""How long after its last verification a state is verified again: a failing disk shows early."""

Current = Callable[[], Process | None]
"""Returns the process that serves now."""


async def remember_rates(current: Current) -> None:
    """Write the learned rates and sizes to the index every minute, and once more when cancelled.

    The next start begins with them.
    """
    written = Rates()
    try:
        while True:
            await asyncio.sleep(_WRITE_SECONDS)
            written = await _remember(current(), written)
    finally:
        await _remember(current(), written)


async def _remember(process: Process | None, written: Rates) -> Rates:
    """Write the rates and sizes of a process unless the rates are *written*; return the written rates."""
    if process is None or not process.can_cache or process.rates in (written, Rates()):
        return written
    rates = process.rates
    try:
        await process.remember(RATES, rates)
        await process.remember(SIZES, list(process.sizes))
    except StoreFault as fault:
        process.faults.record("remember", fault)
    return rates


# Dirty slots are written back when they have been idle for a while, and at shutdown.
#
# llama-server stalls all slots during a save. So while any slot answers a request, saves of idle slots are
# put off, within limits.


async def save_idle_slots(current: Current, idle_seconds: float) -> None:
    """Save slots that have been idle for *idle_seconds*, until cancelled."""
    retried_at = time.monotonic()
    while True:
        process = current()
        if process and time.monotonic() - retried_at >= ROOM_RETRY_SECONDS:
            retried_at = time.monotonic()
            process.saves.take_up_postponed()
        await asyncio.sleep(min(_LOOK_SECONDS, idle_seconds / 2 or _LOOK_SECONDS))
        if process := current():
            _begin_saves(process, idle_seconds)


async def drain(processes: Iterable[Process], seconds: float) -> None:
    """Save every dirty slot of these processes now, in at most *seconds*."""
    await asyncio.gather(*(_drain(process, seconds) for process in processes))


async def settle(processes: Iterable[Process], seconds: float) -> None:
    """Wait until no slot of a process is in use, for at most *seconds*, then save its dirty slots.

    The saves too get at most *seconds*.
    """
    await asyncio.gather(*(_settle(process, seconds) for process in processes))


async def _drain(process: Process, seconds: float) -> None:
    """Save every dirty slot, and log how many were saved."""
    process.saves.take_up_postponed()
    _begin_saves(process, None)
    if saves := process.saves.under_way.copy():
        await asyncio.wait(saves, timeout=seconds)
        n_saved = sum(task.done() and task.result() is not None for task in saves)
        get_logger("main").info("slots saved", n_saved=n_saved, n_dirty=len(saves))


async def _settle(process: Process, seconds: float) -> None:
    queue = process.queue
    with suppress(TimeoutError, ServerAway, FreeElsewhere, TooManyRequests):
        async with asyncio.timeout(seconds):
            (await queue.lease(partial(_all_slots, queue.table))).release()
    await _drain(process, seconds)


def _begin_saves(process: Process, idle_seconds: float | None) -> None:
    """Begin to save the slots that are idle for *idle_seconds* and worth it; if None, all dirty slots."""
    due = [s for s in process.slots if is_due(process, s, idle_seconds)]
    # Without a turn, a request is starting on a server that clears idle slots: it saves them itself.
    if not due or (turn := process.launches.try_turn()) is None:
        return
    writing = []
    for slot in due:
        if lease := process.queue.try_lease(slot.id):
            writing.append(process.saves.begin(slot.id))
            lease.hand_over(writing[-1])
    done = asyncio.gather(*writing)
    done.add_done_callback(lambda _: turn.end())


def _all_slots(table: SlotTable) -> Choice[None] | None:
    is_free = not any(slot.is_leased for slot in table)
    return Choice(tuple(slot.id for slot in table), None) if is_free else None


def is_due(process: Process, slot: Slot, idle_seconds: float | None) -> bool:
    """Return whether to save a slot if it was idle for so long; without *idle_seconds* if it is dirty."""
    content = slot.content
    if slot.is_leased or not is_write_back_due(process.rule, content):
        return False
    if idle_seconds is None:
        return True
    if n_stalled := n_busy(process.slots):
        idle_seconds *= MAX_PUT_OFF
    if slot.used_at > time.monotonic() - idle_seconds:
        return False
    if not isinstance(content, Known):
        return True
    size_bytes = process.state_bytes(content)
    return is_worth_saving(content, content.n_unsaved, size_bytes, process.rates, max(1, n_stalled))


# Stored states are verified.
#
# Every state is verified before its first restore. The background work also finds
# damaged states that no request needs.


async def verify_stored(shared: Shared) -> None:
    """Verify states whose last verification is VERIFY_SECONDS ago, oldest first, until cancelled."""
    while shared.opened_store is not None:
        due_before = time.time() - VERIFY_SECONDS
        due = await asyncio.to_thread(shared.store.index.verified_before, due_before)
        for checkpoint_id in due:
            if (checkpoint := shared.store.get(checkpoint_id)) is None:
                continue
            try:
                await shared.store.verify(checkpoint, bytes_per_second=BYTES_PER_SECOND)
            except Exception as fault:
                shared.faults.record("verify", fault)
        await asyncio.sleep(min(_VERIFY_LOOK_SECONDS, VERIFY_SECONDS))
