"""A damaged index is found before LMDB maps it, and made anew from the states."""

import asyncio
import os
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import lmdb
import msgspec
import pytest
from click.testing import CliRunner, Result

from proxy.__main__ import main
from proxy.core.eviction import Removal
from proxy.core.model import (
    Checkpoint,
    CheckpointId,
    CheckpointKind,
    KnownNamespace,
    tenant_namespace,
)
from proxy.core.tokens import Namespace, TokenIds, hash_prefixes, token_ids
from proxy.doctor.examination import read_index
from proxy.errors import IndexDamaged, StoreFault
from proxy.store import directory as store_directory
from proxy.store import index as store_index
from proxy.store.files import seal, seal_of
from proxy.store.index import Index, sound_file
from proxy.store.known_models import Owner, introduce, namespaces_name, owners, tenants_name
from proxy.store.offline import ProblemKind, examine, open_offline
from proxy.store.store import CheckpointStore
from tests.lab.power_cuts import copy_forked
from tests.store.conftest import branch, found, names_in, new_state, opened, run_of
from tests.store.damage import (
    flipped,
    leave_unsealed,
    put_bad_record,
    put_bad_summary,
    put_unreadable,
    scribbled,
    truncated,
)
from tests.unit.state_files import attention, state_file, words

MODEL = Namespace(b"m" * 16)
TENANTS = (b"", b"tenant")
PROMPTS = (run_of(300), branch(200, 400), run_of(1500, start=7), run_of(2500, start=9))


def nothing(n_bytes: int) -> None:
    """Ignore progress."""


async def fill(directory: Path) -> None:
    """Leave a store with states of two tenants, one of them pinned, that was closed."""
    with opened(directory) as store:
        await store.put_value(
            namespaces_name("static"), [KnownNamespace(MODEL, [(5, -0.5)], "coder")]
        )
        await store.put_value(tenants_name(MODEL), sorted(TENANTS))
        for i, tokens in enumerate(PROMPTS):
            content = state_file(words(tokens), attention(len(tokens)))
            namespace = tenant_namespace(MODEL, TENANTS[i % 2])
            new = new_state(
                store, tokens, content=content, namespace=namespace, kind=CheckpointKind.TURN_START
            )
            checkpoint = await store.commit(*new)
        gone = await store.commit(*new_state(store, run_of(20_000)))
        await store.remove(gone, Removal.BUDGET)
        await store.pin(checkpoint.id, is_pinned=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    asyncio.run(fill(directory))
    return directory


@pytest.fixture
def directory(whole: Path, tmp_path: Path) -> Path:
    return copied(whole, tmp_path / "store")


def copied(whole: Path, directory: Path) -> Path:
    """Return a copy whose state files are the same ones, so that they are believed."""
    shutil.copytree(whole, directory, copy_function=os.link)
    data = directory / "index" / "data.mdb"
    content = data.read_bytes()
    data.unlink()
    data.write_bytes(content)
    return directory


def data_of(directory: Path) -> bytes:
    return (directory / "index" / "data.mdb").read_bytes()


def beside(directory: Path, pattern: str) -> list[Path]:
    return sorted(directory.glob(pattern))


def set_data(directory: Path, content: bytes) -> None:
    (directory / "index" / "data.mdb").write_bytes(content)


def told(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what a rebuild must bring back of a checkpoint; namespaces may have other names."""
    kept = ("id", "kind", "n_tokens", "file_name", "size_bytes", "parts", "is_pinned", "marks")
    return {name: getattr(checkpoint, name) for name in kept}


def records(directory: Path) -> dict[CheckpointId, dict[str, Any]]:
    with opened(directory) as store:
        return {checkpoint.id: told(checkpoint) for checkpoint in store}


async def rebuilt(directory: Path) -> dict[CheckpointId, dict[str, Any]]:
    """Open a store, use it, and return what it has."""
    with opened(directory) as store:
        extra = await store.commit(*new_state(store, run_of(700, start=3)))
        await store.remove(extra, Removal.BUDGET)
        of_model = {o.known.name for _, o in owners(store.index)}
        assert not len(store) or of_model == {"coder"}
        for checkpoint in store:
            tokens = store.index.tokens(checkpoint.id)
            assert tokens is not None
            assert checkpoint in [c.checkpoint for c in found(store, tokens, checkpoint.namespace)]
        return {checkpoint.id: told(checkpoint) for checkpoint in store}


# What is damaged is found, and what is not is not.


@pytest.mark.parametrize("is_sealed", [True, False], ids=["closed", "killed"])
async def test_truncated_index_is_made_anew_and_loses_nothing(
    whole: Path, tmp_path: Path, is_sealed: bool
) -> None:
    expected = records(whole)
    for number, (_, data) in enumerate([*truncated(data_of(whole))][::3]):
        directory = copied(whole, tmp_path / str(number))
        set_data(directory, data)
        if not is_sealed:
            leave_unsealed(directory)
        assert await rebuilt(directory) == expected


async def test_flipped_bit_in_a_closed_index_is_found_wherever_it_is(
    whole: Path, tmp_path: Path
) -> None:
    expected, data = records(whole), data_of(whole)
    for number, (what, changed) in enumerate(
        [*flipped(data, 10, seed=1), *scribbled(data, 5, seed=1)]
    ):
        directory = copied(whole, tmp_path / str(number))
        set_data(directory, changed)
        with open_offline(directory, mends_index=True) as store:
            examined = examine(store, nothing)
            assert {p.kind for p in examined} <= {ProblemKind.INDEX_DAMAGED}, what
        assert await rebuilt(directory) == expected, what


async def test_flipped_bits_in_an_index_that_was_not_closed_end_no_process(
    whole: Path, tmp_path: Path
) -> None:
    directories = []
    for number, (_, changed) in enumerate(flipped(data_of(whole), 40, seed=2)):
        set_data(directory := copied(whole, tmp_path / str(number)), changed)
        leave_unsealed(directory)
        directories.append(str(directory))
    done = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WORK, *directories, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await done.communicate()
    assert (done.returncode, output.decode().split()) == (0, directories)


WORK = """
import asyncio, sys
from pathlib import Path
from proxy.core.eviction import Removal
from proxy.store import index
from tests.lab.power_cuts import copy_forked
from tests.store.conftest import new_state, opened, run_of
async def work(directory):
    with opened(directory) as store:
        for checkpoint in [*store]:
            await store.remove(checkpoint, Removal.OPERATOR)
        for n in (300, 3000):
            await store.commit(*new_state(store, run_of(n)))
for number, directory in enumerate(sys.argv[1:]):
    if number == 10:  # a fork copies in the same way, and sooner
        index._copy_apart = copy_forked
    asyncio.run(work(Path(directory)))
    print(directory, flush=True)
"""


def test_copy_that_cannot_be_written_is_no_damage(directory: Path) -> None:
    """A full disk must not have an index thrown away."""
    leave_unsealed(directory)
    before = data_of(directory)
    with pytest.raises(StoreFault, match="cannot be copied") as raised:
        sound_file(directory / "index", directory / "missing" / "copy")
    assert not isinstance(raised.value, IndexDamaged)
    assert data_of(directory) == before


def test_copy_that_finds_no_room_takes_none(directory: Path) -> None:
    leave_unsealed(directory)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16384, limit[1]))
    try:
        with pytest.raises(StoreFault, match="cannot be copied"):
            sound_file(directory / "index", directory / "copy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not (directory / "copy").exists()


def test_state_that_was_being_saved_makes_room_before_the_index_is_opened(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill -9 on a full disk there may be no other room for the copy of the index."""
    half, open_index = directory / "lpc-00000000000000aa.saving", store_directory._open_index

    def open_with_room(path: Path, **options: bool) -> Index:
        assert not half.exists()
        return open_index(path, **options)

    half.write_bytes(b"half of a state")
    monkeypatch.setattr(store_directory, "_open_index", open_with_room)
    with opened(directory) as store:
        assert store.report["n_files_without_entry"] == 1


async def test_index_without_a_file_is_made_anew(directory: Path) -> None:
    expected = records(directory)
    shutil.rmtree(directory / "index")
    assert await rebuilt(directory) == expected


async def commit_another(store: CheckpointStore) -> Checkpoint:
    tokens = run_of(900, start=5)
    content = state_file(words(tokens), attention(len(tokens)))
    namespace = tenant_namespace(MODEL, b"")
    return await store.commit(*new_state(store, tokens, content=content, namespace=namespace))


async def test_older_index_put_in_place_loses_no_newer_state(
    directory: Path, tmp_path: Path
) -> None:
    shutil.copytree(directory / "index", tmp_path / "older")
    with opened(directory) as store:
        gone = next(iter(store))
        await store.remove(gone, Removal.OPERATOR)
        await commit_another(store)
    expected = records(directory)
    shutil.rmtree(directory / "index")
    (tmp_path / "older").rename(directory / "index")
    with open_offline(directory) as store:
        [problem] = examine(store, nothing)
    assert (problem.kind, problem.name) == (ProblemKind.FILE_GONE, gone.file_name)
    assert gone.id not in expected and await rebuilt(directory) == expected


async def test_state_that_cannot_be_entered_is_told_and_only_removed_to_mend(
    directory: Path, tmp_path: Path
) -> None:
    shutil.copytree(directory / "index", tmp_path / "older")
    with opened(directory) as store:
        cut = directory / (await commit_another(store)).file_name
    shutil.rmtree(directory / "index")
    (tmp_path / "older").rename(directory / "index")
    content = cut.read_bytes()
    cut.unlink()
    cut.write_bytes(content[:-9])
    with pytest.raises(IndexDamaged, match="lost: 1 .a state is not what"), open_offline(directory):
        pass
    assert cut.exists()
    with open_offline(directory, mends_index=True) as store:
        [lost] = examine(store, nothing)
    assert (lost.kind, lost.name) == (ProblemKind.STATE_LOST, cut.name)
    assert not cut.exists()


async def test_directory_that_comes_back_after_another_had_its_place_loses_no_state(
    directory: Path, tmp_path: Path
) -> None:
    expected, away = records(directory), tmp_path / "away"
    with opened(directory) as store:
        await store.put_value("written", True)
        shutil.move(directory, away)
        os.mkdir(directory)
        for checkpoint in list(store):
            with pytest.raises(StoreFault, match="No such file"):
                await store.verify(checkpoint)
        shutil.rmtree(directory)
        away.rename(directory)
    assert records(directory) == expected


async def test_record_that_cannot_be_read_loses_none(directory: Path) -> None:
    expected = records(directory)
    put_bad_record(directory)
    with pytest.raises(IndexDamaged, match="records that cannot be read: 1"):
        with open_offline(directory):
            pass
    leave_unsealed(directory)
    assert await rebuilt(directory) == expected
    assert not beside(directory, "index.damaged-*"), "what could be read stays"


@pytest.mark.parametrize("offset", [0, 12, 18, 27], ids=["score", "verified", "size", "blocks"])
async def test_summary_of_another_record_evicts_and_hides_nothing(
    directory: Path, offset: int
) -> None:
    expected = records(directory)
    put_bad_summary(directory, offset)
    leave_unsealed(directory)
    assert await rebuilt(directory) == expected


async def test_values_that_are_no_text_are_ignored(directory: Path) -> None:
    expected = records(directory)
    put_unreadable(directory)
    assert records(directory) == expected
    assert len(read_index(directory)[0]) == len(expected)
    with open_offline(directory) as store:
        assert examine(store, nothing) == []


def test_sound_index_is_never_called_damaged(tmp_path: Path) -> None:
    index, ids = Index(tmp_path / "index"), list[int]()
    for turn in range(60):
        tokens = token_ids(range(turn % 7, turn % 7 + (turn * 331) % 9000))
        record = record_of(turn + 1, len(tokens))
        index.put((record, tokens, hash_prefixes(record.namespace, tokens)))
        ids.append(turn + 1)
        if turn % 3 == 2:
            gone = CheckpointId(ids.pop((turn * 7) % len(ids)))
            lost = index.tokens(gone)
            assert lost is not None
            index.delete(gone, hash_prefixes(record.namespace, lost))
        assert index.inconsistency() == ""
    index.close()
    expected = contents(tmp_path)
    leave_unsealed(tmp_path)
    assert sound_file(tmp_path / "index", tmp_path / "copy") == tmp_path / "copy"
    assert contents(tmp_path) == expected, "an index that was not closed is the same"
    assert seal_of(tmp_path / "index" / "data.mdb").exists()


def contents(directory: Path) -> list[tuple[Checkpoint, TokenIds | None]]:
    """Return what an index holds, all of which must fit together."""
    index = Index(directory / "index")
    try:
        assert index.inconsistency() == ""
        return [(record, index.tokens(record.id)) for record in index.all()]
    finally:
        index.close()


def record_of(number: int, n_tokens: int) -> Checkpoint:
    return Checkpoint(
        *(CheckpointId(number), MODEL, CheckpointKind.BRANCH, n_tokens, (), False),
        *(f"lpc-{number:016x}.state", 1, 0.0, 0.0),
    )


# What a rebuild says and does.


async def test_state_whose_record_is_gone_or_damaged_is_told_and_removed(directory: Path) -> None:
    first, second, *_ = beside(directory, "lpc-*.meta")
    first.unlink()
    damaged = bytearray(second.read_bytes())
    damaged[30] ^= 1
    second.unlink()
    second.write_bytes(damaged)
    set_data(directory, b"garbage" * 9000)
    with opened(directory) as store:
        told = str(store.report["index_made_anew"])
        assert "2 entered again; lost: 2 (the record beside a state is gone" in told
        assert names_in(directory) == {c.file_name for c in store}
        assert len(beside(directory, "lpc-*.meta")) == len(store) == 2


async def test_state_that_was_cut_or_of_an_unknown_model_is_told_and_removed(
    directory: Path,
) -> None:
    cut, *_ = beside(directory, "lpc-*.state")
    content = cut.read_bytes()
    with opened(directory) as store:
        unknown = await store.commit(*new_state(store, run_of(100)))
    cut.unlink()
    cut.write_bytes(content[:-9])
    set_data(directory, b"")
    with open_offline(directory, mends_index=True) as store:
        index, *lost = examine(store, nothing)
        assert (index.kind, index.detail) == (ProblemKind.INDEX_DAMAGED, "it was not there")
        assert {(p.kind, p.name, p.detail) for p in lost} == {
            (ProblemKind.STATE_LOST, cut.name, "a state is not what its record says"),
            (
                ProblemKind.STATE_LOST,
                unknown.file_name,
                "it is not known which model a state is of",
            ),
        }
        assert len(store.index.all()) == len(names_in(directory)) == 3


async def test_rebuild_that_was_broken_off_is_taken_up(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StoreFault("full")

    expected = records(directory)
    set_data(directory, b"garbage" * 9000)
    with monkeypatch.context() as patched, pytest.raises(StoreFault, match="full"):
        patched.setattr(Index, "_put_record", fail)
        with opened(directory):
            pass
    with open_offline(directory) as store:
        assert (examine(store, nothing), len(store.index.all())) == ([], len(expected))
    assert await rebuilt(directory) == expected


async def test_index_of_another_format_is_made_anew_once_it_is_deleted(directory: Path) -> None:
    expected = records(directory)
    index = Index(directory / "index")
    index.put_value("format", 99)
    index.close()
    with pytest.raises(StoreFault, match="delete index/"), opened(directory):
        pass
    shutil.rmtree(directory / "index")
    assert await rebuilt(directory) == expected


async def test_index_of_an_older_format_is_made_anew(directory: Path) -> None:
    expected = records(directory)
    index = Index(directory / "index")
    index.put_value("format", 1)
    index.close()
    assert await rebuilt(directory) == expected


@pytest.mark.parametrize("found", [1, 99])
def test_index_of_another_format_that_lacks_databases_is_left_as_it_is(
    tmp_path: Path, found: int
) -> None:
    path = tmp_path / "index"
    path.mkdir()
    with lmdb.open(str(path), max_dbs=1) as env:
        with env.begin(db=env.open_db(b"values"), write=True) as transaction:
            transaction.put(b"format", msgspec.msgpack.encode(found))
    seal(path / "data.mdb")
    before = (path / "data.mdb").read_bytes()
    with pytest.raises((IndexDamaged, StoreFault), match=f"format {found}"):
        Index(path)
    assert (path / "data.mdb").read_bytes() == before


async def test_only_the_newest_damaged_index_is_kept(directory: Path) -> None:
    for _ in range(2):
        set_data(directory, b"garbage" * 9000)
        await rebuilt(directory)
    [kept] = beside(directory, "index.damaged-*")
    assert (kept / "data.mdb").read_bytes() == b"garbage" * 9000


async def test_states_of_an_older_version_get_their_records(directory: Path) -> None:
    expected = records(directory)
    for path in beside(directory, "lpc-*.meta"):
        path.unlink()
    with open_offline(directory) as offline:
        problems = examine(offline, nothing)
        assert {p.kind for p in problems} == {ProblemKind.RECORD_GONE}
    assert records(directory) == expected
    set_data(directory, b"")
    assert await rebuilt(directory) == expected


# Commands.


def command(directory: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments, "--slot-save-path", str(directory)])


def test_commands_name_a_damaged_index_and_its_cure(directory: Path) -> None:
    set_data(directory, data_of(directory)[: 5 * 4096])
    for arguments in (["check"], ["ls"]):
        done = command(directory, *arguments)
        assert (done.exit_code, done.stdout) == (1, "")
        assert "cannot be used" in done.stderr and "check --fix" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    refused = command(directory, "rm", "--everything", "-y")
    assert refused.exit_code == 1 and "check --fix" in refused.output
    with pytest.raises(StoreFault, match="cannot be used"):
        read_index(directory)
    mended = command(directory, "check", "--fix")
    assert mended.exit_code == 0 and "made anew from the states" in mended.stdout
    with open_offline(directory) as store:
        assert (examine(store, nothing), len(store.index.all())) == ([], 4)


async def test_budget_holds_after_a_rebuild(directory: Path) -> None:
    pinned = max(records(directory).values(), key=lambda record: record["is_pinned"])
    set_data(directory, b"")
    with opened(directory, pinned["size_bytes"] + 20_000) as store:
        assert pinned["size_bytes"] < store.size_bytes <= store.writes.max_bytes


def test_model_gets_no_namespace_that_another_model_had_in_a_lost_index(tmp_path: Path) -> None:
    # The index of the shared store outlives this one.
    owners_of = [
        Owner("static", KnownNamespace(b"", [(token, -0.5)], "coder"), b"") for token in (5, 6)
    ]
    with opened(tmp_path) as store:
        namespaces = [introduce(store.index, owner) for owner in owners_of]
    shutil.rmtree(tmp_path / "index")
    with opened(tmp_path) as store:
        again = [introduce(store.index, owner) for owner in reversed(owners_of)]
    assert again == namespaces[::-1] and len({*namespaces}) == 2


@pytest.mark.parametrize("is_sealed", [True, False], ids=["closed", "killed"])
def test_index_that_is_full_has_room_again_at_the_next_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_sealed: bool
) -> None:
    monkeypatch.setattr(store_index, "MAP_SIZE_BYTES", 1 << 20)
    monkeypatch.setattr(store_index, "_copy_apart", copy_forked)
    n_values = 0
    for _ in range(3):
        index, n_before = Index(tmp_path / "index"), n_values
        with pytest.raises(StoreFault, match="MAP_FULL"):
            for n_values in range(n_before, n_before + 1000):
                index.put_value(str(n_values), bytes(2000))
        (index.close if is_sealed else index._env.close)()
        assert n_values > n_before + 100
