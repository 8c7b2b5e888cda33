"""Slots become checkpoints: cut back, saved, checked, thinned, committed.

Owns: the slot's entry in the slot table after a save, and the choice of older checkpoints to remove. Only
the holder of the slot's lease may save it. Every method leaves the table true, whatever fails.
"""

import asyncio
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import replace

from proxy.core.conditions import DegradationKind
from proxy.core.eviction import Removal, family_of, superseded, title_of
from proxy.core.model import (
    Candidate,
    Checkpoint,
    CheckpointId,
    CheckpointKind,
    RuleKind,
    SlotId,
    after_save,
)
from proxy.core.saving import (
    at_savable_point,
    edit_cuts,
    is_write_back_due,
    likely_cuts,
    points_of_others,
    select_points,
)
from proxy.core.slots import TAINTED, Content, Empty, Known, Unknown, believed_after_save
from proxy.core.tokens import FIRST_BLOCK_TOKENS, Namespace
from proxy.errors import (
    CacheFault,
    NoRoom,
    SaveRejected,
    StateFileMalformed,
    StoreFault,
    UpstreamLost,
)
from proxy.llama.state_edits import Source, select_context_checkpoints
from proxy.llama.state_file import StateFile, read_state_file
from proxy.serving.planning import displaced_state
from proxy.serving.process import Process
from proxy.serving.saver import SavedSlot
from proxy.store.files import StateFiles


class SlotSaves:
    """Saves slots."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._table = process.slots
        self._metrics = process.metrics
        self._postponed: dict[SlotId, tuple[Content, Content]] = {}
        self.under_way: set[asyncio.Task[Checkpoint | None]] = set()

    def begin(
        self,
        slot_id: SlotId,
        kind: CheckpointKind = CheckpointKind.CONVERSATION,
        *,
        is_used: bool = False,
        is_just_predicted: bool = False,
    ) -> "asyncio.Future[None]":
        """Begin to save a slot as `write_back` does; other requests can wait for the state.

        The future is done as soon as another request may have the slot: when llama-server has written the
        file, or, if that request uses what the slot holds (*is_used*), when the file was checked too. The
        file is committed beside that request.
        """
        free = asyncio.get_running_loop().create_future()

        def note_free(_: object = None) -> None:
            if not free.done():
                free.set_result(None)

        async def save() -> Checkpoint | None:
            with self._process.queue.announced(displaced_state(self._process, slot_id)):
                return await self.write_back(
                    slot_id,
                    kind,
                    is_used=is_used,
                    is_just_predicted=is_just_predicted,
                    on_free=note_free,
                )

        saving = self._process.tasks.start(save())
        self.under_way.add(saving)
        saving.add_done_callback(note_free)
        saving.add_done_callback(self.under_way.discard)
        return free

    async def write_back(
        self,
        slot_id: SlotId,
        kind: CheckpointKind = CheckpointKind.CONVERSATION,
        *,
        is_used: bool = True,
        is_just_predicted: bool = False,
        on_free: Callable[[], None] = lambda: None,
    ) -> Checkpoint | None:
        """Save a slot's content, cut back first where that helps; None if it is not saved.

        Never raises a CacheFault: a failed save hurts no request. *is_just_predicted* says that the request
        which put the tokens there still has the slot. Other tokens in the file then mean that its prompt
        was tokenized differently. From *on_free* on another request may have the slot; then the slot's
        entry in the slot table is left alone.
        """
        is_free = False

        def note_free() -> None:
            nonlocal is_free
            is_free = True
            on_free()

        if not is_write_back_due(self._process.rule, self._table[slot_id].content):
            return None
        try:
            with self._process.watching(DegradationKind.SAVES_FAIL, CacheFault):
                async with self._process.room.for_slot(self._table[slot_id].content) as name:
                    await self._cut_back(slot_id)
                    on_written = None if is_used else note_free
                    done = await self._save(slot_id, name, is_just_predicted, on_written)
                    note_free()
                    return await self.commit(slot_id, kind, *done) if done else None
        except NoRoom:
            if not is_free:
                before = self._table[slot_id].content
                self._postponed[slot_id] = before, self._give_up(slot_id)
            return None
        except Exception as error:
            # The request that needs the slot must not fail because the slot could not be saved.
            if isinstance(error, UpstreamLost):
                await self._process.quarantine_suspects(slot_id, is_saving=True)
            self._metrics.saves.labels("failed").inc()
            if isinstance(error, CacheFault):
                self._process.faults.count("save")  # /health tells of it
            else:
                self._process.faults.record("save", error)
            if not is_free:
                self._give_up(slot_id)
            return None

    def take_up_postponed(self) -> None:
        """Make saves due again that there was no room for, where the slot still holds the same."""
        for slot_id, (before, given_up) in self._postponed.items():
            if self._table[slot_id].content is given_up and not self._table[slot_id].is_leased:
                self._table.set_content(slot_id, before)
        self._postponed.clear()

    def _give_up(self, slot_id: SlotId) -> Content:
        """Do not try to save the same content again; the slot's next request makes it worth a try."""
        content = self._table[slot_id].content
        match content:
            case Known():
                content = replace(content, n_saved=content.n_tokens)
            case Unknown():
                content = replace(content, can_be_adopted=False)
        self._table.set_content(slot_id, content)
        return content

    def _note(self, slot_id: SlotId, held: Content, content: Content) -> None:
        """Note the *content* of a slot, unless the slot was used since it *held* what was saved."""
        if self._table[slot_id].content is held:
            self._table.set_content(slot_id, content)

    async def _cut_back(self, slot_id: SlotId) -> None:
        content = self._table[slot_id].content
        if not isinstance(content, Known):
            return
        target = at_savable_point(self._process.rule, content)
        if target is None or target.n_tokens == content.n_tokens:
            return
        self._process.require_alive()
        self._table.set_content(slot_id, Unknown(content.namespace, origin=content.origin))
        timings = await self._process.upstream.evaluate(slot_id, target.tokens)
        self._metrics.prompt_tokens.labels("evaluated").inc(timings.prompt_n)
        self._metrics.evaluation_seconds.inc(timings.prompt_ms / 1000)
        self._table.set_content(slot_id, target)

    async def _save(
        self,
        slot_id: SlotId,
        name: str,
        is_just_predicted: bool,
        on_written: Callable[[], None] | None,
    ) -> tuple[SavedSlot, Content, Content] | None:
        """Save a slot as it stands and check the file; raises CacheFault.

        Returns the file, what the slot held, and that content as it stands in the slot table now; None if
        the slot had been cleared.
        """
        content = held = self._table[slot_id].content

        def note_written() -> None:
            nonlocal held
            self._process.require_alive()
            held = self._give_up(slot_id)
            if on_written is not None:
                on_written()

        self._process.require_alive()
        saved = await self._process.room.save(slot_id, name, note_written)
        if not saved.state.tokens and self._process.clears_idle_slots:
            # Its request ended just when another one started.
            self._note(slot_id, held, Empty())
            return None
        try:
            self._require_expected(content, saved.state, is_just_predicted)
        except SaveRejected:
            self._note(slot_id, held, TAINTED if saved.state.tokens else Empty())
            raise
        self._metrics.save_seconds.observe(saved.seconds)
        return saved, content, held

    def _require_expected(
        self, content: Content, state: StateFile, is_just_predicted: bool
    ) -> None:
        """Compare a saved file with the slot's expected content; raises SaveRejected if they differ."""
        if state.n_media or -1 in state.tokens:
            raise SaveRejected("the slot holds media")
        if not isinstance(content, Known):
            return
        if not state.tokens:
            self._metrics.drift.inc()
            if self._process.clears_idle_slots is None:
                self._process.note_clearing(clears=True)
            raise SaveRejected("the slot was empty: something has cleared it since")
        if state.tokens[: len(content.tokens)] == content.tokens:
            self._process.n_believed_points = believed_after_save(
                self._process.n_believed_points, content.restore_points, state.restore_points
            )
            return
        # Another client's request would hardly have left exactly as many tokens.
        if is_just_predicted or len(state.tokens) == content.n_tokens:
            self._metrics.tokenization_disagreements.inc()
            self._process.disable_shape(content.shape)
            raise SaveRejected("the file's tokens are not those that were predicted")
        self._metrics.drift.inc()
        raise SaveRejected("the slot was used by somebody else: all traffic must go through here")

    async def commit(
        self,
        slot_id: SlotId,
        kind: CheckpointKind,
        saved: SavedSlot,
        content: Content,
        held: Content,
    ) -> Checkpoint | None:
        """Commit the checked file of a slot that held *content*; None if nothing new is in it.

        The slot's entry in the table is left alone if it is no longer *held*.
        """
        state, store, namespace = saved.state, self._process.store, self._namespace_of(content)
        if namespace is None or not state.tokens:
            if not state.tokens:
                self._note(slot_id, held, Empty())
            return None
        relatives = list(store.find(namespace, state.tokens))
        n_tokens = len(state.tokens)
        is_stored = any(c.n_common == c.checkpoint.n_tokens == n_tokens for c in relatives)
        if n_tokens < FIRST_BLOCK_TOKENS or is_stored:
            self._note(slot_id, held, _as_saved(content, namespace, state, None))
            return None
        is_whole, ancestors = True, set(content.origin.ancestors)
        if isinstance(content, Known):
            saved, is_whole = await self._thin(saved, content, kind, relatives, ancestors)
        new = saved.checkpoint(namespace, kind, content)
        family = family_of(new, state.tokens, relatives)
        title = title_of(new.title, family, relatives)
        new = replace(new, family=family, ancestors=tuple(ancestors), title=title)
        checkpoint = await store.commit(new, state.tokens)
        if self._table[slot_id].content is held:
            self._table[slot_id].note_save(checkpoint)
        self._note(slot_id, held, _as_saved(content, namespace, state, checkpoint))
        rule = after_save(self._process.rule, has_every_position=checkpoint.has_every_position)
        if rule != self._process.rule:
            await self._process.learn_rule(rule)
        self._metrics.saves.labels("done").inc()
        self._metrics.saved_bytes.inc(checkpoint.size_bytes)
        for older in superseded(self._process.rule, checkpoint, relatives) if is_whole else ():
            await store.remove(older, Removal.SUPERSEDED)
        return checkpoint

    async def _thin(
        self,
        saved: SavedSlot,
        content: Known,
        kind: CheckpointKind,
        relatives: list[Candidate],
        ancestors: set[CheckpointId],
    ) -> tuple[SavedSlot, bool]:
        """Keep those context checkpoints of a temporary file that are worth their bytes.

        Context checkpoints that llama-server has dropped are copied from older files of the conversation;
        these files and their ancestors join the *ancestors*. Returns the file, and whether it has all that
        is wanted. A file that cannot be rewritten stays as llama-server wrote it. Raises StoreFault and
        OSError.
        """
        own = {c.restore_point: c.size_bytes for c in saved.state.context_checkpoints}
        if self._process.rule.kind is not RuleKind.RESTORE_POINTS or not own:
            return saved, True
        cuts = likely_cuts(content, kind)
        others = points_of_others(relatives)
        inside, state_bytes = edit_cuts(content), saved.state.state_end
        selection = select_points(own, others, cuts, self._process.rates, inside, state_bytes)
        if selection.keys() == own.keys():
            return saved, True
        store, grafted = self._process.store, dict[int, Source]()
        kept_own = [point for point, donor_id in selection.items() if donor_id is None]
        donors = {c.checkpoint.id: c.checkpoint for c in relatives}
        try:
            with ExitStack() as kept:
                for point, donor_id in selection.items():
                    if donor_id is None:
                        continue
                    donor = donors[donor_id]
                    kept.enter_context(store.keep(donor))
                    try:
                        await store.verify(donor)
                    except StoreFault as fault:
                        self._process.faults.record("verify", fault)
                        continue
                    grafted[point] = Source(store.files.path(donor.file_name), donor.parts)
                    ancestors.update(store.lineage(donor))
                # Copied points may make the file larger than it is: there must be room before.
                n_more = len(kept_own) + len(grafted) - len(own)
                n_most = saved.state.size_bytes + n_more * max(own.values())
                await store.settle(saved.file_name, max(saved.state.size_bytes, n_most))
                saved = await asyncio.to_thread(_select, store.files, saved, kept_own, grafted)
        except StateFileMalformed as fault:
            self._process.faults.record("thin", fault)
            return saved, False
        await store.settle(saved.file_name, saved.state.size_bytes)
        return saved, selection.keys() <= set(saved.state.restore_points)

    def _namespace_of(self, content: Content) -> Namespace | None:
        if not self._process.can_cache:
            return None
        if isinstance(content, Known):
            return content.namespace
        if isinstance(content, Unknown) and content.can_be_adopted:
            return content.tenant
        return None


def _as_saved(
    content: Content, namespace: Namespace, state: StateFile, checkpoint: Checkpoint | None
) -> Known:
    """Return a slot's content as its file tells; the slot may have more points than the file."""
    old = content
    if not isinstance(old, Known):
        old = Known(state.tokens, namespace, origin=content.origin)
    return replace(
        old,
        tokens=state.tokens,
        n_tail=0,
        restore_points=state.restore_points or old.restore_points,
        n_saved=len(state.tokens),
        saved_points=checkpoint.restore_points if checkpoint else old.saved_points,
        n_points_at_most=len(state.restore_points) or old.n_points_at_most,
    )


def _select(
    files: StateFiles, saved: SavedSlot, own: Collection[int], grafted: dict[int, Source]
) -> SavedSlot:
    parts = files.edit(
        saved.file_name,
        lambda path: select_context_checkpoints(Source(path, saved.parts), own, grafted),
    )
    return replace(saved, state=read_state_file(files.path(saved.file_name)), parts=parts)
