"""The end of the search among stored checkpoints."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.model import Candidate, CheckpointId, Rule, usable_tokens
from proxy.core.plan import N_CANDIDATES, most_useful, promising
from tests.unit.builders import END_ONLY, RESTORE_POINTS, candidate
from tests.unit.situations import MEASURED_RULES


def usable(rule: Rule, found: Candidate, n_prompt: int) -> int:
    return usable_tokens(rule, found.checkpoint, found.n_common, n_prompt)


@given(MEASURED_RULES, st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), max_size=8))
def test_promising_of_sorted_candidates_keeps_one_of_the_best(
    rule: Rule, shapes: list[tuple[int, int]]
) -> None:
    found = sorted(
        (
            candidate(n, min(n, n_common), restore_points=(n // 2,), has_every_position=n % 2 == 0)
            for n, n_common in shapes
        ),
        key=lambda c: -c.n_common,
    )
    best = max((usable(rule, each, 30) for each in found), default=0)
    kept = [usable(rule, each, 30) for each in promising(rule, found, 30)[0]]
    assert max(kept, default=0) == best
    assert all(kept)


def test_promising_stops_reading_when_nothing_longer_can_follow() -> None:
    def found() -> Any:
        yield candidate(1000, 1000)
        yield candidate(499, 499)
        raise AssertionError("read on")

    assert promising(END_ONLY, found(), 2000)[1] == 1000


def test_promising_of_too_many_keeps_the_limit() -> None:
    found = [candidate(1000, 1000, id=CheckpointId(i)) for i in range(N_CANDIDATES + 5)]
    assert len(promising(END_ONLY, found, 2000)[0]) == N_CANDIDATES


def test_most_useful_is_what_spares_most_and_not_what_shares_most() -> None:
    shares_most = candidate(5000, 900, id=CheckpointId(1), restore_points=(100,))
    spares_most = candidate(5000, 800, id=CheckpointId(2), restore_points=(700,))
    assert most_useful(RESTORE_POINTS, [shares_most, spares_most], 1000) == (
        700,
        spares_most.checkpoint,
    )


def test_most_useful_of_none_is_none() -> None:
    assert most_useful(END_ONLY, (), 1000) == (0, None)


@given(MEASURED_RULES, st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1))
def test_most_useful_of_anything_spares_as_much_as_any(
    rule: Rule, shapes: list[tuple[int, int]]
) -> None:
    found = [candidate(n, min(n, n_common), restore_points=(n // 2,)) for n, n_common in shapes]
    found.sort(key=lambda each: -each.n_common)
    n_best, best = most_useful(rule, found, 30)
    assert n_best == max(usable(rule, each, 30) for each in found)
    assert best in [each.checkpoint for each in found if usable(rule, each, 30) == n_best > 0] or (
        best is None and n_best == 0
    )
