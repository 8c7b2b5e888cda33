"""Waiting for a state that somebody else is about to have."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.model import Candidate, ExpectedState, Prompt, Rule, RuleKind, SlotId, usable_tokens
from proxy.core.plan import WORTH_WAITING_SHARE, WORTH_WAITING_TOKENS, expected_tokens, plan_request
from proxy.core.slots import Content, Empty, Known, Slot, SlotPhase
from proxy.core.tokens import TokenIds
from tests.unit.builders import (
    ANY_PREFIX,
    END_ONLY,
    NAMESPACE,
    NOTHING,
    OTHER_NAMESPACE,
    RESTORE_POINTS,
    branch,
    candidate,
    checkpoint,
    run_of,
    steady,
)
from tests.unit.situations import MEASURED_RULES, TINY_TOKENS, found_for, points_within, situation


def coming(tokens: TokenIds, seconds: float = 1.0, **changes: Any) -> ExpectedState:
    made = ExpectedState(tokens, NAMESPACE, seconds, 10**6)
    return replace(made, **changes)


def waits(rule: Rule, prompt: TokenIds, *contents: Content, **changes: Any) -> bool:
    """Return whether a prompt waits although a slot is free; 500 tokens a second, restores a second."""
    now = situation(rule, *contents, **({"rates": steady(500.0, 1e6)} | changes))
    assert any(not slot.is_leased for slot in now.slots)
    return plan_request(Prompt(prompt, NAMESPACE), now) is None


@pytest.mark.parametrize("rule", [ANY_PREFIX, RESTORE_POINTS, END_ONLY])
def test_plan_waits_for_a_header_that_another_request_is_evaluating(rule: Rule) -> None:
    """Ten seconds alone; behind the other's header one to wait, one to restore and two to evaluate."""
    assert waits(rule, run_of(5000), Empty(), expected=(coming(run_of(4000)),))


ALONE_SECONDS = 10.0


@pytest.mark.parametrize("rule", [ANY_PREFIX, RESTORE_POINTS, END_ONLY])
def test_plan_does_not_wait_where_that_takes_much_longer(rule: Rule) -> None:
    """Two evaluate the same header side by side at half the speed, so some patience pays."""
    most_seconds = WORTH_WAITING_SHARE * ALONE_SECONDS - 3.0
    soon, late = coming(run_of(4000), most_seconds - 0.1), coming(run_of(4000), most_seconds + 0.1)
    assert waits(rule, run_of(5000), Empty(), expected=(soon,))
    assert not waits(rule, run_of(5000), Empty(), expected=(late,))
    assert waits(rule, run_of(5000), Empty(), expected=(late, soon))


def test_plan_does_not_wait_where_nothing_can_be_restored() -> None:
    assert not waits(NOTHING, run_of(5000), Empty(), expected=(coming(run_of(4000)),))


def test_plan_does_not_wait_for_a_state_that_costs_much_more_to_restore_than_to_evaluate() -> None:
    huge_bytes = int(1e6 * WORTH_WAITING_SHARE * ALONE_SECONDS)
    huge = coming(run_of(4000), size_bytes=huge_bytes)
    assert not waits(END_ONLY, run_of(5000), Empty(), expected=(huge,))


def test_plan_does_not_wait_for_what_a_free_slot_or_a_checkpoint_holds_already() -> None:
    state = coming(run_of(4000))
    held = Known(run_of(4000), NAMESPACE)
    assert not waits(END_ONLY, run_of(5000), held, expected=(state,))
    stored = candidate(4000, 4000)
    assert not waits(END_ONLY, run_of(5000), Empty(), expected=(state,), candidates=(stored,))
    nearly = Known(run_of(4000 - WORTH_WAITING_TOKENS), NAMESPACE)
    assert not waits(END_ONLY, run_of(4100), nearly, expected=(state,))


def test_plan_does_not_wait_for_another_tenants_state() -> None:
    theirs = coming(run_of(4000), namespace=OTHER_NAMESPACE)
    assert not waits(ANY_PREFIX, run_of(5000), Empty(), expected=(theirs,))


def test_plan_waits_for_a_slot_that_is_being_saved_and_holds_far_more() -> None:
    closing = Slot(SlotId(0), Known(run_of(900), NAMESPACE), phase=SlotPhase.CLOSING)
    free = Slot(SlotId(1), Empty())
    assert waits(ANY_PREFIX, run_of(1000), slots=(closing, free))
    assert not waits(
        ANY_PREFIX, run_of(1000), slots=(replace(closing, phase=SlotPhase.PREPARING), free)
    )
    assert not waits(ANY_PREFIX, branch(WORTH_WAITING_TOKENS, 1000), slots=(closing, free))


def test_usable_tokens_of_a_coming_state_that_diverges_are_those_up_to_a_point() -> None:
    state = coming(run_of(1000), restore_points=(300, 700))
    prompt = Prompt(branch(600, 2000), NAMESPACE)
    assert expected_tokens(prompt, ANY_PREFIX, state) == 600
    assert expected_tokens(prompt, RESTORE_POINTS, state) == 300
    assert expected_tokens(prompt, END_ONLY, state) == 0
    assert expected_tokens(prompt, NOTHING, state) == 0


def test_usable_tokens_of_a_coming_state_within_the_window_are_none_at_its_end() -> None:
    state = replace(coming(run_of(1000)), has_every_position=False)
    prompt = Prompt(run_of(2000), NAMESPACE)
    assert expected_tokens(prompt, Rule(RuleKind.END_ONLY, 1000), state) == 1000
    assert expected_tokens(prompt, Rule(RuleKind.END_ONLY, 1001), state) == 0


@given(MEASURED_RULES, TINY_TOKENS, TINY_TOKENS, st.data())
def test_usable_tokens_of_a_coming_state_are_those_of_the_checkpoint_it_becomes(
    rule: Rule, tokens: TokenIds, asked: TokenIds, data: st.DataObject
) -> None:
    points = data.draw(points_within(len(tokens)))
    has_every_position = rule.kind is RuleKind.ANY_PREFIX
    saved = checkpoint(len(tokens), restore_points=points, has_every_position=has_every_position)
    [found] = found_for(asked, [(Candidate(saved, 0), tokens)])
    expected = usable_tokens(rule, saved, found.n_common, len(asked))
    state = coming(tokens, restore_points=points, has_every_position=has_every_position)
    assert expected_tokens(Prompt(asked, NAMESPACE), rule, state) == expected
