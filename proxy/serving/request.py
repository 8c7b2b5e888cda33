"""One generation request: what came in, what is sent, and what came of it."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxy.core.model import Outcome
from proxy.core.plan import Plan, Restore, StartOption
from proxy.core.rates import Rates
from proxy.explain.causes import Cause
from proxy.llama.answers import CallMade
from proxy.llama.client import Timings
from proxy.llama.routes import Route

# What the listeners hand to the pool, and what they report back.


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that has just come, before its body is read.

    `arrived_at` is of the monotonic clock, `at` in seconds since 1970.
    """

    id: str
    path: str
    arrived_at: float = field(default_factory=time.monotonic)
    at: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A client's request on a generation route; `tenant` is a digest of its key, empty without one.

    `model` is what the client calls the model, `session` its session; each empty if it does not say.
    Its answer is a stream if it `wants_stream`. `server` is which llama-server serves it, empty if there is
    only one. `rewrites` are the stabilizers that changed the body. It came to the first desk at
    `queued_at` of the monotonic clock, 0 if this is the first.
    """

    arrival: Arrival
    route: Route
    raw: bytes
    headers: Mapping[str, str]
    tenant: bytes = b""
    session: str = ""
    model: str = ""
    wants_stream: bool = False
    server: str = ""
    queued_at: float = 0.0
    rewrites: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return self.arrival.id

    @property
    def path(self) -> str:
        return self.arrival.path


@dataclass(frozen=True, slots=True)
class Answer:
    """What was seen of llama-server's answer while it was relayed; no timings if it has none.

    `first_token_at` is of the monotonic clock; None if the answer came whole, not as a stream.
    `is_broken` says that llama-server went away in the middle. `calls` are the tool calls it made.
    """

    status: int
    timings: Timings | None
    first_token_at: float | None = None
    is_broken: bool = False
    calls: tuple[CallMade, ...] = ()


class Send(Protocol):
    """Sends a body upstream and relays the answer to the client, whole.

    Calls back once llama-server is known to run it: it sends a stream's headers when the slot starts.
    *n_found* of the prompt's tokens were there before the proxy itself evaluated any for this request;
    llama-server counts those as cached too. None says that it evaluated none.
    """

    async def __call__(
        self, body: bytes, on_start: Callable[[], None], n_found: int | None = None, /
    ) -> Answer: ...


# What one request really reused and evaluated, held against what was expected.


@dataclass
class Account:
    """Adds up the replies of one request: those at its stops, then its own.

    Only the first of them tells what was there before; what later ones reuse, this request evaluated.
    `failure` is what did not work, if that cost it its reuse. `saved_seconds` is what the tokens that it
    reused would have taken at the measured speeds, less the restore; None if they are not known.
    """

    plan: Plan
    n_prompt: int
    n_reused: int | None = None
    n_evaluated: int = 0
    evaluation_seconds: float = 0.0
    is_degraded: bool = False
    failure: Cause | None = None
    restore_seconds: float = 0.0
    saved_seconds: float | None = None
    queued_seconds: float = 0.0
    prepared_seconds: float = 0.0

    def add(self, timings: Timings) -> None:
        if self.n_reused is None:
            self.n_reused = timings.cache_n
        self.n_evaluated += timings.prompt_n
        self.evaluation_seconds += timings.prompt_ms / 1000

    def value(self, rates: Rates) -> None:
        """Note what the reuse has saved by the speeds that were measured, if they were."""
        if self.n_reused is not None and rates.is_measured:
            whole = rates.evaluation_seconds(0, self.n_prompt)
            rest = rates.evaluation_seconds(self.n_reused, self.n_prompt)
            self.saved_seconds = whole - rest - self.restore_seconds

    def move(self, plan: Plan) -> None:
        """Go on by another plan: what was there before is for the next reply to say."""
        self.plan, self.n_reused = plan, None

    @property
    def is_ineffective_restore(self) -> bool:
        """Whether a restore that answered 200 was not reused as planned."""
        start = self.plan.start
        return (
            isinstance(start, Restore)
            and not self.is_degraded
            and self.n_reused is not None
            and self.n_reused < start.n_reused
        )

    @property
    def is_drift(self) -> bool:
        """Whether more was reused than the slot was believed to hold."""
        start = self.plan.start
        at_most = start.n_common if isinstance(start, Restore) else start.reuse.at_most
        return self.n_reused is not None and not self.is_degraded and self.n_reused > at_most

    @property
    def is_short(self) -> bool:
        """Whether a live slot gave less than it was believed to hold."""
        start = self.plan.start
        return (
            not isinstance(start, Restore)
            and self.n_reused is not None
            and self.n_reused < start.reuse.at_least
        )

    @property
    def outcome(self) -> Outcome:
        if self.is_degraded:
            return Outcome.DEGRADED
        if not self.n_reused:
            return Outcome.MISS
        return Outcome.PARTIAL if self.n_reused < self.plan.start.n_reused else Outcome.HIT

    @property
    def n_restored(self) -> int:
        """How many tokens of the prompt a restore spared llama-server, as the reply confirms."""
        is_restored = isinstance(self.plan.start, Restore) and not self.is_degraded
        return (self.n_reused or 0) if is_restored else 0

    def describe(self) -> dict[str, Any]:
        """Return what was chosen and why, and what came of it: fields of a RequestRecord."""
        plan, start, cuts = self.plan, self.plan.start, self.plan.cuts
        return {
            "slot": plan.slot_id,
            "chosen": plan.option.kind,
            "why": plan.why.value,
            "n_prompt": self.n_prompt,
            "expected": start.n_reused,
            "confirmed": self.n_reused,
            "evaluated": self.n_evaluated,
            "queued_seconds": round(self.queued_seconds, 4),
            "prepared_seconds": round(self.prepared_seconds, 4),
            "saved_seconds": None if self.saved_seconds is None else round(self.saved_seconds, 4),
            "expected_seconds": round(plan.option.seconds, 4),
            "displaced_seconds": round(plan.option.displacement.seconds, 4),
            "alternatives": tuple(_describe(option) for option in plan.alternatives),
            "stops": tuple(stop.n_tokens for stop in plan.stops),
            "cuts": (cuts.header, cuts.turn_start, cuts.branch),
        }


def _describe(option: StartOption) -> str:
    """Return an option that was not chosen in a few words, with what it would have cost."""
    way = f"{option.kind} {option.start.n_reused}" if option.start.n_reused else option.kind
    costs = f"{option.seconds:.3f} s"
    if option.displacement.seconds:
        costs += f" + {option.displacement.seconds:.3f} s displaced"
    return f"{way} in slot {option.slot_id}: {costs}"
