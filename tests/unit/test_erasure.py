"""What a slot may not be reused with."""

import pytest

from proxy.core.model import Rule
from proxy.core.slots import Content, Empty, Known, Origin, Unknown, must_be_erased
from tests.unit.builders import (
    ANY_PREFIX,
    END_ONLY,
    NAMESPACE,
    NOTHING,
    OTHER_NAMESPACE,
    RESTORE_POINTS,
    run_of,
)


@pytest.mark.parametrize(
    ("content", "is_foreign"),
    [
        (Empty(), False),
        (Known(run_of(3), NAMESPACE), False),
        (Known(run_of(3), OTHER_NAMESPACE), True),
        (Unknown(NAMESPACE), False),
        (Unknown(OTHER_NAMESPACE), True),
        (Unknown(None), True),
    ],
)
def test_must_be_erased_what_may_be_foreign(content: Content, is_foreign: bool) -> None:
    assert must_be_erased(RESTORE_POINTS, content, NAMESPACE) is is_foreign


RESTORED = Known(run_of(900), NAMESPACE, origin=Origin(600))


@pytest.mark.parametrize(
    ("content", "n_common", "must_be"),
    [
        (RESTORED, 900, False),
        (RESTORED, 600, False),
        (RESTORED, 599, True),
        (RESTORED, 0, True),
        (RESTORED, None, True),
        (Known(run_of(900), NAMESPACE), 599, False),
        (Known(run_of(900), NAMESPACE), None, False),
        (Unknown(NAMESPACE, origin=Origin(600)), 900, True),
        (Unknown(NAMESPACE), 900, False),
        (Empty(), None, False),
        (Known(run_of(900), OTHER_NAMESPACE), 900, True),
    ],
)
def test_must_be_erased_what_would_be_cut_before_the_end_of_a_restored_state(
    content: Content, n_common: int | None, must_be: bool
) -> None:
    assert must_be_erased(END_ONLY, content, NAMESPACE, n_common) is must_be


@pytest.mark.parametrize("rule", [ANY_PREFIX, NOTHING])
def test_must_be_erased_what_lacks_positions_whatever_shorter_probes_have_shown(rule: Rule) -> None:
    assert must_be_erased(rule, RESTORED, NAMESPACE, 100)
    assert not must_be_erased(rule, RESTORED, NAMESPACE, 600)


def test_must_be_erased_is_nothing_that_the_server_refuses_to_cut_itself() -> None:
    assert not must_be_erased(RESTORE_POINTS, RESTORED, NAMESPACE, 100)
