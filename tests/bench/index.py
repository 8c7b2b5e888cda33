"""Opening, lookups, evictions and memory by the number of checkpoints: make bench-index

Most checkpoints are short chats behind one of ten headers, 200 are conversations of 128,000 tokens. State
files are sparse: nothing here reads them. A million checkpoints are an index without files, which is not
opened as a store. Memory is that of an idle proxy before an address where nothing answers: pages of the
mapped index that were read count as resident until the kernel needs them.

python -m tests.bench.index [--checkpoints N ...] [--folder KEPT]
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from proxy.core.eviction import Present
from proxy.core.model import Checkpoint, CheckpointId, CheckpointKind, FilePart, Rule, RuleKind
from proxy.core.plan import promising
from proxy.core.tokens import Namespace, TokenIds, hash_prefixes, token_ids
from proxy.store.catalogue import Catalogue
from proxy.store.directory import keep_proxies_out
from proxy.store.index import Entry, Index
from proxy.store.store import CheckpointStore
from tests.bench.interrupts import run_to_the_end
from tests.bench.processes import ProxyProcess, Setup
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.lab.server import REPOSITORY

SIZES = (10_000, 100_000, 1_000_000)
MOST_FILES = 200_000
NAMESPACE = Namespace(b"benchmark of ind")
N_HEADERS, HEADER_TOKENS = 10, 512
N_LONG, LONG_TOKENS = 200, 128_000
BYTES_PER_TOKEN = 10_000
N_AT_ONCE, N_LOOKUPS, N_EVICTIONS = 2_000, 1_000, 20
MAX_OPENING_SECONDS, MAX_LOOKUP_MS, MAX_PRIVATE_MB = 1.0, 2.0, 120
UNLIMITED = 1 << 59

Times = dict[str, tuple[float, float]]


def _tokens(seed: int, n_tokens: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 150_000, n_tokens, np.int32).tobytes()


def prompt_of(number: int) -> TokenIds:
    """Return the tokens of one checkpoint of the benchmark."""
    n_tokens = LONG_TOKENS if number < N_LONG else HEADER_TOKENS + 64 + number % 1000
    header = _tokens(number % N_HEADERS, HEADER_TOKENS)
    return token_ids(header + _tokens(1000 + number, n_tokens - HEADER_TOKENS))


def _entry(number: int, now: float) -> Entry:
    tokens = prompt_of(number)
    n_bytes = len(tokens) * BYTES_PER_TOKEN
    checkpoint = Checkpoint(
        id=CheckpointId(number),
        namespace=NAMESPACE,
        kind=CheckpointKind.CONVERSATION,
        n_tokens=len(tokens),
        restore_points=(HEADER_TOKENS, len(tokens) - 32),
        has_every_position=False,
        file_name=f"lpc-{number * 2:016x}.state",
        size_bytes=n_bytes,
        created_at=now,
        last_used_at=now - 10.0 * number,
        header=HEADER_TOKENS,
        turn_start=len(tokens) - 32,
        parts=(FilePart(n_bytes, b"d" * 16),),
        verified_at=now,
    )
    return checkpoint, tokens, hash_prefixes(NAMESPACE, tokens)


def build(folder: Path, n_checkpoints: int) -> None:
    """Fill *folder* with a store, unless it has one."""
    if (folder / "built").exists():
        return
    with keep_proxies_out(folder, creates_lock=True):
        index = Index(folder / "index")
        for first in range(0, n_checkpoints, N_AT_ONCE):
            now = time.time()
            entries = [_entry(n, now) for n in range(first, min(first + N_AT_ONCE, n_checkpoints))]
            index.put(*entries)
            for checkpoint, _, _ in entries if n_checkpoints <= MOST_FILES else ():
                path = folder / checkpoint.file_name
                path.with_suffix(".meta").touch()
                with path.open("wb") as file:
                    file.truncate(checkpoint.size_bytes)
        index.close()
    (folder / "built").touch()


def measure(folder: Path, n_checkpoints: int) -> None:
    """Print what opening, lookups and evictions take; for a process of its own."""
    began = time.perf_counter()
    if n_checkpoints <= MOST_FILES:
        catalogue: Catalogue = CheckpointStore(folder, UNLIMITED)
        assert len(catalogue) == n_checkpoints
    else:
        catalogue = Catalogue(Index(folder / "index"))
    times: Times = {"opening": (1000 * (time.perf_counter() - began), 0.0)}
    times |= {way: _percentiles(look) for way, look in _lookups(catalogue).items()}
    present = Present(time.time())
    times["victim"] = _percentiles(iter([lambda: catalogue.victims(1, present)] * N_EVICTIONS))
    print(json.dumps(times))
    catalogue.index.close()


def _lookups(store: Catalogue) -> dict[str, Iterator[Callable[[], object]]]:
    """Return lookups of prompts of 128,000 tokens: of a stored one, of a header's, of nothing."""

    def look(*parts: bytes) -> Callable[[], object]:
        tokens, rule = token_ids(b"".join(parts)), Rule(RuleKind.RESTORE_POINTS)
        return lambda: promising(rule, store.find(NAMESPACE, tokens), len(tokens))

    n_most, shared = LONG_TOKENS - 8_000, HEADER_TOKENS * 4
    turns = (n % N_LONG for n in range(N_LOOKUPS))
    return {
        "goes on from a stored one": (
            look(prompt_of(n).tobytes()[: n_most * 4], _tokens(1, 8_000)) for n in turns
        ),
        "shares a header": (
            look(prompt_of(n).tobytes()[:shared], _tokens(2 + n, LONG_TOKENS - HEADER_TOKENS))
            for n in range(N_LOOKUPS)
        ),
        "is new": (look(_tokens(9_000_000 + n, LONG_TOKENS)) for n in range(N_LOOKUPS)),
    }


def _percentiles(works: Iterator[Callable[[], object]]) -> tuple[float, float]:
    """Return the median and the 99th percentile, in ms."""
    times = []
    for work in works:
        began = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - began))
    times.sort()
    return times[len(times) // 2], times[int(len(times) * 0.99)]


async def resident(folder: Path, leftovers: ExitStack) -> tuple[float, float]:
    """Return the resident memory of an idle proxy, and what of it is not mapped files, in MB."""
    log = Path(leftovers.enter_context(tempfile.TemporaryDirectory())) / "proxy.log"
    options = ("--max-store-bytes", f"{UNLIMITED >> 40}TiB")
    proxy = ProxyProcess("http://127.0.0.1:9", folder, log, Setup(proxy_options=options))
    leftovers.callback(proxy.kill)
    proxy.start()
    await proxy.reachable()
    status = await asyncio.to_thread(Path(f"/proc/{proxy.pid}/status").read_text)
    fields = dict(line.split(":", 1) for line in status.splitlines())
    await asyncio.to_thread(proxy.stop)
    rss, anonymous = (int(fields[name].split()[0]) / 1000 for name in ("VmRSS", "RssAnon"))
    return rss, anonymous


async def measure_all(sizes: list[int], kept: Path | None, leftovers: ExitStack) -> Section:
    """Return the table."""
    section = Section(
        "Many checkpoints",
        f"lookups of 128,000 tokens: p99 at most {MAX_LOOKUP_MS:.0f} ms; 100,000 checkpoints open in "
        f"{MAX_OPENING_SECONDS:.0f} s, with {MAX_PRIVATE_MB} MB of private memory",
        ("checkpoints", "what", "median", "p99"),
    )
    for n_checkpoints in sizes:
        top = kept or Path(leftovers.enter_context(tempfile.TemporaryDirectory(prefix="index-")))
        (folder := top / str(n_checkpoints)).mkdir(parents=True, exist_ok=True)
        tell(f"index: {n_checkpoints:,} checkpoints")
        await asyncio.to_thread(build, folder, n_checkpoints)
        command = [sys.executable, "-m", "tests.bench.index", "--checkpoints", str(n_checkpoints)]
        command += ["--measure", "--folder", str(folder)]
        output = await asyncio.to_thread(subprocess.check_output, command, cwd=REPOSITORY)
        times: Times = json.loads(output)
        (opening_ms, _), victim = times.pop("opening"), times.pop("victim")
        is_bar = n_checkpoints == 100_000
        if n_checkpoints <= MOST_FILES:
            is_met = opening_ms <= 1000 * MAX_OPENING_SECONDS
            opening = f"{opening_ms / 1000:.2f} s"
            section.add(
                f"{n_checkpoints:,}", "opening", opening, "", is_met=is_met if is_bar else None
            )
            rss, private = await resident(folder, leftovers)
            memory = f"{rss:.0f} MB resident, {private:.0f} MB of it private"
            is_met = private <= MAX_PRIVATE_MB
            section.add(
                f"{n_checkpoints:,}", "memory", memory, "", is_met=is_met if is_bar else None
            )
        for way, (p50, p99) in times.items():
            cells = (f"{n_checkpoints:,}", f"lookup: {way}", f"{p50:.2f} ms", f"{p99:.2f} ms")
            section.add(*cells, is_met=p99 <= MAX_LOOKUP_MS)
        p50, p99 = victim
        section.add(f"{n_checkpoints:,}", "who goes", f"{p50:.1f} ms", f"{p99:.1f} ms", is_met=None)
    return section


def main() -> int:
    """Measure and print; return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description="Measure an index with many checkpoints.")
    parser.add_argument("--checkpoints", type=int, nargs="+", default=list(SIZES), metavar="N")
    parser.add_argument("--folder", type=Path, help="keep the stores there, and use them again")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.folder, *arguments.checkpoints)
        return 0

    async def program(leftovers: ExitStack) -> int:
        section = await measure_all(arguments.checkpoints, arguments.folder, leftovers)
        print(section.markdown(), flush=True)
        return 1 if section.n_missed else 0

    return run_to_the_end(program)


if __name__ == "__main__":
    sys.exit(main())
