"""The best order that turns and pauses can tell: how often and how soon conversations go on is learned.

For each number of turns and each pause, the index is the greatest chance per second of keeping a file that
its conversation goes on, over all times to keep it (Gittins). It is learned from the first half of the
trace that it is judged on, so hardly any order by turns and pauses saves more of single conversations.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator
from itertools import pairwise
from math import exp, inf

from proxy.core.model import CheckpointId
from tests.bench.eviction.policies import Policy
from tests.bench.eviction.shelf import Shelf
from tests.bench.eviction.trace import Asked, earlier_of

_PAUSES = (
    0,
    10,
    20,
    30,
    40,
    60,
    90,
    120,
    150,
    180,
    240,
    300,
    420,
    600,
    900,
    1200,
    1800,
    2700,
    5400,
)
"""Seconds; between two of them a conversation goes on as likely at any moment."""
_MOST_TURNS = 6


class Learned(Policy):
    """The lowest index per byte goes; every file is compared."""

    def __init__(self, shelf: Shelf, budget_bytes: int, trace: list[Asked]) -> None:
        super().__init__(shelf, budget_bytes, trace)
        rates = rates_of(trace[: len(trace) // 2])
        self._index = {n: [_index(rates[n], p) for p in _PAUSES] for n in range(1, _MOST_TURNS + 1)}

    def order(self, now: float, spared: Collection[CheckpointId]) -> Iterator[CheckpointId]:
        def worth(checkpoint_id: CheckpointId) -> tuple[float, float]:
            file = self.shelf.files[checkpoint_id]
            used_at, n_turns = file.checkpoint.last_used_at, min(file.asked.n_turns, _MOST_TURNS)
            index = self._index[n_turns][bisect_right(_PAUSES, now - used_at) - 1]
            return index * file.checkpoint.n_tokens / file.checkpoint.size_bytes, used_at

        return iter(sorted((i for i in self.shelf.files if i not in spared), key=worth))


def rates_of(trace: list[Asked]) -> dict[int, list[float]]:
    """Return how often a second conversations go on, by their turns and by pauses between _PAUSES."""
    gone_on, waited = (defaultdict[tuple[int, int], float](float) for _ in range(2))
    waiting: dict[int, Asked] = {}

    def note(asked: Asked, pause: float, *, goes_on: bool) -> None:
        n_turns = min(asked.n_turns, _MOST_TURNS)
        for place, (begin, end) in enumerate(pairwise((*_PAUSES, inf))):
            waited[n_turns, place] += max(0.0, min(pause, end) - begin)
            gone_on[n_turns, place] += goes_on and begin <= pause < end

    for number, (asked, before) in enumerate(zip(trace, earlier_of(trace), strict=True)):
        if before is not None and (earlier := waiting.pop(before, None)):
            note(earlier, asked.at - earlier.at, goes_on=True)
        waiting[number] = asked
    for asked in waiting.values():
        note(asked, trace[-1].at - asked.at, goes_on=False)
    places = range(len(_PAUSES))
    return {
        n: [gone_on[n, place] / (waited[n, place] or inf) for place in places]
        for n in range(1, _MOST_TURNS + 1)
    }


def _index(rates: list[float], pause: float) -> float:
    """Return the greatest chance per second of keeping, after a pause, over all times to keep."""
    best = seconds = chance = 0.0
    still = 1.0
    for rate, (begin, end) in zip(rates, pairwise(_PAUSES), strict=False):
        if begin < pause:
            continue
        here = 1 - exp(-rate * (end - begin))
        seconds += still * (here / rate if rate else end - begin)
        chance += still * here
        still *= 1 - here
        best = max(best, chance / seconds)
    return best
