"""The ways in which one request can start in one slot, and what each costs.

Owns: the nouns of a plan. Pure values.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from proxy.core.cuts import SLACK_TOKENS, Stop, branch_of, choose_stops
from proxy.core.model import NO_CUTS, Candidate, Checkpoint, Cuts, Prompt, Rule, SlotId
from proxy.core.rates import Rates
from proxy.core.rule import usable_tokens
from proxy.core.saving import STEADY_SECONDS, is_write_back_due, worth_of
from proxy.core.slots import (
    Content,
    Known,
    Reuse,
    Slot,
    live_reuse,
    must_be_erased,
    promised_tokens,
)
from proxy.core.tokens import Namespace, TokenIds, common_prefix_length

# What a slot's content costs its owner when another request takes the slot.
#
# Owns: how much unsaved work is lost, whether it is saved first, and what all that costs in seconds.
# Pure.


MAX_LOST_TOKENS = SLACK_TOKENS
"""A slot that loses no more unsaved work than this to another request is not saved for it."""

HALF_LIFE_SECONDS = 600.0
"""An agent is back within minutes or not soon: what a slot holds counts half after so long."""


@dataclass(frozen=True, slots=True)
class Displacement:
    """What a plan takes from the slot that it uses.

    `delay_seconds` are those that the request itself waits for a save; `seconds` add what it will cost
    the slot's present owner to be where it was.
    """

    n_lost: int = 0
    saves: bool = False
    delay_seconds: float = 0.0
    seconds: float = 0.0


NOTHING_DISPLACED = Displacement()


@dataclass(frozen=True, slots=True)
class Occupant:
    """What a slot holds, how large its state would be, and how long nobody has used it."""

    content: Content
    size_bytes: int = 0
    idle_seconds: float = 0.0

    @property
    def likelihood(self) -> float:
        """How likely its owner comes back while that matters."""
        return float(0.5 ** (max(0.0, self.idle_seconds) / HALF_LIFE_SECONDS))


def displace(
    occupant: Occupant, prompt: Prompt, n_reused: int | None, rule: Rule, rates: Rates
) -> Displacement:
    """Return what becomes of a slot's content if *prompt* takes the slot.

    It reuses *n_reused* tokens of what lies there; None says that the slot is filled anew.
    """
    content = occupant.content
    if not isinstance(content, Known):
        return NOTHING_DISPLACED
    if is_continued(content, prompt):
        return NOTHING_DISPLACED
    n_lost = displaced_tokens(content, prompt, goes_on=n_reused is not None)
    worth = worth_of(content, n_lost, occupant.size_bytes, rates)
    is_savable = n_lost > MAX_LOST_TOKENS and is_write_back_due(rule, content)
    saves = is_savable and worth.is_worth_it
    delay_seconds = worth.save_seconds if saves else 0.0
    has_file = rule.can_restore and (saves or content.n_saved > 0)
    remade_seconds = rates.evaluation_seconds(n_reused or 0, content.n_tokens)
    if has_file:
        lost_seconds = 0.0 if saves else worth.evaluation_seconds if n_lost else 0.0
        restored_seconds = rates.restore_seconds(occupant.size_bytes, is_warm=True) + lost_seconds
        remade_seconds = min(remade_seconds, restored_seconds)
    seconds = delay_seconds + occupant.likelihood * remade_seconds
    return Displacement(n_lost, saves, delay_seconds, seconds)


def displaced_tokens(content: Content, prompt: Prompt, *, goes_on: bool) -> int:
    """Return how many tokens of unsaved work in a slot a prompt would overwrite.

    *goes_on* says that it goes on from what lies there.
    """
    if not isinstance(content, Known) or content.n_unsaved == 0:
        return 0
    if is_continued(content, prompt):
        return 0
    if content.namespace != prompt.namespace or not goes_on:
        return content.n_unsaved
    n_common = common_prefix_length(content.tokens, prompt.tokens)
    return min(content.n_unsaved, content.n_tokens - n_common)


def is_continued(content: Known, prompt: Prompt) -> bool:
    """Return whether a prompt is the same conversation moving on.

    It then goes on from all that the slot holds, or beyond its turn start: what it drops (old reasoning,
    a rewritten answer) nobody will ask for again.
    """
    if content.namespace != prompt.namespace:
        return False
    n_common = common_prefix_length(content.tokens, prompt.tokens)
    is_whole = n_common and n_common >= len(content.tokens) - SLACK_TOKENS
    return bool(is_whole) or 0 < content.turn_start <= n_common + SLACK_TOKENS


# The ways in which one request can start in one slot, and what each costs.
#
# Owns: the nouns of a plan. Pure values.


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
class StartOption:
    """One way through one slot, and its seconds: those of the request, and those it costs others."""

    slot_id: SlotId
    start: UseLive | Restore
    seconds: float
    displacement: Displacement = NOTHING_DISPLACED
    erases: bool = False

    @property
    def total_seconds(self) -> float:
        return self.seconds + self.displacement.seconds

    @property
    def kind(self) -> str:
        if isinstance(self.start, Restore):
            return "restore"
        return "live" if self.start.n_reused else "nothing"


class Why(StrEnum):
    """Why a plan is the cheapest."""

    LIVE_LONGEST = "a free slot holds the longest usable prefix"
    LIVE_CHEAPER = "a checkpoint holds more, but costs more to restore than to evaluate the rest"
    RESTORE_LONGEST = "a checkpoint holds more than any free slot"
    RESTORE_ELSEWHERE = "going on in the live slot would displace more than a restore costs"
    RESTORE_SHORTER = "a longer checkpoint costs more to restore than to evaluate the rest"
    NOTHING_FOUND = "neither a free slot nor a checkpoint holds a usable prefix"
    NOTHING_RESTORABLE = "no free slot holds a usable prefix, and nothing can be restored"
    NOTHING_WORTH_IT = "evaluating is cheaper than any restore"
    NOTHING_DISPLACED = "going on in a live slot would displace more than it saves"
    TOO_LONG = "llama-server will refuse it: it is as long as a slot's context, or longer"


# Which stored checkpoints are worth a look for one prompt.
#
# Owns: the end of the search. Pure; whoever calls has compared the tokens.


WORTH_A_LOOK_SHARE = 0.5
"""A state that saves less than this share of the best one's tokens is not looked at."""


def promising(
    rule: Rule, found: Iterable[Candidate], n_prompt: int, *, n_at_most: int = 32
) -> tuple[Candidate, ...]:
    """Return the usable ones of *found*, which come longest common prefix first.

    The search ends once a candidate's whole common prefix is less than half of what a better one saves:
    none of the rest can save more, and hardly one so much less time to restore.
    """
    kept: list[Candidate] = []
    n_best = 0
    for candidate in found:
        if candidate.n_common < WORTH_A_LOOK_SHARE * n_best or len(kept) == n_at_most:
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


# What to do for one request: which slot, what to restore into it, where to stop on the way.
#
# Owns: the choice among live slots, stored checkpoints and nothing, by estimated seconds. Pure: tokens,
# slots, checkpoints, rule and rates come in, a plan goes out; None means to wait.


WORTH_WAITING_TOKENS = 64
"""A prompt waits for a slot that is being saved (llama-server stalls meanwhile anyway) or let go of by
an abandoned request (a second or so) if that slot spares it more tokens than this."""

WORTH_WAITING_SHARE = 1.5
"""It waits for a state that another request will save soon if all is done in this many times what it would
take alone: evaluating the same beside the other one, both would take twice as long."""

STEADY_TOKENS = 32
"""Speeds are learned from a machine that does other things, too. What costs so little more and spares
so many tokens more is as good by seconds, and does not change with the machine's mood."""

SHARED_HEADER_SAVES = 4.0
"""A header is saved on the way if evaluating it takes so many times as long as saving it: another
request in another slot may need it before this one is answered."""

N_ALTERNATIVES = 3
"""So many of the plans that were not chosen are told."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One request's way through one slot; `cuts` are the prompt's, with the branch that was found.

    `n_shared` is the longest prefix that the prompt shared with any state then, usable or not, and
    `n_in_use` that with a slot that another request was using.
    """

    option: StartOption
    stops: tuple[Stop, ...] = ()
    cuts: Cuts = NO_CUTS
    why: Why = Why.NOTHING_FOUND
    alternatives: tuple[StartOption, ...] = ()
    n_shared: int = 0
    n_in_use: int = 0

    @property
    def slot_id(self) -> SlotId:
        return self.option.slot_id

    @property
    def start(self) -> UseLive | Restore:
        return self.option.start

    @property
    def saves_displaced(self) -> bool:
        return self.option.displacement.saves

    @property
    def erases(self) -> bool:
        return self.option.erases

    @property
    def is_warm(self) -> bool:
        """Whether it goes on in a slot that holds its conversation, and takes nothing from anybody."""
        is_live = isinstance(self.start, UseLive) and self.start.n_reused > 0
        return is_live and self.option.displacement == NOTHING_DISPLACED


@dataclass(frozen=True, slots=True)
class Coming:
    """A state of these tokens that will be saved in so many seconds."""

    tokens: TokenIds
    namespace: Namespace
    ready_in_seconds: float
    size_bytes: int
    restore_points: tuple[int, ...] = ()

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def has_every_position(self) -> bool:
        """What is asked only where a server's states can be cut anywhere."""
        return True

    def usable_tokens(self, rule: Rule, prompt: Prompt) -> int:
        """Return how many tokens it will spare a prompt."""
        if self.namespace != prompt.namespace:
            return 0
        n_common = common_prefix_length(self.tokens, prompt.tokens)
        return usable_tokens(rule, self, n_common, prompt.n_tokens)


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything a plan depends on besides the request itself.

    `n_shared` is the longest prefix that the prompt shares with any stored checkpoint, usable or not.
    `occupants` say what each slot's state would cost; States that are
    `coming` can be waited for.
    """

    rule: Rule
    slots: tuple[Slot, ...]
    candidates: tuple[Candidate, ...]
    rates: Rates
    n_ctx: int
    n_shared: int = 0
    occupants: tuple[Occupant, ...] = ()
    coming: tuple[Coming, ...] = ()
    shared_bytes: int = 0

    def occupant(self, slot: Slot) -> Occupant:
        return self.occupants[slot.id] if self.occupants else Occupant(slot.content)


def plan_request(prompt: Prompt, now: Situation) -> Plan | None:
    """Return the cheapest plan over the free slots of *now*.

    None means to wait: no slot is free, one that soon will be already holds far more of the prompt, or
    another request is about to save what this one needs.
    """
    if not prompt.fits(now.n_ctx):
        refused = [_refused(prompt, now, slot) for slot in now.slots if not slot.is_leased]
        easiest = min(refused, key=lambda o: (o.erases, o.total_seconds, o.slot_id), default=None)
        return Plan(easiest, cuts=prompt.cuts, why=Why.TOO_LONG) if easiest else None
    options = [
        _option(prompt, now, slot, start)
        for slot in now.slots
        if not slot.is_leased
        for start in _starts(prompt, now, slot)
    ]
    last_used = {slot.id: slot.used_at for slot in now.slots}
    options.sort(key=lambda o: (o.total_seconds, last_used[o.slot_id], o.slot_id))
    if options:
        options.insert(0, options.pop(options.index(_steadiest(options))))
    best = options[0] if options else None
    n_best = best.start.n_reused if best else 0
    n_promised = max((_promised(prompt, now, s) for s in now.slots if s.is_closing), default=0)
    if best is None or n_promised > n_best + WORTH_WAITING_TOKENS or _waits(prompt, now, best):
        return None
    return _plan(prompt, now, options)


def _steadiest(options: list[StartOption]) -> StartOption:
    """Return the cheapest option, or one that reuses clearly more and is hardly dearer."""
    cheapest = options[0]
    n_enough = cheapest.start.n_reused + STEADY_TOKENS
    alike = (o for o in options if o.total_seconds <= cheapest.total_seconds + STEADY_SECONDS)
    more = [o for o in alike if o.start.n_reused >= n_enough]
    return max(more, key=lambda o: o.start.n_reused, default=cheapest)


def _plan(prompt: Prompt, now: Situation, options: list[StartOption]) -> Plan:
    best = options[0]
    n_reused = best.start.n_reused
    shared = {slot.id: n_shared_with(prompt, slot) for slot in now.slots}
    n_shared = max(now.n_shared, *shared.values())
    cuts = replace(prompt.cuts, branch=branch_of(now.rule, n_shared, prompt.n_tokens, n_reused))
    return Plan(
        best,
        choose_stops(
            now.rule,
            cuts,
            now.candidates,
            n_reused,
            shares_header=_shares_header(now, cuts, n_reused),
        ),
        cuts,
        _why(now.rule, options),
        tuple(_distinct(options[1:]))[:N_ALTERNATIVES],
        n_shared,
        max((shared[slot.id] for slot in now.slots if slot.is_leased), default=0),
    )


def n_shared_with(prompt: Prompt, slot: Slot) -> int:
    """Return how many tokens of a prompt a slot holds, usable or not."""
    content = slot.content
    if not isinstance(content, Known) or content.namespace != prompt.namespace:
        return 0
    return common_prefix_length(content.tokens, prompt.tokens)


def _shares_header(now: Situation, cuts: Cuts, n_reused: int) -> bool:
    """Return whether a header is worth a save before its own request is answered."""
    evaluation_seconds = now.rates.evaluation_seconds(n_reused, cuts.shared)
    save_seconds = now.rates.save_seconds(now.shared_bytes)
    return len(now.slots) > 1 and evaluation_seconds > SHARED_HEADER_SAVES * save_seconds


def _waits(prompt: Prompt, now: Situation, best: StartOption) -> bool:
    """Return whether a state that is coming gets the prompt evaluated much sooner than *best*."""
    for coming in now.coming:
        n_usable = coming.usable_tokens(now.rule, prompt)
        restore_seconds = now.rates.restore_seconds(coming.size_bytes, is_warm=True)
        rest_seconds = now.rates.evaluation_seconds(n_usable, prompt.n_tokens)
        seconds = coming.ready_in_seconds + restore_seconds + rest_seconds
        is_longer = n_usable > best.start.n_reused + WORTH_WAITING_TOKENS
        if is_longer and seconds < WORTH_WAITING_SHARE * best.seconds:
            return True
    return False


def _distinct(options: Iterable[StartOption]) -> Iterator[StartOption]:
    """Yield the best option of each way to start."""
    seen: set[object] = set()
    for option in options:
        start = option.start
        way = start.checkpoint.id if isinstance(start, Restore) else (option.slot_id, "live")
        if way not in seen:
            seen.add(way)
            yield option


def _why(rule: Rule, options: list[StartOption]) -> Why:
    """Return what decided for the first of the *options*."""
    best, starts = options[0].start, [option.start for option in options]
    n_live = max(s.n_reused for s in starts if isinstance(s, UseLive))
    n_stored = max((s.n_reused for s in starts if isinstance(s, Restore)), default=0)
    if isinstance(best, Restore):
        if best.n_reused < n_stored:
            return Why.RESTORE_SHORTER
        return Why.RESTORE_LONGEST if best.n_reused > n_live else Why.RESTORE_ELSEWHERE
    if best.n_reused:
        return Why.LIVE_LONGEST if best.n_reused >= n_stored else Why.LIVE_CHEAPER
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


def _option(prompt: Prompt, now: Situation, slot: Slot, start: UseLive | Restore) -> StartOption:
    n_kept = start.n_reused if isinstance(start, UseLive) else None
    displacement = displace(now.occupant(slot), prompt, n_kept, now.rule, now.rates)
    seconds = now.rates.evaluation_seconds(start.n_reused, prompt.n_tokens)
    if isinstance(start, Restore):
        checkpoint = start.checkpoint
        seconds += now.rates.restore_seconds(checkpoint.size_bytes, is_warm=start.is_warm)
    return StartOption(
        slot.id,
        start,
        seconds,
        displacement,
        must_be_erased(now.rule, slot.content, prompt.namespace, prompt.tokens),
    )


def _refused(prompt: Prompt, now: Situation, slot: Slot) -> StartOption:
    """Return how a prompt that does not fit is sent to a slot, which stays as it is if it may."""
    start = UseLive(Reuse())
    if must_be_erased(now.rule, slot.content, prompt.namespace, prompt.tokens):
        return _option(prompt, now, slot, start)
    return StartOption(slot.id, start, 0.0)
