"""What is done in the background: idle slots are saved, rates are remembered, states are verified."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from proxy.core.model import Checkpoint, CheckpointKind
from proxy.core.rates import Rates
from proxy.core.saving import is_worth_saving, is_write_back_due
from proxy.core.slots import Known, Slot, SlotTable
from proxy.errors import StoreFault, TooManyRequests
from proxy.log import get_logger
from proxy.serving.desk import Choice, DeskClosed, FreeElsewhere
from proxy.serving.process import RATES, Process, Services, Shared
from proxy.tasks import Tasks

_WRITE_SECONDS = 60.0
_LOOK_SECONDS = 0.5
MAX_PUT_OFF = 6.0
"""Beside others' answers, a slot is saved once it has been idle for so many times as long as otherwise."""
ROOM_RETRY_SECONDS = 30.0
"""How often what there was no room for is tried again."""
BYTES_PER_SECOND = 32 << 20
"""The speed of verification: neither a request nor a slow disk feels it; 20 GiB take eleven minutes."""
_VERIFY_LOOK_SECONDS = 60.0

Current = Callable[[], Process | None]
"""Returns the process that serves now."""


async def all_of(*works: Coroutine[Any, Any, None]) -> None:
    """Run everything at once; when one of them fails, or this is cancelled, all of them end."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def remember_rates(services: Services, current: Current) -> None:
    """Write the learned rates to the index every minute, and once more when cancelled.

    The next start begins with them.
    """
    written: Rates | None = None

    async def write() -> None:
        nonlocal written
        process, store = current(), services.opened_store
        if process is None or store is None or not process.can_cache:
            return
        rates = process.rates
        if rates is written or rates == Rates():
            return
        try:
            await process.remember(RATES, rates)
            written = rates
        except StoreFault as fault:
            services.faults.record("remember", fault)

    try:
        while True:
            await asyncio.sleep(_WRITE_SECONDS)
            await write()
    finally:
        await write()


# The write-back of dirty slots: when they have been idle for a while, and at shutdown.
#
# llama-server stalls all slots during a save. So while any of them answers a request, an idle slot is
# left alone until its save has been put off for long enough.


async def save_idle_slots(tasks: Tasks, current: Current, idle_seconds: float) -> None:
    """Save slots that have been idle for so long, until cancelled."""
    retried_at = time.monotonic()
    while True:
        process = current()
        if process and time.monotonic() - retried_at >= ROOM_RETRY_SECONDS:
            retried_at = time.monotonic()
            process.saves.take_up_postponed()
        await asyncio.sleep(min(_LOOK_SECONDS, idle_seconds / 2 or _LOOK_SECONDS))
        if process := current():
            _begin_saves(tasks, process, idle_seconds)


async def drain(tasks: Tasks, process: Process, seconds: float) -> None:
    """Save every dirty slot now, in at most *seconds*, and say what could not be saved."""
    process.saves.take_up_postponed()
    if saves := _begin_saves(tasks, process, None):
        await asyncio.wait(saves, timeout=seconds)
        n_saved = sum(task.done() and task.result() is not None for task in saves)
        get_logger("main").info("slots saved", n_saved=n_saved, n_dirty=len(saves))


async def settle(tasks: Tasks, process: Process, seconds: float) -> None:
    """Save every dirty slot once nothing runs any more, in at most *seconds*."""
    desk = process.desk
    with suppress(TimeoutError, DeskClosed, FreeElsewhere, TooManyRequests):
        async with asyncio.timeout(seconds):
            (await desk.lease(partial(_all_slots, desk.table))).release()
    await drain(tasks, process, seconds)


def _begin_saves(
    tasks: Tasks, process: Process, idle_seconds: float | None
) -> list["asyncio.Task[object]"]:
    """Save what has been idle for so long and is worth it; without *idle_seconds* all that is dirty."""
    due = [s for s in process.slots if _is_due(process, s, idle_seconds)]
    # Where a start empties idle slots, those are saved by whoever is about to start.
    if not due or (turn := process.launches.try_turn()) is None:
        return []
    saves: list[asyncio.Task[object]] = []
    for slot in due:
        if lease := process.desk.try_lease(slot.id):
            work = process.saves.write_back(slot.id, CheckpointKind.CONVERSATION)
            saves.append(tasks.start(work))
            lease.hand_over(saves[-1])
    done = asyncio.gather(*saves, return_exceptions=True)
    done.add_done_callback(lambda _: turn.end())
    return saves


def _all_slots(table: SlotTable) -> Choice[None] | None:
    is_free = not any(slot.is_leased for slot in table)
    return Choice(tuple(slot.id for slot in table), None) if is_free else None


def _is_due(process: Process, slot: Slot, idle_seconds: float | None) -> bool:
    content = slot.content
    if slot.is_leased or not is_write_back_due(process.rule, content):
        return False
    if idle_seconds is None:
        return True
    if any(other.is_leased and not other.is_closing for other in process.slots):
        idle_seconds *= MAX_PUT_OFF
    if slot.used_at > time.monotonic() - idle_seconds:
        return False
    if not isinstance(content, Known):
        return True
    size_bytes = process.state_bytes(content)
    return is_worth_saving(content, content.n_unsaved, size_bytes, process.rates)


# The verification of stored states.
#
# A state is verified before its first restore in any case; here those are found that nobody asks for,
# before their checksums are all that is left of them.


async def verify_stored(shared: Shared, interval_seconds: float) -> None:
    """Verify states that were not verified for *interval_seconds*, the oldest first, until cancelled.

    0 leaves that to their restores.
    """
    while shared.opened_store is not None and interval_seconds:
        due_before = time.time() - interval_seconds
        due = (c for c in shared.opened_store if c.verified_at < due_before)
        for checkpoint in sorted(due, key=lambda c: c.verified_at):
            try:
                await shared.store.verify(checkpoint, bytes_per_second=BYTES_PER_SECOND)
            except Exception as fault:
                shared.faults.record("verify", fault)
        await asyncio.sleep(min(_VERIFY_LOOK_SECONDS, interval_seconds))


def note_damage(
    shared: Shared, processes: Iterable[Process], damaged: Checkpoint, stemming: list[Checkpoint]
) -> None:
    """Tell of a damaged file, and taint the slots that hold what may stem from it."""
    shared.metrics.damaged_checkpoints.inc()
    get_logger("store").warning(
        "state damaged: it is removed, and what may stem from it",
        file=damaged.file_name,
        n_tokens=damaged.n_tokens,
        stemming=[checkpoint.file_name for checkpoint in stemming],
    )
    for process in processes:
        ids = [checkpoint.id for checkpoint in (damaged, *stemming)]
        process.slots.distrust(ids)
