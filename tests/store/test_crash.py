"""A crash between any two steps leaves a store that opens, serves what was committed, and is tidy.

A crash is an exception that no code in the store catches; whatever was written before it stays.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.core.eviction import Removal
from proxy.core.model import CheckpointId
from proxy.errors import StoreFault
from proxy.store import directory
from proxy.store.files import StateFiles, is_state_name
from proxy.store.index import Index
from proxy.store.store import CheckpointStore
from tests.store.conftest import BUDGET, found, names_in, new_state, opened, run_of, temporary_of
from tests.store.test_room import claim


class Crash(BaseException):
    """The machine stops here."""


def crash(*_: Any, **__: Any) -> None:
    raise Crash


def fail(*_: Any, **__: Any) -> None:
    raise StoreFault("full")


def after(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return *step*, followed by a crash."""

    def done_then_crash(*arguments: Any, **named: Any) -> None:
        step(*arguments, **named)
        raise Crash

    return done_then_crash


COMMIT_STEPS: list[tuple[Any, str]] = [
    (StateFiles, "_protect"),
    (os, "fsync"),
    (Path, "rename"),
    (StateFiles, "write_whole"),
    (directory, "sync_names"),
    (Index, "put"),
]
REMOVE_STEPS: list[tuple[Any, str]] = [(Index, "tokens"), (Index, "delete"), (StateFiles, "remove")]


def named(step: Any) -> str:
    return step if isinstance(step, str) else step.__name__


def abandon(store: CheckpointStore) -> None:
    """Let go of a store as a dying process does: nothing more is written."""
    store._writer.shutdown()
    store.index._env.close()
    store._directory._opened.pop_all()  # frees the lock, seals nothing


def sidecars_in(directory: Path) -> set[str]:
    """Return the names of the states that have a record beside them."""
    return {path.with_suffix(".state").name for path in directory.glob("lpc-*.meta")}


async def check_reopened(directory: Path, must_have: set[CheckpointId], may_have: int) -> None:
    """Open the store and check that index, files and what is found agree."""
    with opened(directory) as store:
        ids = {checkpoint.id for checkpoint in store}
        assert must_have <= ids and len(ids - must_have) <= may_have
        assert {c.id for c in store.index.all()} == ids
        assert names_in(directory) == {c.file_name for c in store}
        assert sidecars_in(directory) == names_in(directory)
        assert {c.checkpoint.id for c in found(store, run_of(2000))} == ids
        for checkpoint in store:
            async with store.using(checkpoint):
                content = store.files.path(checkpoint.file_name).read_bytes()
            assert content == b"state of " + run_of(checkpoint.n_tokens).tobytes()
    with opened(directory) as store:
        assert store.report["n_entries_without_file"] == store.report["n_files_without_entry"] == 0


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("owner", "name"), COMMIT_STEPS, ids=named)
async def test_crash_in_commit_leaves_a_store_that_opens_and_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when: str
) -> None:
    store = CheckpointStore(tmp_path, BUDGET)
    kept = await store.commit(*new_state(store, run_of(300)))
    state = new_state(store, run_of(600))
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, crash if when == "before" else after(getattr(owner, name)))
        with pytest.raises(Crash):
            await store.commit(*state)
    abandon(store)
    await check_reopened(tmp_path, {kept.id}, may_have=1)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("owner", "name"), REMOVE_STEPS, ids=named)
async def test_crash_in_remove_leaves_a_store_that_opens_and_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when: str
) -> None:
    store = CheckpointStore(tmp_path, BUDGET)
    kept = await store.commit(*new_state(store, run_of(300)))
    going = await store.commit(*new_state(store, run_of(600)))
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, crash if when == "before" else after(getattr(owner, name)))
        with pytest.raises(Crash):
            await store.remove(going, Removal.BUDGET)
    abandon(store)
    await check_reopened(tmp_path, {kept.id}, may_have=1)


async def test_crash_after_the_entry_is_deleted_does_not_bring_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = StateFiles.remove

    def remove_record(files: StateFiles, name: str) -> None:
        (crash if is_state_name(name) else remove)(files, name)

    store = CheckpointStore(tmp_path, BUDGET)
    going = await store.commit(*new_state(store, run_of(600)))
    with monkeypatch.context() as patch:
        patch.setattr(StateFiles, "remove", remove_record)
        with pytest.raises(Crash):
            await store.remove(going, Removal.BUDGET)
    abandon(store)
    await check_reopened(tmp_path, set(), may_have=0)


async def test_crash_after_commit_without_close_loses_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, BUDGET)
    ids = {(await store.commit(*new_state(store, run_of(n)))).id for n in (300, 600, 900)}
    abandon(store)
    await check_reopened(tmp_path, ids, may_have=0)


# Steps that fail while the process lives on.


async def test_open_whose_check_fails_frees_the_directory_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as store:
        kept = await store.commit(*new_state(store, run_of(300)))
        lost = await store.commit(*new_state(store, run_of(600)))
    (tmp_path / lost.file_name).unlink()
    (tmp_path / "lpc-0123456789abcdef.saving").write_bytes(b"orphan")
    with monkeypatch.context() as patch:
        patch.setattr(Index, "delete", fail)
        with pytest.raises(StoreFault, match="full"):
            CheckpointStore(tmp_path, BUDGET)
    await check_reopened(tmp_path, {kept.id}, may_have=0)


FAILING_COMMIT_STEPS = [
    (os, "fsync", OSError("disk")),
    (Path, "rename", OSError("disk")),
    (StateFiles, "write_whole", OSError("disk")),
    (directory, "sync_names", OSError("disk")),
    (Index, "put", StoreFault("full")),
]


@pytest.mark.parametrize(
    ("owner", "name", "error"), FAILING_COMMIT_STEPS, ids=lambda v: v if isinstance(v, str) else ""
)
async def test_commit_with_a_failing_step_raises_store_fault_and_leaves_no_final_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception
) -> None:
    def fail_with_error(*_: Any, **__: Any) -> None:
        raise error

    with opened(tmp_path) as store:
        kept = await store.commit(*new_state(store, run_of(300)))
        state = new_state(store, run_of(600))
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail_with_error)
            with pytest.raises(StoreFault):
                await store.commit(*state)
        await store.discard(temporary_of(state))
        assert names_in(tmp_path) == {kept.file_name}
        assert [c.checkpoint for c in found(store, run_of(900))] == [kept]
        assert len(found(store, run_of(900))) == len(store.index.all()) == len(store)


async def test_remove_that_fails_leaves_memory_and_disk_agreeing(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = await store.commit(*new_state(store, run_of(300)))
    with monkeypatch.context() as patch:
        patch.setattr(Index, "delete", fail)
        with pytest.raises(StoreFault):
            await store.remove(checkpoint, Removal.BUDGET)
    assert {c.id for c in store} == {c.id for c in store.index.all()}
    await store.remove(checkpoint, Removal.BUDGET)
    assert names_in(store.files.directory) == set()


async def test_remove_that_fails_after_its_caller_left_is_taken_back(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = await store.commit(*new_state(store, run_of(300)))
    with monkeypatch.context() as patch:
        patch.setattr(Index, "delete", fail)
        removing = asyncio.ensure_future(store.remove(checkpoint, Removal.BUDGET))
        await asyncio.sleep(0)
        removing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await removing
        await store.put_value("settled", True)
    assert (store.going_bytes, store.size_bytes) == (0, checkpoint.size_bytes)
    assert [c.id for c in store] == [checkpoint.id]


async def test_file_that_cannot_be_deleted_is_not_counted_and_goes_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = StateFiles.remove

    def fail_to_unlink(files: StateFiles, name: str) -> None:
        if not name.endswith(".meta"):
            raise OSError("busy")
        remove(files, name)

    with opened(tmp_path) as store:
        checkpoint = await store.commit(*new_state(store, run_of(300)))
        state = new_state(store, run_of(600))
        store.writes.reserve(temporary_of(state), claim(100))
        with monkeypatch.context() as patch:
            patch.setattr(StateFiles, "remove", fail_to_unlink)
            with pytest.raises(StoreFault, match="busy"):
                await store.remove(checkpoint, Removal.BUDGET)
            with pytest.raises(StoreFault, match="busy"):
                await store.discard(temporary_of(state))
        assert (len(store), store.size_bytes) == (0, 0)
        assert store.writes.shortage(0, 0)[0] <= 0, "nothing stays reserved"
    with opened(tmp_path):
        assert names_in(tmp_path) == set()
