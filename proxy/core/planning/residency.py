"""Which model of a host is loaded next, and which has to go for it.

Requests for models that are loaded go on at once, but not past an earlier one that waits for a model to
go: else a busy model would keep the others out for ever. Pure: who waits, what is loaded and in use come
in; a step goes out.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


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
