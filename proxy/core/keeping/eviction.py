"""Which checkpoints go when there is no room.

Owns: a checkpoint's value and `choose_victims`. Pure; must never log, unlink or read the clock.

The value is the seconds of evaluation that losing a checkpoint would cost: those of the tokens that
nothing else that is kept could give, halved for every half-life since a request last came that way.
The lowest standing goes first, then the least value per byte.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from heapq import heapify, heappop, heappush

from proxy.core.keeping.lineage import Gone, Lineage, Stretch
from proxy.core.model import (
    Checkpoint,
    CheckpointId,
    CheckpointKind,
)
from proxy.core.prefix import Namespace
from proxy.core.rates import Rates

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
