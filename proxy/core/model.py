"""The values that the pure core decides about.

Owns: the nouns (rule, checkpoint, prompt, cut). Everything here is frozen; nothing here awaits,
opens, logs or reads a clock.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from proxy.core.prefix import Namespace, TokenIds

CheckpointId = NewType("CheckpointId", int)
SlotId = NewType("SlotId", int)


class RuleKind(StrEnum):
    """What a restored state is good for on this server, as its self-test measured it."""

    ANY_PREFIX = "any prefix"
    RESTORE_POINTS = "restore points"
    END_ONLY = "end only"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Rule:
    """A learned rule; `end_holds_from` is the shortest state that can be continued at its very end.

    A sliding-window state shorter than its window can only be continued at a context checkpoint.
    """

    kind: RuleKind
    end_holds_from: int = 0

    @property
    def can_restore(self) -> bool:
        return self.kind is not RuleKind.NOTHING


NO_RULE = Rule(RuleKind.NOTHING)


class CheckpointKind(StrEnum):
    """Why a checkpoint is kept; decides what may supersede it."""

    HEADER = "header"
    TURN_START = "turn start"
    BRANCH = "branch"
    CONVERSATION = "conversation"


@dataclass(frozen=True, slots=True)
class Family:
    """Which header a state begins with, and which session it is of, for people to look at.

    Both are hashes and 0 where there is none: the header was not looked for, or the state is what several
    sessions share.
    """

    header_id: int = 0
    session_id: int = 0


NO_FAMILY = Family()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One saved state and what it can be restored for.

    `restore_points` are token counts, ascending, read from the context checkpoints in the file; the
    end of the state, `n_tokens`, is not among them. `has_every_position` is true if the file holds
    attention state for all n_tokens positions and nothing recurrent, so that it can be cut anywhere.
    `file_stamp` is (inode, mtime_ns) of the file as it was when its content was verified. The tokens
    behind the first `n_prompt` were generated; 0 if that is not known. `header` and `turn_start` are cuts
    of the prompt, in tokens, 0 where they are not known; `marks` are other places, ascending, that requests
    may come back to. A pinned checkpoint is kept until an operator unpins it. It was restored `n_restores`
    times. `family` says to which header and session it belongs.
    """

    id: CheckpointId
    namespace: Namespace
    kind: CheckpointKind
    n_tokens: int
    restore_points: tuple[int, ...]
    has_every_position: bool
    file_name: str
    size_bytes: int
    file_stamp: tuple[int, int]
    checksum: str
    created_at: float
    last_used_at: float
    n_prompt: int = 0
    header: int = 0
    turn_start: int = 0
    is_pinned: bool = False
    marks: tuple[int, ...] = ()
    n_restores: int = 0
    family: Family = NO_FAMILY


@dataclass(frozen=True, slots=True)
class Candidate:
    """A stored checkpoint and how many leading tokens it shares with a request, compared.

    `is_warm` says that its file is likely in the page cache.
    """

    checkpoint: Checkpoint
    n_common: int
    is_warm: bool = False


@dataclass(frozen=True, slots=True)
class Cuts:
    """Stable cuts of one prompt, in tokens; 0 where there is none.

    At `last_turn_end` the user message begins that is the newest of the prompt. At `surroundings` the
    reminder ends that its first message begins with. `branch` is where it leaves a prompt that was seen
    before, if nothing can be continued there.
    """

    header: int = 0
    turn_start: int = 0
    message_end: int = 0
    branch: int = 0
    last_turn_end: int = 0
    surroundings: int = 0

    @property
    def shared(self) -> int:
        """What other sessions of the same agent in the same place begin with as well."""
        return max(self.header, self.surroundings)

    @property
    def begins_turn(self) -> bool:
        """Whether the newest message of the prompt is the user's."""
        return self.turn_start > 0 and self.turn_start == self.message_end


NO_CUTS = Cuts()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's prompt as llama-server will see it; `shape` is the kind of request it came from.

    `text` is what it was tokenized from; empty if that is not one text.
    """

    tokens: TokenIds
    namespace: Namespace
    cuts: Cuts = NO_CUTS
    shape: str = ""
    text: str = ""

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    def fits(self, n_ctx: int) -> bool:
        """Return whether a slot can take it; if not, it is refused and the slot stays as it is."""
        return self.n_tokens < n_ctx


class Outcome(StrEnum):
    """What became of a generation request that was answered."""

    HIT = "hit"
    PARTIAL = "partial"
    MISS = "miss"
    BYPASS = "bypass"
    DEGRADED = "degraded"
