"""When a dirty slot is worth a file."""

from dataclasses import replace
from typing import Any

import pytest

from proxy.core.cuts import SLACK_TOKENS
from proxy.core.model import Rule, RuleKind
from proxy.core.saving import (
    N_RETURNS,
    STEADY_SECONDS,
    at_savable_point,
    is_cut_at_risk,
    is_worth_saving,
    is_write_back_due,
)
from proxy.core.slots import Content, Empty, Known, Unknown, not_to_save
from proxy.core.tokens import FIRST_BLOCK_TOKENS
from tests.unit.builders import (
    ANY_PREFIX,
    END_ONLY,
    NAMESPACE,
    NOTHING,
    RESTORE_POINTS,
    run_of,
    steady,
)


def held(n_tokens: int, n_tail: int = 0, n_saved: int = 0, last_cut: int = 0) -> Known:
    return Known(run_of(n_tokens), NAMESPACE, n_tail, n_saved=n_saved, last_cut=last_cut)


@pytest.mark.parametrize("rule", [ANY_PREFIX, RESTORE_POINTS])
def test_write_back_of_unsaved_work_is_due(rule: Rule) -> None:
    assert is_write_back_due(rule, held(1000))
    assert is_write_back_due(rule, held(1000, n_tail=100, n_saved=1000))


@pytest.mark.parametrize("content", [Empty(), held(1000), Unknown()])
def test_write_back_without_a_rule_is_never_due(content: Content) -> None:
    assert not is_write_back_due(NOTHING, content)


def test_write_back_of_an_empty_slot_is_not_due() -> None:
    assert not is_write_back_due(ANY_PREFIX, Empty())


def test_write_back_of_a_slot_that_a_file_nearly_covers_is_not_due() -> None:
    assert not is_write_back_due(RESTORE_POINTS, held(1000, n_saved=1000 - SLACK_TOKENS))
    assert is_write_back_due(RESTORE_POINTS, held(1000, n_saved=999 - SLACK_TOKENS))


def test_write_back_of_what_is_not_to_be_saved_is_not_due() -> None:
    assert not is_write_back_due(ANY_PREFIX, not_to_save(held(1000)))
    assert not is_write_back_due(ANY_PREFIX, not_to_save(Unknown()))
    assert not_to_save(Empty()) == Empty()


def test_write_back_of_what_could_not_be_found_again_is_not_due() -> None:
    n_least = max(FIRST_BLOCK_TOKENS, SLACK_TOKENS + 1)
    assert not is_write_back_due(ANY_PREFIX, held(n_least - 1))
    assert is_write_back_due(ANY_PREFIX, held(n_least))


def test_write_back_of_an_unknown_slot_is_due_if_it_can_be_adopted() -> None:
    assert is_write_back_due(RESTORE_POINTS, Unknown(NAMESPACE))
    assert not is_write_back_due(RESTORE_POINTS, Unknown(NAMESPACE, can_be_adopted=False))


def test_write_back_of_what_may_be_any_tenants_is_not_due() -> None:
    assert not is_write_back_due(RESTORE_POINTS, Unknown())


def test_write_back_under_end_only_without_a_cut_is_not_due() -> None:
    assert not is_write_back_due(END_ONLY, held(1000))


def test_write_back_under_end_only_counts_up_to_the_cut() -> None:
    assert is_write_back_due(END_ONLY, held(1000, last_cut=900))
    assert not is_write_back_due(END_ONLY, held(1000, n_tail=500, last_cut=900, n_saved=900))


def test_write_back_under_end_only_of_a_state_within_the_window_is_not_due() -> None:
    rule = Rule(RuleKind.END_ONLY, end_holds_from=2200)
    assert not is_write_back_due(rule, held(3000, last_cut=2199))
    assert is_write_back_due(rule, held(3000, last_cut=2200))
    with_points = Rule(RuleKind.RESTORE_POINTS, end_holds_from=2200)
    assert is_write_back_due(with_points, held(1000)), "it is continued at its points"


def test_savable_point_under_end_only_is_the_last_cut_without_a_tail() -> None:
    content = at_savable_point(END_ONLY, held(1000, n_tail=7, last_cut=900))
    assert content.tokens == run_of(900) and content.n_tokens == 900


def test_savable_point_elsewhere_is_the_slot_as_it_stands() -> None:
    content = held(1000, n_tail=7, last_cut=900)
    assert at_savable_point(RESTORE_POINTS, content) is content
    assert at_savable_point(ANY_PREFIX, content) is content


def test_savable_point_under_end_only_keeps_the_places_before_it() -> None:
    content = Known(
        run_of(1000),
        NAMESPACE,
        restore_points=(295, 900, 995),
        header=300,
        turn_start=950,
        last_cut=900,
        marks=(500, 900, 920),
        conversation=bytes(24),
    )
    saved = at_savable_point(END_ONLY, content)
    assert (saved.header, saved.turn_start, saved.marks) == (300, 0, (500, 900))
    assert (saved.restore_points, saved.conversation) == ((295, 900), b"")


RATES = steady(500.0, 1e6)


def is_worth_it(content: Known, save_seconds: float) -> bool:
    return is_worth_saving(content, content.n_unsaved, round(save_seconds * 1e6), RATES)


def test_is_worth_saving_if_the_save_is_made_up_for_when_the_conversation_comes_back() -> None:
    grown = held(1000, n_saved=750)  # half a second
    limit = N_RETURNS * 0.5 + STEADY_SECONDS
    assert is_worth_it(grown, limit - 0.01)
    assert not is_worth_it(grown, limit + 0.1)


def test_is_worth_saving_for_the_first_time_if_a_single_return_makes_up_for_the_save() -> None:
    assert is_worth_it(held(250), 0.5)
    assert not is_worth_it(held(250), 0.6)


def test_is_worth_saving_counts_the_save_for_each_request_that_it_stalls() -> None:
    n_bytes = round(1e6 * (N_RETURNS * 0.5 + STEADY_SECONDS) / 2)
    for n_stalled, is_worth in ((1, True), (2, True), (3, False)):
        content = held(1000, n_saved=750)
        assert is_worth_saving(content, 250, n_bytes, RATES, n_stalled) == is_worth


def test_is_worth_saving_counts_no_more_than_the_slot_holds() -> None:
    assert is_worth_saving(held(1000), 5000, 2 * 10**6, RATES)
    assert not is_worth_saving(held(1000), 5000, 2 * 10**6 + 1, RATES)


N_KEPT = 16


def looped(n_calls: int, **fields: Any) -> Known:
    """Return a turn that began at 500 and has seen so many calls of its tool loop."""
    places: dict[str, Any] = {"header": 200, "turn_start": 500}
    points = (195, 495, *range(595, 595 + 100 * n_calls, 100))
    n_tokens = points[-1] + 5
    places |= {"restore_points": points, "possible_points": points}
    return Known(run_of(n_tokens), NAMESPACE, **(places | fields))


def is_at_risk(content: Content, rule: Rule = RESTORE_POINTS) -> bool:
    return is_cut_at_risk(rule, content, N_KEPT)


def test_place_at_risk_is_one_that_the_next_request_may_drop() -> None:
    n_newer = N_KEPT - 5  # beside it there are the header's and the three of the next request
    assert not is_at_risk(looped(n_newer - 1))
    assert is_at_risk(looped(n_newer))
    assert not is_at_risk(looped(n_newer, turn_start=0)), "the lowest one, the header's, stays"
    far = looped(n_newer, header=0)
    points = (195, 9000, *(point + 9000 for point in far.restore_points[2:]))
    far = replace(far, restore_points=points, possible_points=points, tokens=run_of(12_000))
    assert not is_at_risk(replace(far, turn_start=9005)), "it lies far behind the one before"


def test_place_at_risk_that_a_file_can_be_continued_at_is_safe() -> None:
    assert not is_at_risk(looped(20, saved_points=(195, 495)))
    assert not is_at_risk(looped(20, saved_points=(195, 500 - SLACK_TOKENS)))
    assert is_at_risk(looped(20, saved_points=(195, 500 - SLACK_TOKENS - 1)))


def test_place_at_risk_for_which_a_file_has_no_bytes_is_not_saved_again() -> None:
    """A short message begins where the turn before ended: a file keeps the point at the message's end."""
    mark = {"header": 200, "turn_start": 600, "marks": (500,)}
    assert is_at_risk(looped(20, saved_points=(195,), **mark))
    assert not is_at_risk(looped(20, saved_points=(195, 595, 2495), **mark))


def test_place_that_the_slot_has_lost_already_is_no_reason_to_save() -> None:
    points = tuple(range(2000, 3000, 50))
    content = Known(run_of(3000), NAMESPACE, restore_points=points, header=200, turn_start=500)
    assert not is_at_risk(content)


def test_place_at_risk_may_be_the_newest_mark() -> None:
    cuts = {"header": 0, "turn_start": 0}
    assert is_at_risk(looped(20, marks=(500,), **cuts))
    assert not is_at_risk(looped(20, marks=(500, 2590), **cuts))


@pytest.mark.parametrize("rule", [ANY_PREFIX, END_ONLY, NOTHING])
def test_place_is_never_at_risk_where_files_do_not_carry_points(rule: Rule) -> None:
    assert not is_at_risk(looped(20), rule)


@pytest.mark.parametrize("content", [Empty(), Unknown(), Unknown(NAMESPACE)])
def test_place_of_a_slot_that_is_not_known_is_not_at_risk(content: Content) -> None:
    assert not is_at_risk(content)
