"""Measures the main job on a real llama-server: `make bench`.

Prints its tables on stdout, with --document writes those of docs/benchmarks.md there as well, and says on
stderr what it is doing. Exit status 1 if a bar is missed. Machines that do something else meanwhile spoil
the times, not the counts.

python -m tests.bench.main_job [--document] [PART ...]
"""

import argparse
import sys
from contextlib import ExitStack

from tests.bench.budget import measure_budget
from tests.bench.correctness import measure_correctness
from tests.bench.document import document
from tests.bench.first_contact import measure_first_contact
from tests.bench.first_token import measure_first_token
from tests.bench.interrupts import run_to_the_end
from tests.bench.progress import tell
from tests.bench.request_log import RequestLog
from tests.bench.restarts import measure_restarts
from tests.bench.reuse import ReuseBenchmark
from tests.bench.section import Section

PARTS = ("reuse", "first-token", "correctness", "first-contact", "run", "budget")


async def measure(part: str, leftovers: ExitStack, log: RequestLog) -> list[Section]:
    """Return the tables of one part of the benchmark."""
    match part:
        case "reuse":
            return await ReuseBenchmark(leftovers).run()
        case "first-token":
            return [await measure_first_token(leftovers)]
        case "correctness":
            return [await measure_correctness(leftovers, log)]
        case "first-contact":
            return [await measure_first_contact(leftovers)]
        case "run":
            return [await measure_restarts(leftovers)]
        case _:
            return [await measure_budget(leftovers)]


async def run(parts: list[str], leftovers: ExitStack, *, documents: bool) -> int:
    """Measure, print and document; return the exit status."""
    log = RequestLog()
    n_missed = 0
    for part in parts:
        sections = await measure(part, leftovers, log)
        for section in sections:
            print(section.markdown() + "\n", flush=True)
            n_missed += section.n_missed
        if documents:
            document(part, sections)
    tell(f"done, {n_missed} bars missed")
    return 1 if n_missed else 0


def main() -> int:
    """Run the parts that the command line names; all by default."""
    parser = argparse.ArgumentParser(description="Measure the main job.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--document", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    parts = arguments.parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"not a part: {', '.join(unknown)}; parts: {', '.join(PARTS)}")
    return run_to_the_end(lambda leftovers: run(parts, leftovers, documents=arguments.document))


if __name__ == "__main__":
    sys.exit(main())
