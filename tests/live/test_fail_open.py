"""Whatever is wrong with the cache, requests are answered, and the reason is told."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.app import run_proxy
from proxy.core.conditions import DegradationKind
from proxy.errors import StoreLocked
from proxy.store.index import Index
from tests.lab.conversation import agent_requests, system, tools
from tests.lab.models import MEMORIES
from tests.lab.processes import is_alive
from tests.lab.rig import Rig
from tests.lab.waiting import until
from tests.live.conftest import StartRig

MESSAGES = agent_requests(2, 1, header=[system(150)])
TOOLS = tools(2)


async def ask(rig: Rig, index: int = 0) -> int:
    """Send a request of the conversation; return how many tokens were reused."""
    reply = await rig.chat(MESSAGES[index], tools=TOOLS)
    return int(reply["timings"]["cache_n"])


async def test_server_without_slot_save_path_is_still_served(start_rig: StartRig) -> None:
    async with start_rig("hybrid", has_slot_save_path=False) as rig:
        assert await ask(rig) == 0
        assert await ask(rig, 1) > 0  # the live slot is still used
        health = await rig.health()
        assert health["state"] == "forwarding"
        assert health["reasons"][0]["kind"] == "no slot save path"


async def test_another_directory_is_noticed(start_rig: StartRig, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    args = ("--slot-save-path", str(tmp_path / "elsewhere"))
    async with start_rig("hybrid", has_slot_save_path=False, extra_args=args) as rig:
        await ask(rig)
        health = await rig.health()
        assert health["state"] == "forwarding"
        assert [reason["kind"] for reason in health["reasons"]] == ["another slot save path"]


async def test_index_of_another_format_is_named_and_requests_are_served(
    start_rig: StartRig, tmp_path: Path
) -> None:
    (tmp_path / "slots").mkdir(mode=0o700)
    index = Index(tmp_path / "slots" / "index")
    index.put_value("format", 99)
    index.close()
    async with start_rig("hybrid") as rig:
        await ask(rig)
        health = await rig.health()
        assert health["state"] == "forwarding"
        assert [reason["kind"] for reason in health["reasons"]] == ["store not open"]
        assert "has format 99" in health["reasons"][0]["reason"]


async def test_damaged_index_is_made_anew_while_requests_are_served(
    start_rig: StartRig, tmp_path: Path
) -> None:
    data = tmp_path / "slots" / "index" / "data.mdb"
    async with start_rig("hybrid") as rig:
        await ask(rig)
        await rig.stop_proxy()
        await asyncio.to_thread(rig.server.stop)
        n_states = len(state_files(tmp_path))
        os.truncate(data, data.stat().st_size // 2)
        await asyncio.to_thread(rig.server.start)
        await rig.start_proxy()
        assert rig.running.store is not None
        await rig.chat([{"role": "user", "content": "something else"}])
        await until(lambda: DegradationKind.INDEX_REBUILDING not in rig.running.degradations)
        assert len(rig.running.store) >= n_states
        assert await ask(rig, 1) > 0
        assert rig.sample("restores_total", result="done") == 1


async def test_second_proxy_on_the_directory_is_refused(start_rig: StartRig) -> None:
    async with start_rig("hybrid") as rig:
        with pytest.raises(StoreLocked, match="another llama-prefix-cache"):
            async with run_proxy(rig.settings):
                pass
        await ask(rig)


@pytest.mark.parametrize("kind", MEMORIES)
async def test_file_that_is_cut_short_never_reaches_llama_server(
    start_rig: StartRig, tmp_path: Path, kind: str
) -> None:
    async with start_rig(kind) as rig:
        await ask(rig)
        await rig.settled()
        for path in state_files(tmp_path):
            with unnoticed(path):
                os.truncate(path, path.stat().st_size // 2)
        await asyncio.to_thread(rig.server.stop)
        await asyncio.to_thread(rig.server.start)
        pid = rig.server.pid
        await ask(rig, 1)
        assert rig.sample("restores_total", result="done") == 0
        assert rig.sample("damaged_checkpoints_total") > 0
        assert rig.sample("requests_total", outcome="degraded") == 0
        await rig.settled()
        assert await ask(rig, 2) > 0
        assert rig.server.pid == pid and is_alive(pid)


def state_files(tmp_path: Path) -> list[Path]:
    found = list((tmp_path / "slots").glob("lpc-*.state"))
    assert found
    return found


@contextmanager
def unnoticed(path: Path) -> Iterator[None]:
    """Let a file keep its time, as one that a failing disk has changed."""
    status = path.stat()
    yield
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


async def test_deleted_file_costs_only_speed(start_rig: StartRig, tmp_path: Path) -> None:
    async with start_rig("hybrid") as rig:
        await ask(rig)
        await rig.settled()
        for path in state_files(tmp_path):
            path.unlink()
        rig.server.request("POST", "/slots/0?action=erase", {})
        rig.server.request("POST", "/slots/1?action=erase", {})
        assert await ask(rig, 1) == 0
        assert await ask(rig, 1) > 0
        await rig.settled()
        assert rig.sample("live_reuse_short_total") == 1


async def test_restarted_server_is_noticed_and_the_conversation_restored(
    start_rig: StartRig,
) -> None:
    async with start_rig("hybrid") as rig:
        await ask(rig)
        await rig.settled()
        first = rig.running.server.process
        await asyncio.to_thread(rig.server.kill)
        await asyncio.to_thread(rig.server.start)
        assert await ask(rig, 1) > 0
        await until(lambda: rig.running.server.process not in (None, first))
        await rig.settled()
        assert await ask(rig, 2) > 0
        assert rig.running.server.process is not first


@pytest.mark.parametrize(
    ("path", "shape", "status"),
    [
        ("/v1/chat/completions", "openai", 503),
        ("/v1/messages", "anthropic", 503),
        ("/health", "openai", 502),
    ],
)
async def test_gone_server_is_named_in_the_shape_of_the_api(
    start_rig: StartRig, path: str, shape: str, status: int
) -> None:
    async with start_rig("hybrid", upstream_wait_seconds=0) as rig:
        await asyncio.to_thread(rig.server.kill)
        method = "GET" if path == "/health" else "POST"
        async with rig.client.request(
            method, rig.base_url + path, json={"messages": MESSAGES[0]}
        ) as reply:
            error = await reply.json()
        assert (reply.status, reply.headers["Retry-After"]) == (status, "2")
        assert (error.get("type") == "error") == (shape == "anthropic")
        assert "llama-prefix-cache: llama-server" in error["error"]["message"]
        await asyncio.to_thread(rig.server.start)


async def test_server_killed_in_mid_stream_ends_in_an_error_event(start_rig: StartRig) -> None:
    async with start_rig("hybrid") as rig:
        body = {"messages": MESSAGES[0], "stream": True, "max_tokens": 20_000}
        seen = b""
        async with rig.client.post(rig.base_url + "/v1/chat/completions", json=body) as reply:
            async for chunk in reply.content.iter_any():
                if not seen:
                    await asyncio.to_thread(rig.server.kill)
                seen += chunk
        assert b"llama-prefix-cache: llama-server went away" in seen.splitlines()[-2]
        await asyncio.to_thread(rig.server.start)
        await ask(rig)


async def test_streamed_request_after_failed_ones_holds_no_lease(start_rig: StartRig) -> None:
    async with start_rig("hybrid", n_slots=1) as rig:
        bad: list[dict[str, Any]] = [
            {"messages": [{"role": "user", "content": "x"}], "grammar": "root ::= ("},
            {"messages": [{"role": "nobody"}], "tools": "none"},
            {"messages": []},
        ]
        for body in bad:
            url = rig.base_url + "/v1/chat/completions"
            async with rig.client.post(url, json=body) as reply:
                direct = rig.server.request("POST", "/v1/chat/completions", body)
                assert (reply.status, await reply.json()) == direct
        await ask(rig)


async def test_requests_wait_their_turn_on_one_slot(start_rig: StartRig) -> None:
    async with start_rig("hybrid", n_slots=1) as rig:
        replies = await asyncio.gather(*(ask(rig, i % 3) for i in range(12)))
        assert len(replies) == 12
        await rig.settled()


async def test_full_queue_is_answered_with_retry_after(start_rig: StartRig) -> None:
    async with start_rig("hybrid", n_slots=1, max_requests=2) as rig:

        async def status() -> tuple[int, str | None]:
            body = {"messages": MESSAGES[0], "max_tokens": 200}
            url = rig.base_url + "/v1/chat/completions"
            async with rig.client.post(url, json=body) as reply:
                await reply.read()
                return reply.status, reply.headers.get("Retry-After")

        statuses = await asyncio.gather(*(status() for _ in range(6)))
        assert statuses.count((200, None)) == 2
        assert statuses.count((503, "2")) == 4


async def test_client_that_leaves_the_queue_frees_its_place(start_rig: StartRig) -> None:
    async with start_rig("hybrid", n_slots=1, max_requests=2) as rig:
        url = rig.base_url + "/v1/chat/completions"
        endless = {"messages": MESSAGES[0], "stream": True, "max_tokens": 20_000}
        async with rig.client.post(url, json=endless) as running:
            await running.content.readany()
            async with aiohttp.ClientSession() as leaver:
                leaving = asyncio.ensure_future(leaver.post(url, json={"messages": MESSAGES[1]}))
                await waiting(rig, 1)
                async with rig.client.post(url, json={"messages": MESSAGES[1]}) as refused:
                    assert refused.status == 503
                    await refused.read()
                leaving.cancel()
                await asyncio.gather(leaving, return_exceptions=True)
            await waiting(rig, 0)
            staying = asyncio.ensure_future(ask(rig, 1))
            await waiting(rig, 1)
        assert await staying >= 0
        await rig.settled()


async def waiting(rig: Rig, n_requests: int) -> None:
    """Wait until so many requests are in the queue."""
    await until(lambda: rig.running.server.n_queued == n_requests)


async def test_tenants_share_nothing(start_rig: StartRig) -> None:
    def key(name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {name}"}

    keyed: Any = {"extra_args": ("--api-key", "own,alice,bob"), "upstream_api_key": "own"}
    async with start_rig("full", n_slots=1, **keyed) as rig:
        body = {"messages": MESSAGES[0], "tools": TOOLS, "max_tokens": 4}
        first = await rig.post("/v1/chat/completions", body, headers=key("alice"))
        other = await rig.post("/v1/chat/completions", body, headers=key("bob"))
        assert other["timings"]["cache_n"] == 0
        await rig.settled()
        again = await rig.post("/v1/chat/completions", body, headers=key("alice"))
        assert again["timings"]["cache_n"] > first["usage"]["prompt_tokens"] - 20


async def test_client_that_hangs_up_is_no_error(start_rig: StartRig) -> None:
    async with start_rig("hybrid", n_slots=1) as rig:
        url = rig.base_url + "/v1/chat/completions"
        body = {"messages": MESSAGES[0], "stream": True, "max_tokens": 20_000}
        async with aiohttp.ClientSession() as client:
            async with client.post(url, json=body) as reply:
                await reply.content.readany()
        assert await ask(rig) >= 0
        await rig.settled()


async def test_client_that_hangs_up_at_the_end_of_the_stream_was_served(
    start_rig: StartRig,
) -> None:
    async with start_rig("hybrid") as rig:
        url = rig.base_url + "/v1/chat/completions"
        for i in range(12):
            body = {"messages": MESSAGES[i % 3], "stream": True, "max_tokens": 6}
            async with aiohttp.ClientSession() as client, client.post(url, json=body) as reply:
                async for line in reply.content:
                    if line.startswith(b"data: [DONE]"):
                        break
        await rig.settled()
        outcomes = ("hit", "partial", "miss")
        assert sum(rig.sample("requests_total", outcome=o) for o in outcomes) == 12
