"""Two sidecars behind nginx and HAProxy, by the files in deploy/balance."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.lab.balancer import FILES, Balancer
from tests.lab.conversation import agent_requests, system, tools
from tests.lab.models import least_model
from tests.lab.rig import Rig
from tests.lab.server import LlamaServer
from tests.lab.waiting import until

N_CONVERSATIONS = 4
TOOLS = tools(2)
CONVERSATIONS = {
    i: agent_requests(3, 0, header=[system(300)], seed=100 * i) for i in range(N_CONVERSATIONS)
}


class Behind:
    """Two rigs, and a balancer before them."""

    def __init__(self, rigs: list[Rig], balancer: Balancer) -> None:
        self.rigs, self.balancer = rigs, balancer

    async def ask(self, number: int, turn: int) -> int:
        """Send one turn of a conversation; return the number of the host that served it."""
        before = [await self._evaluated(rig) for rig in self.rigs]
        await self.send(number, turn)
        after = [await self._evaluated(rig) for rig in self.rigs]
        (host,) = (i for i in range(2) if after[i] > before[i])
        return host

    async def send(self, number: int, turn: int) -> None:
        """Send one turn of a conversation, which any host may serve."""
        body = {"messages": CONVERSATIONS[number][turn], "tools": TOOLS, "max_tokens": 2}
        body["metadata"] = {"more": "than HAProxy can repeat " * 1000}
        url = self.balancer.base_url + "/v1/chat/completions"
        headers = {"X-Session-Id": f"conversation-{number}"}
        async with aiohttp.ClientSession() as client:
            async with client.post(url, json=body, headers=headers) as reply:
                assert reply.status == 200, await reply.text()

    async def _evaluated(self, rig: Rig) -> int:
        is_running = rig.server.is_running
        return await asyncio.to_thread(rig.server.evaluated_tokens) if is_running else 0


@pytest.fixture
async def rigs(tmp_path: Path) -> AsyncIterator[list[Rig]]:
    async with AsyncExitStack() as stack:
        rigs = []
        for name in ("one", "two"):
            directory = tmp_path / name
            directory.mkdir(mode=0o700)
            model = least_model("full")
            log_path = tmp_path / f"{name}.log"
            rig = Rig(LlamaServer(model, directory, log_path=log_path), directory)
            rigs.append(await stack.enter_async_context(rig))
        yield rigs


@asynccontextmanager
async def behind(
    name: str, rigs: list[Rig], folder: Path, *, has_affinity: bool = True
) -> AsyncIterator[Behind]:
    ports = [(rig.running.port, rig.running.admin_port) for rig in rigs]
    balancer = Balancer(name, ports, folder, has_affinity=has_affinity)
    await asyncio.to_thread(balancer.start)  # it asks the proxies, which live on this loop
    try:
        yield Behind(rigs, balancer)
    finally:
        await asyncio.to_thread(balancer.stop)


async def test_a_conversation_stays_with_its_host_and_outlives_it(
    rigs: list[Rig], tmp_path: Path
) -> None:
    for name in FILES:
        async with behind(name, rigs, tmp_path, has_affinity=False) as balanced:
            assert {await balanced.ask(0, turn) for turn in range(2)} == {0, 1}

    async with (
        behind("nginx", rigs, tmp_path) as nginx,
        behind("haproxy", rigs, tmp_path) as haproxy,
    ):
        served = {i: [await nginx.ask(i, turn) for turn in range(2)] for i in CONVERSATIONS}
        assert all(first == second for first, second in served.values()), served
        by_haproxy = [[await haproxy.ask(i, turn) for turn in range(2)] for i in CONVERSATIONS]
        assert all(first == second for first, second in by_haproxy), by_haproxy

        ended = served[0][0]
        await rigs[ended].stop_proxy()
        for balanced in (nginx, haproxy):
            assert {await balanced.ask(i, 2) for i in CONVERSATIONS} == {1 - ended}


async def test_a_host_without_its_llama_server_is_passed_over(
    rigs: list[Rig], tmp_path: Path
) -> None:
    async with behind("haproxy", rigs, tmp_path) as haproxy:
        served = {i: await haproxy.ask(i, 0) for i in CONVERSATIONS}
        left = served[0]
        await asyncio.to_thread(rigs[left].server.kill)
        await until(lambda: is_down(haproxy, left))
        assert {await haproxy.ask(i, 1) for i in CONVERSATIONS} == {1 - left}

        await asyncio.to_thread(rigs[1 - left].server.kill)
        await until(lambda: is_down(haproxy, 1 - left))
        waiting = asyncio.ensure_future(haproxy.send(0, 2))
        await until(lambda: waits_at_a_host(rigs))
        for rig in rigs:
            await asyncio.to_thread(rig.server.start)
        await waiting


async def waits_at_a_host(rigs: list[Rig]) -> bool:
    return any(rig.running.pool.n_waiting for rig in rigs)


async def is_down(haproxy: Behind, host: int) -> bool:
    return f"llama/{('one', 'two')[host]} is DOWN" in haproxy.balancer.log_text()
