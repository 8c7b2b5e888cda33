"""Fetch or evaluate: what the bench calls the faster way."""

from tests.bench.shared.breakeven import Decision, Try


def test_one_noisy_evaluation_of_three_makes_no_choice_wrong() -> None:
    usual = Try(chosen=1.1, fetched=1.2, evaluated=1.0, did_fetch=False, gave_up=False)
    noisy = Try(chosen=1.6, fetched=1.2, evaluated=1.7, did_fetch=False, gave_up=False)
    assert Decision((noisy,)).ratio > 1.2
    assert Decision((noisy,)).is_close
    assert Decision((noisy, usual, usual)).ratio == 1.0


def test_what_was_chosen_mostly_is_the_choice() -> None:
    fetched = Try(chosen=1.0, fetched=1.0, evaluated=2.0, did_fetch=True, gave_up=False)
    evaluated = Try(chosen=2.0, fetched=1.0, evaluated=2.0, did_fetch=False, gave_up=False)
    assert Decision((fetched, evaluated, fetched)).is_right
    assert Decision((fetched, evaluated, evaluated)).ratio == 2.0
    assert not Decision((fetched,)).is_close


def test_a_transfer_given_up_counts_what_it_cost() -> None:
    late = Try(chosen=2.5, fetched=4.0, evaluated=2.0, did_fetch=False, gave_up=True)
    assert Decision((late,)).ratio == 1.25
