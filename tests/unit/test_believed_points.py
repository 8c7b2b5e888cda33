"""How many context checkpoints a slot is believed to keep, until llama-server shows otherwise."""

import pytest

from proxy.core.slots import believed_after_save

POINTS = (500, 900, 1300, 1700)
EIGHT, SIXTEEN = tuple(range(800, 1600, 100)), tuple(range(100, 1700, 100))


@pytest.mark.parametrize(
    ("points", "saved", "n_believed"),
    [
        (POINTS, EIGHT, 2),  # the oldest point is gone: llama-server keeps eight
        ((), EIGHT, 10),
        (POINTS, POINTS, 10),
        ((500, 900, 1300), (504, 900, 1300), 10),  # the prediction was wrong by a few tokens
        ((10, 900, 1300), (300, 900, 1300), 10),  # there is none for a short prompt
        ((500, 900), (900, 901), 10),
    ],
)
def test_save_without_the_oldest_points_shrinks_the_belief(
    points: tuple[int, ...], saved: tuple[int, ...], n_believed: int
) -> None:
    assert believed_after_save(10, points, saved) == n_believed


def test_save_with_many_points_raises_the_belief_again() -> None:
    assert believed_after_save(2, POINTS, SIXTEEN) == 5
