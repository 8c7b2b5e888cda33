"""The file that checkpoints are carried in from one store to another: a tar of a manifest and states.

Owns: its layout (docs/storage-format.md). The manifest comes first, then the tokens and the state of each
checkpoint in its order, so that a file can be read as it comes.
"""

import tarfile
from collections.abc import Callable
from typing import IO

import msgspec
import xxhash

from proxy.core.model import Checkpoint
from proxy.driver.contact.known_models import Owner
from proxy.errors import CacheFault

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_CHUNK_BYTES = 4 << 20

Note = Callable[[int], object]
"""Is told of each bytes that were copied."""


class BundleRefused(CacheFault):
    """A file cannot be imported; the message says why."""


class Manifest(msgspec.Struct, frozen=True):
    """What lies in a file of checkpoints, and whose states they are."""

    format: int
    owner: Owner
    checkpoints: tuple[Checkpoint, ...]


def member_names(checkpoint: Checkpoint) -> tuple[str, str]:
    """Return the names of a checkpoint's tokens and of its state in the file."""
    return f"{checkpoint.id:016x}.tokens", f"{checkpoint.id:016x}.state"


def member(name: str, n_bytes: int) -> tarfile.TarInfo:
    """Return the head of a file in the tar that tells nothing about who made it."""
    head = tarfile.TarInfo(name)
    head.size, head.mode = n_bytes, 0o600
    return head


class Hashing:
    """Reads from a file and keeps the checksum of what was read."""

    def __init__(self, file: IO[bytes], note: Note) -> None:
        self._file = file
        self._note = note
        self._digest = xxhash.xxh3_128()

    def read(self, n_bytes: int = -1) -> bytes:
        chunk = self._file.read(n_bytes)
        self._digest.update(chunk)
        self._note(len(chunk))
        return chunk

    def copy_to(self, target: IO[bytes]) -> None:
        while chunk := self.read(_CHUNK_BYTES):
            target.write(chunk)

    @property
    def checksum(self) -> str:
        return self._digest.hexdigest()
