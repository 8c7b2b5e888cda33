"""Which checkpoints go when the store is over its budget, and which a newer one makes needless.

Owns: `choose_victims` and `superseded`. Pure; must never log, unlink or read the clock.
"""

from collections.abc import Collection, Iterable

from proxy.core.cuts import SLACK_TOKENS
from proxy.core.model import Candidate, Checkpoint, CheckpointId, CheckpointKind, Rule, RuleKind
from proxy.core.restore import highest_point

SMALL_LOSS_TOKENS = 256
"""So many tokens of an older state may be lost with it: cheaper to evaluate again than to keep."""


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
    return [
        c.checkpoint
        for c in older
        if c.checkpoint.id != newer.id and _may_go(newer, c.checkpoint) and _repeats(rule, newer, c)
    ]


def _may_go(newer: Checkpoint, older: Checkpoint) -> bool:
    match older.kind:
        case CheckpointKind.HEADER:
            return False
        case CheckpointKind.TURN_START:
            return newer.kind is CheckpointKind.TURN_START
        case CheckpointKind.CONVERSATION:
            return True


def _repeats(rule: Rule, newer: Checkpoint, found: Candidate) -> bool:
    older, n_common = found.checkpoint, found.n_common
    match rule.kind:
        case RuleKind.ANY_PREFIX:
            # What is lost is the generated answer, if the client sent another one back.
            n_lost = older.n_tokens - n_common
            return newer.has_every_position and n_lost <= SMALL_LOSS_TOKENS
        case RuleKind.RESTORE_POINTS:
            return bool(older.restore_points) and all(
                point <= n_common
                and highest_point(newer.restore_points, point) >= point - SLACK_TOKENS
                for point in older.restore_points
            )
        case RuleKind.END_ONLY:
            # The state at a turn's start serves every later request of that turn that diverges.
            is_whole = n_common == older.n_tokens < newer.n_tokens
            return is_whole and older.kind is CheckpointKind.CONVERSATION
        case RuleKind.NOTHING:
            return False
