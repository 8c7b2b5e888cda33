"""Who serves a request: which llama-server, which model of a host, which slot llama-server will choose."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from proxy.core.model import Prompt, SlotId
from proxy.core.plan import STEADY_TOKENS, Situation, plan_request, promised_tokens
from proxy.core.saving import STEADY_SECONDS, state_bytes
from proxy.core.slots import Empty, Known, Slot, Unknown, shared_tokens
from proxy.core.tokens import TokenIds, common_prefix_length

# Which model of a host is loaded next, and which has to go for it.
#
# Requests for models that are loaded go on at once, but not past an earlier one that waits for a model to
# go: else a busy model would keep the others out for ever. Pure: who waits, what is loaded and in use
# come in; a step goes out.


@dataclass(frozen=True, slots=True)
class Residents:
    """The models of a host as they are: which are `loaded`, how many requests use each.

    `used_at` is when each was last asked for, of any clock. `n_at_most` may be loaded at once; where that
    is not known, `together` holds the pairs that have been seen loaded at once.
    """

    loaded: frozenset[str]
    n_users: Mapping[str, int]
    used_at: Mapping[str, float]
    n_at_most: int | None = None
    together: frozenset[frozenset[str]] = frozenset()

    def leaving_for(self, model: str) -> frozenset[str]:
        """Return the models that have to go before *model* can be loaded.

        Of those that may be chosen the idle ones go first, of these the one unused for longest.
        """
        others = self.loaded - {model}
        if self.n_at_most is None:
            return frozenset(o for o in others if frozenset((o, model)) not in self.together)
        n_too_many = max(0, len(others) + 1 - self.n_at_most)
        by_use = sorted(others, key=lambda o: (self.n_users.get(o, 0) > 0, self.used_at.get(o, 0)))
        return frozenset(by_use[:n_too_many])

    def in_use(self, models: Collection[str]) -> bool:
        return any(self.n_users.get(model, 0) for model in models)


@dataclass(frozen=True, slots=True)
class Step:
    """Which of those who wait go on now, by their places, and what is to be loaded for one that cannot."""

    admitted: tuple[int, ...] = ()
    load: str | None = None
    leaving: frozenset[str] = frozenset()


def next_step(
    waiting: Sequence[str], residents: Residents, *, kept_out: Collection[str] = ()
) -> Step:
    """Return what can be done for the requests that wait for these models, in arrival order.

    *kept_out* are the models that are just being loaded or leave for one that is: nobody is admitted to
    them, and nothing else is loaded meanwhile.
    """
    admitted: list[int] = []
    closed = set(kept_out)
    load: str | None = None
    leaving: frozenset[str] = frozenset()
    for place, model in enumerate(waiting):
        if model in closed:
            continue
        if model in residents.loaded:
            admitted.append(place)
            continue
        closed.add(model)
        if kept_out or load is not None:
            continue
        going = residents.leaving_for(model)
        closed |= going
        users = residents.in_use(going) or any(waiting[i] in going for i in admitted)
        if not users:
            load, leaving = model, going
    return Step(tuple(admitted), load, leaving)


# Which of several llama-servers with the same model serves a request.
#
# Owns: the choice between what each would make of it. Pure: offers come in, the place of one goes out.


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
    n_busy = sum(slot.is_leased and not slot.is_closing for slot in now.slots)
    n_reused, seconds = _expectation(prompt, now, may_start=may_start)
    return Offer(seconds, n_reused, n_busy, n_waiting, len(now.slots))


def _expectation(prompt: Prompt, now: Situation, *, may_start: bool) -> tuple[int, float | None]:
    """Return how many tokens a prompt finds and how long it takes; None if it must wait for others."""
    plan = plan_request(prompt, now) if may_start else None
    if plan is not None:
        return plan.start.n_reused, plan.option.total_seconds
    closing = [(promised_tokens(prompt, now, s), s) for s in now.slots if s.is_closing]
    n_promised, slot = max(closing, key=lambda each: each[0], default=(0, None))
    if slot is None or not n_promised:
        shared = (shared_tokens(s.content, prompt.tokens, prompt.namespace) for s in now.slots)
        return max(shared, default=0), None
    seconds = now.rates.save_seconds(state_bytes(now.sizes, slot.content))
    return n_promised, seconds + now.rates.evaluation_seconds(n_promised, prompt.n_tokens)


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


# Which slot llama-server will choose for a request that cannot name one.
#
# Owns: llama-server's rule (server-context.cpp, get_available_slot): among the idle slots the one whose
# tokens share the longest prefix with the prompt, the lowest id on ties, if that prefix is more than a
# tenth of the prompt; else the one used longest ago. Pure.


MIN_SIMILARITY = 0.1
"""llama-server's default of --slot-prompt-similarity."""


def shared_at_most(slot: Slot, tokens: TokenIds) -> int:
    """Return how many leading tokens of a prompt a slot may hold when it is idle next.

    A leased one may hold its request's prompt then, and whatever is generated behind it. Not yet if that
    request waits, ready to be sent, as ours does, and no more if it has had its answer.
    """
    if not slot.is_leased or slot.is_ready or slot.is_closing:
        return _held_at_most(slot, tokens)
    if slot.destined is None:
        return len(tokens)
    n_common = common_prefix_length(slot.destined, tokens)
    n_destined = n_common if n_common < len(slot.destined) else len(tokens)
    if slot.is_running or (isinstance(slot.content, Unknown) and slot.content.likely is not None):
        return n_destined  # it holds nothing any more but what it is destined for
    return max(n_destined, _held_at_most(slot, tokens))


def _held_at_most(slot: Slot, tokens: TokenIds) -> int:
    match slot.content:
        case Empty():
            return 0
        case Known() as content:
            n_held = common_prefix_length(content.tokens, tokens)
            is_whole = n_held == len(content.tokens)
            return min(n_held + content.n_tail, len(tokens)) if is_whole else n_held
        case Unknown():
            return len(tokens)


def rivals(target: Slot, slots: Iterable[Slot], tokens: TokenIds) -> list[SlotId]:
    """Return the other slots that llama-server may choose for a prompt instead of *target*."""
    n_target = shared_tokens(target.content, tokens)
    found = []
    for slot in slots:
        n_rival = shared_at_most(slot, tokens) if slot.id != target.id else -1
        if n_rival > n_target or (n_rival == n_target and slot.id < target.id):
            found.append(slot.id)
    return found


def is_similar_enough(target: Slot, tokens: TokenIds) -> bool:
    """Return whether llama-server chooses by similarity at all."""
    return shared_tokens(target.content, tokens) > MIN_SIMILARITY * len(tokens)
