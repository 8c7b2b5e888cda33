"""One line, one count and one record for each generation request, however it ends."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from proxy.core.explaining.causes import MEANINGS, Cause, Part
from proxy.core.explaining.records import (
    UNANSWERED,
    Divergence,
    Explanation,
    Nearest,
    RequestRecord,
    Way,
)
from proxy.core.model import Outcome
from proxy.driver.reporting.journal import Journal
from proxy.driver.requests import Answer, Arrival, GenerationRequest
from proxy.driver.serving.account import Account
from proxy.errors import ProxyError, TooManyRequests, UpstreamAbsent, UpstreamGone
from proxy.log import get_logger
from proxy.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Findings:
    """Why a request reused what it did; `account` is None, and `why` says why, if it was not looked up.

    `is_at_divergence` says that the cause lies where the prompt leaves the nearest known one.
    """

    account: Account | None = None
    why: str | None = None
    cause: Cause = Cause.NOT_LOOKED_UP
    n_missed: int = 0
    is_at_divergence: bool = False
    nearest: Nearest | None = None
    divergence: Divergence | None = None

    @property
    def part(self) -> Part:
        place = self._place
        return place.part if place else Part.NOWHERE

    @property
    def _place(self) -> Divergence | None:
        return self.divergence if self.is_at_divergence and self.cause.is_miss else None

    def facts(self) -> dict[str, Any]:
        """Return what they say of the fields of a RequestRecord."""
        found = {
            "cause": self.cause,
            "part": self.part,
            "message": self._place.message if self._place else None,
            "n_missed": self.n_missed,
        }
        return found | (self.account.describe() if self.account else {"why": self.why})


class Report:
    """Tells what became of requests; never, in the log, what was in them."""

    def __init__(self, metrics: Metrics, journal: Journal) -> None:
        self._metrics = metrics
        self._journal = journal
        self._log = get_logger("cache")

    def answered(
        self, request: GenerationRequest, answer: Answer, outcome: Outcome, findings: Findings
    ) -> None:
        """Report a request whose answer was relayed."""
        if answer.is_broken:
            gone = UpstreamGone("llama-server went away in mid-answer")
            return self.unanswered(request.arrival, gone)
        self._metrics.requests.labels(outcome).inc()
        self._count_reuse(findings)
        arrived_at, first_token_seconds = request.arrival.arrived_at, None
        if answer.first_token_at is not None:
            first_token_seconds = answer.first_token_at - arrived_at
            self._metrics.first_token_seconds.labels(outcome).observe(first_token_seconds)
        record = RequestRecord(
            id=request.id,
            at=request.arrival.at,
            path=request.path,
            outcome=outcome.value,
            status=answer.status,
            server=request.server or None,
            first_token_seconds=_rounded(first_token_seconds),
            seconds=round(time.monotonic() - arrived_at, 4),
            rewrites=request.rewrites,
            **findings.facts(),
        )
        way = findings.account.way() if findings.account else None
        self._log.info("request", **_line(record), **(_line(way) if way else {}))
        self._remember(record, findings, way)

    def _count_reuse(self, findings: Findings) -> None:
        """Count what was missed, and what was saved."""
        metrics, cause, account = self._metrics, findings.cause, findings.account
        if cause.is_miss:
            metrics.misses.labels(cause, findings.part).inc()
            metrics.missed_tokens.labels(cause).inc(findings.n_missed)
        if account is not None and (seconds := account.saved_seconds) is not None:
            source = "restored" if account.n_restored else "live"
            metrics.saved_seconds.labels(source).inc(max(0.0, seconds))
            metrics.lost_seconds.inc(max(0.0, -seconds))

    def unanswered(self, arrival: Arrival, error: BaseException) -> None:
        """Report a request that *error* ended before its answer was whole."""
        why = _why_unanswered(error)
        self._metrics.unanswered_requests.labels(why).inc()
        record = RequestRecord(
            id=arrival.id,
            at=arrival.at,
            path=arrival.path,
            outcome=UNANSWERED,
            cause=Cause.NOT_LOOKED_UP,
            why=why,
            seconds=round(time.monotonic() - arrival.arrived_at, 4),
        )
        write = self._log.warning if isinstance(error, ProxyError) else self._log.info
        write("request", **_line(record), reason=str(error) or type(error).__name__)
        self._remember(record, Findings(), None)

    def _remember(self, record: RequestRecord, findings: Findings, way: Way | None) -> None:
        meaning = MEANINGS[record.cause]
        self._journal.add(
            Explanation(
                request=record,
                says=meaning.says,
                cure=meaning.cure,
                way=way,
                nearest=findings.nearest,
                divergence=findings.divergence,
            )
        )


_LEFT_OUT = {"at", "cause", "part"}
_ALWAYS = {"confirmed", "evaluated", "alternatives", "stops", "cuts"}


def _line(told: RequestRecord | Way) -> dict[str, object]:
    """Return what is worth a place in the log line: whatever is known, as plain values."""
    line: dict[str, object] = {}
    for name in told.__struct_fields__:
        value = getattr(told, name)
        if name in _ALWAYS or not (value is None or value == ()):
            line[name] = list(value) if isinstance(value, tuple) else value
    if not line.get("n_missed"):
        line.pop("n_missed", None)
    if isinstance(told, RequestRecord):
        for name in _LEFT_OUT:
            del line[name]
        if told.cause is not Cause.NOT_LOOKED_UP:
            line["cause"] = told.cause.value
        if told.part is not Part.NOWHERE:
            line["part"] = told.part.value
    return line


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


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
