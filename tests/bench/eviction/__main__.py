"""How much of what Belady's optimum saves our eviction saves, and others: by trace and budget.

A budget is a part of the working set: the bytes of all distinct blocks of the trace. *learned* is the best
order that turns and pauses can tell, learned from half of the very trace. Exit status 1 if a bar is missed.
Mooncake's traces: github.com/kvcache-ai/Mooncake, FAST25-release/traces.

python -m tests.bench.eviction --trace PATH [PATH ...] [--memory full hybrid] [--budget 1 2 5 ...]
                               [--policy NAME ...] [--document]    (`--trace agents`: our own traces)
"""

import argparse
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

from tests.bench.document import add_page_arguments, prove
from tests.bench.eviction.learned import Learned
from tests.bench.eviction.play import Saved, play, play_optimum
from tests.bench.eviction.policies import POLICIES as OTHERS
from tests.bench.eviction.shelf import MEMORIES
from tests.bench.eviction.trace import AGENTS, BLOCK_TOKENS, n_distinct_blocks, read_trace
from tests.bench.section import Section

BUDGETS = (1, 2, 5, 10, 20, 50)
"""Percent of the working set."""
BEATEN = ("LRU", "S3-FIFO")
NEAR_OPTIMUM = {"conversation": (10, 0.9)}
"""At this budget ours is to save this share of what Belady saves."""
POLICIES = {**OTHERS, "learned": Learned}
OF_OTHERS, OF_AGENTS = "eviction", "eviction, own traces"
"""The places of the page."""


def saved_by(trace_name: str, memory_name: str, policy: str, percent: int) -> Saved:
    """Play one trace once."""
    trace, memory = read_trace(trace_name), MEMORIES[memory_name]
    n_blocks = n_distinct_blocks(trace) * percent // 100
    if policy == OPTIMUM:
        return play_optimum(trace, n_blocks)
    budget_bytes = n_blocks * BLOCK_TOKENS * memory.token_bytes
    return play(trace, memory, POLICIES[policy], budget_bytes)


OPTIMUM = "Belady"


def new_section(traces: list[str], policies: list[str]) -> Section:
    """Return the table without rows; a trace on a memory type has one for each budget."""
    names = [short_name(trace) for trace in traces]
    near = (
        f"on {name} also {share} of Belady's at {at} %"
        for name, (at, share) in NEAR_OPTIMUM.items()
        if name in names
    )
    return Section(
        f"Eviction: {', '.join(names)}",
        "; ".join([f"ours not below {' and '.join(BEATEN)}", *near]),
        (
            *("trace", "budget, % of the working set", "Belady: hit rate"),
            *(*policies, f"ours less {' or '.join(BEATEN)}"),
        ),
        n_keys=2,
    )


def measure(
    section: Section, trace_name: str, memory_name: str, percents: list[int], policies: list[str]
) -> None:
    """Add the rows of one trace on one memory type."""
    name = short_name(trace_name)
    near_at, near_share = NEAR_OPTIMUM.get(name, (0, 0.0))
    cases = list(product([OPTIMUM, *policies], percents))
    with ProcessPoolExecutor(2) as pool:
        play_one = partial(saved_by, trace_name, memory_name)
        found = dict(zip(cases, pool.map(play_one, *zip(*cases, strict=True)), strict=True))
    for percent in percents:
        best = found[OPTIMUM, percent]
        shares = {p: found[p, percent].seconds / best.seconds for p in policies}
        cells = (f"{share:.3f}" for share in shares.values())
        lead, is_met = judged(shares, near_share if percent == near_at else 0.0)
        row = f"{name}, {memory_name}", percent, f"{best.hit_rate:.3f}"
        section.add(*row, *cells, lead, is_met=is_met)


def judged(shares: Mapping[str, float], least: float) -> tuple[str, bool | None]:
    """Return how far ours is before the better of its rivals, and whether it meets the bar.

    `least` is the share of Belady's that it has to save. Without ours or all rivals nothing is judged.
    """
    if not {"ours", *BEATEN} <= shares.keys():
        return "-", None
    lead = shares["ours"] - max(shares[rival] for rival in BEATEN)
    return f"{lead:+.5f}", lead >= 0 and shares["ours"] >= least


def short_name(trace_name: str) -> str:
    return Path(trace_name).name.split(".")[0].removesuffix("_trace")


def main() -> int:
    """Play what the command line names."""
    parser = argparse.ArgumentParser(description="Compare eviction with the optimum.")
    parser.add_argument("--trace", nargs="+", required=True, help=f"a path, or `{AGENTS}`")
    parser.add_argument("--memory", nargs="+", default=["full"], choices=tuple(MEMORIES))
    parser.add_argument("--budget", nargs="+", type=int, default=list(BUDGETS), metavar="PERCENT")
    parser.add_argument("--policy", nargs="+", default=list(POLICIES), choices=tuple(POLICIES))
    add_page_arguments(parser)
    given = parser.parse_args()
    section = new_section(given.trace, given.policy)
    for trace, memory in product(given.trace, given.memory):
        measure(section, trace, memory, given.budget, given.policy)
    print(section.markdown(), flush=True)
    prove(given, OF_AGENTS if AGENTS in given.trace else OF_OTHERS, [section])
    return 1 if section.n_missed else 0


if __name__ == "__main__":
    sys.exit(main())
