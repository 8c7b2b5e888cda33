"""The llama-servers any of which may serve a request: those with the same model."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

from proxy.driver.fleet.backend import Backend
from proxy.driver.serving.arrival_order import ArrivalOrder
from proxy.driver.session import Session
from proxy.driver.slots.leases import LeaseDesk
from proxy.upstream.target import Presence


class Group:
    """Backends of one model, and the order in which requests come to them after a wait."""

    def __init__(
        self,
        backends: Iterable[Backend],
        presence: Presence | None = None,
        look: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """*presence* and *look* are those of a model at its host."""
        self.backends = list(backends)
        self.presence = presence or Presence()
        self._look = look
        self.order = ArrivalOrder()
        self.on_way: Counter[Backend] = Counter()
        """How many requests were sent to each, and are not at its desk yet."""

    @property
    def sessions(self) -> list[Session]:
        """Those of the llama-servers that are attached."""
        return [session for b in self.backends if (session := b.lifecycle.current)]

    def share(self, desk: LeaseDesk) -> None:
        """Let who waits longest elsewhere know of every slot of *desk* that comes free."""
        desk.on_idle = self._offer

    def _offer(self, idle: LeaseDesk) -> None:
        desks = [session.attachment.desk for session in self.sessions]
        fullest = max(desks, key=lambda desk: desk.n_waiting)
        if fullest is not idle:
            fullest.let_go()

    async def first_to_ask(self, since: float) -> tuple[Backend, Session | None]:
        """Return an attached llama-server; if there is none, wait a while for the first.

        The session is None if one is there, but not attached. Raises UpstreamAbsent if all are away for too
        long; *since* is when the request began to wait.
        """
        present = [b for b in self.backends if b.lifecycle.current]
        if present or len(self.backends) == 1:
            backend = min(present or self.backends, key=lambda b: b.lifecycle.n_waiting)
            return backend, await backend.lifecycle.session(since)
        asked = {asyncio.ensure_future(b.lifecycle.session(since)): b for b in self.backends}
        try:
            done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            first = next((task for task in done if not task.exception()), done.pop())
            return asked[first], first.result()
        finally:
            for task in asked:
                task.cancel()

    async def is_lost(self) -> bool:
        """Look again, after something went wrong; return whether the model is not loaded any more."""
        if self._look is not None:
            await self._look()
        return not self.presence.is_there
