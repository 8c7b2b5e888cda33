"""Work on a store that no proxy uses: checked and mended, exported and imported, deleted."""

import asyncio
import io
import json
import os
import shutil
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from proxy.__main__ import main
from proxy.core.model import (
    Checkpoint,
    Family,
    FilePart,
    KnownNamespace,
    Quarantine,
    tenant_namespace,
)
from proxy.core.tokens import Namespace, hash_prefixes
from proxy.errors import StoreFault, StoreLocked
from proxy.store.directory import LOCK_NAME, Sidecar, StoreDirectory, encode_sidecar
from proxy.store.files import StateFiles
from proxy.store.index import Index
from proxy.store.known_models import (
    model_names,
    namespace_of,
    namespaces_name,
    owners,
    tenants_name,
)
from proxy.store.offline import (
    Imported,
    ProblemKind,
    examine,
    export_checkpoints,
    import_checkpoints,
    mend,
    open_offline,
    read_records,
)
from tests.store.conftest import branch, new_state, opened, run_of
from tests.unit.state_files import attention, state_file, words

MODEL, TENANT = Namespace(b"m" * 16), b"tenant"
OURS = tenant_namespace(MODEL, TENANT)
CANARY = [(5, -0.5), (6, -1.5)]
OTHER_CANARY = [(7, -0.5), (8, -1.5)]
FAMILY = Family(0x5D3A90C2F1E84B07, 0x1B70C4D2A9E6F358)
PROMPTS = (run_of(300), branch(200, 400))


def nothing(n_bytes: int) -> None:
    """Ignore progress."""


async def meet(directory: Path, canary: list[tuple[int, float]], *, commits: bool = False) -> None:
    """Leave a store that a proxy has served a model from, with two states of it."""
    with opened(directory) as store:
        known = [KnownNamespace(MODEL, canary, "coder")]
        await store.put_value(namespaces_name("static"), known)
        await store.put_value(tenants_name(MODEL), [TENANT])
        for tokens in PROMPTS if commits else ():
            content = state_file(words(tokens), attention(len(tokens)))
            facts: dict[str, Any] = {"header": 200, "marks": (250,), "n_prompt": 260}
            facts["family"] = FAMILY
            new = new_state(store, tokens, content=content, namespace=OURS, **facts)
            await store.commit(*new)


@pytest.fixture
async def directory(tmp_path: Path) -> Path:
    path = tmp_path / "first"
    path.mkdir()
    await meet(path, CANARY, commits=True)
    return path


@pytest.fixture
def store(directory: Path) -> Iterator[StoreDirectory]:
    with open_offline(directory) as store:
        yield store


@pytest.fixture
async def file(directory: Path, tmp_path: Path) -> Path:
    """Return a file with both checkpoints."""
    files = StateFiles(directory)
    export_checkpoints(files, read_records(files), tmp_path / "file.lpc", nothing)
    return tmp_path / "file.lpc"


def take(directory: Path, file: Path) -> Imported:
    directory.mkdir(exist_ok=True)
    with open_offline(directory, may_be_new=True) as store:
        return import_checkpoints(store, file, nothing)


def test_directory_without_a_store_or_in_use_is_refused(tmp_path: Path, directory: Path) -> None:
    with pytest.raises(StoreFault, match="no store"), open_offline(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == [directory]
    with opened(directory), pytest.raises(StoreLocked), open_offline(directory):
        pass


def problems(store: StoreDirectory) -> list[ProblemKind]:
    return [problem.kind for problem in examine(store, nothing)]


def test_first_start_that_was_broken_off_is_no_damage(tmp_path: Path) -> None:
    Index(tmp_path / "index").close()
    with open_offline(tmp_path) as store:
        assert problems(store) == []


def test_whole_store_has_no_problems(store: StoreDirectory) -> None:
    read: list[int] = []
    examined = examine(store, read.append)
    assert examined == []
    assert sum(read) == sum(c.size_bytes for c in store.index.all()) > 0


def test_what_was_being_saved_is_named_although_it_makes_room_at_the_opening(
    directory: Path,
) -> None:
    half = directory / "lpc-0123456789abcdef.saving"
    half.write_bytes(b"half of a state")
    with open_offline(directory, mends_index=True) as store:
        assert not half.exists()
        assert problems(store) == [ProblemKind.FILE_WITHOUT_ENTRY]


def test_each_kind_of_damage_is_named_and_mended(store: StoreDirectory) -> None:
    first, second = sorted(store.index.all(), key=lambda c: c.n_tokens)
    hashes = [hash_prefixes(OURS, tokens) for tokens in PROMPTS]
    path = store.files.path(first.file_name)
    beside = store.files.path(store.files.sidecar_name(first.file_name))
    whole, record = path.read_bytes(), beside.read_bytes()

    def mends(expected: ProblemKind, n_left: int) -> None:
        assert problems(store) == [expected]
        mend(store, examine(store, nothing))
        assert problems(store) == []
        assert len(store.index.all()) == n_left

    def enter(checkpoint: Checkpoint) -> None:
        path.write_bytes(whole)
        beside.write_bytes(record)
        store.index.put((checkpoint, PROMPTS[0], hashes[0]))

    (store.files.directory / "lpc-0123456789abcdef.saving").write_bytes(b"leftover")
    mends(ProblemKind.FILE_WITHOUT_ENTRY, 2)
    (store.files.directory / "lpc-0123456789abcdef.meta").write_bytes(b"leftover")
    mends(ProblemKind.FILE_WITHOUT_ENTRY, 2)
    beside.write_bytes(b"no record")
    mends(ProblemKind.RECORD_GONE, 2)
    assert beside.read_bytes() == record
    store.index.delete(first.id, hashes[0])
    store.index.put((first, PROMPTS[0], hashes[1][:2]))
    mends(ProblemKind.NOT_FOUND, 2)
    assert set(store.index.reaching(hashes[0], 9)) == {first.id, second.id}
    store.index.put((first, run_of(300, start=9), ()))
    mends(ProblemKind.TOKENS_DIFFER, 2)
    assert store.index.tokens(first.id) == PROMPTS[0]
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    mends(ProblemKind.FILE_CHANGED, 1)
    assert not path.exists()
    enter(first)
    path.unlink()
    mends(ProblemKind.FILE_GONE, 1)
    assert list(store.index.reaching(hashes[0], 9)) == [second.id]


def test_file_that_cannot_be_read_is_left_alone(store: StoreDirectory, directory: Path) -> None:
    (checkpoint, _) = store.index.all()
    file = directory / checkpoint.file_name
    kept = file.rename(file.with_suffix(".kept"))
    file.mkdir()  # reading it fails, even for root
    examined = examine(store, nothing)
    assert [p.kind for p in examined] == [ProblemKind.FILE_UNREADABLE]
    mend(store, examined)
    assert file.exists() and checkpoint in store.index.all()
    file.rmdir()
    kept.rename(file)
    assert problems(store) == []


def test_checkpoints_arrive_in_a_new_directory_as_they_were(file: Path, tmp_path: Path) -> None:
    assert file.stat().st_mode & 0o777 == 0o600
    with tarfile.open(file) as tar:
        assert [name[-5:] for name in tar.getnames()] == [".meta", "state"] * 2
    imported = take(tmp_path / "second", file)
    assert (len(imported.entered), imported.n_already_there, imported.is_new_model) == (2, 0, True)
    with opened(tmp_path / "second") as store:
        for tokens in PROMPTS:
            ((_, owner),) = [o for o in owners(store.index) if o[1].tenant]
            namespace = namespace_of(store.index, owner)
            assert namespace is not None
            found = next(store.find(namespace, tokens))
            assert found.n_common == found.checkpoint.n_tokens == len(tokens)
            record = found.checkpoint
            assert (record.header, record.marks, record.n_prompt) == (200, (250,), 260)
            assert record.has_every_position and not record.is_pinned
            assert record.family == FAMILY
            assert model_names(store.index)[namespace] == "coder"
    again = take(tmp_path / "second", file)
    assert (again.entered, again.n_already_there, again.is_new_model) == ([], 2, False)


def test_state_that_the_proxy_deletes_during_an_export_is_left_out(
    directory: Path, tmp_path: Path
) -> None:
    files, file = StateFiles(directory), tmp_path / "file.lpc"
    first, second = records = read_records(files)
    gone = files.path(second.checkpoint.file_name)
    written = export_checkpoints(files, records, file, lambda _: gone.unlink(missing_ok=True))
    assert written == [first] and len(take(tmp_path / "second", file).entered) == 1


async def test_states_of_a_model_that_never_ran_here_are_told_of(
    file: Path, tmp_path: Path
) -> None:
    second = tmp_path / "second"
    second.mkdir()
    await meet(second, OTHER_CANARY)
    status, output = run(second, "import", str(file))
    assert status == 0 and "model never ran here" in output
    assert run(second, "rm", "--everything", "--yes")[0] == 0
    imported = take(second, file)
    # The id that the other model has here is not taken for ours.
    assert len(imported.entered) == 2 and imported.entered[0].namespace != OURS
    with open_offline(second) as store:
        assert len(dict(owners(store.index))) == 4


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("meta", b"{", "no record"),
        ("meta", b"", "no record"),
        ("state", b"nothing of the kind", "damaged"),
        ("state", b"", "damaged"),
        ("", b"", "missing"),
    ],
)
def test_changed_file_is_refused_and_leaves_nothing(
    file: Path, tmp_path: Path, name: str, change: bytes, complaint: str
) -> None:
    changed = tmp_path / "changed"
    with tarfile.open(file) as source, tarfile.open(changed, "w") as target:
        for head in source.getmembers()[: None if name else 1]:
            content = source.extractfile(head)
            assert content is not None
            data = content.read()
            if name and head.name.endswith(name):
                data = change or data[:-1] + bytes([data[-1] ^ 1])
            (tmp_path / "part").write_bytes(data)
            target.add(tmp_path / "part", head.name)
    with pytest.raises(StoreFault, match=f"{complaint}.*; nothing of it was entered"):
        take(tmp_path / "second", changed)
    assert not list((tmp_path / "second").glob("lpc-*"))
    with open_offline(tmp_path / "second") as store:
        assert not list(owners(store.index))
    (tmp_path / "text").write_text("no tar at all")
    with pytest.raises(StoreFault, match="not what `export` writes"):
        take(tmp_path / "second", tmp_path / "text")


def test_refusal_says_what_was_entered_before_and_the_rest_can_follow(
    file: Path, tmp_path: Path
) -> None:
    cut, whole = tmp_path / "cut", file.read_bytes()
    with tarfile.open(file) as tar:
        last = tar.getmembers()[-1]
    for n_bytes in (last.offset_data + last.size // 2, last.offset):
        cut.write_bytes(whole[:n_bytes])
        second = tmp_path / f"second{n_bytes}"
        told = "or is cut short.*; 1 of its checkpoints were entered before that"
        with pytest.raises(StoreFault, match=told):
            take(second, cut)
        assert len(list(second.glob("lpc-*.state"))) == 1
        imported = take(second, file)
        assert (len(imported.entered), imported.n_already_there) == (1, 1)


def test_state_that_is_longer_than_its_record_says_is_refused_before_it_is_written(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could fill the disk: room is looked for by the record."""
    bomb = tmp_path / "bomb"
    with tarfile.open(file) as source, tarfile.open(bomb, "w") as target:
        record, state = source.getmembers()[:2]
        target.addfile(record, source.extractfile(record))
        state.size += 1 << 20
        target.addfile(state, io.BytesIO(bytes(state.size)))
    monkeypatch.setattr(shutil, "copyfileobj", None)
    with pytest.raises(StoreFault, match="damaged"):
        take(tmp_path / "store", bomb)


def test_refusal_obeys_nothing_of_the_file(directory: Path, tmp_path: Path) -> None:
    with tarfile.open(file := tmp_path / "x", "w") as tar:
        tar.addfile(tarfile.TarInfo("\x1b]0;title\x07\n"))
    status, output = run(directory, "import", str(file))
    assert status == 1 and "is no record" in output and "\x1b" not in output


def test_record_without_bound_is_refused_before_it_is_read(tmp_path: Path) -> None:
    head = tarfile.TarInfo("lpc-0123456789abcdef.meta")
    head.size = 256 << 20
    with (bomb := tmp_path / "bomb").open("wb") as file:
        file.write(head.tobuf())
        file.truncate(head.size + 2048)
    tracemalloc.start()
    with pytest.raises(StoreFault, match="is no record"):
        take(tmp_path / "store", bomb)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < head.size // 4


@pytest.mark.parametrize("size_bytes", [-512, 64 << 30, 1 << 60])
@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_head_of_any_size_is_refused_before_it_is_read(
    file: Path, tmp_path: Path, kind: bytes, size_bytes: int
) -> None:
    """A file with holes takes no room on the disk, and all of it in memory."""
    head = tarfile.TarInfo("x")
    head.size, head.type = size_bytes, kind
    with (bomb := tmp_path / "bomb").open("wb") as target:
        target.write(head.tobuf(tarfile.GNU_FORMAT) + file.read_bytes())
        target.truncate(max(0, min(size_bytes, 64 << 30)) + (1 << 20))
    with pytest.raises(StoreFault, match="`export` writes.*; nothing of it was entered"):
        take(tmp_path / "store", bomb)


def test_record_of_impossible_parts_is_refused(directory: Path, tmp_path: Path) -> None:
    (record, *_) = read_records(files := StateFiles(directory))
    lying = replace(record.checkpoint, parts=(FilePart(1 << 63, b""),) * 2)
    told = encode_sidecar(Sidecar(lying, record.owner))
    with tarfile.open(crafted := tmp_path / "crafted", "w") as tar:
        for content in (told, files.path(lying.file_name).read_bytes()):
            head = tarfile.TarInfo("x")
            head.size = len(content)
            tar.addfile(head, io.BytesIO(content))
    with pytest.raises(StoreFault, match="not what `export` writes"):
        take(tmp_path / "store", crafted)


def test_heads_without_end_are_refused(file: Path, tmp_path: Path) -> None:
    head = tarfile.TarInfo("x")
    head.pax_headers = {"a": "b"}
    (bomb := tmp_path / "bomb").write_bytes(head.tobuf()[:1024] * 2000 + file.read_bytes())
    with pytest.raises(StoreFault, match="not what `export` writes"):
        take(tmp_path / "store", bomb)


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: os.truncate(path, 9)])
def test_state_whose_file_is_gone_or_cut_is_not_there_already(
    directory: Path, file: Path, damage: Callable[[Path], None]
) -> None:
    with open_offline(directory) as store:
        broken = store.index.all()[0]
        store.update([replace(broken, is_pinned=True)])
        damage(store.files.path(broken.file_name))
    imported = take(directory, file)
    assert (len(imported.entered), imported.n_already_there) == (1, 1)
    with open_offline(directory) as store:
        assert broken.id not in {checkpoint.id for checkpoint in store.index.all()}
        pinned = [c.n_tokens for c in store.index.all() if c.is_pinned]
        assert pinned == [broken.n_tokens], "what takes its place is kept as it was"
        assert (problems(store), len(store.index.all())) == ([], 2)


async def test_state_that_ended_llama_server_stays_in_quarantine(
    directory: Path, tmp_path: Path
) -> None:
    with opened(directory) as used:
        bad, good = sorted(used, key=lambda checkpoint: checkpoint.n_tokens)
        await used.change_on_disk(bad.id, quarantine=Quarantine("it ended llama-server", 1.0))
    files = StateFiles(directory)
    export_checkpoints(files, read_records(files), tmp_path / "file.lpc", nothing)
    take(tmp_path / "second", tmp_path / "file.lpc")
    with opened(tmp_path / "second") as used:
        assert [c.n_tokens for c in used.quarantined] == [bad.n_tokens]
        assert sorted(c.n_tokens for c in used) == [bad.n_tokens, good.n_tokens]


def test_import_leaves_the_free_space_that_saves_leave(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = tmp_path / "second"
    with pytest.raises(StoreFault, match="absent.*; nothing of it was entered"):
        take(second, tmp_path / "absent")
    with monkeypatch.context() as full:
        full.setattr(StateFiles, "reserve_bytes", lambda _: 1 << 60)
        for _ in range(2):
            with pytest.raises(StoreFault, match="no room for it.*; nothing of it was entered"):
                take(second, file)
    assert not list(second.glob("lpc-*"))
    take(second, file)
    # What is there already needs no room.
    monkeypatch.setattr(StateFiles, "reserve_bytes", lambda _: 1 << 60)
    assert take(second, file).n_already_there == 2


def test_export_of_states_without_records_names_the_command_that_mends_them(
    directory: Path, tmp_path: Path
) -> None:
    chosen, file = listed(directory)[0]["id"], str(tmp_path / "file")
    for record in directory.glob("*.meta"):
        record.unlink()
    status, output = run(directory, "export", chosen, "-o", file)
    assert status == 1 and "intact record: run `check --fix`" in output
    assert (
        run(directory, "check", "--fix")[0] == run(directory, "export", chosen, "-o", file)[0] == 0
    )


def test_export_replaces_no_file_of_the_store_and_is_private(
    store: StoreDirectory, tmp_path: Path
) -> None:
    first, second = read_records(store.files)
    chosen, other = first.checkpoint, second.checkpoint
    link = tmp_path / "link"
    link.symlink_to(store.files.directory)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    refused = [link / chosen.file_name, store.files.path(other.file_name), link / LOCK_NAME, pipe]
    for target in [*refused, link / "lpc-new", link / "index" / "data.mdb"]:
        with pytest.raises(StoreFault, match="choose another"):
            export_checkpoints(store.files, [first], target, nothing)
    assert problems(store) == []
    target, part = tmp_path / "file", tmp_path / "file.part"
    for path in (target, part):
        path.write_text("before")
        path.chmod(0o644)
    export_checkpoints(store.files, [first], target, nothing)
    assert (target.stat().st_mode & 0o777, part.read_text()) == (0o600, "before")
    assert len(take(tmp_path / "second", target).entered) == 1
    store.files.path(chosen.file_name).unlink()
    with pytest.raises(StoreFault, match="are gone"):
        export_checkpoints(store.files, [first], tmp_path / "none", nothing)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"first", "second", "link", "pipe", "file", "file.part"}


def run(directory: Path, *arguments: str) -> tuple[int, str]:
    runner = CliRunner()
    result = runner.invoke(main, [*arguments, "--slot-save-path", str(directory)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def listed(directory: Path) -> list[dict[str, Any]]:
    status, output = run(directory, "ls", "--json")
    assert status == 0
    checkpoints: list[dict[str, Any]] = json.loads(output)["checkpoints"]
    return checkpoints


async def test_rm_without_a_proxy_tells_what_stays_in_the_shared_store(directory: Path) -> None:
    with opened(directory) as store:
        await store.change_on_disk(next(iter(store)).id, shared_id="000-a-b")
    status, output = await asyncio.to_thread(run, directory, "rm", "--everything", "--yes")
    assert status == 0 and "copies stay in the shared store: 1" in output


def test_index_made_anew_has_nothing_of_a_state_that_was_deleted(directory: Path) -> None:
    """As docs/backup.md says under *Clean up*: LMDB leaves what it deletes where it lies."""
    data, text = directory / "index" / "data.mdb", PROMPTS[1][-100:].tobytes()
    (deleted,) = (c["id"] for c in listed(directory) if c["n_tokens"] == len(PROMPTS[1]))
    assert run(directory, "rm", deleted)[0] == 0
    assert text in data.read_bytes()
    shutil.rmtree(data.parent)
    with opened(directory) as store:
        assert [checkpoint.n_tokens for checkpoint in store] == [len(PROMPTS[0])]
    assert text not in data.read_bytes()


def test_commands_work_on_the_directory(directory: Path, tmp_path: Path) -> None:
    first, second = (checkpoint["id"] for checkpoint in listed(directory))
    status, output = run(directory, "ls")
    assert status == 0 and first[:8] in output
    assert "header, 200 tokens, " in output and "ago  5d3a90c2" in output
    assert "session, " in output and "ago  1b70c4d2" in output
    assert run(directory, "pin", first[:6])[0] == 0
    assert [c["is_pinned"] for c in listed(directory) if c["id"] == first] == [True]
    assert run(directory, "rm", "ffff" * 4)[0] == run(directory, "rm", "a")[0] == 1
    assert run(directory, "rm")[0] == run(directory, "rm", "--unused-for", "soon")[0] == 2
    assert run(directory, "rm", first, "--everything")[0] == 2
    for several in ("--everything", OURS.hex()[:8]):
        status, output = run(directory, "rm", several, "--pinned")  # nobody can be asked
        assert status == 2 and "Delete 2 checkpoints with " in output
    for names in ([], [OURS.hex()[:8]]):
        assert "deleted 0" in run(directory, "rm", *names, "--unused-for", "1h")[1]
    assert len(listed(directory)) == 2
    status, output = run(directory, "rm", "--everything", "--yes")
    assert status == 0 and "pinned ones stay: 1" in output
    assert [c["id"] for c in listed(directory)] == [first]
    file = tmp_path / "one.lpc"
    assert run(directory, "export", first, "-o", str(file))[0] == 0
    assert run(directory, "unpin", first)[0] == run(directory, "rm", first)[0] == 0
    assert listed(directory) == [] and second
    assert run(directory, "import", str(file))[0] == 0
    assert len(listed(directory)) == 1
    (directory / listed(directory)[0]["id"]).touch()  # not ours
    for path in directory.glob("lpc-*"):
        path.unlink()
    status, output = run(directory, "check")
    assert status == 1 and "is gone" in output
    assert run(directory, "check", "--fix")[0] == run(directory, "check")[0] == 0
    assert run(directory, "check", "--fix")[1].rstrip().endswith(f" in {directory}: no problems")
    with opened(directory):
        for held in (["ls"], ["check"], ["import", str(file)], ["rm", "--everything", "--yes"]):
            status, output = run(directory, *held)
            assert status == 69 and f"another llama-prefix-cache uses {directory}" in output
