"""The `agent` trace with a restart in the middle on real older builds, by memory type.

Builds that are not there are fetched from PyPI. Exit status 1 if a bar is missed.

python -m tests.bench.older_builds [VERSION ...]
"""

import asyncio
import os
import sys

from tests.bench.section import Section
from tests.bench.traces.__main__ import measure
from tests.bench.traces.result import Case, Result
from tests.lab.models import MEMORIES
from tests.lab.older_server import BUILDS, binary_of, install

MOST_RATIO = 1.02


async def measure_builds(versions: list[str]) -> Section:
    """Return the table; what a build does not load is said, and has no bar."""
    section = Section(
        "Older builds: one session, both processes restarted half-way (1.5 MB models, one slot)",
        f"at most {MOST_RATIO} of what an exact cache evaluates",
        ("build", "memory", "evaluated", "exact", "ratio"),
    )
    for version in versions:
        os.environ["LLAMA_SERVER_BIN"] = str(binary_of(version))
        for kind in MEMORIES:
            outcome = await measure(Case("restart", kind, "tiny", 1, "proxy"))
            if isinstance(outcome, Result):
                cells = outcome.n_evaluated, outcome.n_exact, f"{outcome.ratio:.3f}"
                section.add(version, kind, *cells, is_met=outcome.ratio <= MOST_RATIO)
            else:
                section.add(version, kind, "-", "-", outcome.reason.splitlines()[0], is_met=None)
            print(section.rows[-1], file=sys.stderr, flush=True)
    return section


def main() -> int:
    """Measure the builds that the command line names, or those that tests run on."""
    versions = sys.argv[1:] or list(BUILDS)
    for version in versions:
        install(version)
    section = asyncio.run(measure_builds(versions))
    print(section.markdown())
    return 1 if section.n_missed else 0


if __name__ == "__main__":
    sys.exit(main())
