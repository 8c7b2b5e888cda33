"""What the proxy adds, paired and interleaved with llama-server alone in one run: `make bench-overhead`.

Each side has a llama-server of its own with one thread and the tiny hybrid model. Prints tables on stdout;
--document writes them into docs/benchmarks.md as well. Exit status 1 if a bar is missed.

python -m tests.bench.overhead [PART ...] [--tokens N ...] [--streams N ...] [--times N] [--pinned]
                               [--document]
"""

import argparse
import sys
from contextlib import ExitStack

from tests.bench.document import document
from tests.bench.hot import BARS, measure_hot, measure_messages
from tests.bench.interrupts import run_to_the_end
from tests.bench.memory import measure_memory
from tests.bench.passthrough import measure_passthrough
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.bench.sides import keep_to_our_core
from tests.bench.streams import N_TOKENS, measure_streams
from tests.bench.walls import measure_walls

PINNED_PARTS = ("hot", "messages", "streams", "passthrough")
PARTS = (*PINNED_PARTS, "walls", "memory")


async def measure(part: str, arguments: argparse.Namespace, leftovers: ExitStack) -> list[Section]:
    """Return the tables of one part."""
    n_times, is_pinned = arguments.times, arguments.pinned
    match part:
        case "hot":
            return await measure_hot(leftovers, arguments.tokens, n_times, is_pinned=is_pinned)
        case "streams":
            return await measure_streams(leftovers, arguments.streams, n_times, is_pinned=is_pinned)
        case "passthrough":
            return await measure_passthrough(leftovers, n_times, is_pinned=is_pinned)
        case "walls":
            return await measure_walls(leftovers, n_times)
        case "messages":
            return await measure_messages(leftovers, n_times, is_pinned=is_pinned)
        case _:
            return await measure_memory(leftovers)


async def run(arguments: argparse.Namespace, leftovers: ExitStack) -> int:
    """Measure, print and document; return the exit status."""
    n_missed = 0
    for part in arguments.parts or (PINNED_PARTS if arguments.pinned else PARTS):
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
    parser.add_argument("--streams", type=int, nargs="+", default=list(N_TOKENS), help="at once")
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
