"""How many context checkpoints a slot is believed to keep, until llama-server shows otherwise."""

import pytest

from proxy.core.model import Rule, RuleKind
from proxy.health import Degradations
from proxy.metrics import Metrics
from proxy.servers.attachment import Attachment
from tests.unit.desks import desk_of

POINTS = (500, 900, 1300, 1700)


@pytest.fixture
def attachment() -> Attachment:
    degradations = Degradations(Metrics()).at("")
    rule = Rule(RuleKind.RESTORE_POINTS)
    return Attachment("one process", "b1", desk_of(1), 4096, degradations, rule=rule)


def test_save_that_lacks_the_oldest_points_shrinks_the_number(attachment: Attachment) -> None:
    attachment.note_saved_points(POINTS, range(800, 1600, 100))
    assert attachment.n_believed_points == 2


def test_save_with_many_points_raises_the_number_again(attachment: Attachment) -> None:
    attachment.note_saved_points(POINTS, range(800, 1600, 100))
    attachment.note_saved_points((), range(100, 1700, 100))
    assert attachment.n_believed_points == 5


def test_save_with_every_point_changes_nothing(attachment: Attachment) -> None:
    attachment.note_saved_points(POINTS, POINTS)
    assert attachment.n_believed_points == 10


def test_point_that_is_gone_shrinks_the_number_to_those_that_are_newer(
    attachment: Attachment,
) -> None:
    attachment.note_missing_point(POINTS, 900)
    assert attachment.n_believed_points == 2


def test_end_that_is_gone_tells_nothing_of_points(attachment: Attachment) -> None:
    attachment.note_missing_point(POINTS, 1800)
    assert attachment.n_believed_points == 10
