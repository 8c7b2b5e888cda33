"""Where a conversation that does not fit the context is cut: in large steps, so that it stays cut there.

Owns: the places where it may be cut. They are told by the messages before them alone, so that a longer
conversation has the same ones, after a restart as well. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import accumulate

_RESERVE_SHARE = 1 / 8
"""So much of the context is kept free for the answer, whatever the client allows it."""
_KEPT_SHARE = 0.6
"""About so much of the context is left when a conversation is cut: it is not cut again soon."""
_MOST_RENDERED = 2
"""Templates make no more of a message than so many times its own tokens."""
_TURN_AHEAD_SHARE = 1 / 2
"""If no turn begins within so much of a step, the conversation is cut in the middle of one."""


class Begins(Enum):
    """What a message begins."""

    TURN = auto()
    """The user says something."""
    STEP = auto()
    """The model answers; results of its calls follow."""
    NOTHING = auto()


@dataclass(frozen=True, slots=True)
class Part:
    """One message of a conversation, and how many tokens it has by itself."""

    begins: Begins
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Place:
    """What is kept: the messages from *first* on, and the user's message of the turn that is cut in two."""

    first: int
    asked: int | None
    n_left_out: int


def room_for_prompt(n_ctx: int, n_wanted: int | None) -> int:
    """Return how long a prompt may be, so that an answer of *n_wanted* tokens fits behind it."""
    most = int(n_ctx * _RESERVE_SHARE)
    return n_ctx - (most if n_wanted is None or n_wanted < 0 else min(n_wanted, most))


def step_of(n_ctx: int, n_room: int) -> int:
    """Return how many tokens are left out at once."""
    return max(1, n_room - int(n_ctx * _KEPT_SHARE))


def places_to_cut(parts: Sequence[Part], n_step: int) -> list[Place]:
    """Return where a conversation may be cut: the i-th leaves out at least i + 1 steps.

    That is where the next turn begins; where the model answers next if no turn begins soon. The newest
    message of the user is always kept, and calls with their results.
    """
    before = [0, *accumulate(part.n_tokens for part in parts)]
    places: list[Place] = []
    while (place := _place(parts, before, (len(places) + 1) * n_step, n_step)) is not None:
        places.append(place)
    return places


def _place(parts: Sequence[Part], before: Sequence[int], n_least: int, n_step: int) -> Place | None:
    n_ahead = n_least + int(n_step * _TURN_AHEAD_SHARE)
    behind = [i for i in range(len(parts)) if before[i] >= n_least]
    turns = [i for i in behind if parts[i].begins is Begins.TURN and before[i] < n_ahead]
    steps = [i for i in behind if parts[i].begins is not Begins.NOTHING]
    if not steps:
        return None
    first = turns[0] if turns else steps[0]
    asked = _asked(parts, first)
    n_asked = parts[asked].n_tokens if asked is not None else 0
    return Place(first, asked, before[first] - n_asked)


def _asked(parts: Sequence[Part], first: int) -> int | None:
    """Return the user's message of a turn that is cut in two, None if it is kept anyway."""
    if parts[first].begins is Begins.TURN:
        return None
    turns = (i for i in range(first - 1, -1, -1) if parts[i].begins is Begins.TURN)
    return next(turns, None)


def first_to_try(places: Sequence[Place], n_over: int, n_at_least: int) -> int:
    """Return which place to try first for a prompt that is *n_over* tokens too long.

    It is the first that may be enough: only a rendering tells. The conversation stays cut as far as it
    was, *n_at_least* places in; turns that are over may take fewer tokens than they did.
    """
    enough = (i for i, p in enumerate(places) if p.n_left_out * _MOST_RENDERED >= n_over)
    last = max(0, len(places) - 1)
    return max(next(enough, last), min(n_at_least, last))
