"""How long the clients of whole traces wait, against llama-server alone."""

import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

from tests.bench.progress import tell
from tests.bench.section import Section
from tests.bench.traces.measure import Measurement
from tests.bench.traces.result import Case, Variant

BARS = {"agent": 1.10, "short": 1.50}
_SLOTS = {"agent": 1, "short": 2}


async def measure_walls(leftovers: ExitStack, n_times: int) -> list[Section]:
    """Return the table; a trace is played by turns, each time on new processes."""
    section = Section(
        "Wall time of traces (hybrid tiny)",
        f"proxy / alone, medians of {n_times}",
        ("trace", "slots", "requests", "alone, s", "proxy, s", "proxy / alone", "at most"),
    )
    for trace, at_most in BARS.items():
        case = Case(trace, "hybrid", "tiny", _SLOTS[trace], "alone")
        walls: dict[Variant, list[float]] = {"alone": [], "proxy": []}
        n_requests = 0
        for i in range(n_times):
            for variant in sorted(walls, reverse=bool(i % 2)):
                tell(f"wall of {trace}, {variant}")
                with tempfile.TemporaryDirectory(prefix="prefix-cache-") as folder:
                    measurement = Measurement(
                        replace(case, variant=variant), leftovers, Path(folder)
                    )
                    result = await measurement.run()
                walls[variant].append(result.seconds)
                n_requests = len(result.requests)
        alone, ours = median(walls["alone"]), median(walls["proxy"])
        section.add(
            *(trace, case.n_slots, n_requests, f"{alone:.2f}", f"{ours:.2f}"),
            *(f"{ours / alone:.2f}", f"{at_most:.2f}"),
            is_met=ours <= at_most * alone,
        )
    return [section]
