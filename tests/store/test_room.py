"""Room in the store: the budget and the free space hold before anything is written."""

import asyncio
import errno
import os
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from proxy.core.eviction import N_COMPARED, Present, Removal
from proxy.core.model import Checkpoint, CheckpointId, Quarantine
from proxy.core.saving import Claim
from proxy.errors import NoRoom, StoreFault
from proxy.store.files import StateFiles, sync_names
from proxy.store.index import Index
from proxy.store.store import CheckpointStore
from tests.lab.waiting import until
from tests.store.conftest import names_in, new_checkpoint, new_state, opened, run_of
from tests.store.test_store import hold_writer

SIZE = 100


def claim(n_bytes: int = SIZE, **changes: Any) -> Claim:
    return Claim(n_bytes, Present(time.time()), **changes)


def bytes_in(directory: Path) -> int:
    return sum((directory / name).stat().st_size for name in names_in(directory))


async def save(store: CheckpointStore, mark: int, size_bytes: int = SIZE) -> Checkpoint:
    """Save a state as the driver does: reserve, write, settle, commit."""
    name = await store.reserve(claim())
    store.files.path(name).write_bytes(b"x" * size_bytes)
    await store.settle(name, size_bytes)
    tokens = run_of(300, start=1000 * mark)
    return await store.commit(new_checkpoint(store, name, tokens, [size_bytes]), tokens)


async def test_reserve_within_the_limits_removes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, 3 * SIZE) as store:
        for mark in range(3):
            await save(store, mark)
        assert len(store) == 3 and not +store.removals
        assert store.size_bytes == bytes_in(tmp_path) == 3 * SIZE


async def test_reserve_makes_room_before_anything_is_written(tmp_path: Path) -> None:
    with opened(tmp_path, 3 * SIZE) as store:
        first, *_ = [await save(store, mark) for mark in range(3)]
        name = await store.reserve(claim())
        assert bytes_in(tmp_path) == 2 * SIZE
        assert store.get(first.id) is None
        assert +store.removals == {Removal.BUDGET: 1}
        await store.discard(name)


async def test_reservations_of_concurrent_saves_add_up(tmp_path: Path) -> None:
    with opened(tmp_path, 4 * SIZE) as store:
        for mark in range(4):
            await save(store, mark)
        await asyncio.gather(*(store.reserve(claim()) for _ in range(3)))
        assert bytes_in(tmp_path) == SIZE
        with pytest.raises(NoRoom, match="only 100 are neither in use nor pinned"):
            await store.reserve(claim(2 * SIZE))
        assert len(store) == 1, "what does not suffice is not removed"


async def test_disk_is_asked_for_room_again_only_for_a_file_that_is_larger_than_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, space = list[None](), CheckpointStore.space

    async def noted(store: CheckpointStore) -> tuple[int, int]:
        asked.append(None)
        return await space(store)

    monkeypatch.setattr(CheckpointStore, "space", noted)
    with opened(tmp_path, 3 * SIZE) as store:
        name = await store.reserve(claim())
        for n_bytes in (SIZE, SIZE // 2, SIZE // 2):
            await store.settle(name, n_bytes)
        assert len(asked) == 1
        await store.settle(name, SIZE)
        assert len(asked) == 2
        await store.discard(name)


async def test_save_that_needs_no_room_of_a_checkpoint_being_removed_does_not_wait_for_it(
    tmp_path: Path,
) -> None:
    with opened(tmp_path, 3 * SIZE) as store:
        first = await save(store, 1)
        go_on = hold_writer(store)
        try:
            removing = asyncio.ensure_future(store.remove(first, Removal.SUPERSEDED))
            await until(lambda: store.going_bytes)
            names = [await store.reserve(claim()) for _ in range(2)]
            short = asyncio.ensure_future(store.reserve(claim()))
            await asyncio.wait({short}, timeout=0.1)  # time to reserve too early, if it can
            assert not short.done()
        finally:
            go_on.set()
        assert await removing
        for name in (*names, await short):
            await store.discard(name)


async def test_reserve_waits_for_every_one_of_several_removals_under_way(tmp_path: Path) -> None:
    with opened(tmp_path, 5 * SIZE) as store:
        for mark in range(5):
            await save(store, mark)
        go_on = hold_writer(store)
        all_but_one = asyncio.ensure_future(store.reserve(claim(4 * SIZE)))
        await until(lambda: len(store) == 1)
        removing = asyncio.ensure_future(store.reserve(claim()))
        go_on.set()
        await removing
        assert bytes_in(tmp_path) == 0
        for name in (await all_but_one, await removing):
            await store.discard(name)


async def test_reservation_is_free_again_after_discard_and_after_commit(tmp_path: Path) -> None:
    with opened(tmp_path, SIZE) as store:
        for _ in range(3):
            await store.discard(await store.reserve(claim()))
        stored = await save(store, 1)
        assert [c.id for c in store] == [stored.id]
        await store.discard(await store.reserve(claim()))
        assert len(store) == 0


async def test_reserve_returns_only_when_the_files_are_gone(tmp_path: Path) -> None:
    with opened(tmp_path, SIZE) as store:
        await save(store, 1)
        go_on = hold_writer(store)
        reserving = asyncio.ensure_future(store.reserve(claim()))
        await until(lambda: len(store) == 0)  # nobody finds it any more, but it is there
        assert not reserving.done() and bytes_in(tmp_path) == SIZE
        go_on.set()
        await reserving
        assert bytes_in(tmp_path) == 0


async def test_reserve_waits_for_removals_that_others_began(tmp_path: Path) -> None:
    with opened(tmp_path, SIZE) as store:
        stored = await save(store, 1)
        go_on = hold_writer(store)
        removing = asyncio.ensure_future(store.remove(stored, Removal.SUPERSEDED))
        await asyncio.sleep(0)
        reserving = asyncio.ensure_future(store.reserve(claim()))
        await asyncio.sleep(0.02)
        assert not reserving.done()
        go_on.set()
        await asyncio.gather(removing, reserving)
        assert bytes_in(tmp_path) == 0


async def test_reserve_of_more_than_the_budget_is_refused_and_removes_nothing(
    tmp_path: Path,
) -> None:
    with opened(tmp_path, 2 * SIZE) as store:
        await save(store, 1)
        with pytest.raises(NoRoom) as refused:
            await store.reserve(claim(2 * SIZE + 1))
        assert refused.value.reason == "larger than the budget"
        assert len(store) == 1
        await store.reserve(claim(2 * SIZE))


async def test_settle_of_a_larger_file_makes_more_room_at_once(tmp_path: Path) -> None:
    with opened(tmp_path, 3 * SIZE) as store:
        for mark in range(2):
            await save(store, mark)
        await save(store, 2, 2 * SIZE)
        assert store.size_bytes == bytes_in(tmp_path) == 3 * SIZE
        assert len(store) == 2


async def test_settle_of_a_file_larger_than_the_budget_keeps_everything_else(
    tmp_path: Path,
) -> None:
    with opened(tmp_path, 3 * SIZE) as store:
        await save(store, 1)
        with pytest.raises(NoRoom, match="more than max_store_bytes"):
            await save(store, 2, 4 * SIZE)
        assert len(store) == 1


async def test_room_is_never_made_of_what_is_in_use_or_pinned(tmp_path: Path) -> None:
    with opened(tmp_path, 3 * SIZE) as store:
        used, pinned, idle = [await save(store, mark) for mark in range(3)]
        await store.pin(pinned.id, is_pinned=True)
        with store.keep(used):
            await store.discard(await store.reserve(claim()))
            assert {c.id for c in store} == {used.id, pinned.id}
            with pytest.raises(NoRoom) as refused:
                await store.reserve(claim(2 * SIZE))
            assert refused.value.reason == "budget"
        assert store.get(idle.id) is None
        await store.discard(await store.reserve(claim(2 * SIZE)))
        assert [c.id for c in store] == [pinned.id]


async def test_what_the_new_state_replaces_goes_only_if_nothing_else_suffices(
    tmp_path: Path,
) -> None:
    with opened(tmp_path, 2 * SIZE) as store:
        older, other = [await save(store, mark) for mark in range(2)]
        replaces = frozenset({older.id})
        await store.discard(await store.reserve(claim(replaces=replaces)))
        assert [c.id for c in store] == [older.id]
        assert store.get(other.id) is None
        await store.discard(await store.reserve(claim(2 * SIZE, replaces=replaces)))
        assert len(store) == 0


async def test_reserve_whose_removals_fail_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise StoreFault("full")

    with opened(tmp_path, 2 * SIZE) as store:
        ids = {(await save(store, mark)).id for mark in range(2)}
        with monkeypatch.context() as patch:
            patch.setattr(Index, "delete", fail)
            with pytest.raises(StoreFault, match="full"):
                await store.reserve(claim(2 * SIZE))
        assert {c.id for c in store} == ids == {c.id for c in store.index.all()}
        await store.discard(await store.reserve(claim(2 * SIZE)))


async def test_reserve_whose_second_removal_fails_keeps_the_more_valuable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, 2 * SIZE) as store:
        for mark in range(2):
            await save(store, mark)
        delete, (least, most) = Index.delete, store.victims(2 * SIZE, Present(time.time()))

        def fail_then(*entry: Any) -> None:
            if len(store.index.all()) == 1:
                raise StoreFault("full")
            delete(*entry)

        monkeypatch.setattr(Index, "delete", fail_then)
        with pytest.raises(StoreFault, match="full"):
            await store.reserve(claim(2 * SIZE))
        assert [c.id for c in store] == [most.id] != [least.id]


async def test_reserve_whose_caller_is_cancelled_gives_its_bytes_back(tmp_path: Path) -> None:
    with opened(tmp_path, 2 * SIZE) as store:
        for mark in range(2):
            await save(store, mark)
        go_on = hold_writer(store)
        reserving = asyncio.ensure_future(store.reserve(claim(2 * SIZE)))
        await asyncio.sleep(0.02)
        reserving.cancel()
        await asyncio.wait([reserving])
        go_on.set()
        await store.discard(await store.reserve(claim(2 * SIZE)))
        assert {c.id for c in store.index.all()} == {c.id for c in store} == set()


# Free space.


def give_free(monkeypatch: pytest.MonkeyPatch, directory: Path, n_bytes: int) -> None:
    """Let the disk have so much space for the store and what is left beside it."""
    monkeypatch.setattr(StateFiles, "free_bytes", lambda _: n_bytes - bytes_in(directory))


@pytest.mark.parametrize(("disk_bytes", "reserve_bytes"), [(1 << 40, 2 << 30), (20 << 30, 1 << 30)])
def test_less_is_left_free_on_a_small_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk_bytes: int, reserve_bytes: int
) -> None:
    status = SimpleNamespace(f_blocks=disk_bytes >> 12, f_frsize=1 << 12)
    monkeypatch.setattr("os.statvfs", lambda _: status)
    assert StateFiles(tmp_path).reserve_bytes() == reserve_bytes


async def test_free_space_is_left_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StateFiles, "reserve_bytes", lambda _: 5 * SIZE)
    with opened(tmp_path, 100 * SIZE) as store:
        give_free(monkeypatch, tmp_path, 8 * SIZE)
        for mark in range(3):
            await save(store, mark)
        name = await store.reserve(claim())
        assert bytes_in(tmp_path) == 2 * SIZE
        assert +store.removals == {Removal.FREE_SPACE: 1}
        other = await store.reserve(claim())
        assert bytes_in(tmp_path) == SIZE, "what another save will write counts"
        with pytest.raises(NoRoom) as refused:
            await store.reserve(claim(2 * SIZE))
        assert refused.value.reason == "free space"
        assert len(store) == 1
        for reserved in (name, other):
            await store.discard(reserved)


async def test_full_disk_on_which_the_index_cannot_be_changed_gets_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = Index.delete

    def delete_if_there_is_room(index: Index, *given: Any) -> None:
        if not store.files.free_bytes():
            raise StoreFault("index: mdb_txn_commit: No space left on device")
        delete(index, *given)

    monkeypatch.setattr(StateFiles, "reserve_bytes", lambda _: 0)
    monkeypatch.setattr(Index, "delete", delete_if_there_is_room)
    with opened(tmp_path, 100 * SIZE) as store:
        for mark in range(3):
            await save(store, mark)
        give_free(monkeypatch, tmp_path, 3 * SIZE)
        await store.discard(await store.reserve(claim()))
        assert len(store) == 2 and bytes_in(tmp_path) == store.size_bytes == 2 * SIZE


async def test_a_passing_file_may_use_the_space_that_is_to_stay_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StateFiles, "reserve_bytes", lambda _: 5 * SIZE)
    with opened(tmp_path, 100 * SIZE) as store:
        give_free(monkeypatch, tmp_path, 2 * SIZE)
        with pytest.raises(NoRoom):
            await store.reserve(claim())
        await store.discard(await store.reserve(claim(is_passing=True)))


async def test_a_passing_file_is_not_refused_for_files_that_are_not_committed_yet(
    tmp_path: Path,
) -> None:
    with opened(tmp_path, 2 * SIZE) as store:
        first, second = [await store.reserve(claim()) for _ in range(2)]
        await store.settle(first, SIZE)
        passing = await store.reserve(claim(is_passing=True))
        await store.settle(passing, SIZE)
        for name in (passing, second, first):
            await store.discard(name)


# Opening and pins.


async def test_open_with_a_smaller_budget_brings_the_store_within_it(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for mark in range(5):
            await save(store, mark)
        [pinned, *_] = store
        await store.pin(pinned.id, is_pinned=True)
    with opened(tmp_path, 2 * SIZE) as store:
        assert bytes_in(tmp_path) == store.size_bytes == 2 * SIZE
        assert store.get(pinned.id) is not None
        assert (store.report["n_checkpoints"], store.report["n_over_budget"]) == (2, 3)
        assert store.removals[Removal.BUDGET] == 3
        assert len(store.index.all()) == 2


async def test_pin_is_durable_and_can_be_taken_back(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        stored = await save(store, 1)
        assert await store.pin(CheckpointId(stored.id + 1), is_pinned=True) is None
        pinned = await store.pin(stored.id, is_pinned=True)
        assert pinned is not None and pinned.is_pinned
    with opened(tmp_path) as store:
        assert [c.is_pinned for c in store] == [True]
        await store.remove(stored, Removal.SUPERSEDED)
        assert len(store) == 1
        await store.pin(stored.id, is_pinned=False)
        await store.remove(stored, Removal.SUPERSEDED)
        assert len(store) == 0


async def test_broken_checkpoint_is_removed_whoever_keeps_it(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        stored = await save(store, 1)
        await store.pin(stored.id, is_pinned=True)
        with store.keep(stored):
            await store.remove(stored, Removal.BROKEN)
        assert len(store) == 0
        assert +store.removals == {Removal.BROKEN: 1}


async def test_records_without_the_newer_fields_are_read(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        stored = await save(store, 1)
        record = msgspec.msgpack.decode(msgspec.msgpack.encode(stored))
        for name in ("header", "turn_start", "is_pinned"):
            del record[name]
        with store.index._env.begin(write=True, db=store.index._checkpoints) as transaction:
            key = stored.id.to_bytes(8, "big")
            transaction.put(key, msgspec.msgpack.encode(record))
    with opened(tmp_path) as store:
        assert [(c.id, c.is_pinned) for c in store] == [(stored.id, False)]


async def test_scores_order_checkpoints_across_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path, 1 << 30) as store:
        present, made = Present(time.time()), list[Checkpoint]()
        for number in range(5):
            used_at = present.now - 3600 * number
            new = new_state(store, run_of(300, start=1000 * number), last_used_at=used_at)
            made.append(await store.commit(*new))
        await store.change_on_disk(made[1].id, quarantine=Quarantine("it ended llama-server", 1.0))
        await store.pin(made[4].id, is_pinned=True)
        expected = [made[i].id for i in (1, 3, 2, 0, 4)]
        assert [i for i, _ in store.index.least_valuable()] == expected
        assert [c.id for c in store.newest(2)] == expected[:-3:-1]
        assert [v.id for v in store.victims(1 << 30, present)] == expected[:-1]
    with opened(tmp_path, 1 << 30) as store:
        assert [i for i, _ in store.index.least_valuable()] == expected
        assert [c.id for c in store.quarantined] == expected[:1]
        assert store.pinned_bytes == made[4].size_bytes


async def test_score_that_a_clock_ahead_has_given_is_taken_back(tmp_path: Path) -> None:
    ahead = time.time() + 10 * 365 * 86400
    with opened(tmp_path, 1 << 30) as store:
        first = await store.commit(*new_state(store, run_of(300), last_used_at=ahead))
    with opened(tmp_path, 1 << 30) as store:
        others = [await save(store, mark) for mark in (1, 2)]
        assert [c.id for c in store.newest(3)] == [others[1].id, others[0].id, first.id]
        assert store.victims(1, Present(time.time())) == [first]
        assert store.victims(1, Present(ahead)) != [first]
        for is_pinned in (True, False):
            await store.pin(first.id, is_pinned=is_pinned)
        assert max(summary.score for _, summary in store.index.summaries()) < time.time()


async def test_victims_are_chosen_without_reading_the_whole_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, 1 << 30) as store:
        for number in range(3 * N_COMPARED):
            await store.commit(*new_state(store, run_of(20, start=1000 * number)))
        read, record = list[CheckpointId](), store.index.record

        def note(checkpoint_id: CheckpointId) -> Checkpoint | None:
            read.append(checkpoint_id)
            return record(checkpoint_id)

        monkeypatch.setattr(store.index, "record", note)
        monkeypatch.setattr("proxy.core.eviction.N_READ", N_COMPARED)
        [victim] = store.victims(1, Present(time.time()))
        assert victim.id in read and len(set(read)) < 2 * N_COMPARED


async def test_first_turn_goes_before_older_conversations_of_many_turns(tmp_path: Path) -> None:
    now = time.time()

    async def commit(number: int, n_messages: int, pause_seconds: float) -> Checkpoint:
        tokens, used_at = run_of(300, start=1000 * number), now - pause_seconds
        return await store.commit(
            *new_state(store, tokens, last_used_at=used_at, n_messages=n_messages)
        )

    with opened(tmp_path, 1 << 30) as store:
        first_turn = await commit(0, 1, 60)
        for number in range(1, N_COMPARED + 20):
            await commit(number, 41, 90)
        assert store.victims(1, Present(now)) == [first_turn]


def test_index_on_a_disk_that_is_full_cannot_be_opened_and_ends_no_process(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounts are not allowed here")
    try:
        with suppress(OSError):
            (tmp_path / "others").write_bytes(bytes(1 << 20))
        opening = "import sys; from tests.store.test_room import *; Index(Path(sys.argv[1]))"
        command = [sys.executable, "-c", opening, str(tmp_path / "index")]
        done = subprocess.run(command, capture_output=True, text=True)
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)
    assert (done.returncode, "StoreFault" in done.stderr) == (1, True), done.stderr
    assert "no space left" in done.stderr


def test_file_system_without_a_limit_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a tmpfs of size=0: the kernel tells of no blocks at all."""
    status = SimpleNamespace(f_blocks=0, f_bavail=0, f_frsize=4096)
    monkeypatch.setattr("os.statvfs", lambda _: status)
    assert StateFiles(tmp_path).free_bytes() > 1 << 40


@pytest.mark.parametrize(("number", "is_raised"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_names_are_synced_where_the_file_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_raised: bool
) -> None:
    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(OSError) if is_raised else nullcontext():
        sync_names(tmp_path)
