"""Objects as they leave this machine: sealed with a key, so that whoever has the bucket can neither read
nor change them, or plain without one.

A sealed object is a salt, then pieces of AES-GCM under a key that is made of the key file, the salt and the
object's name. A piece's nonce is its number, and whether it is the last: no piece can be left out, moved or
taken from another object.
"""

import os
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any

from proxy.errors import SettingsError, StateDamaged, in_words

PIECE_BYTES = 1 << 20
_SALT_BYTES, _TAG_BYTES = 32, 16
_LEAST_KEY_BYTES = 32


def read_key(file: Path) -> bytes:
    """Return the key in a file, of any content with at least 32 bytes; raises SettingsError."""
    try:
        content = file.expanduser().read_bytes()
    except OSError as error:
        raise SettingsError(f"shared_store: key_file: {in_words(error)}") from error
    if len(content) < _LEAST_KEY_BYTES:
        raise SettingsError(
            f"shared_store: key_file: {file} has less than {_LEAST_KEY_BYTES} bytes"
        )
    return blake2b(content, person=b"shared store").digest()


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
        """Yield what has come whole; raises StateDamaged at the first piece that was not sealed so."""
        if not self._sealing.key:
            yield data
            return
        if self._cipher is None:
            self._salt += data
            if len(self._salt) < _SALT_BYTES:
                return
            data, salt = self._salt[_SALT_BYTES:], self._salt[:_SALT_BYTES]
            self._cipher = self._sealing.cipher(self._name, salt)
        for nonce, piece in self._pieces.take(data):
            yield self._decrypt(nonce, piece)

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
