"""Who goes when room is needed: our policy, those of the literature, and two that know the future.

All choose among the same files, which replace each other by the same rule; a file that goes on from
another one is the same object to them, used once more.
"""

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator
from heapq import heapify, heappop, heappush
from itertools import chain
from math import inf

from proxy.core.eviction import Present, Rank, choose_victims, least_likely_first, score_of
from proxy.core.model import CheckpointId
from tests.bench.eviction.shelf import File, Shelf
from tests.bench.eviction.trace import Asked

Sizes = OrderedDict[CheckpointId, int]


class Policy:
    """Told what is used, stored and gone; says who goes first."""

    def __init__(self, shelf: Shelf, budget_bytes: int, trace: list[Asked]) -> None:
        self.shelf, self.budget_bytes = shelf, budget_bytes
        self.uses: defaultdict[CheckpointId, int] = defaultdict(int)

    def on_use(self, file: File, now: float) -> None:
        """A request was served from a file."""

    def on_put(self, file: File, replaced: list[File], now: float) -> None:
        """A file was stored; those *replaced* are still known, and told as gone next."""

    def on_gone(self, file: File) -> None:
        """A file was removed."""

    def order(self, now: float, spared: Collection[CheckpointId]) -> Iterator[CheckpointId]:
        """Yield who goes, the first first, but none of the *spared*."""
        raise NotImplementedError

    def victims(self, n_bytes: int, now: float, replaces: Collection[CheckpointId]) -> list[File]:
        """Return files of *n_bytes*; those that the new one *replaces* go last."""
        chosen: list[File] = []
        last = [self.shelf.files[i] for i in replaces]
        files = (self.shelf.files[i] for i in self.order(now, replaces))
        while n_bytes > 0 and (file := next(files, None) or (last.pop() if last else None)):
            chosen.append(file)
            n_bytes -= file.checkpoint.size_bytes
        return chosen


class Ours(Policy):
    """The product's own, from proxy/core/eviction.py."""

    def __init__(self, shelf: Shelf, budget_bytes: int, trace: list[Asked]) -> None:
        super().__init__(shelf, budget_bytes, trace)
        self._order: list[tuple[float, CheckpointId]] = []
        self._scores: dict[CheckpointId, float] = {}
        self._devalued: list[CheckpointId] = []

    def on_use(self, file: File, now: float) -> None:
        self._score(file.checkpoint.id, score_of(file.checkpoint, [file.checkpoint.last_used_at]))

    def on_put(self, file: File, replaced: list[File], now: float) -> None:
        self.on_use(file, now)
        sharing = self.shelf.sharing(file.asked, N_DEVALUED // 2)
        self._devalued = [*self._devalued, *(f.checkpoint.id for f, _ in sharing)][-N_DEVALUED:]

    def on_gone(self, file: File) -> None:
        self._drop(file.checkpoint.id)

    def _drop(self, checkpoint_id: CheckpointId) -> None:
        if (score := self._scores.pop(checkpoint_id, None)) is not None:
            del self._order[bisect_left(self._order, (score, checkpoint_id))]

    def _score(self, checkpoint_id: CheckpointId, score: float) -> None:
        self._drop(checkpoint_id)
        self._scores[checkpoint_id] = score
        insort(self._order, (score, checkpoint_id))

    def victims(self, n_bytes: int, now: float, replaces: Collection[CheckpointId]) -> list[File]:
        files, present = self.shelf.files, Present(now)
        first = dict.fromkeys(i for i in self._devalued if i in files)
        others = ((files[i].checkpoint, score) for score, i in self._order if i not in first)
        victims, scores = choose_victims(
            chain((files[i].checkpoint for i in first), least_likely_first(others, present)),
            n_bytes,
            self.shelf.relatives,
            present,
            dict.fromkeys(replaces, Rank.BEING_REPLACED),
        )
        for checkpoint_id, score in scores.items():
            self._score(checkpoint_id, score)
        return [self.shelf.files[v.id] for v in victims]


N_DEVALUED = 16
"""As in proxy/store/catalogue.py."""


class Lru(Policy):
    """The longest unused goes."""

    def __init__(self, shelf: Shelf, budget_bytes: int, trace: list[Asked]) -> None:
        super().__init__(shelf, budget_bytes, trace)
        self.queue: Sizes = OrderedDict()

    def on_use(self, file: File, now: float) -> None:
        self.queue.move_to_end(file.checkpoint.id)

    def on_put(self, file: File, replaced: list[File], now: float) -> None:
        self.queue[file.checkpoint.id] = file.checkpoint.size_bytes

    def on_gone(self, file: File) -> None:
        self.queue.pop(file.checkpoint.id, None)

    def order(self, now: float, spared: Collection[CheckpointId]) -> Iterator[CheckpointId]:
        return (i for i in list(self.queue) if i not in spared)


class _ByPriority(Policy):
    """The lowest priority goes; a heap, whose outdated entries are skipped."""

    def __init__(self, shelf: Shelf, budget_bytes: int, trace: list[Asked]) -> None:
        super().__init__(shelf, budget_bytes, trace)
        self.now: dict[CheckpointId, tuple[float, float]] = {}
        self.heap: list[tuple[tuple[float, float], CheckpointId]] = []

    def priority(self, file: File, now: float) -> float:
        raise NotImplementedError

    def _set(self, file: File, now: float) -> None:
        self.now[file.checkpoint.id] = self.priority(file, now), now
        heappush(self.heap, (self.now[file.checkpoint.id], file.checkpoint.id))
        if len(self.heap) > 4 * len(self.now) + 64:
            self.heap = [(priority, i) for i, priority in self.now.items()]
            heapify(self.heap)

    def on_use(self, file: File, now: float) -> None:
        self.uses[file.checkpoint.id] += 1
        self._set(file, now)

    def on_put(self, file: File, replaced: list[File], now: float) -> None:
        self.uses[file.checkpoint.id] = max(
            (self.uses[f.checkpoint.id] for f in replaced), default=1
        )
        self._set(file, now)

    def on_gone(self, file: File) -> None:
        self.now.pop(file.checkpoint.id, None)
        self.uses.pop(file.checkpoint.id, None)

    def order(self, now: float, spared: Collection[CheckpointId]) -> Iterator[CheckpointId]:
        skipped: list[tuple[tuple[float, float], CheckpointId]] = []
        taken: set[CheckpointId] = set()  # an entry may be there twice
        try:
            while self.heap:
                entry = heappop(self.heap)
                if self.now.get(entry[1]) != entry[0] or entry[1] in taken:
                    continue
                taken.add(entry[1])
                if entry[1] in spared:
                    skipped.append(entry)
                else:
                    yield entry[1]
        finally:
            for entry in skipped:
                heappush(self.heap, entry)


class Lfu(_ByPriority):
    """The least often used goes, of equals the longest unused."""

    def priority(self, file: File, now: float) -> float:
        return float(self.uses[file.checkpoint.id])


class Gdsf(_ByPriority):
    """GreedyDual-Size-Frequency: uses times cost by size, plus the priority of the last that went."""

    clock = 0.0

    def priority(self, file: File, now: float) -> float:
        checkpoint = file.checkpoint
        cost = checkpoint.n_tokens / checkpoint.size_bytes
        return self.clock + self.uses[checkpoint.id] * cost

    def on_gone(self, file: File) -> None:
        if file.checkpoint.id in self._going:
            self.clock = max(self.clock, self.now[file.checkpoint.id][0])
        super().on_gone(file)

    _going: frozenset[CheckpointId] = frozenset()

    def victims(self, n_bytes: int, now: float, replaces: Collection[CheckpointId]) -> list[File]:
        chosen = super().victims(n_bytes, now, replaces)
        self._going = frozenset(f.checkpoint.id for f in chosen)
        return chosen


class Slru(Policy):
    """Segmented LRU: what was used again is protected, in at most four fifths of the budget."""

    PROTECTED_SHARE = 0.8

    def __init__(self, shelf: Shelf, budget_bytes: int, trace: list[Asked]) -> None:
        super().__init__(shelf, budget_bytes, trace)
        self.probation: Sizes = OrderedDict()
        self.protected: Sizes = OrderedDict()

    def _protect(self, file: File) -> None:
        checkpoint_id, size_bytes = file.checkpoint.id, file.checkpoint.size_bytes
        self.probation.pop(checkpoint_id, None)
        self.protected[checkpoint_id] = size_bytes
        self.protected.move_to_end(checkpoint_id)
        while sum(self.protected.values()) > self.PROTECTED_SHARE * self.budget_bytes:
            demoted, n_bytes = self.protected.popitem(last=False)
            self.probation[demoted] = n_bytes

    def on_use(self, file: File, now: float) -> None:
        self._protect(file)

    def on_put(self, file: File, replaced: list[File], now: float) -> None:
        if replaced:
            self._protect(file)
        else:
            self.probation[file.checkpoint.id] = file.checkpoint.size_bytes

    def on_gone(self, file: File) -> None:
        self.probation.pop(file.checkpoint.id, None)
        self.protected.pop(file.checkpoint.id, None)

    def order(self, now: float, spared: Collection[CheckpointId]) -> Iterator[CheckpointId]:
        return (i for i in [*self.probation, *self.protected] if i not in spared)


class S3Fifo(Policy):
    """S3-FIFO (SOSP 2023): a small queue of a tenth, a main queue, and the ghosts of the small one."""

    SMALL_SHARE = 0.1
    MOST_USES = 3

    def __init__(self, shelf: Shelf, budget_bytes: int, trace: list[Asked]) -> None:
        super().__init__(shelf, budget_bytes, trace)
        self.small: Sizes = OrderedDict()
        self.main: Sizes = OrderedDict()
        self.ghosts: OrderedDict[int, int] = OrderedDict()
        """By the first block that is a conversation's own; an object that is gone has no other name."""

    def on_use(self, file: File, now: float) -> None:
        checkpoint_id = file.checkpoint.id
        self.uses[checkpoint_id] = min(self.MOST_USES, self.uses[checkpoint_id] + 1)

    def on_put(self, file: File, replaced: list[File], now: float) -> None:
        checkpoint_id, size_bytes = file.checkpoint.id, file.checkpoint.size_bytes
        is_ghost = any(block in self.ghosts for block in file.asked.blocks[1:])
        was_in_main = any(f.checkpoint.id in self.main for f in replaced)
        self.uses[checkpoint_id] = max((self.uses[f.checkpoint.id] for f in replaced), default=0)
        queue = self.main if is_ghost or was_in_main else self.small
        queue[checkpoint_id] = size_bytes

    def on_gone(self, file: File) -> None:
        self.small.pop(file.checkpoint.id, None)
        self.main.pop(file.checkpoint.id, None)
        self.uses.pop(file.checkpoint.id, None)

    def order(self, now: float, spared: Collection[CheckpointId]) -> Iterator[CheckpointId]:
        while (self.small.keys() | self.main.keys()) - set(spared):
            is_small_full = sum(self.small.values()) >= self.SMALL_SHARE * self.budget_bytes
            has_other = bool(self.main.keys() - set(spared))
            is_small = bool(self.small) and (is_small_full or not has_other)
            queue = self.small if is_small else self.main
            checkpoint_id, size_bytes = queue.popitem(last=False)
            n_uses = self.uses[checkpoint_id]
            if checkpoint_id in spared or n_uses > (1 if is_small else 0):
                self.uses[checkpoint_id] = 0 if is_small else max(0, n_uses - 1)
                self.main[checkpoint_id] = size_bytes
                continue
            if is_small:
                self._remember(checkpoint_id)
            yield checkpoint_id

    def _remember(self, checkpoint_id: CheckpointId) -> None:
        for block in self.shelf.files[checkpoint_id].asked.blocks[1:2]:
            self.ghosts[block] = 1
        while len(self.ghosts) > max(64, len(self.main)):
            self.ghosts.popitem(last=False)


class Clairvoyant(_ByPriority):
    """Belady's rule for whole files: whose own tokens are wanted again last goes, never wanted first."""

    def __init__(self, shelf: Shelf, budget_bytes: int, trace: list[Asked]) -> None:
        super().__init__(shelf, budget_bytes, trace)
        self._wanted: defaultdict[int, list[float]] = defaultdict(list)
        for asked in trace:
            for block in asked.blocks:
                self._wanted[block].append(asked.at)

    def on_use(self, file: File, now: float) -> None:
        for other, _ in self.shelf.sharing(file.asked, 8):
            self._set(other, now)

    def priority(self, file: File, now: float) -> float:
        own = next((b for b in file.asked.blocks if self.shelf.n_with(b) == 1), None)
        times = self._wanted[own] if own is not None else []
        index = bisect_right(times, now)
        return -times[index] if index < len(times) else -inf


POLICIES: dict[str, type[Policy]] = {
    "ours": Ours,
    "LRU": Lru,
    "LFU": Lfu,
    "GDSF": Gdsf,
    "S3-FIFO": S3Fifo,
    "SLRU": Slru,
    "Belady, files": Clairvoyant,
}
