"""All checkpoints in memory: their records, who uses them, and their value.

Nothing here waits or touches a file: whatever is chosen is also marked in the same step.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from proxy.core.keeping.eviction import Exempt, Present, choose_victims, value_seconds
from proxy.core.keeping.lineage import Gone, Lineage
from proxy.core.model import Checkpoint, CheckpointId
from proxy.core.prefix import PrefixHash
from proxy.store.warmth import WarmFiles, page_cache_bytes


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
        exempt = Exempt(in_use, self._quarantined, replaces)
        return choose_victims(self._records.values(), n_bytes, self._lineage, present, exempt)

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

    def quarantine(self, checkpoint_id: CheckpointId) -> None:
        self._quarantined.add(checkpoint_id)

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

    def set_pinned(self, checkpoint_id: CheckpointId, *, is_pinned: bool) -> Checkpoint | None:
        """Pin or unpin a checkpoint; None if it is gone."""
        record = self._records.get(checkpoint_id)
        if record is not None:
            self.version += 1
            record = self._records[checkpoint_id] = replace(record, is_pinned=is_pinned)
        return record

    def take_touched(self) -> list[Checkpoint]:
        """Return the records that are newer than the index, once."""
        touched, self._touched = self._touched, set()
        return [self._records[i] for i in touched if i in self._records]
