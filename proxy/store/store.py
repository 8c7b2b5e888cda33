"""The checkpoint store: index and files stay consistent and within their budget, also after a crash.

All writes run on one thread, in the order of `StoreDirectory`. Before a file is written, a save reserves
its bytes, and room is made for them.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from math import nan
from pathlib import Path
from typing import Any, TypeVar

from proxy.core.eviction import Present, Removal
from proxy.core.model import Checkpoint, CheckpointId
from proxy.core.saving import Claim
from proxy.core.tokens import TokenIds, hash_prefixes
from proxy.errors import NoRoom, StateDamaged, StoreFault, in_words
from proxy.store.catalogue import WRITTEN, Budget, Catalogue
from proxy.store.directory import READ_ONLY, StoreDirectory
from proxy.store.files import FileStamp, Look, Verification, temporary_name_of
from proxy.store.index import Newer

T = TypeVar("T")
N_NEWEST = 100
"""Of so many checkpoints the kernel is asked whether their files are in the page cache."""
_N_DISCARDED = 8
"""So many temporary files are deleted again: llama-server may write one that nobody waits for any more."""
_ANSWER_SECONDS = 5.0
"""A disk that has not answered for so long gets no save: llama-server would hang in it, too."""


class CheckpointStore(Catalogue):
    """All checkpoints under one --slot-save-path; the Catalogue has what neither waits nor needs files."""

    def __init__(self, directory: Path, max_bytes: int, max_write_bytes_per_day: int = 0) -> None:
        """Lock and open the store in *directory*, and bring it within *max_bytes*.

        A damaged index is made anew, and `report` says so. Raises StoreLocked if another proxy has
        the directory, StoreFault if the index cannot be read.
        """
        self.removals = Counter({reason: 0 for reason in Removal})
        self.on_removal: Callable[[Checkpoint, TokenIds | None, Removal], None] = lambda *_: None
        self.on_commit: Callable[[Checkpoint], None] = lambda _: None
        self.on_damage: Callable[[Checkpoint, list[Checkpoint]], None] = lambda *_: None
        self._verifying: dict[CheckpointId, asyncio.Future[None]] = {}
        self._damaged: set[CheckpointId] = set()
        self._discarded: deque[str] = deque(maxlen=_N_DISCARDED)
        self._look = Look(self._look_at_disk)
        self._directory = StoreDirectory(directory)
        self.files, self.secret = self._directory.files, self._directory.secret
        try:
            self.free_bytes: float = self.files.free_bytes()
            swept = self._directory.sweep()
            super().__init__(self._directory.index)
            self.writes = Budget(max_bytes, max_write_bytes_per_day, self.index)
            self.report = self._make_fit(*swept)
            for checkpoint in reversed([*self.newest(N_NEWEST)]):
                if self.files.is_cached(checkpoint.file_name):
                    self.note_read(checkpoint)
        except BaseException as error:
            self._directory.close()
            if isinstance(error, OSError):
                raise StoreFault(in_words(error)) from error
            raise
        self._verification = Verification(self.files)
        # LMDB allows one writer.
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store-writer")

    def _make_fit(self, n_entries: int, n_files: int) -> dict[str, object]:
        """Bring the store within its budget; return the numbers of checkpoints found and removed."""
        n_over = 0 if self.files.is_readonly else self.size_bytes - self.writes.max_bytes
        victims = self.victims(n_over, Present(time.time()))
        for victim in victims:
            self.take(victim.id)
            self._directory.remove(victim)
            self.forget(victim.id)
        self.removals[Removal.BUDGET] += len(victims)
        self.removals[Removal.BROKEN] += n_entries
        report: dict[str, object] = {
            "n_checkpoints": len(self),
            "n_entries_without_file": n_entries,
            "n_files_without_entry": n_files,
            "n_over_budget": len(victims),
        }
        rebuild = self._directory.rebuild
        if not rebuild.is_damage:
            report["n_entered_again"] = rebuild.n_entered
        elif rebuild.n_entered or rebuild.lost:
            report["index_made_anew"] = rebuild.words
        return report

    def close(self) -> None:
        """Write the pending records and release the directory."""
        for verifying in self._verifying.values():
            verifying.cancel()
        self._verification.close()
        self._writer.shutdown(wait=True)
        try:
            with suppress(StoreFault):
                self.index.put(newer=self._newer())
        finally:
            self._directory.close()

    async def write(
        self,
        work: Callable[[], T],
        *,
        then: Callable[[T], object] = lambda _: None,
        otherwise: Callable[[], object] = lambda: None,
    ) -> T:
        """Do *work* on the writer's thread and *then* on this one, even if the caller is cancelled.

        If the work fails, *otherwise* is done instead. Raises StoreFault for any OSError.
        """
        loop = asyncio.get_running_loop()
        written, ended = loop.run_in_executor(self._writer, work), loop.create_future()

        def end(written: "asyncio.Future[T]") -> None:
            try:
                otherwise() if written.exception() else then(written.result())
            finally:
                ended.set_result(None)

        written.add_done_callback(end)
        try:
            await asyncio.shield(ended)  # not `written`: that may end before `then` is called
            return written.result()
        except OSError as error:
            raise StoreFault(in_words(error)) from error

    # Using checkpoints: a file is restored only if it is what was saved.

    @asynccontextmanager
    async def using(self, checkpoint: Checkpoint) -> AsyncIterator[None]:
        """Keep a checkpoint from eviction while it is being restored.

        Raises StoreFault if its file is not what was saved, before the block or once it has ended.
        """
        with self.keep(checkpoint):
            await self.verify(checkpoint)
            yield
            if not await self._verification.is_done(checkpoint):
                raise StoreFault(f"{checkpoint.file_name} was changed while it was restored")
            self.note_restored(checkpoint)

    async def verify(self, checkpoint: Checkpoint, *, most_seconds: float | None = None) -> None:
        """Verify the file of a checkpoint, unless it was verified and has not changed since.

        Raises StoreFault if the file cannot be read in *most_seconds*, or as `verify_again` does.
        """
        verifying = self.verify_soon(checkpoint)
        try:
            async with asyncio.timeout(most_seconds):
                await asyncio.shield(verifying)
        except TimeoutError as error:
            if not verifying.done():  # used again as soon as it has been read
                self.note_unreadable(checkpoint)
            told = f"{checkpoint.file_name} was not read in {most_seconds} s"
            raise StoreFault(told) from error

    def verify_soon(self, checkpoint: Checkpoint) -> "asyncio.Future[None]":
        """Begin to verify a checkpoint that will likely be restored, unless it is verified already."""
        if (verifying := self._verifying.get(checkpoint.id)) is None:
            verifying = asyncio.ensure_future(self._verify_new(checkpoint))
            self._verifying[checkpoint.id] = verifying
            verifying.add_done_callback(lambda _: self._verifying.pop(checkpoint.id))
            # If nobody waits any more, nobody else asks for its error.
            verifying.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return verifying

    async def _verify_new(self, checkpoint: Checkpoint) -> None:
        if not await self._verification.is_done(checkpoint):
            await self.verify_again(checkpoint)
            self.note_read(checkpoint)

    async def verify_again(self, checkpoint: Checkpoint, *, bytes_per_second: float = 0.0) -> None:
        """Read the whole file of a checkpoint, no faster than *bytes_per_second* if given.

        Raises StoreFault if the file cannot be read, and then does not use the checkpoint for a while; or
        if the file is not what was saved, and then the checkpoint and all that may stem from it go.
        """
        try:
            await self._verification.verify(checkpoint, bytes_per_second=bytes_per_second)
        except StateDamaged:
            await self._remove_damaged(checkpoint)
            raise
        except OSError as error:
            self.note_unreadable(checkpoint)
            with suppress(StoreFault, OSError):
                if isinstance(error, FileNotFoundError):
                    self._directory.require_disk()
                    await self.remove(checkpoint, Removal.BROKEN)
            raise StoreFault(f"{checkpoint.file_name}: {error.strerror}") from error
        self.note_verified(checkpoint)

    async def _remove_damaged(self, damaged: Checkpoint) -> None:
        """Remove a checkpoint and all that may stem from it; raises StoreFault if that fails."""
        damaged = self.get(damaged.id) or damaged
        stemming = [c for c in self if c.may_stem_from(damaged)]
        for checkpoint in (damaged, *stemming):
            self._damaged.add(checkpoint.id)
            self.quarantine(checkpoint)  # in case the removal fails
        self.on_damage(damaged, stemming)
        await self._remove([damaged, *stemming], Removal.BROKEN)

    # Changing records.

    async def pin(self, checkpoint_id: CheckpointId, *, is_pinned: bool) -> Checkpoint | None:
        """Pin or unpin a checkpoint; return its new record, None if the checkpoint is gone."""
        self._directory.require_writable()
        await self.change_on_disk(checkpoint_id, is_pinned=is_pinned)
        return self.get(checkpoint_id)

    async def change_on_disk(self, *ids: CheckpointId, **changes: Any) -> None:
        """Change fields of those records that are there, on disk at once; raises StoreFault."""
        records = [record for i in ids if (record := self.change(i, **changes))]
        await self.write(partial(self._directory.update, records))

    async def put_value(self, name: str, value: object) -> None:
        await self.write(partial(self.index.put_value, name, value))

    # Saving: reserve room, write a file, then commit or discard the file.

    async def reserve(self, claim: Claim) -> str:
        """Make room for a file; return its temporary name.

        The bytes stay reserved until that name is committed or discarded. Raises NoRoom, without removing
        anything, if the checkpoints that may be removed do not free enough, StoreFault if the disk is away.
        """
        if self.files.is_readonly:
            raise NoRoom(Removal.FREE_SPACE, READ_ONLY)
        name = self.files.new_temporary_name()
        self.writes.reserve(name, claim)
        try:
            await self._make_room(claim)
        except BaseException:
            self.writes.release(name)
            raise
        return name

    async def settle(self, temporary_name: str, n_bytes: int) -> None:
        """Count a reserved file at its real size; raises NoRoom if that is too large."""
        self.writes.note_written(temporary_name, n_bytes)
        if larger := self.writes.settle(temporary_name, n_bytes):
            await self._make_room(larger)

    async def _make_room(self, claim: Claim) -> None:
        try:
            free_bytes, reserve_bytes = await self.space()
            usable_bytes = free_bytes - (0 if claim.is_passing else reserve_bytes)
            going_bytes, stored_bytes = self.going_bytes, self.size_bytes
            n_bytes, limit = self.writes.shortage(stored_bytes, usable_bytes + going_bytes)
            victims = self.victims(n_bytes, claim.present, claim.replaces)
            is_short = (deletable := sum(v.size_bytes for v in victims)) < n_bytes
            if claim.is_passing and (is_short or limit is Removal.FREE_SPACE):
                return  # a passing file is not worth a checkpoint: let its write fail
            if is_short:
                raise NoRoom(
                    limit,
                    f"{n_bytes:,} bytes are missing ({limit}), and only {deletable:,} are neither in use"
                    f" nor pinned: of {self.size_bytes:,} stored, {self.pinned_bytes:,} are pinned. The"
                    f" disk has {free_bytes + going_bytes:,} free",
                )
            takes_theirs = self.writes.shortage(stored_bytes + going_bytes, usable_bytes)[0] > 0
            going = set(self._going) if takes_theirs else set[CheckpointId]()
            await self._remove(victims, limit)
            while not going.isdisjoint(self._going):  # other removals begin one deletion at a time
                await self.write(lambda: None)
        except OSError as error:
            raise StoreFault(f"{self.files.directory}: {error.strerror}") from error

    async def space(self) -> tuple[int, int]:
        """Return how many bytes are free, and how many of them saves leave free.

        Raises OSError or StoreFault if the disk is away, or hangs.
        """
        try:
            found = await self._look.within(_ANSWER_SECONDS)
        except (StoreFault, OSError) as error:
            self.free_bytes = nan
            if isinstance(error, TimeoutError):
                raise StoreFault(f"{self.files.directory} does not answer") from error
            raise
        self.free_bytes = found[0]
        return found

    def _look_at_disk(self) -> tuple[int, int]:
        self._directory.require_disk()
        return self.files.free_bytes(), self.files.reserve_bytes()

    async def commit(
        self, checkpoint: Checkpoint, tokens: TokenIds, checked: FileStamp | None = None
    ) -> Checkpoint:
        """Give the file of a checkpoint its final name, and enter the checkpoint.

        A file whose stamp has changed since it was *checked* counts as not verified. Raises StoreFault if
        either fails, or if an ancestor of the state was found damaged meanwhile.
        """
        hashes, newer = hash_prefixes(checkpoint.namespace, tokens), self._newer()

        def is_damaged() -> bool:
            return not self._damaged.isdisjoint(checkpoint.ancestors)

        def enter(stamp: FileStamp) -> None:
            if checked is None or stamp[:3] == checked[:3]:  # a new name changes the ctime
                self._verification.verified[checkpoint.id] = stamp
            self.enter(checkpoint)
            self.note_written(newer.checkpoints)
            self.note_devalued(hashes)
            self.note_read(checkpoint)
            self.writes.release(temporary_name_of(checkpoint.file_name))
            if is_damaged():
                self.quarantine(checkpoint)

        work = partial(self._directory.commit, (checkpoint, tokens, hashes), newer)
        await self.write(work, then=enter)
        if is_damaged():
            await self.remove(checkpoint, Removal.BROKEN)
            raise StoreFault("what the slot was restored from is damaged")
        self.on_commit(checkpoint)
        return checkpoint

    def _newer(self) -> Newer:
        scores, self._scores = self._scores, {}  # each is written only once
        return Newer([*self._changed.values()], scores, {WRITTEN: self.writes.written})

    async def discard(self, temporary_name: str) -> None:
        """Delete a temporary file that did not become a checkpoint, and what came too late for others."""
        self._discarded.append(temporary_name)
        names = tuple(self._discarded)

        def remove_all() -> int:
            n_bytes = self.files.size_bytes(temporary_name)
            for name in names:
                self.files.remove(name)
            return n_bytes

        def note(n_bytes: int = 0) -> None:
            self.writes.note_written(temporary_name, n_bytes)
            self.writes.release(temporary_name)

        await self.write(remove_all, then=note, otherwise=note)

    # Removing checkpoints.

    async def remove(self, checkpoint: Checkpoint, reason: Removal) -> bool:
        """Delete a checkpoint; return False if it is gone, pinned or in use.

        Only an operator can remove a pinned checkpoint. A broken checkpoint always goes: it is of no use.
        """
        if reason is Removal.OPERATOR:
            self._directory.require_writable()
        if (current := self.get(checkpoint.id)) is None:
            return False
        is_kept = current.is_pinned and reason is not Removal.OPERATOR
        if reason is not Removal.BROKEN and (is_kept or checkpoint.id in self._in_use):
            return False
        await self._remove([current], reason)
        return True

    async def _remove(self, checkpoints: Iterable[Checkpoint], reason: Removal) -> None:
        """Take checkpoints out at once and delete them; return when their files are gone."""
        taken = [c for c in checkpoints if self.take(c.id)]
        try:
            while taken:
                await self._delete(taken.pop(0), reason)
        finally:
            for checkpoint in taken:
                self.put_back(checkpoint.id)

    async def _delete(self, checkpoint: Checkpoint, reason: Removal) -> None:
        def note(tokens: TokenIds | None) -> None:
            self.forget(checkpoint.id)
            self._verification.verified.pop(checkpoint.id, None)
            self.removals[reason] += 1
            self.on_removal(checkpoint, tokens, reason)

        work = partial(self._directory.remove, checkpoint)
        await self.write(work, then=note, otherwise=partial(self.put_back, checkpoint.id))
