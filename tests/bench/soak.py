"""Hours of mixed traffic in a few minutes on a real llama-server: does anything leak?

Four clients and more on a tiny model, the proxy as a process of its own, and a llama-server that is killed,
stopped or halted (SIGSTOP) now and then. Memory, descriptors, tasks, leases and files are sampled; once
traffic has ended they must be back where they were, and memory may not have grown since the warm-up.
Answers must be those of another llama-server, which nobody else asks.

python -m tests.bench.soak [--minutes 10] [--clients 5] [--seed 1] [--kind hybrid] [--slots 2] [--pause 40]
                           [--flags="--cache-ram 1024"]
"""

import argparse
import asyncio
import os
import random
import shlex
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from prometheus_client.parser import text_string_to_metric_families

from proxy.metrics import PREFIX
from tests.bench.interrupts import run_to_the_end
from tests.bench.processes import Setup, Stack
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.bench.soak_traffic import Traffic

SIZE = "tiny"
BUDGET_BYTES = 48 << 20
SAMPLE_SECONDS = 5.0
WARM_UP_SHARE = 0.5
"""Of ten minutes: by then the explanations of the last 2,000 requests fill their place."""
MAX_GROWTH = 0.05
HALT_SECONDS = (0.5, 8.0)
SETTLE_SECONDS = 30.0
STOP_SECONDS = 10.0
HALTS = 0.4
"""The share of disturbances in which llama-server goes on afterwards."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The proxy process at one moment; `at` is in seconds since the beginning."""

    at: float
    rss_bytes: int
    n_descriptors: int
    n_loop_tasks: int
    n_background_tasks: int
    n_leases: int
    n_waiting: int
    n_temporary_files: int
    store_bytes: int


IDLE = {
    "n_descriptors": 1,
    "n_loop_tasks": 1,
    "n_background_tasks": 1,
    "n_leases": 0,
    "n_waiting": 0,
    "n_temporary_files": 0,
}
"""What must be back at its idle level at the end, give or take so many: a look at llama-server that is
under way is a task and a descriptor."""


class Soak:
    """One soak; leaves nothing behind."""

    def __init__(self, leftovers: ExitStack, arguments: argparse.Namespace) -> None:
        n_clients, seed = arguments.clients, arguments.seed
        self._seconds: float = 60 * arguments.minutes
        self._pause_seconds: float = arguments.pause
        self._chance = random.Random(seed)
        options = ("--max-store-bytes", str(BUDGET_BYTES), "--idle-save-seconds", "1")
        flags = tuple(shlex.split(arguments.flags))
        setup = Setup(
            n_threads=1, n_slots=arguments.slots, server_arguments=flags, proxy_options=options
        )
        self._stack = Stack(arguments.kind, SIZE, leftovers, has_proxy=True, setup=setup)
        self._alone = Stack(
            arguments.kind, SIZE, leftovers, has_proxy=False, setup=Setup(n_threads=1, n_slots=1)
        )
        urls = self._stack.base_url, self._alone.base_url
        self._traffic = Traffic(*urls, n_clients, seed, arguments.slots)
        self._began = time.monotonic()
        self._samples: list[Sample] = []
        self._n_restarts = 0

    async def run(self) -> list[Section]:
        """Return the table of minutes and that of what must hold."""
        await self._alone.start()
        await self._stack.start()
        before = await self._idle_sample()
        self._began = time.monotonic()
        sampling = asyncio.ensure_future(self._sample_on())
        restarting = asyncio.ensure_future(self._restart_on())
        try:
            await self._traffic.run(self._goes_on)
            await restarting
        finally:
            sampling.cancel()
            restarting.cancel()
        after = await self._idle_sample()
        sections = [self._course(), self._verdicts(before, after)]
        await self._stack.stop()
        await self._alone.stop()
        return sections

    def _goes_on(self) -> bool:
        return self._elapsed() < self._seconds

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    async def _sample_on(self) -> None:
        n_told = 0
        while True:
            self._samples.append(await self._sample())
            if self._elapsed() >= 60 * n_told:
                n_told += 1
                tell(f"soak: {dict(self._traffic.outcomes)}, {self._n_restarts} restarts")
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _restart_on(self) -> None:
        """Halt llama-server now and then, or end it and start it again after a while."""
        while True:
            await asyncio.sleep(self._chance.uniform(self._pause_seconds, 2 * self._pause_seconds))
            if self._elapsed() > self._seconds - self._pause_seconds:
                return
            server = self._stack.server
            if self._chance.random() < HALTS:
                os.kill(server.pid, signal.SIGSTOP)
                await asyncio.sleep(self._chance.uniform(*HALT_SECONDS))
                os.kill(server.pid, signal.SIGCONT)
                continue
            # Told to end while it decodes, llama-server may hang: its signal handler takes a lock.
            ends: list[Callable[[], None]] = [server.kill, partial(server.stop, STOP_SECONDS)]
            end = self._chance.choice(ends)
            self._traffic.away_since, self._traffic.back_at = time.monotonic(), float("inf")
            await asyncio.to_thread(end)
            await asyncio.sleep(self._chance.choice([0.0, 0.3, 3.0]))
            await asyncio.to_thread(server.start)
            self._traffic.back_at = time.monotonic() + 2.0
            self._n_restarts += 1

    async def _idle_sample(self) -> Sample:
        """Return a sample once nothing is leased; what is left then is left."""
        assert self._stack.proxy is not None
        await self._stack.proxy.settled()
        began = time.monotonic()
        while True:
            sample = await self._sample()
            is_idle = not (sample.n_leases or sample.n_waiting or sample.n_temporary_files)
            if is_idle and sample.n_background_tasks <= IDLE["n_background_tasks"]:
                return sample
            if time.monotonic() - began > SETTLE_SECONDS:
                return sample
            await asyncio.sleep(0.2)

    async def _sample(self) -> Sample:
        assert self._stack.proxy is not None
        gauges = read_gauges(await self._stack.proxy.metrics())
        pid = self._stack.proxy.pid
        files = list(self._stack.slots.iterdir())
        return Sample(
            at=self._elapsed(),
            rss_bytes=_rss_bytes(pid),
            n_descriptors=_n_descriptors(pid),
            n_loop_tasks=int(gauges["event_loop_tasks"]),
            n_background_tasks=int(gauges["background_tasks"]),
            n_leases=int(gauges['slots{state="leased"}']),
            n_waiting=int(gauges["waiting_requests"]),
            n_temporary_files=sum(not f.name.endswith(".state") for f in files if _is_state(f)),
            store_bytes=sum(_size(f) for f in files if _is_state(f)),
        )

    def _course(self) -> Section:
        """Return one line for each minute: the highest of each."""
        counted = self._traffic.outcomes
        section = Section(
            f"Soak: {counted['served']:,} requests served, {counted['left']:,} left,"
            f" {self._n_restarts} restarts of llama-server, in {self._seconds / 60:.0f} minutes",
            "",
            ("minute", "RSS MB", *_words(list(IDLE)), "store MB"),
        )
        for minute in range(int(self._seconds // 60) + 1):
            within = [s for s in self._samples if 60 * minute <= s.at < 60 * (minute + 1)]
            if not within:
                continue
            highest = [max(getattr(s, name) for s in within) for name in IDLE]
            rss, stored = (
                max(getattr(s, name) for s in within) / 1e6 for name in ("rss_bytes", "store_bytes")
            )
            section.add(minute, f"{rss:.1f}", *highest, f"{stored:.1f}", is_met=None)
        return section

    def _verdicts(self, before: Sample, after: Sample) -> Section:
        section = Section(
            "Soak: what must hold",
            f"RSS within {MAX_GROWTH:.0%} of that after the warm-up, the store within its budget, all else"
            " back at its idle level, no request failed",
            ("what", "before", "most", "at the end", "allowed"),
        )
        warm_up_seconds = self._seconds * WARM_UP_SHARE
        warm = [s.rss_bytes for s in self._samples if 0 <= s.at - warm_up_seconds < 60]
        last = [s.rss_bytes for s in self._samples if s.at >= self._seconds - 60]
        warm_bytes, last_bytes = median(warm), median(last)
        section.add(
            *("RSS, MB", f"{warm_bytes / 1e6:.1f}"),
            f"{max(s.rss_bytes for s in self._samples) / 1e6:.1f}",
            *(f"{last_bytes / 1e6:.1f}", f"{warm_bytes * (1 + MAX_GROWTH) / 1e6:.1f}"),
            is_met=last_bytes <= warm_bytes * (1 + MAX_GROWTH),
        )
        for name, slack in IDLE.items():
            values = [getattr(sample, name) for sample in (before, after)]
            most = max(getattr(sample, name) for sample in self._samples)
            allowed = values[0] + slack
            section.add(
                *_words([name]), values[0], most, values[1], allowed, is_met=values[1] <= allowed
            )
        stored = max(sample.store_bytes for sample in self._samples)
        section.add(
            *("store, bytes", before.store_bytes, stored, after.store_bytes, BUDGET_BYTES),
            is_met=stored <= BUDGET_BYTES,
        )
        for kind in ("failed", "other answers"):
            n_such = self._traffic.outcomes[kind]
            section.add(kind, 0, n_such, n_such, 0, is_met=n_such == 0)
        for failure in self._traffic.failures[:10]:
            tell(failure)
        return section


def read_gauges(exposition: str) -> dict[str, float]:
    """Return the proxy's gauges by name, with their labels: `slots{state="leased"}`."""
    return {
        _name(sample.name, sample.labels): sample.value
        for family in text_string_to_metric_families(exposition)
        if family.type == "gauge"
        for sample in family.samples
    }


def _name(name: str, labels: dict[str, str]) -> str:
    given = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return name.removeprefix(PREFIX + "_") + (f"{{{given}}}" if given else "")


def _words(names: list[str]) -> list[str]:
    return [name.removeprefix("n_").replace("_", " ") for name in names]


def _rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the proxy has no memory")


def _n_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _is_state(path: Path) -> bool:
    return path.name.startswith("lpc-") and path.suffix != ".meta"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


async def run(arguments: argparse.Namespace, leftovers: ExitStack) -> int:
    """Soak and print; return the exit status."""
    sections = await Soak(leftovers, arguments).run()
    for section in sections:
        print(section.markdown() + "\n", flush=True)
    return 1 if any(section.n_missed for section in sections) else 0


def main() -> int:
    """Soak as the command line says."""
    parser = argparse.ArgumentParser(description="Soak the proxy in mixed traffic.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", default="hybrid")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--pause", type=float, default=40.0, help="seconds between disturbances")
    parser.add_argument("--flags", default="", help="of llama-server")
    arguments = parser.parse_args()
    return run_to_the_end(lambda leftovers: run(arguments, leftovers))


if __name__ == "__main__":
    sys.exit(main())
