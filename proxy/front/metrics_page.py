"""What /metrics answers: the proxy's own metrics and, if the operator asks for it, llama-server's."""

from collections.abc import Mapping

from proxy.driver.fleet.fleet import Fleet
from proxy.errors import UpstreamFault
from proxy.log import get_logger
from proxy.metrics import Metrics
from proxy.upstream.exposition import check_exposition

JOIN_SECONDS = 3.0
"""llama-server answers between two batches, and not during a save; scrapers give up after ten seconds."""


def join_seconds(headers: Mapping[str, str]) -> float:
    """Return how long a scraper lets us wait: half of what it says that it waits itself."""
    try:
        patience = float(headers.get("X-Prometheus-Scrape-Timeout-Seconds", ""))
    except ValueError:
        return JOIN_SECONDS
    return min(JOIN_SECONDS, patience / 2) if patience > 0 else JOIN_SECONDS


class MetricsPage:
    """Writes the answer; without llama-server's part if that cannot be had."""

    def __init__(self, metrics: Metrics, fleet: Fleet, *, joins_upstream: bool) -> None:
        self._metrics = metrics
        self._fleet = fleet
        self._joins_upstream = joins_upstream
        self._complaint = ""

    async def text(self, seconds: float = JOIN_SECONDS) -> bytes:
        """Return all metrics, having waited for llama-server's so many seconds at most."""
        joined = await self._of_llama_server(seconds) if self._joins_upstream else b""
        self._metrics.joined.set(bool(joined))
        return self._metrics.exposition() + joined

    async def _of_llama_server(self, seconds: float) -> bytes:
        try:
            return check_exposition(await self._fleet.first.metrics(seconds))
        except UpstreamFault as fault:
            self._complain(str(fault))
            return b""

    def _complain(self, reason: str) -> None:
        """Log why nothing is joined, once until it is something else."""
        if reason != self._complaint:
            self._complaint = reason
            get_logger("metrics").warning("llama-server's metrics cannot be joined", reason=reason)
