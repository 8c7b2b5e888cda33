"""Measures conversations that move: their model is swapped out and comes back, or another llama-server
with the same model takes over.

Prints its tables on stdout. Exit status 1 if a bar is missed. Machines that do something else meanwhile
spoil the times, not the counts.

python -m tests.bench.moves
"""

import argparse
import sys
from contextlib import ExitStack

from tests.bench.hosts import measure_swap_times, measure_swaps
from tests.bench.interrupts import run_to_the_end
from tests.bench.pairs import measure_pairs
from tests.bench.progress import tell


async def run(leftovers: ExitStack) -> int:
    """Measure and print; return the exit status."""
    sections = [
        await measure_swaps(leftovers),
        await measure_swap_times(leftovers),
        await measure_pairs(leftovers),
    ]
    for section in sections:
        print(section.markdown() + "\n", flush=True)
    n_missed = sum(section.n_missed for section in sections)
    tell(f"done, {n_missed} bars missed")
    return 1 if n_missed else 0


def main() -> int:
    argparse.ArgumentParser(description="Measure conversations that move.").parse_args()
    return run_to_the_end(run)


if __name__ == "__main__":
    sys.exit(main())
