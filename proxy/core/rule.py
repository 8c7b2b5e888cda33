"""The learned rule: what a restored state is good for on this server.

Owns: the one place that applies the rule (`usable_tokens`), what the first files tell of the rule
(`derive`, `after_save`), and the judgement of a self-test's measurements (`judge`). Must never know where
a checkpoint lies, which slot it goes to, or how a measurement was made. A caller of `usable_tokens` has
compared the first n_common tokens, one by one.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from proxy.core.model import NO_RULE, Checkpoint, ExpectedState, Rule, RuleKind


def usable_tokens(
    rule: Rule, state: Checkpoint | ExpectedState, n_common: int, n_prompt: int
) -> int:
    """Return how many tokens a restore of *state* saves a prompt of *n_prompt* tokens.

    The last token of a prompt is always evaluated (llama-server needs its logits), so the answer is
    below n_prompt; it is at most n_common, and 0 where the rule forbids every restore point.
    """
    reachable = min(n_common, n_prompt - 1)
    if not rule.can_restore:
        return 0
    if rule.kind is RuleKind.ANY_PREFIX and state.has_every_position:
        return reachable
    # A window that has every position is not full, whatever its length.
    is_within_window = rule.end_holds_from > 0 and state.has_every_position
    if rule.end_holds_from <= state.n_tokens <= reachable and not is_within_window:
        return state.n_tokens
    if rule.kind is RuleKind.RESTORE_POINTS:
        return highest_point(state.restore_points, reachable)
    return 0


def highest_point(points: tuple[int, ...], limit: int) -> int:
    """Return the highest of the ascending *points* that is not above *limit*, or 0."""
    index = bisect_right(points, limit)
    return points[index - 1] if index else 0


FULL_WINDOW_TOKENS = 2200
"""A state this long fills the sliding windows of most models; shorter states are not counted on."""


def derive(
    *, has_points: bool, has_every_position: bool, holds_at_end: bool, rewinds: bool
) -> Rule:
    """Return the rule of a model whose first saved state is shorter than a sliding window.

    Its file tells whether the state has context checkpoints and every position. Only where it has every
    position and no context checkpoint the state need be restored, to see whether it *holds_at_end* and
    *rewinds*: whether requests continue it at its end, and where they leave it before. The four cases:

    1. The file has context checkpoints: *restore points*. With every position it is a sliding window.
    2. It lacks positions, or is not understood: *end only*.
    3. The state rewinds: *any prefix*.
    4. It does not: it is a sliding window, of which a short state may hold at its end.
    """
    if has_every_position and rewinds and not has_points:
        return Rule(RuleKind.ANY_PREFIX)
    kind = RuleKind.RESTORE_POINTS if has_points else RuleKind.END_ONLY
    return Rule(kind, FULL_WINDOW_TOKENS if has_every_position and not holds_at_end else 0)


def after_save(rule: Rule, *, has_every_position: bool) -> Rule:
    """Return the rule once another state was saved: a file that lacks positions cannot be cut anywhere.

    With --swa-full only such a file shows that there is a sliding window.
    """
    is_cut = rule.kind is RuleKind.ANY_PREFIX and not has_every_position
    return replace(rule, kind=RuleKind.END_ONLY) if is_cut else rule


@dataclass(frozen=True, slots=True)
class RestoreProbe:
    """A state of `n_tokens`, what its file says of itself, and the requests that it was restored for.

    `trials` are, of each request, how many tokens it has in common with the state, how many of them it
    could reuse (a prompt's last token is always evaluated), and how many were reused.
    """

    n_tokens: int
    has_every_position: bool
    restore_points: tuple[int, ...]
    trials: tuple[tuple[int, int, int], ...]

    @property
    def holds_at_end(self) -> bool:
        """Whether every request that goes on from the state continued at its end."""
        return all(n == self.n_tokens for _, n_most, n in self.trials if n_most == self.n_tokens)

    @property
    def holds_anywhere(self) -> bool:
        return self.has_every_position and all(n == n_most for _, n_most, n in self.trials)

    @property
    def holds_at_points(self) -> bool:
        """Whether every request continued at the end or at a context checkpoint in the file."""
        has_points = highest_point(self.restore_points, self.n_tokens) > 0
        return (self.holds_at_end or has_points) and all(
            n >= highest_point(self.restore_points, n_most) for _, n_most, n in self.trials
        )

    @property
    def rewinds(self) -> bool:
        """Whether a request that leaves the state before its end continued at a context checkpoint."""
        return self.holds_at_points and any(
            n_common < self.n_tokens and highest_point(self.restore_points, n_most) > 0
            for n_common, n_most, _ in self.trials
        )


def judge(probes: Sequence[RestoreProbe]) -> Rule:
    """Return the rule that *probes*, ascending by length, bear out."""
    if not probes:
        return NO_RULE
    if all(probe.holds_anywhere for probe in probes):
        return Rule(RuleKind.ANY_PREFIX)
    n_at_end = len(list(takewhile(lambda probe: probe.holds_at_end, reversed(probes))))
    if not n_at_end:
        return NO_RULE
    end_holds_from = probes[-n_at_end].n_tokens if n_at_end < len(probes) else 0
    rewinds = any(probe.rewinds for probe in probes)
    is_by_points = rewinds and all(probe.holds_at_points for probe in probes)
    return Rule(RuleKind.RESTORE_POINTS if is_by_points else RuleKind.END_ONLY, end_holds_from)
