"""What happens before a store is served from, and looks into a store without opening it."""

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import lmdb
import msgspec

from proxy.core.model import Checkpoint
from proxy.core.tokens import PrefixHash, TokenIds, hash_prefixes
from proxy.errors import StoreFault, StoreLocked
from proxy.store.files import StateFiles
from proxy.store.index import FORMAT_VERSION, Index, decode_records, is_readable, require_sound
from proxy.store.rebuilding import (
    Rebuild,
    plan,
    states_without_entry,
    write_missing_sidecars,
    write_sidecar,
)

# What happens before a store is served from: the lock, and the check of index against files.


LOCK_NAME = ".llama-prefix-cache.lock"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What an opening check found and removed."""

    n_checkpoints: int
    n_entries_without_file: int
    n_files_without_entry: int
    n_over_budget: int = 0


def lock(directory: Path) -> int:
    """Return the descriptor that keeps other proxies out; raises StoreLocked if one is in."""
    try:
        descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StoreFault(f"{directory}: {error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise StoreLocked(f"another llama-prefix-cache uses {directory}") from error
    return descriptor


def check(index: Index, files: StateFiles) -> tuple[list[Checkpoint], CheckReport, Rebuild | None]:
    """Remove entries whose file is gone or of another size, and files that no entry names.

    Returns the checkpoints that are left, and what an index that is to be rebuilt still lacks. What is in
    their files is verified before it is used.
    """
    recorded = index.all()
    intact = [checkpoint for checkpoint in recorded if _is_there(files, checkpoint)]
    kept_ids = {checkpoint.id for checkpoint in intact}
    for broken in (c for c in recorded if c.id not in kept_ids):
        remove(index, files, broken)
    named = {checkpoint.file_name for checkpoint in intact}
    rebuild = None
    if (reason := index.rebuild_reason) is not None:
        rebuild = plan(index, files, reason, states_without_entry(files, named))
        named |= {c.file_name for c in rebuild.pending} | rebuild.lost.keys()
    orphans = files.unnamed(named)
    for name in orphans:
        files.remove(name)
    write_missing_sidecars(index, files, intact)
    report = CheckReport(len(intact), len(recorded) - len(intact), len(orphans))
    return intact, report, rebuild


def _is_there(files: StateFiles, checkpoint: Checkpoint) -> bool:
    try:
        return files.path(checkpoint.file_name).stat().st_size == checkpoint.size_bytes
    except FileNotFoundError:
        return False
    except OSError:  # who may not look at it now need not be right about what is in it
        return True


def remove(index: Index, files: StateFiles, checkpoint: Checkpoint) -> TokenIds | None:
    """Delete a checkpoint, its entry first; return the tokens that it held, if the index had them."""
    tokens = index.tokens(checkpoint.id)
    hashes = hash_prefixes(checkpoint.namespace, tokens) if tokens is not None else []
    index.delete(checkpoint.id, hashes)
    files.remove(checkpoint.file_name)
    return tokens


def move(
    index: Index,
    files: StateFiles,
    moved: Checkpoint,
    old: Sequence[PrefixHash],
    new: Sequence[PrefixHash],
) -> None:
    """Enter a checkpoint in another namespace: beside its file first, then in the index."""
    write_sidecar(index, files, moved)
    index.move(moved, old, new)


def rewrite(index: Index, files: StateFiles, checkpoints: Sequence[Checkpoint]) -> None:
    """Replace records where they must not be lost: beside their files, and in the index."""
    for checkpoint in checkpoints:
        write_sidecar(index, files, checkpoint)
    index.update(checkpoints)


# Looks into a store without opening it: nothing is created, removed or repaired.
#
# The store itself locks its directory and cleans it up at opening; whoever only wants to know what lies
# there must do neither.


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
        except ValueError:
            return None


def read_index(directory: Path) -> IndexContent:
    """Return what the index in a store's directory holds, nothing if there is none.

    Raises StoreFault if it cannot be read, is damaged or of another format. Not for an index that this
    process has open: LMDB forbids a second time.
    """
    path = directory / "index"
    try:
        if not (path / "data.mdb").exists():
            return IndexContent()
        require_sound(path)
        has_lock_file = (path / "lock.mdb").exists()
        with lmdb.open(
            str(path), max_dbs=4, readonly=True, create=False, lock=has_lock_file
        ) as environment:
            content = _read(environment)
    except (lmdb.Error, OSError) as error:
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
            tuple(decode_records(txn.cursor(checkpoints))),
            {name.decode(): data for name, data in txn.cursor(values) if is_readable(name)},
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
