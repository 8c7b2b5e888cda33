"""Measures many hosts with one bucket: `make bench-shared`. As root: hosts are network namespaces.

Prints its tables on stdout. Exit status 1 if a bar is missed. Machines that do something else meanwhile
spoil the times, not the counts.

python -m tests.bench.shared [--model KIND ...] [--row WORDS ...] [PART ...]
"""

import argparse
import sys
from contextlib import ExitStack

from tests.bench.document import document
from tests.bench.interrupts import run_to_the_end
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.bench.shared.breakeven import measure_breakeven
from tests.bench.shared.faults import measure_faults
from tests.bench.shared.hosts import Wanted
from tests.bench.shared.kills import measure_kills
from tests.bench.shared.known import measure_known
from tests.bench.shared.moves import measure_moves
from tests.bench.shared.network import Network
from tests.bench.shared.reuse import measure_reuse
from tests.lab.models import MEMORIES
from tests.lab.server import REPOSITORY

PARTS = {
    "reuse": measure_reuse,
    "moves": measure_moves,
    "faults": measure_faults,
    "known": measure_known,
    "kills": measure_kills,
    "break-even": measure_breakeven,
}
DOCUMENT = REPOSITORY / "docs" / "many-machines.md"


def main() -> int:
    """Run the parts that the command line names; all by default."""
    parser = argparse.ArgumentParser(description="Measure many hosts with one bucket.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--model", action="append", choices=MEMORIES, default=[])
    rows = "only rows that begin so; with it, a part of long tables takes minutes"
    parser.add_argument("--row", action="append", default=[], metavar="WORDS", help=rows)
    parser.add_argument("--document", action="store_true", help=f"write {DOCUMENT.name}")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"not a part: {', '.join(unknown)}; parts: {', '.join(PARTS)}")

    async def run(leftovers: ExitStack) -> int:
        network = Network(leftovers)
        n_missed, wanted = 0, Wanted(tuple(arguments.model), tuple(arguments.row))
        for part in arguments.parts or PARTS:
            section: Section = await PARTS[part](network, leftovers, wanted)
            print(section.markdown() + "\n", flush=True)
            n_missed += section.n_missed
            if arguments.document:
                document(part, [section], path=DOCUMENT)
        tell(f"done, {n_missed} bars missed")
        return 1 if n_missed else 0

    return run_to_the_end(run)


if __name__ == "__main__":
    sys.exit(main())
