"""Two llama-servers with one model and one directory: a conversation moves from one to the other."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from statistics import median

import aiohttp

from tests.bench.moving import N_CTX, Cost, Turn, conversation, lengths, new_folder, worst
from tests.bench.play import stream_first_token
from tests.bench.processes import ProxyProcess, Setup
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.lab.models import MEMORIES, model_path
from tests.lab.server import DEFAULT_MODEL_FOLDER, LlamaServer

N_TIMES = 3
IDLE_SAVE_SECONDS = 0.5
LONG = {"stream": True, "ignore_eos": True, "max_tokens": 20000}
"""An answer that goes on until its client leaves."""
OTHERS = (5000, 6000)
"""Seeds of conversations that only keep slots busy."""


async def measure_pairs(leftovers: ExitStack) -> Section:
    """Return the table of a conversation that finds its slot taken, and then its llama-server gone."""
    section = Section(
        "A conversation goes on at another llama-server with the same model",
        "evaluated <= new + 32",
        (
            *("model", "what happened", "prompt", "new", "evaluated", "at most", "first token"),
            *("without the proxy: evaluated", "first token"),
        ),
    )
    for kind, size in (*((kind, "tiny") for kind in MEMORIES), ("hybrid", "small")):
        tell(f"two llama-servers, {kind} {size}")
        pair = _Pair(kind, size, leftovers)
        moved, fled, alone = await pair.measure()
        seconds = median(cost.seconds for cost in alone)
        for what, costs in (("its slot was taken", moved), ("its llama-server ended", fled)):
            (cost, theirs), ours = worst(costs, alone), median(cost.seconds for cost in costs)
            counts = cost.n_prompt, cost.n_new, cost.n_evaluated, cost.n_at_most
            section.add(
                *(f"{kind} {size}", what, *counts, f"{ours:.2f} s"),
                *(theirs.n_evaluated, f"{seconds:.2f} s"),
                is_met=cost.is_met,
            )
    return section


class _Pair:
    """Two llama-servers of one slot each, with the proxy before both, or without."""

    def __init__(self, kind: str, size: str, leftovers: ExitStack) -> None:
        self._kind, self._size, self._leftovers = kind, size, leftovers
        folder = new_folder(leftovers)
        model = model_path(kind, size, DEFAULT_MODEL_FOLDER)
        self._servers = [
            LlamaServer(
                *(model, folder / "slots", 1, N_CTX),
                log_path=folder / f"{i}.log",
                n_threads=2 if size == "small" else 1,
            )
            for i in range(2)
        ]
        options = "--idle-save-seconds", str(IDLE_SAVE_SECONDS)
        upstream = ",".join(server.base_url for server in self._servers)
        self._proxy = ProxyProcess(
            upstream, folder / "slots", folder / "proxy.log", Setup(proxy_options=options)
        )
        for kill in (*(server.kill for server in self._servers), self._proxy.kill):
            leftovers.callback(kill)

    async def measure(self) -> tuple[list[Cost], list[Cost], list[Cost]]:
        """Return what it cost to move, to flee, and to move without the proxy."""
        n_times = N_TIMES if self._size == "small" else 1
        conversations = [conversation(self._kind, 1000 * i) for i in range(n_times)]
        turns = [turn for each in conversations for turn in each]
        known = await lengths(self._kind, self._size, turns, self._leftovers)
        await asyncio.gather(*(asyncio.to_thread(server.start) for server in self._servers))
        self._proxy.start()
        await self._proxy.ready()
        both = [await self._move(each, i, known) for i, each in enumerate(conversations)]
        await asyncio.to_thread(self._proxy.stop)
        # Last: the proxy finds what slots hold, and would have it from this.
        alone = [await self._move_alone(each, i, known) for i, each in enumerate(conversations)]
        for server in self._servers:
            await asyncio.to_thread(server.stop)
        return [moved for moved, _ in both], [fled for _, fled in both], alone

    async def _move_alone(
        self, turns: list[Turn], n_before: int, known: list[tuple[int, int]]
    ) -> Cost:
        """Ask the second llama-server what the first one has been asked before, while that one decodes."""
        first, second = self._servers
        await asyncio.to_thread(second.stop)
        await asyncio.to_thread(second.start)
        for turn in turns[:2]:
            await stream_first_token(first.base_url, turn)
        async with aiohttp.ClientSession() as client:
            reply = await self._begin_long(client, first.base_url, OTHERS[0])
            seconds = await stream_first_token(second.base_url, turns[2])
            reply.close()
        n_evaluated = await asyncio.to_thread(second.evaluated_tokens)
        return Cost(*known[4 * n_before + 2], n_evaluated, seconds)

    async def _begin_long(
        self, client: aiohttp.ClientSession, base_url: str, seed: int
    ) -> aiohttp.ClientResponse:
        """Return an answer that has begun and goes on until it is closed."""
        body = conversation(self._kind, seed)[0].body(**LONG)
        reply = await client.post(base_url + "/v1/chat/completions", json=body)
        await reply.content.readany()
        return reply

    async def _move(
        self, turns: list[Turn], n_before: int, known: list[tuple[int, int]]
    ) -> tuple[Cost, Cost]:
        lengths_of = known[4 * n_before :]
        for turn in turns[:2]:
            here = await self._ask(turn)
        async with self._both_busy(here):
            moved, n_evaluated, seconds = await self._measured(turns[2])
        assert moved is not here
        move = Cost(*lengths_of[2], n_evaluated, seconds)
        await self._proxy.settled()
        await asyncio.sleep(2 * IDLE_SAVE_SECONDS + 1.0)
        await self._proxy.settled()
        await asyncio.to_thread(moved.stop)
        fled_to, n_evaluated, seconds = await self._measured(turns[3])
        assert fled_to is here
        await asyncio.to_thread(moved.start)
        await self._proxy.ready()
        await self._proxy.settled()
        return move, Cost(*lengths_of[3], n_evaluated, seconds)

    async def _ask(self, turn: Turn) -> LlamaServer:
        server, _, _ = await self._measured(turn)
        await self._proxy.settled()
        return server

    async def _measured(self, turn: Turn) -> tuple[LlamaServer, int, float]:
        """Send a request; return which llama-server evaluated how much for it, and the seconds."""
        before = await self._counts()
        seconds = await stream_first_token(self._proxy.base_url, turn)
        after = await self._counts()
        grown = {server: after[server] - before.get(server, 0) for server in after}
        server = max(grown, key=lambda server: grown[server])
        return server, sum(grown.values()), seconds

    async def _counts(self) -> dict[LlamaServer, int]:
        """Return what each that runs has evaluated since it was started."""
        running = [server for server in self._servers if server.is_running]
        counts = [asyncio.to_thread(server.evaluated_tokens) for server in running]
        return dict(zip(running, await asyncio.gather(*counts), strict=True))

    @asynccontextmanager
    async def _both_busy(self, here: LlamaServer) -> AsyncIterator[None]:
        """Have both slots taken by others, and that of the one that is not *here* left again."""
        async with aiohttp.ClientSession() as client:
            answering: dict[LlamaServer, aiohttp.ClientResponse] = {}
            for seed in OTHERS:
                reply = await self._begin_long(client, self._proxy.base_url, seed)
                (server,) = await self._busy() - set(answering)
                answering[server] = reply
            (there,) = set(self._servers) - {here}
            answering.pop(there).close()
            await self._proxy.leased_at_most(1)
            yield
            answering.pop(here).close()

    async def _busy(self) -> set[LlamaServer]:
        busy = set()
        for server in self._servers:
            _, slots = await asyncio.to_thread(server.request, "GET", "/slots")
            if slots[0]["is_processing"]:
                busy.add(server)
        return busy
