"""What a request takes from the slot it goes to."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.cuts import SLACK_TOKENS
from proxy.core.model import Prompt, Rule
from proxy.core.plan import HALF_LIFE_SECONDS, NOTHING_DISPLACED, Displacement, is_continued
from proxy.core.rates import Rates
from proxy.core.saving import N_RETURNS, is_write_back_due
from proxy.core.slots import Content, Empty, Known, Unknown, not_to_save
from proxy.core.tokens import TokenIds
from tests.unit.builders import (
    ANY_PREFIX,
    END_ONLY,
    NAMESPACE,
    NOTHING,
    OTHER_NAMESPACE,
    RESTORE_POINTS,
    branch,
    run_of,
    steady,
)
from tests.unit.situations import (
    LONG_TOKENS,
    MEASURED_RULES,
    SIZES,
    STEADY_RATES,
    displaced,
    known_contents,
)

RATES = steady(500.0, 1e6)


MOST = SLACK_TOKENS


def is_saved(content: Content, tokens: TokenIds, *, goes_on: bool = True) -> bool:
    """Return whether more than MOST unsaved tokens would be lost; a save costs nothing here."""
    prompt, n_reused = Prompt(tokens, NAMESPACE), 0 if goes_on else None
    return displaced(content, prompt, n_reused, ANY_PREFIX, RATES).saves


@pytest.mark.parametrize(
    "content", [Empty(), Unknown(), Known(run_of(999), NAMESPACE, n_saved=999)]
)
def test_where_nothing_is_unsaved_nothing_is_lost(content: Content) -> None:
    assert not is_saved(content, branch(0, 5))
    assert not is_saved(content, branch(0, 5), goes_on=False)


@pytest.mark.parametrize(("n_lost", "saves"), [(MOST, False), (MOST + 1, True)])
def test_what_counts_as_lost(n_lost: int, saves: bool) -> None:
    partly = Known(run_of(1000), NAMESPACE, n_saved=1000 - n_lost)
    assert is_saved(replace(partly, tenant=OTHER_NAMESPACE), run_of(2000)) is saves
    assert is_saved(partly, branch(600, 2000)) is saves
    assert is_saved(Known(run_of(1000), NAMESPACE), branch(1000 - n_lost, 2000)) is saves
    filled_anew = replace(partly, tokens=branch(50, 1000))
    assert is_saved(filled_anew, run_of(2000), goes_on=False) is saves


def test_a_slot_that_is_continued_loses_nothing() -> None:
    assert not is_saved(Known(run_of(1000), NAMESPACE, n_tail=500), run_of(2000))


def test_a_turn_that_moves_on_loses_nothing() -> None:
    dropped_reasoning = Known(run_of(1000), NAMESPACE, turn_start=600)
    assert not is_saved(dropped_reasoning, branch(600, 1200))
    assert is_saved(dropped_reasoning, branch(300, 1200))


def test_a_brief_question_in_another_conversation_goes_on_with_nothing() -> None:
    asked = Known(run_of(1000), NAMESPACE, n_tail=500, conversation=b"one".ljust(16))
    brief = Prompt(branch(990, 1000), NAMESPACE, conversation=b"two".ljust(16))
    assert not is_continued(asked, brief, 990)
    assert not is_continued(replace(asked, turn_start=995), replace(brief, conversation=b""), 990)


def test_a_conversation_that_moves_on_elsewhere_loses_nothing() -> None:
    held = Known(run_of(1000), NAMESPACE, n_saved=400)
    assert not is_saved(held, run_of(2000), goes_on=False)


def moved_out(
    content: Content,
    rule: Rule = RESTORE_POINTS,
    *,
    size_bytes: int = 1000,
    idle_seconds: float = 0.0,
    rates: Rates = RATES,
) -> Displacement:
    """Return what it costs a slot's owner that a request of somebody else's takes it."""
    stranger = Prompt(branch(0, 500), NAMESPACE)
    return displaced(content, stranger, None, rule, rates, size_bytes, idle_seconds)


@pytest.mark.parametrize("content", [Empty(), Unknown(), Unknown(NAMESPACE)])
def test_displace_of_what_nobody_knows_costs_nothing(content: Content) -> None:
    assert moved_out(content) == NOTHING_DISPLACED


def test_displace_of_unsaved_work_saves_it_and_brings_it_back_some_time() -> None:
    made = moved_out(Known(run_of(1000), NAMESPACE), size_bytes=250_000)
    assert made == Displacement(saves=True, delay_seconds=0.25, seconds=0.5)


def test_displace_of_saved_work_costs_a_restore_only() -> None:
    made = moved_out(Known(run_of(1000), NAMESPACE, n_saved=1000), size_bytes=250_000)
    assert made == Displacement(seconds=0.25)


def test_displace_of_what_is_not_to_be_saved_costs_evaluating_it_again() -> None:
    made = moved_out(not_to_save(Known(run_of(1000), NAMESPACE)), size_bytes=250_000)
    assert made == Displacement(seconds=2.0)


def test_displace_of_partly_saved_work_costs_a_restore_and_evaluating_the_rest() -> None:
    partly = Known(run_of(1000), NAMESPACE, n_saved=400, is_given_up=True)
    made = moved_out(partly, size_bytes=250_000)
    assert not made.saves and made.seconds == pytest.approx(0.25 + 600 / 500)


def test_displace_of_what_no_rule_can_bring_back_costs_evaluating_it_again() -> None:
    made = moved_out(Known(run_of(1000), NAMESPACE), NOTHING)
    assert made == Displacement(seconds=2.0)


def test_displace_of_little_unsaved_work_does_not_save_it() -> None:
    held = Known(run_of(1000), NAMESPACE, n_saved=1000 - MOST)
    assert not moved_out(held).saves
    assert moved_out(replace(held, n_saved=held.n_saved - 1)).saves


def test_displace_does_not_save_what_is_evaluated_in_less_time() -> None:
    """A later save happens once and what it holds is missing each time; the first may be for nothing."""
    grown = Known(run_of(1500), NAMESPACE, n_saved=1000)
    limit_bytes = N_RETURNS * 10**6
    assert moved_out(grown, size_bytes=limit_bytes).saves
    assert not moved_out(grown, size_bytes=2 * limit_bytes).saves
    new = Known(run_of(500), NAMESPACE)
    assert moved_out(new, size_bytes=10**6).saves
    assert not moved_out(new, size_bytes=10**6 + 1).saves


def test_displace_under_end_only_does_not_count_on_a_save_without_a_cut() -> None:
    held = Known(run_of(1000), NAMESPACE)
    assert moved_out(held, END_ONLY) == Displacement(seconds=2.0)
    assert moved_out(replace(held, last_cut=900), END_ONLY).saves


def test_displace_counts_half_of_what_comes_later_after_a_half_life() -> None:
    held = Known(run_of(1000), NAMESPACE)
    made = moved_out(held, size_bytes=250_000, idle_seconds=HALF_LIFE_SECONDS)
    assert (made.delay_seconds, made.seconds) == (0.25, 0.375)


def test_displace_that_goes_on_costs_what_it_does_not_keep() -> None:
    held = Known(run_of(1000), NAMESPACE, n_saved=1000)
    branching = Prompt(branch(600, 1200), NAMESPACE)
    made = displaced(held, branching, 600, ANY_PREFIX, RATES, 10**9)
    assert made == Displacement(seconds=0.8)


def test_displace_that_goes_on_saves_only_for_what_it_does_not_keep() -> None:
    """A save that pays for 1,000 tokens does not pay for the last 200 of them."""
    unsaved, most_bytes = Known(run_of(1000), NAMESPACE), 10**6
    branching = Prompt(branch(800, 1200), NAMESPACE)
    assert displaced(unsaved, branching, None, ANY_PREFIX, RATES, most_bytes).saves
    assert not displaced(unsaved, branching, 800, ANY_PREFIX, RATES, most_bytes).saves
    assert displaced(unsaved, branching, 800, ANY_PREFIX, RATES, most_bytes // 5).saves


HELD = known_contents(LONG_TOKENS)
N_KEPT = st.one_of(st.none(), st.integers(0, 2000))


@given(HELD, LONG_TOKENS, N_KEPT, MEASURED_RULES, SIZES, STEADY_RATES)
def test_displace_of_anything_saves_only_what_a_save_can_bring_back(
    content: Known, tokens: TokenIds, n_kept: int | None, rule: Rule, size_bytes: int, rates: Rates
) -> None:
    made = displaced(content, Prompt(tokens, NAMESPACE), n_kept, rule, rates, size_bytes)
    assert made.saves <= (rule.can_restore and is_write_back_due(rule, content))
    assert made.saves <= (content.n_unsaved > MOST)
    assert (made.delay_seconds > 0) <= made.saves
    assert 0 <= made.delay_seconds <= made.seconds


@given(LONG_TOKENS, st.integers(0, 3000), st.integers(0, 99), MEASURED_RULES, SIZES, STEADY_RATES)
def test_displace_of_a_conversation_that_moves_on_costs_nothing(
    held: TokenIds, n_more: int, n_tail: int, rule: Rule, size_bytes: int, rates: Rates
) -> None:
    content = Known(held, NAMESPACE, n_tail)
    prompt = Prompt(held + run_of(n_more), NAMESPACE)
    assert is_continued(content, prompt, len(held))
    made = displaced(content, prompt, len(held), rule, rates, size_bytes)
    assert made == NOTHING_DISPLACED


@given(HELD, LONG_TOKENS, N_KEPT, MEASURED_RULES, SIZES, STEADY_RATES, *[st.floats(0, 1e6)] * 2)
def test_displace_of_what_has_been_idle_longer_never_costs_more(
    content: Known,
    tokens: TokenIds,
    n_kept: int | None,
    rule: Rule,
    size_bytes: int,
    rates: Rates,
    idle_seconds: float,
    more_seconds: float,
) -> None:
    prompt = Prompt(tokens, NAMESPACE)
    early = displaced(content, prompt, n_kept, rule, rates, size_bytes, idle_seconds)
    idle_seconds += more_seconds
    later = displaced(content, prompt, n_kept, rule, rates, size_bytes, idle_seconds)
    assert later.seconds <= early.seconds
    assert replace(later, seconds=0.0) == replace(early, seconds=0.0)
