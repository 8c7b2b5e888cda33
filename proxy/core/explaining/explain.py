"""Why a request reused no more of its prompt than it did: one cause, and how many tokens that cost.

Owns: the order in which causes are considered. What failed beats what was lost, what was lost beats what
the client changed, and that beats how the request was planned.
"""

from dataclasses import dataclass

from proxy.core.explaining.causes import Cause
from proxy.core.explaining.divergence import Change
from proxy.core.explaining.known_prompts import Loss
from proxy.core.model import Rule, RuleKind
from proxy.core.planning.options import Why

SLACK_TOKENS = 64
"""Fewer tokens than this are not worth an explanation: states end a few tokens before prompts do."""

_CHEAPER = (
    Why.NOTHING_WORTH_IT,
    Why.LIVE_CHEAPER,
    Why.RESTORE_SHORTER,
    Why.NOTHING_DISPLACED,
)


@dataclass(frozen=True, slots=True)
class Served:
    """How a request was served: what it reused, and what was there when it was planned.

    The longest prefix that any state shared with it has `n_shared` tokens, in a slot in use `n_in_use`.
    `failure` is what went wrong with the cache on the way, if anything did.
    """

    rule: Rule
    why: Why
    n_prompt: int
    n_reused: int
    n_expected: int
    n_shared: int
    n_in_use: int
    failure: Cause | None = None


@dataclass(frozen=True, slots=True)
class Past:
    """What is known of the same prompt from before.

    `n_common` of its tokens were, `n_like` more or less would have been but for a change of the client.
    `is_of_other_process` says that a llama-server evaluated them that has been replaced since.
    """

    n_common: int = 0
    n_like: int = 0
    is_of_other_process: bool = False
    loss: Loss = Loss()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The cause, and how many tokens were evaluated because of it."""

    cause: Cause
    n_missed: int = 0


def may_be_missed(served: Served, past: Past) -> bool:
    """Return whether there may be anything to explain."""
    return max(_known(served, past), past.n_like) - served.n_reused > SLACK_TOKENS


def judge(served: Served, past: Past, change: Change | None) -> Verdict:
    """Return why no more was reused; *change* is where the client left what it had sent before."""
    n_known = _known(served, past)
    n_unused = n_known - served.n_reused
    if served.failure is not None:
        return Verdict(served.failure, max(0, max(n_known, served.n_expected) - served.n_reused))
    n_there = max(served.n_shared, served.n_reused)
    if n_unused > SLACK_TOKENS and n_there < n_known - SLACK_TOKENS:
        return Verdict(_why_gone(served, past, n_there), n_unused)
    if change is not None and change.cause.is_miss:
        n_missed = max(n_unused, past.n_like - served.n_reused)
        if n_missed > SLACK_TOKENS:
            return Verdict(change.cause, n_missed)
    if n_unused > SLACK_TOKENS:
        return Verdict(_why_unused(served), n_unused)
    is_new = change is not None and change.cause is Cause.FIRST_SIGHT
    return Verdict(Cause.FIRST_SIGHT if is_new or not served.n_reused else Cause.HIT)


def _known(served: Served, past: Past) -> int:
    """Return how many tokens of the prompt have been evaluated before; the last one always is anew."""
    return min(max(past.n_common, served.n_shared), served.n_prompt - 1)


def _why_gone(served: Served, past: Past, n_there: int) -> Cause:
    """Return what became of the state of a prompt of which only *n_there* tokens are left."""
    if isinstance(past.loss.what, Cause) and past.loss.n_tokens > n_there + SLACK_TOKENS:
        return past.loss.what
    if past.is_of_other_process:
        return Cause.RESTART
    return Cause.NOT_KEPT if served.rule.can_restore else Cause.NOTHING_RESTORABLE


def _why_unused(served: Served) -> Cause:
    """Return why a state that was there was not used."""
    if served.n_in_use > served.n_reused + SLACK_TOKENS:
        return Cause.IN_USE
    if served.why in _CHEAPER:
        return Cause.CHEAPER
    if not served.rule.can_restore:
        return Cause.NOTHING_RESTORABLE
    return Cause.UNKNOWN if served.rule.kind is RuleKind.ANY_PREFIX else Cause.NO_STATE_THERE
