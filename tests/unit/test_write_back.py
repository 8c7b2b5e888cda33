"""When a dirty slot is worth a file."""

import pytest

from proxy.core.cuts import SLACK_TOKENS
from proxy.core.model import Rule, RuleKind
from proxy.core.prefix import BLOCK_TOKENS
from proxy.core.slots import Content, Empty, Known, Unknown
from proxy.core.write_back import at_savable_point, is_write_back_due
from tests.unit.builders import ANY_PREFIX, END_ONLY, NAMESPACE, NOTHING, RESTORE_POINTS, run_of


def held(n_tokens: int, n_tail: int = 0, n_saved: int = 0, last_cut: int = 0) -> Known:
    return Known(run_of(n_tokens), NAMESPACE, n_tail, n_saved=n_saved, last_cut=last_cut)


@pytest.mark.parametrize("rule", [ANY_PREFIX, RESTORE_POINTS])
def test_write_back_of_unsaved_work_is_due(rule: Rule) -> None:
    assert is_write_back_due(rule, held(1000))
    assert is_write_back_due(rule, held(1000, n_tail=100, n_saved=1000))


@pytest.mark.parametrize("content", [Empty(), held(1000), Unknown()])
def test_write_back_without_a_rule_is_never_due(content: Content) -> None:
    assert not is_write_back_due(NOTHING, content)


def test_write_back_of_an_empty_slot_is_not_due() -> None:
    assert not is_write_back_due(ANY_PREFIX, Empty())


def test_write_back_of_a_slot_that_a_file_nearly_covers_is_not_due() -> None:
    assert not is_write_back_due(RESTORE_POINTS, held(1000, n_saved=1000 - SLACK_TOKENS))
    assert is_write_back_due(RESTORE_POINTS, held(1000, n_saved=999 - SLACK_TOKENS))


def test_write_back_of_less_than_a_block_is_not_due() -> None:
    assert not is_write_back_due(ANY_PREFIX, held(BLOCK_TOKENS - 1))
    assert is_write_back_due(ANY_PREFIX, held(BLOCK_TOKENS))


def test_write_back_of_an_unknown_slot_is_due_if_it_can_be_adopted() -> None:
    assert is_write_back_due(RESTORE_POINTS, Unknown())
    assert not is_write_back_due(RESTORE_POINTS, Unknown(can_be_adopted=False))


def test_write_back_under_end_only_without_a_cut_is_not_due() -> None:
    assert not is_write_back_due(END_ONLY, held(1000))


def test_write_back_under_end_only_counts_up_to_the_cut() -> None:
    assert is_write_back_due(END_ONLY, held(1000, last_cut=900))
    assert not is_write_back_due(END_ONLY, held(1000, n_tail=500, last_cut=900, n_saved=900))


def test_write_back_under_end_only_of_a_state_within_the_window_is_not_due() -> None:
    rule = Rule(RuleKind.END_ONLY, end_holds_from=2200)
    assert not is_write_back_due(rule, held(3000, last_cut=2199))
    assert is_write_back_due(rule, held(3000, last_cut=2200))


def test_savable_point_under_end_only_is_the_last_cut_without_a_tail() -> None:
    content = at_savable_point(END_ONLY, held(1000, n_tail=7, last_cut=900))
    assert content is not None
    assert content.tokens == run_of(900) and content.n_tokens == 900


def test_savable_point_elsewhere_is_the_slot_as_it_stands() -> None:
    content = held(1000, n_tail=7, last_cut=900)
    assert at_savable_point(RESTORE_POINTS, content) is content
    assert at_savable_point(ANY_PREFIX, content) is content
    assert at_savable_point(NOTHING, content) is None
