"""Makes docs/proof.md: every part of it, one after the other, in at most three hours (`make proof`).

Each part is a command that writes its own places of the page. One that misses a bar, fails or does not end
in time stops no other. How long each took, and how it ended, is a table on the page. Without the folder of
Mooncake's traces (`--traces`) what needs them is left as it is. With `--quick` a small part of everything
is measured into a copy of the page (some two minutes). Exit status 1 if a bar is missed, 2 if one failed.

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
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tests.bench.document import PROOF, put
from tests.bench.neutral_load import PROXY
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.bench.side_by_side import BY_HAND
from tests.lab.server import REPOSITORY, find_llama_server

CONVERSATION, SYNTHETIC = "conversation_trace.jsonl.gz", "synthetic_trace.jsonl.gz"
FOLDER = REPOSITORY / ".lab" / "proof"
"""Of aiperf's reports."""
SIMULATOR = REPOSITORY / ".lab" / "kvcache-simulator"
END_SECONDS = 60.0
"""For a part that was told to end."""


@dataclass(frozen=True, slots=True)
class Part:
    """A module with its arguments, which are others in a quick run, and the minutes it may take.

    `places` are those of the page that it writes. A test has none: what it holds stands there in prose.
    """

    name: str
    places: tuple[str, ...]
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
    Part(
        *("eviction", ("eviction, conversation, full", "eviction, synthetic, full"), 12),
        _EVICTION,
        (*_EVICTION, *_SOME),
    ),
    Part(
        *("eviction, own traces", ("eviction, agents, full", "eviction, agents, hybrid"), 3),
        _AGENTS,
        (*_AGENTS, *_SOME),
    ),
    Part(
        *("optimum", ("eviction, optimum",), 3),
        (_SECOND, CONVERSATION, SYNTHETIC),
        (_SECOND, SYNTHETIC),
    ),
    Part("wear", ("wear",), 2, _WEAR, _WEAR),
    Part(
        *("KL", ("divergence",), 35),
        (_KL,),
        (_KL, "--seeds", "1", "--cuts", "2", "--kind", "hybrid"),
    ),
    Part("server tests", ("server tests",), 12, (_TESTS,), (_TESTS, "tokenize")),
    Part(
        *("aiperf", ("aiperf",), 40),
        (_AIPERF, "--folder", str(FOLDER), "--times", "2"),
        (_AIPERF, "--folder", f"{FOLDER}-quick", "--quick", "--contender", PROXY, "similarity"),
    ),
    Part("vLLM", ("vllm",), 5, (_VLLM,), (_VLLM, "--kind", "recurrent")),
    Part("kvprof", ("kvprof",), 5, (_KVPROF,), (_KVPROF, "P1")),
    Part(
        *("canary", ("canary",), 25),
        (_CANARY,),
        (_CANARY, "2026.9.11063", "--rule-only", "--kind", "full"),
    ),
    Part("defects", (), 3, _UPSTREAM, (*_UPSTREAM, "-k", "damaged")),
    Part("replayed traces", (), 5, (*_REPLAYED, "-m", ""), (*_REPLAYED, "-k", "replayed")),
    Part(
        *("side by side", ("side by side, full", "side by side, hybrid"), 30),
        (_BESIDE, "--times", "2"),
        (_BESIDE, "--kind", "hybrid", "--trace", "branch", "--contender", BY_HAND, PROXY),
    ),
)
ALL_MINUTES = 180.0


class Ending(StrEnum):
    """How a part ended."""

    MET = "met"
    MISSED = "a bar is missed"
    FAILED = "**failed**"
    LATE = "**not ended in time**"
    NOT_RUN = "not run: no TRACES=folder; older tables stand"


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


def status_within(seconds: float, command: list[str]) -> int | None:
    """Run a command and return its exit status, or None if it had to be ended.

    What it started in its own group is gone afterwards. Ctrl-C ends the command first.
    """
    environment = os.environ | {"PYTHONPATH": str(SIMULATOR)}
    process = subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=sys.stderr, start_new_session=True
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def machine() -> str:
    """Return what it was measured on, when and of which commit, in a sentence."""
    said = subprocess.run([find_llama_server(), "--version"], capture_output=True, text=True)
    lines = (line for line in (said.stdout + said.stderr).splitlines() if "version:" in line)
    version = next(lines, "version: unknown").partition("version: ")[2]
    git = ["git", "-C", str(REPOSITORY), "log", "-1", "--format=%h"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    models = [
        line.partition(": ")[2]
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return (
        f"{time.strftime('%Y-%m-%d', time.gmtime())}, commit {commit}, {os.cpu_count()} CPU cores "
        f"({models[0] if models else 'unknown'}), load average {os.getloadavg()[2]:.1f} before; "
        f"llama-server {version}."
    )


def run(given: argparse.Namespace, page: Path) -> Iterator[tuple[Part, float, Ending]]:
    """Run the parts; yield each with the seconds it took. None outlives the three hours."""
    ends_at = time.monotonic() + 60 * ALL_MINUTES
    for part in PARTS:
        if given.only and part.name not in given.only:
            continue
        if part.needs_traces and not given.traces:
            tell(f"{part.name}: {Ending.NOT_RUN}")
            yield part, 0.0, Ending.NOT_RUN
            continue
        command = command_of(part, given.traces, page, is_quick=given.quick)
        tell(f"{part.name}: begins; at most {part.minutes:.0f} minutes")
        for folder in (word for word in command if word.startswith(str(FOLDER))):
            shutil.rmtree(folder, ignore_errors=True)  # what is there would not be measured again
        written_at, began = page.stat().st_mtime_ns, time.monotonic()
        status = status_within(min(60 * part.minutes, ends_at - began), command)
        ending = ending_of(part, status, is_written=page.stat().st_mtime_ns != written_at)
        seconds = time.monotonic() - began
        tell(f"{part.name}: {ending}, {seconds:.0f} s")
        yield part, seconds, ending


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
    section = Section("Parts", "", ("part", "command: `python -m`", "minutes", "result"))
    section.note, endings = machine(), set[Ending]()
    for part, seconds, ending in run(given, page):
        words = part.quick if given.quick else part.arguments
        command = shlex.join(word.replace(f"{REPOSITORY}/", "") for word in words)
        section.add(part.name, f"`{command}`", f"{seconds / 60:.1f}", ending, is_met=None)
        endings.add(ending)
        if not given.only:
            page.write_text(put(page.read_text(), "parts", section.markdown(3)))
    print(section.markdown())
    tell(f"written: {page}")
    return 2 if endings & {Ending.FAILED, Ending.LATE} else int(Ending.MISSED in endings)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
