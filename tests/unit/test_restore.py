"""The one place that applies the learned rule."""

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.model import Rule, RuleKind, highest_point, usable_tokens
from tests.unit.builders import ANY_PREFIX, END_ONLY, NOTHING, RESTORE_POINTS, checkpoint

POINTS = st.lists(st.integers(1, 60), max_size=5, unique=True).map(lambda p: tuple(sorted(p)))
RULES = st.builds(Rule, st.sampled_from(RuleKind), st.integers(0, 60))


def test_usable_tokens_with_no_rule_is_nothing() -> None:
    state = checkpoint(100, restore_points=(50,), has_every_position=True)
    assert usable_tokens(NOTHING, state, 100, 200) == 0


def test_usable_tokens_at_the_end_of_a_shorter_state_is_all_of_it() -> None:
    for rule in (ANY_PREFIX, RESTORE_POINTS, END_ONLY):
        assert usable_tokens(rule, checkpoint(100), 100, 101) == 100


def test_usable_tokens_of_a_prompt_equal_to_the_state_excludes_its_end() -> None:
    state = checkpoint(100, restore_points=(60, 96), has_every_position=True)
    assert usable_tokens(END_ONLY, state, 100, 100) == 0
    assert usable_tokens(RESTORE_POINTS, state, 100, 100) == 96
    assert usable_tokens(ANY_PREFIX, state, 100, 100) == 99


def test_usable_tokens_of_a_diverging_prompt_is_the_last_restore_point_before_it() -> None:
    state = checkpoint(100, restore_points=(30, 60, 96), has_every_position=True)
    assert usable_tokens(RESTORE_POINTS, state, 95, 200) == 60
    assert usable_tokens(RESTORE_POINTS, state, 29, 200) == 0
    assert usable_tokens(END_ONLY, state, 95, 200) == 0


def test_usable_tokens_under_any_prefix_without_every_position_is_the_end_only() -> None:
    assert usable_tokens(ANY_PREFIX, checkpoint(100), 99, 200) == 0
    assert usable_tokens(ANY_PREFIX, checkpoint(100), 100, 200) == 100


def test_usable_tokens_of_a_state_within_the_window_does_not_use_its_end() -> None:
    rule = Rule(RuleKind.RESTORE_POINTS, end_holds_from=2200)
    assert usable_tokens(rule, checkpoint(64, restore_points=(59,)), 64, 72) == 59
    assert usable_tokens(Rule(RuleKind.END_ONLY, 2200), checkpoint(64), 64, 72) == 0
    assert usable_tokens(rule, checkpoint(2200, restore_points=(2195,)), 2200, 2300) == 2200
    in_a_longer_window = checkpoint(3000, restore_points=(2995,), has_every_position=True)
    assert usable_tokens(rule, in_a_longer_window, 3000, 3100) == 2995


@given(RULES, st.integers(1, 60), POINTS, st.booleans(), st.integers(0, 60), st.integers(1, 80))
def test_usable_tokens_of_anything_is_common_and_allowed_by_the_rule(
    rule: Rule,
    n_tokens: int,
    points: tuple[int, ...],
    has_every: bool,
    n_common: int,
    n_prompt: int,
) -> None:
    state = checkpoint(n_tokens, restore_points=points, has_every_position=has_every)
    n_common = min(n_common, n_tokens)
    n_usable = usable_tokens(rule, state, n_common, n_prompt)
    assert 0 <= n_usable <= min(n_common, n_prompt - 1)
    allowed = {
        RuleKind.NOTHING: set[int](),
        RuleKind.END_ONLY: {n_tokens},
        RuleKind.RESTORE_POINTS: {n_tokens, *points},
        RuleKind.ANY_PREFIX: set(range(1, n_common + 1)) if has_every else {n_tokens},
    }[rule.kind]
    assert n_usable in {0} | allowed
    if n_usable == n_tokens and rule.kind is not RuleKind.ANY_PREFIX and n_tokens not in points:
        assert n_tokens >= rule.end_holds_from


@given(POINTS, st.integers(0, 70))
def test_highest_point_equals_the_naive_search(points: tuple[int, ...], limit: int) -> None:
    assert highest_point(points, limit) == max((p for p in points if p <= limit), default=0)
