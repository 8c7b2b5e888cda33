"""Checkpoints as one file, from one store to another."""

import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import msgspec

from proxy.core.model import Checkpoint, Cuts
from proxy.core.tokens import Namespace, TokenIds, hash_prefixes, tokens_from_bytes, tokens_to_bytes
from proxy.errors import CacheFault, StateFileMalformed, StoreFault
from proxy.llama.state_file import StateFile, read_state_file
from proxy.store.known_models import Owner, introduce, knows_models, namespace_of, owners
from proxy.store.offline import OfflineStore
from proxy.store.opening import LOCK_NAME
from proxy.store.writing import NewState

# The file that checkpoints are carried in from one store to another: a tar of a manifest and states.
#
# Owns: its layout (docs/storage-format.md). The manifest comes first, then the tokens and the state of
# each checkpoint in its order, so that a file can be read as it comes.


FORMAT_VERSION = 1
MANIFEST = "manifest.json"

Note = Callable[[int], object]
"""Is told of each bytes that were copied."""


class BundleRefused(CacheFault):
    """A file cannot be imported; the message says why."""


class Manifest(msgspec.Struct, frozen=True):
    """What lies in a file of checkpoints, and whose states they are."""

    format: int
    owner: Owner
    checkpoints: tuple[Checkpoint, ...]


def member_names(checkpoint: Checkpoint) -> tuple[str, str]:
    """Return the names of a checkpoint's tokens and of its state in the file."""
    return f"{checkpoint.id:016x}.tokens", f"{checkpoint.id:016x}.state"


def member(name: str, n_bytes: int) -> tarfile.TarInfo:
    """Return the head of a file in the tar that tells nothing about who made it."""
    head = tarfile.TarInfo(name)
    head.size, head.mode = n_bytes, 0o600
    return head


class Noted:
    """Reads from a file and tells how much."""

    def __init__(self, file: IO[bytes], note: Note) -> None:
        self._file = file
        self._note = note

    def read(self, n_bytes: int = -1) -> bytes:
        chunk = self._file.read(n_bytes)
        self._note(len(chunk))
        return chunk


# Writes checkpoints of one namespace into one file.


def export_checkpoints(
    store: OfflineStore, checkpoints: Sequence[Checkpoint], file: Path, note: Note
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
                _write(tar, store, manifest, note)
            output.flush()
            os.fsync(output.fileno())
        Path(partial).replace(file)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def _require_replaceable(store: OfflineStore, file: Path) -> None:
    """Raise StoreFault if a file in the place of *file* would cost more than what it says."""
    directory, parent = store.files.directory.resolve(), file.parent.resolve()
    is_in_store = parent == directory and (file.name.startswith("lpc-") or file.name == LOCK_NAME)
    if is_in_store or parent == directory / "index":
        raise StoreFault(f"{file} is a name of the store's own files: choose another")
    if file.exists() and not file.is_file():
        raise StoreFault(f"{file} is no regular file: choose another")


def _owner_of(store: OfflineStore, checkpoints: Sequence[Checkpoint]) -> Owner:
    namespaces = {checkpoint.namespace for checkpoint in checkpoints}
    if len(namespaces) != 1:
        raise StoreFault("a file holds checkpoints of one namespace: choose those of one")
    owner = dict(owners(store.index)).get(namespaces.pop())
    if owner is None:
        raise StoreFault("the store does not know any more which model these checkpoints are of")
    return owner


def _write(tar: tarfile.TarFile, store: OfflineStore, manifest: Manifest, note: Note) -> None:
    _add(tar, MANIFEST, msgspec.json.encode(manifest))
    for checkpoint in manifest.checkpoints:
        tokens_name, state_name = member_names(checkpoint)
        _add(tar, tokens_name, tokens_to_bytes(store.tokens(checkpoint)))
        path = store.files.path(checkpoint.file_name)
        if not store.files.is_intact(checkpoint.file_name, checkpoint.content):
            raise StoreFault(f"{path} is not what was saved: run check")
        with path.open("rb") as state:
            head = member(state_name, checkpoint.size_bytes)
            tar.addfile(head, cast(IO[bytes], Noted(state, note)))


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    tar.addfile(member(name, len(content)), io.BytesIO(content))


# Takes checkpoints out of a file into a store, if the model is the one that they are of.
#
# Nothing in the file is believed: a state must have its checksum and hold the tokens that it is entered
# for, since it would be restored for them.


_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of the checkpoints in a file."""

    entered: tuple[Checkpoint, ...]
    n_already_there: int
    is_new_model: bool


class Bundle:
    """An opened file of checkpoints."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        try:
            self.manifest = msgspec.json.decode(self._next(MANIFEST).read(), type=Manifest)
        except msgspec.DecodeError as error:
            raise BundleRefused(f"its manifest cannot be read: {error}") from error
        if self.manifest.format != FORMAT_VERSION:
            raise BundleRefused(
                f"it has format {self.manifest.format}, this version reads {FORMAT_VERSION}"
            )

    def states(self) -> Iterator[tuple[Checkpoint, TokenIds, IO[bytes]]]:
        """Yield each checkpoint with its tokens and the file of its state, which is to be read at once."""
        for checkpoint in self.manifest.checkpoints:
            tokens_name, state_name = member_names(checkpoint)
            try:
                tokens = tokens_from_bytes(self._next(tokens_name).read())
            except ValueError as error:
                raise BundleRefused(f"{tokens_name}: {error}") from error
            yield checkpoint, tokens, self._next(state_name, checkpoint.size_bytes)

    def _next(self, name: str, n_bytes: int | None = None) -> IO[bytes]:
        head = self._tar.next()
        file = self._tar.extractfile(head) if head and head.name == name and head.isreg() else None
        if head is None or file is None:
            raise BundleRefused(f"it is not what `export` writes: {name} is missing")
        if n_bytes is not None and head.size != n_bytes:
            raise BundleRefused("a state in it is damaged")
        return file


def import_checkpoints(
    store: OfflineStore,
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
            bundle = Bundle(tar)
            owner = bundle.manifest.owner
            is_new = namespace_of(store.index, owner) is None
            if is_new and not may_be_other_model:
                _require_no_other_model(store)
            _require_free_space(store, bundle.manifest, min_free_bytes)
            for state in bundle.states():
                entered += _enter(store, owner, *state, note)
    except tarfile.TarError as error:
        told = f"it is not what `export` writes: {error}; {_so_far(entered)}"
        raise BundleRefused(told) from error
    except BundleRefused as refusal:
        raise BundleRefused(f"{refusal}; {_so_far(entered)}") from refusal
    except (StoreFault, OSError) as fault:
        raise StoreFault(f"{fault}; {_so_far(entered)}") from fault
    n_already_there = len(bundle.manifest.checkpoints) - len(entered)
    return Imported(tuple(entered), n_already_there, is_new)


def _so_far(entered: list[Checkpoint]) -> str:
    if not entered:
        return "nothing of it was entered"
    n_entered = len(entered)
    return f"{n_entered} checkpoint{'s' if n_entered > 1 else ''} before that stayed entered"


def _require_no_other_model(store: OfflineStore) -> None:
    if knows_models(store.index):
        raise BundleRefused(
            "it is of another model, quantization, adapter or slot file version than those "
            "that this directory was used with, or its model answers differently here"
        )


def _require_free_space(store: OfflineStore, manifest: Manifest, min_free_bytes: int) -> None:
    namespace = namespace_of(store.index, manifest.owner)
    there = {
        checkpoint.content
        for checkpoint in store.checkpoints()
        if checkpoint.namespace == namespace and _has_file(store, checkpoint)
    }
    missing = [record for record in manifest.checkpoints if record.content not in there]
    needed_bytes = sum(record.size_bytes for record in missing)
    free_bytes = store.files.free_bytes()
    if missing and needed_bytes > free_bytes - min_free_bytes:
        raise BundleRefused(
            f"there is no room for it: its states are {needed_bytes:,} bytes, {free_bytes:,} are free in "
            f"{store.files.directory}, and {min_free_bytes:,} are to stay free"
        )


def _enter(
    store: OfflineStore,
    owner: Owner,
    record: Checkpoint,
    tokens: TokenIds,
    state: IO[bytes],
    note: Note,
) -> list[Checkpoint]:
    """Enter one checkpoint and return it; nothing if the store has one of the same tokens."""
    same = _of_same_tokens(store, owner, tokens)
    if any(_has_file(store, checkpoint) for checkpoint in same):
        note(record.size_bytes)
        return []
    name = store.files.new_temporary_name()
    try:
        with store.files.path(name).open("xb") as target:
            shutil.copyfileobj(Noted(state, note), target, _CHUNK_BYTES)
        if not store.files.is_intact(name, record.content):
            raise BundleRefused("a state in it is damaged")
        verified = _verified(store, name, tokens)
        for dead in same:
            store.remove(dead)
        # Only now: a file that is refused must not leave a directory that knows its model.
        namespace = introduce(store.index, owner)
        entered = store.commit(_new_state(name, namespace, record, verified))
        if any(dead.is_pinned for dead in same):
            store.pin(entered, is_pinned=True)
        return [entered]
    finally:
        store.files.remove(name)


def _of_same_tokens(store: OfflineStore, owner: Owner, tokens: TokenIds) -> list[Checkpoint]:
    namespace = namespace_of(store.index, owner)
    if namespace is None:
        return []
    reaching = store.index.reaching(hash_prefixes(namespace, tokens)[-1:])
    ids = {found for found in reaching if store.index.tokens(found) == tokens}
    return [checkpoint for checkpoint in store.checkpoints() if checkpoint.id in ids] if ids else []


def _has_file(store: OfflineStore, checkpoint: Checkpoint) -> bool:
    return store.files.size_bytes(checkpoint.file_name) == checkpoint.size_bytes


def _verified(store: OfflineStore, name: str, tokens: TokenIds) -> StateFile:
    """Return what a state file holds, if it holds these tokens."""
    try:
        state = read_state_file(store.files.path(name))
    except StateFileMalformed as error:
        raise BundleRefused(f"a state in it is none: {error}") from error
    if state.tokens != tokens or not tokens:
        raise BundleRefused("a state in it holds other tokens than it says")
    return state


def _new_state(name: str, namespace: Namespace, record: Checkpoint, state: StateFile) -> NewState:
    """Return what is to be committed, as far as the state file itself bears it out."""
    return NewState(
        name,
        namespace,
        record.kind,
        state.tokens,
        state.restore_points,
        state.has_every_position,
        record.content,
        cuts=Cuts(header=record.header, turn_start=record.turn_start),
        n_prompt=record.n_prompt,
        marks=record.marks,
        family=record.family,
    )
