"""What llama-server writes is counted, whatever became of the file, and limited by the day."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from proxy.core.eviction import Present
from proxy.core.saving import Claim, Written
from proxy.errors import WRITE_BUDGET, NoRoom
from proxy.store.index import Index
from proxy.store.store import CheckpointStore
from tests.store.conftest import opened
from tests.store.test_room import SIZE, claim, save

LARGE = 1 << 20


def limits(n_files_per_day: int) -> tuple[int, int]:
    return LARGE, n_files_per_day * SIZE


async def write(store: CheckpointStore, wanted: Claim, n_bytes: int = SIZE) -> str:
    """Reserve room and write the file, as a save does that fails afterwards."""
    name = await store.reserve(wanted)
    store.files.path(name).write_bytes(b"x" * n_bytes)
    return name


async def test_committed_file_is_counted_once_and_as_large_as_it_is(tmp_path: Path) -> None:
    with opened(tmp_path, *limits(0)) as store:
        seen: list[int] = []
        store.writes.on_write = seen.append
        await save(store, 1, size_bytes=70)
        assert store.writes.last_day_bytes == 70 and seen == [70]


async def test_file_that_was_not_kept_is_counted(tmp_path: Path) -> None:
    with opened(tmp_path, *limits(0)) as store:
        await store.discard(await write(store, claim(), 70))
        assert store.writes.last_day_bytes == 70
        settled = await write(store, claim(), 30)
        await store.settle(settled, 30)
        await store.discard(settled)
        assert store.writes.last_day_bytes == 100
        await store.discard(await store.reserve(claim()))
        assert store.writes.last_day_bytes == 100, "nothing was written"


async def test_budget_refuses_what_would_exceed_it_and_makes_no_room_for_it(tmp_path: Path) -> None:
    with opened(tmp_path, *limits(3)) as store:
        for mark in range(3):
            await save(store, mark)
        with pytest.raises(NoRoom, match="max_write_bytes_per_day") as refused:
            await store.reserve(claim(1))
        assert refused.value.reason == WRITE_BUDGET
        assert len(store) == 3


async def test_saves_at_the_same_time_cannot_exceed_it_together(tmp_path: Path) -> None:
    with opened(tmp_path, *limits(3)) as store:
        begun = await asyncio.gather(*(store.reserve(claim()) for _ in range(3)))
        with pytest.raises(NoRoom):
            await store.reserve(claim())
        await store.discard(begun[0])
        await store.reserve(claim())


async def test_probe_is_counted_and_never_refused(tmp_path: Path) -> None:
    with opened(tmp_path, *limits(1)) as store:
        for _ in range(2):
            await store.discard(await write(store, claim(is_passing=True)))
        assert store.writes.last_day_bytes == 2 * SIZE
        with pytest.raises(NoRoom):
            await store.reserve(claim(1))


async def test_count_survives_a_restart_and_a_crash(tmp_path: Path) -> None:
    with opened(tmp_path, *limits(3)) as store:
        await save(store, 1)
        await save(store, 2)
        # What a crash would leave: the index as it is now, without anything that closing writes.
        assert store.index.value("written", object) is not None
    with opened(tmp_path, *limits(3)) as store:
        assert store.writes.last_day_bytes == 2 * SIZE
        await save(store, 3)
        with pytest.raises(NoRoom):
            await store.reserve(claim())


async def test_commit_is_one_transaction_that_takes_the_count_and_touched_records_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, writing = list[Index](), Index._writing

    def counted(index: Index) -> Any:
        begun.append(index)
        return writing(index)

    with opened(tmp_path, *limits(0)) as store:
        first = await save(store, 1)
        async with store.using(first):
            pass
        monkeypatch.setattr(Index, "_writing", counted)
        await save(store, 2)
        assert len(begun) == 1
        touched = store.index.record(first.id)
        assert touched == store.get(first.id) and touched != first
        written = store.index.value("written", Written)
        assert written is not None and written.last_day_bytes(time.time()) == 2 * SIZE


async def test_what_is_scarce_goes_to_what_spares_most(tmp_path: Path) -> None:
    def sparing(seconds: float) -> Claim:
        return Claim(SIZE, Present(time.time()), spared_seconds=seconds)

    with opened(tmp_path, *limits(10)) as store:
        for _ in range(5):
            assert store.writes.has_plenty
            await store.discard(await write(store, sparing(1.0)))
        assert store.writes.has_plenty
        await store.discard(await write(store, sparing(0.0)))
        assert not store.writes.has_plenty
        with pytest.raises(NoRoom, match="not worth it"):
            await store.reserve(sparing(0.01))
        await store.reserve(sparing(1.0))
