"""Plays traces and prints what they cost: `make bench TRACE=interleaved MODEL=hybrid`.

python -m tests.bench.traces [--trace NAME ...] [--model KIND ...] [--size SIZE] [--slots N ...]
                             [--variant VARIANT ...] [--verbose]
"""

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.bench.interrupts import run_to_the_end
from tests.bench.progress import tell
from tests.bench.rigs import KINDS
from tests.bench.traces.catalogue import TRACES
from tests.bench.traces.measure import Measurement
from tests.bench.traces.report import requests_table, results_table
from tests.bench.traces.result import ALONE, THROUGH_PROXY, Case, Result, Variant

VARIANTS: tuple[Variant, ...] = (*THROUGH_PROXY, *ALONE)


async def measure(case: Case) -> Result:
    """Measure one case on processes of its own, which are gone afterwards."""
    tell(str(case))
    with ExitStack() as leftovers:
        folder = leftovers.enter_context(tempfile.TemporaryDirectory(prefix="prefix-cache-"))
        measurement = Measurement(case, leftovers, Path(folder))
        try:
            return await measurement.run()
        except BaseException:
            print(measurement.stack.log_tail(), file=sys.stderr)
            raise


async def run(arguments: argparse.Namespace) -> int:
    """Measure and print; return the exit status."""
    results = []
    for case in _cases(arguments):
        result = await measure(case)
        results.append(result)
        if arguments.verbose:
            print(f"## {case}\n\n{requests_table(result)}\n", flush=True)
    print(results_table(results))
    return 0


def _cases(arguments: argparse.Namespace) -> list[Case]:
    return [
        Case(trace, kind, arguments.size, n_slots, variant)
        for trace in arguments.trace
        for n_slots in arguments.slots or TRACES[trace]().slots
        for kind in arguments.model
        for variant in arguments.variant
    ]


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description="Play traces of many sessions.")
    parser.add_argument("--trace", nargs="+", choices=TRACES, default=list(TRACES))
    parser.add_argument("--model", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--size", choices=("tiny", "small"), default="tiny")
    parser.add_argument("--slots", nargs="+", type=int)
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, default=["proxy"])
    parser.add_argument("--verbose", action="store_true", help="every request, too")
    arguments = parser.parse_args()
    return run_to_the_end(lambda leftovers: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
