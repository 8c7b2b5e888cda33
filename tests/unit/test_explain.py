"""Why no more was reused: each cause is told when it is so, and not when it is not."""

from dataclasses import replace

import pytest

from proxy.core.explaining.causes import Cause, Part
from proxy.core.explaining.divergence import Change
from proxy.core.explaining.explain import Past, Served, Verdict, judge, may_be_missed
from proxy.core.explaining.known_prompts import Loss
from proxy.core.model import NO_RULE, Rule, RuleKind
from proxy.core.planning.options import Why

POINTS, ANY = Rule(RuleKind.RESTORE_POINTS), Rule(RuleKind.ANY_PREFIX)
SERVED = Served(POINTS, Why.LIVE_LONGEST, 1000, 900, 900, n_shared=900, n_in_use=0)
KNOWN = Past(900, 900)
NOTHING = replace(SERVED, n_reused=0, n_expected=0, n_shared=0, why=Why.NOTHING_FOUND)
UNUSED = replace(NOTHING, n_shared=900)
DATE = Change(Cause.DATE, Part.SYSTEM, 0, 10)
NEW = Change(Cause.FIRST_SIGHT, Part.USER, 1, 10)


def cause(served: Served, past: Past = KNOWN, change: Change | None = None) -> Cause:
    return judge(served, past, change).cause


def test_what_was_reused_as_far_as_it_was_known_is_a_hit_and_what_is_new_is_first_sight() -> None:
    assert cause(SERVED) is Cause.HIT
    assert cause(replace(SERVED, n_reused=850)) is Cause.HIT
    assert cause(NOTHING, Past()) is Cause.FIRST_SIGHT
    assert cause(SERVED, KNOWN, NEW) is Cause.FIRST_SIGHT
    assert not may_be_missed(SERVED, KNOWN)


@pytest.mark.parametrize(
    ("served", "past", "expected"),
    [
        (NOTHING, replace(KNOWN, loss=Loss(Cause.EVICTED, 900)), Cause.EVICTED),
        (NOTHING, replace(KNOWN, loss=Loss(Cause.RESTORE_REFUSED, 800)), Cause.RESTORE_REFUSED),
        (NOTHING, replace(KNOWN, is_of_other_process=True), Cause.RESTART),
        (NOTHING, KNOWN, Cause.NOT_KEPT),
        (replace(NOTHING, rule=NO_RULE), KNOWN, Cause.NOTHING_RESTORABLE),
        (UNUSED, KNOWN, Cause.NO_STATE_THERE),
        (replace(UNUSED, n_in_use=900), KNOWN, Cause.IN_USE),
        (replace(UNUSED, why=Why.NOTHING_WORTH_IT), KNOWN, Cause.CHEAPER),
        (replace(UNUSED, rule=ANY), KNOWN, Cause.UNKNOWN),
        (replace(UNUSED, rule=NO_RULE), KNOWN, Cause.NOTHING_RESTORABLE),
    ],
)
def test_state_that_is_gone_or_not_used_is_named(
    served: Served, past: Past, expected: Cause
) -> None:
    assert judge(served, past, None) == Verdict(expected, 900)
    enough = replace(served, n_reused=900, n_shared=900)
    assert cause(enough, past) is Cause.HIT


def test_loss_of_less_than_what_is_still_there_explains_nothing() -> None:
    shorter = replace(KNOWN, loss=Loss(Cause.EVICTED, 300))
    kept = replace(NOTHING, n_reused=300, n_shared=300)
    assert cause(kept, shorter) is Cause.NOT_KEPT


def test_change_of_the_client_explains_what_would_have_been_reused_without_it() -> None:
    reused = replace(SERVED, n_reused=100, n_shared=100)
    assert judge(reused, Past(100, 900), DATE) == Verdict(Cause.DATE, 800)
    assert cause(reused, Past(100, 120), DATE) is Cause.HIT
    # A memory that cannot go back there has the state, and still the change is to blame.
    assert judge(UNUSED, KNOWN, DATE) == Verdict(Cause.DATE, 900)
    # Nobody could have gone on from what is gone, change or not.
    evicted = replace(KNOWN, loss=Loss(Cause.EVICTED, 900))
    assert cause(NOTHING, evicted, DATE) is Cause.EVICTED


@pytest.mark.parametrize(
    "failure", [Cause.RESTORE_REFUSED, Cause.RESTORE_NOT_REUSED, Cause.TOKENIZED_OTHERWISE]
)
def test_what_failed_comes_first(failure: Cause) -> None:
    failed = replace(UNUSED, failure=failure)
    assert cause(failed, replace(KNOWN, is_of_other_process=True), DATE) is failure
