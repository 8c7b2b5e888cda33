"""The context checkpoints of a slot, each by the tokens before it: which ones llama-server makes and drops.

Owns: llama-server's rules for the list of context checkpoints of a slot (server-context.cpp,
create_checkpoint). Must never know what the tokens mean.
"""

from collections.abc import Sequence

from proxy.core.cuts import CONTEXT_CHECKPOINT_MARGIN, is_near
from proxy.core.tokens import FIRST_BLOCK_TOKENS

MAX_CONTEXT_CHECKPOINTS = 32
"""llama-server's default of --ctx-checkpoints: the most that a slot keeps. Of a file with more, the newest
are loaded (server-context.cpp, load_slot_checkpoints)."""

MIN_STEP_TOKENS = 8192
"""llama-server's default of --checkpoint-min-step."""

UBATCH_TOKENS = 512
"""llama-server's default --ubatch-size, a physical batch: on a GPU fewer tokens take nearly as long. It
makes a context checkpoint this many tokens before the one near a prompt's end."""

POINTS_PER_REQUEST = 3
"""llama-server makes at most this many context checkpoints for one request with few new tokens."""


def points_made(n_from: int, n_to: int, *, has_messages: bool) -> tuple[int, ...]:
    """Return the points that an evaluation of the tokens from *n_from* to *n_to* may make, ascending.

    The last one, near the end, is made for certain if there are so many tokens. Another one lies a physical
    batch before that, or where the evaluation begins, whichever is later. If the prompt *has_messages*,
    llama-server makes one where the newest user message begins, and one at each user message that begins
    over MIN_STEP_TOKENS behind the last point; nobody tells where, so they count as many as they can be.
    """
    newest = n_to - CONTEXT_CHECKPOINT_MARGIN
    n_before = max(n_from, newest - UBATCH_TOKENS)
    earlier = range(n_from + MIN_STEP_TOKENS + 1, n_before, MIN_STEP_TOKENS + 1)
    made = (*earlier, n_before, n_before + 2, newest) if has_messages else (n_before, newest)
    return tuple(n for n in made if 0 < n <= newest)


def points_after(points: Sequence[int], made: Sequence[int], n_kept: int) -> tuple[int, ...]:
    """Return the points of a slot, ascending, after one request has *made* more of them.

    Once the slot has all but one of the *n_kept* that it may have, llama-server drops points that lie
    within MIN_STEP_TOKENS behind the one before, the lowest first, but none of this request. The lowest of
    all goes only if the slot is full all the same.
    """
    if not n_kept:
        return ()
    kept = list(points)
    for point in made:
        at, before = 0, None
        while len(kept) >= n_kept - 1 and at < len(kept):
            if before is not None and kept[at] <= before + MIN_STEP_TOKENS and kept[at] not in made:
                del kept[at]
            else:
                at, before = at + 1, kept[at]
        kept = kept[max(0, len(kept) - n_kept + 1) :]
        if (
            not kept or point > kept[-1] + 1
        ):  # else it is made again: predictions are a token too low
            kept.append(point)
    return tuple(kept)


def stops_with_room(n_kept: int) -> int:
    """Return how many stops leave the points of the header and of the request itself in the slot.

    Each stop makes two points; the header has two, and a user message one more. Other stops, as at the
    surroundings, take the header's second place: new sessions then evaluate a batch of the header again.
    """
    return max(0, n_kept - 2 * POINTS_PER_REQUEST) // 2


def kept_after_save(n_kept: int, points: Sequence[int], saved: tuple[int, ...]) -> int:
    """Return how many points a slot keeps, after a save told which of the predicted *points* exist.

    If an old one is gone, llama-server had no room for it. A file with few points tells nothing:
    llama-server makes none for a short prompt, and a prediction can be wrong by a few tokens. If there are
    more than were believed in, nobody has told the number, and it is rather llama-server's default.
    """
    old = [n for n in points[:2] if FIRST_BLOCK_TOKENS <= n < max(saved, default=0)]
    if len(saved) >= POINTS_PER_REQUEST:
        if not all(is_near(saved, n + CONTEXT_CHECKPOINT_MARGIN) for n in old):
            return len(saved) + 1
    return MAX_CONTEXT_CHECKPOINTS if len(saved) > n_kept else n_kept
