"""The LMDB index: which checkpoint covers which prefix.

Owns the key layout (docs/storage-format.md). Reads are short transactions on the caller's thread and
never stay open across an await; writes are for one writer thread only (the store sees to that).
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import lmdb
import msgspec

from proxy.core.model import Checkpoint, CheckpointId
from proxy.core.tokens import (
    PrefixHash,
    TokenIds,
    common_prefix_length,
    count_blocks,
    tokens_from_bytes,
    tokens_to_bytes,
)
from proxy.errors import IndexDamaged, StoreFault
from proxy.store.files import is_state_name
from proxy.store.index_file import flaw_of, is_sealed, seal, unseal

T = TypeVar("T")

FORMAT_VERSION = 1
MAP_SIZE_BYTES = 16 << 30
"""Address space, not disk: the file grows as it fills."""

_ID = struct.Struct(">Q")
_REBUILD = "rebuild"
_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)


class Index:
    """Checkpoints by id and by prefix hash, and the few named values that outlive a process."""

    def __init__(self, path: Path) -> None:
        """Open or create the index in the directory *path*.

        Raises IndexDamaged if its file is not what LMDB writes, StoreFault if it cannot be used.
        """
        self._file = path / "data.mdb"
        self._is_written = False
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            require_sound(path)
            self._env = lmdb.open(str(path), max_dbs=4, map_size=MAP_SIZE_BYTES, mode=0o600)
            self._checkpoints = self._env.open_db(b"checkpoints")
            self._tokens = self._env.open_db(b"tokens")
            self._prefixes = self._env.open_db(b"prefixes", dupsort=True, dupfixed=True)
            self._values = self._env.open_db(b"values")
        except _DAMAGE as error:
            raise IndexDamaged(path, str(error)) from error
        except (lmdb.Error, OSError) as error:
            raise StoreFault(f"index {path} cannot be opened: {error}") from error
        self._check_format(path)

    def _check_format(self, path: Path) -> None:
        found = self.value("format", int)
        if found is None:
            with self._writing() as txn:
                self._put_value(txn, "format", FORMAT_VERSION)
                self._put_value(txn, _REBUILD, "it was not there")
        elif found != FORMAT_VERSION:
            self.close()
            age = "a newer" if found > FORMAT_VERSION else "an older"
            raise StoreFault(
                f"index {path} has format {found} of {age} llama-prefix-cache; this one reads "
                f"{FORMAT_VERSION}. Use that version again, or delete index/ and lpc-* in the same "
                "directory: prompts are then evaluated anew, and nothing else is lost"
            )

    def close(self) -> None:
        self._env.close()
        if self._is_written or not is_sealed(self._file):
            with suppress(OSError):  # then the next opening looks at the pages themselves
                seal(self._file)

    @contextmanager
    def _writing(self) -> Iterator[lmdb.Transaction]:
        with _faults():
            if not self._is_written:
                unseal(self._file)
                self._is_written = True
            with self._env.begin(write=True) as txn:
                yield txn

    @property
    def rebuild_reason(self) -> str | None:
        """Why the index does not have all checkpoints whose states are there; None if it has.

        A new index has none of them, so every one begins as one that is to be rebuilt.
        """
        return self.value(_REBUILD, str)

    def begin_rebuild(self, reason: str) -> None:
        """Forget all checkpoints, until they were entered again."""
        with self._writing() as txn:
            for database in (self._checkpoints, self._tokens, self._prefixes):
                txn.drop(database, delete=False)
            self._put_value(txn, _REBUILD, reason)

    def end_rebuild(self) -> None:
        self.delete_value(_REBUILD.encode())

    def inconsistency(self) -> str:
        """Return what of the entries does not fit together, nothing if all is there."""
        checkpoints = self.all()
        with _faults(), self._env.begin() as txn:
            databases = (self._checkpoints, self._tokens, self._prefixes)
            n_records, n_tokens, n_prefixes = (txn.stat(db)["entries"] for db in databases)
        if n_records != len(checkpoints):
            return f"records that cannot be read: {n_records - len(checkpoints)}"
        if n_tokens != n_records:
            return f"{n_tokens} lists of tokens for {n_records} checkpoints"
        n_expected = sum(count_blocks(checkpoint.n_tokens) for checkpoint in checkpoints)
        return "" if n_prefixes == n_expected else f"{n_prefixes} prefixes instead of {n_expected}"

    def all(self) -> list[Checkpoint]:
        """Return all records that can be read."""
        with _faults(), self._env.begin(db=self._checkpoints) as txn:
            return decode_records(txn.cursor())

    def put(self, checkpoint: Checkpoint, tokens: TokenIds, hashes: Sequence[PrefixHash]) -> None:
        """Add a checkpoint in one transaction: this is the commit."""
        self.put_all([(checkpoint, tokens, hashes)])

    def put_all(self, entries: Iterable[tuple[Checkpoint, TokenIds, Sequence[PrefixHash]]]) -> None:
        """Add checkpoints in one transaction."""
        with self._writing() as txn:
            for checkpoint, tokens, hashes in entries:
                key = _ID.pack(checkpoint.id)
                txn.put(key, msgspec.msgpack.encode(checkpoint), db=self._checkpoints)
                txn.put(key, tokens_to_bytes(tokens), db=self._tokens)
                for prefix_hash in hashes:
                    txn.put(prefix_hash, key, db=self._prefixes)

    def update(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Rewrite the records of checkpoints that are still there."""
        with self._writing() as txn:
            for checkpoint in checkpoints:
                key = _ID.pack(checkpoint.id)
                if txn.get(key, db=self._checkpoints) is not None:
                    txn.put(key, msgspec.msgpack.encode(checkpoint), db=self._checkpoints)

    def move(
        self, checkpoint: Checkpoint, old: Sequence[PrefixHash], new: Sequence[PrefixHash]
    ) -> None:
        """Enter a checkpoint that is still there under other prefixes, in one transaction."""
        key = _ID.pack(checkpoint.id)
        with _faults(), self._env.begin(write=True) as txn:
            if txn.get(key, db=self._checkpoints) is None:
                return
            txn.put(key, msgspec.msgpack.encode(checkpoint), db=self._checkpoints)
            for prefix_hash in old:
                txn.delete(prefix_hash, key, db=self._prefixes)
            for prefix_hash in new:
                txn.put(prefix_hash, key, db=self._prefixes)

    def delete(self, checkpoint_id: CheckpointId, hashes: Sequence[PrefixHash]) -> None:
        key = _ID.pack(checkpoint_id)
        with self._writing() as txn:
            txn.delete(key, db=self._checkpoints)
            txn.delete(key, db=self._tokens)
            for prefix_hash in hashes:
                txn.delete(prefix_hash, key, db=self._prefixes)

    def tokens(self, checkpoint_id: CheckpointId) -> TokenIds | None:
        """Return the tokens of a checkpoint, None if they are gone or damaged."""
        with _faults(), self._env.begin(db=self._tokens) as txn:
            data = txn.get(_ID.pack(checkpoint_id))
        try:
            return None if data is None else tokens_from_bytes(data)
        except ValueError:
            return None

    def common_prefix(self, checkpoint_id: CheckpointId, tokens: TokenIds) -> int | None:
        """Return how many leading tokens a checkpoint shares with *tokens*; None if it is gone."""
        with _faults(), self._env.begin(db=self._tokens, buffers=True) as txn:
            stored = txn.get(_ID.pack(checkpoint_id))
            if stored is None:
                return None
            wanted = memoryview(tokens).cast("B")
            return common_prefix_length(stored, wanted) // tokens.itemsize

    def reaching(self, hashes: Sequence[PrefixHash]) -> list[CheckpointId]:
        """Return the checkpoints whose tokens begin with any of the prefixes, longest prefix first."""
        found: dict[CheckpointId, None] = {}
        with _faults(), self._env.begin(db=self._prefixes) as txn:
            cursor = txn.cursor()
            for prefix_hash in reversed(hashes):
                # Whoever reaches a longer prefix reaches this one: equal counts mean nobody is new.
                if cursor.set_key(prefix_hash) and cursor.count() > len(found):
                    for value in cursor.iternext_dup():
                        found.setdefault(CheckpointId(_ID.unpack(value)[0]))
        return list(found)

    def names(self, prefix: str) -> list[str]:
        """Return the names of all values whose name begins with *prefix*."""
        with _faults(), self._env.begin(db=self._values) as txn:
            return [
                name.decode()
                for name in txn.cursor().iternext(values=False)
                if name.startswith(prefix.encode()) and is_readable(name)
            ]

    def unreadable_values(self) -> list[bytes]:
        """Return the names of values that cannot be read, or whose name cannot."""
        with _faults(), self._env.begin(db=self._values) as txn:
            return [name for name, value in txn.cursor() if not is_readable(name, value)]

    def n_missing(self, checkpoint_id: CheckpointId, hashes: Sequence[PrefixHash]) -> int:
        """Return by how many of its prefixes a checkpoint cannot be found."""
        key = _ID.pack(checkpoint_id)
        with _faults(), self._env.begin(db=self._prefixes) as txn:
            cursor = txn.cursor()
            return sum(not cursor.set_key_dup(prefix_hash, key) for prefix_hash in hashes)

    def value(self, name: str, value_type: type[T]) -> T | None:
        """Return the named value, or None if it is absent or of another type."""
        with _faults(), self._env.begin(db=self._values) as txn:
            data = txn.get(name.encode())
        try:
            return None if data is None else msgspec.msgpack.decode(bytes(data), type=value_type)
        except ValueError:
            return None

    def put_value(self, name: str, value: object) -> None:
        with self._writing() as txn:
            self._put_value(txn, name, value)

    def delete_value(self, name: bytes) -> None:
        with self._writing() as txn:
            txn.delete(name, db=self._values)

    def _put_value(self, txn: lmdb.Transaction, name: str, value: object) -> None:
        txn.put(name.encode(), msgspec.msgpack.encode(value), db=self._values)


def require_sound(path: Path) -> None:
    """Raise IndexDamaged if the file of the index in *path* is not what LMDB writes; raises OSError.

    Not for an index that anybody writes.
    """
    if flaw := flaw_of(path / "data.mdb"):
        raise IndexDamaged(path, flaw)


def decode_records(entries: Iterable[tuple[bytes, bytes]]) -> list[Checkpoint]:
    """Return the records of *entries*; those that are not what was written are passed over."""
    records = []
    for key, value in entries:
        with suppress(ValueError):
            record = msgspec.msgpack.decode(value, type=Checkpoint)
            if key == _ID.pack(record.id) and is_state_name(record.file_name):
                records.append(record)
    return records


def is_readable(name: bytes, value: bytes | None = None) -> bool:
    """Return whether the name of a value is text, and the value what was encoded."""
    try:
        name.decode()
        if value is not None:
            msgspec.msgpack.decode(value)
    except ValueError:
        return False
    return True


class _faults:
    """Translate what LMDB and the record decoder raise into StoreFault."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, lmdb.Error | ValueError | struct.error | OSError):
            raise StoreFault(f"index: {error}") from error
