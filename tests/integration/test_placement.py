"""Requests that llama-server places itself: whoever they land on, nobody reuses what is not theirs.

It drops the id_slot of /v1/messages. Where their prompt can be read, a slot is prepared for them that is
the most similar one; with an image they may land in any.
"""

import asyncio
from typing import Any

import pytest

from proxy.core.slots import TAINTED
from tests.integration.conftest import StartRig
from tests.integration.rig import (
    CHAT,
    MESSAGES_FORMS,
    Form,
    Messages,
    Reply,
    Rig,
    question,
    until,
    with_image,
)

MESSAGES = "/v1/messages"
N_QUESTION = 309


def claude(messages: Messages) -> dict[str, Any]:
    return {"max_tokens": 4, "messages": messages}


async def n_evaluated_for(rig: Rig, messages: Messages, key: str) -> int:
    """Return how many tokens are evaluated for a request, whoever asks for it."""
    before = rig.server.n_evaluated
    reply = await rig.post(MESSAGES, claude(messages), key=key)
    assert reply.status == 200
    return rig.server.n_evaluated - before


async def begin_stream(
    rig: Rig, messages: list[dict[str, Any]], key: str
) -> "asyncio.Future[Reply]":
    """Begin a slow answer and return once it is known to run."""
    body = {"messages": messages, "stream": True, "max_tokens": 10}
    streaming = asyncio.ensure_future(rig.post(CHAT, body, key=key))
    await until(lambda: rig.attachment and any(s.is_running for s in rig.attachment.desk.table))
    return streaming


@MESSAGES_FORMS
@pytest.mark.parametrize("n_slots", [1, 2])
async def test_placed_request_keeps_its_slot_to_the_end(
    start_rig: StartRig, n_slots: int, form: Form
) -> None:
    async with start_rig(n_slots=n_slots) as rig:
        gate = rig.server.hold("generate", n_calls=1)
        asked = asyncio.ensure_future(rig.post(MESSAGES, claude(form(question("m")))))
        await gate.reached()
        await until(lambda: rig.attachment and not rig.attachment.desk.is_placing)
        assert rig.n_occupied() == 1
        gate.open()
        assert (await asked).status == 200


@MESSAGES_FORMS
async def test_slot_that_another_tenant_leaves_is_not_landed_on(
    start_rig: StartRig, form: Form
) -> None:
    async with start_rig(n_slots=2, idle_save_seconds=60.0) as rig:
        await rig.chat("x", key="bob")
        rig.server.faults.chunk_seconds = 0.02
        same = question("same")
        streaming = await begin_stream(rig, same, "alice")
        n_evaluated = await n_evaluated_for(rig, form(same), "bob")
        assert n_evaluated >= N_QUESTION - 10, "the template's beginning is bob's own"
        await streaming


async def test_slot_that_joins_unseen_is_not_taken_for_ones_own(start_rig: StartRig) -> None:
    """Without /slots every slot may have been the one."""
    async with start_rig(n_slots=2, idle_save_seconds=60.0) as rig:
        rig.server.faults.refuse["slots"] = 501
        rig.server.faults.chunk_seconds = 0.02
        streaming = await begin_stream(rig, question("same"), "")
        gate = rig.server.hold("generate", n_calls=1)
        asked = asyncio.ensure_future(rig.post(MESSAGES, claude(with_image(question("other")))))
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


@MESSAGES_FORMS
async def test_slot_that_cannot_be_erased_is_overwritten(start_rig: StartRig, form: Form) -> None:
    """llama-server does not read cache_prompt of a /v1/messages request."""
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        same = question("same")
        await rig.chat(same, key="alice")
        rig.server.faults.refuse["erase"] = 500
        assert await n_evaluated_for(rig, form(same), "bob") >= N_QUESTION
