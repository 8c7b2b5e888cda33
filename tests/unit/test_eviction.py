"""Which checkpoints go, and which never do."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.cuts import SLACK_TOKENS
from proxy.core.eviction import SMALL_LOSS_TOKENS, choose_victims, superseded
from proxy.core.model import Candidate, Checkpoint, CheckpointId, CheckpointKind, Rule, RuleKind
from proxy.core.restore import usable_tokens
from tests.unit.builders import (
    ANY_PREFIX,
    END_ONLY,
    NOTHING,
    RESTORE_POINTS,
    candidate,
    checkpoint,
)

NEWER = CheckpointId(99)


def aged(*last_used: float, size_bytes: int = 100) -> list[Checkpoint]:
    return [
        checkpoint(1, id=CheckpointId(i), last_used_at=t, size_bytes=size_bytes)
        for i, t in enumerate(last_used)
    ]


def test_choose_victims_within_the_budget_chooses_none() -> None:
    assert choose_victims(aged(1, 2, 3), 0, ()) == []
    assert choose_victims(aged(1, 2, 3), -500, ()) == []


def test_choose_victims_takes_the_least_recently_used_first() -> None:
    assert [v.id for v in choose_victims(aged(3, 1, 2), 150, ())] == [1, 2]


def test_choose_victims_passes_over_those_in_use() -> None:
    assert [v.id for v in choose_victims(aged(1, 2, 3), 100, {CheckpointId(0)})] == [1]


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), max_size=8),
    st.integers(-10, 300),
    st.sets(st.integers(0, 7).map(CheckpointId)),
)
def test_choose_victims_of_anything_frees_enough_and_nothing_in_use(
    shapes: list[tuple[int, int]], n_bytes: int, in_use: set[CheckpointId]
) -> None:
    stored = [
        checkpoint(1, id=CheckpointId(i), size_bytes=size, last_used_at=float(t))
        for i, (size, t) in enumerate(shapes)
    ]
    victims = choose_victims(stored, n_bytes, in_use)
    freed = sum(v.size_bytes for v in victims)
    assert not {v.id for v in victims} & in_use
    assert freed >= n_bytes or len(victims) == len([c for c in stored if c.id not in in_use])
    assert not victims or freed - victims[-1].size_bytes < n_bytes


def superseded_ids(rule: Rule, newer: Checkpoint, *older: Candidate) -> list[int]:
    return [c.id for c in superseded(rule, newer, older)]


def test_superseded_by_a_longer_state_of_the_same_conversation_is_the_older() -> None:
    newer = checkpoint(300, id=NEWER, restore_points=(95, 295), has_every_position=True)
    older = candidate(100, 100, restore_points=(95,), has_every_position=True)
    for rule in (ANY_PREFIX, RESTORE_POINTS, END_ONLY):
        assert superseded_ids(rule, newer, older) == [1]
    assert superseded_ids(NOTHING, newer, older) == []


def test_superseded_by_a_state_that_diverges_is_one_that_loses_little_of_what_was_generated() -> (
    None
):
    newer = checkpoint(3000, id=NEWER, has_every_position=True)
    n_tokens = 1000
    little, much = n_tokens - SMALL_LOSS_TOKENS, n_tokens - SMALL_LOSS_TOKENS - 1
    answered = candidate(n_tokens, little, n_prompt=little)
    assert superseded_ids(ANY_PREFIX, newer, answered) == [1]
    assert superseded_ids(ANY_PREFIX, newer, candidate(n_tokens, much, n_prompt=much)) == []


def test_superseded_by_another_conversation_with_the_same_header_is_none_under_any_prefix() -> None:
    newer = checkpoint(1100, id=NEWER, has_every_position=True)
    n_header = 1000 - SLACK_TOKENS - 1
    assert superseded_ids(ANY_PREFIX, newer, candidate(1008, n_header, n_prompt=1000)) == []
    assert superseded_ids(ANY_PREFIX, newer, candidate(1000, n_header)) == []


def test_superseded_between_two_that_share_its_points_goes_and_the_first_stays() -> None:
    first = candidate(900, 900, id=CheckpointId(1), restore_points=(100, 500, 895))
    between = candidate(1300, 1300, id=CheckpointId(2), restore_points=(500, 895, 1295))
    newer = checkpoint(1700, id=NEWER, restore_points=(895, 1295, 1695))
    assert superseded_ids(RESTORE_POINTS, newer, first, between) == [2]
    assert superseded_ids(RESTORE_POINTS, newer, between) == []


def test_superseded_is_not_what_only_a_diverging_neighbour_has() -> None:
    neighbour = candidate(900, 400, id=CheckpointId(1), restore_points=(100, 500))
    older = candidate(1300, 1300, id=CheckpointId(2), restore_points=(500,))
    newer = checkpoint(1700, id=NEWER, restore_points=(1695,))
    assert superseded_ids(RESTORE_POINTS, newer, neighbour, older) == []


def test_superseded_without_its_generated_tail_is_repeated_under_restore_points() -> None:
    newer = checkpoint(3000, id=NEWER, restore_points=(1480, 1996, 2900))
    older = candidate(2300, 2000, restore_points=(1480, 1996))
    assert superseded_ids(RESTORE_POINTS, newer, older) == [1]
    assert superseded_ids(END_ONLY, newer, older) == []


def test_superseded_of_a_state_without_points_is_none_under_restore_points() -> None:
    newer = checkpoint(3000, id=NEWER, restore_points=(2900,))
    assert superseded_ids(RESTORE_POINTS, newer, candidate(2000, 2000)) == []


def test_superseded_by_itself_is_none() -> None:
    newer = checkpoint(100, id=NEWER, has_every_position=True)
    assert superseded_ids(ANY_PREFIX, newer, Candidate(newer, 100)) == []


def test_superseded_by_a_state_without_every_position_is_none_under_any_prefix() -> None:
    newer = checkpoint(300, id=NEWER, has_every_position=False)
    assert superseded_ids(ANY_PREFIX, newer, candidate(100, 100)) == []


def test_superseded_by_a_state_that_lost_a_restore_point_is_none() -> None:
    newer = checkpoint(3000, id=NEWER, restore_points=(2000,))
    older = candidate(1000, 1000, restore_points=(500, 995))
    assert superseded_ids(RESTORE_POINTS, newer, older) == []


def test_superseded_turn_start_goes_only_when_a_later_turn_start_repeats_it() -> None:
    older = candidate(1000, 1000, kind=CheckpointKind.TURN_START, restore_points=(995,))
    same_turn = checkpoint(3000, id=NEWER, restore_points=(995, 2995))
    next_turn = checkpoint(
        3000, id=NEWER, restore_points=(995, 2995), kind=CheckpointKind.TURN_START
    )
    assert superseded_ids(RESTORE_POINTS, same_turn, older) == []
    assert superseded_ids(RESTORE_POINTS, next_turn, older) == [1]


KINDS = st.sampled_from(CheckpointKind)
POINTS = st.sets(st.integers(1, 100), max_size=4).map(lambda p: tuple(sorted(p)))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Checkpoint, Candidate]:
    def any_checkpoint(n_tokens: int, checkpoint_id: int) -> Checkpoint:
        fields: dict[str, Any] = {
            "id": CheckpointId(checkpoint_id),
            "kind": draw(KINDS),
            "restore_points": tuple(p for p in draw(POINTS) if p <= n_tokens),
            "has_every_position": draw(st.booleans()),
        }
        return checkpoint(n_tokens, **fields)

    older = any_checkpoint(draw(st.integers(1, 100)), 1)
    n_common = draw(st.sampled_from([older.n_tokens, older.n_tokens // 2]))
    return any_checkpoint(draw(st.integers(1, 120)), 2), Candidate(older, n_common)


@given(st.sampled_from(RuleKind), pairs())
def test_superseded_of_anything_is_repeated_and_no_header_and_no_kept_turn_start(
    kind: RuleKind, pair: tuple[Checkpoint, Candidate]
) -> None:
    newer, older = pair
    if superseded(Rule(kind), newer, [older]):
        gone = older.checkpoint
        assert gone.n_tokens - older.n_common <= SMALL_LOSS_TOKENS
        assert gone.kind is not CheckpointKind.HEADER
        assert gone.kind is CheckpointKind.CONVERSATION or newer.kind is CheckpointKind.TURN_START


@given(pairs(), st.data())
def test_superseded_under_restore_points_costs_no_restore_point_more_than_the_slack(
    pair: tuple[Checkpoint, Candidate], data: st.DataObject
) -> None:
    newer, older = pair
    gone = older.checkpoint
    if superseded(RESTORE_POINTS, newer, [older]) and gone.restore_points:
        point = data.draw(st.sampled_from(gone.restore_points))
        assert usable_tokens(RESTORE_POINTS, newer, point, 1000) >= point - SLACK_TOKENS
