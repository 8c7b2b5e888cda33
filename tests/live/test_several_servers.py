"""Several llama-servers with one model and one directory behind one proxy."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from proxy.core.rates import POSITIONS, Rates, Transfer, UnitCost
from tests.lab.conversation import Message, agent_requests, system
from tests.lab.models import least_model
from tests.lab.rig import Rig
from tests.lab.server import LlamaServer
from tests.live.conftest import ONE_KIND
from tests.live.ledger import SLACK_TOKENS, TOOLS, Ledger

HEADER = [system(150)]


@dataclass(frozen=True)
class Answering:
    """A request that is being answered, until its client leaves."""

    server: LlamaServer
    leave: Callable[[], None]


class Pair:
    """A rig before two llama-servers of one slot each."""

    def __init__(self, rig: Rig, servers: tuple[LlamaServer, LlamaServer]) -> None:
        self.rig = rig
        self.servers = servers

    async def ask(self, messages: list[Message], **fields: Any) -> dict[str, Any]:
        """Send a request; return its record."""
        await self.rig.chat(messages, tools=TOOLS, **fields)
        await self.rig.accounted()
        return await self.last_request()

    def set_rates(self, *, restore_seconds: float) -> None:
        """Take both for equally quick, whatever the machine was busy with when they were measured."""
        restore = Transfer(UnitCost(restore_seconds, 1.0), UnitCost(1e-9, 1.0))
        tokens = (UnitCost(1e-3, 1.0),) * len(POSITIONS)
        for server in self.rig.running.pool.servers:
            assert server.process is not None
            server.process.rates = Rates(tokens=tokens, cold_restore=restore, warm_restore=restore)

    async def last_request(self) -> dict[str, Any]:
        async with self.rig.client.get(self.rig.admin_url + "/requests?limit=1") as reply:
            record: dict[str, Any] = (await reply.json())["requests"][0]
            return record

    @asynccontextmanager
    async def answering(self, messages: list[Message]) -> AsyncIterator["Answering"]:
        """Keep a slot busy with a long answer to a request while the block runs."""
        body = {"messages": messages, "tools": TOOLS, "stream": True, "ignore_eos": True}
        url = self.rig.base_url + "/v1/chat/completions"
        before = await self._busy()
        async with self.rig.client.post(url, json={**body, "max_tokens": 20000}) as reply:
            await reply.content.readany()
            (server,) = await self._busy() - before
            yield Answering(server, reply.close)

    async def _busy(self) -> set[LlamaServer]:
        answers = [asyncio.to_thread(s.request, "GET", "/slots") for s in self.servers]
        slots = [answer[1][0] for answer in await asyncio.gather(*answers)]
        return {s for s, slot in zip(self.servers, slots, strict=True) if slot["is_processing"]}

    def server_of(self, record: dict[str, Any]) -> LlamaServer:
        return next(s for s in self.servers if s.base_url.endswith(record["server"]))

    async def n_evaluated(self) -> int:
        """Return what both have evaluated since they run, by their own metrics."""
        counts = [asyncio.to_thread(server.evaluated_tokens) for server in self.servers]
        return sum(await asyncio.gather(*counts))


StartPair = Callable[..., AbstractAsyncContextManager[Pair]]


@pytest.fixture
def start_pair(tmp_path: Path) -> StartPair:
    """Return a function that starts two llama-servers with a tiny model, and the proxy before them."""

    @asynccontextmanager
    async def start(kind: str, **settings: Any) -> AsyncIterator[Pair]:
        directory = tmp_path / "slots"
        directory.mkdir(mode=0o700)
        model = least_model(kind)
        servers = tuple(
            LlamaServer(model, directory, n_slots=1, n_ctx=32768, log_path=tmp_path / f"{i}.log")
            for i in range(2)
        )
        upstream = ", ".join(server.base_url for server in servers)
        with servers[1]:
            async with Rig(servers[0], directory, upstream=upstream, **settings) as rig:
                yield Pair(rig, (servers[0], servers[1]))

    return start


@ONE_KIND
async def test_conversation_that_moves_evaluates_only_new_tokens(
    start_pair: StartPair, kind: str
) -> None:
    first, second, third, fourth = agent_requests(2, 1, header=HEADER)
    async with start_pair(kind) as pair:
        ledger = Ledger(pair.rig)
        await ledger.enter(first)
        began = await pair.ask(first)
        await pair.rig.settled()  # a slot that is being saved is not free for the next request
        # It stays where it is hot.
        pair.set_rates(restore_seconds=0.3)
        n_new = await ledger.enter(second)
        stayed = await pair.ask(second)
        assert stayed["server"] == began["server"] and stayed["chosen"] == "live"
        assert stayed["evaluated"] <= n_new + SLACK_TOKENS
        await pair.rig.settled()
        # Two others take both slots, and the one where it was is not the first that comes free.
        others = [agent_requests(1, 0, header=HEADER, seed=seed)[0] for seed in (500, 900)]
        async with pair.answering(others[0]) as first_end, pair.answering(others[1]) as second_end:
            is_first_here = first_end.server is pair.server_of(stayed)
            asyncio.get_running_loop().call_later(
                0.5, (second_end if is_first_here else first_end).leave
            )
            pair.set_rates(restore_seconds=0.001)
            n_new, n_before = await ledger.enter(third), await pair.n_evaluated()
            moved = await pair.ask(third)
            assert moved["server"] != stayed["server"] and moved["chosen"] == "restore"
            assert moved["evaluated"] <= n_new + SLACK_TOKENS
            assert await pair.n_evaluated() - n_before == moved["evaluated"]
        # What is left of it when its llama-server ends is on disk.
        await pair.rig.settled()
        await asyncio.to_thread(pair.server_of(moved).stop)
        n_new = await ledger.enter(fourth)
        fled = await pair.ask(fourth)
        assert fled["server"] == stayed["server"]
        assert fled["evaluated"] <= n_new + SLACK_TOKENS
