"""Room is never made of what a request is about to use, and the client does not notice if there is none."""

import threading
import time
from typing import Any

import pytest
from structlog.testing import capture_logs

from proxy.core.conditions import DegradationKind
from proxy.core.eviction import Present, Removal
from proxy.core.model import Checkpoint
from proxy.core.saving import Claim
from proxy.errors import NoRoom
from proxy.store import store as stores
from proxy.store.files import StateFiles
from proxy.store.store import CheckpointStore
from tests.fakes.slots import Memory
from tests.integration.conftest import StartRig
from tests.integration.rig import Rig
from tests.lab.waiting import HANG_SECONDS, until

N_TOKENS = 6000


def prompt(number: int) -> list[int]:
    return [100 * number + i % 97 for i in range(N_TOKENS)]


async def complete(rig: Rig, number: int) -> int:
    reply = await rig.post("/completion", {"prompt": [*prompt(number), 5], "n_predict": 0})
    assert reply.status == 200
    return reply.n_reused


async def store_with(rig: Rig, *numbers: int) -> tuple[CheckpointStore, list[Checkpoint]]:
    for number in numbers:
        await complete(rig, number)
        await rig.settled()
    assert rig.running.store is not None
    return rig.running.store, sorted(rig.running.store, key=lambda c: c.created_at)


def all_of(store: CheckpointStore) -> Claim:
    return Claim(store.writes.max_bytes, Present(time.time()))


async def test_what_a_waiting_request_will_restore_is_neither_evicted_nor_superseded(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1, n_ctx=32_000) as rig:
        store, [wanted, _] = await store_with(rig, 1, 2)
        gate = rig.server.hold("generate", n_calls=1)
        busy = rig.begin_chat("b")
        await gate.reached()
        again = rig.begin_chat("b")  # so that nobody is granted the slot out of turn
        await rig.waiting(1)
        waiting = rig.running.server.services.tasks.start(complete(rig, 1))
        await rig.waiting(2)
        with pytest.raises(NoRoom):
            await store.reserve(all_of(store))
        await store.remove(wanted, Removal.SUPERSEDED)
        assert store.get(wanted.id) is not None
        gate.open()
        assert await waiting == N_TOKENS
        await busy
        await again
        await rig.settled()
        await store.discard(await store.reserve(all_of(store)))
        assert len(store) == 0, "nobody keeps it any longer"


async def test_request_that_leaves_the_queue_keeps_nothing(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1, n_ctx=32_000) as rig:
        store, _ = await store_with(rig, 1, 2)
        gate = rig.server.hold("generate", n_calls=1)
        busy = rig.begin_chat("b")
        await gate.reached()
        waiting = rig.running.server.services.tasks.start(complete(rig, 1))
        await rig.waiting(1)
        waiting.cancel()
        await rig.waiting(0)
        await store.discard(await store.reserve(all_of(store)))
        assert len(store) == 0
        gate.open()
        await busy


async def test_eviction_between_grant_and_restore_spares_what_was_granted(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task that was granted a slot runs later; somebody else may make room before it does."""
    async with start_rig(n_slots=1, n_ctx=32_000) as rig:
        store, [wanted, _] = await store_with(rig, 1, 2)
        process = await rig.settled()
        victims: list[int] = []
        reserve = process.queue._reserve

        def reserve_and_evict(choice, **kind):
            lease = reserve(choice, **kind)
            present = Present(time.time())
            victims.extend(v.id for v in store.victims(1 << 60, present))
            return lease

        monkeypatch.setattr(process.queue, "_reserve", reserve_and_evict)
        assert await complete(rig, 1) == N_TOKENS
        assert victims and wanted.id not in victims


@pytest.mark.parametrize("memory", [memory for memory in Memory if memory is not Memory.NOTHING])
async def test_save_without_room_is_skipped_and_costs_the_client_nothing(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, memory: Memory
) -> None:
    monkeypatch.setattr(StateFiles, "reserve_bytes", lambda _: 1 << 60)
    async with start_rig(memory=memory, n_slots=1, n_ctx=32_000) as rig:
        n_at_first_contact = rig.sample("saves_skipped_total", reason="free space")
        for _ in range(2):
            for number in (1, 2):
                await complete(rig, number)
                await rig.settled()
        assert rig.checkpoints == []
        n_skipped = rig.sample("saves_skipped_total", reason="free space")
        assert n_skipped > n_at_first_contact
        assert rig.sample("cache_faults_total", stage="save") == 0
        n_saves = len(rig.server.seen_at("save"))
        assert await complete(rig, 2) > N_TOKENS - 10, "the slot is as good as ever"
        assert len(rig.server.seen_at("save")) == n_saves


async def test_directory_that_is_gone_is_told_and_costs_the_client_nothing(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1) as rig:
        await rig.chat("a")
        await rig.settled()
        directory = rig.server.directory
        directory.rename(directory.with_name("elsewhere"))
        for name in "bcd":
            assert (await rig.chat(name)).status == 200
        await until(lambda: rig.sample("saves_total", result="failed"))
        [reason] = (await rig.health())["reasons"]
        assert reason["kind"] == "saves fail" and "No such file" in str(reason)
        directory.mkdir()


async def test_directory_that_hangs_is_told_and_keeps_no_request_waiting(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama-server is not asked to save into it: it would answer nobody until the disk is back."""
    back = threading.Event()

    def hang(*_: object) -> int:
        assert threading.current_thread() is not threading.main_thread()
        back.wait(HANG_SECONDS)
        return 1 << 40

    async with start_rig(n_slots=1, idle_save_seconds=1.0) as rig:
        try:
            with monkeypatch.context() as hung:
                hung.setattr(StateFiles, "free_bytes", hang)
                hung.setattr(stores, "_ANSWER_SECONDS", 0.2)
                await rig.chat("a")
                await rig.chat("b")
                await until(lambda: DegradationKind.SAVES_FAIL in rig.running.degradations)
                (reason,) = (await rig.health())["reasons"]
                assert "does not answer" in reason["reason"]
                async with rig.client.get(f"{rig.admin_url}/metrics") as reply:
                    assert "disk_free_bytes NaN" in await reply.text()
        finally:
            back.set()
        await rig.chat("a")
        await until(lambda: rig.checkpoints)
        await until(lambda: DegradationKind.SAVES_FAIL not in rig.running.degradations)


async def test_disk_is_asked_for_its_room_beside_requests_at_first_contact_too(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_bytes = StateFiles.free_bytes

    def free_bytes_elsewhere(files: StateFiles) -> int:
        assert threading.current_thread() is not threading.main_thread(), "it may hang"
        return free_bytes(files)

    async with start_rig(n_slots=1, idle_save_seconds=0.05) as rig:
        monkeypatch.setattr(StateFiles, "free_bytes", free_bytes_elsewhere)
        await rig.server.crash()
        await rig.server.restart()
        await rig.chat("a")
        await until(lambda: rig.checkpoints)


async def test_slots_found_at_first_contact_without_room_are_not_adopted(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(n_slots=1, n_ctx=32_000) as rig:
        await complete(rig, 1)
        await rig.stop_proxy()
        for file in rig.server.directory.glob("lpc-*"):
            file.unlink()
        monkeypatch.setattr(StateFiles, "reserve_bytes", lambda _: 1 << 60)
        await rig.start_proxy()
        await rig.attached()
        assert rig.checkpoints == []
        assert rig.sample("saves_skipped_total", reason="free space") == 1
        assert await complete(rig, 1) == 0


def write_refusals(rig: Rig) -> float:
    return rig.sample("saves_skipped_total", reason="write budget")


@pytest.mark.parametrize("memory", [Memory.ANY_PREFIX, Memory.RESTORE_POINTS])
async def test_write_budget_stops_saves_and_says_so_while_requests_are_served(
    start_rig: StartRig, memory: Memory
) -> None:
    options: dict[str, Any] = {"memory": memory, "n_slots": 1, "n_ctx": 32_000}
    async with start_rig(**options, max_write_bytes_per_day=1 << 20) as rig:
        with capture_logs() as logs:
            for number in range(1, 8):
                assert (await complete(rig, number)) == 0
                await rig.settled()
        written = rig.sample("written_last_day_bytes")
        assert 0 < written <= 1 << 20
        assert rig.sample("written_bytes_total") == written
        n_kept = len(rig.checkpoints)
        assert n_kept > 0 and write_refusals(rig) > 0
        assert rig.sample("cache_faults_total", stage="save") == 0
        assert (await rig.health())["store"]["written_last_day_bytes"] == written
        assert (await rig.health())["store"]["max_write_bytes_per_day"] == 1 << 20
        assert await rig.reasons() == ["write budget spent"]
        told = [line for line in logs if line.get("kind") == "write budget spent"]
        assert [line["event"] for line in told] == ["degradation"]
        assert await complete(rig, 1) > N_TOKENS - 10, "what was saved before is still restored"
        await rig.settled()
        await rig.stop_proxy()
        await rig.start_proxy()
        await rig.attached()
        assert rig.sample("written_last_day_bytes") >= written
        assert len(rig.checkpoints) == n_kept


async def test_without_a_write_budget_writes_are_counted_and_never_refused(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1, n_ctx=32_000) as rig:
        await store_with(rig, 1, 2, 3)
        assert await complete(rig, 1) == N_TOKENS
        assert write_refusals(rig) == 0
        store = (await rig.health())["store"]
        assert store["max_write_bytes_per_day"] == 0
        assert store["written_last_day_bytes"] == rig.sample("written_bytes_total")


async def test_scarce_write_budget_goes_to_new_work_before_long_states_with_little_new(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1, n_ctx=32_000) as rig:
        store, [first] = await store_with(rig, 1)
        await rig.stop_proxy()
        rig.options["max_write_bytes_per_day"] = store.writes.last_day_bytes + 9 * first.size_bytes
        await rig.start_proxy()
        store, _ = await store_with(rig, 2, 3, 4, 5)
        assert write_refusals(rig) == 0 and not store.writes.has_plenty
        n_saved = len(store)
        longer = {"prompt": [*prompt(5), 5, *range(7000, 7100)], "n_predict": 0}
        assert (await rig.post("/completion", longer)).n_reused >= N_TOKENS
        await rig.settled()
        assert (len(store), write_refusals(rig)) == (n_saved, 1)
        await complete(rig, 6)
        await rig.settled()
        assert (len(store), write_refusals(rig)) == (n_saved + 1, 1)
