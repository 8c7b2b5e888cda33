"""Which checkpoints go: for room, or because a newer one holds what they hold.

Owns: the order of eviction, and the family of a state. Pure; must never know files, or how a checkpoint is
in use.

Who goes when room is needed (`choose_victims`): the lowest rank first, then the least value per byte.

1. Checkpoints in quarantine.
2. All others. A checkpoint's value is the seconds that it takes to evaluate the tokens that nothing else
   that is kept could give, divided by the minutes since a request last began with them, and one; more for
   every turn of a conversation in full swing. States of a model that is not served count a quarter.
3. What alone holds the header of a conversation that was continued within half an hour.
4. The state that the one about to be saved will replace: that goes before its successor is safe only if
   nothing else gives room.
5. Never: what is pinned or in use.

On recorded traces this saves more than LRU, S3-FIFO and the like at nearly every budget
(`python -m tests.bench.eviction`, docs/proof.md).

Who goes for a newer state (`superseded`) depends on the rule:

1. Any prefix: older states of the conversation, if the newer one has every position.
2. Restore points: older states of the conversation whose every place the newer one can be continued at.
3. End only: only states that the newer one repeats whole, and no turn start.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import cached_property
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

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
    Title,
    highest_point,
)
from proxy.core.rates import Rates
from proxy.core.tokens import (
    BLOCK_TOKENS,
    FIRST_BLOCK_TOKENS,
    Namespace,
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


def title_of(title: Title, family: Family, relatives: Iterable[Candidate]) -> Title:
    """Return the title of a new checkpoint: that of its session if its own is not known.

    What several sessions share has the words of none of them.
    """
    if not family.session_id:
        return title._replace(words="")
    known = (r.checkpoint for r in relatives)
    return title if any(title) else next((c.title for c in known if c.family == family), title)


def _share_session(relative: Candidate, own_places: Iterable[int], n_header: int) -> bool:
    """Return whether a new state and a relative share a place that only their session has."""
    older = relative.checkpoint
    places = {*own_places, older.turn_start, older.n_tokens}
    if not older.turn_start:
        # The generation prompt behind it may have been rendered otherwise since.
        places.add(older.n_prompt - SLACK_TOKENS)
    n_header = max(n_header, older.header)
    return any(n_header < place <= relative.n_common for place in places)


# What only one of the kept checkpoints can give.
#
# Everything is counted in whole blocks, which errs by less than one block a range and needs no tokens.


@dataclass(frozen=True)
class Relative:
    """A checkpoint, and how many blocks another one shares with it.

    `asked` says when a request last began with so many of its blocks.
    """

    checkpoint: Checkpoint
    n_blocks: int
    asked: Mapping[int, float] = field(default_factory=dict)

    def asked_at(self, n_blocks: int) -> float:
        """Return when the first *n_blocks* blocks were last wanted; 0 if it does not share so many."""
        if n_blocks > self.n_blocks:
            return 0.0
        asked = (at for n_asked, at in self.asked.items() if n_asked >= n_blocks)
        return max([self.checkpoint.last_used_at, *asked])

    @cached_property
    def places(self) -> frozenset[int]:
        """The shared blocks at whose ends it can be continued, unless it has every position."""
        points = (*self.checkpoint.restore_points, self.checkpoint.n_tokens)
        return frozenset(n for n in map(count_blocks, points) if n <= self.n_blocks)


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


def lost_without(
    own: Relative, others: Collection[Relative], gone: Collection[CheckpointId] = ()
) -> list[LostRange]:
    """Return what requests would lose if a checkpoint went after those in *gone*.

    Requests come back to the end of a state, to the start of its turn and to its header. A range begins
    where one of the *others* that are kept can be continued, or at the place before.
    """
    kept = [other for other in others if other.checkpoint.id not in gone]
    n_anywhere = max((o.n_blocks for o in kept if o.checkpoint.has_every_position), default=0)
    places = sorted(frozenset({0}).union(*(other.places for other in kept)))
    lost, n_before = [], 0
    for n_end, leads_to in _destinations(own.checkpoint):
        n_begin = max(n_before, min(n_end, n_anywhere), places[bisect_right(places, n_end) - 1])
        if n_begin < n_end:
            asked_at = max(relative.asked_at(n_end) for relative in (own, *others))
            n_kept = end_of_block(n_begin)
            lost.append(LostRange(n_kept, end_of_block(n_end) - n_kept, leads_to, asked_at))
        n_before = n_end
    return lost


def _destinations(checkpoint: Checkpoint) -> list[tuple[int, CheckpointKind]]:
    """Return the places in a state that requests come back to, in blocks, ascending."""
    points = (*checkpoint.restore_points, checkpoint.n_tokens)
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
    return sorted((n_blocks, kind) for n_blocks, kind in places.items() if n_blocks)


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

N_COMPARED = 32
"""So many checkpoints of the lowest scores are compared: a store of any size chooses as fast."""

PAUSE_SECONDS = 60.0
"""How likely a conversation goes on in the next moment falls as its pause grows, at every scale:
after an hour a sixtieth of what it was. Pauses shorter than this tell nothing."""

SWING_SECONDS = 300.0
"""A conversation that has gone on goes on again, the likelier the more turns it had; after a longer pause
that tells less and less. Three in four are never continued."""

LIVE_SECONDS = 1800.0
"""A conversation that nobody has continued for this long may be over: its header is protected no more."""

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
    LIVE_HEADER = 2
    BEING_REPLACED = 3
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
        pause_seconds = max(0.0, present.now - part.asked_at)
        in_swing = (checkpoint.n_turns - 1) / (1 + pause_seconds / SWING_SECONDS)
        likelihood = (1 + in_swing) / (1 + pause_seconds / PAUSE_SECONDS)
        n_end = part.n_before + part.n_tokens
        seconds += likelihood * rates.evaluation_seconds(part.n_before, n_end)
    return seconds * (1.0 if present.serves(checkpoint) else OTHER_MODEL_SHARE)


def rank_of(checkpoint: Checkpoint, lost: Iterable[LostRange], present: Present) -> Rank:
    """Return the rank of a checkpoint without which the *lost* ranges are evaluated again."""
    if not present.serves(checkpoint):
        return Rank.ORDINARY
    is_live_header = any(
        part.leads_to is CheckpointKind.HEADER
        and part.n_tokens >= MIN_PROTECTED_TOKENS
        and present.now - part.asked_at <= LIVE_SECONDS
        for part in lost
    )
    return Rank.LIVE_HEADER if is_live_header else Rank.ORDINARY


def score_of(checkpoint: Checkpoint, lost: Iterable[LostRange]) -> float:
    """Return a number by which checkpoints are looked at for room, the lowest first.

    Infinite for what is pinned, 0 in quarantine; otherwise when a request last came through what nothing
    else could give, in seconds since 1970, and 1 if there is no such thing.
    """
    if checkpoint.is_pinned:
        return inf
    return 0.0 if checkpoint.quarantine else max([1.0, *(part.asked_at for part in lost)])


def first_score(checkpoint: Checkpoint) -> float:
    """Return the score of a checkpoint as though it shared nothing with others."""
    used_at = checkpoint.last_used_at
    return score_of(checkpoint, [LostRange(0, checkpoint.n_tokens, checkpoint.kind, used_at)])


class Eviction(NamedTuple):
    """Who goes; and the scores of those that were compared with them and stay."""

    victims: list[Checkpoint]
    scores: dict[CheckpointId, float]


def choose_victims(
    checkpoints: Iterable[Checkpoint],
    n_bytes_to_free: int,
    relatives: Callable[[Checkpoint], Sequence[Relative]],
    present: Present,
    *,
    in_use: Collection[CheckpointId] = (),
    quarantined: Collection[CheckpointId] = (),
    being_replaced: Collection[CheckpointId] = (),
) -> Eviction:
    """Return the checkpoints to remove, whose sizes add up to *n_bytes_to_free*.

    *checkpoints* come lowest score first; N_COMPARED at once are compared, more if all of these are of a
    higher rank than others may be. *relatives* returns a checkpoint itself and those that share a prefix
    with it. Never one that is *in_use* or pinned; fewer bytes than asked for if the rest does not suffice.
    """
    gone: set[CheckpointId] = set()
    compared: dict[CheckpointId, tuple[Checkpoint, Sequence[Relative]]] = {}
    left = (c for c in checkpoints if c.id not in in_use and not c.is_pinned)

    def lost_with(checkpoint: Checkpoint) -> list[LostRange]:
        _, (own, *others) = compared[checkpoint.id]
        return lost_without(own, others, gone)

    def order(checkpoint: Checkpoint) -> tuple[Rank, float, float, CheckpointId]:
        lost = lost_with(checkpoint)
        value = value_seconds(checkpoint, lost, present) / max(1, checkpoint.size_bytes)
        rank = rank_of(checkpoint, lost, present)
        if checkpoint.id in quarantined:
            rank = Rank.QUARANTINED
        if checkpoint.id in being_replaced:
            rank = Rank.BEING_REPLACED
        return rank, value, checkpoint.last_used_at, checkpoint.id

    heap: list[tuple[Rank, float, float, CheckpointId]] = []
    victims: list[Checkpoint] = []
    while n_bytes_to_free > 0:
        while len(heap) < N_COMPARED or heap[0][0] > Rank.ORDINARY:
            if (checkpoint := next(left, None)) is None:
                break
            compared[checkpoint.id] = checkpoint, relatives(checkpoint)
            heappush(heap, order(checkpoint))
        if not heap:
            break
        victim, _ = compared[heappop(heap)[-1]]
        # What is left can only gain by what goes, so an old rank is a lower bound, and only the lowest rank
        # need be looked at again.
        current = order(victim)
        if heap and current > heap[0]:
            heappush(heap, current)
            continue
        victims.append(victim)
        n_bytes_to_free -= victim.size_bytes
        gone.add(victim.id)
    kept = (compared[checkpoint_id][0] for *_, checkpoint_id in heap)
    return Eviction(victims, {c.id: score_of(c, lost_with(c)) for c in kept})
