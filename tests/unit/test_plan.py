"""The choice of slot and start for one request."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import saving
from proxy.core.cuts import MIN_BRANCH_TOKENS, MIN_STRIDE_TOKENS, Stop, own_point
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
    N_ALTERNATIVES,
    NOTHING_DISPLACED,
    SHARED_HEADER_SAVES,
    Situation,
    Start,
    Why,
    plan_request,
)
from proxy.core.rates import Rates
from proxy.core.saving import StateSize
from proxy.core.slots import TAINTED, Content, Empty, Known, Origin, Slot, SlotPhase, Unknown
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
    run_of,
    steady,
)
from tests.unit.situations import (
    LONG_TOKENS,
    MEASURED_RULES,
    STEADY_RATES,
    TINY_TOKENS,
    found_for,
    known_contents,
    live_slots,
    plan,
    sizes_of,
    stored_states,
)

RULES = (ANY_PREFIX, RESTORE_POINTS, END_ONLY, NOTHING)


def test_size_of_a_displaced_state_is_estimated_once_for_all_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n_estimates, estimate = 0, saving.state_bytes

    def count(seen: Iterable[StateSize], content: Content) -> int:
        nonlocal n_estimates
        n_estimates += 1
        return estimate(seen, content)

    monkeypatch.setattr(saving, "state_bytes", count)
    other = Known(branch(50, 4000), NAMESPACE)
    made = plan(3000, ANY_PREFIX, other, candidates=(candidate(2900, 2900),), sizes=sizes_of(9))
    assert made.start.restored and made.alternatives and n_estimates == 1


# The central property: whatever lies in the store and in the slots, nothing wrong is ever reused.


@given(MEASURED_RULES, TINY_TOKENS, stored_states(), live_slots(), st.integers(1, 20))
def test_plan_of_anything_reuses_only_equal_tokens_that_the_rule_allows(
    rule: Rule,
    tokens: TokenIds,
    stored: list[tuple[Candidate, TokenIds]],
    held: tuple[Slot, ...],
    n_ctx: int,
) -> None:
    now = Situation(rule, held, found_for(tokens, stored), Rates(), n_ctx)
    made = plan_request(Prompt(tokens, NAMESPACE), now)
    free = {slot.id: slot for slot in held if not slot.is_leased}
    if made is None:
        assert not free
        return
    assert made.slot_id in free
    for option in (made.start, *made.alternatives):
        require_right(rule, tokens, option, dict(enumerate(own for _, own in stored)), free, n_ctx)


def require_right(
    rule: Rule,
    tokens: TokenIds,
    option: Start,
    stored: dict[int, TokenIds],
    free: dict[SlotId, Slot],
    n_ctx: int,
) -> None:
    n, content = option.n_reused, free[option.slot_id].content
    assert 0 <= n < len(tokens)
    if option.restored:
        used = option.restored.checkpoint
        assert 0 < n and stored[used.id][:n] == tokens[:n]
        assert used.n_tokens < n_ctx
        assert n == used.n_tokens or {
            RuleKind.ANY_PREFIX: used.has_every_position,
            RuleKind.RESTORE_POINTS: n in used.restore_points,
        }.get(rule.kind, False)
        assert rule.kind is not RuleKind.NOTHING
    elif n:
        assert isinstance(content, Known) and content.tenant == NAMESPACE
        assert content.tokens[:n] == tokens[:n]
        assert n in (*content.restore_points, len(content.tokens)) or rule.kind is ANY_PREFIX.kind
    if isinstance(content, Known) and content.tenant != NAMESPACE:
        assert option.erases or option.restored  # which takes the place of all that the slot holds


# Which option wins.


def test_plan_does_not_wait_for_a_slot_that_will_be_erased() -> None:
    """Its request was abandoned over a restored state that cannot be cut."""
    closing = Slot(SlotId(0), TAINTED, phase=SlotPhase.CLOSING, destined=run_of(1000))
    assert plan(1200, ANY_PREFIX, slots=(closing, Slot(SlotId(1), Empty()))).slot_id == 1


def test_plan_does_not_wait_for_an_answer_to_another_tenant() -> None:
    mine = Slot(
        SlotId(0), Empty(), SlotPhase.RUNNING, destined=run_of(1000), answered_for=NAMESPACE
    )
    theirs = replace(mine, answered_for=OTHER_NAMESPACE)
    free, prompt = Slot(SlotId(1), Empty()), Prompt(run_of(1200), NAMESPACE)
    now = Situation(ANY_PREFIX, (mine, free), (), steady(), 100_000)
    assert plan_request(prompt, now) is None
    assert plan_request(prompt, replace(now, slots=(theirs, free)))


def test_plan_without_a_free_slot_is_none() -> None:
    leased = (Slot(SlotId(0), Empty(), phase=SlotPhase.PREPARING),)
    now = Situation(ANY_PREFIX, leased, (), Rates(), 100_000)
    assert plan_request(Prompt(run_of(10), NAMESPACE), now) is None


def test_plan_with_a_live_slot_that_holds_the_prefix_uses_it_without_a_restore() -> None:
    stored = candidate(900, 900)
    made = plan(1000, END_ONLY, Empty(), Known(run_of(900), NAMESPACE), candidates=(stored,))
    assert (made.slot_id, made.start.kind, made.start.n_at_most) == (1, "live", 900)


def test_plan_with_a_checkpoint_restores_it_into_the_slot_used_longest_ago() -> None:
    stored = candidate(900, 900)
    made = plan(1000, END_ONLY, Empty(), Empty(), candidates=(stored,))
    assert (made.slot_id, made.start.restored, made.start.n_reused) == (0, stored, 900)


def test_plan_with_a_leased_live_slot_restores_into_another() -> None:
    held = (
        Slot(SlotId(0), Known(run_of(900), NAMESPACE), phase=SlotPhase.PREPARING),
        Slot(SlotId(1), Empty()),
    )
    made = plan(1000, END_ONLY, candidates=(candidate(900, 900),), slots=held)
    assert made.slot_id == 1 and made.start.restored


def test_plan_prefers_more_seconds_saved_over_a_complete_match() -> None:
    short_and_whole = candidate(200, 200, id=CheckpointId(1))
    long_and_half = candidate(9000, 4500, id=CheckpointId(2), restore_points=(4400,))
    made = plan(5000, RESTORE_POINTS, Empty(), candidates=(short_and_whole, long_and_half))
    assert made.start.restored and made.start.restored.checkpoint.id == 2


def test_plan_prefers_a_smaller_file_when_the_restore_costs_more_than_the_tokens() -> None:
    huge = candidate(1000, 1000, id=CheckpointId(1), size_bytes=20 << 30)
    small = candidate(900, 900, id=CheckpointId(2), size_bytes=1 << 20)
    made = plan(1100, END_ONLY, Empty(), candidates=(huge, small))
    assert made.start.restored and made.start.restored.checkpoint.id == 2


def test_plan_with_a_restore_slower_than_evaluation_evaluates() -> None:
    slow = candidate(300, 300, size_bytes=10 << 30)
    assert plan(400, END_ONLY, Empty(), candidates=(slow,)).start.kind == "nothing"


def test_plan_with_a_checkpoint_as_long_as_the_context_does_not_restore_it() -> None:
    full = candidate(5000, 4000, restore_points=(3000,))
    assert (
        plan(4500, RESTORE_POINTS, Empty(), candidates=(full,), n_ctx=5000).start.kind == "nothing"
    )
    made = plan(4500, RESTORE_POINTS, Empty(), candidates=(full,), n_ctx=5001)
    assert made.start.restored


def test_plan_spares_the_slot_with_unsaved_work() -> None:
    busy = Known(branch(0, 5000), NAMESPACE)
    idle = Known(branch(0, 5000), NAMESPACE, n_saved=5000)
    assert plan(1000, RESTORE_POINTS, busy, idle).slot_id == 1


def test_plan_that_displaces_much_unsaved_work_saves_it_first() -> None:
    assert plan(1000, RESTORE_POINTS, Known(branch(0, 5000), NAMESPACE)).start.displacement.saves
    assert not plan(1000, NOTHING, Known(branch(0, 5000), NAMESPACE)).start.displacement.saves


def test_plan_over_another_tenants_slot_erases_it_first() -> None:
    assert plan(1000, ANY_PREFIX, Known(run_of(1000), OTHER_NAMESPACE)).start.erases
    assert not plan(1000, ANY_PREFIX, Known(run_of(1000), NAMESPACE)).start.erases


RESTORED = Known(run_of(900), NAMESPACE, origin=Origin(600))


def test_plan_erases_a_slot_that_holds_nothing_of_the_prompt_and_may_have_its_first_token_kept() -> (
    None
):
    other, alike = (Known(branch(n, 1000), NAMESPACE) for n in (0, 1))
    for rule in (RESTORE_POINTS, END_ONLY, NOTHING):
        assert plan(1000, rule, other).start.erases
        assert not plan(1000, rule, alike).start.erases
        assert not plan(1000, rule, other, n_ctx=1000).start.erases  # it will be refused
    assert not plan(1000, ANY_PREFIX, other).start.erases


def test_plan_erases_a_slot_whose_tokens_are_not_known_unless_it_begins_like_the_prompt() -> None:
    for likely, erases in ((None, True), (branch(0, 9), True), (run_of(9), False)):
        content = Unknown(NAMESPACE, likely=likely)
        assert plan(1000, RESTORE_POINTS, content).start.erases is erases
        assert not plan(1000, ANY_PREFIX, content).start.erases


@pytest.mark.parametrize("rule", [RESTORE_POINTS, ANY_PREFIX, NOTHING])
def test_plan_goes_on_where_the_prompt_was_abandoned_and_does_not_cut_it_back(rule: Rule) -> None:
    """The slot could not be saved, so nobody knows how far the evaluation came."""
    abandoned = Unknown(NAMESPACE, can_be_adopted=False, likely=run_of(900))
    cuts = Cuts(header=300, turn_start=950)
    for contents, slot_id in (((Empty(), abandoned), 1), ((Unknown(NAMESPACE), abandoned), 1)):
        made = plan(1000, rule, *contents, cuts=cuts)
        assert (made.slot_id, made.start.n_reused, made.start.erases) == (slot_id, 0, False)
        assert {stop.n_tokens for stop in made.stops} <= {950}


@pytest.mark.parametrize("rule", [RESTORE_POINTS, ANY_PREFIX, END_ONLY])
def test_plan_takes_no_abandoned_slot_where_another_serves_as_well(rule: Rule) -> None:
    abandoned = Unknown(NAMESPACE, likely=run_of(19_990))
    header = candidate(5000, 5000, restore_points=(4995,))
    assert plan(20_000, rule, Empty(), abandoned, candidates=(header,)).slot_id == 0
    made = plan(6000, rule, Empty(), abandoned, cuts=Cuts(header=5000))
    assert (made.slot_id, made.stops[0].n_tokens) == (0, 5000)


def test_plan_stops_again_in_an_abandoned_slot_that_has_to_be_erased() -> None:
    abandoned = Unknown(NAMESPACE, likely=run_of(900), origin=Origin(900))
    made = plan(1000, END_ONLY, abandoned, cuts=Cuts(header=300))
    assert (made.start.erases, made.stops[0].n_tokens) == (True, 300)


def test_plan_erases_a_restored_slot_instead_of_cutting_it() -> None:
    made = plan(500, END_ONLY, RESTORED)
    assert (made.start.erases, made.start.kind) == (True, "nothing")
    assert not plan(901, END_ONLY, RESTORED).start.erases


def test_plan_kinds_of_checkpoint_do_not_matter_for_a_restore() -> None:
    for kind in CheckpointKind:
        made = plan(1000, END_ONLY, Empty(), candidates=(candidate(900, 900, kind=kind),))
        assert made.start.restored


@pytest.mark.parametrize("rule", RULES)
def test_plan_spares_the_conversation_that_was_used_last(rule: Rule) -> None:
    held = Known(branch(0, 2000), NAMESPACE, n_saved=2000)
    used = tuple(Slot(SlotId(i), held, used_at=at) for i, at in enumerate((2995.0, 0.0)))
    made = plan(500, rule, slots=used, time=3000.0, sizes=sizes_of(1000))
    assert made.slot_id == 1


def test_plan_of_a_small_request_leaves_a_long_conversation_its_slot() -> None:
    long = Known(run_of(9000), NAMESPACE, n_saved=9000)
    title, sizes = branch(200, 300), sizes_of(10**9)
    made = plan(0, ANY_PREFIX, Empty(), long, tokens=title, sizes=sizes, rates=steady())
    assert made.slot_id == 0


def test_plan_restores_elsewhere_what_it_would_cut_off_another_conversation() -> None:
    """Two with the same header: the second goes on from the header's own state in a free slot."""
    first = Known(run_of(9000), NAMESPACE, n_saved=9000, header=1000, turn_start=8000)
    stored = candidate(1000, 1000, kind=CheckpointKind.HEADER, has_every_position=True)
    found: dict[str, Any] = {"candidates": (stored,), "sizes": sizes_of(10**9)}
    made = plan(0, ANY_PREFIX, first, Empty(), tokens=branch(1000, 1500), **found)
    assert (made.slot_id, made.start.kind) == (1, "restore")


# What a plan is called.


def test_is_warm_of_a_conversation_that_moves_on_is_true() -> None:
    assert plan(1000, ANY_PREFIX, Known(run_of(900), NAMESPACE)).is_warm
    dropped_reasoning = Known(branch(700, 900), NAMESPACE, turn_start=700, restore_points=(695,))
    assert plan(1000, RESTORE_POINTS, dropped_reasoning).is_warm


@pytest.mark.parametrize(
    "content", [Empty(), Unknown(NAMESPACE), Known(branch(100, 900), NAMESPACE)]
)
def test_is_warm_of_a_slot_that_holds_something_else_is_false(content: Content) -> None:
    assert not plan(1000, ANY_PREFIX, content).is_warm


def test_is_warm_of_a_restore_is_false() -> None:
    stored = candidate(900, 900)
    assert not plan(1000, END_ONLY, Empty(), candidates=(stored,)).is_warm


@given(MEASURED_RULES, LONG_TOKENS, known_contents(LONG_TOKENS), known_contents(LONG_TOKENS))
def test_is_warm_of_anything_goes_on_and_takes_nothing_from_anybody(
    rule: Rule, tokens: TokenIds, one: Known, other: Known
) -> None:
    made = plan(0, rule, one, other, tokens=tokens)
    content = (one, other)[made.slot_id]
    if made.is_warm:
        assert made.start.kind == "live"
        assert made.start.displacement == NOTHING_DISPLACED
        assert content.tenant == NAMESPACE and not made.start.erases


def test_alternatives_are_told_in_the_order_of_their_costs() -> None:
    stored = [
        candidate(n, n, id=CheckpointId(n), has_every_position=True) for n in (200, 400, 600, 800)
    ]
    made = plan(1000, ANY_PREFIX, Empty(), Empty(), candidates=tuple(stored))
    told = [option.n_reused for option in (made.start, *made.alternatives)]
    assert told == [800, 800, 600, 400]
    assert [option.slot_id for option in made.alternatives] == [1, 0, 0]


@given(MEASURED_RULES, TINY_TOKENS, stored_states(), live_slots(min_size=1), STEADY_RATES)
def test_alternatives_of_anything_differ_and_are_not_cheaper_than_what_was_chosen(
    rule: Rule,
    tokens: TokenIds,
    stored: list[tuple[Candidate, TokenIds]],
    held: tuple[Slot, ...],
    rates: Rates,
) -> None:
    now = Situation(rule, held, found_for(tokens, stored), rates, 100)
    made = plan_request(Prompt(tokens, NAMESPACE), now)
    if made is None:
        return
    costs = [option.total_seconds for option in (made.start, *made.alternatives)]
    assert costs == sorted(costs)
    assert len(made.alternatives) <= N_ALTERNATIVES
    ways = [
        o.restored.checkpoint.id if o.restored else f"live {o.slot_id}" for o in made.alternatives
    ]
    assert len(set(ways)) == len(ways)
    assert made.start not in made.alternatives
    assert all(not now.slots[o.slot_id].is_leased for o in made.alternatives)


# Where it stops on the way.


def test_plan_stops_only_at_cuts_that_it_does_not_reuse() -> None:
    cuts = Cuts(header=400, turn_start=800, message_end=950)
    made = plan(1000, RESTORE_POINTS, Known(run_of(500), NAMESPACE), cuts=cuts)
    assert [stop.n_tokens for stop in made.stops] == [800]


@pytest.mark.parametrize(
    ("rule", "stops"),
    [
        (RESTORE_POINTS, (Stop(600),)),
        (END_ONLY, (Stop(600, CheckpointKind.BRANCH),)),
        (ANY_PREFIX, ()),
        (NOTHING, ()),
    ],
)
def test_plan_stops_where_the_prompt_leaves_a_live_one(rule: Rule, stops: tuple[Stop, ...]) -> None:
    made = plan(0, rule, Known(run_of(1000), NAMESPACE), tokens=branch(600, 1200))
    assert (made.stops, made.cuts.branch) == (stops, 600 if stops else 0)


def test_plan_stops_where_the_prompt_leaves_one_that_another_slot_is_running() -> None:
    busy = Slot(SlotId(0), Known(run_of(1000), NAMESPACE), phase=SlotPhase.PREPARING)
    free = Slot(SlotId(1), Empty())
    made = plan(0, RESTORE_POINTS, tokens=branch(600, 1200), slots=(busy, free))
    assert made.stops == (Stop(600),)


def test_plan_stops_where_the_prompt_leaves_a_stored_one() -> None:
    made = plan(1200, END_ONLY, Empty(), n_shared=600)
    assert made.stops == (Stop(600, CheckpointKind.BRANCH),)


@pytest.mark.parametrize(
    ("size_bytes", "n_new", "stops"),
    [(4 * 10**9, 20, []), (4 * 10**9, 900, [1899]), (10**6, 20, [1019])],
)
def test_plan_under_end_only_stops_for_a_state_that_is_worth_its_bytes(
    size_bytes: int, n_new: int, stops: list[int]
) -> None:
    n_prompt = 1000 + n_new
    cuts = Cuts(message_end=n_prompt - 1)
    made = plan(
        n_prompt,
        END_ONLY,
        Known(run_of(1000), NAMESPACE),
        candidates=(candidate(1000, 1000),),
        cuts=cuts,
        sizes=sizes_of(size_bytes),
        rates=steady(),
    )
    assert [stop.n_tokens for stop in made.stops] == stops


def test_plan_under_end_only_stops_for_a_state_that_pays_once_nothing_else_runs() -> None:
    """At the end of the prompt nothing is saved at once; a later save cuts the slot back to the stop."""
    running = (Slot(SlotId(n), Empty(), phase=SlotPhase.RUNNING) for n in range(1, 4))
    made = plan(
        1300,
        END_ONLY,
        candidates=(candidate(1000, 1000),),
        slots=(Slot(SlotId(0), Known(run_of(1000), NAMESPACE)), *running),
        cuts=Cuts(turn_start=1250, message_end=1299),
        sizes=sizes_of(4 * 10**9),
        rates=steady(),
    )
    assert made.stops == (Stop(1299),)


def test_plan_does_not_stop_where_another_tenants_prompt_is_left() -> None:
    held = Known(run_of(1000), OTHER_NAMESPACE)
    assert plan(0, RESTORE_POINTS, held, tokens=branch(600, 1200)).stops == ()


def test_plan_does_not_stop_where_hardly_more_is_shared_than_can_be_reused() -> None:
    held = Known(run_of(1000), NAMESPACE, restore_points=(600 - MIN_BRANCH_TOKENS,))
    assert plan(0, RESTORE_POINTS, held, tokens=branch(600, 1200)).stops == ()
    assert plan(0, RESTORE_POINTS, held, tokens=branch(601, 1200)).stops == (Stop(601),)


@given(
    st.sampled_from([RESTORE_POINTS, END_ONLY]),
    LONG_TOKENS,
    known_contents(LONG_TOKENS),
    st.builds(Cuts, *[st.integers(0, 2000)] * 3),
)
def test_plan_for_anything_leaves_the_next_prompt_a_place_near_where_this_one_branched(
    rule: Rule, tokens: TokenIds, held: Known, cuts: Cuts
) -> None:
    made = plan(0, rule, held, tokens=tokens, cuts=cuts)
    if made.cuts.branch:
        is_kept = rule is RESTORE_POINTS  # each stop, and where llama-server itself stops
        places = [stop.n_tokens for stop in made.stops if stop.save_as or is_kept]
        places += [own_point(len(tokens))] if is_kept else []
        n_shared = made.cuts.branch
        assert any(n_shared - MIN_STRIDE_TOKENS < place <= n_shared for place in places)


def test_plan_under_end_only_saves_where_both_go_on_if_a_turn_begins_just_after_a_branch() -> None:
    held = Known(run_of(1000), NAMESPACE)
    made = plan(0, END_ONLY, held, tokens=branch(600, 1200), cuts=Cuts(turn_start=602))
    assert made.stops == (Stop(600, CheckpointKind.TURN_START),)


def test_plan_saves_a_new_header_at_once_where_it_is_much_cheaper_than_evaluating_it() -> None:
    """Other requests with it may come before this one is answered, and they have other slots."""
    rates, cuts = steady(500.0, 1e6), Cuts(header=1000, turn_start=1200)
    cheap = int(1e6 * 2.0 / SHARED_HEADER_SAVES)
    for size_bytes, save_as in ((cheap - 1, CheckpointKind.HEADER), (cheap + 1, None)):
        made = plan(
            1300,
            RESTORE_POINTS,
            Empty(),
            Empty(),
            cuts=cuts,
            rates=rates,
            sizes=sizes_of(size_bytes),
        )
        assert made.stops == (Stop(1000, save_as), Stop(1200))


def test_plan_with_one_slot_shares_no_header() -> None:
    cuts = Cuts(header=1000)
    made = plan(1300, RESTORE_POINTS, Empty(), cuts=cuts, rates=steady())
    assert made.stops == (Stop(1000),)


def test_prompt_that_does_not_fit_takes_nothing_from_anybody() -> None:
    own, foreign = Known(run_of(400), NAMESPACE), Known(run_of(400), OTHER_NAMESPACE)
    for n_ctx, contents in ((900, (foreign, own)), (901, (own, foreign)), (901, (Empty(), own))):
        made = plan(901, RESTORE_POINTS, *contents, n_ctx=n_ctx, cuts=Cuts(header=300))
        assert (made.why, made.stops, made.start.n_at_most) == (Why.TOO_LONG, (), 0)
        assert (made.start.displacement, made.start.erases) == (NOTHING_DISPLACED, False)
    assert plan(901, RESTORE_POINTS, foreign, n_ctx=901).start.erases
