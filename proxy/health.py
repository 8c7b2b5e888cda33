"""The conditions that are active now, and the cache faults that were counted."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from proxy.core.conditions import (
    EXPLANATIONS,
    OF_PROCESS,
    DegradationKind,
    State,
    state_among,
    state_under,
    worst_of,
)
from proxy.errors import CacheFault, UpstreamRefused
from proxy.log import get_logger
from proxy.metrics import Metrics

# The degradations that are active now: begun, ended, logged once, counted, and shown in /health.


QUIET_SECONDS = 300.0
"""One that comes and goes is logged once in this time."""


class CannotCache(CacheFault):
    """Nothing can be saved or restored on this llama-server; `kind` says why, `detail` what was seen."""

    def __init__(self, kind: DegradationKind, detail: str = "") -> None:
        super().__init__(detail or EXPLANATIONS[kind].reason)
        self.kind = kind
        self.detail = detail


_Key = tuple[str, DegradationKind]


@dataclass(frozen=True, slots=True)
class Degradation:
    """An active degradation; `since` is in seconds of the epoch, `where` which llama-server it is of.

    Empty where there is only one, or where it is the proxy's.
    """

    kind: DegradationKind
    detail: str
    since: float
    where: str = ""

    @property
    def reason(self) -> str:
        """Why, in words for a person, with the error that was seen."""
        reason = EXPLANATIONS[self.kind].reason
        if self.where:
            reason = f"{self.where}: {reason}"
        return f"{reason} ({self.detail})" if self.detail else reason


class Degradations:
    """All that keeps the proxy from caching as it should, at any of its llama-servers."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.time) -> None:
        self._metrics = metrics
        self._clock = clock
        self._log = get_logger("cache")
        self._active: dict[_Key, Degradation] = {}
        self._logged_at: dict[_Key, float] = {}
        self._places: set[str] = set()
        self.state = State.CACHING
        self.since = clock()
        """When the state last changed, in seconds of the epoch."""

    def at(self, where: str) -> "DegradationsHere":
        """Return those of one llama-server, which counts from when the first of them begins."""
        return DegradationsHere(self, where)

    def __contains__(self, kind: DegradationKind) -> bool:
        return any(active is kind for _, active in self._active)

    def leave(self, where: str) -> None:
        """Forget a llama-server that nobody misses."""
        self.end(*(self.kinds(where) & OF_PROCESS), where=where)
        self._places.discard(where)
        self._update_state()

    def kinds(self, where: str = "") -> frozenset[DegradationKind]:
        return frozenset(kind for place, kind in self._active if place == where)

    @property
    def active(self) -> list[Degradation]:
        """The worst ones first, of those the oldest."""
        order = list(State)
        return sorted(
            self._active.values(),
            key=lambda d: (-order.index(EXPLANATIONS[d.kind].leads_to), d.since),
        )

    def begin(self, kind: DegradationKind, detail: str = "", where: str = "") -> None:
        """Note that something is wrong; if it was already, only a new *detail* is noted."""
        key = where, kind
        if known := self._active.get(key):
            self._active[key] = replace(known, detail=detail or known.detail)
            return
        self._active[key] = Degradation(kind, detail, self._clock(), where)
        self._places.add(where)
        self._metrics.degradations.labels(kind).inc()
        self._metrics.degraded.labels(kind).set(1)
        self._update_state()
        self._report(self._active[key])

    def end(self, *kinds: DegradationKind, where: str = "") -> None:
        """Note that these are mended; those that are not active are left alone."""
        for kind in kinds:
            if (ended := self._active.pop((where, kind), None)) is None:
                continue
            self._metrics.degraded.labels(kind).set(any(k is kind for _, k in self._active))
            self._update_state()
            if self._logged_at.get((where, kind)) == ended.since:
                seconds = round(self._clock() - ended.since, 1)
                self._log.info(
                    "degradation ended",
                    kind=kind.value,
                    **_at(where),
                    seconds=seconds,
                    state=self.state.value,
                )

    def _update_state(self) -> None:
        of_servers = state_among(state_under(self.kinds(place)) for place in self._places)
        state = worst_of(state_under(self.kinds()), of_servers)
        if state is not self.state:
            self.state, self.since = state, self._clock()

    def _report(self, begun: Degradation) -> None:
        key = begun.where, begun.kind
        if begun.since - self._logged_at.get(key, -QUIET_SECONDS) < QUIET_SECONDS:
            return
        self._logged_at[key] = begun.since
        about = EXPLANATIONS[begun.kind]
        write = self._log.info if about.is_passing else self._log.warning
        write(
            "degradation",
            kind=begun.kind.value,
            reason=begun.reason,
            cure=about.cure,
            state=self.state.value,
        )


@dataclass(frozen=True, slots=True)
class DegradationsHere:
    """What keeps one llama-server from being cached as it should."""

    everywhere: Degradations
    where: str

    def __contains__(self, kind: DegradationKind) -> bool:
        return kind in self.kinds

    @property
    def kinds(self) -> frozenset[DegradationKind]:
        return self.everywhere.kinds(self.where)

    def begin(self, kind: DegradationKind, detail: str = "") -> None:
        self.everywhere.begin(kind, detail, self.where)

    def end(self, *kinds: DegradationKind) -> None:
        self.everywhere.end(*kinds, where=self.where)

    def leave(self) -> None:
        self.everywhere.leave(self.where)


def _at(where: str) -> dict[str, str]:
    return {"where": where} if where else {}


# Where cache faults end: counted every time, logged once, never a client's error.


_MAX_REMEMBERED = 256
_ABOUT_PROMPTS = ("tokenize", "stabilize")


class Faults:
    """Counts and reports faults of the cache."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._log = get_logger("cache")
        self._seen: set[tuple[str, str]] = set()

    def count(self, stage: str) -> None:
        """Count a fault that is told elsewhere, as a degradation."""
        self._metrics.cache_faults.labels(stage).inc()

    def record(self, stage: str, error: BaseException) -> None:
        """Count a fault; log it if the same one was not logged before."""
        self.count(stage)
        reason = _reason(stage, error)
        if self._is_new(stage, reason):
            is_foreseen = isinstance(error, CacheFault)
            self._log.warning(
                "cache fault", stage=stage, reason=reason, exc_info=None if is_foreseen else error
            )

    def _is_new(self, stage: str, reason: str) -> bool:
        is_new = (stage, reason) not in self._seen
        if is_new and len(self._seen) < _MAX_REMEMBERED:
            self._seen.add((stage, reason))
        return is_new


def _reason(stage: str, error: BaseException) -> str:
    """Return what went wrong, without words of a prompt.

    llama-server quotes what it cannot render or parse: arguments of a tool call that are no JSON, say.
    """
    if stage in _ABOUT_PROMPTS and isinstance(error, UpstreamRefused):
        return f"llama-server answered {error.status}"
    return str(error) or type(error).__name__
