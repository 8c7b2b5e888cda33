"""Cuts the power at every moment of a store's life, and counts what that left wrong.

A store is used at random: states are committed and removed, pinned, values are put, the store is closed or
killed and opened again. Each change of its directory and each sync is recorded. After each of these the
power is cut, in several ways: nothing that was not synced is left, or only names of empty files, or any
part, or everything. Each directory that is left is opened twice; all that the store had promised by then
must be there.

python -m tests.bench.power_cuts [--stories N] [--steps N] [--seed N]
"""

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

from proxy.log import configure_logging
from proxy.store import index
from tests.bench.interrupts import run_section
from tests.bench.section import Section
from tests.conftest import MEMORY
from tests.lab.power_cuts import CUTS, copy_forked
from tests.store.power_story import Story


async def measure_power_cuts(n_stories: int, n_steps: int, seed: int, _: ExitStack) -> Section:
    """Return the table."""
    section = Section(
        "Power cuts",
        "each opens, and nothing is lost or wrong",
        ("left of what was not synced", "moments", "states saved", "wrong"),
    )
    n_moments, n_saved, wrongs = 0, 0, Counter[str]()
    with (
        tempfile.TemporaryDirectory(
            prefix="power-", dir=MEMORY if MEMORY.is_dir() else None
        ) as folder,
        patch.object(index, "_copy_apart", copy_forked),
    ):
        for number in range(seed, seed + n_stories):
            story = Story(Path(folder) / str(number), random.Random(number))
            await story.play(n_steps)
            n_moments += len(story.notes) + 1
            n_saved += len(story.tokens)
            for cut in CUTS:
                for n_notes in range(len(story.notes) + 1):
                    left = Path(folder) / "left"
                    found = await asyncio.to_thread(story.wrongs, n_notes, cut, left)
                    wrongs[cut] += bool(found)
                    for wrong in found:
                        print(f"story {number}, {n_notes} notes, {cut}: {wrong}", flush=True)
    for cut in CUTS:
        section.add(cut, n_moments, n_saved, wrongs[cut], is_met=not wrongs[cut])
    return section


def main() -> int:
    """Measure and print; return 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description="Cut the power under a store.")
    parser.add_argument("--stories", type=int, default=20, metavar="N")
    parser.add_argument("--steps", type=int, default=15, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    asked = parser.parse_args()
    configure_logging("error", "console")
    return run_section(
        lambda left: measure_power_cuts(asked.stories, asked.steps, asked.seed, left)
    )


if __name__ == "__main__":
    sys.exit(main())
