"""The optimum by a second simulator, KVCache.AI's kvcache-simulator: its hit rates beside ours.

Both count the second half of the requests, as that simulator does. Exit status 1 if they differ.

`make proof` installs it. python -m tests.bench.eviction.second [--document] PATH [PATH ...]
"""

import argparse
import sys

from kvcache_sim.plan import build_execution_plan  # type: ignore[import-not-found]
from kvcache_sim.policies import simulate_policy  # type: ignore[import-not-found]
from kvcache_sim.trace import parse_trace_file  # type: ignore[import-not-found]

from tests.bench.document import add_page_arguments, prove
from tests.bench.eviction.__main__ import BUDGETS, short_name
from tests.bench.eviction.play import play_optimum
from tests.bench.eviction.trace import BLOCK_TOKENS, n_distinct_blocks, read_trace
from tests.bench.section import Section

_SLACK = 0.0005
"""We count no request as reused to its very last token."""


def measure(section: Section, path: str) -> None:
    """Add the rows of one trace."""
    trace, plan = (
        read_trace(path),
        build_execution_plan(parse_trace_file(path, block_size=BLOCK_TOKENS)),
    )
    for percent in BUDGETS:
        n_blocks = n_distinct_blocks(trace) * percent // 100
        ours = play_optimum(trace, n_blocks, n_before=plan.warmup_requests).hit_rate
        theirs, lru = (simulate_policy(plan, p, n_blocks).hitRate for p in ("optimal", "lru"))
        rates = (f"{rate:.4f}" for rate in (ours, theirs, lru))
        section.add(short_name(path), percent, *rates, is_met=abs(ours - theirs) < _SLACK)


def main() -> int:
    """Compare what the command line names."""
    parser = argparse.ArgumentParser(description="Compare the optimum with another simulator's.")
    parser.add_argument("path", nargs="+", metavar="PATH")
    add_page_arguments(parser)
    given = parser.parse_args()
    section = Section(
        "Hit rate of the optimum, second half of each trace",
        "both the same",
        ("trace", "budget, % of the working set", "ours", "kvcache-simulator", "its LRU of blocks"),
        n_keys=2,
    )
    for path in given.path:
        measure(section, path)
    print(section.markdown())
    prove(given, "eviction, optimum", [section])
    return 1 if section.n_missed else 0


if __name__ == "__main__":
    sys.exit(main())
