"""Slots become checkpoints: cut back, saved, checked, thinned, committed.

Owns: the slot's entry in the slot table after a save, and the choice of older checkpoints to remove. Only
the holder of the slot's lease may save it. Every method leaves the table true, whatever fails.
"""

import asyncio
from contextlib import ExitStack
from dataclasses import replace

from proxy.core import slots
from proxy.core.conditions import DegradationKind
from proxy.core.eviction import Removal, family_of, superseded
from proxy.core.model import Checkpoint, CheckpointKind, SlotId, after_save, title_of
from proxy.core.saving import at_savable_point, is_write_back_due
from proxy.core.slots import TAINTED, Content, Empty, Known, Unknown
from proxy.core.tokens import FIRST_BLOCK_TOKENS
from proxy.errors import CacheFault, NoRoom, UpstreamLost
from proxy.serving.planning import disk_seconds, displaced_state
from proxy.serving.process import Process
from proxy.serving.saver import SavedSlot
from proxy.tasks import Turns


class SlotSaves:
    """Saves slots."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._table = process.slots
        self._metrics = process.metrics
        self._postponed: dict[SlotId, tuple[Content, Content]] = {}
        """What slots held when there was no room to save it, and the same, marked as given up."""
        self.uncommitted = [asyncio.Semaphore(2) for _ in process.slots]
        """Two files of a slot may wait for their commit: on a slow disk more would pile up."""
        self.turns = [Turns() for _ in process.slots]
        """Taken from the end of llama-server's write until the file is committed."""
        self.under_way: set[asyncio.Task[Checkpoint | None]] = set()

    def begin(
        self, slot_id: SlotId, kind: CheckpointKind = CheckpointKind.CONVERSATION, **how: bool
    ) -> "asyncio.Future[None]":
        """Begin to save a slot as `write_back` does; *how* are its other arguments.

        The future is done once another request may have the slot: when llama-server has written the file
        or, if that request uses what the slot holds (*is_used*), when the file was checked too.
        """
        free: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        saving = self._process.tasks.start(self.write_back(slot_id, kind, free, **how))
        self.under_way.add(saving)
        saving.add_done_callback(lambda _: _set_done(free))
        saving.add_done_callback(self.under_way.discard)
        return free

    async def write_back(
        self,
        slot_id: SlotId,
        kind: CheckpointKind = CheckpointKind.CONVERSATION,
        free: "asyncio.Future[None] | None" = None,
        *,
        is_used: bool = False,
    ) -> Checkpoint | None:
        """Save a slot's content, cut back first where that helps; None if it is not saved.

        Other requests can wait for the state, but not long for the disk. A request that needs the slot does
        not fail with the save. *free* and *is_used* are those of `begin`. A slot's files are committed in
        the order of its saves.
        """
        async with self.uncommitted[slot_id]:
            process, saver = self._process, self._process.saver
            # `before` is what is saved; the slot table has `held`, unless another request has the slot.
            held = before = self._table[slot_id].content
            if process.queue.is_closed or not is_write_back_due(process.rule, before):
                return None
            try:
                state, announced = displaced_state(process, slot_id), ExitStack()
                announced.enter_context(process.queue.announced(state))
                seconds = disk_seconds(process, state.n_tokens if state else 0)
                asyncio.get_running_loop().call_later(seconds, announced.close)
                with announced, process.watching(DegradationKind.SAVES_FAIL, Exception):
                    async with saver.room_for(before) as name:
                        process.require_alive()
                        before = held = await self._cut_back(slot_id)
                        written = await saver.write(slot_id, name)
                        process.require_alive()
                        held = self._count_as_saved(slot_id)
                        if not is_used:
                            _set_done(free)
                        with self.turns[slot_id].join() as turn:
                            saved = await saver.check(name, *written)
                            if why := saver.learn_from_file(before, saved.state):
                                tainted = replace(TAINTED, origin=before.origin)
                                is_held = bool(saved.state.tokens)
                                self._table.refine(slot_id, held, tainted if is_held else Empty())
                                raise CacheFault(why)
                            _set_done(free)
                            await turn.has_come.wait()
                            return await self.commit(slot_id, kind, saved, before, held)
            except Exception as error:
                held = self._give_up(slot_id, held, before)
                if not isinstance(error, NoRoom):
                    await self._note_failure(slot_id, error)
                elif self._table[slot_id].content is held:
                    self._postponed[slot_id] = before, held
                return None

    async def _cut_back(self, slot_id: SlotId) -> Content:
        """Cut a slot back to what is useful in a file; return what it holds then."""
        content = self._table[slot_id].content
        if not isinstance(content, Known):
            return content
        target = at_savable_point(self._process.rule, content)
        if target.n_tokens in (0, content.n_tokens):
            return content
        self._table.set_content(slot_id, Unknown(content.tenant, origin=content.origin))
        timings = await self._process.upstream.evaluate(slot_id, target.tokens)
        self._metrics.prompt_tokens.labels("evaluated").inc(timings.prompt_n)
        self._metrics.evaluation_seconds.inc(timings.prompt_ms / 1000)
        self._table.set_content(slot_id, target)
        return target

    def _count_as_saved(self, slot_id: SlotId) -> Content:
        """Count a slot's content as saved while its file is checked and committed."""
        content = slots.not_to_save(self._table[slot_id].content)
        if isinstance(content, Known):
            content = replace(content, n_saved=content.n_tokens)
        self._table.set_content(slot_id, content)
        return content

    async def commit(
        self,
        slot_id: SlotId,
        kind: CheckpointKind,
        saved: SavedSlot,
        content: Content,
        held: Content,
    ) -> Checkpoint | None:
        """Commit the checked file of a slot that held *content*; None if nothing new is in it.

        If the slot table has another content than *held*, it learns at most which restore points are saved.
        """
        process, state, namespace = self._process, saved.state, content.tenant
        if not state.tokens:
            self._table.refine(slot_id, held, Empty())
            return None
        assert namespace  # what may be any tenant's is not saved
        self._metrics.save_seconds.observe(saved.seconds)
        # In another thread: hundreds may share a header.
        relatives = await asyncio.to_thread(list, process.store.find(namespace, state.tokens))
        n_tokens = len(state.tokens)
        is_stored = any(c.n_common == c.checkpoint.n_tokens == n_tokens for c in relatives)
        in_file = slots.as_saved(content, namespace, state.tokens, state.restore_points)
        if n_tokens < FIRST_BLOCK_TOKENS or is_stored:
            self._table.refine(slot_id, held, in_file)
            return None
        has_wanted, ancestors = True, set(content.origin.ancestors)
        if isinstance(content, Known):
            saved, has_wanted = await process.saver.thin(saved, content, kind, relatives, ancestors)
        new = saved.checkpoint(namespace, kind, content)
        family = family_of(new, state.tokens, relatives)
        title = title_of(new.title, family, relatives)
        new = replace(new, family=family, ancestors=tuple(ancestors), title=title)
        checkpoint = await process.store.commit(new, state.tokens, saved.stamp)
        if self._table[slot_id].content is held:
            self._table[slot_id].note_save(checkpoint)
            self._table.refine(slot_id, held, replace(in_file, saved_points=()))
        if not self.turns[slot_id].n_waiting:  # else a newer save tells what the slot holds
            now, points = self._table[slot_id].content, checkpoint.restore_points
            self._table.refine(slot_id, now, slots.also_saved(now, namespace, state.tokens, points))
        has_every_position, window = state.has_every_position, state.window_tokens
        rule = after_save(process.rule, has_every_position=has_every_position, window_tokens=window)
        if rule != process.rule:
            await process.learn_rule(rule)
        self._metrics.saves.labels("done").inc()
        self._metrics.saved_bytes.inc(checkpoint.size_bytes)
        for older in superseded(process.rule, checkpoint, relatives) if has_wanted else ():
            await process.store.remove(older, Removal.SUPERSEDED)
        return checkpoint

    def _give_up(self, slot_id: SlotId, held: Content, before: Content) -> Content:
        """Do not try to save the same content again; the slot's next request makes it worth a try."""
        if held is before:  # else it counts as saved, and another request may have the slot
            content = slots.not_to_save(self._table[slot_id].content)
            self._table.set_content(slot_id, content)
        else:
            content = slots.not_to_save(before)
            self._table.refine(slot_id, held, content)
        return content

    async def _note_failure(self, slot_id: SlotId, error: Exception) -> None:
        if isinstance(error, UpstreamLost):
            await self._process.quarantine_suspects(slot_id, is_saving=True)
        self._metrics.saves.labels("failed").inc()
        if isinstance(error, CacheFault):
            self._process.faults.count("save")  # /health tells of it
        else:
            self._process.faults.record("save", error)

    def take_up_postponed(self) -> None:
        """Make postponed saves due again where the slot still holds the same."""
        for slot_id, (before, given_up) in self._postponed.items():
            self._table.refine(slot_id, given_up, before)
        self._postponed.clear()


def _set_done(future: "asyncio.Future[None] | None") -> None:
    if future is not None and not future.done():
        future.set_result(None)
