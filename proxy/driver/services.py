"""What the parts of the driver share, for as long as the proxy runs."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from proxy.driver.degradations import Degradations, DegradationsHere
from proxy.driver.faults import Faults
from proxy.driver.reporting.journal import Journal
from proxy.driver.reporting.report import Report
from proxy.driver.served import Served
from proxy.driver.slots.lease import Lease
from proxy.driver.tasks import Tasks
from proxy.errors import StoreFault
from proxy.metrics import Metrics
from proxy.store.store import CheckpointStore
from proxy.upstream.llama_server import LlamaServer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shared:
    """The store (None if it could not be opened), and where things are counted, for all llama-servers."""

    opened_store: CheckpointStore | None
    metrics: Metrics
    faults: Faults
    everywhere: Degradations
    report: Report
    journal: Journal
    tasks: Tasks
    served: Served

    def of(self, upstream: LlamaServer, where: str) -> "Services":
        """Return what the parts that serve one llama-server share; *where* tells it from others."""
        shared = {field.name: getattr(self, field.name) for field in fields(Shared)}
        return Services(**shared, upstream=upstream, degradations=self.everywhere.at(where))

    async def finish(self, lease: Lease[Any], action: Coroutine[Any, Any, T]) -> T:
        """Await a slot action that must not be cut short: cancelled, it takes the lease along."""
        task = self.tasks.start(action)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._note_failure)
            if not task.done():
                lease.hand_over(task)
            raise

    def _note_failure(self, task: "asyncio.Task[Any]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.faults.record("unattended action", error)

    @property
    def store(self) -> CheckpointStore:
        """The store; raises StoreFault if there is none."""
        if self.opened_store is None:
            raise StoreFault("the store is not open")
        return self.opened_store


@dataclass(frozen=True, slots=True)
class Services(Shared):
    """What belongs to one llama-server besides."""

    upstream: LlamaServer
    degradations: DegradationsHere

    @property
    def where(self) -> str:
        """Which llama-server this is, empty if there is only one."""
        return self.degradations.where
