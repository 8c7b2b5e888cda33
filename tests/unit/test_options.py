"""The ways to start, and what they cost."""

import pytest

from proxy.core.model import SlotId
from proxy.core.plan import Displacement, Restore, StartOption
from proxy.core.slots import UseLive
from tests.unit.builders import checkpoint


def test_use_live_counts_on_the_least_that_will_be_reused() -> None:
    assert UseLive(80, n_at_most=90).n_reused == 80


def test_total_seconds_of_an_option_add_what_it_costs_others() -> None:
    start = UseLive()
    displacement = Displacement(n_lost=100, saves=True, delay_seconds=0.5, seconds=2.0)
    assert StartOption(SlotId(0), start, 3.0).total_seconds == 3.0
    assert StartOption(SlotId(0), start, 3.0, displacement).total_seconds == 5.0


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        (Restore(checkpoint(900), 900, 900), "restore"),
        (UseLive(1, 1), "live"),
        (UseLive(0, 900), "nothing"),
    ],
)
def test_kind_of_an_option_is_one_word(start: UseLive | Restore, kind: str) -> None:
    assert StartOption(SlotId(0), start, 1.0).kind == kind
