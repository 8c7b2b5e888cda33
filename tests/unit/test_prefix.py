"""Tokens, blocks and prefix hashes."""

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.prefix import (
    BLOCK_TOKENS,
    Namespace,
    common_prefix_length,
    hash_prefixes,
    token_ids,
    tokens_from_bytes,
    tokens_to_bytes,
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


@pytest.mark.parametrize("n_tokens", [0, 1, 127, 128, 129, 255, 256, 1000])
def test_hash_prefixes_counts_full_blocks_only(n_tokens: int) -> None:
    assert len(hash_prefixes(NAMESPACE, run_of(n_tokens))) == n_tokens // BLOCK_TOKENS


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 127))
def test_hash_prefixes_agree_exactly_on_the_shared_blocks(
    n_blocks: int, n_more: int, n_into_block: int
) -> None:
    n_common = n_blocks * BLOCK_TOKENS + n_into_block
    n_tokens = n_common + n_more * BLOCK_TOKENS + BLOCK_TOKENS
    left = hash_prefixes(NAMESPACE, run_of(n_tokens))
    right = hash_prefixes(NAMESPACE, branch(n_common, n_tokens))
    assert left[:n_blocks] == right[:n_blocks]
    assert not set(left[n_blocks:]) & set(right[n_blocks:])


def test_hash_prefixes_of_equal_blocks_differ_by_what_precedes_them() -> None:
    same_block_twice = token_ids([*range(BLOCK_TOKENS)] * 2)
    first, second = hash_prefixes(NAMESPACE, same_block_twice)
    assert first != second


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
def test_tokens_from_bytes_of_stored_tokens_gives_them_back(values: list[int]) -> None:
    assert list(tokens_from_bytes(tokens_to_bytes(token_ids(values)))) == values


def test_tokens_from_bytes_of_a_cut_off_token_raises_value_error() -> None:
    with pytest.raises(ValueError):
        tokens_from_bytes(b"\0" * 7)
