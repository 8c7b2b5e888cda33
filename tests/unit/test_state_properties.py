"""State files of all versions and every known composition: what is written is what is read."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from proxy.llama.files import read_state_file
from tests.unit.compositions import Composition, compositions


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(compositions())
def test_what_is_written_is_read_back_the_same(path: Path, composition: Composition) -> None:
    data = composition.write()
    path.write_bytes(data)
    state = read_state_file(path)
    version = composition.version
    assert (state.version, list(state.tokens), state.n_media) == (version, composition.tokens, 0)
    assert state.layout == tuple(section.section(version) for section in composition.sections)
    assert state.sections is not None
    for section, found in zip(composition.sections, state.sections, strict=True):
        section.require_found(data, found)
    assert list(state.restore_points) == composition.points
    for point, entry in zip(composition.points, state.context_checkpoints, strict=True):
        assert data[entry.offset : entry.offset + entry.size_bytes] == composition.entry(point)
    assert (state.state_end, state.size_bytes) == (composition.state_end, len(data))
