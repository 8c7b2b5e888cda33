"""Looking into a store from outside: it tells the same, and leaves no trace."""

import os
from pathlib import Path

import pytest

from proxy.core.model import KnownNamespace
from proxy.errors import StoreFault, StoreLocked
from proxy.store.directory import keep_proxies_out
from proxy.store.index import Index
from proxy.store.known_models import Owner, introduce, read_index
from proxy.store.store import CheckpointStore
from tests.store.conftest import BUDGET, new_state, opened, run_of


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
    with pytest.raises(StoreFault, match="is damaged"):
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
