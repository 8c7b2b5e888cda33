"""How many context checkpoints a slot keeps, and how many of them are believed in."""

import pytest

from proxy.core.slots import kept_after_save, n_believed_points

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


def test_save_with_many_points_raises_the_number_again() -> None:
    assert kept_after_save(8, POINTS, SIXTEEN) == 16


def test_newest_points_are_believed_in_as_far_as_one_request_may_not_have_dropped_them() -> None:
    believed = {0: 0, 1: 1, 2: 1, 3: 1, 8: 2, 32: 10}
    assert {n_kept: n_believed_points(n_kept) for n_kept in believed} == believed
