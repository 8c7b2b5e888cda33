"""Whatever is wrong with the cache, requests are answered, and the reason is told."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.core.eviction import Removal
from proxy.errors import StoreFault, StoreLocked
from proxy.store.index import Index
from tests.lab.conversation import agent_requests, system, tools
from tests.lab.rig import Rig
from tests.lab.running import run_proxy
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
    async with start_rig("full", extra_args=("--embeddings",)) as rig:
        await rig.reasons_are("store not open", "only embeddings")
        assert not rig.server.has_died


async def test_damaged_index_is_made_anew_before_requests_are_served(
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
        assert len(rig.running.store) >= n_states
        assert await ask(rig, 1) > 0
        assert rig.sample("restores_total", result="done") == 1


@contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """Mount a directory over itself, read-only; skips the test where that is refused."""
    at = str(directory)
    mounts = (["--bind", at, at], ["-o", "remount,bind,ro", at])
    if any(subprocess.run(["mount", *mount], capture_output=True).returncode for mount in mounts):
        subprocess.run(["umount", at], capture_output=True)
        pytest.skip("mounts are not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", at], check=True)


@pytest.mark.parametrize("kind", ["full", "hybrid"])
async def test_states_in_a_read_only_directory_are_restored(
    start_rig: StartRig, tmp_path: Path, kind: str
) -> None:
    async with start_rig(kind) as rig:
        await ask(rig)
        await rig.stop_proxy()
        await asyncio.to_thread(rig.server.stop)
        before = {path: path.read_bytes() for path in sorted((tmp_path / "slots").rglob("*.*"))}
        with read_only(tmp_path / "slots"):
            await asyncio.to_thread(rig.server.start)
            await rig.start_proxy()
            assert await ask(rig, 1) > 0
            assert rig.sample("restores_total", result="done") == 1
            await ask(rig, 2)
            await rig.settled()
            health = await rig.health()
            (reason,) = health["reasons"]  # that there is no room is not true
            assert reason["kind"] == "directory is read-only"
            assert f"({tmp_path / 'slots'})" in reason["reason"]
            assert health["state"] == "degraded"
            assert rig.running.store is not None
            for checkpoint in rig.running.store:
                with pytest.raises(StoreFault, match="read-only"):
                    await rig.running.store.remove(checkpoint, Removal.OPERATOR)
            await rig.stop_proxy()
        assert {path: path.read_bytes() for path in before} == before


async def test_read_only_directory_of_another_model_is_named_once(
    start_rig: StartRig, tmp_path: Path
) -> None:
    async with start_rig("hybrid") as rig:
        await ask(rig)
    with read_only(tmp_path / "slots"):
        async with start_rig("full", settles=False) as rig:
            await ask(rig)
            health = await rig.health()
            (reason,) = health["reasons"]
            assert reason["kind"] == "nothing can be read or saved"
            assert "has no state of this model" in reason["reason"]
            assert health["state"] == "forwarding"


async def test_read_only_directory_without_a_state_is_named_once(
    start_rig: StartRig, tmp_path: Path
) -> None:
    (tmp_path / "slots").mkdir(mode=0o700)
    with read_only(tmp_path / "slots"):
        async with start_rig("hybrid", settles=False) as rig:
            await ask(rig)
            await rig.settled()
            health = await rig.health()
            assert [reason["kind"] for reason in health["reasons"]] == ["store not open"]
            assert "this user may not write it" in health["reasons"][0]["reason"]
            assert not rig.sample("cache_faults_total", stage="lookup")


async def test_second_proxy_on_the_directory_is_refused(start_rig: StartRig) -> None:
    async with start_rig("hybrid") as rig:
        with pytest.raises(StoreLocked, match="another llama-prefix-cache"):
            async with run_proxy(rig.settings):
                pass
        await ask(rig)


def state_files(tmp_path: Path) -> list[Path]:
    found = list((tmp_path / "slots").glob("lpc-*.state"))
    assert found
    return found


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


async def test_gone_server_is_named_in_the_shape_of_the_api(start_rig: StartRig) -> None:
    async with start_rig("hybrid", upstream_wait_seconds=0) as rig:
        await asyncio.to_thread(rig.server.kill)
        for method, path, shape, status in (
            ("POST", "/v1/chat/completions", None, 503),
            ("POST", "/v1/messages", "error", 503),
            ("GET", "/health", None, 502),
        ):
            body = {"messages": MESSAGES[0]}
            async with rig.client.request(method, rig.base_url + path, json=body) as reply:
                error = await reply.json()
            assert (reply.status, reply.headers["Retry-After"]) == (status, "2")
            assert error.get("type") == shape
            assert "llama-prefix-cache: llama-server" in error["error"]["message"]


@pytest.mark.parametrize("has_slot_save_path", [True, False])
async def test_llama_server_that_a_completion_would_end_makes_embeddings(
    start_rig: StartRig, has_slot_save_path: bool
) -> None:
    """Without --slot-save-path no slot can be erased."""
    how: dict[str, Any] = {"has_slot_save_path": has_slot_save_path}
    async with start_rig("full", extra_args=("--embeddings",), **how) as rig:
        await rig.reasons_are("only embeddings")
        wanted = {"content": "one sentence"}
        _, direct = await asyncio.to_thread(rig.server.request, "POST", "/embeddings", wanted)
        async with rig.client.post(rig.base_url + "/embeddings", json=wanted) as reply:
            assert await reply.json() == direct
        assert not rig.server.has_died
        health = await rig.health()
        assert (health["state"], len(health["reasons"])) == ("caching", 1)


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
