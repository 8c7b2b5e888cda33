"""Saving what a leased slot holds: cut back, save, check, thin, commit.

Owns: what the slot table says afterwards, and which older checkpoints go. Must only be used by whoever
holds the slot's lease. Every method leaves the table true, whatever fails.
"""

import asyncio
from dataclasses import replace

from proxy.core.degradation import DegradationKind
from proxy.core.keeping.eviction import Removal
from proxy.core.keeping.family import family_of
from proxy.core.keeping.supersession import superseded
from proxy.core.keeping.write_back import at_savable_point, is_write_back_due
from proxy.core.model import Candidate, Checkpoint, CheckpointKind, SlotId
from proxy.core.prefix import FIRST_BLOCK_TOKENS, Namespace
from proxy.core.slots import TAINTED, Content, Empty, Known, Unknown, restored_tokens
from proxy.driver.contact.attachment import Attachment
from proxy.driver.saving.room import Room
from proxy.driver.saving.saver import SavedSlot
from proxy.driver.saving.thinning import Thinned, Thinner
from proxy.driver.services import Services
from proxy.errors import CacheFault, NoRoom, SaveRejected
from proxy.upstream.state_file import StateFile


class SlotSaves:
    """Saves slots."""

    def __init__(self, services: Services, attachment: Attachment, room: Room) -> None:
        self._services = services
        self._upstream = services.upstream
        self._attachment = attachment
        self._table = attachment.desk.table
        self._metrics = services.metrics
        self._room = room
        self._thinner = Thinner(services, attachment)
        self._postponed: dict[SlotId, tuple[Content, Content]] = {}

    async def write_back(
        self, slot_id: SlotId, kind: CheckpointKind, *, is_just_predicted: bool = False
    ) -> Checkpoint | None:
        """Save what a slot holds, cut back to where that helps; None if it is not saved.

        Never raises a CacheFault: a save that fails costs nobody else anything. *is_just_predicted* says
        that the request which put the tokens there still has the slot, so that other tokens in the file
        mean that its prompt was tokenized differently.
        """
        if not is_write_back_due(self._attachment.rule, self._table[slot_id].content):
            return None
        try:
            with self._attachment.watching(DegradationKind.SAVES_FAIL, CacheFault):
                async with self._room.for_slot(self._table[slot_id].content) as name:
                    await self._cut_back(slot_id)
                    return await self._save(slot_id, kind, name, is_just_predicted)
        except NoRoom:
            before = self._table[slot_id].content
            self._give_up(slot_id)
            self._postponed[slot_id] = before, self._table[slot_id].content
            return None
        except Exception as error:
            # Nobody who needs the slot may fail because it could not be saved, foreseen or not.
            self._metrics.saves.labels("failed").inc()
            if isinstance(error, CacheFault):
                self._services.faults.count("save")  # /health tells of it
            else:
                self._services.faults.record("save", error)
            self._give_up(slot_id)
            return None

    def take_up_postponed(self) -> None:
        """Let saves that there was no room for be due again, where the slot still holds the same."""
        for slot_id, (before, given_up) in self._postponed.items():
            if self._table[slot_id].content is given_up and not self._table[slot_id].is_leased:
                self._table.set_content(slot_id, before)
        self._postponed.clear()

    def _give_up(self, slot_id: SlotId) -> None:
        """Do not try to save the same content again; the slot's next request makes it worth a try."""
        match self._table[slot_id].content:
            case Known() as content:
                self._table.set_content(slot_id, replace(content, n_saved=content.n_tokens))
            case Unknown() as content:
                self._table.set_content(slot_id, replace(content, can_be_adopted=False))

    async def _cut_back(self, slot_id: SlotId) -> None:
        content = self._table[slot_id].content
        if not isinstance(content, Known):
            return
        target = at_savable_point(self._attachment.rule, content)
        if target is None or target.n_tokens == content.n_tokens:
            return
        self._attachment.require_same_process()
        unknown = Unknown(content.namespace, n_restored=content.n_restored)
        self._table.set_content(slot_id, unknown)
        timings = await self._upstream.evaluate(slot_id, target.tokens)
        self._metrics.prompt_tokens.labels("evaluated").inc(timings.prompt_n)
        self._metrics.evaluation_seconds.inc(timings.prompt_ms / 1000)
        self._table.set_content(slot_id, target)

    async def _save(
        self, slot_id: SlotId, kind: CheckpointKind, name: str, is_just_predicted: bool
    ) -> Checkpoint | None:
        """Save a slot as it stands, check the file and commit it; raises CacheFault."""
        content = self._table[slot_id].content
        self._attachment.require_same_process()
        saved = await self._room.save(slot_id, name)
        if not saved.state.tokens and self._attachment.clears_idle_slots:
            # Its request ended just when another one started.
            self._table.set_content(slot_id, Empty())
            return None
        self._require_expected(slot_id, content, saved.state, is_just_predicted)
        self._attachment.require_same_process()
        self._metrics.save_seconds.observe(saved.seconds)
        return await self._commit(slot_id, content, kind, saved)

    def _require_expected(
        self, slot_id: SlotId, content: Content, state: StateFile, is_just_predicted: bool
    ) -> None:
        """Hold a saved file against what the slot was believed to hold; the file is the truth."""
        if state.n_media or -1 in state.tokens:
            self._table.set_content(slot_id, TAINTED)
            raise SaveRejected("the slot holds media")
        if not isinstance(content, Known):
            return
        if not state.tokens:
            self._table.set_content(slot_id, Empty())
            self._metrics.drift.inc()
            if self._attachment.clears_idle_slots is None:
                self._attachment.note_clearing(clears=True)
            raise SaveRejected("the slot was empty: something has cleared it since")
        if state.tokens[: len(content.tokens)] == content.tokens:
            return
        self._table.set_content(slot_id, TAINTED)
        # Somebody else's request would hardly have left as many.
        if is_just_predicted or len(state.tokens) == content.n_tokens:
            self._metrics.tokenization_disagreements.inc()
            self._attachment.disable_shape(content.shape)
            raise SaveRejected("the file's tokens are not those that were predicted")
        self._metrics.drift.inc()
        raise SaveRejected("the slot was used by somebody else: all traffic must go through here")

    async def _commit(
        self, slot_id: SlotId, content: Content, kind: CheckpointKind, saved: SavedSlot
    ) -> Checkpoint | None:
        state, namespace = saved.state, self._namespace_of(content)
        if namespace is None or not state.tokens:
            self._table.set_content(slot_id, Empty() if not state.tokens else content)
            return None
        store = self._services.store
        relatives = await asyncio.to_thread(lambda: list(store.find(namespace, state.tokens)))
        if len(state.tokens) < FIRST_BLOCK_TOKENS or _holds(relatives, len(state.tokens)):
            self._note_saved(slot_id, content, namespace, state, None)
            return None
        thinned = Thinned(saved)
        if isinstance(content, Known):
            thinned = await self._thinner.thin(saved, content, kind, relatives)
        new = thinned.saved.new_state(namespace, kind, content)
        family = family_of(namespace, new.tokens, kind, new.cuts, relatives)
        checkpoint = await store.commit(replace(new, family=family))
        self._note_saved(slot_id, content, namespace, state, checkpoint)
        self._metrics.saves.labels("done").inc()
        self._metrics.saved_bytes.inc(checkpoint.size_bytes)
        if thinned.is_whole:
            await self._tidy(checkpoint, relatives)
        return checkpoint

    def _note_saved(
        self,
        slot_id: SlotId,
        content: Content,
        namespace: Namespace,
        state: StateFile,
        checkpoint: Checkpoint | None,
    ) -> None:
        """Note what the slot holds, as its file told; that may have fewer points than the slot."""
        old = content
        if not isinstance(old, Known):
            old = Known(state.tokens, namespace, n_restored=restored_tokens(content))
        now_held = replace(
            old,
            tokens=state.tokens,
            n_tail=0,
            restore_points=state.restore_points or old.restore_points,
            n_saved=len(state.tokens),
            saved_points=checkpoint.restore_points if checkpoint else old.saved_points,
            n_points_at_most=len(state.restore_points) or old.n_points_at_most,
        )
        self._table.set_content(slot_id, now_held)

    def _namespace_of(self, content: Content) -> Namespace | None:
        if not self._attachment.can_cache:
            return None
        if isinstance(content, Known):
            return content.namespace
        if isinstance(content, Unknown) and content.can_be_adopted:
            return content.tenant
        return None

    async def _tidy(self, newer: Checkpoint, relatives: list[Candidate]) -> None:
        for checkpoint in superseded(self._attachment.rule, newer, relatives):
            await self._services.store.remove(checkpoint, Removal.SUPERSEDED)


def _holds(relatives: list[Candidate], n_tokens: int) -> bool:
    """Return whether one of the checkpoints has exactly the tokens that they were found for."""
    return any(c.n_common == c.checkpoint.n_tokens == n_tokens for c in relatives)
