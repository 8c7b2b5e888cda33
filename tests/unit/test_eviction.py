"""Which checkpoints go, and which never do."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.eviction import (
    LIVE_SECONDS,
    OTHER_MODEL_SHARE,
    PAUSE_SECONDS,
    LostRange,
    Present,
    Rank,
    Relative,
    choose_victims,
    lost_without,
    rank_of,
    value_seconds,
)
from proxy.core.model import Checkpoint, CheckpointId, CheckpointKind
from proxy.core.tokens import TokenIds, common_prefix_length, count_blocks, token_ids
from tests.unit.builders import NAMESPACE, OTHER_NAMESPACE, checkpoint, run_of, steady

NOW = 1_000_000.0


class Shelf:
    """Checkpoints with real tokens, and what they share."""

    def __init__(self) -> None:
        self.checkpoints: list[Checkpoint] = []
        self.asked: dict[int, dict[int, float]] = {}
        self._tokens: list[TokenIds] = []

    def put(self, tokens: TokenIds, **changes: Any) -> Checkpoint:
        made = checkpoint(
            len(tokens),
            **{"id": CheckpointId(len(self.checkpoints)), "last_used_at": NOW} | changes,
        )
        self._tokens.append(tokens)
        self.checkpoints.append(made)
        return made

    def relatives(self, of: Checkpoint) -> list[Relative]:
        """Return a checkpoint and all others of its namespace, by what they share with it."""
        tokens, asked = self._tokens[of.id], self.asked
        others = (c for c in self.checkpoints if c.id != of.id and c.namespace == of.namespace)
        shared = [(c, common_prefix_length(tokens, self._tokens[c.id])) for c in others]
        return [
            Relative(each, count_blocks(n_common), asked.get(each.id, {}))
            for each, n_common in ((of, len(tokens)), *shared)
        ]

    def lost(self, of: Checkpoint, gone: Collection[CheckpointId] = ()) -> list[LostRange]:
        own, *others = self.relatives(of)
        return lost_without(own, others, gone)

    def value(self, of: Checkpoint, present: Present = Present(NOW)) -> float:  # noqa: B008
        """Return the tokens that losing a checkpoint would cost."""
        return value_seconds(of, self.lost(of), replace(present, rates=steady(1.0)))

    def victims(
        self,
        n_bytes: int,
        present: Present = Present(NOW),  # noqa: B008
        ranks: Mapping[CheckpointId, Rank] = {},  # noqa: B006
        in_use: Collection[CheckpointId] = (),
    ) -> list[int]:
        victims, _ = choose_victims(
            self.checkpoints, n_bytes, self.relatives, present, ranks, in_use
        )
        return [v.id for v in victims]

    def all_in_order(self, **exempt: Any) -> list[int]:
        return self.victims(1 << 60, **exempt)


def suffixed(n_header: int, mark: int, n_own: int) -> TokenIds:
    """Return a conversation: a header that all share, then tokens of its own."""
    return token_ids([*range(n_header), *range(mark * 100_000, mark * 100_000 + n_own)])


def test_value_is_what_no_other_checkpoint_gives() -> None:
    shelf = Shelf()
    first = shelf.put(suffixed(1280, 1, 640), has_every_position=True)
    assert shelf.value(first) == 1920
    shelf.put(suffixed(1280, 2, 256), has_every_position=True)
    assert shelf.value(first) == 640
    shelf.put(suffixed(1280, 1, 512), has_every_position=True)
    assert shelf.value(first) == 128


def test_value_of_a_state_that_another_repeats_is_nothing() -> None:
    shelf = Shelf()
    older = shelf.put(run_of(1280), restore_points=(1276,))
    assert shelf.value(older) == 1280
    shelf.put(run_of(2560), restore_points=(1280, 2556))
    assert shelf.value(older) == 0


def test_value_of_a_state_that_ends_where_a_longer_one_cannot_continue_is_all_of_it() -> None:
    shelf = Shelf()
    header = shelf.put(run_of(1280), kind=CheckpointKind.HEADER)
    conversations = [shelf.put(suffixed(1280, mark, 256)) for mark in (1, 2, 3)]
    assert shelf.value(header) == 1280
    assert [shelf.value(c) for c in conversations] == [256, 256, 256]


def test_value_of_the_only_state_with_the_headers_point_includes_the_header() -> None:
    shelf = Shelf()
    first = shelf.put(run_of(2560), restore_points=(1280, 2556), header=1280)
    shelf.put(run_of(3840), restore_points=(2560, 3836), header=1280)
    assert shelf.value(first) == 1280


def test_value_falls_with_the_pause_since_a_request_came_that_way() -> None:
    shelf = Shelf()
    stored = shelf.put(run_of(1280), has_every_position=True)
    assert shelf.value(stored, Present(NOW + PAUSE_SECONDS)) == 640
    assert shelf.value(stored, Present(NOW + 9 * PAUSE_SECONDS)) == 128
    shelf.asked[stored.id] = {count_blocks(1280): NOW + PAUSE_SECONDS}
    assert shelf.value(stored, Present(NOW + PAUSE_SECONDS)) == 1280


def test_value_of_a_state_that_a_clock_ahead_has_dated_is_that_of_one_as_long_ago() -> None:
    shelf = Shelf()
    ahead = shelf.put(run_of(1000), last_used_at=NOW + 10 * PAUSE_SECONDS)
    before = shelf.put(token_ids(range(5000, 6000)), last_used_at=NOW - 10 * PAUSE_SECONDS)
    assert shelf.value(ahead) == shelf.value(before)


def test_value_of_another_models_state_is_a_share() -> None:
    shelf = Shelf()
    ours = shelf.put(run_of(1280))
    theirs = shelf.put(run_of(1280), namespace=OTHER_NAMESPACE)
    present = Present(NOW, rates_by={NAMESPACE: steady(1.0)})
    assert shelf.value(theirs, present) == OTHER_MODEL_SHARE * shelf.value(ours, present)


def test_value_is_seconds_by_the_measured_rate() -> None:
    shelf = Shelf()
    stored = shelf.put(run_of(1280))
    lost = shelf.lost(stored)
    assert value_seconds(stored, lost, Present(NOW, steady(100.0))) == pytest.approx(12.8)


def test_choose_victims_within_the_budget_chooses_none() -> None:
    shelf = Shelf()
    shelf.put(run_of(1280))
    assert shelf.victims(0) == shelf.victims(-500) == []


def test_checkpoint_that_comes_twice_frees_its_bytes_once() -> None:
    """As where a commit changes its score while the index is read."""
    shelf = Shelf()
    for start in range(2):
        shelf.put(run_of(1000, start=10_000 * start))
    twice, other = shelf.checkpoints
    shelf.checkpoints.insert(1, twice)
    assert sorted(shelf.victims(twice.size_bytes + 1)) == [twice.id, other.id]


def test_choose_victims_takes_the_least_worth_per_byte_first() -> None:
    shelf = Shelf()
    shelf.put(suffixed(0, 1, 1280), size_bytes=1000)
    shelf.put(suffixed(0, 2, 2560), size_bytes=4000)
    shelf.put(suffixed(0, 3, 1280), size_bytes=500)
    assert shelf.all_in_order() == [1, 0, 2]


def test_choose_victims_of_equals_takes_the_longest_unasked_first() -> None:
    shelf = Shelf()
    for mark, age in enumerate((10.0, 500.0, 200.0)):
        shelf.put(suffixed(0, mark, 1280), last_used_at=NOW - age)
    assert shelf.all_in_order() == [1, 2, 0]


def test_choose_victims_keeps_one_of_two_that_repeat_each_other() -> None:
    """Each alone is worth next to nothing; once one is gone, the other is worth everything."""
    shelf = Shelf()
    twins = [shelf.put(suffixed(2560, mark, 0), has_every_position=True) for mark in (1, 2)]
    assert [shelf.value(twin) for twin in twins] == [0, 0]
    shelf.put(suffixed(0, 7, 1280), has_every_position=True)
    assert shelf.all_in_order() in ([0, 2, 1], [1, 2, 0])


def test_choose_victims_takes_the_quarantined_first_and_the_replaced_last() -> None:
    shelf = Shelf()
    for mark in range(3):
        shelf.put(suffixed(0, mark, 1280 * (mark + 1)))
    ranks = {CheckpointId(2): Rank.QUARANTINED, CheckpointId(0): Rank.BEING_REPLACED}
    order = shelf.all_in_order(ranks=ranks)
    assert order == [2, 1, 0]


def test_choose_victims_leaves_a_live_header_longer_than_more_valuable_work() -> None:
    shelf = Shelf()
    header = shelf.put(run_of(640), kind=CheckpointKind.HEADER, header=640)
    shelf.put(suffixed(0, 1, 12800))
    assert shelf.all_in_order() == [1, header.id]
    later = Present(NOW + LIVE_SECONDS + 1)
    assert shelf.victims(1 << 60, later) == [header.id, 1]


@pytest.mark.parametrize("n_conversations", [1, 200])
def test_choose_victims_keeps_the_header_to_the_last(n_conversations: int) -> None:
    shelf = Shelf()
    header = shelf.put(run_of(1280), kind=CheckpointKind.HEADER, header=1280, size_bytes=10_000)
    for mark in range(n_conversations):
        shelf.put(suffixed(1280, 1 + mark, 12800), header=1280, size_bytes=100)
    assert shelf.all_in_order()[-1] == header.id


def test_choose_victims_under_restore_points_keeps_a_state_with_the_headers_point() -> None:
    shelf = Shelf()
    for mark in range(50):
        n_own = 1280 + 128 * (mark % 7)
        points = (1280, 1280 + n_own - 4)
        shelf.put(suffixed(1280, mark, n_own), restore_points=points, header=1280)
    last = shelf.all_in_order()[-1]
    [kept] = [c for c in shelf.checkpoints if c.id == last]
    assert shelf.victims(49 * 1000) == shelf.all_in_order()[:-1]
    assert 1280 in kept.restore_points


@st.composite
def shelves(draw: st.DrawFn) -> Shelf:
    """Return conversations that share headers, of all kinds and ages."""
    shelf = Shelf()
    for mark in range(draw(st.integers(1, 7))):
        n_header, n_own = 128 * draw(st.integers(0, 4)), 128 * draw(st.integers(1, 6))
        n_tokens = n_header + n_own
        shelf.put(
            suffixed(n_header, mark % draw(st.integers(1, 3)), n_own),
            kind=draw(KINDS),
            size_bytes=draw(st.integers(1, 50)),
            last_used_at=NOW - draw(st.sampled_from([0, 60, 4000, 90_000])),
            restore_points=tuple(p for p in (n_header, n_tokens - 4) if p),
            has_every_position=draw(st.booleans()),
            header=n_header,
            turn_start=draw(st.sampled_from([0, n_tokens - 4])),
            is_pinned=draw(st.booleans()),
        )
    return shelf


KINDS = st.sampled_from(CheckpointKind)
IDS = st.sets(st.integers(0, 6).map(CheckpointId))


@given(shelves(), st.integers(-10, 300), IDS, IDS, IDS)
def test_choose_victims_of_anything_frees_enough_and_nothing_in_use_or_pinned(
    shelf: Shelf, n_bytes: int, in_use: set[Any], quarantined: set[Any], replaced: set[Any]
) -> None:
    ranks = dict.fromkeys(quarantined, Rank.QUARANTINED)
    ranks |= dict.fromkeys(replaced, Rank.BEING_REPLACED)
    of = shelf.checkpoints, n_bytes, shelf.relatives, Present(NOW)
    victims, _ = choose_victims(*of, ranks, in_use)
    evictable = [c for c in shelf.checkpoints if c.id not in in_use and not c.is_pinned]
    freed = sum(v.size_bytes for v in victims)
    assert {v.id for v in victims} <= {c.id for c in evictable}
    assert len({v.id for v in victims}) == len(victims)
    assert freed >= n_bytes or len(victims) == len(evictable)
    assert not victims or freed - victims[-1].size_bytes < n_bytes
    free_to_go = [c.id for c in evictable if c.id not in replaced]
    if {v.id for v in victims} & replaced:
        assert set(free_to_go) <= {v.id for v in victims}


@given(shelves(), st.data())
def test_value_only_grows_as_others_go_and_shrinks_with_time(
    shelf: Shelf, data: st.DataObject
) -> None:
    one = data.draw(st.sampled_from(shelf.checkpoints))
    others = [c for c in shelf.checkpoints if c.id != one.id]
    gone, values, places = set[CheckpointId](), [], []
    for other in (None, *data.draw(st.permutations(others))):
        if other is not None:
            gone.add(other.id)
        lost = shelf.lost(one, gone)
        values.append(value_seconds(one, lost, Present(NOW)))
        places.append(rank_of(one, lost, Present(NOW)))
        assert value_seconds(one, lost, Present(NOW + 60)) <= values[-1]
    assert values == sorted(values) and places == sorted(places)
    assert values[-1] > 0  # alone, every state is worth something


@pytest.mark.parametrize("n_compared", [2, 7, 100])
def test_choose_victims_looks_at_few_and_still_takes_all_in_the_end(
    n_compared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.core.eviction.N_COMPARED", n_compared)
    shelf = Shelf()
    for mark in range(50):
        shelf.put(suffixed(1280, mark, 128 * (1 + mark % 7)), last_used_at=NOW - 50 + mark)
    ranks = {CheckpointId(0): Rank.QUARANTINED, CheckpointId(1): Rank.BEING_REPLACED}
    order = shelf.all_in_order(ranks=ranks)
    assert sorted(order) == list(range(50))
    assert order[0] == 0 and order[-1] == 1
    assert all(checkpoint_id < n_compared + place for place, checkpoint_id in enumerate(order))
