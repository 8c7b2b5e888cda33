"""The admin listener: the proxy's own health and metrics. Loopback by default; never for clients."""

from collections import Counter
from datetime import UTC, datetime

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from proxy.core.degradation import EXPLANATIONS
from proxy.core.rates import Rates
from proxy.core.slots import SlotTable, state_of
from proxy.driver.degradations import Degradation
from proxy.driver.fleet.backend import Backend
from proxy.driver.fleet.fleet import Fleet
from proxy.driver.services import Shared
from proxy.front.metrics_page import MetricsPage, join_seconds
from proxy.metrics import POSITION_LABELS


class Admin:
    """Answers operators."""

    def __init__(self, shared: Shared, fleet: Fleet, metrics_page: MetricsPage) -> None:
        self._shared = shared
        self._fleet = fleet
        self._metrics_page = metrics_page

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/health", self.health), web.get("/metrics", self.metrics)]

    async def health(self, request: web.Request) -> web.Response:
        """200 as long as requests are answered; `state` and `reasons` say how well they are cached."""
        degradations, store = self._shared.everywhere, self._shared.opened_store
        body: dict[str, object] = {
            "state": degradations.state,
            "since": moment(degradations.since),
            "reasons": [describe(degradation) for degradation in degradations.active],
        }
        if self._fleet.is_single:
            body |= describe_backend(self._fleet.backends[0])
        else:
            body["llama_servers"] = {b.name: describe_backend(b) for b in self._fleet.backends}
        body["waiting"] = self._fleet.n_waiting
        body["background_tasks"] = len(self._shared.tasks)
        if store is not None:
            body["checkpoints"] = len(store)
            body["checkpoint_bytes"] = store.size_bytes
            body["writes"] = {
                "bytes_last_day": store.writes.last_day_bytes,
                "max_bytes_per_day": store.writes.max_bytes_per_day,
                **self._bytes_per_token(),
            }
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    def _bytes_per_token(self) -> dict[str, float | None]:
        """Return what was written for each token that was reused, and for each that was restored.

        Both since the proxy started; None while there was none.
        """
        total = self._shared.metrics.total
        n_bytes = total("written_bytes")
        n_tokens = {
            "reused": total("prompt_tokens", source="reused"),
            "restored": total("restored_tokens"),
        }
        return {
            f"bytes_per_{how}_token": round(n_bytes / n, 1) if n else None
            for how, n in n_tokens.items()
        }

    async def metrics(self, request: web.Request) -> web.Response:
        headers = {"Content-Type": CONTENT_TYPE_LATEST}
        text = await self._metrics_page.text(join_seconds(request.headers))
        return web.Response(body=text, headers=headers)


def describe_backend(backend: Backend) -> dict[str, object]:
    """Return whether a llama-server is attached, and if so what is known of it."""
    session = backend.lifecycle.current
    if session is None:
        return {"llama_server": "not attached"}
    attachment = session.attachment
    return {
        "llama_server": "attached",
        "rule": attachment.rule.kind.value,
        "slots": describe_slots(attachment.desk.table),
        "rates": describe_rates(attachment.rates),
    }


def describe(degradation: Degradation) -> dict[str, str]:
    """Return what is wrong, since when, and what mends it."""
    return {
        "kind": degradation.kind.value,
        "reason": degradation.reason,
        "cure": EXPLANATIONS[degradation.kind].cure,
        "since": moment(degradation.since),
    }


def describe_slots(table: SlotTable) -> dict[str, int]:
    """Return how many slots are leased, and how many of the others hold what."""
    return dict(Counter(state_of(slot).value for slot in table))


def describe_rates(rates: Rates) -> dict[str, object]:
    """Return how fast llama-server was measured to be; what was not measured yet is 0."""
    return {
        "evaluation_tokens_per_second": {
            label: round(rates.tokens_per_second(position), 1)
            for position, label in POSITION_LABELS.items()
        },
        "restore_bytes_per_second": {
            "warm": round(rates.warm_restore.bytes_per_second),
            "cold": round(rates.cold_restore.bytes_per_second),
        },
        "save_bytes_per_second": round(rates.save.bytes_per_second),
    }


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
