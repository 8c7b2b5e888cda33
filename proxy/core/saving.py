"""When a slot is saved, up to which token, how large the file will be, and whether it is worth its bytes.

Pure: knows token counts and sizes, no file format and no clock.

Whether a slot is saved:

1. A slot whose content is not known is saved if a save will tell its tokens and they are worth keeping.
2. Under *end only* a slot is saved as it was at its last cut: the tokens generated behind the cut will not
   come back exactly, and the state could not be rewound. Without a cut the slot is not saved.
3. Under *restore points* and *any prefix* a slot is saved as it is.
4. If nothing can be restored, nothing is saved.
5. A state is not saved if a file holds nearly all of it, or if it is too short to be found or continued.
6. A save that delays a request must pay for itself (`is_worth_saving`).
7. The less is left of the day's write budget, the more a save must be worth (`why_refused`).

Which context checkpoints stay in the file (`select_points`): each is a full recurrent state or a whole
window, 63 to 150 MB on real models, and a file has up to 32 of them. Requests come back to few cuts:
the header, the turn start, the end of the prompt, and, less and less likely, the beginnings of earlier
turns and branches. Points that llama-server has dropped are taken from older files.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from itertools import pairwise
from operator import add

from proxy.core.cuts import (
    MAX_CONTEXT_CHECKPOINTS,
    POINTS_PER_REQUEST,
    SLACK_TOKENS,
    UBATCH_TOKENS,
    cuts_in_message,
    is_near,
    points_after,
    points_made,
)
from proxy.core.eviction import Present
from proxy.core.model import Candidate, CheckpointId, CheckpointKind, Rule, highest_point
from proxy.core.rates import Rates
from proxy.core.slots import Content, Known, Unknown, cut_to

# When a slot is saved, and up to which token.


N_RETURNS = 8
"""A save may take this many times as long as evaluating its tokens again: they are saved once, but would be
evaluated each time that the conversation comes back from disk."""

STEADY_SECONDS = 0.15
"""A save that takes no longer is always worth it, however busy the machine is."""


def at_savable_point(rule: Rule, content: Known) -> Known:
    """Return *content* cut back to the part that is useful in a file."""
    return cut_to(content, content.last_cut) if rule.is_end_only else content


def is_write_back_due(rule: Rule, content: Content) -> bool:
    """Return whether a free slot holds work that no file has."""
    if isinstance(content, Unknown):
        return bool(content.tenant) and content.can_be_adopted and rule.can_restore
    if not isinstance(content, Known) or not rule.can_restore:
        return False
    if content.is_aside or content.is_given_up or not content.can_be_adopted:
        return False
    savable = at_savable_point(rule, content)
    n_useful = rule.end_holds_from if rule.is_end_only else 0
    # A state of more than SLACK_TOKENS has a whole block, so it can be found.
    return savable.n_tokens >= n_useful and savable.n_unsaved > SLACK_TOKENS


def is_worth_saving(
    content: Known, n_unsaved: int, size_bytes: int, rates: Rates, n_stalled: int = 1
) -> bool:
    """Return whether a save of *size_bytes* pays for itself by sparing the *n_unsaved* last tokens.

    llama-server does nothing else during a save: it delays each of *n_stalled* requests. A conversation's
    first save must pay for itself at the first use, because the conversation may end there.
    """
    n_saved = content.n_tokens - n_unsaved
    if content.n_saved:
        return pays_again(n_saved, content.n_tokens, size_bytes, rates, n_stalled)
    evaluation_seconds = rates.evaluation_seconds(n_saved, content.n_tokens)
    return rates.save_seconds(size_bytes) * n_stalled <= evaluation_seconds


def pays_again(n_saved: int, n_tokens: int, size_bytes: int, rates: Rates, n_stalled: int) -> bool:
    """Return whether to save *n_tokens* of a conversation, of which a file has the first *n_saved*."""
    save_seconds = rates.save_seconds(size_bytes) * n_stalled
    return save_seconds <= N_RETURNS * rates.evaluation_seconds(n_saved, n_tokens) + STEADY_SECONDS


def is_expected_to_pay(
    sizes: Iterable["StateSize"], rates: Rates, n_saved: int, n_tokens: int, n_stalled: int = 1
) -> bool:
    """Return what `pays_again` does for a state of which only the tokens are known yet."""
    size_bytes = expected_bytes(sizes, n_tokens, 0) or 0
    return pays_again(n_saved, n_tokens, size_bytes, rates, n_stalled)


def is_cut_at_risk(rule: Rule, content: Content, n_kept: int) -> bool:
    """Return whether the next request may cost a slot a context checkpoint that no file holds.

    A slot keeps *n_kept* of them. The one at the turn start is gone after a few tool calls; then all
    tokens behind an earlier one have to be evaluated again.
    """
    if not rule.is_restore_points or not isinstance(content, Known):
        return False
    made = points_made(content.n_tokens, content.n_tokens + UBATCH_TOKENS, has_messages=True)
    left = points_after(content.possible_points, made, n_kept)
    lost = tuple(point for point in content.restore_points if point not in left)
    # A file with a point behind a cut was saved when the slot had the cut's own point, too. If that file
    # does not have it, it was not worth its bytes.
    n_in_file = max(content.saved_points, default=0) + SLACK_TOKENS
    cuts = (content.header, content.turn_start, *content.marks[-1:])
    return any(n_cut > n_in_file and is_near(lost, n_cut) for n_cut in cuts)


# Which context checkpoints of a saved state are worth their bytes.


OLDER_MARK_SHARE = 0.5
"""How likely a request comes back to the newest mark, or the lowest; half as likely to each one before."""

EDIT_SHARE = 0.05
"""How likely a conversation comes back from disk with a change between two cuts in its newest message."""

MESSAGE_SHARE = 0.1
"""Points inside a message make a file larger by no more than this, or by one point."""


def likely_cuts(content: Known, kind: CheckpointKind) -> dict[int, float]:
    """Return the cuts at which requests may continue a conversation, ascending, and how likely they do.

    However long the conversation is, new sessions come back to its lowest mark, which may be the end of
    an agent's environment. A header or branch that has its own file is continued at its end, which needs
    no point.
    """
    n_tokens = len(content.tokens)
    sure = {content.header, content.turn_start, n_tokens} - {0}
    marks = sorted(set(content.marks) - sure, reverse=True)
    cuts = dict.fromkeys(sure, 1.0)
    cuts |= {mark: OLDER_MARK_SHARE**n for n, mark in enumerate(marks, 1)}
    cuts |= dict.fromkeys(marks[-1:], OLDER_MARK_SHARE)
    is_at_end = kind in (CheckpointKind.HEADER, CheckpointKind.BRANCH)
    return {n: cuts[n] for n in sorted(cuts) if n < n_tokens + (not is_at_end)}


def edit_cuts(content: Known) -> list[int]:
    """Return the cuts in the newest user message, the nearest to its end first.

    The message begins at the last mark before its end, or at the header.
    """
    before = (mark for mark in content.marks if mark < content.turn_start)
    return list(cuts_in_message(max(content.header, *before, 0), content.turn_start))


def points_of_others(relatives: Iterable[Candidate]) -> dict[int, Candidate]:
    """Return the context checkpoints that older files can give, each with the file that has it."""
    return {
        point: relative
        for relative in relatives
        for point in relative.checkpoint.restore_points
        if point <= relative.n_common
    }


def select_points(
    own: Mapping[int, int],
    others: Collection[int],
    cuts: Mapping[int, float],
    rates: Rates,
    inside: Sequence[int] = (),
    state_bytes: int = 0,
    n_at_most: int = MAX_CONTEXT_CHECKPOINTS,
) -> set[int]:
    """Return the points to keep in a file; those that are not its *own* are copied from older files.

    *own* are the points of the file with their sizes in bytes, *others* the points of older files. A point
    of its own is preferred unless another is much closer. Of more than *n_at_most* points those that spare
    most are kept: llama-server would load only the newest. The cuts *inside* the newest user message come
    last. Their points may take a tenth of the other bytes (the *state_bytes* and the other points), or one
    point may take more.
    """
    size_bytes = max(own.values(), default=0)
    mine, theirs = tuple(sorted(own)), tuple(sorted(set(others) - own.keys()))
    kept: dict[int, float] = {}
    n_before = 0
    for n_cut, likelihood in cuts.items():
        point, other = highest_point(mine, n_cut), highest_point(theirs, n_cut)
        if other > point + SLACK_TOKENS:
            point = other
        if point > n_before and _is_kept(likelihood, n_before, point, size_bytes, rates):
            kept[point], n_before = likelihood, point
    while len(kept) > n_at_most:
        spared = {p: kept[p] * (p - n) for n, p in pairwise((0, *kept))}
        del kept[min(spared, key=spared.__getitem__)]
    left_bytes = max(size_bytes, MESSAGE_SHARE * (state_bytes + len(kept) * size_bytes))
    while left_bytes >= size_bytes and len(kept) < n_at_most:
        best = _best_inside(inside, mine, tuple(sorted(kept)), size_bytes, rates)
        if not best:
            break
        kept[best] = EDIT_SHARE
        left_bytes -= size_bytes
    return set(kept)


def _best_inside(
    cuts: Sequence[int], own: tuple[int, ...], kept: tuple[int, ...], size_bytes: int, rates: Rates
) -> int:
    """Return which of its *own* points is worth most at *cuts* in a message; 0 if none is worth its bytes.

    The nearest cut to the message's end comes first. A change is equally likely between any two neighbours.
    """
    best, most, likelihood = 0, 0.0, 0.0
    for n_cut in cuts:
        point, n_before = highest_point(own, n_cut), highest_point(kept, n_cut)
        likelihood += EDIT_SHARE
        worth = likelihood * (point - n_before)
        if n_before >= point:
            likelihood = 0.0  # that point is kept already
        elif worth > most and _is_kept(likelihood, n_before, point, size_bytes, rates):
            best, most = point, worth
    return best


def _is_kept(likelihood: float, n_before: int, point: int, size_bytes: int, rates: Rates) -> bool:
    """Return whether a request is certain to come back to a point, or the point spares more than it costs.

    A second point for few more tokens is kept only if states are small.
    """
    if likelihood >= 1.0 and point > n_before + SLACK_TOKENS:
        return True
    copied_seconds = rates.save_seconds(size_bytes) - rates.save_seconds(0)
    copied_seconds += rates.restore_seconds(size_bytes, is_warm=False)
    copied_seconds -= rates.restore_seconds(0, is_warm=False)
    spared_seconds = rates.evaluation_seconds(n_before, point) - rates.evaluation_call.seconds
    return likelihood * spared_seconds >= copied_seconds


# An upper bound of the size of a state before its save, to make room for it.


@dataclass(frozen=True, slots=True)
class StateSize:
    """The size of one saved state, with its context checkpoints and its draft model's state.

    `fixed_bytes` of it are recurrent states, whose size does not depend on the number of tokens.
    """

    n_tokens: int
    n_points: int
    size_bytes: int
    fixed_bytes: int = 0


def expected_bytes(seen: Iterable[StateSize], n_tokens: int, n_points: int) -> int | None:
    """Return a size that a state of *n_tokens* with at most *n_points* will not exceed.

    None if no state was *seen*. A state consists of a fixed part, a part per token and a part per context
    checkpoint; a context checkpoint is no larger than the fixed part that it is copied from (the recurrent
    state, the window). So a seen state bounds every smaller one by its own size, and every larger one in
    proportion: recurrent states by the number of context checkpoints. The lowest bound is returned.
    """
    sizes = [s for s in seen if s.n_tokens > 0]
    if not any(s.n_points for s in sizes):  # full attention makes none
        n_points = 0
    # Each plan asks this of every slot, so there is no call for each size.
    bounds = [
        size.fixed_bytes * (by_points := max(1.0, (n_points + 1) / (size.n_points + 1)))
        + (size.size_bytes - size.fixed_bytes) * max(by_points, n_tokens / size.n_tokens)
        for size in sizes
    ]
    return int(min(bounds)) + 1 if bounds else None


def extent_of(content: Content) -> tuple[int, int] | None:
    """Return the most tokens and context checkpoints that a slot's state can have; None if unknown."""
    if isinstance(content, Known):
        # One or two more where an evaluation began elsewhere than expected.
        return content.n_tokens, len(content.possible_points) + POINTS_PER_REQUEST
    if isinstance(content, Unknown) and content.likely is not None:
        return len(content.likely), MAX_CONTEXT_CHECKPOINTS
    return None


def state_bytes(seen: Iterable[StateSize], content: Content) -> int:
    """Return an upper bound of the size of a slot's state; 0 if it is not known."""
    extent = extent_of(content)
    return (expected_bytes(seen, *extent) or 0) if extent else 0


# How much was written lately, and which saves get the rest of a day's write budget.
#
# Saves are compared by the seconds of evaluation that they spare for each byte. While half of the budget is
# left, everything is saved. Then the threshold rises from 0 to the average of the last day's saves as the
# budget runs out. So saves that write a long state again for a few new tokens are refused first.


WINDOW_HOURS = 24
PLENTY_SHARE = 0.5
"""While this share of the budget is left, no save is refused for its worth."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A file of at most `n_bytes` that needs room; evicted files are chosen by their value at `present`.

    `replaces` are the checkpoints that the file will supersede. `spared_seconds` is the time to evaluate
    the tokens that only this file will have (None: not known). A passing file is deleted as soon as the
    proxy has read it: it may use up the reserve of free space, the write budget does not apply, and nothing
    refuses it for want of room.
    """

    n_bytes: int
    present: Present
    replaces: frozenset[CheckpointId] = frozenset()
    is_passing: bool = False
    spared_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Hour:
    """The bytes written in an hour; saves of at most `wanted_bytes` together spare `spared_seconds`."""

    n_bytes: int = 0
    wanted_bytes: int = 0
    spared_seconds: float = 0.0

    def __add__(self, other: "Hour") -> "Hour":
        return Hour(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class Written:
    """The bytes written, by the hour since 1970."""

    hours: dict[int, Hour] = field(default_factory=dict)

    def after(self, n_bytes: int, claim: Claim, now: float) -> "Written":
        """Return the record with the *n_bytes* that the save of a *claim* has written."""
        hour = Hour(n_bytes)
        if claim.spared_seconds is not None:
            hour = Hour(n_bytes, claim.n_bytes, claim.spared_seconds)
        this, hours = int(now // 3600), self._last_day(now)
        return Written({**hours, this: hours.get(this, Hour()) + hour})

    def last_day_bytes(self, now: float) -> int:
        """Return the bytes of the last 24 hours, and of the whole hour in which these began."""
        return sum(hour.n_bytes for hour in self._last_day(now).values())

    def seconds_per_byte(self, now: float) -> float:
        """Return the average worth of the last day's saves; 0 if it is not known."""
        total = sum(self._last_day(now).values(), Hour())
        return total.spared_seconds / total.wanted_bytes if total.wanted_bytes else 0.0

    def _last_day(self, now: float) -> dict[int, Hour]:
        this, recent = int(now // 3600), dict[int, Hour]()
        for number, hour in self.hours.items():
            # An hour in the future was written before the clock was set back. One that is far ahead counts
            # no more: while all is refused, nothing would bring it back to this hour.
            if abs(number - this) <= WINDOW_HOURS:
                at = min(number, this)
                recent[at] = recent.get(at, Hour()) + hour
        return recent


def why_refused(
    claim: Claim, written: Written, budget_bytes: int, now: float, pending_bytes: int = 0
) -> str | None:
    """Return why *budget_bytes* a day (0: no limit) do not allow a save, or None if they do.

    *pending_bytes* are the bytes of saves that have begun and do not count as written yet.
    """
    if not budget_bytes:
        return None
    left_bytes = budget_bytes - written.last_day_bytes(now) - pending_bytes
    if left_bytes <= 0 or claim.n_bytes > left_bytes:
        return (
            f"{claim.n_bytes:,} bytes would be written, and {max(0, left_bytes):,} are left "
            f"of max_write_bytes_per_day ({budget_bytes:,})"
        )
    needed = written.seconds_per_byte(now) * scarcity(left_bytes, budget_bytes)
    if claim.spared_seconds is None or claim.spared_seconds >= needed * claim.n_bytes:
        return None
    return (
        f"{claim.n_bytes:,} bytes for {claim.spared_seconds:.3g} s of evaluation are not worth it: "
        f"{left_bytes:,} are left of max_write_bytes_per_day ({budget_bytes:,})"
    )


def scarcity(left_bytes: int, budget_bytes: int) -> float:
    """Return 0 while there is plenty, rising to 1 when nothing is left."""
    return min(1.0, max(0.0, 1 - left_bytes / (PLENTY_SHARE * budget_bytes)))
