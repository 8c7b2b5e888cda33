"""The choice of slot and start for one request."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from proxy.core.model import (
    Candidate,
    CheckpointId,
    CheckpointKind,
    Cuts,
    Prompt,
    Rule,
    RuleKind,
    SlotId,
)
from proxy.core.plan import (
    MAX_LOST_TOKENS,
    Plan,
    Restore,
    Situation,
    UseLive,
    choose_slot_for_bypass,
    displaced_tokens,
    holds_foreign_tokens,
    must_be_erased,
    plan_request,
    promising,
)
from proxy.core.prefix import common_prefix_length, token_ids
from proxy.core.rates import Rates
from proxy.core.restore import usable_tokens
from proxy.core.slots import Content, Empty, Known, Reuse, Slot, Unknown
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
)

UNUSED = UseLive(Reuse())


def slots(*contents: Content) -> tuple[Slot, ...]:
    return tuple(Slot(SlotId(i), c, used_at=float(i)) for i, c in enumerate(contents))


def plan(n_prompt: int, rule: Rule, *contents: Content, **changes: Any) -> Plan:
    """Return the plan for the prompt `run_of(n_prompt)`; there must be one."""
    prompt = Prompt(run_of(n_prompt), NAMESPACE, changes.pop("cuts", Cuts()))
    now = Situation(rule, slots(*contents), (), Rates(), 100_000)
    made = plan_request(prompt, replace(now, **changes))
    assert made is not None
    return made


# The central property: whatever lies in the store and in the slots, nothing wrong is ever reused.

TINY_TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(token_ids)
MEASURED_RULES = st.builds(Rule, st.sampled_from(RuleKind), st.integers(0, 8))


@st.composite
def stored_states(draw: st.DrawFn) -> list[tuple[Candidate, Any]]:
    """Return checkpoints with their tokens; what they share with the request comes later."""
    states = []
    for number in range(draw(st.integers(0, 5))):
        tokens = draw(TINY_TOKENS)
        state = checkpoint(
            len(tokens),
            id=CheckpointId(number),
            restore_points=tuple(sorted(draw(st.sets(st.integers(1, len(tokens)), max_size=3)))),
            has_every_position=draw(st.booleans()),
            size_bytes=draw(st.integers(1, 10**6)),
        )
        states.append((Candidate(state, 0), tokens))
    return states


@st.composite
def live_slots(draw: st.DrawFn) -> tuple[Slot, ...]:
    content = st.one_of(
        st.just(Empty()),
        st.builds(Unknown, st.sampled_from([None, NAMESPACE, OTHER_NAMESPACE])),
        st.builds(
            Known,
            TINY_TOKENS,
            st.sampled_from([NAMESPACE, OTHER_NAMESPACE]),
            st.integers(0, 3),
            st.sets(st.integers(1, 14), max_size=3).map(lambda p: tuple(sorted(p))),
        ),
    )
    return tuple(
        Slot(
            SlotId(i),
            draw(content),
            is_leased=draw(st.booleans()),
            used_at=draw(st.floats(0, 9)),
        )
        for i in range(draw(st.integers(0, 3)))
    )


@settings(max_examples=400)
@given(MEASURED_RULES, TINY_TOKENS, stored_states(), live_slots(), st.integers(1, 20))
def test_plan_of_anything_reuses_only_equal_tokens_that_the_rule_allows(
    rule: Rule,
    tokens: Any,
    stored: list[tuple[Candidate, Any]],
    held: tuple[Slot, ...],
    n_ctx: int,
) -> None:
    candidates = tuple(
        Candidate(c.checkpoint, common_prefix_length(own, tokens)) for c, own in stored
    )
    made = plan_request(
        Prompt(tokens, NAMESPACE), Situation(rule, held, candidates, Rates(), n_ctx)
    )
    free = {slot.id: slot for slot in held if not slot.is_leased}
    if made is None:
        assert not free
        return
    assert made.slot_id in free
    if isinstance(made.start, Restore):
        used, n = made.start.checkpoint, made.start.n_reused
        own = stored[used.id][1]
        assert 0 < n < len(tokens)
        assert own[:n] == tokens[:n]
        assert used.n_tokens < n_ctx
        assert n == used.n_tokens or {
            RuleKind.ANY_PREFIX: used.has_every_position,
            RuleKind.RESTORE_POINTS: n in used.restore_points,
        }.get(rule.kind, False)
        assert rule.kind is not RuleKind.NOTHING
    elif made.start.n_reused:
        content = free[made.slot_id].content
        assert isinstance(content, Known) and content.namespace == NAMESPACE
        n = made.start.n_reused
        assert content.tokens[:n] == tokens[:n] and n < len(tokens)


@given(MEASURED_RULES, st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), max_size=8))
def test_promising_of_sorted_candidates_keeps_one_of_the_best(
    rule: Rule, shapes: list[tuple[int, int]]
) -> None:
    found = sorted(
        (
            candidate(n, min(n, n_common), restore_points=(n // 2,), has_every_position=n % 2 == 0)
            for n, n_common in shapes
        ),
        key=lambda c: -c.n_common,
    )
    best = max((usable_tokens(rule, c.checkpoint, c.n_common, 30) for c in found), default=0)
    kept = [usable_tokens(rule, c.checkpoint, c.n_common, 30) for c in promising(rule, found, 30)]
    assert max(kept, default=0) == best
    assert all(kept)


def test_promising_stops_reading_when_nothing_longer_can_follow() -> None:
    def found() -> Any:
        yield candidate(1000, 1000)
        yield candidate(900, 900)
        raise AssertionError("read on")

    assert len(promising(END_ONLY, found(), 2000, n_at_most=32)) == 1


def test_promising_of_too_many_keeps_the_limit() -> None:
    found = [candidate(1000, 1000, id=CheckpointId(i)) for i in range(9)]
    assert len(promising(END_ONLY, found, 2000, n_at_most=4)) == 4


# Which option wins.


def test_plan_without_a_free_slot_is_none() -> None:
    leased = (Slot(SlotId(0), Empty(), is_leased=True),)
    now = Situation(ANY_PREFIX, leased, (), Rates(), 100_000)
    assert plan_request(Prompt(run_of(10), NAMESPACE), now) is None


def test_plan_with_a_live_slot_that_holds_the_prefix_uses_it_without_a_restore() -> None:
    stored = candidate(900, 900)
    made = plan(1000, END_ONLY, Empty(), Known(run_of(900), NAMESPACE), candidates=(stored,))
    assert (made.slot_id, made.start) == (1, UseLive(Reuse(900, 900)))


def test_plan_with_a_checkpoint_restores_it_into_the_slot_used_longest_ago() -> None:
    stored = candidate(900, 900)
    made = plan(1000, END_ONLY, Empty(), Empty(), candidates=(stored,))
    assert (made.slot_id, made.start) == (0, Restore(stored.checkpoint, 900, 900))


def test_plan_with_a_leased_live_slot_restores_into_another() -> None:
    held = (
        Slot(SlotId(0), Known(run_of(900), NAMESPACE), is_leased=True),
        Slot(SlotId(1), Empty()),
    )
    made = plan(1000, END_ONLY, candidates=(candidate(900, 900),), slots=held)
    assert made.slot_id == 1 and isinstance(made.start, Restore)


def test_plan_prefers_more_seconds_saved_over_a_complete_match() -> None:
    short_and_whole = candidate(200, 200, id=CheckpointId(1))
    long_and_half = candidate(9000, 4500, id=CheckpointId(2), restore_points=(4400,))
    made = plan(5000, RESTORE_POINTS, Empty(), candidates=(short_and_whole, long_and_half))
    assert isinstance(made.start, Restore) and made.start.checkpoint.id == 2


def test_plan_prefers_a_smaller_file_when_the_restore_costs_more_than_the_tokens() -> None:
    huge = candidate(1000, 1000, id=CheckpointId(1), size_bytes=20 << 30)
    small = candidate(900, 900, id=CheckpointId(2), size_bytes=1 << 20)
    made = plan(1100, END_ONLY, Empty(), candidates=(huge, small))
    assert isinstance(made.start, Restore) and made.start.checkpoint.id == 2


def test_plan_with_a_restore_slower_than_evaluation_evaluates() -> None:
    slow = candidate(300, 300, size_bytes=10 << 30)
    assert plan(400, END_ONLY, Empty(), candidates=(slow,)).start == UNUSED


def test_plan_with_a_checkpoint_as_long_as_the_context_does_not_restore_it() -> None:
    full = candidate(5000, 4000, restore_points=(3000,))
    assert plan(4500, RESTORE_POINTS, Empty(), candidates=(full,), n_ctx=5000).start == UNUSED
    made = plan(4500, RESTORE_POINTS, Empty(), candidates=(full,), n_ctx=5001)
    assert isinstance(made.start, Restore)


def test_plan_spares_the_slot_with_unsaved_work() -> None:
    busy = Known(branch(0, 5000), NAMESPACE)
    idle = Known(branch(0, 5000), NAMESPACE, n_saved=5000)
    assert plan(1000, RESTORE_POINTS, busy, idle).slot_id == 1


def test_plan_that_displaces_much_unsaved_work_saves_it_first() -> None:
    assert plan(1000, RESTORE_POINTS, Known(branch(0, 5000), NAMESPACE)).saves_displaced
    assert not plan(1000, NOTHING, Known(branch(0, 5000), NAMESPACE)).saves_displaced


def test_plan_that_displaces_little_unsaved_work_does_not_save_it() -> None:
    few = Known(branch(0, MAX_LOST_TOKENS), NAMESPACE)
    assert not plan(1000, RESTORE_POINTS, few).saves_displaced
    more = Known(branch(0, MAX_LOST_TOKENS + 1), NAMESPACE)
    assert plan(1000, RESTORE_POINTS, more).saves_displaced


def test_plan_over_another_tenants_slot_erases_it_first() -> None:
    assert plan(1000, ANY_PREFIX, Known(run_of(1000), OTHER_NAMESPACE)).erases
    assert not plan(1000, ANY_PREFIX, Known(run_of(1000), NAMESPACE)).erases


def test_plan_stops_only_at_cuts_that_it_does_not_reuse() -> None:
    cuts = Cuts(header=400, turn_start=800, message_end=950)
    made = plan(1000, RESTORE_POINTS, Known(run_of(500), NAMESPACE), cuts=cuts)
    assert [stop.n_tokens for stop in made.stops] == [800]


# What a plan would overwrite.


def displaced(content: Content, tokens: Any, start: UseLive | Restore = UNUSED) -> int:
    return displaced_tokens(content, Prompt(tokens, NAMESPACE), start)


@pytest.mark.parametrize("content", [Empty(), Unknown(), Known(run_of(9), NAMESPACE, n_saved=9)])
def test_displaced_tokens_where_nothing_is_unsaved_is_zero(content: Content) -> None:
    assert displaced(content, branch(0, 5)) == 0


def test_displaced_tokens_of_another_tenant_are_all_that_is_unsaved() -> None:
    assert displaced(Known(run_of(100), OTHER_NAMESPACE, n_saved=30), run_of(200)) == 70


def test_displaced_tokens_of_a_continued_slot_are_zero() -> None:
    assert displaced(Known(run_of(100), NAMESPACE, n_tail=50), run_of(200)) == 0


def test_displaced_tokens_of_a_diverging_request_are_those_behind_the_divergence() -> None:
    assert displaced(Known(run_of(100), NAMESPACE), branch(60, 200)) == 40
    assert displaced(Known(run_of(100), NAMESPACE, n_saved=90), branch(60, 200)) == 10


def test_displaced_tokens_of_a_turn_that_moves_on_are_zero() -> None:
    dropped_reasoning = Known(run_of(1000), NAMESPACE, turn_start=600)
    assert displaced(dropped_reasoning, branch(600, 1200)) == 0
    assert displaced(dropped_reasoning, branch(300, 1200)) == 700


def test_displaced_tokens_under_a_restore_are_all_that_is_unsaved() -> None:
    restore = Restore(checkpoint(50), 50, 50)
    assert displaced(Known(run_of(100), NAMESPACE, n_saved=40), run_of(200), restore) == 60


# Requests whose prompt is not known.


def test_choose_slot_for_bypass_with_no_free_slot_is_none() -> None:
    leased = [Slot(SlotId(0), Empty(), is_leased=True)]
    assert choose_slot_for_bypass(leased, NAMESPACE) is None


def test_choose_slot_for_bypass_returns_to_the_tenants_latest_unknown_slot() -> None:
    held = slots(Unknown(NAMESPACE), Empty(), Unknown(NAMESPACE), Unknown(OTHER_NAMESPACE))
    chosen = choose_slot_for_bypass(held, NAMESPACE)
    assert chosen is not None and chosen.id == 2


def test_choose_slot_for_bypass_prefers_an_empty_slot_over_a_known_one() -> None:
    chosen = choose_slot_for_bypass(slots(Known(run_of(9), NAMESPACE), Empty()), NAMESPACE)
    assert chosen is not None and chosen.id == 1


def test_choose_slot_for_bypass_among_known_slots_takes_the_least_unsaved() -> None:
    held = slots(Known(run_of(500), NAMESPACE), Known(run_of(500), NAMESPACE, n_saved=490))
    chosen = choose_slot_for_bypass(held, NAMESPACE)
    assert chosen is not None and chosen.id == 1


@pytest.mark.parametrize(
    ("content", "is_foreign"),
    [
        (Empty(), False),
        (Known(run_of(3), NAMESPACE), False),
        (Known(run_of(3), OTHER_NAMESPACE), True),
        (Unknown(NAMESPACE), False),
        (Unknown(OTHER_NAMESPACE), True),
        (Unknown(None), True),
    ],
)
def test_holds_foreign_tokens_unless_they_are_surely_ours(
    content: Content, is_foreign: bool
) -> None:
    assert holds_foreign_tokens(content, NAMESPACE) is is_foreign


RESTORED = Known(run_of(900), NAMESPACE, n_restored=600)


@pytest.mark.parametrize(
    ("content", "n_common", "must_be"),
    [
        (RESTORED, 900, False),
        (RESTORED, 600, False),
        (RESTORED, 599, True),
        (RESTORED, 0, True),
        (RESTORED, None, True),
        (Known(run_of(900), NAMESPACE), 599, False),
        (Known(run_of(900), NAMESPACE), None, False),
        (Unknown(NAMESPACE, n_restored=600), 900, True),
        (Unknown(NAMESPACE), 900, False),
        (Empty(), None, False),
        (Known(run_of(900), OTHER_NAMESPACE), 900, True),
    ],
)
def test_must_be_erased_what_would_be_cut_before_the_end_of_a_restored_state(
    content: Content, n_common: int | None, must_be: bool
) -> None:
    tokens = None if n_common is None else branch(n_common, 1000)
    assert must_be_erased(END_ONLY, content, NAMESPACE, tokens) is must_be


@pytest.mark.parametrize("rule", [ANY_PREFIX, NOTHING])
def test_must_be_erased_what_lacks_positions_whatever_shorter_probes_have_shown(rule: Rule) -> None:
    assert must_be_erased(rule, RESTORED, NAMESPACE, branch(100, 1000))
    assert not must_be_erased(rule, RESTORED, NAMESPACE, branch(600, 1000))


def test_must_be_erased_is_nothing_that_the_server_refuses_to_cut_itself() -> None:
    assert not must_be_erased(RESTORE_POINTS, RESTORED, NAMESPACE, branch(100, 1000))


def test_plan_erases_a_restored_slot_instead_of_cutting_it() -> None:
    made = plan(500, END_ONLY, RESTORED)
    assert (made.erases, made.start) == (True, UNUSED)
    assert not plan(901, END_ONLY, RESTORED).erases


@given(live_slots(), st.sampled_from([NAMESPACE, OTHER_NAMESPACE]))
def test_choose_slot_for_bypass_of_anything_is_never_leased(
    held: tuple[Slot, ...], namespace: Any
) -> None:
    chosen = choose_slot_for_bypass(held, namespace)
    assume(held)
    assert (chosen is None) == all(slot.is_leased for slot in held)
    assert chosen is None or not chosen.is_leased


def test_plan_kinds_of_checkpoint_do_not_matter_for_a_restore() -> None:
    for kind in CheckpointKind:
        made = plan(1000, END_ONLY, Empty(), candidates=(candidate(900, 900, kind=kind),))
        assert isinstance(made.start, Restore)
