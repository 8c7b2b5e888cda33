"""Slots that llama-server empties by itself, and restores and answers that find no room in its context.

With --kv-unified all slots share the cells of one context.
"""

import asyncio
from typing import Any

import pytest

from proxy.core.slots import Empty
from tests.lab.conversation import answer, user
from tests.lab.waiting import until
from tests.live.conftest import StartRig

UNIFIED: dict[str, Any] = {"extra_args": ("--kv-unified", "--cache-ram", "0"), "n_ctx": 2048}
LONG = [[user(seed, 160), answer(seed), user(seed + 10, 160)] for seed in (1, 2)]
"""Each takes more than half of the cells."""


async def test_restore_that_finds_no_room_makes_some(start_rig: StartRig) -> None:
    async with start_rig("full", **UNIFIED) as rig:
        for messages in LONG:
            await rig.chat(messages)
            await rig.settled()
        await rig.restart()
        for messages in [*LONG, LONG[0]]:
            reply = await rig.chat(messages)
            assert reply["timings"]["prompt_n"] == 1
        assert rig.sample("restores_total", result="refused") == 0
        assert (await rig.health())["reasons"] == []


async def test_restore_that_finds_no_room_blames_no_state(start_rig: StartRig) -> None:
    async with start_rig("full", **UNIFIED) as rig:
        for messages in LONG:
            await rig.chat(messages)
            await rig.settled()
        await rig.restart()
        chat = rig.base_url + "/v1/chat/completions"
        endless = {"messages": LONG[0], "stream": True, "ignore_eos": True}
        async with rig.client.post(chat, json=endless) as running:
            await running.content.readline()
            # It fails: llama-server has no room for both.
            async with rig.client.post(chat, json={"messages": LONG[1], "max_tokens": 4}):
                pass
        await rig.settled()
        assert rig.sample("restore_ineffective_total") == 0
        reply = await rig.chat(LONG[1])
        assert reply["timings"]["prompt_n"] == 1


async def test_stream_that_outgrows_the_cells_ends_in_one_error(start_rig: StartRig) -> None:
    async with start_rig("full", **UNIFIED) as rig:

        async def ask(seed: int) -> bytes:
            body = {"messages": [user(seed, 250)], "stream": True, "ignore_eos": True}
            body |= {"model": "any", "max_tokens": 4000}
            async with rig.client.post(rig.base_url + "/v1/messages", json=body) as reply:
                return await reply.read()

        for told in await asyncio.gather(ask(1), ask(2)):
            assert told.count(b"event: error") == 1
            assert b"Context size has been exceeded" in told
        await rig.settled()
        assert rig.sample("unanswered_requests_total", reason="llama-server gone") == 0
        assert rig.sample("drift_total") == 0


async def test_conversation_whose_slot_was_emptied_for_another_is_restored(
    start_rig: StartRig,
) -> None:
    async with start_rig("full", **UNIFIED) as rig:
        for messages in LONG:
            await rig.chat(messages)
            await rig.settled()
        for messages in LONG:
            reply = await rig.chat(messages)
            assert reply["timings"]["prompt_n"] == 1
        assert rig.sample("live_reuse_short_total") == 0


async def test_slot_is_saved_before_llama_server_empties_it_for_another(
    start_rig: StartRig,
) -> None:
    """llama-server shows only by emptying a slot that its cells are full: the first time costs a state."""
    async with start_rig("full", idle_save_seconds=600.0, **UNIFIED) as rig:
        for messages in [*LONG, LONG[0]]:
            await rig.chat(messages)
        for messages in [*LONG[::-1], LONG[1]]:
            assert (await rig.chat(messages))["timings"]["prompt_n"] == 1
        assert rig.sample("restores_total", result="refused") == 0


@pytest.mark.parametrize(
    ("path", "is_stream"), [("/v1/chat/completions", False), ("/v1/messages", True)]
)
async def test_requests_that_do_not_fit_together_run_one_after_the_other(
    start_rig: StartRig, path: str, is_stream: bool
) -> None:
    """llama-server fails both: the one without a token is sent again, and later ones wait."""
    async with start_rig("full", **UNIFIED) as rig:
        url = rig.base_url + path
        for n_tokens in (4000, 100):
            first = {"messages": LONG[0], "stream": True, "ignore_eos": True, "model": "any"}
            async with rig.client.post(url, json=first | {"max_tokens": n_tokens}) as running:
                await running.content.readline()
                short = {"messages": LONG[1], "max_tokens": 4, "stream": is_stream, "model": "any"}
                async with rig.client.post(url, json=short) as second:
                    assert second.status == 200
                    assert b"exceeded" not in await second.read()
                told = await running.read()
            await rig.settled()
            assert (b"exceeded" in told) == (n_tokens == 4000)
        assert rig.sample("drift_total") == 0


async def test_conversation_comes_back_from_disk_when_llama_server_has_slept(
    start_rig: StartRig,
) -> None:
    async with start_rig("full", extra_args=("--sleep-idle-seconds", "2")) as rig:
        await rig.chat(LONG[0])
        await rig.settled()
        (process,) = rig.running.pool.processes
        await until(lambda: all(isinstance(slot.content, Empty) for slot in process.slots))
        reply = await rig.chat(LONG[0])
        assert reply["timings"]["prompt_n"] == 1
        assert rig.running.pool.processes == [process]


async def test_refused_request_whose_prompt_cannot_be_read_costs_no_slot_its_content(
    start_rig: StartRig,
) -> None:
    async with start_rig("full", n_slots=1) as rig:
        await rig.chat(LONG[0])
        await rig.settled()
        for bad in (
            {"messages": [{"role": "user"}]},
            {"prompt": ["a", "b"], "grammar": "root ::= ("},
        ):
            path = "/v1/chat/completions" if "messages" in bad else "/v1/completions"
            async with rig.client.post(rig.base_url + path, json=bad) as reply:
                assert reply.status == 400
        assert (await rig.chat(LONG[0]))["timings"]["prompt_n"] == 1
        assert rig.sample("restores_total", result="done") == 0


async def test_image_for_a_model_that_takes_none_costs_no_slot_its_content(
    start_rig: StartRig,
) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    shown = {"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}
    async with start_rig("full", n_slots=1) as rig:
        await rig.chat(LONG[0])
        await rig.settled()
        chat = rig.base_url + "/v1/chat/completions"
        async with rig.client.post(chat, json={"messages": [*LONG[0], shown]}) as reply:
            assert reply.status >= 400
            assert "image" in await reply.text()
        assert (await rig.chat(LONG[0]))["timings"]["prompt_n"] == 1
        assert rig.sample("restores_total", result="done") == 0
