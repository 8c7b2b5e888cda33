"""The state files under --slot-save-path: names, checks, sizes, and the order of their life.

A file is written by llama-server under a temporary name, checked, synced and renamed by the proxy.
Only names that this module makes are ever touched: whatever else lies in the directory is not ours.
"""

import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from proxy.errors import StoreFault

_OURS = re.compile(r"lpc-[0-9a-f]{16}\.(saving|state)")
_READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What identifies a file's content without reading it again, and its checksum."""

    size_bytes: int
    stamp: tuple[int, int]
    checksum: str


class StateFiles:
    """The state files of one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def new_temporary_name(self) -> str:
        return f"lpc-{secrets.token_hex(8)}.saving"

    def new_final_name(self) -> str:
        return f"lpc-{secrets.token_hex(8)}.state"

    def path(self, name: str) -> Path:
        """Return where *name* lies; raises StoreFault for any name that is not ours."""
        if not _OURS.fullmatch(name):
            raise StoreFault(f"{name!r} is not the name of a state file of this store")
        return self.directory / name

    def names(self) -> Iterator[str]:
        """Yield every name of ours in the directory, temporary ones included."""
        for entry in self.directory.iterdir():
            if _OURS.fullmatch(entry.name):
                yield entry.name

    def free_bytes(self) -> int:
        """Return how much room is left for files of this process's user; raises OSError."""
        status = os.statvfs(self.directory)
        return status.f_bavail * status.f_frsize

    def seal(self, temporary: str, final: str) -> FileFacts:
        """Make a checked temporary file durable under its final name."""
        source, target = self.path(temporary), self.path(final)
        self._protect(source)
        with source.open("rb") as file:
            checksum = _checksum(file.fileno())
            os.fsync(file.fileno())
        source.rename(target)
        try:
            self._sync_directory()
            status = target.stat()
            return FileFacts(status.st_size, _stamp_of(status), checksum)
        except OSError:
            target.unlink(missing_ok=True)
            raise

    def stamp(self, name: str) -> tuple[int, int]:
        """Return (inode, mtime_ns); OSError if the file is gone."""
        return _stamp_of(self.path(name).stat())

    def size_bytes(self, name: str) -> int:
        """Return the size of a file; 0 if it is gone."""
        try:
            return self.path(name).stat().st_size
        except OSError:
            return 0

    def require_unchanged(self, name: str, stamp: tuple[int, int], size_bytes: int) -> None:
        """Raise StoreFault if a file is gone, not the one that was stamped, or of another size.

        llama-server may end itself over a recurrent state that is cut short (llama-memory-recurrent.cpp).
        """
        try:
            is_unchanged = self.is_unchanged(name, stamp, size_bytes)
        except OSError as error:
            raise StoreFault(f"{name}: {error.strerror}") from error
        if not is_unchanged:
            raise StoreFault(f"{name} was replaced or cut since it was saved")

    def is_unchanged(self, name: str, stamp: tuple[int, int], size_bytes: int) -> bool:
        """Return whether a file still has its stamp and size; OSError if it is gone."""
        status = self.path(name).stat()
        return _stamp_of(status) == stamp and status.st_size == size_bytes

    def checksum(self, name: str) -> str:
        with self.path(name).open("rb") as file:
            return _checksum(file.fileno())

    def remove(self, name: str) -> None:
        self.path(name).unlink(missing_ok=True)

    def take_over(self, name: str) -> None:
        """Put a copy of our own in the place of a file that only its owner can change."""
        copy = self.path(self.new_temporary_name())
        try:
            shutil.copyfile(self.path(name), copy)
            self._protect(copy)
            copy.rename(self.path(name))
        except OSError:
            copy.unlink(missing_ok=True)
            raise

    def _protect(self, path: Path) -> None:
        # A state is as good as the transcript. With llama-server under another uid the directory is
        # shared by a group (setgid), and only the file's owner could change its mode.
        if path.stat().st_uid != os.geteuid():
            return
        is_group_shared = self.directory.stat().st_mode & stat.S_ISGID
        path.chmod(0o660 if is_group_shared else 0o600)

    def _sync_directory(self) -> None:
        descriptor = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def is_private(mode: int) -> bool:
    """Return whether a directory of this mode is its owner's alone, or shared with one group on purpose.

    The setgid bit says that it is on purpose: files then belong to the group that both users are in.
    """
    return not mode & (stat.S_IRWXO if mode & stat.S_ISGID else stat.S_IRWXO | stat.S_IRWXG)


def _stamp_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_mtime_ns


def _checksum(descriptor: int) -> str:
    digest = xxhash.xxh3_128()
    while chunk := os.read(descriptor, _READ_BYTES):
        digest.update(chunk)
    return digest.hexdigest()
