"""Which of several llama-servers with the same model serves a request.

Owns: the choice between what each would make of it. Pure: offers come in, the place of one goes out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from proxy.core.keeping.write_back import STEADY_SECONDS
from proxy.core.model import Prompt
from proxy.core.planning.plan import STEADY_TOKENS, Situation, n_shared_with, plan_request
from proxy.core.slots import Slot, promised_tokens


@dataclass(frozen=True, slots=True)
class Offer:
    """What one llama-server can do for a request; `seconds` is None if it would have to wait for another.

    `seconds` are those of its cheapest plan: to restore and to evaluate, and what it takes from others;
    or of waiting for a slot that is just being saved. It finds `n_reused` tokens. `n_busy` of the `n_slots`
    are in use, and `n_waiting` requests wait.
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


def make_offer(prompt: Prompt, now: Situation, n_waiting: int, *, may_start: bool = True) -> Offer:
    """Return what a llama-server can do for a prompt; it cannot begin at once unless it *may_start*."""
    plan = plan_request(prompt, now) if may_start else None
    n_busy = sum(slot.is_leased and not slot.is_closing for slot in now.slots)
    if plan is not None:
        n_reused, seconds = plan.start.n_reused, plan.option.total_seconds
        return Offer(seconds, n_reused, n_busy, n_waiting, len(now.slots))
    n_held = max((n_shared_with(prompt, slot) for slot in now.slots), default=0)
    promised = max((_promise(prompt, now, s) for s in now.slots if s.is_closing), default=None)
    if promised is None or not promised[0]:
        return Offer(None, n_held, n_busy, n_waiting, len(now.slots))
    return Offer(promised[1], promised[0], n_busy, n_waiting, len(now.slots))


def _promise(prompt: Prompt, now: Situation, slot: Slot) -> tuple[int, float]:
    """Return how much a slot that is being saved will spare a prompt, and what is left to do then."""
    n_promised = promised_tokens(now.rule, slot, prompt.namespace, prompt.tokens)
    save_seconds = now.rates.save_seconds(now.occupant(slot).size_bytes)
    return n_promised, save_seconds + now.rates.evaluation_seconds(n_promised, prompt.n_tokens)


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
