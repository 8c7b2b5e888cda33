"""What is measured, and what came of it: plain values that are stored as JSON."""

from dataclasses import dataclass, field
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
        return f"{self.trace} {self.kind} {self.size}, {slots}, {self.variant}"


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
class Result:
    """What one case cost; `n_written_bytes` and `n_kept_bytes` are of state files."""

    case: Case
    n_evaluated: int
    n_exact: int
    seconds: float
    n_written_bytes: int
    n_kept_bytes: int
    counters: dict[str, float]
    requests: list[RequestCost]

    @property
    def ratio(self) -> float:
        """Return how many times as much as the exact cache was evaluated."""
        return self.n_evaluated / self.n_exact
