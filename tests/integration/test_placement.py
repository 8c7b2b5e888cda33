"""Requests that llama-server places itself: whoever they land on, nobody reuses what is not theirs."""

import asyncio
from typing import Any

import pytest

from proxy.core.slots import TAINTED
from tests.integration.conftest import StartRig
from tests.integration.rig import CHAT, Reply, Rig, question, until

MESSAGES = "/v1/messages"


def claude(messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {"max_tokens": 4, "messages": messages}


def n_read(reply: Reply) -> int:
    """Return how many tokens of others' or one's own a /v1/messages request reused."""
    return int(reply.content["usage"].get("cache_read_input_tokens") or 0)


async def begin_stream(
    rig: Rig, messages: list[dict[str, Any]], key: str
) -> "asyncio.Future[Reply]":
    """Begin a slow answer and return once it is known to run."""
    body = {"messages": messages, "stream": True, "max_tokens": 10}
    streaming = asyncio.ensure_future(rig.post(CHAT, body, key=key))
    await until(lambda: rig.attachment and any(s.is_running for s in rig.attachment.desk.table))
    return streaming


@pytest.mark.parametrize("n_slots", [1, 2])
async def test_placed_request_keeps_its_slot_to_the_end(start_rig: StartRig, n_slots: int) -> None:
    async with start_rig(n_slots=n_slots) as rig:
        gate = rig.server.hold("generate", n_calls=1)
        asked = asyncio.ensure_future(rig.post(MESSAGES, claude(question("m"))))
        await gate.reached()
        await until(lambda: rig.attachment and not rig.attachment.desk.is_placing)
        assert rig.n_occupied() == 1
        gate.open()
        assert (await asked).status == 200


async def test_slot_that_another_tenant_leaves_is_not_landed_on(start_rig: StartRig) -> None:
    async with start_rig(n_slots=2, idle_save_seconds=60.0) as rig:
        await rig.chat("x", key="bob")
        rig.server.faults.chunk_seconds = 0.02
        same = question("same")
        streaming = await begin_stream(rig, same, "alice")
        reply = await rig.post(MESSAGES, claude(same), key="bob")
        assert (reply.status, n_read(reply) < 10) == (200, True), (
            "the template's beginning is bob's own"
        )
        await streaming


async def test_slot_that_joins_unseen_is_not_taken_for_ones_own(start_rig: StartRig) -> None:
    """Without /slots every slot may have been the one."""
    async with start_rig(n_slots=2, idle_save_seconds=60.0) as rig:
        rig.server.faults.refuse["slots"] = 501
        rig.server.faults.chunk_seconds = 0.02
        streaming = await begin_stream(rig, question("same"), "")
        gate = rig.server.hold("generate", n_calls=1)
        asked = asyncio.ensure_future(rig.post(MESSAGES, claude(question("other")), key=""))
        await gate.reached()
        await streaming
        attachment = rig.attachment
        assert attachment is not None
        await until(lambda: rig.n_occupied() == 2)
        for slot in attachment.desk.table:  # as drift leaves them
            attachment.desk.table.set_content(slot.id, TAINTED)
        gate.open()
        await asked
        await until(lambda: rig.n_occupied() == 0)
        assert {slot.content for slot in attachment.desk.table} == {TAINTED}


async def test_slot_that_cannot_be_erased_is_overwritten(start_rig: StartRig) -> None:
    """llama-server does not read cache_prompt of a /v1/messages request."""
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        same = question("same")
        await rig.chat(same, key="alice")
        rig.server.faults.refuse["erase"] = 500
        reply = await rig.post(MESSAGES, claude(same), key="bob")
        assert (reply.status, n_read(reply)) == (200, 0)
