"""What to do for one request: which slot, what to restore into it, where to stop on the way.

Owns: the choice among live slots, stored checkpoints and nothing, by estimated seconds. Pure: tokens,
slots, checkpoints, rule and rates come in, a plan goes out; None means that no slot is free.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from proxy.core.cuts import SLACK_TOKENS, Stop, choose_stops
from proxy.core.model import Candidate, Checkpoint, Prompt, Rule, RuleKind, SlotId
from proxy.core.prefix import Namespace, TokenIds, common_prefix_length
from proxy.core.rates import Rates
from proxy.core.restore import usable_tokens
from proxy.core.slots import (
    Content,
    Empty,
    Known,
    Reuse,
    Slot,
    Unknown,
    live_reuse,
    promised_tokens,
    restored_tokens,
)

MAX_LOST_TOKENS = SLACK_TOKENS
"""A slot that loses more unsaved work than this to another request is saved first. A save may take
longer than evaluating a few hundred tokens, but it happens once, and they would be missing every time
the conversation comes back from disk."""

WORTH_WAITING_TOKENS = 64
"""A prompt waits for a slot that is being saved (llama-server stalls meanwhile anyway) or let go of by
an abandoned request (a second or so) if that slot spares it more tokens than this."""


class Why(StrEnum):
    """Why a plan is the cheapest."""

    LIVE_LONGEST = "a free slot holds the longest usable prefix"
    LIVE_CHEAPER = "a checkpoint holds more, but costs more to restore than to evaluate the rest"
    RESTORE_LONGEST = "a checkpoint holds more than any free slot"
    RESTORE_ELSEWHERE = "going on in the live slot would displace more than a restore costs"
    NOTHING_FOUND = "neither a free slot nor a checkpoint holds a usable prefix"
    NOTHING_RESTORABLE = "no free slot holds a usable prefix, and nothing can be restored"
    NOTHING_WORTH_IT = "evaluating is cheaper than any restore"
    NOTHING_DISPLACED = "going on in a live slot would displace more than it saves"


@dataclass(frozen=True, slots=True)
class UseLive:
    """Continue from what the slot already holds (perhaps nothing)."""

    reuse: Reuse

    @property
    def n_reused(self) -> int:
        return self.reuse.at_least


@dataclass(frozen=True, slots=True)
class Restore:
    """Load *checkpoint* into the slot; llama-server must then reuse n_reused tokens."""

    checkpoint: Checkpoint
    n_reused: int
    n_common: int
    is_warm: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """One request's way through one slot."""

    slot_id: SlotId
    start: UseLive | Restore
    stops: tuple[Stop, ...]
    saves_displaced: bool
    erases: bool
    seconds: float
    why: Why = Why.NOTHING_FOUND


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything a plan depends on besides the request itself."""

    rule: Rule
    slots: tuple[Slot, ...]
    candidates: tuple[Candidate, ...]
    rates: Rates
    n_ctx: int


def plan_request(prompt: Prompt, now: Situation) -> Plan | None:
    """Return the cheapest plan over the free slots of *now*.

    None means to wait: no slot is free, or one that soon will be already holds far more of the prompt.
    """
    options = [
        _plan(prompt, now, slot, start)
        for slot in now.slots
        if not slot.is_leased
        for start in _starts(prompt, now, slot)
    ]
    last_used = {slot.id: slot.used_at for slot in now.slots}
    best = min(options, key=lambda p: (p.seconds, last_used[p.slot_id], p.slot_id), default=None)
    n_best = best.start.n_reused if best else 0
    n_promised = max((_promised(prompt, now, s) for s in now.slots if s.is_closing), default=0)
    if best is None or n_promised > n_best + WORTH_WAITING_TOKENS:
        return None
    return replace(best, why=_why(now.rule, best, options))


def _why(rule: Rule, best: Plan, options: list[Plan]) -> Why:
    """Return what decided for *best* among the *options*."""
    starts = [option.start for option in options]
    n_live = max(s.n_reused for s in starts if isinstance(s, UseLive))
    n_stored = max((s.n_reused for s in starts if isinstance(s, Restore)), default=0)
    n_best = best.start.n_reused
    if isinstance(best.start, Restore):
        return Why.RESTORE_LONGEST if n_best > n_live else Why.RESTORE_ELSEWHERE
    if n_best:
        return Why.LIVE_LONGEST if n_best >= n_stored else Why.LIVE_CHEAPER
    if n_live:
        return Why.NOTHING_DISPLACED
    if n_stored:
        return Why.NOTHING_WORTH_IT
    return Why.NOTHING_FOUND if rule.can_restore else Why.NOTHING_RESTORABLE


def _promised(prompt: Prompt, now: Situation, slot: Slot) -> int:
    return promised_tokens(now.rule, slot, prompt.namespace, prompt.tokens)


def _starts(prompt: Prompt, now: Situation, slot: Slot) -> Iterator[UseLive | Restore]:
    if must_be_erased(now.rule, slot.content, prompt.namespace, prompt.tokens):
        yield UseLive(Reuse())
    else:
        yield UseLive(live_reuse(now.rule, slot.content, prompt.namespace, prompt.tokens))
    for candidate in now.candidates:
        checkpoint = candidate.checkpoint
        n_reused = usable_tokens(now.rule, checkpoint, candidate.n_common, prompt.n_tokens)
        if n_reused and checkpoint.n_tokens < now.n_ctx:
            n_common = min(candidate.n_common, prompt.n_tokens - 1)
            yield Restore(checkpoint, n_reused, n_common, candidate.is_warm)


def _plan(prompt: Prompt, now: Situation, slot: Slot, start: UseLive | Restore) -> Plan:
    n_lost = displaced_tokens(slot.content, prompt, start)
    saves = n_lost > MAX_LOST_TOKENS and now.rule.can_restore
    return Plan(
        slot_id=slot.id,
        start=start,
        stops=choose_stops(now.rule, prompt.cuts, now.candidates, start.n_reused),
        saves_displaced=saves,
        erases=must_be_erased(now.rule, slot.content, prompt.namespace, prompt.tokens),
        seconds=_seconds(prompt, now.rates, start, n_lost, saves),
    )


def _seconds(
    prompt: Prompt, rates: Rates, start: UseLive | Restore, n_lost: int, saves: bool
) -> float:
    seconds = rates.evaluation_seconds(start.n_reused, prompt.n_tokens)
    if isinstance(start, Restore):
        seconds += rates.restore_seconds(start.checkpoint.size_bytes, is_warm=start.is_warm)
    # What is displaced must be saved now, and restored or made again later.
    return seconds + rates.evaluation_seconds(0, n_lost) * (0.25 if saves else 1.0)


def displaced_tokens(content: Content, prompt: Prompt, start: UseLive | Restore) -> int:
    """Return how many tokens of unsaved work in a slot the plan would overwrite.

    A prompt that goes beyond the slot's turn start is the same conversation moving on: what it drops
    (old reasoning, a rewritten answer) nobody will ask for again.
    """
    if not isinstance(content, Known) or content.n_unsaved == 0:
        return 0
    if content.namespace != prompt.namespace:
        return content.n_unsaved
    n_common = common_prefix_length(content.tokens, prompt.tokens)
    if isinstance(start, UseLive):
        if n_common == len(content.tokens) or 0 < content.turn_start <= n_common + SLACK_TOKENS:
            return 0
        return min(content.n_unsaved, content.n_tokens - n_common)
    return content.n_unsaved


def must_be_erased(
    rule: Rule, content: Content, namespace: Namespace, tokens: TokenIds | None = None
) -> bool:
    """Return whether llama-server must not reuse what a slot holds for *tokens* (None: not known).

    That is another tenant's tokens, or a restored state without all positions that would have to be cut
    before its end. A server that saves context checkpoints refuses to; with --swa-full it cuts the state,
    although the file has no more than a window.
    """
    if holds_foreign_tokens(content, namespace):
        return True
    n_restored = restored_tokens(content)
    if rule.kind is RuleKind.RESTORE_POINTS or n_restored == 0:
        return False
    if tokens is None or not isinstance(content, Known):
        return True
    return common_prefix_length(content.tokens, tokens) < n_restored


def holds_foreign_tokens(content: Content, namespace: Namespace) -> bool:
    """Return whether a slot holds tokens of another tenant, which llama-server would reuse."""
    match content:
        case Empty():
            return False
        case Known():
            return content.namespace != namespace
        case Unknown():
            return content.tenant != namespace


def promising(
    rule: Rule, found: Iterable[Candidate], n_prompt: int, *, n_at_most: int = 32
) -> tuple[Candidate, ...]:
    """Return the usable ones of *found*, which come longest common prefix first.

    The search ends once a candidate's whole common prefix is shorter than what a better one already
    saves: none of the rest can save more.
    """
    kept: list[Candidate] = []
    n_best = 0
    for candidate in found:
        if candidate.n_common < n_best or len(kept) == n_at_most:
            break
        n_usable = usable_tokens(rule, candidate.checkpoint, candidate.n_common, n_prompt)
        if n_usable:
            kept.append(candidate)
            n_best = max(n_best, n_usable)
    return tuple(kept)


def most_useful(rule: Rule, candidates: Iterable[Candidate], n_prompt: int) -> Candidate | None:
    """Return the candidate that spares a prompt most; what it needs if it finds no live slot."""
    return max(
        candidates,
        key=lambda c: usable_tokens(rule, c.checkpoint, c.n_common, n_prompt),
        default=None,
    )


def choose_slot_for_bypass(slots: Iterable[Slot], namespace: Namespace) -> Slot | None:
    """Return the free slot for a request whose prompt is not known, or None if there is none.

    First a slot that such a request of the same tenant used before (llama-server reuses what it can),
    then an empty one, then the one whose loss costs least.
    """

    def rank(slot: Slot) -> tuple[bool, int, float]:
        if isinstance(slot.content, Unknown) and slot.content.tenant == namespace:
            return False, 0, -slot.used_at
        return True, *_loss(slot)

    return min((slot for slot in slots if not slot.is_leased), key=rank, default=None)


def choose_slot_to_empty(slots: Iterable[Slot]) -> Slot | None:
    """Return the free slot whose loss costs least, or None if there is none."""
    return min((slot for slot in slots if not slot.is_leased), key=_loss, default=None)


def _loss(slot: Slot) -> tuple[int, float]:
    n_unsaved = slot.content.n_unsaved + 1 if isinstance(slot.content, Known) else 0
    return n_unsaved, slot.used_at
