"""Tokens, blocks and prefix hashes."""

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.tokens import (
    BLOCK_TOKENS,
    FIRST_BLOCK_TOKENS,
    Namespace,
    common_prefix_length,
    count_blocks,
    end_of_block,
    hash_prefixes,
    token_ids,
)
from tests.unit.builders import NAMESPACE, OTHER_NAMESPACE, branch, run_of

SMALL_LISTS = st.lists(st.integers(0, 2), max_size=12)
TOKEN = st.integers(-(2**31), 2**31 - 1)


@given(SMALL_LISTS, SMALL_LISTS)
def test_common_prefix_length_of_any_two_lists_equals_the_naive_one(
    left: list[int], right: list[int]
) -> None:
    naive = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))))
    assert common_prefix_length(token_ids(left), token_ids(right)) == naive


@given(st.integers(0, 9000), st.integers(0, 9000), st.integers(0, 9000))
def test_common_prefix_length_across_strides_is_exact(n_common: int, left: int, right: int) -> None:
    shorter = min(n_common + left, n_common + right)
    found = common_prefix_length(run_of(n_common + left), branch(n_common, n_common + right))
    assert found == min(n_common, shorter)


def test_common_prefix_length_of_a_list_with_itself_is_its_length() -> None:
    assert common_prefix_length(run_of(5000), run_of(5000)) == 5000


@pytest.mark.parametrize(
    ("n_tokens", "n_blocks"),
    [(0, 0), (15, 0), (16, 1), (127, 7), (128, 8), (129, 8), (255, 8), (256, 9), (1000, 14)],
)
def test_hash_prefixes_counts_full_blocks_only(n_tokens: int, n_blocks: int) -> None:
    assert len(hash_prefixes(NAMESPACE, run_of(n_tokens))) == n_blocks
    assert count_blocks(n_tokens) == n_blocks


@given(st.integers(0, 5000))
def test_count_blocks_of_any_number_of_tokens_ends_within_the_last_block(n_tokens: int) -> None:
    n_blocks = count_blocks(n_tokens)
    assert end_of_block(n_blocks) <= n_tokens < end_of_block(n_blocks + 1)
    assert count_blocks(end_of_block(n_blocks)) == n_blocks
    n_more = end_of_block(n_blocks + 1) - end_of_block(n_blocks)
    assert n_more == (FIRST_BLOCK_TOKENS if n_tokens < BLOCK_TOKENS else BLOCK_TOKENS)


@given(st.integers(0, 900), st.integers(1, 900))
def test_hash_prefixes_agree_exactly_on_the_shared_blocks(n_common: int, n_more: int) -> None:
    left = hash_prefixes(NAMESPACE, run_of(n_common + n_more))
    right = hash_prefixes(NAMESPACE, branch(n_common, n_common + n_more))
    n_blocks = count_blocks(n_common)
    assert left[:n_blocks] == right[:n_blocks]
    assert not set(left[n_blocks:]) & set(right[n_blocks:])


@pytest.mark.parametrize("n_tokens", [FIRST_BLOCK_TOKENS, BLOCK_TOKENS])
def test_hash_prefixes_of_equal_blocks_differ_by_what_precedes_them(n_tokens: int) -> None:
    hashes = hash_prefixes(NAMESPACE, token_ids([*range(n_tokens)] * 3))
    assert len(set(hashes)) == len(hashes) > 2


@given(st.binary(max_size=32), st.binary(max_size=32), st.integers(1, 4))
def test_hash_prefixes_in_two_namespaces_share_nothing(
    left: bytes, right: bytes, n_blocks: int
) -> None:
    tokens = run_of(n_blocks * BLOCK_TOKENS)
    left_hashes = hash_prefixes(Namespace(left.ljust(16)), tokens)
    right_hashes = hash_prefixes(Namespace(right.ljust(16)), tokens)
    if left.ljust(16) != right.ljust(16):
        assert not set(left_hashes) & set(right_hashes)
    else:
        assert left_hashes == right_hashes


def test_hash_prefixes_in_another_namespace_differ_for_every_block() -> None:
    tokens = run_of(4 * BLOCK_TOKENS)
    assert not set(hash_prefixes(NAMESPACE, tokens)) & set(hash_prefixes(OTHER_NAMESPACE, tokens))


@given(st.lists(TOKEN))
def test_token_ids_of_stored_tokens_gives_them_back(values: list[int]) -> None:
    assert list(token_ids(token_ids(values).tobytes())) == values


def test_token_ids_of_a_cut_off_token_raises_value_error() -> None:
    with pytest.raises(ValueError):
        token_ids(b"\0" * 7)
