"""One line and one count for each generation request, however it ends."""

import asyncio
import time
from collections.abc import Mapping

from proxy.core.model import Outcome
from proxy.driver.requests import Answer, GenerationRequest
from proxy.errors import ProxyError, TooManyRequests, UpstreamAbsent, UpstreamGone
from proxy.log import get_logger
from proxy.metrics import Metrics


class Report:
    """Tells what became of requests; never what was in them."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._log = get_logger("cache")

    def answered(
        self,
        request: GenerationRequest,
        answer: Answer,
        outcome: Outcome,
        facts: Mapping[str, object],
    ) -> None:
        """Report a request whose answer was relayed; *facts* say what was chosen, and why."""
        if answer.is_broken:
            gone = UpstreamGone("llama-server went away in mid-answer")
            return self.unanswered(request.path, request.arrived_at, gone)
        self._metrics.requests.labels(outcome).inc()
        line: dict[str, object] = {"status": answer.status}
        if answer.first_token_at is not None:
            seconds = answer.first_token_at - request.arrived_at
            self._metrics.first_token_seconds.labels(outcome).observe(seconds)
            line["first_token_seconds"] = round(seconds, 4)
        line["seconds"] = round(time.monotonic() - request.arrived_at, 4)
        self._log.info(
            "request",
            id=request.id,
            path=request.path,
            outcome=outcome.value,
            **({"rewrites": list(request.rewrites)} if request.rewrites else {}),
            **facts,
            **line,
        )

    def unanswered(self, path: str, arrived_at: float, error: BaseException) -> None:
        """Report a request that *error* ended before its answer was whole."""
        why = _why_unanswered(error)
        self._metrics.unanswered_requests.labels(why).inc()
        write = self._log.warning if isinstance(error, ProxyError) else self._log.info
        write(
            "request",
            path=path,
            outcome="unanswered",
            why=why,
            reason=str(error) or type(error).__name__,
            seconds=round(time.monotonic() - arrived_at, 4),
        )


def _why_unanswered(error: BaseException) -> str:
    match error:
        case asyncio.CancelledError() | ConnectionResetError():
            return "client left"
        case UpstreamGone() | UpstreamAbsent():
            return "llama-server gone"
        case TooManyRequests():
            return "queue full"
        case _:
            return "other"
