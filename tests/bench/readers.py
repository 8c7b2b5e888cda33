"""What clients that never read their streams cost the others: llama-server alone and through the proxy.

Four clients ask for long streams on two slots and read nothing. A fifth client asks for a short answer
while they are served, and again when llama-server is done with them. Then more such clients ask through
the proxy, for what it takes in memory.

python -m tests.bench.readers [--times 3] [--clients 14]
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import aiohttp

from tests.bench.interrupts import run_to_the_end
from tests.bench.processes import Setup, Stack
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.bench.soak import read_gauges
from tests.lab.raw_client import RawClient

KIND, SIZE = "full", "tiny"
N_READERS = 4
N_TOKENS = 1000
N_TOKENS_FOR_MEMORY = 4000
MOST_WAIT = 1.5
GIVE_UP_SECONDS = 60.0
_SENT_SECONDS = 0.5
_LOOK_SECONDS = 0.1


@contextmanager
def never_reading(base_url: str, n_clients: int, n_tokens: int = N_TOKENS) -> Iterator[None]:
    """Send requests for long streams, and read nothing of them until the block is left."""
    with ExitStack() as stack:
        for i in range(n_clients):
            # Sixty probabilities make an event of 6 KB: the answer must not fit the sockets' buffers.
            prompt = [300 + i, *range(1000, 1050)]
            body = {"prompt": prompt, "n_predict": n_tokens, "n_probs": 60, "stream": True}
            body["ignore_eos"] = True
            stack.enter_context(RawClient(base_url, "/completion", body))
        yield


async def wait_seconds(base_url: str, patience_seconds: float = GIVE_UP_SECONDS) -> float:
    """Return how long a client waits for a short answer, at most that long."""
    body = {"prompt": list(range(2000, 2100)), "n_predict": 1, "stream": True}
    began = time.monotonic()
    try:
        async with asyncio.timeout(patience_seconds):
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout()) as client:
                async with client.post(base_url + "/completion", json=body) as reply:
                    await reply.read()
                    assert reply.status == 200, reply.status
    except TimeoutError:
        return patience_seconds
    return time.monotonic() - began


def rss_bytes(pid: int, name: str = "VmRSS") -> int:
    """Return what a process has in memory; VmHWM is the most that it ever had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


class ReadersBenchmark:
    """Measures llama-server alone and the proxy before it; leaves nothing behind."""

    def __init__(self, leftovers: ExitStack, *, n_times: int, n_clients: int) -> None:
        self._leftovers = leftovers
        self._n_times = n_times
        self._n_clients = n_clients

    async def run(self) -> list[Section]:
        waits: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for _ in range(self._n_times):
            for has_proxy, measured in waits.items():
                measured.append(await self._waits(has_proxy=has_proxy))
        section = Section(
            f"{N_READERS} clients that never read, 2 slots ({KIND}, {SIZE}, {N_TOKENS:,} tokens each)",
            f"a fifth client waits at most {MOST_WAIT} times as long as on llama-server alone, "
            f"medians of {self._n_times}",
            ("the fifth client asks", "llama-server alone", "through the proxy", "times"),
        )
        medians = [[median(seconds) for seconds in zip(*waits[p], strict=True)] for p in waits]
        for when, theirs, ours in zip(
            ("while they are served", "when llama-server is done"), *medians, strict=True
        ):
            # The second is what the proxy adds to any request: milliseconds, and no bar of this one.
            is_met = ours <= MOST_WAIT * theirs if when.startswith("while") else None
            cells = (f"{theirs:.3f} s", f"{ours:.3f} s", f"{ours / theirs:.2f}")
            section.add(when, *cells, is_met=is_met)
        return [section, await self._memory()]

    async def _waits(self, *, has_proxy: bool) -> tuple[float, float]:
        """Return how long a fifth client waits, while the others are served and after that."""
        tell(f"readers: {'through the proxy' if has_proxy else 'alone'}")
        stack = self._stack(has_proxy=has_proxy)
        await stack.start()
        with never_reading(stack.base_url, N_READERS):
            await asyncio.sleep(_SENT_SECONDS)
            during = await wait_seconds(stack.base_url)
            await _until_idle(stack)
            await wait_seconds(stack.base_url)  # which saves what the slot held, if need be
            after = await wait_seconds(stack.base_url)
        await stack.stop()
        return during, after

    async def _memory(self) -> Section:
        """Return what the proxy takes for more than it keeps of answers that nobody reads."""
        tell(f"readers: memory with {self._n_clients} clients")
        stack = self._stack(has_proxy=True)
        await stack.start()
        assert stack.proxy is not None
        section = Section(
            f"What the proxy takes for answers that nobody reads ({N_TOKENS_FOR_MEMORY:,} tokens each)",
            "",
            ("clients", "RSS before", "RSS at most", "unread at most", "RSS when they have left"),
        )
        before = most = rss_bytes(stack.proxy.pid)
        most_unread = 0.0
        with never_reading(stack.base_url, self._n_clients, N_TOKENS_FOR_MEMORY):
            asked = asyncio.ensure_future(wait_seconds(stack.base_url, 600.0))
            while not asked.done():
                most = max(most, rss_bytes(stack.proxy.pid))
                most_unread = max(
                    most_unread, read_gauges(await stack.proxy.metrics())["unread_bytes"]
                )
                await asyncio.sleep(_LOOK_SECONDS)
            await asked
        await stack.proxy.settled()
        cells = (before, most, most_unread, rss_bytes(stack.proxy.pid))
        section.add(self._n_clients, *(f"{n / 1e6:.1f} MB" for n in cells), is_met=None)
        await stack.stop()
        return section

    def _stack(self, *, has_proxy: bool) -> Stack:
        setup = Setup(n_threads=1, proxy_options=("--drain-seconds", "1"))
        return Stack(KIND, SIZE, self._leftovers, has_proxy=has_proxy, setup=setup)


async def _until_idle(stack: Stack) -> None:
    """Wait until llama-server itself runs nothing."""
    while True:
        _, slots = await asyncio.to_thread(stack.server.request, "GET", "/slots")
        if not any(slot["is_processing"] for slot in slots):
            return
        await asyncio.sleep(_LOOK_SECONDS)


async def run(arguments: argparse.Namespace, leftovers: ExitStack) -> int:
    """Measure and print; return the exit status."""
    benchmark = ReadersBenchmark(leftovers, n_times=arguments.times, n_clients=arguments.clients)
    sections = await benchmark.run()
    print("\n\n".join(section.markdown() for section in sections))
    return int(any(section.n_missed for section in sections))


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Measure what clients that never read cost others."
    )
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--clients", type=int, default=14)
    arguments = parser.parse_args()
    return run_to_the_end(lambda leftovers: run(arguments, leftovers))


if __name__ == "__main__":
    sys.exit(main())
