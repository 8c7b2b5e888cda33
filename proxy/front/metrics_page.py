"""What /metrics answers: the proxy's own metrics and, if the operator asks for it, llama-server's."""

from proxy.errors import UpstreamFault
from proxy.log import get_logger
from proxy.metrics import Metrics
from proxy.upstream.exposition import check_exposition
from proxy.upstream.llama_server import LlamaServer

JOIN_SECONDS = 3.0
"""llama-server answers between two batches, and not during a save; scrapers give up after ten seconds."""


class MetricsPage:
    """Writes the answer; without llama-server's part if that cannot be had."""

    def __init__(self, metrics: Metrics, upstream: LlamaServer, *, joins_upstream: bool) -> None:
        self._metrics = metrics
        self._upstream = upstream
        self._joins_upstream = joins_upstream
        self._complaint = ""

    async def text(self) -> bytes:
        joined = await self._of_llama_server() if self._joins_upstream else b""
        self._metrics.joined.set(bool(joined))
        return self._metrics.exposition() + joined

    async def _of_llama_server(self) -> bytes:
        try:
            return check_exposition(await self._upstream.metrics(JOIN_SECONDS))
        except UpstreamFault as fault:
            self._complain(str(fault))
            return b""

    def _complain(self, reason: str) -> None:
        """Log why nothing is joined, once until it is something else."""
        if reason != self._complaint:
            self._complaint = reason
            get_logger("metrics").warning("llama-server's metrics cannot be joined", reason=reason)
