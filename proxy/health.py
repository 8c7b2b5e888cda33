"""The conditions that are active now, and the cache faults that were counted."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace

from proxy.core.conditions import OF_PROCESS, PASSING, DegradationKind, State, state_under, worst_of
from proxy.errors import CacheFault, UpstreamRefused
from proxy.log import get_logger
from proxy.metrics import Metrics

QUIET_SECONDS = 300.0
"""A condition that begins again within this time is not logged again."""
_MAX_REMEMBERED = 256
_ABOUT_PROMPTS = ("tokenize", "stabilize")


class CannotCache(CacheFault):
    """Nothing can be saved or restored on this llama-server; `kind` says why, `detail` adds the error."""

    def __init__(self, kind: DegradationKind, detail: str = "") -> None:
        super().__init__(detail or kind.reason)
        self.kind = kind
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Degradation:
    """An active condition; `since` is in seconds of the epoch, `where` names the llama-server.

    `where` is empty if there is only one llama-server, and for conditions of the proxy itself. Requests
    wait at most `wait_seconds` for a llama-server that is away.
    """

    kind: DegradationKind
    detail: str
    since: float
    where: str = ""
    wait_seconds: float = 60.0

    @property
    def reason(self) -> str:
        """The reason in words, with llama-server's name and the detail."""
        told = f"{self.wait_seconds:g} s (upstream_wait_seconds)"
        reason = self.kind.reason.replace("upstream_wait_seconds", told)
        reason = f"{self.where}: {reason}" if self.where else reason
        return f"{reason} ({self.detail})" if self.detail else reason


class Degradations:
    """The active conditions that keep the proxy from caching as it should: logged once, and counted.

    `at` returns the conditions of one llama-server, `where`. All share one table.
    """

    def __init__(self, metrics: Metrics, wait_seconds: float = 60.0) -> None:
        self.where = ""
        self._wait_seconds = wait_seconds
        self._metrics = metrics
        self._log = get_logger("cache")
        self._active: dict[tuple[str, DegradationKind], Degradation] = {}
        self._logged_at: dict[tuple[str, DegradationKind], float] = {}
        self._servers: set[str] = set()
        self._began = {State.CACHING: time.time()}

    def at(self, where: str) -> "Degradations":
        """Return the conditions of one llama-server; it counts for `state` once the first one begins."""
        here = copy(self)
        here.where = where
        return here

    def __contains__(self, kind: DegradationKind) -> bool:
        """Return whether a condition is active at any llama-server."""
        return any(active is kind for _, active in self._active)

    @property
    def kinds(self) -> frozenset[DegradationKind]:
        """The kinds of the conditions that are active here."""
        return frozenset(kind for where, kind in self._active if where == self.where)

    @property
    def active(self) -> list[Degradation]:
        """All active conditions: the worst first, and the older one first among equals."""
        order = list(State)
        return sorted(self._active.values(), key=lambda d: (-order.index(d.kind.leads_to), d.since))

    @property
    def state(self) -> State:
        """How requests are served now; degraded where llama-servers differ."""
        states = {state_under(self.at(where).kinds) for where in self._servers}
        of_servers = State.DEGRADED if len(states) > 1 else worst_of(states)
        return worst_of((state_under(self.at("").kinds), of_servers))

    @property
    def since(self) -> float:
        """When the state last changed, in seconds of the epoch."""
        return self._began[self.state]

    def begin(self, kind: DegradationKind, detail: str = "") -> None:
        """Begin a condition here; if it is active already, only note a new *detail*."""
        key = self.where, kind
        if known := self._active.get(key):
            self._active[key] = replace(known, detail=detail or known.detail)
            return
        facts = detail, time.time(), self.where, self._wait_seconds
        begun = self._active[key] = Degradation(kind, *facts)
        if self.where:
            self._servers.add(self.where)
        self._metrics.degradations.labels(kind).inc()
        self._metrics.degraded.labels(kind).set(1)
        self._note_change()
        if begun.since - self._logged_at.get(key, -QUIET_SECONDS) < QUIET_SECONDS:
            return
        self._logged_at[key] = begun.since
        write = self._log.info if kind in PASSING else self._log.warning
        write(
            "degradation",
            kind=kind.value,
            reason=begun.reason,
            cure=kind.cure,
            state=self.state.value,
            says="" if kind in PASSING else f"{begun.reason} {kind.cure}",
        )

    def end(self, *kinds: DegradationKind) -> None:
        """End these conditions here; one that is not active is skipped."""
        for kind in kinds:
            key = self.where, kind
            if key not in self._active:
                continue
            ended = self._active.pop(key)
            over = ": ".join(filter(None, ("over", self.where, kind.value)))
            self._metrics.degraded.labels(kind).set(kind in self)
            self._note_change()
            if self._logged_at.get(key) == ended.since:
                self._log.info(
                    "degradation ended",
                    kind=kind.value,
                    **({"where": self.where} if self.where else {}),
                    seconds=round(time.time() - ended.since, 1),
                    state=self.state.value,
                    says="" if kind in PASSING else over,
                )

    def leave(self) -> None:
        """Forget this llama-server: that it is away is no degradation."""
        self.end(*(self.kinds & OF_PROCESS))
        self._servers.discard(self.where)
        self._note_change()

    def _note_change(self) -> None:
        """Note since when the state holds, if it is another one than before."""
        if (state := self.state) not in self._began:
            self._began.clear()
            self._began[state] = time.time()


class Faults:
    """The end of every cache fault: counted every time, logged once, never an error of a client."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._log = get_logger("cache")
        self._seen: set[tuple[str, str]] = set()

    def count(self, stage: str) -> None:
        """Count a fault without a log line: a degradation has logged it."""
        self._metrics.cache_faults.labels(stage).inc()

    @contextmanager
    def suppressed(self, stage: str, fault_type: type[Exception] = Exception) -> Iterator[None]:
        """Record a fault that would leave the block, and go on behind the block."""
        try:
            yield
        except fault_type as fault:
            self.record(stage, fault)

    def record(self, stage: str, error: BaseException) -> None:
        """Count a fault; log it if the same one was not logged before."""
        self.count(stage)
        reason = str(error) or type(error).__name__
        if stage in _ABOUT_PROMPTS and isinstance(error, UpstreamRefused):
            # llama-server quotes the text that it cannot render or parse, and no prompt is ever logged.
            reason = f"llama-server answered {error.status} to the prompt"
        if (stage, reason) in self._seen:
            return
        if len(self._seen) < _MAX_REMEMBERED:
            self._seen.add((stage, reason))
        trace = None if isinstance(error, CacheFault) else error
        says = f"the cache failed ({stage}: {reason}); requests are answered all the same"
        self._log.warning("cache fault", stage=stage, reason=reason, says=says, exc_info=trace)
