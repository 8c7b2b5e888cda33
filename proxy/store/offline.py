"""A store that no proxy is using: opening, checking and mending the store, exporting from it and importing.

Owns the layout of exported files. An export only reads, so a proxy may use the store meanwhile.
"""

import io
import os
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from secrets import token_hex
from types import SimpleNamespace
from typing import IO, Any

import msgspec

from proxy.core.conditions import docstrings_of_fields
from proxy.core.model import Checkpoint, is_of_other_secret
from proxy.core.tokens import Namespace, hash_prefixes
from proxy.errors import StateFileMalformed, StoreFault, in_words
from proxy.llama.files import StateFile, read_state_file
from proxy.store.directory import (
    LACKING,
    LOCK_NAME,
    MOST_RECORD_BYTES,
    SECRET_NAME,
    UNREADABLE,
    Rebuild,
    Sidecar,
    StoreDirectory,
    decode_sidecar,
    encode_sidecar,
    read_sidecar,
)
from proxy.store.files import StateFiles, final_name_of, id_of, is_state_name, replacing
from proxy.store.known_models import Owner, introduce, namespace_of

Note = Callable[[int], object]
"""Called with the number of bytes just read."""


@contextmanager
def open_offline(
    directory: Path, *, may_be_new: bool = False, mends_index: bool = False
) -> Iterator[StoreDirectory]:
    """Lock and open the store in *directory*.

    Only with *mends_index* a damaged index is mended, and files that were being saved are removed. Raises
    StoreLocked if a proxy has the directory, StoreFault if there is no store or it cannot be read,
    IndexDamaged if the index has to be mended.
    """
    is_new = not (directory / "index" / "data.mdb").exists()
    if is_new and not may_be_new and not any(directory.glob("lpc-*.state")):
        raise StoreFault(f"there is no store in {directory}: no proxy has ever used it")
    with closing(StoreDirectory(directory, mends_index=mends_index, reads_all=True)) as store:
        if may_be_new or mends_index:
            store.require_writable()
        yield store


class ProblemKind(StrEnum):
    """The kinds of damage, in the words of a report; below each stands how `mend` repairs it."""

    @property
    def cure(self) -> str:
        return docstrings_of_fields(ProblemKind)[self.name][0]

    FILE_GONE = "the file of a checkpoint is gone"
    """its entry is removed"""
    FILE_UNREADABLE = "the file of a checkpoint cannot be read"
    """it is left alone: see who owns it, and its mode"""
    FILE_CHANGED = "the file of a checkpoint is not what was saved"
    """file and entry are removed"""
    MADE_OF_CHANGED = "a checkpoint may stem from one that is not what was saved"
    """it is removed"""
    TOKENS_DIFFER = "a file holds other tokens than the index says"
    """the index is made anew"""
    NOT_FOUND = "a checkpoint would not be found"
    """the index is made anew"""
    RECORD_GONE = "the record beside a state is gone or damaged"
    """it is written again"""
    FILE_WITHOUT_ENTRY = "a file that no entry names"
    """it is removed"""
    INDEX_DAMAGED = "the index cannot be used"
    """it is made anew from the states"""
    STATE_LOST = "a state that cannot be entered again"
    """it is removed"""


class Problem(msgspec.Struct, frozen=True):
    """One problem, and the name of the file concerned."""

    kind: ProblemKind
    name: str
    size_bytes: int = 0
    detail: str = ""


def examine(store: StoreDirectory, note: Note) -> list[Problem]:
    """Compare all index entries with all bytes of their files; call *note* with the bytes read.

    Returns the problems; raises StoreFault. A proxy only compares names when it starts, and verifies a file
    before the file is used.
    """
    checkpoints = store.index.all()
    kinds = {c: kind for c in checkpoints if (kind := _problem_of(store, c, note))}
    changed = [c for c, kind in kinds.items() if kind is ProblemKind.FILE_CHANGED]
    for checkpoint in checkpoints:
        if any(checkpoint.may_stem_from(damaged) for damaged in changed):
            kinds.setdefault(checkpoint, ProblemKind.MADE_OF_CHANGED)
    problems = _found_by_opening(store.rebuild) if store.rebuild.is_damage else []
    problems += [Problem(kind, c.file_name, c.size_bytes) for c, kind in kinds.items()]
    named = {c.file_name for c in checkpoints} | {problem.name for problem in problems}
    unnamed = {*store.half, *store.files.names()} - named - {*map(store.files.sidecar_name, named)}
    kind = ProblemKind.FILE_WITHOUT_ENTRY
    return problems + [Problem(kind, n, store.files.size_bytes(n)) for n in sorted(unnamed)]


def _problem_of(store: StoreDirectory, checkpoint: Checkpoint, note: Note) -> ProblemKind | None:
    name = checkpoint.file_name
    try:
        is_same = store.files.is_intact(name, checkpoint.content)
        note(checkpoint.size_bytes)
        if not is_same:
            return ProblemKind.FILE_CHANGED
        in_file = read_state_file(store.files.path(name)).tokens
    except FileNotFoundError:
        return ProblemKind.FILE_GONE
    except OSError:
        return ProblemKind.FILE_UNREADABLE
    except StateFileMalformed:
        return ProblemKind.FILE_CHANGED
    if store.index.tokens(checkpoint.id) != in_file:
        return ProblemKind.TOKENS_DIFFER
    if store.index.n_missing(checkpoint.id, hash_prefixes(checkpoint.namespace, in_file)):
        return ProblemKind.NOT_FOUND
    return None if read_sidecar(store.files, name) else ProblemKind.RECORD_GONE


def _found_by_opening(rebuild: Rebuild) -> list[Problem]:
    """Return the damage of an index that was made anew, and the states that were not entered."""
    problems = []
    if rebuild.reason != LACKING:
        problems.append(Problem(ProblemKind.INDEX_DAMAGED, "index", detail=rebuild.reason))
    for name, why in rebuild.lost.items():
        kind = ProblemKind.FILE_UNREADABLE if why == UNREADABLE else ProblemKind.STATE_LOST
        problems.append(Problem(kind, name, detail=why))
    return problems


def mend(store: StoreDirectory, problems: Sequence[Problem]) -> None:
    """Apply the cure of each problem; raises StoreFault or OSError."""
    by_name = {checkpoint.file_name: checkpoint for checkpoint in store.index.all()}
    for problem in problems:
        match problem.kind:
            case ProblemKind.FILE_WITHOUT_ENTRY:
                store.files.remove(problem.name)
            case ProblemKind.FILE_GONE | ProblemKind.FILE_CHANGED | ProblemKind.MADE_OF_CHANGED:
                store.remove(by_name[problem.name])
            case ProblemKind.RECORD_GONE:
                store.write_sidecars([by_name[problem.name]])
    if {ProblemKind.TOKENS_DIFFER, ProblemKind.NOT_FOUND} & {p.kind for p in problems}:
        store.make_index_anew("entries differ from the states")
        store.rebuild = Rebuild("")  # `examine` reports only the damage found at opening


# Checkpoints in one file, exported from one store and imported into another: a tar of records and states
# as they lie in the store (docs/storage-format.md). Each record comes before its state, so that the file
# can be read as a stream. A file is not trusted: a state must have its checksums, and is entered with the
# tokens that it holds.

_CHUNK_BYTES = 4 << 20
_UNREADABLE = tarfile.TarError, ValueError, OverflowError, RecursionError


def read_records(files: StateFiles) -> list[Sidecar]:
    """Return the records beside the states of a directory, also while a proxy uses it; raises StoreFault.

    A state without an intact record is left out: `check --fix` writes its record again.
    """
    states = sorted(filter(is_state_name, files.names()))
    records = [record for name in states if (record := read_sidecar(files, name))]
    if not records:
        why = "no state has an intact record: run `check --fix`"
        raise StoreFault(why if states else f"there is no state in {files.directory}")
    return records


def export_checkpoints(
    files: StateFiles, records: Sequence[Sidecar], file: Path, note: Note
) -> list[Sidecar]:
    """Write checkpoints to *file*, which appears when it is whole; raises StoreFault or OSError.

    An existing *file* is replaced, unless it is a file of the store or no regular file. Returns what was
    written: what a proxy deletes meanwhile is left out.
    """
    _require_replaceable(files, file)
    written = list[Sidecar]()
    with replacing(file, file.with_name(f".export-{token_hex(8)}.part")) as output:
        with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for record in records:
                with suppress(FileNotFoundError):
                    _write(tar, files, record)
                    written.append(record)
                note(record.checkpoint.size_bytes)
        if not written:
            raise StoreFault("their files are gone: run check")
    return written


def _require_replaceable(files: StateFiles, file: Path) -> None:
    """Raise StoreFault if *file* is one of the store's own files, or no regular file."""
    directory, parent = files.directory.resolve(), file.parent.resolve()
    is_ours = file.name.startswith("lpc-") or file.name in (LOCK_NAME, SECRET_NAME)
    if (is_ours and parent == directory) or parent == directory / "index":
        raise StoreFault(f"{file} is a name of the store's own files: choose another")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise StoreFault(f"{parent} is no directory that this user may write to")
    if file.exists() and not file.is_file():
        raise StoreFault(f"{file} is no regular file: choose another")


def _write(tar: tarfile.TarFile, files: StateFiles, sidecar: Sidecar) -> None:
    name = sidecar.checkpoint.file_name
    if sidecar.owner is None:
        raise StoreFault(f"the store does not know any more which model {name} is of")
    record = encode_sidecar(sidecar)
    with files.path(name).open("rb") as state:
        if not files.is_intact(name, sidecar.checkpoint.content):
            raise StoreFault(f"{files.path(name)} is not what was saved: run check")
        _add(tar, files.sidecar_name(name), io.BytesIO(record), len(record))
        _add(tar, name, state, sidecar.checkpoint.size_bytes)


def _add(tar: tarfile.TarFile, name: str, content: IO[bytes], n_bytes: int) -> None:
    head = tarfile.TarInfo(name)  # without user and time
    head.size, head.mode = n_bytes, 0o600
    tar.addfile(head, content)


@dataclass(slots=True)
class Imported:
    """The outcome for the checkpoints in a file."""

    entered: list[Checkpoint] = field(default_factory=list)
    n_already_there: int = 0
    is_new_model: bool = False


def import_checkpoints(store: StoreDirectory, file: Path, note: Note) -> Imported:
    """Enter the checkpoints of *file*; a StoreFault says how many were entered before it.

    A state that would leave less of the disk free than saves do is refused. Checkpoints entered before a
    fault stay: each is complete by itself.
    """
    imported = Imported()
    there = store.index.all()  # read once: no other process writes while the directory is locked
    try:
        with file.open("rb") as read, tarfile.open(fileobj=_in_pieces(read), mode="r:") as tar:
            while (head := tar.next()) is not None:
                sidecar = decode_sidecar(_open(tar, head).read(MOST_RECORD_BYTES))
                if sidecar is None or sidecar.owner is None:
                    raise StoreFault(f"it is not what `export` writes: {head.name} is no record")
                record, owner = sidecar.checkpoint, sidecar.owner
                imported.is_new_model |= namespace_of(store.index, owner) is None
                state = tar.next()
                if state is not None and state.size != record.size_bytes:
                    raise StoreFault("a state in it is damaged")
                entered = _enter(store, there, record, owner, _open(tar, state))
                if entered is None:
                    imported.n_already_there += 1
                else:
                    imported.entered.append(entered)
                    there.append(entered)
                note(record.size_bytes)
    except (StoreFault, OSError, *_UNREADABLE) as error:
        is_other = not isinstance(error, StoreFault | OSError)
        why = "it is not what `export` writes, or is cut short" if is_other else in_words(error)
        # An OSError names its file itself.
        place = "" if isinstance(error, OSError) else f"{file}: "
        stayed = f"{len(imported.entered)} of its checkpoints were entered before that, and stay"
        told = stayed if imported.entered else "nothing of it was entered"
        raise StoreFault(f"{place}{why}; {told}") from error
    return imported


def _in_pieces(file: IO[bytes]) -> Any:
    """Return a file that gives no more at once than a piece: tarfile reads some heads whole."""

    def read(n_bytes: int) -> bytes:
        if not 0 <= n_bytes <= _CHUNK_BYTES:
            raise ValueError("a head of such a size")
        return file.read(n_bytes)

    return SimpleNamespace(read=read, seek=file.seek, tell=file.tell)


def entered_as(
    record: Checkpoint, temporary_name: str, namespace: Namespace, found: StateFile
) -> Checkpoint:
    """Return the checkpoint that this store makes of another store's *record* and its file."""
    now = time.time()
    return replace(
        record,
        id=id_of(temporary_name),
        namespace=namespace,
        n_tokens=len(found.tokens),
        restore_points=found.restore_points,
        has_every_position=found.has_every_position,
        file_name=final_name_of(temporary_name),
        size_bytes=found.size_bytes,
        created_at=now,
        last_used_at=now,
        is_pinned=False,
        n_restores=0,
        parts=record.content,
        verified_at=now,
        ancestors=(),
    )


def _open(tar: tarfile.TarFile, head: tarfile.TarInfo | None) -> IO[bytes]:
    file = tar.extractfile(head) if head is not None and head.isreg() else None
    if file is None:
        raise StoreFault("it is not what `export` writes, or is cut short: a state is missing")
    return file


def _enter(
    store: StoreDirectory,
    there: list[Checkpoint],
    record: Checkpoint,
    owner: Owner,
    state: IO[bytes],
) -> Checkpoint | None:
    """Enter a checkpoint; None if a checkpoint in *there* has the same content, and its file exists.

    Raises StoreFault for a tenant of another secret, whose states no request would find here.
    """
    if is_of_other_secret(store.secret, owner.tenant):
        raise StoreFault(
            f"a state is of an API key of another directory: put {SECRET_NAME} from there into "
            f"{store.files.directory} before any key is used here"
        )
    before = namespace_of(store.index, owner), record.content
    same = [c for c in there if (c.namespace, c.content) == before]
    if any(store.files.size_bytes(c.file_name) == c.size_bytes for c in same):
        return None
    free_bytes, reserve_bytes = store.files.free_bytes(), store.files.reserve_bytes()
    if record.size_bytes > free_bytes - reserve_bytes:
        needs = f"a state is {record.size_bytes:,} bytes, {reserve_bytes:,} must stay free"
        raise StoreFault(f"there is no room for it: {free_bytes:,} bytes are free, {needs}")
    name = store.files.new_temporary_name()
    try:
        with store.files.path(name).open("xb") as target:
            shutil.copyfileobj(state, target, _CHUNK_BYTES)
        if not store.files.is_intact(name, record.content):
            raise StoreFault("a state in it is damaged")
        found = read_state_file(store.files.path(name))
        for dead in same:
            store.remove(dead)
        # Only now: a refused file must not introduce its model to the store.
        namespace = introduce(store.index, owner)
        entered = entered_as(record, name, namespace, found)
        entered = replace(entered, is_pinned=any(dead.is_pinned for dead in same), shared_id="")
        store.commit((entered, found.tokens, hash_prefixes(namespace, found.tokens)))
        return entered
    except StateFileMalformed as error:
        raise StoreFault(f"a state in it has another format: {error}") from error
    finally:
        store.files.remove(name)
