"""The rule that files and restored states show, for every kind of memory that was measured."""

from dataclasses import replace

import msgspec
import pytest

from proxy.core.model import FULL_WINDOW_TOKENS, Rule, RuleKind, after_save, derive


@pytest.mark.parametrize(
    ("has_points", "has_every_position", "holds_at_end", "rewinds", "rule"),
    [
        (False, True, True, True, Rule(RuleKind.ANY_PREFIX)),  # full, --swa-full
        (True, True, False, False, Rule(RuleKind.RESTORE_POINTS, end_holds_from=2200)),  # swa
        (True, False, False, False, Rule(RuleKind.RESTORE_POINTS)),  # recurrent, hybrid
        (False, False, True, False, Rule(RuleKind.END_ONLY)),  # older, or not understood
        (False, False, False, False, Rule(RuleKind.NOTHING)),  # hybrid on b9294
        (False, True, False, False, Rule(RuleKind.END_ONLY, end_holds_from=2200)),  # repaired swa
        (False, True, True, False, Rule(RuleKind.END_ONLY)),  # swa before June 2026
    ],
)
def test_derive_tells_the_rule_of_each_memory(
    has_points: bool, has_every_position: bool, holds_at_end: bool, rewinds: bool, rule: Rule
) -> None:
    derived = derive(
        has_points=has_points,
        has_every_position=has_every_position,
        holds_at_end=holds_at_end,
        rewinds=rewinds,
    )
    assert derived == rule


def test_rule_after_a_save_of_a_cut_window_is_no_longer_any_prefix() -> None:
    full, end_only = Rule(RuleKind.ANY_PREFIX), Rule(RuleKind.END_ONLY)
    assert after_save(full, has_every_position=True) == full
    assert after_save(full, has_every_position=False) == end_only
    assert after_save(end_only, has_every_position=False) == end_only


def test_states_that_fill_the_window_are_relied_on_once_a_file_has_shown_its_size() -> None:
    rule = Rule(RuleKind.RESTORE_POINTS, FULL_WINDOW_TOKENS)
    assert after_save(rule, has_every_position=True) == rule
    learned = after_save(rule, has_every_position=False, window_tokens=512)
    assert learned == replace(rule, end_holds_from=513)
    assert after_save(learned, has_every_position=False, window_tokens=512) == learned
    assert after_save(rule, has_every_position=False, window_tokens=4096) == rule


def test_rule_is_read_as_it_was_remembered() -> None:
    rule = Rule(RuleKind.END_ONLY, 2200, 256)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(rule), type=Rule) == rule
