"""A state that comes from the shared store: opened, compared and written as it comes.

Nothing is written that is not what its writer has saved. Everything here is for another thread.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import xxhash

from proxy.core.model import FilePart
from proxy.errors import StateFileMalformed
from proxy.shared.sealing import Opening


class Arrival:
    """One file that is on its way, and how much of it was compared with the digests of its parts."""

    def __init__(self, path: Path, parts: Iterable[FilePart], opening: Opening) -> None:
        """Create the file; raises OSError."""
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", 0)
        self._parts, self._opening = iter(parts), opening
        self._digest, self._left_bytes = xxhash.xxh3_128(), 0
        self._part: FilePart | None = None
        self._next_part()

    def take(self, data: bytes) -> None:
        """Write what has come; raises StateFileMalformed or StateDamaged if it was not saved so."""
        for plain in self._opening.take(data):
            self._write(plain)

    def end(self) -> None:
        """Write the rest; raises StateFileMalformed or StateDamaged if something is missing."""
        for plain in self._opening.last():
            self._write(plain)
        if self._part is not None:
            raise StateFileMalformed("it was cut off")

    def close(self) -> None:
        self._file.close()

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            if self._part is None:
                raise StateFileMalformed("it is longer than its record says")
            some = view[: self._left_bytes]
            self._digest.update(some)
            self._file.write(some)
            self._left_bytes -= len(some)
            view = view[len(some) :]
            if not self._left_bytes:
                if self._digest.digest() != self._part.digest:
                    raise StateFileMalformed("its checksum differs")
                self._next_part()

    def _next_part(self) -> None:
        self._part = next(self._parts, None)
        self._digest, self._left_bytes = xxhash.xxh3_128(), self._part.n_bytes if self._part else 0
        if self._part is not None and self._left_bytes <= 0:
            raise StateFileMalformed("its record has an empty part")
