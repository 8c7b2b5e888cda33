"""A load that we did not write: NVIDIA's aiperf on llama-server alone and through the proxy, on two slots.

aiperf's reports stay in the folder as it writes them, one folder for each run of processes of its own.
What is there is not measured again. Exit status 1 if a bar is missed, 2 if a run failed; the others go on.

On a GPU (llama-server in LLAMA_SERVER_BIN): --load 'agentic-code, large' --kind hybrid.

python -m tests.bench.neutral_load [--folder FOLDER] [--kind KIND ...] [--load LOAD ...]
                                   [--contender NAME ...] [--times N] [--quick] [--known]
                                   [--document]
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.bench.aiperf import Aiperf, AiperfError, Load, Report
from tests.bench.document import add_page_arguments, prove
from tests.bench.interrupts import run_to_the_end
from tests.bench.processes import ProxyError, Setup, Stack
from tests.bench.progress import tell
from tests.bench.section import Section, spread
from tests.bench.sides import N_HTTP_THREADS, cpu_seconds
from tests.lab.models import MEMORIES
from tests.lab.server import REPOSITORY, LlamaServerError

FOLDER = REPOSITORY / ".lab" / "aiperf"
N_SLOTS = 2
N_CTX = 20480
LOADS = {
    "agentic-code": Load(6, 5),
    "multi-turn": Load(6, 5, is_agentic=False),
    "two conversations": Load(2, 10),
    "agentic-code, small": Load(6, 5),
    "agentic-code, large": Load(6, 5, divisor=4),
}
SMALL = "agentic-code, small"
"""The same on a model that evaluates twenty times slower, as models of real size do."""
LARGE = "agentic-code, large"
"""Prompts twice as long, on a model of real size: only where it is asked for."""
SIZES = {SMALL: "small", LARGE: "27b"}
ENOUGH_SLOTS = "two conversations"
"""Conversations do not outnumber slots, so nothing can be gained."""
N_TIMES = {"agentic-code": 2, ENOUGH_SLOTS: 2}
"""Measured so often, by turns, and others once."""
FAILURES = (AiperfError, ProxyError, LlamaServerError, OSError)
LEAST_GAIN, MOST_LOSS = 2.0, 1.05
PROXY = "proxy"
_RAM = ("--cache-ram", "8192")
_OFTEN = ("--slot-prompt-similarity", "0.95")
ALONE: dict[str, tuple[str, ...]] = {
    "no RAM cache": ("--cache-ram", "0"),
    "defaults": _RAM,
    "similarity": (*_RAM, *_OFTEN),
    "RAM in proportion": _OFTEN,
}
"""llama-server's flags by the name that the tables use."""
IN_PROPORTION = "RAM in proportion"
PROPORTION_MIB = {"tiny": 4, "small": 40, "27b": 8192}
"""A RAM cache for about as many of these conversations as 8 GiB hold of conversations eight times as long
(44,000 tokens) on models of real size, context checkpoints included: 1.5 of Llama 3.1 8B, 1.0 of Gemma 3
27B, 2.3 of a hybrid 27B. Recurrent models: all of them."""
SWEPT = "agentic-code"
FLAGS = {
    SWEPT: tuple(ALONE),
    "multi-turn": ("similarity", IN_PROPORTION),
    SMALL: (IN_PROPORTION,),
    LARGE: ("no RAM cache", IN_PROPORTION),
    ENOUGH_SLOTS: ("defaults", "similarity"),
}
"""What each load is tried with: all on one, elsewhere what did best there."""
_TELLS_NOTHING = {("recurrent", SMALL)}
"""Recurrent states are so small that a RAM cache of any proportion holds all of them."""


Counted = dict[str, float]
"""What one run's folder holds beside aiperf's reports: `n_evaluated` and `cpu_seconds`."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of aiperf; `contender` is the proxy or llama-server with certain flags."""

    kind: str
    load: str
    contender: str
    time: int = 0

    @property
    def name(self) -> str:
        words = f"{self.kind} {self.load} {self.contender} {self.time}"
        return words.replace(",", "").replace(" ", "-")


@dataclass(frozen=True, slots=True)
class Measured:
    """What several runs of one contender said; the properties are medians.

    `n_evaluated` is llama-server's own count, `cpu_seconds` those of llama-server and the proxy together,
    which what else runs on the machine changes least.
    """

    contender: str
    p50s: tuple[float, ...]
    p95s: tuple[float, ...]
    n_evaluated: int
    cpu_seconds: float

    @property
    def p50(self) -> float:
        return median(self.p50s)

    @property
    def p95(self) -> float:
        return median(self.p95s)

    def __str__(self) -> str:
        times = f"{spread(self.p50s)} / {spread(self.p95s)}"
        return f"{times}, {self.n_evaluated:,}, {self.cpu_seconds:.1f} s"


class Bench:
    """Measures runs, as far as the folder does not have them."""

    def __init__(self, folder: Path, leftovers: ExitStack, *, only_known: bool) -> None:
        self._folder, self._leftovers, self._only_known = folder, leftovers, only_known
        self._aiperf = Aiperf(folder)
        self.n_failed = 0

    async def measure(
        self, kind: str, load: str, chosen: list[str], n_times: int | None
    ) -> list[Measured]:
        """Return what each contender needed; by turns, so that the machine's moods hit all alike."""
        contenders = [name for name in (PROXY, *FLAGS[load]) if not chosen or name in chosen]
        reports: dict[str, list[tuple[Report, Counted]]] = {name: [] for name in contenders}
        for time in range(n_times or N_TIMES.get(load, 1)):
            for contender in contenders:
                found = await self._run(Run(kind, load, contender, time))
                reports[contender] += [found] if found else []
        return [
            Measured(
                contender,
                tuple(report.p50 for report, _ in each),
                tuple(report.p95 for report, _ in each),
                round(median(counted["n_evaluated"] for _, counted in each)),
                median(counted["cpu_seconds"] for _, counted in each),
            )
            for contender, each in reports.items()
            if each
        ]

    async def _run(self, run: Run) -> tuple[Report, Counted] | None:
        counted = self._folder / run.name / "counted.json"
        if not counted.exists():
            if self._only_known:
                return None
            tell(run.name)
            try:
                counted.write_text(json.dumps(await self._play(run)))
            except FAILURES as failure:
                tell(f"{run.name} failed: {failure!r}")
                self.n_failed += 1
                return None
        return self._aiperf.report(run.name), json.loads(counted.read_text())

    async def _play(self, run: Run) -> Counted:
        size, load = SIZES.get(run.load, "tiny"), LOADS[run.load]
        flags = ALONE.get(run.contender, ())
        if run.contender == IN_PROPORTION:
            ram = _RAM if run.kind == "recurrent" else ("--cache-ram", str(PROPORTION_MIB[size]))
            flags = (*ram, *flags)
        setup = Setup(
            n_slots=N_SLOTS,
            n_ctx=N_SLOTS * N_CTX * 8 // load.divisor,
            n_threads=1,
            server_arguments=("--threads-http", str(N_HTTP_THREADS), *flags),
        )
        has_proxy = run.contender == PROXY
        stack = Stack(run.kind, size, self._leftovers, has_proxy=has_proxy, setup=setup)
        await stack.start()
        before, used_before = await stack.evaluated_tokens(), _cpu_seconds(stack)
        await self._aiperf.profile(stack.base_url, load, run.name)
        n_evaluated = await stack.evaluated_tokens() - before
        used = _cpu_seconds(stack) - used_before
        await stack.stop()
        return {"n_evaluated": n_evaluated, "cpu_seconds": used}


def _cpu_seconds(stack: Stack) -> float:
    proxy = cpu_seconds(stack.proxy.pid) if stack.proxy else 0.0
    return cpu_seconds(stack.server.pid) + proxy


def compare(found: dict[tuple[str, str], list[Measured]], *, has_all_in_ram: bool) -> Section:
    """Return the table of the proxy beside the best of llama-server alone.

    In practice llama-server's RAM cache does not hold all conversations; the table is of one or the other.
    """
    flags = ALONE.keys() - {IN_PROPORTION} if has_all_in_ram else {IN_PROPORTION, "no RAM cache"}
    holds = "holds every conversation" if has_all_in_ram else "is in proportion"
    section = Section(
        f"aiperf: milliseconds to the first token; the RAM cache {holds}",
        f"p50 and p95 at least {LEAST_GAIN:.0f} times better than the best flags where conversations "
        f"outnumber slots, at most {MOST_LOSS} times as long elsewhere",
        (
            *("memory", "load", "runs", "alone: best flags", "p50", "p95", "evaluated", "CPU, s"),
            *("proxy: p50", "p95", "evaluated", "CPU, s", "alone / proxy: p50", "p95"),
        ),
        n_keys=2,
    )
    for (kind, load), measured in found.items():
        ours = [each for each in measured if each.contender == PROXY]
        alone = sorted((m for m in measured if m.contender in flags), key=lambda m: m.p50)
        if not ours or not alone:
            continue
        best, our, least_p95 = alone[0], ours[0], min(alone, key=lambda m: m.p95)
        gains = best.p50 / our.p50, least_p95.p95 / our.p95
        least = 1 / MOST_LOSS if load == ENOUGH_SLOTS else LEAST_GAIN
        section.add(
            *(kind, load, len(our.p50s), best.contender, spread(best.p50s), spread(least_p95.p95s)),
            *(best.n_evaluated, f"{best.cpu_seconds:.1f}", spread(our.p50s), spread(our.p95s)),
            *(our.n_evaluated, f"{our.cpu_seconds:.1f}"),
            *(f"{gain:.2f}" for gain in gains),
            is_met=min(gains) >= least,
        )
    return section


def flags_tried(found: dict[tuple[str, str], list[Measured]]) -> Section:
    """Return the table of llama-server's flags."""
    section = Section(
        f"llama-server's flags ({SWEPT}): p50 / p95 in ms, tokens evaluated, CPU",
        "",
        ("memory", *ALONE, PROXY),
    )
    for (kind, load), measured in found.items():
        of = {each.contender: str(each) for each in measured}
        if load == SWEPT:
            section.add(kind, *(of.get(name, "") for name in (*ALONE, PROXY)), is_met=None)
    return section


async def run(arguments: argparse.Namespace, leftovers: ExitStack) -> int:
    """Measure and print; return the exit status."""
    bench = Bench(arguments.folder, leftovers, only_known=arguments.known)
    found: dict[tuple[str, str], list[Measured]] = {}
    for kind, load in _chosen(arguments):
        chosen, n_times = arguments.contender, arguments.times
        found[kind, load] = await bench.measure(kind, load, chosen, n_times)
        sections = [compare(found, has_all_in_ram=has_all) for has_all in (False, True)]
        sections.append(flags_tried(found))
        prove(arguments, "aiperf", sections)
    for section in sections:
        print(section.markdown() + "\n", flush=True)
    tell(f"aiperf's own reports: {arguments.folder}")
    is_missed = any(section.n_missed for section in sections)
    return 2 if bench.n_failed else int(is_missed)


def _chosen(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    for kind in arguments.kind or (MEMORIES[-1:] if arguments.quick else MEMORIES):
        telling = [each for each in LOADS if each != LARGE and (kind, each) not in _TELLS_NOTHING]
        for load in arguments.load or ([SWEPT] if arguments.quick else telling):
            yield kind, load


def main() -> int:
    parser = argparse.ArgumentParser(description="Let aiperf load llama-server and the proxy.")
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help=f"of aiperf's reports ({FOLDER})"
    )
    parser.add_argument("--kind", nargs="+", choices=MEMORIES, help="kinds of memory")
    parser.add_argument("--load", nargs="+", choices=tuple(LOADS), help="loads")
    parser.add_argument("--contender", nargs="+", choices=(PROXY, *ALONE), help="all by default")
    parser.add_argument("--quick", action="store_true", help="one kind and load: five minutes")
    parser.add_argument("--known", action="store_true", help="only what the folder has")
    add_page_arguments(parser)
    parser.add_argument(
        "--times", type=int, help=f"{N_TIMES[SWEPT]} on tiny models, 1 of what takes long"
    )
    arguments = parser.parse_args()
    return run_to_the_end(lambda leftovers: run(arguments, leftovers))


if __name__ == "__main__":
    sys.exit(main())
