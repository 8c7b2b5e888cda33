"""Work while nobody waits: idle slots are saved, rates remembered, the disk timed, states verified, next
prompts begun.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial

import msgspec

from proxy.core.messages import Kind
from proxy.core.model import Checkpoint, Cuts, SlotId
from proxy.core.saving import is_write_back_due
from proxy.core.slots import Slot, SlotPhase, n_busy, not_to_save, shared_tokens
from proxy.errors import ServerAway, StateDamaged, StoreFault, TooManyRequests, UpstreamUnreachable
from proxy.log import get_logger
from proxy.serving.planning import plan_in, verify
from proxy.serving.process import RATES, SIZES, Process
from proxy.serving.queue import Choice, FreeElsewhere, Lease
from proxy.serving.request import Request
from proxy.serving.services import HISTORY, Services
from proxy.store.index import Newer
from proxy.store.store import N_NEWEST

_WRITE_SECONDS = 60.0
N_TIMED_PARTS = 4
LEAST_TIMED_BYTES = 4 << 20
"""Fewer bytes tell more about finding a place on the disk than about reading."""
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


async def remember(shared: Services, processes: Callable[[], list[Process]]) -> None:
    """Write what was learned to the index every minute, and once more when cancelled.

    The next start begins with the rates and sizes of each llama-server, and the live page with its history.
    """
    if shared.opened_store is None:
        return
    written = b""
    try:
        while True:
            await asyncio.sleep(_WRITE_SECONDS)
            for process in processes():
                await time_disk(process)
            learned = _learned(shared, processes())
            if (encoded := msgspec.msgpack.encode(learned)) != written:
                written = encoded
                await _write(shared, learned)
    finally:
        await _write(shared, _learned(shared, processes()))


def _learned(shared: Services, processes: Iterable[Process]) -> dict[str, object]:
    learned: dict[str, object] = {HISTORY: shared.journal.past}
    for process in processes:
        if process.can_cache and process.rates.is_measured:  # defaults replace nothing
            learned[process.name_here(RATES)] = process.rates
            learned[process.name_here(SIZES)] = list(process.sizes)
    return learned


async def _write(shared: Services, learned: dict[str, object]) -> None:
    with shared.faults.suppressed("remember", StoreFault):
        newer = Newer(values=learned)
        await shared.store.write(partial(shared.store.index.put, newer=newer))


async def time_disk(process: Process) -> None:
    """Learn what a cold restore takes from the first parts of a state that is not in the page cache.

    Else a default that is too slow would stay: while evaluating seems cheaper, nothing is restored.
    """
    if not process.can_cache or process.rates.cold_restore.bytes_per_second:
        return
    store = process.store
    with suppress(OSError, StoreFault):
        large = (c for c in store.newest(N_NEWEST) if c.size_bytes >= LEAST_TIMED_BYTES)
        unknown = (c for c in large if not store.is_warm(c))  # nothing to ask of the others
        are_cold = (c for c in unknown if not store.files.is_cached(c.file_name))
        cold = await asyncio.to_thread(next, are_cold, None)
        if cold is None:
            return
        parts, began = cold.content[:N_TIMED_PARTS], time.monotonic()
        read = partial(store.files.n_changed, keeps_pages=False)
        await asyncio.to_thread(read, cold.file_name, 0, parts)
        n_bytes = sum(part.n_bytes for part in parts)
        seconds = time.monotonic() - began + process.rates.warm_restore.seconds(n_bytes)
        process.rates = process.rates.after_restore(n_bytes, seconds, is_warm=False)


# Dirty slots are written back when they have been idle for a while, and at shutdown.
#
# llama-server stalls all slots during a save. So while any slot answers a request, saves of idle slots are
# put off, within limits.


async def save_idle_slots(current: Current, idle_seconds: float) -> None:
    """Save slots that have been idle for *idle_seconds*, until cancelled."""
    retried_at = time.monotonic()
    while True:
        if time.monotonic() - retried_at >= ROOM_RETRY_SECONDS and (process := current()):
            retried_at = time.monotonic()
            process.saves.take_up_postponed()
        await asyncio.sleep(min(_LOOK_SECONDS, idle_seconds / 2 or _LOOK_SECONDS))
        # Without a turn, a request is starting on a server that clears idle slots: it saves them itself.
        if (process := current()) and (turn := process.launches.try_turn()):
            _begin_saves(process, idle_seconds).add_done_callback(turn.end)


async def drain(processes: Iterable[Process], seconds: float) -> None:
    """Save every dirty slot of these processes now, in at most *seconds*."""
    await asyncio.gather(*(_drain(process, seconds) for process in processes))


async def settle(processes: Iterable[Process], seconds: float) -> None:
    """Wait until no slot of a process is in use, for at most *seconds*, then save its dirty slots.

    The saves too get at most *seconds*.
    """
    await asyncio.gather(*(_settle(process, seconds) for process in processes))


async def _drain(process: Process, seconds: float) -> None:
    """Save every dirty slot, and log how many were saved.

    Slots that must not be saved are erased: the next proxy would take their states for what their tokens
    say, and save them.
    """
    if not process.can_cache:
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds), process.launches.turn():
            process.saves.take_up_postponed()
            saving = asyncio.shield(_begin_saves(process, None))
            unwanted = [slot.id for slot in process.slots.free() if not slot.content.can_be_adopted]
            await asyncio.gather(saving, *map(process.empty, unwanted))
    if saves := process.saves.under_way.copy():
        await asyncio.wait(saves, timeout=seconds)
        n_saved = sum(task.done() and task.result() is not None for task in saves)
        get_logger("main").info("slots saved", n_saved=n_saved, n_dirty=len(saves))


async def _settle(process: Process, seconds: float) -> None:
    def when_idle() -> Choice | None:
        is_busy = any(slot.is_leased for slot in process.slots)
        return None if is_busy else Choice(tuple(slot.id for slot in process.slots))

    with suppress(TimeoutError, ServerAway, FreeElsewhere, TooManyRequests):
        async with asyncio.timeout(seconds):
            (await process.queue.lease(when_idle)).release()
    await _drain(process, seconds)


def _begin_saves(process: Process, idle_seconds: float | None) -> "asyncio.Future[list[None]]":
    """Begin to save the slots that are idle for *idle_seconds* and worth it; if None, all dirty slots.

    The caller has the turn. The future is done when llama-server has written all files.
    """
    writing = []
    for slot in process.slots:
        if is_due(process, slot, idle_seconds) and (lease := process.queue.try_lease(slot.id)):
            writing.append(process.saves.begin(slot.id))
            lease.hand_over(writing[-1])
    return asyncio.gather(*writing)


def is_due(process: Process, slot: Slot, idle_seconds: float | None) -> bool:
    """Return whether to save a slot if it was idle for so long; without *idle_seconds* if it is dirty."""
    if slot.is_leased or not is_write_back_due(process.rule, slot.content):
        return False
    if idle_seconds is None:
        return True
    if n_busy(process.slots):
        idle_seconds *= MAX_PUT_OFF
    is_idle = slot.used_at <= time.monotonic() - idle_seconds
    # Else the slot, and its next request, would wait until the disk has an earlier file.
    may_begin = not process.saves.uncommitted[slot.id].locked()
    return is_idle and may_begin and process.pays_to_save(slot.content)


# Stored states are verified.
#
# Every state is verified before its first restore. The background work also finds
# damaged states that no request needs.


async def verify_stored(shared: Services) -> None:
    """Verify states whose last verification is VERIFY_SECONDS ago, oldest first, until cancelled."""
    while shared.opened_store is not None:
        due_before = time.time() - VERIFY_SECONDS
        due = await asyncio.to_thread(shared.store.index.verified_before, due_before)
        for checkpoint_id in due:
            checkpoint = shared.store.get(checkpoint_id)
            if checkpoint is None or shared.store.is_quarantined(checkpoint):
                continue
            if checkpoint.verified_at >= due_before:
                continue  # since the last commit: the index does not know it yet
            try:
                await shared.store.verify_again(checkpoint, bytes_per_second=BYTES_PER_SECOND)
            except Exception as fault:
                if isinstance(fault, StateDamaged) or shared.store.get(checkpoint_id):
                    shared.faults.record("verify", fault)  # else it was evicted meanwhile
        await asyncio.sleep(min(_VERIFY_LOOK_SECONDS, VERIFY_SECONDS))


def note_damage(shared: Services, damaged: Checkpoint, stemming: list[Checkpoint]) -> None:
    """Log and count a damaged file, and taint the slots whose content may stem from it."""
    shared.metrics.damaged_checkpoints.inc()
    get_logger("store").warning(
        "state damaged: it is removed, and what may stem from it",
        file=damaged.file_name,
        n_tokens=damaged.n_tokens,
        stemming=[checkpoint.file_name for checkpoint in stemming],
    )
    for process in shared.served.values():
        process.slots.distrust([checkpoint.id for checkpoint in (damaged, *stemming)])


# What a conversation's next prompt begins with is evaluated while its user reads the answer.
#
# Many templates drop the reasoning of a turn once its user writes again. Whatever stands behind that
# reasoning, all results of tools, is then evaluated anew, though it has long been known. So behind an
# answer that calls no tool, the conversation is rendered as the next message will find it, and evaluated in
# its slot: only while nothing else runs, in pieces so short that no request waits long, and for no more
# seconds than the operator allows. What the slot held is saved before.


_IDLE_SECONDS = 1.0
"""Agents that go on by themselves do so sooner."""
_WORTH_SECONDS = 1.0
"""A shorter wait is not worth what the slot loses if its client goes on otherwise."""
_PIECE_SECONDS = 0.25
_MIN_PIECE_TOKENS = 128


class Ahead:
    """Goes on, while all is idle, with the conversation that was answered last."""

    def __init__(self, max_seconds: float) -> None:
        """*max_seconds* of evaluation are spent on an answer at most; without any, nothing is done."""
        self._max_seconds = max_seconds
        self._last: tuple[Process, Request] | None = None
        self._waiting: asyncio.Task[None] | None = None
        self._evaluating: asyncio.Task[None] | None = None
        """It goes on for as long as it stands here; then it ends with its piece."""
        self._is_visit = False

    async def give_way(self, session: str) -> None:
        """Stop for a client's request; one of the same session waits until the piece under way is done."""
        if self._waiting:
            self._waiting.cancel()  # it holds nothing
        task, self._evaluating = self._evaluating, None
        if task and self._last and self._last[1].session == session:
            await asyncio.wait([task])

    def note(self, process: Process, request: Request) -> None:
        """Begin soon behind the answer to a request; an answer aside leaves the one before its turn."""
        if not self._max_seconds:
            return
        if request.kind is not Kind.SIDE:
            answer = request.answer
            # After a tool call no message of the user follows.
            is_last = answer is not None and answer.status == 200 and not answer.calls
            # What is evaluated for a client that moves between machines is lost with its next move.
            is_visit = self._is_visit and request.kind is Kind.TOOL_TURN
            self._is_visit = is_visit or request.shared.startswith("fetched")
            is_plain = request.conversation is not None and not (request.wishes or request.warms)
            may_follow = is_last and is_plain and process.is_caching and not self._is_visit
            self._last = (process, request) if may_follow else None
        if self._last and not self._evaluating:
            if self._waiting:
                self._waiting.cancel()  # it is that of an earlier answer
            self._waiting = process.tasks.start(self._begin(*self._last))

    async def close(self) -> None:
        """Stop, and begin no more."""
        self._max_seconds = 0.0
        await self.give_way("")

    async def _begin(self, process: Process, request: Request) -> None:
        try:
            # Nobody has asked for it; when llama-server is away, the slot is gone.
            with process.faults.suppressed("unattended action"), suppress(UpstreamUnreachable):
                await asyncio.sleep(_IDLE_SECONDS)
                if settling := [task for _, task in process.settling]:
                    await asyncio.wait(settling)
                await self._evaluate(process, request)
        finally:
            if self._evaluating is asyncio.current_task():
                self._evaluating = None

    async def _evaluate(self, process: Process, request: Request) -> None:
        """Evaluate what comes next in the slot of a request, as far as that pays; raises CacheFault."""
        account, prompt = request.account, request.prompt
        chat, answer = request.chat, request.answer
        if not (account and prompt and chat and answer):
            return
        tokens = await process.reader.read_next(request, chat, answer.said())
        cuts = Cuts(prompt.cuts.header)
        next_prompt = replace(prompt, tokens=tokens, cuts=cuts, text="", conversation=b"")
        slot = process.slots[account.plan.slot_id]
        # Not in the queue: while a request waits there, no idle slot is saved.
        while (lease := _lease_if_idle(process, slot.id)) is None:  # noqa: ASYNC110
            await asyncio.sleep(_IDLE_SECONDS)
        with lease, process.launches.turns.join():
            if not tokens or shared_tokens(slot.content, prompt.tokens) < prompt.n_tokens:
                return
            start = plan_in(process, next_prompt, slot.id).start
            seconds = process.rates.evaluation_seconds(start.n_reused, len(tokens))
            is_stuck = process.saves.uncommitted[slot.id].locked()  # it would not be saved
            if is_stuck or start.erases or not _WORTH_SECONDS <= seconds <= self._max_seconds:
                return
            if process.is_short_of_cells(len(tokens), (s for s in process.slots if s is not slot)):
                return  # llama-server would empty other slots for it
            self._evaluating, self._waiting = self._waiting, None
            await process.launches.clear_others()
            if is_due(process, replace(slot, phase=SlotPhase.FREE), 0.0):
                await process.finish(lease, process.saves.write_back(slot.id))
            # A save may have taken the place of the state to restore, or cut the slot back.
            start = plan_in(process, next_prompt, slot.id).start
            seconds = process.rates.evaluation_seconds(start.n_reused, len(tokens))
            is_worth = not start.erases and seconds <= self._max_seconds
            if is_worth and start.restored and self._evaluating is asyncio.current_task():
                checkpoint = start.restored.checkpoint
                with process.store.keep(checkpoint):
                    await verify(process, checkpoint, start.n_reused)
                    await process.finish(lease, process.restore(slot.id, start.restored))
            begin = start.n_reused if is_worth else len(tokens)
            n_piece = max(_MIN_PIECE_TOKENS, int(_PIECE_SECONDS / seconds * (len(tokens) - begin)))
            began, n_evaluated = time.monotonic(), 0
            while begin < len(tokens) and self._evaluating is asyncio.current_task():
                begin = min(len(tokens), begin + n_piece)
                stop = process.stop(slot.id, next_prompt, begin, request.keys)
                n_evaluated += (await process.finish(lease, stop)).prompt_n
                # To make it again costs no more than this did, and nobody waits.
                process.slots.set_content(slot.id, not_to_save(process.slots[slot.id].content))
        if n_evaluated:
            process.report.went_ahead(request, n_evaluated, time.monotonic() - began)


def _lease_if_idle(process: Process, slot_id: SlotId) -> Lease | None:
    """Lease a slot if nothing runs or starts; raises UpstreamUnreachable if the process is gone."""
    process.require_alive()
    is_busy = process.launches.turns.is_taken or any(slot.is_leased for slot in process.slots)
    # A request whose prompt is read, or whose state is fetched, has no slot yet.
    is_busy |= any(r.server == process.server_name for r in process.journal.in_flight.values())
    return None if is_busy else process.queue.try_lease(slot_id)
