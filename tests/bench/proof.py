"""Makes docs/proof.md: every part of it by one command, in at most three hours (`make proof`).

Each part is a command that writes its own places of the page, into a copy of it. Parts run side by side as
far as the machine has cores; what measures time or keeps all cores busy runs alone. One that misses a bar,
fails or does not end in time stops no other. How long each took, how it ended and when is its row of a
table on the page; rows of parts that do not run now stay. Without the folder of Mooncake's traces
(`--traces`) what needs them does not run. With `--quick` a small part of everything is measured into a
copy of the page (some two minutes). Exit status 1 if a bar is missed, 2 if one failed.

python -m tests.bench.proof [--traces FOLDER] [--quick] [--only PART ...]
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tests.bench.document import PROOF, put, rewrite, taken
from tests.bench.neutral_load import PROXY
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.bench.side_by_side import BY_HAND
from tests.lab.server import REPOSITORY, find_llama_server

CONVERSATION, SYNTHETIC = "conversation_trace.jsonl.gz", "synthetic_trace.jsonl.gz"
FOLDER = REPOSITORY / ".lab" / "proof"
"""Of aiperf's reports."""
SIMULATOR = REPOSITORY / ".lab" / "kvcache-simulator"
N_CORES = 2
POLL_SECONDS = 0.2
END_SECONDS = 60.0
"""For a part that was told to end."""


@dataclass(frozen=True, slots=True)
class Part:
    """A module with its arguments, which are others in a quick run, and the minutes it may take.

    `places` are those of the page that it writes. A test has none: what it holds stands there in prose.
    `n_cores` are all for what measures time, and for what keeps all busy by itself.
    """

    name: str
    places: tuple[str, ...]
    n_cores: int
    minutes: float
    arguments: tuple[str, ...]
    quick: tuple[str, ...]

    @property
    def needs_traces(self) -> bool:
        return any(name in self.arguments for name in (CONVERSATION, SYNTHETIC))

    @property
    def is_test(self) -> bool:
        return not self.places


_EVICTION = ("tests.bench.eviction", "--trace", CONVERSATION, SYNTHETIC)
_AGENTS = ("tests.bench.eviction", "--memory", "full", "hybrid", "--trace", "agents")
_SOME = ("--policy", "ours", "LRU", "S3-FIFO", "--budget", "10")
_SECOND, _WEAR = "tests.bench.eviction.second", ("tests.bench.wear", CONVERSATION, SYNTHETIC)
_KL, _TESTS = "tests.bench.divergence", "tests.bench.server_tests"
_AIPERF, _BESIDE = "tests.bench.neutral_load", "tests.bench.side_by_side"
_VLLM, _KVPROF, _CANARY = "tests.bench.vllm_turns", "tests.bench.kvprof", "tests.bench.canary"
_UPSTREAM = ("pytest", "tests/live/test_upstream.py")
_REPLAYED = ("pytest", "tests/live/test_trace.py")
PARTS = (
    Part(*("eviction", ("eviction",), N_CORES, 6), _EVICTION, (*_EVICTION, *_SOME)),
    Part(*("eviction, own traces", ("eviction, own traces",), 1, 4), _AGENTS, (*_AGENTS, *_SOME)),
    Part(
        *("optimum", ("eviction, optimum",), 1, 2),
        (_SECOND, CONVERSATION, SYNTHETIC),
        (_SECOND, SYNTHETIC),
    ),
    Part("wear", ("wear",), 1, 2, _WEAR, _WEAR),
    Part(
        *("KL", ("divergence",), N_CORES, 34),
        (_KL,),
        (_KL, "--seeds", "1", "--cuts", "2", "--kind", "hybrid"),
    ),
    Part("server tests", ("server tests",), 1, 14, (_TESTS,), (_TESTS, "tokenize")),
    Part(
        *("aiperf", ("aiperf",), N_CORES, 70),
        (_AIPERF, "--folder", str(FOLDER)),
        (_AIPERF, "--folder", f"{FOLDER}-quick", "--quick", "--contender", PROXY, "similarity"),
    ),
    Part("vLLM", ("vllm",), N_CORES, 5, (_VLLM,), (_VLLM, "--kind", "recurrent")),
    Part("kvprof", ("kvprof",), 1, 4, (_KVPROF,), (_KVPROF, "P1")),
    Part(
        *("canary", ("canary",), 1, 25),
        (_CANARY,),
        (_CANARY, "2026.9.11063", "--rule-only", "--kind", "full"),
    ),
    Part("defects", (), 1, 2, _UPSTREAM, (*_UPSTREAM, "-k", "damaged")),
    Part("replayed traces", (), 1, 4, (*_REPLAYED, "-m", ""), (*_REPLAYED, "-k", "replayed")),
    Part(
        *("side by side", ("side by side",), N_CORES, 32),
        (_BESIDE,),
        (_BESIDE, "--kind", "hybrid", "--trace", "branch", "--contender", BY_HAND, PROXY),
    ),
)
ALL_MINUTES = 180.0


def may_begin(waiting: Iterable[Part], running: Collection[Part]) -> list[Part]:
    """Return which of the waiting parts begin now: the longest first, as far as there are cores."""
    begun: list[Part] = []
    for part in sorted(waiting, key=lambda part: -part.minutes):
        if sum(each.n_cores for each in (part, *begun, *running)) <= N_CORES:
            begun.append(part)
    return begun


class Ending(StrEnum):
    """How a part ended."""

    MET = "met"
    MISSED = "a bar is missed"
    FAILED = "**failed**"
    LATE = "**not ended in time**"


def ending_of(part: Part, status: int | None, *, is_written: bool) -> Ending:
    """Return how a part ended; *status* is None for one that was ended.

    Python ends with 1 after an exception too: then nothing was written.
    """
    if status is None:
        return Ending.LATE
    if part.is_test:
        return Ending.FAILED if status else Ending.MET
    if not is_written or status not in (0, 1):
        return Ending.FAILED
    return Ending.MISSED if status else Ending.MET


def command_of(part: Part, traces: Path | None, page: Path, *, is_quick: bool) -> list[str]:
    """Return what runs a part; traces by their names are looked for in the folder."""
    words = part.quick if is_quick else part.arguments
    folder = traces.resolve() if traces else Path()
    found = {name: str(folder / name) for name in (CONVERSATION, SYNTHETIC)}
    rest = [] if part.is_test else [f"--page={page}", "--document"]
    # Behind the module: what takes several words would take the next one.
    return [sys.executable, "-m", words[0], *rest, *(found.get(word, word) for word in words[1:])]


class Job:
    """A part that runs, on a copy of the page, and on ports that the others do not take."""

    def __init__(
        self, part: Part, command: list[str], copy: Path, seconds: float, worker: int
    ) -> None:
        self.part, self.worker, self._copy, self._seconds = part, worker, copy, seconds
        self._copied_at, self._began = copy.stat().st_mtime_ns, time.monotonic()
        environment = {"PYTHONPATH": str(SIMULATOR), "LAB_WORKER": str(worker)}
        self._process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=os.environ | environment,
            stdout=sys.stderr,
            start_new_session=True,
        )

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return time.monotonic() - self._began

    @property
    def is_over(self) -> bool:
        """Whether it has ended or is to be ended."""
        return self._process.poll() is not None or self.seconds >= self._seconds

    def end(self) -> Ending:
        """Return how it ended; what it started in its own group is gone afterwards."""
        status = self._process.poll()
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        return ending_of(self.part, status, is_written=self._is_written)

    @property
    def _is_written(self) -> bool:
        return self._copy.stat().st_mtime_ns != self._copied_at

    def deliver(self, page: Path) -> None:
        """Put what the part has written into the page."""
        measured = self._copy.read_text()

        def with_places(text: str) -> str:
            for place in self.part.places if self._is_written else ():
                text = put(text, place, taken(measured, place))
            return text

        rewrite(page, with_places)


def run(
    parts: Iterable[Part], given: argparse.Namespace, page: Path
) -> Iterator[tuple[Job, Ending]]:
    """Run the parts; yield each that has ended. None outlives the three hours."""
    ends_at = time.monotonic() + 60 * ALL_MINUTES
    waiting, running = list(parts), list[Job]()
    with tempfile.TemporaryDirectory(prefix="proof-") as folder:
        try:
            while waiting or running:
                for part in may_begin(waiting, [job.part for job in running]):
                    waiting.remove(part)
                    worker = min(set(range(N_CORES)) - {job.worker for job in running})
                    copy = Path(shutil.copy(page, f"{folder}/{worker}.md"))
                    command = command_of(part, given.traces, copy, is_quick=given.quick)
                    seconds = min(60 * part.minutes, ends_at - time.monotonic())
                    tell(f"{part.name}: begins; at most {seconds / 60:.0f} minutes")
                    for reports in (word for word in command if word.startswith(str(FOLDER))):
                        shutil.rmtree(reports, ignore_errors=True)  # would not be measured again
                    running.append(Job(part, command, copy, seconds, worker))
                for job in [job for job in running if job.is_over]:
                    ending = job.end()
                    running.remove(job)
                    job.deliver(page)
                    tell(f"{job.part.name}: {ending}, {job.seconds:.0f} s")
                    yield job, ending
                time.sleep(POLL_SECONDS)
        finally:
            for job in running:
                job.end()


def commit() -> str:
    git = ["git", "-C", str(REPOSITORY), "log", "-1", "--format=%h"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"


def machine() -> str:
    """Return what it is measured on, in a sentence."""
    said = subprocess.run([find_llama_server(), "--version"], capture_output=True, text=True)
    lines = (line for line in (said.stdout + said.stderr).splitlines() if "version:" in line)
    version = next(lines, "version: unknown").partition("version: ")[2]
    models = [
        line.partition(": ")[2]
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return (
        f"{os.cpu_count()} CPU cores ({models[0] if models else 'unknown'}); llama-server {version}. "
        "*Load*: the load average of 15 minutes before. Tables of parts without a row are older."
    )


def new_section() -> Section:
    """Return the table of the parts, without rows."""
    columns = ("part", "command: `python -m`", "minutes", "result", "date", "commit", "load")
    return Section("Parts", "", columns, note=machine())


def with_rows(page: str, section: Section) -> str:
    """Return the page with these rows in its table of parts, beside those of other parts."""
    names = [part.name for part in PARTS]
    added = section.with_rows_of(taken(page, "parts"))
    known = [row for row in added.rows if row[0] in names]
    added.rows = sorted(known, key=lambda row: names.index(row[0]))
    return put(page, "parts", added.markdown(3))


def main() -> int:
    """Make the page, or a copy of it; return the exit status."""
    parser = argparse.ArgumentParser(
        description="Make docs/proof.md, in at most three hours on two cores."
    )
    parser.add_argument("--traces", type=Path, help="folder of Mooncake's traces")
    parser.add_argument(
        "--quick", action="store_true", help="a small part, into a copy: two minutes"
    )
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], metavar="PART")
    given = parser.parse_args()
    page = PROOF
    if given.quick:
        page = Path(tempfile.mkdtemp(prefix="proof-")) / PROOF.name
        shutil.copy(PROOF, page)
    chosen = [part for part in PARTS if not given.only or part.name in given.only]
    left_out = [part for part in chosen if part.needs_traces and not given.traces]
    for part in left_out:
        tell(f"{part.name}: not run, as there is no TRACES=folder")
    of = time.strftime("%Y-%m-%d", time.gmtime()), commit(), f"{os.getloadavg()[2]:.1f}"
    section, endings = new_section(), set[Ending]()
    for job, ending in run((part for part in chosen if part not in left_out), given, page):
        words = job.part.quick if given.quick else job.part.arguments
        command = shlex.join(word.replace(f"{REPOSITORY}/", "") for word in words)
        minutes = f"{job.seconds / 60:.1f}"
        section.add(job.part.name, f"`{command}`", minutes, ending, *of, is_met=None)
        endings.add(ending)
        rewrite(page, lambda text: with_rows(text, section))
    print(section.markdown())
    tell(f"written: {page}")
    return 2 if endings & {Ending.FAILED, Ending.LATE} else int(Ending.MISSED in endings)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
