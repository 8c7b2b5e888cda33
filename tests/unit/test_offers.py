"""Which of several llama-servers with the same model serves a request."""

from math import inf

import pytest

from proxy.core.model import Prompt
from proxy.core.residency import Offer, best_offer, make_offer
from proxy.core.slots import Empty
from tests.unit.builders import ANY_PREFIX, NAMESPACE, run_of
from tests.unit.situations import situation


def offer(seconds: float = 5.0, n_reused: int = 0, n_busy: int = 0, n_waiting: int = 0) -> Offer:
    return Offer(seconds, n_reused, load=(n_busy + n_waiting) / 2)


WAITING = inf

CASES = {
    "the quicker one": ([offer(5.0), offer(1.0)], 1),
    "the one that is hot": ([offer(0.0), offer(0.0, n_reused=4000)], 1),
    "the less busy one of two alike": ([offer(n_busy=1), offer()], 1),
    "the less busy one, for a few tokens more": ([offer(n_reused=30, n_busy=1), offer()], 1),
    "the hot one although it is busy": ([offer(0.2, n_reused=4000, n_busy=1), offer(5.0)], 0),
    "one with a free slot, however slow": ([offer(WAITING, n_reused=4000), offer(60.0)], 1),
    "the one with the shorter queue": ([offer(WAITING, 0, 2, 3), offer(WAITING, 0, 2, 1)], 1),
    "the one that holds it, queues alike": ([offer(WAITING, 9), offer(WAITING, 4000)], 1),
    "the first of two that are the same": ([offer(), offer()], 0),
}


@pytest.mark.parametrize("case", CASES)
def test_request_goes_to(case: str) -> None:
    offers, place = CASES[case]
    assert best_offer(offers) == place


def test_offer_is_worth_less_where_others_come_first() -> None:
    now, asked = situation(ANY_PREFIX, Empty(), Empty()), Prompt(run_of(1000), NAMESPACE)
    alone, beside_one, beside_two = (make_offer(asked, now, 0, n_ahead) for n_ahead in range(3))
    assert (alone.load, beside_one.load, beside_two.load) == (0, 0.5, 1)
    assert alone.seconds == beside_one.seconds < beside_two.seconds == WAITING
    assert best_offer([beside_one, alone]) == 1
