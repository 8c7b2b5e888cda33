"""The plan for one request: its slot, the checkpoint to restore there, and the stops.

Owns: the choice to continue a live slot, to restore a checkpoint or to start from nothing, by estimated
seconds. Pure: tokens, slots, checkpoints, rule and rates come in, a plan goes out; None means that the
request waits.

`plan_request` distinguishes these cases:

1. The prompt does not fit the context. llama-server will refuse it, so the plan takes the slot that
   needs the least preparation, restores nothing and makes no stop.
2. No slot is free. The request waits.
3. A slot whose save ends soon holds far more of the prompt than the best option reuses. The request waits.
4. Another request is about to save a state that would make this request quicker. The request waits.
5. Otherwise the cheapest option wins. There is one option for each free slot and each start in that slot
   (continue its content, or restore one of the checkpoints). An option costs the seconds of the request
   and the seconds that the conversation now in the slot will need to come back.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import itemgetter

from proxy.core import model, saving, slots
from proxy.core.cuts import (
    MAX_CONTEXT_CHECKPOINTS,
    SLACK_TOKENS,
    Stop,
    branch_of,
    choose_stops,
    stops_with_room,
    worth_a_file,
)
from proxy.core.model import Candidate, Checkpoint, Cuts, Prompt, Rule, SlotId, usable_tokens
from proxy.core.rates import Rates
from proxy.core.slots import Empty, Known, Slot, Unknown, live_reuse, must_be_erased, shared_tokens
from proxy.core.tokens import common_prefix_length

HALF_LIFE_SECONDS = 600.0
"""An agent is back within minutes or not soon: after this time a slot's content counts half."""

WORTH_A_LOOK_SHARE = 0.5
"""A checkpoint that saves less than this share of the best one's tokens is not considered."""

WORTH_WAITING_TOKENS = 64
"""A prompt waits for a closing slot if that slot spares it more tokens than this. Such a slot is being
saved, while llama-server stalls anyway, or its request was abandoned and ends within a second or so."""

WORTH_WAITING_SHARE = 1.5
"""A prompt waits for a state that another request will save soon if the wait and the rest take less than
this many times the prompt alone: if both requests evaluated the same tokens, both would take twice as
long."""

STEADY_TOKENS = 32
"""Speeds are measured on a machine that does other things too. An option that costs hardly more seconds and
spares this many more tokens wins, so that the choice does not change with the machine's load."""

SHARED_HEADER_SAVES = 4.0
"""A header is saved at a stop if its evaluation takes this many times as long as its save: another request
in another slot may need it before this one is answered."""

N_CANDIDATES = 32
"""So many checkpoints are considered at most."""

ENDING_TOKENS = 4
"""Templates end a prompt with so many tokens, as `<think>`, that they leave out of the next one."""

N_ALTERNATIVES = 3
"""How many of the options that were not chosen are reported."""


@dataclass(frozen=True, slots=True)
class Displacement:
    """The loss of the conversation whose slot a plan takes, and whether the plan `saves` it.

    The request itself waits `delay_seconds` for a save. `seconds` adds the time that the conversation will
    need to come back.
    """

    saves: bool = False
    delay_seconds: float = 0.0
    seconds: float = 0.0


NOTHING_DISPLACED = Displacement()


@dataclass(frozen=True, slots=True)
class Start:
    """One start in one slot, with its seconds for the request and for others.

    llama-server must reuse `n_reused` tokens, and is expected to reuse at most `n_at_most`. They come from
    the checkpoint that is `restored`; without one the slot already holds them.
    """

    slot_id: SlotId
    n_reused: int = 0
    n_at_most: int = 0
    restored: Candidate | None = None
    seconds: float = 0.0
    displacement: Displacement = NOTHING_DISPLACED
    erases: bool = False

    @property
    def total_seconds(self) -> float:
        return self.seconds + self.displacement.seconds

    @property
    def kind(self) -> str:
        if self.restored:
            return "restore"
        return "live" if self.n_reused else "nothing"


class Why(StrEnum):
    """Why a plan is the cheapest."""

    EXTENDS = "the slot holds all messages but the newest: nothing was looked up first"
    LIVE_LONGEST = "a free slot holds the longest usable prefix"
    LIVE_CHEAPER = "a checkpoint holds more, but costs more to restore than to evaluate the rest"
    RESTORE_LONGEST = "a checkpoint holds more than any free slot"
    RESTORE_ELSEWHERE = "going on in the live slot would displace more than a restore costs"
    RESTORE_SHORTER = "a longer checkpoint costs more to restore than to evaluate the rest"
    NOTHING_FOUND = "neither a free slot nor a checkpoint holds a usable prefix"
    NOTHING_RESTORABLE = "no free slot holds a usable prefix, and nothing can be restored"
    NOTHING_WORTH_IT = "evaluating is cheaper than any restore"
    NOTHING_DISPLACED = "going on in the slot that holds more would displace more than it saves"
    NOT_WANTED = "the client asks for no_read"
    TOO_LONG = "llama-server will refuse it: it is as long as a slot's context, or longer"


@dataclass(frozen=True, slots=True)
class Plan:
    """How one request is served in one slot; `cuts` are the prompt's, with the branch that was found.

    `n_shared` is the longest prefix that the prompt shared with any state at that time, usable or not;
    `n_in_use` is the longest prefix shared with a slot that another request was using. `is_stored_further`
    says whether a state seems to go on behind the prompt.
    """

    start: Start
    stops: tuple[Stop, ...] = ()
    cuts: Cuts = Cuts()
    why: Why = Why.NOTHING_FOUND
    alternatives: tuple[Start, ...] = ()
    n_shared: int = 0
    n_in_use: int = 0
    is_stored_further: bool = False

    @property
    def slot_id(self) -> SlotId:
        return self.start.slot_id

    @property
    def is_warm(self) -> bool:
        """Whether the plan continues a slot's content and displaces nothing."""
        return self.start.kind == "live" and self.start.displacement == NOTHING_DISPLACED


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything a plan depends on besides the request itself.

    `n_shared` is the longest prefix that the prompt shares with any stored checkpoint, usable or not. The
    `time` is by the clock of the slots' `used_at`, and `sizes` are those of saved states. The request can
    wait for the `expected` states. A slot has at most `n_kept_points` context checkpoints.
    """

    rule: Rule
    slots: tuple[Slot, ...]
    candidates: tuple[Candidate, ...]
    rates: Rates
    n_ctx: int
    n_shared: int = 0
    time: float = 0.0
    sizes: Sequence[saving.StateSize] = ()
    expected: tuple[model.ExpectedState, ...] = ()
    n_kept_points: int = MAX_CONTEXT_CHECKPOINTS

    @property
    def n_busy(self) -> int:
        return slots.n_busy(self.slots)


def plan_request(prompt: Prompt, now: Situation) -> Plan | None:
    """Return the cheapest plan over the free slots of *now*; None means that the request waits."""
    shared = {s.id: shared_tokens(s.content, prompt.tokens, prompt.namespace) for s in now.slots}
    free = [slot for slot in now.slots if not slot.is_leased]
    if prompt.n_tokens >= now.n_ctx:
        refused = [_refused(prompt, now, slot, shared[slot.id]) for slot in free]
        easiest = min(refused, key=lambda o: (o.erases, o.total_seconds, o.slot_id), default=None)
        return Plan(easiest, cuts=prompt.cuts, why=Why.TOO_LONG) if easiest else None
    options = [o for s in free for o in starts(prompt, now, s, shared[s.id])]
    if not options:
        return None
    used_at = {slot.id: slot.used_at for slot in free}
    resumed = {slot.id for slot in free if _may_go_on(slot, prompt)}

    def order(option: Start) -> tuple[float, int, float, SlotId]:
        # Of equal options: the live slot that may have most of the prompt, and a restore over another one.
        rank = (1 if option.restored else -1) if option.slot_id in resumed else 0
        return option.total_seconds, rank, used_at[option.slot_id], option.slot_id

    options.sort(key=order)
    best = _steadiest(options)
    n_enough = best.n_reused + WORTH_WAITING_TOKENS
    if any(s.is_closing and promised_tokens(prompt, now, s) > n_enough for s in now.slots):
        return None
    if any(_is_done_sooner(prompt, now, state, best) for state in now.expected):
        return None
    options.remove(best)
    return _plan(prompt, now, [best, *options], shared)


def _refused(prompt: Prompt, now: Situation, slot: Slot, n_common: int) -> Start:
    """Return the start of a prompt that does not fit the context: the slot is erased only if it must be."""
    must_be = must_be_erased(now.rule, slot.content, prompt.namespace, n_common)
    return next(starts(prompt, now, slot, n_common)) if must_be else Start(slot.id)


def starts(prompt: Prompt, now: Situation, slot: Slot, n_common: int) -> Iterator[Start]:
    """Yield the possible starts in a slot that holds the first *n_common* tokens of the prompt."""
    content, rates, n_prompt = slot.content, now.rates, prompt.n_tokens
    erases = must_be_erased(now.rule, content, prompt.namespace, n_common)
    erases = erases or _may_keep_first_token(prompt, now.rule, slot, n_common)
    n_reused, n_at_most = (0, 0) if erases else live_reuse(now.rule, content, n_common, n_prompt)
    displaced, restored_over = displacements_by(prompt, now, slot, n_common, n_reused, None)
    seconds = rates.evaluation_seconds(n_reused, n_prompt)
    yield Start(slot.id, n_reused, n_at_most, None, seconds, displaced, erases)
    for candidate in now.candidates:
        checkpoint, n_at_most = candidate.checkpoint, min(candidate.n_common, n_prompt - 1)
        n_reused = usable_tokens(now.rule, checkpoint, candidate.n_common, n_prompt)
        if n_reused and checkpoint.n_tokens < now.n_ctx:
            seconds = rates.evaluation_seconds(n_reused, n_prompt)
            seconds += rates.restore_seconds(checkpoint.size_bytes, is_warm=candidate.is_warm)
            yield Start(slot.id, n_reused, n_at_most, candidate, seconds, restored_over)


def _may_keep_first_token(prompt: Prompt, rule: Rule, slot: Slot, n_common: int) -> bool:
    """Return whether a slot may keep a context checkpoint of another first token than the prompt's.

    llama-server would answer a later prompt from it (docs/upstream/stale_context_checkpoint.py).
    """
    content = slot.content
    if rule.is_any_prefix or isinstance(content, Empty) or _may_go_on(slot, prompt):
        return False
    if isinstance(content, Known):
        return n_common == 0
    return content.likely is None or not common_prefix_length(content.likely, prompt.tokens)


def _may_go_on(slot: Slot, prompt: Prompt) -> bool:
    """Return whether a slot may hold the beginning of a prompt, although its tokens were not read.

    It may if the prompt goes on with a brief chat, or with a prompt that was given up there: how far that
    one came is not known.
    """
    content = slot.content
    if not isinstance(content, Unknown) or content.tenant != prompt.namespace:
        return False
    if content.likely is not None:
        n_common = common_prefix_length(content.likely, prompt.tokens)
        return 0 < n_common >= len(content.likely) - SLACK_TOKENS
    return bool(content.brief) and prompt.conversation.startswith(content.brief)


def displacements_by(
    prompt: Prompt, now: Situation, slot: Slot, n_common: int, *reuses: int | None
) -> list[Displacement]:
    """Return what the conversation in *slot* loses if *prompt*, which shares *n_common* tokens, takes it.

    The prompt reuses so many of these tokens (*reuses*); None: a checkpoint is restored over the slot.
    """
    content, rates = slot.content, now.rates
    if (
        not isinstance(content, Known)
        or content.is_aside
        or is_continued(content, prompt, n_common)
    ):
        return [NOTHING_DISPLACED for _ in reuses]
    size_bytes = saving.state_bytes(now.sizes, content)
    likelihood = 0.5 ** (max(0.0, now.time - slot.used_at) / HALF_LIFE_SECONDS)

    def displacement(n_reused: int | None) -> Displacement:
        n_lost = min(content.n_unsaved, content.n_tokens - (0 if n_reused is None else n_common))
        saves = n_lost > SLACK_TOKENS and saving.is_write_back_due(now.rule, content)
        saves = saves and saving.is_worth_saving(content, n_lost, size_bytes, rates, 1 + now.n_busy)
        delay_seconds = rates.save_seconds(size_bytes) if saves else 0.0
        remade_seconds = rates.evaluation_seconds(n_reused or 0, content.n_tokens)
        if now.rule.can_restore and (saves or content.n_saved):
            restored_seconds = rates.restore_seconds(size_bytes, is_warm=True)
            if not saves:
                n_kept = content.n_tokens - n_lost
                restored_seconds += rates.evaluation_seconds(n_kept, content.n_tokens)
            remade_seconds = min(remade_seconds, restored_seconds)
        return Displacement(saves, delay_seconds, delay_seconds + likelihood * remade_seconds)

    return [displacement(n_reused) for n_reused in reuses]


def is_continued(content: Known, prompt: Prompt, n_common: int) -> bool:
    """Return whether a prompt that shares *n_common* tokens continues the conversation in a slot.

    A prompt does if it shares all tokens before the slot's turn start or, if that is not known, all tokens.
    What it drops behind them (old reasoning, a rewritten answer) will not be needed again. Another
    conversation with the same header, and a brief question, may share nearly as many.
    """
    if content.turn_start:
        return content.turn_start <= n_common
    earlier = content.conversation if prompt.conversation else b""
    is_whole = 0 < n_common >= len(content.tokens) - SLACK_TOKENS
    return is_whole and prompt.conversation.startswith(earlier)


def _steadiest(options: list[Start]) -> Start:
    """Return the cheapest option, or one that reuses clearly more and costs hardly more."""
    cheapest = options[0]
    n_enough = cheapest.n_reused + STEADY_TOKENS
    most_seconds = cheapest.total_seconds + saving.STEADY_SECONDS
    more = [o for o in options if o.total_seconds <= most_seconds and o.n_reused >= n_enough]
    return max(more, key=lambda o: o.n_reused, default=cheapest)


def promised_tokens(prompt: Prompt, now: Situation, slot: Slot) -> int:
    """Return how many tokens a prompt can probably reuse of a closing slot, if it waits for the slot."""
    content, tokens = slot.content, prompt.tokens
    if slot.answered_for is not None and slot.destined:  # what it holds is about to be known
        is_ours = slot.answered_for == prompt.namespace
        return common_prefix_length(slot.destined, tokens) if is_ours else 0
    if isinstance(content, Unknown) and content.likely is not None:
        is_ours = content.tenant == prompt.namespace
        return common_prefix_length(content.likely, tokens) if is_ours else 0
    n_common = shared_tokens(content, tokens, prompt.namespace)
    return live_reuse(now.rule, content, n_common, prompt.n_tokens)[0]


def _is_done_sooner(
    prompt: Prompt, now: Situation, state: model.ExpectedState, best: Start
) -> bool:
    """Return whether to wait for an expected state: it saves more than *best* for little or no delay."""
    n_usable = expected_tokens(prompt, now.rule, state)
    seconds = max(0.0, state.expected_at - now.time)
    seconds += now.rates.restore_seconds(state.size_bytes, is_warm=True)
    seconds += now.rates.evaluation_seconds(n_usable, prompt.n_tokens)
    is_longer = n_usable > best.n_reused + WORTH_WAITING_TOKENS
    return is_longer and seconds < WORTH_WAITING_SHARE * best.seconds


def expected_tokens(prompt: Prompt, rule: Rule, state: model.ExpectedState) -> int:
    """Return how many tokens of a state that is about to be saved a prompt can reuse."""
    if state.namespace != prompt.namespace:
        return 0
    n_common = common_prefix_length(state.tokens, prompt.tokens)
    return usable_tokens(rule, state, n_common, prompt.n_tokens)


def _plan(prompt: Prompt, now: Situation, options: list[Start], shared: dict[SlotId, int]) -> Plan:
    """Return the plan that takes the first of the *options*; *shared*: how many tokens each slot shares."""
    best, n_reused = options[0], options[0].n_reused
    slot = next(slot for slot in now.slots if slot.id == best.slot_id)
    if best.kind == "nothing" and not best.erases and _may_go_on(slot, prompt):
        # A stop would cut the slot back, under *end only* to nothing.
        n_reused = promised_tokens(prompt, now, slot)
    n_shared = max(now.n_shared, *shared.values())
    cuts = replace(prompt.cuts, branch=branch_of(now.rule, n_shared, prompt.n_tokens, n_reused))
    shares_header = _shares_header(now, cuts, n_reused)
    # A checkpoint can be restored into several slots: only the cheapest of these starts is reported.
    alternatives: dict[object, Start] = {}
    for start in options[1:]:
        way = start.restored.checkpoint.id if start.restored else (start.slot_id, "live")
        alternatives.setdefault(way, start)

    def pays(n_saved: int, n_cut: int, at_once: bool) -> bool:
        n_stalled = 1 + now.n_busy * at_once
        return saving.is_expected_to_pay(now.sizes, now.rates, n_saved, n_cut, n_stalled)

    worthy = cuts if prompt.is_wanted else worth_a_file(now.rule, cuts, now.candidates, pays)
    stops = choose_stops(
        now.rule,
        worthy,
        now.candidates,
        n_reused,
        prompt.n_tokens,
        shares_header=shares_header,
        # While other slots are busy, a stop waits for their batches.
        n_inside=0 if now.n_busy else stops_with_room(now.n_kept_points),
    )
    return Plan(
        start=best,
        stops=stops,
        cuts=cuts,
        why=_why(now.rule, options),
        alternatives=tuple(alternatives.values())[:N_ALTERNATIVES],
        n_shared=n_shared,
        n_in_use=max((shared[slot.id] for slot in now.slots if slot.is_leased), default=0),
        is_stored_further=_is_stored_further(prompt, now, n_shared),
    )


def _is_stored_further(prompt: Prompt, now: Situation, n_shared: int) -> bool:
    """Return whether a state seems to go on behind a prompt of which one has *n_shared* tokens.

    Where a slot was asked the same just before, what goes on behind the prompt is its earlier answer.
    """
    for slot in now.slots:
        content = slot.content
        if isinstance(content, Known) and content.tenant == prompt.namespace:
            if content.conversation == prompt.conversation:
                return content.is_stored_further
    return n_shared + ENDING_TOKENS >= prompt.n_tokens


def _shares_header(now: Situation, cuts: Cuts, n_reused: int) -> bool:
    """Return whether the header is worth a save before the request is answered."""
    if len(now.slots) == 1 or n_reused >= cuts.shared:
        return False
    save_seconds = now.rates.save_seconds(saving.expected_bytes(now.sizes, cuts.shared, 2) or 0)
    return now.rates.evaluation_seconds(n_reused, cuts.shared) > SHARED_HEADER_SAVES * save_seconds


def _why(rule: Rule, options: list[Start]) -> Why:
    """Return why the first of the *options* was chosen."""
    best = options[0]
    n_live = max(s.n_reused for s in options if not s.restored)
    n_stored = max((s.n_reused for s in options if s.restored), default=0)
    if best.restored:
        if best.n_reused < n_stored:
            return Why.RESTORE_SHORTER
        return Why.RESTORE_LONGEST if best.n_reused > n_live else Why.RESTORE_ELSEWHERE
    if best.n_reused < n_live:
        return Why.NOTHING_DISPLACED
    if best.n_reused:
        return Why.LIVE_LONGEST if best.n_reused >= n_stored else Why.LIVE_CHEAPER
    if n_stored:
        return Why.NOTHING_WORTH_IT
    return Why.NOTHING_FOUND if rule.can_restore else Why.NOTHING_RESTORABLE


def plan_extension(prompt: Prompt, rule: Rule, slot: Slot, rates: Rates) -> Plan:
    """Return the plan of a request that was sent to continue *slot* before its prompt was read."""
    n_common = shared_tokens(slot.content, prompt.tokens, prompt.namespace)
    n_reused, n_at_most = live_reuse(rule, slot.content, n_common, prompt.n_tokens)
    seconds = rates.evaluation_seconds(n_reused, prompt.n_tokens)
    branch = branch_of(rule, n_common, prompt.n_tokens, n_reused)
    return Plan(
        Start(slot.id, n_reused, n_at_most, seconds=seconds),
        cuts=replace(prompt.cuts, branch=branch),
        why=Why.EXTENDS,
        n_shared=n_common,
    )


# The stored checkpoints that a plan considers. The caller has compared their tokens with the prompt.


def promising(
    rule: Rule, found: Iterable[Candidate], n_prompt: int
) -> tuple[tuple[Candidate, ...], int]:
    """Return the usable candidates of *found*, and the longest common prefix of any.

    *found* is sorted, the longest common prefix first. The search ends at a candidate whose common prefix
    is less than half of what the best one saves: the rest save fewer tokens, and hardly any of them is so
    much quicker to restore.
    """
    kept: list[Candidate] = []
    n_best = n_longest = 0
    for candidate in found:
        n_longest = max(n_longest, candidate.n_common)
        if candidate.n_common < WORTH_A_LOOK_SHARE * n_best:
            break
        if n_usable := usable_tokens(rule, candidate.checkpoint, candidate.n_common, n_prompt):
            kept.append(candidate)
            n_best = max(n_best, n_usable)
        if len(kept) == N_CANDIDATES:
            break
    return tuple(kept), n_longest


def as_loaded(checkpoint: Checkpoint, n_points: int) -> Checkpoint:
    """Return a checkpoint with only the newest *n_points* context checkpoints of its file."""
    points = checkpoint.restore_points
    if len(points) <= n_points:
        return checkpoint
    return replace(checkpoint, restore_points=points[len(points) - n_points :])


def most_useful(
    rule: Rule, found: Iterable[Candidate], n_prompt: int
) -> tuple[int, Checkpoint | None]:
    """Return the most tokens that a checkpoint of *found* saves a prompt, and that checkpoint.

    *found* is sorted, the longest common prefix first: no checkpoint saves more tokens than it shares.
    """
    kept, _ = promising(rule, found, n_prompt)
    usable = [(usable_tokens(rule, c.checkpoint, c.n_common, n_prompt), c.checkpoint) for c in kept]
    return max(usable, key=itemgetter(0), default=(0, None))
