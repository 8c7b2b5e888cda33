"""What learning about a llama-server costs: the canary at every start, restores of it at the first."""

import time
from contextlib import ExitStack
from statistics import median
from typing import NamedTuple

from proxy.core.model import CANARY_TOKENS
from tests.bench.progress import tell
from tests.bench.rigs import open_rig
from tests.bench.section import Section
from tests.lab.models import MEMORIES
from tests.lab.rig import Rig

N_TIMES = 3
MOST_SECONDS = 2.0
MOST_TOKENS = 256


async def measure_first_contact(leftovers: ExitStack) -> Section:
    """Return the table: tokens and seconds from the proxy's start until its rule is known."""
    section = Section(
        "First contact with a model and build, and later starts (1.5 MB models)",
        f"at most {MOST_TOKENS:,} tokens and {MOST_SECONDS:g} s once; "
        f"later starts {len(CANARY_TOKENS)} tokens",
        ("memory", "rule", "first: evaluated", "first: s", "later: evaluated", "later: s"),
    )
    for kind in MEMORIES:
        tell(f"first contact, {kind}")
        measured = [await _measure(kind, leftovers) for _ in range(N_TIMES)]
        first_seconds = median(start.first_seconds for start in measured)
        later_seconds = median(start.later_seconds for start in measured)
        n_first, n_later = measured[0].n_first, measured[0].n_later
        is_met = n_first <= MOST_TOKENS and n_later <= len(CANARY_TOKENS)
        seconds = f"{first_seconds:.2f}", f"{later_seconds:.2f}"
        cells = (kind, measured[0].rule, n_first, seconds[0], n_later, seconds[1])
        section.add(*cells, is_met=is_met and first_seconds <= MOST_SECONDS)
    return section


class _Starts(NamedTuple):
    rule: str
    n_first: int
    first_seconds: float
    n_later: int
    later_seconds: float


async def _measure(kind: str, leftovers: ExitStack) -> _Starts:
    async with open_rig(kind, leftovers) as rig:
        n_first = await rig.evaluated()
        # The first start warmed up both processes; a new directory makes the next one a first one.
        first_seconds = await _seconds_to_start(rig, forgets=True)
        assert rig.running.server.process is not None
        rule = rig.running.server.process.rule.kind.value
        before = await rig.evaluated()
        later_seconds = await _seconds_to_start(rig, forgets=False)
        n_later = await rig.evaluated() - before
        return _Starts(rule, n_first, first_seconds, n_later, later_seconds)


async def _seconds_to_start(rig: Rig, *, forgets: bool) -> float:
    await rig.stop_proxy()
    if forgets:
        for path in (rig.server.slot_save_path or rig.server.model).glob("index/*"):
            path.unlink()
    began = time.monotonic()
    await rig.start_proxy()
    return time.monotonic() - began
