"""Which files count as being in the page cache."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.core.model import CheckpointId
from proxy.core.tokens import token_ids
from proxy.store.catalogue import Catalogue, page_cache_bytes
from proxy.store.index import Index
from tests.lab.page_cache import can_tell, folder_on_disk, forget
from tests.store.conftest import new_state, opened, run_of
from tests.unit.builders import checkpoint

ONE, TWO, THREE = (
    checkpoint(100, id=CheckpointId(i), file_name=f"{i}", size_bytes=40) for i in (1, 2, 3)
)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    index = Index(tmp_path / "index")
    yield index
    index.close()


def catalogue(monkeypatch: pytest.MonkeyPatch, index: Index, max_bytes: int) -> Catalogue:
    """Return a catalogue of three checkpoints beside a page cache of *max_bytes*."""
    monkeypatch.setattr("proxy.store.catalogue.page_cache_bytes", lambda: max_bytes)
    warm = Catalogue(index)
    for each in (ONE, TWO, THREE):
        index.put((each, token_ids(()), ()))
        warm.enter(each)
    return warm


def test_files_are_warm_until_others_need_their_memory(
    monkeypatch: pytest.MonkeyPatch, index: Index
) -> None:
    warm = catalogue(monkeypatch, index, 100)
    warm.note_read(ONE)
    warm.note_read(TWO)
    warm.note_read(ONE)  # read again: now TWO is the oldest
    warm.note_read(THREE)
    assert [warm.is_warm(c) for c in (ONE, TWO, THREE)] == [True, False, True]


def test_file_that_is_deleted_leaves_room_to_others(
    monkeypatch: pytest.MonkeyPatch, index: Index
) -> None:
    warm = catalogue(monkeypatch, index, 100)
    for each in (ONE, TWO):
        warm.note_read(each)
    warm.take(ONE.id)
    warm.take(ONE.id)
    warm.note_read(THREE)
    assert [warm.is_warm(c) for c in (ONE, TWO, THREE)] == [False, True, True]


def test_file_larger_than_the_memory_is_not_warm(
    monkeypatch: pytest.MonkeyPatch, index: Index
) -> None:
    warm = catalogue(monkeypatch, index, 39)
    warm.note_read(ONE)
    assert not warm.is_warm(ONE)


def test_page_cache_is_half_of_what_the_system_says_is_available(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert (
        page_cache_bytes(meminfo) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8
    )
    meminfo.write_text("MemTotal:       1000 kB\nMemAvailable:    600 kB\nHugePages_Total:   0\n")
    assert page_cache_bytes(meminfo) == 300 << 10
    assert page_cache_bytes() > 0


async def test_file_is_warm_at_the_start_if_the_page_cache_has_it() -> None:
    with folder_on_disk() as directory:
        with opened(directory) as store:
            states = [new_state(store, run_of(400, i), content=bytes(300_000)) for i in range(2)]
            kept, dropped = [await store.commit(*state) for state in states]
            path = store.files.path(dropped.file_name)
        if not can_tell(path):
            pytest.skip("the kernel does not say what its page cache has of this file system")
        forget(path)
        with opened(directory) as store:
            assert [store.is_warm(c) for c in (kept, dropped)] == [True, False]


async def test_store_opens_where_python_cannot_ask_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such are the Pythons of uv and conda, which are built for old C libraries, and that of macOS."""
    with opened(tmp_path) as store:
        kept = await store.commit(*new_state(store, run_of(400)))
    monkeypatch.delattr(os, "RWF_NOWAIT", raising=False)
    with opened(tmp_path) as store:
        assert not store.is_warm(kept)
