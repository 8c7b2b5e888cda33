"""Looks into a store without opening it: nothing is created, removed or repaired.

The store itself locks its directory and cleans it up at opening; whoever only wants to know what lies
there must do neither.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import lmdb
import msgspec

from proxy.core.model import Checkpoint
from proxy.errors import StoreFault, StoreLocked
from proxy.store.index import FORMAT_VERSION
from proxy.store.opening import LOCK_NAME

T = TypeVar("T")


@dataclass(frozen=True)
class IndexContent:
    """All records of an index, and its named values still encoded."""

    checkpoints: tuple[Checkpoint, ...] = ()
    values: Mapping[str, bytes] = field(default_factory=dict)

    def value(self, name: str, value_type: type[T]) -> T | None:
        """Return the named value, or None if it is absent or of another type."""
        data = self.values.get(name)
        try:
            return None if data is None else msgspec.msgpack.decode(data, type=value_type)
        except msgspec.DecodeError:
            return None


def read_index(directory: Path) -> IndexContent:
    """Return what the index in a store's directory holds, nothing if there is none.

    Raises StoreFault if it cannot be read or is of another format. Not for an index that this process
    has open: LMDB forbids a second time.
    """
    path = directory / "index"
    try:
        if not (path / "data.mdb").exists():
            return IndexContent()
        has_lock_file = (path / "lock.mdb").exists()
        with lmdb.open(
            str(path), max_dbs=4, readonly=True, create=False, lock=has_lock_file
        ) as environment:
            content = _read(environment)
    except (lmdb.Error, OSError, msgspec.DecodeError) as error:
        raise StoreFault(f"the index {path} cannot be read: {error}") from error
    found = content.value("format", int)
    if found != FORMAT_VERSION:
        raise StoreFault(
            f"the index {path} has format {found}, this version reads {FORMAT_VERSION}"
        )
    return content


def _read(environment: lmdb.Environment) -> IndexContent:
    checkpoints = environment.open_db(b"checkpoints", create=False)
    values = environment.open_db(b"values", create=False)
    with environment.begin() as txn:
        return IndexContent(
            tuple(
                msgspec.msgpack.decode(bytes(data), type=Checkpoint)
                for _, data in txn.cursor(checkpoints)
            ),
            {bytes(name).decode(): bytes(data) for name, data in txn.cursor(values)},
        )


@contextmanager
def keep_proxies_out(directory: Path) -> Iterator[None]:
    """Keep proxies from opening a store meanwhile; raises StoreLocked if one has, or may have, it open.

    Where no proxy has ever been there is no lock file, and none is made: it would belong to whoever asks.
    """
    try:
        descriptor = os.open(directory / LOCK_NAME, os.O_RDONLY)
    except FileNotFoundError:
        yield
        return
    except OSError as error:
        raise StoreLocked(f"{directory / LOCK_NAME}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StoreLocked(f"another llama-prefix-cache uses {directory}") from error
        yield
    finally:
        os.close(descriptor)
