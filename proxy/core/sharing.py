"""Which states are sent to the shared store, fetched from it, and deleted there.

Owns: the comparison of a transfer with an evaluation, in seconds, and the order by value per byte. Pure:
must never know the kind of the store, or how a transfer is made.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from proxy.core.model import Candidate, Checkpoint, Prompt
from proxy.core.plan import Situation, Start, starts
from proxy.core.rates import Rates, Transfer, UnitCost
from proxy.core.slots import shared_tokens

HALF_LIFE_SECONDS = 6 * 3600.0
"""A state in the shared store counts half if it was not read for this time."""

UNMEASURED = Transfer(UnitCost(0.05), UnitCost(1e-9))
"""The assumed cost of a link before its first transfer: 1 GB/s."""

ENTERING = Transfer(UnitCost(0.005, 1.0), UnitCost(1e-9))
"""The assumed cost of syncing and entering a state that has arrived, until it was measured."""

_TRIED_SHARE, _MOST_SHARE = 0.1, 1.2
"""A transfer may take the first share of the seconds that evaluating takes before it shows how fast it is,
and never more than the second."""

_LEAST_AT_ONCE, _MOST_AT_ONCE, _STEP_SECONDS = 64 << 10, 4 << 20, 0.02
"""The sizes of the pieces of a transfer, and how long a link takes for one."""


@dataclass(frozen=True, slots=True)
class SharedLimits:
    """What may be put into the shared store, and how fast; 0 is no limit.

    `capacity` is for all states there, whoever has put them there.
    """

    upload_bytes_per_day: int = 0
    upload_bytes_per_second: int = 0
    capacity: int = 0


@dataclass(frozen=True, slots=True)
class Fetch:
    """The best state to fetch for a prompt.

    The transfer is expected to take `seconds`. If it took `limit_seconds`, the request would be as slow as
    without the fetch.
    """

    candidate: Candidate
    seconds: float
    limit_seconds: float

    @property
    def is_worth_it(self) -> bool:
        return self.seconds < self.limit_seconds


def seconds_without(prompt: Prompt, now: Situation) -> tuple[int, float]:
    """Return how many tokens a prompt reuses without a fetch, and how many seconds it then takes."""
    best = min(_starts(prompt, now), key=lambda start: start.total_seconds)
    return best.n_reused, best.total_seconds


def best_fetch(
    prompt: Prompt, now: Situation, remote: Sequence[Candidate], *steps: Transfer
) -> Fetch | None:
    """Return the *remote* state that makes a prompt quickest; None if none has more reusable tokens.

    A fetch takes the *steps*: a link, and entering. Slots in use count only if no slot is free: the request
    then waits for one of them.
    """
    if prompt.n_tokens >= now.n_ctx:
        return None
    n_without, without_seconds = seconds_without(prompt, now)
    there = replace(now, candidates=tuple(replace(c, is_warm=True) for c in remote))
    found = list[Fetch]()
    for start in _starts(prompt, there):
        if (state := start.restored) and start.n_reused > n_without:
            seconds = sum(step.seconds(state.checkpoint.size_bytes) for step in steps)
            found.append(Fetch(state, seconds, without_seconds - start.total_seconds))
    return max(found, key=lambda fetch: fetch.limit_seconds - fetch.seconds, default=None)


def _starts(prompt: Prompt, now: Situation) -> Iterator[Start]:
    for slot in [slot for slot in now.slots if not slot.is_leased] or now.slots:
        n_shared = shared_tokens(slot.content, prompt.tokens, prompt.namespace)
        yield from starts(prompt, now, slot, n_shared)


def seconds_for(n_bytes: int, size_bytes: int, limit_seconds: float, link: Transfer) -> float:
    """Return after how many seconds a transfer that has not brought *n_bytes* yet is given up.

    The time waited is lost either way. So a late transfer goes on while the rest, at the same rate, takes
    less time than evaluating everything.
    """
    n_left = size_bytes - n_bytes
    is_most_there = n_bytes >= _MOST_SHARE * n_left
    share = _MOST_SHARE if is_most_there else max(_TRIED_SHARE, n_bytes / n_left)
    return max(UNMEASURED.call.seconds, link.call.seconds) + share * limit_seconds


def bytes_at_once(size_bytes: int, link: Transfer) -> int:
    """Return the size of the pieces in which a state is received; each costs time, and tells the rate."""
    in_step = int(_STEP_SECONDS * link.bytes_per_second)
    return min(_MOST_AT_ONCE, max(_LEAST_AT_ONCE, min(in_step, size_bytes >> 4)))


def after_transfer(link: Transfer, call_seconds: float, n_bytes: int, seconds: float) -> Transfer:
    """Return the cost of a link that answered after *call_seconds*, and sent *n_bytes* in *seconds*.

    A short transfer says little about the rate.
    """
    weight = seconds / (seconds + _STEP_SECONDS)
    byte = UnitCost(seconds / n_bytes, weight)
    if link.byte.n_seen:
        byte = link.byte.moved(byte.seconds / link.byte.seconds, 1.0, weight)
    return Transfer(link.call.moved(call_seconds / link.call.seconds, 1.0, 1.0), byte)


def spared_per_byte(checkpoint: Checkpoint, rates: Rates, link: Transfer) -> float:
    """Return the seconds that a fetch of a state spares another machine, for each byte; 0 if none."""
    seconds = rates.evaluation_seconds(0, checkpoint.n_tokens) - link.seconds(checkpoint.size_bytes)
    seconds -= rates.restore_seconds(checkpoint.size_bytes, is_warm=True)
    return max(0.0, seconds / max(1, checkpoint.size_bytes))


def choose_deletions(
    own: Iterable[tuple[Checkpoint, float]], n_bytes: int, now: float
) -> list[Checkpoint]:
    """Return which of the states that are its *own* to delete go for *n_bytes* more room there.

    Each state comes with the time of its last read. States with the fewest tokens per byte are deleted
    first: the speeds of other machines are not known, so every token has the same worth.
    """

    def value(each: tuple[Checkpoint, float]) -> float:
        checkpoint, read_at = each
        age_seconds = max(0.0, now - read_at)
        per_byte = checkpoint.n_tokens / max(1, checkpoint.size_bytes)
        return per_byte * math.exp2(-age_seconds / HALF_LIFE_SECONDS)

    chosen = list[Checkpoint]()
    for checkpoint, _ in sorted(own, key=value):
        if n_bytes <= 0:
            break
        n_bytes -= checkpoint.size_bytes
        chosen.append(checkpoint)
    return chosen
