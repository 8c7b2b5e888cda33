"""Tokens, blocks and prefix hashes.

Owns: how a token sequence is cut into blocks, hashed and compared. Must never know about slots,
files or HTTP. A prefix hash only *finds* candidates. `common_prefix_length` decides whether two prefixes
are equal, token by token, because no 128-bit hash is a proof.
"""

from array import array
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NewType, TypeAlias

import xxhash

if TYPE_CHECKING:
    TokenIds: TypeAlias = array[int]
else:
    TokenIds = array  # array is not subscriptable before Python 3.12
"""Token ids as a C array of int32: 4 bytes a token, compared and hashed without boxing."""

PrefixHash = NewType("PrefixHash", bytes)
Namespace = NewType("Namespace", bytes)
"""16 bytes naming everything that must match before tokens are compared."""

BLOCK_TOKENS = 128
FIRST_BLOCK_TOKENS = 16
"""Only full blocks are hashed. The first 128 tokens are eight short blocks, so that short prompts are found
too. A shared prefix of less than 16 tokens is never found."""
_N_FIRST_BLOCKS = BLOCK_TOKENS // FIRST_BLOCK_TOKENS
_STRIDE = 4096
"""How many tokens are compared at once; the first difference is then found by halving."""


def token_ids(values: Iterable[int]) -> TokenIds:
    """Return *values* as token ids. Bytes are stored ids; raises ValueError if the last is cut off."""
    return array("i", values)


def count_blocks(n_tokens: int) -> int:
    """Return how many full blocks *n_tokens* tokens have."""
    if n_tokens < BLOCK_TOKENS:
        return n_tokens // FIRST_BLOCK_TOKENS
    return _N_FIRST_BLOCKS - 1 + n_tokens // BLOCK_TOKENS


def end_of_block(n_blocks: int) -> int:
    """Return how many tokens the first *n_blocks* blocks have."""
    if n_blocks < _N_FIRST_BLOCKS:
        return n_blocks * FIRST_BLOCK_TOKENS
    return (n_blocks - _N_FIRST_BLOCKS + 1) * BLOCK_TOKENS


def hash_prefixes(namespace: Namespace, tokens: TokenIds) -> list[PrefixHash]:
    """Return the hash of each prefix of 1, 2, 3, ... full blocks, within *namespace*."""
    running = xxhash.xxh3_128(namespace)
    data, hashes = memoryview(tokens), list[PrefixHash]()
    short = range(0, min(BLOCK_TOKENS, len(tokens) + 1), FIRST_BLOCK_TOKENS)
    long = range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)
    for begin, end in pairwise((*short, *long)):
        running.update(data[begin:end])
        hashes.append(PrefixHash(running.digest()))
    return hashes


def hash_steps(namespace: Namespace, tokens: TokenIds, n_tokens: int) -> list[PrefixHash]:
    """Return the hash of each prefix of *n_tokens*, whole blocks, twice as many and so on."""
    first, step = count_blocks(n_tokens) - 1, n_tokens // BLOCK_TOKENS
    return hash_prefixes(namespace, tokens)[first::step]


def hash_whole(namespace: Namespace, tokens: TokenIds, n_tokens: int) -> PrefixHash:
    """Return the hash of the first *n_tokens*, wherever a block ends; no hash of blocks equals it."""
    whole = xxhash.xxh3_128(namespace + n_tokens.to_bytes(4))
    whole.update(memoryview(tokens)[:n_tokens])
    return PrefixHash(whole.digest())


def common_prefix_length(
    left: TokenIds | str | bytes | list[Any], right: TokenIds | str | bytes | list[Any]
) -> int:
    """Return how many leading tokens (characters, bytes, items) two sequences share, one by one."""
    limit = min(len(left), len(right))
    n_common, stride = 0, _STRIDE
    while stride:
        end = n_common + stride
        is_alike = end <= limit and left[n_common:end] == right[n_common:end]
        if is_alike:
            n_common = end
        if not is_alike or stride < _STRIDE:
            stride //= 2
    return n_common
