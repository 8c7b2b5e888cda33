"""The checkpoints of a store, and the limits on the bytes stored and written.

Nothing here waits or reads a state file: a checkpoint is chosen and marked in one step, and bytes are
found to fit and reserved in one step.
"""

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from itertools import chain, groupby
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import Any

from cachetools import LRUCache

from proxy.core import eviction
from proxy.core.eviction import Present, Rank, Relative, Removal
from proxy.core.model import Candidate, Checkpoint, CheckpointId
from proxy.core.saving import Claim, Written, scarcity, why_refused
from proxy.core.tokens import Namespace, PrefixHash, TokenIds, end_of_block, hash_prefixes
from proxy.errors import WRITE_BUDGET, NoRoom
from proxy.store.index import Index

WRITTEN = "written"


class Budget:
    """The limits, the claims of files that are no checkpoints yet, and the bytes written in the last day.

    At most `max_bytes_per_day` are written within 24 hours; 0 is no limit. The index keeps the count of
    written bytes, so that the count survives a restart.
    """

    def __init__(self, max_bytes: int, max_bytes_per_day: int, index: Index) -> None:
        self.max_bytes, self.max_bytes_per_day = max_bytes, max_bytes_per_day
        self.on_write: Callable[[int], None] = lambda _: None
        self.written = index.value(WRITTEN, Written) or Written()
        self._claims: dict[str, Claim] = {}
        self._settled: dict[str, int] = {}
        """The sizes of files that were written, by name."""

    @property
    def _unwritten_bytes(self) -> int:
        return sum(c.n_bytes for name, c in self._claims.items() if name not in self._settled)

    def reserve(self, name: str, claim: Claim) -> None:
        """Count a file that is about to be written.

        Raises NoRoom if the file is larger than the budget, or not worth the bytes left to write today.
        """
        limit, pending_bytes = self.max_bytes_per_day, self._unwritten_bytes
        refusal = why_refused(claim, self.written, limit, time.time(), pending_bytes)
        if refusal and not claim.is_passing:
            raise NoRoom(WRITE_BUDGET, refusal)
        self._require_possible(claim.n_bytes)
        self._claims[name] = claim

    def settle(self, name: str, n_bytes: int) -> Claim | None:
        """Count a file at its real size; return its claim if room must be made for more than before."""
        claim = self._claims[name]
        n_before, self._settled[name] = self._settled.get(name, claim.n_bytes), n_bytes
        self._require_possible(n_bytes)
        return claim if n_bytes > n_before else None

    def release(self, name: str) -> None:
        """Stop counting a file, which is a checkpoint now or gone."""
        self._claims.pop(name, None)
        self._settled.pop(name, None)

    def shortage(self, stored_bytes: int, usable_bytes: int) -> tuple[int, Removal]:
        """Return how many bytes must be freed so that all claims fit, and the limit that asks for them.

        The claims may take *usable_bytes* of the disk.
        """
        unwritten_bytes = self._unwritten_bytes
        reserved_bytes = unwritten_bytes + sum(self._settled.values())
        over_budget = stored_bytes + reserved_bytes - self.max_bytes
        short_of_free = unwritten_bytes - usable_bytes
        if short_of_free > max(0, over_budget):
            return short_of_free, Removal.FREE_SPACE
        return over_budget, Removal.BUDGET

    def _require_possible(self, n_bytes: int) -> None:
        if n_bytes > self.max_bytes:
            why = f"a state of {n_bytes:,} bytes is more than max_store_bytes ({self.max_bytes:,})"
            raise NoRoom("larger than the budget", why)

    @property
    def last_day_bytes(self) -> int:
        return self.written.last_day_bytes(time.time())

    @property
    def left_bytes(self) -> int | None:
        """How many bytes may still be written now; None if there is no limit."""
        return self.max_bytes_per_day - self.last_day_bytes if self.max_bytes_per_day else None

    @property
    def has_plenty(self) -> bool:
        """Whether no save is refused for its low value, because enough bytes may still be written."""
        left_bytes = self.left_bytes
        return left_bytes is None or scarcity(left_bytes, self.max_bytes_per_day) == 0

    def note_written(self, name: str, n_bytes: int) -> None:
        """Count the bytes written to a file, once."""
        claim = self._claims.get(name)
        if claim is not None and name not in self._settled and n_bytes:
            self.written = self.written.after(n_bytes, claim, time.time())
            self.on_write(n_bytes)


def page_cache_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return how many bytes of files the kernel can probably keep in memory.

    That is half of what is free, or an eighth of all memory where only that is told, as on macOS.
    """
    with suppress(OSError, KeyError, ValueError):
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024 // 2
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8


MAX_COMPARED = 512
"""How many checkpoints one lookup compares token by token, at most."""
_N_SORTED = 32
_N_RELATIVES = 32
"""The loss without a checkpoint is found from this many others: those that share most tokens with it."""
UNREAD_SECONDS = 600.0
"""For so long a checkpoint whose file could not be read is not used: a failing disk may take a minute to
say so, and one that was away comes back."""
_N_DEVALUED = 16
"""How many checkpoints that new ones may have devalued are compared at the next eviction."""


Get = Callable[[CheckpointId], Checkpoint | None]


class Catalogue:
    """The checkpoints that may be used, those in use, and the value of each.

    Records are read from the index when they are needed: memory holds only records newer than the index.
    `version` changes with every record.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self.version = self._n = self.size_bytes = 0
        self._changed: dict[CheckpointId, Checkpoint] = {}
        """Records that are newer than the index."""
        self._asked: dict[CheckpointId, dict[int, float]] = {}
        """By the nearest checkpoint and the number of blocks shared: when a request last shared them."""
        self._scores: dict[CheckpointId, float] = {}
        """Scores newer than those in the index."""
        self._devalued: deque[CheckpointId] = deque(maxlen=_N_DEVALUED)
        self._going: dict[CheckpointId, Checkpoint] = {}
        self._in_use: Counter[CheckpointId] = Counter()
        self._quarantined: set[CheckpointId] = set()
        self._unread_until: dict[CheckpointId, float] = {}
        """When checkpoints whose files could not be read are used again."""
        now = time.time()
        for checkpoint_id, summary in index.summaries():
            self._n += 1
            self.size_bytes += summary.size_bytes
            if not summary.score:
                self._quarantined.add(checkpoint_id)
            if now < summary.score < inf:  # the clock was ahead; it would not be evicted for long
                self._scores[checkpoint_id] = now
        # A restore from the page cache is several times faster than one from the disk. The kernel is asked
        # at the start; then the files last used count as cached, up to half of the memory available.
        self._warm: LRUCache[CheckpointId, int] = LRUCache(page_cache_bytes(), getsizeof=int)

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[Checkpoint]:
        return self._those(self.index.ids())

    def newest(self, n_at_most: int) -> Iterator[Checkpoint]:
        """Yield the checkpoints with the highest scores, mostly those last used."""
        return self._those(self.index.most_valuable(n_at_most))

    def _those(self, ids: Iterable[CheckpointId]) -> Iterator[Checkpoint]:
        return (c for c in map(self.get, ids) if c is not None)

    def get(self, checkpoint_id: CheckpointId) -> Checkpoint | None:
        if checkpoint_id in self._going:
            return None
        return self._changed.get(checkpoint_id) or self.index.record(checkpoint_id)

    @property
    def going_bytes(self) -> int:
        """Bytes of files that are being deleted and may still be there."""
        return sum(checkpoint.size_bytes for checkpoint in self._going.values())

    @property
    def pinned_bytes(self) -> int:
        """The bytes of pinned files, which count in the budget too."""
        return sum(s.size_bytes for _, s in self.index.summaries() if s.score == inf)

    @property
    def quarantined(self) -> Iterator[Checkpoint]:
        """The quarantined checkpoints."""
        return self._those(tuple(self._quarantined))

    # Which checkpoints go to make room.

    def value_seconds(self, checkpoint: Checkpoint, present: Present) -> float:
        """Return the seconds that losing a checkpoint would cost."""
        own, *others = self._relatives(checkpoint, self.get)
        return eviction.value_seconds(checkpoint, eviction.lost_without(own, others), present)

    def victims(
        self, n_bytes: int, present: Present, replaces: Collection[CheckpointId] = ()
    ) -> list[Checkpoint]:
        """Return the checkpoints to remove to free *n_bytes*; fewer if the others are in use or pinned."""
        first = {*self._quarantined, *self._devalued}
        others = (
            (checkpoint, score)
            for i, score in self.index.least_valuable()
            if i not in first and (checkpoint := self.get(i))
        )
        ranks = dict.fromkeys(self._quarantined, Rank.QUARANTINED)
        ranks |= dict.fromkeys(replaces, Rank.BEING_REPLACED)
        relatives = partial(self._relatives, get=cache(self.get))
        victims, scores = eviction.choose_victims(
            chain(self._those(first), eviction.least_likely_first(others, present)),
            n_bytes,
            relatives,
            present,
            ranks,
            self._in_use,
        )
        self._scores |= scores
        return victims

    def _relatives(self, checkpoint: Checkpoint, get: Get) -> list[Relative]:
        """Return a checkpoint, and the checkpoints that share most of its tokens."""
        tokens = self.index.tokens(checkpoint.id)
        hashes = hash_prefixes(checkpoint.namespace, tokens) if tokens else []
        n_blocks = self.index.reaching(hashes, _N_RELATIVES)
        n_blocks.pop(checkpoint.id, None)
        others = ((c, n_blocks[c.id]) for c in map(get, n_blocks) if c is not None)
        return [
            Relative(each, n_shared, self._asked.get(each.id, {}))
            for each, n_shared in ((checkpoint, len(hashes)), *others)
        ]

    # Entering, changing and removing checkpoints.

    def enter(self, checkpoint: Checkpoint) -> None:
        """Note a checkpoint whose file and index entry exist."""
        self.version += 1
        self._n += 1
        self.size_bytes += checkpoint.size_bytes
        if checkpoint.quarantine:
            self._quarantined.add(checkpoint.id)

    def change(self, checkpoint_id: CheckpointId, **changes: Any) -> Checkpoint | None:
        """Change fields of a record; return the new record, None if the checkpoint is gone."""
        old = self.get(checkpoint_id)
        if old is None:
            return None
        self.version += 1
        record = self._changed[checkpoint_id] = replace(old, **changes)
        if record.quarantine:
            self._quarantined.add(checkpoint_id)
        elif old.quarantine:
            self._quarantined.discard(checkpoint_id)
        return record

    def take(self, checkpoint_id: CheckpointId) -> Checkpoint | None:
        """Take a checkpoint out, so that no request finds it during its removal; None if it is gone."""
        checkpoint = self.get(checkpoint_id)
        if checkpoint is None:
            return None
        self.version += 1
        self._n -= 1
        self.size_bytes -= checkpoint.size_bytes
        self._going[checkpoint_id] = checkpoint
        self._warm.pop(checkpoint_id, None)
        return checkpoint

    def put_back(self, checkpoint_id: CheckpointId) -> None:
        """Enter a checkpoint again whose removal failed; a file without an entry goes at the next start."""
        checkpoint = self._going.pop(checkpoint_id)
        if self.index.record(checkpoint_id) is None:
            return self.forget(checkpoint_id)
        self.enter(checkpoint)

    def forget(self, checkpoint_id: CheckpointId) -> None:
        """Note that a checkpoint, taken out before, is no longer on the disk."""
        for known in (self._going, self._changed, self._asked, self._unread_until):
            known.pop(checkpoint_id, None)
        self._quarantined.discard(checkpoint_id)

    def note_written(self, records: Iterable[Checkpoint]) -> None:
        """Note that the index has these records now."""
        for record in records:
            if self._changed.get(record.id) is record:
                del self._changed[record.id]

    # Finding checkpoints.

    def find(self, namespace: Namespace, tokens: TokenIds) -> Iterator[Candidate]:
        """Yield the checkpoints that share at least a block with *tokens*, longest prefix first.

        Their tokens have been compared one by one; a hash alone never names a candidate.
        """
        # Checkpoints that share equally many blocks come in no order. A small group is sorted as a whole;
        # of the thousands behind one header a few at a time, so that their order is right to within a
        # block.
        reaching = self.index.reaching(hash_prefixes(namespace, tokens), MAX_COMPARED)
        wanted = tokens.tobytes() if reaching else b""
        for n_blocks, reached in groupby(reaching.items(), key=itemgetter(1)):
            group, n_most = [i for i, _ in reached], end_of_block(n_blocks + 1)
            n_sorted = len(group) if len(group) <= _N_SORTED else _N_SORTED // 4
            for begin in range(0, len(group), n_sorted):
                some = group[begin : begin + n_sorted]
                found = [
                    Candidate(checkpoint, n_common, self.is_warm(checkpoint))
                    for i, n_common in self.index.common_prefixes(some, wanted, n_most)
                    if (checkpoint := self.get(i)) and checkpoint.namespace == namespace
                    if not self.is_quarantined(checkpoint)
                ]
                yield from sorted(found, key=lambda c: -c.n_common)

    def lineage(self, checkpoint: Checkpoint) -> tuple[CheckpointId, ...]:
        """Return the ids of those ancestors of a checkpoint that still exist, and its own."""
        return (*(i for i in checkpoint.ancestors if self.get(i)), checkpoint.id)

    # Using checkpoints.

    @contextmanager
    def keep(self, checkpoint: Checkpoint) -> Iterator[None]:
        """Keep a checkpoint from eviction between its choice and the end of its restore."""
        self._in_use[checkpoint.id] += 1
        try:
            yield
        finally:
            self._in_use[checkpoint.id] -= 1
            self._in_use += Counter()  # drops zeros

    def quarantine(self, checkpoint: Checkpoint) -> None:
        """Do not use a checkpoint again while this process runs; eviction takes it first."""
        self._quarantined.add(checkpoint.id)
        self.version += 1

    def note_unreadable(self, checkpoint: Checkpoint) -> None:
        """Do not use a checkpoint for a while; unlike in quarantine, eviction does not take it first."""
        self._unread_until[checkpoint.id] = time.monotonic() + UNREAD_SECONDS
        self.version += 1

    def is_quarantined(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint is not to be used, in quarantine or because it could not be read."""
        is_unread = self._unread_until.get(checkpoint.id, 0.0) > time.monotonic()
        return is_unread or checkpoint.id in self._quarantined

    def note_asked(self, namespace: Namespace, tokens: TokenIds) -> None:
        """Note that a request has this prompt: the tokens that it shares with checkpoints are in use."""
        now = time.time()
        for nearest, n_blocks in self.index.reaching(hash_prefixes(namespace, tokens), 1).items():
            earlier = self._asked.get(nearest, {})
            longer = {n: asked_at for n, asked_at in earlier.items() if n > n_blocks}
            self._asked[nearest] = longer | {n_blocks: now}

    def note_read(self, checkpoint: Checkpoint) -> None:
        """Note that the whole file of a checkpoint was just written or read."""
        if self.get(checkpoint.id):
            with suppress(ValueError):  # larger than the page cache
                self._warm[checkpoint.id] = checkpoint.size_bytes

    def is_warm(self, checkpoint: Checkpoint) -> bool:
        """Return whether the file of a checkpoint is likely in the page cache."""
        return checkpoint.id in self._warm

    def note_restored(self, checkpoint: Checkpoint) -> None:
        self.note_read(checkpoint)
        if record := self.get(checkpoint.id):
            self.change(record.id, last_used_at=time.time(), n_restores=record.n_restores + 1)

    def note_verified(self, checkpoint: Checkpoint) -> None:
        """Note that the file of a checkpoint was just found to be what was saved."""
        self._unread_until.pop(checkpoint.id, None)
        self.change(checkpoint.id, verified_at=time.time())

    def note_devalued(self, hashes: Sequence[PrefixHash]) -> None:
        """Note that a new checkpoint has these prefixes: others with the same may have lost value."""
        self._devalued.extend(self.index.reaching(hashes, _N_DEVALUED // 2))
