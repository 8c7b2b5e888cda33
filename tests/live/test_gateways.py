"""nginx between the proxy and llama-server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.lab.conversation import agent_requests, system
from tests.lab.gateway import Gateway
from tests.lab.models import least_model
from tests.lab.rig import Rig
from tests.lab.server import LlamaServer
from tests.lab.waiting import until
from tests.live.conftest import in_long

ONE, TWO = (agent_requests(2, 0, header=[system(300, seed)], seed=seed) for seed in (1, 2))


@asynccontextmanager
async def behind(
    folder: Path, n_servers: int = 1, more: str = "", n_slots: int = 1, **how: Any
) -> AsyncIterator[tuple[Rig, Gateway]]:
    """Yield a rig whose proxy reaches its llama-server, or several in turns, by a gateway, and that one."""
    directory = folder / "slots"
    directory.mkdir(mode=0o700)
    model = least_model("hybrid")
    servers = [LlamaServer(model, directory, n_slots=n_slots) for _ in range(n_servers)]
    gateway = Gateway([server.port for server in servers], folder, more)
    first, *others = servers
    async with AsyncExitStack() as stack:
        for process in (*others, gateway):
            await asyncio.to_thread(process.start)
            stack.push_async_callback(asyncio.to_thread, process.stop)
        rig = Rig(first, directory, upstream=gateway.base_url, **how)
        yield await stack.enter_async_context(rig), gateway


async def test_state_in_use_when_llama_server_ends_behind_a_gateway_is_quarantined(
    tmp_path: Path,
) -> None:
    async with behind(tmp_path) as (rig, _), restored(rig) as asked:
        await asyncio.to_thread(rig.server.kill)
        await rig.reasons_are("llama-server unreachable", "a state ended llama-server")
        await asyncio.to_thread(rig.server.start)
        assert (await asked)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        await rig.reasons_are("a state ended llama-server")


@pytest.mark.parametrize("seen", [*in_long(False), True], ids=["at once", "seen"])
async def test_gateway_that_is_restarted_while_a_state_is_in_use_leaves_the_state_usable(
    tmp_path: Path, *, seen: bool
) -> None:
    async with behind(tmp_path) as (rig, gateway), restored(rig) as asked:
        await asyncio.to_thread(gateway.kill)
        if seen:
            await rig.reasons_are("llama-server unreachable", "a state ended llama-server")
        await asyncio.to_thread(gateway.start)
        with suppress(AssertionError):  # it was sent, so it may be answered with 502
            await asked
        await rig.reasons_are()
        assert rig.running.store is not None
        assert not list(rig.running.store.quarantined)


@asynccontextmanager
async def restored(rig: Rig) -> AsyncIterator["asyncio.Future[Any]"]:
    """Yield a request that llama-server is answering from a restored state."""
    for messages in (ONE[0], TWO[0]):
        await rig.chat(messages)
        await rig.settled()
    asked = asyncio.ensure_future(rig.chat(ONE[1], max_tokens=300))
    await until(lambda: is_generating(rig))
    yield asked


async def is_generating(rig: Rig) -> bool:
    """Return whether llama-server is in the middle of an answer."""
    _, (slot,) = await asyncio.to_thread(rig.server.request, "GET", "/slots")
    return bool(slot["is_processing"] and slot["next_token"][0]["n_decoded"] > 10)


async def test_llama_servers_that_answer_in_turns_are_named_and_left_alone(tmp_path: Path) -> None:
    async with behind(tmp_path, n_servers=2, settles=False) as (rig, _):
        await rig.reasons_are("several llama-servers")
        for messages in (*ONE, *TWO):
            assert (await rig.chat(messages))["usage"]["prompt_tokens"]
        await rig.reasons_are("several llama-servers")


async def test_gateway_that_gives_a_save_no_time_leaves_the_other_slots_cached(
    tmp_path: Path,
) -> None:
    save = "if ($arg_action = save) { return 504; } proxy_pass http://llama;"
    more = f"location = /slots/0 {{ {save} }}"
    async with behind(tmp_path, more=more, n_slots=2, settles=False) as (rig, _):
        await rig.reasons_are("saves fail")
        (reason,) = (await rig.health())["reasons"]
        assert "a gateway or host answers 504" in reason["reason"]
        for messages in (ONE[0], TWO[0]):
            await rig.chat(messages)
            await rig.settled()
        for messages in (ONE[1], TWO[1]):
            cached = (await rig.chat(messages))["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached > 0
