"""The directory of a store: its lock, and its index and files, which are changed together.

Owns the order of writes (docs/storage-format.md). Beside each state lies its record, from which a lost or
damaged index is made anew. Nothing here awaits; one thread at a time may write.
"""

import fcntl
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from secrets import token_bytes
from tempfile import TemporaryDirectory

import msgspec
import xxhash

from proxy.core.model import Checkpoint, CheckpointId
from proxy.core.tokens import TokenIds, hash_prefixes
from proxy.errors import IndexDamaged, StateFileMalformed, StoreFault, StoreLocked, in_words
from proxy.llama.files import read_state_file
from proxy.store.files import FileStamp, StateFiles, id_of, sync_names, write_whole
from proxy.store.index import NOTHING_NEWER, Entry, Index, Newer
from proxy.store.known_models import Owner, introduce, owners

LOCK_NAME = ".llama-prefix-cache.lock"
SECRET_NAME = "key-secret"
_SECRET_BYTES = 32
_ENTERED_AT_ONCE = 100
"""How many entries are made anew in one transaction."""
READ_ONLY = "the directory is read-only"
_DAMAGED = "index.damaged-"
_DIGEST_BYTES = 16
_LEAST_FREE_BYTES = 1 << 20
"""With less, a change of the index may fail for want of room."""
MOST_RECORD_BYTES = 4 << 20
"""No record is longer: it has some 25 bytes for each 16 MiB of its state."""


@contextmanager
def keep_proxies_out(directory: Path, *, creates_lock: bool = False) -> Iterator[None]:
    """Lock a store against other processes; raises StoreLocked if one has, or may have, the store open.

    A missing lock file means that no proxy has ever used the directory. The file is created only with
    *creates_lock*, because it would belong to the caller's user; raises StoreFault if that fails.
    """
    path = directory / LOCK_NAME
    flags = os.O_RDWR | os.O_CREAT if creates_lock else os.O_RDONLY
    with ExitStack() as opened:
        try:
            descriptor = os.open(path, flags, 0o600)
            opened.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreLocked(
                f"another llama-prefix-cache uses {directory}{_holder(descriptor)}: stop it first, or"
                " give another directory. Without --slot-save-path, `ls`, `pin`, `unpin` and `rm`"
                " ask it"
            ) from error
        except OSError as error:
            error.filename = str(path)
            if creates_lock:
                raise StoreFault(in_words(error)) from error
            if not isinstance(error, FileNotFoundError):
                raise StoreLocked(in_words(error)) from error
        yield


def _holder(descriptor: int) -> str:
    """Return which process has locked an open file, empty if the kernel does not tell."""
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            *_, pid, file, _, _ = line.split()
            if file.endswith(f":{os.fstat(descriptor).st_ino}"):
                return f" (process {pid})"
    return ""


class Sidecar(msgspec.Struct, frozen=True):
    """The record beside a state, and the state's owner; times and counts are as old as the file.

    With the records, the index can be made anew from the states in any directory. Without its record, the
    model and tenant of a state are unknown.
    """

    checkpoint: Checkpoint
    owner: Owner | None


def encode_sidecar(sidecar: Sidecar) -> bytes:
    """Return the bytes of a record's file: a checksum, then the record."""
    record = msgspec.msgpack.encode(sidecar)
    return xxhash.xxh3_128_digest(record) + record


def decode_sidecar(data: bytes) -> Sidecar | None:
    """Return the record in these bytes, None if they are damaged."""
    digest, record = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if digest != xxhash.xxh3_128_digest(record):
        return None
    with suppress(ValueError):  # also raised for text that is not UTF-8
        return msgspec.msgpack.decode(record, type=Sidecar)
    return None


def read_sidecar(files: StateFiles, name: str) -> Sidecar | None:
    """Return the record beside the state *name*, None if it is gone or damaged; raises OSError."""
    try:
        with files.path(files.sidecar_name(name)).open("rb") as file:
            data = file.read(MOST_RECORD_BYTES)
    except FileNotFoundError:
        return None
    sidecar = decode_sidecar(data)
    return sidecar if sidecar and sidecar.checkpoint.file_name == name else None


UNREADABLE = "a state cannot be read"
_NOT_AS_SAVED = "a state is not what its record says"
LACKING = "states lie there without an entry, as after a crash in a save, or with an older index"


@dataclass
class Rebuild:
    """An index that was made anew: the reason, the number of states entered, and the states lost.

    The old index's counts and measurements are lost: when and how often a checkpoint was used, and, if the
    index was put aside, rates and self-tests too.
    """

    reason: str
    n_entered: int = 0
    lost: dict[str, str] = field(default_factory=dict)
    """Why, by file name; what is UNREADABLE may be read another time."""

    @property
    def is_damage(self) -> bool:
        """Whether anything was wrong: a crash in a save leaves a whole state without its entry."""
        return bool(self.lost) or self.reason not in ("", LACKING)

    @property
    def words(self) -> str:
        """The reason and the outcome for the states, for a log line."""
        told = [f"{n_states} ({why})" for why, n_states in Counter(self.lost.values()).items()]
        lost = f"; lost: {', '.join(told)}" if told else "; no state is lost"
        return f"{self.reason}; {self.n_entered} entered again{lost}"


class StoreDirectory:
    """The index and the state files of one directory, locked against other processes."""

    def __init__(self, path: Path, *, mends_index: bool = True, reads_all: bool = False) -> None:
        """Lock and open the store in the directory *path*; `rebuild` says why its index was made anew.

        A damaged index is made anew from the states, at about a millisecond each; without *mends_index*
        IndexDamaged is raised instead, and nothing is removed. States that a crash in a save has left
        without an entry are entered. Raises StoreLocked if another process has the directory, StoreFault if
        the directory cannot be used. If the directory cannot be written, a copy of its index is used. With
        *reads_all* every record is read.
        """
        if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
            raise StoreFault(f"{path}: this user may not read it")
        is_readonly = path.is_dir() and not os.access(path, os.W_OK)
        mends_index |= is_readonly  # that of the copy
        if is_readonly and not any(path.glob("lpc-*.state")):
            raise StoreFault(f"{path}: this user may not write it, and it has no state to read")
        self.files = StateFiles(path, is_readonly=is_readonly)
        self.rebuild = Rebuild("")
        with ExitStack() as opened:
            opened.enter_context(keep_proxies_out(path, creates_lock=not is_readonly))
            try:
                self._device = path.stat().st_dev
                if is_readonly:
                    copy = Path(opened.enter_context(TemporaryDirectory()))
                    (copy / "index").mkdir()
                    for name in (SECRET_NAME, "index/data.mdb", "index/data.xxh3"):
                        with suppress(FileNotFoundError):
                            shutil.copyfile(path / name, copy / name)
                    path = copy
                else:
                    self._lock = (path / LOCK_NAME).stat()
                # Files that were being saved are useless, and a full disk may have no other room for the
                # index.
                names, removes = [*self.files.names()], mends_index and not is_readonly
                self.half = [n for n in names if removes and not n.endswith((".state", ".meta"))]
                for name in self.half:
                    self.files.remove(name)
                self.secret = _secret(path / SECRET_NAME)
                self.index = _open_index(path / "index", mends_index=mends_index)
                opened.callback(self.index.close)
                self._require_whole(names, mends_index=mends_index, reads_all=reads_all)
            except OSError as error:
                raise StoreFault(f"{path}: {in_words(error)}") from error
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()

    def _require_whole(self, names: Iterable[str], *, mends_index: bool, reads_all: bool) -> None:
        flaw = self.index.inconsistency(reads_all=reads_all)
        lacking = [] if flaw else self._unentered(names, recorded=not self.index.flaw)
        if (damage := flaw or (lacking and self.index.flaw)) and not mends_index:
            raise IndexDamaged(self.files.directory / "index", damage)
        if flaw:
            self.make_index_anew(flaw)
        elif lacking:
            self._enter_states(self.index.flaw or LACKING, lacking, removes_lost=mends_index)
            if self.rebuild.lost and not mends_index:
                raise IndexDamaged(self.files.directory / "index", self.rebuild.words)

    def require_writable(self) -> None:
        """Raise StoreFault if nothing can be changed, because the index is a copy."""
        if self.files.is_readonly:
            raise StoreFault(f"{self.files.directory}: {READ_ONLY}")

    def require_disk(self) -> None:
        """Raise StoreFault if the directory was unmounted, or another disk is mounted over it.

        Its files only look as if they were gone, and what another disk holds is another store's. Raises
        OSError if there is no directory at all.
        """
        if self.files.directory.stat().st_dev != self._device:
            told = "is not on the disk where it was at the start: mount that disk, or restart the proxy"
            raise StoreFault(f"{self.files.directory} {told}")

    # Entering, changing and removing one checkpoint.

    def commit(self, entry: Entry, newer: Newer = NOTHING_NEWER) -> FileStamp:
        """Give a file its final name and enter its checkpoint, and what is *newer*.

        If StoreFault or OSError is raised, neither file nor entry is left.
        """
        self._keep_lock()
        name = (checkpoint := entry[0]).file_name
        stamp = self.files.seal(name)
        try:
            if stamp[1] != checkpoint.size_bytes:
                raise StoreFault(f"{name} was changed since it was saved")
            self.write_sidecars([checkpoint])
            self.index.put(entry, newer=newer)
        except (StoreFault, OSError):
            self.files.remove(name)
            raise
        return stamp

    def _keep_lock(self) -> None:
        """Lock the directory again if somebody has deleted it and made it anew; raises StoreLocked.

        Its index is then made anew at the next opening, from the states and the records beside them.
        """
        self.require_disk()
        directory = self.files.directory
        lock = directory / LOCK_NAME
        with suppress(FileNotFoundError):
            if os.path.samestat(lock.stat(), self._lock):
                return
        self._opened.enter_context(keep_proxies_out(directory, creates_lock=True))
        write_whole(directory / SECRET_NAME, self.secret)
        self._lock = lock.stat()

    def update(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Replace records durably: first beside their files, then in the index."""
        self.require_disk()
        self.write_sidecars(checkpoints)
        self.index.put(newer=Newer(checkpoints))

    def remove(self, checkpoint: Checkpoint) -> TokenIds | None:
        """Delete a checkpoint, first its record; return its tokens if the index had them.

        Without its record a state is never entered again, whatever happens next.
        """
        self.files.remove(self.files.sidecar_name(checkpoint.file_name))
        with suppress(OSError):  # a full disk
            sync_names(self.files.directory)
        tokens = self.index.tokens(checkpoint.id)
        hashes = hash_prefixes(checkpoint.namespace, tokens) if tokens is not None else []
        try:
            self.index.delete(checkpoint.id, hashes)
        except StoreFault:
            if self.files.free_bytes() > _LEAST_FREE_BYTES:
                raise
            # On a full disk the index cannot write even that it has less. Its entry is found to be broken
            # if this ends here.
            self.files.remove(checkpoint.file_name)
            self.index.delete(checkpoint.id, hashes)
        self.files.remove(checkpoint.file_name)
        return tokens

    # The records beside the states.

    def write_sidecars(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Write records beside states, and make all names in the directory durable; raises OSError."""
        known = dict(owners(self.index))
        for checkpoint in checkpoints:
            name = self.files.sidecar_name(checkpoint.file_name)
            sidecar = Sidecar(checkpoint, known.get(checkpoint.namespace))
            self.files.write_whole(name, encode_sidecar(sidecar))
        sync_names(self.files.directory)

    # Comparing index and files, and making the index anew.

    def sweep(self) -> tuple[int, int]:
        """Remove entries without a file, and files without an entry; return how many of each.

        Only names are compared: the content and size of a file are verified before its use.
        """
        names, n_files = [*self.files.names()], len(self.half)
        states = {id_of(name) for name in names if name.endswith(".state")}
        beside = {id_of(name) for name in names if name.endswith(".meta")}
        entered = set(self.index.ids())
        broken = entered - states
        for checkpoint in self._records(broken):
            self.remove(checkpoint)
        for record in self._records((entered & states) - beside):
            with suppress(OSError):  # a full disk: the next opening tries again
                self.write_sidecars([record])
        orphans = (states | beside) - entered - set(map(id_of, self.rebuild.lost))
        for name in [n for n in names if id_of(n) in orphans]:
            self.files.remove(name)
            n_files += 1
        return len(broken), n_files

    def _records(self, ids: Iterable[CheckpointId]) -> Iterator[Checkpoint]:
        return (record for i in ids if (record := self.index.record(i)) is not None)

    def make_index_anew(self, reason: str) -> None:
        """Forget all entries, and enter all states again."""
        self.index.clear()
        self._enter_states(reason, self._unentered(self.files.names()))

    def _unentered(self, names: Iterable[str], *, recorded: bool = False) -> list[str]:
        """Return the states among *names* that have no entry; if *recorded*, those that have a record."""
        entered, files = {*self.index.ids()}, self.files
        lacking = [n for n in names if n.endswith(".state") and id_of(n) not in entered]
        return [n for n in lacking if not recorded or files.path(files.sidecar_name(n)).exists()]

    def _enter_states(
        self, reason: str, states: Iterable[str], *, removes_lost: bool = True
    ) -> None:
        """Enter states without an entry; with *removes_lost* delete those that cannot be entered.

        A state that cannot be read is tried again at each opening; if this is interrupted, the next opening
        goes on.
        """
        rebuild = self.rebuild = Rebuild(reason)
        names = iter(states)
        while batch := list(islice(names, _ENTERED_AT_ONCE)):
            found = {name: self._entry_of(name) for name in batch}
            rebuild.lost |= {name: why for name, why in found.items() if isinstance(why, str)}
            entries = [entry for entry in found.values() if not isinstance(entry, str)]
            self.index.put(*entries)
            rebuild.n_entered += len(entries)
        for name, why in rebuild.lost.items():
            if removes_lost and why != UNREADABLE:
                with suppress(OSError):
                    self.files.remove(name)

    def _entry_of(self, name: str) -> Entry | str:
        """Return the entry of a state, from the record beside it, or why there is none.

        The model and tenant of the state are entered at once.
        """
        try:
            if (sidecar := read_sidecar(self.files, name)) is None:
                return "the record beside a state is gone or damaged"
            if sidecar.owner is None:
                return "it is not known which model a state is of"
            namespace = introduce(self.index, sidecar.owner)
            checkpoint = replace(sidecar.checkpoint, namespace=namespace)
            state = read_state_file(self.files.path(name))
        except StateFileMalformed:
            return _NOT_AS_SAVED
        except OSError:
            return UNREADABLE
        if (len(state.tokens), state.size_bytes) != (checkpoint.n_tokens, checkpoint.size_bytes):
            return _NOT_AS_SAVED
        return checkpoint, state.tokens, hash_prefixes(namespace, state.tokens)


def _secret(path: Path) -> bytes:
    """Return the secret that the tenant names of a directory are made with; create it if it is missing."""
    with suppress(FileNotFoundError):
        if len(secret := path.read_bytes()) == _SECRET_BYTES:
            return secret
    write_whole(path, secret := token_bytes(_SECRET_BYTES))
    return secret


def _open_index(path: Path, *, mends_index: bool) -> Index:
    try:
        return Index(path)
    except IndexDamaged as damage:
        if not mends_index:
            raise
        # Only the newest damaged index is kept, for an operator to look at.
        earlier = list(path.parent.glob(_DAMAGED + "*"))
        path.rename(path.with_name(f"{_DAMAGED}{time.time_ns() // 1_000_000}"))
        for directory in earlier:
            shutil.rmtree(directory, ignore_errors=True)
        index = Index(path)
        index.flaw = damage.flaw
        return index
