"""What one request really reused and evaluated, held against what was expected."""

from dataclasses import dataclass

from proxy.core.explaining.causes import Cause
from proxy.core.explaining.records import Way
from proxy.core.model import Outcome
from proxy.core.planning.options import Option, Restore
from proxy.core.planning.plan import Plan
from proxy.core.rates import Rates
from proxy.upstream.replies import Timings


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

    def describe(self) -> dict[str, object]:
        """Return what was chosen and why, and what came of it: fields of a RequestRecord."""
        start = self.plan.start
        return {
            "slot": self.plan.slot_id,
            "chosen": self.plan.option.kind,
            "why": self.plan.why.value,
            "n_prompt": self.n_prompt,
            "expected": start.n_reused,
            "confirmed": self.n_reused,
            "evaluated": self.n_evaluated,
            "queued_seconds": round(self.queued_seconds, 4),
            "prepared_seconds": round(self.prepared_seconds, 4),
            "saved_seconds": None if self.saved_seconds is None else round(self.saved_seconds, 4),
        }

    def way(self) -> Way:
        """Return what the plan was to cost, and what else there was."""
        plan, cuts = self.plan, self.plan.cuts
        return Way(
            expected_seconds=round(plan.option.seconds, 4),
            displaced_seconds=round(plan.option.displacement.seconds, 4),
            alternatives=tuple(_describe(option) for option in plan.alternatives),
            stops=tuple(stop.n_tokens for stop in plan.stops),
            cuts=(cuts.header, cuts.turn_start, cuts.branch),
        )


def _describe(option: Option) -> str:
    """Return an option that was not chosen in a few words, with what it would have cost."""
    way = f"{option.kind} {option.start.n_reused}" if option.start.n_reused else option.kind
    costs = f"{option.seconds:.3f} s"
    if option.displacement.seconds:
        costs += f" + {option.displacement.seconds:.3f} s displaced"
    return f"{way} in slot {option.slot_id}: {costs}"
