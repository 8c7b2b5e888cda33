"""Which checkpoints go: for room, or because a newer one holds what they hold."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from heapq import heapify, heappop, heappush

import xxhash

from proxy.core.cuts import SLACK_TOKENS
from proxy.core.model import (
    Candidate,
    Checkpoint,
    CheckpointId,
    CheckpointKind,
    Cuts,
    Family,
    Rule,
    RuleKind,
)
from proxy.core.rates import Rates
from proxy.core.rule import highest_point
from proxy.core.saving import marks_left
from proxy.core.tokens import (
    BLOCK_TOKENS,
    FIRST_BLOCK_TOKENS,
    Namespace,
    PrefixHash,
    TokenIds,
    count_blocks,
    end_of_block,
    tokens_to_bytes,
)

# Which states belong together for people to look at: those of one header, those of one session.
#
# Owns: `family_of`. Pure. Nothing is planned by it; a wrong family shows in a list and costs nothing.


_SHARED_KINDS = (CheckpointKind.HEADER, CheckpointKind.BRANCH)


def family_of(
    namespace: Namespace,
    tokens: TokenIds,
    kind: CheckpointKind,
    cuts: Cuts,
    relatives: Iterable[Candidate],
) -> Family:
    """Return the family of a new state; *relatives* are the checkpoints that share a prefix with it.

    Two states are of one session if they share a user message's end, or the whole of the shorter one: what
    only repeats the header, and what clients put before each first message, is another session.
    """
    known = [r for r in relatives if r.checkpoint.namespace == namespace]
    header_id = _header_id(namespace, tokens, cuts.header) or _inherited_header(known)
    places = (cuts.turn_start, len(tokens))
    for relative in known:
        older = relative.checkpoint.family
        is_near = older.session_id and older.header_id == header_id
        if is_near and _is_reached(relative, places, cuts.header):
            return Family(header_id, older.session_id)
    if kind in _SHARED_KINDS:
        return Family(header_id)
    return Family(header_id, _id_of(namespace, tokens_to_bytes(tokens)))


def _header_id(namespace: Namespace, tokens: TokenIds, n_header: int) -> int:
    if not 0 < n_header <= len(tokens):
        return 0
    return _id_of(namespace, tokens_to_bytes(tokens[:n_header]))


def _inherited_header(relatives: Iterable[Candidate]) -> int:
    """Return the header of whatever shares it whole, if the state's own was not looked for."""
    for relative in relatives:
        checkpoint = relative.checkpoint
        if 0 < checkpoint.header <= relative.n_common and checkpoint.family.header_id:
            return checkpoint.family.header_id
    return 0


def _is_reached(relative: Candidate, own_places: Iterable[int], n_header: int) -> bool:
    """Return whether a new state and a relative share a place that only their session has."""
    older = relative.checkpoint
    places = {*own_places, older.turn_start, older.n_tokens}
    if not older.turn_start:
        # The generation prompt behind it may have been rendered otherwise since.
        places.add(older.n_prompt - SLACK_TOKENS)
    n_header = max(n_header, older.header)
    return any(n_header < place <= relative.n_common for place in places)


def _id_of(namespace: Namespace, data: bytes) -> int:
    """Return a number that fits into a signed 64-bit one, and is not 0."""
    return xxhash.xxh3_64_intdigest(namespace + data) >> 1 or 1


# Where the kept checkpoints share prefixes, and what only one of them can give.
#
# Owns: how often each block of each kept checkpoint is there, where it can be continued, and when a
# request last began with it. Pure; must never know bytes, files or who is in use.
#
# Everything is counted in whole blocks, which errs by less than one block a stretch and needs nothing but
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
        self._blocks: dict[PrefixHash, _SharedPrefix] = {}
        self._paths: dict[CheckpointId, _Path] = {}

    def add(self, checkpoint: Checkpoint, hashes: Sequence[PrefixHash]) -> None:
        """Enter a checkpoint with the hashes of all its prefixes of full blocks."""
        path = _Path(hashes, _continuing(checkpoint), _destinations(checkpoint))
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


# Which checkpoints a newer one makes needless.
#
# Owns: `superseded`. Pure. Files of one conversation repeat each other: of most, only the newest is kept.


SMALL_LOSS_TOKENS = 256
"""So many generated tokens of an older state may be lost with it: they seldom come back as they were.
Of its prompt only SLACK_TOKENS may: that is what another conversation with the same header goes on with."""


def superseded(rule: Rule, newer: Checkpoint, older: Iterable[Candidate]) -> list[Checkpoint]:
    """Return those of *older* that *newer* makes needless.

    An *older* one's n_common says how much of it the newer one repeats. A header and a branch are kept
    always; a turn start until a later turn's start repeats it; a pinned one in any case.
    """
    return [
        found.checkpoint
        for found in older
        if found.checkpoint.id != newer.id
        and _may_go(newer, found.checkpoint)
        and _repeats(rule, newer, found)
    ]


def _may_go(newer: Checkpoint, older: Checkpoint) -> bool:
    if older.is_pinned:
        return False
    match older.kind:
        case CheckpointKind.HEADER | CheckpointKind.BRANCH:
            return False
        case CheckpointKind.TURN_START:
            return newer.kind is CheckpointKind.TURN_START
        case CheckpointKind.CONVERSATION:
            return True


def _repeats(rule: Rule, newer: Checkpoint, found: Candidate) -> bool:
    older, n_common = found.checkpoint, found.n_common
    match rule.kind:
        case RuleKind.ANY_PREFIX:
            return newer.has_every_position and _moves_on(newer, found)
        case RuleKind.RESTORE_POINTS:
            return _moves_on(newer, found) and all(
                _has_place(newer, place) for place in _places_of(older) if place <= n_common
            )
        case RuleKind.END_ONLY:
            # The state at a turn's start serves every later request of that turn that diverges.
            is_whole = n_common == older.n_tokens < newer.n_tokens
            return is_whole and older.kind is CheckpointKind.CONVERSATION
        case RuleKind.NOTHING:
            return False


def _moves_on(newer: Checkpoint, found: Candidate) -> bool:
    """Return whether *newer* is a later state of the same conversation.

    It goes on from the older one's prompt, or has dropped the reasoning of its turn for the next one.
    """
    older, n_common = found.checkpoint, found.n_common
    n_prompt_lost = (older.n_prompt or older.n_tokens) - n_common
    if n_prompt_lost <= SLACK_TOKENS and older.n_tokens - n_common <= SMALL_LOSS_TOKENS:
        return newer.n_tokens >= older.n_tokens - SMALL_LOSS_TOKENS
    return newer.turn_start > n_common >= older.turn_start > 0


def _places_of(checkpoint: Checkpoint) -> Iterable[int]:
    """Return where a checkpoint can be continued that somebody may come back to, but for its end."""
    return (n for n in (checkpoint.header, checkpoint.turn_start, *marks_left(checkpoint)) if n)


def _has_place(newer: Checkpoint, place: int) -> bool:
    """Return whether *newer* can be continued at a place, or knew it and found it not worth its bytes."""
    if place in (newer.header, newer.turn_start, *newer.marks):
        return True
    return highest_point(newer.restore_points, place) >= place - SLACK_TOKENS


# Which checkpoints go when there is no room.
#
# Owns: a checkpoint's value and `choose_victims`. Pure; must never log, unlink or read the clock.
#
# The value is the seconds of evaluation that losing a checkpoint would cost: those of the tokens that
# nothing else that is kept could give, halved for every half-life since a request last came that way. The
# lowest standing goes first, then the least value per byte.


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


class Standing(IntEnum):
    """How firmly a checkpoint stands; a lower one goes first, whatever its value."""

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
    are those of a namespace that it does not tell.
    """

    now: float
    rates: Rates = field(default_factory=Rates)
    rates_by: Mapping[Namespace, Rates] = field(default_factory=dict)

    @property
    def namespaces(self) -> frozenset[Namespace]:
        """Those of the models that are served."""
        return frozenset(self.rates_by)

    def rates_of(self, namespace: Namespace) -> Rates:
        return self.rates_by.get(namespace, self.rates)


@dataclass(frozen=True, slots=True)
class Exempt:
    """Checkpoints that are not ranked by their value alone; those in use do not go at all."""

    in_use: Collection[CheckpointId] = ()
    quarantined: Collection[CheckpointId] = ()
    being_replaced: Collection[CheckpointId] = ()


NOTHING_EXEMPT = Exempt()

Rank = tuple[Standing, float, float, CheckpointId]


def value_seconds(checkpoint: Checkpoint, stretches: Iterable[Stretch], present: Present) -> float:
    """Return the expected seconds that losing the *stretches* of a checkpoint would cost."""
    rates = present.rates_of(checkpoint.namespace)
    seconds = sum(
        rates.evaluation_seconds(s.n_before, s.n_before + s.n_tokens)
        * _likelihood(s.asked_at, present.now)
        for s in stretches
    )
    return seconds * (OTHER_MODEL_SHARE if _is_of_other_model(checkpoint, present) else 1.0)


def _likelihood(asked_at: float, now: float) -> float:
    return float(0.5 ** (max(0.0, now - asked_at) / HALF_LIFE_SECONDS))


def _is_of_other_model(checkpoint: Checkpoint, present: Present) -> bool:
    return bool(present.rates_by) and checkpoint.namespace not in present.rates_by


def standing(
    checkpoint: Checkpoint, stretches: Iterable[Stretch], present: Present, exempt: Exempt
) -> Standing:
    """Return how firmly a checkpoint stands if only it can give the *stretches*."""
    if checkpoint.id in exempt.being_replaced:
        return Standing.BEING_REPLACED
    if checkpoint.id in exempt.quarantined:
        return Standing.QUARANTINED
    if _is_of_other_model(checkpoint, present):
        return Standing.ORDINARY
    only_here = {
        s.leads_to
        for s in stretches
        if s.n_tokens >= MIN_PROTECTED_TOKENS and present.now - s.asked_at <= LIVE_SECONDS
    }
    if CheckpointKind.HEADER in only_here:
        return Standing.LIVE_HEADER
    if CheckpointKind.TURN_START in only_here:
        return Standing.LIVE_TURN_START
    return Standing.ORDINARY


def choose_victims(
    checkpoints: Iterable[Checkpoint],
    n_bytes_to_free: int,
    lineage: Lineage,
    present: Present,
    exempt: Exempt = NOTHING_EXEMPT,
) -> list[Checkpoint]:
    """Return the checkpoints to remove, whose sizes add up to *n_bytes_to_free*.

    Never one that is in use or pinned; fewer bytes than asked for if the rest does not suffice.
    """
    gone: Gone = Gone()

    def rank(checkpoint: Checkpoint) -> Rank:
        stretches = lineage.only_in(checkpoint.id, gone)
        value = value_seconds(checkpoint, stretches, present) / max(1, checkpoint.size_bytes)
        place = standing(checkpoint, stretches, present, exempt)
        return place, value, checkpoint.last_used_at, checkpoint.id

    if n_bytes_to_free <= 0:
        return []
    evictable = [c for c in checkpoints if c.id not in exempt.in_use and not c.is_pinned]
    victims = []
    for victim in _in_rank_order(evictable, rank):
        victims.append(victim)
        n_bytes_to_free -= victim.size_bytes
        if n_bytes_to_free <= 0:
            break
        gone.update(lineage.points(victim.id))
    return victims


def _in_rank_order(
    checkpoints: Collection[Checkpoint], rank: Callable[[Checkpoint], Rank]
) -> Iterable[Checkpoint]:
    """Yield the lowest rank first, as the ranks are then.

    What is left can only gain by what goes, so an old rank is a lower bound, and only the lowest one
    need be looked at again.
    """
    by_id = {c.id: c for c in checkpoints}
    heap = [rank(c) for c in checkpoints]
    heapify(heap)
    while heap:
        checkpoint = by_id[heappop(heap)[-1]]
        current = rank(checkpoint)
        if heap and current > heap[0]:
            heappush(heap, current)
        else:
            yield checkpoint
