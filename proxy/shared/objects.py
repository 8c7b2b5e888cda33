"""The objects in the shared store: their names, and what the small one beside each state says.

Owns: `v1/<namespace>/<id>.state`, `.meta` and `.used` (docs/many-machines.md). A state is there once its
`.meta` is, which is written last. No name is used twice, and nothing but a `.used` is ever overwritten.
Must never know how objects come and go.
"""

import re
from dataclasses import replace
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from proxy.core.cuts import CONTEXT_CHECKPOINT_MARGIN
from proxy.core.model import Checkpoint, CheckpointId
from proxy.core.tokens import (
    BLOCK_TOKENS,
    Namespace,
    PrefixHash,
    TokenIds,
    count_blocks,
    hash_prefixes,
    hash_whole,
    tokens_from_bytes,
)
from proxy.store.known_models import Owner

VERSION = "v1"
STATE, META, USED = "state", "meta", "used"
"""A state, the record that commits it, and a marker whose time says when somebody last read the state."""
_HASH_BYTES = 16
STEP_TOKENS = 1024
"""Of a hundred thousand states the hashes of all blocks would be too many; a shorter one is not shared."""
_TIME_DIGITS, _WRITER_DIGITS, _RANDOM_DIGITS = 12, 8, 16
_NAME = re.compile(
    rf"{VERSION}/(?P<namespace>[0-9a-f]{{32}})/(?P<id>[0-9a-f]{{{_TIME_DIGITS}}}"
    rf"-[0-9a-f]{{{_WRITER_DIGITS}}}-[0-9a-f]{{{_RANDOM_DIGITS}}})\.(?P<kind>[a-z]+)"
)


class Listed(NamedTuple):
    """An object as it is listed; `modified_at` is of the shared store's own clock."""

    namespace: str
    id: str
    kind: str
    size_bytes: int
    modified_at: float

    @property
    def name(self) -> str:
        return name_of(self.namespace, self.id, self.kind)


def listed(path: str, size_bytes: int, modified_at: float) -> Listed | None:
    """Return what a name says, None if it is not one of ours."""
    if (found := _NAME.fullmatch(path)) is None:
        return None
    namespace, shared_id, kind = found.groups()
    return Listed(namespace, shared_id, kind, size_bytes, modified_at)


def name_of(namespace: str, shared_id: str, kind: str) -> str:
    return f"{VERSION}/{namespace}/{shared_id}.{kind}"


def new_id(now: float, writer: str, random: str) -> str:
    """Return a new id; ids sort by time, as far as clocks agree. *writer* and *random* are hex digits."""
    return f"{earliest_id(now)}-{writer}-{random}"


def earliest_id(now: float) -> str:
    """Return what all ids that were made from a moment on sort behind."""
    return f"{max(0, int(now * 1000)):0{_TIME_DIGITS}x}"


def writer_of(shared_id: str) -> str:
    return shared_id.split("-")[1]


def index_id(shared_id: str) -> CheckpointId:
    """Return by what a shared state is entered in the index; it fits into 63 bits."""
    return CheckpointId(int.from_bytes(blake2b(shared_id.encode(), digest_size=8).digest()) >> 1)


class Meta(msgspec.Struct, frozen=True):
    """What a `.meta` says: the checkpoint as its writer knows it, whose it is, and how it is found.

    `hashes` are those of its prefixes of STEP_TOKENS, twice as many and so on, `points` those of lengths
    at which a request may leave it, both of the shared namespace: the tokens are in the state. `host` is
    the machine that it comes from.
    """

    checkpoint: Checkpoint
    owner: Owner
    hashes: list[bytes]
    points: dict[int, bytes]
    host: str = ""


def meta_of(
    checkpoint: Checkpoint, owner: Owner, tokens: TokenIds, namespace: str, host: str = ""
) -> Meta:
    """Return what is told of a checkpoint in the shared *namespace*."""
    seed = seed_of(namespace)
    points = {n: hash_whole(seed, tokens, n) for n in _ends_in(checkpoint)}
    told = replace(checkpoint, ancestors=(), is_pinned=False, n_restores=0, quarantine=None)
    return Meta(told, owner, list(steps(seed, tokens)), dict[int, bytes](points), host)


def steps(seed: Namespace, tokens: TokenIds) -> list[PrefixHash]:
    """Return the hashes of the prefixes of STEP_TOKENS, twice as many and so on."""
    return hash_prefixes(seed, tokens)[count_blocks(STEP_TOKENS) - 1 :: STEP_TOKENS // BLOCK_TOKENS]


def seed_of(namespace: str) -> Namespace:
    """Return with what prefixes are hashed that several machines compare."""
    return Namespace(bytes.fromhex(namespace))


def encode_meta(meta: Meta) -> bytes:
    return msgspec.msgpack.encode(meta)


def decode_meta(data: bytes) -> Meta:
    """Return what a `.meta` says; raises ValueError if it is none, or nothing that an index can hold."""
    meta = msgspec.msgpack.decode(data, type=Meta)
    sizes = meta.checkpoint.n_tokens, meta.checkpoint.size_bytes
    hashes = (*meta.hashes, *meta.points.values())
    if not all(0 < n < 1 << 31 for n in (sizes[0], sizes[1] >> 20 or 1)):
        raise ValueError("its sizes are none")
    if any(len(each) != _HASH_BYTES for each in hashes):
        raise ValueError("its hashes are none")
    return meta


# In the index of the shared store a record has, in place of its tokens, the hashes of its prefixes: by them
# it is found, and taken out again.


def entry_of(
    meta: Meta, shared_id: str, namespace: Namespace | None
) -> tuple[Checkpoint, TokenIds, list[PrefixHash]]:
    """Return the index entry of a shared state; one of no *namespace* here is known, but never found."""
    hashes = [*meta.hashes, *meta.points.values()] if namespace is not None else []
    here, checkpoint_id = namespace or Namespace(b""), index_id(shared_id)
    record = replace(meta.checkpoint, id=checkpoint_id, namespace=here, shared_id=shared_id)
    return record, tokens_from_bytes(b"".join(hashes)), [PrefixHash(each) for each in hashes]


def hashes_of(stored: TokenIds | None) -> list[PrefixHash]:
    """Return the hashes that an entry has in place of tokens."""
    data = b"" if stored is None else stored.tobytes()
    begins = range(0, len(data), _HASH_BYTES)
    return [PrefixHash(data[begin : begin + _HASH_BYTES]) for begin in begins]


def ends_beyond(checkpoint: Checkpoint, n_tokens: int) -> list[int]:
    """Return the lengths beyond *n_tokens* at which a request may leave a checkpoint, greatest first."""
    return sorted((n for n in _ends_in(checkpoint) if n > n_tokens), reverse=True)


def _ends_in(checkpoint: Checkpoint) -> set[int]:
    """Return at which lengths a request may leave a checkpoint."""
    cuts = {checkpoint.header, checkpoint.turn_start, *checkpoint.marks, *checkpoint.restore_points}
    # An answer seldom comes back token for token, nor does the very end of the prompt before it.
    cuts.add(checkpoint.n_prompt - CONTEXT_CHECKPOINT_MARGIN)
    return {n for n in cuts if 0 < n < checkpoint.n_tokens} | {checkpoint.n_tokens}
