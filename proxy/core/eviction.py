"""Which checkpoints go when the store is over its budget, and which a newer one makes needless.

Owns: `choose_victims` and `superseded`. Pure; must never log, unlink or read the clock.
"""

from collections.abc import Collection, Iterable

from proxy.core.cuts import SLACK_TOKENS
from proxy.core.model import Candidate, Checkpoint, CheckpointId, CheckpointKind, Rule, RuleKind
from proxy.core.restore import highest_point

SMALL_LOSS_TOKENS = 256
"""So many generated tokens of an older state may be lost with it: they seldom come back as they were.
Of its prompt only SLACK_TOKENS may: that is what another conversation with the same header goes on with."""


def choose_victims(
    checkpoints: Iterable[Checkpoint], n_bytes_to_free: int, in_use: Collection[CheckpointId]
) -> list[Checkpoint]:
    """Return the least recently used checkpoints whose sizes add up to *n_bytes_to_free*.

    Never one that is *in_use*; fewer bytes than asked for if the rest does not suffice.
    """
    victims = []
    for checkpoint in sorted(checkpoints, key=lambda c: c.last_used_at):
        if n_bytes_to_free <= 0:
            break
        if checkpoint.id not in in_use:
            victims.append(checkpoint)
            n_bytes_to_free -= checkpoint.size_bytes
    return victims


def superseded(rule: Rule, newer: Checkpoint, older: Iterable[Candidate]) -> list[Checkpoint]:
    """Return those of *older* that *newer* makes needless.

    An *older* one's n_common says how much of it the newer one repeats. A header is kept always; a
    turn start until a later turn's start repeats it.
    """
    kept = [c for c in older if c.checkpoint.id != newer.id]
    gone = []
    # From the longest on: llama-server drops its oldest context checkpoints, which only the first of a
    # conversation's files still have; those between are repeated by their neighbours.
    for found in sorted(kept, key=lambda c: -c.checkpoint.n_tokens):
        others = [c for c in kept if c is not found]
        if _may_go(newer, found.checkpoint) and _repeats(rule, newer, found, others):
            kept = others
            gone.append(found.checkpoint)
    return gone


def _may_go(newer: Checkpoint, older: Checkpoint) -> bool:
    match older.kind:
        case CheckpointKind.HEADER:
            return False
        case CheckpointKind.TURN_START:
            return newer.kind is CheckpointKind.TURN_START
        case CheckpointKind.CONVERSATION:
            return True


def _repeats(rule: Rule, newer: Checkpoint, found: Candidate, others: Iterable[Candidate]) -> bool:
    older, n_common = found.checkpoint, found.n_common
    match rule.kind:
        case RuleKind.ANY_PREFIX:
            n_lost = older.n_tokens - n_common
            n_prompt_lost = (older.n_prompt or older.n_tokens) - n_common
            is_little = n_lost <= SMALL_LOSS_TOKENS and n_prompt_lost <= SLACK_TOKENS
            return newer.has_every_position and is_little
        case RuleKind.RESTORE_POINTS:
            known = [Candidate(newer, newer.n_tokens), *others]
            return bool(older.restore_points) and all(
                point <= n_common and any(_has_point(c, point) for c in known)
                for point in older.restore_points
            )
        case RuleKind.END_ONLY:
            # The state at a turn's start serves every later request of that turn that diverges.
            is_whole = n_common == older.n_tokens < newer.n_tokens
            return is_whole and older.kind is CheckpointKind.CONVERSATION
        case RuleKind.NOTHING:
            return False


def _has_point(found: Candidate, point: int) -> bool:
    """Return whether a state can be continued at *point* or just before it."""
    reachable = min(point, found.n_common)
    return highest_point(found.checkpoint.restore_points, reachable) >= point - SLACK_TOKENS
