"""The kernel's page cache, as far as a test or a benchmark can move it."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def folder_on_disk() -> Iterator[Path]:
    """Yield a new folder whose files are not only in memory, as those of the other tests are."""
    with tempfile.TemporaryDirectory(prefix="prefix-cache-", dir="/var/tmp") as folder:
        yield Path(folder)


def forget(path: Path) -> None:
    """Have the page cache drop a file, once the disk has it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def read(path: Path) -> None:
    """Have the page cache hold all of a file."""
    with path.open("rb", buffering=0) as file:
        while file.read(16 << 20):
            pass


def can_tell(path: Path) -> bool:
    """Return whether the kernel says of a file here that it has nothing of it; tmpfs does not."""
    forget(path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.preadv(descriptor, [bytearray(1)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return True
    except (AttributeError, OSError):
        pass
    finally:
        os.close(descriptor)
    return False
