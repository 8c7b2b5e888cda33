"""A proxy in this process, and what tests look at in it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from proxy import app
from proxy.health import Degradations
from proxy.metrics import Metrics
from proxy.servers.server import Server
from proxy.settings import Settings
from proxy.store.store import CheckpointStore


class Running(app.Running):
    """A proxy that serves; its llama-server is the first one, where there are several."""

    @property
    def server(self) -> Server:
        return self.pool.servers[0]

    @property
    def store(self) -> CheckpointStore | None:
        return self.shared.opened_store

    @property
    def metrics(self) -> Metrics:
        return self.shared.metrics

    @property
    def degradations(self) -> Degradations:
        return self.shared.all_degradations


@asynccontextmanager
async def run_proxy(settings: Settings, **options: Any) -> AsyncIterator[Running]:
    """Run a proxy while the block runs; *options* are those of `proxy.app.run_proxy`."""
    async with app.run_proxy(settings, **options) as running:
        yield Running(running.port, running.admin_port, running.pool, running.shared)
