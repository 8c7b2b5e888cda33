"""The repair of cut windows: the file as if the lowest cell lay one position lower, or not touched."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.errors import StateFileMalformed
from proxy.llama.files import read_state_file
from proxy.llama.state_edits import repair_window
from tests.unit.compositions import MOST_TOKENS, Attention, Composition, compositions
from tests.unit.state_files import (
    Cell,
    attention,
    cells_at,
    context_checkpoints,
    recurrent,
    state_file,
    words,
)

FILES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
N = 9
WINDOWED = ("swa", "hybrid swa")
CUT = compositions(WINDOWED, lacking=(2, MOST_TOKENS))
HARDLY_CUT = compositions(WINDOWED, lacking=(0, 1))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state"


def repaired(composition: Composition) -> bytes:
    """Return what the repair of a cut window must come to: the lowest cell, one position lower."""
    whole, window, *rest = composition.sections
    assert isinstance(window, Attention)
    lowest = min(cell.position for cell in window.cells)
    moved = Cell(lowest - 1, filling=lowest)
    cells = [moved if cell.position == lowest else cell for cell in window.cells]
    edited = replace(composition, sections=[whole, replace(window, cells=cells), *rest])
    return edited.write_with([composition.entry(point) for point in composition.points])


def repair(path: Path, data: bytes) -> tuple[bool, bytes]:
    path.write_bytes(data)
    return repair_window(path), path.read_bytes()


@FILES
@given(CUT)
def test_repair_of_a_cut_window_moves_the_lowest_cell_and_nothing_else(
    path: Path, composition: Composition
) -> None:
    assert repair(path, composition.write()) == (True, repaired(composition))


@FILES
@given(CUT)
def test_repair_of_a_repaired_file_changes_nothing(path: Path, composition: Composition) -> None:
    data = repaired(composition)
    assert repair(path, data) == (False, data)


@FILES
@given(CUT)
def test_repaired_state_keeps_its_layout_and_is_good_for_its_end_only(
    path: Path, composition: Composition
) -> None:
    path.write_bytes(composition.write())
    before = read_state_file(path)
    assert repair_window(path)
    after = read_state_file(path)
    assert after.layout == before.layout  # it is part of the namespace
    assert after.tokens == before.tokens
    assert after.restore_points == before.restore_points
    assert not after.has_every_position


@FILES
@given(HARDLY_CUT)
def test_window_that_lacks_at_most_the_first_token_is_left_alone(
    path: Path, composition: Composition
) -> None:
    """A cell at position 0 would say that nothing is missing, one at -1 aborts llama-server."""
    data = composition.write()
    assert repair(path, data) == (False, data)


@FILES
@given(compositions(kinds=("full", "recurrent", "hybrid")))
def test_memory_without_a_window_is_left_alone(path: Path, composition: Composition) -> None:
    data = composition.write()
    assert repair(path, data) == (False, data)


WINDOW = attention(4, first=N - 4)
OTHER_STATES = {
    "window with a hole": [attention(N), attention(cells_at([3, 5, 6, 7, 8]))],
    "window that ends early": [attention(N), attention(4, first=3)],
    "empty window": [attention(N), attention(0)],
    "two cut sections": [WINDOW, WINDOW],
    "three attention sections": [attention(N), attention(N), WINDOW],
    "window behind a recurrent state": [attention(N), recurrent(N - 1), WINDOW],
    "nothing": [],
    "unknown section": [attention(N), WINDOW, b"\xff" * 40],
}


@pytest.mark.parametrize("name", OTHER_STATES)
def test_any_other_state_is_left_alone(path: Path, name: str) -> None:
    data = state_file(words(range(N)), *OTHER_STATES[name])
    assert repair(path, data) == (False, data)


def test_unknown_version_is_left_alone(path: Path) -> None:
    data = state_file(words(range(N)), attention(N), WINDOW, version=5)
    assert repair(path, data) == (False, data)


def test_what_is_no_state_file_raises_malformed(path: Path) -> None:
    with pytest.raises(StateFileMalformed):
        repair(path, b"no state file")


@FILES
@given(st.data())
def test_repair_of_a_file_with_changed_bytes_raises_nothing_but_malformed(
    path: Path, data: st.DataObject
) -> None:
    points = context_checkpoints((3, 2, 2))
    damaged = bytearray(state_file(words(range(N)), attention(N), WINDOW, points))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        is_changed, after = repair(path, bytes(damaged))
    except StateFileMalformed:
        return
    assert is_changed == (after != damaged)
