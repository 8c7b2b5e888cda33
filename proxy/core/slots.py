"""The slot table: what each slot of llama-server holds, and who has the right to it.

Owns: contents and leases, and every change of them. Nothing here awaits, so a slot that is chosen
is reserved in the same call and no lock is needed. Must never know how a slot is filled.

A content is *known*, *empty* or *unknown*; unknown is an honest state, not an error.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

from proxy.core.model import NO_CUTS, Checkpoint, CheckpointId, Cuts, Rule, RuleKind, SlotId
from proxy.core.rule import highest_point
from proxy.core.tokens import FIRST_BLOCK_TOKENS, Namespace, TokenIds, common_prefix_length

# The slot table: what each slot of llama-server holds, and who has the right to it.
#
# Owns: contents and leases, and every change of them. Nothing here awaits, so a slot that is chosen is
# reserved in the same call and no lock is needed. Must never know how a slot is filled.
#
# A content is *known*, *empty* or *unknown*; unknown is an honest state, not an error.


MAX_CONTEXT_CHECKPOINTS = 32
"""llama-server's default of --ctx-checkpoints: how many a slot, and so a state file, has at most."""


@dataclass(frozen=True, slots=True)
class Empty:
    """The slot holds no tokens."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Which files a slot's state goes back to: the checkpoints that were restored, directly or not.

    The first `n_restored` tokens came from a file that lacks positions: what lies behind them is whole, but
    they cannot be continued before their end.
    """

    n_restored: int = 0
    ancestors: tuple[CheckpointId, ...] = ()


EVALUATED = Origin()


@dataclass(frozen=True, slots=True)
class Unknown:
    """The slot may hold anything; `tenant` is whose tokens those may be, None if anybody's.

    Anybody's are erased before the slot is used again. If `can_be_adopted`, a save will tell its tokens
    and they are worth keeping; `likely` are the tokens that a save may well find, such as the prompt of
    a request that was abandoned on its way, or what is being evaluated.
    """

    tenant: Namespace | None = None
    can_be_adopted: bool = True
    likely: TokenIds | None = None
    origin: Origin = EVALUATED


@dataclass(frozen=True, slots=True)
class Known:
    """The slot holds `tokens` and then `n_tail` generated tokens whose ids were not reported.

    `restore_points` are context checkpoints believed to be in its memory, ascending. `header` and
    `turn_start` are those of the conversation, `last_cut` where its prompt was last cut (0: nowhere).
    `marks` are other places, ascending, that requests may come back to: where turns began, where prompts
    branched. `n_saved` tokens of it are covered by a checkpoint in the store, which can be continued at
    the `saved_points`; `shape` is the kind of request that the tokens were predicted for. There are no more
    than `n_points_at_most` context checkpoints.
    """

    tokens: TokenIds
    namespace: Namespace
    n_tail: int = 0
    restore_points: tuple[int, ...] = ()
    header: int = 0
    turn_start: int = 0
    last_cut: int = 0
    marks: tuple[int, ...] = ()
    n_saved: int = 0
    saved_points: tuple[int, ...] = ()
    shape: str = ""
    origin: Origin = EVALUATED
    n_points_at_most: int = MAX_CONTEXT_CHECKPOINTS

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) + self.n_tail

    @property
    def n_unsaved(self) -> int:
        return max(0, self.n_tokens - self.n_saved)


Content: TypeAlias = Empty | Unknown | Known


def origin_of(content: Content) -> Origin:
    """Return which files a slot's state goes back to."""
    return EVALUATED if isinstance(content, Empty) else content.origin


TAINTED = Unknown(None, can_be_adopted=False)
"""A slot whose state may not be what its tokens say: it is erased before it is used again."""


LOADING = Unknown(can_be_adopted=False)
"""A slot that a state is being loaded into: it may hold anything until that is done."""


def promised_tokens(rule: Rule, slot: "Slot", namespace: Namespace, tokens: TokenIds) -> int:
    """Return how many tokens a slot that is closing will likely save a prompt that waits for it."""
    content = slot.content
    if isinstance(content, Unknown) and content.likely is not None and content.tenant == namespace:
        return common_prefix_length(content.likely, tokens)
    return live_reuse(rule, content, namespace, tokens).at_least


@dataclass(frozen=True, slots=True)
class Reuse:
    """How many tokens of a live slot a prompt will reuse: at least, and at most."""

    at_least: int = 0
    at_most: int = 0


def live_reuse(rule: Rule, content: Content, namespace: Namespace, tokens: TokenIds) -> Reuse:
    """Return what *tokens* would reuse of a slot that holds *content*."""
    last = len(tokens) - 1
    if isinstance(content, Unknown):
        return Reuse(0, last)
    if isinstance(content, Empty) or content.namespace != namespace:
        return Reuse()
    n_common = common_prefix_length(content.tokens, tokens)
    if n_common < len(content.tokens):
        return Reuse(_after_rewind(rule, content, min(n_common, last)), min(n_common, last))
    at_most = min(n_common + content.n_tail, last)
    if content.n_tail == 0 and n_common <= last:
        return Reuse(n_common, at_most)
    return Reuse(_after_rewind(rule, content, min(n_common, last)), at_most)


def _after_rewind(rule: Rule, content: Known, n_reachable: int) -> int:
    # Full attention forgets any tail; every other memory can only go back to a context checkpoint.
    if rule.kind is RuleKind.ANY_PREFIX:
        return n_reachable
    return highest_point(content.restore_points, n_reachable)


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot of llama-server as the proxy sees it.

    `is_closing` says that its lease serves no request any more and ends by itself: a save is under way,
    or llama-server is letting go of a request whose client left. `is_running` says that llama-server is
    known to run the lease's request, so that it will not place another one there. `is_ready` says that the
    lease's request is about to be sent, and that until then the slot holds what it holds. `destined` are
    the tokens that the lease's request will put there, None if they are not known. What it holds came from
    the saved states `sources`, and went into them; it `has_answered` a request since.
    """

    id: SlotId
    content: Content
    is_leased: bool = False
    is_closing: bool = False
    is_running: bool = False
    is_ready: bool = False
    used_at: float = 0.0
    destined: TokenIds | None = None
    sources: tuple[Checkpoint, ...] = ()
    has_answered: bool = False


class SlotState(StrEnum):
    """A slot in one word, for operators."""

    LEASED = "leased"
    KNOWN = "known"
    EMPTY = "empty"
    UNKNOWN = "unknown"


def state_of(slot: Slot) -> SlotState:
    """Return whether a slot is in use and, if it is not, what is known of its content."""
    if slot.is_leased:
        return SlotState.LEASED
    match slot.content:
        case Known():
            return SlotState.KNOWN
        case Empty():
            return SlotState.EMPTY
        case Unknown():
            return SlotState.UNKNOWN


class SlotTable:
    """All slots of one llama-server process."""

    def __init__(self, contents: list[Content]) -> None:
        self._slots = [Slot(SlotId(i), content) for i, content in enumerate(contents)]
        self._damaged: set[CheckpointId] = set()

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, slot_id: SlotId) -> Slot:
        return self._slots[slot_id]

    def free(self) -> list[Slot]:
        """Return the slots that nobody leases."""
        return [slot for slot in self._slots if not slot.is_leased]

    def lease(self, slot_id: SlotId, now: float) -> None:
        """Reserve a slot; raises ValueError if it is leased."""
        if self._slots[slot_id].is_leased:
            raise ValueError(f"slot {slot_id} is leased already")
        self._slots[slot_id] = replace(self._slots[slot_id], is_leased=True, used_at=now)

    def release(self, slot_id: SlotId, now: float) -> None:
        """Give a slot back; it stays released if it was."""
        self._slots[slot_id] = replace(
            self._slots[slot_id],
            is_leased=False,
            is_closing=False,
            is_running=False,
            is_ready=False,
            used_at=now,
            destined=None,
        )

    def close_lease(self, slot_id: SlotId) -> None:
        """Note that a leased slot will soon be free, with its content as good as it is now."""
        self._slots[slot_id] = replace(
            self._slots[slot_id], is_closing=True, is_running=False, is_ready=False
        )

    def destine(self, slot_id: SlotId, tokens: TokenIds) -> None:
        """Note what the request that a slot is leased for will put there."""
        self._slots[slot_id] = replace(self._slots[slot_id], destined=tokens)

    def note_ready(self, slot_id: SlotId, *, is_ready: bool) -> None:
        """Note whether nothing will change what a leased slot holds until its request is sent."""
        self._slots[slot_id] = replace(self._slots[slot_id], is_ready=is_ready)

    def note_running(self, slot_id: SlotId) -> None:
        """Note that llama-server runs the request that a slot is leased for."""
        if self._slots[slot_id].is_leased:
            self._slots[slot_id] = replace(self._slots[slot_id], is_running=True, is_ready=False)

    def set_content(self, slot_id: SlotId, content: Content) -> None:
        """Record what a slot holds from now on; whatever ran in it has ended."""
        if not self._damaged.isdisjoint(origin_of(content).ancestors):
            content = TAINTED
        slot = self._slots[slot_id]
        sources = () if isinstance(content, Empty) else slot.sources
        self._slots[slot_id] = replace(
            slot, content=content, is_running=False, is_ready=False, sources=sources
        )

    def distrust(self, damaged: Collection[CheckpointId]) -> None:
        """Taint what goes back to *damaged* checkpoints: free slots now, others when they change next."""
        self._damaged.update(damaged)
        for slot in self.free():
            self.set_content(slot.id, slot.content)

    def note_restore(self, slot_id: SlotId, checkpoint: Checkpoint) -> None:
        """Note that from now on a slot holds what comes from a checkpoint."""
        self._slots[slot_id] = replace(
            self._slots[slot_id], sources=(checkpoint,), has_answered=False
        )

    def note_save(self, slot_id: SlotId, checkpoint: Checkpoint) -> None:
        """Note that what came from a checkpoint is now in another one as well."""
        slot = self._slots[slot_id]
        if slot.sources:
            self._slots[slot_id] = replace(slot, sources=(slot.sources[-1], checkpoint))

    def forget_sources(self, *slot_ids: SlotId) -> None:
        """Note that no saved state in these slots, or in any, is to be suspected any more."""
        for slot_id in slot_ids or [slot.id for slot in self]:
            self._slots[slot_id] = replace(self._slots[slot_id], sources=())

    def note_answer(self, slot_id: SlotId) -> None:
        """Note that llama-server has answered a request from what a slot holds."""
        self._slots[slot_id] = replace(self._slots[slot_id], has_answered=True)

    def suspects(self, slot_id: SlotId, *, is_saving: bool = False) -> tuple[Checkpoint, ...]:
        """Return the checkpoints to suspect if llama-server dies while it works on a slot.

        A state that a request was answered from can be evaluated. Whether it can be saved is not known.
        """
        slot = self._slots[slot_id]
        return slot.sources if is_saving or not slot.has_answered else ()

    def forget_free(self) -> None:
        """Mark every free slot unknown, after traffic that the proxy did not place."""
        for slot in self.free():
            self.set_content(slot.id, Unknown())


# Which slot a request gets whose prompt is not looked up, and which one is emptied for another purpose.
#
# Owns: the choice by what would be lost. Pure.


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


# What must not be reused: other tenants' tokens, and restored states that cannot be cut.
#
# Owns: whether a slot is erased before a request uses it. Pure.


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
    n_restored = origin_of(content).n_restored
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


# What a slot holds once a prompt was evaluated in it.
#
# Owns: the prediction of a content, context checkpoints and places included. Pure; a save tells the
# truth.


CONTEXT_CHECKPOINT_MARGIN = 5
"""llama-server makes a context checkpoint 4 tokens before a prompt's end (server-context.cpp,
"checkpoint the last"); a sliding-window model continues one token before it."""


def after_evaluation(
    before: Content,
    tokens: TokenIds,
    namespace: Namespace,
    *,
    cuts: Cuts = NO_CUTS,
    n_generated: int = 0,
    shape: str = "",
    n_believed: int = 10,
    stride_tokens: int = 1,
) -> Known:
    """Return what a slot holds once *tokens* were evaluated in it and *n_generated* sampled.

    The last sampled token is never decoded. Context checkpoints behind the point where the prompt left
    the old content are gone; one is new, shortly before the prompt's end, if it lies *stride_tokens* behind
    the last. Only the newest *n_believed* are counted on.
    """
    n_kept = 0
    old = before if isinstance(before, Known) and before.namespace == namespace else None
    if old:
        n_kept = common_prefix_length(old.tokens, tokens)
    points = [p for p in old.restore_points if p <= n_kept] if old else []
    newest = len(tokens) - CONTEXT_CHECKPOINT_MARGIN
    if newest >= stride_tokens + max(points, default=-stride_tokens) and newest > 0:
        points.append(newest)
    origin = origin_of(before)
    n_restored = _kept(origin.n_restored, n_kept) if old else min(origin.n_restored, len(tokens))
    return Known(
        tokens=tokens,
        namespace=namespace,
        n_tail=max(0, n_generated - 1),
        restore_points=tuple(points[-n_believed:]) if n_believed else (),
        header=_kept(cuts.header, len(tokens)) or (_kept(old.header, n_kept) if old else 0),
        turn_start=_kept(cuts.turn_start, len(tokens))
        or (_kept(old.turn_start, n_kept) if old else 0),
        last_cut=_kept(old.last_cut, n_kept) if old else 0,
        marks=_marks(old, n_kept, cuts, len(tokens)),
        n_saved=min(old.n_saved, n_kept) if old else 0,
        saved_points=tuple(p for p in old.saved_points if p <= n_kept) if old else (),
        shape=shape,
        origin=Origin(n_restored, origin.ancestors if n_kept or not old else ()),
        n_points_at_most=min(
            MAX_CONTEXT_CHECKPOINTS, _points_at_most(before) + CHECKPOINTS_PER_REQUEST
        ),
    )


MAX_MARKS = 32
"""More places than context checkpoints in a file are not kept."""


def _marks(old: Known | None, n_kept: int, cuts: Cuts, n_tokens: int) -> tuple[int, ...]:
    """Return where requests may come back to in a prompt that shares its first *n_kept* tokens with *old*.

    A new user message is the place where a conversation forks: a summary or a title is asked for, a
    subagent takes over, the user goes back and edits. What lies before it is then asked for again. Another
    session shares an agent's surroundings. Of the prompt only *n_tokens* are evaluated so far.
    """
    forks = cuts.branch, cuts.last_turn_end, cuts.surroundings
    marks = {mark for mark in forks if mark <= n_tokens}
    if old:
        marks |= {mark for mark in (*old.marks, old.turn_start) if mark <= n_kept}
    return tuple(sorted(marks - {0, cuts.header, cuts.turn_start}))[-MAX_MARKS:]


def _points_at_most(content: Content) -> int:
    match content:
        case Empty():
            return 0
        case Known():
            return content.n_points_at_most
        case Unknown():
            return MAX_CONTEXT_CHECKPOINTS


CHECKPOINTS_PER_REQUEST = 3
"""So many context checkpoints llama-server adds for a request at most, and drops the oldest for them
(server-context.cpp, create_checkpoint)."""


def n_believed_points(n_context_checkpoints: int) -> int:
    """Return how many of the newest points a slot surely still has that keeps so many checkpoints."""
    return n_context_checkpoints // CHECKPOINTS_PER_REQUEST


def has_dropped_points(believed: Sequence[int], saved: Sequence[int]) -> bool:
    """Return whether llama-server dropped the oldest *believed* points, for want of room for newer ones.

    *saved* are the points in the slot's file. Few points tell nothing: llama-server makes none for a short
    prompt, and a prediction can be wrong by a few tokens.
    """
    if not believed or len(saved) < CHECKPOINTS_PER_REQUEST:
        return False
    return FIRST_BLOCK_TOKENS <= believed[0] < saved[0] - CONTEXT_CHECKPOINT_MARGIN


def _kept(n_cut: int, n_kept: int) -> int:
    return n_cut if n_cut <= n_kept else 0
