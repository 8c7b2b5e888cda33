"""The checkpoint store: index and files kept consistent and within their budget, whatever crashes when.

Files first, then the index entry; entry gone first, then the file. All writes run on one thread.
Room is made before a file is written: whoever wants to save reserves its bytes first.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from proxy.core.keeping.eviction import Present, Removal
from proxy.core.model import Candidate, Checkpoint, CheckpointId
from proxy.core.prefix import Namespace, TokenIds, count_blocks, hash_prefixes, token_ids
from proxy.errors import NoRoom, StoreFault
from proxy.store import new_state, opening
from proxy.store.budget import Budget, Claim, Limits
from proxy.store.catalogue import Catalogue
from proxy.store.index import Index
from proxy.store.new_state import NewState
from proxy.store.state_files import StateFiles
from proxy.store.write_ledger import WriteLedger
from proxy.store.writer import Writer

MAX_COMPARED = 512
"""How many checkpoints one lookup compares token by token, at most."""


class CheckpointStore:
    """All checkpoints under one --slot-save-path."""

    def __init__(self, directory: Path, limits: Limits) -> None:
        """Lock and open the store in *directory*, and bring it within its budget.

        Raises StoreLocked if another proxy has it, StoreFault if the index cannot be read.
        """
        self.files = StateFiles(directory)
        self.limits = limits
        self.removals = Counter({reason: 0 for reason in Removal})
        self.on_removal: Callable[[Checkpoint, TokenIds | None, Removal], None] = lambda *_: None
        self._budget = Budget(limits)
        self._catalogue = Catalogue()
        with ExitStack() as undo:
            self._lock_descriptor = opening.lock(directory)
            undo.callback(os.close, self._lock_descriptor)
            try:
                self.index = Index(directory / "index")
                undo.callback(self.index.close)
                self.report = self._open()
            except OSError as error:
                raise StoreFault(f"{directory}: {error}") from error
            undo.pop_all()
        self._writer = Writer()
        self.writes = WriteLedger(self.index, limits.max_write_bytes_per_day)

    def _open(self) -> opening.CheckReport:
        intact, report = opening.check(self.index, self.files)
        for checkpoint in intact:
            tokens = self.index.tokens(checkpoint.id) or token_ids(())
            self._catalogue.enter(checkpoint, hash_prefixes(checkpoint.namespace, tokens))
        n_too_many = self.size_bytes - self.limits.max_bytes
        victims = self._catalogue.victims(n_too_many, Present(time.time()))
        for victim in victims:
            opening.remove(self.index, self.files, victim)
            self._catalogue.take(victim.id)
            self._catalogue.forget(victim.id)
        self.removals[Removal.BUDGET] += len(victims)
        self.removals[Removal.BROKEN] += report.n_entries_without_file
        return replace(report, n_checkpoints=len(self), n_over_budget=len(victims))

    def close(self) -> None:
        """Write what is pending and release the directory."""
        self._writer.close()
        try:
            with suppress(StoreFault):
                self.index.update(self._catalogue.take_touched())
            self.index.close()
        finally:
            os.close(self._lock_descriptor)

    def __len__(self) -> int:
        return len(self._catalogue)

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._catalogue)

    @property
    def version(self) -> int:
        """A number that changes with every record."""
        return self._catalogue.version

    @property
    def size_bytes(self) -> int:
        return self._catalogue.size_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of files that an operator keeps; they count in the budget."""
        return sum(c.size_bytes for c in self if c.is_pinned)

    def get(self, checkpoint_id: CheckpointId) -> Checkpoint | None:
        return self._catalogue.get(checkpoint_id)

    def value_seconds(self, checkpoint: Checkpoint, present: Present) -> float:
        """Return the seconds that losing a checkpoint would cost."""
        return self._catalogue.value_seconds(checkpoint, present)

    def find(self, namespace: Namespace, tokens: TokenIds) -> Iterator[Candidate]:
        """Yield the checkpoints that share at least a block with *tokens*, longest prefix first.

        Their tokens have been compared one by one; a hash alone never names a candidate.
        """
        # Those of one block are in no order; a whole block is the least that separates groups.
        group: list[Candidate] = []
        for checkpoint_id in self.index.reaching(hash_prefixes(namespace, tokens))[:MAX_COMPARED]:
            checkpoint = self._catalogue.get(checkpoint_id)
            if checkpoint is None or checkpoint.namespace != namespace:
                continue
            n_common = self.index.common_prefix(checkpoint_id, tokens)
            if n_common is None or self._catalogue.is_quarantined(checkpoint_id):
                continue
            candidate = Candidate(checkpoint, n_common, self._catalogue.is_warm(checkpoint_id))
            if group and count_blocks(candidate.n_common) < count_blocks(group[0].n_common):
                yield from sorted(group, key=lambda c: -c.n_common)
                group = []
            group.append(candidate)
        yield from sorted(group, key=lambda c: -c.n_common)

    def note_asked(self, namespace: Namespace, tokens: TokenIds) -> None:
        """Note that a request has this prompt: what it shares with checkpoints is alive."""
        self._catalogue.note_asked(hash_prefixes(namespace, tokens))

    def keep(self, checkpoint: Checkpoint) -> AbstractContextManager[None]:
        """Keep a checkpoint from eviction between its choice and its restore."""
        return self._catalogue.keep(checkpoint.id)

    @contextmanager
    def using(self, checkpoint: Checkpoint) -> Iterator[Checkpoint]:
        """Keep a checkpoint from eviction while it is being restored.

        Raises StoreFault if its file is not the one that was committed.
        """
        with self.keep(checkpoint):
            self.files.require_unchanged(
                checkpoint.file_name, checkpoint.file_stamp, checkpoint.size_bytes
            )
            yield checkpoint
            self._catalogue.touch(checkpoint.id)

    def is_warm(self, checkpoint: Checkpoint) -> bool:
        """Return whether the file of a checkpoint is likely in the page cache."""
        return self._catalogue.is_warm(checkpoint.id)

    def holds(self, namespace: Namespace, tokens: TokenIds) -> bool:
        """Return whether a checkpoint of exactly these tokens is there."""
        return any(
            found.n_common == found.checkpoint.n_tokens == len(tokens)
            for found in self.find(namespace, tokens)
        )

    def quarantine(self, checkpoint: Checkpoint) -> None:
        """Offer a checkpoint no more while this process runs; eviction takes it first."""
        self._catalogue.quarantine(checkpoint.id)

    async def pin(self, checkpoint_id: CheckpointId, *, is_pinned: bool) -> Checkpoint | None:
        """Keep a checkpoint whatever happens, or no longer; None if it is gone."""
        record = self._catalogue.set_pinned(checkpoint_id, is_pinned=is_pinned)
        if record is not None:
            await self._writer.write(partial(self.index.update, [record]))
        return record

    async def reserve(self, claim: Claim) -> str:
        """Make room for a file; return the temporary name under which it is to be written.

        The bytes stay reserved until that name is committed or discarded. Raises NoRoom, and nothing
        was removed, if what may go does not suffice.
        """
        if not claim.is_passing:
            self.writes.require(claim.wanted, self._budget.unwritten_bytes)
        name = self.files.new_temporary_name()
        self._budget.reserve(name, claim)
        await self._make_room(name, claim)
        return name

    async def settle(self, temporary_name: str, n_bytes: int) -> None:
        """Count a reserved file as large as it was written; raises NoRoom if that is too large."""
        await self._count_written(temporary_name, n_bytes)
        await self._make_room(temporary_name, self._budget.settle(temporary_name, n_bytes))

    async def _make_room(self, name: str, claim: Claim) -> None:
        try:
            free_bytes = self.files.free_bytes() + self._catalogue.going_bytes
            shortage = self._budget.shortage(claim, self.size_bytes, free_bytes)
            if claim.is_passing and shortage.reason is Removal.FREE_SPACE:
                return  # what is looked at and deleted is not worth a checkpoint: let the write fail
            victims = self._catalogue.victims(shortage.n_bytes, claim.present, claim.replaces)
            if sum(v.size_bytes for v in victims) < shortage.n_bytes:
                raise NoRoom(
                    shortage.reason,
                    f"{shortage.n_bytes:,} bytes more are needed ({shortage.reason}) than may go: "
                    f"{free_bytes:,} are free, checkpoints have {self.size_bytes:,}, of which "
                    f"{self.pinned_bytes:,} are pinned; what is left is in use or pinned",
                )
            await self._remove(victims, shortage.reason)
        except OSError as error:
            self._budget.release(name)
            raise StoreFault(f"{self.files.directory}: {error.strerror}") from error
        except BaseException:
            self._budget.release(name)
            raise

    async def commit(self, state: NewState) -> Checkpoint:
        """Seal a state's file and enter it in the index; raises StoreFault if either fails."""
        hashes = hash_prefixes(state.namespace, state.tokens)

        def enter(checkpoint: Checkpoint) -> None:
            self._catalogue.enter(checkpoint, hashes)
            self._catalogue.note_read(checkpoint)
            self._budget.release(state.temporary_name)

        touched = self._catalogue.take_touched()
        work = partial(new_state.commit, self.index, self.files, state, hashes, touched)
        return await self._writer.write(work, then=enter)

    async def remove(self, checkpoint: Checkpoint, reason: Removal) -> bool:
        """Delete a checkpoint, entry first; return False if it is gone, pinned or in use.

        A pinned one goes only at an operator's word. A broken one goes in any case: nobody can use it.
        """
        current = self._catalogue.get(checkpoint.id)
        if current is None:
            return False
        if reason is not Removal.BROKEN:
            is_kept = current.is_pinned and reason is not Removal.OPERATOR
            if is_kept or self._catalogue.is_in_use(checkpoint.id):
                return False
        await self._remove([current], reason)
        return True

    async def _remove(self, checkpoints: Iterable[Checkpoint], reason: Removal) -> None:
        """Take checkpoints out at once and delete them; return when their files are gone.

        Waits for removals of others that are under way, too: their room may have been counted on.
        """
        taken = [c for c in checkpoints if self._catalogue.take(c.id)]
        try:
            while taken:
                await self._delete(taken.pop(), reason)
        finally:
            for checkpoint in taken:
                self._catalogue.put_back(checkpoint.id)
        if self._catalogue.going_bytes:
            await self._writer.write(lambda: None)

    async def _delete(self, checkpoint: Checkpoint, reason: Removal) -> None:
        def forget(tokens: TokenIds | None) -> None:
            self._catalogue.forget(checkpoint.id)
            self.removals[reason] += 1
            self.on_removal(checkpoint, tokens, reason)

        try:
            work = partial(opening.remove, self.index, self.files, checkpoint)
            await self._writer.write(work, then=forget)
        except StoreFault:
            self._catalogue.put_back(checkpoint.id)
            raise

    async def discard(self, temporary_name: str) -> None:
        """Delete a temporary file that did not become a checkpoint."""
        await self._count_written(temporary_name, self.files.size_bytes(temporary_name))
        await self._writer.write(
            partial(self.files.remove, temporary_name),
            then=lambda _: self._budget.release(temporary_name),
        )

    async def _count_written(self, name: str, n_bytes: int) -> None:
        """Count what llama-server has written to a reserved file, once."""
        claim = self._budget.unwritten(name)
        if claim is not None and n_bytes:
            with suppress(StoreFault):  # then it is counted until this process ends
                await self._writer.write(self.writes.note(n_bytes, claim.wanted))

    async def put_value(self, name: str, value: object) -> None:
        await self._writer.write(partial(self.index.put_value, name, value))
