"""Checkpoints as one file, from one store to another.

Owns the layout of the file (docs/storage-format.md): a tar of a manifest, then the tokens and the state of
each checkpoint, so that the file can be read as it comes. Nothing in a file is believed: a state must have
its checksums and hold the tokens that it is entered for, since it will be restored for them.
"""

import io
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import msgspec

from proxy.core.model import Checkpoint
from proxy.core.tokens import TokenIds, hash_prefixes, tokens_from_bytes
from proxy.errors import CacheFault, StateFileMalformed, StoreFault
from proxy.llama.state_file import read_state_file
from proxy.store.directory import LOCK_NAME, StoreDirectory
from proxy.store.files import final_name_of, id_of
from proxy.store.known_models import Owner, introduce, knows_models, namespace_of, owners
from proxy.store.offline import Note

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_CHUNK_BYTES = 4 << 20


class BundleRefused(CacheFault):
    """A file cannot be imported; the message says why."""


class Manifest(msgspec.Struct, frozen=True):
    """What lies in a file of checkpoints, and whose states they are."""

    format: int
    owner: Owner
    checkpoints: tuple[Checkpoint, ...]


def _member_names(checkpoint: Checkpoint) -> tuple[str, str]:
    """Return the names of a checkpoint's tokens and of its state in the file."""
    return f"{checkpoint.id:016x}.tokens", f"{checkpoint.id:016x}.state"


# Writing checkpoints of one namespace into a file.


def export_checkpoints(
    store: StoreDirectory, checkpoints: Sequence[Checkpoint], file: Path, note: Note
) -> None:
    """Write *checkpoints* to *file*, which appears when it is whole; raises StoreFault or OSError.

    What *file* was is replaced, unless it is the store's own or no regular file.
    """
    _require_replaceable(store, file)
    manifest = Manifest(FORMAT_VERSION, _owner_of(store, checkpoints), tuple(checkpoints))
    # A file of its own, mode 0600 from the first byte: one that lies there may be open to others.
    descriptor, partial = tempfile.mkstemp(prefix=".export-", suffix=".part", dir=file.parent)
    try:
        with os.fdopen(descriptor, "wb") as output:
            with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as tar:
                _add(tar, MANIFEST, msgspec.json.encode(manifest))
                for checkpoint in checkpoints:
                    _write(tar, store, checkpoint)
                    note(checkpoint.size_bytes)
            output.flush()
            os.fsync(output.fileno())
        Path(partial).replace(file)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def _require_replaceable(store: StoreDirectory, file: Path) -> None:
    """Raise StoreFault if a file in the place of *file* would cost more than what it says."""
    directory, parent = store.files.directory.resolve(), file.parent.resolve()
    is_in_store = parent == directory and (file.name.startswith("lpc-") or file.name == LOCK_NAME)
    if is_in_store or parent == directory / "index":
        raise StoreFault(f"{file} is a name of the store's own files: choose another")
    if file.exists() and not file.is_file():
        raise StoreFault(f"{file} is no regular file: choose another")


def _owner_of(store: StoreDirectory, checkpoints: Sequence[Checkpoint]) -> Owner:
    namespaces = {checkpoint.namespace for checkpoint in checkpoints}
    if len(namespaces) != 1:
        raise StoreFault("a file holds checkpoints of one namespace: choose those of one")
    owner = dict(owners(store.index)).get(namespaces.pop())
    if owner is None:
        raise StoreFault("the store does not know any more which model these checkpoints are of")
    return owner


def _write(tar: tarfile.TarFile, store: StoreDirectory, checkpoint: Checkpoint) -> None:
    tokens_name, state_name = _member_names(checkpoint)
    tokens, path = store.index.tokens(checkpoint.id), store.files.path(checkpoint.file_name)
    if tokens is None:
        raise StoreFault(f"the tokens of checkpoint {checkpoint.id:016x} are gone: run check")
    _add(tar, tokens_name, tokens.tobytes())
    if not store.files.is_intact(checkpoint.file_name, checkpoint.content):
        raise StoreFault(f"{path} is not what was saved: run check")
    with path.open("rb") as state:
        tar.addfile(_member(state_name, checkpoint.size_bytes), state)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    tar.addfile(_member(name, len(content)), io.BytesIO(content))


def _member(name: str, n_bytes: int) -> tarfile.TarInfo:
    """Return the head of a file in the tar; it tells nothing about who made it."""
    head = tarfile.TarInfo(name)
    head.size, head.mode = n_bytes, 0o600
    return head


# Entering the checkpoints of a file into a store.


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of the checkpoints in a file."""

    entered: tuple[Checkpoint, ...]
    n_already_there: int
    is_new_model: bool


def import_checkpoints(
    store: StoreDirectory,
    file: Path,
    note: Note,
    *,
    min_free_bytes: int,
    may_be_other_model: bool = False,
) -> Imported:
    """Enter the checkpoints of *file*; BundleRefused and StoreFault say how many were entered before.

    A model that this store has not met is refused if it knows others, unless *may_be_other_model*. So is a
    file that would leave less than *min_free_bytes* on the disk. What was entered before a fault stays:
    each checkpoint is whole by itself.
    """
    entered: list[Checkpoint] = []
    try:
        with tarfile.open(file, "r:") as tar:
            manifest = _read_manifest(tar)
            is_new = namespace_of(store.index, manifest.owner) is None
            if is_new and not may_be_other_model and knows_models(store.index):
                raise BundleRefused(
                    "it is of another model, quantization, adapter or slot file version than those "
                    "that this directory was used with, or its model answers differently here"
                )
            # Read once: nobody else writes while the directory is locked.
            there = store.checkpoints()
            _require_free_space(store, there, manifest, min_free_bytes)
            for record in manifest.checkpoints:
                if checkpoint := _enter(store, there, manifest.owner, record, tar):
                    entered.append(checkpoint)
                    there.append(checkpoint)
                note(record.size_bytes)
    except (tarfile.TarError, BundleRefused, StoreFault, OSError) as error:
        is_refused = isinstance(error, tarfile.TarError | BundleRefused)
        why = "it is not what `export` writes: " if isinstance(error, tarfile.TarError) else ""
        stayed = f"{len(entered)} of its checkpoints were entered before that, and stay"
        told = f"{why}{error}; {stayed if entered else 'nothing of it was entered'}"
        raise (BundleRefused if is_refused else StoreFault)(told) from error
    return Imported(tuple(entered), len(manifest.checkpoints) - len(entered), is_new)


def _read_manifest(tar: tarfile.TarFile) -> Manifest:
    try:
        manifest = msgspec.json.decode(_next(tar, MANIFEST).read(), type=Manifest)
    except msgspec.DecodeError as error:
        raise BundleRefused(f"its manifest cannot be read: {error}") from error
    if manifest.format != FORMAT_VERSION:
        raise BundleRefused(f"it has format {manifest.format}, this version reads {FORMAT_VERSION}")
    return manifest


def _next(tar: tarfile.TarFile, name: str, n_bytes: int | None = None) -> IO[bytes]:
    head = tar.next()
    file = tar.extractfile(head) if head and head.name == name and head.isreg() else None
    if head is None or file is None:
        raise BundleRefused(f"it is not what `export` writes: {name} is missing")
    if n_bytes is not None and head.size != n_bytes:
        raise BundleRefused("a state in it is damaged")
    return file


def _require_free_space(
    store: StoreDirectory, there: list[Checkpoint], manifest: Manifest, min_free_bytes: int
) -> None:
    namespace = namespace_of(store.index, manifest.owner)
    ours = [c for c in there if c.namespace == namespace]
    kept = {checkpoint.content for checkpoint in ours if store.has_file(checkpoint)}
    missing = [record for record in manifest.checkpoints if record.content not in kept]
    needed_bytes = sum(record.size_bytes for record in missing)
    free_bytes = store.files.free_bytes()
    if missing and needed_bytes > free_bytes - min_free_bytes:
        raise BundleRefused(
            f"there is no room for it: its states are {needed_bytes:,} bytes, {free_bytes:,} are free in "
            f"{store.files.directory}, and {min_free_bytes:,} are to stay free"
        )


def _enter(
    store: StoreDirectory,
    there: list[Checkpoint],
    owner: Owner,
    record: Checkpoint,
    tar: tarfile.TarFile,
) -> Checkpoint | None:
    """Enter the next checkpoint of the tar; None if one of those *there* has the same tokens."""
    tokens_name, state_name = _member_names(record)
    try:
        tokens = tokens_from_bytes(_next(tar, tokens_name).read())
    except ValueError as error:
        raise BundleRefused(f"{tokens_name}: {error}") from error
    state = _next(tar, state_name, record.size_bytes)
    before = namespace_of(store.index, owner), len(tokens)
    same = [c for c in there if (c.namespace, c.n_tokens) == before]
    same = [c for c in same if store.index.tokens(c.id) == tokens]
    if any(store.has_file(checkpoint) for checkpoint in same):
        return None
    name = store.files.new_temporary_name()
    try:
        with store.files.path(name).open("xb") as target:
            shutil.copyfileobj(state, target, _CHUNK_BYTES)
        if not store.files.is_intact(name, record.content):
            raise BundleRefused("a state in it is damaged")
        entered = _as_entered(store, name, record, tokens)
        for dead in same:
            store.remove(dead)
        # Only now: a file that is refused must not leave a directory that knows its model.
        namespace, is_pinned = introduce(store.index, owner), any(dead.is_pinned for dead in same)
        entered = replace(entered, namespace=namespace, is_pinned=is_pinned)
        store.commit(entered, tokens, hash_prefixes(namespace, tokens))
        return entered
    finally:
        store.files.remove(name)


def _as_entered(
    store: StoreDirectory, name: str, record: Checkpoint, tokens: TokenIds
) -> Checkpoint:
    """Return the record of a file that is to be entered, as far as the file itself bears it out."""
    try:
        state = read_state_file(store.files.path(name))
    except StateFileMalformed as error:
        raise BundleRefused(f"a state in it is none: {error}") from error
    if state.tokens != tokens or not tokens:
        raise BundleRefused("a state in it holds other tokens than it says")
    now = time.time()
    return Checkpoint(
        id=id_of(name),
        namespace=record.namespace,
        kind=record.kind,
        n_tokens=len(tokens),
        restore_points=state.restore_points,
        has_every_position=state.has_every_position,
        file_name=final_name_of(name),
        size_bytes=state.size_bytes,
        created_at=now,
        last_used_at=now,
        header=record.header,
        turn_start=record.turn_start,
        n_prompt=record.n_prompt,
        marks=record.marks,
        family=record.family,
        parts=record.content,
        verified_at=now,
    )
