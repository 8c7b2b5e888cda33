"""The ways to start, and what they cost."""

import pytest

from proxy.core.model import Candidate, SlotId
from proxy.core.plan import Displacement, Start
from tests.unit.builders import checkpoint

SLOT = SlotId(0)


def test_total_seconds_of_a_start_add_what_it_costs_others() -> None:
    displacement = Displacement(saves=True, delay_seconds=0.5, seconds=2.0)
    assert Start(SLOT, seconds=3.0).total_seconds == 3.0
    assert Start(SLOT, seconds=3.0, displacement=displacement).total_seconds == 5.0


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        (Start(SLOT, 900, 900, Candidate(checkpoint(900), 900)), "restore"),
        (Start(SLOT, 1, 1), "live"),
        (Start(SLOT, 0, 900), "nothing"),
    ],
)
def test_kind_of_a_start_is_one_word(start: Start, kind: str) -> None:
    assert start.kind == kind
