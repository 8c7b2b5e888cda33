"""Where a prompt is stopped on the way, and what is saved there."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.cuts import (
    MESSAGE_STOP_TOKENS,
    MIN_BRANCH_TOKENS,
    MIN_CUT_TOKENS,
    MIN_STRIDE_TOKENS,
    SLACK_TOKENS,
    Stop,
    branch_of,
    choose_stops,
    cuts_in_message,
    is_covered,
    worth_a_file,
)
from proxy.core.model import CheckpointKind, Cuts, Rule, RuleKind
from tests.unit.builders import ANY_PREFIX, END_ONLY, NOTHING, RESTORE_POINTS, candidate

CUTS = Cuts(header=1000, turn_start=2000, message_end=3000)
N_PROMPT = 9000


@pytest.mark.parametrize("rule", [ANY_PREFIX, NOTHING])
def test_choose_stops_where_no_stop_helps_returns_none(rule: Rule) -> None:
    assert choose_stops(rule, CUTS, (), 0, N_PROMPT) == ()


def test_choose_stops_under_restore_points_plants_points_without_saving() -> None:
    assert choose_stops(RESTORE_POINTS, CUTS, (), 0, N_PROMPT) == (Stop(1000), Stop(2000))


def test_choose_stops_under_end_only_saves_header_and_turn_start() -> None:
    assert choose_stops(END_ONLY, CUTS, (), 0, N_PROMPT) == (
        Stop(1000, CheckpointKind.HEADER),
        Stop(2000, CheckpointKind.TURN_START),
        Stop(3000),
    )


def test_worth_a_file_under_end_only_leaves_out_cuts_that_cost_more_than_they_spare() -> None:
    """Each is a whole state: 4 GB for 64,000 tokens of a 27B."""

    def pays(n_saved: int, n_cut: int, _: bool) -> bool:
        return n_cut - n_saved >= 500

    def stops(rule: Rule, n_saved: int) -> list[int]:
        stored = candidate(1000, 1000), candidate(n_saved, n_saved)
        cuts = worth_a_file(rule, CUTS, stored, pays)
        return [stop.n_tokens for stop in choose_stops(rule, cuts, stored, 0, N_PROMPT)]

    assert stops(END_ONLY, 1400) == [2000, 3000]
    assert stops(END_ONLY, 1600) == [3000]
    assert stops(END_ONLY, 2600) == [2000]
    assert stops(RESTORE_POINTS, 1600) == [2000]


def test_choose_stops_beyond_what_is_reused_leaves_the_rest_out() -> None:
    assert choose_stops(END_ONLY, CUTS, (), 1990, N_PROMPT) == (Stop(3000),)
    assert choose_stops(END_ONLY, CUTS, (), 3000, N_PROMPT) == ()


def test_choose_stops_at_a_turn_start_that_ends_the_prompt_saves_it_once() -> None:
    cuts = Cuts(header=0, turn_start=500, message_end=500)
    assert choose_stops(END_ONLY, cuts, (), 0, N_PROMPT) == (Stop(500, CheckpointKind.TURN_START),)


def test_choose_stops_at_a_short_cut_is_not_worth_it() -> None:
    cuts = Cuts(header=MIN_CUT_TOKENS - 1, turn_start=MIN_CUT_TOKENS)
    assert choose_stops(RESTORE_POINTS, cuts, (), 0, N_PROMPT) == (Stop(MIN_CUT_TOKENS),)


def test_choose_stops_at_a_cut_that_a_checkpoint_covers_leaves_it_out() -> None:
    stored = candidate(5000, 4000, restore_points=(1000 - SLACK_TOKENS,))
    assert choose_stops(RESTORE_POINTS, CUTS, (stored,), 0, N_PROMPT) == (Stop(2000),)


def test_is_covered_by_a_state_that_diverges_before_the_cut_is_false() -> None:
    assert not is_covered(RESTORE_POINTS, [candidate(5000, 900, restore_points=(999,))], 1000)


def test_is_covered_at_the_very_end_of_a_state_is_true() -> None:
    assert is_covered(END_ONLY, [candidate(1000, 1000)], 1000)
    assert not is_covered(END_ONLY, [candidate(1001, 1001)], 1000)


def test_choose_stops_under_restore_points_plants_points_where_conversations_fork() -> None:
    cuts = replace(CUTS, last_turn_end=1800, branch=1400)
    stops = choose_stops(RESTORE_POINTS, cuts, (), 0, N_PROMPT)
    assert stops == (Stop(1000), Stop(1400), Stop(1800), Stop(2000))


def test_choose_stops_under_end_only_saves_a_branch_and_plants_where_the_turn_before_ends() -> None:
    """The live slot has that point, although no file will."""
    cuts = replace(CUTS, last_turn_end=1800, branch=1400)
    assert choose_stops(END_ONLY, cuts, (), 0, N_PROMPT) == (
        Stop(1000, CheckpointKind.HEADER),
        Stop(1400, CheckpointKind.BRANCH),
        Stop(1800),
        Stop(2000, CheckpointKind.TURN_START),
        Stop(3000),
    )


def test_choose_stops_in_a_long_new_user_message_plants_points_towards_its_end() -> None:
    cuts = Cuts(header=1000, turn_start=8000, message_end=8000)
    inside = (Stop(3904), Stop(5952), Stop(6976), Stop(7488), Stop(7744))

    def stops(rule: Rule, cuts: Cuts, n_reused: int = 0, n_inside: int = 5) -> tuple[Stop, ...]:
        return choose_stops(rule, cuts, (), n_reused, N_PROMPT, n_inside=n_inside)

    assert stops(RESTORE_POINTS, cuts) == (Stop(1000), *inside, Stop(8000))
    assert stops(RESTORE_POINTS, cuts, n_inside=2) == (Stop(1000), *inside[-2:], Stop(8000))
    assert stops(RESTORE_POINTS, cuts, 6490) == (Stop(6976), Stop(7488), Stop(7744), Stop(8000))
    behind_a_turn = replace(cuts, last_turn_end=5900)
    assert stops(RESTORE_POINTS, behind_a_turn, 5900) == (
        Stop(6976),
        Stop(7488),
        Stop(7744),
        Stop(8000),
    )
    later_in_the_turn = replace(cuts, message_end=8500)
    assert stops(RESTORE_POINTS, later_in_the_turn) == (Stop(1000), Stop(8000))
    for rule in (RESTORE_POINTS, END_ONLY):
        few = stops(rule, cuts, n_inside=0)
        assert [stop for stop in stops(rule, cuts) if stop not in inside] == list(few)


def test_choose_stops_at_the_end_of_a_prompt_leaves_it_to_llama_server() -> None:
    for n_tail in (0, 4):  # of the generation prompt, as far as no answer repeats it
        end = N_PROMPT - n_tail
        cuts = Cuts(turn_start=end, message_end=end, last_turn_end=8500)
        assert choose_stops(RESTORE_POINTS, cuts, (), 8500, N_PROMPT) == ()
    end = N_PROMPT - 5
    cuts = Cuts(turn_start=end, message_end=end, last_turn_end=8500)
    assert choose_stops(RESTORE_POINTS, cuts, (), 8500, N_PROMPT) == (Stop(cuts.turn_start),)
    assert choose_stops(END_ONLY, cuts, (), 8500, N_PROMPT) == (
        Stop(cuts.turn_start, CheckpointKind.TURN_START),
    )


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 5000))
def test_a_change_in_a_message_costs_at_most_as_many_tokens_before_it_as_behind_it(
    n_begin: int, n_tokens: int, n_changed: int
) -> None:
    n_end = n_begin + n_tokens
    begin = max(n_begin, n_end - n_changed)
    nearest = max((n for n in cuts_in_message(n_begin, n_end) if n <= begin), default=n_begin)
    assert begin - nearest <= max(n_end - begin, MESSAGE_STOP_TOKENS)


def test_choose_stops_of_two_close_cuts_plants_the_lower_one() -> None:
    cuts = Cuts(header=1000, turn_start=1000 + MIN_STRIDE_TOKENS - 1)
    assert choose_stops(RESTORE_POINTS, cuts, (), 0, N_PROMPT) == (Stop(1000),)
    cuts = Cuts(header=1000, branch=1000 - MIN_STRIDE_TOKENS + 1)
    assert choose_stops(RESTORE_POINTS, cuts, (), 0, N_PROMPT) == (Stop(cuts.branch),)
    apart = Cuts(header=1000, turn_start=1000 + MIN_STRIDE_TOKENS)
    assert choose_stops(RESTORE_POINTS, apart, (), 0, N_PROMPT) == (
        Stop(1000),
        Stop(apart.turn_start),
    )


def test_choose_stops_under_end_only_plants_nothing_that_costs_the_next_stop_its_point() -> None:
    near = Cuts(message_end=3000, last_turn_end=3000 - END_ONLY.stride_tokens + 1)
    assert choose_stops(END_ONLY, near, (), 0, N_PROMPT) == (Stop(3000),)
    apart = replace(near, last_turn_end=3000 - END_ONLY.stride_tokens)
    assert choose_stops(END_ONLY, apart, (), 0, N_PROMPT) == (Stop(apart.last_turn_end), Stop(3000))


def test_choose_stops_within_the_window_plants_only_what_prompts_share() -> None:
    rule = Rule(RuleKind.RESTORE_POINTS, end_holds_from=2500)
    cuts = replace(CUTS, last_turn_end=1800, branch=1400)
    assert choose_stops(rule, cuts, (), 0, N_PROMPT) == (Stop(1000), Stop(1400))


@pytest.mark.parametrize("rule", [ANY_PREFIX, RESTORE_POINTS, END_ONLY])
def test_choose_stops_that_share_the_header_save_it(rule: Rule) -> None:
    stops = choose_stops(rule, Cuts(header=1000), (), 0, N_PROMPT, shares_header=True)
    assert stops == (Stop(1000, CheckpointKind.HEADER),)
    stored = candidate(1000, 1000)
    assert choose_stops(rule, Cuts(header=1000), (stored,), 0, N_PROMPT, shares_header=True) == ()
    assert choose_stops(rule, Cuts(header=1000), (), 1000, N_PROMPT, shares_header=True) == ()


def test_choose_stops_behind_an_agents_surroundings_share_them_with_the_header() -> None:
    cuts = Cuts(header=1000, turn_start=2000, message_end=2000, surroundings=1500)
    assert choose_stops(RESTORE_POINTS, cuts, (), 0, N_PROMPT) == (
        Stop(1000),
        Stop(1500),
        Stop(2000),
    )
    shared = Stop(1500, CheckpointKind.CONVERSATION)
    stops = choose_stops(RESTORE_POINTS, cuts, (), 0, N_PROMPT, shares_header=True)
    assert stops == (Stop(1000), shared, Stop(2000))
    assert choose_stops(ANY_PREFIX, cuts, (), 0, N_PROMPT, shares_header=True) == (shared,)
    ends = choose_stops(END_ONLY, cuts, (), 0, N_PROMPT, shares_header=True)
    assert ends[:2] == (Stop(1000, CheckpointKind.HEADER), Stop(1500))
    window = Rule(RuleKind.RESTORE_POINTS, end_holds_from=2500)
    assert choose_stops(window, cuts, (), 0, N_PROMPT) == (Stop(1000),)


def test_choose_stops_without_a_rule_shares_no_header() -> None:
    assert choose_stops(NOTHING, CUTS, (), 0, N_PROMPT, shares_header=True) == ()


@given(
    st.sampled_from(RuleKind),
    st.builds(Cuts, *[st.integers(0, 4000)] * 6),
    st.integers(0, 4000),
    st.booleans(),
)
def test_choose_stops_of_anything_ascend_beyond_what_is_reused(
    kind: RuleKind, cuts: Cuts, n_reused: int, shares_header: bool
) -> None:
    stops = choose_stops(Rule(kind), cuts, (), n_reused, N_PROMPT, shares_header=shares_header)
    lengths = [stop.n_tokens for stop in stops]
    assert lengths == sorted(set(lengths))
    assert all(n > n_reused + SLACK_TOKENS and n >= MIN_CUT_TOKENS for n in lengths)
    named = {cuts.header, cuts.turn_start, cuts.message_end, cuts.branch, cuts.last_turn_end}
    inside = set(cuts_in_message(0, cuts.turn_start))
    assert set(lengths) <= named | inside | {cuts.surroundings}
    saved = {stop.save_as for stop in stops} - {None}
    assert (
        kind is RuleKind.END_ONLY
        or saved <= {CheckpointKind.HEADER, CheckpointKind.CONVERSATION}
        and shares_header >= bool(saved)
    )


@pytest.mark.parametrize("rule", [RESTORE_POINTS, END_ONLY])
def test_branch_is_where_more_is_shared_than_can_be_reused(rule: Rule) -> None:
    assert branch_of(rule, 600, 1000, 0) == 600
    assert branch_of(rule, 600, 1000, 600 - MIN_BRANCH_TOKENS - 1) == 600
    assert branch_of(rule, 600, 1000, 600 - MIN_BRANCH_TOKENS) == 0
    assert branch_of(rule, MIN_CUT_TOKENS - 1, 1000, 0) == 0


def test_branch_of_a_prompt_that_is_all_shared_is_none() -> None:
    assert branch_of(RESTORE_POINTS, 998, 1000, 0) == 998
    assert branch_of(RESTORE_POINTS, 999, 1000, 0) == 0
    assert branch_of(RESTORE_POINTS, 1000, 1000, 0) == 0


@pytest.mark.parametrize("rule", [ANY_PREFIX, NOTHING])
def test_branch_where_no_place_need_be_kept_is_none(rule: Rule) -> None:
    assert branch_of(rule, 600, 1000, 0) == 0
