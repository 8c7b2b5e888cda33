"""Damages stored states, before a restart of the proxy and while it runs, and counts wrong answers.

Each memory type: conversations are saved, every file is damaged in one of seven ways with its time kept,
and they go on; so twice more with half of the files, whole successors and damaged ones mixed. Then
everything is restarted and they go on. With --unverified files are trusted: what the bench would see.

python -m tests.bench.damage [--files N] [--memory full ...] [--unverified]
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from proxy.log import configure_logging
from proxy.store.files import Verification
from tests.bench.interrupts import run_section
from tests.bench.progress import tell
from tests.bench.rigs import open_rig
from tests.bench.section import Section
from tests.lab.damage import Generations, new_server_alone
from tests.lab.models import MEMORIES, model_path
from tests.lab.server import DEFAULT_MODEL_FOLDER

N_FILES = 2000
N_CONVERSATIONS = 8


async def _measure(kind: str, n_files: int, leftovers: ExitStack) -> list[Generations]:
    runs: list[Generations] = []
    model = model_path(kind, "tiny", DEFAULT_MODEL_FOLDER)
    alone = await asyncio.to_thread(new_server_alone, model, leftovers)
    try:
        while sum(len(run.damaged) for run in runs) < n_files:
            tell(f"damage: {kind}, run {len(runs) + 1}")
            async with open_rig(kind, leftovers) as rig:
                runs.append(Generations(rig, alone, N_CONVERSATIONS, seed=10_000 * len(runs)))
                await runs[-1].run(while_running=len(runs) % 2 == 0)
    finally:
        await asyncio.to_thread(alone.stop)
    return runs


async def measure_damage(n_files: int, kinds: Sequence[str], leftovers: ExitStack) -> Section:
    """Return the table."""
    section = Section(
        "Damaged state files, three generations and a restart of everything",
        "0 wrong answers, 0 dead llama-servers, every damaged file named by check",
        (
            *("memory", "damaged files", "not named by check", "answers", "wrong", "furthest"),
            *("tokens reused", "llama-servers died", "other files damaged at the end"),
        ),
    )
    for kind in kinds:
        runs = await _measure(kind, n_files // len(kinds), leftovers)
        n_not_named, n_wrong = sum(r.n_not_named for r in runs), sum(r.n_wrong for r in runs)
        n_deaths = sum(r.n_deaths for r in runs)
        section.add(
            *(kind, sum(len(r.damaged) for r in runs), n_not_named),
            *(sum(r.n_answers for r in runs), n_wrong, f"{max(r.furthest for r in runs):.3f}"),
            *(sum(r.n_reused for r in runs), n_deaths, sum(r.n_spread for r in runs)),
            is_met=not (n_not_named or n_wrong or n_deaths),
        )
    return section


def _trust_every_file() -> None:
    setattr(Verification, "is_done", lambda *_: True)  # noqa: B010 - mypy knows better


def main() -> int:
    """Measure and print; return 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description="Damage stored states and count wrong answers.")
    parser.add_argument("--files", type=int, default=N_FILES, metavar="N")
    parser.add_argument("--memory", nargs="+", choices=MEMORIES, default=MEMORIES)
    parser.add_argument("--unverified", action="store_true")
    arguments = parser.parse_args()
    configure_logging("error", "console")
    if arguments.unverified:
        _trust_every_file()

    return run_section(partial(measure_damage, arguments.files, arguments.memory))


if __name__ == "__main__":
    sys.exit(main())
