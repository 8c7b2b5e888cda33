"""The degradations that are active now: begun, ended, logged once, counted, and shown in /health."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from proxy.core.degradation import EXPLANATIONS, DegradationKind, State, state_under
from proxy.errors import CacheFault
from proxy.log import get_logger
from proxy.metrics import Metrics

QUIET_SECONDS = 300.0
"""One that comes and goes is logged once in this time."""


class CannotCache(CacheFault):
    """Nothing can be saved or restored on this llama-server; `kind` says why, `detail` what was seen."""

    def __init__(self, kind: DegradationKind, detail: str = "") -> None:
        super().__init__(detail or EXPLANATIONS[kind].reason)
        self.kind = kind
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Degradation:
    """An active degradation; `since` is in seconds of the epoch."""

    kind: DegradationKind
    detail: str
    since: float

    @property
    def reason(self) -> str:
        """Why, in words for a person, with the error that was seen."""
        reason = EXPLANATIONS[self.kind].reason
        return f"{reason} ({self.detail})" if self.detail else reason


class Degradations:
    """All that keeps the proxy from caching as it should."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.time) -> None:
        self._metrics = metrics
        self._clock = clock
        self._log = get_logger("cache")
        self._active: dict[DegradationKind, Degradation] = {}
        self._logged_at: dict[DegradationKind, float] = {}
        self.state = State.CACHING
        self.since = clock()
        """When the state last changed, in seconds of the epoch."""

    def __contains__(self, kind: DegradationKind) -> bool:
        return kind in self._active

    @property
    def kinds(self) -> frozenset[DegradationKind]:
        return frozenset(self._active)

    @property
    def active(self) -> list[Degradation]:
        """The worst ones first, of those the oldest."""
        order = list(State)
        return sorted(
            self._active.values(),
            key=lambda d: (-order.index(EXPLANATIONS[d.kind].leads_to), d.since),
        )

    def begin(self, kind: DegradationKind, detail: str = "") -> None:
        """Note that something is wrong; if it was already, only a new *detail* is noted."""
        if known := self._active.get(kind):
            since = known.since
            self._active[kind] = Degradation(kind, detail or known.detail, since)
            return
        self._active[kind] = Degradation(kind, detail, self._clock())
        self._metrics.degradations.labels(kind).inc()
        self._metrics.degraded.labels(kind).set(1)
        self._update_state()
        self._report(self._active[kind])

    def end(self, *kinds: DegradationKind) -> None:
        """Note that these are mended; those that are not active are left alone."""
        for kind in kinds:
            if (ended := self._active.pop(kind, None)) is None:
                continue
            self._metrics.degraded.labels(kind).set(0)
            self._update_state()
            if self._logged_at.get(kind) == ended.since:
                seconds = round(self._clock() - ended.since, 1)
                self._log.info(
                    "degradation ended", kind=kind.value, seconds=seconds, state=self.state.value
                )

    def _update_state(self) -> None:
        state = state_under(self._active)
        if state is not self.state:
            self.state, self.since = state, self._clock()

    def _report(self, begun: Degradation) -> None:
        if begun.since - self._logged_at.get(begun.kind, -QUIET_SECONDS) < QUIET_SECONDS:
            return
        self._logged_at[begun.kind] = begun.since
        about = EXPLANATIONS[begun.kind]
        write = self._log.info if about.is_passing else self._log.warning
        write(
            "degradation",
            kind=begun.kind.value,
            reason=begun.reason,
            cure=about.cure,
            state=self.state.value,
        )
