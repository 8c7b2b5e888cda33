"""One save of a slot: the call, the room for its file, and the checks of what came of it.

Owns: everything between llama-server's save and a file that is fit to be committed, and the sizes of a
model's states. Knows nothing of the slot table; the caller holds the slot's lease. A file has a temporary
name until it is committed, so a half-checked file is garbage, and is swept.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

from proxy import errors
from proxy.core import saving
from proxy.core.conditions import DegradationKind
from proxy.core.cuts import kept_after_save
from proxy.core.launch import N_CONTEXT_CHECKPOINTS
from proxy.core.messages import count_messages
from proxy.core.model import Candidate, Checkpoint, CheckpointId, CheckpointKind, FilePart, SlotId
from proxy.core.plan import most_useful
from proxy.core.slots import Content, Known
from proxy.core.tokens import Namespace, TokenIds
from proxy.health import CannotCache
from proxy.llama import state_edits
from proxy.llama.client import Saved
from proxy.llama.files import StateFile, read_state_file
from proxy.llama.state_edits import Source
from proxy.serving.planning import verify
from proxy.serving.process import MAX_SIZES, Process
from proxy.store.files import FileStamp, StateFiles, final_name_of, id_of


@dataclass(frozen=True, slots=True)
class SavedSlot:
    """A checked temporary file, its parts, and how long llama-server took to write its bytes.

    The `stamp` is from before it was read: a file that has another one was changed since.
    """

    file_name: str
    state: StateFile
    parts: tuple[FilePart, ...]
    stamp: FileStamp
    seconds: float

    def checkpoint(
        self, namespace: Namespace, kind: CheckpointKind, content: Content
    ) -> Checkpoint:
        """Return the checkpoint of this file of a slot that was believed to hold *content*."""
        known = content if isinstance(content, Known) else Known(TokenIds("i"), namespace)
        now = time.time()
        return Checkpoint(
            id=id_of(self.file_name),
            namespace=namespace,
            kind=kind,
            n_tokens=len(self.state.tokens),
            restore_points=self.state.restore_points,
            has_every_position=self.state.has_every_position,
            file_name=final_name_of(self.file_name),
            size_bytes=self.state.size_bytes,
            created_at=now,
            last_used_at=now,
            n_prompt=len(known.tokens),
            header=known.header,
            turn_start=known.turn_start,
            marks=known.marks,
            parts=self.parts,
            verified_at=now,
            title=known.title,
            n_messages=count_messages(known.conversation),
        )


_GUESS_SHARE = 1 / 16
_GUESS_BYTES = 256 << 20
"""A model's first state reserves this share of the budget, but no more than so many bytes, and no more than
half of the bytes that are free or may be written. The file then tells the real size."""
_MOST_SHARE = 1 / 2
"""An extrapolated size reserves no more than this share of the budget. Then the file tells its size."""


class Saver:
    """Has llama-server save slots, each after room for its file was made in the store."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.repairs_windows = True
        """Whether cut windows are repaired in files of the versions that may need it; the rule tells."""
        self.may_have_window = True
        """Whether the model may have a sliding window; the model file tells, if it can be read."""

    def room_for(self, content: Content) -> AbstractAsyncContextManager[str]:
        """Yield the name under which a slot that holds *content* is to be saved.

        On leaving, the file is deleted unless it was committed. Raises NoRoom before anything is saved.
        """
        n_bytes = self._expected_bytes(saving.extent_of(content))
        present, replaced = self._process.present(self._process), self._replaced_by(content)
        spared_seconds = self._spared_seconds(content)
        claim = saving.Claim(n_bytes, present, replaced, spared_seconds=spared_seconds)
        return self._reserved(claim)

    @asynccontextmanager
    async def probe(self, slot_id: SlotId, n_tokens: int) -> AsyncIterator[SavedSlot]:
        """Save a slot of *n_tokens* to look at the file, which is then deleted; raises CacheFault."""
        n_bytes = self._expected_bytes((n_tokens, 0))
        claim = saving.Claim(n_bytes, self._process.present(self._process), is_passing=True)
        async with self._reserved(claim) as name:
            yield await self.save(slot_id, name)

    async def save(self, slot_id: SlotId, name: str) -> SavedSlot:
        """Have a slot saved as `write` does, and check the file as `check` does."""
        return await self.check(name, *await self.write(slot_id, name))

    async def write(self, slot_id: SlotId, name: str) -> tuple[Saved, float]:
        """Have a slot saved under a name that room was made for; the caller commits or deletes the file.

        Returns llama-server's reply, and how many seconds it took. Raises UpstreamFault, and CannotCache
        if llama-server does not save.
        """
        began = time.monotonic()
        try:
            reply = await self._process.upstream.save(slot_id, name)
        except errors.UpstreamRefused as refusal:
            if refusal.status == 501:
                raise CannotCache(DegradationKind.NO_SLOT_SAVE_PATH) from refusal
            if refusal.status == 403:  # another llama-prefix-cache
                raise CannotCache(DegradationKind.NOT_A_LLAMA_SERVER, str(refusal)) from refusal
            raise
        return reply, time.monotonic() - began

    async def check(self, name: str, reply: Saved, seconds: float) -> SavedSlot:
        """Check a file that llama-server has written; the slot may have other tokens by now.

        The file's real size is learned, and more room is made if it is larger than expected. Raises
        NoRoom, CannotCache if llama-server saves nothing that the proxy can read, CacheFault if the file
        is not what the reply says, StateFileMalformed if it is no state file, StoreFault if there is no
        store.
        """
        process = self._process
        saved = await asyncio.to_thread(self._checked, name, reply, seconds)
        state = saved.state
        # True for all builds before July 2026, and needlessly for some later ones.
        process.upstream.keeps_points_of_others = state.version <= 2
        n_bytes = state.size_bytes  # as many as llama-server wrote: no edit changes a length
        fixed_bytes = min(n_bytes, state.recurrent_bytes)
        size = saving.StateSize(len(state.tokens), len(state.restore_points), n_bytes, fixed_bytes)
        process.sizes.append(size)
        process.n_written_points = max(process.n_written_points, size.n_points)
        process.n_loaded_points = max(process.n_loaded_points, size.n_points)
        process.rates = process.rates.after_save(n_bytes, seconds)
        with self._telling_of_room():
            await process.store.settle(name, n_bytes)
        return saved

    async def thin(
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
        process = self._process
        own = {c.restore_point: c.size_bytes for c in saved.state.context_checkpoints}
        if not process.rule.is_restore_points or not own:
            return saved, True
        cuts, rates = saving.likely_cuts(content, kind), process.rates
        others = saving.points_of_others(relatives)
        inside, state_bytes = saving.edit_cuts(content), saved.state.state_end
        # Where its flags are not known, llama-server may load no more than it has written.
        n_likely = max(len(own), min(process.n_kept_points, N_CONTEXT_CHECKPOINTS))
        n_at_most = min(process.n_loaded_points, n_likely)
        wanted = saving.select_points(own, others, cuts, rates, inside, state_bytes, n_at_most)
        if wanted == own.keys():
            return saved, True
        store, grafted = process.store, dict[int, Source]()
        with process.faults.suppressed("thin", errors.StateFileMalformed), ExitStack() as kept:
            for point in wanted - own.keys():
                donor = others[point].checkpoint
                kept.enter_context(store.keep(donor))
                with process.faults.suppressed("verify", errors.StoreFault):
                    await verify(process, donor, point)
                    grafted[point] = Source(store.files.path(donor.file_name), donor.parts)
                    ancestors.update(store.lineage(donor))
            # Copied points may make the file larger than it is: there must be room before.
            mine = wanted & own.keys()
            n_more = len(mine) + len(grafted) - len(own)
            most_bytes = saved.state.size_bytes + n_more * max(own.values())
            try:
                await store.settle(saved.file_name, max(saved.state.size_bytes, most_bytes))
            except errors.NoRoom:  # the state is worth more than what it would take over
                grafted.clear()
            saved = await asyncio.to_thread(_select, store.files, saved, mine, grafted)
            await store.settle(saved.file_name, saved.state.size_bytes)
            return saved, wanted <= set(saved.state.restore_points)
        return saved, False

    def learn_from_file(self, content: Content, state: StateFile) -> str | None:
        """Return why a saved file is not what the slot was expected to hold; None if it is.

        Notes what follows for the process: how many points its slots keep, drift, a wrong tokenization.
        """
        if state.n_media or -1 in state.tokens:
            return "the slot holds media"
        if not isinstance(content, Known):
            return None
        if not state.tokens:
            if self._process.clears_idle_slots:
                return None  # its request ended just when another one started
            self._process.metrics.drift.inc()
            if self._process.clears_idle_slots is None:
                self._process.note_clearing(clears=True)
            return "the slot was empty: something has cleared it since"
        if state.tokens[: len(content.tokens)] == content.tokens:
            self._process.n_kept_points = kept_after_save(
                self._process.n_kept_points, content.restore_points, state.restore_points
            )
            return None
        # Another client's request would hardly have left exactly as many tokens.
        if len(state.tokens) == content.n_tokens:
            self._process.disable_shape(content.shape)
            return "the file's tokens are not those that were predicted"
        self._process.metrics.drift.inc()
        return "the slot was used by somebody else: all traffic must go through here"

    def _checked(self, name: str, reply: Saved, seconds: float) -> SavedSlot:
        files = self._process.store.files
        path = files.path(name)
        try:
            stamp = files.stamp(name)
            if stamp[1] != reply.n_written:
                raise errors.CacheFault(f"wrote {reply.n_written} bytes, the file has {stamp[1]}")
            state = read_state_file(path)
            is_changed = self.may_have_window and files.edit(
                name, lambda path: state_edits.order_windows(path, state)
            )
            if self.repairs_windows and state.version in state_edits.NEEDED_BY_VERSIONS:
                is_changed |= files.edit(name, state_edits.repair_window)
            if is_changed:
                stamp, state = files.stamp(name), read_state_file(path)
            parts = files.parts(name, state.part_sizes)
        except FileNotFoundError as error:
            detail = f"{name} did not come to {path.parent}: delete it where it is"
            raise CannotCache(DegradationKind.OTHER_DIRECTORY, detail) from error
        except OSError as error:
            detail = f"{path}: {error.strerror}"
            raise CannotCache(DegradationKind.FILES_UNREADABLE, detail) from error
        if len(state.tokens) != reply.n_saved:
            told = f"saved {reply.n_saved} tokens, the file has {len(state.tokens)}"
            raise errors.CacheFault(told)
        return SavedSlot(name, state, parts, stamp, seconds)

    @asynccontextmanager
    async def _reserved(self, claim: saving.Claim) -> AsyncIterator[str]:
        with self._telling_of_room():
            name = await self._process.store.reserve(claim)
        try:
            yield name
        finally:
            await self._process.store.discard(name)

    @contextmanager
    def _telling_of_room(self) -> Iterator[None]:
        """Let /health tell of a NoRoom that leaves the block, or that there is room again."""
        try:
            yield
        except errors.NoRoom as refusal:
            is_over = refusal.reason == errors.WRITE_BUDGET
            kind = DegradationKind.WRITE_BUDGET_SPENT if is_over else DegradationKind.NO_ROOM
            if not self._process.store.files.is_readonly:  # that is a condition of its own
                self._process.degrade(kind, str(refusal))
            self._process.metrics.saves_skipped.labels(refusal.reason).inc()
            raise
        self._process.recover(DegradationKind.NO_ROOM)
        if self._process.store.writes.has_plenty:
            self._process.recover(DegradationKind.WRITE_BUDGET_SPENT)

    def _expected_bytes(self, extent: tuple[int, int] | None) -> int:
        max_bytes = self._process.store.writes.max_bytes
        sizes = self._sizes()
        largest_seen = max((s.size_bytes for s in sizes), default=0) or self._guess_bytes(max_bytes)
        expected = saving.expected_bytes(sizes, *extent) if extent else None
        if expected is None:
            return min(largest_seen, max_bytes)
        return min(expected, max(largest_seen, int(max_bytes * _MOST_SHARE)))

    def _guess_bytes(self, max_bytes: int) -> int:
        store = self._process.store
        free_bytes, left_bytes = store.free_bytes, store.writes.left_bytes
        may_write_bytes = free_bytes if left_bytes is None else min(max(0, left_bytes), free_bytes)
        return int(min(max_bytes * _GUESS_SHARE, _GUESS_BYTES, may_write_bytes // 2))

    def _sizes(self) -> list[saving.StateSize]:
        """Return sizes of this model's newest states; before it is identified, of all models'."""
        ours = self._process.present(self._process).rates_by
        newest = self._process.store.newest(MAX_SIZES - len(self._process.sizes))
        stored = (c for c in newest if not ours or c.namespace in ours)
        sizes = [saving.StateSize(c.n_tokens, len(c.restore_points), c.size_bytes) for c in stored]
        return [*self._process.sizes, *sizes]

    def _spared_seconds(self, content: Content) -> float | None:
        """Return the seconds to evaluate the tokens of a slot that no checkpoint has; None if not known.

        Only needed where the bytes written per day are limited.
        """
        if not isinstance(content, Known) or not self._process.store.writes.max_bytes_per_day:
            return None
        found = self._process.store.find(content.tenant, content.tokens)
        n_covered, _ = most_useful(self._process.rule, found, content.n_tokens + 1)
        return self._process.rates.evaluation_seconds(n_covered, content.n_tokens)

    def _replaced_by(self, content: Content) -> frozenset[CheckpointId]:
        """Return the checkpoint that shares most with *content*: mostly its own older state.

        It is evicted last: if the save fails or the machine stops, only it is left of the conversation.
        """
        if not isinstance(content, Known):
            return frozenset()
        nearest = next(self._process.store.find(content.tenant, content.tokens), None)
        return frozenset((nearest.checkpoint.id,) if nearest else ())


def _select(
    files: StateFiles, saved: SavedSlot, own: Collection[int], grafted: dict[int, Source]
) -> SavedSlot:
    select, name = state_edits.select_context_checkpoints, saved.file_name
    parts = files.edit(name, lambda path: select(Source(path, saved.parts), own, grafted))
    stamp, state = files.stamp(name), read_state_file(files.path(name))
    return replace(saved, state=state, parts=parts, stamp=stamp)
