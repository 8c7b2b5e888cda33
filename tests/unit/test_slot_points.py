"""Which context checkpoints a slot has, and how many it keeps."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.cuts import kept_after_save, points_after, points_made, stops_with_room
from proxy.core.model import Candidate
from proxy.serving.planning import counts_on_fewer, loaded
from tests.unit.builders import checkpoint

POINTS = (500, 900, 1300, 1700)
EIGHT, SIXTEEN = tuple(range(800, 1600, 100)), tuple(range(100, 1700, 100))


@pytest.mark.parametrize(
    ("points", "saved", "n_kept"),
    [
        (POINTS, EIGHT, 9),  # the oldest point is gone: llama-server had no room for a ninth
        (POINTS, (500, *EIGHT[2:]), 8),  # the one behind the lowest is gone
        ((500, 900, 1250), (500, 900, 1300, 1700), 32),
        ((), EIGHT, 32),
        (POINTS, POINTS, 32),
        ((500, 900, 1300), (504, 900, 1300), 32),  # the prediction was wrong by a few tokens
        ((10, 900, 1300), (300, 900, 1300), 32),  # there is none for a short prompt
        ((500, 900), (900, 901), 32),
    ],
)
def test_save_without_the_oldest_points_tells_how_many_there_are(
    points: tuple[int, ...], saved: tuple[int, ...], n_kept: int
) -> None:
    assert kept_after_save(32, points, saved) == n_kept


def test_save_with_more_points_than_were_believed_in_tells_of_the_default() -> None:
    assert kept_after_save(8, POINTS, SIXTEEN) == 32
    assert kept_after_save(16, POINTS, SIXTEEN) == 16


def test_points_are_made_near_the_end_and_a_batch_before_or_where_the_evaluation_begins() -> None:
    assert points_made(0, 9891, has_messages=False) == (9374, 9886)
    assert points_made(9300, 9891, has_messages=True) == (9374, 9376, 9886)
    assert points_made(9700, 9891, has_messages=False) == (9700, 9886)
    assert points_made(9889, 9891, has_messages=True) == (9889,)
    assert points_made(0, 9891, has_messages=True) == (1, 8194, 9374, 9376, 9886)
    assert points_made(0, 100, has_messages=False) == (95,)
    assert points_made(0, 4, has_messages=True) == ()


def test_user_messages_far_behind_the_point_before_count_as_points() -> None:
    """Templates write results of tool calls as user messages. Ten of them lie behind the header here."""
    header, newest = (1439, 1951), 31_787
    real: tuple[int, ...] = (
        *header,
        11_165,
        20_013,
        28_871,
        31_275,
        newest,
    )  # as llama-server 0.7.0 made them
    points = points_after(header, points_made(1955, newest + 4, has_messages=True), 16)
    assert (len(points), points[-1]) == (len(real) + 1, newest - 1)
    for n_from in range(31_800, 32_600, 200):
        made = (n_from, n_from + 100, n_from + 196)
        real, points = points_after(real, made, 16), points_after(points, made, 16)
        assert newest in real or newest - 1 not in points
    assert newest not in real, "it was dropped"


def test_points_near_the_one_before_go_first_and_the_lowest_stays() -> None:
    points: tuple[int, ...] = ()
    for n_from, n_to in ((0, 9891), (9891, 11013), (11013, 12037), (12037, 12549)):
        points = points_after(points, points_made(n_from, n_to, has_messages=False), 8)
    assert points == (9374, 10496, 11008, 11520, 12032, 12037, 12544)


def test_points_far_from_each_other_stay_until_the_slot_is_full() -> None:
    far = tuple(range(9000, 63_000, 9000))
    assert points_after(far, (55_000,), 8) == (*far, 55_000)
    assert points_after((*far, 55_000), (55_100,), 8) == (*far, 55_100)
    assert points_after((*far, 55_000), (55_100, 55_200), 8) == (*far, 55_100, 55_200)


def test_points_that_are_made_again_are_there_once() -> None:
    assert points_after((100, 200), (200, 300), 8) == (100, 200, 300)
    assert points_after((100, 200), (201, 203, 300), 8) == (100, 200, 203, 300)


@given(st.sets(st.integers(0, 60_000), max_size=32), st.integers(1, 3), st.integers(0, 32))
def test_points_of_a_slot_are_no_more_than_it_keeps_and_the_newest_is_among_them(
    held: set[int], n_new: int, n_kept: int
) -> None:
    made = range(70_000, 70_000 + 2 * n_new, 2)
    after = points_after(sorted(held)[:n_kept], made, n_kept)
    assert list(after) == sorted(set(after))
    assert len(after) <= n_kept
    assert set(after) <= held | set(made)
    assert (made[-1] in after) == (n_kept > 0)


def test_stops_have_room_beside_the_header_and_the_request_itself() -> None:
    expected = {0: 0, 6: 0, 8: 1, 16: 5, 32: 13}
    assert {n_kept: stops_with_room(n_kept) for n_kept in expected} == expected


@pytest.mark.parametrize(
    ("n_loaded", "points"), [(0, ()), (2, POINTS[-2:]), (4, POINTS), (32, POINTS)]
)
def test_newest_points_of_a_file_are_loaded(n_loaded: int, points: tuple[int, ...]) -> None:
    process: Any = SimpleNamespace(n_loaded_points=n_loaded)
    stored = Candidate(checkpoint(n_tokens=2000, restore_points=POINTS), 1500, is_warm=True)
    (candidate,) = loaded(process, [stored])
    assert candidate.checkpoint.restore_points == points
    assert (candidate.n_common, candidate.is_warm) == (1500, True)


def test_point_that_was_not_loaded_lowers_the_number_unless_as_many_were_written() -> None:
    process: Any = SimpleNamespace(n_loaded_points=32, n_written_points=4)
    many = checkpoint(n_tokens=2000, restore_points=tuple(range(100, 1300, 100)))
    assert counts_on_fewer(process, many, 100) and process.n_loaded_points == 6
    assert counts_on_fewer(process, many, 700) and process.n_loaded_points == 4
    assert not counts_on_fewer(process, many, 900), "four were written"
    process.n_written_points = 0
    assert counts_on_fewer(process, many, 1100) and process.n_loaded_points == 1
    assert not counts_on_fewer(process, many, 1200), "the newest one is always loaded"
    assert not counts_on_fewer(process, many, 2000), "no point was needed"
