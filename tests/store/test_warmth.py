"""Which files count as being in the page cache."""

from pathlib import Path

from proxy.core.model import CheckpointId
from proxy.store.catalogue import WarmFiles, page_cache_bytes
from tests.unit.builders import checkpoint

ONE, TWO, THREE = (
    checkpoint(100, id=CheckpointId(i), file_name=f"{i}", size_bytes=40) for i in (1, 2, 3)
)


def test_files_are_warm_until_others_need_their_memory() -> None:
    warm = WarmFiles(100)
    warm.note(ONE)
    warm.note(TWO)
    warm.note(ONE)  # read again: now TWO is the oldest
    warm.note(THREE)
    assert [c.id in warm for c in (ONE, TWO, THREE)] == [True, False, True]


def test_file_that_is_deleted_leaves_room_to_others() -> None:
    warm = WarmFiles(100)
    for each in (ONE, TWO):
        warm.note(each)
    warm.forget(ONE.id)
    warm.forget(ONE.id)
    warm.note(THREE)
    assert [c.id in warm for c in (ONE, TWO, THREE)] == [False, True, True]


def test_file_larger_than_the_memory_is_not_warm() -> None:
    warm = WarmFiles(39)
    warm.note(ONE)
    assert ONE.id not in warm


def test_page_cache_is_half_of_what_the_system_says_is_available(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert page_cache_bytes(meminfo) == 8 << 30
    meminfo.write_text("MemTotal:       1000 kB\nMemAvailable:    600 kB\nHugePages_Total:   0\n")
    assert page_cache_bytes(meminfo) == 300 << 10
    assert page_cache_bytes() > 0
