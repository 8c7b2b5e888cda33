"""Five hundred streaming clients on four slots: who waits how long, what leaks, and what SIGTERM loses.

Each client goes on with a conversation of its own, and sends its next request as soon as it has its answer,
so that all the others wait. At the end the proxy gets SIGTERM in the midst of it. What the slots of
llama-server then hold is read from them, and looked for in the store. With --beside, as many clients ask
another llama-server at the same time without the proxy: what else the machine does slows both.

python -m tests.bench.load [--minutes 10] [--clients 500] [--slots 4] [--store-mib 64] [--beside]
"""

import argparse
import asyncio
import random
import sys
import time
from bisect import bisect_left, insort
from collections import Counter
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from statistics import mean, median
from typing import Any

import aiohttp

from proxy.core.tokens import TokenIds, common_prefix_length
from proxy.llama.files import read_state_file
from proxy.store.store import CheckpointStore
from tests.bench.interrupts import run_to_the_end
from tests.bench.processes import Setup, Stack
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.bench.soak import read_gauges
from tests.lab.conversation import prose, system

KIND, SIZE = "full", "tiny"
SAMPLE_SECONDS = 5.0
WARM_UP_SHARE = 0.3
PARTS = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
MOST_GROWTH, MOST_WAIT = 1.05, 1.5
N_TOKENS = 8
N_TURNS = 3
DRAIN_SECONDS = 5
SLACK_TOKENS = 8
"""The tokens of an answer so short are not worth a save of their own."""


def memory_bytes(pid: int) -> dict[str, int]:
    """Return what a process has in memory; of RSS, clean pages of files go when others need the room."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    of = {name: int(rest.split()[0]) << 10 for name, rest in (line.split(":") for line in lines)}
    private = of["Private_Clean"] + of["Private_Dirty"]
    of_files = of["Rss"] - of["Anonymous"]
    return {
        "RSS": of["Rss"],
        "anonymous": of["Anonymous"],
        "private": private,
        "of files": of_files,
    }


class Clients:
    """All clients of one side: each goes on with its conversation, and asks again at once."""

    def __init__(self, base_url: str, n_clients: int) -> None:
        self._url, self._n_clients = base_url + "/v1/chat/completions", n_clients
        self.began, self._seconds, self._is_ending = 0.0, 0.0, False
        self.outcomes: Counter[str] = Counter()
        self.waits: list[tuple[float, float]] = []
        """When each wait began, and how long it took until the first token."""

    async def ask_for(self, seconds: float) -> None:
        """Have all clients ask until the time is over, and then get their last answers."""
        self.began, self._seconds = time.monotonic(), seconds
        self.outcomes.clear()
        connector, timeout = (
            aiohttp.TCPConnector(limit=0, force_close=True),
            aiohttp.ClientTimeout(),
        )
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
            await asyncio.gather(*(self._ask_on(client, n) for n in range(self._n_clients)))

    def end(self) -> None:
        """From now on, whoever is broken off asks no more."""
        self._is_ending = True

    def waited_since(self, at: float) -> list[float]:
        """Return the waits that ended since *at*."""
        return [wait for asked, wait in self.waits if asked + wait > at]

    def overtaken(self) -> int:
        """Return by how many later requests one was overtaken at most: what the order of a queue costs."""
        firsts: list[float] = []
        most = 0
        for asked, wait in sorted(self.waits, reverse=True):
            most = max(most, bisect_left(firsts, asked + wait))
            insort(firsts, asked + wait)
        return most

    async def _ask_on(self, client: aiohttp.ClientSession, number: int) -> None:
        chance = random.Random(number)
        messages: list[dict[str, Any]] = []
        is_first = True
        while time.monotonic() - self.began < self._seconds and not self._is_ending:
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
                self.waits.append((asked_at - self.began, wait))
            is_first = False
            messages.append({"role": "assistant", "content": said or "."})

    async def _ask(
        self, client: aiohttp.ClientSession, messages: list[dict[str, Any]]
    ) -> tuple[float, str]:
        """Return how long the first token took, and what was said; raises ClientError."""
        body = {"messages": messages, "max_tokens": N_TOKENS, "temperature": 0, "stream": True}
        began, wait = time.monotonic(), 0.0
        async with client.post(self._url, json=body) as reply:
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
        has_beside: bool,
    ) -> None:
        self._seconds, self._n_clients, self._n_slots = seconds, n_clients, n_slots
        self._store_bytes = store_bytes
        options = {
            "--max-store-bytes": store_bytes,
            "--idle-save-seconds": 3600,
            "--drain-seconds": DRAIN_SECONDS,
        }
        # By default a connection of a client waits before llama-server reads it, in no order of its own.
        threads = ("--threads-http", str(n_clients + 10))
        setup = Setup(
            n_slots=n_slots,
            n_threads=1,
            server_arguments=("--cache-ram", "0", *threads),
            proxy_options=tuple(str(word) for option in options.items() for word in option),
        )
        self._stack = Stack(KIND, SIZE, leftovers, has_proxy=True, setup=setup)
        self._clients = Clients(self._stack.base_url, n_clients)
        self._beside: Stack | None = None
        if has_beside:
            self._beside = Stack(KIND, SIZE, leftovers, has_proxy=False, setup=setup)
            self._alone = Clients(self._beside.base_url, n_clients)
        self._memory: list[tuple[float, dict[str, int]]] = []

    async def run(self) -> list[Section]:
        stack = self._stack
        await stack.start()
        assert stack.proxy is not None
        before = await self._gauges()
        sampling = asyncio.ensure_future(self._sample_on())
        asking = [self._clients.ask_for(self._seconds)]
        if self._beside:
            await self._beside.start()
            asking.append(self._alone.ask_for(self._seconds))
        await asyncio.gather(*asking)
        sampling.cancel()
        await stack.proxy.settled()
        after = await self._gauges()
        if self._beside:
            await self._beside.stop()
        sections = [self._verdicts(before, after), self._waited(), self._grown()]
        return [*sections, await self._sigterm()]

    async def _gauges(self) -> dict[str, float]:
        assert self._stack.proxy is not None
        return read_gauges(await self._stack.proxy.metrics())

    async def _sample_on(self) -> None:
        assert self._stack.proxy is not None
        began = time.monotonic()
        while True:
            at = time.monotonic() - began
            pid, index = self._stack.proxy.pid, self._stack.slots / "index/data.mdb"
            self._memory.append((at, {**memory_bytes(pid), "index file": index.stat().st_size}))
            if len(self._memory) % 12 == 1:
                sizes = ", ".join(f"{k} {n / 1e6:.1f}" for k, n in self._memory[-1][1].items())
                waits = self._clients.waited_since(at - 60)
                waited = f"waits {mean(waits):.1f} to {max(waits):.1f} s" if waits else ""
                tell(f"load: {at:.0f} s, {dict(self._clients.outcomes)}, MB: {sizes}; {waited}")
            await asyncio.sleep(SAMPLE_SECONDS)

    def _verdicts(self, before: dict[str, float], after: dict[str, float]) -> Section:
        outcomes = self._clients.outcomes
        n_failed = outcomes.total() - outcomes["served"]
        section = Section(
            f"{self._n_clients} streaming clients on {self._n_slots} slots for {self._seconds / 60:.0f} "
            f"minutes: {outcomes['served']:,} answers",
            "nothing leaked, none failed",
            ("what", "before", "at the end"),
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
        for outcome, n_times in outcomes.items():
            tell(f"{outcome}: {n_times}")
        return section

    def _waited(self) -> Section:
        section = Section(
            "Seconds until the first token",
            f"the longest at most {MOST_WAIT} times the mean, or no more times it than beside it alone",
            ("clients of", "waits", "mean", "longest", "times", "one overtaken by at most"),
        )
        sides = {"the proxy": self._clients}
        bar = MOST_WAIT
        if self._beside:
            waits = [wait for _, wait in self._alone.waits]
            sides = {"llama-server alone, at the same time": self._alone, **sides}
            bar = max(bar, max(waits) / mean(waits))
        for name, clients in sides.items():
            waits = [wait for _, wait in clients.waits]
            times = max(waits) / mean(waits)
            is_met = times <= bar if clients is self._clients else None
            cells = (f"{mean(waits):.2f}", f"{max(waits):.2f}", f"{times:.2f}")
            section.add(name, len(waits), *cells, clients.overtaken(), is_met=is_met)
        return section

    def _grown(self) -> Section:
        """Return what the proxy had in memory after the warm-up, and at the end."""
        section = Section(
            "Memory of the proxy, MB",
            f"at the end at most {MOST_GROWTH} times what it was after {WARM_UP_SHARE:.0%} of the time",
            ("what", *(f"{part:.0%}" for part in PARTS)),
        )
        window = min(60.0, WARM_UP_SHARE * self._seconds)
        for name in self._memory[0][1]:
            cells = []
            for part in PARTS:
                end = max(part * self._seconds, window)
                cells.append(median(n[name] for at, n in self._memory if end - window <= at <= end))
            warm, last = cells[PARTS.index(WARM_UP_SHARE)], cells[-1]
            is_met = last <= MOST_GROWTH * warm if name in ("RSS", "anonymous") else None
            section.add(name, *(f"{n / 1e6:.1f}" for n in cells), is_met=is_met)
        return section

    async def _sigterm(self) -> Section:
        """Stop the proxy in the midst of the load; return what is left of what the slots held."""
        stack = self._stack
        assert stack.proxy is not None
        asking = asyncio.ensure_future(self._clients.ask_for(600.0))
        await asyncio.sleep(5)
        self._clients.end()
        began = time.monotonic()
        await asyncio.to_thread(stack.proxy.stop)
        took = time.monotonic() - began
        await asking
        held = [await self._held(slot_id) for slot_id in range(self._n_slots)]
        outcomes = self._clients.outcomes
        section = Section(
            f"SIGTERM under load: {outcomes['served']} answered, {outcomes['broken off']} broken "
            f"off, the proxy ended after {took:.1f} s",
            "what each slot held is in the store, but for a short answer",
            ("slot", "tokens held", "tokens of these in one state"),
        )
        await asyncio.to_thread(stack.server.stop)
        with closing(CheckpointStore(stack.slots, self._store_bytes)) as store:
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
        has_beside=arguments.beside,
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
    parser.add_argument("--beside", action="store_true")
    arguments = parser.parse_args()
    return run_to_the_end(lambda leftovers: run(arguments, leftovers))


if __name__ == "__main__":
    sys.exit(main())
