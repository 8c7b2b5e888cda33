"""Which context checkpoints stay in a file, and which come back from older ones."""

from bisect import bisect_left

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from proxy.core.cuts import SLACK_TOKENS
from proxy.core.model import CheckpointId, CheckpointKind
from proxy.core.rates import Rates
from proxy.core.saving import (
    OLDER_MARK_SHARE,
    edit_cuts,
    likely_cuts,
    points_of_others,
    select_points,
)
from proxy.core.slots import Known
from tests.unit.builders import NAMESPACE, candidate, run_of, steady

CONVERSATION = CheckpointKind.CONVERSATION
FIRST, SECOND = CheckpointId(1), CheckpointId(2)
RATES = steady(500.0, 1e6)
SMALL_BYTES, BIG_BYTES = 1000, 10**8


def sure(*n_tokens: int) -> dict[int, float]:
    return dict.fromkeys(n_tokens, 1.0)


def own_points(*points: int, size_bytes: int = SMALL_BYTES) -> dict[int, int]:
    return dict.fromkeys(points, size_bytes)


# Where requests come back to.


def test_places_of_a_conversation_are_its_cuts_and_its_end() -> None:
    content = Known(run_of(2000), NAMESPACE, n_tail=50, header=300, turn_start=1500)
    assert likely_cuts(content, CONVERSATION) == sure(300, 1500, 2000)
    assert likely_cuts(Known(run_of(2000), NAMESPACE), CONVERSATION) == sure(2000)


def test_places_of_older_marks_are_less_and_less_likely_but_for_the_lowest() -> None:
    marks = (300, 500, 700, 1100, 1500)
    content = Known(run_of(2000), NAMESPACE, header=300, turn_start=1500, marks=marks)
    share = OLDER_MARK_SHARE
    places = likely_cuts(content, CONVERSATION)
    between = {500: share, 700: share * share, 1100: share}
    assert places == {300: 1.0, **between, 1500: 1.0, 2000: 1.0}
    assert sorted(places) == list(places)


@pytest.mark.parametrize("kind", [CheckpointKind.HEADER, CheckpointKind.BRANCH])
def test_places_of_a_state_that_is_continued_at_its_end_are_those_before_it(
    kind: CheckpointKind,
) -> None:
    content = Known(run_of(1500), NAMESPACE, header=300, turn_start=1500)
    assert likely_cuts(content, kind) == sure(300)


def test_places_of_a_slot_that_was_cut_back_do_not_lie_behind_its_end() -> None:
    content = Known(run_of(1000), NAMESPACE, header=300, turn_start=1500, marks=(700, 1200))
    assert list(likely_cuts(content, CONVERSATION)) == [300, 700, 1000]


# What older files can give.


def test_points_of_others_are_those_that_are_common() -> None:
    whole = candidate(900, 900, id=FIRST, restore_points=(195, 495, 895))
    forked = candidate(900, 495, id=SECOND, restore_points=(195, 495, 895))
    without = candidate(900, 100, id=CheckpointId(3), restore_points=(195,))
    points = {195: forked, 495: forked, 895: whole}
    assert points_of_others([whole, forked, without]) == points


# Which stay.


def test_select_points_keeps_the_best_one_for_each_place() -> None:
    own = own_points(100, 295, 400, 1495, 1700, 1995)
    assert select_points(own, (), sure(300, 1500, 2000), RATES) == {295, 1495, 1995}


def test_select_points_keeps_a_point_far_before_a_place_that_has_no_better_one() -> None:
    own = own_points(295, 1995)
    assert select_points(own, (), sure(300, 1500), RATES) == {295}
    assert select_points(own_points(1000), (), sure(300, 1500), RATES) == {1000}


def test_select_points_takes_from_an_older_file_what_llama_server_has_dropped() -> None:
    selection = select_points(own_points(900, 1995), {295, 1495}, sure(300, 1500, 2000), RATES)
    assert selection == {295, 1495, 1995}


def test_select_points_prefers_its_own_to_a_slightly_better_one_elsewhere() -> None:
    near, far = 1495 - SLACK_TOKENS, 1495 - SLACK_TOKENS - 1
    assert select_points(own_points(near), {1495}, sure(1500), RATES) == {near}
    assert select_points(own_points(far), {1495}, sure(1500), RATES) == {1495}


def test_select_points_drops_a_place_that_is_not_worth_its_bytes() -> None:
    places = {500: 0.25, 1000: 0.5, 1500: 1.0}
    own = own_points(495, 995, 1495)
    assert select_points(own, (), places, RATES) == {495, 995, 1495}
    costly = own_points(495, 995, 1495, size_bytes=10**6)
    assert select_points(costly, (), places, RATES) == {1495}


def test_select_points_counts_what_the_place_before_it_spares_already() -> None:
    """A second at 995 spares 500 tokens if there is one at 495, and 995 if there is not."""
    places, size_bytes = {500: 1.0, 1000: 0.5}, 400_000
    both = own_points(495, 995, size_bytes=size_bytes)
    assert select_points(both, (), places, RATES) == {495}
    alone = own_points(995, size_bytes=size_bytes)
    assert select_points(alone, (), places, RATES) == {995}


def test_select_points_keeps_those_that_spare_most_where_llama_server_loads_few() -> None:
    own, places = own_points(95, 1095, 1195, 1995), sure(100, 1100, 1200, 2000)
    assert select_points(own, (), places, RATES, n_at_most=3) == {1095, 1195, 1995}
    assert select_points(own, (), places, RATES, n_at_most=2) == {1095, 1995}
    unlikely = {**places, 1100: 0.05}
    assert select_points(own, (), unlikely, RATES, n_at_most=2) == {1195, 1995}
    with_inside = select_points(MESSAGE_POINTS, (), sure(1000, 4000), RATES, INSIDE, 10**6, 3)
    assert with_inside == {1000, 3000, 4000}


def test_select_points_of_a_file_without_any_keeps_none() -> None:
    assert select_points({}, (), sure(300), RATES) == set()


POINTS = st.sets(st.integers(1, 3000), max_size=12)
OTHERS = st.sets(st.integers(1, 3000), max_size=36)
LIKELIHOODS = st.sampled_from([1.0, 0.5, 0.25, 0.125])
PLACES = st.dictionaries(st.integers(1, 3000), LIKELIHOODS, max_size=8).map(
    lambda places: {n: places[n] for n in sorted(places)}
)
RATES_DRAWN = st.builds(steady, st.floats(10, 1e4), st.floats(1e5, 1e10))
SIZES = st.integers(0, 10**8)


@given(POINTS, OTHERS, PLACES, SIZES, RATES_DRAWN)
def test_select_points_of_anything_keeps_what_is_there_before_some_place(
    own: set[int], others: set[int], places: dict[int, float], size_bytes: int, rates: Rates
) -> None:
    selection = select_points(own_points(*own, size_bytes=size_bytes), others, places, rates)
    assert selection <= own | others
    every_point = sorted(own | others)
    for point in selection:
        # It is the best there is for a place, or as good as that.
        assert any(
            point <= place
            and every_point[bisect_left(every_point, place + 1) - 1] <= point + SLACK_TOKENS
            for place in places
        )


@given(POINTS, OTHERS, PLACES, SIZES, RATES_DRAWN)
def test_select_points_of_anything_serves_every_sure_place_as_well_as_can_be(
    own: set[int], others: set[int], places: dict[int, float], size_bytes: int, rates: Rates
) -> None:
    selection = select_points(own_points(*own, size_bytes=size_bytes), others, places, rates)
    every_point = own | others
    for place, likelihood in places.items():
        best = max((p for p in every_point if p <= place), default=0)
        if likelihood == 1.0 and best > SLACK_TOKENS:
            kept = max((p for p in selection if p <= place), default=0)
            # Its own may be so much worse than a graft, and another place's so much worse than its own.
            assert kept >= best - 2 * SLACK_TOKENS


@given(POINTS, OTHERS, PLACES, RATES_DRAWN)
def test_select_points_of_anything_large_keeps_none_close_to_another(
    own: set[int], others: set[int], places: dict[int, float], rates: Rates
) -> None:
    assume(own)  # they tell what a context checkpoint of this model costs
    selection = select_points(own_points(*own, size_bytes=10**12), others, places, rates)
    kept = [0, *sorted(selection)]
    assert all(high - low > SLACK_TOKENS for low, high in zip(kept, kept[1:], strict=False))


@given(POINTS, OTHERS, PLACES, SIZES, RATES_DRAWN)
def test_select_points_of_anything_grafts_only_where_its_own_are_worse(
    own: set[int], others: set[int], places: dict[int, float], size_bytes: int, rates: Rates
) -> None:
    selection = select_points(own_points(*own, size_bytes=size_bytes), others, places, rates)
    for point in selection - own:
        served = [place for place in places if place >= point]
        assert any(not any(point - SLACK_TOKENS <= p <= place for p in own) for place in served)


@given(POINTS, OTHERS, PLACES, *[SIZES] * 2, RATES_DRAWN)
def test_select_points_that_cost_more_never_keeps_more_of_them(
    own: set[int], others: set[int], places: dict[int, float], one: int, other: int, rates: Rates
) -> None:
    cheap, costly = (
        select_points(own_points(*own, size_bytes=size_bytes), others, places, rates)
        for size_bytes in sorted((one, other))
    )
    if own:  # the sizes are those of its own
        assert len(costly) <= len(cheap)


# Points inside the newest user message.

MESSAGE_POINTS = own_points(1000, 3000, 3500, 3750, 4000)
INSIDE = [3750, 3500, 3000]


def test_edit_cuts_lie_in_the_newest_user_message_the_nearest_to_its_end_first() -> None:
    content = Known(run_of(9000), NAMESPACE, header=1000, turn_start=8000, marks=(1500, 2500, 8500))
    assert edit_cuts(content) == [7744, 7488, 6976, 5952, 3904]
    assert edit_cuts(Known(run_of(5000), NAMESPACE)) == []


def test_select_points_keeps_points_inside_a_message_within_a_tenth_of_the_file() -> None:
    places, plenty = sure(1000, 4000), 100 * SMALL_BYTES
    chosen = select_points(MESSAGE_POINTS, (), places, RATES, INSIDE, plenty)
    assert chosen == MESSAGE_POINTS.keys()
    chosen = select_points(MESSAGE_POINTS, (), places, RATES, INSIDE, 20 * SMALL_BYTES)
    assert chosen == {1000, 3000, 3500, 4000}


def test_select_points_of_a_small_state_keeps_the_point_inside_a_message_that_spares_most() -> None:
    chosen = select_points(MESSAGE_POINTS, (), sure(1000, 4000), RATES, INSIDE, SMALL_BYTES)
    assert chosen == {1000, 3000, 4000}


def test_select_points_keeps_none_inside_a_message_that_is_not_worth_its_bytes() -> None:
    own = own_points(*MESSAGE_POINTS, size_bytes=10**6)
    chosen = select_points(own, (), sure(1000, 4000), RATES, INSIDE, 10**9)
    assert chosen == {1000, 4000}
