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


def measure(path: str) -> Section:
    """Return the table of one trace."""
    trace, plan = (
        read_trace(path),
        build_execution_plan(parse_trace_file(path, block_size=BLOCK_TOKENS)),
    )
    section = Section(
        f"Optimum of {short_name(path)}, second half",
        "both the same",
        ("budget, % of the working set", "ours", "kvcache-simulator", "its LRU of blocks"),
    )
    for percent in BUDGETS:
        n_blocks = n_distinct_blocks(trace) * percent // 100
        ours = play_optimum(trace, n_blocks, n_before=plan.warmup_requests).hit_rate
        theirs, lru = (simulate_policy(plan, p, n_blocks).hitRate for p in ("optimal", "lru"))
        rates = (f"{rate:.4f}" for rate in (ours, theirs, lru))
        section.add(percent, *rates, is_met=abs(ours - theirs) < _SLACK)
    return section


def main() -> int:
    """Compare what the command line names."""
    parser = argparse.ArgumentParser(description="Compare the optimum with another simulator's.")
    parser.add_argument("path", nargs="+", metavar="PATH")
    add_page_arguments(parser)
    given = parser.parse_args()
    sections = [measure(path) for path in given.path]
    for section in sections:
        print(section.markdown() + "\n")
    prove(given, "eviction, optimum", sections)
    return 1 if any(section.n_missed for section in sections) else 0


if __name__ == "__main__":
    sys.exit(main())
