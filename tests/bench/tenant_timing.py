"""Does the time of an answer tell whether another API key has sent the same prompt?

Ann sends a prompt and something else; then Bob sends the same prompt, or another one as long that nobody
has sent, and after something else of Ann's the other of the two. A rank test compares his times.

python -m tests.bench.tenant_timing [--pairs 200]
"""

import argparse
import math
import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median

from tests.bench.interrupts import run_section
from tests.bench.processes import Setup, Stack
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.lab.conversation import prose
from tests.lab.server import request
from tests.lab.wrong_keys import bearer

N_PAIRS = 200
N_WORDS = 400
SETUP = Setup(
    server_arguments=("--api-key", "own,ann,bob", "--cache-ram", "0"),
    proxy_options=("--upstream-api-key", "own", "--idle-save-seconds", "0.05"),
)


def ask(base_url: str, key: str, seed: int) -> float:
    """Have a prompt answered; return the seconds that took."""
    body = {"prompt": prose(seed, N_WORDS), "n_predict": 1, "temperature": 0}
    began = time.monotonic()
    status, reply = request(base_url, "POST", "/completion", body, headers=bearer(key))
    assert status == 200, reply
    return time.monotonic() - began


def measure_pairs(base_url: str, n_pairs: int) -> tuple[list[float], list[float]]:
    """Return the seconds of Bob's prompts that Ann has sent, and of those that nobody has."""
    cached, uncached, chance = list[float](), list[float](), random.Random(1)
    for pair in range(n_pairs):
        known, unknown, *others = range(10_000 + 4 * pair, 10_004 + 4 * pair)
        ask(base_url, "ann", known)
        for seed in chance.sample((known, unknown), 2):
            ask(base_url, "ann", others.pop())
            (cached if seed == known else uncached).append(ask(base_url, "bob", seed))
        if pair % 25 == 24:
            tell(f"{pair + 1} pairs: {median(cached):.4f} s and {median(uncached):.4f} s")
    return cached, uncached


def p_value(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the two-sided p of the rank test of Mann and Whitney, by its normal approximation."""
    n_greater = sum((a > b) + (a == b) / 2 for a in left for b in right)
    n = len(left) * len(right)
    deviation = math.sqrt(n * (len(left) + len(right) + 1) / 12)
    return math.erfc(abs(n_greater - n / 2) / deviation / math.sqrt(2))


async def measure_timing(n_pairs: int, leftovers: ExitStack) -> Section:
    """Return the table."""
    columns = ("pairs", "sent by Ann before, median", "sent by nobody, median", "p")
    section = Section("What another key's prompts cost in time", "p > 0.05", columns)
    stack = Stack("hybrid", "tiny", leftovers, has_proxy=True, setup=SETUP)
    await stack.start()
    cached, uncached = measure_pairs(stack.base_url, n_pairs)
    await stack.stop()
    p = p_value(cached, uncached)
    medians = (f"{median(times) * 1000:.1f} ms" for times in (cached, uncached))
    section.add(n_pairs, *medians, f"{p:.2f}", is_met=p > 0.05)
    return section


def main() -> int:
    """Measure and print; return 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description="Compare times across API keys.")
    parser.add_argument("--pairs", type=int, default=N_PAIRS, metavar="N")
    arguments = parser.parse_args()
    return run_section(partial(measure_timing, arguments.pairs))


if __name__ == "__main__":
    sys.exit(main())
