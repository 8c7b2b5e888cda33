"""Requests that llama-server places itself: whoever they land on, nobody reuses what is not theirs.

It drops the id_slot of /v1/messages. Where their prompt can be read, a slot is prepared for them that is
the most similar one; with an image they may land in any.
"""

import asyncio
from typing import Any

import aiohttp
import pytest

from proxy.core.model import SlotId
from proxy.core.slots import TAINTED, Empty, Known, SlotPhase
from proxy.serving import cached, launches, placement, uncached
from proxy.serving.launches import LastTasks, begun_since, see_through
from proxy.serving.placement import SimilarRequest
from proxy.serving.process import Process
from tests.fakes.slots import Memory
from tests.integration.conftest import StartRig
from tests.integration.rig import (
    CHAT,
    COMPLETION,
    KEYS,
    MESSAGES_FORMS,
    Form,
    Messages,
    Reply,
    Rig,
    hang_up,
    question,
    text,
    wait_for_start,
    with_image,
)
from tests.lab.waiting import HANG_SECONDS, until

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
    """Begin an answer and return once it is known to run; held at "chunk", it goes on until let on."""
    body = {"messages": messages, "stream": True, "max_tokens": 10}
    streaming = asyncio.ensure_future(rig.post(CHAT, body, key=key))
    await until(
        lambda: rig.process and any(s.phase is SlotPhase.RUNNING for s in rig.process.slots)
    )
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
        await until(lambda: rig.process and not rig.process.queue.is_placing)
        assert rig.n_occupied() == 1
        gate.open()
        assert (await asked).status == 200


async def test_only_slot_counts_as_running_once_llama_server_runs_the_request(
    start_rig: StartRig,
) -> None:
    """Else a prompt whose client leaves while it is parsed would not be waited for."""
    async with start_rig(n_slots=1) as rig:
        process, gate = await rig.settled(), rig.server.hold("parse", n_calls=1)
        asked = asyncio.ensure_future(rig.post(MESSAGES, claude(question("m"))))
        await gate.reached()
        assert not process.slots[SlotId(0)].is_running
        gate.open()
        assert (await asked).status == 200


@MESSAGES_FORMS
async def test_slot_that_another_tenant_leaves_is_not_landed_on(
    start_rig: StartRig, form: Form
) -> None:
    async with start_rig(n_slots=2, idle_save_seconds=60.0, **KEYS) as rig:
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
        rig.server.hold("chunk")
        streaming = await begin_stream(rig, question("same"), "")
        gate = rig.server.hold("generate", n_calls=1)
        asked = asyncio.ensure_future(rig.post(MESSAGES, claude(with_image(question("other")))))
        await gate.reached()
        rig.server.release("chunk")
        await streaming
        await until(lambda: rig.sample("requests_total", outcome="miss") == 1)  # its slot is free
        process = rig.process
        assert process is not None
        await until(lambda: rig.n_occupied() == 2)
        for slot in process.slots:  # as drift leaves them
            process.slots.set_content(slot.id, TAINTED)
        gate.open()
        await asked
        await until(lambda: rig.n_occupied() == 0)
        assert {slot.content for slot in process.slots} == {TAINTED}


@MESSAGES_FORMS
async def test_slot_that_cannot_be_erased_is_overwritten(start_rig: StartRig, form: Form) -> None:
    """llama-server does not read cache_prompt of a /v1/messages request."""
    async with start_rig(n_slots=1, idle_save_seconds=60.0, **KEYS) as rig:
        same = question("same")
        await rig.chat(same, key="alice")
        rig.server.faults.refuse["erase"] = 500
        assert await n_evaluated_for(rig, form(same), "bob") >= N_QUESTION


@pytest.mark.parametrize("memory", [Memory.ANY_PREFIX, Memory.RESTORE_POINTS, Memory.END_ONLY])
@pytest.mark.parametrize("n_slots", [2, 4])
async def test_equal_prompts_at_once_are_placed_one_after_the_other(
    start_rig: StartRig, n_slots: int, memory: Memory
) -> None:
    async with start_rig(n_slots=n_slots, memory=memory, idle_save_seconds=60.0) as rig:
        rig.server.faults.chunk_seconds = 0.02
        for name in ("a", "b"):
            body = {**claude(question(name)), "stream": True}
            replies = await asyncio.gather(*(rig.post(MESSAGES, body) for _ in range(5)))
            assert [reply.status for reply in replies] == [200] * 5
        await until(lambda: rig.n_occupied() == 0)
        assert rig.sample("drift_total") == 0
        assert await rig.reasons() == []


async def test_no_slot_is_restored_while_a_prompt_whose_client_left_has_no_slot_yet(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama-server would choose the restored slot: that holds as much of the prompt, and has a lower id."""
    saved, left = ([{"role": "user", "content": text("same") + text(name, 20)}] for name in "ab")
    async with start_rig(n_slots=2) as rig:
        await rig.chat(saved)
        await rig.settled()
        rig.server.replace_process()
        process = await rig.attached()
        rig.server.hold("chunk")
        streaming = await begin_stream(rig, question("other"), "")
        gate = rig.server.hold("parse", n_calls=1)
        leaving = asyncio.ensure_future(rig.post(MESSAGES, claude(left)))
        await gate.reached()
        wait_for_start(monkeypatch)
        await hang_up(leaving)
        await until(lambda: rig.server.is_parsing_for_nobody)
        rig.server.release("chunk")
        assert (await streaming).status == 200
        asked = asyncio.ensure_future(rig.chat(saved))
        await until(lambda: asked.done() or process.queue.n_waiting)
        before = rig.server.slots[1].id_task
        gate.open()
        assert (await asked).n_reused == 328
        await rig.settled()
        assert rig.server.slots[1].id_task > before


async def test_request_that_lands_in_a_slot_just_left_goes_on_there(start_rig: StartRig) -> None:
    """The first answer ends between the proxy's last look and llama-server's choice."""
    async with start_rig(n_slots=2, idle_save_seconds=60.0) as rig:
        rig.server.hold("chunk")
        same = question("same")
        streaming = await begin_stream(rig, same, "")
        gate = rig.server.hold("generate", n_calls=1)
        looked = rig.server.hold("slots", n_calls=1)
        asked = asyncio.ensure_future(rig.post(MESSAGES, claude(same)))
        await looked.reached()
        rig.server.release("chunk")
        assert (await streaming).status == 200
        await until(lambda: rig.n_occupied() == 1)
        looked.open()
        await gate.reached()
        assert rig.process is not None
        chosen = next(slot for slot in rig.server.slots if slot.is_processing)
        await until(
            lambda: rig.process and rig.process.slots[SlotId(chosen.id)].phase is SlotPhase.RUNNING
        )
        assert rig.n_occupied() == 1, "the slot that was made ready is free again"
        gate.open()
        assert (await asked).content["usage"]["input_tokens"] <= 10
        await until(lambda: rig.n_occupied() == 0)
        assert rig.sample("drift_total") == 0
        assert rig.sample("requests_total", outcome="hit") == 1
        assert await rig.reasons() == []


async def test_slot_that_a_failed_request_did_not_run_in_is_not_taken_for_empty(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else another tenant's tokens would stay in it."""
    async with start_rig(n_slots=2, idle_save_seconds=60.0) as rig:
        await rig.post(MESSAGES, claude(question("same")))
        await until(lambda: rig.n_occupied() == 0)
        assert (process := rig.process) is not None
        held = next(slot for slot in process.slots if isinstance(slot.content, Known))
        other = rig.server.slots[1 - held.id]
        monkeypatch.setattr(rig.server, "_choose", lambda id_slot, _: other)
        rig.server.faults.n_out_of_cells = 1
        assert (await rig.post(MESSAGES, claude(question("same")))).status == 200
        await until(lambda: rig.n_occupied() == 0)
        assert rig.server.slots[held.id].tokens
        assert not isinstance(process.slots[held.id].content, Empty)


async def test_turn_that_comes_before_the_last_look_at_the_one_before_waits_for_its_slot(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may send its next request as soon as it has the answer."""
    looked, may_look = asyncio.Event(), asyncio.Event()

    async def late(watching: "asyncio.Task[None]") -> None:
        async def look() -> None:
            looked.set()
            await may_look.wait()
            await watching

        await see_through(asyncio.get_running_loop().create_task(look()))

    monkeypatch.setattr(placement, "see_through", late)
    async with start_rig(n_slots=2, idle_save_seconds=60.0, memory=Memory.RESTORE_POINTS) as rig:
        first = await rig.post(MESSAGES, claude(question("same", 800)))
        await looked.wait()
        said = {"role": "assistant", "content": first.content["content"]}
        turns = [*question("same", 800), said, {"role": "user", "content": "go on"}]
        asked = asyncio.ensure_future(rig.post(MESSAGES, claude(turns)))
        n_sent, n_before = len(rig.server.seen_at("generate")), rig.server.n_evaluated
        await until(
            lambda: rig.running.pool.n_waiting or len(rig.server.seen_at("generate")) > n_sent
        )
        may_look.set()
        assert (await asked).status == 200
        assert rig.server.n_evaluated - n_before <= 40
        assert await rig.reasons() == []


async def test_request_that_overtakes_the_answer_before_it_in_its_slot_goes_on_there(
    start_rig: StartRig,
) -> None:
    """llama-server sends each answer in a thread of its own."""
    async with start_rig(n_slots=2, idle_save_seconds=60.0) as rig:
        gate, late = rig.server.hold("generate", n_calls=1), rig.server.hold("answered", n_calls=1)
        first = asyncio.ensure_future(rig.post(MESSAGES, claude(question("same"))))
        await until(lambda: rig.process and rig.process.slots[0].phase is SlotPhase.RUNNING)
        gate.open()
        await late.reached()
        asked = asyncio.ensure_future(rig.post(MESSAGES, claude(question("same"))))
        assert (await asked).content["usage"]["input_tokens"] <= 10
        await asyncio.sleep(0.1)  # its last look at the slots
        assert not first.done()
        late.open()
        assert (await first).status == 200
        await until(lambda: rig.n_occupied() == 0)
        assert rig.sample("drift_total") == 0
        assert rig.sample("requests_total", outcome="hit") == 1
        assert await rig.reasons() == []


async def test_request_that_lands_in_a_slot_whose_prompt_is_still_read_goes_on_there(
    start_rig: StartRig,
) -> None:
    """The request before it was sent unread, and its lease outlasts its answer."""
    async with start_rig(n_slots=2, idle_save_seconds=60.0) as rig:
        answer = (await rig.chat("same")).content["choices"][0]["message"]
        same = [*question("same"), answer, {"role": "user", "content": "go on"}]
        rig.server.hold("chunk")
        read = rig.server.hold("apply-template", n_calls=1)
        streaming = await begin_stream(rig, same, "")
        await read.reached()
        looked = rig.server.hold("slots", n_calls=1)
        asked = asyncio.ensure_future(rig.post(MESSAGES, claude(same)))
        await looked.reached()
        rig.server.release("chunk")
        assert (await streaming).status == 200
        looked.open()
        await until(lambda: rig.server.seen_at("generate")[-1].path == MESSAGES)
        read.open()
        assert (await asked).status == 200
        await until(lambda: rig.n_occupied() == 0)
        assert rig.sample("drift_total") == 0
        assert await rig.reasons() == []


async def test_prompt_that_another_request_is_about_to_evaluate_is_waited_for(
    start_rig: StartRig,
) -> None:
    """Until that one runs, its slot may become as similar as ours at any moment."""
    async with start_rig(n_slots=2, idle_save_seconds=60.0) as rig:
        gate = rig.server.hold("generate", n_calls=1)
        first = rig.begin_chat("same")
        await gate.reached()
        asked = asyncio.ensure_future(rig.post(MESSAGES, claude(question("same"))))
        await until(lambda: rig.n_occupied() == 2)
        await asyncio.sleep(0.1)
        assert rig.server.seen_at("generate")[-1].path == CHAT
        gate.open()
        assert (await first).status == (await asked).status == 200
        await until(lambda: rig.n_occupied() == 0)
        assert rig.sample("drift_total") == 0


async def test_slot_that_was_given_back_before_the_last_look_ends_is_not_waited_for(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[asyncio.Event] = []

    async def held(process: Process, before: LastTasks | None) -> list[SlotId] | None:
        looks.append(may_look := asyncio.Event())
        await may_look.wait()
        return await begun_since(process, before)

    monkeypatch.setattr(uncached, "begun_since", held)
    async with (
        start_rig(n_slots=2, idle_save_seconds=60.0) as rig,
        aiohttp.ClientSession() as lasting,
    ):
        gate = rig.server.hold("generate", n_calls=1)
        body = claude(with_image(question("first")))
        asked = asyncio.ensure_future(lasting.post(rig.base_url + MESSAGES, json=body))
        await until(lambda: len(looks) == 1)
        gate.open()
        await until(lambda: len(looks) == 2)
        looks[0].set()
        await rig.chat("other")  # begins in the slot that was given back
        looks[1].set()
        async with await asked:
            await until(lambda: rig.n_occupied() == 0)


async def test_request_whose_slot_is_not_told_may_have_run_in_any_free_one(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def begun_unseen(*_: object) -> None: ...

    monkeypatch.setattr(placement, "begun_since", begun_unseen)
    async with start_rig(n_slots=2, idle_save_seconds=60.0) as rig:
        await rig.chat("a")
        await rig.chat("b")
        process = await rig.attached()
        assert all(isinstance(slot.content, Known) for slot in process.slots)
        assert (await rig.post(MESSAGES, claude(question("c")))).status == 200
        await until(lambda: rig.n_occupied() == 0)
        assert not any(isinstance(slot.content, Known) for slot in process.slots)


async def test_request_that_any_slot_may_serve_does_not_wait_for_one_whose_start_was_seen_late(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases are granted again once a start takes too long."""
    may_look = asyncio.Event()

    async def held(process: Process, before: LastTasks | None) -> list[SlotId] | None:
        await may_look.wait()
        return await begun_since(process, before)

    monkeypatch.setattr(placement, "begun_since", held)
    monkeypatch.setattr(placement, "_START_SECONDS", 0.0)
    async with start_rig(n_slots=2, idle_save_seconds=60.0) as rig:
        gate = rig.server.hold("chunk")
        body = {**claude(question("a")), "stream": True}
        streaming = asyncio.ensure_future(rig.post(MESSAGES, body))
        await gate.reached()
        asked = asyncio.ensure_future(rig.post(MESSAGES, claude(with_image(question("b")))))
        await rig.waiting(1)
        may_look.set()
        assert (await asked).status == 200
        rig.server.release("chunk")
        assert (await streaming).status == 200


async def test_prompt_that_cannot_be_read_before_it_is_sent_is_not_taken_for_the_slots_tokens(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(n_slots=2, idle_save_seconds=60.0) as rig:
        reply = (await rig.post(MESSAGES, claude(question("a")))).content
        await until(lambda: rig.n_occupied() == 0)
        said = {"role": "assistant", "content": reply["content"][0]["text"]}
        monkeypatch.setattr(SimilarRequest, "_may_be_passed_over", lambda *_: True)
        rig.server.faults.refuse["apply-template"] = 500
        goes_on = claude([*question("a"), said, {"role": "user", "content": " go on"}])
        assert (await rig.post(MESSAGES, goes_on)).status == 200
        await until(lambda: rig.n_occupied() == 0)
        assert rig.sample("cache_faults_total", stage="tokenize") >= 1
        assert rig.sample("tokenization_disagreements_total") == 0
        assert rig.process and not rig.process.disabled_shapes


async def test_request_and_one_whose_slot_may_be_as_similar_do_not_wait_for_each_other(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one is in a slot with unknown tokens, and its prompt is evaluated after the first's."""
    monkeypatch.setattr(cached, "_LONG_WAIT_SECONDS", -1.0)  # each looks which process answers
    monkeypatch.setattr(launches, "_MOST_TIMES", 10 * HANG_SECONDS)
    monkeypatch.setattr(placement, "_RIVAL_SECONDS", 2 * HANG_SECONDS)
    async with start_rig(n_slots=2, idle_save_seconds=60.0) as rig:
        there = rig.server.hold("generate", n_calls=1)
        unknown = {"prompt": " other words", "cache_prompt": False}
        before = [asyncio.ensure_future(rig.post(COMPLETION, unknown))]
        await there.reached()
        here = rig.server.hold("generate", n_calls=1)
        # Under no_store no save holds up the first.
        before.append(rig.begin_chat("before", cache={"no_store": True}))
        await here.reached()
        first = asyncio.ensure_future(rig.post(MESSAGES, claude(question("first"))))
        await rig.waiting(1)
        second = rig.begin_chat("second")
        await rig.waiting(2)
        look = rig.server.hold("props")
        await look.reached()
        here.open()
        await rig.waiting(1)
        there.open()
        await rig.waiting(0)
        rig.server.release("props")
        assert [(await each).status for each in (*before, first, second)] == [200] * 4


async def test_prompt_that_is_not_to_be_stored_is_not_stored_if_its_client_leaves_before_it_is_sent(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=2) as rig:
        gate = rig.server.hold("generate", n_calls=1)
        unknown = {"prompt": " other words", "cache_prompt": False}
        before = asyncio.ensure_future(rig.post(COMPLETION, unknown))
        await gate.reached()
        assert (process := rig.process) is not None
        body = {**claude(question("a")), "cache": {"no_store": True}}
        asked = asyncio.ensure_future(rig.post(MESSAGES, body))
        # All of it is evaluated, and still the other slot may be as similar.
        await until(lambda: any(isinstance(s.content, Known) for s in process.slots if s.is_leased))
        await hang_up(asked)
        gate.open()
        await before
        await rig.settled()
        assert rig.checkpoints == []
