"""The slot table: the content and the lease of each slot of llama-server.

Owns: contents and leases, and every change of them. Nothing here awaits: a slot is chosen and reserved in
one call, without a lock. Must never know how a slot is filled.

A content is *known*, *empty* or *unknown*; unknown is not an error.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar, TypeAlias

from proxy.core.cuts import (
    CONTEXT_CHECKPOINT_MARGIN,
    MAX_CONTEXT_CHECKPOINTS,
    MIN_BRANCH_TOKENS,
    UBATCH_TOKENS,
    points_after,
    points_made,
)
from proxy.core.model import Checkpoint, CheckpointId, Prompt, Rule, SlotId, Title, highest_point
from proxy.core.tokens import Namespace, TokenIds, common_prefix_length


@dataclass(frozen=True, slots=True)
class Origin:
    """The checkpoints that a slot's state derives from, directly or not.

    The first `n_restored` tokens came from a file that lacks positions, so they cannot be continued before
    their end. The tokens behind them have every position.
    """

    n_restored: int = 0
    ancestors: tuple[CheckpointId, ...] = ()


EVALUATED = Origin()


@dataclass(frozen=True, slots=True)
class Empty:
    """The slot holds no tokens."""

    origin: ClassVar = EVALUATED
    tenant: ClassVar = None
    can_be_adopted: ClassVar = True


@dataclass(frozen=True, slots=True)
class Unknown:
    """The slot may hold any tokens of `tenant`, or of any tenant if `tenant` is None.

    A slot that may hold any tenant's tokens is erased before it is used again. If `can_be_adopted`, a save
    will tell the tokens, and they are worth keeping. `likely` are tokens that the slot probably holds, such
    as the prompt of a request that was abandoned, or the prompt that is being evaluated. `brief` are the
    digests of the Conversation of a brief chat that ended in the slot, `digests` those of the messages of
    any request whose prompt was not read.
    """

    tenant: Namespace | None = None
    can_be_adopted: bool = True
    likely: TokenIds | None = None
    brief: bytes = b""
    digests: bytes = b""
    origin: Origin = EVALUATED


@dataclass(frozen=True, slots=True)
class Known:
    """The slot holds `tokens` and then `n_tail` generated tokens whose ids were not reported."""

    tokens: TokenIds
    tenant: Namespace
    n_tail: int = 0
    restore_points: tuple[int, ...] = ()
    """The context checkpoints that it has for certain, ascending."""
    possible_points: tuple[int, ...] = ()  # all that it may have: these and others
    header: int = 0  # this cut and the next two are 0 if there is none
    turn_start: int = 0
    last_cut: int = 0  # the last one at which its prompt was stopped
    marks: tuple[int, ...] = ()
    """Other cuts, ascending, to which requests may come back: where turns began, where prompts branched."""
    n_saved: int = 0  # how many tokens a checkpoint in the store covers
    saved_points: tuple[int, ...] = ()  # where such a checkpoint can be continued
    shape: str = ""  # the kind of request that the tokens were predicted for
    conversation: bytes = b""  # of the Prompt that the tokens begin with, as is the title
    title: Title = Title()
    origin: Origin = EVALUATED
    is_stored_further: bool = False
    """Whether a file goes on behind the slot's prompt: then the slot's next request is looked up."""
    is_aside: bool = False  # of a side call: never continued, so not saved, and nothing to lose
    is_given_up: bool = False
    """Not to be saved before the slot's next request, because its save failed or is not wanted."""
    can_be_adopted: bool = True
    """False after a request of which nothing may be saved: the slot is erased when the proxy ends."""

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) + self.n_tail

    @property
    def n_unsaved(self) -> int:
        return max(0, self.n_tokens - self.n_saved)


Content: TypeAlias = Empty | Unknown | Known


TAINTED = Unknown(None, can_be_adopted=False)
"""A slot whose state may not match its tokens, or a slot that is being loaded or erased and may hold
anything until that ends. It is erased before it is used again."""


def shared_tokens(content: Content, tokens: TokenIds, namespace: Namespace | None = None) -> int:
    """Return how many leading tokens of a prompt a slot surely holds, usable or not, in a *namespace*."""
    if not isinstance(content, Known) or namespace not in (None, content.tenant):
        return 0
    return common_prefix_length(content.tokens, tokens)


def live_reuse(rule: Rule, content: Content, n_common: int, n_prompt: int) -> tuple[int, int]:
    """Return the least and the most tokens that a prompt reuses of a slot that has its first *n_common*."""
    last = n_prompt - 1
    if isinstance(content, Empty):
        return 0, 0
    if isinstance(content, Unknown):
        return 0, last
    is_whole = n_common == len(content.tokens)
    at_most = min(n_common + content.n_tail if is_whole else n_common, last)
    n_reachable = min(n_common, last)
    goes_on = is_whole and content.n_tail == 0 and n_common <= last
    # Full attention can be cut anywhere; every other memory can only go back to a context checkpoint.
    if not rule.is_any_prefix and not goes_on:
        n_reachable = highest_point(content.restore_points, n_reachable)
    return n_reachable, at_most


class SlotPhase(StrEnum):
    """The progress of a slot's lease; every phase but FREE is leased.

    | change                        | by                                               |
    |-------------------------------|--------------------------------------------------|
    | free -> preparing             | `SlotTable.lease`                                |
    | preparing -> ready, and back  | a placement (`serving/placement.py`)             |
    | preparing, ready -> running   | `Slot.note_running`                              |
    | ready, running -> preparing   | `SlotTable.set_content`                          |
    | any -> closing                | `Lease.hand_over`                                |
    | any -> free                   | `SlotTable.release`                              |
    """

    FREE = "free"
    PREPARING = "preparing"
    """The content may change before the request of the lease is sent."""
    READY = "ready"
    """The request is about to be sent, and the content does not change until then."""
    RUNNING = "running"
    """llama-server is known to run the request, so it will not put another request into the slot."""
    CLOSING = "closing"
    """The lease serves no request any more and will end by itself, after a save or once llama-server has
    let go of a request whose client left."""


@dataclass(slots=True)
class Slot:
    """One slot of llama-server as the proxy sees it; only `SlotTable.set_content` changes its content."""

    id: SlotId
    content: Content
    phase: SlotPhase = SlotPhase.FREE
    used_at: float = 0.0  # when it was last leased or given back (monotonic)
    destined: TokenIds | None = None
    """The tokens that the lease's request will put there, if they are known."""
    answered_for: Namespace | None = None
    """The tenant of that request once it is answered, while the proxy still looks whether it ran here."""
    sources: tuple[Checkpoint, ...] = ()  # those that the content was restored from or saved as
    has_answered: bool = False  # whether it has answered a request since

    @property
    def is_leased(self) -> bool:
        return self.phase is not SlotPhase.FREE

    @property
    def is_running(self) -> bool:
        return self.phase is SlotPhase.RUNNING

    @property
    def is_closing(self) -> bool:
        return self.phase is SlotPhase.CLOSING or self.answered_for is not None

    @property
    def n_held(self) -> int:
        """How many tokens it holds, or is about to hold, as far as they are known."""
        n_known = self.content.n_tokens if isinstance(self.content, Known) else 0
        return max(n_known, len(self.destined or ()))

    def note_running(self) -> None:
        """Note that llama-server runs the request that the slot is leased for, if it still is."""
        if self.phase in (SlotPhase.PREPARING, SlotPhase.READY):
            self.phase = SlotPhase.RUNNING

    def note_restore(self, checkpoint: Checkpoint) -> None:
        """Note that the slot now holds a state restored from a checkpoint."""
        self.sources, self.has_answered = (checkpoint,), False

    def note_save(self, checkpoint: Checkpoint) -> None:
        """Note that a state that was restored from one checkpoint was saved as another."""
        self.sources = (*self.sources[-1:], checkpoint) if self.sources else ()

    def suspects(self, *, is_saving: bool = False) -> tuple[Checkpoint, ...]:
        """Return the checkpoints to suspect if llama-server dies while it works on the slot.

        A state from which a request was answered is good to evaluate, but not known to be good to save.
        """
        return self.sources if is_saving or not self.has_answered else ()


SLOT_STATES = ("leased", "known", "empty", "unknown")


def state_of(slot: Slot) -> str:
    """Return one of SLOT_STATES: whether a slot is in use, else what is known of its content."""
    return "leased" if slot.is_leased else type(slot.content).__name__.lower()


def n_busy(slots: Iterable[Slot]) -> int:
    """Return how many slots serve a request."""
    return sum(slot.phase not in (SlotPhase.FREE, SlotPhase.CLOSING) for slot in slots)


class SlotTable(list[Slot]):
    """All slots of one llama-server process, by their ids."""

    def __init__(self, contents: Iterable[Content]) -> None:
        super().__init__(Slot(SlotId(i), content) for i, content in enumerate(contents))
        self._damaged: set[CheckpointId] = set()

    def met_again(self) -> list[Content]:
        """Return the contents of a new table of the same process: tainted what is not to be saved."""
        return [TAINTED if n_busy([s]) or not s.content.can_be_adopted else Unknown() for s in self]

    def go_on_from(self, earlier: "SlotTable") -> None:
        """Take over what the slots held by the *earlier* table of this process; some may be empty now."""
        for slot in self.free():
            if not isinstance(slot.content, Empty):
                self.set_content(slot.id, earlier[slot.id].content)

    def free(self) -> list[Slot]:
        """Return the slots that are not leased."""
        return [slot for slot in self if not slot.is_leased]

    def holder(self, content: Content) -> Slot | None:
        """Return the free slot that still holds this content object."""
        return next((s for s in self if s.content is content and not s.is_leased), None)

    def lease(self, slot_id: SlotId, now: float) -> None:
        """Reserve a slot; raises ValueError if it is leased."""
        slot = self[slot_id]
        if slot.is_leased:
            raise ValueError(f"slot {slot_id} is leased already")
        slot.phase, slot.used_at = SlotPhase.PREPARING, now

    def release(self, slot_id: SlotId, now: float) -> None:
        """Give a slot back; a free slot stays free."""
        slot = self[slot_id]
        slot.phase, slot.used_at = SlotPhase.FREE, now
        slot.destined = slot.answered_for = None

    def set_content(self, slot_id: SlotId, content: Content) -> None:
        """Record the new content of a slot; whatever ran in it has ended."""
        slot = self[slot_id]
        is_damaged = not self._damaged.isdisjoint(content.origin.ancestors)
        slot.content = TAINTED if is_damaged else content
        if slot.phase in (SlotPhase.READY, SlotPhase.RUNNING):
            slot.phase = SlotPhase.PREPARING
        if isinstance(content, Empty):
            slot.sources = ()

    def refine(self, slot_id: SlotId, held: Content, content: Content) -> None:
        """Record what a save told of the content *held*, unless the slot has another one by now.

        A request that has the slot meanwhile goes on undisturbed.
        """
        if self[slot_id].content is held:
            phase = self[slot_id].phase
            self.set_content(slot_id, content)
            self[slot_id].phase = phase

    def distrust(self, damaged: Collection[CheckpointId]) -> None:
        """Taint slots that derive from *damaged* checkpoints: free ones now, others when they change."""
        self._damaged.update(damaged)
        for slot in self.free():
            self.set_content(slot.id, slot.content)

    def forget_free(self) -> None:
        """Mark every free slot unknown, after traffic that the proxy did not place."""
        for slot in self.free():
            self.set_content(slot.id, TAINTED)

    def forget_sources(self) -> None:
        """Note that no restored or saved state in any slot is suspect any more."""
        for slot in self:
            slot.sources = ()


# Contents that must not be reused: other tenants' tokens, and restored states that cannot be cut.


def must_be_erased(
    rule: Rule, content: Content, namespace: Namespace, n_common: int | None = None
) -> bool:
    """Return whether a slot must be erased, so that llama-server does not reuse its content for a prompt.

    It must if it holds another tenant's tokens, or a restored state that lacks positions and would have to
    be cut before its end. A server that saves context checkpoints refuses to cut such a state; with
    --swa-full it cuts the state, although the file has no more than a window. The slot holds the prompt's
    first *n_common* tokens (None: not known).
    """
    if isinstance(content, Empty):
        return False
    if content.tenant != namespace:
        return True
    n_restored = content.origin.n_restored
    if n_restored == 0 or rule.is_restore_points:
        return False
    return n_common is None or not isinstance(content, Known) or n_common < n_restored


# The predicted content of a slot after a prompt was evaluated in it; a save tells the real one.


def cut_to(content: Known, n_tokens: int) -> Known:
    """Return *content* without the tokens, cuts and points behind its first *n_tokens*."""
    return replace(
        content,
        tokens=content.tokens[:n_tokens],
        n_tail=0,
        restore_points=tuple(p for p in content.restore_points if p <= n_tokens),
        possible_points=tuple(p for p in content.possible_points if p <= n_tokens),
        header=_within(n_tokens, content.header),
        turn_start=_within(n_tokens, content.turn_start),
        last_cut=_within(n_tokens, content.last_cut),
        marks=tuple(mark for mark in content.marks if mark <= n_tokens),
        n_saved=min(content.n_saved, n_tokens),
        saved_points=tuple(p for p in content.saved_points if p <= n_tokens),
        conversation=b"",
    )


def as_restored(
    checkpoint: Checkpoint, tokens: TokenIds, ancestors: tuple[CheckpointId, ...]
) -> Known:
    """Return the content of a slot into which a checkpoint of *tokens* was restored."""
    n_uncut = 0 if checkpoint.has_every_position else checkpoint.n_tokens
    return Known(
        tokens,
        checkpoint.namespace,
        restore_points=checkpoint.restore_points,
        possible_points=checkpoint.restore_points,
        header=checkpoint.header,
        turn_start=checkpoint.turn_start,
        marks=checkpoint.marks,
        n_saved=checkpoint.n_tokens,
        saved_points=checkpoint.restore_points,
        origin=Origin(n_uncut, ancestors),
    )


def as_saved(
    content: Content, namespace: Namespace, tokens: TokenIds, points: tuple[int, ...]
) -> Known:
    """Return a slot's content as its file tells; the slot may have more points than the file."""
    old = content if isinstance(content, Known) else Known(tokens, namespace, origin=content.origin)
    return replace(
        old,
        tokens=tokens,
        n_tail=0,
        restore_points=points or old.restore_points,
        possible_points=points or old.possible_points,
        n_saved=len(tokens),
    )


def not_to_save(content: Content) -> Content:
    """Return a slot's content, marked as not to be saved before the slot's next request."""
    if isinstance(content, Known):
        return replace(content, is_given_up=True)
    return replace(content, can_be_adopted=False) if isinstance(content, Unknown) else content


def left_by(prompt: Prompt, before: Content) -> Content:
    """Return what a slot may hold while a *prompt* runs in it, or once its client has left.

    A state with images is not saved, but the text before the images is there in any case.
    """
    has_media = prompt.is_before_media
    if has_media and isinstance(before, Known) and before.tokens == prompt.tokens:
        return replace(before, n_tail=max(1, before.n_tail), is_given_up=True)
    return Unknown(prompt.namespace, not has_media, likely=prompt.tokens, origin=before.origin)


def also_saved(
    content: Content, namespace: Namespace, tokens: TokenIds, points: Collection[int]
) -> Content:
    """Return *content* with those restore *points* of a new file of *tokens* that lie within *content*."""
    n_common = shared_tokens(content, tokens, namespace)
    saved = {point for point in points if point <= n_common}
    if not isinstance(content, Known) or saved.issubset(content.saved_points):
        return content
    return replace(content, saved_points=tuple(sorted(saved.union(content.saved_points))))


def _within(n_tokens: int, n_cut: int) -> int:
    """Return a cut; 0 if it lies behind the first *n_tokens*."""
    return n_cut if n_cut <= n_tokens else 0


def _has_messages_behind(prompt: Prompt, n_reused: int) -> bool:
    """Return whether llama-server may see messages begin behind a prompt's first *n_reused* tokens.

    Behind a stop an evaluation begins with the newest user message, whose point is that of its beginning.
    """
    cuts = prompt.cuts
    begins_there = cuts.ends_with_user and cuts.message_begin <= n_reused < cuts.turn_start
    return bool(prompt.conversation) and not begins_there


def after_evaluation(
    before: Content,
    prompt: Prompt,
    rule: Rule,
    *,
    n_reused: int,
    n_generated: int = 0,
    n_kept: int = MAX_CONTEXT_CHECKPOINTS,
) -> Known:
    """Return the content of a slot after a prompt was evaluated in it and *n_generated* tokens sampled.

    The last sampled token is never decoded. Context checkpoints behind the first *n_reused* tokens are
    gone, or were never there. A new context checkpoint lies shortly before the prompt's end; under *end
    only* it must not be near the last one. The slot keeps *n_kept* context checkpoints.
    """
    stride_tokens = rule.stride_tokens if rule.is_end_only else 1
    tokens, namespace, cuts = prompt.tokens, prompt.namespace, prompt.cuts
    old, origin, n_edit = Known(tokens[:0], namespace), before.origin, 0
    n_restored = min(origin.n_restored, len(tokens))
    if isinstance(before, Known) and before.tenant == namespace:
        n_common = common_prefix_length(before.tokens, tokens)
        old, n_restored = cut_to(before, n_common), _within(n_common, origin.n_restored)
        origin = origin if n_common else EVALUATED
        is_edit = n_common < min(before.turn_start, len(tokens))
        if is_edit and n_common >= max(old.header, *old.marks, 0) + MIN_BRANCH_TOKENS:
            n_edit = n_common
    points, newest = old.restore_points, len(tokens) - CONTEXT_CHECKPOINT_MARGIN
    if stride_tokens > UBATCH_TOKENS and newest - len(old.tokens) > UBATCH_TOKENS:
        newest -= UBATCH_TOKENS  # the one near the end would be too near to the one before it
    if newest > 0 and (not points or newest >= points[-1] + stride_tokens):
        points += (newest,)
    # A sliding window is continued one token before each context checkpoint.
    n_from = n_reused - 1 if rule.end_holds_from else n_reused
    made = points_made(n_from, len(tokens), has_messages=_has_messages_behind(prompt, n_reused))
    possible = points_after([p for p in old.possible_points if p <= n_reused], made, n_kept)
    # A conversation forks where a user message begins: the client asks for a summary or a title, a subagent
    # takes over, the user goes back and edits. The next request then shares the tokens before that message.
    # Other sessions share an agent's surroundings.
    forks = (cuts.branch, cuts.last_turn_end, cuts.surroundings, n_edit)
    marks = {fork for fork in forks if fork <= len(tokens)} | {*old.marks, old.turn_start}
    kept_marks = sorted(marks - {0, cuts.header, cuts.turn_start})
    return Known(
        tokens=tokens,
        tenant=namespace,
        n_tail=max(0, n_generated - 1),
        restore_points=tuple(point for point in points if point in possible),
        possible_points=possible,
        header=_within(len(tokens), cuts.header) or old.header,
        turn_start=_within(len(tokens), cuts.turn_start) or old.turn_start,
        last_cut=old.last_cut,
        # The lowest one stays, and the newest.
        marks=(*kept_marks[:1], *kept_marks[1:][1 - MAX_CONTEXT_CHECKPOINTS :]),
        n_saved=old.n_saved,
        saved_points=old.saved_points,
        shape=prompt.shape,
        conversation=prompt.conversation,
        title=prompt.title,
        origin=Origin(n_restored, origin.ancestors),
    )
