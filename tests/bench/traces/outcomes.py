"""Results of many cases, and which of them stand for a case. Pure."""

from collections.abc import Iterable
from dataclasses import replace
from statistics import median

from tests.bench.traces.result import ALONE, Case, Failure, Result


class Outcomes:
    """The results and failures, by case."""

    def __init__(self, outcomes: Iterable[Result | Failure]) -> None:
        self._results: dict[Case, list[Result]] = {}
        self.failures: list[Failure] = []
        for outcome in outcomes:
            if isinstance(outcome, Failure):
                self.failures.append(outcome)
            else:
                self._results.setdefault(outcome.case, []).append(outcome)

    def cases(self, variant: str, size: str = "tiny") -> list[Case]:
        return [c for c in self._results if c.variant == variant and c.size == size]

    def all_of(self, case: Case) -> list[Result]:
        return self._results.get(case, [])

    def median(self, case: Case) -> Result | None:
        """Return the result with the median ratio; the worse one of two."""
        results = sorted(self.all_of(case), key=lambda result: result.ratio)
        return results[len(results) // 2] if results else None

    def seconds(self, case: Case) -> float:
        """Return the median wall time."""
        return median(result.seconds for result in self.all_of(case))

    def seconds_alone(self, case: Case) -> float:
        """Return the median wall time of llama-server alone, the better one."""
        others = [replace(case, variant=variant) for variant in ALONE]
        return min(self.seconds(other) for other in others if self.all_of(other))

    def alone(self, case: Case) -> Result | None:
        """Return the better one of llama-server alone with and without its RAM cache."""
        found = [self.median(replace(case, variant=variant)) for variant in ALONE]
        return min((r for r in found if r), key=lambda r: r.n_evaluated, default=None)
