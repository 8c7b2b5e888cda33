"""Which checkpoints go: for room, or because a newer one holds what they hold.

Owns: the order of eviction, the prefix tree by which it is decided, and the family of a state. Pure; must
never know files, or how a checkpoint is in use.

Who goes when room is needed (`choose_victims`): the lowest rank first, then the least value per byte.

1. Checkpoints in quarantine.
2. All others. A checkpoint's value is the seconds that it takes to evaluate the tokens that nothing else
   that is kept could give, halved every six hours since a request last began with them. States of a model
   that is not served count a quarter.
3. What alone holds the turn start of a conversation that was continued within half an hour.
4. What alone holds the header of such a conversation.
5. The state that the one about to be saved will replace: that goes before its successor is safe only if
   nothing else gives room.
6. Never: what is pinned or in use.

Who goes for a newer state (`superseded`) depends on the rule:

1. Any prefix: older states of the conversation, if the newer one has every position.
2. Restore points: older states of the conversation whose every place the newer one can be continued at.
3. End only: only states that the newer one repeats whole, and no turn start.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from heapq import heapify, heappop, heappush

import xxhash

from proxy.core.cuts import SLACK_TOKENS, is_near
from proxy.core.model import (
    Candidate,
    Checkpoint,
    CheckpointId,
    CheckpointKind,
    Family,
    Rule,
    RuleKind,
)
from proxy.core.rates import Rates
from proxy.core.rule import highest_point
from proxy.core.tokens import (
    BLOCK_TOKENS,
    FIRST_BLOCK_TOKENS,
    Namespace,
    PrefixHash,
    TokenIds,
    count_blocks,
    end_of_block,
)

# Which states belong together for people to look at. Nothing is planned by it: a wrong family shows in a
# list and costs nothing.


def family_of(checkpoint: Checkpoint, tokens: TokenIds, relatives: Iterable[Candidate]) -> Family:
    """Return the family of a new checkpoint of *tokens*; its *relatives* share a prefix with it.

    Two states are of one session if they share a user message's end, or the whole of the shorter one: what
    only repeats the header, and what clients put before each first message, is another session.
    """

    def id_of(some: TokenIds) -> int:
        """Return a number that fits into a signed 64-bit one, and is not 0."""
        return xxhash.xxh3_64_intdigest(namespace + some.tobytes()) >> 1 or 1

    namespace, n_header = checkpoint.namespace, checkpoint.header
    known = [r for r in relatives if r.checkpoint.namespace == namespace]
    header_id = id_of(tokens[:n_header]) if 0 < n_header <= len(tokens) else 0
    for relative in known:  # what shares its header whole tells it, if it was not looked for
        if 0 < relative.checkpoint.header <= relative.n_common:
            header_id = header_id or relative.checkpoint.family.header_id
    for relative in known:
        older = relative.checkpoint.family
        is_alike = older.session_id and older.header_id == header_id
        if is_alike and _share_session(relative, (checkpoint.turn_start, len(tokens)), n_header):
            return Family(header_id, older.session_id)
    if checkpoint.kind in (CheckpointKind.HEADER, CheckpointKind.BRANCH):
        return Family(header_id)
    return Family(header_id, id_of(tokens))


def _share_session(relative: Candidate, own_places: Iterable[int], n_header: int) -> bool:
    """Return whether a new state and a relative share a place that only their session has."""
    older = relative.checkpoint
    places = {*own_places, older.turn_start, older.n_tokens}
    if not older.turn_start:
        # The generation prompt behind it may have been rendered otherwise since.
        places.add(older.n_prompt - SLACK_TOKENS)
    n_header = max(n_header, older.header)
    return any(n_header < place <= relative.n_common for place in places)


# Where the kept checkpoints share prefixes, and what only one of them can give.
#
# Everything is counted in whole blocks, which errs by less than one block a range and needs nothing but
# the prefix hashes. The work is bounded by the budget: 20 GiB at 10 KB a token are 16,000 blocks.


Gone = Counter[PrefixHash]
"""Blocks at which checkpoints that are about to go could be continued, and how many of these."""


@dataclass(slots=True)
class _SharedPrefix:
    """One prefix of full blocks: how many checkpoints begin with it, how many continue at its end."""

    n_reaching: int = 0
    n_continuing: int = 0
    asked_at: float = 0.0


@dataclass(frozen=True, slots=True)
class LostRange:
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
    """One checkpoint's path through the tree; all but the hashes in blocks.

    A state can be continued at the ends of the blocks `continuing`, whatever it is restored for. Requests
    come back to the `destinations`, ascending.
    """

    hashes: Sequence[PrefixHash]
    continuing: range | frozenset[int]
    destinations: list[tuple[int, CheckpointKind]]


class Lineage:
    """The prefix tree of all kept checkpoints, as its blocks."""

    def __init__(self) -> None:
        self._blocks: dict[PrefixHash, _SharedPrefix] = {}
        self._paths: dict[CheckpointId, _Path] = {}

    def add(self, checkpoint: Checkpoint, hashes: Sequence[PrefixHash]) -> None:
        """Enter a checkpoint with the hashes of all its prefixes of full blocks."""
        path = _path_of(checkpoint, hashes)
        for n_blocks, prefix_hash in enumerate(hashes, 1):
            block = self._blocks.setdefault(prefix_hash, _SharedPrefix())
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

    def only_in(self, checkpoint_id: CheckpointId, gone: Gone) -> list[LostRange]:
        """Return what requests would lose if a checkpoint went after those in *gone*.

        Requests come back to the end of a state, to the start of its turn and to its header. A range
        begins where anything else that is kept can be continued, or at the place before.
        """
        path, blocks = self._paths[checkpoint_id], self._blocks
        hashes = path.hashes

        def continues_elsewhere(n_blocks: int) -> bool:
            prefix_hash = hashes[n_blocks - 1]
            n_others = blocks[prefix_hash].n_continuing - (n_blocks in path.continuing)
            return n_others > gone.get(prefix_hash, 0)

        n_shared = bisect_left(hashes, True, key=lambda each: blocks[each].n_reaching == 1)
        lost, n_before = [], 0
        for n_end, leads_to in path.destinations:
            n_begin = max(n_before, min(n_end, n_shared))
            while n_begin > n_before and not continues_elsewhere(n_begin):
                n_begin -= 1
            if n_begin < n_end:
                n_kept, asked_at = end_of_block(n_begin), blocks[hashes[n_end - 1]].asked_at
                lost.append(LostRange(n_kept, end_of_block(n_end) - n_kept, leads_to, asked_at))
            n_before = n_end
        return lost


def _path_of(checkpoint: Checkpoint, hashes: Sequence[PrefixHash]) -> _Path:
    """Return where a state can be continued, and the places in it that requests come back to."""
    points = (*checkpoint.restore_points, checkpoint.n_tokens)
    continuing: range | frozenset[int] = frozenset(count_blocks(point) for point in points)
    if checkpoint.has_every_position:
        continuing = range(1, count_blocks(checkpoint.n_tokens) + 1)
    # What was generated behind a turn's start is no turn's start.
    has_cuts = checkpoint.header or checkpoint.turn_start
    at_end = CheckpointKind.CONVERSATION if has_cuts else checkpoint.kind
    places = {count_blocks(checkpoint.n_tokens): at_end}
    for n_cut, kind in (
        (checkpoint.turn_start, CheckpointKind.TURN_START),
        (checkpoint.header, CheckpointKind.HEADER),
    ):
        point = n_cut if checkpoint.has_every_position else highest_point(points, n_cut)
        is_held = point >= max(FIRST_BLOCK_TOKENS, n_cut - BLOCK_TOKENS)
        if is_held and n_cut <= checkpoint.n_tokens:
            places[count_blocks(point)] = kind
    destinations = sorted((n_blocks, kind) for n_blocks, kind in places.items() if n_blocks)
    return _Path(hashes, continuing, destinations)


# Which checkpoints a newer one makes needless. Files of one conversation repeat each other: of most, only
# the newest is kept.


SMALL_LOSS_TOKENS = 256
"""So many generated tokens of an older state may be lost with it: they seldom come back as they were.
Of its prompt only SLACK_TOKENS may: that is what another conversation with the same header goes on with."""


def superseded(rule: Rule, newer: Checkpoint, older: Iterable[Candidate]) -> list[Checkpoint]:
    """Return those of *older* that *newer* makes needless.

    An *older* one's n_common says how much of it the newer one repeats. A header and a branch are kept
    always; a turn start until a later turn's start repeats it; a pinned one in any case.
    """
    return [found.checkpoint for found in older if _is_superseded(rule, newer, found)]


def _is_superseded(rule: Rule, newer: Checkpoint, found: Candidate) -> bool:
    older, n_common = found.checkpoint, found.n_common
    kinds = {CheckpointKind.CONVERSATION, newer.kind} - {
        CheckpointKind.HEADER,
        CheckpointKind.BRANCH,
    }
    if older.id == newer.id or older.kind not in kinds or older.is_pinned:
        return False
    if rule.kind is RuleKind.END_ONLY:
        # The state at a turn's start serves every later request of that turn that diverges.
        is_whole = n_common == older.n_tokens < newer.n_tokens
        return is_whole and older.kind is CheckpointKind.CONVERSATION
    if rule.kind is RuleKind.NOTHING or not _moves_on(newer, found):
        return False
    if rule.kind is RuleKind.ANY_PREFIX:
        return newer.has_every_position
    # Each place of the older state that somebody may come back to, the newer one can be continued at, or
    # knew and found not worth its bytes.
    known = (newer.header, newer.turn_start, *newer.marks)
    marks = (mark for mark in older.marks if is_near(older.restore_points, mark))
    return all(
        place in known or is_near(newer.restore_points, place)
        for place in (older.header, older.turn_start, *marks)
        if 0 < place <= n_common
    )


def _moves_on(newer: Checkpoint, found: Candidate) -> bool:
    """Return whether *newer* is a later state of the same conversation.

    It goes on from the older one's prompt, or has dropped the reasoning of its turn for the next one.
    """
    older, n_common = found.checkpoint, found.n_common
    n_prompt_lost = (older.n_prompt or older.n_tokens) - n_common
    if n_prompt_lost <= SLACK_TOKENS and older.n_tokens - n_common <= SMALL_LOSS_TOKENS:
        return newer.n_tokens >= older.n_tokens - SMALL_LOSS_TOKENS
    return newer.turn_start > n_common >= older.turn_start > 0


# Which checkpoints go for room.


MIN_PROTECTED_TOKENS = 256
"""A cut protects a state that alone can give so many tokens before it."""

HALF_LIFE_SECONDS = 6 * 3600.0
"""Work is taken up again within the day or hardly at all: the next morning a state counts a quarter."""

LIVE_SECONDS = 1800.0
"""A conversation that nobody has continued for this long may be over: its cuts are protected no more."""

OTHER_MODEL_SHARE = 0.25
"""What a state of a model that llama-server does not serve now counts: somebody has to switch first."""


class Removal(StrEnum):
    """Why a checkpoint is removed."""

    BUDGET = "budget"
    FREE_SPACE = "free space"
    SUPERSEDED = "superseded"
    BROKEN = "broken"
    OPERATOR = "operator"


class Rank(IntEnum):
    """The order of eviction: a checkpoint of a lower rank goes first, whatever its value."""

    QUARANTINED = 0
    ORDINARY = 1
    LIVE_TURN_START = 2
    LIVE_HEADER = 3
    BEING_REPLACED = 4
    """What the state that room is made for will supersede: not before that one is safe."""


@dataclass(frozen=True, slots=True)
class Present:
    """What value depends on besides the checkpoints: the clock, the rates, the model that is served.

    Without `rates_by` it is not known what llama-server serves, and every model counts fully. `rates`
    are those of a namespace that `rates_by` does not tell.
    """

    now: float
    rates: Rates = field(default_factory=Rates)
    rates_by: Mapping[Namespace, Rates] = field(default_factory=dict)

    def serves(self, checkpoint: Checkpoint) -> bool:
        """Return whether llama-server may serve the model of a checkpoint."""
        return not self.rates_by or checkpoint.namespace in self.rates_by


def value_seconds(checkpoint: Checkpoint, lost: Iterable[LostRange], present: Present) -> float:
    """Return the expected seconds to evaluate the *lost* ranges again if a checkpoint went."""
    rates = present.rates_by.get(checkpoint.namespace, present.rates)
    seconds = 0.0
    for part in lost:
        likelihood = 0.5 ** (max(0.0, present.now - part.asked_at) / HALF_LIFE_SECONDS)
        n_end = part.n_before + part.n_tokens
        seconds += likelihood * rates.evaluation_seconds(part.n_before, n_end)
    return seconds * (1.0 if present.serves(checkpoint) else OTHER_MODEL_SHARE)


def rank_of(checkpoint: Checkpoint, lost: Iterable[LostRange], present: Present) -> Rank:
    """Return the rank of a checkpoint without which the *lost* ranges are evaluated again."""
    if not present.serves(checkpoint):
        return Rank.ORDINARY
    only_here = {
        s.leads_to
        for s in lost
        if s.n_tokens >= MIN_PROTECTED_TOKENS and present.now - s.asked_at <= LIVE_SECONDS
    }
    if CheckpointKind.HEADER in only_here:
        return Rank.LIVE_HEADER
    if CheckpointKind.TURN_START in only_here:
        return Rank.LIVE_TURN_START
    return Rank.ORDINARY


def choose_victims(
    checkpoints: Iterable[Checkpoint],
    n_bytes_to_free: int,
    lineage: Lineage,
    present: Present,
    *,
    in_use: Collection[CheckpointId] = (),
    quarantined: Collection[CheckpointId] = (),
    being_replaced: Collection[CheckpointId] = (),
) -> list[Checkpoint]:
    """Return the checkpoints to remove, whose sizes add up to *n_bytes_to_free*.

    Never one that is *in_use* or pinned; fewer bytes than asked for if the rest does not suffice.
    """
    gone: Gone = Gone()

    def order(checkpoint: Checkpoint) -> tuple[Rank, float, float, CheckpointId]:
        lost = lineage.only_in(checkpoint.id, gone)
        value = value_seconds(checkpoint, lost, present) / max(1, checkpoint.size_bytes)
        rank = rank_of(checkpoint, lost, present)
        if checkpoint.id in quarantined:
            rank = Rank.QUARANTINED
        if checkpoint.id in being_replaced:
            rank = Rank.BEING_REPLACED
        return rank, value, checkpoint.last_used_at, checkpoint.id

    if n_bytes_to_free <= 0:
        return []
    by_id = {c.id: c for c in checkpoints if c.id not in in_use and not c.is_pinned}
    heap = [order(checkpoint) for checkpoint in by_id.values()]
    heapify(heap)
    victims = []
    while heap and n_bytes_to_free > 0:
        victim = by_id[heappop(heap)[-1]]
        # What is left can only gain by what goes, so an old rank is a lower bound, and only the lowest rank
        # need be looked at again.
        current = order(victim)
        if heap and current > heap[0]:
            heappush(heap, current)
            continue
        victims.append(victim)
        n_bytes_to_free -= victim.size_bytes
        gone.update(lineage.points(victim.id))
    return victims
