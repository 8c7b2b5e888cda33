"""What clients with a wrong key cost a tenant: requests of every shape, llama-server has --api-key.

A tenant's two conversations take turns on two slots. The wrong keys come alone first, so that every
change of a slot and every byte written is theirs, then beside the tenant by turns. Prints its table of
docs/reliability.md. Exit status 1 if a bar is missed.

python -m tests.bench.wrong_keys [--seconds 60]
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from itertools import cycle
from statistics import median
from typing import Any

import aiohttp

from tests.bench.interrupts import run_to_the_end
from tests.bench.processes import Setup, Stack
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.bench.traces.metrics import read_counters
from tests.lab.conversation import agent_requests, system, tools
from tests.lab.server import request
from tests.lab.wrong_keys import SHAPES, bearer, send

PER_SECOND = 50
BLOCK_SECONDS = 3.0
PAUSE_SECONDS = 0.2
SETUP = Setup(
    n_threads=1,
    server_arguments=("--api-key", "own,tenant"),
    proxy_options=("--upstream-api-key", "own", "--idle-save-seconds", "3600"),
)


class Tenant:
    """Two conversations that take turns; each turn is the next step of an agent's."""

    def __init__(self, client: aiohttp.ClientSession, base_url: str) -> None:
        self._client, self._url = client, base_url + "/v1/chat/completions"
        self._tools = tools(8)
        steps = [agent_requests(60, 5, header=[system(400)], seed=s) for s in (1, 5000)]
        self._bodies = (b for turn in zip(*steps, strict=True) for b in turn)

    async def turn(self) -> float:
        """Have one turn answered; return the seconds that took."""
        body = {"messages": next(self._bodies), "tools": self._tools, "max_tokens": 4}
        began = time.monotonic()
        async with self._client.post(self._url, json=body, headers=bearer("tenant")) as reply:
            content = await reply.read()
            assert reply.status == 200, content
        return time.monotonic() - began

    async def turns(self, seconds: float) -> list[float]:
        until, took = time.monotonic() + seconds, list[float]()
        while time.monotonic() < until:
            took.append(await self.turn())
            await asyncio.sleep(PAUSE_SECONDS)
        return took


class WrongKeys:
    """Clients whose key llama-server does not take; `answers` counts their statuses."""

    def __init__(self, client: aiohttp.ClientSession, base_url: str) -> None:
        self._client, self._base_url = client, base_url
        self._shapes = cycle(SHAPES.values())
        self.answers: Counter[int] = Counter()

    @asynccontextmanager
    async def coming(self) -> AsyncIterator[None]:
        """Send requests at a steady rate while the block runs, and wait for what is still to come."""
        sending = asyncio.ensure_future(self._send_all())
        try:
            yield
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _send_all(self) -> None:
        under_way = set[asyncio.Task[None]]()
        due = time.monotonic()
        try:
            while True:
                under_way.add(asyncio.ensure_future(self._send(next(self._shapes))))
                due += 1 / PER_SECOND
                await asyncio.sleep(max(0.0, due - time.monotonic()))
        finally:
            await asyncio.gather(*under_way)

    async def _send(self, shape: tuple[str, bytes]) -> None:
        status, _ = await send(self._client, self._base_url, shape, "guess")
        self.answers[status] += 1


def slots_of(stack: Stack) -> list[Any]:
    """Return the last task of each slot, and how much it holds."""
    said = request(stack.server.base_url, "GET", "/slots", headers=bearer("own"))[1]
    return [(slot.get("id_task"), slot.get("n_prompt_tokens")) for slot in said]


async def written_bytes(stack: Stack) -> int:
    assert stack.proxy is not None
    return int(read_counters(await stack.proxy.metrics()).get("saved_bytes_total", 0))


async def measure(stack: Stack, seconds: float) -> Section:
    assert stack.proxy is not None
    bar = "the median at most 1.1 of quiet, no slot touched, nothing written, all answered 401"
    columns = ("wrong keys", "turns", "median", "longest", "slots touched", "written", "answered")
    section = Section(f"{PER_SECOND} requests a second with a wrong key", bar, columns)
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
        tenant = Tenant(client, stack.base_url)
        wrong = WrongKeys(client, stack.base_url)
        for _ in range(6):
            await tenant.turn()
        await stack.proxy.settled()
        before, n_before = slots_of(stack), await written_bytes(stack)
        async with wrong.coming():
            await asyncio.sleep(seconds)
        await stack.proxy.settled()
        n_touched = sum(a != b for a, b in zip(before, slots_of(stack), strict=True))
        n_written = await written_bytes(stack) - n_before
        quiet, attacked = list[float](), list[float]()
        for block in range(2 * max(1, round(seconds / BLOCK_SECONDS))):
            if block % 4 in (
                0,
                3,
            ):  # conversations grow: neither kind of block comes first for good
                quiet += await tenant.turns(BLOCK_SECONDS)
                continue
            async with wrong.coming():
                attacked += await tenant.turns(BLOCK_SECONDS)
            tell(f"{median(quiet):.3f} s quiet, {median(attacked):.3f} s beside wrong keys")
    answers = ", ".join(f"{n:,} x {status}" for status, n in wrong.answers.items())
    is_met = not n_touched and not n_written and wrong.answers.keys() == {401}
    section.add("alone", "-", "-", "-", n_touched, n_written, answers, is_met=is_met)
    section.add("none", len(quiet), *_seconds(quiet), "-", "-", "-", is_met=None)
    is_met = median(attacked) <= 1.1 * median(quiet)
    section.add("beside", len(attacked), *_seconds(attacked), "-", "-", "-", is_met=is_met)
    return section


def _seconds(took: list[float]) -> tuple[str, str]:
    return f"{median(took):.3f} s", f"{max(took):.2f} s"


async def run(leftovers: ExitStack, seconds: float) -> int:
    """Measure and print; return the exit status."""
    stack = Stack("hybrid", "tiny", leftovers, has_proxy=True, setup=SETUP)
    await stack.start()
    section = await measure(stack, seconds)
    await stack.stop()
    print(section.markdown(level=2), flush=True)
    return 1 if section.n_missed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what wrong keys cost.")
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    return run_to_the_end(lambda leftovers: run(leftovers, arguments.seconds))


if __name__ == "__main__":
    sys.exit(main())
