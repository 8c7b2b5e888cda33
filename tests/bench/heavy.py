"""Measures what bytes cost: on a model whose every state and context checkpoint is 50 MB.

An agent's session with a restart half-way, through the proxy and without it, and what saves and restores
cost a neighbour's stream. Takes a quarter of an hour on two cores.

python -m tests.bench.heavy [agent] [stall]
"""

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.bench.interrupts import run_to_the_end
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.bench.stall import StallBenchmark
from tests.bench.traces.measure import Measurement
from tests.bench.traces.result import Case, Result, Variant
from tests.lab.models import build_model
from tests.lab.server import DEFAULT_MODEL_FOLDER

KIND, SIZE = "hybrid", "heavy"
TRACE = "restart"
PARTS = ("agent", "stall")
VARIANTS: tuple[Variant, ...] = ("alone", "proxy")


async def measure_agent(leftovers: ExitStack) -> Section:
    """Return the table of one session with a restart half-way."""
    section = Section(
        f"An agent's session, both processes restarted half-way ({KIND}, {SIZE})",
        "sooner than llama-server alone",
        (
            *("through", "requests", "evaluated", "exact cache", "first token p50", "p95", "wall"),
            *("written", "kept"),
        ),
    )
    results: list[Result] = []
    for variant in VARIANTS:
        case = Case(TRACE, KIND, SIZE, 2, variant)
        tell(str(case))
        folder = leftovers.enter_context(tempfile.TemporaryDirectory(prefix="prefix-cache-"))
        results.append(await Measurement(case, leftovers, Path(folder)).run())
        _add(section, results[-1], alone=results[0])
    return section


def _add(section: Section, result: Result, *, alone: Result) -> None:
    p50, p95 = result.first_token_quantiles()
    has_proxy = result.case.has_proxy
    sizes = (result.n_written_bytes, result.n_kept_bytes)
    section.add(
        *("proxy" if has_proxy else "llama-server alone", len(result.requests)),
        *(result.n_evaluated, result.n_exact, f"{p50:.2f} s", f"{p95:.2f} s"),
        f"{result.seconds:.0f} s",
        *(f"{n_bytes / 1e6:,.0f} MB" if has_proxy else "-" for n_bytes in sizes),
        is_met=result.seconds < alone.seconds if has_proxy else None,
    )


async def run(parts: list[str], leftovers: ExitStack) -> int:
    """Measure and print; return the exit status."""
    build_model(KIND, SIZE, DEFAULT_MODEL_FOLDER)
    n_missed = 0
    for part in parts:
        if part == "agent":
            section = await measure_agent(leftovers)
        else:
            section = await StallBenchmark(KIND, SIZE, leftovers).run()
        print(section.markdown() + "\n", flush=True)
        n_missed += section.n_missed
    return 1 if n_missed else 0


def main() -> int:
    """Run the parts that the command line names; all by default."""
    parser = argparse.ArgumentParser(description="Measure what bytes cost.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parts = parser.parse_args().parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"not a part: {', '.join(unknown)}; parts: {', '.join(PARTS)}")
    return run_to_the_end(lambda leftovers: run(parts, leftovers))


if __name__ == "__main__":
    sys.exit(main())
