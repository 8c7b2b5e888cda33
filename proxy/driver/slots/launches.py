"""Servers on which a slot that starts to run empties all idle ones, as with llama-server's default flags.

What a slot holds lasts only until another one starts. So one request at a time is on its way to its start:
it has the turn from the choice of its slot until llama-server runs it, nobody else starts anything
meanwhile, and what other free slots hold is saved before. Running slots are left alone by llama-server, so
as many requests generate at once as there are slots. On other servers nothing of this happens.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from proxy.core.keeping.write_back import is_write_back_due
from proxy.core.model import CheckpointKind, RuleKind, SlotId
from proxy.core.slots import Empty, SlotTable
from proxy.driver.contact.attachment import Attachment
from proxy.driver.requests import Answer, Send
from proxy.driver.saving.slot_saves import SlotSaves
from proxy.driver.services import Services
from proxy.driver.slots.slot_work import SlotWork
from proxy.driver.slots.turns import Turn, Turns
from proxy.errors import UpstreamFault
from proxy.upstream.replies import SlotStatus

_FIRST_LOOK_SECONDS = 0.005
_LAST_LOOK_SECONDS = 0.1
_CLOSING_LOOK_SECONDS = 0.01


def note_emptied(table: SlotTable, statuses: list[SlotStatus]) -> bool:
    """Note the free slots that llama-server says are empty; return whether any was thought to be full.

    Of a slot that has never run a task it does not say what it holds.
    """
    emptied = [
        SlotId(status.id)
        for status in statuses
        if status.id_task >= 0 and status.n_prompt_tokens == 0
    ]
    full = [
        s for s in emptied if not table[s].is_leased and not isinstance(table[s].content, Empty)
    ]
    for slot_id in full:
        table.set_content(slot_id, Empty())
    return bool(full)


class Launches:
    """Orders the starts of requests in the slots of one llama-server process."""

    def __init__(
        self, services: Services, attachment: Attachment, work: SlotWork, saves: SlotSaves
    ) -> None:
        self._services = services
        self._attachment = attachment
        self._table = attachment.desk.table
        self._work = work
        self._saves = saves
        self._turns = Turns()

    @property
    def n_waiting(self) -> int:
        return self._turns.n_waiting

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Turn]:
        """Wait until nobody else is about to start, and see what is left in the slots."""
        turn = await self._turns.take() if self._attachment.clears_idle_slots else Turn(None)
        try:
            if not turn.has_ended:
                await self._look()
            yield turn
        finally:
            turn.end()

    def try_turn(self) -> Turn | None:
        """Return the turn if nobody has it."""
        return self._turns.try_take() if self._attachment.clears_idle_slots else Turn(None)

    @property
    def is_save_coming(self) -> bool:
        """Whether a save is due in a slot that ends by itself, which the next start would empty."""
        return bool(self._attachment.clears_idle_slots) and any(
            slot.is_closing and is_write_back_due(self._attachment.rule, slot.content)
            for slot in self._table
        )

    async def clear_others(self) -> None:
        """Save and empty what free slots hold: the start that is coming would empty them.

        They share their cells. A state that is restored beside others, which are emptied then, has its
        newest tokens in front: the sums of attention come in another order, and near ties fall otherwise.
        """
        while self.is_save_coming:  # noqa: ASYNC110 - such slots end by themselves, without an event
            await asyncio.sleep(_CLOSING_LOOK_SECONDS)
        for slot in self._table.free() if self._attachment.clears_idle_slots else ():
            if not isinstance(self._table[slot.id].content, Empty):
                await self._clear(slot.id)

    async def _clear(self, slot_id: SlotId) -> None:
        if (lease := self._attachment.desk.lease_free(slot_id)) is None:
            return
        with lease:
            save = self._saves.write_back(slot_id, CheckpointKind.CONVERSATION)
            await self._services.finish(lease, save)
            try:
                await self._services.finish(lease, self._work.erase(slot_id))
            except UpstreamFault as fault:
                self._services.faults.record("erase", fault)

    def in_turn(self, turn: Turn, send: Send) -> Send:
        """Return *send* such that it ends the turn once llama-server runs the request."""
        if turn.has_ended:
            return send

        async def send_in_turn(
            raw: bytes, on_start: Callable[[], None], n_found: int | None = None
        ) -> Answer:
            if self._attachment.rule.kind is not RuleKind.END_ONLY:
                # There a save begins with a cut, whose start would empty the slot that is prepared.
                await self.clear_others()
            watch = self._services.tasks.start(self._end_at_start(turn, await self._last_tasks()))

            def started() -> None:
                turn.end()
                on_start()

            try:
                return await send(raw, started, n_found)
            finally:
                watch.cancel()
                turn.end()

        return send_in_turn

    async def _end_at_start(self, turn: Turn, before: dict[SlotId, int] | None) -> None:
        """End the turn when some slot has begun another task; a whole answer's start is not told."""
        pause = _FIRST_LOOK_SECONDS
        while before is not None:
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_LOOK_SECONDS)
            after = await self._last_tasks()
            if after is None:
                return
            if any(task != before.get(slot_id) for slot_id, task in after.items()):
                return turn.end()

    async def _look(self) -> None:
        statuses = await self._statuses()
        if statuses is not None:
            note_emptied(self._table, statuses)

    async def _last_tasks(self) -> dict[SlotId, int] | None:
        statuses = await self._statuses()
        return None if statuses is None else {SlotId(s.id): s.id_task for s in statuses}

    async def _statuses(self) -> list[SlotStatus] | None:
        try:
            return await self._work.slot_states()
        except UpstreamFault as fault:
            self._services.faults.record("placement", fault)
            return None
