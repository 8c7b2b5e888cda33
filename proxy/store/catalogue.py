"""All checkpoints in memory, and the bytes that they may take."""

import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from proxy.core.eviction import (
    Gone,
    Lineage,
    Present,
    Removal,
    choose_victims,
    value_seconds,
)
from proxy.core.model import Checkpoint, CheckpointId, Quarantine
from proxy.core.saving import WantedSave
from proxy.core.tokens import PrefixHash
from proxy.errors import NoRoom

# Which state files are likely in the page cache: those that were saved or restored lately.
#
# A restore from memory is several times faster than one from the disk. The kernel is not asked: the files
# last used that fit into half of the memory that was available at the start count as warm.


_FALLBACK_BYTES = 8 << 30
"""Taken where the system does not say how much memory is free."""


class WarmFiles:
    """The checkpoints whose files were written or read last, up to *max_bytes* of them."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sizes: OrderedDict[CheckpointId, int] = OrderedDict()
        self._size_bytes = 0

    def __contains__(self, checkpoint_id: CheckpointId) -> bool:
        return checkpoint_id in self._sizes

    def note(self, checkpoint: Checkpoint) -> None:
        """Note that the whole file was just written or read."""
        self.forget(checkpoint.id)
        self._sizes[checkpoint.id] = checkpoint.size_bytes
        self._size_bytes += checkpoint.size_bytes
        while self._size_bytes > self._max_bytes:
            _, size_bytes = self._sizes.popitem(last=False)
            self._size_bytes -= size_bytes

    def forget(self, checkpoint_id: CheckpointId) -> None:
        self._size_bytes -= self._sizes.pop(checkpoint_id, 0)


def page_cache_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return how many bytes of files the kernel may well keep in memory."""
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024 // 2
    except (OSError, KeyError, ValueError):
        return _FALLBACK_BYTES


# How many bytes the store may take, those of files that are still being written included.
#
# Owns: the two limits and what is reserved under them. Nothing here waits or looks at a disk, so that
# what fits is reserved in the same step.


@dataclass(frozen=True, slots=True)
class Limits:
    """At most `max_bytes` of state files, and at least `min_free_bytes` left free on their disk.

    No more than `max_write_bytes_per_day` are written within 24 hours; 0 is no limit.
    """

    max_bytes: int
    min_free_bytes: int = 0
    max_write_bytes_per_day: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """What room is made for: a file of at most *n_bytes*, seen from the *present*.

    `replaces` are the checkpoints that it will make needless, `spared_seconds` what it would take to
    evaluate what only this file will have (None: not known). A `passing` file is deleted as soon as it was
    looked at; the free space may be short for so long, and what may be written in a day does not limit it.
    """

    n_bytes: int
    present: Present
    replaces: frozenset[CheckpointId] = frozenset()
    is_passing: bool = False
    spared_seconds: float | None = None

    @property
    def wanted(self) -> WantedSave:
        return WantedSave(self.n_bytes, self.spared_seconds)


@dataclass(slots=True)
class _Reserved:
    claim: Claim
    n_bytes: int
    is_written: bool = False


@dataclass(frozen=True, slots=True)
class Shortage:
    """So many bytes have to go, and which limit says so."""

    n_bytes: int
    reason: Removal


@dataclass
class Budget:
    """The limits, and the reservations of files that are no checkpoints yet, by file name."""

    limits: Limits
    _reserved: dict[str, _Reserved] = field(default_factory=dict)

    @property
    def reserved_bytes(self) -> int:
        return sum(r.n_bytes for r in self._reserved.values())

    @property
    def unwritten_bytes(self) -> int:
        return sum(r.n_bytes for r in self._reserved.values() if not r.is_written)

    def unwritten(self, name: str) -> Claim | None:
        """Return what was claimed for a file, unless it was settled or released."""
        reserved = self._reserved.get(name)
        return None if reserved is None or reserved.is_written else reserved.claim

    def reserve(self, name: str, claim: Claim) -> None:
        """Count a file that is about to be written; raises NoRoom if it is too large in any case."""
        self._require_possible(claim.n_bytes)
        self._reserved[name] = _Reserved(claim, claim.n_bytes)

    def settle(self, name: str, n_bytes: int) -> Claim:
        """Count a file as it was written; return what was claimed for it."""
        reserved = self._reserved[name]
        reserved.n_bytes, reserved.is_written = n_bytes, True
        self._require_possible(n_bytes)
        return reserved.claim

    def release(self, name: str) -> None:
        """Count a file no more: it is a checkpoint now, or gone."""
        self._reserved.pop(name, None)

    def shortage(self, claim: Claim, stored_bytes: int, free_bytes: int) -> Shortage:
        """Return what is missing for all reservations, *claim*'s included, to fit."""
        over_budget = stored_bytes + self.reserved_bytes - self.limits.max_bytes
        wanted_bytes = self.unwritten_bytes + (
            0 if claim.is_passing else self.limits.min_free_bytes
        )
        short_of_free = wanted_bytes - free_bytes
        if short_of_free > max(0, over_budget):
            return Shortage(short_of_free, Removal.FREE_SPACE)
        return Shortage(over_budget, Removal.BUDGET)

    def _require_possible(self, n_bytes: int) -> None:
        if n_bytes > self.limits.max_bytes:
            raise NoRoom(
                "larger than the budget",
                f"a state of {n_bytes:,} bytes is more than max_store_bytes ({self.limits.max_bytes:,})",
            )


# All checkpoints in memory: their records, who uses them, and their value.
#
# Nothing here waits or touches a file: whatever is chosen is also marked in the same step.


class Catalogue:
    """The records of the checkpoints that may be offered."""

    def __init__(self) -> None:
        self._warm = WarmFiles(page_cache_bytes())
        self._records: dict[CheckpointId, Checkpoint] = {}
        self.version = 0
        self._going: dict[CheckpointId, tuple[Checkpoint, Sequence[PrefixHash]]] = {}
        self._lineage = Lineage()
        self._in_use: Counter[CheckpointId] = Counter()
        self._touched: set[CheckpointId] = set()
        self._quarantined: set[CheckpointId] = set()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(tuple(self._records.values()))

    def get(self, checkpoint_id: CheckpointId) -> Checkpoint | None:
        return self._records.get(checkpoint_id)

    def enter(self, checkpoint: Checkpoint, hashes: Sequence[PrefixHash]) -> None:
        """Add a checkpoint whose file and index entry are there."""
        self._records[checkpoint.id] = checkpoint
        self.version += 1
        self._lineage.add(checkpoint, hashes)
        if checkpoint.quarantine:
            self._quarantined.add(checkpoint.id)

    @property
    def size_bytes(self) -> int:
        return sum(c.size_bytes for c in self._records.values())

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
        in_use = {i for i, n in self._in_use.items() if n}
        return choose_victims(
            self._records.values(),
            n_bytes,
            self._lineage,
            present,
            in_use=in_use,
            quarantined=self._quarantined,
            being_replaced=replaces,
        )

    def is_in_use(self, checkpoint_id: CheckpointId) -> bool:
        return self._in_use[checkpoint_id] > 0

    def take(self, checkpoint_id: CheckpointId) -> Checkpoint | None:
        """Take a checkpoint out, so that nobody finds it while it is removed; None if it is gone."""
        checkpoint = self._records.pop(checkpoint_id, None)
        self._warm.forget(checkpoint_id)
        if checkpoint is not None:
            self.version += 1
            self._going[checkpoint_id] = checkpoint, self._lineage.remove(checkpoint_id)
        return checkpoint

    def put_back(self, checkpoint_id: CheckpointId) -> None:
        """Offer a checkpoint again whose removal failed."""
        self.enter(*self._going.pop(checkpoint_id))

    def forget(self, checkpoint_id: CheckpointId) -> None:
        """Note that a checkpoint that was taken out is no longer on the disk."""
        self._going.pop(checkpoint_id, None)
        self._quarantined.discard(checkpoint_id)

    @contextmanager
    def keep(self, checkpoint_id: CheckpointId) -> Iterator[None]:
        self._in_use[checkpoint_id] += 1
        try:
            yield
        finally:
            self._in_use[checkpoint_id] -= 1
            if not self._in_use[checkpoint_id]:
                del self._in_use[checkpoint_id]

    def quarantine(
        self, checkpoint_id: CheckpointId, quarantine: Quarantine | None = None
    ) -> Checkpoint | None:
        """Offer a checkpoint no more; return its record with the *quarantine*, None if it is gone."""
        self._quarantined.add(checkpoint_id)
        return self._replace(checkpoint_id, quarantine=quarantine)

    def is_quarantined(self, checkpoint_id: CheckpointId) -> bool:
        return checkpoint_id in self._quarantined

    def note_asked(self, hashes: Sequence[PrefixHash]) -> None:
        """Note that a request begins with these prefixes, wherever it finds their state."""
        self._lineage.note_asked(hashes, time.time())

    def note_read(self, checkpoint: Checkpoint) -> None:
        """Note that the file of a checkpoint was just written or read."""
        if checkpoint.id in self._records:
            self._warm.note(checkpoint)

    def is_warm(self, checkpoint_id: CheckpointId) -> bool:
        """Return whether the file of a checkpoint is likely in the page cache."""
        return checkpoint_id in self._warm

    def touch(self, checkpoint_id: CheckpointId) -> None:
        """Note that a checkpoint was restored."""
        if record := self._records.get(checkpoint_id):
            self._warm.note(record)
            self.version += 1
            self._records[checkpoint_id] = replace(
                record, last_used_at=time.time(), n_restores=record.n_restores + 1
            )
            self._touched.add(checkpoint_id)

    def note_verified(self, checkpoint_id: CheckpointId) -> None:
        """Note that the file of a checkpoint was just found to be what was saved."""
        if record := self._records.get(checkpoint_id):
            self._records[checkpoint_id] = replace(record, verified_at=time.time())
            self._touched.add(checkpoint_id)

    def set_pinned(self, checkpoint_id: CheckpointId, *, is_pinned: bool) -> Checkpoint | None:
        """Pin or unpin a checkpoint; None if it is gone."""
        return self._replace(checkpoint_id, is_pinned=is_pinned)

    def _replace(self, checkpoint_id: CheckpointId, **changes: Any) -> Checkpoint | None:
        record = self._records.get(checkpoint_id)
        if record is not None:
            self.version += 1
            record = self._records[checkpoint_id] = replace(record, **changes)
        return record

    def move(self, checkpoint: Checkpoint, hashes: Sequence[PrefixHash]) -> None:
        """Note that a checkpoint is found by other prefixes now."""
        if checkpoint.id in self._records:
            self._lineage.remove(checkpoint.id)
            self.enter(checkpoint, hashes)

    def take_touched(self) -> list[Checkpoint]:
        """Return the records that are newer than the index, once."""
        touched, self._touched = self._touched, set()
        return [self._records[i] for i in touched if i in self._records]
