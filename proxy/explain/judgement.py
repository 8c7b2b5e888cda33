"""What a request reused, and why no more: decided from its plan and from known prompts. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.core.messages import Route
from proxy.core.model import Outcome, Rule
from proxy.core.plan import Plan, Start, Why
from proxy.core.rates import Rates
from proxy.explain.causes import Cause, PromptPart
from proxy.explain.compare import HEADER, Change, Divergence, find_change
from proxy.explain.known import NO_LOSS, SLACK_TOKENS, KnownPrompt, Loss, Match, Matches
from proxy.explain.sketch import goes_on
from proxy.explain.views import Nearest
from proxy.llama.client import Timings

Leased = Mapping[str, Collection[int]]
"""The slots in use of the llama-server processes that run, by the ids of these."""
_CHEAPER = (Why.NOTHING_WORTH_IT, Why.LIVE_CHEAPER, Why.RESTORE_SHORTER, Why.NOTHING_DISPLACED)


@dataclass
class Account:
    """Adds up llama-server's replies to one request: first those at its stops, then its own.

    Only the first reply tells what the slot held before: later replies reuse what this request evaluated.
    `failure` says what failed, if the request reused less because of it. `saved_seconds` is how long
    evaluating the reused tokens would have taken at the measured speeds, or at the request's own if that is
    higher, less the restore; None if no speed was measured.
    """

    plan: Plan
    n_prompt: int
    n_reused: int | None = None
    n_evaluated: int = 0
    evaluation_seconds: float = 0.0
    is_degraded: bool = False
    failure: Cause | None = None
    restore_seconds: float = 0.0
    saved_seconds: float | None = None
    queued_seconds: float = 0.0
    prepared_seconds: float = 0.0

    def add(self, timings: Timings, rates: Rates) -> None:
        """Add a reply; if it tells no time, as those of /v1/messages, the time is estimated by *rates*."""
        if self.n_reused is None:
            self.n_reused = timings.cache_n
        self.n_evaluated += timings.prompt_n
        seconds = timings.prompt_ms / 1000
        if not seconds and rates.is_measured:
            seconds = rates.evaluation_seconds(timings.cache_n, timings.cache_n + timings.prompt_n)
        self.evaluation_seconds += seconds

    def value(self, rates: Rates, fetch_seconds: float) -> None:
        """Note the seconds that the reuse saved, less those of a fetch, if speeds were measured.

        Earlier tokens cost no more than those that were evaluated now: the *rates* may be from a busy hour.
        """
        if self.n_reused is not None and rates.is_measured:
            whole = rates.evaluation_seconds(0, self.n_prompt)
            rest = rates.evaluation_seconds(self.n_reused, self.n_prompt)
            most = self.n_reused * self.evaluation_seconds / max(1, self.n_evaluated)
            saved_seconds = min(whole - rest, most) - self.restore_seconds - fetch_seconds
            self.saved_seconds = round(saved_seconds, 4) + 0.0  # no minus zero

    def move(self, plan: Plan) -> None:
        """Change to another plan; the next reply tells what the slot held before."""
        self.plan, self.n_reused = plan, None

    @property
    def n_expected(self) -> int:
        """How many tokens an answer that begins now reuses: as llama-server said, else as planned."""
        if self.n_reused is not None:
            return self.n_reused
        is_refused = self.is_degraded and self.failure is Cause.RESTORE_REFUSED
        return 0 if is_refused else self.plan.start.n_reused

    @property
    def _reuses_less(self) -> bool:
        # Of two context checkpoints a token apart, as a window may have, llama-server takes the lower one.
        return self.n_reused is not None and self.n_reused < self.plan.start.n_reused - 1

    @property
    def is_ineffective_restore(self) -> bool:
        """Whether a restore that answered 200 was not reused as planned."""
        return self.plan.start.restored is not None and not self.is_degraded and self._reuses_less

    @property
    def is_drift(self) -> bool:
        """Whether more was reused than the slot was believed to hold."""
        at_most = self.plan.start.n_at_most
        return self.n_reused is not None and not self.is_degraded and self.n_reused > at_most

    @property
    def is_short(self) -> bool:
        """Whether a live slot gave less than it was believed to hold."""
        return self.plan.start.restored is None and self._reuses_less

    @property
    def outcome(self) -> Outcome:
        if self.is_degraded:
            return Outcome.DEGRADED
        if (self.n_reused or 0) <= min(SLACK_TOKENS, self.n_prompt // 2):
            return Outcome.MISS  # every prompt of a template begins with the same few tokens
        return Outcome.PARTIAL if self._reuses_less else Outcome.HIT

    @property
    def n_restored(self) -> int:
        """How many tokens were reused because a restore brought them back, as the reply confirms."""
        is_restored = self.plan.start.restored is not None and not self.is_degraded
        return (self.n_reused or 0) if is_restored else 0

    def describe(self) -> dict[str, Any]:
        """Return the plan, the reason for it and its result, as fields of a RequestRecord."""
        plan, start, cuts = self.plan, self.plan.start, self.plan.cuts
        return {
            "slot": plan.slot_id,
            "chosen": start.kind,
            "why": plan.why.value,
            "n_prompt": self.n_prompt,
            "expected": start.n_reused,
            "confirmed": self.n_reused,
            "evaluated": self.n_evaluated,
            "queued_seconds": round(self.queued_seconds, 4),
            "prepared_seconds": round(self.prepared_seconds, 4),
            "evaluation_seconds": round(self.evaluation_seconds, 4),
            "saved_seconds": self.saved_seconds,
            "expected_seconds": round(start.seconds, 4),
            "alternatives": tuple(_describe(option) for option in plan.alternatives),
            "stops": tuple(stop.n_tokens for stop in plan.stops),
            "cuts": (cuts.header, cuts.turn_start, cuts.branch),
        }


def _describe(option: Start) -> str:
    """Return an option that was not chosen in a few words, with its cost."""
    way = f"{option.kind} {option.n_reused}" if option.n_reused else option.kind
    costs = f"{option.seconds:.3f} s"
    if option.displacement.seconds:
        costs += f" + {option.displacement.seconds:.3f} s displaced"
    return f"{way} in slot {option.slot_id}: {costs}"


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
_NAMED: dict[Cause | PromptPart, tuple[str, str]] = {
    Cause.HIT: ("", "cache_hit"),
    Cause.FIRST_SIGHT: ("previous_message_not_found", "comparison_response_not_found"),
    Cause.TRUNCATED_HISTORY: ("messages_changed", "context_compacted"),
    PromptPart.TOOLS: ("tools_changed", "tools_changed"),
    PromptPart.SYSTEM: ("system_changed", "input_changed"),
    PromptPart.NOWHERE: ("unavailable", "unavailable"),
}
"""What Anthropic's API calls it, and what OpenAI's does."""
_MESSAGES_CHANGED = ("messages_changed", "input_changed")


def diagnostics(route: Route, judgement: Judgement, n_reused: int) -> dict[str, Any] | None:
    """Return the diagnostics of an answer that reuses so many tokens, in the form of its API."""
    n_missed, part = judgement.n_missed, judgement.part
    of_messages, of_responses = _NAMED.get(judgement.cause) or _NAMED.get(part, _MESSAGES_CHANGED)
    is_change = part is not PromptPart.NOWHERE
    if route is Route.MESSAGES:
        missed = {"cache_missed_input_tokens": n_missed} if is_change else {}
        return {"cache_miss_reason": {"type": of_messages, **missed}} if of_messages else None
    if not is_change:
        return {"type": of_responses}
    return {
        "type": "cache_miss",
        "reason": of_responses,
        "cache_missed_tokens": n_missed,
        "comparison_reusable_tokens": n_reused + n_missed,
    }


@dataclass(frozen=True, slots=True)
class Past:
    """The facts about a new prompt that known prompts give.

    Its first `n_common` tokens were evaluated before; without a change by the client, its first `n_like`
    tokens would have been. `loss` says why the state of the known tokens is gone, if that was noted.
    `is_same` says whether the compared prompt is of the same conversation.
    """

    n_common: int = 0
    n_like: int = 0
    loss: Loss = NO_LOSS
    is_same: bool = False


def judge(served: Account, rule: Rule, past: Past, change: Change | None) -> Judgement:
    """Return why *served* reused no more; *change* is why and where its prompt left an earlier prompt.

    There are four kinds of causes, considered in this order: 1. a failure; 2. a lost state, which no slot
    and no file has; 3. a change by the client or the template; 4. the plan of the request.
    """
    n_known, n_reused, plan = _n_known(served, past.n_common), served.n_reused or 0, served.plan
    n_unused = n_known - n_reused
    if plan.why is Why.NOT_WANTED:
        return Judgement(Cause.NOT_LOOKED_UP)
    if served.failure is not None:
        return Judgement(served.failure, max(0, n_unused))
    n_there = max(plan.n_shared, n_reused)
    if n_unused > SLACK_TOKENS and n_there < n_known - SLACK_TOKENS:
        return Judgement(_why_lost(rule, past, n_there), n_unused)
    cause, where = change or (Cause.HIT, Divergence())
    n_missed = max(n_unused, past.n_like - n_reused)
    if cause.is_miss and n_missed > SLACK_TOKENS:
        return Judgement(cause, n_missed, where.part, where.message)
    if n_unused > SLACK_TOKENS:
        return Judgement(_why_unused(served, rule), n_unused)
    is_template = served.outcome is Outcome.MISS and not past.is_same
    is_new = cause is Cause.FIRST_SIGHT or not n_reused or is_template
    return Judgement(Cause.FIRST_SIGHT if is_new else Cause.HIT)


def judge_prompt(
    new: KnownPrompt, matches: Matches, served: Account, rule: Rule, leased: Leased
) -> Judgement:
    """Return why *served*, the request of a *new* prompt, reused no more.

    Of the *matches*, the nearest prompt shares the most tokens; the compared prompt is mostly the last one
    of the same conversation.
    """
    nearest, compared = matches
    n_stored = served.plan.n_shared - SLACK_TOKENS
    if compared and not compared.is_same_conversation and compared.n_common < n_stored:
        compared = None  # the stored state of this conversation says more than another conversation
    n_like = min(len(compared.known.tokens), len(new.tokens) - 1) if compared else 0
    is_same = compared is not None and compared.is_same_conversation
    n_common, loss, change, where = 0, NO_LOSS, None, Divergence()
    if nearest is not None:
        n_common, loss = nearest.n_common, nearest.known.loss
        process_id, slot_id = nearest.known.slot
        if loss is NO_LOSS and process_id not in leased:
            loss = Cause.RESTART, n_common
        elif loss is NO_LOSS and process_id != new.slot[0] and slot_id in leased[process_id]:
            loss = Cause.IN_USE, n_common
    n_unused = max(_n_known(served, n_common), n_like) - (served.n_reused or 0)
    if compared is not None and served.failure is None and n_unused > SLACK_TOKENS:
        if change := _change(new, compared):
            cause, where = change
            if where.message == len(new.sketch.messages) - 1 and cause is not Cause.SESSION:
                # Behind a change in the newest message all is new, unless a client put an id before it.
                n_like = compared.n_common
            elif not is_same and where.part in HEADER:
                n_like = min(n_like, served.plan.cuts.header or n_like)
    return msgspec.structs.replace(
        judge(served, rule, Past(n_common, n_like, loss, is_same), change),
        divergence=where if where.part is not PromptPart.NOWHERE else None,
        is_same_conversation=is_same,
    )


def _change(new: KnownPrompt, compared: Match) -> Change | None:
    """Return why and where a prompt differs from a known one; None if one begins with the other."""
    known = compared.known
    n_ends = min(len(known.tokens), len(new.tokens)) - SLACK_TOKENS
    is_bare = not new.sketch.messages
    if compared.n_common >= n_ends and (is_bare or goes_on(new.sketch, known.sketch)):
        return None
    return find_change(new.rendering, known.rendering, is_same=compared.is_same_conversation)


def _n_known(served: Account, n_common: int) -> int:
    """Return how many tokens were evaluated before; llama-server evaluates the last one every time."""
    return min(max(n_common, served.plan.n_shared), served.n_prompt - 1)


def _why_lost(rule: Rule, past: Past, n_there: int) -> Cause:
    """Return why slots and files have only *n_there* tokens of a known prompt."""
    cause, n_lost = past.loss
    if cause is not None and n_lost > n_there + SLACK_TOKENS:
        return cause
    return Cause.NOT_KEPT if rule.can_restore else Cause.NOTHING_RESTORABLE


def _why_unused(served: Account, rule: Rule) -> Cause:
    """Return why a state that a slot or a file has was not used."""
    plan, n_reused = served.plan, served.n_reused or 0
    if served.is_short and (rule.is_any_prefix or not n_reused):
        return Cause.SLOT_HELD_LESS  # else llama-server may have dropped a context checkpoint
    if plan.n_in_use > n_reused + SLACK_TOKENS:
        return Cause.IN_USE
    if plan.why in _CHEAPER:
        return Cause.CHEAPER
    if not rule.can_restore:
        return Cause.NOTHING_RESTORABLE
    return Cause.UNKNOWN if rule.is_any_prefix else Cause.NO_STATE_THERE
