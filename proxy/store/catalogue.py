"""All checkpoints in memory, and the bytes that they may take and that may be written.

Nothing here waits or looks at a file: what is chosen is also marked in the same step, and what fits is also
reserved.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cachetools import LRUCache

from proxy.core.eviction import Gone, Lineage, Present, Removal, choose_victims, value_seconds
from proxy.core.model import Checkpoint, CheckpointId
from proxy.core.saving import Claim, Written, scarcity, why_refused
from proxy.core.tokens import Namespace, PrefixHash, TokenIds, hash_prefixes
from proxy.errors import WRITE_BUDGET, NoRoom
from proxy.store.index import Index


@dataclass(frozen=True, slots=True)
class Limits:
    """At most `max_bytes` of state files, and at least `min_free_bytes` left free on their disk.

    No more than `max_write_bytes_per_day` are written within 24 hours; 0 is no limit.
    """

    max_bytes: int
    min_free_bytes: int = 0
    max_write_bytes_per_day: int = 0


_WRITTEN = "written"


class Budget:
    """The limits, what is claimed for files that are no checkpoints yet, and what was written in a day.

    The bytes that llama-server was let write are counted across restarts, by a value in the index.
    """

    def __init__(self, limits: Limits, index: Index) -> None:
        self.limits, self.max_bytes_per_day = limits, limits.max_write_bytes_per_day
        self.on_write: Callable[[int], None] = lambda _: None
        self._index = index
        self._written = index.value(_WRITTEN, Written) or Written()
        self._claims: dict[str, Claim] = {}
        self._settled: dict[str, int] = {}
        """The sizes of files that were written, by name."""

    @property
    def _unwritten_bytes(self) -> int:
        return sum(c.n_bytes for name, c in self._claims.items() if name not in self._settled)

    def reserve(self, name: str, claim: Claim) -> None:
        """Count a file that is about to be written.

        Raises NoRoom if it is too large in any case, or not worth what may still be written today.
        """
        limit, pending_bytes = self.max_bytes_per_day, self._unwritten_bytes
        refusal = why_refused(claim, self._written, limit, time.time(), pending_bytes)
        if refusal and not claim.is_passing:
            raise NoRoom(WRITE_BUDGET, refusal)
        self._require_possible(claim.n_bytes)
        self._claims[name] = claim

    def settle(self, name: str, n_bytes: int) -> Claim:
        """Count a file as it was written; return what was claimed for it."""
        self._settled[name] = n_bytes
        self._require_possible(n_bytes)
        return self._claims[name]

    def release(self, name: str) -> None:
        """Count a file no more: it is a checkpoint now, or gone."""
        self._claims.pop(name, None)
        self._settled.pop(name, None)

    def shortage(self, claim: Claim, stored_bytes: int, free_bytes: int) -> tuple[int, Removal]:
        """Return how many bytes are missing for all claims to fit, and by which limit."""
        unwritten_bytes = self._unwritten_bytes
        reserved_bytes = unwritten_bytes + sum(self._settled.values())
        over_budget = stored_bytes + reserved_bytes - self.limits.max_bytes
        min_free_bytes = 0 if claim.is_passing else self.limits.min_free_bytes
        short_of_free = unwritten_bytes + min_free_bytes - free_bytes
        if short_of_free > max(0, over_budget):
            return short_of_free, Removal.FREE_SPACE
        return over_budget, Removal.BUDGET

    def _require_possible(self, n_bytes: int) -> None:
        if n_bytes > self.limits.max_bytes:
            raise NoRoom(
                "larger than the budget",
                f"a state of {n_bytes:,} bytes is more than max_store_bytes ({self.limits.max_bytes:,})",
            )

    @property
    def last_day_bytes(self) -> int:
        return self._written.last_day_bytes(time.time())

    @property
    def left_bytes(self) -> int | None:
        """How much may be written now; None if there is no limit."""
        return self.max_bytes_per_day - self.last_day_bytes if self.max_bytes_per_day else None

    @property
    def has_plenty(self) -> bool:
        """Whether so much may still be written that no save is refused for its little value."""
        left_bytes = self.left_bytes
        return left_bytes is None or scarcity(left_bytes, self.max_bytes_per_day) == 0

    def note_written(self, name: str, n_bytes: int) -> Callable[[], None]:
        """Count what was written to a file, once; return what puts the count into the index."""
        claim = self._claims.get(name)
        if claim is None or name in self._settled or not n_bytes:
            return lambda: None
        self._written = self._written.after(n_bytes, claim, time.time())
        self.on_write(n_bytes)
        return partial(self._index.put_value, _WRITTEN, self._written)


_FALLBACK_BYTES = 8 << 30
"""Taken where the system does not say how much memory is free."""


def page_cache_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return how many bytes of files the kernel may well keep in memory."""
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024 // 2
    except (OSError, KeyError, ValueError):
        return _FALLBACK_BYTES


class Catalogue:
    """The records of the checkpoints that may be used, which of them are in use, and their value.

    `version` changes with every record.
    """

    def __init__(self) -> None:
        self.version = 0
        self._records: dict[CheckpointId, Checkpoint] = {}
        self._going: dict[CheckpointId, tuple[Checkpoint, Sequence[PrefixHash]]] = {}
        self._lineage = Lineage()
        self._in_use: Counter[CheckpointId] = Counter()
        self._touched: set[CheckpointId] = set()
        self._quarantined: set[CheckpointId] = set()
        # A restore from the page cache is several times faster than one from the disk. The kernel is not
        # asked: the files last used that fit into half of the memory that was available at the start count.
        self._warm: LRUCache[CheckpointId, Checkpoint] = LRUCache(
            page_cache_bytes(), getsizeof=lambda checkpoint: checkpoint.size_bytes
        )

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(tuple(self._records.values()))

    def get(self, checkpoint_id: CheckpointId) -> Checkpoint | None:
        return self._records.get(checkpoint_id)

    @property
    def size_bytes(self) -> int:
        return sum(c.size_bytes for c in self._records.values())

    @property
    def pinned_bytes(self) -> int:
        """Bytes of files that an operator keeps; they count in the budget."""
        return sum(c.size_bytes for c in self._records.values() if c.is_pinned)

    @property
    def going_bytes(self) -> int:
        """Bytes of files that are being deleted and may still be there."""
        return sum(checkpoint.size_bytes for checkpoint, _ in self._going.values())

    def value_seconds(self, checkpoint: Checkpoint, present: Present) -> float:
        """Return the seconds that losing a checkpoint would cost."""
        return value_seconds(checkpoint, self._lineage.only_in(checkpoint.id, Gone()), present)

    def victims(
        self, n_bytes: int, present: Present, replaces: Collection[CheckpointId] = ()
    ) -> list[Checkpoint]:
        """Return what to remove for *n_bytes* more room; less if the rest is in use or pinned."""
        return choose_victims(
            self._records.values(),
            n_bytes,
            self._lineage,
            present,
            in_use=set(self._in_use),
            quarantined=self._quarantined,
            being_replaced=replaces,
        )

    def enter(self, checkpoint: Checkpoint, hashes: Sequence[PrefixHash]) -> None:
        """Add a checkpoint whose file and index entry are there."""
        self._records[checkpoint.id] = checkpoint
        self.version += 1
        self._lineage.add(checkpoint, hashes)
        if checkpoint.quarantine:
            self._quarantined.add(checkpoint.id)

    def change(self, checkpoint_id: CheckpointId, **changes: Any) -> Checkpoint | None:
        """Change fields of a record; return the new record, None if the checkpoint is gone."""
        record = self._records.get(checkpoint_id)
        if record is not None:
            self.version += 1
            record = self._records[checkpoint_id] = replace(record, **changes)
            if record.quarantine:
                self._quarantined.add(checkpoint_id)
        return record

    def enter_elsewhere(self, checkpoint: Checkpoint, hashes: Sequence[PrefixHash]) -> None:
        """Note that a checkpoint is found by other prefixes now."""
        if checkpoint.id in self._records:
            self._lineage.remove(checkpoint.id)
            self.enter(checkpoint, hashes)

    def take(self, checkpoint_id: CheckpointId) -> Checkpoint | None:
        """Take a checkpoint out, so that nobody finds it while it is removed; None if it is gone."""
        checkpoint = self._records.pop(checkpoint_id, None)
        self._warm.pop(checkpoint_id, None)
        if checkpoint is not None:
            self.version += 1
            self._going[checkpoint_id] = checkpoint, self._lineage.remove(checkpoint_id)
        return checkpoint

    def put_back(self, checkpoint_id: CheckpointId) -> None:
        """Enter a checkpoint again whose removal failed."""
        self.enter(*self._going.pop(checkpoint_id))

    def forget(self, checkpoint_id: CheckpointId) -> None:
        """Note that a checkpoint that was taken out is no longer on the disk."""
        self._going.pop(checkpoint_id, None)
        self._quarantined.discard(checkpoint_id)

    @contextmanager
    def keep(self, checkpoint: Checkpoint) -> Iterator[None]:
        """Keep a checkpoint from eviction between its choice and the end of its restore."""
        self._in_use[checkpoint.id] += 1
        try:
            yield
        finally:
            self._in_use[checkpoint.id] -= 1
            self._in_use += Counter()  # without zeros

    def is_in_use(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.id in self._in_use

    def quarantine(self, checkpoint: Checkpoint) -> None:
        """Offer a checkpoint no more while this process runs; eviction takes it first."""
        self._quarantined.add(checkpoint.id)
        self.version += 1

    def is_quarantined(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.id in self._quarantined

    def note_asked(self, namespace: Namespace, tokens: TokenIds) -> None:
        """Note that a request has this prompt: what it shares with checkpoints is alive."""
        self._lineage.note_asked(hash_prefixes(namespace, tokens), time.time())

    def note_read(self, checkpoint: Checkpoint) -> None:
        """Note that the whole file of a checkpoint was just written or read."""
        if checkpoint.id in self._records:
            with suppress(ValueError):  # larger than the page cache
                self._warm[checkpoint.id] = checkpoint

    def is_warm(self, checkpoint: Checkpoint) -> bool:
        """Return whether the file of a checkpoint is likely in the page cache."""
        return checkpoint.id in self._warm

    def note_restored(self, checkpoint: Checkpoint) -> None:
        self.note_read(checkpoint)
        if record := self.get(checkpoint.id):
            n_restores = record.n_restores + 1
            self.change(record.id, last_used_at=time.time(), n_restores=n_restores)
            self._touched.add(record.id)

    def note_verified(self, checkpoint: Checkpoint) -> None:
        """Note that the file of a checkpoint was just found to be what was saved."""
        if record := self.get(checkpoint.id):
            self._records[record.id] = replace(record, verified_at=time.time())
            self._touched.add(record.id)

    def take_touched(self) -> list[Checkpoint]:
        """Return the records that are newer than the index, once."""
        touched, self._touched = self._touched, set()
        return [self._records[i] for i in touched if i in self._records]
