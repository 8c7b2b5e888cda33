"""A write budget that is used up: nothing more is written, and requests are answered all the same."""

from typing import Any

import aiohttp
import msgspec
import pytest

from proxy.core.conditions import DegradationKind
from tests.lab.conversation import Message, system, user
from tests.lab.rig import Rig
from tests.live.conftest import StartRig, in_long

HEADER = [system(150)]
MORE_BYTES = 1 << 20
N_CONVERSATIONS = 16


def request(number: int) -> list[Message]:
    return [*HEADER, user(number, 400)]


async def answer(rig: Rig, messages: list[Message]) -> Any:
    reply = await rig.chat(messages)
    return reply["choices"][0]["message"]["content"]


async def answer_without_cache(rig: Rig, messages: list[Message]) -> Any:
    """Return what llama-server itself answers when it evaluates the whole prompt."""
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "cache_prompt": False}
    url = rig.server.base_url + "/v1/chat/completions"
    async with aiohttp.ClientSession() as client, client.post(url, json=body) as reply:
        return (await reply.json())["choices"][0]["message"]["content"]


def written(rig: Rig) -> int:
    assert rig.running.store is not None
    return rig.running.store.writes.last_day_bytes


def file_bytes(rig: Rig) -> int:
    assert rig.running.store is not None
    return sum(
        path.stat().st_size for path in rig.running.store.files.directory.glob("lpc-*.state")
    )


async def set_budget(rig: Rig, n_bytes: int) -> None:
    """Restart both with a budget; the count goes on where it was."""
    rig.settings = msgspec.structs.replace(rig.settings, max_write_bytes_per_day=n_bytes)
    await rig.restart()


@pytest.mark.parametrize("kind", ["hybrid", *in_long("full")])
async def test_used_up_write_budget_stops_saves_and_requests_are_answered_right(
    start_rig: StartRig, kind: str
) -> None:
    async with start_rig(kind, n_slots=1) as rig:
        await answer(rig, request(0))
        await rig.settled()
        before = written(rig)
        assert before >= file_bytes(rig) > 0, "the states of first contact count as well"
        budget = before + MORE_BYTES
        await set_budget(rig, budget)
        assert written(rig) >= before
        answers = []
        for number in range(N_CONVERSATIONS):
            answers.append(await answer(rig, request(number)))
            await rig.settled()
        assert DegradationKind.WRITE_BUDGET_SPENT in rig.running.degradations
        assert before < written(rig) <= budget
        assert len(rig.running.store or ()) < N_CONVERSATIONS // 2
        await rig.restart()
        for number in range(N_CONVERSATIONS - 6, N_CONVERSATIONS):
            assert await answer(rig, request(number)) == answers[number]
            await rig.settled()
        assert written(rig) <= budget + MORE_BYTES // 4, "first contact alone may exceed it"
        await rig.stop_proxy()
        for number in (1, N_CONVERSATIONS - 1):
            assert await answer_without_cache(rig, request(number)) == answers[number]
