"""Which checkpoints a newer one makes needless.

Owns: `superseded`. Pure. Files of one conversation repeat each other: of most, only the newest is kept.
"""

from collections.abc import Iterable

from proxy.core.cuts import SLACK_TOKENS
from proxy.core.keeping.points import marks_left
from proxy.core.model import Candidate, Checkpoint, CheckpointKind, Rule, RuleKind
from proxy.core.restore import highest_point

SMALL_LOSS_TOKENS = 256
"""So many generated tokens of an older state may be lost with it: they seldom come back as they were.
Of its prompt only SLACK_TOKENS may: that is what another conversation with the same header goes on with."""


def superseded(rule: Rule, newer: Checkpoint, older: Iterable[Candidate]) -> list[Checkpoint]:
    """Return those of *older* that *newer* makes needless.

    An *older* one's n_common says how much of it the newer one repeats. A header and a branch are kept
    always; a turn start until a later turn's start repeats it; a pinned one in any case.
    """
    return [
        found.checkpoint
        for found in older
        if found.checkpoint.id != newer.id
        and _may_go(newer, found.checkpoint)
        and _repeats(rule, newer, found)
    ]


def _may_go(newer: Checkpoint, older: Checkpoint) -> bool:
    if older.is_pinned:
        return False
    match older.kind:
        case CheckpointKind.HEADER | CheckpointKind.BRANCH:
            return False
        case CheckpointKind.TURN_START:
            return newer.kind is CheckpointKind.TURN_START
        case CheckpointKind.CONVERSATION:
            return True


def _repeats(rule: Rule, newer: Checkpoint, found: Candidate) -> bool:
    older, n_common = found.checkpoint, found.n_common
    match rule.kind:
        case RuleKind.ANY_PREFIX:
            return newer.has_every_position and _moves_on(newer, found)
        case RuleKind.RESTORE_POINTS:
            return _moves_on(newer, found) and all(
                _has_place(newer, place) for place in _places_of(older) if place <= n_common
            )
        case RuleKind.END_ONLY:
            # The state at a turn's start serves every later request of that turn that diverges.
            is_whole = n_common == older.n_tokens < newer.n_tokens
            return is_whole and older.kind is CheckpointKind.CONVERSATION
        case RuleKind.NOTHING:
            return False


def _moves_on(newer: Checkpoint, found: Candidate) -> bool:
    """Return whether *newer* is a later state of the same conversation.

    It goes on from the older one's prompt, or has dropped the reasoning of its turn for the next one.
    """
    older, n_common = found.checkpoint, found.n_common
    n_prompt_lost = (older.n_prompt or older.n_tokens) - n_common
    if n_prompt_lost <= SLACK_TOKENS and older.n_tokens - n_common <= SMALL_LOSS_TOKENS:
        return newer.n_tokens >= older.n_tokens - SMALL_LOSS_TOKENS
    return newer.turn_start > n_common >= older.turn_start > 0


def _places_of(checkpoint: Checkpoint) -> Iterable[int]:
    """Return where a checkpoint can be continued that somebody may come back to, but for its end."""
    return (n for n in (checkpoint.header, checkpoint.turn_start, *marks_left(checkpoint)) if n)


def _has_place(newer: Checkpoint, place: int) -> bool:
    """Return whether *newer* can be continued at a place, or knew it and found it not worth its bytes."""
    if place in (newer.header, newer.turn_start, *newer.marks):
        return True
    return highest_point(newer.restore_points, place) >= place - SLACK_TOKENS
