"""Looking into a store from outside: it tells the same, and leaves no trace."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from proxy.__main__ import main
from proxy.core.model import KnownNamespace
from proxy.doctor.examination import _examine_directory, read_index
from proxy.doctor.findings import Setup
from proxy.errors import StoreFault, StoreLocked
from proxy.settings import Settings
from proxy.store.directory import LOCK_NAME, keep_proxies_out
from proxy.store.index import Index
from proxy.store.known_models import Owner, introduce
from proxy.store.store import CheckpointStore
from tests.store.conftest import BUDGET, new_state, opened, run_of
from tests.unit.state_files import attention, state_file, words


def traces(directory: Path) -> dict[Path, int]:
    """Return the files of a directory and when they were changed."""
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*")}


async def test_closed_store_is_read_as_it_was_written(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        checkpoint = await store.commit(*new_state(store, run_of(300)))
        owner = Owner("any", KnownNamespace(b"m" * 16, [(1, -0.5)], "Model"), b"tenant")
        namespace = introduce(store.index, owner)
    before = traces(tmp_path)
    checkpoints, owners = read_index(tmp_path)
    assert checkpoints == [checkpoint]
    assert len(owners) == 2 and owners[namespace].tenant == b"tenant"
    assert owners[namespace].known.name == "Model"
    assert traces(tmp_path) == before


def test_directory_without_an_index_reads_as_empty_and_stays_so(tmp_path: Path) -> None:
    assert read_index(tmp_path) == ([], {})
    assert os.listdir(tmp_path) == []


def test_index_of_another_format_is_refused(tmp_path: Path) -> None:
    index = Index(tmp_path / "index")
    index.put_value("format", 99)
    index.close()
    with pytest.raises(StoreFault, match="has format 99"):
        read_index(tmp_path)


def test_garbage_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "data.mdb").write_bytes(b"garbage" * 5000)
    with pytest.raises(StoreFault, match="cannot be used"):
        read_index(tmp_path)


def test_open_store_is_noticed(tmp_path: Path) -> None:
    with opened(tmp_path):
        with pytest.raises(StoreLocked, match="another llama-prefix-cache"):
            with keep_proxies_out(tmp_path):
                pass


def test_store_cannot_be_opened_meanwhile(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    with keep_proxies_out(tmp_path):
        with pytest.raises(StoreLocked):
            CheckpointStore(tmp_path, BUDGET)
    with opened(tmp_path):
        pass


def test_no_lock_file_is_made_where_there_was_none(tmp_path: Path) -> None:
    with keep_proxies_out(tmp_path):
        pass
    assert os.listdir(tmp_path) == []


NOBODY = 65534


@contextmanager
def nobodys_directory() -> Iterator[Path]:
    """Yield a directory of nobody's, whom root then is; whoever is not root is nobody enough."""
    uid = os.getuid()
    path = Path(tempfile.mkdtemp(dir="/tmp", prefix="lpc-store-"))  # pytest's own are root's
    try:
        if uid == 0:
            os.chown(path, NOBODY, -1)
            os.setresuid(NOBODY, NOBODY, 0)
        yield path
    finally:
        os.setresuid(uid, uid, uid)
        path.chmod(0o700)
        shutil.rmtree(path)


async def test_states_of_a_directory_without_write_permission_are_found() -> None:
    tokens = run_of(300)
    content = state_file(words(tokens), attention(300))
    with nobodys_directory() as path:
        with opened(path) as store:
            owner = Owner("any", KnownNamespace(b"m" * 16, [(1, -0.5)], "Model"), b"")
            facts: dict[str, Any] = {"namespace": introduce(store.index, owner)}
            checkpoint = await store.commit(*new_state(store, tokens, content=content, **facts))
        (path / "index" / "lock.mdb").unlink()  # as in a backup
        (path / LOCK_NAME).unlink()
        (path / "link").symlink_to("nowhere")  # not ours, like the states that others save there
        for place in (path / "index", path):
            place.chmod(0o500)
        with opened(path) as store:
            assert store.files.is_readonly and [c.id for c in store] == [checkpoint.id]
            with pytest.raises(StoreFault, match="read-only"):
                await store.pin(checkpoint.id, is_pinned=True)
        for command, expected in (
            (["ls"], "1 checkpoint with"),
            (["check"], "no problems"),
            (["check", "--fix"], "the directory is read-only"),
            (["rm", f"{checkpoint.id:016x}"], "the directory is read-only"),
            (["pin", f"{checkpoint.id:016x}"], "the directory is read-only"),
        ):
            done = CliRunner().invoke(main, [*command, "--slot-save-path", str(path)])
            assert expected in done.output and done.exit_code == ("read-only" in expected)
        (path / "index" / "data.xxh3").chmod(0o600)
        (path / "index" / "data.xxh3").write_text("another")
        for command, status in ((["ls"], 0), (["check"], 1)):
            done = CliRunner().invoke(main, [*command, "--slot-save-path", str(path)])
            assert done.exit_code == status and "1 checkpoint with" in done.output
        (path / "index").chmod(0o700)


@pytest.mark.parametrize("mode", [0o000, 0o300, 0o400])
def test_directory_that_may_not_be_read_is_named_once(mode: int) -> None:
    with nobodys_directory() as path:
        path.chmod(mode)
        with pytest.raises(StoreFault) as told, opened(path):
            pass
    assert str(told.value) == f"{path}: this user may not read it"


def test_directory_that_may_not_be_listed_gets_no_probe_of_doctor() -> None:
    with nobodys_directory() as path:
        path.chmod(0o300)
        setup = Setup(settings=Settings(slot_save_path=str(path)), own_uid=os.geteuid())
        _examine_directory(setup)
        path.chmod(0o700)
        assert setup.problem and not os.listdir(path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a folder that is not its user's")
def test_index_that_only_root_may_read_is_what_doctor_names() -> None:
    with nobodys_directory() as path:
        with opened(path):
            pass
        os.setresuid(0, 0, 0)
        os.chown(path / "index", 0, 0)
        os.setresuid(NOBODY, NOBODY, 0)
        setup = Setup(settings=Settings(slot_save_path=str(path)), own_uid=os.geteuid())
        _examine_directory(setup)
    assert "index/data.mdb: permission denied" in setup.index_problem
    assert not (setup.is_index_damaged or setup.problem or setup.scratch_problem)


@pytest.mark.parametrize("is_there", [True, False])
def test_doctor_names_the_place_that_has_no_room_for_a_copy_of_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_there: bool
) -> None:
    place, usage = tmp_path / "place", shutil.disk_usage
    (tmp_path / "slots").mkdir()
    if is_there:
        place.mkdir()
    with opened(tmp_path / "slots"):
        pass
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(place)])
    monkeypatch.setattr(
        "proxy.doctor.examination.disk_usage",
        lambda path: usage(tmp_path)._replace(free=1000 if path == place else 1 << 40),
    )
    flags = ["--slot-save-path", str(tmp_path / "slots"), "--upstream", "http://127.0.0.1:1"]
    done = CliRunner().invoke(main, ["doctor", *flags])
    assert done.exit_code == 1 and "limit  temporary files" in done.output
    told = f"{place} has no room" if is_there else f"directory found in ['{place}']"
    assert told.replace(" ", "") in "".join(done.output.split())
    assert "store not open" not in done.output
