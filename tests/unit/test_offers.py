"""Which of several llama-servers with the same model serves a request."""

from math import inf

import pytest

from proxy.core.residency import Offer, best_offer


def offer(seconds: float = 5.0, n_reused: int = 0, n_busy: int = 0, n_waiting: int = 0) -> Offer:
    return Offer(seconds, n_reused, n_busy, n_waiting, n_slots=2)


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


def test_offer_is_worth_less_beside_others_who_come_first() -> None:
    assert offer(n_busy=1).beside(0) == offer(n_busy=1)
    assert offer().beside(1) == offer(n_waiting=1)
    assert offer(n_busy=1).beside(1) == offer(WAITING, n_busy=1, n_waiting=1)
    assert best_offer([offer().beside(1), offer()]) == 1
