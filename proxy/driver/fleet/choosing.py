"""Which llama-server of a group serves a request that was read: the best by what each would make of it."""

from collections import Counter
from dataclasses import dataclass, replace

from proxy.core.planning.offers import Offer, best_offer
from proxy.driver.fleet.backend import Backend
from proxy.driver.fleet.group import Group
from proxy.driver.serving.cache import ReadRequest
from proxy.driver.serving.planning import Planning
from proxy.driver.session import Session


class OnWay:
    """A request on its way to a desk, where others cannot see it yet; arriving again is harmless."""

    def __init__(self, on_way: Counter[Backend], backend: Backend) -> None:
        self._on_way = on_way
        self._backend: Backend | None = backend
        on_way[backend] += 1

    def arrive(self) -> None:
        if self._backend is not None:
            self._on_way[self._backend] -= 1
            self._backend = None


@dataclass(frozen=True, slots=True)
class Chosen:
    """The llama-server that serves a request, and the request as it serves it."""

    backend: Backend
    session: Session
    read: ReadRequest
    on_way: OnWay


async def choose(group: Group, reader: Backend, session: Session, read: ReadRequest) -> Chosen:
    """Return the best llama-server of a group for a request that the *reader* has read.

    Raises what `Cache.take_over` does.
    """
    present = [(b, s) for b in group.backends if (s := b.lifecycle.current) is not None]
    if len(present) <= 1:
        return Chosen(reader, session, read, OnWay(group.on_way, reader))
    offers = [_offer(b, s, read).beside(group.on_way[b]) for b, s in present]
    backend, chosen = present[best_offer(offers)]
    on_way = OnWay(group.on_way, backend)
    if chosen is session:
        return Chosen(backend, chosen, read, on_way)
    try:
        taken = await backend.cache.take_over(chosen, read)
    except BaseException:
        on_way.arrive()
        raise
    return Chosen(backend, chosen, taken, on_way)


def _offer(backend: Backend, session: Session, read: ReadRequest) -> Offer:
    """Return what a llama-server can do for a request; one that was not read goes by who is busy."""
    attachment, prompt = session.attachment, read.prompt
    if prompt is not None:
        namespace = attachment.tenant_namespace(read.request.tenant)
        return Planning(backend.services, session, replace(prompt, namespace=namespace)).offer()
    n_busy = sum(slot.is_leased for slot in attachment.desk.table)
    return Offer(0.0, 0, n_busy, attachment.desk.n_waiting, len(attachment.desk.table))
