"""Where a prompt is stopped on the way, and what is saved there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.cuts import SLACK_TOKENS, Stop, choose_stops, is_covered
from proxy.core.model import CheckpointKind, Cuts, Rule, RuleKind
from proxy.core.prefix import BLOCK_TOKENS
from tests.unit.builders import ANY_PREFIX, END_ONLY, NOTHING, RESTORE_POINTS, candidate

CUTS = Cuts(header=1000, turn_start=2000, message_end=3000)


@pytest.mark.parametrize("rule", [ANY_PREFIX, NOTHING])
def test_choose_stops_where_no_stop_helps_returns_none(rule: Rule) -> None:
    assert choose_stops(rule, CUTS, (), 0) == ()


def test_choose_stops_under_restore_points_plants_points_without_saving() -> None:
    assert choose_stops(RESTORE_POINTS, CUTS, (), 0) == (Stop(1000), Stop(2000))


def test_choose_stops_under_end_only_saves_header_and_turn_start() -> None:
    assert choose_stops(END_ONLY, CUTS, (), 0) == (
        Stop(1000, CheckpointKind.HEADER),
        Stop(2000, CheckpointKind.TURN_START),
        Stop(3000),
    )


def test_choose_stops_beyond_what_is_reused_leaves_the_rest_out() -> None:
    assert choose_stops(END_ONLY, CUTS, (), 1990) == (Stop(3000),)
    assert choose_stops(END_ONLY, CUTS, (), 3000) == ()


def test_choose_stops_at_a_turn_start_that_ends_the_prompt_saves_it_once() -> None:
    cuts = Cuts(header=0, turn_start=500, message_end=500)
    assert choose_stops(END_ONLY, cuts, (), 0) == (Stop(500, CheckpointKind.TURN_START),)


def test_choose_stops_at_a_cut_shorter_than_a_block_is_not_worth_it() -> None:
    cuts = Cuts(header=BLOCK_TOKENS - 1, turn_start=BLOCK_TOKENS)
    assert choose_stops(RESTORE_POINTS, cuts, (), 0) == (Stop(BLOCK_TOKENS),)


def test_choose_stops_at_a_cut_that_a_checkpoint_covers_leaves_it_out() -> None:
    stored = candidate(5000, 4000, restore_points=(1000 - SLACK_TOKENS,))
    assert choose_stops(RESTORE_POINTS, CUTS, (stored,), 0) == (Stop(2000),)


def test_is_covered_by_a_state_that_diverges_before_the_cut_is_false() -> None:
    assert not is_covered(RESTORE_POINTS, [candidate(5000, 900, restore_points=(999,))], 1000)


def test_is_covered_at_the_very_end_of_a_state_is_true() -> None:
    assert is_covered(END_ONLY, [candidate(1000, 1000)], 1000)
    assert not is_covered(END_ONLY, [candidate(1001, 1001)], 1000)


@given(
    st.sampled_from(RuleKind),
    st.builds(Cuts, *[st.integers(0, 4000)] * 3),
    st.integers(0, 4000),
)
def test_choose_stops_of_anything_ascend_beyond_what_is_reused(
    kind: RuleKind, cuts: Cuts, n_reused: int
) -> None:
    stops = choose_stops(Rule(kind), cuts, (), n_reused)
    lengths = [stop.n_tokens for stop in stops]
    assert lengths == sorted(set(lengths))
    assert all(n > n_reused for n in lengths)
    assert set(lengths) <= {cuts.header, cuts.turn_start, cuts.message_end}
    assert kind is RuleKind.END_ONLY or not any(stop.save_as for stop in stops)


def test_begins_turn_of_a_prompt_that_ends_with_the_user_is_true() -> None:
    assert Cuts(turn_start=500, message_end=500).begins_turn
    assert not Cuts(turn_start=500, message_end=800).begins_turn
    assert not Cuts().begins_turn
