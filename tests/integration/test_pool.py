"""Several llama-servers and hosts of models: where a request is served, and what it waits for."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from proxy import app
from proxy.core.slots import Empty
from proxy.explain.causes import Cause
from proxy.llama.client import LlamaServer, Target
from proxy.llama.hosts import Models
from proxy.servers import addresses
from proxy.servers.server import Phase
from proxy.serving.queue import Choice
from proxy.settings import Settings
from tests.fakes.llama_server import FakeLlamaServer
from tests.integration.conftest import StartRig
from tests.integration.rig import Rig, next_question, question
from tests.lab.running import run_proxy
from tests.lab.waiting import until
from tests.unit.builders import run_of


def served_by(server: FakeLlamaServer) -> int:
    """Return how many requests of clients a llama-server has answered."""
    seen = server.seen_at("generate")
    return sum(b'"n_probs"' not in request.body for request in seen)


@asynccontextmanager
async def proxy_before(rig: Rig, *upstreams: str, **options: Any) -> AsyncIterator[None]:
    """Run the rig's proxy before other addresses."""
    await rig.stop_proxy()
    settings = Settings(
        upstream=", ".join(upstreams),
        slot_save_path=str(rig.server.directory),
        listen="127.0.0.1:0",
        admin="127.0.0.1:0",
        idle_save_seconds=60.0,
        **options,
    )
    try:
        async with run_proxy(settings) as rig.running:
            yield
    finally:
        await rig.start_proxy()


@asynccontextmanager
async def two_servers(rig: Rig, **options: Any) -> AsyncIterator[FakeLlamaServer]:
    """Run the rig's proxy before two llama-servers with the same model; yield the second one."""
    async with FakeLlamaServer(Path(rig.server.directory), n_slots=1) as second:
        async with proxy_before(rig, rig.server.base_url, second.base_url, **options):
            await until(lambda: len(rig.running.pool.processes) == 2)
            await until(lambda: all(p.rule.can_restore for p in rig.running.pool.processes))
            await until(
                lambda: not any(s.is_leased for p in rig.running.pool.processes for s in p.slots)
            )
            yield second


async def keep_busy(rig: Rig, second: FakeLlamaServer) -> tuple[Any, Any, list[Any]]:
    """Have each llama-server generate until its gate is opened; return the gates and the requests."""
    here = rig.server.hold("generate", n_calls=1)
    there = second.hold("generate", n_calls=1)
    running = [rig.begin_chat("a"), rig.begin_chat("b")]
    await here.reached()
    await there.reached()
    return here, there, running


async def test_a_server_that_nobody_used_takes_no_part_in_what_is_remembered(
    start_rig: StartRig,
) -> None:
    """Both have the same model: its rates and sizes have one name."""
    async with start_rig(n_slots=1) as rig:
        async with two_servers(rig) as second:
            await rig.chat("a")
            assert served_by(second) == 0
        await until(lambda: rig.process)
        assert rig.process and rig.process.rates.is_measured


async def test_request_that_waits_takes_the_slot_that_comes_free_elsewhere(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1) as rig, two_servers(rig) as second:
        here, there, running = await keep_busy(rig, second)
        waiting = rig.begin_chat("c")
        await until(lambda: rig.running.pool.n_waiting == 1)
        queue_is_here = rig.running.pool.servers[0].n_queued == 1
        gate, free, busy = (
            (there, second, rig.server) if queue_is_here else (here, rig.server, second)
        )
        n_before = served_by(free), served_by(busy)
        gate.open()
        assert (await waiting).status == 200
        assert (served_by(free), served_by(busy)) == (n_before[0] + 1, n_before[1])
        here.open()
        there.open()
        await asyncio.gather(*running)


async def test_request_goes_where_it_need_not_wait_for_cells(start_rig: StartRig) -> None:
    async with start_rig(n_slots=2) as rig, two_servers(rig) as second:
        first = await rig.chat("a")
        assert served_by(rig.server) == 1
        process = rig.running.pool.processes[0]
        process.has_run_out_of_cells = True
        [empty] = [slot for slot in process.slots if isinstance(slot.content, Empty)]
        running = Choice((empty.id,), destined=run_of(1200))
        with await process.queue.lease(lambda: running):
            await rig.chat(next_question(question("a"), first))
        assert served_by(second) == 1


async def test_slot_of_a_llama_server_that_runs_was_not_lost_by_a_restart(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1) as rig, two_servers(rig) as second:
        first = await rig.chat(question("a", 600))
        holder = second if served_by(second) else rig.server
        gate = holder.hold("generate", n_calls=1)
        goes_on = asyncio.ensure_future(rig.chat(next_question(question("a", 600), first)))
        await gate.reached()
        fork = [*question("a", 600), {"role": "assistant", "content": " x"}, *question("b")]
        journal = rig.running.shared.journal
        n_before = journal.n_recorded
        await rig.chat(fork)
        await until(lambda: journal.n_recorded > n_before)
        assert journal.latest(1)[0].cause is Cause.IN_USE
        gate.open()
        await goes_on


async def test_limit_on_requests_grows_with_the_llama_servers(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MAX_REQUESTS", 1)
    async with start_rig(n_slots=1) as rig, two_servers(rig) as second:
        here, there, running = await keep_busy(rig, second)
        reply = await rig.post("/v1/chat/completions", {"messages": [], "max_tokens": 1})
        assert (reply.status, "2 requests" in str(reply.content)) == (503, True)
        here.open()
        there.open()
        await asyncio.gather(*running)


async def test_request_goes_to_the_llama_server_that_is_left(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig, two_servers(rig) as second:
        assert (await rig.chat("a")).status == 200
        is_second = served_by(second) == 1
        gone, left = (second, rig.server) if is_second else (rig.server, second)
        await gone.crash()
        n_left = served_by(left)
        assert (await rig.chat("a")).status == 200
        assert served_by(left) == n_left + 1
        await gone.restart()


async def test_request_waits_for_the_first_of_several_that_comes_back(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig, two_servers(rig) as second:
        await rig.server.crash()
        await second.crash()
        asked = rig.begin_chat("a")
        await until(lambda: all(server.n_waiting == 1 for server in rig.running.pool.servers))
        await second.restart()
        assert ((await asked).status, served_by(second)) == (200, 1)
        assert [server.n_waiting for server in rig.running.pool.servers] == [0, 0]
        await rig.server.restart()


async def test_request_fails_when_all_of_several_stay_away(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig, two_servers(rig, upstream_wait_seconds=0.3) as second:
        await rig.server.crash()
        await second.crash()
        reply = await rig.post("/v1/chat/completions", {"messages": [], "max_tokens": 1})
        assert (reply.status, "cannot be reached" in str(reply.content)) == (503, True)
        await rig.server.restart()
        await second.restart()


class ScriptedHost:
    """A host of one model, whose llama-server is the rig's."""

    kind = "router"
    is_polled = True
    hides_names = False

    def __init__(self, server: FakeLlamaServer) -> None:
        self.server = server
        self.is_loaded = False
        self.n_loads = 0
        self.is_recognised = asyncio.Event()
        self.is_recognised.set()

    async def models(self) -> Models:
        loaded = frozenset({"m"} if self.is_loaded else ())
        return Models(loaded, frozenset({"m"}), n_at_most=1)

    async def load(self, model: str) -> None:
        self.n_loads += 1
        self.is_loaded = True

    async def unload(self, model: str) -> None:
        self.is_loaded = False

    async def accepts(self, keys: Mapping[str, str]) -> bool:
        return True

    async def resolve(self, name: str) -> str | None:
        return None

    async def command_lines(self) -> list[Any]:
        return []

    def target(self, model: str) -> Target:
        return Target(self.server.base_url, model)

    def split_path(self, path: str, asked: str, models: Models) -> tuple[str, str]:
        return asked, path


@asynccontextmanager
async def hosted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, *, waits: bool = True
) -> AsyncIterator[ScriptedHost]:
    """Run the rig's proxy before a host whose only model is served by the rig's llama-server."""
    host = ScriptedHost(rig.server)
    if not waits:
        host.is_recognised.clear()

    async def recognise(root: LlamaServer) -> ScriptedHost:
        await host.is_recognised.wait()
        return host

    async def refuse(request: web.BaseRequest) -> web.Response:
        return web.json_response({"error": {"message": "no such model"}}, status=404)

    monkeypatch.setattr(addresses, "recognise", recognise)
    monkeypatch.setattr(addresses, "_LOOK_SECONDS", 0.03)
    runner = web.ServerRunner(web.Server(refuse))
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        async with proxy_before(rig, f"http://127.0.0.1:{port}"):
            if waits:
                await until(lambda: rig.running.pool.has_models)
            yield host
    finally:
        await runner.cleanup()


async def test_model_is_loaded_for_its_first_request(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(n_slots=1) as rig, hosted(rig, monkeypatch) as host:
        assert (await rig.chat("a", model="m")).status == 200
        (server,) = rig.running.pool.servers
        assert (host.n_loads, server.phase) == (1, Phase.ATTACHED)
        assert (await rig.post("/v1/chat/completions", {"model": "other"})).status == 404


async def test_request_that_comes_before_its_host_is_known_is_served(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(n_slots=1) as rig, hosted(rig, monkeypatch, waits=False) as host:
        asked = rig.begin_chat("a", model="m")
        await asyncio.sleep(0.1)
        assert not rig.running.pool.has_models
        host.is_recognised.set()
        assert ((await asked).status, host.n_loads) == (200, 1)


async def test_model_that_is_lost_while_a_request_waits_is_loaded_again(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(n_slots=1) as rig, hosted(rig, monkeypatch) as host:
        await rig.chat("a", model="m")
        (server,) = rig.running.pool.servers
        await until(lambda: server.process and not any(s.is_leased for s in server.process.slots))
        epoch = server.epoch
        gate = rig.server.hold("generate", n_calls=1)
        running = rig.begin_chat("b", model="m")
        await gate.reached()
        waiting = rig.begin_chat("c", model="m")
        await until(lambda: server.n_queued == 1)
        host.is_loaded = False  # the host has ended the process to save memory, say
        rig.server.replace_process()
        await until(lambda: server.epoch > epoch)
        gate.open()
        await asyncio.gather(running, return_exceptions=True)
        assert (await waiting).status == 200
        assert (host.n_loads, server.phase) == (2, Phase.ATTACHED)
