"""Which older checkpoints a newer one makes needless."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.cuts import SLACK_TOKENS
from proxy.core.eviction import SMALL_LOSS_TOKENS, superseded
from proxy.core.model import (
    Candidate,
    Checkpoint,
    CheckpointId,
    CheckpointKind,
    Rule,
    RuleKind,
    usable_tokens,
)
from tests.unit.builders import ANY_PREFIX, END_ONLY, NOTHING, RESTORE_POINTS, candidate, checkpoint

NEWER = CheckpointId(99)
RULES = (ANY_PREFIX, RESTORE_POINTS, END_ONLY)


def superseded_ids(rule: Rule, newer: Checkpoint, *older: Candidate) -> list[int]:
    return [c.id for c in superseded(rule, newer, older)]


def conversation(n_tokens: int, **changes: Any) -> Checkpoint:
    """Return the newer state: one that can be continued at its header and its turn start."""
    places: dict[str, Any] = {"header": 200, "turn_start": 500, "restore_points": (195, 495)}
    return checkpoint(n_tokens, **(places | {"id": NEWER, "has_every_position": True} | changes))


# A later state of the same conversation.


@pytest.mark.parametrize("rule", RULES)
def test_superseded_by_a_longer_state_of_the_same_conversation_is_the_older(rule: Rule) -> None:
    older = candidate(1000, 1000, restore_points=(195, 495, 995), has_every_position=True)
    assert superseded_ids(rule, conversation(1300), older) == [1]


def test_superseded_without_a_rule_is_none() -> None:
    assert superseded_ids(NOTHING, conversation(1300), candidate(1000, 1000)) == []


@pytest.mark.parametrize("rule", [ANY_PREFIX, RESTORE_POINTS])
def test_superseded_by_a_state_that_diverges_is_one_that_loses_little_of_what_was_generated(
    rule: Rule,
) -> None:
    n_tokens = 1000
    little, much = n_tokens - SMALL_LOSS_TOKENS, n_tokens - SMALL_LOSS_TOKENS - 1
    answered = candidate(n_tokens, little, n_prompt=little)
    assert superseded_ids(rule, conversation(3000), answered) == [1]
    assert superseded_ids(rule, conversation(3000), candidate(n_tokens, much, n_prompt=much)) == []


@pytest.mark.parametrize("rule", RULES)
def test_superseded_by_another_conversation_with_the_same_header_is_none(rule: Rule) -> None:
    n_header = 1000 - SLACK_TOKENS - 1
    newer = conversation(1100, header=n_header, turn_start=1050)
    assert superseded_ids(rule, newer, candidate(1008, n_header, n_prompt=1000)) == []
    assert superseded_ids(rule, newer, candidate(1000, n_header)) == []


@pytest.mark.parametrize("rule", [ANY_PREFIX, RESTORE_POINTS])
def test_superseded_by_the_next_turn_is_a_state_whose_reasoning_it_dropped(rule: Rule) -> None:
    older = candidate(4000, 600, n_prompt=3500, header=200, turn_start=500)
    assert superseded_ids(rule, conversation(900, turn_start=800), older) == [1]
    regenerated = conversation(900, turn_start=500)
    assert superseded_ids(rule, regenerated, older) == []
    of_another_turn = candidate(4000, 600, n_prompt=3500, header=200, turn_start=700)
    assert superseded_ids(rule, conversation(900, turn_start=800), of_another_turn) == []


@pytest.mark.parametrize("rule", RULES)
def test_superseded_by_an_earlier_state_of_the_same_conversation_is_none(rule: Rule) -> None:
    assert superseded_ids(rule, conversation(600), candidate(1000, 600)) == []


def test_superseded_by_a_state_without_every_position_is_none_under_any_prefix() -> None:
    newer = conversation(1300, has_every_position=False)
    assert superseded_ids(ANY_PREFIX, newer, candidate(1000, 1000)) == []


def test_superseded_under_end_only_is_only_what_is_repeated_whole() -> None:
    answered = candidate(1000, 990, n_prompt=990)
    assert superseded_ids(END_ONLY, conversation(3000), answered) == []
    assert superseded_ids(END_ONLY, conversation(1000), candidate(1000, 1000)) == []


# Under restore points: the places that somebody may come back to.


@pytest.mark.parametrize("place", ["header", "turn_start"])
def test_superseded_that_alone_can_be_continued_at_a_place_stays(place: str) -> None:
    """Nothing else knows that place: the newer state belongs to a conversation that has others."""
    older = candidate(1000, 1000, restore_points=(395,), **{place: 400})
    newer = checkpoint(1300, id=NEWER, restore_points=(195,))
    assert superseded_ids(RESTORE_POINTS, newer, older) == []
    has_point = replace(newer, restore_points=(195, 400 - SLACK_TOKENS))
    assert superseded_ids(RESTORE_POINTS, has_point, older) == [1]
    knew_it = replace(newer, marks=(400,))
    assert superseded_ids(RESTORE_POINTS, knew_it, older) == [1]


def test_superseded_for_the_sake_of_its_marks_stays_only_if_it_has_their_points() -> None:
    newer = checkpoint(1300, id=NEWER, restore_points=(195,))
    forked_from = candidate(1000, 1000, restore_points=(195, 395), marks=(400,))
    assert superseded_ids(RESTORE_POINTS, newer, forked_from) == []
    without_point = candidate(1000, 1000, restore_points=(195,), marks=(400,))
    assert superseded_ids(RESTORE_POINTS, newer, without_point) == [1]


def test_superseded_is_asked_only_for_places_that_both_share() -> None:
    older = candidate(1000, 990, n_prompt=990, restore_points=(980,), marks=(995,))
    assert superseded_ids(RESTORE_POINTS, checkpoint(1300, id=NEWER), older) == [1]


def test_superseded_may_lose_points_where_nobody_comes_back_to() -> None:
    older = candidate(1000, 1000, restore_points=(195, 300, 495, 700, 995), header=200)
    assert superseded_ids(RESTORE_POINTS, conversation(1700), older) == [1]


# What is kept whatever repeats it.


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", [CheckpointKind.HEADER, CheckpointKind.BRANCH])
def test_superseded_header_or_branch_is_none(rule: Rule, kind: CheckpointKind) -> None:
    older = candidate(200, 200, kind=kind, has_every_position=True)
    assert superseded_ids(rule, conversation(1300), older) == []


@pytest.mark.parametrize("rule", [ANY_PREFIX, RESTORE_POINTS])
def test_superseded_turn_start_goes_only_when_a_later_turn_start_repeats_it(rule: Rule) -> None:
    older = candidate(500, 500, kind=CheckpointKind.TURN_START, restore_points=(495,))
    assert superseded_ids(rule, conversation(1300), older) == []
    next_turn = conversation(1300, kind=CheckpointKind.TURN_START)
    assert superseded_ids(rule, next_turn, older) == [1]
    assert superseded_ids(END_ONLY, next_turn, older) == []


@pytest.mark.parametrize("rule", RULES)
def test_superseded_of_a_pinned_state_is_none(rule: Rule) -> None:
    older = candidate(1000, 1000, has_every_position=True, is_pinned=True)
    assert superseded_ids(rule, conversation(1300), older) == []


@pytest.mark.parametrize("rule", RULES)
def test_superseded_by_itself_is_none(rule: Rule) -> None:
    newer = conversation(1000)
    assert superseded_ids(rule, newer, Candidate(newer, 1000)) == []


def test_superseded_is_each_one_that_is_repeated() -> None:
    same = [candidate(n, n, id=CheckpointId(n)) for n in (700, 900, 1100)]
    other = candidate(900, 300, id=CheckpointId(1))
    assert superseded_ids(ANY_PREFIX, conversation(1300), *same, other) == [700, 900, 1100]


PLACES = (200, 400, 500, 700, 900)
KINDS = st.one_of(st.just(CheckpointKind.CONVERSATION), st.sampled_from(CheckpointKind))


@st.composite
def states(draw: st.DrawFn, n_tokens: int, checkpoint_id: int) -> Checkpoint:
    """Draw a state with places, some of which it can be continued at."""
    within = [place for place in PLACES if place <= n_tokens]
    place = st.sampled_from([0, *within])
    some = st.sets(st.sampled_from(within), max_size=3) if within else st.just(set())
    return checkpoint(
        n_tokens,
        id=CheckpointId(checkpoint_id),
        kind=draw(KINDS),
        restore_points=tuple(sorted(n - 5 for n in draw(some))),
        has_every_position=draw(st.booleans()),
        header=draw(place),
        turn_start=draw(place),
        marks=tuple(sorted(draw(some))),
        n_prompt=draw(st.sampled_from([0, n_tokens, n_tokens - n_tokens // 10])),
        is_pinned=draw(st.integers(0, 9)) == 9,
    )


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Checkpoint, Candidate]:
    """Draw a checkpoint, and an older one with what it shares with it."""
    older = draw(states(draw(st.integers(1, 1000)), 1))
    n_lost = draw(st.sampled_from([0, 10, older.n_tokens // 10, older.n_tokens // 2]))
    n_common = max(0, older.n_tokens - n_lost)
    newer = draw(states(n_common + draw(st.integers(1, 300)), 2))
    return newer, Candidate(older, n_common)


@given(st.builds(Rule, st.sampled_from(RuleKind)), pairs())
def test_superseded_of_anything_is_repeated_and_nothing_that_is_kept_always(
    rule: Rule, pair: tuple[Checkpoint, Candidate]
) -> None:
    newer, older = pair
    if superseded(rule, newer, [older]):
        gone = older.checkpoint
        n_lost = gone.n_tokens - older.n_common
        assert n_lost <= SMALL_LOSS_TOKENS or newer.turn_start > older.n_common
        assert gone.kind not in (CheckpointKind.HEADER, CheckpointKind.BRANCH)
        assert gone.kind is CheckpointKind.CONVERSATION or newer.kind is CheckpointKind.TURN_START
        assert rule.can_restore and not gone.is_pinned


@given(pairs())
def test_superseded_under_restore_points_costs_no_place_that_the_newer_does_not_know(
    pair: tuple[Checkpoint, Candidate],
) -> None:
    newer, older = pair
    gone, known = older.checkpoint, {newer.header, newer.turn_start, *newer.marks}
    if not superseded(RESTORE_POINTS, newer, [older]):
        return
    for place in {gone.header, gone.turn_start, *gone.marks} - known:
        n_before = usable_tokens(RESTORE_POINTS, gone, min(place, gone.n_tokens - 1), 2000)
        if place <= older.n_common and n_before >= place - SLACK_TOKENS:
            n_after = usable_tokens(RESTORE_POINTS, newer, place, 2000)
            assert n_after >= place - SLACK_TOKENS
