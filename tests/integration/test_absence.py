"""llama-server is away for a while: requests of which nothing was sent wait for it, within limits."""

import asyncio
import time
from typing import Any

import pytest

from proxy import app
from proxy.servers import server as lifecycle
from proxy.settings import Settings
from tests.integration.conftest import StartRig
from tests.integration.rig import CHAT, COMPLETION, KEYS, Reply, Rig, hang_up, question
from tests.integration.test_queue import occupy, served
from tests.lab.running import run_proxy
from tests.lab.server import find_free_port
from tests.lab.waiting import HANG_SECONDS, until


async def waiting(rig: Rig, n_requests: int) -> None:
    """Wait until so many requests wait for llama-server."""
    await until(lambda: rig.running.server.n_waiting == n_requests)


def ask(rig: Rig, name: str, path: str = CHAT) -> "asyncio.Task[Reply]":
    """Send a request that may be refused."""
    body: dict[str, Any] = {"messages": question(name), "max_tokens": 3}
    return asyncio.ensure_future(rig.post(path, body))


async def test_queued_and_new_requests_wait_for_a_slot_in_arrival_order(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1) as rig:
        _, first = await occupy(rig)
        asked = []
        for n_waiting, name in enumerate(["b", "c"], 1):
            asked.append(rig.begin_chat(name))
            await rig.waiting(n_waiting)
        await rig.server.crash()
        await asyncio.gather(first, return_exceptions=True)
        for n_waiting, name in enumerate(["d", "e"], 3):
            asked.append(rig.begin_chat(name))
            await waiting(rig, n_waiting)
        assert ((await rig.health())["n_waiting"], rig.sample("waiting_requests")) == (4, 4)
        gate = rig.server.hold("tokenize")
        await rig.server.restart()
        await until(lambda: gate.n_reached >= 4)
        answer = rig.server.hold("generate")
        gate.open()  # whichever prompt is known first has the slot
        await rig.waiting(3)
        answer.open()
        replies = await asyncio.gather(*asked)
        assert [reply.status for reply in replies] == [200] * 4
        _, _, *others = served(rig)
        assert len(others) == 3 and others == sorted(others)
        assert rig.sample("unanswered_requests_total", reason="llama-server gone") == 1


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_unprepared_request_waits_too(start_rig: StartRig, path: str) -> None:
    async with start_rig() as rig:
        await rig.server.crash()
        asked = ask(rig, "a", path)
        await waiting(rig, 1)
        await rig.server.restart()
        assert (await asked).status == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_request_that_could_not_be_sent_waits_too(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async with start_rig(n_slots=1, **KEYS) as rig:
        await rig.unwatched(monkeypatch)
        gate = rig.server.hold("erase", n_calls=1)
        await rig.chat("alice", key="alice")
        body = {"messages": question("bob"), "max_tokens": 3}
        asked = asyncio.ensure_future(rig.post(path, body, key="bob"))  # after the slot is erased
        await gate.reached()
        await rig.server.crash()
        await until(lambda: asked.done() or rig.running.server.n_waiting == 1)
        await rig.server.restart()
        assert (await asked).status == 200
        assert rig.server.n_evaluated >= 300


async def test_time_of_a_request_without_answer_goes_on_after_a_try_that_failed(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(n_slots=1, upstream_wait_seconds=1, **KEYS) as rig:
        await rig.unwatched(monkeypatch)
        gate = rig.server.hold("erase", n_calls=1)
        await rig.chat("alice", key="alice")
        body = {"messages": question("bob"), "max_tokens": 3}
        asked = asyncio.ensure_future(rig.post(CHAT, body, key="bob"))
        await gate.reached()
        crashed_at = time.monotonic()
        await rig.server.crash()
        assert (await asked).status == 503
        waited_seconds = time.monotonic() - crashed_at
        async with rig.client.get(rig.admin_url + "/requests?limit=1") as reply:
            (record,) = (await reply.json())["requests"]
        assert record["outcome"] == "unanswered" and record["seconds"] > waited_seconds / 2


async def test_client_that_leaves_frees_its_place(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MAX_REQUESTS", 2)
    async with start_rig() as rig:
        await rig.server.crash()
        leaving, staying = ask(rig, "leaving"), ask(rig, "staying")
        await waiting(rig, 2)
        refused = await ask(rig, "third")
        assert (refused.status, refused.headers["Retry-After"]) == (503, "2")
        assert "being served already" in refused.content["error"]["message"]
        await hang_up(leaving)
        await until(lambda: len(rig.running.shared.journal.in_flight) == 1)
        fourth = ask(rig, "fourth")
        await waiting(rig, 2)
        await rig.server.restart()
        assert [(await staying).status, (await fourth).status] == [200, 200]
        assert len(rig.requests_seen()) == 2


async def test_long_absence_fails_requests_at_once(start_rig: StartRig) -> None:
    async with start_rig(upstream_wait_seconds=HANG_SECONDS) as rig:
        await rig.server.crash()
        server = rig.running.server
        await until(lambda: server._unreachable_since is not None)
        server._unreachable_since = time.monotonic() - HANG_SECONDS
        first = await ask(rig, "a")
        assert (first.status, first.headers["Retry-After"]) == (503, "2")
        later = ask(rig, "b", "/v1/messages")
        await until(later.done)
        assert (later.result().status, server.n_waiting) == (503, 0)
        error = later.result().content["error"]
        assert error["message"] == "llama-prefix-cache: llama-server cannot be reached"
        await rig.server.restart()
        assert (await rig.chat("a")).status == 200
        await rig.settled()
        await rig.server.crash()
        again = rig.begin_chat("a")
        await waiting(rig, 1)  # this absence is a new one
        await rig.server.restart()
        assert (await again).n_reused == 308


async def test_loading_counts_anew_for_each_request(start_rig: StartRig) -> None:
    async with start_rig(upstream_wait_seconds=0.5) as rig:
        await rig.server.crash()
        rig.server.faults.is_loading = True
        await rig.server.restart()
        assert (await ask(rig, "a")).status == 503
        server = rig.running.server
        server._patience_seconds = HANG_SECONDS
        later = ask(rig, "b")
        await waiting(rig, 1)
        assert server._unreachable_since is None, "else all waits would be counted from then"
        rig.server.faults.is_loading = False
        assert (await later).status == 200


async def test_crash_while_it_is_attached_again_is_waited_out(start_rig: StartRig) -> None:
    async with start_rig() as rig:
        await rig.server.crash()
        asked = rig.begin_chat("a")
        await waiting(rig, 1)
        gate = rig.server.hold("lora-adapters")
        await rig.server.restart()
        await gate.reached()
        await rig.server.crash()
        await waiting(rig, 1)
        rig.server.release("lora-adapters")
        await rig.server.restart()
        assert (await asked).n_reused == 0


async def test_waiting_requests_do_not_hold_up_the_end(start_rig: StartRig) -> None:
    async with start_rig(drain_seconds=30.0) as rig:
        await rig.server.crash()
        asked = ask(rig, "a")
        await waiting(rig, 1)
        async with asyncio.timeout(HANG_SECONDS):
            await rig.stop_proxy()
        assert (await asked).status == 503
        await rig.server.restart()
        await rig.start_proxy()


async def test_request_waits_for_a_server_that_has_never_answered(start_rig: StartRig) -> None:
    """The proxy may have been started first, as after a reboot."""
    async with start_rig() as rig:
        await rig.stop_proxy()
        upstream = f"http://127.0.0.1:{find_free_port()}"
        settings = Settings(
            upstream=upstream,
            slot_save_path=str(rig.server.directory),
            listen="127.0.0.1:0",
            admin="127.0.0.1:0",
        )
        async with run_proxy(settings) as rig.running:
            asked = ask(rig, "a", COMPLETION)
            await waiting(rig, 1)
            await hang_up(asked)
            await waiting(rig, 0)
            rig.running.server._patience_seconds = 0.0
            assert (await ask(rig, "a", COMPLETION)).status == 503
        await rig.start_proxy()


async def test_request_that_comes_back_to_the_proxy_ends_there(start_rig: StartRig) -> None:
    """As where `upstream` has the proxy's port and this machine's name, or a balancer before the proxy."""
    async with start_rig() as rig:
        await rig.stop_proxy()
        settings = Settings(
            upstream=f"http://127.0.0.2:{(port := find_free_port())}",
            slot_save_path=str(rig.server.directory),
            listen=f"0.0.0.0:{port}",
            admin="127.0.0.1:0",
        )
        async with run_proxy(settings) as rig.running:
            await until(lambda: _is_named(rig, "not a llama-server"))
            reply = await ask(rig, "a")
            assert reply.status == 508 and "leads back to this proxy" in str(reply.content)
        await rig.start_proxy()


async def _is_named(rig: Rig, kind: str) -> bool:
    return kind in await rig.reasons()


async def test_what_a_closing_server_will_not_answer_is_cut_off(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told to end, llama-server waits for clients whose requests it has dropped."""
    monkeypatch.setattr(lifecycle, "CUT_SECONDS", HANG_SECONDS)
    async with start_rig(n_slots=3) as rig:
        server = rig.running.server
        gate = rig.server.hold("generate", n_calls=1)
        whole = ask(rig, "a")
        await gate.reached()
        rig.server.faults.chunk_seconds = 60.0
        silent = asyncio.ensure_future(rig.post(CHAT, stream_of("b")))
        in_flight = rig.running.shared.journal.in_flight.values()
        await until(lambda: [r.answering.is_set() for r in in_flight] == [False, True])
        for exchange in server.upstream._waiting:
            exchange.heard_at -= 2 * HANG_SECONDS
        rig.server.faults.chunk_seconds = 0.05
        talking = asyncio.ensure_future(rig.post(CHAT, stream_of("c", 20)))
        await until(lambda: len(rig.requests_seen()) == 3)
        await rig.server.shut_down()
        await until(lambda: server._unreachable_since is not None)
        server._unreachable_since = time.monotonic() - 2 * HANG_SECONDS
        assert (await whole).status == 502
        assert b"went away in mid-answer" in (await silent).body
        assert (await talking).body.endswith(b"data: [DONE]\n\n")
        await rig.server.restart()
        assert (await rig.chat("d")).status == 200


async def test_llama_server_that_is_ending_does_not_wait_for_what_is_warmed(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "CUT_SECONDS", 0.3)
    async with start_rig(n_slots=2, upstream_wait_seconds=0.2) as rig:
        gate = rig.server.hold("generate", n_calls=1)
        warm = rig.client.post(rig.admin_url + "/warm?whole=1", json={"messages": question("a")})
        warming = asyncio.ensure_future(warm)
        await gate.reached()
        await rig.server.shut_down()
        async with await warming as reply:
            assert '"error"' in (await reply.text()).splitlines()[-1]
        gate.open()
        await rig.server.restart()
        await rig.attached()


def stream_of(name: str, n_tokens: int = 10) -> dict[str, Any]:
    return {"messages": question(name), "stream": True, "max_tokens": n_tokens}


async def test_gateway_that_waited_for_llama_server_in_vain_ends_nothing(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1) as rig:
        await rig.chat("a")
        process = rig.running.server.process
        rig.server.faults.refuse["props"] = 504

        async def is_told() -> bool:
            return await rig.reasons() == ["llama-server is silent"]

        await until(is_told)
        assert rig.running.server.process is process
        assert (await rig.chat("a")).n_reused
        rig.server.faults.refuse.clear()
        await until(lambda: not rig.running.server.services.degradations.active)
