"""Which checkpoints are removed: for room, or because a newer one makes them needless.

Owns: the order of eviction, and the family of a state. Pure. Must never know files, or what uses a
checkpoint.

When room is needed (`choose_victims`), the lowest rank goes first, then the least value per byte:

1. Checkpoints in quarantine.
2. All others. A checkpoint's value is the seconds to evaluate the tokens that no other kept checkpoint
   gives, divided by one plus the minutes since a request last began with these tokens. The value grows with
   the turns of a conversation that goes on. States of a model that is not served count a quarter.
3. The only checkpoint with the header of a conversation that was continued within half an hour.
4. The checkpoint that the state about to be saved will replace. It goes first only if nothing else gives
   room, because the new state may never be saved.
5. Pinned checkpoints, and those in use, are never removed.

On recorded traces this order saves more than LRU, S3-FIFO and others at nearly every budget
(`python -m tests.bench.eviction`, docs/proof.md).

The rule decides which older states a newer one makes needless (`superseded`):

1. Any prefix: older states of the conversation, if the newer state has every position.
2. Restore points: older states of the conversation, if the newer state can be continued at all their cuts.
3. End only: only states that the newer state repeats whole, and no turn start.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import cached_property
from heapq import heappop, heappush
from itertools import islice
from math import inf

import xxhash

from proxy.core.cuts import SLACK_TOKENS, is_near
from proxy.core.model import Candidate, Checkpoint, CheckpointId, CheckpointKind, Family, Rule
from proxy.core.rates import Rates
from proxy.core.tokens import (
    BLOCK_TOKENS,
    FIRST_BLOCK_TOKENS,
    Namespace,
    TokenIds,
    count_blocks,
    end_of_block,
)

_OF_NO_SESSION = {CheckpointKind.HEADER, CheckpointKind.BRANCH}

# The families of states, which lists show to people. No plan reads a family, so a wrong one costs nothing.


def family_of(checkpoint: Checkpoint, tokens: TokenIds, relatives: Collection[Candidate]) -> Family:
    """Return the family of a new checkpoint of *tokens*; its *relatives* share a prefix and namespace.

    Two states are of one session if they share the end of a user message, or if one state begins with all
    of the other. States that share only the header, or the text that clients put before each first message,
    are of different sessions.
    """

    def id_of(some: TokenIds) -> int:
        """Return a number that fits into a signed 64-bit one, and is not 0."""
        return xxhash.xxh3_64_intdigest(namespace + some.tobytes()) >> 1 or 1

    namespace, n_header = checkpoint.namespace, checkpoint.header
    header_id = id_of(tokens[:n_header]) if 0 < n_header <= len(tokens) else 0
    for relative in relatives:  # a relative that shares its whole header knows the header's id
        if 0 < relative.checkpoint.header <= relative.n_common:
            header_id = header_id or relative.checkpoint.family.header_id
    for relative in relatives:
        older = relative.checkpoint.family
        is_alike = older.session_id and older.header_id == header_id
        if is_alike and _share_session(relative, (checkpoint.turn_start, len(tokens)), n_header):
            return Family(header_id, older.session_id)
    if checkpoint.kind in _OF_NO_SESSION:
        return Family(header_id)
    return Family(header_id, id_of(tokens))


def _share_session(relative: Candidate, own_cuts: Iterable[int], n_header: int) -> bool:
    """Return whether a new state and a relative share a cut that only their session has."""
    older = relative.checkpoint
    cuts = {*own_cuts, older.turn_start, older.n_tokens}
    if not older.turn_start:
        # Since then the template may have written another generation prompt behind these tokens.
        cuts.add(older.n_prompt - SLACK_TOKENS)
    n_header = max(n_header, older.header)
    return any(n_header < n_cut <= relative.n_common for n_cut in cuts)


# The tokens that only one of the kept checkpoints gives.
#
# Tokens are counted in whole blocks. The error is below one block a range, and no tokens have to be read.


@dataclass(frozen=True)
class Relative:
    """A checkpoint, and how many blocks another checkpoint shares with it.

    `asked` has a time for each number of blocks: when a request last began with that many of its blocks.
    """

    checkpoint: Checkpoint
    n_blocks: int
    asked: Mapping[int, float] = field(default_factory=dict)

    def asked_at(self, n_blocks: int) -> float:
        """Return when a request last began with the first *n_blocks*; 0 if fewer blocks are shared."""
        if n_blocks > self.n_blocks:
            return 0.0
        asked = (at for n_asked, at in self.asked.items() if n_asked >= n_blocks)
        return max([self.checkpoint.last_used_at, *asked])

    @cached_property
    def ends(self) -> frozenset[int]:
        """The numbers of shared blocks behind which it can be continued, unless it has every position."""
        points = (*self.checkpoint.restore_points, self.checkpoint.n_tokens)
        return frozenset(n for n in map(count_blocks, points) if n <= self.n_blocks)


@dataclass(frozen=True, slots=True)
class LostRange:
    """The tokens from `begin` to `end`, which would be evaluated again if a checkpoint were removed.

    `leads_to` is the kind of cut at their end. A request last began with all of them at `asked_at`.
    """

    begin: int
    end: int
    leads_to: CheckpointKind
    asked_at: float


def lost_without(
    own: Relative, others: Collection[Relative], gone: Collection[CheckpointId] = ()
) -> list[LostRange]:
    """Return what requests would lose if a checkpoint were removed after those in *gone*.

    Requests return to the end of a state, to its turn start and to its header. A range begins where one of
    the *others* that are kept can be continued, or at the cut before.
    """
    kept = [other for other in others if other.checkpoint.id not in gone]
    n_anywhere = max((o.n_blocks for o in kept if o.checkpoint.has_every_position), default=0)
    ends = sorted(frozenset({0}).union(*(other.ends for other in kept)))
    lost, n_before = [], 0
    for n_end, leads_to in _destinations(own.checkpoint):
        n_begin = max(n_before, min(n_end, n_anywhere), ends[bisect_right(ends, n_end) - 1])
        if n_begin < n_end:
            asked_at = max(relative.asked_at(n_end) for relative in (own, *others))
            lost.append(LostRange(end_of_block(n_begin), end_of_block(n_end), leads_to, asked_at))
        n_before = n_end
    return lost


def _destinations(checkpoint: Checkpoint) -> list[tuple[int, CheckpointKind]]:
    """Return the cuts of a state that requests return to, in blocks, ascending."""
    # The end of generated tokens is no turn start.
    has_cuts = checkpoint.header or checkpoint.turn_start
    at_end = CheckpointKind.CONVERSATION if has_cuts else checkpoint.kind
    cuts = {count_blocks(checkpoint.n_tokens): at_end}
    for n_cut, kind in (
        (checkpoint.turn_start, CheckpointKind.TURN_START),
        (checkpoint.header, CheckpointKind.HEADER),
    ):
        point = checkpoint.end_within(n_cut)
        is_held = point >= max(FIRST_BLOCK_TOKENS, n_cut - BLOCK_TOKENS)
        if is_held and n_cut <= checkpoint.n_tokens:
            cuts[count_blocks(point)] = kind
    return sorted((n_blocks, kind) for n_blocks, kind in cuts.items() if n_blocks)


# The checkpoints that a newer one makes needless. The files of a conversation repeat each other, so that
# mostly only the newest is kept.


SMALL_LOSS_TOKENS = 256
"""So many generated tokens may be lost with an older state: clients seldom send them back unchanged. Of the
prompt only SLACK_TOKENS may be lost, because another conversation may begin with the same prompt."""


def superseded(rule: Rule, newer: Checkpoint, older: Iterable[Candidate]) -> list[Checkpoint]:
    """Return those of *older* that *newer* makes needless.

    The n_common of each of *older* is how many of its tokens *newer* repeats. Headers, branches and pinned
    checkpoints are always kept; a turn start is kept until a later turn start repeats it.
    """
    return [found.checkpoint for found in older if _is_superseded(rule, newer, found)]


def _is_superseded(rule: Rule, newer: Checkpoint, found: Candidate) -> bool:
    older, n_common = found.checkpoint, found.n_common
    kinds = {CheckpointKind.CONVERSATION, newer.kind} - _OF_NO_SESSION
    if older.id == newer.id or older.kind not in kinds or older.is_pinned:
        return False
    if rule.is_end_only:
        # A state at a turn start serves every later request of that turn that diverges.
        is_whole = n_common == older.n_tokens < newer.n_tokens
        return is_whole and older.kind is CheckpointKind.CONVERSATION
    if not rule.can_restore or not _moves_on(newer, found):
        return False
    if rule.is_any_prefix:
        return newer.has_every_position
    # At each cut of the older state that a request may return to, the newer state can be continued; or the
    # newer state had the cut, and its context checkpoint was not worth the bytes.
    known = (newer.header, newer.turn_start, *newer.marks)
    marks = (mark for mark in older.marks if is_near(older.restore_points, mark))
    return all(
        n_cut in known or is_near(newer.restore_points, n_cut)
        for n_cut in (older.header, older.turn_start, *marks)
        if 0 < n_cut <= n_common
    )


def _moves_on(newer: Checkpoint, found: Candidate) -> bool:
    """Return whether *newer* is a later state of the same conversation.

    It continues the prompt of the older state, or belongs to a later turn, for which the template has
    dropped reasoning.
    """
    older, n_common = found.checkpoint, found.n_common
    n_prompt_lost = (older.n_prompt or older.n_tokens) - n_common
    if n_prompt_lost <= SLACK_TOKENS and older.n_tokens - n_common <= SMALL_LOSS_TOKENS:
        return newer.n_tokens >= older.n_tokens - SMALL_LOSS_TOKENS
    return newer.turn_start > n_common >= older.turn_start > 0


# The checkpoints that are removed for room.


MIN_PROTECTED_TOKENS = 256
"""A state is protected for its header only if so many tokens of the header would be lost with it."""

N_READ = 256
"""So many checkpoints with the lowest scores are read and put in order. To read one takes an eighth of the
time that comparing it takes, or less: what others share with it is not looked up."""

N_COMPARED = 32
"""So many are compared with those that share tokens, so that a large store costs no more time."""

PAUSE_SECONDS = 60.0
"""The longer a conversation has paused, the less likely it goes on: after an hour a sixtieth as likely.
Pauses shorter than this make no difference."""

SWING_SECONDS = 300.0
"""The more turns a conversation had, the likelier it goes on; after a pause of this length the turns count
half, after twice as long a fifth. Three of four conversations are never continued."""

LIVE_SECONDS = 1800.0
"""A conversation that was not continued for this long may be over, so its header is not protected."""

OTHER_MODEL_SHARE = 0.25
"""The value of a state counts by this share if llama-server does not serve its model now."""


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
    """The state that is about to be saved will supersede it, but may never be saved."""


@dataclass(frozen=True, slots=True)
class Present:
    """The clock and the rates, on which the value of a checkpoint depends.

    `rates_by` has the rates of each namespace that is served. If it is empty, that is not known, and every
    model counts fully. `rates` are for all other namespaces.
    """

    now: float
    rates: Rates = field(default_factory=Rates)
    rates_by: Mapping[Namespace, Rates] = field(default_factory=dict)

    def serves(self, checkpoint: Checkpoint) -> bool:
        """Return whether llama-server may serve the model of a checkpoint."""
        return not self.rates_by or checkpoint.namespace in self.rates_by


def likelihood(checkpoint: Checkpoint, asked_at: float, present: Present) -> float:
    """Return how likely requests go on from a checkpoint for which they last asked at *asked_at*."""
    # After the first one, how often somebody has spoken to the model; a tool's result counts too.
    n_more_turns = max(0, (checkpoint.n_messages - 1) // 2)
    pause_seconds = abs(present.now - asked_at)  # the clock may have been ahead then
    in_swing = n_more_turns / (1 + (pause_seconds / SWING_SECONDS) ** 2)
    share = 1.0 if present.serves(checkpoint) else OTHER_MODEL_SHARE
    return share * (1 + in_swing) / (1 + pause_seconds / PAUSE_SECONDS)


def value_seconds(checkpoint: Checkpoint, lost: Iterable[LostRange], present: Present) -> float:
    """Return the expected seconds to evaluate the *lost* ranges again if a checkpoint were removed."""
    rates = present.rates_by.get(checkpoint.namespace, present.rates)
    return sum(
        likelihood(checkpoint, part.asked_at, present)
        * rates.evaluation_seconds(part.begin, part.end)
        for part in lost
    )


def rank_of(checkpoint: Checkpoint, lost: Iterable[LostRange], present: Present) -> Rank:
    """Return the rank of a checkpoint without which the *lost* ranges are evaluated again."""
    is_live_header = present.serves(checkpoint) and any(
        part.leads_to is CheckpointKind.HEADER
        and part.end - part.begin >= MIN_PROTECTED_TOKENS
        and abs(present.now - part.asked_at) <= LIVE_SECONDS
        for part in lost
    )
    return Rank.LIVE_HEADER if is_live_header else Rank.ORDINARY


def score_of(checkpoint: Checkpoint, asked_at: Iterable[float]) -> float:
    """Return a checkpoint's score; those with the lowest scores are compared for room.

    The score is infinite for a pinned checkpoint and 0 in quarantine. Otherwise it is the newest of the
    times, in seconds since 1970, at which requests began with what would be lost; 1 if there is none.
    """
    if checkpoint.is_pinned:
        return inf
    return 0.0 if checkpoint.quarantine else max([1.0, *asked_at])


def least_likely_first(
    scored: Iterable[tuple[Checkpoint, float]], present: Present
) -> Iterator[Checkpoint]:
    """Yield checkpoints; of N_READ at a time those with the fewest likely tokens per byte come first.

    They are given with their scores, the lowest first.
    """

    def likely_tokens(checkpoint: Checkpoint, score: float) -> float:
        n_tokens = likelihood(checkpoint, score, present) * checkpoint.n_tokens
        return n_tokens / max(1, checkpoint.size_bytes)

    left = iter(scored)
    while read := list(islice(left, N_READ)):
        yield from (c for c, _ in sorted(read, key=lambda each: likely_tokens(*each)))


def choose_victims(
    checkpoints: Iterable[Checkpoint],
    n_bytes_to_free: int,
    relatives: Callable[[Checkpoint], Sequence[Relative]],
    present: Present,
    ranks: Mapping[CheckpointId, Rank],
    in_use: Collection[CheckpointId] = (),
) -> tuple[list[Checkpoint], dict[CheckpointId, float]]:
    """Return the checkpoints to remove, whose sizes add up to *n_bytes_to_free*, and the others' scores.

    The scores are of those that were compared and stay. *checkpoints* that are likely to go come first.
    N_COMPARED of them are compared at a time, and more if all of these are of a high rank.
    *relatives* returns a checkpoint itself and those that share a prefix with it. *ranks* are those that
    do not follow from what is lost. No checkpoint that is pinned or *in_use* is returned, even if too few
    bytes are freed then.
    """
    gone: set[CheckpointId] = set()
    compared: dict[CheckpointId, tuple[Checkpoint, Sequence[Relative]]] = {}
    # One that a commit has moved meanwhile may come twice.
    left = (c for c in checkpoints if not (c.is_pinned or c.id in in_use or c.id in compared))

    def lost_with(checkpoint: Checkpoint) -> list[LostRange]:
        _, (own, *others) = compared[checkpoint.id]
        return lost_without(own, others, gone)

    def order(checkpoint: Checkpoint) -> tuple[Rank, float, float, CheckpointId]:
        lost = lost_with(checkpoint)
        value = value_seconds(checkpoint, lost, present) / max(1, checkpoint.size_bytes)
        given = ranks.get(checkpoint.id)
        rank = rank_of(checkpoint, lost, present) if given is None else given
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
        # Each removal can only raise the order of the checkpoints that are left. So an old order is a lower
        # bound, and only the lowest one is computed again.
        current = order(victim)
        if heap and current > heap[0]:
            heappush(heap, current)
            continue
        victims.append(victim)
        n_bytes_to_free -= victim.size_bytes
        gone.add(victim.id)
    kept = (compared[checkpoint_id][0] for *_, checkpoint_id in heap)
    scores = {c.id: score_of(c, [part.asked_at for part in lost_with(c)]) for c in kept}
    return victims, {i: min(score, present.now) for i, score in scores.items()}
