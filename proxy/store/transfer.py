"""Checkpoints in one file, exported from one store and imported into another.

Owns the layout of the file (docs/storage-format.md): a tar of records and states as they lie in the store.
Each record comes before its state, so that the file can be read as a stream. A file is not trusted: a state
must have its checksums, and is entered with the tokens that it holds.
"""

import io
import os
import shutil
import tarfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_hex
from typing import IO

from proxy.core.model import Checkpoint, is_of_other_secret
from proxy.core.tokens import Namespace, hash_prefixes
from proxy.errors import CacheFault, StateFileMalformed, StoreFault, in_words
from proxy.llama.state_file import StateFile, read_state_file
from proxy.store.directory import (
    LOCK_NAME,
    MOST_RECORD_BYTES,
    SECRET_NAME,
    Sidecar,
    StoreDirectory,
    decode_sidecar,
    encode_sidecar,
)
from proxy.store.files import StateFiles, final_name_of, id_of, replacing
from proxy.store.known_models import Owner, introduce, knows_models, namespace_of
from proxy.store.offline import Note

_CHUNK_BYTES = 4 << 20


class BundleRefused(CacheFault):
    """A file cannot be imported; the message says why."""


def read_records(files: StateFiles) -> list[Sidecar]:
    """Return the records beside the states of a directory, also while a proxy uses it; raises StoreFault.

    A state without an intact record is left out: `check --fix` writes its record again.
    """
    records = []
    for name in sorted(files.names()):
        with suppress(FileNotFoundError):  # the proxy has deleted it meanwhile
            if name.endswith(".meta") and (record := decode_sidecar(files.path(name).read_bytes())):
                records.append(record)
    if not records:
        raise StoreFault(f"there is no store in {files.directory}: no proxy has ever used it")
    return records


def export_checkpoints(
    files: StateFiles, records: Sequence[Sidecar], file: Path, note: Note
) -> None:
    """Write checkpoints to *file*, which appears when it is whole; raises StoreFault or OSError.

    An existing *file* is replaced; one of the store's own, or one that is no regular file, is refused.
    """
    _require_replaceable(files, file)
    with replacing(file, file.with_name(f".export-{token_hex(8)}.part")) as output:
        with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for record in records:
                _write(tar, files, record)
                note(record.checkpoint.size_bytes)


def _require_replaceable(files: StateFiles, file: Path) -> None:
    """Raise StoreFault if *file* is one of the store's own files, or no regular file."""
    directory, parent = files.directory.resolve(), file.parent.resolve()
    is_ours = file.name.startswith("lpc-") or file.name in (LOCK_NAME, SECRET_NAME)
    is_in_store = is_ours and parent == directory
    if is_in_store or parent == directory / "index":
        raise StoreFault(f"{file} is a name of the store's own files: choose another")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise StoreFault(f"{parent} is no directory that this user may write to")
    if file.exists() and not file.is_file():
        raise StoreFault(f"{file} is no regular file: choose another")


def _write(tar: tarfile.TarFile, files: StateFiles, sidecar: Sidecar) -> None:
    name = sidecar.checkpoint.file_name
    if sidecar.owner is None:
        raise StoreFault(f"the store does not know any more which model {name} is of")
    if not files.is_intact(name, sidecar.checkpoint.content):
        raise StoreFault(f"{files.path(name)} is not what was saved: run check")
    record = encode_sidecar(sidecar)
    _add(tar, files.sidecar_name(name), io.BytesIO(record), len(record))
    with files.path(name).open("rb") as state:
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


def import_checkpoints(
    store: StoreDirectory,
    file: Path,
    note: Note,
    *,
    min_free_bytes: int,
    may_be_other_model: bool = False,
) -> Imported:
    """Enter the checkpoints of *file*; BundleRefused and StoreFault say how many were entered before.

    If the store knows other models, a new model is refused unless *may_be_other_model*. A state that would
    leave less than *min_free_bytes* on the disk is refused. Checkpoints entered before a fault stay: each
    is complete by itself.
    """
    imported = Imported()
    # Read once: no other process writes while the directory is locked.
    there, may_be_new = store.checkpoints(), may_be_other_model or not knows_models(store.index)
    try:
        with tarfile.open(file, "r:") as tar:
            while (head := tar.next()) is not None:
                sidecar = decode_sidecar(_open(tar, head).read(MOST_RECORD_BYTES))
                if sidecar is None or sidecar.owner is None:
                    raise BundleRefused(f"it is not what `export` writes: {head.name} is no record")
                owner = sidecar.owner
                imported.is_new_model |= _is_new(store, owner, may_be_new=may_be_new)
                state = _open(tar, tar.next())
                entered = _enter(store, there, sidecar.checkpoint, owner, state, min_free_bytes)
                if entered is None:
                    imported.n_already_there += 1
                else:
                    imported.entered.append(entered)
                    there.append(entered)
                note(sidecar.checkpoint.size_bytes)
    except (tarfile.TarError, BundleRefused, StoreFault, OSError) as error:
        is_refused = isinstance(error, tarfile.TarError | BundleRefused)
        why = "it is not what `export` writes" if isinstance(error, tarfile.TarError) else ""
        stayed = f"{len(imported.entered)} of its checkpoints were entered before that, and stay"
        told = f"{why or in_words(error)}; {stayed if imported.entered else 'nothing of it was entered'}"
        raise (BundleRefused if is_refused else StoreFault)(told) from error
    return imported


def entered_as(
    record: Checkpoint, temporary_name: str, namespace: Namespace, found: StateFile
) -> Checkpoint:
    """Return the checkpoint that another store's *record* becomes here, with what its file tells."""
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
        quarantine=None,
        parts=record.content,
        verified_at=now,
        ancestors=(),
    )


def _open(tar: tarfile.TarFile, head: tarfile.TarInfo | None) -> IO[bytes]:
    file = tar.extractfile(head) if head is not None and head.isreg() else None
    if file is None:
        raise BundleRefused("it is not what `export` writes: a state is missing")
    return file


def _is_new(store: StoreDirectory, owner: Owner, *, may_be_new: bool) -> bool:
    """Return whether a model is new to the store; raises BundleRefused unless it *may_be_new*.

    Also raises BundleRefused for a tenant of another secret, whose states no request would find here.
    """
    if is_of_other_secret(store.secret, owner.tenant):
        raise BundleRefused(
            f"a state is of an API key of another directory: put {SECRET_NAME} from there into "
            f"{store.files.directory} before any key is used here"
        )
    is_new = namespace_of(store.index, owner) is None
    if is_new and not may_be_new:
        raise BundleRefused(
            "it is of another model, quantization, adapter or slot file version than those that this "
            "directory was used with, or its model answers differently here"
        )
    return is_new


def _enter(
    store: StoreDirectory,
    there: list[Checkpoint],
    record: Checkpoint,
    owner: Owner,
    state: IO[bytes],
    min_free_bytes: int,
) -> Checkpoint | None:
    """Enter a checkpoint; None if a checkpoint in *there* has the same content, and its file exists."""
    before = namespace_of(store.index, owner), record.content
    same = [c for c in there if (c.namespace, c.content) == before]
    if any(store.has_file(checkpoint) for checkpoint in same):
        return None
    free_bytes = store.files.free_bytes()
    if record.size_bytes > free_bytes - min_free_bytes:
        raise BundleRefused(
            f"there is no room for it: a state is {record.size_bytes:,} bytes, {free_bytes:,} are free in "
            f"{store.files.directory}, and {min_free_bytes:,} are to stay free"
        )
    name = store.files.new_temporary_name()
    try:
        with store.files.path(name).open("xb") as target:
            shutil.copyfileobj(state, target, _CHUNK_BYTES)
        if not store.files.is_intact(name, record.content):
            raise BundleRefused("a state in it is damaged")
        found = read_state_file(store.files.path(name))
        for dead in same:
            store.remove(dead)
        # Only now: a refused file must not introduce its model to the store.
        namespace = introduce(store.index, owner)
        entered = replace(
            entered_as(record, name, namespace, found),
            is_pinned=any(dead.is_pinned for dead in same),
            shared_id="",
        )
        store.commit(entered, found.tokens, hash_prefixes(namespace, found.tokens))
        return entered
    except StateFileMalformed as error:
        raise BundleRefused(f"a state in it is none: {error}") from error
    finally:
        store.files.remove(name)
