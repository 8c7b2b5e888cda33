"""The LMDB index: which checkpoint covers which prefix.

Owns the key layout (docs/storage-format.md). Reads are short transactions on the caller's thread and
never stay open across an await; writes are for one writer thread only (the store sees to that).
"""

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import lmdb
import msgspec

from proxy.core.model import Checkpoint, CheckpointId
from proxy.core.prefix import (
    PrefixHash,
    TokenIds,
    common_prefix_length,
    tokens_from_bytes,
    tokens_to_bytes,
)
from proxy.errors import StoreFault

T = TypeVar("T")

FORMAT_VERSION = 1
MAP_SIZE_BYTES = 16 << 30
"""Address space, not disk: the file grows as it fills."""

_ID = struct.Struct(">Q")


class Index:
    """Checkpoints by id and by prefix hash, and the few named values that outlive a process."""

    def __init__(self, path: Path) -> None:
        """Open or create the index in the directory *path*; raises StoreFault if it cannot be used."""
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            self._env = lmdb.open(str(path), max_dbs=4, map_size=MAP_SIZE_BYTES, mode=0o600)
            self._checkpoints = self._env.open_db(b"checkpoints")
            self._tokens = self._env.open_db(b"tokens")
            self._prefixes = self._env.open_db(b"prefixes", dupsort=True, dupfixed=True)
            self._values = self._env.open_db(b"values")
        except (lmdb.Error, OSError) as error:
            raise StoreFault(f"index {path} cannot be opened: {error}") from error
        self._check_format(path)

    def _check_format(self, path: Path) -> None:
        found = self.value("format", int)
        if found is None:
            self.put_value("format", FORMAT_VERSION)
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

    def all(self) -> list[Checkpoint]:
        with _faults(), self._env.begin(db=self._checkpoints) as txn:
            return [msgspec.msgpack.decode(bytes(v), type=Checkpoint) for _, v in txn.cursor()]

    def put(self, checkpoint: Checkpoint, tokens: TokenIds, hashes: Sequence[PrefixHash]) -> None:
        """Add a checkpoint in one transaction: this is the commit."""
        key = _ID.pack(checkpoint.id)
        with _faults(), self._env.begin(write=True) as txn:
            txn.put(key, msgspec.msgpack.encode(checkpoint), db=self._checkpoints)
            txn.put(key, tokens_to_bytes(tokens), db=self._tokens)
            for prefix_hash in hashes:
                txn.put(prefix_hash, key, db=self._prefixes)

    def update(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Rewrite the records of checkpoints that are still there."""
        with _faults(), self._env.begin(write=True, db=self._checkpoints) as txn:
            for checkpoint in checkpoints:
                key = _ID.pack(checkpoint.id)
                if txn.get(key) is not None:
                    txn.put(key, msgspec.msgpack.encode(checkpoint))

    def delete(self, checkpoint_id: CheckpointId, hashes: Sequence[PrefixHash]) -> None:
        key = _ID.pack(checkpoint_id)
        with _faults(), self._env.begin(write=True) as txn:
            txn.delete(key, db=self._checkpoints)
            txn.delete(key, db=self._tokens)
            for prefix_hash in hashes:
                txn.delete(prefix_hash, key, db=self._prefixes)

    def tokens(self, checkpoint_id: CheckpointId) -> TokenIds | None:
        with _faults(), self._env.begin(db=self._tokens) as txn:
            data = txn.get(_ID.pack(checkpoint_id))
            return None if data is None else tokens_from_bytes(bytes(data))

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
            names = (bytes(name).decode() for name in txn.cursor().iternext(values=False))
            return [name for name in names if name.startswith(prefix)]

    def n_prefixes(self) -> int:
        """Return how many entries of prefixes there are."""
        with _faults(), self._env.begin() as txn:
            return int(txn.stat(self._prefixes)["entries"])

    def n_missing(self, checkpoint_id: CheckpointId, hashes: Sequence[PrefixHash]) -> int:
        """Return by how many of its prefixes a checkpoint cannot be found."""
        key = _ID.pack(checkpoint_id)
        with _faults(), self._env.begin(db=self._prefixes) as txn:
            cursor = txn.cursor()
            return sum(not cursor.set_key_dup(prefix_hash, key) for prefix_hash in hashes)

    def replace_prefixes(
        self, prefixes: Iterable[tuple[CheckpointId, Sequence[PrefixHash]]]
    ) -> None:
        """Make the entries of all prefixes anew, in one transaction."""
        with _faults(), self._env.begin(write=True) as txn:
            txn.drop(self._prefixes, delete=False)
            for checkpoint_id, hashes in prefixes:
                for prefix_hash in hashes:
                    txn.put(prefix_hash, _ID.pack(checkpoint_id), db=self._prefixes)

    def value(self, name: str, value_type: type[T]) -> T | None:
        """Return the named value, or None if it is absent or of another type."""
        with _faults(), self._env.begin(db=self._values) as txn:
            data = txn.get(name.encode())
        try:
            return None if data is None else msgspec.msgpack.decode(bytes(data), type=value_type)
        except msgspec.DecodeError:
            return None

    def put_value(self, name: str, value: object) -> None:
        with _faults(), self._env.begin(write=True, db=self._values) as txn:
            txn.put(name.encode(), msgspec.msgpack.encode(value))


class _faults:
    """Translate what LMDB and the record decoder raise into StoreFault."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, lmdb.Error | msgspec.DecodeError | struct.error | OSError):
            raise StoreFault(f"index: {error}") from error
