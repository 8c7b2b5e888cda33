"""Thinning and grafting: the file as if llama-server had written the points chosen, or untouched."""

import os
import resource
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.core.model import FilePart
from proxy.errors import StateFileMalformed
from proxy.llama import files as llama_files
from proxy.llama.files import read_state_file
from proxy.llama.state_edits import Source, select_context_checkpoints
from tests.unit.compositions import Composition, compositions
from tests.unit.state_files import (
    appendix,
    attention,
    compressed,
    context_checkpoint,
    draft_state,
    partial_state,
    parts_of,
    recurrent,
    select_points,
    state_file,
    words,
)

FILES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
WITH_CHECKPOINTS = compositions(("swa", "recurrent", "hybrid", "hybrid swa"), versions=(4,))
TOKENS = [11, 12, 13, 14, 15]
N = len(TOKENS)
STATE = (attention(N), recurrent(N - 1))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def donor(tmp_path: Path) -> Path:
    return tmp_path / "donor"


def select(
    path: Path, data: bytes, own: Collection[int], grafted: Mapping[int, Path]
) -> tuple[set[int], bytes]:
    path.write_bytes(data)
    before = {*path.parent.iterdir()}
    points = select_points(path, own, grafted)
    assert {*path.parent.iterdir()} == before
    return {*points}, path.read_bytes()


def entry(
    n_tokens: int, *sections: bytes, slot: int = 0, positions: tuple[int, int] | None = None
) -> bytes:
    """Return a context checkpoint of a hybrid model."""
    state = sections or (recurrent(n_tokens - 1),)
    lowest, highest = positions or (n_tokens - 1, n_tokens - 1)
    return context_checkpoint(n_tokens, lowest, highest, partial_state(*state, sequence=slot))


def hybrid(*entries: bytes, tokens: list[int] = TOKENS) -> bytes:
    """Return the file of a hybrid model with these context checkpoints."""
    return state_file(words(tokens), *STATE, *[appendix(*entries)] * bool(entries))


@FILES
@given(WITH_CHECKPOINTS, st.data(), st.integers(12, 80))
def test_selection_leaves_what_is_named_and_adds_what_donors_have(
    path: Path, composition: Composition, data: st.DataObject, part_bytes: int
) -> None:
    n_tokens, points = len(composition.tokens), st.sets(st.integers(2, 45))
    donors: list[Composition] = []
    wanted: dict[int, Composition] = {}
    for slot in (1, 2):
        earlier = composition.at(data.draw(st.integers(2, n_tokens)))
        has = sorted(data.draw(st.sets(st.integers(2, len(earlier.tokens)), max_size=5)))
        donors.append(replace(earlier, slot=slot, points=has))
        wanted |= dict.fromkeys(data.draw(points), donors[-1])
    own = data.draw(points)
    kept = [(p, composition) for p in composition.points if p in own | wanted.keys()]
    grafts = [(p, d) for p, d in wanted.items() if p in d.points and (p, composition) not in kept]
    files = {d.slot: path.with_name(f"donor {d.slot}") for d in donors}
    for one in donors:
        files[one.slot].write_bytes(one.write())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama_files, "PART_BYTES", part_bytes)
        paths = {point: files[one.slot] for point, one in wanted.items()}
        found, after = select(path, composition.write(), own, paths)
    assert found == {p for p, _ in kept + grafts}
    in_order = sorted(kept + grafts, key=lambda e: e[0])
    assert after == composition.write_with([one.entry(p) for p, one in in_order])
    assert all(files[one.slot].read_bytes() == one.write() for one in donors)


@pytest.mark.parametrize("own", [{2, 4}, {4, 2, 9}], ids=["all", "more than all"])
def test_selection_of_all_there_is_does_not_write(path: Path, own: set[int]) -> None:
    path.write_bytes(hybrid(entry(2), entry(4)))
    os.utime(path, ns=(7, 7))
    assert select_points(path, own, {}) == {2, 4}
    assert path.stat().st_mtime_ns == 7


def test_newest_of_several_with_the_same_restore_point_is_kept(path: Path) -> None:
    data = hybrid(entry(3, slot=1), entry(4), entry(3, slot=2), entry(2))
    assert select(path, data, {3}, {}) == ({3}, hybrid(entry(3, slot=2)))
    all_points = hybrid(entry(2), entry(3, slot=2), entry(4))
    assert select(path, data, {2, 3, 4}, {}) == ({2, 3, 4}, all_points)


def test_point_of_the_file_itself_is_not_taken_from_a_donor(path: Path, donor: Path) -> None:
    donor.write_bytes(hybrid(entry(3, slot=1)))
    data = hybrid(entry(2), entry(3, slot=2))
    assert select(path, data, set(), {3: donor}) == ({3}, hybrid(entry(3, slot=2)))


def test_selection_of_nothing_leaves_no_appendix_but_what_follows_it(path: Path) -> None:
    state = state_file(words(TOKENS), *STATE)
    data = state + appendix(entry(3)) + draft_state()
    assert select(path, data, set(), {}) == (set(), state + draft_state())


def test_restore_point_of_a_window_names_it_and_its_tokens_order_it(
    path: Path, donor: Path
) -> None:
    """A window's restore point lies one before its number of tokens."""

    def window(n_tokens: int) -> bytes:
        return entry(n_tokens, attention(n_tokens), positions=(0, n_tokens - 1))

    def file(*entries: bytes) -> bytes:
        return state_file(words(TOKENS), attention(N), attention(N), appendix(*entries))

    donor.write_bytes(file(window(3)))
    data = file(window(5), window(4))
    assert select(path, data, {4}, {2: donor}) == ({2, 4}, file(window(3), window(5)))


def indexed(*entries: bytes) -> bytes:
    first, index = (attention(N, has_v=False, row_bytes=size) for size in (8, 24))
    return state_file(words(TOKENS), first, recurrent(N - 1), index, appendix(*entries))


def test_graft_takes_a_recurrent_state_in_front_of_an_index(path: Path, donor: Path) -> None:
    donor.write_bytes(indexed(entry(3)))
    found, data = select(path, indexed(entry(4)), {4}, {3: donor})
    assert (found, data) == ({3, 4}, indexed(entry(3), entry(4)))


def test_graft_takes_what_a_context_checkpoint_has_of_compressed_keys(
    path: Path, donor: Path
) -> None:
    def file(*points: int) -> bytes:
        entries = (entry(n, compressed(n, is_partial=True)) for n in points)
        return state_file(words(TOKENS), compressed(N), appendix(*entries))

    donor.write_bytes(file(3))
    assert select(path, file(4), {4}, {3: donor}) == ({3, 4}, file(3, 4))


DONORS = {
    "gone": None,
    "no state file": b"GGUF" + bytes(60),
    "without the point": hybrid(entry(2)),
    "cut off": hybrid(entry(3))[:-1],
    "other tokens": hybrid(entry(3), tokens=[11, 12, 99, 14, 15]),
    "another model": state_file(words(TOKENS), attention(N, n_layers=3), STATE[1])
    + appendix(entry(3)),
    "version 3": state_file(words(TOKENS), attention(N, version=3), STATE[1], version=3)
    + appendix(entry(3)),
    "fewer layers": hybrid(entry(3, recurrent(2, n_with_state=2))),
    "other layers": hybrid(entry(3, recurrent(2, n_layers=5))),
    "a window": hybrid(entry(3, attention(3))),
    "no memory": hybrid(entry(3, b"")),
    "empty memory": hybrid(entry(3, struct.pack("<III", 0, 0, 4) + struct.pack("<iQ", 0, 16) * 6)),
    **{f"{n} bytes behind": hybrid(entry(3, recurrent(2), bytes(n))) for n in (1, 4, 12)},
    "no magic": hybrid(context_checkpoint(3, 2, 2, bytes(8) + recurrent(2))),
    "nothing": hybrid(context_checkpoint(3, 2, 2)),
    "a draft model's": hybrid(context_checkpoint(3, 2, 2, partial_state(recurrent(2)), b"x")),
    "positions upside down": hybrid(entry(3, positions=(4, 2))),
    "positions behind its tokens": hybrid(entry(3, positions=(2, 3))),
    "negative position": hybrid(entry(3, positions=(-1, 3))),
    "media": state_file(words(TOKENS, bytes(12), n_media=1), *STATE, appendix(entry(3))),
    "longer": state_file(words([*TOKENS, 16]), attention(N + 1), recurrent(N))
    + appendix(entry(N + 1, positions=(2, 3))),
}


@pytest.mark.parametrize("name", DONORS)
def test_graft_from_a_donor_that_does_not_fit_is_left_out_and_the_others_made(
    path: Path, donor: Path, name: str
) -> None:
    content, good = DONORS[name], donor.with_name("good")
    if content is not None:
        donor.write_bytes(content)
    good.write_bytes(hybrid(entry(2, slot=1)))
    found, data = select(path, hybrid(entry(4), entry(5)), {5}, {3: donor, 2: good})
    assert (found, data) == ({2, 5}, hybrid(entry(2, slot=1), entry(5)))


def test_graft_into_a_file_with_media_is_left_out(path: Path, donor: Path) -> None:
    donor.write_bytes(hybrid(entry(3)))
    data = state_file(words(TOKENS, bytes(12), n_media=1), *STATE)
    assert select(path, data, set(), {3: donor}) == (set(), data)


def test_graft_with_a_draft_models_state_goes_into_files_that_have_it(
    path: Path, donor: Path
) -> None:
    def drafted(n: int) -> bytes:
        return context_checkpoint(n, n - 1, n - 1, partial_state(recurrent(n - 1)), b"d" * n)

    donor.write_bytes(hybrid(drafted(3)))
    found, data = select(path, hybrid(drafted(4)), {4}, {3: donor})
    assert (found, data) == ({3, 4}, hybrid(drafted(3), drafted(4)))


UNKNOWN = {
    "damaged appendix": hybrid(entry(2), entry(4))[:-1],
    "newer appendix": state_file(words(TOKENS), *STATE, appendix(entry(2), version=2)),
    "second appendix": hybrid(entry(2)) + appendix(entry(4)),
    "opaque state": state_file(words(TOKENS), *STATE, b"\xff" * 40),
    "newer version": state_file(words(TOKENS), *STATE, version=5),
    "version 3": state_file(words(TOKENS), attention(N, version=3), STATE[1], version=3),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_file_whose_appendix_is_not_understood_is_left_alone(
    path: Path, donor: Path, name: str
) -> None:
    donor.write_bytes(hybrid(entry(3)))
    points = {2} if name == "second appendix" else set()
    assert select(path, UNKNOWN[name], set(), {3: donor}) == (points, UNKNOWN[name])


def test_selection_in_what_is_no_state_file_raises_malformed(path: Path) -> None:
    path.write_bytes(bytes(40))
    with pytest.raises(StateFileMalformed):
        select_points(path, {3}, {})


@contextmanager
def largest_file(n_bytes: int) -> Iterator[None]:
    """Let files grow no further, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_copy_of_what_is_not_what_it_was_raises_and_leaves_the_file_as_it_was(
    path: Path, donor: Path
) -> None:
    donor.write_bytes(hybrid(entry(3)))
    source, giver = Source(donor, parts_of(donor)), bytearray(donor.read_bytes())
    giver[-17] ^= 1  # the last byte of its state
    donor.write_bytes(giver)
    data = hybrid(entry(2), entry(4))
    path.write_bytes(data)
    with pytest.raises(StateFileMalformed, match="donor is not what was saved"):
        select_context_checkpoints(Source(path, parts_of(path)), {4}, {3: source})
    assert path.read_bytes() == data


def test_graft_from_a_file_with_one_checksum_for_all_of_it_is_left_out(
    path: Path, donor: Path
) -> None:
    donor.write_bytes(hybrid(entry(3)))
    whole = FilePart(donor.stat().st_size, xxhash.xxh3_128_digest(donor.read_bytes()))
    path.write_bytes(hybrid(entry(4)))
    own = parts_of(path)
    assert select_context_checkpoints(Source(path, own), {4}, {3: Source(donor, (whole,))}) == own


def test_full_disk_raises_os_error_and_leaves_nothing_behind(path: Path, donor: Path) -> None:
    large = 1 << 20
    state = recurrent(N - 1)[:20] + struct.pack("<iQ", 0, large) + bytes(large)
    whole = state_file(words(TOKENS), state + state[20:])
    donor.write_bytes(whole + appendix(entry(3, state + state[20:])))
    path.write_bytes(whole)
    with largest_file(len(whole) + large), pytest.raises(OSError):
        select_points(path, set(), {3: donor})
    assert path.read_bytes()[: len(whole)] == whole
    assert {*path.parent.iterdir()} == {path, donor}
    path.write_bytes(whole)
    assert select_points(path, set(), {3: donor}) == {3}


def test_state_in_front_is_neither_read_nor_copied(path: Path) -> None:
    """It is a hole of 64 GiB: whoever writes it fills it."""
    row_bytes, head = 1 << 33, struct.pack("<III", 1, N, 0)[:8]
    cells = b"".join(struct.pack("<iIi", position, 1, 0) for position in range(N))
    head += cells + struct.pack("<IIII", 0, 1, 0, 0) + struct.pack("<iQ", 1, row_bytes)
    with path.open("wb") as file:
        file.write(state_file(words(TOKENS), head))
        file.seek(N * row_bytes, os.SEEK_CUR)
        file.write(struct.pack("<iQ", 1, 0) + STATE[1] + appendix(entry(2), entry(4)))
    before, state = path.stat(), read_state_file(path)
    digests = xxhash.xxh3_128_digest(entry(2)), xxhash.xxh3_128_digest(entry(4))
    sizes = [state.state_end, 12, len(entry(2)), len(entry(4))]
    parts = [FilePart(*part) for part in zip(sizes, (b"unread", b"", *digests), strict=True)]
    thinned = select_context_checkpoints(Source(path, tuple(parts)), {4}, {})
    assert [thinned[0], thinned[2]] == [parts[0], parts[3]]
    after = path.stat()
    assert after.st_size == before.st_size - len(entry(2))
    assert after.st_ino == before.st_ino
    assert after.st_blocks <= before.st_blocks
