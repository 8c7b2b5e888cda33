"""What the proxy adds, paired and interleaved with llama-server alone in one run: `make bench-overhead`.

Each side has a llama-server of its own with one thread and the tiny hybrid model. Prints tables on stdout;
--document writes them into docs/benchmarks.md as well. Exit status 1 if a bar is missed.

python -m tests.bench.overhead [PART ...] [--tokens N ...] [--times N] [--pinned] [--document]
"""

import argparse
import sys
from contextlib import ExitStack

from tests.bench.document import document
from tests.bench.hot import BARS, measure_hot
from tests.bench.interrupts import run_to_the_end
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.bench.sides import keep_to_our_core

PARTS = ("hot",)


async def measure(part: str, arguments: argparse.Namespace, leftovers: ExitStack) -> list[Section]:
    """Return the tables of one part."""
    is_pinned = arguments.pinned
    match part:
        case _:
            sizes, n_times = arguments.tokens, arguments.times
            return await measure_hot(leftovers, sizes, n_times, is_pinned=is_pinned)


async def run(arguments: argparse.Namespace, leftovers: ExitStack) -> int:
    """Measure, print and document; return the exit status."""
    n_missed = 0
    for part in arguments.parts or PARTS:
        sections = await measure(part, arguments, leftovers)
        for section in sections:
            print(section.markdown() + "\n", flush=True)
            n_missed += section.n_missed
        if arguments.document:
            document(f"overhead-{part}{'-pinned' if arguments.pinned else ''}", sections, level=3)
    tell(f"done, {n_missed} bars missed")
    return 1 if n_missed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what the proxy adds.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(BARS), help="prompt lengths")
    parser.add_argument("--times", type=int, default=30, help="pairs per row")
    parser.add_argument("--pinned", action="store_true", help="llama-server has a core to itself")
    parser.add_argument("--document", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"not a part: {', '.join(unknown)}; parts: {', '.join(PARTS)}")
    if arguments.pinned:
        keep_to_our_core()
    return run_to_the_end(lambda leftovers: run(arguments, leftovers))


if __name__ == "__main__":
    sys.exit(main())
