"""Tokens, blocks and prefix hashes.

Owns: how a token sequence is cut into blocks, hashed and compared. Must never know about slots,
files or HTTP. A prefix hash only *finds* candidates; whether two prefixes are equal is decided by
`common_prefix_length`, token by token, because no 128-bit hash is a proof.
"""

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, NewType, TypeAlias

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
"""Only full blocks are hashed, so a shared prefix shorter than this is never found."""


def token_ids(values: Iterable[int]) -> TokenIds:
    """Return *values* as token ids."""
    return array("i", values)


def tokens_to_bytes(tokens: TokenIds) -> bytes:
    """Return the 4-byte native form in which token ids are stored."""
    return tokens.tobytes()


def tokens_from_bytes(data: bytes) -> TokenIds:
    """Return the token ids stored as *data*; raises ValueError if it is not a multiple of 4."""
    tokens = array("i")
    tokens.frombytes(data)
    return tokens


def hash_prefixes(namespace: Namespace, tokens: TokenIds) -> list[PrefixHash]:
    """Return the hash of each prefix of 1, 2, 3, ... full blocks, within *namespace*."""
    running = xxhash.xxh3_128(namespace)
    data = memoryview(tokens).cast("B")
    block_bytes = BLOCK_TOKENS * tokens.itemsize
    hashes = []
    for end in range(block_bytes, len(data) + 1, block_bytes):
        running.update(data[end - block_bytes : end])
        hashes.append(PrefixHash(running.digest()))
    return hashes


def common_prefix_length(
    left: TokenIds | str | memoryview, right: TokenIds | str | memoryview
) -> int:
    """Return how many leading tokens (characters, bytes) two sequences share, compared one by one."""
    limit = min(len(left), len(right))
    n_common = 0
    for stride in (4096, 64, 1):
        while n_common + stride <= limit:
            end = n_common + stride
            if left[n_common:end] != right[n_common:end]:
                break
            n_common = end
    return n_common
