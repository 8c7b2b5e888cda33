"""Which tokens of a state may be reused: the one place that applies the learned rule.

Owns: `usable_tokens`. Must never know where a checkpoint lies or which slot it goes to. Whatever
calls it has already compared the first n_common tokens, one by one.
"""

from bisect import bisect_right
from typing import Protocol, assert_never

from proxy.core.model import Rule, RuleKind


class State(Protocol):
    """What the rule asks of a state that is saved, or will be; the fields are as in Checkpoint."""

    @property
    def n_tokens(self) -> int: ...

    @property
    def restore_points(self) -> tuple[int, ...]: ...

    @property
    def has_every_position(self) -> bool: ...


def usable_tokens(rule: Rule, state: State, n_common: int, n_prompt: int) -> int:
    """Return how many tokens a restore of *state* saves a prompt of *n_prompt* tokens.

    The last token of a prompt is always evaluated (llama-server needs its logits), so the answer is
    below n_prompt; it is at most n_common, and 0 where the rule forbids every restore point.
    """
    reachable = min(n_common, n_prompt - 1)
    holds_at_end = rule.end_holds_from <= state.n_tokens <= reachable
    at_end = state.n_tokens if holds_at_end else 0
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
