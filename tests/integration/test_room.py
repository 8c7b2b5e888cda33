"""Room is never made of what a request is about to use, and the client does not notice if there is none."""

import time

import pytest

from proxy.core.eviction import Present, Removal
from proxy.core.model import Checkpoint
from proxy.errors import NoRoom
from proxy.store.budget import Claim
from proxy.store.store import CheckpointStore
from tests.fakes.slots import Memory
from tests.integration.conftest import StartRig
from tests.integration.rig import Rig

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
    return Claim(store.limits.max_bytes, Present(time.time()))


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
        waiting = rig.running.lifecycle._services.tasks.start(complete(rig, 1))
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
        waiting = rig.running.lifecycle._services.tasks.start(complete(rig, 1))
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
        attachment = await rig.settled()
        victims: list[int] = []
        reserve = attachment.desk._reserve

        def reserve_and_evict(choice, **kind):
            lease = reserve(choice, **kind)
            present = Present(time.time())
            victims.extend(v.id for v in store._catalogue.victims(1 << 60, present))
            return lease

        monkeypatch.setattr(attachment.desk, "_reserve", reserve_and_evict)
        assert await complete(rig, 1) == N_TOKENS
        assert victims and wanted.id not in victims


@pytest.mark.parametrize("memory", Memory)
async def test_save_without_room_is_skipped_and_costs_the_client_nothing(
    start_rig: StartRig, memory: Memory
) -> None:
    async with start_rig(memory=memory, n_slots=1, n_ctx=32_000, min_free_bytes=1 << 60) as rig:
        n_at_first_contact = rig.sample("saves_skipped_total", reason="free space")
        for _ in range(2):
            for number in (1, 2):
                await complete(rig, number)
                await rig.settled()
        assert rig.checkpoints == []
        n_skipped = rig.sample("saves_skipped_total", reason="free space")
        can_restore = memory not in (Memory.NOTHING, Memory.CUT_WINDOW)
        assert (n_skipped > n_at_first_contact) == can_restore
        assert rig.sample("cache_faults_total", stage="save") == 0
        n_saves = len(rig.server.seen_at("save"))
        assert await complete(rig, 2) > N_TOKENS - 10, "the slot is as good as ever"
        assert len(rig.server.seen_at("save")) == n_saves


async def test_slots_found_at_first_contact_without_room_are_not_adopted(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1, n_ctx=32_000) as rig:
        await complete(rig, 1)
        await rig.stop_proxy()
        for file in rig.server.directory.glob("lpc-*"):
            file.unlink()
        rig.options["min_free_bytes"] = 1 << 60
        await rig.start_proxy()
        await rig.attached()
        assert rig.checkpoints == []
        assert rig.sample("saves_skipped_total", reason="free space") == 1
        assert await complete(rig, 1) == 0
