"""Five hundred streaming clients on four slots: who waits how long, what leaks, and what SIGTERM loses.

Each client goes on with a conversation of its own, and sends its next request as soon as it has its answer,
so that all the others wait. At the end the proxy gets SIGTERM in the midst of it. What the slots of
llama-server then hold is read from them, and looked for in the store.

python -m tests.bench.load [--minutes 10] [--clients 500] [--slots 4] [--store-mib 64]
"""

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from contextlib import ExitStack, closing, suppress
from statistics import mean, median
from typing import Any

import aiohttp

from proxy.core.tokens import TokenIds, common_prefix_length
from proxy.llama.state_file import read_state_file
from proxy.store.catalogue import Limits
from proxy.store.store import CheckpointStore
from tests.bench.interrupts import run_to_the_end
from tests.bench.processes import Setup, Stack
from tests.bench.progress import tell
from tests.bench.readers import rss_bytes
from tests.bench.section import Section
from tests.bench.soak import read_gauges
from tests.lab.conversation import prose, system

KIND, SIZE = "full", "tiny"
SAMPLE_SECONDS = 5.0
WARM_UP_SHARE = 0.2
MOST_GROWTH, MOST_WAIT = 1.05, 1.5
N_TOKENS = 8
N_TURNS = 3
DRAIN_SECONDS = 5
SLACK_TOKENS = 8
"""The tokens of an answer so short are not worth a save of their own."""


class Load:
    """One run; leaves nothing behind."""

    def __init__(
        self,
        leftovers: ExitStack,
        *,
        seconds: float,
        n_clients: int,
        n_slots: int,
        store_bytes: int,
    ) -> None:
        self._seconds, self._n_clients, self._n_slots = seconds, n_clients, n_slots
        self._limits = Limits(store_bytes)
        options = {
            "--max-requests": n_clients + 10,
            "--max-store-bytes": store_bytes,
            "--min-free-bytes": 0,
            "--idle-save-seconds": 3600,
            "--drain-seconds": DRAIN_SECONDS,
        }
        setup = Setup(
            n_slots=n_slots,
            n_threads=1,
            server_arguments=("--cache-ram", "0"),
            proxy_options=tuple(str(word) for option in options.items() for word in option),
        )
        self._stack = Stack(KIND, SIZE, leftovers, has_proxy=True, setup=setup)
        self._began = 0.0
        self._is_ending = False
        self.outcomes: Counter[str] = Counter()
        self._waits: list[tuple[float, float]] = []
        self._memory: list[tuple[float, int, int]] = []
        """When, in private memory, and mapped: the index file."""

    async def run(self) -> list[Section]:
        stack = self._stack
        await stack.start()
        assert stack.proxy is not None
        before = await self._gauges()
        await self._serve_all()
        await stack.proxy.settled()
        after = await self._gauges()
        section = self._verdicts(before, after)
        return [section, await self._sigterm()]

    async def _serve_all(self) -> None:
        """Have all clients ask until the time is over, and then get their last answers."""
        self._began = time.monotonic()
        sampling = asyncio.ensure_future(self._sample_on())
        await self._in_session(self._clients)
        sampling.cancel()

    async def _in_session(self, work: Any) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout()
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
            await work(client)

    async def _clients(self, client: aiohttp.ClientSession) -> None:
        await asyncio.gather(*(self._ask_on(client, number) for number in range(self._n_clients)))

    async def _ask_on(self, client: aiohttp.ClientSession, number: int) -> None:
        chance = random.Random(number)
        messages: list[dict[str, Any]] = []
        is_first = True
        while time.monotonic() - self._began < self._seconds and not self._is_ending:
            if len(messages) >= 2 * N_TURNS or not messages:
                messages = [system(100, seed=chance.randrange(3))]
            messages.append({"role": "user", "content": prose(chance.randrange(1 << 30), 60)})
            asked_at = time.monotonic()
            try:
                wait, said = await self._ask(client, messages)
            except (aiohttp.ClientError, ConnectionError) as error:
                self.outcomes["broken off" if self._is_ending else f"failed: {error!r}"] += 1
                return
            if not is_first:  # they all came at once: who was first has not waited
                self._waits.append((asked_at - self._began, wait))
            is_first = False
            messages.append({"role": "assistant", "content": said or "."})

    async def _ask(
        self, client: aiohttp.ClientSession, messages: list[dict[str, Any]]
    ) -> tuple[float, str]:
        """Return how long the first token took, and what was said; raises ClientError."""
        body = {"messages": messages, "max_tokens": N_TOKENS, "temperature": 0, "stream": True}
        url, began, wait = self._stack.base_url + "/v1/chat/completions", time.monotonic(), 0.0
        async with client.post(url, json=body) as reply:
            if reply.status != 200:
                raise aiohttp.ClientError(f"status {reply.status}")
            raw = b""
            async for line in reply.content:
                if not wait and line.startswith(b"data:"):
                    wait = time.monotonic() - began
                raw += line
        if b"data: [DONE]" not in raw:
            raise aiohttp.ClientError("no end")
        self.outcomes["served"] += 1
        return wait, f"answer {raw.count(b'data:')}"

    async def _gauges(self) -> dict[str, float]:
        assert self._stack.proxy is not None
        return read_gauges(await self._stack.proxy.metrics())

    async def _sample_on(self) -> None:
        assert self._stack.proxy is not None
        while True:
            at = time.monotonic() - self._began
            pid = self._stack.proxy.pid
            self._memory.append((at, rss_bytes(pid, "RssAnon"), rss_bytes(pid, "RssFile")))
            if len(self._memory) % 12 == 1:
                tell(f"load: {at:.0f} s, {dict(self.outcomes)}{self._last_minute(at)}")
            await asyncio.sleep(SAMPLE_SECONDS)

    def _last_minute(self, at: float) -> str:
        n_states = sum(1 for _ in self._stack.slots.iterdir())
        sizes = ", ".join(f"{n / 1e6:.1f}" for n in self._memory[-1][1:])
        waits = [wait for asked, wait in self._waits if asked + wait > at - 60]
        waited = f", waits {mean(waits):.1f} to {max(waits):.1f} s" if waits else ""
        return f", private and mapped {sizes} MB, {n_states} files{waited}"

    def _verdicts(self, before: dict[str, float], after: dict[str, float]) -> Section:
        n_served, n_failed = (
            self.outcomes["served"],
            self.outcomes.total() - self.outcomes["served"],
        )
        section = Section(
            f"{self._n_clients} streaming clients on {self._n_slots} slots for {self._seconds / 60:.0f} "
            f"minutes: {n_served:,} answers",
            "nothing leaked, none failed, RSS within 5 % of that after the warm-up, the longest wait at "
            "most 1.5 times the mean",
            ("what", "before, or mean", "at the end, or longest"),
        )
        section.add("failed", 0, n_failed, is_met=not n_failed)
        for name in (
            'slots{state="leased"}',
            "waiting_requests",
            "background_tasks",
            "event_loop_tasks",
        ):
            # A look at llama-server that is under way is a task.
            slack = name.endswith("tasks")
            is_met = after[name] <= before[name] + slack
            section.add(name, int(before[name]), int(after[name]), is_met=is_met)
        warm_up = WARM_UP_SHARE * self._seconds
        window = min(60.0, warm_up)
        ends = self._seconds - window
        for name, of in (("RSS, MB", sum), ("of it private, MB", lambda sizes: sizes[0])):
            warm = median(of(n) for at, *n in self._memory if warm_up <= at < warm_up + window)
            last = median(of(n) for at, *n in self._memory if ends <= at < self._seconds)
            cells = (f"{warm / 1e6:.1f}", f"{last / 1e6:.1f}")
            section.add(name, *cells, is_met=last <= MOST_GROWTH * warm)
        of_minutes: dict[int, list[float]] = {}
        for asked, wait in self._waits:
            of_minutes.setdefault(int((asked + wait) / 60), []).append(wait)
        worst = max(of_minutes.values(), key=lambda waits: max(waits) / mean(waits))
        all_waits = [wait for _, wait in self._waits]
        # A neighbour that takes the cores slows all of a minute.
        for name, waits in (("wait, s", all_waits), ("the same, worst minute", worst)):
            is_met = max(waits) <= MOST_WAIT * mean(waits)
            section.add(name, f"{mean(waits):.2f}", f"{max(waits):.2f}", is_met=is_met)
        for outcome, n_times in self.outcomes.items():
            tell(f"{outcome}: {n_times}")
        return section

    async def _sigterm(self) -> Section:
        """Stop the proxy in the midst of the load; return what is left of what the slots held."""
        stack = self._stack
        assert stack.proxy is not None
        self.outcomes.clear()
        self._began, self._seconds = time.monotonic(), 600.0
        asking = asyncio.ensure_future(self._in_session(self._clients))
        await asyncio.sleep(5)
        self._is_ending = True
        began = time.monotonic()
        await asyncio.to_thread(stack.proxy.stop)
        took = time.monotonic() - began
        await asking
        held = [await self._held(slot_id) for slot_id in range(self._n_slots)]
        section = Section(
            f"SIGTERM under load: {self.outcomes['served']} answered, {self.outcomes['broken off']} broken "
            f"off, the proxy ended after {took:.1f} s",
            "what each slot held is in the store, but for a short answer",
            ("slot", "tokens held", "tokens of these in one state"),
        )
        await asyncio.to_thread(stack.server.stop)
        with closing(CheckpointStore(stack.slots, self._limits)) as store:
            for slot_id, tokens in enumerate(held):
                n_saved = 0
                for checkpoint in store:
                    stored = store.index.tokens(checkpoint.id) or tokens[:0]
                    if (n_common := common_prefix_length(stored, tokens)) > n_saved:
                        await store.verify(checkpoint)
                        n_saved = n_common
                is_met = n_saved >= len(tokens) - SLACK_TOKENS > 0
                section.add(slot_id, len(tokens), n_saved, is_met=is_met)
        return section

    async def _held(self, slot_id: int) -> TokenIds:
        """Return the tokens that a slot of llama-server holds."""
        name, server = f"held-{slot_id}", self._stack.server
        path = f"/slots/{slot_id}?action=save"
        await asyncio.to_thread(server.request, "POST", path, {"filename": name})
        file = self._stack.slots / name
        tokens = read_state_file(file).tokens
        with suppress(FileNotFoundError):
            file.unlink()
        return tokens


async def run(arguments: argparse.Namespace, leftovers: ExitStack) -> int:
    """Measure and print; return the exit status."""
    load = Load(
        leftovers,
        seconds=60 * arguments.minutes,
        n_clients=arguments.clients,
        n_slots=arguments.slots,
        store_bytes=arguments.store_mib << 20,
    )
    sections = await load.run()
    print("\n\n".join(section.markdown() for section in sections), flush=True)
    return int(any(section.n_missed for section in sections))


def main() -> int:
    """Run as the command line says."""
    parser = argparse.ArgumentParser(description="Put many clients before few slots.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--store-mib", type=int, default=64)
    arguments = parser.parse_args()
    return run_to_the_end(lambda leftovers: run(arguments, leftovers))


if __name__ == "__main__":
    sys.exit(main())
