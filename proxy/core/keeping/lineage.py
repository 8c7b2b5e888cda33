"""Where the kept checkpoints share prefixes, and what only one of them can give.

Owns: how often each block of each kept checkpoint is there, where it can be continued, and when a
request last began with it. Pure; must never know bytes, files or who is in use.

Everything is counted in whole blocks, which errs by less than one block a stretch and needs nothing
but the prefix hashes. The work is bounded by the budget: 20 GiB at 10 KB a token are 16,000 blocks.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from proxy.core.model import Checkpoint, CheckpointId, CheckpointKind
from proxy.core.prefix import (
    BLOCK_TOKENS,
    FIRST_BLOCK_TOKENS,
    PrefixHash,
    count_blocks,
    end_of_block,
)
from proxy.core.restore import highest_point

Gone = Counter[PrefixHash]
"""Blocks at which checkpoints that are about to go could be continued, and how many of these."""


@dataclass(slots=True)
class _Block:
    """One prefix of full blocks: how many checkpoints begin with it, how many continue at its end."""

    n_reaching: int = 0
    n_continuing: int = 0
    asked_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens that would have to be evaluated again without a checkpoint.

    `n_before` tokens lie before them, `leads_to` says what lies at their end, `asked_at` when a request
    last came through there.
    """

    n_before: int
    n_tokens: int
    leads_to: CheckpointKind
    asked_at: float


@dataclass(frozen=True, slots=True)
class _Path:
    """One checkpoint's way through the tree; all but the hashes in blocks."""

    hashes: Sequence[PrefixHash]
    continuing: "range | frozenset[int]"
    destinations: tuple[tuple[int, CheckpointKind], ...]


class Lineage:
    """The prefix tree of all kept checkpoints, as its blocks."""

    def __init__(self) -> None:
        self._blocks: dict[PrefixHash, _Block] = {}
        self._paths: dict[CheckpointId, _Path] = {}

    def add(self, checkpoint: Checkpoint, hashes: Sequence[PrefixHash]) -> None:
        """Enter a checkpoint with the hashes of all its prefixes of full blocks."""
        path = _Path(hashes, _continuing(checkpoint), _destinations(checkpoint))
        for n_blocks, prefix_hash in enumerate(hashes, 1):
            block = self._blocks.setdefault(prefix_hash, _Block())
            block.n_reaching += 1
            block.n_continuing += n_blocks in path.continuing
            block.asked_at = max(block.asked_at, checkpoint.last_used_at)
        self._paths[checkpoint.id] = path

    def remove(self, checkpoint_id: CheckpointId) -> Sequence[PrefixHash]:
        """Take a checkpoint out; return its hashes."""
        path = self._paths.pop(checkpoint_id)
        for n_blocks, prefix_hash in enumerate(path.hashes, 1):
            block = self._blocks[prefix_hash]
            block.n_reaching -= 1
            block.n_continuing -= n_blocks in path.continuing
            if not block.n_reaching:
                del self._blocks[prefix_hash]
        return path.hashes

    def note_asked(self, hashes: Sequence[PrefixHash], now: float) -> None:
        """Note that a request begins with these prefixes, wherever it finds their state."""
        for prefix_hash in hashes:
            block = self._blocks.get(prefix_hash)
            if block is None:
                return
            block.asked_at = now

    def points(self, checkpoint_id: CheckpointId) -> Iterator[PrefixHash]:
        """Yield the blocks at which a checkpoint can be continued."""
        path = self._paths[checkpoint_id]
        return (path.hashes[n - 1] for n in path.continuing if 0 < n <= len(path.hashes))

    def only_in(self, checkpoint_id: CheckpointId, gone: Gone) -> list[Stretch]:
        """Return what requests would lose if a checkpoint went after those in *gone*.

        Requests come back to the end of a state, to the start of its turn and to its header. A stretch
        begins where anything else that is kept can be continued, or at the place before.
        """
        path = self._paths[checkpoint_id]
        n_shared = self._shared(path)
        stretches, n_before = [], 0
        for n_end, leads_to in path.destinations:
            n_begin = max(n_before, min(n_end, n_shared))
            while n_begin > n_before and not self._continues_elsewhere(path, n_begin, gone):
                n_begin -= 1
            if n_begin < n_end:
                asked_at = self._blocks[path.hashes[n_end - 1]].asked_at
                n_before_tokens = end_of_block(n_begin)
                n_tokens = end_of_block(n_end) - n_before_tokens
                stretches.append(Stretch(n_before_tokens, n_tokens, leads_to, asked_at))
            n_before = n_end
        return stretches

    def _shared(self, path: _Path) -> int:
        """Return how many blocks of a path another checkpoint begins with as well."""
        blocks, hashes = self._blocks, path.hashes
        return bisect_left(
            range(len(hashes)), 1, key=lambda index: blocks[hashes[index]].n_reaching == 1
        )

    def _continues_elsewhere(self, path: _Path, n_blocks: int, gone: Gone) -> bool:
        prefix_hash = path.hashes[n_blocks - 1]
        n_others = self._blocks[prefix_hash].n_continuing - (n_blocks in path.continuing)
        return n_others > gone.get(prefix_hash, 0)


def _continuing(checkpoint: Checkpoint) -> "range | frozenset[int]":
    """Return after how many blocks a state can be continued, whatever it is restored for."""
    if checkpoint.has_every_position:
        return range(1, count_blocks(checkpoint.n_tokens) + 1)
    points = (*checkpoint.restore_points, checkpoint.n_tokens)
    return frozenset(count_blocks(point) for point in points)


def _destinations(checkpoint: Checkpoint) -> tuple[tuple[int, CheckpointKind], ...]:
    """Return the places that requests come back to, ascending, as far as the state holds them."""
    points = (*checkpoint.restore_points, checkpoint.n_tokens)
    # What was generated behind a turn's start is no turn's start.
    has_cuts = checkpoint.header or checkpoint.turn_start
    at_end = CheckpointKind.CONVERSATION if has_cuts else checkpoint.kind
    places = {count_blocks(checkpoint.n_tokens): at_end}
    for n_cut, kind in (
        (checkpoint.turn_start, CheckpointKind.TURN_START),
        (checkpoint.header, CheckpointKind.HEADER),
    ):
        if n_cut > checkpoint.n_tokens:
            continue
        point = n_cut if checkpoint.has_every_position else highest_point(points, n_cut)
        if point >= max(FIRST_BLOCK_TOKENS, n_cut - BLOCK_TOKENS):
            places[count_blocks(point)] = kind
    return tuple(sorted((n_blocks, kind) for n_blocks, kind in places.items() if n_blocks))
