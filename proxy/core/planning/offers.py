"""Which of several llama-servers with the same model serves a request.

Owns: the choice between what each would make of it. Pure: offers come in, the place of one goes out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from proxy.core.keeping.write_back import STEADY_SECONDS
from proxy.core.planning.plan import STEADY_TOKENS


@dataclass(frozen=True, slots=True)
class Offer:
    """What one llama-server can do for a request at once; `seconds` is None if it would have to wait.

    `seconds` are those of its cheapest plan: to restore and to evaluate, and what it takes from others.
    It finds `n_reused` tokens. `n_busy` of the `n_slots` are in use, and `n_waiting` requests wait.
    """

    seconds: float | None
    n_reused: int
    n_busy: int
    n_waiting: int
    n_slots: int

    def beside(self, n_others: int) -> "Offer":
        """Return what is left of it when so many others come first."""
        has_room = self.n_busy + n_others < self.n_slots
        return replace(
            self,
            seconds=self.seconds if has_room else None,
            n_waiting=self.n_waiting + n_others,
        )

    @property
    def load(self) -> float:
        return (self.n_busy + self.n_waiting) / max(1, self.n_slots)


def best_offer(offers: Sequence[Offer]) -> int:
    """Return the place of the offer to take: the quickest, of those alike the least busy one's.

    Where all would have to wait, the least busy one's, of those alike the one that holds most of the
    prompt.
    """
    able = [place for place, offer in enumerate(offers) if offer.seconds is not None]
    if not able:
        return min(range(len(offers)), key=lambda i: (offers[i].load, -offers[i].n_reused))
    quickest = min(offers[place].seconds or 0.0 for place in able)
    alike = [place for place in able if (offers[place].seconds or 0.0) <= quickest + STEADY_SECONDS]
    most = max(offers[place].n_reused for place in alike)
    hottest = [place for place in alike if offers[place].n_reused > most - STEADY_TOKENS]
    return min(hottest, key=lambda place: offers[place].load)
