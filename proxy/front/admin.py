"""The admin listener: the proxy's own health and metrics. Loopback by default; never for clients."""

from collections import Counter

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from proxy.core.slots import SlotTable
from proxy.driver.lifecycle import Lifecycle
from proxy.metrics import Metrics
from proxy.store.store import CheckpointStore


class Admin:
    """Answers operators."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        store: CheckpointStore | None,
        store_problem: str | None,
        metrics: Metrics,
    ) -> None:
        self._lifecycle = lifecycle
        self._store = store
        self._store_problem = store_problem
        self._metrics = metrics

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/health", self.health), web.get("/metrics", self.metrics)]

    async def health(self, request: web.Request) -> web.Response:
        """200 as long as requests are answered; `state` says whether they are cached."""
        session = self._lifecycle.current
        reasons = [self._store_problem] if self._store_problem else []
        body: dict[str, object] = {"llama_server": self._lifecycle.condition}
        if session is not None:
            attachment = session.attachment
            reasons += [r for r in attachment.reasons if r not in reasons]
            body["rule"] = attachment.rule.kind.value
            body["slots"] = describe_slots(attachment.desk.table)
            body["waiting"] = attachment.desk.n_waiting
            is_caching = attachment.can_cache and attachment.rule.can_restore
        else:
            is_caching = False
        body["state"] = "caching" if is_caching else "forwarding"
        body["reasons"] = reasons
        if self._store is not None:
            body["checkpoints"] = len(self._store)
            body["checkpoint_bytes"] = self._store.size_bytes
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    async def metrics(self, request: web.Request) -> web.Response:
        headers = {"Content-Type": CONTENT_TYPE_LATEST}
        return web.Response(body=self._metrics.exposition(), headers=headers)


def describe_slots(table: SlotTable) -> dict[str, int]:
    """Return how many slots are leased, and how many of the others hold what."""
    states = ("leased" if s.is_leased else type(s.content).__name__.lower() for s in table)
    return dict(Counter(states))
