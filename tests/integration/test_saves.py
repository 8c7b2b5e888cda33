"""Saves that go wrong: the client has its answer, the store stays clean, nothing is tried in a loop."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from proxy.core.conditions import DegradationKind
from proxy.core.model import SlotId
from proxy.core.plan import Why
from proxy.core.slots import Known
from proxy.servers import background
from proxy.serving import cached
from tests.fakes.faults import Faults
from tests.fakes.slots import Memory
from tests.integration.conftest import StartRig
from tests.integration.rig import Rig, next_question, question
from tests.lab.run import slots_in
from tests.lab.waiting import HANG_SECONDS, until

FAULTY_SAVES: dict[str, Callable[[Faults], Any]] = {
    "disk full": lambda faults: faults.refuse.update(save=500),
    "fewer bytes": lambda faults: setattr(faults, "n_bytes_lost", 100),
    "other tokens": lambda faults: setattr(faults, "saves_other_tokens", True),
    "connection cut": lambda faults: faults.drop.add("save"),
    "no save path any more": lambda faults: faults.refuse.update(save=501),
}


async def saves_failed(rig: Rig) -> None:
    await until(lambda: rig.sample("saves_total", result="failed"))


async def test_save_of_an_idle_slot_is_committed(start_rig: StartRig) -> None:
    async with start_rig() as rig:
        reply = await rig.chat("a")
        await rig.settled()
        assert rig.checkpoints == [("conversation", reply.n_prompt + 3)]
        assert rig.sample("saves_total", result="done") == 1
        assert rig.sample("checkpoints") == 1


@pytest.mark.parametrize("fault", FAULTY_SAVES)
async def test_failed_save_commits_nothing_and_is_not_repeated(
    start_rig: StartRig, fault: str
) -> None:
    async with start_rig() as rig:
        FAULTY_SAVES[fault](rig.server.faults)
        await rig.chat("a")
        await saves_failed(rig)
        n_saves = len(rig.server.seen_at("save"))
        await asyncio.sleep(0.3)
        assert len(rig.server.seen_at("save")) == n_saves
        assert rig.sample("saves_total", result="failed") == 1
        assert rig.sample("cache_faults_total", stage="save") == 1
        assert (rig.checkpoints, rig.temporary_files()) == ([], [])
        assert rig.process is not None
        assert all(
            s.content.n_saved == 0 for s in rig.process.slots if isinstance(s.content, Known)
        )


@pytest.mark.parametrize("fault", ["disk full", "fewer bytes", "connection cut"])
async def test_failed_save_is_tried_again_after_the_next_request(
    start_rig: StartRig, fault: str
) -> None:
    async with start_rig(n_slots=1) as rig:
        FAULTY_SAVES[fault](rig.server.faults)
        await rig.chat("a")
        await saves_failed(rig)
        rig.server.faults = Faults()
        reply = await rig.chat("a", max_tokens=40)
        assert reply.n_reused > 300
        await rig.settled()
        assert rig.checkpoints == [("conversation", reply.n_prompt + 39)]


@pytest.mark.parametrize("fault", FAULTY_SAVES)
async def test_failed_save_of_displaced_work_costs_the_next_request_nothing(
    start_rig: StartRig, fault: str
) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        FAULTY_SAVES[fault](rig.server.faults)
        await rig.chat("a")
        reply = await rig.chat("b")
        assert reply.n_reused <= 4
        await saves_failed(rig)
        assert rig.sample("saves_total", result="failed") == 1
        assert rig.sample("requests_total", outcome="degraded") == 0
        await until(lambda: not rig.temporary_files())


@pytest.mark.parametrize("memory", [Memory.ANY_PREFIX, Memory.RESTORE_POINTS, Memory.END_ONLY])
async def test_file_with_other_tokens_is_counted_as_drift(
    start_rig: StartRig, memory: Memory
) -> None:
    """Somebody has used the slot past the proxy, before an idle save or before that of a cut."""
    async with start_rig(n_slots=1, memory=memory) as rig:
        rig.server.faults.saves_other_tokens = True
        first = await rig.chat(question("a", 900))
        await rig.chat(next_question(question("a", 900), first))
        await saves_failed(rig)
        assert rig.sample("drift_total") > 0
        assert rig.sample("tokenization_disagreements_total") == 0


async def test_cleared_idle_slot_is_noticed_and_named(start_rig: StartRig) -> None:
    async with start_rig(idle_save_seconds=HANG_SECONDS) as rig:
        rig.server.faults.clears_idle_slots = True
        with capture_logs() as logs:
            await rig.chat("a")
            await rig.chat("b")
            await rig.running.pool.drain(HANG_SECONDS)
            await saves_failed(rig)
            await rig.settled()
        begun = [line for line in logs if line["event"] == "degradation"]
        reasons = [line["reason"] for line in begun if line["kind"] == "saves fail"]
        assert len(reasons) == 1
        assert "slot was empty" in reasons[0]
        assert rig.sample("drift_total") == 1
        assert len(rig.checkpoints) == 1  # b, which ran last
        assert (await rig.chat("a")).n_reused <= 4


async def test_hanging_save_holds_only_its_own_slot(start_rig: StartRig) -> None:
    async with start_rig(n_slots=2) as rig:
        gate = rig.server.hold("save", n_calls=1)
        await rig.chat("a")
        await gate.reached()
        assert slots_in(await rig.health())["leased"] == 1
        for name in ("b", "c"):
            await rig.chat(name)
        gate.open()
        await rig.settled()
        assert len(rig.checkpoints) >= 2


async def test_request_that_waits_for_a_hanging_save_keeps_nobody_else_waiting(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=2) as rig:
        gate = rig.server.hold("save", n_calls=1)
        await rig.chat("a")
        await gate.reached()
        again = rig.begin_chat("a", max_tokens=2)
        await rig.waiting(1)
        assert (await rig.chat("b")).n_reused <= 4
        gate.open()
        assert (await again).n_reused > 300


async def test_save_that_answers_too_late_is_given_up_and_its_file_goes_with_the_next_save(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1) as rig:
        gate = rig.server.hold("save")
        await rig.chat("a")
        await gate.reached()
        rig.running.server.upstream.cut_silent(0.0)  # as its time limit does
        await saves_failed(rig)
        rig.server.release("save")
        assert (await rig.chat("a")).n_reused > 300
        assert rig.checkpoints == [] and len(rig.temporary_files()) == 1
        await rig.chat("b")
        await until(lambda: rig.checkpoints and rig.temporary_files() == [])


async def test_budget_smaller_than_a_state_keeps_the_store_empty(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1, n_ctx=32_000, max_store_bytes=1 << 20) as rig:
        n_saves = len(rig.server.seen_at("save"))
        with capture_logs() as logs:
            for n_tokens in (25_000, 25_100, 25_200):
                await rig.post("/completion", {"prompt": [7] * n_tokens, "n_predict": 0})
                await rig.settled()
        assert rig.checkpoints == []
        assert rig.sample("saves_skipped_total", reason="larger than the budget") == 3
        assert len(rig.server.seen_at("save")) == n_saves + 1, "it is known after the first"
        assert rig.sample("cache_faults_total", stage="save") == 0
        told = [line for line in logs if line.get("kind") == DegradationKind.NO_ROOM]
        assert [line["event"] for line in told] == ["degradation"]


async def test_store_over_its_budget_evicts_what_is_worth_least(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1, n_ctx=32_000, max_store_bytes=1 << 20) as rig:
        for first in range(5):
            tokens = [100 * first + i % 97 for i in range(6000)]
            await rig.post("/completion", {"prompt": tokens, "n_predict": 0})
            await rig.settled()
        assert rig.sample("evictions_total", reason="budget") > 0
        assert rig.sample("checkpoint_bytes") <= 1 << 20
        reply = await rig.post("/completion", {"prompt": [*tokens, 5], "n_predict": 0})
        assert reply.n_reused == 6000


@pytest.mark.parametrize("memory", Memory)
async def test_nothing_new_is_not_saved_again(start_rig: StartRig, memory: Memory) -> None:
    async with start_rig(memory=memory) as rig:
        await rig.chat("a")
        process = await rig.settled()
        n_saves = len(rig.server.seen_at("save"))
        await asyncio.sleep(0.2)
        assert len(rig.server.seen_at("save")) == n_saves
        process.slots.forget_free()  # the file would be nobody's
        await asyncio.sleep(0.2)
        assert len(rig.server.seen_at("save")) == n_saves


async def test_slot_of_a_request_that_is_read_beside_its_answer_is_leased_until_it_is_saved(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        answer = (await rig.chat("a")).content["choices"][0]["message"]
        process = await rig.attached()
        monkeypatch.setattr(cached, "is_cut_at_risk", lambda *_: True)
        gate = rig.server.hold("save", n_calls=1)
        await rig.chat([*question("a"), answer, {"role": "user", "content": " go on"}])
        await gate.reached()
        async with rig.client.get(rig.admin_url + "/requests?limit=1") as reply:
            assert (await reply.json())["requests"][0]["why"] == Why.EXTENDS.value
        assert process.slots[SlotId(0)].is_leased
        gate.open()
        await rig.settled()


@pytest.mark.parametrize("ahead_seconds", [0.0, 20.0])
async def test_idle_slot_is_saved_while_its_next_prompt_waits_for_another_answer(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, ahead_seconds: float
) -> None:
    monkeypatch.setattr(background, "_IDLE_SECONDS", 0.01)
    async with start_rig(n_slots=2, ahead_seconds=ahead_seconds, idle_save_seconds=0.2) as rig:
        rig.server.hold("chunk")
        streaming = rig.begin_chat("b", stream=True)
        await until(lambda: rig.server.n_chunks_sent)
        await rig.chat("a")
        await until(lambda: rig.checkpoints)
        rig.server.release("chunk")
        assert (await streaming).status == 200
