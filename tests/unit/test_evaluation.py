"""What a slot is believed to hold after a prompt was evaluated in it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import slots
from proxy.core.cuts import CONTEXT_CHECKPOINT_MARGIN, MAX_CONTEXT_CHECKPOINTS
from proxy.core.model import FAR_TOKENS, NO_CUTS, CheckpointId, Cuts, Prompt, Rule
from proxy.core.slots import Content, Empty, Known, Origin, Unknown
from proxy.core.tokens import Namespace, TokenIds, common_prefix_length, token_ids
from tests.unit.builders import END_ONLY, NAMESPACE, OTHER_NAMESPACE, RESTORE_POINTS, branch, run_of

FAR_APART = replace(END_ONLY, stride_tokens=FAR_TOKENS)
WINDOW = replace(RESTORE_POINTS, end_holds_from=513)


def after_evaluation(
    before: Content,
    tokens: TokenIds,
    namespace: Namespace,
    cuts: Cuts = NO_CUTS,
    *,
    rule: Rule = RESTORE_POINTS,
    **how: int,
) -> Known:
    if "n_reused" not in how:
        held = before.tokens if isinstance(before, Known) else tokens[:0]
        how["n_reused"] = common_prefix_length(held, tokens)
    return slots.after_evaluation(before, Prompt(tokens, namespace, cuts), rule, **how)


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=20).map(token_ids)


def test_after_evaluation_in_an_empty_slot_knows_the_prompt_and_one_restore_point() -> None:
    held = after_evaluation(Empty(), run_of(100), NAMESPACE, cuts=Cuts(turn_start=80))
    assert held.tokens == run_of(100)
    assert held.restore_points == (100 - CONTEXT_CHECKPOINT_MARGIN,)
    assert (held.turn_start, held.n_tail, held.n_saved) == (80, 0, 0)


@pytest.mark.parametrize(
    ("before", "n_restored"),
    [
        (Known(run_of(200), NAMESPACE, origin=Origin(130)), 130),
        (Known(run_of(200), NAMESPACE, origin=Origin(131)), 0),  # cut before it, so evaluated again
        (Unknown(NAMESPACE, origin=Origin(130)), 130),
        (Unknown(NAMESPACE, origin=Origin(900)), 300),
        (Unknown(NAMESPACE), 0),
        (Empty(), 0),
    ],
)
def test_after_evaluation_knows_what_came_from_a_file_without_all_positions(
    before: Content, n_restored: int
) -> None:
    assert after_evaluation(before, branch(130, 300), NAMESPACE).origin.n_restored == n_restored


@pytest.mark.parametrize(
    ("before", "is_kept"),
    [
        (Known(run_of(200), NAMESPACE, origin=Origin(0, (CheckpointId(7),))), True),
        (Known(run_of(200, start=5000), NAMESPACE, origin=Origin(0, (CheckpointId(7),))), False),
        (Unknown(NAMESPACE, origin=Origin(0, (CheckpointId(7),))), True),
        (Empty(), False),
    ],
    ids=["goes on", "nothing is left of it", "unknown", "empty"],
)
def test_after_evaluation_knows_which_files_the_state_goes_back_to(
    before: Content, is_kept: bool
) -> None:
    held = after_evaluation(before, branch(130, 300), NAMESPACE)
    assert held.origin.ancestors == ((7,) if is_kept else ())


@pytest.mark.parametrize(("n_tokens", "points"), [(500, (495,)), (2000, (2000 - 512 - 5,))])
def test_after_evaluation_where_points_are_far_apart_believes_in_the_first(
    n_tokens: int, points: tuple[int, ...]
) -> None:
    held = after_evaluation(Empty(), run_of(n_tokens), NAMESPACE, rule=FAR_APART)
    assert held.restore_points == points
    later = after_evaluation(held, run_of(n_tokens + 1000), NAMESPACE, rule=FAR_APART)
    assert later.restore_points == points
    near = after_evaluation(Empty(), run_of(n_tokens), NAMESPACE)
    assert near.restore_points == (n_tokens - 5,), "elsewhere in the last"


def test_after_evaluation_of_few_new_tokens_believes_in_the_point_near_their_end() -> None:
    before = Known(run_of(5000), NAMESPACE)
    held = after_evaluation(before, run_of(5300), NAMESPACE, rule=FAR_APART)
    assert held.restore_points == (5295,)


def test_after_evaluation_of_a_tiny_prompt_believes_in_no_restore_point() -> None:
    assert after_evaluation(Empty(), run_of(3), NAMESPACE).restore_points == ()


def test_after_evaluation_the_last_sampled_token_is_not_in_the_slot() -> None:
    assert after_evaluation(Empty(), run_of(100), NAMESPACE, n_generated=8).n_tokens == 107
    assert after_evaluation(Empty(), run_of(100), NAMESPACE, n_generated=1).n_tokens == 100


def test_after_evaluation_of_a_diverging_prompt_forgets_what_lay_behind() -> None:
    before = Known(
        run_of(200),
        NAMESPACE,
        n_tail=9,
        restore_points=(50, 120, 195),
        possible_points=(50, 120, 195),
        turn_start=150,
        last_cut=100,
        n_saved=200,
    )
    held = after_evaluation(before, branch(130, 300), NAMESPACE)
    assert held.restore_points == (50, 120, 295)
    assert (held.turn_start, held.last_cut, held.n_saved) == (0, 100, 130)
    before = replace(before, header=140, last_cut=150)
    held = after_evaluation(before, branch(130, 300), NAMESPACE)
    assert (held.header, held.last_cut) == (0, 0)


def test_after_evaluation_of_a_longer_prompt_keeps_what_was_saved() -> None:
    before = Known(run_of(200), NAMESPACE, turn_start=150, last_cut=180, n_saved=200)
    held = after_evaluation(before, run_of(300), NAMESPACE)
    assert (held.turn_start, held.last_cut, held.n_unsaved) == (150, 180, 100)


@pytest.mark.parametrize(
    ("n_kept", "marks"), [(1400, (1200, 1400)), (1210, (1200,)), (1600, (1200, 1500)), (330, ())]
)
def test_after_evaluation_marks_where_the_newest_user_message_was_changed(
    n_kept: int, marks: tuple[int, ...]
) -> None:
    before = Known(run_of(2000), NAMESPACE, header=300, turn_start=1500, marks=(1200,))
    cuts = Cuts(header=300, turn_start=1800)
    held = after_evaluation(before, branch(n_kept, 1900), NAMESPACE, cuts=cuts)
    assert held.marks == marks


def test_after_evaluation_over_another_tenants_tokens_inherits_nothing() -> None:
    before = Known(run_of(200), OTHER_NAMESPACE, restore_points=(50,), n_saved=200)
    held = after_evaluation(before, run_of(200), NAMESPACE, n_reused=0)
    assert (held.restore_points, held.n_saved, held.tenant) == ((195,), 0, NAMESPACE)


def test_after_evaluation_many_times_believes_in_the_lowest_point_and_the_newest() -> None:
    held: Empty | Known = Empty()
    for n_tokens in range(100, 3100, 100):
        held = after_evaluation(held, run_of(n_tokens), NAMESPACE, n_kept=8)
    assert isinstance(held, Known)
    assert held.restore_points == (95, 2795, 2895, 2995)
    assert after_evaluation(held, run_of(9000), NAMESPACE, n_kept=0).restore_points == ()


def test_after_evaluation_of_a_prompt_that_leaves_the_slot_begins_at_the_point_before() -> None:
    held = after_evaluation(Empty(), run_of(3000), NAMESPACE)
    held = after_evaluation(held, run_of(4000), NAMESPACE)
    assert held.possible_points == (2483, 2995, 3483, 3995)
    left = after_evaluation(held, branch(3100, 3200), NAMESPACE, n_reused=2995)
    assert left.possible_points == (2483, 2995, 3195)


def test_after_evaluation_forgets_points_that_llama_server_would_have_reused() -> None:
    held = after_evaluation(Empty(), run_of(3000), NAMESPACE)
    held = after_evaluation(held, run_of(4000), NAMESPACE)
    less = after_evaluation(held, branch(3100, 3200), NAMESPACE, n_reused=2484)
    assert (less.restore_points, less.possible_points) == ((3195,), (2483, 2683, 3195))


@pytest.mark.parametrize(
    ("n_prompt", "n_reused", "real"),
    [
        (3987, 3836, (3455, 3529, 3835, 3836, 3877, 3982)),  # a user message begins at 3877
        (3841, 3836, (3455, 3529, 3835, 3836)),
        (3842, 3840, (3455, 3529, 3836, 3839)),
    ],
)
def test_after_evaluation_of_a_window_counts_the_points_that_llama_server_makes(
    n_prompt: int, n_reused: int, real: tuple[int, ...]
) -> None:
    """After a restore of a state of 3,841 tokens: a window goes on one token before each point."""
    points = (3455, 3529, 3836)
    before = Known(run_of(3841), NAMESPACE, restore_points=points, possible_points=points)
    prompt = Prompt(run_of(n_prompt), NAMESPACE, conversation=b"digests")
    held = slots.after_evaluation(before, prompt, WINDOW, n_reused=n_reused)
    assert len(held.possible_points) == len(real)
    again = slots.after_evaluation(held, prompt, WINDOW, n_reused=n_reused)
    assert len(again.possible_points) == len(real)


@pytest.mark.parametrize(
    ("n_reused", "message_end", "n_made"), [(1000, 1400, 2), (900, 1400, 3), (1000, 1450, 3)]
)
def test_after_evaluation_that_begins_with_the_newest_user_message_counts_one_point_there(
    n_reused: int, message_end: int, n_made: int
) -> None:
    cuts = Cuts(header=1000, turn_start=1400, message_end=message_end)
    prompt = Prompt(run_of(1500), NAMESPACE, cuts, conversation=b"digests")
    before = Known(run_of(n_reused), NAMESPACE, possible_points=(200,))
    held = slots.after_evaluation(before, prompt, RESTORE_POINTS, n_reused=n_reused)
    assert len(held.possible_points) == 1 + n_made


def test_after_evaluation_of_two_more_tokens_believes_in_no_point_before_them() -> None:
    """llama-server makes its point where the evaluation begins."""
    held = after_evaluation(Empty(), run_of(900), NAMESPACE, n_generated=1)
    held = after_evaluation(held, run_of(2000), NAMESPACE)
    held = replace(held, tokens=run_of(3000))
    held = after_evaluation(held, run_of(3002), NAMESPACE, n_reused=3000)
    assert (held.restore_points, held.possible_points[-1]) == ((895, 1995), 3000)


@given(TOKENS, TOKENS, st.sets(st.integers(1, 20)), st.integers(0, 25), st.integers(0, 5))
def test_after_evaluation_of_anything_believes_only_in_points_within_the_prompt(
    held: list[int], asked: list[int], points: set[int], n_saved: int, n_generated: int
) -> None:
    before = Known(token_ids(held), NAMESPACE, 0, tuple(sorted(points)), n_saved=n_saved)
    points_held = before.restore_points
    before = replace(before, saved_points=points_held, possible_points=points_held)
    after = after_evaluation(before, token_ids(asked), NAMESPACE, n_generated=n_generated)
    n_common = common_prefix_length(before.tokens, after.tokens)
    newest = len(asked) - CONTEXT_CHECKPOINT_MARGIN
    assert list(after.restore_points) == sorted(set(after.restore_points))
    assert all(p in points and p <= n_common or p == newest for p in after.restore_points)
    assert after.n_saved <= n_common


def test_after_evaluation_keeps_the_saved_points_of_what_is_left() -> None:
    before = Known(run_of(1000), NAMESPACE, n_saved=1000, saved_points=(200, 600, 995))
    assert after_evaluation(before, run_of(1100), NAMESPACE).saved_points == (200, 600, 995)
    assert after_evaluation(before, branch(600, 1100), NAMESPACE).saved_points == (200, 600)
    assert after_evaluation(before, run_of(1100), OTHER_NAMESPACE).saved_points == ()
    assert after_evaluation(Unknown(NAMESPACE), run_of(1100), NAMESPACE).saved_points == ()


def test_marks_of_a_new_turn_are_where_earlier_ones_began() -> None:
    held: Content = Empty()
    for turn_start, last_turn_end in ((500, 200), (900, 860), (1300, 1260)):
        cuts = Cuts(200, turn_start, turn_start, 0, last_turn_end, surroundings=300)
        held = after_evaluation(held, run_of(turn_start + 3), NAMESPACE, cuts=cuts)
    assert isinstance(held, Known)
    assert held.marks == (300, 500, 860, 900, 1260)
    assert (held.header, held.turn_start) == (200, 1300)


def test_marks_in_a_tool_loop_stay_as_they_are() -> None:
    cuts = Cuts(200, 900, 900, last_turn_end=860)
    before = after_evaluation(Empty(), run_of(903), NAMESPACE, cuts=cuts)
    after = after_evaluation(before, run_of(1500), NAMESPACE, cuts=Cuts(200, 900, 1400))
    assert before.marks == after.marks == (860,)


def test_marks_behind_the_place_where_a_prompt_leaves_the_slot_are_forgotten() -> None:
    before = Known(run_of(2000), NAMESPACE, header=200, turn_start=1500, marks=(500, 900, 1100))
    cuts = Cuts(header=200, turn_start=1000, branch=950)
    after = after_evaluation(before, branch(950, 1200), NAMESPACE, cuts=cuts)
    assert after.marks == (500, 900, 950)
    elsewhere = after_evaluation(before, run_of(1200), OTHER_NAMESPACE, cuts=cuts)
    assert elsewhere.marks == (950,)


def test_marks_at_a_stop_do_not_run_ahead_of_it() -> None:
    cuts = Cuts(header=200, turn_start=1000, branch=600, last_turn_end=950)
    assert after_evaluation(Empty(), run_of(600), NAMESPACE, cuts=cuts).marks == (600,)
    before = Known(run_of(2000), NAMESPACE, header=200, turn_start=1500)
    assert after_evaluation(before, run_of(700), NAMESPACE, cuts=cuts).marks == (600,)


def test_marks_of_a_very_long_conversation_are_the_lowest_and_the_newest() -> None:
    marks = tuple(range(100, 100 + 10 * MAX_CONTEXT_CHECKPOINTS, 10))
    before = Known(run_of(2000), NAMESPACE, turn_start=1900, marks=marks)
    cuts = Cuts(turn_start=2100, message_end=2100)
    after = after_evaluation(before, run_of(2103), NAMESPACE, cuts=cuts)
    assert after.marks == (marks[0], *marks[2:], 1900)


POINTS = st.sets(st.integers(1, 20), max_size=4).map(lambda points: tuple(sorted(points)))
CUTS = st.builds(Cuts, *[st.integers(0, 20)] * 6)


@given(TOKENS, TOKENS, POINTS, st.integers(0, 20), CUTS)
def test_marks_of_anything_ascend_and_are_old_ones_or_cuts(
    held: list[int], asked: list[int], marks: tuple[int, ...], turn_start: int, cuts: Cuts
) -> None:
    before = Known(token_ids(held), NAMESPACE, turn_start=turn_start, marks=marks)
    after = after_evaluation(before, token_ids(asked), NAMESPACE, cuts=cuts)
    n_common = common_prefix_length(before.tokens, after.tokens)
    old = {mark for mark in (*marks, turn_start) if mark <= n_common}
    assert list(after.marks) == sorted(set(after.marks) - {0})
    assert set(after.marks) <= old | {cuts.branch, cuts.last_turn_end, cuts.surroundings}
    assert max((after.header, after.turn_start, *after.marks)) <= len(asked)
    assert old - {0, cuts.header, cuts.turn_start} <= set(after.marks)
    assert not {cuts.header, cuts.turn_start} & set(after.marks)
