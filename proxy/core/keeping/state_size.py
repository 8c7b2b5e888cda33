"""How large a state will be, before it is saved.

Owns: the upper bound that room is made for. Pure; must never know what a state consists of.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from proxy.core.slots import MAX_CONTEXT_CHECKPOINTS, Content, Known, Unknown


@dataclass(frozen=True, slots=True)
class StateSize:
    """The size of one state that was saved, with its context checkpoints, draft and all."""

    n_tokens: int
    n_points: int
    size_bytes: int


def expected_bytes(seen: Iterable[StateSize], n_tokens: int, n_points: int) -> int | None:
    """Return a size that a state of *n_tokens* with at most *n_points* will not exceed.

    None if nothing like it was *seen*. A state is a fixed part, so much a token and so much a context
    checkpoint, and none of these is larger than the fixed part they are copied from (the recurrent
    state, the window). So a state seen bounds every smaller one by its size and every larger one in
    proportion; the lowest of these bounds is taken.
    """
    sizes = [s for s in seen if s.n_tokens > 0]
    has_points = any(s.n_points for s in sizes)  # full attention makes none
    return min((_bound(s, n_tokens, n_points if has_points else 0) for s in sizes), default=None)


def _bound(seen: StateSize, n_tokens: int, n_points: int) -> int:
    times_longer = n_tokens / seen.n_tokens
    times_more_points = (n_points + 1) / (seen.n_points + 1)
    return int(seen.size_bytes * max(1.0, times_longer, times_more_points)) + 1


def extent_of(content: Content) -> tuple[int, int] | None:
    """Return how many tokens and context checkpoints a slot's state has at most; None if unknown."""
    match content:
        case Known():
            return content.n_tokens, content.n_points_at_most
        case Unknown(likely=likely) if likely is not None:
            return len(likely), MAX_CONTEXT_CHECKPOINTS
        case _:
            return None
