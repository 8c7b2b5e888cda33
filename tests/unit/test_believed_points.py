"""How many context checkpoints a slot keeps, and how many of them are believed in."""

from types import SimpleNamespace
from typing import Any

import pytest

from proxy.core.model import Candidate
from proxy.core.slots import kept_after_save, n_believed_points
from proxy.serving.planning import counts_on_fewer, loaded
from tests.unit.builders import checkpoint

POINTS = (500, 900, 1300, 1700)
EIGHT, SIXTEEN = tuple(range(800, 1600, 100)), tuple(range(100, 1700, 100))


@pytest.mark.parametrize(
    ("points", "saved", "n_kept"),
    [
        (POINTS, EIGHT, 8),  # the oldest point is gone: llama-server keeps eight
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


def test_newest_points_are_believed_in_as_far_as_one_request_may_not_have_dropped_them() -> None:
    believed = {0: 0, 1: 1, 2: 1, 3: 1, 8: 2, 32: 10}
    assert {n_kept: n_believed_points(n_kept) for n_kept in believed} == believed


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
    assert counts_on_fewer(process, many, 100) and process.n_loaded_points == 8
    assert counts_on_fewer(process, many, 500) and process.n_loaded_points == 7
    assert not counts_on_fewer(process, many, 900), "four were written"
    process.n_written_points = 0
    assert counts_on_fewer(process, many, 1100) and process.n_loaded_points == 1
    assert not counts_on_fewer(process, many, 1200), "the newest one is always loaded"
    assert not counts_on_fewer(process, many, 2000), "no point was needed"
