"""Clients that leave: what was begun in a slot is finished, and only then is the slot given on."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.core.model import SlotId
from proxy.core.slots import Known
from proxy.serving import cached, launches
from tests.fakes.faults import Faults, Gate
from tests.integration.conftest import StartRig
from tests.integration.rig import COMPLETION, Rig, hang_up, question, with_image
from tests.lab.waiting import HANG_SECONDS, until

HELLO = [{"role": "user", "content": " hello"}]


async def leave_during(rig: Rig, place: str, name: str) -> Gate:
    """Send a request, and hang up once llama-server is at *place* for it."""
    gate = rig.server.hold(place, n_calls=1)
    asked = rig.begin_chat(name)
    await gate.reached()
    await hang_up(asked)
    return gate


async def leave_stream(rig: Rig) -> None:
    """Hang up in the middle of a stream."""
    rig.server.faults.chunk_seconds = 0.01
    body = {"messages": question("a"), "stream": True, "max_tokens": 10_000}
    async with rig.client.post(rig.base_url + "/v1/chat/completions", json=body) as reply:
        await reply.content.readany()


async def stays_leased(rig: Rig, seconds: float = 0.25) -> bool:
    """Return whether the slot is held on to for longer than an abandoned request is."""
    for _ in range(10):
        if rig.n_occupied() == 0:
            return False
        await asyncio.sleep(seconds / 10)
    return True


async def test_leaving_during_a_restore_does_not_cut_it_short(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        await rig.chat("a")
        await rig.settled()
        await rig.chat("b")
        await rig.settled()
        gate = await leave_during(rig, "restore", "a")
        assert await stays_leased(rig)
        gate.open()
        await rig.settled()
        assert rig.sample("restores_total", result="done") == 1
        assert (await rig.chat("a")).n_reused == 308
        assert rig.sample("restores_total", result="done") == 1  # it was there already


async def test_leaving_during_the_save_of_displaced_work_does_not_cut_it_short(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        await rig.chat("a")
        gate = await leave_during(rig, "save", "b")
        assert await stays_leased(rig)
        assert len(rig.checkpoints) == 0
        gate.open()
        await until(lambda: rig.checkpoints == [("conversation", 312)])
        assert (await rig.chat("a")).n_reused == 308


async def test_leaving_in_the_middle_of_an_answer_keeps_the_next_turn_from_no_save(
    start_rig: StartRig,
) -> None:
    """The prompt was evaluated, and llama-server tells how many tokens of the answer the slot has."""
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        gate, process = rig.server.hold("save"), await rig.attached()
        await leave_stream(rig)
        await until(process.slots.free)
        (slot,) = process.slots
        assert isinstance(slot.content, Known)
        assert slot.content.n_tokens == len(rig.server.slots[0].tokens)
        assert (await rig.chat("a")).n_reused == 308
        gate.open()


async def test_prompt_whose_client_left_before_it_was_sent_is_not_waited_for_in_its_slot(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=2, idle_save_seconds=60.0) as rig:
        await rig.chat("a")
        await rig.chat("b")
        gate = await leave_during(rig, "save", "c")
        assert await stays_leased(rig)
        assert (await rig.chat("c")).status == 200
        gate.open()
        await until(lambda: len(rig.checkpoints) == 2)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETION, {"prompt": " other words", "cache_prompt": False}),
        ("/v1/messages", {"messages": HELLO}),
        ("/v1/messages", {"messages": with_image(HELLO)}),
    ],
    ids=["uncached", "read", "not read"],
)
async def test_leaving_during_the_save_before_another_kind_of_request_does_not_cut_it_short(
    start_rig: StartRig, path: str, body: dict[str, Any]
) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        await rig.chat("a")
        gate = rig.server.hold("save", n_calls=1)
        asked = asyncio.ensure_future(rig.post(path, body))
        await gate.reached()
        await hang_up(asked)
        assert await stays_leased(rig)
        gate.open()
        await until(lambda: rig.checkpoints == [("conversation", 312)])


async def test_leaving_before_an_uncached_request_was_sent_leaves_every_slot_known(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=2, idle_save_seconds=60.0) as rig:
        for name in "ab":
            await rig.chat(name)
        process = await rig.attached()
        gate = rig.server.hold("slots", n_calls=1)
        body = {"messages": with_image(HELLO)}
        asked = asyncio.ensure_future(rig.post("/v1/messages", body))
        await gate.reached()
        await hang_up(asked)
        await until(lambda: rig.n_occupied() == 0)
        gate.open()
        assert all(isinstance(slot.content, Known) for slot in process.slots)


async def test_slot_that_comes_free_once_the_client_of_a_request_has_left_unsent_stays_known(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=2, idle_save_seconds=60.0) as rig:
        process = await rig.attached()
        await rig.chat("b")
        rig.server.hold("chunk")
        streaming = rig.begin_chat("a", stream=True)
        await until(lambda: rig.server.n_chunks_sent)
        save = rig.server.hold("save", n_calls=1)
        body = {"messages": with_image(HELLO)}  # llama-server may choose any slot for it
        asked = asyncio.ensure_future(rig.post("/v1/messages", body))
        await save.reached()
        await hang_up(asked)
        await until(lambda: any(slot.is_closing for slot in process.slots))
        rig.server.release("chunk")
        await streaming
        await until(lambda: not any(slot.is_running for slot in process.slots))
        save.open()
        assert (await rig.chat("a")).n_reused == 308


async def test_leaving_with_an_uncached_answer_leaves_the_other_slots_as_they_were(
    start_rig: StartRig,
) -> None:
    """Which slot it ran in is still looked for when the client has the answer."""
    async with start_rig(n_slots=3, idle_save_seconds=60.0) as rig:
        for name in "abc":
            await rig.chat(name)
        process = await rig.attached()
        body = {"messages": with_image(HELLO)}
        assert (await rig.post("/v1/messages", body)).status == 200
        await until(lambda: rig.n_occupied() == 0)
        assert sum(isinstance(slot.content, Known) for slot in process.slots) == 2


async def test_leaving_during_generation_holds_the_slot_until_it_has_ended(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        await leave_during(rig, "generate", "a")
        assert rig.n_occupied() == 1
        await until(lambda: rig.n_occupied() == 0)
        assert not rig.server.slots[0].is_processing


async def test_leaving_a_stream_ends_it_in_the_server(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        rig.server.faults.chunk_seconds = 0.01
        body = {"messages": [{"role": "user", "content": " hi"}], "stream": True}
        url = rig.base_url + "/v1/chat/completions"
        async with rig.client.post(url, json={**body, "max_tokens": 10_000}) as reply:
            await reply.content.readany()
        await until(lambda: not rig.server.slots[0].is_processing)
        rig.server.faults.chunk_seconds = 0.0
        assert (await rig.chat("a")).status == 200


async def test_leaving_while_the_prompt_is_read_takes_no_slot(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        gate = await leave_during(rig, "apply-template", "a")
        assert rig.n_occupied() == 0
        gate.open()
        assert rig.requests_seen() == []


async def test_abandoned_prompt_is_found_again_in_its_slot(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        await leave_stream(rig)
        rig.server.faults.chunk_seconds = 0.0
        assert (await rig.chat("a")).n_reused == 308


async def test_slot_of_an_abandoned_stream_is_free_as_soon_as_it_is_idle(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "DISCONNECT_SECONDS", 3600.0)
    async with start_rig(n_slots=1) as rig:
        await leave_stream(rig)
        await until(lambda: rig.n_occupied() == 0)
        assert not rig.server.slots[0].is_processing


async def test_request_whose_client_left_is_waited_for_once(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With default flags its turn ends before its slot comes free."""
    outlast_parsing = launches.outlast_parsing

    async def wait_once(*args: Any) -> None:
        await outlast_parsing(*args)
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + HANG_SECONDS)
        monkeypatch.setattr(launches, "time", later)
        monkeypatch.setattr(launches, "DISCONNECT_SECONDS", HANG_SECONDS)

    monkeypatch.setattr(launches, "outlast_parsing", wait_once)
    async with start_rig(n_slots=1, faults=Faults(clears_idle_slots=True)) as rig:
        process = await rig.attached()
        process.clears_idle_slots = True
        gate = await leave_during(rig, "parse", "a")
        await until(lambda: launches.DISCONNECT_SECONDS == HANG_SECONDS)
        await until(lambda: rig.n_occupied() == 0)
        gate.open()


@pytest.mark.parametrize("with_slots", [True, False])
async def test_many_clients_that_leave_leak_nothing(start_rig: StartRig, with_slots: bool) -> None:
    async with start_rig(n_slots=2) as rig:
        if not with_slots:
            rig.server.faults.refuse["slots"] = 501
        rig.server.faults.slow_seconds.update(generate=0.01, save=0.005, restore=0.005)
        asked = []
        for i in range(40):
            asked.append(rig.begin_chat("abcdef"[i % 6]))
            if i % 3:
                await asyncio.sleep(0.004)
                await hang_up(asked.pop(i % len(asked)))
        await asyncio.gather(*asked)
        await rig.settled()
        assert (await rig.health())["n_waiting"] == 0


async def test_slot_of_a_process_that_is_gone_is_not_waited_for(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        before = await rig.attached()
        gate = rig.server.hold("generate", n_calls=1)
        leaving = rig.begin_chat("leaving")
        await gate.reached()
        await hang_up(leaving)
        rig.server.replace_process()
        await rig.attached()
        rig.server.hold("chunk")
        staying = rig.begin_chat("staying", stream=True)
        await until(lambda: rig.server.n_chunks_sent)
        await until(lambda: not before.slots[SlotId(0)].is_leased)
        rig.server.release_all()
        assert (await staying).status == 200
        assert rig.sample("saves_total", result="failed") == 0


async def test_warming_waits_for_a_save_that_began_with_its_answer(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached, "is_cut_at_risk", lambda *_: True)
    async with start_rig(n_slots=1) as rig:
        gate = rig.server.hold("save", n_calls=1)
        body = {"messages": question("a")}
        warming = asyncio.ensure_future(rig.client.post(rig.admin_url + "/warm?whole=1", json=body))
        await gate.reached()
        gate.open()
        async with await warming as reply:
            assert '"warmed"' in (await reply.text()).splitlines()[-1]
