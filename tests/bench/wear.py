"""What saving writes to a disk, on our traces and on others, and how long an SSD lasts.

Modelled, not played, with the product's own judgement whether a save is worth its seconds. A request's
state is written whole, unless the next request of its conversation comes within `idle_save_seconds`, and
before others have taken every slot. Beside it, what a store of blocks would write: each block once. Our own
traces have no times, so they are counted at two paces. Speeds are the proxy's defaults: 500 tokens and 1 GB
a second.

python -m tests.bench.wear [--slots N] [--idle SECONDS] [--document] [PATH ...]
                            (PATH: a trace in Mooncake's format)
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace

from proxy.core.rates import Rates
from proxy.core.saving import is_worth_saving
from proxy.core.slots import Known
from proxy.core.tokens import Namespace, token_ids
from proxy.settings import Settings
from tests.bench.document import add_page_arguments, prove
from tests.bench.eviction.__main__ import short_name
from tests.bench.eviction.shelf import MEMORIES, Memory
from tests.bench.eviction.trace import (
    AGENTS,
    BLOCK_TOKENS,
    Asked,
    earlier_of,
    n_distinct_blocks,
    read_trace,
)
from tests.bench.section import Section

PACES_SECONDS = (5.0, 20.0)
"""From one request of our own traces to the next: loops of tools, and users who read."""
PATIENT_SECONDS = 60.0
"""`idle_save_seconds` of a user who reads long, in a row of its own."""
LIFE_BYTES, N_A_DAY = 600e12, 1000
N_POINTS = 2
"""Context checkpoints that a thinned file of a hybrid model keeps."""
RATES = Rates()


@dataclass(frozen=True, slots=True)
class Wear:
    """How often and how much was written, and how many prompt tokens earlier requests had."""

    n_saves: int
    n_bytes: int
    n_known: int


def wear_of(trace: list[Asked], memory: Memory, n_slots: int, idle_seconds: float) -> Wear:
    """Return what the requests of a trace would have written."""
    before = list(earlier_of(trace))
    goes_on_at = {earlier: number for number, earlier in enumerate(before) if earlier is not None}
    n_points = N_POINTS if memory.point_bytes else 0
    saved: list[int] = []  # tokens of each request's conversation that a file has
    written: list[int] = []
    seen, n_known = set[int](), 0
    for number, (asked, earlier) in enumerate(zip(trace, before, strict=True)):
        n_blocks = next((i for i, b in enumerate(asked.blocks) if b not in seen), len(asked.blocks))
        n_known += min(n_blocks * BLOCK_TOKENS, asked.n_prompt - 1)
        seen.update(asked.blocks)
        n_saved = 0 if earlier is None else saved[earlier]
        n_tokens = asked.n_prompt + asked.n_answer
        size_bytes = memory.state_bytes(n_tokens, n_points)
        content = Known(token_ids([]), Namespace(b""), n_tail=n_tokens, n_saved=n_saved)
        later = goes_on_at.get(number)
        is_kept_hot = (
            later is not None
            and trace[later].at - asked.at <= idle_seconds
            and later - number <= n_slots
        )
        if not is_kept_hot and is_worth_saving(content, content.n_unsaved, size_bytes, RATES):
            written.append(size_bytes)
            n_saved = n_tokens
        saved.append(n_saved)
    return Wear(len(written), sum(written), n_known)


def measure(paths: list[str], n_slots: int, idle_seconds: float) -> Section:
    """Return the table of all traces on each memory type."""
    section = Section(
        f"Wear: {n_slots} slots",
        "",
        (
            *("trace", "memory, kB a token", "requests", "saves", "GB written"),
            *("each block once, GB", "times as much", "kB per token reused"),
            *(f"GB for {N_A_DAY:,} requests", f"600 TB last, at {N_A_DAY:,} a day, years"),
        ),
        n_keys=2,
    )
    for memory_name, memory in MEMORIES.items():
        for title, trace, idle in _traces(paths, idle_seconds):
            wear = wear_of(trace, memory, n_slots, idle)
            each_once = n_distinct_blocks(trace) * BLOCK_TOKENS * memory.token_bytes
            day_bytes = wear.n_bytes / len(trace) * N_A_DAY
            section.add(
                *(title, f"{memory_name}, {memory.token_bytes // 1000}", len(trace), wear.n_saves),
                *(f"{wear.n_bytes / 1e9:,.0f}", f"{each_once / 1e9:,.0f}"),
                *(f"{wear.n_bytes / each_once:.1f}", f"{wear.n_bytes / 1000 / wear.n_known:.0f}"),
                *(f"{day_bytes / 1e9:,.0f}", f"{LIFE_BYTES / day_bytes / 365:.1f}"),
                is_met=None,
            )
    return section


def _traces(paths: list[str], idle_seconds: float) -> Iterator[tuple[str, list[Asked], float]]:
    """Yield traces with the idle seconds after which they are saved."""
    own = read_trace(AGENTS)
    for pace in PACES_SECONDS:
        paced = [replace(asked, at=number * pace) for number, asked in enumerate(own)]
        yield f"ours, every {pace:.0f} s", paced, idle_seconds
    yield f"the same, idle {PATIENT_SECONDS:.0f} s", paced, PATIENT_SECONDS
    for path in paths:
        yield short_name(path), read_trace(path), idle_seconds


def main() -> None:
    """Print the table."""
    idle_seconds = Settings(slot_save_path="").idle_save_seconds
    parser = argparse.ArgumentParser(description="Estimate what is written.")
    parser.add_argument("paths", nargs="*", metavar="PATH")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--idle", type=float, default=idle_seconds, help="idle_save_seconds")
    add_page_arguments(parser)
    given = parser.parse_args()
    section = measure(given.paths, given.slots, given.idle)
    print(section.markdown())
    prove(given, "wear", [section])


if __name__ == "__main__":
    main()
