"""A saved state that ends the real llama-server does so once, whatever is started again in between."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.lab.conversation import system, user
from tests.lab.models import least_model
from tests.lab.poison import Poison, started_again
from tests.lab.rig import Rig
from tests.lab.router import Router, link_models
from tests.lab.run import LLAMA_SERVER_ARGUMENTS, RunProcess
from tests.live.conftest import StartRig, in_long

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
FIRST = [user(1, 400)]
SECOND = [*FIRST, {"role": "assistant", "content": "It is done."}, user(2)]


def body(path: str, messages: list[Any], **fields: Any) -> dict[str, Any]:
    header = {"system": system(300)["content"]} if path == MESSAGES else {}
    messages = messages if header else [system(300), *messages]
    return {**header, "messages": messages, "max_tokens": 4, "temperature": 0, **fields}


@asynccontextmanager
async def poisoned(start_rig: StartRig, path: str = CHAT) -> AsyncIterator[Rig]:
    """Yield a rig whose store has one state, which ends llama-server; its slot is empty."""
    poison = Poison()
    async with start_rig("full", n_slots=1, n_ctx=16384, rewrite=poison) as rig:
        poison.is_armed = True
        await rig.post(path, body(path, FIRST))
        await rig.settled()
        poison.is_armed = False
        await rig.stop_proxy()
        await asyncio.to_thread(rig.server.kill)
        await asyncio.to_thread(rig.server.start)
        await rig.start_proxy()
        yield rig


async def ask(rig: Rig[Any], path: str = CHAT, **fields: Any) -> str:
    """Go on with the conversation; the answer must be whole."""
    async with rig.client.post(rig.base_url + path, json=body(path, SECOND, **fields)) as reply:
        answer = await reply.text()
        assert reply.status == 200, answer
    assert "error" not in answer
    return answer


@pytest.mark.parametrize(
    ("path", "stream"), [(CHAT, True), *in_long((CHAT, False), (MESSAGES, True))], ids=str
)
async def test_state_that_ends_llama_server_ends_it_once_and_no_request_fails(
    start_rig: StartRig, path: str, stream: bool
) -> None:
    async with poisoned(start_rig, path) as rig, started_again(rig.server) as deaths:
        await ask(rig, path, stream=stream)
        (reason,) = (await rig.health())["reasons"]
        assert reason["kind"] == "a state ended llama-server"
        await rig.settled()
        await rig.stop_proxy()
        await rig.start_proxy()
        await ask(rig, path, stream=stream)
        assert deaths.n == 1
        async with rig.client.get(rig.admin_url + "/checkpoints") as reply:
            listed = (await reply.json())["checkpoints"]
        assert sorted(bool(c["quarantine"]) for c in listed) == [False, True]


async def test_state_that_ends_a_child_of_a_router_ends_it_once(tmp_path: Path) -> None:
    directory = tmp_path / "slots"
    directory.mkdir(mode=0o700)
    models = link_models(tmp_path / "models", {"full": "full"})
    router = Router(models, directory, n_slots=1, log_path=tmp_path / "router.log")
    poison = Poison()
    async with Rig(router, directory, rewrite=poison) as rig:
        for messages, is_armed in (([user(3)], False), (FIRST, True)):  # first contact comes first
            poison.is_armed = is_armed
            await rig.post(CHAT, body(CHAT, messages, model="full"))
            await rig.settled()
        poison.is_armed = False
        await asyncio.to_thread(router.unload, "full")
        for stream in (False, True, False):
            await ask(rig, model="full", stream=stream)
            await rig.settled()
        assert rig.running.store is not None
        assert sum(bool(c.quarantine) for c in rig.running.store) == 1


async def test_state_that_ends_llama_server_under_run_ends_it_once(
    start_rig: StartRig, tmp_path: Path
) -> None:
    async with poisoned(start_rig):
        pass
    model = least_model("full")
    run = RunProcess(
        tmp_path / "run.log",
        model=model,
        slot_save_path=tmp_path / "slots",
        options=("--restart",),
        arguments=LLAMA_SERVER_ARGUMENTS,
    )
    try:
        await asyncio.to_thread(run.start_and_await_caching)
        for _ in range(3):
            await asyncio.to_thread(run.post, CHAT, body(CHAT, SECOND))
        assert len(run.server_pids()) == 2
        assert run.log_text().count("llama-server died") == 1
        assert await asyncio.to_thread(run.stop) == 0
        await asyncio.to_thread(run.start_and_await_caching)
        await asyncio.to_thread(run.post, CHAT, body(CHAT, SECOND))
        assert len(run.server_pids()) == 3
        assert "a state ended llama-server" in str(await asyncio.to_thread(run.health))
    finally:
        run.kill()
