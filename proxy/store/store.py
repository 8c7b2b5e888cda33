"""The checkpoint store: index and files kept consistent, whatever crashes when.

Files first, then the index entry; entry gone first, then the file. All writes run on one thread.
Records are mirrored in memory, so that a lookup reads LMDB only for prefix hashes and tokens.
"""

import asyncio
import fcntl
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from proxy.core.eviction import choose_victims
from proxy.core.model import Candidate, Checkpoint, CheckpointId, CheckpointKind
from proxy.core.prefix import BLOCK_TOKENS, Namespace, TokenIds, hash_prefixes
from proxy.errors import StoreFault, StoreLocked
from proxy.store.index import Index
from proxy.store.state_files import StateFiles

T = TypeVar("T")

LOCK_NAME = ".llama-prefix-cache.lock"
MAX_COMPARED = 512
"""How many checkpoints one lookup compares token by token, at most."""


@dataclass(frozen=True, slots=True)
class NewState:
    """A checked temporary state file, about to become a checkpoint."""

    temporary_name: str
    namespace: Namespace
    kind: CheckpointKind
    tokens: TokenIds
    restore_points: tuple[int, ...]
    has_every_position: bool
    n_prompt: int = 0


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What an opening check found and removed."""

    n_checkpoints: int
    n_entries_without_file: int
    n_files_without_entry: int


class CheckpointStore:
    """All checkpoints under one --slot-save-path."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """Lock and open the store in *directory*.

        Raises StoreLocked if another proxy has it, StoreFault if the index cannot be read.
        """
        self.files = StateFiles(directory)
        self.max_bytes = max_bytes
        self._lock_descriptor = _lock(directory)
        try:
            self.index = Index(directory / "index")
            try:
                self._records = {c.id: c for c in self.index.all()}
                self.report = self._check()
            except BaseException:
                self.index.close()
                raise
        except OSError as error:
            os.close(self._lock_descriptor)
            raise StoreFault(f"{directory}: {error}") from error
        except BaseException:
            os.close(self._lock_descriptor)
            raise
        self._in_use: Counter[CheckpointId] = Counter()
        self._touched: set[CheckpointId] = set()
        self._quarantined: set[CheckpointId] = set()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store-writer")

    def close(self) -> None:
        """Write what is pending and release the directory."""
        self._writer.shutdown(wait=True)
        try:
            with suppress(StoreFault):
                self.index.update(self._take_touched())
            self.index.close()
        finally:
            os.close(self._lock_descriptor)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(tuple(self._records.values()))

    @property
    def size_bytes(self) -> int:
        return sum(c.size_bytes for c in self._records.values())

    def find(self, namespace: Namespace, tokens: TokenIds) -> Iterator[Candidate]:
        """Yield the checkpoints that share at least a block with *tokens*, longest prefix first.

        Their tokens have been compared one by one; a hash alone never names a candidate.
        """
        # Those of one block are in no order; a whole block is the least that separates groups.
        group: list[Candidate] = []
        for checkpoint_id in self.index.reaching(hash_prefixes(namespace, tokens))[:MAX_COMPARED]:
            checkpoint = self._records.get(checkpoint_id)
            if checkpoint is None or checkpoint.namespace != namespace:
                continue
            n_common = self.index.common_prefix(checkpoint_id, tokens)
            if n_common is None or checkpoint_id in self._quarantined:
                continue
            candidate = Candidate(checkpoint, n_common)
            if group and candidate.n_common // BLOCK_TOKENS < group[0].n_common // BLOCK_TOKENS:
                yield from sorted(group, key=lambda c: -c.n_common)
                group = []
            group.append(candidate)
        yield from sorted(group, key=lambda c: -c.n_common)

    @contextmanager
    def keep(self, checkpoint: Checkpoint) -> Iterator[None]:
        """Keep a checkpoint from eviction between its choice and its restore."""
        self._in_use[checkpoint.id] += 1
        try:
            yield
        finally:
            self._in_use[checkpoint.id] -= 1

    @contextmanager
    def using(self, checkpoint: Checkpoint) -> Iterator[Checkpoint]:
        """Keep a checkpoint from eviction while it is being restored.

        Raises StoreFault if its file is not the one that was committed.
        """
        with self.keep(checkpoint):
            self._require_unchanged(checkpoint)
            yield checkpoint
            self._touch(checkpoint.id)

    def holds(self, namespace: Namespace, tokens: TokenIds) -> bool:
        """Return whether a checkpoint of exactly these tokens is there."""
        return any(
            found.n_common == found.checkpoint.n_tokens == len(tokens)
            for found in self.find(namespace, tokens)
        )

    def quarantine(self, checkpoint: Checkpoint) -> None:
        """Offer a checkpoint no more while this process runs; eviction takes it in its turn."""
        self._quarantined.add(checkpoint.id)

    def _require_unchanged(self, checkpoint: Checkpoint) -> None:
        try:
            stamp = self.files.stamp(checkpoint.file_name)
        except OSError as error:
            raise StoreFault(f"{checkpoint.file_name}: {error.strerror}") from error
        if stamp != checkpoint.file_stamp:
            raise StoreFault(f"{checkpoint.file_name} was replaced since it was saved")

    def _touch(self, checkpoint_id: CheckpointId) -> None:
        record = self._records.get(checkpoint_id)
        if record:
            self._records[checkpoint_id] = replace(record, last_used_at=time.time())
            self._touched.add(checkpoint_id)

    async def commit(self, state: NewState) -> Checkpoint:
        """Seal a state's file and enter it in the index; raises StoreFault if either fails."""
        work = partial(self._commit, state, self._take_touched())
        return await self._write(work, then=self._enter)

    def _enter(self, checkpoint: Checkpoint) -> None:
        self._records[checkpoint.id] = checkpoint

    def _commit(self, state: NewState, touched: list[Checkpoint]) -> Checkpoint:
        final_name = self.files.new_final_name()
        facts = self.files.seal(state.temporary_name, final_name)
        now = time.time()
        checkpoint = Checkpoint(
            id=CheckpointId(int(final_name[4:20], 16) >> 1),
            namespace=state.namespace,
            kind=state.kind,
            n_tokens=len(state.tokens),
            restore_points=state.restore_points,
            has_every_position=state.has_every_position,
            file_name=final_name,
            size_bytes=facts.size_bytes,
            file_stamp=facts.stamp,
            checksum=facts.checksum,
            created_at=now,
            last_used_at=now,
            n_prompt=state.n_prompt,
        )
        try:
            self.index.put(checkpoint, state.tokens, hash_prefixes(state.namespace, state.tokens))
        except StoreFault:
            self.files.remove(final_name)
            raise
        with suppress(StoreFault):
            self.index.update(touched)
        return checkpoint

    async def remove(self, checkpoint: Checkpoint) -> None:
        """Delete a checkpoint, entry first; nothing happens if it is in use or gone."""
        if self._in_use[checkpoint.id] or self._records.pop(checkpoint.id, None) is None:
            return
        try:
            await self._write(partial(self._remove, checkpoint))
        except StoreFault:
            self._records[checkpoint.id] = checkpoint
            raise

    def _remove(self, checkpoint: Checkpoint) -> None:
        tokens = self.index.tokens(checkpoint.id)
        hashes = hash_prefixes(checkpoint.namespace, tokens) if tokens is not None else []
        self.index.delete(checkpoint.id, hashes)
        self.files.remove(checkpoint.file_name)

    async def discard(self, temporary_name: str) -> None:
        """Delete a temporary file that did not become a checkpoint."""
        await self._write(partial(self.files.remove, temporary_name))

    async def evict(self) -> list[Checkpoint]:
        """Bring the store within its budget; return what went."""
        in_use = {i for i, n in self._in_use.items() if n}
        victims = choose_victims(self, self.size_bytes - self.max_bytes, in_use)
        for victim in victims:
            await self.remove(victim)
        return victims

    async def put_value(self, name: str, value: object) -> None:
        await self._write(partial(self.index.put_value, name, value))

    def _take_touched(self) -> list[Checkpoint]:
        touched, self._touched = self._touched, set()
        return [self._records[i] for i in touched if i in self._records]

    async def _write(
        self, work: Callable[[], T], *, then: Callable[[T], object] = lambda _: None
    ) -> T:
        """Do *work* on the writer thread and *then* on this one, even if the caller is cancelled."""
        written = asyncio.get_running_loop().run_in_executor(self._writer, work)
        written.add_done_callback(lambda w: w.exception() or then(w.result()))
        try:
            return await asyncio.shield(written)
        except OSError as error:
            raise StoreFault(str(error)) from error

    def _check(self) -> CheckReport:
        """Remove entries whose file is gone or not the same, and files that no entry names."""
        broken = [c for c in self._records.values() if not self._is_intact(c)]
        for checkpoint in broken:
            del self._records[checkpoint.id]
            self._remove(checkpoint)
        named = {c.file_name for c in self._records.values()}
        orphans = [name for name in self.files.names() if name not in named]
        for name in orphans:
            self.files.remove(name)
        return CheckReport(len(self._records), len(broken), len(orphans))

    def _is_intact(self, checkpoint: Checkpoint) -> bool:
        try:
            stamp = self.files.stamp(checkpoint.file_name)
            if stamp == checkpoint.file_stamp:
                return True
            # A copied or restored directory has new inodes: its content decides.
            if self.files.checksum(checkpoint.file_name) != checkpoint.checksum:
                return False
        except OSError:
            return False
        self._records[checkpoint.id] = replace(checkpoint, file_stamp=stamp)
        self.index.update([self._records[checkpoint.id]])
        return True


def _lock(directory: Path) -> int:
    try:
        descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StoreFault(f"{directory}: {error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise StoreLocked(f"another llama-prefix-cache uses {directory}") from error
    return descriptor
