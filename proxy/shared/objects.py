"""The objects in the shared store: their names, what the small one beside each state says, and their seal.

Owns: `v1/<namespace>/<id>.state`, `.meta` and `.used` (docs/many-machines.md). A state is there once its
`.meta` is, which is written last. No name is used twice, and nothing but a `.used` is ever overwritten.
Must never know how objects come and go.
"""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from hashlib import blake2b
from itertools import count, starmap
from pathlib import Path
from socket import gethostname
from typing import Any, NamedTuple

import msgspec

from proxy.core.cuts import CONTEXT_CHECKPOINT_MARGIN
from proxy.core.model import Checkpoint, CheckpointId
from proxy.core.tokens import Namespace, PrefixHash, TokenIds, hash_steps, hash_whole, token_ids
from proxy.errors import SettingsError, StateDamaged, in_words
from proxy.store.index import Entry
from proxy.store.known_models import Owner

VERSION = "v1"
STATE, META, USED = "state", "meta", "used"
"""A state, the record that commits it, and a marker whose time says when somebody last read the state."""
ORPHAN_SECONDS = 3600.0
"""The objects of an upload that is not finished so long after they were first seen are deleted."""
UNUSED_SECONDS = 7 * 24 * 3600.0
"""A state that was not read there for so long may be deleted by anyone. One that was not used here for so
long does not go up again."""
_HASH_BYTES = 16
STEP_TOKENS = 1024
"""Of a hundred thousand states the hashes of all blocks would be too many; a shorter one is not shared."""
_TIME_DIGITS, _WRITER_DIGITS, _RANDOM_DIGITS = 12, 8, 16
_NAME = re.compile(
    rf"{VERSION}/[0-9a-f]{{32}}/(?P<id>[0-9a-f]{{{_TIME_DIGITS}}}"
    rf"-[0-9a-f]{{{_WRITER_DIGITS}}}-[0-9a-f]{{{_RANDOM_DIGITS}}})\.(?P<kind>[a-z]+)"
)


class Listed(NamedTuple):
    """An object as it is listed; `modified_at` is of the shared store's own clock."""

    name: str
    id: str
    kind: str
    size_bytes: int
    modified_at: float


def listed(path: str, size_bytes: int, modified_at: float) -> Listed | None:
    """Return what a name says, None if it is not one of ours."""
    if (found := _NAME.fullmatch(path)) is None:
        return None
    shared_id, kind = found.groups()
    return Listed(path, shared_id, kind, size_bytes, modified_at)


def name_of(namespace: str, shared_id: str, kind: str) -> str:
    return f"{VERSION}/{namespace}/{shared_id}.{kind}"


def new_id(now: float, writer: str, random: str) -> str:
    """Return a new id; ids sort by time, as far as clocks agree. *writer* and *random* are hex digits."""
    return f"{earliest_id(now)}-{writer}-{random}"


def earliest_id(now: float) -> str:
    """Return a text that sorts before every id that is made at *now* or later."""
    return f"{max(0, int(now * 1000)):0{_TIME_DIGITS}x}"


def index_id(shared_id: str) -> CheckpointId:
    """Return the id, of at most 63 bits, that a shared state has in the index."""
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


def meta_of(checkpoint: Checkpoint, owner: Owner, tokens: TokenIds, namespace: str) -> Meta:
    """Return the `.meta` of a checkpoint in the shared *namespace*."""
    seed = Namespace(bytes.fromhex(namespace))
    points: dict[int, bytes] = {n: hash_whole(seed, tokens, n) for n in ends_in(checkpoint)}
    return Meta(checkpoint, owner, [*hash_steps(seed, tokens, STEP_TOKENS)], points, gethostname())


def decode_meta(data: bytes) -> Meta:
    """Return the content of a `.meta`.

    Raises ValueError or RecursionError if *data* is none, or no index can hold it.
    """
    meta = msgspec.msgpack.decode(data, type=Meta)
    record = meta.checkpoint
    if not (0 < record.n_tokens < 1 << 31 and 0 <= record.size_bytes < 1 << 51):
        raise ValueError("its sizes are none")
    sizes = [part.n_bytes for part in record.content]
    if min(sizes, default=0) < 0 or sum(sizes) != record.size_bytes:
        raise ValueError("its parts are none")
    if any(len(each) != _HASH_BYTES for each in (*meta.hashes, *meta.points.values())):
        raise ValueError("its hashes are none")
    return meta


# In the index of the shared store a record has, in place of its tokens, the hashes of its prefixes: by them
# it is found, and taken out again.


def entry_of(meta: Meta, shared_id: str, namespace: Namespace) -> Entry:
    """Return the index entry of a shared state."""
    hashes, checkpoint_id = [*meta.hashes, *meta.points.values()], index_id(shared_id)
    record = replace(meta.checkpoint, id=checkpoint_id, namespace=namespace, shared_id=shared_id)
    record = replace(record, quarantine=None)  # that is for this machine to say
    return record, token_ids(b"".join(hashes)), [PrefixHash(each) for each in hashes]


def hashes_of(stored: TokenIds | None) -> list[PrefixHash]:
    """Return the hashes that an entry has in place of tokens."""
    data = b"" if stored is None else stored.tobytes()
    return [PrefixHash(data[i : i + _HASH_BYTES]) for i in range(0, len(data), _HASH_BYTES)]


def ends_in(checkpoint: Checkpoint) -> set[int]:
    """Return the lengths at which a request may leave a checkpoint."""
    cuts = {checkpoint.header, checkpoint.turn_start, *checkpoint.marks, *checkpoint.restore_points}
    # An answer seldom comes back token for token, nor does the very end of the prompt before it.
    cuts.add(checkpoint.n_prompt - CONTEXT_CHECKPOINT_MARGIN)
    return {n for n in cuts if 0 < n < checkpoint.n_tokens} | {checkpoint.n_tokens}


# Objects as they leave this machine: sealed with a key, so that whoever has the bucket can neither read nor
# change them, or plain without one.
#
# A sealed object is a salt, then pieces of AES-GCM under a key that is made of the key file, the salt and
# the object's name. A piece's nonce is its number, and whether it is the last: no piece can be left out,
# moved or taken from another object.


PIECE_BYTES = 1 << 20
_SALT_BYTES, _TAG_BYTES = 32, 16
_LEAST_KEY_BYTES = 32


def read_key(file: Path) -> bytes:
    """Return the key in a file, of any content with at least 32 bytes; raises SettingsError.

    The line end of an ASCII text does not count: openssl writes one, a Secret of Kubernetes has none.
    """
    try:
        content = Path(os.path.expanduser(file)).read_bytes()
    except OSError as error:
        raise SettingsError(f"shared_store: key_file: {in_words(error)}") from error
    if len(content) < _LEAST_KEY_BYTES:
        raise SettingsError(f"shared_store: key_file: {file} has under {_LEAST_KEY_BYTES} bytes")
    whole = content.rstrip(b"\r\n") + b"\n" if content.isascii() else content
    return blake2b(whole, person=b"shared store").digest()


class Sealing:
    """Seals and opens objects; without a key they stay as they are."""

    def __init__(self, key: bytes = b"") -> None:
        self.key = key

    def secret(self, purpose: bytes) -> bytes:
        """Return 32 bytes that all who have the key share for one purpose."""
        return blake2b(key=self.key, person=purpose, digest_size=32).digest()

    def name(self, *parts: bytes) -> str:
        """Return 32 hex digits for *parts*, which nobody can guess or make without the key."""
        digest = blake2b(key=self.key, person=b"name", digest_size=16)
        for part in parts:
            digest.update(len(part).to_bytes(8) + part)
        return digest.hexdigest()

    def seal(self, name: str, data: Iterable[bytes]) -> Iterator[bytes]:
        """Yield an object to store under *name*."""
        if not self.key:
            yield from data
            return
        salt, pieces = os.urandom(_SALT_BYTES), _Pieces(PIECE_BYTES)
        cipher = self.cipher(name, salt)
        yield salt
        for chunk in data:
            for nonce, piece in pieces.take(chunk):
                yield cipher.encrypt(nonce, piece, None)
        yield cipher.encrypt(*pieces.last(), None)

    def cipher(self, name: str, salt: bytes) -> Any:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        made_of = salt + name.encode()
        return AESGCM(blake2b(made_of, key=self.key, person=b"object", digest_size=32).digest())

    def open_whole(self, name: str, data: bytes) -> bytes:
        """Return what was sealed under *name*; raises StateDamaged if it was not sealed so."""
        opening = Opening(self, name)
        return b"".join((*opening.take(data), *opening.last()))


class Opening:
    """Opens an object as it comes; what was yielded is what its writer has sealed."""

    def __init__(self, sealing: Sealing, name: str) -> None:
        self._sealing, self._name = sealing, name
        self._pieces, self._salt, self._cipher = _Pieces(PIECE_BYTES + _TAG_BYTES), b"", None

    def take(self, data: bytes) -> Iterator[bytes]:
        """Yield the pieces that are whole; raises StateDamaged at the first that was not sealed so."""
        if not self._sealing.key:
            yield data
            return
        if self._cipher is None:
            self._salt += data
            if len(self._salt) < _SALT_BYTES:
                return
            data, salt = self._salt[_SALT_BYTES:], self._salt[:_SALT_BYTES]
            self._cipher = self._sealing.cipher(self._name, salt)
        yield from starmap(self._decrypt, self._pieces.take(data))

    def last(self) -> Iterator[bytes]:
        """Yield the rest; raises StateDamaged if the object was cut off."""
        if self._sealing.key:
            yield self._decrypt(*self._pieces.last())

    def _decrypt(self, nonce: bytes, piece: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag

        try:
            if self._cipher is not None:
                return bytes(self._cipher.decrypt(nonce, piece, None))
        except InvalidTag:
            pass
        raise StateDamaged(f"{self._name} was not sealed with this key")


class _Pieces:
    """Cuts what comes into pieces of equal size and a last one, each with its nonce."""

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes, self._held, self._numbers = n_bytes, bytearray(), count()

    def take(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        self._held += data
        while len(self._held) > self._n_bytes:
            piece = bytes(self._held[: self._n_bytes])
            del self._held[: self._n_bytes]
            yield next(self._numbers).to_bytes(11) + b"\0", piece

    def last(self) -> tuple[bytes, bytes]:
        return next(self._numbers).to_bytes(11) + b"\1", bytes(self._held)
