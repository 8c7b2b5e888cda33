"""Measures conversations that move: their model is swapped out and comes back, or another llama-server
with the same model takes over.

Prints its tables of docs/benchmarks.md on stdout, with --document writes them there as well. Exit status 1
if a bar is missed. Machines that do something else meanwhile spoil the times, not the counts.

python -m tests.bench.moves [--document]
"""

import argparse
import sys
from contextlib import ExitStack

from tests.bench.document import document
from tests.bench.hosts import measure_swap_times, measure_swaps
from tests.bench.interrupts import run_to_the_end
from tests.bench.pairs import measure_pairs
from tests.bench.progress import tell


async def run(leftovers: ExitStack, *, documents: bool) -> int:
    """Measure, print and document; return the exit status."""
    sections = [
        await measure_swaps(leftovers),
        await measure_swap_times(leftovers),
        await measure_pairs(leftovers),
    ]
    for section in sections:
        print(section.markdown() + "\n", flush=True)
    if documents:
        document("moves", sections, level=3)
    n_missed = sum(section.n_missed for section in sections)
    tell(f"done, {n_missed} bars missed")
    return 1 if n_missed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure conversations that move.")
    parser.add_argument("--document", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    return run_to_the_end(lambda leftovers: run(leftovers, documents=arguments.document))


if __name__ == "__main__":
    sys.exit(main())
