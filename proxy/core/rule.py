"""The learned rule: what a restored state is good for on this server."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol, assert_never

import msgspec

from proxy.core.model import NO_RULE, Rule, RuleKind

# Which tokens of a state may be reused: the one place that applies the learned rule.
#
# Owns: `usable_tokens`. Must never know where a checkpoint lies or which slot it goes to. Whatever calls
# it has already compared the first n_common tokens, one by one.


class SavedState(Protocol):
    """What the rule asks of a state that is saved, or will be; the fields are as in Checkpoint."""

    @property
    def n_tokens(self) -> int: ...

    @property
    def restore_points(self) -> tuple[int, ...]: ...

    @property
    def has_every_position(self) -> bool: ...


def usable_tokens(rule: Rule, state: SavedState, n_common: int, n_prompt: int) -> int:
    """Return how many tokens a restore of *state* saves a prompt of *n_prompt* tokens.

    The last token of a prompt is always evaluated (llama-server needs its logits), so the answer is
    below n_prompt; it is at most n_common, and 0 where the rule forbids every restore point.
    """
    reachable = min(n_common, n_prompt - 1)
    holds_at_end = rule.end_holds_from <= state.n_tokens <= reachable
    at_end = state.n_tokens if holds_at_end else 0
    if not rule.can_restore:
        return 0
    match rule.kind:
        case RuleKind.NOTHING:
            return 0
        case RuleKind.END_ONLY:
            return at_end
        case RuleKind.RESTORE_POINTS:
            return at_end or highest_point(state.restore_points, reachable)
        case RuleKind.ANY_PREFIX:
            return reachable if state.has_every_position else at_end
        case _:
            assert_never(rule.kind)


def highest_point(points: tuple[int, ...], limit: int) -> int:
    """Return the highest of the ascending *points* that is not above *limit*, or 0."""
    index = bisect_right(points, limit)
    return points[index - 1] if index else 0


# What measured probes say a restored state is good for: the learned rule.
#
# Owns: the judgement of a self-test's measurements. Pure; must never know how they were made.


@dataclass(frozen=True, slots=True)
class Trial:
    """One request after a restore: its length, what it has in common with the state, what was reused."""

    n_prompt: int
    n_common: int
    n_reused: int

    @property
    def n_reachable(self) -> int:
        """The most that can be reused: a prompt's last token is always evaluated."""
        return min(self.n_common, self.n_prompt - 1)


@dataclass(frozen=True, slots=True)
class RestoreProbe:
    """A state of `n_tokens`, what its file says of itself, and the requests it was restored for."""

    n_tokens: int
    has_every_position: bool
    restore_points: tuple[int, ...]
    trials: tuple[Trial, ...]

    @property
    def holds_at_end(self) -> bool:
        """Whether every request that goes on from the state continued at its end."""
        return all(t.n_reused == self.n_tokens for t in self._extending)

    @property
    def holds_anywhere(self) -> bool:
        return self.has_every_position and all(t.n_reused == t.n_reachable for t in self.trials)

    @property
    def holds_at_points(self) -> bool:
        """Whether every request continued at the end or at a context checkpoint in the file."""
        ends = all(self.holds_at_end or self._promised(t) > 0 for t in self._extending)
        return ends and all(t.n_reused >= self._promised(t) for t in self.trials)

    @property
    def rewinds(self) -> bool:
        """Whether a request that leaves the state before its end continued at a context checkpoint."""
        return self.holds_at_points and any(
            t.n_common < self.n_tokens and self._promised(t) > 0 for t in self.trials
        )

    @property
    def _extending(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.n_reachable == self.n_tokens]

    def _promised(self, trial: Trial) -> int:
        return highest_point(self.restore_points, trial.n_reachable)


def judge(probes: Sequence[RestoreProbe]) -> Rule:
    """Return the rule that *probes*, ascending by length, bear out."""
    if not probes:
        return NO_RULE
    n_at_end = len(list(takewhile(lambda probe: probe.holds_at_end, reversed(probes))))
    end_holds_from = probes[-n_at_end].n_tokens if 0 < n_at_end < len(probes) else 0
    if all(probe.holds_anywhere for probe in probes):
        return Rule(RuleKind.ANY_PREFIX)
    rewinds = any(probe.rewinds for probe in probes)
    if rewinds and n_at_end and all(probe.holds_at_points for probe in probes):
        return Rule(RuleKind.RESTORE_POINTS, end_holds_from)
    return Rule(RuleKind.END_ONLY, end_holds_from) if n_at_end else NO_RULE


def diverging_tells(probe_points: Iterable[int], has_every_position: bool, n_common: int) -> bool:
    """Return whether a request that shares *n_common* tokens could reuse any of them."""
    return has_every_position or any(point <= n_common for point in probe_points)


class SelfTestResult(msgspec.Struct, frozen=True):
    """What a self-test found; None where no second slot was free to find it out.

    `restores_beside`: two slots that restore a state at once both continue from it. `keeps_idle`: a
    slot still holds its tokens after the other one has run. `repairs_windows`: where a window was cut on
    saving, the file is repaired.
    """

    rule: Rule
    restores_beside: bool | None = None
    keeps_idle: bool | None = None
    repairs_windows: bool = True
