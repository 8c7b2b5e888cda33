"""The order of cells in windows: the file as if llama-server had saved them by position."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.errors import StateFileMalformed
from proxy.llama.files import has_two_caches, read_state_file
from proxy.llama.state_edits import order_windows
from tests.unit.compositions import Attention, Composition, compositions
from tests.unit.state_files import attention, context_checkpoint, partial_state, state_file, words

FILES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
WINDOWED = ("swa", "hybrid swa")
N = 9


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state"


def ordered(path: Path, data: bytes) -> tuple[bool, bytes]:
    path.write_bytes(data)
    return order_windows(path, read_state_file(path)), path.read_bytes()


def written(composition: Composition, *, is_rotated: bool) -> bytes:
    """Return the file; *is_rotated*: windows of context checkpoints begin with the newest cell."""
    entries = []
    for point in composition.points:
        sections = [section.at(point) for section in composition.sections[1:]]
        assert isinstance(sections[0], Attention)
        cells = sections[0].cells
        if is_rotated:
            sections[0] = replace(sections[0], cells=[*cells[-1:], *cells[:-1]])
        state = [section.write(composition.version) for section in sections]
        partial = partial_state(*state, sequence=composition.slot)
        entries.append(context_checkpoint(point, point - 1, point - 1, partial))
    return composition.write_with(entries)


def in_order(section: Attention) -> Attention:
    return replace(section, cells=sorted(section.cells, key=lambda cell: cell.position))


@FILES
@given(compositions(WINDOWED))
def test_cells_of_every_window_come_into_the_order_of_their_positions(
    path: Path, composition: Composition
) -> None:
    """The index of sparse attention has as many cells as the first cache: then both are ordered."""
    whole, window, *rest = composition.sections
    assert isinstance(whole, Attention) and isinstance(window, Attention)
    if len(window.cells) == len(whole.cells):
        whole = in_order(whole)
    wanted = replace(composition, sections=[whole, in_order(window), *rest])
    before, after = written(composition, is_rotated=True), written(wanted, is_rotated=False)
    assert ordered(path, before) == (before != after, after)
    assert ordered(path, after) == (False, after)


@FILES
@given(compositions(kinds=("full", "recurrent", "hybrid")))
def test_states_without_a_window_are_left_alone(path: Path, composition: Composition) -> None:
    data = composition.write()
    assert ordered(path, data) == (False, data)
    assert not has_two_caches(read_state_file(path).layout)


@FILES
@given(st.data())
def test_order_of_a_file_with_changed_bytes_raises_nothing(path: Path, data: st.DataObject) -> None:
    window = attention(4, first=N - 4, is_v_transposed=data.draw(st.booleans()))
    damaged = bytearray(state_file(words(range(N)), attention(N), window))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged)
    try:
        state = read_state_file(path)
    except StateFileMalformed:
        return
    is_changed = order_windows(path, state)
    assert is_changed == (path.read_bytes() != damaged)
    assert path.stat().st_size == len(damaged)
