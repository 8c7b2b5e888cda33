"""llama-swap, the real one or the stand-in, as the proxy will find it, before real llama-servers."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError

import aiohttp
import pytest

from tests.lab.processes import await_end, child_pids
from tests.lab.server import request
from tests.lab.swap import Swap
from tests.lab.waiting import wait_until

HYBRID = "author/hybrid"  # a model's name may have a slash
PROMPT = list(range(100, 150))


@pytest.fixture(scope="module")
def swap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swap]:
    folder: Path = tmp_path_factory.mktemp("swap")
    slots = folder / "slots"
    slots.mkdir()
    kinds = {"full": "full", HYBRID: "hybrid"}
    settings = {"full": {"aliases": ["gpt"], "concurrencyLimit": 2, "unloadTimeout": 1}}
    upstream = {"ignorePaths": ["^/slots$"]}
    with Swap(folder, kinds, slots, settings=settings, upstream=upstream) as started:
        yield started


def complete(swap: Swap, model: str) -> dict[str, Any]:
    body = {"model": model, "prompt": PROMPT, "n_predict": 1, "id_slot": 0}
    status, answer = swap.request("POST", "/completion", body)
    assert status == 200, answer
    timings: dict[str, Any] = answer["timings"]
    return timings


def act_on_slot(swap: Swap, model: str, action: str) -> dict[str, Any]:
    path = f"/upstream/{model}/slots/0?action={action}"
    status, answer = swap.request("POST", path, {"filename": "state.bin"})
    assert status == 200, answer
    result: dict[str, Any] = answer
    return result


def refusal(answer: tuple[int, Any]) -> tuple[int, str]:
    status, body = answer
    assert body["src"] == "llama-swap"
    return status, body["error"]


def test_models_swap_and_a_slot_file_outlives_the_swap(swap: Swap) -> None:
    swap.request("GET", "/unload")
    assert complete(swap, "full")["prompt_n"] == 50
    assert act_on_slot(swap, "full", "save")["n_saved"] == 50
    first_url = swap.child_url("full")

    assert complete(swap, HYBRID)["prompt_n"] == 50
    assert swap.states() == {HYBRID: "ready"}
    with pytest.raises(URLError):
        request(first_url, "GET", "/health")

    assert act_on_slot(swap, "full", "restore")["n_restored"] == 50  # loads it
    assert complete(swap, "gpt")["cache_n"] == 49  # its alias
    assert swap.states() == {"full": "ready"}
    assert swap.evaluated_tokens("full") == 1


def test_what_loads_nothing(swap: Swap) -> None:
    complete(swap, "full")
    not_found = (404, "no router for requested model")
    assert refusal(swap.request("POST", "/v1/chat/completions", {"model": "?"})) == not_found
    no_model = (404, "no model id could be identified")
    assert refusal(swap.request("POST", "/v1/chat/completions", {"messages": []})) == no_model
    assert refusal(swap.request("GET", "/props")) == no_model
    unknown = refusal(swap.request("GET", "/upstream/unknown/slots"))
    assert unknown == (404, "model not found")
    assert swap.request("POST", "/tokenize", {"model": "full"}) == (404, "404 page not found\n")

    ignored = refusal(swap.request("GET", f"/upstream/{HYBRID}/slots"))
    message = f"model {HYBRID} is not loaded; path matches upstream.ignorePaths"
    assert ignored == (409, message)
    assert len(swap.request("GET", "/upstream/full/slots")[1]) == 2

    listed = {each["id"]: each for each in swap.request("GET", "/v1/models")[1]["data"]}
    assert set(listed) == {"full", HYBRID}
    assert listed["full"]["owned_by"] == "llama-swap"
    assert swap.states() == {"full": "ready"}


@asynccontextmanager
async def streaming(client: aiohttp.ClientSession, n_predict: int = -1) -> AsyncIterator[Any]:
    """Begin a stream of the model full; what is not read of it is left."""
    body = {"model": "full", "prompt": PROMPT, "stream": True, "ignore_eos": True}
    async with client.post("/completion", json={**body, "n_predict": n_predict}) as reply:
        await reply.content.readline()
        yield reply.content


async def test_a_busy_model_is_waited_for_and_serves_as_many_as_it_may(swap: Swap) -> None:
    complete(swap, "full")
    body = {"prompt": PROMPT, "n_predict": 1}
    async with aiohttp.ClientSession(swap.base_url) as client:
        async with streaming(client, 3000) as busy:
            other = client.post("/completion", json={**body, "model": HYBRID})
            queued = asyncio.ensure_future(other)
            async with streaming(client):  # overtakes the one that waits
                async with client.get("/upstream/full/health") as reply:
                    assert (reply.status, reply.headers["Retry-After"]) == (429, "1")
                    assert (await reply.json())["error"] == "Too many requests"
            assert not queued.done()
            assert swap.states() == {"full": "ready"}
            assert b'"stop":true' in [line async for line in busy if line.strip()][-1]
        async with await queued as reply:
            assert reply.status == 200
    assert swap.states() == {HYBRID: "ready"}


async def test_unloading_cuts_what_runs_and_it_seems_to_have_ended(swap: Swap) -> None:
    complete(swap, "full")
    async with aiohttp.ClientSession(swap.base_url) as client, streaming(client) as stream:
        async with client.post("/api/models/unload/gpt") as reply:
            assert (reply.status, await reply.text()) == (200, "OK")
        assert swap.states() == {}
        assert b'"stop":true' not in await stream.read()


def test_a_process_that_died_is_started_again_by_the_next_request(swap: Swap) -> None:
    complete(swap, "full")
    (pid,) = child_pids(swap.pid)
    os.kill(pid, signal.SIGKILL)
    await_end([pid])
    wait_until(lambda: not swap.states())
    assert complete(swap, "full")["prompt_n"] == 50


def test_members_of_a_group_run_together_and_one_ends_when_idle_for_its_ttl(tmp_path: Path) -> None:
    together = {"swap": False, "members": ["full", HYBRID]}
    settings = {HYBRID: {"ttl": 1, "useModelName": "known as"}}
    kinds = {"full": "full", HYBRID: "hybrid"}
    with Swap(tmp_path, kinds, settings=settings, groups={"together": together}) as swap:
        complete(swap, "full")
        complete(swap, HYBRID)
        assert swap.states()["full"] == "ready"
        wait_until(lambda: HYBRID not in swap.states())
        assert swap.states() == {"full": "ready"}


async def test_without_one_of_its_keys_only_health_is_answered(tmp_path: Path) -> None:
    with Swap(tmp_path, {"full": "full"}, apiKeys=["a-key"]) as swap:
        assert swap.request("GET", "/health") == (200, "OK")
        message = "unauthorized: invalid or missing API key"
        assert refusal(swap.request("GET", "/running")) == (401, message)
        keyed = {"Authorization": "Bearer a-key"}
        async with aiohttp.ClientSession(swap.base_url, headers=keyed) as client:
            async with client.get("/running") as reply:
                assert await reply.json() == {"running": []}
