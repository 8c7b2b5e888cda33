"""The measure of how far a restored state is from a fresh one: real distributions, and what is left out."""

from math import log

import pytest

from tests.bench.divergence import Answer, kl_divergence, kls

HALF, QUARTER = log(0.5), log(0.25)


def test_kl_divergence_is_that_of_the_definition() -> None:
    left, right = {1: HALF, 2: HALF}, {1: QUARTER, 2: log(0.75)}
    assert kl_divergence(left, right) == pytest.approx(0.5 * log(2) + 0.5 * log(0.5 / 0.75))
    assert kl_divergence(left, left) == 0.0


def test_kl_divergence_counts_tokens_that_one_side_lacks_as_one_outcome() -> None:
    whole = {1: HALF, 2: QUARTER, 3: QUARTER}
    other = {1: QUARTER, 2: HALF, 3: QUARTER}
    bound = kl_divergence({1: HALF, 2: QUARTER}, {1: QUARTER, 3: QUARTER})
    assert 0 < bound == pytest.approx(0.5 * log(2) + 0.5 * log(0.5 / 0.75))
    assert bound < kl_divergence(whole, other)


def test_kls_end_at_the_first_token_that_differs() -> None:
    same = {1: HALF, 2: HALF}
    left = Answer((1, 1, 1), (same, same, same))
    assert len(list(kls(left, Answer((1, 2, 1), (same, same, same))))) == 2
    assert len(list(kls(left, left))) == 3
