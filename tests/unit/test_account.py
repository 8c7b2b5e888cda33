"""What a request reused, held against its plan."""

from dataclasses import replace

import pytest

from proxy.core.cuts import Stop
from proxy.core.model import Candidate, SlotId
from proxy.core.plan import Displacement, Plan, Start
from proxy.core.rates import Rates
from proxy.explain.judgement import Account
from proxy.llama.client import Timings
from tests.unit.builders import checkpoint

RESTORE = Start(SlotId(1), 900, 900, Candidate(checkpoint(900), 900))
LIVE = Start(SlotId(0), 800, 850)


def account(start: Start, *replies: Timings) -> Account:
    result = Account(Plan(start), n_prompt=1000)
    for timings in replies:
        result.add(timings, Rates())
    return result


def test_account_of_several_replies_counts_the_first_ones_reuse_and_all_evaluation() -> None:
    kept = account(LIVE, Timings(800, 50), Timings(850, 150))
    assert (kept.n_reused, kept.n_evaluated) == (800, 200)


@pytest.mark.parametrize(
    ("start", "n_reused", "outcome"),
    [
        (RESTORE, 900, "hit"),
        (RESTORE, 500, "partial"),
        (RESTORE, 0, "miss"),
        (LIVE, 800, "hit"),
        (LIVE, 798, "partial"),
        (RESTORE, 65, "partial"),
        (RESTORE, 64, "miss"),
        (Start(SlotId(0), 15, 15), 15, "miss"),
        (Start(SlotId(0)), 0, "miss"),
    ],
)
def test_outcome_is_what_the_reply_confirms(start: Start, n_reused: int, outcome: str) -> None:
    assert account(start, Timings(n_reused, 1000 - n_reused)).outcome == outcome


@pytest.mark.parametrize(("n_reused", "outcome"), [(7, "miss"), (8, "hit")])
def test_half_of_a_short_prompt_is_no_hit(n_reused: int, outcome: str) -> None:
    short = Account(Plan(Start(SlotId(0), n_reused, n_reused)), n_prompt=14)
    short.add(Timings(n_reused, 14 - n_reused), Rates())
    assert short.outcome == outcome


def test_time_that_a_reply_does_not_tell_is_that_of_the_measured_speeds() -> None:
    measured = Rates().after_evaluation(0, 1000, 2.0)
    kept = Account(Plan(LIVE, (Stop(900),)), n_prompt=1000)
    kept.add(Timings(800, 100, prompt_ms=500), measured)
    kept.add(Timings(900, 100), measured)
    assert kept.evaluation_seconds == 0.5 + measured.evaluation_seconds(900, 1000) > 0.5
    assert account(LIVE, Timings(800, 200)).evaluation_seconds == 0, "no speed was measured"


def test_nothing_saved_has_no_minus() -> None:
    kept = account(Start(SlotId(0)), Timings(0, 1000))
    kept.restore_seconds = 1e-6
    kept.value(Rates().after_evaluation(0, 1000, 2.0), 0.0)
    assert str(kept.saved_seconds) == "0.0"


@pytest.mark.parametrize(("prompt_ms", "saved_seconds"), [(60, 0.9), (600, 5.0), (0, 5.0)])
def test_saved_seconds_are_no_more_than_its_own_evaluation_bears_out(
    prompt_ms: float, saved_seconds: float
) -> None:
    """The speeds may be from a brief prompt that was evaluated beside another one."""
    slow = Rates().after_evaluation(0, 128, 0.75)
    kept = Account(Plan(LIVE), n_prompt=1000)
    kept.add(Timings(960, 40, prompt_ms=prompt_ms), slow)
    kept.restore_seconds = 0.54
    kept.value(slow, 0.0)
    assert kept.saved_seconds == pytest.approx(saved_seconds, rel=0.03)


def test_outcome_without_any_reply_is_a_miss() -> None:
    assert account(RESTORE).outcome == "miss"
    assert not account(RESTORE).is_ineffective_restore


def test_outcome_of_a_degraded_request_is_degraded_and_accuses_nobody() -> None:
    kept = account(RESTORE, Timings(950, 50))
    kept.is_degraded = True
    assert kept.outcome == "degraded"
    assert not kept.is_drift and not kept.is_ineffective_restore


def test_ineffective_restore_is_one_that_was_reused_more_than_a_token_less_than_planned() -> None:
    assert account(RESTORE, Timings(898, 102)).is_ineffective_restore
    assert not account(RESTORE, Timings(899, 101)).is_ineffective_restore
    assert not account(LIVE, Timings(0, 1000)).is_ineffective_restore


def test_drift_is_more_reuse_than_the_slot_was_believed_to_allow() -> None:
    assert account(RESTORE, Timings(901, 99)).is_drift
    assert not account(LIVE, Timings(850, 150)).is_drift
    assert account(LIVE, Timings(851, 149)).is_drift


def test_short_is_less_reuse_by_more_than_a_token_than_a_live_slot_was_believed_to_hold() -> None:
    assert account(LIVE, Timings(798, 202)).is_short
    assert not account(LIVE, Timings(799, 201)).is_short
    assert not account(RESTORE, Timings(0, 1000)).is_short


def test_restored_tokens_are_those_that_a_reply_confirms() -> None:
    assert account(RESTORE, Timings(900, 100)).n_restored == 900
    assert account(RESTORE, Timings(500, 500)).n_restored == 500
    assert account(RESTORE).n_restored == 0
    assert account(LIVE, Timings(800, 200)).n_restored == 0
    degraded = account(RESTORE, Timings(900, 100))
    degraded.is_degraded = True
    assert degraded.n_restored == 0


def test_description_tells_what_was_chosen_and_what_else_there_was() -> None:
    start = replace(RESTORE, seconds=0.25)
    others = (
        replace(LIVE, seconds=0.4, displacement=Displacement(seconds=1.0)),
        Start(SlotId(2), seconds=2.0),
    )
    kept = Account(Plan(start, (Stop(950),), alternatives=others), n_prompt=1000)
    kept.add(Timings(900, 50), Rates())
    kept.add(Timings(950, 50), Rates())
    told = kept.describe()
    assert (told["chosen"], told["slot"], told["stops"]) == ("restore", 1, (950,))
    assert (told["expected"], told["confirmed"], told["evaluated"]) == (900, 900, 100)
    assert told["expected_seconds"] == 0.25
    assert told["alternatives"] == (
        "live 800 in slot 0: 0.400 s + 1.000 s displaced",
        "nothing in slot 2: 2.000 s",
    )
