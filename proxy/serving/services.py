"""Services that all llama-servers behind one proxy share, and those that belong to one of them."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from secrets import token_bytes
from typing import TYPE_CHECKING

from proxy.core.conditions import DegradationKind
from proxy.core.eviction import Present
from proxy.core.model import Checkpoint
from proxy.core.rates import Rates
from proxy.errors import StoreFault
from proxy.explain.report import Journal, Report
from proxy.explain.views import History
from proxy.health import Degradations, Faults
from proxy.llama.client import LlamaServer, Target
from proxy.metrics import Metrics
from proxy.store.store import CheckpointStore
from proxy.tasks import Tasks

if TYPE_CHECKING:
    from proxy.serving.process import Process
    from proxy.shared.tier import Tier

HISTORY = "history"
"""Under this name the index keeps the journal's history."""


@dataclass(eq=False)
class Services:
    """The services of all llama-servers; `opened_store` is None if the store could not be opened."""

    opened_store: CheckpointStore | None
    metrics: Metrics
    faults: Faults
    all_degradations: Degradations
    report: Report
    journal: Journal
    tasks: Tasks
    secret: bytes
    """The key of tenants' names; without a store it lasts as long as the proxy."""
    served: "dict[Target, Process]" = field(default_factory=dict, kw_only=True)
    """The newest process of each llama-server. A model that its host has unloaded stays here: requests for
    that model will come back."""
    tier: "Tier | None" = field(default=None, kw_only=True)
    """The shared store, if there is one."""

    def of(self, upstream: LlamaServer, name: str) -> "ServerServices":
        """Return the services of one llama-server; its *name* is empty if there is only one."""
        here = self.all_degradations.at(name)
        return ServerServices(**vars(self), upstream=upstream, degradations=here, server_name=name)

    @property
    def store(self) -> CheckpointStore:
        """The store; raises StoreFault if there is none."""
        if self.opened_store is None:
            raise StoreFault("the store is not open")
        return self.opened_store

    def present(self, newest: "Process | None" = None) -> Present:
        """Return the rates, by which the store values checkpoints; *newest* may not be noted yet.

        A process that cannot cache does not count.
        """
        there = [p for p in (*self.served.values(), newest) if p and p.can_cache]
        rates_by = {
            p.tenant_namespace(tenant): p.rates for p in there for tenant in {b"", *p.tenants}
        }
        return Present(time.time(), there[-1].rates if there else Rates(), rates_by)


def new_shared(
    store: CheckpointStore | None, metrics: Metrics, degradations: Degradations, journal: Journal
) -> Services:
    """Return the shared services of a proxy that starts; its journal goes on from that of earlier runs."""
    faults, report = Faults(metrics), Report(metrics, journal)
    secret = token_bytes()
    if store is not None:  # an empty store is false
        secret = store.secret
        journal.past = store.index.value(HISTORY, History) or journal.past
    return Services(store, metrics, faults, degradations, report, journal, Tasks(), secret)


@dataclass(eq=False)
class ServerServices(Services):
    """The services of one llama-server, whichever process of it runs."""

    upstream: LlamaServer
    degradations: Degradations
    server_name: str


def note_quarantined(degradations: Degradations, checkpoints: Iterable[Checkpoint]) -> None:
    """Let /health tell which checkpoints are quarantined for good, and since when, if there are any."""
    found = [(c.quarantine.since, c) for c in checkpoints if c.quarantine]
    if not found:
        return degradations.end(DegradationKind.STATE_ENDED_SERVER)
    since, newest = max(found, key=lambda each: each[0])
    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(since))
    words = f"checkpoint {newest.id:016x} of {newest.n_tokens:,} tokens, since {at}"
    words += f", and {len(found) - 1} before" * (len(found) > 1)
    degradations.begin(DegradationKind.STATE_ENDED_SERVER, words)
