"""The rule that files and measured probes bear out, for every kind of memory that was measured."""

from dataclasses import replace

import msgspec
import pytest

from proxy.core.model import (
    FULL_WINDOW_TOKENS,
    NO_RULE,
    RestoreProbe,
    Rule,
    RuleKind,
    after_save,
    derive,
    judge,
)

N_BACK = 20


def probe(
    n_tokens: int,
    reused_extended: int,
    reused_diverging: int | None = None,
    *,
    points: tuple[int, ...] = (),
    has_every_position: bool = False,
    reused_same: int | None = None,
) -> RestoreProbe:
    """Return a probe of *n_tokens* whose file carries *points*."""
    trials = [(n_tokens, n_tokens, reused_extended)]
    if reused_diverging is not None:
        trials.append((n_tokens - N_BACK, n_tokens - N_BACK, reused_diverging))
    if reused_same is not None:
        trials.append((n_tokens, n_tokens - 1, reused_same))
    return RestoreProbe(n_tokens, has_every_position, points, tuple(trials))


def whole(n_tokens: int, n_diverging: int | None = None, *, has_every: bool = True) -> RestoreProbe:
    return probe(n_tokens, n_tokens, n_diverging, has_every_position=has_every)


def with_points(
    n_tokens: int, points: tuple[int, ...], n_diverging: int | None = None
) -> RestoreProbe:
    return probe(n_tokens, n_tokens, n_diverging, points=points)


FULL = [whole(64, 44), whole(2200, 2180), whole(4400)]
SWA = [
    probe(64, 59, 0, points=(59,), has_every_position=True),
    with_points(2200, (1683, 2195), 1683),
    with_points(4400, (1683, 2195, 3883, 4395)),
]
RECURRENT = [
    with_points(64, (60,), 0),
    with_points(2200, (1684, 2196), 1684),
    with_points(4400, (1684, 2196, 3884, 4396)),
]
STRIPPED = [probe(64, 64, 0), probe(2200, 2200, 0), probe(4400, 4400)]
REPAIRED_SWA = [probe(64, 0, 0), probe(2200, 2200, 0), probe(4400, 4400)]
FORGETFUL_SWA = [probe(64, 0, 0, has_every_position=True), probe(2200, 0, 0), probe(4400, 0)]


@pytest.mark.parametrize(
    ("probes", "rule"),
    [
        (FULL, Rule(RuleKind.ANY_PREFIX)),
        (SWA, Rule(RuleKind.RESTORE_POINTS, end_holds_from=2200)),
        (RECURRENT, Rule(RuleKind.RESTORE_POINTS)),
        (STRIPPED, Rule(RuleKind.END_ONLY)),
        (REPAIRED_SWA, Rule(RuleKind.END_ONLY, end_holds_from=2200)),
        (FORGETFUL_SWA, NO_RULE),
        ([], NO_RULE),
    ],
    ids=["full", "swa", "recurrent", "stripped", "repaired swa", "old swa", "no probes"],
)
def test_judge_of_measured_probes_learns_the_rule(probes: list[RestoreProbe], rule: Rule) -> None:
    assert judge(probes) == rule


def test_judge_of_a_full_sized_window_never_learns_any_prefix() -> None:
    # --swa-full reuses everything from memory, but the file holds a window's positions only.
    probes = [whole(64, 44), whole(2200, 2180, has_every=False), whole(4400, has_every=False)]
    assert judge(probes).kind is RuleKind.END_ONLY


def test_judge_of_short_probes_alone_learns_what_they_show() -> None:
    assert judge(FULL[:1]) == Rule(RuleKind.ANY_PREFIX)
    assert judge(SWA[:1]) == NO_RULE
    assert judge(RECURRENT[:1]) == Rule(RuleKind.END_ONLY)


def test_judge_of_points_that_are_not_used_learns_end_only() -> None:
    probes = [RECURRENT[0], with_points(2200, (1684, 2196), 0), RECURRENT[2]]
    assert judge(probes) == Rule(RuleKind.END_ONLY)


def test_judge_of_a_longest_probe_that_fails_learns_nothing() -> None:
    assert judge([*FULL[:2], probe(4400, 0)]) == NO_RULE
    assert judge([*RECURRENT[:2], probe(4400, 0)]) == NO_RULE


def test_judge_of_a_diverging_reuse_beyond_the_tokens_in_common_is_not_any_prefix() -> None:
    assert judge([whole(64, 44), whole(2200, 2200), whole(4400)]).kind is not RuleKind.ANY_PREFIX


def test_judge_of_a_repeated_prompt_that_reuses_too_little_is_not_any_prefix() -> None:
    short = probe(64, 64, 44, has_every_position=True, reused_same=0)
    assert judge([short, *FULL[1:]]) == Rule(RuleKind.END_ONLY)
    assert judge([probe(64, 64, 44, has_every_position=True, reused_same=63)]) == Rule(
        RuleKind.ANY_PREFIX
    )


def test_judge_of_a_repeated_prompt_that_misses_its_context_checkpoint_is_end_only() -> None:
    forgetful = probe(64, 64, points=(60,), reused_same=0)
    assert judge([forgetful, *RECURRENT[1:]]) == Rule(RuleKind.END_ONLY)


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
