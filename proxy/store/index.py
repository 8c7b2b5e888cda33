"""The LMDB index: which checkpoint covers which prefix.

Owns the key layout (docs/storage-format.md), and the checks that keep LMDB from a damaged file: LMDB trusts
every byte that it maps, and a damaged page ends the process. Reads are short transactions on the caller's
thread and never stay open across an await; only one thread may write (the store sees to that).
"""

import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import lmdb
import msgspec

from proxy.core.eviction import score_of
from proxy.core.model import Checkpoint, CheckpointId
from proxy.core.tokens import (
    BLOCK_TOKENS,
    PrefixHash,
    TokenIds,
    common_prefix_length,
    count_blocks,
    hash_prefixes,
    token_ids,
)
from proxy.errors import IndexDamaged, StoreFault, in_words
from proxy.store.files import digest_of, is_state_name, seal, seal_of, sync_names

T = TypeVar("T")

FORMAT_VERSION = 2
MAP_SIZE_BYTES = 16 << 30
"""By so much a file may grow until it is opened again. It is address space, not disk."""

Entry = tuple[Checkpoint, TokenIds, Sequence[PrefixHash]]
"""A checkpoint, its tokens, and the hashes of their prefixes."""


class Newer(NamedTuple):
    """What memory has newer than the index: records, scores and named values; a crash only loses counts."""

    checkpoints: Sequence[Checkpoint] = ()
    scores: Mapping[CheckpointId, float] = {}
    values: Mapping[str, object] = {}


NOTHING_NEWER = Newer()


class Summary(NamedTuple):
    """The fields that are read of all checkpoints at once, without reading all records.

    `score` is that of `core/eviction.py`: infinite if the checkpoint is pinned, 0 if it is quarantined.
    """

    score: float
    verified_at: float
    size_bytes: int
    n_blocks: int


_ID = struct.Struct(">Q")
_SUMMARY = struct.Struct(">ddQI")
_PLACE = struct.Struct(">dQ")
"""The key of `order`: a score and an id. Scores are never negative, so their bytes sort like numbers."""
_SCORE_BYTES = 8
_PLACES_AT_ONCE = 64
_TOKEN_BYTES = 4
_RECORDS = msgspec.msgpack.Decoder(Checkpoint)
_DATABASES: dict[bytes, dict[str, Any]] = {
    b"checkpoints": {},
    b"tokens": {},
    b"prefixes": {"dupsort": True, "dupfixed": True},
    b"values": {},
    b"summaries": {},
    b"order": {},
}


class Index:
    """Checkpoints by id and by prefix hash, and a few named values that survive a restart."""

    def __init__(self, path: Path, *, scratch: Path | None = None) -> None:
        """Open or create the index in the directory *path*.

        With *scratch*, an empty folder, a copy there is opened: nothing in *path* is created, removed or
        repaired. Raises IndexDamaged if the file is damaged, StoreFault if it cannot be used.
        """
        folder = scratch or path
        self._file, self._is_written = folder / "data.mdb", False
        self.flaw = ""
        """Why the entries of all states are missing; empty if they should be there."""
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            sound = sound_file(path, folder / "data.new")
            self._is_copied = sound != path / "data.mdb"
            if self._is_copied:
                sound.replace(self._file)
            elif scratch is not None:
                shutil.copyfile(sound, self._file)
            # LMDB maps its lock file: on a full disk a hole in the file would end the process.
            (folder / "lock.mdb").touch(mode=0o600)
            (folder / "lock.mdb").write_bytes(bytes(8192))
            self._env = lmdb.open(str(folder), mode=0o600, **_limits(self._file))
            for each in (folder, folder.parent):
                sync_names(each)  # LMDB syncs the file, but not its name
            self._values = self._env.open_db(b"values")
            self._check_format(path)  # before databases that another format lacks are added
            opened = [self._env.open_db(name, **options) for name, options in _DATABASES.items()]
            self._checkpoints, self._tokens, self._prefixes, _, *others = opened
            self._summaries, self._order = others
        except (lmdb.Error, OSError) as error:
            raise StoreFault(f"index {path} cannot be opened: {in_words(error)}") from error

    def _check_format(self, path: Path) -> None:
        found = self.value("format", int)
        if found is None:
            self.put_value("format", FORMAT_VERSION)
            self.flaw = "it was not there"
        elif found != FORMAT_VERSION:
            self.close()
            if found < FORMAT_VERSION:
                raise IndexDamaged(path, f"an older version wrote it, in format {found}")
            raise StoreFault(
                f"index {path} has format {found}, this version reads {FORMAT_VERSION}. Use the version "
                "that wrote it, or delete index/: it is made anew from the states"
            )

    def close(self) -> None:
        self._env.close()
        if self._is_written or not seal_of(self._file).exists():
            with suppress(OSError):  # then the next opening copies the entries
                seal(self._file)

    @contextmanager
    def _writing(self) -> Iterator[lmdb.Transaction]:
        with _faults():
            if not self._is_written:
                seal_of(self._file).unlink(missing_ok=True)
                sync_names(self._file.parent)  # an old seal would call the changed file damaged
                self._is_written = True
            with self._env.begin(write=True) as txn:
                yield txn

    def clear(self) -> None:
        """Forget all checkpoints."""
        with self._writing() as txn:
            of_checkpoints = (self._checkpoints, self._tokens, self._prefixes)
            for database in (*of_checkpoints, self._summaries, self._order):
                txn.drop(database, delete=False)

    def inconsistency(self, *, reads_all: bool = False) -> str:
        """Return which entries do not fit together, in words; empty if they all do.

        If the file was not closed, all entries are compared. The entries of a closed file are only counted;
        with *reads_all* each of its records is read as well.
        """
        n_blocks = [summary.n_blocks for _, summary in self.summaries()]
        n_summaries = len(n_blocks)
        databases = (self._checkpoints, self._tokens, self._prefixes, self._order)
        with _faults(), self._env.begin() as txn:
            n_records, *others = (txn.stat(database)["entries"] for database in databases)
        checkpoints = self.all() if reads_all or self._is_copied else []
        n_readable = len(checkpoints) if reads_all or self._is_copied else n_summaries
        if n_records != n_readable:
            return f"records that cannot be read: {n_records - n_readable}"
        found, expected = (*others, n_summaries), (n_records, sum(n_blocks), n_records, n_records)
        if found != expected:
            return f"of tokens, prefixes, places and summaries {found} instead of {expected}"
        n_wrong = sum(not self._is_whole(c) for c in checkpoints if self._is_copied)
        return f"{n_wrong} checkpoints with other tokens, prefixes or summaries" if n_wrong else ""

    def _is_whole(self, checkpoint: Checkpoint) -> bool:
        tokens, key = self.tokens(checkpoint.id), _ID.pack(checkpoint.id)
        if tokens is None or len(tokens) != checkpoint.n_tokens:
            return False
        with _faults(), self._env.begin() as txn:
            data = txn.get(key, db=self._summaries)
            if data is None or txn.get(data[:_SCORE_BYTES] + key, db=self._order) is None:
                return False
        found, expected = Summary._make(_SUMMARY.unpack(data)), _summary_of(checkpoint)
        if not _is_fixed(found) and not _is_fixed(expected):  # the stored score may be newer
            expected = expected._replace(score=found.score)
        hashes = hash_prefixes(checkpoint.namespace, tokens)
        return found == expected and not self.n_missing(checkpoint.id, hashes)

    def all(self) -> list[Checkpoint]:
        """Return all records; those that are damaged are left out."""
        found = ((i, self.record(i)) for i in self.ids())
        return [r for i, r in found if r and r.id == i and is_state_name(r.file_name)]

    def record(self, checkpoint_id: CheckpointId) -> Checkpoint | None:
        """Return the record of a checkpoint, None if it is gone or damaged."""
        return self._read(self._checkpoints, _ID.pack(checkpoint_id), _RECORDS.decode)

    def _read(self, database: Any, key: bytes, decode: Callable[[bytes], T]) -> T | None:
        with _faults(), self._env.begin(db=database) as txn:
            data = txn.get(key)
        try:
            return None if data is None else decode(data)
        except ValueError:
            return None

    def summaries(self) -> Iterator[tuple[CheckpointId, Summary]]:
        """Yield the ids of all checkpoints, ascending, and their summaries."""
        with _faults(), self._env.begin(db=self._summaries) as txn:
            for key, value in txn.cursor():
                yield CheckpointId(_ID.unpack(key)[0]), Summary._make(_SUMMARY.unpack(value))

    def verified_before(self, moment: float) -> list[CheckpointId]:
        """Return the checkpoints that were last verified before *moment*, the longest ago first."""
        found = [(s.verified_at, i) for i, s in self.summaries() if s.verified_at < moment]
        return [checkpoint_id for _, checkpoint_id in sorted(found)]

    def ids(self) -> Iterator[CheckpointId]:
        """Yield the ids of all checkpoints, ascending; no transaction stays open."""
        return (CheckpointId(_ID.unpack(key)[0]) for key in self._keys(self._summaries))

    def least_valuable(self) -> Iterator[tuple[CheckpointId, float]]:
        """Yield all ids and scores, the lowest score first; no transaction stays open."""
        places = map(_PLACE.unpack, self._keys(self._order))
        return ((CheckpointId(checkpoint_id), score) for score, checkpoint_id in places)

    def _keys(self, database: Any) -> Iterator[bytes]:
        begin = b""
        while True:
            with _faults(), self._env.begin(db=database) as txn, txn.cursor() as cursor:
                is_there = cursor.set_range(begin)
                keys = list(islice(cursor.iternext(values=False), _PLACES_AT_ONCE))
            if not is_there:
                return
            yield from keys
            begin = keys[-1] + b"\0"

    def most_valuable(self, n_at_most: int) -> list[CheckpointId]:
        """Return the ids of the checkpoints with the highest scores, the highest first."""
        with _faults(), self._env.begin(db=self._order) as txn, txn.cursor() as cursor:
            keys = islice(cursor.iterprev(values=False), n_at_most)
            return [CheckpointId(_PLACE.unpack(key)[1]) for key in keys]

    def put(self, *entries: Entry, newer: Newer = NOTHING_NEWER) -> None:
        """Add checkpoints, and what is *newer* of those that still exist: one transaction, the commit.

        New scores replace those of the index, except the scores of pins and quarantines.
        """
        with self._writing() as txn:
            for checkpoint, tokens, hashes in entries:
                key = _ID.pack(checkpoint.id)
                self._put_record(txn, key, checkpoint)
                txn.put(key, tokens.tobytes(), db=self._tokens)
                for prefix_hash in hashes:
                    txn.put(prefix_hash, key, db=self._prefixes)
            for checkpoint in newer.checkpoints:
                key = _ID.pack(checkpoint.id)
                if txn.get(key, db=self._checkpoints) is not None:
                    self._put_record(txn, key, checkpoint)
            for checkpoint_id, score in newer.scores.items():
                key = _ID.pack(checkpoint_id)
                if (data := txn.get(key, db=self._summaries)) is not None:
                    summary = Summary(*_SUMMARY.unpack(data))
                    if not _is_fixed(summary):  # pinned or quarantined meanwhile
                        self._put_summary(txn, key, summary._replace(score=score))
            for name, value in newer.values.items():
                txn.put(name.encode(), msgspec.msgpack.encode(value), db=self._values)

    def _put_record(self, txn: lmdb.Transaction, key: bytes, checkpoint: Checkpoint) -> None:
        txn.put(key, msgspec.msgpack.encode(checkpoint), db=self._checkpoints)
        self._put_summary(txn, key, _summary_of(checkpoint))

    def _put_summary(self, txn: lmdb.Transaction, key: bytes, new: Summary | None) -> None:
        """Replace the summary of a checkpoint and its key in `order`; None removes both."""
        if (old := txn.get(key, db=self._summaries)) is not None:
            txn.delete(bytes(old[:_SCORE_BYTES]) + key, db=self._order)
            txn.delete(key, db=self._summaries)
        if new is not None:
            summary = _SUMMARY.pack(*new)
            txn.put(key, summary, db=self._summaries)
            txn.put(summary[:_SCORE_BYTES] + key, b"", db=self._order)

    def delete(self, checkpoint_id: CheckpointId, hashes: Sequence[PrefixHash]) -> None:
        key = _ID.pack(checkpoint_id)
        with self._writing() as txn:
            txn.delete(key, db=self._checkpoints)
            txn.delete(key, db=self._tokens)
            self._put_summary(txn, key, None)
            for prefix_hash in hashes:
                txn.delete(prefix_hash, key, db=self._prefixes)

    def tokens(self, checkpoint_id: CheckpointId) -> TokenIds | None:
        """Return the tokens of a checkpoint, None if they are gone or damaged."""
        return self._read(self._tokens, _ID.pack(checkpoint_id), token_ids)

    def common_prefixes(
        self, ids: Iterable[CheckpointId], tokens: bytes, n_at_most: int
    ) -> list[tuple[CheckpointId, int]]:
        """Return how many of the first *n_at_most* tokens each shares with *tokens*, as bytes."""
        end, found = n_at_most * _TOKEN_BYTES, []
        last_block = max(0, n_at_most - BLOCK_TOKENS) * _TOKEN_BYTES
        with _faults(), self._env.begin(db=self._tokens, buffers=True) as txn:
            for checkpoint_id in ids:
                if (stored := txn.get(_ID.pack(checkpoint_id))) is not None:
                    # Mostly alike, by their hashes: compared as a whole, without a copy.
                    before = stored[:last_block]
                    n_bytes = len(before) if tokens.startswith(before) else 0
                    n_bytes += common_prefix_length(bytes(stored[n_bytes:end]), tokens[n_bytes:end])
                    found.append((checkpoint_id, n_bytes // _TOKEN_BYTES))
        return found

    def reaching(self, hashes: Sequence[PrefixHash], n_at_most: int) -> dict[CheckpointId, int]:
        """Return the checkpoints that begin with any of the prefixes, and how many blocks they share.

        Checkpoints that share most come first; at most *n_at_most* are returned.
        """
        found: dict[CheckpointId, int] = {}
        with _faults(), self._env.begin(db=self._prefixes) as txn, txn.cursor() as cursor:
            n_blocks = len(hashes)

            def has_no_more(index: int) -> bool:
                return not cursor.set_key(hashes[index]) or cursor.count() <= len(found)

            # A checkpoint with a prefix also has all shorter prefixes, so counts only grow towards shorter
            # ones.
            while n_blocks := bisect_left(range(n_blocks), True, key=has_no_more):
                cursor.set_key(hashes[n_blocks - 1])
                for key in cursor.iternext_dup():
                    found.setdefault(CheckpointId(_ID.unpack(key)[0]), n_blocks)
                    if len(found) == n_at_most:
                        return found
        return found

    def names(self, prefix: str) -> list[str]:
        """Return the names of all values whose name begins with *prefix*."""
        with _faults(), self._env.begin(db=self._values) as txn:
            # The name of a damaged value may not be text; then it matches no prefix.
            names = [key.decode(errors="replace") for key in txn.cursor().iternext(values=False)]
        return [name for name in names if name.startswith(prefix)]

    def n_missing(self, checkpoint_id: CheckpointId, hashes: Sequence[PrefixHash]) -> int:
        """Return how many of its prefix hashes do not lead to a checkpoint."""
        key = _ID.pack(checkpoint_id)
        with _faults(), self._env.begin(db=self._prefixes) as txn:
            cursor = txn.cursor()
            return sum(not cursor.set_key_dup(prefix_hash, key) for prefix_hash in hashes)

    def value(self, name: str, value_type: type[T]) -> T | None:
        """Return the named value, or None if it is absent or of another type."""
        decode = partial(msgspec.msgpack.decode, type=value_type)
        return self._read(self._values, name.encode(), decode)

    def put_value(self, name: str, value: object) -> None:
        self.put(newer=Newer(values={name: value}))


def _summary_of(checkpoint: Checkpoint) -> Summary:
    # As if it shared no tokens with others. The clock may have been ahead when it was used.
    score = score_of(checkpoint, [min(checkpoint.last_used_at, time.time())])
    n_blocks = count_blocks(checkpoint.n_tokens)
    return Summary(score, checkpoint.verified_at, checkpoint.size_bytes, n_blocks)


def _is_fixed(summary: Summary) -> bool:
    """Return whether the score is that of a pin or a quarantine."""
    return summary.score in (0, inf)


@contextmanager
def _faults() -> Iterator[None]:
    """Translate the errors of LMDB and of the record decoder into StoreFault."""
    try:
        yield
    except (lmdb.Error, ValueError, struct.error, OSError) as error:
        raise StoreFault(f"index: {error}") from error


# Sound files for LMDB.
#
# A closed index has its checksum beside it until the next write. The entries of an index without a checksum
# (kill -9) are copied into a new file by a separate process, which a damaged page may end.


_VALUE_BYTES = {b"prefixes": _ID.size, b"summaries": _SUMMARY.size, b"order": 0}
_ENTRIES_AT_ONCE = 100
_COPY_SECONDS = 600
_EXIT_DAMAGED = 65
_FATAL_SIGNALS = (signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
_COPY = "import sys; from proxy.store.index import copy_entries; copy_entries(*sys.argv[1:])"


def sound_file(path: Path, copy: Path) -> Path:
    """Return the index file in *path* if it is unchanged since it was closed, else a *copy* of its entries.

    Raises IndexDamaged if the content of the file is damaged; StoreFault or OSError for other failures.
    """
    file = path / "data.mdb"
    if not file.exists() or not file.stat().st_size:
        return file  # LMDB makes a new one
    with file.open("rb"):  # raises OSError if it may not be read
        pass
    try:
        sealed = seal_of(file).read_text().strip()
    except (OSError, ValueError):
        _copy_apart(path, copy)
        return copy
    if sealed != digest_of(file):
        raise IndexDamaged(path, "its content is not what was written")
    return file


def _copy_apart(path: Path, copy: Path) -> None:
    copy.unlink(missing_ok=True)
    command = [sys.executable, "-c", _COPY, str(path / "data.mdb"), str(copy)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_COPY_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise IndexDamaged(path, "reading it does not end") from error
    if done.returncode:  # on a full disk it would take what is left
        copy.unlink(missing_ok=True)
    if done.returncode == _EXIT_DAMAGED:
        raise IndexDamaged(path, done.stdout.strip())
    if -done.returncode in _FATAL_SIGNALS:
        raise IndexDamaged(path, f"LMDB ends at it ({signal.Signals(-done.returncode).name})")
    if done.returncode:
        said = done.stderr.strip().rpartition("\n")[2] or f"status {done.returncode}"
        raise StoreFault(f"index {path} cannot be copied: {said}")


def copy_entries(source: str, target: str) -> None:
    """Copy all entries of the index file *source* into the new file *target*, in a separate process.

    If the entries cannot be read, print the reason and exit with _EXIT_DAMAGED.
    """
    # Open the target first: if that fails, the source is not to blame.
    with _open_file(target, holds=source, mode=0o600, sync=False) as new:
        for name, kind in _DATABASES.items():
            database, entries = new.open_db(name, **kind), _entries(source, name)
            while batch := list(islice(entries, _ENTRIES_AT_ONCE)):
                with new.begin(db=database, write=True) as txn, txn.cursor() as cursor:
                    cursor.putmulti(batch)
        new.sync(True)


def _entries(source: str, name: bytes) -> Iterator[tuple[bytes, bytes]]:
    try:
        with _open_file(source, readonly=True) as old, suppress(lmdb.NotFoundError):
            database = old.open_db(name, create=False)  # a new index may lack it
            with old.begin(db=database) as txn:
                for key, value in txn.cursor():
                    has_size = len(value) == _VALUE_BYTES.get(name, len(value))
                    if not has_size or not 0 < len(key) <= old.max_key_size():
                        raise lmdb.CorruptedError("an entry has another size")
                    yield key, value
    except lmdb.Error as error:
        print(error)
        sys.exit(_EXIT_DAMAGED)


def _open_file(file: str, *, holds: str = "", **options: Any) -> lmdb.Environment:
    return lmdb.open(file, subdir=False, lock=False, **_limits(Path(holds or file)), **options)


def _limits(file: Path) -> dict[str, Any]:
    n_bytes = file.stat().st_size if file.exists() else 0
    return {"max_dbs": len(_DATABASES), "map_size": MAP_SIZE_BYTES + n_bytes}
