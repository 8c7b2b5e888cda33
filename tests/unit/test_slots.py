"""What slots hold, what a prompt reuses of it, and who has the right to a slot."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.model import CheckpointId, Rule, RuleKind, SlotId
from proxy.core.slots import (
    TAINTED,
    Content,
    Empty,
    Known,
    Origin,
    Slot,
    SlotPhase,
    SlotTable,
    Unknown,
    also_saved,
    live_reuse,
    n_busy,
    shared_tokens,
)
from proxy.core.tokens import Namespace, TokenIds, common_prefix_length, token_ids
from tests.unit.builders import (
    ANY_PREFIX,
    END_ONLY,
    NAMESPACE,
    OTHER_NAMESPACE,
    RESTORE_POINTS,
    branch,
    checkpoint,
    run_of,
)

SLOT = SlotId(0)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=20).map(token_ids)


def reused(rule: Rule, content: Content, namespace: Namespace, tokens: TokenIds) -> tuple[int, int]:
    n_common = shared_tokens(content, tokens, namespace)
    return live_reuse(rule, content, n_common, len(tokens))


def test_live_reuse_of_an_empty_slot_is_nothing() -> None:
    assert reused(ANY_PREFIX, Empty(), NAMESPACE, run_of(10)) == (0, 0)


@pytest.mark.parametrize("content", [Unknown(), Unknown(NAMESPACE)])
def test_live_reuse_of_an_unknown_slot_counts_on_nothing(content: Unknown) -> None:
    assert reused(ANY_PREFIX, content, NAMESPACE, run_of(10)) == (0, 9)


def test_live_reuse_of_another_tenants_slot_is_nothing() -> None:
    content = Known(run_of(10), OTHER_NAMESPACE)
    assert reused(ANY_PREFIX, content, NAMESPACE, run_of(20)) == (0, 0)


@pytest.mark.parametrize("rule", [ANY_PREFIX, RESTORE_POINTS, END_ONLY])
def test_live_reuse_of_a_longer_prompt_is_the_whole_slot(rule: Rule) -> None:
    assert reused(rule, Known(run_of(10), NAMESPACE), NAMESPACE, run_of(20)) == (10, 10)


def test_live_reuse_of_the_same_prompt_evaluates_the_last_token_again() -> None:
    content = Known(run_of(10), NAMESPACE, restore_points=(6,))
    assert reused(ANY_PREFIX, content, NAMESPACE, run_of(10)) == (9, 9)
    assert reused(RESTORE_POINTS, content, NAMESPACE, run_of(10)) == (6, 9)
    assert reused(RESTORE_POINTS, content, NAMESPACE, run_of(11)) == (10, 10)


def test_live_reuse_of_a_diverging_prompt_goes_back_to_a_restore_point() -> None:
    content = Known(run_of(100), NAMESPACE, restore_points=(40, 96))
    assert reused(RESTORE_POINTS, content, NAMESPACE, branch(95, 200)) == (40, 95)
    assert reused(RESTORE_POINTS, content, NAMESPACE, branch(39, 200)) == (0, 39)
    assert reused(ANY_PREFIX, content, NAMESPACE, branch(95, 200)) == (95, 95)


def test_live_reuse_beyond_an_unreported_tail_is_a_range() -> None:
    content = Known(run_of(100), NAMESPACE, n_tail=7, restore_points=(95,))
    assert reused(RESTORE_POINTS, content, NAMESPACE, run_of(200)) == (95, 107)
    assert reused(ANY_PREFIX, content, NAMESPACE, run_of(200)) == (100, 107)
    assert reused(ANY_PREFIX, content, NAMESPACE, run_of(103)) == (100, 102)
    assert reused(ANY_PREFIX, content, NAMESPACE, branch(95, 200)) == (95, 95), "the tail is behind"


@given(
    st.sampled_from(RuleKind),
    TOKENS,
    TOKENS,
    st.integers(0, 3),
    st.sets(st.integers(1, 20), max_size=4),
)
def test_live_reuse_of_anything_never_promises_more_than_is_common(
    kind: RuleKind, held: list[int], asked: list[int], n_tail: int, points: set[int]
) -> None:
    content = Known(token_ids(held), NAMESPACE, n_tail, tuple(sorted(points)))
    n_reused, n_at_most = reused(Rule(kind), content, NAMESPACE, token_ids(asked))
    n_common = common_prefix_length(content.tokens, token_ids(asked))
    assert 0 <= n_reused <= min(n_common, len(asked) - 1)
    assert n_reused <= n_at_most <= min(n_common + n_tail, len(asked) - 1)


def test_lease_of_a_free_slot_reserves_it() -> None:
    table = SlotTable([Empty(), Empty()])
    table.lease(SlotId(1), now=5.0)
    assert [slot.id for slot in table.free()] == [0]
    assert table[SlotId(1)].used_at == 5.0


def test_lease_of_a_leased_slot_raises_and_changes_nothing() -> None:
    table = SlotTable([Empty()])
    table.lease(SlotId(0), now=5.0)
    with pytest.raises(ValueError, match="slot 0 is leased already"):
        table.lease(SlotId(0), now=6.0)
    assert table[SlotId(0)].used_at == 5.0


def test_release_twice_leaves_the_slot_free_and_its_content_alone() -> None:
    table = SlotTable([Known(run_of(3), NAMESPACE)])
    table.lease(SlotId(0), now=1.0)
    table[SLOT].destined, table[SLOT].answered_for = run_of(9), NAMESPACE
    table.release(SlotId(0), now=2.0)
    table.release(SlotId(0), now=3.0)
    assert not table[SlotId(0)].is_leased and not table[SLOT].is_closing
    assert table[SlotId(0)].content == Known(run_of(3), NAMESPACE)
    assert table[SLOT].n_held == 3


def test_slot_that_was_given_back_is_the_same_slot_to_whom_waited_with_it() -> None:
    table = SlotTable([Unknown()])
    (slot,) = table.free()
    table.lease(SLOT, now=1.0)
    table.release(SLOT, now=2.0)
    table.set_content(SLOT, Empty())
    assert (slot.content, slot.used_at, slot.is_leased) == (Empty(), 2.0, False)


def test_set_content_of_a_leased_slot_keeps_the_lease() -> None:
    table = SlotTable([Empty()])
    table.lease(SlotId(0), now=1.0)
    for phase in (SlotPhase.READY, SlotPhase.RUNNING):
        table[SLOT].phase = phase
        table.set_content(SlotId(0), Unknown())
        assert table[SLOT].phase is SlotPhase.PREPARING, "whatever ran there has ended"


def test_slot_runs_no_request_that_its_lease_no_longer_serves() -> None:
    after = {SlotPhase.PREPARING: SlotPhase.RUNNING, SlotPhase.READY: SlotPhase.RUNNING}
    for phase in SlotPhase:
        slot = Slot(SLOT, Empty(), phase)
        slot.note_running()
        assert slot.phase is after.get(phase, phase)
        assert n_busy([slot]) == (phase not in (SlotPhase.FREE, SlotPhase.CLOSING))


def test_file_tells_of_the_restore_points_that_a_slot_has_in_common_with_it() -> None:
    content = Known(branch(600, 900), NAMESPACE, saved_points=(100, 700))
    told = also_saved(content, NAMESPACE, run_of(900), (300, 600, 896))
    assert told == replace(content, saved_points=(100, 300, 600, 700))
    assert also_saved(content, OTHER_NAMESPACE, run_of(900), (300,)) is content
    assert also_saved(TAINTED, NAMESPACE, run_of(900), (300,)) is TAINTED


def test_save_that_tells_of_a_slot_does_not_disturb_the_request_that_runs_there() -> None:
    held = Known(run_of(10), NAMESPACE)
    table = SlotTable([held])
    table.lease(SLOT, 1.0)
    table[SLOT].note_running()
    table.refine(SLOT, held, told := replace(held, n_saved=10))
    assert (table[SLOT].phase, table[SLOT].content) == (SlotPhase.RUNNING, told)
    table.refine(SLOT, held, TAINTED)
    assert table[SLOT].content is not TAINTED


def test_forget_free_leaves_leased_slots_alone() -> None:
    table = SlotTable([Known(run_of(3), NAMESPACE), Known(run_of(4), NAMESPACE)])
    table.lease(SlotId(0), now=1.0)
    table.forget_free()
    assert [slot.content for slot in table] == [Known(run_of(3), NAMESPACE), TAINTED]


def test_iteration_while_contents_change_sees_every_slot_once() -> None:
    table = SlotTable([Empty() for _ in range(4)])
    for slot in table:
        table.set_content(slot.id, Unknown())
    assert [slot.id for slot in table] == [0, 1, 2, 3]
    assert len(table) == 4


FIRST, SECOND, THIRD = (checkpoint(10, id=CheckpointId(i)) for i in range(3))


@pytest.fixture
def restored() -> SlotTable:
    """Return a table whose only slot a state is being restored into."""
    table = SlotTable([Unknown()])
    table[SLOT].note_restore(FIRST)
    return table


def test_suspects_of_a_slot_that_nothing_was_restored_into_are_none() -> None:
    table = SlotTable([Unknown()])
    table[SLOT].note_save(FIRST)
    assert table[SLOT].suspects() == table[SLOT].suspects(is_saving=True) == ()


def test_suspect_is_what_was_restored_until_a_request_was_answered(restored: SlotTable) -> None:
    restored.set_content(SLOT, Unknown(NAMESPACE))
    assert restored[SLOT].suspects() == (FIRST,)
    restored[SLOT].has_answered = True
    assert (restored[SLOT].suspects(), restored[SLOT].suspects(is_saving=True)) == ((), (FIRST,))
    restored[SLOT].note_restore(SECOND)
    assert restored[SLOT].suspects() == (SECOND,)


def test_suspects_are_also_what_was_saved_from_there_since(restored: SlotTable) -> None:
    restored[SLOT].note_save(SECOND)
    assert restored[SLOT].suspects() == (FIRST, SECOND)
    restored[SLOT].note_save(THIRD)
    assert restored[SLOT].suspects() == (SECOND, THIRD)


def test_emptied_slot_has_no_suspects(restored: SlotTable) -> None:
    restored.set_content(SLOT, Empty())
    assert restored[SLOT].suspects(is_saving=True) == ()


def test_suspects_are_forgotten_in_all_slots_at_once() -> None:
    table = SlotTable([Unknown(), Unknown()])
    for slot in table:
        slot.note_restore(FIRST)
    table.forget_sources()
    assert [slot.suspects() for slot in table] == [(), ()]


def test_distrusted_checkpoint_taints_free_slots_now_and_others_with_their_next_content() -> None:
    def stems_from(*ancestors: int) -> Known:
        return Known(
            run_of(9), NAMESPACE, origin=Origin(ancestors=tuple(map(CheckpointId, ancestors)))
        )

    table = SlotTable([stems_from(1, 2), stems_from(3), stems_from(2)])
    table.lease(SlotId(2), now=0.0)
    table.distrust([CheckpointId(2)])
    assert [slot.content for slot in table] == [TAINTED, stems_from(3), stems_from(2)]
    table.set_content(SlotId(2), stems_from(2, 7))
    assert table[SlotId(2)].content == TAINTED
    table.set_content(SlotId(2), stems_from(7))
    assert table[SlotId(2)].content == stems_from(7)
