"""The checkpoint store: what goes in comes out, and only if it is the same."""

import asyncio
import errno
import os
import random
import shutil
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import xxhash

from proxy.core.eviction import Present, Removal
from proxy.core.model import Checkpoint, CheckpointId, CheckpointKind, FilePart, Quarantine
from proxy.core.saving import Claim
from proxy.core.tokens import (
    FIRST_BLOCK_TOKENS,
    Namespace,
    PrefixHash,
    TokenIds,
    count_blocks,
    hash_prefixes,
    token_ids,
)
from proxy.errors import StateDamaged, StoreFault, StoreLocked
from proxy.health import Faults
from proxy.llama.connection import EventLoop
from proxy.metrics import Metrics
from proxy.servers import background
from proxy.store import files
from proxy.store.files import FileStamp, StateFiles
from proxy.store.index import Index
from proxy.store.offline import examine, open_offline
from proxy.store.store import CheckpointStore
from tests.lab.waiting import until
from tests.store.conftest import (
    BUDGET,
    NAMESPACE,
    OTHER_NAMESPACE,
    branch,
    found,
    mount,
    names_in,
    new_state,
    opened,
    run_of,
    temporary_of,
)
from tests.unit.builders import checkpoint as record_of

# Commit and find.


async def test_find_after_commit_yields_the_checkpoint(store: CheckpointStore) -> None:
    state = new_state(store, run_of(300), restore_points=(100, 296), kind=CheckpointKind.TURN_START)
    checkpoint = await store.commit(*state)
    [candidate] = found(store, run_of(1000))
    assert candidate.checkpoint == checkpoint
    assert candidate.n_common == 300
    assert (checkpoint.n_tokens, checkpoint.restore_points) == (300, (100, 296))
    assert checkpoint.kind is CheckpointKind.TURN_START
    assert names_in(store.files.directory) == {checkpoint.file_name}
    assert store.size_bytes == store.files.path(checkpoint.file_name).stat().st_size


async def test_commit_is_known_when_it_ends_however_soon_its_thread_has_ended(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio of Python 3.14 then sets the result before anybody waits for it."""

    def run_now(loop: EventLoop, _: object, work: Callable[[], object]) -> "asyncio.Future[object]":
        done = loop.create_future()
        done.set_result(work())
        return done

    state = new_state(store, run_of(300))
    monkeypatch.setattr(EventLoop, "run_in_executor", run_now)
    checkpoint = await store.commit(*state)
    assert store.size_bytes == checkpoint.size_bytes


async def test_find_of_a_diverging_prompt_counts_common_tokens_to_the_token(
    store: CheckpointStore,
) -> None:
    await store.commit(*new_state(store, run_of(300)))
    assert [c.n_common for c in found(store, branch(201, 400))] == [201]
    assert [c.n_common for c in found(store, run_of(250))] == [250]


async def test_find_of_a_prompt_that_shares_less_than_a_block_yields_nothing(
    store: CheckpointStore,
) -> None:
    await store.commit(*new_state(store, run_of(300)))
    assert found(store, branch(FIRST_BLOCK_TOKENS - 1, 400)) == []
    assert found(store, run_of(FIRST_BLOCK_TOKENS - 1)) == []
    assert found(store, token_ids([])) == []


async def test_find_in_another_namespace_yields_nothing(store: CheckpointStore) -> None:
    await store.commit(*new_state(store, run_of(300)))
    assert found(store, run_of(300), OTHER_NAMESPACE) == []


async def test_find_yields_the_longest_common_prefix_first(store: CheckpointStore) -> None:
    # Also within one block, where the prefix hashes are the same for all of them.
    for n_common in (230, 140, 250, 135, 200, 1000, 129, 180, 220):
        await store.commit(*new_state(store, branch(n_common, n_common + 500, 10**6 + n_common)))
    lengths = [c.n_common for c in found(store, run_of(2000))]
    assert len(lengths) == 9
    assert lengths == sorted(lengths, reverse=True)


async def test_find_after_reopen_yields_the_same(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        checkpoint = await store.commit(*new_state(store, run_of(300), restore_points=(296,)))
    with opened(tmp_path) as store:
        assert [c.checkpoint for c in found(store, run_of(400))] == [checkpoint]
        assert (store.report["n_checkpoints"], store.report["n_entries_without_file"]) == (1, 0)


async def test_find_on_a_hash_collision_tells_how_little_is_common(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def collide(namespace: Namespace, tokens: TokenIds) -> list[PrefixHash]:
        return [PrefixHash(b"%016d" % n) for n in range(count_blocks(len(tokens)))]

    for module in ("store", "catalogue"):
        monkeypatch.setattr(f"proxy.store.{module}.hash_prefixes", collide)
    await store.commit(*new_state(store, run_of(300)))
    assert [c.n_common for c in found(store, branch(150, 300))] == [150]
    assert [c.n_common for c in found(store, run_of(300, start=5000))] in ([], [0])
    assert found(store, run_of(300), OTHER_NAMESPACE) == []


def test_reaching_is_what_comparing_all_prefixes_finds(tmp_path: Path) -> None:
    chosen, index = random.Random(1), Index(tmp_path / "index")
    stored: dict[int, list[PrefixHash]] = {}
    for number in range(80):
        n_common, n_more = chosen.choice((0, 100, 128, 500, 513, 900)), chosen.randrange(1000)
        tokens = branch(n_common, n_common + n_more, mark=1_000_000 * chosen.randrange(1, 9))
        stored[number] = hash_prefixes(NAMESPACE, tokens)
        record = record_of(len(tokens), id=CheckpointId(number))
        index.put((record, tokens, stored[number]))
    for n_at_most in (1, 7, 80):
        for hashes in (*[*stored.values()][:20], hash_prefixes(NAMESPACE, run_of(1200)), []):
            shared = {i: len(set(hashes) & set(theirs)) for i, theirs in stored.items()}
            expected = sorted((n for n in shared.values() if n), reverse=True)[:n_at_most]
            reached = index.reaching(hashes, n_at_most)
            assert list(reached.values()) == expected
            assert all(shared[i] == n for i, n in reached.items())
    index.close()


async def test_remove_takes_entry_and_file(store: CheckpointStore) -> None:
    kept = await store.commit(*new_state(store, run_of(300)))
    gone = await store.commit(*new_state(store, run_of(600)))
    await store.remove(gone, Removal.BUDGET)
    await store.remove(gone, Removal.BUDGET)
    assert [c.checkpoint for c in found(store, run_of(900))] == [kept]
    assert names_in(store.files.directory) == {kept.file_name}
    assert len(store) == 1 and [c.id for c in store.index.all()] == [kept.id]


async def test_remove_leaves_no_prefix_hash_behind(store: CheckpointStore) -> None:
    kept = await store.commit(*new_state(store, run_of(300)))
    gone = await store.commit(*new_state(store, run_of(600)))
    await store.remove(gone, Removal.BUDGET)
    assert list(store.index.reaching(hash_prefixes(NAMESPACE, run_of(900)), 9)) == [kept.id]


async def test_discard_of_a_temporary_file_deletes_it(store: CheckpointStore) -> None:
    state = new_state(store, run_of(300))
    await store.discard(temporary_of(state))
    await store.discard(temporary_of(state))
    assert names_in(store.files.directory) == set()


async def test_discard_after_the_commit_leaves_the_checkpoint_and_its_record(
    store: CheckpointStore,
) -> None:
    state = new_state(store, run_of(300))
    checkpoint = await store.commit(*state)
    await store.discard(temporary_of(state))
    record = store.files.sidecar_name(checkpoint.file_name)
    assert store.files.path(checkpoint.file_name).exists() and store.files.path(record).exists()


async def test_store_opens_though_a_missing_record_cannot_be_written(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        states = [await store.commit(*new_state(store, run_of(300, start=i))) for i in (0, 1000)]
        records = [store.files.path(store.files.sidecar_name(state.file_name)) for state in states]
    for record in records:
        record.unlink()
    records[0].mkdir()  # writing it fails, even for root
    with opened(tmp_path) as store:
        assert len(found(store, run_of(400))) == 1 and records[1].is_file()
    records[0].rmdir()
    with opened(tmp_path):
        assert records[0].is_file()


async def test_state_that_was_changed_since_it_was_saved_is_not_committed(
    store: CheckpointStore,
) -> None:
    state = new_state(store, run_of(300))
    store.files.path(temporary_of(state)).write_bytes(b"shorter")
    with pytest.raises(StoreFault, match="changed"):
        await store.commit(*state)
    assert len(store) == len(store.index.all()) == 0 and names_in(store.files.directory) == set()


async def test_quarantine_hides_a_checkpoint_until_the_next_process(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        checkpoint = await store.commit(*new_state(store, run_of(300)))
        store.quarantine(checkpoint)
        assert found(store, run_of(400)) == []
    with opened(tmp_path) as store:
        assert len(found(store, run_of(400))) == 1


async def test_quarantine_for_good_outlives_the_process_and_makes_a_checkpoint_the_first_to_go(
    tmp_path: Path,
) -> None:
    quarantine = Quarantine("llama-server ended", 1000.0)
    with opened(tmp_path) as store:
        good, bad = [await store.commit(*new_state(store, run_of(n))) for n in (300, 600)]
        await store.change_on_disk(bad.id, quarantine=quarantine)
        assert [c.checkpoint.id for c in found(store, run_of(700))] == [good.id]
    with opened(tmp_path) as store:
        assert {c.id: c.quarantine for c in store} == {good.id: None, bad.id: quarantine}
        assert [c.checkpoint.id for c in found(store, run_of(700))] == [good.id]
    with opened(tmp_path, good.size_bytes + 1) as store:
        assert [c.id for c in store] == [good.id]


async def test_quarantine_for_good_outlives_a_score_that_an_eviction_found_before(
    tmp_path: Path,
) -> None:
    with opened(tmp_path) as store:
        made = [await store.commit(*new_state(store, run_of(n))) for n in (300, 600)]
        (victim,) = store.victims(1, Present(time.time()))
        (bad,) = [c for c in made if c.id != victim.id]
        await store.change_on_disk(bad.id, quarantine=Quarantine("llama-server ended", 1000.0))
    with opened(tmp_path) as store:
        assert [c.checkpoint.id for c in found(store, run_of(700))] == [victim.id]


async def test_put_value_survives_reopen_and_is_none_as_another_type(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        await store.put_value("rule", ["any prefix", 3])
    with opened(tmp_path) as store:
        assert store.index.value("rule", list[object]) == ["any prefix", 3]
        assert store.index.value("rule", dict[str, int]) is None
        assert store.index.value("absent", int) is None


# Using a checkpoint.


async def use(store: CheckpointStore, checkpoint: Checkpoint) -> None:
    async with store.using(checkpoint):
        pass


def change(path: Path, content: bytes) -> None:
    """Write into a file and keep its size, its inode and its times, as far as one can."""
    before = path.stat()
    assert len(content) == before.st_size
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def flipped(content: bytes, index: int) -> bytes:
    return content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :]


@pytest.mark.parametrize("index", [0, 7, 8, -2])
@pytest.mark.parametrize("is_reopened", [False, True], ids=["same process", "reopened"])
async def test_using_a_file_with_one_bit_flipped_is_refused_and_removes_it(
    tmp_path: Path, index: int, is_reopened: bool
) -> None:
    with opened(tmp_path) as store:
        checkpoint = await store.commit(*new_state(store, run_of(300)))
        path = store.files.path(checkpoint.file_name)
        if not is_reopened:
            change(path, flipped(path.read_bytes(), index))
            with pytest.raises(StateDamaged, match="1 of its parts"):
                await use(store, checkpoint)
            assert found(store, run_of(300)) == [] and names_in(tmp_path) == set()
    if is_reopened:
        change(path, flipped(path.read_bytes(), index))
        with opened(tmp_path) as store:
            [candidate] = found(store, run_of(300))
            with pytest.raises(StateDamaged):
                await use(store, candidate.checkpoint)
            assert store.index.all() == [] and names_in(tmp_path) == set()


async def test_using_a_file_that_is_replaced_by_a_copy_verifies_the_copy(
    store: CheckpointStore,
) -> None:
    checkpoint = await store.commit(*new_state(store, run_of(300)))
    path = store.files.path(checkpoint.file_name)
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.rename(path)
    await use(store, checkpoint)


async def test_using_a_file_that_changes_meanwhile_is_refused_afterwards(
    store: CheckpointStore,
) -> None:
    checkpoint = await store.commit(*new_state(store, run_of(300)))
    path = store.files.path(checkpoint.file_name)
    with pytest.raises(StoreFault, match="changed while it was restored"):
        async with store.using(checkpoint):
            change(path, flipped(path.read_bytes(), 20))


async def test_using_a_verified_file_reads_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as store:
        checkpoint = await store.commit(*new_state(store, run_of(300)))
        monkeypatch.setattr(StateFiles, "n_changed", None)
        await use(store, checkpoint)
        monkeypatch.undo()
    with opened(tmp_path) as store:
        await use(store, checkpoint)
        monkeypatch.setattr(StateFiles, "n_changed", None)
        await use(store, checkpoint)


async def test_disk_is_asked_for_a_file_beside_requests(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, lstat = await store.commit(*new_state(store, run_of(300))), Path.lstat

    def lstat_elsewhere(path: Path) -> os.stat_result:
        assert threading.current_thread() is not threading.main_thread(), "it may hang"
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", lstat_elsewhere)
    for _ in range(2):
        await use(store, checkpoint)


@pytest.mark.parametrize("n_parts", [1, 3, 4, 9, 40])
async def test_each_part_is_read_once_and_in_few_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_parts: int
) -> None:
    n_changed, runs = StateFiles.n_changed, list[tuple[int, int]]()

    def noted(
        files: StateFiles, name: str, offset: int, parts: Sequence[FilePart], **how: Any
    ) -> int:
        runs.append((offset, sum(part.n_bytes for part in parts)))
        return n_changed(files, name, offset, parts, **how)

    with opened(tmp_path) as store:
        _, tokens = new = new_state(store, run_of(300), content=bytes(range(100)) * n_parts)
        parts = store.files.parts(temporary_of(new), [100] * n_parts)
        checkpoint = await store.commit(replace(new[0], parts=parts), tokens)
    monkeypatch.setattr(StateFiles, "n_changed", noted)
    with opened(tmp_path) as store:
        await use(store, checkpoint)
    begins, sizes = zip(*sorted(runs), strict=True)
    assert [0, *accumulate(sizes)] == [*begins, checkpoint.size_bytes]
    assert len(runs) <= 4


@pytest.mark.parametrize("damaged", range(9))
async def test_damage_of_any_part_is_found(store: CheckpointStore, damaged: int) -> None:
    new, tokens = state = new_state(store, run_of(300), content=bytes(range(100)) * 9)
    parts = store.files.parts(temporary_of(state), [100] * 9)
    checkpoint = await store.commit(replace(new, parts=parts), tokens)
    path = store.files.path(checkpoint.file_name)
    path.write_bytes(flipped(path.read_bytes(), 100 * damaged + 50))
    with pytest.raises(StoreFault, match="1 of its parts"):
        await use(store, checkpoint)


async def test_close_stops_a_verification_in_mid_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_bytes, read, began, go_on = list[int](), os.preadv, threading.Event(), threading.Event()

    def slowly(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
        if flags:  # whether the page cache has it
            return read(descriptor, buffers, offset, *flags)
        began.set()
        go_on.wait()
        n_bytes.append(read(descriptor, buffers, offset))
        return n_bytes[-1]

    with opened(tmp_path, 1 << 30) as store:
        checkpoint = await store.commit(*new_state(store, run_of(300), content=bytes(64 << 20)))
    monkeypatch.setattr(os, "preadv", slowly)
    with opened(tmp_path, 1 << 30) as store:
        store.verify_soon(checkpoint)
        await asyncio.to_thread(began.wait)
        threads = store._verification._threads
        closing = threading.Thread(target=store._verification.close)
        closing.start()
        await until(lambda: threads._shutdown)
        go_on.set()
        closing.join()
    assert sum(n_bytes) <= 1 << 20
    with opened(tmp_path, 1 << 30) as store:
        await use(store, checkpoint)


async def test_file_that_cannot_be_read_is_offered_no_more_and_kept(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    checkpoint = await store.commit(*new_state(store, run_of(300)))
    os.utime(store.files.path(checkpoint.file_name))
    monkeypatch.setattr(StateFiles, "n_changed", fail)
    with pytest.raises(StoreFault, match="Input/output error"):
        await use(store, checkpoint)
    assert found(store, run_of(300)) == []
    assert names_in(store.files.directory) == {checkpoint.file_name}


async def test_file_that_could_not_be_read_is_used_again_once_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network disk that was away, or in a process that had no file descriptor left."""

    def fail(*_: object, **__: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with opened(tmp_path, 1000) as store:
        checkpoint = await store.commit(*new_state(store, run_of(100)))
        other = await store.commit(*new_state(store, run_of(100, 900), last_used_at=1.0))
        os.utime(store.files.path(checkpoint.file_name))
        with monkeypatch.context() as away:
            away.setattr(StateFiles, "n_changed", fail)
            with pytest.raises(StoreFault, match="Input/output error"):
                await use(store, checkpoint)
        assert store.victims(100, Present(time.time())) == [other]
        monkeypatch.setattr(time, "monotonic", lambda: store._unread_until[checkpoint.id])
        assert [c.checkpoint.id for c in found(store, run_of(100))] == [checkpoint.id]
        await use(store, checkpoint)


async def test_state_in_a_directory_that_is_away_is_not_removed(tmp_path: Path) -> None:
    """Its file would be removed at the next start, once the directory is back."""
    directory, away = tmp_path / "states", tmp_path / "away"
    directory.mkdir()
    with opened(directory) as store:
        checkpoint = await store.commit(*new_state(store, run_of(300)))
    with opened(directory) as store:
        await store.put_value("written", True)
        directory.rename(away)
        with pytest.raises(StoreFault, match="No such file"):
            await store.verify(checkpoint)
        away.rename(directory)
    with opened(directory) as store:
        await use(store, checkpoint)


async def test_disk_that_is_unmounted_and_mounted_again_loses_nothing(
    tmp_path: Path, disk: Path
) -> None:
    """An empty directory is seen at its place meanwhile, on a disk that may be full."""
    place, below, other = tmp_path / "place", tmp_path / "below", run_of(400, start=5000)
    below.mkdir()
    mount(disk, place)
    with opened(place) as store:
        checkpoint = await store.commit(*new_state(store, run_of(300)))
    with opened(place) as store:
        mount(below, place)
        state = new_state(store, other)
        for refused in (
            store.verify(checkpoint),
            store.reserve(Claim(100, Present(0.0))),
            store.commit(*state),
            store.pin(checkpoint.id, is_pinned=True),
        ):
            with pytest.raises(StoreFault):
                await refused
        assert [path.name for path in below.iterdir()] == [temporary_of(state)]
        mount(disk, place)
        await store.commit(*new_state(store, other))
    with opened(place) as store:
        assert len(store) == 2
        await use(store, checkpoint)


async def test_disk_that_is_mounted_after_the_start_keeps_its_secret(
    tmp_path: Path, disk: Path
) -> None:
    place, below = tmp_path / "place", tmp_path / "below"
    below.mkdir()
    with opened(disk) as store:
        secret = store.secret
    mount(below, place)
    with opened(place) as store:
        mount(disk, place)
        with pytest.raises(StoreFault, match="restart the proxy"):
            await store.commit(*new_state(store, run_of(300)))
    with opened(disk) as store:
        assert store.secret == secret


async def test_damaged_file_takes_what_may_stem_from_it_along(store: CheckpointStore) -> None:
    damaged: list[tuple[Checkpoint, list[Checkpoint]]] = []
    store.on_damage = lambda checkpoint, stemming: damaged.append((checkpoint, stemming))
    first = await store.commit(*new_state(store, run_of(300)))
    second = await store.commit(*new_state(store, run_of(400), ancestors=store.lineage(first)))
    third = await store.commit(*new_state(store, run_of(500), ancestors=store.lineage(second)))
    assert third.ancestors == (first.id, second.id)
    other = await store.commit(*new_state(store, run_of(600)))
    change(store.files.path(second.file_name), bytes(second.size_bytes))
    with pytest.raises(StateDamaged):
        await store.verify(second)
    assert damaged == [(second, [third])]
    assert {c.id for c in store} == {first.id, other.id}
    with pytest.raises(StoreFault, match="is damaged"):
        await store.commit(*new_state(store, run_of(700), ancestors=(second.id,)))
    assert store.lineage(third) == (first.id, third.id)


async def test_state_goes_whose_ancestor_is_found_damaged_during_its_commit(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    seals, may_go_on, seal = threading.Event(), threading.Event(), StateFiles.seal

    def seal_late(files: StateFiles, final: str) -> FileStamp:
        seals.set()
        may_go_on.wait()
        return seal(files, final)

    first = await store.commit(*new_state(store, run_of(300)))
    change(store.files.path(first.file_name), bytes(first.size_bytes))
    second = new_state(store, run_of(400), ancestors=store.lineage(first))
    monkeypatch.setattr(StateFiles, "seal", seal_late)
    committing = asyncio.ensure_future(store.commit(*second))
    await until(seals.is_set)
    verifying = asyncio.ensure_future(store.verify(first))
    await until(lambda: store.is_quarantined(first))
    may_go_on.set()
    with pytest.raises(StoreFault, match="is damaged"):
        await committing
    with pytest.raises(StateDamaged):
        await verifying
    assert (list(store), names_in(store.files.directory)) == ([], set())


async def test_damaged_file_that_cannot_be_removed_is_offered_no_more(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StoreFault("full")

    checkpoint = await store.commit(*new_state(store, run_of(300)))
    change(store.files.path(checkpoint.file_name), bytes(checkpoint.size_bytes))
    monkeypatch.setattr(Index, "delete", fail)
    with pytest.raises(StoreFault, match="full"):
        await use(store, checkpoint)
    assert found(store, run_of(300)) == []


async def test_background_verifies_each_state_once_though_nothing_is_committed_meanwhile(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_VERIFY_LOOK_SECONDS", 0.0)
    states = [new_state(store, run_of(100, start=n), verified_at=0.0) for n in (0, 1000, 2000)]
    committed = [await store.commit(*state) for state in states]
    verify, look = store.verify_again, store.index.verified_before
    verified, looks = list[CheckpointId](), list[list[CheckpointId]]()

    async def note(found: Checkpoint, **how: Any) -> None:
        verified.append(found.id)
        await verify(found, **how)

    def note_look(time: float) -> list[CheckpointId]:
        looks.append([*look(time)])
        return looks[-1]

    monkeypatch.setattr(store, "verify_again", note)
    monkeypatch.setattr(store.index, "verified_before", note_look)
    shared: Any = SimpleNamespace(opened_store=store, store=store)
    verifying = asyncio.ensure_future(background.verify_stored(shared))
    await until(lambda: len(looks) > 3)
    verifying.cancel()
    assert looks[-1], "the index does not know it yet"
    assert sorted(verified) == sorted(checkpoint.id for checkpoint in committed)


async def test_eviction_of_a_state_that_is_being_verified_is_no_fault(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_VERIFY_LOOK_SECONDS", 0.0)
    pause, passed = asyncio.Event(), asyncio.Event()

    async def sleep(_: float) -> None:
        passed.set()
        await pause.wait()

    faults = Faults(Metrics())
    monkeypatch.setattr(faults, "record", lambda _, fault: pytest.fail(str(fault)))
    checkpoint = await store.commit(*new_state(store, run_of(100), verified_at=0.0))
    monkeypatch.setattr(files, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": sleep}))
    shared: Any = SimpleNamespace(opened_store=store, store=store, faults=faults)
    verifying = asyncio.ensure_future(background.verify_stored(shared))
    await passed.wait()
    await store.remove(checkpoint, Removal.BUDGET)
    pause.set()
    await until(lambda: verifying.done() or checkpoint.id in store._unread_until)
    await asyncio.sleep(0.01)
    assert not verifying.done()
    verifying.cancel()


async def test_state_that_was_read_just_when_the_time_was_up_is_used_again(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = await store.commit(*new_state(store, run_of(300)))
    store._verification.verified.clear()

    async def read(*_: Any, **__: Any) -> None:
        time.sleep(0.05)  # noqa: ASYNC251 - the loop stands still

    monkeypatch.setattr(store._verification, "verify", read)
    with pytest.raises(StoreFault, match="was not read in"):
        await store.verify(checkpoint, most_seconds=0.01)
    assert list(store.find(checkpoint.namespace, run_of(300)))


async def test_what_was_saved_before_an_ancestor_was_last_verified_stays(
    store: CheckpointStore,
) -> None:
    first = await store.commit(*new_state(store, run_of(300)))
    second = await store.commit(*new_state(store, run_of(400), ancestors=(first.id,)))
    await store.verify_again(first, bytes_per_second=1e9)
    change(store.files.path(first.file_name), bytes(first.size_bytes))
    with pytest.raises(StateDamaged):
        await store.verify(first)
    assert [c.id for c in store] == [second.id]


async def test_record_of_an_older_version_is_verified_by_its_checksum(tmp_path: Path) -> None:
    """Format 1 as 0.1.0 wrote it: a checksum of the whole file, and inode and time of the file."""
    with opened(tmp_path) as store:
        checkpoint = await store.commit(*new_state(store, run_of(300)))
        path = store.files.path(checkpoint.file_name)
        old = msgspec.to_builtins(checkpoint, builtin_types=(bytes,))
        for name in ("parts", "verified_at", "ancestors"):
            del old[name]
        old |= {
            "file_stamp": (path.stat().st_ino, path.stat().st_mtime_ns),
            "checksum": xxhash.xxh3_128_hexdigest(path.read_bytes()),
        }
        with store.index._env.begin(write=True, db=store.index._checkpoints) as transaction:
            transaction.put(checkpoint.id.to_bytes(8), msgspec.msgpack.encode(old))
    with opened(tmp_path) as store:
        [candidate] = found(store, run_of(400))
        await use(store, candidate.checkpoint)
    change(path, flipped(path.read_bytes(), 100))
    with opened(tmp_path) as store:
        with pytest.raises(StateDamaged):
            await use(store, candidate.checkpoint)


async def test_using_a_missing_file_is_refused(store: CheckpointStore) -> None:
    checkpoint = await store.commit(*new_state(store, run_of(300)))
    store.files.path(checkpoint.file_name).unlink()
    with pytest.raises(StoreFault):
        await use(store, checkpoint)
    assert len(store) == 0


async def test_using_a_checkpoint_marks_it_used_for_good(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        checkpoint = await store.commit(*new_state(store, run_of(300)))
        async with store.using(checkpoint):
            pass
        [used] = store
    with opened(tmp_path) as store:
        assert [c.last_used_at for c in store] == [used.last_used_at]
        assert used.last_used_at > checkpoint.last_used_at


async def test_using_a_checkpoint_keeps_it_from_removal_until_the_last_user_left(
    store: CheckpointStore,
) -> None:
    checkpoint = await store.commit(*new_state(store, run_of(300)))
    async with store.using(checkpoint):
        async with store.using(checkpoint):
            pass
        await store.remove(checkpoint, Removal.BUDGET)
        assert len(store) == 1
    await store.remove(checkpoint, Removal.BUDGET)
    assert len(store) == 0


# Opening.


async def test_open_of_a_copied_directory_serves_it(tmp_path: Path) -> None:
    original, copy = tmp_path / "original", tmp_path / "copy"
    original.mkdir()
    with opened(original) as store:
        checkpoint = await store.commit(*new_state(store, run_of(300)))
    shutil.copytree(original, copy, copy_function=shutil.copyfile)
    for _ in range(2):
        with opened(copy) as store:
            [candidate] = found(store, run_of(400))
            assert candidate.checkpoint.id == checkpoint.id
            async with store.using(candidate.checkpoint):
                pass


async def test_file_of_other_content_is_dropped_before_it_is_used(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        checkpoint = await store.commit(*new_state(store, run_of(300)))
        path = store.files.path(checkpoint.file_name)
    path.write_bytes(b"something else")
    with opened(tmp_path) as store:
        with pytest.raises(StateDamaged, match="14 bytes instead of"):
            await store.verify(checkpoint)
        assert found(store, run_of(400)) == []
        assert store.index.all() == [] and store.index.tokens(checkpoint.id) is None
        assert names_in(tmp_path) == set()


async def test_open_removes_entries_without_file_and_files_without_entry(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        kept = await store.commit(*new_state(store, run_of(300)))
        lost = await store.commit(*new_state(store, run_of(600)))
        temporary = temporary_of(new_state(store, run_of(900)))
    (tmp_path / lost.file_name).unlink()
    (tmp_path / "lpc-0123456789abcdef.state").write_bytes(b"orphan")
    assert (tmp_path / temporary).exists()
    with opened(tmp_path) as store:
        report = store.report
        assert names_in(tmp_path) == {kept.file_name}
        assert (report["n_checkpoints"], report["n_entries_without_file"]) == (1, 1)
        assert report["n_files_without_entry"] == 2
        assert len(found(store, run_of(900))) == 1


async def test_directories_and_links_with_names_of_ours_are_left_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        kept = await store.commit(*new_state(store, run_of(300)))
    names = [f"lpc-000000000000000{n}.{end}" for n, end in enumerate(("state", "saving", "meta"))]
    for name in names:
        (tmp_path / name).mkdir()
    (link := tmp_path / "lpc-0000000000000009.state").symlink_to(tmp_path / kept.file_name)
    with opened(tmp_path) as store:
        assert [c.checkpoint.id for c in found(store, run_of(300))] == [kept.id]
    assert link.is_symlink() and all((tmp_path / name).is_dir() for name in names)
    with open_offline(tmp_path) as offline:
        assert {problem.name for problem in examine(offline, lambda _: None)} <= {kept.file_name}


async def test_state_that_was_replaced_by_a_link_is_never_used(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (directory := tmp_path / "store").mkdir()
    with opened(directory) as store:
        checkpoint = await store.commit(*new_state(store, run_of(300)))
        path = store.files.path(checkpoint.file_name)
        path.rename(elsewhere)
        path.symlink_to(elsewhere)
        with pytest.raises(StateDamaged, match="is no regular file"):
            async with store.using(checkpoint):
                pass
        assert found(store, run_of(300)) == []
        other = await store.commit(*new_state(store, run_of(400, start=7)))
        other_path = store.files.path(other.file_name)
    other_path.rename(other_path.with_suffix(".moved"))
    other_path.symlink_to(other_path.with_suffix(".moved"))
    with opened(directory) as store:
        assert found(store, run_of(400, start=7)) == []
    assert path.is_symlink() and other_path.is_symlink() and elsewhere.exists()


def test_second_opener_is_locked_out_and_changes_nothing(store: CheckpointStore) -> None:
    temporary = temporary_of(new_state(store, run_of(300)))
    with pytest.raises(StoreLocked, match="another llama-prefix-cache uses"):
        CheckpointStore(store.files.directory, BUDGET)
    assert temporary in names_in(store.files.directory)


async def test_directory_that_was_deleted_and_made_anew_is_locked_again(tmp_path: Path) -> None:
    directory = tmp_path / "slots"
    directory.mkdir()
    with opened(directory) as store:
        secret = store.secret
        for n_tokens in (300, 400):
            shutil.rmtree(directory)
            directory.mkdir()
            with opened(directory), pytest.raises(StoreLocked):
                await store.commit(*new_state(store, run_of(n_tokens)))
            shutil.rmtree(directory)
            directory.mkdir()
            await store.commit(*new_state(store, run_of(n_tokens)))
            with pytest.raises(StoreLocked), opened(directory):
                pass
    with opened(directory) as store:
        assert store.secret == secret


def test_opener_after_close_is_let_in(tmp_path: Path) -> None:
    for _ in range(3):
        with opened(tmp_path):
            pass


async def test_foreign_files_in_the_directory_are_untouched(tmp_path: Path) -> None:
    foreign = [
        "slot0.bin",
        "lpc-notours.state",
        "lpc-0123456789abcdef.state.bak",
        "lpc-0123456789ABCDEF.state",
        "lpc-0123456789abcdef.saving2",
    ]
    for name in foreign:
        (tmp_path / name).write_bytes(b"keep me")
    (tmp_path / "folder").mkdir()
    with opened(tmp_path) as store:
        await store.commit(*new_state(store, run_of(300)))
    with opened(tmp_path, 1) as store:
        assert len(store) == 0
    assert all((tmp_path / name).read_bytes() == b"keep me" for name in foreign)
    assert (tmp_path / "folder").is_dir()


def test_open_with_an_index_that_is_a_file_raises_store_fault(tmp_path: Path) -> None:
    (tmp_path / "index").write_bytes(b"")
    with pytest.raises(StoreFault):
        CheckpointStore(tmp_path, BUDGET)


async def test_open_with_another_format_version_raises_store_fault(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        checkpoint = await store.commit(*new_state(store, run_of(300)))
        await store.put_value("format", 999)
    with pytest.raises(StoreFault, match="format 999"):
        CheckpointStore(tmp_path, BUDGET)
    assert names_in(tmp_path) == {checkpoint.file_name}


def test_open_where_an_orphan_cannot_be_removed_still_opens_or_raises_store_fault(
    tmp_path: Path,
) -> None:
    (tmp_path / "lpc-0123456789abcdef.state").mkdir()
    try:
        with opened(tmp_path):
            pass
    except StoreFault:
        pass
    (tmp_path / "lpc-0123456789abcdef.state").rmdir()
    with opened(tmp_path):
        pass


def test_open_of_a_missing_directory_raises_store_fault(tmp_path: Path) -> None:
    with pytest.raises(StoreFault):
        CheckpointStore(tmp_path / "gone", BUDGET)


# Who may read it.


async def test_files_are_readable_by_their_owner_only(store: CheckpointStore) -> None:
    checkpoint = await store.commit(*new_state(store, run_of(300)))
    directory = store.files.directory
    names = [checkpoint.file_name, "index/data.mdb", "index/lock.mdb", ".llama-prefix-cache.lock"]
    assert [stat.S_IMODE((directory / name).stat().st_mode) for name in names] == [0o600] * 4
    assert stat.S_IMODE((directory / "index").stat().st_mode) == 0o700


def test_file_in_a_directory_shared_by_a_group_is_readable_by_the_group(tmp_path: Path) -> None:
    tmp_path.chmod(0o2770)
    with opened(tmp_path) as store:
        checkpoint = asyncio.run(store.commit(*new_state(store, run_of(300))))
        mode = store.files.path(checkpoint.file_name).stat().st_mode
    assert stat.S_IMODE(mode) == 0o660


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "slot0.bin", "", "lpc-0123456789abcdef.state\n"]
)
def test_path_of_a_name_that_is_not_ours_raises_store_fault(
    store: CheckpointStore, name: str
) -> None:
    with pytest.raises(StoreFault):
        store.files.path(name)


# Callers that go away.


def hold_writer(store: CheckpointStore) -> threading.Event:
    """Keep the store's writer thread busy until the returned event is set."""
    event = threading.Event()
    store._writer.submit(event.wait)
    return event


async def settled(store: CheckpointStore) -> tuple[set[CheckpointId], set[CheckpointId], set[str]]:
    """Return the ids in memory and in the index, and the files, once nothing is pending."""
    await store.put_value("settled", True)
    await asyncio.sleep(0)
    in_index = {checkpoint.id for checkpoint in store.index.all()}
    return {checkpoint.id for checkpoint in store}, in_index, names_in(store.files.directory)


async def test_commit_whose_caller_is_cancelled_is_whole_or_not_at_all(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()
    seal = store.files.seal

    def slow_seal(final: str) -> object:
        began.set()
        go_on.wait()
        return seal(final)

    monkeypatch.setattr(store.files, "seal", slow_seal)
    task = asyncio.get_running_loop().create_task(store.commit(*new_state(store, run_of(300))))
    await asyncio.to_thread(began.wait)
    task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait([task])
    in_memory, in_index, names = await settled(store)
    assert in_memory == in_index
    assert len(names) == len(in_index)


async def test_remove_whose_caller_is_cancelled_is_whole_or_not_at_all(
    store: CheckpointStore,
) -> None:
    checkpoint = await store.commit(*new_state(store, run_of(300)))
    go_on = hold_writer(store)
    task = asyncio.get_running_loop().create_task(store.remove(checkpoint, Removal.BUDGET))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait([task])
    in_memory, in_index, names = await settled(store)
    assert in_memory == in_index
    assert len(names) == len(in_index)


async def test_index_reaching_many_hashes_lists_each_checkpoint_once(
    store: CheckpointStore,
) -> None:
    checkpoint = await store.commit(*new_state(store, run_of(128 * 20)))
    assert isinstance(store.index, Index)
    assert [c.checkpoint.id for c in store.find(NAMESPACE, run_of(128 * 30))] == [checkpoint.id]
