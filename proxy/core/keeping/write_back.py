"""When and where a dirty slot is saved.

Owns: what of a slot's content a save could make durable, and whether that is worth a file. Pure.
"""

from dataclasses import dataclass, replace

from proxy.core.cuts import SLACK_TOKENS
from proxy.core.model import Rule, RuleKind
from proxy.core.prefix import FIRST_BLOCK_TOKENS
from proxy.core.rates import Rates
from proxy.core.restore import highest_point
from proxy.core.slots import Content, Known, Unknown

N_RETURNS = 8
"""Work is saved once and missing each time that its conversation comes back from disk: so many times as
long as evaluating it again a save may take."""


STEADY_SECONDS = 0.15
"""A save that takes no longer is always worth it, whatever mood the machine is in."""


@dataclass(frozen=True, slots=True)
class Worth:
    """What a save of one slot costs, and what it spares."""

    save_seconds: float
    evaluation_seconds: float
    is_first: bool = False

    @property
    def is_worth_it(self) -> bool:
        """Whether the save pays for itself; a conversation's first one at once, for it may end there."""
        if self.is_first:
            return self.save_seconds <= self.evaluation_seconds
        return self.save_seconds <= N_RETURNS * self.evaluation_seconds + STEADY_SECONDS


def worth_of(content: Known, n_unsaved: int, size_bytes: int, rates: Rates) -> Worth:
    """Return what it costs to save a slot of *size_bytes*, and to evaluate its *n_unsaved* last tokens."""
    n_saved = max(0, content.n_tokens - n_unsaved)
    return Worth(
        rates.save_seconds(size_bytes),
        rates.evaluation_seconds(n_saved, content.n_tokens),
        is_first=content.n_saved == 0,
    )


def at_savable_point(rule: Rule, content: Known) -> Known | None:
    """Return *content* cut back to where a save of it helps, or None if nowhere.

    Under *end only* that is the last cut: what was generated behind it does not come back token for
    token, and the state could not be rewound. Elsewhere the slot is saved as it stands.
    """
    match rule.kind:
        case RuleKind.NOTHING:
            return None
        case RuleKind.END_ONLY:
            if not content.last_cut:
                return None
            return _cut_to(content, content.last_cut)
        case RuleKind.RESTORE_POINTS | RuleKind.ANY_PREFIX:
            return content


def _cut_to(content: Known, n_tokens: int) -> Known:
    """Return *content* without what lies behind its first *n_tokens*, cuts included."""
    return replace(
        content,
        tokens=content.tokens[:n_tokens],
        n_tail=0,
        header=content.header if content.header <= n_tokens else 0,
        turn_start=content.turn_start if content.turn_start <= n_tokens else 0,
        marks=tuple(mark for mark in content.marks if mark <= n_tokens),
    )


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
