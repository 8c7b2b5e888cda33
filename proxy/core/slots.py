"""The slot table: what each slot of llama-server holds, and who has the right to it.

Owns: contents and leases, and every change of them. Nothing here awaits, so a slot that is chosen
is reserved in the same call and no lock is needed. Must never know how a slot is filled.

A content is *known*, *empty* or *unknown*; unknown is an honest state, not an error.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

from proxy.core.model import Rule, RuleKind, SlotId
from proxy.core.prefix import Namespace, TokenIds, common_prefix_length
from proxy.core.restore import highest_point

MAX_CONTEXT_CHECKPOINTS = 32
"""llama-server's default of --ctx-checkpoints: how many a slot, and so a state file, has at most."""


@dataclass(frozen=True, slots=True)
class Empty:
    """The slot holds no tokens."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The slot may hold anything; `tenant` is whose tokens those may be, None if anybody's.

    Anybody's are erased before the slot is used again. If `can_be_adopted`, a save will tell its tokens
    and they are worth keeping; `likely` are the tokens that a save may well find, such as the prompt of
    a request that was abandoned on its way, or what is being evaluated. `n_restored` is as in Known.
    """

    tenant: Namespace | None = None
    can_be_adopted: bool = True
    likely: TokenIds | None = None
    n_restored: int = 0


@dataclass(frozen=True, slots=True)
class Known:
    """The slot holds `tokens` and then `n_tail` generated tokens whose ids were not reported.

    `restore_points` are context checkpoints believed to be in its memory, ascending. `header` and
    `turn_start` are those of the conversation, `last_cut` where its prompt was last cut (0: nowhere).
    `marks` are other places, ascending, that requests may come back to: where turns began, where prompts
    branched. `n_saved` tokens of it are covered by a checkpoint in the store, which can be continued at
    the `saved_points`; `shape` is the kind of request that the tokens were predicted for. The first
    `n_restored` came from a file that lacks positions: what lies behind them is whole, but they cannot be
    continued before their end. There are no more than `n_points_at_most` context checkpoints.
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
    n_restored: int = 0
    n_points_at_most: int = MAX_CONTEXT_CHECKPOINTS

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) + self.n_tail

    @property
    def n_unsaved(self) -> int:
        return max(0, self.n_tokens - self.n_saved)


Content: TypeAlias = Empty | Unknown | Known


def restored_tokens(content: Content) -> int:
    """Return how many first tokens of a slot came from a file that lacks positions."""
    return 0 if isinstance(content, Empty) else content.n_restored


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
    the tokens that the lease's request will put there, None if they are not known.
    """

    id: SlotId
    content: Content
    is_leased: bool = False
    is_closing: bool = False
    is_running: bool = False
    is_ready: bool = False
    used_at: float = 0.0
    destined: TokenIds | None = None


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
        self._slots[slot_id] = replace(
            self._slots[slot_id], content=content, is_running=False, is_ready=False
        )

    def forget_free(self) -> None:
        """Mark every free slot unknown, after traffic that the proxy did not place."""
        for slot in self.free():
            self.set_content(slot.id, Unknown())
