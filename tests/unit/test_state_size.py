"""How large a state is expected to be: never too small, where states are what they were measured to be."""

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.cuts import MAX_CONTEXT_CHECKPOINTS
from proxy.core.model import Prompt
from proxy.core.saving import StateSize, expected_bytes, extent_of
from proxy.core.slots import TAINTED, Empty, Known, Unknown, after_evaluation
from tests.unit.builders import NAMESPACE, RESTORE_POINTS, run_of

EXTENTS = st.tuples(st.integers(1, 100_000), st.integers(0, 32))


def test_expected_bytes_of_a_state_like_one_seen_is_its_size() -> None:
    assert expected_bytes([StateSize(7000, 6, 1_300_000)], 7000, 6) == 1_300_001
    assert expected_bytes([StateSize(7000, 6, 1_300_000)], 500, 2) == 1_300_001


def test_expected_bytes_where_nothing_was_seen_is_unknown() -> None:
    assert expected_bytes([], 100, 3) is None


def test_expected_bytes_of_a_model_without_context_checkpoints_does_not_count_them() -> None:
    assert expected_bytes([StateSize(1000, 0, 5000)], 2000, 32) == 10_001


def test_expected_bytes_of_a_recurrent_state_do_not_grow_with_the_tokens() -> None:
    probe = StateSize(127, 1, 2_000_000 + 127_000, fixed_bytes=2_000_000)
    assert expected_bytes([probe], 12_700, 1) == 2_000_000 + 12_700_000 + 1
    assert expected_bytes([probe], 127, 3) == 2 * (2_000_000 + 127_000) + 1


@given(
    st.lists(EXTENTS, min_size=1, max_size=6),
    EXTENTS,
    st.tuples(st.integers(0, 10**7), st.integers(0, 10**5), st.integers(0, 10**6)),
    st.booleans(),
)
def test_expected_bytes_is_an_upper_bound(
    seen: list[tuple[int, int]],
    wanted: tuple[int, int],
    parts: tuple[int, int, int],
    is_recurrent: bool,
) -> None:
    extra, per_token, per_point = parts

    def really(n_tokens: int, n_points: int) -> int:
        # The fixed part holds at least what a context checkpoint copies.
        return extra + per_point * (1 + n_points) + per_token * n_tokens

    has_points = any(n_points for _, n_points in seen)
    n_tokens, n_points = wanted if has_points else (wanted[0], 0)
    fixed = [per_point * (1 + n) * is_recurrent for _, n in seen]
    sizes = [StateSize(*e, really(*e), f) for e, f in zip(seen, fixed, strict=True)]
    expected = expected_bytes(sizes, n_tokens, n_points)
    assert expected is not None and expected >= really(n_tokens, n_points)


def test_extent_of_a_slot_counts_every_evaluation_since_it_was_known() -> None:
    first = after_evaluation(
        Empty(), Prompt(run_of(1000), NAMESPACE), RESTORE_POINTS, n_reused=0, n_generated=9
    )
    assert extent_of(first) == (1008, 5)
    longer = after_evaluation(first, Prompt(run_of(1200), NAMESPACE), RESTORE_POINTS, n_reused=1000)
    assert extent_of(longer) == (1200, 7)
    restored = Known(run_of(100), NAMESPACE, possible_points=tuple(range(29)))
    longer = after_evaluation(
        restored, Prompt(run_of(200), NAMESPACE), RESTORE_POINTS, n_reused=100
    )
    assert extent_of(longer) == (200, 34)


def test_extent_of_a_slot_that_nobody_knows_is_unknown() -> None:
    assert extent_of(Empty()) is None
    assert extent_of(TAINTED) is None
    abandoned = Unknown(NAMESPACE, likely=run_of(500))
    assert extent_of(abandoned) == (500, MAX_CONTEXT_CHECKPOINTS)
