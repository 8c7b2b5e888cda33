"""Which context checkpoints stay in a file, and which come back from older ones."""

from bisect import bisect_left

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from proxy.core.cuts import SLACK_TOKENS
from proxy.core.model import CheckpointId, CheckpointKind
from proxy.core.rates import Rates
from proxy.core.saving import (
    OLDER_PLACE_SHARE,
    ChosenPoints,
    Donor,
    ReturnPoint,
    donors_of,
    marks_left,
    places_of,
    select_points,
)
from proxy.core.slots import Known
from tests.unit.builders import NAMESPACE, candidate, checkpoint, run_of, steady

CONVERSATION = CheckpointKind.CONVERSATION
FIRST, SECOND = CheckpointId(1), CheckpointId(2)
RATES = steady(500.0, 1e6)
SMALL_BYTES, BIG_BYTES = 1000, 10**8


def sure(*n_tokens: int) -> list[ReturnPoint]:
    return [ReturnPoint(n, 1.0) for n in n_tokens]


def own_points(*points: int, size_bytes: int = SMALL_BYTES) -> dict[int, int]:
    return dict.fromkeys(points, size_bytes)


# Where requests come back to.


def test_places_of_a_conversation_are_its_cuts_and_its_end() -> None:
    content = Known(run_of(2000), NAMESPACE, n_tail=50, header=300, turn_start=1500)
    assert places_of(content, CONVERSATION) == sure(300, 1500, 2000)
    assert places_of(Known(run_of(2000), NAMESPACE), CONVERSATION) == sure(2000)


def test_places_of_older_marks_are_less_and_less_likely() -> None:
    content = Known(
        run_of(2000), NAMESPACE, header=300, turn_start=1500, marks=(300, 700, 1100, 1500)
    )
    share = OLDER_PLACE_SHARE
    assert places_of(content, CONVERSATION) == [
        ReturnPoint(300, 1.0),
        ReturnPoint(700, share * share),
        ReturnPoint(1100, share),
        ReturnPoint(1500, 1.0),
        ReturnPoint(2000, 1.0),
    ]


@pytest.mark.parametrize("kind", [CheckpointKind.HEADER, CheckpointKind.BRANCH])
def test_places_of_a_state_that_is_continued_at_its_end_are_those_before_it(
    kind: CheckpointKind,
) -> None:
    content = Known(run_of(1500), NAMESPACE, header=300, turn_start=1500)
    assert places_of(content, kind) == sure(300)


def test_places_of_a_slot_that_was_cut_back_do_not_lie_behind_its_end() -> None:
    content = Known(run_of(1000), NAMESPACE, header=300, turn_start=1500, marks=(700, 1200))
    places = [place.n_tokens for place in places_of(content, CONVERSATION)]
    assert places == [300, 700, 1000]


# What older files can give.


def test_donors_of_candidates_offer_the_points_that_are_common() -> None:
    whole = candidate(900, 900, id=FIRST, restore_points=(195, 495, 895))
    forked = candidate(900, 495, id=SECOND, restore_points=(195, 495, 895))
    without = candidate(900, 100, id=CheckpointId(3), restore_points=(195,))
    assert donors_of([whole, forked, without]) == [
        Donor(FIRST, (195, 495, 895)),
        Donor(SECOND, (195, 495)),
    ]


# Which stay.


def test_select_points_keeps_the_best_one_for_each_place() -> None:
    own = own_points(100, 295, 400, 1495, 1700, 1995)
    assert select_points(own, [], sure(300, 1500, 2000), RATES) == ChosenPoints(
        frozenset({295, 1495, 1995}), {}
    )


def test_select_points_keeps_a_point_far_before_a_place_that_has_no_better_one() -> None:
    own = own_points(295, 1995)
    assert select_points(own, [], sure(300, 1500), RATES).points == {295}
    assert select_points(own_points(1000), [], sure(300, 1500), RATES).points == {1000}


def test_select_points_takes_from_an_older_file_what_llama_server_has_dropped() -> None:
    selection = select_points(
        own_points(900, 1995), [Donor(FIRST, (295, 1495))], sure(300, 1500, 2000), RATES
    )
    assert selection == ChosenPoints(frozenset({1995}), {295: FIRST, 1495: FIRST})
    assert selection.points == {295, 1495, 1995}


def test_select_points_prefers_its_own_to_a_slightly_better_one_elsewhere() -> None:
    near, far = 1495 - SLACK_TOKENS, 1495 - SLACK_TOKENS - 1
    donors = [Donor(FIRST, (1495,))]
    assert select_points(own_points(near), donors, sure(1500), RATES).grafted == {}
    assert select_points(own_points(far), donors, sure(1500), RATES).grafted == {1495: FIRST}


def test_select_points_drops_a_place_that_is_not_worth_its_bytes() -> None:
    places = [ReturnPoint(500, 0.25), ReturnPoint(1000, 0.5), ReturnPoint(1500, 1.0)]
    own = own_points(495, 995, 1495)
    assert select_points(own, [], places, RATES).own == {495, 995, 1495}
    costly = own_points(495, 995, 1495, size_bytes=10**6)
    assert select_points(costly, [], places, RATES).own == {1495}


def test_select_points_counts_what_the_place_before_it_spares_already() -> None:
    """A second at 995 spares 500 tokens if there is one at 495, and 995 if there is not."""
    places, size_bytes = [ReturnPoint(500, 1.0), ReturnPoint(1000, 0.5)], 400_000
    both = own_points(495, 995, size_bytes=size_bytes)
    assert select_points(both, [], places, RATES).own == {495}
    alone = own_points(995, size_bytes=size_bytes)
    assert select_points(alone, [], places, RATES).own == {995}


def test_select_points_of_a_file_without_any_keeps_none() -> None:
    assert select_points({}, [], sure(300), RATES).points == frozenset()


POINTS = st.sets(st.integers(1, 3000), max_size=12)
DONORS = st.lists(POINTS.map(sorted), max_size=3).map(
    lambda found: [Donor(CheckpointId(i), tuple(points)) for i, points in enumerate(found)]
)
LIKELIHOODS = st.sampled_from([1.0, 0.5, 0.25, 0.125])
PLACES = st.dictionaries(st.integers(1, 3000), LIKELIHOODS, max_size=8).map(
    lambda places: [ReturnPoint(n, places[n]) for n in sorted(places)]
)
RATES_DRAWN = st.builds(steady, st.floats(10, 1e4), st.floats(1e5, 1e10))
SIZES = st.integers(0, 10**8)


@given(POINTS, DONORS, PLACES, SIZES, RATES_DRAWN)
def test_select_points_of_anything_keeps_what_is_there_before_some_place(
    own: set[int], donors: list[Donor], places: list[ReturnPoint], size_bytes: int, rates: Rates
) -> None:
    selection = select_points(own_points(*own, size_bytes=size_bytes), donors, places, rates)
    offered = {donor.id: donor.points for donor in donors}
    assert selection.own <= own
    assert all(point in offered[donor] for point, donor in selection.grafted.items())
    assert not own & selection.grafted.keys()
    every_point = sorted(own.union(*offered.values()))
    for point in selection.points:
        # It is the best there is for a place, or as good as that.
        assert any(
            point <= place.n_tokens
            and every_point[bisect_left(every_point, place.n_tokens + 1) - 1]
            <= point + SLACK_TOKENS
            for place in places
        )


@given(POINTS, DONORS, PLACES, SIZES, RATES_DRAWN)
def test_select_points_of_anything_serves_every_sure_place_as_well_as_can_be(
    own: set[int], donors: list[Donor], places: list[ReturnPoint], size_bytes: int, rates: Rates
) -> None:
    selection = select_points(own_points(*own, size_bytes=size_bytes), donors, places, rates)
    every_point = own.union(*(donor.points for donor in donors))
    for place in places:
        best = max((p for p in every_point if p <= place.n_tokens), default=0)
        if place.likelihood == 1.0 and best > SLACK_TOKENS:
            kept = max((p for p in selection.points if p <= place.n_tokens), default=0)
            # Its own may be so much worse than a graft, and another place's so much worse than its own.
            assert kept >= best - 2 * SLACK_TOKENS


@given(POINTS, DONORS, PLACES, RATES_DRAWN)
def test_select_points_of_anything_large_keeps_none_close_to_another(
    own: set[int], donors: list[Donor], places: list[ReturnPoint], rates: Rates
) -> None:
    assume(own)  # they tell what a context checkpoint of this model costs
    selection = select_points(own_points(*own, size_bytes=10**12), donors, places, rates)
    kept = [0, *sorted(selection.points)]
    assert all(high - low > SLACK_TOKENS for low, high in zip(kept, kept[1:], strict=False))


@given(POINTS, DONORS, PLACES, SIZES, RATES_DRAWN)
def test_select_points_of_anything_grafts_only_where_its_own_are_worse(
    own: set[int], donors: list[Donor], places: list[ReturnPoint], size_bytes: int, rates: Rates
) -> None:
    selection = select_points(own_points(*own, size_bytes=size_bytes), donors, places, rates)
    for point in selection.grafted:
        served = [place.n_tokens for place in places if place.n_tokens >= point]
        assert any(not any(point - SLACK_TOKENS <= p <= place for p in own) for place in served)


@given(POINTS, DONORS, PLACES, *[SIZES] * 2, RATES_DRAWN)
def test_select_points_that_cost_more_never_keeps_more_of_them(
    own: set[int],
    donors: list[Donor],
    places: list[ReturnPoint],
    one: int,
    other: int,
    rates: Rates,
) -> None:
    cheap, costly = (
        select_points(own_points(*own, size_bytes=size_bytes), donors, places, rates).points
        for size_bytes in sorted((one, other))
    )
    if own:  # the sizes are those of its own
        assert len(costly) <= len(cheap)


# What is left of a file's marks.


def test_marks_left_are_those_that_a_state_can_be_continued_at() -> None:
    points = (195, 700 - SLACK_TOKENS, 1100 - SLACK_TOKENS - 1)
    state = checkpoint(2000, restore_points=points, marks=(200, 700, 1100, 1500))
    assert list(marks_left(state)) == [200, 700]
