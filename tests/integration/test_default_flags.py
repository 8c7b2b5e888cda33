"""llama-server with default flags: a slot that starts to run empties all idle ones."""

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from proxy import app
from proxy.core.eviction import Removal
from proxy.core.messages import Kind
from proxy.core.model import SlotId
from proxy.core.rates import Transfer, UnitCost
from proxy.core.slots import Known
from proxy.serving import planning, uncached
from proxy.serving.launches import Launches, begun_since
from proxy.serving.saver import Saver
from proxy.store.store import CheckpointStore
from tests.fakes.faults import Faults, Gate
from tests.fakes.slots import Memory
from tests.integration.conftest import StartRig, evaluate_ahead_at_once
from tests.integration.rig import (
    CHAT,
    COMPLETION,
    KEYS,
    Reply,
    Rig,
    hang_up,
    next_question,
    question,
    text,
    wait_for_start,
    with_image,
)
from tests.lab.waiting import HANG_SECONDS, until
from tests.store.test_store import hold_writer

MEMORIES = [Memory.ANY_PREFIX, Memory.RESTORE_POINTS, Memory.END_ONLY]


def clearing(**faults: Any) -> Faults:
    return Faults(clears_idle_slots=True, **faults)


def nothing_is_wrong(rig: Rig) -> bool:
    counts = (
        *("drift_total", "restore_ineffective_total", "live_reuse_short_total"),
        "tokenization_disagreements_total",
    )
    failed = rig.sample("saves_total", result="failed")
    return not failed and not any(rig.sample(name) for name in counts)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("has_native_cache", [False, True])
async def test_conversations_that_take_turns_lose_nothing(
    start_rig: StartRig, memory: Memory, has_native_cache: bool
) -> None:
    faults = clearing(has_native_cache=has_native_cache)
    async with start_rig(n_slots=4, memory=memory, faults=faults) as rig:
        asked = {name: question(name) for name in "abc"}
        replies: dict[str, Reply] = {}
        for n_turn in range(3):
            for name, messages in asked.items():
                reply = await rig.chat(messages)
                if n_turn:
                    assert reply.n_reused >= replies[name].n_prompt - 20
                replies[name] = reply
                asked[name] = next_question(messages, reply)
        assert nothing_is_wrong(rig)
        health = await rig.health()
        assert (health["state"], await rig.reasons()) == ("degraded", ["idle slots are cleared"])


@pytest.mark.parametrize("memory", MEMORIES)
async def test_conversations_at_once_are_answered_and_go_on(
    start_rig: StartRig, memory: Memory
) -> None:
    async with start_rig(n_slots=4, memory=memory, faults=clearing()) as rig:
        rig.server.faults.chunk_seconds = 0.002
        names = "abcdef"
        streams = [rig.post(CHAT, body(name, stream=True)) for name in names]
        first = await asyncio.gather(*streams)
        assert [reply.status for reply in first] == [200] * len(names)
        again = [(await rig.chat(name)).n_reused for name in names]
        assert sum(n_reused > 280 for n_reused in again) >= len(names) - 3
        assert rig.sample("restore_ineffective_total") == 0
        assert rig.sample("drift_total") == 0


def body(name: str, **fields: Any) -> dict[str, Any]:
    return {"messages": question(name), "max_tokens": 20, **fields}


async def test_requests_generate_at_once_though_they_start_one_at_a_time(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=2, faults=clearing()) as rig:
        rig.server.faults.chunk_seconds = 0.01
        endless = body("a", stream=True, max_tokens=10_000)
        async with rig.client.post(rig.base_url + CHAT, json=endless) as reply:
            await reply.content.readany()
            assert (await rig.chat("b")).n_reused == 0
            assert (await rig.chat("b")).n_reused == 308  # the stream has started nothing since
            assert rig.server.slots[0].is_processing or rig.server.slots[1].is_processing


async def test_start_of_a_whole_answer_is_seen_in_slots(start_rig: StartRig) -> None:
    async with start_rig(n_slots=2, faults=clearing()) as rig:
        gate = rig.server.hold("generate", n_calls=1)
        first = rig.begin_chat("a")
        await gate.reached()
        assert (await rig.chat("b")).status == 200
        gate.open()
        assert (await first).status == 200
        assert nothing_is_wrong(rig)


async def test_without_slots_endpoint_requests_run_one_at_a_time(start_rig: StartRig) -> None:
    async with start_rig(n_slots=2, faults=clearing(refuse={"slots": 501})) as rig:
        for name in "abab":
            reply = await rig.chat(name)
        assert reply.n_reused == 308
        assert len({seen.fields["id_slot"] for seen in rig.requests_seen()}) >= 1
        assert rig.sample("restore_ineffective_total") == 0


async def test_requests_of_every_kind_start_in_turn(start_rig: StartRig) -> None:
    async with start_rig(n_slots=2, faults=clearing()) as rig:
        requests = []
        for name in "abc":
            requests.append(rig.post("/v1/messages", body(name)))
            requests.append(rig.post(CHAT, body(name)))
            uncached = {"prompt": f" other {name}", "cache_prompt": False, "n_predict": 3}
            requests.append(rig.post(COMPLETION, uncached))
        replies = await asyncio.gather(*requests)
        assert [reply.status for reply in replies] == [200] * len(requests)
        assert rig.sample("restore_ineffective_total") == 0


async def test_client_that_leaves_while_it_waits_for_its_turn_frees_its_place(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MAX_REQUESTS", 3)
    async with start_rig(n_slots=2, faults=clearing()) as rig:
        gate = rig.server.hold("restore", n_calls=1)
        for name in "ab":
            await rig.chat(name)
        first = rig.begin_chat("a")  # is restored, and holds the turn meanwhile
        await gate.reached()
        leaving, staying = rig.begin_chat("c"), rig.begin_chat("b")
        await until(lambda: rig.running.server.n_queued == 2)
        assert (await rig.post(CHAT, body("d"))).status == 503
        await hang_up(leaving)
        await until(lambda: rig.running.server.n_queued == 1)
        gate.open()
        assert [(await reply).n_reused for reply in (first, staying)] == [308, 308]
        assert nothing_is_wrong(rig)


async def test_client_that_leaves_with_the_turn_passes_it_on(start_rig: StartRig) -> None:
    async with start_rig(n_slots=2, faults=clearing()) as rig:
        gate = rig.server.hold("restore", n_calls=1)
        for name in "ab":
            await rig.chat(name)
        leaving = rig.begin_chat("a")
        await gate.reached()
        await hang_up(leaving)
        gate.open()
        assert (await rig.chat("b")).n_reused == 308
        assert (await rig.chat("a")).n_reused == 308


async def test_no_slot_is_restored_while_a_request_whose_client_left_may_still_begin(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would empty the slot."""
    async with start_rig(n_slots=2, faults=clearing()) as rig:
        for name in "ab":
            await rig.chat(name)
        process, gate = await rig.settled(), rig.server.hold("parse", n_calls=1)
        body = {"prompt": " other words", "cache_prompt": False, "n_predict": 3}
        leaving = asyncio.ensure_future(rig.post(COMPLETION, body))
        await gate.reached()
        wait_for_start(monkeypatch)
        await hang_up(leaving)
        await until(lambda: rig.server.is_parsing_for_nobody)
        n_restored = len(rig.server.seen_at("restore"))
        asked = rig.begin_chat("a")
        await until(
            lambda: (
                process.launches.turns.n_waiting or len(rig.server.seen_at("restore")) > n_restored
            )
        )
        assert len(rig.server.seen_at("restore")) == n_restored
        gate.open()
        assert (await asked).n_reused == 308
        assert nothing_is_wrong(rig)


async def test_abandoned_prompt_is_saved_before_the_next_start(start_rig: StartRig) -> None:
    async with start_rig(n_slots=2, faults=clearing(), idle_save_seconds=60.0) as rig:
        rig.server.faults.chunk_seconds = 0.01
        endless = body("a", stream=True, max_tokens=10_000)
        async with rig.client.post(rig.base_url + CHAT, json=endless) as reply:
            await reply.content.readany()
        rig.server.faults.chunk_seconds = 0.0
        assert (await rig.chat("b")).status == 200
        assert (await rig.chat("a")).n_reused == 308


async def test_slot_whose_save_is_not_committed_is_emptied_before_the_next_start(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "LEAST_DISK_SECONDS", HANG_SECONDS)
    async with start_rig(n_slots=2, faults=clearing(), idle_save_seconds=60.0) as rig:
        await rig.chat("a")
        process, gate = await rig.attached(), rig.server.hold("save", n_calls=1)
        (slot_id,) = (s.id for s in process.slots if isinstance(s.content, Known))
        lease = process.queue.try_lease(slot_id)
        assert lease is not None
        with lease:
            lease.hand_over(process.saves.begin(slot_id))
        await gate.reached()
        assert rig.running.store is not None
        go_on = hold_writer(rig.running.store)
        gate.open()
        assert (await rig.chat("b")).n_reused <= 4  # it does not wait for the commit
        behind = rig.begin_chat("a")
        await until(lambda: rig.running.server.n_queued == 1)
        go_on.set()
        assert (await behind).n_reused == 308


@pytest.mark.parametrize(("n_slots", "fields"), [(1, {"n_cache_reuse": 8}), (2, {})])
async def test_work_that_is_evaluated_sooner_than_saved_holds_up_no_start(
    start_rig: StartRig, n_slots: int, fields: dict[str, Any]
) -> None:
    faults = Faults(clears_idle_slots=n_slots > 1)
    async with start_rig(n_slots=n_slots, faults=faults, idle_save_seconds=60.0) as rig:
        await rig.chat("a")
        process = await rig.attached()
        slow = Transfer(UnitCost(9.0, 9.0), UnitCost(1e-9, 9.0))
        process.rates = replace(process.rates, save=slow)
        await rig.chat("b", **fields)
        assert not process.saves.under_way and not rig.checkpoints
        assert nothing_is_wrong(rig)


async def test_a_request_that_holds_several_slots_is_delayed_once(start_rig: StartRig) -> None:
    async with start_rig(n_slots=3, idle_save_seconds=60.0) as rig:
        await rig.chat("a")
        process = await rig.attached()
        (content,) = (slot.content for slot in process.slots if isinstance(slot.content, Known))
        seconds = 0.6 * process.rates.evaluation_seconds(0, content.n_tokens)
        save = Transfer(UnitCost(seconds, seconds), UnitCost(0.0, 0.0))
        process.rates = replace(process.rates, save=save)
        with ExitStack() as leases:
            for slot in process.slots:
                lease = process.queue.try_lease(slot.id)
                assert lease is not None
                leases.enter_context(lease)
            ids = [slot.id for slot in process.slots]
            assert process.pays_to_save(content, ids)
            assert not process.pays_to_save(content, ids[:1])


async def test_slot_that_is_emptied_while_its_save_ends_is_seen_to_be_empty(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(n_slots=2, faults=clearing(), idle_save_seconds=60.0) as rig:
        await rig.chat("a")
        process, gate, write = await rig.attached(), Gate(), Saver.write

        async def written(saver: Saver, slot_id: SlotId, name: str) -> Any:
            saved = await write(saver, slot_id, name)
            rig.server.slots[slot_id].clear()  # another start, which has looked before the save
            await gate.arrive()
            return saved

        monkeypatch.setattr(Saver, "write", written)
        (slot_id,) = (s.id for s in process.slots if isinstance(s.content, Known))
        lease = process.queue.try_lease(slot_id)
        assert lease is not None
        with lease:
            lease.hand_over(process.saves.begin(slot_id))
        await gate.reached()
        asked = rig.begin_chat("a")
        await until(lambda: process.launches.turns.is_taken)
        gate.open()
        assert (await asked).n_reused == 308


async def test_slots_that_another_placement_emptied_are_seen_to_be_empty(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()

    async def begun(*looked_at: Any) -> Any:
        await gate.arrive()
        return await begun_since(*looked_at)

    monkeypatch.setattr(uncached, "begun_since", begun)
    async with start_rig(n_slots=3, faults=clearing()) as rig:
        await rig.chat("a")
        process = await rig.attached()
        monkeypatch.setattr(rig.server, "_choose", lambda id_slot, _: rig.server.slots[id_slot])
        rig.server.hold("chunk")
        image = {"messages": with_image(question("b")), "stream": True, "max_tokens": 4}
        placed = asyncio.ensure_future(rig.post("/v1/messages", image))
        await gate.reached()
        await until(lambda: not process.launches.turns.is_taken)
        asked = rig.begin_chat("a")
        await until(lambda: process.launches.turns.is_taken)
        await process.slot_states()  # a look of the request, if it took one, is over too
        gate.open()
        rig.server.release("chunk")
        assert (await asked).n_reused == 308
        assert (await placed).status == 200
        assert nothing_is_wrong(rig)


async def test_server_that_saves_nothing_is_left_to_its_ram_cache(start_rig: StartRig) -> None:
    faults = clearing(refuse={"save": 501, "restore": 501, "erase": 501})
    async with start_rig(n_slots=2, faults=faults) as rig:
        for name in "ab":
            assert (await rig.chat(name)).status == 200
        assert all("id_slot" not in seen.fields for seen in rig.requests_seen())
        assert await rig.reasons() == ["no slot save path"]
        async with rig.client.get(rig.admin_url + "/requests/last") as reply:
            assert (await reply.json())["request"]["why"] == "no slot save path"
        n_evaluated = len(rig.server.seen_at("evaluate"))
        await asyncio.sleep(0.2)  # it is attached again and again, but looked at once
        assert len(rig.server.seen_at("evaluate")) == n_evaluated
        with (await rig.attached()).launches.turns.join():
            async with asyncio.timeout(HANG_SECONDS):
                await rig.running.pool.drain(10 * HANG_SECONDS)  # waits for no turn


async def test_server_without_slot_actions_refuses_erases_for_the_reason_that_is_told(
    start_rig: StartRig,
) -> None:
    refuse = {"save": 501, "restore": 501, "erase": 501}
    async with start_rig(n_slots=1, faults=Faults(refuse=refuse), **KEYS) as rig:
        for key in ("alice", "bob"):
            assert (await rig.chat("a", key=key)).status == 200
        assert rig.server.seen_at("erase")
        assert "erases refused" not in await rig.reasons()


async def test_restart_without_default_flags_ends_it(start_rig: StartRig) -> None:
    async with start_rig(n_slots=2, faults=clearing()) as rig:
        await rig.chat("a")
        await rig.settled()
        rig.server.faults.clears_idle_slots = False
        rig.server.replace_process()
        await rig.attached()
        assert (await rig.chat("a")).n_reused == 308
        assert (await rig.health())["state"] == "caching"


async def test_slots_found_full_are_adopted_though_the_first_probe_empties_them(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=2, faults=clearing(), idle_save_seconds=60.0) as rig:
        await rig.chat("a")
        await rig.stop_proxy()
        await rig.start_proxy()
        assert (await rig.chat("b")).status == 200
        assert (await rig.chat("a")).n_reused == 308
        assert nothing_is_wrong(rig)


async def generate_beside(rig: Rig, name: str) -> "asyncio.Task[Reply]":
    """Send a chat; return once it generates, and goes on until `chunk` is released."""
    rig.server.hold("chunk")
    asked = rig.begin_chat(name, stream=True)
    await until(lambda: rig.server.n_chunks_sent)
    return asked


async def test_evaluating_ahead_loses_nothing_in_other_slots(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = evaluate_ahead_at_once(monkeypatch)
    async with start_rig(n_slots=2, faults=clearing(), **how) as rig:
        streaming = await generate_beside(rig, "a")
        messages = question("b")
        reply = await rig.chat(messages)
        n_before = len(rig.server.seen_at("evaluate"))
        rig.server.release("chunk")
        await streaming
        await until(lambda: len(rig.server.seen_at("evaluate")) > n_before)
        assert (await rig.chat(next_question(messages, reply))).n_reused == 312


async def test_self_test_in_a_slot_with_work_that_no_file_has_saves_it_and_ends(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=2, faults=clearing(), idle_save_seconds=60.0) as rig:
        streaming = await generate_beside(rig, "a")
        await rig.chat("b")
        rig.server.release("chunk")
        await streaming
        await rig.running.pool.accounted()
        process = await rig.attached()
        assert all(isinstance(slot.content, Known) for slot in process.slots)
        process.n_contradictions = process.n_contradictions_allowed
        await until(lambda: rig.sample("self_tests_total", result="any prefix"))
        assert [(await rig.chat(name)).n_reused for name in "ab"] == [308, 308]


async def test_evaluating_ahead_goes_on_without_a_state_that_saves_took_the_place_of(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate_ahead_at_once(monkeypatch)
    clear_others, store, removed = Launches.clear_others, list[CheckpointStore](), list[str]()

    async def clear_and_evict(launches: Launches) -> None:
        await clear_others(launches)
        for checkpoint in [c for each in store for c in each]:
            removed.append(checkpoint.file_name)
            await store[0].remove(checkpoint, Removal.BUDGET)

    monkeypatch.setattr(Launches, "clear_others", clear_and_evict)
    how: dict[str, Any] = {"memory": Memory.END_ONLY, "idle_save_seconds": 60.0}
    async with start_rig(n_slots=2, ahead_seconds=0.3, **how) as rig:
        assert rig.running.store is not None
        messages = [{"role": "system", "content": text("system")}, *question("a")]
        gate = rig.server.hold("answered")
        asked = asyncio.ensure_future(rig.chat(messages))
        await gate.reached()
        await until(lambda: rig.checkpoints == [("header", 307), ("turn start", 611)])
        store.append(rig.running.store)
        gate.open()
        await asked
        latest = rig.running.shared.journal.latest
        await until(lambda: latest(1)[0].kind is Kind.AHEAD)
        assert removed and rig.n_faults() == 0
        assert latest(1)[0].evaluated == 6


async def test_all_slots_are_saved_once_another_request_or_save_has_begun(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=2, faults=clearing(), idle_save_seconds=60.0) as rig:
        await rig.chat("a")
        process = await rig.attached()
        with process.launches.turns.join():
            saving = asyncio.ensure_future(rig.running.pool.drain(HANG_SECONDS))
            await until(lambda: saving.done() or process.launches.turns.n_waiting)
        await saving
        assert rig.checkpoints == [("conversation", 312)]


async def test_request_whose_process_is_replaced_while_another_slot_is_emptied_is_planned_anew(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=2, faults=clearing(), idle_save_seconds=60.0) as rig:
        messages = question("a")
        reply = await rig.chat(messages)
        streaming = await generate_beside(rig, "b")
        messages = next_question(messages, reply)
        reply = await rig.chat(messages)
        rig.server.release("chunk")
        await streaming
        await rig.running.pool.accounted()
        before, gate = await rig.attached(), rig.server.hold("save", n_calls=1)
        asked = asyncio.ensure_future(rig.chat(next_question(messages, reply)))
        await gate.reached()
        rig.server.replace_process(ends_calls=False)
        await until(lambda: rig.process not in (None, before))
        gate.open()
        assert (await asked).n_reused == 312
