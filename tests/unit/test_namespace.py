"""Which known model a canary belongs to, and which states are of one model."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import xxhash

from proxy.core.model import (
    CANARY_TOKENS,
    TOLERANCE,
    KnownNamespace,
    choose_namespace,
    is_same_canary,
)
from proxy.llama.files import Section
from proxy.servers import attach

CANARY = [(100 + i, -1.0 - i / 10) for i in range(10)]


def shifted(by: float) -> list[tuple[int, float]]:
    return [(token, logprob + by) for token, logprob in CANARY]


def test_canary_tokens_are_many_and_spread() -> None:
    assert len(set(CANARY_TOKENS)) == 128
    assert min(CANARY_TOKENS) >= 0


@pytest.mark.parametrize("by", [0.0, 0.0013, -0.009])
def test_is_same_canary_within_the_measured_noise_is_true(by: float) -> None:
    assert is_same_canary(CANARY, shifted(by))


@pytest.mark.parametrize("by", [TOLERANCE * 1.5, 0.08, -0.34])
def test_is_same_canary_of_another_rope_scale_is_false(by: float) -> None:
    assert not is_same_canary(CANARY, shifted(by))


def test_is_same_canary_with_one_token_off_is_false() -> None:
    one_off = [*CANARY[:5], (CANARY[5][0], CANARY[5][1] - 0.05), *CANARY[6:]]
    assert not is_same_canary(CANARY, one_off)


def test_is_same_canary_with_near_ties_swapped_in_order_is_true() -> None:
    assert is_same_canary(CANARY, [CANARY[1], CANARY[0], *CANARY[2:]])


def test_is_same_canary_with_another_tail_is_true_up_to_half() -> None:
    def with_other_tail(n_kept: int) -> list[tuple[int, float]]:
        return CANARY[:n_kept] + [(900 + i, -3.0) for i in range(10 - n_kept)]

    assert is_same_canary(CANARY, with_other_tail(5))
    assert not is_same_canary(CANARY, with_other_tail(4))


def test_is_same_canary_with_another_likeliest_token_is_false() -> None:
    assert not is_same_canary(CANARY, [(7, -0.5), *CANARY[1:]])
    assert not is_same_canary([(7, -0.5), *CANARY[1:]], CANARY)


def test_is_same_canary_with_nothing_to_compare_is_false() -> None:
    assert not is_same_canary([], CANARY)
    assert not is_same_canary(CANARY, [])
    assert not is_same_canary([], [])


def test_choose_namespace_among_several_returns_the_matching_one() -> None:
    other = KnownNamespace(b"other", shifted(0.2))
    ours = KnownNamespace(b"ours", CANARY)
    assert choose_namespace([other, ours], shifted(0.001)) == ours


def test_choose_namespace_of_an_unknown_model_is_none() -> None:
    assert choose_namespace([KnownNamespace(b"other", shifted(0.2))], CANARY) is None
    assert choose_namespace([], CANARY) is None


@pytest.mark.parametrize(("n_caches", "is_found"), [(2, True), (3, False)])
def test_states_from_before_a_window_behind_an_index_was_put_in_order_are_not_found(
    n_caches: int, is_found: bool
) -> None:
    layout = (Section("attention", 1, False, 2, (), ()),) * n_caches
    process: Any = SimpleNamespace(saver=SimpleNamespace(may_have_window=True))
    state: Any = SimpleNamespace(version=4, layout=layout, draft_bytes=0)
    before = xxhash.xxh3_128_hexdigest(msgspec.json.encode([{}, (4, layout), "in order"]))
    assert (attach._static(process, {}, state) == before) is is_found
