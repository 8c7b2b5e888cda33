"""Why a request reused no more, decided from its plan and from known prompts. Pure."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from proxy.core.model import Rule, RuleKind
from proxy.core.plan import Plan, Why
from proxy.explain.causes import Cause, PromptPart
from proxy.explain.compare import Divergence
from proxy.explain.known import SLACK_TOKENS, Loss
from proxy.explain.views import Nearest

if TYPE_CHECKING:
    from proxy.serving.request import Account

_CHEAPER = (Why.NOTHING_WORTH_IT, Why.LIVE_CHEAPER, Why.RESTORE_SHORTER, Why.NOTHING_DISPLACED)


class Judgement(msgspec.Struct, frozen=True):
    """Why a request reused no more, and the known prompt that its prompt was compared with.

    `n_missed` tokens were evaluated because of `cause`. If a change of the prompt is the cause, `part` and
    `message` say where it lies.
    """

    cause: Cause = Cause.NOT_LOOKED_UP
    n_missed: int = 0
    part: PromptPart = PromptPart.NOWHERE
    message: int | None = None
    nearest: Nearest | None = None
    divergence: Divergence | None = None
    is_same_conversation: bool = False


NOT_JUDGED = Judgement()


@dataclass(frozen=True, slots=True)
class Past:
    """The facts about a new prompt that known prompts give.

    Its first `n_common` tokens were evaluated before. Without a change by the client, that would hold for
    its first `n_like` tokens. `is_of_other_process` says that the llama-server process that evaluated them
    has been replaced since.
    """

    n_common: int = 0
    n_like: int = 0
    is_of_other_process: bool = False
    loss: Loss = (None, 0)


def may_be_missed(served: "Account", past: Past) -> bool:
    """Return whether known tokens may have been evaluated again."""
    return max(_n_known(served, past), past.n_like) - (served.n_reused or 0) > SLACK_TOKENS


def judge(
    served: "Account", rule: Rule, past: Past, change: tuple[Cause, Divergence] | None
) -> Judgement:
    """Return why *served* reused no more; *change* is why and where its prompt left an earlier prompt.

    There are four kinds of causes, considered in this order: 1. a failure; 2. a lost state, which no slot
    and no file has; 3. a change by the client or the template; 4. the plan of the request.
    """
    n_known, n_reused, plan = _n_known(served, past), served.n_reused or 0, served.plan
    n_unused = n_known - n_reused
    if plan.why is Why.NOT_WANTED:
        return Judgement(Cause.NOT_LOOKED_UP)
    if served.failure is not None:
        n_expected = max(n_known, plan.start.n_reused)
        return Judgement(served.failure, max(0, n_expected - n_reused))
    n_there = max(plan.n_shared, n_reused)
    if n_unused > SLACK_TOKENS and n_there < n_known - SLACK_TOKENS:
        return Judgement(_why_lost(rule, past, n_there), n_unused)
    cause, where = change or (Cause.HIT, Divergence())
    n_missed = max(n_unused, past.n_like - n_reused)
    if cause.is_miss and n_missed > SLACK_TOKENS:
        return Judgement(cause, n_missed, where.part, where.message)
    if n_unused > SLACK_TOKENS:
        return Judgement(_why_unused(plan, rule, n_reused), n_unused)
    is_new = cause is Cause.FIRST_SIGHT or not n_reused
    return Judgement(Cause.FIRST_SIGHT if is_new else Cause.HIT)


def _n_known(served: "Account", past: Past) -> int:
    """Return how many tokens were evaluated before; llama-server always evaluates the last one anew."""
    return min(max(past.n_common, served.plan.n_shared), served.n_prompt - 1)


def _why_lost(rule: Rule, past: Past, n_there: int) -> Cause:
    """Return why slots and files have only *n_there* tokens of a known prompt."""
    cause, n_lost = past.loss
    if cause is not None and n_lost > n_there + SLACK_TOKENS:
        return cause
    if past.is_of_other_process:
        return Cause.RESTART
    return Cause.NOT_KEPT if rule.can_restore else Cause.NOTHING_RESTORABLE


def _why_unused(plan: Plan, rule: Rule, n_reused: int) -> Cause:
    """Return why a state that a slot or a file has was not used."""
    if plan.n_in_use > n_reused + SLACK_TOKENS:
        return Cause.IN_USE
    if plan.why in _CHEAPER:
        return Cause.CHEAPER
    if not rule.can_restore:
        return Cause.NOTHING_RESTORABLE
    return Cause.UNKNOWN if rule.kind is RuleKind.ANY_PREFIX else Cause.NO_STATE_THERE
