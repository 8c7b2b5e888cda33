"""The files under --slot-save-path: their names and sizes, their seals, and which states were verified.

llama-server writes a file under a temporary name; the proxy checks, syncs and renames it. Only files with
names made by this module are ever touched: other files in the directory are not ours.
"""

import asyncio
import errno
import fcntl
import os
import random
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import file_digest
from itertools import accumulate, groupby
from pathlib import Path
from threading import Thread
from typing import BinaryIO, Generic, TypeVar

import xxhash

from proxy.core.model import Checkpoint, CheckpointId, FilePart
from proxy.errors import StateDamaged, StoreFault

T = TypeVar("T")
_OURS = re.compile(r"lpc-[0-9a-f]{16}\.(saving|state|meta)")
_READ_BYTES = 256 << 10
"""Small enough that the bytes are still in the processor's cache when they are hashed."""

_N_SAMPLES = 16

FileStamp = tuple[int, int, int, int]
"""(inode, size, mtime_ns, ctime_ns): a write into the file changes at least one of them."""


class StateFiles:
    """The state files of one directory."""

    def __init__(self, directory: Path, *, is_readonly: bool = False) -> None:
        """If the directory *is_readonly*, nothing in it is written or deleted."""
        self.directory, self.is_readonly = directory, is_readonly
        self.most_reserved_bytes = 2 << 30
        self.is_closed = False
        """Whether threads that read a file stop: the proxy waits for them when it ends."""

    def new_temporary_name(self) -> str:
        return f"lpc-{secrets.token_hex(8)}.saving"

    def sidecar_name(self, name: str) -> str:
        """Return the name of the small file beside a state."""
        return name.rpartition(".")[0] + ".meta"

    def path(self, name: str) -> Path:
        """Return the path of *name*; raises StoreFault for any name that is not ours."""
        if not _OURS.fullmatch(name):
            raise StoreFault(f"{name!r} is not the name of a state file of this store")
        return self.directory / name

    def names(self) -> Iterator[str]:
        """Yield the name of every file of ours in the directory, temporary ones included; no links."""
        with os.scandir(self.directory) as entries:
            for entry in entries:
                if _OURS.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    yield entry.name

    def free_bytes(self) -> int:
        """Return how many bytes are free for files of this process's user; raises OSError."""
        status = os.statvfs(self.directory)  # of a file system without a limit all zero
        return status.f_bavail * status.f_frsize if status.f_blocks else sys.maxsize

    def reserve_bytes(self) -> int:
        """Return how many bytes of the disk saves leave free: fewer on a small disk; raises OSError."""
        status = os.statvfs(self.directory)
        return min(self.most_reserved_bytes, status.f_blocks * status.f_frsize // 20)

    def write_whole(self, name: str, data: bytes) -> None:
        """Replace a small file by *data*; the change is durable once the directory is synced."""
        if self.is_readonly:
            return
        with replacing(self.path(name), self.path(self.new_temporary_name())) as file:
            file.write(data)

    def seal(self, final: str) -> FileStamp:
        """Give a checked temporary file its *final* name, durable once the directory is synced."""
        source, target = self.path(temporary_name_of(final)), self.path(final)
        self._protect(source)
        with source.open("rb") as file:
            os.fsync(file.fileno())
        source.rename(target)
        return self.stamp(final)

    def stamp(self, name: str) -> FileStamp:
        """Return the stamp of a file, which changes with its content.

        Raises OSError if the file is gone, StateDamaged if a link or a directory has its name.
        """
        status = self.path(name).lstat()
        if not stat.S_ISREG(status.st_mode):
            raise StateDamaged(f"{name} is no regular file")
        return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def size_bytes(self, name: str) -> int:
        """Return the size of a file; 0 if it is gone."""
        with suppress(OSError):
            return self.path(name).stat().st_size
        return 0

    def is_cached(self, name: str) -> bool:
        """Return whether the page cache holds a file, by a few of its bytes; False if nobody can tell.

        Only Linux tells, and only a Python that was built for a C library of 2017 or later asks.
        """
        if not (now_only := getattr(os, "RWF_NOWAIT", 0)):
            return False
        with suppress(OSError, NotImplementedError):
            descriptor = os.open(self.path(name), os.O_RDONLY | os.O_NOFOLLOW)
            try:
                n_bytes = os.fstat(descriptor).st_size
                # Places of their own each time: the kernel may begin to read where it was asked.
                offsets = (random.randrange(n_bytes) for _ in range(_N_SAMPLES if n_bytes else 0))
                return all(os.preadv(descriptor, [bytearray(1)], i, now_only) for i in offsets)
            finally:
                os.close(descriptor)
        return False

    def parts(self, name: str, sizes: Sequence[int]) -> tuple[FilePart, ...]:
        """Return the parts of a file as it is now; raises OSError if it cannot be read."""
        return tuple(map(FilePart, sizes, self._digests(name, 0, sizes)))

    def n_changed(
        self, name: str, offset: int, parts: Sequence[FilePart], *, keeps_pages: bool = True
    ) -> int:
        """Return how many of successive parts, from *offset*, have changed; raises OSError.

        Without *keeps_pages*, the page cache drops the bytes read here.
        """
        digests = self._digests(name, offset, [p.n_bytes for p in parts], keeps_pages=keeps_pages)
        return sum(part.digest != digest for part, digest in zip(parts, digests, strict=True))

    def is_intact(self, name: str, parts: Sequence[FilePart]) -> bool:
        """Return whether a file is these parts and nothing else; raises OSError if it cannot be read."""
        n_bytes = sum(part.n_bytes for part in parts)
        return not self.n_changed(name, 0, parts) and n_bytes == self.path(name).stat().st_size

    def _digests(
        self, name: str, offset: int, sizes: Iterable[int], *, keeps_pages: bool = True
    ) -> Iterator[bytes]:
        # Not mapped: if the file were truncated or unreadable meanwhile, that would end this process.
        buffer = memoryview(bytearray(_READ_BYTES))
        descriptor = os.open(self.path(name), os.O_RDONLY | os.O_NOFOLLOW)
        try:
            if sys.platform == "darwin" and not keeps_pages:
                fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
            for n_bytes in sizes:
                digest, end = xxhash.xxh3_128(), offset + n_bytes
                while offset < end:
                    if self.is_closed:
                        raise StoreFault("the store is closed")
                    n_read = os.preadv(descriptor, [buffer[: end - offset]], offset)
                    if not n_read:
                        break
                    digest.update(buffer[:n_read])
                    offset += n_read
                if sys.platform == "linux" and not keeps_pages:
                    os.posix_fadvise(descriptor, end - n_bytes, n_bytes, os.POSIX_FADV_DONTNEED)
                yield digest.digest()
                offset = end
        finally:
            os.close(descriptor)

    def remove(self, name: str) -> None:
        """Delete a file; a state's record goes first, because a state without one is never entered again.

        A link or a directory of that name stays.
        """
        names = (self.sidecar_name(name), name) if is_state_name(name) else (name,)
        for path in () if self.is_readonly else map(self.path, names):
            with suppress(FileNotFoundError):
                if stat.S_ISREG(path.lstat().st_mode):
                    path.unlink()

    def edit(self, name: str, change: Callable[[Path], T]) -> T:
        """Change a file, or replace it by a changed copy; return the result of *change*."""
        path = self.path(name)
        try:
            return change(path)
        except PermissionError:
            # llama-server runs under another uid: the directory is shared, but the files are not.
            changed = replacing(path, self.path(self.new_temporary_name()))
            with path.open("rb") as file, changed as copy:
                shutil.copyfileobj(file, copy)
            self._protect(path)
            return change(path)

    def _protect(self, path: Path) -> None:
        # A state reveals the conversation. With llama-server under another uid the directory is shared by
        # a group (setgid), and only the file's owner could change its mode.
        if path.stat().st_uid != os.geteuid():
            return
        path.chmod(0o660 if self.directory.stat().st_mode & stat.S_ISGID else 0o600)


@contextmanager
def replacing(path: Path, part: Path) -> Iterator[BinaryIO]:
    """Yield a new file *part*, for its owner only; once it is whole and on disk, it becomes *path*."""
    part.unlink(missing_ok=True)  # left by a crash
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            yield file
            file.flush()
            os.fsync(file)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_whole(path: Path, data: bytes) -> None:
    """Write a file in one step, for its owner only; raises OSError."""
    with replacing(path, path.with_suffix(".new")) as file:
        file.write(data)


class Look(Generic[T]):
    """A look at a disk that may hang: one at a time, on a thread of its own that no exit waits for."""

    def __init__(self, look: Callable[[], T]) -> None:
        self._look, self._began = look, 0.0
        self._looking: asyncio.Future[T] | None = None

    async def within(self, seconds: float) -> T:
        """Return what it brings; raises TimeoutError once it takes longer than so many *seconds*."""
        if self._looking is None or self._looking.done():
            found, self._began = Future[T](), asyncio.get_running_loop().time()
            found.set_running_or_notify_cancel()
            Thread(target=self._run, args=(found,), daemon=True).start()
            self._looking = asyncio.wrap_future(found)
            # If nobody waits any more, nobody else asks for its error.
            self._looking.add_done_callback(lambda looked: looked.cancelled() or looked.exception())
        async with asyncio.timeout_at(self._began + seconds):
            return await asyncio.shield(self._looking)

    def _run(self, found: Future[T]) -> None:
        try:
            found.set_result(self._look())
        except BaseException as error:
            found.set_exception(error)


def seal(file: Path) -> None:
    """Write the checksum of a file that nobody writes now beside the file; raises OSError."""
    write_whole(seal_of(file), f"{digest_of(file)}\n".encode())


def seal_of(file: Path) -> Path:
    return file.with_suffix(".xxh3")


def digest_of(file: Path) -> str:
    with file.open("rb") as data:  # not mapped
        return file_digest(data, xxhash.xxh3_128).hexdigest()


def sync_names(directory: Path) -> None:
    """Make the file names in a directory durable, if its file system can; raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # such as folders of VirtualBox
            raise
    finally:
        os.close(descriptor)


def id_of(name: str) -> CheckpointId:
    """Return the id, of at most 63 bits, of the checkpoint whose file has, or will have, this name."""
    return CheckpointId(int(name[4:20], 16) >> 1)


def final_name_of(temporary: str) -> str:
    """Return the name of a file after its commit."""
    return temporary.replace(".saving", ".state")


def temporary_name_of(final: str) -> str:
    """Return the name of a file before its commit."""
    return final.replace(".state", ".saving")


def is_state_name(name: str) -> bool:
    """Return whether this is the name of a state of ours."""
    return bool(_OURS.fullmatch(name)) and name.endswith(".state")


def is_private(mode: int) -> bool:
    """Return whether only its owner, or one group on purpose, can use a directory of this mode.

    The setgid bit shows the purpose: new files then belong to the group that both users are in.
    """
    return not mode & (stat.S_IRWXO if mode & stat.S_ISGID else stat.S_IRWXO | stat.S_IRWXG)


# Whether state files are as llama-server wrote them. A change of a file changes its stamp, so a file is
# verified once, and again after a change. A failing disk changes no stamp.

_N_THREADS = 4
"""May exceed the number of processors: many disks read several parts faster at once than one by one."""
_RUN_BYTES = 256 << 20
"""At most so much is read by one thread in a row: the kernel reads ahead only in a row."""


class Verification:
    """Compares files with the checksums of their parts, and knows which were verified in this process."""

    def __init__(self, files: StateFiles) -> None:
        self._files = files
        self._threads = ThreadPoolExecutor(_N_THREADS, thread_name_prefix="verification")
        # What is verified already does not wait for another file's content.
        self._stamps = ThreadPoolExecutor(1, thread_name_prefix="stamps")
        self.verified: dict[CheckpointId, FileStamp] = {}
        """The stamps of the files that are as llama-server wrote them."""

    def close(self) -> None:
        """Stop reading."""
        self._files.is_closed = True
        for threads in (self._threads, self._stamps):
            threads.shutdown(wait=True, cancel_futures=True)

    async def is_done(self, checkpoint: Checkpoint) -> bool:
        """Return whether a file was verified and has not changed since."""
        verified = self.verified.get(checkpoint.id)
        with suppress(OSError, StateDamaged):
            return verified is not None and verified == await self._stamp(checkpoint)
        return False

    def _stamp(self, checkpoint: Checkpoint) -> "asyncio.Future[FileStamp]":
        work = partial(self._files.stamp, checkpoint.file_name)
        return asyncio.get_running_loop().run_in_executor(self._stamps, work)

    async def verify(self, checkpoint: Checkpoint, *, bytes_per_second: float = 0.0) -> None:
        """Read a file; raises StateDamaged if it is not what was saved, OSError if it cannot be read.

        With *bytes_per_second* the parts are read one by one, no faster than that on average, and the page
        cache drops them.
        """
        name, parts = checkpoint.file_name, checkpoint.content
        stamp = await self._stamp(checkpoint)
        *offsets, n_bytes = accumulate((part.n_bytes for part in parts), initial=0)
        if stamp[1] != n_bytes:
            raise StateDamaged(f"{name} has {stamp[1]:,} bytes instead of {n_bytes:,}")
        n_changed = partial(self._files.n_changed, name, keeps_pages=not bytes_per_second)

        def read(run: Sequence[int]) -> asyncio.Future[int]:
            work = partial(n_changed, offsets[run[0]], parts[run[0] : run[-1] + 1])
            return asyncio.get_running_loop().run_in_executor(self._threads, work)

        if not bytes_per_second:
            run_bytes = min(_RUN_BYTES, -(-n_bytes // _N_THREADS))
            runs = groupby(range(len(parts)), key=lambda i: offsets[i] // run_bytes)
            found = await asyncio.gather(*(read(list(run)) for _, run in runs))
        else:
            found = []
            for i, part in enumerate(parts):
                found.append(await read([i]))
                await asyncio.sleep(part.n_bytes / bytes_per_second)
        if any(found):
            raise StateDamaged(f"{name}: {sum(found)} of its parts are not what was saved")
        self.verified[checkpoint.id] = stamp
