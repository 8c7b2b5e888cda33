"""What nobody foresaw must not reach a client, and what is found on the way must still count."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from proxy.core.conditions import DegradationKind
from proxy.servers import attach
from proxy.store.catalogue import Catalogue
from tests.integration.conftest import StartRig
from tests.integration.rig import question
from tests.lab.waiting import until


def broken(*args: Any, **kwargs: Any) -> Any:
    raise IndexError("nobody foresaw this")


async def test_save_that_breaks_in_an_unforeseen_way_is_not_the_clients_fault(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        await rig.chat("a")
        monkeypatch.setattr(Catalogue, "victims", broken)
        assert (await rig.chat(question("b"))).status == 200
        assert rig.sample("saves_total", result="failed") == 1


async def test_self_test_that_breaks_in_an_unforeseen_way_costs_nobody_anything(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "learn_rule", broken)
    async with start_rig(n_slots=1) as rig:
        assert rig.process is not None
        rig.process.n_contradictions = rig.process.n_contradictions_allowed
        await until(lambda: rig.sample("cache_faults_total", stage="self-test"))
        await until(lambda: rig.n_occupied() == 0)
        assert (await rig.chat("a")).status == 200
        assert await rig.reasons() == []


async def test_slot_that_a_save_finds_tainted_is_erased_before_it_is_used(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        await rig.chat("a")
        rig.server.faults.saves_other_tokens = True
        n_seen = len(rig.server.seen)
        await rig.chat("b")
        places = [seen.place for seen in rig.server.seen[n_seen:]]
        assert places.index("save") < places.index("erase") < places.index("generate")


async def test_want_of_room_is_not_called_a_failing_save(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        assert rig.running.store is not None
        rig.running.store.writes.max_bytes = 1000
        await rig.chat("a")
        await until(lambda: sum(rig.sample("saves_skipped_total", reason=r) for r in ROOM_REASONS))
        assert await rig.reasons() == [DegradationKind.NO_ROOM]


ROOM_REASONS = ("budget", "larger than the budget")


async def test_request_does_not_wait_for_a_self_test_beside_a_free_slot(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=2, idle_save_seconds=60.0) as rig:
        await rig.chat("a")
        await rig.chat(question("b", 500))
        await until(lambda: rig.n_occupied() == 0)
        assert rig.process is not None
        save = rig.server.hold("save", n_calls=1)
        rig.process.n_contradictions = rig.process.n_contradictions_allowed
        await save.reached()
        again = rig.begin_chat("a")
        await rig.waiting(1)  # its slot is being saved
        evaluate = rig.server.hold("evaluate", n_calls=1)
        save.open()
        await evaluate.reached()
        assert (await again).status == 200
        evaluate.open()


async def test_work_that_there_was_no_room_for_is_saved_when_there_is(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(n_slots=1) as rig:
        store = rig.running.store
        assert store is not None
        with monkeypatch.context() as full:
            full.setattr(store.files, "reserve_bytes", lambda: 1 << 60)
            await rig.chat("a")
            await until(lambda: rig.sample("saves_skipped_total", reason="free space"))
            assert rig.checkpoints == []
        with capture_logs() as logs:
            await rig.stop_proxy()
        assert {"n_saved": 1, "n_dirty": 1}.items() <= next(
            line for line in logs if line["event"] == "slots saved"
        ).items()
        await rig.start_proxy()
        assert len(rig.checkpoints) == 1
