"""What is measured, and what came of it: plain values that are stored as JSON."""

from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any, Literal

Variant = Literal["proxy", "stripped", "alone", "alone-8192"]
ALONE: tuple[Variant, ...] = ("alone", "alone-8192")
THROUGH_PROXY: tuple[Variant, ...] = ("proxy", "stripped")


@dataclass(frozen=True, slots=True)
class Case:
    """One trace on one model, with so many slots, in one variant."""

    trace: str
    kind: str
    size: str
    n_slots: int
    variant: Variant

    @property
    def has_proxy(self) -> bool:
        return self.variant in THROUGH_PROXY

    def __str__(self) -> str:
        slots = f"{self.n_slots} slot" + ("s" if self.n_slots > 1 else "")
        return f"{self.trace}, {self.kind} {self.size}, {slots}, {self.variant}"


@dataclass(frozen=True, slots=True)
class RequestCost:
    """One request; `log` is the proxy's line on it, `n_exact` what an exact infinite cache evaluates."""

    label: str
    n_prompt: int
    n_exact: int
    n_evaluated: int
    first_token_seconds: float
    seconds: float
    log: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KeptState:
    """A state file at the end; `state_bytes` are its size without context checkpoints."""

    n_tokens: int
    size_bytes: int
    state_bytes: int
    restore_points: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """What one case cost; `n_written_bytes` are those of all saves, `counters` the proxy's own."""

    case: Case
    n_evaluated: int
    seconds: float
    n_written_bytes: int
    counters: dict[str, float]
    kept: list[KeptState]
    requests: list[RequestCost]

    @property
    def n_exact(self) -> int:
        """Return what an exact infinite cache would evaluate."""
        return sum(request.n_exact for request in self.requests)

    @property
    def ratio(self) -> float:
        """Return how many times as much as the exact cache was evaluated."""
        return self.n_evaluated / self.n_exact

    @property
    def n_kept_bytes(self) -> int:
        return sum(state.size_bytes for state in self.kept)

    def first_token_quantiles(self) -> tuple[float, float]:
        """Return the median and the 95th percentile of the seconds to the first token."""
        seconds = [request.first_token_seconds for request in self.requests]
        cut = quantiles(seconds, n=20, method="inclusive")
        return cut[9], cut[18]


@dataclass(frozen=True, slots=True)
class Failure:
    """A case that could not be played to its end."""

    case: Case
    reason: str
