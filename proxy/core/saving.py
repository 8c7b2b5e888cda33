"""When a slot is saved, what of it, and whether the save is worth its bytes."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from proxy.core.cuts import SLACK_TOKENS
from proxy.core.model import Candidate, Checkpoint, CheckpointId, CheckpointKind, Rule, RuleKind
from proxy.core.rates import Rates
from proxy.core.rule import highest_point
from proxy.core.slots import MAX_CONTEXT_CHECKPOINTS, Content, Known, Unknown, cut_to
from proxy.core.tokens import FIRST_BLOCK_TOKENS

# Which context checkpoints of a saved state are worth their bytes.
#
# Owns: the choice among those that llama-server wrote into a file and those that older files of the same
# conversation still have, though llama-server has dropped them since. Pure; knows token counts and sizes,
# no file format.
#
# Each is a full recurrent state or a whole window, 63 to 150 MB on real models, and up to 32 of them are
# in a file. A request comes back to few places: the header, the start of the turn, the end of the prompt,
# and, less and less likely, where earlier turns began or prompts branched.


OLDER_PLACE_SHARE = 0.5
"""How likely a request comes back to the newest of the marks; to each one before it, half as likely."""


@dataclass(frozen=True, slots=True)
class Donor:
    """An older file that a context checkpoint can be taken from, and its restore points that are common."""

    id: CheckpointId
    points: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChosenPoints:
    """The restore points that stay in a file, and those that are taken from older ones."""

    own: frozenset[int]
    grafted: Mapping[int, CheckpointId]

    @property
    def points(self) -> frozenset[int]:
        return self.own | self.grafted.keys()


@dataclass(frozen=True, slots=True)
class ReturnPoint:
    """Where requests come back to, and how likely."""

    n_tokens: int
    likelihood: float


def places_of(content: Known, kind: CheckpointKind) -> list[ReturnPoint]:
    """Return the places that requests may come back to in a conversation, ascending.

    A header or branch that is saved for itself is continued at its end.
    """
    sure = {content.header, content.turn_start, len(content.tokens)} - {0}
    places = [ReturnPoint(n, 1.0) for n in sure]
    likelihood = 1.0
    for mark in sorted(set(content.marks) - sure, reverse=True):
        likelihood *= OLDER_PLACE_SHARE
        places.append(ReturnPoint(mark, likelihood))
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
    own: Mapping[int, int], donors: Iterable[Donor], places: Iterable[ReturnPoint], rates: Rates
) -> ChosenPoints:
    """Return which points to keep of a file whose *own* are given with their sizes in bytes."""
    owners = {point: donor.id for donor in donors for point in donor.points if point not in own}
    size_bytes = max(own.values(), default=0)
    kept: list[int] = []
    for place in places:
        point = _point_for(place, own, owners)
        n_before = kept[-1] if kept else 0
        if point > n_before and _is_kept(place, n_before, point, size_bytes, rates):
            kept.append(point)
    return ChosenPoints(
        frozenset(p for p in kept if p in own), {p: owners[p] for p in kept if p in owners}
    )


def _point_for(
    place: ReturnPoint, own: Mapping[int, int], owners: Mapping[int, CheckpointId]
) -> int:
    """Return the best point for a place, 0 if there is none; its own one unless another is much better."""
    mine = highest_point(tuple(sorted(own)), place.n_tokens)
    theirs = highest_point(tuple(sorted(owners)), place.n_tokens)
    return theirs if theirs > mine + SLACK_TOKENS else mine


def _is_kept(place: ReturnPoint, n_before: int, point: int, size_bytes: int, rates: Rates) -> bool:
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


# How large a state will be, before it is saved.
#
# Owns: the upper bound that room is made for. Pure; must never know what a state consists of.


@dataclass(frozen=True, slots=True)
class StateSize:
    """The size of one state that was saved, with its context checkpoints, draft and all."""

    n_tokens: int
    n_points: int
    size_bytes: int


def expected_bytes(seen: Iterable[StateSize], n_tokens: int, n_points: int) -> int | None:
    """Return a size that a state of *n_tokens* with at most *n_points* will not exceed.

    None if nothing like it was *seen*. A state is a fixed part, so much a token and so much a context
    checkpoint, and none of these is larger than the fixed part they are copied from (the recurrent
    state, the window). So a state seen bounds every smaller one by its size and every larger one in
    proportion; the lowest of these bounds is taken.
    """
    sizes = [s for s in seen if s.n_tokens > 0]
    has_points = any(s.n_points for s in sizes)  # full attention makes none
    return min((_bound(s, n_tokens, n_points if has_points else 0) for s in sizes), default=None)


def _bound(seen: StateSize, n_tokens: int, n_points: int) -> int:
    times_longer = n_tokens / seen.n_tokens
    times_more_points = (n_points + 1) / (seen.n_points + 1)
    return int(seen.size_bytes * max(1.0, times_longer, times_more_points)) + 1


def extent_of(content: Content) -> tuple[int, int] | None:
    """Return how many tokens and context checkpoints a slot's state has at most; None if unknown."""
    match content:
        case Known():
            return content.n_tokens, content.n_points_at_most
        case Unknown(likely=likely) if likely is not None:
            return len(likely), MAX_CONTEXT_CHECKPOINTS
        case _:
            return None


def state_bytes(seen: Iterable[StateSize], content: Content) -> int:
    """Return how large the state of a slot will be at most; 0 while nothing like it was saved."""
    extent = extent_of(content)
    return (expected_bytes(seen, *extent) or 0) if extent else 0


# When and where a dirty slot is saved.
#
# Owns: what of a slot's content a save could make durable, and whether that is worth a file. Pure.


N_RETURNS = 8
"""Work is saved once and missing each time that its conversation comes back from disk: so many times as
long as evaluating it again a save may take."""


STEADY_SECONDS = 0.15
"""A save that takes no longer is always worth it, whatever mood the machine is in."""


def is_worth_saving(content: Known, n_unsaved: int, size_bytes: int, rates: Rates) -> bool:
    """Return whether a save of *size_bytes* pays for itself: it spares the *n_unsaved* last tokens.

    A conversation's first save must pay for itself at once, for the conversation may end there.
    """
    save_seconds = rates.save_seconds(size_bytes)
    n_saved = max(0, content.n_tokens - n_unsaved)
    evaluation_seconds = rates.evaluation_seconds(n_saved, content.n_tokens)
    if content.n_saved == 0:
        return save_seconds <= evaluation_seconds
    return save_seconds <= N_RETURNS * evaluation_seconds + STEADY_SECONDS


def at_savable_point(rule: Rule, content: Known) -> Known | None:
    """Return *content* cut back to where a save of it helps, or None if nowhere.

    Under *end only* that is the last cut: what was generated behind it does not come back token for
    token, and the state could not be rewound. Elsewhere the slot is saved as it stands. Until the rule is
    known only a slot that was just stopped at a cut is saved: the rest can wait.
    """
    match rule.kind:
        case RuleKind.NOTHING:
            return None
        case RuleKind.END_ONLY:
            if not content.last_cut or not (rule.is_known or content.last_cut == content.n_tokens):
                return None
            return cut_to(content, content.last_cut)
        case RuleKind.RESTORE_POINTS | RuleKind.ANY_PREFIX:
            return content


def is_write_back_due(rule: Rule, content: Content) -> bool:
    """Return whether a free slot holds work that no file has."""
    if isinstance(content, Unknown):
        return content.can_be_adopted and rule.can_restore
    if not isinstance(content, Known):
        return False
    savable = at_savable_point(rule, content)
    return (
        savable is not None
        and savable.n_tokens >= max(FIRST_BLOCK_TOKENS, _shortest_useful(rule))
        and savable.n_unsaved > SLACK_TOKENS
    )


def _shortest_useful(rule: Rule) -> int:
    return rule.end_holds_from if rule.kind is RuleKind.END_ONLY else 0


def is_place_at_risk(rule: Rule, content: Content, n_believed: int) -> bool:
    """Return whether the next requests will cost a slot a place that no file holds.

    llama-server keeps so many context checkpoints in a slot and drops the oldest: the start of a turn is
    gone after about ten calls of its tool loop, and with it all that lies behind an earlier one.
    """
    if rule.kind is not RuleKind.RESTORE_POINTS or not isinstance(content, Known):
        return False
    return any(
        _is_oldest(content.restore_points, place, n_believed)
        and highest_point(content.saved_points, place) < place - SLACK_TOKENS
        for place in (content.header, content.turn_start, *content.marks[-1:])
        if place >= FIRST_BLOCK_TOKENS
    )


_N_POINTS_AHEAD = 3
"""A request adds one point at its end and one for each stop on its way."""


def _is_oldest(points: tuple[int, ...], place: int, n_believed: int) -> bool:
    """Return whether a slot's point for a place is there, and among the next that will be dropped."""
    point = highest_point(points, place)
    if point < place - SLACK_TOKENS:
        return False
    n_newer = len(points) - 1 - points.index(point)
    return n_newer >= n_believed - _N_POINTS_AHEAD


# How much was written lately, and which saves are still worth their bytes.
#
# Owns: the bytes of the last 24 hours by the hour, and who gets what is left of a day's budget. Pure;
# must never know files or read the clock.
#
# A save's worth is the seconds of evaluation that it spares for each byte. While half of the budget is
# left, everything is saved. Then a save must be worth something, and the more the less is left: at the
# end as much as those of the last day were on average. So what would write a long state again for a few
# new tokens is refused first.


WINDOW_HOURS = 24
PLENTY_SHARE = 0.5
"""While so much of the budget is left, nobody asks what a save is worth."""


@dataclass(frozen=True, slots=True)
class WantedSave:
    """A save of at most *n_bytes*; `spared_seconds` is None where nobody knows what it would spare."""

    n_bytes: int
    spared_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Hour:
    """What was written in an hour; `wanted_bytes` were foreseen for what spares `spared_seconds`."""

    n_bytes: int = 0
    wanted_bytes: int = 0
    spared_seconds: float = 0.0

    def __add__(self, other: "Hour") -> "Hour":
        return Hour(
            self.n_bytes + other.n_bytes,
            self.wanted_bytes + other.wanted_bytes,
            self.spared_seconds + other.spared_seconds,
        )


@dataclass(frozen=True, slots=True)
class Written:
    """What was written, by the hour of the epoch."""

    hours: dict[int, Hour] = field(default_factory=dict)

    def after(self, n_bytes: int, wanted: WantedSave, now: float) -> "Written":
        """Return what was written once a save that was *wanted* has written *n_bytes*."""
        if wanted.spared_seconds is None:
            hour = Hour(n_bytes)
        else:
            hour = Hour(n_bytes, wanted.n_bytes, wanted.spared_seconds)
        this, hours = int(now // 3600), self._last_day(now)
        return Written({**hours, this: hours.get(this, Hour()) + hour})

    def last_day_bytes(self, now: float) -> int:
        """Return the bytes of the last 24 hours, and of the whole hour in which they began."""
        return sum(hour.n_bytes for hour in self._last_day(now).values())

    def seconds_per_byte(self, now: float) -> float:
        """Return what the saves of the last day were worth on average; 0 if none is known."""
        total = sum(self._last_day(now).values(), Hour())
        return total.spared_seconds / total.wanted_bytes if total.wanted_bytes else 0.0

    def _last_day(self, now: float) -> dict[int, Hour]:
        this, recent = int(now // 3600), dict[int, Hour]()
        for number, hour in self.hours.items():
            if number >= this - WINDOW_HOURS:
                # What lies ahead was written before somebody set the clock back.
                at = min(number, this)
                recent[at] = recent.get(at, Hour()) + hour
        return recent


def why_refused(
    wanted: WantedSave, written: Written, budget_bytes: int, now: float, pending_bytes: int = 0
) -> str | None:
    """Return why a save is not made within *budget_bytes* a day (0: no limit), or None if it is.

    *pending_bytes* are those of saves that were begun and are not counted as written yet.
    """
    if not budget_bytes:
        return None
    left_bytes = budget_bytes - written.last_day_bytes(now) - pending_bytes
    if left_bytes <= 0 or wanted.n_bytes > left_bytes:
        return (
            f"{wanted.n_bytes:,} bytes would be written, and {max(0, left_bytes):,} are left "
            f"of max_write_bytes_per_day ({budget_bytes:,})"
        )
    needed = written.seconds_per_byte(now) * scarcity(left_bytes, budget_bytes)
    if wanted.spared_seconds is None or wanted.spared_seconds >= needed * wanted.n_bytes:
        return None
    return (
        f"{wanted.n_bytes:,} bytes for {wanted.spared_seconds:.3g} s of evaluation are not worth it: "
        f"{left_bytes:,} are left of max_write_bytes_per_day ({budget_bytes:,})"
    )


def scarcity(left_bytes: int, budget_bytes: int) -> float:
    """Return 0 while there is plenty, rising to 1 when nothing is left."""
    return min(1.0, max(0.0, 1 - left_bytes / (PLENTY_SHARE * budget_bytes)))
