"""Which context checkpoints of a saved state are worth their bytes.

Owns: the choice among those that llama-server wrote into a file and those that older files of the same
conversation still have, though llama-server has dropped them since. Pure; knows token counts and sizes,
no file format.

Each is a full recurrent state or a whole window, 63 to 150 MB on real models, and up to 32 of them are in
a file. A request comes back to few places: the header, the start of the turn, the end of the prompt, and,
less and less likely, where earlier turns began or prompts branched.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from proxy.core.cuts import SLACK_TOKENS
from proxy.core.model import Candidate, Checkpoint, CheckpointId, CheckpointKind
from proxy.core.rates import Rates
from proxy.core.restore import highest_point
from proxy.core.slots import Known

OLDER_PLACE_SHARE = 0.5
"""How likely a request comes back to the newest of the marks; to each one before it, half as likely."""


@dataclass(frozen=True, slots=True)
class Donor:
    """An older file that a context checkpoint can be taken from, and its restore points that are common."""

    id: CheckpointId
    points: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Selection:
    """The restore points that stay in a file, and those that are taken from older ones."""

    own: frozenset[int]
    grafted: Mapping[int, CheckpointId]

    @property
    def points(self) -> frozenset[int]:
        return self.own | self.grafted.keys()


@dataclass(frozen=True, slots=True)
class Place:
    """Where requests come back to, and how likely."""

    n_tokens: int
    likelihood: float


def places_of(content: Known, kind: CheckpointKind) -> list[Place]:
    """Return the places that requests may come back to in a conversation, ascending.

    A header or branch that is saved for itself is continued at its end.
    """
    sure = {content.header, content.turn_start, len(content.tokens)} - {0}
    places = [Place(n, 1.0) for n in sure]
    likelihood = 1.0
    for mark in sorted(set(content.marks) - sure, reverse=True):
        likelihood *= OLDER_PLACE_SHARE
        places.append(Place(mark, likelihood))
    is_at_end = kind in (CheckpointKind.HEADER, CheckpointKind.BRANCH)
    n_end = len(content.tokens) if is_at_end else len(content.tokens) + 1
    return sorted((p for p in places if p.n_tokens < n_end), key=lambda place: place.n_tokens)


def donors_of(candidates: Iterable[Candidate]) -> list[Donor]:
    """Return the files that have context checkpoints of the tokens that they share."""
    donors = (Donor(c.checkpoint.id, _common_points(c)) for c in candidates)
    return [donor for donor in donors if donor.points]


def _common_points(candidate: Candidate) -> tuple[int, ...]:
    return tuple(p for p in candidate.checkpoint.restore_points if p <= candidate.n_common)


def select_points(
    own: Mapping[int, int], donors: Iterable[Donor], places: Iterable[Place], rates: Rates
) -> Selection:
    """Return which points to keep of a file whose *own* are given with their sizes in bytes."""
    owners = {point: donor.id for donor in donors for point in donor.points if point not in own}
    size_bytes = max(own.values(), default=0)
    kept: list[int] = []
    for place in places:
        point = _point_for(place, own, owners)
        n_before = kept[-1] if kept else 0
        if point > n_before and _is_kept(place, n_before, point, size_bytes, rates):
            kept.append(point)
    return Selection(
        frozenset(p for p in kept if p in own), {p: owners[p] for p in kept if p in owners}
    )


def _point_for(place: Place, own: Mapping[int, int], owners: Mapping[int, CheckpointId]) -> int:
    """Return the best point for a place, 0 if there is none; its own one unless another is much better."""
    mine = highest_point(tuple(sorted(own)), place.n_tokens)
    theirs = highest_point(tuple(sorted(owners)), place.n_tokens)
    return theirs if theirs > mine + SLACK_TOKENS else mine


def _is_kept(place: Place, n_before: int, point: int, size_bytes: int, rates: Rates) -> bool:
    """Return whether a point is at a place that surely comes, or spares more than its bytes cost.

    The few tokens between two that are close are worth another one only where states are small.
    """
    if place.likelihood >= 1.0 and point > n_before + SLACK_TOKENS:
        return True
    copied_seconds = rates.save_seconds(size_bytes) - rates.save_seconds(0)
    copied_seconds += rates.restore_seconds(size_bytes, is_warm=False)
    copied_seconds -= rates.restore_seconds(0, is_warm=False)
    spared_seconds = rates.evaluation_seconds(n_before, point) - rates.evaluation_call.seconds
    return place.likelihood * spared_seconds >= copied_seconds


def marks_left(checkpoint: Checkpoint) -> Iterator[int]:
    """Yield the marks of a checkpoint that it can be continued at, or shortly before."""
    for mark in checkpoint.marks:
        if highest_point(checkpoint.restore_points, mark) >= mark - SLACK_TOKENS:
            yield mark
