"""Reading llama-server's state files, whole, damaged and unknown."""

import os
import struct
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.errors import StateFileMalformed
from proxy.llama.files import Reader, Section, StateFile, read_state_file
from tests.unit.state_files import (
    F16_ROW,
    F32_ROW,
    attention,
    compressed,
    context_checkpoints,
    draft_state,
    legacy_words,
    recurrent,
    state_file,
    words,
)

TOKENS = [11, 12, 13, 14, 15]
N = len(TOKENS)
POINTS = context_checkpoints((3, 2, 2), (4, 3, 3))

COMPOSITIONS = {
    "attention": [attention(N)],
    "attention without flash attention": [attention(N, is_v_transposed=True)],
    "attention in the third stream": [attention(N, n_streams=3)],
    "attention with M-RoPE": [attention(N, is_mrope=True)],
    "latent attention": [attention(N, has_v=False)],
    "sliding window": [attention(N), attention(2, first=3), POINTS],
    "recurrent": [recurrent(N - 1), POINTS],
    "hybrid": [attention(N), recurrent(N - 1), POINTS, draft_state()],
    "hybrid with M-RoPE": [attention(N, is_mrope=True), recurrent(N - 1), POINTS],
    "hybrid with a window": [attention(N), attention(2, first=3), recurrent(N - 1)],
    "hybrid with an index": [
        attention(N, has_v=False),
        recurrent(N - 1),
        attention(N, has_v=False, row_bytes=24),
        POINTS,
    ],
    "compressed keys": [compressed(N), POINTS],
}
KINDS = {
    "sliding window": ["attention", "attention"],
    "recurrent": ["recurrent"],
    "hybrid": ["attention", "recurrent"],
    "hybrid with M-RoPE": ["attention", "recurrent"],
    "hybrid with a window": ["attention", "attention", "recurrent"],
    "hybrid with an index": ["attention", "recurrent", "attention"],
    "compressed keys": ["compressed"],
}


def read(path: Path, data: bytes) -> StateFile:
    path.write_bytes(data)
    return read_state_file(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_read_of_a_known_composition_tells_tokens_and_sections(path: Path, name: str) -> None:
    sections = COMPOSITIONS[name]
    state = read(path, state_file(words(TOKENS), *sections))
    assert list(state.tokens) == TOKENS
    assert state.layout is not None
    assert [s.kind for s in state.layout] == KINDS.get(name, ["attention"])
    assert state.restore_points == ((3, 4) if POINTS in sections else ())
    n_state = sum(len(s) for s in sections if s[:4] not in (b"SCKP", b"SDFT"))
    assert state.state_end == 12 + 4 * (N + 4) + n_state


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_has_every_position_is_true_of_attention_to_all_tokens_only(path: Path, name: str) -> None:
    state = read(path, state_file(words(TOKENS), *COMPOSITIONS[name]))
    assert state.has_every_position is (name not in KINDS)


def test_read_of_version_3_finds_no_rotations(path: Path) -> None:
    section = attention(N, version=3)
    state = read(path, state_file(words(TOKENS), section, version=3))
    assert state.layout == (Section("attention", 1, False, 2, (), (F16_ROW,) * 4),)
    assert [found.n_cells for found in state.sections or ()] == [N]


def test_read_of_version_4_keeps_rotations(path: Path) -> None:
    state = read(path, state_file(words(TOKENS), attention(N)))
    assert state.layout == (Section("attention", 1, False, 2, (0, 0), (F16_ROW,) * 4),)


def test_read_of_a_transposed_v_says_so(path: Path) -> None:
    state = read(path, state_file(words(TOKENS), attention(N, is_v_transposed=True)))
    assert state.layout == (Section("attention", 1, True, 2, (0, 0), (F16_ROW,) * 4),)


@pytest.mark.parametrize("n", [N, 127])
def test_read_of_two_caches_without_v_and_flash_attention_in_any_slot(path: Path, n: int) -> None:
    """The next section's empty streams are no strips of a transposed V."""
    for stream in range(3):
        how: dict[str, Any] = {"is_v_transposed": True, "has_v": False}
        sections = [attention(n, n_streams=3, stream=stream, **how) for _ in range(2)]
        state = read(path, state_file(words(range(n)), *sections))
        assert state.layout == (Section("attention", 3, True, 2, (0, 0), (F16_ROW,) * 2),) * 2


def test_read_of_a_hybrid_counts_recurrent_rows_of_the_layers_that_have_state(path: Path) -> None:
    state = read(path, state_file(words(TOKENS), attention(N), recurrent(N - 1)))
    assert state.layout is not None
    assert state.layout[1] == Section("recurrent", 1, False, 4, (), (F32_ROW,) * 6)


@pytest.mark.parametrize("version", [3, 4])
def test_layout_does_not_depend_on_the_tokens(path: Path, version: int) -> None:
    def layout(n: int) -> tuple[Section, ...] | None:
        base = attention(n, version=version, is_v_transposed=True)
        window = attention(n - 1, first=1, version=version)
        sections = (base, window, recurrent(n - 1))
        return read(path, state_file(words(range(n)), *sections, version=version)).layout

    assert layout(3) is not None
    assert layout(3) == layout(40)


def test_read_of_a_legacy_token_list_tells_its_tokens(path: Path) -> None:
    state = read(path, state_file(legacy_words(TOKENS), attention(N)))
    assert (list(state.tokens), state.n_media) == (TOKENS, 0)
    assert state.has_every_position


def test_read_of_an_empty_slot_has_no_tokens(path: Path) -> None:
    assert len(read(path, state_file(words([]), attention(0))).tokens) == 0


def test_read_of_media_counts_them(path: Path) -> None:
    media = struct.pack("<III", 1, 8, 0) + b"\0" * 8
    state = read(path, state_file(words([5, -1, -1, 6, 7], media, n_media=1), attention(N)))
    assert (state.n_media, list(state.tokens)) == (1, [5, -1, -1, 6, 7])


@pytest.mark.parametrize("version", [1, 5, 77])
def test_read_of_an_unknown_version_is_opaque_but_knows_its_tokens(
    path: Path, version: int
) -> None:
    data = state_file(words(TOKENS), attention(N), POINTS, version=version)
    state = read(path, data)
    assert list(state.tokens) == TOKENS
    assert (state.layout, state.restore_points, state.has_every_position) == (None, (), False)
    assert state.state_end == len(data)


def test_read_of_an_unknown_composition_is_opaque_but_knows_its_tokens(path: Path) -> None:
    state = read(path, state_file(words(TOKENS), attention(N), b"\xff" * 40))
    assert list(state.tokens) == TOKENS
    assert (state.layout, state.has_every_position) == (None, False)


def test_read_of_more_cells_than_tokens_is_opaque(path: Path) -> None:
    assert read(path, state_file(words(TOKENS), attention(N + 1))).layout is None


def test_has_every_position_without_any_section_is_false(path: Path) -> None:
    assert not read(path, state_file(words(TOKENS))).has_every_position


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GGUF" + b"\0" * 40,
        state_file(words(TOKENS), magic=0x12345678),
        struct.pack("<IIII", 0x67677371, 4, 0x7FFFFFFF, 0),
        state_file(struct.pack("<4i", -1, 2, 0, 0)),
        state_file(struct.pack("<4i", -1, 1, 1, 0)),
        state_file(struct.pack("<4i", -1, 1, -1, 0)),
        state_file(struct.pack("<2i", -1, 1)),
    ],
    ids=["empty", "gguf", "magic", "huge", "payload version", "count", "negative", "short"],
)
def test_read_of_what_is_no_state_file_raises_malformed(path: Path, data: bytes) -> None:
    with pytest.raises(StateFileMalformed):
        read(path, data)


def test_read_of_tensors_without_end_is_opaque_and_reads_few(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with holes has any number of them for nothing."""
    path.write_bytes(state_file(words(TOKENS), struct.pack("<III", 0, 0, 2)))
    os.truncate(path, 1 << 20)
    numbers, n_read = Reader.numbers, count()

    def counted(reader: Reader, layout: str) -> tuple[int, ...]:
        next(n_read)
        return numbers(reader, layout)

    monkeypatch.setattr(Reader, "numbers", counted)
    assert read_state_file(path).sections is None and next(n_read) < 1000


def test_read_of_a_missing_file_raises_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        read_state_file(tmp_path / "gone")


def test_restore_point_of_a_sliding_window_lies_one_before_its_end(path: Path) -> None:
    # Measured: the point made at 1,484 tokens lets a sliding-window model continue at 1,483.
    appendix = context_checkpoints((1484, 972, 1483), (1996, 1484, 1995))
    state = read(path, state_file(words(TOKENS), attention(N), attention(2, first=3), appendix))
    assert state.restore_points == (1483, 1995)


def test_restore_point_of_a_recurrent_state_lies_at_its_end(path: Path) -> None:
    appendix = context_checkpoints((1996, 1995, 1995), (1484, 1483, 1483))
    state = read(path, state_file(words(TOKENS), recurrent(N - 1), appendix))
    assert state.restore_points == (1484, 1996)


def test_restore_points_of_an_unknown_appendix_version_are_none(path: Path) -> None:
    appendix = context_checkpoints((3, 2, 2), version=2)
    state = read(path, state_file(words(TOKENS), recurrent(N - 1), appendix))
    assert state.restore_points == ()
    assert state.layout is not None


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_read_of_a_file_cut_at_any_byte_never_tells_wrong_tokens(path: Path, name: str) -> None:
    data = state_file(words(TOKENS), *COMPOSITIONS[name])
    n_head = 12 + 4 * (N + 4)
    for n_bytes in range(len(data)):
        path.write_bytes(data[:n_bytes])
        try:
            state = read_state_file(path)
        except StateFileMalformed:
            assert n_bytes < n_head
            continue
        assert n_bytes >= n_head
        assert list(state.tokens) == TOKENS
        assert set(state.restore_points) <= {3, 4}


def test_restore_points_of_more_context_checkpoints_than_any_slot_keeps_are_none(
    path: Path,
) -> None:
    """A file of another machine may claim a million empty ones, which took seconds to read."""
    points = context_checkpoints(*[(5, 3, 5)] * 4097)
    path.write_bytes(state_file(words(range(6)), attention(6)) + points)
    assert read_state_file(path).restore_points == ()


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_restore_points_of_a_cut_appendix_are_all_or_none(path: Path, name: str) -> None:
    data = state_file(words(TOKENS), *COMPOSITIONS[name])
    for n_bytes in range(12 + 4 * (N + 4), len(data)):
        assert read(path, data[:n_bytes]).restore_points in ((), (3, 4))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(COMPOSITIONS)), st.data())
def test_read_of_a_file_with_changed_bytes_raises_nothing_but_malformed(
    path: Path, name: str, data: st.DataObject
) -> None:
    damaged = bytearray(state_file(words(TOKENS), *COMPOSITIONS[name]))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        state = read(path, bytes(damaged))
    except StateFileMalformed:
        return
    assert state.state_end <= len(damaged)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_read_of_random_sections_keeps_the_tokens(path: Path, sections: bytes) -> None:
    state = read(path, state_file(words(TOKENS), sections))
    assert list(state.tokens) == TOKENS
