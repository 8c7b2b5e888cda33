"""Plays traces and prints what they cost: `make bench TRACE=interleaved MODEL=hybrid`.

Results are kept in .lab/bench-results.jsonl and taken from there as long as nothing they depend on has
changed, so that an interrupted run goes on where it was. Exit status 1 if a bar is missed.

python -m tests.bench.traces [--trace NAME ...] [--model KIND ...] [--size SIZE ...] [--slots N ...]
                             [--variant VARIANT ...] [--times N] [--again] [--verbose]
                             [--document]
"""

import argparse
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from tests.bench.document import DOCUMENT, document
from tests.bench.interrupts import run_to_the_end
from tests.bench.processes import ProxyError
from tests.bench.progress import tell
from tests.bench.traces.bars import all_sections, summary_section
from tests.bench.traces.catalogue import TRACES
from tests.bench.traces.chart import draw, rows_of
from tests.bench.traces.chat import ChatFailed
from tests.bench.traces.measure import Measurement
from tests.bench.traces.outcomes import Outcomes
from tests.bench.traces.plan import Choice, Planned, plan
from tests.bench.traces.report import requests_table, results_table
from tests.bench.traces.result import ALONE, THROUGH_PROXY, Case, Failure, Result
from tests.bench.traces.stored import StoredResults
from tests.lab.models import MEMORIES, SIZES
from tests.lab.server import LlamaServerError

CHART, CHART_KIND = DOCUMENT.with_name("benchmarks-traces.svg"), "hybrid"
FAILURES = (ChatFailed, ProxyError, LlamaServerError)


async def measure(case: Case, flags: tuple[str, ...] = ()) -> Result | Failure:
    """Measure one case on processes of its own, which are gone afterwards; *flags* are llama-server's."""
    with ExitStack() as leftovers:
        folder = leftovers.enter_context(tempfile.TemporaryDirectory(prefix="prefix-cache-"))
        measurement = Measurement(case, leftovers, Path(folder), flags)
        try:
            return await measurement.run()
        except* FAILURES as failures:
            print(measurement.stack.log_tail(), file=sys.stderr)
            reasons = [str(failure) for failure in _flatten(failures)]
    return Failure(case, reasons[0])


def _flatten(group: BaseExceptionGroup[Exception]) -> list[Exception]:
    found: list[Exception] = []
    for one in group.exceptions:
        found += _flatten(one) if isinstance(one, BaseExceptionGroup) else [one]
    return found


class Run:
    """Measures what is planned, as far as it was not measured before."""

    def __init__(
        self, stored: StoredResults, *, again: bool, only_known: bool, verbose: bool
    ) -> None:
        self._stored, self._again, self._verbose = stored, again, verbose
        self._only_known = only_known

    async def outcomes(self, planned: list[Planned]) -> list[Result | Failure]:
        """Return the results of all cases, and print each request if wanted."""
        found: list[Result | Failure] = []
        for number, one in enumerate(planned, start=1):
            before = f"{number} of {len(planned)}: {one.case}"
            results: list[Result] = [] if self._again else self._stored.find(one.case)
            found += results[: one.n_times]
            n_missing_from = one.n_times if self._only_known else len(results)
            for time in range(n_missing_from, one.n_times):
                tell(before + (f", {time + 1} of {one.n_times} times" if one.n_times > 1 else ""))
                outcome = await measure(one.case)
                if isinstance(outcome, Result):
                    self._stored.add(outcome)
                found.append(outcome)
            if self._verbose and found:
                _print_requests(found[-1])
        return found


def _print_requests(outcome: Result | Failure) -> None:
    if isinstance(outcome, Result):
        print(f"## {outcome.case}\n\n{requests_table(outcome)}", flush=True)


async def run(arguments: argparse.Namespace) -> int:
    """Measure and print; return the exit status."""
    choice = Choice(
        arguments.trace,
        arguments.model,
        arguments.size,
        arguments.slots,
        arguments.variant,
        arguments.times,
    )
    new_run = Run(
        StoredResults(),
        again=arguments.again,
        only_known=arguments.known,
        verbose=arguments.verbose,
    )
    outcomes = await new_run.outcomes(plan(choice))
    print(results_table(o for o in outcomes if isinstance(o, Result)))
    sections = all_sections(Outcomes(outcomes))
    for section in sections:
        print(section.markdown() + "\n")
    if arguments.document:
        _document(Outcomes(outcomes))
    n_missed = sum(section.n_missed for section in sections)
    tell(f"done, {n_missed} bars missed")
    return 1 if n_missed else 0


def _document(outcomes: Outcomes) -> None:
    document("traces", [summary_section(outcomes)], level=3)
    title = f"Tokens evaluated, {CHART_KIND} model, in multiples of what an exact cache evaluates"
    CHART.write_text(draw(title, rows_of(outcomes, CHART_KIND)))


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description="Play traces of many sessions.")
    allowed: dict[str, Iterable[str]] = {
        "trace": TRACES,
        "model": MEMORIES,
        "size": SIZES,
        "variant": (*THROUGH_PROXY, *ALONE),
    }
    for name, values in allowed.items():
        parser.add_argument(
            f"--{name}", nargs="+", action="extend", choices=tuple(values), default=[]
        )
    parser.add_argument("--slots", nargs="+", action="extend", type=int, default=[])
    parser.add_argument("--times", type=int, default=0, help="results wanted of each case")
    parser.add_argument("--again", action="store_true", help="measure what is known, too")
    parser.add_argument("--known", action="store_true", help="measure nothing that is not known")
    parser.add_argument("--verbose", action="store_true", help="every request")
    parser.add_argument("--document", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    return run_to_the_end(lambda leftovers: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
