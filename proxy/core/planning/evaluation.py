"""What a slot holds once a prompt was evaluated in it.

Owns: the prediction of a content, context checkpoints and places included. Pure; a save tells the truth.
"""

from proxy.core.model import NO_CUTS, Cuts
from proxy.core.prefix import Namespace, TokenIds, common_prefix_length
from proxy.core.slots import (
    MAX_CONTEXT_CHECKPOINTS,
    Content,
    Empty,
    Known,
    Unknown,
    restored_tokens,
)

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
) -> Known:
    """Return what a slot holds once *tokens* were evaluated in it and *n_generated* sampled.

    The last sampled token is never decoded. Context checkpoints behind the point where the prompt left
    the old content are gone; one is new, shortly before the prompt's end. Only the newest *n_believed*
    are counted on.
    """
    n_kept = 0
    old = before if isinstance(before, Known) and before.namespace == namespace else None
    if old:
        n_kept = common_prefix_length(old.tokens, tokens)
    points = [p for p in old.restore_points if p <= n_kept] if old else []
    newest = len(tokens) - CONTEXT_CHECKPOINT_MARGIN
    if newest > max(points, default=0):
        points.append(newest)
    n_restored = restored_tokens(before)
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
        n_restored=_kept(n_restored, n_kept) if old else min(n_restored, len(tokens)),
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


def _kept(n_cut: int, n_kept: int) -> int:
    return n_cut if n_cut <= n_kept else 0
